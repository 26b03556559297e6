//! Plans to a speed, put to the test: whole models decoded beside the times that were predicted for
//! them.

use crate::{Spread, pool, profile::Decoder, random::Arena};
use fracbit_base::{Palette, Scheme};
use fracbit_format::Grouping;
use fracbit_io::ModelConfig;
use fracbit_kernels::Kernels;
use fracbit_load::{Error, Progress};
use fracbit_model::{LinearId, RotationMode};
use fracbit_plan::{
    Error as PlanError, Plan, PlanOptions, Sensitivities, Speed, Target,
    machine::MachineProfile,
    plan::{Inventory, Storage, plan},
};
use serde::Serialize;
use std::{collections::BTreeMap, sync::Arc};

/// Times that every plan's model is made and measured.
const PASSES: usize = 3;

/// What to plan for.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// Number of times, spread evenly in ratio between the fastest and the slowest useful uniform
    /// plan.
    pub count: usize,
    /// Tokens in the cache of each sequence.
    pub context: usize,
    /// Sequences decoded together.
    pub batch: usize,
    /// Measurements of each model in each of three passes, eight steps each.
    pub rounds: usize,
}

/// A time, the plan for it, and what came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TargetSpeed {
    /// The time asked for, microseconds of a decode step.
    pub target_us: f64,
    /// What the plan is predicted to take.
    pub predicted_us: f64,
    /// What a model of its shape, schemes and groups takes: median.
    pub measured_us: f64,
    /// Least and most.
    pub spread: Spread,
    /// Measured over predicted.
    pub ratio: f64,
    /// Stored bits per parameter of the plan.
    pub bits_per_weight: f64,
    /// Fused groups.
    pub groups: usize,
    /// Predicted loss of the plan, nats per token.
    pub loss: f64,
    /// The same without fusion.
    pub loss_unfused: Option<f64>,
    /// The best single scheme that is predicted to meet the time.
    pub uniform: Option<Scheme>,
    /// Its predicted loss.
    pub uniform_loss: Option<f64>,
}

