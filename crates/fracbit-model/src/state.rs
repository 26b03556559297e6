//! What one sequence needs beside the model: its cache and work space.

use std::ops::Range;

use fracbit_io::ModelConfig;
use fracbit_kernels::{Numbers, Precision, Team, Vectors};
use fracbit_rotation::Rotation;
use fracbit_schedule::Features;

use crate::Error;
use crate::attention::work_len;
use crate::experts::Work;
use crate::key_bias::{Angles, KeyBiases};
use crate::kv::{CachedRows, KvLayout, KvType, PAGE};
use crate::linear::LinearScratch;
use crate::pages::{HostMemory, KvPage, KvPool, PageList};

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
    pub bf16: bool,
    /// What is read of nested weights until [`State::set_precision`] says otherwise.
    pub precision: Precision,
}

impl Default for StateOptions {
    fn default() -> Self {
        Self { context: None, kv: KvType::I16, chunk: 256, bf16: false, precision: Precision::FULL }
    }
}

/// Cache and work space of one sequence; made by [`crate::Model::state`].
#[derive(Debug)]
pub struct State {
    cache: PageList<HostMemory>,
    pub(crate) scratch: Scratch,
    /// Of queries and keys of every head, where the cache wants them so.
    pub(crate) head_rotation: Option<Rotation>,
    /// Of all layers, or those without a window and those with one; where the model has large
    /// biases of keys.
    pub(crate) angles: [Angles; 2],
    shape: StateShape,
    chunk: usize,
    precision: Precision,
    /// Its rows among those of the step that runs, or ran last.
    rows: Range<usize>,
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
    pub(crate) fn new(config: &ModelConfig, options: &StateOptions, pool: KvPool) -> Self {
        let capacity = options.context.unwrap_or(config.max_position_embeddings);
        let mut scratch = Scratch::default();
        scratch.linear.bf16 = options.bf16;
        Self {
            head_rotation: pool.kind().rotates_heads().then(|| {
                Rotation::new(config.head_dim, 0, 0).expect("heads are narrow enough to be rotated")
            }),
            cache: PageList::new(pool, capacity),
            scratch,
            angles: Default::default(),
            shape: StateShape::of(config),
            chunk: options.chunk.max(1),
            precision: options.precision,
            rows: 0..0,
        }
    }

