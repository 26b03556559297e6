//! What a text can teach before a model is quantized, in one call: the moments of every input, and
//! what each matrix costs in a model of about the planned size that is rounded for them.
//!
//! The chain is that of the tables in `docs/lab/2026-11-calibration.md`: [`calibrate()`],
//! [`losses::measure_along`], a plan, then a quantization in the order of the data. Everything lies
//! in a directory of the caller, where a run that was killed finds it again.

use crate::{
    CalibrateOptions, Calibration, calibrate,
    losses::{self, LossOptions},
    sensitivity::{self, Text},
    smoothing, tune,
};
use fracbit_base::{Bytes, Scheme};
use fracbit_load::{Error, EvalOptions, Opened, Progress, require_memory};
use fracbit_model::WeightSource;
use fracbit_plan::{
    Plan, PlanOptions, Sensitivities, Target,
    plan::{Inventory, Storage},
};
use fracbit_quant::Rounders;
use std::{fs, path::Path, sync::Arc};

/// Tokens to calibrate on, unless another number is asked for: those of the tables in
/// `docs/lab/2026-11-calibration.md`.
pub const TOKENS: usize = 32_768;
/// Tokens that `quantize` calibrates on by default.
pub const QUICK_TOKENS: usize = 8192;
/// Tokens among them, the first, on which losses are measured.
pub(crate) const MEASURED: usize = 4096;
/// Tokens of a sequence that the model writes. Short ones, for a step takes about as long for all
/// that are written together as for one.
const WRITTEN: usize = 512;
/// Names within the directory.
const MOMENTS: &str = "moments";
const COEFFICIENTS: &str = "coefficients.json";

/// How to learn.
#[derive(Clone, Debug)]
pub struct LearnOptions {
    /// Tokens to calibrate on at most.
    pub tokens: usize,
    /// BOS, separator and prefix space of a text.
    pub text: EvalOptions,
    /// Seed of the text that the model writes when none is given.
    pub seed: u64,
    /// What searches for codes while losses are measured.
    pub rounders: Rounders,
    /// Most memory to use beside the memory-mapped checkpoint.
    pub max_memory: Option<Bytes>,
}

/// What was learned.
#[derive(Clone, Debug)]
pub struct Learned {
    /// To round with.
    pub calibration: Arc<Calibration>,
    /// To plan with; absent where there is nothing to plan.
    pub sensitivities: Option<Sensitivities>,
}

/// What a plan within these options will be like: the scheme of the palette that comes nearest to
/// what it gives a weight, if there is anything to choose, and its size.
fn foresee(inventory: &Inventory, options: &PlanOptions) -> Result<(Option<Scheme>, Bytes), Error> {
    let plan = fracbit_plan::plan(inventory, &Sensitivities::prior(inventory, options.rotation), options)?;
    let uniform = matches!(options.target, Target::Uniform(_));
    let scheme = if uniform { None } else { nearest(&plan, &options.schemes()) };
    Ok((scheme, Bytes(plan.bytes)))
}

/// The scheme that a plan within these options will be near to.
///
/// # Errors
/// When the budget is out of reach.
pub fn near(inventory: &Inventory, options: &PlanOptions) -> Result<Option<Scheme>, Error> {
    match options.target {
        Target::Uniform(scheme) => Ok(Some(scheme)),
        _ => Ok(foresee(inventory, options)?.0),
    }
}

/// The scheme with the bits of a packed weight of `plan`; of several the one with the least error.
fn nearest(plan: &Plan, schemes: &[Scheme]) -> Option<Scheme> {
    let packed = plan.layers.iter().filter(|l| matches!(l.scheme, Storage::Packed(_)));
    let (mut bits, mut weights) = (0.0, 0.0);
    for layer in packed {
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let count = (layer.rows * layer.cols) as f64;
        bits += layer.bits * count;
        weights += count;
    }
    let mean = bits / weights; // NaN where nothing is packed: no scheme is near
    let off = |scheme: Scheme| {
        let storage = Storage::Packed(scheme);
        ((storage.bits() - mean).abs(), storage.error().unwrap_or(f64::INFINITY))
    };
    let known = schemes.iter().copied().filter(|&s| off(s).0.is_finite() && off(s).1.is_finite());
    known.min_by(|&a, &b| off(a).0.total_cmp(&off(b).0).then(off(a).1.total_cmp(&off(b).1)))
}

