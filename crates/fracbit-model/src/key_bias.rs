//! Keys in caches of few bits without the large constants that they share.
//!
//! The first and last layers of Qwen2 and 2.5 have key biases of several hundred in a few channels,
//! far above what the weights add. A row of 4- or 8-bit integers shares one scale, so such a
//! constant takes the levels that the rest needs. But a score splits exactly: with `q` already
//! turned to its own position, and RoPE `R_j` of position j,
//!
//! ```text
//! q · R_j (k + b) = q · R_j k + sum over planes p of  A_p cos(j f_p) + B_p sin(j f_p)
//! A_p = q_a b_a + q_b b_b,   B_p = q_b b_a - q_a b_b,   (a, b) = (p, p + head_dim / 2)
//! ```
//!
//! so keys are stored without the bias of some planes, and attention adds the second term in single
//! precision from tables of cosines and sines. Its work grows with the planes, so
//! only those take part that must: the largest ones, until the energy that the other biases add to
//! a key is at most [`LEFT`] of what its weights give it. Planes that RoPE leaves alone add the
//! same to every score of a query, which softmax does not see: their biases are dropped for
//! nothing. Both depend on the model alone, never on a text or a batch.
//!
//! Not done where keys have a norm behind the bias, and where scores are capped (softmax then sees
//! constants).
//!
//! # Means
//! Models without biases have such a constant as well: the mean of all keys, before RoPE, has most
//! of their energy. A cache of 4-bit keys goes without it in the same way, in the [`MOST`] largest
//! planes at most. The mean is that of the keys of [`TOKENS`] fixed tokens, so it depends on the
//! model alone too, and any vector leaves scores as they are. The first token keeps its key whole:
//! it is the one that attention rests on (a sink), and its key is small, so that it would become
//! minus the mean and take most of the error (`docs/lab/2026-11-quality.md`).

use std::collections::TryReserveError;
use std::ops::Range;

use fracbit_io::{ModelConfig, QkNorm};
use fracbit_kernels::vectors::{FloatScores, KEY_BLOCK, Vectors};
use fracbit_schedule::Features;

use crate::attention::{CHUNK, MAX_HEAD_DIM, QUERIES};
use crate::id::LayerLinear;
use crate::kv::{KvType, PAGE};
use crate::model::{Layer, Model};
use crate::rope::Rope;
use crate::state::{State, StateOptions};

/// Energy of the biases that stay in a cached key, as a share of the energy that its weights give
/// it. The error of rounding grows by as much.
const LEFT: f64 = 0.25;
/// Rows of weights of a head that its energy is estimated from.
const ROWS: usize = 16;
/// Planes that meet the queries together: their angles within a page are 4 KiB.
const TOGETHER: usize = 8;
/// Energy of a mean that stays in a cached key, as a share of that of what keys do not share, and
/// most planes of it that are kept apart: what meets the queries together.
const LEFT_OF_MEAN: f64 = 0.5;
const MOST: usize = TOGETHER;
/// Tokens whose keys give the mean.
const TOKENS: usize = 64;

/// What a layer does about the bias, or the mean, of its keys where its cache has few bits.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyBias {
    /// What keys get before they turn, (kv head, `head_dim`): minus the bias in the planes of
    /// `heads` and those that stand still, else 0.
    pub shift: Vec<f32>,
    /// Of every kv head.
    pub heads: Vec<HeadBias>,
    /// Planes of the head that has most.
    pub(crate) most: usize,
    /// It is a mean: of all positions but the first one, in caches of 4-bit keys.
    pub(crate) mean: bool,
}

/// What [`KeyBias::of_keys`] reads of the weights of a layer's keys.
#[derive(Clone, Copy, Debug)]
pub struct KeyWeights<'a> {
    /// Of every row: (kv head, `head_dim`).
    pub bias: &'a [f32],
    /// Of the norm before them, (`hidden_size`), where there is one.
    pub gain: Option<&'a [f32]>,
    /// Whether what they read is rotated.
    pub rotated: bool,
}

