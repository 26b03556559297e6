//! Additive codebooks by Psumbook and by expanding, beside other codes of 2 bits; one thread, a
//! matrix of 4096 x 4096 that comes from memory: `cargo run --release -p fracbit-kernels-x86
//! --example psumbook [ROUNDS]`.
//!
//! A product with a strip of 16 rows takes what comes before any row: rounding activations and
//! building the Psumbook. The rest of a product is reading. Times are tenth percentiles: a machine
//! that others use, too, interrupts many products.
#![expect(clippy::print_stdout, reason = "a command-line program")]

use fracbit_base::{Scheme, Shape};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix,
    cases::{self, Packed},
    matmul,
};
use std::{hint::black_box, time::Instant};

/// Rows and columns.
const SIDE: usize = 4096;
/// Bytes of codes that are more than the caches hold.
const STREAM: usize = 64 << 20;
/// Tokens.
const BATCHES: [usize; 4] = [1, 2, 4, 8];

/// A scheme on some kernels.
struct Case {
    name: String,
    bits: f64,
    strip: PackedMatrix,
    matrices: Vec<PackedMatrix>,
}

impl Case {
    fn new(name: &str, kernels: &Kernels, how: &str) -> Self {
        let scheme: Scheme = name.parse().expect("a scheme");
        let book = if name == "tcq-fast-2" {
            cases::ramped(scheme, 63) // as the built-in one
        } else if name.starts_with("aq") {
            cases::centroids(scheme)
        } else {
            cases::codebooks(scheme, 0, 127).remove(0)
        };
        let bits = scheme.rate().bits();
        let matrix = |rows: usize, seed: u64| {
            let packed = Packed::random(scheme, Shape::new(rows, SIDE), vec![book.clone()], SIDE, seed);
            PackedMatrix::new(kernels, &packed.view().expect("parts that fit"))
        };
        let count = (8 * STREAM).div_ceil(scheme.quarters() as usize * SIDE * SIDE / 4);
        let matrices = (0..count as u64).map(|seed| matrix(SIDE, seed)).collect();
        Self { name: format!("{name} {how}"), bits, strip: matrix(16, 0), matrices }
    }
}

/// Microseconds of a product, activations and all.
fn time(matrix: &PackedMatrix, input: &[f32], x: &mut Activations, y: &mut [f32]) -> f64 {
    let start = Instant::now();
    x.set(input, SIDE).expect("whole tokens");
    matmul(matrix, x, y).expect("shapes that fit");
    black_box(&mut *y);
    start.elapsed().as_secs_f64() * 1e6
}

fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(9);
    let mut kernels = Kernels::scalar();
    let isa = fracbit_kernels_x86::install(&mut kernels).expect("an instruction set");
    let bodies = kernels.clone().expanding();
    assert!(fracbit_kernels_x86::install_psumbook(&mut kernels, isa), "a processor with AVX2");
    let mut cases = vec![Case::new("vq-2", &kernels, ""), Case::new("tcq-fast-2", &kernels, "")];
    for name in ["aq-m4v8b4", "aq-m2v8b4", "aq-m6v8b4", "aq-m1v4", "aq-m2v8", "aq-m1v8", "aq-m3v8"] {
        cases.push(Case::new(name, &kernels, "psumbook"));
        cases.push(Case::new(name, &bodies, "expanded"));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    println!(
        "{isa}, one thread, {SIDE} x {SIDE}, {rounds} rounds by turns, the tenth percentile of products"
    );
    println!("| scheme | tokens | one strip, µs | whole, µs | Gweights/s | GB/s of codes |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for batch in BATCHES {
        let input = cases::activations(batch * SIDE, 1);
        let (mut x, mut y) = (Activations::new(), vec![0.0; batch * SIDE]);
        let mut times = vec![[vec![], vec![]]; cases.len()];
        for round in 0..=rounds {
            for (case, [strip, whole]) in cases.iter().zip(&mut times) {
                let mut one = |matrix, y: &mut [f32]| pool.install(|| time(matrix, &input, &mut x, y));
                let both =
                    case.matrices.iter().map(|m| [one(&case.strip, &mut y[..batch * 16]), one(m, &mut y)]);
                for [first, all] in both.filter(|_| round > 0) {
                    strip.push(first);
                    whole.push(all);
                }
            }
        }
        for (case, times) in cases.iter().zip(&mut times) {
            let [strip, whole] = times.each_mut().map(|times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 10]
            });
            let rate = (SIDE * SIDE) as f64 / whole / 1e3;
            println!(
                "| {} | {batch} | {strip:.0} | {whole:.0} | {rate:.2} | {:.2} |",
                case.name,
                rate * case.bits / 8.0
            );
        }
    }
}
