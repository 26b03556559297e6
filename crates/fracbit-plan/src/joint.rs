//! Plans within a time: which scheme every matrix gets and which matrices share a kernel call.
//!
//! The problem is Q-Palette's equation 4 (section 4.2): one binary variable per group of fusible
//! matrices and scheme, every matrix in exactly one active group, total time and total bytes within
//! their budgets. Times are those of a [`MachineProfile`]. With one budget the own solver of
//! `fracbit-alloc` is exact in milliseconds; where time and bytes both bind, HiGHS takes over and
//! proves its gap, with the own solver's allocation as the fall-back.

use crate::{
    Error, fusion,
    inventory::Inventory,
    machine::{MachineProfile, Overhead, Product},
    planned::PlannedLayer,
    storage::Storage,
};
use fracbit_alloc::{AllocError, Budget, Choice, Effort, FusionProblem, FusionSolution, Group};
use fracbit_base::Bytes;
use fracbit_model::LinearId;
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Duration};

/// What a plan should know and keep to about time.
#[derive(Clone, Debug)]
pub struct Speed {
    /// The machine.
    pub profile: Arc<MachineProfile>,
    /// Most microseconds of a decode step; `None`: predict, and fuse what is faster fused.
    pub limit_us: Option<f64>,
    /// Tokens in the cache.
    pub context: usize,
    /// Tokens of a step.
    pub batch: usize,
    /// Let matrices share kernel calls.
    pub fuse: bool,
    /// Time that HiGHS may take.
    pub patience: Duration,
}

impl Speed {
    /// Single tokens after 128 others, fused where that is faster, 20 seconds for the solver.
    #[must_use]
    pub fn new(profile: Arc<MachineProfile>) -> Self {
        Self {
            profile,
            limit_us: None,
            context: 128,
            batch: 1,
            fuse: true,
            patience: Duration::from_secs(20),
        }
    }
}

/// The speed that a plan is predicted to have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedSpeed {
    /// Microseconds of a decode step.
    pub step_us: f64,
    /// Of which kernels.
    pub kernels_us: f64,
    /// Tokens per second of all sequences of a step together.
    pub tokens_per_second: f64,
    /// Root mean square error of such predictions when the profile was fitted, as a share.
    pub error: f64,
    /// The limit, where there was one.
    pub limit_us: Option<f64>,
    /// Tokens in the cache.
    pub context: usize,
    /// Tokens of a step.
    pub batch: usize,
    /// Processor, instruction set and threads of the profile.
    pub machine: String,
    /// The steps of a nested model at each of its precisions, ascending, where the profile has the
    /// kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<PointSpeed>,
}

/// The speed of a nested model at one precision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PointSpeed {
    /// Most bits of a nested matrix that are read.
    pub precision: f64,
    /// Microseconds of a decode step.
    pub step_us: f64,
}

/// Loss saved per further unit of each budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// Per byte.
    pub byte: f64,
    /// Per microsecond of a decode step.
    pub microsecond: f64,
}

/// Matrices, what they may be, and what that costs.
pub(crate) struct Joint<'a> {
    inventory: &'a Inventory,
    menus: &'a [Vec<PlannedLayer>],
    speed: &'a Speed,
    overhead: &'a Overhead,
    groups: Vec<Entry>,
}

/// A group and its choices.
struct Entry {
    members: Vec<usize>,
    options: Vec<Way>,
}

/// A way to store a group: index in each member's menu, and nanoseconds.
struct Way {
    picks: Vec<usize>,
    ns: u64,
}

/// A solved plan: index in each menu, and the groups of more than one.
pub(crate) struct Joined {
    pub(crate) picks: Vec<usize>,
    pub(crate) fused: Vec<Vec<String>>,
    pub(crate) lower_bound: f64,
    pub(crate) prices: Prices,
    pub(crate) kernels_us: f64,
}

impl Joined {
    /// Predicted loss of what was picked.
    pub(crate) fn loss(&self, menus: &[Vec<PlannedLayer>]) -> f64 {
        menus.iter().zip(&self.picks).map(|(menu, &pick)| menu[pick].predicted_loss).sum()
    }
}

