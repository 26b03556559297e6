//! Linear layers: y = W x + b, dense or packed.
//!
//! Dense weights are f32 in memory, or stay as stored (F32, BF16, F16, F64) in the checkpoint's
//! memory map and are converted a block at a time: a bf16 model runs in its own size, and pages it
//! does not touch are never read. One token goes through a row-by-row product that streams the
//! weights once; up to 32 through one that converts a few rows and columns at a time, in the
//! first-level cache, and multiplies them with all tokens; more go through a blocked product
//! (`ndarray`, whose kernel picks AVX or FMA itself) of some output rows at a time, so that
//! conversion is paid once per block and not once per token. That one packs both of its operands
//! first, which for few tokens takes longer than to multiply them.
//!
//! Packed weights go through [`fracbit_kernels::matmul`], which quantizes the activations to
//! integers; the quantized form is made once and shared by the layers that read one input.
//!
//! Layers that read one input may be *fused*: one packed matrix holds the rows of all of them
//! (Q-Palette, section 4.2). Each stays a layer of its own, a range of rows of the shared matrix. A
//! *banded* layer has its rows in several packed matrices, so that rows whose errors cost much can
//! have more bits than the others; its outputs are put back in order. `apply_together` multiplies
//! all that is packed of several layers in one loop of the team. A row's arithmetic does not depend
//! on its neighbours, so the bits are those of one product for each.
//!
//! Threads take blocks of rows; a row's arithmetic is the same in every cut, and in every storage
//! type that holds the same numbers. The products of one and of a few tokens have the same bits on
//! every machine; the many-token product adds in another order, fuses where the machine does, and
//! differs in the last bits.
//!
//! We use `ndarray` rather than the faster `gemm` crate because `gemm` has no safe interface, and
//! this crate has no unsafe code.

use std::ops::Range;
use std::sync::Arc;

use fracbit_base::{Scheme, Shape, ShapeError};
use fracbit_io::Checkpoint;
use fracbit_kernels::vectors::{
    Products,
    plain::{LANES, add, dot, finish},
};
use fracbit_kernels::{
    Activations, BandedMatrix, Gate, Operand, PANEL_FROM, PackedMatrix, Precision, RowsOf, Team, Vectors,
    matmul_gated_with, matmul_refined_with, matmul_together_with, with_team,
};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::bf16;
use crate::id::LinearId;
use crate::rotations::RotationMode;
use crate::stored::{Change, Stored};
use crate::{Error, WeightSource, model::TASK};

/// Output rows of one block of the many-token product. `matrixmultiply` packs both operands anew
/// for each block: with 64 that was 41 % of a small model's time.
const BLOCK: usize = 128;
/// Tokens at most of the product that packs nothing.
pub(crate) const FEW: usize = 32;
/// Output rows that it takes together at most.
const ROWS: usize = 16;
/// Weights that it takes together, in f32: a share of a second-level cache.
const CACHED: usize = 1 << 16;
/// Columns of them that meet one token after another, a multiple of [`LANES`]: the inputs of all
/// tokens are 64 KiB.
const PIECE: usize = 32 * LANES;
/// Columns converted at a time in the one-token product, on the stack; a multiple of [`LANES`], so
/// that only the last has a tail.
pub(crate) const CONVERT: usize = 64 * LANES;
/// Weights below which the one-token product stays on its thread: about 10 µs of work.
const SERIAL: usize = 1 << 15;

/// A linear layer with an optional bias.
#[derive(Debug)]
pub struct Linear {
    weights: Weights,
    bias: Option<Vec<f32>>, // (rows)
    tap: Option<Tap>,
}

/// Rows that a layer reads.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// The rows, in the order in which they are run.
    pub x: &'a [f32],
    /// Which of the layer's [pieces](crate::LinearId::pieces) reads them.
    pub piece: usize,
    /// Whose rows they are, where down of an expert reads them; otherwise empty.
    pub routed: &'a [Routed],
}

/// A token that an expert got.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Routed {
    /// Its place in its sequence.
    pub place: usize,
    /// What the expert's output is multiplied by for it.
    pub share: f32,
}

