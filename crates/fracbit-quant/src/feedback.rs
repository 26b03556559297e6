//! Rounding with error feedback (block LDLQ; the algebra is in [`crate::hessian`]).
//!
//! Columns go from last to first. Feedback from finished columns reaches a block in two steps: once
//! per buffer of 128 columns by one product over everything behind the buffer, and block by block
//! within it. Strips of rows are independent of each other; where a search wants many tiles at
//! once, several go side by side, so that one call has the tiles of all of them.

use crate::{
    hessian::{Feedback, Hessian, multiply},
    matrix::{Band, Coders, nearest_half},
};
use fracbit_codebook::Rounder;
use fracbit_format::{Segment, TILE, TILE_COLS, TILE_ROWS};
use half::f16;
use rayon::prelude::*;

/// Columns that receive feedback from behind in one product, a multiple of 16.
const BUFFER: usize = 128;
/// Sweeps over the scales of a row that has several; one suffices where H does not couple them.
const SWEEPS: usize = 12;

/// Rows of a matrix, in strips, and what it takes to round them.
pub(crate) struct Strips<'a> {
    pub(crate) band: &'a Band<'a>,
    pub(crate) moments: &'a Hessian,
    pub(crate) feedback: &'a Feedback,
    /// Columns rounded together.
    pub(crate) block: usize,
    /// Rows of a strip.
    pub(crate) strip: usize,
    /// How much of an error is passed on: 1, or less where another plane follows.
    pub(crate) share: f32,
}

/// The buffer being rounded: targets of columns `first..last`, `W + (W - W') (L - 1)` so far.
struct Buffer {
    first: usize,
    last: usize,
    target: Vec<f32>, // (rows, last - first)
}

impl Strips<'_> {
    /// Codes the strips, re-fits their scales (row-major, one per group) and returns the squared
    /// error of every row.
    pub(crate) fn quantize(&self, coders: &Coders<'_>, codes: &mut [u8], scales: &mut [f16]) -> Vec<f64> {
        let (n, strip) = (self.band.cols, self.strip);
        let mut error = vec![0.0; self.band.rows.len()]; // W - W' of the finished columns
        let mut last = n;
        while last > 0 {
            let first = (last - 1) / BUFFER * BUFFER;
            let width = last - first;
            let mut buffer = Buffer { first, last, target: vec![0.0; error.len() / n * width] };
            let targets = buffer.target.par_chunks_mut(strip * width);
            let strips = self.band.rows.par_chunks(strip * n).zip(error.par_chunks(strip * n));
            strips.zip(targets).for_each(|((rows, error), target)| {
                for (row, target) in rows.chunks(n).zip(target.chunks_mut(width)) {
                    target.copy_from_slice(&row[first..last]);
                }
                if last < n {
                    let behind = &self.feedback.lower[last * n + first..];
                    let size = (rows.len() / n, n - last, width);
                    multiply(self.share, &error[last..], n, behind, n, size, 1.0, target, width);
                }
            });
            for across in (first / TILE_COLS..last.div_ceil(TILE_COLS)).rev() {
                let &(segment, rounder) = coders
                    .iter()
                    .find(|(s, _)| (s.start..s.end).contains(&across))
                    .expect("segments cover all tile columns");
                self.column(across, (segment, rounder), &mut buffer, &mut error, codes, scales);
            }
            last = first;
        }
        drop(error);
        let strips = codes.par_chunks_mut(strip / TILE_ROWS * self.band.row_bytes);
        let strips = strips.zip(scales.par_chunks_mut(strip * self.band.groups()));
        let strips = strips.zip(self.band.rows.par_chunks(strip * n));
        let errors = strips.map(|((codes, scales), rows)| {
            let band = Band { rows, ..*self.band };
            let decoded = band.decode(coders, codes);
            band.refit_under(self.moments, &decoded, scales);
            band.errors(&decoded, scales)
        });
        errors.collect::<Vec<_>>().concat()
    }

    /// Rounds one column of tiles, block by block from its last, and passes its error on to the
    /// left within the buffer.
    fn column(
        &self,
        across: usize,
        (segment, rounder): (Segment, &dyn Rounder),
        buffer: &mut Buffer,
        error: &mut [f32],
        codes: &mut [u8],
        scales: &[f16],
    ) {
        let (n, strip) = (self.band.cols, self.strip);
        let width = buffer.last - buffer.first;
        let first = across * TILE_COLS;
        let last = (first + TILE_COLS).min(n);
        let mut tiles = vec![[0.0; TILE]; (error.len() / n).div_ceil(TILE_ROWS)];
        let mut packed = vec![0; tiles.len() * segment.tile_bytes];
        let mut end = last;
        while end > first {
            let start = (end - 1) / self.block * self.block;
            // Columns behind `end` keep the targets that they were rounded from, and so their
            // codes.
            for (r, target) in buffer.target.chunks(width).enumerate() {
                let scale = self.band.scale(scales, r, first);
                if scale > 0.0 {
                    let targets = &target[first - buffer.first..][..end - first];
                    let values = &mut tiles[r / TILE_ROWS][r % TILE_ROWS * TILE_COLS..];
                    values.iter_mut().zip(targets).for_each(|(v, &t)| *v = t / scale);
                }
            }
            rounder.encode(&tiles, &mut packed);
            let strips = packed.par_chunks(strip / TILE_ROWS * segment.tile_bytes);
            let strips = strips.zip(scales.par_chunks(strip * self.band.groups()));
            let strips = strips.zip(self.band.rows.par_chunks(strip * n));
            let strips = strips.zip(error.par_chunks_mut(strip * n));
            strips.zip(buffer.target.par_chunks_mut(strip * width)).for_each(
                |((((packed, scales), rows), error), target)| {
                    let count = rows.len() / n;
                    let book = rounder.codebook();
                    let mut integers = [0; TILE];
                    for (down, code) in packed.chunks_exact(segment.tile_bytes).enumerate() {
                        book.expand_tile(code, &mut integers);
                        for r in down * TILE_ROWS..count.min((down + 1) * TILE_ROWS) {
                            let scale = self.band.scale(scales, r, first);
                            for c in start..end {
                                let integer = integers[r % TILE_ROWS * TILE_COLS + c - first];
                                error[r * n + c] =
                                    rows[r * n + c] - scale * (f32::from(integer) * book.step());
                            }
                        }
                    }
                    if start > buffer.first {
                        let row = &self.feedback.lower[start * n + buffer.first..];
                        let size = (count, end - start, start - buffer.first);
                        multiply(self.share, &error[start..], n, row, n, size, 1.0, target, width);
                    }
                },
            );
            end = start;
        }
        let at = segment.offset + (across - segment.start) * segment.tile_bytes;
        for (row, code) in codes.chunks_mut(self.band.row_bytes).zip(packed.chunks_exact(segment.tile_bytes))
        {
            row[at..at + segment.tile_bytes].copy_from_slice(code);
        }
    }
}

