#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! | module | what | source |
//! | --- | --- | --- |
//! | [`ideal`] | optimal bits of an ideal Gaussian quantizer, closed form | Q-Palette, theorem 3.1 |
//! | [`gap`] | distance to that ideal, split into code and bit-width shares | appendix B |
//! | `problem` | [`Problem`], [`Solution`]: one choice per layer within budgets | equations 1 and 3 |
//! | `front`, `lagrange`, `exact` | [`relax`], [`greedy`], [`solve`]: the own solvers | see there |
//! | [`fusion`] | [`FusionProblem`]: also decide which layers share a kernel call | section 4.2, equation 4 |
//! | `ilp` | `solve_highs`, `solve_fusion_highs` (feature `highs`) | section 4 |
//! | [`oracle`] | brute force for tiny instances, the judge of all others | |
//!
//! Invariant: nothing here sees a tensor, a scheme or a clock (save HiGHS's time limit); plain
//! numbers in, indices out.

// The shared test instance names the crate as its users do.
#[cfg(test)]
extern crate self as fracbit_alloc;

mod error;
mod exact;
mod front;
pub mod fusion;
pub mod gap;
pub mod ideal;
#[cfg(feature = "highs")]
mod ilp;
mod lagrange;
pub mod oracle;
mod problem;

pub use error::AllocError;
pub use exact::Effort;
pub use fusion::{FusionProblem, FusionSolution, Group};
pub use gap::{Gap, Stored};
pub use ideal::{Ideal, LayerTerm, ideal_bits};
#[cfg(feature = "highs")]
pub use ilp::{Limits, solve_fusion_highs, solve_highs};
pub use lagrange::{Relaxation, greedy, relax, solve, solve_with};
pub use problem::{Budget, Choice, Layer, Problem, Reach, Solution};
