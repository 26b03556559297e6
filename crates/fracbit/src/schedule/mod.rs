//! How far precision may fall while a nested model answers: schedules fitted on prompts (PMPD,
//! arXiv 2410.13461, section 4).
//!
//! The model at full precision answers every prompt, greedily; a schedule is judged by how far its
//! own answers, or its predictions along that text, are from those. Half of the prompts choose, the
//! other half says what the choice is worth.

use fracbit_base::Rate;
use fracbit_load::{Error, Progress};
use fracbit_model::{Model, Precision, SampleConfig, Sampler, State, StateOptions, eval};
use fracbit_schedule::{Phase, Schedule, cheapest};
use serde::Serialize;
use std::time::{Duration, Instant};

mod compare;
mod train;

pub use compare::{Compared, compare};
pub use train::{Policy, TrainOptions, Trained, beginnings, train};

const ONE_PRECISION: &str =
    "should be a nested model, such as one of nest-tcq-2+2: this one has one precision";

/// What a schedule is judged by; each is a loss, 0 at full precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quality {
    /// Kullback-Leibler divergence from full precision along its text, nats per token.
    #[default]
    Kl,
    /// Share of places at which the schedule's own answer has another token.
    Match,
    /// One less ROUGE-L, the F-measure of the longest common subsequence (Lin 2004), over tokens.
    RougeL,
}

/// How to fit a schedule.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// What it is judged by.
    pub quality: Quality,
    /// The largest loss.
    pub tolerance: f64,
    /// Tokens of an answer.
    pub steps: usize,
    /// Places of an answer, evenly spread, at which precision may fall.
    pub points: usize,
}

impl Default for FitOptions {
    fn default() -> Self {
        Self { quality: Quality::Kl, tolerance: 0.02, steps: 64, points: 8 }
    }
}

/// A schedule and what it does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// The schedule.
    pub schedule: Schedule,
    /// Mean of the most bits that decode steps read.
    pub mean_bits: f64,
    /// Its loss on the prompts that chose.
    pub loss: f64,
    /// Its loss on the others; `None` where there was one prompt.
    pub held_out: Option<f64>,
}

/// What a fit found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// What losses are.
    pub quality: Quality,
    /// The largest loss that was allowed.
    pub tolerance: f64,
    /// Tokens of an answer.
    pub steps: usize,
    /// The same precision everywhere, the lowest first.
    pub uniform: Vec<Judged>,
    /// The lowest precision of all decode steps within the tolerance, with the lowest of the
    /// prompt: the phase-aware pair.
    pub pair: Judged,
    /// The schedule that reads least.
    pub best: Judged,
    /// Schedules that were run.
    pub asked: usize,
}

/// A prompt and what full precision makes of it.
struct Answered {
    prompt: Vec<u32>,
    answer: Vec<u32>,
    hidden: Vec<f32>, // (answer, hidden) that the answer was drawn from
}

