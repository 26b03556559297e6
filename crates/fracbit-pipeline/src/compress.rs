//! From a checkpoint and a budget to a smaller model in one call: what `fracbit quantize` does when
//! nothing but a budget is said. The steps that it consists of are those of the command, too.

use crate::{
    Calibration, LearnOptions, Protocol, QuantizeOptions, QuantizeReport, calibrate, learn, quantize_in,
    sensitivity::{self, Text},
    smoothing,
};
use fracbit_base::Bytes;
use fracbit_io::{OutputDir, Overwrite, output};
use fracbit_load::{Error, EvalOptions, Opened, Progress, require_memory};
use fracbit_model::{RotationMode, WeightSource};
use fracbit_plan::{
    Objective, PlanOptions, Sensitivities, Target,
    plan::{self, Inventory},
};
use fracbit_quant::Rounders;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What to calibrate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CalibrationText {
    /// The built-in prose, dialogue and code.
    General,
    /// A text and its name.
    Given(String, PathBuf),
    /// The model writes it.
    Written,
}

impl CalibrationText {
    /// The same, but for the built-in text and a model without a tokenizer, which writes one.
    #[must_use]
    pub fn readable_by(self, opened: &Opened) -> Self {
        if self == Self::General && opened.tokenizer().is_err() { Self::Written } else { self }
    }

    /// The text and its name, if there is one that the model does not write.
    #[must_use]
    pub fn named(&self) -> Option<(&str, &Path)> {
        match self {
            Self::Given(text, path) => Some((text, path)),
            Self::General => Some((calibrate::GENERAL, Path::new("the built-in text"))),
            Self::Written => None,
        }
    }
}

/// What to make of a checkpoint.
#[derive(Clone, Debug)]
pub struct CompressOptions {
    /// Budget, schemes to choose from, wishes for single layers. Its rotation is the one that is
    /// chosen.
    pub plan: PlanOptions,
    /// The rotation; `None` leaves it to the inputs that the model has on the text.
    pub rotation: Option<RotationMode>,
    /// What to calibrate on; `None`: on nothing, each matrix is rounded on its own, which loses far
    /// more.
    pub text: Option<CalibrationText>,
    /// Tokens to calibrate on at most.
    pub tokens: usize,
    /// What searches for codes, and how thoroughly.
    pub rounders: Rounders,
    /// Most memory to use beside the memory-mapped checkpoint.
    pub max_memory: Option<Bytes>,
    /// Replace an existing model directory.
    pub force: bool,
}

impl CompressOptions {
    /// The defaults for a budget.
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            plan: PlanOptions { smoothing: true, ..PlanOptions::new(target) },
            rotation: None,
            text: Some(CalibrationText::General),
            tokens: learn::QUICK_TOKENS,
            rounders: Rounders::default(),
            max_memory: None,
            force: false,
        }
    }
}

/// Writes a smaller model of the checkpoint in directory or GGUF file `model` to the directory
/// `out`: calibrates, chooses rotation and factors by the model's channels, measures what each
/// matrix loses, plans, and rounds layer by layer, each for the inputs that those before it give.
/// The same checkpoint and options give the same bytes, and those of `fracbit quantize`.
///
/// # Errors
/// When `model` cannot be read or is quantized already, the budget is out of reach, memory or disk
/// does not suffice, `out` exists and is not to be replaced, or it holds `model`. Nothing appears
/// under its name then.
pub fn compress(
    model: &Path,
    out: &Path,
    options: &CompressOptions,
    progress: &dyn Progress,
) -> Result<QuantizeReport, Error> {
    if output::holds(out, model) {
        let rule = format!("`{}` should be apart from `{}`, which is read", out.display(), model.display());
        return Err(Error::Option { option: "out", rule });
    }
    let overwrite = if options.force { Overwrite::Yes } else { Overwrite::No };
    let opened = Opened::new(model)?;
    opened.source(RotationMode::None, 0)?.check_finite()?;
    let mut planned = options.plan.clone();
    reachable(&opened, &planned)?;
    let dir = OutputDir::create(out, overwrite)?;
    let text = options.text.clone().map(|text| text.readable_by(&opened));
    let calibration =
        text.map(|text| calibrated(&opened, &text, &dir.scratch(""), options, progress)).transpose()?;
    let weights = weights(&opened, options.rotation, &mut planned, calibration.as_deref(), progress)?;
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, planned.rotation);
    let hash = opened.checkpoint.content_hash();
    let uniform = matches!(planned.target, Target::Uniform(_));
    let measured = if uniform {
        Sensitivities::prior(&inventory, planned.rotation)
    } else {
        sensitivities(&weights, &hash, calibration.as_deref(), None, progress)?
    };
    let measured = with_feedback(measured, &planned, calibration.as_deref(), &weights, progress)?;
    let plan = plan::plan(&inventory, &measured, &planned)?;
    let record = QuantizeOptions {
        force: options.force,
        command: format!("fracbit::compress, {:?}", planned.target),
        source: model.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        source_hash: hash,
        sequential: calibration.is_some(),
        calibration,
        max_memory: options.max_memory,
        rounders: options.rounders.clone(),
        ..QuantizeOptions::default()
    };
    quantize_in(dir, &weights, &inventory, &plan, &record, progress)
}

