//! A schedule for each prompt: a small network reads the cache that the prompt has left and says
//! when precision may fall (PMPD, arXiv 2410.13461, section 4.3 and appendix A.1).

use crate::{Schedule, ScheduleError};
use fracbit_base::Rate;
use serde::{Deserialize, Serialize};

/// What a network reads of a prompt: the keys and values of one block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features {
    /// (positions, heads, head_dim)
    pub keys: Vec<f32>,
    /// (positions, heads, head_dim)
    pub values: Vec<f32>,
}

/// Sizes of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Heads of keys and values, each with a query of its own.
    pub heads: usize,
    /// Numbers of a key of a head.
    pub head_dim: usize,
    /// Neurons of the hidden layer.
    pub hidden: usize,
    /// Answers to choose from.
    pub classes: usize,
}

/// Where the parameters lie, one behind the other.
struct Parts<T> {
    queries: T, // (heads, head_dim)
    gain: T,    // (heads * head_dim)
    shift: T,   // (heads * head_dim)
    first: T,   // (hidden, heads * head_dim)
    first_bias: T,
    second: T, // (classes, hidden)
    second_bias: T,
}

impl Shape {
    /// Numbers of a position.
    #[must_use]
    pub const fn width(self) -> usize {
        self.heads * self.head_dim
    }

    /// Lengths of the parts, in their order; `None` where they are no sizes of a network.
    fn lengths(self) -> Option<[usize; 7]> {
        let width = self.heads.checked_mul(self.head_dim)?;
        let (first, second) = (self.hidden.checked_mul(width)?, self.classes.checked_mul(self.hidden)?);
        let all = [width, width, width, first, self.hidden, second, self.classes];
        // Far more than any model wants, and far from where sums of sizes overflow.
        (first.max(second) < 1 << 32 && all.iter().all(|&n| n > 0)).then_some(all)
    }

    fn parts(self, params: &[f64]) -> Parts<&[f64]> {
        let mut rest = params;
        let mut next = |len: usize| rest.split_off(..len).expect("as many parameters as the shape says");
        let [queries, gain, shift, first, first_bias, second, second_bias] =
            self.lengths().expect("a shape that was checked").map(&mut next);
        Parts { queries, gain, shift, first, first_bias, second, second_bias }
    }

    fn parts_mut(self, params: &mut [f64]) -> Parts<&mut [f64]> {
        let mut rest = params;
        let mut next = |len: usize| rest.split_off_mut(..len).expect("as many parameters as the shape says");
        let [queries, gain, shift, first, first_bias, second, second_bias] =
            self.lengths().expect("a shape that was checked").map(&mut next);
        Parts { queries, gain, shift, first, first_bias, second, second_bias }
    }
}

/// Attention by learned queries, a layer norm, a hidden layer with ReLU, and a score for each
/// class.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    shape: Shape,
    params: Vec<f64>,
}

/// What a pass leaves for the pass back.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    weights: Vec<f64>,    // (heads, positions): of attention
    normed: Vec<f64>,     // (width)
    scaled: Vec<f64>,     // (width)
    hidden: Vec<f64>,     // (hidden), behind ReLU
    deviation: f64,       // that the norm divided by
    pub scores: Vec<f64>, // (classes)
}

/// Added to the variance in the norm.
const EPS: f64 = 1e-5;

