//! A model's weights as a checkpoint of transformers has them: its names, its shapes, not rotated.
//!
//! Whatever was done to a model on its way into a directory is undone or applied here, tensor by
//! tensor ([`fracbit_model::Basis`]): schemes, bands and nested planes are decoded, rotations
//! turned back, rows of heads put in their order, factors of the configuration taken out. What one
//! architecture stores in one tensor and another in three is joined again, and experts get the
//! names that they have there. The tensors make the same model in another program, to the rounding
//! of f32.
//!
//! A matrix can also stay packed: [`Dense::product`] multiplies by it as [`Dense::tensor`] would
//! have it, with the kernels of this machine, which round the inputs to integers.
//!
//! Memory: the packed model, and the tensor that is asked for.

use crate::{Error, Opened};
use fracbit_base::{Bytes, ShapeError};
use fracbit_io::{Architecture, Checkpoint, ModelConfig};
use fracbit_kernels::Kernels;
use fracbit_model::{Basis, FloatId, LayerLinear, LinearId, LinearScratch, Model, RotationMode};
use rayon::prelude::*;
use std::{collections::BTreeMap, sync::Arc};

/// What a tensor is made of: its parts lie one above the other.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// A matrix, or one of its pieces.
    Weights(LinearId, Option<usize>),
    Bias(LinearId),
    Floats(FloatId),
}

#[derive(Clone, Debug)]
struct Tensor {
    shape: Vec<usize>,
    parts: Vec<Part>,
}

/// The tensors of a model under the names of its checkpoint.
#[derive(Debug)]
pub struct Dense {
    model: Model,
    config: ModelConfig,
    basis: Basis,
    checkpoint: Arc<Checkpoint>,
    rotation: Option<RotationMode>, // of a quantized model, whose gains are those of the graph
    tensors: BTreeMap<String, Tensor>,
}

impl Dense {
    /// Loads a model, quantized or not. With `verify`, checksums are checked.
    ///
    /// # Errors
    /// As for [`Opened::model`].
    pub fn new(opened: &Opened, kernels: &Kernels, verify: bool) -> Result<Self, Error> {
        let model = opened.model(kernels, verify)?;
        let config = opened.config.clone();
        let basis = Basis::new(&config, model.rotations())?;
        let tensors = tensors(&config).map(|(name, parts)| (name, of(&config, parts))).collect();
        let rotation = opened.quantization.as_ref().map(|block| block.rotation);
        let checkpoint = Arc::clone(&opened.checkpoint);
        Ok(Self { model, config, basis, checkpoint, rotation, tensors })
    }

