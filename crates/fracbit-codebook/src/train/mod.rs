//! How the committed codebooks are made.
//!
//! 1. Real-valued values of least error for N(0, 1): [`lloyd_max`] (exact) for scalars, [`lloyd`]
//!    for pairs, k-means and rounds of beam search and means for additive codebooks.
//! 2. An integer grid. Entries become `round(value / step)` with the step that costs least, in
//!    -127..=127 where that adds at most 1 % to the error (int8 products take half the instructions
//!    of int16 ones, and a table of 256 pairs of int8 fits vector registers: `vq-4` runs nine times
//!    as fast for 0.3 %), otherwise in -8191..=8191. The second limit stays 2 bits short of int16
//!    on purpose: a kernel can then add 2000 products with int8 activations in 32 bits before it
//!    must widen, and the finest codebook (`nuq-8`) still loses less than 0.1 %. For pairs the
//!    codebook is also turned, which costs nothing for a circular source, to the angle that fits
//!    the grid best. Additive codebooks are on the int8 grid, sums and all.
//!    Nested scalars are on the int8 grid, with the step at which a table of 8 bits just fits.
//! 3. A fixed order: scalar entries ascend; pairs ascend by first, then second integer. Of 128 and
//!    256 pairs on the int8 grid the first quarter does, and the others are the same pairs
//!    [turned](fracbit_format::Codebook::quarter): that costs nothing from 256 pairs on, .15 % of
//!    the error at 128, .75 % at 64, 1.3 % at 32. Centroids of an additive codebook ascend.
//!
//! Pairs of all rates take some minutes on two cores, most of it for the largest three; scalars
//! take 2 s. The result is a fixed function of the code and the seed, at any thread count (up to
//! the last bit of the system's `ln`, `sin` and `cos`, which rounding to the grid hides nearly
//! always).

mod additive;
mod groups;
mod nested;
mod normal;
mod pairs;
mod scalar;

pub use groups::{GroupTraining, group_codebooks, integers, mixed_groups};
pub use pairs::{Trained, gaussian_pairs, lloyd, lloyd_turned, sunflower};
pub use scalar::{lloyd_max, scalar_error};

use fracbit_base::{Family, Scheme};
use fracbit_format::{Codebook, quarter_turns};

/// Seed of the committed codebooks.
pub const SEED: u64 = 0x00c0_deb0;

/// Largest entries of the two grids.
const GRIDS: [f64; 2] = [127.0, 8191.0];
/// Relative error that int8 may cost.
const ALLOWANCE: f64 = 0.01;

/// Trains the codebook of a scheme; `None` for the trellis families.
#[must_use]
pub fn codebook(scheme: Scheme, seed: u64) -> Option<Codebook> {
    match scheme.family() {
        Family::Nuq => Some(scalar_codebook(scheme)),
        Family::Vq => Some(pair_codebook(scheme, seed)),
        Family::Int | Family::Qoq(_) => Some(integers(scheme)),
        Family::NestNuq(ladder) => Some(nested::codebook(scheme, ladder)),
        Family::Additive(books) => Some(additive::codebook(scheme, books, seed)),
        Family::Gnuq => {
            Some(group_codebooks(scheme, &mixed_groups(1 << 13, seed), None, GroupTraining::default()))
        }
        Family::Tcq(_) | Family::HalfTcq(_) | Family::NestTcq(..) => None,
    }
}

fn scalar_codebook(scheme: Scheme) -> Codebook {
    let values = lloyd_max(u32::from(scheme.quarters() / 4));
    let best = scalar_error(&values);
    let largest = values[values.len() - 1];
    let on_grid = |limit: f64| {
        let candidates = steps(largest, limit).map(|step| {
            let integers: Vec<f64> = values.iter().map(|v| (v / step).round().clamp(-limit, limit)).collect();
            let weights = |step: f64| integers.iter().map(|i| i * step).collect::<Vec<f64>>();
            // The best step for these integers and cells: least squares.
            let (cross, own) = scalar::cells(&weights(step))
                .zip(&integers)
                .fold((0.0, 0.0), |(c, o), ((_, [mass, first, _]), i)| (c + i * first, o + i * i * mass));
            let step = single(cross / own);
            (scalar_error(&weights(step)), step, integers)
        });
        candidates.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there are steps to try")
    };
    let [narrow, wide] = GRIDS;
    let (error, step, integers) = on_grid(narrow);
    let (_, step, integers) =
        if error <= best * (1.0 + ALLOWANCE) { (error, step, integers) } else { on_grid(wide) };
    finish(scheme, integers.iter().map(|&i| integer(i)).collect(), step)
}

