//! Nested scalar codes: bit after bit.
//!
//! The coarsest codes are rounded first, with feedback where there are moments, and their scales
//! fitted. Every further bit is then chosen for all columns with feedback of the errors that are
//! left with it, in the same scales: what is read at few bits does not depend on what follows,
//! without moments not at all, and with moments but for the [`SHARE`] of its errors that is passed
//! on.

use crate::{
    QuantError, Quantized,
    matrix::{Begun, Rounding, SHARE, coded, plane},
};
use fracbit_base::{Scheme, Shape};
use fracbit_codebook::{NestedRounder, Rounder};
use fracbit_format::{BitWriter, Grouping, Layout, TILE, read_bits};

/// As [`quantize_with`](crate::quantize_with), for a nested scalar scheme and what was checked.
pub(crate) fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let schemes: Vec<Scheme> = scheme.precisions().map(|rate| scheme.at(rate)).collect();
    let (count, last) = (schemes.len(), schemes.len() - 1);
    // Whole numbers of weights that add up to all.
    let told = |nth: usize, n: usize| progress(if nth == last { n - n / count * last } else { n / count });
    let share = |nth: usize| if nth == last { 1.0 } else { SHARE };
    let mut made = plane(weights, shape, schemes[0], grouping, rounding, share(0), &|n| told(0, n))?;
    for (nth, pair) in schemes.windows(2).enumerate() {
        let nth = nth + 1;
        let bits = pair.iter().map(|s| u32::from(s.quarters() / 4)).collect::<Vec<_>>();
        let book = fracbit_codebook::builtin(pair[1]).ok_or(QuantError::NoCodebook(pair[1]))?;
        let rounder = NestedRounder::new(book.clone()).map_err(|_| QuantError::NoCodebook(pair[1]))?;
        let rounder = rounder.refining(bits[0]);
        let layout = Layout::new(pair[1], shape);
        let begun = Begun {
            codes: widened(made.data.codes(), bits[0], bits[1], layout.len()),
            scales: made.data.scales().to_vec(),
            gain: made.data.gain(),
            fits: false,
        };
        let coders: Vec<_> = layout.segments().iter().map(|&s| (s, &rounder as &dyn Rounder)).collect();
        let feedback = (rounding.moments, share(nth));
        let told = |n| told(nth, n);
        made = coded(weights, shape, pair[1], grouping, feedback, (begun, &coders), &told)?;
    }
    Ok(made)
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
