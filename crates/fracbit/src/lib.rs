#![doc = include_str!("../README.md")]

pub mod bench;
pub mod calibrate;
pub mod cuda;
pub mod directory;
pub mod distortion;
mod error;
pub mod evaluate;
pub mod explain;
pub mod fusion;
pub mod inspect;
pub mod joint;
pub mod load;
pub mod losses;
pub mod machine;
pub mod plan;
mod progress;
pub mod quantize;
pub mod report;
pub mod sensitivity;
pub mod steer;
pub mod synth;

pub use calibrate::{CalibrateOptions, Calibration, calibrate};
pub use error::Error;
pub use evaluate::{EvalOptions, Evaluation, evaluate};
pub use explain::{Explanation, explain};
pub use inspect::{Inspection, inspect};
pub use joint::{PlannedSpeed, Prices, Speed};
pub use load::{Opened, kernels};
pub use machine::MachineProfile;
pub use plan::{Plan, PlanOptions, Target, plan};
pub use progress::{Progress, Quiet};
pub use quantize::{MemoryEstimate, QuantizeOptions, QuantizeReport, quantize, quantize_in};
pub use report::Report;
pub use sensitivity::{Protocol, Sensitivities};
pub use steer::{Exclude, Pin};
pub use synth::{Preset, SynthOptions, synthesize};
