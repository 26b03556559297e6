//! The kernel of progressive schemes: 4-bit codes meet int8 activations as they are, and integer
//! scales and zeros of groups are applied to the sums.
//!
//! With `w = s (q - z)` the product of a group is `s (sum q x) - s z (sum x)`: the zero leaves the
//! loop over weights (QServe, arXiv 2405.04532, section 5.2.2), and, since a group's columns are
//! summed before anything else happens, so does the scale. A weight then costs its share of a mask
//! and of one product; nothing is dequantized. All of it is exact in integers, so the results are
//! those of the int8 weights of the first level, bit for bit.
//!
//! Codes lie in the order that a dot product of four bytes consumes: 64 bytes hold eight columns of
//! 16 rows, the first four columns in the low halves of bytes, each row's four side by side.

use crate::{
    Activations, Isa, Kernels, Precision, Team, Vectors,
    args::{BLOCK_TILES, MAX_TOKENS, PANEL_FROM},
    expand::second_level_tokens,
    linear::{Call, Input, LinearKernel, Prepared},
    lines::{self, Buffer},
};
use fracbit_base::Shape;
use fracbit_format::{PackedView, SecondLevel, TILE, TILE_COLS, TILE_ROWS};
use rayon::prelude::*;

/// Columns that share scale and zero here; wider groups of the format are cut.
pub const PROGRESSIVE_GROUP: usize = 128;
/// Columns of a piece of codes.
pub const PROGRESSIVE_COLUMNS: usize = 8;
/// Bytes of a piece: [`PROGRESSIVE_COLUMNS`] of 16 rows, half a byte each.
pub const PROGRESSIVE_BYTES: usize = PROGRESSIVE_COLUMNS * TILE_ROWS / 2;
/// Columns whose codes are in the low halves of a piece's bytes.
const HALF: usize = PROGRESSIVE_COLUMNS / 2;

/// Multiplies strips by activations; see [`ProgressiveArgs`] for what it reads and writes.
pub type ProgressiveFn = unsafe fn(&ProgressiveArgs<'_>, &mut [f32]);

/// A microkernel for progressive schemes.
#[derive(Clone, Copy, Debug)]
pub struct ProgressiveMicrokernel {
    isa: Isa,
    run: ProgressiveFn,
    many: Option<ProgressiveFn>,
}

impl ProgressiveMicrokernel {
    /// A microkernel for `isa`.
    ///
    /// # Safety
    /// The processor has `isa`, and `run` is sound for every [`ProgressiveArgs`] that this crate
    /// builds, for all values of codes, factors and activations.
    #[must_use]
    #[expect(unsafe_code, reason = "the contract that lets safe code call microkernels with target features")]
    pub const unsafe fn new(isa: Isa, run: ProgressiveFn) -> Self {
        Self { isa, run, many: None }
    }

    /// The same, with `many` for [`PANEL_FROM`] tokens and more where every weight of the matrix is
    /// [one byte](ProgressiveArgs::fits): it wants tile registers, and calls whose activations stay
    /// in a second-level cache.
    ///
    /// # Safety
    /// As for [`new`](Self::new), of `many`.
    #[must_use]
    #[expect(unsafe_code, reason = "as for `new`")]
    pub const unsafe fn with_many(self, isa: Isa, many: ProgressiveFn) -> Self {
        Self { isa, many: Some(many), ..self }
    }

    /// The meaning of all others.
    pub(crate) const fn scalar() -> Self {
        #[expect(unsafe_code, reason = "the contract of `new`, trivially kept")]
        // SAFETY: `reference` needs no instruction set and is safe code.
        unsafe {
            Self::new(Isa::Scalar, reference)
        }
    }

    /// The instruction set.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }
}

/// Integer scales of the 16 rows of a strip in a group, and scales times zeros (at most 240).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ProgressiveFactors {
    /// Scales.
    pub scales: [u8; TILE_ROWS],
    /// Scales times zeros.
    pub zeros: [u8; TILE_ROWS],
}

