//! The palette's error on Gaussian weights.

use crate::{Error, Progress};
use fracbit_base::{Family, Scheme};
use fracbit_codebook::distortion;
use serde::Serialize;

/// One row of `fracbit distortion`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distortion {
    /// Family: `nuq`, `vq`, `tcq` or `half-tcq`.
    pub scheme: String,
    /// Trellis code: `fine`, `fast` or `hyb`; absent for the others.
    pub code: Option<String>,
    /// Payload bits per weight.
    pub bits: f64,
    /// Measured `E|x - x'|^2 / E|x|^2` on N(0, 1).
    pub nmse: f64,
    /// The rate-distortion bound `2^(-2 bits)`.
    pub bound: f64,
    /// Q-Palette's published value for the family and rate, if any.
    pub published: Option<f64>,
}

/// Measures `schemes` on `weights` seeded N(0, 1) weights each.
///
/// # Errors
/// When a scheme has no built-in codebook.
pub fn measure(
    schemes: &[Scheme],
    weights: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<Vec<Distortion>, Error> {
    progress.stage("measuring distortion", schemes.len() as u64);
    schemes
        .iter()
        .map(|&scheme| {
            let nmse = nmse(scheme, weights, seed)?;
            progress.advance(1);
            Ok(Distortion {
                scheme: scheme.family().name().to_owned(),
                code: scheme.code().map(|c| c.name().to_owned()),
                bits: scheme.rate().bits(),
                nmse,
                bound: scheme.rate().gaussian_bound(),
                published: fracbit_codebook::published(scheme),
            })
        })
        .collect()
}

/// Half-TCQ codes half of the weights with each of its two rates, so its error is their mean.
fn nmse(scheme: Scheme, weights: usize, seed: u64) -> Result<f64, Error> {
    let one = |s: Scheme, weights| {
        let rounder = fracbit_quant::rounder(s).ok_or(Error::NoErrorEntry { scheme: s })?;
        Ok::<_, Error>(distortion(rounder, weights, seed))
    };
    match (scheme.family(), scheme.halves()) {
        (Family::HalfTcq, [low, high]) => {
            Ok(f64::midpoint(one(low, weights / 2)?, one(high, weights - weights / 2)?))
        }
        _ => one(scheme, weights),
    }
}
