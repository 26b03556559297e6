//! The decoder: embedding, blocks of attention and SwiGLU, final norm, head.
//!
//! ```text
//! x = E[token]
//! each block:   x += O attend(rope(norm(Q n)), rope(norm(K n)), V n),   n = rms_norm(x)
//!               x += Down(silu(Gate n) ∘ Up n),                         n = rms_norm(x)
//! logits = Head rms_norm(x)
//! ```
//!
//! One graph serves the Llama, Mistral, Qwen2, Qwen3 and SmolLM families: what differs (biases, norms of
//! queries and keys, layers without RoPE, windows) is in [`fracbit_io::ModelConfig`]. Where rotations go is
//! in [`crate::sites`]. A weight matrix is a [`Linear`] and may be dense or packed, each on its own.
//!
//! Memory: the weights, and per [`State`] the cache and, for each token of a chunk, about twice the widths of
//! the residual stream, the queries, the keys and the MLP in floats. Prefill runs in chunks of [`StateOptions::chunk`] tokens; decoding is a chunk of
//! one, and allocates nothing but cache (see [`State::reserve`]) once it has run.

use std::sync::Arc;

use fracbit_base::ShapeError;
use fracbit_io::ModelConfig;
use rayon::prelude::*;

use crate::attention::{Attention, MAX_HEAD_DIM};
use crate::id::{LayerLinear, LinearId, NormId};
use crate::linear::Linear;
use crate::math::{add, rms_norm, rms_norm_inplace, silu_mul};
use crate::rope::{Rope, rotate};
use crate::sites::{self, HeadSite, RotationMode, Sites};
use crate::source::WeightSource;
use crate::state::{Scratch, State, StateOptions};
use crate::{Error, kv::KvLayer};

/// A decoder ready to run. Immutable in use: many threads may run it, each with its own [`State`].
///
/// A clone shares the weight matrices: a baseline and its copy with one layer replaced take the memory of one
/// model and one layer.
#[derive(Clone, Debug)]
pub struct Model {
    config: ModelConfig,
    sites: Sites,
    rope: Rope,
    eps: f32,
    rotation_scratch: usize,
    embed: Arc<Linear>,
    head: Option<Arc<Linear>>, // None: the embedding
    final_norm: Vec<f32>,      // (hidden)
    layers: Vec<Layer>,
}

#[derive(Clone, Debug)]
struct Layer {
    linears: [Arc<Linear>; 7],    // by LayerLinear::index
    attention_norm: Vec<f32>,     // (hidden)
    mlp_norm: Vec<f32>,           // (hidden)
    query_norm: Option<Vec<f32>>, // (head_dim)
    key_norm: Option<Vec<f32>>,   // (head_dim)
}

impl Layer {
    fn linear(&self, which: LayerLinear) -> &Linear {
        &self.linears[which.index()]
    }
}

/// Collects the parts of a [`Model`].
#[derive(Debug)]
pub struct ModelBuilder {
    config: ModelConfig,
    sites: Sites,
    embed: Option<Arc<Linear>>,
    head: Option<Arc<Linear>>,
    layers: Vec<[Option<Arc<Linear>>; 7]>,
    norms: Vec<(NormId, Vec<f32>)>,
}

impl ModelBuilder {
    /// An empty model whose weights are rotated as `sites` says.
    ///
    /// # Errors
    /// [`Error::HeadDim`], or [`Error::Shape`] for sites of another number of layers.
    pub fn new(config: ModelConfig, sites: Sites) -> Result<Self, Error> {
        if config.head_dim > MAX_HEAD_DIM {
            return Err(Error::HeadDim { max: MAX_HEAD_DIM, got: config.head_dim });
        }
        let layers = config.num_hidden_layers();
        ShapeError::check_len("model", "sites", layers, sites.layers.len())?;
        let layers = (0..layers).map(|_| Default::default()).collect();
        Ok(Self { config, sites, embed: None, head: None, layers, norms: Vec::new() })
    }

