//! The microkernel of progressive schemes: unsigned codes times signed activations in pairs, sums
//! of 16 bits for 32 columns, then of 32 bits; or four at once, with AVX-VNNI.

use super::{Avx2, AvxVnni, dot};
use crate::reads::Reads;
use fracbit_kernels::{
    Isa, PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs, ProgressiveFactors,
    ProgressiveMicrokernel,
};
use std::arch::x86_64::*;

/// Tokens that meet a piece together: as many as have room for their sums in registers.
const TOKENS: usize = 4;
/// Pieces whose products are summed in 16 bits: `4 x 4 x 15 x 127 = 30480`.
const CHUNK: usize = 4;
/// Pieces of a group.
const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;

pub(crate) fn microkernel(_: Avx2) -> ProgressiveMicrokernel {
    // SAFETY: there is a proof of the instruction set. `strips` reads what slices hold, whose
    // lengths are checked once for each token and strip.
    unsafe { ProgressiveMicrokernel::new(Isa::Avx2, strips::<false>) }
}

/// The same with AVX-VNNI.
pub(crate) fn vnni_microkernel(_: AvxVnni) -> ProgressiveMicrokernel {
    // SAFETY: as in `microkernel`.
    unsafe { ProgressiveMicrokernel::new(Isa::AvxVnni, strips::<true>) }
}

/// # Safety
/// The processor has the features of [`Avx2`], with `VNNI` of [`AvxVnni`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn strips<const VNNI: bool>(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
    args.debug_check();
    let reads = Reads::of_machine();
    let codes = args.codes.as_chunks::<PROGRESSIVE_BYTES>().0;
    for strip in 0..args.strips() {
        let one = Strip {
            codes: &codes[strip * args.pieces..][..args.pieces],
            factors: &args.factors[strip * args.groups..][..args.groups],
            scales: &args.scales[strip],
        };
        let mut token = 0;
        while token < args.tokens {
            let out = &mut out[token * args.out_stride + 16 * strip..];
            // SAFETY: promised by the caller.
            unsafe {
                match args.tokens - token {
                    1 => one.multiply::<1, VNNI>(args, token, reads, out),
                    2 => one.multiply::<2, VNNI>(args, token, reads, out),
                    3 => one.multiply::<3, VNNI>(args, token, reads, out),
                    _ => one.multiply::<TOKENS, VNNI>(args, token, reads, out),
                }
            }
            token += TOKENS;
        }
    }
}

/// 16 rows.
struct Strip<'a> {
    codes: &'a [[u8; PROGRESSIVE_BYTES]],
    factors: &'a [ProgressiveFactors],
    scales: &'a [f32; 16],
}

impl Strip<'_> {
    /// The products of `T` tokens from `token` on, added to `out`, which begins with the strip's of
    /// the first.
    ///
    /// # Safety
    /// As for [`strips`].
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn multiply<const T: usize, const VNNI: bool>(
        &self,
        args: &ProgressiveArgs<'_>,
        token: usize,
        reads: Reads,
        out: &mut [f32],
    ) {
        let columns = self.codes.len() * PROGRESSIVE_COLUMNS;
        let mut x = [args.x.as_ptr(); T];
        for (t, x) in x.iter_mut().enumerate() {
            *x = args.x[(token + t) * args.x_stride..][..columns].as_ptr();
        }
        let zero = _mm256_setzero_ps();
        let mut inner = [[zero; 2]; T];
        let mut block = [[zero; 2]; T];
        for (g, (codes, factors)) in self.codes.chunks(PIECES).zip(self.factors).enumerate() {
            // SAFETY: every token has as many activations as the strip has columns, of which these
            // codes are some from group `g` on; `columns` is a multiple of 16.
            let sums = unsafe { group::<T, VNNI>(codes, &x, g * PROGRESSIVE_GROUP, reads) };
            let (scales, zeros) = (floats(&factors.scales), floats(&factors.zeros));
            let closes = g % 2 == 1 || g + 1 == self.factors.len();
            for t in 0..T {
                let at = (token + t) * args.groups + g;
                #[expect(clippy::cast_precision_loss, reason = "below 2^15")]
                let sum = _mm256_set1_ps(args.sums[at] as f32);
                let block_scale = _mm256_set1_ps(args.block_scales[at]);
                for half in 0..2 {
                    // Whole numbers below 2^24: exact, in whatever order.
                    let codes = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[t][half]), scales[half]);
                    let part = _mm256_sub_ps(codes, _mm256_mul_ps(zeros[half], sum));
                    let whole = _mm256_add_ps(block[t][half], part);
                    if closes {
                        inner[t][half] = _mm256_add_ps(inner[t][half], _mm256_mul_ps(whole, block_scale));
                        block[t][half] = zero;
                    } else {
                        block[t][half] = whole;
                    }
                }
            }
        }
        for (t, inner) in inner.iter().enumerate() {
            let (out, _) = out[t * args.out_stride..][..16].as_chunks_mut::<8>();
            let scales = self.scales.as_chunks::<8>().0;
            for half in 0..2 {
                // SAFETY: eight numbers each.
                unsafe {
                    let scaled = _mm256_mul_ps(inner[half], _mm256_loadu_ps(scales[half].as_ptr()));
                    let sum = _mm256_add_ps(_mm256_loadu_ps(out[half].as_ptr()), scaled);
                    _mm256_storeu_ps(out[half].as_mut_ptr(), sum);
                }
            }
        }
    }
}

