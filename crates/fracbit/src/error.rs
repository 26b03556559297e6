//! One error for the verbs of the facade; every message names what was wrong and where.

use fracbit_base::{Bytes, Scheme};
use std::path::PathBuf;

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading or writing a model directory failed.
    #[error(transparent)]
    Io(#[from] fracbit_io::Error),
    /// The model cannot be built or run.
    #[error(transparent)]
    Model(#[from] fracbit_model::Error),
    /// The GPU refused, or the model does not run on it.
    #[error(transparent)]
    Device(#[from] fracbit_model_cuda::Error),
    /// The solver refused.
    #[error(transparent)]
    Alloc(#[from] fracbit_alloc::AllocError),
    /// `FRACBIT_ISA` is wrong.
    #[error(transparent)]
    Isa(#[from] fracbit_kernels::IsaError),
    /// A scheme name is wrong.
    #[error(transparent)]
    Scheme(#[from] fracbit_base::SchemeError),
    /// A matrix could not be quantized.
    #[error("quantizing `{tensor}` ({shape}, {scheme}): {source}")]
    Tensor {
        /// Tensor name.
        tensor: String,
        /// Its shape.
        shape: fracbit_base::Shape,
        /// The scheme.
        scheme: Scheme,
        /// What is wrong with it.
        source: fracbit_quant::QuantError,
    },
    /// A packed tensor of a model directory breaks the format.
    #[error("{}: `{tensor}`: {rule}", path.display())]
    Packed {
        /// The directory.
        path: PathBuf,
        /// Tensor name.
        tensor: String,
        /// What should hold.
        rule: String,
    },
    /// The `quantization_config` of a directory is not ours or not of this version.
    #[error("{}: quantization_config: {rule}", path.display())]
    QuantizationConfig {
        /// The directory.
        path: PathBuf,
        /// What should hold.
        rule: String,
    },
    /// Another program quantized the weights.
    #[error("{}: {rule}", path.display())]
    Quantized {
        /// The directory.
        path: PathBuf,
        /// Which, and what shows it.
        rule: String,
    },
    /// The budget is outside what the palette reaches.
    #[error(
        "budget {asked} ({asked_bits:.3} bits per weight) is out of reach: this palette stores the model in {min} \
         ({min_bits:.3} bits per weight) to {max} ({max_bits:.3}); the layer that binds is {binds}"
    )]
    Budget {
        /// Bytes asked for.
        asked: Bytes,
        /// The same in bits per weight.
        asked_bits: f64,
        /// Least bytes.
        min: Bytes,
        /// Least bits per weight.
        min_bits: f64,
        /// Most bytes.
        max: Bytes,
        /// Most bits per weight.
        max_bits: f64,
        /// The largest matrix of the smallest plan.
        binds: String,
    },
    /// The time is below what the palette reaches on this machine.
    #[error("{rule}")]
    Latency {
        /// What was asked for, what can be reached, and what binds.
        rule: String,
        /// Least microseconds of a decode step, within the size asked for where there was one.
        best_us: f64,
    },
    /// A plan document is wrong.
    #[error("{origin}: {rule}")]
    Plan {
        /// File or command that holds the plan.
        origin: String,
        /// What should hold.
        rule: String,
    },
    /// A machine profile is wrong, stale, or lacks something.
    #[error("machine profile {origin}: {rule}")]
    Profile {
        /// File or document.
        origin: String,
        /// What should hold.
        rule: String,
    },
    /// A sensitivity document is wrong or does not cover the model.
    #[error("sensitivities {origin}: {rule}")]
    Sensitivity {
        /// File or protocol.
        origin: String,
        /// What should hold.
        rule: String,
    },
    /// A calibration directory is wrong or does not fit the model.
    #[error("calibration `{}`: {rule}", path.display())]
    Calibration {
        /// The directory.
        path: PathBuf,
        /// What should hold.
        rule: String,
    },
    /// The input moments of a matrix are unusable.
    #[error("input moments of `{matrix}`: {source}")]
    Moments {
        /// Module name.
        matrix: String,
        /// What is wrong with them.
        source: fracbit_quant::QuantError,
    },
    /// The palette has no measured error for a scheme.
    #[error("scheme {scheme} has no measured error in the palette's table")]
    NoErrorEntry {
        /// The scheme.
        scheme: Scheme,
    },
    /// A text to evaluate or calibrate on is unusable.
    #[error("{}: {rule}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What should hold.
        rule: String,
    },
    /// An option has a value that makes no sense.
    #[error("{option}: {rule}")]
    Option {
        /// The option.
        option: &'static str,
        /// What should hold.
        rule: String,
    },
}

/// Refuses what takes more memory than is allowed.
pub(crate) fn require_memory(what: &str, needed: Bytes, allowed: Option<Bytes>) -> Result<(), Error> {
    match allowed.filter(|&most| most < needed) {
        None => Ok(()),
        Some(most) => {
            let rule = format!("{what} takes {needed} ({} bytes), allowed are {most}", needed.0);
            Err(Error::Option { option: "--max-memory", rule })
        }
    }
}
