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
    hessian::{Feedback, multiply, strip},
    matrix::power_of_two_at_least,
    rounders,
};
use fracbit_base::{Scheme, Shape};
use fracbit_codebook::GroupCoder;
use fracbit_format::{BitWriter, Layout, Plane, SchemeSpec, TILE_COLS, TILE_ROWS};
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
    let book = rounding.codebook.or_else(|| rounders::codebook(scheme)).ok_or_else(missing)?;
    let coder = GroupCoder::new(book.clone()).ok_or_else(missing)?;
    let largest = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    let gain = power_of_two_at_least(largest);
    let groups = Scaled { coder: &coder, gain };
    let group = grouping.columns(shape.cols);
    let (codes, scales) = encode(&groups, weights, (scheme, shape, group), rounding, progress)?;
    let books = vec![Arc::new(book.clone())];
    let planes = [Plane::U8(codes.into()), Plane::F16(scales), Plane::F32(vec![gain])];
    Ok(Quantized::measured(scheme, shape, grouping, books, planes, weights))
}

/// Groups with a scale each.
struct Scaled<'a> {
    coder: &'a GroupCoder,
    gain: f32,
}

impl Groups for Scaled<'_> {
    type Stored = f16;

    fn find(&self, _: usize, targets: &[f32], importance: Option<&[f32]>) -> f16 {
        self.coder.scale(targets, importance, self.gain)
    }

    fn nearest(&self, _: usize, scale: f16) -> impl Fn(f32) -> (u8, f32) {
        let table = self.coder.at(scale, self.gain);
        move |x| table.nearest(x)
    }
}

/// How the groups of a matrix are coded.
pub(crate) trait Groups: Sync {
    /// What is stored of a group, beside its codes.
    type Stored: Copy + Default + Send + Sync;

    /// What is best for the targets of a group of row `row`, each with the importance of its
    /// column, or all alike.
    fn find(&self, row: usize, targets: &[f32], importance: Option<&[f32]>) -> Self::Stored;

    /// The code nearest to a target in a group of row `row`, and the weight that it means.
    fn nearest(&self, row: usize, stored: Self::Stored) -> impl Fn(f32) -> (u8, f32);
}

/// Codes of a matrix in its layout, and what is stored of its groups of `group` columns, (row,
/// group).
pub(crate) fn encode<G: Groups>(
    groups: &G,
    weights: &[f32],
    (scheme, shape, group): (Scheme, Shape, usize),
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<(Vec<u8>, Vec<G::Stored>), QuantError> {
    let spec = SchemeSpec::of(scheme);
    let index = spec.table.and_then(|table| table.index).ok_or(QuantError::NoCodebook(scheme))?;
    let feedback = rounding.moments.iter().map(|moments| moments.feedback(spec.block_columns));
    let feedback = feedback.collect::<Result<Vec<_>, QuantError>>()?;
    let cols = shape.cols;
    let across = cols.div_ceil(group);
    let layout = Layout::new(scheme, shape);
    let mut stored = vec![G::Stored::default(); shape.rows * across];
    let mut codes = vec![0; layout.len()];

    // With feedback some rows of tiles go together, for the sake of its products.
    let threads = rayon::current_num_threads();
    let down = if feedback.is_empty() { 1 } else { strip(shape.rows, threads) / TILE_ROWS };
    let tiles = shape.rows.div_ceil(TILE_ROWS) / feedback.len().max(1);
    codes
        .par_chunks_mut(tiles * layout.row_bytes())
        .zip(stored.par_chunks_mut(tiles * TILE_ROWS * across))
        .zip(weights.par_chunks(tiles * TILE_ROWS * cols))
        .enumerate()
        .flat_map(|(piece, ((codes, stored), rows))| {
            let feedback = feedback.get(piece).copied();
            codes
                .par_chunks_mut(down * layout.row_bytes())
                .zip(stored.par_chunks_mut(down * TILE_ROWS * across))
                .zip(rows.par_chunks(down * TILE_ROWS * cols))
                .enumerate()
                .map(move |(strip, parts)| (feedback, (piece * tiles + strip * down) * TILE_ROWS, parts))
        })
        .for_each(|(feedback, first, ((codes, stored), rows))| {
            let width = layout.tiles_across() * TILE_COLS;
            let mut all = vec![0u8; rows.len() / cols * width]; // codes, (row, col)
            let band = Band { groups, first, cols, group };
            match feedback {
                None => band.each_alone(rows, &mut all, width, stored),
                Some(feedback) => band.with_feedback(rows, feedback, &mut all, width, stored),
            }
            let tile_bytes = layout.row_bytes() / layout.tiles_across();
            pack(&all, width, index.bits, codes, layout.row_bytes(), tile_bytes);
            progress(rows.len());
        });
    Ok((codes, stored))
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
struct Band<'a, G> {
    groups: &'a G,
    /// The first row.
    first: usize,
    cols: usize,
    group: usize,
}

impl<G: Groups> Band<'_, G> {
    fn across(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Codes every group for the least error of its weights.
    fn each_alone(&self, rows: &[f32], all: &mut [u8], width: usize, stored: &mut [G::Stored]) {
        for (r, row) in rows.chunks(self.cols).enumerate() {
            for (g, weights) in row.chunks(self.group).enumerate() {
                let found = self.groups.find(self.first + r, weights, None);
                let nearest = self.groups.nearest(self.first + r, found);
                let to = &mut all[r * width + g * self.group..][..weights.len()];
                to.iter_mut().zip(weights).for_each(|(code, &w)| *code = nearest(w).0);
                stored[r * self.across() + g] = found;
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
        stored: &mut [G::Stored],
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
                    let target = &target[r * across + start - first..][..end - start];
                    stored[r * self.across() + start / group] =
                        self.groups.find(self.first + r, target, Some(importance));
                }
                // Of a wide group some columns at a time, for the sake of the product behind them.
                while end > start {
                    let some = start + (end - start - 1) / BUFFER * BUFFER;
                    for r in 0..count {
                        let target = &mut target[r * across + some - first..][..end - some];
                        let found = stored[r * self.across() + start / group];
                        let nearest = self.groups.nearest(self.first + r, found);
                        for c in (0..end - some).rev() {
                            let (code, value) = nearest(target[c]);
                            all[r * width + some + c] = code;
                            let off = rows[r * n + some + c] - value;
                            error[r * n + some + c] = off;
                            let factors = &lower[(some + c) * n + some..][..c];
                            target[..c].iter_mut().zip(factors).for_each(|(t, l)| *t += off * l);
                        }
                    }
                    if some > first {
                        let size = (count, end - some, some - first);
                        let row = &lower[some * n + first..];
                        multiply(1.0, &error[some..], n, row, n, size, 1.0, &mut target, across);
                    }
                    end = some;
                }
            }
            last = first;
        }
    }
}
