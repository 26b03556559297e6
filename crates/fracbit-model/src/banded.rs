//! Layers whose rows lie in several packed matrices.

use std::array;

use fracbit_base::{Shape, ShapeError};
use fracbit_kernels::{PARTS, PackedMatrix, RowsOf, Team, matmul_parts_with, matmul_refined_with};

use crate::linear::LinearScratch;

/// Rows in several packed matrices: those whose errors cost most have more bits than the others.
#[derive(Debug)]
pub(crate) struct Banded {
    pub(crate) bands: Vec<PackedMatrix>,
    /// Band, and row within it, of every row.
    pub(crate) places: Vec<(u8, u32)>,
    /// Rows of all bands, one band after another, each in ascending order.
    rows: Vec<u32>,
}

impl Banded {
    /// See [`Linear::banded`](crate::Linear::banded).
    pub(crate) fn new(bands: Vec<PackedMatrix>, band_of: &[u8]) -> Result<Self, ShapeError> {
        const OP: &str = "banded layer";
        if bands.is_empty() || bands.len() > PARTS {
            return Err(ShapeError::new(OP, "bands", format_args!("1 to {PARTS}"), bands.len()));
        }
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); bands.len()];
        let mut places = Vec::with_capacity(band_of.len());
        for (row, &band) in band_of.iter().enumerate() {
            let Some(rows) = members.get_mut(usize::from(band)) else {
                return Err(ShapeError::new(OP, "band", format_args!("below {}", bands.len()), band));
            };
            let too_many = |count| ShapeError::new(OP, "rows", "below 2^32", count);
            places.push((band, u32::try_from(rows.len()).map_err(|_| too_many(rows.len()))?));
            rows.push(u32::try_from(row).map_err(|_| too_many(row))?);
        }
        for (matrix, rows) in bands.iter().zip(&members) {
            ShapeError::check_len(OP, "rows of a band", rows.len(), matrix.shape().rows)?;
            ShapeError::check_len(OP, "columns of a band", bands[0].shape().cols, matrix.shape().cols)?;
        }
        Ok(Self { bands, places, rows: members.concat() })
    }

    /// Outputs by inputs.
    pub(crate) fn shape(&self) -> Shape {
        Shape::new(self.rows.len(), self.bands.first().map_or(0, |b| b.shape().cols))
    }

    /// The rows of one band after another times `x`, each put where it belongs in `out`, (batch,
    /// rows); `refined` as the head of a model is.
    pub(crate) fn product(
        &self,
        team: &Team<'_>,
        x: &[f32],
        refined: bool,
        scratch: &mut LinearScratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let Shape { rows: all, cols } = self.shape();
        scratch.quantize(x, cols)?;
        let batch = x.len() / cols.max(1);
        scratch.room(batch * all);
        let (activations, precision) = (&mut scratch.activations, scratch.precision);
        let whole = |matrix| RowsOf::all(matrix).at(precision);
        if !refined {
            let bands: [_; PARTS] = array::from_fn(|i| whole(self.bands.get(i).unwrap_or(&self.bands[0])));
            let bands = &bands[..self.bands.len()];
            matmul_parts_with(team, bands, x, activations, &mut scratch.fused[..batch * all])?;
            self.place(team, 0, &scratch.fused[..batch * all], out);
            return Ok(());
        }
        let mut first = 0;
        for matrix in &self.bands {
            let products = &mut scratch.fused[..batch * matrix.shape().rows];
            matmul_refined_with(team, whole(matrix), x, activations, products)?;
            self.place(team, first, products, out);
            first += matrix.shape().rows;
        }
        Ok(())
    }

    /// Puts products, (batch, some of the rows from `first` on), where they belong.
    fn place(&self, team: &Team<'_>, first: usize, products: &[f32], out: &mut [f32]) {
        let batch = out.len() / self.rows.len();
        let count = products.len() / batch;
        let rows = &self.rows[first..first + count];
        team.chunks(out, self.rows.len(), |token, out| {
            let products = &products[token * count..(token + 1) * count];
            rows.iter().zip(products).for_each(|(&row, &y)| out[row as usize] = y);
        });
    }
}
