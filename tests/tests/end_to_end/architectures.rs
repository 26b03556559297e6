//! Every architecture of `tests/reference`, quantized, loaded from its directory and run, against
//! float64 logits.
//!
//! The bound is derived from the rate: a matrix with relative squared error `e` perturbs what goes
//! through it by about `sqrt(e)`, and `n` matrices with independent errors by `sqrt(n e)`.
//! Attention and norms pass some perturbations on enlarged, so that the models here come to 1.0 to
//! 1.6 times that (the table this test prints); twice is allowed. A wrong rotation, bias, norm or
//! layout gives logits that have nothing to do with the reference, at a relative error of 1.4.
//!
//! A token whose router decides otherwise gets other experts altogether, and attention passes that
//! on to those behind it: where there are experts the error is that of the median token, 1.0 to 2.9
//! times that, and four times are allowed.

use fracbit_model::RotationMode;
use fracbit_tests::{Reference, Source, load, logits, reference, references, relative, scheme};

/// What the rounding of activations to 127 steps adds.
const ACTIVATIONS: f64 = 0.03;

/// Relative error of the logits after quantizing everything with `name`, and the most that is
/// allowed.
fn error(r: &Reference, rotation: RotationMode, name: &str) -> (f64, f64) {
    let source = Source::open(&r.dir, rotation, 5).unwrap_or_else(|e| panic!("{}: {e}", r.name));
    let plan = source.uniform(name).unwrap_or_else(|e| panic!("{} {name}: {e}", r.name));
    let place = tempfile::tempdir().expect("a temporary directory");
    let out = place.path().join("out");
    source.quantize(&plan, &out, false).unwrap_or_else(|e| panic!("{} {name}: {e}", r.name));
    let model = load(&out).unwrap_or_else(|e| panic!("{} {name}: {e}", r.name));
    let got = logits(&model, &r.tokens);
    let error = if model.config().experts.is_some() {
        let vocab = model.config().vocab_size;
        let tokens = got.chunks_exact(vocab).zip(r.logits.chunks_exact(vocab));
        let mut errors: Vec<f64> = tokens.map(|(got, want)| relative(got, want)).collect();
        errors.sort_by(f64::total_cmp);
        errors[errors.len() / 2]
    } else {
        relative(&got, &r.logits)
    };
    // A tied embedding is on the way twice.
    let matrices = 7 * model.config().num_hidden_layers() + 2;
    let expected = (matrices as f64 * fracbit_codebook::nmse(scheme(name)).expect("measured")).sqrt();
    let ratio = error / expected;
    eprintln!(
        "{:12} {:7} {name:8} logits {error:.4}, {ratio:.2} x sqrt(n e)",
        r.name,
        format!("{rotation:?}")
    );
    let factor = if model.config().experts.is_some() { 4.0 } else { 2.0 };
    (error, factor * expected + ACTIVATIONS)
}

#[test]
fn every_architecture_survives_quantization() {
    let all = references();
    assert_eq!(all.len(), 28, "every reference checkpoint");
    for r in &all {
        for name in ["nuq-8", "nuq-4", "tcq-4"] {
            let (got, most) = error(r, RotationMode::Fold, name);
            assert!(
                got < most.min(1.0),
                "{} {name}: relative error of the logits {got}, at most {most}",
                r.name
            );
        }
    }
}

#[test]
fn every_rotation_serves_every_architecture() {
    for r in &references() {
        for rotation in [RotationMode::Online, RotationMode::None] {
            let (got, most) = error(r, rotation, "nuq-6");
            assert!(got < most, "{} {rotation:?}: {got}, at most {most}", r.name);
        }
    }
}

#[test]
fn more_bits_are_closer() {
    // One architecture with everything odd about it: biases, widths that are no multiple of 16.
    let r = reference("llama-bias");
    let errors = ["nuq-3", "tcq-3", "nuq-5", "nuq-8"].map(|name| error(&r, RotationMode::Fold, name).0);
    assert!(errors.is_sorted_by(|a, b| a > b), "{errors:?}");
}