fn pair_codebook(scheme: Scheme, seed: u64) -> Codebook {
    let count = 1usize << (scheme.quarters() / 2);
    let trained = pairs_of_least_error(count, seed);
    let [narrow, wide] = GRIDS;
    let (added, angle, step) = place(&trained, narrow);
    let (limit, angle, step) = if added <= ALLOWANCE * trained.error {
        (narrow, angle, step)
    } else {
        let (_, angle, step) = place(&trained, wide);
        (wide, angle, step)
    };
    let mut integers: Vec<[f64; 2]> =
        turned(&trained.points, angle).map(|p| p.map(|v| (v / step).round().clamp(-limit, limit))).collect();
    let ascend = |pairs: &mut [[f64; 2]]| pairs.sort_by(|a, b| a.partial_cmp(b).expect("finite integers"));
    ascend(&mut integers);
    if turned_from_a_quarter(count) {
        // One of every four turns; a number that is zero stands there with either sign.
        let mut quarter: Vec<_> = integers.iter().filter(|[x, y]| *x > 0.0 && *y >= 0.0).copied().collect();
        ascend(&mut quarter);
        integers = (0..4).flat_map(|q| quarter.iter().map(move |&pair| quarter_turns(pair, q))).collect();
    }
    // The best step for these integers: least squares on a fresh sample, twice because the cells
    // follow.
    let samples = gaussian_pairs(512, seed ^ 1);
    let step = (0..2).fold(step, |step, _| {
        let points: Vec<[f64; 2]> = integers.iter().map(|p| p.map(|i| i * step)).collect();
        step * pairs::fit(&samples, &points).1
    });
    finish(scheme, integers.as_flattened().iter().map(|&i| integer(i)).collect(), single(step))
}

/// Several starts on a small sample, the best refined on a large one of at least 2^20 pairs and
/// 1024 a point.
fn pairs_of_least_error(count: usize, seed: u64) -> Trained {
    let small = gaussian_pairs(if count <= 256 { 256 } else { 512 }, seed ^ 2);
    let starts = if count <= 256 { 32 } else { 6 };
    let turned = turned_from_a_quarter(count);
    let first = (0..starts).map(|start| {
        let points = sunflower(count, f64::from(start) * 0.37);
        if turned {
            // Every fourth point of a spiral is spread as all are.
            let quarter: Vec<_> = points.into_iter().skip(start as usize % 4).step_by(4).collect();
            return lloyd_turned(&small, &quarter, 300, 1e-6);
        }
        lloyd(&small, points, 150, 1e-6)
    });
    let best = first.min_by(|a, b| a.error.total_cmp(&b.error)).expect("there are starts");
    let large = gaussian_pairs(if count <= 1024 { 512 } else { 1024 }, seed);
    if turned {
        return lloyd_turned(&large, &best.points[..count / 4], 200, 2e-7);
    }
    lloyd(&large, best.points, 200, 2e-7)
}

/// Whether the codebook of `count` pairs is a quarter and its turns: where kernels gain by it,
/// those of 128 and 256 pairs of int8 numbers.
fn turned_from_a_quarter(count: usize) -> bool {
    matches!(count, 128 | 256)
}

/// Steps worth trying: from some that clip the largest value to some that leave room.
fn steps(largest: f64, limit: f64) -> impl Iterator<Item = f64> {
    let full = largest / limit;
    (0..=2000).map(move |i| full * (0.8 + f64::from(i) * 0.000_35))
}

/// The angle and step at which integers up to `limit` cost least, and what they add to the error
/// per coordinate (with the cells as they are: an upper bound).
fn place(trained: &Trained, limit: f64) -> (f64, f64, f64) {
    let mut best = (f64::INFINITY, 0.0, 1.0);
    for turn in 0..48 {
        // The grid repeats after a quarter turn.
        let angle = f64::from(turn) / 48.0 * std::f64::consts::FRAC_PI_2;
        let points: Vec<[f64; 2]> = turned(&trained.points, angle).collect();
        let largest = points.iter().flatten().fold(0.0, |max: f64, v| max.max(v.abs()));
        for step in steps(largest, limit).step_by(20) {
            let off = |v: f64| (v - (v / step).round().clamp(-limit, limit) * step).powi(2);
            let added: f64 =
                points.iter().zip(&trained.shares).map(|(p, s)| s * (off(p[0]) + off(p[1]))).sum();
            if added / 2.0 < best.0 {
                best = (added / 2.0, angle, step);
            }
        }
    }
    best
}

fn turned(points: &[[f64; 2]], angle: f64) -> impl Iterator<Item = [f64; 2]> {
    let (sin, cos) = angle.sin_cos();
    points.iter().map(move |&[x, y]| [x * cos - y * sin, x * sin + y * cos])
}

/// The step as it will be stored.
fn single(step: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "a step is stored as f32")]
    f64::from(step as f32)
}

fn integer(value: f64) -> i16 {
    #[expect(clippy::cast_possible_truncation, reason = "a whole number in -8191..=8191")]
    {
        value as i16
    }
}

fn finish(scheme: Scheme, entries: Vec<i16>, step: f64) -> Codebook {
    #[expect(clippy::cast_possible_truncation, reason = "a step is stored as f32")]
    Codebook::new(scheme, entries, step as f32).expect("as many entries as the scheme has codes")
}
