#![doc = include_str!("../README.md")]

mod cache;
mod decode;
mod experts;
mod graph;
mod key_bias;
mod model;
mod runtime;
mod state;

pub use cache::{DeviceMemory, DeviceSequence};
pub use decode::Decoder;
pub use graph::{DeviceWork, MAX_ROWS, PROMPT_FROM};
pub use model::{Builder, DeviceModel, Error, tables};
pub use runtime::EngineWork;
pub use state::{DeviceState, Each};
