//! Attention over a cache, and the operations beside the matrices that need no intrinsics: the
//! reference's source, which is made of vectors by the compiler because NEON is part of every
//! aarch64 target.
//!
//! Sixteen positions (of scores) or dimensions (of weighted sums) are loaded as pairs apart, first
//! and second numbers, for up to four rows on the left: sixteen sums, four vectors of pairs, and
//! the two numbers of a row. Numbers of 8 and 4 bits are widened as they are loaded.

use crate::{dense::products, neon::*};
use fracbit_kernels::{
    Isa, Vectors,
    vectors::{Ints, KEY_BLOCK, LEVELS, Scores, Slots, UNIT, WEIGHT_BLOCK, Weigh, attend, plain},
};

/// The operations of this instruction set.
pub(crate) fn vectors() -> Vectors {
    let slots = Slots {
        scores,
        weigh,
        float_scores: plain::float_scores,
        float_weigh: plain::float_weigh,
        round: attend::round,
        levels: attend::levels,
        round_weights: attend::round_weights,
        products,
        softmax: plain::softmax,
        rms_norm: plain::rms_norm,
        gate_mul: plain::gate_mul,
        rotate: plain::rotate,
        walsh: plain::walsh,
        cap: plain::cap,
        exp_sums: plain::exp_sums,
        add: plain::add,
        narrow: plain::narrow,
        narrow_pair: plain::narrow_pair,
        wide: plain::wide,
        bf16_tile: None,
    };
    // SAFETY: NEON is part of the target; lengths are checked by the methods of `Vectors`.
    unsafe { Vectors::new(Isa::Neon, slots) }
}

/// Lanes of the sums of a row on the left: a block of keys, or as many dimensions.
const LANES: usize = KEY_BLOCK;

/// Sums of sixteen lanes.
type Sums = [int32x4_t; LANES / 4];

/// Sixteen pairs of numbers of `BITS` bits, eight and eight, first and second numbers apart.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn load<const BITS: usize>(at: *const u8) -> [int16x8x2_t; 2] {
    // SAFETY: promised by the caller; `LEVELS` has sixteen bytes.
    let [first, second] = unsafe {
        match BITS {
            16 => return [vld2q_s16(at.cast()), vld2q_s16(at.cast::<i16>().add(LANES))],
            8 => {
                let pairs = vld2q_s8(at.cast());
                [pairs.0, pairs.1]
            }
            _ => {
                let (levels, places) = (vld1q_s8(LEVELS.as_ptr()), vld1q_u8(at));
                let low = vqtbl1q_s8(levels, vandq_u8(places, vdupq_n_u8(15)));
                let high = vqtbl1q_s8(levels, vshrq_n_u8::<4>(places));
                [vuzp1q_s8(low, high), vuzp2q_s8(low, high)]
            }
        }
    };
    [
        int16x8x2_t(vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_low_s8(second))),
        int16x8x2_t(vmovl_high_s8(first), vmovl_high_s8(second)),
    ]
}

/// Sums over pairs of numbers of `Q` rows on the left, `stride` apart, with pairs of sixteen lanes
/// of `BITS` bits, `step` bytes apart.
///
/// # Safety
/// There are `pairs` of both.
#[inline(always)]
unsafe fn sums<const Q: usize, const BITS: usize>(
    left: *const i16,
    stride: usize,
    right: *const u8,
    step: usize,
    pairs: usize,
) -> [Sums; Q] {
    let mut sums = [[vdupq_n_s32(0); LANES / 4]; Q];
    for pair in 0..pairs {
        // SAFETY: promised by the caller.
        let halves = unsafe { load::<BITS>(right.add(pair * step)) };
        for (q, sums) in sums.iter_mut().enumerate() {
            // SAFETY: promised by the caller.
            let [a, b] = unsafe { left.add(q * stride + 2 * pair).cast::<[i16; 2]>().read_unaligned() };
            for (half, sums) in halves.iter().zip(sums.as_chunks_mut::<2>().0) {
                for (numbers, x) in [(half.0, a), (half.1, b)] {
                    sums[0] = vmlal_n_s16(sums[0], vget_low_s16(numbers), x);
                    sums[1] = vmlal_high_n_s16(sums[1], numbers, x);
                }
            }
        }
    }
    sums
}

/// # Safety
/// Lengths as `Vectors::scores` checks them.
unsafe fn scores(args: &Scores<'_>, out: &mut [f32]) {
    let out = out.as_mut_ptr();
    // SAFETY: promised by the caller; the keys are of as many bits as said.
    unsafe {
        match args.keys {
            Ints::I16(keys) => scores_of::<16>(args, keys.as_ptr().cast(), out),
            Ints::I8(keys) => scores_of::<8>(args, keys.as_ptr().cast(), out),
            Ints::I4(keys) => scores_of::<4>(args, keys.as_ptr(), out),
        }
    }
}

