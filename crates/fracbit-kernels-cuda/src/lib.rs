#![doc = include_str!("../README.md")]

mod args;
mod book;
mod device;
mod encode;
mod gemm;
#[cfg(feature = "cuda")]
mod gpu;
mod matrix;
pub mod ops;
mod part;
mod plan;
mod prompt;
mod psumbook;
pub mod shim;
mod w4a8;

pub use args::Address;
pub use book::Book;
pub use device::{Buffer, Device, DeviceError, Grid, Rows};
pub use encode::TrellisEncoder;
#[cfg(feature = "cuda")]
pub use gpu::{Gpu, Graph};
pub use matrix::{DeviceMatrix, LoadError, Reading, Workspace};
pub use plan::{Deal, Launch, Limits, MatrixPlan, OCTET, SegmentPlan, Unsupported};
pub use psumbook::{Product, PsumPlan};
pub use w4a8::W4a8Launch;
