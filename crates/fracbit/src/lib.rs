#![doc = include_str!("../README.md")]

mod bodies;
pub mod calibrate;
pub mod cuda;
pub mod deal;
pub mod dense;
pub mod directory;
pub mod distortion;
mod error;
pub mod evaluate;
pub mod export;
mod foreign;
mod groups;
pub mod inspect;
pub mod learn;
pub mod load;
pub mod losses;
mod matrices;
pub mod memory;
pub mod pace;
mod progress;
pub mod quantize;
pub mod report;
pub mod schedule;
pub mod sensitivity;
mod sequential;
pub mod simulate;
pub mod smoothing;
pub mod synth;
pub mod tune;

pub use bodies::{Bodies, bodies};
pub use calibrate::{CalibrateOptions, Calibration, calibrate};
pub use deal::{Dealt, Job, Part, Worker};
pub use dense::Dense;
pub use error::Error;
pub use evaluate::{EvalOptions, Evaluation, evaluate};
pub use export::{ExportOptions, ExportReport, ExportType, export};
pub use fracbit_plan::{
    Error as PlanError, Exclude, Explanation, Forecast, Inventory, MachineProfile, Objective, Pin, Plan,
    PlanOptions, PlannedSpeed, Preset, Prices, Sensitivities, Speed, Target, bands, explain, forecast,
    fusion, inventory, joint, machine, overrides, plan, planned, preset, sensitivities, storage,
};
pub use fracbit_quant::{Effort, Rounders};
pub use inspect::{Inspection, inspect};
pub use learn::{LearnOptions, Learned, learn};
pub use load::{Opened, kernels};
pub use matrices::LayerReport;
pub use progress::{Progress, Quiet};
pub use quantize::{MemoryEstimate, QuantizeOptions, QuantizeReport, beside_tensors, quantize, quantize_in};
pub use report::Report;
pub use sensitivity::Protocol;
pub use synth::{SynthOptions, synthesize};
pub use tune::{TuneOptions, TuneReport};
