//! Progressive schemes: int8 weights with a scale for each row, and unsigned 4-bit codes of these
//! with an integer scale and zero.
//!
//! Source: Lin et al., "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM
//! Serving" (arXiv 2405.04532), section 4.1. The scale of a row maps its largest weight to 119, so
//! that rounding to a group's integers stays within int8; where a target lies beyond (error
//! feedback), codes that would leave it are not taken. The paper takes a group's scale and zero
//! from its extremes; here those of least weighted squared error are searched, of which its own are
//! one.

use fracbit_base::{Family, Granularity, Scheme};
use fracbit_format::SecondLevel;

/// Scales of a whole row tried, relative to the one by its extremes.
const REACH: [f32; 10] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55];
/// The least share of the scale by its extremes that a group may have.
const LEAST: f32 = 0.5;
/// Weights side by side.
const LANES: usize = 16;

/// Finds the scales of a progressive scheme.
#[derive(Clone, Copy, Debug)]
pub struct ProgressiveCoder(Granularity);

impl ProgressiveCoder {
    /// The coder of `scheme`; `None` for a scheme of one level.
    #[must_use]
    pub fn new(scheme: Scheme) -> Option<Self> {
        match scheme.family() {
            Family::Qoq(granularity) => Some(Self(granularity)),
            _ => None,
        }
    }

    /// The scale of a row, and what all its groups share where the row is one group. `importance`
    /// holds a non-negative number for each column, or nothing when all count the same. A row of
    /// zeros gets the scale zero.
    #[must_use]
    pub fn row(self, weights: &[f32], importance: Option<&[f32]>) -> (f32, Option<SecondLevel>) {
        match self.0 {
            Granularity::Group128 => {
                let largest = weights.iter().fold(0.0f32, |most, w| most.max(w.abs()));
                (largest / f32::from(SecondLevel::PROTECTED), None)
            }
            Granularity::Channel => {
                let (low, high) = extremes(weights);
                let full = (high - low) / 15.0;
                let mut best = (f64::INFINITY, 0.0, SecondLevel { scale: 1, zero: 0 });
                if full > 0.0 && full.is_finite() {
                    for scale in REACH.map(|reach| full * reach) {
                        for zero in zeros(low, high, scale) {
                            let error =
                                error(weights, importance, scale, (-f32::from(zero), 15.0 - f32::from(zero)));
                            if error < best.0 {
                                best = (error, scale, SecondLevel { scale: 1, zero });
                            }
                        }
                    }
                }
                (best.1, Some(best.2))
            }
        }
    }

    /// Scale and zero of a group, for targets in units of the row's scale.
    ///
    /// # Panics
    /// When `importance` has another length than `targets`.
    #[must_use]
    pub fn group(self, targets: &[f32], importance: Option<&[f32]>) -> SecondLevel {
        assert!(importance.is_none_or(|h| h.len() == targets.len()), "an importance for each target");
        let most = f32::from(SecondLevel::PROTECTED);
        let (low, high) = extremes(targets);
        let (low, high) = (low.clamp(-most, 0.0), high.clamp(0.0, most));
        let full = (high - low) / 15.0;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 16")]
        let (first, last) = ((full * LEAST).max(1.0) as u8, (full + 1.5).clamp(1.0, 16.0) as u8);
        let mut best = (f64::INFINITY, SecondLevel { scale: last, zero: 0 });
        for scale in first..=last {
            for zero in zeros(low, high, f32::from(scale)) {
                let second = SecondLevel { scale, zero };
                let (from, to) = second.codes();
                let at = |code: u8| f32::from(code) - f32::from(zero);
                let error = error(targets, importance, f32::from(scale), (at(from), at(to)));
                if error < best.0 {
                    best = (error, second);
                }
            }
        }
        best.1
    }
}

/// The code of the weight nearest to `x` in a group, and the weight, both in units of the row's
/// scale; never beyond int8.
#[must_use]
pub fn nearest(second: SecondLevel, x: f32) -> (u8, i16) {
    let (first, last) = second.codes();
    let (scale, zero) = (f32::from(second.scale), f32::from(second.zero));
    let place = (x / scale).round_ties_even() + zero;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a code; NaN is the first")]
    let code = place.clamp(f32::from(first), f32::from(last)) as u8;
    (code, second.value(code))
}

fn extremes(values: &[f32]) -> (f32, f32) {
    values.iter().fold((0.0, 0.0), |(low, high), &v| (v.min(low), v.max(high)))
}

/// Zeros to try: from the one by the extremes to those that leave out as much at both ends, and one
/// more on each side.
fn zeros(low: f32, high: f32, scale: f32) -> std::ops::RangeInclusive<u8> {
    let middle = 7.5 - f32::midpoint(low, high) / scale;
    let by_extremes = (-low / scale).round_ties_even();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15")]
    let zero = |zero: f32| zero.clamp(0.0, 15.0) as u8;
    zero(by_extremes.min(middle.floor()) - 1.0)..=zero(by_extremes.max(middle.ceil()) + 1.0)
}

