//! Flags that several commands share, and the readers of their values. Nothing here touches a file.

use crate::failure::{Exit, Failure};
use clap::{Args, ValueEnum};
use fracbit::{EvalOptions, Exclude, Objective, Pin, PlanOptions, Speed, Target};
use fracbit_base::{Bytes, Code, Palette, Rate, Scheme};
use fracbit_engine::Draft;
use fracbit_model::{KvType, Precision, RotationMode};
use fracbit_schedule::{Schedule, ScheduleError};
use std::{
    convert::Infallible,
    fmt,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

/// Heading of budgets.
pub(crate) const BUDGET: &str = "Budget (one or several)";

/// What the quantized model may take: bits, bytes and time, one of these or several; a scheme
/// stands alone.
#[derive(Clone, Debug, Args)]
#[group(id = "target", required = true, multiple = true)]
#[command(next_help_heading = BUDGET)]
pub(crate) struct TargetArgs {
    /// Most stored bits per weight of the whole model, everything counted: codes, scales,
    /// codebooks, norms, embedding, head. 16 is no limit.
    #[arg(long, value_name = "B", value_parser = bits)]
    pub(crate) bits: Option<f64>,
    /// Most bytes of the model directory, such as 900MB or 1.5GiB: tensors, tokenizer and all other
    /// files in it.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<Bytes>,
    /// Most time of a decode step on this machine, such as 20ms; needs --profile.
    #[arg(long, value_name = "TIME", value_parser = microseconds)]
    pub(crate) latency: Option<f64>,
    /// Least tokens generated per second on this machine, all sequences of a batch together; needs
    /// --profile.
    #[arg(long, value_name = "N", value_parser = rate, conflicts_with = "latency")]
    pub(crate) tokens_per_second: Option<f64>,
    /// One scheme for every matrix, such as tcq-3, tcq-2.25, vq-2.5 or nuq-4.
    #[arg(long, value_name = "SCHEME", conflicts_with_all = ["bits", "size", "memory", "latency", "tokens_per_second", "palette", "also", "code"])]
    pub(crate) scheme: Option<Scheme>,
    /// Most memory of weights and cache together, such as 6GB: how many bits each gets is decided
    /// by what both lose.
    #[arg(long, value_name = "SIZE", group = "where", conflicts_with_all = ["bits", "size"])]
    pub(crate) memory: Option<Bytes>,
    /// With --memory: sequences that the cache is for, each of --context tokens [default: 1].
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) sequences: Option<usize>,
}

impl TargetArgs {
    /// The limit on tensors, `beside` which the directory holds so many bytes; absent when another
    /// member of the group was given.
    pub(crate) fn target(&self, params: u64, beside: u64) -> Option<Target> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a size in bytes"
        )]
        let bytes = |bits: f64| (bits * params as f64 / 8.0).floor() as u64;
        let size = self.size.map(|size| Bytes(size.0.saturating_sub(beside)));
        match (self.bits, size) {
            (Some(bits), Some(size)) if bytes(bits) > size.0 => return Some(Target::Size(size)),
            (Some(bits), _) => return Some(Target::Bits(bits)),
            (None, Some(size)) => return Some(Target::Size(size)),
            (None, None) => {}
        }
        let timed = self.latency.or(self.tokens_per_second).map(|_| Target::Any);
        self.scheme.map(Target::Uniform).or(timed)
    }

    /// Most microseconds of a step of `batch` tokens.
    pub(crate) fn limit_us(&self, batch: usize) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a batch")]
        let of_rate = |rate: f64| batch as f64 * 1e6 / rate;
        self.latency.or(self.tokens_per_second.map(of_rate))
    }

    /// As typed, for the record.
    pub(crate) fn recorded(&self) -> String {
        let mut all = Vec::new();
        all.extend(self.bits.map(|b| format!("--bits {b}")));
        all.extend(self.size.map(|b| format!("--size {}", b.0)));
        all.extend(self.latency.map(|us| format!("--latency {us}us")));
        all.extend(self.tokens_per_second.map(|n| format!("--tokens-per-second {n}")));
        all.extend(self.scheme.map(|s| format!("--scheme {s}")));
        all.extend(
            self.memory.map(|b| format!("--memory {} --sequences {}", b.0, self.sequences.unwrap_or(1))),
        );
        all.join(" ")
    }
}

