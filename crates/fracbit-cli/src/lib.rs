//! The `fracbit` command line.
//!
//! Every command goes through three stages: clap parses the arguments, a pure step resolves them to
//! plain options, and only then anything is opened, computed or written. Results go to standard
//! output, and with `--json` nothing else does; progress, notes and errors go to standard error.
//! Two environment variables are read: `FRACBIT_LOG` here (`logging`) and `FRACBIT_ISA` in the
//! kernels.
//!
//! It is a library, too, so that the Python package has the same commands with the same checks and
//! messages: [`main`] is the program, [`call`] one command for another program.

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
mod memory;
mod planning;
mod progress;
mod report;
mod sampling;
mod structure;
mod table;

pub use failure::{Exit, Refusal};
pub use generate::Prompt;

use clap::Parser;
use context::Context;
use failure::Failure;
use fracbit::{Dealt, Opened, Progress};
use fracbit_io::Tokenizer;
use fracbit_model::{SampleConfig, Sampler};
use std::{ffi::OsString, io, path::Path, sync::Arc};

/// Whom a command tells how far it is, in place of standard error.
pub type Listener = Arc<dyn Progress + Send + Sync>;

/// Who works for `--ray ADDRESS`, by the address.
pub type Cluster = Arc<dyn Fn(&str) -> Arc<dyn Dealt> + Send + Sync>;

/// Runs the program: `args` are those of the process, with its name.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Exit {
    main_with(args, None)
}

/// [`main`] where work can be dealt to a cluster.
pub fn main_with(args: impl IntoIterator<Item = OsString>, cluster: Option<Cluster>) -> Exit {
    let cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too; a reader that has gone away is no reason to
            // complain.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let mut context = Context { cluster, ..Context::new(cli.global.quiet) };
    let outcome = start(&cli.global, &context).and_then(|()| commands::run(&cli.command, &mut context));
    if outcome.is_ok() {
        context.progress.finish();
    } else {
        context.progress.abandon();
    }
    match outcome.and_then(|exit| context.out.finish().map(|()| exit)) {
        Ok(exit) => exit,
        Err(Failure::ClosedPipe) => Exit::Done,
        Err(Failure::Because(reason)) => {
            let _ = reason.print(&mut io::stderr().lock());
            reason.exit
        }
    }
}

/// What has to happen once per process.
fn start(global: &cli::Global, context: &Context) -> Result<(), Failure> {
    logging::start(global.quiet, &context.progress);
    if let Some(threads) = memory::threads(global.threads)? {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| {
            Failure::new(Exit::Failed, anyhow::Error::new(e).context("starting the thread pool"))
        })?;
    }
    Ok(())
}

/// Runs one command for a program: `args` follow the program's name, and what the command would
/// print is returned. Nothing of the process is touched: no log is started, and threads are those
/// of the pool that there is.
///
/// # Errors
/// What the command would print as an error, with the exit code that it would have.
pub fn call(args: impl IntoIterator<Item = OsString>, listener: Listener) -> Result<String, Refusal> {
    call_with(args, listener, None)
}

/// [`call`] where work can be dealt to a cluster.
///
/// # Errors
/// As for [`call`].
pub fn call_with(
    args: impl IntoIterator<Item = OsString>,
    listener: Listener,
    cluster: Option<Cluster>,
) -> Result<String, Refusal> {
    let name = OsString::from("fracbit");
    let cli = match cli::Cli::try_parse_from(std::iter::once(name).chain(args)) {
        Ok(cli) => cli,
        Err(help) if !help.use_stderr() => return Ok(help.render().to_string()),
        Err(error) => return Err(error.into()),
    };
    let (mut context, out) = Context::heard(listener);
    context.cluster = cluster;
    commands::run(&cli.command, &mut context)?;
    context.out.finish()?;
    drop(context);
    Ok(out.text())
}

/// Opens a model directory or a GGUF file as every command does.
///
/// # Errors
/// When it is none, or damaged; with the hint that the program gives.
pub fn open(model: &Path, listener: Listener) -> Result<Opened, Refusal> {
    Ok(files::open(model, &Context::heard(listener).0)?)
}

/// Tokens of a prompt for a model that was trained for `most` tokens, as `run` makes them.
///
/// # Errors
/// When there are none or too many, or the model has no chat template.
pub fn encode(tokenizer: &Tokenizer, prompt: Prompt<'_>, most: usize) -> Result<Vec<u32>, Refusal> {
    Ok(generate::encode(tokenizer, prompt, most)?)
}

/// A sampler for a text in the tokens of `tokenizer`, as the commands make it: repetitions that DRY
/// looks for end at its usual breakers.
///
/// # Errors
/// When a setting is outside its range.
pub fn sampler(config: SampleConfig, tokenizer: &Tokenizer) -> Result<Sampler, Refusal> {
    Ok(sampling::sampler(config, tokenizer)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Keeps what it hears.
    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Progress for Heard {
        fn stage(&self, name: &str, total: u64) {
            self.note(&format!("{name} {total}"));
        }

        fn advance(&self, units: u64) {
            self.note(&format!("+{units}"));
        }

        fn note(&self, line: &str) {
            self.0.lock().expect("nobody panics").push(line.to_owned());
        }
    }

    fn called(line: &str) -> (Result<String, Refusal>, Vec<String>) {
        let heard = Arc::new(Heard::default());
        let result = call(line.split(' ').map(OsString::from), Arc::clone(&heard) as Listener);
        let lines = heard.0.lock().expect("nobody panics").clone();
        (result, lines)
    }

    #[test]
    fn a_program_gets_what_a_command_prints() {
        let (printed, heard) = called("distortion --scheme nuq-2 --scheme nuq-3 --weights 64 --json");
        assert!(printed.is_ok_and(|text| text.starts_with("[\n") && text.ends_with("]\n")));
        assert_eq!(heard, ["measuring distortion 2", "+1", "+1"]);
        assert!(called("plan --help").0.is_ok_and(|text| text.contains("Usage: fracbit plan")));
    }

    #[test]
    fn a_program_gets_errors_with_their_codes() {
        let refused = |line| called(line).0.expect_err("it is refused");
        let Refusal { exit, message } = refused("inspect no/model");
        assert_eq!(exit, Exit::BadInput);
        assert!(
            message.starts_with("model `no/model` should be") && message.contains("\nhint: "),
            "{message}"
        );
        let Refusal { exit, message } = refused("plan M --bits many");
        assert_eq!(exit, Exit::Usage);
        assert!(message.starts_with("invalid value 'many' for '--bits <B>'"), "{message}");
        assert!(!message.contains("--help") && !message.contains("Usage"), "{message}");
        assert!(refused("quantise").message.contains("quantize"), "what might have been meant is told");
    }
}
