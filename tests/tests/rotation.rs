//! The rotation that a model gets by itself suits models with massive activations, which real ones
//! have.

use fracbit::{
    Effort, EvalOptions, Opened, PlanOptions, QuantizeOptions, Quiet, Rounders, Target, evaluate, plan,
    quantize,
};
use fracbit::{Sensitivities, directory};
use fracbit_model::{RotationMode, Smoothing, WeightSource};
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
    let (opened, sites) = (Opened::new(model).expect("a model"), weights.sites());
    let rotation = sites.mode();
    let inventory = directory::inventory(&opened.checkpoint, &opened.config, rotation);
    let prior = Sensitivities::prior(&inventory, rotation);
    let target = Target::Uniform(scheme("tcq-4"));
    let options = PlanOptions { rotation, smoothing, seed: sites.seed(), ..PlanOptions::new(target) };
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
    let choice = opened.choose(None, true, 0, None, &Quiet).expect("a model that runs");
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
    let inventory = directory::inventory(&opened.checkpoint, &opened.config, RotationMode::Online);
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