/// Finds the schedule that reads least within a loss.
///
/// # Errors
/// When the model has one precision, there are no prompts, or a prompt with its answer does not fit
/// the context.
pub fn fit(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &FitOptions,
    progress: &dyn Progress,
) -> Result<Fit, Error> {
    let mut rates: Vec<Rate> = model.precisions().into_iter().collect();
    rates.reverse();
    let Some(&top) = rates.first() else {
        return Err(Error::Option { option: "MODEL", rule: ONE_PRECISION.to_owned() });
    };
    if prompts.is_empty() {
        return Err(Error::Option {
            option: "--prompts",
            rule: "should have at least one prompt".to_owned(),
        });
    }
    progress.stage("answering in full precision", prompts.len() as u64);
    let answered = prompts.iter().map(|prompt| {
        let answered = answer(model, prompt, options.steps);
        progress.advance(1);
        answered
    });
    let answered: Vec<Answered> = answered.collect::<Result<_, Error>>()?;
    let (choosing, held) = answered.split_at(answered.len().div_ceil(2));

    let mut failed = None;
    progress.stage("trying schedules", 0);
    let mut loss = |schedule: &Schedule| match mean_loss(model, choosing, schedule, options) {
        Ok(loss) => {
            progress.advance(1);
            loss
        }
        Err(e) => {
            failed.get_or_insert(e);
            f64::INFINITY
        }
    };
    let mut points: Vec<usize> =
        (0..options.points.max(1)).map(|i| i * options.steps / options.points.max(1)).collect();
    points.dedup();
    let judge = |schedule: Schedule, loss: f64| -> Result<Judged, Error> {
        let held_out = (!held.is_empty()).then(|| mean_loss(model, held, &schedule, options)).transpose()?;
        Ok(Judged { mean_bits: schedule.mean_bits(options.steps), schedule, loss, held_out })
    };
    let mut asked = rates.len();
    let uniform: Vec<(Schedule, f64)> =
        rates.iter().rev().map(|&rate| (Schedule::uniform(rate), loss(&Schedule::uniform(rate)))).collect();
    // With a prompt in full precision first; then the prompt's falls as far as it may.
    let mut least = |points: &[usize]| {
        let found = cheapest(&rates, top, points, options.steps, options.tolerance, &mut loss);
        // Full precision loses nothing but what the tolerance may forbid on purpose.
        let (mut schedule, mut lost, mut tried) =
            found.map_or((Schedule::uniform(top), 0.0, 0), |f| (f.schedule, f.loss, f.asked));
        for &rate in rates.iter().skip(1) {
            let lower = Schedule::new(rate, schedule.switches().to_vec()).expect("switches in order");
            tried += 1;
            let with = loss(&lower);
            if with > options.tolerance {
                break;
            }
            (schedule, lost) = (lower, with);
        }
        asked += tried;
        (schedule, lost)
    };
    let (pair, best) = (least(&[0]), least(&points));
    if let Some(e) = failed {
        return Err(e);
    }
    Ok(Fit {
        quality: options.quality,
        tolerance: options.tolerance,
        steps: options.steps,
        uniform: uniform.into_iter().map(|(s, l)| judge(s, l)).collect::<Result<_, Error>>()?,
        pair: judge(pair.0, pair.1)?,
        best: judge(best.0, best.1)?,
        asked,
    })
}

/// Mean loss of a schedule over prompts.
fn mean_loss(
    model: &Model,
    answered: &[Answered],
    schedule: &Schedule,
    options: &FitOptions,
) -> Result<f64, Error> {
    let mut sum = 0.0;
    for one in answered {
        sum += loss_of(model, one, schedule, options.quality)?;
    }
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    Ok(sum / answered.len().max(1) as f64)
}

/// Loss of a schedule on a prompt.
fn loss_of(model: &Model, one: &Answered, schedule: &Schedule, quality: Quality) -> Result<f64, Error> {
    let read = |phase| schedule.precision(phase);
    let own = || Ok::<_, Error>(free(model, &one.prompt, one.answer.len(), Some(&read))?.0);
    Ok(match quality {
        Quality::Kl => divergence(model, one, &read)?,
        Quality::Match => 1.0 - share_alike(&own()?, &one.answer),
        Quality::RougeL => 1.0 - rouge_l(&own()?, &one.answer),
    })
}

fn state(model: &Model, tokens: usize) -> State {
    model.state(&StateOptions { context: Some(tokens), ..StateOptions::default() })
}

/// A greedy answer of `steps` tokens, which no end token cuts short: what steps read is compared at
/// every place. With the time of all steps behind the prompt's.
fn free(
    model: &Model,
    prompt: &[u32],
    steps: usize,
    read: Option<&dyn Fn(Phase) -> Rate>,
) -> Result<(Vec<u32>, Duration), Error> {
    let mut state = state(model, prompt.len() + steps);
    let mut sampler = Sampler::new(SampleConfig::default())?;
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    let (mut text, mut start) = (prompt.to_vec(), Instant::now());
    for step in 0..steps {
        let phase = step.checked_sub(1).map_or(Phase::Prefill, Phase::Decode);
        state.set_precision(read.map_or(Precision::FULL, |read| Precision::at_most(read(phase))));
        let held = state.len();
        model.forward(&mut state, &text[held..], &mut hidden)?;
        model.logits(&mut state, &hidden[hidden.len() - model.config().hidden_size..], &mut logits)?;
        text.push(sampler.sample(&logits, &text)?);
        if step == 0 {
            start = Instant::now();
        }
    }
    Ok((text.split_off(prompt.len()), start.elapsed()))
}

