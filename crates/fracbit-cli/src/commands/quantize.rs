//! `fracbit quantize`.

use crate::{
    args::{self, BUDGET, LossArgs, SensitivitySource, ShapeArgs, ShowPath, SpeedArgs, TargetArgs, TextArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    gpu::{self, DeviceName},
    memory,
    planning::{self, Aids, Losses, Shown, Source},
};
use clap::Args;
use fracbit::{
    Calibration, CalibrationText, Dealt, Effort, Forecast, LearnOptions, MemoryEstimate, Plan, PlanOptions,
    Progress, Protocol, QuantizeOptions, Rounders, Target, calibrate, learn,
    pace::{About, Pace, Work},
    plan::Inventory,
    smoothing, tune,
};
use fracbit_base::{Bytes, Code};
use fracbit_io::{OutputDir, Overwrite};
use fracbit_model::{RotationMode, WeightSource};
use serde_json::json;
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// The scheme whose search is timed where the plan does not say one.
const TYPICAL: &str = "tcq-3";

const AFTER: &str = "\
What it does: it calibrates on a text (--text, or a built-in one), chooses rotation and factors by the model's channels, measures on \
5120 tokens what matrices and their rows lose (--sensitivity), plans, and rounds layer by layer, each for the inputs that the layers before it \
give. `--data-free` leaves out the text, `--sensitivity prior` the measurement, which may take more memory than the rest.

OUT gets its name when everything in it is on disk. A run that is killed or fails leaves OUT.partial-XXXXXX beside it: the \
same command with --resume continues it (at most one matrix is done again) and ends with the same bytes. It may also be deleted.

Examples:
  fracbit quantize Llama-3.2-1B -o Llama-3.2-1B-3.25bit --bits 3.25
  fracbit quantize Llama-3.2-1B -o small --size 600MB --sensitivity a.json
  fracbit quantize Llama-3.2-1B -o fast --latency 20ms --size 900MB --profile machine.json
  fracbit quantize Llama-3.2-1B -o better --bits 2.5 --text train.txt --time 30m
  fracbit quantize Llama-3.2-1B -o better --bits 2.5 --learn=train.txt --tokens 65536
  fracbit quantize Llama-3.2-1B -o same --bits 2.5 --calibration stats --sequential
  fracbit quantize Llama-3.2-1B --bits 2.5 --dry-run";

/// Make a smaller model of a checkpoint, within a budget of bits, bytes or time.
///
/// Every weight matrix gets the scheme that costs the model least within the budget, is rotated so
/// that its weights look Gaussian, and is rounded by that scheme. The result is a model directory
/// with checksums, its plan and a model card. The same checkpoint, options and seed give the same
/// bytes, whatever the number of threads.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct QuantizeArgs {
    /// The original checkpoint.
    model: PathBuf,
    /// Directory to write.
    #[arg(short, long, required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    /// Apply a plan of `fracbit plan --save`, edited or not.
    #[arg(long, value_name = "FILE", group = "target", help_heading = BUDGET,
        conflicts_with_all = ["bits", "size", "latency", "tokens_per_second", "scheme", "profile", "palette", "also", "code",
            "rotation", "no_smoothing", "no_bands", "seed", "keep_head", "pin", "exclude", "sensitivity", "objective"])]
    plan: Option<PathBuf>,
    /// Input moments of `fracbit calibrate`: round for least error of every layer's output.
    #[arg(long, value_name = "DIR")]
    calibration: Option<PathBuf>,
    /// Quantize in the order of the data, each matrix so that it makes up for the error of those
    /// before it; slower, and better.
    #[arg(long, requires = "calibration")]
    sequential: bool,
    /// How thoroughly to search for trellis codes: `fast`, `balanced` or `exact` [default:
    /// balanced; on a GPU, which knows no other, exact].
    #[arg(long, value_name = "EFFORT")]
    effort: Option<Effort>,
    /// Bytes of the codebooks that a group-wise scheme (`gnuq-...`) gets, trained on the model: 16,
    /// 32 or 64.
    #[arg(long, value_name = "BYTES", default_value_t = 16)]
    codebook_bytes: usize,
    /// Refuse to start when more memory than this, such as 8GB, is needed beside the mapped file.
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    /// Continue an interrupted run of the same command.
    #[arg(long)]
    resume: bool,
    /// Print the plan and the memory it takes, write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace OUT when it is a model directory.
    #[arg(long)]
    force: bool,
    /// Where codes of trellis schemes are searched: with `--effort exact` the same bytes on both.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Let a cluster of Ray round the matrices, with the same bytes: `auto`, `local` or host:port.
    /// Of the Python package alone; with --data-free or --calibration.
    #[arg(long, value_name = "ADDRESS",
        conflicts_with_all = ["sequential", "text", "learn", "time", "tokens", "dry_run"])]
    ray: Option<String>,
    /// Print one JSON document: the report, or with --dry-run the plan.
    #[arg(long)]
    json: bool,
    // Last, since the heading of a group stays for what follows it.
    #[command(flatten)]
    learning: LearnArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    speed: SpeedArgs,
    #[command(flatten)]
    shape: ShapeArgs,
    #[command(flatten)]
    losses: LossArgs,
}

