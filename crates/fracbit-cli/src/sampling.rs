//! How tokens are picked: by flags, else as the model's files say, else by defaults.

use crate::{
    args::{positive, share, temperature},
    failure::Failure,
};
use clap::Args;
use fracbit::Opened;
use fracbit_io::config::GENERATION_CONFIG;
use fracbit_model::SampleConfig;
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
    /// Always the most likely token.
    #[arg(long, conflicts_with_all = ["temp", "top_k", "top_p", "min_p"])]
    greedy: bool,
}

impl PickArgs {
    /// The sampler's configuration for a model.
    pub(crate) fn config(&self, opened: &Opened, seed: u64) -> Result<SampleConfig, Failure> {
        let said = Published::read(opened);
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
            top_p: said.number(self.top_p, "top_p", 0.95, ("above 0 and at most 1", nucleus))?,
            min_p: said.number(self.min_p, "min_p", 0.0, ("0 to 1", |x| (0.0..=1.0).contains(&x)))?,
            repetition_penalty: said.number(
                self.repetition_penalty,
                "repetition_penalty",
                1.0,
                ("above 0", |x| x > 0.0),
            )?,
            seed,
        })
    }
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
