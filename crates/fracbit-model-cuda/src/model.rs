//! Weights on the device and the graph over them.

use fracbit_format::{PackedMatrixData, PackedView};
use fracbit_io::{Activation, ModelConfig, QkNorm};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError, DeviceMatrix, LoadError, Workspace,
    ops::{
        self, AttentionShape, AttentionWork, Before, Cache, DenseMatrix, FEW, HeadOptions, PROMPT,
        RotationTables, Step,
    },
};
use fracbit_model::{FloatId, LayerLinear, LinearId, Sites, sites::HeadSite};
use fracbit_rotation::{Factor, HadamardMatrix, Rotation};
use half::f16;
use std::collections::BTreeMap;

/// Tokens that the products of packed matrices take together.
pub const MAX_ROWS: usize = 8;
/// Tokens from which on weights are expanded and multiplied as dense matrices: expansion writes 16
/// bits for each weight, some ten times what the products read, and each product of eight tokens
/// reads the codes again.
pub const PROMPT_FROM: usize = 48;

/// A model that does not come to the device, or a step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A matrix that the kernels do not run, or memory that is short.
    #[error("{id}: {source}")]
    Matrix {
        /// Which matrix.
        id: LinearId,
        /// Why.
        source: LoadError,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An architecture that has no bodies here.
    #[error(
        "`{0}` runs on the processor only: what it adds to the residual stream is normalized first, for which there is no GPU kernel yet"
    )]
    Architecture(&'static str),
    /// A part was not given.
    #[error("model: {0} is missing")]
    Missing(String),
    /// More tokens than the state holds.
    #[error("the context of {capacity} tokens is full: {len} are held, {got} more were given")]
    ContextFull {
        /// Most tokens.
        capacity: usize,
        /// Tokens held.
        len: usize,
        /// Tokens given.
        got: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

#[derive(Debug)]
enum Linear<'d, D: Device> {
    Packed(Box<DeviceMatrix<'d, D>>),
    Dense(DenseMatrix<'d, D>),
}

/// Matrices that read one input, each writing its own rows of one output.
#[derive(Debug)]
struct Group<'d, D: Device> {
    parts: Vec<(usize, Linear<'d, D>)>, // first output row
    rows: usize,
}

#[derive(Debug)]
struct Layer<'d, D: Device> {
    qkv: Group<'d, D>,
    output: Group<'d, D>,
    gate_up: Group<'d, D>,
    down: Group<'d, D>,
    attention_norm: Buffer<'d, D>,
    mlp_norm: Buffer<'d, D>,
    query_norm: Option<Buffer<'d, D>>,
    key_norm: Option<Buffer<'d, D>>,
    attention_in: Option<RotationTables<'d, D>>,
    output_in: Option<RotationTables<'d, D>>,
    mlp_in: Option<RotationTables<'d, D>>,
    down_in: Option<RotationTables<'d, D>>,
}

/// What comes between the final norm and the head.
#[derive(Debug)]
enum HeadTurn<'d, D: Device> {
    Plain,
    Rotate(RotationTables<'d, D>),
    Regain(RotationTables<'d, D>),
}

/// A decoder on a device.
#[derive(Debug)]
pub struct DeviceModel<'d, D: Device> {
    device: &'d D,
    config: ModelConfig,
    embed: DenseMatrix<'d, D>,
    embed_out: Option<RotationTables<'d, D>>,
    head: Option<Group<'d, D>>, // None: the embedding
    head_turn: HeadTurn<'d, D>,
    final_norm: Buffer<'d, D>,
    layers: Vec<Layer<'d, D>>,
    work: Workspace<'d, D>,
    eps: f32,
}

/// Takes logits (tokens, vocabulary).
pub type Each<'a, E> = dyn FnMut(&[f32]) -> Result<(), E> + 'a;

/// One sequence.
#[derive(Debug)]
pub struct DeviceState<'d, D: Device> {
    pub(crate) step: Buffer<'d, D>,
    pub(crate) logits: Buffer<'d, D>, // (MAX_ROWS, vocabulary)
    x: Buffer<'d, D>,                 // (rows, hidden)
    n: Buffer<'d, D>,                 // (rows, widest input)
    turned: Buffer<'d, D>,            // (rows, widest input)
    wide: Buffer<'d, D>,              // (rows, q + k + v or gate + up)
    /// Tokens that may run together.
    rows: usize,
    caches: Vec<Cache<'d, D>>,
    attention: AttentionWork<'d, D>,
    turns: Buffer<'d, D>,
    shape: AttentionShape,
    pub(crate) len: usize,
}

impl<D: Device> DeviceState<'_, D> {
    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shape.capacity
    }

    /// Waits for everything launched for it.
    ///
    /// # Errors
    /// When a launch failed.
    pub fn wait(&self) -> Result<(), Error> {
        self.step.read::<u32>(1)?;
        Ok(())
    }

    /// Forgets all tokens but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

