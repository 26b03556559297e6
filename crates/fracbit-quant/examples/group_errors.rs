//! Errors of schemes with a scale for every 32 weights, beside scalar and vector codebooks at the
//! same bits, on three sources.
//!
//! `cargo run --release -p fracbit-quant --example group_errors`: relative squared errors, all bits
//! counted (16 for a scale).
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit_base::{Scheme, Shape};
use fracbit_codebook::{
    GroupCoder,
    train::{GroupTraining, group_codebooks, mixed_groups},
};
use fracbit_format::Codebook;
use fracbit_quant::{Grouping, Rounders, codebook, quantize};
use rayon::prelude::*;

const SHAPE: Shape = Shape::new(256, 4096);

/// Relative squared error of coding groups of 32.
fn error(book: Codebook, weights: &[f32]) -> f64 {
    let coder = GroupCoder::new(book).expect("a scheme of groups");
    let one = |group: &[f32]| coder.encode(group, None, 1.0, &mut [0; 32]).error;
    let errors: Vec<f64> = weights.par_chunks(32).map(one).collect();
    errors.iter().sum::<f64>() / weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

/// One codebook of equally spaced entries, with or without zero among them: the better.
fn uniform(scheme: Scheme, weights: &[f32]) -> f64 {
    let count = 1 << (scheme.quarters() / 4);
    let with = |step: i16, first: i16| {
        let entries = (0..count).map(|i| first + step * i).collect();
        error(Codebook::new(scheme, entries, 1.0 / 127.0).expect("a small table"), weights)
    };
    let half = 254 / (count - 1) / 2;
    let step = 252 / count;
    with(2 * half, -half * (count - 1)).min(with(step, -step * (count / 2)))
}

fn main() {
    let rounders = Rounders::default();
    // `mixed_groups` deals groups of its three sources in turn.
    let all = mixed_groups(3 * SHAPE.len() / 32, 11);
    println!("| bits | quantizer | Gaussian | Laplace | mixture |\n| --- | --- | --- | --- | --- |");
    let sources: Vec<Vec<f32>> =
        (0..3).map(|source| all.chunks(32).skip(source).step_by(3).flatten().copied().collect()).collect();
    for bits in 2..=4 {
        let total = f64::from(bits) + 0.5;
        let row = |name: &str, errors: Vec<f64>| {
            let cells: Vec<String> = errors.iter().map(|e| format!("{e:.5}")).collect();
            println!("| {total} | {name} | {} |", cells.join(" | "));
        };
        let scheme: Scheme = format!("gnuq-{bits}").parse().expect("a scheme");
        let packed = |name: &str, grouping: Grouping| {
            let scheme = name.parse().expect("a scheme");
            let one = |w: &Vec<f32>| {
                quantize(w, SHAPE, scheme, grouping, &rounders, &|_| ()).map(|q| q.relative_error)
            };
            sources.iter().map(|w| one(w).expect("finite weights")).collect::<Vec<f64>>()
        };
        row("uniform groups", sources.iter().map(|w| uniform(scheme, w)).collect());
        if bits == 4 {
            row("`int-4`", packed("int-4", Grouping::Columns(32)));
        }
        row(&format!("`nuq-{bits}`, groups of 32"), packed(&format!("nuq-{bits}"), Grouping::Columns(32)));
        row(&format!("`vq-{total}`, scale per row"), packed(&format!("vq-{total}"), Grouping::Row));
        let built_in = codebook(scheme).expect("built in");
        row(&format!("`{scheme}`"), sources.iter().map(|w| error(built_in.clone(), w)).collect());
        for budget in [16, 32, 64] {
            let train = |w: &Vec<f32>| {
                let options = GroupTraining { budget, rounds: 12, ..GroupTraining::default() };
                error(group_codebooks(scheme, &w[..1 << 17], None, options), w)
            };
            row(
                &format!("`{scheme}`, {budget} bytes, trained on the source"),
                sources.iter().map(train).collect(),
            );
        }
    }
}
