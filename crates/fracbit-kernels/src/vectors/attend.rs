//! Attention in integers: its operands, their ranges, and the scalar reference.
//!
//! Queries, keys and values are rows of integers with a scale each; the weights that softmax gives
//! to positions are integers with a scale for every [`WEIGHT_BLOCK`] positions. All inner products
//! are sums of integers that fit 32 bits, so they are exact, and additions may come in any order:
//! vectors of every width give the same bits. A row of 16-bit integers keeps 11.5 (keys of the
//! widest heads) to 13 bits beside the sign, relative to its largest number, where half precision
//! keeps 11 of every number.
//!
//! A cache may hold less of keys and values ([`Ints`]): 8-bit integers, or 4 bits, which are places
//! in a table of sixteen integers ([`LEVELS`]). These are widened in registers and then multiplied
//! as all others.

use super::plain::{LANES, MAGIC};
use std::ops::Range;

/// Neighbouring positions that a block of keys interleaves; the lanes of [`Scores`].
pub const KEY_BLOCK: usize = 16;
/// Positions whose weights share a scale.
pub const WEIGHT_BLOCK: usize = 64;
/// Largest magnitude of any integer.
pub const MOST: i32 = 8191;
/// Largest magnitude of the integers of a value.
pub const VALUE_MOST: i32 = 4096;
/// Largest magnitude of the integer of a weight, which is negative only where the scale of its
/// value is.
pub const WEIGHT_MOST: i32 = MOST;

/// The integers that 4 bits stand for. The number of a row that is largest in magnitude is always
/// the last one: where it is negative, the row's scale is. So the other side needs no level that
/// far out. Trained on Gaussian rows of 64 and 128 numbers, equally (Lloyd's algorithm; the errors
/// of rows weighted by their squared scales): errors of .0074 and .0082 of a row's energy, where
/// sixteen equal steps from the least to the largest number leave .0080 and .0099 and want two
/// numbers for a row.
pub const LEVELS: [i8; 16] = [-108, -85, -66, -51, -38, -26, -14, -2, 9, 20, 32, 45, 60, 76, 97, 127];
/// Numbers that share sixteen bytes where they have 4 bits: a row of pairs of a block of keys.
pub const UNIT: usize = 2 * KEY_BLOCK;
/// Largest magnitude of the integers that are compared with [`LEVELS`], which are this much finer.
pub(super) const FINE: i32 = 127 << FINE_LOG;
const FINE_LOG: u32 = 6;

const _: () = assert!(FINE <= MOST, "a row that is rounded to levels is one that can be rounded");
const _: () = assert!(
    WEIGHT_MOST as i64 * VALUE_MOST as i64 * WEIGHT_BLOCK as i64 <= i32::MAX as i64,
    "the weighted sum of a block's values fits 32 bits"
);

/// Largest magnitude of the integers of queries and keys of `dim` numbers: [`MOST`], or less so
/// that every inner product fits 32 bits.
#[must_use]
pub fn key_most(dim: usize) -> i32 {
    let most = (i32::MAX.unsigned_abs() / u32::try_from(dim.max(1)).unwrap_or(u32::MAX)).isqrt();
    i32::try_from(most).map_or(MOST, |most| most.min(MOST))
}

