//! `fracbit calibrate`.

use crate::{
    args::{self, TextArgs},
    context::Context,
    failure::Failure,
    files, memory,
    planning::Source,
    table::Table,
};
use clap::Args;
use fracbit::{
    CalibrateOptions, Progress,
    calibrate::{self, CALIBRATION_FILE, CalibrationInfo, TOKENS_OF_TEXT},
};
use fracbit_base::Bytes;
use fracbit_io::{Overwrite, output};
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
OUT gets its name when everything in it is on disk. A run that is killed leaves OUT.partial-XXXXXX beside it: the same \
command with --resume continues it (at most one block is done again) and ends with the same bytes.

Use text of the kind that the model will read, and other text to evaluate on.

Examples:
  fracbit calibrate Llama-3.2-1B --text train.txt -o stats
  fracbit calibrate Llama-3.2-1B -o stats --tokens 8192
  fracbit quantize Llama-3.2-1B -o small --bits 2.5 --calibration stats";

/// Measure what every layer of a model reads, so that `quantize` can round for it.
///
/// Runs a text through the model, block by block, and collects the second moments of every layer's
/// inputs. With them `quantize --calibration` rounds weights so that the layers' outputs change
/// least, rather than the weights themselves. Without a text the model writes one.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct CalibrateArgs {
    /// The original checkpoint.
    model: PathBuf,
    /// UTF-8 text to calibrate on; `-` reads standard input [default: the model writes one].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Directory to write.
    #[arg(short, long)]
    out: PathBuf,
    /// Tokens at most [default: 262144, or 128 sequences when the model writes them].
    #[arg(long, value_name = "N", value_parser = args::count)]
    tokens: Option<usize>,
    /// Tokens of a sequence [default: 2048, or the model's context when that is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    #[command(flatten)]
    how: TextArgs,
    /// Seed of the text that the model writes.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Refuse to start when more memory than this, such as 8GB, is needed beside the mapped file.
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    /// Replace OUT when it is a directory of `fracbit calibrate`.
    #[arg(long)]
    force: bool,
    /// Continue an interrupted run of the same command.
    #[arg(long)]
    resume: bool,
    /// Let a cluster of Ray collect them, shard by shard of the text, with the same bytes: `auto`,
    /// `local` or host:port. Of the Python package alone.
    #[arg(long, value_name = "ADDRESS")]
    ray: Option<String>,
    /// Print the document instead of the table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CalibrateArgs, context: &mut Context) -> Result<(), Failure> {
    files::apart(&args.out, &[&args.model])?;
    let overwrite = if args.force { Overwrite::Holding(CALIBRATION_FILE) } else { Overwrite::No };
    files::available(&args.out, overwrite, args.resume)?;
    let source = Source::open(&args.model, context)?;
    let text = args.text.as_ref().map(|path| files::read_text(path)).transpose()?;
    let length = args.ctx.unwrap_or(calibrate::length(&source.opened.config));
    let default = if text.is_some() { TOKENS_OF_TEXT } else { calibrate::tokens_written(length) };
    let dealt = args.ray.as_ref().map(|address| context.dealt(address)).transpose()?;
    let tokens = args.tokens.unwrap_or(default);
    let options = CalibrateOptions {
        length: args.ctx,
        text: args.how.options(),
        seed: args.seed,
        max_memory: args.max_memory,
        force: args.force,
        resume: args.resume,
        dealt,
        ..CalibrateOptions::new(tokens)
    };
    let config = &source.opened.config;
    let bytes = calibrate::memory(config, &options, text.is_none());
    context
        .progress
        .note(&format!("memory: about {bytes} beside the mapped file, for the moments of one block"));
    memory::enough(bytes, "calibrating")?;
    if !args.resume {
        for old in output::leftovers(&args.out) {
            let path = old.path.display();
            context.progress.note(&format!("note: {path} is of an interrupted run: --resume continues it if it was this one; otherwise delete it"));
        }
    }
    source.check(context)?;
    files::say_how_to_resume(context)?;
    let text = text.as_deref().zip(args.text.as_deref());
    let info = calibrate::calibrate(&source.opened, text, &args.out, &options, &context.progress)?;
    context.progress.finish();
    if args.json { context.out.json(&info) } else { show(&info, args, context) }
}

fn show(info: &CalibrationInfo, args: &CalibrateArgs, context: &mut Context) -> Result<(), Failure> {
    let odd: Vec<_> = info.inputs.iter().filter(|(_, i)| i.rank < i.channels).collect();
    let out = args.out.display();
    writeln!(
        context.out,
        "{out}: {} inputs on {} tokens in {} sequences, {}",
        info.inputs.len(),
        info.tokens,
        info.sequences,
        info.text
    )?;
    if !odd.is_empty() {
        let mut table = Table::new(["deficient input", "channels", "dead", "rank at most"], &[1, 2, 3]);
        for (name, input) in odd {
            table.row([
                name.clone(),
                input.channels.to_string(),
                input.dead.to_string(),
                input.rank.to_string(),
            ]);
        }
        write!(context.out, "{table}")?;
        writeln!(
            context.out,
            "such inputs are damped when they are used; more tokens help where few were the reason"
        )?;
    }
    let (model, out) = (files::typed(&args.model), files::typed(&args.out));
    Ok(writeln!(context.out, "\nuse it: fracbit quantize {model} -o OUT --bits 2.5 --calibration {out}")?)
}
