//! What calibration promises on real models: output errors fall, divergence falls, and files of
//! others are refused.

#![expect(clippy::print_stderr, reason = "measured numbers beside their bounds")]

use fracbit::{
    CalibrateOptions, Calibration, Dealt, Error, EvalOptions, Evaluation, Job, Opened, PlanOptions,
    QuantizeOptions, Quiet, Target, Worker, calibrate, evaluate, quantize,
};
use fracbit_kernels::{Vectors, with_team};
use fracbit_model::{BlockInput, FloatId, LayerLinear, LinearId, Model, Place, RotationMode};
use fracbit_quant::{CrossMoments, Hessian, Moments, Quantized, Rounders, Rounding, quantize_with};
use fracbit_tests::{Parts, Source, Stored, backends, demo_model, files, relative, scheme, shared, stories};
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

fn calibrated(model: &Path, text: &str, options: &EvalOptions, tokens: usize, out: &Path) -> Calibration {
    let opened = Opened::new(model).expect("a model");
    let options =
        CalibrateOptions { length: Some(256), text: options.clone(), ..CalibrateOptions::new(tokens) };
    calibrate(&opened, Some((text, Path::new("text"))), out, &options, &Quiet).expect("a good text");
    Calibration::open(out).expect("it was just written")
}

/// `tr(E H E^T)` of matrices in 2-bit trellis codes with feedback over that without, their
/// geometric mean.
fn ratio(source: &Source, calibration: &Calibration, ids: &[LinearId]) -> f64 {
    ratio_of("tcq-2", source, calibration, ids)
}

/// The same of another scheme. One with scales of small groups is compared with what it makes of
/// the moments of each channel alone.
fn ratio_of(name: &str, source: &Source, calibration: &Calibration, ids: &[LinearId]) -> f64 {
    let (scheme, rounders) = (scheme(name), Rounders::default());
    let mut logs = 0.0;
    for &id in ids {
        let h = calibration.moments(&source.weights, id).expect("good moments").expect("it reads something");
        let w = source.weights.linear(id).expect("a good matrix");
        let loss = |q: &Quantized| {
            let error: Vec<f32> = w.data.iter().zip(q.view().dequantize()).map(|(w, q)| w - q).collect();
            h.loss(&error)
        };
        let grouping = fracbit::plan::grouping(source.rotation(), scheme);
        let round = |moments| {
            let rounding = Rounding { moments, ..Rounding::new(&rounders) };
            quantize_with(&w.data, w.shape, scheme, grouping, rounding, &|_| ())
        };
        let n = h.len();
        let alone = (0..n * n).map(|at| if at / n == at % n { h.entries()[at] } else { 0.0 }).collect();
        let alone = [Hessian::new(n, alone).expect("good moments")];
        let without = if scheme.group().is_some() { &alone[..] } else { &[] };
        let plain = loss(&round(without).expect("a good matrix"));
        let fed = loss(&round(std::slice::from_ref(&h)).expect("a good matrix"));
        assert!(fed < plain, "{id}: {fed} after {plain}");
        logs += (fed / plain).ln();
    }
    (logs / ids.len() as f64).exp()
}

/// All matrices of two blocks.
fn two_blocks(last: usize) -> Vec<LinearId> {
    let of = |block| fracbit_model::LayerLinear::ALL.map(|linear| LinearId::Layer(block, linear));
    [of(0), of(last)].concat()
}

/// Of the first block by definition: its input is the norm of the embedding.
#[test]
fn means_are_those_of_the_input_that_keys_are_made_of() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (text, _) = stories();
    let demo = calibrated(&demo_model(), &text, &EvalOptions::default(), 600, &place.path().join("demo"));
    let opened = Opened::new(&demo_model()).expect("the embedded model");
    let source = opened.source(RotationMode::None, 0).expect("the embedded model is good");
    let config = source.config();
    let gain =
        source.unfolded_norm(FloatId::before(config, 0, LayerLinear::K).expect("a norm")).expect("a norm");
    let mut want = vec![0.0f64; config.hidden_size];
    let sequences = demo.sequences().expect("good sequences");
    for tokens in sequences.iter() {
        for row in source.embedding(tokens).expect("tokens").chunks_exact(config.hidden_size) {
            let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (square + config.rms_norm_eps).sqrt() / demo.info.tokens as f64;
            let normed = row.iter().zip(&gain).map(|(x, g)| f64::from(*x) * scale * f64::from(*g));
            want.iter_mut().zip(normed).for_each(|(sum, x)| *sum += x);
        }
    }
    let got = demo.means(config, 0).expect("good means").expect("they are there");
    for (c, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((f64::from(*got) - want).abs() < 1e-4, "channel {c}: {got} {want}");
    }
    // No mean square is below the square of a mean.
    for block in 0..config.num_hidden_layers() {
        let place = Place::Block(block, BlockInput::Attention);
        let squares = demo.mean_squares(config, place).expect("good moments");
        let means = demo.means(config, block).expect("good means").expect("they are there");
        let all = squares.iter().zip(&means);
        assert!(all.clone().all(|(s, m)| f64::from(*m).powi(2) <= s * 1.0001 + 1e-9), "block {block}");
        assert!(all.clone().any(|(s, m)| f64::from(*m).powi(2) > 0.01 * s), "block {block}: no mean at all");
    }
}

