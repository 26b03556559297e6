//! The kernel of additive codebooks: partial sums are looked up and no weight is ever made.
//!
//! A weight vector is a sum of centroids, so its product with activations is a sum of products of
//! centroids with activations, of which there are only 16 or 256 for each codebook and each place
//! of the vector among the columns. A *Psumbook* (CodeGEMM, section 3) has them all. It is built
//! once for all rows of a product, and for all matrices that have this input and these codebooks; a
//! first level cache then holds those of some columns while the codes of many strips read them.
//! Building costs what 16 or 256 rows cost with one codebook; reading costs a load and an addition
//! for each code, in place of as many multiplications as a centroid has weights. Sixteen partial
//! sums need no load: they lie in a register, and a shuffle reads those of all rows of a strip.
//!
//! The paper's partial sums are of half-precision numbers. Ours are integers of the activations and
//! centroids that the expanding kernel multiplies, so that block sums, and all behind them, have
//! the same bits. They fit 16 bits: magnitudes of a centroid's entries add up to at most 258, those
//! of activations are at most 127.

use super::{ExpandThenDot, Part};
use crate::{
    Activations, Call, Input, Isa, Kernels, LinearKernel, Precision, Prepared, Team,
    args::{Block, MAX_INT8, ONE_TOKEN_STRIPS},
    lines::Numbers,
};
use fracbit_base::Shape;
use fracbit_format::{Codebook, Index, PackedView, TILE_COLS, TILE_ROWS};
use std::{ops::Range, sync::Arc};

/// Bits of a code.
const CODES: [u32; 2] = [4, 8];
/// Tokens whose partial sums lie side by side where there are several: a code is read once for all
/// of them.
pub const PSUM_TOKENS: usize = 4;
/// Most tokens that meet the same rows by any Psumbook.
const MOST_TOKENS: usize = 8;
/// Most strips of a call.
const STRIPS: usize = 4 * ONE_TOKEN_STRIPS;
/// Strips for which the sums of a call lie in fewer lines.
const FEW_STRIPS: usize = 4;

/// What is read of a Psumbook before the next columns (`t_w` of CodeGEMM, section 3) and rows
/// (`t_h`): no result depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PsumTile {
    /// Partial sums that are read for all strips before the next ones; those of a tile of columns
    /// at least.
    pub sums: usize,
    /// Strips of 16 rows that read them, at most [`PsumTile::MOST_STRIPS`].
    pub strips: usize,
}

impl PsumTile {
    /// Most strips.
    pub const MOST_STRIPS: usize = STRIPS;

    /// The usual one for codes of `bits`, 4 or 8: half of a first-level cache, and the more strips
    /// the rarer is it that partial sums come from a farther one. With 4 bits they are an eighth of
    /// that, and reading them is so fast that codes must come in long runs.
    #[must_use]
    pub const fn usual(bits: u32) -> Self {
        Self { sums: 8192, strips: if bits == CODES[0] { FEW_STRIPS } else { STRIPS } }
    }
}

/// Sums of 16 rows for as many tokens as lie side by side, `(row, token)`.
pub type PsumRows = [i32; TILE_ROWS * PSUM_TOKENS];

/// Builds the part of a Psumbook that belongs to one tile of columns.
///
/// Adds nothing: `out`, `(vector of columns, book, centroid, token)` or what else the microkernel
/// wants to read, becomes the products of centroids with the activations of as many tokens as lie
/// side by side.
pub type BuildFn = unsafe fn(&Centroids, &[[i8; TILE_COLS]], &mut [i16]);

/// Reads a part of a Psumbook with the codes of some strips and adds the partial sums to theirs:
/// the numbers are the part, which has 256 partial sums for each 16 bytes of codes and token (or
/// 32, of two codes in a byte), and the tokens side by side.
pub type ReadFn = unsafe fn(PsumCodes<'_>, (&[i16], usize), &mut [PsumRows]);

/// Codes of some strips in some tiles of columns.
#[derive(Clone, Copy, Debug)]
pub struct PsumCodes<'a> {
    all: &'a [u8],
    stride: usize,
    bytes: usize,
}

impl<'a> PsumCodes<'a> {
    /// Those of a strip, 16 rows at a time by vectors of columns and codebooks (or two codebooks,
    /// of codes that share a byte).
    ///
    /// # Panics
    /// When the strip is not within the matrix.
    #[must_use]
    pub fn strip(&self, strip: usize) -> &'a [[u8; TILE_ROWS]] {
        self.all[strip * self.stride..][..self.bytes].as_chunks().0
    }
}

