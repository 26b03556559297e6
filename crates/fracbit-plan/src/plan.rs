//! Plans: which scheme every matrix gets under a budget.
//!
//! A plan is plain data: print it, edit it, keep it, apply it. Making one looks at shapes and
//! sensitivities only, never at weights. The objective is the linearity theorem's `sum_l a_l
//! err(Q_l)` (Q-Palette, equation 2) with the palette's errors on Gaussian weights; the solver is
//! `fracbit-alloc`'s.

use crate::{
    Error,
    bands::{self, BandsOf},
    forecast::Forecast,
    fusion,
    joint::{Joined, Joint, PlannedSpeed, PointSpeed, Prices, Speed},
    overrides::{self, Exclude, Pin},
    planned::planned,
    sensitivities::{Objective, Sensitivities},
    storage::{codebook_bytes, spread_group},
};
pub use crate::{
    inventory::{Inventory, Matrix},
    planned::{PlannedCache, PlannedLayer, PlannedMatrix},
    storage::{Storage, UNROTATED_GROUP, grouping},
};
use fracbit_alloc::{Budget as Limit, Choice, Layer, Problem, Solution};
use fracbit_base::{Bytes, Code, Palette, Rate, Scheme, Shape};
use fracbit_format::Grouping;
use fracbit_kernels::{Isa, Kernels};
use fracbit_model::{LinearId, RotationMode};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

/// Version of the plan document that is written; 1, where one number said for all matrices how
/// columns are grouped, and 2, where only embedding and head could be in bands, are read as well.
pub const PLAN_VERSION: u32 = 3;
/// What a plan must keep to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Stored bits per parameter of the whole model: codes, scales, codebooks, norms, embedding and
    /// head.
    Bits(f64),
    /// Bytes of all stored tensors.
    Size(Bytes),
    /// This scheme everywhere; no budget.
    Uniform(Scheme),
    /// Any size: for plans within a time.
    Any,
}

/// Choices that shape a plan beside its target.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// The budget.
    pub target: Target,
    /// Schemes to choose from.
    pub palette: Palette,
    /// Trellis code of the palette.
    pub code: Code,
    /// Rotation of the weights.
    pub rotation: RotationMode,
    /// Factors between inputs and weights (`fracbit::smoothing`).
    pub smoothing: bool,
    /// Whether rows whose errors cost most may have other schemes than the rest of their matrix,
    /// where sensitivities know them apart.
    pub bands: bool,
    /// Seed of rotations.
    pub seed: u64,
    /// Store the output head (and a tied embedding) in half precision.
    pub keep_head: bool,
    /// Schemes to choose from beside those of the palette.
    pub also: Vec<Scheme>,
    /// Layers that get a scheme of the user's choice.
    pub pins: Vec<Pin>,
    /// Schemes that layers must not get.
    pub excludes: Vec<Exclude>,
    /// Time to keep to, or to predict.
    pub speed: Option<Speed>,
}

