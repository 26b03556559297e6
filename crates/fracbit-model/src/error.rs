//! The crate's error.

use fracbit_base::ShapeError;

use crate::{FloatId, LinearId};

/// What can be wrong with a model, its state or what it is asked to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint or its configuration.
    #[error(transparent)]
    Io(#[from] fracbit_io::Error),
    /// A width that cannot be rotated.
    #[error(transparent)]
    Rotation(#[from] fracbit_rotation::RotationError),
    /// A scheduler that was learned for another model.
    #[error(transparent)]
    Schedule(#[from] fracbit_schedule::ScheduleError),
    /// A buffer or matrix of the wrong size.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A linear layer of the wrong size or with an unexpected bias.
    #[error("setting `{id}`: {source}")]
    Linear {
        /// The layer.
        id: LinearId,
        /// What is wrong.
        source: ShapeError,
    },
    /// Gains of a norm or a router of the wrong size.
    #[error("setting `{id}`: {source}")]
    Floats {
        /// Which.
        id: FloatId,
        /// What is wrong.
        source: ShapeError,
    },
    /// A linear layer was never set.
    #[error("building the model: `{0}` should be set")]
    MissingLinear(LinearId),
    /// Gains of a norm or a router were never set.
    #[error("building the model: `{0}` should be set")]
    MissingFloats(FloatId),
    /// No such linear layer in this model.
    #[error("linear layer: expected one of the model's, got `{0}`")]
    UnknownLinear(String),
    /// No such rotation mode.
    #[error("rotation: should be fold, online or none, got `{0}`")]
    UnknownRotation(String),
    /// A stored tensor that the configuration does not provide for; ignoring it would silently give
    /// another model.
    #[error("tensor `{tensor}` is stored, but by config.json this model has none ({rule})")]
    Unexpected {
        /// The tensor.
        tensor: String,
        /// The field that would allow it.
        rule: &'static str,
    },
    /// A width beyond what the attention kernel is built for.
    #[error("config: head_dim should be at most {max}, got {got}")]
    HeadDim {
        /// The limit.
        max: usize,
        /// The configured width.
        got: usize,
    },
    /// A token outside the vocabulary.
    #[error("forward: token {token} should be below the vocabulary size {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// More tokens than the state holds.
    #[error("forward: {got} tokens after the {len} present should fit the context of {capacity} tokens")]
    ContextFull {
        /// Tokens the state can hold.
        capacity: usize,
        /// Tokens it holds.
        len: usize,
        /// Tokens that were to be added.
        got: usize,
    },
    /// No memory for the cache.
    #[error("forward: the cache of {tokens} tokens should fit in memory: {source}")]
    Memory {
        /// Tokens to make room for.
        tokens: usize,
        /// What the allocator said.
        source: std::collections::TryReserveError,
    },
    /// The device that the model runs on.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
    /// What one of several sequences failed by that ran together, in words.
    #[error("{0}")]
    Sequence(String),
    /// Every page of the cache is held.
    #[error("forward: the cache should have a free page, all {pages} pages of {positions} tokens are held")]
    CacheFull {
        /// Pages of the pool.
        pages: usize,
        /// Tokens of a page.
        positions: usize,
    },
    /// Pages that are not those of a sequence.
    #[error(
        "sharing: {pages} pages should be those of a state of the same pool with {len} tokens, at most {capacity}"
    )]
    Pages {
        /// How many.
        pages: usize,
        /// Tokens that they should hold.
        len: usize,
        /// Tokens that the state can hold.
        capacity: usize,
    },
    /// A state made for another model.
    #[error("forward: the state should be one of this model's shape, which is {want}; it is {got}")]
    State {
        /// Layers, heads and widths of the model.
        want: String,
        /// Those of the state.
        got: String,
    },
    /// A sampling setting outside its range.
    #[error("sampling: `{field}` should be {want}, got {got}")]
    Sampling {
        /// The setting.
        field: &'static str,
        /// The range.
        want: &'static str,
        /// The value.
        got: f32,
    },
    /// Nothing to pick from, and no measure.
    #[error(
        "the model's predictions should be numbers, they are NaN or minus infinity: its weights take it beyond the range of f32"
    )]
    NoLogit,
    /// Hidden states that cannot be given in the checkpoint's basis.
    #[error("hidden states: {0}")]
    Hidden(&'static str),
    /// Rules for a text that cannot be followed further, such as a grammar that takes too long.
    #[error("following the constraint: {0}")]
    Constraint(String),
    /// Nothing to continue.
    #[error("generating: the prompt should have at least 1 token")]
    EmptyPrompt,
    /// Two models that cannot be compared.
    #[error("comparing: the vocabularies should be equal, got {0} and {1}")]
    Vocabularies(usize, usize),
    /// A text without a next token to predict.
    #[error("evaluating: a window should have at least 2 tokens, got {0}")]
    Window(usize),
}
