//! Products of dense weights with the inputs of several tokens.
//!
//! Rust never contracts a multiplication and an addition: every partial sum has the bits of the
//! reference. Four rows by four tokens are sixteen sums in registers, and every vector that is
//! loaded serves four of them.

#![expect(clippy::needless_range_loop, reason = "rows and tokens index several arrays at once")]

use fracbit_kernels::vectors::{Products, plain::LANES};
use std::arch::x86_64::*;

/// Adds the products to the partial sums.
///
/// # Safety
/// The features, and lengths as `Vectors::products` checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn products(args: &Products<'_>, sums: &mut [[f32; LANES]]) {
    let Products { rows, tokens, .. } = *args;
    let sums = sums.as_mut_ptr();
    let mut row = 0;
    while row < rows {
        let down = if rows - row >= 4 { 4 } else { 1 };
        let mut token = 0;
        while token < tokens {
            let left = tokens - token;
            // SAFETY: `down` rows from `row` on, and as many tokens as a step takes from `token`
            // on.
            unsafe {
                match (down, left) {
                    (4, 4..) => tile::<4, 4>(args, row, token, sums),
                    (4, 2..) => tile::<4, 2>(args, row, token, sums),
                    (4, _) => tile::<4, 1>(args, row, token, sums),
                    (_, 4..) => tile::<1, 4>(args, row, token, sums),
                    (_, 2..) => tile::<1, 2>(args, row, token, sums),
                    (_, _) => tile::<1, 1>(args, row, token, sums),
                }
            }
            token += match left {
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
        }
        row += down;
    }
}

/// # Safety
/// `R` rows from `row` on, `T` tokens from `token` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn tile<const R: usize, const T: usize>(
    args: &Products<'_>,
    row: usize,
    token: usize,
    sums: *mut [f32; LANES],
) {
    // SAFETY: promised by the caller; `width` columns of every row and token, in whole vectors.
    unsafe {
        let weights = args.weights.as_ptr().add(row * args.weight_stride);
        let inputs = args.inputs.as_ptr().add(token * args.input_stride);
        let sums = sums.add(row * args.tokens + token);
        let mut acc = [[_mm512_setzero_ps(); T]; R];
        for r in 0..R {
            for t in 0..T {
                acc[r][t] = _mm512_loadu_ps(sums.add(r * args.tokens + t).cast());
            }
        }
        for at in (0..args.width).step_by(LANES) {
            let w: [__m512; R] =
                std::array::from_fn(|r| _mm512_loadu_ps(weights.add(r * args.weight_stride + at)));
            for t in 0..T {
                let x = _mm512_loadu_ps(inputs.add(t * args.input_stride + at));
                for r in 0..R {
                    acc[r][t] = _mm512_add_ps(acc[r][t], _mm512_mul_ps(w[r], x));
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                _mm512_storeu_ps(sums.add(r * args.tokens + t).cast(), acc[r][t]);
            }
        }
    }
}