/// The planes whose biases scores get apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadBias {
    /// Which, ascending: numbers `plane` and `plane + head_dim / 2` of the head.
    pub planes: Vec<usize>,
    /// Of each, its two numbers.
    pub bias: Vec<[f32; 2]>,
}

/// The choices for a model.
#[derive(Clone, Debug)]
pub(crate) struct KeyBiases {
    /// Of every layer that wants it.
    pub(crate) layers: Vec<Option<KeyBias>>,
    /// Whether some layer reads the angles that all layers share, and those of layers with a
    /// window.
    pub(crate) tables: [bool; 2],
}

impl KeyBiases {
    pub(crate) fn of(model: &Model) -> Self {
        Self::new(model, model.layers.iter().enumerate().map(|(i, layer)| of_layer(model, i, layer)))
    }

    /// Those of the means of keys; none where the model cannot run.
    pub(crate) fn of_means(model: &Model) -> Self {
        let options = StateOptions { context: Some(TOKENS), kv: KvType::F32, ..StateOptions::default() };
        let (mut state, mut hidden) = (model.state(&options), Vec::new());
        if model.forward(&mut state, &KeyBias::mean_tokens(&model.config), &mut hidden).is_err() {
            // For want of memory, which whoever wanted the cache will hear of.
            return Self::new(model, model.layers.iter().map(|_| None));
        }
        let layer =
            |i: usize| KeyBias::of_mean(&model.config, i, state.capacity(), &state.cached(i, TOKENS)?.keys);
        Self::new(model, (0..model.layers.len()).map(layer))
    }

    fn new(model: &Model, layers: impl Iterator<Item = Option<KeyBias>>) -> Self {
        let layers: Vec<_> = layers.collect();
        let mut tables = [false; 2];
        for (i, bias) in layers.iter().enumerate() {
            let table = usize::from(model.config.has_local_rope(i));
            tables[table] |= bias.as_ref().is_some_and(|bias| bias.most > 0);
        }
        Self { layers, tables }
    }
}

fn of_layer(model: &Model, index: usize, layer: &Layer) -> Option<KeyBias> {
    let keys = layer.linear(LayerLinear::K);
    let weights = KeyWeights {
        bias: keys.bias()?,
        gain: layer.attention_norm.as_deref(),
        rotated: model.rotations.layers[index].attention_in.is_some(),
    };
    KeyBias::of_keys(&model.config, index, weights, |r, row| keys.row(r, row).expect("a row of the layer"))
}

/// What turns the keys of a layer.
fn rope_of(config: &ModelConfig, layer: usize) -> Rope {
    let local = config.local_rope.as_ref().filter(|_| config.has_local_rope(layer));
    Rope::new(local.unwrap_or(&config.rope))
}

/// How much of a constant stays in a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    /// Energy, as a share of that of the rest.
    pub(crate) left: f64,
    /// Most planes that are kept apart.
    pub(crate) most: usize,
}

/// Mean squares of what the keys' weights read, by column.
fn squared_input(weights: KeyWeights<'_>, config: &ModelConfig) -> Vec<f64> {
    let squares: Vec<f64> = match weights.gain {
        Some(gain) => gain.iter().map(|g| f64::from(*g).powi(2)).collect(),
        None => vec![1.0; config.hidden_size],
    };
    if !weights.rotated {
        return squares;
    }
    #[expect(clippy::cast_precision_loss, reason = "widths are far below 2^53")]
    let mean = squares.iter().sum::<f64>() / squares.len() as f64;
    vec![mean; squares.len()]
}

