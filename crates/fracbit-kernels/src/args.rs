//! What a microkernel is given.

use crate::Line;
use fracbit_format::{Codebook, Grid, TILE_COLS, TILE_ROWS};
use half::f16;

/// Bytes behind the last tile that a microkernel may read (and must not depend on).
pub const OVERREAD: usize = 256;
/// Most tokens of one call of a microkernel; a multiple of [`PANEL_TOKENS`].
pub const MAX_TOKENS: usize = 512;
/// Tokens that a panel of [`Interleave::Eights`] interleaves.
pub const PANEL_TOKENS: usize = 8;
/// Tokens from which on activations come as panels of [`Interleave::Eights`], to microkernels that
/// take them.
pub const PANEL_FROM: usize = 9;
/// Tokens from which on activations come as [`Interleave::EvenOdd`], up to [`PANEL_FROM`], to
/// microkernels that take them: with fewer vectors alone are as fast.
pub(crate) const EVEN_ODD_FROM: usize = 5;
/// Tokens of a group of [`Interleave::Rows`]; [`MAX_TOKENS`] is a multiple.
pub const ROWS: usize = 16;
/// Bytes behind the last row of activations that a microkernel which takes [`Interleave::Rows`] may
/// read.
pub(crate) const ROW_OVERREAD: usize = 64;
/// Most strips of one call of a microkernel for several tokens.
pub const MAX_STRIPS: usize = 2;
/// Most strips of one call for one token, and with [`Interleave::EvenOdd`]: few enough to share
/// out, enough that starting a call costs nothing.
pub const ONE_TOKEN_STRIPS: usize = 16;
/// Most tiles of a block on the int8 grid; also the columns, in tiles, that share an activation
/// scale.
///
/// 256 columns x 255 x 127 < 2^23: a block's sum is exact in `i32` (with weights offset by 128) and
/// in `f32`.
pub const BLOCK_TILES: usize = 16;
/// Most tiles of a block on the int16 grid.
///
/// 64 columns x 32767 x 1023 = 2_145_321_024 < 2^31: a block's sum is exact in `i32`.
pub const WIDE_BLOCK_TILES: usize = 4;
/// Largest magnitude of an int8 activation.
pub const MAX_INT8: i32 = 127;
/// Largest magnitude of an int16 activation.
pub const MAX_INT16: i32 = 1023;

/// Neighbouring tiles of a strip whose integer products are summed before they meet a
/// floating-point scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First tile, counted from the start of the segment.
    pub start: usize,
    /// Tiles, 1 to [`BLOCK_TILES`].
    pub tiles: usize,
    /// Index of the weight scale, counted from the first that the segment touches.
    pub group: usize,
    /// True for the last block of its weight scale.
    pub closes: bool,
}

