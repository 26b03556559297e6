//! Sensitivities `a_l`: the rise of the loss per unit of relative squared error in one matrix.
//!
//! By default in the limit of small errors, from the curvature of the KL divergence to the clean
//! model, all matrices in one pass ([`fracbit_model::curvature`]). With noise levels as HIGGS and
//! Q-Palette do (appendix E): noise of known size in one matrix at a time, the divergence, a
//! least-squares fit. The tokens are those that the model itself generates (the papers' data-free
//! protocol) or of a given text (their `linear`, with the divergence in place of perplexity: its
//! noise is far smaller on the same tokens). The noise is that of weights as they will be
//! quantized, that is after folding, as large as each row. What each scheme really costs (their
//! `actual`) is measured in [`crate::losses`].

use crate::{
    Calibration, Error, EvalOptions, Opened, Progress,
    bands::Bands,
    calibrate::{Sequences, text_origin, text_sequences, written},
    directory::band_name,
    forecast::{self, Forecast},
    plan::{Inventory, Storage},
};
use fracbit_base::{Bytes, Scheme};
use fracbit_io::ModelConfig;
use fracbit_model::{
    LayerLinear, Linear, LinearId, Model, RotationMode, State, StateOptions, WeightSource, curvature,
    eval::{log_sum_exp, row_kl_from},
    gradient,
};
use fracbit_quant::sensitivity::{Fit, add_noise, deviations, fit, noise_levels};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::Path, sync::Arc};

/// Sensitivities of every matrix of a model, and where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sensitivities {
    /// How they were obtained, in words.
    pub protocol: String,
    /// Content hash of the checkpoint; empty for the prior.
    pub source_hash: String,
    /// Rotation under which they were measured.
    pub rotation: RotationMode,
    /// Whether there were factors between inputs and weights ([`crate::smoothing`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub smoothing: bool,
    /// Tokens measured on.
    pub tokens: usize,
    /// By module name.
    pub layers: BTreeMap<String, Fit>,
    /// Measured rise of the loss by module and scheme ([`crate::losses`]), where that was done: it
    /// takes the place of `a` times the scheme's error.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub actual: BTreeMap<String, BTreeMap<String, f64>>,
    /// All matrices at once, with noise or each quantized: what forecasts are fitted to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joint: Vec<JointPoint>,
    /// Bands of rows into which a plan may cut embedding and head; `layers` then has each of them
    /// beside the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bands: Option<Bands>,
}

/// How the loss of a matrix in a scheme is estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// `a` times the scheme's error, with `a` from text that the model wrote or from a prior.
    #[default]
    DataFree,
    /// `a` times the scheme's error, with `a` from a given text.
    Linear,
    /// Measured for every scheme, one matrix replaced at a time.
    Actual,
}

impl Objective {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::DataFree, Self::Linear, Self::Actual];

    /// The name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DataFree => "data-free",
            Self::Linear => "linear",
            Self::Actual => "actual",
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Median coefficient of a kind of matrix in Llama-3.1-8B as published with Q-Palette.
pub(crate) const fn usual(linear: LayerLinear) -> f64 {
    match linear {
        LayerLinear::Q => 0.010,
        LayerLinear::K => 0.006,
        LayerLinear::V => 0.028,
        LayerLinear::O => 0.021,
        LayerLinear::Gate => 0.025,
        LayerLinear::Up => 0.036,
        LayerLinear::Down => 0.049,
    }
}

/// A whole model beside the sum of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct JointPoint {
    /// What the matrices lose one by one, added up.
    pub sum: f64,
    /// What the model loses, nats per token.
    pub measured: f64,
}

/// Effort of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Noise levels per matrix; with none, the limit of small noise is taken from the curvature of
    /// the divergence, for all matrices at once ([`curvature`]).
    pub levels: usize,
    /// Tokens to generate and measure on.
    pub tokens: usize,
    /// Seed of the generated text and of the noise.
    pub seed: u64,
}

impl Protocol {
    /// What `sensitivity` measures unless told otherwise.
    pub const FULL: Self = Self { levels: 0, tokens: 4096, seed: 0 };
    /// What `quantize` measures when no file is given.
    pub const QUICK: Self = Self { levels: 0, tokens: 1024, seed: 0 };