fn dot(a: impl IntoIterator<Item = f64>, b: &[f64]) -> f64 {
    a.into_iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Network {
    /// A network with these parameters, in the order of [`Network::params`].
    ///
    /// # Errors
    /// [`ScheduleError::Network`] when a size is 0 or too large, or when there are not as many
    /// finite parameters as the sizes say.
    pub fn new(shape: Shape, params: Vec<f64>) -> Result<Self, ScheduleError> {
        let want = shape.lengths().map(|all| all.iter().sum::<usize>());
        if want != Some(params.len()) || !params.iter().all(|p| p.is_finite()) {
            return Err(ScheduleError::Network);
        }
        Ok(Self { shape, params })
    }

    /// A network to begin training with; `normal` draws from N(0, 1).
    ///
    /// # Errors
    /// As for [`Network::new`].
    pub fn random(shape: Shape, mut normal: impl FnMut() -> f64) -> Result<Self, ScheduleError> {
        let len = shape.lengths().ok_or(ScheduleError::Network)?.iter().sum();
        let mut params = vec![0.0; len];
        let Parts { queries, gain, first, second, .. } = shape.parts_mut(&mut params);
        let mut fill = |part: &mut [f64], fan_in: usize| {
            let scale = (fan_in as f64).sqrt().recip();
            part.iter_mut().for_each(|p| *p = scale * normal());
        };
        fill(queries, shape.head_dim);
        gain.fill(1.0);
        fill(first, shape.width());
        fill(second, shape.hidden);
        Self::new(shape, params)
    }

    /// Its sizes.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Queries (heads, head_dim), gains and shifts of the norm (heads * head_dim each), weights
    /// (hidden, heads * head_dim) and biases of the hidden layer, weights (classes, hidden) and
    /// biases of the last.
    #[must_use]
    pub fn params(&self) -> &[f64] {
        &self.params
    }

    pub(crate) fn params_mut(&mut self) -> &mut [f64] {
        &mut self.params
    }

    /// The class with the highest score, the first of equals. Features should have the network's
    /// width and at least one position.
    #[must_use]
    pub fn class(&self, features: &Features) -> usize {
        let mut tape = Tape::default();
        self.forward(features, &mut tape);
        let best = tape.scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        tape.scores.iter().position(|&s| s >= best).unwrap_or(0)
    }

    pub(crate) fn forward(&self, features: &Features, tape: &mut Tape) {
        let Shape { heads, head_dim, .. } = self.shape;
        let parts = self.shape.parts(&self.params);
        let width = self.shape.width();
        let scale = (head_dim as f64).sqrt().recip();
        tape.weights.clear();
        let mut read = vec![0.0; width];
        for head in 0..heads {
            let of_head = head * head_dim..(head + 1) * head_dim;
            let query = &parts.queries[of_head.clone()];
            let start = tape.weights.len();
            let rows = features.keys.chunks_exact(width);
            tape.weights
                .extend(rows.map(|k| scale * dot(k[of_head.clone()].iter().map(|&k| k.into()), query)));
            let weights = &mut tape.weights[start..];
            let most = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            weights.iter_mut().for_each(|w| *w = (*w - most).exp());
            let sum: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= sum);
            for (&weight, values) in weights.iter().zip(features.values.chunks_exact(width)) {
                let sums = read[of_head.clone()].iter_mut();
                sums.zip(&values[of_head.clone()]).for_each(|(sum, &v)| *sum += weight * f64::from(v));
            }
        }
        let mean = read.iter().sum::<f64>() / width as f64;
        let variance = read.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / width as f64;
        tape.deviation = (variance + EPS).sqrt();
        tape.normed = read.iter().map(|r| (r - mean) / tape.deviation).collect();
        let affine = tape.normed.iter().zip(parts.gain).zip(parts.shift);
        tape.scaled = affine.map(|((z, gain), shift)| gain * z + shift).collect();
        let layer = |weights: &[f64], bias: &[f64], x: &[f64]| -> Vec<f64> {
            weights.chunks_exact(x.len()).zip(bias).map(|(row, b)| b + dot(x.iter().copied(), row)).collect()
        };
        tape.hidden = layer(parts.first, parts.first_bias, &tape.scaled);
        tape.hidden.iter_mut().for_each(|h| *h = h.max(0.0));
        tape.scores = layer(parts.second, parts.second_bias, &tape.hidden);
    }

    /// Adds to `gradient` what the last pass, of the same features, gives the parameters, when the
    /// loss has the derivatives `scores` by the scores.
    pub(crate) fn backward(&self, features: &Features, tape: &Tape, scores: &[f64], gradient: &mut [f64]) {
        let Shape { heads, head_dim, .. } = self.shape;
        let (parts, width) = (self.shape.parts(&self.params), self.shape.width());
        let to = self.shape.parts_mut(gradient);
        // Of a layer: adds to the gradients of its weights and biases, returns those of its input.
        let layer = |weights: &[f64], x: &[f64], dy: &[f64], [dw, db]: [&mut [f64]; 2]| -> Vec<f64> {
            let mut dx = vec![0.0; x.len()];
            for (i, &dy) in dy.iter().enumerate() {
                db[i] += dy;
                let row = i * x.len()..(i + 1) * x.len();
                dw[row.clone()].iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
                dx.iter_mut().zip(&weights[row]).for_each(|(dx, w)| *dx += dy * w);
            }
            dx
        };
        let mut hidden = layer(parts.second, &tape.hidden, scores, [to.second, to.second_bias]);
        hidden.iter_mut().zip(&tape.hidden).filter(|(_, h)| **h <= 0.0).for_each(|(d, _)| *d = 0.0);
        let scaled = layer(parts.first, &tape.scaled, &hidden, [to.first, to.first_bias]);
        let mut normed = vec![0.0; width];
        for i in 0..width {
            to.gain[i] += scaled[i] * tape.normed[i];
            to.shift[i] += scaled[i];
            normed[i] = scaled[i] * parts.gain[i];
        }
        let mean = normed.iter().sum::<f64>() / width as f64;
        let along = dot(normed.iter().copied(), &tape.normed) / width as f64;
        let read: Vec<f64> =
            normed.iter().zip(&tape.normed).map(|(d, z)| (d - mean - z * along) / tape.deviation).collect();
        let scale = (head_dim as f64).sqrt().recip();
        let positions = features.keys.len() / width;
        for head in 0..heads {
            let of_head = head * head_dim..(head + 1) * head_dim;
            let weights = &tape.weights[head * positions..][..positions];
            let rows = features.values.chunks_exact(width);
            let by_weight: Vec<f64> = rows
                .map(|v| dot(v[of_head.clone()].iter().map(|&v| v.into()), &read[of_head.clone()]))
                .collect();
            let common = dot(by_weight.iter().copied(), weights);
            let keys = features.keys.chunks_exact(width);
            for ((key, weight), by) in keys.zip(weights).zip(&by_weight) {
                let by_score = scale * weight * (by - common);
                let sums = to.queries[of_head.clone()].iter_mut();
                sums.zip(&key[of_head.clone()]).for_each(|(sum, &k)| *sum += by_score * f64::from(k));
            }
        }
    }
}

