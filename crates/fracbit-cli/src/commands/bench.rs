//! `fracbit bench`.

use super::bench_psumbook::{self, PsumbookArgs};
use super::bench_serve::ServeArgs;
use crate::{
    args::{self, CacheArgs, CodeName},
    context::{Context, Out},
    failure::Failure,
    files,
    gpu::{self, DeviceName},
    memory,
    table::Table,
};
use clap::{
    ArgGroup, Args, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use fracbit::{Effort, MachineProfile, Preset, machine::Machine, preset::PRESETS};
use fracbit_base::{Bytes, Code, Palette, Scheme, Shape};
use fracbit_bench::{
    self as bench, DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, EncodeOptions, EncodeSpeed,
    KernelOptions, KernelSpeed, LimitOptions, MachineLimits, ModelOptions, ModelSpeed, Spread, Subject,
    TargetOptions, TargetSpeed,
};
use serde::Serialize;
use std::{io::Write, path::PathBuf, sync::Arc};

const AFTER: &str = "\
Every bench measures the machine's own limits in the same rounds and prints shares of them. Numbers are medians, with \
least and most behind them: a wide spread says that something else ran on the machine. With --json a list of objects \
is printed, with the fields named in the help of each bench.

Examples:
  fracbit bench limits
  fracbit bench kernels --scheme tcq-2 --scheme tcq-fast-2 --batch 1,8
  fracbit bench psumbook --threads 1 --batch 1,4
  fracbit bench model --shape llama-3.2-1b --bits 2 --vocab 32000";

const AFTER_LIMITS: &str = "\
JSON fields: threads, bytes, read_gb_per_s, read_spread, int8_gmac_per_s, int8_spread, tile_gmac_per_s (with AMX), \
loop_us, loop_spread, rayon_us, rayon_spread (spreads are [least, most]).

Example:
  fracbit bench limits --threads 1,2 --json";

const AFTER_KERNELS: &str = "\
JSON fields: scheme, code, bits, threads, batch, gweights_per_s, gb_per_s, read_share, int8_share, spread (of \
gweights_per_s: [least, most]), read_gb_per_s, int8_gmac_per_s, isa. With --device cuda: scheme, code, bits, engine, \
default, batch, us, gweights_per_s, gb_per_s, spread.

Example:
  fracbit bench kernels --scheme tcq-3 --shape 8192x2048 --batch 1,2,4,8 --threads 1 --json";

const AFTER_MODEL: &str = "\
JSON fields: model, scheme, code, bits, threads, prompt, prefill_tok_s, prefill_spread, int8_share, context, kv, batch, \
decode_tok_s, decode_spread, decode_gb_per_s, read_share, read_gb_per_s, int8_gmac_per_s. With --device cuda: model, \
scheme, bits, prompt, prefill_tok_s, prefill_spread, context, decode_tok_s, decode_spread, decode_gb_per_s.

Examples:
  fracbit bench model small --threads 1
  fracbit bench model --shape llama-3.2-1b --vocab 32000 --scheme tcq-fast-2 --prompt 128,512";

const AFTER_ENCODE: &str = "\
JSON fields: scheme, code, bits, effort, threads, kweights_per_s, spread ([least, most]), nmse.

Example:
  fracbit bench encode --scheme tcq-2 --effort fast,exact --threads 1,2";

const AFTER_TARGETS: &str = "\
JSON fields: target_us, predicted_us, measured_us, spread, ratio (measured over predicted), bits_per_weight, groups, loss, \
loss_unfused, uniform, uniform_loss.

Example:
  fracbit bench targets --shape llama-3.2-1b --profile machine.json";

/// Measure speed beside the limits of this machine.
///
/// How fast memory is read and int8 numbers are multiplied here, how near to that the kernels of
/// each scheme come, and how many tokens per second a whole model makes of it.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Limits(LimitArgs),
    Kernels(KernelArgs),
    Psumbook(PsumbookArgs),
    Model(ModelArgs),
    Targets(TargetArgs),
    Serve(ServeArgs),
    Encode(EncodeArgs),
}

