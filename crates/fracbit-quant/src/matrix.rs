//! Regularize, round and pack one matrix.
//!
//! With rotation the rows of a matrix are close to Gaussian, and one scale per row suffices
//! (Q-Palette, section 3.1; the scale is the row's root mean square, because codebooks are made for
//! unit variance). Without rotation groups of columns get their own scale (Q-Palette, G.2.4: 64
//! columns).
//!
//! After rounding every scale is re-fitted in closed form: `s = <w, q> / <q, q>` minimises `|w - s
//! q|^2` over the decoded integers `q`. With second moments H of the inputs, columns are rounded
//! one block at a time with error feedback ([`crate::hessian`]), and scales minimise `(w - s q) H
//! (w - s q)^T`. Scales are f16 relative to a power-of-two gain common to the matrix, which keeps
//! them in f16's normal range whatever the magnitude of the weights.

use crate::{
    feedback::Strips,
    hessian::{Hessian, STRIP, strip},
    rounders::Rounders,
};
use fracbit_base::{Bytes, Scheme, Shape, ShapeError};
use fracbit_codebook::Rounder;
use fracbit_format::{
    Codebook, Grouping, Layout, PackedMatrixData, PackedView, Plane, SchemeSpec, Segment, TILE, TILE_COLS,
    TILE_ROWS,
};
use half::f16;
use rayon::prelude::*;
use std::sync::Arc;

/// Bytes that so many threads work in while they round a matrix, beside what the search for codes
/// takes; `feedback`: with moments of the inputs.
#[must_use]
pub fn working_memory(shape: Shape, grouping: Grouping, feedback: bool, threads: usize) -> Bytes {
    let (n, groups) = (shape.cols as u64, grouping.groups(shape.cols) as u64);
    let rows = if feedback { strip(shape.rows, threads) } else { TILE_ROWS } as u64;
    // Regularized or finished errors, and decoded; with feedback also their image under the
    // moments, and what couples the scales.
    let row = if feedback { 3 * 4 * n + 8 * groups * (groups + 1) } else { 2 * 4 * n };
    Bytes(threads as u64 * rows * row)
}

/// Why a matrix cannot be quantized.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// Lengths do not fit.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A weight is NaN or infinite.
    #[error("weight at row {row}, column {col} is {value}: every weight should be finite")]
    NotFinite {
        /// Row of the first such weight.
        row: usize,
        /// Column of the first such weight.
        col: usize,
        /// The weight.
        value: f32,
    },
    /// No codebook is built in for this scheme.
    #[error("scheme {0} has no built-in codebook")]
    NoCodebook(Scheme),
    /// An entry of the input moments is NaN or infinite, or a diagonal one negative.
    #[error(
        "input moment at row {row}, column {col} is {value}: it should be finite, and not negative on the diagonal"
    )]
    Hessian {
        /// Row of the first such entry.
        row: usize,
        /// Column of the first such entry.
        col: usize,
        /// The entry.
        value: f32,
    },
    /// The input moments cannot be factored.
    #[error(
        "input moments of {n} channels are not positive definite even when damped by {damping} times their mean"
    )]
    Indefinite {
        /// Channels.
        n: usize,
        /// The last damping that was tried.
        damping: f64,
    },
}

/// A matrix and what packing it cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The packed matrix; its gain is a power of two.
    pub data: PackedMatrixData<'static>,
    /// `|W - W'|^2 / |W|^2` of the result; 0 for a zero matrix.
    pub relative_error: f64,
}

impl Quantized {
    /// Puts the parts of a matrix together.
    pub(crate) fn new(
        scheme: Scheme,
        shape: Shape,
        grouping: Grouping,
        codebooks: Vec<Arc<Codebook>>,
        (codes, scales, gains): (Vec<u8>, Vec<f16>, Vec<f32>),
        relative_error: f64,
    ) -> Self {
        let planes = [Plane::U8(codes.into()), Plane::F16(scales), Plane::F32(gains)];
        let data = PackedMatrixData::new(scheme, shape, grouping, codebooks, planes);
        Self { data: data.expect("parts made for this shape"), relative_error }
    }

