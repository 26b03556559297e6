//! Vector microkernels of one step of the pruned search. The portable one in [`crate::cells`] is
//! their reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::cells::{CellStep, LANE, LEVELS, MOST, WIDE_LANE};
use fracbit_format::trellis::STATES;
use std::arch::x86_64::*;

pub(crate) fn near_avx512(values: &[[i16; LEVELS]], x: i16, factor: i16, cells: &mut [(u8, [u8; LEVELS])]) {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn body(values: &[[i16; LEVELS]], x: i16, factor: i16, cells: &mut [(u8, [u8; LEVELS])]) {
        let (x, factor) = (_mm512_set1_epi16(x), _mm512_set1_epi16(factor));
        let mut costs = [_mm512_setzero_si512(); MOST];
        let mut least = _mm512_set1_epi16(i16::MAX);
        for (cost, (cell, _)) in costs.iter_mut().zip(&*cells) {
            // SAFETY: `values` is 64 bytes.
            let v = unsafe { _mm512_loadu_si512(values[usize::from(*cell)].as_ptr().cast()) };
            *cost = costs_512(v, x, factor);
            least = _mm512_min_epu16(least, *cost);
        }
        let least = _mm512_set1_epi16(least_512(least).cast_signed());
        for (&cost, (_, to)) in costs.iter().zip(cells) {
            let bytes = _mm512_cvtusepi16_epi8(_mm512_sub_epi16(cost, least));
            // SAFETY: `to` is 32 bytes.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) };
        }
    }
    assert!(cells.len() <= MOST, "few cells");
    // SAFETY: `CellSearch::new` checked that this machine has the instructions.
    unsafe { body(values, x, factor, cells) }
}

/// Costs less `base`, those out of range excepted.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn less_512(costs: __m512i, base: __m512i) -> __m512i {
    let in_range = _mm512_cmpneq_epi8_mask(costs, _mm512_set1_epi8(-1));
    _mm512_mask_subs_epu8(costs, in_range, costs, base)
}

/// Costs less `base`, those out of range excepted.
#[target_feature(enable = "avx2")]
#[inline]
fn less_256(costs: __m256i, base: __m256i) -> __m256i {
    let far = _mm256_cmpeq_epi8(costs, _mm256_set1_epi8(-1));
    _mm256_or_si256(_mm256_subs_epu8(costs, base), far)
}

/// [`crate::cells::cost`] of 32 values.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(crate) fn costs_512(v: __m512i, x: __m512i, factor: __m512i) -> __m512i {
    let d = _mm512_mulhrs_epi16(_mm512_subs_epi16(v, x), factor);
    let d = _mm512_max_epi16(_mm512_adds_epi16(d, d), _mm512_set1_epi16(-i16::MAX));
    _mm512_mulhrs_epi16(d, d)
}

/// The least word.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(crate) fn least_512(v: __m512i) -> u16 {
    least_256(_mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v)))
}

/// The least word.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn least_256(v: __m256i) -> u16 {
    let least = _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    (_mm_cvtsi128_si32(_mm_minpos_epu16(least)) & 0xFFFF) as u16
}

pub(crate) fn near_avx2(values: &[[i16; LEVELS]], x: i16, factor: i16, cells: &mut [(u8, [u8; LEVELS])]) {
    #[target_feature(enable = "avx2")]
    fn body(values: &[[i16; LEVELS]], x: i16, factor: i16, cells: &mut [(u8, [u8; LEVELS])]) {
        let (x, factor) = (_mm256_set1_epi16(x), _mm256_set1_epi16(factor));
        let mut costs = [[_mm256_setzero_si256(); 2]; MOST];
        let mut least = _mm256_set1_epi16(i16::MAX);
        for (costs, (cell, _)) in costs.iter_mut().zip(&*cells) {
            for (cost, values) in costs.iter_mut().zip(values[usize::from(*cell)].as_chunks::<16>().0) {
                // SAFETY: `values` is 32 bytes.
                let v = unsafe { _mm256_loadu_si256(values.as_ptr().cast()) };
                let d = _mm256_mulhrs_epi16(_mm256_subs_epi16(v, x), factor);
                let d = _mm256_max_epi16(_mm256_adds_epi16(d, d), _mm256_set1_epi16(-i16::MAX));
                *cost = _mm256_mulhrs_epi16(d, d);
                least = _mm256_min_epu16(least, *cost);
            }
        }
        let least = _mm256_set1_epi16(least_256(least).cast_signed());
        for (&costs, (_, to)) in costs.iter().zip(cells) {
            let [low, high] = costs.map(|cost| _mm256_sub_epi16(cost, least));
            // Packing works within halves.
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
            // SAFETY: `to` is 32 bytes.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) };
        }
    }
    assert!(cells.len() <= MOST, "few cells");
    // SAFETY: `CellSearch::new` checked that this machine has the instructions.
    unsafe { body(values, x, factor, cells) }
}

