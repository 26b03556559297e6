//! Matrices in bands of rows: planned, written, read, run, tuned and refused like whole matrices.

use fracbit::{
    CalibrateOptions, Calibration, EvalOptions, Opened, Plan, PlanOptions, QuantizeOptions, Quiet, Target,
    TuneOptions,
    bands::{Bands, band_name},
    calibrate,
    directory::{BANDS, bands_name},
    inspect, plan, quantize,
    sensitivity::Text,
    tune::tune_in,
};
use fracbit_base::{Bytes, Palette};
use fracbit_io::{OutputDir, Overwrite, verify};
use fracbit_model::{LayerLinear, LinearId, Model, RotationMode};
use fracbit_tests::{Parts, Source, Stored, demo_model, load, logits, references, relative, stories};
use std::{path::Path, sync::Arc};

fn options(source: &Source, bits: f64) -> PlanOptions {
    PlanOptions { palette: Palette::Nuq, ..source.options(Target::Bits(bits)) }
}

/// How many more matrices a plan has by its bands.
fn more(plan: &Plan) -> usize {
    plan.bands.values().map(|bands| bands.count() - 1).sum()
}

#[test]
fn banded_models_run_as_their_weights_say() {
    for (i, r) in references().iter().enumerate() {
        let rotation = [RotationMode::Fold, RotationMode::None, RotationMode::Online][i % 3];
        let source = Source::open(&r.dir, rotation, 5).expect("a good checkpoint");
        let plan =
            plan(&source.inventory, &source.banded(), &options(&source, 7.0)).expect("a budget in reach");
        let cut = source.cut();
        assert_eq!(plan.layers.len(), source.inventory.matrices.len() + more(&plan), "{}", r.name);
        let text = serde_json::to_string(&plan).expect("a document");
        assert_eq!(Plan::parse(&text, "plan").expect("a good plan"), plan);

        let place = tempfile::tempdir().expect("a temporary directory");
        let out = place.path().join("out");
        let report = source.quantize(&plan, &out, false).expect("a good plan");
        let opened = Opened::new(&out).expect("it was just written");
        assert_eq!((opened.bytes().0, report.bytes), (plan.bytes, plan.bytes), "every byte is counted");
        assert!(verify(&out).expect("readable").is_ok());
        let inside = inspect(&out).expect("a model");
        assert_eq!(inside.matrices.len(), plan.layers.len());
        let weights: u64 = inside.storage.values().map(|s| s.weights).sum();
        let all: usize = source.inventory.matrices.iter().map(|m| m.shape.len()).sum();
        assert_eq!(weights, all as u64);

        // Each band's rows have the error that was reported for it.
        let model = load(&out).expect("it runs");
        for &id in &cut {
            let bands = &plan.bands[&id.to_string()];
            let exact = source.weights.linear(id).expect("a good matrix");
            let stored = model.linear(id).expect("there is one").to_dense().expect("a whole layer");
            for band in 0..bands.count() {
                let take = |weights: &[f32]| bands.take(band, weights, exact.shape.cols);
                let found = relative(&take(&stored), &take(&exact.data)).powi(2);
                let told =
                    report.layers.iter().find(|l| l.name == band_name(id, band)).expect("it was written");
                let close = (found - told.relative_error).abs() < 1e-3 * told.relative_error + 1e-9;
                assert!(close, "{} {}: {found}, told {}", r.name, told.name, told.relative_error);
            }
        }
        // And the model is that of these weights, whatever embedding and head are held in.
        let mut dense: Model = load(&out).expect("it runs");
        for &id in cut.iter().filter(|id| !id.is_layer()) {
            let layer = dense.linear(id).expect("there is one");
            let weights = layer.to_dense().expect("a whole layer");
            let twin =
                fracbit_model::Linear::dense(layer.shape(), weights, layer.bias().map(<[f32]>::to_vec));
            dense.replace(id, twin.expect("the same shape")).expect("the same shape");
        }
        let off = relative(&logits(&model, &r.tokens), &logits(&dense, &r.tokens));
        assert!(off < 0.01, "{}: {off}", r.name);
    }
}

