//! Matrices that stay in the checkpoint's memory map, and how their rows become the model's.

use std::ops::Range;
use std::sync::Arc;

use fracbit_base::Shape;
use fracbit_io::{Checkpoint, Dtype, ModelConfig, TensorView, to_f32_into};
use fracbit_kernels::Team;
use fracbit_kernels::vectors::plain::{LANES, accumulate, finish};
use rayon::prelude::*;

use crate::id::{LayerLinear, LinearId};
use crate::linear::{CONVERT, vector_product};

/// How a matrix of the model follows from the stored one; [`crate::WeightSource`] says why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Change {
    /// Of every weight.
    pub(crate) factor: f32,
    /// Where the rows of heads lie otherwise.
    pub(crate) order: Option<Order>,
}

/// How the rows of a head that turn are stored: all in front, in two halves or as pairs of
/// neighbours. The runtime has them in front of each half of the head, those that stand still
/// behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Order {
    /// Half of the rows that turn.
    pub(crate) turn: usize,
    /// Rows of a head.
    pub(crate) head: usize,
    /// They are pairs.
    pub(crate) pairs: bool,
}

impl Order {
    /// Where row `row` is stored.
    fn stored(self, row: usize) -> usize {
        let Self { turn, head, pairs } = self;
        let (start, plane, second) = (row / head * head, row % (head / 2), row % head / (head / 2));
        start
            + if plane >= turn {
                turn + plane + second * (head / 2 - turn)
            } else if pairs {
                2 * plane + second
            } else {
                plane + second * turn
            }
    }
}

impl Change {
    /// Rows as they are stored.
    pub(crate) const NONE: Self = Self { factor: 1.0, order: None };

    /// That of a matrix.
    pub(crate) fn of(config: &ModelConfig, id: LinearId) -> Self {
        let (turn, head, pairs) = (config.rope.dim, config.head_dim, config.interleaved_rope);
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        match id {
            LinearId::Layer(_, LayerLinear::O | LayerLinear::Down) if !config.post_norms => {
                Self { factor: config.residual_factor as f32, ..Self::NONE }
            }
            LinearId::Layer(_, LayerLinear::Q | LayerLinear::K) if turn < head || pairs => {
                Self { order: Some(Order { turn: turn / 2, head, pairs }), ..Self::NONE }
            }
            _ => Self::NONE,
        }
    }

    /// Where row `row` is stored.
    fn stored(self, row: usize) -> usize {
        self.order.map_or(row, |order| order.stored(row))
    }

    /// Undoes [`Change::apply`], up to the rounding of the factor.
    pub(crate) fn undo(self, data: &mut [f32], width: usize) {
        if self.factor != 1.0 {
            data.iter_mut().for_each(|w| *w /= self.factor);
        }
        if let Some(order) = self.order {
            data.par_chunks_exact_mut(order.head * width).for_each(|rows| {
                let own = rows.to_vec();
                for (row, values) in own.chunks_exact(width).enumerate() {
                    rows[order.stored(row) * width..][..width].copy_from_slice(values);
                }
            });
        }
    }

    /// Changes stored rows of `width` (1 for a bias), whole heads of them, to the model's.
    pub(crate) fn apply(self, data: &mut [f32], width: usize) {
        if self.factor != 1.0 {
            data.iter_mut().for_each(|w| *w *= self.factor);
        }
        if let Some(order) = self.order {
            data.par_chunks_exact_mut(order.head * width).for_each(|rows| {
                let stored = rows.to_vec();
                for (row, out) in rows.chunks_exact_mut(width).enumerate() {
                    out.copy_from_slice(&stored[order.stored(row) * width..][..width]);
                }
            });
        }
    }
}

/// A matrix left in the checkpoint: one tensor, or several of as many rows each, one above the
/// other.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) names: Vec<String>,
    pub(crate) shape: Shape,
    pub(crate) dtype: Dtype,
    pub(crate) change: Change,
}

