//! Vector bodies of one step of the pruned search. The portable body in [`crate::cells`] is their reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::cells::{CellStep, LANE};
use fracbit_format::trellis::STATES;
use std::arch::x86_64::*;

macro_rules! dispatch {
    ($body:ident, $step:expr, $after:expr, $before:expr) => {{
        let (step, after, before) = ($step, $after, $before);
        let two = step.kind.new_bits > step.kind.rows_log();
        // SAFETY: `CellSearch::new` checked that this machine has the instructions; `step_on`, the only caller,
        // checked all lengths.
        unsafe {
            match (step.kind.rows_log(), two, step.cells.len()) {
                (1, false, _) => $body::<2, 2, false>(step, after, before),
                (1, true, ..=2) => $body::<2, 2, true>(step, after, before),
                (1, true, _) => $body::<2, 3, true>(step, after, before),
                (2, false, ..=2) => $body::<4, 2, false>(step, after, before),
                (2, true, ..=2) => $body::<4, 2, true>(step, after, before),
                (2, false, _) => $body::<4, 3, false>(step, after, before),
                (2, true, _) => $body::<4, 3, true>(step, after, before),
                (3, false, ..=2) => $body::<8, 2, false>(step, after, before),
                (3, true, ..=2) => $body::<8, 2, true>(step, after, before),
                (3, false, _) => $body::<8, 3, false>(step, after, before),
                (3, true, _) => $body::<8, 3, true>(step, after, before),
                (_, false, ..=2) => $body::<16, 2, false>(step, after, before),
                (_, true, ..=2) => $body::<16, 2, true>(step, after, before),
                (_, false, _) => $body::<16, 3, false>(step, after, before),
                (_, true, _) => $body::<16, 3, true>(step, after, before),
            }
        }
    }};
}

pub(crate) fn step_avx512(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    dispatch!(avx512, step, after, before)
}

pub(crate) fn step_avx2(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    dispatch!(avx2, step, after, before)
}

macro_rules! body {
    (
        $name:ident, $features:literal, $vector:ty, $lanes:literal,
        $set1:ident, $load:ident, $spread:ident, $subs:ident, $adds:ident, $min:ident, $shuffle:ident, $xor:ident,
        $or:ident, $zero:ident, $add:ident, $shift:ident, $either:ident, $unpack:ident, $store:ident, $reduce:ident
    ) => {
        /// # Safety
        /// The lengths are those that `step_on` checks, and the step's kind was arranged for this width.
        #[target_feature(enable = $features)]
        unsafe fn $name<const ROWS: usize, const CELLS: usize, const TWO: bool>(
            step: &CellStep<'_>,
            after: &[u8],
            before: &mut [u8],
        ) -> u8 {
            const WIDTH: usize = $lanes * LANE;
            let CellStep { kind, base, cells } = *step;
            let rows_log = kind.rows_log();
            let stride = STATES >> (kind.new_bits + kind.shift);
            let shares = 1usize << (kind.shift - rows_log);
            let base = $set1(base.cast_signed());
            let flip = $set1(i8::MIN);
            let mut costs = [[$zero(); 2]; CELLS];
            let mut turns = [$zero(); CELLS];
            for ((cost, turn), (cell, levels)) in costs.iter_mut().zip(&mut turns).zip(cells) {
                let (halves, _) = levels.as_chunks();
                *cost = [$spread(&halves[0]), $spread(&halves[1])];
                *turn = $spread(&kind.turns[usize::from(*cell)]);
            }
            let (picks, levels) = (kind.picks.bytes().as_ptr(), kind.levels.bytes().as_ptr());
            let mut least = $set1(-1);
            let mut at = 0;
            let load = |row: usize, first: usize| {
                // SAFETY: `row << .. | first + WIDTH` stays within the `STATES >> shift` costs after the step.
                let v = unsafe { $load(after.as_ptr().add(row * stride + first).cast()) };
                $subs(v, base)
            };
            for first in (0..stride).step_by(WIDTH) {
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
                for (part, (table, other)) in tables.iter().zip(&others).enumerate() {
                    for share in 0..shares {
                        // SAFETY: there is a byte for every overlap, and the loops walk through them once.
                        let pick = unsafe { $load(picks.add(at).cast()) };
                        // SAFETY: as above.
                        let level = unsafe { $load(levels.add(at).cast()) };
                        let flipped = $xor(level, flip);
                        let mut best = $set1(-1);
                        for (cost, turn) in costs.iter().zip(&turns) {
                            let pick = $add(pick, *turn);
                            let next = if TWO {
                                // Bits 3 to 7: the low bits are zero, so that nothing crosses bytes.
                                $either(pick, $shift(pick), *table, *other)
                            } else {
                                $shuffle(*table, pick)
                            };
                            let cost = $or($shuffle(cost[0], level), $shuffle(cost[1], flipped));
                            best = $min(best, $adds(next, cost));
                        }
                        least = $min(least, best);
                        let column = first + part * (LANE / ROWS);
                        let overlap = (column << kind.shift) + share * LANE;
                        // SAFETY: the table's lanes hold the columns from `column` on in strides of 16, and each column
                        // `1 << shift` overlaps, all below `overlaps`.
                        unsafe { $store(before.as_mut_ptr().add(overlap), LANE << kind.shift, best) };
                        at += WIDTH;
                    }
                }
            }
            $reduce(least)
        }
    };
}