/// What to learn from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Calibration")]
pub(crate) struct LearnArgs {
    /// Text of the kind that the model will read, to calibrate on [default: a built-in one of
    /// prose, dialogue and code].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["calibration", "data_free", "learn"])]
    text: Option<PathBuf>,
    /// Calibrate on nothing: each matrix is rounded on its own. Takes less time and loses far more.
    #[arg(long, conflicts_with_all = ["calibration", "learn", "tokens"])]
    data_free: bool,
    /// Also measure what each matrix loses in a quantized model, and tune the scales last, from
    /// FILE or without it from a text that the model writes. Takes longest and loses least, by far
    /// at 2 bits and below.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
        conflicts_with_all = ["calibration", "sequential", "sensitivity", "objective", "dry_run"])]
    #[expect(clippy::option_option, reason = "a flag that may have a value")]
    learn: Option<Option<PathBuf>>,
    /// Take about this time, such as 5m or 2h: fewer tokens are calibrated on, or layers all at
    /// once, where it is short.
    #[arg(long, value_name = "TIME", value_parser = args::duration, conflicts_with_all = ["data_free", "learn", "calibration", "tokens"])]
    time: Option<Duration>,
    /// Tokens to calibrate on [default: 8192; with --learn 32768].
    #[arg(long, value_name = "N", value_parser = args::count, conflicts_with = "calibration")]
    tokens: Option<usize>,
    #[command(flatten)]
    how: TextArgs,
}

impl LearnArgs {
    /// The file that is read, if one is.
    fn file(&self) -> Option<&PathBuf> {
        self.text.as_ref().or_else(|| self.learn.as_ref()?.as_ref())
    }

    /// Reads the text, if one is to be calibrated on.
    fn text(&self, source: &Source) -> Result<Option<CalibrationText>, Failure> {
        let how = self.how.recorded();
        if !how.is_empty() && self.file().is_none() {
            let rule = format!("{} is about a text of yours: --text FILE is missing", how.trim());
            return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
        }
        Ok(match self.file() {
            Some(path) => Some(CalibrationText::Given(files::read_text(path)?, path.clone())),
            None if self.data_free => None,
            None if self.learn.is_some() => Some(CalibrationText::Written),
            None => Some(CalibrationText::General.readable_by(&source.opened)),
        })
    }

    /// Tokens to calibrate on, if a time does not say fewer.
    fn tokens(&self) -> usize {
        let usual = match (&self.learn, self.time) {
            (None, None) => learn::QUICK_TOKENS,
            _ => learn::TOKENS,
        };
        self.tokens.unwrap_or(usual)
    }

    fn recorded(&self, show: ShowPath) -> String {
        if self.data_free {
            return " --data-free".to_owned();
        }
        let text = match (&self.learn, &self.text) {
            (Some(Some(path)), _) => format!(" --learn={}", show(path)),
            (Some(None), _) => " --learn".to_owned(),
            (None, Some(path)) => format!(" --text {}", show(path)),
            (None, None) => String::new(),
        };
        let much = match self.time {
            Some(time) => format!(" --time {}s", time.as_secs()),
            None => format!(" --tokens {}", self.tokens()),
        };
        text + &much + &self.how.recorded()
    }
}

/// Where the plan comes from.
enum Recipe {
    /// It is made.
    Make(PlanOptions, Losses),
    /// It was read, and fits the model.
    Read(Box<Plan>, Inventory),
}

impl QuantizeArgs {
    fn overwrite(&self) -> Overwrite {
        if self.force { Overwrite::Yes } else { Overwrite::No }
    }

