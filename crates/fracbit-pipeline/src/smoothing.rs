//! Which rotation a model gets, and the factors between its inputs and weights, from the inputs
//! that it has on a text.
//!
//! A rotation spreads the rounding error of weights over all channels alike, so a rotated matrix W
//! diag(f) adds noise to its output as `|W diag(f)|^2 |diag(f)^-1 x|^2 / n`. Folding takes the gain
//! g of the norm before for f; its input is then the normalized residual stream, whose squares add
//! up to n, and the noise is `|W diag(g)|^2`. Rotating online leaves f free: ones, or the best
//! ([`fracbit_model::smoothing`]), which makes it `(sum over j of |W_j| |x_j|)^2 / n` for columns
//! `W_j`.
//!
//! Keys are to queries what inputs are to weights: see [`fracbit_model::smoothing`]. What both are
//! like follows from the weights and the moments of the block's input, or from the inputs
//! themselves.

use crate::{
    Calibration,
    calibrate::{Sequences, written},
};
use fracbit_base::Shape;
use fracbit_io::{ModelConfig, QkNorm};
use fracbit_kernels::Team;
use fracbit_load::{Error, Opened, Progress};
use fracbit_model::{
    Block, BlockInput, FloatId, LayerLinear, Linear, LinearId, LinearScratch, Matrix, Model, Place, Read,
    RotationMode, Smoothing, StateOptions, WeightSource, block::head_input,
};
use rayon::prelude::*;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Tokens that a model writes to show its inputs where no text is given, and how many of them are a
/// sequence.
const TOKENS: usize = 512;
const LENGTH: usize = 64;
/// Noise of folding over that of rotating online from which online is worth its time. Two more
/// transforms in a block are taken to be 2 % of a decode step at most (estimated, not measured): as
/// many bits are worth 8 % of the noise at 3 bits a weight.
const WORTH: f64 = 1.08;
/// Rows of a matrix that are taken together.
const ROWS: usize = 256;

/// Mean squares of the channels of a model's inputs, in the basis of the checkpoint, and of its
/// queries and keys.
#[derive(Clone, Debug, Default)]
pub struct Channels {
    inputs: BTreeMap<Place, Vec<f64>>,
    heads: Vec<Heads>,
}

/// Mean squares of the numbers of a block's queries and keys, as their matrices give them: before
/// norms, and keys without biases, or where there are none without means: what caches of few bits
/// hold apart.
#[derive(Clone, Debug)]
struct Heads {
    queries: Vec<f64>, // (heads, head_dim)
    keys: Vec<f64>,    // (kv heads, head_dim)
}

impl Heads {
    /// Those of a block of `plain`, where `squares` gives the mean squares of what rows of weights
    /// (outputs, inputs) make of the block's input, with their biases.
    fn new(
        plain: &WeightSource,
        block: usize,
        squares: impl Fn(LayerLinear, Matrix, Option<Vec<f32>>) -> Result<Vec<f64>, Error>,
    ) -> Result<Self, Error> {
        let of = |linear| plain.linear(LinearId::Layer(block, linear));
        let (q, k) = (LayerLinear::Q, LayerLinear::K);
        let bias = plain.bias(LinearId::Layer(block, q))?;
        Ok(Self { queries: squares(q, of(q)?, bias)?, keys: squares(k, of(k)?, None)? })
    }

