//! Products of matrices whose factors are rounded to bf16, summed in f32.
//!
//! For work that needs no more than eight bits of a factor, such as gradients: processors with such
//! products do two of them for one of f32. Sums are not those of the reference bit for bit: each
//! microkernel adds in the order of its instructions. Relative to the sum of the magnitudes of k
//! products, they are off by no more than `(k + 1) 2^-23`, and rounding the factors costs `2^-8` at
//! most, `2^-9` for each.
//!
//! The right factor, (inner, cols), is packed into panels of [`COLS`] columns, two rows side by
//! side in a [`Pair`]; the left one is rounded row by row. Everything behind the last row or column
//! is zero.

use super::Vectors;
use crate::Team;
use std::ops::Range;

/// Rows of a tile of outputs.
pub const ROWS: usize = 8;
/// Columns of a tile: 24 vectors of sixteen sums stay in registers.
pub const COLS: usize = 48;
/// Columns that are packed together: the rows, which come from further away, meet two panels.
pub const WIDTH: usize = 2 * COLS;
/// Pairs that a tile sums up at a time: the panels of so many, 192 KiB, stay in a second-level
/// cache.
const DEPTH: usize = 512;
/// Pairs of a row that are turned into a column together, for the lines that they are written to
/// stay in the cache.
const PACKED: usize = 16;

/// Two bf16 numbers, neighbours along the inner dimension; the first in the low half.
pub type Pair = u32;

/// A tile of outputs.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// ([`ROWS`], pairs), `stride` elements from a row to the next.
    pub rows: &'a [Pair],
    /// Elements from a row to the next.
    pub stride: usize,
    /// (pairs, [`COLS`])
    pub panel: &'a [Pair],
}

