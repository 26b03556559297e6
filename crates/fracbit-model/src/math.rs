//! Small dense f32 operations whose results do not depend on thread count or instruction set.
//!
//! Every sum runs in sixteen interleaved partial sums that are added in one fixed order; Rust never contracts
//! a multiplication and an addition by itself. So the same input gives the same bits whether the compiler
//! uses 4, 8 or 16 lanes. `exp` is our own for the same reason (libm differs between systems) and because a
//! polynomial vectorizes where a library call does not.

/// Partial sums of [`dot`].
pub(crate) const LANES: usize = 16;

/// The inner product of two slices of one length.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len(), "dot of two lengths");
    let mut sums = [0.0; LANES];
    accumulate(&mut sums, a, b);
    finish(sums, a.as_chunks::<LANES>().1, b.as_chunks::<LANES>().1)
}

/// Adds the products of all whole groups of [`LANES`] to the partial sums; leaves the tail to [`finish`].
pub(crate) fn accumulate(sums: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for (s, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *s += a * b;
        }
    }
}

/// Adds the partial sums pairwise, then the tail.
pub(crate) fn finish(mut sums: [f32; LANES], a_rest: &[f32], b_rest: &[f32]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    a_rest.iter().zip(b_rest).fold(sums[0], |s, (a, b)| s + a * b)
}

/// `y += alpha x`.
pub(crate) fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += alpha * x;
    }
}

/// `y += x`.
pub(crate) fn add(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// e^x within 2 units in the last place; 0 below -87.3 (no subnormals), infinite above 88.72, NaN for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 by two-part reduction (Cody and Waite), then a Taylor polynomial of
/// degree 7 in r, whose truncation error 2^-1.5 · 0.347^8 / 8! is below 2^-28.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low mantissa bits
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // A NaN passes both comparisons unchanged and comes out of the polynomial as NaN.
    let c = if x > 88.8 { 88.8 } else { x };
    let c = if c < -87.4 { -87.4 } else { c };
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (c - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    // Two factors of 2^(n/2): 2^128 alone has no f32.
    let bits = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = bits >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127).cast_unsigned() & 0xff) << 23);
    let y = p * scale(half) * scale(bits.wrapping_sub(half));
    if x < -87.3 { 0.0 } else { y }
}

/// `out = x / sqrt(mean(x²) + eps) ∘ weight`, or without the weight.
pub(crate) fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
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

/// [`rms_norm`] in place.
pub(crate) fn rms_norm_inplace(x: &mut [f32], weight: &[f32], eps: f32) {
    #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^24")]
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// `gate = gate · sigmoid(gate) · up`: SwiGLU.
pub(crate) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + exp(-*g)) * u;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps() {
        // Every 101st of the 2^31 finite bit patterns of both signs.
        let mut worst = 0.0f64;
        for bits in (0..0x42b0_0000u32).step_by(101) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                if !(-87.3..88.72).contains(&x) {
                    continue;
                }
                let want = f64::from(x).exp();
                let got = f64::from(exp(x));
                worst = worst.max((got - want).abs() / want);
            }
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "relative error {worst:e}");
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
    fn silu_keeps_its_limits() {
        let mut gate = [0.0, 1.0, -1.0, 100.0, -100.0, f32::NEG_INFINITY];
        silu_mul(&mut gate, &[1.0; 6]);
        assert_eq!(gate[0], 0.0);
        assert!((gate[1] - 0.731_058_6).abs() < 1e-6 && (gate[2] + 0.268_941_4).abs() < 1e-6);
        assert_eq!(gate[3], 100.0);
        assert_eq!(gate[4], 0.0);
        assert!(gate[5].is_nan() || gate[5] == 0.0, "-inf · 0 has no better answer");
    }
}
