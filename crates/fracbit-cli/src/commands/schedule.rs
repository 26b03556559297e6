//! `fracbit schedule`.

use crate::{
    args,
    context::Context,
    failure::Failure,
    files,
    generate::{Loading, conversation},
    table::Table,
};
use clap::{Args, Subcommand, ValueEnum};
use fracbit::schedule::{
    Fit, FitOptions, Judged, Policy, Quality, TrainOptions, Trained, beginnings, fit, train,
};
use fracbit_base::Rate;
use fracbit_io::{Bos, Claim, EncodeOptions, Message, Tokenizer};
use fracbit_model::Model;
use serde::Serialize;
use serde_json::json;
use std::{
    io::Write,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Tokens of a piece of a text.
const LENGTHS: RangeInclusive<usize> = 32..=128;

const AFTER: &str = "\
Examples:
  fracbit schedule fit small --prompts prompts.txt -o schedule.json
  fracbit schedule train small --text book.txt -o scheduler.json
  fracbit run small -p 'Once upon a time' --precision scheduler.json";

const AFTER_TRAIN: &str = "\
Prompts are pieces of 32 to 128 tokens of FILE, or the lines of --prompts. The model at full precision answers each, and every \
place at which precision may fall is tried; the label of a prompt is the first that keeps the tolerance. Two of three prompts train; \
the table is of the others, beside one precision everywhere, the best place for all prompts (static), places at random, and the labels themselves. \
With --json one object is printed: quality, tolerance, steps, schedules, labels, policies (each with name, mean_bits, loss, within and right), block and overhead.

Examples:
  fracbit schedule train small --text book.txt -o scheduler.json
  fracbit schedule train small --prompts prompts.txt --chat --block 0,14,29 -o scheduler.json";

const AFTER_FIT: &str = "\
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
    Train(TrainArgs),
}

/// Fit a schedule on prompts.
///
/// The model at full precision answers every prompt; of all schedules whose precision never rises,
/// the one that reads the fewest bits per token and stays within the tolerance of those answers is
/// found. Printed beside it are the same precision everywhere, and the lowest pair of one precision
/// for the prompt and one for the answer.
#[derive(Debug, Args)]
#[command(after_help = AFTER_FIT)]
struct FitArgs {
    /// The model, of a nested scheme.
    model: PathBuf,
    /// Prompts, one a line; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Places of an answer at which precision may fall.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = args::count)]
    points: usize,
    #[command(flatten)]
    common: CommonArgs,
}

/// Train a scheduler that reads each prompt and says when precision may fall.
///
/// A network of some thousand parameters looks at what the cache of one block holds of a prompt.
/// It is trained on the model's own answers to pieces of any text and works with prompts of other
/// kinds.
#[derive(Debug, Args)]
#[command(after_help = AFTER_TRAIN)]
struct TrainArgs {
    /// The model, of a nested scheme.
    model: PathBuf,
    /// Text whose pieces are prompts; `-` reads standard input.
    #[arg(long, value_name = "FILE", required_unless_present = "prompts", conflicts_with = "prompts")]
    text: Option<PathBuf>,
    /// Prompts, one a line, in place of a text.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Pieces of the text.
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = args::count, conflicts_with = "prompts")]
    samples: usize,
    /// Places at which precision may fall, from the first token to never: at least 2.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = args::count)]
    points: usize,
    /// Bits of the prompt and of the beginning, and those to which they fall; by default the most
    /// and the least that the model has.
    #[arg(long, value_name = "HIGH,LOW", value_parser = two_rates)]
    bits: Option<[Rate; 2]>,
    /// Blocks whose caches are tried, from 0 on; by default the last.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    block: Vec<usize>,
    /// Seed of the network and of the pieces.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    common: CommonArgs,
}

/// How answers are judged, and where goes what is found.
#[derive(Debug, Args)]
struct CommonArgs {
    /// What answers are judged by, against those of full precision.
    #[arg(long, value_enum, default_value_t)]
    quality: QualityName,
    /// The largest loss: nats per token with kl, otherwise a share from 0 to 1.
    #[arg(long, value_name = "E", default_value_t = 0.02, value_parser = tolerance)]
    tolerance: f64,
    /// Tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = args::count)]
    steps: usize,
    /// Ask as a user of the model's chat template.
    #[arg(long, requires = "prompts")]
    chat: bool,
    /// File to write what is found to, for `--precision`.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace FILE.
    #[arg(long, requires = "out")]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl CommonArgs {
    /// Takes the name of the file, if there is to be one.
    fn claim(&self, model: &Path) -> Result<Option<Claim>, Failure> {
        self.out.as_ref().map(|out| files::claim(out, self.force, Some(model))).transpose()
    }

    fn options(&self, points: usize) -> FitOptions {
        FitOptions { quality: self.quality.into(), tolerance: self.tolerance, steps: self.steps, points }
    }