/// How an instruction set builds and reads a Psumbook.
#[derive(Clone, Copy, Debug)]
pub struct PsumMicrokernel {
    isa: Isa,
    bits: u32,
    tokens: usize,
    /// Most tokens that meet the same rows by a Psumbook; for more codes are expanded.
    most_tokens: usize,
    /// Rows of a matrix from which on it has a Psumbook built; with fewer it reads one that is
    /// there.
    least_rows: usize,
    build: BuildFn,
    read: ReadFn,
}

impl PsumMicrokernel {
    /// A microkernel for `isa` and codes of `bits`, 4 or 8, in whose Psumbooks up to `tokens`
    /// tokens, 1 or [`PSUM_TOKENS`], lie side by side.
    ///
    /// # Panics
    /// For other numbers of tokens, and of bits.
    ///
    /// # Safety
    /// The processor has `isa`. `build` is sound for any [`Centroids`] of codes of `bits` with one
    /// token or `tokens` and an `out` of [`Centroids::psums`] numbers for each, `read` for any
    /// codes, with as many partial sums as [`ReadFn`] says as `build` makes them, and as many sums
    /// as strips.
    #[must_use]
    #[expect(unsafe_code, reason = "the contract that lets safe code call microkernels with target features")]
    pub const unsafe fn new(isa: Isa, bits: u32, tokens: usize, build: BuildFn, read: ReadFn) -> Self {
        assert!(matches!(tokens, 1 | PSUM_TOKENS), "tokens side by side");
        assert!(bits == CODES[0] || bits == CODES[1], "bits of a code");
        Self { isa, bits, tokens, most_tokens: MOST_TOKENS, least_rows: 0, build, read }
    }

    /// The microkernel in plain Rust for codes of `bits`, 4 or 8.
    ///
    /// # Panics
    /// For other codes.
    #[must_use]
    pub const fn portable(bits: u32) -> Self {
        assert!(bits == CODES[0] || bits == CODES[1], "bits of a code");
        let (isa, tokens) = (Isa::Scalar, PSUM_TOKENS);
        Self { isa, bits, tokens, most_tokens: MOST_TOKENS, least_rows: 0, build, read }
    }

    /// Only where it is faster than expanding codes: for up to `tokens` tokens, and built for
    /// matrices of at least `rows` rows. Others with the same input read what is there.
    #[must_use]
    pub const fn within(self, tokens: usize, rows: usize) -> Self {
        Self { most_tokens: tokens, least_rows: rows, ..self }
    }
}

/// Centroids as a build wants them: neighbouring weights in pairs, all centroids of a pair side by
/// side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Centroids {
    index: Index,
    pairs: Vec<[i16; 2]>, // (book, pair of columns, centroid)
}

impl Centroids {
    /// Those of an additive codebook whose partial sums fit 16 bits; `None` for every other.
    fn of(codebook: &Codebook) -> Option<Self> {
        let index = codebook.additive()?;
        let magnitude = |centroid: &[i16]| centroid.iter().map(|c| i32::from(*c).abs()).sum::<i32>();
        let most = codebook.entries().chunks_exact(index.weights).map(magnitude).max()?;
        if most * MAX_INT8 > i32::from(i16::MAX) {
            return None;
        }
        let each = 1 << index.bits;
        let entry =
            |book: usize, k: usize, c: usize| codebook.entries()[(book * each + c) * index.weights + k];
        let mut pairs = Vec::with_capacity(codebook.entries().len() / 2);
        for book in 0..index.count {
            for k in (0..index.weights).step_by(2) {
                pairs.extend((0..each).map(|c| [entry(book, k, c), entry(book, k + 1, c)]));
            }
        }
        Some(Self { index, pairs })
    }

    /// Codebooks.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.index.count
    }

    /// Centroids of a codebook, 16 or 256.
    #[must_use]
    pub const fn each(&self) -> usize {
        1 << self.index.bits
    }

    /// Pairs of weights of a centroid.
    #[must_use]
    pub const fn pairs(&self) -> usize {
        self.index.weights / 2
    }

    /// The pair `pair` of all `N` centroids of a codebook.
    ///
    /// # Panics
    /// When there is no such codebook or pair, or `N` is not [`each`](Self::each).
    #[must_use]
    pub fn of_pair<const N: usize>(&self, book: usize, pair: usize) -> &[[i16; 2]; N] {
        assert_eq!(N, self.each(), "centroids of a codebook");
        let all = &self.pairs[(book * self.pairs() + pair) * N..];
        all.first_chunk().expect("a codebook and a pair that there are")
    }

    /// Partial sums of a token in a tile of columns.
    #[must_use]
    pub const fn psums(&self) -> usize {
        TILE_COLS / self.index.weights * self.index.count * self.each()
    }
}