    /// As [`new`](Self::new), measuring the error against `weights`.
    pub(crate) fn measured(
        scheme: Scheme,
        shape: Shape,
        grouping: Grouping,
        codebooks: Vec<Arc<Codebook>>,
        planes: impl IntoIterator<Item = Plane<'static>>,
        weights: &[f32],
    ) -> Self {
        let data = PackedMatrixData::new(scheme, shape, grouping, codebooks, planes);
        let mut made = Self { data: data.expect("parts made for this shape"), relative_error: 0.0 };
        let view = made.data.view();
        let rows = weights.par_chunks(shape.cols).enumerate();
        let errors = rows.map_init(
            || vec![0.0; shape.cols],
            |values, (r, row)| {
                view.dequantize_row(r, values);
                row.iter().zip(values).map(|(&w, &mut v)| f64::from(w - v).powi(2)).sum()
            },
        );
        // Sums run in row order, so that they do not depend on the thread count.
        let error: f64 = errors.collect::<Vec<f64>>().iter().sum();
        made.relative_error = relative(error, weights, shape.cols);
        made
    }

    /// The matrix as kernels and the reference decoder see it.
    #[must_use]
    pub fn view(&self) -> PackedView<'_> {
        self.data.view()
    }
}

/// Quantizes a row-major matrix of `shape` with `scheme`.
///
/// `progress` is told the number of weights after every row of tiles, and 0 before it, from any
/// thread. The result does not depend on the number of threads. Rows of zeros keep a zero scale.
///
/// # Errors
/// When `weights` is not `shape.len()` long, a group is not a positive multiple of 16, a weight is
/// not finite, or the scheme has no built-in codebook.
pub fn quantize(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounders: &Rounders,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    quantize_with(weights, shape, scheme, grouping, Rounding::new(rounders), progress)
}

/// How codes are chosen.
#[derive(Clone, Copy, Debug)]
pub struct Rounding<'a> {
    /// Second moments of the inputs, if known: least error of the layer's output instead of its
    /// weights. Several are of as many equal parts of the rows: experts one above the other, each
    /// with inputs of its own.
    pub moments: &'a [Hessian],
    /// What rounds tiles.
    pub rounders: &'a Rounders,
    /// A table for a scheme with a scale for each small group, instead of the built-in one.
    pub codebook: Option<&'a Codebook>,
}

impl<'a> Rounding<'a> {
    /// Without moments, by built-in tables.
    #[must_use]
    pub const fn new(rounders: &'a Rounders) -> Self {
        Self { moments: &[], rounders, codebook: None }
    }
}

