//! Quality: negative log-likelihood, and how far one model's predictions are from another's.
//!
//! Texts come as windows of tokens. Each window is run from an empty state, and its tokens but the
//! first are predicted: a window of n gives n - 1 predictions. Windows should neither overlap nor
//! be joined; which tokens (a BOS, for instance) they begin with is the caller's choice, and must
//! be the same in numbers that are compared.
//!
//! With p the baseline's and q the other model's distribution of the next token,
//!
//! ```text
//! KL(p‖q) = sum_t p_t (ln p_t - ln q_t)
//! ```
//!
//! in nats, averaged over predictions. Top-1 agreement is the share of predictions where both have
//! the same most likely token (the first of equals).
//!
//! Logits are made [`EvalOptions::rows`] predictions at a time, for both models in lock-step, and
//! dropped: memory is rows × vocabulary floats per model, whatever the text. Sums run in f64 in the
//! order of the text.

use fracbit_kernels::Precision;
use rayon::prelude::*;

use crate::sample::argmax;
use crate::state::{State, StateOptions};
use crate::{Error, KvType, Model};

/// How to evaluate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// The states; the context is set to the longest window.
    pub state: StateOptions,
    /// Rows of logits held at a time, at least 1.
    pub rows: usize,
}

impl Default for EvalOptions {
    fn default() -> Self {
        Self { state: StateOptions::default(), rows: 32 }
    }
}

/// Negative log-likelihood of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nll {
    /// Sum over predictions, in nats.
    pub nats: f64,
    /// Predictions.
    pub tokens: u64,
}

impl Nll {
    /// Mean over predictions, in nats; NaN when there are none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    pub fn nats_per_token(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// e to the mean.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        self.nats_per_token().exp()
    }
}

/// A model beside a baseline, on the same text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Of the baseline.
    pub baseline: Nll,
    /// Of the model.
    pub model: Nll,
    /// Sum of KL(baseline‖model) over predictions, in nats.
    pub kl_sum: f64,
    /// Predictions with the same most likely token.
    pub top1_equal: u64,
}

impl Comparison {
    /// Mean KL divergence per prediction, in nats; NaN when there are none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    pub fn kl(&self) -> f64 {
        self.kl_sum / self.model.tokens as f64
    }

    /// Share of predictions with the same most likely token; NaN when there are none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    pub fn top1_agreement(&self) -> f64 {
        self.top1_equal as f64 / self.model.tokens as f64
    }
}

/// Negative log-likelihood of windows; `progress` is told the predictions done after each window.
///
/// # Errors
/// [`Error::Window`] for a window of fewer than two tokens, [`Error::Token`].
pub fn nll<W: AsRef<[u32]>>(
    model: &Model,
    windows: &[W],
    options: &EvalOptions,
    mut progress: impl FnMut(u64),
) -> Result<Nll, Error> {
    let mut run = Runner::new(model, windows, options)?;
    let mut total = Nll::default();
    for window in windows {
        let window = window.as_ref();
        run.start(window)?;
        for first in (0..window.len() - 1).step_by(run.rows) {
            let (targets, logits) = run.targets(window, first)?;
            let rows: Vec<f64> = rows_of(logits, targets).map(|(row, &t)| row_nll(row, t)).collect();
            total.nats = rows.iter().fold(total.nats, |sum, v| sum + v);
            total.tokens += rows.len() as u64;
        }
        progress(total.tokens);
    }
    Ok(total)
}

/// Runs a baseline and a model over the same windows; `progress` as for [`nll`]. The baseline is
/// read in full precision; where the cache has fewer than 16 bits, that of the baseline has 16.
///
/// # Errors
/// As for [`nll`], and [`Error::Vocabularies`].
pub fn compare<W: AsRef<[u32]>>(
    baseline: &Model,
    model: &Model,
    windows: &[W],
    options: &EvalOptions,
    mut progress: impl FnMut(u64),
) -> Result<Comparison, Error> {
    let vocabularies = (baseline.config().vocab_size, model.config().vocab_size);
    if vocabularies.0 != vocabularies.1 {
        return Err(Error::Vocabularies(vocabularies.0, vocabularies.1));
    }
    let kv = if options.state.kv.rotates_heads() { KvType::I16 } else { options.state.kv };
    let state = StateOptions { kv, precision: Precision::FULL, ..options.state };
    let of_baseline = EvalOptions { state, ..*options };
    let (mut a, mut b) =
        (Runner::new(baseline, windows, &of_baseline)?, Runner::new(model, windows, options)?);
    let mut total = Comparison::default();
    for window in windows {
        let window = window.as_ref();
        a.start(window)?;
        b.start(window)?;
        for first in (0..window.len() - 1).step_by(a.rows) {
            let (targets, p) = a.targets(window, first)?;
            let (_, q) = b.targets(window, first)?;
            let width = p.len() / targets.len();
            let rows: Vec<RowComparison> = rows_of(p, targets)
                .zip(q.par_chunks_exact(width))
                .map(|((p, &target), q)| compare_rows(p, q, target))
                .collect();
            for row in &rows {
                total.baseline.nats += row.baseline_nll;
                total.model.nats += row.model_nll;
                total.kl_sum += row.kl;
                total.top1_equal += u64::from(row.same_top);
            }
            total.baseline.tokens += rows.len() as u64;
            total.model.tokens += rows.len() as u64;
        }
        progress(total.model.tokens);
    }
    Ok(total)
}