    /// Sets one matrix; a second call for the same one replaces it.
    ///
    /// # Errors
    /// [`Error::UnknownLinear`], or [`Error::Linear`] for a wrong shape or a bias too many or too few.
    pub fn set(&mut self, id: LinearId, linear: impl Into<Arc<Linear>>) -> Result<&mut Self, Error> {
        let linear = linear.into();
        check_linear(&self.config, id, &linear)?;
        let slot = match id {
            LinearId::Embed => &mut self.embed,
            LinearId::Head => &mut self.head,
            LinearId::Layer(i, which) => &mut self.layers[i][which.index()],
        };
        *slot = Some(linear);
        Ok(self)
    }

    /// Sets one norm's gain: for folded weights what [`WeightSource::norm`] yields.
    ///
    /// # Errors
    /// [`Error::Norm`] for a norm the model does not have or a gain of the wrong length.
    pub fn set_norm(&mut self, id: NormId, gain: Vec<f32>) -> Result<&mut Self, Error> {
        let want = if id.exists(&self.config) { id.width(&self.config) } else { 0 };
        ShapeError::check_len("norm", "gain", want, gain.len())
            .map_err(|source| Error::Norm { id, source })?;
        self.norms.retain(|(other, _)| *other != id);
        self.norms.push((id, gain));
        Ok(self)
    }

    /// The model.
    ///
    /// # Errors
    /// [`Error::MissingLinear`] or [`Error::MissingNorm`] naming the first part that was not set.
    pub fn build(self) -> Result<Model, Error> {
        let Self { config, sites, embed, head, layers, mut norms } = self;
        let mut norm = |id| {
            let at = norms.iter().position(|(other, _)| *other == id).ok_or(Error::MissingNorm(id))?;
            Ok::<_, Error>(norms.swap_remove(at).1)
        };
        let embed = embed.ok_or(Error::MissingLinear(LinearId::Embed))?;
        if head.is_none() && !config.tie_word_embeddings {
            return Err(Error::MissingLinear(LinearId::Head));
        }
        let mut out = Vec::with_capacity(layers.len());
        for (i, linears) in layers.into_iter().enumerate() {
            let missing = LayerLinear::ALL.into_iter().find(|l| linears[l.index()].is_none());
            if let Some(which) = missing {
                return Err(Error::MissingLinear(LinearId::Layer(i, which)));
            }
            out.push(Layer {
                linears: linears.map(|l| l.expect("checked above")),
                attention_norm: norm(NormId::Attention(i))?,
                mlp_norm: norm(NormId::Mlp(i))?,
                query_norm: if config.qk_norm { Some(norm(NormId::Query(i))?) } else { None },
                key_norm: if config.qk_norm { Some(norm(NormId::Key(i))?) } else { None },
            });
        }
        let final_norm = norm(NormId::Final)?;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let eps = config.rms_norm_eps as f32;
        let rotation_scratch = sites.scratch_len();
        Ok(Model {
            rotation_scratch,
            rope: Rope::new(&config),
            eps,
            config,
            sites,
            embed,
            head,
            final_norm,
            layers: out,
        })
    }
}

fn check_linear(config: &ModelConfig, id: LinearId, linear: &Linear) -> Result<(), Error> {
    if !id.exists(config) {
        return Err(Error::UnknownLinear(id.to_string()));
    }
    let bad = |source| Error::Linear { id, source };
    let (want, got) = (id.shape(config), linear.shape());
    if want != got {
        return Err(bad(ShapeError::new("linear layer", "shape", want, got)));
    }
    let word = |has: bool| if has { "present" } else { "absent" };
    let (want, got) = (id.has_bias(config), linear.bias().is_some());
    if want != got {
        return Err(bad(ShapeError::new("linear layer", "bias", word(want), word(got))));
    }
    Ok(())
}