/// What every bench takes.
#[derive(Debug, Args)]
pub(super) struct Common {
    /// Numbers of threads, such as 1,2 [default: 1 and all cores].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = args::threads)]
    threads: Vec<usize>,
    /// Measurements of each number [default: enough for a steady median].
    #[arg(long, value_name = "N", value_parser = args::count)]
    pub(super) rounds: Option<usize>,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

impl Common {
    pub(super) fn threads(&self) -> Vec<usize> {
        if self.threads.is_empty() { bench::default_threads() } else { self.threads.clone() }
    }

    /// As a list or as a table.
    pub(super) fn print<T: Serialize>(
        &self,
        rows: &[T],
        table: impl Fn(&[T]) -> Table,
        context: &mut Context,
    ) -> Result<(), Failure> {
        context.progress.finish();
        if self.json { context.out.json(&rows) } else { show(&mut context.out, &table(rows)) }
    }
}

/// Measure reads from memory and int8 products.
///
/// Sums an array that is larger than all caches with the widest loads, and multiplies int8 numbers
/// in registers with the widest vector instruction and, where the processor has AMX, in tile
/// registers: no kernel can be faster than these.
#[derive(Debug, Args)]
#[command(after_help = AFTER_LIMITS)]
struct LimitArgs {
    /// Size of the array; below 2GiB caches may help.
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    bytes: Bytes,
    #[command(flatten)]
    common: Common,
}

/// Measure the product of packed matrices and activations.
///
/// Walks through matrices of random codes that together are larger than all caches. Before that,
/// the first rows are compared with the scalar reference.
#[derive(Debug, Args)]
#[command(after_help = AFTER_KERNELS)]
struct KernelArgs {
    /// A scheme to measure, such as tcq-3; may be repeated [default: a choice over families and
    /// rates].
    #[arg(long, value_name = "SCHEME")]
    scheme: Vec<Scheme>,
    /// Every scheme with every trellis code.
    #[arg(long, conflicts_with = "scheme")]
    all: bool,
    /// Outputs by inputs of a matrix.
    #[arg(long, value_name = "RxC", default_value = "2048x8192", value_parser = shape)]
    shape: Shape,
    /// Tokens multiplied at once.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1", value_parser = args::count)]
    batch: Vec<usize>,
    /// Distinct codes to walk through; below 1GiB (2GiB on a GPU) caches may help.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    bytes: Bytes,
    /// Where to measure: on a GPU up to 8 tokens, and every way to multiply that a scheme has.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    common: Common,
}

/// Measure prefill and decode of a whole model.
///
/// Either a model directory, or a shape with random codes: then nothing is encoded or downloaded,
/// and embedding and head are packed like every other matrix.
#[derive(Debug, Args)]
#[command(after_help = AFTER_MODEL, group = ArgGroup::new("subject").required(true).args(["model", "shape"]))]
struct ModelArgs {
    /// Model directory, quantized or not.
    model: Option<PathBuf>,
    /// Shape of the model instead of a directory.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Option<Preset>,
    /// Bits per weight of the random codes, in quarters: trellis codes up to 5, scalar 6 to 8; may
    /// be a list.
    #[arg(long, value_name = "B,..", value_delimiter = ',', conflicts_with_all = ["scheme", "model"])]
    bits: Vec<f64>,
    /// Code of the trellis schemes of --bits.
    #[arg(long, value_enum, default_value_t = CodeName::Fine, requires = "bits")]
    code: CodeName,
    /// Scheme of the random codes [default: tcq-2]; may be repeated.
    #[arg(long, value_name = "SCHEME", conflicts_with = "model")]
    scheme: Vec<Scheme>,
    /// Vocabulary instead of the shape's.
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = args::count)]
    vocab: Option<usize>,
    /// Blocks instead of the shape's.
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = args::count)]
    layers: Option<usize>,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "128", value_parser = args::count)]
    prompt: Vec<usize>,
    /// Tokens to generate in one measurement.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = args::count)]
    generate: usize,
    /// Tokens in the cache when generating begins.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count)]
    context: usize,
    /// Sequences decoded at once; tokens per second are those of all together.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1", value_parser = args::count)]
    batch: Vec<usize>,
    /// Size of the array that the read bandwidth is measured with.
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    bytes: Bytes,
    /// Where to measure: a GPU decodes one sequence at a time.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    cache: CacheArgs,
    /// Half-precision matrices instead of packed ones, on a GPU.
    #[arg(long, conflicts_with_all = ["scheme", "bits", "model"])]
    f16: bool,
    #[command(flatten)]
    common: Common,
}

