//! Final hidden states against those of the float64 implementation, whatever was turned, folded and
//! smoothed on the way.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, references, relative};
use fracbit_io::ModelConfig;
use fracbit_model::{Model, Place, RotationMode, Runtime, Smoothing, StateOptions};
use std::sync::Arc;

/// Factors between a half and two, of every place.
fn factors(config: &ModelConfig) -> Smoothing {
    let mut smoothing = Smoothing::default();
    for place in Place::all(config) {
        let width = place.width(config);
        let inputs: Vec<f64> = (0..width).map(|j| 1.0 + (j * 7 % 11) as f64).collect();
        smoothing.balance(place, &inputs, &vec![1.0; width]);
    }
    smoothing
}

/// Hidden states of all tokens, run in two steps.
fn hidden(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut state = model.state(&StateOptions { context: Some(tokens.len()), ..F32 });
    let (mut work, mut all, mut rows) = (model.work(tokens.len()).unwrap(), Vec::new(), Vec::new());
    for part in tokens.chunks(tokens.len().div_ceil(2)) {
        Runtime::step(model, &mut work, std::slice::from_mut(&mut state), part, &[part.len()]).unwrap();
        model.hidden(&mut work, 0..part.len(), &mut rows).unwrap();
        all.extend_from_slice(&rows);
    }
    all
}

#[test]
fn they_are_those_of_the_checkpoint() {
    for reference in references().into_iter().flatten() {
        let raw = std::fs::read(reference.dir.join("hidden.f32")).unwrap();
        let want: Vec<f32> = raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        for mode in RotationMode::ALL {
            let plain = reference.source(mode, 42);
            let smoothing = Arc::new(factors(plain.config()));
            for (name, source) in
                [("plain", plain), ("smoothed", reference.source(mode, 42).smoothed(smoothing))]
            {
                let model = Model::from_source(&source).unwrap();
                let found = hidden(&model, &reference.tokens);
                assert_eq!(found.len(), want.len(), "{}", reference.name);
                let error = relative(&found, &want);
                assert!(error < 2e-5, "{}, {mode}, {name}: {error}", reference.name);
            }
        }
    }
}