// Loops over indices below, no closures: a closure with vectors in it that is handed to a function
// of the standard library is called and not inlined.

/// Sums of code times activation over a group: rows 0 to 7 and 8 to 15, for each token.
///
/// # Safety
/// There are eight activations for each piece of `codes`, a multiple of two pieces, from `first` on
/// behind every pointer of `x`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn group<const T: usize, const VNNI: bool>(
    codes: &[[u8; PROGRESSIVE_BYTES]],
    x: &[*const i8; T],
    first: usize,
    reads: Reads,
) -> [[__m256i; 2]; T] {
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    let (chunks, rest) = codes.as_chunks::<CHUNK>();
    let mut at = first;
    for chunk in chunks {
        reads.ask(chunk.as_ptr().cast(), CHUNK * PROGRESSIVE_BYTES);
        // SAFETY: promised by the caller, as below.
        unsafe { add::<T, _, VNNI>(chunk, x, at, &mut sums) };
        at += CHUNK * PROGRESSIVE_COLUMNS;
    }
    if let Some(half) = rest.first_chunk::<{ CHUNK / 2 }>() {
        // SAFETY: as above.
        unsafe { add::<T, _, VNNI>(half, x, at, &mut sums) };
    }
    sums
}

/// Adds the products of `N` pieces, at most [`CHUNK`], to the sums.
///
/// # Safety
/// As for [`group`].
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn add<const T: usize, const N: usize, const VNNI: bool>(
    codes: &[[u8; PROGRESSIVE_BYTES]; N],
    x: &[*const i8; T],
    first: usize,
    sums: &mut [[__m256i; 2]; T],
) {
    let mask = _mm256_set1_epi8(15);
    let mut short = [[_mm256_setzero_si256(); 2]; T];
    for i in 0..N {
        let mut four = [[_mm256_setzero_si256(); 2]; T];
        for t in 0..T {
            // SAFETY: eight activations, promised by the caller.
            let eight =
                unsafe { x[t].add(first + i * PROGRESSIVE_COLUMNS).cast::<[i32; 2]>().read_unaligned() };
            four[t] = [_mm256_set1_epi32(eight[0]), _mm256_set1_epi32(eight[1])];
        }
        for half in 0..2 {
            // SAFETY: 32 of 64 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes[i].as_ptr().add(32 * half).cast()) };
            let low = _mm256_and_si256(codes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
            for t in 0..T {
                let (sum, short) = (&mut sums[t][half], &mut short[t][half]);
                if VNNI {
                    // Few tokens have room for more sums, which hide each other's latency.
                    // SAFETY: the processor has the instruction, as promised by the caller.
                    unsafe {
                        *sum = dot::<true>(*sum, low, four[t][0]);
                        let sum = if T <= 2 { short } else { sum };
                        *sum = dot::<true>(*sum, high, four[t][1]);
                    }
                } else {
                    *short = _mm256_add_epi16(*short, _mm256_maddubs_epi16(low, four[t][0]));
                    *short = _mm256_add_epi16(*short, _mm256_maddubs_epi16(high, four[t][1]));
                }
            }
        }
    }
    let ones = _mm256_set1_epi16(1);
    for t in 0..T {
        for half in 0..2 {
            let short = short[t][half];
            let part = if VNNI { short } else { _mm256_madd_epi16(short, ones) };
            sums[t][half] = _mm256_add_epi32(sums[t][half], part);
        }
    }
}

/// 16 bytes as floats.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn floats(bytes: &[u8; 16]) -> [__m256; 2] {
    // SAFETY: 16 bytes.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    let high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
    [low, high]
}
