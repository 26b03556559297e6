//! `fracbit simulate`.

use crate::{args, context::Context, failure::Failure, files, table::Table};
use clap::{
    Args, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use fracbit::{
    Preset,
    preset::PRESETS,
    simulate::{Npu, Simulated, simulate},
};
use fracbit_base::Bytes;
use fracbit_schedule::Schedule;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
A layer takes the longer of two times: its products, or the bytes that it reads. Assumed: weights are expanded on the way at no cost, \
products take the same time at every precision, keys and values have 16 bits, and norms and the softmax take no time.
With --json a list is printed, 16 bits first, each entry with schedule, prefill, decode (seconds) and speedup.

Examples:
  fracbit simulate npu --shape llama-3-8b --schedule 4 --schedule prefill=4,decode=4..2@64
  fracbit simulate npu --model small --macs 4096 --bandwidth 16GB --prompt 1000 --schedule 3";

/// Tell how fast a machine that is not here would be.
///
/// By its roofline: every layer takes the longer of two times, that of its products and that of the
/// bytes it reads.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct SimulateArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Npu(NpuArgs),
}

/// A neural processing unit that runs a nested model, by its roofline.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
struct NpuArgs {
    /// A model of this shape.
    #[arg(long, value_name = "MODEL", required_unless_present = "shape", conflicts_with = "shape")]
    model: Option<PathBuf>,
    /// Model whose shape to take.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Option<Preset>,
    /// Multiply-accumulates in a clock cycle.
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = args::count)]
    macs: usize,
    /// Clock in MHz.
    #[arg(long, value_name = "MHZ", default_value_t = 1000, value_parser = args::count)]
    clock: usize,
    /// Bytes a second from memory.
    #[arg(long, value_name = "SIZE", default_value = "32GB")]
    bandwidth: Bytes,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = args::count)]
    prompt: usize,
    /// Tokens of the answer.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count)]
    generate: usize,
    /// What steps read: bits, or a text such as prefill=4,decode=4..2@64; may be repeated.
    #[arg(long, value_name = "BITS", required = true)]
    schedule: Vec<Schedule>,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &SimulateArgs, context: &mut Context) -> Result<(), Failure> {
    let What::Npu(args) = &args.what;
    let config = match (&args.model, args.shape) {
        (Some(model), _) => files::open(model, context)?.config.clone(),
        (None, Some(preset)) => preset.model_config()?,
        (None, None) => return Err(Failure::input("a model or a shape should be named")),
    };
    #[expect(clippy::cast_precision_loss, reason = "rates")]
    let npu =
        Npu { macs: args.macs as f64, clock: args.clock as f64 * 1e6, bandwidth: args.bandwidth.0 as f64 };
    let made = simulate(&config, npu, args.prompt, args.generate, &args.schedule)?;
    if args.json {
        return context.out.json(&made);
    }
    write!(context.out, "{}", shown(&made))?;
    Ok(())
}

fn shown(made: &[Simulated]) -> Table {
    let mut table = Table::new(["schedule", "prompt s", "answer s", "texts a second"], &[0]);
    for Simulated { schedule, prefill, decode, speedup } in made {
        let (prefill, decode) = (format!("{prefill:.3}"), format!("{decode:.3}"));
        table.row([schedule.to_string(), prefill, decode, format!("{speedup:.2} x")]);
    }
    table
}
