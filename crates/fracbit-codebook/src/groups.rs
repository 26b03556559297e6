//! Schemes whose groups of columns have a scale each: plain integers, and group-wise codebooks.
//!
//! A group is coded by the codebook, sign and scale that cost least. For each codebook and sign a
//! few scales around the one that maps the largest weight to the largest entry are tried; each is
//! improved by two rounds of nearest entries and least squares, `s = sum h w q / sum h q^2` (`h`:
//! the importance of a weight, `q`: its entry), which never raise the error. The winner's scale is
//! stored in half precision with the number of the codebook in its lowest bits
//! ([`Codebook::scale_of`]), and the codes are those nearest under the stored scale. A negative
//! scale mirrors a codebook, so that `C` codebooks serve as `2 C`.
//!
//! Source: Gope et al., "Highly Optimized Kernels and Fine-Grained Codebooks for LLM Inference on
//! Arm CPUs" (arXiv 2501.00032), section 5: groups scaled to the int8 range, a few small codebooks
//! shared by all layers. The search, the place of the codebook's number and the mirroring are our
//! own.

use fracbit_base::Family;
use fracbit_format::Codebook;
use half::f16;

/// Scales tried, relative to the one that just reaches the largest weight.
const REACH: [f32; 8] = [1.06, 0.98, 0.9, 0.83, 0.76, 0.69, 0.62, 0.55];

/// Weights side by side.
const LANES: usize = 8;

/// A coded group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouped {
    /// The scale, relative to the gain, with the codebook's number.
    pub scale: f16,
    /// Weighted squared error.
    pub error: f64,
}

/// Codes groups of weights.
#[derive(Clone, Debug)]
pub struct GroupCoder {
    book: Codebook,
    tables: Vec<Table>,
}

/// The codebook of a group times its scale.
#[derive(Clone, Copy, Debug)]
pub struct ScaledTable<'a> {
    table: &'a Table,
    factor: f32,
}

impl ScaledTable<'_> {
    /// The code of the value nearest to `x`, and the value.
    #[must_use]
    pub fn nearest(&self, x: f32) -> (u8, f32) {
        let place = if self.factor == 0.0 { 0 } else { self.table.nearest(x / self.factor) };
        (self.table.codes[place], self.factor * self.table.levels[place])
    }
}

/// One codebook, entries ascending.
#[derive(Clone, Debug)]
struct Table {
    levels: Vec<f32>,
    codes: Vec<u8>,
    /// Between neighbours, in the same unit as the levels.
    thresholds: Vec<f32>,
}

impl Table {
    fn new(entries: &[i16]) -> Self {
        let mut order: Vec<(i16, u8)> = entries.iter().copied().zip(0..=u8::MAX).collect();
        order.sort_unstable();
        order.dedup_by_key(|level| level.0);
        let levels: Vec<f32> = order.iter().map(|l| f32::from(l.0)).collect();
        let thresholds = levels.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
        Self { levels, codes: order.iter().map(|l| l.1).collect(), thresholds }
    }

    /// Place of the level nearest to `x`.
    fn nearest(&self, x: f32) -> usize {
        if self.thresholds.len() > 32 {
            return self.thresholds.partition_point(|&t| t <= x);
        }
        self.thresholds.iter().map(|&t| usize::from(t <= x)).sum()
    }

    /// Levels nearest to `weights / scale`: `[sum h w q, sum h q^2]`.
    ///
    /// A level is the lowest one plus the steps to all thresholds passed, which are exact integers:
    /// unlike a search for the place, this runs on vectors of weights.
    fn moments(&self, weights: &[f32], importance: Option<&[f32]>, scale: f32) -> [f64; 2] {
        let inverse = 1.0 / scale;
        let mut sums = [[0.0f64; LANES]; 2];
        for (at, weights) in (0..).step_by(LANES).zip(weights.chunks(LANES)) {
            let mut w = [0.0; LANES];
            w[..weights.len()].copy_from_slice(weights);
            let mut h = [0.0; LANES];
            match importance {
                Some(all) => h[..weights.len()].copy_from_slice(&all[at..][..weights.len()]),
                None => h[..weights.len()].fill(1.0),
            }
            let mut level = [self.levels[0]; LANES];
            for (threshold, pair) in self.thresholds.iter().zip(self.levels.windows(2)) {
                let step = pair[1] - pair[0];
                for (level, w) in level.iter_mut().zip(&w) {
                    *level += if *threshold <= w * inverse { step } else { 0.0 };
                }
            }
            for i in 0..LANES {
                let weight = f64::from(h[i]) * f64::from(level[i]);
                sums[0][i] += weight * f64::from(w[i]);
                sums[1][i] += weight * f64::from(level[i]);
            }
        }
        sums.map(|lanes| lanes.iter().sum())
    }
}

