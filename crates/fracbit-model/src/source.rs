//! A checkpoint's weights in the form that is quantized or run: rotated, one matrix at a time.
//!
//! Holding one matrix is what bounds the memory of quantization: a source keeps nothing but the
//! memory map and the norm gains it is asked for. With y = W x + b, a norm's gain g, and the
//! orthogonal matrices R (residual stream), P (one head), D_i (input of down in block i), `fold`
//! yields
//!
//! | matrix | weight | bias |
//! | --- | --- | --- |
//! | embedding | E R^T (rows are R e) | |
//! | q, k, gate, up | W diag(g) R^T | b |
//! | v | (I ⊗ P) W diag(g) R^T | (I ⊗ P) b |
//! | o | R W (I ⊗ P)^T | R b |
//! | down | R W D_i^T | R b |
//! | head | W diag(g_final) R^T | |
//!
//! and `online` yields W S^T with the rotation S of each linear's input. Norm gains are 1 after
//! folding, except the final one of a tied model, which [`crate::rotations`] applies. Why queries,
//! keys and their norms stay as they are, and the general rules: [`fracbit_rotation::fold`]. We
//! deviate from its rule 3: tied embeddings stay one matrix.
//!
//! Where norms follow attention and MLP ([`ModelConfig::post_norms`]), o and down have no R: see
//! [`crate::rotations`].
//!
//! Before that W, b and g are those of the graph, not always the stored ones: o and down, or the
//! gains of the norms that follow them, are multiplied by [`ModelConfig::residual_factor`], the
//! final gain by [`ModelConfig::logit_factor`], gains are stored less [`ModelConfig::gain_offset`],
//! and where only the first channels of a head turn, the rows of q and k are put in the order that
//! [`crate::rope_table`] counts planes in.
//!
//! Where there are experts, gate, up and down are those of all of them, one above the other, and R
//! turns the output of each expert's down by itself. Their router reads what gate and up read, and
//! is turned as they are.
//!
//! P is shared by the heads of a block and drawn anew for each block.

use std::collections::HashSet;
use std::sync::Arc;

use fracbit_base::{Shape, ShapeError};
use fracbit_io::checkpoint::{EMBED, HEAD};
use fracbit_io::{Checkpoint, EmbeddingNames, ModelConfig, QkNorm};
use fracbit_rotation::fold::fold_gain;
use fracbit_rotation::{BlockRotation, Rotation};
use rayon::prelude::*;

use crate::Error;
use crate::block::BlockInput;
use crate::id::{FloatId, LayerLinear, LinearId};
use crate::rotations::{OnlineRotations, RESIDUAL, RotationMode, Stream, stream};
use crate::smoothing::{Place, Smoothing};
use crate::stored::Change;

/// Weights that a thread checks in one go.
const CHECKED_AT_ONCE: usize = 1 << 18;

/// A weight matrix in full precision.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Outputs by inputs.
    pub shape: Shape,
    /// Row-major.
    pub data: Vec<f32>, // (rows, cols)
}

/// Yields a model's weights, rotated.
#[derive(Clone, Debug)]
pub struct WeightSource {
    checkpoint: Arc<Checkpoint>,
    config: ModelConfig,
    rotations: OnlineRotations,
    residual: Option<Rotation>, // (hidden); fold only
    names: EmbeddingNames,
    smoothing: Arc<Smoothing>,
}