/// [`quantize`] with moments of the inputs or other tables.
///
/// With the identity as moments the result is that of none, bit for bit. Moments, like weights, are
/// those after rotation. Takes the memory of moments three times while it factors them, and keeps
/// one factor.
///
/// # Errors
/// As for [`quantize`]; also when the moments are not of `shape.cols` channels or cannot be
/// factored, or several are not of as many equal parts of whole tiles.
pub fn quantize_with(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    const OP: &str = "quantize";
    ShapeError::check_len(OP, "weights", shape.len(), weights.len())?;
    if shape.is_empty() {
        return Err(ShapeError::new(OP, "shape", "at least one row and column", shape).into());
    }
    let group = grouping.columns(shape.cols);
    if group == 0 || !group.is_multiple_of(TILE_COLS) {
        return Err(ShapeError::new(OP, "group", "a positive multiple of 16", group).into());
    }
    if let Some(book) = rounding.codebook.filter(|b| b.scheme() != scheme || scheme.group().is_none()) {
        let want =
            if scheme.group().is_some() { "of the scheme" } else { "none, for the scheme has no groups" };
        return Err(ShapeError::new(OP, "codebook", want, book.scheme()).into());
    }
    if let Some(at) = weights.iter().position(|w| !w.is_finite()) {
        return Err(QuantError::NotFinite { row: at / shape.cols, col: at % shape.cols, value: weights[at] });
    }
    let pieces = rounding.moments.len().max(1);
    if pieces > 1 && !shape.rows.is_multiple_of(pieces * TILE_ROWS) {
        let want = format_args!("{pieces} times a multiple of {TILE_ROWS}, for as many moments");
        return Err(ShapeError::new(OP, "rows", want, shape.rows).into());
    }
    for moments in rounding.moments {
        ShapeError::check_len(OP, "moments", shape.cols, moments.len())?;
    }
    if scheme.planes() > 1 {
        return nested(weights, shape, scheme, grouping, &rounding, progress);
    }
    if SchemeSpec::of(scheme).coarsest().is_some() {
        return crate::nested::quantize(weights, shape, scheme, grouping, &rounding, progress);
    }
    if SchemeSpec::of(scheme).second_level.is_some() {
        return crate::progressive::quantize(weights, shape, scheme, grouping, &rounding, progress);
    }
    if scheme.group().is_some() {
        return crate::grouped::quantize(weights, shape, scheme, grouping, &rounding, progress);
    }
    plane(weights, shape, scheme, grouping, &rounding, 1.0, progress)
}

/// [`quantize_with`] of what was checked, for a scheme of one plane and one scale a row or wide
/// group; with moments `share` of every error is passed on.
pub(crate) fn plane(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    share: f32,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let (group, pieces) = (grouping.columns(shape.cols), rounding.moments.len().max(1));
    let layout = Layout::new(scheme, shape);
    let rounder =
        |&s: &Segment| Ok((s, rounding.rounders.get(s.scheme).ok_or(QuantError::NoCodebook(s.scheme))?));
    let rounders = layout.segments().iter().map(rounder).collect::<Result<Vec<_>, QuantError>>()?;
    let coders: Vec<(Segment, &dyn Rounder)> = rounders.iter().map(|(s, r)| (*s, &**r)).collect();

    let block = SchemeSpec::of(scheme).block_columns;
    let feedback = rounding.moments.iter().map(|moments| Ok((moments, moments.feedback(block)?)));
    let feedback = feedback.collect::<Result<Vec<_>, QuantError>>()?;
    let groups = shape.cols.div_ceil(group);
    let rms: Vec<f32> =
        weights.par_chunks(shape.cols).flat_map_iter(|row| row.chunks(group).map(root_mean_square)).collect();
    let gain = power_of_two_at_least(rms.iter().copied().fold(0.0, f32::max));
    let mut scales: Vec<f16> = rms.iter().map(|&r| f16::from_f32(r / gain)).collect();
    let mut codes = vec![0; layout.len()];

    // With feedback some rows of tiles go together, for the sake of its products; more where the
    // search wants many tiles at once, in equal parts.
    let tiles = shape.rows.div_ceil(TILE_ROWS) / pieces;
    let batch = coders.iter().map(|(_, coder)| coder.batch()).max().unwrap_or(1);
    let strip = strip(shape.rows, rayon::current_num_threads());
    let down = if feedback.is_empty() {
        1
    } else if batch <= strip / TILE_ROWS {
        strip / TILE_ROWS
    } else {
        tiles.div_ceil(tiles.div_ceil(batch)).next_multiple_of(STRIP / TILE_ROWS)
    };
    let errors: Vec<Vec<f64>> = codes
        .par_chunks_mut(tiles * layout.row_bytes())
        .zip(scales.par_chunks_mut(tiles * TILE_ROWS * groups))
        .zip(weights.par_chunks(tiles * TILE_ROWS * shape.cols))
        .enumerate()
        .flat_map(|(piece, ((codes, scales), rows))| {
            let feedback = feedback.get(piece).copied();
            codes
                .par_chunks_mut(down * layout.row_bytes())
                .zip(scales.par_chunks_mut(down * TILE_ROWS * groups))
                .zip(rows.par_chunks(down * TILE_ROWS * shape.cols))
                .map(move |strip| (feedback, strip))
        })
        .map(|(feedback, ((codes, scales), rows))| {
            progress(0); // where a caller may unwind to stop
            let band = Band { rows, cols: shape.cols, group, gain, row_bytes: layout.row_bytes() };
            let error = match feedback {
                None => band.quantize(&coders, codes, scales),
                Some((moments, feedback)) => Strips { band: &band, moments, feedback, block, strip, share }
                    .quantize(&coders, codes, scales),
            };
            progress(rows.len());
            error
        })
        .collect();

    // Sums run in row order, so that they do not depend on the thread count.
    let error: f64 = errors.iter().flatten().sum();
    let error = relative(error, weights, shape.cols);
    let books = coders.iter().map(|(_, coder)| Arc::new(coder.codebook().clone())).collect();
    Ok(Quantized::new(scheme, shape, grouping, books, (codes, scales, vec![gain]), error))
}