impl PlanOptions {
    /// The defaults for a target: trellis palette, head quantized, folded rotation without
    /// smoothing. Which rotation suits a model `fracbit_pipeline::compress::weights` says; real
    /// ones hardly ever fold well.
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            target,
            palette: Palette::Tcq,
            code: Code::Fine,
            rotation: RotationMode::Fold,
            smoothing: false,
            bands: true,
            seed: 0,
            keep_head: false,
            also: Vec::new(),
            pins: Vec::new(),
            excludes: Vec::new(),
            speed: None,
        }
    }

    /// The bands in which matrices may be planned: not where one scheme is asked for, for all or
    /// for the one; and within a time only those of embedding and head, since each band of a small
    /// matrix costs as much time as a product.
    fn allowed_bands(&self, inventory: &Inventory, bands: &BandsOf) -> BandsOf {
        let named = |pattern: &overrides::Pattern, name: &str| pattern.matches_layer(name);
        let timed = self.speed.as_ref().is_some_and(|speed| speed.limit_us.is_some());
        let free = |matrix: &&Matrix| {
            let head = !matrix.id.is_layer();
            let pinned = self.pins.iter().any(|p| named(&p.layers, &matrix.name))
                || self.excludes.iter().any(|e| e.schemes.is_none() && named(&e.layers, &matrix.name));
            !(pinned || (timed && !head) || (self.keep_head && head))
        };
        if !self.bands || matches!(self.target, Target::Uniform(_)) {
            return BandsOf::new();
        }
        let free = inventory.matrices.iter().filter(free);
        free.filter_map(|m| Some((m.name.clone(), bands.get(&m.name)?.clone()))).collect()
    }

    /// The schemes to choose from. Within a time also those of the fast trellis code: they trade a
    /// little error for speed.
    #[must_use]
    pub fn schemes(&self) -> Vec<Scheme> {
        self.schemes_where(|_| true)
    }

    /// [`PlanOptions::schemes`], those of the fast code only where they are `known`: nobody asked
    /// for them by name.
    fn schemes_where(&self, known: impl Fn(Scheme) -> bool) -> Vec<Scheme> {
        if let Target::Uniform(scheme) = self.target {
            return vec![scheme];
        }
        let mut schemes = self.palette.schemes(self.code);
        if self.speed.as_ref().is_some_and(|s| s.limit_us.is_some()) && self.code == Code::Fine {
            let fast = self.palette.schemes(Code::Fast).into_iter().filter(|s| s.code().is_some());
            schemes.extend(fast.filter(|&s| known(s)));
        }
        let more: Vec<Scheme> =
            self.also.iter().copied().filter(|scheme| !schemes.contains(scheme)).collect();
        schemes.extend(more);
        schemes
    }
}

/// A complete allocation: the document `plan.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of this document.
    pub plan_version: u32,
    /// Hash of the checkpoint it was made for.
    pub source_hash: String,
    /// `fold`, `online` or `none`.
    pub rotation: RotationMode,
    /// Whether there are factors between inputs and weights (`fracbit::smoothing`): those of the
    /// calibration that it is used with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub smoothing: bool,
    /// Seed of rotations.
    pub seed: u64,
    /// Where the sensitivities come from.
    pub objective: String,
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Bytes of all stored tensors.
    pub bytes: u64,
    /// Bytes of norms, biases and codebooks within `bytes`.
    pub fixed_bytes: u64,
    /// Predicted rise of the loss, nats per token (KL divergence).
    pub predicted_loss: f64,
    /// No allocation of this palette within the budget is predicted to lose less than this.
    pub lower_bound: f64,
    /// The matrices.
    pub layers: Vec<PlannedLayer>,
    /// Loss saved per further unit of the budgets that bind.
    #[serde(default)]
    pub prices: Prices,
    /// How the losses were estimated.
    #[serde(default)]
    pub objective_kind: Objective,
    /// What will be measured, by a fit to whole models; absent without such measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// The predicted speed, when a machine profile was at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<PlannedSpeed>,
    /// Matrices that are held as one and multiplied in one call: names of two or more that read one
    /// input and have one scheme.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fused: Vec<Vec<String>>,
    /// The cache that it shares a budget of memory with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<PlannedCache>,
    /// Which band each row is in, of matrices whose bands have schemes of their own.
    #[serde(default, skip_serializing_if = "BandsOf::is_empty")]
    pub bands: BandsOf,
}

#[derive(Deserialize)]
struct Version {
    plan_version: u32,
}

/// A nested model at one precision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OperatingPoint {
    /// Most bits of a nested matrix that are read.
    pub precision: f64,
    /// Mean bits of a weight that are read, scales counted.
    pub bits: f64,
    /// Bytes of all matrices that are read.
    pub bytes: u64,
    /// The plan's loss at this precision.
    pub predicted_loss: f64,
}

