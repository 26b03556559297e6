//! Attention: lanes are positions for scores, dimensions for weighted values.
//!
//! Keys come interleaved, sixteen positions side by side, so that no horizontal sum is needed; a vector of keys or values is
//! loaded, and converted from half precision, once for up to four queries. Additions of different queries (and of even and odd
//! dimensions) are independent: they hide each other's latency.

#![expect(clippy::needless_range_loop, reason = "queries and vectors index several arrays at once")]

use super::{Avx512, dense::products};
use crate::vectors::table;
use fracbit_kernels::vectors::{Floats, KEY_BLOCK, Scores, Weigh};
use half::f16;
use std::arch::x86_64::*;

table!(
    Isa::Avx512,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2",
    Avx512,
    _mm512_storeu_ps,
    super::bf16::tile()
);

/// Lanes of a vector.
const LANES: usize = 16;

/// Elements of a cache.
trait Element: Copy {
    /// Sixteen from `at` on.
    unsafe fn load(at: *const Self) -> __m512;

    /// Asks for what stands some way behind `count` elements at `at`, where they come from a cache of positions.
    fn ask(at: *const Self, count: usize);
}

impl Element for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: promised by the caller.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
    }

    #[inline(always)]
    fn ask(at: *const Self, count: usize) {
        crate::stream(at.cast(), count * size_of::<Self>());
    }
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: promised by the caller.
        unsafe { _mm512_loadu_ps(at) }
    }

    /// Mostly converted numbers, which are near.
    #[inline(always)]
    fn ask(_at: *const Self, _count: usize) {}
}

/// # Safety
/// The features, and lengths as `Vectors::scores` checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn scores(args: &Scores<'_>, out: &mut [f32]) {
    // SAFETY: the same promises.
    unsafe {
        match args.keys {
            Floats::F16(k) => scores_of(args, k.as_ptr(), k.len(), out),
            Floats::F32(k) => scores_of(args, k.as_ptr(), k.len(), out),
        }
    }
}

/// # Safety
/// As [`scores`], with `len` elements at `keys`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn scores_of<T: Element>(args: &Scores<'_>, keys: *const T, len: usize, out: &mut [f32]) {
    let block = args.dim * KEY_BLOCK;
    let blocks = len / block;
    let count = args.queries.len() / args.dim;
    let mut q = 0;
    while q < count {
        let step = match count - q {
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        let query = args.queries[q * args.dim..].as_ptr();
        let mut done = 0;
        while done < blocks {
            // SAFETY: `step` queries from `q` on, one or two blocks from `done` on, and as many scores.
            unsafe {
                let (keys, out) =
                    (keys.add(done * block), out.as_mut_ptr().add(q * args.stride + done * KEY_BLOCK));
                match (step, blocks - done) {
                    (4, 1) => some_scores::<T, 4, 1>(args, query, keys, out),
                    (4, _) => some_scores::<T, 4, 2>(args, query, keys, out),
                    (2, 1) => some_scores::<T, 2, 1>(args, query, keys, out),
                    (2, _) => some_scores::<T, 2, 2>(args, query, keys, out),
                    (_, 1) => some_scores::<T, 1, 1>(args, query, keys, out),
                    _ => some_scores::<T, 1, 2>(args, query, keys, out),
                }
            }
            done += 2.min(blocks - done);
        }
        q += step;
    }
}

/// `Q` queries and `B` blocks of keys: a query's numbers serve every block, for loads are scarcer than products.
///
/// # Safety
/// `Q` queries at `query`, `B` blocks at `keys`, `Q` rows of scores at `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn some_scores<T: Element, const Q: usize, const B: usize>(
    args: &Scores<'_>,
    query: *const f32,
    keys: *const T,
    out: *mut f32,
) {
    let (dim, block) = (args.dim, args.dim * KEY_BLOCK);
    // (query, block, parity of the dimension)
    let mut sums = [[[_mm512_setzero_ps(); 2]; B]; Q];
    // SAFETY: `dim` vectors of keys in each block and `dim` numbers of each query.
    unsafe {
        let mut i = 0;
        while i + 2 <= dim {
            for b in 0..B {
                T::ask(keys.add(b * block + i * KEY_BLOCK), 2 * KEY_BLOCK);
            }
            for parity in 0..2 {
                let i = i + parity;
                let keys: [__m512; B] = std::array::from_fn(|b| T::load(keys.add(b * block + i * KEY_BLOCK)));
                for q in 0..Q {
                    let x = _mm512_set1_ps(*query.add(q * dim + i));
                    for b in 0..B {
                        sums[q][b][parity] = _mm512_fmadd_ps(keys[b], x, sums[q][b][parity]);
                    }
                }
            }
            i += 2;
        }
        if i < dim {
            for b in 0..B {
                let key = T::load(keys.add(b * block + i * KEY_BLOCK));
                for q in 0..Q {
                    let x = _mm512_set1_ps(*query.add(q * dim + i));
                    sums[q][b][0] = _mm512_fmadd_ps(key, x, sums[q][b][0]);
                }
            }
        }
        for q in 0..Q {
            for b in 0..B {
                let sum = _mm512_add_ps(sums[q][b][0], sums[q][b][1]);
                _mm512_storeu_ps(out.add(q * args.stride + b * KEY_BLOCK), sum);
            }
        }
    }
}

/// # Safety
/// The features, and lengths as `Vectors::weigh` checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn weigh_of<T: Element>(args: &Weigh<'_>, values: *const T, positions: usize, out: &mut [f32]) {
    let dim = args.dim;
    let wide = dim / 64 * 64;
    let whole = dim / 16 * 16;
    let count = out.len() / dim;
    let mut q = 0;
    while q < count {
        let step = if q + 4 <= count { 4 } else { 1 };
        for at in (0..wide).step_by(64) {
            let part = Part { args, values, positions, query: q, at };
            // SAFETY: `step` queries from `q` on, 64 dimensions from `at` on.
            unsafe {
                if step == 4 {
                    part.run::<4, 4>(out.as_mut_ptr())
                } else {
                    part.run::<1, 4>(out.as_mut_ptr())
                }
            }
        }
        for at in (wide..whole).step_by(16) {
            let part = Part { args, values, positions, query: q, at };
            // SAFETY: as above, with 16 dimensions.
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
    /// `Q` queries from `query` on and `16 V` dimensions from `at` on exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn run<const Q: usize, const V: usize>(&self, out: *mut f32) {
        let (dim, stride) = (self.args.dim, self.args.stride);
        let mut sums = [[_mm512_setzero_ps(); V]; Q];
        // SAFETY: promised by the caller.
        unsafe {
            let out = out.add(self.query * dim + self.at);
            for q in 0..Q {
                for v in 0..V {
                    sums[q][v] = _mm512_loadu_ps(out.add(q * dim + 16 * v));
                }
            }
            let mut weights = self.args.weights.as_ptr().add(self.query * stride);
            let mut values = self.values.add(self.at);
            for _ in 0..self.positions {
                T::ask(values, 16 * V);
                let row: [__m512; V] = std::array::from_fn(|v| T::load(values.add(16 * v)));
                for q in 0..Q {
                    let w = _mm512_set1_ps(*weights.add(q * stride));
                    for v in 0..V {
                        sums[q][v] = _mm512_fmadd_ps(w, row[v], sums[q][v]);
                    }
                }
                values = values.wrapping_add(dim);
                weights = weights.wrapping_add(1);
            }
            for q in 0..Q {
                for v in 0..V {
                    _mm512_storeu_ps(out.add(q * dim + 16 * v), sums[q][v]);
                }
            }
        }
    }
}
