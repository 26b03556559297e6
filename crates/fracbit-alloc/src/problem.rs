//! The question and the answer: layers with choices, budgets, and what a solver returns.
//!
//! One choice per layer, total loss as small as possible, total cost within every budget: the
//! multiple-choice knapsack of Q-Palette (section 4.1, equation 3; its memory-only form is equation
//! 1). Loss is any additive figure; the data-free one is `a_l · err(Q)` (section 2.1). Costs are
//! **integers** in a unit the caller picks (bytes, nanoseconds), one per budget: sums are exact, so
//! "within the budget" has one meaning for every solver and every machine.
//!
//! What a choice *is* (a scheme, a rate, a kernel) stays with the caller: answers are indices into
//! the given lists.

use serde::{Deserialize, Serialize};

use crate::error::AllocError;

/// One way to store one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Use of each resource, in the order of the problem's budgets.
    pub cost: Vec<u64>,
    /// What the model loses, in units that add up over layers. Finite; may be negative.
    pub loss: f64,
}

impl Choice {
    /// A choice for problems with a single budget.
    #[must_use]
    pub fn new(cost: u64, loss: f64) -> Self {
        Self { cost: vec![cost], loss }
    }
}

/// One layer and the ways it may be stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Name used in messages.
    pub name: String,
    /// At least one choice, in any order. The solvers sort out dominated ones.
    pub choices: Vec<Choice>,
}

/// An upper limit on the total use of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Name used in messages; say the unit (`"bytes"`, `"nanoseconds"`).
    pub name: String,
    /// Largest total allowed.
    pub limit: u64,
}

impl Budget {
    /// A limit on the resource `name`.
    pub fn new(name: impl Into<String>, limit: u64) -> Self {
        Self { name: name.into(), limit }
    }
}

/// What a resource's total can be: [`Problem::range`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// Total with the cheapest choice everywhere: a smaller budget is infeasible.
    pub min: u64,
    /// Total with the best choice everywhere (the cheaper one among equals): a larger budget buys
    /// nothing.
    pub max: u64,
}

/// A multiple-choice knapsack, checked at construction.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    layers: Vec<Layer>,
    budgets: Vec<Budget>,
}

impl Problem {
    /// Checks and keeps the parts.
    ///
    /// # Errors
    /// No layer, no budget, a layer without choices, a choice whose `cost` is not one number per
    /// budget, a loss that is not finite, a resource whose largest possible total does not fit
    /// `u64`.
    pub fn new(layers: Vec<Layer>, budgets: Vec<Budget>) -> Result<Self, AllocError> {
        if layers.is_empty() {
            return Err(AllocError::Empty { what: "layers" });
        }
        if budgets.is_empty() {
            return Err(AllocError::Empty { what: "budgets" });
        }
        for layer in &layers {
            check_choices(&layer.name, &layer.choices, budgets.len())?;
        }
        for (k, budget) in budgets.iter().enumerate() {
            let largest = |l: &Layer| l.choices.iter().map(|c| c.cost[k]).max().unwrap_or(0);
            if layers.iter().map(largest).try_fold(0u64, u64::checked_add).is_none() {
                return Err(AllocError::Overflow { budget: budget.name.clone() });
            }
        }
        Ok(Self { layers, budgets })
    }

    /// The layers, in the order of [`Solution::choice`].
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The budgets, in the order of [`Choice::cost`] and [`Solution::cost`].
    #[must_use]
    pub fn budgets(&self) -> &[Budget] {
        &self.budgets
    }

    /// Moves the limit of budget `k`, to solve the same layers again (a Pareto curve).
    ///
    /// # Panics
    /// When there is no budget `k`.
    pub fn set_limit(&mut self, k: usize, limit: u64) {
        self.budgets[k].limit = limit;
    }

    /// The reachable totals of resource `k`, other budgets ignored.
    ///
    /// # Panics
    /// When there is no budget `k`.
    #[must_use]
    pub fn range(&self, k: usize) -> Reach {
        let mut reach = Reach { min: 0, max: 0 };
        for layer in &self.layers {
            reach.min += layer.choices.iter().map(|c| c.cost[k]).min().unwrap_or(0);
            let best =
                layer.choices.iter().min_by(|a, b| a.loss.total_cmp(&b.loss).then(a.cost[k].cmp(&b.cost[k])));
            reach.max += best.map_or(0, |c| c.cost[k]);
        }
        reach
    }

