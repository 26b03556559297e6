//! From a model and a budget to a plan. Shared by `plan`, `quantize` and `demo`.

use crate::{
    args::{LossArgs, RotationName, SensitivitySource, ShapeArgs, SpeedArgs, TargetArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    generate::CONTEXT,
    table::Table,
};
use fracbit::{
    Calibration, Forecast, MachineProfile, Objective, Opened, Plan, PlanError, PlanOptions, Progress,
    Sensitivities, Speed, Target, bands, compress,
    memory::MemoryBudget,
    plan::{Inventory, OperatingPoint, PlannedMatrix},
};
use fracbit_base::Bytes;
use fracbit_model::{RotationMode, WeightSource};
use std::{cell::OnceCell, fmt, path::Path, sync::Arc, time::Duration};

/// A checkpoint to be quantized.
pub(crate) struct Source {
    pub(crate) opened: Opened,
    hash: OnceCell<String>,
}

impl Source {
    /// Opens `dir`, and refuses a directory that is quantized already.
    pub(crate) fn open(dir: &Path, context: &Context) -> Result<Self, Failure> {
        let opened = files::open(dir, context)?;
        if opened.quantization.is_some() {
            let message = format!(
                "model `{}` should be an original checkpoint, it is quantized already",
                dir.display()
            );
            return Err(Failure::input(message)
                .hint("`fracbit inspect MODEL` shows where a quantized model came from"));
        }
        Ok(Self { opened, hash: OnceCell::new() })
    }

    /// Hash of all weights; reads them on the first call.
    pub(crate) fn hash(&self) -> &str {
        self.hash.get_or_init(|| self.opened.checkpoint.content_hash())
    }

    /// Refuses weights that cannot be quantized before any work is done, and says what will be
    /// missing from the result.
    pub(crate) fn check(&self, context: &Context) -> Result<(), Failure> {
        let weights = self.opened.source(RotationMode::None, 0)?;
        weights.check_finite()?;
        match self.opened.tokenizer() {
            Ok(tokenizer) => files::tell(&tokenizer, context),
            Err(error) => context
                .progress
                .note(&format!("note: this model can be quantized, but writes no text: {error}")),
        }
        Ok(())
    }

    /// What there is to quantize.
    pub(crate) fn inventory(&self, rotation: RotationMode) -> Inventory {
        Inventory::of(&self.opened.checkpoint, &self.opened.config, rotation)
    }

    /// The weights as `options` rotate and smooth them; `fixed` is the rotation, unless the model's
    /// inputs are to decide it, and `options` then learn which it is. Says on standard error what
    /// was chosen and why.
    pub(crate) fn weights(
        &self,
        fixed: Option<RotationMode>,
        options: &mut PlanOptions,
        calibration: Option<&Calibration>,
        context: &Context,
    ) -> Result<WeightSource, Failure> {
        Ok(compress::weights(&self.opened, fixed, options, calibration, &context.progress)?)
    }

    /// Sensitivities as asked for; says on standard error where they come from.
    pub(crate) fn sensitivities(
        &self,
        inventory: &Inventory,
        losses: &Losses,
        weights: &WeightSource,
        aids: &Aids<'_>,
        context: &Context,
    ) -> Result<Sensitivities, Failure> {
        let rotation = weights.rotations().mode();
        match &losses.source {
            SensitivitySource::Prior => {
                context
                    .progress
                    .note("sensitivities: prior by kind of matrix; nothing is measured on this model");
                Ok(Sensitivities::prior(inventory, rotation))
            }
            SensitivitySource::File(path) => {
                let found = Sensitivities::read(path)?;
                losses.check(&found, path)?;
                found.require_source(self.hash())?;
                context.progress.note(&format!("sensitivities: {} ({})", path.display(), found.protocol));
                if found.rotation != rotation {
                    context.progress.note("note: they were measured under another rotation");
                }
                Ok(found)
            }
            SensitivitySource::Quick => {
                let (calibration, progress) = (aids.calibration, &context.progress);
                Ok(compress::sensitivities(weights, self.hash(), calibration, aids.kept, progress)?)
            }
        }
    }
}

/// The options of a plan for `source`; reads the machine profile.
pub(crate) fn options(
    source: &Source,
    target: &TargetArgs,
    shape: &ShapeArgs,
    speed: &SpeedArgs,
    context: &Context,
) -> Result<PlanOptions, Failure> {
    let limit_us = target.limit_us(speed.batch);
    let mut beside = 0;
    if let Some(size) = target.size {
        beside = fracbit::beside_tensors(&source.opened)?;
        context.progress.note(&format!(
            "size: {size} for the directory, of which tokenizer and other files take up to {}",
            Bytes(beside)
        ));
    }
    // Clap asks for no option that conflicts with another one that is there.
    if target.sequences.is_some() && target.memory.is_none() {
        let rule = "`--sequences` should come with `--memory`, whose cache it is about";
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
    }
    let memory = memory(source, target, speed);
    let size = match memory {
        Some(budget) => Some(Target::Size(left_for_weights(source, budget))),
        None => target.target(source.opened.params(), beside),
    };
    let size = size.ok_or_else(|| Failure::new(Exit::Usage, anyhow::Error::msg("a budget is needed")))?;
    if limit_us.is_some() && speed.profile.is_none() {
        let rule = "a time is one of this machine, which has to be measured first: --profile FILE is missing";
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)).hint(
            "measure it once: `fracbit profile MODEL -o machine.json`, then add --profile machine.json",
        ));
    }
    let speed = self::speed(source, speed)?.map(|s| Speed { limit_us, ..s });
    Ok(shape.options(size, speed))
}

