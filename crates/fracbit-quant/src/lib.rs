#![doc = include_str!("../README.md")]

mod feedback;
pub mod hessian;
mod matrix;
pub mod moments;
mod rounders;
pub mod sensitivity;

pub use hessian::Hessian;
pub use matrix::{Grouping, QuantError, Quantized, Rounding, quantize, quantize_with};
pub use moments::Moments;
pub use rounders::{Effort, Provider, codebook, provide, rounder, rounder_at};
