//! Where values lie along an axis, and which of them are written there.

use crate::Scale;

/// An axis between two pixels.
pub(crate) struct Placed {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

/// Ticks of a linear axis, about.
const TICKS: f64 = 8.0;

impl Placed {
    pub(crate) fn new(scale: Scale, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let has_place = |v: &f64| v.is_finite() && (scale == Scale::Linear || *v > 0.0);
        let ends = |(a, z): (f64, f64), v: f64| (a.min(v), z.max(v));
        let (low, high) = values.filter(has_place).fold((f64::INFINITY, f64::NEG_INFINITY), ends);
        let (low, high) = match scale {
            _ if low > high => (0.5, 2.0),
            Scale::Linear => {
                let pad = if low < high { 0.04 * high - 0.04 * low } else { 0.5 * high.abs().max(1.0) };
                (low - pad, high + pad)
            }
            Scale::Logarithmic => {
                // By differences of logarithms, as a ratio may be beyond what a number holds.
                let pad = if low < high { (0.04 * (high.ln() - low.ln())).exp() } else { 2.0 };
                ((low / pad).max(f64::MIN_POSITIVE), (high * pad).min(f64::MAX))
            }
        };
        Self { scale, low, high, from, to }
    }

    /// The pixel of a value, one at an end for a value beyond it.
    pub(crate) fn at(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            _ if !value.is_finite() => return None,
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Logarithmic if value <= 0.0 => return None,
            Scale::Logarithmic => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
        };
        Some(self.from + share.clamp(0.0, 1.0) * (self.to - self.from))
    }

    /// Round numbers within the axis: their pixels and how they are written.
    pub(crate) fn ticks(&self) -> Vec<(f64, String)> {
        let values = match self.scale {
            Scale::Linear => self.linear(),
            Scale::Logarithmic => self.logarithmic(),
        };
        values.into_iter().filter_map(|v| Some((self.at(v)?, number(v)))).collect()
    }

    /// Multiples of 1, 2 or 5 times a power of ten.
    fn linear(&self) -> Vec<f64> {
        let step = (self.high - self.low) / TICKS;
        let power = 10f64.powf(step.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|s| s * power).find(|s| *s >= step);
        let Some(step) = step.filter(|s| s.is_finite() && *s > 0.0) else { return Vec::new() };
        let first = (self.low / step).ceil();
        (0..=20).map(|i| (first + f64::from(i)) * step).take_while(|v| *v <= self.high).collect()
    }

    /// 1, 2, 5 times powers of ten, or the powers alone where there are many.
    fn logarithmic(&self) -> Vec<f64> {
        let decades = self.high.log10() - self.low.log10();
        let steps: &[f64] = if decades > 2.8 {
            &[1.0]
        } else if decades > 0.7 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0]
        };
        let every = (decades / 10.0).ceil().max(1.0);
        let first = self.low.log10().floor();
        let powers = (0..=11).map(|p| 10f64.powf(first + every * f64::from(p)));
        let all = powers.flat_map(|p| steps.iter().map(move |s| s * p));
        all.filter(|v| (self.low..=self.high).contains(v)).collect()
    }
}

/// A number without what its sums and products left behind the sixth digit.
fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.5e}").parse().unwrap_or(value);
    if rounded == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e6).contains(&rounded.abs()) {
        rounded.to_string()
    } else {
        format!("{rounded:e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(scale: Scale, values: &[f64]) -> Vec<String> {
        Placed::new(scale, values.iter().copied(), 0.0, 100.0).ticks().into_iter().map(|t| t.1).collect()
    }

    #[test]
    fn ticks_are_round() {
        let log = Scale::Logarithmic;
        assert_eq!(written(log, &[0.012, 3.0]), ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]);
        assert_eq!(written(log, &[1e-5, 10.0]), ["1e-5", "1e-4", "0.001", "0.01", "0.1", "1", "10"]);
        assert_eq!(written(log, &[15.0, 20.0]), ["15", "20"]);
        assert_eq!(written(Scale::Linear, &[1.0, 2.0]), ["1", "1.2", "1.4", "1.6", "1.8", "2"]);
        assert_eq!(written(Scale::Linear, &[-0.3, 0.3]), ["-0.3", "-0.2", "-0.1", "0", "0.1", "0.2", "0.3"]);
        assert_eq!(written(Scale::Linear, &[100.0, 300.0]), ["100", "150", "200", "250", "300"]);
    }

    #[test]
    fn every_range_has_an_axis() {
        for scale in [Scale::Linear, Scale::Logarithmic] {
            for values in
                [&[][..], &[0.0], &[7.0], &[1e-300, 1e300], &[f64::NAN, f64::INFINITY], &[-1.0, 2.0, 2.5]]
            {
                let axis = Placed::new(scale, values.iter().copied(), 10.0, 110.0);
                let ticks = axis.ticks();
                assert!((1..40).contains(&ticks.len()), "{scale:?} {values:?}: {ticks:?}");
                assert!(ticks.iter().all(|t| (10.0..=110.0).contains(&t.0)), "{scale:?} {values:?}");
            }
            assert_eq!(Placed::new(scale, [1.0, 2.0].into_iter(), 0.0, 1.0).at(f64::NAN), None);
        }
        let axis = Placed::new(Scale::Logarithmic, [0.012, 3.0].into_iter(), 0.0, 100.0);
        assert!(axis.at(0.012).is_some_and(|p| (1.0..10.0).contains(&p)));
        assert!(axis.at(3.0).is_some_and(|p| (90.0..99.0).contains(&p)));
        assert_eq!((axis.at(0.0), axis.at(1e-9), axis.at(1e9)), (None, Some(0.0), Some(100.0)));
    }
}
