//! From logits to the next token.
//!
//! The steps, in the order of Hugging Face transformers: repetition penalty (Keskar et al. 2019, arXiv
//! 1909.05858, section 4.1) → temperature → top-k → top-p (Holtzman et al. 2019, arXiv 1904.09751) → min-p
//! (Nguyen et al. 2024, arXiv 2407.01082) → draw. Temperature 0 means greedy, and then the filters have no
//! say (the most likely token passes all of them).
//!
//! Fixed rules, so that one seed gives one text everywhere: equal logits are ordered by token number, the
//! lower first; NaN counts as minus infinity; sums run in f64 in that order; the draw takes the top 53 bits
//! of one ChaCha8 word; a nucleus is the shortest prefix whose probability reaches `top_p`. Where a logit is
//! plus infinity, the first such token is taken.
//!
//! Cost: one pass over the vocabulary and one exponential per surviving token; only survivors of a cheap
//! bound are sorted. Top-p over all n tokens first drops those with probability below (1 − p)/n: together
//! they hold less than 1 − p, so none of them can be in the nucleus.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::Error;

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
    /// Divide positive and multiply negative logits of tokens already seen, positive; 1 leaves them.
    pub repetition_penalty: f32,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Default for SampleConfig {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SampleConfig {
    fn check(&self) -> Result<(), Error> {
        let bad = |field, want, got: f32| Err(Error::Sampling { field, want, got });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad("temperature", "a finite number, at least 0", self.temperature);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", "above 0 and at most 1", self.top_p);
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min_p", "in 0..=1", self.min_p);
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return bad("repetition_penalty", "a positive finite number", self.repetition_penalty);
        }
        Ok(())
    }
}

/// Picks tokens; owns the random numbers and its work space.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SampleConfig,
    rng: ChaCha8Rng,
    candidates: Vec<Candidate>,
    seen: Vec<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    weight: f64, // exp((logit - top) / temperature)
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// [`Error::Sampling`] for a number outside its range.
    pub fn new(config: SampleConfig) -> Result<Self, Error> {
        config.check()?;
        let rng = ChaCha8Rng::seed_from_u64(config.seed);
        Ok(Self { config, rng, candidates: Vec::new(), seen: Vec::new() })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &SampleConfig {
        &self.config
    }

    /// Back to the start of the random numbers.
    pub fn reset(&mut self) {
        self.rng = ChaCha8Rng::seed_from_u64(self.config.seed);
    }

    /// Picks the next token from one row of logits; `history` is what the repetition penalty looks at.
    ///
    /// # Errors
    /// [`Error::NoLogit`] when every logit is NaN or minus infinity, or there are none.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, Error> {
        self.gather(logits, history);
        let top = first_best(&self.candidates).ok_or(Error::NoLogit)?;
        if self.config.temperature == 0.0 || top.logit == f32::INFINITY {
            return Ok(top.token);
        }
        self.filter(top.logit);
        Ok(self.draw())
    }

    /// The tokens that survive the filters, with their probabilities, as [`Sampler::sample`] would draw from.
    /// Draws nothing.
    ///
    /// # Errors
    /// As for [`Sampler::sample`].
    pub fn distribution(&mut self, logits: &[f32], history: &[u32]) -> Result<Vec<(u32, f64)>, Error> {
        self.gather(logits, history);
        let top = first_best(&self.candidates).ok_or(Error::NoLogit)?;
        if self.config.temperature == 0.0 || top.logit == f32::INFINITY {
            return Ok(vec![(top.token, 1.0)]);
        }
        self.filter(top.logit);
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        Ok(self.candidates.iter().map(|c| (c.token, c.weight / total)).collect())
    }

    /// Candidates with a usable logit, penalized, in the order of tokens.
    fn gather(&mut self, logits: &[f32], history: &[u32]) {
        let penalty = self.config.repetition_penalty;
        let penalized = penalty != 1.0;
        if penalized {
            self.seen.clear();
            self.seen.resize(logits.len(), false);
            for &token in history {
                if let Some(seen) = self.seen.get_mut(token as usize) {
                    *seen = true;
                }
            }
        }
        self.candidates.clear();
        for (token, (i, &logit)) in (0u32..).zip(logits.iter().enumerate()) {
            let logit = match logit {
                l if !(penalized && self.seen[i]) => l,
                l if l > 0.0 => l / penalty,
                l => l * penalty,
            };
            // False for NaN too.
            if logit > f32::NEG_INFINITY {
                self.candidates.push(Candidate { token, logit, weight: 0.0 });
            }
        }
    }

    /// Fills in weights relative to the top and drops what the filters refuse.
    fn filter(&mut self, top: f32) {
        let SampleConfig { temperature, top_k, top_p, min_p, .. } = self.config;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, by_logit);
            self.candidates.truncate(top_k);
            // The selection leaves an order of its own; go back to the order of tokens, which sums run in.
            self.candidates.sort_unstable_by_key(|c| c.token);
        }
        for c in &mut self.candidates {
            c.weight = ((f64::from(c.logit) - f64::from(top)) / f64::from(temperature)).exp();
        }
        if top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
            #[expect(clippy::cast_precision_loss, reason = "a vocabulary is far below 2^53")]
            let least = (1.0 - f64::from(top_p)) / self.candidates.len() as f64 * total;
            self.candidates.retain(|c| c.weight >= least);
            self.candidates.sort_unstable_by(by_logit);
            let target = f64::from(top_p) * total;
            let mut mass = 0.0;
            let mut keep = 0;
            for c in &self.candidates {
                keep += 1;
                mass += c.weight;
                if mass >= target {
                    break;
                }
            }
            self.candidates.truncate(keep);
        }
        if min_p > 0.0 {
            // The top token has weight 1 and so always stays.
            self.candidates.retain(|c| c.weight >= f64::from(min_p));
        }
    }

    fn draw(&mut self) -> u32 {
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in f64")]
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for c in &self.candidates {
            left -= c.weight;
            if left < 0.0 {
                return c.token;
            }
        }
        // Only rounding gets here: the last candidate that has any weight.
        let last = self.candidates.iter().rev().find(|c| c.weight > 0.0);
        last.expect("the top token has weight 1").token
    }
}

