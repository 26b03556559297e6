//! How much the loss of a model rises when one layer gets noisy.
//!
//! The linearity theorem (HIGGS; Q-Palette, section 3 and appendix E) says that for small relative
//! errors `t_l^2 = |W_l - W'_l|^2 / |W_l|^2` the loss rises by `sum_l a_l t_l^2`. The coefficient
//! of a layer is measured by adding Gaussian noise of known `t` to it alone and fitting the rise.
//! This module holds the arithmetic: the noise levels, the noise, the fit; running the model is the
//! caller's business.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// The 16 relative noise levels `t = i / 16` of the HIGGS protocol are spread evenly below this
/// one.
///
/// The papers go up to 1; at such levels the loss is far from linear in `t^2`, so we stop where the
/// coarsest palette entry stands (one bit per weight has `t^2 = 0.28`) and spread the levels evenly
/// in `t`.
pub const MAX_NOISE: f64 = 0.53;

/// Relative noise levels `t` of a measurement with `count` levels, ascending.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a handful of levels")]
pub fn noise_levels(count: usize) -> Vec<f64> {
    (1..=count).map(|i| MAX_NOISE * i as f64 / count as f64).collect()
}

/// Standard deviations of the rows of noise whose expected `|W - W'|^2` is `|W|^2`, for a row-major
/// matrix of `cols` columns: each row gets noise as large as it is, as codes with a scale for each
/// row do; where `turned`, all the same, for a rotation will mix the rows.
///
/// With `gain` (one number per column) norms are those of `W diag(gain)`: the noise is white in the
/// matrix that results from folding a norm's gain into it, and so stays white under any rotation of
/// its columns.
///
/// # Panics
/// When `gain` is not `cols` long.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "standard deviations in f32"
)]
pub fn deviations(weights: &[f32], cols: usize, gain: Option<&[f32]>, turned: bool) -> Vec<f32> {
    assert!(gain.is_none_or(|g| g.len() == cols), "one gain per column");
    let factor = |col: usize| gain.map_or(1.0, |g| g[col]);
    let square =
        |row: &[f32]| row.iter().enumerate().map(|(c, &w)| f64::from(w * factor(c)).powi(2)).sum::<f64>();
    let squares: Vec<f64> = weights.par_chunks(cols.max(1)).map(square).collect();
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    let of = |&own: &f64| ((if turned { mean } else { own }) / cols.max(1) as f64).sqrt() as f32;
    squares.iter().map(of).collect()
}

/// Adds seeded Gaussian noise to a row-major matrix, `t` times the [`deviations`] of its rows, and
/// divided by the `gain` of columns. Columns of zero gain vanish by folding and get no noise.
///
/// # Panics
/// When there is not one deviation for each row, or one gain for each column.
pub fn add_noise(weights: &mut [f32], deviations: &[f32], gain: Option<&[f32]>, t: f64, seed: u64) {
    let cols = weights.len() / deviations.len().max(1);
    assert_eq!(weights.len(), cols * deviations.len(), "one deviation per row");
    assert!(gain.is_none_or(|g| g.len() == cols), "one gain per column");
    weights.par_chunks_mut(cols.max(1)).zip(deviations).enumerate().for_each(|(at, (row, &deviation))| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(at as u64);
        #[expect(clippy::cast_possible_truncation, reason = "a standard deviation in f32")]
        let sigma = (t * f64::from(deviation)) as f32;
        for (col, w) in row.iter_mut().enumerate() {
            let noise = sigma * rng.sample::<f32, _>(StandardNormal);
            let gain = gain.map_or(1.0, |g| g[col]);
            if gain != 0.0 {
                *w += noise / gain;
            }
        }
    });
}

/// A fitted sensitivity.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Fit {
    /// Loss per unit of relative squared error, never negative.
    pub a: f64,
    /// Root mean square residual of the fit relative to the largest measured loss.
    pub residual: f64,
}