    fn recipe(&self, source: &Source, context: &Context) -> Result<Recipe, Failure> {
        if let Some(path) = &self.plan {
            let (plan, inventory) = planning::read(path, source)?;
            return Ok(Recipe::Read(Box::new(plan), inventory));
        }
        let options = planning::options(source, &self.target, &self.shape, &self.speed, context)?;
        let losses = Losses::new(&self.losses, &options)?;
        Ok(Recipe::Make(options, losses))
    }

    /// What the quick measurement before the plan takes, if there is one; refused when it is more
    /// than allowed.
    fn measuring(&self, recipe: &Recipe, source: &Source) -> Result<Option<Bytes>, Failure> {
        let Recipe::Make(options, Losses { source: SensitivitySource::Quick, .. }) = recipe else {
            return Ok(None);
        };
        if self.learning.learn.is_some() {
            return Ok(None);
        }
        let bytes = Protocol::quick(options.seed, true)
            .memory(&source.opened.config, &source.inventory(options.rotation));
        if let Some(most) = self.max_memory.filter(|&most| most < bytes) {
            let rule = format!("measuring what matrices lose takes {bytes}, allowed are {most}");
            let refused = Failure::from(fracbit::Error::Option { option: "--max-memory", rule });
            return Err(refused.hint(UNMEASURED));
        }
        Ok(Some(bytes))
    }

    /// Calibrates on a text, in a directory that an interrupted run may have begun.
    fn calibrate(
        &self,
        recipe: &Recipe,
        source: &Source,
        (text, tokens): (&CalibrationText, usize),
        scratch: &Path,
        rounders: &Rounders,
        context: &Context,
    ) -> Result<Arc<Calibration>, Failure> {
        let planned = match recipe {
            Recipe::Make(options, _) if self.learning.learn.is_some() => Some(options),
            _ => None,
        };
        let inventory = source.inventory(RotationMode::Online);
        let options = LearnOptions {
            tokens,
            text: self.learning.how.options(),
            seed: self.shape.seed,
            rounders: rounders.clone(),
            max_memory: self.max_memory,
        };
        let text = text.named();
        let bytes = learn::memory(&source.opened, &inventory, planned, options.tokens, text.is_none())?;
        context.progress.note(&format!("memory: calibrating takes about {bytes} beside the mapped file"));
        memory::enough(bytes, "calibrating").map_err(|e| e.hint("`--data-free` calibrates on nothing"))?;
        let calibration = learn::calibrated(&source.opened, text, scratch, &options, &context.progress)?;
        context.progress.finish();
        let info = &calibration.info;
        context.progress.note(&format!("calibrated on {} tokens, {}", info.tokens, info.text));
        Ok(calibration)
    }

    /// What there is to do, within `--time` if it was given; says how long it will take.
    fn work(
        &self,
        recipe: &Recipe,
        source: &Source,
        text: Option<&CalibrationText>,
        rounders: &Rounders,
        context: &Context,
    ) -> Result<Work, Failure> {
        let learning = &self.learning;
        let (inventory, options) = match recipe {
            Recipe::Make(options, _) => (source.inventory(options.rotation), Some(options)),
            Recipe::Read(_, inventory) => (inventory.clone(), None),
        };
        let scheme = options.map(|options| learn::near(&inventory, options)).transpose()?.flatten();
        let measured = options.is_some_and(|o| !matches!(o.target, Target::Uniform(_)));
        let quick = matches!(recipe, Recipe::Make(_, Losses { source: SensitivitySource::Quick, .. }));
        let learned = learning.learn.is_some();
        let most = Work {
            tokens: if text.is_some() { learning.tokens() } else { 0 },
            measured: if measured && quick {
                Protocol::quick(self.shape.seed, text.is_some() || self.calibration.is_some()).tokens
            } else {
                0
            },
            sequential: text.is_some() || self.sequential,
            learned: if learned && measured { inventory.matrices.len() } else { 0 },
        };
        let scheme = scheme.unwrap_or(TYPICAL.parse().expect("a scheme"));
        let pace = Pace::measure(&source.opened, scheme, rounders)?;
        let work = learning.time.map_or(most, |limit| pace.within(limit, most));
        let how = match (work.tokens, work.sequential) {
            (0, _) => "without a calibration".to_owned(),
            (tokens, true) => format!("calibrated on {tokens} tokens, layer by layer"),
            (tokens, false) => format!("calibrated on {tokens} tokens, all layers at once"),
        };
        context.progress.note(&format!("time: about {}, {how}", About(pace.of(work))));
        if let Some(limit) = learning.time.filter(|&limit| pace.of(work) > limit) {
            context.progress.note(&format!("note: no less will do, {} were asked for", About(limit)));
        }
        Ok(work)
    }