#[test]
fn bands_are_for_plans_that_may_choose() {
    let reference = &references()[0];
    let source = Source::open(&reference.dir, RotationMode::Fold, 5).expect("a good checkpoint");
    let guess = source.banded();
    let base = options(&source, 7.0);
    let pinned = PlanOptions { pins: vec!["*.embed_tokens=nuq-8".parse().expect("a pin")], ..base.clone() };
    let kept = PlanOptions { keep_head: true, target: Target::Bits(9.0), ..base.clone() };
    let uniform = PlanOptions { target: Target::Uniform("nuq-4".parse().expect("a scheme")), ..base.clone() };
    let none = PlanOptions { bands: false, ..base.clone() };
    for options in [pinned, kept, uniform, none] {
        let plan = plan(&source.inventory, &guess, &options).expect("a budget in reach");
        let ends = plan.bands.keys().filter(|name| !name.contains("layers")).count();
        assert_eq!(ends, 0, "{options:?}");
        let uniform = matches!(options.target, Target::Uniform(_)) || !options.bands;
        assert_eq!(plan.bands.is_empty(), uniform, "{options:?}");
        assert_eq!(plan.layers.len(), source.inventory.matrices.len() + more(&plan));
    }
    let other = PlanOptions { pins: vec!["layers.0.*=nuq-8".parse().expect("a pin")], ..base.clone() };
    let made = plan(&source.inventory, &guess, &other).expect("a budget in reach");
    let names: Vec<&String> = made.bands.keys().collect();
    assert!(names.iter().all(|name| !name.contains("layers")), "these have a pin: {names:?}");
    assert!(!names.is_empty(), "a pin of other matrices does not matter");

    // Edited by hand.
    let refused = |edit: &dyn Fn(&mut Plan), words: &[&str]| {
        let mut edited = made.clone();
        edit(&mut edited);
        let text = edited.fit_to(&source.inventory).expect_err("a bad plan").to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "`{word}` should be in: {text}"));
    };
    let name = band_name(LinearId::Embed, 2);
    refused(&|plan| plan.layers.retain(|l| l.name != name), &[&name, "appears 0 times"]);
    let f16 = "f16".parse().expect("a storage");
    refused(&|plan| plan.layers.iter_mut().for_each(|l| l.scheme = f16), &["should be quantized", "band0"]);
    let short = Bands::of(&(0..80u32).map(|i| i * i).collect::<Vec<_>>()).expect("uneven enough");
    let name = LinearId::Embed.to_string();
    refused(&|plan| drop(plan.bands.insert(name.clone(), short.clone())), &["bands", &name, "80"]);
    refused(
        &|plan| drop(plan.bands.insert("layer".to_owned(), short.clone())),
        &["bands", "not in the model"],
    );
    refused(&|plan| plan.bands.clear(), &["band0", "not in the model"]);

    // One string was for embedding and head in earlier versions.
    let mut old = serde_json::to_value(&made).expect("a document");
    old["plan_version"] = 2.into();
    old["bands"] = old["bands"][&name].clone();
    assert_eq!(Plan::parse(&old.to_string(), "plan").expect("a good plan"), made);
}