/// Numbers of keys or values as a cache holds them: rows of pairs.
#[derive(Clone, Copy, Debug)]
pub enum Ints<'a> {
    /// 16 bits each.
    I16(&'a [i16]),
    /// 8 bits each.
    I8(&'a [i8]),
    /// 4 bits each, places in [`LEVELS`]: of [`UNIT`] numbers in sixteen bytes the first sixteen
    /// are the low halves of the bytes, the others the high ones. Rows begin with a unit.
    I4(&'a [u8]),
}

impl Ints<'_> {
    /// Rows of `pairs` pairs each; `None` when the last one is not whole.
    #[must_use]
    pub const fn rows(self, pairs: usize) -> Option<usize> {
        let (len, row) = match self {
            Self::I16(ints) => (ints.len(), pairs.checked_mul(2)),
            Self::I8(ints) => (ints.len(), pairs.checked_mul(2)),
            Self::I4(bytes) => (bytes.len(), nibble_row(pairs)),
        };
        match row {
            Some(row) if row > 0 && len.is_multiple_of(row) => Some(len / row),
            _ => None,
        }
    }

    /// Where they begin.
    #[must_use]
    pub const fn start(self) -> *const u8 {
        match self {
            Self::I16(ints) => ints.as_ptr().cast(),
            Self::I8(ints) => ints.as_ptr().cast(),
            Self::I4(bytes) => bytes.as_ptr(),
        }
    }

    /// A number of a row of `pairs` pairs.
    ///
    /// # Panics
    /// When there is no such number.
    #[inline(always)]
    #[must_use]
    pub const fn get(self, pairs: usize, row: usize, at: usize) -> i16 {
        match self {
            Self::I16(ints) => ints[row * 2 * pairs + at],
            Self::I8(ints) => ints[row * 2 * pairs + at] as i16,
            Self::I4(bytes) => {
                let (byte, high) = nibble(at);
                let place =
                    bytes[row * (pairs.div_ceil(UNIT / 2) * UNIT / 2) + byte] >> if high { 4 } else { 0 };
                LEVELS[(place & 15) as usize] as i16
            }
        }
    }

    /// Some pairs of a row of `pairs`, in `buffer` unless they can be read where they are.
    #[inline(always)]
    fn read<'b>(
        &'b self,
        pairs: usize,
        row: usize,
        columns: Range<usize>,
        buffer: &'b mut [i16; 2 * COLUMNS],
    ) -> &'b [i16] {
        let wanted = 2 * columns.start..2 * columns.end;
        if let Self::I16(ints) = self {
            return &ints[row * 2 * pairs..][wanted];
        }
        let buffer = &mut buffer[..wanted.len()];
        buffer.iter_mut().zip(wanted).for_each(|(to, at)| *to = self.get(pairs, row, at));
        buffer
    }
}

/// Bytes of a row of pairs of 4 bits; `None` where there are none, or too many.
#[must_use]
pub const fn nibble_row(pairs: usize) -> Option<usize> {
    pairs.div_ceil(UNIT / 2).checked_mul(UNIT / 2)
}

/// The byte of a row that holds number `at` of 4 bits, and whether in its high half.
#[inline(always)]
#[must_use]
pub const fn nibble(at: usize) -> (usize, bool) {
    (at / UNIT * (UNIT / 2) + at % (UNIT / 2), at % UNIT >= UNIT / 2)
}

/// Numbers and scales that are read after those of a call. They may come from memory, where
/// neither what lies behind these tells where they are nor the processor's own prefetcher knows:
/// so they are asked for meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// In the order of those that are read now.
    pub ints: Ints<'a>,
    /// Of their rows.
    pub scales: &'a [f32],
}

/// Several queries against blocks of keys.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// (query, dim), up to [`key_most`] in magnitude
    pub queries: &'a [i16],
    /// (query)
    pub query_scales: &'a [f32],
    /// Numbers of a query, an even number.
    pub dim: usize,
    /// (block, pair of dimensions, [`KEY_BLOCK`] positions, 2), up to [`key_most`] in magnitude;
    /// [`KEY_BLOCK`] pairs are a row
    pub keys: Ints<'a>,
    /// (position)
    pub key_scales: &'a [f32],
    /// Elements from the scores of a query to those of the next.
    pub stride: usize,
    /// What comes behind the keys.
    pub next: Option<Next<'a>>,
}

/// Weighted sums of values for several queries.
#[derive(Clone, Copy, Debug)]
pub struct Weigh<'a> {
    /// (query, position), whole blocks, `stride` elements from a query to the next; up to
    /// [`WEIGHT_MOST`] in magnitude
    pub weights: &'a [i16],
    /// (query, block), `stride / WEIGHT_BLOCK` elements from a query to the next
    pub scales: &'a [f32],
    /// Elements from the weights of a query to those of the next, a multiple of [`WEIGHT_BLOCK`].
    pub stride: usize,
    /// (pair of positions, dim, 2), up to [`VALUE_MOST`] in magnitude; `dim` pairs are a row
    pub values: Ints<'a>,
    /// Numbers of a value.
    pub dim: usize,
    /// What comes behind the values.
    pub next: Option<Next<'a>>,
}

impl Weigh<'_> {
    /// Positions, an even number.
    #[must_use]
    pub const fn positions(&self) -> usize {
        match self.values.rows(self.dim) {
            Some(pairs) => 2 * pairs,
            None => 0,
        }
    }

    /// The scale of a query's weights for a block.
    #[inline(always)]
    #[must_use]
    pub fn scale(&self, query: usize, block: usize) -> f32 {
        self.scales[query * (self.stride / WEIGHT_BLOCK) + block]
    }
}

