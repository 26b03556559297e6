//! Attention over caches of 4 bits, as products of bytes: 64 bytes hold 128 places in [`LEVELS`],
//! which two shuffles turn into levels. What multiplies them, a query or weights of 14 bits, goes
//! in two parts of 7; the sums of both are exact, so the results are those of 16-bit products.
//!
//! Levels are unsigned here, [`OFFSET`] larger, and the sums get that much less for each unit of
//! the query or of the weights.

use super::load;
use crate::reads::Ahead;
use fracbit_kernels::vectors::{KEY_BLOCK, LEVELS, Scores, WEIGHT_BLOCK, Weigh};
use std::arch::x86_64::*;

/// What makes all levels unsigned.
const OFFSET: i32 = -(LEVELS[0] as i32);
/// Bits of the lower part of a query's or weight's number. The higher one is then at most 64 in
/// magnitude.
const LOW_BITS: u32 = 7;
/// Most numbers of a query.
pub(super) const MOST: usize = 256;
/// Numbers of a position that meet a query at once, and that a row of pairs has in a line.
const AT_ONCE: usize = 8;
const LINE: usize = 64;

const UNSIGNED: [u8; 16] = {
    let (mut all, mut i) = ([0; 16], 0);
    while i < 16 {
        all[i] = (LEVELS[i] as i32 + OFFSET) as u8;
        i += 1;
    }
    all
};

/// From four rows of pairs of dimensions, sixteen positions each, to the eight dimensions of each
/// position, in the low halves of the first eight positions and in the high ones of the others.
const BY_POSITION: [u8; 64] = {
    let (mut from, mut i) = ([0; 64], 0);
    while i < 64 {
        let (position, dimension) = (i / AT_ONCE, i % AT_ONCE);
        from[i] = (16 * (dimension / 2) + 2 * position + dimension % 2) as u8;
        i += 1;
    }
    from
};

/// Numbers in two parts, and what an offset of levels adds to their products.
struct Parts<const N: usize> {
    high: [i8; N],
    low: [i8; N],
    offset: i32,
}

impl<const N: usize> Parts<N> {
    const NONE: Self = Self { high: [0; N], low: [0; N], offset: 0 };

    /// Those of up to `N` numbers of 14 bits with their sign; what fills the last 32 is 0.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn set(&mut self, numbers: &[i16]) {
        assert!(numbers.len() <= N && N.is_multiple_of(32), "room for all");
        let mut sums = _mm512_setzero_si512();
        for at in (0..numbers.len()).step_by(32) {
            let left = (numbers.len() - at).min(32);
            let mask = ((1u64 << left) - 1) as u32;
            // SAFETY: `left` numbers from `at` on; 32 bytes of `N`.
            unsafe {
                let sixteen = _mm512_maskz_loadu_epi16(mask, numbers.as_ptr().wrapping_add(at));
                sums = _mm512_dpwssd_epi32(sums, sixteen, _mm512_set1_epi16(1));
                let high = _mm512_srai_epi16::<LOW_BITS>(sixteen);
                let low = _mm512_and_si512(sixteen, _mm512_set1_epi16((1 << LOW_BITS) - 1));
                _mm256_storeu_si256(self.high.as_mut_ptr().add(at).cast(), _mm512_cvtepi16_epi8(high));
                _mm256_storeu_si256(self.low.as_mut_ptr().add(at).cast(), _mm512_cvtepi16_epi8(low));
            }
        }
        self.offset = OFFSET * _mm512_reduce_add_epi32(sums);
    }
}

/// Levels of the low halves of bytes, and of the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn levels(places: __m512i) -> [__m512i; 2] {
    // SAFETY: 16 bytes.
    let table = unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(UNSIGNED.as_ptr().cast())) };
    let mask = _mm512_set1_epi8(15);
    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(places), mask);
    [_mm512_shuffle_epi8(table, _mm512_and_si512(places, mask)), _mm512_shuffle_epi8(table, high)]
}

/// The sums of both parts, less what the offset added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn joined([high, low]: [__m512i; 2], offset: __m512i) -> __m512i {
    _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(high), low), offset)
}