/// Most likely first, equal ones by token: a total order, since NaN was left out.
fn by_logit(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

fn first_best(candidates: &[Candidate]) -> Option<Candidate> {
    candidates.iter().copied().reduce(|best, c| if c.logit > best.logit { c } else { best })
}

/// The index of the largest value, the first of equals; NaN never wins. `None` when all are NaN or there are
/// none.
#[must_use]
pub fn argmax(values: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &v) in values.iter().enumerate() {
        if !v.is_nan() && best.is_none_or(|(_, b)| v > b) {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: SampleConfig =
        SampleConfig { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 7 };

    /// Logits whose probabilities are 0.1, 0.4, 0.2, 0.3 up to rounding.
    fn four() -> [f32; 4] {
        [0.1f32.ln(), 0.4f32.ln(), 0.2f32.ln(), 0.3f32.ln()]
    }

    fn check(config: SampleConfig, logits: &[f32], history: &[u32], want: &[(u32, f64)]) {
        let mut got = Sampler::new(config).unwrap().distribution(logits, history).unwrap();
        got.sort_by_key(|g| g.0);
        assert_eq!(got.len(), want.len(), "{config:?}: {got:?}");
        for (g, w) in got.iter().zip(want) {
            assert!(g.0 == w.0 && (g.1 - w.1).abs() < 1e-6, "{config:?}: {got:?}, want {want:?}");
        }
    }

    #[test]
    fn distributions_by_hand() {
        let l = four();
        check(OFF, &l, &[], &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        check(SampleConfig { top_k: 2, ..OFF }, &l, &[], &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(SampleConfig { top_k: 9, ..OFF }, &l, &[], &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        // 0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2
        check(
            SampleConfig { top_p: 0.75, ..OFF },
            &l,
            &[],
            &[(1, 4.0 / 9.0), (2, 2.0 / 9.0), (3, 3.0 / 9.0)],
        );
        check(SampleConfig { top_p: 0.39, ..OFF }, &l, &[], &[(1, 1.0)]);
        check(SampleConfig { top_p: 1e-9, ..OFF }, &l, &[], &[(1, 1.0)]);
        // 0.5 · 0.4 = 0.2 lies on token 2's edge; 0.6 · 0.4 = 0.24 does not.
        check(SampleConfig { min_p: 0.6, ..OFF }, &l, &[], &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(SampleConfig { min_p: 1.0, ..OFF }, &l, &[], &[(1, 1.0)]);
        // Temperature 1/2 squares: 1, 16, 4, 9 of 30.
        check(
            SampleConfig { temperature: 0.5, ..OFF },
            &l,
            &[],
            &[(0, 1.0 / 30.0), (1, 16.0 / 30.0), (2, 4.0 / 30.0), (3, 9.0 / 30.0)],
        );
        // After top-k 3 (0.4, 0.3, 0.2 of 0.9), top-p 0.7 asks for 0.63: two tokens reach it.
        check(SampleConfig { top_k: 3, top_p: 0.7, ..OFF }, &l, &[], &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(SampleConfig { temperature: 0.0, ..OFF }, &l, &[], &[(1, 1.0)]);
    }

    #[test]
    fn penalty_divides_and_multiplies() {
        // 2 -> 1, -1 -> -2, unseen 1 stays; token 9 of the history does not exist.
        let want = [1f64.exp(), (-2f64).exp(), 1f64.exp()];
        let total: f64 = want.iter().sum();
        let want: Vec<(u32, f64)> = (0..).zip(want.iter().map(|w| w / total)).collect();
        check(SampleConfig { repetition_penalty: 2.0, ..OFF }, &[2.0, -1.0, 1.0], &[1, 0, 0, 9], &want);
    }

    #[test]
    fn nan_and_infinities() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        check(OFF, &[nan, 0.0, -inf, 0.0], &[], &[(1, 0.5), (3, 0.5)]);
        check(OFF, &[0.0, inf, nan, inf], &[], &[(1, 1.0)]);
        let mut s = Sampler::new(OFF).unwrap();
        for bad in [&[][..], &[nan, nan], &[-inf, nan]] {
            assert!(matches!(s.sample(bad, &[]), Err(Error::NoLogit)));
        }
        let mut greedy = Sampler::new(SampleConfig::default()).unwrap();
        assert_eq!(greedy.sample(&[nan, 3.0, 3.0, -1.0], &[]).unwrap(), 1, "the first of equals");
        assert_eq!(argmax(&[nan, 3.0, 3.0]), Some(1));
        assert_eq!(argmax(&[nan]), None);
    }

    #[test]
    fn ties_at_the_edge_go_to_lower_tokens() {
        check(SampleConfig { top_k: 2, ..OFF }, &[0.0; 5], &[], &[(0, 0.5), (1, 0.5)]);
        check(SampleConfig { top_p: 0.5, ..OFF }, &[0.0; 4], &[], &[(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn refuses_settings_out_of_range() {
        let bad = [
            SampleConfig { temperature: -1.0, ..OFF },
            SampleConfig { temperature: f32::NAN, ..OFF },
            SampleConfig { top_p: 0.0, ..OFF },
            SampleConfig { top_p: 1.5, ..OFF },
            SampleConfig { min_p: f32::NAN, ..OFF },
            SampleConfig { repetition_penalty: 0.0, ..OFF },
        ];
        for config in bad {
            assert!(matches!(Sampler::new(config), Err(Error::Sampling { .. })), "{config:?}");
        }
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let n = 20_000;
        let run = |seed| {
            let mut s = Sampler::new(SampleConfig { seed, ..OFF }).unwrap();
            (0..n).map(|_| s.sample(&four(), &[]).unwrap()).collect::<Vec<_>>()
        };
        let draws = run(1);
        assert_eq!(draws, run(1));
        assert_ne!(draws, run(2));
        for (token, p) in [(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)] {
            let share = draws.iter().filter(|&&t| t == token).count() as f64 / f64::from(n);
            // Four standard deviations of a binomial share.
            assert!(
                (share - p).abs() < 4.0 * (p * (1.0 - p) / f64::from(n)).sqrt(),
                "token {token}: {share}"
            );
        }
    }

    #[test]
    fn nucleus_prefilter_changes_nothing() {
        // A long flat tail: compare with the definition, sorted in full.
        let logits: Vec<f32> =
            (0..5000u32).map(|i| -((i.wrapping_mul(2_654_435_761) >> 8) as f32) / 2e6).collect();
        for top_p in [0.05, 0.5, 0.9, 0.999] {
            let mut s = Sampler::new(SampleConfig { top_p, ..OFF }).unwrap();
            let mut got: Vec<u32> = s.distribution(&logits, &[]).unwrap().iter().map(|d| d.0).collect();
            let mut all: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&l| f64::from(l).exp())).collect();
            let total: f64 = all.iter().map(|a| a.1).sum();
            all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let mut mass = 0.0;
            let keep = all.iter().take_while(|a| {
                let more = mass < f64::from(top_p) * total;
                mass += a.1;
                more
            });
            let mut want: Vec<u32> = keep.map(|a| a.0).collect();
            got.sort_unstable();
            want.sort_unstable();
            assert_eq!(got, want, "top_p {top_p}");
        }
    }
}