/// What softmax leaves of some positions, to become [`Weigh::weights`].
#[derive(Clone, Copy, Debug)]
pub struct Unrounded<'a> {
    /// Weights of neighbouring positions.
    pub weights: &'a [f32],
    /// The scales of their values.
    pub value_scales: &'a [f32],
    /// Positions before them.
    pub skip: usize,
}

/// As [`Vectors::scores`](super::Vectors::scores).
#[inline(always)]
pub fn scores(args: &Scores<'_>, out: &mut [f32]) {
    let Scores { queries, query_scales, dim, keys, key_scales, stride, .. } = *args;
    let mut buffer = [0; 2 * COLUMNS];
    for (n, (query, query_scale)) in queries.chunks_exact(dim).zip(query_scales).enumerate() {
        for (block, key_scales) in key_scales.chunks_exact(KEY_BLOCK).enumerate() {
            let mut sums = [0i32; KEY_BLOCK];
            for (row, query) in (block * (dim / 2)..).zip(query.as_chunks::<2>().0) {
                add_pairs(&mut sums, keys.read(KEY_BLOCK, row, 0..KEY_BLOCK, &mut buffer), *query);
            }
            let out = &mut out[n * stride + block * KEY_BLOCK..][..KEY_BLOCK];
            for ((out, sum), key_scale) in out.iter_mut().zip(sums).zip(key_scales) {
                *out = score(sum, *query_scale, *key_scale);
            }
        }
    }
}

/// Adds the products of pairs of numbers with `[a, b]`.
#[inline(always)]
fn add_pairs(sums: &mut [i32], pairs: &[i16], [a, b]: [i16; 2]) {
    for (sum, [x, y]) in sums.iter_mut().zip(pairs.as_chunks().0) {
        let product = |x: i16, a: i16| i32::from(x).wrapping_mul(a.into());
        *sum = sum.wrapping_add(product(*x, a)).wrapping_add(product(*y, b));
    }
}

/// A score from the inner product of its integers.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "rounded to nearest, as by every instruction set")]
fn score(sum: i32, query_scale: f32, key_scale: f32) -> f32 {
    sum as f32 * (key_scale * query_scale)
}

/// As [`Vectors::weigh`](super::Vectors::weigh).
#[inline(always)]
pub fn weigh(args: &Weigh<'_>, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    for first in (0..args.dim).step_by(COLUMNS) {
        weigh_columns(args, first..args.dim.min(first + COLUMNS), out);
    }
}

/// Columns that the reference sums at a time.
const COLUMNS: usize = 64;

/// Up to 64 columns of [`weigh`], for microkernels that take only whole vectors.
///
/// # Panics
/// When there are more.
#[inline(always)]
pub fn weigh_columns(args: &Weigh<'_>, columns: Range<usize>, out: &mut [f32]) {
    let Weigh { weights, stride, values, dim, .. } = *args;
    let (pairs, mut buffer) = (args.positions() / 2, [0; 2 * COLUMNS]);
    for (n, out) in out.chunks_exact_mut(dim).enumerate() {
        for block in 0..pairs.div_ceil(WEIGHT_BLOCK / 2) {
            let weights = &weights[n * stride + block * WEIGHT_BLOCK..][..WEIGHT_BLOCK];
            let mut sums = [0; COLUMNS];
            let sums = &mut sums[..columns.len()];
            for (row, weights) in (block * (WEIGHT_BLOCK / 2)..pairs).zip(weights.as_chunks::<2>().0) {
                add_pairs(sums, values.read(dim, row, columns.clone(), &mut buffer), *weights);
            }
            let scale = args.scale(n, block);
            for (out, sum) in out[columns.clone()].iter_mut().zip(sums) {
                *out = weighed(*sum, scale, *out);
            }
        }
    }
}

/// Adds a block's weighted sum of integers to an output.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "rounded to nearest, as by every instruction set")]
fn weighed(sum: i32, scale: f32, out: f32) -> f32 {
    (sum as f32).mul_add(scale, out)
}

/// The bits of the largest magnitude, or of a NaN. The order of positive floats is that of their
/// bits, and NaN is above infinity: it survives `max`.
#[inline(always)]
fn largest_of(values: &[f32; WEIGHT_BLOCK]) -> u32 {
    let mut tops = [0; LANES];
    for group in values.as_chunks::<LANES>().0 {
        tops.iter_mut().zip(group).for_each(|(top, v)| *top = magnitude(*v).max(*top));
    }
    highest(tops)
}

