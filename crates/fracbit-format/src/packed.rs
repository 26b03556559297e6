//! A checked view of a packed matrix.

use crate::{
    Codebook, Grouping, Layout, PackedMatrixData, Plane, PlaneName, SchemeSpec, Segment, TILE, TILE_COLS,
    TILE_ROWS,
};
use fracbit_base::{Scheme, Shape, ShapeError};
use half::f16;
use std::sync::Arc;

/// The elements of the planes of a packed matrix.
#[derive(Clone, Copy, Debug)]
pub struct Planes<'a> {
    /// Coded tiles: [`Layout::len`] bytes.
    pub codes: &'a [u8],
    /// Bytes of [`SecondLevel`](crate::SecondLevel), (rows, groups of the second level); empty for
    /// a scheme of one level.
    pub second_level: &'a [u8],
    /// Scales, (planes, rows, groups).
    pub scales: &'a [f16],
    /// A factor for each plane of a nested scheme.
    pub gains: &'a [f32],
}

/// Codes, scales and codebooks of one matrix, checked to belong together.
///
/// Weight `(r, c)` is the sum over planes of `gain * scales[r * groups + c / group] * step *
/// integer`, where `groups = ceil(cols / group)`. The integer of a progressive scheme is the weight
/// of its first level ([`SecondLevel`](crate::SecondLevel)).
#[derive(Clone, Debug)]
pub struct PackedView<'a> {
    layout: Layout,
    codebooks: Vec<&'a Codebook>,
    planes: Planes<'a>,
    group: usize,
    second_group: usize,
}

/// Parts that do not make a packed matrix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PackedError {
    /// A buffer has the wrong length.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The codebooks are not those of the scheme's segments.
    #[error("packed matrix: expected the codebook of {want}, got {got}")]
    Codebook {
        /// The scheme of the segment.
        want: Scheme,
        /// What was given.
        got: String,
    },
    /// The gain or a scale is not finite.
    #[error("packed matrix: {0} should be finite")]
    NotFinite(&'static str),
    /// Matrices that cannot lie one above the other.
    #[error(
        "stacked matrices: should have one scheme, width, grouping and set of tables, and whole tiles but for the last"
    )]
    Kinds,
    /// Matrices whose scales have no common gain.
    #[error("stacked matrices: the gain is too far from those of the others")]
    Gains,
}