/// The machine that a plan is for.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Speed")]
pub(crate) struct SpeedArgs {
    /// What this machine makes of this model, measured by `fracbit profile`; with it and without a
    /// time, the speed is predicted.
    #[arg(long, value_name = "FILE", group = "where")]
    pub(crate) profile: Option<PathBuf>,
    /// Tokens in the cache of each sequence that a time or a memory is meant for [default: 128
    /// for a time; 4096 for a memory, or the model's context if that is less].
    #[arg(long, value_name = "N", requires = "where", value_parser = count)]
    pub(crate) context: Option<usize>,
    /// Sequences decoded together, 1 to 8: a step makes a token of each.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "profile", value_parser = batch)]
    pub(crate) batch: usize,
    /// One kernel call per matrix: fuse nothing.
    #[arg(long, requires = "profile")]
    pub(crate) no_fusion: bool,
    /// Most seconds for the solver where time and size both bind.
    #[arg(long, value_name = "S", default_value_t = 20, requires = "profile", value_parser = count)]
    pub(crate) patience: usize,
}

impl SpeedArgs {
    /// Tokens in the cache at the time that is meant.
    pub(crate) fn context(&self) -> usize {
        self.context.unwrap_or(128)
    }

    /// As typed, for the record, with the path as `show` writes it.
    pub(crate) fn recorded(&self, show: ShowPath) -> String {
        let Some(path) = &self.profile else {
            return self.context.map_or_else(String::new, |context| format!(" --context {context}"));
        };
        let (Self { batch, no_fusion, .. }, context) = (self, self.context());
        let fusion = if *no_fusion { " --no-fusion" } else { "" };
        format!(" --profile {} --context {context} --batch {batch}{fusion}", show(path))
    }
}

/// How a text becomes sequences of tokens.
#[derive(Clone, Debug, Args)]
pub(crate) struct TextArgs {
    /// Put the BOS token before every sequence [default: as the tokenizer does].
    #[arg(long, conflicts_with = "no_bos")]
    bos: bool,
    /// Put no BOS token before sequences.
    #[arg(long)]
    no_bos: bool,
    /// Text that divides documents; sequences do not cross it.
    #[arg(long, value_name = "S")]
    separator: Option<String>,
    /// Leave out the space that Llama tokenizers put before a text.
    #[arg(long)]
    no_prefix_space: bool,
}

impl TextArgs {
    /// As typed, for the record.
    pub(crate) fn recorded(&self) -> String {
        let flag = |on: bool, name: &str| if on { format!(" {name}") } else { String::new() };
        let separator = self.separator.as_ref().map_or_else(String::new, |s| format!(" --separator {s:?}"));
        let (bos, no_bos) = (flag(self.bos, "--bos"), flag(self.no_bos, "--no-bos"));
        bos + &no_bos + &separator + &flag(self.no_prefix_space, "--no-prefix-space")
    }

    /// The options of the library, of any length.
    pub(crate) fn options(&self) -> EvalOptions {
        EvalOptions {
            bos: match (self.bos, self.no_bos) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            },
            drop_prefix_space: self.no_prefix_space,
            separator: self.separator.clone(),
            ..EvalOptions::default()
        }
    }
}

