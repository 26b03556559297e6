//! Attention over a cache, and the operations beside the matrices that need no intrinsics: the reference's source, which is
//! made of vectors by the compiler because NEON is part of every aarch64 target.
//!
//! A block of keys takes two passes of two vectors each, and up to four queries share a vector of keys or values: sixteen
//! sums, four vectors of numbers, and a query's two coordinates by lane.

use crate::{dense::products, neon::*, shims::widen};
use fracbit_kernels::{
    Isa, Vectors,
    vectors::{Floats, KEY_BLOCK, Scores, Slots, Weigh, plain},
};
use half::f16;

/// The operations of this instruction set.
pub(crate) fn vectors() -> Vectors {
    let slots = Slots {
        scores,
        weigh,
        widen: widen_all,
        products,
        softmax: plain::softmax,
        rms_norm: plain::rms_norm,
        silu_mul: plain::silu_mul,
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

/// Elements of a cache.
trait Element: Copy {
    /// Eight from `at` on.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load(at: *const Self) -> [float32x4_t; 2];
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> [float32x4_t; 2] {
        // SAFETY: promised by the caller; the type is transparent.
        widen(unsafe { vld1q_u16(at.cast()) })
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> [float32x4_t; 2] {
        // SAFETY: promised by the caller.
        unsafe { [vld1q_f32(at), vld1q_f32(at.add(4))] }
    }
}

/// # Safety
/// As many outputs as inputs.
unsafe fn widen_all(x: &[f16], out: &mut [f32]) {
    let (x, x_rest) = x.as_chunks::<8>();
    let (out, out_rest) = out.as_chunks_mut::<8>();
    for (x, out) in x.iter().zip(out) {
        // SAFETY: eight inputs and outputs.
        unsafe {
            let [low, high] = f16::load(x.as_ptr());
            vst1q_f32(out.as_mut_ptr(), low);
            vst1q_f32(out.as_mut_ptr().add(4), high);
        }
    }
    plain::widen(x_rest, out_rest);
}

/// # Safety
/// Lengths as `Vectors::scores` checks them.
unsafe fn scores(args: &Scores<'_>, out: &mut [f32]) {
    let (count, blocks) = (args.queries.len() / args.dim, args.keys.len() / (args.dim * KEY_BLOCK));
    let mut query = 0;
    while query < count {
        let step = if count - query >= 4 { 4 } else { 1 };
        // SAFETY: `step` queries from `query` on, and as many rows of scores.
        unsafe {
            match (args.keys, step) {
                (Floats::F16(k), 4) => some_scores::<f16, 4>(args, query, k.as_ptr(), blocks, out),
                (Floats::F16(k), _) => some_scores::<f16, 1>(args, query, k.as_ptr(), blocks, out),
                (Floats::F32(k), 4) => some_scores::<f32, 4>(args, query, k.as_ptr(), blocks, out),
                (Floats::F32(k), _) => some_scores::<f32, 1>(args, query, k.as_ptr(), blocks, out),
            }
        }
        query += step;
    }
}

/// # Safety
/// `Q` queries from `first` on, `blocks` blocks at `keys`, `Q` rows of scores.
unsafe fn some_scores<T: Element, const Q: usize>(
    args: &Scores<'_>,
    first: usize,
    keys: *const T,
    blocks: usize,
    out: &mut [f32],
) {
    let dim = args.dim;
    let queries = args.queries[first * dim..(first + Q) * dim].as_ptr();
    let out = out.as_mut_ptr().wrapping_add(first * args.stride);
    for half in 0..2 * blocks {
        let (block, lane) = (half / 2, half % 2 * 8);
        let mut sums = [[[vdupq_n_f32(0.0); 2]; 2]; Q]; // (query, parity of the dimension, half of eight)
        // SAFETY: `dim` vectors of keys in the block and `dim` numbers of each query.
        unsafe {
            let keys = keys.add(block * dim * KEY_BLOCK + lane);
            let mut i = 0;
            while i + 2 <= dim {
                for parity in 0..2 {
                    let key = T::load(keys.add((i + parity) * KEY_BLOCK));
                    for q in 0..Q {
                        let x = *queries.add(q * dim + i + parity);
                        for v in 0..2 {
                            sums[q][parity][v] = vfmaq_n_f32(sums[q][parity][v], key[v], x);
                        }
                    }
                }
                i += 2;
            }
            if i < dim {
                let key = T::load(keys.add(i * KEY_BLOCK));
                for q in 0..Q {
                    let x = *queries.add(q * dim + i);
                    for v in 0..2 {
                        sums[q][0][v] = vfmaq_n_f32(sums[q][0][v], key[v], x);
                    }
                }
            }
            for q in 0..Q {
                for v in 0..2 {
                    let sum = vaddq_f32(sums[q][0][v], sums[q][1][v]);
                    vst1q_f32(out.add(q * args.stride + half * 8 + 4 * v), sum);
                }
            }
        }
    }
}

/// # Safety
/// Lengths as `Vectors::weigh` checks them.
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
unsafe fn weigh_of<T: Element>(args: &Weigh<'_>, values: *const T, positions: usize, out: &mut [f32]) {
    let dim = args.dim;
    let (wide, whole) = (dim / 16 * 16, dim / 8 * 8);
    let count = out.len() / dim;
    let mut query = 0;
    while query < count {
        let step = if query + 4 <= count { 4 } else { 1 };
        let part = |at| Part { args, values, positions, query, at };
        // SAFETY: `step` queries from `query` on, 16 or 8 dimensions from the given one on.
        unsafe {
            for at in (0..wide).step_by(16) {
                if step == 4 {
                    part(at).run::<4, 2>(out.as_mut_ptr());
                } else {
                    part(at).run::<1, 2>(out.as_mut_ptr());
                }
            }
            if wide < whole {
                if step == 4 {
                    part(wide).run::<4, 1>(out.as_mut_ptr());
                } else {
                    part(wide).run::<1, 1>(out.as_mut_ptr());
                }
            }
        }
        if whole < dim {
            for q in query..query + step {
                let out = &mut out[q * dim + whole..(q + 1) * dim];
                plain::weigh_columns(&args.weights[q * args.stride..], args.values, dim, whole, out);
            }
        }
        query += step;
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
    #[inline(always)]
    unsafe fn run<const Q: usize, const V: usize>(&self, out: *mut f32) {
        let (dim, stride) = (self.args.dim, self.args.stride);
        // SAFETY: promised by the caller.
        unsafe {
            let out = out.add(self.query * dim + self.at);
            let mut sums: [[[float32x4_t; 2]; V]; Q] =
                std::array::from_fn(|q| std::array::from_fn(|v| f32::load(out.add(q * dim + 8 * v))));
            let weights = self.args.weights.as_ptr().add(self.query * stride);
            let values = self.values.add(self.at);
            for j in 0..self.positions {
                let row: [[float32x4_t; 2]; V] =
                    std::array::from_fn(|v| T::load(values.add(j * dim + 8 * v)));
                for q in 0..Q {
                    let w = *weights.add(q * stride + j);
                    for v in 0..V {
                        for half in 0..2 {
                            sums[q][v][half] = vfmaq_n_f32(sums[q][v][half], row[v][half], w);
                        }
                    }
                }
            }
            for q in 0..Q {
                for v in 0..V {
                    for half in 0..2 {
                        vst1q_f32(out.add(q * dim + 8 * v + 4 * half), sums[q][v][half]);
                    }
                }
            }
        }
    }
}