/// How much of its errors a plane that others follow passes on to the columns before.
///
/// Feedback turns errors to where inputs are small, and makes them larger; the next plane has to
/// code them as they are. All of it serves the base at the cost of all planes together, none of it
/// the other way round (`docs/lab/2026-11-codes.md`).
const SHARE: f32 = 0.75;

/// Quantizes plane after plane, each what those before leave. Without moments the base is what its
/// own scheme makes of the matrix, bit for bit; with moments every plane is rounded with feedback
/// of the error that is left then.
fn nested(
    weights: &[f32],
    shape: Shape,
    scheme: Scheme,
    grouping: Grouping,
    rounding: &Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Quantized, QuantError> {
    let planes = scheme.planes();
    let mut rest = weights.to_vec();
    let (mut made, mut scales, mut gains) = (Vec::with_capacity(planes), Vec::new(), Vec::new());
    for component in scheme.components() {
        let last = component.plane + 1 == planes;
        // Whole numbers of weights that add up to all.
        let told = |n: usize| progress(if last { n - n / planes * (planes - 1) } else { n / planes });
        let share = if last { 1.0 } else { SHARE };
        let plane = plane(&rest, shape, component.scheme, grouping, rounding, share, &told)?;
        let (view, none) = (plane.view(), || vec![0.0; shape.cols]);
        rest.par_chunks_mut(shape.cols).enumerate().for_each_init(none, |values, (r, rest)| {
            view.dequantize_row(r, values);
            rest.iter_mut().zip(values).for_each(|(w, v)| *w -= *v);
        });
        scales.extend_from_slice(plane.data.scales());
        gains.extend_from_slice(plane.data.gains());
        made.push(plane.data);
    }
    let strip = |plane: &PackedMatrixData<'_>| plane.view().layout().row_bytes();
    let down = shape.rows.div_ceil(TILE_ROWS);
    let codes = (0..down).flat_map(|d| made.iter().flat_map(move |m| &m.codes()[d * strip(m)..][..strip(m)]));
    let codes = codes.copied().collect();
    let books = made.iter().flat_map(|m| m.codebooks().iter().cloned()).collect();
    let error = relative(squares(&rest, shape.cols), weights, shape.cols);
    Ok(Quantized::new(scheme, shape, grouping, books, (codes, scales, gains), error))
}

/// The sum of squares, row by row: it does not depend on the thread count.
fn squares(values: &[f32], cols: usize) -> f64 {
    values.chunks(cols).map(|row| row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()).sum()
}

/// A squared error as a share of the energy of the weights; 0 for a zero matrix.
pub(crate) fn relative(error: f64, weights: &[f32], cols: usize) -> f64 {
    let energy = squares(weights, cols);
    if energy > 0.0 { error / energy } else { 0.0 }
}

/// A coder for every run of tile columns.
pub(crate) type Coders<'a> = [(Segment, &'a dyn Rounder)];

