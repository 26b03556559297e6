//! Attention, as the AVX-512 bodies do it with half the lanes: a block of keys takes two passes, and up to four queries
//! share a vector of keys or values, for there are sixteen registers.

#![expect(clippy::needless_range_loop, reason = "queries and vectors index several arrays at once")]

use super::{Avx2, dense::products};
use crate::vectors::table;
use fracbit_kernels::vectors::{Floats, KEY_BLOCK, Scores, Weigh};
use half::f16;
use std::arch::x86_64::*;

table!(Isa::Avx2, "avx2,f16c,fma", Avx2, _mm256_storeu_ps, None);

/// Lanes of a vector.
const LANES: usize = 8;

/// Elements of a cache.
trait Element: Copy {
    /// Eight from `at` on.
    unsafe fn load(at: *const Self) -> __m256;
}

impl Element for f16 {
    #[inline]
    #[target_feature(enable = "avx2,f16c,fma")]
    unsafe fn load(at: *const Self) -> __m256 {
        // SAFETY: promised by the caller.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
    }
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx2,f16c,fma")]
    unsafe fn load(at: *const Self) -> __m256 {
        // SAFETY: promised by the caller.
        unsafe { _mm256_loadu_ps(at) }
    }
}

/// # Safety
/// The features, and lengths as `Vectors::scores` checks them.
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn scores(args: &Scores<'_>, out: &mut [f32]) {
    let (count, blocks) = (args.queries.len() / args.dim, args.keys.len() / (args.dim * KEY_BLOCK));
    let (mut query, mut left) = (args.queries.as_ptr(), count);
    let mut to = out.as_mut_ptr();
    while left > 0 {
        let step = if left >= 4 {
            4
        } else if left >= 2 {
            2
        } else {
            1
        };
        // SAFETY: `left` queries from `query` on, and as many rows of scores from `to` on.
        unsafe {
            match (args.keys, step) {
                (Floats::F16(k), 4) => some_scores::<f16, 4>(args, query, k.as_ptr(), blocks, to),
                (Floats::F16(k), 2) => some_scores::<f16, 2>(args, query, k.as_ptr(), blocks, to),
                (Floats::F16(k), _) => some_scores::<f16, 1>(args, query, k.as_ptr(), blocks, to),
                (Floats::F32(k), 4) => some_scores::<f32, 4>(args, query, k.as_ptr(), blocks, to),
                (Floats::F32(k), 2) => some_scores::<f32, 2>(args, query, k.as_ptr(), blocks, to),
                (Floats::F32(k), _) => some_scores::<f32, 1>(args, query, k.as_ptr(), blocks, to),
            }
        }
        left -= step;
        query = query.wrapping_add(step * args.dim);
        to = to.wrapping_add(step * args.stride);
    }
}

/// # Safety
/// `Q` queries at `query`, `blocks` blocks at `keys`, `Q` rows of scores at `out`.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn some_scores<T: Element, const Q: usize>(
    args: &Scores<'_>,
    query: *const f32,
    keys: *const T,
    blocks: usize,
    out: *mut f32,
) {
    let dim = args.dim;
    for half in 0..2 * blocks {
        let (block, first) = (half / 2, half % 2 * LANES);
        let mut sums = [[_mm256_setzero_ps(); 2]; Q];
        // SAFETY: `dim` vectors of keys in the block and `dim` numbers of each query.
        unsafe {
            let keys = keys.add(block * dim * KEY_BLOCK + first);
            let mut i = 0;
            while i + 2 <= dim {
                if first == 0 {
                    crate::stream(keys.add(i * KEY_BLOCK).cast(), 2 * KEY_BLOCK * size_of::<T>());
                }
                let (a, b) = (T::load(keys.add(i * KEY_BLOCK)), T::load(keys.add((i + 1) * KEY_BLOCK)));
                for q in 0..Q {
                    let at = query.add(q * dim + i);
                    sums[q][0] = _mm256_fmadd_ps(a, _mm256_set1_ps(*at), sums[q][0]);
                    sums[q][1] = _mm256_fmadd_ps(b, _mm256_set1_ps(*at.add(1)), sums[q][1]);
                }
                i += 2;
            }
            if i < dim {
                let a = T::load(keys.add(i * KEY_BLOCK));
                for q in 0..Q {
                    let x = _mm256_set1_ps(*query.add(q * dim + i));
                    sums[q][0] = _mm256_fmadd_ps(a, x, sums[q][0]);
                }
            }
            for q in 0..Q {
                let sum = _mm256_add_ps(sums[q][0], sums[q][1]);
                _mm256_storeu_ps(out.add(q * args.stride + half * LANES), sum);
            }
        }
    }
}

