//! The decoder: embedding, blocks of attention and SwiGLU, final norm, head.
//!
//! ```text
//! x = E[token]
//! each block:   x += O attend(rope(norm(Q n)), rope(norm(K n)), V n),   n = rms_norm(x)
//!               x += Down(f(Gate n) ∘ Up n),                            n = rms_norm(x)
//! logits = Head rms_norm(x)
//! ```
//!
//! One graph serves all families: what differs (biases, norms of queries and keys and of what is
//! added to x, layers without RoPE or with one of their own, windows, the function of the gate,
//! experts in place of the MLP) is in [`fracbit_io::ModelConfig`]. Where rotations go is in
//! [`crate::rotations`]. A weight matrix is a [`Linear`] and may be dense or packed, each on its
//! own.
//!
//! Memory: the weights, and per [`State`] the cache and, for each token of a chunk, about twice the
//! widths of the residual stream, the queries, the keys and the MLP in floats. Prefill runs in
//! chunks of [`StateOptions::chunk`] tokens; decoding is a chunk of one, or of up to eight where a
//! generation guesses, and allocates nothing but cache (see [`State::reserve`]) once a chunk of its
//! size has run.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use fracbit_base::{Rate, Scheme, ShapeError};
use fracbit_io::{ModelConfig, QkNorm};
use fracbit_kernels::{Gate, Kernels, Precision, Team, Vectors, with_team};
use fracbit_schedule::Scheduler;

use crate::Error;
use crate::attention::Attention;
use crate::block::BlockInput;
use crate::builder::{ModelBuilder, check_linear};
use crate::id::{FloatId, LayerLinear, LinearId};
use crate::key_bias::{BiasScores, KeyBiases};
use crate::linear::Linear;
use crate::pages::KvPool;
use crate::rope::Rope;
use crate::rotations::{self, HeadRotation, OnlineRotations};
use crate::runtime::tokens_of_each;
use crate::source::WeightSource;
use crate::state::{RopeTables, Scratch, State, StateOptions};

/// A decoder ready to run. Immutable in use: many threads may run it, each with its own [`State`].
///
/// A clone shares the weight matrices: a baseline and its copy with one layer replaced take the
/// memory of one model and one layer.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) rotations: OnlineRotations,
    pub(crate) rope: Rope,
    pub(crate) local_rope: Option<Rope>, // of layers with a window
    pub(crate) eps: f32,
    pub(crate) inner_eps: f32,
    pub(crate) gate: Gate,
    pub(crate) score_cap: Option<f32>,
    pub(crate) logit_cap: Option<f32>,
    pub(crate) vectors: Vectors,
    pub(crate) rotation_scratch: usize,
    pub(crate) embed: Arc<Linear>,
    pub(crate) head: Option<Arc<Linear>>, // None: the embedding
    pub(crate) final_norm: Vec<f32>,      // (hidden)
    pub(crate) layers: Vec<Layer>,
    /// Found when first a cache has few bits.
    pub(crate) key_biases: OnceLock<KeyBiases>,
    pub(crate) key_means: OnceLock<KeyBiases>,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) linears: [Arc<Linear>; 7],        // by LayerLinear::index
    pub(crate) attention_norm: Option<Vec<f32>>, // (hidden)
    pub(crate) mlp_norm: Option<Vec<f32>>,       // (hidden)
    pub(crate) query_norm: Option<Vec<f32>>,     // (head_dim), or of all heads
    pub(crate) key_norm: Option<Vec<f32>>,       // the same
    pub(crate) out_norms: Option<[Vec<f32>; 2]>, // (hidden): of what attention and MLP write
    pub(crate) router: Option<Arc<Linear>>,      // (experts, hidden)
}

impl Layer {
    pub(crate) fn linear(&self, which: LayerLinear) -> &Linear {
        &self.linears[which.index()]
    }
}

