//! The same problems as integer linear programs for HiGHS.
//!
//! Equation 3 (one group per layer) and equation 4 (fusion groups) of Q-Palette have one shape:
//! binary columns, each covering some layers; every layer covered exactly once; one row per budget.
//! HiGHS solves it by branch and cut and proves its gap; the paper uses SCIP for the same purpose.
//!
//! What we add around the solver:
//!
//! - Dominated columns are removed first; costs are divided by their greatest common divisor and
//!   losses scaled to a total near 1000, so that HiGHS's absolute tolerances (1e-6) are far below
//!   anything that matters. Feasibility of the answer is checked again on the caller's integers.
//! - With a short time limit HiGHS may end without any allocation. The own solver's answer is
//!   computed first (it takes milliseconds) and is returned if HiGHS has nothing better; bounds are
//!   combined likewise. It is not handed to HiGHS as a start, so that agreement of the two is
//!   evidence.
//! - Same input and seed, same answer, *unless the time limit strikes*: where HiGHS stops then
//!   depends on the machine.

use std::time::Duration;

use highs::{ColProblem, HighsModelStatus, Row, Sense};

use crate::error::AllocError;
use crate::exact::Effort;
use crate::fusion::{FusionProblem, FusionSolution};
use crate::lagrange::{cheapest_second, not_together, relax, solve_with};
use crate::problem::{Budget, Choice, Problem, Solution};

/// When HiGHS may stop, and with what it works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Wall-clock limit. Reaching it returns the best allocation with the gap proven so far.
    pub time: Duration,
    /// Threads; 1 is deterministic and usually fastest for problems of this size.
    pub threads: u32,
    /// Relative gap at which to stop.
    pub gap: f64,
    /// Seed of HiGHS's tie breaking.
    pub seed: u32,
}

impl Default for Limits {
    /// 60 s (the paper's limit), one thread, gap 1e-4, seed 0.
    ///
    /// The gap decides the time: on the Llama-3.1-8B instance with costs in bytes at 2.875 bits the
    /// linear relaxation is 1.1e-4 below the optimum, and proving it took 1.6 s at 1e-4, 3.8 s at
    /// 1e-5 and 31 s at 1e-6.
    fn default() -> Self {
        Self { time: Duration::from_secs(60), threads: 1, gap: 1e-4, seed: 0 }
    }
}

/// Solves a [`Problem`] with HiGHS.
///
/// # Errors
/// [`AllocError::Unreachable`] with the reachable range; [`AllocError::NotTogether`] when budgets
/// exclude each other (or nothing was found in time); [`AllocError::Highs`] when HiGHS refuses the
/// model.
pub fn solve_highs(problem: &Problem, limits: Limits) -> Result<Solution, AllocError> {
    problem.refuse_too_small()?;
    if problem.budgets().len() == 2 {
        cheapest_second(problem)?;
    }
    let own = solve_with(problem, Effort::default()).ok();
    let answer = raw(problem, limits)?;
    let relaxed = relax(problem).ok();
    let mut bound = answer.bound;
    let mut price = vec![0.0; problem.budgets().len()];
    if let Some(r) = relaxed {
        bound = bound.max(r.bound);
        price = r.price;
    }
    let found = answer.active.map(|active| {
        let mut choice = vec![0; problem.layers().len()];
        active.iter().for_each(|&(l, j)| choice[l] = j);
        problem.solution(choice, bound, price)
    });
    best(found.filter(|s| problem.feasible(&s.cost)), own, bound, |s| (s.loss, &mut s.lower_bound))
        .ok_or_else(|| not_together(problem))
}

/// Solves a [`FusionProblem`] with HiGHS.
///
/// # Errors
/// As [`solve_highs`], and [`AllocError::Uncovered`] when a layer has no partition.
pub fn solve_fusion_highs(problem: &FusionProblem, limits: Limits) -> Result<FusionSolution, AllocError> {
    let own = match problem.solve(Effort::default()) {
        Ok(s) => Some(s),
        Err(AllocError::NotTogether { .. } | AllocError::TooManyBudgets { .. }) => None,
        Err(e) => return Err(e),
    };
    let answer = raw_fusion(problem, limits)?;
    let found = answer.active.map(|active| problem.solution(active, answer.bound));
    best(found.filter(|s| problem.feasible(&s.cost)), own, answer.bound, |s| (s.loss, &mut s.lower_bound))
        .ok_or_else(|| problem.not_together())
}