/// Strips (rows of tiles) of one segment, the activations they meet, and the scales.
///
/// The result, `out[token * out_stride + strip * 16 + row]`, is added to what is there:
///
/// ```text
/// for block:                                     // in order
///     sum   = Σ integer(row, col) * x(token, col)         // exact
///     inner = inner + (sum as f32) * block_scale(token, block)
///     if block.closes: out = out + inner * scale(strip, group, row); inner = 0
/// ```
///
/// Each `+` and `*` on floats rounds once (no fused operation), so that all microkernels give the
/// same bits. Only `matmul` of this crate builds this; every length below is then as stated.
#[derive(Debug)]
#[non_exhaustive]
pub struct Args<'a> {
    /// The table that makes codes integers.
    pub codebook: &'a Codebook,
    /// The microkernel's own constants.
    pub table: &'a [Line],
    /// Codes from the first tile of the first strip; readable to [`OVERREAD`] bytes behind the last
    /// tile.
    pub codes: &'a [u8],
    /// Bytes from a strip to the next.
    pub stride: usize,
    /// Bytes of a tile; of nested codes that are read by their bits, of one piece of it.
    pub tile_bytes: usize,
    /// Bytes from a piece of a tile to its next one, for nested codes that are read by their bits;
    /// 0 for all others.
    pub plane: usize,
    /// Strips, 1 to [`MAX_STRIPS`], or for one token and with [`Interleave::EvenOdd`] to
    /// [`ONE_TOKEN_STRIPS`].
    pub strips: usize,
    /// Tiles of the segment in one strip.
    pub tiles: usize,
    /// Weight scales, `(strip, group, 16)`, in the microkernel's order of lanes; 0 for padded rows.
    /// Their lowest bits number the codebook of a group-wise scheme ([`Codebook::book_of`]).
    pub scales: &'a [f16],
    /// Weight scales of a row.
    pub groups: usize,
    /// The blocks; they cover `0..tiles` in order.
    pub blocks: &'a [Block],
    /// Tokens, 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// The activations of the segment's columns; `x_stride` elements from a token to the next.
    /// Nothing is said of them where a panel of [`Interleave::Pairs`] comes.
    pub x: Ints<'a>,
    /// Elements from a token to the next.
    pub x_stride: usize,
    /// Elements of the result from a token to the next.
    pub out_stride: usize,
    /// How activations come for several tokens; if at all, `block_scales` and `block_starts` are
    /// `(block, token)`.
    pub interleave: Option<Interleave>,
    /// The same activations as a panel, for all but [`Interleave::Rows`].
    pub panel: Option<Panel<'a>>,
    /// Activation scale times codebook step and gain, `(token, block)`.
    pub block_scales: &'a [f32],
    /// What a block's sums may start at, `(token, block)`: `-128 Σ x` of its integer activations,
    /// for dot instructions that want one operand unsigned, `Σ (w + 128) x - 128 Σ x = Σ w x`.
    /// Zeros on the int16 grid, and with all interleaves but [`Interleave::Eights`], which are for
    /// signed products.
    pub block_starts: &'a [i32],
}

/// How activations of several tokens come to a microkernel: how many a [`Panel`] lays side by side,
/// and how finely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interleave {
    /// Pieces of four bytes (four activations on the int8 grid, two on the int16 grid) of
    /// [`PANEL_TOKENS`] tokens; the last tokens come in groups of 4, 2 and 1.
    Eights,
    /// Pieces of eight bytes of two tokens, which a matrix product of 2 x 8 by 8 x 2 takes; the
    /// last of an odd number is a group of its own. Only on the int8 grid.
    Pairs,
    /// The rows of up to eight tokens, and of each first the even pieces of four bytes of all
    /// columns, then, half a row behind, the odd ones; 64 bytes from every piece on are readable,
    /// whatever stands there. Only on the int8 grid.
    EvenOdd,
    /// No panel: the rows of [`Args::x`], of which whole groups of [`ROWS`] and 64 bytes behind
    /// them are readable, whatever stands there. Only on the int8 grid.
    Rows,
}

impl Interleave {
    /// Tokens from which on activations come so, to microkernels that take them.
    pub(crate) const fn from(self) -> usize {
        match self {
            Self::Eights | Self::Rows => PANEL_FROM,
            Self::EvenOdd => EVEN_ODD_FROM,
            Self::Pairs => 2,
        }
    }

    /// Whether products of one operand that is unsigned want [`Args::block_starts`].
    pub(crate) const fn starts(self) -> bool {
        matches!(self, Self::Eights)
    }
}

/// Activations of several tokens side by side, so that a microkernel reads them as one stream.
///
/// Tokens come in groups (see [`Interleave`]); a group is `(piece, token)`. Lengths count units of
/// four bytes.
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a> {
    /// Pieces of the call's tokens, all columns.
    pub pieces: &'a [i32],
    /// Units of one token in all segments together: the group that begins with token `t` of the
    /// call is `t * stride` units behind the first.
    pub stride: usize,
    /// The first column of the segment, in units: the pieces of a group of `n` tokens begin `n *
    /// first` behind the group. With [`Interleave::EvenOdd`], where a group is one token, among its
    /// even pieces and among its odd ones.
    pub first: usize,
}

/// Splits `tokens` into the groups of a panel: calls `f` with the first token and the number of
/// each.
pub(crate) fn panel_groups(tokens: usize, mut f: impl FnMut(usize, usize)) {
    let mut first = 0;
    for size in [PANEL_TOKENS, 4, 2, 1] {
        while first + size <= tokens {
            f(first, size);
            first += size;
        }
    }
}

