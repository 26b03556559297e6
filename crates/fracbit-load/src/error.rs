//! One error for what is done to a model; every message names what was wrong and where.

use fracbit_base::{Bytes, Scheme};
use fracbit_plan::Error as PlanError;
use std::path::PathBuf;

/// Why something done to a model failed.
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
    /// A plan, or what it is made from, is refused.
    #[error(transparent)]
    Plan(PlanError),
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
    /// A text to evaluate or calibrate on is unusable.
    #[error("{}: {rule}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What should hold.
        rule: String,
    },
    /// Other processes were to round matrices, and did not.
    #[error("--ray: {rule}")]
    Dealt {
        /// What happened.
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

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Io(error) => Self::Io(error),
            PlanError::Option { option, rule } => Self::Option { option, rule },
            other => Self::Plan(other),
        }
    }
}

/// Refuses what takes more memory than is allowed.
///
/// # Errors
/// When `needed` is more than `allowed`; the message has `what` as its subject.
pub fn require_memory(what: &str, needed: Bytes, allowed: Option<Bytes>) -> Result<(), Error> {
    match allowed.filter(|&most| most < needed) {
        None => Ok(()),
        Some(most) => {
            let rule = format!("{what} takes {needed} ({} bytes), allowed are {most}", needed.0);
            Err(Error::Option { option: "--max-memory", rule })
        }
    }
}
