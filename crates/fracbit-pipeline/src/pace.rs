//! How long a quantization will take on this machine, from what small parts of it take.
//!
//! Two speeds are measured in about a second: of one token through a block of the model, and of one
//! weight through the search of the scheme that the plan will be near to. The steps are counted in
//! these units; the counts of passes are in [`Work`].

use crate::{learn, sensitivity};
use fracbit_base::{Scheme, Shape};
use fracbit_load::{Error, Opened};
use fracbit_model::{Block, LinearId, RotationMode, StateOptions};
use fracbit_quant::{Grouping, Rounders, quantize};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// Tokens and weights that are timed.
const TOKENS: usize = 128;
const TILES: Shape = Shape::new(256, 256);

/// What there is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Tokens to calibrate on; 0: none.
    pub tokens: usize,
    /// Tokens that sensitivities are measured on; 0: none.
    pub measured: usize,
    /// Layers one after another, for the inputs that the quantized ones give.
    pub sequential: bool,
    /// Matrices whose losses are measured one by one in a quantized model, whose scales are then
    /// tuned; 0: none.
    pub learned: usize,
}

/// What the steps take in passes of a text through the blocks, fitted to SmolLM2 on two cores with
/// AVX2 (`docs/lab/2026-11-quality.md`): with moments on the way; of the original and the quantized
/// block, in parts; back and forth for the curvature; eight noisy models.
const CALIBRATING: f64 = 2.0;
const SEQUENTIAL: f64 = 4.0;
const MEASURING: f64 = 6.0;
const TOGETHER: f64 = 8.0;
/// Passes of a matrix's measurement, through half of the model on average, twice; and of tuning,
/// there and back four times.
const LEARNING: f64 = 1.0;
const TUNING: f64 = 16.0;

/// Seconds of the parts of a quantization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// One token through all blocks.
    pub token: f64,
    /// The logits of one token.
    pub logits: f64,
    /// One weight through the search.
    pub weight: f64,
    /// Weights of the model.
    pub weights: u64,
}

impl Pace {
    /// Measures a model's pace in a scheme.
    ///
    /// # Errors
    /// When the model cannot be read.
    #[expect(clippy::cast_precision_loss, reason = "rates")]
    pub fn measure(opened: &Opened, scheme: Scheme, rounders: &Rounders) -> Result<Self, Error> {
        let config = &opened.config;
        let count = |id: LinearId| id.shape(config).len() as u64;
        let blocks: u64 = LinearId::all(config).filter(|id| id.is_layer()).map(count).sum();
        let weights = LinearId::all(config).map(count).sum();
        let plain = opened.source(RotationMode::None, 0)?;
        let block = Block::from_source(&plain, 0, |_| None)?.with_kernels(&fracbit_load::kernels()?);
        let tokens = TOKENS.min(opened.config.max_position_embeddings);
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let mut draw = |n: usize| -> Vec<f32> { (0..n).map(|_| random.sample(StandardNormal)).collect() };
        let mut x = draw(tokens * opened.config.hidden_size);
        let tile = draw(TILES.len());
        let mut state = block.state(&StateOptions { context: Some(tokens), ..StateOptions::default() });
        let mut pass = || -> Result<f64, Error> {
            let start = Instant::now();
            state.reset();
            block.forward(&mut state, &mut x)?;
            Ok(start.elapsed().as_secs_f64())
        };
        pass()?; // reads the weights from the disk
        let token = pass()? * config.num_hidden_layers() as f64 / tokens as f64;
        let logits = token * (config.vocab_size * config.hidden_size) as f64 / blocks.max(1) as f64;
        let start = Instant::now();
        quantize(&tile, TILES, scheme, Grouping::Row, rounders, &|_| ()).map_err(|source| Error::Tensor {
            tensor: "a random one".to_owned(),
            shape: TILES,
            scheme,
            source,
        })?;
        let weight = start.elapsed().as_secs_f64() / TILES.len() as f64;
        Ok(Self { token, logits, weight, weights })
    }

    /// What some work will take.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn of(&self, work: Work) -> Duration {
        let passes = if work.sequential { CALIBRATING + SEQUENTIAL } else { CALIBRATING };
        let whole = self.token + self.logits;
        let mut seconds = work.tokens as f64 * passes * self.token + self.weights as f64 * self.weight;
        if work.learned > 0 {
            let each = LEARNING * self.token + 2.0 * self.logits;
            seconds += (work.learned * learn::MEASURED) as f64 * each + work.tokens as f64 * TUNING * whole;
            seconds += learn::MEASURED as f64 * MEASURING * whole;
            seconds += self.weights as f64 * self.weight;
        } else {
            let few = work.measured.min(sensitivity::TOGETHER_TOKENS) as f64;
            seconds += (work.measured as f64 * MEASURING + few * TOGETHER) * whole;
        }
        Duration::from_secs_f64(seconds)
    }

    /// The most that fits into a time: layers one after another and as many tokens of `most` as
    /// there is time for, or at once, on 1024 tokens at least.
    #[must_use]
    pub fn within(&self, limit: Duration, most: Work) -> Work {
        let halves = |sequential: bool| {
            let tokens = std::iter::successors(Some(most.tokens), |t| Some(t / 2)).take_while(|&t| t >= 1024);
            tokens.map(move |tokens| Work { tokens, sequential, ..most })
        };
        let all = halves(most.sequential).chain(halves(false));
        let mut least = most;
        for work in all {
            least = work;
            if self.of(work) <= limit {
                break;
            }
        }
        least
    }
}

/// A time as people say it.
pub struct About(pub Duration);

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            s @ 0..100 => write!(f, "{s} s"),
            s @ 100..5400 => write!(f, "{} min", (s + 30) / 60),
            s => write!(f, "{} h {} min", s / 3600, s % 3600 / 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_time_buys_more() {
        let pace = Pace { token: 0.001, logits: 0.0, weight: 1e-6, weights: 100_000_000 };
        let most = Work { tokens: 8192, measured: 1024, sequential: true, learned: 0 };
        let within = |s| pace.within(Duration::from_secs(s), most);
        assert_eq!(within(1000), most);
        assert!(pace.of(most) > Duration::from_secs(150) && pace.of(most) < Duration::from_secs(180));
        let some = within(140);
        assert!(
            some.sequential && some.tokens < 8192 && pace.of(some) <= Duration::from_secs(140),
            "{some:?}"
        );
        // Less than the least is not to be had.
        let least = within(1);
        assert_eq!((least.tokens, least.sequential), (1024, false));
        assert_eq!(About(Duration::from_secs(99)).to_string(), "99 s");
        assert_eq!(About(Duration::from_secs(150)).to_string(), "3 min");
        assert_eq!(About(Duration::from_secs(7260)).to_string(), "2 h 1 min");
    }
}