fn answer(model: &Model, prompt: &[u32], steps: usize) -> Result<Answered, Error> {
    let (answer, _) = free(model, prompt, steps, None)?;
    let mut state = state(model, prompt.len() + steps);
    let mut hidden = Vec::new();
    let run = [prompt, &answer[..answer.len().saturating_sub(1)]].concat();
    model.forward(&mut state, &run, &mut hidden)?;
    let first = (prompt.len() - 1) * model.config().hidden_size;
    hidden.drain(..first);
    Ok(Answered { prompt: prompt.to_vec(), answer, hidden })
}

/// Divergence along the answer of full precision, nats per token.
fn divergence(model: &Model, one: &Answered, read: &dyn Fn(Phase) -> Rate) -> Result<f64, Error> {
    let (steps, width) = (one.answer.len(), model.config().hidden_size);
    let mut state = state(model, one.prompt.len() + steps);
    let (mut hidden, mut own, mut full) = (Vec::new(), Vec::new(), Vec::new());
    let mut sum = 0.0;
    let mut judge = |state: &mut State, hidden: &[f32], first: usize| -> Result<(), Error> {
        let reference = &one.hidden[first * width..][..hidden.len()];
        let precision = state.precision();
        model.logits(state, hidden, &mut own)?;
        state.set_precision(Precision::FULL);
        model.logits(state, reference, &mut full)?;
        state.set_precision(precision);
        let vocab = model.config().vocab_size;
        let rows = full.chunks_exact(vocab).zip(own.chunks_exact(vocab));
        sum += rows.map(|(p, q)| eval::row_kl(p, q)).sum::<f64>();
        Ok(())
    };
    state.set_precision(Precision::at_most(read(Phase::Prefill)));
    model.forward(&mut state, &one.prompt, &mut hidden)?;
    judge(&mut state, &hidden[hidden.len() - width..], 0)?;
    let mut step = 0;
    while step + 1 < steps {
        let rate = read(Phase::Decode(step));
        let alike = (step + 1..steps - 1).take_while(|&next| read(Phase::Decode(next)) == rate).count();
        let end = step + 1 + alike;
        state.set_precision(Precision::at_most(rate));
        model.forward(&mut state, &one.answer[step..end], &mut hidden)?;
        judge(&mut state, &hidden, step + 1)?;
        step = end;
    }
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    Ok(sum / steps.max(1) as f64)
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn share_alike(a: &[u32], b: &[u32]) -> f64 {
    let alike = a.iter().zip(b).filter(|(a, b)| a == b).count();
    alike as f64 / a.len().max(b.len()).max(1) as f64
}

/// The F-measure of the longest common subsequence of two texts.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn rouge_l(a: &[u32], b: &[u32]) -> f64 {
    if a.is_empty() && b.is_empty() {
        return 1.0;
    }
    let mut row = vec![0usize; b.len() + 1];
    for x in a {
        let mut diagonal = 0;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = if x == y { diagonal + 1 } else { above.max(row[j]) };
            diagonal = above;
        }
    }
    2.0 * row[b.len()] as f64 / (a.len() + b.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_compared_as_defined() {
        assert_eq!(share_alike(&[1, 2, 3, 4], &[1, 5, 3, 4]), 0.75);
        assert_eq!(share_alike(&[1], &[1, 2]), 0.5);
        for (a, b, common) in [
            (&[1u32, 2, 3, 4][..], &[1u32, 2, 3, 4][..], 4),
            (&[1, 2, 3, 4], &[2, 4, 1, 3], 2),
            (&[1, 2, 1, 2, 1], &[2, 1, 2, 7], 3),
            (&[1, 2], &[], 0),
        ] {
            let want = 2.0 * f64::from(common) / (a.len() + b.len()) as f64;
            assert!((rouge_l(a, b) - want).abs() < 1e-12, "{a:?} {b:?}");
            assert_eq!(rouge_l(a, b), rouge_l(b, a));
        }
        assert_eq!(rouge_l(&[], &[]), 1.0);
    }
}
