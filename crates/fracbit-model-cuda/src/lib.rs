#![doc = include_str!("../README.md")]

mod decode;
mod model;

pub use decode::Decoder;
pub use model::{Builder, DeviceModel, DeviceState, Each, Error, MAX_ROWS, PROMPT_FROM, tables};