/// Scores of all queries, of a multiple of eight numbers and at most [`MOST`].
///
/// # Safety
/// As for `Vectors::scores`, with `keys` of 4 bits and room for all scores at `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn scores(args: &Scores<'_>, keys: *const u8, out: *mut f32) {
    let mut parts = [Parts::<MOST>::NONE; 4];
    let count = args.query_scales.len();
    let mut ahead = Ahead::of(args.next, keys);
    let mut first = 0;
    while first < count {
        let rows = (count - first).min(4);
        for (parts, query) in
            parts.iter_mut().zip(args.queries[first * args.dim..].chunks(args.dim)).take(rows)
        {
            parts.set(query);
        }
        // SAFETY: promised by the caller.
        unsafe {
            match rows {
                1 => blocks::<1>(args, &parts, first, (keys, ahead), out),
                2 => blocks::<2>(args, &parts, first, (keys, ahead), out),
                3 => blocks::<3>(args, &parts, first, (keys, ahead), out),
                _ => blocks::<4>(args, &parts, first, (keys, ahead), out),
            }
        }
        (first, ahead) = (first + rows, Ahead::NONE);
    }
}

/// Scores of `Q` queries from `first` on.
///
/// # Safety
/// As for [`scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn blocks<const Q: usize>(
    args: &Scores<'_>,
    parts: &[Parts<MOST>; 4],
    first: usize,
    (keys, ahead): (*const u8, Ahead),
    out: *mut f32,
) {
    // SAFETY: an array of 64 bytes.
    let by_position = unsafe { load(BY_POSITION.as_ptr()) };
    let evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odds = _mm512_or_si512(evens, _mm512_set1_epi32(1));
    let steps = args.dim / AT_ONCE;
    for block in 0..args.key_scales.len() / KEY_BLOCK {
        let mut sums = [[[_mm512_setzero_si512(); 2]; 2]; Q];
        for step in 0..steps {
            let at = keys.wrapping_add((block * steps + step) * LINE);
            ahead.ask(at);
            // SAFETY: the line is one of a key block, promised by the caller.
            let levels = levels(_mm512_permutexvar_epi8(by_position, unsafe { load(at) }));
            for q in 0..Q {
                for (part, numbers) in [&parts[q].high, &parts[q].low].into_iter().enumerate() {
                    // SAFETY: `dim` numbers at most `MOST`.
                    let eight =
                        unsafe { numbers.as_ptr().add(step * AT_ONCE).cast::<i64>().read_unaligned() };
                    let eight = _mm512_set1_epi64(eight);
                    for half in 0..2 {
                        sums[q][part][half] = _mm512_dpbusd_epi32(sums[q][part][half], levels[half], eight);
                    }
                }
            }
        }
        // SAFETY: a block of scales, and of the scores of each query.
        unsafe {
            let key_scales = _mm512_loadu_ps(args.key_scales.as_ptr().add(block * KEY_BLOCK));
            for q in 0..Q {
                // Two lanes of a position.
                let mut whole = [_mm512_setzero_si512(); 2];
                for part in 0..2 {
                    let [near, far] = sums[q][part];
                    let pair = _mm512_permutex2var_epi32(near, evens, far);
                    whole[part] = _mm512_add_epi32(pair, _mm512_permutex2var_epi32(near, odds, far));
                }
                let sum = joined(whole, _mm512_set1_epi32(parts[q].offset));
                let scale = _mm512_set1_ps(*args.query_scales.get_unchecked(first + q));
                let scores = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(key_scales, scale));
                _mm512_storeu_ps(out.add((first + q) * args.stride + block * KEY_BLOCK), scores);
            }
        }
    }
}

/// Weighted sums for all queries, of values of a multiple of sixteen numbers.
///
/// # Safety
/// As for `Vectors::weigh`, with `values` of 4 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn weigh(args: &Weigh<'_>, values: *const u8, out: &mut [f32]) {
    let (dim, positions) = (args.dim, args.positions());
    let count = out.len() / dim;
    let mut parts = [Parts::<WEIGHT_BLOCK>::NONE; 4];
    let behind = Ahead::of(args.next, values);
    for block in 0..positions.div_ceil(WEIGHT_BLOCK) {
        let here = (positions - block * WEIGHT_BLOCK).min(WEIGHT_BLOCK);
        let mut first = 0;
        while first < count {
            let rows = (count - first).min(4);
            for (q, parts) in parts[..rows].iter_mut().enumerate() {
                parts.set(&args.weights[(first + q) * args.stride + block * WEIGHT_BLOCK..][..here]);
            }
            let values = values.wrapping_add(block * (WEIGHT_BLOCK / 2) * dim);
            let ahead = if first == 0 { behind } else { Ahead::NONE };
            for column in (0..dim).step_by(LINE) {
                let at = Columns { args, parts: &parts, first, block, pairs: here / 2, column, ahead };
                let out = out[first * dim..].as_mut_ptr();
                // SAFETY: promised by the caller; there are as many queries and columns.
                unsafe {
                    match rows {
                        1 => at.add::<1>(values, out),
                        2 => at.add::<2>(values, out),
                        3 => at.add::<3>(values, out),
                        _ => at.add::<4>(values, out),
                    }
                }
            }
            first += rows;
        }
    }
}