    /// Names and shapes, sorted by name. A matrix is outputs by inputs; stacked experts have a
    /// dimension more.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..]))
    }

    /// Bytes of the packed matrices in memory.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.model.weight_bytes() as u64)
    }

    fn missing(&self, name: &str, rule: &str) -> Error {
        let path = self.checkpoint.dir().to_path_buf();
        Error::Packed { path, tensor: name.to_owned(), rule: rule.to_owned() }
    }

    fn find(&self, name: &str) -> Result<&Tensor, Error> {
        let rule = "should be a tensor of this architecture, as transformers names them";
        self.tensors.get(name).ok_or_else(|| self.missing(name, rule))
    }

    /// One tensor in f32, row-major.
    ///
    /// # Errors
    /// [`Error::Packed`] when there is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<Vec<f32>, Error> {
        let Tensor { shape, parts } = self.find(name)?;
        let mut values = Vec::with_capacity(shape.iter().product());
        for &part in parts {
            values.append(&mut self.part(part)?);
        }
        Ok(values)
    }

    fn part(&self, part: Part) -> Result<Vec<f32>, Error> {
        match part {
            Part::Weights(id, piece) => {
                let one = id.piece_shape(&self.config);
                let (first, count) = piece.map_or((0, id.pieces(&self.config)), |piece| (piece, 1));
                let linear = self.model.linear(id)?;
                let mut rows = vec![0.0; count * one.len()];
                rows.par_chunks_mut(one.cols)
                    .enumerate()
                    .try_for_each(|(row, out)| linear.row(first * one.rows + row, out))
                    .map_err(fracbit_model::Error::from)?;
                self.basis.weights(id, &mut rows)?;
                Ok(rows)
            }
            Part::Bias(id) => {
                let mut bias = self.model.linear(id)?.bias().map(<[f32]>::to_vec).unwrap_or_default();
                self.basis.bias(id, &mut bias)?;
                Ok(bias)
            }
            Part::Floats(id) => {
                let Some(rotation) = self.rotation else {
                    return Ok(self.checkpoint.to_f32(&id.weight_name())?);
                };
                // What was folded into its readers is a norm of ones.
                let mut values = if id.folded(&self.config, rotation) {
                    vec![1.0; id.width(&self.config)]
                } else {
                    self.checkpoint.to_f32(&id.weight_name())?
                };
                self.basis.floats(id, &mut values)?;
                Ok(values)
            }
        }
    }

    /// `x W^T + b` for the matrix `name` and its bias: `x` is (tokens, inputs), the result (tokens,
    /// outputs), both as transformers has them.
    ///
    /// # Errors
    /// [`Error::Packed`] when there is no such matrix, or it is several that a router chooses from;
    /// [`Error::Model`] when `x` is not whole rows.
    pub fn product(&self, name: &str, x: &[f32]) -> Result<Vec<f32>, Error> {
        let parts = self.matrices(name)?;
        let cols = parts[0].shape(&self.config).cols;
        let tokens = x.len() / cols;
        ShapeError::check_len("product", "x", tokens * cols, x.len()).map_err(fracbit_model::Error::from)?;
        let all: usize = parts.iter().map(|id| id.shape(&self.config).rows).sum();
        let (mut out, mut start) = (vec![0.0; tokens * all], 0);
        let (mut scratch, mut input) = (LinearScratch::new(), x.to_vec());
        // Parts of one tensor read one input, turned once.
        self.basis.enter(parts[0], &mut input)?;
        for id in parts {
            let rows = id.shape(&self.config).rows;
            let mut y = vec![0.0; tokens * rows];
            let linear = self.model.linear(id)?;
            linear.apply(&input, &mut scratch, &mut y).map_err(fracbit_model::Error::from)?;
            self.basis.leave(id, &mut y)?;
            if rows == all {
                return Ok(y);
            }
            for (out, y) in out.chunks_exact_mut(all).zip(y.chunks_exact(rows)) {
                out[start..start + rows].copy_from_slice(y);
            }
            start += rows;
        }
        Ok(out)
    }

    /// Some rows of the matrix `name`: (rows asked for, inputs).
    ///
    /// # Errors
    /// As [`Dense::product`]; [`Error::Model`] for a row that is not there.
    pub fn rows(&self, name: &str, rows: &[usize]) -> Result<Vec<f32>, Error> {
        let [id] = self.matrices(name)?[..] else {
            return Err(self.missing(name, "should be one matrix, is several"));
        };
        if id != LinearId::Embed {
            return Err(self.missing(name, "should be the embedding, whose rows are read one by one"));
        }
        let (linear, cols) = (self.model.linear(id)?, id.shape(&self.config).cols);
        let mut values = vec![0.0; rows.len() * cols];
        for (&row, out) in rows.iter().zip(values.chunks_exact_mut(cols)) {
            linear.row(row, out).map_err(fracbit_model::Error::from)?;
        }
        self.basis.weights(id, &mut values)?;
        Ok(values)
    }

    /// The matrices that a tensor consists of.
    fn matrices(&self, name: &str) -> Result<Vec<LinearId>, Error> {
        let parts = self.find(name)?.parts.iter().map(|part| match part {
            Part::Weights(id, None) => Ok(*id),
            Part::Weights(..) => Err(self.missing(name, "is of experts, which can only be decoded")),
            _ => Err(self.missing(name, "should be a matrix")),
        });
        parts.collect()
    }
}

/// The tensor that some parts make: their rows together, or as many matrices as there are experts.
fn of(config: &ModelConfig, parts: Vec<Part>) -> Tensor {
    let stacked = config.arch == Architecture::GraniteMoe;
    let rows = |part: &Part| match part {
        Part::Weights(id, None) => id.shape(config).rows,
        Part::Weights(id, Some(_)) => id.piece_shape(config).rows,
        Part::Bias(id) => id.shape(config).rows,
        Part::Floats(id) => id.dimensions(config)[0],
    };
    let all: usize = parts.iter().map(rows).sum();
    let shape = match parts[0] {
        Part::Weights(id, Some(_)) if stacked => {
            let pieces = id.pieces(config);
            vec![pieces, all / pieces, id.piece_shape(config).cols]
        }
        Part::Weights(id, _) => vec![all, id.shape(config).cols],
        Part::Bias(_) => vec![all],
        Part::Floats(id) => id.dimensions(config),
    };
    Tensor { shape, parts }
}

