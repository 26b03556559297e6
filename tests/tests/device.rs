//! What runs on a GPU, on the host shim: benches, prompts, evaluation.

#![expect(clippy::print_stderr, reason = "measured numbers beside their bounds")]

use fracbit::{
    Error, EvalOptions, Opened, PlanOptions, Preset, Quiet, Target, cuda::score, evaluate,
    evaluate::windows_of_both, kernels, plan,
};
use fracbit_base::{Palette, Scheme, Shape};
use fracbit_bench::{DeviceSubject, KernelOptions, ModelOptions, device_kernels, device_model};
use fracbit_codebook::Rounder;
use fracbit_format::{TILE, TILE_COLS};
use fracbit_kernels::cases;
use fracbit_kernels_cuda::{Address, Device, DeviceError, Grid, Limits, shim::Shim};
use fracbit_model::{KvType, Precision, RotationMode, eval::log_sum_exp};
use fracbit_quant::{Effort, Grouping, Rounders, quantize};
use fracbit_tests::{Source, demo_model, logits, stories};
use half::f16;
use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

fn device() -> Shim {
    let limits = Limits { multiprocessors: 1, shared: 99 << 10 };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

#[test]
fn kernels_are_timed() {
    let device = device();
    let options = KernelOptions {
        shape: Shape::new(32, 128),
        batch: vec![1, 3],
        bytes: 3000,
        rounds: 1,
        ..KernelOptions::new(["nuq-2", "tcq-fast-2"].map(|s| s.parse().unwrap()).to_vec())
    };
    let got = device_kernels(&device, &options, &Quiet).unwrap();
    let order: Vec<_> = got.iter().map(|k| (k.code.as_deref(), k.batch)).collect();
    assert_eq!(order, [(None, 1), (None, 3), (Some("fast"), 1), (Some("fast"), 3)]);
    assert!(got.iter().all(|k| k.us > 0.0 && k.gb_per_s > 0.0), "{got:?}");

    let group = KernelOptions { schemes: vec!["gnuq-2".parse().unwrap()], ..options.clone() };
    let got = device_kernels(&device, &group, &Quiet).unwrap();
    assert!(got.iter().all(|k| k.us > 0.0), "{got:?}");
    let nine = KernelOptions { batch: vec![9], ..options };
    assert!(matches!(device_kernels(&device, &nine, &Quiet), Err(Error::Option { option: "--batch", .. })));
}

#[test]
fn models_are_timed_packed_and_dense() {
    let device = device();
    let options = ModelOptions {
        prompts: vec![3],
        generate: 3,
        context: 2,
        batches: vec![1],
        rounds: 1,
        ..ModelOptions::default()
    };
    let preset = Preset::named("tiny").unwrap();
    for (scheme, label) in [(Some("tcq-fast-2".parse().unwrap()), "tcq-fast-2"), (None, "f16")] {
        let subject = DeviceSubject::Random { preset, vocab: None, layers: Some(1), scheme };
        let got = device_model(&device, subject, &options, &Quiet).unwrap();
        assert_eq!(got[0].scheme.as_deref(), Some(label));
        assert!(got[0].prefill_tok_s > 0.0 && got[0].decode_tok_s > 0.0, "{got:?}");
        let several = ModelOptions { batches: vec![2], ..options.clone() };
        assert!(matches!(
            device_model(&device, subject, &several, &Quiet),
            Err(Error::Option { option: "--batch", .. })
        ));
    }
}

/// A checkpoint quantized to a scale for every 32 columns, and the checkpoint itself: the figures
/// of the processor on the device.
#[test]
fn models_are_evaluated_beside_their_originals() {
    let device = device();
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&demo_model(), RotationMode::None, 0).unwrap();
    let out = dir.path().join("int-4");
    source.quantize(&source.uniform("int-4").unwrap(), &out, false).unwrap();
    let (small, original) = (Opened::new(&out).unwrap(), Opened::new(&demo_model()).unwrap());
    let (text, path) = stories();
    let model = small.on_device(&device, true).unwrap();
    let base = original.on_device(&device, true).unwrap();
    for kv in [KvType::I16, KvType::I8] {
        let options = EvalOptions { ctx: Some(20), windows: Some(1), kv, ..EvalOptions::default() };
        let want = evaluate(&small, Some(&original), &text, &path, &options, &Quiet).unwrap();
        let windows = windows_of_both(&small, Some(&original), &text, &path, &options).unwrap();
        let how = (Precision::FULL, small.bits_per_weight(), kv);
        let got = score(&model, Some(&base), &windows, how, &Quiet).unwrap();
        eprintln!("{kv:?}: {got:?}, on the processor {want:?}");
        assert_eq!((got.tokens, got.bits_per_weight), (want.tokens, want.bits_per_weight));
        // Activations are rounded to 8 bits on both, attention is not the same arithmetic.
        assert!((got.nats_per_token - want.nats_per_token).abs() < 0.03, "{got:?}, want {want:?}");
        assert!(
            (got.kl.unwrap() - want.kl.unwrap()).abs() < 0.2 * want.kl.unwrap(),
            "{got:?}, want {want:?}"
        );
        assert!(got.top1_agreement.unwrap() > 0.8, "{got:?}");
        assert!(score(&model, None, &windows, how, &Quiet).unwrap().kl.is_none());
    }
}

