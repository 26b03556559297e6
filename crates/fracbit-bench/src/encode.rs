//! Searching codes: how many weights a second, and at what error.

use crate::{Spread, pools, positive, rate, rounds};
use fracbit_base::Scheme;
use fracbit_codebook::{Rounder, distortion};
use fracbit_format::TILE;
use fracbit_load::{Error, Progress};
use fracbit_quant::{Effort, Rounders};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::Serialize;
use std::sync::Arc;

/// Tiles that are encoded in one call: a row of tiles of a small matrix.
const TILES: usize = 64;

/// What to measure.
#[derive(Clone, Debug)]
pub struct EncodeOptions {
    /// Schemes; half-TCQ is two others side by side and not measured by itself.
    pub schemes: Vec<Scheme>,
    /// Efforts; schemes with one search have the exact one.
    pub efforts: Vec<Effort>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Gaussian weights that the error is measured on.
    pub weights: usize,
    /// Measurements of each.
    pub rounds: usize,
}

impl EncodeOptions {
    /// These schemes with every effort.
    #[must_use]
    pub fn new(schemes: Vec<Scheme>) -> Self {
        Self {
            schemes,
            efforts: Effort::ALL.to_vec(),
            threads: crate::default_threads(),
            weights: 1 << 16,
            rounds: 5,
        }
    }
}

/// One scheme with one effort and some threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EncodeSpeed {
    /// Scheme family, such as `tcq`.
    pub scheme: String,
    /// Code of a trellis scheme.
    pub code: Option<String>,
    /// Bits of codes per weight.
    pub bits: f64,
    /// How thorough the search is.
    pub effort: &'static str,
    /// Threads.
    pub threads: usize,
    /// 10^3 weights encoded per second.
    pub kweights_per_s: f64,
    /// Its least and most.
    pub spread: Spread,
    /// Squared error over energy on N(0, 1) weights.
    pub nmse: f64,
}

/// Measures the encoders of schemes: all efforts and numbers of threads of a scheme in the same
/// rounds.
///
/// # Errors
/// [`Error::Option`] for empty lists, zeros or half-TCQ schemes.
pub fn encode(options: &EncodeOptions, progress: &dyn Progress) -> Result<Vec<EncodeSpeed>, Error> {
    positive("--threads", &options.threads)?;
    positive("--rounds", &[options.rounds])?;
    positive("--weights", &[options.weights])?;
    positive("--effort", &[options.efforts.len()])?;
    let pools = pools(&options.threads)?;
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut tiles = vec![[0f32; TILE]; TILES];
    tiles.as_flattened_mut().iter_mut().for_each(|w| *w = random.sample(StandardNormal));
    let mut measured = Vec::new();
    for &scheme in &options.schemes {
        let searches = searches(scheme, &options.efforts)?;
        measured.push((scheme, searches));
    }
    let cases = measured.iter().map(|(_, searches)| searches.len() * pools.len()).sum::<usize>();
    progress.stage("measuring encoders", ((options.rounds + 1) * cases) as u64);
    let mut all = Vec::new();
    for (scheme, searches) in measured {
        let spreads = rounds(options.rounds, searches.len() * pools.len(), |case| {
            let (_, rounder) = &searches[case / pools.len()];
            let mut codes = vec![0; TILES * rounder.codebook().tile_bytes()];
            #[expect(clippy::cast_precision_loss, reason = "a count of weights")]
            let value = pools[case % pools.len()].install(|| {
                rate(|| {
                    rounder.encode(&tiles, &mut codes);
                    (TILES * TILE) as f64 / 1e3
                })
            });
            progress.advance(1);
            value
        });
        for ((effort, rounder), spreads) in searches.iter().zip(spreads.chunks_exact(pools.len())) {
            let nmse = distortion(&**rounder, options.weights, 1);
            all.extend(options.threads.iter().zip(spreads).map(|(&threads, &spread)| EncodeSpeed {
                scheme: scheme.label(),
                code: scheme.code().map(|c| c.name().to_owned()),
                bits: scheme.rate().bits(),
                effort: effort.name(),
                threads,
                kweights_per_s: spread.median,
                spread,
                nmse,
            }));
        }
    }
    Ok(all)
}

type Search = (Effort, Arc<dyn Rounder>);

/// The searches of a scheme; one where efforts make no difference.
fn searches(scheme: Scheme, efforts: &[Effort]) -> Result<Vec<Search>, Error> {
    let efforts = if fracbit_quant::has_efforts(scheme) { efforts } else { &[Effort::Exact] };
    let find = |&effort| {
        let rule = || format!("should be schemes other than half-tcq, which is two of them, got {scheme}");
        let found = Rounders::new(effort).get(scheme);
        let found = found.ok_or_else(|| Error::Option { option: "--scheme", rule: rule() });
        found.map(|rounder| (effort, rounder))
    };
    efforts.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;

    #[test]
    fn efforts_take_turns_where_there_are_several() {
        let schemes = ["tcq-4", "nuq-2"].map(|s| s.parse().unwrap()).to_vec();
        let options =
            EncodeOptions { threads: vec![1], weights: 1 << 12, rounds: 1, ..EncodeOptions::new(schemes) };
        let rows = encode(&options, &Quiet).unwrap();
        let named: Vec<_> = rows.iter().map(|r| (r.scheme.as_str(), r.effort)).collect();
        assert_eq!(named, [("tcq", "fast"), ("tcq", "balanced"), ("tcq", "exact"), ("nuq", "exact")]);
        assert!(rows.iter().all(|r| r.kweights_per_s > 0.0));
        assert!(rows[0].nmse > rows[2].nmse && rows[2].nmse > 0.0039 && rows[0].nmse < 0.0049);
        let half = EncodeOptions::new(vec!["half-tcq-2.25".parse().unwrap()]);
        assert!(encode(&half, &Quiet).unwrap_err().to_string().contains("half-tcq"));
    }
}
