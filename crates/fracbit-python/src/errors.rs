//! Refusals as exceptions: the classes of `fracbit._errors`, one for each exit code, with the text
//! that the command line prints.

use fracbit_cli::{Exit, Refusal};
use pyo3::{exceptions::PyImportError, prelude::*};

/// A result whose error is an exception once it meets the interpreter.
pub(crate) type Refused<T> = Result<T, Refusal>;

/// The exception of a refusal.
pub(crate) fn raise(py: Python<'_>, refusal: &Refusal) -> PyErr {
    let class = match refusal.exit {
        Exit::Done | Exit::Failed => "Error",
        Exit::Usage => "ArgumentError",
        Exit::BadInput => "InputError",
        Exit::OutOfReach => "BudgetError",
    };
    let made =
        py.import("fracbit._errors").and_then(|module| module.getattr(class)?.call1((&refusal.message,)));
    made.map_or_else(|error| PyImportError::new_err(error.to_string()), PyErr::from_value)
}

/// What an argument should be.
pub(crate) fn argument(name: &str, rule: impl std::fmt::Display) -> Refusal {
    Refusal { exit: Exit::Usage, message: format!("{name}: {rule}") }
}

/// Anything that the library refuses.
pub(crate) fn refuse(error: impl Into<fracbit::Error>) -> Refusal {
    error.into().into()
}
