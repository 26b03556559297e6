//! The one-budget solver: relaxation, reduced-cost fixing, and a label search over what is left.
//!
//! 1. The linear relaxation (module `front`) gives a lower bound and the price λ of a unit of
//!    budget; a greedy rounding gives a first allocation. With hundreds of layers the two are
//!    already close.
//! 2. **Fixing.** Choosing point j in layer l costs at least its reduced cost `loss + λ·cost -
//!    min_j(..)` above the bound. Points that push the bound over the best known allocation can be
//!    in no better one and are dropped; most layers keep one to three points (the *core* of
//!    Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", EJOR 83, 1995).
//!    Repeated while it helps.
//! 3. **Labels.** The open layers are decided one after the other. A label is a reachable (cost,
//!    loss); those that another label matches at no more cost are dropped, and so is every label
//!    whose own relaxation, loss so far plus the exact linear relaxation of the undecided layers in
//!    the remaining room, does not beat the best allocation. The most promising label of each layer
//!    is completed greedily, which keeps the best allocation fresh.
//!
//! The search is exact as long as the labels of a layer fit [`Effort::labels`]. Beyond that only
//! the most promising survive, and the reported bound is the smallest one among everything ever
//! dropped: it stays *proven*, the gap is just no longer zero. Deterministic: no clock, no
//! randomness.
//!
//! Cost: O(layers · labels · open points). It loses to a branch-and-cut solver when several budgets
//! bind at once: there this module does not apply and [`crate::solve`] falls back on a Lagrangian
//! heuristic.

use crate::front::{Fronts, Point};
use crate::problem::relative_gap;

/// How hard the own solver tries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Relative gap at which to stop improving; 0 asks for the optimum.
    pub gap: f64,
    /// Labels kept per layer. Memory is about 8 bytes × labels × layers.
    pub labels: usize,
}

impl Default for Effort {
    /// The optimum, with at most 16384 labels per layer.
    fn default() -> Self {
        Self { gap: 0.0, labels: 1 << 14 }
    }
}

/// Outcome in terms of the points' ids.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) ids: Vec<u32>,
    pub(crate) bound: f64,
    pub(crate) price: f64,
}

/// Best allocation found so far, and the threshold above which nothing interests us.
struct Incumbent {
    at: Vec<u32>,
    loss: f64,
    gap: f64,
}

impl Incumbent {
    /// Bounds at or above this cannot lead to an improvement worth having.
    fn cutoff(&self) -> f64 {
        self.loss - self.gap * self.loss.abs()
    }
}

/// Solves one budget. `budget` must be at least the sum of the cheapest points.
pub(crate) fn solve(layers: Vec<Vec<Point>>, budget: u64, effort: Effort) -> Outcome {
    let mut fronts = Fronts::new(layers);
    let n = fronts.layers.len();
    let root = fronts.relax(budget);
    let everything = vec![0u32; n];

    // Smallest bound among all that was given up; the proven bound is min(this, best loss).
    let mut given_up = f64::INFINITY;
    let mut ids: Vec<u32> = Vec::new();
    let mut loss = f64::INFINITY;
    loop {
        let relaxed = fronts.relax(budget);
        let mut at = vec![0u32; n];
        fronts.greedy(&mut at, budget - fronts.base().0, &everything, 0);
        if fronts.loss(&at) < loss {
            loss = fronts.loss(&at);
            ids = fronts.layers.iter().zip(&at).map(|(f, &j)| f[j as usize].id).collect();
        }
        if relative_gap(loss, relaxed.bound) <= effort.gap {
            let bound = relaxed.bound.max(root.bound).min(given_up);
            return Outcome { ids, bound, price: root.price };
        }
        let cutoff = loss - effort.gap * loss.abs();
        let before: usize = fronts.layers.iter().map(Vec::len).sum();
        let kept: Vec<Vec<Point>> = fronts
            .layers
            .iter()
            .map(|front| {
                let value = |p: &Point| p.loss + relaxed.price * p.cost as f64;
                let least = front.iter().map(value).fold(f64::INFINITY, f64::min);
                let bound = |p: &Point| relaxed.bound + (value(p) - least);
                front
                    .iter()
                    .filter(|p| {
                        let keep = bound(p) < cutoff || value(p) == least;
                        if !keep {
                            given_up = given_up.min(bound(p));
                        }
                        keep
                    })
                    .copied()
                    .collect()
            })
            .collect();
        let after: usize = kept.iter().map(Vec::len).sum();
        let next = Fronts::new(kept);
        if next.base().0 > budget {
            // Nothing that was kept fits: the incumbent cannot be improved by more than the gap.
            return Outcome { ids, bound: given_up.min(loss).max(root.bound), price: root.price };
        }
        fronts = next;
        if after == before {
            break;
        }
    }

    // The incumbent in terms of the reduced fronts; its own points may have been fixed away, so
    // keep ids apart.
    let mut best = Incumbent { at: Vec::new(), loss, gap: effort.gap };
    let search = Search::new(&fronts, budget);
    given_up = given_up.min(search.run(&mut best, effort.labels));
    if !best.at.is_empty() {
        ids = fronts.layers.iter().zip(&best.at).map(|(f, &j)| f[j as usize].id).collect();
    }
    Outcome { ids, bound: given_up.min(best.loss).max(root.bound), price: root.price }
}

