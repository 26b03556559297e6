#![doc = "Scalar and 2-D vector codebooks."]

mod rounder;

pub use rounder::Rounder;
