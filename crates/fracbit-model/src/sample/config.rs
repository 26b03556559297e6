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
        Self::GREEDY
    }
}

impl SampleConfig {
    /// The most likely token, always.
    pub(super) const GREEDY: Self = Self {
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
    };

    /// The same without what filters tokens by their probability alone.
    #[must_use]
    pub fn unfiltered(self) -> Self {
        Self { top_k: 0, top_p: 1.0, min_p: 0.0, typical_p: 1.0, ..self }
    }

    /// Refuses numbers outside their range.
    pub(super) fn check(&self) -> Result<(), Error> {
        let positive = |x: f32| ("a positive finite number", x, x > 0.0 && x.is_finite());
        let not_negative = |x: f32| ("a finite number, at least 0", x, x >= 0.0 && x.is_finite());
        let one_or_more = |x: f32| ("a finite number, at least 1", x, x >= 1.0 && x.is_finite());
        let nucleus = |x: f32| ("above 0 and at most 1", x, x > 0.0 && x <= 1.0);
        let share = |x: f32| ("in 0..=1", x, (0.0..=1.0).contains(&x));
        let settings = [
            ("temperature", not_negative(self.temperature)),
            ("top_p", nucleus(self.top_p)),
            ("min_p", share(self.min_p)),
            ("repetition_penalty", positive(self.repetition_penalty)),
            ("typical_p", nucleus(self.typical_p)),
            ("xtc_probability", share(self.xtc_probability)),
            ("xtc_threshold", share(self.xtc_threshold)),
            ("mirostat_tau", not_negative(self.mirostat_tau)),
            ("mirostat_eta", not_negative(self.mirostat_eta)),
            ("dry_multiplier", not_negative(self.dry_multiplier)),
            ("dry_base", one_or_more(self.dry_base)),
        ];
        match settings.into_iter().find(|(_, (.., fits))| !fits) {
            Some((field, (want, got, _))) => Err(Error::Sampling { field, want, got }),
            None => Ok(()),
        }
    }

    /// Whether tokens pass the first filters that others may still drop.
    pub(super) fn filters_more(&self) -> bool {
        self.typical_p < 1.0 || self.mirostat_tau > 0.0 || self.xtc_probability > 0.0
    }
}