    /// The protocol in words, as documents record it.
    #[must_use]
    pub fn describe(self) -> String {
        let Self { tokens, seed, .. } = self;
        format!("{}, {tokens} tokens generated by the model, seed {seed}", self.method())
    }

    /// What is done, in words.
    fn method(self) -> String {
        match self.levels {
            0 => "curvature of the KL divergence, tokens drawn once, noise as large as each row".to_owned(),
            levels => format!(
                "KL divergence under Gaussian noise as large as each row, {levels} level(s) up to t = {}",
                fracbit_quant::sensitivity::MAX_NOISE
            ),
        }
    }

    /// Peak memory of a measurement beside the memory-mapped checkpoint: the matrix under test, its
    /// noisy copy or those of the forecast, and what the probe keeps of the text: logits, and the
    /// residual stream before a block.
    #[must_use]
    pub fn memory(self, config: &ModelConfig, inventory: &Inventory) -> Bytes {
        let largest = inventory.matrices.iter().map(|m| m.shape.len() as u64).max().unwrap_or(0);
        let head = inventory.matrices.iter().find(|m| inventory.is_head(m.id));
        let (vocab, hidden) = head.map_or((0, 0), |m| (m.shape.rows as u64, m.shape.cols as u64));
        let probe = probe_memory(self.tokens, vocab, hidden);
        let noisy = 4 * largest + (4 * largest).max(forecast::memory(inventory));
        let pass = if self.levels == 0 { gradient::memory(config, BATCH + SEQUENCE, SEQUENCE) } else { 0 };
        Bytes(noisy.max(pass) + probe)
    }
}

impl Sensitivities {
    /// A guess that needs no weights: the median coefficient of each kind of matrix in Llama-3.1-8B
    /// as published with Q-Palette. Embedding and head, which the papers leave alone, get values
    /// that we chose, not measured ones. They may be far off: the tied embedding of this project's
    /// demo model measures 3.1, about 140 times the median of its other matrices.
    #[must_use]
    pub fn prior(inventory: &Inventory, rotation: RotationMode) -> Self {
        let guess = |id| match id {
            LinearId::Embed if inventory.tied => 0.5,
            LinearId::Embed => 0.05,
            LinearId::Head => 0.25,
            LinearId::Layer(_, linear) => usual(linear),
        };
        Self {
            protocol: "prior by kind of matrix (nothing was measured on this model)".to_owned(),
            source_hash: String::new(),
            rotation,
            smoothing: false,
            tokens: 0,
            layers: inventory
                .matrices
                .iter()
                .map(|m| (m.name.clone(), Fit { a: guess(m.id), residual: 0.0 }))
                .collect(),
            actual: BTreeMap::new(),
            joint: Vec::new(),
            bands: None,
        }
    }

    /// Gives every band of the rows of `id` its part of the coefficient of the whole, by what was
    /// measured for each.
    pub(crate) fn share_out(&mut self, id: LinearId, bands: &Bands, losses: &[f64]) -> Result<(), Error> {
        let whole = self.of(&id.to_string())?;
        let shares = bands.shares(losses);
        for (band, share) in shares.into_iter().enumerate() {
            self.layers.insert(band_name(id, band), Fit { a: whole * share, residual: 0.0 });
        }
        self.bands = Some(bands.clone());
        Ok(())
    }

    /// The coefficient of a matrix.
    ///
    /// # Errors
    /// When the document does not hold it or holds no finite, non-negative number.
    pub fn of(&self, name: &str) -> Result<f64, Error> {
        let bad = |rule: String| Error::Sensitivity { origin: self.protocol.clone(), rule };
        let fit = self.layers.get(name).ok_or_else(|| bad(format!("layer `{name}` should be there")))?;
        if fit.a.is_finite() && fit.a >= 0.0 {
            Ok(fit.a)
        } else {
            Err(bad(format!("`a` of `{name}` should be finite and not negative, got {}", fit.a)))
        }
    }

    /// How this document estimates losses.
    #[must_use]
    pub fn objective(&self) -> Objective {
        if !self.actual.is_empty() {
            Objective::Actual
        } else if self.protocol.starts_with("linear") {
            Objective::Linear
        } else {
            Objective::DataFree
        }
    }