/// # Safety
/// As [`scores`]; the keys, at `keys`, are of `BITS` bits.
unsafe fn scores_of<const BITS: usize>(args: &Scores<'_>, keys: *const u8, out: *mut f32) {
    let count = args.query_scales.len();
    let mut q = 0;
    while q < count {
        let rows = if count - q >= 4 { 4 } else { 1 };
        for block in 0..args.key_scales.len() / KEY_BLOCK {
            // SAFETY: queries and a block inside of all.
            unsafe {
                if rows == 4 {
                    some_scores::<4, BITS>(args, keys, q, block, out);
                } else {
                    some_scores::<1, BITS>(args, keys, q, block, out);
                }
            }
        }
        q += rows;
    }
}

/// # Safety
/// `Q` queries from `first` on, and the block, inside of all.
#[inline(always)]
unsafe fn some_scores<const Q: usize, const BITS: usize>(
    args: &Scores<'_>,
    keys: *const u8,
    first: usize,
    block: usize,
    out: *mut f32,
) {
    let Scores { queries, query_scales, dim, key_scales, stride, .. } = *args;
    let row = 2 * KEY_BLOCK * BITS / 8;
    // SAFETY: promised by the caller.
    unsafe {
        let keys = keys.add(block * (dim / 2) * row);
        let sums = sums::<Q, BITS>(queries.as_ptr().add(first * dim), dim, keys, row, dim / 2);
        for (q, sums) in (first..).zip(sums) {
            for (v, sum) in sums.into_iter().enumerate() {
                let at = block * KEY_BLOCK + 4 * v;
                let scale = vmulq_n_f32(vld1q_f32(key_scales.as_ptr().add(at)), query_scales[q]);
                vst1q_f32(out.add(q * stride + at), vmulq_f32(vcvtq_f32_s32(sum), scale));
            }
        }
    }
}

/// # Safety
/// Lengths as `Vectors::weigh` checks them.
unsafe fn weigh(args: &Weigh<'_>, out: &mut [f32]) {
    // SAFETY: promised by the caller; the values are of as many bits as said.
    unsafe {
        match args.values {
            Ints::I16(values) => weigh_of::<16>(args, values.as_ptr().cast(), out),
            Ints::I8(values) => weigh_of::<8>(args, values.as_ptr().cast(), out),
            Ints::I4(values) => weigh_of::<4>(args, values.as_ptr(), out),
        }
    }
}

/// # Safety
/// As [`weigh`]; the values, at `values`, are of `BITS` bits.
unsafe fn weigh_of<const BITS: usize>(args: &Weigh<'_>, values: *const u8, out: &mut [f32]) {
    let (dim, count) = (args.dim, out.len() / args.dim);
    let whole = dim / LANES * LANES;
    for block in 0..args.positions().div_ceil(WEIGHT_BLOCK) {
        let mut q = 0;
        while q < count {
            let rows = if count - q >= 4 { 4 } else { 1 };
            for column in (0..whole).step_by(LANES) {
                // SAFETY: queries, the block and columns inside of all.
                unsafe {
                    if rows == 4 {
                        some_sums::<4, BITS>(args, values, q, block, column, out.as_mut_ptr());
                    } else {
                        some_sums::<1, BITS>(args, values, q, block, column, out.as_mut_ptr());
                    }
                }
            }
            q += rows;
        }
    }
    if whole < dim {
        attend::weigh_columns(args, whole..dim, out);
    }
}

/// # Safety
/// `Q` queries from `first` on, the block, and sixteen dimensions from `column` on, inside of all.
#[inline(always)]
unsafe fn some_sums<const Q: usize, const BITS: usize>(
    args: &Weigh<'_>,
    values: *const u8,
    first: usize,
    block: usize,
    column: usize,
    out: *mut f32,
) {
    let (dim, at) = (args.dim, block * WEIGHT_BLOCK);
    let pairs = (args.positions() - at).min(WEIGHT_BLOCK) / 2;
    let bytes = |numbers: usize| numbers * BITS / 8;
    // Rows of 4 bits are whole units, with which columns begin.
    let row = if BITS == 4 { bytes(2 * dim).next_multiple_of(UNIT / 2) } else { bytes(2 * dim) };
    // SAFETY: promised by the caller.
    unsafe {
        let weights = args.weights.as_ptr().add(first * args.stride + at);
        let values = values.add(at / 2 * row + bytes(2 * column));
        let sums = sums::<Q, BITS>(weights, args.stride, values, row, pairs);
        for (q, sums) in (first..).zip(sums) {
            let scale = args.scale(q, block);
            for (v, sum) in sums.into_iter().enumerate() {
                let out = out.add(q * dim + column + 4 * v);
                vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), vcvtq_f32_s32(sum), scale));
            }
        }
    }
}