/// The Psumbook of the current activations and one set of codebooks.
#[derive(Clone, Debug)]
pub(crate) struct Psums {
    /// Whether it is that of the activations.
    pub(crate) ready: bool,
    centroids: Arc<Centroids>,
    /// Whose microkernel has built it.
    isa: Isa,
    /// Tokens side by side.
    lanes: usize,
    sums: Numbers<i16>, // (token or tokens, tile, what the microkernel builds)
}

impl Psums {
    fn is_of(&self, matrix: &Psumbook, lanes: usize) -> bool {
        let alike = || Arc::ptr_eq(&self.centroids, &matrix.centroids) || self.centroids == matrix.centroids;
        self.ready && self.lanes == lanes && self.isa == matrix.microkernel.isa && alike()
    }
}

/// A matrix of additive codebooks whose products of few tokens go through a Psumbook, those of more
/// through expanded codes.
#[derive(Clone, Debug)]
struct Psumbook {
    expand: ExpandThenDot,
    centroids: Arc<Centroids>,
    microkernel: PsumMicrokernel,
    tile: PsumTile,
}

/// The kernel of `view` that builds and reads Psumbooks by `microkernel`, for matrices of additive
/// codebooks and its codes; `None` for all others. Where many tokens meet, the microkernels of
/// `kernels` expand codes.
#[must_use]
pub fn psumbook(
    kernels: &Kernels,
    view: &PackedView<'_>,
    microkernel: PsumMicrokernel,
) -> Option<Arc<dyn LinearKernel>> {
    let [codebook] = view.codebooks() else { return None };
    let centroids = Arc::new(Centroids::of(codebook).filter(|of| of.index.bits == microkernel.bits)?);
    let expand = ExpandThenDot::new(kernels, view);
    let tile = kernels.psum_tile().unwrap_or(PsumTile::usual(microkernel.bits));
    // Codes are taken in the canonical order.
    let [part] = &*expand.parts else { return None };
    part.microkernel
        .packing()
        .is_none()
        .then(|| Arc::new(Psumbook { expand, centroids, microkernel, tile }) as Arc<dyn LinearKernel>)
}

impl Psumbook {
    fn part(&self) -> &Part {
        &self.expand.parts[0]
    }

    /// Tokens side by side in a Psumbook where so many of `batch` meet the same rows; `None` where
    /// codes are expanded: for many tokens, and for several that do not begin with the first.
    fn lanes(&self, together: usize, batch: usize) -> Option<usize> {
        let few = together <= self.microkernel.most_tokens
            && self.part().microkernel.interleave(together).is_none();
        match together {
            1 => few.then_some(1),
            _ => (few && together == batch).then_some(self.microkernel.tokens),
        }
    }

    /// Whether it has enough rows for a Psumbook of its own.
    fn builds(&self) -> bool {
        self.shape().rows >= self.microkernel.least_rows
    }

    /// Builds the Psumbook of the activations unless it is there.
    fn build(&self, x: &mut Activations, lanes: usize, team: &Team<'_>) {
        if x.psums.iter().any(|psums| psums.is_of(self, lanes)) {
            return;
        }
        let mut psums = match x.psums.iter().position(|psums| !psums.ready) {
            Some(stale) => x.psums.swap_remove(stale),
            None => Psums {
                ready: false,
                centroids: Arc::clone(&self.centroids),
                isa: self.microkernel.isa,
                lanes,
                sums: Numbers::default(),
            },
        };
        (psums.ready, psums.centroids) = (true, Arc::clone(&self.centroids));
        (psums.isa, psums.lanes) = (self.microkernel.isa, lanes);
        let (tiles, each) = (x.tiles(), self.centroids.psums() * lanes);
        psums.sums.renew(x.batch().div_ceil(lanes) * tiles * each);
        team.chunks(&mut psums.sums, each, |i, out| {
            let (first, tile) = (i / tiles * lanes, i % tiles);
            let mut ints = [[0; TILE_COLS]; PSUM_TOKENS];
            for (ints, token) in ints[..lanes].iter_mut().zip(first..x.batch()) {
                ints.copy_from_slice(&x.narrow.ints[token * x.stride() + tile * TILE_COLS..][..TILE_COLS]);
            }
            #[expect(unsafe_code, reason = "the one call that builds a Psumbook")]
            // SAFETY: `PsumMicrokernel::new` was promised the instruction set, and soundness for
            // one token or all that lie side by side, and this many partial sums.
            unsafe {
                (self.microkernel.build)(&self.centroids, &ints[..lanes], out);
            }
        });
        x.psums.push(psums);
    }