macro_rules! dispatch {
    ($body:ident, $step:expr, $after:expr, $before:expr) => {{
        let (step, after, before) = ($step, $after, $before);
        let two = step.kind.new_bits > step.kind.rows_log();
        let shares = 1 << (step.kind.shift - step.kind.rows_log());
        // SAFETY: `CellSearch::new` checked that this machine has the instructions; `step_on`, the
        // only caller, checked all lengths.
        unsafe {
            match (step.kind.rows_log(), two, shares, step.cells.len()) {
                (1, false, 1, _) => $body::<2, 2, false, 1>(step, after, before),
                (1, false, _, _) => $body::<2, 2, false, 2>(step, after, before),
                (1, true, _, ..=2) => $body::<2, 2, true, 1>(step, after, before),
                (1, true, _, _) => $body::<2, 3, true, 1>(step, after, before),
                (2, false, 1, ..=2) => $body::<4, 2, false, 1>(step, after, before),
                (2, false, 1, _) => $body::<4, 3, false, 1>(step, after, before),
                (2, false, _, ..=2) => $body::<4, 2, false, 2>(step, after, before),
                (2, false, _, _) => $body::<4, 3, false, 2>(step, after, before),
                (2, true, _, ..=2) => $body::<4, 2, true, 1>(step, after, before),
                (2, true, _, _) => $body::<4, 3, true, 1>(step, after, before),
                (3, false, 1, ..=2) => $body::<8, 2, false, 1>(step, after, before),
                (3, false, 1, _) => $body::<8, 3, false, 1>(step, after, before),
                (3, false, _, ..=2) => $body::<8, 2, false, 2>(step, after, before),
                (3, false, _, _) => $body::<8, 3, false, 2>(step, after, before),
                (3, true, _, ..=2) => $body::<8, 2, true, 1>(step, after, before),
                (3, true, _, _) => $body::<8, 3, true, 1>(step, after, before),
                (_, false, 1, ..=2) => $body::<16, 2, false, 1>(step, after, before),
                (_, false, 1, _) => $body::<16, 3, false, 1>(step, after, before),
                (_, false, _, ..=2) => $body::<16, 2, false, 2>(step, after, before),
                (_, false, _, _) => $body::<16, 3, false, 2>(step, after, before),
                (_, true, 1, ..=2) => $body::<16, 2, true, 1>(step, after, before),
                (_, true, 1, _) => $body::<16, 3, true, 1>(step, after, before),
                (_, true, _, ..=2) => $body::<16, 2, true, 2>(step, after, before),
                (_, true, _, _) => $body::<16, 3, true, 2>(step, after, before),
            }
        }
    }};
}

pub(crate) fn step_avx512(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    dispatch!(avx512, step, after, before)
}

pub(crate) fn step_avx512_vbmi(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    dispatch!(avx512_vbmi, step, after, before)
}

pub(crate) fn step_avx2(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    dispatch!(avx2, step, after, before)
}