    /// How thoroughly to search; the default is the best of the three by divergence won per minute
    /// (`docs/lab/2026-11-search.md`).
    fn effort(&self) -> Effort {
        let default = if self.device == DeviceName::Cuda { Effort::Exact } else { Effort::Balanced };
        self.effort.unwrap_or(default)
    }

    /// Who rounds the matrices, if not this process.
    fn dealt(&self, context: &Context) -> Result<Option<Arc<dyn Dealt>>, Failure> {
        let Some(address) = &self.ray else { return Ok(None) };
        let refuse = |rule: &str| {
            let rule = rule.to_owned();
            Failure::from(fracbit::Error::Option { option: "--ray", rule })
        };
        if !self.learning.data_free && self.calibration.is_none() {
            let rule = "deals matrices that are rounded each for itself; by default they are rounded layer by layer, each for what those before it give";
            return Err(refuse(rule).hint("`fracbit calibrate` and `--calibration DIR`, or `--data-free`"));
        }
        if self.device != DeviceName::Cpu {
            return Err(refuse("is for processors: leave out --device"));
        }
        context.dealt(address).map(Some)
    }

    /// What searches for codes.
    fn rounders(&self) -> Result<Rounders, Failure> {
        let effort = self.effort();
        if self.device == DeviceName::Cpu {
            return Ok(Rounders::new(effort));
        }
        if effort != Effort::Exact {
            let rule = format!("should be exact with --device cuda, got {effort}");
            return Err(fracbit::Error::Option { option: "--effort", rule }.into());
        }
        gpu::rounders()
    }

    /// The command for the record. It names what decides the result and nothing else: no output
    /// path, no threads.
    fn recorded(&self, show: ShowPath) -> String {
        let model = show(&self.model);
        let calibration = self.calibration.as_ref().map_or_else(String::new, |dir| {
            format!(" --calibration {}{}", show(dir), if self.sequential { " --sequential" } else { "" })
        });
        let calibration = match self.calibration {
            Some(_) => calibration,
            None => self.learning.recorded(show),
        };
        let mut effort = format!(" --effort {}", self.effort());
        if self.codebook_bytes != 16 {
            effort += &format!(" --codebook-bytes {}", self.codebook_bytes);
        }
        if let Some(path) = &self.plan {
            return format!("fracbit quantize {model} --plan {}{calibration}{effort}", show(path));
        }
        let mut line = format!("fracbit quantize {model} {}", self.target.recorded());
        let timed = self.target.limit_us(self.speed.batch).is_some();
        if self.target.scheme.is_none() {
            let (palette, code) = (self.shape.palette(timed), Code::from(self.shape.code));
            line += &format!(" --palette {} --code {}", palette.name(), code.name());
        }
        let default =
            if self.target.scheme.is_some() { SensitivitySource::Prior } else { SensitivitySource::Quick };
        let sensitivity = self.losses.sensitivity.as_ref().unwrap_or(&default);
        let sensitivity = match self.learning.learn {
            Some(_) => String::new(),
            None => format!(" --sensitivity {}", sensitivity.recorded(show)),
        };
        let (rotation, seed) = (self.shape.rotation.name(), self.shape.seed);
        let smoothing = if self.shape.no_smoothing { " --no-smoothing" } else { "" };
        line += &format!(" --rotation {rotation}{smoothing}{sensitivity} --seed {seed}");
        if self.shape.keep_head {
            line += " --keep-head";
        }
        if self.shape.no_bands {
            line += " --no-bands";
        }
        line + &self.speed.recorded(show) + &self.shape.recorded() + &calibration + &effort
    }
}

/// Peak memory of the two phases, which do not overlap.
struct Memory {
    estimate: MemoryEstimate,
    measuring: Option<Bytes>,
}

