//! Vector bodies of the search with one survivor per class. The portable bodies in [`crate::classes`] are their reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::classes::{self, ClassStep, Tail, VALUES};
use fracbit_format::trellis::FINE_ADD;
use std::arch::x86_64::*;

pub(crate) fn tables_avx512(values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
    const LANES: usize = 16;
    #[target_feature(enable = "avx512f")]
    fn body(values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
        let per_unit = _mm512_set1_ps(per_unit);
        let mut rows = [_mm512_setzero_ps(); VALUES / LANES];
        for (row, values) in rows.iter_mut().zip(values.as_chunks::<LANES>().0) {
            // SAFETY: `values` is 64 bytes.
            *row = unsafe { _mm512_loadu_ps(values.as_ptr()) };
        }
        for (out, &x) in out.iter_mut().zip(x) {
            let x = _mm512_set1_ps(f32::from(x));
            let (mut costs, mut least) = (rows, _mm512_set1_ps(f32::INFINITY));
            for cost in &mut costs {
                let d = _mm512_sub_ps(*cost, x);
                *cost = _mm512_mul_ps(_mm512_mul_ps(d, d), per_unit);
                least = _mm512_min_ps(least, *cost);
            }
            let least = _mm512_set1_ps(_mm512_reduce_min_ps(least));
            for (&cost, out) in costs.iter().zip(out.as_chunks_mut::<LANES>().0) {
                let above = _mm512_min_ps(_mm512_sub_ps(cost, least), _mm512_set1_ps(255.0));
                let bytes = _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(above));
                // SAFETY: `out` is 16 bytes.
                unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), bytes) };
            }
        }
    }
    // SAFETY: `classes::lanes` found that this machine has AVX-512.
    unsafe { body(values, per_unit, x, out) }
}

pub(crate) fn tables_avx2(values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
    #[target_feature(enable = "avx2")]
    fn body(values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
        classes::tables_scalar(values, per_unit, x, out);
    }
    // SAFETY: `ClassSearch` is made for an instruction set that this machine has.
    unsafe { body(values, per_unit, x, out) }
}

macro_rules! dispatch {
    ($body:ident, $step:expr, $from:expr, $to:expr, $lows:expr) => {
        // SAFETY: `classes::lanes` found that this machine has the instructions; `step_on`, the only caller, checked all lengths.
        unsafe {
            match ($step.new_bits, $step.merge) {
                (1, true) => $body::<1, true>($step, $from, $to, $lows),
                (1, false) => $body::<1, false>($step, $from, $to, $lows),
                (_, true) => $body::<2, true>($step, $from, $to, $lows),
                (_, false) => $body::<2, false>($step, $from, $to, $lows),
            }
        }
    };
}

pub(crate) fn step_avx512(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    dispatch!(avx512, step, from, to, lows)
}

pub(crate) fn step_avx2(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    dispatch!(avx2, step, from, to, lows)
}

/// 64 costs.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn half(table: &[u8; VALUES], first: usize) -> __m512i {
    let bytes: [u8; 64] = std::array::from_fn(|i| table[(first + i) % VALUES]);
    // SAFETY: `bytes` is 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// The high bytes.
const HIGH: u64 = 0xAAAA_AAAA_AAAA_AAAA;

/// The cost at the index that bits 8 to 14 make, in the high byte, where alone it counts.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn cost(low: __m512i, index: __m512i, high: __m512i) -> __m512i {
    _mm512_permutex2var_epi8(low, index, high)
}

