//! Ctrl-C where it should not just end the program.

use crate::failure::{Exit, Failure};
use std::{
    io::{self, Write},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// What a shell takes for a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// Whether Ctrl-C was pressed, as a question between two steps of something long.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on Ctrl-C is remembered instead. Pressed again before somebody has asked, it ends
    /// the program: a step may be long, and whoever waits should not have to.
    pub(crate) fn watch() -> Result<Self, Failure> {
        let interrupt = Self::default();
        let pressed = interrupt.clone();
        on_interrupt(move || {
            if pressed.0.swap(true, Ordering::Relaxed) {
                process::exit(INTERRUPTED);
            }
        })?;
        Ok(interrupt)
    }

    /// Whether it was pressed since somebody asked last.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Says `words` on standard error when Ctrl-C ends the program.
pub(crate) fn say_at_interrupt(words: String) -> Result<(), Failure> {
    on_interrupt(move || {
        // Standard error may be closed; the program ends all the same.
        let _ = writeln!(io::stderr(), "\n{words}");
        process::exit(INTERRUPTED);
    })
}

fn on_interrupt(act: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    ctrlc::set_handler(act)
        .map_err(|e| Failure::new(Exit::Failed, anyhow::Error::new(e).context("watching for Ctrl-C")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_press_is_told_once() {
        let interrupt = Interrupt::default();
        assert!(!interrupt.take());
        interrupt.0.store(true, Ordering::Relaxed);
        assert!(interrupt.clone().take() && !interrupt.take());
    }
}
