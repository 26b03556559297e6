//! A plan with everything that surrounds it, as data and as one page of HTML.
//!
//! The page needs nothing but itself: no scripts, no fonts, no pictures from elsewhere. It shows
//! bits per matrix as a heat map with the fused groups marked, the losses that other sizes and
//! times would cost beside those of single schemes, the analysis of [`fracbit::explain()`], the
//! forecast, the machine and where everything comes from.

mod page;

use fracbit::{
    Error, Explanation, Speed, Target,
    explain::explain,
    machine::MachineProfile,
    plan::{Inventory, Plan, PlanOptions, plan},
    sensitivities::Sensitivities,
};
use fracbit_base::{Bytes, Scheme};
use serde::Serialize;

/// Points of a curve.
const POINTS: usize = 17;

/// A plan at another budget.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Point {
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Microseconds of a decode step, with a machine profile.
    pub(crate) step_us: Option<f64>,
    /// Predicted loss.
    pub(crate) loss: f64,
}

impl Point {
    fn of(plan: &Plan) -> Self {
        let step_us = plan.speed.as_ref().map(|s| s.step_us);
        Self { bytes: plan.bytes, step_us, loss: plan.predicted_loss }
    }
}

/// One scheme everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Uniform {
    /// The scheme.
    pub(crate) scheme: Scheme,
    /// What comes of it.
    #[serde(flatten)]
    pub(crate) at: Point,
}

/// The machine, as its profile tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Limits {
    /// Processor, instruction set, threads.
    pub(crate) machine: String,
    /// Reads from memory, 10^9 bytes per second.
    pub(crate) read_gb_per_s: f64,
    /// int8 products, 10^9 per second.
    pub(crate) int8_gmac_per_s: f64,
}

/// A plan and what surrounds it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    /// The model.
    pub(crate) model: String,
    /// The command.
    pub(crate) command: String,
    /// Version of the program.
    pub(crate) fracbit: String,
    /// The plan.
    #[serde(flatten)]
    pub(crate) plan: Plan,
    /// Why it loses what it loses.
    pub(crate) explanation: Explanation,
    /// Best plans over sizes.
    pub(crate) sizes: Vec<Point>,
    /// Best plans over times, with a machine profile.
    pub(crate) times: Vec<Point>,
    /// The same without fusion.
    pub(crate) times_unfused: Vec<Point>,
    /// Single schemes.
    pub(crate) uniform: Vec<Uniform>,
    /// The machine.
    pub(crate) limits: Option<Limits>,
}

impl Report {
    /// Surrounds the plan that `options` gave with what other budgets would give.
    ///
    /// # Errors
    /// As [`fn@plan`] for `options`.
    pub(crate) fn new(
        (model, command): (String, String),
        inventory: &Inventory,
        sensitivities: &Sensitivities,
        options: &PlanOptions,
        made: Plan,
    ) -> Result<Self, Error> {
        let explanation = explain(inventory, sensitivities, options, &made)?;
        let free = |target: Target| {
            let mut options = PlanOptions { target, ..options.clone() };
            if let Some(speed) = &mut options.speed {
                speed.limit_us = None;
            }
            options
        };
        let schemes: Vec<Scheme> = PlanOptions { target: Target::Any, ..options.clone() }.schemes();
        let mut uniform = Vec::new();
        for &scheme in &schemes {
            // A scheme that the machine has no time for is none of its plans.
            if let Ok(plan) = plan(inventory, sensitivities, &free(Target::Uniform(scheme))) {
                uniform.push(Uniform { scheme, at: Point::of(&plan) });
            }
        }
        let ends = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, 0.0f64), |(a, z), v| (a.min(v), z.max(v)))
        };
        #[expect(clippy::cast_precision_loss, reason = "bytes on an axis")]
        let (least, most) = ends(&mut uniform.iter().map(|u| u.at.bytes as f64));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes on an axis")]
        let sizes = spread(least, most)
            .filter_map(|bytes| plan(inventory, sensitivities, &free(Target::Size(Bytes(bytes as u64)))).ok())
            .map(|p| Point::of(&p))
            .collect();
        let (mut times, mut times_unfused) = (Vec::new(), Vec::new());
        if let Some(speed) = &options.speed {
            let (least, most) = ends(&mut uniform.iter().filter_map(|u| u.at.step_us));
            for us in spread(least, most) {
                for (fuse, list) in [(true, &mut times), (false, &mut times_unfused)] {
                    let mut timed = PlanOptions { target: Target::Any, ..options.clone() };
                    timed.speed = Some(Speed { limit_us: Some(us), fuse, ..speed.clone() });
                    list.extend(plan(inventory, sensitivities, &timed).ok().map(|p| Point::of(&p)));
                }
            }
        }
        let limits = options.speed.as_ref().map(|s| limits(&s.profile));
        let fracbit = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Self {
            model,
            command,
            fracbit,
            plan: made,
            explanation,
            sizes,
            times,
            times_unfused,
            uniform,
            limits,
        })
    }

    /// The page.
    #[must_use]
    pub(crate) fn html(&self) -> String {
        page::html(self)
    }
}

