//! Forecasts: what plans of the demo model are said to lose, and what they lose.
//!
//! The width of the bars comes from noise in this model and a constant that was fixed on another
//! one (`fracbit::forecast`); these plans and this text had no part in either. `cargo test
//! --release -p fracbit-tests --test end_to_end bars -- --nocapture` prints them.

use fracbit::{EvalOptions, Opened, PlanOptions, Protocol, Quiet, Target, evaluate, plan, sensitivity};
use fracbit_base::Palette;
use fracbit_model::RotationMode;
use fracbit_tests::{Source, demo_model, scheme, stories};

/// Ten plans that differ in family, rate, pins and exclusions; two take a search of trellis codes.
fn plans() -> Vec<(&'static str, PlanOptions)> {
    let uniform = |name| PlanOptions::new(Target::Uniform(scheme(name)));
    let mixed = |palette, bits| PlanOptions { palette, ..PlanOptions::new(Target::Bits(bits)) };
    let pinned =
        |options: PlanOptions, pin: &str| PlanOptions { pins: vec![pin.parse().expect("a pin")], ..options };
    let without = |options: PlanOptions, layers: &str| PlanOptions {
        excludes: vec![layers.parse().expect("an exclusion")],
        ..options
    };
    vec![
        ("vq-2.5 everywhere", uniform("vq-2.5")),
        ("nuq-3 everywhere", uniform("nuq-3")),
        ("tcq-2 everywhere", uniform("tcq-2")),
        ("vq at 2.35, first block nuq-6", pinned(mixed(Palette::Vq, 2.35), "layers.0.*=nuq-6")),
        ("nuq at 2.75, no nuq-2 in v", without(mixed(Palette::Nuq, 2.75), "*.v_proj=nuq-2")),
        ("vq at 3.4, a matrix at 16 bits", without(mixed(Palette::Vq, 3.4), "layers.5.mlp.down_proj")),
        ("vq at 2.4, embedding vq-4", pinned(mixed(Palette::Vq, 2.4), "embed_tokens=vq-4")),
        ("nuq at 3.8, o nuq-3", pinned(mixed(Palette::Nuq, 3.8), "*.o_proj=nuq-3")),
        ("tcq at 2.35, no halves", without(mixed(Palette::Tcq, 2.35), "*=half-*")),
        ("nuq at 3.1", mixed(Palette::Nuq, 3.1)),
    ]
}

#[test]
fn bars_hold_what_is_measured() {
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let hash = source.opened.checkpoint.content_hash();
    let measured =
        sensitivity::measure(&source.weights, &hash, Protocol::QUICK, None, &Quiet, &mut |_| Ok(()))
            .expect("a good model");
    assert!(measured.joint.len() >= 6, "{:?}", measured.joint);
    eprintln!("joint: {:?}", measured.joint);
    let (text, path) = stories();
    let original = Opened::new(&demo_model()).expect("the embedded model is good");
    let place = tempfile::tempdir().expect("a temporary directory");
    let mut inside = 0;
    for (i, (name, options)) in plans().into_iter().enumerate() {
        let made = plan(&source.inventory, &measured, &options).expect("within reach");
        let forecast = made.forecast.expect("measured on the whole model");
        let out = place.path().join(i.to_string());
        source.quantize(&made, &out, false).expect("a good plan");
        let model = Opened::new(&out).expect("a directory we wrote");
        let options = EvalOptions { ctx: Some(256), ..EvalOptions::default() };
        let found = evaluate(&model, Some(&original), &text, &path, &options, &Quiet).expect("a good text");
        let kl = found.kl.expect("beside the original");
        let hit = (forecast.low..=forecast.high).contains(&kl);
        inside += usize::from(hit);
        eprintln!(
            "| {name} | {:.3} | {:.4} | {:.4} ({:.4} to {:.4}) | {kl:.4} | {} |",
            made.bits_per_weight,
            made.predicted_loss,
            forecast.kl,
            forecast.low,
            forecast.high,
            if hit { "inside" } else { "OUTSIDE" }
        );
        assert!(forecast.high < 5.0 * forecast.low, "a bar that says something: {forecast:?}");
    }
    assert!(inside >= 9, "{inside} of 10 inside their bars");
}
