//! Attention over a cache, and the operations beside the matrices that need no intrinsics: the reference's source, which is
//! made of vectors by the compiler because NEON is part of every aarch64 target.
//!
//! Sixteen positions (of scores) or dimensions (of weighted sums) are loaded as pairs apart, first and second numbers, for up to four rows on the
//! left: sixteen sums, four vectors of pairs, and the two numbers of a row.

use crate::{dense::products, neon::*};
use fracbit_kernels::{
    Isa, Vectors,
    vectors::{KEY_BLOCK, Scores, Slots, WEIGHT_BLOCK, Weigh, attend, plain},
};

/// The operations of this instruction set.
pub(crate) fn vectors() -> Vectors {
    let slots = Slots {
        scores,
        weigh,
        float_scores: plain::float_scores,
        float_weigh: plain::float_weigh,
        round: attend::round,
        round_weights: attend::round_weights,
        products,
        softmax: plain::softmax,
        rms_norm: plain::rms_norm,
        gate_mul: plain::gate_mul,
        rotate: plain::rotate,
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

/// Sums over pairs of numbers of `Q` rows on the left, `stride` apart, with pairs of sixteen lanes, `step` apart.
///
/// # Safety
/// There are `pairs` of both.
#[inline(always)]
unsafe fn sums<const Q: usize>(
    left: *const i16,
    stride: usize,
    right: *const i16,
    step: usize,
    pairs: usize,
) -> [Sums; Q] {
    let mut sums = [[vdupq_n_s32(0); LANES / 4]; Q];
    for pair in 0..pairs {
        // SAFETY: promised by the caller.
        let halves = unsafe {
            let at = right.add(pair * step);
            [vld2q_s16(at), vld2q_s16(at.add(LANES))]
        };
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
    let (count, out) = (args.query_scales.len(), out.as_mut_ptr());
    let mut q = 0;
    while q < count {
        let rows = if count - q >= 4 { 4 } else { 1 };
        for block in 0..args.key_scales.len() / KEY_BLOCK {
            // SAFETY: queries and a block inside of all.
            unsafe {
                if rows == 4 {
                    some_scores::<4>(args, q, block, out);
                } else {
                    some_scores::<1>(args, q, block, out);
                }
            }
        }
        q += rows;
    }
}

/// # Safety
/// `Q` queries from `first` on, and the block, inside of all.
#[inline(always)]
unsafe fn some_scores<const Q: usize>(args: &Scores<'_>, first: usize, block: usize, out: *mut f32) {
    let Scores { queries, query_scales, dim, keys, key_scales, stride } = *args;
    // SAFETY: promised by the caller.
    unsafe {
        let keys = keys.as_ptr().add(block * dim * KEY_BLOCK);
        let sums = sums::<Q>(queries.as_ptr().add(first * dim), dim, keys, 2 * KEY_BLOCK, dim / 2);
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
                        some_sums::<4>(args, q, block, column, out.as_mut_ptr());
                    } else {
                        some_sums::<1>(args, q, block, column, out.as_mut_ptr());
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
unsafe fn some_sums<const Q: usize>(
    args: &Weigh<'_>,
    first: usize,
    block: usize,
    column: usize,
    out: *mut f32,
) {
    let (dim, at) = (args.dim, block * WEIGHT_BLOCK);
    let pairs = (args.positions() - at).min(WEIGHT_BLOCK) / 2;
    // SAFETY: promised by the caller.
    unsafe {
        let weights = args.weights.as_ptr().add(first * args.stride + at);
        let values = args.values.as_ptr().add(at * dim + 2 * column);
        let sums = sums::<Q>(weights, args.stride, values, 2 * dim, pairs);
        for (q, sums) in (first..).zip(sums) {
            let scale = args.scale(q, block);
            for (v, sum) in sums.into_iter().enumerate() {
                let out = out.add(q * dim + column + 4 * v);
                vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), vcvtq_f32_s32(sum), scale));
            }
        }
    }
}
