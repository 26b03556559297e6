//! What a model consists of, as far as plans need to know: shapes, never weights.

use crate::{
    Error,
    bands::{Bands, BandsOf, band_name},
};
use fracbit_base::Shape;
use fracbit_io::{Checkpoint, ModelConfig};
use fracbit_model::{FloatId, LinearId, RotationMode};
use std::borrow::Cow;

/// A matrix of the model and what is known of it without reading its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Which one.
    pub id: LinearId,
    /// Its tensor name.
    pub name: String,
    /// Outputs x inputs.
    pub shape: Shape,
    /// How many matrices it is, one above the other: experts, of which a token meets some.
    /// Otherwise 1.
    pub pieces: usize,
}

impl Matrix {
    /// Of a model.
    #[must_use]
    pub fn new(id: LinearId, config: &ModelConfig) -> Self {
        Self { id, name: id.to_string(), shape: id.shape(config), pieces: id.pieces(config) }
    }

    /// Every one of a model, in its order.
    #[must_use]
    pub fn all(config: &ModelConfig) -> Vec<Self> {
        LinearId::all(config).map(|id| Self::new(id, config)).collect()
    }
}

/// What a model consists of, as far as a plan needs to know.
#[derive(Clone, Debug)]
pub struct Inventory {
    /// Hash of the source checkpoint's contents.
    pub source_hash: String,
    /// Every matrix that can be quantized; a tied head appears once, as the embedding.
    pub matrices: Vec<Matrix>,
    /// Parameters outside the matrices: norms and biases.
    pub other_params: u64,
    /// Those of them that a directory stores (as f32): norms that are folded away are not, factors
    /// of final hidden states are.
    pub stored_other: u64,
    /// Head and embedding are one matrix.
    pub tied: bool,
    /// The matrices that stand as one for each band of their rows, and which rows those are.
    pub bands: BandsOf,
}

impl Inventory {
    /// What a checkpoint consists of. Reads no weights.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint, config: &ModelConfig, rotation: RotationMode) -> Self {
        Self::of_config(config, rotation, fingerprint(checkpoint, config))
    }

    /// What a model of this configuration consists of; `source_hash` says which one.
    #[must_use]
    pub fn of_config(config: &ModelConfig, rotation: RotationMode, source_hash: String) -> Self {
        let matrices = Matrix::all(config);
        let biases: usize = matrices.iter().filter(|m| m.id.has_bias(config)).map(|m| m.shape.rows).sum();
        let norms = |ids: &mut dyn Iterator<Item = FloatId>| ids.map(|id| id.width(config)).sum::<usize>();
        let all_norms = norms(&mut FloatId::all(config));
        let kept_norms = norms(&mut stored_floats(config, rotation));
        let factors = if stores_final_factors(config, rotation) { config.hidden_size } else { 0 };
        Self {
            source_hash,
            matrices,
            other_params: (biases + all_norms) as u64,
            stored_other: (biases + kept_norms + factors) as u64,
            tied: config.tie_word_embeddings,
            bands: BandsOf::new(),
        }
    }

    /// All parameters of the model.
    #[must_use]
    pub fn params(&self) -> u64 {
        self.matrices.iter().map(|m| m.shape.len() as u64).sum::<u64>() + self.other_params
    }

    /// The same model with some matrices in bands of rows.
    #[must_use]
    pub fn banded(&self, bands: &BandsOf) -> Self {
        let split = |m: &Matrix| -> Vec<Matrix> {
            let Some(bands) = bands.get(&m.name) else { return vec![m.clone()] };
            let band = |band: usize| Matrix {
                name: band_name(m.id, band),
                shape: Shape::new(bands.rows(band).count(), m.shape.cols),
                ..m.clone()
            };
            (0..bands.count()).map(band).collect()
        };
        let matrices = self.matrices.iter().flat_map(split).collect();
        Self { matrices, bands: bands.clone(), ..self.clone() }
    }

    /// The model with the bands of a plan, where it has some.
    ///
    /// # Errors
    /// When the bands are of another model.
    pub fn with_bands(&self, bands: &BandsOf) -> Result<Cow<'_, Self>, Error> {
        if bands.is_empty() || !self.bands.is_empty() {
            return Ok(Cow::Borrowed(self));
        }
        let bad = |rule: String| Err(Error::Plan { origin: "plan".to_owned(), rule });
        for (name, bands) in bands {
            let Some(m) = self.matrices.iter().find(|m| m.name == *name) else {
                return bad(format!("bands are of `{name}`, which is not in the model"));
            };
            let rows = bands.each().len();
            if m.shape.rows != rows {
                return bad(format!(
                    "bands should say where {} rows of `{name}` are, got {rows}",
                    m.shape.rows
                ));
            }
            if m.pieces > 1 {
                return bad(format!("bands are of `{name}`, and experts are not cut"));
            }
        }
        Ok(Cow::Owned(self.banded(bands)))
    }

    /// Bytes of norms, biases and the bands of rows.
    #[must_use]
    pub fn fixed_bytes(&self) -> u64 {
        4 * self.stored_other + self.bands.values().map(|b| Bands::bytes(b.each().len()) as u64).sum::<u64>()
    }

    /// True for the matrix that produces the logits.
    #[must_use]
    pub fn is_head(&self, id: LinearId) -> bool {
        id == LinearId::Head || (self.tied && id == LinearId::Embed)
    }
}

/// The norms that a directory stores; the others were folded into their readers and are all ones.
pub fn stored_floats(
    config: &ModelConfig,
    rotation: RotationMode,
) -> impl Iterator<Item = FloatId> + use<'_> {
    FloatId::all(config).filter(move |id| !id.folded(config, rotation))
}

/// Whether a directory stores what final hidden states, turned back, are multiplied by to be those
/// of the checkpoint: a head of its own may hold the final norm's gain.
#[must_use]
pub fn stores_final_factors(config: &ModelConfig, rotation: RotationMode) -> bool {
    !config.tie_word_embeddings && rotation != RotationMode::None
}

/// A hash of the configuration and the tensor table: what a plan depends on, and cheap to compute.
fn fingerprint(checkpoint: &Checkpoint, config: &ModelConfig) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(serde_json::to_string(&config.raw).unwrap_or_default().as_bytes());
    for (name, info) in checkpoint.iter() {
        hasher.update(format!("\n{name} {} {:?}", info.dtype.name(), info.shape).as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}
