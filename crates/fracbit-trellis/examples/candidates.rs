//! Errors of trellis codes that might be in the palette: shift patterns, table sizes, longer
//! states, several weights a step.
//!
//! `cargo run --release -p fracbit-trellis --example candidates -- [tiles [name ...]]`, names by
//! their beginnings. Independent of the library's search: costs in f32, all `2^L` states, any
//! circular pattern of shifts, the seam found by a free pass around it. Every table is trained by
//! Lloyd's rounds inside the trellis, from three widths. The tiles of the measurement are the same
//! for all candidates.
#![expect(clippy::print_stdout, reason = "the output of a command")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "states of at most 20 bits, sums of a few thousand weights"
)]

use fracbit_format::{TILE, trellis};
use fracbit_trellis::train::gaussian_tiles;
use rayon::prelude::*;
use std::time::Instant;

/// A code that might be.
#[derive(Clone, Debug)]
struct Candidate {
    name: String,
    /// Bits of a state.
    bits: u32,
    /// Weights of a step: 1 (`x (x + c)`), 2 or 4 (the hash of the `fast` code).
    weights: usize,
    /// Magnitudes.
    entries: usize,
    /// Shifts, repeated around the tile.
    pattern: Vec<u32>,
}

impl Candidate {
    fn new(what: &str, bits: u32, weights: usize, entries: usize, pattern: &[u32]) -> Self {
        let shifts: Vec<String> = pattern.iter().map(ToString::to_string).collect();
        let name = format!("{what} L{bits} V{weights} {entries} [{}]", shifts.join(" "));
        Self { name, bits, weights, entries, pattern: pattern.to_vec() }
    }

    fn rate(&self) -> f64 {
        let bits: u32 = self.pattern.iter().sum();
        f64::from(bits) / (self.pattern.len() * self.weights) as f64
    }

    fn shift(&self, t: usize) -> u32 {
        self.pattern[t % self.pattern.len()]
    }

