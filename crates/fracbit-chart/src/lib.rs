//! Line and scatter charts as SVG.
//!
//! [`Chart::file`] is a picture that stands alone, with title, legend and colours for light and
//! dark; [`Chart::figure`] is drawn into a page that has its own. Values that an axis has no place
//! for (not finite; not positive on a logarithmic one) are left out.
#![doc = include_str!("../README.md")]

mod axis;

use axis::Placed;
use std::fmt::{self, Write as _};

/// How values lie along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences are equally far apart.
    Linear,
    /// Equal ratios are equally far apart.
    Logarithmic,
}

/// An axis; its ends are those of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis<'a> {
    /// What it measures, with its unit; a vertical axis without one has no label.
    pub label: &'a str,
    /// How values lie along it.
    pub scale: Scale,
}

/// A point of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Along the horizontal axis.
    pub x: f64,
    /// Along the vertical axis.
    pub y: f64,
    /// What is shown where one points at it; empty for nothing.
    pub title: String,
    /// Whether its title's first word is written beside it, where there is room.
    pub labelled: bool,
}

impl From<(f64, f64)> for Point {
    fn from((x, y): (f64, f64)) -> Self {
        Self { x, y, title: String::new(), labelled: false }
    }
}

impl Point {
    /// With a title.
    #[must_use]
    pub fn titled(self, title: String) -> Self {
        Self { title, ..self }
    }
}

/// Points of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Series<'a> {
    /// Its name in the legend.
    pub name: &'a str,
    /// Its colour in CSS; `None` for one of [`COLORS`] by its place.
    pub color: Option<&'a str>,
    /// Whether a line joins its points.
    pub line: bool,
    /// Radius of its points in pixels; 0 for none.
    pub radius: f64,
    /// Its points, in the order of the line.
    pub points: Vec<Point>,
}

impl<'a> Series<'a> {
    /// A line through points that are seen.
    #[must_use]
    pub fn line(name: &'a str, points: Vec<Point>) -> Self {
        Self { name, color: None, line: true, radius: 3.0, points }
    }

    /// Points without a line.
    #[must_use]
    pub fn dots(name: &'a str, points: Vec<Point>) -> Self {
        Self { line: false, ..Self::line(name, points) }
    }
}

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart<'a> {
    /// What it shows.
    pub title: &'a str,
    /// The horizontal axis.
    pub x: Axis<'a>,
    /// The vertical axis.
    pub y: Axis<'a>,
    /// What it holds; later ones are drawn over earlier ones.
    pub series: Vec<Series<'a>>,
    /// A value of the horizontal axis that is marked as a limit.
    pub limit: Option<f64>,
}

/// Colours of series that name none; the first of them told apart by eyes that see fewer colours,
/// all of them seen on light and on dark ground.
pub const COLORS: [&str; 12] = [
    "#0a84c8", "#d9822b", "#159a6c", "#c2529b", "#8a6fd1", "#b3372f", "#7a8a1f", "#808890", "#17a2b8",
    "#e8687a", "#5e5ce6", "#a07850",
];

/// Rules for [`Chart::figure`] in a page that sets `--ink`, `--soft`, `--paper`, `--line` and
/// `--panel`.
pub const STYLE: &str = "\
svg{background:var(--panel)}svg text{fill:var(--soft)}svg .axis{fill:var(--ink)}\
.grid{stroke:var(--line);fill:none}.limit{stroke:var(--ink);stroke-dasharray:4 4;fill:none}\
.curve{fill:none;stroke-width:2.5}.dot{stroke:var(--paper);stroke-width:1}";

/// What [`STYLE`] asks for, for a file.
const VARIABLES: &str = "\
svg{--ink:#1b1f24;--soft:#59636e;--paper:#fff;--line:#d8dee4;--panel:#fff}\
@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--soft:#9198a1;--paper:#0d1117;--line:#30363d;--panel:#0d1117}}";

/// Pixels of a picture and of the edges around its plot.
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

/// Pixels that a character of the usual size takes, at most.
const CHARACTER: f64 = 7.4;

