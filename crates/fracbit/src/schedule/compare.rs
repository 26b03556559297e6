//! Any way to choose what steps read, beside others: also such as no schedule allows.

use super::{Answered, answer, divergence, free, rouge_l, share_alike};
use fracbit_base::Rate;
use fracbit_load::{Error, Progress};
use fracbit_model::Model;
use fracbit_schedule::Phase;
use serde::Serialize;
use std::time::Duration;

/// What answers are worth whose steps read what a policy says, in the mean over prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The policy.
    pub name: String,
    /// Mean of the most bits that decode steps read.
    pub mean_bits: f64,
    /// Divergence along the answers of full precision, nats per token.
    pub kl: f64,
    /// Share of places at which the policy's own answers have the tokens of full precision.
    pub alike: f64,
    /// ROUGE-L of the policy's own answers, over tokens.
    pub rouge_l: f64,
    /// Tokens per second behind the prompt.
    pub tokens_per_second: f64,
}

/// Compares policies on greedy answers of `steps` tokens to `prompts`. Each is a name and the most
/// bits that a step reads.
///
/// # Errors
/// When a prompt with its answer does not fit the context, or there is none.
#[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
pub fn compare(
    model: &Model,
    prompts: &[Vec<u32>],
    steps: usize,
    policies: &[(&str, &dyn Fn(Phase) -> Rate)],
    progress: &dyn Progress,
) -> Result<Vec<Compared>, Error> {
    if prompts.is_empty() || steps == 0 {
        let rule = "should have at least one prompt, and answers one token".to_owned();
        return Err(Error::Option { option: "--prompts", rule });
    }
    progress.stage("answering in full precision", prompts.len() as u64);
    let answered = prompts.iter().map(|prompt| {
        let answered = answer(model, prompt, steps);
        progress.advance(1);
        answered
    });
    let answered: Vec<Answered> = answered.collect::<Result<_, Error>>()?;
    progress.stage("comparing", (policies.len() * prompts.len()) as u64);
    let each = (steps * prompts.len()) as f64;
    let judge = |&(name, read): &(&str, &dyn Fn(Phase) -> Rate)| {
        let bits = (0..steps - 1).map(|step| read(Phase::Decode(step)).bits()).sum::<f64>();
        let mut sums = [0.0; 3];
        let mut took = Duration::ZERO;
        for one in &answered {
            let (own, time) = free(model, &one.prompt, steps, Some(read))?;
            took += time;
            let losses =
                [divergence(model, one, read)?, share_alike(&own, &one.answer), rouge_l(&own, &one.answer)];
            sums.iter_mut().zip(losses).for_each(|(sum, loss)| *sum += loss / answered.len() as f64);
            progress.advance(1);
        }
        let [kl, alike, rouge_l] = sums;
        Ok(Compared {
            name: name.to_owned(),
            mean_bits: bits / (steps - 1).max(1) as f64,
            kl,
            alike,
            rouge_l,
            tokens_per_second: (each - answered.len() as f64) / took.as_secs_f64(),
        })
    };
    policies.iter().map(judge).collect()
}
