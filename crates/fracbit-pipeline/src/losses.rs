//! What each scheme really costs in each matrix: the `actual` loss term of Q-Palette (appendix E).
//!
//! The whole model is quantized with one default scheme. Then one matrix at a time is quantized
//! with every scheme of a palette, put in the place of its default, and the divergence from the
//! original model is measured on a text; the term is its difference to that of the default. Unlike
//! coefficients this sees what calibration wins in a matrix, and interactions with the error of the
//! others. It costs a quantization of the model per scheme, and a few more for forecasts: whole
//! models of one scheme, beside the sums of what their matrices cost one by one
//! ([`fracbit_plan::forecast`]).

use crate::{
    Calibration,
    matrices::rounded,
    sensitivity::{Prefix, Probe, Text, cut, row_costs},
};
use fracbit_base::Scheme;
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_load::{Error, Progress};
use fracbit_model::{FloatId, Linear, LinearId, Model, ModelBuilder, RotationMode, WeightSource};
use fracbit_plan::{
    Error as PlanError,
    forecast::JointPoint,
    plan::{Storage, grouping},
    sensitivities::Sensitivities,
};
use fracbit_quant::{
    Hessian, Rounders, Rounding,
    sensitivity::{Fit, fit},
};
use std::{collections::BTreeMap, sync::Arc};

/// What to measure.
#[derive(Clone, Debug)]
pub struct LossOptions {
    /// Scheme of all matrices but the one under test.
    pub default: Scheme,
    /// Schemes to measure in every matrix.
    pub schemes: Vec<Scheme>,
    /// Round by these moments, if the plan is to be used with them.
    pub calibration: Option<Arc<Calibration>>,
    /// What searches for codes, and how thoroughly.
    pub rounders: Rounders,
}

/// The protocol in words, as documents record it.
#[must_use]
pub fn describe(options: &LossOptions, text: &Text, seed: u64) -> String {
    let calibration = options
        .calibration
        .as_ref()
        .map_or("no calibration".to_owned(), |c| format!("calibration {}", c.digest()));
    let schemes: Vec<String> = options.schemes.iter().map(ToString::to_string).collect();
    format!(
        "actual: KL divergence with one matrix replaced, the others {}, {} tokens of {}, {calibration}, seed {seed}, {} search, schemes {}",
        options.default,
        text.sequences.tokens(),
        text.origin,
        options.rounders.effort(),
        schemes.join(" ")
    )
}

/// Measures every matrix of `source` in every scheme. `done` and `checkpoint` serve to continue, as
/// in [`crate::sensitivity::measure`]; they hold whole matrices.
///
/// # Errors
/// When a matrix cannot be quantized or the model cannot be run.
pub fn measure(
    source: &WeightSource,
    content_hash: &str,
    options: &LossOptions,
    text: &Text,
    done: Option<Sensitivities>,
    progress: &dyn Progress,
    checkpoint: &mut dyn FnMut(&Sensitivities) -> Result<(), Error>,
) -> Result<Sensitivities, Error> {
    let protocol = describe(options, text, source.rotations().seed());
    let tokens = text.sequences.tokens();
    let mut result = Sensitivities::begun(protocol, content_hash, source, tokens, done);
    let weights = |id: LinearId| id.shape(source.config()).len() as u64;
    let whole = whole(&options.schemes);
    let times = 1 + options.schemes.len() + whole.len();
    let (mut work, probe, ids) = Work::begin(source, options, text, progress)?;
    progress.stage("measuring losses", ids.iter().map(|&id| weights(id)).sum::<u64>() * times as u64);
    let mut model = work.quantized(&ids)?;
    let base = probe.divergence(&model)?;
    let mut prefix = Prefix::new(&probe);
    for &id in &ids {
        let name = id.to_string();
        if result.actual.contains_key(&name) {
            progress.advance(weights(id) * options.schemes.len() as u64);
            continue;
        }
        prefix.enter(&model, id)?;
        let mut losses = BTreeMap::new();
        let mut points = Vec::new();
        let mut original = None;
        for &scheme in &options.schemes {
            let (linear, error) = work.linear(id, scheme)?;
            let replaced = model.replace(id, linear)?;
            original.get_or_insert(replaced);
            let loss = prefix.divergence(&model)? - base;
            losses.insert(scheme.to_string(), loss);
            points.push((error.sqrt(), loss));
        }
        if let Some(original) = original {
            model.replace(id, original)?;
        }
        // A coefficient for whoever asks for one: losses over the best scheme's, by error.
        let best = losses.values().copied().fold(f64::INFINITY, f64::min);
        points.iter_mut().for_each(|(_, loss)| *loss -= best);
        let fitted = fit(&points).ok_or_else(|| PlanError::Sensitivity {
            origin: name.clone(),
            rule: "the divergence should be finite with some scheme".to_owned(),
        })?;
        result.layers.insert(name.clone(), fitted);
        result.actual.insert(name, losses);
        checkpoint(&result)?;
    }
    for scheme in whole {
        let mut sum = 0.0;
        for &id in &ids {
            sum += result.loss(&id.to_string(), Storage::Packed(scheme))?;
            model.replace(id, work.linear(id, scheme)?.0)?;
        }
        result.joint.push(JointPoint { sum, measured: probe.divergence(&model)? });
    }
    checkpoint(&result)?;
    Ok(result)
}

