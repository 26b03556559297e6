#![doc = include_str!("../README.md")]

mod activations;
mod args;
pub mod cases;
mod isa;
mod kernels;
mod lines;
mod matmul;
mod matrix;
mod reference;

pub use activations::Activations;
pub use args::{
    Args, BLOCK_TILES, Block, Ints, MAX_INT8, MAX_INT16, MAX_STRIPS, MAX_TOKENS, OVERREAD, WIDE_BLOCK_TILES,
};
pub use isa::{Isa, IsaError};
pub use kernels::{Body, Kernels, Packing, Provider, StripFn};
pub use lines::{Buffer, Line};
pub use matmul::matmul;
pub use matrix::PackedMatrix;