    /// Mean squares of keys and queries by the planes that share factors ([`Place::Keys`]), behind
    /// norms. The mean over tokens of what a norm of each head makes is taken for the share in the
    /// mean of its square.
    fn planes(&self, plain: &WeightSource, block: usize) -> Result<[Vec<f64>; 2], Error> {
        let config = plain.config();
        let (d, shared) = (config.head_dim, Place::Keys(block).width(config));
        let of = |squares: &[f64], norm| -> Result<Vec<f64>, Error> {
            let mut squares = squares.to_vec();
            if config.qk_norm != QkNorm::Absent {
                let gain = plain.unfolded_norm(norm)?;
                for (head, gain) in squares.chunks_exact_mut(d).zip(gain.chunks_exact(d).cycle()) {
                    let all: f64 = head.iter().sum();
                    let scale = if config.qk_norm == QkNorm::Heads && all > 0.0 { 1.0 / all } else { 1.0 };
                    head.iter_mut().zip(gain).for_each(|(s, &g)| *s *= scale * f64::from(g).powi(2));
                }
            }
            let sets = shared / (d / 2);
            let heads = squares.len() / d / sets;
            let mut planes = vec![0.0; shared];
            for (set, planes) in squares.chunks_exact(heads * d).zip(planes.chunks_exact_mut(d / 2)) {
                for half in set.chunks_exact(d / 2) {
                    planes.iter_mut().zip(half).for_each(|(plane, s)| *plane += s);
                }
            }
            Ok(planes)
        };
        Ok([of(&self.keys, FloatId::Key(block))?, of(&self.queries, FloatId::Query(block))?])
    }
}

/// x W^T + b of rows x.
fn products(weights: Matrix, bias: Option<Vec<f32>>, x: &[f32]) -> Result<Vec<f32>, Error> {
    let shape = weights.shape;
    let linear = Linear::dense(shape, weights.data, bias).map_err(fracbit_model::Error::from)?;
    let mut out = vec![0.0; x.len() / shape.cols * shape.rows];
    linear.apply(x, &mut LinearScratch::new(), &mut out).map_err(fracbit_model::Error::from)?;
    Ok(out)
}

/// Mean squares of W x + b for inputs x of which the moments E[x x^T] are known. Their mean is not:
/// what it has in common with b is left out.
fn squares_by_moments(weights: &Matrix, bias: Option<&[f32]>, moments: &[f32]) -> Result<Vec<f64>, Error> {
    let n = weights.shape.cols;
    let mut squares = Vec::with_capacity(weights.shape.rows);
    for rows in weights.data.chunks(ROWS * n) {
        let shape = Shape::new(rows.len() / n, n);
        let met = products(Matrix { shape, data: rows.to_vec() }, None, moments)?; // (n, rows)
        for (r, row) in rows.chunks_exact(n).enumerate() {
            let met = met.iter().skip(r).step_by(shape.rows);
            squares.push(row.iter().zip(met).map(|(&w, &m)| f64::from(w) * f64::from(m)).sum());
        }
    }
    if let Some(bias) = bias {
        squares.iter_mut().zip(bias).for_each(|(s, &b)| *s += f64::from(b).powi(2));
    }
    Ok(squares)
}

impl Channels {
    /// Those of a calibration.
    ///
    /// # Errors
    /// When its moments are damaged or of another model.
    pub fn of(calibration: &Calibration, plain: &WeightSource) -> Result<Self, Error> {
        let config = plain.config();
        let places = Place::all(config).filter(|place| !matches!(place, Place::Keys(_)));
        let inputs = places.map(|place| Ok((place, calibration.mean_squares(config, place)?)));
        let inputs = inputs.collect::<Result<_, Error>>()?;
        let heads = (0..config.num_hidden_layers()).map(|i| {
            let moments = calibration.moments(plain, LinearId::Layer(i, LayerLinear::Q))?;
            let moments = moments.expect("the attention's input has moments");
            let means = if config.qkv_bias { None } else { calibration.means(config, i)? };
            Heads::new(plain, i, |linear, weights, bias| {
                let mut squares = squares_by_moments(&weights, bias.as_deref(), moments.entries())?;
                if let (LayerLinear::K, Some(means)) = (linear, &means) {
                    let shared = products(weights, None, means)?;
                    let least = |s: &f64, mean: f32| (s - f64::from(mean).powi(2)).max(0.0);
                    squares.iter_mut().zip(shared).for_each(|(s, mean)| *s = least(s, mean));
                }
                Ok(squares)
            })
        });
        Ok(Self { inputs, heads: heads.collect::<Result<_, Error>>()? })
    }

