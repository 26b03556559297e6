//! The kernel of additive codebooks: partial sums are looked up and no weight is ever made.
//!
//! A weight vector is a sum of centroids, so its product with activations is a sum of products of
//! centroids with activations, of which there are only 256 for each codebook and each place of the
//! vector among the columns. A *Psumbook* (CodeGEMM, section 3) has them all: it is built for some
//! columns at a time, in a first-level cache, and read by the codes of all strips of a call.
//! Building costs what 256 rows cost with one codebook; reading costs a load and an addition for
//! each code, in place of as many multiplications as a centroid has weights.
//!
//! The paper's partial sums are of half-precision numbers. Ours are integers of the activations and
//! centroids that the expanding kernel multiplies, so that block sums, and all behind them, have
//! the same bits.

use super::{ExpandThenDot, Part};
use crate::{
    Activations, Call, Input, Isa, Kernels, LinearKernel, Precision, Prepared, Team,
    args::{Block, ONE_TOKEN_STRIPS},
};
use fracbit_base::Shape;
use fracbit_format::{Codebook, Index, PackedView, TILE_COLS, TILE_ROWS};
use std::{ops::Range, sync::Arc};

/// Centroids of a codebook.
const CENTROIDS: usize = 256;
/// Tokens whose partial sums lie side by side where there are several: a code is read once for all
/// of them.
pub const PSUM_TOKENS: usize = 4;
/// Most tokens that meet the same rows by a Psumbook; for more codes are expanded.
const MOST_TOKENS: usize = 8;
/// Partial sums that are built, and read for all strips of a call, before the next ones: half of a
/// first-level cache.
const CHUNK: usize = 4096;
/// Room for them: at least for a tile of the most codebooks.
const MOST_PSUMS: usize = 6 * CENTROIDS * PSUM_TOKENS;

/// Builds the part of a Psumbook that belongs to one tile of columns.
///
/// Adds nothing: `out`, `(vector of columns, book, centroid, token)`, becomes the products of
/// centroids with the activations of one token or [`PSUM_TOKENS`].
pub type BuildFn = unsafe fn(&Centroids, &[[i8; TILE_COLS]], &mut [i32]);

/// Reads a part of a Psumbook with the codes of 16 rows.
///
/// For every 16 codes, `psums` has 256 partial sums for each token; `sums`, `(row, token)`, gets
/// those of the codes added. Both kinds of numbers of tokens: 1 and [`PSUM_TOKENS`].
pub type ReadFn = unsafe fn(&[[u8; TILE_ROWS]], &[i32], &mut [i32]);

/// How an instruction set builds and reads a Psumbook.
#[derive(Clone, Copy, Debug)]
pub struct PsumBody {
    isa: Isa,
    build: BuildFn,
    read: ReadFn,
}

impl PsumBody {
    /// A body for `isa`.
    ///
    /// # Safety
    /// The processor has `isa`. `build` is sound for any [`Centroids`] with one token or
    /// [`PSUM_TOKENS`] and an `out` of [`Centroids::psums`] numbers for each, `read` for any codes
    /// with 256 partial sums for each 16 of them and token, and 16 sums for each token.
    #[must_use]
    #[expect(unsafe_code, reason = "the contract that lets safe code call bodies with target features")]
    pub const unsafe fn new(isa: Isa, build: BuildFn, read: ReadFn) -> Self {
        Self { isa, build, read }
    }

    /// The body in plain Rust.
    #[must_use]
    pub const fn portable() -> Self {
        Self { isa: Isa::Scalar, build, read }
    }
}

/// Centroids as a build wants them: neighbouring weights in pairs, all centroids of a pair side by
/// side.
#[derive(Clone, Debug)]
pub struct Centroids {
    index: Index,
    pairs: Vec<[i16; 2]>, // (book, pair of columns, centroid)
}

impl Centroids {
    /// Those of an additive codebook; `None` for every other.
    fn of(codebook: &Codebook) -> Option<Self> {
        let index = codebook.additive()?;
        let entry =
            |book: usize, k: usize, c: usize| codebook.entries()[(book * CENTROIDS + c) * index.weights + k];
        let mut pairs = Vec::with_capacity(codebook.entries().len() / 2);
        for book in 0..index.count {
            for k in (0..index.weights).step_by(2) {
                pairs.extend((0..CENTROIDS).map(|c| [entry(book, k, c), entry(book, k + 1, c)]));
            }
        }
        Some(Self { index, pairs })
    }