/// What shapes a plan beside its budget.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Choices")]
pub(crate) struct ShapeArgs {
    /// Schemes to choose from [default: tcq; all where time is limited].
    #[arg(long, value_enum)]
    pub(crate) palette: Option<PaletteName>,
    /// Schemes to choose from beside the palette, such as aq-m2v8.
    #[arg(long, value_name = "SCHEME,..", value_delimiter = ',')]
    pub(crate) also: Vec<Scheme>,
    /// Code of the trellis schemes.
    #[arg(long, value_enum, default_value_t = CodeName::Fine)]
    pub(crate) code: CodeName,
    /// How weights are rotated before they are rounded.
    #[arg(long, value_enum, default_value_t = RotationName::Auto)]
    pub(crate) rotation: RotationName,
    /// Leave out the factors between inputs and weights, and between queries and keys, that make
    /// large channels less sensitive.
    #[arg(long)]
    pub(crate) no_smoothing: bool,
    /// Give all rows of a matrix one scheme, not more bits to those whose errors cost most: faster,
    /// and loses more.
    #[arg(long)]
    pub(crate) no_bands: bool,
    /// Seed of rotations, and of the measurement when there is one.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Keep the output head (and the embedding, where they are one) at 16 bits.
    #[arg(long)]
    pub(crate) keep_head: bool,
    /// Give layers a scheme (or f16): LAYERS is a name in which * stands for any text. May be
    /// repeated, the last wins.
    #[arg(long, value_name = "LAYERS=SCHEME")]
    pub(crate) pin: Vec<Pin>,
    /// Forbid layers some schemes; without =SCHEMES leave the layers at 16 bits. May be repeated.
    #[arg(long, value_name = "LAYERS[=SCHEMES]")]
    pub(crate) exclude: Vec<Exclude>,
}

impl ShapeArgs {
    /// The options of the library.
    pub(crate) fn options(&self, target: Target, speed: Option<Speed>) -> PlanOptions {
        PlanOptions {
            palette: self.palette(speed.as_ref().is_some_and(|s| s.limit_us.is_some())),
            code: self.code.into(),
            rotation: self.rotation.fixed().unwrap_or(RotationMode::Online),
            smoothing: !self.no_smoothing,
            bands: !self.no_bands,
            seed: self.seed,
            keep_head: self.keep_head,
            also: self.also.clone(),
            pins: self.pin.clone(),
            excludes: self.exclude.clone(),
            speed,
            ..PlanOptions::new(target)
        }
    }

    /// The palette; everything where time is limited, since then other schemes than the closest
    /// ones may pay.
    pub(crate) fn palette(&self, timed: bool) -> Palette {
        let default = if timed { PaletteName::All } else { PaletteName::Tcq };
        self.palette.unwrap_or(default).into()
    }

    /// What is added to the palette, pinned and excluded as typed, for the record.
    pub(crate) fn recorded(&self) -> String {
        let also = self.also.iter().map(|scheme| format!(" --also {scheme}"));
        let pins = also.chain(self.pin.iter().map(|p| format!(" --pin '{p}'")));
        pins.chain(self.exclude.iter().map(|e| format!(" --exclude '{e}'"))).collect()
    }
}

/// How losses are estimated.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Losses")]
pub(crate) struct LossArgs {
    /// What each matrix loses: a FILE of `fracbit sensitivity`, `quick` to measure now, on 1024
    /// tokens, or `prior` to measure nothing [default: quick; `prior` where
    /// --scheme is given].
    #[arg(long, value_name = "FILE|quick|prior")]
    pub(crate) sensitivity: Option<SensitivitySource>,
    /// Which estimate FILE should hold; another one is refused [default: whichever it holds].
    #[arg(long, value_enum)]
    pub(crate) objective: Option<ObjectiveName>,
}

/// An estimate of losses by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveName {
    /// Sensitivity times error, measured on text that the model writes (what `quick` does), or from
    /// a prior.
    #[value(alias = "error")]
    DataFree,
    /// Sensitivity times error, measured on your text: `fracbit sensitivity --text FILE`.
    Linear,
    /// Every scheme tried in every matrix on your text: `fracbit sensitivity --text FILE --actual
    /// SCHEME`.
    Actual,
}

impl From<ObjectiveName> for Objective {
    fn from(name: ObjectiveName) -> Self {
        match name {
            ObjectiveName::DataFree => Self::DataFree,
            ObjectiveName::Linear => Self::Linear,
            ObjectiveName::Actual => Self::Actual,
        }
    }
}

