//! The body of progressive schemes: unsigned codes times signed activations in pairs, sums of 16
//! bits for 32 columns, then of 32 bits.

use super::Avx2;
use fracbit_kernels::{
    Isa, PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs, ProgressiveBody,
    ProgressiveFactors,
};
use std::arch::x86_64::*;

/// Tokens that meet a piece together: as many as have room for their sums in registers.
const TOKENS: usize = 4;
/// Pieces whose products are summed in 16 bits: `8 x 2 x 15 x 127 = 30480`.
const CHUNK: usize = 8;
/// Pieces of a group.
const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;

pub(crate) fn body(_: Avx2) -> ProgressiveBody {
    // SAFETY: there is a proof of the instruction set. `strips` reads what slices hold, through
    // indices that are checked, but for one token's pieces of activations, which the arguments
    // promise and `debug_check` repeats.
    unsafe { ProgressiveBody::new(Isa::Avx2, strips) }
}

#[target_feature(enable = "avx2")]
fn strips(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
    args.debug_check();
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
            match args.tokens - token {
                1 => one.multiply::<1>(args, token, out),
                2 => one.multiply::<2>(args, token, out),
                3 => one.multiply::<3>(args, token, out),
                _ => one.multiply::<TOKENS>(args, token, out),
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
    #[target_feature(enable = "avx2")]
    #[inline]
    fn multiply<const T: usize>(&self, args: &ProgressiveArgs<'_>, token: usize, out: &mut [f32]) {
        let x: [&[[i8; PROGRESSIVE_COLUMNS]]; T] =
            std::array::from_fn(|t| args.x[(token + t) * args.x_stride..].as_chunks().0);
        let zero = _mm256_setzero_ps();
        let mut inner = [[zero; 2]; T];
        let mut block = [[zero; 2]; T];
        for (g, (codes, factors)) in self.codes.chunks(PIECES).zip(self.factors).enumerate() {
            let x = x.map(|x| &x[g * PIECES..][..codes.len()]);
            let sums = group(codes, x);
            let [scales, zeros] = [&factors.scales, &factors.zeros].map(|bytes| floats(bytes));
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
            for ((out, inner), scales) in out.iter_mut().zip(inner).zip(scales) {
                // SAFETY: eight numbers each.
                unsafe {
                    let scaled = _mm256_mul_ps(*inner, _mm256_loadu_ps(scales.as_ptr()));
                    let sum = _mm256_add_ps(_mm256_loadu_ps(out.as_ptr()), scaled);
                    _mm256_storeu_ps(out.as_mut_ptr(), sum);
                }
            }
        }
    }
}

/// Sums of code times activation over a group: rows 0 to 7 and 8 to 15, for each token.
#[target_feature(enable = "avx2")]
#[inline]
fn group<const T: usize>(
    codes: &[[u8; PROGRESSIVE_BYTES]],
    x: [&[[i8; PROGRESSIVE_COLUMNS]]; T],
) -> [[__m256i; 2]; T] {
    let zero = _mm256_setzero_si256();
    let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [[zero; 2]; T];
    for (chunk, codes) in codes.chunks(CHUNK).enumerate() {
        let x = x.map(|x| &x[chunk * CHUNK..][..codes.len()]);
        let mut short = [[zero; 2]; T];
        for (i, codes) in codes.iter().enumerate() {
            // SAFETY: 32 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
            let low = _mm256_and_si256(codes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
            for (short, x) in short.iter_mut().zip(&x) {
                let [a, b, c, d] = x[i];
                let four = _mm256_set1_epi32(i32::from_ne_bytes([a, b, c, d].map(i8::cast_unsigned)));
                short[0] = _mm256_add_epi16(short[0], _mm256_maddubs_epi16(low, four));
                short[1] = _mm256_add_epi16(short[1], _mm256_maddubs_epi16(high, four));
            }
        }
        for (sums, short) in sums.iter_mut().zip(&short) {
            for (sum, short) in sums.iter_mut().zip(short) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*short, ones));
            }
        }
    }
    sums
}

/// 16 bytes as floats.
#[target_feature(enable = "avx2")]
#[inline]
fn floats(bytes: &[u8; 16]) -> [__m256; 2] {
    // SAFETY: 16 bytes.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    [bytes, _mm_unpackhi_epi64(bytes, bytes)].map(|eight| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)))
}
