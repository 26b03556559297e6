//! `fracbit sensitivity`.

use crate::{
    args::{self, RotationName},
    context::Context,
    failure::{Exit, Failure},
    files,
    planning::Source,
    table::Table,
};
use clap::Args;
use fracbit::{Progress, Protocol, Sensitivities, sensitivity};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Rows of the table of the most sensitive matrices.
const SHOWN: usize = 10;

const AFTER: &str = "\
FILE is written after every matrix. When it exists already and holds part of the same measurement (same weights, \
rotation, tokens, levels and seed), the rest is measured; another measurement is only replaced with --force.

Examples:
  fracbit sensitivity Llama-3.2-1B -o a.json
  fracbit sensitivity Llama-3.2-1B -o a.json --tokens 1024 --levels 4";

/// Measure how much each matrix matters to the model.
///
/// Adds noise of known size to one matrix at a time, measures how far the model's predictions move on text that it wrote
/// itself (Kullback-Leibler divergence), and fits a line: its slope is the sensitivity that `plan` and
/// `quantize` take with `--sensitivity FILE`. It can be stopped at any time and continued by the same command.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct SensitivityArgs {
    /// The original checkpoint.
    model: PathBuf,
    /// Document to write, or to continue.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Tokens to measure on.
    #[arg(long, value_name = "N", default_value_t = Protocol::FULL.tokens, value_parser = args::count)]
    tokens: usize,
    /// Noise levels per matrix.
    #[arg(long, value_name = "N", default_value_t = Protocol::FULL.levels, value_parser = args::count)]
    levels: usize,
    /// Rotation under which to measure; the one to quantize with.
    #[arg(long, value_enum, default_value_t = RotationName::Fold)]
    rotation: RotationName,
    /// Seed of rotations, text and noise.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace FILE when it holds another measurement.
    #[arg(long)]
    force: bool,
    /// Print the document instead of the table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &SensitivityArgs, context: &mut Context) -> Result<(), Failure> {
    let protocol = Protocol { levels: args.levels, tokens: args.tokens, seed: args.seed };
    let source = Source::open(&args.model)?;
    let done = if args.force || !args.out.exists() { None } else { Some(Sensitivities::read(&args.out)?) };
    if let Some(done) = &done {
        if !done.continues(protocol, source.hash(), args.rotation.into()) {
            return Err(taken(&args.out));
        }
        context.progress.note(&format!(
            "{}: holds {} matrices already",
            args.out.display(),
            done.layers.len()
        ));
    }
    let bytes = protocol.memory(&source.inventory(args.rotation.into()));
    context
        .progress
        .note(&format!("memory: about {bytes} for one matrix and the logits, beside the mapped file"));

    let weights = source.opened.source(args.rotation.into(), args.seed)?;
    let mut failure = None;
    let measured =
        sensitivity::measure(&weights, source.hash(), protocol, done, &context.progress, &mut |so_far| {
            save(&args.out, so_far).map_err(|found| {
                failure = Some(found);
                let origin = args.out.display().to_string();
                fracbit::Error::Sensitivity { origin, rule: "should be saved".to_owned() }
            })
        });
    let measured = match (measured, failure) {
        (Err(_), Some(failure)) => return Err(failure),
        (measured, _) => measured?,
    };
    context.progress.finish();
    if args.json { context.out.json(&measured) } else { show(&measured, &args.out, context) }
}

fn taken(path: &Path) -> Failure {
    let rule = format!("`{}` should hold part of this measurement, it holds another one", path.display());
    Failure::new(Exit::Failed, anyhow::Error::msg(rule)).hint("give another FILE, or --force to start over")
}

fn save(path: &Path, document: &Sensitivities) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(document).map_err(|e| Failure::writing(path, e.into()))?;
    files::write_atomic(path, format!("{text}\n").as_bytes()).map_err(|e| Failure::writing(path, e))
}

fn show(measured: &Sensitivities, path: &Path, context: &mut Context) -> Result<(), Failure> {
    let mut rows: Vec<_> = measured.layers.iter().collect();
    rows.sort_by(|x, y| y.1.a.total_cmp(&x.1.a));
    let mut table = Table::new(["matrix", "sensitivity", "fit error"], &[]);
    for (name, fit) in rows.iter().take(SHOWN) {
        table.row([(*name).clone(), format!("{:.5}", fit.a), format!("{:.2e}", fit.residual)]);
    }
    write!(context.out, "{table}")?;
    if rows.len() > SHOWN {
        writeln!(context.out, "... and {} less sensitive matrices", rows.len() - SHOWN)?;
    }
    writeln!(
        context.out,
        "\nwrote {}; use it: fracbit quantize MODEL -o OUT --bits 3 --sensitivity {0}",
        path.display()
    )?;
    Ok(())
}
