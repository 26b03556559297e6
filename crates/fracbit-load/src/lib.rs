#![doc = include_str!("../README.md")]

pub mod cuda;
pub mod dense;
pub mod directory;
mod error;
pub mod evaluate;
mod foreign;
pub mod inspect;
mod microkernels;
mod opened;
mod progress;
pub mod reader;

pub use dense::Dense;
pub use error::{Error, require_memory};
pub use evaluate::{EvalOptions, Evaluation, evaluate};
pub use inspect::{Inspection, inspect};
pub use microkernels::{Microkernels, microkernels};
pub use opened::{Opened, kernels};
pub use progress::{Progress, Quiet};
