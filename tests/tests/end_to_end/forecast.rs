//! Forecasts: what plans of the demo model are said to lose, and what they lose.

use fracbit::{EvalOptions, Opened, PlanOptions, Protocol, Quiet, Target, evaluate, plan, sensitivity};
use fracbit_base::Palette;
use fracbit_model::RotationMode;
use fracbit_tests::{Source, demo_model, stories};

/// Plans on a text that neither the fit nor the model's training saw: the bar holds the measurement in nine of ten.
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
    // Scalar and vector palettes: their encoders take a second.
    let plans = [2.2, 2.5, 3.0, 3.5, 4.5].map(|b| (Palette::Nuq, b)).into_iter();
    let plans = plans.chain([1.8, 2.2, 2.7, 3.2, 4.0].map(|b| (Palette::Vq, b)));
    for (i, (palette, bits)) in plans.enumerate() {
        let options = PlanOptions { palette, ..PlanOptions::new(Target::Bits(bits)) };
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
            "{palette:?} {bits}: sum {:.4}, forecast {:.4} ({:.4} to {:.4}), measured {kl:.4}{}",
            made.predicted_loss,
            forecast.kl,
            forecast.low,
            forecast.high,
            if hit { "" } else { "  OUTSIDE" }
        );
        assert!(forecast.high < 3.0 * forecast.low, "a bar that says something: {forecast:?}");
    }
    assert!(inside >= 9, "{inside} of 10 inside their bars");
}
