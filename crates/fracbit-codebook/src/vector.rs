//! Nearest pair of a 2-D vector codebook.
//!
//! The plane is cut into `2^d x 2^d` cells over the bounding square of the codebook, and each cell
//! keeps the entries that are nearest to at least one of its points; a query looks up its cell and
//! compares those few. The squared distance to entry `c`, less the part that does not depend on
//! `c`, is twice the *score* `|c|^2 / 2 - x . c`, which is affine in `x`: if `c` scores worse than
//! `c'` at the four corners of a cell, it does so in the whole cell. This test, with the entry
//! nearest to the cell's centre as `c'`, prunes a quadtree from the root, so that a cell sees only
//! the survivors of its parent. It is exact: no entry that could win is ever dropped. Points
//! outside the square are compared with every entry.
//!
//! Scores are f64. Entries are f32 with at most 24 significant bits, hence their products with an
//! f32 weight are exact and the result is the true nearest entry up to the last bit of f64, for any
//! finite weight, however large.
//!
//! Cost: a Gaussian pair meets 1.1 (`vq-1.5`) to 2.8 (`vq-6`) candidates on average; 90 to 120
//! million weights a second on one core of an AMD EPYC (CPU time), at every size. The papers'
//! encoders compare with all entries (Q-Palette, `lib/codebook/vq_codebook.py`). Building takes O(n
//! log n), up to 25 ms for 4096 entries: for fewer than some thousand pairs plain search is cheaper
//! in all. Outliers beyond the square cost `n` scores each.

use crate::{Rounder, RounderError};
use fracbit_base::Family;
use fracbit_format::{BitWriter, Codebook, TILE};

/// Rounds every pair of neighbouring weights to the nearest entry of a 2-D codebook; a tie takes
/// the lowest code.
///
/// Finite weights of any size are rounded exactly; a pair that holds NaN takes code 0, a pair that
/// holds infinities some entry that is outermost in their direction.
#[derive(Clone, Debug)]
pub struct VectorRounder {
    book: Codebook,
    index: PairIndex,
}

impl VectorRounder {
    /// A rounder for `book`.
    ///
    /// # Errors
    /// When `book` is not of the vector family.
    pub fn new(book: Codebook) -> Result<Self, RounderError> {
        RounderError::check(Family::Vq, &book)?;
        let weight = |entry: i16| f64::from(f32::from(entry) * book.step());
        let (pairs, _) = book.entries().as_chunks::<2>();
        let index = PairIndex::new(pairs.iter().map(|pair| pair.map(weight)));
        Ok(Self { book, index })
    }

    /// Code of the entry nearest to `pair`.
    #[inline]
    #[must_use]
    pub fn nearest(&self, pair: [f32; 2]) -> u16 {
        self.index.nearest(pair)
    }
}

impl Rounder for VectorRounder {
    fn codebook(&self) -> &Codebook {
        &self.book
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let bytes = self.book.tile_bytes();
        assert_eq!(
            codes.len(),
            tiles.len() * bytes,
            "bytes of {} tiles of {}",
            tiles.len(),
            self.book.scheme()
        );
        let bits = u32::from(self.book.scheme().quarters() / 2);
        for (tile, code) in tiles.iter().zip(codes.chunks_exact_mut(bytes)) {
            let mut writer = BitWriter::new(code);
            tile.as_chunks().0.iter().for_each(|&pair| writer.push(self.nearest(pair), bits));
        }
    }
}

/// A point and half its squared norm.
#[derive(Clone, Copy, Debug)]
struct Site {
    at: [f64; 2],
    half_norm: f64,
}

impl Site {
    fn new(at: [f64; 2]) -> Self {
        Self { at, half_norm: (at[0] * at[0] + at[1] * at[1]) / 2.0 }
    }

    /// Half the squared distance to `x`, less `|x|^2 / 2`.
    #[inline]
    fn score(&self, x: [f64; 2]) -> f64 {
        self.half_norm - (x[0] * self.at[0] + x[1] * self.at[1])
    }
}

/// Exact nearest-neighbour search among up to 65536 points of the plane.
#[derive(Clone, Debug)]
pub(crate) struct PairIndex {
    sites: Vec<Site>,
    /// Half the side of the square, which is centred on the origin.
    reach: f64,
    cells_per_unit: f64,
    depth: u32,
    /// First and one past the last candidate of each cell; row-major, `2^depth` cells a row.
    cells: Vec<[u32; 2]>,
    /// Sites that may be nearest in a cell, ascending.
    members: Vec<u16>,
}

impl PairIndex {
    /// Levels of the quadtree: 16 cells or more per point, 16 x 16 at least, and 256 x 256 at most
    /// so that the table of cells (8 bytes each) stays in the second-level cache.
    fn depth(points: usize) -> u32 {
        (points.max(1).ilog2().div_ceil(2) + 2).clamp(4, 8)
    }