/// The memory of weights and cache, if it has a limit.
pub(crate) fn memory(source: &Source, target: &TargetArgs, speed: &SpeedArgs) -> Option<MemoryBudget> {
    let context = speed.context.unwrap_or(CONTEXT.min(source.opened.config.max_position_embeddings));
    target.memory.map(|bytes| MemoryBudget { bytes, context, sequences: target.sequences.unwrap_or(1) })
}

/// Most bytes that weights may take: what the least cache leaves.
fn left_for_weights(source: &Source, budget: MemoryBudget) -> Bytes {
    let cache = fracbit::memory::least_cache(&source.opened.config, budget);
    Bytes(budget.bytes.0.saturating_sub(cache.0))
}

/// The machine, without a limit.
pub(crate) fn speed(source: &Source, args: &SpeedArgs) -> Result<Option<Speed>, Failure> {
    let Some(path) = &args.profile else { return Ok(None) };
    let profile = MachineProfile::read(path)?;
    let origin = path.display().to_string();
    profile.require_current(&origin, &fracbit::kernels()?, rayon::current_num_threads())?;
    profile.require_shape(&origin, &source.opened.config)?;
    Ok(Some(Speed {
        context: args.context(),
        batch: args.batch,
        fuse: !args.no_fusion,
        patience: Duration::from_secs(args.patience as u64),
        ..Speed::new(Arc::new(profile))
    }))
}

/// How losses are to be estimated.
pub(crate) struct Losses {
    /// Where the estimates come from.
    pub(crate) source: SensitivitySource,
    /// What a file has to hold.
    pub(crate) objective: Option<Objective>,
}

impl Losses {
    /// As asked for. Unless told: one scheme everywhere leaves nothing to decide, so nothing is
    /// worth measuring.
    pub(crate) fn new(args: &LossArgs, options: &PlanOptions) -> Result<Self, Failure> {
        let uniform = matches!(options.target, Target::Uniform(_));
        let default = if uniform { SensitivitySource::Prior } else { SensitivitySource::Quick };
        let source = args.sensitivity.clone().unwrap_or(default);
        let objective = args.objective.map(Objective::from);
        match (&source, objective) {
            (SensitivitySource::File(_), _) | (_, None | Some(Objective::DataFree)) => {
                Ok(Self { source, objective })
            }
            (_, Some(wanted)) => {
                let rule =
                    format!("--objective {wanted} needs a table, measured on a text: --sensitivity FILE");
                Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)).hint(how_to_measure(wanted)))
            }
        }
    }

    /// The rotation that was asked for, or that of the measurement in a file; `None` to leave it to
    /// the model's inputs.
    pub(crate) fn rotation(
        &self,
        asked: RotationName,
        options: &mut PlanOptions,
    ) -> Result<Option<RotationMode>, Failure> {
        let (None, SensitivitySource::File(path)) = (asked.fixed(), &self.source) else {
            return Ok(asked.fixed());
        };
        let found = Sensitivities::read(path)?;
        options.smoothing &= found.smoothing;
        Ok((!found.source_hash.is_empty()).then_some(found.rotation))
    }

    /// Refuses what holds another estimate than the one asked for.
    fn check(&self, found: &Sensitivities, path: &Path) -> Result<(), Failure> {
        let Some(wanted) = self.objective else { return Ok(()) };
        let checked = found.require_objective(&path.display().to_string(), wanted);
        checked.map_err(|e| Failure::new(Exit::BadInput, e.into()).hint(how_to_measure(wanted)))
    }
}

