#![doc = include_str!("../README.md")]

mod book;
mod plan;

pub use book::Book;
pub use plan::{Launch, Limits, MatrixPlan, OCTET, SegmentPlan, Unsupported};
