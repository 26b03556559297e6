//! What a rotation does to an outlier, and what it costs.
//!
//! ```text
//! cargo run --release -p fracbit-rotation --example rotate [-- WIDTH...]
//! ```
#![expect(clippy::print_stdout, reason = "an example that prints its result")]

use std::time::Instant;

use fracbit_rotation::{Factor, Rotation, RotationError};
use rand::{Rng, SeedableRng};

/// The fastest of several timed batches, per call.
fn micros(mut f: impl FnMut()) -> f64 {
    let mut calls = 1u32;
    let mut best = f64::INFINITY;
    for _ in 0..40 {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        let seconds = start.elapsed().as_secs_f64();
        best = best.min(seconds / f64::from(calls));
        if seconds < 2e-3 {
            calls *= 2;
        }
    }
    best * 1e6
}

fn main() -> Result<(), RotationError> {
    let mut widths: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    if widths.is_empty() {
        widths = vec![128, 2048, 4096, 8192, 14336, 11008, 18944, 29568, 4099 * 2];
    }
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    println!("{:>6}  {:<38} {:>13} {:>13} {:>10}", "width", "factors", "max/rms", "rotated", "one apply");
    for n in widths {
        let rotation = Rotation::new(n, 7, 0)?;
        let mut x: Vec<f32> = (0..n).map(|_| random.random_range(-1.0..1.0)).collect();
        x[n / 3] = 100.0; // one channel far above the others, as activations have
        let peak = |x: &[f32]| {
            let rms = (x.iter().map(|x| x * x).sum::<f32>() / n as f32).sqrt();
            x.iter().fold(0.0f32, |peak, x| peak.max(x.abs())) / rms
        };
        let before = peak(&x);
        let mut scratch = vec![0.0; rotation.scratch_len()];
        rotation.apply_with(&mut x, &mut scratch);
        let after = peak(&x);
        let time = micros(|| rotation.apply_with(std::hint::black_box(&mut x), &mut scratch));
        let factors: Vec<_> = rotation.hadamard().factors().iter().map(Factor::to_string).collect();
        println!("{n:>6}  {:<38} {before:>13.2} {after:>13.2} {time:>7.1} µs", factors.join(" × "));
    }
    let (rows, n) = (2048, 8192);
    let rotation = Rotation::new(n, 7, 0)?;
    let mut w = vec![1.0; rows * n];
    let input = millis(|| rotation.apply_rows(&mut w));
    let side = Rotation::new(rows, 7, 1)?;
    let output = millis(|| side.rotate_output(&mut w, n));
    println!("({rows}, {n}) matrix: input side {input:.1} ms, output side {output:.1} ms, one thread");
    Ok(())
}

/// The faster of three runs, in milliseconds.
fn millis(mut f: impl FnMut()) -> f64 {
    (0..3).fold(f64::INFINITY, |best, _| {
        let start = Instant::now();
        f();
        best.min(start.elapsed().as_secs_f64() * 1e3)
    })
}
