//! Fusion-aware allocation: which layers share one kernel call, and how each call's weights are
//! stored.
//!
//! Layers that read the same input (query, key, value; gate, up) can be stored as one matrix and
//! multiplied in one call. That saves time, but a fused matrix has a single scheme. Q-Palette,
//! section 4.2, equation 4, decides both at once: one binary variable per (group, scheme), every
//! layer in exactly one active group, total cost within the budgets. Groups cost what their fused
//! kernel costs; their loss is the sum over their members at that scheme.
//!
//! Two solvers, independent of each other:
//!
//! - `solve_fusion_highs` hands equation 4 to HiGHS as it stands, with any budgets.
//! - [`FusionProblem::solve`] *removes* the groups: layers connected through groups form a
//!   **component** (the three of attention input, the two of the MLP input, a lone layer). A
//!   component's configurations (partitions times choices) are enumerated and reduced to the
//!   non-dominated ones, component by component; what is left is an ordinary multiple-choice
//!   knapsack over components, for which [`crate::solve`] is exact with one budget. Components are
//!   small, so this is cheap: {q, k, v} with 48 schemes has 5 partitions and 117 552
//!   configurations, of which about a hundred matter. It does not scale to components of many
//!   layers, where HiGHS does.
//!
//! Deviation: the paper lists its groups for Llama blocks; here groups are whatever the caller
//! gives (a helper makes all subsets), so new architectures need no change. We also take several
//! budgets at once, the paper takes one.

use serde::{Deserialize, Serialize};

use crate::error::AllocError;
use crate::exact::Effort;
use crate::lagrange::solve_with;
use crate::problem::{Budget, Choice, Layer, Problem, Solution, check_choices, relative_gap};

/// Layers that one kernel call may serve, and the ways to store them together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Indices of layers, distinct.
    pub members: Vec<usize>,
    /// At least one choice, for the whole group.
    pub choices: Vec<Choice>,
}

/// Layers, the groups they may be fused into, and budgets; checked at construction.
#[derive(Clone, Debug, PartialEq)]
pub struct FusionProblem {
    layers: Vec<String>,
    groups: Vec<Group>,
    budgets: Vec<Budget>,
}

/// A partition into groups with a choice for each, within every budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FusionSolution {
    /// Active groups as (index of the group, index of its choice), by group.
    pub active: Vec<(usize, usize)>,
    /// Total loss.
    pub loss: f64,
    /// Total use of each resource.
    pub cost: Vec<u64>,
    /// No partition and choice within the budgets has a smaller loss (up to f64 rounding of the
    /// sums).
    pub lower_bound: f64,
}

impl FusionSolution {
    /// Proven relative gap; 0 when optimal.
    #[must_use]
    pub fn gap(&self) -> f64 {
        relative_gap(self.loss, self.lower_bound)
    }
}

/// All non-empty subsets of `members`, smallest first: the groups of layers that share an input.
///
/// # Panics
/// Beyond 16 members: partitions of such a component could not be enumerated.
#[must_use]
pub fn subsets(members: &[usize]) -> Vec<Vec<usize>> {
    assert!(members.len() <= 16, "subsets: at most 16 members, got {}", members.len());
    let pick =
        |mask: u32| members.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, &m)| m).collect();
    let mut all: Vec<Vec<usize>> = (1..1u32 << members.len()).map(pick).collect();
    all.sort_by_key(Vec::len);
    all
}

