//! Schemes whose groups of columns have a scale each: scale, codebook and codes of a group are
//! found together.
//!
//! With moments of the inputs, groups go from last to first. The scale of a group is the one of
//! least error for its targets, `W + (W - W') (L - 1)` over the columns behind it, each weighted by
//! what its error costs once all columns before it have made up for what they can (its entry of D);
//! then its columns are rounded one by one, each with the error of those behind it (LDLQ in blocks
//! of one column; the algebra is in [`crate::hessian`]).

use crate::{
    Grouping, QuantError, Quantized, Rounding,
    hessian::{Feedback, STRIP, multiply},
    matrix::relative,
    rounders,
};
use fracbit_base::{Scheme, Shape};
use fracbit_codebook::GroupCoder;
use fracbit_format::{BitWriter, Layout, SchemeSpec, TILE_COLS, TILE_ROWS};
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// Columns that receive feedback from behind in one product, where groups are not wider.
const BUFFER: usize = 128;

/// Quantizes checked `weights` (finite, of `shape`) with a scheme of scales for small groups.
pub(crate) fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let missing = || QuantError::NoCodebook(scheme);
    let spec = SchemeSpec::of(scheme);
    let index = spec.table.and_then(|table| table.index).ok_or_else(missing)?;
    let book = rounding.codebook.or_else(|| rounders::codebook(scheme)).ok_or_else(missing)?;
    let coder = GroupCoder::new(book.clone()).ok_or_else(missing)?;
    let feedback = rounding.moments.iter().map(|moments| moments.feedback(spec.block_columns));
    let feedback = feedback.collect::<Result<Vec<_>, QuantError>>()?;
    let cols = shape.cols;
    let groups = grouping.groups(cols);
    let layout = Layout::new(scheme, shape);
    let largest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    let gain = crate::matrix::power_of_two_at_least(largest);
    let mut scales = vec![f16::ZERO; shape.rows * groups];
    let mut codes = vec![0; layout.len()];
    let band = Band { coder: &coder, cols, group: grouping.columns(cols), gain };

    // With feedback some rows of tiles go together, for the sake of its products.
    let down = if feedback.is_empty() { 1 } else { STRIP / TILE_ROWS };
    let tiles = shape.rows.div_ceil(TILE_ROWS) / feedback.len().max(1);
    let errors: Vec<f64> = codes
        .par_chunks_mut(tiles * layout.row_bytes())
        .zip(scales.par_chunks_mut(tiles * TILE_ROWS * groups))
        .zip(weights.par_chunks(tiles * TILE_ROWS * cols))
        .enumerate()
        .flat_map(|(piece, ((codes, scales), rows))| {
            let feedback = feedback.get(piece).copied();
            codes
                .par_chunks_mut(down * layout.row_bytes())
                .zip(scales.par_chunks_mut(down * TILE_ROWS * groups))
                .zip(rows.par_chunks(down * TILE_ROWS * cols))
                .map(move |strip| (feedback, strip))
        })
        .flat_map_iter(|(feedback, ((codes, scales), rows))| {
            let width = layout.tiles_across() * TILE_COLS;
            let mut all = vec![0u8; rows.len() / cols * width]; // codes, (row, col)
            match feedback {
                None => band.each_alone(rows, &mut all, width, scales),
                Some(feedback) => band.with_feedback(rows, feedback, &mut all, width, scales),
            }
            pack(&all, width, index.bits, codes, layout.row_bytes(), book.tile_bytes());
            progress(rows.len());
            let of_tiles = rows.chunks(TILE_ROWS * cols).zip(all.chunks(TILE_ROWS * width));
            let of_tiles = of_tiles.zip(scales.chunks(TILE_ROWS * groups));
            of_tiles.map(|((rows, all), scales)| band.error(rows, all, width, scales)).collect::<Vec<f64>>()
        })
        .collect();
    // Sums run in row order, so that they do not depend on the thread count.
    let error: f64 = errors.iter().sum();
    let books = vec![Arc::new(book.clone())];
    let error = relative(error, weights, cols);
    Ok(Quantized::new(scheme, shape, grouping, books, (codes, scales, vec![gain]), error))
}

