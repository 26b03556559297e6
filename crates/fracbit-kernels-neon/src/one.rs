//! One token: codes go through registers to four accumulators.

use crate::{
    body::{Dot, bytes_of},
    expand::{Expand, Sink},
    neon::*,
    shims::widen,
};
use fracbit_format::TILE_ROWS;
use fracbit_kernels::Args;
use std::marker::PhantomData;

/// Sums of the sixteen rows of a strip, in the order of lanes.
pub(crate) type Sums = [int32x4_t; 4];

/// Multiplies each vector as it comes.
struct Products<D> {
    sums: Sums,
    x: [int8x16_t; 2],
    dot: PhantomData<D>,
}

impl<D: Dot> Sink for Products<D> {
    #[inline(always)]
    fn put<const Q: i32, const G: usize>(&mut self, w: int8x16_t) {
        // SAFETY: a body for `D` runs only where its instructions exist.
        self.sums[G] = unsafe { D::dot::<Q>(self.sums[G], w, self.x[0]) };
    }

    #[inline(always)]
    fn wide<const C: usize, const ODD: usize>(&mut self, w: int16x8_t) {
        let x = vreinterpretq_s16_s8(self.x[C / 8]);
        macro_rules! lane {
            ($($c:literal)*) => { match C % 8 { $($c => {
                self.sums[2 * ODD] = vmlal_laneq_s16::<$c>(self.sums[2 * ODD], vget_low_s16(w), x);
                self.sums[2 * ODD + 1] = vmlal_high_laneq_s16::<$c>(self.sums[2 * ODD + 1], w, x);
            })* _ => unreachable!("a lane of eight") } };
        }
        lane!(0 1 2 3 4 5 6 7);
    }
}

/// Sixteen outputs of a strip, from the order of rows to the order of lanes.
///
/// # Safety
/// `at` points to sixteen values.
#[inline(always)]
pub(crate) unsafe fn load_lanes(at: *const f32) -> [float32x4_t; 4] {
    // SAFETY: promised by the caller.
    let (low, high) = unsafe { (vld2q_f32(at), vld2q_f32(at.add(8))) };
    [low.0, high.0, low.1, high.1]
}

/// The reverse of [`load_lanes`].
///
/// # Safety
/// `at` points to sixteen values.
#[inline(always)]
pub(crate) unsafe fn store_lanes(at: *mut f32, [a, b, c, d]: [float32x4_t; 4]) {
    // SAFETY: promised by the caller.
    unsafe {
        vst2q_f32(at, float32x4x2_t(a, c));
        vst2q_f32(at.add(8), float32x4x2_t(b, d));
    }
}

/// The sixteen scales at `at` in single precision.
///
/// # Safety
/// `at` points to sixteen scales.
#[inline(always)]
pub(crate) unsafe fn load_scales(at: *const half::f16) -> [float32x4_t; 4] {
    // SAFETY: promised by the caller; the type is transparent.
    let (low, high) = unsafe { (vld1q_u16(at.cast()), vld1q_u16(at.cast::<u16>().add(8))) };
    let ([a, b], [c, d]) = (widen(low), widen(high));
    [a, b, c, d]
}

/// # Safety
/// As [`strips`](crate::body::strips).
#[inline(never)] // shared by bodies that differ only in what they do with several tokens
pub(crate) unsafe fn one_token<E: Expand, D: Dot>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    let x = bytes_of(args.x);
    let tile_x = if E::WIDE { 32 } else { 16 };
    for strip in 0..args.strips {
        let codes = args.codes[strip * args.stride..].as_ptr();
        let scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
        let out = out[strip * TILE_ROWS..][..TILE_ROWS].as_mut_ptr();
        // SAFETY: sixteen outputs a strip.
        let mut total = unsafe { load_lanes(out) };
        let mut inner = [vdupq_n_f32(0.0); 4];
        for (block, &block_scale) in args.blocks.iter().zip(args.block_scales) {
            let mut products =
                Products::<D> { sums: [vdupq_n_s32(0); 4], x: [vdupq_n_s8(0); 2], dot: PhantomData };
            for tile in block.start..block.start + block.tiles {
                // SAFETY: tiles of the block are inside `codes` and `x`.
                unsafe {
                    let x = x.add(tile * tile_x);
                    products.x = [vld1q_s8(x), if E::WIDE { vld1q_s8(x.add(16)) } else { vdupq_n_s8(0) }];
                    e.tile(codes.add(tile * args.tile_bytes), &mut products);
                }
            }
            // SAFETY: `Args` has sixteen scales for every group.
            let scales = unsafe { scales.add(block.group * TILE_ROWS) };
            for (inner, sum) in inner.iter_mut().zip(products.sums) {
                *inner = vaddq_f32(*inner, vmulq_n_f32(vcvtq_f32_s32(sum), block_scale));
            }
            if block.closes {
                // SAFETY: the same.
                let scales = unsafe { load_scales(scales) };
                for ((total, inner), scale) in total.iter_mut().zip(&mut inner).zip(scales) {
                    *total = vaddq_f32(*total, vmulq_f32(*inner, scale));
                    *inner = vdupq_n_f32(0.0);
                }
            }
        }
        // SAFETY: as for the load.
        unsafe { store_lanes(out, total) };
    }
}