#[test]
fn output_errors_fall_by_a_quarter_at_two_bits() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (text, _) = stories();
    let demo = calibrated(&demo_model(), &text, &EvalOptions::default(), 4096, &place.path().join("demo"));
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let found = ratio(&source, &demo, &two_blocks(5));
    assert!(found < 0.75, "demo: {found}");
    for name in ["int-4", "gnuq-2", "gnuq-3", "gnuq-4"] {
        let found = ratio_of(name, &source, &demo, &two_blocks(5));
        assert!(found < 0.8, "demo, {name}: {found}");
    }
    // Other rotations: some matrices are enough.
    for rotation in [RotationMode::Online, RotationMode::None] {
        let source = Source::open(&demo_model(), rotation, 3).expect("the embedded model is good");
        let found = ratio(&source, &demo, &two_blocks(5)[3..5]);
        assert!(found < 0.85, "demo, {rotation}: {found}");
    }
    let (Some(model), Some(text)) = (shared("models/TinyStories-656K"), shared("text/tinystories-train.txt"))
    else {
        return;
    };
    let options = EvalOptions {
        bos: Some(true),
        drop_prefix_space: true,
        separator: Some("<|endoftext|>".to_owned()),
        ..EvalOptions::default()
    };
    let text = fs::read_to_string(text).expect("a readable text");
    let published = calibrated(&model, &text, &options, 8192, &place.path().join("published"));
    let source = Source::open(&model, RotationMode::Fold, 0).expect("a good model");
    let found = ratio(&source, &published, &two_blocks(1));
    assert!(found < 0.75, "TinyStories-656K: {found}");
}

#[test]
fn calibrated_models_diverge_less_and_strangers_are_refused() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let opened = Opened::new(&demo_model()).expect("the embedded model is good");
    // Written by the model itself: the stories are for evaluation.
    let options = CalibrateOptions { length: Some(128), ..CalibrateOptions::new(2048) };
    let stats = place.path().join("stats");
    let info = calibrate(&opened, None, &stats, &options, &Quiet).expect("it can write");
    assert!(info.tokens == 2048 && info.inputs.len() == 4 * 6 + 1, "{info:?}");
    assert!(info.inputs.values().all(|i| i.dead == 0 && i.rank == i.channels), "{info:?}");
    let again = place.path().join("again");
    calibrate(&opened, None, &again, &options, &Quiet).expect("it can write");
    assert!(files(&stats) == files(&again), "the same command, the same bytes");

    let calibration = Arc::new(Calibration::open(&stats).expect("it was just written"));
    let source = Source::open(&demo_model(), RotationMode::Fold, 0).expect("the embedded model is good");
    let hash = source.opened.checkpoint.content_hash();
    let plan =
        source.plan(&PlanOptions { ..source.options(Target::Uniform(scheme("nuq-3"))) }).expect("a plan");
    let (text, path) = stories();
    let made = |calibration: Option<&Arc<Calibration>>, sequential| -> Evaluation {
        let out = place.path().join("out");
        let options = QuantizeOptions {
            force: true,
            source_hash: hash.clone(),
            calibration: calibration.cloned(),
            sequential,
            ..QuantizeOptions::default()
        };
        quantize(&source.weights, &source.inventory, &plan, &out, &options, &Quiet).expect("a good plan");
        let eval = EvalOptions { ctx: Some(256), ..EvalOptions::default() };
        let model = Opened::new(&out).expect("a directory we wrote");
        evaluate(&model, Some(&opened), &text, &path, &eval, &Quiet).expect("a good text")
    };
    let kl = |e: Evaluation| e.kl.expect("there is a baseline");
    let (plain, fed) = (kl(made(None, false)), kl(made(Some(&calibration), false)));
    let sequential = kl(made(Some(&calibration), true));
    assert!(fed < 0.8 * plain && sequential < 0.8 * plain, "{plain} {fed} {sequential}");

    let error = calibration.require_source("another").expect_err("another model").to_string();
    assert!(error.contains("another") && error.contains(&hash), "{error}");
    let shard = stats.join("model.safetensors");
    let mut bytes = fs::read(&shard).expect("it was just written");
    *bytes.last_mut().expect("not empty") ^= 1;
    fs::write(&shard, bytes).expect("writable");
    let damaged = Calibration::open(&stats).expect("headers are whole");
    assert!(damaged.moments(&source.weights, LinearId::Embed).is_err(), "the last tensor is the head's");
    assert!(Calibration::open(&demo_model()).is_err(), "a model is no calibration");
}