/// Measure plans to a speed beside their predictions.
///
/// Plans for several times between those of the fastest and the slowest uniform models, and decodes
/// with a model of random codes made by each plan. Beside it the loss of the best single scheme
/// that meets the same time, by prior sensitivities.
#[derive(Debug, Args)]
#[command(after_help = AFTER_TARGETS)]
struct TargetArgs {
    /// Shape of the model.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Preset,
    /// A document of `fracbit profile` for that shape.
    #[arg(long, value_name = "FILE")]
    profile: PathBuf,
    /// Number of times.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = args::count)]
    count: usize,
    /// Tokens in the cache.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count)]
    context: usize,
    /// Sequences decoded together.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = args::batch)]
    batch: usize,
    /// Measurements of each model in each of three passes.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = args::count)]
    rounds: usize,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

impl TargetArgs {
    fn run(&self, context: &mut Context) -> Result<(), Failure> {
        let (profile, kernels) = (MachineProfile::read(&self.profile)?, fracbit::kernels()?);
        let origin = self.profile.display().to_string();
        profile.require_current(&origin, &kernels, rayon::current_num_threads())?;
        let Self { count, context: tokens, batch, rounds, .. } = *self;
        let options = TargetOptions { count, context: tokens, batch, rounds };
        let config = self.shape.model_config()?;
        let rows = bench::targets(&config, &Arc::new(profile), &options, &kernels, &context.progress)?;
        context.progress.finish();
        if self.json {
            return context.out.json(&rows);
        }
        show(&mut context.out, &targets_table(&rows))?;
        Ok(writeln!(context.out, "\n{}", targets_verdict(&rows))?)
    }
}

/// What a reader would look for in the table.
fn targets_verdict(rows: &[TargetSpeed]) -> String {
    let miss = rows.iter().map(|r| (r.ratio - 1.0).abs()).fold(0.0, f64::max);
    let worse: Vec<&TargetSpeed> =
        rows.iter().filter(|r| r.uniform_loss.is_some_and(|best| r.loss > best)).collect();
    let losses = match worse.as_slice() {
        [] => "no plan is predicted to lose more than the best single scheme in its time".to_owned(),
        all => format!("{} plans are predicted to lose more than a single scheme in their time", all.len()),
    };
    format!("measured times differ from predicted ones by at most {:.1} %; {losses}", 100.0 * miss)
}

fn targets_table(rows: &[TargetSpeed]) -> Table {
    let head = [
        "target ms",
        "predicted",
        "measured",
        "least-most",
        "ratio",
        "bits",
        "groups",
        "loss",
        "unfused",
        "uniform",
        "its loss",
    ];
    let mut table = Table::new(head, &[9]);
    let ms = |us: f64| format!("{:.2}", us / 1000.0);
    let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |l| format!("{l:.4}"));
    for row in rows {
        table.row([
            ms(row.target_us),
            ms(row.predicted_us),
            ms(row.measured_us),
            format!("{}-{}", ms(row.spread.min), ms(row.spread.max)),
            format!("{:.3}", row.ratio),
            format!("{:.3}", row.bits_per_weight),
            row.groups.to_string(),
            loss(Some(row.loss)),
            loss(row.loss_unfused),
            row.uniform.map_or_else(|| "-".to_owned(), |s| s.to_string()),
            loss(row.uniform_loss),
        ]);
    }
    table
}

/// Measure the search for codes.
///
/// Weights of one call stay in cache, as in quantizing. The error is measured on Gaussian weights,
/// the same for all.
#[derive(Debug, Args)]
#[command(after_help = AFTER_ENCODE)]
struct EncodeArgs {
    /// A scheme to measure, such as tcq-3; may be repeated [default: tcq-1.5, 2, 2.5, 3, 4 and 5].
    #[arg(long, value_name = "SCHEME")]
    scheme: Vec<Scheme>,
    /// Efforts of the trellis search: fast, balanced, exact [default: all].
    #[arg(long, value_name = "EFFORT,..", value_delimiter = ',')]
    effort: Vec<Effort>,
    /// Gaussian weights to measure the error on.
    #[arg(long, value_name = "N", default_value_t = 1 << 16, value_parser = args::count)]
    weights: usize,
    #[command(flatten)]
    common: Common,
}