#[inline(always)]
fn magnitude(v: f32) -> u32 {
    v.to_bits() & 0x7fff_ffff
}

#[inline(always)]
fn highest(mut tops: [u32; LANES]) -> u32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            tops[i] = tops[i].max(tops[i + width]);
        }
        width /= 2;
    }
    tops[0]
}

/// The largest magnitude; NaN if there is any.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let (blocks, rest) = values.as_chunks();
    let mut top = blocks.iter().map(largest_of).max().unwrap_or(0);
    if !rest.is_empty() {
        let mut last = [0.0; WEIGHT_BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        top = top.max(largest_of(&last));
    }
    f32::from_bits(top)
}

/// Rounds numbers, the largest of which is `largest` in magnitude, by `make(inverse, ints)` to
/// integers up to `most`, and returns their scale. All become zero where `largest` is below 1e-30;
/// and where it is infinite or no number, with a scale that is no number, which makes no numbers of
/// all results.
///
/// A number times `inverse` is at most `most (1 + 2^-23)` in magnitude, so that its nearest integer
/// is at most `most`.
#[inline(always)]
fn round_by(largest: f32, most: i32, ints: &mut [i16], make: impl FnOnce(f32, &mut [i16])) -> f32 {
    if !(1e-30..f32::INFINITY).contains(&largest) {
        ints.fill(0);
        return if largest < 1e-30 { 0.0 } else { f32::NAN };
    }
    #[expect(clippy::cast_precision_loss, reason = "at most 8191")]
    let most = most as f32;
    make(most / largest, ints);
    largest / most
}

/// As [`Vectors::round`](super::Vectors::round).
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are the integer")]
pub fn round(values: &[f32], most: i32, ints: &mut [i16]) -> f32 {
    round_by(largest(values), most, ints, |inverse, ints| {
        let nearest = |(int, v): (&mut i16, &f32)| *int = (v * inverse + MAGIC).to_bits() as i16;
        let ((groups, rest), (values, values_rest)) =
            (ints.as_chunks_mut::<LANES>(), values.as_chunks::<LANES>());
        groups
            .iter_mut()
            .zip(values)
            .for_each(|(ints, values)| ints.iter_mut().zip(values).for_each(nearest));
        rest.iter_mut().zip(values_rest).for_each(nearest);
    })
}

/// As [`Vectors::round_to_levels`](super::Vectors::round_to_levels), for a row that was rounded to
/// integers 64 times as fine as [`LEVELS`]: what its scale is multiplied by.
#[inline(always)]
pub fn levels(ints: &mut [i16]) -> f32 {
    let most = ints.iter().fold(0, |most, int| int.abs().max(most));
    // The first one, whatever comes first elsewhere.
    let negative = ints.iter().find(|int| int.abs() == most).is_some_and(|int| *int < 0);
    let sign = if negative { -1 } else { 1 };
    for int in ints {
        let turned = *int * sign;
        *int = HALFWAY.iter().map(|&half| i16::from(turned > half)).sum();
    }
    f32::from(sign) * (1u32 << FINE_LOG) as f32
}

/// Halfway from a level to the next.
const HALFWAY: [i16; 15] = {
    let (mut halves, mut i) = ([0; 15], 0);
    while i < 15 {
        halves[i] = (LEVELS[i] as i16 + LEVELS[i + 1] as i16) << (FINE_LOG - 1);
        i += 1;
    }
    halves
};

/// What is added to the weights of a block before they are rounded, from -.49 to .49 and evenly at
/// any stretch of positions: multiples of the golden section.
///
/// Weights are never negative. If many small ones stood beside a large one, all would become zero
/// by rounding alone, and their sum, which softmax divides by, would not: up to .4 % of the result.
/// So as many become one as make up for the others.
const DITHER: [f32; WEIGHT_BLOCK] = {
    let mut dither = [0.0; WEIGHT_BLOCK];
    let mut j = 0;
    while j < WEIGHT_BLOCK {
        let multiple = j as f64 * 0.618_033_988_749_894_9;
        dither[j] = (0.98 * (multiple - multiple as u64 as f64 - 0.5)) as f32;
        j += 1;
    }
    dither
};

