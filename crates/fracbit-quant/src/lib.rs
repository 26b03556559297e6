#![doc = include_str!("../README.md")]

mod feedback;
mod grouped;
pub mod hessian;
mod matrix;
pub mod moments;
mod nested;
mod progressive;
mod rounders;
pub mod sensitivity;

pub use fracbit_format::Grouping;
pub use hessian::Hessian;
pub use matrix::{QuantError, Quantized, Rounding, quantize, quantize_with, working_memory};
pub use moments::{CrossMoments, Moments};
pub use rounders::{Effort, Provider, Rounders, codebook, has_efforts};