/// What long prompts take beside a state: inputs in half precision, and one expanded matrix.
#[derive(Debug)]
pub(crate) struct Dense<'d, D: Device> {
    halves: Buffer<'d, D>,
    weights: Buffer<'d, D>,
}

/// Weights as they were read.
enum Part {
    Packed(Box<PackedMatrixData<'static>>),
    Dense(Vec<u16>),
}

/// Collects the parts of a [`DeviceModel`]; matrices stay in main memory until [`Builder::build`]
/// or until their group is whole.
pub struct Builder<'d, D: Device> {
    device: &'d D,
    config: ModelConfig,
    sites: Sites,
    parts: BTreeMap<LinearId, (Part, Option<Vec<f32>>)>,
    norms: Vec<(FloatId, Vec<f32>)>,
}

impl<D: Device> std::fmt::Debug for Builder<'_, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}

impl<'d, D: Device> Builder<'d, D> {
    /// An empty model whose weights are rotated as `sites` says.
    ///
    /// # Errors
    /// [`Error::Architecture`].
    pub fn new(device: &'d D, config: ModelConfig, sites: Sites) -> Result<Self, Error> {
        let other_norms = config.post_norms || config.qk_norm == QkNorm::Whole;
        let other_mlp = config.activation != Activation::Silu || config.experts.is_some();
        let other_rope = config.local_rope.is_some() || config.rope.growth.is_some();
        if other_norms || other_mlp || other_rope {
            return Err(Error::Architecture(config.arch.model_type()));
        }
        Ok(Self { device, config, sites, parts: BTreeMap::new(), norms: Vec::new() })
    }

    /// Sets a packed matrix.
    pub fn packed(&mut self, id: LinearId, view: &PackedView<'_>, bias: Option<Vec<f32>>) {
        self.parts.insert(id, (Part::Packed(Box::new(view.to_data())), bias));
    }

    /// Sets a dense matrix, rounded to half precision.
    pub fn dense(&mut self, id: LinearId, weights: &[f32], bias: Option<Vec<f32>>) {
        let halves = weights.iter().map(|&w| f16::from_f32(w).to_bits()).collect();
        self.parts.insert(id, (Part::Dense(halves), bias));
    }

    /// Sets a dense matrix of f16 bits (rows, cols).
    pub fn halves(&mut self, id: LinearId, weights: Vec<u16>, bias: Option<Vec<f32>>) {
        self.parts.insert(id, (Part::Dense(weights), bias));
    }

    /// Sets a norm's gain.
    pub fn norm(&mut self, id: FloatId, gain: Vec<f32>) {
        self.norms.push((id, gain));
    }