    pub(crate) fn new(points: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let sites: Vec<Site> = points.into_iter().map(Site::new).collect();
        assert!((1..=1 << 16).contains(&sites.len()), "1 to 65536 points, got {}", sites.len());
        let depth = Self::depth(sites.len());
        let reach = sites.iter().flat_map(|s| s.at).fold(0.0, |max: f64, v| max.max(v.abs()));
        let reach = if reach > 0.0 { reach } else { 1.0 };
        let mut index = Self {
            sites,
            reach,
            cells_per_unit: f64::from(1u32 << depth) / (2.0 * reach),
            depth,
            cells: vec![[0; 2]; 1 << (2 * depth)],
            members: Vec::new(),
        };
        let all: Vec<u16> = (0..=u16::MAX).take(index.sites.len()).collect();
        index.split(0, [0, 0], &all);
        index
    }

    /// Fills the cells below the square number `at` of `level` (side `2 reach / 2^level`), whose
    /// nearest sites are among `candidates`.
    fn split(&mut self, level: u32, at: [usize; 2], candidates: &[u16]) {
        #[expect(clippy::cast_precision_loss, reason = "at most 256 cells a side")]
        let low = at.map(|i| i as f64 * 2.0 * self.reach / f64::from(1u32 << level) - self.reach);
        let side = 2.0 * self.reach / f64::from(1u32 << level);
        let sites = &self.sites;
        let score = |c: u16, x: [f64; 2]| sites[usize::from(c)].score(x);
        let centre = low.map(|v| v + side / 2.0);
        let pivot = candidates.iter().copied().min_by(|&a, &b| score(a, centre).total_cmp(&score(b, centre)));
        let pivot = pivot.expect("every square has a nearest site");
        // The rim covers the rounding of a query's cell number, the slack that of scores (at most 2
        // reach^2).
        let (rim, slack) = (side * 1e-6, self.reach * self.reach * 1e-12);
        let (from, to) = (low.map(|v| v - rim), low.map(|v| v + side + rim));
        let corners = [from, [from[0], to[1]], [to[0], from[1]], to];
        let kept: Vec<u16> = candidates
            .iter()
            .copied()
            .filter(|&c| corners.iter().any(|&x| score(c, x) <= score(pivot, x) + slack))
            .collect();
        if level == self.depth || kept.len() == 1 {
            let count = |n: usize| u32::try_from(n).expect("fewer than 2^32 candidates");
            let start = count(self.members.len());
            self.members.extend(&kept);
            let range = [start, count(self.members.len())];
            let below = self.depth - level;
            for row in at[1] << below..(at[1] + 1) << below {
                self.cells[(row << self.depth) + (at[0] << below)..][..1 << below].fill(range);
            }
            return;
        }
        for child in [[0, 0], [1, 0], [0, 1], [1, 1]] {
            self.split(level + 1, [2 * at[0] + child[0], 2 * at[1] + child[1]], &kept);
        }
    }

    /// Sites to compare with for a point inside the square; none outside.
    #[inline]
    fn candidates(&self, x: [f64; 2]) -> &[u16] {
        if !(x[0].abs() <= self.reach && x[1].abs() <= self.reach) {
            return &[];
        }
        let last = (1usize << self.depth) - 1;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 256 inside the square"
        )]
        let [col, row] = x.map(|v| (((v + self.reach) * self.cells_per_unit) as usize).min(last));
        let [start, end] = self.cells[(row << self.depth) + col];
        &self.members[start as usize..end as usize]
    }

    /// Number of the point nearest to `pair`, the lowest of equally near ones.
    #[inline]
    pub(crate) fn nearest(&self, pair: [f32; 2]) -> u16 {
        let x = pair.map(f64::from);
        let candidates = self.candidates(x);
        let Some(&first) = candidates.first() else { return self.nearest_of_all(x) };
        let mut best = first;
        if candidates.len() > 1 {
            let mut least = f64::INFINITY;
            for &c in candidates {
                let score = self.sites[usize::from(c)].score(x);
                if score < least {
                    (least, best) = (score, c);
                }
            }
        }
        best
    }

    #[cold]
    fn nearest_of_all(&self, x: [f64; 2]) -> u16 {
        let mut best = (f64::INFINITY, 0);
        for (c, site) in (0..=u16::MAX).zip(&self.sites) {
            let score = site.score(x);
            if score < best.0 {
                best = (score, c);
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Gaussian pair meets few candidates, whatever the size of the book.
    #[test]
    fn cells_keep_few_candidates() {
        let sample = crate::train::gaussian_pairs(64, 1);
        for scheme in fracbit_base::Scheme::all().filter(|s| s.family() == Family::Vq) {
            let rounder = VectorRounder::new(crate::builtin(scheme).unwrap().clone()).unwrap();
            let met: usize =
                sample.iter().map(|&pair| rounder.index.candidates(pair.map(f64::from)).len()).sum();
            let mean = met as f64 / sample.len() as f64;
            assert!(mean < 4.0, "{scheme}: {mean} candidates a pair");
        }
    }
}