/// Strips of a matrix and the activations they meet.
///
/// What is added to `out[token * out_stride + strip * 16 + row]` is
///
/// ```text
/// for block of two groups (256 columns):        // in order
///     sum   = Σ over its groups of scale(group, row) Σ q x - zero(group, row) Σ x   // exact
///     inner = inner + (sum as f32) * block_scale(token, group)
/// out = out + inner * scale(row)
/// ```
///
/// Each `+` and `*` on floats rounds once (no fused operation). Sums are below 2^23 in magnitude.
/// Only this crate builds this; every length below is then as stated.
#[derive(Debug)]
#[non_exhaustive]
pub struct ProgressiveArgs<'a> {
    /// `(strip, pieces, 64)`: byte `4 r + c` of a piece has the code of its row `r` and column `c`
    /// in its low half, that of column `c + 4` in its high half.
    pub codes: &'a [u8],
    /// Pieces of a strip: an eighth of the columns, which are padded to whole tiles.
    pub pieces: usize,
    /// `(strip, groups)`.
    pub factors: &'a [ProgressiveFactors],
    /// Groups of a row: of [`PROGRESSIVE_GROUP`] columns, the last may be cut.
    pub groups: usize,
    /// Scales of rows, `(strip, 16)`; 0 for padded rows.
    pub scales: &'a [[f32; TILE_ROWS]],
    /// Tokens, 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// Activations of at most 127 in magnitude, zero in padded columns; `x_stride` from a token to
    /// the next.
    pub x: &'a [i8],
    /// Elements from a token to the next.
    pub x_stride: usize,
    /// Activation scale times step and gain, `(token, groups)`; equal for both groups of a block.
    pub block_scales: &'a [f32],
    /// Sums of the activations of a group, `(token, groups)`.
    pub sums: &'a [i32],
    /// Whether it is known that every `scale q - zero` is -128 to 127, and rows of `x` up to a
    /// multiple of [`ROWS`](crate::ROWS) and 64 bytes behind them are readable, whatever stands
    /// there. A quantizer makes only such weights, a file may hold others.
    pub fits: bool,
    /// Elements of the result from a token to the next.
    pub out_stride: usize,
}

impl ProgressiveArgs<'_> {
    /// Strips.
    #[must_use]
    pub const fn strips(&self) -> usize {
        self.scales.len()
    }

    /// Repeats the promises as debug assertions; microkernels call it first.
    pub fn debug_check(&self) {
        let strips = self.strips();
        debug_assert!((1..=MAX_TOKENS).contains(&self.tokens), "tokens of a call");
        debug_assert_eq!(self.codes.len(), strips * self.pieces * PROGRESSIVE_BYTES, "codes of all strips");
        debug_assert_eq!(self.factors.len(), strips * self.groups, "factors of all groups");
        debug_assert_eq!(
            self.groups,
            (self.pieces * PROGRESSIVE_COLUMNS).div_ceil(PROGRESSIVE_GROUP),
            "groups of a row"
        );
        debug_assert_eq!(self.block_scales.len(), self.tokens * self.groups, "one scale per group");
        debug_assert_eq!(self.sums.len(), self.tokens * self.groups, "one sum per group");
        let columns = self.pieces * PROGRESSIVE_COLUMNS;
        debug_assert!(self.x.len() >= (self.tokens - 1) * self.x_stride + columns, "activations");
        debug_assert!(self.tokens == 1 || self.out_stride >= strips * TILE_ROWS, "outputs of a token");
    }
}

