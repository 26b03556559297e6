//! Logs to standard error, filtered by `FRACBIT_LOG`; the one place that reads it.

use crate::progress::Reporter;
use indicatif::MultiProgress;
use std::io::{self, IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// The variable.
const VARIABLE: &str = "FRACBIT_LOG";

/// Starts logging. A filter that does not parse is replaced by the default.
pub(crate) fn start(quiet: bool, progress: &Reporter) {
    let default = if quiet { "error" } else { "warn" };
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new(default));
    let bars = progress.bars();
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(move || AboveBars(bars.clone()));
    // Another subscriber can only be there in tests.
    let _ = logs.try_init();
}

/// Standard error, with the progress bar out of the way while a line is written.
struct AboveBars(MultiProgress);

impl Write for AboveBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