#[test]
fn moments_of_numbers_rounded_to_bf16_are_near() {
    let (rows, m, n) = (300, 130, 201);
    let value = |i: usize| ((i * 7919 + 13) % 4001) as f32 / 1000.0 - 2.0;
    let x: Vec<f32> = (0..rows * n).map(value).collect();
    let e: Vec<f32> = (0..rows * m).map(|i| value(i + 5)).collect();
    let of = |vectors: &Vectors| {
        let (mut moments, mut cross) = (Moments::new(n), CrossMoments::new(m, n));
        with_team(|team| {
            for (e, x) in e.chunks(m * 100).zip(x.chunks(n * 100)) {
                moments.add_on(team, vectors, x).expect("whole rows");
                cross.add_on(team, vectors, e, x).expect("whole rows");
            }
        });
        (moments.triangle(), cross.means())
    };
    let want = of(&Vectors::scalar());
    for (isa, kernels) in backends() {
        let Some(kernels) = kernels.filter(|k| k.vectors().has_bf16()) else { continue };
        let got = of(&kernels.vectors());
        let off = [relative(&got.0, &want.0), relative(&got.1, &want.1)];
        assert!(off.iter().all(|off| (1e-6..5e-3).contains(off)), "{isa}: {off:?}");
    }
}

/// What is rounded makes up for what came before, whatever stands between a layer and the residual
/// stream: norms with large gains, as Gemma has, would make noise of a correction that is meant for
/// the stream.
#[test]
fn in_sequence_no_architecture_loses_more_than_at_once() {
    const GAIN: f32 = 30.0;
    for (name, stored_less_one, norms) in [
        ("gemma3", true, ["post_attention_layernorm", "post_feedforward_layernorm"]),
        ("olmo2", false, ["post_attention_layernorm", "post_feedforward_layernorm"]),
        ("exaone4", false, ["post_attention_layernorm", "post_feedforward_layernorm"]),
        ("glm4", false, ["post_self_attn_layernorm", "post_mlp_layernorm"]),
        ("llama3", false, ["none"; 2]),
    ] {
        let place = tempfile::tempdir().expect("a temporary directory");
        let (dir, tokens) = (place.path().join("model"), fracbit_tests::reference(name).tokens);
        let mut parts = Parts::read(&fracbit_tests::reference(name).dir);
        let behind = |tensor: &&mut Stored| norms.iter().any(|norm| tensor.name.contains(norm));
        let offset = if stored_less_one { 1.0 } else { 0.0 };
        let changed = parts.tensors.iter_mut().filter(behind);
        let changed = changed.map(|tensor| tensor.change_bf16(|_, g| GAIN * (g + offset) - offset));
        assert_eq!(changed.count() > 0, name != "llama3", "{name}");
        parts.write(&dir);
        let source = Source::open(&dir, RotationMode::Online, 0).expect("a good checkpoint");
        let opened = Opened::new(&dir).expect("a good checkpoint");
        let moments = place.path().join("moments");
        let options = CalibrateOptions { length: Some(32), ..CalibrateOptions::new(1024) };
        calibrate(&opened, None, &moments, &options, &Quiet).expect("a text of its own");
        let calibration = Arc::new(Calibration::open(&moments).expect("it was just written"));
        let plan = source.uniform("nuq-8").expect("a scheme of every width");
        let original = Model::from_source(&source.weights).expect("a good checkpoint");
        let original = fracbit_tests::logits(&original, &tokens);
        let error = |sequential: bool| {
            let out = place.path().join(format!("{sequential}"));
            let options = QuantizeOptions {
                calibration: Some(Arc::clone(&calibration)),
                sequential,
                source_hash: opened.checkpoint.content_hash(),
                ..QuantizeOptions::default()
            };
            quantize(&source.weights, &source.inventory, &plan, &out, &options, &Quiet).expect("a good plan");
            let model = fracbit_tests::load(&out).expect("it was just written");
            relative(&fracbit_tests::logits(&model, &tokens), &original)
        };
        let (at_once, in_sequence) = (error(false), error(true));
        eprintln!("{name}: logits off by {at_once:.4} at once, {in_sequence:.4} in sequence");
        assert!(in_sequence < 1.2 * at_once, "{name}: {in_sequence} in sequence, {at_once} at once");
    }
}

