#![doc = include_str!("../README.md")]

pub mod bench;
pub mod directory;
pub mod distortion;
mod error;
pub mod evaluate;
pub mod inspect;
pub mod load;
pub mod plan;
mod progress;
pub mod quantize;
pub mod sensitivity;
pub mod synth;

pub use error::Error;
pub use evaluate::{EvalOptions, Evaluation, evaluate};
pub use inspect::{Inspection, inspect};
pub use load::{Opened, kernels};
pub use plan::{Plan, PlanOptions, Target, plan};
pub use progress::{Progress, Quiet};
pub use quantize::{MemoryEstimate, QuantizeOptions, QuantizeReport, quantize};
pub use sensitivity::{Protocol, Sensitivities};
pub use synth::{Preset, SynthOptions, synthesize};