impl KeyBias {
    /// The choice for the bias of the keys of layer `index`: it depends on the model alone. `row`
    /// gives row r of the weights, (`hidden_size`). `None` when all can stay as it is.
    pub fn of_keys(
        config: &ModelConfig,
        index: usize,
        weights: KeyWeights<'_>,
        mut row: impl FnMut(usize, &mut [f32]),
    ) -> Option<Self> {
        if config.qk_norm != QkNorm::Absent || config.score_cap.is_some() {
            return None;
        }
        let squares = squared_input(weights, config);
        let mut read = vec![0.0; config.hidden_size];
        let step = config.head_dim.div_ceil(ROWS);
        let mut energy = |head: usize| {
            let rows = (0..config.head_dim).step_by(step);
            let count = rows.len();
            let sum: f64 = rows
                .map(|r| {
                    row(head * config.head_dim + r, &mut read);
                    read.iter().zip(&squares).map(|(w, s)| f64::from(*w).powi(2) * s).sum::<f64>()
                })
                .sum();
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let scale = config.head_dim as f64 / count as f64;
            sum * scale
        };
        let energies: Vec<f64> = (0..config.num_key_value_heads).map(&mut energy).collect();
        let turning = if config.layers[index].rope { rope_of(config, index).rotated_planes() } else { 0 };
        Self::new(weights.bias, &energies, turning, Share { left: LEFT, most: usize::MAX })
    }

    /// The tokens whose keys [`KeyBias::of_mean`] takes.
    #[must_use]
    pub fn mean_tokens(config: &ModelConfig) -> Vec<u32> {
        let vocabulary = u64::try_from(config.vocab_size.max(1)).unwrap_or(u64::MAX);
        // Steps of the golden section: far apart, and hardly one of them twice.
        let token = |i: u64| u32::try_from(i.wrapping_mul(0x9E37_79B9_7F4A_7C15) % vocabulary).unwrap_or(0);
        (1..=TOKENS as u64).map(token).collect()
    }

    /// The choice for what the keys of layer `index` share: `keys`, (position, kv head,
    /// `head_dim`), are turned for a context of `capacity`, the first of them at position 0. `None`
    /// when all can stay as it is.
    #[must_use]
    pub fn of_mean(config: &ModelConfig, index: usize, capacity: usize, keys: &[f32]) -> Option<Self> {
        let dims = [config.num_key_value_heads, config.head_dim];
        config.layers[index].rope.then(|| Self::of_turned(&rope_of(config, index), dims, capacity, keys))?
    }

    /// Adds what `keys`, (position, kv head, `head_dim`), the first of them at position 0, were
    /// stored without in layer `index` of a context of `capacity`.
    pub fn give_back(&self, config: &ModelConfig, index: usize, capacity: usize, keys: &mut [f32]) {
        let (half, rope) = (config.head_dim / 2, rope_of(config, index));
        let (mut cos, mut sin) = (vec![1.0; half], vec![0.0; half]);
        let vectors = Vectors::scalar();
        for (position, row) in keys.chunks_exact_mut(self.shift.len()).enumerate().skip(self.first()) {
            if config.layers[index].rope {
                rope.fill(position, capacity, &mut cos, &mut sin);
            }
            let mut kept: Vec<f32> = self.shift.iter().map(|shift| -shift).collect();
            vectors.rotate(&mut kept, &cos, &sin);
            vectors.add(&kept, row);
        }
    }

    /// The choice for `bias`, (kv head, head_dim), where the weights give a key of each head so
    /// much `energy` (the sum of its squares) and the first `turning` planes turn; `None` when all
    /// can stay as it is.
    pub(crate) fn new(bias: &[f32], energies: &[f64], turning: usize, share: Share) -> Option<Self> {
        let d = bias.len() / energies.len().max(1);
        let half = d / 2;
        let mut out = Self { shift: vec![0.0; bias.len()], heads: Vec::new(), most: 0, mean: false };
        for ((bias, shift), energy) in bias.chunks_exact(d).zip(out.shift.chunks_exact_mut(d)).zip(energies) {
            let of = |plane: usize| [bias[plane], bias[plane + half]];
            let square = |plane: usize| of(plane).iter().map(|b| f64::from(*b).powi(2)).sum::<f64>();
            let mut planes: Vec<usize> = (0..turning).collect();
            // A stable order: equal ones by their place.
            planes.sort_by(|&a, &b| square(b).total_cmp(&square(a)));
            let mut left: f64 = planes.iter().map(|&p| square(p)).sum();
            let mut count = 0;
            while count < turning.min(share.most) && left > share.left * energy {
                count += 1;
                // Summed anew: differences would leave rounding errors of the largest.
                left = planes[count..].iter().map(|&p| square(p)).sum();
            }
            planes.truncate(count);
            planes.sort_unstable();
            for &plane in planes.iter().chain(&(turning..half).collect::<Vec<_>>()) {
                (shift[plane], shift[plane + half]) = (-bias[plane], -bias[plane + half]);
            }
            out.most = out.most.max(count);
            out.heads.push(HeadBias { bias: planes.iter().map(|&p| of(p)).collect(), planes });
        }
        out.shift.iter().any(|s| *s != 0.0).then_some(out)
    }