/// Sees what goes into a layer, with the threads of the pass, which are the only ones that are free
/// while it goes on.
pub type Observer = dyn Fn(&Team<'_>, Read<'_>) + Send + Sync;

/// An observer without a name to print.
struct Tap(Arc<Observer>);

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tap")
    }
}

#[derive(Debug)]
enum Weights {
    Dense(Shape, Vec<f32>), // (rows, cols)
    Stored(Stored),
    Packed(Box<PackedMatrix>),
    Fused(Fused),
    Banded(BandedMatrix),
}

/// Some rows of a packed matrix that several layers share.
#[derive(Debug)]
struct Fused {
    whole: Arc<PackedMatrix>,
    rows: Range<usize>,
}

/// Work space of linear layers: the activations in integer form, shared by layers with one input.
#[derive(Default)]
pub struct LinearScratch {
    pub(crate) activations: Activations,
    current: bool,
    room: Vec<f32>, // (rows, batch)
    /// What the product of a few tokens runs with; bits do not depend on it.
    pub(crate) vectors: Vectors,
    /// Whether products of many tokens may round weights and inputs to bf16.
    pub(crate) bf16: bool,
    /// What is read of nested matrices.
    pub(crate) precision: Precision,
}

impl LinearScratch {
    /// An empty work space; grows on use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, with the products of dense weights for the instruction set of `vectors`; the bits
    /// do not depend on it.
    #[must_use]
    pub fn with_vectors(self, vectors: Vectors) -> Self {
        Self { vectors, ..self }
    }

    /// Declares that the next [`Linear::apply_with`] has a new input.
    pub(crate) fn new_input(&mut self) {
        self.current = false;
    }

    /// So many numbers, whatever they are.
    pub(crate) fn room(&mut self, len: usize) -> &mut [f32] {
        if self.room.len() < len {
            self.room.resize(len, 0.0);
        }
        &mut self.room[..len]
    }

    /// The integer form of `x`, (batch, cols), unless it is there.
    pub(crate) fn quantize(&mut self, x: &[f32], cols: usize) -> Result<(), ShapeError> {
        if !self.current {
            self.activations.announce(x, cols)?;
            self.current = true;
        }
        Ok(())
    }
}

impl std::fmt::Debug for LinearScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinearScratch").field("current", &self.current).finish_non_exhaustive()
    }
}

impl Linear {
    /// A layer with f32 weights, row-major.
    ///
    /// # Errors
    /// When a length does not fit the shape.
    pub fn dense(shape: Shape, weights: Vec<f32>, bias: Option<Vec<f32>>) -> Result<Self, ShapeError> {
        ShapeError::check_len("linear layer", "weights", shape.len(), weights.len())?;
        Self::new(Weights::Dense(shape, weights), bias)
    }

    /// A matrix of a source in full precision: without rotation it stays in the checkpoint's memory
    /// map, in its stored type; a rotated one is f32 in memory.
    ///
    /// # Errors
    /// As for [`WeightSource::linear`].
    pub(crate) fn from_source(source: &WeightSource, id: LinearId) -> Result<Self, Error> {
        let bias = source.bias(id)?;
        if source.rotations().mode() == RotationMode::None {
            let change = source.change(id);
            return Self::changed(source.checkpoint().clone(), source.weight_names(id), change, bias);
        }
        let matrix = source.linear(id)?;
        Ok(Self::dense(matrix.shape, matrix.data, bias)?)
    }

    /// A layer whose weights stay in the checkpoint. They are checked once to be finite, which
    /// reads them once.
    ///
    /// # Errors
    /// [`Error::Io`] for a missing tensor, one of integers, or one with NaN or infinite weights;
    /// [`Error::Shape`] for one that is no matrix or does not fit the bias.
    pub fn stored(checkpoint: Arc<Checkpoint>, name: &str, bias: Option<Vec<f32>>) -> Result<Self, Error> {
        Self::changed(checkpoint, vec![name.to_owned()], Change::NONE, bias)
    }

