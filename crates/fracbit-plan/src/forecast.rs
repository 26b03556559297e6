//! From a predicted loss to a forecast with an error bar.
//!
//! The linearity theorem adds up what each matrix loses on its own. Whole models lose more than the
//! sum where errors are large, and how much more depends on the model. So the sensitivity protocol
//! ends with noise in *all* matrices at once, of the sizes that good plans have at several budgets,
//! and a line is fitted to
//!
//! ```text
//! ln(measured / sum) = b0 + b1 ln(sum)
//! ```
//!
//! The forecast is the line's value; the bar is its 95 % prediction interval (Student's t), widened
//! by what texts and real rounding errors add ([`TEXT`]).

use serde::{Deserialize, Serialize};

/// Standard deviation of `ln(measured / forecast)` beside the fit's own: the text is not what the
/// model writes, and real rounding errors are not Gaussian noise. It is the root mean square over
/// ten plans of TinyStories-656K, each on texts of four kinds; on stories as that model was trained
/// on it is 0.10, on fairy tales 0.46 (example `forecast_bar`, `docs/lab/tables.md`). The check is
/// the test of forecasts: other plans of another model on another text.
pub const TEXT: f64 = 0.28;

/// What a plan will measure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// KL divergence to the original, nats per token.
    pub kl: f64,
    /// Lower end of its bar.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Perplexity over that of the original, were the text the model's own: `exp(kl)`.
    pub perplexity_ratio: f64,
}

/// A whole model beside the sum of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct JointPoint {
    /// What the matrices lose one by one, added up.
    pub sum: f64,
    /// What the model loses, nats per token.
    pub measured: f64,
}

/// Two-sided 95 % quantiles of Student's t by degrees of freedom.
const STUDENT: [f64; 10] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];

/// The forecast for a predicted loss; `None` with fewer than three points.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a handful of points")]
pub fn forecast(points: &[JointPoint], predicted: f64) -> Option<Forecast> {
    let usable = |p: &&JointPoint| p.sum > 0.0 && p.measured > 0.0;
    let points: Vec<(f64, f64)> =
        points.iter().filter(usable).map(|p| (p.sum.ln(), (p.measured / p.sum).ln())).collect();
    let n = points.len() as f64;
    if points.len() < 3 || predicted <= 0.0 {
        return None;
    }
    let mean = |f: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(&|p| p.0), mean(&|p| p.1));
    let (sxx, sxy) = (mean(&|p| (p.0 - mx).powi(2)) * n, mean(&|p| (p.0 - mx) * (p.1 - my)) * n);
    let slope = if sxx > 0.0 { sxy / sxx } else { 0.0 };
    let line = |x: f64| my + slope * (x - mx);
    let freedom = points.len() - 2;
    let square = points.iter().map(|p| (p.1 - line(p.0)).powi(2)).sum::<f64>() / freedom as f64;
    let x = predicted.ln();
    let spread = square * (1.0 + 1.0 / n + if sxx > 0.0 { (x - mx).powi(2) / sxx } else { 0.0 });
    let t = STUDENT[freedom.min(STUDENT.len()) - 1];
    let half = (t * t * spread + (1.96 * TEXT).powi(2)).sqrt();
    let kl = predicted * line(x).exp();
    Some(Forecast { kl, low: kl * (-half).exp(), high: kl * half.exp(), perplexity_ratio: kl.exp() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(ratio: impl Fn(f64) -> f64) -> Vec<JointPoint> {
        [0.003, 0.01, 0.03, 0.08, 0.15, 0.25]
            .map(|sum| JointPoint { sum, measured: sum * ratio(sum) })
            .to_vec()
    }

    #[test]
    fn the_line_is_found_and_the_bar_holds_the_text() {
        let exact = forecast(&points(|s| 1.5 * s.powf(0.2)), 0.05).unwrap();
        assert!((exact.kl / (0.05 * 1.5 * 0.05f64.powf(0.2)) - 1.0).abs() < 1e-9, "{exact:?}");
        assert!((exact.high / exact.kl - (1.96 * TEXT).exp()).abs() < 1e-9, "no less than what texts differ");
        let noisy = forecast(&points(|s| if s > 0.02 { 1.3 } else { 0.9 }), 0.05).unwrap();
        assert!(noisy.low < noisy.kl && noisy.high / noisy.kl > exact.high / exact.kl);
        let far = forecast(&points(|s| if s > 0.02 { 1.3 } else { 0.9 }), 5.0).unwrap();
        assert!(far.high / far.low > noisy.high / noisy.low, "far from the points the bar is wider");
        assert!(forecast(&points(|_| 1.0)[..2], 0.05).is_none() && forecast(&points(|_| 1.0), 0.0).is_none());
    }
}