impl Model {
    /// Builds the full-precision model of a source. Without rotation the weights stay in the checkpoint's
    /// memory map, in their stored type; rotated ones are f32 in memory.
    ///
    /// # Errors
    /// [`Error::Io`] for NaN or infinite weights, and as for [`ModelBuilder`].
    pub fn from_source(source: &WeightSource) -> Result<Self, Error> {
        let config = source.config();
        let mut builder = ModelBuilder::new(config.clone(), source.sites().clone())?;
        for id in LinearId::all(config) {
            let bias = source.bias(id)?;
            let linear = if source.sites().mode() == RotationMode::None {
                Linear::stored(source.checkpoint().clone(), &source.weight_name(id), bias)?
            } else {
                let matrix = source.linear(id)?;
                Linear::dense(matrix.shape, matrix.data, bias)?
            };
            builder.set(id, linear)?;
        }
        for id in NormId::all(config) {
            builder.set_norm(id, source.norm(id)?)?;
        }
        builder.build()
    }

    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The online rotations.
    #[must_use]
    pub fn sites(&self) -> &Sites {
        &self.sites
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

    /// Swaps one weight matrix for another of the same shape and returns the old one. Clones are not affected.
    ///
    /// # Errors
    /// As for [`ModelBuilder::set`]; the model is then unchanged.
    pub fn replace(&mut self, id: LinearId, linear: impl Into<Arc<Linear>>) -> Result<Arc<Linear>, Error> {
        let linear = linear.into();
        check_linear(&self.config, id, &linear)?;
        let slot = match id {
            LinearId::Embed => &mut self.embed,
            LinearId::Head => self.head.as_mut().expect("an untied model has a head"),
            LinearId::Layer(i, which) => &mut self.layers[i].linears[which.index()],
        };
        Ok(std::mem::replace(slot, linear))
    }

    /// Bytes of all weight matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| &l.linears);
        layers.chain(self.head.as_ref()).chain([&self.embed]).map(|l| l.weight_bytes()).sum()
    }

    /// An empty state of this model.
    #[must_use]
    pub fn state(&self, options: &StateOptions) -> State {
        State::new(&self.config, options)
    }

