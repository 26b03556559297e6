//! The palette's error on Gaussian weights.

use fracbit_base::Scheme;
use fracbit_codebook::{
    GroupCoder, ProgressiveCoder, Rounder, distortion, group_distortion, nested_distortion,
    progressive_distortion,
};
use fracbit_load::{Error, Progress};
use fracbit_plan::Error as PlanError;
use fracbit_quant::Rounders;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// One row of `fracbit distortion`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distortion {
    /// Family: `nuq`, `vq`, `tcq`, `half-tcq`, `int`, `gnuq`; of a nested or progressive scheme its
    /// whole name.
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
/// Half-TCQ codes half of the weights with each of its two rates: its error is the mean of theirs.
/// That of a nested scheme is what all planes together leave.
///
/// # Errors
/// When a scheme has no built-in codebook.
pub fn measure(
    schemes: &[Scheme],
    weights: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<Vec<Distortion>, Error> {
    let parts = |s: &Scheme| if s.planes() > 1 { vec![*s] } else { s.tables().collect() };
    let parts: BTreeSet<Scheme> = schemes.iter().flat_map(parts).collect();
    progress.stage("measuring distortion", parts.len() as u64);
    let mut errors = BTreeMap::new();
    let rounders = Rounders::default();
    for scheme in parts {
        let missing = Error::from(PlanError::NoErrorEntry { scheme });
        let error = if let Some(coder) = ProgressiveCoder::new(scheme) {
            progressive_distortion(coder, weights, seed)
        } else if scheme.group().is_some() {
            let coder = fracbit_quant::codebook(scheme).cloned().and_then(GroupCoder::new).ok_or(missing)?;
            group_distortion(&coder, weights, seed)
        } else if scheme.planes() > 1 {
            let planes = scheme.components().map(|plane| rounders.get(plane.scheme));
            let planes = planes.collect::<Option<Vec<_>>>().ok_or(missing)?;
            let planes: Vec<&dyn Rounder> = planes.iter().map(|plane| &**plane).collect();
            nested_distortion(&planes, weights, seed)
        } else {
            distortion(&*rounders.get(scheme).ok_or(missing)?, weights, seed)
        };
        errors.insert(scheme, error);
        progress.advance(1);
    }
    let row = |&scheme: &Scheme| {
        let own = errors.get(&scheme).copied();
        let halves = scheme.tables().map(|half| errors[&half]);
        Distortion {
            scheme: scheme.label(),
            code: scheme.code().map(|c| c.name().to_owned()),
            bits: scheme.rate().bits(),
            nmse: own.unwrap_or_else(|| halves.sum::<f64>() / 2.0),
            bound: scheme.rate().gaussian_bound(),
            published: fracbit_codebook::published(scheme),
        }
    };
    Ok(schemes.iter().map(row).collect())
}
