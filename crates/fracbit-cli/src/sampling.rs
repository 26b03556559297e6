//! How tokens are picked: by flags, else as the model's files say, else by defaults.

use crate::{
    args::{at_least_one, positive, share, temperature},
    failure::Failure,
};
use clap::Args;
use fracbit::Opened;
use fracbit_io::{Tokenizer, config::GENERATION_CONFIG};
use fracbit_model::{Adjustments, DRY_BREAKERS, SampleConfig, Sampler};
use serde_json::{Map, Value};
use std::{fs, path::PathBuf};

/// How to pick tokens. What no flag says is as the model's generation_config.json says.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct PickArgs {
    /// Temperature; 0 picks the most likely token [default: the model's, else 0.8].
    #[arg(long, visible_alias = "temperature", value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all [default: the model's, else 0].
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all [default:
    /// the model's, else 0.95].
    #[arg(long, value_name = "P", value_parser = share)]
    top_p: Option<f32>,
    /// Keep tokens that are at least P times as likely as the likeliest; 0 keeps all [default:
    /// the model's, else 0].
    #[arg(long, value_name = "P", value_parser = share)]
    min_p: Option<f32>,
    /// Make tokens that were seen less likely; 1 leaves them [default: the model's, else 1].
    #[arg(long, value_name = "R", value_parser = positive)]
    repetition_penalty: Option<f32>,
    /// Keep the tokens nearest to the average information, the fewest that together have this
    /// probability; 1 keeps all [default: the model's, else 1].
    #[arg(long, value_name = "P", value_parser = share)]
    typical_p: Option<f32>,
    /// XTC: the chance of dropping all tokens of at least --xtc-threshold but the least likely of
    /// them.
    #[arg(long, value_name = "P", value_parser = share, default_value_t = 0.0)]
    xtc_probability: f32,
    /// The least probability of what XTC drops.
    #[arg(long, value_name = "P", value_parser = share, default_value_t = 0.1)]
    xtc_threshold: f32,
    /// Mirostat 2: bits of information that tokens should have on average; 0 is without. Filters
    /// that no flag asks for are off beside it.
    #[arg(long, value_name = "BITS", value_parser = temperature, default_value_t = 0.0)]
    mirostat_tau: f32,
    /// How fast mirostat follows.
    #[arg(long, value_name = "RATE", value_parser = temperature, default_value_t = 0.1)]
    mirostat_eta: f32,
    /// DRY: what is taken from the logit of a token that would go on repeating; 0 is without.
    #[arg(long, value_name = "X", value_parser = temperature, default_value_t = 0.0)]
    dry_multiplier: f32,
    /// Each further token that is repeated multiplies that by this.
    #[arg(long, value_name = "X", value_parser = at_least_one, default_value_t = 1.75)]
    dry_base: f32,
    /// How many tokens may be repeated.
    #[arg(long, value_name = "N", default_value_t = 2)]
    dry_allowed_length: usize,
    /// Look for repetitions in the last N tokens; 0 is all.
    #[arg(long, value_name = "N", default_value_t = 0)]
    dry_window: usize,
    /// Always the most likely token.
    #[arg(long, conflicts_with_all = ["temp", "top_k", "top_p", "min_p", "typical_p", "xtc_probability",
        "mirostat_tau"])]
    greedy: bool,
}

impl PickArgs {
    /// The sampler's configuration for a model.
    pub(crate) fn config(&self, opened: &Opened, seed: u64) -> Result<SampleConfig, Failure> {
        let mut said = Published::read(opened);
        // Beside mirostat only those filters apply that a flag asks for.
        let alone = self.mirostat_tau > 0.0;
        if alone {
            for name in ["top_k", "top_p", "min_p", "typical_p"] {
                said.said.remove(name);
            }
        }
        // The nucleus has at least one token.
        let nucleus = |x: f32| x > 0.0 && x <= 1.0;
        let temperature = match self.greedy {
            true => Some(0.0),
            false => self.temp,
        };
        Ok(SampleConfig {
            temperature: said.number(temperature, "temperature", 0.8, ("at least 0", |x| x >= 0.0))?,
            top_k: match self.top_k {
                Some(k) => k,
                None => said.top_k()?,
            },
            top_p: said.number(
                self.top_p,
                "top_p",
                if alone { 1.0 } else { 0.95 },
                ("above 0 and at most 1", nucleus),
            )?,
            min_p: said.number(self.min_p, "min_p", 0.0, ("0 to 1", |x| (0.0..=1.0).contains(&x)))?,
            repetition_penalty: said.number(
                self.repetition_penalty,
                "repetition_penalty",
                1.0,
                ("above 0", |x| x > 0.0),
            )?,
            typical_p: said.number(self.typical_p, "typical_p", 1.0, ("above 0 and at most 1", nucleus))?,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_window: self.dry_window,
            seed,
        })
    }
}

/// A sampler for a text in the tokens of `tokenizer`.
pub(crate) fn sampler(config: SampleConfig, tokenizer: &Tokenizer) -> Result<Sampler, Failure> {
    let sampler = Sampler::new(config)?;
    if config.dry_multiplier == 0.0 {
        return Ok(sampler);
    }
    let breakers = tokenizer.tokens_with(&DRY_BREAKERS);
    Ok(sampler.adjusted(Adjustments { breakers, ..Adjustments::default() }))
}

/// What whoever published a model says of picking tokens.
struct Published {
    path: PathBuf,
    said: Map<String, Value>,
}

impl Published {
    /// Reads the file; a GGUF file has none.
    fn read(opened: &Opened) -> Self {
        let path = opened.checkpoint.path().join(GENERATION_CONFIG);
        let bytes = fs::read(&path).unwrap_or_default();
        // Whether it is JSON was looked at when the model was opened.
        Self { said: serde_json::from_slice(&bytes).unwrap_or_default(), path }
    }

    fn refuse(&self, name: &str, want: &str, got: &Value) -> Failure {
        let flag = name.replace("temperature", "temp").replace('_', "-");
        Failure::input(format_args!("`{}`: `{name}` should be {want}, got {got}", self.path.display()))
            .hint(format!("--{flag} takes its place"))
    }

    /// The value of a flag, else that of the file.
    fn number(
        &self,
        flag: Option<f32>,
        name: &str,
        default: f32,
        (want, fits): (&str, impl Fn(f32) -> bool),
    ) -> Result<f32, Failure> {
        let (None, Some(value)) = (flag, self.said.get(name).filter(|value| !value.is_null())) else {
            return Ok(flag.unwrap_or(default));
        };
        #[expect(clippy::cast_possible_truncation, reason = "a setting with few digits")]
        let found = value.as_f64().map(|x| x as f32).filter(|&x| x.is_finite() && fits(x));
        found.ok_or_else(|| self.refuse(name, want, value))
    }

    /// A negative one is all tokens for other programs.
    fn top_k(&self) -> Result<usize, Failure> {
        match self.said.get("top_k").filter(|value| !value.is_null()) {
            None => Ok(0),
            Some(value) => match value.as_i64() {
                Some(k) => Ok(usize::try_from(k).unwrap_or(0)),
                None => Err(self.refuse("top_k", "a whole number", value)),
            },
        }
    }
}

/// How tokens are picked, the same ones in every run.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    #[command(flatten)]
    picking: PickArgs,
    /// Seed: the same seed gives the same text.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// The sampler's configuration for a model.
    pub(crate) fn config(&self, opened: &Opened) -> Result<SampleConfig, Failure> {
        self.picking.config(opened, self.seed)
    }
}