impl FusionProblem {
    /// Checks and keeps the parts.
    ///
    /// # Errors
    /// Empty lists, members that are unknown or repeated, and the rules of [`Problem::new`] for the
    /// choices.
    pub fn new(layers: Vec<String>, groups: Vec<Group>, budgets: Vec<Budget>) -> Result<Self, AllocError> {
        for (what, empty) in
            [("layers", layers.is_empty()), ("groups", groups.is_empty()), ("budgets", budgets.is_empty())]
        {
            if empty {
                return Err(AllocError::Empty { what });
            }
        }
        for (g, group) in groups.iter().enumerate() {
            let mut seen = group.members.clone();
            seen.sort_unstable();
            seen.dedup();
            let known = seen.last().is_some_and(|&m| m < layers.len());
            if !known || seen.len() != group.members.len() {
                let members = group.members.clone();
                return Err(AllocError::Members { group: g, layers: layers.len(), members });
            }
            let names: Vec<&str> = group.members.iter().map(|&m| layers[m].as_str()).collect();
            check_choices(&names.join("+"), &group.choices, budgets.len())?;
        }
        for (k, budget) in budgets.iter().enumerate() {
            let largest = |g: &Group| g.choices.iter().map(|c| c.cost[k]).max().unwrap_or(0);
            if groups.iter().map(largest).try_fold(0u64, u64::checked_add).is_none() {
                return Err(AllocError::Overflow { budget: budget.name.clone() });
            }
        }
        Ok(Self { layers, groups, budgets })
    }

    /// Names of the layers.
    #[must_use]
    pub fn layers(&self) -> &[String] {
        &self.layers
    }

    /// The groups, in the order of [`FusionSolution::active`].
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The budgets, in the order of [`Choice::cost`].
    #[must_use]
    pub fn budgets(&self) -> &[Budget] {
        &self.budgets
    }

    /// Moves the limit of budget `k`.
    ///
    /// # Panics
    /// When there is no budget `k`.
    pub fn set_limit(&mut self, k: usize, limit: u64) {
        self.budgets[k].limit = limit;
    }

    /// The same layers with only the groups that `keep` accepts (for instance `|g| g.members.len()
    /// == 1`: no fusion).
    ///
    /// # Errors
    /// [`AllocError::Empty`] if none is left.
    pub fn restricted(&self, keep: impl Fn(&Group) -> bool) -> Result<Self, AllocError> {
        let groups = self.groups.iter().filter(|g| keep(g)).cloned().collect();
        Self::new(self.layers.clone(), groups, self.budgets.clone())
    }

    /// Total loss and cost of the active (group, choice) pairs.
    ///
    /// # Panics
    /// When an index is out of range.
    #[must_use]
    pub fn evaluate(&self, active: &[(usize, usize)]) -> (f64, Vec<u64>) {
        let mut loss = 0.0;
        let mut cost = vec![0; self.budgets.len()];
        for &(g, j) in active {
            let c = &self.groups[g].choices[j];
            loss += c.loss;
            cost.iter_mut().zip(&c.cost).for_each(|(t, c)| *t += c);
        }
        (loss, cost)
    }

    /// Whether a total keeps within every budget.
    #[must_use]
    pub fn feasible(&self, cost: &[u64]) -> bool {
        cost.iter().zip(&self.budgets).all(|(c, b)| *c <= b.limit)
    }

    /// Solves without HiGHS, by reduction to a knapsack over components: exact up to `effort` for
    /// one budget, a heuristic with a proven gap when two bind at once.
    ///
    /// # Errors
    /// [`AllocError::Uncovered`] when a layer has no partition, [`AllocError::TooManyBudgets`]
    /// beyond two, and the errors of [`crate::solve_with`].
    pub fn solve(&self, effort: Effort) -> Result<FusionSolution, AllocError> {
        let components = self.expand()?;
        let solution = solve_with(&components.problem, effort)?;
        Ok(self.solution(components.active(&solution), solution.lower_bound))
    }

