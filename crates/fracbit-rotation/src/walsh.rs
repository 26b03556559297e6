//! The fast Walsh-Hadamard transform, unnormalised.
//!
//! Butterflies (a, b) ↦ (a + b, a − b) at strides h = first, 2·first, … in ascending order, three
//! strides per pass over memory. Grouping strides changes no rounding, so results have the same
//! bits for every grouping, stride and vector length. Strides 1 to 8 work inside chunks of 16. No
//! intrinsics: the loops are such that compilers make vectors of them. On x86-64 transposing 4×4
//! turns strides 1 and 2 into operations between vectors; on aarch64 compilers take that apart into
//! single numbers, but load every fourth number by one instruction. Cost: n·log₂n additions,
//! ⌈(log₂n − 4)/3⌉ + 1 passes.

const BASE: usize = 16;

/// All butterflies of stride `first`, 2·`first`, … below the length of `x`, which is `first` times
/// a power of two.
///
/// With `first` = 1 this is the transform of one vector; otherwise of `first` vectors stored as
/// columns.
pub(crate) fn butterflies(x: &mut [f32], first: usize) {
    debug_assert!(x.len().is_multiple_of(first) && (x.len() / first).is_power_of_two(), "length fits");
    let mut h = first;
    if first == 1 && x.len() >= BASE {
        if cfg!(target_arch = "aarch64") {
            // A pass over a piece that stays in the first cache.
            x.chunks_mut(64 * BASE).for_each(|piece| {
                neighbours(piece);
                quads(piece);
            });
        } else {
            x.as_chunks_mut().0.iter_mut().for_each(base);
        }
        h = BASE;
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

/// The Walsh-Hadamard transform of every `order` neighbours of `x`, unnormalised, after a factor
/// for each entry of `x`. What a caller with vectors of its own gives to
/// [`Rotation::apply_rows_by`](crate::Rotation::apply_rows_by) must have these bits.
///
/// # Panics
/// If `order` is no power of two or does not divide the length, or if there are fewer factors than
/// entries.
pub fn walsh(order: usize, x: &mut [f32], factors: &[f32]) {
    assert!(order.is_power_of_two() && x.len().is_multiple_of(order), "walsh: whole pieces of {order}");
    assert!(x.len() <= factors.len(), "walsh: a factor for each entry");
    x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    x.chunks_exact_mut(order).for_each(|piece| butterflies(piece, 1));
}

fn radix_two(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(h);
    for (a, b) in low.iter_mut().zip(high) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

fn radix_four(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(2 * h);
    let ((a, b), (c, d)) = (low.split_at_mut(h), high.split_at_mut(h));
    four(a, b, c, d);
}

fn radix_eight(block: &mut [f32], h: usize) {
    let (low, high) = block.split_at_mut(4 * h);
    let ((a, b), (e, f)) = (low.split_at_mut(2 * h), high.split_at_mut(2 * h));
    let [(a, b), (c, d), (e, f), (g, i)] = [a, b, e, f].map(|s| s.split_at_mut(h));
    eight(a, b, c, d, e, f, g, i);
}

/// The butterflies of two strides.
#[inline(always)]
fn twice([a, b, c, d]: [f32; 4]) -> [f32; 4] {
    let [a, b, c, d] = [a + b, a - b, c + d, c - d];
    [a + c, b + d, a - c, b - d]
}

#[inline(never)] // the compiler knows of arguments that they do not overlap
fn four(a: &mut [f32], b: &mut [f32], c: &mut [f32], d: &mut [f32]) {
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        [*a, *b, *c, *d] = twice([*a, *b, *c, *d]);
    }
}

#[inline(never)] // as above
#[expect(
    clippy::too_many_arguments,
    reason = "an array of slices might overlap, as far as the compiler knows"
)]
fn eight(
    a: &mut [f32],
    b: &mut [f32],
    c: &mut [f32],
    d: &mut [f32],
    e: &mut [f32],
    f: &mut [f32],
    g: &mut [f32],
    i: &mut [f32],
) {
    for (((((((a, b), c), d), e), f), g), i) in a.iter_mut().zip(b).zip(c).zip(d).zip(e).zip(f).zip(g).zip(i)
    {
        let (low, high) = (twice([*a, *b, *c, *d]), twice([*e, *f, *g, *i]));
        [*a, *b, *c, *d] = std::array::from_fn(|k| low[k] + high[k]);
        [*e, *f, *g, *i] = std::array::from_fn(|k| low[k] - high[k]);
    }
}

/// Strides 1 and 2: NEON loads and stores every fourth number.
fn neighbours(x: &mut [f32]) {
    x.as_chunks_mut().0.iter_mut().for_each(|quad| *quad = twice(*quad));
}

/// Strides 4 and 8.
fn quads(x: &mut [f32]) {
    for chunk in x.as_chunks_mut::<BASE>().0 {
        let (low, high) = chunk.split_at_mut(8);
        let ((a, b), (c, d)) = (low.split_at_mut(4), high.split_at_mut(4));
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            [*a, *b, *c, *d] = twice([*a, *b, *c, *d]);
        }
    }
}

type Vector = [f32; 4];

/// The butterflies of one stride between the vectors of `v`.
#[inline(always)]
fn stage(v: &mut [Vector; 4], h: usize) {
    for block in v.chunks_exact_mut(2 * h) {
        let (low, high) = block.split_at_mut(h);
        for (a, b) in low.iter_mut().zip(high) {
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
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
    stage(&mut v, 1);
    stage(&mut v, 2);
    let mut w = [[0.0; 4]; 4];
    for i in 0..4 {
        for j in 0..4 {
            w[i][j] = v[j][i];
        }
    }
    stage(&mut w, 1);
    stage(&mut w, 2);
    for i in 0..4 {
        for j in 0..4 {
            chunk[4 * i + j] = w[i][j];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_through_sixteen_neighbours_give_the_same_bits() {
        let numbers = |i: usize| ((i * 7919 % 1013) as f32 - 500.3) * 1.7f32.powi(i as i32 % 9);
        let mut a: [f32; 5 * BASE] = std::array::from_fn(numbers);
        let mut b = a;
        a.as_chunks_mut().0.iter_mut().for_each(base);
        neighbours(&mut b);
        quads(&mut b);
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{a:?}\n{b:?}");
    }
}
