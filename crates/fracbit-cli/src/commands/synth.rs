//! `fracbit synth`.

use crate::{args, context::Context, failure::Failure, files};
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use fracbit::{Preset, SynthOptions, preset::PRESETS};
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
Examples:
  fracbit synth --shape llama-3.2-1b -o synthetic-1b
  fracbit synth --shape llama-3-8b --layers 2 -o two-blocks-of-8b";

/// Write a checkpoint with random weights of real shapes.
///
/// For measurements of speed and memory without a download: config, tokenizer and bf16 weights are
/// valid, the text such a model writes is noise. The same seed gives the same bytes.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct SynthArgs {
    /// Model whose shape to take.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Preset,
    /// Directory to write.
    #[arg(short, long)]
    out: PathBuf,
    /// Vocabulary instead of the shape's.
    #[arg(long, value_name = "N", value_parser = args::count)]
    vocab: Option<usize>,
    /// Blocks instead of the shape's.
    #[arg(long, value_name = "N", value_parser = args::count)]
    layers: Option<usize>,
    /// Seed of the weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace the directory when it is a model directory.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &SynthArgs, context: &mut Context) -> Result<(), Failure> {
    let options = SynthOptions {
        preset: args.shape,
        vocab: args.vocab,
        layers: args.layers,
        seed: args.seed,
        force: args.force,
    };
    let path = fracbit::synthesize(&args.out, options, &context.progress)?;
    context.progress.finish();
    let typed = files::typed(&path);
    writeln!(
        context.out,
        "wrote {}\n\nTry next:\n  fracbit inspect {typed}\n  fracbit plan {typed} --bits 3",
        path.display()
    )?;
    Ok(())
}