/// Where sensitivities come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SensitivitySource {
    /// The curvature on a short text that the model writes.
    Quick,
    /// Medians published for another model.
    Prior,
    /// A document of `fracbit sensitivity`.
    File(PathBuf),
}

impl FromStr for SensitivitySource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "quick" => Self::Quick,
            "prior" => Self::Prior,
            path => Self::File(path.into()),
        })
    }
}

/// How a record writes paths: as they were typed, or their names only.
pub(crate) type ShowPath = fn(&Path) -> String;

impl SensitivitySource {
    /// For the record.
    pub(crate) fn recorded(&self, show: ShowPath) -> String {
        match self {
            Self::File(path) => show(path),
            Self::Quick | Self::Prior => self.to_string(),
        }
    }
}

impl fmt::Display for SensitivitySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quick => f.write_str("quick"),
            Self::Prior => f.write_str("prior"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// A palette by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PaletteName {
    /// Trellis codes from 1 to 5 bits in quarters, scalar 6 to 8.
    Tcq,
    /// Two-dimensional vector codebooks, 1.5 to 6 bits in halves.
    Vq,
    /// Scalar codebooks, 2 to 8 bits.
    Nuq,
    /// Nested trellis codes of 3, 4 and 8 bits, whose first 2, 3 or 4 bits can be read alone.
    Nest,
    /// Everything but nested codes.
    All,
}

impl From<PaletteName> for Palette {
    fn from(name: PaletteName) -> Self {
        match name {
            PaletteName::Tcq => Self::Tcq,
            PaletteName::Vq => Self::Vq,
            PaletteName::Nuq => Self::Nuq,
            PaletteName::Nest => Self::Nest,
            PaletteName::All => Self::All,
        }
    }
}

/// A trellis code by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CodeName {
    /// Least error.
    Fine,
    /// Less work per weight, a little more error.
    Fast,
    /// The papers' code, for comparison.
    Hyb,
}

impl From<CodeName> for Code {
    fn from(name: CodeName) -> Self {
        match name {
            CodeName::Fine => Self::Fine,
            CodeName::Fast => Self::Fast,
            CodeName::Hyb => Self::Hyb,
        }
    }
}

/// What the cache of keys and values is made of.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CacheArgs {
    /// Bits of a number in the cache of keys and values: fewer let longer texts fit, and be decoded
    /// sooner. Large biases of keys (Qwen2 and 2.5) are kept out of it and stay exact.
    #[arg(long, value_name = "BITS", value_enum, default_value_t)]
    kv: KvBits,
}

impl CacheArgs {
    /// The element type.
    pub(crate) fn kv(self) -> KvType {
        self.kv.into()
    }
}

/// What steps read of a nested model, and whether it guesses ahead.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Nested models (schemes nest-...)")]
pub(crate) struct NestedArgs {
    /// Most bits per weight that steps read: a number, or bits of the prompt and falling ones of
    /// the answer such as prefill=4,decode=4..2@64 (from its 64th token on two), or a JSON file of
    /// `fracbit schedule`.
    #[arg(long, value_name = "BITS")]
    pub(crate) precision: Option<Steps>,
    /// Guess what follows with fewer planes and check several tokens in one step of all: the same
    /// text, sooner where guesses are right. `nested` alone takes half the bits and as many
    /// tokens as save time; `nested:3` at most 3 bits; `nested:3,4` guesses of 4 tokens.
    #[arg(long, value_name = "nested[:BITS[,TOKENS]]", value_parser = draft)]
    pub(crate) draft: Option<Draft>,
}

impl NestedArgs {
    /// Refuses what a GPU does not do.
    pub(crate) fn on_device(&self) -> Result<(), Failure> {
        if self.draft.is_none() {
            return Ok(());
        }
        let rule = "`--draft` should be left out with `--device cuda`, where a step of several tokens rounds otherwise than steps of one: the text would not be the same";
        Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)))
    }
}