impl Plan {
    /// The matrices, those in bands as one.
    pub fn matrices(&self) -> impl Iterator<Item = PlannedMatrix> {
        self.layers.chunk_by(|a, b| a.id().is_some() && a.id() == b.id()).filter_map(PlannedMatrix::of)
    }

    /// The distinct uniform schemes whose codebooks the packed model needs.
    #[must_use]
    pub fn codebooks(&self) -> BTreeSet<Scheme> {
        codebook_schemes(self.layers.iter().map(|l| l.scheme))
    }

    /// What a model of this plan is at each precision of its nested matrices, ascending; nothing
    /// where none is nested. Losses of a layer are taken to follow the error of its code.
    ///
    /// # Errors
    /// When the palette has no measured error for a scheme.
    pub fn operating_points(&self) -> Result<Vec<OperatingPoint>, Error> {
        let point = |rate: Rate| {
            let (mut bytes, mut weights, mut loss) = (0, 0, 0.0);
            for layer in &self.layers {
                let left = layer.scheme.at(rate);
                let shape = Shape::new(layer.rows, layer.cols);
                bytes += left.bytes(shape, layer.grouping()).0;
                weights += shape.len() as u64;
                let (all, some) = (layer.scheme.error()?, left.error()?);
                loss += layer.predicted_loss * if all > 0.0 { some / all } else { 1.0 };
            }
            let bits = bits_per_weight(bytes, weights);
            Ok(OperatingPoint { precision: rate.bits(), bits, bytes, predicted_loss: loss })
        };
        self.precisions().into_iter().map(point).collect()
    }

    /// The rates at which nested matrices can be read, ascending.
    fn precisions(&self) -> BTreeSet<Rate> {
        let nested = self.layers.iter().filter_map(|layer| match layer.scheme {
            Storage::Packed(scheme) if scheme.nested() => Some(scheme),
            _ => None,
        });
        nested.flat_map(Scheme::precisions).collect()
    }

    /// Sets the speed, with the steps of every precision; those for which the profile has no
    /// kernels are left out.
    fn set_speed(&mut self, inventory: &Inventory, planned: PlannedSpeed, speed: &Speed) {
        let step = |rate: Rate| {
            let menu =
                |layer: &PlannedLayer| vec![PlannedLayer { scheme: layer.scheme.at(rate), ..layer.clone() }];
            let menus: Vec<Vec<PlannedLayer>> = self.layers.iter().map(menu).collect();
            let joint = Joint::new(inventory, &menus, speed).ok()?;
            let PlannedSpeed { step_us, .. } = joint.planned(joint.kernels_us(&self.fused).ok()?);
            Some(PointSpeed { precision: rate.bits(), step_us })
        };
        let points = self.precisions().into_iter().filter_map(step).collect();
        self.speed = Some(PlannedSpeed { points, ..planned });
    }

    /// Reads `plan.json` text; `origin` names it in messages.
    ///
    /// # Errors
    /// When the text is not a plan of this version.
    pub fn parse(text: &str, origin: &str) -> Result<Self, Error> {
        let bad = |rule: String| Error::Plan { origin: origin.to_owned(), rule };
        // The version first: fields come and go with it.
        let Version { plan_version: got } = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        if !(1..=PLAN_VERSION).contains(&got) {
            return Err(bad(format!("plan_version should be 1 to {PLAN_VERSION}, got {got}")));
        }
        let mut document: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let layers = document.get("layers").and_then(Value::as_array).cloned().unwrap_or_default();
        let names = layers.iter().filter_map(|layer| layer.get("name")?.as_str());
        bands::spread(&mut document, names);
        spread_group(&mut document, "layers", got > 1).map_err(bad)?;
        let mut plan: Self = serde_json::from_value(document).map_err(|e| bad(e.to_string()))?;
        plan.plan_version = PLAN_VERSION;
        if let Some((layer, rule)) = plan.layers.iter().find_map(|l| Some((l, l.module().broken()?))) {
            return Err(bad(format!("layer `{}`: {rule}", layer.name)));
        }
        Ok(plan)
    }

