//! From logits to the next token.
//!
//! The steps, in the order of Hugging Face transformers: repetition penalty (Keskar et al. 2019,
//! arXiv 1909.05858, section 4.1) → temperature → top-k → top-p (Holtzman et al. 2019, arXiv
//! 1904.09751) → min-p (Nguyen et al. 2024, arXiv 2407.01082) → typical-p (Meister et al. 2022,
//! arXiv 2202.00666, section 4) → mirostat (Basu et al. 2021, arXiv 2007.14966; the second kind of
//! its authors) → XTC → draw. Temperature 0 means greedy, and then the filters have no say (the
//! most likely token passes the first of them). [`Adjustments`] come behind the repetition penalty,
//! DRY behind them, and a [`Constraint`] last: what it bars, nothing allows again.
//!
//! Fixed rules, so that one seed gives one text everywhere: equal logits are ordered by token
//! number, the lower first; NaN counts as minus infinity; sums run in f64 in that order; the draw
//! takes the top 53 bits of one ChaCha8 word, and so does the chance of XTC before it, where it has
//! one; a nucleus is the shortest prefix whose probability reaches `top_p`. Where a logit is plus
//! infinity, the first such token is taken.
//!
//! Cost: one pass over the vocabulary for the largest logit of every block, which bounds tell from
//! blocks that may have candidates; where all tokens count, for a nucleus or because nothing is
//! filtered, another one for sums of exponentials of blocks. Those are off by a bound that is
//! known. Where a decision does not depend on the rest, it is the decision of exact sums; where it
//! does, once in some thousand tokens at the most, the exact sums are made. So the token is that of
//! the rules, always. Weights of candidates are exact.

use fracbit_kernels::{Vectors, vectors::LOGITS};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::{Error, Model};

mod adjust;
mod config;
mod constraint;
mod dry;
mod filters;

pub use adjust::Adjustments;
pub use config::SampleConfig;
pub use constraint::Constraint;
pub use dry::DRY_BREAKERS;
use filters::first_bound;

/// Picks tokens; owns the random numbers and its work space.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SampleConfig,
    adjustments: Adjustments,
    constraint: Option<Box<dyn Constraint>>,
    rng: ChaCha8Rng,
    bound: f64, // of mirostat, in bits
    vectors: Vectors,
    candidates: Vec<Candidate>,
    penalized: Vec<f32>,
    peaks: Vec<f32>, // the largest logit of every block; minus infinity where none is usable
    order: Vec<f32>, // the same, in another order
    sums: Vec<f64>,  // of the weights of every block, nearly
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    weight: f64, // exp((logit - top) / temperature)
}

/// How far nearly exact sums of weights may be from those of the rules, beside what rounding adds:
/// terms are off by at most 3e-12.
const SLACK: f64 = 1e-11;
/// The least that candidates for a nucleus are looked for below the top, in temperatures.
const REACH: f64 = 4.0;

/// The weights of logits.
#[derive(Clone, Copy)]
struct Scale {
    top: f32,
    temperature: f32,
}

impl Scale {
    /// Not above zero.
    fn below_top(self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.top)
    }

    fn weight(self, logit: f32) -> f64 {
        (self.below_top(logit) / f64::from(self.temperature)).exp()
    }
}

impl Sampler {
    /// Goes on as `other` would, for drafts of what that one will pick.
    pub fn follow(&mut self, other: &Self) {
        (self.config, self.rng, self.vectors) = (other.config, other.rng.clone(), other.vectors);
        self.bound = other.bound;
        self.constraint.clone_from(&other.constraint);
    }

    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// [`Error::Sampling`] for a number outside its range.
    pub fn new(config: SampleConfig) -> Result<Self, Error> {
        config.check()?;
        Ok(Self {
            config,
            adjustments: Adjustments::default(),
            constraint: None,
            rng: ChaCha8Rng::seed_from_u64(config.seed),
            bound: first_bound(&config),
            vectors: Vectors::scalar(),
            candidates: Vec::new(),
            penalized: Vec::new(),
            peaks: Vec::new(),
            order: Vec::new(),
            sums: Vec::new(),
        })
    }

