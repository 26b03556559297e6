//! `fracbit eval`.

use crate::{
    args::{self, CacheArgs, TextArgs},
    context::Context,
    failure::Failure,
    files,
    gpu::{self, DeviceName},
    table::Table,
};
use clap::Args;
use fracbit::{EvalOptions, Evaluation};
use fracbit_model::Precision;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
With --json one object is printed: nats_per_token, perplexity, tokens, bits_per_weight, and with a baseline kl \
(nats per token) and top1_agreement (a share from 0 to 1).

Examples:
  fracbit eval small --text wiki.test.raw --baseline Llama-3.2-1B
  fracbit eval small --text stories.txt --separator '<|endoftext|>' --bos --json";

/// Measure a model on a text, alone or beside the original.
///
/// Gives perplexity and, with `--baseline`, how far the predictions are from those of the original:
/// the Kullback-Leibler divergence per token, which sees damage long before perplexity does, and
/// how often both find the same token most likely. The text is cut into windows of `--ctx` tokens;
/// numbers compare only between runs with the same cut. With `--kv` the baseline keeps a cache of
/// 16 bits, so that what the smaller one loses counts.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct EvalArgs {
    /// The model to measure, quantized or not.
    model: PathBuf,
    /// UTF-8 text to measure on; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// The model to compare with, usually the original.
    #[arg(long, value_name = "MODEL")]
    baseline: Option<PathBuf>,
    /// Tokens of a window [default: 2048, or the model's context when that is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    /// Stop after this many windows.
    #[arg(long, value_name = "N", value_parser = args::count)]
    windows: Option<usize>,
    #[command(flatten)]
    how: TextArgs,
    /// Where the model runs.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    cache: CacheArgs,
    /// Most bits per weight that are read of a nested model; the bits that are printed are then
    /// those that are read.
    #[arg(long, value_name = "BITS", value_parser = args::precision)]
    precision: Option<Precision>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl EvalArgs {
    fn options(&self) -> EvalOptions {
        EvalOptions {
            ctx: self.ctx,
            windows: self.windows,
            kv: self.cache.kv(),
            precision: self.precision.unwrap_or_default(),
            ..self.how.options()
        }
    }
}

pub(crate) fn run(args: &EvalArgs, context: &mut Context) -> Result<(), Failure> {
    let model = files::open(&args.model, context)?;
    let baseline = args.baseline.as_deref().map(|dir| files::open(dir, context)).transpose()?;
    let text = files::read_text(&args.text)?;
    let options = args.options();
    let result = match args.device {
        DeviceName::Cpu => {
            fracbit::evaluate(&model, baseline.as_ref(), &text, &args.text, &options, &context.progress)?
        }
        DeviceName::Cuda => gpu::evaluate(&model, baseline.as_ref(), &text, &args.text, &options, context)?,
    };
    context.progress.finish();
    if args.json {
        return context.out.json(&result);
    }
    write!(context.out, "{}", shown(&result))?;
    Ok(())
}

fn shown(result: &Evaluation) -> Table {
    let mut table = Table::new(["measure", "value"], &[]);
    table.row(["perplexity".to_owned(), format!("{:.4}", result.perplexity)]);
    table.row(["nats per token".to_owned(), format!("{:.5}", result.nats_per_token)]);
    table.row(["tokens scored".to_owned(), result.tokens.to_string()]);
    table.row(["bits per weight".to_owned(), format!("{:.4}", result.bits_per_weight)]);
    if let Some(kl) = result.kl {
        table.row(["KL from the baseline".to_owned(), format!("{kl:.5}")]);
    }
    if let Some(share) = result.top1_agreement {
        table.row(["same most likely token".to_owned(), format!("{:.2} %", 100.0 * share)]);
    }
    table
}