impl Model {
    /// Builds the full-precision model of a source. Without rotation the weights stay in the
    /// checkpoint's memory map, in their stored type; rotated ones are f32 in memory.
    ///
    /// # Errors
    /// [`Error::Io`] for NaN or infinite weights, and as for [`ModelBuilder`].
    pub fn from_source(source: &WeightSource) -> Result<Self, Error> {
        let config = source.config();
        let rotations = source.rotations().clone().with_final_factors(config, source.final_factors()?)?;
        let mut builder = ModelBuilder::new(config.clone(), rotations)?;
        for id in LinearId::all(config) {
            builder.set(id, Linear::from_source(source, id)?)?;
        }
        for id in FloatId::all(config) {
            builder.set_floats(id, source.floats(id)?)?;
        }
        builder.build()
    }

    /// Runs what lies between the matrices (attention, norms, gates) with these kernels; the
    /// results keep their bits. A packed matrix keeps the body that it was packed for.
    #[must_use]
    pub fn with_kernels(self, kernels: &Kernels) -> Self {
        Self { vectors: kernels.vectors(), ..self }
    }

    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The online rotations.
    #[must_use]
    pub fn rotations(&self) -> &OnlineRotations {
        &self.rotations
    }

    /// One weight matrix; the head of a tied model is its embedding.
    ///
    /// # Errors
    /// [`Error::UnknownLinear`].
    pub fn linear(&self, id: LinearId) -> Result<&Linear, Error> {
        match id {
            LinearId::Embed => Ok(&self.embed),
            LinearId::Head => Ok(self.head_linear()),
            LinearId::Layer(i, which) => self
                .layers
                .get(i)
                .map(|layer| layer.linear(which))
                .ok_or_else(|| Error::UnknownLinear(id.to_string())),
        }
    }

    /// Swaps one weight matrix for another of the same shape and returns the old one. Clones are
    /// not affected.
    ///
    /// # Errors
    /// As for [`ModelBuilder::set`]; the model is then unchanged.
    pub fn replace(&mut self, id: LinearId, linear: impl Into<Arc<Linear>>) -> Result<Arc<Linear>, Error> {
        let linear = linear.into();
        check_linear(&self.config, id, &linear)?;
        self.key_means = OnceLock::new();
        let slot = match id {
            LinearId::Embed => &mut self.embed,
            LinearId::Head => self.head.as_mut().expect("an untied model has a head"),
            LinearId::Layer(i, which) => {
                if which == LayerLinear::K {
                    self.key_biases = OnceLock::new();
                }
                &mut self.layers[i].linears[which.index()]
            }
        };
        Ok(std::mem::replace(slot, linear))
    }