/// Most whole models to measure.
const WHOLE: usize = 6;

/// Some schemes from the least to the most bits.
fn whole(schemes: &[Scheme]) -> Vec<Scheme> {
    let mut schemes = schemes.to_vec();
    schemes.sort_by_key(|s| s.rate());
    let count = schemes.len().min(WHOLE);
    (0..count).map(|i| schemes[i * (schemes.len() - 1) / (count - 1).max(1)]).collect()
}

/// The protocol of [`measure_along`] in words.
#[must_use]
pub fn describe_along(options: &LossOptions, text: &Text, seed: u64) -> String {
    let calibration = options
        .calibration
        .as_ref()
        .map_or("no calibration".to_owned(), |c| format!("calibration {}", c.digest()));
    format!(
        "linear: KL divergence with the error of one matrix turned round and taken away, all {}, {} tokens of {}, {calibration}, seed \
         {seed}, {} search",
        options.default,
        text.sequences.tokens(),
        text.origin,
        options.rounders.effort(),
    )
}

/// Where a matrix's part of the loss is too small to be seen, it counts as this much less than an
/// even share: two bits a weight.
const LEAST: f64 = 16.0;

/// Coefficients at the damage of the default scheme: the model is quantized with it, then the error
/// of one matrix at a time is turned round, and taken away. In units of that error the divergence
/// is about `f(s) = f(0) + c s + a s^2`. The part c says how the error happens to meet those of the
/// other matrices; another scheme draws it anew, and at high rates it is larger than the matrix's
/// own part, so that halving errors finds many that seem to help. `a = (f(1) + f(-1)) / 2 - f(0)`
/// is free of it. Unlike white noise in an otherwise clean model this sees the errors that the
/// rounding really makes, feedback included, where they are as large as they will be; unlike
/// [`measure`] it quantizes the model once.
///
/// # Errors
/// As for [`measure`].
#[expect(clippy::cast_precision_loss, reason = "a share")]
pub fn measure_along(
    source: &WeightSource,
    content_hash: &str,
    options: &LossOptions,
    text: &Text,
    done: Option<Sensitivities>,
    progress: &dyn Progress,
    checkpoint: &mut dyn FnMut(&Sensitivities) -> Result<(), Error>,
) -> Result<Sensitivities, Error> {
    let protocol = describe_along(options, text, source.rotations().seed());
    let tokens = text.sequences.tokens();
    let mut result = Sensitivities::begun(protocol, content_hash, source, tokens, done);
    let typical = Storage::Packed(options.default).error()?;
    let (mut work, probe, ids) = Work::begin(source, options, text, progress)?;
    let weights: usize = ids.iter().map(|id| id.shape(source.config()).len()).sum();
    progress.stage("quantizing, to measure losses", weights as u64);
    let mut model = work.quantized(&ids)?;
    let base = probe.divergence(&model)?;
    // Two runs of the text for each matrix, whatever its size.
    progress.stage("measuring losses", ids.len() as u64);
    let bands = match &options.calibration {
        Some(calibration) => calibration.bands(tokens, source.config().vocab_size)?,
        None => None,
    };
    let mut prefix = Prefix::new(&probe);
    for id in ids {
        let name = id.to_string();
        if result.layers.contains_key(&name) {
            progress.advance(1);
            continue;
        }
        prefix.enter(&model, id)?;
        let matrix = source.linear(id)?;
        let rounded = model.linear(id)?.to_dense().map_err(fracbit_model::Error::from)?;
        let turned: Vec<f32> = matrix.data.iter().zip(&rounded).map(|(&w, &q)| 2.0 * w - q).collect();
        let mut with = |weights| -> Result<f64, Error> {
            let linear = Linear::dense(matrix.shape, weights, source.bias(id)?);
            let original = model.replace(id, linear.map_err(fracbit_model::Error::from)?)?;
            let found = prefix.divergence(&model)?;
            model.replace(id, original)?;
            Ok(found)
        };
        let mut own = |turned, exact| Ok::<_, Error>(f64::midpoint(base, with(turned)?) - with(exact)?);
        let parts = match bands.as_ref().filter(|_| !id.is_layer()) {
            None => Vec::new(),
            Some(bands) => (0..bands.count())
                .map(|band| {
                    let only = |other| bands.mix(band, &rounded, other, matrix.shape.cols);
                    own(only(&turned), only(&matrix.data))
                })
                .collect::<Result<_, _>>()?,
        };
        let own = own(turned, matrix.data)?;
        let even = base / typical * matrix.shape.len() as f64 / weights as f64;
        result.layers.insert(name, Fit { a: (own / typical).max(even / LEAST), residual: 0.0 });
        if let Some(bands) = bands.as_ref().filter(|_| !parts.is_empty()) {
            result.share_out(id, bands, &parts)?;
        }
        checkpoint(&result)?;
        progress.advance(1);
    }
    // One after another bands of so many matrices would take long: their shares are those of small
    // errors in the original model.
    let plain = work.plain()?;
    let original = Model::from_source(&plain)?.with_kernels(&work.kernels);
    let seed = source.rotations().seed();
    for (id, halves) in row_costs(&original, &plain, source, seed, &text.sequences, progress)? {
        if id.is_layer() {
            cut(&mut result, plain.config(), id, &halves)?;
        }
    }
    Ok(result)
}

