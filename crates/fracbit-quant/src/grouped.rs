//! Schemes whose groups of columns have a scale each: one group at a time, no rounder.

use crate::{Grouping, QuantError, Quantized, Rounding, rounders};
use fracbit_base::{Scheme, Shape};
use fracbit_codebook::GroupCoder;
use fracbit_format::{BitWriter, Index, Layout, SchemeSpec, TILE_COLS, TILE_ROWS};
use half::f16;
use rayon::prelude::*;

/// Quantizes checked `weights` (finite, of `shape`) with a scheme of the families `int` and `gnuq`; the scale of a group is
/// the one of least error, which needs no re-fit. `importance` holds a number for each column.
pub(crate) fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    importance: Option<&[f32]>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let built_in = || rounders::codebook(scheme);
    let book = rounding.codebook.or_else(built_in).ok_or(QuantError::NoCodebook(scheme))?;
    let coder = GroupCoder::new(book.clone()).ok_or(QuantError::NoCodebook(scheme))?;
    let group = grouping.columns(shape.cols);
    let groups = shape.cols.div_ceil(group);
    let layout = Layout::new(scheme, shape);
    let largest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    let gain = crate::matrix::power_of_two_at_least(largest);
    let mut scales = vec![f16::ZERO; shape.rows * groups];
    let mut codes = vec![0; layout.len()];
    let bits = index(scheme).ok_or(QuantError::NoCodebook(scheme))?.bits;
    let errors: Vec<f64> = codes
        .par_chunks_mut(layout.row_bytes())
        .zip(scales.par_chunks_mut(TILE_ROWS * groups))
        .zip(weights.par_chunks(TILE_ROWS * shape.cols))
        .map(|((codes, scales), rows)| {
            let width = layout.tiles_across() * TILE_COLS;
            let mut all = vec![0u8; TILE_ROWS * width]; // codes, (row, col)
            let mut error = 0.0;
            for (r, row) in rows.chunks(shape.cols).enumerate() {
                for (g, weights) in row.chunks(group).enumerate() {
                    let first = g * group;
                    let importance = importance.map(|h| &h[first..first + weights.len()]);
                    let to = &mut all[r * width + first..][..weights.len()];
                    let coded = coder.encode(weights, importance, gain, to);
                    scales[r * groups + g] = coded.scale;
                    error += plain_error(&coder, weights, to, coded.scale, gain);
                }
            }
            for (across, tile) in codes.chunks_exact_mut(book.tile_bytes()).enumerate() {
                let mut writer = BitWriter::new(tile);
                for row in all.chunks(width) {
                    let codes = &row[across * TILE_COLS..][..TILE_COLS];
                    codes.iter().for_each(|&code| writer.push(code.into(), bits));
                }
            }
            progress(rows.len());
            error
        })
        .collect();
    let error: f64 = errors.iter().sum();
    let energy: f64 =
        weights.chunks(shape.cols).map(|row| row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()).sum();
    let relative_error = if energy > 0.0 { error / energy } else { 0.0 };
    let codebook = rounding.codebook.cloned();
    Ok(Quantized { scheme, shape, group, gain, scales, codes, relative_error, codebook })
}

/// How the codes of a scheme find their entries.
fn index(scheme: Scheme) -> Option<Index> {
    SchemeSpec::of(scheme).table?.index
}

/// Squared error of a coded group, every weight counting the same.
fn plain_error(coder: &GroupCoder, weights: &[f32], codes: &[u8], scale: f16, gain: f32) -> f64 {
    let book = coder.codebook();
    let entries = &book.entries()[usize::from(book.book_of(scale)) * (book.entries().len() / book.books())..];
    let factor = gain * scale.to_f32() * book.step();
    let off =
        |(&w, &code): (&f32, &u8)| f64::from(w - f32::from(entries[usize::from(code)]) * factor).powi(2);
    weights.iter().zip(codes).map(off).sum()
}
