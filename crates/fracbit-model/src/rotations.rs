//! Which rotations the runtime applies, and where.
//!
//! Two ways to make weights incoherent before quantization (QuIP#, Tseng et al. 2024, arXiv
//! 2402.04396; folding after SliceGPT, Ashkboos et al. 2024, arXiv 2401.15024, and QuaRot, Ashkboos
//! et al. 2024, arXiv 2404.00456), and none:
//!
//! | mode | turned in the weights ([`crate::WeightSource`]) | left to the runtime (this module) |
//! | --- | --- | --- |
//! | `none` | nothing | nothing |
//! | `fold` | residual stream, V and O per head, norm gains | the input of down; with tied embeddings also the final gain, see below |
//! | `online` | the input side of every linear, embedding rows | inputs of q/k/v, o, gate/up, down and the head: four per block; embedding rows turned back |
//!
//! **Tied embeddings, folded.** `E' = E R^T` serves as embedding and as head, but the head needs
//! the gain g of the final norm, which is not a rotation and cannot enter a shared matrix. So the
//! runtime turns the final hidden state back, applies g, and turns it again: `E' (R g∘(R^T n'))`,
//! two O(h log h) steps per logit row instead of a second matrix of vocabulary × width.
//!
//! **Norms behind attention and MLP** (Gemma 3), folded: their gains are no rotations either. So o
//! and down stay as they are on the output side, and the runtime turns what leaves these norms into
//! the basis of the residual stream: two transforms of its width per block and token.
//!
//! **Cost** in `fold` otherwise: one transform of the intermediate width per block and token;
//! `online` adds three of the model's width.
//!
//! Numbers of streams are part of the file format, since signs are drawn from (seed, stream): 0 is
//! the residual stream (in `online`: embedding rows and the head's input); block i has 16(i + 1) +
//! k with k = 0 for V/O heads, 1 for the input of q, k, v, 2 of o, 3 of gate and up, 4 of down.

use std::sync::Arc;

use fracbit_base::ShapeError;
use fracbit_io::ModelConfig;
use fracbit_kernels::{Team, Vectors};
use fracbit_rotation::Rotation;
use serde::{Deserialize, Serialize};

use crate::Error;

/// How a model's weights are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RotationMode {
    /// As stored.
    None,
    /// Rotations folded into the weights, but for one per block.
    #[default]
    Fold,
    /// The input of every linear rotated at run time, as in the papers: four per block.
    Online,
}

impl RotationMode {
    /// All of them, the default first.
    pub const ALL: [Self; 3] = [Self::Fold, Self::Online, Self::None];

    /// The name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fold => "fold",
            Self::Online => "online",
        }
    }
}

impl std::fmt::Display for RotationMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for RotationMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| Error::UnknownRotation(text.to_owned()))
    }
}

/// Numbers of streams within a block; see the module.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Heads = 0,
    AttentionIn = 1,
    OutputIn = 2,
    MlpIn = 3,
    DownIn = 4,
}

pub(crate) const RESIDUAL: u64 = 0;

pub(crate) fn stream(layer: usize, stream: Stream) -> u64 {
    16 * (layer as u64 + 1) + stream as u64
}

/// The rotations a block applies to activations.
#[derive(Clone, Debug, Default)]
pub struct LayerRotations {
    /// The input of q, k and v.
    pub attention_in: Option<Rotation>,
    /// The input of o.
    pub output_in: Option<Rotation>,
    /// The input of gate and up.
    pub mlp_in: Option<Rotation>,
    /// The input of down.
    pub down_in: Option<Rotation>,
}

/// What happens between the final norm and the head.
#[derive(Clone, Debug)]
pub enum HeadRotation {
    /// Nothing.
    Plain,
    /// Rotate.
    Rotate(Rotation),
    /// Rotate back, apply the final norm's gain, rotate.
    Regain(Rotation),
}