/// Refuses a budget that no plan keeps to, before any work: what is in reach does not depend on
/// sensitivities.
fn reachable(opened: &Opened, planned: &PlanOptions) -> Result<(), Error> {
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, planned.rotation);
    plan::plan(&inventory, &Sensitivities::prior(&inventory, planned.rotation), planned)?;
    Ok(())
}

fn calibrated(
    opened: &Opened,
    text: &CalibrationText,
    scratch: &Path,
    options: &CompressOptions,
    progress: &dyn Progress,
) -> Result<Arc<Calibration>, Error> {
    let named = text.named();
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Online);
    let needed = learn::memory(opened, &inventory, None, options.tokens, named.is_none())?;
    require_memory("calibrating", needed, options.max_memory)?;
    let learning = LearnOptions {
        tokens: options.tokens,
        text: EvalOptions::default(),
        seed: options.plan.seed,
        rounders: options.rounders.clone(),
        max_memory: options.max_memory,
    };
    learn::calibrated(opened, named, scratch, &learning, progress)
}

/// The weights as `planned` rotates and smooths them, by the inputs of a calibration or of a text
/// that the model writes. `fixed` is the rotation; `None` leaves it to these inputs. `planned` then
/// says which it is; notes tell what was chosen and why.
///
/// # Errors
/// When the model cannot be read or run.
pub fn weights(
    opened: &Opened,
    fixed: Option<RotationMode>,
    planned: &mut PlanOptions,
    calibration: Option<&Calibration>,
    progress: &dyn Progress,
) -> Result<WeightSource, Error> {
    planned.smoothing &= fixed != Some(RotationMode::None);
    if let (Some(rotation), false) = (fixed, planned.smoothing) {
        planned.rotation = rotation;
        return opened.source(rotation, planned.seed);
    }
    let (smoothed, seed) = (planned.smoothing, planned.seed);
    let choice = smoothing::choose_for(opened, fixed, smoothed, seed, calibration, progress)?;
    let how = if smoothed { ", smoothed" } else { "" };
    progress.note(&format!("rotation: {}{how}: {}", choice.rotation, choice.noise));
    planned.rotation = choice.rotation;
    Ok(opened.source(choice.rotation, seed)?.smoothed(choice.smoothing))
}

/// What each matrix of `weights` loses, by a quick measurement on the text of a calibration, or on
/// one that the model writes. `kept` is a file that saves it from matrix to matrix, and what an
/// interrupted run left there counts; one that holds something else is measured anew.
///
/// # Errors
/// When the model cannot be built or run.
pub fn sensitivities(
    weights: &WeightSource,
    content_hash: &str,
    calibration: Option<&Calibration>,
    kept: Option<&Path>,
    progress: &dyn Progress,
) -> Result<Sensitivities, Error> {
    let protocol = Protocol::quick(weights.rotations().seed(), calibration.is_some());
    let bos = weights.config().bos_token_id;
    let text = calibration.map(|c| Text::of(c, protocol.tokens, bos)).transpose()?;
    let tokens = text.as_ref().map_or(protocol.tokens, |text| text.sequences.tokens());
    progress.note(&format!("sensitivities: quick measurement on {tokens} tokens"));
    let done = kept.and_then(Sensitivities::kept);
    let mut keep = |so_far: &Sensitivities| {
        // Only time is lost where this fails.
        let _ = kept.map(|path| so_far.keep(path));
        Ok(())
    };
    sensitivity::measure_on(weights, content_hash, protocol, text.as_ref(), done, progress, &mut keep)
}

/// Sensitivities with what feedback by `calibration` leaves of the error; those of one scheme
/// everywhere, or measured with the calibration that they are meant for, as they are.
///
/// # Errors
/// When the calibration's moments are damaged or of another model.
pub fn with_feedback(
    measured: Sensitivities,
    planned: &PlanOptions,
    calibration: Option<&Calibration>,
    weights: &WeightSource,
    progress: &dyn Progress,
) -> Result<Sensitivities, Error> {
    let settled = matches!(planned.target, Target::Uniform(_)) || measured.objective() == Objective::Actual;
    match calibration {
        Some(calibration) if !settled => calibration.sensitivities(&measured, weights, progress),
        _ => Ok(measured),
    }
}
