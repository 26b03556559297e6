//! Lloyd's algorithm in the plane.
//!
//! *Sample.* Box-Muller pairs of a jittered lattice: `u` and `theta` of `sqrt(-2 ln u) (cos theta,
//! sin theta)` are drawn uniformly inside the cells of an `m x 4m` lattice, one each. Every pair is
//! an exact Gaussian, but no region is over- or under-represented by more than the rim of its
//! cells, so that a codebook overfits far less than to as many independent draws.
//!
//! *Start.* Points of density proportional to the square root of the source's (Zador; Gersho 1979):
//! a sunflower spiral (the golden angle) whose radii are quantiles of a Gaussian of variance 2. It
//! is deterministic, and before the first round its error is only 1.6 % (4096 points) to 17 % (16
//! points) above that of the trained book; k-means++ draws from the source's own density instead,
//! and its cost grows with points times samples.
//!
//! *Rounds.* Over-relaxed: a point moves 1.6 times as far as to its centroid, for all but the last
//! rounds. The nearest point is found by the quadtree of [`VectorRounder`](crate::VectorRounder).
//! The `kmeans` crate (2.0.2; brute force) took 24.3 s of wall time for 20 rounds over 2^18 pairs
//! and 512 points on one thread, this module 0.19 s with the same start, and their errors agree to
//! 2e-4. That crate is therefore the oracle of a test, not the trainer; like ours its result does
//! not depend on the number of threads if the start is given. Sums run over a fixed partition of
//! the sample in a fixed order: the result does not depend on the number of threads.

use crate::vector::PairIndex;
use fracbit_format::quarter_turns;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use std::f64::consts::TAU;

/// Parts into which a sample is cut for summation. Fixed, so that sums do not depend on the number
/// of threads.
const PARTS: usize = 64;

/// `4 m^2` pairs of N(0, 1) variables, drawn as the module says.
#[must_use]
pub fn gaussian_pairs(m: usize, seed: u64) -> Vec<[f32; 2]> {
    let mut pairs = vec![[0.0; 2]; 4 * m * m];
    pairs.par_chunks_mut(4 * m).enumerate().for_each(|(ring, pairs)| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(ring as u64);
        for (slot, pair) in pairs.iter_mut().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
            let (u, v) = (
                (ring as f64 + random.random::<f64>()) / m as f64,
                (slot as f64 + random.random::<f64>()) / (4 * m) as f64,
            );
            // 1 - u lies in (0, 1].
            let (sin, cos) = (TAU * v).sin_cos();
            let radius = (-2.0 * (1.0 - u).ln()).sqrt();
            #[expect(clippy::cast_possible_truncation, reason = "samples are f32")]
            {
                *pair = [(radius * cos) as f32, (radius * sin) as f32];
            }
        }
    });
    pairs
}

/// The starting points described above; `turn` (any number) gives a different start.
#[must_use]
pub fn sunflower(count: usize, turn: f64) -> Vec<[f64; 2]> {
    let golden = TAU * (2.0 - f64::midpoint(1.0, 5f64.sqrt()));
    let point = |i: usize| {
        #[expect(clippy::cast_precision_loss, reason = "at most 65536")]
        let (i, n) = (i as f64, count as f64);
        let radius = (-4.0 * (1.0 - (i + 0.5) / n).ln()).sqrt();
        let (sin, cos) = (i * (golden + turn)).sin_cos();
        [radius * cos, radius * sin]
    };
    (0..count).map(point).collect()
}

/// Points, how much of the sample each one takes, and the error.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The points.
    pub points: Vec<[f64; 2]>,
    /// Share of the sample nearest to each point; sums to 1.
    pub shares: Vec<f64>,
    /// Mean squared error per coordinate on the sample.
    pub error: f64,
}

/// Count, coordinate sums and squared error of each point's share.
#[derive(Clone)]
struct Sums {
    cells: Vec<[f64; 3]>,
    error: f64,
}

fn assign(samples: &[[f32; 2]], points: &[[f64; 2]]) -> Sums {
    let index = PairIndex::new(points.iter().copied());
    let parts: Vec<Sums> = samples
        .par_chunks(samples.len().div_ceil(PARTS).max(1))
        .map(|part| {
            let mut sums = Sums { cells: vec![[0.0; 3]; points.len()], error: 0.0 };
            for &pair in part {
                let nearest = usize::from(index.nearest(pair));
                let ([x, y], at) = (pair.map(f64::from), points[nearest]);
                let cell = &mut sums.cells[nearest];
                *cell = [cell[0] + 1.0, cell[1] + x, cell[2] + y];
                sums.error += (x - at[0]).powi(2) + (y - at[1]).powi(2);
            }
            sums
        })
        .collect();
    let mut total = Sums { cells: vec![[0.0; 3]; points.len()], error: 0.0 };
    for part in parts {
        total.error += part.error;
        total.cells.iter_mut().flatten().zip(part.cells.iter().flatten()).for_each(|(t, p)| *t += p);
    }
    total
}

