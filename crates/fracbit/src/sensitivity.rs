//! Sensitivities `a_l`: the rise of the loss per unit of relative squared error in one matrix.
//!
//! Measured as HIGGS and Q-Palette do (appendix E): noise of known size in one matrix at a time, KL divergence to
//! the clean model on tokens that the model itself generates, a least-squares fit. The noise goes into the
//! weights as they will be quantized, that is after folding, where quantization error is white.

use crate::{Error, Progress, plan::Inventory};
use fracbit_model::{
    LayerLinear, Linear, LinearId, Model, NormId, RotationMode, SampleConfig, Sampler, State, StateOptions,
    WeightSource, eval::row_kl,
};
use fracbit_quant::sensitivity::{Fit, add_noise, fit, noise_levels};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path, sync::Arc};

/// Sensitivities of every matrix of a model, and where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sensitivities {
    /// How they were obtained, in words.
    pub protocol: String,
    /// Content hash of the checkpoint; empty for the prior.
    pub source_hash: String,
    /// Rotation under which they were measured.
    pub rotation: RotationMode,
    /// Tokens measured on.
    pub tokens: usize,
    /// By module name.
    pub layers: BTreeMap<String, Fit>,
}

/// Effort of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Noise levels per matrix.
    pub levels: usize,
    /// Tokens to generate and measure on.
    pub tokens: usize,
    /// Seed of the generated text and of the noise.
    pub seed: u64,
}

impl Protocol {
    /// The papers' 16 noise levels.
    pub const FULL: Self = Self { levels: 16, tokens: 4096, seed: 0 };
    /// What `quantize` measures when no file is given: one noise level on a short text.
    pub const QUICK: Self = Self { levels: 1, tokens: 512, seed: 0 };
}

