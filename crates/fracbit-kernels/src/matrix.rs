//! A packed matrix in memory.

use crate::{
    Isa, Kernels, Vectors,
    args::{BLOCK_TILES, Block, OVERREAD, WIDE_BLOCK_TILES},
    kernels::Body,
    lines::{self, Buffer},
};
use fracbit_base::{Rate, Scheme, Shape};
use fracbit_format::{Codebook, Grid, Layout, PackedView, Segment, TILE_COLS, TILE_ROWS};
use half::f16;

/// Bytes of the largest tile, at 8 bits a weight.
const MAX_TILE: usize = 256;

/// How much of a nested matrix a product reads; other matrices have one precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Precision(Option<Rate>);

impl Precision {
    /// All planes.
    pub const FULL: Self = Self(None);

    /// The planes that together have at most `rate` bits, and always the base.
    #[must_use]
    pub const fn at_most(rate: Rate) -> Self {
        Self(Some(rate))
    }

    /// The bound; `None` for all planes.
    #[must_use]
    pub const fn rate(self) -> Option<Rate> {
        self.0
    }
}

/// A packed matrix with the kernel bodies chosen for it.
///
/// Codes are held once, in the canonical order of `fracbit-format` or, where a body has a [`Packing`](crate::Packing), with
/// the bits of each tile permuted, at 64-byte alignment and with room behind for whole-vector loads. Scales are regrouped
/// by strip.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    layout: Layout,
    codes: Buffer,
    group: usize,
    vectors: Vectors,
    parts: Vec<Part>, // plane by plane
}

/// A segment with its body.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) segment: Segment,
    /// Of its plane.
    pub(crate) gain: f32,
    pub(crate) codebook: Codebook,
    pub(crate) body: Body,
    pub(crate) blocks: Vec<Block>,
    pub(crate) scales: Vec<f16>, // (strip, group, lane)
    pub(crate) first_group: usize,
    pub(crate) groups: usize,
    /// Place of each row among the lanes.
    lane_of: [u8; TILE_ROWS],
}

impl PackedMatrix {
    /// Copies `view` and chooses a body for each of its segments.
    #[must_use]
    pub fn new(kernels: &Kernels, view: &PackedView<'_>) -> Self {
        let layout = view.layout().clone();
        let mut codes = Buffer::zeroed(view.codes().len() + OVERREAD);
        lines::bytes_mut(&mut codes)[..view.codes().len()].copy_from_slice(view.codes());
        let parts: Vec<Part> = layout
            .segments()
            .iter()
            .zip(view.codebooks())
            .map(|(segment, codebook)| Part::new(kernels, view, *segment, codebook))
            .collect();
        for part in &parts {
            let Some(packing) = part.body.packing() else { continue };
            let Segment { start, end, offset, tile_bytes, .. } = part.segment;
            let mut canonical = [0; MAX_TILE];
            let canonical = &mut canonical[..tile_bytes];
            for strip in 0..layout.tiles_down() {
                let first = strip * layout.row_bytes() + offset;
                let tiles = &mut lines::bytes_mut(&mut codes)[first..first + (end - start) * tile_bytes];
                for tile in tiles.chunks_exact_mut(tile_bytes) {
                    canonical.copy_from_slice(tile);
                    (packing.pack)(&part.codebook, canonical, tile);
                }
            }
        }
        Self { layout, codes, group: view.group(), vectors: kernels.vectors(), parts }
    }