/// What is to be least.
#[derive(Clone, Copy, PartialEq)]
enum Goal {
    Loss,
    Time,
    Bytes,
}

impl<'a> Joint<'a> {
    pub(crate) fn new(
        inventory: &'a Inventory,
        menus: &'a [Vec<PlannedLayer>],
        speed: &'a Speed,
    ) -> Result<Self, Error> {
        let overhead = speed.profile.overhead(speed.batch)?;
        let mut joint = Self { inventory, menus, speed, overhead, groups: Vec::new() };
        for (m, menu) in menus.iter().enumerate() {
            let options: Vec<Way> = (0..menu.len())
                .filter_map(|pick| Some(Way { picks: vec![pick], ns: joint.ns(&[m], menu[pick].scheme)? }))
                .collect();
            if options.is_empty() {
                let schemes: Vec<String> = menu.iter().map(|l| l.scheme.to_string()).collect();
                let rule = format!(
                    "layer `{}`: {} has no measured kernel on this machine",
                    inventory.matrices[m].name,
                    schemes.join(", ")
                );
                return Err(Error::Profile { origin: speed.profile.subject.clone(), rule });
            }
            joint.groups.push(Entry { members: vec![m], options });
        }
        let candidates = if speed.fuse { fusion::candidates(&inventory.matrices) } else { Vec::new() };
        for members in candidates {
            let common = |(pick, layer): (usize, &PlannedLayer)| {
                let mut picks = vec![pick];
                for &m in &members[1..] {
                    picks.push(menus[m].iter().position(|l| l.scheme == layer.scheme)?);
                }
                let ns = joint.ns(&members, layer.scheme)?;
                (layer.scheme != Storage::F16).then_some(Way { picks, ns })
            };
            let options: Vec<Way> = menus[members[0]].iter().enumerate().filter_map(common).collect();
            if !options.is_empty() {
                joint.groups.push(Entry { members, options });
            }
        }
        Ok(joint)
    }