/// # Safety
/// The features, and lengths as `Vectors::weigh` checks them.
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn weigh(args: &Weigh<'_>, out: &mut [f32]) {
    // SAFETY: the same promises.
    unsafe {
        match args.values {
            Floats::F16(v) => weigh_of(args, v.as_ptr(), v.len() / args.dim, out),
            Floats::F32(v) => weigh_of(args, v.as_ptr(), v.len() / args.dim, out),
        }
    }
}

/// # Safety
/// As [`weigh`], with `positions` values at `values`.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn weigh_of<T: Element>(args: &Weigh<'_>, values: *const T, positions: usize, out: &mut [f32]) {
    let dim = args.dim;
    let wide = dim / 16 * 16;
    let whole = dim / LANES * LANES;
    let count = out.len() / dim;
    let mut q = 0;
    while q < count {
        let step = if q + 4 <= count { 4 } else { 1 };
        for at in (0..wide).step_by(16) {
            let part = Part { args, values, positions, query: q, at };
            // SAFETY: `step` queries from `q` on, 16 dimensions from `at` on.
            unsafe {
                if step == 4 {
                    part.run::<4, 2>(out.as_mut_ptr())
                } else {
                    part.run::<1, 2>(out.as_mut_ptr())
                }
            }
        }
        for at in (wide..whole).step_by(LANES) {
            let part = Part { args, values, positions, query: q, at };
            // SAFETY: as above, with 8 dimensions.
            unsafe {
                if step == 4 {
                    part.run::<4, 1>(out.as_mut_ptr())
                } else {
                    part.run::<1, 1>(out.as_mut_ptr())
                }
            }
        }
        if whole < dim {
            for q in q..q + step {
                let out = &mut out[q * dim + whole..(q + 1) * dim];
                plain::weigh_columns(&args.weights[q * args.stride..], args.values, dim, whole, out);
            }
        }
        q += step;
    }
}

/// Some queries and dimensions of a weighted sum.
struct Part<'a, T> {
    args: &'a Weigh<'a>,
    values: *const T,
    positions: usize,
    query: usize,
    at: usize,
}

impl<T: Element> Part<'_, T> {
    /// # Safety
    /// `Q` queries from `query` on and `8 V` dimensions from `at` on exist.
    #[inline]
    #[target_feature(enable = "avx2,f16c,fma")]
    unsafe fn run<const Q: usize, const V: usize>(&self, out: *mut f32) {
        let (dim, stride) = (self.args.dim, self.args.stride);
        let mut sums = [[_mm256_setzero_ps(); V]; Q];
        // SAFETY: promised by the caller.
        unsafe {
            let out = out.add(self.query * dim + self.at);
            for q in 0..Q {
                for v in 0..V {
                    sums[q][v] = _mm256_loadu_ps(out.add(q * dim + LANES * v));
                }
            }
            let weights = self.args.weights.as_ptr().add(self.query * stride);
            let values = self.values.add(self.at);
            for j in 0..self.positions {
                if self.at == 0 {
                    crate::stream(values.add(j * dim).cast(), dim * size_of::<T>());
                }
                let row: [__m256; V] = std::array::from_fn(|v| T::load(values.add(j * dim + LANES * v)));
                for q in 0..Q {
                    let w = _mm256_set1_ps(*weights.add(q * stride + j));
                    for v in 0..V {
                        sums[q][v] = _mm256_fmadd_ps(w, row[v], sums[q][v]);
                    }
                }
            }
            for q in 0..Q {
                for v in 0..V {
                    _mm256_storeu_ps(out.add(q * dim + LANES * v), sums[q][v]);
                }
            }
        }
    }
}