    /// Some strips, at most `MOST`, and the tokens of a call, by the Psumbook of these.
    fn read<const MOST: usize>(&self, call: &Call<'_>, of: &Psums, strips: Range<usize>, out: &mut [f32]) {
        let (part, x, lanes) = (self.part(), call.x, of.lanes);
        let (tile_bytes, psums_of_tile) = (part.segment.tile_bytes, self.centroids.psums() * lanes);
        let at_once = (self.tile.sums / psums_of_tile).max(1);
        let mut sums = [[0; TILE_ROWS * PSUM_TOKENS]; MOST];
        let sums = &mut sums[..strips.len()];
        let mut inner = [[0f32; TILE_ROWS * PSUM_TOKENS]; MOST];
        for first in call.tokens.clone().step_by(lanes) {
            let tokens = first..call.tokens.end.min(first + lanes);
            let psums = &of.sums[first / lanes * x.tiles() * psums_of_tile..];
            for (index, block) in part.blocks.iter().enumerate() {
                let end = block.start + block.tiles;
                sums.iter_mut().for_each(|sums| sums[..TILE_ROWS * lanes].fill(0));
                for from in (block.start..end).step_by(at_once) {
                    let tiles = from..end.min(from + at_once);
                    let psums = &psums[tiles.start * psums_of_tile..tiles.end * psums_of_tile];
                    let codes = PsumCodes {
                        all: &self.expand.codes_of(part, strips.start)[tiles.start * tile_bytes..],
                        stride: self.expand.stride(),
                        bytes: tiles.len() * tile_bytes,
                    };
                    #[expect(unsafe_code, reason = "the one call that reads a Psumbook")]
                    // SAFETY: `PsumMicrokernel::new` was promised the instruction set, and
                    // soundness for 256 partial sums for each 16 codes of a strip and token, built
                    // by the same microkernel.
                    unsafe {
                        (self.microkernel.read)(codes, (psums, lanes), sums);
                    }
                }
                for (s, strip) in strips.clone().enumerate() {
                    let scales = &part.scales[(strip * part.groups + block.group) * TILE_ROWS..];
                    for token in tokens.clone() {
                        let scale = x.block_scales[call.factors + token * part.blocks.len() + index];
                        let at = (token - call.tokens.start) * call.stride
                            + (strip - call.strips.start) * TILE_ROWS;
                        let (out, lane) = (&mut out[at..][..TILE_ROWS], token - first);
                        let all = TILE_ROWS * lanes;
                        let (sums, inner) = (&sums[s][lane..all], &mut inner[s][lane..all]);
                        let scales = |row: usize| scales[usize::from(part.lane_of[row])].to_f32();
                        match lanes {
                            1 => finish::<1>(block, (sums, inner), scale, scales, out),
                            _ => finish::<PSUM_TOKENS>(block, (sums, inner), scale, scales, out),
                        }
                    }
                }
            }
        }
    }
}

/// As [`Args`](crate::Args) says, for the sums of a block, a token and 16 rows, `LANES` apart.
fn finish<const LANES: usize>(
    block: &Block,
    (sums, inner): (&[i32], &mut [f32]),
    block_scale: f32,
    scales: impl Fn(usize) -> f32,
    out: &mut [f32],
) {
    const LAST: usize = TILE_ROWS - 1;
    let (sums, inner) = (&sums[..=LAST * LANES], &mut inner[..=LAST * LANES]);
    // Vectors where lanes are one.
    for row in 0..TILE_ROWS {
        #[expect(clippy::cast_precision_loss, reason = "rounded to nearest, as the vector conversions do")]
        let part = sums[row * LANES] as f32 * block_scale;
        inner[row * LANES] += part;
    }
    if block.closes {
        for (row, out) in out.iter_mut().enumerate() {
            let scaled = inner[row * LANES] * scales(row);
            *out += scaled;
            inner[row * LANES] = 0.0;
        }
    }
}