    /// The shape without padding.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// The scheme.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.layout.scheme()
    }

    /// Bytes of memory that codes and scales take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.codes) + self.parts.iter().map(|p| size_of_val(&*p.scales)).sum::<usize>()
    }

    /// Bytes of codes and scales that a product of this precision reads.
    #[must_use]
    pub fn bytes_at(&self, precision: Precision) -> usize {
        let strips = self.layout.tiles_down();
        let part = |part: &Part| {
            let Segment { start, end, tile_bytes, .. } = part.segment;
            strips * (end - start) * tile_bytes + size_of_val(&*part.scales)
        };
        self.parts(precision).iter().map(part).sum()
    }

    /// The least capable instruction set among the chosen bodies.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.parts.iter().map(|p| p.body.isa()).min().unwrap_or(Isa::Scalar)
    }

    /// Weights of row `r`, exactly as [`PackedView::dequantize_row`] gives them.
    ///
    /// # Panics
    /// When `r` is outside the matrix or `out` is not one row long.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        self.row_at(r, Precision::FULL, out);
    }

    /// Weights of row `r` as the planes of a precision have them.
    ///
    /// # Panics
    /// As for [`row`](Self::row).
    pub fn row_at(&self, r: usize, precision: Precision, out: &mut [f32]) {
        let Shape { rows, cols } = self.shape();
        assert!(r < rows, "row {r} of a matrix of {rows}");
        assert_eq!(out.len(), cols, "one row of weights");
        let (strip, row) = (r / TILE_ROWS, r % TILE_ROWS);
        let mut integers = [0; TILE_COLS];
        let mut canonical = [0; MAX_TILE];
        for part in self.parts(precision) {
            let Segment { start, end, tile_bytes, .. } = part.segment;
            let canonical = &mut canonical[..tile_bytes];
            let codes = self.codes_of(part, strip).chunks_exact(tile_bytes);
            let lane = usize::from(part.lane_of[row]);
            for (across, code) in (start..end).zip(codes) {
                let code = match part.body.packing() {
                    None => code,
                    Some(packing) => {
                        (packing.unpack)(&part.codebook, code, canonical);
                        &*canonical
                    }
                };
                let col = across * TILE_COLS;
                let group = strip * part.groups + col / self.group - part.first_group;
                let scale = part.scales[group * TILE_ROWS + lane];
                part.codebook.expand_tile_row(code, row, part.codebook.book_of(scale), &mut integers);
                let factor = part.gain * scale.to_f32() * part.codebook.step();
                let width = TILE_COLS.min(cols - col);
                let weights = integers.iter().map(|&i| f32::from(i) * factor);
                let values = out[col..][..width].iter_mut().zip(weights);
                let first = part.segment.plane == 0;
                values.for_each(|(v, weight)| *v = if first { weight } else { *v + weight });
            }
        }
    }

    /// The parts that are read at a precision: those of all planes that together have no more bits, and always the first plane's.
    pub(crate) fn parts(&self, precision: Precision) -> &[Part] {
        let Some(most) = precision.0 else { return &self.parts };
        let planes = self.scheme().precisions().skip(1).take_while(|&rate| rate <= most).count();
        let end = self.parts.iter().take_while(|part| part.segment.plane <= planes).count();
        &self.parts[..end]
    }

    pub(crate) const fn vectors(&self) -> &Vectors {
        &self.vectors
    }

    pub(crate) const fn stride(&self) -> usize {
        self.layout.row_bytes()
    }

    /// Codes of a segment from its first tile in `strip` to the end of the buffer.
    pub(crate) fn codes_of(&self, part: &Part, strip: usize) -> &[u8] {
        &lines::bytes(&self.codes)[strip * self.stride() + part.segment.offset..]
    }
}

impl Part {
    fn new(kernels: &Kernels, view: &PackedView<'_>, segment: Segment, codebook: &Codebook) -> Self {
        let body = kernels.body(codebook);
        let Shape { rows, .. } = view.shape();
        let of_plane = &view.scales()[segment.plane * rows * view.groups()..][..rows * view.groups()];
        let first_group = segment.start * TILE_COLS / view.group();
        let groups = (segment.end * TILE_COLS - 1) / view.group() + 1 - first_group;
        let mut scales = Vec::with_capacity(view.layout().tiles_down() * groups * TILE_ROWS);
        for strip in 0..view.layout().tiles_down() {
            for group in first_group..first_group + groups {
                scales.extend(body.lanes().iter().map(|&row| {
                    let row = strip * TILE_ROWS + usize::from(row);
                    if row < rows { of_plane[row * view.groups() + group] } else { f16::ZERO }
                }));
            }
        }
        let mut lane_of = [0; TILE_ROWS];
        (0..).zip(body.lanes()).for_each(|(lane, &row)| lane_of[usize::from(row)] = lane);
        let most = match codebook.grid() {
            Grid::I8 => BLOCK_TILES,
            Grid::I16 => WIDE_BLOCK_TILES,
        };
        let blocks = blocks(&segment, view.group() / TILE_COLS, most);
        let (gain, codebook) = (view.gains()[segment.plane], codebook.clone());
        Self { segment, gain, codebook, body, blocks, scales, first_group, groups, lane_of }
    }
}

/// Cuts a segment where a weight scale ends and at every multiple of `most` tiles of the matrix (which every
/// activation scale ends at).
fn blocks(segment: &Segment, group: usize, most: usize) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut start = segment.start;
    while start < segment.end {
        let ends = (start / group + 1) * group;
        let end = segment.end.min(ends).min((start / most + 1) * most);
        blocks.push(Block {
            start: start - segment.start,
            tiles: end - start,
            group: start / group - segment.start / group,
            closes: end == segment.end || end == ends,
        });
        start = end;
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_segment_and_respect_every_boundary() {
        for (start, end) in [(0, 1), (0, 16), (0, 100), (7, 50), (33, 34)] {
            for group in [1, 4, 5, 8, 16, 24, 1000] {
                for most in [4, 16] {
                    let segment = Segment {
                        scheme: "nuq-4".parse().unwrap(),
                        plane: 0,
                        start,
                        end,
                        offset: 0,
                        tile_bytes: 128,
                    };
                    let list = blocks(&segment, group, most);
                    let mut next = 0;
                    for b in &list {
                        assert_eq!(b.start, next, "in order");
                        assert!((1..=most).contains(&b.tiles), "size");
                        let (first, last) = (start + b.start, start + b.start + b.tiles - 1);
                        assert_eq!(first / group, last / group, "one weight scale");
                        assert_eq!(first / most, last / most, "one activation scale");
                        assert_eq!(b.group, first / group - start / group, "its scale");
                        assert_eq!(b.closes, last + 1 == end || (last + 1) % group == 0, "closes");
                        next += b.tiles;
                    }
                    assert_eq!(next, end - start, "covered");
                }
            }
        }
    }
}
