#![doc = include_str!("../README.md")]

pub mod bands;
mod error;
pub mod explain;
pub mod forecast;
pub mod fusion;
pub mod inventory;
pub mod joint;
pub mod machine;
pub mod overrides;
pub mod plan;
pub mod planned;
pub mod preset;
pub mod sensitivities;
pub mod storage;

pub use error::Error;
pub use explain::{Explanation, explain};
pub use forecast::Forecast;
pub use inventory::Inventory;
pub use joint::{PlannedSpeed, PointSpeed, Prices, Speed};
pub use machine::MachineProfile;
pub use overrides::{Exclude, Pin};
pub use plan::{Plan, PlanOptions, Target, plan};
pub use preset::{PRESETS, Preset};
pub use sensitivities::{Objective, Sensitivities};