    /// Nanoseconds of a product in a model; `None` when it was not measured.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "nanoseconds of a product"
    )]
    fn ns(&self, members: &[usize], storage: Storage) -> Option<u64> {
        let first = &self.inventory.matrices[members[0]];
        if first.id == LinearId::Embed && !self.inventory.tied {
            return Some(0); // one row of it is read
        }
        let product = Product::of(members.iter().map(|&m| &self.inventory.matrices[m]))?;
        let kernel = |product| self.speed.profile.kernel_us(storage, product, self.speed.batch);
        let us = match self.inventory.bands.get(&first.id.to_string()) {
            // A band takes its share of the rows of the whole: these products stream their weights.
            Some(bands) => {
                let whole = Product { rows: bands.each().len(), ..product };
                kernel(whole)? * product.rows as f64 / whole.rows as f64
            }
            None => kernel(product)?,
        };
        Some((1000.0 * us * self.overhead.factor).ceil() as u64)
    }

    pub(crate) fn speed(&self) -> &'a Speed {
        self.speed
    }

    fn rest_us(&self) -> f64 {
        self.overhead.rest_us(self.speed.profile.shape.num_hidden_layers, self.speed.context)
    }

    /// Nanoseconds that the kernels may take.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "nanoseconds of a step")]
    fn room_ns(&self) -> Option<u64> {
        self.speed.limit_us.map(|limit| (1000.0 * (limit - self.rest_us())).max(0.0) as u64)
    }

    fn bytes(&self, entry: &Entry, way: &Way) -> u64 {
        entry.members.iter().zip(&way.picks).map(|(&m, &pick)| self.menus[m][pick].bytes).sum()
    }

    /// `between` two schemes: as large and as slow as their mean, with the loss between theirs.
    fn problem(
        &self,
        goal: Goal,
        bytes: Option<u64>,
        ns: Option<u64>,
        between: Option<(Storage, Storage)>,
    ) -> Result<FusionProblem, Error> {
        let mut budgets = Vec::new();
        budgets.extend(ns.map(|limit| Budget::new("nanoseconds", limit)));
        budgets.extend(bytes.map(|limit| Budget::new("bytes", limit)));
        if budgets.is_empty() {
            budgets.push(Budget::new("nothing", 0));
        }
        #[expect(clippy::cast_precision_loss, reason = "sums far below 2^53")]
        let choice = |entry: &Entry, way: &Way| {
            let own = self.bytes(entry, way);
            let members = entry.members.iter().zip(&way.picks);
            let loss = match goal {
                Goal::Loss => members.map(|(&m, &pick)| self.menus[m][pick].predicted_loss).sum(),
                Goal::Time => way.ns as f64,
                Goal::Bytes => own as f64,
            };
            let mut cost = Vec::new();
            cost.extend(ns.map(|_| way.ns));
            cost.extend(bytes.map(|_| own));
            if cost.is_empty() {
                cost.push(0);
            }
            Choice { cost, loss }
        };
        let middle = |entry: &Entry, (low, high): (Storage, Storage)| {
            let of = |storage| {
                entry.options.iter().find(|w| self.menus[entry.members[0]][w.picks[0]].scheme == storage)
            };
            let (low, high) = (of(low)?, of(high)?);
            let cost = choice(entry, low).cost.into_iter().zip(choice(entry, high).cost);
            let of = |way: &Way, at: usize| &self.menus[entry.members[at]][way.picks[at]];
            let losses = (0..entry.members.len()).map(|at| loss_between(of(low, at), of(high, at)));
            Some(Choice { cost: cost.map(|(a, b)| u64::midpoint(a, b)).collect(), loss: losses.sum() })
        };
        let groups = self.groups.iter().map(|entry| Group {
            members: entry.members.clone(),
            choices: entry
                .options
                .iter()
                .map(|way| choice(entry, way))
                .chain(between.and_then(|pair| middle(entry, pair)))
                .collect(),
        });
        let names = self.inventory.matrices.iter().map(|m| m.name.clone()).collect();
        Ok(FusionProblem::new(names, groups.collect(), budgets)?)
    }

    /// The least loss within `bytes` of matrices, those of a budget of `size`, and the time.
    ///
    /// # Errors
    /// [`Error::Latency`] with what can be reached.
    pub(crate) fn solve(&self, bytes: Option<u64>, size: Option<Bytes>) -> Result<Joined, Error> {
        let problem = self.problem(Goal::Loss, bytes, self.room_ns(), None)?;
        let solution = match self.solved(&problem) {
            Err(Error::Alloc(AllocError::Unreachable { .. } | AllocError::NotTogether { .. })) => {
                return Err(self.refuse(bytes, size)?);
            }
            other => other?,
        };
        let prices = self.prices(&problem, bytes.is_some());
        Ok(self.joined(&solution, solution.lower_bound, prices))
    }

    /// Loss of the relaxed problem within the time and `bytes`, with one more choice where there is
    /// a scheme `between` two.
    pub(crate) fn bound(
        &self,
        bytes: Option<u64>,
        between: Option<(Storage, Storage)>,
    ) -> Result<f64, Error> {
        let rotations = self.problem(Goal::Loss, bytes, self.room_ns(), between)?.expand()?;
        Ok(fracbit_alloc::relax(&rotations.problem)?.bound)
    }

    /// The fastest way to run one storage per matrix: which of them to fuse.
    pub(crate) fn fastest(&self) -> Result<Joined, Error> {
        let solution = self.solved(&self.problem(Goal::Time, None, None, None)?)?;
        Ok(self.joined(&solution, 0.0, Prices::default()))
    }

    /// Microseconds of the kernels with these groups, one storage per matrix.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a step")]
    pub(crate) fn kernels_us(&self, fused: &[Vec<String>]) -> Result<f64, Error> {
        let at = |name: &String| self.inventory.matrices.iter().position(|m| m.name == *name);
        let groups: Vec<Vec<usize>> = fused.iter().map(|g| g.iter().filter_map(at).collect()).collect();
        let mut ns = 0;
        for entry in &self.groups {
            let inside = groups.iter().any(|g| g.contains(&entry.members[0]));
            if (entry.members.len() == 1 && !inside) || groups.contains(&entry.members) {
                ns += entry.options[0].ns;
            }
        }
        let found = self.groups.iter().filter(|e| e.members.len() > 1 && groups.contains(&e.members)).count();
        if found != groups.len() {
            let rule = "a fused group of the plan has no measured kernel on this machine".to_owned();
            return Err(Error::Profile { origin: self.speed.profile.subject.clone(), rule });
        }
        Ok(ns as f64 / 1000.0)
    }

    fn solved(&self, problem: &FusionProblem) -> Result<FusionSolution, Error> {
        match problem.solve(Effort::default()) {
            Ok(found) if found.gap() <= 1e-9 => Ok(found),
            Err(e @ AllocError::Unreachable { .. }) => Err(e.into()),
            #[cfg(feature = "highs")]
            _ => {
                let limits = fracbit_alloc::Limits { time: self.speed.patience, ..Default::default() };
                Ok(fracbit_alloc::solve_fusion_highs(problem, limits)?)
            }
            // A heuristic's answer with its proven gap.
            #[cfg(not(feature = "highs"))]
            other => Ok(other?),
        }
    }

    /// What one more byte and microsecond would save, by the linear relaxation.
    fn prices(&self, problem: &FusionProblem, bytes: bool) -> Prices {
        let relaxed = problem.expand().and_then(|rotations| fracbit_alloc::relax(&rotations.problem));
        let price = relaxed.map(|r| r.price).unwrap_or_default();
        let (mut prices, mut price) = (Prices::default(), price.into_iter());
        if self.speed.limit_us.is_some() {
            prices.microsecond = 1000.0 * price.next().unwrap_or(0.0);
        }
        if bytes {
            prices.byte = price.next().unwrap_or(0.0);
        }
        prices
    }

    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a step")]
    fn joined(&self, solution: &FusionSolution, lower_bound: f64, prices: Prices) -> Joined {
        let mut joined = Joined {
            picks: vec![0; self.menus.len()],
            fused: Vec::new(),
            lower_bound,
            prices,
            kernels_us: 0.0,
        };
        for &(g, choice) in &solution.active {
            let entry = &self.groups[g];
            let way = &entry.options[choice];
            joined.kernels_us += way.ns as f64 / 1000.0;
            entry.members.iter().zip(&way.picks).for_each(|(&m, &pick)| joined.picks[m] = pick);
            if entry.members.len() > 1 {
                let names = entry.members.iter().map(|&m| self.inventory.matrices[m].name.clone());
                joined.fused.push(names.collect());
            }
        }
        joined.fused.sort();
        joined
    }

    /// The prediction for kernels of `kernels_us` in all.
    #[expect(clippy::cast_precision_loss, reason = "a batch")]
    pub(crate) fn planned(&self, kernels_us: f64) -> PlannedSpeed {
        let step_us = kernels_us + self.rest_us();
        let profile = &self.speed.profile;
        PlannedSpeed {
            step_us,
            kernels_us,
            tokens_per_second: self.speed.batch as f64 * 1e6 / step_us,
            error: self.overhead.residual,
            limit_us: self.speed.limit_us,
            context: self.speed.context,
            batch: self.speed.batch,
            machine: format!("{}, {}, {} threads", profile.cpu, profile.isa, profile.threads),
            points: Vec::new(),
        }
    }

    /// Why nothing fits: the least time within the bytes, the least bytes within the time, and the
    /// matrix that takes most.
    fn refuse(&self, bytes: Option<u64>, size: Option<Bytes>) -> Result<Error, Error> {
        let limit_us = self.speed.limit_us.unwrap_or(f64::INFINITY);
        let fastest = |bytes| -> Result<Option<Joined>, Error> {
            match self.solved(&self.problem(Goal::Time, bytes, None, None)?) {
                Ok(found) => Ok(Some(self.joined(&found, 0.0, Prices::default()))),
                Err(Error::Alloc(AllocError::Unreachable { .. } | AllocError::NotTogether { .. })) => {
                    Ok(None)
                }
                Err(e) => Err(e),
            }
        };
        let best = match fastest(bytes)? {
            Some(found) => found,
            None => fastest(None)?.ok_or(AllocError::Empty { what: "choices" })?,
        };
        let best_us = best.kernels_us + self.rest_us();
        let time = |m: usize| self.ns(&[m], self.menus[m][best.picks[m]].scheme).unwrap_or(0);
        let most = (0..self.menus.len()).max_by_key(|&m| time(m)).unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds")]
        let most_us = time(most) as f64 / 1000.0;
        let mut rule = format!(
            "a decode step of {} is out of reach: the least {} is {}, of which {} is not products; the layer that binds is `{}`, {} as {}",
            show(limit_us),
            size.map_or_else(|| "of this palette".to_owned(), |size| format!("within {size}")),
            show(best_us),
            show(self.rest_us()),
            self.inventory.matrices[most].name,
            show(most_us),
            self.menus[most][best.picks[most]].scheme,
        );
        let small = self.problem(Goal::Bytes, None, self.room_ns(), None)?;
        if let (Some(_), Ok(small)) = (bytes, self.solved(&small)) {
            let joined = self.joined(&small, 0.0, Prices::default());
            let least: u64 = self.menus.iter().zip(&joined.picks).map(|(menu, &pick)| menu[pick].bytes).sum();
            rule += &format!("; within the time the matrices take at least {}", Bytes(least));
        }
        Ok(Error::Latency { rule, best_us })
    }
}

