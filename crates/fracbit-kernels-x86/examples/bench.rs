//! Speed of the kernels beside the limits of the machine.
//!
//! `cargo run --release -p fracbit-kernels-x86 --example bench [scheme ...]`
//!
//! Decode (batch 1) walks matrices of 2048 x 8192 weights that together take at least 256 MB of codes (a few MB with
//! `--small`, for work on the loops themselves); prefill multiplies a matrix of 512 x 2048 by 128 tokens. Best of nine rounds (of
//! 200 with `--small`): on a shared machine the median measures the neighbours.
#![expect(clippy::print_stdout, reason = "a program that prints a table")]

use fracbit_base::{Scheme, Shape};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix,
    cases::{self, Packed},
    matmul,
};
use rayon::prelude::*;
use std::{hint::black_box, time::Instant};

const SHAPE: Shape = Shape::new(2048, 8192);
const PREFILL: Shape = Shape::new(512, 2048);
const TOKENS: usize = 128;
const ROUNDS: usize = 9;

fn main() {
    let mut small = false;
    let mut schemes: Vec<Scheme> = Vec::new();
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--small" => small = true,
            name => schemes.push(name.parse().expect("a scheme name")),
        }
    }
    if schemes.is_empty() {
        let names = [
            "tcq-fast-1",
            "tcq-fast-1.5",
            "tcq-fast-2",
            "tcq-fast-2.5",
            "tcq-fast-3",
            "tcq-fast-4",
            "tcq-1",
            "tcq-1.5",
            "tcq-2",
            "tcq-2.5",
            "half-tcq-2.75",
            "tcq-3",
            "tcq-3.5",
            "tcq-4",
            "tcq-5",
            "vq-2",
            "vq-3",
            "vq-4",
            "vq-6",
            "nuq-2",
            "nuq-3",
            "nuq-4",
            "nuq-6",
            "nuq-8",
            "tcq-hyb-2",
            "tcq-hyb-4",
        ];
        schemes = names.map(|n| n.parse().expect("a scheme name")).to_vec();
    }
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool");
    let pools = [pool(1), pool(2)];
    let limits = pools.each_ref().map(|p| p.install(read_bandwidth));
    println!("read bandwidth: {:.1} GB/s (1 thread), {:.1} GB/s (2 threads)", limits[0], limits[1]);
    println!(
        "{:14} {:>7} | {:>8} {:>6} {:>5} | {:>8} {:>6} {:>5} | {:>9} {:>9}",
        "scheme", "isa", "Gw/s 1T", "GB/s", "read", "Gw/s 2T", "GB/s", "read", "GMAC/s 1T", "2T, b=128"
    );
    let mut kernels = Kernels::scalar();
    fracbit_kernels_x86::install(&mut kernels).expect("FRACBIT_ISA");
    for scheme in schemes {
        for nth in 0..scheme.halves().map(|s| cases::table_lengths(s).len())[1] {
            let books = cases::codebooks(scheme, nth, if scheme.quarters() > 20 { 2000 } else { 127 });
            let entries = books[0].entries().len();
            let name = if nth == 0 { scheme.to_string() } else { format!("  ({entries})") };
            let packed = Packed::random(scheme, SHAPE, books, SHAPE.cols, 1);
            let copies = if small { 1 } else { (256_000_000 / packed.codes.len()).max(1) + 1 };
            let view = packed.view().expect("parts that fit");
            let matrices: Vec<_> = (0..copies).map(|_| PackedMatrix::new(&kernels, &view)).collect();
            let mut x = Activations::new();
            let decode = pools.each_ref().map(|p| {
                x.set(&cases::activations(SHAPE.cols, 1), SHAPE.cols).expect("one row");
                let mut y = vec![0.0; SHAPE.rows];
                let rounds = if small { 200 } else { ROUNDS };
                let seconds = p.install(|| {
                    best(rounds, || {
                        matrices.iter().for_each(|w| matmul(w, &mut x, &mut y).expect("shapes that fit"));
                        black_box(&y);
                    })
                });
                (SHAPE.len() * copies) as f64 / seconds / 1e9
            });
            let packed_prefill = Packed::random(scheme, PREFILL, packed.codebooks.clone(), PREFILL.cols, 1);
            let w = PackedMatrix::new(&kernels, &packed_prefill.view().expect("parts that fit"));
            let prefill = pools.each_ref().map(|p| {
                x.set(&cases::activations(TOKENS * PREFILL.cols, 1), PREFILL.cols).expect("whole rows");
                let mut y = vec![0.0; TOKENS * PREFILL.rows];
                let seconds = p.install(|| {
                    best(100, || {
                        matmul(&w, &mut x, &mut y).expect("shapes that fit");
                        black_box(&y);
                    })
                });
                (PREFILL.len() * TOKENS) as f64 / seconds / 1e9
            });
            let bytes = packed.codes.len() as f64 / SHAPE.len() as f64;
            let column = |i: usize| {
                let gb = decode[i] * bytes;
                format!("{:8.1} {gb:6.1} {:4.0}%", decode[i], 100.0 * gb / limits[i])
            };
            println!(
                "{name:14} {:>7} | {} | {} | {:9.0} {:9.0}",
                matrices[0].isa().name(),
                column(0),
                column(1),
                prefill[0],
                prefill[1]
            );
        }
    }
}

/// Seconds of the fastest of `rounds` runs after one to warm up.
fn best(rounds: usize, mut run: impl FnMut()) -> f64 {
    run();
    let time = |run: &mut dyn FnMut()| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..rounds).map(|_| time(&mut run)).fold(f64::INFINITY, f64::min)
}

/// GB/s of summing 512 MB, all threads of the pool together.
fn read_bandwidth() -> f64 {
    let data = vec![1u64; 1 << 26];
    let seconds = best(ROUNDS, || {
        let sum: u64 = data
            .par_chunks(1 << 18)
            .map(|c| {
                let mut lanes = [0u64; 32];
                c.as_chunks::<32>()
                    .0
                    .iter()
                    .for_each(|c| (0..32).for_each(|i| lanes[i] = lanes[i].wrapping_add(c[i])));
                lanes.iter().sum::<u64>()
            })
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
    });
    (data.len() * 8) as f64 / seconds / 1e9
}