struct Work<'a> {
    source: &'a WeightSource,
    options: &'a LossOptions,
    kernels: Kernels,
    progress: &'a dyn Progress,
    /// Moments of the matrix that was quantized last.
    moments: Option<(LinearId, Option<Hessian>)>,
}

impl<'a> Work<'a> {
    /// The matrices to measure, and the original model's view of the text.
    fn begin(
        source: &'a WeightSource,
        options: &'a LossOptions,
        text: &Text,
        progress: &'a dyn Progress,
    ) -> Result<(Self, Probe, Vec<LinearId>), Error> {
        let ids: Vec<LinearId> = LinearId::all(source.config()).collect();
        let work = Self { source, options, kernels: fracbit_load::kernels()?, progress, moments: None };
        let original = Model::from_source(&work.plain()?)?.with_kernels(&work.kernels);
        let probe = Probe::of(&original, text.sequences.iter().map(<[u32]>::to_vec).collect())?;
        Ok((work, probe, ids))
    }

    /// The weights without rotation.
    fn plain(&self) -> Result<WeightSource, Error> {
        let config = self.source.config().clone();
        Ok(WeightSource::new(Arc::clone(self.source.checkpoint()), config, RotationMode::None, 0)?)
    }

    /// The model with every matrix in the default scheme.
    fn quantized(&mut self, ids: &[LinearId]) -> Result<Model, Error> {
        let source = self.source;
        let mut builder = ModelBuilder::new(source.config().clone(), source.rotations().clone())?;
        for &id in ids {
            builder.set(id, self.linear(id, self.options.default)?.0)?;
        }
        for id in FloatId::all(source.config()) {
            builder.set_floats(id, source.floats(id)?)?;
        }
        Ok(builder.build()?.with_kernels(&self.kernels))
    }

    /// A matrix in a scheme, and its relative squared error.
    fn linear(&mut self, id: LinearId, scheme: Scheme) -> Result<(Linear, f64), Error> {
        if self.moments.as_ref().is_none_or(|(of, _)| *of != id) {
            self.moments = None;
            let found = match &self.options.calibration {
                Some(calibration) => calibration.moments(self.source, id)?,
                None => None,
            };
            self.moments = Some((id, found));
        }
        let moments = self.moments.as_ref().map_or(&[][..], |(_, m)| m.as_slice());
        let matrix = self.source.linear(id)?;
        let advance = |weights: usize| self.progress.advance(weights as u64);
        let rounding = Rounding { moments, ..Rounding::new(&self.options.rounders) };
        let grouping = grouping(self.source.rotations().mode(), scheme);
        let packed = rounded(id, &matrix, scheme, grouping, rounding, &advance)?;
        let linear = Linear::packed(PackedMatrix::new(&self.kernels, &packed.view()), self.source.bias(id)?);
        Ok((linear.map_err(fracbit_model::Error::from)?, packed.relative_error))
    }
}
