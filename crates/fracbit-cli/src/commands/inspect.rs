//! `fracbit inspect`.

use crate::{context::Context, failure::Failure, files, gpu};
use clap::Args;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
Examples:
  fracbit inspect small
  fracbit inspect small --json | jq .storage
  fracbit inspect --machine";

/// Show what a model directory holds.
///
/// Prints architecture, sizes, bits per weight, rotation, how many matrices are stored in which
/// scheme, and where a quantized model came from. Reads headers only, so it takes a moment whatever
/// the size of the model.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct InspectArgs {
    /// The model, quantized or not.
    #[arg(required_unless_present = "machine", conflicts_with = "machine")]
    model: Option<PathBuf>,
    /// Show instead what this machine offers: its processor, which microkernel each scheme gets,
    /// and its GPU.
    #[arg(long)]
    machine: bool,
    /// Print one JSON object, with the storage of every matrix.
    #[arg(long)]
    json: bool,
}

/// `--machine --json`.
#[derive(Serialize)]
struct MachineFacts<P> {
    #[serde(flatten)]
    processor: P,
    gpu: Option<gpu::Facts>,
}

pub(crate) fn run(args: &InspectArgs, context: &mut Context) -> Result<(), Failure> {
    let Some(model) = &args.model else {
        let (processor, gpu) = (fracbit::microkernels()?, gpu::describe());
        if args.json {
            return context.out.json(&MachineFacts { processor, gpu: gpu.ok() });
        }
        write!(context.out, "{processor}")?;
        match gpu {
            Ok(gpu) => write!(context.out, "{gpu}")?,
            Err(why) => writeln!(context.out, "gpu              none: {why}")?,
        }
        return Ok(());
    };
    files::require_dir(model)?;
    let found = fracbit::inspect(model)?;
    if args.json {
        return context.out.json(&found);
    }
    write!(context.out, "{found}")?;
    for note in &found.notes {
        writeln!(context.out, "  note             {note}")?;
    }
    for (key, value) in found.provenance.iter().filter_map(|p| p.as_object()).flatten() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        writeln!(context.out, "  {key:<16} {value}")?;
    }
    Ok(())
}
