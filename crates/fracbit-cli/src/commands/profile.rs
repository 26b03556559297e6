//! `fracbit profile`.

use crate::{args, context::Context, failure::Failure, files};
use clap::{
    ArgGroup, Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use fracbit::{MachineProfile, Preset, Progress, preset::PRESETS};
use fracbit_base::Scheme;
use fracbit_bench::{self as bench, ProfileOptions};
use fracbit_io::ModelConfig;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
The document holds for this processor, instruction set, number of threads, version and build of fracbit and shape of model; \
elsewhere it is refused. Let nothing else run meanwhile.

Examples:
  fracbit profile Llama-3.2-1B -o machine.json
  fracbit profile --shape llama-3.2-1b -o machine.json --threads 2 --batch 1,4
  fracbit plan Llama-3.2-1B --latency 20ms --profile machine.json";

/// Measure what this machine makes of every scheme, for plans to a speed.
///
/// Times the product of every scheme with every shape of matrix that the model has, fused ones
/// included, with the weights coming from memory, of experts those that a token meets; then decodes
/// with whole models of random schemes and fits what a step takes beside its products. Weights are
/// random codes and experts are drawn at random, only the shape of the model counts. Takes a minute
/// or two for each number of sequences.
#[derive(Debug, Args)]
#[command(after_help = AFTER, group = ArgGroup::new("subject").required(true).args(["model", "shape"]))]
pub(crate) struct ProfileArgs {
    /// Model directory whose shape to take, quantized or not.
    model: Option<PathBuf>,
    /// Shape of a model instead of a directory.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Option<Preset>,
    /// File to write.
    #[arg(short, long)]
    out: PathBuf,
    /// Sequences decoded together, each 1 to 8; several numbers are measured one by one.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1", value_parser = args::batch)]
    batch: Vec<usize>,
    /// A scheme to measure; may be repeated [default: all].
    #[arg(long, value_name = "SCHEME")]
    scheme: Vec<Scheme>,
    /// Measurements of each number [default: 5].
    #[arg(long, value_name = "N", value_parser = args::count)]
    rounds: Option<usize>,
    /// Seed of the random models.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace the file.
    #[arg(long)]
    force: bool,
    /// Print the document, too.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ProfileArgs, context: &mut Context) -> Result<(), Failure> {
    let _claim = files::claim(&args.out, args.force, args.model.as_deref())?;
    let (subject, config) = match (&args.model, args.shape) {
        (_, Some(preset)) => (preset.name.to_owned(), preset.model_config()?),
        (Some(dir), None) => {
            files::require_dir(dir)?;
            (dir.display().to_string(), ModelConfig::from_dir(dir)?)
        }
        (None, None) => return Ok(()), // clap asks for one of them
    };
    let default = ProfileOptions::default();
    let options = ProfileOptions {
        schemes: if args.scheme.is_empty() { default.schemes } else { args.scheme.clone() },
        batch: args.batch.clone(),
        threads: rayon::current_num_threads(),
        rounds: args.rounds.unwrap_or(default.rounds),
        seed: args.seed,
        ..default
    };
    let profile = bench::profile(&subject, &config, &options, &fracbit::kernels()?, &context.progress)?;
    context.progress.finish();
    let text = serde_json::to_string_pretty(&profile).map_err(|e| Failure::writing(&args.out, e.into()))?;
    fracbit_io::write_atomic(&args.out, format!("{text}\n").as_bytes())
        .map_err(|e| Failure::writing(&args.out, e))?;
    context.progress.note(&format!("wrote {}", args.out.display()));
    if args.json { context.out.json(&profile) } else { show(&profile, context) }
}

fn show(profile: &MachineProfile, context: &mut Context) -> Result<(), Failure> {
    let out = &mut context.out;
    let MachineProfile { cpu, isa, threads, subject, seconds, .. } = profile;
    writeln!(out, "{cpu}, {isa}, {threads} threads; {subject}: {}", profile.shape)?;
    writeln!(
        out,
        "reads {:.1} GB/s, int8 products {:.0} GMAC/s; {} products in {seconds:.0} s",
        profile.read_gb_per_s,
        profile.int8_gmac_per_s,
        profile.kernels.len()
    )?;
    for fit in &profile.overheads {
        writeln!(
            out,
            "batch {}: a step is {:.3} x its products + {:.1} us per layer + {:.4} us per layer and token of context + {:.0} us; \
             {} models, error {:.1} %",
            fit.batch,
            fit.factor,
            fit.layer_us,
            fit.context_us,
            fit.fixed_us,
            fit.samples.len(),
            100.0 * fit.residual
        )?;
    }
    Ok(())
}