    /// Writes what was found, where it should go to a file.
    fn write(&self, found: &impl Serialize) -> Result<(), Failure> {
        let Some(out) = &self.out else { return Ok(()) };
        let document = json!(found).to_string() + "\n";
        fracbit_io::write_atomic(out, document.as_bytes()).map_err(|e| Failure::writing(out, e))
    }
}

fn two_rates(text: &str) -> Result<[Rate; 2], String> {
    let rate = |text: &str| text.trim().parse().ok().and_then(|bits| Rate::from_bits(bits).ok());
    let both = text.split_once(',').and_then(|(high, low)| Some([rate(high)?, rate(low)?]));
    both.ok_or_else(|| format!("expected two numbers of bits such as 4,2, got `{text}`"))
}

/// A quality by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum QualityName {
    /// Divergence of predictions along the text of full precision.
    #[default]
    Kl,
    /// Share of the schedule's own tokens that differ.
    Match,
    /// 1 minus the ROUGE-L of the schedule's own text.
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
    match &args.what {
        What::Fit(args) => run_fit(args, context),
        What::Train(args) => run_train(args, context),
    }
}

/// A line is a prompt.
fn prompts_of(text: &str, tokenizer: &Tokenizer, chat: bool) -> Result<Vec<Vec<u32>>, Failure> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let prompts = lines.map(|line| {
        if chat {
            return conversation(tokenizer, &[Message::new("user", line)], false);
        }
        Ok(tokenizer.encode(line, EncodeOptions::default())?)
    });
    prompts.collect()
}

fn load(model: &Path, context: &Context) -> Result<(Model, Tokenizer), Failure> {
    let opened = Arc::new(files::open(model, context)?);
    let loading = Loading::begin(&opened);
    let tokenizer = opened.tokenizer()?;
    Ok((loading.finish()?, tokenizer))
}

fn run_train(args: &TrainArgs, context: &mut Context) -> Result<(), Failure> {
    let _claim = args.common.claim(&args.model)?;
    let path = args.text.as_ref().or(args.prompts.as_ref()).expect("clap wants one of both");
    let text = files::read_text(path)?;
    let (model, tokenizer) = load(&args.model, context)?;
    let prompts = if args.prompts.is_some() {
        prompts_of(&text, &tokenizer, args.common.chat)?
    } else {
        let before = tokenizer.encode("", EncodeOptions::default())?;
        let plain = EncodeOptions { bos: Bos::Never, ..EncodeOptions::default() };
        beginnings(&tokenizer.encode(&text, plain)?, &before, args.samples, LENGTHS, args.seed)
    };
    if prompts.is_empty() {
        return Err(Failure::input(format!(
            "`{}` should have at least {} tokens, or lines with `--prompts`",
            path.display(),
            LENGTHS.start()
        )));
    }
    let fit = args.common.options(args.points);
    let options = TrainOptions { fit, rates: args.bits, blocks: args.block.clone(), seed: args.seed };
    let trained = train(&model, &prompts, &options, &context.progress)?;
    context.progress.finish();
    args.common.write(&trained.scheduler)?;
    if args.common.json {
        return context.out.json(&trained);
    }
    write!(context.out, "{}", policies(&trained))?;
    for (schedule, count) in trained.schedules.iter().zip(&trained.labels) {
        writeln!(context.out, "{count} of {} prompts want {schedule}", prompts.len())?;
    }
    let Trained { block, overhead, .. } = trained;
    writeln!(context.out, "taken: block {block}; it costs {:.2} % of running the prompt", 100.0 * overhead)?;
    Ok(())
}

fn policies(trained: &Trained) -> Table {
    let loss = loss_name(trained.quality);
    let mut table = Table::new(["", "bits a token", loss, "within", "as labelled"], &[0]);
    for Policy { name, mean_bits, loss, within, right } in &trained.policies {
        let share = |share: &f64| format!("{:.0} %", 100.0 * share);
        let [bits, loss] = [format!("{mean_bits:.3}"), format!("{loss:.4}")];
        table.row([name.clone(), bits, loss, share(within), share(right)]);
    }
    table
}

fn loss_name(quality: Quality) -> &'static str {
    match quality {
        Quality::Kl => "KL",
        Quality::Match => "other tokens",
        Quality::RougeL => "1 - ROUGE-L",
    }
}

fn run_fit(args: &FitArgs, context: &mut Context) -> Result<(), Failure> {
    let _claim = args.common.claim(&args.model)?;
    let text = files::read_text(&args.prompts)?;
    let (model, tokenizer) = load(&args.model, context)?;
    let prompts = prompts_of(&text, &tokenizer, args.common.chat)?;
    let options = args.common.options(args.points);
    let found = fit(&model, &prompts, &options, &context.progress)?;
    context.progress.finish();
    args.common.write(&found.best.schedule)?;
    if args.common.json {
        return context.out.json(&found);
    }
    write!(context.out, "{}", shown(&found))?;
    Ok(())
}

fn shown(found: &Fit) -> Table {
    let loss = loss_name(found.quality);
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
