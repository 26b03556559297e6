//! Vector microkernels of one search step. The portable one in [`crate::step`] is their reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::{
    search::LANES,
    step::{self, Fan, Step},
};
use fracbit_format::trellis::{STATE_BITS, STATES};
use std::arch::x86_64::*;

macro_rules! dispatch {
    ($body:ident, $doublings:expr, $step:expr, $after:expr, $before:expr) => {{
        // SAFETY: `Search::new` checked that this machine has the instructions of the one it was
        // given; `step::step`, the only caller, checked all lengths.
        unsafe {
            match ($step.x.len(), $doublings) {
                (1, 0) => $body::<1, 0>($step, $after, $before),
                (1, _) => $body::<1, 1>($step, $after, $before),
                (2, 0) => $body::<2, 0>($step, $after, $before),
                (2, _) => $body::<2, 1>($step, $after, $before),
                (_, 0) => $body::<4, 0>($step, $after, $before),
                (_, _) => $body::<4, 1>($step, $after, $before),
            }
        }
    }};
}

pub(crate) fn step_avx512(doublings: u32, step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    dispatch!(avx512, doublings, step, after, before)
}

pub(crate) fn step_avx2(doublings: u32, step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    dispatch!(avx2, doublings, step, after, before)
}

pub(crate) fn best_of_fan_avx2(doublings: u32, fan: &Fan<'_>, after: &[u16]) -> usize {
    #[target_feature(enable = "avx2")]
    fn body(doublings: u32, fan: &Fan<'_>, after: &[u16]) -> usize {
        step::best_of_fan_scalar(doublings, fan, after)
    }
    // SAFETY: `Search::new` checked that this machine has AVX2, or AVX-512, which implies it.
    unsafe { body(doublings, fan, after) }
}

/// # Safety
/// The lengths are those that `step::step` checks, `V` is the number of weights of the step.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn avx512<const V: usize, const D: u32>(step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    let Step { table, x, shift, new_bits, base } = *step;
    let lanes: [u16; LANES] = std::array::from_fn(|lane| (lane >> shift) as u16);
    // SAFETY: `lanes` is 64 bytes.
    let spread = unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) };
    let x: [__m512i; V] = std::array::from_fn(|i| _mm512_set1_epi16(x[i]));
    let base = _mm512_set1_epi16(base.cast_signed());
    let mut least = _mm512_set1_epi16(-1);
    let mut row = table.as_ptr();
    // Where all states of some rows go on to one overlap, its cost is added to the least of theirs:
    // the same sum.
    let run = step.run();
    for first in (0..STATES >> new_bits).step_by(LANES) {
        let mut best = _mm512_set1_epi16(-1);
        let mut state = first;
        while state < STATES {
            // SAFETY: `state >> shift < 2^(16 - shift)` and `after` has PAD = 32 entries beyond.
            let n = unsafe { _mm512_loadu_si512(after.as_ptr().add(state >> shift).cast()) };
            let mut cost = _mm512_permutexvar_epi16(spread, n);
            if run > 1 {
                let mut near = _mm512_set1_epi16(-1);
                for _ in 0..run {
                    // SAFETY: the loops visit each of the table's `STATES / 32 * V` rows of 32
                    // values once, in order.
                    near =
                        _mm512_min_epu16(near, unsafe { distance::<V, D>(_mm512_setzero_si512(), &x, row) });
                    // SAFETY: as above; one past the end after the last row.
                    row = unsafe { row.add(V * LANES) };
                }
                cost = _mm512_adds_epu16(cost, near);
            } else {
                // SAFETY: as above.
                unsafe {
                    cost = distance::<V, D>(cost, &x, row);
                    row = row.add(V * LANES);
                }
            }
            best = _mm512_min_epu16(best, cost);
            state += run * (STATES >> new_bits);
        }
        best = _mm512_subs_epu16(best, base);
        least = _mm512_min_epu16(least, best);
        // SAFETY: `first + 32 <= STATES >> new_bits <= before.len()`.
        unsafe { _mm512_storeu_si512(before.as_mut_ptr().add(first).cast(), best) };
    }
    let mut out = [0u16; LANES];
    // SAFETY: `out` is 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), least) };
    out.into_iter().min().unwrap_or(u16::MAX)
}

/// `cost`, and that of the values of 32 states beside `x`.
///
/// # Safety
/// `V` rows of 32 values are at `row`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn distance<const V: usize, const D: u32>(
    mut cost: __m512i,
    x: &[__m512i; V],
    row: *const i16,
) -> __m512i {
    for (i, &x) in x.iter().enumerate() {
        // SAFETY: promised by the caller.
        let v = unsafe { _mm512_loadu_si512(row.add(i * LANES).cast()) };
        let mut d = _mm512_subs_epi16(v, x);
        for _ in 0..D {
            d = _mm512_adds_epi16(d, d);
        }
        cost = _mm512_adds_epu16(cost, _mm512_mulhrs_epi16(d, d));
    }
    cost
}

/// # Safety
/// As [`avx512`].
#[target_feature(enable = "avx2")]
unsafe fn avx2<const V: usize, const D: u32>(step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    const HALF: usize = LANES / 2;
    let Step { table, x, shift, new_bits, base } = *step;
    // Lane `l` of 16 wants entry `l >> shift` of the 8 loaded; every 128-bit half sees all 8.
    let bytes: [u8; 32] = std::array::from_fn(|b| (2 * ((b / 2) >> shift) + b % 2) as u8);
    // SAFETY: `bytes` is 32 bytes.
    let spread = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    let x: [__m256i; V] = std::array::from_fn(|i| _mm256_set1_epi16(x[i]));
    let base = _mm256_set1_epi16(base.cast_signed());
    let mut least = _mm256_set1_epi16(-1);
    let mut row = table.as_ptr();
    for first in (0..STATES >> new_bits).step_by(LANES) {
        let mut best = [_mm256_set1_epi16(-1); 2];
        let mut state = first;
        while state < STATES {
            for (half, best) in best.iter_mut().enumerate() {
                // SAFETY: `(state + 16) >> shift < 2^(16 - shift)` and `after` has 32 entries
                // beyond.
                let n = unsafe { _mm_loadu_si128(after.as_ptr().add((state + half * HALF) >> shift).cast()) };
                let mut cost = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(n), spread);
                for (i, &x) in x.iter().enumerate() {
                    // SAFETY: the loops visit each of the table's `STATES / 32 * V` rows of 32
                    // values once.
                    let v = unsafe { _mm256_loadu_si256(row.add(i * LANES + half * HALF).cast()) };
                    let mut d = _mm256_subs_epi16(v, x);
                    for _ in 0..D {
                        d = _mm256_adds_epi16(d, d);
                    }
                    cost = _mm256_adds_epu16(cost, _mm256_mulhrs_epi16(d, d));
                }
                *best = _mm256_min_epu16(*best, cost);
            }
            // SAFETY: as above; one past the end after the last row.
            row = unsafe { row.add(V * LANES) };
            state += STATES >> new_bits;
        }
        for (half, best) in best.into_iter().enumerate() {
            let best = _mm256_subs_epu16(best, base);
            least = _mm256_min_epu16(least, best);
            // SAFETY: `first + 32 <= STATES >> new_bits <= before.len()`.
            unsafe { _mm256_storeu_si256(before.as_mut_ptr().add(first + half * HALF).cast(), best) };
        }
    }
    let mut out = [0u16; HALF];
    // SAFETY: `out` is 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), least) };
    out.into_iter().min().unwrap_or(u16::MAX)
}

const _: () = assert!(STATE_BITS == 16, "states are 16-bit lanes");
