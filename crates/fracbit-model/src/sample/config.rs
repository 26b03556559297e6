//! How to pick a token.

use crate::Error;
use serde::{Deserialize, Serialize};

/// How to pick a token. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SampleConfig {
    /// Divisor of the logits, at least 0; 0 picks the most likely token.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the shortest prefix of this probability, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this times as likely as the most likely one, in 0..=1; 0 keeps all.
    pub min_p: f32,
    /// Divide positive and multiply negative logits of tokens already seen, positive; 1 leaves
    /// them.
    pub repetition_penalty: f32,
    /// Keep the tokens whose information is nearest to the entropy, the fewest that have this
    /// probability together, in (0, 1]; 1 keeps all.
    pub typical_p: f32,
    /// Chance of dropping all tokens of at least `xtc_threshold` but the least likely of them, in
    /// 0..=1; 0 drops none ("exclude top choices").
    pub xtc_probability: f32,
    /// The least probability of a top choice, in 0..=1.
    pub xtc_threshold: f32,
    /// Bits of information that tokens should have on average; 0 is without. Tokens beyond a bound
    /// are dropped, and the bound follows those that are picked.
    pub mirostat_tau: f32,
    /// How fast the bound follows, at least 0.
    pub mirostat_eta: f32,
    /// Taken from the logit of a token that would repeat `dry_allowed_length` tokens of the
    /// history and itself, at least 0; 0 is without ("don't repeat yourself").
    pub dry_multiplier: f32,
    /// Each further token that is repeated multiplies it by this, at least 1.
    pub dry_base: f32,
    /// How many tokens may be repeated before the next one is made less likely.
    pub dry_allowed_length: usize,
    /// Repetitions are looked for in so many of the last tokens; 0 takes the whole history.
    pub dry_window: usize,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for SampleConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            mirostat_tau: 0.0,
            mirostat_eta: 0.1,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_window: 0,
            seed: 0,
        }
    }
}

impl SampleConfig {
    /// Refuses numbers outside their range.
    pub(super) fn check(&self) -> Result<(), Error> {
        let [positive, nucleus, share] = ["a positive finite number", "above 0 and at most 1", "in 0..=1"];
        let finite = |x: f32, least: f32| x >= least && x.is_finite();
        let settings = [
            ("temperature", "a finite number, at least 0", self.temperature, finite(self.temperature, 0.0)),
            ("top_p", nucleus, self.top_p, self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", share, self.min_p, (0.0..=1.0).contains(&self.min_p)),
            (
                "repetition_penalty",
                positive,
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            ),
            ("typical_p", nucleus, self.typical_p, self.typical_p > 0.0 && self.typical_p <= 1.0),
            ("xtc_probability", share, self.xtc_probability, (0.0..=1.0).contains(&self.xtc_probability)),
            ("xtc_threshold", share, self.xtc_threshold, (0.0..=1.0).contains(&self.xtc_threshold)),
            (
                "mirostat_tau",
                "a finite number, at least 0",
                self.mirostat_tau,
                finite(self.mirostat_tau, 0.0),
            ),
            (
                "mirostat_eta",
                "a finite number, at least 0",
                self.mirostat_eta,
                finite(self.mirostat_eta, 0.0),
            ),
            (
                "dry_multiplier",
                "a finite number, at least 0",
                self.dry_multiplier,
                finite(self.dry_multiplier, 0.0),
            ),
            ("dry_base", "a finite number, at least 1", self.dry_base, finite(self.dry_base, 1.0)),
        ];
        match settings.into_iter().find(|(.., fits)| !fits) {
            Some((field, want, got, _)) => Err(Error::Sampling { field, want, got }),
            None => Ok(()),
        }
    }

    /// Whether tokens pass the first filters that others may still drop.
    pub(super) fn filters_more(&self) -> bool {
        self.typical_p < 1.0 || self.mirostat_tau > 0.0 || self.xtc_probability > 0.0
    }
}