fn how_to_measure(objective: Objective) -> &'static str {
    match objective {
        Objective::DataFree => "measure it: `fracbit sensitivity MODEL -o a.json`",
        Objective::Linear => "measure it: `fracbit sensitivity MODEL -o linear.json --text FILE`",
        Objective::Actual => {
            "measure it: `fracbit sensitivity MODEL -o actual.json --text FILE --actual tcq-3`"
        }
    }
}

/// What may help to make a plan.
#[derive(Clone, Copy, Default)]
pub(crate) struct Aids<'a> {
    /// The moments that will be rounded with: what feedback leaves of the error enters the
    /// sensitivities.
    pub(crate) calibration: Option<&'a Calibration>,
    /// A file that saves a quick measurement from matrix to matrix.
    pub(crate) kept: Option<&'a Path>,
    /// Sensitivities that were measured already, in place of those that were asked for.
    pub(crate) learned: Option<&'a Sensitivities>,
    /// Memory that weights and cache share.
    pub(crate) memory: Option<MemoryBudget>,
}

/// Refuses a budget that is out of reach, before anything is measured: what it reaches does not
/// depend on sensitivities.
pub(crate) fn reachable(
    source: &Source,
    options: &PlanOptions,
    target: &TargetArgs,
    memory: Option<MemoryBudget>,
) -> Result<(), Failure> {
    let inventory = source.inventory(options.rotation);
    let sensitivities = Sensitivities::prior(&inventory, options.rotation);
    let Err(error) = fracbit::plan(&inventory, &sensitivities, options) else { return Ok(()) };
    let failure = match (&error, target.size) {
        (PlanError::Budget { asked, min, min_bits, binds, .. }, Some(size))
            if asked < min && matches!(options.target, Target::Size(_)) =>
        {
            let beside = fracbit::beside_tensors(&source.opened)?;
            let rule = format!(
                "--size {size} for the directory is out of reach: tokenizer and other files take up to {}, \
                 and this palette stores the weights in at least {min} ({min_bits:.3} bits per weight), so \
                 --size should be at least {}B; the layer that binds is {binds}",
                Bytes(beside),
                beside + min.0,
            );
            Failure::new(Exit::OutOfReach, anyhow::Error::msg(rule))
        }
        _ => error.into(),
    };
    Err(short_of_cache(with_head(failure, options), source, memory))
}

/// What a budget of memory is short of, beside the error of the weights alone.
fn short_of_cache(failure: Failure, source: &Source, budget: Option<MemoryBudget>) -> Failure {
    let out_of_reach = matches!(&failure, Failure::Because(reason) if reason.exit == Exit::OutOfReach);
    let Some(budget) = budget.filter(|_| out_of_reach) else { return failure };
    let least = fracbit::memory::least_cache(&source.opened.config, budget);
    let MemoryBudget { bytes, context, sequences } = budget;
    failure.hint(format!(
        "of {bytes} the cache takes at least {least}, at 4 bits for {sequences} x {context} tokens: fewer (`--sequences`, `--context`) leave more for the weights"
    ))
}

fn solve(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
) -> Result<Plan, Failure> {
    fracbit::plan(inventory, sensitivities, options).map_err(|error| with_head(error.into(), options))
}

/// What may be behind a plan that was refused.
fn with_head(failure: Failure, options: &PlanOptions) -> Failure {
    if !options.keep_head {
        return failure;
    }
    failure.hint("--keep-head stores the head at 16 bits per weight, out of the same budget")
}

/// Sensitivities and the plan that follows from them.
pub(crate) fn make(
    source: &Source,
    losses: &Losses,
    options: &PlanOptions,
    weights: &WeightSource,
    aids: &Aids<'_>,
    context: &Context,
) -> Result<(Inventory, Sensitivities, Plan), Failure> {
    let inventory = source.inventory(options.rotation);
    let mut sensitivities = match aids.learned {
        Some(learned) => learned.clone(),
        None => source.sensitivities(&inventory, losses, weights, aids, context)?,
    };
    let (calibration, progress) = (aids.calibration, &context.progress);
    sensitivities = compress::with_feedback(sensitivities, options, calibration, weights, progress)?;
    let plan = match aids.memory {
        None => solve(&inventory, &sensitivities, options)?,
        Some(budget) => divided(source, &inventory, &sensitivities, options, weights, budget, context)?,
    };
    tracing::info!(
        bits = plan.bits_per_weight,
        loss = plan.predicted_loss,
        bound = plan.lower_bound,
        "planned"
    );
    Ok((inventory, sensitivities, plan))
}

