//! Smoothing: factors that move between the inputs of linear layers and their weights.
//!
//! `W x = (W diag(f)) (diag(f)^-1 x)` for any positive f. Rounding noise of a rotated matrix is
//! spread over its channels evenly, so its effect is as `|W diag(f)|^2 |diag(f)^-1 x|^2`, which is
//! least for `f_j^2 = rms(x_j) / rms(W_j)`: channels with large inputs get large weights
//! (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438, and AWQ, Lin et al. 2023, arXiv 2306.00978,
//! scale so without a rotation). With f = g, the gain of the norm before, the gain itself is folded
//! away; real models have channels hundreds of times larger than the rest that the gain suppresses,
//! and there that is far from the best.
//!
//! The factors cost nothing while running. `diag(f)^-1` goes into what makes the input:
//!
//! | input | made by |
//! | --- | --- |
//! | of q, k, v; of gate, up; of the head | the gain of the norm before; rows of a tied embedding are divided as well |
//! | of o | the rows of v: heads that share keys and values share factors |
//! | of down | the rows of up |
//!
//! Experts have an up each and one input each for down; their downs get no factors.
//!
//! **Keys** are an input, too: of scores, where queries are the weights. `q · k` stays the same
//! when channels of keys are divided by f and those of queries multiplied (SmoothAttention: QServe,
//! Lin et al. 2024, arXiv 2405.04532, section 4.2). A cache of few bits ([`crate::KvType`])
//! rotates keys and queries and rounds a key with one scale, so its noise and the best factors are
//! of the same form: `f_i^2 = rms(k_i) / rms(q_i)`. The paper, which does not rotate here, takes
//! `max(|k_i|)^.5`, whatever queries are: with a rotation that can be worse than none
//! (`docs/lab/2026-11-quality.md`). Both channels of a plane that RoPE turns have one factor, with
//! which turning commutes; that holds for every order in which checkpoints store planes, since
//! [`crate::WeightSource`] has put them in one order before. Planes that stand still could have
//! two: not done. The factors are in
//!
//! | queries and keys | the factors are in |
//! | --- | --- |
//! | as their matrices give them | rows and biases of q and k; heads of a group share factors |
//! | with a norm over all heads (OLMo 2) | the gains of both norms, likewise |
//! | with a norm over each head (Qwen3, Gemma 3) | the gains; all heads share gains and factors |
//!
//! Rows of weights have scales of their own, so a row that is larger by a factor is rounded as well
//! as before.

use std::collections::BTreeMap;

use fracbit_io::{ModelConfig, QkNorm};

use crate::BlockInput;

/// Where an input with factors is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// An input of a block.
    Block(usize, BlockInput),
    /// What the queries of a block read of its keys: see [`Place::width`].
    Keys(usize),
    /// The input of the head.
    Head,
}

impl Place {
    /// The places of a model that can have factors.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> + use<> {
        let (norms, experts) = (config.pre_norms, config.experts.is_some());
        let free = move |input| match input {
            BlockInput::Attention | BlockInput::Mlp => norms,
            BlockInput::Output => true,
            BlockInput::Down => !experts,
        };
        let blocks = 0..config.num_hidden_layers();
        blocks
            .flat_map(move |i| {
                let inputs = BlockInput::ALL.into_iter().filter(move |&b| free(b));
                inputs.map(move |b| Self::Block(i, b)).chain([Self::Keys(i)])
            })
            .chain(std::iter::once(Self::Head))
    }

    /// Factors that it has: one for each channel, of the attention's output one for each channel of
    /// the values. Of keys one for each plane of RoPE, channels `p` and `p + head_dim / 2` of a
    /// head, and (kv head, plane) of them, or (plane) where all heads share the gain of a norm.
    #[must_use]
    pub fn width(self, config: &ModelConfig) -> usize {
        match self {
            Self::Block(_, BlockInput::Attention | BlockInput::Mlp) | Self::Head => config.hidden_size,
            Self::Block(_, BlockInput::Output) => config.kv_dim(),
            Self::Block(_, BlockInput::Down) => config.intermediate_size,
            Self::Keys(_) if config.qk_norm == QkNorm::Heads => config.head_dim / 2,
            Self::Keys(_) => config.kv_dim() / 2,
        }
    }
}

/// The factors f of a model's inputs; places without have ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Smoothing(BTreeMap<Place, Vec<f32>>);

/// Channels whose input or weights are (almost) nothing get the factor of one this share of the
/// largest.
const LEAST: f64 = 1e-4;
/// The largest factor over the smallest: what is stored in half precision keeps its digits.
const SPAN: f32 = 1e4;

impl Smoothing {
    /// The factors of a place: square roots of `rms(x_j) / rms(W_j)`, scaled to a geometric mean
    /// of 1. `inputs` and `weights` are mean squares of each channel.
    ///
    /// # Panics
    /// When there are not as many of one as of the other.
    pub fn balance(&mut self, place: Place, inputs: &[f64], weights: &[f64]) {
        assert_eq!(inputs.len(), weights.len(), "one mean square for each channel");
        let floored = |values: &[f64]| -> Vec<f64> {
            let most = values.iter().copied().fold(0.0, f64::max);
            let least = if most > 0.0 { most * LEAST * LEAST } else { 1.0 };
            values.iter().map(|v| v.max(least)).collect()
        };
        // Mean squares: the fourth root of their ratio.
        let logs: Vec<f64> =
            floored(inputs).iter().zip(floored(weights)).map(|(x, w)| (x / w).ln() / 4.0).collect();
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let mean = logs.iter().sum::<f64>() / logs.len().max(1) as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let factors = logs.iter().map(|l| ((l - mean).exp() as f32).clamp(SPAN.sqrt().recip(), SPAN.sqrt()));
        self.0.insert(place, factors.collect());
    }

    /// The factors of a place, if it has any.
    #[must_use]
    pub fn of(&self, place: Place) -> Option<&[f32]> {
        self.0.get(&place).map(Vec::as_slice)
    }

    /// Whether no place has factors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