    /// The choice for what the keys of a layer share: `keys`, (position, kv head, head_dim), are
    /// turned for a context of `capacity`.
    #[expect(clippy::cast_precision_loss, reason = "means of few numbers")]
    fn of_turned(rope: &Rope, [heads, d]: [usize; 2], capacity: usize, keys: &[f32]) -> Option<Self> {
        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
        let mut rows = Vec::with_capacity(keys.len());
        for (position, row) in keys.chunks_exact(d * heads).enumerate().skip(1) {
            rope.fill(position, capacity, &mut cos, &mut sin);
            for head in row.chunks_exact(d) {
                // Turned back. RoPE may lengthen a key as well.
                let back = |i: usize| {
                    let (p, x) = (i % (d / 2), f64::from(head[i]));
                    let (c, s) = (f64::from(cos[p]), f64::from(sin[p]));
                    let other = f64::from(head[(i + d / 2) % d]);
                    let turned = if i < d / 2 { x * c + other * s } else { x * c - other * s };
                    turned / (c * c + s * s)
                };
                rows.extend((0..d).map(back));
            }
        }
        let count = rows.len() / (d * heads).max(1);
        if count == 0 {
            return None;
        }
        let mut means = vec![0.0; d * heads];
        for row in rows.chunks_exact(d * heads) {
            means.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / count as f64);
        }
        let mut energies = vec![0.0; heads];
        for row in rows.chunks_exact(d * heads) {
            for ((energy, row), means) in
                energies.iter_mut().zip(row.chunks_exact(d)).zip(means.chunks_exact(d))
            {
                let apart = row.iter().zip(means).map(|(x, mean)| (x - mean).powi(2));
                *energy += apart.sum::<f64>() / count as f64;
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let means: Vec<f32> = means.into_iter().map(|mean| mean as f32).collect();
        // Also planes that stand still: the first position is without them.
        let share = Share { left: LEFT_OF_MEAN, most: MOST };
        Some(Self { mean: true, ..Self::new(&means, &energies, d / 2, share)? })
    }

    /// Whether a cache of this kind goes without it.
    pub(crate) fn concerns(&self, kind: KvType) -> bool {
        if self.mean { kind == KvType::I4 } else { kind.rotates_heads() }
    }

    /// The first position that it is taken from: 1 of means, 0 of biases.
    #[must_use]
    pub fn first(&self) -> usize {
        usize::from(self.mean)
    }

    /// Factors of cosine and sine for a turned query: (plane, 2) of `head`, into the first part of
    /// `out`.
    pub(crate) fn factors(&self, head: usize, query: &[f32], scale: f32, out: &mut [f32]) {
        let half = query.len() / 2;
        let HeadBias { planes, bias } = &self.heads[head];
        for ((&plane, &[x, y]), out) in planes.iter().zip(bias).zip(out.as_chunks_mut::<2>().0) {
            let (a, b) = (query[plane] * scale, query[plane + half] * scale);
            *out = [a * x + b * y, b * x - a * y];
        }
    }
}

impl Model {
    /// What a layer's cache holds of the first `tokens` of those in a state, as (positions, kv
    /// heads, head_dim): keys behind RoPE, and values; both with the errors of the cache's type.
    /// `None` where the model has no such layer.
    #[must_use]
    pub fn cached(&self, state: &State, layer: usize, tokens: usize) -> Option<Features> {
        let mut features = state.cached(layer, tokens)?;
        let kind = state.layout().kind;
        let constants = self.key_biases(kind).and_then(|biases| biases.layers[layer].as_ref());
        if let Some(constants) = constants.filter(|constants| constants.concerns(kind)) {
            constants.give_back(&self.config, layer, state.capacity(), &mut features.keys);
        }
        Some(features)
    }

