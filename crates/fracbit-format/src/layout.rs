//! Tiles of a packed matrix.

use fracbit_base::{Columns, Component, Rate, Scheme, Shape};

/// Output rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Input columns of a tile.
pub const TILE_COLS: usize = 16;
/// Weights of a tile.
pub const TILE: usize = TILE_ROWS * TILE_COLS;

/// A run of tile columns coded with one scalar, vector or trellis scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The scheme, one with a table of its own.
    pub scheme: Scheme,
    /// The plane that it belongs to; weights are the sum of all planes.
    pub plane: usize,
    /// First tile column.
    pub start: usize,
    /// One past the last tile column.
    pub end: usize,
    /// Byte offset of the first tile inside a row of tiles.
    pub offset: usize,
    /// Bytes of one tile.
    pub tile_bytes: usize,
}

/// Where each tile of a packed matrix lives.
///
/// Tiles of one row of tiles are contiguous, left to right; rows of tiles follow each other.
/// Half-TCQ has two segments: the first `ceil(n / 2)` of `n` tile columns at the lower rate, the
/// rest at the higher. A nested scheme has one for each plane over all tile columns, one plane
/// behind the other within the row of tiles: what a precision needs of it is one run of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    scheme: Scheme,
    shape: Shape,
    segments: Vec<Segment>,
    row_bytes: usize,
}

impl Layout {
    /// The layout of a matrix of `shape` in `scheme`; edges are padded to whole tiles.
    #[must_use]
    pub fn new(scheme: Scheme, shape: Shape) -> Self {
        let across = shape.cols.div_ceil(TILE_COLS);
        let half = across.div_ceil(2);
        let mut segments = Vec::with_capacity(3);
        let mut offset = 0;
        for Component { scheme, columns, plane } in scheme.components() {
            let (start, end) = match columns {
                Columns::All => (0, across),
                Columns::FirstHalf => (0, half),
                Columns::SecondHalf => (half, across),
            };
            if start < end {
                let tile_bytes = usize::from(scheme.quarters()) * TILE / 32;
                segments.push(Segment { scheme, plane, start, end, offset, tile_bytes });
                offset += (end - start) * tile_bytes;
            }
        }
        Self { scheme, shape, segments, row_bytes: offset }
    }

    /// The scheme.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The shape without padding.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Runs of tile columns with one scheme each, plane by plane, left to right (two for half-TCQ,
    /// one for each plane of a nested scheme, otherwise one).
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Rows of tiles.
    #[must_use]
    pub const fn tiles_down(&self) -> usize {
        self.shape.rows.div_ceil(TILE_ROWS)
    }

    /// Tiles in a row of tiles.
    #[must_use]
    pub const fn tiles_across(&self) -> usize {
        self.shape.cols.div_ceil(TILE_COLS)
    }

    /// Bytes of one row of tiles.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of the whole packed matrix, without scales.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a length in bytes, not a collection")]
    pub const fn len(&self) -> usize {
        self.tiles_down() * self.row_bytes
    }

    /// Byte range of tile (`down`, `across`) of a plane.
    ///
    /// # Panics
    /// When the tile is outside the matrix.
    #[must_use]
    pub fn tile(&self, plane: usize, down: usize, across: usize) -> std::ops::Range<usize> {
        assert!(down < self.tiles_down(), "tile row {down} of {}", self.tiles_down());
        let segment = self
            .segments
            .iter()
            .find(|s| s.plane == plane && (s.start..s.end).contains(&across))
            .expect("tile column inside the matrix");
        let start = down * self.row_bytes + segment.offset + (across - segment.start) * segment.tile_bytes;
        start..start + segment.tile_bytes
    }

    /// Bits per weight of the codes, padding counted.
    #[must_use]
    pub fn rate(&self) -> Rate {
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let bits = (self.len() * 8) as f64 / self.shape.len().max(1) as f64;
        Rate::from_bits(bits.min(64.0)).expect("clamped to the range of a rate")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_buffer_once_and_in_order() {
        for scheme in Scheme::all() {
            for (rows, cols) in [(1, 1), (16, 16), (17, 48), (40, 100), (64, 192)] {
                let layout = Layout::new(scheme, Shape::new(rows, cols));
                let mut next = 0;
                for down in 0..layout.tiles_down() {
                    for plane in 0..scheme.planes() {
                        for across in 0..layout.tiles_across() {
                            let range = layout.tile(plane, down, across);
                            assert_eq!(range.start, next, "{scheme} {rows}x{cols} tile {down},{across}");
                            next = range.end;
                        }
                    }
                }
                assert_eq!(next, layout.len(), "{scheme} {rows}x{cols}");
            }
        }
    }

    #[test]
    fn whole_tiles_cost_exactly_the_rate() {
        for scheme in Scheme::all() {
            let layout = Layout::new(scheme, Shape::new(32, 64));
            assert_eq!(layout.rate(), scheme.rate(), "{scheme}");
        }
    }
}
