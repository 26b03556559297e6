//! Progressive schemes (QoQ): a scale for each row makes int8 weights, integer scales and zeros of
//! their groups make these of 4-bit codes.
//!
//! Columns get error feedback like those of the other schemes with groups ([`crate::grouped`]); at
//! the end the scales of rows are fitted to the int8 weights that were chosen.

use crate::{
    Grouping, QuantError, Quantized, Rounding,
    grouped::{self, Groups},
    hessian::strip,
    matrix::{self, nearest_half, power_of_two_at_least},
    rounders,
};
use fracbit_base::{Scheme, Shape, ShapeError};
use fracbit_codebook::{ProgressiveCoder, nearest_progressive};
use fracbit_format::{Codebook, Layout, PackedView, Plane, Planes, SchemeSpec, SecondLevel, TILE_ROWS};
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// Columns that are rounded together with feedback where the whole row is one group.
const BLOCK: usize = 128;

/// Quantizes checked `weights` (finite, of `shape`) with a progressive scheme.
pub(crate) fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    if grouping != Grouping::Row {
        let want = format_args!("the whole row, for {scheme}").to_string();
        return Err(ShapeError::new("quantize", "group", want, grouping.columns(shape.cols)).into());
    }
    let missing = || QuantError::NoCodebook(scheme);
    let coder = ProgressiveCoder::new(scheme).ok_or_else(missing)?;
    let book = rounders::codebook(scheme).ok_or_else(missing)?;
    let second = SchemeSpec::of(scheme).second_level.ok_or_else(missing)?;
    let pieces = rounding.moments.len().max(1);
    let rows_each = shape.rows.div_ceil(pieces);
    let rows = weights.par_chunks(shape.cols).enumerate().map(|(r, row)| {
        // The diagonal of the moments: what is not rounded yet makes up for part of it, but a row's
        // scale is found before that is known.
        let of = rounding.moments.get(r / rows_each);
        let importance = of.map(|moments| {
            (0..shape.cols).map(|c| moments.entries()[c * shape.cols + c]).collect::<Vec<f32>>()
        });
        coder.row(row, importance.as_deref())
    });
    let rows: Vec<(f32, Option<SecondLevel>)> = rows.collect();
    let gain = power_of_two_at_least(rows.iter().fold(0.0, |most, row| row.0.max(most)));
    let mut scales: Vec<f16> =
        rows.iter().map(|row| nearest_half(f64::from(row.0) / f64::from(gain))).collect();
    let levels = Levels { coder, rows: &rows, scales: &scales, gain };
    let group = match second {
        Grouping::Columns(group) => group,
        Grouping::Row => BLOCK,
    };
    let (codes, stored) = grouped::encode(&levels, weights, (scheme, shape, group), rounding, progress)?;
    let across = shape.cols.div_ceil(group);
    let second_level: Vec<u8> = match second {
        Grouping::Columns(_) => stored,
        Grouping::Row => stored.chunks(across).map(|row| row[0]).collect(),
    };
    fit_rows(weights, (scheme, shape), book, (&codes, &second_level), (&mut scales, gain), rounding);
    let planes =
        [Plane::U8(codes.into()), Plane::U8(second_level.into()), Plane::F16(scales), Plane::F32(vec![gain])];
    Ok(Quantized::measured(scheme, shape, grouping, vec![Arc::new(book.clone())], planes, weights))
}

/// Rows with their scales.
struct Levels<'a> {
    coder: ProgressiveCoder,
    rows: &'a [(f32, Option<SecondLevel>)],
    scales: &'a [f16],
    gain: f32,
}

impl Levels<'_> {
    fn scale(&self, row: usize) -> f32 {
        self.scales[row].to_f32() * self.gain
    }
}

impl Groups for Levels<'_> {
    type Stored = u8;

    fn find(&self, row: usize, targets: &[f32], importance: Option<&[f32]>) -> u8 {
        let scale = self.scale(row);
        let of_row = self.rows[row].1;
        let zero = SecondLevel { scale: 1, zero: 0 };
        let found = of_row.unwrap_or_else(|| {
            if scale == 0.0 {
                return zero;
            }
            let units: Vec<f32> = targets.iter().map(|t| t / scale).collect();
            self.coder.group(&units, importance)
        });
        found.byte()
    }

    fn nearest(&self, row: usize, stored: u8) -> impl Fn(f32) -> (u8, f32) {
        let (scale, second) = (self.scale(row), SecondLevel::from_byte(stored));
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        move |x| {
            let (code, value) = nearest_progressive(second, x * inverse);
            (code, scale * f32::from(value))
        }
    }
}

/// Scales of rows of least error for the int8 weights that were chosen: of the layer's output where
/// moments are known.
fn fit_rows(
    weights: &[f32],
    (scheme, shape): (Scheme, Shape),
    book: &Codebook,
    (codes, second_level): (&[u8], &[u8]),
    (scales, gain): (&mut [f16], f32),
    rounding: &Rounding<'_>,
) {
    // All scales 1: rows in units of theirs.
    let ones = vec![f16::ONE; shape.rows];
    let planes = Planes { codes, second_level, scales: &ones, gains: &[1.0] };
    let group = Grouping::Row.columns(shape.cols);
    let units = PackedView::new(scheme, shape, &[book], planes, group).expect("parts made for this shape");
    let cols = shape.cols;
    let decoded = |first: usize, count: usize| {
        let mut decoded = vec![0.0; count * cols];
        let rows = decoded.chunks_mut(cols).enumerate();
        rows.for_each(|(r, row)| units.dequantize_row(first + r, row));
        decoded
    };
    let (pieces, strip) = (rounding.moments.len().max(1), strip(shape.rows, rayon::current_num_threads()));
    let rows_each = shape.rows.div_ceil(pieces);
    // Rows of several moments are of whole tiles, and a strip's are of one.
    let strip = match pieces {
        1 => strip,
        _ => (TILE_ROWS..=strip).rev().find(|strip| rows_each.is_multiple_of(*strip)).unwrap_or(TILE_ROWS),
    };
    let strips = scales.par_chunks_mut(strip).zip(weights.par_chunks(strip * cols)).enumerate();
    strips.for_each(|(at, (scales, rows))| {
        let decoded = decoded(at * strip, scales.len());
        match rounding.moments.get(at * strip / rows_each) {
            None => {
                let all = rows.chunks(cols).zip(decoded.chunks(cols)).zip(scales);
                all.for_each(|((row, units), scale)| *scale = matrix::refit(row, units, *scale, gain));
            }
            Some(moments) => {
                let row_bytes = Layout::new(scheme, shape).row_bytes();
                let band = matrix::Band { rows, cols, group, gain, row_bytes };
                band.refit_under(moments, &decoded, scales);
            }
        }
    });
}