/// Reads `nested:BITS,TOKENS`.
fn draft(text: &str) -> Result<Draft, String> {
    const WANT: &str = "expected nested, nested:BITS or nested:BITS,TOKENS with 1 to 7 tokens";
    let Some(rest) = text.strip_prefix("nested") else { return Err(WANT.to_owned()) };
    let Some(rest) = rest.strip_prefix(':') else {
        let alone = Draft { precision: None, length: None };
        return if rest.is_empty() { Ok(alone) } else { Err(WANT.to_owned()) };
    };
    let (bits, tokens) = rest.split_once(',').map_or((rest, None), |(bits, tokens)| (bits, Some(tokens)));
    let rate = bits.parse().ok().and_then(|bits| Rate::from_bits(bits).ok()).ok_or(WANT)?;
    let length = match tokens {
        None | Some("auto") => None,
        Some(tokens) => Some(tokens.parse().ok().filter(|n| (1..=7).contains(n)).ok_or(WANT)?),
    };
    Ok(Draft { precision: Some(Precision::at_most(rate)), length })
}

/// What the steps of a generation read: a schedule, or the file of one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Steps {
    /// As typed.
    Schedule(Schedule),
    /// A JSON document, by its ending.
    File(PathBuf),
}

impl FromStr for Steps {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let file = Path::new(text).extension().is_some_and(|e| e == "json");
        if file { Ok(Self::File(text.into())) } else { text.parse().map(Self::Schedule) }
    }
}

/// Reads bits per weight.
pub(crate) fn precision(text: &str) -> Result<Precision, String> {
    let rate = text.parse().ok().and_then(|bits| Rate::from_bits(bits).ok());
    rate.map(Precision::at_most).ok_or_else(|| format!("expected bits per weight such as 2, got `{text}`"))
}

/// Bits of a number in a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvBits {
    /// As good as exact.
    #[default]
    #[value(name = "16")]
    Sixteen,
    /// Half the memory, next to no loss.
    #[value(name = "8")]
    Eight,
    /// Keys of 8 bits and values of 4: three eighths of the memory, a small loss.
    #[value(name = "6")]
    Six,
    /// A quarter of the memory; loses about as much as weights of 4 bits do.
    #[value(name = "4")]
    Four,
}

impl From<KvBits> for KvType {
    fn from(bits: KvBits) -> Self {
        match bits {
            KvBits::Sixteen => Self::I16,
            KvBits::Eight => Self::I8,
            KvBits::Six => Self::I6,
            KvBits::Four => Self::I4,
        }
    }
}

/// A rotation by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RotationName {
    /// As the model's channels ask for: online, or folded where that adds no noise.
    Auto,
    /// Folded into the weights, but for the input of the down projection.
    Fold,
    /// Four per block at run time, as in the papers.
    Online,
    /// None; one scale per 64 weights instead.
    None,
}

impl RotationName {
    /// The rotation, where it was not left to the model.
    pub(crate) fn fixed(self) -> Option<RotationMode> {
        match self {
            Self::Auto => None,
            Self::Fold => Some(RotationMode::Fold),
            Self::Online => Some(RotationMode::Online),
            Self::None => Some(RotationMode::None),
        }
    }

    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        self.fixed().map_or("auto", RotationMode::name)
    }
}

/// Bits per weight.
fn bits(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|b| *b > 0.0 && *b <= 16.0);
    value.ok_or_else(|| format!("bits per weight should be a number above 0 and at most 16, got `{text}`"))
}

fn real(text: &str, want: &str, ok: impl Fn(f32) -> bool) -> Result<f32, String> {
    let value = text.parse::<f32>().ok().filter(|v| v.is_finite() && ok(*v));
    value.ok_or_else(|| format!("should be {want}, got `{text}`"))
}

pub(crate) fn temperature(text: &str) -> Result<f32, String> {
    real(text, "a number of at least 0", |v| v >= 0.0)
}

pub(crate) fn share(text: &str) -> Result<f32, String> {
    real(text, "a number from 0 to 1", |v| (0.0..=1.0).contains(&v))
}

pub(crate) fn at_least_one(text: &str) -> Result<f32, String> {
    real(text, "a number of at least 1", |v| v >= 1.0)
}