/// A partial allocation: the layers decided so far have this cost and loss.
#[derive(Clone, Copy)]
struct Label {
    cost: u64,
    loss: f64,
    /// Index in the previous layer's labels.
    parent: u32,
    /// Index in the layer's front.
    point: u32,
}

struct Search<'a> {
    fronts: &'a Fronts,
    budget: u64,
    /// Layers with more than one point, in the order of decision.
    open: Vec<usize>,
    /// Position in `open`; single-point layers come before everything.
    rank: Vec<u32>,
    /// Base cost and loss of open[i..], and of all single-point layers.
    suffix: Vec<(u64, f64)>,
    fixed: (u64, f64),
}

impl<'a> Search<'a> {
    fn new(fronts: &'a Fronts, budget: u64) -> Self {
        let n = fronts.layers.len();
        let span = |l: usize| fronts.layers[l].last().map_or(0, |p| p.cost) - fronts.layers[l][0].cost;
        let mut open: Vec<usize> = (0..n).filter(|&l| fronts.layers[l].len() > 1).collect();
        // Coarse moves first: what remains is fine-grained, so its relaxation is tight and labels
        // die early.
        open.sort_by_key(|&l| (std::cmp::Reverse(span(l)), l));
        let mut rank = vec![0u32; n];
        open.iter().enumerate().for_each(|(i, &l)| rank[l] = i as u32 + 1);
        let mut suffix = vec![(0, 0.0); open.len() + 1];
        for i in (0..open.len()).rev() {
            let p = fronts.layers[open[i]][0];
            suffix[i] = (suffix[i + 1].0 + p.cost, suffix[i + 1].1 + p.loss);
        }
        let fixed = (0..n)
            .filter(|&l| fronts.layers[l].len() == 1)
            .fold((0, 0.0), |(c, s), l| (c + fronts.layers[l][0].cost, s + fronts.layers[l][0].loss));
        Self { fronts, budget, open, rank, suffix, fixed }
    }

    /// Improves `best`; returns the smallest bound among the labels given up.
    fn run(&self, best: &mut Incumbent, cap: usize) -> f64 {
        let mut given_up = f64::INFINITY;
        let mut arena: Vec<Vec<(u32, u32)>> = Vec::with_capacity(self.open.len());
        let mut labels = vec![Label { cost: self.fixed.0, loss: self.fixed.1, parent: 0, point: 0 }];
        let mut bounds = Vec::new();
        for (i, &l) in self.open.iter().enumerate() {
            labels = merge(&labels, &self.fronts.layers[l], self.budget - self.suffix[i + 1].0);
            self.bound(&labels, i + 1, &mut bounds);
            // The most promising label, completed greedily, may improve the incumbent.
            if let Some(p) = argmin(&bounds).filter(|&p| bounds[p] < best.cutoff()) {
                self.complete(&labels[p], i, &arena, best);
            }
            let cutoff = best.cutoff();
            let (mut threshold, mut ties) = (f64::INFINITY, 0);
            let mut alive: Vec<f64> = bounds.iter().copied().filter(|b| *b < cutoff).collect();
            if alive.len() > cap {
                let (below, middle, _) = alive.select_nth_unstable_by(cap, f64::total_cmp);
                threshold = *middle;
                // Of equal bounds, the cheapest labels fill the room: layers that are alike have
                // many.
                ties = below.iter().filter(|b| **b == threshold).count();
            }
            let mut p = 0;
            labels.retain(|_| {
                let tie = bounds[p] == threshold && ties > 0;
                ties -= usize::from(tie);
                let keep = bounds[p] < cutoff && (bounds[p] < threshold || tie);
                if !keep {
                    given_up = given_up.min(bounds[p]);
                }
                p += 1;
                keep
            });
            arena.push(labels.iter().map(|s| (s.parent, s.point)).collect());
            if labels.is_empty() {
                break;
            }
        }
        given_up
    }

