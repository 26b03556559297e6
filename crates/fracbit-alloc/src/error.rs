//! Errors about the data a caller gave. Messages read `operation: thing should be X, got Y`.

use thiserror::Error;

/// Why an allocation cannot be made.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Nothing to decide on.
    #[error("allocate: {what} should not be empty")]
    Empty {
        /// Which list was empty.
        what: &'static str,
    },
    /// A layer or group without choices.
    #[error("allocate: `{layer}` should have at least one choice, got none")]
    NoChoice {
        /// The layer or group.
        layer: String,
    },
    /// Costs and budgets do not match.
    #[error("allocate: choice {choice} of `{layer}` should have one cost per budget ({want}), got {got}")]
    CostLength {
        /// The layer or group.
        layer: String,
        /// Index of the choice.
        choice: usize,
        /// Number of budgets.
        want: usize,
        /// Number of costs.
        got: usize,
    },
    /// NaN or infinite loss.
    #[error("allocate: loss of choice {choice} of `{layer}` should be finite, got {got}")]
    Loss {
        /// The layer or group.
        layer: String,
        /// Index of the choice.
        choice: usize,
        /// The value.
        got: f64,
    },
    /// Totals that exceed 2^64 - 1.
    #[error("allocate: the largest total of `{budget}` should fit 64 bits; use a coarser unit")]
    Overflow {
        /// The resource.
        budget: String,
    },
    /// The budget cannot be met, or lies above what the best choices use.
    #[error("allocate: budget `{budget}` should be in {min}..={max}, got {asked}")]
    Unreachable {
        /// The resource.
        budget: String,
        /// What was asked for.
        asked: u64,
        /// Smallest reachable total, within the other budgets.
        min: u64,
        /// Total of the best choices.
        max: u64,
    },
    /// Each budget can be met alone but no allocation meeting all of them was found.
    #[error(
        "allocate: budgets {budgets} should be reachable together, but no allocation within all of them was found"
    )]
    NotTogether {
        /// The budgets with their limits, as text.
        budgets: String,
    },
    /// The closed form was asked for something outside its domain.
    #[error("ideal bits: {arg} should be {want}, got {got}")]
    Ideal {
        /// The argument.
        arg: &'static str,
        /// What it should be.
        want: String,
        /// What it was.
        got: f64,
    },
    /// Lists that belong together differ in length.
    #[error("{op}: `{arg}` should have {want} entries, got {got}")]
    Length {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// Wanted length.
        want: usize,
        /// Given length.
        got: usize,
    },
    /// A fusion group that names no layer, an unknown layer, or one twice.
    #[error("fusion: members of group {group} should be distinct layers below {layers}, got {members:?}")]
    Members {
        /// Index of the group.
        group: usize,
        /// Number of layers.
        layers: usize,
        /// What was given.
        members: Vec<usize>,
    },
    /// No set of groups holds this layer exactly once.
    #[error("fusion: layer `{layer}` should be coverable by disjoint groups, but no partition contains it")]
    Uncovered {
        /// The layer.
        layer: String,
    },
    /// The own solver met more resources than it handles.
    #[error("{op}: number of budgets should be at most {most}, got {got}")]
    TooManyBudgets {
        /// The operation.
        op: &'static str,
        /// The limit.
        most: usize,
        /// What was given.
        got: usize,
    },
    /// The instance is too large to enumerate.
    #[error("oracle: number of combinations should be at most {most}, got {got:e}")]
    TooLarge {
        /// The limit.
        most: u64,
        /// Number of combinations.
        got: f64,
    },
    /// HiGHS refused a model or an option: a bug of this crate or of the installed HiGHS.
    #[error("HiGHS: {what}")]
    Highs {
        /// What failed.
        what: String,
    },
}