    /// Bytes of all weight matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| &l.linears);
        layers.chain(self.head.as_ref()).chain([&self.embed]).map(|l| l.weight_bytes()).sum()
    }

    /// Bytes of the weights that a step of this precision reads, all but the embedding's rows.
    #[must_use]
    pub fn weight_bytes_at(&self, precision: Precision) -> usize {
        let layers = self.layers.iter().flat_map(|l| &l.linears);
        layers.map(|l| &**l).chain([self.head_linear()]).map(|l| l.weight_bytes_at(precision)).sum()
    }

    /// Mean bits of a weight that a step of this precision reads, scales counted, the embedding's
    /// rows not.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn bits_at(&self, precision: Precision) -> f64 {
        let layers = self.layers.iter().flat_map(|l| &l.linears);
        let all = layers.map(|l| &**l).chain([self.head_linear()]);
        let weights: usize = all.map(|l| l.shape().len()).sum();
        (8 * self.weight_bytes_at(precision)) as f64 / weights.max(1) as f64
    }

    /// The precisions that its nested weights have, ascending; none where no matrix is nested.
    #[must_use]
    pub fn precisions(&self) -> BTreeSet<Rate> {
        let layers = self.layers.iter().flat_map(|l| &l.linears);
        let schemes = layers.map(|l| &**l).chain([self.head_linear()]).flat_map(Linear::schemes);
        schemes.filter(|scheme| scheme.nested()).flat_map(Scheme::precisions).collect()
    }

    /// Whether a scheduler may run on this model.
    ///
    /// # Errors
    /// [`Error::Schedule`] when it was learned for another.
    pub fn check_scheduler(&self, scheduler: &Scheduler) -> Result<(), Error> {
        let ModelConfig { num_key_value_heads: heads, head_dim, .. } = self.config;
        match scheduler {
            Scheduler::Static(_) => Ok(()),
            Scheduler::Learned(learned) => {
                Ok(learned.check(self.config.num_hidden_layers(), heads, head_dim)?)
            }
        }
    }

    /// An empty state of this model.
    #[must_use]
    pub fn state(&self, options: &StateOptions) -> State {
        self.state_in(&KvPool::new(&self.config, options.kv, usize::MAX), options)
    }

    /// An empty state that takes the pages of its cache from a pool of this model: whose element
    /// type it has, whatever the options say.
    #[must_use]
    pub fn state_in(&self, pool: &KvPool, options: &StateOptions) -> State {
        let mut state = State::new(&self.config, options, pool.clone());
        if let Some(biases) = self.key_biases(pool.kind()) {
            state.want_angles(biases);
        }
        state
    }

    fn head_linear(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Runs tokens after those in `state`; fills `hidden` with the normalized final hidden state of
    /// each, (tokens, hidden).
    ///
    /// Rows are in the model's own basis: rotated where the residual stream is. [`Model::logits`]
    /// takes them as they are.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], [`Error::State`], [`Error::Memory`]; the state is
    /// then unchanged.
    pub fn forward(&self, state: &mut State, tokens: &[u32], hidden: &mut Vec<f32>) -> Result<(), Error> {
        let width = self.config.hidden_size;
        self.check(state, tokens)?;
        state.reserve(tokens.len())?;
        hidden.resize(tokens.len() * width, 0.0);
        let chunk = state.chunk();
        with_team(|team| {
            let states = std::slice::from_mut(state);
            let mut parts = tokens.chunks(chunk).zip(hidden.chunks_mut(chunk * width));
            parts.try_for_each(|(tokens, hidden)| {
                self.forward_rows(team, states, tokens, &[tokens.len()], hidden)
            })
        })
    }

    /// Runs tokens of several sequences together, of each as many as `counts` says and at least
    /// one, so that every matrix is read once for all of them: prompts beside texts that are being
    /// written. Otherwise as [`Model::forward`], with the same bits. `tokens` and `hidden`,
    /// (tokens, hidden), have those of one sequence after those of the other;
    /// [`Model::logits_batch`] takes the latter. All tokens go through a block at once, whatever
    /// [`State::chunk`] says: the work space grows with their number.
    ///
    /// # Errors
    /// As for [`Model::forward`]; [`Error::Shape`] when `counts` are not those of the states and
    /// tokens, one of them is zero, or there is none.
    pub fn forward_batch(
        &self,
        states: &mut [State],
        tokens: &[u32],
        counts: &[usize],
        hidden: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let each = tokens_of_each("forward_batch", states.len(), tokens, counts)?;
        states.iter().zip(each).try_for_each(|(state, tokens)| self.check(state, tokens))?;
        states.iter_mut().zip(counts).try_for_each(|(state, &count)| state.reserve(count))?;
        let width = self.config.hidden_size;
        hidden.resize(tokens.len() * width, 0.0);
        with_team(|team| {
            let (mut tokens, mut counts, mut hidden) = (tokens, counts, &mut hidden[..]);
            // Neighbours of one precision go together.
            for states in states.chunk_by_mut(alike) {
                let (of_these, of_others) = counts.split_at(states.len());
                let rows = of_these.iter().sum();
                let (these, others) = tokens.split_at(rows);
                let (out, behind) = hidden.split_at_mut(rows * width);
                self.forward_rows(team, states, these, of_these, out)?;
                (tokens, counts, hidden) = (others, of_others, behind);
            }
            Ok(())
        })
    }

    fn check(&self, state: &State, tokens: &[u32]) -> Result<(), Error> {
        state.check_model(&self.config)?;
        let vocab = self.config.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::Token { token, vocab });
        }
        let (capacity, len, got) = (state.capacity(), state.len(), tokens.len());
        if got > capacity - len {
            return Err(Error::ContextFull { capacity, len, got });
        }
        Ok(())
    }

    /// The residual stream that enters the first block: fills `x` with (tokens, hidden).
    ///
    /// # Errors
    /// As for [`Model::forward`], of which this is the beginning; the state stays as it is.
    pub fn embed(&self, state: &mut State, tokens: &[u32], x: &mut Vec<f32>) -> Result<(), Error> {
        let width = self.config.hidden_size;
        self.check(state, tokens)?;
        x.resize(tokens.len() * width, 0.0);
        let chunk = state.chunk();
        with_team(|team| {
            let states = std::slice::from_mut(state);
            tokens.chunks(chunk).zip(x.chunks_mut(chunk * width)).try_for_each(|(tokens, x)| {
                self.pass(team, states, &[tokens.len()], |pass, _, s| {
                    pass.embed(tokens, s);
                    x.copy_from_slice(&s.x[..x.len()]);
                    Ok(())
                })
            })
        })
    }

    /// Runs the residual stream, (tokens, hidden), through some of the blocks in place. `state`
    /// holds the tokens before in these blocks, as many in each; afterwards it holds these tokens
    /// in these blocks alone.
    ///
    /// # Errors
    /// As for [`Model::forward`]; [`Error::Shape`] for partial rows or blocks that are not there.
    pub fn forward_blocks(
        &self,
        state: &mut State,
        blocks: Range<usize>,
        x: &mut [f32],
    ) -> Result<(), Error> {
        self.forward_stream(state, x, blocks, None)
    }

    /// The rest of [`Model::forward`]: from the residual stream that enters `block`, (tokens,
    /// hidden), to the normalized final hidden states, in place. With what [`Model::embed`] and
    /// [`Model::forward_blocks`] make of tokens, the bits are those of a whole pass: models that
    /// differ from that block on share what lies before it.
    ///
    /// # Errors
    /// As for [`Model::forward_blocks`].
    pub fn forward_from(&self, state: &mut State, block: usize, x: &mut [f32]) -> Result<(), Error> {
        self.forward_blocks(state, block..self.layers.len().max(block), x)?;
        let before = x.to_vec();
        let rows = x.len() / self.config.hidden_size;
        with_team(|team| Pass { model: self, team, rows }.final_norm(&before, x));
        Ok(())
    }

    /// Runs the residual stream of tokens after those in `state` through blocks: `x`, (tokens,
    /// hidden), is replaced by what leaves the last of them. With an input of the first to stop at,
    /// its observer still sees it, nothing behind it is computed, and `x` is the stream at that
    /// point.
    pub(crate) fn forward_stream(
        &self,
        state: &mut State,
        x: &mut [f32],
        blocks: Range<usize>,
        until: Option<BlockInput>,
    ) -> Result<(), Error> {
        let width = self.config.hidden_size;
        let tokens = x.len() / width;
        ShapeError::check_len("blocks", "x", tokens * width, x.len())?;
        if blocks.end > self.layers.len() {
            let rule = format_args!("at most {}", self.layers.len());
            return Err(ShapeError::new("blocks", "last", rule, blocks.end).into());
        }
        state.check_model(&self.config)?;
        let (capacity, len) = (state.capacity(), state.len());
        if tokens > capacity - len {
            return Err(Error::ContextFull { capacity, len, got: tokens });
        }
        state.reserve(tokens)?;
        let chunk = state.chunk() * width;
        with_team(|team| {
            let states = std::slice::from_mut(state);
            x.chunks_mut(chunk).try_for_each(|x| {
                self.pass(team, states, &[x.len() / width], |pass, states, s| {
                    s.x[..x.len()].copy_from_slice(x);
                    pass.blocks(states, s, blocks.clone(), until)?;
                    x.copy_from_slice(&s.x[..x.len()]);
                    Ok(())
                })
            })
        })
    }

    /// Some rows of each state, one state after the other, through all blocks and the final norm.
    fn forward_rows(
        &self,
        team: &Team<'_>,
        states: &mut [State],
        tokens: &[u32],
        counts: &[usize],
        hidden: &mut [f32],
    ) -> Result<(), Error> {
        self.pass(team, states, counts, |pass, states, s| {
            pass.embed(tokens, s);
            pass.blocks(states, s, 0..self.layers.len(), None)?;
            pass.final_norm(&s.x, hidden);
            Ok(())
        })
    }

    /// Runs `f` in the first state's scratch, with room for so many rows of each state.
    fn pass(
        &self,
        team: &Team<'_>,
        states: &mut [State],
        counts: &[usize],
        f: impl FnOnce(Pass<'_>, &mut [State], &mut Scratch) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let rows = counts.iter().sum();
        State::deal_rows(states, counts);
        let mut scratch = std::mem::take(&mut states[0].scratch);
        scratch.linear.precision = states[0].precision();
        let room = states.iter().map(State::room).max().unwrap_or(0);
        scratch.ensure(&self.config, self.rotation_scratch, rows, room);
        scratch.linear.vectors = self.vectors;
        let done = f(Pass { model: self, team, rows }, states, &mut scratch);
        states[0].scratch = scratch;
        done
    }

    /// Logits of some rows of [`Model::forward_batch`]'s result, `hidden`: fills `out` with (rows,
    /// vocabulary), each row with the precision of its state. The states are those of that step, in
    /// its order.
    ///
    /// # Errors
    /// As for [`Model::logits`]; [`Error::Shape`] when `hidden` is not so many rows, or the step
    /// had fewer.
    pub fn logits_batch(
        &self,
        states: &mut [State],
        rows: Range<usize>,
        hidden: &[f32],
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let width = self.config.hidden_size;
        ShapeError::check_len("logits_batch", "hidden", rows.len() * width, hidden.len())?;
        let all = states.iter().map(|state| state.rows().len()).sum();
        if rows.end > all {
            let rule = format_args!("at most {all}");
            return Err(ShapeError::new("logits_batch", "last row", rule, rows.end).into());
        }
        out.clear();
        let (mut first, mut part) = (0, Vec::new());
        for states in states.chunk_by_mut(alike) {
            let end = first + states.iter().map(|state| state.rows().len()).sum::<usize>();
            let these = rows.start.max(first)..rows.end.min(end);
            first = end;
            if these == rows {
                return self.logits(&mut states[0], hidden, out);
            }
            if !these.is_empty() {
                let hidden = &hidden[(these.start - rows.start) * width..(these.end - rows.start) * width];
                self.logits(&mut states[0], hidden, &mut part)?;
                out.extend_from_slice(&part);
            }
        }
        Ok(())
    }

    /// Logits of rows of [`Model::forward`]'s result: fills `out` with (rows, vocabulary).
    ///
    /// A row costs vocabulary floats: for long texts pass some rows at a time.
    ///
    /// # Errors
    /// [`Error::Shape`] when `hidden` is not whole rows; [`Error::State`].
    pub fn logits(&self, state: &mut State, hidden: &[f32], out: &mut Vec<f32>) -> Result<(), Error> {
        state.check_model(&self.config)?;
        let width = self.config.hidden_size;
        let rows = hidden.len() / width;
        ShapeError::check_len("logits", "hidden", rows * width, hidden.len())?;
        out.resize(rows * self.config.vocab_size, 0.0);
        state.scratch.linear.precision = state.precision();
        let s = &mut state.scratch;
        s.ensure_rotation(self.rotation_scratch);
        s.linear.vectors = self.vectors;
        with_team(|team| {
            let input = match &self.rotations.head {
                HeadRotation::Plain => hidden,
                HeadRotation::Rotate(rotation) => {
                    let n = Scratch::copy(&mut s.head, hidden);
                    rotations::apply(rotation, &self.vectors, team, n, &mut s.rotation);
                    n
                }
                HeadRotation::Regain(rotation) => {
                    let n = Scratch::copy(&mut s.head, hidden);
                    rotations::apply_inverse(rotation, team, n, &mut s.rotation);
                    for row in n.chunks_exact_mut(width) {
                        row.iter_mut().zip(&self.final_norm).for_each(|(n, g)| *n *= g);
                    }
                    rotations::apply(rotation, &self.vectors, team, n, &mut s.rotation);
                    n
                }
            };
            self.head_linear().apply_head(team, input, &mut s.linear, out)?;
            if let Some(cap) = self.logit_cap {
                team.chunks(out, TASK, |_, part| self.vectors.cap(cap, part));
            }
            Ok(())
        })
    }
}

