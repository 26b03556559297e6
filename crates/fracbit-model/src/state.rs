//! What one sequence needs beside the model: its cache and work space.

use fracbit_io::ModelConfig;
use fracbit_kernels::{Numbers, Precision};
use fracbit_rotation::Rotation;

use crate::Error;
use crate::attention::work_len;
use crate::experts::Work;
use crate::key_bias::{Angles, KeyBiases};
use crate::kv::{KvLayer, KvType};
use crate::linear::LinearScratch;

/// How to make a [`State`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateOptions {
    /// Most tokens it can hold; `None`: the model's `max_position_embeddings`. More than that is
    /// allowed, at the caller's judgement: the model was not trained for it. With `longrope`
    /// frequencies (Phi) a state that may hold more than the original context takes those of long
    /// texts from its first token on.
    pub context: Option<usize>,
    /// Element type of the cache.
    pub kv: KvType,
    /// Tokens run together in prefill, at least 1: the more, the less weights have to be expanded
    /// or converted, and the less of what lies between two layers stays in a cache. 256 suit packed
    /// weights, 512 dense ones.
    pub chunk: usize,
    /// Whether dense weights and what they are multiplied with may be rounded to bf16 in prefill,
    /// where that is faster: for statistics and training, not for what is compared digit by digit.
    pub coarse: bool,
    /// What is read of nested weights until [`State::set_precision`] says otherwise.
    pub precision: Precision,
}

impl Default for StateOptions {
    fn default() -> Self {
        Self { context: None, kv: KvType::I16, chunk: 256, coarse: false, precision: Precision::FULL }
    }
}

/// Positions that the cache grows by at least.
const STEP: usize = 64;

/// Cache and work space of one sequence; made by [`crate::Model::state`].
#[derive(Debug)]
pub struct State {
    pub(crate) layers: Vec<KvLayer>,
    pub(crate) scratch: Scratch,
    /// Of queries and keys of every head, where the cache wants them so.
    pub(crate) turn: Option<Rotation>,
    /// Of all layers, or those without a window and those with one; where the model has large
    /// biases of keys.
    pub(crate) angles: [Angles; 2],
    shape: StateShape,
    capacity: usize,
    len: usize,
    chunk: usize,
    precision: Precision,
}

/// The sizes of a model that a state depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StateShape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    q_dim: usize,
    hidden: usize,
    intermediate: usize,
}

impl StateShape {
    fn of(config: &ModelConfig) -> Self {
        Self {
            layers: config.num_hidden_layers(),
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            q_dim: config.q_dim(),
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
        }
    }
}

impl std::fmt::Display for StateShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layers, kv_heads, head_dim, q_dim, hidden, intermediate } = self;
        write!(
            f,
            "{layers} layers of {hidden}, queries {q_dim}, {kv_heads} kv heads of {head_dim}, mlp {intermediate}"
        )
    }
}

impl State {
    pub(crate) fn new(config: &ModelConfig, options: &StateOptions) -> Self {
        let capacity = options.context.unwrap_or(config.max_position_embeddings);
        let layer = || KvLayer::new(options.kv, config.num_key_value_heads, config.head_dim);
        let mut scratch = Scratch::default();
        scratch.linear.coarse = options.coarse;
        Self {
            layers: (0..config.num_hidden_layers()).map(|_| layer()).collect(),
            scratch,
            turn: options.kv.turns().then(|| {
                Rotation::new(config.head_dim, 0, 0).expect("heads are narrow enough to be rotated")
            }),
            angles: Default::default(),
            shape: StateShape::of(config),
            capacity,
            len: 0,
            chunk: options.chunk.max(1),
            precision: options.precision,
        }
    }

