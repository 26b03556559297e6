//! The scalar reference of [`Vectors`](super::Vectors): also the source that backends compile for
//! their instruction sets.
//!
//! Every sum runs in sixteen interleaved partial sums that are added pairwise; Rust never contracts
//! a multiplication and an addition by itself. `exp` is our own because libm differs between
//! systems and a polynomial vectorizes where a library call does not. Functions are always inlined,
//! so that they take on the target features of their caller.

use super::{FloatScores, FloatWeigh, Gate, KEY_BLOCK, Products, Rounded};
use crate::args::{BLOCK_TILES, MAX_INT8, MAX_INT16};
use fracbit_format::TILE_COLS;

/// Partial sums.
pub const LANES: usize = 16;
/// Columns that share an activation scale.
pub(crate) const GROUP: usize = BLOCK_TILES * TILE_COLS;

/// The inner product of two slices of one length.
#[inline(always)]
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len(), "dot of two lengths");
    let mut sums = [0.0; LANES];
    accumulate(&mut sums, a, b);
    finish(sums, a.as_chunks::<LANES>().1, b.as_chunks::<LANES>().1)
}

/// Adds the products of all whole groups of [`LANES`] to the partial sums; leaves the tail to
/// [`finish`].
#[inline(always)]
pub fn accumulate(sums: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for (s, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *s += a * b;
        }
    }
}

/// As [`Vectors::products`](super::Vectors::products).
#[inline(always)]
pub fn products(args: &Products<'_>, sums: &mut [[f32; LANES]]) {
    let Products { weights, weight_stride, inputs, input_stride, tokens, width, .. } = *args;
    for (row, sums) in sums.chunks_mut(tokens.max(1)).enumerate() {
        for (token, sums) in sums.iter_mut().enumerate() {
            accumulate(
                sums,
                &weights[row * weight_stride..][..width],
                &inputs[token * input_stride..][..width],
            );
        }
    }
}

/// Adds the partial sums pairwise, then the tail.
#[inline(always)]
#[must_use]
pub fn finish(sums: [f32; LANES], a_rest: &[f32], b_rest: &[f32]) -> f32 {
    a_rest.iter().zip(b_rest).fold(pairwise(sums), |s, (a, b)| s + a * b)
}

/// The sum of sixteen numbers: halves are added to each other until one is left.
///
/// Inlined on aarch64 it would make the compiler gather the sums before it in vectors of half the
/// width.
#[cfg_attr(target_arch = "aarch64", inline(never))]
#[cfg_attr(not(target_arch = "aarch64"), inline(always))]
fn pairwise(mut sums: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// 1.5 · 2^23: adding it rounds to the nearest integer, ties to even, and leaves that in the low
/// bits of the mantissa.
pub(crate) const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; products of the first with n are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of e^r, from that of r^6 on.
const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// e^x within 2 units in the last place; 0 below -87.3 (no subnormals), infinite above 88.72, NaN
/// for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 by two-part reduction (Cody and Waite), then a Taylor
/// polynomial of degree 7 in r, whose truncation error 2^-1.5 · 0.347^8 / 8! is below 2^-28.
///
/// Nothing is fused: training calls it in code for any x86-64, where a fused product is a call and
/// no vectors are made of it.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    // A NaN passes both comparisons unchanged and comes out of the polynomial as NaN.
    let c = if x > 88.8 { 88.8 } else { x };
    let c = if c < -87.4 { -87.4 } else { c };
    let shifted = c * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (c - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for coefficient in TAYLOR {
        p = p * r + coefficient;
    }
    // Two factors of 2^(n/2): 2^128 alone has no f32.
    let bits = shifted.to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed();
    let half = bits >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127).cast_unsigned() & 0xff) << 23);
    let y = p * scale(half) * scale(bits.wrapping_sub(half));
    if x < -87.3 { 0.0 } else { y }
}

/// e^x for x <= 0, within 2 units in the last place where [`exp`] is; 0 below -87.3, NaN for NaN.
/// Half of its instructions: products and sums are rounded once, and 2^n comes straight out of the
/// sum that rounds, in whose low bits n + 127 is.
#[inline(always)]
fn exp_below(x: f32) -> f32 {
    const ROUND: f32 = MAGIC + 127.0;
    let c = if x < -87.4 { -87.4 } else { x };
    let shifted = c.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, c));
    let p = TAYLOR.iter().fold(1.0 / 5040.0, |p: f32, &coefficient| p.mul_add(r, coefficient));
    let y = p * f32::from_bits(shifted.to_bits() << 23);
    if x < -87.3 { 0.0 } else { y }
}

