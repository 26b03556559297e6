//! The error of a quantizer on a Gaussian source, measured and published.
//!
//! After a random rotation the weights of a layer are close to N(0, 1) times a row scale (the
//! incoherence processing of QuIP#; Q-Palette builds its allocation on it), so one number per
//! scheme, the normalized mean squared error (NMSE) on N(0, 1), predicts its damage to any layer
//! and is what bit allocation works with. Three sources of that number:
//!
//! * [`distortion`] measures it for any [`Rounder`];
//! * [`nmse`] is the committed table that allocation uses;
//! * [`published`] is what Q-Palette's own solver uses, for comparison.

use crate::{GroupCoder, ProgressiveCoder, Rounder, progressive::nearest};
use fracbit_base::{Family, Scheme};
use fracbit_format::TILE;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;
use std::{collections::BTreeMap, sync::LazyLock};

/// Tiles of one unit of parallel work. Fixed, so that sums do not depend on the number of threads.
const TILES_PER_CHUNK: usize = 64;

/// Fills tiles `first..` of the Gaussian test source of `seed`; `first` is a multiple of the chunk
/// size.
pub(crate) fn gaussian_chunk(seed: u64, chunk: usize, tiles: &mut [[f32; TILE]]) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(chunk as u64);
    tiles.as_flattened_mut().iter_mut().for_each(|w| *w = random.sample(StandardNormal));
}

/// Squared error over energy, `|x - q(x)|^2 / |x|^2`, of a rounder on at least `weights` N(0, 1)
/// samples (rounded up to whole tiles, at least one).
///
/// The same `seed` gives the same bits at every thread count. The relative standard error of the
/// result is about `1.5 / sqrt(weights)`: 0.15 % at 2^20 weights.
#[must_use]
pub fn distortion(rounder: &dyn Rounder, weights: usize, seed: u64) -> f64 {
    nested_distortion(&[rounder], weights, seed)
}

/// As [`distortion`], of the planes of a nested scheme together: each codes what those before it
/// leave, in units of its root mean square over a chunk of 64 tiles.
#[must_use]
pub fn nested_distortion(planes: &[&dyn Rounder], weights: usize, seed: u64) -> f64 {
    let count = weights.div_ceil(TILE).max(1);
    let energy_of =
        |tiles: &[[f32; TILE]]| -> f64 { tiles.as_flattened().iter().map(|&w| f64::from(w).powi(2)).sum() };
    let sums: Vec<[f64; 2]> = (0..count.div_ceil(TILES_PER_CHUNK))
        .into_par_iter()
        .map(|chunk| {
            let mut tiles = vec![[0.0; TILE]; TILES_PER_CHUNK.min(count - chunk * TILES_PER_CHUNK)];
            gaussian_chunk(seed, chunk, &mut tiles);
            let energy = energy_of(&tiles);
            let (mut error, mut scale, mut integers) = (energy, 1.0, [0; TILE]);
            for (plane, rounder) in planes.iter().enumerate() {
                if plane > 0 {
                    #[expect(clippy::cast_precision_loss, reason = "a mean")]
                    let rms = (error / (tiles.len() * TILE) as f64).sqrt();
                    #[expect(clippy::cast_possible_truncation, reason = "of numbers around 1")]
                    let factor = (rms / scale) as f32;
                    tiles.as_flattened_mut().iter_mut().for_each(|w| *w /= factor);
                    scale *= f64::from(factor);
                }
                let book = rounder.codebook();
                let mut codes = vec![0; tiles.len() * book.tile_bytes()];
                rounder.encode(&tiles, &mut codes);
                error = 0.0;
                for (tile, code) in tiles.iter_mut().zip(codes.chunks_exact(book.tile_bytes())) {
                    book.expand_tile(code, &mut integers);
                    for (weight, &integer) in tile.iter_mut().zip(&integers) {
                        let rest = f64::from(*weight) - f64::from(f32::from(integer) * book.step());
                        error += rest * rest;
                        #[expect(clippy::cast_possible_truncation, reason = "the next plane codes f32")]
                        {
                            *weight = rest as f32;
                        }
                    }
                }
                error *= scale * scale;
            }
            [error, energy]
        })
        .collect();
    let [error, energy] = sums.iter().fold([0.0; 2], |[e, s], [error, energy]| [e + error, s + energy]);
    error / energy
}

/// As [`distortion`], for schemes whose groups of 32 have a scale each.
#[must_use]
pub fn group_distortion(coder: &GroupCoder, weights: usize, seed: u64) -> f64 {
    let count = weights.div_ceil(TILE).max(1);
    let sums: Vec<[f64; 2]> = (0..count.div_ceil(TILES_PER_CHUNK))
        .into_par_iter()
        .map(|chunk| {
            let mut tiles = vec![[0.0; TILE]; TILES_PER_CHUNK.min(count - chunk * TILES_PER_CHUNK)];
            gaussian_chunk(seed, chunk, &mut tiles);
            let mut codes = [0; 32];
            let one = |group: &[f32; 32]| {
                let energy: f64 = group.iter().map(|&w| f64::from(w).powi(2)).sum();
                [coder.encode(group, None, 1.0, &mut codes).error, energy]
            };
            let groups = tiles.as_flattened().as_chunks::<32>().0.iter().map(one);
            groups.fold([0.0; 2], |[e, s], [error, energy]| [e + error, s + energy])
        })
        .collect();
    let [error, energy] = sums.iter().fold([0.0; 2], |[e, s], [error, energy]| [e + error, s + energy]);
    error / energy
}