    fn head_linear(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Runs tokens after those in `state`; fills `hidden` with the normalized final hidden state of each,
    /// (tokens, hidden).
    ///
    /// Rows are in the model's own basis: rotated where the residual stream is. [`Model::logits`] takes them
    /// as they are.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], [`Error::State`], [`Error::Memory`]; the state is then unchanged.
    pub fn forward(&self, state: &mut State, tokens: &[u32], hidden: &mut Vec<f32>) -> Result<(), Error> {
        let width = self.config.hidden_size;
        self.check(state, tokens)?;
        state.reserve(tokens.len())?;
        hidden.resize(tokens.len() * width, 0.0);
        let chunk = state.chunk();
        for (tokens, hidden) in tokens.chunks(chunk).zip(hidden.chunks_mut(chunk * width)) {
            self.forward_chunk(state, tokens)?;
            // A tied folded model applies the gain at the head: see `sites`.
            let gain =
                if matches!(self.sites.head, HeadSite::Regain(_)) { None } else { Some(&*self.final_norm) };
            rows2(&state.scratch.x[..hidden.len()], hidden, width, |x, out| rms_norm(x, gain, self.eps, out));
        }
        Ok(())
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

    /// One chunk through all blocks; leaves the residual stream in `scratch.x`.
    fn forward_chunk(&self, state: &mut State, tokens: &[u32]) -> Result<(), Error> {
        let rows = tokens.len();
        let scratch = &mut state.scratch;
        scratch.ensure(&self.config, self.rotation_scratch, rows);
        let width = self.config.hidden_size;
        let x = &mut scratch.x[..rows * width];
        for (&token, x) in tokens.iter().zip(x.chunks_exact_mut(width)) {
            self.embed.row(token as usize, x)?;
        }
        if let Some(rotation) = &self.sites.embed_out {
            sites::apply_inverse(rotation, x, &mut scratch.rotation);
        }
        self.run_blocks(state, rows)
    }

    /// Runs tokens after those in `state` through the blocks alone: `x`, the residual stream of each, (tokens, hidden), is
    /// replaced by what leaves the last block.
    pub(crate) fn forward_hidden(&self, state: &mut State, x: &mut [f32]) -> Result<(), Error> {
        let width = self.config.hidden_size;
        let tokens = x.len() / width;
        ShapeError::check_len("blocks", "x", tokens * width, x.len())?;
        state.check_model(&self.config)?;
        let (capacity, len) = (state.capacity(), state.len());
        if tokens > capacity - len {
            return Err(Error::ContextFull { capacity, len, got: tokens });
        }
        state.reserve(tokens)?;
        for x in x.chunks_mut(state.chunk() * width) {
            state.scratch.ensure(&self.config, self.rotation_scratch, x.len() / width);
            state.scratch.x[..x.len()].copy_from_slice(x);
            self.run_blocks(state, x.len() / width)?;
            x.copy_from_slice(&state.scratch.x[..x.len()]);
        }
        Ok(())
    }

    /// Runs the first `rows` rows of `scratch.x` through all blocks.
    fn run_blocks(&self, state: &mut State, rows: usize) -> Result<(), Error> {
        let first = state.len();
        let State { layers: cache, scratch, .. } = state;
        let half = rows * self.config.head_dim / 2;
        self.rope.fill(first, rows, &mut scratch.cos[..half], &mut scratch.sin[..half]);
        for (i, cache) in cache.iter_mut().enumerate() {
            self.attention_block(i, cache, scratch, rows, first)?;
            self.mlp_block(i, scratch, rows)?;
        }
        state.advance(rows);
        Ok(())
    }

    /// x += O attend(...).
    fn attention_block(
        &self,
        index: usize,
        cache: &mut KvLayer,
        s: &mut Scratch,
        rows: usize,
        first: usize,
    ) -> Result<(), Error> {
        let (config, layer, sites) = (&self.config, &self.layers[index], &self.sites.layers[index]);
        let (width, q_dim, kv_dim) = (config.hidden_size, config.q_dim(), config.kv_dim());
        let x = &mut s.x[..rows * width];
        let n = &mut s.n[..rows * width];
        let (q, k, v) = (&mut s.q[..rows * q_dim], &mut s.k[..rows * kv_dim], &mut s.v[..rows * kv_dim]);
        rows2(x, n, width, |x, n| rms_norm(x, Some(&layer.attention_norm), self.eps, n));
        if let Some(rotation) = &sites.attention_in {
            sites::apply(rotation, n, &mut s.rotation);
        }
        s.linear.new_input();
        let inputs = [LayerLinear::Q, LayerLinear::K, LayerLinear::V].map(|l| layer.linear(l));
        Linear::apply_together(inputs, n, &mut s.linear, [&mut *q, &mut *k, &mut *v])?;

        let turn = config.layers[index].rope.then_some((&*s.cos, &*s.sin));
        self.prepare_heads(k, rows, layer.key_norm.as_deref(), turn);
        self.store(cache, k, v, rows, first);
        self.prepare_heads(q, rows, layer.query_norm.as_deref(), turn);
        let grouped = &mut s.grouped[..rows * q_dim];
        self.group_queries(q, grouped, rows);
        let attention = Attention {
            cache,
            group: config.num_attention_heads / config.num_key_value_heads,
            first,
            window: config.layers[index].sliding_window,
        };
        // The queries' buffer is free again: it takes the result, still in the order of groups.
        attention.run(rows, grouped, q);
        self.ungroup(q, grouped, rows);
        if let Some(rotation) = &sites.output_in {
            sites::apply(rotation, grouped, &mut s.rotation);
        }
        s.linear.new_input();
        layer.linear(LayerLinear::O).apply_shared(grouped, &mut s.linear, n)?;
        add(n, x);
        Ok(())
    }

    /// x += Down(silu(Gate n) ∘ Up n).
    fn mlp_block(&self, index: usize, s: &mut Scratch, rows: usize) -> Result<(), Error> {
        let (layer, sites) = (&self.layers[index], &self.sites.layers[index]);
        let (width, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let x = &mut s.x[..rows * width];
        let n = &mut s.n[..rows * width];
        let (gate, up) = (&mut s.gate[..rows * inner], &mut s.up[..rows * inner]);
        rows2(x, n, width, |x, n| rms_norm(x, Some(&layer.mlp_norm), self.eps, n));
        if let Some(rotation) = &sites.mlp_in {
            sites::apply(rotation, n, &mut s.rotation);
        }
        s.linear.new_input();
        let inputs = [LayerLinear::Gate, LayerLinear::Up].map(|l| layer.linear(l));
        Linear::apply_together(inputs, n, &mut s.linear, [&mut *gate, &mut *up])?;
        rows2(up, gate, inner, |up, gate| silu_mul(gate, up));
        if let Some(rotation) = &sites.down_in {
            sites::apply(rotation, gate, &mut s.rotation);
        }
        s.linear.new_input();
        layer.linear(LayerLinear::Down).apply_shared(gate, &mut s.linear, n)?;
        add(n, x);
        Ok(())
    }

    /// Norm and RoPE of every head of `x`, (rows, heads · head_dim).
    fn prepare_heads(
        &self,
        x: &mut [f32],
        rows: usize,
        norm: Option<&[f32]>,
        turn: Option<(&[f32], &[f32])>,
    ) {
        let (d, half) = (self.config.head_dim, self.config.head_dim / 2);
        let width = x.len() / rows;
        each_row(x, width, |row, x| {
            for head in x.chunks_exact_mut(d) {
                if let Some(norm) = norm {
                    rms_norm_inplace(head, norm, self.eps);
                }
                if let Some((cos, sin)) = turn {
                    let span = row * half..(row + 1) * half;
                    rotate(head, &cos[span.clone()], &sin[span]);
                }
            }
        });
    }

    /// Keys and values, (rows, kv heads · head_dim), into the cache.
    fn store(&self, cache: &mut KvLayer, k: &[f32], v: &[f32], rows: usize, first: usize) {
        let d = self.config.head_dim;
        let kv_dim = self.config.kv_dim();
        for row in 0..rows {
            for head in 0..self.config.num_key_value_heads {
                let at = cache.at(head, first + row);
                let span = row * kv_dim + head * d..row * kv_dim + (head + 1) * d;
                cache.keys.write(at, &k[span.clone()]);
                cache.values.write(at, &v[span]);
            }
        }
    }

    /// (row, kv head, group, head_dim) to (kv head, row, group, head_dim), scaled by 1/sqrt(head_dim).
    fn group_queries(&self, q: &[f32], grouped: &mut [f32], rows: usize) {
        let kv_heads = self.config.num_key_value_heads;
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let scale = 1.0 / (self.config.head_dim as f32).sqrt();
        let part = q.len() / rows / kv_heads;
        for (i, out) in grouped.chunks_exact_mut(part).enumerate() {
            let (head, row) = (i / rows, i % rows);
            let from = &q[(row * kv_heads + head) * part..][..part];
            out.iter_mut().zip(from).for_each(|(o, q)| *o = q * scale);
        }
    }

    /// The way back, without the scale.
    fn ungroup(&self, grouped: &[f32], out: &mut [f32], rows: usize) {
        let kv_heads = self.config.num_key_value_heads;
        let part = out.len() / rows / kv_heads;
        for (i, out) in out.chunks_exact_mut(part).enumerate() {
            let (row, head) = (i / kv_heads, i % kv_heads);
            out.copy_from_slice(&grouped[(head * rows + row) * part..][..part]);
        }
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
        let s = &mut state.scratch;
        s.ensure_rotation(self.rotation_scratch);
        let input = match &self.sites.head {
            HeadSite::Plain => hidden,
            HeadSite::Rotate(rotation) => {
                let n = Scratch::copy(&mut s.head, hidden);
                sites::apply(rotation, n, &mut s.rotation);
                n
            }
            HeadSite::Regain(rotation) => {
                let n = Scratch::copy(&mut s.head, hidden);
                sites::apply_inverse(rotation, n, &mut s.rotation);
                for row in n.chunks_exact_mut(width) {
                    row.iter_mut().zip(&self.final_norm).for_each(|(n, g)| *n *= g);
                }
                sites::apply(rotation, n, &mut s.rotation);
                n
            }
        };
        Ok(self.head_linear().apply(input, &mut s.linear, out)?)
    }
}

/// Rows below which work stays on its thread.
const PARALLEL_ROWS: usize = 4;

/// `f(x row, out row)` for every row, in parallel when there are several.
fn rows2(x: &[f32], out: &mut [f32], width: usize, f: impl Fn(&[f32], &mut [f32]) + Sync) {
    if out.len() < PARALLEL_ROWS * width {
        x.chunks_exact(width).zip(out.chunks_exact_mut(width)).for_each(|(x, out)| f(x, out));
    } else {
        x.par_chunks_exact(width).zip(out.par_chunks_exact_mut(width)).for_each(|(x, out)| f(x, out));
    }
}

/// `f(row number, row)` for every row, in parallel when there are several.
fn each_row(x: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if x.len() < PARALLEL_ROWS * width {
        x.chunks_exact_mut(width).enumerate().for_each(|(i, x)| f(i, x));
    } else {
        x.par_chunks_exact_mut(width).enumerate().for_each(|(i, x)| f(i, x));
    }
}