/// # Safety
/// The lengths are those that `classes::step_on` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn avx512<const K: u32, const MERGE: bool>(
    step: &ClassStep<'_>,
    from: &[u16],
    to: &mut [u16],
    lows: &mut [u8],
) -> u8 {
    const LANES: usize = 32;
    let ClassStep { known, own, base, table, .. } = *step;
    let rivals = if MERGE { 1 << K } else { 1 };
    let groups = from.len() / LANES / rivals;
    let words: [[u16; LANES]; 2] =
        [std::array::from_fn(|i| 2 * i as u16), std::array::from_fn(|i| 2 * i as u16 + 1)];
    // SAFETY: both are 64 bytes.
    let [even, odd] = words.map(|w| unsafe { _mm512_loadu_si512(w.as_ptr().cast()) });
    let (own, base) =
        (_mm512_set1_epi16(own.cast_signed()), _mm512_set1_epi16((u16::from(base) << 8).cast_signed()));
    let (add, costs) = (_mm512_set1_epi16(FINE_ADD.cast_signed()), _mm512_set1_epi16(-256));
    let halves = [half(table, 0), half(table, 64)];
    // A quarter further: where the second new bit alone leads.
    let turned = [half(table, 32), half(table, 96)];
    let mut least = _mm512_set1_epi16(-1);
    for group in 0..groups {
        let mut best = [_mm512_set1_epi16(-1); 4];
        for rival in 0..rivals {
            let at = (group * rivals + rival) * LANES;
            // SAFETY: `at + 32 <= from.len()`.
            let w = unsafe { _mm512_loadu_si512(from.as_ptr().add(at).cast()) };
            // SAFETY: as above, `known` is as long.
            let known = unsafe { _mm512_loadu_si512(known.as_ptr().add(at).cast()) };
            let w = _mm512_sub_epi16(w, base);
            let u = _mm512_ternarylogic_epi32::<0xEA>(_mm512_srli_epi16::<K>(w), own, known);
            let hash = _mm512_mullo_epi16(u, _mm512_add_epi16(u, add));
            let index = _mm512_srli_epi16::<1>(hash);
            // The costs of `w`, the low byte of `u`.
            let w = _mm512_ternarylogic_epi32::<0xCA>(costs, w, u);
            let mut extend = |new: usize, low: __m512i, index: __m512i, high: __m512i| {
                let grown = _mm512_mask_adds_epu8(w, HIGH, w, cost(low, index, high));
                best[new] = _mm512_min_epu16(best[new], grown);
            };
            if K == 1 {
                extend(0, halves[0], index, halves[1]);
                extend(1, halves[1], index, halves[0]);
            } else {
                let other = _mm512_xor_si512(index, _mm512_slli_epi16::<14>(u));
                extend(0, halves[0], index, halves[1]);
                extend(1, turned[0], other, turned[1]);
                extend(2, halves[1], index, halves[0]);
                extend(3, turned[1], other, turned[0]);
            }
        }
        let take = |words: __m512i, a: __m512i, b: __m512i| _mm512_permutex2var_epi16(a, words, b);
        let next = if K == 1 {
            least = _mm512_min_epu16(least, _mm512_min_epu16(best[0], best[1]));
            [take(even, best[0], best[1]), take(odd, best[0], best[1]), best[2], best[3]]
        } else {
            let both = [_mm512_min_epu16(best[0], best[1]), _mm512_min_epu16(best[2], best[3])];
            least = _mm512_min_epu16(least, _mm512_min_epu16(both[0], both[1]));
            let (a, b) = (take(even, best[0], best[1]), take(odd, best[0], best[1]));
            let (c, d) = (take(even, best[2], best[3]), take(odd, best[2], best[3]));
            [take(even, a, c), take(even, b, d), take(odd, a, c), take(odd, b, d)]
        };
        for (part, w) in next.into_iter().enumerate().take(1 << K) {
            let at = (part * groups + group) * LANES;
            // SAFETY: there are `groups << K` vectors of successors.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(at).cast(), w) };
            if !lows.is_empty() {
                // SAFETY: as above, `lows` has as many bytes.
                unsafe { _mm256_storeu_si256(lows.as_mut_ptr().add(at).cast(), _mm512_cvtepi16_epi8(w)) };
            }
        }
    }
    (least_512(least) >> 8) as u8
}