impl<'a> PackedView<'a> {
    /// Checks that the parts fit: `planes` have the lengths that [`Planes`] says, `group` (input
    /// columns per scale) is a positive multiple of 16, `codebooks` holds the codebook of each
    /// segment.
    ///
    /// # Errors
    /// When a length, codebook or number does not fit.
    pub fn new(
        scheme: Scheme,
        shape: Shape,
        codebooks: &[&'a Codebook],
        given: Planes<'a>,
        group: usize,
    ) -> Result<Self, PackedError> {
        const OP: &str = "packed matrix";
        let Planes { codes, second_level, scales, gains } = given;
        // With edges padded and two bytes a weight, which no scheme's codes and scales exceed: what
        // follows cannot overflow.
        let padded = |n: usize| n.checked_next_multiple_of(TILE_COLS);
        let fits = || padded(shape.rows)?.checked_mul(padded(shape.cols)?)?.checked_mul(2);
        if fits().is_none() {
            return Err(ShapeError::new(OP, "shape", "small enough for memory", shape).into());
        }
        let layout = Layout::new(scheme, shape);
        ShapeError::check_len(OP, "codes", layout.len(), codes.len())?;
        if group == 0 || !group.is_multiple_of(TILE_COLS) {
            return Err(ShapeError::new(OP, "group", "a positive multiple of 16", group).into());
        }
        let padded_row = Grouping::Row.columns(shape.cols);
        let second_level_groups = SchemeSpec::of(scheme).second_level;
        if second_level_groups.is_some() && group != padded_row {
            let want = format_args!("the whole row, for {scheme}");
            return Err(ShapeError::new(OP, "group", want, group).into());
        }
        let seconds = second_level_groups.map_or(0, |groups| groups.groups(shape.cols));
        let of = PlaneName::SecondLevel.suffix();
        ShapeError::check_len(OP, of, shape.rows * seconds, second_level.len())?;
        let planes = scheme.planes();
        ShapeError::check_len(OP, "scales", planes * shape.rows * shape.cols.div_ceil(group), scales.len())?;
        ShapeError::check_len(OP, "gain", planes, gains.len())?;
        ShapeError::check_len(OP, "codebooks", layout.segments().len(), codebooks.len())?;
        for (segment, codebook) in layout.segments().iter().zip(codebooks) {
            if codebook.scheme() != segment.scheme {
                return Err(PackedError::Codebook {
                    want: segment.scheme,
                    got: codebook.scheme().to_string(),
                });
            }
        }
        if !gains.iter().all(|gain| gain.is_finite()) {
            return Err(PackedError::NotFinite("the gain"));
        }
        if !scales.iter().all(|s| s.is_finite()) {
            return Err(PackedError::NotFinite("every scale"));
        }
        Ok(Self::checked(layout, codebooks.to_vec(), given, group))
    }

    /// The view of parts that were checked before.
    pub(crate) fn checked(
        layout: Layout,
        codebooks: Vec<&'a Codebook>,
        planes: Planes<'a>,
        group: usize,
    ) -> Self {
        let second_level = SchemeSpec::of(layout.scheme()).second_level;
        let second_group = second_level.map_or(0, |groups| groups.columns(layout.shape().cols));
        Self { layout, codebooks, planes, group, second_group }
    }

    /// A copy that owns its parts.
    #[must_use]
    pub fn to_data(&self) -> PackedMatrixData<'static> {
        let row = Grouping::Row.columns(self.shape().cols) == self.group;
        let grouping = if row { Grouping::Row } else { Grouping::Columns(self.group) };
        let books = self.codebooks.iter().map(|&book| Arc::new(book.clone())).collect();
        let Planes { codes, second_level, scales, gains } = self.planes;
        let planes = SchemeSpec::of(self.layout.scheme()).planes.into_iter().map(|plane| match plane.name {
            PlaneName::Codes => Plane::U8(codes.to_vec().into()),
            PlaneName::SecondLevel => Plane::U8(second_level.to_vec().into()),
            PlaneName::Scales => Plane::F16(scales.to_vec()),
            PlaneName::Gain => Plane::F32(gains.to_vec()),
        });
        PackedMatrixData::new(self.layout.scheme(), self.shape(), grouping, books, planes)
            .expect("parts of a view fit together")
    }

    /// Where the tiles are.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The shape without padding.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// One codebook per segment of the layout.
    #[must_use]
    pub fn codebooks(&self) -> &[&'a Codebook] {
        &self.codebooks
    }