    /// Entry and sign of each weight of a state.
    fn index(&self, state: u32) -> [(usize, bool); 4] {
        let mut out = [(0, false); 4];
        if self.weights == 1 {
            let mask = (1u32 << self.bits) - 1;
            let h = state.wrapping_mul(state.wrapping_add(u32::from(trellis::FINE_ADD))) & mask;
            let below = self.bits - 1 - self.entries.trailing_zeros();
            out[0] = ((h >> below) as usize & (self.entries - 1), h >> (self.bits - 1) != 0);
        } else {
            assert_eq!(self.bits, 16, "the hash of the fast code takes 16 bits");
            let quarters = 4 * self.pattern[0] as usize / self.weights;
            let bytes = trellis::hash_fast(state as u16, self.weights, quarters);
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = (usize::from(byte) & (self.entries - 1), byte >> 7 != 0);
            }
        }
        out
    }

    /// Values of all states, (weights, states).
    fn values(&self, table: &[f32]) -> Vec<f32> {
        let states = 1u32 << self.bits;
        let value = |w: usize, s: u32| {
            let (at, negative) = self.index(s)[w];
            if negative { -table[at] } else { table[at] }
        };
        (0..self.weights).flat_map(|w| (0..states).map(move |s| value(w, s))).collect()
    }

    /// Costs behind every step of `from..to` of the unrolled circle, by overlap; `last` holds those
    /// behind the last.
    fn backward(&self, x: &[f32], values: &[f32], from: usize, to: usize, last: Vec<f32>) -> Vec<Vec<f32>> {
        let (states, steps) = (1usize << self.bits, x.len() / self.weights);
        let mut costs = vec![last];
        let mut all = vec![0.0f32; states];
        for t in (from..to).rev() {
            let after = &costs[costs.len() - 1];
            for (all, &after) in all.chunks_mut(1 << self.shift(t % steps)).zip(after) {
                all.fill(after);
            }
            for (w, values) in values.chunks_exact(states).enumerate() {
                let x = x[t % steps * self.weights + w];
                all.iter_mut().zip(values).for_each(|(all, v)| *all += (v - x) * (v - x));
            }
            let overlaps = states >> self.shift((t + steps - 1) % steps);
            let mut before = all[..overlaps].to_vec();
            for some in all.chunks_exact(overlaps).skip(1) {
                before.iter_mut().zip(some).for_each(|(b, &a)| *b = b.min(a));
            }
            costs.push(before);
        }
        costs.reverse();
        costs
    }

    /// The states of the best path of `from..to` that starts in `overlap`.
    fn trace(
        &self,
        x: &[f32],
        values: &[f32],
        from: usize,
        costs: &[Vec<f32>],
        overlap: usize,
    ) -> Vec<usize> {
        let (states, steps) = (1usize << self.bits, x.len() / self.weights);
        let mut overlap = overlap;
        let mut path = Vec::new();
        for (i, after) in costs[1..].iter().enumerate() {
            let t = (from + i) % steps;
            let new_bits = self.shift((t + steps - 1) % steps);
            let cost = |s: usize| {
                let own =
                    (0..self.weights).map(|w| (values[w * states + s] - x[t * self.weights + w]).powi(2));
                own.sum::<f32>() + after[s >> self.shift(t)]
            };
            let candidates = (0..1usize << new_bits).map(|n| n << (self.bits - new_bits) | overlap);
            let best = candidates.min_by(|&a, &b| cost(a).total_cmp(&cost(b))).expect("at least one");
            path.push(best);
            overlap = best >> self.shift(t);
        }
        path
    }

    /// A closed path near a tile.
    fn encode(&self, tile: &[f32; TILE], values: &[f32]) -> Vec<usize> {
        let steps = TILE / self.weights;
        let overlaps = |t: usize| (1usize << self.bits) >> self.shift((t + steps - 1) % steps);
        let half = steps / 2;
        let free = self.backward(tile, values, half, half + steps, vec![0.0; overlaps(half)]);
        let first = (0..free[0].len()).min_by(|&a, &b| free[0][a].total_cmp(&free[0][b])).expect("states");
        let path = self.trace(tile, values, half, &free, first);
        let seam = path[steps - half - 1] >> self.shift(steps - 1);
        let mut last = vec![f32::INFINITY; overlaps(0)];
        last[seam] = 0.0;
        let closed = self.backward(tile, values, 0, steps, last);
        self.trace(tile, values, 0, &closed, seam)
    }

    /// Squared error and sums and counts by entry.
    fn code(&self, table: &[f32], tiles: &[[f32; TILE]]) -> (f64, Vec<(f64, f64)>) {
        let values = self.values(table);
        let parts: Vec<_> = tiles
            .par_iter()
            .map(|tile| {
                let mut error = 0.0;
                let mut sums = vec![(0.0, 0.0); self.entries];
                for (state, x) in self.encode(tile, &values).into_iter().zip(tile.chunks(self.weights)) {
                    for (&(at, negative), &x) in self.index(state as u32).iter().zip(x) {
                        let x = f64::from(if negative { -x } else { x });
                        error += (x - f64::from(table[at])).powi(2);
                        sums[at].0 += x;
                        sums[at].1 += 1.0;
                    }
                }
                (error, sums)
            })
            .collect();
        let mut sums = vec![(0.0, 0.0); self.entries];
        let mut error = 0.0;
        for (e, part) in parts {
            error += e;
            sums.iter_mut().zip(part).for_each(|(s, p)| *s = (s.0 + p.0, s.1 + p.1));
        }
        (error, sums)
    }

    /// A trained table.
    fn train(&self, tiles: &[[f32; TILE]]) -> Vec<f32> {
        let start = |width: f64| -> Vec<f32> {
            (0..self.entries)
                .map(|i| (width * half_normal((i as f64 + 0.5) / self.entries as f64)) as f32)
                .collect()
        };
        let round = |table: Vec<f32>, tiles: &[[f32; TILE]]| {
            let (error, sums) = self.code(&table, tiles);
            let moved = table.iter().zip(sums);
            // A few weights say little of an entry: it moves as if four more had fallen on it.
            let moved = moved.map(|(&e, (sum, n))| ((sum + 4.0 * f64::from(e)) / (n + 4.0)) as f32);
            (error, moved.collect::<Vec<f32>>())
        };
        let few = &tiles[..tiles.len() / 4];
        let tried = [1.05, 1.12, 1.2].map(|width| {
            let once = round(start(width), few).1;
            let (error, table) = round(once, few);
            (error, table)
        });
        let mut table = tried.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("three").1;
        for _ in 0..4 {
            table = round(table, tiles).1;
        }
        table
    }
}