impl Memory {
    fn quantizing(&self) -> String {
        let MemoryEstimate { matrix, packed, search, moments } = self.estimate;
        let total = self.estimate.total();
        let moments = if moments.0 > 0 { format!(", input moments {moments}") } else { String::new() };
        format!(
            "memory: quantizing takes about {total} beside the mapped file: largest matrix {matrix}, its codes {packed}, searches {search}{moments}"
        )
    }

    fn json(&self) -> serde_json::Value {
        let MemoryEstimate { matrix, packed, search, moments } = self.estimate;
        json!({
            "matrix": matrix, "packed": packed, "search": search, "moments": moments, "total": self.estimate.total(), "measuring": self.measuring,
        })
    }
}

const UNMEASURED: &str = "`--sensitivity prior` measures nothing and loses more";

/// Divergence above which a model says other things than the original at most places.
const POOR: f64 = 0.5;

fn foretold(forecast: &Forecast) -> String {
    let Forecast { kl, low, high, perplexity_ratio } = forecast;
    let up = 100.0 * (perplexity_ratio - 1.0);
    let line = format!(
        "forecast: KL divergence {kl:.3} ({low:.3} to {high:.3}) nats per token, perplexity about {up:.0} % up"
    );
    if *kl > POOR { line + "\nwarning: that is a poor model: give it more bits" } else { line }
}

fn measuring_line(bytes: Bytes) -> String {
    format!("memory: measuring takes about {bytes} for noisy matrices and the logits, beside the mapped file")
}