/// As [`Vectors::float_scores`](super::Vectors::float_scores).
#[inline(always)]
pub fn float_scores(args: &FloatScores<'_>, out: &mut [f32]) {
    let FloatScores { queries, dim, keys, stride } = *args;
    for (query, out) in queries.chunks_exact(dim).zip(out.chunks_mut(stride.max(1))) {
        for (keys, out) in keys.chunks_exact(dim * KEY_BLOCK).zip(out.as_chunks_mut::<KEY_BLOCK>().0) {
            // Sums of even and of odd dimensions.
            let mut sums = [[0.0; KEY_BLOCK]; 2];
            let (pairs, last) = keys.as_chunks::<KEY_BLOCK>().0.as_chunks::<2>();
            let (numbers, last_number) = query.as_chunks::<2>();
            let add = |sums: &mut [f32; KEY_BLOCK], key: &[f32; KEY_BLOCK], x: f32| {
                sums.iter_mut().zip(key).for_each(|(sum, k)| *sum = k.mul_add(x, *sum));
            };
            for (keys, [even, odd]) in pairs.iter().zip(numbers) {
                add(&mut sums[0], &keys[0], *even);
                add(&mut sums[1], &keys[1], *odd);
            }
            last.iter().zip(last_number).for_each(|(key, x)| add(&mut sums[0], key, *x));
            out.iter_mut().zip(sums[0].iter().zip(&sums[1])).for_each(|(o, (a, b))| *o = a + b);
        }
    }
}

/// As [`Vectors::float_weigh`](super::Vectors::float_weigh).
#[inline(always)]
pub fn float_weigh(args: &FloatWeigh<'_>, out: &mut [f32]) {
    let FloatWeigh { weights, stride, values, dim } = *args;
    for (q, out) in out.chunks_exact_mut(dim).enumerate() {
        for (j, value) in values.chunks_exact(dim).enumerate() {
            let weight = weights[q * stride + j];
            out.iter_mut().zip(value).for_each(|(o, v)| *o = weight.mul_add(*v, *o));
        }
    }
}

/// As [`Vectors::softmax`](super::Vectors::softmax).
#[inline(always)]
pub fn softmax(scores: &mut [f32]) -> (f32, f32) {
    let larger = |m: f32, s: f32| if s > m { s } else { m };
    let (groups, rest) = scores.as_chunks_mut::<LANES>();
    // The rest goes with scores that weigh nothing: one by one it would take longer than all before
    // it.
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let mut tops = [f32::NEG_INFINITY; 4 * LANES];
    // Four vectors hide each other's latency.
    let (fours, few) = groups.as_chunks::<4>();
    for four in fours {
        tops.iter_mut().zip(four.as_flattened()).for_each(|(m, s)| *m = larger(*m, *s));
    }
    for group in few.iter().chain([&last]) {
        tops.iter_mut().zip(group).for_each(|(m, s)| *m = larger(*m, *s));
    }
    let mut width = 2 * LANES;
    while width > 0 {
        for i in 0..width {
            tops[i] = larger(tops[i], tops[i + width]);
        }
        width /= 2;
    }
    let top = tops[0];
    let mut sums = [0.0; LANES];
    let mut weigh = |group: &mut [f32; LANES]| {
        for (sum, s) in sums.iter_mut().zip(group) {
            *s = exp_below(*s - top);
            *sum += *s;
        }
    };
    groups.iter_mut().for_each(&mut weigh);
    weigh(&mut last);
    rest.copy_from_slice(&last[..rest.len()]);
    (top, pairwise(sums))
}

/// As [`Vectors::rms_norm`](super::Vectors::rms_norm).
#[inline(always)]
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^24")]
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    match weight {
        Some(weight) => {
            for (o, (x, w)) in out.iter_mut().zip(x.iter().zip(weight)) {
                *o = x * scale * w;
            }
        }
        None => out.iter_mut().zip(x).for_each(|(o, x)| *o = x * scale),
    }
}