impl WeightSource {
    /// Checks that every tensor the configuration asks for is stored with its shape, and that no
    /// stored bias or norm would be ignored. Reads no weights. Fused tensors should be parted
    /// ([`Checkpoint::parted`]).
    ///
    /// # Errors
    /// [`Error::Io`] naming the tensor that is missing or has another shape, [`Error::Unexpected`],
    /// [`Error::Rotation`].
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        config: ModelConfig,
        mode: RotationMode,
        seed: u64,
    ) -> Result<Self, Error> {
        let names = checkpoint.embedding_names(&config)?;
        check_tensors(&checkpoint, &config, names)?;
        let rotations = OnlineRotations::new(&config, mode, seed)?;
        let residual = match mode {
            RotationMode::Fold => Some(Rotation::new(config.hidden_size, seed, RESIDUAL)?),
            RotationMode::None | RotationMode::Online => None,
        };
        Ok(Self { checkpoint, config, rotations, residual, names, smoothing: Arc::default() })
    }

    /// The same weights with the factors of `smoothing`: between norms and what reads them only
    /// where gains are not folded, and without a rotation nowhere.
    ///
    /// # Panics
    /// When there is not one factor for each channel of a place.
    #[must_use]
    pub fn smoothed(self, smoothing: Arc<Smoothing>) -> Self {
        for place in Place::all(&self.config) {
            let len = smoothing.of(place).map(<[f32]>::len);
            assert!(
                len.is_none_or(|len| len == place.width(&self.config)),
                "one factor for each channel of {place:?}"
            );
        }
        let mut source = Self { smoothing, ..self };
        let divisors = source.factors(Place::Head).filter(|_| source.config.tie_word_embeddings);
        let divisors = divisors.map(<[f32]>::to_vec);
        source.rotations = source.rotations.with_embedding_divisors(divisors).expect("as wide as the place");
        source
    }

    /// The factors between inputs and weights.
    #[must_use]
    pub fn smoothing(&self) -> &Arc<Smoothing> {
        &self.smoothing
    }

    /// The factors of a place that are in force.
    fn factors(&self, place: Place) -> Option<&[f32]> {
        let folded = matches!(place, Place::Head | Place::Block(_, BlockInput::Attention | BlockInput::Mlp));
        match self.rotations.mode() {
            RotationMode::None => None,
            RotationMode::Fold if folded => None,
            RotationMode::Fold | RotationMode::Online => self.smoothing.of(place),
        }
    }

    /// The factors of the columns of a matrix, its inputs being divided by them: a folded gain, or
    /// those of [`Smoothing`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn columns(&self, id: LinearId) -> Result<Option<Vec<f32>>, Error> {
        let config = &self.config;
        let (norm, place) = match id {
            LinearId::Embed if config.tie_word_embeddings => (None, Place::Head), // its gain is not folded
            LinearId::Embed => return Ok(None),
            LinearId::Head => (Some(FloatId::Final), Place::Head),
            LinearId::Layer(i, linear) => {
                (FloatId::before(config, i, linear), Place::Block(i, BlockInput::of(linear)))
            }
        };
        if let Some(norm) = norm.filter(|norm| norm.folded(config, self.rotations.mode())) {
            return Ok(Some(self.stored_norm(norm)?));
        }
        Ok(self.factors(place).map(|f| match id {
            LinearId::Layer(_, LayerLinear::O) => self.of_heads(f),
            _ => f.to_vec(),
        }))
    }

    /// Factors of the values' channels, for every head that reads them.
    fn of_heads(&self, values: &[f32]) -> Vec<f32> {
        let group = self.config.num_attention_heads / self.config.num_key_value_heads;
        let heads = values.chunks_exact(self.config.head_dim);
        heads.flat_map(|head| std::iter::repeat_n(head, group).flatten().copied()).collect()
    }

    /// What the rows of a matrix are divided by, since what reads them is multiplied with it.
    fn divisors(&self, id: LinearId) -> Option<Vec<f32>> {
        let normed = self.config.qk_norm != QkNorm::Absent;
        match id {
            LinearId::Layer(i, LayerLinear::V) => {
                self.factors(Place::Block(i, BlockInput::Output)).map(<[f32]>::to_vec)
            }
            LinearId::Layer(i, LayerLinear::Up) => {
                self.factors(Place::Block(i, BlockInput::Down)).map(<[f32]>::to_vec)
            }
            LinearId::Layer(i, LayerLinear::K) if !normed => self.key_divisors(i),
            LinearId::Layer(i, LayerLinear::Q) if !normed => self.query_divisors(i),
            _ => None,
        }
    }

    /// What the numbers of keys are divided by, (kv head, head_dim), or (head_dim) where heads
    /// share the gain of a norm.
    fn key_divisors(&self, layer: usize) -> Option<Vec<f32>> {
        let heads = self.factors(Place::Keys(layer))?.chunks_exact(self.config.head_dim / 2);
        Some(heads.flat_map(|planes| [planes, planes].concat()).collect())
    }

    /// Of queries, the inverse: (head, head_dim), or (head_dim).
    fn query_divisors(&self, layer: usize) -> Option<Vec<f32>> {
        let keys: Vec<f32> = self.key_divisors(layer)?.iter().map(|f| 1.0 / f).collect();
        Some(if self.config.qk_norm == QkNorm::Heads { keys } else { self.of_heads(&keys) })
    }

    /// Every stored tensor that the model is made of.
    fn tensors(&self) -> impl Iterator<Item = String> + '_ {
        let config = &self.config;
        let linears = LinearId::all(config).flat_map(|id| {
            self.weight_names(id).into_iter().chain(id.has_bias(config).then(|| id.bias_name()))
        });
        linears.chain(FloatId::all(config).map(|id| id.weight_name()))
    }

    /// Reads every weight once and checks that it is finite, so that work of hours does not end at
    /// the last matrix.
    ///
    /// # Errors
    /// [`Error::Io`] naming tensor, row and column.
    pub fn check_finite(&self) -> Result<(), Error> {
        for name in self.tensors() {
            let (rows, cols) = self.checkpoint.info(&name)?.rows_cols();
            let step = (CHECKED_AT_ONCE / cols.max(1)).clamp(1, rows.max(1));
            let checked = (0..rows.div_ceil(step)).into_par_iter().map(|i| {
                let part = i * step..rows.min((i + 1) * step);
                let mut values = vec![0.0; part.len() * cols];
                self.checkpoint.rows_f32_into(&name, part, &mut values)
            });
            // The first bad row, whichever thread is first.
            checked.collect::<Vec<_>>().into_iter().collect::<Result<(), _>>()?;
        }
        Ok(())
    }

    /// Stored tensors that are no part of the model, sorted: further blocks, other modalities.
    /// Rotary frequencies, which follow from the configuration, are not among them, nor the second
    /// copy of a tied embedding.
    #[must_use]
    pub fn unused(&self) -> Vec<&str> {
        let used: HashSet<String> = self.tensors().chain([EMBED, HEAD].map(str::to_owned)).collect();
        let known = |name: &str| used.contains(name) || name.ends_with(".rotary_emb.inv_freq");
        self.checkpoint.names().filter(|name| !known(name)).collect()
    }

    /// The checkpoint the weights come from.
    #[must_use]
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What a runtime of these weights has to rotate itself.
    #[must_use]
    pub fn rotations(&self) -> &OnlineRotations {
        &self.rotations
    }

    /// The stored tensors of a matrix, one for each of its [pieces](LinearId::pieces); a tied
    /// embedding may be stored as `lm_head.weight`.
    #[must_use]
    pub fn weight_names(&self, id: LinearId) -> Vec<String> {
        id.stored_names(&self.config, self.names)
    }

    /// Reads and rotates one matrix. Peak memory: the matrix in f32.
    ///
    /// # Errors
    /// [`Error::Io`] for NaN or infinite weights, [`Error::UnknownLinear`].
    pub fn linear(&self, id: LinearId) -> Result<Matrix, Error> {
        self.check(id)?;
        let shape = id.shape(&self.config);
        let mut data = vec![0.0; shape.len()];
        let each = id.piece_shape(&self.config).len();
        for (name, piece) in self.weight_names(id).iter().zip(data.chunks_exact_mut(each)) {
            let rows = self.checkpoint.info(name)?.rows_cols().0;
            self.checkpoint.rows_f32_into(name, 0..rows, piece)?;
        }
        self.change(id).apply(&mut data, shape.cols);
        if let Some(columns) = self.columns(id)? {
            fold_gain(&mut data, &columns);
        }
        if let Some(divisors) = self.divisors(id) {
            for (row, by) in data.chunks_exact_mut(shape.cols).zip(divisors) {
                row.iter_mut().for_each(|w| *w /= by);
            }
        }
        match self.rotations.mode() {
            RotationMode::None => {}
            RotationMode::Fold => self.fold(id, shape, &mut data)?,
            RotationMode::Online => rotate_input(&self.online_input(id)?, &mut data),
        }
        Ok(Matrix { shape, data })
    }

    /// How the stored rows of a matrix, and the entries of its bias, become those of the model
    /// before any rotation.
    pub(crate) fn change(&self, id: LinearId) -> Change {
        Change::of(&self.config, id)
    }

    fn fold(&self, id: LinearId, shape: Shape, data: &mut [f32]) -> Result<(), Error> {
        let residual = self.residual.as_ref().expect("made for this mode");
        match id {
            LinearId::Embed | LinearId::Head => rotate_input(residual, data),
            LinearId::Layer(i, linear) => match linear {
                LayerLinear::Q | LayerLinear::K | LayerLinear::Gate | LayerLinear::Up => {
                    rotate_input(residual, data)
                }
                LayerLinear::V => {
                    rotate_input(residual, data);
                    self.heads(i, self.config.num_key_value_heads)?.rotate_output(data, shape.cols);
                }
                LayerLinear::O => {
                    rotate_input(self.heads(i, self.config.num_attention_heads)?.rotation(), data);
                    if !self.config.post_norms {
                        residual.rotate_output(data, shape.cols);
                    }
                }
                LayerLinear::Down => {
                    let down = self.rotations.layers[i].down_in.as_ref().expect("folding leaves this stream");
                    rotate_input(down, data);
                    if !self.config.post_norms {
                        let each = id.piece_shape(&self.config).len();
                        data.chunks_exact_mut(each)
                            .for_each(|piece| residual.rotate_output(piece, shape.cols));
                    }
                }
            },
        }
        Ok(())
    }

    fn online_input(&self, id: LinearId) -> Result<Rotation, Error> {
        let input = match id {
            LinearId::Embed | LinearId::Head => self.rotations.embed_out.as_ref(),
            LinearId::Layer(i, linear) => {
                let rotations = &self.rotations.layers[i];
                match linear {
                    LayerLinear::Q | LayerLinear::K | LayerLinear::V => rotations.attention_in.as_ref(),
                    LayerLinear::O => rotations.output_in.as_ref(),
                    LayerLinear::Gate | LayerLinear::Up => rotations.mlp_in.as_ref(),
                    LayerLinear::Down => rotations.down_in.as_ref(),
                }
            }
        };
        Ok(input.expect("every linear has a stream in this mode").clone())
    }

    /// The per-head rotation of a block, over `heads` heads.
    fn heads(&self, layer: usize, heads: usize) -> Result<BlockRotation, Error> {
        let one = Rotation::new(self.config.head_dim, self.rotations.seed(), stream(layer, Stream::Heads))?;
        Ok(BlockRotation::new(one, heads)?)
    }

    /// The bias that goes with [`WeightSource::linear`].
    ///
    /// # Errors
    /// As there.
    pub fn bias(&self, id: LinearId) -> Result<Option<Vec<f32>>, Error> {
        self.check(id)?;
        if !id.has_bias(&self.config) {
            return Ok(None);
        }
        let mut bias = self.checkpoint.to_f32(&id.bias_name())?;
        self.change(id).apply(&mut bias, 1);
        if let Some(divisors) = self.divisors(id) {
            bias.iter_mut().zip(divisors).for_each(|(b, by)| *b /= by);
        }
        if self.rotations.mode() == RotationMode::Fold
            && let LinearId::Layer(i, linear) = id
        {
            let residual = self.residual.as_ref().expect("made for this mode");
            match linear {
                LayerLinear::V => self.heads(i, self.config.num_key_value_heads)?.apply(&mut bias),
                LayerLinear::O | LayerLinear::Down if !self.config.post_norms => residual.apply(&mut bias),
                _ => {}
            }
        }
        Ok(Some(bias))
    }

    /// A norm's gain, the stored one or ones where it was folded into its readers; or a router,
    /// rotated as the matrices that read the same.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn floats(&self, id: FloatId) -> Result<Vec<f32>, Error> {
        if let FloatId::Router(i) = id {
            return self.router(i);
        }
        if id.folded(&self.config, self.rotations.mode()) {
            return Ok(vec![1.0; id.width(&self.config)]);
        }
        let mut gain = self.stored_norm(id)?;
        if let Some(divisors) = self.gain_divisors(id) {
            gain.iter_mut().zip(divisors).for_each(|(g, by)| *g /= by);
        }
        Ok(gain)
    }

    /// What a gain is divided by, since what reads behind it is multiplied with it.
    fn gain_divisors(&self, id: FloatId) -> Option<Vec<f32>> {
        let of = |place| self.factors(place).map(<[f32]>::to_vec);
        match id {
            FloatId::Attention(i) => of(Place::Block(i, BlockInput::Attention)),
            FloatId::Mlp(i) | FloatId::MlpIn(i) => of(Place::Block(i, BlockInput::Mlp)),
            FloatId::Final => of(Place::Head),
            FloatId::Key(i) => self.key_divisors(i),
            FloatId::Query(i) => self.query_divisors(i),
            FloatId::AttentionOut(_) | FloatId::MlpOut(_) | FloatId::Router(_) => None,
        }
    }

    /// What the gain of the final norm is less here than in the checkpoint, having moved into a
    /// head of its own: by these factors (hidden) the normalized final hidden states, turned back,
    /// become those of the checkpoint. `None` of a tied model, and where nothing is rotated.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn final_factors(&self) -> Result<Option<Vec<f32>>, Error> {
        let (config, mode) = (&self.config, self.rotations.mode());
        if config.tie_word_embeddings || mode == RotationMode::None {
            return Ok(None);
        }
        if FloatId::Final.folded(config, mode) {
            return Ok(Some(self.stored_norm(FloatId::Final)?));
        }
        let factors = self.gain_divisors(FloatId::Final);
        Ok(Some(factors.unwrap_or_else(|| vec![1.0; config.hidden_size])))
    }

    fn router(&self, i: usize) -> Result<Vec<f32>, Error> {
        let mut weights = self.checkpoint.to_f32(&FloatId::Router(i).weight_name())?;
        if let Some(columns) = self.columns(LinearId::Layer(i, LayerLinear::Gate))? {
            fold_gain(&mut weights, &columns);
        }
        if let Some(residual) = &self.residual {
            rotate_input(residual, &mut weights);
        } else if let Some(rotation) = &self.rotations.layers[i].mlp_in {
            rotate_input(rotation, &mut weights);
        }
        Ok(weights)
    }

    /// A norm's gain before folding.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn unfolded_norm(&self, id: FloatId) -> Result<Vec<f32>, Error> {
        self.stored_norm(id)
    }

    /// Embedding rows of tokens, (tokens, hidden), in the basis of the residual stream.
    ///
    /// # Errors
    /// [`Error::Token`] for one outside the vocabulary, [`Error::Io`].
    pub fn embedding(&self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let (width, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut x = vec![0.0; tokens.len() * width];
        for (&token, row) in tokens.iter().zip(x.chunks_exact_mut(width)) {
            let at = token as usize;
            if at >= vocab {
                return Err(Error::Token { token, vocab });
            }
            self.checkpoint.rows_f32_into(self.names.embed, at..at + 1, row)?;
        }
        if let Some(residual) = &self.residual {
            residual.apply_rows(&mut x);
        }
        Ok(x)
    }

    /// Turns embedding rows as [`WeightSource::linear`] yields them into rows of the residual
    /// stream.
    pub fn embedded(&self, rows: &mut [f32]) {
        if let Some(rotation) = &self.rotations.embed_out {
            rotation.apply_rows_inverse(rows);
            self.rotations.divide(rows);
        }
    }

    /// Turns rows of the residual stream back to the basis of the checkpoint.
    pub(crate) fn unrotate_residual(&self, x: &mut [f32]) {
        if let Some(residual) = &self.residual {
            residual.apply_rows_inverse(x);
        }
    }

    /// Takes the second moments of what a linear reads, (inputs, inputs) row-major, from the basis
    /// of the checkpoint to that of [`WeightSource::linear`]: if weights W become W A, the inputs x
    /// become A^-1 x and their moments H become A^-1 H A^-T.
    ///
    /// Channels whose folded gain is 0 have no weights left; their moments become 0. The moments of
    /// an embedding are those of the head that it is tied to.
    ///
    /// # Errors
    /// [`Error::UnknownLinear`], [`Error::Shape`] for another size, [`Error::Io`],
    /// [`Error::Rotation`].
    pub fn rotate_moments(&self, id: LinearId, moments: &mut [f32]) -> Result<(), Error> {
        self.check(id)?;
        let n = id.shape(&self.config).cols;
        ShapeError::check_len("moments", "entries", n * n, moments.len())?;
        let both = |rotation: &Rotation, moments: &mut [f32]| {
            rotate_input(rotation, moments);
            rotation.rotate_output(moments, n);
        };
        if let Some(columns) = self.columns(id)? {
            let inverse: Vec<f32> = columns.iter().map(|&g| if g == 0.0 { 0.0 } else { 1.0 / g }).collect();
            for (row, &left) in moments.chunks_exact_mut(n).zip(&inverse) {
                row.iter_mut().zip(&inverse).for_each(|(h, &right)| *h = *h * left * right);
            }
        }
        match (self.rotations.mode(), id) {
            (RotationMode::None, _) => return Ok(()),
            (RotationMode::Online, _) => both(&self.online_input(id)?, moments),
            (RotationMode::Fold, LinearId::Layer(i, LayerLinear::O)) => {
                let heads = self.heads(i, self.config.num_attention_heads)?;
                heads.apply_rows(moments);
                heads.rotate_output(moments, n);
            }
            (RotationMode::Fold, LinearId::Layer(i, LayerLinear::Down)) => {
                both(self.rotations.layers[i].down_in.as_ref().expect("folding leaves this stream"), moments);
            }
            (RotationMode::Fold, _) => {
                both(self.residual.as_ref().expect("made for this mode"), moments);
            }
        }
        // Rounding made the two halves differ in their last bits.
        for i in 0..n {
            for j in 0..i {
                moments[j * n + i] = moments[i * n + j];
            }
        }
        Ok(())
    }

    fn stored_norm(&self, id: FloatId) -> Result<Vec<f32>, Error> {
        let mut gain = self.checkpoint.to_f32(&id.weight_name())?;
        let factor = id.factor(&self.config);
        let offset = self.config.gain_offset;
        if factor != 1.0 || offset != 0.0 {
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            gain.iter_mut().for_each(|g| *g = ((f64::from(*g) + offset) * factor) as f32);
        }
        Ok(gain)
    }

    fn check(&self, id: LinearId) -> Result<(), Error> {
        if id.exists(&self.config) { Ok(()) } else { Err(Error::UnknownLinear(id.to_string())) }
    }
}