fn reference(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
    args.debug_check();
    const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;
    let codes = args.codes.chunks_exact(args.pieces * PROGRESSIVE_BYTES);
    let strips = codes.zip(args.factors.chunks_exact(args.groups)).zip(args.scales).enumerate();
    for (strip, ((codes, factors), scales)) in strips {
        for token in 0..args.tokens {
            let x = &args.x[token * args.x_stride..][..args.pieces * PROGRESSIVE_COLUMNS];
            let at = token * args.groups;
            let mut inner = [0.0f32; TILE_ROWS];
            let mut block = [0i32; TILE_ROWS];
            let groups = codes.chunks(PIECES * PROGRESSIVE_BYTES).zip(x.chunks(PROGRESSIVE_GROUP));
            for (g, ((codes, x), factors)) in groups.zip(factors).enumerate() {
                let mut sums = [0i32; TILE_ROWS];
                let pieces = codes.as_chunks::<PROGRESSIVE_BYTES>().0.iter();
                for (piece, x) in pieces.zip(x.as_chunks::<PROGRESSIVE_COLUMNS>().0) {
                    let (first, second) = x.split_at(HALF);
                    for (sum, bytes) in sums.iter_mut().zip(piece.as_chunks::<HALF>().0) {
                        for ((&byte, &x), &y) in bytes.iter().zip(first).zip(second) {
                            *sum += i32::from(byte & 15) * i32::from(x);
                            *sum += i32::from(byte >> 4) * i32::from(y);
                        }
                    }
                }
                let last = g + 1 == args.groups;
                for r in 0..TILE_ROWS {
                    block[r] += i32::from(factors.scales[r]) * sums[r]
                        - i32::from(factors.zeros[r]) * args.sums[at + g];
                    if g % 2 == 1 || last {
                        #[expect(clippy::cast_precision_loss, reason = "below 2^23")]
                        let part = block[r] as f32 * args.block_scales[at + g];
                        inner[r] += part;
                        block[r] = 0;
                    }
                }
            }
            let out = &mut out[token * args.out_stride + strip * TILE_ROWS..][..TILE_ROWS];
            for ((out, inner), scale) in out.iter_mut().zip(inner).zip(scales) {
                let scaled = inner * scale;
                *out += scaled;
            }
        }
    }
}

/// A matrix of a progressive scheme.
#[derive(Clone, Debug)]
pub(crate) struct Progressive {
    shape: Shape,
    microkernel: ProgressiveMicrokernel,
    vectors: Vectors,
    codes: Buffer,
    code_bytes: usize,
    factors: Vec<ProgressiveFactors>,
    groups: usize,
    scales: Vec<[f32; TILE_ROWS]>,
    gain: f32,
    step: f32,
    /// Whether all weights are bytes.
    fits: bool,
}

impl Progressive {
    /// Copies `view`, of a progressive scheme.
    pub(crate) fn new(kernels: &Kernels, view: &PackedView<'_>) -> Self {
        let (shape, layout) = (view.shape(), view.layout());
        let (strips, across) = (layout.tiles_down(), layout.tiles_across());
        let pieces = across * TILE_COLS / PROGRESSIVE_COLUMNS;
        let code_bytes = strips * pieces * PROGRESSIVE_BYTES;
        let mut codes = Buffer::kept(code_bytes);
        let strips_of =
            lines::bytes_mut(&mut codes)[..code_bytes].chunks_exact_mut(pieces * PROGRESSIVE_BYTES);
        for (down, strip) in strips_of.enumerate() {
            for (across, to) in strip.chunks_exact_mut(TILE / 2).enumerate() {
                arrange(&view.codes()[layout.tile(0, down, across)], to);
            }
        }
        let groups = (across * TILE_COLS).div_ceil(PROGRESSIVE_GROUP);
        let stored = shape.cols.div_ceil(view.second_group());
        let mut factors = vec![ProgressiveFactors::default(); strips * groups];
        for r in 0..shape.rows {
            for g in 0..groups {
                let byte = view.second_level()[r * stored + g * PROGRESSIVE_GROUP / view.second_group()];
                let SecondLevel { scale, zero } = SecondLevel::from_byte(byte);
                let to = &mut factors[r / TILE_ROWS * groups + g];
                (to.scales[r % TILE_ROWS], to.zeros[r % TILE_ROWS]) = (scale, scale * zero);
            }
        }
        let mut scales = vec![[0.0; TILE_ROWS]; strips];
        for (r, scale) in view.scales().iter().enumerate() {
            scales[r / TILE_ROWS][r % TILE_ROWS] = scale.to_f32();
        }
        let (microkernel, vectors) = (kernels.progressive(), kernels.vectors());
        let (gain, step) = (view.gain(), view.codebooks().first().map_or(1.0, |book| book.step()));
        let mut new = Self {
            shape,
            microkernel,
            vectors,
            codes,
            code_bytes,
            factors,
            groups,
            scales,
            gain,
            step,
            fits: false,
        };
        new.fits = microkernel.many.is_some() && new.are_bytes();
        new
    }