/// As [`Vectors::gate_mul`](super::Vectors::gate_mul).
#[inline(always)]
pub fn gate_mul(kind: Gate, gate: &mut [f32], up: &[f32]) {
    // `x sigmoid(z)`: both are that.
    let weigh = |x: f32, z: f32| {
        let t = exp_below(-z.abs());
        x * if z < 0.0 { t } else { 1.0 } / (1.0 + t)
    };
    match kind {
        Gate::Silu => gate.iter_mut().zip(up).for_each(|(g, u)| *g = weigh(*g, *g) * u),
        Gate::GeluTanh => {
            gate.iter_mut().zip(up).for_each(|(g, u)| *g = weigh(*g, Gate::gelu_argument(*g)) * u);
        }
    }
}

/// As [`Vectors::rotate`](super::Vectors::rotate).
#[inline(always)]
pub fn rotate(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
    for head in heads.chunks_exact_mut(2 * cos.len()) {
        let (a, b) = head.split_at_mut(cos.len());
        for ((a, b), (c, s)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// As [`Vectors::walsh`](super::Vectors::walsh).
pub use fracbit_rotation::walsh;

/// As [`Vectors::cap`](super::Vectors::cap).
#[inline(always)]
pub fn cap(cap: f32, x: &mut [f32]) {
    let twice = 2.0 / cap;
    for x in x {
        // tanh(z) = (1 - e^-2z) / (1 + e^-2z) for z >= 0.
        let t = exp_below(-(x.abs() * twice));
        *x = (cap * (1.0 - t) / (1.0 + t)).copysign(*x);
    }
}

/// Coefficients of 2^f for |f| <= 1/2 from that of f^8 on: interpolated at nine Chebyshev nodes,
/// off by at most 1.1e-12 of it.
const EXP2: [f64; 9] = [
    1.325_497_460_306_718e-6,
    1.531_007_828_250_608_5e-5,
    1.540_345_703_941_044_8e-4,
    1.333_345_057_238_646_2e-3,
    9.618_129_157_656_703e-3,
    5.550_410_941_201_361_4e-2,
    2.402_265_069_582_109_3e-1,
    6.931_471_805_459_344e-1,
    9.999_999_999_999_997e-1,
];
/// 1.5 · 2^52, as [`MAGIC`], and the bias of an exponent.
const MAGIC_64: f64 = 6_755_399_441_055_744.0 + 1023.0;

/// 2^x for x <= 0, off by at most 2e-12 of it for x exact; below -1010, and for NaN, 2^-1010. Not
/// fused, as [`exp`].
#[inline(always)]
fn exp2_below(x: f64) -> f64 {
    let x = if x > -1010.0 { x } else { -1010.0 };
    let shifted = x + MAGIC_64;
    let f = x - (shifted - MAGIC_64);
    let p = EXP2[1..].iter().fold(EXP2[0], |p, &coefficient| p * f + coefficient);
    p * f64::from_bits(shifted.to_bits() << 52)
}

/// As [`Vectors::exp_sums`](super::Vectors::exp_sums).
#[inline(always)]
pub fn exp_sums(logits: &[f32], top: f32, rate: f64, sums: &mut [f64]) {
    let top = f64::from(top);
    let weight = |x: f32| exp2_below((f64::from(x) - top) * rate);
    for (logits, sum) in logits.chunks(super::LOGITS).zip(sums) {
        let mut lanes = [0.0; 8];
        let (whole, rest) = logits.as_chunks::<8>();
        for logits in whole {
            lanes.iter_mut().zip(logits).for_each(|(lane, &x)| *lane += weight(x));
        }
        let whole: f64 = lanes.iter().sum();
        *sum = rest.iter().fold(whole, |sum, &x| sum + weight(x));
    }
}

/// As [`Vectors::add`](super::Vectors::add).
#[inline(always)]
pub fn add(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// `every` is 2 when the integers of a pair of tokens alternate, eight each.
pub(crate) fn check_rounded<T>(values: &[f32], to: &Rounded<'_, T>, every: usize) {
    let cols = values.len();
    let room = cols.next_multiple_of(TILE_COLS);
    assert!(
        to.ints.len() == room * every - (every - 1) * PIECE
            && to.scales.len() == cols.div_ceil(GROUP)
            && to.sums.len() == cols.div_ceil(TILE_COLS),
        "room for the integers, scales and sums of {cols} activations"
    );
}

/// Columns of a token of a pair side by side.
pub(crate) const PIECE: usize = 8;

/// Rounds to int8: `scale = absmax / 127` per group.
#[inline(always)]
pub fn narrow(values: &[f32], to: Rounded<'_, i8>) {
    round::<_, 1>(values, to, MAX_INT8, |v| v as i8, i32::from);
}

/// As [`narrow`]; the integers of a pair of tokens alternate, eight each.
#[inline(always)]
pub fn narrow_pair(values: &[f32], to: Rounded<'_, i8>) {
    round::<_, 2>(values, to, MAX_INT8, |v| v as i8, i32::from);
}

/// Rounds to int16: `scale = absmax / 1023` per group.
#[inline(always)]
pub fn wide(values: &[f32], to: Rounded<'_, i16>) {
    round::<_, 1>(values, to, MAX_INT16, |v| v as i16, i32::from);
}

#[inline(always)]
fn round<T: Copy + Default, const EVERY: usize>(
    values: &[f32],
    to: Rounded<'_, T>,
    most: i32,
    cast: impl Fn(i32) -> T,
    widen: impl Fn(T) -> i32,
) {
    #[expect(clippy::cast_precision_loss, reason = "127 or 1023")]
    let most = most as f32;
    let Rounded { ints, scales, sums } = to;
    for ((ints, values), scale) in ints.chunks_mut(EVERY * GROUP).zip(values.chunks(GROUP)).zip(scales) {
        // The order of positive floats is that of their bits, and NaN is above infinity: it
        // survives `max`.
        let top = values.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
        let top = f32::from_bits(top);
        let tiny = top < 1e-30;
        let inverse = if tiny { 0.0 } else { most / top };
        *scale = if tiny { 0.0 } else { top / most };
        // |v| inverse <= most (1 + 2^-23) rounds to at most `most`. NaN (0 * infinity as well) becomes 0.
        let nearest = |v: f32| {
            let scaled = v * inverse;
            let scaled = if scaled.is_nan() { 0.0 } else { scaled };
            cast((scaled + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed())
        };
        if EVERY == 1 {
            let (used, padding) = ints.split_at_mut(values.len());
            used.iter_mut().zip(values).for_each(|(i, &v)| *i = nearest(v));
            padding.fill(T::default());
            continue;
        }
        let (whole, rest) = values.as_chunks::<PIECE>();
        let mut pieces = ints.chunks_mut(EVERY * PIECE);
        for (values, ints) in whole.iter().zip(&mut pieces) {
            ints[..PIECE].iter_mut().zip(values).for_each(|(i, &v)| *i = nearest(v));
        }
        // At most the end of a tile is left.
        let mut rest = rest.iter();
        for ints in pieces {
            ints[..PIECE].iter_mut().for_each(|i| *i = rest.next().map_or(T::default(), |&v| nearest(v)));
        }
    }
    if EVERY == 1 {
        for (sum, tile) in sums.iter_mut().zip(ints.as_chunks::<TILE_COLS>().0) {
            *sum = tile.iter().map(|&i| widen(i)).sum();
        }
    } else {
        for (sum, tile) in sums.iter_mut().zip(ints.chunks(EVERY * TILE_COLS)) {
            let of = |at: usize| tile[at..at + PIECE].iter().map(|&i| widen(i)).sum::<i32>();
            *sum = of(0) + of(EVERY * PIECE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_two_ulps() {
        // Every 101st of the 2^31 finite bit patterns of both signs.
        let [mut worst, mut worst_below] = [0.0f64; 2];
        for bits in (0..0x42b0_0000u32).step_by(101) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                if !(-87.3..88.72).contains(&x) {
                    continue;
                }
                let want = f64::from(x).exp();
                let off = |got: f32| (f64::from(got) - want).abs() / want;
                worst = worst.max(off(exp(x)));
                if x <= 0.0 {
                    worst_below = worst_below.max(off(exp_below(x)));
                }
            }
        }
        let most = 2.0 * f64::from(f32::EPSILON);
        assert!(worst < most && worst_below < most, "relative errors {worst:e} and {worst_below:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(88.7).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!([0.0, -88.0, f32::NEG_INFINITY].map(exp_below), [1.0, 0.0, 0.0]);
        assert!(exp_below(-87.29) >= f32::MIN_POSITIVE && exp_below(f32::NAN).is_nan());
    }

    #[test]
    fn exponentials_of_logits_are_within_their_bound() {
        for i in 0..2_000_000 {
            let x = -f64::from(i) / 2000.0;
            let (got, want) = (exp2_below(x), x.exp2());
            assert!((got - want).abs() <= 2e-12 * want, "{x}: {got:e} {want:e}");
        }
        let least = (-1010f64).exp2();
        for x in [-1010.5, -1e300, f64::NEG_INFINITY, f64::NAN] {
            assert!((exp2_below(x) - least).abs() <= 2e-12 * least, "{x}");
        }
        for len in [0usize, 1, 7, 63, 64, 65, 200] {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let logits: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin() * 9.0 - 9.0).collect();
            let mut sums = vec![9.0; len.div_ceil(super::super::LOGITS)];
            exp_sums(&logits, 0.5, std::f64::consts::LOG2_E / 0.7, &mut sums);
            for (logits, got) in logits.chunks(super::super::LOGITS).zip(sums) {
                let want: f64 = logits.iter().map(|&l| ((f64::from(l) - 0.5) / 0.7).exp()).sum();
                assert!((got - want).abs() <= 3e-12 * want, "{len}: {got:e} {want:e}");
            }
        }
    }

    #[test]
    fn dot_matches_f64_at_every_tail() {
        for n in 0..70 {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let a: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = a.iter().rev().map(|v| v + 0.25).collect();
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(dot(&a, &b)) - want).abs() < 1e-5, "length {n}");
        }
    }

    #[test]
    fn caps_are_hyperbolic_tangents() {
        for c in [0.5f32, 5.0, 50.0] {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let x: Vec<f32> = (-400..=400).map(|i| i as f32 * c / 50.0).collect();
            let mut got = x.clone();
            cap(c, &mut got);
            for (x, got) in x.iter().zip(&got) {
                let want = f64::from(c) * (f64::from(*x) / f64::from(c)).tanh();
                assert!((f64::from(*got) - want).abs() < 3e-7 * f64::from(c), "{c} {x}: {got} for {want}");
            }
        }
        let mut ends = [f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::NAN];
        cap(30.0, &mut ends);
        assert_eq!(ends[..2], [30.0, -30.0]);
        assert!(ends[2].to_bits() == (-0.0f32).to_bits() && ends[3].is_nan());
    }

    #[test]
    fn silu_keeps_its_limits() {
        let mut gate = [0.0, 1.0, -1.0, 100.0, -100.0, f32::NEG_INFINITY];
        gate_mul(Gate::Silu, &mut gate, &[1.0; 6]);
        assert_eq!(gate[0], 0.0);
        assert!((gate[1] - 0.731_058_6).abs() < 1e-6 && (gate[2] + 0.268_941_4).abs() < 1e-6);
        assert_eq!(gate[3], 100.0);
        assert_eq!(gate[4], 0.0);
        assert!(gate[5].is_nan() || gate[5] == 0.0, "-inf · 0 has no better answer");
    }

    #[test]
    fn gelu_is_that_of_its_hyperbolic_tangent() {
        let mut gate: Vec<f32> = (-400..=400).map(|i| i as f32 / 40.0).collect();
        let want = gate.clone();
        gate_mul(Gate::GeluTanh, &mut gate, &vec![2.0; want.len()]);
        for (x, got) in want.into_iter().map(f64::from).zip(gate) {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            assert!((x * (1.0 + inner.tanh()) - f64::from(got)).abs() < 2e-6 * (1.0 + x.abs()), "{x}: {got}");
        }
        let mut ends = [100.0, -100.0, 1e30, 0.0];
        gate_mul(Gate::GeluTanh, &mut ends, &[1.0; 4]);
        assert_eq!(ends, [100.0, 0.0, 1e30, 0.0]);
    }

    #[test]
    fn softmax_matches_f64_at_every_tail() {
        for n in 1..70 {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let mut scores: Vec<f32> = (0..n).map(|i| (i as f32 * 1.7).sin() * 9.0).collect();
            let want: Vec<f64> = scores.iter().map(|s| f64::from(*s)).collect();
            let top = want.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (got_top, sum) = softmax(&mut scores);
            assert_eq!(f64::from(got_top), top);
            let total: f64 = want.iter().map(|s| (s - top).exp()).sum();
            assert!((f64::from(sum) - total).abs() < 1e-5 * total, "length {n}");
            scores
                .iter()
                .zip(&want)
                .for_each(|(s, w)| assert!((f64::from(*s) - (w - top).exp()).abs() < 1e-6));
        }
        assert!(softmax(&mut [1.0, f32::NAN, 2.0]).1.is_nan());
    }
}