/// Quantile of the absolute value of a unit normal (Abramowitz and Stegun 26.2.23, error below
/// 5e-4).
fn half_normal(p: f64) -> f64 {
    let t = (-2.0 * ((1.0 - p) / 2.0).ln()).sqrt();
    let below = 1.0 + 1.432_788 * t + 0.189_269 * t * t + 0.001_308 * t * t * t;
    t - (2.515_517 + 0.802_853 * t + 0.010_328 * t * t) / below
}

fn main() {
    let mut args = std::env::args().skip(1);
    let count: usize = args.next().map_or(96, |text| text.parse().expect("a number of tiles"));
    let named: Vec<String> = args.collect();
    let mut all = Vec::new();
    for (entries, pattern) in
        [(64, [2, 2]), (128, [2, 2]), (256, [2, 2]), (64, [3, 3]), (128, [3, 3]), (256, [3, 3])]
    {
        all.push(Candidate::new("table", 16, 1, entries, &pattern));
    }
    for entries in [64, 128, 256] {
        all.push(Candidate::new("table", 16, 1, entries, &[4, 4]));
    }
    for pattern in
        [&[1, 1, 1, 2][..], &[1, 2, 2, 2], &[2, 2, 2, 3], &[2, 3, 3, 3], &[3, 3, 3, 4], &[3, 4, 4, 4]]
    {
        all.push(Candidate::new("pattern", 16, 1, if pattern[0] < 3 { 64 } else { 128 }, pattern));
    }
    // An odd sixteenth, spread evenly.
    let pattern: Vec<u32> = (0..16).map(|i| 2 + u32::from((i * 5) % 16 < 5)).collect();
    all.push(Candidate::new("pattern", 16, 1, 64, &pattern));
    for (weights, pattern) in [(4, [5]), (4, [7]), (2, [5]), (2, [7]), (2, [4]), (4, [8]), (2, [6])] {
        all.push(Candidate::new("weights", 16, weights, 64, &pattern));
    }
    for (bits, pattern) in [(12, [2]), (14, [2]), (18, [2]), (18, [3])] {
        all.push(Candidate::new("state", bits, 1, if pattern[0] < 3 { 64 } else { 128 }, &pattern));
    }
    let (train, test) = (gaussian_tiles(7, count), gaussian_tiles(20_000, count));
    let energy: f64 = test.iter().flatten().map(|&x| f64::from(x).powi(2)).sum();
    println!("| candidate | bits | error | excess bits | ms a tile |\n| --- | --- | --- | --- | --- |");
    for c in all {
        if !(named.is_empty() || named.iter().any(|n| c.name.starts_with(n.as_str()))) {
            continue;
        }
        let table = c.train(&train);
        let start = Instant::now();
        let error = c.code(&table, &test).0 / energy;
        let time = start.elapsed().as_secs_f64() * 1e3 / count as f64;
        let excess = (error.log2() + 2.0 * c.rate()) / 2.0;
        println!("| {} | {} | {error:.5} | {excess:.4} | {time:.0} |", c.name, c.rate());
    }
}
