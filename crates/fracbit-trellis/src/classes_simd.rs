//! Vector microkernels of the search with one survivor per class. The portable ones in
//! [`crate::classes`] are their reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::{
    cells_simd::{costs_512, least_256, least_512},
    classes::{self, ClassStep, VALUES},
};
use fracbit_format::trellis::FINE_ADD;
use std::arch::x86_64::*;

pub(crate) fn tables_avx512(values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
    const LANES: usize = 32;
    #[target_feature(enable = "avx512f,avx512bw")]
    fn body(values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
        let factor = _mm512_set1_epi16(factor);
        let mut rows = [_mm512_setzero_si512(); VALUES / LANES];
        for (row, values) in rows.iter_mut().zip(values.as_chunks::<LANES>().0) {
            // SAFETY: `values` is 64 bytes.
            *row = unsafe { _mm512_loadu_si512(values.as_ptr().cast()) };
        }
        for (out, &x) in out.iter_mut().zip(x) {
            let x = _mm512_set1_epi16(x);
            let costs = rows.map(|v| costs_512(v, x, factor));
            let [a, b, c, d] = costs;
            let least = _mm512_min_epu16(_mm512_min_epu16(a, b), _mm512_min_epu16(c, d));
            let least = _mm512_set1_epi16(least_512(least).cast_signed());
            for (&cost, out) in costs.iter().zip(out.as_chunks_mut::<LANES>().0) {
                let bytes = _mm512_cvtusepi16_epi8(_mm512_sub_epi16(cost, least));
                // SAFETY: `out` is 32 bytes.
                unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
            }
        }
    }
    // SAFETY: `classes::lanes` found that this machine has AVX-512.
    unsafe { body(values, factor, x, out) }
}

pub(crate) fn tables_avx2(values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
    #[target_feature(enable = "avx2")]
    fn body(values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
        classes::tables_scalar(values, factor, x, out);
    }
    // SAFETY: `ClassSearch` is made for an instruction set that this machine has.
    unsafe { body(values, factor, x, out) }
}