body!(
    avx512,
    "avx512f,avx512bw",
    __m512i,
    4,
    _mm512_set1_epi8,
    _mm512_loadu_si512,
    spread_512,
    _mm512_subs_epu8,
    _mm512_adds_epu8,
    _mm512_min_epu8,
    _mm512_shuffle_epi8,
    _mm512_xor_si512,
    _mm512_or_si512,
    _mm512_setzero_si512,
    _mm512_add_epi8,
    shift_512,
    either_512,
    unpack_512,
    store_512,
    reduce_512
);
body!(
    avx2,
    "avx2",
    __m256i,
    2,
    _mm256_set1_epi8,
    _mm256_loadu_si256,
    spread_256,
    _mm256_subs_epu8,
    _mm256_adds_epu8,
    _mm256_min_epu8,
    _mm256_shuffle_epi8,
    _mm256_xor_si256,
    _mm256_or_si256,
    _mm256_setzero_si256,
    _mm256_add_epi8,
    shift_256,
    either_256,
    unpack_256,
    store_256,
    reduce_256
);

macro_rules! helpers {
    (
        $features:literal, $vector:ty, $unpack:ident, $zero:ident,
        $lo8:ident, $hi8:ident, $lo16:ident, $hi16:ident, $lo32:ident, $hi32:ident, $lo64:ident, $hi64:ident
    ) => {
        /// Transposes, in every lane, `ROWS` rows of `ROWS` elements of `16 / ROWS` bytes.
        #[target_feature(enable = $features)]
        #[inline]
        fn $unpack<const ROWS: usize>(rows: &mut [$vector; ROWS]) {
            let mut bytes = LANE / ROWS;
            // `groups` of rows are interleaved already; row `g * parts + i` holds part `i` of group `g`.
            let mut parts = 1;
            while bytes < LANE {
                let old = *rows;
                for group in 0..ROWS / (2 * parts) {
                    for part in 0..parts {
                        let a = old[2 * group * parts + part];
                        let b = old[(2 * group + 1) * parts + part];
                        let (low, high) = match bytes {
                            1 => ($lo8(a, b), $hi8(a, b)),
                            2 => ($lo16(a, b), $hi16(a, b)),
                            4 => ($lo32(a, b), $hi32(a, b)),
                            _ => ($lo64(a, b), $hi64(a, b)),
                        };
                        rows[2 * group * parts + 2 * part] = low;
                        rows[2 * group * parts + 2 * part + 1] = high;
                    }
                }
                (bytes, parts) = (2 * bytes, 2 * parts);
            }
        }
    };
}

helpers!(
    "avx512f,avx512bw",
    __m512i,
    unpack_512,
    _mm512_setzero_si512,
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
    _mm256_setzero_si256,
    _mm256_unpacklo_epi8,
    _mm256_unpackhi_epi8,
    _mm256_unpacklo_epi16,
    _mm256_unpackhi_epi16,
    _mm256_unpacklo_epi32,
    _mm256_unpackhi_epi32,
    _mm256_unpacklo_epi64,
    _mm256_unpackhi_epi64
);

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn shift_512(v: __m512i) -> __m512i {
    _mm512_srli_epi16::<3>(v)
}

#[target_feature(enable = "avx2")]
#[inline]
fn shift_256(v: __m256i) -> __m256i {
    _mm256_srli_epi16::<3>(v)
}

/// Picks from `b` where bit 7 of `which` is set, from `a` elsewhere.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn either_512(which: __m512i, pick: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, pick), _mm512_movepi8_mask(which), b, pick)
}

/// As [`either_512`].
#[target_feature(enable = "avx2")]
#[inline]
fn either_256(which: __m256i, pick: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_blendv_epi8(_mm256_shuffle_epi8(a, pick), _mm256_shuffle_epi8(b, pick), which)
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
unsafe fn store_512(to: *mut u8, stride: usize, v: __m512i) {
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
unsafe fn store_256(to: *mut u8, stride: usize, v: __m256i) {
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