    /// Refuses a document that estimates losses in another way than the one asked for; `origin`
    /// names it.
    ///
    /// # Errors
    /// With both ways.
    pub fn require_objective(&self, origin: &str, wanted: Objective) -> Result<(), Error> {
        let have = self.objective();
        if have == wanted {
            return Ok(());
        }
        let rule = format!("it holds losses of kind {have}, not {wanted}: {}", self.protocol);
        Err(Error::Sensitivity { origin: origin.to_owned(), rule })
    }

    /// The forecast for a sum of losses; `None` where nothing was measured on the whole model.
    #[must_use]
    pub fn forecast(&self, predicted: f64) -> Option<Forecast> {
        forecast::forecast(&self.joint, predicted)
    }

    /// Predicted loss of a matrix stored so: what was measured for the scheme, as the rise over the
    /// best scheme measured for this matrix, or else the coefficient times the scheme's error on
    /// Gaussian weights.
    ///
    /// # Errors
    /// As for [`Sensitivities::of`]; also when no error or no finite loss is known for the scheme.
    pub fn loss(&self, name: &str, storage: Storage) -> Result<f64, Error> {
        let Some(measured) = self.actual.get(name) else {
            return Ok(self.of(name)? * storage.error()?);
        };
        if storage == Storage::F16 {
            return Ok(0.0);
        }
        let bad = |rule: String| Error::Sensitivity { origin: self.protocol.clone(), rule };
        let scheme = storage.to_string();
        let best = measured.values().copied().fold(f64::INFINITY, f64::min);
        match measured.get(&scheme) {
            Some(&loss) if loss.is_finite() && best.is_finite() => Ok(loss - best),
            Some(loss) => Err(bad(format!("the loss of `{name}` in {scheme} should be finite, got {loss}"))),
            None => Err(bad(format!(
                "`{name}` should have been measured in {scheme}: measure the palette that is planned with"
            ))),
        }
    }

    /// Whether every matrix's loss is known for a scheme: always, where losses are coefficients
    /// times errors.
    pub(crate) fn covers(&self, scheme: Scheme) -> bool {
        let name = scheme.to_string();
        self.actual.values().all(|losses| losses.contains_key(&name))
    }

    /// Reads a document written by `fracbit sensitivity`.
    ///
    /// # Errors
    /// When the file cannot be read or is no such document.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Sensitivity { origin: path.display().to_string(), rule };
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| bad(e.to_string()))
    }

    /// Writes the document. `path` always holds either the old or the new one, whole.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fracbit_io::write_atomic(path, text.as_bytes())
    }

    /// A measurement that begins, with what an interrupted one of the same kind has.
    pub(crate) fn begun(
        protocol: String,
        content_hash: &str,
        source: &WeightSource,
        tokens: usize,
        done: Option<Self>,
    ) -> Self {
        let (mut layers, mut actual, mut bands) = Default::default();
        let rotation = source.sites().mode();
        let smoothing = !source.smoothing().is_empty();
        if let Some(done) = done.filter(|d| d.continues(&protocol, content_hash, rotation, smoothing)) {
            (layers, actual, bands) = (done.layers, done.actual, done.bands);
        }
        Self {
            protocol,
            source_hash: content_hash.to_owned(),
            rotation,
            smoothing,
            tokens,
            layers,
            actual,
            joint: Vec::new(),
            bands,
        }
    }

    /// Whether a measurement of this kind may take over what this document holds already.
    #[must_use]
    pub fn continues(
        &self,
        protocol: &str,
        content_hash: &str,
        rotation: RotationMode,
        smoothing: bool,
    ) -> bool {
        (self.protocol == protocol && self.source_hash == content_hash)
            && (self.rotation, self.smoothing) == (rotation, smoothing)
    }

    /// Refuses sensitivities of another checkpoint.
    ///
    /// # Errors
    /// When the hashes differ (the prior fits every model).
    pub fn require_source(&self, content_hash: &str) -> Result<(), Error> {
        if self.source_hash.is_empty() || self.source_hash == content_hash {
            return Ok(());
        }
        let rule = format!(
            "they were measured on a checkpoint with hash {}, this one has {content_hash}",
            self.source_hash
        );
        Err(Error::Sensitivity { origin: self.protocol.clone(), rule })
    }
}

/// Text to measure on.
#[derive(Clone, Debug)]
pub struct Text {
    /// Its name and hash, in words.
    pub origin: String,
    /// Its tokens; every sequence is run from an empty state.
    pub sequences: Sequences,
}