/// `sum h (w - s k)^2`, where `k` is the integer nearest to `w / s` between `least` and `most`.
fn error(weights: &[f32], importance: Option<&[f32]>, scale: f32, (least, most): (f32, f32)) -> f64 {
    /// Adding it to a small number and taking it away rounds to the nearest integer, ties to even,
    /// also on vectors of processors that have no such instruction.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    let inverse = 1.0 / scale;
    let mut sums = [0.0f32; LANES];
    let mut total = 0.0;
    for (at, weights) in (0..).step_by(LANES).zip(weights.chunks(LANES)) {
        let (mut w, mut h) = ([0.0; LANES], [0.0; LANES]);
        w[..weights.len()].copy_from_slice(weights);
        match importance {
            Some(all) => h[..weights.len()].copy_from_slice(&all[at..][..weights.len()]),
            None => h[..weights.len()].fill(1.0),
        }
        for ((sum, w), h) in sums.iter_mut().zip(w).zip(h) {
            let k = ((w * inverse + ROUND) - ROUND).max(least).min(most);
            let off = w - scale * k;
            *sum += h * off * off;
        }
        // Single precision would lose a long row's last terms.
        if at % 128 == 128 - LANES {
            total += sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
            sums = [0.0; LANES];
        }
    }
    total + sums.iter().map(|&sum| f64::from(sum)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least error over all scales, zeros and codes.
    fn brute_force(targets: &[f32], importance: &[f32]) -> f64 {
        let mut best = f64::INFINITY;
        for scale in 1..=SecondLevel::MOST {
            for zero in 0..16 {
                let second = SecondLevel { scale, zero };
                let (first, last) = second.codes();
                let nearest = |x: f32| {
                    let off = |code| (f64::from(x) - f64::from(second.value(code))).powi(2);
                    (first..=last).map(off).fold(f64::INFINITY, f64::min)
                };
                best =
                    best.min(targets.iter().zip(importance).map(|(&x, &h)| f64::from(h) * nearest(x)).sum());
            }
        }
        best
    }

    fn groups() -> impl Iterator<Item = (Vec<f32>, Vec<f32>)> {
        let mut state = 1u64;
        let mut unit = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..60).map(move |i| {
            let (size, shift) = ([119.0, 60.0, 9.0, 1.0][i % 4], [0.0, 0.4, -0.7][i % 3]);
            let targets = (0..128).map(|_| ((unit() + unit() + unit()) / 1.5 - 1.0 + shift) * size);
            let targets: Vec<f32> = targets.map(|t: f32| t.clamp(-119.4, 119.4)).collect();
            let importance = (0..128).map(|_| unit() * if i % 2 == 0 { 1.0 } else { 3.0 }).collect();
            (targets, importance)
        })
    }

    #[test]
    fn a_group_is_found_nearly_as_well_as_by_trying_all() {
        let coder = ProgressiveCoder::new("qoq-g128".parse().unwrap()).unwrap();
        for (targets, importance) in groups() {
            let second = coder.group(&targets, Some(&importance));
            let off = |x: f32| (f64::from(x) - f64::from(nearest(second, x).1)).powi(2);
            let got: f64 = targets.iter().zip(&importance).map(|(&x, &h)| f64::from(h) * off(x)).sum();
            let best = brute_force(&targets, &importance);
            assert!(got <= 1.05 * best + 1e-9, "{second:?}: {got} beside {best}");
        }
    }

    #[test]
    fn codes_are_the_nearest_that_stay_int8() {
        for byte in 0..=u8::MAX {
            let second = SecondLevel::from_byte(byte);
            let (first, last) = second.codes();
            for x in (-3000..=3000).map(|i| i as f32 * 0.1) {
                let (code, value) = nearest(second, x);
                assert_eq!(value, second.value(code));
                assert!(value.abs() <= 127, "{second:?}: {x}");
                let off = |value: i16| (x - f32::from(value)).abs();
                let best = (first..=last).map(|code| off(second.value(code))).fold(f32::INFINITY, f32::min);
                assert!(off(value) <= best + 1e-4, "{second:?}: {x}");
            }
        }
        assert_eq!(nearest(SecondLevel { scale: 3, zero: 5 }, f32::NAN).0, 0);
    }

    #[test]
    fn rows_of_one_group_have_scale_one_and_their_own_zero() {
        let coder = ProgressiveCoder::new("qoq-channel".parse().unwrap()).unwrap();
        let shifted: Vec<f32> = (0..64).map(|i| 0.01 * i as f32).collect();
        let (scale, second) = coder.row(&shifted, None);
        assert_eq!(second, Some(SecondLevel { scale: 1, zero: 0 }), "no weight is negative");
        assert!((scale - 0.042).abs() < 0.002, "{scale}");
        assert_eq!(coder.row(&[0.0; 16], None).0, 0.0);
        let groups = ProgressiveCoder::new("qoq-g128".parse().unwrap()).unwrap();
        assert_eq!(groups.row(&[1.0, -238.0], None), (2.0, None));
    }
}