    /// Relaxation of every label: its loss plus that of the undecided layers `open[from..]` in the
    /// room left.
    fn bound(&self, labels: &[Label], from: usize, out: &mut Vec<f64>) {
        out.clear();
        out.resize(labels.len(), 0.0);
        let (base_cost, base_loss) = self.suffix[from];
        let undecided = |s: &&crate::front::Step| self.rank[s.layer as usize] > from as u32;
        let mut steps = self.fronts.steps.iter().filter(undecided);
        let mut next = steps.next();
        let (mut used, mut saved) = (0u64, 0.0);
        // Labels are sorted by cost, so the room grows from the last to the first and the edges are
        // walked once.
        for (label, bound) in labels.iter().zip(out.iter_mut()).rev() {
            let room = self.budget - label.cost - base_cost;
            while let Some(s) = next.filter(|s| used + s.cost <= room) {
                used += s.cost;
                saved += s.drop;
                next = steps.next();
            }
            let partial = next.map_or(0.0, |s| s.slope * (room - used) as f64);
            *bound = label.loss + base_loss - saved - partial;
        }
    }

    /// Completes a label of `open[i]` greedily and keeps the result if it is the best so far.
    fn complete(&self, label: &Label, i: usize, arena: &[Vec<(u32, u32)>], best: &mut Incumbent) {
        let mut at = vec![0u32; self.fronts.layers.len()];
        at[self.open[i]] = label.point;
        let mut parent = label.parent;
        for (&l, nodes) in self.open[..i].iter().zip(arena).rev() {
            let (p, point) = nodes[parent as usize];
            at[l] = point;
            parent = p;
        }
        let room = self.budget - label.cost - self.suffix[i + 1].0;
        self.fronts.greedy(&mut at, room, &self.rank, i as u32 + 2);
        let loss = self.fronts.loss(&at);
        if loss < best.loss {
            best.loss = loss;
            best.at = at;
        }
    }
}

fn argmin(values: &[f64]) -> Option<usize> {
    (0..values.len()).min_by(|&a, &b| values[a].total_cmp(&values[b]))
}

/// All labels extended by all points of one layer, within `limit`, sorted by cost, dominated ones
/// removed.
fn merge(labels: &[Label], front: &[Point], limit: u64) -> Vec<Label> {
    let mut heads = vec![0usize; front.len()];
    let mut out: Vec<Label> = Vec::with_capacity(labels.len() * front.len().min(4));
    let mut least = f64::INFINITY;
    loop {
        // Few points survive fixing, so a linear scan over the heads beats a heap.
        let mut pick: Option<(u64, f64, usize)> = None;
        for (j, p) in front.iter().enumerate() {
            let Some(label) = labels.get(heads[j]) else { continue };
            let (cost, loss) = (label.cost + p.cost, label.loss + p.loss);
            if pick.is_none_or(|(c, s, _)| cost < c || (cost == c && loss < s)) {
                pick = Some((cost, loss, j));
            }
        }
        let Some((cost, loss, j)) = pick.filter(|(c, ..)| *c <= limit) else { return out };
        if loss < least {
            least = loss;
            out.push(Label { cost, loss, parent: heads[j] as u32, point: j as u32 });
        }
        heads[j] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bounds_do_not_empty_the_search() {
        let mut state = 1u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut optimal = 0;
        for _ in 0..2000 {
            // Layers alike: small whole numbers, so that bounds are equal to the last bit.
            let mut points = |n: u32| -> Vec<Point> {
                (0..n).map(|id| Point { cost: draw(9), loss: draw(9) as f64, id }).collect()
            };
            let kinds = [points(3), points(4)];
            let layers: Vec<Vec<Point>> = (0..6).map(|l| kinds[l % 2].clone()).collect();
            let least: u64 = layers.iter().map(|l| l.iter().map(|p| p.cost).min().unwrap_or(0)).sum();
            let budget = least + draw(20);
            let exact = solve(layers.clone(), budget, Effort::default());
            let few = solve(layers, budget, Effort { labels: 2, ..Effort::default() });
            assert!(few.bound <= exact.bound + 1e-9);
            let total = |o: &Outcome| -> f64 { (0..6).map(|l| kinds[l % 2][o.ids[l] as usize].loss).sum() };
            optimal += usize::from(total(&few) <= total(&exact));
        }
        // Two labels a layer; 1991 when none of equal ones stays.
        assert!(optimal >= 1997, "{optimal} of 2000 optimal");
    }
}