    fn gain(&self, id: FloatId) -> Result<Buffer<'d, D>, Error> {
        let found = self.norms.iter().find(|(other, _)| *other == id);
        let (_, gain) = found.ok_or_else(|| Error::Missing(format!("{id:?}")))?;
        Ok(Buffer::of(self.device, gain, "norms")?)
    }

    /// Brings matrices that read one input to the device, as one where they share a scheme.
    fn group(&mut self, ids: &[LinearId]) -> Result<Group<'d, D>, Error> {
        let device = self.device;
        let mut taken = Vec::new();
        for &id in ids {
            let (part, bias) = self.parts.remove(&id).ok_or_else(|| Error::Missing(id.to_string()))?;
            taken.push((id, id.shape(&self.config), part, bias));
        }
        let views: Option<Vec<PackedView<'_>>> = taken
            .iter()
            .map(|(_, _, part, _)| match part {
                Part::Packed(data) => Some(data.view()),
                Part::Dense(_) => None,
            })
            .collect();
        let bad = |id: LinearId| move |source: LoadError| Error::Matrix { id, source };
        let rows = taken.iter().map(|(_, shape, ..)| shape.rows).sum();
        if let Some(views) = &views {
            let all: Vec<&PackedView<'_>> = views.iter().collect();
            if DeviceMatrix::<D>::stackable(&all) {
                let bias = taken.iter().any(|(.., bias)| bias.is_some()).then(|| {
                    let zeros = |n: usize| vec![0.0; n];
                    taken.iter().flat_map(|(_, s, _, b)| b.clone().unwrap_or_else(|| zeros(s.rows))).collect()
                });
                let bias: Option<Vec<f32>> = bias;
                let matrix = DeviceMatrix::stacked(device, &all, bias.as_deref()).map_err(bad(ids[0]))?;
                return Ok(Group { parts: vec![(0, Linear::Packed(Box::new(matrix)))], rows });
            }
        }
        let (mut parts, mut first) = (Vec::new(), 0);
        for (id, shape, part, bias) in &taken {
            let linear = match part {
                Part::Packed(data) => {
                    let matrix = DeviceMatrix::new(device, &data.view(), bias.as_deref());
                    Linear::Packed(Box::new(matrix.map_err(bad(*id))?))
                }
                Part::Dense(weights) => {
                    let dense = DenseMatrix::new(device, (shape.rows, shape.cols), weights, bias.as_deref());
                    Linear::Dense(dense?)
                }
            };
            parts.push((first, linear));
            first += shape.rows;
        }
        Ok(Group { parts, rows })
    }

    /// Embedding rows, turned back and divided by their factors, as f16 bits; `None` where they are
    /// used as they are.
    fn divided(&self) -> Result<Option<Vec<u16>>, Error> {
        let (Some(divisors), Some(rotation)) = (self.sites.embedding_divisors(), self.sites.embed_out())
        else {
            return Ok(None);
        };
        let id = LinearId::Embed;
        let (part, _) = self.parts.get(&id).ok_or_else(|| Error::Missing(id.to_string()))?;
        let mut rows = match part {
            Part::Packed(data) => data.view().dequantize(),
            Part::Dense(halves) => halves.iter().map(|&h| f16::from_bits(h).to_f32()).collect(),
        };
        rotation.apply_rows_inverse(&mut rows);
        let by = divisors.iter().cycle();
        Ok(Some(rows.iter().zip(by).map(|(x, by)| f16::from_f32(x / by).to_bits()).collect()))
    }

    /// The model.
    ///
    /// # Errors
    /// When a part is missing or does not fit on the device.
    pub fn build(mut self) -> Result<DeviceModel<'d, D>, Error> {
        let (device, config) = (self.device, self.config.clone());
        let rotation = |r: &Option<Rotation>| r.as_ref().map(|r| tables(device, r)).transpose();
        let mut layers = Vec::new();
        for i in 0..config.num_hidden_layers() {
            let id = |which| LinearId::Layer(i, which);
            let qkv = self.group(&[id(LayerLinear::Q), id(LayerLinear::K), id(LayerLinear::V)])?;
            let output = self.group(&[id(LayerLinear::O)])?;
            let gate_up = self.group(&[id(LayerLinear::Gate), id(LayerLinear::Up)])?;
            let down = self.group(&[id(LayerLinear::Down)])?;
            let sites = self.sites.layer(i);
            layers.push(Layer {
                qkv,
                output,
                gate_up,
                down,
                attention_norm: self.gain(FloatId::Attention(i))?,
                mlp_norm: self.gain(FloatId::Mlp(i))?,
                query_norm: (config.qk_norm == QkNorm::Heads)
                    .then(|| self.gain(FloatId::Query(i)))
                    .transpose()?,
                key_norm: (config.qk_norm == QkNorm::Heads)
                    .then(|| self.gain(FloatId::Key(i)))
                    .transpose()?,
                attention_in: rotation(&sites.attention_in)?,
                output_in: rotation(&sites.output_in)?,
                mlp_in: rotation(&sites.mlp_in)?,
                down_in: rotation(&sites.down_in)?,
            });
        }
        // The embedding is read by rows: a packed one is expanded. Tied, the packed form serves the
        // head.
        let shape = LinearId::Embed.shape(&config);
        let divided = self.divided()?;
        let group = self.group(&[LinearId::Embed])?;
        let mut tied_head = None;
        let embed_out = self.sites.embed_out().filter(|_| divided.is_none());
        let embed_out = embed_out.map(|r| tables(device, r)).transpose()?;
        let embed = match (divided, group.parts.into_iter().next()) {
            (Some(table), Some(part)) => {
                tied_head = Some(Group { parts: vec![part], rows: shape.rows });
                DenseMatrix::new(device, (shape.rows, shape.cols), &table, None)?
            }
            (None, Some((_, Linear::Dense(dense)))) => dense,
            (None, Some((_, Linear::Packed(matrix)))) => {
                let table = Buffer::zeroed(device, 2 * shape.len(), "embedding")?;
                matrix.expand(&table, false)?;
                let rows = shape.rows;
                tied_head = Some(Group { parts: vec![(0, Linear::Packed(matrix))], rows });
                DenseMatrix::of_buffer(table, shape.rows, shape.cols)
            }
            (_, None) => return Err(Error::Missing(LinearId::Embed.to_string())),
        };
        let head = if config.tie_word_embeddings { tied_head } else { Some(self.group(&[LinearId::Head])?) };
        let head_turn = match self.sites.head() {
            HeadSite::Plain => HeadTurn::Plain,
            HeadSite::Rotate(r) => HeadTurn::Rotate(tables(device, r)?),
            HeadSite::Regain(r) => HeadTurn::Regain(tables(device, r)?),
        };
        let final_norm = self.gain(FloatId::Final)?;
        let work = {
            let groups = layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]).chain(&head);
            let packed = groups.flat_map(|g| &g.parts).filter_map(|(_, linear)| match linear {
                Linear::Packed(matrix) => Some(&**matrix),
                Linear::Dense(_) => None,
            });
            Workspace::new(device, packed)?
        };
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let eps = config.rms_norm_eps as f32;
        Ok(DeviceModel { device, embed, embed_out, head, head_turn, final_norm, layers, work, eps, config })
    }
}

