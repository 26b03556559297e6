#![doc = include_str!("../README.md")]

mod additive;
mod builtin;
mod distortion;
mod error;
mod groups;
#[doc(hidden)]
pub mod laws;
mod nested;
mod progressive;
mod rounder;
mod scalar;
pub mod train;
mod vector;

pub use additive::AdditiveRounder;
pub use builtin::{builtin, rounder};
pub use distortion::{
    distortion, group_distortion, nested_distortion, nmse, progressive_distortion, published,
};
pub use error::RounderError;
pub use groups::{GroupCoder, Grouped, ScaledTable};
pub use nested::NestedRounder;
pub use progressive::{ProgressiveCoder, nearest as nearest_progressive};
pub use rounder::Rounder;
pub use scalar::ScalarRounder;
pub use vector::VectorRounder;