impl Text {
    /// `tokens` tokens of a text (or fewer, if it has fewer), in sequences of 256, as the tokenizer
    /// of `opened` has them.
    ///
    /// # Errors
    /// When the text yields no two tokens, or the tokenizer cannot be read.
    pub fn read(
        opened: &Opened,
        text: &str,
        path: &Path,
        tokens: usize,
        options: &EvalOptions,
    ) -> Result<Self, Error> {
        let length = SEQUENCE.min(opened.config.max_position_embeddings);
        let sequences = text_sequences(opened, text, path, tokens, length, options)?;
        Ok(Self { origin: text_origin(text, path), sequences })
    }

    /// The first `tokens` tokens of those that `calibration` ran on (or fewer, if it has fewer), in
    /// sequences of at most 256, each of which begins with `bos` where those do: without it Gemma 3
    /// is many times as sensitive, and not every matrix alike.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn of(calibration: &Calibration, tokens: usize, bos: Option<u32>) -> Result<Self, Error> {
        let sequences = head(&calibration.sequences()?, tokens, bos);
        Ok(Self { origin: calibration.info.text.clone(), sequences })
    }
}

/// The first `tokens` tokens, in sequences of at most 256 and at least 2. Pieces of a sequence that
/// begins with `bos` all do.
fn head(sequences: &Sequences, tokens: usize, bos: Option<u32>) -> Sequences {
    let pieces = sequences.iter().flat_map(|s| {
        let (first, rest) = s.split_at(usize::from(s.first().copied() == bos && bos.is_some()));
        let each = SEQUENCE - first.len();
        rest.chunks(each).map(move |piece| [first, piece].concat())
    });
    let mut left = tokens;
    let cut = pieces.filter(|piece| piece.len() > 1).map_while(|mut piece| {
        piece.truncate(left);
        left -= piece.len();
        (piece.len() > 1).then_some(piece)
    });
    Sequences::new(cut.collect())
}

/// Bytes of the logits of a [`Probe`] on `tokens` tokens and of the streams of a [`Prefix`], and of
/// one sequence to be compared.
pub(crate) fn probe_memory(tokens: usize, vocab: u64, hidden: u64) -> u64 {
    4 * (tokens + tokens.min(SEQUENCE)) as u64 * (vocab + hidden)
}

/// The protocol of [`measure`] in words, as documents record it.
#[must_use]
pub fn describe(protocol: Protocol, text: Option<&Text>) -> String {
    match text {
        None => protocol.describe(),
        Some(text) => format!(
            "linear: {}, {} tokens of {}, seed {}",
            protocol.method(),
            text.sequences.tokens(),
            text.origin,
            protocol.seed
        ),
    }
}

/// Measures every matrix of `source` on text that the model writes. `done` holds coefficients
/// measured earlier by the same protocol (they are kept), `checkpoint` is called with the growing
/// document after every matrix or pass, so that a caller can save it and resume.
///
/// # Errors
/// When the model cannot be built or run.
pub fn measure(
    source: &WeightSource,
    content_hash: &str,
    protocol: Protocol,
    done: Option<Sensitivities>,
    progress: &dyn Progress,
    checkpoint: &mut dyn FnMut(&Sensitivities) -> Result<(), Error>,
) -> Result<Sensitivities, Error> {
    measure_on(source, content_hash, protocol, None, done, progress, checkpoint)
}

