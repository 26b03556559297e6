//! Which schemes are worth choosing from for matrices of one shape: bits, error and time side by
//! side, and those that no other beats in all three (CodeGEMM, arXiv 2512.17970, figure 4).

use crate::{KernelOptions, kernels};
use fracbit_base::{Scheme, Shape};
use fracbit_format::SchemeSpec;
use fracbit_kernels::Kernels;
use fracbit_load::{Error, Progress};
use fracbit_plan::{Error as PlanError, storage::codebook_bytes};
use serde::Serialize;
use std::ops::RangeInclusive;

/// What to look at.
#[derive(Clone, Debug)]
pub struct ExploreOptions {
    /// Schemes to choose from; those outside the budget are left out.
    pub schemes: Vec<Scheme>,
    /// Stored bits per weight, codes, scales and codebook together.
    pub budget: RangeInclusive<f64>,
    /// Outputs by inputs of a matrix.
    pub shape: Shape,
    /// Tokens multiplied at once.
    pub batch: usize,
    /// Threads.
    pub threads: usize,
    /// Least bytes of distinct codes that are walked through; below 1 GiB caches may help.
    pub bytes: u64,
    /// Measurements of each.
    pub rounds: usize,
}

/// A scheme for matrices of the shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explored {
    /// Its name.
    pub scheme: String,
    /// Stored bits per weight: codes, scales and codebook.
    pub bits: f64,
    /// Mean squared error on Gaussian weights over their mean square.
    pub error: f64,
    /// Microseconds of a product, with the codes coming from memory.
    pub us: f64,
    /// Bytes of its codebook.
    pub table_bytes: u64,
    /// Whether no other scheme here is at least as good in bits, error and time, and better in one.
    pub frontier: bool,
}

/// Stored bits per weight of a matrix that brings its codebook along.
fn stored_bits(scheme: Scheme, shape: Shape) -> f64 {
    let spec = SchemeSpec::of(scheme);
    let bytes = spec.bytes(shape, spec.grouping).0 + codebook_bytes(scheme.tables());
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let bits = 8.0 * bytes as f64 / shape.len() as f64;
    bits
}

/// Looks at the schemes within the budget, from few bits to many.
///
/// # Errors
/// [`Error::Option`] where no scheme is within the budget, and what [`kernels`] refuses;
/// [`PlanError::NoErrorEntry`] for a scheme without a measured error.
pub fn explore(
    options: &ExploreOptions,
    installed: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<Explored>, Error> {
    let ExploreOptions { shape, batch, threads, bytes, rounds, .. } = *options;
    let bits = |&scheme: &Scheme| (scheme, stored_bits(scheme, shape));
    let mut chosen: Vec<(Scheme, f64)> =
        options.schemes.iter().map(bits).filter(|(_, bits)| options.budget.contains(bits)).collect();
    chosen.sort_by(|a, b| a.1.total_cmp(&b.1));
    if chosen.is_empty() {
        let (low, high) = (options.budget.start(), options.budget.end());
        let rule = format!("no scheme here stores a {shape} matrix in {low} to {high} bits per weight");
        return Err(Error::Option { option: "--budget", rule });
    }
    let measured = KernelOptions {
        shape,
        batch: vec![batch],
        threads: vec![threads],
        bytes,
        rounds,
        ..KernelOptions::new(chosen.iter().map(|(scheme, _)| *scheme).collect())
    };
    let speeds = kernels(&measured, installed, progress)?;
    let mut rows = Vec::with_capacity(chosen.len());
    for ((scheme, bits), speed) in chosen.into_iter().zip(speeds) {
        let error = fracbit_codebook::nmse(scheme).ok_or(PlanError::NoErrorEntry { scheme })?;
        #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
        let us = shape.len() as f64 / speed.gweights_per_s / 1e3;
        let table_bytes = codebook_bytes(scheme.tables());
        rows.push(Explored { scheme: scheme.to_string(), bits, error, us, table_bytes, frontier: false });
    }
    mark(&mut rows);
    Ok(rows)
}

/// Marks the rows that no other dominates.
fn mark(rows: &mut [Explored]) {
    let values = |row: &Explored| [row.bits, row.error, row.us];
    let dominates = |a: &Explored, b: &Explored| {
        let pairs = values(a).into_iter().zip(values(b));
        pairs.clone().all(|(a, b)| a <= b) && pairs.clone().any(|(a, b)| a < b)
    };
    let free: Vec<bool> = rows.iter().map(|row| !rows.iter().any(|other| dominates(other, row))).collect();
    for (row, free) in rows.iter_mut().zip(free) {
        row.frontier = free;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;

    #[test]
    fn the_frontier_is_what_nothing_dominates() {
        let row = |scheme: &str, bits, error, us| Explored {
            scheme: scheme.to_owned(),
            bits,
            error,
            us,
            table_bytes: 0,
            frontier: false,
        };
        let mut rows = vec![
            row("least error", 2.0, 0.06, 30.0),
            row("fastest", 2.0, 0.10, 10.0),
            row("worse than the fastest", 2.0, 0.11, 10.0),
            row("more bits, slower, closer", 3.0, 0.01, 40.0),
            row("equal to the fastest", 2.0, 0.10, 10.0),
            row("more bits for nothing", 2.5, 0.06, 30.0),
        ];
        mark(&mut rows);
        assert_eq!(
            rows.iter().map(|r| r.frontier).collect::<Vec<_>>(),
            [true, true, false, true, true, false]
        );
    }

    #[test]
    fn schemes_within_the_budget_are_measured() {
        let options = ExploreOptions {
            schemes: ["aq-m1v4", "vq-2", "tcq-fast-2", "tcq-4"].map(|s| s.parse().unwrap()).to_vec(),
            budget: 2.0..=2.6,
            shape: Shape::new(256, 1024),
            batch: 1,
            threads: 1,
            bytes: 1 << 18,
            rounds: 1,
        };
        let installed = fracbit_load::kernels().unwrap();
        let rows = explore(&options, &installed, &Quiet).unwrap();
        let names: Vec<&str> = rows.iter().map(|r| r.scheme.as_str()).collect();
        assert!(!names.contains(&"tcq-4") && names.contains(&"aq-m1v4"), "{names:?}");
        assert!(rows.iter().any(|r| r.frontier) && rows.iter().all(|r| r.us > 0.0 && r.error > 0.0));
        let aq = rows.iter().find(|r| r.scheme == "aq-m1v4").unwrap();
        // Codes of a byte for four weights, 16-bit scales of 256 rows, 256 entries of four weights.
        let want = 2.0 + 16.0 / 1024.0 + 8.0 * (2.0 * 1024.0 + 4.0) / (256.0 * 1024.0);
        assert!((aq.bits - want).abs() < 0.02, "{} beside {want}", aq.bits);
        let none = explore(&ExploreOptions { budget: 0.1..=0.2, ..options }, &installed, &Quiet);
        assert!(none.unwrap_err().to_string().starts_with("--budget: no scheme"));
    }
}