macro_rules! body {
    (
        $name:ident, $features:literal, $vector:ty, $lanes:literal, $bytes:expr,
        $set1:ident, $load:ident, $spread:ident, $less:ident, $adds:ident, $min:ident, $shuffle:ident,
        $zero:ident, $add:ident,
        $either:ident, $row_bits:expr, $rows:expr, $levels:ident, $level:ident, $unpack:ident, $turn:ident, $store:ident,
        $scatter:ident, $reduce:ident
    ) => {
        /// # Safety
        /// The lengths are those that `step_on` checks, and the step's kind was arranged for this
        /// width.
        #[target_feature(enable = $features)]
        unsafe fn $name<const ROWS: usize, const CELLS: usize, const TWO: bool, const SHARES: usize>(
            step: &CellStep<'_>,
            after: &[u8],
            before: &mut [u8],
        ) -> u8 {
            const WIDTH: usize = $lanes * $bytes;
            let CellStep { kind, base, settles, columns, cells } = *step;
            let based = base != 0;
            let rows_log = kind.rows_log();
            let stride = STATES >> (kind.new_bits + kind.shift);
            debug_assert_eq!(SHARES, 1 << (kind.shift - rows_log), "vectors that share a table");
            let base = $set1(base.cast_signed());
            let mut costs = [$levels(&[0; LEVELS]); CELLS];
            let mut turns = [[$zero(); CELLS]; SHARES];
            // As `Kind::packed`, but known to the compiler.
            let packed = $bytes == WIDE_LANE && ROWS << u32::from(TWO) <= 4;
            debug_assert_eq!(packed, kind.packed($bytes), "what the tables hold");
            for (i, (cell, levels)) in cells.iter().enumerate().take(CELLS) {
                costs[i] = $levels(levels);
                for (share, turns) in turns.iter_mut().enumerate() {
                    turns[i] = $spread(&kind.turns[usize::from(*cell)]);
                    if packed {
                        // SAFETY: there are columns of two vectors.
                        let columns = unsafe { $load(kind.columns.all()[share * WIDTH..].as_ptr().cast()) };
                        turns[i] = $add(turns[i], columns);
                    }
                }
            }
            let row_bits = $row_bits(rows_log, kind.new_bits);
            let (picks, levels) = (kind.picks.all().as_ptr(), kind.levels.all().as_ptr());
            let mut least = $set1(-1);
            let mut at = columns.0 << kind.shift;
            let load = |row: usize, first: usize| {
                // SAFETY: `row << .. | first + WIDTH` stays within the `STATES >> shift` costs
                // after the step.
                let v = unsafe { $load(after.as_ptr().add(row * stride + first).cast()) };
                if based { $less(v, base) } else { v }
            };
            for first in (columns.0..columns.1).step_by(WIDTH) {
                let mut tables = [$zero(); ROWS];
                for (row, table) in tables.iter_mut().enumerate() {
                    *table = load(row, first);
                }
                $unpack(&mut tables);
                let mut others = tables;
                if TWO {
                    for (row, table) in others.iter_mut().enumerate() {
                        *table = load(row + ROWS, first);
                    }
                    $unpack(&mut others);
                }
                // Groups of results whose lanes can be written in whole vectors, where there are as
                // many.
                let group = $lanes.min(ROWS * SHARES);
                for group_at in (0..ROWS * SHARES).step_by(group) {
                    let mut results = [$zero(); $lanes];
                    for (block, result) in (group_at..).zip(&mut results).take(group) {
                        let (table, other) = (tables[block / SHARES], others[block / SHARES]);
                        // SAFETY: there is a byte for every overlap, and the loops walk through
                        // them once.
                        let code = unsafe { $load(picks.add(at).cast()) };
                        let (pick, level) = if packed {
                            ($rows(code, row_bits), code)
                        } else {
                            // SAFETY: as above.
                            (code, unsafe { $load(levels.add(at).cast()) })
                        };
                        let mut best = $set1(-1);
                        for (cost, turn) in costs.iter().zip(&turns[block % SHARES]) {
                            let pick = $add(pick, *turn);
                            let next = if TWO { $either(pick, table, other) } else { $shuffle(table, pick) };
                            best = $min(best, $adds(next, $level(cost, level)));
                        }
                        if settles {
                            least = $min(least, best);
                        }
                        *result = best;
                        at += WIDTH;
                    }
                    // Lane `l` of the tables holds columns from `first + $bytes l` on, and each
                    // column `1 << shift` overlaps.
                    let (overlap, between) =
                        ((first << kind.shift) + group_at * $bytes, $bytes << kind.shift);
                    if group == $lanes {
                        $turn(&mut results);
                        for (lane, v) in results.into_iter().enumerate() {
                            // SAFETY: all these are below the number of overlaps.
                            unsafe { $store(before.as_mut_ptr().add(overlap + lane * between).cast(), v) };
                        }
                    } else {
                        for (block, v) in results.into_iter().enumerate().take(group) {
                            // SAFETY: as above.
                            unsafe {
                                $scatter(before.as_mut_ptr().add(overlap + block * $bytes), between, v)
                            };
                        }
                    }
                }
            }
            if settles { $reduce(least) } else { 0 }
        }
    };
}