impl Stored {
    fn view(&self, piece: usize) -> TensorView<'_> {
        self.checkpoint.tensor(&self.names[piece]).expect("found when the layer was made")
    }

    /// Some rows, tensor by tensor: which, and rows of it.
    fn pieces(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let each = self.shape.rows / self.names.len();
        (rows.start / each.max(1)..rows.end.div_ceil(each.max(1))).map(move |piece| {
            let first = piece * each;
            (piece, rows.start.max(first) - first..rows.end.min(first + each) - first)
        })
    }

    /// Some rows in f32.
    pub(crate) fn block(&self, rows: Range<usize>, out: &mut [f32]) {
        let cols = self.shape.cols;
        let mut rest = &mut *out;
        for (piece, rows) in self.pieces(rows) {
            let (out, behind) = rest.split_at_mut(rows.len() * cols);
            rest = behind;
            let view = self.view(piece);
            for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                view.row_into(self.change.stored(row), 0..cols, out);
            }
        }
        self.multiply(out);
    }

    fn multiply(&self, weights: &mut [f32]) {
        if self.change.factor != 1.0 {
            weights.iter_mut().for_each(|w| *w *= self.change.factor);
        }
    }

    /// `out = W x` for some rows.
    pub(crate) fn vector_product(&self, team: &Team<'_>, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let mut rest = out;
        for (piece, rows) in self.pieces(rows) {
            let (out, behind) = rest.split_at_mut(rows.len());
            rest = behind;
            self.piece_product(team, piece, rows, x, out);
        }
    }

    fn piece_product(&self, team: &Team<'_>, piece: usize, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let view = self.view(piece);
        let shape = Shape::new(rows.len(), self.shape.cols);
        let stored = |row: usize| self.change.stored(rows.start + row);
        if view.dtype == Dtype::Bf16 && self.change.factor == 1.0 && view.row_bytes(0).is_some() {
            let row_bytes = |row: usize| view.row_bytes(stored(row)).unwrap_or_default();
            return vector_product(team, shape, out, |row| dot_bf16(row_bytes(row), x));
        }
        vector_product(team, shape, out, |row| {
            let mut buffer = [0.0; CONVERT];
            let mut sums = [0.0; LANES];
            let mut rest = 0..0;
            for (part, x) in x.chunks(CONVERT).enumerate() {
                let buffer = &mut buffer[..x.len()];
                let first = part * CONVERT;
                view.row_into(stored(row), first..first + x.len(), buffer);
                self.multiply(buffer);
                accumulate(&mut sums, buffer, x);
                rest = x.len() / LANES * LANES..x.len();
            }
            // Only the last chunk can have a tail.
            let tail = &buffer[rest];
            finish(sums, tail, &x[x.len() - tail.len()..])
        });
    }
}

/// The inner product with a row of little-endian bf16, without a buffer: such a weight is the upper
/// half of an f32.
fn dot_bf16(row: &[u8], x: &[f32]) -> f32 {
    let (row, row_rest) = row.as_chunks::<{ 2 * LANES }>();
    let (x, x_rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (row, x) in row.iter().zip(x) {
        for (s, (w, x)) in sums.iter_mut().zip(row.as_chunks::<2>().0.iter().zip(x)) {
            *s += f32::from_bits(u32::from(u16::from_le_bytes(*w)) << 16) * x;
        }
    }
    let mut tail = [0.0; LANES];
    let tail = &mut tail[..x_rest.len()];
    to_f32_into(Dtype::Bf16, row_rest, tail);
    finish(sums, tail, x_rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_where_they_are_moved_from() {
        for (turn, head) in [(1, 4), (2, 4), (3, 8), (6, 16), (48, 128), (1, 2), (32, 128)] {
            for pairs in [false, true] {
                let change = Change { factor: 2.0, order: Some(Order { turn, head, pairs }) };
                let mut rows: Vec<f32> = (0..3 * head).map(|i| i as f32).collect();
                change.apply(&mut rows, 1);
                let mut found = vec![false; 3 * head];
                for (row, value) in rows.iter().enumerate() {
                    assert_eq!(*value, 2.0 * change.stored(row) as f32, "{turn} of {head}, row {row}");
                    found[change.stored(row)] = true;
                }
                assert!(found.iter().all(|&f| f), "every row has a place");
                // Planes of the runtime, (k, k + head / 2), are those of the checkpoint.
                let plane = |k: usize| if pairs { (2 * k, 2 * k + 1) } else { (k, k + turn) };
                assert!((0..turn).all(|k| (change.stored(k), change.stored(k + head / 2)) == plane(k)));
            }
        }
    }
}