    /// Refuses budgets outside [`Problem::range`], on both sides.
    ///
    /// The solvers refuse only what is too small: beside another budget a loose one is normal. A
    /// front end whose user asked for one size calls this first, so that an unreachable wish is
    /// answered with the range.
    ///
    /// # Errors
    /// [`AllocError::Unreachable`] for the first such budget.
    pub fn require_reachable(&self) -> Result<(), AllocError> {
        for (k, budget) in self.budgets.iter().enumerate() {
            let Reach { min, max } = self.range(k);
            if budget.limit < min || budget.limit > max {
                return Err(AllocError::Unreachable {
                    budget: budget.name.clone(),
                    asked: budget.limit,
                    min,
                    max,
                });
            }
        }
        Ok(())
    }

    /// Total loss and cost of `choice`, one index per layer.
    ///
    /// # Panics
    /// When `choice` has another length than the layers or an index is out of range.
    #[must_use]
    pub fn evaluate(&self, choice: &[usize]) -> (f64, Vec<u64>) {
        assert_eq!(choice.len(), self.layers.len(), "evaluate: one choice per layer");
        let mut loss = 0.0;
        let mut cost = vec![0; self.budgets.len()];
        for (layer, &j) in self.layers.iter().zip(choice) {
            let c = &layer.choices[j];
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

    /// The first half of feasibility: each budget alone can be met.
    pub(crate) fn refuse_too_small(&self) -> Result<(), AllocError> {
        for (k, budget) in self.budgets.iter().enumerate() {
            let Reach { min, max } = self.range(k);
            if budget.limit < min {
                return Err(AllocError::Unreachable {
                    budget: budget.name.clone(),
                    asked: budget.limit,
                    min,
                    max,
                });
            }
        }
        Ok(())
    }

    /// Builds the answer for `choice`; `lower_bound` may exceed the loss by rounding and is
    /// clipped.
    pub(crate) fn solution(&self, choice: Vec<usize>, lower_bound: f64, price: Vec<f64>) -> Solution {
        let (loss, cost) = self.evaluate(&choice);
        Solution { choice, loss, cost, lower_bound: lower_bound.min(loss), price }
    }
}

/// The rules of [`Problem::new`] for one list of choices.
pub(crate) fn check_choices(name: &str, choices: &[Choice], budgets: usize) -> Result<(), AllocError> {
    if choices.is_empty() {
        return Err(AllocError::NoChoice { layer: name.to_owned() });
    }
    for (index, choice) in choices.iter().enumerate() {
        if choice.cost.len() != budgets {
            let got = choice.cost.len();
            return Err(AllocError::CostLength { layer: name.to_owned(), choice: index, want: budgets, got });
        }
        if !choice.loss.is_finite() {
            return Err(AllocError::Loss { layer: name.to_owned(), choice: index, got: choice.loss });
        }
    }
    Ok(())
}

/// An allocation within every budget, and how good it is known to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Solution {
    /// Index into each layer's choices.
    pub choice: Vec<usize>,
    /// Total loss.
    pub loss: f64,
    /// Total use of each resource, in the order of the budgets.
    pub cost: Vec<u64>,
    /// No allocation within the budgets has a smaller loss (up to f64 rounding of the sums).
    pub lower_bound: f64,
    /// Lagrange multiplier of each budget: loss saved per further unit, the marginal price of a
    /// byte or nanosecond.
    pub price: Vec<f64>,
}

impl Solution {
    /// Proven relative gap, `(loss - lower_bound) / |loss|`; 0 when the solution is optimal.
    #[must_use]
    pub fn gap(&self) -> f64 {
        relative_gap(self.loss, self.lower_bound)
    }
}

/// `(loss - bound) / |loss|`, 0 for bounds that meet the loss.
pub(crate) fn relative_gap(loss: f64, bound: f64) -> f64 {
    let difference = (loss - bound).max(0.0);
    if difference == 0.0 { 0.0 } else { difference / loss.abs().max(f64::MIN_POSITIVE) }
}