body!(
    avx512,
    "avx512f,avx512bw",
    __m512i,
    4,
    LANE,
    _mm512_set1_epi8,
    _mm512_loadu_si512,
    spread_512,
    less_512,
    _mm512_adds_epu8,
    _mm512_min_epu8,
    _mm512_shuffle_epi8,
    _mm512_setzero_si512,
    _mm512_add_epi8,
    either_512,
    |_, _| (),
    |code, ()| code,
    levels_512,
    level_512,
    unpack_512,
    turn_512,
    _mm512_storeu_si512,
    scatter_512,
    reduce_512
);
body!(
    avx512_vbmi,
    "avx512f,avx512bw,avx512vbmi,gfni",
    __m512i,
    1,
    WIDE_LANE,
    _mm512_set1_epi8,
    _mm512_loadu_si512,
    spread_512,
    less_512,
    _mm512_adds_epu8,
    _mm512_min_epu8,
    shuffle_vbmi,
    _mm512_setzero_si512,
    _mm512_add_epi8,
    either_vbmi,
    row_bits_vbmi,
    rows_vbmi,
    levels_vbmi,
    level_vbmi,
    unpack_vbmi,
    turn_vbmi,
    _mm512_storeu_si512,
    scatter_512,
    reduce_512
);
body!(
    avx2,
    "avx2",
    __m256i,
    2,
    LANE,
    _mm256_set1_epi8,
    _mm256_loadu_si256,
    spread_256,
    less_256,
    _mm256_adds_epu8,
    _mm256_min_epu8,
    _mm256_shuffle_epi8,
    _mm256_setzero_si256,
    _mm256_add_epi8,
    either_256,
    |_, _| (),
    |code, ()| code,
    levels_256,
    level_256,
    unpack_256,
    turn_256,
    _mm256_storeu_si256,
    scatter_256,
    reduce_256
);

macro_rules! helpers {
    (
        $features:literal, $vector:ty, $unpack:ident,
        $lo8:ident, $hi8:ident, $lo16:ident, $hi16:ident, $lo32:ident, $hi32:ident, $lo64:ident, $hi64:ident
    ) => {
        /// Transposes, in every lane, `ROWS` rows of `ROWS` elements of `16 / ROWS` bytes.
        #[target_feature(enable = $features)]
        #[inline]
        fn $unpack<const ROWS: usize>(rows: &mut [$vector; ROWS]) {
            // `parts` rows make up a group that is interleaved already; row `g * parts + i` holds
            // part `i` of group `g`.
            macro_rules! round {
                ($parts:expr, $low:ident, $high:ident) => {
                    let (old, parts) = (*rows, $parts);
                    for pair in 0..ROWS / 2 {
                        let (group, part) = (pair / parts, pair % parts);
                        let (a, b) = (old[2 * group * parts + part], old[(2 * group + 1) * parts + part]);
                        rows[2 * pair] = $low(a, b);
                        rows[2 * pair + 1] = $high(a, b);
                    }
                };
            }
            if ROWS == 16 {
                round!(1, $lo8, $hi8);
            }
            if ROWS >= 8 {
                round!(ROWS / 8, $lo16, $hi16);
            }
            if ROWS >= 4 {
                round!(ROWS / 4, $lo32, $hi32);
            }
            round!(ROWS / 2, $lo64, $hi64);
        }
    };
}

helpers!(
    "avx512f,avx512bw",
    __m512i,
    unpack_512,
    _mm512_unpacklo_epi8,
    _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi16,
    _mm512_unpackhi_epi16,
    _mm512_unpacklo_epi32,
    _mm512_unpackhi_epi32,
    _mm512_unpacklo_epi64,
    _mm512_unpackhi_epi64
);
helpers!(
    "avx2",
    __m256i,
    unpack_256,
    _mm256_unpacklo_epi8,
    _mm256_unpackhi_epi8,
    _mm256_unpacklo_epi16,
    _mm256_unpackhi_epi16,
    _mm256_unpacklo_epi32,
    _mm256_unpackhi_epi32,
    _mm256_unpacklo_epi64,
    _mm256_unpackhi_epi64
);

/// Picks from `b` where bit 7 of a byte of `pick` is set, from `a` elsewhere, by bits 3 to 6.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn either_512(pick: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // The low bits are zero, so that nothing crosses bytes.
    let place = _mm512_srli_epi16::<3>(pick);
    _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, place), _mm512_movepi8_mask(pick), b, place)
}

