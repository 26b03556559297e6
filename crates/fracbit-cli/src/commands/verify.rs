//! `fracbit verify`.

use crate::{
    context::Context,
    failure::{Exit, Failure},
    files,
};
use clap::Args;
use fracbit_io::Report;
use serde_json::{Value, json};
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
With --json one object is printed: path, ok, checksums, files, tensors, bytes and problems, a list of file, tensor \
(or null) and rule.

Examples:
  fracbit verify small
  fracbit verify small --json | jq .problems";

/// Recompute every checksum of a model directory.
///
/// Names every file and tensor that is missing, changed or not listed in the manifest, and exits
/// with code 1 if there is any. A directory without manifest, as Hugging Face publishes it, gets a
/// check of its structure: changed weights go unseen there, and the output says so.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct VerifyArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &VerifyArgs, context: &mut Context) -> Result<Exit, Failure> {
    files::require_dir(&args.model)?;
    let report = fracbit_io::verify(&args.model)?;
    if args.json {
        context.out.json(&document(&report))?;
    } else {
        writeln!(context.out, "{report}")?;
    }
    Ok(if report.is_ok() { Exit::Done } else { Exit::Failed })
}

fn document(report: &Report) -> Value {
    let problems: Vec<Value> = report
        .problems
        .iter()
        .map(|p| json!({ "file": p.file, "tensor": p.tensor, "rule": p.rule }))
        .collect();
    json!({
        "path": report.dir.display().to_string(),
        "ok": report.is_ok(),
        "checksums": report.checksums,
        "files": report.files,
        "tensors": report.tensors,
        "bytes": report.bytes,
        "problems": problems,
    })
}
