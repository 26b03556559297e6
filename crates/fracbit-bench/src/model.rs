//! Whole models: prefill and decode.

use crate::{RandomPacked, Spread, limits, pools, positive, random::floats, rounds};
use fracbit_base::Scheme;
use fracbit_io::ModelConfig;
use fracbit_kernels::{Kernels, PackedMatrix, cases};
use fracbit_load::{Error, Opened, Progress};
use fracbit_model::{
    FloatId, KvType, LayerLinear, Linear, LinearId, LinearScratch, Model, ModelBuilder, OnlineRotations,
    RotationMode, SampleConfig, Sampler, State, StateOptions,
};
use fracbit_plan::Preset;
use serde::Serialize;
use std::{path::Path, time::Instant};

/// What to run.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    /// A model directory.
    Opened(&'a Opened),
    /// A shape with every matrix, embedding and head too, of random codes of one scheme.
    Random {
        /// The shape.
        preset: Preset,
        /// Vocabulary instead of the preset's, at least 258.
        vocab: Option<usize>,
        /// Layers instead of the preset's.
        layers: Option<usize>,
        /// The scheme.
        scheme: Scheme,
    },
}

impl Subject<'_> {
    /// The model, checked, with its name and bits per weight: of codes for random weights, of
    /// everything stored for a directory.
    pub(super) fn load(self, kernels: &Kernels) -> Result<(Model, String, f64), Error> {
        let model = match self {
            Self::Opened(opened) => opened.model(kernels, false)?,
            Self::Random { preset, vocab, layers, scheme } => {
                random(preset.resized(vocab, layers)?, scheme, kernels)?
            }
        };
        check(&model)?;
        let (name, bits) = self.named();
        Ok((model, name, bits))
    }

    fn named(self) -> (String, f64) {
        match self {
            Self::Opened(opened) => (opened.checkpoint.dir().display().to_string(), opened.bits_per_weight()),
            Self::Random { preset, scheme, .. } => (preset.name.to_owned(), scheme.rate().bits()),
        }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Lengths of prompts.
    pub prompts: Vec<usize>,
    /// Tokens that one measurement of decoding generates.
    pub generate: usize,
    /// Tokens in the cache when decoding begins.
    pub context: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Numbers of sequences decoded at once.
    pub batches: Vec<usize>,
    /// Bytes of the array that the read bandwidth is measured with.
    pub limit_bytes: u64,
    /// Measurements of each.
    pub rounds: usize,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            threads: crate::default_threads(),
            prompts: vec![128],
            generate: 32,
            context: 128,
            kv: KvType::default(),
            batches: vec![1],
            limit_bytes: 2 << 30,
            rounds: 5,
        }
    }
}

/// A model with some threads, a prompt and a number of sequences.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSpeed {
    /// Directory or shape.
    pub model: String,
    /// Scheme family, where all matrices have one scheme.
    pub scheme: Option<String>,
    /// Its trellis code.
    pub code: Option<String>,
    /// Bits per weight: of codes for random weights, of everything stored for a directory.
    pub bits: f64,
    /// Threads.
    pub threads: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt per second, the first logits included.
    pub prefill_tok_s: f64,
    /// Its least and most.
    pub prefill_spread: Spread,
    /// Products of prefill, 10^9 per second, over the limit of int8 products.
    pub int8_share: f64,
    /// Tokens before the first that decoding makes.
    pub context: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Sequences decoded at once.
    pub batch: usize,
    /// Tokens generated per second in all sequences together, picking them included.
    pub decode_tok_s: f64,
    /// Its least and most.
    pub decode_spread: Spread,
    /// Bytes of weights that decoding reads, 10^9 per second; a step reads them once for all
    /// sequences.
    pub decode_gb_per_s: f64,
    /// `decode_gb_per_s` over `read_gb_per_s`.
    pub read_share: f64,
    /// Read bandwidth of as many threads, measured in the same rounds.
    pub read_gb_per_s: f64,
    /// Rate of int8 products of as many threads, measured in the same rounds.
    pub int8_gmac_per_s: f64,
}

