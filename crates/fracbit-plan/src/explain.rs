//! Why a plan loses what it loses, and what would help.
//!
//! The gap to the ideal Gaussian quantizer is split as in Q-Palette, appendix B, into the share of
//! codes that miss the rate-distortion bound and the share of having few bit-widths. Prices come
//! from the linear relaxation of the plan's own problem: what one more byte and one more
//! microsecond would save. The same relaxation with one more scheme, or with a bit-width between
//! two that exist, tells what that would buy at most.

use crate::{
    Error,
    inventory::Inventory,
    joint::{Joint, Prices, loss_between},
    plan::{Plan, PlanOptions, choices, menus},
    planned::PlannedLayer,
    sensitivities::Sensitivities,
    storage::Storage,
};
use fracbit_alloc::{Budget, Gap, LayerTerm, Problem, Stored, gap, ideal_bits, relax};
use fracbit_base::{Code, Scheme, Shape};
use serde::Serialize;

/// What one more way to store matrices would save.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// A scheme's name, or a bit-width with the families that it lies between.
    pub what: String,
    /// Loss saved at the same size and time, at most.
    pub saved: f64,
    /// That as a share of the plan's loss.
    pub share: f64,
}

/// The analysis of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Mean bits per weight of the codes, half-precision matrices aside: the budget of the ideal
    /// quantizer.
    pub code_bits: f64,
    /// Loss of the ideal quantizer there, and the gap to it in two parts.
    pub gap: Gap,
    /// Value of a byte and a microsecond.
    pub prices: Prices,
    /// What one more scheme would buy, the most first.
    pub schemes: Vec<Gain>,
    /// What one more bit-width would buy, the most first; as fast as the mean of its neighbours,
    /// where time is limited.
    pub widths: Vec<Gain>,
}

/// Explains the plan that `options` gave.
///
/// # Errors
/// When the plan does not fit the model, or sensitivities or kernels are missing.
pub fn explain(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
    plan: &Plan,
) -> Result<Explanation, Error> {
    let packed = |l: &&PlannedLayer| l.scheme != Storage::F16;
    let layers: Vec<&PlannedLayer> = plan.layers.iter().filter(packed).collect();
    let terms: Vec<LayerTerm> = layers
        .iter()
        .map(|l| LayerTerm { params: Shape::new(l.rows, l.cols).len() as u64, a: l.sensitivity.max(1e-12) })
        .collect();
    let stored = layers
        .iter()
        .map(|l| Ok(Stored { bits: l.bits, err: l.scheme.error()? }))
        .collect::<Result<Vec<_>, Error>>()?;
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let (bits, weights) = terms
        .iter()
        .zip(&stored)
        .fold((0.0, 0.0), |(b, w), (t, s)| (b + t.params as f64 * s.bits, w + t.params as f64));
    let code_bits = if weights > 0.0 { bits / weights } else { 0.0 };
    let gap = if terms.is_empty() {
        Gap { ideal: 0.0, total: 0.0, distortion: 0.0, allocation: 0.0 }
    } else {
        gap::split(&terms, &stored, &ideal_bits(&terms, code_bits, (0.0, 16.0))?)?
    };

    let inventory = &*inventory.with_bands(&plan.bands)?;
    let asker = Asker { inventory, sensitivities, options, plan };
    let now = asker.bound(&[], None)?;
    let have = options.schemes();
    let gain = |what: String, bound: f64| {
        let saved = (now - bound).max(0.0);
        Gain { what, saved, share: saved / plan.predicted_loss.max(f64::MIN_POSITIVE) }
    };
    let mut schemes = Vec::new();
    let flat = |s: &Scheme| !s.nested();
    for scheme in Scheme::all().filter(|s| flat(s) && !have.contains(s)) {
        if asker.measured(scheme) {
            schemes.push(gain(scheme.to_string(), asker.bound(&[scheme], None)?));
        }
    }
    let mut widths = Vec::new();
    for width in between(&have) {
        widths.push(gain(width.name.clone(), asker.bound(&[], Some(&width))?));
    }
    for list in [&mut schemes, &mut widths] {
        list.retain(|g: &Gain| g.share > 1e-6);
        list.sort_by(|a, b| b.saved.total_cmp(&a.saved));
    }
    Ok(Explanation { code_bits, gap, prices: plan.prices, schemes, widths })
}

/// A bit-width that does not exist.
struct Width {
    name: String,
    neighbours: (Storage, Storage),
}

/// The widths halfway between neighbouring rates of each trellis code.
fn between(schemes: &[Scheme]) -> Vec<Width> {
    let mut trellis: Vec<&Scheme> =
        schemes.iter().filter(|s| s.code().is_some() && s.planes() == 1).collect();
    let code = |s: &Scheme| s.code().map(Code::name);
    trellis.sort_by_key(|s| (code(s), s.rate()));
    trellis
        .windows(2)
        .filter(|pair| code(pair[0]) == code(pair[1]))
        .map(|pair| {
            let bits = f64::midpoint(pair[0].rate().bits(), pair[1].rate().bits());
            let name = format!("{bits} bits, between {} and {}", pair[0], pair[1]);
            Width { name, neighbours: (Storage::Packed(*pair[0]), Storage::Packed(*pair[1])) }
        })
        .collect()
}