    /// The equivalent knapsack over components, reduced to non-dominated configurations.
    ///
    /// # Errors
    /// As [`FusionProblem::solve`], save what concerns the budgets' sizes.
    pub fn expand(&self) -> Result<Components, AllocError> {
        if self.budgets.len() > 2 {
            return Err(AllocError::TooManyBudgets {
                op: "fusion components",
                most: 2,
                got: self.budgets.len(),
            });
        }
        let mut layers = Vec::new();
        let mut configurations = Vec::new();
        for component in self.components() {
            let name = component.iter().map(|&l| self.layers[l].as_str()).collect::<Vec<_>>().join("+");
            let mut found = Vec::new();
            self.partitions(&component, &mut Vec::new(), &mut found);
            if found.is_empty() {
                return Err(AllocError::Uncovered { layer: name });
            }
            let mut all: Vec<Configuration> = Vec::new();
            for partition in found {
                let start = Configuration { cost: [0; 2], loss: 0.0, active: Vec::new() };
                all.extend(partition.into_iter().fold(vec![start], |front, g| self.extended(&front, g)));
            }
            let best = non_dominated(all.iter().map(|c| (c.cost, c.loss)));
            let budgets = self.budgets.len();
            let choices =
                best.iter().map(|&i| Choice { cost: all[i].cost[..budgets].to_vec(), loss: all[i].loss });
            let choices = choices.collect();
            let how = best.iter().map(|&i| std::mem::take(&mut all[i].active)).collect();
            layers.push(Layer { name, choices });
            configurations.push(how);
        }
        Ok(Components { problem: Problem::new(layers, self.budgets.clone())?, configurations })
    }

    /// The non-dominated ones among all configurations extended by all choices of group `g`.
    fn extended(&self, front: &[Configuration], g: usize) -> Vec<Configuration> {
        let choices = &self.groups[g].choices;
        let sum = |c: &Configuration, more: &Choice| {
            let mut cost = c.cost;
            cost.iter_mut().zip(&more.cost).for_each(|(t, c)| *t += c);
            (cost, c.loss + more.loss)
        };
        let best = non_dominated(front.iter().flat_map(|c| choices.iter().map(move |more| sum(c, more))));
        let build = |i: &usize| {
            let (from, j) = (&front[i / choices.len()], i % choices.len());
            let (cost, loss) = sum(from, &choices[j]);
            let mut active = from.active.clone();
            active.push((g, j));
            Configuration { cost, loss, active }
        };
        best.iter().map(build).collect()
    }

    /// Layers connected through groups, each list sorted.
    fn components(&self) -> Vec<Vec<usize>> {
        let mut root: Vec<usize> = (0..self.layers.len()).collect();
        // Few layers per group and no deep chains: repeated relabelling is simpler than union-find
        // and fast enough.
        for group in &self.groups {
            let least = group.members.iter().map(|&m| root[m]).min().unwrap_or(0);
            let joined: Vec<usize> = group.members.iter().map(|&m| root[m]).collect();
            root.iter_mut().filter(|r| joined.contains(r)).for_each(|r| *r = least);
        }
        let mut components: Vec<Vec<usize>> = vec![Vec::new(); self.layers.len()];
        root.iter().enumerate().for_each(|(l, &r)| components[r].push(l));
        components.retain(|s| !s.is_empty());
        components
    }

    /// All ways to cover `layers` by disjoint groups.
    fn partitions(&self, layers: &[usize], chosen: &mut Vec<usize>, out: &mut Vec<Vec<usize>>) {
        let Some(&first) = layers.first() else {
            out.push(chosen.clone());
            return;
        };
        for (g, group) in self.groups.iter().enumerate() {
            if group.members.contains(&first) && group.members.iter().all(|m| layers.contains(m)) {
                let rest: Vec<usize> =
                    layers.iter().copied().filter(|l| !group.members.contains(l)).collect();
                chosen.push(g);
                self.partitions(&rest, chosen, out);
                chosen.pop();
            }
        }
    }

    pub(crate) fn solution(&self, mut active: Vec<(usize, usize)>, lower_bound: f64) -> FusionSolution {
        active.sort_unstable();
        let (loss, cost) = self.evaluate(&active);
        FusionSolution { active, loss, cost, lower_bound: lower_bound.min(loss) }
    }