/// Measures prefill and decode of a model with every number of threads, and the machine's limits,
/// in the same rounds.
///
/// # Errors
/// [`Error::Option`] for empty lists or zeros, or when the system gives too little; what loading
/// and running the model refuse.
///
/// # Panics
/// When a matrix times a vector is not what its dequantized weights say.
pub fn model(
    subject: Subject<'_>,
    options: &ModelOptions,
    kernels: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<ModelSpeed>, Error> {
    positive("--threads", &options.threads)?;
    positive("--prompt", &options.prompts)?;
    positive("--generate", &[options.generate])?;
    positive("--context", &[options.context])?;
    positive("--batch", &options.batches)?;
    positive("--rounds", &[options.rounds])?;
    let pools = pools(&options.threads)?;
    progress.stage("loading", 1);
    let (model, ..) = subject.load(kernels)?;
    let mut memory = limits::Memory::new(options.limit_bytes)?;
    let mut runner = Runner::new(&model, options)?;
    progress.advance(1);
    let batches = options.batches.len();
    let per_pool = 2 + batches + options.prompts.len();
    let cases = pools.len() * per_pool;
    progress.stage("measuring the model", ((options.rounds + 1) * cases) as u64);
    let spreads = rounds(options.rounds, cases, |case| {
        let value = pools[case / per_pool].install(|| match case % per_pool {
            0 => memory.read(),
            1 => limits::int8_products(),
            i if i < 2 + batches => runner.decode(options, options.batches[i - 2]),
            i => runner.prefill(options.prompts[i - 2 - batches]),
        });
        progress.advance(1);
        value
    });
    let facts = Facts::new(subject, &model);
    let mut all = Vec::new();
    for (&threads, spreads) in options.threads.iter().zip(spreads.chunks_exact(per_pool)) {
        let limits = [spreads[0].median, spreads[1].median];
        for (&batch, &decode) in options.batches.iter().zip(&spreads[2..]) {
            for (&prompt, &prefill) in options.prompts.iter().zip(&spreads[2 + batches..]) {
                all.push(ModelSpeed {
                    threads,
                    context: options.context,
                    kv: options.kv,
                    ..facts.speed(limits, (prompt, prefill), (batch, decode))
                });
            }
        }
    }
    Ok(all)
}

/// What does not change between measurements.
struct Facts {
    model: String,
    scheme: Option<Scheme>,
    bits: f64,
    /// Bytes that a decode step reads.
    bytes: f64,
    /// Products of a token in the blocks.
    blocks: f64,
    /// Products of a row of logits.
    head: f64,
}

impl Facts {
    #[expect(clippy::cast_precision_loss, reason = "counts to divide")]
    fn new(subject: Subject<'_>, model: &Model) -> Self {
        let config = model.config();
        // Of experts those that one token gets.
        let active = |id: LinearId, size: usize| size as f64 * id.active_share(config);
        let products = LinearId::all(config).filter(|id| id.is_layer());
        let blocks = products.map(|id| active(id, id.shape(config).len())).sum::<f64>();
        let read = LinearId::all(config).filter(|&id| config.tie_word_embeddings || id != LinearId::Embed);
        let bytes = read.map(|id| active(id, model.linear(id).map_or(0, Linear::weight_bytes))).sum();
        let (name, bits) = subject.named();
        let scheme = match subject {
            Subject::Opened(_) => None,
            Subject::Random { scheme, .. } => Some(scheme),
        };
        Self { model: name, scheme, bits, bytes, blocks, head: LinearId::Embed.shape(config).len() as f64 }
    }

    /// All but the number of threads and the cache.
    #[expect(clippy::cast_precision_loss, reason = "counts to divide")]
    fn speed(
        &self,
        [read, int8]: [f64; 2],
        (prompt, prefill): (usize, Spread),
        (batch, decode): (usize, Spread),
    ) -> ModelSpeed {
        let per_token = self.blocks + self.head / prompt as f64;
        let decode_gb_per_s = decode.median / batch as f64 * self.bytes / 1e9;
        ModelSpeed {
            model: self.model.clone(),
            scheme: self.scheme.map(Scheme::label),
            code: self.scheme.and_then(Scheme::code).map(|c| c.name().to_owned()),
            bits: self.bits,
            threads: 0,
            prompt,
            prefill_tok_s: prefill.median,
            prefill_spread: prefill,
            int8_share: prefill.median * per_token / 1e9 / int8,
            context: 0,
            kv: KvType::default(),
            batch,
            decode_tok_s: decode.median,
            decode_spread: decode,
            decode_gb_per_s,
            read_share: decode_gb_per_s / read,
            read_gb_per_s: read,
            int8_gmac_per_s: int8,
        }
    }
}

/// A model of random codes: weights keep the size of what goes through them.
fn random(preset: Preset, scheme: Scheme, kernels: &Kernels) -> Result<Model, Error> {
    let config = ModelConfig::parse(preset.config_text().as_bytes(), Path::new("config.json"))?;
    let mut builder =
        ModelBuilder::new(config.clone(), OnlineRotations::new(&config, RotationMode::Fold, 0)?)?;
    for (stream, id) in (0..).zip(LinearId::all(&config)) {
        let shape = id.shape(&config);
        let packed = RandomPacked::new(scheme, shape, id == LinearId::Embed, stream);
        let matrix = PackedMatrix::new(kernels, &packed.view(shape.rows)?);
        let bias = id.has_bias(&config).then(|| vec![0.0; shape.rows]);
        builder.set(id, Linear::packed(matrix, bias).map_err(fracbit_model::Error::from)?)?;
    }
    for id in FloatId::all(&config) {
        builder.set_floats(id, floats(id, &config))?;
    }
    Ok(builder.build()?.with_kernels(kernels))
}

/// Some rows of each kind of matrix against the products of their dequantized weights.
///
/// Activations are rounded to a scale of `absmax / 127` per 256 columns, so an output is off by at
/// most half of it times the magnitudes of the weights it meets; a hundredth more is allowed for
/// the rounding of f32 sums.
fn check(model: &Model) -> Result<(), Error> {
    const GROUP: usize = 256;
    let layer = LayerLinear::ALL.into_iter().map(|which| LinearId::Layer(0, which));
    for id in layer.chain([LinearId::Head]) {
        let linear = model.linear(id)?;
        let shape = linear.shape();
        let x = cases::activations(shape.cols, 1);
        let (mut y, mut row) = (vec![f32::NAN; shape.rows], vec![0.0; shape.cols]);
        linear.apply(&x, &mut LinearScratch::new(), &mut y).map_err(fracbit_model::Error::from)?;
        for r in [0, shape.rows / 2, shape.rows - 1] {
            linear.row(r, &mut row).map_err(fracbit_model::Error::from)?;
            let (mut want, mut bound) = (f64::from(linear.bias().map_or(0.0, |b| b[r])), 0.0);
            for (x, w) in x.chunks(GROUP).zip(row.chunks(GROUP)) {
                let most = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                let weights: f64 = w.iter().map(|w| f64::from(w.abs())).sum();
                want += x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
                bound += 1.01 * f64::from(most) / 254.0 * weights;
            }
            let error = (f64::from(y[r]) - want).abs();
            assert!(error <= bound, "{id}, row {r}: {} should be {want} within {bound}", y[r]);
        }
    }
    Ok(())
}

/// A model at work.
struct Runner<'a> {
    model: &'a Model,
    /// Hold `context` tokens when they rest.
    decoding: Vec<State>,
    prefilling: State,
    sampler: Sampler,
    /// The first token of each sequence.
    first: Vec<u32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl<'a> Runner<'a> {
    fn new(model: &'a Model, options: &ModelOptions) -> Result<Self, Error> {
        let state = |context| {
            model.state(&StateOptions { context: Some(context), kv: options.kv, ..StateOptions::default() })
        };
        let longest = options.prompts.iter().copied().max().unwrap_or(1);
        let mut runner = Self {
            model,
            decoding: Vec::new(),
            prefilling: state(longest),
            sampler: Sampler::new(SampleConfig { temperature: 0.0, ..SampleConfig::default() })?,
            first: Vec::new(),
            hidden: Vec::new(),
            logits: Vec::new(),
        };
        runner.prefilling.reserve(longest)?;
        let tokens = runner.tokens(options.context);
        let room = options.context.saturating_add(options.generate);
        for _ in 0..options.batches.iter().copied().max().unwrap_or(1) {
            let mut decoding = state(room);
            decoding.reserve(room)?;
            model.forward(&mut decoding, &tokens, &mut runner.hidden)?;
            runner.decoding.push(decoding);
            let vocab = model.config().vocab_size;
            runner.first.push(u32::try_from((1 + 31 * runner.first.len()) % vocab).expect("below 2^32"));
        }
        let last = runner.hidden.len() - model.config().hidden_size;
        model.logits(&mut runner.prefilling, &runner.hidden[last..], &mut runner.logits)?;
        assert!(runner.logits.iter().all(|l| l.is_finite()), "finite logits");
        Ok(runner)
    }

    fn tokens(&self, count: usize) -> Vec<u32> {
        let vocab = self.model.config().vocab_size;
        let token = |i: usize| u32::try_from(i * 7919 % vocab).expect("vocabularies are below 2^32");
        (0..count).map(token).collect()
    }

    /// Tokens per second of a prompt from an empty state.
    #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
    fn prefill(&mut self, prompt: usize) -> f64 {
        const FITS: &str = "room was made for the longest prompt";
        let tokens = self.tokens(prompt);
        self.prefilling.reset();
        let start = Instant::now();
        self.model.forward(&mut self.prefilling, &tokens, &mut self.hidden).expect(FITS);
        let last = self.hidden.len() - self.model.config().hidden_size;
        self.model.logits(&mut self.prefilling, &self.hidden[last..], &mut self.logits).expect(FITS);
        let seconds = start.elapsed().as_secs_f64();
        assert!(self.logits.iter().all(|l| l.is_finite()), "finite logits");
        prompt as f64 / seconds
    }

    /// Tokens per second of generating the most likely ones, in `batch` sequences.
    #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
    fn decode(&mut self, options: &ModelOptions, batch: usize) -> f64 {
        const FITS: &str = "room was made for all tokens";
        let vocab = self.model.config().vocab_size;
        let states = &mut self.decoding[..batch];
        states.iter_mut().for_each(|state| state.truncate(options.context));
        let mut tokens = self.first.clone();
        tokens.truncate(batch);
        let ones = vec![1; batch];
        let start = Instant::now();
        for _ in 0..options.generate {
            self.model.forward_batch(states, &tokens, &ones, &mut self.hidden).expect(FITS);
            self.model.logits(&mut states[0], &self.hidden, &mut self.logits).expect(FITS);
            for (token, logits) in tokens.iter_mut().zip(self.logits.chunks_exact(vocab)) {
                *token = self.sampler.sample(logits, &[]).expect("finite logits");
            }
        }
        (batch * options.generate) as f64 / start.elapsed().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;
    use fracbit_pipeline::{SynthOptions, synthesize};

    fn small() -> ModelOptions {
        ModelOptions {
            threads: vec![1, 2],
            prompts: vec![3, 7],
            generate: 2,
            context: 5,
            kv: KvType::I4,
            batches: vec![1, 3],
            limit_bytes: 4096,
            rounds: 1,
        }
    }

    #[test]
    fn a_random_model_and_its_fields() {
        let preset = Preset::named("tiny").unwrap();
        let subject =
            |vocab| Subject::Random { preset, vocab, layers: Some(1), scheme: "tcq-fast-2".parse().unwrap() };
        let kernels = fracbit_load::kernels().unwrap();
        let got = model(subject(None), &small(), &kernels, &Quiet).unwrap();
        let order: Vec<_> = got.iter().map(|m| (m.threads, m.batch, m.prompt, m.context)).collect();
        let one = |threads| [(threads, 1, 3, 5), (threads, 1, 7, 5), (threads, 3, 3, 5), (threads, 3, 7, 5)];
        assert_eq!(order, [one(1), one(2)].concat());
        assert!(got.iter().all(|m| m.prefill_tok_s > 0.0 && m.decode_tok_s > 0.0), "{got:?}");
        let value = serde_json::to_value(&got[0]).unwrap();
        for field in ["prefill_tok_s", "decode_tok_s", "threads", "bits", "prompt", "prefill_spread"] {
            assert!(value.get(field).is_some(), "{field} in {value}");
        }
        let bad = model(subject(Some(10)), &small(), &kernels, &Quiet);
        assert!(matches!(bad, Err(Error::Option { option: "--vocab", .. })));
        let none = ModelOptions { prompts: vec![], ..small() };
        assert!(matches!(
            model(subject(None), &none, &kernels, &Quiet),
            Err(Error::Option { option: "--prompt", .. })
        ));
    }

    #[test]
    fn a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let preset = Preset::named("tiny").unwrap();
        let options = SynthOptions { preset, vocab: None, layers: Some(1), seed: 1, force: false };
        let path = synthesize(&dir.path().join("m"), options, &Quiet).unwrap();
        let opened = Opened::new(&path).unwrap();
        let got =
            model(Subject::Opened(&opened), &small(), &fracbit_load::kernels().unwrap(), &Quiet).unwrap();
        assert_eq!(got.len(), 8);
        assert!((got[0].bits - 16.0).abs() < 0.01 && got[0].scheme.is_none(), "{:?}", got[0]);
    }
}
