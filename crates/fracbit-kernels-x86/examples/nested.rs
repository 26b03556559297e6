//! Nested scalar codes at every precision, beside plain ones of the same bits; matrices of 4096 x
//! 4096 that come from memory: `cargo run --release -p fracbit-kernels-x86 --example nested
//! [ROUNDS]`.
//!
//! Times are tenth percentiles: a machine that others use, too, interrupts many products.
#![expect(clippy::print_stdout, reason = "a command-line program")]

use fracbit_base::{Rate, Scheme, Shape};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix, Precision, RowsOf,
    cases::{self, Packed},
    matmul_rows_with, with_team,
};
use std::{hint::black_box, time::Instant};

/// Rows and columns.
const SIDE: usize = 4096;
/// Bytes of codes that are more than the caches hold.
const STREAM: usize = 64 << 20;
/// Tokens.
const BATCHES: [usize; 2] = [1, 4];
/// What is compared: a nested scheme, at each of its precisions.
const NESTED: [&str; 2] = ["nest-nuq-2..8", "nest-nuq-4..8"];

fn matrices(name: &str, kernels: &Kernels, bits: usize) -> Vec<PackedMatrix> {
    let scheme: Scheme = name.parse().expect("a scheme");
    let packed = |seed: u64| {
        let books = cases::codebooks(scheme, 0, 127);
        let packed = Packed::random(scheme, Shape::new(SIDE, SIDE), books, SIDE, seed);
        PackedMatrix::new(kernels, &packed.view().expect("parts that fit"))
    };
    (0..(8 * STREAM).div_ceil(bits * SIDE * SIDE) as u64).map(packed).collect()
}

fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(9);
    let mut kernels = Kernels::scalar();
    let isa = fracbit_kernels_x86::install(&mut kernels).expect("an instruction set");
    let plain: Vec<(usize, Vec<PackedMatrix>)> =
        (2..=8).map(|bits| (bits, matrices(&format!("nuq-{bits}"), &kernels, bits))).collect();
    let nested = NESTED.map(|name| (name, matrices(name, &kernels, 2)));
    println!("{isa}, {SIDE} x {SIDE}, {rounds} rounds by turns, Gweights/s times tokens, nested / plain");
    println!("| scheme | bits | threads | tokens | nested | plain | ratio |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        for batch in BATCHES {
            let input = cases::activations(batch * SIDE, 1);
            let mut x = Activations::new();
            let mut y = vec![0.0; batch * SIDE];
            let mut time = |matrix: &PackedMatrix, precision| {
                pool.install(|| {
                    let start = Instant::now();
                    x.announce(&input, SIDE).expect("whole tokens");
                    let rows = RowsOf::all(matrix).at(precision);
                    with_team(|team| matmul_rows_with(team, rows, &input, &mut x, &mut y)).expect("shapes");
                    black_box(&mut y);
                    start.elapsed().as_secs_f64()
                })
            };
            for (name, nested) in &nested {
                let low = if name.contains("-2..") { 2 } else { 4 };
                for (bits, plain) in plain.iter().filter(|(bits, _)| *bits >= low) {
                    let precision = Precision::at_most(Rate::quarter_bits(4 * *bits as u32));
                    let mut times = [Vec::new(), Vec::new()];
                    for _ in 0..rounds {
                        times[0].extend(nested.iter().map(|matrix| time(matrix, precision)));
                        times[1].extend(plain.iter().map(|matrix| time(matrix, Precision::FULL)));
                    }
                    let [nested, plain] = times.map(|mut times| {
                        times.sort_by(f64::total_cmp);
                        (batch * SIDE * SIDE) as f64 / times[times.len() / 10] / 1e9
                    });
                    let ratio = nested / plain;
                    println!(
                        "| `{name}` | {bits} | {threads} | {batch} | {nested:.1} | {plain:.1} | {ratio:.2} |"
                    );
                }
            }
        }
    }
}