    /// Those on some sequences of tokens. One block of `plain`, a source without rotation, runs at
    /// a time.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn measure(
        plain: &WeightSource,
        sequences: &Sequences,
        progress: &dyn Progress,
    ) -> Result<Self, Error> {
        let config = plain.config();
        let kernels = fracbit_load::kernels()?;
        progress.stage("measuring inputs", config.num_hidden_layers() as u64);
        let streams = sequences.iter().map(|tokens| plain.embedding(tokens));
        let mut streams: Vec<Vec<f32>> = streams.collect::<Result<_, _>>()?;
        let context = sequences.iter().map(<[u32]>::len).max();
        let rows = sequences.tokens();
        let found = Arc::new(Mutex::new(BTreeMap::new()));
        let attention = Arc::new(Mutex::new(Vec::new()));
        let mut heads = Vec::new();
        for index in 0..config.num_hidden_layers() {
            let block = Block::from_source(plain, index, |input| {
                let (found, place) = (Arc::clone(&found), Place::Block(index, input));
                let n = LinearId::Layer(index, input.reader()).shape(config).cols;
                let kept = (input == BlockInput::Attention).then(|| Arc::clone(&attention));
                Some(Arc::new(move |_: &Team<'_>, Read { x, .. }: Read<'_>| {
                    add_squares(&mut lock(&found), place, n, rows, x);
                    if let Some(kept) = &kept {
                        lock(kept).extend_from_slice(x);
                    }
                }))
            })?
            .with_kernels(&kernels);
            let mut state = block.state(&StateOptions { context, ..StateOptions::default() });
            for x in &mut streams {
                state.reset();
                block.forward(&mut state, x)?;
            }
            let x = std::mem::take(&mut *lock(&attention));
            heads.push(Heads::new(plain, index, |linear, weights, bias| {
                let outputs = weights.shape.rows;
                let mut y = products(weights, bias, &x)?;
                if linear == LayerLinear::K && !config.qkv_bias {
                    center(&mut y, outputs);
                }
                Ok(column_squares(&y, outputs))
            })?);
            progress.advance(1);
        }
        let mut found = std::mem::take(&mut *lock(&found));
        for x in &mut streams {
            head_input(plain, x)?;
            add_squares(&mut found, Place::Head, config.hidden_size, rows, x);
        }
        Ok(Self { inputs: found, heads })
    }
}

/// Takes the means of its n columns from a row-major matrix: what keys share is no part of what
/// caches of few bits hold.
fn center(rows: &mut [f32], n: usize) {
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let count = (rows.len() / n) as f64;
    let mut means = vec![0.0; n];
    for row in rows.chunks_exact(n) {
        means.iter_mut().zip(row).for_each(|(mean, &x)| *mean += f64::from(x) / count);
    }
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    for row in rows.chunks_exact_mut(n) {
        row.iter_mut().zip(&means).for_each(|(x, mean)| *x -= *mean as f32);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds what some of `rows` rows of n channels have of the mean squares.
#[expect(clippy::cast_precision_loss, reason = "a mean")]
fn add_squares(means: &mut BTreeMap<Place, Vec<f64>>, place: Place, n: usize, rows: usize, x: &[f32]) {
    let means = means.entry(place).or_insert_with(|| vec![0.0; n]);
    for row in x.chunks_exact(n) {
        means.iter_mut().zip(row).for_each(|(mean, &x)| *mean += f64::from(x).powi(2) / rows as f64);
    }
}

/// The matrices that read an input, each with how much the relative error of its like tends to
/// cost: see [`fracbit_plan::Sensitivities::prior`].
fn readers(place: Place, tied: bool) -> Vec<(LinearId, f64)> {
    let (i, input) = match place {
        Place::Block(i, input) => (i, input),
        Place::Head => return vec![(if tied { LinearId::Embed } else { LinearId::Head }, 1.0)],
        Place::Keys(_) => return Vec::new(),
    };
    let layers = LayerLinear::ALL.into_iter().filter(|&linear| BlockInput::of(linear) == input);
    layers.map(|linear| (LinearId::Layer(i, linear), fracbit_plan::sensitivities::usual(linear))).collect()
}

/// Rotation and factors for a model.
#[derive(Clone, Debug)]
pub struct Choice {
    /// How weights are rotated.
    pub rotation: RotationMode,
    /// Factors between inputs and weights.
    pub smoothing: Arc<Smoothing>,
    /// What led to it.
    pub noise: Noise,
}

/// What rounding adds behind the norms of a model, over what it adds with rotations online and the
/// best factors: by the kind of input, geometric means over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Noise {
    /// Gains folded.
    pub fold: f64,
    /// Gains folded, the worst place.
    pub fold_most: f64,
    /// Rotations online without factors.
    pub online: f64,
}

impl fmt::Display for Noise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fold, fold_most, online } = self;
        write!(
            f,
            "folding gains would add {fold:.2} times the noise (at worst {fold_most:.2}), online without smoothing {online:.2} times"
        )
    }
}