    /// The same, which changes logits before it picks.
    #[must_use]
    pub fn adjusted(self, adjustments: Adjustments) -> Self {
        Self { adjustments, ..self }
    }

    /// The same, which picks tokens that `constraint` allows; it should stand at the beginning of
    /// the text, and is told every token that is picked.
    #[must_use]
    pub fn constrained(self, constraint: Box<dyn Constraint>) -> Self {
        Self { constraint: Some(constraint), ..self }
    }

    /// Whether its [`Constraint`] lets nothing come behind what was picked.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| constraint.complete())
    }

    /// How many of `tokens`, from the first on, its [`Constraint`] lets come next.
    pub fn valid(&mut self, tokens: &[u32]) -> usize {
        self.constraint.as_mut().map_or(tokens.len(), |constraint| constraint.valid(tokens))
    }

    /// Takes sums with the kernels that `model` runs with, as every
    /// generation has it do: sooner, and the same tokens.
    pub fn use_kernels_of(&mut self, model: &Model) {
        self.vectors = model.vectors;
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &SampleConfig {
        &self.config
    }

    /// Back to the start of the random numbers and of mirostat; a [`Constraint`] stays where it is.
    pub fn reset(&mut self) {
        self.rng = ChaCha8Rng::seed_from_u64(self.config.seed);
        self.bound = first_bound(&self.config);
    }

    /// Picks the next token from one row of logits; `history` is the text so far, which penalties
    /// look at.
    ///
    /// # Errors
    /// [`Error::NoLogit`] when every logit is NaN or minus infinity, or there are none;
    /// [`Error::Constraint`].
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32, Error> {
        let token = self.change(logits, history, |this, logits| this.pick(logits, SLACK))?;
        if let Some(constraint) = &mut self.constraint {
            constraint.push(token)?;
        }
        Ok(token)
    }

    /// The tokens that survive the filters, with their probabilities, as [`Sampler::sample`] would
    /// draw from. Draws nothing.
    ///
    /// # Errors
    /// As for [`Sampler::sample`].
    pub fn distribution(&mut self, logits: &[f32], history: &[u32]) -> Result<Vec<(u32, f64)>, Error> {
        self.change(logits, history, |this, logits| {
            let scale = this.scale(logits)?;
            if this.is_greedy(scale) {
                return Ok(vec![(this.first(logits, scale.top), 1.0)]);
            }
            if !this.filter(logits, scale, SLACK) {
                this.gather(logits, |_| true);
                this.weigh(scale);
            }
            this.keep_within_bound();
            let total = this.total();
            let mut tokens: Vec<_> = this.candidates.iter().map(|c| (c.token, c.weight / total)).collect();
            let Some(last) = this.last_choice() else { return Ok(tokens) };
            // With a chance the more likely ones are dropped, else they are not.
            let chance = f64::from(this.config.xtc_probability);
            let stays = |c: &Candidate| by_logit(c, &last).is_ge();
            let rest: f64 = this.candidates.iter().filter(|c| stays(c)).map(|c| c.weight).sum();
            for ((_, p), c) in tokens.iter_mut().zip(&this.candidates) {
                let without = if stays(c) { c.weight / rest } else { 0.0 };
                *p = (1.0 - chance) * *p + chance * without;
            }
            tokens.retain(|(_, p)| *p > 0.0);
            Ok(tokens)
        })
    }

    /// Runs `f` with penalized, adjusted and constrained logits, copied only where something
    /// changes.
    fn change<T>(
        &mut self,
        logits: &[f32],
        history: &[u32],
        f: impl FnOnce(&mut Self, &[f32]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let penalty = self.config.repetition_penalty;
        let dry = self.config.dry_multiplier > 0.0;
        if penalty == 1.0 && !dry && !self.adjustments.any() && self.constraint.is_none() {
            return f(self, logits);
        }
        let mut penalized = std::mem::take(&mut self.penalized);
        penalized.clear();
        penalized.extend_from_slice(logits);
        for &token in history {
            // From the original: a token seen twice is penalized once.
            if let Some(&logit) = logits.get(token as usize) {
                penalized[token as usize] = if logit > 0.0 { logit / penalty } else { logit * penalty };
            }
        }
        self.adjustments.apply(&mut penalized, history);
        if dry {
            dry::apply(&self.config, &self.adjustments.breakers, &mut penalized, history);
        }
        let masked = self.constraint.as_mut().map_or(Ok(()), |constraint| constraint.mask(&mut penalized));
        let out = masked.and_then(|()| f(self, &penalized));
        self.penalized = penalized;
        out
    }

    /// The next token; sums that are nearly exact are off by `slack` of themselves at most.
    fn pick(&mut self, logits: &[f32], slack: f64) -> Result<u32, Error> {
        let scale = self.scale(logits)?;
        if self.is_greedy(scale) {
            return Ok(self.first(logits, scale.top));
        }
        let filtered = self.filter(logits, scale, slack);
        let total = self.keep_within_bound();
        if self.config.xtc_probability > 0.0
            && self.uniform() < f64::from(self.config.xtc_probability)
            && let Some(last) = self.last_choice()
        {
            self.candidates.retain(|c| by_logit(c, &last).is_ge());
        }
        let uniform = self.uniform();
        if let Some(total) = total {
            let token = draw(uniform, self.candidates.iter().map(|c| (c.token, c.weight)));
            let weight = self.candidates.iter().find(|c| c.token == token).map_or(total, |c| c.weight);
            let SampleConfig { mirostat_tau: tau, mirostat_eta: eta, .. } = self.config;
            self.bound -= f64::from(eta) * ((total / weight).log2() - f64::from(tau));
            return Ok(token);
        }
        if filtered {
            return Ok(draw(uniform, self.candidates.iter().map(|c| (c.token, c.weight))));
        }
        let (total, margin) = self.nearly_total(logits, scale, slack);
        if let Some(token) = self.nearly_drawn(logits, scale, uniform * total, margin) {
            return Ok(token);
        }
        let all = usable(logits).map(|(token, logit)| (token, scale.weight(logit)));
        Ok(draw(uniform, all))
    }

    fn is_greedy(&self, scale: Scale) -> bool {
        self.config.temperature == 0.0 || scale.top == f32::INFINITY
    }

    /// Looks for the largest logit, of all and of every block.
    fn scale(&mut self, logits: &[f32]) -> Result<Scale, Error> {
        self.peaks.clear();
        self.peaks.extend(logits.chunks(LOGITS).map(peak));
        let top = peak(&self.peaks);
        if top == f32::NEG_INFINITY {
            return Err(Error::NoLogit);
        }
        Ok(Scale { top, temperature: self.config.temperature })
    }

    /// The first token with the largest logit.
    fn first(&self, logits: &[f32], top: f32) -> u32 {
        let block = self.peaks.iter().position(|peak| *peak == top).expect("a block has the largest logit");
        let mut tokens = (0u32..).zip(logits).skip(block * LOGITS);
        tokens.find(|(_, logit)| **logit == top).expect("the block has it").0
    }

    /// Makes the tokens that pass candidates, with their weights; `false` where all pass, which are
    /// not gathered.
    fn filter(&mut self, logits: &[f32], scale: Scale, slack: f64) -> bool {
        let SampleConfig { top_k, top_p, min_p, temperature, .. } = self.config;
        let min_p = f64::from(min_p);
        // All at once, and without being touched: later candidates may be more, but need no memory
        // of their own.
        self.candidates.clear();
        self.candidates.reserve(logits.len());
        if top_k > 0 && top_k < logits.len() {
            self.gather_most_likely(logits, top_k);
            self.weigh(scale);
            if top_p < 1.0 {
                let total = self.candidates.iter().map(|c| c.weight).sum();
                let count = self.candidates.len();
                self.keep_nucleus(total..=total, count).expect("the total is exact");
            }
        } else if top_p < 1.0 {
            let count = logits.iter().filter(|logit| **logit > f32::NEG_INFINITY).count();
            let (total, margin) = self.nearly_total(logits, scale, slack);
            let near = total - margin..=total + margin;
            if self.gather_nucleus(logits, scale, near, count).is_none() {
                let total: f64 = usable(logits).map(|(_, logit)| scale.weight(logit)).sum();
                self.gather_nucleus(logits, scale, total..=total, count).expect("the total is exact");
            }
        } else if min_p > 0.0 {
            let least = (min_p.ln() - 1e-6) * f64::from(temperature);
            self.gather(logits, |logit| scale.below_top(logit) >= least);
            self.weigh(scale);
        } else if self.config.filters_more() {
            self.gather(logits, |_| true);
            self.weigh(scale);
        } else {
            return false;
        }
        // The top token has weight 1 and so always stays.
        self.candidates.retain(|c| c.weight >= min_p);
        if self.config.typical_p < 1.0 {
            self.keep_typical();
        }
        true
    }

    /// A number in 0..1 by chance.
    fn uniform(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in f64")]
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        uniform
    }

    /// Makes the usable tokens candidates that `pass`, which a larger logit than one that does
    /// does, in the order of tokens.
    fn gather(&mut self, logits: &[f32], pass: impl Fn(f32) -> bool) {
        self.candidates.clear();
        for ((start, block), &peak) in (0..).step_by(LOGITS).zip(logits.chunks(LOGITS)).zip(&self.peaks) {
            if peak > f32::NEG_INFINITY && pass(peak) {
                let passing = usable(block).filter(|(_, logit)| pass(*logit));
                self.candidates.extend(passing.map(|(at, logit)| Candidate {
                    token: start + at,
                    logit,
                    weight: 0.0,
                }));
            }
        }
    }

    fn weigh(&mut self, scale: Scale) {
        self.candidates.iter_mut().for_each(|c| c.weight = scale.weight(c.logit));
    }

    /// Makes the `count` most likely tokens candidates, in the order of tokens.
    fn gather_most_likely(&mut self, logits: &[f32], count: usize) {
        self.order.clone_from(&self.peaks);
        // As many blocks have a logit that is not below.
        let least = if count <= self.order.len() {
            *self.order.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
        } else {
            f32::NEG_INFINITY
        };
        self.gather(logits, |logit| logit >= least);
        if count < self.candidates.len() {
            self.candidates.select_nth_unstable_by(count - 1, by_logit);
            self.candidates.truncate(count);
            // The selection leaves an order of its own; go back to the order of tokens, which sums
            // run in.
            self.candidates.sort_unstable_by_key(|c| c.token);
        }
    }

    /// Makes the nucleus candidates, most likely first, by bounds of the total weight of all
    /// `count` usable tokens. `None` where it depends on what the total is between these.
    fn gather_nucleus(
        &mut self,
        logits: &[f32],
        scale: Scale,
        total: std::ops::RangeInclusive<f64>,
        count: usize,
    ) -> Option<()> {
        let (target, least) = (f64::from(self.config.top_p) * total.end(), self.least(*total.start(), count));
        let mut reach = REACH;
        loop {
            let lowest = -reach * f64::from(scale.temperature);
            self.gather(logits, |logit| scale.below_top(logit) >= lowest);
            self.weigh(scale);
            let mass: f64 = self.candidates.iter().map(|c| c.weight).sum();
            // With room for sums in another order.
            let all = self.candidates.len() == count || (1e-6 - reach).exp() < least;
            if all || mass * (1.0 - 1e-6) >= target {
                return self.keep_nucleus(total, count);
            }
            reach *= 1.5;
        }
    }

    /// What `count` tokens that are no part of a nucleus are lighter than.
    fn least(&self, total: f64, count: usize) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a vocabulary is far below 2^53")]
        let count = count as f64;
        (1.0 - f64::from(self.config.top_p)) / count * total
    }

    /// Of candidates with all tokens of the nucleus among them keeps those, most likely first; see
    /// [`Self::gather_nucleus`].
    ///
    /// Tokens with probability below (1 - p)/n of n hold less than 1 - p together: none of them is
    /// in the nucleus.
    fn keep_nucleus(&mut self, total: std::ops::RangeInclusive<f64>, count: usize) -> Option<()> {
        let [low, high] = [*total.start(), *total.end()];
        let [surely_out, surely_in] = [low, high].map(|total| self.least(total, count));
        self.candidates.retain(|c| c.weight >= surely_out);
        self.candidates.sort_unstable_by(by_logit);
        let [low_target, target] = [low, high].map(|total| f64::from(self.config.top_p) * total);
        let mut mass = 0.0;
        for (i, c) in self.candidates.iter().enumerate() {
            mass += c.weight;
            if mass >= target {
                let known = c.weight >= surely_in;
                self.candidates.truncate(i + 1);
                return known.then_some(());
            }
            if mass >= low_target {
                return None;
            }
        }
        // Only rounding gets here.
        (low == high).then_some(())
    }

    /// The sum of all weights, and how far from it the exact one may be; those of blocks go to
    /// `self.sums`.
    fn nearly_total(&mut self, logits: &[f32], scale: Scale, slack: f64) -> (f64, f64) {
        self.sums.clear();
        self.sums.resize(logits.len().div_ceil(LOGITS), 0.0);
        let rate = std::f64::consts::LOG2_E / f64::from(scale.temperature);
        self.vectors.exp_sums(logits, scale.top, rate, &mut self.sums);
        let total: f64 = self.sums.iter().sum();
        // The exact sum adds one by one, and what is drawn is taken from it the same way.
        #[expect(clippy::cast_precision_loss, reason = "a vocabulary is far below 2^53")]
        let rounding = (logits.len() + 16) as f64 * f64::EPSILON;
        (total, (slack + rounding) * total)
    }

    /// The token whose weight, added to those before it, is the first to exceed `aim`, by the sums
    /// of blocks; `None` where they are not exact enough to tell. `margin` is what they, `aim` and
    /// what is drawn may each be off by.
    fn nearly_drawn(&self, logits: &[f32], scale: Scale, aim: f64, margin: f64) -> Option<u32> {
        let [least, most] = [aim - 3.0 * margin, aim + 3.0 * margin];
        let mut before = 0.0;
        for ((start, block), sum) in (0u32..).step_by(LOGITS).zip(logits.chunks(LOGITS)).zip(&self.sums) {
            if before + sum <= most {
                before += sum;
                continue;
            }
            for (at, logit) in usable(block) {
                let with = before + scale.weight(logit);
                if with > most {
                    return (before < least).then_some(start + at);
                }
                before = with;
            }
            return None;
        }
        None
    }
}