#[test]
fn damaged_bands_are_refused_by_name() {
    let reference = &references()[0];
    let source = Source::open(&reference.dir, RotationMode::Fold, 5).expect("a good checkpoint");
    let made = plan(&source.inventory, &source.banded(), &options(&source, 7.0)).expect("a budget in reach");
    let place = tempfile::tempdir().expect("a temporary directory");
    let good = place.path().join("good");
    source.quantize(&made, &good, false).expect("a good plan");
    let refused = |what: &str, damage: &dyn Fn(&mut Parts), words: &[&str]| {
        let mut parts = Parts::read(&good);
        damage(&mut parts);
        let dir = tempfile::tempdir().expect("a temporary directory");
        parts.write(dir.path());
        let text = load(dir.path()).map(|_| ()).expect_err(what).to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{what}: `{word}` should be in: {text}"));
    };
    fn bands(parts: &mut Parts) -> &mut Stored {
        parts.tensors.iter_mut().find(|t| t.name == name()).expect("it is there")
    }
    fn name() -> String {
        bands_name(LinearId::Layer(0, LayerLinear::Q))
    }
    refused("no bands", &|parts| parts.tensors.retain(|t| t.name != name()), &[&name()]);
    let cut = |parts: &mut Parts| {
        let stored = bands(parts);
        stored.bytes.pop();
        stored.shape[0] -= 1;
    };
    refused("short bands", &cut, &[&name(), "bytes"]);
    refused("all in band 0", &|parts| bands(parts).bytes.fill(0), &[&name(), "4 bands, got 1"]);
    refused("an empty band", &|parts| bands(parts).bytes.fill(0b10_00), &[&name(), "band 1 has no rows"]);
    let forget = |band| {
        move |parts: &mut Parts| {
            let name = band_name(LinearId::Layer(0, LayerLinear::Q), band);
            let modules = &mut parts.config["quantization_config"]["modules"];
            modules.as_object_mut().expect("an object").remove(&name);
        }
    };
    refused("a band without a scheme", &forget(1), &["modules should name", "band1"]);
    refused("a last band without a scheme", &forget(3), &[&name(), "3 bands, got 4"]);

    // Up to version 3 embedding and head were in the same bands, which stood once.
    let mut parts = Parts::read(&good);
    let ends: Vec<String> =
        source.cut().iter().filter(|id| !id.is_layer()).map(|&id| bands_name(id)).collect();
    parts.tensors.retain(|t| !ends[1..].contains(&t.name));
    parts.tensors.iter_mut().find(|t| t.name == ends[0]).expect("it is there").name = BANDS.to_owned();
    let dir = tempfile::tempdir().expect("a temporary directory");
    parts.write(dir.path());
    let [old, new] = [dir.path(), &good].map(|dir| load(dir).expect("it runs"));
    assert_eq!(logits(&old, &reference.tokens), logits(&new, &reference.tokens));
}

#[test]
fn banded_models_are_rounded_in_sequence_and_tuned() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| place.path().join(name);
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let (text, path) = stories();
    let calibrating = CalibrateOptions { length: Some(256), ..CalibrateOptions::new(1024) };
    calibrate(&source.opened, Some((&text, Path::new("text"))), &at("moments"), &calibrating, &Quiet)
        .expect("a good text");
    let calibration = Arc::new(Calibration::open(&at("moments")).expect("it was just written"));
    let made = plan(&source.inventory, &source.banded(), &options(&source, 3.0)).expect("a budget in reach");
    let options = QuantizeOptions {
        source_hash: source.opened.checkpoint.content_hash(),
        calibration: Some(calibration),
        sequential: true,
        max_memory: Some(Bytes(1 << 30)),
        ..QuantizeOptions::default()
    };
    quantize(&source.weights, &source.inventory, &made, &at("rounded"), &options, &Quiet)
        .expect("a good plan");
    let model = Opened::new(&at("rounded")).expect("it was just written");
    let tuning =
        Text::read(&source.opened, &text, &path, 1024, &EvalOptions::default()).expect("a good text");
    let dir = OutputDir::create(at("tuned"), Overwrite::No).expect("a new name");
    let report =
        tune_in(dir, &model, &source.opened, &tuning, &TuneOptions::default(), &Quiet).expect("a good model");
    assert!(report.after < report.before, "{report:?}");
    assert!(verify(at("tuned")).expect("readable").is_ok());

    // Scales of all bands moved, and rows with them by the same factors.
    let tuned = Opened::new(&at("tuned")).expect("it was just written");
    let kernels = fracbit::kernels().expect("this machine");
    let [before, after] = [&model, &tuned].map(|opened| {
        let model = opened.model(&kernels, true).expect("it runs");
        model.linear(LinearId::Embed).expect("there is one").to_dense().expect("a whole layer")
    });
    let cols = source.opened.config.hidden_size;
    let mut moved = 0;
    for (old, new) in before.chunks(cols).zip(after.chunks(cols)) {
        let at = (0..cols).max_by(|&a, &b| old[a].abs().total_cmp(&old[b].abs())).expect("a row");
        let factor = new[at] / old[at];
        moved += usize::from(factor != 1.0);
        assert!(
            old.iter().zip(new).all(|(o, n)| (o * factor - n).abs() <= 1e-3 * old[at].abs()),
            "one factor a row"
        );
    }
    assert!(moved > before.len() / cols / 2, "{moved} rows moved");
}