/// [`measure`] on a text, if there is one; of the protocol only the number of levels and the seed
/// then count.
///
/// # Errors
/// As for [`measure`].
pub fn measure_on(
    source: &WeightSource,
    content_hash: &str,
    protocol: Protocol,
    text: Option<&Text>,
    done: Option<Sensitivities>,
    progress: &dyn Progress,
    checkpoint: &mut dyn FnMut(&Sensitivities) -> Result<(), Error>,
) -> Result<Sensitivities, Error> {
    let tokens = text.map_or(protocol.tokens, |t| t.sequences.tokens());
    let mut result = Sensitivities::begun(describe(protocol, text), content_hash, source, tokens, done);
    let mode = source.sites().mode();
    let ids: Vec<LinearId> = LinearId::all(source.config()).collect();
    // White noise stays white under rotation, so the unrotated model serves every mode: its weights
    // stay in the checkpoint's memory map, and only the matrix under test is in memory.
    let plain =
        WeightSource::new(Arc::clone(source.checkpoint()), source.config().clone(), RotationMode::None, 0)?;
    let mut model = Model::from_source(&plain)?.with_kernels(&crate::kernels()?);
    let probe = match text {
        Some(text) => Probe::of(&model, text.sequences.iter().map(<[u32]>::to_vec).collect())?,
        None => Probe::new(&model, protocol)?,
    };
    let missing = ids.iter().any(|id| !result.layers.contains_key(&id.to_string()));
    if protocol.levels == 0 && missing {
        result.layers = curvatures(&model, &plain, source, protocol.seed, &probe, progress)?;
        checkpoint(&result)?;
    }
    if protocol.levels > 0 {
        progress.stage("measuring sensitivity", (ids.len() * protocol.levels) as u64);
    }
    let mut prefix = Prefix::new(&probe);
    for (index, id) in ids.into_iter().enumerate() {
        if result.layers.contains_key(&id.to_string()) {
            progress.advance(protocol.levels as u64);
            continue;
        }
        prefix.enter(&model, id)?;
        let clean = plain.linear(id)?;
        let columns = source.columns(id)?;
        let rows = deviations(
            &clean.data,
            clean.shape.cols,
            columns.as_deref(),
            rows_turn(plain.config(), id, mode),
        );
        let mut points = Vec::with_capacity(protocol.levels);
        let mut original = None;
        for (level, t) in noise_levels(protocol.levels).into_iter().enumerate() {
            let mut noisy = clean.data.clone();
            add_noise(
                &mut noisy,
                &rows,
                columns.as_deref(),
                t,
                protocol.seed ^ (((index as u64) << 32) | (level as u64 + 1)),
            );
            let replaced = model.replace(
                id,
                Linear::dense(clean.shape, noisy, plain.bias(id)?).map_err(fracbit_model::Error::from)?,
            )?;
            original.get_or_insert(replaced);
            points.push((t, prefix.divergence(&model)?));
            progress.advance(1);
        }
        if let Some(original) = original {
            model.replace(id, original)?;
        }
        let fitted = fit(&points).ok_or_else(|| Error::Sensitivity {
            origin: id.to_string(),
            rule: "the divergence should be finite at some noise level".to_owned(),
        })?;
        result.layers.insert(id.to_string(), fitted);
        checkpoint(&result)?;
    }
    result.joint = forecast::measure(source, &plain, &probe, &model, &result, protocol.seed, progress)?;
    checkpoint(&result)?;
    Ok(result)
}

/// Tokens of one pass back through the model, at least.
const BATCH: usize = 1024;