/// A cluster of one worker in this process, which may fail at a part.
#[derive(Debug, Default)]
struct OneWorker {
    begun: Mutex<Option<(Worker, usize)>>,
    behind: Mutex<BTreeMap<usize, Vec<u8>>>,
    fails_at: Option<usize>,
    damages: bool,
}

impl Dealt for OneWorker {
    fn begin(&self, job: &Job, _: usize, _: usize) -> Result<(), Error> {
        let job = Job::from_json(&job.to_json()).expect("what was written");
        let stride = job.stride().expect("blocks follow one another");
        *self.begun.lock().expect("no panic before") = Some((Worker::new(&job)?, stride));
        Ok(())
    }

    fn take(&self, index: usize) -> Result<Vec<u8>, Error> {
        if self.fails_at == Some(index) {
            return Err(Error::Dealt { rule: "the worker is gone".to_owned() });
        }
        let begun = self.begun.lock().expect("no panic before");
        let (worker, stride) = begun.as_ref().expect("begun");
        let mut kept = self.behind.lock().expect("no panic before");
        let before = index.checked_sub(*stride).and_then(|before| kept.remove(&before));
        // None where another worker had begun: then all blocks before are run again.
        let before = before.unwrap_or_default();
        let (mut part, behind) = worker.make(index, &before)?;
        kept.insert(index, behind);
        if self.damages {
            part[100] ^= 1;
        }
        Ok(part)
    }
}

#[test]
fn a_calibration_has_the_same_bytes_whoever_collects_its_shards() {
    let temp = tempfile::tempdir().expect("a directory");
    let opened = Opened::new(&demo_model()).expect("a model");
    // Two shards.
    let (stories, _) = stories();
    let text = stories.repeat(1 + 120_000 / stories.len());
    let calibrate = |name: &str, dealt: Option<OneWorker>, resume| {
        let options = CalibrateOptions {
            length: Some(128),
            resume,
            dealt: dealt.map(|dealt| Arc::new(dealt) as Arc<dyn Dealt>),
            ..CalibrateOptions::new(17_000)
        };
        let out = temp.path().join(name);
        calibrate(&opened, Some((&text, Path::new("text"))), &out, &options, &Quiet).map(|info| {
            assert!(info.tokens > 16_384, "{} tokens", info.tokens);
            files(&out)
        })
    };
    let alone = calibrate("alone", None, false).expect("a good text");
    let dealt = |worker| calibrate("dealt", Some(worker), false);
    assert_eq!(dealt(OneWorker::default()).expect("a good worker"), alone);
    fs::remove_dir_all(temp.path().join("dealt")).expect("it is there");

    // Begun with a cluster that is lost in block 1, continued without; and the other way round.
    let lost = |worker| calibrate("lost", Some(worker), false).expect_err("the worker is gone");
    assert!(lost(OneWorker { fails_at: Some(3), ..OneWorker::default() }).to_string().contains("gone"));
    assert!(!temp.path().join("lost").exists(), "nothing under the final name");
    assert_eq!(calibrate("lost", None, true).expect("it goes on"), alone);
    fs::remove_dir_all(temp.path().join("lost")).expect("it is there");
    lost(OneWorker { fails_at: Some(3), ..OneWorker::default() });
    assert_eq!(calibrate("lost", Some(OneWorker::default()), true).expect("it goes on"), alone);

    let damaged = dealt(OneWorker { damages: true, ..OneWorker::default() }).expect_err("a bit is another");
    assert!(damaged.to_string().contains("part 0 came back damaged"), "{damaged}");
}
