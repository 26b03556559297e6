//! Rotary position embedding, half-split convention of the Hugging Face weights.
//!
//! Su et al. 2021 (arXiv 2104.09864), eq. 34: plane k of a head, here the pair (k, k + d/2), turns
//! by `position · f_k` with `f_k = theta^(-2k/d)`. Stretching follows the configuration: `linear`
//! divides every f_k by the factor (Chen et al. 2023, arXiv 2306.15595); `llama3` divides those
//! that turn less than `low_freq_factor` times within the original context, keeps those that turn
//! more than `high_freq_factor` times, and interpolates linearly in the number of turns between;
//! `yarn` does the same between the planes that turn `beta_fast` and `beta_slow` times, linearly in
//! k; `longrope` divides each by a number of its own, of one list for short contexts and another
//! for long ones.
//!
//! Where only the first channels of a head turn, [`crate::WeightSource`] orders the rows of queries
//! and keys so that planes still are (k, k + d/2): those of the other channels come last in each
//! half and stand still.
//!
//! Deviates from transformers in precision: angles are formed in f64 (there in f32, where at
//! position 10^5 the fastest plane's angle has lost five digits), then sine and cosine are rounded
//! to f32; and in `longrope`: a state knows from the start how many tokens it may hold, and is long
//! or short for good (there the cache is made anew when a text grows beyond the short context). One
//! table row per position is made per forward pass and shared by all layers and heads: d/2
//! sine-cosine pairs per token, nothing beside a layer's matrix products, and no table of the whole
//! context.

use std::f64::consts::TAU;

use fracbit_io::{ModelConfig, RopeConfig, RopeScaling};

/// Angles per position.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    frequencies: Vec<f64>, // (planes that turn)
    /// The longest context of these frequencies, and those of longer ones.
    long: Option<(usize, Vec<f64>)>,
    gain: f64,
}

impl Rope {
    pub(crate) fn new(rope: &RopeConfig) -> Self {
        let long = match &rope.scaling {
            RopeScaling::LongRope { long, original_max_position_embeddings, .. } => {
                Some((*original_max_position_embeddings, divided(rope, long)))
            }
            _ => None,
        };
        Self { frequencies: frequencies(rope), long, gain: rope.gain }
    }

    /// Planes that turn: the first ones.
    pub(crate) fn rotated_planes(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosines and sines of one position in a context of up to `context` tokens, (head_dim / 2)
    /// each.
    pub(crate) fn fill(&self, position: usize, context: usize, cos: &mut [f32], sin: &mut [f32]) {
        let frequencies = match &self.long {
            Some((short, long)) if context > *short => long,
            _ => &self.frequencies,
        };
        #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^53")]
        let position = position as f64;
        for ((f, cos), sin) in frequencies.iter().zip(&mut *cos).zip(&mut *sin) {
            let (s, c) = (position * f).sin_cos();
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            {
                (*cos, *sin) = ((self.gain * c) as f32, (self.gain * s) as f32);
            }
        }
        cos[frequencies.len()..].fill(1.0);
        sin[frequencies.len()..].fill(0.0);
    }
}

/// Cosines and sines of the first `positions` positions of a context of as many, (position,
/// head_dim): half of each row cosines, half sines. `rope` is one of the configuration's.
#[must_use]
pub fn rope_table(rope: &RopeConfig, config: &ModelConfig, positions: usize) -> Vec<f32> {
    let rope = Rope::new(rope);
    let mut out = vec![0.0; positions * config.head_dim];
    for (position, row) in out.chunks_exact_mut(config.head_dim.max(1)).enumerate() {
        let (cos, sin) = row.split_at_mut(config.head_dim / 2);
        rope.fill(position, positions, cos, sin);
    }
    out
}

/// `theta^(-2k/d)`.
#[expect(clippy::cast_precision_loss, reason = "head widths are small")]
fn plain(rope: &RopeConfig) -> impl Iterator<Item = f64> {
    let (theta, dim) = (rope.theta, rope.dim);
    (0..dim / 2).map(move |k| theta.powf(-((2 * k) as f64) / dim as f64))
}

fn divided(rope: &RopeConfig, by: &[f64]) -> Vec<f64> {
    plain(rope).zip(by).map(|(f, by)| f / by).collect()
}

#[expect(clippy::cast_precision_loss, reason = "context lengths and head widths are far below 2^53")]
fn frequencies(rope: &RopeConfig) -> Vec<f64> {
    let plain = plain(rope);
    match rope.scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
        RopeScaling::LongRope { ref short, .. } => divided(rope, short),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let original = original_max_position_embeddings as f64;
            plain
                .map(|f| {
                    let turns = original * f / TAU;
                    let keep =
                        ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    keep * f + (1.0 - keep) * f / factor
                })
                .collect()
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings } => {
            let (original, dim) = (original_max_position_embeddings as f64, rope.dim as f64);
            // The plane that turns so often within the original context, a fraction in general.
            let plane = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * rope.theta.ln());
            let (low, high) = (plane(beta_fast), plane(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, high) = (low.max(0.0), high.min(dim - 1.0));
            // As in transformers where the two ends meet.
            let width = if low == high { 0.001 } else { high - low };
            plain
                .enumerate()
                .map(|(k, f)| {
                    let slow = ((k as f64 - low) / width).clamp(0.0, 1.0);
                    slow * f / factor + (1.0 - slow) * f
                })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(truncate: bool) -> Vec<f64> {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            original_max_position_embeddings: 32_768,
        };
        frequencies(&RopeConfig { theta: 1e6, scaling, dim: 128, gain: 1.0, growth: None })
    }