/// Integer activations.
#[derive(Clone, Copy, Debug)]
pub enum Ints<'a> {
    /// At most [`MAX_INT8`] in magnitude; for codebooks on the int8 grid.
    I8(&'a [i8]),
    /// At most [`MAX_INT16`] in magnitude; for codebooks on the int16 grid.
    I16(&'a [i16]),
}

impl Args<'_> {
    /// Where the sixteen outputs of a strip and a token start.
    #[must_use]
    pub const fn out_at(&self, strip: usize, token: usize) -> usize {
        token * self.out_stride + strip * TILE_ROWS
    }

    /// Length of the result.
    #[must_use]
    pub const fn out_len(&self) -> usize {
        self.out_at(self.strips, self.tokens - 1)
    }

    /// Pieces of a tile: as many as bits where nested codes are read by these.
    #[must_use]
    pub fn pieces(&self) -> usize {
        if self.plane > 0 { self.codebook.entries().len().ilog2() as usize } else { 1 }
    }

    /// Repeats the promises as debug assertions; microkernels call it first.
    pub fn debug_check(&self) {
        let most = if self.tokens == 1 || self.interleave == Some(Interleave::EvenOdd) {
            ONE_TOKEN_STRIPS
        } else {
            MAX_STRIPS
        };
        debug_assert!((1..=most).contains(&self.strips), "strips of a call");
        debug_assert!((1..=MAX_TOKENS).contains(&self.tokens), "tokens of a call");
        debug_assert!(self.tokens == 1 || self.out_stride >= self.strips * TILE_ROWS, "outputs of a token");
        let last = (self.strips - 1) * self.stride + (self.pieces() - 1) * self.plane;
        let end = last + self.tiles * self.tile_bytes;
        debug_assert!(self.codes.len() >= end + OVERREAD, "codes reach past the last tile");
        debug_assert_eq!(self.scales.len(), self.strips * self.groups * 16, "one scale per row and group");
        debug_assert_eq!(self.block_scales.len(), self.tokens * self.blocks.len(), "one scale per block");
        debug_assert_eq!(self.block_starts.len(), self.tokens * self.blocks.len(), "one start per block");
        debug_assert_eq!(
            self.blocks.iter().map(|b| b.tiles).sum::<usize>(),
            self.tiles,
            "blocks cover the segment"
        );
        let (len, grid, most) = match self.x {
            Ints::I8(x) => (x.len(), Grid::I8, BLOCK_TILES),
            Ints::I16(x) => (x.len(), Grid::I16, WIDE_BLOCK_TILES),
        };
        debug_assert!(
            self.panel.is_some() || len >= (self.tokens - 1) * self.x_stride + self.tiles * TILE_COLS,
            "activations"
        );
        debug_assert_eq!(self.codebook.grid(), grid, "activations of the codebook's grid");
        if self.interleave == Some(Interleave::Rows) {
            let rows = self.tokens.next_multiple_of(ROWS);
            debug_assert!(
                grid == Grid::I8 && len >= rows * self.x_stride + ROW_OVERREAD - self.x_stride,
                "whole groups"
            );
        }
        if let Some(panel) = self.panel {
            // Units of a tile, of all pieces that lie in a row, and behind the last token.
            let (tile, row, behind) = match (self.interleave, grid) {
                (Some(Interleave::EvenOdd), _) => (TILE_COLS / 8, panel.stride / 2, TILE_COLS),
                (_, Grid::I8) => (TILE_COLS / 4, panel.stride, 0),
                (_, Grid::I16) => (TILE_COLS / 2, panel.stride, 0),
            };
            debug_assert!(panel.first + self.tiles * tile <= row, "pieces of the segment");
            debug_assert!(panel.pieces.len() >= self.tokens * panel.stride + behind, "pieces of all tokens");
        }
        debug_assert!(
            self.blocks.iter().all(|b| b.tiles <= most && b.group < self.groups),
            "blocks of the grid"
        );
    }
}