/// As [`distortion`], for a progressive scheme, with rows of 4096 weights.
#[must_use]
pub fn progressive_distortion(coder: ProgressiveCoder, weights: usize, seed: u64) -> f64 {
    const ROW: usize = 4096;
    let rows = weights.div_ceil(ROW).max(1);
    let sums: Vec<[f64; 2]> = (0..rows)
        .into_par_iter()
        .map(|row| {
            let mut tiles = vec![[0.0; TILE]; ROW / TILE];
            gaussian_chunk(seed, row, &mut tiles);
            let row = tiles.as_flattened();
            let (scale, whole) = coder.row(row, None);
            // The scale of a row is fitted to what was chosen: least squares of its weights.
            let (mut cross, mut own) = (0.0, 0.0);
            for group in row.chunks(128) {
                let units: Vec<f32> = group.iter().map(|w| w / scale).collect();
                let second = whole.unwrap_or_else(|| coder.group(&units, None));
                for (&w, &x) in group.iter().zip(&units) {
                    let value = f64::from(nearest(second, x).1);
                    cross += f64::from(w) * value;
                    own += value * value;
                }
            }
            let energy: f64 = row.iter().map(|&w| f64::from(w).powi(2)).sum();
            [energy - cross * cross / own, energy]
        })
        .collect();
    let [error, energy] = sums.iter().fold([0.0; 2], |[e, s], [error, energy]| [e + error, s + energy]);
    error / energy
}

static MEASURED: LazyLock<BTreeMap<Scheme, f64>> = LazyLock::new(|| {
    let line = |line: &str| {
        let (scheme, value) = line.split_once(' ')?;
        Some((scheme.parse().ok()?, value.parse().ok()?))
    };
    let lines = include_str!("../data/nmse.txt").lines();
    lines.map(|text| line(text).expect("committed errors are well-formed")).collect()
});

/// NMSE on N(0, 1) of the palette's committed codebooks, from `data/nmse.txt`; `None` for a scheme
/// not yet measured.
///
/// Scalar values are exact integrals but for nested ones, the others are measured by [`distortion`]
/// on 2^24 weights or more. A half-trellis scheme has the mean of its two halves.
#[must_use]
pub fn nmse(scheme: Scheme) -> Option<f64> {
    match scheme.family() {
        Family::HalfTcq(_) => {
            let halves: Option<Vec<f64>> = scheme.components().map(|half| nmse(half.scheme)).collect();
            halves.map(|halves| f64::midpoint(halves[0], halves[1]))
        }
        _ => MEASURED.get(&scheme).copied(),
    }
}

/// Relative MSE that Q-Palette's allocation solver assigns to a scheme, whatever the trellis code.
///
/// Source: Q-Palette (arXiv 2509.20214), `assets/quant_err.pt` of the authors' MIT-licensed
/// repository at c53f473: keys `ldlq_1_b` (scalar), `ldlq_2_n` (vector, `n/2` bits), `tcq_n`
/// (trellis, `n/2` bits, weights scaled by 1/0.9) and `tcomb_n_m_0.5` (half-trellis).
#[must_use]
pub fn published(scheme: Scheme) -> Option<f64> {
    let quarters = usize::from(scheme.quarters());
    let (table, index): (&[f64], usize) = match scheme.family() {
        Family::Nuq => (&NUQ, (quarters - 8) / 4),
        Family::Vq => (&VQ, (quarters - 6) / 2),
        Family::Tcq(_) if quarters.is_multiple_of(2) => (&TCQ, (quarters - 4) / 2),
        Family::HalfTcq(_) => (&HALF_TCQ, (quarters - 5) / 2),
        Family::Tcq(_)
        | Family::Int
        | Family::Gnuq
        | Family::NestTcq(..)
        | Family::NestNuq(_)
        | Family::Qoq(_)
        | Family::Additive(_) => return None,
    };
    table.get(index).copied()
}

/// 2, 3, ... 8 bits.
const NUQ: [f64; 7] =
    [0.11747973, 0.034511157, 0.0095033944, 0.0025094041, 0.0006493208, 0.00016440929, 4.1475908e-5];
/// 1.5, 2, ... 6 bits.
const VQ: [f64; 10] = [
    0.20123697,
    0.10859099,
    0.057075005,
    0.029717482,
    0.015232693,
    0.0077552626,
    0.0039202697,
    0.00197517,
    0.00099249869,
    0.00049947828,
];
/// 1, 1.5, ... 5 bits.
const TCQ: [f64; 9] = [
    0.28270887,
    0.14033919,
    0.071013492,
    0.036313527,
    0.018912868,
    0.010177032,
    0.0059012067,
    0.0030269635,
    0.0016159878,
];
/// 1.25, 1.75, ... 4.75 bits.
const HALF_TCQ: [f64; 8] =
    [0.2115379, 0.10568944, 0.053663307, 0.027616995, 0.014546534, 0.0080396944, 0.0041427258, 0.002193507];
