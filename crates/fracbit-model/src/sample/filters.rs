//! Filters behind those that most people use, on the candidates that these leave.

use super::{Candidate, SampleConfig, Sampler, by_logit};

/// Where mirostat's bound begins.
pub(super) fn first_bound(config: &SampleConfig) -> f64 {
    2.0 * f64::from(config.mirostat_tau)
}

impl Sampler {
    /// Keeps the fewest candidates whose information is nearest to the entropy, the more likely of
    /// two as near, and that have a probability of `typical_p` together.
    pub(super) fn keep_typical(&mut self) {
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let information = |c: &Candidate| -(c.weight / total).ln();
        // What has no weight has no part in the entropy.
        let weighty = self.candidates.iter().filter(|c| c.weight > 0.0);
        let entropy: f64 = weighty.map(|c| c.weight / total * information(c)).sum();
        let distance = |c: &Candidate| (information(c) - entropy).abs();
        self.candidates
            .sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then_with(|| by_logit(a, b)));
        let mut mass = 0.0;
        let enough = f64::from(self.config.typical_p) * total;
        let last = self.candidates.iter().position(|c| {
            mass += c.weight;
            mass >= enough
        });
        self.candidates.truncate(last.map_or(usize::MAX, |last| last + 1));
    }

    /// Drops candidates, most likely first, that have more information than mirostat's bound, but
    /// not the first; the weight of all before. `None` without mirostat.
    pub(super) fn bounded(&mut self) -> Option<f64> {
        if self.config.mirostat_tau == 0.0 {
            return None;
        }
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let within = |c: &Candidate| (total / c.weight).log2() <= self.bound;
        let kept = self.candidates.iter().take_while(|c| within(c)).count();
        self.candidates.truncate(kept.max(1));
        Some(total)
    }

    /// How many of the candidates, most likely first, XTC may drop: those of at least its threshold
    /// but the last of them.
    pub(super) fn top_choices(&self) -> usize {
        if self.config.xtc_probability == 0.0 {
            return 0;
        }
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let least = f64::from(self.config.xtc_threshold) * total;
        self.candidates.iter().take_while(|c| c.weight >= least).count().saturating_sub(1)
    }
}
