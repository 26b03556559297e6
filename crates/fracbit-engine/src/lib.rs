#![doc = include_str!("../README.md")]

mod engine;
mod prefixes;
mod sequence;

pub use engine::{Engine, EngineError, EngineOptions, full_pages};
pub use prefixes::Prefixes;
pub use sequence::{Done, Finish, Output, Request};