/// As [`Vectors::round_weights`](super::Vectors::round_weights).
#[inline(always)]
pub fn round_weights(args: &Unrounded<'_>, ints: &mut [i16], scales: &mut [f32]) {
    let Unrounded { mut weights, mut value_scales, mut skip } = *args;
    for (ints, scale) in ints.as_chunks_mut::<WEIGHT_BLOCK>().0.iter_mut().zip(scales) {
        let before = skip.min(WEIGHT_BLOCK);
        let take = weights.len().min(WEIGHT_BLOCK - before);
        *scale = if let (Some(weights), Some(value_scales), 0) =
            (weights.first_chunk(), value_scales.first_chunk(), before)
        {
            round_block(weights, value_scales, ints)
        } else {
            let mut both = [0.0; WEIGHT_BLOCK];
            let each = weights[..take].iter().zip(&value_scales[..take]);
            both[before..].iter_mut().zip(each).for_each(|(b, (w, s))| *b = w * s);
            round_block(&both, &[1.0; WEIGHT_BLOCK], ints)
        };
        (weights, value_scales, skip) = (&weights[take..], &value_scales[take..], skip - before);
    }
}

/// Products are made twice: kept, they would go through memory. The largest one is that of a plain
/// loop, of which compilers make vectors; of partial ones for each lane they make gathers.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are the integer")]
fn round_block(
    weights: &[f32; WEIGHT_BLOCK],
    value_scales: &[f32; WEIGHT_BLOCK],
    ints: &mut [i16; WEIGHT_BLOCK],
) -> f32 {
    let products = || weights.iter().zip(value_scales).map(|(w, s)| w * s);
    let top = products().fold(0, |top, both| magnitude(both).max(top));
    round_by(f32::from_bits(top), WEIGHT_MOST, ints, |inverse, ints| {
        for ((int, both), dither) in ints.iter_mut().zip(products()).zip(&DITHER) {
            *int = (both * inverse + dither + MAGIC).to_bits() as i16;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_sums_fit() {
        for dim in (2..=1024).step_by(2).chain([1 << 20]) {
            let most = i64::from(key_most(dim));
            assert!(most * most * i64::try_from(dim).unwrap() <= i64::from(i32::MAX), "{dim}");
        }
        assert_eq!([16, 64, 128, 256].map(key_most), [8191, 5792, 4095, 2896]);
    }

    #[test]
    fn rounding_keeps_the_largest_and_says_what_is_no_number() {
        let mut ints = [9; 4];
        let scale = round(&[1.0, -4.0, 0.5, 0.0], 4096, &mut ints);
        assert_eq!((ints, scale), ([1024, -4096, 512, 0], 4.0 / 4096.0));
        assert_eq!((round(&[1e-31; 4], 4096, &mut ints), ints), (0.0, [0; 4]));
        for odd in [f32::NAN, f32::INFINITY] {
            assert!(round(&[1.0, odd, 2.0, 0.0], 4096, &mut ints).is_nan());
            assert_eq!(ints, [0; 4]);
        }
    }

    #[test]
    fn small_weights_count_beside_a_large_one() {
        // A sink of attention: each of the others is less than half an integer, for most of these
        // sizes.
        for small in [6e-6, 2e-5, 6e-5, 1e-4, 3e-4] {
            for first in [0, 17, 63] {
                let mut weights = [small; WEIGHT_BLOCK];
                weights[first] = 1.0;
                let (mut ints, mut scales) = ([9; WEIGHT_BLOCK], [9.0]);
                let args = Unrounded { weights: &weights, value_scales: &[1.0; WEIGHT_BLOCK], skip: 0 };
                round_weights(&args, &mut ints, &mut scales);
                let sum: f32 = ints.iter().map(|i| f32::from(*i) * scales[0]).sum();
                let want: f32 = weights.iter().sum();
                assert!((sum / want - 1.0).abs() < 2e-4, "{small} {first}: {sum} {want}");
            }
        }
    }

    #[test]
    fn weights_outside_are_zero() {
        let (mut ints, mut scales) = ([9; 2 * WEIGHT_BLOCK], [9.0; 2]);
        let args = Unrounded { weights: &[0.5, 1.0, 0.25], value_scales: &[2.0, 1.0, 1.0], skip: 62 };
        round_weights(&args, &mut ints, &mut scales);
        assert_eq!(scales, [1.0 / 8191.0, 0.25 / 8191.0]);
        let mut want = [0; 2 * WEIGHT_BLOCK];
        want[62..65].fill(8191);
        assert_eq!(ints, want);
    }
}
