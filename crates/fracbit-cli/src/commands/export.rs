//! `fracbit export`.

use crate::{context::Context, failure::Failure, files};
use clap::Args;
use fracbit::{
    Calibration, Progress,
    export::{self, ExportOptions, ExportType},
};
use std::{io::Write, path::PathBuf, sync::Arc};

const AFTER: &str = "\
Rows that are not whole blocks of 256 get q5_0 in place of q4_K and q8_0 in place of q6_K; the output head gets q6_K below \
6 bits; norms, biases and routers stay in single precision. A tensor that is in the wanted type already is copied.

Examples:
  fracbit export Llama-3.2-1B -o llama.gguf --type q4_K
  fracbit calibrate Llama-3.2-1B --text train.txt -o moments
  fracbit export Llama-3.2-1B -o llama.gguf --type q4_0 --calibration moments
  fracbit export model-f16.gguf -o model-q8_0.gguf --type q8_0";

/// Write a checkpoint as a GGUF file, for llama.cpp.
///
/// Weights are rounded for the least error weighted by importance: the second moments of a
/// calibration where there is one, else the weights' own size. Configuration, tokenizer and chat
/// template go along as metadata.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ExportArgs {
    /// A checkpoint or a GGUF file.
    model: PathBuf,
    /// File to write.
    #[arg(short, long)]
    out: PathBuf,
    /// What matrices become: q4_0, q8_0, q4_K, q6_K or f16.
    #[arg(long = "type", value_name = "TYPE")]
    kind: ExportType,
    /// What `fracbit calibrate` wrote of this model.
    #[arg(long, value_name = "DIR")]
    calibration: Option<PathBuf>,
    /// Replace the file.
    #[arg(long)]
    force: bool,
    /// Print one JSON document: the report.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ExportArgs, context: &mut Context) -> Result<(), Failure> {
    files::nameable(&args.out, args.json)?;
    files::apart(&args.out, &[&args.model])?;
    let _claim = files::claim(&args.out, args.force, Some(&args.model))?;
    let opened = files::open(&args.model, context)?;
    let calibration = args.calibration.as_deref().map(Calibration::open).transpose()?.map(Arc::new);
    let options = ExportOptions { kind: args.kind, force: args.force, calibration };
    let report = export::export(&opened, &args.out, &options, &context.progress)?;
    context.progress.finish();
    if !report.left_out.is_empty() {
        let tokens = report.left_out.join("`, `");
        context.progress.note(&format!("tokens that the embedding has no rows for are left out: `{tokens}`"));
    }
    if args.json {
        return context.out.json(&report);
    }
    let typed = files::typed(&report.path);
    writeln!(
        context.out,
        "wrote {} ({}, {:.3} bits per weight)\n\nTry next:\n  fracbit inspect {typed}\n  fracbit run {typed} -p \"Once upon a time\"",
        report.path.display(),
        report.bytes,
        report.bits_per_weight,
    )?;
    Ok(())
}
