//! Long work for an interpreter that goes on meanwhile.
//!
//! The work runs on a thread of its own. The thread that called waits with the interpreter's lock
//! released, and takes it every [`TICK`] to look for signals (Ctrl-C) and to tell how far the work
//! is, so that a callback always runs on the thread of its caller. When a handler or the callback
//! raises, the work is told to stop: its next report of progress unwinds it, past every destructor
//! and without a message, as rust-analyzer cancels queries. What it had written under a temporary
//! name is then removed or kept for `resume`, as after any failure.

use crate::errors::{Refused, raise};
use fracbit::Progress;
use fracbit_cli::Listener;
use pyo3::{prelude::*, types::PyAny};
use std::{
    panic::resume_unwind,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Between two looks at signals and progress.
const TICK: Duration = Duration::from_millis(50);

/// What unwinds work that is to stop.
struct Stopped;

/// What the two threads share.
#[derive(Default)]
struct Watch {
    stop: AtomicBool,
    seen: Mutex<Seen>,
    ended: (Mutex<bool>, Condvar),
}

/// How far the work is.
#[derive(Default)]
struct Seen {
    stage: Option<String>,
    done: u64,
    total: u64,
    notes: Vec<String>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    fn go_on(&self) {
        if self.stop.load(Ordering::Relaxed) {
            resume_unwind(Box::new(Stopped));
        }
    }

    /// Waits for the end of the work, a tick at most; whether it came.
    fn wait(&self) -> bool {
        let (ended, bell) = &self.ended;
        *bell
            .wait_timeout_while(locked(ended), TICK, |ended| !*ended)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Calls `told` with what is new.
    fn tell(&self, told: &Bound<'_, PyAny>) -> PyResult<()> {
        let (stage, done, total, notes) = {
            let mut seen = locked(&self.seen);
            (seen.stage.clone(), seen.done, seen.total, std::mem::take(&mut seen.notes))
        };
        for note in notes {
            told.call_method1("note", (note,))?;
        }
        match stage {
            Some(stage) => told.call_method1("advance", (done, total, stage)).map(drop),
            None => Ok(()),
        }
    }
}

impl Progress for Watch {
    fn stage(&self, name: &str, total: u64) {
        self.go_on();
        let mut seen = locked(&self.seen);
        (seen.stage, seen.done, seen.total) = (Some(name.to_owned()), 0, total);
    }

    fn advance(&self, units: u64) {
        self.go_on();
        locked(&self.seen).done += units;
    }

    fn note(&self, line: &str) {
        self.go_on();
        locked(&self.seen).notes.push(line.to_owned());
    }
}

/// Tells that the work has ended, however it did.
struct End<'a>(&'a Watch);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *locked(&self.0.ended.0) = true;
        self.0.ended.1.notify_all();
    }
}

/// Runs `work` with the interpreter's lock released. `progress` is what the caller gave: `None`,
/// `True` or a function.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(Listener) -> Refused<T> + Send,
) -> PyResult<T> {
    let told = py.import("fracbit._progress")?.call_method1("watcher", (progress,))?;
    let watch = Arc::new(Watch::default());
    let listener: Listener = Arc::clone(&watch) as Listener;
    let (ended, outcome) = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let _end = End(&watch);
            work(listener)
        });
        let mut told_all = Ok(());
        loop {
            let ended = py.detach(|| watch.wait());
            if told_all.is_ok() {
                told_all = py.check_signals().and_then(|()| watch.tell(&told));
                watch.stop.store(told_all.is_err(), Ordering::Relaxed);
            }
            if ended {
                return (py.detach(|| worker.join()), told_all);
            }
        }
    });
    // The bar is closed in any case; what was raised first counts.
    outcome.and(told.call_method0("close").map(drop))?;
    match ended {
        Ok(result) => result.map_err(|refusal| raise(py, &refusal)),
        Err(panic) => resume_unwind(panic),
    }
}
