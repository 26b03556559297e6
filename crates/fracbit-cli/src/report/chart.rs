//! Line charts as SVG: losses over sizes or times, both axes in ratio.

use std::fmt::Write as _;

/// One line of a chart.
pub(super) struct Curve<'a> {
    pub(super) name: &'a str,
    /// Class that gives the colour.
    pub(super) class: &'a str,
    pub(super) points: Vec<(f64, f64)>,
}

/// Curves and points of one chart.
pub(super) struct Chart<'a> {
    /// Below the axis.
    pub(super) x_label: &'a str,
    pub(super) curves: Vec<Curve<'a>>,
    /// Title and place.
    pub(super) dots: Vec<(String, (f64, f64))>,
    /// The plan.
    pub(super) chosen: (f64, f64),
    /// A limit on the horizontal axis.
    pub(super) limit: Option<f64>,
    /// Numbers of the horizontal axis.
    pub(super) show: fn(f64) -> String,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 52.0;

/// A logarithmic axis.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let positive = values.filter(|v| *v > 0.0 && v.is_finite());
        let (low, high) = positive.fold((f64::INFINITY, 0.0f64), |(a, z), v| (a.min(v), z.max(v)));
        let (low, high) = if low < high { (low, high) } else { (0.5, 2.0) };
        Self { low: low * 0.95, high: high * 1.05, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Round numbers: 1, 2, 5 times powers of ten, or the powers alone where there are many.
    fn ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let steps: &[f64] = if decades > 2.5 {
            &[1.0]
        } else if decades > 0.7 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0]
        };
        #[expect(clippy::cast_possible_truncation, reason = "powers of ten")]
        let first = self.low.log10().floor() as i32;
        let powers = (first..first + 12).map(|p| 10f64.powi(p));
        let all = powers.flat_map(|p| steps.iter().map(move |s| s * p));
        all.filter(|v| (self.low..=self.high).contains(v)).collect()
    }
}

impl Chart<'_> {
    pub(super) fn svg(&self) -> String {
        let points = || {
            let curves = self.curves.iter().flat_map(|c| c.points.iter().copied());
            curves.chain(self.dots.iter().map(|d| d.1)).chain([self.chosen])
        };
        let x = Axis::new(points().map(|p| p.0), LEFT, WIDTH - RIGHT);
        let y = Axis::new(points().map(|p| p.1), HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"loss over {}\">",
            self.x_label
        );
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for tick in x.ticks() {
            let at = x.at(tick);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                (self.show)(tick)
            );
        }
        for tick in y.ticks() {
            let at = y.at(tick);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                LEFT - 6.0,
                at + 4.0,
                tick = Trimmed(tick)
            );
        }
        if let Some(limit) = self.limit {
            let at = x.at(limit);
            let _ = write!(
                svg,
                "<path class=\"limit\" d=\"M{at:.1} {TOP}V{bottom}\"><title>limit</title></path>"
            );
        }
        for (title, (a, b)) in &self.dots {
            let _ = write!(
                svg,
                "<circle class=\"uniform\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{title}</title></circle>",
                x.at(*a),
                y.at(*b)
            );
        }
        for Curve { name, class, points } in &self.curves {
            let line: Vec<String> =
                points.iter().map(|(a, b)| format!("{:.1},{:.1}", x.at(*a), y.at(*b))).collect();
            let _ = write!(
                svg,
                "<polyline class=\"{class}\" points=\"{}\"><title>{name}</title></polyline>",
                line.join(" ")
            );
        }
        let (a, b) = (x.at(self.chosen.0), y.at(self.chosen.1));
        let _ = write!(
            svg,
            "<circle class=\"chosen\" cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"6\"><title>this plan</title></circle>\
             <text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text></svg>",
            f64::midpoint(LEFT, right),
            HEIGHT - 8.0,
            self.x_label
        );
        svg
    }
}

/// A number without the zeros at its end.
struct Trimmed(f64);

impl std::fmt::Display for Trimmed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if (1e-4..1e5).contains(&self.0) { write!(f, "{}", self.0) } else { write!(f, "{:e}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_ticks() {
        let axis = Axis::new([0.012, 3.0].into_iter(), 0.0, 100.0);
        assert_eq!(axis.ticks(), [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]);
        assert!(axis.at(0.012) < 2.0 && axis.at(3.0) > 98.0 && axis.at(0.0) == 0.0);
        assert!(Axis::new([1e-5, 10.0].into_iter(), 0.0, 1.0).ticks().len() < 8);
        assert!(Axis::new([15.0, 20.0].into_iter(), 0.0, 1.0).ticks().len() > 1);
        assert!(!Axis::new(std::iter::empty(), 0.0, 1.0).ticks().is_empty());
    }
}
