//! Additive codebooks of N(0, 1).
//!
//! As AQLM begins (section 3.1): k-means codebook by codebook, each on what the ones before leave.
//! Then rounds of two steps for all of them together: codes by the search of the rounder, and, by
//! turns, the centroids of each codebook as the means of what the others leave. One codebook is
//! plain k-means. The start are vectors of the sample; sums run over it in its order, so that the
//! result does not depend on the number of threads.

use super::{finish, integer, single};
use crate::additive::{Beam, Codes, Search};
use fracbit_base::{Books, Scheme};
use fracbit_format::Codebook;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Vectors of the sample, 512 or more for each centroid.
const SAMPLES: usize = 1 << 17;
/// Vectors that the grid is chosen by.
const HELD: usize = 1 << 14;
/// Rounds of k-means on what earlier codebooks leave, and of all codebooks together.
const ROUNDS: [usize; 2] = [60, 40];
/// Updates of every codebook in a round of several.
const SWEEPS: usize = 3;
/// Largest sum of entries.
const LARGEST: f64 = 127.0;
/// Largest sum of the magnitudes of a centroid's entries: products with activations of at most 127
/// in magnitude then fit 16 bits, which a Psumbook's partial sums have.
const MOST: f64 = 258.0;

/// The codebooks of least error that these rounds come to, on the int8 grid, the centroids of each
/// ascending.
pub(super) fn codebook(scheme: Scheme, books: Books, seed: u64) -> Codebook {
    let (each, weights) = (1 << books.bits(), books.weights());
    let size = (each, weights);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let samples: Vec<f64> = (0..SAMPLES * weights).map(|_| random.sample(StandardNormal)).collect();
    let mut centroids = Vec::new();
    let mut rest = samples.clone();
    for _ in 0..books.count() {
        let mut own = rest[..each * weights].to_vec();
        refine(size, &mut own, &rest, ROUNDS[0]);
        let codes = assign(&Search::new(size, &own), weights, &rest);
        for (x, codes) in rest.chunks_exact_mut(weights).zip(&codes) {
            x.iter_mut().zip(centroid(&own, size, 0, codes)).for_each(|(x, c)| *x -= c);
        }
        centroids.extend(own);
    }
    if books.count() > 1 {
        refine(size, &mut centroids, &samples, ROUNDS[1]);
    }
    for book in centroids.chunks_exact_mut(each * weights) {
        let mut sorted: Vec<Vec<f64>> = book.chunks_exact(weights).map(<[f64]>::to_vec).collect();
        sorted.sort_by(|a, b| a.partial_cmp(b).expect("means of finite numbers"));
        book.copy_from_slice(&sorted.concat());
    }
    let (integers, step) = on_grid(size, &centroids, &samples[..HELD * weights]);
    finish(scheme, integers.into_iter().map(integer).collect(), single(step))
}

/// Centroid of `codes` in a book.
fn centroid<'a>(
    centroids: &'a [f64],
    (each, weights): (usize, usize),
    book: usize,
    codes: &Codes,
) -> &'a [f64] {
    &centroids[(book * each + usize::from(codes[book])) * weights..][..weights]
}

/// Codes of all samples.
fn assign(search: &Search<f64>, weights: usize, samples: &[f64]) -> Vec<Codes> {
    let part = |part: &[f64]| {
        let mut beam = Beam::default();
        part.chunks_exact(weights).map(|x| search.find(x, &mut beam)).collect::<Vec<Codes>>()
    };
    samples.par_chunks(1024 * weights).flat_map_iter(part).collect()
}

/// Rounds of new codes and new centroids, of codebooks of so many centroids of so many weights.
fn refine((each, weights): (usize, usize), centroids: &mut [f64], samples: &[f64], rounds: usize) {
    let count = centroids.len() / (each * weights);
    let sweeps = if count == 1 { 1 } else { SWEEPS };
    for _ in 0..rounds {
        let codes = assign(&Search::new((each, weights), centroids), weights, samples);
        for book in (0..sweeps).flat_map(|_| 0..count) {
            let mut sums = vec![0.0; each * weights];
            let mut counts = vec![0.0; each];
            for (x, codes) in samples.chunks_exact(weights).zip(&codes) {
                let code = usize::from(codes[book]);
                counts[code] += 1.0;
                let sums = &mut sums[code * weights..][..weights];
                sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                for other in (0..count).filter(|&other| other != book) {
                    let centroid = centroid(centroids, (each, weights), other, codes);
                    sums.iter_mut().zip(centroid).for_each(|(sum, c)| *sum -= c);
                }
            }
            let own = &mut centroids[book * each * weights..][..each * weights];
            let cells = own.chunks_exact_mut(weights).zip(sums.chunks_exact(weights)).zip(counts);
            // A centroid that nobody takes stays where it is.
            for ((own, sums), count) in cells.filter(|(_, count)| *count > 0.0) {
                own.iter_mut().zip(sums).for_each(|(c, sum)| *c = sum / count);
            }
        }
    }
}

/// The integers and the step that cost least: steps from that at which every sum fits down to some
/// that clip the farthest centroids, each codebook to its share of the range.
fn on_grid((each, weights): (usize, usize), centroids: &[f64], samples: &[f64]) -> (Vec<f64>, f64) {
    let books = || centroids.chunks_exact(each * weights);
    let peak = |book: &[f64]| book.iter().fold(0.0f64, |max, c| max.max(c.abs()));
    let magnitude = |centroid: &[f64]| centroid.iter().map(|c| c.abs()).sum::<f64>();
    let range: f64 = books().map(peak).sum();
    let reach = centroids.chunks_exact(weights).map(magnitude).fold(0.0, f64::max);
    let largest = (range / LARGEST).max(reach / MOST);
    // Rounding may carry a magnitude across its limit, so there the first steps are wider.
    let first = if largest > range / LARGEST { -2 } else { 0 };
    let all = (first..8).filter_map(|i: i8| {
        let step = largest * (1.0 - 0.05 * f64::from(i));
        let integers: Vec<f64> = books()
            .flat_map(|book| {
                let limit = (LARGEST * peak(book) / range).floor();
                book.iter().map(move |c| (c / step).round().clamp(-limit, limit))
            })
            .collect();
        if integers.chunks_exact(weights).any(|c| magnitude(c) > MOST) {
            return None;
        }
        let scaled: Vec<f64> = samples.iter().map(|x| x / step).collect();
        let codes = assign(&Search::new((each, weights), &integers), weights, &scaled);
        // The best step for these codes: least squares.
        let (mut cross, mut own, mut energy) = (0.0, 0.0, 0.0);
        for (x, codes) in scaled.chunks_exact(weights).zip(&codes) {
            for (k, x) in x.iter().enumerate() {
                let q: f64 =
                    (0..books().len()).map(|book| centroid(&integers, (each, weights), book, codes)[k]).sum();
                (cross, own, energy) = (cross + x * q, own + q * q, energy + x * x);
            }
        }
        Some(((energy - cross * cross / own) * step * step, integers, step * cross / own))
    });
    let (_, integers, step) = all.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there are steps to try");
    (integers, step)
}