    #[test]
    fn yarn_frequencies_of_the_reference() {
        // tests/reference/rope.json.
        let f = yarn(true);
        for (k, want) in [
            (0, 1.0),
            (23, 0.006_978_305_848_598_663),
            (24, 0.005_375_321_490_790_102),
            (30, 0.001_064_360_981_247_002),
            (39, 6.490_394_320_837_029e-5),
            (40, 4.445_698_525_097_307e-5),
            (63, 3.102_344_401_879_299e-7),
        ] {
            assert!((f[k] / want - 1.0f64).abs() < 1e-12, "plane {k}: {}", f[k]);
        }
        // Ends that are no whole planes lie within: 23.6 and 39.7.
        let bare = yarn(false);
        assert!(bare[23] == f[23] && bare[24] > f[24] && bare[39] < f[39] && bare[40] == f[40]);
    }

    #[test]
    fn contexts_choose_factors_and_some_planes_stand_still() {
        let rope = RopeConfig {
            theta: 100.0,
            scaling: RopeScaling::LongRope {
                short: vec![1.0, 2.0],
                long: vec![4.0, 8.0],
                original_max_position_embeddings: 16,
            },
            dim: 4,
            gain: 1.5,
            growth: None,
        };
        let long = divided(&rope, &[4.0, 8.0]);
        let rope = Rope { frequencies: frequencies(&rope), long: Some((16, long)), gain: rope.gain };
        for (context, angles) in [(16, [3.0, 0.15]), (17, [0.75, 0.0375])] {
            let (mut cos, mut sin) = ([9.0f32; 3], [9.0f32; 3]);
            rope.fill(3, context, &mut cos, &mut sin);
            for (k, angle) in angles.iter().enumerate() {
                let want = (1.5 * f64::cos(*angle), 1.5 * f64::sin(*angle));
                assert!((f64::from(cos[k]) - want.0).abs() < 1e-6, "{context} {k}: {}", cos[k]);
                assert!((f64::from(sin[k]) - want.1).abs() < 1e-6, "{context} {k}: {}", sin[k]);
            }
            assert_eq!((cos[2], sin[2]), (1.0, 0.0), "without the gain");
        }
    }

    #[test]
    fn published_llama3_frequencies() {
        // tests/reference/rope.json of the repository, itself from the published configurations.
        let scaling = |factor| RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let of = |scaling| {
            frequencies(&RopeConfig { theta: 500_000.0, scaling, dim: 128, gain: 1.0, growth: None })
        };
        let f = of(scaling(8.0));
        assert_eq!(f.len(), 64);
        for (k, want) in [(0, 1.0), (1, 0.814_617_233_856_544_7), (18, 0.024_955_408_670_558_694)] {
            assert!((f[k] - want).abs() < 1e-15, "plane {k}: {}", f[k]);
        }
        let plain = of(RopeScaling::None);
        assert_eq!(f[63], plain[63] / 8.0, "the slowest plane is stretched in full");
        assert!(f[32] < plain[32] && f[32] > plain[32] / 8.0, "a plane between");
    }
}