impl EncodeArgs {
    fn options(&self) -> Result<EncodeOptions, Failure> {
        const CHOICE: [&str; 6] = ["tcq-1.5", "tcq-2", "tcq-2.5", "tcq-3", "tcq-4", "tcq-5"];
        let default = EncodeOptions::new(schemes(&self.scheme, &CHOICE)?);
        Ok(EncodeOptions {
            efforts: if self.effort.is_empty() { default.efforts.clone() } else { self.effort.clone() },
            threads: self.common.threads(),
            weights: self.weights,
            rounds: self.common.rounds.unwrap_or(default.rounds),
            ..default
        })
    }
}

/// Schemes of `bench kernels` without flags.
const CHOICE: [&str; 15] = [
    "tcq-fast-2",
    "tcq-2",
    "tcq-fast-2.5",
    "tcq-2.5",
    "tcq-2.75",
    "half-tcq-2.75",
    "tcq-fast-3",
    "tcq-3",
    "tcq-fast-4",
    "tcq-4",
    "tcq-5",
    "vq-2",
    "vq-4",
    "nuq-4",
    "nuq-8",
];

impl KernelArgs {
    fn options(&self) -> Result<KernelOptions, Failure> {
        // A small run is small in all it does.
        let limit = Bytes(self.bytes.0.saturating_mul(2));
        memory::walked(limit)?;
        let schemes = if self.all { Scheme::all().collect() } else { schemes(&self.scheme, &CHOICE)? };
        let default = KernelOptions::new(schemes);
        Ok(KernelOptions {
            shape: self.shape,
            batch: self.batch.clone(),
            threads: self.common.threads(),
            bytes: self.bytes.0,
            limit_bytes: limit.0,
            rounds: self.common.rounds.unwrap_or(default.rounds),
            ..default
        })
    }
}

impl ModelArgs {
    fn options(&self) -> ModelOptions {
        ModelOptions {
            threads: self.common.threads(),
            prompts: self.prompt.clone(),
            generate: self.generate,
            context: self.context,
            kv: self.cache.kv(),
            batches: self.batch.clone(),
            limit_bytes: self.bytes.0,
            rounds: self.common.rounds.unwrap_or(ModelOptions::default().rounds),
        }
    }

    fn schemes(&self) -> Result<Vec<Scheme>, Failure> {
        if !self.scheme.is_empty() {
            return Ok(self.scheme.clone());
        }
        let bits: &[f64] = if self.bits.is_empty() { &[2.0] } else { &self.bits };
        Ok(bits.iter().map(|&b| scheme(b, self.code.into())).collect::<Result<_, _>>()?)
    }
}

/// Those that were asked for, or a choice.
pub(super) fn schemes(given: &[Scheme], choice: &[&str]) -> Result<Vec<Scheme>, Failure> {
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let parsed: Result<_, fracbit::Error> = choice.iter().map(|s| Ok(s.parse()?)).collect();
    Ok(parsed?)
}

/// The trellis scheme of a rate, or the scalar one above 5 bits.
fn scheme(bits: f64, code: Code) -> Result<Scheme, fracbit::Error> {
    let found = Palette::Tcq.schemes(code).into_iter().find(|s| (s.rate().bits() - bits).abs() < 1e-9);
    found.ok_or_else(|| fracbit::Error::Option {
        option: "--bits",
        rule: format!("should be 1, 1.25, ... 5, 6, 7 or 8, got {bits}"),
    })
}

/// `RxC`.
pub(super) fn shape(text: &str) -> Result<Shape, String> {
    let parts = text.split_once('x').and_then(|(r, c)| Some((r.parse().ok()?, c.parse().ok()?)));
    match parts {
        Some((rows, cols)) if rows > 0 && cols > 0 => Ok(Shape::new(rows, cols)),
        _ => Err(format!("should be outputs x inputs such as 2048x8192, got `{text}`")),
    }
}

