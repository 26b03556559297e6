//! Lagrangian bounds and greedy allocations for any number of budgets, and the own solver's front
//! door.
//!
//! Pricing budget k at `λ_k ≥ 0` per unit and dropping the limits lets every layer choose alone.
//! The value
//!
//! ```text
//! g(λ) = Σ_l min_j (loss_lj + Σ_k λ_k c_ljk) - Σ_k λ_k B_k
//! ```
//!
//! is a lower bound for every λ, concave, and largest where it equals the linear relaxation. One
//! budget is solved exactly by sorting (module `front`). Each further budget adds one line search
//! over its own price around the solution for the others: about 80 evaluations per extra budget, so
//! two budgets take tens of milliseconds at 224 layers × 16 choices, three take seconds.
//!
//! The allocation for several budgets is a heuristic: the layers' own choices at the best prices,
//! repaired until they fit, then improved by single moves. Its gap is proven but not closed; when
//! several budgets really bind, the integer program of `solve_highs` is the better tool, and this
//! one is its safety net. When only one of the budgets binds (the common case) the exact one-budget
//! solver finds and proves it.

use serde::{Deserialize, Serialize};

use crate::error::AllocError;
use crate::exact::{self, Effort};
use crate::front::{Fronts, Point};
use crate::problem::{Budget, Choice, Layer, Problem, Solution};

/// The Lagrangian dual of a problem: [`relax`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relaxation {
    /// No allocation within the budgets has a smaller loss.
    pub bound: f64,
    /// Loss per unit of each budget at that bound.
    pub price: Vec<f64>,
}

/// Largest Lagrangian lower bound (for one budget the exact optimum of the linear relaxation).
///
/// # Errors
/// [`AllocError::Unreachable`] when a budget is below what the cheapest choices use,
/// [`AllocError::NotTogether`] when the bound grows without limit, which proves that the budgets
/// exclude each other.
pub fn relax(problem: &Problem) -> Result<Relaxation, AllocError> {
    problem.refuse_too_small()?;
    let (bound, price) = dual(problem, problem.budgets().len()).ok_or_else(|| not_together(problem))?;
    Ok(Relaxation { bound, price })
}

/// A quick allocation by marginal gain: the rounding of [`relax`], filled up greedily.
///
/// # Errors
/// As [`relax`]; with several budgets also when the repair finds nothing that fits.
pub fn greedy(problem: &Problem) -> Result<Solution, AllocError> {
    let relaxed = relax(problem)?;
    if problem.budgets().len() == 1 {
        let fronts = Fronts::new(points(problem, &[]));
        let mut at = vec![0u32; fronts.layers.len()];
        let room = problem.budgets()[0].limit - fronts.base().0;
        fronts.greedy(&mut at, room, &vec![0; fronts.layers.len()], 0);
        let choice = fronts.layers.iter().zip(&at).map(|(f, &j)| f[j as usize].id as usize).collect();
        return Ok(problem.solution(choice, relaxed.bound, relaxed.price));
    }
    let choice = repaired(problem, &relaxed.price).ok_or_else(|| not_together(problem))?;
    Ok(problem.solution(choice, relaxed.bound, relaxed.price))
}

/// The own solver at its default effort: see [`solve_with`].
///
/// # Errors
/// As [`solve_with`].
pub fn solve(problem: &Problem) -> Result<Solution, AllocError> {
    solve_with(problem, Effort::default())
}

/// Solves without HiGHS. One budget: exact up to `effort` (see the module `exact`'s essay in the
/// crate documentation). Several budgets: exact if a single one binds, else a heuristic with a
/// proven gap.
///
/// # Errors
/// [`AllocError::Unreachable`] names the reachable range of the budget that cannot be met (with two
/// budgets: what the second can reach within the first); [`AllocError::NotTogether`] when three or
/// more budgets defeat the heuristic.
pub fn solve_with(problem: &Problem, effort: Effort) -> Result<Solution, AllocError> {
    problem.refuse_too_small()?;
    let k = problem.budgets().len();
    let mut bound = f64::NEG_INFINITY;
    for b in 0..k {
        let s = one_budget(problem, b, effort);
        bound = bound.max(s.lower_bound);
        if problem.feasible(&s.cost) {
            return Ok(s);
        }
    }
    // Two or more budgets bind. An allocation that fits is found exactly for two budgets,
    // heuristically beyond.
    let fallback = if k == 2 { Some(cheapest_second(problem)?) } else { None };
    let relaxed = relax(problem)?;
    bound = bound.max(relaxed.bound);
    let mut best: Option<Vec<usize>> = fallback;
    if let Some(choice) = &mut best {
        fill(problem, choice);
    }
    // The best prices leave ties and jumps; nearby prices repair into different allocations.
    for scale in [1.0, 0.97, 1.03, 0.9, 1.1, 0.75, 1.3] {
        let price: Vec<f64> = relaxed.price.iter().map(|p| p * scale).collect();
        if let Some(choice) = repaired(problem, &price)
            && best.as_ref().is_none_or(|b| problem.evaluate(&choice).0 < problem.evaluate(b).0)
        {
            best = Some(choice);
        }
    }
    let choice = best.ok_or_else(|| not_together(problem))?;
    Ok(problem.solution(choice, bound, relaxed.price))
}