#[test]
fn matrices_in_bands_run_on_the_device() {
    // Tied and not, with biases of queries, and norms behind attention and MLP.
    for (name, rotation) in
        [("llama3", RotationMode::Fold), ("qwen2", RotationMode::Online), ("gemma3", RotationMode::Online)]
    {
        let device = device();
        let dir = tempfile::tempdir().unwrap();
        let reference = fracbit_tests::reference(name);
        let source = Source::open(&reference.dir, rotation, 0).unwrap();
        let options = PlanOptions { palette: Palette::Nuq, ..source.options(Target::Bits(7.0)) };
        let plan = plan(&source.inventory, &source.banded(), &options).unwrap();
        assert!(!plan.bands.is_empty());
        let out = dir.path().join("banded");
        source.quantize(&plan, &out, false).unwrap();
        let opened = Opened::new(&out).unwrap();
        let logits = logits(&opened.model(&kernels().unwrap(), true).unwrap(), &reference.tokens);
        let next = reference.tokens[1..].iter().map(|&token| token as usize);
        let nats = logits
            .chunks(opened.config.vocab_size)
            .zip(next)
            .map(|(row, next)| log_sum_exp(row) - f64::from(row[next]));
        let want = nats.sum::<f64>() / (reference.tokens.len() - 1) as f64;
        let model = opened.on_device(&device, true).unwrap();
        eprintln!("{name}: {} launches of products, {} bands", model.products(), plan.bands.len());
        let got =
            score(&model, None, &[reference.tokens], (Precision::FULL, 7.0, KvType::I16), &Quiet).unwrap();
        eprintln!("{name}: {} nats, on the processor {want}", got.nats_per_token);
        assert!((got.nats_per_token - want).abs() < 0.02, "{name}: {got:?}, want {want}");
    }
}

/// The shim, counting searches.
#[derive(Debug)]
struct Counting {
    shim: Shim,
    searches: AtomicUsize,
}

impl Device for Counting {
    type Graph = <Shim as Device>::Graph;

    fn limits(&self) -> Limits {
        self.shim.limits()
    }
    fn warpgroups(&self) -> bool {
        self.shim.warpgroups()
    }
    fn allocate(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        self.shim.allocate(bytes, what)
    }
    fn free(&self, at: Address) {
        self.shim.free(at);
    }
    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.shim.write(at, bytes)
    }
    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.shim.read(at, bytes)
    }
    fn launch(&self, kernel: &str, grid: Grid, args: &[u8]) -> Result<(), DeviceError> {
        self.searches.fetch_add(usize::from(kernel.starts_with("fb_encode")), Ordering::Relaxed);
        self.shim.launch(kernel, grid, args)
    }
    fn record(&self, body: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Self::Graph, DeviceError> {
        self.shim.record(body)
    }
    fn replay(&self, graph: &Self::Graph) -> Result<(), DeviceError> {
        self.shim.replay(graph)
    }
}

#[test]
fn quantizing_searches_on_the_device_that_was_chosen() {
    let counting = Counting { shim: device(), searches: AtomicUsize::new(0) };
    let counting: &'static Counting = Box::leak(Box::new(counting));
    let (scheme, shape): (Scheme, _) = ("tcq-fast-4".parse().unwrap(), Shape::new(16, 16));
    let weights = cases::activations(shape.len(), 8);
    let with =
        |rounders: &Rounders| quantize(&weights, shape, scheme, Grouping::Row, rounders, &|_| ()).unwrap();
    let got = with(&fracbit::rounders_on(counting));
    assert_eq!(counting.searches.load(Ordering::Relaxed), 1, "one launch for the one row of tiles");
    assert_eq!(got.data.codes(), codes_of_the_processor(&weights, got.data.gain(), scheme));
    // Other searches stay with the processor.
    assert_ne!(with(&Rounders::new(Effort::Fast)).data.codes(), got.data.codes(), "another search");
    assert_eq!(counting.searches.load(Ordering::Relaxed), 1);
}

/// The codes of one tile by a rounder of the processor.
fn codes_of_the_processor(tile: &[f32], gain: f32, scheme: Scheme) -> Vec<u8> {
    let mut unit = [0.0; TILE];
    for (unit, row) in unit.chunks_mut(TILE_COLS).zip(tile.chunks(TILE_COLS)) {
        let square = row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = f16::from_f32(square.sqrt() as f32 / gain).to_f32() * gain;
        unit.iter_mut().zip(row).for_each(|(u, w)| *u = w / scale);
    }
    let rounder = fracbit_trellis::rounder(scheme, Effort::Exact).expect("a trellis scheme");
    let mut codes = vec![0; rounder.codebook().tile_bytes()];
    rounder.encode(&[unit], &mut codes);
    codes
}