/// Chooses for a model whose inputs are known, with or without factors. `fixed` is a rotation that
/// was asked for.
///
/// # Errors
/// When a matrix or norm cannot be read.
pub fn choose(
    plain: &WeightSource,
    channels: &Channels,
    fixed: Option<RotationMode>,
    smoothed: bool,
) -> Result<Choice, Error> {
    let config = plain.config();
    let mut smoothing = Smoothing::default();
    let (mut places, mut fold, mut online, mut most) = (0.0, 0.0, 0.0, 1.0f64);
    for place in Place::all(config) {
        if let Place::Keys(block) = place {
            if let Some(heads) = channels.heads.get(block).filter(|_| smoothed) {
                let [keys, queries] = heads.planes(plain, block)?;
                smoothing.balance(place, &keys, &queries);
            }
            continue;
        }
        let Some(inputs) = channels.inputs.get(&place) else { continue };
        let n = inputs.len();
        let mut weights = vec![0.0; n];
        for (id, weight) in readers(place, config.tie_word_embeddings) {
            let columns = column_squares(&plain.linear(id)?.data, n);
            let all: f64 = columns.iter().sum();
            let scale = if all > 0.0 { weight / all } else { 0.0 };
            weights.iter_mut().zip(columns).for_each(|(w, c)| *w += scale * c);
        }
        if let Some(norm) = norm_before(config, place) {
            let gain = plain.unfolded_norm(norm)?;
            let noise = noise(inputs, &weights, &gain);
            if noise.fold.is_finite() && noise.online.is_finite() {
                (places, fold, online) = (places + 1.0, fold + noise.fold.ln(), online + noise.online.ln());
                most = most.max(noise.fold);
            }
        }
        // Heads that share values share factors.
        let (inputs, weights) = match place {
            Place::Block(_, BlockInput::Output) => (shared(config, inputs), shared(config, &weights)),
            _ => (inputs.clone(), weights),
        };
        if smoothed {
            smoothing.balance(place, &inputs, &weights);
        }
    }
    let mean = |sum: f64| if places > 0.0 { (sum / places).exp() } else { 1.0 };
    let noise = Noise { fold: mean(fold), fold_most: most, online: mean(online) };
    let online = if smoothed { 1.0 } else { noise.online };
    let better = if noise.fold > WORTH * online { RotationMode::Online } else { RotationMode::Fold };
    Ok(Choice { rotation: fixed.unwrap_or(better), smoothing: Arc::new(smoothing), noise })
}

/// The norm whose gain folding takes into what reads an input.
fn norm_before(config: &ModelConfig, place: Place) -> Option<FloatId> {
    match place {
        Place::Block(i, input) => FloatId::before(config, i, input.reader()),
        Place::Head => Some(FloatId::Final),
        Place::Keys(_) => None,
    }
}

/// Of one place. The squares of a normalized row add up to their number, whatever the gain hides of
/// them.
#[expect(clippy::cast_precision_loss, reason = "a mean")]
fn noise(inputs: &[f64], weights: &[f64], gain: &[f32]) -> Noise {
    let n = inputs.len() as f64;
    let sum: f64 = inputs.iter().sum();
    let balanced = inputs.iter().zip(weights).map(|(x, w)| (x * w).sqrt()).sum::<f64>().powi(2);
    let folded: f64 = gain.iter().zip(weights).map(|(&g, w)| f64::from(g).powi(2) * w).sum();
    let fold = n * folded / balanced;
    Noise { fold, fold_most: fold, online: sum * weights.iter().sum::<f64>() / balanced }
}