    /// Takes pages for `tokens` more, up to the capacity, so that running them does not allocate
    /// cache. Pages that are to be written and that others hold too are given up for copies.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::CacheFull`]; the state then holds the tokens that it held, and
    /// keeps the pages that it got.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        self.cache.reserve(tokens)?;
        self.grow_angles()
    }

    /// Pages that [`reserve`](Self::reserve) would take from the pool.
    #[must_use]
    pub fn pages_wanted(&self, tokens: usize) -> usize {
        self.cache.wanted(tokens)
    }

    /// The pages of the tokens that it holds; the last one may not be whole.
    #[must_use]
    pub fn pages(&self) -> &[KvPage] {
        self.cache.pages()
    }

    /// Makes it hold the first `len` tokens of another state's [`pages`](Self::pages) in place of
    /// its own: the two share them until one writes to them. Both should be of one model and
    /// precision.
    ///
    /// # Errors
    /// [`Error::Pages`] when they are of another pool or are not those of `len` tokens, or when
    /// these do not fit.
    pub fn share(&mut self, pages: &[KvPage], len: usize) -> Result<(), Error> {
        self.cache.share(pages, len)
    }

    pub(crate) fn list(&self) -> &PageList<HostMemory> {
        &self.cache
    }

    pub(crate) fn list_mut(&mut self) -> &mut PageList<HostMemory> {
        &mut self.cache
    }

    /// Where its pages are from.
    #[must_use]
    pub fn pool(&self) -> &KvPool {
        self.cache.pool()
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.cache.pool().layout()
    }

    /// The keys of a head on page `at`, its first `count` positions, whole blocks.
    pub(crate) fn keys(&self, layer: usize, head: usize, at: usize, count: usize) -> CachedRows<'_> {
        self.layout().keys(self.cache.reserved()[at].lines(), layer, head, count)
    }

    /// The values of a head on page `at`, its first `count` positions, and one more where that is
    /// odd.
    pub(crate) fn values(&self, layer: usize, head: usize, at: usize, count: usize) -> CachedRows<'_> {
        self.layout().values(self.cache.reserved()[at].lines(), layer, head, count)
    }

    /// Writes keys and values of a layer, (rows, kv head, head_dim), behind the tokens that are
    /// held. There should be [room](Self::reserve).
    pub(crate) fn write(&mut self, layer: usize, with: (&Vectors, &Team<'_>), keys: &[f32], values: &[f32]) {
        let layout = self.layout();
        let width = layout.kv_heads * layout.head_dim;
        let held = self.len();
        let (mut position, end) = (held, held + keys.len() / width);
        while position < end {
            let (page, first) = (position / PAGE, position % PAGE);
            let next = end.min((page + 1) * PAGE);
            let rows = (position - held) * width..(next - held) * width;
            let lines = self.cache.lines_mut(page).expect("reserved pages are held alone");
            layout.write(lines, layer, with, first, [&keys[rows.clone()], &values[rows]]);
            position = next;
        }
    }

    /// From now on there is room for the angles that a model's biases of keys want.
    pub(crate) fn want_angles(&mut self, biases: &KeyBiases) {
        let planes = self.shape.head_dim / 2;
        let wanted = self.angles.iter_mut().zip(biases.tables).filter(|(_, wanted)| *wanted);
        wanted.for_each(|(angles, _)| angles.want(planes));
    }

    /// Room for as many of them as there are pages.
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
        // For large constants of keys, which only the model knows: tables of all planes for every
        // RoPE, for each page and within one.
        let constants = options.kv == KvType::I4 || options.kv.rotates_heads() && config.qkv_bias;
        let tables = match (constants, &config.local_rope) {
            (false, _) => 0,
            (true, None) => 1,
            (true, Some(_)) => 2,
        };
        let positions = capacity.checked_next_multiple_of(PAGE).unwrap_or(capacity);
        let angles = tables * config.head_dim * size_of::<f32>();
        position.saturating_mul(positions).saturating_add(angles.saturating_mul(positions / PAGE + PAGE))
    }

    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// True when no token was run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Most tokens it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Positions that the cache has room for now.
    pub(crate) fn room(&self) -> usize {
        self.cache.reserved().len() * PAGE
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
        self.cache.truncate(len);
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.cache.truncate(0);
    }

    /// Gives each state its rows of a step, in the order of states.
    pub(crate) fn deal_rows(states: &mut [Self], counts: &[usize]) {
        let mut first = 0;
        for (state, count) in states.iter_mut().zip(counts) {
            state.rows = first..first + count;
            first += count;
        }
    }

    /// Its rows of the step that runs, or ran last.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Whose a row of the step is, and its position in that sequence.
    pub(crate) fn of_row(states: &[Self], row: usize) -> (&Self, usize) {
        let state = &states[states.partition_point(|state| state.rows.end <= row)];
        (state, state.len() + row - state.rows.start)
    }

    /// Holds the rows of the step.
    pub(crate) fn advance(&mut self) {
        self.cache.advance(self.rows.len());
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
pub(crate) struct RopeTables {
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
    pub(crate) rope: [RopeTables; 2], // of all layers, or those without a window and those with one
    pub(crate) head: Vec<f32>,        // (rows of logits, hidden)
    pub(crate) rotation: Vec<f32>,    // one row's scratch
    pub(crate) work: Vec<f32>,        // of attention
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
        for RopeTables { cos, sin } in &mut self.rope[..sets] {
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

impl State {
    /// [`Model::cached`](crate::Model::cached) without what keys of few bits are stored without.
    pub(crate) fn cached(&self, layer: usize, tokens: usize) -> Option<Features> {
        let layout = self.layout();
        if layer >= layout.layers {
            return None;
        }
        let (heads, width) = (layout.kv_heads, layout.head_dim);
        let mut features = Features::default();
        for position in 0..tokens.min(self.len()) {
            let (page, at) = (self.cache.reserved()[position / PAGE].lines(), position % PAGE);
            for head in 0..heads {
                features.keys.extend((0..width).map(|i| layout.key(page, layer, head, at, i)));
                features.values.extend((0..width).map(|i| layout.value(page, layer, head, at, i)));
            }
        }
        if let Some(rotation) = &self.head_rotation {
            rotation.apply_rows_inverse(&mut features.keys);
        }
        Some(features)
    }
}

#[cfg(test)]
impl State {
    /// One number of a key of the first layer.
    pub(crate) fn key(&self, head: usize, position: usize, i: usize) -> f32 {
        self.layout().key(self.cache.reserved()[position / PAGE].lines(), 0, head, position % PAGE, i)
    }

    /// One number of a value of the first layer.
    pub(crate) fn value(&self, head: usize, position: usize, i: usize) -> f32 {
        self.layout().value(self.cache.reserved()[position / PAGE].lines(), 0, head, position % PAGE, i)
    }
}
