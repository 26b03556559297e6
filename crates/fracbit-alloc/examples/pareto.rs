//! Draws what fusion buys on the published Llama-3.1-8B instance of Q-Palette, from 100 to 300
//! tokens per second: `docs/fusion.svg`.
//!
//! `cargo run --release -p fracbit-alloc --example pareto`

#![expect(clippy::print_stdout, reason = "an example that prints a table")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{codes, fusion_problem};
use fracbit_alloc::Effort;
use fracbit_chart::{Axis, COLORS, Chart, Point, Scale, Series};
use std::fmt::Write as _;

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
    let [apart, fused] = curves.map(|(_, curve)| curve.into_iter().map(Point::from).collect());
    let series =
        |name, color, points| Series { color: Some(color), radius: 0.0, ..Series::line(name, points) };
    let chart = Chart {
        title: "What fusion buys: Llama-3.1-8B on an RTX 4090, one sequence",
        x: Axis { label: "tokens per second", scale: Scale::Linear },
        y: Axis { label: "predicted loss", scale: Scale::Logarithmic },
        series: vec![
            series("one call per matrix", COLORS[5], apart),
            series("fusion-aware", COLORS[2], fused),
        ],
        limit: None,
    };
    std::fs::write("docs/fusion.svg", chart.file())
}