/// The online rotations of a model: rebuilt from mode and seed, nothing else need be stored.
#[derive(Clone, Debug)]
pub struct OnlineRotations {
    mode: RotationMode,
    seed: u64,
    pub(crate) embed_out: Option<Rotation>,        // applied inverted
    pub(crate) embed_divisors: Option<Arc<[f32]>>, // (hidden), behind it
    pub(crate) layers: Vec<LayerRotations>,
    pub(crate) branch_out: Option<Rotation>, // behind the norms of what attention and MLP write
    pub(crate) head: HeadRotation,
    pub(crate) final_factors: Option<Arc<[f32]>>, // (hidden), of a head of its own
}

impl OnlineRotations {
    /// The rotations of a model rotated by `mode` with the signs of `seed`.
    ///
    /// # Errors
    /// [`Error::Rotation`] for a width that cannot be rotated.
    pub fn new(config: &ModelConfig, mode: RotationMode, seed: u64) -> Result<Self, Error> {
        let rotation = |n: usize, stream: u64| Rotation::new(n, seed, stream);
        let (h, q, f) = (config.hidden_size, config.q_dim(), config.intermediate_size);
        let mut layers = Vec::with_capacity(config.num_hidden_layers());
        for i in 0..config.num_hidden_layers() {
            layers.push(match mode {
                RotationMode::None => LayerRotations::default(),
                RotationMode::Fold => LayerRotations {
                    down_in: Some(rotation(f, stream(i, Stream::DownIn))?),
                    ..LayerRotations::default()
                },
                RotationMode::Online => LayerRotations {
                    attention_in: Some(rotation(h, stream(i, Stream::AttentionIn))?),
                    output_in: Some(rotation(q, stream(i, Stream::OutputIn))?),
                    mlp_in: Some(rotation(h, stream(i, Stream::MlpIn))?),
                    down_in: Some(rotation(f, stream(i, Stream::DownIn))?),
                },
            });
        }
        let (embed_out, head) = match mode {
            RotationMode::None => (None, HeadRotation::Plain),
            RotationMode::Fold if config.tie_word_embeddings => {
                (None, HeadRotation::Regain(rotation(h, RESIDUAL)?))
            }
            RotationMode::Fold => (None, HeadRotation::Plain),
            RotationMode::Online => {
                (Some(rotation(h, RESIDUAL)?), HeadRotation::Rotate(rotation(h, RESIDUAL)?))
            }
        };
        let turned = mode == RotationMode::Fold && config.post_norms;
        let branch_out = turned.then(|| rotation(h, RESIDUAL)).transpose()?;
        Ok(Self {
            mode,
            seed,
            embed_out,
            embed_divisors: None,
            layers,
            branch_out,
            head,
            final_factors: None,
        })
    }

    /// The same with factors that the columns of a tied embedding were multiplied by: its rows are
    /// divided by them behind [`OnlineRotations::embed_out`].
    ///
    /// # Errors
    /// [`Error::Shape`] unless there is one for each channel, and where embedding rows are not
    /// turned back.
    pub fn with_embedding_divisors(self, divisors: Option<Vec<f32>>) -> Result<Self, Error> {
        if let Some(divisors) = &divisors {
            let width = self.embed_out.as_ref().map_or(0, Rotation::width);
            ShapeError::check_len("embedding", "divisors", width, divisors.len())?;
        }
        Ok(Self { embed_divisors: divisors.map(Into::into), ..self })
    }

    /// The same with what final hidden states, turned back, are multiplied by to be those of the
    /// checkpoint: see [`crate::WeightSource::final_factors`].
    ///
    /// # Errors
    /// [`Error::Shape`] unless there is one for each channel.
    pub fn with_final_factors(self, config: &ModelConfig, factors: Option<Vec<f32>>) -> Result<Self, Error> {
        if let Some(factors) = &factors {
            ShapeError::check_len("final norm", "factors", config.hidden_size, factors.len())?;
        }
        Ok(Self { final_factors: factors.map(Into::into), ..self })
    }

