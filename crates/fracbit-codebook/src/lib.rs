#![doc = include_str!("../README.md")]

mod builtin;
mod distortion;
mod error;
#[doc(hidden)]
pub mod laws;
mod rounder;
mod scalar;
pub mod train;
mod vector;

pub use builtin::{builtin, rounder};
pub use distortion::{distortion, nmse, published};
pub use error::RounderError;
pub use rounder::Rounder;
pub use scalar::ScalarRounder;
pub use vector::VectorRounder;