pub(crate) fn positive(text: &str) -> Result<f32, String> {
    real(text, "a positive number", |v| v > 0.0)
}

fn whole(text: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    let value = text.parse::<usize>().ok().filter(|v| range.contains(v));
    value.ok_or_else(|| match *range.end() {
        usize::MAX => format!("should be a whole number of at least {}, got `{text}`", range.start()),
        most => {
            format!("should be a whole number of at least {} and at most {most}, got `{text}`", range.start())
        }
    })
}

/// A number of things, at least one.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    whole(text, 1..=usize::MAX)
}

/// Tokens of a decode step.
pub(crate) fn batch(text: &str) -> Result<usize, String> {
    whole(text, 1..=8)
}

/// A time in microseconds, given with its unit.
fn microseconds(text: &str) -> Result<f64, String> {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let found = units.iter().find_map(|(unit, factor)| {
        let value: f64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
        Some(value * factor)
    });
    found.filter(|us| *us > 0.0 && us.is_finite()).ok_or_else(|| {
        format!("should be a time above 0 with its unit such as 20ms, 800us or 0.1s, got `{text}`")
    })
}

/// A time of work, with its unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let found =
        [("h", 3600.0), ("m", 60.0), ("min", 60.0), ("s", 1.0)].into_iter().find_map(|(unit, factor)| {
            let value: f64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
            (value > 0.0 && value * factor < 1e7).then(|| Duration::from_secs_f64(value * factor))
        });
    found.ok_or_else(|| format!("should be a time above 0 with its unit such as 90s, 5m or 2h, got `{text}`"))
}

/// Something per second.
fn rate(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| *v > 0.0 && v.is_finite());
    value.ok_or_else(|| format!("should be a number above 0, got `{text}`"))
}

/// A number of threads.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    whole(text, 1..=1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_agree_with_the_library() {
        for name in PaletteName::value_variants() {
            let shown = name.to_possible_value().expect("every palette shows");
            assert_eq!(shown.get_name(), Palette::from(*name).name());
        }
        for name in CodeName::value_variants() {
            let shown = name.to_possible_value().expect("every code shows");
            assert_eq!(shown.get_name(), Code::from(*name).name());
        }
        for name in RotationName::value_variants() {
            let shown = name.to_possible_value().expect("every rotation shows");
            assert_eq!(shown.get_name(), name.name());
        }
        assert_eq!(CodeName::value_variants().len(), Code::ALL.len());
    }

    #[test]
    fn sensitivity_sources_round_trip() {
        for (text, want) in [
            ("quick", SensitivitySource::Quick),
            ("prior", SensitivitySource::Prior),
            ("./quick", SensitivitySource::File("./quick".into())),
        ] {
            assert_eq!(text.parse(), Ok(want));
            assert_eq!(text.parse::<SensitivitySource>().map(|s| s.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn times() {
        for (text, want) in [("20ms", 20_000.0), ("800us", 800.0), ("0.5s", 5e5), ("1 ms", 1000.0)] {
            assert_eq!(microseconds(text), Ok(want), "{text}");
        }
        for bad in ["20", "ms", "-1ms", "0s", "infs", "nanms", "2h"] {
            assert!(microseconds(bad).is_err(), "{bad}");
        }
        assert!(rate("50").is_ok() && rate("0").is_err() && rate("inf").is_err());
    }

    #[test]
    fn times_of_work() {
        for (text, want) in [("90s", 90), ("5m", 300), ("5 min", 300), ("1.5h", 5400)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(want)), "{text}");
        }
        for bad in ["5", "m", "0s", "-1m", "infh", "nans", "5000h", "5ms"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_at_the_edges() {
        assert!(bits("16").is_ok() && bits("0.01").is_ok());
        for bad in ["0", "-1", "16.1", "inf", "nan", "", "3,25"] {
            assert!(bits(bad).is_err(), "{bad}");
        }
        assert!(share("0").is_ok() && share("1").is_ok() && share("1.01").is_err() && share("nan").is_err());
        assert!(threads("1024").is_ok() && threads("1025").is_err() && count("0").is_err());
    }
}