pub(crate) fn tail_avx512(tail: &Tail<'_>, from: &[u16], totals: &mut [u16]) -> u16 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn body(tail: &Tail<'_>, from: &[u16], totals: &mut [u16]) -> u16 {
        let Tail { forced, tables, known, own, top, told } = *tail;
        let (known, _) = known.as_chunks::<32>();
        let (from, _) = from.as_chunks::<32>();
        let (totals, _) = totals.as_chunks_mut::<32>();
        let set = |word: u16| _mm512_set1_epi16(word.cast_signed());
        let mut least = set(u16::MAX);
        for ((known, from), total) in known.iter().zip(from).zip(totals) {
            // SAFETY: both are 64 bytes.
            let (known, w) = unsafe {
                (_mm512_loadu_si512(known.as_ptr().cast()), _mm512_loadu_si512(from.as_ptr().cast()))
            };
            let mut state = _mm512_or_si512(known, _mm512_and_si512(w, set(own)));
            let wrong = _mm512_test_epi16_mask(_mm512_xor_si512(state, set(top)), set(told));
            let mut sum = _mm512_mask_mov_epi16(_mm512_and_si512(w, set(0xFF00)), wrong, set(0xFF00));
            for (&(k, new), table) in forced.iter().zip(tables) {
                state =
                    _mm512_or_si512(_mm512_srl_epi16(state, _mm_cvtsi32_si128(k.cast_signed())), set(new));
                let hash = _mm512_mullo_epi16(state, _mm512_add_epi16(state, set(FINE_ADD)));
                // SAFETY: a table is 128 bytes.
                let (low, high) = unsafe {
                    (
                        _mm512_loadu_si512(table.as_ptr().cast()),
                        _mm512_loadu_si512(table[64..].as_ptr().cast()),
                    )
                };
                sum = _mm512_mask_adds_epu8(sum, HIGH, sum, cost(low, _mm512_srli_epi16::<1>(hash), high));
            }
            least = _mm512_min_epu16(least, sum);
            // SAFETY: `total` is 64 bytes.
            unsafe { _mm512_storeu_si512(total.as_mut_ptr().cast(), sum) };
        }
        least_512(least)
    }
    // SAFETY: `classes::lanes` found that this machine has the instructions.
    unsafe { body(tail, from, totals) }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn least_512(v: __m512i) -> u16 {
    let mut out = [0u16; 32];
    // SAFETY: `out` is 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), v) };
    out.into_iter().min().unwrap_or(u16::MAX)
}

