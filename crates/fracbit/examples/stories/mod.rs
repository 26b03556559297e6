//! The stories that measuring examples calibrate on and evaluate with: texts of `../shared` beside
//! the workspace.

use fracbit::{CalibrateOptions, Calibration, EvalOptions, Opened, Quiet, calibrate};
use std::{fs, path::Path};

type Any<T> = Result<T, Box<dyn std::error::Error>>;

pub(crate) const TRAIN: &str = "../shared/text/tinystories-train.txt";
pub(crate) const EVAL: &str = "../shared/text/tinystories-eval.txt";
/// Tokens to calibrate on.
const TOKENS: usize = 32_768;
/// What stands between two stories.
const SEPARATOR: &str = "<|endoftext|>";

/// How the model of a directory wants the text that it is evaluated on.
pub(crate) fn evaluating(model: &str) -> EvalOptions {
    let story = !model.trim_end_matches('/').ends_with("demo");
    EvalOptions {
        ctx: Some(256),
        windows: Some(24),
        bos: story.then_some(true),
        drop_prefix_space: story,
        separator: story.then(|| SEPARATOR.to_owned()),
        ..EvalOptions::default()
    }
}

/// How it wants the text that it is calibrated on.
pub(crate) fn reading(model: &str) -> EvalOptions {
    EvalOptions { windows: None, separator: Some(SEPARATOR.to_owned()), ..evaluating(model) }
}

/// A calibration, made in the directory `out`.
pub(crate) fn calibration(opened: &Opened, model: &str, out: &Path) -> Any<Calibration> {
    let options =
        CalibrateOptions { length: Some(256), text: reading(model), ..CalibrateOptions::new(TOKENS) };
    calibrate(opened, Some((&fs::read_to_string(TRAIN)?, Path::new(TRAIN))), out, &options, &Quiet)?;
    Ok(Calibration::open(out)?)
}