    /// All codes.
    #[must_use]
    pub const fn codes(&self) -> &'a [u8] {
        self.planes.codes
    }

    /// Scales, `planes x rows x groups`, row-major.
    #[must_use]
    pub const fn scales(&self) -> &'a [f16] {
        self.planes.scales
    }

    /// Bytes of [`SecondLevel`](crate::SecondLevel), (rows, groups of the second level), of a
    /// progressive scheme.
    #[must_use]
    pub const fn second_level(&self) -> &'a [u8] {
        self.planes.second_level
    }

    /// Input columns that share a [`SecondLevel`](crate::SecondLevel); 0 where there is none.
    #[must_use]
    pub const fn second_group(&self) -> usize {
        self.second_group
    }

    /// Input columns that share a scale.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.group
    }

    /// Scales of a row.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.shape().cols.div_ceil(self.group)
    }

    /// Factor common to all scales of the first plane.
    #[must_use]
    pub const fn gain(&self) -> f32 {
        self.planes.gains[0]
    }

    /// Factor common to all scales of a plane (it keeps them inside the range of f16), for each.
    #[must_use]
    pub const fn gains(&self) -> &'a [f32] {
        self.planes.gains
    }

    /// Integers of tile (`down`, `across`) of a plane, row-major.
    pub fn expand_tile(&self, plane: usize, down: usize, across: usize, out: &mut [i16; TILE]) {
        let codebook = self.codebooks[self.segment_of(plane, across)];
        // Padded rows have no scale; their integers mean nothing.
        let books = std::array::from_fn(|r| {
            let row = (down * TILE_ROWS + r).min(self.shape().rows - 1);
            self.book(codebook, plane, row, across * TILE_COLS)
        });
        codebook.expand_tile_by(&self.planes.codes[self.layout.tile(plane, down, across)], &books, out);
    }

    /// What a codebook has to know of a weight beside its code.
    fn book(&self, codebook: &Codebook, plane: usize, row: usize, col: usize) -> u8 {
        if self.second_group == 0 {
            return codebook.book_of(self.scale(plane, row, col));
        }
        let groups = self.shape().cols.div_ceil(self.second_group);
        self.planes.second_level[row * groups + col / self.second_group]
    }

    fn scale(&self, plane: usize, row: usize, col: usize) -> f16 {
        self.planes.scales[(plane * self.shape().rows + row) * self.groups() + col / self.group]
    }

    /// The factor that turns an integer of a plane at (`row`, `col`) into a weight.
    #[must_use]
    pub fn factor(&self, plane: usize, row: usize, col: usize) -> f32 {
        let step = self.codebooks[self.segment_of(plane, col / TILE_COLS)].step();
        self.planes.gains[plane] * self.scale(plane, row, col).to_f32() * step
    }

    /// Weights of one row.
    ///
    /// # Panics
    /// When `row` is outside the matrix or `out` is not one row long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.shape().cols, "one row of weights");
        let mut integers = [0; TILE_COLS];
        for plane in 0..self.planes.gains.len() {
            for (across, values) in out.chunks_mut(TILE_COLS).enumerate() {
                let code = &self.planes.codes[self.layout.tile(plane, row / TILE_ROWS, across)];
                let codebook = self.codebooks[self.segment_of(plane, across)];
                let book = self.book(codebook, plane, row, across * TILE_COLS);
                codebook.expand_tile_row(code, row % TILE_ROWS, book, &mut integers);
                put(plane, &integers, self.factor(plane, row, across * TILE_COLS), values);
            }
        }
    }

    /// All weights, row-major.
    #[must_use]
    pub fn dequantize(&self) -> Vec<f32> {
        let Shape { rows, cols } = self.shape();
        let mut out = vec![0.0; rows * cols];
        let mut tile = [0; TILE];
        for plane in 0..self.planes.gains.len() {
            for down in 0..self.layout.tiles_down() {
                for across in 0..self.layout.tiles_across() {
                    self.expand_tile(plane, down, across, &mut tile);
                    let (r0, c0) = (down * TILE_ROWS, across * TILE_COLS);
                    let width = TILE_COLS.min(cols - c0);
                    for r in r0..rows.min(r0 + TILE_ROWS) {
                        let integers = &tile[(r - r0) * TILE_COLS..][..width];
                        let out = &mut out[r * cols + c0..][..width];
                        put(plane, integers, self.factor(plane, r, c0), out);
                    }
                }
            }
        }
        out
    }

    fn segment_of(&self, plane: usize, across: usize) -> usize {
        let of = |s: &Segment| s.plane == plane && across < s.end;
        self.layout.segments().iter().position(of).expect("tile column inside the matrix")
    }
}

/// The weights of a plane: the first is what `out` becomes, others are added.
fn put(plane: usize, integers: &[i16], factor: f32, out: &mut [f32]) {
    let values = out.iter_mut().zip(integers).map(|(v, &i)| (v, f32::from(i) * factor));
    values.for_each(|(v, weight)| *v = if plane == 0 { weight } else { *v + weight });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_beyond_memory_are_refused() {
        let scheme: Scheme = "nuq-2".parse().unwrap();
        let book = Codebook::new(scheme, vec![-3, -1, 1, 3], 0.5).unwrap();
        let none = Planes { codes: &[], second_level: &[], scales: &[], gains: &[1.0] };
        for (rows, cols) in [(usize::MAX, 16), (16, usize::MAX), (1 << 40, 1 << 40), (usize::MAX, usize::MAX)]
        {
            // Products of these sizes wrap to zero or nearly: empty buffers must not seem to fit.
            let view = PackedView::new(scheme, Shape::new(rows, cols), &[&book], none, 16);
            assert!(matches!(view, Err(PackedError::Shape(_))), "{rows} x {cols}");
        }
        assert!(PackedView::new(scheme, Shape::new(0, 16), &[&book], none, 16).is_ok());
    }
}
