//! The rotation that a model gets by itself suits models with massive activations, which real ones
//! have.

#![expect(clippy::print_stderr, reason = "measured numbers beside their bounds")]

use fracbit::{
    CalibrateOptions, Calibration, Effort, EvalOptions, Opened, PlanOptions, QuantizeOptions, Quiet,
    Rounders, Target, calibrate, evaluate, evaluate::windows, plan, quantize, smoothing,
};
use fracbit::{Inventory, Sensitivities};
use fracbit_model::{KvType, Model, RotationMode, Smoothing, StateOptions, WeightSource, eval};
use fracbit_tests::{Parts, demo_model, scheme, stories};
use std::{path::Path, sync::Arc};

/// The demo model with one channel that is hundreds of times as large as the rest, and that the
/// gains of all norms suppress: the same for every token, so that the model still writes stories.
fn with_massive_channel(dir: &Path) {
    const CHANNEL: usize = 77;
    const MASSIVE: f32 = 300.0;
    let mut parts = Parts::read(&demo_model());
    let width = usize::try_from(parts.config["hidden_size"].as_u64().expect("a width")).expect("small");
    for tensor in &mut parts.tensors {
        if tensor.name == "model.embed_tokens.weight" {
            tensor.change_bf16(|at, w| if at % width == CHANNEL { MASSIVE } else { w });
        } else if tensor.name.ends_with("norm.weight") {
            // The channel sets what norms divide by; the others get back what they lose by that.
            let gain = MASSIVE / (width as f32).sqrt() / 2.0;
            tensor.change_bf16(|at, g| if at == CHANNEL { 1e-3 } else { g * gain });
        }
    }
    parts.write(dir);
}

fn divergence(model: &Path, weights: &WeightSource, smoothing: bool, out: &Path) -> f64 {
    let (opened, rotations) = (Opened::new(model).expect("a model"), weights.rotations());
    let rotation = rotations.mode();
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, rotation);
    let prior = Sensitivities::prior(&inventory, rotation);
    let target = Target::Uniform(scheme("tcq-4"));
    let options = PlanOptions { rotation, smoothing, seed: rotations.seed(), ..PlanOptions::new(target) };
    let plan = plan(&inventory, &prior, &options).expect("no budget to miss");
    let how =
        QuantizeOptions { rounders: Rounders::new(Effort::Fast), force: true, ..QuantizeOptions::default() };
    quantize(weights, &inventory, &plan, out, &how, &Quiet).expect("a good plan");
    let (text, path) = stories();
    let reading = EvalOptions { ctx: Some(128), windows: Some(6), bos: Some(true), ..EvalOptions::default() };
    let small = Opened::new(out).expect("just written");
    let found = evaluate(&small, Some(&opened), &text, &path, &reading, &Quiet).expect("a good text");
    found.kl.expect("there was a baseline")
}

#[test]
fn massive_activations_cost_ten_times_less_than_folded() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (model, out) = (place.path().join("model"), place.path().join("out"));
    with_massive_channel(&model);
    let opened = Opened::new(&model).expect("a good model");
    let choice = smoothing::choose_for(&opened, None, true, 0, None, &Quiet).expect("a model that runs");
    assert_eq!(choice.rotation, RotationMode::Online, "{}", choice.noise);
    assert!(choice.noise.fold > 10.0, "{}", choice.noise);
    let source = |mode| opened.source(mode, 0).expect("a good model");
    let auto = source(choice.rotation).smoothed(choice.smoothing);
    let auto = divergence(&model, &auto, true, &out);
    let fold = divergence(&model, &source(RotationMode::Fold), false, &out);
    assert!(fold >= 10.0 * auto, "folded {fold}, chosen {auto}");
    assert!(auto < 0.05, "{auto}");
}

