//! The kernel of matrices whose codes are expanded to integers and then multiplied: a microkernel
//! for every segment, and for every precision of nested scalar codes.

use crate::{
    Activations, Args, Ints, Isa, Kernels, Precision, Team, Vectors,
    activations::stride,
    args::{
        BLOCK_TILES, Block, Interleave, MAX_STRIPS, MAX_TOKENS, ONE_TOKEN_STRIPS, OVERREAD, PANEL_FROM,
        WIDE_BLOCK_TILES,
    },
    kernels::Microkernel,
    linear::{Call, Input, LinearKernel, Prepared},
    lines::{self, Buffer},
};
use fracbit_base::{Scheme, Shape};
use fracbit_format::{Codebook, Grid, Layout, PackedView, SchemeSpec, Segment, TILE, TILE_COLS, TILE_ROWS};
use half::f16;
use std::{cell::RefCell, ops::Range, sync::Arc};

pub(crate) mod nested;
pub(crate) mod psumbook;

use nested::{BIT, CHUNK, Nested};

/// Bytes of the largest tile, at 8 bits a weight.
const MAX_TILE: usize = 256;

/// Packed codes with the microkernels chosen for them: every tile is expanded to integers, which
/// meet integer activations.
///
/// Codes are held once, in the canonical order of `fracbit-format` or, where a microkernel has a
/// [`Packing`](crate::Packing), with the bits of each tile permuted, at 64-byte alignment and with
/// room behind for whole-vector loads. Scales are regrouped by strip.
#[derive(Clone, Debug)]
pub(crate) struct ExpandThenDot {
    layout: Layout,
    codes: Buffer,
    group: usize,
    vectors: Vectors,
    parts: Vec<Part>, // plane by plane, or precision by precision
    order: Order,
}

/// What follows what in memory.
#[derive(Clone, Debug)]
enum Order {
    /// Tile by tile, segment by segment.
    Tiles,
    /// Bit by bit of nested codes, which are joined to tiles before they are multiplied.
    Joined(Nested),
    /// Bit by bit of nested codes, of the whole matrix: pieces of 32 bytes of all tiles of all
    /// strips, as the microkernel reads them.
    Bits,
}

/// A segment with its microkernel.
#[derive(Clone, Debug)]
struct Part {
    segment: Segment,
    /// Bits of a nested code that are read; 0 for all others.
    bits: u32,
    /// Of its plane.
    gain: f32,
    codebook: Codebook,
    microkernel: Microkernel,
    blocks: Vec<Block>,
    scales: Arc<[f16]>, // (strip, group, lane)
    first_group: usize,
    groups: usize,
    /// Place of each row among the lanes.
    lane_of: [u8; TILE_ROWS],
}