macro_rules! dispatch {
    ($body:ident, $step:expr, $from:expr, $to:expr, $lows:expr) => {
        // SAFETY: `classes::lanes` found that this machine has the instructions; `step_on`, the
        // only caller, checked all lengths.
        unsafe {
            match $step.new_bits {
                1 => $body::<1>($step, $from, $to, $lows),
                2 => $body::<2>($step, $from, $to, $lows),
                _ => $body::<3>($step, $from, $to, $lows),
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

/// The high bytes.
const HIGH: u64 = 0xAAAA_AAAA_AAAA_AAAA;

/// # Safety
/// The lengths are those that `classes::step_on` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn avx512<const K: u32>(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    const LANES: usize = 32;
    let ClassStep { known, own, base, settles, table, .. } = *step;
    let rivals = 1 << K;
    let (groups, based) = (from.len() / LANES / rivals, base != 0);
    let words: [[u16; LANES]; 2] =
        [std::array::from_fn(|i| 2 * i as u16), std::array::from_fn(|i| 2 * i as u16 + 1)];
    // SAFETY: both are 64 bytes.
    let [even, odd] = words.map(|w| unsafe { _mm512_loadu_si512(w.as_ptr().cast()) });
    let (own, base) =
        (_mm512_set1_epi16(own.cast_signed()), _mm512_set1_epi16((u16::from(base) << 8).cast_signed()));
    let (add, costs) = (_mm512_set1_epi16(FINE_ADD.cast_signed()), _mm512_set1_epi16(-256));
    // SAFETY: a table is 128 bytes.
    let [low, middle, high] =
        [0, 32, 64].map(|at| unsafe { _mm512_loadu_si512(table[at..].as_ptr().cast()) });
    let halves = [low, high];
    // A mask that the compiler knew would become an instruction of its own after each lookup.
    let highs = std::hint::black_box(HIGH);
    // A quarter further: where the second new bit of two alone leads.
    let turned = [middle, _mm512_shuffle_i64x2::<0b01_00_11_10>(high, low)];
    let mut least = _mm512_set1_epi16(-1);
    for group in 0..groups {
        let mut best = [_mm512_set1_epi16(-1); 8];
        for rival in 0..rivals {
            let at = (group * rivals + rival) * LANES;
            // SAFETY: `at + 32 <= from.len()`.
            let w = unsafe { _mm512_loadu_si512(from.as_ptr().add(at).cast()) };
            // SAFETY: as above, `known` is as long.
            let known = unsafe { _mm512_loadu_si512(known.as_ptr().add(at).cast()) };
            // 255 stays: of such a cost only a bound is known.
            let w =
                if based { _mm512_mask_sub_epi16(w, _mm512_cmplt_epu16_mask(w, costs), w, base) } else { w };
            let u = _mm512_ternarylogic_epi32::<0xEA>(_mm512_srli_epi16::<K>(w), own, known);
            let hash = _mm512_mullo_epi16(u, _mm512_add_epi16(u, add));
            let index = _mm512_srli_epi16::<1>(hash);
            // The costs of `w`, the low byte of `u`.
            let w = _mm512_ternarylogic_epi32::<0xCA>(costs, w, u);
            let mut extend = |new: usize, tables: [__m512i; 2], index: __m512i| {
                let [low, high] = tables;
                // The cost at the index that bits 8 to 14 make, in the high byte; zero in the low
                // one.
                let cost = _mm512_maskz_permutex2var_epi8(highs, low, index, high);
                let grown = _mm512_adds_epu8(w, cost);
                best[new] = _mm512_min_epu16(best[new], grown);
            };
            let swapped = [halves[1], halves[0]];
            if K == 1 {
                extend(0, halves, index);
                extend(1, swapped, index);
            } else if K == 2 {
                let other = _mm512_xor_si512(index, _mm512_slli_epi16::<14>(u));
                extend(0, halves, index);
                extend(1, turned, other);
                extend(2, swapped, index);
                extend(3, [turned[1], turned[0]], other);
            } else {
                // A new bit turns the hash by as many eighths as the low bits of `2 u + c` say;
                // four of them by a half.
                let eighths = _mm512_slli_epi16::<12>(_mm512_add_epi16(_mm512_add_epi16(u, u), add));
                let quarters = _mm512_add_epi16(eighths, eighths);
                let second = _mm512_add_epi16(index, eighths);
                let third = _mm512_add_epi16(index, quarters);
                let fourth = _mm512_add_epi16(second, quarters);
                for (new, index) in [index, second, third, fourth].into_iter().enumerate() {
                    extend(new, halves, index);
                    extend(new + 4, swapped, index);
                }
            }
        }
        if settles {
            for &v in best.iter().take(rivals) {
                least = _mm512_min_epu16(least, v);
            }
        }
        // Even and odd words of pairs, `K` times: from vectors by new bits to vectors by low bits
        // of the lane.
        let mut next = best;
        for round in 0..K {
            let (old, pairs) = (next, rivals >> (round + 1));
            for part in 0..1 << round {
                for i in 0..pairs {
                    let (a, b) = (old[2 * (part * pairs + i)], old[2 * (part * pairs + i) + 1]);
                    next[part * pairs + i] = _mm512_permutex2var_epi16(a, even, b);
                    next[(part | 1 << round) * pairs + i] = _mm512_permutex2var_epi16(a, odd, b);
                }
            }
        }
        for (part, w) in next.into_iter().enumerate().take(rivals) {
            let at = (part * groups + group) * LANES;
            // SAFETY: there are `groups << K` vectors of successors.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(at).cast(), w) };
            if !lows.is_empty() {
                // SAFETY: as above, `lows` has as many bytes.
                unsafe { _mm256_storeu_si256(lows.as_mut_ptr().add(at).cast(), _mm512_cvtepi16_epi8(w)) };
            }
        }
    }
    if settles { (least_512(least) >> 8) as u8 } else { 0 }
}

/// # Safety
/// The lengths are those that `classes::step_on` checks.
#[target_feature(enable = "avx2")]
unsafe fn avx2<const K: u32>(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    const LANES: usize = 16;
    let ClassStep { known, own, base, settles, table, .. } = *step;
    let rivals = 1 << K;
    let (groups, based) = (from.len() / LANES / rivals, base != 0);
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
        let mut best = [_mm256_set1_epi16(-1); 8];
        for rival in 0..rivals {
            let at = (group * rivals + rival) * LANES;
            // SAFETY: `at + 16 <= from.len()`.
            let w = unsafe { _mm256_loadu_si256(from.as_ptr().add(at).cast()) };
            // SAFETY: as above, `known` is as long.
            let known = unsafe { _mm256_loadu_si256(known.as_ptr().add(at).cast()) };
            let w = if based {
                let far = _mm256_cmpeq_epi16(_mm256_max_epu16(w, costs), w);
                _mm256_sub_epi16(w, _mm256_andnot_si256(far, base))
            } else {
                w
            };
            let shifted = _mm256_srl_epi16(w, _mm_cvtsi32_si128(K.cast_signed()));
            let u = _mm256_or_si256(_mm256_and_si256(shifted, own), known);
            let hash = _mm256_mullo_epi16(u, _mm256_add_epi16(u, add));
            let w = _mm256_or_si256(_mm256_and_si256(w, costs), _mm256_andnot_si256(costs, u));
            // Bit 15 of the hash is bit 6 of the index and so on: masks from the top bit of the
            // high byte.
            let low = _mm256_and_si256(_mm256_srli_epi16::<1>(hash), nibble);
            let found = rows.map(|row| _mm256_shuffle_epi8(row, low));
            let pick = |a: __m256i, b: __m256i, which: __m256i| _mm256_blendv_epi8(a, b, which);
            let (b6, b5, b4) = (hash, _mm256_slli_epi16::<1>(hash), _mm256_slli_epi16::<2>(hash));
            let mut extend = |new: usize, d: __m256i| {
                let d = _mm256_and_si256(d, costs);
                best[new] = _mm256_min_epu16(best[new], _mm256_adds_epu8(w, d));
            };
            if K < 3 {
                let q: [__m256i; 4] = std::array::from_fn(|i| pick(found[2 * i], found[2 * i + 1], b4));
                if K == 1 {
                    let (a, b) = (pick(q[0], q[1], b5), pick(q[2], q[3], b5));
                    extend(0, pick(a, b, b6));
                    extend(1, pick(b, a, b6));
                } else {
                    let [first, second, third, fourth] = turn([q[0], q[1], q[2], q[3]], b5, b6);
                    let back = _mm256_slli_epi16::<15>(u);
                    extend(0, first);
                    extend(1, pick(second, fourth, back));
                    extend(2, third);
                    extend(3, pick(fourth, second, back));
                }
            } else {
                // By eighths from that of the first branch on; `n` new bits lead `n` times the low
                // bits of `2 u + c` further.
                let f: [__m256i; 8] = std::array::from_fn(|i| pick(found[i], found[(i + 1) % 8], b4));
                let [a0, a2, a4, a6] = turn([f[0], f[2], f[4], f[6]], b5, b6);
                let [a1, a3, a5, a7] = turn([f[1], f[3], f[5], f[7]], b5, b6);
                let d = _mm256_add_epi16(_mm256_add_epi16(u, u), add);
                let (d1, d2) = (_mm256_slli_epi16::<14>(d), _mm256_slli_epi16::<13>(d));
                // One of 1, 3, 5, 7 for each new number: first by bit 1 of the step, then by bit 2.
                let (n1, n3, n5, n7) =
                    (pick(a1, a3, d1), pick(a3, a1, d1), pick(a5, a7, d1), pick(a7, a5, d1));
                let near = [(0, a0), (4, a4), (2, pick(a2, a6, d1)), (6, pick(a6, a2, d1))];
                let far = [
                    (1, pick(n1, n5, d2)),
                    (5, pick(n5, n1, d2)),
                    (3, pick(n3, n7, d2)),
                    (7, pick(n7, n3, d2)),
                ];
                for (new, d) in near.into_iter().chain(far) {
                    extend(new, d);
                }
            }
        }
        if settles {
            for &v in best.iter().take(rivals) {
                least = _mm256_min_epu16(least, v);
            }
        }
        // As with AVX-512.
        let mut next = best;
        for round in 0..K {
            let (old, pairs) = (next, rivals >> (round + 1));
            for low in 0..1 << round {
                for i in 0..pairs {
                    let [even, odd] = part(old[2 * (low * pairs + i)], old[2 * (low * pairs + i) + 1]);
                    (next[low * pairs + i], next[(low | 1 << round) * pairs + i]) = (even, odd);
                }
            }
        }
        for (part, w) in next.into_iter().enumerate().take(rivals) {
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
    if settles { (least_256(least) >> 8) as u8 } else { 0 }
}

/// Four costs in turn, from one on that two bits tell (the top ones of bytes): the lower and the
/// higher.
#[target_feature(enable = "avx2")]
#[inline]
fn turn(q: [__m256i; 4], low: __m256i, high: __m256i) -> [__m256i; 4] {
    let pick = |a: __m256i, b: __m256i, which: __m256i| _mm256_blendv_epi8(a, b, which);
    let half: [__m256i; 4] = std::array::from_fn(|i| pick(q[i], q[(i + 2) % 4], high));
    std::array::from_fn(|i| pick(half[i], half[(i + 1) % 4], low))
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
    // Even words of each half in its first 8 bytes; then the first 8 bytes of the halves side by
    // side.
    let [a, b] = [a, b].map(|v| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(v, words)));
    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)]
}
