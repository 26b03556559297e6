//! Why there is no plan.

use fracbit_base::{Bytes, Scheme};

/// Why a plan, or what it is made from, was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration of a model is wrong.
    #[error(transparent)]
    Io(#[from] fracbit_io::Error),
    /// The solver refused.
    #[error(transparent)]
    Alloc(#[from] fracbit_alloc::AllocError),
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
    /// The palette has no measured error for a scheme.
    #[error("scheme {scheme} has no measured error in the palette's table")]
    NoErrorEntry {
        /// The scheme.
        scheme: Scheme,
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