    /// Makes room for `tokens` more, up to the capacity, so that running them does not allocate
    /// cache.
    ///
    /// # Errors
    /// [`Error::Memory`]; the state then holds what it held, and keeps the memory that it got.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        let want = self.len.saturating_add(tokens).min(self.capacity);
        let have = self.layers.iter().map(|l| l.capacity).min().unwrap_or(want);
        if want <= have {
            return Ok(());
        }
        let room = want.max(have.saturating_mul(2)).saturating_add(STEP - 1) / STEP * STEP;
        let room = room.min(self.capacity);
        for layer in &mut self.layers {
            layer.grow(room).map_err(|source| Error::Memory { tokens: room, source })?;
        }
        self.grow_angles()
    }

    /// From now on there is room for the angles that a model's biases of keys want.
    pub(crate) fn want_angles(&mut self, biases: &KeyBiases) {
        let planes = self.shape.head_dim / 2;
        let wanted = self.angles.iter_mut().zip(biases.tables).filter(|(_, wanted)| *wanted);
        wanted.for_each(|(angles, _)| angles.want(planes));
    }

    /// As many positions for them as the layers have.
    pub(crate) fn grow_angles(&mut self) -> Result<(), Error> {
        let room = self.room();
        let grown = self.angles.iter_mut().try_for_each(|angles| angles.grow(room));
        grown.map_err(|source| Error::Memory { tokens: room, source })
    }

    /// Bytes of the cache of a full state with these options, at most.
    #[must_use]
    pub fn cache_bytes(config: &ModelConfig, options: &StateOptions) -> usize {
        let capacity = options.context.unwrap_or(config.max_position_embeddings);
        let pair = options.kv.pair_bytes(config.head_dim);
        let position = config.num_hidden_layers() * config.num_key_value_heads * pair;
        // For large biases of keys, which only the model knows: a table of all planes for every
        // RoPE.
        let tables = match (options.kv.turns() && config.qkv_bias, &config.local_rope) {
            (false, _) => 0,
            (true, None) => 1,
            (true, Some(_)) => 2,
        };
        let angles = tables * config.head_dim * size_of::<f32>();
        (position + angles).saturating_mul(capacity)
    }

    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when no token was run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions that the cache has room for now.
    pub(crate) fn room(&self) -> usize {
        self.layers.iter().map(|l| l.capacity).max().unwrap_or(0)
    }

    /// Tokens run together in prefill.
    #[must_use]
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// What the next tokens read of nested weights; the cache stays as it is.
    pub fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// What tokens read of nested weights.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Forgets all tokens but the first `len`; does nothing when there are no more.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    pub(crate) fn advance(&mut self, rows: usize) {
        self.len += rows;
    }

    pub(crate) fn check_model(&self, config: &ModelConfig) -> Result<(), Error> {
        let want = StateShape::of(config);
        if want == self.shape {
            return Ok(());
        }
        Err(Error::State { want: want.to_string(), got: self.shape.to_string() })
    }
}

/// Cosines and sines of some rows, (rows, head_dim / 2) each.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

/// Buffers of a forward pass; each grows to its largest use and stays.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) x: Numbers<f32>,       // (rows, hidden): the residual stream
    pub(crate) n: Numbers<f32>,       // (rows, hidden)
    pub(crate) branch: Numbers<f32>,  // (rows, hidden), where norms follow attention and MLP
    pub(crate) q: Numbers<f32>,       // (rows, q_dim)
    pub(crate) k: Numbers<f32>,       // (rows, kv_dim)
    pub(crate) v: Numbers<f32>,       // (rows, kv_dim)
    pub(crate) grouped: Numbers<f32>, // (kv head, rows, group, head_dim)
    pub(crate) factors: Numbers<f32>, // (kv head, rows, group, planes, 2): of large biases of keys
    pub(crate) gate: Numbers<f32>,    // (rows, or experts of all rows; intermediate)
    pub(crate) up: Numbers<f32>,      // the same
    pub(crate) experts: Work,
    pub(crate) turns: [Turns; 2], // of all layers, or those without a window and those with one
    pub(crate) head: Vec<f32>,    // (rows of logits, hidden)
    pub(crate) rotation: Vec<f32>, // one row's scratch
    pub(crate) work: Vec<f32>,    // of attention
    pub(crate) linear: LinearScratch,
}

impl Scratch {
    /// Room for `rows` rows in states of `capacity` positions.
    pub(crate) fn ensure(&mut self, config: &ModelConfig, rotation: usize, rows: usize, capacity: usize) {
        let grow = |buffer: &mut Numbers<f32>, width: usize| {
            if buffer.len() < rows * width {
                buffer.renew(rows * width);
            }
        };
        let work = work_len(rows, config.num_attention_heads, config.head_dim, capacity);
        if self.work.len() < work {
            self.work.resize(work, 0.0);
        }
        self.ensure_rotation(rotation);
        grow(&mut self.x, config.hidden_size);
        grow(&mut self.n, config.hidden_size);
        grow(&mut self.q, config.q_dim());
        grow(&mut self.k, config.kv_dim());
        grow(&mut self.v, config.kv_dim());
        grow(&mut self.grouped, config.q_dim());
        let active = config.experts.map_or(1, |experts| experts.active);
        grow(&mut self.gate, active * config.intermediate_size);
        grow(&mut self.up, active * config.intermediate_size);
        if let Some(experts) = config.experts {
            self.experts.ensure(experts, rows, config.hidden_size);
        }
        if config.post_norms {
            grow(&mut self.branch, config.hidden_size);
        }
        let sets = if config.local_rope.is_some() { 2 } else { 1 };
        for Turns { cos, sin } in &mut self.turns[..sets] {
            for angles in [cos, sin] {
                angles.resize(angles.len().max(rows * config.head_dim / 2), 0.0);
            }
        }
    }

    /// The state may come from a model of this shape without rotations.
    pub(crate) fn ensure_rotation(&mut self, len: usize) {
        if self.rotation.len() < len {
            self.rotation.resize(len, 0.0);
        }
    }

    /// `source` copied into a buffer that keeps its memory.
    pub(crate) fn copy<'a>(buffer: &'a mut Vec<f32>, source: &[f32]) -> &'a mut [f32] {
        buffer.clear();
        buffer.extend_from_slice(source);
        buffer
    }
}
