//! One block on its own: hidden states go in, hidden states come out, and observers see what each
//! linear layer reads.
//!
//! Calibration streams the hidden states of a whole text through a model block by block, so that
//! only one block's weights are in use at a time. The pieces at the ends are
//! [`WeightSource::embedding`] and [`head_input`].

use std::sync::Arc;

use fracbit_base::Shape;
use fracbit_kernels::{Kernels, vectors::plain::rms_norm};

use crate::id::{FloatId, LayerLinear, LinearId};
use crate::linear::{Linear, Observer};
use crate::rotations::{HeadRotation, OnlineRotations};
use crate::state::{State, StateOptions};
use crate::{Error, Model, ModelBuilder, WeightSource};

/// The inputs of a block's linear layers: each is shared by the layers that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockInput {
    /// Of the queries, keys and values: the normalized residual stream.
    Attention,
    /// Of the attention's output projection.
    Output,
    /// Of gate and up: the normalized residual stream.
    Mlp,
    /// Of down.
    Down,
}

impl BlockInput {
    /// All four, in the order of the data's way through the block.
    pub const ALL: [Self; 4] = [Self::Attention, Self::Output, Self::Mlp, Self::Down];

    /// The input that a layer reads.
    #[must_use]
    pub const fn of(linear: LayerLinear) -> Self {
        match linear {
            LayerLinear::Q | LayerLinear::K | LayerLinear::V => Self::Attention,
            LayerLinear::O => Self::Output,
            LayerLinear::Gate | LayerLinear::Up => Self::Mlp,
            LayerLinear::Down => Self::Down,
        }
    }

    /// The first layer that reads this input.
    #[must_use]
    pub const fn reader(self) -> LayerLinear {
        match self {
            Self::Attention => LayerLinear::Q,
            Self::Output => LayerLinear::O,
            Self::Mlp => LayerLinear::Gate,
            Self::Down => LayerLinear::Down,
        }
    }
}

/// One block of a model.
#[derive(Debug)]
pub struct Block {
    model: Model, // of one layer, with an empty vocabulary
    id: usize,
}

impl Block {
    /// Block `index` of a source, in the basis of its rotation. Without rotation the weights stay
    /// in the checkpoint; rotated ones are f32 in memory.
    ///
    /// `observer`, if there is one for an input, sees its rows.
    ///
    /// # Errors
    /// [`Error::UnknownLinear`] for a block that is not there, and as for [`Model::from_source`].
    pub fn from_source(
        source: &WeightSource,
        index: usize,
        observer: impl Fn(BlockInput) -> Option<Arc<Observer>>,
    ) -> Result<Self, Error> {
        Self::new(source, index, |which| {
            let id = LinearId::Layer(index, which);
            let linear = Linear::from_source(source, id)?;
            let input = BlockInput::of(which);
            Ok(match observer(input) {
                Some(observer) if input.reader() == which => linear.observed(observer),
                _ => linear,
            })
        })
    }

    /// Block `index` of a source's architecture, norms and rotation, with other linear layers.
    ///
    /// # Errors
    /// As for [`ModelBuilder::set`], and what `linear` returns.
    pub fn new(
        source: &WeightSource,
        index: usize,
        mut linear: impl FnMut(LayerLinear) -> Result<Linear, Error>,
    ) -> Result<Self, Error> {
        let mut config = source.config().clone();
        if index >= config.num_hidden_layers() {
            return Err(Error::UnknownLinear(LinearId::Layer(index, LayerLinear::Q).to_string()));
        }
        config.layers = vec![config.layers[index]];
        config.vocab_size = 0;
        config.tie_word_embeddings = true;
        let mut rotations: OnlineRotations = source.rotations().clone();
        rotations.layers = vec![rotations.layers[index].clone()];
        (rotations.embed_out, rotations.head) = (None, HeadRotation::Plain);
        let width = config.hidden_size;
        let mut builder = ModelBuilder::new(config, rotations)?;
        builder.set(LinearId::Embed, Linear::dense(Shape::new(0, width), Vec::new(), None)?)?;
        for which in LayerLinear::ALL {
            builder.set(LinearId::Layer(0, which), linear(which)?)?;
        }
        for id in FloatId::all(source.config()).filter(|id| id.layer() == Some(index)) {
            builder.set_floats(id.of_layer(0), source.floats(id)?)?;
        }
        builder.set_floats(FloatId::Final, vec![1.0; width])?;
        Ok(Self { model: builder.build()?, id: index })
    }

    /// As [`Model::with_kernels`].
    #[must_use]
    pub fn with_kernels(self, kernels: &Kernels) -> Self {
        Self { model: self.model.with_kernels(kernels), ..self }
    }

    /// Puts another layer in the place of one.
    ///
    /// # Errors
    /// As for [`ModelBuilder::set`]; the block is then unchanged.
    pub fn replace(&mut self, which: LayerLinear, linear: Linear) -> Result<(), Error> {
        self.model.replace(LinearId::Layer(0, which), linear).map(drop)
    }

    /// Which block of its model this is.
    #[must_use]
    pub fn index(&self) -> usize {
        self.id
    }

    /// An empty state; it serves every block of the model.
    #[must_use]
    pub fn state(&self, options: &StateOptions) -> State {
        self.model.state(options)
    }

    /// Runs hidden states, (tokens, hidden), through the block in place, after the tokens that
    /// `state` holds.
    ///
    /// # Errors
    /// [`Error::Shape`] for partial rows, [`Error::ContextFull`], [`Error::State`],
    /// [`Error::Memory`].
    pub fn forward(&self, state: &mut State, x: &mut [f32]) -> Result<(), Error> {
        self.model.forward_stream(state, x, 0..1, None)
    }

    /// As [`Block::forward`], but stops at an input of the block's layers, which its observer sees;
    /// `x` becomes the residual stream at that point.
    ///
    /// # Errors
    /// As for [`Block::forward`].
    pub fn forward_to(&self, state: &mut State, x: &mut [f32], input: BlockInput) -> Result<(), Error> {
        self.model.forward_stream(state, x, 0..1, Some(input))
    }
}

/// Turns the hidden states that leave the last block into what the head reads, in place and in the
/// unrotated basis: `x`, (tokens, hidden), is in the basis of `source`.
///
/// # Errors
/// [`Error::Io`] when the final norm cannot be read.
pub fn head_input(source: &WeightSource, x: &mut [f32]) -> Result<(), Error> {
    let gain = source.unfolded_norm(FloatId::Final)?;
    source.unrotate_residual(x);
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    let eps = source.config().rms_norm_eps as f32;
    let mut before = vec![0.0; gain.len()];
    for row in x.chunks_exact_mut(gain.len()) {
        before.copy_from_slice(row);
        rms_norm(&before, Some(&gain), eps, row);
    }
    Ok(())
}
