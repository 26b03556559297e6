//! `fracbit tune`.

use crate::{
    args::{self, TextArgs},
    context::Context,
    failure::Failure,
    files, memory,
};
use clap::Args;
use fracbit::{
    Progress, TuneOptions, calibrate, learn,
    sensitivity::Text,
    tune::{self, PASSES},
};
use fracbit_base::Bytes;
use fracbit_io::Overwrite;
use serde_json::json;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
A part of the text is held out: what it loses before and after is printed, and scales that do not win there are not taken. \
`quantize --learn` tunes by itself; more text than it takes wins more.

OUT gets its name when everything in it is on disk. A run that is killed leaves OUT.partial-XXXXXX beside it: the same \
command with --resume continues it and ends with the same bytes.

Examples:
  fracbit tune small --baseline Llama-3.2-1B --text train.txt -o better
  fracbit tune small --baseline Llama-3.2-1B --text train.txt -o better --tokens 262144 --passes 1";

/// Train the scales of a quantized model on a text, so that it predicts what the original predicts.
///
/// Codes stay as they are: the model neither grows nor slows. The scales of all rows follow the
/// gradient of the divergence from the original. A pass over a text takes about four times as long
/// as running the original on it.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct TuneArgs {
    /// A model that `fracbit quantize` wrote.
    model: PathBuf,
    /// The checkpoint that it was made from.
    #[arg(long, value_name = "MODEL")]
    baseline: PathBuf,
    /// UTF-8 text of the kind that the model will read; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Directory to write.
    #[arg(short, long)]
    out: PathBuf,
    /// Tokens at most.
    #[arg(long, value_name = "N", default_value_t = learn::TOKENS, value_parser = args::count)]
    tokens: usize,
    /// Passes over them.
    #[arg(long, value_name = "N", default_value_t = PASSES, value_parser = args::count)]
    passes: usize,
    #[command(flatten)]
    how: TextArgs,
    /// Refuse to start when more memory than this, such as 8GB, is needed beside the mapped files.
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    /// Continue an interrupted run of the same command.
    #[arg(long)]
    resume: bool,
    /// Replace OUT when it is a model directory.
    #[arg(long)]
    force: bool,
    /// Print one JSON document: the report.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TuneArgs, context: &mut Context) -> Result<(), Failure> {
    files::apart(&args.out, &[&args.model, &args.baseline, &args.text])?;
    files::nameable(&args.out, args.json)?;
    let overwrite = if args.force { Overwrite::Yes } else { Overwrite::No };
    files::available(&args.out, overwrite, args.resume)?;
    let (model, original) = (files::open(&args.model, context)?, files::open(&args.baseline, context)?);
    let text = files::read_text(&args.text)?;
    let read = Text::read(&original, &text, &args.text, args.tokens, &args.how.options())?;
    let key = json!({
        "version": env!("CARGO_PKG_VERSION"), "model": model.checkpoint.content_hash(), "passes": args.passes, "tokens": args.tokens,
        "text": calibrate::text_origin(&text, &args.text), "how": args.how.recorded(),
    });
    let Some(dir) = files::begin(&args.out, overwrite, &key.to_string(), args.resume, context)? else {
        return Ok(());
    };
    let options = TuneOptions { passes: args.passes, max_memory: args.max_memory };
    let bytes = tune::memory(&model.config, model.bytes(), read.sequences.tokens());
    context.progress.note(&format!("memory: about {bytes} beside the mapped files"));
    memory::enough(bytes, "tuning")?;
    let report = tune::tune_in(dir, &model, &original, &read, &options, &context.progress)?;
    context.progress.finish();
    if args.json {
        return context.out.json(&report);
    }
    let (typed, baseline) = (files::typed(&report.path), files::typed(&args.baseline));
    writeln!(
        context.out,
        "{}: divergence {:.4} nats per token, {:.4} before, on {} tokens that were held out of {}\n\n\
         Try next:\n  fracbit eval {typed} --text FILE --baseline {baseline}",
        report.path.display(),
        report.after,
        report.before,
        report.held_tokens,
        report.held_tokens + report.tokens,
    )?;
    Ok(())
}