/// Least-squares `a` of `loss = a t^2` through the origin, over measured pairs `(t, loss)`.
///
/// `None` when no pair has a positive `t` and a finite loss.
#[must_use]
pub fn fit(points: &[(f64, f64)]) -> Option<Fit> {
    let points: Vec<_> =
        points.iter().filter(|(t, loss)| *t > 0.0 && t.is_finite() && loss.is_finite()).collect();
    if points.is_empty() {
        return None;
    }
    let (mut numerator, mut denominator) = (0.0, 0.0);
    for (t, loss) in &points {
        let square = t * t;
        numerator += square * loss;
        denominator += square * square;
    }
    let a = (numerator / denominator).max(0.0);
    let worst = points.iter().map(|(_, loss)| loss.abs()).fold(f64::MIN_POSITIVE, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "a handful of points")]
    let mean = points.iter().map(|(t, loss)| (loss - a * t * t).powi(2)).sum::<f64>() / points.len() as f64;
    Some(Fit { a, residual: mean.sqrt() / worst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_data_give_the_exact_coefficient() {
        let points: Vec<_> = noise_levels(16).into_iter().map(|t| (t, 3.5 * t * t)).collect();
        let fit = fit(&points).unwrap();
        assert!((fit.a - 3.5).abs() < 1e-12 && fit.residual < 1e-12, "{fit:?}");
    }

    #[test]
    fn noise_has_the_asked_energy_and_depends_on_the_seed_alone() {
        let clean: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.1).cos()).collect();
        let noisy = |seed| {
            let mut w = clean.clone();
            add_noise(&mut w, &deviations(&clean, 200, None, true), None, 0.25, seed);
            w
        };
        let (a, b) = (noisy(7), noisy(7));
        assert_eq!(a, b);
        assert_ne!(a, noisy(8));
        let energy: f64 = clean.iter().map(|&w| f64::from(w).powi(2)).sum();
        let error: f64 = clean.iter().zip(&a).map(|(x, y)| f64::from(x - y).powi(2)).sum();
        assert!((error / energy / 0.0625 - 1.0).abs() < 0.03, "{}", error / energy);
    }

    #[test]
    fn rows_get_as_much_as_they_are_unless_they_turn() {
        let weights = [3.0, -3.0, 0.0, 0.0, 1.0, 1.0];
        assert_eq!(deviations(&weights, 2, None, false), [3.0, 0.0, 1.0]);
        let all = (20.0f32 / 6.0).sqrt();
        assert_eq!(deviations(&weights, 2, None, true), [all; 3]);
        assert_eq!(deviations(&weights, 2, Some(&[1.0, 0.0]), false), [4.5f32.sqrt(), 0.0, 0.5f32.sqrt()]);
        let mut noisy = weights;
        add_noise(&mut noisy, &[3.0, 0.0, 1.0], Some(&[1.0, 0.0]), 0.5, 1);
        let same = |i: usize| noisy[i] == weights[i];
        assert_eq!([0, 1, 2, 3, 4, 5].map(same), [false, true, true, true, false, true]);
    }

    #[test]
    fn noise_is_white_after_folding_the_gain() {
        let gain: Vec<f32> = (0..50).map(|c| if c == 7 { 0.0 } else { 0.2 + c as f32 * 0.1 }).collect();
        let clean: Vec<f32> = (0..50_000).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut noisy = clean.clone();
        add_noise(&mut noisy, &deviations(&clean, 50, Some(&gain), true), Some(&gain), 0.2, 3);
        let folded = |w: &[f32], i: usize| f64::from(w[i] * gain[i % 50]);
        let (mut energy, mut columns) = (0.0, [0.0; 50]);
        for i in 0..clean.len() {
            energy += folded(&clean, i).powi(2);
            columns[i % 50] += (folded(&noisy, i) - folded(&clean, i)).powi(2);
        }
        assert!((columns.iter().sum::<f64>() / energy / 0.04 * 50.0 / 49.0 - 1.0).abs() < 0.03);
        assert_eq!(columns[7], 0.0);
        let mean = columns.iter().sum::<f64>() / 49.0;
        assert!(
            columns.iter().enumerate().all(|(c, v)| c == 7 || (v / mean - 1.0).abs() < 0.25),
            "{columns:?}"
        );
    }

    #[test]
    fn nothing_usable_gives_no_fit() {
        assert_eq!(fit(&[]), None);
        assert_eq!(fit(&[(0.0, 1.0), (0.1, f64::NAN)]), None);
        assert_eq!(fit(&[(0.5, -1.0)]).unwrap().a, 0.0, "a coefficient is never negative");
    }
}