impl Sensitivities {
    /// A guess that needs no weights: the median coefficient of each kind of matrix in Llama-3.1-8B as published with
    /// Q-Palette, and for embedding and head, which the papers leave alone, values measured on this project's demo model.
    #[must_use]
    pub fn prior(inventory: &Inventory, rotation: RotationMode) -> Self {
        let guess = |id| match id {
            LinearId::Embed if inventory.tied => 0.3,
            LinearId::Embed => 0.05,
            LinearId::Head => 0.25,
            LinearId::Layer(_, linear) => match linear {
                LayerLinear::Q => 0.010,
                LayerLinear::K => 0.006,
                LayerLinear::V => 0.028,
                LayerLinear::O => 0.021,
                LayerLinear::Gate => 0.025,
                LayerLinear::Up => 0.036,
                LayerLinear::Down => 0.049,
            },
        };
        Self {
            protocol: "prior by kind of matrix (nothing was measured on this model)".to_owned(),
            source_hash: String::new(),
            rotation,
            tokens: 0,
            layers: inventory
                .matrices
                .iter()
                .map(|m| (m.name.clone(), Fit { a: guess(m.id), residual: 0.0 }))
                .collect(),
        }
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

    /// Reads a document written by `fracbit sensitivity`.
    ///
    /// # Errors
    /// When the file cannot be read or is no such document.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Sensitivity { origin: path.display().to_string(), rule };
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| bad(e.to_string()))
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

/// Measures every matrix of `source`. `done` holds coefficients measured earlier by the same protocol (they are kept),
/// `checkpoint` is called with the growing document after every matrix, so that a caller can save it and resume.
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
    let mode = source.sites().mode();
    let mut result = Sensitivities {
        protocol: format!(
            "KL divergence under Gaussian noise, {} level(s) up to t = {}, {} tokens generated by the model, seed {}",
            protocol.levels,
            fracbit_quant::sensitivity::MAX_NOISE,
            protocol.tokens,
            protocol.seed
        ),
        source_hash: content_hash.to_owned(),
        rotation: mode,
        tokens: protocol.tokens,
        layers: BTreeMap::new(),
    };
    if let Some(done) = done.filter(|d| {
        (&d.protocol, &d.source_hash, d.rotation) == (&result.protocol, &result.source_hash, mode)
    }) {
        result.layers = done.layers;
    }
    let ids: Vec<LinearId> = LinearId::all(source.config()).collect();
    progress.stage("measuring sensitivity", (ids.len() * protocol.levels) as u64);
    // White noise stays white under rotation, so the unrotated model serves every mode: its weights stay in the
    // checkpoint's memory map, and only the matrix under test is in memory.
    let plain =
        WeightSource::new(Arc::clone(source.checkpoint()), source.config().clone(), RotationMode::None, 0)?;
    let mut model = Model::from_source(&plain)?;
    let probe = Probe::new(&model, protocol)?;
    for (index, id) in ids.into_iter().enumerate() {
        if !result.layers.contains_key(&id.to_string()) {
            let clean = plain.linear(id)?;
            let gain = folded_gain(&plain, id, mode)?;
            let mut points = Vec::with_capacity(protocol.levels);
            let mut original = None;
            for (level, t) in noise_levels(protocol.levels).into_iter().enumerate() {
                let mut noisy = clean.data.clone();
                add_noise(
                    &mut noisy,
                    clean.shape.cols,
                    gain.as_deref(),
                    t,
                    protocol.seed ^ ((index as u64) << 32 | level as u64 + 1),
                );
                let replaced = model.replace(
                    id,
                    Linear::dense(clean.shape, noisy, plain.bias(id)?).map_err(fracbit_model::Error::from)?,
                )?;
                original.get_or_insert(replaced);
                points.push((t, probe.divergence(&model)?));
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
        } else {
            progress.advance(protocol.levels as u64);
        }
    }
    Ok(result)
}

/// The norm gain that `mode` folds into a matrix.
fn folded_gain(plain: &WeightSource, id: LinearId, mode: RotationMode) -> Result<Option<Vec<f32>>, Error> {
    let norm = match id {
        LinearId::Embed | LinearId::Layer(_, LayerLinear::O | LayerLinear::Down) => return Ok(None),
        LinearId::Head => NormId::Final,
        LinearId::Layer(i, LayerLinear::Gate | LayerLinear::Up) => NormId::Mlp(i),
        LinearId::Layer(i, LayerLinear::Q | LayerLinear::K | LayerLinear::V) => NormId::Attention(i),
    };
    Ok(if norm.folded(plain.config(), mode) { Some(plain.norm(norm)?) } else { None })
}

/// The clean model's view of a text that it wrote itself.
struct Probe {
    /// Token sequences, each run in a fresh state.
    sequences: Vec<Vec<u32>>,
    /// Clean logits of every position, one (tokens, vocabulary) block per sequence.
    logits: Vec<Vec<f32>>,
}

/// Length of a generated sequence, unless the model's context is shorter.
const SEQUENCE: usize = 256;

impl Probe {
    fn new(model: &Model, protocol: Protocol) -> Result<Self, Error> {
        if protocol.tokens == 0 || protocol.levels == 0 {
            let rule = "levels and tokens should be at least 1".to_owned();
            return Err(Error::Option { option: "sensitivity", rule });
        }
        let config = model.config();
        let mut state = model.state(&StateOptions::default());
        let length = SEQUENCE.min(state.capacity()).min(protocol.tokens);
        let mut sampler =
            Sampler::new(SampleConfig { temperature: 1.0, seed: protocol.seed, ..SampleConfig::default() })?;
        let mut probe = Self { sequences: Vec::new(), logits: Vec::new() };
        let (mut hidden, mut row) = (Vec::new(), Vec::new());
        for index in 0..protocol.tokens.div_ceil(length) {
            // Without a BOS token every sequence starts from another token, spread over the vocabulary.
            let spread = (index * 7919 + 1) % config.vocab_size;
            let first = config.bos_token_id.unwrap_or(u32::try_from(spread).unwrap_or(0));
            let mut tokens = vec![first];
            state.reset();
            while tokens.len() < length {
                model.forward(&mut state, &tokens[tokens.len() - 1..], &mut hidden)?;
                model.logits(&mut state, &hidden, &mut row)?;
                tokens.push(sampler.sample(&row, &[])?);
            }
            probe.logits.push(run(model, &mut state, &tokens)?);
            probe.sequences.push(tokens);
        }
        Ok(probe)
    }

    /// Mean KL divergence from the clean model to `model`, nats per token.
    fn divergence(&self, model: &Model) -> Result<f64, Error> {
        let mut state = model.state(&StateOptions::default());
        let vocab = model.config().vocab_size;
        let (mut sum, mut count) = (0.0, 0usize);
        for (tokens, clean) in self.sequences.iter().zip(&self.logits) {
            let noisy = run(model, &mut state, tokens)?;
            let rows: Vec<f64> =
                clean.par_chunks(vocab).zip(noisy.par_chunks(vocab)).map(|(p, q)| row_kl(p, q)).collect();
            sum += rows.iter().sum::<f64>();
            count += rows.len();
        }
        #[expect(clippy::cast_precision_loss, reason = "a mean over a few thousand tokens")]
        Ok(sum / count as f64)
    }
}

/// Logits of every position of `tokens`.
fn run(model: &Model, state: &mut State, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    state.reset();
    model.forward(state, tokens, &mut hidden)?;
    model.logits(state, &hidden, &mut logits)?;
    Ok(logits)
}