/// The plan of the best division of a memory between weights and cache; says on standard error what
/// each would be.
fn divided(
    source: &Source,
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
    weights: &WeightSource,
    budget: MemoryBudget,
    context: &Context,
) -> Result<Plan, Failure> {
    let caches = fracbit::memory::caches(&source.opened, weights, budget, &context.progress)?;
    context.progress.finish();
    let divisions = fracbit::memory::divide(inventory, sensitivities, options, budget, &caches)?;
    for division in &divisions {
        let (cache, bytes) = (&division.cache, Bytes(division.cache.bytes));
        let line =
            format!("memory: a cache of {} bits takes {bytes} and loses {:.4}", cache.kv.bits(), cache.loss);
        let weights = match (&division.plan, division.loss()) {
            (Some(plan), Some(loss)) => {
                let (bits, own) = (plan.bits_per_weight, loss - cache.loss);
                format!("; weights of {bits:.3} bits lose {own:.4}, together {loss:.4} nats per token")
            }
            _ => "; too little is left for the weights".to_owned(),
        };
        context.progress.note(&(line + &weights));
    }
    let best = fracbit::memory::best(&divisions).and_then(|division| division.plan.clone());
    Ok(best.expect("one has a plan, or there was an error"))
}

/// A plan of a file, checked against the model.
pub(crate) fn read(path: &Path, source: &Source) -> Result<(Plan, Inventory), Failure> {
    let mut plan = Plan::parse(&files::read_text(path)?, &path.display().to_string())?;
    let inventory = source.inventory(plan.rotation);
    plan.fit_to(&inventory).map_err(|e| named(e, path))?;
    Ok((plan, inventory))
}

/// What is wrong with a plan, with the file that holds it.
pub(crate) fn named(error: PlanError, path: &Path) -> PlanError {
    match error {
        PlanError::Plan { rule, .. } => PlanError::Plan { origin: path.display().to_string(), rule },
        other => other,
    }
}

/// A plan as a table with its totals.
pub(crate) struct Shown<'a>(pub(crate) &'a Plan);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.0;
        let mut table = Table::new(["matrix", "shape", "scheme", "bits", "size", "loss"], &[2]);
        for PlannedMatrix { name, schemes, bits, shape, bytes, predicted_loss } in plan.matrices() {
            let bits = format!("{bits:.4}").trim_end_matches('0').trim_end_matches('.').to_owned();
            let (shape, bytes) = (shape.to_string(), Bytes(bytes).to_string());
            table.row([name, shape, schemes, bits, bytes, format!("{predicted_loss:.6}")]);
        }
        writeln!(f, "{table}")?;
        if !plan.bands.is_empty() {
            let (most, all) = (bands::MOST, plan.bands.len());
            writeln!(
                f,
                "bands            of rows, up to {most}, in {all} of the matrices: the first has those whose errors cost most"
            )?;
        }
        writeln!(f, "size             {} ({} bytes of tensors)", Bytes(plan.bytes), plan.bytes)?;
        writeln!(f, "                 of which {} norms, biases and codebooks", Bytes(plan.fixed_bytes))?;
        writeln!(f, "bits per weight  {:.4}, everything counted", plan.bits_per_weight)?;
        writeln!(f, "predicted loss   {:.6} nats per token", plan.predicted_loss)?;
        let gap = gap(plan);
        writeln!(
            f,
            "proven bound     {:.6} for this palette and budget (gap {:.3} %)",
            plan.lower_bound,
            100.0 * gap
        )?;
        for point in plan.operating_points().unwrap_or_default() {
            let OperatingPoint { precision, bits, bytes, predicted_loss } = point;
            let name = format!("at {precision} bits");
            write!(
                f,
                "{name:<17}{bits:.4} bits per weight are read, {}, predicted loss {predicted_loss:.6}",
                Bytes(bytes)
            )?;
            let points = plan.speed.iter().flat_map(|speed| &speed.points);
            match points.into_iter().find(|point| point.precision == precision) {
                Some(point) => writeln!(f, ", {:.3} ms a step", point.step_us / 1000.0)?,
                None => writeln!(f)?,
            }
        }
        if let Some(forecast) = &plan.forecast {
            let Forecast { kl, low, high, perplexity_ratio } = forecast;
            writeln!(
                f,
                "forecast         KL divergence {kl:.4} ({low:.4} to {high:.4}) nats per token, perplexity about {:.1} % up",
                100.0 * (perplexity_ratio - 1.0)
            )?;
        }
        if let Some(cache) = &plan.cache {
            writeln!(
                f,
                "cache            {} bits (`--kv {}`), {} for {} x {} tokens, loss {:.6}; with the weights {}",
                cache.kv.bits(),
                cache.kv.bits(),
                Bytes(cache.bytes),
                cache.sequences,
                cache.context,
                cache.loss,
                Bytes(cache.bytes + plan.bytes)
            )?;
        }
        if let Some(speed) = &plan.speed {
            writeln!(
                f,
                "decode step      {:.3} ms, {:.1} tokens per second (error of such predictions {:.1} %), context {}, batch {}",
                speed.step_us / 1000.0,
                speed.tokens_per_second,
                100.0 * speed.error,
                speed.context,
                speed.batch
            )?;
            writeln!(f, "                 on {}", speed.machine)?;
        }
        if !plan.fused.is_empty() {
            let members: usize = plan.fused.iter().map(Vec::len).sum();
            writeln!(f, "fused            {members} matrices in {} groups", plan.fused.len())?;
        }
        writeln!(f, "objective        {}: {}", plan.objective_kind.name(), plan.objective)
    }
}

