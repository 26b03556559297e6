//! Progressive schemes on processors with AMX, for more than eight tokens: the int8 weights of the
//! first level are made once for each block and met by all tokens in [tile
//! registers](super::tiles).
//!
//! Scales and zeros of groups would be work for each token and row if they met the sums, as they do
//! where there are few tokens. `scale q - zero` is a byte in whatever a quantizer makes, and costs
//! a product of words for two columns of 16 rows each, since `scale q` is at most 240.

use super::{
    Amx, Avx512, progressive,
    tiles::{GROUPS, Inner, STRIP, Sums, VECTORS, Weights, configure, multiply, release, scale},
};
use fracbit_kernels::{
    Isa, MAX_STRIPS, MAX_TOKENS, PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs,
    ProgressiveFactors, ProgressiveMicrokernel, ROWS,
};
use std::{arch::x86_64::*, mem::MaybeUninit};

/// Pieces of a group, and groups of a block.
const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;
const BLOCK: usize = 2;

const _: () = assert!(STRIP == 2 * BLOCK * PIECES, "a piece is two vectors");

pub(crate) fn microkernel(plain: Avx512, _: Amx) -> ProgressiveMicrokernel {
    // SAFETY: there are proofs of both instruction sets; `tiles` reads rows that `fits` promises
    // and what slices hold.
    unsafe { progressive::microkernel(plain).with_many(Isa::Amx, tiles) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn tiles(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
    args.debug_check();
    assert!(args.fits && args.tokens <= MAX_TOKENS, "weights are bytes");
    let mut weights: Weights = [_mm512_setzero_si512(); MAX_STRIPS * STRIP];
    let mut inner = [MaybeUninit::<Inner>::uninit(); MAX_TOKENS.div_ceil(ROWS)];
    let inner = &mut inner[..args.tokens.div_ceil(ROWS)];
    // SAFETY: there is AMX.
    unsafe { configure() };
    for strip in (0..args.strips()).step_by(MAX_STRIPS) {
        let strips = MAX_STRIPS.min(args.strips() - strip);
        weights[strips * STRIP..].fill(_mm512_setzero_si512());
        inner.fill(MaybeUninit::new([[_mm512_setzero_ps(); ROWS]; MAX_STRIPS]));
        for block in (0..args.groups).step_by(BLOCK) {
            let groups = block..args.groups.min(block + BLOCK);
            let mut vectors = 0;
            for s in 0..strips {
                vectors = expand(args, strip + s, groups.clone(), &mut weights[s * STRIP..][..STRIP]);
            }
            // SAFETY: activations of this block stand behind those of the ones before it.
            let x = unsafe { args.x.as_ptr().add(block * PROGRESSIVE_GROUP) };
            let steps = vectors / VECTORS;
            // While the sums of some tokens meet their scales the tile registers are at the next
            // ones.
            let mut sums = [MaybeUninit::<Sums>::uninit(); 2];
            for (nth, token) in (0..args.tokens).step_by(GROUPS * ROWS).enumerate() {
                let more = args.tokens - token > ROWS;
                // SAFETY: rows up to a multiple of sixteen are readable, and 64 bytes behind them.
                let x = unsafe { x.add(token * args.x_stride) };
                // SAFETY: there is AMX; see above.
                unsafe { multiply(x, args.x_stride, more, &weights, steps, &mut sums[nth % 2]) };
                if nth > 0 {
                    // SAFETY: the sums of the tokens before were written, and so was `inner`.
                    unsafe { add(args, block, token - GROUPS * ROWS, &sums[(nth - 1) % 2], inner) };
                }
            }
            let last = (args.tokens - 1) / (GROUPS * ROWS);
            // SAFETY: the sums of the last tokens were written.
            unsafe { add(args, block, last * GROUPS * ROWS, &sums[last % 2], inner) };
        }
        for (first, inner) in (0..args.tokens).step_by(ROWS).zip(&*inner) {
            // SAFETY: written above.
            let inner = unsafe { inner.assume_init_ref() };
            for t in 0..ROWS.min(args.tokens - first) {
                let out = &mut out[(first + t) * args.out_stride + 16 * strip..][..16 * strips];
                for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    // SAFETY: 16 numbers each.
                    unsafe {
                        let scaled =
                            _mm512_mul_ps(inner[s][t], _mm512_loadu_ps(args.scales[strip + s].as_ptr()));
                        _mm512_storeu_ps(
                            out.as_mut_ptr(),
                            _mm512_add_ps(_mm512_loadu_ps(out.as_ptr()), scaled),
                        );
                    }
                }
            }
        }
    }
    // SAFETY: no tile register holds anything that is wanted.
    unsafe { release() };
}

/// The weights of some groups of a strip; behind them zeros up to a whole tile register. Returns
/// how many vectors that are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn expand(
    args: &ProgressiveArgs<'_>,
    strip: usize,
    groups: std::ops::Range<usize>,
    to: &mut [__m512i],
) -> usize {
    let mask = _mm512_set1_epi8(15);
    let codes = &args.codes.as_chunks::<PROGRESSIVE_BYTES>().0[strip * args.pieces..][..args.pieces];
    let factors = &args.factors[strip * args.groups..][groups.clone()];
    let pieces = &codes[groups.start * PIECES..args.pieces.min(groups.end * PIECES)];
    for ((pieces, factors), to) in pieces.chunks(PIECES).zip(factors).zip(to.chunks_mut(2 * PIECES)) {
        let ProgressiveFactors { scales, zeros } = factors;
        let (scales, zeros) = (words(scales), bytes(zeros));
        for (piece, to) in pieces.iter().zip(to.as_chunks_mut::<2>().0) {
            // SAFETY: 64 bytes.
            let both = unsafe { _mm512_loadu_si512(piece.as_ptr().cast()) };
            let halves = [both, _mm512_srli_epi16::<4>(both)];
            for half in 0..2 {
                let scaled = _mm512_mullo_epi16(_mm512_and_si512(halves[half], mask), scales);
                to[half] = _mm512_sub_epi8(scaled, zeros);
            }
        }
    }
    let (end, whole) = (2 * pieces.len(), (2 * pieces.len()).next_multiple_of(VECTORS));
    to[end..whole].fill(_mm512_setzero_si512());
    whole
}

/// The number of each row in both words of its lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn words(rows: &[u8; 16]) -> __m512i {
    // SAFETY: 16 bytes.
    let each = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(rows.as_ptr().cast()) });
    _mm512_or_si512(each, _mm512_slli_epi32::<16>(each))
}

/// The number of each row in the four bytes of its lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn bytes(rows: &[u8; 16]) -> __m512i {
    let words = words(rows);
    _mm512_or_si512(words, _mm512_slli_epi32::<8>(words))
}

/// Takes the sums of up to 32 tokens from `token` on to `inner`.
///
/// # Safety
/// [`multiply`] wrote the sums, and `inner` was written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn add(
    args: &ProgressiveArgs<'_>,
    block: usize,
    token: usize,
    sums: &MaybeUninit<Sums>,
    inner: &mut [MaybeUninit<Inner>],
) {
    for (g, first) in (token..args.tokens).step_by(ROWS).enumerate().take(GROUPS) {
        // Rows behind the last token become zeros.
        let mut factors = [0f32; ROWS];
        let all = args.block_scales.chunks_exact(args.groups).skip(first);
        factors.iter_mut().zip(all).for_each(|(factor, token)| *factor = token[block]);
        // SAFETY: promised by the caller.
        unsafe { scale(&(*sums.as_ptr())[g], &factors, inner[first / ROWS].assume_init_mut()) };
    }
}