    /// Tensors of one shape and type, one above the other.
    fn changed(
        checkpoint: Arc<Checkpoint>,
        names: Vec<String>,
        change: Change,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, Error> {
        const OP: &str = "linear layer";
        let (first, dtype) = (checkpoint.info(&names[0])?.shape.clone(), checkpoint.info(&names[0])?.dtype);
        let &[rows, cols] = first.as_slice() else {
            return Err(ShapeError::new(OP, "weights", "a matrix", format_args!("{first:?}")).into());
        };
        for name in &names {
            let info = checkpoint.info(name)?;
            if info.shape != first || info.dtype != dtype {
                let want = format_args!("{first:?} of {dtype}, as the first of its experts");
                let got = format_args!("{:?} of {} in `{name}`", info.shape, info.dtype);
                return Err(ShapeError::new(OP, "weights", want, got).into());
            }
        }
        let blocks: Vec<_> =
            names.iter().flat_map(|name| (0..rows).step_by(BLOCK).map(move |start| (name, start))).collect();
        blocks.into_par_iter().try_for_each_init(Vec::new, |buffer, (name, start)| {
            let range = start..rows.min(start + BLOCK);
            buffer.resize(range.len() * cols, 0.0);
            checkpoint.rows_f32_into(name, range, buffer)
        })?;
        let shape = Shape::new(names.len() * rows, cols);
        let stored = Stored { names, shape, dtype, checkpoint, change };
        Ok(Self::new(Weights::Stored(stored), bias)?)
    }

    /// A layer with quantized weights.
    ///
    /// # Errors
    /// When the bias does not fit.
    pub fn packed(matrix: PackedMatrix, bias: Option<Vec<f32>>) -> Result<Self, ShapeError> {
        Self::new(Weights::Packed(Box::new(matrix)), bias)
    }

    /// Layers that share `matrix`: each has as many rows as said, in order, and its own bias.
    ///
    /// # Errors
    /// When the rows do not add up to the matrix's, a layer does not begin with a strip of 16, or a
    /// bias does not fit.
    pub fn fused(
        matrix: PackedMatrix,
        members: Vec<(usize, Option<Vec<f32>>)>,
    ) -> Result<Vec<Self>, ShapeError> {
        let total = members.iter().map(|(rows, _)| rows).sum();
        ShapeError::check_len("fused layers", "rows", matrix.shape().rows, total)?;
        if members.iter().any(|(rows, _)| *rows == 0) {
            return Err(ShapeError::new("fused layers", "rows", "at least 1 of each", 0));
        }
        let whole = Arc::new(matrix);
        let mut first = 0;
        members
            .into_iter()
            .map(|(rows, bias)| {
                let rows = first..first + rows;
                first = rows.end;
                if RowsOf::new(&whole, rows.clone()).is_none() {
                    return Err(ShapeError::new(
                        "fused layers",
                        "rows before a layer",
                        "whole strips of 16",
                        rows.start,
                    ));
                }
                Self::new(Weights::Fused(Fused { whole: Arc::clone(&whole), rows }), bias)
            })
            .collect()
    }

    /// A layer whose row r lies in `bands[band_of[r]]`, behind the earlier rows of that band.
    ///
    /// # Errors
    /// When a band has not as many rows as are said to lie in it, or the columns of bands or the
    /// bias do not fit.
    pub fn banded(
        bands: Vec<PackedMatrix>,
        band_of: &[u8],
        bias: Option<Vec<f32>>,
    ) -> Result<Self, ShapeError> {
        Self::new(Weights::Banded(BandedMatrix::new(bands, band_of)?), bias)
    }

    fn new(weights: Weights, bias: Option<Vec<f32>>) -> Result<Self, ShapeError> {
        let out = Self { weights, bias, tap: None };
        if let Some(bias) = &out.bias {
            ShapeError::check_len("linear layer", "bias", out.shape().rows, bias.len())?;
        }
        Ok(out)
    }

    /// The same layer, every input of which `observer` sees before it is multiplied.
    #[must_use]
    pub fn observed(self, observer: Arc<Observer>) -> Self {
        Self { tap: Some(Tap(observer)), ..self }
    }

    /// Shows rows of inputs to the observer, if there is one.
    pub(crate) fn observe(&self, team: &Team<'_>, x: &[f32]) {
        self.observe_read(team, Read { x, piece: 0, routed: &[] });
    }

    pub(crate) fn observe_read(&self, team: &Team<'_>, read: Read<'_>) {
        if let Some(Tap(observer)) = &self.tap {
            observer(team, read);
        }
    }

    pub(crate) fn is_observed(&self) -> bool {
        self.tap.is_some()
    }

    /// Outputs by inputs.
    #[must_use]
    pub fn shape(&self) -> Shape {
        match &self.weights {
            Weights::Dense(shape, _) => *shape,
            Weights::Stored(stored) => stored.shape,
            Weights::Packed(matrix) => matrix.shape(),
            Weights::Fused(part) => Shape::new(part.rows.len(), part.whole.shape().cols),
            Weights::Banded(of) => of.shape(),
        }
    }

    /// The bias.
    #[must_use]
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The packed weights of a quantized layer; of a fused one, the matrix that it shares. A banded
    /// layer has several: `None`.
    #[must_use]
    pub fn as_packed(&self) -> Option<&PackedMatrix> {
        match &self.weights {
            Weights::Packed(matrix) => Some(matrix.as_ref()),
            Weights::Fused(part) => Some(&part.whole),
            Weights::Dense(..) | Weights::Stored(_) | Weights::Banded(_) => None,
        }
    }

    /// Whether the weights are quantized.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        !matches!(self.weights, Weights::Dense(..) | Weights::Stored(_))
    }