/// The coefficients in the limit of small noise ([`curvature`]).
#[expect(clippy::cast_precision_loss, reason = "a mean over a few thousand tokens")]
fn curvatures(
    model: &Model,
    plain: &WeightSource,
    source: &WeightSource,
    seed: u64,
    probe: &Probe,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, Fit>, Error> {
    let inverse = |f: Vec<f32>| f.into_iter().map(|f| if f == 0.0 { 0.0 } else { f.recip() }).collect();
    let mode = source.sites().mode();
    let mut columns = BTreeMap::new();
    for id in LinearId::all(plain.config()) {
        if let Some(factors) = source.columns(id)? {
            columns.insert(id, inverse(factors));
        }
    }
    let mut sums = BTreeMap::<LinearId, Vec<f64>>::new();
    let tokens: usize = probe.sequences.iter().map(Vec::len).sum();
    progress.stage("measuring sensitivity", tokens as u64);
    let mut batch: Vec<&[u32]> = Vec::new();
    for (at, sequence) in probe.sequences.iter().enumerate().rev() {
        batch.push(sequence);
        let count = batch.iter().map(|s| s.len()).sum::<usize>();
        if at == 0 || count >= BATCH {
            for (id, found) in curvature::squares(model, &batch, seed ^ (at as u64) << 32, &columns)? {
                let sums = sums.entry(id).or_insert_with(|| vec![0.0; found.len()]);
                sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
            }
            progress.advance(count as u64);
            batch.clear();
        }
    }
    let mut coefficients = BTreeMap::new();
    for (id, squares) in sums {
        let (matrix, columns) = (plain.linear(id)?, source.columns(id)?);
        let rows = deviations(
            &matrix.data,
            matrix.shape.cols,
            columns.as_deref(),
            rows_turn(plain.config(), id, mode),
        );
        let of = |(square, row)| square * f64::from(row).powi(2) / 2.0 / tokens as f64;
        let sum: f64 = squares.into_iter().zip(rows).map(of).sum();
        // Rounding may take a sum of squares below zero; NaN stays, to be named.
        let a = if sum < 0.0 { 0.0 } else { sum };
        coefficients.insert(id.to_string(), Fit { a, residual: 0.0 });
    }
    Ok(coefficients)
}

/// Whether `mode` rotates the outputs of a matrix: its rows are then mixed.
pub(crate) fn rows_turn(config: &ModelConfig, id: LinearId, mode: RotationMode) -> bool {
    let writes = match id {
        LinearId::Layer(_, LayerLinear::V) => true,
        LinearId::Layer(_, LayerLinear::O | LayerLinear::Down) => !config.post_norms,
        _ => false,
    };
    mode == RotationMode::Fold && writes
}

/// The clean model's view of a text.
pub(crate) struct Probe {
    /// Token sequences, each run in a fresh state.
    sequences: Vec<Vec<u32>>,
    /// Clean logits of every position, one (tokens, vocabulary) block per sequence.
    logits: Vec<Vec<f32>>,
    /// [`log_sum_exp`] of every position.
    normalizers: Vec<Vec<f64>>,
}

/// Sequences at least that a model writes to be measured on.
const TOGETHER: usize = 8;

/// Length of a sequence, unless the model's context is shorter.
pub(crate) const SEQUENCE: usize = 256;

/// A state for measurements: noise is far larger than what rounding to bf16 adds, which the clean
/// model has too.
fn state(model: &Model, sequences: &[Vec<u32>]) -> State {
    let context = sequences.iter().map(Vec::len).max().unwrap_or(0);
    model.state(&StateOptions { context: Some(context), coarse: true, ..StateOptions::default() })
}

impl Probe {
    fn new(model: &Model, protocol: Protocol) -> Result<Self, Error> {
        if protocol.tokens == 0 {
            let rule = "tokens should be at least 1".to_owned();
            return Err(Error::Option { option: "sensitivity", rule });
        }
        // Steps of a few sequences take about as long as those of one.
        let length = protocol.tokens.div_ceil(TOGETHER);
        let length = length.clamp(2, SEQUENCE).min(model.config().max_position_embeddings);
        let sequences = written::write(model, protocol.tokens, length, protocol.seed, &crate::Quiet)?;
        // They are no longer than a piece.
        Self::of(model, head(&sequences, usize::MAX, None).iter().map(<[u32]>::to_vec).collect())
    }

    pub(crate) fn of(model: &Model, sequences: Vec<Vec<u32>>) -> Result<Self, Error> {
        let mut state = state(model, &sequences);
        let mut logits = vec![Vec::new(); sequences.len()];
        for (tokens, logits) in sequences.iter().zip(&mut logits) {
            run(model, &mut state, tokens, logits)?;
        }
        let vocab = model.config().vocab_size;
        let normalizers =
            logits.iter().map(|logits| logits.par_chunks(vocab).map(log_sum_exp).collect()).collect();
        Ok(Self { sequences, logits, normalizers })
    }

    /// Mean KL divergence from the clean model to `model`, nats per token.
    pub(crate) fn divergence(&self, model: &Model) -> Result<f64, Error> {
        Prefix::new(self).divergence(model)
    }

    /// Mean divergence of the logits that `run` gives for each sequence.
    fn mean(&self, mut run: impl FnMut(usize, &mut Vec<f32>) -> Result<(), Error>) -> Result<f64, Error> {
        let (mut sum, mut count) = (0.0, 0usize);
        let mut noisy = Vec::new();
        for (at, clean) in self.logits.iter().enumerate() {
            run(at, &mut noisy)?;
            let vocab = noisy.len() / self.sequences[at].len();
            let rows = clean.par_chunks(vocab).zip(&self.normalizers[at]).zip(noisy.par_chunks(vocab));
            let rows: Vec<f64> = rows.map(|((p, &zp), q)| row_kl_from(p, zp, q)).collect();
            sum += rows.iter().sum::<f64>();
            count += rows.len();
        }
        #[expect(clippy::cast_precision_loss, reason = "a mean over a few thousand tokens")]
        Ok(sum / count as f64)
    }
}

/// What a model makes of a text before one of its blocks: of variants of the model that differ from
/// there on, only the rest has to run.
pub(crate) struct Prefix<'a> {
    probe: &'a Probe,
    /// The block, and the residual stream of every sequence before it; `None`: before the
    /// embedding.
    entered: Option<(usize, Vec<Vec<f32>>)>,
}

