//! Tuned scales: nothing but scales changes, the divergence falls, and what cannot be tuned is
//! refused.

use fracbit::{
    CalibrateOptions, Calibration, EvalOptions, Opened, QuantizeOptions, Quiet, TuneOptions, calibrate,
    sensitivity::Text,
    tune::{self, quantize_and_tune, tune_in},
};
use fracbit_base::Bytes;
use fracbit_io::{OutputDir, Overwrite};
use fracbit_kernels::Kernels;
use fracbit_model::{
    LinearId, RotationMode, StateOptions,
    gradient::{RowLogs, divergence},
};
use fracbit_tests::{Source, backends, demo_model, files, relative, stories};
use std::{fs, ops::Range, path::Path, sync::Arc};

/// The demo model with one scheme everywhere.
fn small(source: &Source, name: &str, out: &Path) {
    let plan = source.uniform(name).expect("a scheme for every matrix");
    source.quantize(&plan, out, false).expect("a good model");
}

fn text(source: &Source, tokens: usize) -> Text {
    let (text, path) = stories();
    Text::read(&source.opened, &text, &path, tokens, &EvalOptions::default()).expect("a good text")
}

#[test]
fn scales_change_nothing_else_does_and_the_divergence_falls() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| place.path().join(name);
    // Group-wise scales, and codes of two halves; rotations between everything, and only in
    // weights.
    for (name, rotation) in [("gnuq-3", RotationMode::Online), ("vq-2", RotationMode::Fold)] {
        let source = Source::open(&demo_model(), rotation, 1).expect("the embedded model is good");
        let before = at(&format!("{name} before"));
        small(&source, name, &before);
        let model = Opened::new(&before).expect("it was just written");
        let text = text(&source, 1024);
        let tune = |out: &Path, threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let dir = OutputDir::create(out, Overwrite::No).expect("a new name");
            let options = TuneOptions { passes: 3, ..TuneOptions::default() };
            pool.install(|| tune_in(dir, &model, &source.opened, &text, &options, &Quiet))
                .expect("a good model")
        };
        let out = at(&format!("{name} after"));
        let report = tune(&out, 2);
        assert!(report.after < report.before, "{name}: {report:?}");
        assert_eq!(report.tokens + report.held_tokens, text.sequences.tokens());
        assert!(fracbit_io::verify(&out).expect("a readable directory").problems.is_empty());

        let after = Opened::new(&out).expect("it was just written");
        assert_eq!(after.config, model.config);
        let mut changed = 0;
        for (tensor, info) in model.checkpoint.iter() {
            let [old, new] =
                [&model, &after].map(|o| o.checkpoint.tensor(tensor).expect("it is there").bytes);
            let now = after.checkpoint.info(tensor).expect("it is there");
            assert_eq!((info.dtype, &info.shape), (now.dtype, &now.shape), "{tensor}");
            assert!(old == new || tensor.ends_with(".scales"), "{name}: {tensor} changed");
            changed += usize::from(old != new);
        }
        assert_eq!(changed, source.inventory.matrices.len(), "{name}");
        let card = fs::read_to_string(out.join("README.md")).expect("a model card");
        assert!(card.contains("scales of rows were tuned on"), "{card}");

        let again = at(&format!("{name} again"));
        tune(&again, 1);
        assert!(files(&again) == files(&out), "{name}: the same bytes on one thread");
    }
}

#[test]
fn what_cannot_be_tuned_is_refused() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let rounded = place.path().join("rounded");
    small(&source, "vq-2", &rounded);
    let model = Opened::new(&rounded).expect("it was just written");
    let some = text(&source, 600);
    let out = place.path().join("out");
    let tune = |model: &Opened, original: &Opened, text: &Text, options: TuneOptions| {
        let dir = OutputDir::create(&out, Overwrite::No).expect("a new name");
        let error = tune_in(dir, model, original, text, &options, &Quiet).expect_err("it should be refused");
        assert!(!out.exists());
        error.to_string()
    };
    let plain = TuneOptions::default;
    for (error, word) in [
        (tune(&source.opened, &source.opened, &some, plain()), "not quantized"),
        (tune(&model, &model, &some, plain()), "was made from a checkpoint with hash"),
        (tune(&model, &source.opened, &text(&source, 100), plain()), "at least two sequences"),
        (
            tune(&model, &source.opened, &some, TuneOptions { max_memory: Some(Bytes(1000)), ..plain() }),
            "allowed are 1.0 kB",
        ),
    ] {
        assert!(error.contains(word), "{error}");
    }
    let memory = |tokens| tune::memory(&model.config, model.bytes(), tokens);
    assert!(memory(2000).0 > memory(1000).0);
}

