//! The fast Walsh-Hadamard transform, unnormalised.
//!
//! Butterflies (a, b) ↦ (a + b, a − b) at strides h = first, 2·first, … in ascending order, three strides
//! per pass over memory. Grouping strides changes no rounding, so results have the same bits for every
//! grouping, stride and vector length. Strides 1 to 8 work inside chunks of 16: transposing 4×4 turns
//! strides 1 and 2 into operations between vectors. No intrinsics: arrays of `LANES` floats compile to
//! vector instructions of whatever target the crate is built for. Cost: n·log₂n additions, ⌈(log₂n − 4)/3⌉ +
//! 1 passes.

/// Floats per vector of the build's target; for AVX-512 too, since sixteen measured no faster than eight.
const LANES: usize = if cfg!(target_feature = "avx") { 8 } else { 4 };
const BASE: usize = 16;

type Vector<const L: usize> = [f32; L];

#[inline(always)]
fn butterfly<const L: usize>(a: &mut Vector<L>, b: &mut Vector<L>) {
    for (a, b) in a.iter_mut().zip(b) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

/// All butterflies of stride `first`, 2·`first`, … below the length of `x`, which is `first` times a power
/// of two.
///
/// With `first` = 1 this is the transform of one vector; otherwise of `first` vectors stored as columns.
pub(crate) fn butterflies(x: &mut [f32], first: usize) {
    debug_assert!(x.len().is_multiple_of(first) && (x.len() / first).is_power_of_two(), "length fits");
    let mut h = first;
    if first == 1 && x.len() >= BASE {
        x.as_chunks_mut().0.iter_mut().for_each(base);
        h = BASE;
    }
    if !h.is_multiple_of(LANES) {
        return any_stride(x, h);
    }
    while 8 * h <= x.len() {
        x.chunks_exact_mut(8 * h).for_each(|block| radix_eight(block, h));
        h *= 8;
    }
    if 4 * h <= x.len() {
        x.chunks_exact_mut(4 * h).for_each(|block| radix_four(block, h));
        h *= 4;
    }
    if 2 * h <= x.len() {
        x.chunks_exact_mut(2 * h).for_each(|block| radix_two(block, h));
    }
}

fn any_stride(x: &mut [f32], first: usize) {
    let mut h = first;
    while h < x.len() {
        x.chunks_exact_mut(2 * h).for_each(|block| radix_two(block, h));
        h *= 2;
    }
}

fn radix_two(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(h);
    for (a, b) in low.iter_mut().zip(high) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

fn radix_four(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(2 * h);
    let (a, b) = low.split_at_mut(h);
    let (c, d) = high.split_at_mut(h);
    let [a, b, c, d] = [a, b, c, d].map(|s| s.as_chunks_mut::<LANES>().0);
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        let mut v = [*a, *b, *c, *d];
        stage::<4, LANES>(&mut v, 1);
        stage::<4, LANES>(&mut v, 2);
        [*a, *b, *c, *d] = v;
    }
}

fn radix_eight(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(4 * h);
    let ((a, b), (e, f)) = (low.split_at_mut(2 * h), high.split_at_mut(2 * h));
    let [(a, b), (c, d), (e, f), (g, i)] = [a, b, e, f].map(|s| {
        let (x, y) = s.split_at_mut(h);
        (x.as_chunks_mut::<LANES>().0, y.as_chunks_mut::<LANES>().0)
    });
    for (((((((a, b), c), d), e), f), g), i) in a.iter_mut().zip(b).zip(c).zip(d).zip(e).zip(f).zip(g).zip(i)
    {
        let mut v = [*a, *b, *c, *d, *e, *f, *g, *i];
        stage::<8, LANES>(&mut v, 1);
        stage::<8, LANES>(&mut v, 2);
        stage::<8, LANES>(&mut v, 4);
        [*a, *b, *c, *d, *e, *f, *g, *i] = v;
    }
}

/// The butterflies of one stride between the vectors of `v`.
#[inline(always)]
fn stage<const N: usize, const L: usize>(v: &mut [Vector<L>; N], h: usize) {
    for block in v.chunks_exact_mut(2 * h) {
        let (low, high) = block.split_at_mut(h);
        for (a, b) in low.iter_mut().zip(high) {
            butterfly(a, b);
        }
    }
}

/// Strides 1, 2, 4, 8 of sixteen neighbours.
#[inline(always)]
fn base(chunk: &mut [f32; BASE]) {
    let mut v = [[0.0; 4]; 4];
    for i in 0..4 {
        for j in 0..4 {
            v[j][i] = chunk[4 * i + j];
        }
    }
    stage::<4, 4>(&mut v, 1);
    stage::<4, 4>(&mut v, 2);
    let mut w = [[0.0; 4]; 4];
    for i in 0..4 {
        for j in 0..4 {
            w[i][j] = v[j][i];
        }
    }
    stage::<4, 4>(&mut w, 1);
    stage::<4, 4>(&mut w, 2);
    for i in 0..4 {
        for j in 0..4 {
            chunk[4 * i + j] = w[i][j];
        }
    }
}