/// HiGHS alone on equation 3; ids are (layer, choice).
fn raw(problem: &Problem, limits: Limits) -> Result<Answer, AllocError> {
    let mut columns = Vec::new();
    for (l, layer) in problem.layers().iter().enumerate() {
        for j in undominated(&layer.choices) {
            columns.push(Column { members: vec![l], choice: &layer.choices[j], id: (l, j) });
        }
    }
    run(problem.layers().len(), &columns, problem.budgets(), limits)
}

/// HiGHS alone on equation 4; ids are (group, choice).
fn raw_fusion(problem: &FusionProblem, limits: Limits) -> Result<Answer, AllocError> {
    let mut columns = Vec::new();
    for (g, group) in problem.groups().iter().enumerate() {
        for j in undominated(&group.choices) {
            columns.push(Column { members: group.members.clone(), choice: &group.choices[j], id: (g, j) });
        }
    }
    run(problem.layers().len(), &columns, problem.budgets(), limits)
}

/// The smaller loss, HiGHS's among equals, with `bound` as the proven bound of either (and the own
/// one if better). An infinite bound says that nothing fits: beside an allocation that does it is
/// an error within HiGHS's tolerances, and proves nothing.
fn best<S>(
    found: Option<S>,
    own: Option<S>,
    bound: f64,
    parts: impl Fn(&mut S) -> (f64, &mut f64),
) -> Option<S> {
    let bound = if bound == f64::INFINITY { f64::NEG_INFINITY } else { bound };
    let raise = |mut s: S, bound: f64| {
        let (loss, lower) = parts(&mut s);
        *lower = lower.max(bound).min(loss);
        s
    };
    match (found, own) {
        (Some(mut f), Some(mut o)) => {
            let (f_loss, o_loss) = (parts(&mut f).0, parts(&mut o).0);
            let o_bound = *parts(&mut o).1;
            Some(if o_loss < f_loss { raise(o, bound) } else { raise(f, o_bound) })
        }
        (Some(s), None) | (None, Some(s)) => Some(raise(s, bound)),
        (None, None) => None,
    }
}

struct Column<'a> {
    members: Vec<usize>,
    choice: &'a Choice,
    id: (usize, usize),
}

struct Answer {
    active: Option<Vec<(usize, usize)>>,
    bound: f64,
}

