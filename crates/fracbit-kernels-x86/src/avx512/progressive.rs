//! The microkernel of progressive schemes: a vector of codes holds four columns of 16 rows in each
//! half of its bytes, so a dot product of four bytes consumes it after a mask, or a shift and a
//! mask.

use super::Avx512;
use crate::reads::Reads;
use fracbit_kernels::{
    Isa, PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs, ProgressiveMicrokernel,
};
use std::arch::x86_64::*;

/// Tokens that meet a piece together: as many as two strips have room for in registers.
const TOKENS: usize = 8;
/// Pieces of a group.
const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;

pub(crate) fn microkernel(_: Avx512) -> ProgressiveMicrokernel {
    // SAFETY: there is a proof of the instruction set. `strips` reads what slices hold, whose
    // lengths are checked once for each token and strip.
    unsafe { ProgressiveMicrokernel::new(Isa::Avx512, strips) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn strips(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
    args.debug_check();
    let reads = Reads::of_machine();
    // One strip gives too few sums to hide a product's latency behind others, once a token has only
    // one of them; with few tokens it is a matter of streams.
    let pairs = if args.tokens > 4 { 2 } else { reads.strips };
    let mut strip = 0;
    while strip < args.strips() {
        let both = pairs == 2 && strip + 2 <= args.strips();
        let mut token = 0;
        while token < args.tokens {
            let at = At { args, strip, token, reads };
            let out = &mut out[token * args.out_stride + 16 * strip..];
            match (both, args.tokens - token) {
                (false, 1) => at.multiply::<1, 1, 4, true>(out),
                (false, 2) => at.multiply::<1, 2, 4, true>(out),
                (false, 3) => at.multiply::<1, 3, 2, true>(out),
                (false, 4) => at.multiply::<1, 4, 2, true>(out),
                (false, 5) => at.multiply::<1, 5, 2, true>(out),
                (false, 6) => at.multiply::<1, 6, 2, true>(out),
                (false, 7) => at.multiply::<1, 7, 2, true>(out),
                (false, _) => at.multiply::<1, TOKENS, 1, true>(out),
                (true, 1) => at.multiply::<2, 1, 4, true>(out),
                (true, 2) => at.multiply::<2, 2, 2, true>(out),
                (true, 3) => at.multiply::<2, 3, 2, true>(out),
                (true, 4) => at.multiply::<2, 4, 1, true>(out),
                (true, 5) => at.multiply::<2, 5, 1, true>(out),
                (true, 6) => at.multiply::<2, 6, 1, true>(out),
                (true, 7) => at.multiply::<2, 7, 1, true>(out),
                (true, _) if token > 0 => at.multiply::<2, TOKENS, 1, false>(out),
                (true, _) => at.multiply::<2, TOKENS, 1, true>(out),
            }
            token += TOKENS;
        }
        strip += if both { 2 } else { 1 };
    }
}

/// The strip and the token from which on products are wanted.
struct At<'a> {
    args: &'a ProgressiveArgs<'a>,
    strip: usize,
    token: usize,
    reads: Reads,
}

impl At<'_> {
    /// The products of `S` strips and `T` tokens, with `C` sums for each, added to `out`, which
    /// begins with the first of both. Codes that may come from memory are asked for ahead (`ASK`);
    /// later tokens find them in a cache, where asking takes a seventh of the time.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    #[inline]
    #[expect(clippy::needless_range_loop, reason = "several arrays have these indices")]
    fn multiply<const S: usize, const T: usize, const C: usize, const ASK: bool>(&self, out: &mut [f32]) {
        let At { args, strip, token, reads } = *self;
        let columns = args.pieces * PROGRESSIVE_COLUMNS;
        let mut x = [args.x.as_ptr(); T];
        for (t, x) in x.iter_mut().enumerate() {
            *x = args.x[(token + t) * args.x_stride..][..columns].as_ptr();
        }
        let all = args.codes.as_chunks::<PROGRESSIVE_BYTES>().0;
        let mut codes = [all; S];
        let mut factors = [args.factors; S];
        for s in 0..S {
            codes[s] = &all[(strip + s) * args.pieces..][..args.pieces];
            factors[s] = &args.factors[(strip + s) * args.groups..][..args.groups];
        }
        let zero = _mm512_setzero_ps();
        let mut inner = [[zero; T]; S];
        for block in (0..args.groups).step_by(2) {
            let mut whole = [[zero; T]; S];
            for g in block..args.groups.min(block + 2) {
                let pieces = g * PIECES..args.pieces.min((g + 1) * PIECES);
                let mut part = codes;
                for part in &mut part {
                    *part = &part[pieces.clone()];
                }
                // SAFETY: all parts have as many pieces, and every token as many activations from
                // group `g` on; they are a multiple of two pieces, which a tile has.
                let sums = unsafe { group::<S, T, C, ASK>(part, &x, g * PROGRESSIVE_GROUP, reads) };
                for s in 0..S {
                    let (scales, zeros) = (floats(&factors[s][g].scales), floats(&factors[s][g].zeros));
                    for t in 0..T {
                        let sum = args.sums[(token + t) * args.groups + g];
                        let sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(sum));
                        // Whole numbers below 2^24: exact, in whatever order.
                        let with = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[s][t]), scales, whole[s][t]);
                        whole[s][t] = _mm512_fnmadd_ps(zeros, sum, with);
                    }
                }
            }
            for t in 0..T {
                let block_scale = _mm512_set1_ps(args.block_scales[(token + t) * args.groups + block]);
                for s in 0..S {
                    inner[s][t] = _mm512_add_ps(inner[s][t], _mm512_mul_ps(whole[s][t], block_scale));
                }
            }
        }
        for t in 0..T {
            let out = &mut out[t * args.out_stride..][..16 * S];
            for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                // SAFETY: 16 numbers each.
                unsafe {
                    let scaled = _mm512_mul_ps(inner[s][t], _mm512_loadu_ps(args.scales[strip + s].as_ptr()));
                    _mm512_storeu_ps(out.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(out.as_ptr()), scaled));
                }
            }
        }
    }
}

