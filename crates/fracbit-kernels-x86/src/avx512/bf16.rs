//! Products of bf16 pairs, for processors that have AVX-512 BF16 beside the rest.

use fracbit_kernels::vectors::bf16::{COLS, ROWS, Tile, TileFn};
use std::arch::x86_64::*;

/// Vectors of a row of a tile.
const WIDE: usize = COLS / 16;

/// The microkernel, if this processor has one.
pub(super) fn tile() -> Option<TileFn> {
    let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    found.then_some(product as TileFn)
}

/// The 24 sums of vectors stay in registers; every vector of the panel serves eight rows, every
/// pair of a row three vectors.
///
/// # Safety
/// The features, and lengths as `Vectors::bf16_tile` checks them.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn product(args: &Tile<'_>, out: &mut [[f32; COLS]; ROWS]) {
    let (rows, stride, panel) = (args.rows.as_ptr(), args.stride, args.panel.as_ptr());
    let mut sums = [[_mm512_setzero_ps(); WIDE]; ROWS];
    for pair in 0..args.panel.len() / COLS {
        // SAFETY: whole lines of the panel.
        let w: [__m512bh; WIDE] = std::array::from_fn(|v| unsafe {
            panel.add(pair * COLS + v * 16).cast::<__m512bh>().read_unaligned()
        });
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as many pairs in each of the rows.
            let x = unsafe { rows.add(row * stride + pair).read() };
            let x = _mm512_set1_epi32(x.cast_signed());
            // SAFETY: 64 bytes, of which any are numbers.
            let x: __m512bh = unsafe { (&raw const x).cast::<__m512bh>().read() };
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum = _mm512_dpbf16_ps(*sum, x, w);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sum) in out.chunks_exact_mut(16).zip(sums) {
            // SAFETY: sixteen numbers.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
        }
    }
}