/// Names of all tensors and what they are made of.
fn tensors(config: &ModelConfig) -> impl Iterator<Item = (String, Vec<Part>)> {
    let matrices = LinearId::all(config).flat_map(|id| {
        let bias = id.has_bias(config).then(|| (id.bias_name(), vec![Part::Bias(id)]));
        weights(config, id).into_iter().chain(bias)
    });
    matrices.chain(FloatId::all(config).map(|id| (float_name(config, id), vec![Part::Floats(id)])))
}

/// The tensors that begin with a matrix: one, one for each expert, or none where it lies in
/// another's. The inverse of [`Checkpoint::parted`].
fn weights(config: &ModelConfig, id: LinearId) -> Vec<(String, Vec<Part>)> {
    use LayerLinear::{Down, Gate, K, Q, Up, V};
    let LinearId::Layer(i, which) = id else {
        return vec![(id.weight_name(), vec![Part::Weights(id, None)])];
    };
    let name = |own: &str| format!("model.layers.{i}.{own}.weight");
    let whole = |of: &[LayerLinear]| of.iter().map(|&l| Part::Weights(LinearId::Layer(i, l), None)).collect();
    let experts = || 0..id.pieces(config);
    let piece = |which, e| Part::Weights(LinearId::Layer(i, which), Some(e));
    let each = |own: &dyn Fn(usize) -> String| {
        experts().map(|e| (name(&own(e)), vec![piece(which, e)])).collect::<Vec<_>>()
    };
    match (config.arch, which) {
        (Architecture::Phi3, Q) => vec![(name("self_attn.qkv_proj"), whole(&[Q, K, V]))],
        (Architecture::Phi3 | Architecture::Glm | Architecture::Glm4, Gate) => {
            vec![(name("mlp.gate_up_proj"), whole(&[Gate, Up]))]
        }
        (Architecture::Phi3, K | V | Up) | (Architecture::Glm | Architecture::Glm4, Up) => Vec::new(),
        (Architecture::Mixtral, Gate | Up | Down) => {
            let own = match which {
                Gate => "w1",
                Up => "w3",
                _ => "w2",
            };
            each(&|e| format!("block_sparse_moe.experts.{e}.{own}"))
        }
        (Architecture::GraniteMoe, Gate) => {
            let parts = experts().flat_map(|e| [piece(Gate, e), piece(Up, e)]).collect();
            vec![(name("block_sparse_moe.input_linear"), parts)]
        }
        (Architecture::GraniteMoe, Up) => Vec::new(),
        (Architecture::GraniteMoe, Down) => {
            vec![(name("block_sparse_moe.output_linear"), experts().map(|e| piece(Down, e)).collect())]
        }
        (_, Gate | Up | Down) if config.experts.is_some() => {
            let own = which.name().trim_start_matches("mlp.");
            each(&|e| format!("mlp.experts.{e}.{own}"))
        }
        _ => vec![(id.weight_name(), vec![Part::Weights(id, None)])],
    }
}

/// What a norm or router is called.
fn float_name(config: &ModelConfig, id: FloatId) -> String {
    let own = match (config.arch, id) {
        (Architecture::Glm4, FloatId::AttentionOut(i)) => Some((i, "post_self_attn_layernorm")),
        (Architecture::Glm4, FloatId::MlpIn(i)) => Some((i, "post_attention_layernorm")),
        (Architecture::Glm4, FloatId::MlpOut(i)) => Some((i, "post_mlp_layernorm")),
        (Architecture::Mixtral, FloatId::Router(i)) => Some((i, "block_sparse_moe.gate")),
        (Architecture::GraniteMoe, FloatId::Router(i)) => Some((i, "block_sparse_moe.router.layer")),
        _ => None,
    };
    own.map_or_else(|| id.weight_name(), |(i, own)| format!("model.layers.{i}.{own}.weight"))
}
