//! The gradient for row factors against differences of the divergence, on every architecture and
//! rotation.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, logits, references};
use fracbit_model::gradient::{RowLogs, divergence, memory};
use fracbit_model::{LayerLinear, LinearId, Model, RotationMode};
use std::ops::Range;

/// Numbers of about `size` that a seed makes.
fn noise(seed: u64, len: usize, size: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| 2.0 * size * next()).collect()
}

fn all(model: &Model, size: f32) -> RowLogs {
    let rows = |id: LinearId| model.linear(id).unwrap().shape().rows;
    let ids = LinearId::all(model.config()).enumerate();
    ids.map(|(i, id)| (id, noise(i as u64 + 7, rows(id), size))).collect()
}

/// The model's own logits, sequence after sequence.
fn baseline(model: &Model, sequences: &[&[u32]]) -> Vec<f32> {
    sequences.iter().flat_map(|tokens| logits(model, &mut model.state(&F32), tokens)).collect()
}

fn kl(
    model: &Model,
    logs: &RowLogs,
    sequences: &[&[u32]],
    own: &[f32],
    gradient: Option<&mut RowLogs>,
) -> f64 {
    let vocab = model.config().vocab_size;
    let mut give = |rows: Range<usize>, out: &mut Vec<f32>| {
        out.clear();
        out.extend_from_slice(&own[rows.start * vocab..rows.end * vocab]);
        Ok(())
    };
    divergence(model, logs, sequences, &mut give, gradient).unwrap()
}

#[test]
fn the_gradient_is_that_of_differences() {
    for reference in references().into_iter().flatten() {
        for (mode, all_active) in RotationMode::ALL.into_iter().flat_map(|m| [(m, true), (m, false)]) {
            let name = format!("{} {mode}, all experts: {all_active}", reference.name);
            let source = if all_active { reference.smooth(mode, 42) } else { reference.source(mode, 42) };
            // With some of the experts the matrices behind the last choice are left, which have no
            // part in it.
            let last = source.config().num_hidden_layers() - 1;
            let behind = |id: LinearId| match id {
                LinearId::Layer(layer, which) => layer == last && which >= LayerLinear::Gate,
                id => id == LinearId::Head,
            };
            if !all_active && source.config().experts.is_none() {
                continue;
            }
            let model = Model::from_source(&source).unwrap();
            // Two sequences: neither sees the other.
            let sequences = [&reference.tokens[..5], &reference.tokens[3..]];
            let own = baseline(&model, &sequences);
            let nothing = kl(&model, &RowLogs::new(), &sequences, &own, None);
            assert!(nothing < 1e-5, "{name}: {nothing} from itself");

            let mut logs = all(&model, 0.3);
            logs.retain(|&id, _| all_active || behind(id));
            let mut gradient = RowLogs::new();
            let at = kl(&model, &logs, &sequences, &own, Some(&mut gradient));
            assert!(at > 1e-3, "{name}: {at}");
            assert_eq!(at, kl(&model, &logs, &sequences, &own, None), "{name}: the same without a gradient");
            assert_eq!(gradient.keys().collect::<Vec<_>>(), logs.keys().collect::<Vec<_>>());
            let total: f64 = gradient.values().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            for (&id, g) in &gradient {
                let direction = noise(99, g.len(), 1.0);
                let moved = |by: f32| {
                    let mut logs = logs.clone();
                    let values = logs.get_mut(&id).unwrap();
                    values.iter_mut().zip(&direction).for_each(|(v, d)| *v += by * d);
                    kl(&model, &logs, &sequences, &own, None)
                };
                // Experts are chosen by a softmax, which bends.
                let step = if model.config().experts.is_some() { 0.005 } else { 0.02 };
                let want = (moved(step) - moved(-step)) / f64::from(2.0 * step);
                let got: f64 = g.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
                // Differences have an error of second order, and the divergence one of f32.
                let bound = 0.02 * want.abs() + 2e-3 * total;
                assert!((got - want).abs() < bound, "{name} {id}: {got}, differences {want}, all {total}");
            }
        }
    }
}

#[test]
fn only_what_is_asked_for_is_counted_and_added() {
    for reference in references().into_iter().flatten().take(1) {
        let model = reference.model(RotationMode::Fold);
        let sequences = [&reference.tokens[..]];
        let own = baseline(&model, &sequences);
        let mut logs = all(&model, 0.3);
        let mut whole = RowLogs::new();
        kl(&model, &logs, &sequences, &own, Some(&mut whole));
        // A second time on top of the first.
        let mut twice = whole.clone();
        kl(&model, &logs, &sequences, &own, Some(&mut twice));
        for (a, b) in whole.values().flatten().zip(twice.values().flatten()) {
            assert!((2.0 * a - b).abs() <= 1e-4 * (a.abs() + 1e-3), "{a} {b}");
        }
        let id = *logs.keys().nth(3).unwrap();
        logs.retain(|&other, _| other == id);
        let mut one = RowLogs::new();
        kl(&model, &logs, &sequences, &own, Some(&mut one));
        assert_eq!(one.keys().collect::<Vec<_>>(), [&id]);

        let wrong = RowLogs::from([(id, vec![0.0; 3])]);
        let error = divergence(&model, &wrong, &sequences, &mut |_, _| Ok(()), None).unwrap_err();
        assert!(error.to_string().contains(&id.to_string()), "{error}");
        let vocab = u32::try_from(model.config().vocab_size).unwrap();
        assert!(divergence(&model, &RowLogs::new(), &[&[vocab]], &mut |_, _| Ok(()), None).is_err());
        // Logits that are not there.
        assert!(divergence(&model, &RowLogs::new(), &sequences, &mut |_, _| Ok(()), None).is_err());
        assert!(memory(model.config(), 64, 64) > memory(model.config(), 32, 32));
    }
}
