//! Matrices whose rows lie in several packed ones.

use crate::{PackedMatrix, Precision};
use fracbit_base::{Shape, ShapeError};

/// Most bands of a matrix.
pub const BANDS: usize = 4;

/// A matrix whose rows lie in several packed matrices, its bands: rows whose errors cost most can
/// have more bits than the others.
#[derive(Debug)]
pub struct BandedMatrix {
    bands: Vec<PackedMatrix>,
    /// Band, and row within it, of every row.
    places: Vec<(u8, u32)>,
    /// Rows of all bands, one band after another, each in ascending order: every row once.
    rows: Vec<u32>,
}

impl BandedMatrix {
    /// Row r is in band `band_of[r]`, behind the earlier rows of that band.
    ///
    /// # Errors
    /// When there are no bands or more than [`BANDS`], a band has not as many rows as are said to
    /// lie in it, or columns differ.
    pub fn new(bands: Vec<PackedMatrix>, band_of: &[u8]) -> Result<Self, ShapeError> {
        const OP: &str = "banded matrix";
        if bands.is_empty() || bands.len() > BANDS {
            return Err(ShapeError::new(OP, "bands", format_args!("1 to {BANDS}"), bands.len()));
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
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape::new(self.rows.len(), self.bands[0].shape().cols)
    }

    /// The bands, at least one.
    #[must_use]
    pub fn bands(&self) -> &[PackedMatrix] {
        &self.bands
    }

    /// Weights of row `r` as the planes of a precision have them.
    ///
    /// # Panics
    /// When `r` is outside the matrix or `out` is not one row long.
    pub fn row_at(&self, r: usize, precision: Precision, out: &mut [f32]) {
        let (band, row) = self.places[r];
        self.bands[usize::from(band)].row_at(row as usize, precision, out);
    }

    /// The bands, and which rows of the matrix each has.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&PackedMatrix, BandRows<'_>)> {
        let mut left = &self.rows[..];
        self.bands.iter().map(move |band| {
            let (rows, rest) = left.split_at(band.shape().rows);
            left = rest;
            (band, BandRows(rows))
        })
    }
}

/// Rows of a [`BandedMatrix`] that one of its bands has: below the matrix's number of rows, and
/// none of them in another band.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BandRows<'a>(&'a [u32]);

impl<'a> BandRows<'a> {
    pub(crate) const fn get(self) -> &'a [u32] {
        self.0
    }
}
