#![doc = include_str!("../README.md")]

mod matrix;
mod rounders;
pub mod sensitivity;

pub use matrix::{Grouping, QuantError, Quantized, quantize};
pub use rounders::{Effort, codebook, rounder, rounder_at};