    /// Codebooks.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.index.count
    }

    /// Pairs of weights of a centroid.
    #[must_use]
    pub const fn pairs(&self) -> usize {
        self.index.weights / 2
    }

    /// All centroids' pair `pair`, 256, of a codebook.
    ///
    /// # Panics
    /// When there is no such codebook or pair.
    #[must_use]
    pub fn of_pair(&self, book: usize, pair: usize) -> &[[i16; 2]; CENTROIDS] {
        let all = &self.pairs[(book * self.pairs() + pair) * CENTROIDS..];
        all.first_chunk().expect("a codebook and a pair that there are")
    }

    /// Codes of a row in a tile.
    const fn codes(&self) -> usize {
        TILE_COLS / self.index.weights * self.index.count
    }

    /// Partial sums of a token in a tile of columns.
    #[must_use]
    pub const fn psums(&self) -> usize {
        self.codes() * CENTROIDS
    }
}

/// A matrix of additive codebooks whose products of few tokens go through a Psumbook, those of more
/// through expanded codes.
#[derive(Clone, Debug)]
struct Psumbook {
    expand: ExpandThenDot,
    centroids: Centroids,
    body: PsumBody,
}

/// The kernel of `view` that builds and reads Psumbooks by `body`, for matrices of additive
/// codebooks; `None` for all others. Where many tokens meet, the bodies of `kernels` expand codes.
#[must_use]
pub fn psumbook(kernels: &Kernels, view: &PackedView<'_>, body: PsumBody) -> Option<Arc<dyn LinearKernel>> {
    let [codebook] = view.codebooks() else { return None };
    let centroids = Centroids::of(codebook)?;
    let expand = ExpandThenDot::new(kernels, view);
    // Rows and codes are taken in the canonical order.
    let [part] = &*expand.parts else { return None };
    let natural = part.body.packing().is_none() && part.lane_of.iter().copied().eq(0..16);
    natural.then(|| Arc::new(Psumbook { expand, centroids, body }) as Arc<dyn LinearKernel>)
}

impl Psumbook {
    fn part(&self) -> &Part {
        &self.expand.parts[0]
    }

    /// Tokens side by side in a Psumbook where so many meet the same rows; `None` where codes are
    /// expanded.
    fn lanes(&self, together: usize) -> Option<usize> {
        let few = together <= MOST_TOKENS && self.part().body.interleave(together).is_none();
        few.then_some(if together == 1 { 1 } else { PSUM_TOKENS })
    }

    /// Partial sums of some tokens, at most as many as `out` has room for, and a tile of columns.
    fn build(&self, x: &Activations, tokens: Range<usize>, tile: usize, out: &mut [i32]) {
        let mut ints = [[0; TILE_COLS]; PSUM_TOKENS];
        for (ints, token) in ints.iter_mut().zip(tokens) {
            ints.copy_from_slice(&x.narrow.ints[token * x.stride() + tile * TILE_COLS..][..TILE_COLS]);
        }
        let lanes = out.len() / self.centroids.psums();
        #[expect(unsafe_code, reason = "the one call that builds a Psumbook")]
        // SAFETY: `PsumBody::new` was promised the instruction set, and soundness for one token or
        // `PSUM_TOKENS` and this many partial sums.
        unsafe {
            (self.body.build)(&self.centroids, &ints[..lanes], out);
        }
    }

