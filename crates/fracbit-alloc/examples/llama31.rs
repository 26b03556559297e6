//! Solves the published Llama-3.1-8B instance of Q-Palette and prints losses, gaps and solver
//! times.
//!
//! `cargo run --release -p fracbit-alloc --example llama31`

#![expect(clippy::print_stdout, reason = "an example that prints tables")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{
    degenerate_problem, fusion_problem, memory_problem, memory_problem_bytes, noisy_problem, palette, stored,
    terms,
};
use fracbit_alloc::{Effort, Problem, gap, ideal_bits, relax, solve};

/// Runs `f`, returns its value and the milliseconds it took.
fn timed<T>(f: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let value = f();
    (value, start.elapsed().as_secs_f64() * 1e3)
}

#[cfg(feature = "highs")]
fn highs(problem: &Problem) -> String {
    let (s, ms) = timed(|| fracbit_alloc::solve_highs(problem, fracbit_alloc::Limits::default()));
    s.map_or_else(|e| e.to_string(), |s| format!("HiGHS {:.6} gap {:.1e} {ms:6.0} ms", s.loss, s.gap()))
}

#[cfg(not(feature = "highs"))]
fn highs(_: &Problem) -> String {
    "HiGHS off".to_owned()
}

fn main() -> Result<(), fracbit_alloc::AllocError> {
    let terms = terms();
    let tcq = palette(&["tcq", "half"], 6..=20, false);
    println!("memory, TCQ 1.5 to 5 bits with half rates ({} codes):", tcq.len());
    for bits in [2.25, 2.5, 2.875, 3.0, 3.25, 4.0, 4.25] {
        let ideal = ideal_bits(&terms, bits, (0.0, f64::INFINITY))?;
        for (what, p) in
            [("payload", memory_problem(&tcq, bits)), ("bytes", memory_problem_bytes(&tcq, bits))]
        {
            let (s, ms) = timed(|| solve(&p));
            let s = s?;
            let g = gap::split(&terms, &stored(&tcq, &s.choice), &ideal)?;
            println!(
                "{bits:5} {what:7} ideal {:.5} loss {:.6} (total {:.4} distortion {:.4} allocation {:.4}) relaxed {:.6} \
                 gap {:.1e} {ms:5.1} ms; {}",
                ideal.loss,
                s.loss,
                g.total,
                g.distortion,
                g.allocation,
                relax(&p)?.bound,
                s.gap(),
                highs(&p)
            );
        }
    }
    println!("other palettes:");
    for (what, codes) in [
        ("NUQ 2,3,4", palette(&["nuq"], 8..=16, true)),
        ("VQ 2,3,4", palette(&["vq"], 8..=16, true)),
        ("VQ all", palette(&["vq"], 0..=24, false)),
        ("TCQ 2,3,4", palette(&["tcq"], 8..=16, true)),
        ("TCQ no half", palette(&["tcq"], 6..=20, false)),
        ("TCQ + 1.0, 1.25", palette(&["tcq", "half"], 0..=20, false)),
        ("everything", palette(&["tcq", "half", "nuq", "vq"], 0..=40, false)),
    ] {
        for bits in [2.5, 3.25] {
            let ideal = ideal_bits(&terms, bits, (0.0, f64::INFINITY))?;
            for (how, p) in
                [("payload", memory_problem(&codes, bits)), ("bytes", memory_problem_bytes(&codes, bits))]
            {
                let (s, ms) = timed(|| solve(&p));
                let s = s?;
                let g = gap::split(&terms, &stored(&codes, &s.choice), &ideal)?;
                println!(
                    "{what:16} {bits:5} {how:7} loss {:.6} (distortion {:.4} allocation {:.4}) gap {:.1e} {ms:5.1} ms",
                    s.loss,
                    g.distortion,
                    g.allocation,
                    s.gap()
                );
            }
        }
    }
    println!("224 layers x 40 choices, noisy costs and losses, and a degenerate instance:");
    for (what, p) in [
        ("noisy 1.5 bits", noisy_problem(0, 1.5)),
        ("noisy 2.5 bits", noisy_problem(1, 2.5)),
        ("noisy 3.3 bits", noisy_problem(2, 3.3)),
        ("noisy 5 bits", noisy_problem(3, 5.0)),
        ("degenerate", degenerate_problem(0)),
    ] {
        let (s, ms) = timed(|| solve(&p));
        let s = s?;
        println!("{what:16} loss {:.6} gap {:.1e} {ms:5.1} ms; {}", s.loss, s.gap(), highs(&p));
    }
    println!("latency, all codes with the cheaper kernel:");
    let all = palette(&["tcq", "half", "nuq", "vq"], 0..=40, false);
    for speed in [150.0, 200.0, 220.0, 240.0] {
        let fused = fusion_problem(32, &all, speed, None);
        let unfused = fused.restricted(|g| g.members.len() == 1)?;
        for (what, p) in [("unfused", unfused), ("fused", fused)] {
            let (s, ms) = timed(|| p.solve(Effort::default()));
            let s = s?;
            print!("{speed:5} tok/s {what:7} loss {:.6} gap {:.1e} {ms:6.1} ms", s.loss, s.gap());
            #[cfg(feature = "highs")]
            {
                let (s, ms) =
                    timed(|| fracbit_alloc::solve_fusion_highs(&p, fracbit_alloc::Limits::default()));
                let s = s?;
                print!("; HiGHS {:.6} gap {:.1e} {ms:6.0} ms", s.loss, s.gap());
            }
            println!();
        }
    }
    Ok(())
}
