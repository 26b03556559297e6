//! Shapes of matrices and the error that names them.

use std::fmt;

/// Rows and columns of a matrix. A linear layer `y = W x` has `rows` outputs and `cols` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl Shape {
    /// A shape of `rows` x `cols`.
    #[must_use]
    pub const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols }
    }

    /// Number of weights.
    #[must_use]
    pub const fn len(self) -> usize {
        self.rows * self.cols
    }

    /// True when there is no weight.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.rows == 0 || self.cols == 0
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// An argument whose length or shape breaks the contract of an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: `{arg}` should be {want}, got {got}")]
pub struct ShapeError {
    /// The operation that refused.
    pub op: &'static str,
    /// The argument at fault.
    pub arg: &'static str,
    /// What was needed.
    pub want: String,
    /// What was given.
    pub got: String,
}

impl ShapeError {
    /// Builds the error from anything that prints.
    pub fn new(op: &'static str, arg: &'static str, want: impl fmt::Display, got: impl fmt::Display) -> Self {
        Self { op, arg, want: want.to_string(), got: got.to_string() }
    }

    /// `Ok` when `got == want`, the error otherwise.
    ///
    /// # Errors
    /// When the two differ.
    pub fn check_len(op: &'static str, arg: &'static str, want: usize, got: usize) -> Result<(), Self> {
        if want == got {
            Ok(())
        } else {
            Err(Self::new(op, arg, format_args!("{want} long"), format_args!("{got}")))
        }
    }
}
