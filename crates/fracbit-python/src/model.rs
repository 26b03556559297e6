//! A model in memory.

use crate::{
    errors::{Refused, argument, raise, refuse},
    generation::{Generation, Picking},
    tokenizer::{Conversation, Tokenizer},
    work,
};
use fracbit::{EvalOptions, Evaluation, Opened, evaluate};
use fracbit_cli::Prompt;
use fracbit_model::{KvType, SampleConfig, StateOptions};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyAny, PyDict},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a model and its generations share.
pub(crate) struct Loaded {
    opened: Opened,
    pub(crate) model: fracbit_model::Model,
    pub(crate) tokenizer: Refused<Arc<fracbit_io::Tokenizer>>,
    pub(crate) end_tokens: Vec<u32>,
}

impl Loaded {
    fn new(path: &Path, verify: bool, listener: fracbit_cli::Listener) -> Refused<Self> {
        let opened = fracbit_cli::open(path, listener)?;
        let model = opened.model(&fracbit::kernels()?, verify)?;
        // A model without a tokenizer still has logits.
        let tokenizer = opened.tokenizer().map(Arc::new).map_err(refuse);
        let mut end_tokens = opened.config.eos_token_ids.clone();
        end_tokens.extend(tokenizer.iter().flat_map(|tokenizer| tokenizer.eos_ids()));
        Ok(Self { opened, model, tokenizer, end_tokens })
    }

    pub(crate) fn context(&self) -> usize {
        self.opened.config.max_position_embeddings
    }

    /// Logits of every token, row by row.
    fn logits(&self, tokens: &[u32], kv: KvType) -> Refused<Array2<f32>> {
        if tokens.len() > self.context() {
            let rule = format!("should fit the context of {} tokens, got {}", self.context(), tokens.len());
            return Err(argument("tokens", rule));
        }
        let options = StateOptions { context: Some(tokens.len().max(1)), kv, ..StateOptions::default() };
        let (mut state, mut hidden, mut logits) = (self.model.state(&options), Vec::new(), Vec::new());
        if !tokens.is_empty() {
            self.model.forward(&mut state, tokens, &mut hidden).map_err(refuse)?;
            self.model.logits(&mut state, &hidden, &mut logits).map_err(refuse)?;
        }
        let shape = (tokens.len(), self.opened.config.vocab_size);
        Ok(Array2::from_shape_vec(shape, logits).expect("a row for each token"))
    }
}

/// Bits of a number in the cache of keys and values.
pub(crate) fn cache(bits: u32) -> Refused<KvType> {
    match bits {
        16 => Ok(KvType::I16),
        8 => Ok(KvType::I8),
        6 => Ok(KvType::I6),
        4 => Ok(KvType::I4),
        _ => Err(argument("kv", format_args!("should be 16, 8, 6 or 4 bits, got {bits}"))),
    }
}

/// What makes a prompt: a text, or tokens.
#[derive(FromPyObject)]
pub(crate) enum Start {
    Text(String),
    Tokens(Vec<u32>),
}

/// A model in memory, quantized or not; `fracbit.load` makes one.
///
/// Any number of threads may use it at once. A generation has a cache of its own.
///
/// >>> model = fracbit.load(demo)
/// >>> model
/// Model(parameters=2755008, bits_per_weight=16.00, context=512)
/// >>> "".join(model.generate("Once upon a time", max_tokens=5, temperature=0))
/// ', there was a little'
/// >>> model.logits([1, 2, 3]).shape
/// (3, 2048)
#[pyclass(frozen, module = "fracbit")]
pub(crate) struct Model(Arc<Loaded>);

/// Load a model directory, quantized or not, or a GGUF file.
///
/// With `verify` the checksum of every tensor of a quantized model is checked on the way. Raises
/// InputError for what is no model, is damaged or is not supported, naming file and rule.
///
/// >>> fracbit.load(demo).tokenizer
/// Tokenizer(vocab_size=2048)
#[pyfunction]
#[pyo3(signature = (path, *, verify=true))]
pub(crate) fn load(py: Python<'_>, path: PathBuf, verify: bool) -> PyResult<Model> {
    let loaded = work::run(py, None, |listener| Loaded::new(&path, verify, listener))?;
    Ok(Model(Arc::new(loaded)))
}

