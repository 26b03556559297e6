#![doc = include_str!("../README.md")]

mod books;
mod cells;
#[cfg(target_arch = "x86_64")]
mod cells_simd;
mod classes;
#[cfg(target_arch = "x86_64")]
mod classes_simd;
mod effort;
mod isa;
mod metric;
mod rounder;
mod rows;
#[cfg(target_arch = "x86_64")]
mod rows_simd;
mod search;
#[cfg(target_arch = "x86_64")]
mod simd;
mod step;
pub mod train;

pub use books::builtin;
pub use effort::Effort;
pub use isa::Isa;
pub use rounder::{SearchParts, TrellisRounder, rounder};