fn limits(profile: &MachineProfile) -> Limits {
    let MachineProfile { cpu, isa, threads, .. } = profile;
    Limits {
        machine: format!("{cpu}, {isa}, {threads} threads"),
        read_gb_per_s: profile.read_gb_per_s,
        int8_gmac_per_s: profile.int8_gmac_per_s,
    }
}

/// Values from `least` to `most`, evenly in ratio.
fn spread(least: f64, most: f64) -> impl Iterator<Item = f64> {
    #[expect(clippy::cast_precision_loss, reason = "a few points")]
    let at = move |i: usize| least * (most / least).powf(i as f64 / (POINTS - 1) as f64);
    (0..POINTS).map(at).filter(|v| v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit::{Preset, bands::Bands};
    use fracbit_model::RotationMode;

    #[test]
    fn a_page_holds_all_layers_and_nothing_from_elsewhere() {
        let config = Preset::named("tiny").unwrap().model_config().unwrap();
        let inventory = Inventory::of_config(&config, RotationMode::Fold, "0123".to_owned());
        let mut sensitivities = Sensitivities::prior(&inventory, RotationMode::Fold);
        let up = inventory.matrices.iter().find(|m| m.name.contains("layers.1.mlp.up")).unwrap();
        let counts: Vec<u32> = (0..up.shape.rows as u32).map(|row| row * row).collect();
        sensitivities.share_out(up.id, &Bands::of(&counts).unwrap(), &[40.0, 9.0, 3.0, 1.0]).unwrap();
        let options = PlanOptions::new(Target::Bits(3.3));
        let made = plan(&inventory, &sensitivities, &options).unwrap();
        let names = ("a <model> & more".to_owned(), "fracbit plan".to_owned());
        let report = Report::new(names, &inventory, &sensitivities, &options, made.clone()).unwrap();
        assert!(report.sizes.len() > POINTS / 2 && report.times.is_empty());
        assert!(report.sizes.is_sorted_by(|a, b| a.loss >= b.loss), "more bytes lose less");
        let page = report.html();
        for matrix in made.matrices() {
            let title = format!("title=\"{}: {}", matrix.name, matrix.schemes);
            assert!(page.contains(&title), "{title}");
            assert_eq!(matrix.schemes.contains(" to "), matrix.name == up.name, "{title}");
        }
        assert!(page.contains("a &lt;model&gt; &amp; more") && page.contains("0123"));
        for foreign in ["<script", "http://", "https://", "url(", "@import", "src="] {
            let page = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(foreign), "{foreign}");
        }
        let json = serde_json::to_value(&report).unwrap();
        for key in ["layers", "bytes", "explanation", "sizes", "uniform", "command"] {
            assert!(json.get(key).is_some(), "{key}");
        }
    }
}