/// Whether rows of two states may go through the matrices together.
fn alike(a: &State, b: &State) -> bool {
    a.precision() == b.precision()
}

/// Rows below which loops over rows stay on the calling thread.
pub(crate) const PARALLEL_ROWS: usize = 4;
/// Numbers of a task of an elementwise operation: microseconds of work.
pub(crate) const TASK: usize = 4096;

/// One forward pass: some rows, one state's behind those of the other.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) team: &'a Team<'a>,
    pub(crate) rows: usize,
}

impl<'a> Pass<'a> {
    /// Rows of the embedding into `s.x`.
    fn embed(self, tokens: &[u32], s: &mut Scratch) {
        let Self { model, team, rows } = self;
        let width = model.config.hidden_size;
        let (x, precision) = (&mut s.x[..rows * width], s.linear.precision);
        team.chunks(x, width, |row, x| {
            model.embed.row_at(tokens[row] as usize, precision, x).expect("tokens were checked");
        });
        if let Some(rotation) = &model.rotations.embed_out {
            rotations::apply_inverse(rotation, team, x, &mut s.rotation);
            model.rotations.divide(x);
        }
    }

    /// `s.x` through blocks, or to an input of the first; the states then hold the rows.
    fn blocks(
        self,
        states: &mut [State],
        s: &mut Scratch,
        blocks: Range<usize>,
        until: Option<BlockInput>,
    ) -> Result<(), Error> {
        let Self { model, rows, .. } = self;
        let half = model.config.head_dim / 2;
        for (rope, RopeTables { cos, sin }) in
            [Some(&model.rope), model.local_rope.as_ref()].into_iter().flatten().zip(&mut s.rope)
        {
            let angles = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
            for (row, (cos, sin)) in angles.take(rows).enumerate() {
                let (state, position) = State::of_row(states, row);
                rope.fill(position, state.capacity(), cos, sin);
            }
        }
        if let Some(biases) = self.key_biases(states) {
            for state in &mut *states {
                // Another model may have made the state.
                state.want_angles(biases);
                let (positions, capacity) = (state.len() + state.rows().len(), state.capacity());
                let ropes = [Some(&model.rope), model.local_rope.as_ref()].into_iter().flatten();
                for ((rope, angles), _) in
                    ropes.zip(&mut state.angles).zip(biases.tables).filter(|(_, wanted)| *wanted)
                {
                    let reached = angles.reach(positions, rope, capacity);
                    reached.map_err(|source| Error::Memory { tokens: positions, source })?;
                }
            }
        }
        s.experts.first = states[0].len();
        for layer in blocks {
            self.attention(layer, states, s, until)?;
            if matches!(until, Some(BlockInput::Attention | BlockInput::Output)) {
                break;
            }
            self.mlp(layer, s, until)?;
            if until.is_some() {
                break;
            }
        }
        states.iter_mut().for_each(State::advance);
        Ok(())
    }