    /// Checks that the plan names every matrix of the model once, with its shape, and recomputes
    /// its totals (they may be stale after editing by hand).
    ///
    /// # Errors
    /// Naming the first layer that is missing, unknown, doubled or of another shape.
    pub fn fit_to(&mut self, inventory: &Inventory) -> Result<(), Error> {
        let bad = |rule: String| Error::Plan { origin: "plan".to_owned(), rule };
        if self.source_hash != inventory.source_hash {
            let (want, got) = (&inventory.source_hash, &self.source_hash);
            return Err(bad(format!("it was made for a checkpoint with hash {got}, this one has {want}")));
        }
        let inventory = &*inventory.with_bands(&self.bands)?;
        // Unknown names first: a misspelt layer is missing, too, and that would name another one.
        if let Some(extra) = self.layers.iter().find(|l| inventory.matrices.iter().all(|m| m.name != l.name))
        {
            return Err(bad(format!("layer `{}` is not in the model", extra.name)));
        }
        let mut layers = Vec::with_capacity(inventory.matrices.len());
        for matrix in &inventory.matrices {
            let found: Vec<&PlannedLayer> = self.layers.iter().filter(|l| l.name == matrix.name).collect();
            let [layer] = found[..] else {
                let got = found.len();
                return Err(bad(format!(
                    "layer `{}` should appear once, it appears {got} times",
                    matrix.name
                )));
            };
            if (layer.rows, layer.cols) != (matrix.shape.rows, matrix.shape.cols) {
                let got = Shape::new(layer.rows, layer.cols);
                return Err(bad(format!("layer `{}` should be {}, got {got}", matrix.name, matrix.shape)));
            }
            if layer.band().is_some() && layer.scheme == Storage::F16 {
                return Err(bad(format!(
                    "layer `{}` should be quantized: a band of rows cannot be f16",
                    layer.name
                )));
            }
            layers.push(planned(matrix, layer.scheme, layer.grouping(), layer.sensitivity)?);
        }
        let stored = |id: LinearId| {
            // Whole ones: bands have names of their own.
            let at = inventory.matrices.iter().position(|m| m.name == id.to_string())?;
            Some((layers[at].scheme, layers[at].grouping(), inventory.matrices[at].shape))
        };
        let fused = fusion::check(&self.fused, stored).map_err(bad)?;
        let fused = fused.iter().map(|ids| ids.iter().map(ToString::to_string).collect()).collect();
        if self.layers != layers || self.fused != fused {
            // Edited by hand: what was predicted and proven was another plan.
            (self.speed, self.forecast, self.lower_bound, self.prices) = (None, None, 0.0, Prices::default());
        }
        self.fused = fused;
        self.layers = layers;
        self.total(inventory);
        Ok(())
    }

    /// Refuses a scheme that this machine has only the slow reference for, where others have
    /// kernels.
    ///
    /// # Errors
    /// Naming the layer.
    pub fn require_kernels(&self, kernels: &Kernels) -> Result<(), Error> {
        let isa = |scheme: Scheme| {
            let microkernels =
                scheme.tables().map(|s| fracbit_quant::codebook(s).map(|book| kernels.isa(book)));
            microkernels.flatten().min()
        };
        let best = Scheme::all().filter_map(isa).max();
        for layer in &self.layers {
            if let Storage::Packed(scheme) = layer.scheme
                && (isa(scheme).is_none() || (isa(scheme) == Some(Isa::Scalar) && best != Some(Isa::Scalar)))
            {
                let rule = format!("layer `{}`: {scheme} has no kernel on this machine", layer.name);
                return Err(Error::Plan { origin: "plan".to_owned(), rule });
            }
        }
        Ok(())
    }

