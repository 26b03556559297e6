#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! | module | what |
//! |---|---|
//! | `command` | commands as functions, and the program itself |
//! | `model` | a model in memory |
//! | `generation` | text as an iterator |
//! | `tokenizer` | texts and tokens |
//! | `dense` | weights for other programs |
//! | `matrix` | single matrices, numpy in and out |
//! | `work` | long work: the interpreter's lock released, progress, interruption |
//! | `errors` | refusals as exceptions |
//!
//! The names, types and results that people see are in `python/fracbit`; every function here that
//! takes more than a moment lets other threads of the interpreter run.

mod command;
mod dense;
mod errors;
mod generation;
mod matrix;
mod model;
mod tokenizer;
mod work;

/// The part of the package `fracbit` that is written in Rust.
#[pyo3::pymodule]
mod _fracbit {
    #[pymodule_export]
    use super::command::{command, main, make_part};
    #[pymodule_export]
    use super::dense::Dense;
    #[pymodule_export]
    use super::generation::Generation;
    #[pymodule_export]
    use super::matrix::{PackedMatrix, dequantize, quantize_matrix};
    #[pymodule_export]
    use super::model::{Model, load};
    #[pymodule_export]
    use super::tokenizer::Tokenizer;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