/// The problem with budget `b` alone, solved by label search.
fn one_budget(problem: &Problem, b: usize, effort: Effort) -> Solution {
    let layers = problem.layers().iter().map(|l| layer_points(l, b, &[])).collect();
    let outcome = exact::solve(layers, problem.budgets()[b].limit, effort);
    let mut price = vec![0.0; problem.budgets().len()];
    price[b] = outcome.price;
    problem.solution(outcome.ids.iter().map(|&i| i as usize).collect(), outcome.bound, price)
}

/// Points (cost of resource `b`, loss plus the priced costs of the resources after it).
fn layer_points(layer: &Layer, b: usize, later: &[f64]) -> Vec<Point> {
    let priced =
        |c: &Choice| c.loss + later.iter().zip(&c.cost[b + 1..]).map(|(p, &c)| p * c as f64).sum::<f64>();
    let point = |(i, c): (usize, &Choice)| Point { cost: c.cost[b], loss: priced(c), id: i as u32 };
    layer.choices.iter().enumerate().map(point).collect()
}

fn points<'a>(problem: &'a Problem, later: &'a [f64]) -> impl Iterator<Item = Vec<Point>> + 'a {
    problem.layers().iter().map(move |l| layer_points(l, 0, later))
}

/// Maximises the dual over all prices; `None` if it is unbounded. Prices in the order of the
/// budgets.
fn dual(problem: &Problem, budgets: usize) -> Option<(f64, Vec<f64>)> {
    // `later` holds the prices already fixed by the outer line searches: those of budgets 1..,
    // innermost first.
    fn inner(problem: &Problem, open: usize, later: &[f64]) -> Option<(f64, Vec<f64>)> {
        if open == 1 {
            let paid: f64 = later.iter().zip(&problem.budgets()[1..]).map(|(p, b)| p * b.limit as f64).sum();
            let r = Fronts::new(points(problem, later)).relax(problem.budgets()[0].limit);
            return Some((r.bound - paid, vec![r.price]));
        }
        let b = open - 1;
        let at = |price: f64| {
            let mut fixed = vec![price];
            fixed.extend_from_slice(later);
            inner(problem, open - 1, &fixed).map(|(v, mut p)| {
                p.push(price);
                (v, p)
            })
        };
        // A concave function of one price: bracket by doubling, then golden sections.
        let spread = |f: &dyn Fn(&Choice) -> f64| -> f64 {
            let of = |l: &Layer| {
                let (lo, hi) = l
                    .choices
                    .iter()
                    .map(f)
                    .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, z), x| (a.min(x), z.max(x)));
                hi - lo
            };
            problem.layers().iter().map(of).sum()
        };
        let (losses, costs) = (spread(&|c| c.loss), spread(&|c| c.cost[b] as f64));
        // With equal losses any scale will do to see whether the bound is finite.
        let unit = if losses > 0.0 { losses / costs.max(1.0) } else { 1.0 };
        let mut best = at(0.0)?;
        let (mut lo, mut hi) = (0.0, unit / 64.0);
        let mut bracketed = false;
        for _ in 0..60 {
            let here = at(hi)?;
            // Growth below the rounding of the priced totals is none.
            let noise = 1e-13 * (best.0.abs() + hi * problem.budgets()[b].limit as f64);
            if here.0 <= best.0 + noise {
                bracketed = true;
                break;
            }
            best = here;
            lo = hi / 2.0;
            hi *= 2.0;
        }
        if !bracketed {
            return None;
        }
        let ratio = (5.0_f64.sqrt() - 1.0) / 2.0;
        let (mut x, mut y) = (hi - ratio * (hi - lo), lo + ratio * (hi - lo));
        let (mut fx, mut fy) = (at(x)?, at(y)?);
        for _ in 0..48 {
            if fx.0 > fy.0 {
                (hi, y, fy) = (y, x, fx);
                x = hi - ratio * (hi - lo);
                fx = at(x)?;
            } else {
                (lo, x, fx) = (x, y, fy);
                y = lo + ratio * (hi - lo);
                fy = at(y)?;
            }
        }
        for f in [fx, fy] {
            if f.0 > best.0 {
                best = f;
            }
        }
        Some(best)
    }
    inner(problem, budgets, &[])
}