fn check_tensors(checkpoint: &Checkpoint, config: &ModelConfig, names: EmbeddingNames) -> Result<(), Error> {
    for id in LinearId::all(config) {
        let shape = id.shape(config);
        let one = id.piece_shape(config);
        for name in id.stored_names(config, names) {
            checkpoint.expect_weights(&name, &[one.rows, one.cols])?;
        }
        let bias = id.bias_name();
        if id.has_bias(config) {
            checkpoint.expect_weights(&bias, &[shape.rows])?;
        } else if checkpoint.contains(&bias) && !checkpoint.is_zero(&bias)? {
            return Err(Error::Unexpected { tensor: bias, rule: "`attention_bias` or `mlp_bias`" });
        }
    }
    for id in FloatId::all(config) {
        checkpoint.expect_weights(&id.weight_name(), &id.dimensions(config))?;
    }
    if config.qk_norm == QkNorm::Absent {
        let norms = (0..config.num_hidden_layers()).flat_map(|i| [FloatId::Query(i), FloatId::Key(i)]);
        if let Some(id) = norms.into_iter().find(|id| checkpoint.contains(&id.weight_name())) {
            return Err(Error::Unexpected { tensor: id.weight_name(), rule: "`model_type`" });
        }
    }
    Ok(())
}

/// W ← W S^T, or blockwise where S is narrower than a row: rows in parallel, each with the bits it
/// would get alone.
fn rotate_input(rotation: &Rotation, data: &mut [f32]) {
    data.par_chunks_mut(64 * rotation.width()).for_each(|rows| rotation.apply_rows(rows));
}