pub(crate) fn run(args: &BenchArgs, context: &mut Context) -> Result<(), Failure> {
    match &args.what {
        What::Limits(args) => {
            memory::walked(args.bytes)?;
            let rounds = args.common.rounds.unwrap_or(LimitOptions::default().rounds);
            let options = LimitOptions { bytes: args.bytes.0, threads: args.common.threads(), rounds };
            let rows = bench::limits(&options, &context.progress)?;
            args.common.print(&rows, limits_table, context)
        }
        What::Psumbook(args) => bench_psumbook::run(args, context),
        What::Encode(args) => {
            let rows = bench::encode(&args.options()?, &context.progress)?;
            args.common.print(&rows, encode_table, context)
        }
        What::Kernels(args) if args.device == DeviceName::Cuda => {
            let mut options = args.options()?;
            // `--all` means all that a GPU runs.
            options.schemes.retain(|s| !args.all || s.group().is_none());
            let rows = gpu::bench_kernels(&options, context)?;
            context.progress.finish();
            if args.common.json {
                context.out.json(&rows)
            } else {
                write!(context.out, "{}", device_kernels_table(&rows)).map_err(Failure::from)
            }
        }
        What::Model(args) if args.device == DeviceName::Cuda => {
            let rows = device_models(args, context)?;
            context.progress.finish();
            if args.common.json {
                context.out.json(&rows)
            } else {
                write!(context.out, "{}", device_model_table(&rows)).map_err(Failure::from)
            }
        }
        What::Kernels(args) => {
            let rows = bench::kernels(&args.options()?, &fracbit::kernels()?, &context.progress)?;
            args.common.print(&rows, kernels_table, context)
        }
        What::Model(args) => {
            memory::walked(args.bytes)?;
            let rows = models(args, context)?;
            args.common.print(&rows, model_table, context)
        }
        What::Targets(args) => args.run(context),
        What::Serve(args) => args.run(context),
    }
}

fn device_models(args: &ModelArgs, context: &Context) -> Result<Vec<DeviceModelSpeed>, Failure> {
    let options = args.options();
    let Some(preset) = args.shape else {
        let Some(opened) = args.model.as_deref().map(|dir| files::open(dir, context)).transpose()? else {
            return Ok(Vec::new());
        };
        return gpu::bench_model(DeviceSubject::Opened(&opened), &options, context);
    };
    let schemes = if args.f16 { vec![None] } else { args.schemes()?.into_iter().map(Some).collect() };
    let mut rows = Vec::new();
    for scheme in schemes {
        let subject = DeviceSubject::Random { preset, vocab: args.vocab, layers: args.layers, scheme };
        rows.extend(gpu::bench_model(subject, &options, context)?);
    }
    Ok(rows)
}

fn device_kernels_table(rows: &[DeviceKernelSpeed]) -> Table {
    let header = ["scheme", "batch", "us", "Gweights/s", "least-most", "GB/s"];
    let mut table = Table::new(header, &[1]);
    for row in rows {
        table.row([
            name(&row.scheme, row.code.as_deref(), row.bits),
            row.batch.to_string(),
            format!("{:.2}", row.us),
            format!("{:.1}", row.gweights_per_s),
            range(row.spread),
            format!("{:.1}", row.gb_per_s),
        ]);
    }
    table
}

fn device_model_table(rows: &[DeviceModelSpeed]) -> Table {
    let header =
        ["model", "scheme", "prompt", "prefill tok/s", "context", "decode tok/s", "least-most", "GB/s"];
    let mut table = Table::new(header, &[1]);
    for row in rows {
        table.row([
            row.model.clone(),
            row.scheme.clone().unwrap_or_else(|| format!("{:.2} bits", row.bits)),
            row.prompt.to_string(),
            format!("{:.1}", row.prefill_tok_s),
            row.context.to_string(),
            format!("{:.1}", row.decode_tok_s),
            range(row.decode_spread),
            format!("{:.1}", row.decode_gb_per_s),
        ]);
    }
    table
}

fn models(args: &ModelArgs, context: &Context) -> Result<Vec<ModelSpeed>, Failure> {
    if args.f16 {
        let rule = "goes with --device cuda".to_owned();
        return Err(fracbit::Error::Option { option: "--f16", rule }.into());
    }
    let (options, kernels) = (args.options(), fracbit::kernels()?);
    let Some(preset) = args.shape else {
        let opened = args.model.as_deref().map(|dir| files::open(dir, context)).transpose()?;
        let Some(opened) = opened else { return Ok(Vec::new()) };
        return Ok(bench::model(Subject::Opened(&opened), &options, &kernels, &context.progress)?);
    };
    let mut rows = Vec::new();
    for scheme in args.schemes()? {
        let subject = Subject::Random { preset, vocab: args.vocab, layers: args.layers, scheme };
        rows.extend(bench::model(subject, &options, &kernels, &context.progress)?);
    }
    Ok(rows)
}

