//! Cosine and sine of a rational angle with the same bits on every platform.
//!
//! The standard library leaves the last digit of `f64::sin` to the platform, and Hartley factors
//! are part of stored weights. Reduction to the first octant is exact in integers; the Taylor
//! series below π/4 then needs only additions and multiplications, which IEEE 754 fixes.

/// (cos, sin) of 2πi/n for i < n, within 1e-15.
pub(crate) fn cos_sin(i: usize, n: usize) -> (f64, f64) {
    debug_assert!(i < n, "one turn");
    // Angle in units of a quarter turn is 4i/n: `quarter` whole ones and rest/n of the next.
    let (quarter, mut rest) = (4 * i / n, 4 * i % n);
    let swap = 2 * rest > n;
    if swap {
        rest = n - rest;
    }
    let (mut cos, mut sin) = octant(rest as f64 / n as f64 * std::f64::consts::FRAC_PI_2);
    if swap {
        (cos, sin) = (sin, cos);
    }
    match quarter {
        0 => (cos, sin),
        1 => (-sin, cos),
        2 => (-cos, -sin),
        _ => (sin, -cos),
    }
}

/// Taylor series to x^19; the first term left out is below 4e-19 for x ≤ π/4.
fn octant(x: f64) -> (f64, f64) {
    let square = x * x;
    let series = |first: u32, start: f64| {
        let (mut term, mut sum) = (start, 0.0);
        let mut divisor = first;
        for _ in 0..10 {
            sum += term;
            term *= -square / f64::from(divisor * (divisor + 1));
            divisor += 2;
        }
        sum
    };
    (series(1, 1.0), series(2, x))
}

#[cfg(test)]
mod tests {
    #[test]
    fn agrees_with_the_library() {
        for n in 1..200 {
            for i in 0..n {
                let (sin, cos) = (i as f64 / n as f64 * std::f64::consts::TAU).sin_cos();
                let got = super::cos_sin(i, n);
                assert!((got.0 - cos).abs() < 2e-15 && (got.1 - sin).abs() < 2e-15, "{i}/{n}: {got:?}");
            }
        }
    }
}