impl Model {
    fn generation(
        &self,
        py: Python<'_>,
        prompt: impl FnOnce(&fracbit_io::Tokenizer) -> Refused<Vec<u32>> + Send,
        picking: &Picking,
    ) -> PyResult<Generation> {
        let begin = || {
            let tokenizer = self.0.tokenizer.as_ref().map_err(Clone::clone)?;
            let tokens = prompt(tokenizer)?;
            Generation::begin(&self.0, tokenizer, &tokens, picking)
        };
        py.detach(begin).map_err(|refusal| raise(py, &refusal))
    }
}

#[pymethods]
impl Model {
    /// Continue a text, or a list of token ids, as `fracbit run` does.
    ///
    /// Returns an iterator of pieces of text, each whole characters, which are computed as they
    /// are asked for: `"".join(...)` has all, and an iterator that is dropped computes no more.
    /// The same prompt, options and seed give the same text.
    ///
    /// At most `max_tokens` tokens are written. `temperature` 0 picks the most likely token;
    /// otherwise `top_k` (0: all), `top_p` and `min_p` say which tokens are kept, and
    /// `repetition_penalty` above 1 makes those less likely that were seen. `top_p` None is 0.95,
    /// or 1 beside mirostat. `sampling` are `typical_p` (1: all), `xtc_probability` (0: without)
    /// and `xtc_threshold`, `mirostat_tau` (bits of information; 0: without) and `mirostat_eta`,
    /// `dry_multiplier` (0: without), `dry_base`, `dry_allowed_length` and `dry_window` (0: all
    /// tokens), as the flags of `fracbit run`. The cache has `kv` bits for a number: 16, 8, 6
    /// or 4.
    #[pyo3(signature = (prompt, *, max_tokens=256, temperature=0.8, top_k=0, top_p=None, min_p=0.0,
        repetition_penalty=1.0, seed=0, kv=16, **sampling))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Start,
        max_tokens: usize,
        temperature: f32,
        top_k: usize,
        top_p: Option<f32>,
        min_p: f32,
        repetition_penalty: f32,
        seed: u64,
        kv: u32,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let config =
            SampleConfig { temperature, top_k, min_p, repetition_penalty, seed, ..SampleConfig::default() };
        let picking = Picking::new(max_tokens, config, top_p, sampling, kv)?;
        let context = self.0.context();
        let tokens = |tokenizer: &fracbit_io::Tokenizer| match prompt {
            Start::Text(text) => fracbit_cli::encode(tokenizer, Prompt::Text(&text), context),
            Start::Tokens(tokens) => Ok(tokens),
        };
        self.generation(py, tokens, &picking)
    }

    /// Answer a conversation in the model's chat template, as `fracbit chat` does.
    ///
    /// `messages` is a list of dicts with `role` and `content`, or the text of one message of the
    /// user; what it spells becomes no control token unless `allow_special` is True. The rest is
    /// as in `generate`. Raises InputError for a model without chat template.
    #[pyo3(signature = (messages, *, max_tokens=256, temperature=0.8, top_k=0, top_p=None, min_p=0.0,
        repetition_penalty=1.0, seed=0, kv=16, allow_special=false, **sampling))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn chat(
        &self,
        py: Python<'_>,
        messages: Conversation,
        max_tokens: usize,
        temperature: f32,
        top_k: usize,
        top_p: Option<f32>,
        min_p: f32,
        repetition_penalty: f32,
        seed: u64,
        kv: u32,
        allow_special: bool,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let config =
            SampleConfig { temperature, top_k, min_p, repetition_penalty, seed, ..SampleConfig::default() };
        let picking = Picking::new(max_tokens, config, top_p, sampling, kv)?;
        let context = self.0.context();
        self.generation(py, |tokenizer| messages.encode(tokenizer, allow_special, context), &picking)
    }

    /// Logits of the token after each of `tokens`: float32, (len(tokens), vocab_size).
    ///
    /// `kv` is bits of a number in the cache, as in `generate`.
    #[pyo3(signature = (tokens, *, kv=16))]
    fn logits<'py>(&self, py: Python<'py>, tokens: Vec<u32>, kv: u32) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let logits = py.detach(|| self.0.logits(&tokens, cache(kv)?));
        Ok(logits.map_err(|refusal| raise(py, &refusal))?.into_pyarray(py))
    }

    /// Measure the model on a text, alone or beside `baseline`, another Model: an Evaluation.
    ///
    /// The text is cut into windows of `ctx` tokens (None: 2048, or the model's context when that
    /// is shorter), at most `windows`. `bos` puts BOS before each (None: as the tokenizer does),
    /// `separator` divides documents, `prefix_space` False leaves out the space that some
    /// tokenizers put first. Numbers compare only between runs with the same cut. `kv` is bits of
    /// a number in the cache of this model; the baseline's has 16.
    #[pyo3(signature = (text, *, baseline=None, ctx=None, windows=None, bos=None, separator=None,
        prefix_space=true, kv=16, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn evaluate<'py>(
        &self,
        py: Python<'py>,
        text: &str,
        baseline: Option<&Self>,
        ctx: Option<usize>,
        windows: Option<usize>,
        bos: Option<bool>,
        separator: Option<String>,
        prefix_space: bool,
        kv: u32,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let base = baseline.map(|base| &base.0);
        let found = work::run(py, progress, |listener| {
            let kv = cache(kv)?;
            let drop_prefix_space = !prefix_space;
            let options =
                EvalOptions { ctx, windows, bos, drop_prefix_space, separator, kv, ..EvalOptions::default() };
            let (model, origin) = (&self.0, Path::new("text"));
            let opened = base.map(|base| &base.opened);
            let windows = evaluate::windows_of_both(&model.opened, opened, text, origin, &options)?;
            let state = StateOptions { kv, ..StateOptions::default() };
            let bits = model.opened.bits_per_weight();
            Ok(evaluate::score(&model.model, base.map(|b| &b.model), &windows, state, bits, &*listener)?)
        })?;
        let Evaluation { nats_per_token, perplexity, tokens, bits_per_weight, kl, top1_agreement } = found;
        let fields = [
            ("nats_per_token", Some(nats_per_token)),
            ("perplexity", Some(perplexity)),
            ("bits_per_weight", Some(bits_per_weight)),
            ("kl", kl),
            ("top1_agreement", top1_agreement),
        ];
        let fields = fields.into_py_dict(py)?;
        fields.set_item("tokens", tokens)?;
        py.import("fracbit._results")?.getattr("Evaluation")?.call((), Some(&fields))
    }

    /// The tokenizer; raises InputError when the model has none.
    #[getter]
    fn tokenizer(&self, py: Python<'_>) -> PyResult<Tokenizer> {
        let tokenizer = self.0.tokenizer.as_ref().map_err(|refusal| raise(py, refusal))?;
        Ok(Tokenizer(Arc::clone(tokenizer)))
    }

    /// Where the model was loaded from.
    #[getter]
    fn path(&self) -> &Path {
        self.0.opened.checkpoint.path()
    }

    /// Weights and biases, all together.
    #[getter]
    fn parameters(&self) -> u64 {
        self.0.opened.params()
    }

    /// Stored bits per parameter, everything counted: codes, scales, codebooks, norms, embedding.
    #[getter]
    fn bits_per_weight(&self) -> f64 {
        self.0.opened.bits_per_weight()
    }

    /// Bytes of all stored tensors.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.opened.bytes().0
    }

    /// Most tokens that the model was trained for.
    #[getter]
    fn context(&self) -> usize {
        self.0.context()
    }

    /// Rows of the embedding, and logits of a token.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.opened.config.vocab_size
    }

    fn __repr__(&self) -> String {
        let (parameters, bits) = (self.0.opened.params(), self.0.opened.bits_per_weight());
        format!("Model(parameters={parameters}, bits_per_weight={bits:.2}, context={})", self.0.context())
    }
}