#[test]
fn learning_tunes_where_there_is_text_enough() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let (story, path) = stories();
    for (tokens, tunes) in [(200, false), (600, true)] {
        let stats = place.path().join(format!("stats {tokens}"));
        let options = CalibrateOptions { length: Some(256), ..CalibrateOptions::new(tokens) };
        calibrate(&source.opened, Some((&story, &path)), &stats, &options, &Quiet).expect("a good text");
        let calibration = Arc::new(Calibration::open(&stats).expect("it was just written"));
        let plan = source.uniform("vq-2").expect("a scheme for every matrix");
        let record = QuantizeOptions {
            source_hash: source.opened.checkpoint.content_hash(),
            calibration: Some(calibration),
            ..QuantizeOptions::default()
        };
        let out = place.path().join(format!("out {tokens}"));
        let dir = OutputDir::create(&out, Overwrite::No).expect("a new name");
        let (report, tuned) =
            quantize_and_tune(dir, &source.opened, &source.inventory, &plan, &record, &Quiet)
                .expect("a good plan");
        assert_eq!(report.path, out);
        assert_eq!(tuned.is_some(), tunes);
        assert_eq!(report.bytes, Opened::new(&out).expect("it was just written").bytes().0);
        assert!(fracbit_io::verify(&out).expect("a readable directory").problems.is_empty());
        let names: Vec<String> = files(&out).into_iter().map(|(name, _)| name).collect();
        assert!(!names.iter().any(|n| n.contains("rounded") || n.contains("tuning")), "{names:?}");
    }
    let left: Vec<_> = fs::read_dir(place.path()).expect("it is there").flatten().collect();
    assert_eq!(left.len(), 4, "nothing is left beside them: {left:?}");
}

#[test]
fn factors_rounded_to_bf16_give_nearly_the_same() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let source = Source::open(&demo_model(), RotationMode::Fold, 1).expect("the embedded model is good");
    let rounded = place.path().join("rounded");
    small(&source, "vq-2", &rounded);
    let rounded = Opened::new(&rounded).expect("it was just written");
    let text = text(&source, 300);
    let tokens: Vec<u32> = text.sequences.iter().flatten().copied().collect();
    // The original's logits, and the gradient for the scales of the rounded model.
    let run = |kernels: &Kernels, bf16: bool| -> (Vec<f32>, Vec<f32>) {
        let model = source.opened.model(kernels, false).expect("a good model");
        let vocab = model.config().vocab_size;
        let options = StateOptions { context: Some(tokens.len()), bf16, ..StateOptions::default() };
        let (mut hidden, mut logits) = (Vec::new(), Vec::new());
        let mut state = model.state(&options);
        model.forward(&mut state, &tokens, &mut hidden).expect("tokens of the model");
        model.logits(&mut state, &hidden, &mut logits).expect("rows of hidden states");
        let rounded = rounded.model(kernels, false).expect("a good model");
        let mut gradient: RowLogs = LinearId::all(rounded.config())
            .map(|id| (id, vec![0.0; id.shape(rounded.config()).rows]))
            .collect();
        let logs = gradient.clone();
        let mut give = |rows: Range<usize>, out: &mut Vec<f32>| {
            out.clear();
            out.extend_from_slice(&logits[rows.start * vocab..rows.end * vocab]);
            Ok(())
        };
        divergence(&rounded, &logs, &[&tokens], &mut give, Some(&mut gradient)).expect("a gradient");
        (logits, gradient.into_values().flatten().collect())
    };
    let (logits, gradient) = run(&Kernels::scalar(), true);
    assert_eq!(logits, run(&Kernels::scalar(), false).0, "only where a processor has them");
    for (isa, kernels) in backends() {
        let Some(kernels) = kernels.filter(|k| k.vectors().has_bf16()) else { continue };
        let (bf16, other) = run(&kernels, true);
        let (exact, _) = run(&kernels, false);
        let off = [relative(&exact, &logits), relative(&bf16, &logits), relative(&other, &gradient)];
        assert!(off[0] < 1e-5 && (1e-4..0.01).contains(&off[1]) && off[2] < 0.02, "{isa}: {off:?}");
    }
}
