//! Filters behind those that most people use, on the candidates that these leave.

use super::{Candidate, SampleConfig, Sampler, by_logit};

/// Where mirostat's bound begins.
pub(super) fn first_bound(config: &SampleConfig) -> f64 {
    2.0 * f64::from(config.mirostat_tau)
}

impl Sampler {
    /// The weight of all candidates.
    pub(super) fn total(&self) -> f64 {
        self.candidates.iter().map(|c| c.weight).sum()
    }

    /// Keeps the fewest candidates whose information is nearest to the entropy, the more likely of
    /// two as near, and that have a probability of `typical_p` together.
    pub(super) fn keep_typical(&mut self) {
        let total = self.total();
        let information = |c: &Candidate| -(c.weight / total).ln();
        // What has no weight has no part in the entropy.
        let weighty = self.candidates.iter().filter(|c| c.weight > 0.0);
        let entropy: f64 = weighty.map(|c| c.weight / total * information(c)).sum();
        let distance = |c: Candidate| ((information(&c) - entropy).abs(), c);
        let mut far: Vec<(f64, Candidate)> = self.candidates.iter().copied().map(distance).collect();
        far.sort_unstable_by(|(a, x), (b, y)| a.total_cmp(b).then_with(|| by_logit(x, y)));
        let mut mass = 0.0;
        let enough = f64::from(self.config.typical_p) * total;
        let last = far.iter().position(|(_, c)| {
            mass += c.weight;
            mass >= enough
        });
        far.truncate(last.map_or(usize::MAX, |last| last + 1));
        self.candidates.clear();
        self.candidates.extend(far.into_iter().map(|(_, c)| c));
    }

    /// Drops candidates that have more information than mirostat's bound, but never all; the weight
    /// of all before. `None` without mirostat.
    pub(super) fn keep_within_bound(&mut self) -> Option<f64> {
        if self.config.mirostat_tau == 0.0 {
            return None;
        }
        let total = self.total();
        let least = total * (-self.bound).exp2();
        let first = self.candidates.iter().copied().min_by(by_logit);
        self.candidates.retain(|c| c.weight >= least);
        if self.candidates.is_empty() {
            self.candidates.extend(first);
        }
        Some(total)
    }

    /// The least likely of the candidates of at least XTC's threshold, where there are several:
    /// what is more likely may be dropped. What has no weight is no choice.
    pub(super) fn last_choice(&self) -> Option<Candidate> {
        if self.config.xtc_probability == 0.0 {
            return None;
        }
        let least = f64::from(self.config.xtc_threshold) * self.total();
        let choices = self.candidates.iter().copied().filter(|c| c.weight > 0.0 && c.weight >= least);
        choices.max_by(by_logit)
    }
}
