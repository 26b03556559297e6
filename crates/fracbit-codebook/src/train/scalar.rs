//! Optimal scalar quantizers of N(0, 1).
//!
//! The values of least error satisfy Lloyd's two conditions (Lloyd 1982; Max 1960): every threshold
//! is the midpoint of its neighbours, every value the centroid of its cell. The normal density is
//! log-concave, so that there is exactly one solution (Fleischer 1964; Kieffer 1983). Alternating
//! the two conditions gains a digit every `n^2` rounds or so; we begin with the companding values
//! (quantiles of N(0, 3), the asymptotically optimal density), let `2 n` rounds smooth them (the
//! outermost are off by up to a quarter), and then solve both conditions at once by Newton's
//! method, whose Jacobian is tridiagonal. At most ten steps reach f64 precision up to 256 values.

use super::normal::{moments, pdf, upper_quantile};

/// The `2^bits` values of least mean squared error for N(0, 1), ascending.
///
/// # Panics
/// When `bits` is not in 1..=12.
#[must_use]
pub fn lloyd_max(bits: u32) -> Vec<f64> {
    assert!((1..=12).contains(&bits), "lloyd_max: bits should be in 1..=12, got {bits}");
    // By symmetry only the positive half, whose first cell begins at 0.
    let half = 1usize << (bits - 1);
    #[expect(clippy::cast_precision_loss, reason = "at most 2048 values")]
    let mut values: Vec<f64> =
        (0..half).map(|i| 3f64.sqrt() * upper_quantile(0.5 - (i as f64 + 0.5) / (2 * half) as f64)).collect();
    for _ in 0..4 * half {
        let centroids = (0..half).map(|i| {
            let [mass, moment, _] = moments(bound(&values, i), bound(&values, i + 1));
            moment / mass
        });
        values = centroids.collect();
    }
    for _ in 0..50 {
        let steps = newton_step(&values);
        values.iter_mut().zip(&steps).for_each(|(v, s)| *v -= s);
        if steps.iter().zip(&values).all(|(s, v)| s.abs() < 1e-14 * v.max(1.0)) {
            break;
        }
    }
    assert!(values.is_sorted() && values[0] > 0.0, "Newton's method left the ordered cone");
    values.iter().rev().map(|v| -v).chain(values.iter().copied()).collect()
}

/// Lower threshold of value `i` of the positive half.
fn bound(values: &[f64], i: usize) -> f64 {
    match i {
        0 => 0.0,
        i if i == values.len() => f64::INFINITY,
        i => f64::midpoint(values[i - 1], values[i]),
    }
}

/// Solves `J s = g` for `g_i = values_i mass_i - moment_i` (half the gradient of the error), J
/// tridiagonal.
fn newton_step(values: &[f64]) -> Vec<f64> {
    let count = values.len();
    let bound = |i| bound(values, i);
    // Moving a value moves each inner bound by half as much.
    let coupling = |i: usize| {
        if i == 0 || i == count { 0.0 } else { (values[i] - values[i - 1]) * pdf(bound(i)) / 4.0 }
    };
    let (mut upper, mut right) = (vec![0.0; count], vec![0.0; count]);
    for i in 0..count {
        let [mass, moment, _] = moments(bound(i), bound(i + 1));
        let (below, above) = (coupling(i), coupling(i + 1));
        let (before, carried) = if i == 0 { (0.0, 0.0) } else { (upper[i - 1], right[i - 1]) };
        let pivot = mass - below - above + below * before;
        upper[i] = -above / pivot;
        right[i] = (values[i] * mass - moment + below * carried) / pivot;
    }
    for i in (1..count).rev() {
        right[i - 1] -= upper[i - 1] * right[i];
    }
    right
}

/// Mean squared error on N(0, 1) of rounding to the nearest of `values`, by exact integrals.
///
/// # Panics
/// When `values` is empty or does not ascend.
#[must_use]
pub fn scalar_error(values: &[f64]) -> f64 {
    cells(values).map(|(v, [mass, first, second])| second - 2.0 * v * first + v * v * mass).sum()
}

/// Each value with the moments of its cell.
pub(super) fn cells(values: &[f64]) -> impl Iterator<Item = (f64, [f64; 3])> {
    assert!(!values.is_empty() && values.is_sorted(), "values should ascend");
    let bound = |i: usize| match i {
        0 => f64::NEG_INFINITY,
        i if i == values.len() => f64::INFINITY,
        i => f64::midpoint(values[i - 1], values[i]),
    };
    values.iter().enumerate().map(move |(i, &v)| (v, moments(bound(i), bound(i + 1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Max 1960, table 1, and the four-decimal values quoted since.
    #[test]
    fn matches_max_1960() {
        let close = |got: f64, want: f64| (got - want).abs() < 6e-5;
        for (bits, positive, error) in [
            (1, &[0.7979][..], 0.3634),
            (2, &[0.4528, 1.5104][..], 0.117_48),
            (3, &[0.2451, 0.7560, 1.3439, 2.1520][..], 0.034_54),
            (4, &[0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326][..], 0.009_497),
        ] {
            let values = lloyd_max(bits);
            let half = &values[values.len() / 2..];
            assert!(half.iter().zip(positive).all(|(&g, &w)| close(g, w)), "{bits} bits: {half:?}");
            assert!(close(scalar_error(&values), error), "{bits} bits: {}", scalar_error(&values));
        }
    }

    #[test]
    fn every_value_is_the_centroid_of_its_cell() {
        for bits in 1..=8 {
            for (value, [mass, first, _]) in cells(&lloyd_max(bits)) {
                assert!(
                    (first / mass - value).abs() < 1e-11,
                    "{bits} bits: {value} against {}",
                    first / mass
                );
            }
        }
    }

    #[test]
    fn plain_lloyd_iteration_comes_to_the_same_values() {
        let mut values: Vec<f64> = (0..16).map(|i| f64::from(2 * i - 15) / 5.0).collect();
        for _ in 0..4000 {
            values = cells(&values).map(|(_, [mass, first, _])| first / mass).collect();
        }
        let newton = lloyd_max(4);
        assert!(values.iter().zip(&newton).all(|(a, b)| (a - b).abs() < 1e-10), "{values:?}\n{newton:?}");
    }
}