pub(crate) fn run(args: &QuantizeArgs, context: &mut Context) -> Result<(), Failure> {
    let rounders = args.rounders()?;
    let dealt = args.dealt(context)?;
    if let (Some(out), false) = (&args.out, args.dry_run) {
        let read = [Some(&args.model), args.plan.as_ref(), args.calibration.as_ref(), args.learning.file()];
        files::apart(out, &read.into_iter().flatten().map(PathBuf::as_path).collect::<Vec<_>>())?;
        files::nameable(out, args.json)?;
        files::available(out, args.overwrite(), args.resume)?;
    }
    let source = Source::open(&args.model, context)?;
    let mut recipe = args.recipe(&source, context)?;
    let given = args.calibration.as_ref().map(|dir| Calibration::open(dir).map(Arc::new)).transpose()?;
    if let Some(calibration) = &given {
        calibration.require_source(source.hash())?;
    }
    let text = if given.is_some() { None } else { args.learning.text(&source)? };
    let measuring = args.measuring(&recipe, &source)?;
    let memory = planning::memory(&source, &args.target, &args.speed);
    if let Recipe::Make(options, _) = &recipe {
        planning::reachable(&source, options, &args.target, memory)?;
    }
    if !args.dry_run {
        source.check(context)?;
    }
    let mut dir = match &args.out {
        Some(out) if !args.dry_run => {
            match begin(out, args, &source, given.as_deref(), text.as_ref(), context)? {
                Some(dir) => Some(dir),
                None => return Ok(()),
            }
        }
        _ => None,
    };
    let work = match &dir {
        None => Work::default(),
        Some(dir) => {
            // An interrupted run with `--time` goes on as it began.
            let kept = dir.scratch("work.json");
            let found = fracbit_io::kept(&kept).and_then(|bytes| serde_json::from_slice(&bytes).ok());
            match found {
                Some(work) => work,
                None => {
                    let work = args.work(&recipe, &source, text.as_ref(), &rounders, context)?;
                    fracbit_io::keep(&kept, json!(work).to_string().as_bytes())
                        .map_err(|e| Failure::writing(&kept, e))?;
                    work
                }
            }
        }
    };
    let sequential = args.sequential || text.is_some() && work.sequential;
    let calibration = match (&mut dir, &text) {
        (Some(dir), Some(text)) => {
            let scratch = dir.scratch("");
            let calibrated =
                args.calibrate(&recipe, &source, (text, work.tokens), &scratch, &rounders, context);
            // What was learned is worth something before the first matrix is done.
            if learn::begun(&scratch) {
                dir.keep();
            }
            Some(calibrated?)
        }
        (None, Some(_)) => {
            context
                .progress
                .note("note: this plan is made without the calibration, which comes with the quantization");
            None
        }
        _ => given,
    };
    let weights = match &mut recipe {
        Recipe::Make(options, losses) => {
            let fixed = losses.rotation(args.shape.rotation, options)?;
            source.weights(fixed, options, calibration.as_deref(), context)?
        }
        Recipe::Read(plan, _) => {
            let (calibration, progress) = (calibration.as_deref(), &context.progress);
            smoothing::planned_source(
                &source.opened,
                plan.rotation,
                plan.seed,
                plan.smoothing,
                calibration,
                progress,
            )?
        }
    };
    if let Some(bytes) = measuring {
        context.progress.note(&measuring_line(bytes));
        memory::enough(bytes, "measuring").map_err(|e| e.hint(UNMEASURED))?;
    }
    let kept = dir.as_ref().map(|d| d.scratch("sensitivity.json"));
    let learned = match (&dir, &calibration, &recipe) {
        (Some(dir), Some(calibration), Recipe::Make(options, _)) if args.learning.learn.is_some() => {
            let (inventory, scratch) = (source.inventory(options.rotation), dir.scratch(""));
            let progress = &context.progress;
            learn::losses(&weights, &inventory, options, calibration, &scratch, &rounders, progress)?
        }
        _ => None,
    };
    let aids = Aids {
        calibration: calibration.as_deref(),
        kept: kept.as_deref(),
        learned: learned.as_ref(),
        memory,
    };
    let (inventory, plan) = resolve(recipe, &source, &weights, &aids, context)?;
    context.progress.finish();
    let threads = rayon::current_num_threads();
    let estimate = Memory {
        estimate: MemoryEstimate::new(
            &plan,
            &inventory,
            threads,
            &rounders,
            calibration.is_some(),
            sequential,
        ),
        measuring,
    };
    let Some(dir) = dir else {
        return show(args, &plan, &estimate, context);
    };
    context.progress.note(&estimate.quantizing());
    memory::enough(estimate.estimate.total(), "quantizing")
        .map_err(|e| e.hint("fewer `--threads` search for fewer matrices at a time"))?;
    if let Some(forecast) = &plan.forecast {
        context.progress.note(&foretold(forecast));
    }

    let options = QuantizeOptions {
        force: args.force,
        command: args.recorded(files::name),
        source: files::name(&args.model),
        source_hash: source.hash().to_owned(),
        calibration,
        sequential,
        max_memory: args.max_memory,
        rounders,
        codebook_bytes: Some(args.codebook_bytes),
        codebooks: Vec::new(),
        dealt,
    };
    let (report, tuned) = if args.learning.learn.is_some() {
        tune::quantize_and_tune(dir, &source.opened, &inventory, &plan, &options, &context.progress)?
    } else {
        (fracbit::quantize_in(dir, &weights, &inventory, &plan, &options, &context.progress)?, None)
    };
    context.progress.finish();
    if let Some(tuned) = tuned {
        context.progress.note(&format!(
            "tuned: divergence from the original {:.4} nats per token, {:.4} before, on {} tokens that were held out",
            tuned.after, tuned.before, tuned.held_tokens
        ));
    }
    if args.json {
        return context.out.json(&report);
    }
    let (model, typed) = (files::typed(&args.model), files::typed(&report.path));
    let cache = plan
        .cache
        .map_or_else(String::new, |cache| format!(" --kv {} --ctx {}", cache.kv.bits(), cache.context));
    writeln!(
        context.out,
        "{}: {} of tensors, {:.4} bits per weight, everything counted; predicted loss {:.4} nats per token\n\n\
         Try next:\n  fracbit eval {typed} --text FILE --baseline {model}\n  fracbit run {typed} -p \"Once upon a time\"{cache}",
        report.path.display(),
        Bytes(report.bytes),
        report.bits_per_weight,
        report.predicted_loss,
    )?;
    Ok(())
}

/// The directory to write, new or continued; `None` when an earlier run had finished it.
fn begin(
    out: &Path,
    args: &QuantizeArgs,
    source: &Source,
    calibration: Option<&Calibration>,
    text: Option<&CalibrationText>,
    context: &Context,
) -> Result<Option<OutputDir>, Failure> {
    let key = json!({
        "version": env!("CARGO_PKG_VERSION"), "command": args.recorded(|path| path.display().to_string()), "source": source.hash(),
        "calibration": calibration.map(Calibration::digest),
        "text": text.and_then(CalibrationText::named).map(|(text, path)| calibrate::text_origin(text, path)),
    });
    files::begin(out, args.overwrite(), &key.to_string(), args.resume, context)
}

