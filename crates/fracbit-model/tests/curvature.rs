//! What noise costs by the curvature, against what it costs.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, logits, references};
use fracbit_model::curvature::{Columns, squares};
use fracbit_model::gradient::{RowLogs, divergence};
use fracbit_model::{Linear, LinearId, Model, RotationMode};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::collections::BTreeMap;
use std::ops::Range;

const DRAWS: u64 = 12;

/// Uniform noise of standard deviation 1.
fn unit(rng: &mut ChaCha8Rng) -> f32 {
    ((rng.next_u32() >> 8) as f32 / (1 << 24) as f32 - 0.5) * 12f32.sqrt()
}

/// Some rows and columns get more than others.
fn spread(i: usize) -> f32 {
    0.5 + (i * 7 % 5) as f32 / 4.0
}

fn columns(id: LinearId, cols: usize) -> Option<(LinearId, Vec<f32>)> {
    (id != LinearId::Embed).then(|| (id, (0..cols).map(spread).collect()))
}

/// About 4 % of the weights.
fn deviations(weights: &[f32], rows: usize) -> Vec<f32> {
    let rms = (weights.iter().map(|w| w * w).sum::<f32>() / weights.len() as f32).sqrt();
    (0..rows).map(|i| 0.04 * rms * spread(i + 3)).collect()
}

#[test]
fn it_is_the_mean_of_what_noise_costs() {
    compare(RotationMode::None);
}

#[test]
fn it_is_the_mean_of_what_noise_costs_folded() {
    compare(RotationMode::Fold);
}

/// For each reference model, whose weights are in `mode`.
fn compare(mode: RotationMode) {
    for reference in references().into_iter().flatten() {
        let mut model = Model::from_source(&reference.smooth(mode, 42)).unwrap();
        let vocab = model.config().vocab_size;
        let sequences = [&reference.tokens[..7], &reference.tokens[4..]];
        let clean: Vec<f32> =
            sequences.iter().flat_map(|tokens| logits(&model, &mut model.state(&F32), tokens)).collect();
        let ids: Vec<LinearId> = LinearId::all(model.config()).collect();
        let shapes: BTreeMap<_, _> = ids.iter().map(|&id| (id, id.shape(model.config()))).collect();

        let columns = ids.iter().filter_map(|&id| columns(id, shapes[&id].cols)).collect::<Columns>();
        let mut got = BTreeMap::<LinearId, Vec<f64>>::new();
        for seed in 0..DRAWS {
            let found = squares(&model, &sequences, seed, &columns);
            for (id, found) in found.unwrap() {
                let sums = got.entry(id).or_insert_with(|| vec![0.0; found.len()]);
                sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found / DRAWS as f64);
            }
        }
        assert_eq!(got.keys().copied().collect::<Vec<_>>(), ids, "every matrix");
        let mut ratios = Vec::new();
        for id in ids {
            let weights = model.linear(id).unwrap().to_dense().unwrap();
            let shape = shapes[&id];
            let (rows, cols) = (deviations(&weights, shape.rows), columns.get(&id));
            let bias = model.linear(id).unwrap().bias().map(<[f32]>::to_vec);
            let mut rng = ChaCha8Rng::seed_from_u64(5);
            let mut want = 0.0;
            for _ in 0..DRAWS {
                let mut noisy = weights.clone();
                for (row, s) in noisy.chunks_exact_mut(shape.cols).zip(&rows) {
                    for (j, w) in row.iter_mut().enumerate() {
                        *w += s * cols.map_or(1.0, |c| c[j]) * unit(&mut rng);
                    }
                }
                let noisy = Linear::dense(shape, noisy, bias.clone()).unwrap();
                let original = model.replace(id, noisy).unwrap();
                let mut give = |rows: Range<usize>, out: &mut Vec<f32>| {
                    out.clear();
                    out.extend_from_slice(&clean[rows.start * vocab..rows.end * vocab]);
                    Ok(())
                };
                want +=
                    divergence(&model, &RowLogs::new(), &sequences, &mut give, None).unwrap() / DRAWS as f64;
                model.replace(id, original).unwrap();
            }
            let each = got[&id].iter().zip(&rows).map(|(square, s)| square * f64::from(s * s) / 2.0);
            let rise = each.sum::<f64>();
            let ratio = rise / want;
            ratios.push(ratio.ln());
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let most = ratios.iter().fold(0.0f64, |m, r| m.max(r.abs()));
        // The softmax of a router bends more.
        let bound = if model.config().experts.is_some() { 0.8 } else { 0.5 };
        assert!(mean.abs() < 0.1 && most < bound, "{} {mode}: {mean} {most}", reference.name);
    }
}
