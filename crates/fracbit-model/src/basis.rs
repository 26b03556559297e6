//! The way back from a model's weights to those of a checkpoint.
//!
//! [`crate::WeightSource`] makes of a stored matrix W what is run: rows in the runtime's order,
//! multiplied by a factor, gains and rotations folded in. A runtime that knows nothing of rotations
//! wants the matrix that it would have to multiply by. With the rotations of the table there, A of
//! the input and B of the output, and the change C (order of rows, factor), what is run is
//! `V = B C W' A^T`, and the two ways back are
//!
//! * the matrix itself: `W' = C^-1 B^T V A` ([`Basis::weights`]), of a bias `C^-1 B^T b`;
//! * its product with inputs x of the checkpoint's basis, without making W': `W' x + b' = C^-1 B^T
//!   (V (A x) + b)` ([`Basis::enter`], the product, [`Basis::leave`]).
//!
//! W' is not the W of the checkpoint that was quantized, but makes the same model: norm gains that
//! were folded stay in it, and the norm is then one of ones; factors between inputs and weights
//! stay in weights and gains; columns of a tied embedding that were multiplied for the head are
//! divided again, and the gain of the final norm, which had been divided, is multiplied. A
//! checkpoint's gains are stored less [`ModelConfig::gain_offset`], and so are these.
//!
//! Cost: a transform of the width for each row of a matrix, and for each token on the way in and
//! out of a product. That is more than the runtime of this crate has to do, which rotates once for
//! all matrices that read one input.

use fracbit_base::ShapeError;
use fracbit_io::ModelConfig;
use fracbit_rotation::Rotation;
use rayon::prelude::*;

use crate::Error;
use crate::id::{FloatId, LayerLinear, LinearId};
use crate::rotations::{OnlineRotations, RESIDUAL, RotationMode, Stream, stream};
use crate::stored::Change;

/// Rows that a thread turns in one go.
const ROWS: usize = 64;

/// Turns what a model is made of back to the basis of its checkpoint.
#[derive(Clone, Debug)]
pub struct Basis {
    config: ModelConfig,
    rotations: OnlineRotations,
    residual: Option<Rotation>, // (hidden); fold only
    heads: Vec<Rotation>,       // (head_dim) of each block; fold only
}

impl Basis {
    /// Of a model with these rotations.
    ///
    /// # Errors
    /// [`Error::Rotation`] for a width that cannot be rotated.
    pub fn new(config: &ModelConfig, rotations: &OnlineRotations) -> Result<Self, Error> {
        let folded = rotations.mode() == RotationMode::Fold;
        let residual = folded.then(|| Rotation::new(config.hidden_size, rotations.seed(), RESIDUAL));
        let blocks = if folded { config.num_hidden_layers() } else { 0 };
        let heads =
            (0..blocks).map(|i| Rotation::new(config.head_dim, rotations.seed(), stream(i, Stream::Heads)));
        Ok(Self {
            config: config.clone(),
            rotations: rotations.clone(),
            residual: residual.transpose()?,
            heads: heads.collect::<Result<_, _>>()?,
        })
    }

    /// A: what inputs are turned by, block by block where it is narrower than a row.
    fn input(&self, id: LinearId) -> Option<&Rotation> {
        let fold = self.rotations.mode() == RotationMode::Fold;
        match id {
            LinearId::Embed | LinearId::Head => self.residual.as_ref().or(self.rotations.embed_out.as_ref()),
            LinearId::Layer(i, linear) => {
                let rotations = self.rotations.layer(i);
                match linear {
                    LayerLinear::O => self.heads.get(i).or(rotations.output_in.as_ref()),
                    LayerLinear::Down => rotations.down_in.as_ref(),
                    _ if fold => self.residual.as_ref(),
                    LayerLinear::Q | LayerLinear::K | LayerLinear::V => rotations.attention_in.as_ref(),
                    LayerLinear::Gate | LayerLinear::Up => rotations.mlp_in.as_ref(),
                }
            }
        }
    }

    /// B: what outputs were turned by, likewise.
    fn output(&self, id: LinearId) -> Option<&Rotation> {
        match id {
            LinearId::Layer(i, LayerLinear::V) => self.heads.get(i),
            LinearId::Layer(_, LayerLinear::O | LayerLinear::Down) if !self.config.post_norms => {
                self.residual.as_ref()
            }
            _ => None,
        }
    }

