//! Loss terms measured in a quantized model: what they say, and that they continue.

use fracbit::{
    CalibrateOptions, Calibration, Error, EvalOptions, Objective, Quiet, Rounders, Sensitivities,
    bands::{self, band_name},
    calibrate,
    losses::{self, LossOptions},
    sensitivity::Text,
};
use fracbit_model::{LinearId, RotationMode};
use fracbit_tests::{Source, demo_model, reference, scheme, stories};
use std::sync::Arc;

type Measure<'a> = dyn Fn(
        Option<Sensitivities>,
        &mut dyn FnMut(&Sensitivities) -> Result<(), Error>,
    ) -> Result<Sensitivities, Error>
    + 'a;

/// Measures in one go and with a stop after five matrices; both should give the same document.
fn continued(measure: &Measure<'_>) -> Sensitivities {
    let whole = measure(None, &mut |_| Ok(())).expect("a good text");
    let mut kept = None;
    let stopped = measure(None, &mut |so_far| {
        if so_far.layers.len() < 5 {
            return Ok(());
        }
        kept = Some(so_far.clone());
        Err(Error::Option { option: "test", rule: "stops here".to_owned() })
    });
    assert!(stopped.is_err() && kept.as_ref().is_some_and(|k| k.layers.len() == 5));
    let mut seen = 0;
    let again = measure(kept, &mut |so_far| {
        seen += 1;
        assert!(so_far.layers.len() > 5, "nothing is measured twice");
        Ok(())
    });
    assert_eq!(again.expect("a good text"), whole);
    assert!(seen >= whole.layers.len() - 5, "the rest was measured");
    whole
}

#[test]
fn losses_are_those_of_the_replaced_matrix() {
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let hash = source.opened.checkpoint.content_hash();
    let (text, path) = stories();
    let text = Text::read(&source.opened, &text, &path, 128, &EvalOptions::default()).expect("a good text");
    let (coarse, fine) = (scheme("nuq-2"), scheme("nuq-6"));
    let options = LossOptions {
        default: coarse,
        schemes: vec![coarse, fine],
        calibration: None,
        rounders: Rounders::default(),
    };

    let actual =
        continued(&|done, keep| losses::measure(&source.weights, &hash, &options, &text, done, &Quiet, keep));
    assert_eq!(actual.objective(), Objective::Actual);
    assert_eq!(actual.actual.len(), source.inventory.matrices.len());
    let all = |name: &str| actual.actual.values().map(|of| of[name]).collect::<Vec<_>>();
    assert!(all("nuq-2").iter().all(|&l| l == 0.0), "the default in its own place changes nothing");
    let won: f64 = all("nuq-6").iter().sum();
    assert!(won < 0.0, "finer matrices help: {won}");
    let embedding = actual.actual["model.embed_tokens"]["nuq-6"];
    assert!(all("nuq-6").iter().all(|&l| l >= embedding), "the tied embedding matters most: {embedding}");

    let along = continued(&|done, keep| {
        losses::measure_along(&source.weights, &hash, &options, &text, done, &Quiet, keep)
    });
    assert_eq!(along.objective(), Objective::Linear);
    let most = along.layers.iter().max_by(|a, b| a.1.a.total_cmp(&b.1.a)).expect("matrices");
    assert_eq!(most.0, "model.embed_tokens");
    // Taking all of a matrix's error away wins about what the coefficient says of it.
    let error = fracbit_codebook::nmse(coarse).expect("a measured scheme");
    let said = most.1.a * error;
    assert!((0.5..2.0).contains(&(said / -embedding)), "{said} against {embedding}");
    // However small the errors are, how they meet each other does not hide what a matrix loses:
    // only where it is hardly to be seen does a floor stand in for it.
    let options = LossOptions { default: fine, ..options };
    let small = losses::measure_along(&source.weights, &hash, &options, &text, None, &Quiet, &mut |_| Ok(()));
    let (of, small) =
        (|i: usize| source.inventory.matrices[i].shape.len() as f64, small.expect("a good text"));
    let per_weight =
        source.inventory.matrices.iter().enumerate().map(|(i, m)| small.layers[&m.name].a / of(i));
    let per_weight: Vec<f64> = per_weight.collect();
    let floor = per_weight.iter().copied().fold(f64::INFINITY, f64::min);
    let floored = per_weight.iter().filter(|&&a| a < 1.001 * floor).count();
    // Eleven of 43 on a Zen 3, whatever the instruction set of the kernels, at most ten on the
    // machines before it: the last bits of dense products decide.
    assert!(floor > 0.0 && floored <= per_weight.len() / 3, "{floored} matrices at {floor}");
}

#[test]
fn embedding_and_head_are_measured_band_by_band_and_continue() {
    let reference = reference("llama3");
    let place = tempfile::tempdir().expect("a temporary directory");
    let source = Source::open(&reference.dir, RotationMode::Fold, 0).expect("a good checkpoint");
    let hash = source.opened.checkpoint.content_hash();
    let calibrated = |tokens: usize| {
        let dir = place.path().join(tokens.to_string());
        let options = CalibrateOptions { length: Some(128), ..CalibrateOptions::new(tokens) };
        calibrate(&source.opened, None, &dir, &options, &Quiet).expect("it writes its own text");
        Arc::new(Calibration::open(&dir).expect("it was just written"))
    };
    let measure = |calibration: &Arc<Calibration>, done, keep: &mut dyn FnMut(&Sensitivities) -> _| {
        let options = LossOptions {
            default: scheme("nuq-3"),
            schemes: vec![],
            calibration: Some(Arc::clone(calibration)),
            rounders: Rounders::default(),
        };
        let text = Text::of(calibration, 256, None).expect("it has a text");
        losses::measure_along(&source.weights, &hash, &options, &text, done, &Quiet, keep)
    };
    let enough = calibrated(256 + 3072);
    let mut documents = Vec::new();
    let whole = measure(&enough, None, &mut |so_far| {
        documents.push(so_far.clone());
        Ok(())
    });
    let whole = whole.expect("a good text");
    for id in [LinearId::Embed, LinearId::Head] {
        let of = |name: &str| whole.of(name).expect("it was measured");
        let parts: f64 = (0..bands::MOST).map(|band| of(&band_name(id, band))).sum();
        let all = of(&id.to_string());
        assert!((parts / all - 1.0).abs() < 1e-9, "{id}: {parts} in bands, {all}");
    }
    let counted = enough.bands(256, source.opened.config.vocab_size).expect("it has a text");
    assert!(
        counted.is_some() && whole.bands.get("model.embed_tokens") == counted.as_ref(),
        "the tokens behind the text"
    );
    for (at, document) in documents.iter().enumerate().step_by(5) {
        let again = measure(&enough, Some(document.clone()), &mut |_| Ok(())).expect("a good text");
        assert_eq!(again, whole, "continued behind {at}");
    }
    let few = measure(&calibrated(256 + 1024), None, &mut |_| Ok(())).expect("a good text");
    assert!(!few.bands.contains_key("model.embed_tokens"), "too few tokens to tell frequent from rare");
}