/// A model on its way through windows.
struct Runner<'a> {
    model: &'a Model,
    state: State,
    rows: usize,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl<'a> Runner<'a> {
    fn new<W: AsRef<[u32]>>(model: &'a Model, windows: &[W], options: &EvalOptions) -> Result<Self, Error> {
        let lengths = || windows.iter().map(|w| w.as_ref().len());
        if let Some(short) = lengths().find(|&n| n < 2) {
            return Err(Error::Window(short));
        }
        let longest = lengths().max().unwrap_or(2);
        let state = model.state(&StateOptions { context: Some(longest - 1), ..options.state });
        Ok(Self { model, state, rows: options.rows.max(1), hidden: Vec::new(), logits: Vec::new() })
    }

    /// Runs a window: all tokens but the last, after which nothing is predicted.
    fn start(&mut self, window: &[u32]) -> Result<(), Error> {
        self.state.reset();
        let vocab = self.model.config().vocab_size;
        // The last token is never run, only looked up in the logits.
        if let Some(&token) = window.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::Token { token, vocab });
        }
        self.model.forward(&mut self.state, &window[..window.len() - 1], &mut self.hidden)
    }

    /// Targets and logits of up to `rows` predictions from `first` on.
    fn targets<'s, 'w>(
        &'s mut self,
        window: &'w [u32],
        first: usize,
    ) -> Result<(&'w [u32], &'s [f32]), Error> {
        let width = self.model.config().hidden_size;
        let last = (first + self.rows).min(window.len() - 1);
        let hidden = &self.hidden[first * width..last * width];
        self.model.logits(&mut self.state, hidden, &mut self.logits)?;
        Ok((&window[first + 1..=last], &self.logits))
    }
}

fn rows_of<'a>(
    logits: &'a [f32],
    targets: &'a [u32],
) -> impl IndexedParallelIterator<Item = (&'a [f32], &'a u32)> {
    logits.par_chunks_exact(logits.len() / targets.len()).zip(targets)
}

/// Partial sums of a row, and words that go together.
const LANES: usize = 8;