impl Band<'_> {
    /// Scales of least `(w - w') H (w - w')^T` for the given codes, by turns where a row has
    /// several.
    pub(crate) fn refit_under(&self, moments: &Hessian, decoded: &[f32], scales: &mut [f16]) {
        let Band { rows, cols: n, group, gain, .. } = *self;
        let groups = self.groups();
        let count = decoded.len() / n;
        let (mut images, mut linear) = (vec![0.0f64; count * groups * groups], vec![0.0f64; count * groups]);
        let mut image = vec![0.0; decoded.len()];
        for g in 0..groups {
            let (first, width) = (g * group, group.min(n - g * group));
            let moments = &moments.entries()[first * n..];
            multiply(1.0, &decoded[first..], n, moments, n, (count, width, n), 0.0, &mut image, n);
            for r in 0..count {
                let image = &image[r * n..][..n];
                linear[r * groups + g] = dot(&rows[r * n..][..n], image);
                for (h, units) in decoded[r * n..][..n].chunks(group).enumerate() {
                    images[(r * groups + g) * groups + h] = dot(units, &image[h * group..][..units.len()]);
                }
            }
        }
        for r in 0..count {
            let (images, linear) = (&images[r * groups * groups..], &linear[r * groups..]);
            let old = &mut scales[r * groups..][..groups];
            let mut fitted: Vec<f64> = old.iter().map(|s| f64::from(s.to_f32()) * f64::from(gain)).collect();
            for _ in 0..if groups == 1 { 1 } else { SWEEPS } {
                for g in 0..groups {
                    let row = &images[g * groups..][..groups];
                    let others: f64 = (0..groups).filter(|&h| h != g).map(|h| row[h] * fitted[h]).sum();
                    let best = (linear[g] - others) / row[g];
                    if best > 0.0 && best.is_finite() {
                        fitted[g] = best;
                    }
                }
            }
            for (scale, fitted) in old.iter_mut().zip(fitted) {
                let best = nearest_half(fitted / f64::from(gain));
                if best.is_finite() {
                    *scale = best;
                }
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