/// Peak memory beside the memory-mapped checkpoint: of the calibration, of the measurement, which
/// holds a quantized model, some copies of the largest matrix, its moments, the logits and the
/// residual stream of the text, or of tuning a model of the planned size behind it. `written` when
/// the model writes the text of `tokens` tokens.
///
/// # Errors
/// When the budget is out of reach.
pub fn memory(
    opened: &Opened,
    inventory: &Inventory,
    planned: Option<&PlanOptions>,
    tokens: usize,
    written: bool,
) -> Result<Bytes, Error> {
    let foreseen = planned.map(|options| foresee(inventory, options)).transpose()?;
    Ok(memory_of(opened, inventory, foreseen, tokens, written))
}

/// [`memory`], with what [`foresee`] says.
fn memory_of(
    opened: &Opened,
    inventory: &Inventory,
    foreseen: Option<(Option<Scheme>, Bytes)>,
    tokens: usize,
    written: bool,
) -> Bytes {
    let calibrating =
        CalibrateOptions { length: Some(length(opened, written)), ..CalibrateOptions::new(tokens) };
    let calibrating = calibrate::memory(&opened.config, &calibrating, written);
    let Some((scheme, model)) = foreseen else { return calibrating };
    let tuning = tune::memory(&opened.config, model, tokens);
    let largest = inventory.matrices.iter().map(|m| m.shape.len() as u64).max().unwrap_or(0);
    let widest = inventory.matrices.iter().map(|m| m.shape.cols as u64).max().unwrap_or(0);
    let (vocab, hidden) = (opened.config.vocab_size as u64, opened.config.hidden_size as u64);
    let probe = sensitivity::probe_memory(MEASURED, vocab, hidden);
    let measuring = model.0 + 4 * 4 * largest + 16 * widest * widest + probe;
    calibrating.max(tuning).max(Bytes(if scheme.is_some() { measuring } else { 0 }))
}

/// Tokens of a sequence to calibrate on.
fn length(opened: &Opened, written: bool) -> usize {
    let usual = calibrate::length(&opened.config);
    if written { usual.min(WRITTEN) } else { usual }
}

/// Calibrates on a text and its name, or on one that the model writes. `scratch` is a directory in
/// which everything is kept; what it holds is taken for that of an interrupted run with the same
/// arguments.
///
/// # Errors
/// When the memory or the disk does not suffice, the text holds no two tokens, or the model cannot
/// be run.
pub fn calibrated(
    opened: &Opened,
    text: Option<(&str, &Path)>,
    scratch: &Path,
    options: &LearnOptions,
    progress: &dyn Progress,
) -> Result<Arc<Calibration>, Error> {
    let moments = scratch.join(MOMENTS);
    if !moments.exists() {
        let calibrating = CalibrateOptions {
            length: Some(length(opened, text.is_none())),
            text: options.text.clone(),
            seed: options.seed,
            resume: true,
            max_memory: options.max_memory,
            ..CalibrateOptions::new(options.tokens)
        };
        calibrate(opened, text, &moments, &calibrating, progress)?;
    }
    Ok(Arc::new(Calibration::open(&moments)?))
}

