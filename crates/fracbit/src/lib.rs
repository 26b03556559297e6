#![doc = include_str!("../README.md")]

pub mod distortion;
pub mod export;
pub mod schedule;
pub mod simulate;

pub use export::{ExportOptions, ExportReport, ExportType, export};
pub use fracbit_load::{
    Dense, Error, EvalOptions, Evaluation, Inspection, Microkernels, Opened, Progress, Quiet, cuda, dense,
    directory, evaluate, inspect, kernels, microkernels,
};
pub use fracbit_pipeline::{
    CalibrateOptions, Calibration, CalibrationText, CompressOptions, Dealt, Job, LayerReport, LearnOptions,
    Learned, MemoryEstimate, Part, Protocol, QuantizeOptions, QuantizeReport, SynthOptions, TuneOptions,
    TuneReport, Worker, beside_tensors, calibrate, compress, deal, learn, losses, memory, pace, quantize,
    quantize_in, rounders_on, sensitivity, smoothing, synth, synthesize, tune,
};
pub use fracbit_plan::{
    Error as PlanError, Exclude, Explanation, Forecast, Inventory, MachineProfile, Objective, Pin, Plan,
    PlanOptions, PlannedSpeed, Preset, Prices, Sensitivities, Speed, Target, bands, explain, forecast,
    fusion, inventory, joint, machine, overrides, plan, planned, preset, sensitivities, storage,
};
pub use fracbit_quant::{Effort, Rounders};
