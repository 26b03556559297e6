//! Dominance, lower convex hulls and the linear relaxation for one scalar cost.
//!
//! The multiple-choice knapsack's linear relaxation needs no simplex: keep, per layer, the lower
//! convex hull of the points (cost, loss), start every layer at its cheapest point, and take hull
//! edges in order of loss saved per unit of cost until the budget is used up (Sinha and Zoltners,
//! "The multiple-choice knapsack problem", Operations Research 27, 1979). The edge at which the
//! budget runs out gives the optimal Lagrange multiplier, and the value is that of the Lagrangian
//! dual. Cost: O(n log n) in the number of choices.

/// A choice seen by the one-budget solvers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) cost: u64,
    pub(crate) loss: f64,
    /// Index in the caller's list.
    pub(crate) id: u32,
}

/// Keeps the points that no other point matches at less or equal cost: cost rises, loss strictly
/// falls.
pub(crate) fn pareto(mut points: Vec<Point>) -> Vec<Point> {
    points.sort_by(|a, b| a.cost.cmp(&b.cost).then(a.loss.total_cmp(&b.loss)).then(a.id.cmp(&b.id)));
    let mut best = f64::INFINITY;
    points.retain(|p| {
        let keep = p.loss < best;
        if keep {
            best = p.loss;
        }
        keep
    });
    points
}

/// Indices of the lower convex hull of a Pareto front: both ends always, slopes strictly
/// flattening.
fn hull(front: &[Point]) -> Vec<usize> {
    let slope = |a: usize, b: usize| (front[a].loss - front[b].loss) / (front[b].cost - front[a].cost) as f64;
    let mut kept: Vec<usize> = Vec::with_capacity(front.len());
    for i in 0..front.len() {
        while let [.., a, b] = kept[..] {
            if slope(a, b) > slope(b, i) {
                break;
            }
            kept.pop();
        }
        kept.push(i);
    }
    kept
}

/// One hull edge: going from a layer's hull point to the next dearer one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) layer: u32,
    /// Index in the layer's front of the point reached.
    pub(crate) to: u32,
    pub(crate) cost: u64,
    pub(crate) drop: f64,
    /// `drop / cost`.
    pub(crate) slope: f64,
}

/// All layers as fronts, and the merged hull edges, best first.
#[derive(Clone, Debug)]
pub(crate) struct Fronts {
    pub(crate) layers: Vec<Vec<Point>>,
    pub(crate) steps: Vec<Step>,
}

/// Optimum of the linear relaxation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relaxed {
    pub(crate) bound: f64,
    /// Loss saved per unit at the edge where the budget ran out; 0 when it never did.
    pub(crate) price: f64,
}

impl Fronts {
    /// `layers` may hold dominated points; none may be empty.
    pub(crate) fn new(layers: impl IntoIterator<Item = Vec<Point>>) -> Self {
        let layers: Vec<Vec<Point>> = layers.into_iter().map(pareto).collect();
        let mut steps = Vec::new();
        for (l, front) in layers.iter().enumerate() {
            for pair in hull(front).windows(2) {
                let (a, b) = (front[pair[0]], front[pair[1]]);
                let (cost, drop) = (b.cost - a.cost, a.loss - b.loss);
                let slope = drop / cost as f64;
                steps.push(Step { layer: l as u32, to: pair[1] as u32, cost, drop, slope });
            }
        }
        // Stable: equal slopes keep the order of the layers, and a layer's own edges are already in
        // order.
        steps.sort_by(|a, b| b.slope.total_cmp(&a.slope));
        Self { layers, steps }
    }

    /// Total cost and loss of the cheapest points.
    pub(crate) fn base(&self) -> (u64, f64) {
        self.layers.iter().fold((0, 0.0), |(c, l), f| (c + f[0].cost, l + f[0].loss))
    }

    /// The linear relaxation at `budget`, which must be at least the base cost.
    pub(crate) fn relax(&self, budget: u64) -> Relaxed {
        let (cost, mut bound) = self.base();
        let mut room = budget - cost;
        for s in &self.steps {
            if s.cost > room {
                return Relaxed { bound: bound - s.slope * room as f64, price: s.slope };
            }
            room -= s.cost;
            bound -= s.drop;
        }
        Relaxed { bound, price: 0.0 }
    }

    /// Greedy allocation: hull edges best first, skipping those that do not fit, then single
    /// upgrades (hull or not) while any fits, largest saving first. Only layers with
    /// `rank[layer] >= from` are decided; `at` holds the others. Returns the unspent room.
    pub(crate) fn greedy(&self, at: &mut [u32], mut room: u64, rank: &[u32], from: u32) -> u64 {
        for s in &self.steps {
            let l = s.layer as usize;
            // An edge leads on only from its own start: a skipped edge ends its layer's walk,
            // except that a later point may still be reached in one go by the second phase.
            if rank[l] < from || s.cost > room {
                continue;
            }
            let front = &self.layers[l];
            let here = front[at[l] as usize];
            let there = front[s.to as usize];
            if there.cost > here.cost && there.cost - here.cost <= room {
                room -= there.cost - here.cost;
                at[l] = s.to;
            }
        }
        loop {
            let mut best: Option<(f64, usize, u32)> = None;
            for (l, front) in self.layers.iter().enumerate() {
                if rank[l] < from {
                    continue;
                }
                let here = front[at[l] as usize];
                for (j, p) in front.iter().enumerate().skip(at[l] as usize + 1) {
                    if p.cost - here.cost > room {
                        break;
                    }
                    let gain = here.loss - p.loss;
                    if best.is_none_or(|(g, ..)| gain > g) {
                        best = Some((gain, l, j as u32));
                    }
                }
            }
            let Some((_, l, j)) = best else { return room };
            room -= self.layers[l][j as usize].cost - self.layers[l][at[l] as usize].cost;
            at[l] = j;
        }
    }

    /// Total loss of the points `at`.
    pub(crate) fn loss(&self, at: &[u32]) -> f64 {
        self.layers.iter().zip(at).map(|(f, &j)| f[j as usize].loss).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(list: &[(u64, f64)]) -> Vec<Point> {
        list.iter().enumerate().map(|(i, &(cost, loss))| Point { cost, loss, id: i as u32 }).collect()
    }

    #[test]
    fn fronts_and_hulls() {
        // (2, 9) and (5, 4) dominated; (4, 4.5) above the segment (3, 5)-(6, 1); (3, 5) listed
        // twice.
        let front = pareto(points(&[(6, 1.0), (3, 5.0), (2, 9.0), (1, 9.0), (4, 4.5), (5, 4.5), (3, 5.0)]));
        assert_eq!(
            front.iter().map(|p| (p.cost, p.id)).collect::<Vec<_>>(),
            [(1, 3), (3, 1), (4, 4), (6, 0)]
        );
        assert_eq!(hull(&front), [0, 1, 3]);
    }

    #[test]
    fn relaxation_by_hand() {
        let f = Fronts::new([points(&[(0, 10.0), (4, 2.0)]), points(&[(0, 6.0), (2, 4.0), (4, 3.0)])]);
        for (budget, bound, price) in
            [(0, 16.0, 2.0), (2, 12.0, 2.0), (5, 7.0, 1.0), (7, 5.5, 0.5), (9, 5.0, 0.0)]
        {
            let r = f.relax(budget);
            assert_eq!((r.bound, r.price), (bound, price), "budget {budget}");
        }
    }
}
