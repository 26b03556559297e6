//! The way back from rotated matrices to those of the checkpoint, for every architecture.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test's helpers fail by panicking")]

mod common;

use common::{Reference, references, relative};
use fracbit_io::Checkpoint;
use fracbit_kernels::cases::activations;
use fracbit_model::{Basis, FloatId, Linear, LinearId, LinearScratch, Model, RotationMode};

fn each(f: impl FnMut(&Reference)) {
    references().unwrap_or_default().iter().for_each(f);
}

/// A matrix as it is stored, its pieces one above the other.
fn stored(checkpoint: &Checkpoint, names: &[String]) -> Vec<f32> {
    names.iter().flat_map(|name| checkpoint.to_f32(name).unwrap()).collect()
}

#[test]
fn matrices_gains_and_biases_come_back() {
    each(|r| {
        for mode in RotationMode::ALL {
            let source = r.source(mode, 7);
            let config = source.config();
            let basis = Basis::new(config, source.rotations()).unwrap();
            for id in LinearId::all(config) {
                let mut got = source.linear(id).unwrap().data;
                basis.weights(id, &mut got).unwrap();
                let mut want = stored(source.checkpoint(), &source.weight_names(id));
                // A gain that was folded stays: the norm is one of ones.
                if let Some(columns) = source.columns(id).unwrap() {
                    let gains = columns.iter().cycle();
                    want.iter_mut().zip(gains).for_each(|(w, g)| *w *= g);
                }
                let error = relative(&got, &want);
                assert!(error <= 2e-6, "{} {mode}, {id}: {error:e}", r.name);
                if let Some(mut bias) = source.bias(id).unwrap() {
                    basis.bias(id, &mut bias).unwrap();
                    let error = relative(&bias, &source.checkpoint().to_f32(&id.bias_name()).unwrap());
                    assert!(error <= 2e-6, "{} {mode}, bias of {id}: {error:e}", r.name);
                }
            }
            for id in FloatId::all(config).filter(|id| !id.folded(config, mode)) {
                let mut got = source.floats(id).unwrap();
                basis.floats(id, &mut got).unwrap();
                let mut want = source.checkpoint().to_f32(&id.weight_name()).unwrap();
                // A router reads what gate and up read.
                if let FloatId::Router(i) = id
                    && mode == RotationMode::Fold
                {
                    let norm = FloatId::before(config, i, fracbit_model::LayerLinear::Gate).unwrap();
                    let gains = source.unfolded_norm(norm).unwrap();
                    want.iter_mut().zip(gains.iter().cycle()).for_each(|(w, g)| *w *= g);
                }
                let error = relative(&got, &want);
                assert!(error <= 2e-6, "{} {mode}, {id}: {error:e}", r.name);
            }
            eprintln!("{:12} {mode}: back", r.name);
        }
    });
}

#[test]
fn products_by_rotated_matrices_are_those_of_the_stored_ones() {
    const TOKENS: usize = 3;
    each(|r| {
        for mode in RotationMode::ALL {
            let source = r.source(mode, 7);
            let config = source.config();
            let basis = Basis::new(config, source.rotations()).unwrap();
            let model = Model::from_source(&source).unwrap();
            let product = |layer: &Linear, x: &[f32]| {
                let mut out = vec![0.0; TOKENS * layer.shape().rows];
                layer.apply(x, &mut LinearScratch::new(), &mut out).unwrap();
                out
            };
            // Experts are multiplied one by one, by the model alone.
            for id in LinearId::all(config).filter(|id| id.pieces(config) == 1) {
                let x = activations(TOKENS * id.shape(config).cols, 3);
                let mut weights = source.linear(id).unwrap().data;
                basis.weights(id, &mut weights).unwrap();
                let bias = source.bias(id).unwrap().map(|mut bias| {
                    basis.bias(id, &mut bias).unwrap();
                    bias
                });
                let want = product(&Linear::dense(id.shape(config), weights, bias).unwrap(), &x);
                let mut turned = x.clone();
                basis.enter(id, &mut turned).unwrap();
                let mut got = product(model.linear(id).unwrap(), &turned);
                basis.leave(id, &mut got).unwrap();
                let error = relative(&got, &want);
                assert!(error <= 2e-6, "{} {mode}, {id}: {error:e}", r.name);
            }
        }
    });
}

#[test]
fn other_lengths_are_refused() {
    let Some(references) = references() else { return };
    let source = references[0].source(RotationMode::Online, 0);
    let basis = Basis::new(source.config(), source.rotations()).unwrap();
    let id = LinearId::Layer(0, fracbit_model::LayerLinear::Q);
    assert!(basis.weights(id, &mut [0.0; 7]).is_err(), "no whole matrix");
    assert!(basis.enter(id, &mut [0.0; 7]).is_err(), "no whole row");
    assert!(basis.leave(id, &mut [0.0; 7]).is_err(), "no whole row");
    assert!(basis.floats(FloatId::Final, &mut [0.0; 7]).is_err(), "another width");
}