pub(super) fn show(out: &mut Out, table: &Table) -> Result<(), Failure> {
    let Machine { cpu, threads, load } = Machine::now();
    let load = load.map(|l| format!(", load {l:.1}")).unwrap_or_default();
    write!(out, "{cpu}, {threads} threads{load}\n\n{table}")?;
    Ok(())
}

fn range(spread: Spread) -> String {
    format!("{:.1}-{:.1}", spread.min, spread.max)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn limits_table(rows: &[MachineLimits]) -> Table {
    let header = [
        "threads",
        "read GB/s",
        "least-most",
        "int8 GMAC/s",
        "least-most",
        "in tiles",
        "loop \u{b5}s",
        "by rayon \u{b5}s",
    ];
    let mut table = Table::new(header, &[]);
    for row in rows {
        table.row([
            row.threads.to_string(),
            format!("{:.1}", row.read_gb_per_s),
            range(row.read_spread),
            format!("{:.0}", row.int8_gmac_per_s),
            range(row.int8_spread),
            row.tile_gmac_per_s.map_or_else(|| "-".to_owned(), |tiles| format!("{tiles:.0}")),
            format!("{:.2}", row.loop_us),
            format!("{:.2}", row.rayon_us),
        ]);
    }
    table
}

/// The name of a scheme from its parts, of which the first may be the whole.
fn name(family: &str, code: Option<&str>, bits: f64) -> String {
    let code = code.filter(|&code| code != "fine").map_or(String::new(), |code| format!("-{code}"));
    if family.parse::<Scheme>().is_ok() { family.to_owned() } else { format!("{family}{code}-{bits}") }
}

fn kernels_table(rows: &[KernelSpeed]) -> Table {
    let header =
        ["scheme", "isa", "threads", "batch", "Gweights/s", "least-most", "GB/s", "of reads", "of int8"];
    let mut table = Table::new(header, &[1]);
    for row in rows {
        table.row([
            name(&row.scheme, row.code.as_deref(), row.bits),
            row.isa.to_owned(),
            row.threads.to_string(),
            row.batch.to_string(),
            format!("{:.1}", row.gweights_per_s),
            range(row.spread),
            format!("{:.2}", row.gb_per_s),
            percent(row.read_share),
            percent(row.int8_share),
        ]);
    }
    table
}

fn encode_table(rows: &[EncodeSpeed]) -> Table {
    let header = ["scheme", "effort", "threads", "kweights/s", "least-most", "error"];
    let mut table = Table::new(header, &[1]);
    for row in rows {
        table.row([
            name(&row.scheme, row.code.as_deref(), row.bits),
            row.effort.to_owned(),
            row.threads.to_string(),
            format!("{:.0}", row.kweights_per_s),
            format!("{:.0}-{:.0}", row.spread.min, row.spread.max),
            format!("{:.6}", row.nmse),
        ]);
    }
    table
}

fn model_table(rows: &[ModelSpeed]) -> Table {
    let header = [
        "model",
        "scheme",
        "bits",
        "threads",
        "prompt",
        "prefill tok/s",
        "least-most",
        "of int8",
        "batch",
        "decode tok/s",
        "least-most",
        "GB/s",
        "of reads",
    ];
    let mut table = Table::new(header, &[1]);
    for row in rows {
        let scheme = row.scheme.as_deref().map(|s| name(s, row.code.as_deref(), row.bits));
        table.row([
            row.model.clone(),
            scheme.unwrap_or_else(|| "-".to_owned()),
            format!("{:.2}", row.bits),
            row.threads.to_string(),
            row.prompt.to_string(),
            format!("{:.1}", row.prefill_tok_s),
            range(row.prefill_spread),
            percent(row.int8_share),
            row.batch.to_string(),
            format!("{:.2}", row.decode_tok_s),
            range(row.decode_spread),
            format!("{:.2}", row.decode_gb_per_s),
            percent(row.read_share),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(line: &str) -> Cli {
        Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"))
    }

    fn what(line: &str) -> What {
        match parse(line).command {
            Command::Bench(args) => args.what,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn kernel_args(line: &str) -> KernelOptions {
        match what(line) {
            What::Kernels(args) => args.options().expect("options that make sense"),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn model_args(line: &str) -> ModelArgs {
        match what(line) {
            What::Model(args) => args,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn lists_and_defaults() {
        let options = kernel_args("fracbit bench kernels");
        assert_eq!(options.schemes.len(), CHOICE.len());
        assert_eq!((options.shape, options.batch), (Shape::new(2048, 8192), vec![1]));
        assert_eq!((options.bytes, options.limit_bytes), (1 << 30, 2 << 30));
        assert_eq!(options.threads, bench::default_threads());

        let line = "fracbit bench kernels --scheme tcq-2 --scheme nuq-4 --shape 16x32 --batch 1,8 --threads 1,2 --bytes 1MB";
        let options = kernel_args(line);
        assert_eq!(options.schemes.iter().map(ToString::to_string).collect::<Vec<_>>(), ["tcq-2", "nuq-4"]);
        assert_eq!(
            (options.shape, options.batch, options.threads),
            (Shape::new(16, 32), vec![1, 8], vec![1, 2])
        );
        assert_eq!(options.bytes, 1_000_000);
        assert_eq!(kernel_args("fracbit bench kernels --all").schemes.len(), Scheme::all().count());
        // The flag of every command means the same here.
        assert_eq!(kernel_args("fracbit --threads 2 bench kernels").threads, [2]);
    }

    #[test]
    fn rates_have_schemes() {
        let args = model_args("fracbit bench model --shape tiny --bits 2,3.25,6 --code fast --prompt 4,8");
        let names: Vec<_> = args.schemes().expect("rates").iter().map(ToString::to_string).collect();
        assert_eq!(names, ["tcq-fast-2", "half-tcq-fast-3.25", "nuq-6"]);
        assert_eq!(args.options().prompts, [4, 8]);
        let args = model_args("fracbit bench model --shape tiny --scheme vq-2.5");
        assert_eq!(args.schemes().expect("a scheme"), ["vq-2.5".parse().expect("a scheme")]);
        for bad in [0.0, 0.75, 2.1, 5.5, 9.0, f64::NAN] {
            assert!(scheme(bad, Code::Fine).is_err(), "{bad}");
        }
        assert!(shape("16x").is_err() && shape("0x4").is_err() && shape("4").is_err());
    }

    #[test]
    fn tables_show_shares() {
        let spread = Spread { median: 2.0, min: 1.0, max: 3.0 };
        let row = KernelSpeed {
            scheme: "tcq".to_owned(),
            code: Some("fast".to_owned()),
            bits: 2.0,
            threads: 1,
            batch: 1,
            gweights_per_s: 2.0,
            gb_per_s: 0.5,
            read_share: 0.25,
            int8_share: 0.125,
            spread,
            read_gb_per_s: 2.0,
            int8_gmac_per_s: 16.0,
            isa: "avx2",
        };
        let text = kernels_table(&[row]).to_string();
        assert!(text.contains("tcq-fast-2") && text.contains("1.0-3.0") && text.contains("25 %"), "{text}");
    }

    #[test]
    fn a_tiny_run_of_each() {
        let mut context = Context::new(true);
        for line in [
            "fracbit bench limits --bytes 1MB --threads 1 --rounds 1",
            "fracbit bench kernels --scheme nuq-2 --shape 16x32 --bytes 100kB --threads 1 --rounds 1 --json",
            "fracbit bench encode --scheme nuq-2 --weights 256 --threads 1 --rounds 1",
            "fracbit bench encode --scheme tcq-4 --effort fast --weights 256 --threads 1 --rounds 1 --json",
            "fracbit bench psumbook --shape 16x32 --batch 1,2 --bytes 1kB --threads 1 --rounds 1",
            "fracbit bench psumbook --scheme aq-m4v8b4 --shape 16x32 --tiles --bytes 1kB --threads 1 --rounds 1 --json",
            "fracbit bench serve --shape tiny --layers 1 --requests 3 --prompt 5 --generate 4 --sequences 1,2 --kv 16,4 --threads 1",
            "fracbit bench model --shape tiny --layers 1 --prompt 4 --generate 2 --context 3 --bytes 1MB --threads 1 --rounds 1",
        ] {
            let Command::Bench(args) = parse(line).command else { panic!("{line}") };
            assert!(run(&args, &mut context).is_ok(), "{line}");
        }
    }
}