/// A rotation's tables on the device.
///
/// # Errors
/// [`DeviceError::Memory`].
///
/// # Panics
/// Never: the rule that splits widths picks orders that have a matrix.
pub fn tables<'d, D: Device>(
    device: &'d D,
    rotation: &Rotation,
) -> Result<RotationTables<'d, D>, DeviceError> {
    let n = rotation.width();
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "the scale is a float")]
    let scale = (1.0 / (n as f64).sqrt()) as f32;
    let signs: Vec<f32> = rotation.signs().map(|s| s * scale).collect();
    let dense = |factor: &Factor| match *factor {
        Factor::Walsh(_) => None,
        Factor::Hadamard(order) => {
            let h = HadamardMatrix::new(order).expect("the rule picks orders that have a matrix");
            let entries = (0..order * order).map(|i| f32::from(h.entry(i / order, i % order)));
            Some((order, entries.collect()))
        }
        Factor::Hartley(order) => {
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "angles")]
            let cas = |i: usize| {
                let angle = std::f64::consts::TAU * (i % order) as f64 / order as f64;
                (angle.cos() + angle.sin()) as f32
            };
            Some((order, (0..order * order).map(|i| cas(i / order * (i % order))).collect()))
        }
    };
    let factors: Vec<(usize, Vec<f32>)> = rotation.hadamard().factors().iter().filter_map(dense).collect();
    RotationTables::new(device, &signs, &factors)
}