    fn total(&mut self, inventory: &Inventory) {
        self.fixed_bytes = inventory.fixed_bytes() + codebook_bytes(self.codebooks());
        self.bytes = self.fixed_bytes + self.layers.iter().map(|l| l.bytes).sum::<u64>();
        self.bits_per_weight = bits_per_weight(self.bytes, inventory.params());
        self.predicted_loss = self.layers.iter().map(|l| l.predicted_loss).sum();
    }
}

/// Makes the plan of least predicted loss within the target.
///
/// # Errors
/// When the target is out of reach (the message holds the reachable range) or sensitivities are
/// missing.
pub fn plan(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
) -> Result<Plan, Error> {
    let mut plan = allocate(inventory, sensitivities, options)?;
    plan.forecast = sensitivities.forecast(plan.predicted_loss);
    Ok(plan)
}

fn allocate(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
) -> Result<Plan, Error> {
    let bands = options.allowed_bands(inventory, &sensitivities.bands);
    let inventory = &*inventory.with_bands(&bands)?;
    let menus = menus(inventory, sensitivities, options)?;
    let mut plan = Plan {
        plan_version: PLAN_VERSION,
        source_hash: inventory.source_hash.clone(),
        rotation: options.rotation,
        smoothing: options.smoothing && options.rotation != RotationMode::None,
        seed: options.seed,
        objective: sensitivities.protocol.clone(),
        bits_per_weight: 0.0,
        bytes: 0,
        fixed_bytes: 0,
        predicted_loss: 0.0,
        lower_bound: 0.0,
        layers: Vec::new(),
        prices: Prices::default(),
        objective_kind: sensitivities.objective(),
        forecast: None,
        speed: None,
        cache: None,
        fused: Vec::new(),
        bands: inventory.bands.clone(),
    };
    let budget = match options.target {
        Target::Any | Target::Uniform(_) => None,
        // No matrix is stored in more; norms are, and would be out of reach by themselves.
        Target::Bits(bits) if bits >= 16.0 => None,
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a size in bytes"
        )]
        Target::Bits(bits) => Some((bits * inventory.params() as f64 / 8.0).floor().max(0.0) as u64),
        Target::Size(bytes) => Some(bytes.0),
    };
    if let Some(speed) = options.speed.as_ref().filter(|s| s.limit_us.is_some()) {
        let joint = Joint::new(inventory, &menus, speed)?;
        let by_size = || {
            let mut options = options.clone();
            options.speed = None;
            allocate(inventory, sensitivities, &options)
        };
        return plan.within_time(inventory, &menus, &joint, budget, by_size);
    }
    let reach = Reach::new(inventory, &menus);
    if budget.is_none_or(|budget| budget > reach.max) {
        // Nothing binds: every matrix gets the best that its menu holds.
        let best = |menu: &Vec<PlannedLayer>| {
            let by_loss =
                |a: &&PlannedLayer, b: &&PlannedLayer| a.predicted_loss.total_cmp(&b.predicted_loss);
            menu.iter().min_by(|a, b| by_loss(a, b).then(a.bytes.cmp(&b.bytes))).cloned()
        };
        plan.layers = menus.iter().filter_map(best).collect();
        plan.total(inventory);
        plan.lower_bound = plan.predicted_loss;
        // Codebooks of the best schemes may take more than those of the largest.
        if budget.is_none_or(|budget| plan.bytes <= budget) {
            return plan.timed(inventory, options);
        }
    }
    let budget = budget.unwrap_or(u64::MAX);
    if budget < reach.min {
        return Err(reach.refuse(inventory, budget));
    }
    // Codebooks are shared by all layers that use them, so their bytes are known only after
    // solving: reserve those of the last solution and solve again, until the reserve is what the
    // solution needs. This may alternate between two sets, so the best plan within the budget
    // counts, and a last solve confined to its codebooks spends what is left.
    let most = budget.saturating_sub(inventory.fixed_bytes());
    let all_books = codebook_bytes(codebook_schemes(menus.iter().flatten().map(|l| l.scheme)));
    // No plan loses less than one that pays for no codebook: the first solution's bound is that of
    // all.
    let (mut best, mut bound): (Option<Plan>, Option<f64>) = (None, None);
    let mut consider =
        |best: &mut Option<Plan>, menus: &[Vec<PlannedLayer>], reserve: u64| -> Result<Option<u64>, Error> {
            let Some(solution) = solve(menus, most.saturating_sub(reserve))? else { return Ok(None) };
            let mut plan = plan.clone();
            plan.layers = menus.iter().zip(&solution.choice).map(|(menu, &i)| menu[i].clone()).collect();
            plan.total(inventory);
            plan.lower_bound = bound.get_or_insert(solution.lower_bound).min(plan.predicted_loss);
            plan.prices.byte = solution.price[0];
            let needed = codebook_bytes(plan.codebooks());
            if plan.bytes <= budget && best.as_ref().is_none_or(|b| plan.predicted_loss < b.predicted_loss) {
                *best = Some(plan);
            }
            Ok(Some(needed))
        };
    let mut reserve = 0;
    for _ in 0..ROUNDS {
        match consider(&mut best, &menus, reserve)? {
            Some(needed) if needed != reserve => reserve = needed,
            _ => break,
        }
    }
    consider(&mut best, &menus, all_books)?;
    if let Some(books) = best.as_ref().map(Plan::codebooks) {
        consider(&mut best, &confined(&menus, &books), codebook_bytes(books.iter().copied()))?;
    }
    best.unwrap_or_else(|| {
        plan.layers = reach.smallest;
        plan.total(inventory);
        plan.lower_bound = 0.0;
        plan
    })
    .timed(inventory, options)
}

