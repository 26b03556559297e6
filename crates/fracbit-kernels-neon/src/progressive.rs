//! The microkernel of progressive schemes: codes of four columns and four rows times activations,
//! in one dot product.

use crate::shims::sdot;
use fracbit_kernels::{
    Isa, PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs, ProgressiveFactors,
    ProgressiveMicrokernel,
};
use std::arch::aarch64::*;

/// Tokens that meet a piece together: as many as have room for their sums in registers.
const TOKENS: usize = 4;
/// Pieces whose activations fill a register.
const PAIR: usize = 2;
/// Pieces of a group.
const PIECES: usize = PROGRESSIVE_GROUP / PROGRESSIVE_COLUMNS;

/// The microkernel, where the processor has `dotprod`.
pub(crate) fn microkernel() -> Option<ProgressiveMicrokernel> {
    // SAFETY: `dotprod` was detected. `strips` reads what slices hold, through indices that are
    // checked.
    let new = || unsafe { ProgressiveMicrokernel::new(Isa::Dotprod, strips) };
    std::arch::is_aarch64_feature_detected!("dotprod").then(new)
}

/// # Safety
/// The processor has `dotprod`.
unsafe fn strips(args: &ProgressiveArgs<'_>, out: &mut [f32]) {
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
            // SAFETY: promised by the caller.
            unsafe {
                match args.tokens - token {
                    1 => one.multiply::<1>(args, token, out),
                    2 => one.multiply::<2>(args, token, out),
                    3 => one.multiply::<3>(args, token, out),
                    _ => one.multiply::<TOKENS>(args, token, out),
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
    /// The processor has `dotprod`.
    #[inline]
    unsafe fn multiply<const T: usize>(&self, args: &ProgressiveArgs<'_>, token: usize, out: &mut [f32]) {
        let x: [&[i8]; T] = std::array::from_fn(|t| &args.x[(token + t) * args.x_stride..]);
        // SAFETY: registers only, and loads of whole arrays; `dotprod` is promised by the caller.
        unsafe {
            let mut inner = [[vdupq_n_f32(0.0); 4]; T];
            let mut block = [[vdupq_n_s32(0); 4]; T];
            for (g, (codes, factors)) in self.codes.chunks(PIECES).zip(self.factors).enumerate() {
                let columns =
                    g * PROGRESSIVE_GROUP..g * PROGRESSIVE_GROUP + codes.len() * PROGRESSIVE_COLUMNS;
                let sums = group(codes, x.map(|x| &x[columns.clone()]));
                let [scales, zeros] = [&factors.scales, &factors.zeros].map(|bytes| widened(bytes));
                let closes = g % 2 == 1 || g + 1 == self.factors.len();
                for t in 0..T {
                    let at = (token + t) * args.groups + g;
                    for rows in 0..4 {
                        let whole = vmlaq_s32(block[t][rows], sums[t][rows], scales[rows]);
                        block[t][rows] = vmlsq_n_s32(whole, zeros[rows], args.sums[at]);
                        if closes {
                            // Products and sums round apart, as everywhere.
                            let part = vmulq_n_f32(vcvtq_f32_s32(block[t][rows]), args.block_scales[at]);
                            inner[t][rows] = vaddq_f32(inner[t][rows], part);
                            block[t][rows] = vdupq_n_s32(0);
                        }
                    }
                }
            }
            let scales = self.scales.as_chunks::<4>().0;
            for (t, inner) in inner.iter().enumerate() {
                let out = out[t * args.out_stride..][..16].as_chunks_mut::<4>().0;
                for ((out, inner), scales) in out.iter_mut().zip(inner).zip(scales) {
                    let scaled = vmulq_f32(*inner, vld1q_f32(scales.as_ptr()));
                    vst1q_f32(out.as_mut_ptr(), vaddq_f32(vld1q_f32(out.as_ptr()), scaled));
                }
            }
        }
    }
}

/// Sums of code times activation over a group, four rows in each register, for each token.
///
/// # Safety
/// The processor has `dotprod`.
#[inline]
unsafe fn group<const T: usize>(codes: &[[u8; PROGRESSIVE_BYTES]], x: [&[i8]; T]) -> [[int32x4_t; 4]; T] {
    // SAFETY: registers only, and loads of whole arrays; `dotprod` is promised by the caller.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 4]; T];
        // Columns are padded to whole tiles: no piece is left over.
        for (i, codes) in codes.as_chunks::<PAIR>().0.iter().enumerate() {
            let x = x.map(|x| vld1q_s8(x[16 * i..][..16].as_ptr()));
            piece::<T, 0, 1>(&codes[0], &x, &mut sums);
            piece::<T, 2, 3>(&codes[1], &x, &mut sums);
        }
        sums
    }
}

/// # Safety
/// The processor has `dotprod`.
#[inline(always)]
unsafe fn piece<const T: usize, const LOW: i32, const HIGH: i32>(
    codes: &[u8; PROGRESSIVE_BYTES],
    x: &[int8x16_t; T],
    sums: &mut [[int32x4_t; 4]; T],
) {
    // SAFETY: registers only, and loads of 16 bytes from 64; `dotprod` is promised by the caller.
    unsafe {
        let mask = vdupq_n_u8(15);
        for (rows, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
            let both = vld1q_u8(codes.as_ptr());
            let low = vreinterpretq_s8_u8(vandq_u8(both, mask));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
            for (sums, &x) in sums.iter_mut().zip(x) {
                sums[rows] = sdot::<LOW>(sums[rows], low, x);
                sums[rows] = sdot::<HIGH>(sums[rows], high, x);
            }
        }
    }
}

/// 16 bytes as integers.
#[inline]
fn widened(bytes: &[u8; 16]) -> [int32x4_t; 4] {
    // SAFETY: a load of 16 bytes, and registers.
    unsafe {
        let bytes = vld1q_u8(bytes.as_ptr());
        let [low, high] = [vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))];
        let four = |half| vreinterpretq_s32_u32(vmovl_u16(half));
        [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)].map(four)
    }
}
