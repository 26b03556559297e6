//! The scales of weights in 8-bit floats.
//!
//! Checkpoints in FP8 store a matrix `name` as E4M3 and beside it what its numbers are multiplied
//! by, as `name_scale_inv` (DeepSeek-V3, Qwen3, Ministral 3; by its use a scale, not the inverse of
//! one) or `name_scale` (`compressed-tensors`): one scale for all, one for each row, or one for
//! each block of 128 x 128. Scales of activations, which some have as well, are for machines that
//! multiply in FP8 and are not needed here.

use std::sync::Arc;

use super::Checkpoint;
use crate::dtype::Dtype;
use crate::error::Error;

/// Rows and columns of a block.
const BLOCK: usize = 128;
/// What the name of a tensor is followed by.
const SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];
/// Ends of names of scales that nobody here needs.
const OF_ACTIVATIONS: [&str; 3] = [".activation_scale", ".input_scale", ".input_scale_ub"];

/// Factors of the numbers of a matrix, or of some rows of one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scale {
    values: Arc<[f32]>, // (block of rows, block of columns)
    /// Rows and columns that share one.
    block: [usize; 2],
    /// Blocks side by side.
    across: usize,
    /// The row of the matrix that is row 0 here.
    first: usize,
}

impl Scale {
    /// Multiplies the numbers of columns from `col` on of a row.
    pub(super) fn apply(&self, row: usize, col: usize, numbers: &mut [f32]) {
        let [rows, cols] = self.block;
        let scales = &self.values[(self.first + row) / rows * self.across..][..self.across];
        let mut rest = numbers;
        let mut at = col;
        while !rest.is_empty() {
            let len = rest.len().min(cols - at % cols);
            let (some, behind) = rest.split_at_mut(len);
            some.iter_mut().for_each(|w| *w *= scales[at / cols]);
            (rest, at) = (behind, at + len);
        }
    }

    /// That of the rows from `row` on.
    pub(super) fn starting_at(&self, row: usize) -> Self {
        Self { first: self.first + row, ..self.clone() }
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }
}

impl Checkpoint {
    /// Gives every tensor of 8-bit floats its scale, which is no tensor of its own any more.
    ///
    /// # Errors
    /// [`Error::Tensor`] for one without a scale, or with one of another shape; what reading a
    /// scale refuses.
    pub(super) fn adopt_scales(&mut self) -> Result<(), Error> {
        let of_8_bits = |(name, entry): (&String, &super::Entry)| {
            (entry.info.dtype == Dtype::F8E4M3).then(|| name.clone())
        };
        let coded: Vec<_> = self.tensors.iter().filter_map(of_8_bits).collect();
        if coded.is_empty() {
            return Ok(());
        }
        self.tensors.retain(|name, _| !OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)));
        for name in coded {
            // Some may have been scales themselves.
            let Some(entry) = self.tensors.get(&name) else { continue };
            let (matrix, (rows, cols)) = (entry.info.shape.len() == 2, entry.info.rows_cols());
            let Some(scale_name) =
                SUFFIXES.map(|end| format!("{name}{end}")).into_iter().find(|n| self.contains(n))
            else {
                let rule = format!(
                    "should have its scale beside it, as `{name}{}` or `{name}{}`",
                    SUFFIXES[0], SUFFIXES[1]
                );
                return Err(Error::Tensor { path: self.shard_of(&name)?.path.clone(), tensor: name, rule });
            };
            let shape = self.info(&scale_name)?.shape.clone();
            let values: Arc<[f32]> = self.to_f32(&scale_name)?.into();
            let blocks = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
            let (block, across) = match shape[..] {
                [] | [1] | [1, 1] => ([usize::MAX, usize::MAX], 1),
                [n] | [n, 1] if matrix && n == rows => ([1, usize::MAX], 1),
                [down, across] if matrix && [down, across] == blocks => ([BLOCK, BLOCK], across),
                _ => {
                    let others = format!(
                        ", {rows} (one for each row of `{name}`) or {blocks:?} (one for each {BLOCK} x {BLOCK} of its {rows} x {cols})"
                    );
                    let others = if matrix { others } else { format!(" for `{name}`, which is no matrix") };
                    let rule = format!("should be one number{others}, got {shape:?}");
                    let path = self.shard_of(&scale_name)?.path.clone();
                    return Err(Error::Tensor { path, tensor: scale_name, rule });
                }
            };
            self.tensors.remove(&scale_name);
            let entry = self.tensors.get_mut(&name).expect("it was just found");
            entry.scale = Some(Scale { values, block, across, first: 0 });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_meets_the_scale_of_its_block() {
        let (rows, cols) = (5usize, 11usize);
        for (block, across) in [([usize::MAX, usize::MAX], 1), ([1, usize::MAX], 1), ([2, 3], 4), ([3, 4], 3)]
        {
            let down = rows.div_ceil(block[0]);
            let values: Arc<[f32]> = (0..down * across).map(|i| 2.0 + i as f32).collect();
            let scale = Scale { values: values.clone(), block, across, first: 0 };
            let want = |r: usize, c: usize| values[r / block[0] * across + c / block[1]];
            for first in 0..rows {
                let part = scale.starting_at(first);
                for row in 0..rows - first {
                    for from in 0..cols {
                        let mut numbers = vec![1.0; cols - from];
                        part.apply(row, from, &mut numbers);
                        for (i, got) in numbers.iter().enumerate() {
                            assert_eq!(
                                *got,
                                want(first + row, from + i),
                                "{block:?}, row {first} + {row}, column {from} + {i}"
                            );
                        }
                    }
                }
            }
        }
    }
}