/// Plans for several times on this machine and measures each plan in a whole model of random codes.
///
/// Losses use the prior sensitivities: a shape has no weights to measure.
///
/// # Errors
/// When the profile is of another model or lacks something; what planning and running refuse.
pub fn targets(
    config: &ModelConfig,
    profile: &Arc<MachineProfile>,
    options: &TargetOptions,
    kernels: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<TargetSpeed>, Error> {
    super::positive("--count", &[options.count])?;
    super::positive("--rounds", &[options.rounds])?;
    profile.require_shape("profile", config)?;
    let inventory = Inventory::of_config(config, RotationMode::Fold, String::new());
    let planner = Planner { inventory: &inventory, profile, context: options.context, batch: options.batch };
    let mut uniform = planner.uniform()?;
    // Useful: no other one is both faster and better.
    uniform.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut least = f64::INFINITY;
    uniform.retain(|&(_, _, loss)| {
        let better = loss < least;
        least = least.min(loss);
        better
    });
    let (Some(first), Some(last)) = (uniform.first(), uniform.last()) else {
        return Err(Error::Option { option: "--profile", rule: "should hold a scheme".to_owned() });
    };
    let (fastest, slowest) = (first.1, last.1);
    let (arena, pool) = (Arena::new(), pool(profile.threads)?);
    #[expect(clippy::cast_precision_loss, reason = "a handful of targets")]
    let share = |i: usize| i as f64 / (options.count + 1) as f64;
    let times: Vec<f64> = (1..=options.count).map(|i| fastest * (slowest / fastest).powf(share(i))).collect();
    progress.stage("planning", options.count as u64);
    let mut plans = Vec::new();
    for &target_us in &times {
        plans.push(planner.within(target_us, true)?);
        progress.advance(1);
    }
    // One model at a time is in memory, each of them several times, so that all see the machine at
    // several moments.
    progress.stage("measuring", (PASSES * options.count) as u64);
    let mut steps = vec![Vec::new(); plans.len()];
    for _ in 0..PASSES {
        for (plan, steps) in plans.iter().zip(&mut steps) {
            let schemes = schemes(plan, config)?;
            let stored =
                |id: LinearId| Some((Storage::Packed(*schemes.get(&id)?), Grouping::Row, id.shape(config)));
            let fused = fracbit_plan::fusion::check(&plan.fused, stored)
                .map_err(|rule| PlanError::Plan { origin: "plan".to_owned(), rule })?;
            let model = arena.model(config, |id| schemes[&id], &fused, kernels)?;
            let times =
                pool.install(|| Decoder::new(&model, options.context, options.batch)?.steps(options.rounds))?;
            steps.extend(times);
            progress.advance(1);
        }
    }
    let row = |((&target_us, plan), steps): ((&f64, &Plan), Vec<f64>)| {
        let spread = Spread::of(steps);
        let predicted_us = plan.speed.as_ref().map_or(f64::NAN, |s| s.step_us);
        let single = uniform.iter().rev().find(|u| u.1 <= target_us);
        TargetSpeed {
            target_us,
            predicted_us,
            measured_us: spread.median,
            spread,
            ratio: spread.median / predicted_us,
            bits_per_weight: plan.bits_per_weight,
            groups: plan.fused.len(),
            loss: plan.predicted_loss,
            loss_unfused: planner.within(target_us, false).ok().map(|p| p.predicted_loss),
            uniform: single.map(|u| u.0),
            uniform_loss: single.map(|u| u.2),
        }
    };
    Ok(times.iter().zip(&plans).zip(steps).map(row).collect())
}

/// The scheme of every matrix of a plan without half-precision matrices.
fn schemes(plan: &Plan, config: &ModelConfig) -> Result<BTreeMap<LinearId, Scheme>, Error> {
    LinearId::all(config)
        .zip(&plan.layers)
        .map(|(id, layer)| match layer.scheme {
            Storage::Packed(scheme) => Ok((id, scheme)),
            Storage::F16 => {
                Err(PlanError::Plan { origin: "plan".to_owned(), rule: format!("`{id}` is not packed") }
                    .into())
            }
        })
        .collect()
}

struct Planner<'a> {
    inventory: &'a Inventory,
    profile: &'a Arc<MachineProfile>,
    context: usize,
    batch: usize,
}

impl Planner<'_> {
    fn options(&self, target: Target, limit_us: Option<f64>, fuse: bool) -> PlanOptions {
        let (context, batch) = (self.context, self.batch);
        let speed = Speed { limit_us, fuse, context, batch, ..Speed::new(Arc::clone(self.profile)) };
        PlanOptions { palette: Palette::All, speed: Some(speed), ..PlanOptions::new(target) }
    }

    fn plan(&self, options: &PlanOptions) -> Result<Plan, Error> {
        Ok(plan(self.inventory, &Sensitivities::prior(self.inventory, options.rotation), options)?)
    }

    fn within(&self, target_us: f64, fuse: bool) -> Result<Plan, Error> {
        self.plan(&self.options(Target::Any, Some(target_us), fuse))
    }

    /// Every scheme of the palette everywhere: time and loss.
    fn uniform(&self) -> Result<Vec<(Scheme, f64, f64)>, Error> {
        let palette = self.options(Target::Any, Some(1.0), true).schemes();
        let measured = |s: &Scheme| self.profile.kernels.iter().any(|k| k.scheme == Storage::Packed(*s));
        let one = |scheme: Scheme| {
            let plan = self.plan(&self.options(Target::Uniform(scheme), None, true))?;
            Ok((scheme, plan.speed.map_or(f64::NAN, |s| s.step_us), plan.predicted_loss))
        };
        palette.into_iter().filter(measured).map(one).collect()
    }
}