/// Some rows of a matrix: whole rows of tiles, but for the last.
pub(crate) struct Band<'a> {
    pub(crate) rows: &'a [f32], // (rows, cols)
    pub(crate) cols: usize,
    pub(crate) group: usize,
    pub(crate) gain: f32,
    pub(crate) row_bytes: usize,
}

impl Band<'_> {
    /// Codes a band of one row of tiles, re-fits its scales (row-major, one per group) and returns
    /// the squared error of every row.
    fn quantize(&self, coders: &Coders<'_>, codes: &mut [u8], scales: &mut [f16]) -> Vec<f64> {
        self.encode(coders, codes, scales);
        let decoded = self.decode(coders, codes);
        let groups = self.groups();
        for (r, row) in self.rows.chunks(self.cols).enumerate() {
            for (g, weights) in row.chunks(self.group).enumerate() {
                let units = &decoded[r * self.cols + g * self.group..][..weights.len()];
                let scale = &mut scales[r * groups + g];
                *scale = refit(weights, units, *scale, self.gain);
            }
        }
        self.errors(&decoded, scales)
    }

    /// Codes a band of one row of tiles in these scales.
    pub(crate) fn encode(&self, coders: &Coders<'_>, codes: &mut [u8], scales: &[f16]) {
        for &(segment, rounder) in coders {
            let tiles: Vec<[f32; TILE]> =
                (segment.start..segment.end).map(|a| self.tile(a, self.rows, scales)).collect();
            let range = segment.offset..segment.offset + tiles.len() * segment.tile_bytes;
            rounder.encode(&tiles, &mut codes[range]);
        }
    }

    /// Scales of a row.
    pub(crate) fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// `|w - w'|^2` of every row, for decoded weights in units of the scales.
    pub(crate) fn errors(&self, decoded: &[f32], scales: &[f16]) -> Vec<f64> {
        let rows =
            self.rows.chunks(self.cols).zip(decoded.chunks(self.cols)).zip(scales.chunks(self.groups()));
        rows.map(|((row, units), scales)| {
            let groups = row.chunks(self.group).zip(units.chunks(self.group)).zip(scales);
            let error = |(weights, units): (&[f32], &[f32]), scale: f64| -> f64 {
                weights.iter().zip(units).map(|(&w, &q)| (f64::from(w) - scale * f64::from(q)).powi(2)).sum()
            };
            groups.map(|(pair, scale)| error(pair, f64::from(scale.to_f32() * self.gain))).sum()
        })
        .collect()
    }

    /// The scale of a weight of row `r` and column `c`.
    pub(crate) fn scale(&self, scales: &[f16], r: usize, c: usize) -> f32 {
        scales[r * self.groups() + c / self.group].to_f32() * self.gain
    }

    /// Tile column `across` of `rows`, up to 16 rows, regularized to unit variance and padded with
    /// zeros.
    fn tile(&self, across: usize, rows: &[f32], scales: &[f16]) -> [f32; TILE] {
        let mut tile = [0.0; TILE];
        let first = across * TILE_COLS;
        let width = TILE_COLS.min(self.cols - first);
        for (r, row) in rows.chunks(self.cols).enumerate() {
            let scale = self.scale(scales, r, first);
            if scale > 0.0 {
                let values = &mut tile[r * TILE_COLS..][..width];
                values.iter_mut().zip(&row[first..]).for_each(|(v, &w)| *v = w / scale);
            }
        }
        tile
    }

    /// Decoded weights in units of the scale, (rows, cols).
    pub(crate) fn decode(&self, coders: &Coders<'_>, codes: &[u8]) -> Vec<f32> {
        let mut out = vec![0.0; self.rows.len()];
        let mut tile = [0; TILE];
        for (out, codes) in out.chunks_mut(TILE_ROWS * self.cols).zip(codes.chunks(self.row_bytes)) {
            for &(segment, rounder) in coders {
                let book = rounder.codebook();
                for across in segment.start..segment.end {
                    let at = segment.offset + (across - segment.start) * segment.tile_bytes;
                    book.expand_tile(&codes[at..at + segment.tile_bytes], &mut tile);
                    let first = across * TILE_COLS;
                    let width = TILE_COLS.min(self.cols - first);
                    for (row, integers) in out.chunks_mut(self.cols).zip(tile.chunks(TILE_COLS)) {
                        let values = &mut row[first..first + width];
                        values.iter_mut().zip(integers).for_each(|(v, &i)| *v = f32::from(i) * book.step());
                    }
                }
            }
        }
        out
    }
}