    /// Whether all weights, those of padded rows among them, are -128 to 127.
    fn are_bytes(&self) -> bool {
        const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;
        let strips = self.codes().par_chunks_exact(self.strip_bytes().max(1));
        strips.zip(self.factors.par_chunks_exact(self.groups.max(1))).all(|(codes, factors)| {
            codes.chunks(PIECES * PROGRESSIVE_BYTES).zip(factors).all(|(codes, factors)| {
                let fit = |least: &[u8; TILE_ROWS], most: &[u8; TILE_ROWS]| {
                    (0..TILE_ROWS).all(|r| {
                        let [scale, zero] = [factors.scales[r], factors.zeros[r]].map(i16::from);
                        scale * i16::from(least[r]) - zero >= -128 && scale * i16::from(most[r]) - zero <= 127
                    })
                };
                // Most groups, whatever their codes.
                if fit(&[0; TILE_ROWS], &[15; TILE_ROWS]) {
                    return true;
                }
                let (mut least, mut most) = ([15; TILE_ROWS], [0; TILE_ROWS]);
                for piece in codes.as_chunks::<PROGRESSIVE_BYTES>().0 {
                    for (r, bytes) in piece.as_chunks::<HALF>().0.iter().enumerate() {
                        for byte in bytes {
                            least[r] = least[r].min(byte & 15).min(byte >> 4);
                            most[r] = most[r].max(byte & 15).max(byte >> 4);
                        }
                    }
                }
                fit(&least, &most)
            })
        })
    }

    fn strip_bytes(&self) -> usize {
        self.code_bytes / self.scales.len().max(1)
    }

    fn codes(&self) -> &[u8] {
        &lines::bytes(&self.codes)[..self.code_bytes]
    }
}

/// A canonical tile of 4-bit codes, row-major, in the order of pieces.
fn arrange(tile: &[u8], to: &mut [u8]) {
    let code = |r: usize, c: usize| tile[(r * TILE_COLS + c) / 2] >> (4 * (c % 2)) & 15;
    for (piece, to) in to.chunks_exact_mut(PROGRESSIVE_BYTES).enumerate() {
        for (i, byte) in to.iter_mut().enumerate() {
            let (r, c) = (i / HALF, piece * PROGRESSIVE_COLUMNS + i % HALF);
            *byte = code(r, c) | code(r, c + HALF) << 4;
        }
    }
}

