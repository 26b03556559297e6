//! Blocks run one by one give what the whole model gives, and moments turn with the weights.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, references, relative};
use fracbit_kernels::Crew;
use fracbit_model::block::head_input;
use fracbit_model::{Block, BlockInput, LayerLinear, LinearId, RotationMode, WeightSource};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Sums of x x^T at every input, row-major.
type Sums = BTreeMap<(usize, BlockInput), Vec<f32>>;

/// The sums, and the hidden states of the head in the unrotated basis.
fn stream(source: &WeightSource, tokens: &[u32]) -> (Sums, Vec<f32>) {
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let mut x = source.embedding(tokens).unwrap();
    for index in 0..source.config().num_hidden_layers() {
        let block = Block::from_source(source, index, |input| {
            let seen = Arc::clone(&seen);
            let n = LinearId::Layer(index, input.reader()).shape(source.config()).cols;
            Some(Arc::new(move |_: &Crew<'_>, _: usize, rows: &[f32]| {
                let mut seen = seen.lock().unwrap();
                let sums = seen.entry((index, input)).or_insert_with(|| vec![0.0f32; n * n]);
                for row in rows.chunks(n) {
                    for (i, a) in row.iter().enumerate() {
                        row.iter().enumerate().for_each(|(j, b)| sums[i * n + j] += a * b);
                    }
                }
            }))
        })
        .unwrap();
        let mut state = block.state(&F32);
        // Two calls: a block continues where it was.
        let width = source.config().hidden_size;
        let (head, tail) = x.split_at_mut(3 * width);
        block.forward(&mut state, head).unwrap();
        block.forward(&mut state, tail).unwrap();
    }
    head_input(source, &mut x).unwrap();
    (Arc::try_unwrap(seen).unwrap().into_inner().unwrap(), x)
}

#[test]
fn streaming_gives_the_model_and_moments_turn_with_the_weights() {
    for reference in references().into_iter().flatten() {
        let name = reference.name;
        let plain = reference.source(RotationMode::None, 0);
        let model = reference.model(RotationMode::None);
        let mut want = Vec::new();
        model.forward(&mut model.state(&F32), &reference.tokens, &mut want).unwrap();
        let (moments, hidden) = stream(&plain, &reference.tokens);
        assert!(relative(&hidden, &want) < 2e-6, "{name}: {}", relative(&hidden, &want));
        for mode in [RotationMode::Fold, RotationMode::Online] {
            let source = reference.source(mode, 42);
            let (turned, hidden) = stream(&source, &reference.tokens);
            assert!(relative(&hidden, &want) < 1e-4, "{name} {mode}: {}", relative(&hidden, &want));
            for (&(index, input), sums) in &turned {
                let mut got = moments[&(index, input)].clone();
                source.rotate_moments(LinearId::Layer(index, input.reader()), &mut got).unwrap();
                let error = relative(&got, sums);
                assert!(error < 1e-3, "{name} {mode}: block {index}, {input:?}: {error}");
                let n = (got.len() as f64).sqrt() as usize;
                assert!((0..n * n).all(|at| got[at] == got[at % n * n + at / n]), "symmetric");
            }
            // The head: moments of its input, turned, against its input, turned.
            let id = if source.config().tie_word_embeddings { LinearId::Embed } else { LinearId::Head };
            let (n, mut one) = (source.config().hidden_size, Vec::new());
            let weights = [plain.linear(id).unwrap(), source.linear(id).unwrap()];
            let x = &want[..n];
            (0..n * n).for_each(|at| one.push(x[at / n] * x[at % n]));
            // tr(W H W^T) does not depend on the basis.
            let energy = |w: &[f32], h: &[f32]| -> f64 {
                w.chunks(n)
                    .map(|w| {
                        (0..n * n)
                            .map(|at| f64::from(w[at / n]) * f64::from(h[at]) * f64::from(w[at % n]))
                            .sum::<f64>()
                    })
                    .sum()
            };
            let before = energy(&weights[0].data, &one);
            source.rotate_moments(id, &mut one).unwrap();
            let after = energy(&weights[1].data, &one);
            assert!((after / before - 1.0).abs() < 1e-3, "{name} {mode}: {before} {after}");
        }
        assert!(plain.rotate_moments(LinearId::Layer(0, LayerLinear::Q), &mut [0.0; 3]).is_err());
        assert!(Block::from_source(&plain, 99, |_| None).is_err());
        assert!(plain.embedding(&[u32::MAX]).is_err());
    }
}