/// Moves `points` to a local minimum of the mean squared error on `samples`: over-relaxed rounds
/// until a round gains less than `tolerance` of the error, at most `rounds`, then five plain ones.
/// A point without samples stays.
///
/// # Panics
/// When there are no samples, or not between 1 and 65536 points.
#[must_use]
pub fn lloyd(samples: &[[f32; 2]], points: Vec<[f64; 2]>, rounds: usize, tolerance: f64) -> Trained {
    descend(samples, points, (rounds, tolerance), shift)
}

/// [`lloyd`] of `quarter` and its three [`quarter_turns`] together, which stay such: what falls to
/// any of four points moves them all.
///
/// # Panics
/// As [`lloyd`].
#[must_use]
pub fn lloyd_turned(samples: &[[f32; 2]], quarter: &[[f64; 2]], rounds: usize, tolerance: f64) -> Trained {
    let each = quarter.len();
    let all_turns = |quarter: &[[f64; 2]]| -> Vec<[f64; 2]> {
        (0..4).flat_map(|turns| quarter.iter().map(move |&point| quarter_turns(point, turns))).collect()
    };
    descend(samples, all_turns(quarter), (rounds, tolerance), |points, sums, relaxation| {
        let mut folded = Sums { cells: vec![[0.0; 3]; each], error: sums.error };
        for (i, &[count, x, y]) in sums.cells.iter().enumerate() {
            // Back to the first quarter: what is left of a full turn.
            let [x, y] = quarter_turns([x, y], 4 - i / each);
            folded.cells[i % each].iter_mut().zip([count, x, y]).for_each(|(sum, new)| *sum += new);
        }
        shift(&mut points[..each], &folded, relaxation);
        let all = all_turns(&points[..each]);
        points.copy_from_slice(&all);
    })
}

fn descend(
    samples: &[[f32; 2]],
    mut points: Vec<[f64; 2]>,
    (rounds, tolerance): (usize, f64),
    shift: impl Fn(&mut [[f64; 2]], &Sums, f64),
) -> Trained {
    const PLAIN: usize = 5;
    assert!(!samples.is_empty(), "lloyd: samples should not be empty");
    let (mut before, mut quiet) = (f64::INFINITY, 0);
    let mut left = rounds;
    while left > 0 {
        let sums = assign(samples, &points);
        shift(&mut points, &sums, 1.6);
        // One round may gain little by chance; three in a row mean the end.
        quiet = if before - sums.error < tolerance * sums.error { quiet + 1 } else { 0 };
        left = if quiet == 3 { 0 } else { left - 1 };
        before = sums.error;
    }
    for _ in 0..PLAIN {
        let sums = assign(samples, &points);
        shift(&mut points, &sums, 1.0);
    }
    let sums = assign(samples, &points);
    #[expect(clippy::cast_precision_loss, reason = "sample sizes are far below 2^52")]
    let count = samples.len() as f64;
    let shares = sums.cells.iter().map(|cell| cell[0] / count).collect();
    Trained { points, shares, error: sums.error / (2.0 * count) }
}

fn shift(points: &mut [[f64; 2]], sums: &Sums, relaxation: f64) {
    for (at, cell) in points.iter_mut().zip(&sums.cells) {
        if cell[0] > 0.0 {
            for (x, sum) in at.iter_mut().zip(&cell[1..]) {
                *x += relaxation * (sum / cell[0] - *x);
            }
        }
    }
}

/// Mean squared error per coordinate of `points` on `samples`, and the factor on the points that
/// would make it least with the cells as they are.
pub(super) fn fit(samples: &[[f32; 2]], points: &[[f64; 2]]) -> (f64, f64) {
    let sums = assign(samples, points);
    let (mut cross, mut own) = (0.0, 0.0);
    for (at, cell) in points.iter().zip(&sums.cells) {
        cross += at[0] * cell[1] + at[1] * cell[2];
        own += cell[0] * (at[0] * at[0] + at[1] * at[1]);
    }
    #[expect(clippy::cast_precision_loss, reason = "sample sizes are far below 2^52")]
    let count = samples.len() as f64;
    (sums.error / (2.0 * count), cross / own)
}
