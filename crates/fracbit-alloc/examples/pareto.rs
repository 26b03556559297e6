//! Draws what fusion buys on the published Llama-3.1-8B instance of Q-Palette, from 100 to 300
//! tokens per second: `docs/fusion.svg`.
//!
//! `cargo run --release -p fracbit-alloc --example pareto`

#![expect(clippy::print_stdout, reason = "an example that prints a table")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{codes, fusion_problem};
use fracbit_alloc::Effort;
use std::fmt::Write as _;

/// The picture, pixels.
const SIZE: (f64, f64) = (860.0, 440.0);
/// Left, top, right and bottom margins.
const MARGIN: (f64, f64, f64, f64) = (64.0, 24.0, 20.0, 48.0);
/// Tokens per second and losses at the edges.
const SPEEDS: (f64, f64) = (100.0, 300.0);
const LOSSES: (f64, f64) = (1e-4, 1e1);

fn main() -> std::io::Result<()> {
    let codes = codes();
    let mut curves = [(false, Vec::new()), (true, Vec::new())];
    println!("tok/s  loss of one call per matrix  loss with fusion");
    for step in 0..=50 {
        let speed = 100.0 + 4.0 * f64::from(step);
        let problem = fusion_problem(32, &codes, speed, None);
        let mut line = format!("{speed:5}");
        for (fused, curve) in &mut curves {
            let allowed = problem.restricted(|g| *fused || g.members.len() == 1);
            match allowed.and_then(|p| p.solve(Effort { gap: 1e-5, ..Effort::default() })) {
                Ok(found) => {
                    curve.push((speed, found.loss));
                    let _ = write!(line, "  {:10.5}", found.loss);
                }
                Err(_) => line += "  out of reach",
            }
        }
        println!("{line}");
    }
    std::fs::write("docs/fusion.svg", draw(&curves))
}

fn x(speed: f64) -> f64 {
    MARGIN.0 + (speed - SPEEDS.0) / (SPEEDS.1 - SPEEDS.0) * (SIZE.0 - MARGIN.0 - MARGIN.2)
}

fn y(loss: f64) -> f64 {
    let share = (loss / LOSSES.0).log10() / (LOSSES.1 / LOSSES.0).log10();
    SIZE.1 - MARGIN.3 - share.clamp(0.0, 1.0) * (SIZE.1 - MARGIN.1 - MARGIN.3)
}

fn draw(curves: &[(bool, Vec<(f64, f64)>)]) -> String {
    let (width, height) = SIZE;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let (left, right, bottom) = (x(SPEEDS.0), x(SPEEDS.1), height - MARGIN.3);
    for tick in (100..=300).step_by(25).map(f64::from) {
        let at = x(tick);
        let _ = writeln!(svg, "<path d=\"M{at:.1} {:.1}V{bottom:.1}\" stroke=\"#eee\"/>", MARGIN.1);
        let _ = writeln!(
            svg,
            "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
            bottom + 18.0
        );
    }
    for power in -4..=1 {
        let at = y(10f64.powi(power));
        let _ = writeln!(svg, "<path d=\"M{left:.1} {at:.1}H{right:.1}\" stroke=\"#eee\"/>");
        let label = 10f64.powi(power);
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 6.0,
            at + 4.0
        );
    }
    for (fused, curve) in curves {
        let (color, name) = if *fused { ("#0a6", "fusion-aware") } else { ("#b33", "one call per matrix") };
        let points: Vec<String> = curve.iter().map(|(s, l)| format!("{:.1},{:.1}", x(*s), y(*l))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        let row = MARGIN.1 + if *fused { 40.0 } else { 20.0 };
        let _ = writeln!(
            svg,
            "<path d=\"M{:.1} {row:.1}h24\" stroke=\"{color}\" stroke-width=\"3\"/>",
            left + 14.0
        );
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{name}</text>", left + 46.0, row + 4.0);
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">tokens per second, Llama-3.1-8B on an RTX 4090, one sequence</text>",
        f64::midpoint(left, right),
        height - 10.0
    );
    let _ = writeln!(
        svg,
        "<text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">predicted loss</text>\n</svg>",
        f64::midpoint(MARGIN.1, bottom)
    );
    svg
}