    /// What the columns of a tied embedding are divided by.
    fn divisors(&self, id: LinearId) -> Option<&[f32]> {
        matches!(id, LinearId::Embed | LinearId::Head).then(|| self.rotations.embedding_divisors())?
    }

    /// Turns the rows of a matrix, or of one of its [pieces](LinearId::pieces), back: (rows, cols).
    /// Of embedding and head it may be any rows.
    ///
    /// # Errors
    /// [`Error::Shape`] unless it is whole pieces.
    pub fn weights(&self, id: LinearId, rows: &mut [f32]) -> Result<(), Error> {
        let one = id.piece_shape(&self.config);
        self.check("weights", if id.is_layer() { one.len() } else { one.cols }, rows.len())?;
        if let Some(output) = self.output(id) {
            rows.chunks_exact_mut(output.width() * one.cols)
                .for_each(|part| output.rotate_output_inverse(part, one.cols));
        }
        if let Some(input) = self.input(id) {
            rows.par_chunks_mut(ROWS * one.cols).for_each(|rows| input.apply_rows_inverse(rows));
        }
        if let Some(divisors) = self.divisors(id) {
            divide(rows, divisors);
        }
        Change::of(&self.config, id).undo(rows, one.cols);
        Ok(())
    }

    /// Turns a bias back: (rows).
    ///
    /// # Errors
    /// [`Error::Shape`] for another length.
    pub fn bias(&self, id: LinearId, bias: &mut [f32]) -> Result<(), Error> {
        ShapeError::check_len("basis", "bias", id.shape(&self.config).rows, bias.len())?;
        self.leave(id, bias)
    }

    /// Turns the gain of a norm, or a router, back to what the checkpoint stores.
    ///
    /// # Errors
    /// [`Error::Shape`] for another length.
    pub fn floats(&self, id: FloatId, values: &mut [f32]) -> Result<(), Error> {
        ShapeError::check_len("basis", "gain", id.width(&self.config), values.len())?;
        if let FloatId::Router(i) = id {
            if let Some(input) = self.input(LinearId::Layer(i, LayerLinear::Gate)) {
                input.apply_rows_inverse(values);
            }
            return Ok(());
        }
        if let (FloatId::Final, Some(divisors)) = (id, self.rotations.embedding_divisors()) {
            values.iter_mut().zip(divisors).for_each(|(g, by)| *g *= by);
        }
        let factor = id.factor(&self.config);
        let offset = self.config.gain_offset;
        if factor != 1.0 || offset != 0.0 {
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            values.iter_mut().for_each(|g| *g = (f64::from(*g) / factor - offset) as f32);
        }
        Ok(())
    }

    /// Turns inputs of the checkpoint's basis into those that the matrix is multiplied with:
    /// (tokens, cols). The embedding is meant as the head that it is tied to.
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are whole rows.
    pub fn enter(&self, id: LinearId, x: &mut [f32]) -> Result<(), Error> {
        self.check("inputs", id.shape(&self.config).cols, x.len())?;
        if let Some(divisors) = self.divisors(id) {
            divide(x, divisors);
        }
        if let Some(input) = self.input(id) {
            input.apply_rows(x);
        }
        Ok(())
    }

    /// Turns outputs of the matrix, its bias added, to the checkpoint's basis: (tokens, rows).
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are whole rows.
    pub fn leave(&self, id: LinearId, y: &mut [f32]) -> Result<(), Error> {
        self.check("outputs", id.shape(&self.config).rows, y.len())?;
        if let Some(output) = self.output(id) {
            output.apply_rows_inverse(y);
        }
        Change::of(&self.config, id).undo(y, 1);
        Ok(())
    }

    fn check(&self, what: &'static str, width: usize, len: usize) -> Result<(), Error> {
        Ok(ShapeError::check_len("basis", what, len / width.max(1) * width, len)?)
    }
}

fn divide(rows: &mut [f32], divisors: &[f32]) {
    for row in rows.chunks_exact_mut(divisors.len()) {
        row.iter_mut().zip(divisors).for_each(|(x, by)| *x /= by);
    }
}