/// What is left of menus where there are no other codebooks.
fn confined(menus: &[Vec<PlannedLayer>], books: &BTreeSet<Scheme>) -> Vec<Vec<PlannedLayer>> {
    let within = |l: &&PlannedLayer| codebook_schemes(std::iter::once(l.scheme)).is_subset(books);
    menus.iter().map(|menu| menu.iter().filter(within).cloned().collect()).collect()
}

/// What every matrix may be.
pub(crate) fn menus(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
) -> Result<Vec<Vec<PlannedLayer>>, Error> {
    let schemes = options.schemes_where(|scheme| sensitivities.covers(scheme));
    let palette: Vec<Storage> = schemes.into_iter().map(Storage::Packed).collect();
    let names: Vec<String> = inventory.matrices.iter().map(|m| m.id.to_string()).collect();
    overrides::require_matches(names.iter().map(String::as_str), &options.pins, &options.excludes)?;
    let menu = |matrix: &Matrix| {
        let kept = options.keep_head && inventory.is_head(matrix.id);
        let palette: &[Storage] = if kept { &[Storage::F16] } else { &palette };
        let menu = overrides::allowed(&matrix.id.to_string(), palette, &options.pins, &options.excludes)?;
        menu.into_iter()
            .map(|storage| {
                // The coefficient under which the scheme's error gives the loss; they differ where
                // losses were measured.
                let (loss, error) = (sensitivities.loss(&matrix.name, storage)?, storage.error()?);
                let a = if error > 0.0 { loss / error } else { sensitivities.of(&matrix.name)? };
                let grouping = match storage {
                    Storage::Packed(scheme) => grouping(options.rotation, scheme),
                    Storage::F16 => Grouping::Row,
                };
                planned(matrix, storage, grouping, a)
            })
            .collect()
    };
    inventory.matrices.iter().map(menu).collect()
}

