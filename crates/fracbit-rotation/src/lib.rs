#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | [`factorize`] | width → factors of the Kronecker product; the rule is part of the file format |
//! | [`HadamardMatrix`] | the small ±1 matrices: Paley I, Paley II, Williamson |
//! | [`Hadamard`] | the fast orthonormal transform of any width |
//! | [`signs`] | random signs from a seed; part of the file format |
//! | [`Rotation`], [`BlockRotation`] | signs, then transform: vectors, rows, output side, per head |
//! | [`fold`] | which rotation goes into which weight |
//!
//! # Numbers
//!
//! All arithmetic is f32 additions in a fixed order and one multiplication per entry by ±1/√n
//! (plus, for Hartley factors, their cosines and sines). Rust never fuses or reorders them, so the
//! same input has the same output bits on every machine, for one vector or for many. The relative
//! error ‖x̂ − Hx‖/‖x‖ grows like √(log n)·2⁻²⁴ for the Walsh part and stays below 1e-6 in all
//! tests.

mod across;
mod error;
mod factor;
mod field;
pub mod fold;
mod hadamard;
mod matrix;
mod rotation;
mod signs;
mod trig;
mod walsh;

pub use error::RotationError;
pub use factor::{Factor, MAX_WIDTH, factorize};
pub use hadamard::Hadamard;
pub use matrix::{Construction, HadamardMatrix};
pub use rotation::{BlockRotation, Rotation};
pub use signs::signs;
pub use walsh::walsh;
