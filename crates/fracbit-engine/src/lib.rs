#![doc = include_str!("../README.md")]

mod draft;
mod engine;
mod guesses;
mod prefixes;
mod sequence;
mod tokens;

pub use engine::{Engine, EngineError, EngineOptions, full_pages};
pub use guesses::Draft;
pub use prefixes::Prefixes;
pub use sequence::{Done, Finish, Output, Request};
pub use tokens::{Listener, Tokens};
