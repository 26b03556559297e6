//! Commands as functions, and the program itself.

use crate::work;
use pyo3::{prelude::*, types::PyAny};
use std::ffi::OsString;

/// Run one command, such as `["inspect", "--json", "small"]`, and return what it would print.
///
/// `progress` is None, True or a function. Errors are exceptions with the text of the command.
#[pyfunction]
#[pyo3(signature = (args, progress=None))]
pub(crate) fn command(
    py: Python<'_>,
    args: Vec<OsString>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    work::run(py, progress, |listener| fracbit_cli::call(args, listener))
}

/// Run the program with the arguments of a process, its name first; return the exit code.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| fracbit_cli::main(args) as u8)
}