/// Loss of a matrix at the geometric mean of the errors of two schemes: by a line through their
/// losses, since measured ones are the schemes' errors times a coefficient only up to a constant.
pub(crate) fn loss_between(low: &PlannedLayer, high: &PlannedLayer) -> f64 {
    let error = |l: &PlannedLayer| l.scheme.error().unwrap_or(0.0);
    let (a, b) = (error(low), error(high));
    let share = if a == b { 0.5 } else { ((a * b).sqrt() - b) / (a - b) };
    high.predicted_loss + share * (low.predicted_loss - high.predicted_loss)
}

/// Microseconds as milliseconds.
fn show(us: f64) -> String {
    format!("{:.3} ms", us / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Plan, PlanOptions, Preset, Sensitivities, Target,
        machine::{KernelTime, ModelShape, PROFILE_VERSION},
        plan,
    };
    use fracbit_base::Scheme;
    use fracbit_model::RotationMode;

    /// A machine on which a product takes 2 us and a nanosecond per 64 weights and bit.
    fn machine(inventory: &Inventory, schemes: &[Scheme]) -> MachineProfile {
        let config = Preset::named("tiny").unwrap().model_config().unwrap();
        let one = (0..inventory.matrices.len()).map(|m| vec![m]);
        let groups: Vec<Vec<usize>> = one.chain(fusion::candidates(&inventory.matrices)).collect();
        let time = |scheme: Scheme, group: &Vec<usize>| {
            let product = Product::of(group.iter().map(|&m| &inventory.matrices[m])).unwrap();
            let us = 2.0 + (product.rows * product.cols) as f64 * scheme.rate().bits() / 64_000.0;
            KernelTime { scheme: Storage::Packed(scheme), product, batch: 1, us, spread: [us, us] }
        };
        MachineProfile {
            profile_version: PROFILE_VERSION,
            fracbit: String::new(),
            build: String::new(),
            cpu: String::new(),
            isa: String::new(),
            threads: 1,
            subject: "a test".to_owned(),
            shape: ModelShape::of(&config),
            read_gb_per_s: 1.0,
            int8_gmac_per_s: 1.0,
            seconds: 0.0,
            kernels: schemes.iter().flat_map(|&s| groups.iter().map(move |g| time(s, g))).collect(),
            overheads: vec![Overhead {
                batch: 1,
                factor: 1.1,
                layer_us: 3.0,
                context_us: 0.01,
                fixed_us: 5.0,
                residual: 0.01,
                samples: Vec::new(),
            }],
        }
    }

    struct Bench {
        inventory: Inventory,
        speed: Speed,
    }

    impl Bench {
        fn new() -> Self {
            let config = Preset::named("tiny").unwrap().model_config().unwrap();
            let inventory = Inventory::of_config(&config, RotationMode::Fold, String::new());
            let schemes: Vec<Scheme> = Scheme::all().collect();
            let speed = Speed::new(Arc::new(machine(&inventory, &schemes)));
            Self { inventory, speed }
        }

        fn plan(
            &self,
            target: Target,
            limit_us: Option<f64>,
            change: impl Fn(&mut PlanOptions),
        ) -> Result<Plan, Error> {
            let speed = Some(Speed { limit_us, ..self.speed.clone() });
            let mut options = PlanOptions { speed, ..PlanOptions::new(target) };
            change(&mut options);
            plan(&self.inventory, &Sensitivities::prior(&self.inventory, RotationMode::Fold), &options)
        }
    }

    fn step(plan: &Plan) -> f64 {
        plan.speed.as_ref().unwrap().step_us
    }

    #[test]
    fn time_is_kept_and_fusion_pays() {
        let bench = Bench::new();
        let same = |_: &mut PlanOptions| {};
        let fast = step(&bench.plan(Target::Uniform("tcq-1".parse().unwrap()), None, same).unwrap());
        let slow = step(&bench.plan(Target::Uniform("nuq-8".parse().unwrap()), None, same).unwrap());
        assert!(fast < slow);
        for share in [0.1, 0.8, 1.3] {
            let limit = fast + share * (slow - fast);
            let fused = bench.plan(Target::Any, Some(limit), same).unwrap();
            assert!(step(&fused) <= limit + 0.1 && !fused.fused.is_empty(), "{limit}");
            // With one call per matrix the shorter times are out of reach.
            let apart = bench.plan(Target::Any, Some(limit), |o| o.speed.as_mut().unwrap().fuse = false);
            if let Ok(apart) = &apart {
                assert!(step(apart) <= limit + 0.1 && apart.fused.is_empty());
                assert!(fused.predicted_loss < apart.predicted_loss, "{limit}");
            }
            assert!(apart.is_ok() || share < 1.0, "{limit}");
            assert!(fused.lower_bound <= fused.predicted_loss);
            assert_eq!(
                fused.prices.microsecond > 0.0,
                share < 1.0,
                "longer than the slowest scheme takes, time is free"
            );
            // No single scheme that meets the time is better.
            for scheme in Scheme::all().filter(|s| s.group().is_none() && s.planes() == 1) {
                let uniform = bench.plan(Target::Uniform(scheme), None, same).unwrap();
                assert!(
                    step(&uniform) > limit || uniform.predicted_loss >= fused.predicted_loss - 1e-12,
                    "{scheme}"
                );
            }
            // A group has one scheme.
            let mut again = fused.clone();
            again.fit_to(&bench.inventory).unwrap();
            assert_eq!(again, fused, "a plan that was not edited keeps its predictions");
            // Also on its way through a file: numbers come back to the last bit.
            let mut read = Plan::parse(&serde_json::to_string(&fused).unwrap(), "plan.json").unwrap();
            read.fit_to(&bench.inventory).unwrap();
            assert_eq!(read, fused);
            let mut asked = fused.clone();
            asked.predict(&bench.inventory, &bench.speed).unwrap();
            assert!((step(&asked) - step(&fused)).abs() < 1e-9);
        }
    }

    #[test]
    fn nested_models_have_a_step_for_each_precision() {
        let mut bench = Bench::new();
        let uniform = |bench: &Bench, name: &str| {
            bench.plan(Target::Uniform(name.parse().unwrap()), None, |_| {}).unwrap()
        };
        let nested = uniform(&bench, "nest-tcq-2+1+1");
        let points = nested.speed.clone().unwrap().points;
        assert_eq!(points.iter().map(|p| p.precision).collect::<Vec<_>>(), [2.0, 3.0, 4.0]);
        // The base is the native code, and the test's machine goes by bits.
        assert!(!nested.fused.is_empty());
        assert!((points[0].step_us - step(&uniform(&bench, "tcq-2"))).abs() < 1e-9);
        assert!(points.is_sorted_by(|a, b| a.step_us < b.step_us));
        assert!((points[2].step_us - step(&nested)).abs() < 1e-9);
        let read = Plan::parse(&serde_json::to_string(&nested).unwrap(), "plan.json").unwrap();
        assert_eq!(read.speed, nested.speed);
        assert!(uniform(&bench, "tcq-4").speed.unwrap().points.is_empty());
        // What the profile has not is left out.
        let mut machine = MachineProfile::clone(&bench.speed.profile);
        machine.kernels.retain(|kernel| kernel.scheme.to_string() != "nest-tcq-2+1");
        bench.speed = Speed::new(Arc::new(machine));
        let points = uniform(&bench, "nest-tcq-2+1+1").speed.unwrap().points;
        assert_eq!(points.iter().map(|p| p.precision).collect::<Vec<_>>(), [2.0, 4.0]);
    }

    #[test]
    fn both_budgets_bind() {
        let bench = Bench::new();
        let same = |_: &mut PlanOptions| {};
        let free = bench.plan(Target::Bits(3.5), None, same).unwrap();
        let limit = 0.97 * step(&free);
        let both = bench.plan(Target::Bits(3.5), Some(limit), same).unwrap();
        assert!(both.bits_per_weight <= 3.5 && step(&both) <= limit + 0.1);
        assert!(both.predicted_loss >= free.lower_bound);
        let (size, time) = (Target::Size(Bytes(free.bytes * 2 / 3)), Some(limit));
        let tight = bench.plan(size, time, same).unwrap();
        assert!(tight.bytes <= free.bytes * 2 / 3 && tight.predicted_loss > both.predicted_loss);
    }

    #[test]
    fn the_smallest_size_is_in_reach_within_a_time_too() {
        let bench = Bench::new();
        let same = |_: &mut PlanOptions| {};
        let least = bench.plan(Target::Uniform("tcq-1".parse().unwrap()), None, same).unwrap();
        for more in [0, 100, 1000, 3000] {
            let size = Target::Size(Bytes(least.bytes + more));
            let free = bench.plan(size, None, same).unwrap();
            let timed = bench.plan(size, Some(1e6), same).unwrap();
            assert!(timed.bytes <= least.bytes + more && timed.lower_bound <= timed.predicted_loss);
            assert!(timed.predicted_loss <= free.predicted_loss * 1.01, "{more} bytes more");
        }
    }

    #[test]
    fn losses_measured_with_one_code_serve_plans_within_a_time() {
        let bench = Bench::new();
        let mut sensitivities = Sensitivities::prior(&bench.inventory, RotationMode::Fold);
        let measured = PlanOptions::new(Target::Any).schemes();
        for (name, fit) in &sensitivities.layers {
            let loss = |s: Scheme| (s.to_string(), fit.a * Storage::Packed(s).error().unwrap());
            sensitivities.actual.insert(name.clone(), measured.iter().map(|&s| loss(s)).collect());
        }
        let speed = Some(Speed { limit_us: Some(1e6), ..bench.speed.clone() });
        let mut options = PlanOptions { speed, ..PlanOptions::new(Target::Bits(3.5)) };
        let made = plan(&bench.inventory, &sensitivities, &options).unwrap();
        assert!(made.layers.iter().all(|l| measured.iter().any(|&s| l.scheme == Storage::Packed(s))));
        // A scheme that was asked for by name is another matter.
        options.also = vec!["tcq-fast-2".parse().unwrap()];
        let error = plan(&bench.inventory, &sensitivities, &options).unwrap_err().to_string();
        assert!(error.contains("tcq-fast-2"), "{error}");
    }

    #[test]
    fn what_cannot_be_reached_is_named() {
        let bench = Bench::new();
        let text = |e: Result<Plan, Error>| e.unwrap_err().to_string();
        let error = bench.plan(Target::Any, Some(10.0), |_| {}).unwrap_err();
        let Error::Latency { best_us, .. } = error else { panic!("{error}") };
        bench.plan(Target::Any, Some(best_us + 0.2), |_| {}).unwrap();
        let message = error.to_string();
        for word in ["0.010 ms is out of reach", "binds is `model.embed_tokens`", "as tcq-1", "not products"]
        {
            assert!(message.contains(word), "{word}: {message}");
        }
        let both = text(bench.plan(Target::Bits(3.0), Some(10.0), |_| {}));
        assert!(both.contains("the least within"), "{both}");
        let pinned = text(bench.plan(Target::Any, Some(best_us + 0.2), |o| {
            o.pins = vec!["layers.1.mlp.down_proj=nuq-8".parse().unwrap()];
        }));
        assert!(pinned.contains("out of reach"), "{pinned}");
        let kept = text(bench.plan(Target::Any, Some(1000.0), |o| o.keep_head = true));
        assert!(kept.contains("model.embed_tokens") && kept.contains("f16 has no measured kernel"), "{kept}");
        let few = machine(&bench.inventory, &["tcq-3".parse().unwrap()]);
        let speed = Speed::new(Arc::new(few));
        let bench = Bench { speed, ..bench };
        let mut made = Bench::new().plan(Target::Uniform("tcq-2".parse().unwrap()), None, |_| {}).unwrap();
        let missing = made.predict(&bench.inventory, &bench.speed).unwrap_err().to_string();
        assert!(missing.contains("tcq-2 has no measured kernel on this machine"), "{missing}");
    }

    #[test]
    fn pins_and_exclusions_hold() {
        let bench = Bench::new();
        let made = bench
            .plan(Target::Bits(3.2), None, |o| {
                o.pins = vec!["layers.0.*=tcq-4".parse().unwrap()];
                o.excludes = vec!["*=half-*".parse().unwrap()];
            })
            .unwrap();
        for layer in &made.layers {
            let name = layer.scheme.to_string();
            assert!(!name.starts_with("half"), "{}: {name}", layer.name);
            assert!(!layer.name.starts_with("model.layers.0.") || name == "tcq-4", "{}: {name}", layer.name);
        }
        assert!(
            bench
                .plan(Target::Bits(3.2), None, |o| o.pins = vec!["layers.7.*=tcq-4".parse().unwrap()])
                .is_err()
        );
    }

    #[test]
    fn bands_take_their_share_of_the_time() {
        use crate::bands::{self, Bands};
        let bench = Bench::new();
        let prior = Sensitivities::prior(&bench.inventory, RotationMode::Fold);
        let mut banded = prior.clone();
        let ends = bench.inventory.matrices.iter().filter(|m| !m.id.is_layer());
        for matrix in ends {
            let counts: Vec<u32> = (0..matrix.shape.rows as u32).map(|row| row * row).collect();
            banded.share_out(matrix.id, &Bands::of(&counts).unwrap(), &[1.0; bands::MOST]).unwrap();
        }
        let options = PlanOptions::new(Target::Bits(4.0));
        let [whole, parts] = [&prior, &banded].map(|sensitivities| {
            let mut plan = plan(&bench.inventory, sensitivities, &options).unwrap();
            plan.layers.iter_mut().for_each(|l| l.scheme = "nuq-4".parse().unwrap());
            plan.fit_to(&bench.inventory).unwrap();
            plan.predict(&bench.inventory, &bench.speed).unwrap();
            plan
        });
        assert!(whole.bands.is_empty() && parts.layers.len() > whole.layers.len());
        let [one, other] = [whole, parts].map(|plan| plan.speed.unwrap().kernels_us);
        assert!((one - other).abs() < 0.01, "{one} and {other} microseconds");
        // And plans within a time may have them.
        let limited = Speed { limit_us: Some(1e9), ..bench.speed.clone() };
        let options = PlanOptions { speed: Some(limited), ..options };
        assert!(!plan(&bench.inventory, &banded, &options).unwrap().bands.is_empty());
    }
}