/// A microkernel of [`Vectors::bf16_tile`].
pub type TileFn = unsafe fn(&Tile<'_>, &mut [[f32; COLS]; ROWS]);

/// `x` as bf16, to nearest and even; NaN stays NaN.
#[inline(always)]
fn round(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { nearest }
}

#[inline(always)]
fn pair(first: f32, second: f32) -> Pair {
    round(first) | round(second) << 16
}

/// Neighbours of a row in pairs, the last with a zero where there is an odd one.
#[inline(always)]
fn pack(row: &[f32], to: &mut [Pair]) {
    let (whole, rest) = row.as_chunks::<2>();
    to.iter_mut().zip(whole).for_each(|(to, &[a, b])| *to = pair(a, b));
    if let [last] = *rest {
        to[whole.len()] = pair(last, 0.0);
    }
}

/// The two numbers of a pair.
fn parts(pair: Pair) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// The reference of [`Vectors::bf16_tile`].
pub(super) fn tile(args: &Tile<'_>, out: &mut [[f32; COLS]; ROWS]) {
    for (row, out) in out.iter_mut().enumerate() {
        out.fill(0.0);
        for (&x, panel) in args.rows[row * args.stride..].iter().zip(args.panel.chunks_exact(COLS)) {
            let x = parts(x);
            for (out, &w) in out.iter_mut().zip(panel) {
                let w = parts(w);
                *out += x[0] * w[0] + x[1] * w[1];
            }
        }
    }
}

/// The left factor of a product, rounded.
#[derive(Clone, Debug)]
pub struct Rows {
    count: usize,
    depth: usize,
    pairs: Vec<Pair>, // (count, depth), the count a multiple of ROWS
}

impl Rows {
    /// Of `x`, (count, inner).
    ///
    /// # Panics
    /// When it is not whole rows.
    #[must_use]
    pub fn of(team: &Team<'_>, x: &[f32], inner: usize) -> Self {
        assert!(inner > 0 && x.len().is_multiple_of(inner), "rows of {inner}");
        let depth = inner.div_ceil(2);
        let mut pairs = vec![0; (x.len() / inner).next_multiple_of(ROWS) * depth];
        let mut rows: Vec<_> = pairs.chunks_exact_mut(depth).zip(x.chunks_exact(inner)).collect();
        team.chunks(&mut rows, ROWS, |_, rows| {
            rows.iter_mut().for_each(|(to, x)| pack(x, to));
        });
        Self { count: x.len() / inner, depth, pairs }
    }

    /// Of the transpose of `x`, (inner, count).
    ///
    /// # Panics
    /// When it is not whole rows.
    #[must_use]
    pub fn of_transposed(team: &Team<'_>, x: &[f32], count: usize) -> Self {
        assert!(count > 0 && !x.is_empty() && x.len().is_multiple_of(count), "rows of {count}");
        let depth = (x.len() / count).div_ceil(2);
        let mut pairs = vec![0; count.next_multiple_of(ROWS) * depth];
        team.chunks(&mut pairs, PACKED * depth, |at, pairs| {
            let columns = at * PACKED..count.min((at + 1) * PACKED);
            for (at, rows) in x.chunks(2 * count).enumerate() {
                let (first, second) = rows.split_at(count);
                for (to, column) in pairs.chunks_exact_mut(depth).zip(columns.clone()) {
                    to[at] = pair(first[column], second.get(column).copied().unwrap_or(0.0));
                }
            }
        });
        Self { count, depth, pairs }
    }

    /// Rows.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }
}

/// Some columns of the right factor, at most [`WIDTH`].
#[derive(Clone, Debug, Default)]
pub struct Panels {
    pairs: Vec<Pair>, // (panel, pairs, COLS)
}

impl Panels {
    /// Takes the columns `columns` of a row-major matrix, (inner, cols).
    ///
    /// # Panics
    /// When there are no such columns, or too many of them.
    pub fn set(&mut self, weights: &[f32], cols: usize, columns: Range<usize>) {
        assert!(weights.len().is_multiple_of(cols) && columns.len() <= WIDTH, "panels: whole rows");
        let depth = (weights.len() / cols).div_ceil(2);
        for (at, panel) in self.room(depth, columns.len()) {
            let columns = columns.start + at * COLS..columns.end.min(columns.start + at * COLS + COLS);
            for (out, rows) in panel.chunks_exact_mut(COLS).zip(weights.chunks(2 * cols)) {
                let (first, second) = rows.split_at(cols);
                let first = &first[columns.clone()];
                if second.is_empty() {
                    out.iter_mut().zip(first).for_each(|(out, &a)| *out = pair(a, 0.0));
                } else {
                    let both = first.iter().zip(&second[columns.clone()]);
                    out.iter_mut().zip(both).for_each(|(out, (&a, &b))| *out = pair(a, b));
                }
            }
        }
    }

    /// Takes the rows of a row-major matrix, (at most [`WIDTH`], inner), as columns.
    ///
    /// # Panics
    /// When they are not whole rows, or too many.
    pub fn set_transposed(&mut self, weights: &[f32], inner: usize) {
        let count = weights.len() / inner;
        assert!(weights.len() == count * inner && count <= WIDTH, "panels: whole rows");
        for (at, panel) in self.room(inner.div_ceil(2), count) {
            let rows = weights[at * COLS * inner..].chunks_exact(inner).take(COLS);
            // Rounded in vectors, then turned.
            let mut block = [[0; PACKED]; COLS];
            for (part, panel) in panel.chunks_mut(PACKED * COLS).enumerate() {
                let columns = part * 2 * PACKED..inner.min((part + 1) * 2 * PACKED);
                block.iter_mut().zip(rows.clone()).for_each(|(to, row)| pack(&row[columns.clone()], to));
                for (at, to) in panel.chunks_exact_mut(COLS).enumerate() {
                    to.iter_mut().zip(&block).for_each(|(to, from)| *to = from[at]);
                }
            }
        }
    }

    /// Panels of zeros, and their places.
    fn room(&mut self, depth: usize, columns: usize) -> impl Iterator<Item = (usize, &mut [Pair])> {
        self.pairs.clear();
        self.pairs.resize(depth * COLS * columns.div_ceil(COLS), 0);
        self.pairs.chunks_exact_mut((depth * COLS).max(1)).enumerate()
    }

    /// The product of some of `rows`, from a multiple of [`ROWS`] on, and these columns, in parts:
    /// `add` gets a row, a column and the sums of a part from there on, which count as far as there
    /// are columns.
    ///
    /// # Panics
    /// When the inner dimensions differ, or there are no such rows.
    pub fn product(
        &self,
        vectors: &Vectors,
        rows: &Rows,
        some: Range<usize>,
        mut add: impl FnMut(usize, usize, &[f32; COLS]),
    ) {
        assert!(some.start.is_multiple_of(ROWS) && some.end <= rows.count, "rows of {}", rows.count);
        let depth = rows.depth;
        assert!(self.pairs.len().is_multiple_of(depth * COLS), "panels: {depth} pairs in a row");
        let mut sums = [[0.0; COLS]; ROWS];
        for first in (0..depth).step_by(DEPTH) {
            let pairs = DEPTH.min(depth - first);
            for strip in some.start / ROWS..some.end.div_ceil(ROWS) {
                let of_strip = &rows.pairs[strip * ROWS * depth + first..];
                for (at, panel) in self.pairs.chunks_exact(depth * COLS).enumerate() {
                    let panel = &panel[first * COLS..][..pairs * COLS];
                    vectors.bf16_tile(&Tile { rows: of_strip, stride: depth, panel }, &mut sums);
                    for (row, sums) in (strip * ROWS..some.end).zip(&sums) {
                        add(row, at * COLS, sums);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn rounding_is_that_of_bf16() {
        let odd =
            [0.0, -0.0, 1.0, 1.003_906_3, 1.011_718_8, f32::MAX, f32::MIN_POSITIVE / 3.0, f32::INFINITY];
        for x in odd.into_iter().flat_map(|x| [x, -x, f32::from_bits(x.to_bits().wrapping_add(0x7fff))]) {
            let want = bf16::from_f32(x);
            if x.is_nan() {
                assert!(parts(round(x))[0].is_nan());
            } else {
                assert_eq!(round(x), u32::from(want.to_bits()), "{x}");
            }
        }
        for bits in [0x7f80_0001, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff] {
            assert!(parts(round(f32::from_bits(bits)))[0].is_nan(), "{bits:x}");
        }
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn products_are_those_of_the_rounded_factors() {
        let value = |seed: usize| ((seed * 7919 + 13) % 4001) as f32 / 1000.0 - 2.0;
        let rounded = |x: f32| f64::from(bf16::from_f32(x).to_f32());
        for (count, inner, cols) in
            [(0, 3, 4), (1, 1, 1), (3, 2, 48), (8, 33, 49), (9, 64, 96), (17, 1031, 5), (2, 5, 0)]
        {
            let x: Vec<f32> = (0..count * inner).map(value).collect();
            // These columns, beside two others.
            let wide: Vec<f32> = (0..inner * (cols + 2)).map(|i| value(i + 77)).collect();
            let at = |i: usize, col: usize| wide[i * (cols + 2) + col + 1];
            let turned: Vec<f32> = (0..cols * inner).map(|i| at(i % inner, i / inner)).collect();
            let (mut panels, mut other) = (Panels::default(), Panels::default());
            panels.set(&wide, cols + 2, 1..cols + 1);
            other.set_transposed(&turned, inner);
            assert_eq!(panels.pairs, other.pairs, "{count} {inner} {cols}");
            let rows = Rows::of(&Team::alone(), &x, inner);
            if count > 0 {
                let turned: Vec<f32> = (0..x.len()).map(|i| x[i % count * inner + i / count]).collect();
                let turned = Rows::of_transposed(&Team::alone(), &turned, count);
                assert_eq!(rows.pairs, turned.pairs, "{count} {inner} {cols}");
            }
            let mut out = vec![0.0; count * WIDTH];
            let half = count / 2 / ROWS * ROWS;
            for some in [0..half, half..count] {
                panels.product(&Vectors::scalar(), &rows, some, |row, col, sums| {
                    out[row * WIDTH + col..][..COLS].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                });
            }
            for (row, col) in (0..count).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                let terms = (0..inner).map(|i| rounded(x[row * inner + i]) * rounded(at(i, col)));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                let bound = (inner + 1) as f64 * 2f64.powi(-23) * size;
                let got = f64::from(out[row * WIDTH + col]);
                assert!((got - sum).abs() <= bound, "{count} {inner} {cols}: {row} {col}");
            }
        }
    }
}