impl<'d, D: Device> Group<'d, D> {
    fn apply(
        &self,
        model: &DeviceModel<'d, D>,
        x: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        batch: usize,
        accumulate: bool,
        many: Option<&Dense<'d, D>>,
    ) -> Result<(), DeviceError> {
        if let Some(Dense { halves, weights }) = many {
            let cols = match &self.parts[0].1 {
                Linear::Packed(m) => m.shape().cols,
                Linear::Dense(m) => m.cols(),
            };
            ops::halve(model.device, x, halves, batch * cols)?;
            return self.parts.iter().try_for_each(|(offset, linear)| {
                let place = (*offset, self.rows);
                match linear {
                    Linear::Packed(m) => m.apply_many(halves, weights, y, place, batch, accumulate),
                    Linear::Dense(m) => m.apply_many(model.device, halves, y, place, batch, accumulate),
                }
            });
        }
        self.parts.iter().try_for_each(|(offset, linear)| match linear {
            Linear::Packed(m) => m.apply_at(x, y, (*offset, self.rows), batch, accumulate, &model.work),
            Linear::Dense(m) => m.apply_at(model.device, x, y, (*offset, self.rows), batch, accumulate),
        })
    }
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(crate) fn device(&self) -> &'d D {
        self.device
    }

    /// Launches that one step of the packed products takes: fewer where matrices share a scheme.
    #[must_use]
    pub fn products(&self) -> usize {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        groups.map(|g| g.parts.len()).sum()
    }

    /// Bytes of weights that a step reads.
    #[must_use]
    pub fn step_bytes(&self) -> usize {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        let parts = groups.chain(&self.head).flat_map(|g| &g.parts);
        let read: usize = parts
            .map(|(_, linear)| match linear {
                Linear::Packed(matrix) => matrix.bytes(),
                Linear::Dense(matrix) => matrix.weights().bytes(),
            })
            .sum();
        read + if self.head.is_none() { self.embed.weights().bytes() } else { 0 }
    }

    /// An empty sequence of at most `capacity` tokens.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn state(&self, capacity: usize) -> Result<DeviceState<'d, D>, Error> {
        let (config, device) = (&self.config, self.device);
        let shape = AttentionShape {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            d: config.head_dim,
            capacity,
        };
        let widest = config.hidden_size.max(config.q_dim()).max(config.intermediate_size);
        let together = if capacity < PROMPT_FROM { MAX_ROWS } else { capacity.min(PROMPT) };
        let rows = |width: usize| Buffer::zeroed(device, 4 * together * width, "activations");
        let caches =
            (0..config.num_hidden_layers()).map(|_| Cache::new(device, &shape)).collect::<Result<_, _>>()?;
        Ok(DeviceState {
            step: Buffer::of(device, &[Step::new(0, &[])], "step")?,
            logits: Buffer::zeroed(device, 4 * MAX_ROWS * config.vocab_size, "logits")?,
            x: rows(config.hidden_size)?,
            n: rows(widest)?,
            turned: rows(widest)?,
            wide: rows(shape.row().max(2 * config.intermediate_size))?,
            rows: together,
            caches,
            attention: AttentionWork::new(device, &shape)?,
            turns: Buffer::of(device, &fracbit_model::turns(config, capacity), "rotary table")?,
            shape,
            len: 0,
        })
    }

    /// Checks that `tokens` may follow what `state` holds.
    pub(crate) fn check(&self, state: &DeviceState<'d, D>, tokens: &[u32]) -> Result<(), Error> {
        let vocabulary = self.config.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        let (capacity, len, got) = (state.capacity(), state.len, tokens.len());
        if len + got > capacity {
            return Err(Error::ContextFull { capacity, len, got });
        }
        Ok(())
    }

    /// Runs `tokens` after those in `state`; `each` gets the logits (tokens, vocabulary) of some of
    /// them at a time, in order.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], or what `each` returns.
    pub fn run<E: From<Error>>(
        &self,
        state: &mut DeviceState<'d, D>,
        tokens: &[u32],
        mut each: Option<&mut Each<'_, E>>,
    ) -> Result<(), E> {
        self.check(state, tokens)?;
        let dense = self.dense(state.rows.min(tokens.len()));
        let mut rest = tokens;
        while !rest.is_empty() {
            let many = dense.as_ref().filter(|_| rest.len() >= PROMPT_FROM);
            let (chunk, behind) =
                rest.split_at(rest.len().min(if many.is_some() { state.rows } else { MAX_ROWS }));
            rest = behind;
            state.step.write(&[Step::new(state.len, chunk)]).map_err(Error::Device)?;
            self.blocks(state, chunk.len(), many).map_err(Error::Device)?;
            state.len += chunk.len();
            let Some(each) = each.as_mut() else { continue };
            for first in (0..chunk.len()).step_by(MAX_ROWS) {
                let rows = MAX_ROWS.min(chunk.len() - first);
                self.head(state, first, rows).map_err(Error::Device)?;
                each(&state.logits.read(rows * self.config.vocab_size).map_err(Error::Device)?)?;
            }
        }
        Ok(())
    }

    /// Room for products with `rows` tokens as dense ones; `None` where they are not worth it, or
    /// memory is short: then tokens run eight at a time.
    fn dense(&self, rows: usize) -> Option<Dense<'d, D>> {
        let groups = || self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        let inputs = [self.config.hidden_size, self.config.q_dim(), self.config.intermediate_size];
        if rows < PROMPT_FROM || inputs.iter().any(|cols| !cols.is_multiple_of(8)) {
            return None;
        }
        let widest = inputs.into_iter().max().unwrap_or_default();
        let largest = groups().flat_map(|g| &g.parts).filter_map(|(_, linear)| match linear {
            Linear::Packed(matrix) => Some(matrix.shape().len()),
            Linear::Dense(_) => None,
        });
        let halves = Buffer::room(self.device, 2 * rows * widest, "inputs of a prompt").ok()?;
        let weights = Buffer::room(self.device, 2 * largest.max().unwrap_or_default(), "weights of a prompt");
        Some(Dense { halves, weights: weights.ok()? })
    }

    /// Launches embedding and blocks for the tokens of the step.
    pub(crate) fn blocks(
        &self,
        s: &DeviceState<'d, D>,
        rows: usize,
        many: Option<&Dense<'d, D>>,
    ) -> Result<(), DeviceError> {
        let (device, config, width) = (self.device, &self.config, self.config.hidden_size);
        match &self.embed_out {
            None => ops::embed(device, &s.step, self.embed.weights(), &s.x, rows, width)?,
            Some(tables) => {
                ops::embed(device, &s.step, self.embed.weights(), &s.n, rows, width)?;
                tables.rotate(device, &s.n, &s.x, rows, true, false)?;
            }
        }
        for ((i, layer), cache) in self.layers.iter().enumerate().zip(&s.caches) {
            let gain = Some(&layer.attention_norm);
            let input = self.normed(s, gain, layer.attention_in.as_ref(), (0, rows), false)?;
            layer.qkv.apply(self, input, &s.wide, rows, false, many)?;
            let options = HeadOptions {
                query_norm: layer.query_norm.as_ref(),
                key_norm: layer.key_norm.as_ref(),
                turns: config.layers[i].rope.then_some(&s.turns),
                eps: self.eps,
                window: config.layers[i].sliding_window.unwrap_or(0),
            };
            if rows <= FEW && s.shape.d.is_multiple_of(8) {
                ops::attend_few(&s.step, &s.wide, cache, &s.n, rows, &options, &s.attention)?;
            } else {
                ops::attention(&s.step, &s.wide, cache, &s.n, rows, &s.shape, &options)?;
            }
            let mut input = &s.n;
            if let Some(tables) = &layer.output_in {
                tables.rotate(device, &s.n, &s.turned, rows, false, false)?;
                input = &s.turned;
            }
            layer.output.apply(self, input, &s.x, rows, true, many)?;

            let gain = Some(&layer.mlp_norm);
            let input = self.normed(s, gain, layer.mlp_in.as_ref(), (0, rows), false)?;
            layer.gate_up.apply(self, input, &s.wide, rows, false, many)?;
            match &layer.down_in {
                Some(tables) => tables.rotate(device, &s.wide, &s.turned, rows, false, true)?,
                None => ops::swiglu(device, &s.wide, &s.turned, (rows, config.intermediate_size))?,
            }
            layer.down.apply(self, &s.turned, &s.x, rows, true, many)?;
        }
        Ok(())
    }

    /// Norm, and rotation where there is one, of `rows` rows of the residual stream from row
    /// `first` on; returns where they are.
    fn normed<'s>(
        &self,
        s: &'s DeviceState<'d, D>,
        gain: Option<&Buffer<'d, D>>,
        turn: Option<&RotationTables<'d, D>>,
        (first, rows): (usize, usize),
        inverse: bool,
    ) -> Result<&'s Buffer<'d, D>, DeviceError> {
        let (device, width) = (self.device, self.config.hidden_size);
        if let Some(tables) = turn.filter(|t| t.takes_few(device, rows)) {
            let before = Before { norm: Some(self.eps), gain, gated: false };
            tables.rotate_few(device, &s.x, &s.turned, (first, rows), inverse, &before)?;
            return Ok(&s.turned);
        }
        ops::norm(device, &s.x, gain, &s.n, (first, rows, width), self.eps)?;
        let Some(tables) = turn else { return Ok(&s.n) };
        tables.rotate(device, &s.n, &s.turned, rows, inverse, false)?;
        Ok(&s.turned)
    }

    /// Launches final norm and head for `rows` (at most eight) rows of the residual stream from row
    /// `first` on.
    pub(crate) fn head(&self, s: &DeviceState<'d, D>, first: usize, rows: usize) -> Result<(), DeviceError> {
        let (device, these) = (self.device, (first, rows));
        let input = match &self.head_turn {
            HeadTurn::Plain => self.normed(s, Some(&self.final_norm), None, these, false)?,
            HeadTurn::Rotate(tables) => self.normed(s, Some(&self.final_norm), Some(tables), these, false)?,
            HeadTurn::Regain(tables) => {
                self.normed(s, None, Some(tables), these, true)?;
                if tables.takes_few(device, rows) {
                    let before = Before { gain: Some(&self.final_norm), ..Before::default() };
                    tables.rotate_few(device, &s.turned, &s.n, (0, rows), false, &before)?;
                } else {
                    ops::gain(device, &s.turned, &self.final_norm, (rows, self.config.hidden_size))?;
                    tables.rotate(device, &s.turned, &s.n, rows, false, false)?;
                }
                &s.n
            }
        };
        match &self.head {
            Some(group) => group.apply(self, input, &s.logits, rows, false, None),
            None => self.embed.apply_at(device, input, &s.logits, (0, self.embed.rows()), rows, false),
        }
    }
}
