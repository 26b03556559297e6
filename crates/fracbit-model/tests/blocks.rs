//! Blocks run one by one give what the whole model gives, and moments turn with the weights.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, references, relative};
use fracbit_kernels::Team;
use fracbit_model::block::head_input;
use fracbit_model::{Block, BlockInput, LayerLinear, LinearId, Read, RotationMode, Routed, WeightSource};
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
            Some(Arc::new(move |_: &Team<'_>, Read { x: rows, .. }: Read<'_>| {
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

/// An expert, its tokens and what it reads of each.
type ExpertRows = (usize, Vec<Routed>, Vec<f32>);

/// What the downs of experts read, times what their outputs are multiplied by, is what a block
/// writes.
#[test]
fn rows_of_experts_come_with_their_tokens_and_shares() {
    let mut mixtures = 0;
    for reference in references().into_iter().flatten() {
        let source = reference.source(RotationMode::Fold, 3);
        let config = source.config();
        let Some(experts) = config.experts else { continue };
        let (name, width) = (reference.name, config.hidden_size);
        let down = source.linear(LinearId::Layer(0, LayerLinear::Down)).unwrap();
        let inner = down.shape.cols;
        let seen: Arc<Mutex<Vec<ExpertRows>>> = Arc::default();
        let block = Block::from_source(&source, 0, |input| {
            let seen = Arc::clone(&seen);
            let observer = move |_: &Team<'_>, Read { x, piece, routed }: Read<'_>| {
                seen.lock().unwrap().push((piece, routed.to_vec(), x.to_vec()));
            };
            (input == BlockInput::Down).then(|| Arc::new(observer) as Arc<_>)
        })
        .unwrap();
        let start = source.embedding(&reference.tokens).unwrap();
        let run = |f: &dyn Fn(&mut _, &mut [f32])| {
            let (mut x, mut state) = (start.clone(), block.state(&F32));
            // Two calls: places are those in the sequence.
            let (head, tail) = x.split_at_mut(3 * width);
            f(&mut state, head);
            f(&mut state, tail);
            x
        };
        let out = run(&|state, x| block.forward(state, x).unwrap());
        seen.lock().unwrap().clear();
        let mut made = run(&|state, x| block.forward_to(state, x, BlockInput::Down).unwrap());
        let mut counts = vec![0; reference.tokens.len()];
        for (piece, routed, rows) in seen.lock().unwrap().iter() {
            assert_eq!(rows.len(), routed.len() * inner, "{name}");
            for (row, Routed { place, share }) in rows.chunks(inner).zip(routed) {
                counts[*place] += 1;
                let weights = down.data[piece * width * inner..][..width * inner].chunks(inner);
                for (x, weights) in made[place * width..].iter_mut().zip(weights) {
                    *x += share * weights.iter().zip(row).map(|(w, x)| w * x).sum::<f32>();
                }
            }
        }
        assert!(counts.iter().all(|&count| count == experts.active), "{name}: {counts:?}");
        assert!(relative(&made, &out) < 1e-5, "{name}: {}", relative(&made, &out));
        mixtures += 1;
    }
    assert!(mixtures >= 4 || references().is_none(), "{mixtures}");
}
