//! What every command gets: a place for results and a place for progress.

use crate::{Cluster, Listener, failure::Failure, progress::Reporter};
use fracbit::Dealt;
use serde::Serialize;
use std::{
    io::{self, BufWriter, Write},
    sync::{Arc, Mutex, PoisonError},
};

/// What every command gets.
pub(crate) struct Context {
    /// Results.
    pub(crate) out: Out,
    /// Progress and notes.
    pub(crate) progress: Reporter,
    /// Who works for `--ray`.
    pub(crate) cluster: Option<Cluster>,
}

impl Context {
    pub(crate) fn new(quiet: bool) -> Self {
        Self {
            out: Out(BufWriter::new(Box::new(io::stdout()))),
            progress: Reporter::new(quiet),
            cluster: None,
        }
    }

    /// The cluster of an address.
    pub(crate) fn dealt(&self, address: &str) -> Result<Arc<dyn Dealt>, Failure> {
        let Some(cluster) = &self.cluster else {
            let rule = "is of the Python package, and this is the program alone".to_owned();
            let refused = Failure::from(fracbit::Error::Option { option: "--ray", rule });
            return Err(refused.hint("pip install 'fracbit[ray]' brings a `fracbit` that can"));
        };
        Ok(cluster(address))
    }

    /// For a program: results are kept, progress and notes go to `listener`.
    pub(crate) fn heard(listener: Listener) -> (Self, Kept) {
        let kept = Kept::default();
        let out = Out(BufWriter::new(Box::new(kept.clone())));
        (Self { out, progress: Reporter::to(listener), cluster: None }, kept)
    }
}

/// Results for a program.
#[derive(Clone, Default)]
pub(crate) struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    /// What was written.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard output. The one writer of results, so that a reader that goes away is noticed in one
/// way: as [`Failure::ClosedPipe`], by `?`.
pub(crate) struct Out(BufWriter<Box<dyn Write>>);

impl Out {
    /// One JSON document.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        serde_json::to_writer_pretty(&mut self.0, value).map_err(io::Error::from)?;
        Ok(writeln!(self.0)?)
    }

    /// Text that should be seen at once.
    pub(crate) fn stream(&mut self, text: &str) -> Result<(), Failure> {
        self.0.write_all(text.as_bytes())?;
        Ok(self.0.flush()?)
    }

    /// Nothing more comes.
    pub(crate) fn finish(&mut self) -> Result<(), Failure> {
        Ok(self.0.flush()?)
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_noticed() {
        let mut out = Out(BufWriter::new(Box::new(Gone)));
        assert!(matches!(out.stream("text"), Err(Failure::ClosedPipe)));
        let long = vec![0u8; 1 << 16];
        let mut out = Out(BufWriter::new(Box::new(Gone)));
        assert!(matches!(out.json(&long), Err(Failure::ClosedPipe)));
    }
}
