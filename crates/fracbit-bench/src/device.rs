//! Speed on a GPU: of kernels ([`device_kernels`]) and of whole models ([`device_model`]).
//!
//! Launches are recorded once and repeated; what is measured is the time between the first launch
//! and the host's wait for the last. Everything is generic over the device, so that it is tested
//! without one.

use crate::{KernelOptions, ModelOptions, RandomPacked, Spread, positive, rate, rounds};
use fracbit_base::{Scheme, Shape};
use fracbit_format::{Layout, TILE_ROWS};
use fracbit_io::ModelConfig;
use fracbit_kernels::cases;
use fracbit_kernels_cuda::{Buffer, Device, DeviceMatrix, LoadError, Workspace};
use fracbit_load::{Error, Opened, Progress};
use fracbit_model::{FloatId, KvType, LinearId, OnlineRotations, Precision, RotationMode, SampleConfig};
use fracbit_model_cuda::{Builder, Decoder, DeviceModel};
use fracbit_plan::Preset;
use half::f16;
use serde::Serialize;
use std::{path::Path, time::Instant};

/// Replays between two waits.
const REPLAYS: usize = 8;

/// One scheme with some tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceKernelSpeed {
    /// Scheme family, such as `tcq`.
    pub scheme: String,
    /// Code of a trellis scheme.
    pub code: Option<String>,
    /// Bits of codes per weight.
    pub bits: f64,
    /// Tokens.
    pub batch: usize,
    /// Microseconds of one product.
    pub us: f64,
    /// 10^9 weights expanded per second.
    pub gweights_per_s: f64,
    /// 10^9 bytes of codes per second.
    pub gb_per_s: f64,
    /// Least and most of `gweights_per_s`.
    pub spread: Spread,
}

/// Measures products with packed matrices on a device: copies of a matrix that together are as
/// large as `bytes`, so that no cache helps, in one recorded run. Threads and the machine's limits
/// do not matter here.
///
/// # Errors
/// [`Error::Option`] for empty lists, zeros and schemes without a kernel; [`Error::Device`].
///
/// # Panics
/// When a product is not what the dequantized weights say.
pub fn device_kernels<D: Device>(
    device: &D,
    options: &KernelOptions,
    progress: &dyn Progress,
) -> Result<Vec<DeviceKernelSpeed>, Error> {
    positive("--batch", &options.batch)?;
    positive("--shape", &[options.shape.rows, options.shape.cols])?;
    positive("--rounds", &[options.rounds])?;
    if options.batch.iter().any(|&b| b > 8) {
        let rule = "should be at most 8 with --device: more tokens run as dense products".to_owned();
        return Err(Error::Option { option: "--batch", rule });
    }
    progress.stage("measuring kernels", options.schemes.len() as u64);
    let mut all = Vec::new();
    for &scheme in &options.schemes {
        let matrices = matrices(device, scheme, options)?;
        let work = Workspace::new(device, &matrices[..1])?;
        for &batch in &options.batch {
            let spread = stream(device, &matrices, &work, batch, options.rounds)?;
            all.push(DeviceKernelSpeed::new(scheme, options.shape, batch, spread));
        }
        progress.advance(1);
    }
    Ok(all)
}

impl DeviceKernelSpeed {
    fn new(scheme: Scheme, shape: Shape, batch: usize, spread: Spread) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "ratios")]
        let (weights, bytes) = (shape.len() as f64, Layout::new(scheme, shape).len() as f64);
        Self {
            scheme: scheme.label(),
            code: scheme.code().map(|c| c.name().to_owned()),
            bits: scheme.rate().bits(),
            batch,
            us: weights / spread.median / 1e3,
            gweights_per_s: spread.median,
            gb_per_s: spread.median * bytes / weights,
            spread,
        }
    }
}

/// A matrix that was checked, and copies of it.
fn matrices<'d, D: Device>(
    device: &'d D,
    scheme: Scheme,
    options: &KernelOptions,
) -> Result<Vec<DeviceMatrix<'d, D>>, Error> {
    let shape = options.shape;
    let packed = RandomPacked::new(scheme, shape, false, 0);
    let first = DeviceMatrix::new(device, &packed.view(shape.rows)?, None).map_err(|e| match e {
        LoadError::Device(e) => Error::from(e),
        LoadError::Unsupported(e) => Error::Option { option: "--scheme", rule: e.to_string() },
    })?;
    let work = Workspace::new(device, [&first])?;
    let rows = shape.rows.min(2 * TILE_ROWS);
    let weights = packed.view(rows)?.dequantize();
    check(device, &first, &work, &weights, scheme)?;
    let each = Layout::new(scheme, shape).len() as u64;
    let count = usize::try_from(options.bytes.div_ceil(each)).unwrap_or(usize::MAX).max(1);
    let mut all = vec![first];
    while all.len() < count {
        let copy = all[0].copy()?;
        all.push(copy);
    }
    Ok(all)
}