    /// Some strips and the tokens of a call, `lanes` of them side by side.
    fn read(&self, call: &Call<'_>, lanes: usize, strips: Range<usize>, out: &mut [f32]) {
        let (part, x) = (self.part(), call.x);
        let (codes_of_tile, psums_of_tile) = (self.centroids.codes(), self.centroids.psums() * lanes);
        let at_once = (CHUNK / psums_of_tile).max(1);
        let mut psums = [0; MOST_PSUMS];
        let mut sums = [[0; TILE_ROWS * PSUM_TOKENS]; ONE_TOKEN_STRIPS];
        let mut inner = [[0f32; TILE_ROWS * PSUM_TOKENS]; ONE_TOKEN_STRIPS];
        for first in call.tokens.clone().step_by(lanes) {
            let tokens = first..call.tokens.end.min(first + lanes);
            for (index, block) in part.blocks.iter().enumerate() {
                let end = block.start + block.tiles;
                sums[..strips.len()].fill([0; TILE_ROWS * PSUM_TOKENS]);
                for from in (block.start..end).step_by(at_once) {
                    let tiles = from..end.min(from + at_once);
                    let psums = &mut psums[..tiles.len() * psums_of_tile];
                    for (tile, psums) in tiles.clone().zip(psums.chunks_exact_mut(psums_of_tile)) {
                        self.build(x, tokens.clone(), tile, &mut psums[..psums_of_tile]);
                    }
                    for (strip, sums) in strips.clone().zip(&mut sums) {
                        let codes = self.expand.codes_of(part, strip).as_chunks().0;
                        let codes = &codes[tiles.start * codes_of_tile..tiles.end * codes_of_tile];
                        #[expect(unsafe_code, reason = "the one call that reads a Psumbook")]
                        // SAFETY: `PsumBody::new` was promised the instruction set, and soundness
                        // for 256 partial sums for each 16 codes and token, and as many sums.
                        unsafe {
                            (self.body.read)(codes, psums, &mut sums[..TILE_ROWS * lanes]);
                        }
                    }
                }
                for (s, strip) in strips.clone().enumerate() {
                    let scales = &part.scales[(strip * part.groups + block.group) * TILE_ROWS..];
                    for token in tokens.clone() {
                        let scale = x.block_scales[call.factors + token * part.blocks.len() + index];
                        let at = (token - call.tokens.start) * call.stride
                            + (strip - call.strips.start) * TILE_ROWS;
                        let lane = token - first;
                        let numbers = sums[s][lane..].iter().step_by(lanes);
                        let inner = inner[s][lane..].iter_mut().step_by(lanes);
                        finish(block, (numbers, inner), (scale, scales), &mut out[at..][..TILE_ROWS]);
                    }
                }
            }
        }
    }
}

/// As [`Args`](crate::Args) says, for the sums of a block, a token and 16 rows.
fn finish<'a>(
    block: &Block,
    (sums, inner): (impl Iterator<Item = &'a i32>, impl Iterator<Item = &'a mut f32>),
    (block_scale, scales): (f32, &[half::f16]),
    out: &mut [f32],
) {
    for (((sum, inner), out), scale) in sums.zip(inner).zip(out).zip(scales) {
        #[expect(clippy::cast_precision_loss, reason = "rounded to nearest, as the vector conversions do")]
        let part = *sum as f32 * block_scale;
        *inner += part;
        if block.closes {
            let scaled = *inner * scale.to_f32();
            *out += scaled;
            *inner = 0.0;
        }
    }
}

impl LinearKernel for Psumbook {
    fn shape(&self) -> Shape {
        self.expand.shape()
    }

    fn isa(&self) -> Isa {
        self.expand.isa().min(self.body.isa)
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

    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, team: &Team<'_>) {
        self.expand.prepare(input, to, team);
    }

    fn rows(&self, call: &Call<'_>, out: &mut [f32]) {
        let Some(lanes) = self.lanes(call.together) else { return self.expand.rows(call, out) };
        for first in call.strips.clone().step_by(ONE_TOKEN_STRIPS) {
            self.read(call, lanes, first..call.strips.end.min(first + ONE_TOKEN_STRIPS), out);
        }
    }
}

/// See [`BuildFn`].
fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i32]) {
    let weights = 2 * centroids.pairs();
    let each = centroids.count() * CENTROIDS * x.len();
    for (vector, out) in out.chunks_exact_mut(each).enumerate() {
        for (book, out) in out.chunks_exact_mut(CENTROIDS * x.len()).enumerate() {
            out.fill(0);
            for pair in 0..centroids.pairs() {
                for (out, c) in out.chunks_exact_mut(x.len()).zip(centroids.of_pair(book, pair)) {
                    for (out, x) in out.iter_mut().zip(x) {
                        let x = &x[vector * weights + 2 * pair..];
                        let product = |k: usize| i32::from(c[k]) * i32::from(x[k]);
                        *out += product(0) + product(1);
                    }
                }
            }
        }
    }
}

/// See [`ReadFn`].
fn read(codes: &[[u8; TILE_ROWS]], psums: &[i32], sums: &mut [i32]) {
    let lanes = sums.len() / TILE_ROWS;
    for (codes, psums) in codes.iter().zip(psums.chunks_exact(CENTROIDS * lanes)) {
        for (sums, &code) in sums.chunks_exact_mut(lanes).zip(codes) {
            let psums = &psums[usize::from(code) * lanes..][..lanes];
            sums.iter_mut().zip(psums).for_each(|(sum, psum)| *sum += psum);
        }
    }
}
