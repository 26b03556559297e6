//! Products of dense weights with the inputs of several tokens.
//!
//! Rust never contracts a multiplication and an addition: every partial sum has the bits of the
//! reference. Two rows by four tokens are sixteen vectors of sums; the halves of sixteen partial
//! sums go one after the other.

use crate::neon::*;
use fracbit_kernels::vectors::{Products, plain::LANES};

/// Adds the products to the partial sums.
///
/// # Safety
/// Lengths as `Vectors::products` checks them.
pub(crate) unsafe fn products(args: &Products<'_>, sums: &mut [[f32; LANES]]) {
    let Products { rows, tokens, .. } = *args;
    let sums = sums.as_mut_ptr();
    let mut row = 0;
    while row < rows {
        let down = if rows - row >= 2 { 2 } else { 1 };
        let mut token = 0;
        while token < tokens {
            let left = tokens - token;
            // SAFETY: `down` rows from `row` on, and as many tokens as a step takes from `token`
            // on.
            unsafe {
                match (down, left) {
                    (2, 4..) => tile::<2, 4>(args, row, token, sums),
                    (2, _) => tile::<2, 1>(args, row, token, sums),
                    (_, 4..) => tile::<1, 4>(args, row, token, sums),
                    (_, _) => tile::<1, 1>(args, row, token, sums),
                }
            }
            token += if left >= 4 { 4 } else { 1 };
        }
        row += down;
    }
}

/// # Safety
/// `R` rows from `row` on, `T` tokens from `token` on.
unsafe fn tile<const R: usize, const T: usize>(
    args: &Products<'_>,
    row: usize,
    token: usize,
    sums: *mut [f32; LANES],
) {
    // SAFETY: promised by the caller; `width` columns of every row and token, in whole groups of
    // sums.
    unsafe {
        let weights = args.weights.as_ptr().add(row * args.weight_stride);
        let inputs = args.inputs.as_ptr().add(token * args.input_stride);
        let sums = sums.add(row * args.tokens + token).cast::<f32>();
        for half in [0, LANES / 2] {
            let place = |r: usize, t: usize, v: usize| (r * args.tokens + t) * LANES + half + 4 * v;
            let mut acc = [[[vdupq_n_f32(0.0); 2]; T]; R];
            for r in 0..R {
                for t in 0..T {
                    for v in 0..2 {
                        acc[r][t][v] = vld1q_f32(sums.add(place(r, t, v)));
                    }
                }
            }
            for at in (half..args.width).step_by(LANES) {
                for v in 0..2 {
                    let mut w = [vdupq_n_f32(0.0); R];
                    for r in 0..R {
                        w[r] = vld1q_f32(weights.add(r * args.weight_stride + at + 4 * v));
                    }
                    for t in 0..T {
                        let x = vld1q_f32(inputs.add(t * args.input_stride + at + 4 * v));
                        for r in 0..R {
                            acc[r][t][v] = vaddq_f32(acc[r][t][v], vmulq_f32(w[r], x));
                        }
                    }
                }
            }
            for r in 0..R {
                for t in 0..T {
                    for v in 0..2 {
                        vst1q_f32(sums.add(place(r, t, v)), acc[r][t][v]);
                    }
                }
            }
        }
    }
}