impl ExpandThenDot {
    /// Copies `view` and chooses a microkernel for each of its segments.
    pub(crate) fn new(kernels: &Kernels, view: &PackedView<'_>) -> Self {
        let layout = view.layout().clone();
        if let [book] = view.codebooks()
            && let Some(low) = SchemeSpec::of(book.scheme()).coarsest()
        {
            return Self::by_bits(kernels, view, book)
                .unwrap_or_else(|| Self::nested(kernels, view, book, low));
        }
        let mut codes = Buffer::kept(view.codes().len() + OVERREAD);
        lines::bytes_mut(&mut codes)[..view.codes().len()].copy_from_slice(view.codes());
        let parts: Vec<Part> = layout
            .segments()
            .iter()
            .zip(view.codebooks())
            .map(|(segment, codebook)| Part::new(kernels, view, *segment, codebook))
            .collect();
        for part in &parts {
            let Some(packing) = part.microkernel.packing() else { continue };
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
        Self { layout, codes, group: view.group(), vectors: kernels.vectors(), parts, order: Order::Tiles }
    }

    /// Puts codes in the order of the microkernels that read them by their bits, if there are.
    fn by_bits(kernels: &Kernels, view: &PackedView<'_>, book: &Codebook) -> Option<Self> {
        let layout = view.layout().clone();
        let (across, scheme) = (layout.tiles_across(), layout.scheme());
        if across == 0 {
            return None; // nothing to read
        }
        let mut parts: Vec<Part> = Vec::new();
        for bits in scheme.precisions().map(|rate| u32::from(scheme.at(rate).quarters() / 4)) {
            let codebook = at(book, bits);
            let microkernel = kernels.bit_planes(&codebook)?;
            let segment = Segment { scheme, plane: 0, start: 0, end: across, offset: 0, tile_bytes: BIT };
            let mut part = Part { bits, ..Part::with(microkernel, view, segment, &codebook) };
            // Sums are rounded where they are when chunks are joined: the same bits everywhere.
            let chunk_ends = |block: &Block| (block.start + block.tiles).is_multiple_of(CHUNK);
            part.blocks.iter_mut().for_each(|block| block.closes |= chunk_ends(block));
            parts.push(part);
        }
        let whole = parts.last()?;
        let (pack, bits) = (whole.microkernel.packing()?.pack, whole.bits as usize);
        let mut codes = Buffer::kept(view.codes().len() + OVERREAD);
        let mut pieces = [0; MAX_TILE];
        let pieces = &mut pieces[..bits * BIT];
        let (out, tiles) = (lines::bytes_mut(&mut codes), layout.tiles_down() * across);
        for (tile, code) in view.codes().chunks_exact(bits * BIT).enumerate() {
            pack(&whole.codebook, code, pieces);
            for (bit, piece) in pieces.chunks_exact(BIT).enumerate() {
                out[(bit * tiles + tile) * BIT..][..BIT].copy_from_slice(piece);
            }
        }
        share_scales(&mut parts);
        let (group, vectors) = (view.group(), kernels.vectors());
        Some(Self { layout, codes, group, vectors, parts, order: Order::Bits })
    }

    /// Puts codes in order by bits, and chooses a microkernel of plain codes for every precision.
    fn nested(kernels: &Kernels, view: &PackedView<'_>, book: &Codebook, low: u32) -> Self {
        let layout = view.layout().clone();
        let (across, scheme) = (layout.tiles_across(), layout.scheme());
        let mut parts: Vec<Part> = Vec::new();
        for bits in scheme.precisions().map(|rate| scheme.at(rate).quarters() / 4) {
            let plain = plain(book, bits.into());
            for start in (0..across).step_by(CHUNK) {
                let (end, tile_bytes) = (across.min(start + CHUNK), plain.tile_bytes());
                let segment = Segment { scheme, plane: 0, start, end, offset: 0, tile_bytes };
                parts.push(Part { bits: bits.into(), ..Part::new(kernels, view, segment, &plain) });
            }
        }
        share_scales(&mut parts);
        let nested = Nested::new(kernels.nested(), across, (scheme.quarters() / 4).into());
        let mut codes = Buffer::kept(view.codes().len());
        let stride = layout.row_bytes();
        if stride > 0 {
            let strips = lines::bytes_mut(&mut codes).chunks_exact_mut(stride);
            let nibbles = plain(book, low);
            let packing = kernels.microkernel(&nibbles).packing();
            for (strip, out) in view.codes().chunks_exact(stride).zip(strips) {
                nested.split(&nibbles, packing, strip, out);
            }
        }
        let (group, vectors) = (view.group(), kernels.vectors());
        Self { layout, codes, group, vectors, parts, order: Order::Joined(nested) }
    }

    /// The parts that are read at a precision.
    fn parts(&self, precision: Precision) -> &[Part] {
        let scheme = self.layout.scheme();
        if !matches!(self.order, Order::Tiles) {
            let all = scheme.precisions().count();
            let nth = precision.rate().map_or(all, |most| scheme.planes_within(most));
            let each = self.parts.len() / all;
            return &self.parts[(nth - 1) * each..nth * each];
        }
        let Some(most) = precision.rate() else { return &self.parts };
        let planes = scheme.planes_within(most);
        let end = self.parts.iter().take_while(|part| part.segment.plane < planes).count();
        &self.parts[..end]
    }

    /// Some strips of one call of the microkernels, all segments, added to `out`.
    fn multiply(&self, parts: &[Part], call: &Call<'_>, strips: Range<usize>, out: &mut [f32]) {
        let Call { x, tokens, together, stride: out_stride, factors: mut before, .. } = call.clone();
        for part in parts {
            let first = tokens.start * x.stride() + part.segment.start * TILE_COLS;
            let interleave = part.microkernel.interleave(together);
            let (blocks, per_strip) = (part.blocks.len(), part.groups * TILE_ROWS);
            let factors = before + tokens.start * blocks..before + tokens.end * blocks;
            before += x.batch() * blocks;
            let run = |codes: &[u8], stride: usize, out: &mut [f32]| {
                let args = Args {
                    codebook: &part.codebook,
                    table: part.microkernel.table(),
                    codes,
                    stride,
                    tile_bytes: part.segment.tile_bytes,
                    plane: if matches!(self.order, Order::Bits) { self.plane() } else { 0 },
                    strips: strips.len(),
                    tiles: part.segment.end - part.segment.start,
                    scales: &part.scales[strips.start * per_strip..strips.end * per_strip],
                    groups: part.groups,
                    blocks: &part.blocks,
                    tokens: tokens.len(),
                    x: match part.codebook.grid() {
                        Grid::I8 => Ints::I8(x.narrow.ints.get(first..).unwrap_or(&[])),
                        Grid::I16 => Ints::I16(x.wide.ints.get(first..).unwrap_or(&[])),
                    },
                    x_stride: x.stride(),
                    out_stride,
                    interleave,
                    panel: interleave.filter(|interleave| *interleave != Interleave::Rows).map(
                        |interleave| {
                            x.panel(part.codebook.grid(), part.segment.start, tokens.start, interleave)
                        },
                    ),
                    block_scales: &x.block_scales[factors.clone()],
                    block_starts: &x.block_starts[factors],
                };
                part.microkernel.run(&args, out);
            };
            match &self.order {
                Order::Tiles | Order::Bits => run(self.codes_of(part, strips.start), self.stride(), out),
                Order::Joined(nested) => {
                    self.joined(nested, part, strips.clone(), |codes, stride| run(codes, stride, &mut *out))
                }
            }
        }
    }

    /// Calls `run` with the tiles of a part in these strips, and the bytes from a strip to the
    /// next.
    fn joined(&self, nested: &Nested, part: &Part, strips: Range<usize>, run: impl FnOnce(&[u8], usize)) {
        thread_local! {
            static JOINED: RefCell<Buffer> = RefCell::new(Buffer::zeroed(0));
        }
        let stride = (part.segment.end - part.segment.start) * part.segment.tile_bytes;
        JOINED.with_borrow_mut(|room| {
            let len = strips.len() * stride + OVERREAD;
            if size_of_val(&**room) < len {
                *room = Buffer::zeroed(len);
            }
            let room = &mut lines::bytes_mut(room)[..len];
            for (strip, out) in strips.zip(room.chunks_exact_mut(stride)) {
                nested.join(self.strip(strip), part.segment.start, part.bits, out);
            }
            run(room, stride);
        });
    }

    /// The bytes of a strip and all behind.
    fn strip(&self, strip: usize) -> &[u8] {
        &lines::bytes(&self.codes)[strip * self.stride()..]
    }

    /// Bytes from a strip to the next.
    const fn stride(&self) -> usize {
        match self.order {
            Order::Bits => self.layout.tiles_across() * BIT,
            Order::Tiles | Order::Joined(_) => self.layout.row_bytes(),
        }
    }

    /// Bytes of one bit of all codes.
    const fn plane(&self) -> usize {
        self.layout.tiles_down() * self.layout.tiles_across() * BIT
    }

    /// Codes of a segment from its first tile in `strip` to the end of the buffer.
    fn codes_of(&self, part: &Part, strip: usize) -> &[u8] {
        &self.strip(strip)[part.segment.offset..]
    }
}

impl LinearKernel for ExpandThenDot {
    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn isa(&self) -> Isa {
        self.parts.iter().map(|p| p.microkernel.isa()).min().unwrap_or(Isa::Scalar)
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.codes) + scale_bytes(&self.parts)
    }