/// How far the plan can at most be from the best one, as a share of its loss.
fn gap(plan: &Plan) -> f64 {
    if plan.predicted_loss > 0.0 {
        ((plan.predicted_loss - plan.lower_bound) / plan.predicted_loss).max(0.0)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit::plan::{PLAN_VERSION, PlannedLayer, Storage};

    pub(crate) fn sample() -> Plan {
        let layer = PlannedLayer {
            name: "model.layers.0.mlp.up_proj".to_owned(),
            scheme: Storage::F16,
            bits: 16.0,
            rows: 64,
            cols: 32,
            group: 0,
            bytes: 4096,
            sensitivity: 0.5,
            predicted_loss: 0.25,
        };
        Plan {
            plan_version: PLAN_VERSION,
            source_hash: String::new(),
            rotation: RotationMode::Fold,
            smoothing: false,
            seed: 0,
            objective: "a guess".to_owned(),
            bits_per_weight: 16.0,
            bytes: 4100,
            fixed_bytes: 4,
            predicted_loss: 0.25,
            lower_bound: 0.2,
            layers: vec![layer],
            fused: Vec::new(),
            bands: bands::BandsOf::new(),
            cache: None,
            prices: fracbit::Prices::default(),
            objective_kind: fracbit::Objective::DataFree,
            forecast: None,
            speed: None,
        }
    }

    #[test]
    fn a_plan_shows_rows_and_totals() {
        let text = Shown(&sample()).to_string();
        for part in
            ["matrix ", "model.layers.0.mlp.up_proj", "f16", "4.1 kB (4100 bytes", "gap 20.000 %", "a guess"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_plan_says_what_bands_are() {
        let cut = bands::Bands::of(&(0..64).collect::<Vec<_>>()).unwrap();
        let whole = sample().layers.remove(0);
        let parts = ["tcq-4", "tcq-3", "tcq-2.5", "tcq-1.5"].into_iter().enumerate();
        let parts = parts.map(|(band, scheme)| PlannedLayer {
            name: format!("{}.band{band}", whole.name),
            scheme: scheme.parse().unwrap(),
            bits: scheme[4..].parse().unwrap(),
            rows: 16,
            ..whole.clone()
        });
        let plan = Plan { bands: [(whole.name.clone(), cut)].into(), layers: parts.collect(), ..sample() };
        let text = Shown(&plan).to_string();
        for part in ["tcq-4 to tcq-1.5", "2.75", "64x32", "1.000000", "up to 4, in 1 of the matrices"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!Shown(&sample()).to_string().contains("band"));
    }

    #[test]
    fn a_plan_without_loss_has_no_gap() {
        assert_eq!(gap(&Plan { predicted_loss: 0.0, lower_bound: 0.0, ..sample() }), 0.0);
        assert_eq!(gap(&Plan { predicted_loss: 1.0, lower_bound: 1.0 + 1e-12, ..sample() }), 0.0);
    }
}