impl LinearKernel for Progressive {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn isa(&self) -> Isa {
        self.microkernel.isa
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.codes) + size_of_val(&*self.factors) + size_of_val(&*self.scales)
    }

    fn bytes_at(&self, _: Precision) -> usize {
        self.code_bytes + size_of_val(&*self.factors) + size_of_val(&*self.scales)
    }

    fn row(&self, r: usize, _: Precision, out: &mut [f32]) {
        let Shape { rows, cols } = self.shape;
        assert!(r < rows, "row {r} of a matrix of {rows}");
        assert_eq!(out.len(), cols, "one row of weights");
        let (strip, row) = (r / TILE_ROWS, r % TILE_ROWS);
        let codes = &self.codes()[strip * self.strip_bytes()..][..self.strip_bytes()];
        let factor = self.gain * self.scales[strip][row] * self.step;
        for (c, value) in out.iter_mut().enumerate() {
            let piece = &codes[c / PROGRESSIVE_COLUMNS * PROGRESSIVE_BYTES..][..PROGRESSIVE_BYTES];
            let byte = piece[row * HALF + c % HALF];
            let code = if c % PROGRESSIVE_COLUMNS < HALF { byte & 15 } else { byte >> 4 };
            let of = &self.factors[strip * self.groups + c / PROGRESSIVE_GROUP];
            let integer = i16::from(of.scales[row]) * i16::from(code) - i16::from(of.zeros[row]);
            *value = f32::from(integer) * factor;
        }
    }

    fn rounds_to_int8(&self, _: Precision) -> bool {
        true
    }

    fn group_tokens(&self, _: Precision) -> usize {
        PANEL_FROM - 1
    }

    fn call_tokens(&self, _: Precision, together: usize) -> usize {
        if self.fits && together >= PANEL_FROM { second_level_tokens(self.shape.cols) } else { MAX_TOKENS }
    }

    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, team: &Team<'_>) {
        const TILES: usize = PROGRESSIVE_GROUP / TILE_COLS;
        let x = &mut *to.0;
        x.make_narrow(input.values, &self.vectors, team, None);
        let factor = self.gain * self.step;
        let (batch, blocks, tiles) = (x.batch(), x.groups(), x.tiles());
        let Activations { narrow, block_scales, block_starts, .. } = x;
        for token in 0..batch {
            let scales = &narrow.scales[token * blocks..][..blocks];
            let sums = narrow.sums[token * tiles..][..tiles].chunks(TILES);
            block_scales.extend((0..self.groups).map(|g| scales[g * TILES / BLOCK_TILES] * factor));
            block_starts.extend(sums.map(|sums| sums.iter().sum::<i32>()));
        }
    }

    fn rows(&self, call: &Call<'_>, out: &mut [f32]) {
        let Call { x, strips, tokens, stride, .. } = call.clone();
        let strip_bytes = self.strip_bytes();
        let at = call.factors + tokens.start * self.groups..call.factors + tokens.end * self.groups;
        let args = ProgressiveArgs {
            codes: &self.codes()[strips.start * strip_bytes..strips.end * strip_bytes],
            pieces: strip_bytes / PROGRESSIVE_BYTES,
            factors: &self.factors[strips.start * self.groups..strips.end * self.groups],
            groups: self.groups,
            scales: &self.scales[strips],
            tokens: tokens.len(),
            x: &x.narrow.ints[tokens.start * x.stride()..],
            x_stride: x.stride(),
            block_scales: &x.block_scales[at.clone()],
            sums: &x.block_starts[at],
            fits: self.fits,
            out_stride: stride,
        };
        let many = self.microkernel.many.filter(|_| self.fits && tokens.len() >= PANEL_FROM);
        #[expect(unsafe_code, reason = "the one call of a microkernel")]
        // SAFETY: `ProgressiveMicrokernel::new` was promised the instruction set and soundness for
        // arguments built here.
        unsafe {
            many.unwrap_or(self.microkernel.run)(&args, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Packed, codebooks};
    use fracbit_base::Scheme;

    #[test]
    fn weights_that_are_bytes_are_told_from_others() {
        let scheme: Scheme = "qoq-g128".parse().unwrap();
        for seed in 0..6 {
            let packed = Packed::random(scheme, Shape::new(40, 300), codebooks(scheme, 0, 127), 32, seed);
            let matrix = Progressive::new(&Kernels::scalar(), &packed.view().unwrap());
            let mut row = vec![0.0; 300];
            let unit = (0..40).map(|r| {
                matrix.row(r, Precision::FULL, &mut row);
                let factor = matrix.gain * matrix.scales[r / TILE_ROWS][r % TILE_ROWS] * matrix.step;
                row.iter().map(|w| w / factor).fold([0.0f32; 2], |[a, b], w| [a.min(w), b.max(w)])
            });
            let [least, most] = unit.fold([0.0f32; 2], |[a, b], [c, d]| [a.min(c), b.max(d)]);
            let bytes = least > -128.5 && most < 127.5;
            assert_eq!(matrix.are_bytes(), bytes, "seed {seed}: {least} to {most}");
            assert_eq!(bytes, seed % 2 == 0, "seed {seed}: {least} to {most}");
            assert!(bytes == (least > -129.0) && least < -127.0, "-128 is there: {least}");
        }
    }
}
