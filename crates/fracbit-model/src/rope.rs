//! Rotary position embedding, half-split convention of the Hugging Face weights.
//!
//! Su et al. 2021 (arXiv 2104.09864), eq. 34: plane k of a head, here the pair (k, k + d/2), turns by
//! `position · f_k` with `f_k = theta^(-2k/d)`. Stretching follows the configuration: `linear` divides every
//! f_k by the factor (Chen et al. 2023, arXiv 2306.15595); `llama3` divides those that turn less than
//! `low_freq_factor` times within the original context, keeps those that turn more than `high_freq_factor`
//! times, and interpolates linearly in the number of turns between.
//!
//! Deviates from transformers in precision only: angles are formed in f64 (there in f32, where at position
//! 10^5 the fastest plane's angle has lost five digits), then sine and cosine are rounded to f32. One table
//! row per position is made per forward pass and shared by all layers and heads: d/2 sine-cosine pairs per
//! token, nothing beside a layer's matrix products, and no table of the whole context.

use fracbit_io::{ModelConfig, RopeScaling};

/// Angles per position.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    frequencies: Vec<f64>, // (head_dim / 2)
}

impl Rope {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        Self { frequencies: frequencies(config.head_dim, config.rope_theta, config.rope_scaling) }
    }

    /// Cosines and sines of one position, (head_dim / 2) each.
    pub(crate) fn fill(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^53")]
        let position = position as f64;
        for ((f, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = (position * f).sin_cos();
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            {
                (*cos, *sin) = (c as f32, s as f32);
            }
        }
    }
}

/// Cosines and sines of the first `positions` positions, (position, head_dim): half of each row cosines, half sines.
#[must_use]
pub fn turns(config: &ModelConfig, positions: usize) -> Vec<f32> {
    let rope = Rope::new(config);
    let mut out = vec![0.0; positions * config.head_dim];
    for (position, row) in out.chunks_exact_mut(config.head_dim.max(1)).enumerate() {
        let (cos, sin) = row.split_at_mut(config.head_dim / 2);
        rope.fill(position, cos, sin);
    }
    out
}

fn frequencies(head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f64> {
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    let plain = (0..head_dim / 2).map(|k| theta.powf(-((2 * k) as f64) / head_dim as f64));
    match scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            #[expect(clippy::cast_precision_loss, reason = "context lengths are far below 2^53")]
            let original = original_max_position_embeddings as f64;
            plain
                .map(|f| {
                    let turns = original * f / std::f64::consts::TAU;
                    let keep =
                        ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    keep * f + (1.0 - keep) * f / factor
                })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_llama3_frequencies() {
        // tests/reference/rope.json of the repository, itself from the published configurations.
        let scaling = |factor| RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let f = frequencies(128, 500_000.0, scaling(8.0));
        assert_eq!(f.len(), 64);
        for (k, want) in [(0, 1.0), (1, 0.814_617_233_856_544_7), (18, 0.024_955_408_670_558_694)] {
            assert!((f[k] - want).abs() < 1e-15, "plane {k}: {}", f[k]);
        }
        let plain = frequencies(128, 500_000.0, RopeScaling::None);
        assert_eq!(f[63], plain[63] / 8.0, "the slowest plane is stretched in full");
        assert!(f[32] < plain[32] && f[32] > plain[32] / 8.0, "a plane between");
    }
}