    fn bytes_at(&self, precision: Precision) -> usize {
        let parts = self.parts(precision);
        let codes = |part: &Part| {
            let Segment { start, end, tile_bytes, .. } = part.segment;
            let bytes = if part.bits > 0 { part.bits as usize * TILE / 8 } else { tile_bytes };
            self.layout.tiles_down() * (end - start) * bytes
        };
        parts.iter().map(codes).sum::<usize>() + scale_bytes(parts)
    }

    fn row(&self, r: usize, precision: Precision, out: &mut [f32]) {
        let Shape { rows, cols } = self.shape();
        assert!(r < rows, "row {r} of a matrix of {rows}");
        assert_eq!(out.len(), cols, "one row of weights");
        let (strip, row) = (r / TILE_ROWS, r % TILE_ROWS);
        let mut integers = [0; TILE_COLS];
        let (mut canonical, mut joined) = ([0; MAX_TILE], [0; MAX_TILE]);
        for part in self.parts(precision) {
            let Segment { start, end, tile_bytes, .. } = part.segment;
            let bytes = if matches!(self.order, Order::Bits) { part.bits as usize * BIT } else { tile_bytes };
            let (canonical, joined) = (&mut canonical[..bytes], &mut joined[..bytes]);
            let lane = usize::from(part.lane_of[row]);
            for across in start..end {
                let code = match &self.order {
                    Order::Tiles => {
                        &self.codes_of(part, strip)[(across - start) * tile_bytes..][..tile_bytes]
                    }
                    Order::Bits => {
                        let pieces = self.strip(strip).chunks_exact(BIT).skip(across);
                        let pieces = pieces.step_by(self.plane() / BIT);
                        joined
                            .chunks_exact_mut(BIT)
                            .zip(pieces)
                            .for_each(|(to, piece)| to.copy_from_slice(piece));
                        &*joined
                    }
                    Order::Joined(nested) => {
                        nested.join(self.strip(strip), across, part.bits, joined);
                        &*joined
                    }
                };
                let code = match part.microkernel.packing() {
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

    fn rounds_to_int8(&self, precision: Precision) -> bool {
        self.parts(precision).iter().all(|part| part.codebook.grid() == Grid::I8)
    }

    fn group_tokens(&self, precision: Precision) -> usize {
        let parts = self.parts(precision);
        (1..PANEL_FROM)
            .take_while(|&n| parts.iter().all(|part| part.microkernel.interleave(n).is_none()))
            .last()
            .unwrap_or(0)
    }

    fn call_tokens(&self, precision: Precision, together: usize) -> usize {
        let parts = self.parts(precision);
        let rows = parts.iter().all(|part| part.microkernel.interleave(together) == Some(Interleave::Rows));
        if rows { second_level_tokens(self.shape().cols) } else { MAX_TOKENS }
    }

    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, team: &Team<'_>) {
        for part in self.parts(input.precision) {
            let panels = part.microkernel.interleave(input.together);
            prepare(part, &self.vectors, (input.most, panels), input.values, to.0, team);
        }
    }

    fn rows(&self, call: &Call<'_>, out: &mut [f32]) {
        let (strips, tokens, stride) = (&call.strips, &call.tokens, call.stride);
        // One token reads codes as fast as it can, and they should come in one stream: the segments
        // of a strip lie behind each other. Where tile registers are told their shapes anew by
        // every call, calls should be few.
        let parts = self.parts(call.precision);
        let tile_registers = || {
            parts.iter().all(|part| part.microkernel.interleave(call.together) == Some(Interleave::EvenOdd))
        };
        let each = match tokens.len() {
            1 if parts.len() > 1 => 1,
            1 if call.alone => ONE_TOKEN_STRIPS,
            _ if tile_registers() => ONE_TOKEN_STRIPS,
            _ => MAX_STRIPS,
        };
        for first in (0..strips.len()).step_by(each) {
            let end = strips.len().min(first + each);
            let out = &mut out[first * TILE_ROWS..(tokens.len() - 1) * stride + end * TILE_ROWS];
            self.multiply(parts, call, strips.start + first..strips.start + end, out);
        }
    }
}

impl Part {
    fn new(kernels: &Kernels, view: &PackedView<'_>, segment: Segment, codebook: &Codebook) -> Self {
        Self::with(kernels.microkernel(codebook), view, segment, codebook)
    }

    fn with(microkernel: Microkernel, view: &PackedView<'_>, segment: Segment, codebook: &Codebook) -> Self {
        let Shape { rows, .. } = view.shape();
        let of_plane = &view.scales()[segment.plane * rows * view.groups()..][..rows * view.groups()];
        let first_group = segment.start * TILE_COLS / view.group();
        let groups = (segment.end * TILE_COLS - 1) / view.group() + 1 - first_group;
        let mut scales = Vec::with_capacity(view.layout().tiles_down() * groups * TILE_ROWS);
        for strip in 0..view.layout().tiles_down() {
            for group in first_group..first_group + groups {
                scales.extend(microkernel.lanes().iter().map(|&row| {
                    let row = strip * TILE_ROWS + usize::from(row);
                    if row < rows { of_plane[row * view.groups() + group] } else { f16::ZERO }
                }));
            }
        }
        let mut lane_of = [0; TILE_ROWS];
        (0..).zip(microkernel.lanes()).for_each(|(lane, &row)| lane_of[usize::from(row)] = lane);
        let most = match codebook.grid() {
            Grid::I8 => BLOCK_TILES,
            Grid::I16 => WIDE_BLOCK_TILES,
        };
        let blocks = blocks(&segment, view.group() / TILE_COLS, most);
        let (gain, codebook, scales) = (view.gains()[segment.plane], codebook.clone(), scales.into());
        Self { segment, bits: 0, gain, codebook, microkernel, blocks, scales, first_group, groups, lane_of }
    }
}

/// Tokens of a call where there are tile registers: they ask for activations so fast that these
/// should stay in a second-level cache (2 MiB on such processors) while strip after strip meets
/// them.
pub(crate) const fn second_level_tokens(cols: usize) -> usize {
    const ROOM: usize = 5 << 18;
    ROOM / stride(cols)
}

/// Holds equal scales once.
fn share_scales(parts: &mut [Part]) {
    for i in 1..parts.len() {
        let (before, part) = parts.split_at_mut(i);
        if let Some(same) = before.iter().find(|other| other.scales == part[0].scales) {
            part[0].scales = Arc::clone(&same.scales);
        }
    }
}

/// Bytes of the scales of some parts, of which neighbours may have the same.
fn scale_bytes(parts: &[Part]) -> usize {
    let new = |i: &usize| parts[..*i].iter().all(|part| !Arc::ptr_eq(&part.scales, &parts[*i].scales));
    (0..parts.len()).filter(new).map(|i| size_of_val(&*parts[i].scales)).sum()
}

/// The scalar codebook of `bits` bits of a nested one.
pub(crate) fn at(nested: &Codebook, bits: u32) -> Codebook {
    let values = nested.at(bits).expect("a precision of the codebook").to_vec();
    let scheme: Scheme = format!("nuq-{bits}").parse().expect("a scalar scheme");
    Codebook::new(scheme, values, nested.step()).expect("values of the int8 grid")
}

/// The plain scalar codebook, of 4 or 8 bits, that has the values of `bits` bits of a nested one,
/// repeated.
pub(crate) fn plain(nested: &Codebook, bits: u32) -> Codebook {
    let values = nested.at(bits).expect("a precision of the codebook");
    let (wide, name) = if bits > 4 { (8, "nuq-8") } else { (4, "nuq-4") };
    let scheme: Scheme = name.parse().expect("a scalar scheme");
    let entries = (0..1 << wide).map(|code: usize| values[code % values.len()]).collect();
    Codebook::new(scheme, entries, nested.step()).expect("values of the int8 grid")
}

/// Makes the integer form that `part` wants and appends the factors of its blocks: `(token,
/// block)`, or for panels `(block, token)` for each call's tokens.
fn prepare(
    part: &Part,
    vectors: &Vectors,
    (most, panels): (usize, Option<Interleave>),
    values: &[f32],
    x: &mut Activations,
    team: &Team<'_>,
) {
    match part.codebook.grid() {
        Grid::I8 => x.make_narrow(values, vectors, team, panels),
        Grid::I16 => x.make_wide(values, vectors, team, panels),
    }
    let (batch, groups, tiles) = (x.batch(), x.groups(), x.tiles());
    let (scales, sums) = match part.codebook.grid() {
        Grid::I8 => (&x.narrow.scales, &x.narrow.sums),
        Grid::I16 => (&x.wide.scales, &x.wide.sums),
    };
    let factor = part.gain * part.codebook.step();
    let (block_scales, block_starts) = (&mut x.block_scales, &mut x.block_starts);
    let first = |block: &Block| part.segment.start + block.start;
    let scale = |token: usize, block: &Block| scales[token * groups + first(block) / BLOCK_TILES] * factor;
    let weight = match part.codebook.grid() {
        Grid::I8 => -128,
        Grid::I16 => 0,
    };
    let start = |token: usize, block: &Block| {
        weight * sums[token * tiles + first(block)..][..block.tiles].iter().sum::<i32>()
    };
    let blocks = &part.blocks;
    let Some(interleave) = panels else {
        for token in 0..batch {
            block_scales.extend(blocks.iter().map(|block| scale(token, block)));
            block_starts.extend(blocks.iter().map(|block| start(token, block)));
        }
        return;
    };
    for from in (0..batch).step_by(most) {
        let tokens = from..batch.min(from + most);
        let mut before = None;
        for block in blocks {
            let group = Some(first(block) / BLOCK_TILES);
            if group == before {
                block_scales.extend_from_within(block_scales.len() - tokens.len()..);
            } else {
                block_scales.extend(tokens.clone().map(|token| scale(token, block)));
            }
            before = group;
            if interleave.starts() {
                block_starts.extend(tokens.clone().map(|token| start(token, block)));
            } else {
                block_starts.resize(block_starts.len() + tokens.len(), 0);
            }
        }
    }
}

/// Cuts a segment where a weight scale ends and at every multiple of `most` tiles of the matrix
/// (which every activation scale ends at).
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