    /// Bytes of the weights, in memory or in the memory map; without bias. Fused layers share
    /// theirs by rows.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        match &self.weights {
            Weights::Dense(shape, _) => shape.len() * size_of::<f32>(),
            Weights::Stored(stored) => stored.dtype.bytes(stored.shape.len()),
            Weights::Packed(matrix) => matrix.bytes(),
            Weights::Fused(Fused { whole, rows }) => {
                let up_to = |row: usize| whole.bytes() * row / whole.shape().rows.max(1);
                up_to(rows.end) - up_to(rows.start)
            }
            Weights::Banded(of) => of.bands().iter().map(PackedMatrix::bytes).sum(),
        }
    }

    /// The schemes of packed weights, each once for every matrix that has it.
    pub(crate) fn schemes(&self) -> impl Iterator<Item = Scheme> {
        let whole = self.as_packed().into_iter();
        let bands = if let Weights::Banded(of) = &self.weights { of.bands() } else { &[] };
        whole.chain(bands).map(PackedMatrix::scheme)
    }

    /// Bytes of the weights that a product of this precision reads.
    pub(crate) fn weight_bytes_at(&self, precision: Precision) -> usize {
        match &self.weights {
            Weights::Dense(..) | Weights::Stored(_) => self.weight_bytes(),
            Weights::Packed(matrix) => matrix.bytes_at(precision),
            Weights::Fused(Fused { whole, rows }) => {
                let up_to = |row: usize| whole.bytes_at(precision) * row / whole.shape().rows.max(1);
                up_to(rows.end) - up_to(rows.start)
            }
            Weights::Banded(of) => of.bands().iter().map(|band| band.bytes_at(precision)).sum(),
        }
    }

    /// One row of the weights: the embedding of a token.
    ///
    /// # Errors
    /// When `out` is not one row long or there is no such row.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<(), ShapeError> {
        self.row_at(row, Precision::FULL, out)
    }

    /// As [`Linear::row`], as the planes of a precision have it.
    pub(crate) fn row_at(&self, row: usize, precision: Precision, out: &mut [f32]) -> Result<(), ShapeError> {
        let shape = self.shape();
        ShapeError::check_len("weight row", "out", shape.cols, out.len())?;
        if row >= shape.rows {
            return Err(ShapeError::new("weight row", "row", format_args!("below {}", shape.rows), row));
        }
        match &self.weights {
            Weights::Dense(_, weights) => out.copy_from_slice(&weights[row * shape.cols..][..shape.cols]),
            Weights::Stored(stored) => stored.block(row..row + 1, out),
            Weights::Packed(matrix) => matrix.row_at(row, precision, out),
            Weights::Fused(part) => part.whole.row_at(part.rows.start + row, precision, out),
            Weights::Banded(of) => of.row_at(row, precision, out),
        }
        Ok(())
    }

    /// All weights in f32, row-major, as the layer multiplies by them.
    ///
    /// # Errors
    /// None that a valid layer can cause.
    pub fn to_dense(&self) -> Result<Vec<f32>, ShapeError> {
        let shape = self.shape();
        let mut out = vec![0.0; shape.len()];
        out.par_chunks_mut(shape.cols.max(1)).enumerate().try_for_each(|(r, out)| self.row(r, out))?;
        Ok(out)
    }

    /// `out = x W^T + b` for a batch: `x` is (batch, cols), `out` (batch, rows).
    ///
    /// # Errors
    /// When a length does not fit.
    pub fn apply(&self, x: &[f32], scratch: &mut LinearScratch, out: &mut [f32]) -> Result<(), ShapeError> {
        scratch.new_input();
        with_team(|team| self.apply_with(team, x, scratch, out))
    }

    /// As [`Linear::apply`], on the threads of a team, keeping the integer form of `x` since the
    /// last [`LinearScratch::new_input`].
    pub(crate) fn apply_with(
        &self,
        team: &Team<'_>,
        x: &[f32],
        scratch: &mut LinearScratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        self.product(team, x, scratch, out, false)
    }

    /// The layer as the head of a model: as [`Linear::apply_with`] on a new input, and a packed
    /// matrix multiplies what the rounding of its input loses too.
    pub(crate) fn apply_head(
        &self,
        team: &Team<'_>,
        x: &[f32],
        scratch: &mut LinearScratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        scratch.new_input();
        self.product(team, x, scratch, out, true)
    }

    /// The layer; `refined` where packed weights multiply what the rounding of `x` loses too.
    fn product(
        &self,
        team: &Team<'_>,
        x: &[f32],
        scratch: &mut LinearScratch,
        out: &mut [f32],
        refined: bool,
    ) -> Result<(), ShapeError> {
        let shape = self.shape();
        let batch = x.len() / shape.cols.max(1);
        ShapeError::check_len("linear layer", "x", batch * shape.cols, x.len())?;
        ShapeError::check_len("linear layer", "out", batch * shape.rows, out.len())?;
        self.observe(team, x);
        if out.is_empty() {
            return Ok(());
        }
        match self.operand(scratch.precision) {
            None => self.dense_product(team, scratch, 0..shape.rows, x, out),
            Some(of) => {
                scratch.quantize(x, shape.cols)?;
                let ints = &mut scratch.activations;
                if refined {
                    matmul_refined_with(team, of, x, ints, out)?;
                } else {
                    matmul_together_with(team, [(of, &mut *out)], x, ints)?;
                }
            }
        }
        self.add_bias(out);
        Ok(())
    }

    /// Some rows of unquantized weights times `x`.
    pub(crate) fn dense_product(
        &self,
        team: &Team<'_>,
        scratch: &mut LinearScratch,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
    ) {
        let shape = Shape::new(rows.len(), self.shape().cols);
        let batch = x.len() / shape.cols;
        match &self.weights {
            Weights::Dense(_, weights) if batch == 1 => {
                let weights = &weights[rows.start * shape.cols..];
                vector_product(team, shape, out, |row| dot(&weights[row * shape.cols..][..shape.cols], x));
            }
            Weights::Stored(stored) if batch == 1 => stored.vector_product(team, rows, x, out),
            _ if batch <= FEW => self.few_product(team, scratch, rows.start, x, out),
            _ if scratch.bf16 && scratch.vectors.has_bf16() => {
                let first = rows.start;
                let out = ArrayViewMut2::from_shape((batch, shape.rows), out).expect("length checked");
                bf16::product(team, &scratch.vectors, x, shape.cols, out, |rows, buffer, panels| {
                    let rows = first + rows.start..first + rows.end;
                    panels.set_transposed(self.weights.block(rows, buffer), shape.cols);
                });
            }
            _ => self.matrix_product(team, rows.start, x, out),
        }
    }

    /// The rows of the first of `count` pieces, where they are packed.
    pub(crate) fn packed_piece(&self, count: usize, precision: Precision) -> Option<RowsOf<'_>> {
        let rows = match &self.weights {
            Weights::Packed(matrix) => RowsOf::new(matrix, 0..matrix.shape().rows / count),
            Weights::Fused(part) => {
                let rows = part.rows.start..part.rows.start + part.rows.len() / count;
                RowsOf::new(&part.whole, rows)
            }
            _ => None,
        };
        Some(rows?.at(precision))
    }

    /// Packed weights as products take them, `None` for others.
    fn operand(&self, precision: Precision) -> Option<Operand<'_>> {
        match &self.weights {
            Weights::Dense(..) | Weights::Stored(_) => None,
            Weights::Packed(matrix) => Some(Operand::Rows(RowsOf::all(matrix).at(precision))),
            Weights::Fused(part) => {
                let rows = RowsOf::new(&part.whole, part.rows.clone()).expect("a layer begins with a strip");
                Some(Operand::Rows(rows.at(precision)))
            }
            Weights::Banded(of) => Some(Operand::Banded(of, precision)),
        }
    }

    /// `out = f(gate x) ∘ (up x)` with the function of `kind`, in one product of many tokens where
    /// both are packed without a bias; `other` is work space.
    pub(crate) fn apply_gated(
        team: &Team<'_>,
        (vectors, kind): (&Vectors, Gate),
        [gate, up]: [&Self; 2],
        x: &[f32],
        scratch: &mut LinearScratch,
        [out, other]: [&mut [f32]; 2],
    ) -> Result<(), ShapeError> {
        let cols = gate.shape().cols;
        let many = x.len() >= PANEL_FROM * cols;
        let both = [gate, up].map(|l| l.operand(scratch.precision).filter(|_| many && l.bias.is_none()));
        if let [Some(Operand::Rows(gate_rows)), Some(Operand::Rows(up_rows))] = both {
            gate.observe(team, x);
            up.observe(team, x);
            scratch.quantize(x, cols)?;
            let both = [gate_rows, up_rows];
            return matmul_gated_with(team, kind, both, x, &mut scratch.activations, out);
        }
        Self::apply_together(team, [gate, up], x, scratch, [&mut *out, &mut *other])?;
        team.chunks(out, TASK, |i, out| vectors.gate_mul(kind, out, &other[i * TASK..][..out.len()]));
        Ok(())
    }

    fn add_bias(&self, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            out.chunks_exact_mut(bias.len()).for_each(|row| add(bias, row));
        }
    }

    /// [`Linear::apply_with`] of several layers with one input; those with packed weights in one
    /// loop of the team.
    pub(crate) fn apply_together<const N: usize>(
        team: &Team<'_>,
        layers: [&Self; N],
        x: &[f32],
        scratch: &mut LinearScratch,
        mut outs: [&mut [f32]; N],
    ) -> Result<(), ShapeError> {
        for (layer, out) in layers.iter().zip(&mut outs) {
            if layer.is_quantized() {
                layer.observe(team, x);
                scratch.quantize(x, layer.shape().cols)?;
            } else {
                layer.apply_with(team, x, scratch, out)?;
            }
        }
        if layers.iter().any(|layer| layer.is_quantized()) {
            let precision = scratch.precision;
            let packed = layers.iter().zip(&mut outs);
            let packed = packed.filter_map(|(layer, out)| Some((layer.operand(precision)?, &mut **out)));
            matmul_together_with(team, packed, x, &mut scratch.activations)?;
        }
        for (layer, out) in layers.iter().zip(outs).filter(|(layer, _)| layer.is_quantized()) {
            layer.add_bias(out);
        }
        Ok(())
    }

    /// `out = x W^T` of at most [`FEW`] tokens and the rows from `start` on: some rows of weights
    /// are converted as they stream from memory, and their pieces then meet all tokens while they
    /// are in the caches. Allocates nothing for weights in f32.
    fn few_product(
        &self,
        team: &Team<'_>,
        scratch: &mut LinearScratch,
        start: usize,
        x: &[f32],
        out: &mut [f32],
    ) {
        let cols = self.shape().cols;
        let tokens = x.len() / cols;
        let (rows, vectors) = (out.len() / tokens, scratch.vectors);
        let together = (CACHED / cols / 4 * 4).clamp(4, ROWS);
        let each = rows.div_ceil(together).div_ceil(16 * team.threads()) * together;
        // (rows, tokens): what a task makes lies together.
        let turned = scratch.room(out.len());
        team.chunks(turned, each * tokens, |task, turned| {
            let mut buffer = Vec::new();
            for (i, turned) in turned.chunks_mut(together * tokens).enumerate() {
                let first = start + task * each + i * together;
                let weights = self.weights.block(first..first + turned.len() / tokens, &mut buffer);
                block_product(&vectors, weights, x, tokens, turned);
            }
        });
        let turned = &*turned;
        team.chunks(out, rows, |token, out| {
            out.iter_mut().zip(turned[token..].iter().step_by(tokens)).for_each(|(out, v)| *out = *v);
        });
    }

    /// `out = x W^T`, block by block of W's rows from `start` on.
    fn matrix_product(&self, team: &Team<'_>, start: usize, x: &[f32], out: &mut [f32]) {
        let cols = self.shape().cols;
        let batch = x.len() / cols;
        let x = ArrayView2::from_shape((batch, cols), x).expect("length checked by the caller");
        let mut out =
            ArrayViewMut2::from_shape((batch, out.len() / batch), out).expect("length checked by the caller");
        let mut parts: Vec<_> = out.axis_chunks_iter_mut(Axis(1), BLOCK).collect();
        // Several blocks a task: they share a buffer.
        let each = parts.len().div_ceil(8 * team.threads());
        team.chunks(&mut parts, each, |task, parts| {
            let mut buffer = Vec::new();
            for (i, out) in parts.iter_mut().enumerate() {
                let first = start + (task * each + i) * BLOCK;
                let rows = first..first + out.ncols();
                let weights = self.weights.block(rows.clone(), &mut buffer);
                let weights = ArrayView2::from_shape((rows.len(), cols), weights).expect("one block of rows");
                general_mat_mul(1.0, &x, &weights.t(), 0.0, out);
            }
        });
    }
}