struct Asker<'a> {
    inventory: &'a Inventory,
    sensitivities: &'a Sensitivities,
    options: &'a PlanOptions,
    plan: &'a Plan,
}

impl Asker<'_> {
    /// Whether the time and the losses of a scheme are known, where they are measured.
    fn measured(&self, scheme: Scheme) -> bool {
        let speed = self.options.speed.as_ref().filter(|s| s.limit_us.is_some());
        self.sensitivities.covers(scheme)
            && speed.is_none_or(|s| s.profile.kernels.iter().any(|k| k.scheme == Storage::Packed(scheme)))
    }

    /// Least loss of the relaxed problem at the plan's own size and time, with some more choices.
    fn bound(&self, more: &[Scheme], width: Option<&Width>) -> Result<f64, Error> {
        let mut options = self.options.clone();
        options.also.extend(more);
        let mut menus = menus(self.inventory, self.sensitivities, &options)?;
        let bytes: u64 = self.plan.layers.iter().map(|l| l.bytes).sum();
        if let Some(speed) = options.speed.as_ref().filter(|s| s.limit_us.is_some()) {
            let limited = !matches!(self.options.target, crate::Target::Any);
            let neighbours = width.map(|w| w.neighbours);
            return Joint::new(self.inventory, &menus, speed)?.bound(limited.then_some(bytes), neighbours);
        }
        if let Some(width) = width {
            for menu in menus.iter_mut().filter(|m| m.len() > 1) {
                let of = |storage| menu.iter().find(|l| l.scheme == storage);
                let (Some(low), Some(high)) = (of(width.neighbours.0), of(width.neighbours.1)) else {
                    continue;
                };
                let mut middle = low.clone();
                middle.bytes = u64::midpoint(low.bytes, high.bytes);
                middle.predicted_loss = loss_between(low, high);
                menu.push(middle);
            }
        }
        Ok(relax(&Problem::new(choices(&menus), vec![Budget::new("bytes", bytes)])?)?.bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Preset, Target, plan};
    use fracbit_base::Palette;
    use fracbit_model::RotationMode;

    #[test]
    fn measured_losses_are_explained_with_what_was_measured() {
        let config = Preset::named("tiny").unwrap().model_config().unwrap();
        let inventory = Inventory::of_config(&config, RotationMode::Fold, String::new());
        let mut sensitivities = Sensitivities::prior(&inventory, RotationMode::Fold);
        let options = PlanOptions::new(Target::Bits(3.3));
        let linear = plan(&inventory, &sensitivities, &options).unwrap();
        let linear = explain(&inventory, &sensitivities, &options, &linear).unwrap();
        // Measured: what the coefficients say, and a constant that the least loss of each matrix
        // takes away again.
        for (name, fit) in &sensitivities.layers {
            let loss = |s: Scheme| 0.01 + fit.a * Storage::Packed(s).error().unwrap();
            let losses = options.schemes().into_iter().map(|s| (s.to_string(), loss(s))).collect();
            sensitivities.actual.insert(name.clone(), losses);
        }
        let made = plan(&inventory, &sensitivities, &options).unwrap();
        let found = explain(&inventory, &sensitivities, &options, &made).unwrap();
        assert!(found.schemes.is_empty(), "of other schemes nothing is known: {:?}", found.schemes);
        assert!(!found.widths.is_empty());
        for (width, want) in found.widths.iter().zip(&linear.widths) {
            assert!(
                width.what == want.what && (width.saved / want.saved - 1.0).abs() < 0.2,
                "{width:?} {want:?}"
            );
        }
    }

    #[test]
    fn a_poor_palette_gains_by_a_scheme_and_a_rich_one_hardly() {
        let config = Preset::named("llama-3.2-1b").unwrap().model_config().unwrap();
        let inventory = Inventory::of_config(&config, RotationMode::Fold, String::new());
        let sensitivities = Sensitivities::prior(&inventory, RotationMode::Fold);
        let of = |palette| {
            let options = PlanOptions { palette, ..PlanOptions::new(Target::Bits(3.3)) };
            let made = plan(&inventory, &sensitivities, &options).unwrap();
            (explain(&inventory, &sensitivities, &options, &made).unwrap(), made)
        };
        let (poor, made) = of(Palette::Nuq);
        let total = poor.gap.distortion + poor.gap.allocation;
        assert!((poor.gap.total - total).abs() < 1e-9 && poor.gap.distortion > 0.0);
        assert!((poor.gap.ideal + poor.gap.total - made.predicted_loss).abs() < 1e-9);
        assert!(poor.schemes[0].what.contains("tcq"), "{:?}", poor.schemes[0]);
        assert!(poor.prices.byte > 0.0 && poor.widths.is_empty());
        let (rich, _) = of(Palette::Tcq);
        assert!(rich.gap.total < poor.gap.total);
        assert!(rich.schemes.first().map_or(0.0, |g| g.share) < 0.2 * poor.schemes[0].share);
        assert!(rich.widths.iter().all(|g| g.share < 0.05), "{:?}", rich.widths);
    }
}