/// Up to 64 columns of a block of values.
struct Columns<'a> {
    args: &'a Weigh<'a>,
    parts: &'a [Parts<WEIGHT_BLOCK>; 4],
    /// The first query.
    first: usize,
    block: usize,
    /// Pairs of positions.
    pairs: usize,
    column: usize,
    ahead: Ahead,
}

impl Columns<'_> {
    /// Adds the weighted sums of `Q` queries, the first of which has its sums at `out`.
    ///
    /// # Safety
    /// `values` begin with the block's first row, and have as many rows of the values' numbers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn add<const Q: usize>(&self, values: *const u8, out: *mut f32) {
        let Self { args, parts, first, block, column, .. } = *self;
        let dim = args.dim;
        // SAFETY: promised by the caller.
        let [near, far] = unsafe { [self.sums::<Q, 0>(values), self.sums::<Q, 1>(values)] };
        for q in 0..Q {
            let offset = _mm512_set1_epi32(parts[q].offset);
            // Of each sixteen columns four, in the quarters of a vector: the first, second, third
            // and last ones. Then the quarters are transposed.
            let [[high_a, high_c], [low_a, low_c]] = near[q];
            let [[high_b, high_d], [low_b, low_d]] = far[q];
            let (a, b) = (joined([high_a, low_a], offset), joined([high_b, low_b], offset));
            let (c, d) = (joined([high_c, low_c], offset), joined([high_d, low_d], offset));
            let ab =
                [_mm512_shuffle_i32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_i32x4::<0b11_10_11_10>(a, b)];
            let cd =
                [_mm512_shuffle_i32x4::<0b01_00_01_00>(c, d), _mm512_shuffle_i32x4::<0b11_10_11_10>(c, d)];
            let sums = [
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab[0], cd[0]),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab[0], cd[0]),
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab[1], cd[1]),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab[1], cd[1]),
            ];
            let scale = _mm512_set1_ps(args.scale(first + q, block));
            for (u, sum) in sums.into_iter().enumerate().take((dim - column) / KEY_BLOCK) {
                // SAFETY: sixteen columns of this query.
                unsafe {
                    let out = out.add(q * dim + column + 16 * u);
                    let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_loadu_ps(out));
                    _mm512_storeu_ps(out, sum);
                }
            }
        }
    }

    /// For each query, part of its weights and half of the bytes, the sums of half of the columns:
    /// of each eight the first four or (`HALF` 1) the last four.
    ///
    /// # Safety
    /// As for [`Columns::add`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn sums<const Q: usize, const HALF: usize>(&self, values: *const u8) -> [[[__m512i; 2]; 2]; Q] {
        let dim = self.args.dim;
        let left = (dim - self.column).min(LINE);
        let mask = u64::MAX >> (LINE - left);
        let mut sums = [[[_mm512_setzero_si512(); 2]; 2]; Q];
        for pair in (0..self.pairs).step_by(2) {
            let at = values.wrapping_add(pair * dim + self.column);
            // A row alone meets weights of 0 in the place of the next.
            let next = if pair + 1 < self.pairs { at.wrapping_add(dim) } else { at };
            if HALF == 0 {
                self.ahead.ask(at);
                self.ahead.ask(next);
            }
            // SAFETY: `left` bytes of two rows.
            let rows = unsafe {
                [_mm512_maskz_loadu_epi8(mask, at.cast()), _mm512_maskz_loadu_epi8(mask, next.cast())]
            };
            // Two positions of one row and two of the other.
            let four = if HALF == 0 {
                _mm512_unpacklo_epi16(rows[0], rows[1])
            } else {
                _mm512_unpackhi_epi16(rows[0], rows[1])
            };
            let levels = levels(four);
            for (sums, parts) in sums.iter_mut().zip(self.parts) {
                for (part, numbers) in [&parts.high, &parts.low].into_iter().enumerate() {
                    // SAFETY: four of `WEIGHT_BLOCK` weights, of which `2 pairs` are set and the
                    // others 0.
                    let weights = unsafe { numbers.as_ptr().add(2 * pair).cast::<i32>().read_unaligned() };
                    let weights = _mm512_set1_epi32(weights);
                    for half in 0..2 {
                        sums[part][half] = _mm512_dpbusd_epi32(sums[part][half], levels[half], weights);
                    }
                }
            }
        }
        sums
    }
}
