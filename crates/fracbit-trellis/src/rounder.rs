//! The search as a [`Rounder`].

use crate::{
    books,
    cells::{self, CellScratch, CellSearch},
    classes::{ClassScratch, ClassSearch},
    effort::Effort,
    isa::Isa,
    metric::Metric,
    rows::{RowScratch, RowSearch},
    search::{Scratch, Search},
};
use fracbit_base::{Code, Scheme};
use fracbit_codebook::Rounder;
use fracbit_format::{
    BitWriter, Codebook, TILE,
    trellis::{self, STATES, Steps},
};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Weights on either side of the seam that the free pass looks at.
pub(crate) const REACH: usize = 128;
/// Tiles that one task encodes: enough to hide the hand-over, few enough for a short call to use
/// all threads.
const TASK: usize = 4;

/// Codes tiles with one trellis codebook by tail-biting Viterbi search.
#[derive(Debug)]
pub struct TrellisRounder {
    codebook: Codebook,
    steps: Steps,
    metric: Metric,
    search: Search,
    pruned: Option<Pruned>,
    pool: Mutex<Vec<(Scratch, PrunedScratch)>>,
}

/// A search that is tried before the exact one.
#[derive(Debug)]
enum Pruned {
    Cells(Box<CellSearch>),
    Classes(Box<ClassSearch>),
    RowPruning(Box<RowSearch>),
}

/// Working memory of the pruned searches; that of all but one stays empty.
#[derive(Debug, Default)]
struct PrunedScratch {
    cells: CellScratch,
    classes: ClassScratch,
    rows: RowScratch,
}

/// The exact search as numbers: see the crate's README.
#[derive(Clone, Debug)]
pub struct SearchParts {
    /// Weights of a step.
    pub weights: usize,
    /// Doublings of a difference before it is squared.
    pub doublings: u32,
    /// Steps on either side of the seam that the free pass looks at.
    pub reach: usize,
    /// Grid values of all states, (weights, states).
    pub values: Vec<i16>,
}

/// The rounder of a trellis scheme with its built-in codebook; `None` for every family but `tcq`.
#[must_use]
pub fn rounder(scheme: Scheme, effort: Effort) -> Option<TrellisRounder> {
    books::builtin(scheme).cloned().map(|book| TrellisRounder::new(book, effort))
}

impl TrellisRounder {
    /// A rounder on the widest instruction set of this machine.
    ///
    /// # Panics
    /// When `codebook` is not of a `tcq` scheme.
    #[must_use]
    pub fn new(codebook: Codebook, effort: Effort) -> Self {
        Self::with_isa(codebook, effort, Isa::detect())
    }

    /// A rounder on a given instruction set, for tests and measurements: the bytes are the same on
    /// all.
    ///
    /// # Panics
    /// When `codebook` is not of a `tcq` scheme or this machine lacks the instructions.
    #[must_use]
    pub fn with_isa(codebook: Codebook, effort: Effort, isa: Isa) -> Self {
        let scheme = codebook.scheme();
        let (Some(steps), Some(code)) = (Steps::of(scheme), scheme.code()) else {
            panic!("trellis rounder: `codebook` should be of a tcq scheme, got {scheme}");
        };
        let largest = codebook.entries().iter().map(|e| e.unsigned_abs()).max().unwrap_or(0);
        let metric = Metric::new(scheme, f32::from(largest) * codebook.step());
        let mut values = Vec::with_capacity(STATES * steps.weights);
        for state in 0..=u16::MAX {
            let integers = trellis::state_values(scheme, codebook.entries(), state);
            values.extend(
                integers[..steps.weights].iter().map(|&v| metric.grid(f32::from(v) * codebook.step())),
            );
        }
        let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
        let bound = scheme.rate().gaussian_bound();
        let pruned = if code == Code::Fine {
            let cells =
                |pruning| CellSearch::new(isa, shifts.clone(), &values, cells::unit(metric, bound), pruning);
            let classes = |classes| ClassSearch::new(isa, metric, shifts.clone(), &values, bound, classes);
            let by_class = effort.classes(scheme).map(|some| Pruned::Classes(Box::new(classes(some))));
            by_class.or_else(|| effort.pruning(scheme).map(|some| Pruned::Cells(Box::new(cells(some)))))
        } else {
            let rows = |rows| RowSearch::new(isa, metric, steps.weights, &shifts, &values, bound, rows);
            effort.rows(scheme).map(|some| Pruned::RowPruning(Box::new(rows(some))))
        };
        let search = Search::new(isa, metric, steps.weights, shifts, &values, REACH / steps.weights);
        Self { codebook, steps, metric, search, pruned, pool: Mutex::default() }
    }

    /// What a search on another device needs to find the bytes of [`Effort::Exact`].
    #[must_use]
    pub fn parts(&self) -> SearchParts {
        let weights = self.steps.weights;
        let mut values = vec![0; STATES * weights];
        for state in 0..=u16::MAX {
            let integers = trellis::state_values(self.codebook.scheme(), self.codebook.entries(), state);
            for (i, &v) in integers[..weights].iter().enumerate() {
                values[i * STATES + usize::from(state)] =
                    self.metric.grid(f32::from(v) * self.codebook.step());
            }
        }
        SearchParts { weights, doublings: self.metric.doublings, reach: REACH / weights, values }
    }

    /// Weights as the search sees them: integers of the grid of [`SearchParts::values`].
    #[must_use]
    pub fn grid(&self, tile: &[f32; TILE]) -> [i16; TILE] {
        tile.map(|w| self.metric.grid(w))
    }

    fn encode_tile(&self, tile: &[f32; TILE], code: &mut [u8], scratch: &mut (Scratch, PrunedScratch)) {
        debug_assert!(tile.iter().all(|w| w.is_finite()), "weights are finite by the driver's contract");
        let x = tile.map(|w| self.metric.grid(w));
        let (exact, pruned) = scratch;
        let found = match &self.pruned {
            Some(Pruned::Cells(search)) => search.run(&x, &mut pruned.cells, &mut exact.states),
            Some(Pruned::Classes(search)) => search.run(&x, &mut pruned.classes, &mut exact.states),
            Some(Pruned::RowPruning(search)) => search.run(&x, &mut pruned.rows, &mut exact.states),
            None => false,
        };
        if !found {
            self.search.run(&x, exact);
        }
        let mut writer = BitWriter::new(code);
        for (t, state) in exact.states.iter().enumerate() {
            let shift = self.steps.shift(t);
            writer.push(state & ((1 << shift) - 1), shift);
        }
    }
}

impl Rounder for TrellisRounder {
    fn codebook(&self) -> &Codebook {
        &self.codebook
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let bytes = self.codebook.tile_bytes();
        assert_eq!(codes.len(), tiles.len() * bytes, "codes of {} tiles", tiles.len());
        tiles.par_chunks(TASK).zip(codes.par_chunks_mut(TASK * bytes)).for_each(|(tiles, codes)| {
            // A panic elsewhere leaves only working memory behind, which every search overwrites.
            let lock = || self.pool.lock().unwrap_or_else(PoisonError::into_inner);
            let mut scratch = lock().pop().unwrap_or_default();
            for (tile, code) in tiles.iter().zip(codes.chunks_exact_mut(bytes)) {
                self.encode_tile(tile, code, &mut scratch);
            }
            lock().push(scratch);
        });
    }
}