/// The first rows of a product beside those of the dequantized weights: activations, entries of
/// wide tables and weights of group-wise schemes are rounded to halves, 2^-11 each; as much is
/// allowed for sums.
fn check<D: Device>(
    device: &D,
    matrix: &DeviceMatrix<'_, D>,
    work: &Workspace<'_, D>,
    weights: &[f32],
    scheme: Scheme,
) -> Result<(), Error> {
    let Shape { rows, cols } = matrix.shape();
    let x = cases::activations(cols, 1);
    let input = Buffer::of(device, &x, "x")?;
    let y = Buffer::zeroed(device, 4 * rows, "y")?;
    matrix.at(None).apply(&input, &y, 1, false, work)?;
    let got: Vec<f32> = y.read(rows)?;
    for (got, row) in got.iter().zip(weights.chunks_exact(cols)) {
        let (mut want, mut bound) = (0.0, 1e-6);
        for (x, w) in x.iter().zip(row) {
            let product = f64::from(*x) * f64::from(*w);
            want += product;
            bound += 2f64.powi(-9) * product.abs();
        }
        assert!((f64::from(*got) - want).abs() <= bound, "{scheme}: {got} should be {want} within {bound}");
    }
    Ok(())
}

/// Gweights/s of products with all of `matrices` in turn.
fn stream<D: Device>(
    device: &D,
    matrices: &[DeviceMatrix<'_, D>],
    work: &Workspace<'_, D>,
    batch: usize,
    count: usize,
) -> Result<Spread, Error> {
    let Shape { rows, cols } = matrices[0].shape();
    let x = Buffer::of(device, &cases::activations(batch * cols, 1), "x")?;
    let y = Buffer::zeroed(device, 4 * batch * rows, "y")?;
    let graph = device
        .record(&mut || matrices.iter().try_for_each(|m| m.at(None).apply(&x, &y, batch, false, work)))?;
    let mut failure = None;
    let spreads = rounds(count, 1, |_| {
        rate(|| {
            let run = || -> Result<(), fracbit_kernels_cuda::DeviceError> {
                (0..REPLAYS).try_for_each(|_| device.replay(&graph))?;
                y.read::<f32>(1).map(|_| ())
            };
            if let Err(e) = run() {
                failure.get_or_insert(e);
            }
            #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
            let weights = (REPLAYS * matrices.len() * rows * cols) as f64;
            weights / 1e9
        })
    });
    failure.map_or(Ok(spreads[0]), |e| Err(e.into()))
}

/// A model on a device with a prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceModelSpeed {
    /// Directory or shape.
    pub model: String,
    /// Scheme of all matrices, where they have one; `f16` for dense ones.
    pub scheme: Option<String>,
    /// Bits per weight.
    pub bits: f64,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt per second, without logits.
    pub prefill_tok_s: f64,
    /// Its least and most.
    pub prefill_spread: Spread,
    /// Tokens before the first that decoding makes.
    pub context: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Tokens generated per second, drawing and the host's wait for each included.
    pub decode_tok_s: f64,
    /// Its least and most.
    pub decode_spread: Spread,
    /// Bytes of weights that decoding reads, 10^9 per second.
    pub decode_gb_per_s: f64,
}

/// What a model on a device is.
#[derive(Clone, Copy, Debug)]
pub enum DeviceSubject<'a> {
    /// A model directory.
    Opened(&'a Opened),
    /// A shape with every matrix of random codes of one scheme, or of half-precision numbers.
    Random {
        /// The shape.
        preset: Preset,
        /// Vocabulary instead of the preset's.
        vocab: Option<usize>,
        /// Layers instead of the preset's.
        layers: Option<usize>,
        /// The scheme; none: f16.
        scheme: Option<Scheme>,
    },
}