impl<'a> Prefix<'a> {
    /// Before the embedding.
    pub(crate) fn new(probe: &'a Probe) -> Self {
        Self { probe, entered: None }
    }

    /// Goes on to the block of `id` with `model`, which so far must be as it was when this was
    /// before an earlier block.
    pub(crate) fn enter(&mut self, model: &Model, id: LinearId) -> Result<(), Error> {
        let to = match id {
            LinearId::Embed => return Ok(()),
            LinearId::Layer(index, _) => index,
            LinearId::Head => model.config().num_hidden_layers(),
        };
        let sequences = &self.probe.sequences;
        let mut state = state(model, sequences);
        let (from, streams) = match &mut self.entered {
            Some(entered) => entered,
            None => {
                let mut streams = vec![Vec::new(); sequences.len()];
                for (tokens, x) in sequences.iter().zip(&mut streams) {
                    model.embed(&mut state, tokens, x)?;
                }
                self.entered.insert((0, streams))
            }
        };
        if *from < to {
            for x in streams {
                state.reset();
                model.forward_blocks(&mut state, *from..to, x)?;
            }
            *from = to;
        }
        Ok(())
    }

    /// As [`Probe::divergence`], of a model that agrees with that of [`Prefix::enter`] in what lies
    /// before.
    pub(crate) fn divergence(&self, model: &Model) -> Result<f64, Error> {
        let mut state = state(model, &self.probe.sequences);
        self.probe.mean(|at, logits| {
            let Some((block, streams)) = &self.entered else {
                return run(model, &mut state, &self.probe.sequences[at], logits);
            };
            let mut x = streams[at].clone();
            state.reset();
            model.forward_from(&mut state, *block, &mut x)?;
            Ok(model.logits(&mut state, &x, logits)?)
        })
    }
}

/// Logits of every position of `tokens`.
fn run(model: &Model, state: &mut State, tokens: &[u32], logits: &mut Vec<f32>) -> Result<(), Error> {
    let mut hidden = Vec::new();
    state.reset();
    model.forward(state, tokens, &mut hidden)?;
    Ok(model.logits(state, &hidden, logits)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tokens_come_in_short_sequences() {
        let sequences = Sequences::new(vec![(0..1000).collect(), vec![7], (0..4000).collect()]);
        let cut = head(&sequences, 4096, None);
        assert_eq!(cut.tokens(), 4096);
        assert!(cut.iter().all(|s| s.len() > 1 && s.len() <= SEQUENCE));
        assert_eq!(cut.iter().next().unwrap()[..3], [0, 1, 2]);
        assert_eq!(head(&Sequences::new(vec![vec![1, 2, 3]]), 4096, None).tokens(), 3);
    }

    #[test]
    fn every_piece_begins_as_its_sequence_does() {
        let with: Vec<u32> = std::iter::once(2).chain(100..1100).collect();
        let sequences = Sequences::new(vec![with.clone(), (100..800).collect(), vec![2, 9]]);
        let cut = head(&sequences, usize::MAX, Some(2));
        let pieces: Vec<&[u32]> = cut.iter().collect();
        assert!(pieces.iter().all(|p| p.len() > 1 && p.len() <= SEQUENCE));
        // Of the first four, of the second, which has none, three, and the last.
        assert_eq!(pieces.iter().map(|p| p[0]).collect::<Vec<_>>(), [2, 2, 2, 2, 100, 356, 612, 2]);
        let joined: Vec<u32> = pieces[..4].iter().flat_map(|p| p[1..].to_vec()).collect();
        assert_eq!(joined, with[1..]);
        assert_eq!(head(&sequences, 300, Some(2)).tokens(), 300);
        assert_eq!(head(&sequences, usize::MAX, None).iter().nth(1).unwrap()[0], 100 + 255);
    }
}