/// A schedule that each prompt chooses, from some that begin with one precision and fall to another
/// sooner or later.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    prefill: Rate,
    high: Rate,
    low: Rate,
    /// The decode step from which each class reads the lower precision; `None`: never.
    falls: Vec<Option<usize>>,
    block: usize,
    network: Network,
}

impl Learned {
    /// A scheduler that reads the cache of `block`; class `i` of the network reads `high` bits
    /// until `falls[i]`, and `low` from there on.
    ///
    /// # Errors
    /// [`ScheduleError::Rises`] when `low` is above `high`; [`ScheduleError::Network`] when there
    /// are not as many classes as places to fall.
    pub fn new(
        prefill: Rate,
        [high, low]: [Rate; 2],
        falls: Vec<Option<usize>>,
        block: usize,
        network: Network,
    ) -> Result<Self, ScheduleError> {
        if low > high {
            let [before, next] = [high, low].map(|rate| rate.bits().to_string());
            return Err(ScheduleError::Rises { before, next });
        }
        if network.shape.classes != falls.len() {
            return Err(ScheduleError::Network);
        }
        Ok(Self { prefill, high, low, falls, block, network })
    }

    /// The precision of a prompt.
    #[must_use]
    pub const fn prefill(&self) -> Rate {
        self.prefill
    }

    /// The block whose cache is read.
    #[must_use]
    pub const fn block(&self) -> usize {
        self.block
    }

    /// The schedules to choose from.
    pub fn schedules(&self) -> impl Iterator<Item = Schedule> {
        self.falls.iter().map(|&from| Schedule::falling(self.prefill, [self.high, self.low], from))
    }

    /// The schedule of a prompt whose cache has these features.
    #[must_use]
    pub fn schedule(&self, features: &Features) -> Schedule {
        let from = self.falls[self.network.class(features)];
        Schedule::falling(self.prefill, [self.high, self.low], from)
    }

    /// Whether it is for a model of so many blocks, with so many heads of keys of this width.
    ///
    /// # Errors
    /// [`ScheduleError::Model`] when it is not.
    pub fn check(&self, blocks: usize, heads: usize, head_dim: usize) -> Result<(), ScheduleError> {
        let Shape { heads: own, head_dim: own_dim, .. } = self.network.shape;
        if self.block < blocks && [own, own_dim] == [heads, head_dim] {
            return Ok(());
        }
        Err(ScheduleError::Model {
            want: format!("block {} with {own} heads of keys of {own_dim} numbers", self.block),
            got: format!("{blocks} blocks with {heads} heads of {head_dim}"),
        })
    }
}

/// As it is written: bits, places and parameters.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Document {
    bits: [f64; 2],
    falls: Vec<Option<usize>>,
    block: usize,
    shape: Shape,
    params: Vec<f32>,
}

impl Learned {
    #[expect(clippy::cast_possible_truncation, reason = "as precise as weights are")]
    pub(crate) fn document(&self) -> Document {
        Document {
            bits: [self.high, self.low].map(Rate::bits),
            falls: self.falls.clone(),
            block: self.block,
            shape: self.network.shape,
            params: self.network.params.iter().map(|&p| p as f32).collect(),
        }
    }

    pub(crate) fn of_document(prefill: Rate, document: Document) -> Result<Self, ScheduleError> {
        let Document { bits: [high, low], falls, block, shape, params } = document;
        let rates = [Rate::from_bits(high)?, Rate::from_bits(low)?];
        let network = Network::new(shape, params.into_iter().map(f64::from).collect())?;
        Self::new(prefill, rates, falls, block, network)
    }
}