/// Sums over the heads that share a head of values.
fn shared(config: &ModelConfig, heads: &[f64]) -> Vec<f64> {
    let (dim, group) = (config.head_dim, config.num_attention_heads / config.num_key_value_heads);
    let groups = heads.chunks_exact(dim * group);
    groups.flat_map(|g| (0..dim).map(move |c| g.iter().skip(c).step_by(dim).sum())).collect()
}

/// Sums of the squares of every column of a row-major matrix with n columns.
fn column_squares(data: &[f32], n: usize) -> Vec<f64> {
    let parts: Vec<Vec<f64>> = data
        .par_chunks(ROWS * n)
        .map(|rows| {
            let mut sums = vec![0.0; n];
            for row in rows.chunks_exact(n) {
                sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w).powi(2));
            }
            sums
        })
        .collect();
    let mut sums = vec![0.0; n];
    // One order of summation, whatever the number of threads.
    parts.iter().for_each(|part| sums.iter_mut().zip(part).for_each(|(sum, p)| *sum += p));
    sums
}

/// Rotation and factors for this checkpoint, by the inputs of a calibration, or without one by
/// those on text that the model writes.
///
/// # Errors
/// When the model cannot be read or run.
pub fn choose_for(
    opened: &Opened,
    fixed: Option<RotationMode>,
    smoothed: bool,
    seed: u64,
    calibration: Option<&Calibration>,
    progress: &dyn Progress,
) -> Result<Choice, Error> {
    let plain = opened.source(RotationMode::None, 0)?;
    let channels = match calibration {
        Some(calibration) => Channels::of(calibration, &plain)?,
        None => {
            let model = Model::from_source(&plain)?.with_kernels(&fracbit_load::kernels()?);
            let length = LENGTH.min(opened.config.max_position_embeddings);
            progress.stage("writing a text to see inputs on", TOKENS as u64);
            let sequences = written::write(&model, TOKENS, length, seed, progress)?;
            Channels::measure(&plain, &sequences, progress)?
        }
    };
    choose(&plain, &channels, fixed, smoothed)
}

/// The weights that a plan is about: rotated, and smoothed if the plan says so.
///
/// # Errors
/// As for [`choose_for`].
pub fn planned_source(
    opened: &Opened,
    rotation: RotationMode,
    seed: u64,
    smoothed: bool,
    calibration: Option<&Calibration>,
    progress: &dyn Progress,
) -> Result<WeightSource, Error> {
    let source = opened.source(rotation, seed)?;
    if !smoothed || rotation == RotationMode::None {
        return Ok(source);
    }
    let choice = choose_for(opened, Some(rotation), true, seed, calibration, progress)?;
    Ok(source.smoothed(choice.smoothing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_of_a_channel_that_the_gain_suppresses() {
        // One channel of 64 holds nearly all of the stream; its gain is small.
        let n = 64;
        let stream: Vec<f64> = (0..n).map(|j| if j == 5 { 57.7 } else { 0.1 }).collect();
        let gain: Vec<f32> = (0..n).map(|j| if j == 5 { 1e-3 } else { 1.0 }).collect();
        let inputs: Vec<f64> = stream.iter().zip(&gain).map(|(s, &g)| s * f64::from(g).powi(2)).collect();
        let found = noise(&inputs, &vec![1.0; n], &gain);
        assert!(found.fold > 10.0 && found.online < 1.1, "{found:?}");
        // Where all is alike nothing is lost.
        let alike = noise(&vec![1.0; n], &vec![2.0; n], &vec![1.0; n]);
        assert!((alike.fold - 1.0).abs() < 1e-9 && (alike.online - 1.0).abs() < 1e-9, "{alike:?}");
    }

    #[test]
    fn columns_are_added_up_whatever_the_rows() {
        let (n, rows) = (3, 1000);
        let data: Vec<f32> = (0..n * rows).map(|i| (i % 7) as f32).collect();
        let sums = column_squares(&data, n);
        for (j, sum) in sums.into_iter().enumerate() {
            let want: f64 = (0..rows).map(|r| f64::from(data[r * n + j]).powi(2)).sum();
            assert!((sum - want).abs() < 1e-6 * want);
        }
    }
}
