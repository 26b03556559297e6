//! The `fracbit` command line.
//!
//! Every command goes through three stages: clap parses the arguments, a pure step resolves them to
//! plain options, and only then anything is opened, computed or written. Results go to standard
//! output, and with `--json` nothing else does; progress, notes and errors go to standard error.
//! Two environment variables are read: `FRACBIT_LOG` here ([`logging`]) and `FRACBIT_ISA` in the
//! kernels.

mod args;
mod cli;
mod commands;
mod context;
mod failure;
mod files;
mod generate;
mod gpu;
mod interrupt;
mod logging;
mod planning;
mod progress;
mod structure;
mod table;

use clap::Parser;
use context::Context;
use failure::{Exit, Failure};
use std::{io, process::ExitCode};

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too; a reader that has gone away is no reason to
            // complain.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { ExitCode::SUCCESS };
        }
    };
    let mut context = Context::new(cli.global.quiet);
    let outcome = start(&cli.global, &context).and_then(|()| commands::run(&cli.command, &mut context));
    if outcome.is_ok() {
        context.progress.finish();
    } else {
        context.progress.abandon();
    }
    match outcome.and_then(|exit| context.out.finish().map(|()| exit)) {
        Ok(exit) => exit.into(),
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(Failure::Because(reason)) => {
            let _ = reason.print(&mut io::stderr().lock());
            reason.exit.into()
        }
    }
}

/// What has to happen once per process.
fn start(global: &cli::Global, context: &Context) -> Result<(), Failure> {
    logging::start(global.quiet, &context.progress);
    if let Some(threads) = global.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| {
            Failure::new(Exit::Failed, anyhow::Error::new(e).context("starting the thread pool"))
        })?;
    }
    Ok(())
}