impl Chart<'_> {
    /// The picture alone, for a page of HTML with [`STYLE`]; title and legend are the page's.
    #[must_use]
    pub fn figure(&self) -> String {
        let edge = if self.y.label.is_empty() { 62.0 } else { 76.0 };
        let frame = Frame { width: 560.0, height: 340.0, left: edge, right: 14.0, top: 12.0, bottom: 52.0 };
        let Frame { width, height, .. } = frame;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">",
            Escaped(self.title)
        );
        self.draw(&frame, &mut svg);
        svg + "</svg>"
    }

    /// A file of its own.
    #[must_use]
    pub fn file(&self) -> String {
        let (width, left) = (860.0, 76.0);
        let mut legend = String::new();
        let (mut at, mut row) = (left, 52.0);
        for (place, series) in self.series.iter().enumerate() {
            let wide = 40.0 + CHARACTER * f64::from(u32::try_from(series.name.chars().count()).unwrap_or(0));
            if at > left && at + wide > width - 14.0 {
                (at, row) = (left, row + 20.0);
            }
            let _ = writeln!(
                legend,
                "<path d=\"M{at:.1} {:.1}h18\" style=\"stroke:{};stroke-width:4\"/><text x=\"{:.1}\" y=\"{row:.1}\">{}</text>",
                row - 4.0,
                series.color(place),
                at + 24.0,
                Escaped(series.name)
            );
            at += wide;
        }
        let frame = Frame { width, height: 420.0 + row, left, right: 14.0, top: row + 16.0, bottom: 52.0 };
        let Frame { height, .. } = frame;
        let title = Escaped(self.title);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\" font-family=\"system-ui,sans-serif\" font-size=\"13\">\n\
             <style>{VARIABLES}{STYLE}</style>\n<rect width=\"{width}\" height=\"{height}\" style=\"fill:var(--panel)\"/>\n\
             <text class=\"axis\" x=\"{:.1}\" y=\"26\" text-anchor=\"middle\" font-size=\"17\">{title}</text>\n{legend}",
            width / 2.0,
        );
        self.draw(&frame, &mut svg);
        svg + "</svg>\n"
    }

    fn draw(&self, frame: &Frame, svg: &mut String) {
        let points = || self.series.iter().flat_map(|s| &s.points);
        let (right, bottom) = (frame.width - frame.right, frame.height - frame.bottom);
        let x = Placed::new(self.x.scale, points().map(|p| p.x), frame.left, right);
        let y = Placed::new(self.y.scale, points().map(|p| p.y), bottom, frame.top);
        self.axes(&x, &y, frame, svg);
        if let Some(at) = self.limit.and_then(|limit| x.at(limit)) {
            let _ = writeln!(
                svg,
                "<path class=\"limit\" d=\"M{at:.1} {:.1}V{bottom:.1}\"><title>limit</title></path>",
                frame.top
            );
        }
        let placed = |p: &Point| Some((x.at(p.x)?, y.at(p.y)?));
        for (place, series) in self.series.iter().enumerate() {
            let color = series.color(place);
            if series.line {
                let line: Vec<String> = series
                    .points
                    .iter()
                    .filter_map(|p| placed(p).map(|(a, b)| format!("{a:.1},{b:.1}")))
                    .collect();
                let _ = writeln!(
                    svg,
                    "<polyline class=\"curve\" style=\"stroke:{color}\" points=\"{}\"><title>{}</title></polyline>",
                    line.join(" "),
                    Escaped(series.name)
                );
            }
            for point in series.points.iter().filter(|_| series.radius > 0.0) {
                let Some((a, b)) = placed(point) else { continue };
                let title = if point.title.is_empty() { series.name } else { &point.title };
                let _ = writeln!(
                    svg,
                    "<circle class=\"dot\" style=\"fill:{color}\" cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"{}\"><title>{}</title></circle>",
                    series.radius,
                    Escaped(title)
                );
            }
        }
        let labelled = points().filter(|p| p.labelled).filter_map(|p| Some((placed(p)?, p.title.as_str())));
        labels(labelled, (frame.left, right), svg);
    }

    fn axes(&self, x: &Placed, y: &Placed, frame: &Frame, svg: &mut String) {
        let Frame { left, top, .. } = *frame;
        let (right, bottom) = (frame.width - frame.right, frame.height - frame.bottom);
        for (at, tick) in x.ticks() {
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{at:.1} {top:.1}V{bottom:.1}\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 18.0,
            );
        }
        for (at, tick) in y.ticks() {
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{left:.1} {at:.1}H{right:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                left - 6.0,
                at + 4.0,
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(left, right),
            frame.height - 10.0,
            Escaped(self.x.label)
        );
        if !self.y.label.is_empty() {
            let _ = writeln!(
                svg,
                "<text class=\"axis\" transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
                f64::midpoint(top, bottom),
                Escaped(self.y.label)
            );
        }
    }
}

impl Series<'_> {
    fn color(&self, place: usize) -> Escaped<'_> {
        Escaped(self.color.unwrap_or(COLORS[place % COLORS.len()]))
    }
}

/// Writes the first word of titles beside their points: to the right, else to the left, else above
/// or below, and not where another stands or the plot from `left` to `right` ends.
fn labels<'a>(
    points: impl Iterator<Item = ((f64, f64), &'a str)>,
    (left, right): (f64, f64),
    svg: &mut String,
) {
    const HEIGHT: f64 = 14.0;
    let mut taken: Vec<(f64, f64, f64)> = Vec::new();
    for ((x, y), title) in points {
        let word = title.split([' ', ',']).next().unwrap_or_default();
        let wide = CHARACTER * f64::from(u32::try_from(word.chars().count()).unwrap_or(0));
        let free = |&(from, row): &(f64, f64)| {
            let apart = |&(other, until, at): &(f64, f64, f64)| {
                from + wide < other || from > until || (row - at).abs() > HEIGHT
            };
            from > left && from + wide < right && taken.iter().all(apart)
        };
        let places = [(x + 8.0, y), (x - 8.0 - wide, y), (x + 8.0, y - 10.0), (x + 8.0, y + 10.0)];
        let Some((from, row)) = places.into_iter().find(free) else { continue };
        taken.push((from, from + wide, row));
        let _ = writeln!(svg, "<text x=\"{from:.1}\" y=\"{:.1}\">{}</text>", row + 4.0, Escaped(word));
    }
}

/// Text within SVG.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                // What XML has no place for, in whatever form.
                c if c.is_control() => f.write_char(' ')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