#[test]
fn a_plan_is_carried_out_with_the_weights_that_it_is_for() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let opened = Opened::new(&demo_model()).expect("the embedded model is good");
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Online);
    let prior = Sensitivities::prior(&inventory, RotationMode::Online);
    let target = Target::Uniform(scheme("nuq-4"));
    let options = PlanOptions { rotation: RotationMode::Online, smoothing: true, ..PlanOptions::new(target) };
    let plan = plan(&inventory, &prior, &options).expect("no budget to miss");
    let plain = opened.source(RotationMode::Online, 0).expect("a good model");
    let out = place.path().join("out");
    let refused = quantize(&plain, &inventory, &plan, &out, &QuantizeOptions::default(), &Quiet);
    let message = refused.expect_err("no factors").to_string();
    assert!(message.contains("smoothed") && message.contains("online"), "{message}");
    // Factors of nothing are none.
    let empty = plain.smoothed(Arc::new(Smoothing::default()));
    assert!(quantize(&empty, &inventory, &plan, &out, &QuantizeOptions::default(), &Quiet).is_err());
    assert!(!out.exists());
}

/// The demo model with channels of keys up to 64 times as large as they were, and queries that are
/// as much smaller there: the same scores.
fn with_large_key_channels(dir: &Path) {
    let mut parts = Parts::read(&demo_model());
    let of = |key: &str| usize::try_from(parts.config[key].as_u64().expect("a number")).expect("small");
    let (width, d) = (of("hidden_size"), of("head_dim"));
    // Powers of two, so that bf16 holds the same numbers; of both halves of a plane.
    let factor = |at: usize| match at / width % (d / 2) {
        3 => 64.0,
        5 => 16.0,
        11 => 32.0,
        _ => 1.0f32,
    };
    for tensor in &mut parts.tensors {
        if tensor.name.ends_with("k_proj.weight") {
            tensor.change_bf16(|at, w| w * factor(at));
        } else if tensor.name.ends_with("q_proj.weight") {
            tensor.change_bf16(|at, w| w / factor(at));
        }
    }
    parts.write(dir);
}

#[test]
fn large_key_channels_cost_a_four_bit_cache_little() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path().join("model");
    with_large_key_channels(&dir);
    let opened = Opened::new(&dir).expect("a good model");
    let plain = opened.source(RotationMode::Online, 0).expect("a good model");
    let (text, path) = stories();
    let options = CalibrateOptions { length: Some(128), ..CalibrateOptions::new(2048) };
    let moments = place.path().join("moments");
    calibrate(&opened, Some((&text, &path)), &moments, &options, &Quiet).expect("a good text");
    let calibration = Calibration::open(&moments).expect("just written");

    let reading = EvalOptions { ctx: Some(128), windows: Some(6), bos: Some(true), ..EvalOptions::default() };
    let windows = windows(&opened, &text, &path, &reading).expect("a good text");
    let state = StateOptions { kv: KvType::I4, ..StateOptions::default() };
    let lost = |source: &WeightSource| {
        let [model, baseline] = [source, &plain].map(|s| Model::from_source(s).expect("a good model"));
        let options = eval::EvalOptions { state, ..eval::EvalOptions::default() };
        eval::compare(&baseline, &model, &windows, &options, |_| {}).expect("good windows").kl()
    };
    let without = lost(&plain);
    for calibration in [None, Some(&calibration)] {
        let choice =
            smoothing::choose_for(&opened, None, true, 0, calibration, &Quiet).expect("a model that runs");
        // What a plan is carried out with, now or in a run that goes on, is the same.
        let planned = smoothing::planned_source(&opened, RotationMode::Online, 0, true, calibration, &Quiet);
        let smoothed = planned.expect("a model that runs");
        assert_eq!(smoothed.smoothing(), &choice.smoothing);
        let with = lost(&smoothed);
        eprintln!("4-bit cache: {without:.4}, smoothed {with:.4}");
        assert!(with <= 0.2 * without, "{with} of {without}");
        assert!(without > 0.1, "the channels should matter: {without}");
    }
}