/// # Safety
/// The lengths are those that `classes::step_on` checks.
#[target_feature(enable = "avx2")]
unsafe fn avx2<const K: u32, const MERGE: bool>(
    step: &ClassStep<'_>,
    from: &[u16],
    to: &mut [u16],
    lows: &mut [u8],
) -> u8 {
    const LANES: usize = 16;
    let ClassStep { known, own, base, table, .. } = *step;
    let rivals = if MERGE { 1 << K } else { 1 };
    let groups = from.len() / LANES / rivals;
    let (own, base) =
        (_mm256_set1_epi16(own.cast_signed()), _mm256_set1_epi16((u16::from(base) << 8).cast_signed()));
    let (add, costs) = (_mm256_set1_epi16(FINE_ADD.cast_signed()), _mm256_set1_epi16(-256));
    let (rows, _) = table.as_chunks::<16>();
    // SAFETY: a row is 16 bytes.
    let row = |i: usize| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(rows[i].as_ptr().cast()) });
    let rows: [__m256i; 8] = std::array::from_fn(row);
    let nibble = _mm256_set1_epi16(0x0F00);
    let mut least = _mm256_set1_epi16(-1);
    for group in 0..groups {
        let mut best = [_mm256_set1_epi16(-1); 4];
        for rival in 0..rivals {
            let at = (group * rivals + rival) * LANES;
            // SAFETY: `at + 16 <= from.len()`.
            let w = unsafe { _mm256_loadu_si256(from.as_ptr().add(at).cast()) };
            // SAFETY: as above, `known` is as long.
            let known = unsafe { _mm256_loadu_si256(known.as_ptr().add(at).cast()) };
            let w = _mm256_sub_epi16(w, base);
            let shifted = if K == 1 { _mm256_srli_epi16::<1>(w) } else { _mm256_srli_epi16::<2>(w) };
            let u = _mm256_or_si256(_mm256_and_si256(shifted, own), known);
            let hash = _mm256_mullo_epi16(u, _mm256_add_epi16(u, add));
            let w = _mm256_or_si256(_mm256_and_si256(w, costs), _mm256_andnot_si256(costs, u));
            // Bit 15 of the hash is bit 6 of the index and so on: masks from the top bit of the high byte.
            let low = _mm256_and_si256(_mm256_srli_epi16::<1>(hash), nibble);
            let found = rows.map(|row| _mm256_shuffle_epi8(row, low));
            let pick = |a: __m256i, b: __m256i, which: __m256i| _mm256_blendv_epi8(a, b, which);
            let (b6, b5, b4) = (hash, _mm256_slli_epi16::<1>(hash), _mm256_slli_epi16::<2>(hash));
            let q: [__m256i; 4] = std::array::from_fn(|i| pick(found[2 * i], found[2 * i + 1], b4));
            let mut extend = |new: usize, d: __m256i| {
                let d = _mm256_and_si256(d, costs);
                best[new] = _mm256_min_epu16(best[new], _mm256_adds_epu8(w, d));
            };
            if K == 1 {
                let (a, b) = (pick(q[0], q[1], b5), pick(q[2], q[3], b5));
                extend(0, pick(a, b, b6));
                extend(1, pick(b, a, b6));
            } else {
                // The quarter of the first branch, then the others in turn, forward or backward.
                let (a, b) = (pick(q[0], q[2], b6), pick(q[2], q[0], b6));
                let (c, d) = (pick(q[1], q[3], b6), pick(q[3], q[1], b6));
                let (first, third) = (pick(a, c, b5), pick(b, d, b5));
                let (second, fourth) = (pick(c, b, b5), pick(d, a, b5));
                let back = _mm256_slli_epi16::<15>(u);
                extend(0, first);
                extend(1, pick(second, fourth, back));
                extend(2, third);
                extend(3, pick(fourth, second, back));
            }
        }
        let next = if K == 1 {
            least = _mm256_min_epu16(least, _mm256_min_epu16(best[0], best[1]));
            let [a, b] = part(best[0], best[1]);
            [a, b, best[2], best[3]]
        } else {
            let both = [_mm256_min_epu16(best[0], best[1]), _mm256_min_epu16(best[2], best[3])];
            least = _mm256_min_epu16(least, _mm256_min_epu16(both[0], both[1]));
            let ([a, b], [c, d]) = (part(best[0], best[1]), part(best[2], best[3]));
            let ([a, c], [b, d]) = (part(a, c), part(b, d));
            [a, b, c, d]
        };
        for (part, w) in next.into_iter().enumerate().take(1 << K) {
            let at = (part * groups + group) * LANES;
            // SAFETY: there are `groups << K` vectors of successors.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().add(at).cast(), w) };
            if !lows.is_empty() {
                let low = _mm256_andnot_si256(costs, w);
                let bytes = _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
                // SAFETY: as above, `lows` has as many bytes.
                unsafe { _mm_storeu_si128(lows.as_mut_ptr().add(at).cast(), bytes) };
            }
        }
    }
    let mut out = [0u16; LANES];
    // SAFETY: `out` is 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), least) };
    (out.into_iter().min().unwrap_or(u16::MAX) >> 8) as u8
}

/// The even words of `a` and those of `b`, then the odd ones.
#[target_feature(enable = "avx2")]
#[inline]
fn part(a: __m256i, b: __m256i) -> [__m256i; 2] {
    #[rustfmt::skip]
    let words = _mm256_setr_epi8(
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
        0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
    );
    // Even words of each half in its first 8 bytes; then the first 8 bytes of the halves side by side.
    let [a, b] = [a, b].map(|v| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(v, words)));
    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)]
}