// Loops over indices, no closures: a closure with vectors in it that is handed to a function of the
// standard library is called and not inlined.

/// Sums of code times activation over a group, a row in each lane, for each strip and token.
///
/// # Safety
/// All of `codes` have as many pieces, a multiple of two, and there are eight activations for each
/// from `first` on behind every pointer of `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
#[inline]
#[expect(clippy::needless_range_loop, reason = "several arrays have these indices")]
unsafe fn group<const S: usize, const T: usize, const C: usize, const ASK: bool>(
    codes: [&[[u8; PROGRESSIVE_BYTES]]; S],
    x: &[*const i8; T],
    first: usize,
    reads: Reads,
) -> [[__m512i; T]; S] {
    let mask = _mm512_set1_epi8(15);
    let mut sums = [[[_mm512_setzero_si512(); C]; T]; S];
    let mut i = 0;
    while i < codes[0].len() {
        for odd in 0..2 {
            let mut halves = [[mask; 2]; S];
            for s in 0..S {
                // SAFETY: all have as many pieces.
                let piece = unsafe { codes[s].get_unchecked(i + odd) };
                if ASK {
                    reads.ask(piece.as_ptr(), PROGRESSIVE_BYTES);
                }
                // SAFETY: 64 bytes.
                let both = unsafe { _mm512_loadu_si512(piece.as_ptr().cast()) };
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask);
                halves[s] = [_mm512_and_si512(both, mask), high];
            }
            for half in 0..2 {
                let chain = (2 * odd + half) % C;
                for t in 0..T {
                    let at = first + (i + odd) * PROGRESSIVE_COLUMNS + half * (PROGRESSIVE_COLUMNS / 2);
                    // SAFETY: four activations, promised by the caller.
                    let four = unsafe { x[t].add(at).cast::<i32>().read_unaligned() };
                    let four = _mm512_set1_epi32(four);
                    for s in 0..S {
                        sums[s][t][chain] = _mm512_dpbusd_epi32(sums[s][t][chain], halves[s][half], four);
                    }
                }
            }
        }
        i += 2;
    }
    let mut total = [[_mm512_setzero_si512(); T]; S];
    for s in 0..S {
        for t in 0..T {
            total[s][t] = sums[s][t][0];
            for c in 1..C {
                total[s][t] = _mm512_add_epi32(total[s][t], sums[s][t][c]);
            }
        }
    }
    total
}

/// 16 bytes as floats.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
#[inline]
fn floats(bytes: &[u8; 16]) -> __m512 {
    // SAFETY: 16 bytes.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
}
