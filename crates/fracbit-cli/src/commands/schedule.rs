//! `fracbit schedule`.

use crate::{
    args, commands::run::conversation, context::Context, failure::Failure, files, generate::Loading,
    table::Table,
};
use clap::{Args, Subcommand, ValueEnum};
use fracbit::schedule::{Fit, FitOptions, Judged, Quality, fit};
use fracbit_io::{EncodeOptions, Message};
use serde_json::json;
use std::{io::Write, path::PathBuf, sync::Arc};

const AFTER: &str = "\
FILE has one prompt a line, empty lines aside. The first half of the prompts chooses, the other half says what the choice is worth. \
With --json one object is printed: quality, tolerance, steps, uniform (a list), pair, best and asked; each of these has \
schedule, mean_bits, loss and held_out.

Examples:
  fracbit schedule fit small --prompts prompts.txt -o schedule.json
  fracbit schedule fit small --prompts prompts.txt --quality match --tolerance 0.1 --steps 128
  fracbit run small -p 'Once upon a time' --precision schedule.json";

/// Find how far precision may fall while a nested model answers.
///
/// A nested model holds several precisions in one copy of its weights. Its prompt and the first
/// tokens of an answer deserve more bits than the rest: a schedule says how many each step reads.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ScheduleArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Fit(FitArgs),
}

/// Fit a schedule on prompts.
///
/// The model at full precision answers every prompt; of all schedules whose precision never rises,
/// the one that reads the fewest bits per token and stays within the tolerance of those answers is
/// found. Printed beside it are the same precision everywhere, and the lowest pair of one precision
/// for the prompt and one for the answer.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
struct FitArgs {
    /// The model, of a nested scheme.
    model: PathBuf,
    /// Prompts, one a line; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// What schedules are judged by, against the answers of full precision.
    #[arg(long, value_enum, default_value_t)]
    quality: QualityName,
    /// The largest loss: nats per token with kl, otherwise a share from 0 to 1.
    #[arg(long, value_name = "E", default_value_t = 0.02, value_parser = tolerance)]
    tolerance: f64,
    /// Tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = args::count)]
    steps: usize,
    /// Places of an answer at which precision may fall.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = args::count)]
    points: usize,
    /// Ask as a user of the model's chat template.
    #[arg(long)]
    chat: bool,
    /// File to write the schedule to, for `--precision`.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace FILE.
    #[arg(long, requires = "out")]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A quality by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum QualityName {
    /// Divergence of predictions along the text of full precision.
    #[default]
    Kl,
    /// Share of the schedule's own tokens that differ.
    Match,
    /// One less ROUGE-L of the schedule's own text.
    RougeL,
}

impl From<QualityName> for Quality {
    fn from(name: QualityName) -> Self {
        match name {
            QualityName::Kl => Self::Kl,
            QualityName::Match => Self::Match,
            QualityName::RougeL => Self::RougeL,
        }
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
    number.ok_or_else(|| format!("expected a number that is not negative, got `{text}`"))
}

pub(crate) fn run(args: &ScheduleArgs, context: &mut Context) -> Result<(), Failure> {
    let What::Fit(args) = &args.what;
    if let Some(out) = &args.out {
        files::refuse_existing(out, args.force)?;
    }
    let text = files::read_text(&args.prompts)?;
    let opened = Arc::new(files::open(&args.model, context)?);
    let loading = Loading::begin(&opened);
    let writer = loading.finish(opened.tokenizer()?)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let prompts = lines.map(|line| {
        if args.chat {
            return conversation(&writer.tokenizer, &[Message::new("user", line)], false);
        }
        Ok(writer.tokenizer.encode(line, EncodeOptions::default())?)
    });
    let prompts = prompts.collect::<Result<Vec<_>, Failure>>()?;
    let options = FitOptions {
        quality: args.quality.into(),
        tolerance: args.tolerance,
        steps: args.steps,
        points: args.points,
    };
    let found = fit(&writer.model, &prompts, &options, &context.progress)?;
    context.progress.finish();
    if let Some(out) = &args.out {
        let document = json!(found.best.schedule).to_string() + "\n";
        fracbit_io::write_atomic(out, document.as_bytes()).map_err(|e| Failure::writing(out, e))?;
    }
    if args.json {
        return context.out.json(&found);
    }
    write!(context.out, "{}", shown(&found))?;
    Ok(())
}

fn shown(found: &Fit) -> Table {
    let loss = match found.quality {
        Quality::Kl => "KL",
        Quality::Match => "other tokens",
        Quality::RougeL => "1 - ROUGE-L",
    };
    let mut table = Table::new(["", "schedule", "bits a token", loss, "held out"], &[0, 1]);
    let mut row = |what: &str, one: &Judged| {
        let held = one.held_out.map_or_else(|| "-".to_owned(), |held| format!("{held:.4}"));
        let bits = format!("{:.3}", one.mean_bits);
        table.row([what.to_owned(), one.schedule.to_string(), bits, format!("{:.4}", one.loss), held]);
    };
    found.uniform.iter().for_each(|one| row("uniform", one));
    row("phase-aware", &found.pair);
    row("best", &found.best);
    table
}