    /// What embedding rows are divided by once they are turned back.
    #[must_use]
    pub fn embedding_divisors(&self) -> Option<&[f32]> {
        self.embed_divisors.as_deref()
    }

    /// Divides embedding rows, turned back, by their factors.
    pub(crate) fn divide(&self, rows: &mut [f32]) {
        if let Some(divisors) = &self.embed_divisors {
            for row in rows.chunks_exact_mut(divisors.len()) {
                row.iter_mut().zip(divisors.iter()).for_each(|(x, by)| *x /= by);
            }
        }
    }

    /// The rotations of a block's activations, for runtimes other than this crate's.
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn layer(&self, index: usize) -> &LayerRotations {
        &self.layers[index]
    }

    /// What happens between the final norm and the head.
    #[must_use]
    pub fn head(&self) -> &HeadRotation {
        &self.head
    }

    /// Rotation of what norms behind attention and MLP make, where the residual stream is rotated.
    #[must_use]
    pub fn branch_out(&self) -> Option<&Rotation> {
        self.branch_out.as_ref()
    }

    /// What turns embedding rows back, applied inverted.
    #[must_use]
    pub fn embed_out(&self) -> Option<&Rotation> {
        self.embed_out.as_ref()
    }

    /// How the weights are rotated.
    #[must_use]
    pub fn mode(&self) -> RotationMode {
        self.mode
    }

    /// Where the signs come from.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Rotations per token in the blocks.
    #[must_use]
    pub fn online_rotations(&self) -> usize {
        let count = |l: &LayerRotations| {
            [&l.attention_in, &l.output_in, &l.mlp_in, &l.down_in].iter().filter(|r| r.is_some()).count()
        };
        let behind = if self.branch_out.is_some() { 2 * self.layers.len() } else { 0 };
        self.layers.iter().map(count).sum::<usize>() + behind
    }

    /// Floats of scratch that one row at any stream needs.
    pub(crate) fn scratch_len(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| [&l.attention_in, &l.output_in, &l.mlp_in, &l.down_in]);
        let layers = layers.chain([&self.branch_out]);
        let ends = match &self.head {
            HeadRotation::Plain => 0,
            HeadRotation::Rotate(r) | HeadRotation::Regain(r) => r.scratch_len(),
        };
        layers.flatten().map(Rotation::scratch_len).max().unwrap_or(0).max(ends)
    }
}

/// Rotates every row in place; `scratch` as of [`OnlineRotations::scratch_len`] serves a few rows,
/// which are one task, without allocation.
pub(crate) fn apply(
    rotation: &Rotation,
    vectors: &Vectors,
    team: &Team<'_>,
    rows: &mut [f32],
    scratch: &mut [f32],
) {
    let (n, need) = (rotation.width(), rotation.scratch_len());
    if rows.len() <= ROWS * n {
        apply_rows(rotation, vectors, rows, &mut scratch[..need]);
    } else {
        team.chunks(rows, ROWS * n, |_, part| apply_rows(rotation, vectors, part, &mut vec![0.0; need]));
    }
}

/// As [`apply`], on this thread.
pub(crate) fn apply_rows(rotation: &Rotation, vectors: &Vectors, rows: &mut [f32], scratch: &mut [f32]) {
    rotation.apply_rows_by(rows, scratch, |order, x, factors| vectors.walsh(order, x, factors));
}

/// As [`apply`], backwards.
pub(crate) fn apply_inverse(rotation: &Rotation, team: &Team<'_>, rows: &mut [f32], scratch: &mut [f32]) {
    let n = rotation.width();
    if rows.len() <= ROWS * n {
        let scratch = &mut scratch[..rotation.scratch_len()];
        rows.chunks_exact_mut(n).for_each(|row| rotation.apply_inverse_with(row, scratch));
    } else {
        team.chunks(rows, ROWS * n, |_, part| rotation.apply_rows_inverse(part));
    }
}

/// Rows that a thread takes at once.
const ROWS: usize = 8;