/// e^x for x <= 0, within 2 units in the last place; 0 below -708, where results would be
/// subnormal; NaN for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 by two-part reduction (Cody and Waite), then a Taylor
/// polynomial of degree 12 in r, whose truncation error 0.347^13 / 13! is below 2^-52. Our own
/// because libm differs between systems, and because the compiler makes vectors of it: a divergence
/// takes two of these for every word of the vocabulary.
#[inline(always)]
fn exp(x: f64) -> f64 {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2^52: adding it leaves the nearest integer in the low mantissa bits
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1; // 32 bits: its product with n is exact
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 479_001_600.0;
    for factorial in
        [39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
    {
        p = p * r + 1.0 / factorial;
    }
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    if x < -708.0 { 0.0 } else { p * power }
}

/// The sum of `term` over pairs of words, in eight interleaved partial sums; a row alone is its own
/// partner.
#[inline(always)]
fn sum(p: &[f32], q: &[f32], term: impl Fn(f64, f64) -> f64) -> f64 {
    let mut sums = [0.0; LANES];
    // Terms first, then sums: a loop without a sum is one that the compiler makes vectors of.
    let mut terms = [0.0; 16 * LANES];
    for (p, q) in p.chunks(terms.len()).zip(q.chunks(terms.len())) {
        let terms = &mut terms[..p.len()];
        for (t, (&p, &q)) in terms.iter_mut().zip(p.iter().zip(q)) {
            *t = term(f64::from(p), f64::from(q));
        }
        for terms in terms.chunks(LANES) {
            sums.iter_mut().zip(terms).for_each(|(sum, t)| *sum += t);
        }
    }
    sums.iter().sum()
}

/// The logarithm of the sum of e to the logits, in nats: a logit less this is a log-probability.
#[must_use]
pub fn log_sum_exp(row: &[f32]) -> f64 {
    // Shifted by the largest, so that nothing overflows.
    let mut tops = [f32::NEG_INFINITY; LANES];
    let (groups, rest) = row.as_chunks::<LANES>();
    for group in groups {
        tops.iter_mut().zip(group).for_each(|(top, &l)| *top = if l > *top { l } else { *top });
    }
    let top = tops.iter().chain(rest).fold(f32::NEG_INFINITY, |top, &l| if l > top { l } else { top });
    let top = f64::from(top);
    top + sum(row, row, |l, _| exp(l - top)).ln()
}

/// The negative log-likelihood of `target` under one row of logits, in nats.
///
/// # Panics
/// When `target` is outside the row.
#[must_use]
pub fn row_nll(row: &[f32], target: u32) -> f64 {
    log_sum_exp(row) - f64::from(row[target as usize])
}

/// KL(softmax(p)‖softmax(q)) of two rows of logits, in nats. Tokens of probability 0 under p count
/// nothing.
#[must_use]
pub fn row_kl(p: &[f32], q: &[f32]) -> f64 {
    row_kl_from(p, log_sum_exp(p), q)
}

/// [`row_kl`] with the [`log_sum_exp`] of p, which many rows may be compared with.
#[must_use]
pub fn row_kl_from(p: &[f32], zp: f64, q: &[f32]) -> f64 {
    kl(p, q, zp, log_sum_exp(q))
}

fn kl(p: &[f32], q: &[f32], zp: f64, zq: f64) -> f64 {
    let sum = sum(p, q, |p, q| {
        let (lp, lq) = (p - zp, q - zq);
        let weight = exp(lp);
        if weight == 0.0 { 0.0 } else { weight * (lp - lq) }
    });
    // Below zero only by rounding.
    if sum < 0.0 { 0.0 } else { sum }
}

/// Whether two rows of logits have the same most likely token.
#[must_use]
pub fn same_top(p: &[f32], q: &[f32]) -> bool {
    argmax(p) == argmax(q)
}

struct RowComparison {
    baseline_nll: f64,
    model_nll: f64,
    kl: f64,
    same_top: bool,
}

fn compare_rows(p: &[f32], q: &[f32], target: u32) -> RowComparison {
    let (zp, zq) = (log_sum_exp(p), log_sum_exp(q));
    RowComparison {
        baseline_nll: zp - f64::from(p[target as usize]),
        model_nll: zq - f64::from(q[target as usize]),
        kl: kl(p, q, zp, zq),
        same_top: same_top(p, q),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps_where_logarithms_of_probabilities_lie() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -708.0 * (f64::from(i) / 200_000.0).powi(3);
            worst = worst.max((exp(x) - x.exp()).abs() / x.exp());
        }
        assert!(worst < 2.0 * f64::EPSILON, "relative error {worst:e}");
        assert_eq!((exp(0.0), exp(-708.1), exp(f64::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp(f64::NAN).is_nan());
    }

    #[test]
    fn sums_agree_with_the_definition_at_every_tail() {
        for n in 1..40 {
            let logits = |a: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * a).sin() * 20.0).collect() };
            let (p, q) = (logits(1.7), logits(0.9));
            let z = |row: &[f32]| row.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
            assert!((log_sum_exp(&p) - z(&p)).abs() < 1e-12, "{n} words");
            let (zp, zq) = (z(&p), z(&q));
            let term = |(&p, &q): (&f32, &f32)| {
                let (lp, lq) = (f64::from(p) - zp, f64::from(q) - zq);
                lp.exp() * (lp - lq)
            };
            let want: f64 = p.iter().zip(&q).map(term).sum();
            assert!((row_kl(&p, &q) - want.max(0.0)).abs() < 1e-12, "{n} words");
            assert_eq!(row_kl(&p, &q), row_kl_from(&p, log_sum_exp(&p), &q));
        }
        assert!(log_sum_exp(&[1.0, f32::NAN, 2.0]).is_nan());
    }

    #[test]
    fn rows_by_hand() {
        // Probabilities 1/4, 3/4 and 1/2, 1/2.
        let (p, q) = ([0.0, 3f32.ln()], [5.0, 5.0]);
        assert!((row_nll(&p, 0) - 4f64.ln()).abs() < 1e-7);
        assert!((row_nll(&p, 1) - (4.0 / 3.0f64).ln()).abs() < 1e-7);
        let want = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((row_kl(&p, &q) - want).abs() < 1e-7, "{}", row_kl(&p, &q));
        assert_eq!(row_kl(&p, &p), 0.0);
        // Shifts change nothing, and nothing overflows.
        let far = [1e4, 1e4 + 3f32.ln()];
        assert!((row_nll(&far, 0) - 4f64.ln()).abs() < 1e-3);
        assert_eq!(row_kl(&[0.0, f32::NEG_INFINITY], &[0.0, f32::NEG_INFINITY]), 0.0);
    }
}