/// Writes codes, (row, width), to the tiles of some rows of tiles.
fn pack(all: &[u8], width: usize, bits: u32, codes: &mut [u8], row_bytes: usize, tile_bytes: usize) {
    for (codes, all) in codes.chunks_mut(row_bytes).zip(all.chunks(TILE_ROWS * width)) {
        for (across, tile) in codes.chunks_exact_mut(tile_bytes).enumerate() {
            let mut writer = BitWriter::new(tile);
            for row in all.chunks(width) {
                let codes = &row[across * TILE_COLS..][..TILE_COLS];
                codes.iter().for_each(|&code| writer.push(code.into(), bits));
            }
        }
    }
}

/// What it takes to code rows of a matrix.
struct Band<'a> {
    coder: &'a GroupCoder,
    cols: usize,
    group: usize,
    gain: f32,
}

impl Band<'_> {
    fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Codes every group for the least error of its weights.
    fn each_alone(&self, rows: &[f32], all: &mut [u8], width: usize, scales: &mut [f16]) {
        for (r, row) in rows.chunks(self.cols).enumerate() {
            for (g, weights) in row.chunks(self.group).enumerate() {
                let to = &mut all[r * width + g * self.group..][..weights.len()];
                scales[r * self.groups() + g] = self.coder.encode(weights, None, self.gain, to).scale;
            }
        }
    }

    /// Codes the groups from last to first, each for what the columns behind it leave to make up
    /// for.
    fn with_feedback(
        &self,
        rows: &[f32],
        feedback: &Feedback,
        all: &mut [u8],
        width: usize,
        scales: &mut [f16],
    ) {
        let (n, group) = (self.cols, self.group);
        let count = rows.len() / n;
        let lower = &feedback.lower;
        let buffer = group * (BUFFER / group).max(1);
        let mut error = vec![0.0; rows.len()]; // W - W' of the finished columns
        let mut last = n;
        while last > 0 {
            let first = (last - 1) / buffer * buffer;
            let across = last - first;
            let mut target: Vec<f32> = rows.chunks(n).flat_map(|row| &row[first..last]).copied().collect();
            if last < n {
                let size = (count, n - last, across);
                let behind = &lower[last * n + first..];
                multiply(1.0, &error[last..], n, behind, n, size, 1.0, &mut target, across);
            }
            let mut end = last;
            while end > first {
                let start = (end - 1) / group * group;
                let importance = &feedback.importance[start..end];
                for r in 0..count {
                    let target = &mut target[r * across + start - first..][..end - start];
                    let scale = self.coder.scale(target, Some(importance), self.gain);
                    scales[r * self.groups() + start / group] = scale;
                    let table = self.coder.at(scale, self.gain);
                    for c in (0..end - start).rev() {
                        let (code, value) = table.nearest(target[c]);
                        all[r * width + start + c] = code;
                        let off = rows[r * n + start + c] - value;
                        error[r * n + start + c] = off;
                        let factors = &lower[(start + c) * n + start..][..c];
                        target[..c].iter_mut().zip(factors).for_each(|(t, l)| *t += off * l);
                    }
                }
                if start > first {
                    let size = (count, end - start, start - first);
                    let row = &lower[start * n + first..];
                    multiply(1.0, &error[start..], n, row, n, size, 1.0, &mut target, across);
                }
                end = start;
            }
            last = first;
        }
    }

    /// Squared error of coded rows, every weight counting the same.
    fn error(&self, rows: &[f32], all: &[u8], width: usize, scales: &[f16]) -> f64 {
        let book = self.coder.codebook();
        let size = book.entries().len() / book.books();
        let mut sum = 0.0;
        for (r, row) in rows.chunks(self.cols).enumerate() {
            for (g, weights) in row.chunks(self.group).enumerate() {
                let scale = scales[r * self.groups() + g];
                let entries = &book.entries()[usize::from(book.book_of(scale)) * size..];
                let factor = self.gain * scale.to_f32() * book.step();
                let codes = &all[r * width + g * self.group..][..weights.len()];
                let off = |(&w, &code): (&f32, &u8)| {
                    f64::from(w - f32::from(entries[usize::from(code)]) * factor).powi(2)
                };
                sum += weights.iter().zip(codes).map(off).sum::<f64>();
            }
        }
        sum
    }
}