    /// What caches of a kind do about large constants of keys. Where these are means, the first
    /// call runs the model.
    pub(crate) fn key_biases(&self, kind: KvType) -> Option<&KeyBiases> {
        if self.config.qkv_bias {
            return kind.rotates_heads().then(|| self.key_biases.get_or_init(|| KeyBiases::of(self)));
        }
        (kind == KvType::I4).then(|| self.key_means.get_or_init(|| KeyBiases::of_means(self)))
    }
}

/// Cosines and sines of all planes: of the first position of each page of a state, and of the
/// positions of a page counted from there. The sum of both angles is that of a position.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    planes: usize,
    /// Lengthened where RoPE lengthens keys.
    firsts: Vec<f32>, // (page, plane, 2)
    within: Vec<f32>, // (block, plane, 2, KEY_BLOCK)
}

impl Angles {
    /// From now on it grows, with so many planes.
    pub(crate) fn want(&mut self, planes: usize) {
        self.planes = planes;
    }

    /// Room for `positions`, where it is wanted.
    pub(crate) fn grow(&mut self, positions: usize) -> Result<(), TryReserveError> {
        let len = positions.div_ceil(PAGE).saturating_mul(2 * self.planes);
        self.firsts.try_reserve(len.saturating_sub(self.firsts.len()))
    }

    /// Writes those of the first `positions` in a context of `capacity`, as far as they are
    /// missing: a state that shares the pages of another has not run their tokens.
    pub(crate) fn reach(
        &mut self,
        positions: usize,
        rope: &Rope,
        capacity: usize,
    ) -> Result<(), TryReserveError> {
        self.grow(positions)?;
        let planes = self.planes;
        let (mut cos, mut sin) = ([0.0; MAX_HEAD_DIM / 2], [0.0; MAX_HEAD_DIM / 2]);
        let (cos, sin) = (&mut cos[..planes], &mut sin[..planes]);
        if self.within.is_empty() {
            self.within.try_reserve(2 * planes * PAGE)?;
            self.within.resize(2 * planes * PAGE, 0.0);
            rope.fill(0, capacity, cos, sin);
            let mut lengths = [0.0; MAX_HEAD_DIM / 2];
            lengths[..planes].copy_from_slice(cos);
            for position in 0..PAGE {
                rope.fill(position, capacity, cos, sin);
                let (block, at) = (position / KEY_BLOCK, position % KEY_BLOCK);
                for plane in 0..planes {
                    let row = 2 * (block * planes + plane) * KEY_BLOCK + at;
                    self.within[row] = cos[plane] / lengths[plane];
                    self.within[row + KEY_BLOCK] = sin[plane] / lengths[plane];
                }
            }
        }
        let held = self.firsts.len() / (2 * planes).max(1);
        for page in held..positions.div_ceil(PAGE) {
            rope.fill(page * PAGE, capacity, cos, sin);
            self.firsts.extend(cos.iter().zip(&*sin).flat_map(|(&c, &s)| [c, s]));
        }
        Ok(())
    }

    /// Those of some planes within a page: (block, plane, 2, KEY_BLOCK).
    fn gather(&self, planes: &[usize], out: &mut [f32]) {
        let row = 2 * KEY_BLOCK;
        let blocks = self.within.chunks_exact(self.planes * row);
        for (all, out) in blocks.zip(out.chunks_exact_mut(planes.len() * row)) {
            for (&plane, out) in planes.iter().zip(out.chunks_exact_mut(row)) {
                out.copy_from_slice(&all[plane * row..][..row]);
            }
        }
    }

    /// Those of the first position of a page, (plane, 2).
    fn first(&self, page: usize) -> &[[f32; 2]] {
        &self.firsts.as_chunks().0[page * self.planes..][..self.planes]
    }
}

/// Work space of a thread.
pub(crate) struct Work {
    /// (block, plane, 2, KEY_BLOCK)
    angles: [f32; 2 * TOGETHER * PAGE],
    /// (query, plane, 2)
    factors: [f32; 2 * TOGETHER * QUERIES],
    /// (query, position of a page)
    scores: [f32; QUERIES * PAGE],
}