/// Measures prefill and decode of a model on a device, one sequence at a time. Threads, batches and
/// the machine's limits do not matter here.
///
/// # Errors
/// [`Error::Option`] for empty lists or zeros; what loading and running the model refuse.
pub fn device_model<D: Device>(
    device: &D,
    subject: DeviceSubject<'_>,
    options: &ModelOptions,
    progress: &dyn Progress,
) -> Result<Vec<DeviceModelSpeed>, Error> {
    positive("--prompt", &options.prompts)?;
    positive("--generate", &[options.generate])?;
    positive("--context", &[options.context])?;
    positive("--rounds", &[options.rounds])?;
    if options.batches != [1] {
        let rule = "should be 1 with --device: one sequence is decoded at a time".to_owned();
        return Err(Error::Option { option: "--batch", rule });
    }
    progress.stage("loading", 1);
    let (model, name, scheme, bits) = match subject {
        DeviceSubject::Opened(opened) => {
            let model = opened.on_device(device, false)?;
            (model, opened.checkpoint.dir().display().to_string(), None, opened.bits_per_weight())
        }
        DeviceSubject::Random { preset, vocab, layers, scheme } => {
            let bits = scheme.map_or(16.0, |s| s.rate().bits());
            let label = scheme.map_or_else(|| "f16".to_owned(), |s| s.to_string());
            let model = random(device, preset.resized(vocab, layers)?, scheme)?;
            (model, preset.name.to_owned(), Some(label), bits)
        }
    };
    progress.stage("measuring the model", ((options.rounds + 1) * (options.prompts.len() + 1)) as u64);
    let mut failure = None;
    let cases = 1 + options.prompts.len();
    let spreads = rounds(options.rounds, cases, |case| {
        let measured = match case {
            0 => decode(&model, options),
            i => prefill(&model, options.prompts[i - 1], options.kv),
        };
        progress.advance(1);
        measured.unwrap_or_else(|e| {
            failure.get_or_insert(e);
            0.0
        })
    });
    if let Some(e) = failure {
        return Err(e);
    }
    #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
    let bytes = model.step_bytes(Precision::FULL) as f64;
    let speed = |(&prompt, &prefill): (&usize, &Spread)| DeviceModelSpeed {
        model: name.clone(),
        scheme: scheme.clone(),
        bits,
        prompt,
        prefill_tok_s: prefill.median,
        prefill_spread: prefill,
        context: options.context,
        kv: options.kv,
        decode_tok_s: spreads[0].median,
        decode_spread: spreads[0],
        decode_gb_per_s: spreads[0].median * bytes / 1e9,
    };
    Ok(options.prompts.iter().zip(&spreads[1..]).map(speed).collect())
}

fn tokens(config: &ModelConfig, count: usize) -> Vec<u32> {
    let token = |i: usize| u32::try_from(i * 7919 % config.vocab_size).expect("vocabularies are below 2^32");
    (0..count).map(token).collect()
}

/// Tokens per second of a prompt from an empty state.
#[expect(clippy::cast_precision_loss, reason = "a count to divide")]
fn prefill<D: Device>(model: &DeviceModel<'_, D>, prompt: usize, kv: KvType) -> Result<f64, Error> {
    let mut state = model.state_of(prompt, kv)?;
    let tokens = tokens(model.config(), prompt);
    let start = Instant::now();
    model.run::<fracbit_model_cuda::Error>(&mut state, &tokens, None)?;
    state.wait()?;
    Ok(prompt as f64 / start.elapsed().as_secs_f64())
}

/// Tokens per second of generating the most likely ones after `context` others.
fn decode<D: Device>(model: &DeviceModel<'_, D>, options: &ModelOptions) -> Result<f64, Error> {
    let mut state = model.state_of(options.context + options.generate, options.kv)?;
    let tokens = tokens(model.config(), options.context);
    let sampling = SampleConfig { temperature: 0.0, ..SampleConfig::default() };
    let mut decoder = Decoder::new(model, &mut state, &tokens, &sampling, options.generate)?;
    // The first token waits for the prompt too.
    decoder.next_token()?;
    let (start, mut made) = (Instant::now(), 0);
    while decoder.next_token()?.is_some() {
        made += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    assert!(decoder.logits()?.iter().all(|l| l.is_finite()), "finite logits");
    Ok(f64::from(made) / seconds)
}

/// A model of random weights that keep the size of what goes through them.
fn random<'d, D: Device>(
    device: &'d D,
    preset: Preset,
    scheme: Option<Scheme>,
) -> Result<DeviceModel<'d, D>, Error> {
    let config = ModelConfig::parse(preset.config_text().as_bytes(), Path::new("config.json"))?;
    let mut builder =
        Builder::new(device, config.clone(), OnlineRotations::new(&config, RotationMode::Fold, 0)?);
    for (stream, id) in (0..).zip(LinearId::all(&config)) {
        let shape = id.shape(&config);
        let bias = id.has_bias(&config).then(|| vec![0.0; shape.rows]);
        match scheme {
            Some(scheme) => {
                let packed = RandomPacked::new(scheme, shape, id == LinearId::Embed, stream);
                builder.packed(id, &packed.view(shape.rows)?, bias);
            }
            None => builder.halves(id, halves(shape, id == LinearId::Embed), bias),
        }
    }
    for id in FloatId::all(&config) {
        builder.norm(id, vec![1.0; id.width(&config)]);
    }
    Ok(builder.build()?)
}

/// Half-precision weights of variance `1 / cols`, or 1 with `wide`: some thousands of uniform
/// numbers, over and over.
fn halves(shape: Shape, wide: bool) -> Vec<u16> {
    #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^24")]
    let scale = if wide { 1.0 } else { 1.0 / (shape.cols as f32).sqrt() };
    let mut random = cases::Random::new(7);
    let few: Vec<u16> = (0..shape.len().min(60_013))
        .map(|_| f16::from_f32((2.0 * random.unit() - 1.0) * 3f32.sqrt() * scale).to_bits())
        .collect();
    let mut all = Vec::with_capacity(shape.len() + few.len());
    while all.len() < shape.len() {
        all.extend_from_slice(&few);
    }
    all.truncate(shape.len());
    all
}
