//! `fracbit sensitivity`.

use crate::{
    args::{self, CodeName, PaletteName, RotationName},
    context::Context,
    failure::{Exit, Failure},
    files, memory,
    planning::Source,
    table::Table,
};
use clap::Args;
use fracbit::{
    Calibration, Effort, EvalOptions, PlanError, PlanOptions, Progress, Protocol, Rounders, Sensitivities,
    Target,
    losses::{self, LossOptions},
    sensitivity::{self, Text},
};
use fracbit_base::{Palette, Scheme};
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Rows of the table of the most sensitive matrices.
const SHOWN: usize = 10;

const AFTER: &str = "\
FILE is written after every matrix. When it exists already and holds part of the same measurement (same weights, \
rotation, tokens, levels and seed), the rest is measured; another measurement is only replaced with --force.

Examples:
  fracbit sensitivity Llama-3.2-1B -o a.json
  fracbit sensitivity Llama-3.2-1B -o a.json --levels 16
  fracbit sensitivity Llama-3.2-1B -o a.json --text train.txt
  fracbit sensitivity Llama-3.2-1B -o a.json --text train.txt --along tcq-2 --calibration stats
  fracbit sensitivity Llama-3.2-1B -o a.json --text train.txt --actual tcq-3 --calibration stats";

/// Measure how much each matrix matters to the model.
///
/// The sensitivity of a matrix, which `plan` and `quantize` take with `--sensitivity FILE`, says
/// how far small noise in it moves the model's predictions (Kullback-Leibler divergence) on text
/// that the model wrote itself or that is given. One pass back through the model measures all
/// matrices at once; with `--levels N` noise of N sizes is added to one matrix at a time, and a
/// line is fitted. With `--along` or `--actual SCHEME` no noise is added: the model is quantized
/// with that scheme, and the error of one matrix at a time is turned round and taken away, or the
/// matrix quantized with every other scheme of the palette. It can be stopped at any time and
/// continued by the same command.
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
    /// Noise levels per matrix, the papers take 16; 0: none, but the curvature of the divergence,
    /// for all matrices at once.
    #[arg(long, value_name = "N", default_value_t = Protocol::FULL.levels)]
    levels: usize,
    /// UTF-8 text to measure on; `-` reads standard input [default: the model writes one].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Text that divides documents; sequences do not cross it.
    #[arg(long, value_name = "S", requires = "text")]
    separator: Option<String>,
    /// Leave out the space that Llama tokenizers put before a text.
    #[arg(long, requires = "text")]
    no_prefix_space: bool,
    /// Put the BOS token before every sequence [default: as the tokenizer does].
    #[arg(long, requires = "text")]
    bos: bool,
    /// Measure in a model quantized with this scheme, the one nearest to the bits that are planned:
    /// best with --calibration.
    #[arg(long, value_name = "SCHEME", requires = "text", conflicts_with_all = ["levels", "actual"])]
    along: Option<Scheme>,
    /// Measure what every scheme of the palette costs in place of this one.
    #[arg(long, value_name = "SCHEME", requires = "text", conflicts_with = "levels")]
    actual: Option<Scheme>,
    /// Schemes that --actual measures.
    #[arg(long, value_enum, default_value_t = PaletteName::Tcq, requires = "actual")]
    palette: PaletteName,
    /// Code of the trellis schemes that --actual measures.
    #[arg(long, value_enum, default_value_t = CodeName::Fine, requires = "actual")]
    code: CodeName,
    /// Input moments of `fracbit calibrate` that --along and --actual round for.
    #[arg(long, value_name = "DIR", requires = "text", conflicts_with = "levels")]
    calibration: Option<PathBuf>,
    /// How thoroughly --along and --actual search for trellis codes: `fast`, `balanced` or `exact`.
    #[arg(long, value_name = "EFFORT", default_value_t = Effort::Exact, requires = "text", conflicts_with = "levels")]
    effort: Effort,
    /// Rotation under which to measure; the one to quantize with.
    #[arg(long, value_enum, default_value_t = RotationName::Auto)]
    rotation: RotationName,
    /// Leave out the factors between inputs and weights, and between queries and keys.
    #[arg(long)]
    no_smoothing: bool,
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
    // A measurement goes on with what it holds; with --force another one is replaced, but no other
    // file.
    let _claim = files::claim(&args.out, true, Some(&args.model))?;
    let protocol = Protocol { levels: args.levels, tokens: args.tokens, seed: args.seed };
    let found = args.out.exists().then(|| Sensitivities::read(&args.out)).transpose();
    let found = found.map_err(|error| {
        let rule = format!("output `{}`: should not exist yet or hold a measurement", args.out.display());
        Failure::new(Exit::Failed, anyhow::Error::new(error).context(rule)).hint("choose another name")
    })?;
    let source = Source::open(&args.model, context)?;
    let text = args.text.as_ref().map(|path| {
        let options = EvalOptions {
            bos: args.bos.then_some(true),
            drop_prefix_space: args.no_prefix_space,
            separator: args.separator.clone(),
            ..EvalOptions::default()
        };
        let read = files::read_text(path)?;
        Ok::<_, Failure>(Text::read(&source.opened, &read, path, args.tokens, &options)?)
    });
    let text = text.transpose()?;
    let losses = args.actual.or(args.along).map(|default| {
        let calibration =
            args.calibration.as_ref().map(|dir| Calibration::open(dir).map(Arc::new)).transpose()?;
        if let Some(calibration) = &calibration {
            calibration.require_source(source.hash())?;
        }
        let schemes = Palette::from(args.palette).schemes(args.code.into());
        Ok::<_, Failure>(LossOptions { default, schemes, calibration, rounders: Rounders::new(args.effort) })
    });
    let losses = losses.transpose()?;
    let described = match (&losses, &text) {
        (Some(losses), Some(text)) if args.along.is_some() => losses::describe_along(losses, text, args.seed),
        (Some(losses), Some(text)) => losses::describe(losses, text, args.seed),
        _ => sensitivity::describe(protocol, text.as_ref()),
    };
    let smoothing = !args.no_smoothing;
    let mut options = PlanOptions { seed: args.seed, smoothing, ..PlanOptions::new(Target::Any) };
    let calibration = losses.as_ref().and_then(|losses| losses.calibration.as_deref());
    let weights = source.weights(args.rotation.fixed(), &mut options, calibration, context)?;
    let rotation = options.rotation;
    let done = found.filter(|_| !args.force);
    if let Some(done) = &done {
        if !done.continues(&described, source.hash(), rotation, options.smoothing) {
            return Err(taken(&args.out));
        }
        context.progress.note(&format!(
            "{}: holds {} matrices already",
            args.out.display(),
            done.layers.len()
        ));
    }
    let bytes = protocol.memory(&source.opened.config, &source.inventory(rotation));
    context
        .progress
        .note(&format!("memory: about {bytes} for noisy matrices and the logits, beside the mapped file"));
    memory::enough(bytes, "measuring")?;

    let mut failure = None;
    let mut keep = |so_far: &Sensitivities| {
        so_far.save(&args.out).map_err(|e| {
            failure = Some(Failure::writing(&args.out, e));
            let origin = args.out.display().to_string();
            PlanError::Sensitivity { origin, rule: "should be saved".to_owned() }.into()
        })
    };
    let (hash, progress) = (source.hash(), &context.progress);
    let measured = match (&losses, &text) {
        (Some(options), Some(text)) if args.along.is_some() => {
            losses::measure_along(&weights, hash, options, text, done, progress, &mut keep)
        }
        (Some(options), Some(text)) => {
            losses::measure(&weights, hash, options, text, done, progress, &mut keep)
        }
        _ => sensitivity::measure_on(&weights, hash, protocol, text.as_ref(), done, progress, &mut keep),
    };
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

fn show(measured: &Sensitivities, path: &Path, context: &mut Context) -> Result<(), Failure> {
    let mut rows: Vec<_> = measured.layers.iter().collect();
    rows.sort_by(|x, y| y.1.a.total_cmp(&x.1.a));
    // What comes from one pass has no line that was fitted.
    let fitted = rows.iter().any(|(_, fit)| fit.residual > 0.0);
    let mut table = match fitted {
        true => Table::new(["matrix", "sensitivity", "fit error"], &[]),
        false => Table::new(["matrix", "sensitivity"], &[]),
    };
    for (name, fit) in rows.iter().take(SHOWN) {
        let (name, a) = ((*name).clone(), format!("{:.5}", fit.a));
        match fitted {
            true => table.row([name, a, format!("{:.2e}", fit.residual)]),
            false => table.row([name, a]),
        }
    }
    write!(context.out, "{table}")?;
    if rows.len() > SHOWN {
        writeln!(context.out, "... and {} less sensitive matrices", rows.len() - SHOWN)?;
    }
    writeln!(
        context.out,
        "\nwrote {}; use it: fracbit quantize MODEL -o OUT --bits 3 --sensitivity {}",
        path.display(),
        files::typed(path)
    )?;
    Ok(())
}