    pub(crate) fn not_together(&self) -> AllocError {
        let list: Vec<String> = self.budgets.iter().map(|b| format!("`{}` {}", b.name, b.limit)).collect();
        AllocError::NotTogether { budgets: list.join(", ") }
    }
}

/// A component's total and the (group, choice) pairs behind it. The second cost stays 0 when there
/// is one budget.
struct Configuration {
    cost: [u64; 2],
    loss: f64,
    active: Vec<(usize, usize)>,
}

/// A fusion problem without groups: one "layer" per component, one choice per useful configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Components {
    /// The knapsack over components.
    pub problem: Problem,
    /// `[component][choice]` → active (group, choice) pairs.
    pub configurations: Vec<Vec<Vec<(usize, usize)>>>,
}

impl Components {
    /// The active groups behind a solution of [`Components::problem`].
    ///
    /// # Panics
    /// When the solution belongs to another problem.
    #[must_use]
    pub fn active(&self, solution: &Solution) -> Vec<(usize, usize)> {
        let pairs =
            self.configurations.iter().zip(&solution.choice).flat_map(|(how, &j)| how[j].iter().copied());
        pairs.collect()
    }
}

/// Indices of what nothing else matches in both costs and the loss, sorted by the first cost.
///
/// A candidate is dominated if one before it has no larger second cost and loss; a staircase
/// (second cost rising, loss falling) of the ones before answers that by bisection. O(n log n).
fn non_dominated(candidates: impl Iterator<Item = ([u64; 2], f64)>) -> Vec<usize> {
    let all: Vec<([u64; 2], f64)> = candidates.collect();
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_unstable_by(|&a, &b| {
        let (x, y) = (&all[a], &all[b]);
        x.0.cmp(&y.0).then(x.1.total_cmp(&y.1)).then(a.cmp(&b))
    });
    let mut stairs: Vec<(u64, f64)> = Vec::new();
    order.retain(|&i| {
        let ([_, second], loss) = all[i];
        let after = stairs.partition_point(|s| s.0 <= second);
        if after > 0 && stairs[after - 1].1 <= loss {
            return false;
        }
        let from = stairs.partition_point(|s| s.0 < second);
        let until = from + stairs[from..].iter().take_while(|s| s.1 >= loss).count();
        stairs.splice(from..until, [(second, loss)]);
        true
    });
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skyline_is_the_definition() {
        // Points on a small lattice, where ties are common, against the quadratic definition.
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from(state >> 30)
        };
        for _ in 0..500 {
            let points: Vec<([u64; 2], f64)> = (0..12).map(|_| ([draw(), draw()], draw() as f64)).collect();
            let mut got = non_dominated(points.iter().copied());
            got.sort_unstable();
            let covers =
                |a: &([u64; 2], f64), b: &([u64; 2], f64)| a.0[0] <= b.0[0] && a.0[1] <= b.0[1] && a.1 <= b.1;
            let lost = |i: usize| {
                (0..points.len())
                    .any(|j| j != i && covers(&points[j], &points[i]) && (j < i || points[j] != points[i]))
            };
            let want: Vec<usize> = (0..points.len()).filter(|&i| !lost(i)).collect();
            assert_eq!(got, want, "{points:?}");
        }
    }

    #[test]
    fn subsets_and_partitions() {
        assert_eq!(subsets(&[4, 7]), [vec![4], vec![7], vec![4, 7]]);
        let group = |members: Vec<usize>| Group { members, choices: vec![Choice::new(1, 1.0)] };
        let groups = subsets(&[0, 1, 2]).into_iter().map(group).collect();
        let names = ["q", "k", "v"].map(str::to_owned).to_vec();
        let p = FusionProblem::new(names, groups, vec![Budget::new("ns", 3)]).unwrap();
        let mut found = Vec::new();
        p.partitions(&[0, 1, 2], &mut Vec::new(), &mut found);
        assert_eq!(found.len(), 5, "Bell number of 3: {found:?}");
        assert_eq!(p.components(), [vec![0, 1, 2]]);
    }
}