impl Plan {
    /// The plan of least loss within the time of `joint`, and `budget` bytes where there is one;
    /// `by_size` makes the plan of that size that need not keep to a time.
    fn within_time(
        mut self,
        inventory: &Inventory,
        menus: &[Vec<PlannedLayer>],
        joint: &Joint<'_>,
        budget: Option<u64>,
        by_size: impl Fn() -> Result<Self, Error>,
    ) -> Result<Self, Error> {
        let Some(budget) = budget else {
            let joined = joint.solve(None, None)?;
            let bound = joined.lower_bound;
            self.take(inventory, menus, joint, joined, bound);
            return Ok(self);
        };
        let reach = Reach::new(inventory, menus);
        if budget < reach.min {
            return Err(reach.refuse(inventory, budget));
        }
        // Which codebooks a plan needs is known only after solving. So all are paid first; then the
        // schemes that were chosen share what the codebooks of the others leave. No plan loses less
        // than one that pays for no codebook.
        let most = budget.saturating_sub(inventory.fixed_bytes());
        let room =
            |books: &BTreeSet<Scheme>| Some(most.saturating_sub(codebook_bytes(books.iter().copied())));
        let size = Some(Bytes(budget));
        let all = codebook_schemes(menus.iter().flatten().map(|l| l.scheme));
        match joint.solve(room(&all), size) {
            Ok(joined) => self.take(inventory, menus, joint, joined, joint.bound(Some(most), None)?),
            Err(refused @ Error::Latency { .. }) => {
                // Near the smallest size there is no room for all codebooks, but for those of a
                // plan by size alone.
                let sets = by_size().into_iter().map(|plan| plan.codebooks());
                let least = codebook_schemes(reach.smallest.iter().map(|l| l.scheme));
                let mut found = false;
                for books in sets.chain([least]) {
                    let confined = confined(menus, &books);
                    let few = Joint::new(inventory, &confined, joint.speed())?;
                    match few.solve(room(&books), size) {
                        Ok(joined) => {
                            self.take(inventory, &confined, &few, joined, joint.bound(Some(most), None)?);
                            found = true;
                            break;
                        }
                        Err(Error::Latency { .. }) => {}
                        Err(e) => return Err(e),
                    }
                }
                if !found {
                    return Err(refused);
                }
            }
            Err(e) => return Err(e),
        }
        let (chosen, bound) = (self.codebooks(), self.lower_bound);
        let confined = confined(menus, &chosen);
        let again = Joint::new(inventory, &confined, joint.speed())?;
        let joined = again.solve(room(&chosen), size)?;
        if joined.loss(&confined) < self.predicted_loss {
            self.take(inventory, &confined, &again, joined, bound);
        }
        Ok(self)
    }

    fn take(
        &mut self,
        inventory: &Inventory,
        menus: &[Vec<PlannedLayer>],
        joint: &Joint<'_>,
        joined: Joined,
        bound: f64,
    ) {
        let Joined { picks, fused, prices, kernels_us, .. } = joined;
        self.layers = menus.iter().zip(&picks).map(|(menu, &pick)| menu[pick].clone()).collect();
        self.total(inventory);
        self.lower_bound = bound.min(self.predicted_loss);
        self.prices = prices;
        self.fused = fused;
        self.set_speed(inventory, joint.planned(kernels_us), joint.speed());
    }

    /// Predicts the speed, where there is a profile, and fuses what is faster fused.
    fn timed(mut self, inventory: &Inventory, options: &PlanOptions) -> Result<Self, Error> {
        let Some(speed) = &options.speed else { return Ok(self) };
        let menus: Vec<Vec<PlannedLayer>> = self.layers.iter().map(|l| vec![l.clone()]).collect();
        let joint = Joint::new(inventory, &menus, speed)?;
        let Joined { fused, kernels_us, .. } = joint.fastest()?;
        let planned = joint.planned(kernels_us);
        self.fused = fused;
        self.set_speed(inventory, planned, speed);
        Ok(self)
    }