/// Draws one of weighted tokens by a number in 0..1.
fn draw(uniform: f64, tokens: impl Iterator<Item = (u32, f64)> + Clone) -> u32 {
    let total: f64 = tokens.clone().map(|(_, weight)| weight).sum();
    let mut left = uniform * total;
    let mut last = None;
    for (token, weight) in tokens {
        left -= weight;
        if left < 0.0 {
            return token;
        }
        if weight > 0.0 {
            last = Some(token);
        }
    }
    // Only rounding gets here: the last candidate that has any weight.
    last.expect("the top token has weight 1")
}

/// Most likely first, equal ones by token: a total order, since NaN was left out.
fn by_logit(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Logits that are neither NaN nor minus infinity, with their tokens.
fn usable(logits: &[f32]) -> impl Iterator<Item = (u32, f32)> + Clone {
    // False for NaN, too.
    (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY)
}

/// The largest number; minus infinity where all are NaN or there are none.
fn peak(values: &[f32]) -> f32 {
    let larger = |most: f32, v: f32| if v > most { v } else { most };
    let (whole, rest) = values.as_chunks::<16>();
    let mut most = [f32::NEG_INFINITY; 16];
    for values in whole {
        most.iter_mut().zip(values).for_each(|(most, &v)| *most = larger(*most, v));
    }
    rest.iter().chain(&most).copied().fold(f32::NEG_INFINITY, larger)
}

/// The index of the largest value, the first of equals; NaN never wins. `None` when all are NaN or
/// there are none.
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
mod oracle;

#[cfg(test)]
mod tests {
    use super::*;

    const OFF: SampleConfig = SampleConfig { temperature: 1.0, seed: 7, ..SampleConfig::GREEDY };

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
    fn distributions_of_the_later_filters_by_hand() {
        let l = four();
        // Information in nats: 2.303, 0.916, 1.609, 1.204; the entropy is 1.280. Token 3 is nearest
        // to it, then 2, 1 and 0.
        let typical = |typical_p| SampleConfig { typical_p, ..OFF };
        check(typical(0.29), &l, &[], &[(3, 1.0)]);
        check(typical(0.45), &l, &[], &[(2, 0.4), (3, 0.6)]);
        check(typical(0.55), &l, &[], &[(1, 4.0 / 9.0), (2, 2.0 / 9.0), (3, 3.0 / 9.0)]);
        // Of top-k 2 (4/7, 3/7) the entropy is 0.683: the more likely (0.560) is nearer than the
        // other (0.847).
        check(SampleConfig { top_k: 2, ..typical(0.5) }, &l, &[], &[(1, 1.0)]);
        // XTC drops 1 and 3 of the three that have 0.15, or nothing.
        let xtc = |xtc_probability, xtc_threshold| SampleConfig { xtc_probability, xtc_threshold, ..OFF };
        check(xtc(1.0, 0.15), &l, &[], &[(0, 1.0 / 3.0), (2, 2.0 / 3.0)]);
        let half = [0.05 + 0.5 / 3.0, 0.2, 0.1 + 1.0 / 3.0, 0.15];
        check(xtc(0.5, 0.15), &l, &[], &[(0, half[0]), (1, half[1]), (2, half[2]), (3, half[3])]);
        // One token alone is no choice.
        check(xtc(1.0, 0.35), &l, &[], &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        // The bound begins at two bits: 1.32 and 1.74 are within, 2.32 and 3.32 are not.
        check(SampleConfig { mirostat_tau: 1.0, ..OFF }, &l, &[], &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        // Half a bit: only the most likely stays, which would not by itself.
        check(SampleConfig { mirostat_tau: 0.25, ..OFF }, &l, &[], &[(1, 1.0)]);
    }

    #[test]
    fn what_is_left_can_be_drawn() {
        // Tokens without any weight, and settings that let only such pass if anything does.
        let logits = [0.0, -1e4, -2e4, 0.0];
        for config in [
            SampleConfig { xtc_probability: 1.0, xtc_threshold: 0.0, ..OFF },
            SampleConfig { xtc_probability: 1.0, xtc_threshold: 1e-45, temperature: 1e-3, ..OFF },
            SampleConfig { typical_p: 1e-45, ..OFF },
            SampleConfig { mirostat_tau: 1e-45, mirostat_eta: f32::MAX, ..OFF },
            SampleConfig { mirostat_tau: f32::MAX, mirostat_eta: f32::MAX, ..OFF },
        ] {
            let mut sampler = Sampler::new(config).unwrap();
            for _ in 0..20 {
                let token = sampler.sample(&logits, &[]).unwrap();
                assert!(token == 0 || token == 3, "{config:?}: {token}");
            }
        }
    }

    #[test]
    fn mirostat_keeps_its_information() {
        // A wide distribution of some 10 bits.
        let logits: Vec<f32> = (0..4000u32).map(|i| -(i as f32) / 400.0).collect();
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        for tau in [2.0f32, 5.0, 7.0] {
            let config = SampleConfig { mirostat_tau: tau, ..OFF };
            let mut sampler = Sampler::new(config).unwrap();
            let run = |sampler: &mut Sampler| -> Vec<u32> {
                (0..4000).map(|_| sampler.sample(&logits, &[]).unwrap()).collect()
            };
            let drawn = run(&mut sampler);
            let bits = |&token: &u32| (total / f64::from(logits[token as usize]).exp()).log2();
            let mean = drawn[1000..].iter().map(bits).sum::<f64>() / 3000.0;
            // No token has less than 8.6 bits: what is asked below that, it cannot give.
            let least = bits(&0);
            assert!((mean - f64::from(tau).max(least)).abs() < 0.1, "{tau}: {mean}, least {least}");
            sampler.reset();
            assert_eq!(run(&mut sampler), drawn, "back to the start");
        }
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
            SampleConfig { typical_p: 0.0, ..OFF },
            SampleConfig { xtc_probability: 1.1, ..OFF },
            SampleConfig { xtc_threshold: f32::NAN, ..OFF },
            SampleConfig { mirostat_tau: -1.0, ..OFF },
            SampleConfig { mirostat_eta: f32::INFINITY, ..OFF },
            SampleConfig { dry_multiplier: -0.1, ..OFF },
            SampleConfig { dry_base: 0.9, ..OFF },
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
