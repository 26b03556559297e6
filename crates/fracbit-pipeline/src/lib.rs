#![doc = include_str!("../README.md")]

pub mod calibrate;
pub mod compress;
pub mod deal;
mod device;
mod groups;
pub mod learn;
pub mod losses;
mod matrices;
pub mod memory;
pub mod pace;
pub mod quantize;
pub mod sensitivity;
mod sequential;
pub mod smoothing;
pub mod synth;
pub mod tune;
mod worker;

pub use calibrate::{CalibrateOptions, Calibration, calibrate};
pub use compress::{CalibrationText, CompressOptions, compress};
pub use deal::{Dealt, Job, Part};
pub use device::rounders_on;
pub use learn::{LearnOptions, Learned, learn};
pub use matrices::LayerReport;
pub use quantize::{MemoryEstimate, QuantizeOptions, QuantizeReport, beside_tensors, quantize, quantize_in};
pub use sensitivity::Protocol;
pub use synth::{SynthOptions, synthesize};
pub use tune::{TuneOptions, TuneReport};
pub use worker::Worker;