    /// Predicts the speed of a plan as it is: with the groups that it has and no others.
    ///
    /// # Errors
    /// When the profile lacks a kernel of the plan; the message names layer and scheme.
    pub fn predict(&mut self, inventory: &Inventory, speed: &Speed) -> Result<(), Error> {
        let menus: Vec<Vec<PlannedLayer>> = self.layers.iter().map(|l| vec![l.clone()]).collect();
        let inventory = inventory.with_bands(&self.bands)?;
        let joint = Joint::new(&inventory, &menus, speed)?;
        let planned = joint.planned(joint.kernels_us(&self.fused)?);
        self.set_speed(&inventory, planned, speed);
        Ok(())
    }
}

/// Solutions tried for a steady set of codebooks.
const ROUNDS: usize = 8;

/// What a palette reaches on a model.
struct Reach {
    /// Bytes with the smallest choice everywhere.
    min: u64,
    /// Bytes with the largest choice everywhere: a larger budget buys nothing.
    max: u64,
    smallest: Vec<PlannedLayer>,
}

impl Reach {
    fn new(inventory: &Inventory, menus: &[Vec<PlannedLayer>]) -> Self {
        let pick = |least: bool| -> Vec<PlannedLayer> {
            let best = |menu: &Vec<PlannedLayer>| {
                let found = if least {
                    menu.iter().min_by_key(|l| l.bytes)
                } else {
                    menu.iter().max_by_key(|l| l.bytes)
                };
                found.expect("a menu is never empty").clone()
            };
            menus.iter().map(best).collect()
        };
        let total = |chosen: &[PlannedLayer]| {
            let books = codebook_bytes(codebook_schemes(chosen.iter().map(|l| l.scheme)));
            chosen.iter().map(|l| l.bytes).sum::<u64>() + books + inventory.fixed_bytes()
        };
        let smallest = pick(true);
        // Mixed plans need several codebooks, so the smallest budget always in reach is that of one
        // scheme everywhere.
        Self { min: total(&smallest), max: total(&pick(false)), smallest }
    }

    fn refuse(&self, inventory: &Inventory, budget: u64) -> Error {
        let bits = |bytes| bits_per_weight(bytes, inventory.params());
        Error::Budget {
            asked: Bytes(budget),
            asked_bits: bits(budget),
            min: Bytes(self.min),
            min_bits: bits(self.min),
            max: Bytes(self.max),
            max_bits: bits(self.max),
            binds: self
                .smallest
                .iter()
                .max_by_key(|l| l.bytes)
                .map_or_else(String::new, |l| format!("`{}`, {} as {}", l.name, Bytes(l.bytes), l.scheme)),
        }
    }
}

/// What a solver sees of menus: bytes and losses.
pub(crate) fn choices(menus: &[Vec<PlannedLayer>]) -> Vec<Layer> {
    let choice = |l: &PlannedLayer| Choice::new(l.bytes, l.predicted_loss);
    let layer = |menu: &Vec<PlannedLayer>| Layer {
        name: menu[0].name.clone(),
        choices: menu.iter().map(choice).collect(),
    };
    menus.iter().map(layer).collect()
}

/// Solves to proven optimality in milliseconds (HiGHS, which takes seconds, is the solver of joint
/// budgets and the oracle of this one). `None` when nothing fits.
fn solve(menus: &[Vec<PlannedLayer>], room: u64) -> Result<Option<Solution>, Error> {
    let problem = Problem::new(choices(menus), vec![Limit::new("bytes", room)])?;
    if room < problem.range(0).min {
        return Ok(None);
    }
    Ok(Some(fracbit_alloc::solve(&problem)?))
}

fn codebook_schemes(storages: impl Iterator<Item = Storage>) -> BTreeSet<Scheme> {
    storages
        .filter_map(|s| match s {
            Storage::Packed(scheme) => Some(scheme.tables()),
            Storage::F16 => None,
        })
        .flatten()
        .collect()
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn bits_per_weight(bytes: u64, params: u64) -> f64 {
    bytes as f64 * 8.0 / params as f64
}