fn resolve(
    recipe: Recipe,
    source: &Source,
    weights: &WeightSource,
    aids: &Aids<'_>,
    context: &Context,
) -> Result<(Inventory, Plan), Failure> {
    match recipe {
        Recipe::Make(options, losses) => {
            let (inventory, _, plan) = planning::make(source, &losses, &options, weights, aids, context)?;
            Ok((inventory, plan))
        }
        Recipe::Read(plan, inventory) => Ok((inventory, *plan)),
    }
}

fn show(args: &QuantizeArgs, plan: &Plan, memory: &Memory, context: &mut Context) -> Result<(), Failure> {
    if args.json {
        return context.out.json(&json!({ "plan": plan, "memory": memory.json() }));
    }
    writeln!(context.out, "{}", Shown(plan))?;
    if let Some(bytes) = memory.measuring {
        writeln!(context.out, "{}", measuring_line(bytes))?;
    }
    Ok(writeln!(context.out, "{}", memory.quantizing())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Probe {
        #[command(flatten)]
        args: QuantizeArgs,
    }

    fn args(line: &str) -> QuantizeArgs {
        match Probe::try_parse_from(std::iter::once("quantize").chain(line.split(' '))) {
            Ok(probe) => probe.args,
            Err(e) => panic!("{line}: {e}"),
        }
    }

    #[test]
    fn a_bad_forecast_is_a_warning() {
        let forecast = |kl: f64| Forecast { kl, low: kl / 2.0, high: 2.0 * kl, perplexity_ratio: kl.exp() };
        assert!(
            foretold(&forecast(0.8)).contains("warning") && foretold(&forecast(0.8)).contains("123 % up")
        );
        assert!(!foretold(&forecast(0.1)).contains("warning"));
    }

    #[test]
    fn the_record_holds_what_decides_the_bytes_and_no_more() {
        let table = [
            (
                "M -o A --bits 3.25 --force",
                "fracbit quantize M --bits 3.25 --palette tcq --code fine --rotation auto --sensitivity quick --seed 0 --tokens 8192 --effort balanced",
            ),
            (
                "M -o B --scheme tcq-fast-2 --rotation fold --no-smoothing --data-free",
                "fracbit quantize M --scheme tcq-fast-2 --rotation fold --no-smoothing --sensitivity prior --seed 0 --data-free --effort balanced",
            ),
            (
                "M -o B --plan p.json --effort fast --codebook-bytes 32",
                "fracbit quantize M --plan p.json --tokens 8192 --effort fast --codebook-bytes 32",
            ),
            (
                "M -o B --plan p.json --calibration C --sequential --resume --max-memory 1GB",
                "fracbit quantize M --plan p.json --calibration C --sequential --effort balanced",
            ),
            (
                "M -o B --bits 2 --learn=t.txt --tokens 100 --bos --resume",
                "fracbit quantize M --bits 2 --palette tcq --code fine --rotation auto --seed 0 --learn=t.txt --tokens 100 --bos --effort balanced",
            ),
            (
                "M -o B --scheme tcq-2 --learn",
                "fracbit quantize M --scheme tcq-2 --rotation auto --seed 0 --learn --tokens 32768 --effort balanced",
            ),
            (
                "M -o B --latency 2ms --bits 3 --profile m.json --pin layers.0.*=tcq-4 --exclude lm_head",
                "fracbit quantize M --bits 3 --latency 2000us --palette all --code fine --rotation auto --sensitivity quick \
                 --seed 0 --profile m.json --context 128 --batch 1 --pin 'layers.0.*=tcq-4' --exclude 'lm_head' --tokens 8192 --effort balanced",
            ),
            (
                "M -o C --size 1MB --keep-head --seed 3 --palette all --rotation none --sensitivity a.json --text t.txt --time 5m",
                "fracbit quantize M --size 1000000 --palette all --code fine --rotation none --sensitivity a.json --seed 3 --keep-head --text t.txt --time 300s --effort balanced",
            ),
        ];
        for (line, want) in table {
            let args = args(line);
            assert_eq!(args.recorded(files::name), want);
        }
        let elsewhere = args("/home/me/M -o B --bits 2 --calibration ../stats/ --sensitivity ./s/a.json");
        let want = "fracbit quantize M --bits 2 --palette tcq --code fine --rotation auto --sensitivity a.json --seed 0 --calibration stats --effort balanced";
        assert_eq!(elsewhere.recorded(files::name), want, "no directory of this machine");
    }
}
