//! Full enumeration: the judge of the other solvers on tiny instances.
//!
//! Exponential by intent and free of tricks, so that it can be checked by reading. At most [`MOST`]
//! combinations.

use crate::error::AllocError;
use crate::fusion::{FusionProblem, FusionSolution};
use crate::lagrange::not_together;
use crate::problem::{Problem, Solution};

/// Largest number of combinations tried.
pub const MOST: u64 = 20_000_000;

/// The optimum by trying every allocation; the first one in lexicographic order among equals.
///
/// # Errors
/// [`AllocError::TooLarge`] beyond [`MOST`] allocations; [`AllocError::NotTogether`] if none fits.
pub fn brute_force(problem: &Problem) -> Result<Solution, AllocError> {
    let combinations: f64 = problem.layers().iter().map(|l| l.choices.len() as f64).product();
    if combinations > MOST as f64 {
        return Err(AllocError::TooLarge { most: MOST, got: combinations });
    }
    let mut choice = vec![0; problem.layers().len()];
    let mut best: Option<(f64, Vec<usize>)> = None;
    loop {
        let (loss, cost) = problem.evaluate(&choice);
        if problem.feasible(&cost) && best.as_ref().is_none_or(|(b, _)| loss < *b) {
            best = Some((loss, choice.clone()));
        }
        // Odometer: the last layer turns fastest.
        let Some(l) = (0..choice.len()).rev().find(|&l| choice[l] + 1 < problem.layers()[l].choices.len())
        else {
            break;
        };
        choice[l] += 1;
        choice[l + 1..].fill(0);
    }
    let (loss, choice) = best.ok_or_else(|| not_together(problem))?;
    let price = vec![0.0; problem.budgets().len()];
    Ok(problem.solution(choice, loss, price))
}

/// The optimum of a fusion problem by trying every partition into groups and every choice of each
/// group.
///
/// # Errors
/// [`AllocError::TooLarge`] beyond [`MOST`] steps; [`AllocError::NotTogether`] if none fits.
pub fn brute_force_fusion(problem: &FusionProblem) -> Result<FusionSolution, AllocError> {
    struct Walk<'a> {
        problem: &'a FusionProblem,
        covered: Vec<bool>,
        active: Vec<(usize, usize)>,
        best: Option<(f64, Vec<(usize, usize)>)>,
        steps: u64,
    }
    impl Walk<'_> {
        fn visit(&mut self) {
            self.steps += 1;
            if self.steps > MOST {
                return;
            }
            let Some(layer) = self.covered.iter().position(|c| !c) else {
                let (loss, cost) = self.problem.evaluate(&self.active);
                if self.problem.feasible(&cost) && self.best.as_ref().is_none_or(|(b, _)| loss < *b) {
                    self.best = Some((loss, self.active.clone()));
                }
                return;
            };
            let problem = self.problem;
            for (g, group) in problem.groups().iter().enumerate() {
                if !group.members.contains(&layer) || group.members.iter().any(|&m| self.covered[m]) {
                    continue;
                }
                group.members.iter().for_each(|&m| self.covered[m] = true);
                for j in 0..group.choices.len() {
                    self.active.push((g, j));
                    self.visit();
                    self.active.pop();
                }
                group.members.iter().for_each(|&m| self.covered[m] = false);
            }
        }
    }
    let covered = vec![false; problem.layers().len()];
    let mut walk = Walk { problem, covered, active: Vec::new(), best: None, steps: 0 };
    walk.visit();
    if walk.steps > MOST {
        return Err(AllocError::TooLarge { most: MOST, got: walk.steps as f64 });
    }
    let (loss, active) = walk.best.ok_or_else(|| problem.not_together())?;
    Ok(problem.solution(active, loss))
}