/// As [`either_512`].
#[target_feature(enable = "avx2")]
#[inline]
fn either_256(pick: __m256i, a: __m256i, b: __m256i) -> __m256i {
    let place = _mm256_srli_epi16::<3>(pick);
    _mm256_blendv_epi8(_mm256_shuffle_epi8(a, place), _mm256_shuffle_epi8(b, place), pick)
}

/// Picks from `b` where bit 6 is set, from `a` elsewhere, by the bits below; bit 7 does not count.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn either_vbmi(pick: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_permutex2var_epi8(a, pick, b)
}

/// Picks by the low 6 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn shuffle_vbmi(table: __m512i, pick: __m512i) -> __m512i {
    _mm512_permutexvar_epi8(pick, table)
}

/// The costs of 16 and another 16 levels.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn levels_512(levels: &[u8; LEVELS]) -> [__m512i; 2] {
    let (halves, _) = levels.as_chunks();
    [spread_512(&halves[0]), spread_512(&halves[1])]
}

/// As [`levels_512`].
#[target_feature(enable = "avx2")]
#[inline]
fn levels_256(levels: &[u8; LEVELS]) -> [__m256i; 2] {
    let (halves, _) = levels.as_chunks();
    [spread_256(&halves[0]), spread_256(&halves[1])]
}

/// The costs of 32 levels.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn levels_vbmi(levels: &[u8; LEVELS]) -> __m512i {
    // Twice, for bit 5 may be that of a row.
    // SAFETY: `levels` is 32 bytes.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(levels.as_ptr().cast()) })
}

/// What takes the rows of packed picks, the upper three bits, to where an index has them.
#[target_feature(enable = "avx512f")]
#[inline]
fn row_bits_vbmi(rows_log: u32, new_bits: u32) -> __m512i {
    // `vgf2p8affineqb`: bit `i` of a byte is the parity of what byte `7 - i` of the matrix leaves
    // of it.
    let first = WIDE_LANE.ilog2() - rows_log;
    let matrix =
        (0..new_bits).fold(0u64, |m, bit| m | 1 << (LEVELS.ilog2() + bit) << (8 * (7 - first - bit)));
    _mm512_set1_epi64(matrix.cast_signed())
}

/// The rows of packed picks, as [`row_bits_vbmi`] says.
#[target_feature(enable = "avx512f,gfni")]
#[inline]
fn rows_vbmi(code: __m512i, row_bits: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(code, row_bits)
}

/// The cost of a level, which has bits 4 and 7 set in the second half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn level_512(costs: &[__m512i; 2], level: __m512i) -> __m512i {
    let other = _mm512_xor_si512(level, _mm512_set1_epi8(i8::MIN));
    _mm512_or_si512(_mm512_shuffle_epi8(costs[0], level), _mm512_shuffle_epi8(costs[1], other))
}

/// As [`level_512`].
#[target_feature(enable = "avx2")]
#[inline]
fn level_256(costs: &[__m256i; 2], level: __m256i) -> __m256i {
    let other = _mm256_xor_si256(level, _mm256_set1_epi8(i8::MIN));
    _mm256_or_si256(_mm256_shuffle_epi8(costs[0], level), _mm256_shuffle_epi8(costs[1], other))
}

/// As [`level_512`], of which only the low five bits count here.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn level_vbmi(costs: &__m512i, level: __m512i) -> __m512i {
    _mm512_permutexvar_epi8(level, *costs)
}

/// Transposes lanes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn turn_512(v: &mut [__m512i; 4]) {
    let a = _mm512_shuffle_i32x4::<0b01_00_01_00>(v[0], v[1]); // 00 01 10 11
    let b = _mm512_shuffle_i32x4::<0b11_10_11_10>(v[0], v[1]); // 02 03 12 13
    let c = _mm512_shuffle_i32x4::<0b01_00_01_00>(v[2], v[3]);
    let d = _mm512_shuffle_i32x4::<0b11_10_11_10>(v[2], v[3]);
    *v = [
        _mm512_shuffle_i32x4::<0b10_00_10_00>(a, c),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(a, c),
        _mm512_shuffle_i32x4::<0b10_00_10_00>(b, d),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(b, d),
    ];
}

