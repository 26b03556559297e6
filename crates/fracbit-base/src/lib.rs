#![doc = include_str!("../README.md")]

mod rate;
mod scheme;
mod shape;
mod size;

pub use rate::{Rate, RateError};
pub use scheme::{
    Books, Code, Columns, Component, Family, Granularity, Ladder, Nest, Palette, Scheme, SchemeError,
};
pub use shape::{Shape, ShapeError};
pub use size::{Bytes, SizeError};