    /// What is done about large constants of keys, where a cache has few bits.
    fn key_biases(self, states: &[State]) -> Option<&'a KeyBiases> {
        states.iter().find_map(|state| self.model.key_biases(state.layout().kind))
    }

    /// x += O attend(...).
    fn attention(
        self,
        index: usize,
        states: &mut [State],
        s: &mut Scratch,
        until: Option<BlockInput>,
    ) -> Result<(), Error> {
        let Self { model, team, rows } = self;
        let (config, layer, rotations) =
            (&model.config, &model.layers[index], &model.rotations.layers[index]);
        let (width, q_dim, kv_dim) = (config.hidden_size, config.q_dim(), config.kv_dim());
        let n = &mut s.n[..rows * width];
        let (q, k, v) = (&mut s.q[..rows * q_dim], &mut s.k[..rows * kv_dim], &mut s.v[..rows * kv_dim]);
        self.read(&s.x, layer.attention_norm.as_ref(), n);
        if let Some(rotation) = &rotations.attention_in {
            rotations::apply(rotation, &model.vectors, team, n, &mut s.rotation);
        }
        if until == Some(BlockInput::Attention) {
            layer.linear(LayerLinear::Q).observe(team, n);
            return Ok(());
        }
        s.linear.new_input();
        let inputs = [LayerLinear::Q, LayerLinear::K, LayerLinear::V].map(|l| layer.linear(l));
        Linear::apply_together(team, inputs, n, &mut s.linear, [&mut *q, &mut *k, &mut *v])?;

        let table = usize::from(config.has_local_rope(index));
        let angles = &s.rope[table];
        let rope = config.layers[index].rope.then_some((&*angles.cos, &*angles.sin));
        if config.qk_norm == QkNorm::Whole {
            let norms = [(&mut *q, &layer.query_norm), (&mut *k, &layer.key_norm)];
            for (x, gain) in norms {
                // The buffer of what comes later.
                let before = &mut s.grouped[..x.len()];
                before.copy_from_slice(x);
                self.norm(before, gain.as_ref(), model.inner_eps, x);
            }
        }
        let [query_norm, key_norm] = [&layer.query_norm, &layer.key_norm]
            .map(|norm| norm.as_deref().filter(|_| config.qk_norm == QkNorm::Heads));
        let bias = self.key_biases(states).and_then(|biases| biases.layers[index].as_ref());
        let key_norm = match bias {
            Some(bias) => {
                self.prepare_heads(k, key_norm, None);
                self.without_bias(states, bias, k);
                None
            }
            None => key_norm,
        };
        self.prepare_heads(k, key_norm, rope);
        self.rotate_heads(states, k);
        for state in &mut *states {
            let rows = state.rows();
            let team = if rows.len() < PARALLEL_ROWS { &Team::alone() } else { team };
            let [k, v] = [&*k, &*v].map(|all| &all[rows.start * kv_dim..rows.end * kv_dim]);
            state.write(index, (&model.vectors, team), k, v);
        }
        self.prepare_heads(q, query_norm, rope);
        let bias = bias.filter(|bias| bias.most > 0).map(|bias| {
            let len = rows * config.num_attention_heads * 2 * bias.most;
            if s.factors.len() < len {
                s.factors.renew(len);
            }
            self.bias_factors(states, bias, q, &mut s.factors[..len]);
            BiasScores { bias, factors: &s.factors[..len], table }
        });
        self.rotate_heads(states, q);
        let grouped = &mut s.grouped[..rows * q_dim];
        self.group_queries(states, q, grouped);
        let attention = Attention {
            states,
            layer: index,
            group: config.num_attention_heads / config.num_key_value_heads,
            window: config.layers[index].sliding_window,
            cap: model.score_cap,
            bias,
            vectors: &model.vectors,
        };
        // The queries' buffer is free again: it takes the result, still in the order of groups.
        attention.run(team, rows, grouped, q, &mut s.work);
        self.ungroup(q, grouped);
        if let Some(rotation) = &rotations.output_in {
            rotations::apply(rotation, &model.vectors, team, grouped, &mut s.rotation);
        }
        if until == Some(BlockInput::Output) {
            layer.linear(LayerLinear::O).observe(team, grouped);
            return Ok(());
        }
        s.linear.new_input();
        layer.linear(LayerLinear::O).apply_with(team, grouped, &mut s.linear, n)?;
        self.write(layer.out_norms.as_ref().map(|[norm, _]| norm), s);
        Ok(())
    }

    /// n = x, or its norm.
    fn read(self, x: &[f32], norm: Option<&Vec<f32>>, n: &mut [f32]) {
        match norm {
            Some(_) => self.norm(x, norm, self.model.eps, n),
            None => n.copy_from_slice(&x[..n.len()]),
        }
    }

    /// x += n, or its norm.
    fn write(self, norm: Option<&Vec<f32>>, s: &mut Scratch) {
        let Self { model, team, rows } = self;
        let len = rows * model.config.hidden_size;
        let (n, x) = (&s.n[..len], &mut s.x[..len]);
        let Some(gain) = norm else { return self.add(n, x) };
        let out = &mut s.branch[..len];
        self.norm(n, Some(gain), model.inner_eps, out);
        if let Some(rotation) = &model.rotations.branch_out {
            rotations::apply(rotation, &model.vectors, team, out, &mut s.rotation);
        }
        self.add(out, x);
    }

    /// x += Down(f(Gate n) ∘ Up n), or the sum over the experts of each token.
    fn mlp(self, index: usize, s: &mut Scratch, until: Option<BlockInput>) -> Result<(), Error> {
        let Self { model, team, rows } = self;
        let (layer, rotations) = (&model.layers[index], &model.rotations.layers[index]);
        let (width, inner) = (model.config.hidden_size, model.config.intermediate_size);
        let n = &mut s.n[..rows * width];
        let (gate, up) = (&mut s.gate[..rows * inner], &mut s.up[..rows * inner]);
        self.read(&s.x, layer.mlp_norm.as_ref(), n);
        if let Some(rotation) = &rotations.mlp_in {
            rotations::apply(rotation, &model.vectors, team, n, &mut s.rotation);
        }
        if until == Some(BlockInput::Mlp) {
            layer.linear(LayerLinear::Gate).observe(team, n);
            return Ok(());
        }
        if let Some(experts) = model.config.experts {
            self.experts(experts, index, s, until)?;
            if until.is_none() {
                self.write(layer.out_norms.as_ref().map(|[_, norm]| norm), s);
            }
            return Ok(());
        }
        s.linear.new_input();
        let inputs = [LayerLinear::Gate, LayerLinear::Up].map(|l| layer.linear(l));
        Linear::apply_gated(team, (&model.vectors, model.gate), inputs, n, &mut s.linear, [&mut *gate, up])?;
        if let Some(rotation) = &rotations.down_in {
            rotations::apply(rotation, &model.vectors, team, gate, &mut s.rotation);
        }
        if until == Some(BlockInput::Down) {
            layer.linear(LayerLinear::Down).observe(team, gate);
            return Ok(());
        }
        s.linear.new_input();
        layer.linear(LayerLinear::Down).apply_with(team, gate, &mut s.linear, n)?;
        self.write(layer.out_norms.as_ref().map(|[_, norm]| norm), s);
        Ok(())
    }

    /// `f(place, piece)` for pieces of `x` of some thousand numbers: microseconds of work.
    fn each(self, x: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
        self.team.chunks(x, TASK, |i, x| f(i * TASK, x));
    }

    /// `f(row number, row)` for every row of `x`: in parallel when there are several.
    pub(crate) fn each_row(self, x: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
        let width = x.len() / self.rows;
        let team = if self.rows < PARALLEL_ROWS { &Team::alone() } else { self.team };
        team.chunks(x, width, f);
    }

    /// The norm of every row of `x`.
    fn norm(self, x: &[f32], gain: Option<&Vec<f32>>, eps: f32, out: &mut [f32]) {
        let model = self.model;
        let gain = gain.map(Vec::as_slice);
        self.each_row(out, |row, out| {
            let x = &x[row * out.len()..][..out.len()];
            model.vectors.rms_norm(x, gain, eps, out);
        });
    }

    /// What [`Model::logits`] takes. A tied folded model applies the gain at the head: see
    /// `rotations`.
    fn final_norm(self, x: &[f32], out: &mut [f32]) {
        let regain = matches!(self.model.rotations.head, HeadRotation::Regain(_));
        self.norm(x, (!regain).then_some(&self.model.final_norm), self.model.eps, out);
    }

    /// `y += x`.
    fn add(self, x: &[f32], y: &mut [f32]) {
        self.each(y, |at, y| self.model.vectors.add(&x[at..][..y.len()], y));
    }
}
