//! `fracbit completions`.

use crate::{cli::Cli, context::Context, failure::Failure};
use clap::{Args, CommandFactory, ValueEnum};

const AFTER: &str = "\
Examples:
  fracbit completions bash > ~/.local/share/bash-completion/completions/fracbit
  fracbit completions zsh > ~/.zfunc/_fracbit                   # a directory of your fpath
  fracbit completions fish > ~/.config/fish/completions/fracbit.fish";

/// Print what makes a shell complete commands and flags.
///
/// Writes a script to standard output. Where a shell looks for it depends on the shell; the
/// examples are the usual places.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub(crate) fn run(args: &CompletionsArgs, context: &mut Context) -> Result<(), Failure> {
    let shell = match args.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    // The generator panics where a writer fails, and a reader may go away.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "fracbit", &mut script);
    context.out.stream(&String::from_utf8_lossy(&script))
}