/// What each matrix of `source` costs in a model of about the planned size that is rounded by a
/// calibration; `None` where there is nothing to choose. `scratch` as in [`calibrated`].
///
/// # Errors
/// When the budget is out of reach, the memory does not suffice, or the model cannot be quantized
/// or run.
pub fn losses(
    source: &WeightSource,
    inventory: &Inventory,
    planned: &PlanOptions,
    calibration: &Arc<Calibration>,
    scratch: &Path,
    rounders: &Rounders,
    progress: &dyn Progress,
) -> Result<Option<Sensitivities>, Error> {
    let (Some(default), _) = foresee(inventory, planned)? else { return Ok(None) };
    let measured = Text::of(calibration, MEASURED, source.config().bos_token_id)?;
    let kept = scratch.join(COEFFICIENTS);
    let along = LossOptions {
        default,
        schemes: vec![],
        calibration: Some(Arc::clone(calibration)),
        rounders: rounders.clone(),
    };
    let done = Sensitivities::kept(&kept);
    let mut keep = |so_far: &Sensitivities| {
        // Only time is lost where it cannot be kept.
        let _ = so_far.keep(&kept);
        Ok(())
    };
    let hash = &calibration.info.source_hash;
    losses::measure_along(source, hash, &along, &measured, done, progress, &mut keep).map(Some)
}

/// [`calibrated`], then the weights as `planned` rotates and smooths them, then [`losses()`].
///
/// # Errors
/// As for these.
pub fn learn(
    opened: &Opened,
    inventory: &Inventory,
    planned: Option<&PlanOptions>,
    text: Option<(&str, &Path)>,
    scratch: &Path,
    options: &LearnOptions,
    progress: &dyn Progress,
) -> Result<Learned, Error> {
    let needed = memory(opened, inventory, planned, options.tokens, text.is_none())?;
    require_memory("learning from a text", needed, options.max_memory)?;
    let calibration = calibrated(opened, text, scratch, options, progress)?;
    let Some(planned) = planned else { return Ok(Learned { calibration, sensitivities: None }) };
    let (rotation, smoothed) = (planned.rotation, planned.smoothing);
    let source =
        smoothing::planned_source(opened, rotation, planned.seed, smoothed, Some(&calibration), progress)?;
    let rounders = &options.rounders;
    let sensitivities = losses(&source, inventory, planned, &calibration, scratch, rounders, progress)?;
    Ok(Learned { calibration, sensitivities })
}

/// Whether a directory holds something that [`learn`] would go on with.
#[must_use]
pub fn begun(scratch: &Path) -> bool {
    let entries = fs::read_dir(scratch).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(MOMENTS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_base::{Palette, Shape};
    use fracbit_model::{LayerLinear, LinearId};
    use fracbit_plan::plan::{Matrix, PlanOptions};
    use std::collections::BTreeMap;

    fn inventory() -> Inventory {
        let matrix = |linear| {
            let id = LinearId::Layer(0, linear);
            Matrix { id, name: id.to_string(), shape: Shape::new(256, 256), pieces: 1 }
        };
        Inventory {
            source_hash: String::new(),
            matrices: [LayerLinear::Q, LayerLinear::Up, LayerLinear::Down].map(matrix).to_vec(),
            other_params: 0,
            stored_other: 0,
            tied: false,
            bands: BTreeMap::new(),
        }
    }

    #[test]
    fn the_typical_scheme_has_the_bits_of_the_plan() {
        for (bits, palette, want) in [
            (2.2, Palette::Tcq, "tcq-2"),
            (3.1, Palette::Tcq, "tcq-3"),
            (4.3, Palette::Nuq, "nuq-4"),
            (2.6, Palette::All, "tcq-2.5"),
        ] {
            let options = PlanOptions { palette, ..PlanOptions::new(Target::Bits(bits)) };
            let (scheme, bytes) = foresee(&inventory(), &options).unwrap();
            assert_eq!(scheme.unwrap().to_string(), want, "{bits} bits");
            assert!(bytes.0 > 0);
        }
        let impossible = PlanOptions::new(Target::Bits(0.5));
        assert!(foresee(&inventory(), &impossible).is_err());
        let uniform = PlanOptions::new(Target::Uniform("tcq-2".parse().unwrap()));
        assert_eq!(foresee(&inventory(), &uniform).unwrap().0, None, "no choice");
    }
}
