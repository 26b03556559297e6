//! One token: codes go through registers to four accumulators.

use crate::{
    expand::{Books, Expand, Sink},
    microkernel::{Dot, bytes_of},
    neon::*,
    shims::{self, Blocks, widen},
    words::{Words, unroll},
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
    const EXACT: bool = false;

    #[inline(always)]
    fn put<const Q: i32, const G: usize>(&mut self, w: int8x16_t) {
        // SAFETY: a microkernel for `D` runs only where its instructions exist.
        self.sums[G] = unsafe { D::dot::<Q>(self.sums[G], w, self.x[0]) };
    }

    #[inline(always)]
    fn fence_loads<const G: usize>(&mut self, code: &mut *const u8) {
        shims::order_loads(&mut self.sums[G], code);
    }

    #[inline(always)]
    fn fence<const ODD: usize>(&mut self, words: &mut Words, count: usize) {
        unroll!([0 1 2 3 4 5 6 7 8 9 10] J => {
            if J < count {
                let [a, b, c, d] = &mut self.sums;
                shims::order(if ODD == 0 { [a, b] } else { [c, d] }, &mut words[J]);
            }
        });
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

/// Numbers of codebooks that an expander wants, from the sixteen scales at `at`.
///
/// # Safety
/// `at` points to sixteen scales.
#[inline(always)]
unsafe fn load_books<E: Expand>(e: &E, at: *const half::f16) -> Books {
    if !E::BOOKS {
        return [vdupq_n_u8(0); 4];
    }
    // SAFETY: promised by the caller.
    unsafe { e.books(vld1q_u16(at.cast()), vld1q_u16(at.cast::<u16>().add(8))) }
}

/// The sum of a block in floating point, times its scale.
#[inline(always)]
fn part<E: Expand>(sum: int32x4_t, block_scale: f32) -> float32x4_t {
    let sum = if E::SHIFT == 4 { vcvtq_n_f32_s32::<4>(sum) } else { vcvtq_f32_s32(sum) };
    vmulq_n_f32(sum, block_scale)
}

/// True when every block is two tiles with a scale of their own: then the loop reads no block.
fn in_twos(args: &Args<'_>) -> bool {
    let count = args.blocks.len();
    let ends = [0, count - 1].map(|i| args.blocks[i].tiles);
    args.groups == count && args.tiles == 2 * count && ends == [2, 2]
}

/// # Safety
/// As [`strips`](crate::microkernel::strips).
#[inline(never)] // shared by microkernels that differ only in what they do with several tokens
pub(crate) unsafe fn one_token<E: Expand, D: Dot>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    let twos = E::GROUPED && in_twos(args);
    for strip in 0..args.strips {
        let out = out[strip * TILE_ROWS..][..TILE_ROWS].as_mut_ptr();
        // SAFETY: sixteen outputs a strip; the rest is promised by the caller.
        unsafe {
            let total = load_lanes(out);
            let total = if twos {
                twos_of::<E, D>(e, args, strip, total)
            } else {
                blocks_of::<E, D>(e, args, strip, total)
            };
            store_lanes(out, total);
        }
    }
}

/// A strip whose blocks are two tiles each.
///
/// # Safety
/// As [`one_token`], and [`in_twos`].
#[inline(always)]
unsafe fn twos_of<E: Expand, D: Dot>(
    e: &E,
    args: &Args<'_>,
    strip: usize,
    mut total: [float32x4_t; 4],
) -> [float32x4_t; 4] {
    let mut x = bytes_of(args);
    let mut code = args.codes[strip * args.stride..].as_ptr();
    let mut scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
    if D::SDOT {
        let (block_scales, count) = (args.block_scales.as_ptr(), args.blocks.len());
        // SAFETY: promised by the caller.
        if unsafe { e.twos(&mut total, Blocks { code, x, scales, block_scales, count }) } {
            return total;
        }
    }
    for &block_scale in args.block_scales {
        // SAFETY: two tiles, 32 activations and sixteen scales for every block.
        unsafe {
            let books = load_books(e, scales);
            let mut products =
                Products::<D> { sums: [vdupq_n_s32(0); 4], x: [vld1q_s8(x); 2], dot: PhantomData };
            e.tile(code, &books, &mut products);
            products.x = [vld1q_s8(x.add(16)); 2];
            e.tile(code.add(args.tile_bytes), &books, &mut products);
            for ((total, sum), scale) in total.iter_mut().zip(products.sums).zip(load_scales(scales)) {
                *total = vaddq_f32(*total, vmulq_f32(part::<E>(sum, block_scale), scale));
            }
            (x, code, scales) = (x.add(32), code.add(2 * args.tile_bytes), scales.add(TILE_ROWS));
        }
    }
    total
}

/// A strip of any blocks.
///
/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn blocks_of<E: Expand, D: Dot>(
    e: &E,
    args: &Args<'_>,
    strip: usize,
    mut total: [float32x4_t; 4],
) -> [float32x4_t; 4] {
    let x = bytes_of(args);
    let tile_x = if E::WIDE { 32 } else { 16 };
    let codes = args.codes[strip * args.stride..].as_ptr();
    let scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
    let (mut inner, mut fresh) = ([vdupq_n_f32(0.0); 4], true);
    for (block, &block_scale) in args.blocks.iter().zip(args.block_scales) {
        let mut products =
            Products::<D> { sums: [vdupq_n_s32(0); 4], x: [vdupq_n_s8(0); 2], dot: PhantomData };
        // SAFETY: `Args` has sixteen scales for every group.
        let scales = unsafe { scales.add(block.group * TILE_ROWS) };
        // SAFETY: the same.
        let books = unsafe { load_books(e, scales) };
        for tile in block.start..block.start + block.tiles {
            // SAFETY: tiles of the block are inside `codes` and `x`.
            unsafe {
                let x = x.add(tile * tile_x);
                products.x = [vld1q_s8(x), if E::WIDE { vld1q_s8(x.add(16)) } else { vdupq_n_s8(0) }];
                e.tile(codes.add(tile * args.tile_bytes), &books, &mut products);
            }
        }
        // A sum that starts is not added to zero: that could only turn -0 into 0, which no total
        // shows.
        for (inner, sum) in inner.iter_mut().zip(products.sums) {
            let part = part::<E>(sum, block_scale);
            *inner = if fresh { part } else { vaddq_f32(*inner, part) };
        }
        if block.closes {
            // SAFETY: as for the codebooks.
            let scales = unsafe { load_scales(scales) };
            for ((total, inner), scale) in total.iter_mut().zip(inner).zip(scales) {
                *total = vaddq_f32(*total, vmulq_f32(inner, scale));
            }
        }
        fresh = block.closes;
    }
    total
}