impl Work {
    pub(crate) const NEW: Self = Self {
        angles: [0.0; 2 * TOGETHER * PAGE],
        factors: [0.0; 2 * TOGETHER * QUERIES],
        scores: [0.0; QUERIES * PAGE],
    };
}

/// A layer's part of the scores of some queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BiasScores<'a> {
    pub(crate) bias: &'a KeyBias,
    /// What [`KeyBias::factors`] says of all queries: (query, `2 * most`)
    pub(crate) factors: &'a [f32],
    /// Which of a state's tables.
    pub(crate) table: usize,
}

impl BiasScores<'_> {
    /// Adds it to `scores`, (query, [`CHUNK`]), of some queries of a head, counted from the first
    /// one of all heads, at `positions`, the first one that of a page.
    pub(crate) fn add(
        self,
        vectors: &Vectors,
        angles: &[Angles; 2],
        (head, queries): (usize, Range<usize>),
        positions: Range<usize>,
        work: &mut Work,
        scores: &mut [f32],
    ) {
        let (each, angles) = (2 * self.bias.most, &angles[self.table]);
        let (first, count) = (queries.start, queries.len());
        for (nth, planes) in self.bias.heads[head].planes.chunks(TOGETHER).enumerate() {
            let dim = 2 * planes.len();
            let keys = &mut work.angles[..dim * PAGE];
            angles.gather(planes, keys);
            let queries = &mut work.factors[..count * dim];
            for at in positions.clone().step_by(PAGE) {
                // Turned to where the page begins, which is cheaper than angles of all positions.
                let firsts = angles.first(at / PAGE);
                for (q, to) in queries.chunks_exact_mut(dim).enumerate() {
                    let from = &self.factors[(first + q) * each + nth * 2 * TOGETHER..][..dim];
                    let both = from.as_chunks::<2>().0.iter().zip(to.as_chunks_mut::<2>().0);
                    for (&plane, (&[a, b], to)) in planes.iter().zip(both) {
                        let [cos, sin] = firsts[plane];
                        *to = [a * cos + b * sin, b * cos - a * sin];
                    }
                }
                let width = PAGE.min(positions.end - at).next_multiple_of(KEY_BLOCK);
                let args = FloatScores { queries, dim, keys: &keys[..dim * width], stride: PAGE };
                vectors.float_scores(&args, &mut work.scores);
                if at < self.bias.first() {
                    work.scores.chunks_mut(PAGE).take(count).for_each(|scores| scores[0] = 0.0);
                }
                let place = at - positions.start;
                for (from, to) in work.scores.chunks(PAGE).zip(scores.chunks_mut(CHUNK)).take(count) {
                    vectors.add(&from[..width], &mut to[place..][..width]);
                }
            }
        }
    }
}

