//! A text to calibrate on that the model writes itself, some sequences at a time.

use super::Sequences;
use fracbit_io::ModelConfig;
use fracbit_load::{Error, Progress};
use fracbit_model::{Model, SampleConfig, Sampler, State, StateOptions};
use rayon::prelude::*;

/// Tokens of the sequences that are written together. The weights are then read and converted once
/// for all of them, which takes longer than to multiply them with a few tokens; but their caches
/// have to fit.
const TOGETHER: usize = 16_384;

/// Sequences of `length` tokens that are written together.
fn together(length: usize) -> usize {
    (TOGETHER / length).clamp(1, 64)
}

fn state_options(length: usize) -> StateOptions {
    StateOptions { context: Some(length), ..StateOptions::default() }
}

/// Memory of the caches while sequences of `length` tokens are written.
pub(super) fn memory(config: &ModelConfig, length: usize) -> u64 {
    (together(length) * State::cache_bytes(config, &state_options(length))) as u64
}

/// Sequences of `length` tokens, `tokens` in all, sampled at temperature 1. Sequence i has a
/// sampler of its own, seeded by (seed, i), and starts with BOS or, where the model has none, with
/// a token that depends on i.
pub(crate) fn write(
    model: &Model,
    tokens: usize,
    length: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<Sequences, Error> {
    let config = model.config();
    let (vocab, count) = (config.vocab_size, tokens.div_ceil(length));
    let mut sequences: Vec<Vec<u32>> = (0..count)
        .map(|index| {
            let spread = u32::try_from((index * 7919 + 1) % vocab).unwrap_or(0);
            vec![config.bos_token_id.unwrap_or(spread)]
        })
        .collect();
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    for (group, sequences) in sequences.chunks_mut(together(length)).enumerate() {
        let sampler = |at: usize| {
            let seed = seed ^ (((group * together(length) + at) as u64) << 32);
            Sampler::new(SampleConfig { temperature: 1.0, seed, ..SampleConfig::default() })
        };
        let mut samplers = (0..sequences.len()).map(sampler).collect::<Result<Vec<_>, _>>()?;
        let mut states: Vec<State> = sequences.iter().map(|_| model.state(&state_options(length))).collect();
        let ones = vec![1; sequences.len()];
        for _ in 1..length {
            let last: Vec<u32> = sequences.iter().map(|s| s[s.len() - 1]).collect();
            model.forward_batch(&mut states, &last, &ones, &mut hidden)?;
            model.logits(&mut states[0], &hidden, &mut logits)?;
            let rows = logits.par_chunks_exact(vocab);
            sequences.par_iter_mut().zip(&mut samplers).zip(rows).try_for_each(
                |((sequence, sampler), row)| -> Result<(), Error> {
                    sequence.push(sampler.sample(row, &[])?);
                    Ok(())
                },
            )?;
            progress.advance(sequences.len() as u64);
        }
    }
    let mut left = tokens;
    for sequence in &mut sequences {
        sequence.truncate(left);
        left -= sequence.len();
    }
    Ok(Sequences::new(sequences))
}
