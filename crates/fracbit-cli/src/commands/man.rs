//! `fracbit man`, for who packages the program; `cargo xtask man` calls it.

use crate::{
    cli::Cli,
    context::Context,
    failure::{Exit, Failure},
};
use clap::{Args, CommandFactory};
use fracbit::Progress;
use std::{fs, path::PathBuf};

/// Write manual pages, one for each command.
///
/// They say what `--help` says: `man ./fracbit-quantize.1` shows one, and packages put them into
/// share/man/man1.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory to write; a new or empty one.
    #[arg(short, long)]
    out: PathBuf,
}

pub(crate) fn run(args: &ManArgs, context: &mut Context) -> Result<(), Failure> {
    let failed = |e| Failure::writing(&args.out, e);
    fs::create_dir_all(&args.out).map_err(failed)?;
    if fs::read_dir(&args.out).map_err(failed)?.next().is_some() {
        let rule = format!("`{}` should be new or empty", args.out.display());
        return Err(Failure::new(Exit::Failed, anyhow::Error::msg(rule)));
    }
    let command = Cli::command().disable_help_subcommand(true);
    clap_mangen::generate_to(command, &args.out).map_err(failed)?;
    context.progress.note(&format!("wrote {}", args.out.display()));
    Ok(())
}