/// One lane is its own transposition.
fn turn_vbmi(_: &mut [__m512i; 1]) {}

/// Transposes `ROWS` rows of `ROWS` elements of `64 / ROWS` bytes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn unpack_vbmi<const ROWS: usize>(rows: &mut [__m512i; ROWS]) {
    // The transposition of the elements within lanes, then that of the lanes.
    let old = *rows;
    match ROWS {
        2 => {
            rows[0] = _mm512_shuffle_i64x2::<0b01_00_01_00>(old[0], old[1]);
            rows[1] = _mm512_shuffle_i64x2::<0b11_10_11_10>(old[0], old[1]);
        }
        4 => {
            let mut lanes = [old[0], old[1], old[2], old[3]];
            turn_512(&mut lanes);
            rows.copy_from_slice(&lanes);
        }
        8 => {
            let pairs: [_; 4] = std::array::from_fn(|p| [old[2 * p], old[2 * p + 1]]);
            let mut even = pairs.map(|[a, b]| _mm512_unpacklo_epi64(a, b));
            let mut odd = pairs.map(|[a, b]| _mm512_unpackhi_epi64(a, b));
            turn_512(&mut even);
            turn_512(&mut odd);
            for lane in 0..4 {
                rows[2 * lane] = even[lane];
                rows[2 * lane + 1] = odd[lane];
            }
        }
        _ => {
            let fours: [_; 4] = std::array::from_fn(|q| {
                let [a, b, c, d] = std::array::from_fn(|i| old[4 * q + i]);
                let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                let (rest_ab, rest_cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                [
                    _mm512_unpacklo_epi64(ab, cd),
                    _mm512_unpackhi_epi64(ab, cd),
                    _mm512_unpacklo_epi64(rest_ab, rest_cd),
                    _mm512_unpackhi_epi64(rest_ab, rest_cd),
                ]
            });
            for part in 0..4 {
                let mut lanes = fours.map(|four| four[part]);
                turn_512(&mut lanes);
                for lane in 0..4 {
                    rows[4 * lane + part] = lanes[lane];
                }
            }
        }
    }
}

/// As [`turn_512`].
#[target_feature(enable = "avx2")]
#[inline]
fn turn_256(v: &mut [__m256i; 2]) {
    *v = [_mm256_permute2x128_si256::<0x20>(v[0], v[1]), _mm256_permute2x128_si256::<0x31>(v[0], v[1])];
}

fn lane(bytes: &[u8; LANE]) -> __m128i {
    // SAFETY: every x86-64 has SSE2, and `bytes` is 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn spread_512(bytes: &[u8; LANE]) -> __m512i {
    _mm512_broadcast_i32x4(lane(bytes))
}

#[target_feature(enable = "avx2")]
#[inline]
fn spread_256(bytes: &[u8; LANE]) -> __m256i {
    _mm256_broadcastsi128_si256(lane(bytes))
}

/// # Safety
/// 16 bytes can be written to `to` and to three more places in strides of `stride` bytes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn scatter_512(to: *mut u8, stride: usize, v: __m512i) {
    // SAFETY: the function's contract.
    unsafe {
        _mm_storeu_si128(to.cast(), _mm512_castsi512_si128(v));
        _mm_storeu_si128(to.add(stride).cast(), _mm512_extracti32x4_epi32::<1>(v));
        _mm_storeu_si128(to.add(2 * stride).cast(), _mm512_extracti32x4_epi32::<2>(v));
        _mm_storeu_si128(to.add(3 * stride).cast(), _mm512_extracti32x4_epi32::<3>(v));
    }
}

/// # Safety
/// 16 bytes can be written to `to` and to `to + stride`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn scatter_256(to: *mut u8, stride: usize, v: __m256i) {
    // SAFETY: the function's contract.
    unsafe {
        _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(v));
        _mm_storeu_si128(to.add(stride).cast(), _mm256_extracti128_si256::<1>(v));
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn reduce_512(v: __m512i) -> u8 {
    let mut out = [0u8; 64];
    // SAFETY: `out` is 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), v) };
    out.into_iter().min().unwrap_or(u8::MAX)
}

#[target_feature(enable = "avx2")]
fn reduce_256(v: __m256i) -> u8 {
    let mut out = [0u8; 32];
    // SAFETY: `out` is 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), v) };
    out.into_iter().min().unwrap_or(u8::MAX)
}