/// Indices of the choices that no other one matches in all costs and the loss (the first among
/// equals).
fn undominated(choices: &[Choice]) -> Vec<usize> {
    let covers = |a: &Choice, b: &Choice| a.loss <= b.loss && a.cost.iter().zip(&b.cost).all(|(x, y)| x <= y);
    let keep = |&j: &usize| {
        !choices
            .iter()
            .enumerate()
            .any(|(i, c)| i != j && covers(c, &choices[j]) && (i < j || !covers(&choices[j], c)))
    };
    (0..choices.len()).filter(keep).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn run(
    layers: usize,
    columns: &[Column<'_>],
    budgets: &[Budget],
    limits: Limits,
) -> Result<Answer, AllocError> {
    let unit: Vec<u64> =
        (0..budgets.len()).map(|k| columns.iter().fold(0, |g, c| gcd(g, c.choice.cost[k])).max(1)).collect();
    let magnitude: f64 = columns.iter().map(|c| c.choice.loss.abs()).sum::<f64>() / columns.len() as f64;
    let scale = if magnitude > 0.0 { 1000.0 / (magnitude * layers as f64) } else { 1.0 };

    let mut model = ColProblem::new();
    let cover: Vec<Row> = (0..layers).map(|_| model.add_row(1.0..=1.0)).collect();
    let limit: Vec<Row> =
        budgets.iter().zip(&unit).map(|(b, u)| model.add_row(..=(b.limit / u) as f64)).collect();
    for c in columns {
        let covers = c.members.iter().map(|&m| (cover[m], 1.0));
        let costs =
            limit.iter().zip(c.choice.cost.iter().zip(&unit)).map(|(&r, (&c, u))| (r, (c / u) as f64));
        let factors: Vec<(Row, f64)> = covers.chain(costs).collect();
        model.add_integer_column(c.choice.loss * scale, 0.0..=1.0, factors);
    }
    // HiGHS keeps one task executor per thread of the caller and refuses to change its size; a
    // thread of our own makes every call independent of what this thread, or other users of HiGHS
    // on it, did before.
    std::thread::scope(|scope| {
        scope
            .spawn(|| solve_model(model, columns, scale, limits))
            .join()
            .map_err(|_| AllocError::Highs { what: "the solver thread panicked".into() })?
    })
}

fn solve_model(
    model: ColProblem,
    columns: &[Column<'_>],
    scale: f64,
    limits: Limits,
) -> Result<Answer, AllocError> {
    let failed = |what: &str| AllocError::Highs { what: what.to_owned() };
    let mut model = model.try_optimise(Sense::Minimise).map_err(|_| failed("model refused"))?;
    model.make_quiet();
    let mut set = true;
    set &= model.try_set_option("time_limit", limits.time.as_secs_f64()).is_ok();
    set &= model.try_set_option("threads", limits.threads.max(1) as i32).is_ok();
    set &= model.try_set_option("parallel", if limits.threads > 1 { "on" } else { "off" }).is_ok();
    set &= model.try_set_option("random_seed", (limits.seed & 0x7fff_ffff) as i32).is_ok();
    set &= model.try_set_option("mip_rel_gap", limits.gap.max(0.0)).is_ok();
    set &= model.try_set_option("mip_abs_gap", 0.0).is_ok();
    if !set {
        return Err(failed("an option was refused"));
    }
    let solved = model.try_solve().map_err(|_| failed("solver failed"))?;
    if solved.status() == HighsModelStatus::Infeasible {
        return Ok(Answer { active: None, bound: f64::INFINITY });
    }
    let bound = solved.double_info_value(c"mip_dual_bound").map_or(f64::NEG_INFINITY, |b| b / scale);
    let bound = if bound.is_nan() { f64::NEG_INFINITY } else { bound };
    let has_solution = solved.primal_solution_status() == highs::HighsSolutionStatus::Feasible;
    let active = has_solution.then(|| {
        let values = solved.get_solution();
        columns.iter().zip(values.columns()).filter(|(_, v)| **v > 0.5).map(|(c, _)| c.id).collect()
    });
    Ok(Answer { active, bound })
}

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;

#[cfg(test)]
mod tests {
    //! HiGHS alone, without the safety net: a wrong model must not hide behind the own solver.

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::oracle::{brute_force, brute_force_fusion};
    use crate::problem::Layer;
    use crate::{Group, fusion};

    const TIGHT: Limits = Limits { time: Duration::from_secs(60), threads: 1, gap: 1e-9, seed: 0 };

    fn random_choices(rng: &mut ChaCha8Rng, n: usize, budgets: usize) -> Vec<Choice> {
        let one = |rng: &mut ChaCha8Rng| Choice {
            cost: (0..budgets).map(|_| rng.random_range(0..60)).collect(),
            loss: rng.random_range(0.0..1.0),
        };
        (0..n).map(|_| one(rng)).collect()
    }

    fn random_budgets(rng: &mut ChaCha8Rng, n: usize, layers: u64) -> Vec<Budget> {
        (0..n)
            .map(|k| Budget::new(format!("resource {k}"), rng.random_range(8 * layers..40 * layers)))
            .collect()
    }

    #[test]
    fn equals_brute_force() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let (mut solved, mut refused) = (0, 0);
        for case in 0..60 {
            let budgets = 1 + case % 3;
            let layers = (0..6)
                .map(|l| Layer { name: format!("l{l}"), choices: random_choices(&mut rng, 4, budgets) })
                .collect();
            let problem = Problem::new(layers, random_budgets(&mut rng, budgets, 6)).unwrap();
            let answer = raw(&problem, TIGHT).unwrap();
            match brute_force(&problem) {
                Ok(best) => {
                    let active = answer.active.expect("HiGHS missed a feasible allocation");
                    let mut choice = vec![usize::MAX; 6];
                    active.iter().for_each(|&(l, j)| choice[l] = j);
                    let (loss, cost) = problem.evaluate(&choice);
                    assert!(problem.feasible(&cost), "case {case}");
                    assert!((loss - best.loss).abs() < 1e-9, "case {case}: {loss} != {}", best.loss);
                    assert!(answer.bound <= loss + 1e-9 && answer.bound >= loss - 1e-6, "case {case}");
                    let s = solve_highs(&problem, TIGHT).unwrap();
                    assert!((s.loss - best.loss).abs() < 1e-9 && s.gap() < 1e-6, "case {case}");
                    solved += 1;
                }
                Err(_) => {
                    assert!(answer.active.is_none(), "case {case}");
                    assert!(solve_highs(&problem, TIGHT).is_err(), "case {case}");
                    refused += 1;
                }
            }
        }
        assert!(
            solved > 20 && refused > 5,
            "{solved} solved, {refused} refused: the cases are too one-sided"
        );
    }

    #[test]
    fn fusion_equals_brute_force() {
        // Three blocks of a pair and a lone layer, three schemes; up to two budgets.
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let (mut solved, mut refused) = (0, 0);
        for case in 0..30 {
            let budgets = 1 + case % 2;
            let mut groups = Vec::new();
            for b in 0..3 {
                for members in [fusion::subsets(&[3 * b, 3 * b + 1]), vec![vec![3 * b + 2]]].concat() {
                    groups.push(Group { members, choices: random_choices(&mut rng, 3, budgets) });
                }
            }
            let names = (0..9).map(|l| format!("l{l}")).collect();
            let problem = FusionProblem::new(names, groups, random_budgets(&mut rng, budgets, 7)).unwrap();
            let answer = raw_fusion(&problem, TIGHT).unwrap();
            match brute_force_fusion(&problem) {
                Ok(best) => {
                    let active = answer.active.expect("HiGHS missed a feasible partition");
                    let (loss, cost) = problem.evaluate(&active);
                    assert!(problem.feasible(&cost), "case {case}");
                    assert!((loss - best.loss).abs() < 1e-9, "case {case}: {loss} != {}", best.loss);
                    solved += 1;
                }
                Err(_) => {
                    assert!(answer.active.is_none(), "case {case}");
                    refused += 1;
                }
            }
        }
        assert!(
            solved > 10 && refused > 2,
            "{solved} solved, {refused} refused: the cases are too one-sided"
        );
    }

    #[test]
    fn a_wrong_infeasible_proves_nothing() {
        // (loss, lower bound) found by the own solver, where HiGHS says that nothing fits.
        let kept = best(None, Some((2.0, 1.5)), f64::INFINITY, |s| (s.0, &mut s.1));
        assert_eq!(kept, Some((2.0, 1.5)));
        let raised = best(None, Some((2.0, 1.5)), 1.75, |s| (s.0, &mut s.1));
        assert_eq!(raised, Some((2.0, 1.75)));
    }

    #[test]
    fn published_instance_alone() {
        let tcq = common::palette(&["tcq", "half"], 6..=20, false);
        for (bits, want) in [(2.25, 0.23941), (3.0, 0.09061), (4.25, 0.02302)] {
            let problem = common::memory_problem(&tcq, bits);
            let answer = raw(&problem, Limits { gap: 1e-5, ..TIGHT }).unwrap();
            let loss =
                answer.active.unwrap().iter().map(|&(l, j)| problem.layers()[l].choices[j].loss).sum::<f64>();
            let own = crate::solve(&problem).unwrap();
            assert!(own.gap() < 1e-12, "{bits}");
            assert!((loss - want).abs() < 1e-5, "{bits}: {loss}");
            assert!(
                own.loss <= loss && loss <= own.loss * (1.0 + 1e-5),
                "{bits}: own {} HiGHS {loss}",
                own.loss
            );
            assert!(answer.bound <= own.loss * (1.0 + 1e-9), "{bits}: HiGHS claims more than is possible");
        }
    }

    #[test]
    fn time_limit_keeps_an_answer_and_a_bound() {
        let all = common::palette(&["tcq", "half", "nuq", "vq"], 0..=40, false);
        let problem = common::memory_problem_bytes(&all, 2.875);
        let s = solve_highs(&problem, Limits { time: Duration::ZERO, ..TIGHT }).unwrap();
        assert!(problem.feasible(&s.cost) && s.gap() < 1e-6, "{}", s.gap());
    }
}