impl Weights {
    /// Some rows in f32, through `buffer` where they need conversion.
    fn block<'a>(&'a self, rows: Range<usize>, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        match self {
            Self::Dense(shape, weights) => &weights[rows.start * shape.cols..rows.end * shape.cols],
            Self::Stored(stored) => {
                let cols = stored.shape.cols;
                buffer.resize(rows.len() * cols, 0.0);
                stored.block(rows, buffer);
                buffer
            }
            Self::Packed(_) | Self::Fused(_) | Self::Banded(_) => {
                unreachable!("packed weights have their own product")
            }
        }
    }
}

/// `out = W x^T`, (rows, tokens), for at most [`ROWS`] rows of weights and [`FEW`] tokens.
fn block_product(vectors: &Vectors, weights: &[f32], x: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = out.len() / tokens;
    let cols = weights.len() / rows;
    let whole = cols / LANES * LANES;
    let mut sums = [[0.0; LANES]; ROWS * FEW];
    let sums = &mut sums[..rows * tokens];
    for first in (0..whole).step_by(PIECE) {
        let args = Products {
            weights: &weights[first..],
            weight_stride: cols,
            inputs: &x[first..],
            input_stride: cols,
            rows,
            tokens,
            width: PIECE.min(whole - first),
        };
        vectors.products(&args, sums);
    }
    let rows = weights.chunks_exact(cols).zip(sums.chunks(tokens));
    for (out, (weights, sums)) in out.chunks_exact_mut(tokens).zip(rows) {
        for ((out, sums), x) in out.iter_mut().zip(sums).zip(x.chunks_exact(cols)) {
            *out = finish(*sums, &weights[whole..], &x[whole..]);
        }
    }
}

/// `out[r] = product(r)`, rows shared among threads where there are enough.
pub(crate) fn vector_product(
    team: &Team<'_>,
    shape: Shape,
    out: &mut [f32],
    product: impl Fn(usize) -> f32 + Sync,
) {
    let rows = (SERIAL / shape.cols).max(1);
    team.chunks(out, rows, |chunk, out| {
        for (i, out) in out.iter_mut().enumerate() {
            *out = product(chunk * rows + i);
        }
    });
}
