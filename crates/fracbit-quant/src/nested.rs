//! Nested scalar codes.
//!
//! Without moments of inputs the coarsest codes are rounded first and their scales fitted, then all
//! further bits in these scales: what is read at few bits does not depend on what follows. With
//! moments whole codes are rounded with feedback of their errors, as plain ones are, and coarser
//! codes are what their lower bits are: feedback for the coarsest moves weights so far that further
//! bits, which divide cells, cannot follow (`docs/lab/2026-11-codes.md`).

use crate::{
    QuantError, Quantized,
    matrix::{Band, Rounding, plane},
};
use fracbit_base::{Scheme, Shape};
use fracbit_codebook::{NestedRounder, Rounder};
use fracbit_format::{BitWriter, Grouping, Layout, Plane, TILE, TILE_ROWS, read_bits};
use rayon::prelude::*;
use std::sync::Arc;

/// As [`quantize_with`](crate::quantize_with), for a nested scalar scheme and what was checked.
pub(crate) fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let coarsest = scheme.precisions().next().map_or(scheme, |rate| scheme.at(rate));
    if coarsest == scheme || !rounding.moments.is_empty() {
        return plane(weights, shape, scheme, grouping, rounding, 1.0, progress);
    }
    // Whole numbers of weights that add up to all.
    let base = plane(weights, shape, coarsest, grouping, rounding, 1.0, &|n| progress(n / 2))?.data;
    let missing = QuantError::NoCodebook(scheme);
    let book = fracbit_codebook::builtin(scheme).cloned().ok_or(missing.clone())?;
    let [from, to] = [coarsest, scheme].map(|s| u32::from(s.quarters() / 4));
    let rounder = NestedRounder::new(book.clone()).map_err(|_| missing)?.refining(from);
    let (layout, group) = (Layout::new(scheme, shape), grouping.columns(shape.cols));
    let coders: Vec<_> = layout.segments().iter().map(|&s| (s, &rounder as &dyn Rounder)).collect();
    let mut codes = widened(base.codes(), from, to, layout.len());
    let (scales, gain) = (base.scales(), base.gain());
    codes
        .par_chunks_mut(layout.row_bytes())
        .zip(scales.par_chunks(TILE_ROWS * grouping.groups(shape.cols)))
        .zip(weights.par_chunks(TILE_ROWS * shape.cols))
        .for_each(|((codes, scales), rows)| {
            progress(0); // where a caller may unwind to stop
            let band = Band { rows, cols: shape.cols, group, gain, row_bytes: layout.row_bytes() };
            band.encode(&coders, codes, scales);
            progress(rows.len() - rows.len() / 2);
        });
    let planes = [Plane::U8(codes.into()), Plane::F16(scales.to_vec()), Plane::F32(vec![gain])];
    Ok(Quantized::measured(scheme, shape, grouping, vec![Arc::new(book)], planes, weights))
}

/// Tiles of codes of `from` bits as tiles of `to` bits each, `len` bytes in all.
fn widened(codes: &[u8], from: u32, to: u32, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let tiles = codes.chunks_exact(from as usize * TILE / 8);
    for (tile, out) in tiles.zip(out.chunks_exact_mut(to as usize * TILE / 8)) {
        let mut writer = BitWriter::new(out);
        (0..TILE).for_each(|i| writer.push(read_bits(tile, i * from as usize, from), to));
    }
    out
}
