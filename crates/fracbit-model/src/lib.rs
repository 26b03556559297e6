#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | [`source`] | a checkpoint's weights, rotated, one matrix at a time |
//! | [`basis`] | the way back: weights and activations in the checkpoint's basis |
//! | [`rotations`] | which rotations the runtime applies |
//! | [`smoothing`] | factors between inputs and weights |
//! | [`linear`] | dense and packed linear layers |
//! | [`model`] | the decoder graph |
//! | [`block`] | one block on its own, for streaming through a model layer by layer |
//! | [`state`] | cache and work space of one sequence |
//! | [`pages`] | where states take the pages of their caches from, and share them |
//! | [`runtime`] | what whoever schedules sequences knows of a model, on any device |
//! | [`sample`] | logits to token |
//! | [`generate`] | token by token |
//! | [`eval`] | negative log-likelihood, KL divergence, top-1 agreement |
//! | [`curvature`] | what noise in a matrix does to the divergence from the model without |
//! | [`gradient`] | what scales of rows do to the divergence from another model |
//!
//! # Numbers
//!
//! Arithmetic is f32 with fixed orders of summation: the same bits at any thread count. Two things
//! come from outside and may differ in their last bits between machines: the many-token product of
//! dense weights (`ndarray`'s kernel depends on the instruction set; where [`StateOptions::bf16`]
//! allows it, and in [`gradient`], both factors are rounded to bf16 on processors that multiply
//! such pairs), and the f64 sine, cosine, exponential and logarithm of the system's mathematics
//! library, in RoPE tables, sampling weights and evaluation.

mod attention;
pub mod basis;
mod bf16;
pub mod block;
mod builder;
pub mod curvature;
mod error;
pub mod eval;
mod experts;
pub mod generate;
pub mod gradient;
mod heads;
mod hidden;
mod id;
mod key_bias;
mod kv;
pub mod linear;
pub mod model;
pub mod pages;
mod rope;
pub mod rotations;
pub mod runtime;
pub mod sample;
pub mod smoothing;
pub mod source;
pub mod state;
mod stored;

pub use basis::Basis;
pub use block::{Block, BlockInput};
pub use builder::ModelBuilder;
pub use error::Error;
pub use eval::{Comparison, EvalOptions, Nll};
pub use experts::{Choice, choose};
pub use fracbit_kernels::Precision;
pub use generate::{GenerateOptions, Generation, Stop};
pub use id::{FloatId, LayerLinear, LinearId};
pub use key_bias::{HeadBias, KeyBias, KeyWeights};
pub use kv::KvType;
pub use linear::{Linear, LinearScratch, Observer, Read, Routed};
pub use model::Model;
pub use pages::{HostMemory, KvPage, KvPool, Page, PageList, PageMemory, PagePool};
pub use rope::rope_table;
pub use rotations::{OnlineRotations, RotationMode};
pub use runtime::{Cached, Runtime, tokens_of_each};
pub use sample::{Adjustments, Constraint, DRY_BREAKERS, SampleConfig, Sampler};
pub use smoothing::{Place, Smoothing};
pub use source::{Matrix, WeightSource};
pub use state::{State, StateOptions};