fn root_mean_square(values: &[f32]) -> f32 {
    let sum: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "the root mean square of f32 values is an f32"
    )]
    {
        (sum / values.len() as f64).sqrt() as f32
    }
}

/// The least power of two that is not below `x`, 1 for zero; from 2^-120 to 2^120. From the bits: a
/// logarithm rounds numbers just above a power down to it, and not in every library.
pub(crate) fn power_of_two_at_least(x: f32) -> f32 {
    const FRACTION: u32 = 1 << 23;
    if x > 0.0 {
        let exponent = x.to_bits() / FRACTION + u32::from(!x.to_bits().is_multiple_of(FRACTION));
        f32::from_bits(exponent.clamp(127 - 120, 127 + 120) * FRACTION)
    } else {
        1.0
    }
}

/// `x` in half precision, by way of single precision: `f16::from_f64` rounds twice on x86-64 and
/// once elsewhere, and a model has the same bytes wherever it was made.
#[expect(clippy::cast_possible_truncation, reason = "rounds")]
pub(crate) fn nearest_half(x: f64) -> f16 {
    f16::from_f32(x as f32)
}

/// Least-squares scale of `weights ~ gain * scale * units`, or the old one when rounding left
/// nothing to fit.
pub(crate) fn refit(weights: &[f32], units: &[f32], old: f16, gain: f32) -> f16 {
    let (mut dot, mut square) = (0.0f64, 0.0f64);
    for (&w, &q) in weights.iter().zip(units) {
        dot += f64::from(w) * f64::from(q);
        square += f64::from(q).powi(2);
    }
    let best = nearest_half(dot / square / f64::from(gain));
    if dot > 0.0 && best.is_finite() { best } else { old }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use rand_distr::StandardNormal;

    fn quantize(
        weights: &[f32],
        shape: Shape,
        scheme: Scheme,
        grouping: Grouping,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Quantized, QuantError> {
        super::quantize(weights, shape, scheme, grouping, &Rounders::default(), progress)
    }

    fn gaussian(count: usize, sigma: f32, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..count).map(|_| rng.sample::<f32, _>(StandardNormal) * sigma).collect()
    }

    fn scheme(name: &str) -> Scheme {
        name.parse().unwrap()
    }

    #[test]
    fn reported_error_is_the_error_after_decoding() {
        for (name, rows, cols) in [
            ("nuq-3", 33, 100),
            ("vq-2", 16, 64),
            ("tcq-2", 20, 40),
            ("half-tcq-2.25", 16, 96),
            ("int-4", 33, 100),
            ("gnuq-2", 17, 70),
            ("qoq-g128", 33, 300),
            ("qoq-channel", 17, 70),
            ("aq-m2v8", 33, 100),
        ] {
            let shape = Shape::new(rows, cols);
            let weights = gaussian(shape.len(), 0.03, 1);
            for grouping in [Grouping::Row, Grouping::Columns(32)] {
                if grouping != Grouping::Row && SchemeSpec::of(scheme(name)).second_level.is_some() {
                    continue;
                }
                let packed = quantize(&weights, shape, scheme(name), grouping, &|_| ()).unwrap();
                let back = packed.view().dequantize();
                let error: f64 = weights.iter().zip(&back).map(|(&a, &b)| f64::from(a - b).powi(2)).sum();
                let energy: f64 = weights.iter().map(|&a| f64::from(a).powi(2)).sum();
                let got = error / energy;
                assert!(
                    (got - packed.relative_error).abs() < 1e-6,
                    "{name} {grouping:?}: {got} {}",
                    packed.relative_error
                );
                let planes: usize = packed.data.planes().map(|(_, plane)| plane.to_bytes().len()).sum();
                assert_eq!(packed.data.spec().bytes(shape, grouping), Bytes(planes as u64), "{name}");
            }
        }
    }

    #[test]
    fn zero_rows_and_wide_ranges_survive() {
        let shape = Shape::new(4, 64);
        let mut weights = gaussian(shape.len(), 1.0, 2);
        weights[64..128].fill(0.0);
        weights[128..192].iter_mut().for_each(|w| *w *= 1e-4);
        weights[192..].iter_mut().for_each(|w| *w *= 1e30);
        for w in &mut weights[..64] {
            *w *= 1e28;
        }
        let packed = quantize(&weights, shape, scheme("nuq-4"), Grouping::Row, &|_| ()).unwrap();
        let back = packed.view().dequantize();
        assert!(back[64..128].iter().all(|&v| v == 0.0), "a zero row stays zero");
        assert!(back.iter().all(|v| v.is_finite()), "every weight stays finite");
        let all_zero =
            quantize(&[0.0; 64], Shape::new(1, 64), scheme("tcq-2"), Grouping::Row, &|_| ()).unwrap();
        assert_eq!(all_zero.relative_error, 0.0);
        assert!(all_zero.view().dequantize().iter().all(|&v| v == 0.0));
    }

    #[test]
    fn bad_input_is_refused_by_name() {
        let shape = Shape::new(2, 16);
        let mut weights = vec![0.5; 32];
        weights[19] = f32::NAN;
        let error = quantize(&weights, shape, scheme("nuq-4"), Grouping::Row, &|_| ()).unwrap_err();
        assert!(error.to_string().contains("row 1, column 3"), "{error}");
        assert!(quantize(&weights[..31], shape, scheme("nuq-4"), Grouping::Row, &|_| ()).is_err());
        assert!(quantize(&[], Shape::new(0, 16), scheme("nuq-4"), Grouping::Row, &|_| ()).is_err());
        assert!(quantize(&[0.0; 32], shape, scheme("nuq-4"), Grouping::Columns(24), &|_| ()).is_err());
    }

    #[test]
    fn same_bytes_at_any_thread_count() {
        let shape = Shape::new(70, 50);
        let weights = gaussian(shape.len(), 0.02, 3);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| quantize(&weights, shape, scheme("tcq-3"), Grouping::Row, &|_| ()).unwrap())
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn gains_are_powers_of_two_not_below_the_largest_scale() {
        for power in -119..=119 {
            let exact = 2f32.powi(power);
            assert_eq!(power_of_two_at_least(exact), exact);
            assert_eq!(power_of_two_at_least(exact.next_up()), 2.0 * exact);
            assert_eq!(power_of_two_at_least(exact.next_down()), exact);
        }
        let least = 2f32.powi(-120);
        for (x, want) in [(0.0, 1.0), (1e-45, least), (1e-37, least), (f32::MAX, 1.0 / least)] {
            assert_eq!(power_of_two_at_least(x), want, "{x}");
        }
    }

    #[test]
    fn refitting_never_hurts() {
        let weights = gaussian(64, 1.0, 4);
        let units: Vec<f32> = weights.iter().map(|w| (w * 1.3).round()).collect();
        let error =
            |s: f16| weights.iter().zip(&units).map(|(w, q)| (w - s.to_f32() * q).powi(2)).sum::<f32>();
        let old = f16::from_f32(1.0);
        assert!(error(refit(&weights, &units, old, 1.0)) <= error(old));
    }
}
