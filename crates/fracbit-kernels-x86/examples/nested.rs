//! Nested scalar codes at every precision, beside plain ones of the same bits: `cargo run --release
//! -p fracbit-kernels-x86 --example nested [ROUNDS [SIDE]]`, for square matrices, of 4096 rows
//! unless told otherwise; those of 1024 rows and less stay in caches, others come from memory.
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

/// Bytes of codes that are more than the caches hold.
const STREAM: usize = 64 << 20;
/// Tokens.
const BATCHES: [usize; 2] = [1, 4];
/// What is compared: a nested scheme, at each of its precisions.
const NESTED: [&str; 2] = ["nest-nuq-2..8", "nest-nuq-4..8"];

fn matrices(name: &str, kernels: &Kernels, side: usize, bits: usize) -> Vec<PackedMatrix> {
    let scheme: Scheme = name.parse().expect("a scheme");
    let packed = |seed: u64| {
        let books = cases::codebooks(scheme, 0, 127);
        let packed = Packed::random(scheme, Shape::new(side, side), books, side, seed);
        PackedMatrix::new(kernels, &packed.view().expect("parts that fit"))
    };
    let count = if side > 1024 { (8 * STREAM).div_ceil(bits * side * side) } else { 1 };
    (0..count as u64).map(packed).collect()
}

fn main() {
    let number = |at, default| std::env::args().nth(at).and_then(|n| n.parse().ok()).unwrap_or(default);
    let (rounds, side): (usize, usize) = (number(1, 9), number(2, 4096));
    let mut kernels = Kernels::scalar();
    let isa = fracbit_kernels_x86::install(&mut kernels).expect("an instruction set");
    let plain: Vec<(usize, Vec<PackedMatrix>)> =
        (2..=8).map(|bits| (bits, matrices(&format!("nuq-{bits}"), &kernels, side, bits))).collect();
    let nested = NESTED.map(|name| (name, matrices(name, &kernels, side, 2)));
    println!("{isa}, {side} x {side}, {rounds} rounds by turns, Gweights/s times tokens, nested / plain");
    println!("| scheme | bits | threads | tokens | nested | plain | ratio |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        for batch in BATCHES {
            let input = cases::activations(batch * side, 1);
            let mut x = Activations::new();
            let mut y = vec![0.0; batch * side];
            let mut time = |matrix: &PackedMatrix, precision| {
                pool.install(|| {
                    let start = Instant::now();
                    x.announce(&input, side).expect("whole tokens");
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
                        (batch * side * side) as f64 / times[times.len() / 10] / 1e9
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
