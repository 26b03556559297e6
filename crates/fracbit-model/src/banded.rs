//! Layers whose rows lie in several packed matrices.

use fracbit_base::{Shape, ShapeError};
use fracbit_kernels::{PackedMatrix, RowsOf, Team};

use crate::linear::{LinearScratch, PackedProduct};

/// Rows in several packed matrices: embeddings whose frequent tokens have more bits than the rare
/// ones.
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
    /// rows).
    pub(crate) fn product(
        &self,
        team: &Team<'_>,
        x: &[f32],
        packed: PackedProduct,
        scratch: &mut LinearScratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let mut rest = &self.rows[..];
        for matrix in &self.bands {
            let shape = matrix.shape();
            let (rows, behind) = rest.split_at(shape.rows);
            rest = behind;
            scratch.quantize(x, shape.cols)?;
            let len = x.len() / shape.cols * shape.rows;
            scratch.room(len);
            let whole = RowsOf::all(matrix).at(scratch.precision);
            packed(team, whole, x, &mut scratch.activations, &mut scratch.fused[..len])?;
            let products = scratch.fused[..len].chunks_exact(shape.rows.max(1));
            for (out, products) in out.chunks_exact_mut(self.rows.len()).zip(products) {
                rows.iter().zip(products).for_each(|(&row, &y)| out[row as usize] = y);
            }
        }
        Ok(())
    }
}