impl LinearKernel for Psumbook {
    fn shape(&self) -> Shape {
        self.expand.shape()
    }

    fn isa(&self) -> Isa {
        self.expand.isa().min(self.microkernel.isa)
    }

    fn reads_psumbook(&self, tokens: usize) -> bool {
        tokens <= self.microkernel.most_tokens && self.builds()
    }

    fn bytes(&self) -> usize {
        self.expand.bytes() + size_of_val(&*self.centroids.pairs)
    }

    fn bytes_at(&self, precision: Precision) -> usize {
        self.expand.bytes_at(precision)
    }

    fn row(&self, r: usize, precision: Precision, out: &mut [f32]) {
        self.expand.row(r, precision, out);
    }

    fn rounds_to_int8(&self, precision: Precision) -> bool {
        self.expand.rounds_to_int8(precision)
    }

    fn group_tokens(&self, precision: Precision) -> usize {
        self.expand.group_tokens(precision)
    }

    fn call_tokens(&self, precision: Precision, together: usize) -> usize {
        self.expand.call_tokens(precision, together)
    }

    fn call_strips(&self, _: Precision, together: usize) -> usize {
        if together <= self.microkernel.most_tokens { STRIPS } else { ONE_TOKEN_STRIPS }
    }

    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, team: &Team<'_>) {
        self.expand.prepare(input, to, team);
        let lanes = self.lanes(input.together, to.0.batch());
        if let Some(lanes) = lanes.filter(|_| self.builds()) {
            self.build(to.0, lanes, team);
        }
    }

    fn rows(&self, call: &Call<'_>, out: &mut [f32]) {
        let lanes = self.lanes(call.together, call.x.batch());
        let Some(psums) = lanes.and_then(|lanes| call.x.psums.iter().find(|psums| psums.is_of(self, lanes)))
        else {
            return self.expand.rows(call, out);
        };
        let most = self.tile.strips.clamp(1, STRIPS);
        let read = if most > FEW_STRIPS { Self::read::<STRIPS> } else { Self::read::<FEW_STRIPS> };
        for first in call.strips.clone().step_by(most) {
            read(self, call, psums, first..call.strips.end.min(first + most), out);
        }
    }
}

/// See [`BuildFn`].
fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    match centroids.each() {
        16 => build_of::<16>(centroids, x, out),
        _ => build_of::<256>(centroids, x, out),
    }
}

fn build_of<const N: usize>(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    let weights = 2 * centroids.pairs();
    let each = centroids.count() * N * x.len();
    for (vector, out) in out.chunks_exact_mut(each).enumerate() {
        for (book, out) in out.chunks_exact_mut(N * x.len()).enumerate() {
            out.fill(0);
            for pair in 0..centroids.pairs() {
                for (out, c) in out.chunks_exact_mut(x.len()).zip(centroids.of_pair::<N>(book, pair)) {
                    for (out, x) in out.iter_mut().zip(x) {
                        let x = &x[vector * weights + 2 * pair..];
                        // In range: `Centroids::of` has seen to it.
                        *out += c[0] * i16::from(x[0]) + c[1] * i16::from(x[1]);
                    }
                }
            }
        }
    }
}

/// See [`ReadFn`].
fn read(codes: PsumCodes<'_>, (psums, lanes): (&[i16], usize), sums: &mut [PsumRows]) {
    for (strip, sums) in sums.iter_mut().enumerate() {
        let codes = codes.strip(strip);
        if codes.is_empty() {
            continue;
        }
        let of_byte = psums.len() / codes.len();
        for (codes, psums) in codes.iter().zip(psums.chunks_exact(of_byte)) {
            for (sums, &code) in sums.chunks_exact_mut(lanes).zip(codes) {
                let code = usize::from(code);
                // A byte is a code, or one of each of two codebooks.
                let places = if of_byte == 256 * lanes {
                    [Some(code), None]
                } else {
                    [Some(code & 15), Some(16 + (code >> 4))]
                };
                for place in places.into_iter().flatten() {
                    let psums = &psums[place * lanes..][..lanes];
                    sums.iter_mut().zip(psums).for_each(|(sum, psum)| *sum += i32::from(*psum));
                }
            }
        }
    }
}