impl GroupCoder {
    /// A coder for `book`, of the family `int` or `gnuq`; `None` for any other.
    #[must_use]
    pub fn new(book: Codebook) -> Option<Self> {
        if !matches!(book.scheme().family(), Family::Int | Family::Gnuq) {
            return None;
        }
        let each = book.entries().len() / book.books();
        let tables = book.entries().chunks(each).map(Table::new).collect();
        Some(Self { book, tables })
    }

    /// The codebooks.
    #[must_use]
    pub const fn codebook(&self) -> &Codebook {
        &self.book
    }

    /// Writes the code of each weight and returns the group's scale: a weight becomes `gain *
    /// scale * step * entry`.
    ///
    /// `importance` holds a non-negative number for each weight (the diagonal of the Hessian of its
    /// column), or nothing when all count the same. A group of zeros gets the scale zero.
    ///
    /// # Panics
    /// When lengths differ or `gain` is not positive.
    pub fn encode(
        &self,
        weights: &[f32],
        importance: Option<&[f32]>,
        gain: f32,
        codes: &mut [u8],
    ) -> Grouped {
        assert_eq!(weights.len(), codes.len(), "a code for each weight");
        let h = |i: usize| importance.map_or(1.0, |h| h[i]);
        let scale = self.scale(weights, importance, gain);
        let at = self.at(scale, gain);
        let mut error = 0.0;
        for (i, (code, &w)) in codes.iter_mut().zip(weights).enumerate() {
            let value;
            (*code, value) = at.nearest(w);
            let rest = f64::from(w) - f64::from(value);
            error += f64::from(h(i)) * rest * rest;
        }
        Grouped { scale, error }
    }

    /// The scale that [`encode`](Self::encode) finds, with the number of its codebook.
    ///
    /// # Panics
    /// When `importance` has another length than `weights` or `gain` is not positive.
    #[must_use]
    pub fn scale(&self, weights: &[f32], importance: Option<&[f32]>, gain: f32) -> f16 {
        assert!(importance.is_none_or(|h| h.len() == weights.len()), "an importance for each weight");
        assert!(gain > 0.0, "gain should be positive, got {gain}");
        let (best, scale) = self.search(weights, importance);
        if scale == 0.0 {
            return f16::ZERO;
        }
        let stored = f16::from_f32((scale / (gain * self.book.step())).clamp(-65_504.0, 65_504.0));
        self.book.scale_of(stored, u8::try_from(best).expect("at most 16 codebooks"))
    }

    /// What weights become in a group of this scale.
    #[must_use]
    pub fn at(&self, scale: f16, gain: f32) -> ScaledTable<'_> {
        let table = &self.tables[usize::from(self.book.book_of(scale))];
        ScaledTable { table, factor: scale.to_f32() * (gain * self.book.step()) }
    }

    /// The best codebook and the scale of its entries; the first codebook and zero for a group of
    /// zeros.
    fn search(&self, weights: &[f32], importance: Option<&[f32]>) -> (usize, f32) {
        let largest = weights.iter().copied().fold(0.0f32, |m, w| if w.abs() > m.abs() { w } else { m });
        let mut best = (0, 0.0, 0.0);
        if largest == 0.0 {
            return (0, 0.0);
        }
        for (number, table) in self.tables.iter().enumerate() {
            for sign in [1.0f32, -1.0] {
                // The largest weight goes to the end of the codebook that is on its side.
                let end = if largest * sign < 0.0 { 0 } else { table.levels.len() - 1 };
                let full = largest / table.levels[end];
                if full * sign <= 0.0 || !full.is_finite() {
                    continue;
                }
                for reach in REACH {
                    let mut scale = full * reach;
                    let mut gained = 0.0;
                    for _ in 0..2 {
                        let [cross, own] = table.moments(weights, importance, scale);
                        if own == 0.0 || cross * f64::from(scale) <= 0.0 {
                            break;
                        }
                        #[expect(clippy::cast_possible_truncation, reason = "a scale of f32 weights")]
                        {
                            scale = (cross / own) as f32;
                        }
                        // sum h w^2 - error, at the best scale of these entries.
                        gained = cross * cross / own;
                    }
                    if gained > best.2 {
                        best = (number, scale, gained);
                    }
                }
            }
        }
        (best.0, best.1)
    }
}