/// Each layer's own choice at `price`, moved until it fits and then filled up.
fn repaired(problem: &Problem, price: &[f64]) -> Option<Vec<usize>> {
    let priced = |c: &Choice| c.loss + c.cost.iter().zip(price).map(|(&c, p)| p * c as f64).sum::<f64>();
    let mut choice: Vec<usize> = problem
        .layers()
        .iter()
        .map(|l| {
            (0..l.choices.len())
                .min_by(|&a, &b| priced(&l.choices[a]).total_cmp(&priced(&l.choices[b])))
                .unwrap_or(0)
        })
        .collect();
    let excess = |cost: &[u64]| -> f64 {
        let over = |(c, b): (&u64, &Budget)| c.saturating_sub(b.limit) as f64 / b.limit.max(1) as f64;
        cost.iter().zip(problem.budgets()).map(over).sum()
    };
    let (_, mut cost) = problem.evaluate(&choice);
    while !problem.feasible(&cost) {
        let now = excess(&cost);
        let mut best: Option<(f64, usize, usize)> = None;
        for (l, layer) in problem.layers().iter().enumerate() {
            let here = &layer.choices[choice[l]];
            for (j, there) in layer.choices.iter().enumerate() {
                let relief = now - excess(&moved(&cost, here, there));
                if relief > 0.0 {
                    // Harm per relief; a move may even be free.
                    let harm = (priced(there) - priced(here)).max(0.0) / relief;
                    if best.is_none_or(|(h, ..)| harm < h) {
                        best = Some((harm, l, j));
                    }
                }
            }
        }
        let (_, l, j) = best?;
        cost = moved(&cost, &problem.layers()[l].choices[choice[l]], &problem.layers()[l].choices[j]);
        choice[l] = j;
    }
    fill(problem, &mut choice);
    Some(choice)
}

/// Total cost after exchanging one choice.
fn moved(cost: &[u64], from: &Choice, to: &Choice) -> Vec<u64> {
    cost.iter().zip(from.cost.iter().zip(&to.cost)).map(|(t, (f, n))| t - f + n).collect()
}

/// Single moves that fit and lower the loss, largest saving first, until none is left.
fn fill(problem: &Problem, choice: &mut [usize]) {
    let (_, mut cost) = problem.evaluate(choice);
    loop {
        let mut best: Option<(f64, usize, usize)> = None;
        for (l, layer) in problem.layers().iter().enumerate() {
            let here = &layer.choices[choice[l]];
            for (j, there) in layer.choices.iter().enumerate() {
                let gain = here.loss - there.loss;
                if gain > 0.0
                    && best.is_none_or(|(g, ..)| gain > g)
                    && problem.feasible(&moved(&cost, here, there))
                {
                    best = Some((gain, l, j));
                }
            }
        }
        let Some((_, l, j)) = best else { return };
        cost = moved(&cost, &problem.layers()[l].choices[choice[l]], &problem.layers()[l].choices[j]);
        choice[l] = j;
    }
}

/// The least use of the second resource within the first budget: a feasible start, or the proof
/// that there is none.
pub(crate) fn cheapest_second(problem: &Problem) -> Result<Vec<usize>, AllocError> {
    let layers: Vec<Vec<Point>> = problem
        .layers()
        .iter()
        .map(|l| {
            let point =
                |(i, c): (usize, &Choice)| Point { cost: c.cost[0], loss: c.cost[1] as f64, id: i as u32 };
            l.choices.iter().enumerate().map(point).collect()
        })
        .collect();
    let outcome = exact::solve(layers, problem.budgets()[0].limit, Effort { gap: 0.0, labels: 1 << 16 });
    let choice: Vec<usize> = outcome.ids.iter().map(|&i| i as usize).collect();
    let (_, cost) = problem.evaluate(&choice);
    let budget = &problem.budgets()[1];
    if cost[1] <= budget.limit {
        return Ok(choice);
    }
    if outcome.bound <= budget.limit as f64 {
        return Err(not_together(problem));
    }
    let max = problem.range(1).max.max(cost[1]);
    Err(AllocError::Unreachable { budget: budget.name.clone(), asked: budget.limit, min: cost[1], max })
}

pub(crate) fn not_together(problem: &Problem) -> AllocError {
    let list: Vec<String> = problem.budgets().iter().map(|b| format!("`{}` {}", b.name, b.limit)).collect();
    AllocError::NotTogether { budgets: list.join(", ") }
}