#[cfg(test)]
impl Work {
    pub(crate) fn poison(&mut self) {
        self.angles.fill(f32::NAN);
        self.factors.fill(f32::NAN);
        self.scores.fill(f32::NAN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Share = Share { left: LEFT, most: usize::MAX };

    #[test]
    fn the_largest_planes_are_kept_apart_and_those_that_stand_still() {
        // Two heads of four planes, the last of which stands still.
        let mut bias = [0.5f32; 16];
        (bias[1], bias[5]) = (300.0, -2.0); // plane 1 of the first head
        (bias[2], bias[6]) = (3.0, 4.0); // plane 2: energy 25
        let of = |energies: [f64; 2], turning| KeyBias::new(&bias, &energies, turning, ALL).unwrap();

        // Left of the first head: 25.5 and then .5 in plane 0; of the second 1.5 in three planes.
        let all_small = of([102.0, 6.0], 3);
        assert_eq!(all_small.heads[0].planes, [1]);
        assert_eq!(all_small.heads[0].bias, [[300.0, -2.0]]);
        assert!(all_small.heads[1].planes.is_empty());
        assert_eq!(all_small.most, 1);
        let mut shift = [0.0; 16];
        (shift[1], shift[5]) = (-300.0, 2.0);
        for standing in [3, 7, 11, 15] {
            shift[standing] = -0.5;
        }
        assert_eq!(all_small.shift, shift);

        let tighter = of([101.9, 5.9], 3);
        assert_eq!(tighter.heads[0].planes, [1, 2]);
        // Of equal ones the first.
        assert_eq!(tighter.heads[1].planes, [0]);
        // Weights that give nothing leave no bias.
        assert_eq!(of([0.0, 0.0], 3).heads[1].planes, [0, 1, 2]);
        // Without RoPE all are dropped, and no score needs them.
        let dropped = of([0.0, 0.0], 0);
        assert_eq!((dropped.most, dropped.shift), (0, bias.map(|b| -b).to_vec()));

        assert_eq!(KeyBias::new(&bias, &[1e9; 2], 4, ALL), None);
        assert_eq!(KeyBias::new(&[0.0; 16], &[0.0; 2], 3, ALL), None);
    }

    #[test]
    fn the_mean_of_turned_keys_is_found() {
        let json =
            br#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "head_dim": 16, "vocab_size": 10, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true}"#;
        let rope = Rope::new(&ModelConfig::parse(json, "config.json".as_ref()).unwrap().rope);
        let (d, capacity, positions) = (16, 64, 40);
        let number = |i: usize| ((i * 37 % 19) as f32 - 9.0) / 9.0;
        let mut mean: Vec<f32> = (0..2 * d).map(|i| 3.0 * number(i + 5)).collect();
        mean[d..].fill(0.0);
        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
        let mut keys = Vec::new();
        for position in 0..positions {
            let noise = |i: usize| number(position * 7 + i * 3) * 0.2;
            // The first one is far away and does not count.
            let shared = if position == 0 { 50.0 } else { 1.0 };
            let mut row: Vec<f32> = mean.iter().enumerate().map(|(i, m)| shared * m + noise(i)).collect();
            rope.fill(position, capacity, &mut cos, &mut sin);
            Vectors::scalar().rotate(&mut row, &cos, &sin);
            keys.extend(row);
        }
        let found = KeyBias::of_turned(&rope, [2, d], capacity, &keys).expect("a large mean");
        assert!(found.mean && found.first() == 1 && found.concerns(KvType::I4));
        assert!(!found.concerns(KvType::I8) && !found.concerns(KvType::I6) && !found.concerns(KvType::I16));
        assert!(found.heads[1].planes.is_empty() && !found.heads[0].planes.is_empty());
        for &plane in &found.heads[0].planes {
            for at in [plane, plane + d / 2] {
                assert!((found.shift[at] + mean[at]).abs() < 0.1, "{at}: {} {}", found.shift[at], mean[at]);
            }
        }
        assert_eq!(KeyBias::of_turned(&rope, [2, d], capacity, &keys[..2 * d]), None, "the first one alone");
    }

    #[test]
    fn a_score_is_the_sum_of_both_parts() {
        let (d, position) = (8, 5);
        let number = |i: usize| ((i * 37 % 19) as f32 - 9.0) / 4.0;
        let query: Vec<f32> = (0..d).map(number).collect();
        let bias: Vec<f32> = (0..d).map(|i| 100.0 * number(i + 3)).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            (0..d / 2).map(|p| 0.7 * (p + 1) as f32 * position as f32).map(|a| (a.cos(), a.sin())).unzip();
        let own = KeyBias::new(&bias, &[0.0], d / 2, ALL).unwrap();
        let mut factors = vec![0.0; d];
        own.factors(0, &query, 0.5, &mut factors);
        let got: f32 = (0..d / 2).map(|p| factors[2 * p] * cos[p] + factors[2 * p + 1] * sin[p]).sum();
        let mut turned = bias;
        Vectors::scalar().rotate(&mut turned, &cos, &sin);
        let want: f32 = query.iter().zip(&turned).map(|(q, b)| 0.5 * q * b).sum();
        assert!((got - want).abs() < 1e-4 * want.abs().max(1.0), "{got} {want}");
    }
}
