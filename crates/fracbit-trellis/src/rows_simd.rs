//! Vector microkernels of the search by rows. The portable ones in [`crate::rows`] are their
//! reference.
#![expect(
    unsafe_code,
    reason = "vector loads and stores through pointers; calls of target-feature functions"
)]

use crate::rows::{self, CLASSES, Near, ROWS, RowStep, SCORES};
use std::arch::x86_64::*;

pub(crate) fn score_avx512(
    factors: &[[f32; SCORES]],
    x: &[f32],
    sums: &mut [[f32; SCORES]],
    classes: &mut [[f32; SCORES]; CLASSES],
) {
    #[target_feature(enable = "avx512f")]
    fn body(
        factors: &[[f32; SCORES]],
        x: &[f32],
        sums: &mut [[f32; SCORES]],
        classes: &mut [[f32; SCORES]; CLASSES],
    ) {
        // SAFETY: a block is 64 bytes.
        let load = |block: &[f32; SCORES]| unsafe { _mm512_loadu_ps(block.as_ptr()) };
        let mut least = [_mm512_set1_ps(f32::INFINITY); CLASSES];
        for (sums, factors) in sums.chunks_mut(CLASSES).zip(factors.chunks(CLASSES * (2 * x.len() + 1))) {
            for ((sum, factors), least) in
                sums.iter_mut().zip(factors.chunks(2 * x.len() + 1)).zip(&mut least)
            {
                let mut all = load(&factors[2 * x.len()]);
                for (&x, [a, b]) in x.iter().zip(factors.as_chunks::<2>().0) {
                    let x = _mm512_set1_ps(x);
                    let inner = _mm512_add_ps(_mm512_mul_ps(load(a), x), load(b));
                    all = _mm512_add_ps(all, _mm512_mul_ps(inner, x));
                }
                *least = _mm512_min_ps(*least, all);
                // SAFETY: as above.
                unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), all) };
            }
        }
        for (class, least) in classes.iter_mut().zip(least) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(class.as_mut_ptr(), least) };
        }
    }
    // SAFETY: `rows::width` found that this machine has the instructions.
    unsafe { body(factors, x, sums, classes) }
}

pub(crate) fn score_avx2(
    factors: &[[f32; SCORES]],
    x: &[f32],
    sums: &mut [[f32; SCORES]],
    classes: &mut [[f32; SCORES]; CLASSES],
) {
    #[target_feature(enable = "avx2")]
    fn body(
        factors: &[[f32; SCORES]],
        x: &[f32],
        sums: &mut [[f32; SCORES]],
        classes: &mut [[f32; SCORES]; CLASSES],
    ) {
        // SAFETY: half a block is 32 bytes.
        let load =
            |block: &[f32; SCORES], half: usize| unsafe { _mm256_loadu_ps(block[8 * half..].as_ptr()) };
        for half in 0..2 {
            let mut least = [_mm256_set1_ps(f32::INFINITY); CLASSES];
            for (sums, factors) in sums.chunks_mut(CLASSES).zip(factors.chunks(CLASSES * (2 * x.len() + 1))) {
                for ((sum, factors), least) in
                    sums.iter_mut().zip(factors.chunks(2 * x.len() + 1)).zip(&mut least)
                {
                    let mut all = load(&factors[2 * x.len()], half);
                    for (&x, [a, b]) in x.iter().zip(factors.as_chunks::<2>().0) {
                        let x = _mm256_set1_ps(x);
                        let inner = _mm256_add_ps(_mm256_mul_ps(load(a, half), x), load(b, half));
                        all = _mm256_add_ps(all, _mm256_mul_ps(inner, x));
                    }
                    *least = _mm256_min_ps(*least, all);
                    // SAFETY: as above.
                    unsafe { _mm256_storeu_ps(sum[8 * half..].as_mut_ptr(), all) };
                }
            }
            for (class, least) in classes.iter_mut().zip(least) {
                // SAFETY: as above.
                unsafe { _mm256_storeu_ps(class[8 * half..].as_mut_ptr(), least) };
            }
        }
    }
    // SAFETY: `RowSearch::new` checked that this machine has the instructions.
    unsafe { body(factors, x, sums, classes) }
}

pub(crate) fn collect_avx512(sums: &[[f32; SCORES]], limit: f32, close: &mut [u16; ROWS]) -> usize {
    #[target_feature(enable = "avx512f")]
    fn body(sums: &[[f32; SCORES]], limit: f32, close: &mut [u16; ROWS]) -> usize {
        let (limit, mut count) = (_mm512_set1_ps(limit), 0);
        for (block, sums) in sums.iter().enumerate() {
            // SAFETY: a block is 64 bytes.
            let sums = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
            push(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(sums, limit).into(), block, close, &mut count);
        }
        count
    }
    // SAFETY: `rows::width` found that this machine has the instructions.
    unsafe { body(sums, limit, close) }
}

pub(crate) fn collect_avx2(sums: &[[f32; SCORES]], limit: f32, close: &mut [u16; ROWS]) -> usize {
    #[target_feature(enable = "avx2")]
    fn body(sums: &[[f32; SCORES]], limit: f32, close: &mut [u16; ROWS]) -> usize {
        let (limit, mut count) = (_mm256_set1_ps(limit), 0);
        for (block, sums) in sums.iter().enumerate() {
            let mask = |half: usize| {
                // SAFETY: half a block is 32 bytes.
                let sums = unsafe { _mm256_loadu_ps(sums[8 * half..].as_ptr()) };
                _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(sums, limit)).cast_unsigned()
            };
            push(mask(0) | mask(1) << 8, block, close, &mut count);
        }
        count
    }
    // SAFETY: `RowSearch::new` checked that this machine has the instructions.
    unsafe { body(sums, limit, close) }
}

/// Adds the rows of a block whose bits are set.
#[inline]
fn push(mut mask: u32, block: usize, close: &mut [u16; ROWS], count: &mut usize) {
    while mask != 0 {
        close[*count % ROWS] = (block * SCORES) as u16 + mask.trailing_zeros() as u16;
        *count += 1;
        mask &= mask - 1;
    }
}

pub(crate) fn turn_avx512(new_bits: u32, after: &[u8], to: &mut [u8], other: &mut [u8]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn body(new_bits: u32, after: &[u8], to: &mut [u8], other: &mut [u8]) {
        rows::turn_scalar(new_bits, after, to, other);
    }
    // SAFETY: `rows::width` found that this machine has the instructions.
    unsafe { body(new_bits, after, to, other) }
}

pub(crate) fn turn_avx2(new_bits: u32, after: &[u8], to: &mut [u8], other: &mut [u8]) {
    #[target_feature(enable = "avx2")]
    fn body(new_bits: u32, after: &[u8], to: &mut [u8], other: &mut [u8]) {
        rows::turn_scalar(new_bits, after, to, other);
    }
    // SAFETY: `RowSearch::new` checked that this machine has the instructions.
    unsafe { body(new_bits, after, to, other) }
}

pub(crate) fn step_avx512(step: &RowStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    // SAFETY: `rows::width` found that this machine has the instructions; `step_on`, the only
    // caller, checked all lengths.
    unsafe {
        match (step.tables.weights, step.tables.new_bits) {
            (2, ..=6 | 10) => avx512::<1, 1>(step, after, before),
            (2, 8) => avx512::<1, 4>(step, after, before),
            (2, _) => avx512::<1, 2>(step, after, before),
            (_, ..=6 | 10) => avx512::<2, 1>(step, after, before),
            (_, 8) => avx512::<2, 4>(step, after, before),
            (_, _) => avx512::<2, 2>(step, after, before),
        }
    }
}

pub(crate) fn step_avx2(step: &RowStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    // SAFETY: `RowSearch::new` checked that this machine has AVX2; `step_on`, the only caller,
    // checked all lengths.
    unsafe {
        match (step.tables.weights, step.tables.new_bits) {
            (2, ..=4) => avx2::<1, 1>(step, after, before),
            (2, 5) => avx2::<1, 2>(step, after, before),
            (2, 6 | 10) => avx2::<1, 4>(step, after, before),
            (2, 8) => avx2::<1, 16>(step, after, before),
            (2, _) => avx2::<1, 8>(step, after, before),
            (_, ..=4) => avx2::<2, 1>(step, after, before),
            (_, 5) => avx2::<2, 2>(step, after, before),
            (_, 6 | 10) => avx2::<2, 4>(step, after, before),
            (_, 8) => avx2::<2, 16>(step, after, before),
            (_, _) => avx2::<2, 8>(step, after, before),
        }
    }
}

/// Pairs of weights as 32-bit words.
fn pair(near: &Near, pair: usize) -> i32 {
    let [a, b] = [near.x[2 * pair], near.x[2 * pair + 1]].map(i8::cast_unsigned);
    i32::from_le_bytes([a, b, a, b])
}

/// # Safety
/// The lengths are those that `rows::step_on` checks; steps have `2 PAIRS` weights and tables of
/// `64 TABLES` entries.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn avx512<const PAIRS: usize, const TABLES: usize>(
    step: &RowStep<'_>,
    after: &[u8],
    before: &mut [u8],
) -> u8 {
    const WIDTH: usize = 64;
    let RowStep { tables, near, base } = *step;
    let base = _mm512_set1_epi8(base.cast_signed());
    let (picks, offsets) = (tables.picks.all().as_ptr(), tables.offsets.all().as_ptr());
    let mut least = _mm512_set1_epi8(-1);
    for first in (0..before.len()).step_by(WIDTH) {
        let entries = &after[rows::table_of(tables.new_bits, first)..][..TABLES * WIDTH];
        let mut table = [base; TABLES];
        for (table, entries) in table.iter_mut().zip(entries.as_chunks::<WIDTH>().0) {
            // SAFETY: `entries` is 64 bytes.
            *table = _mm512_subs_epu8(unsafe { _mm512_loadu_si512(entries.as_ptr().cast()) }, base);
        }
        let mut best = _mm512_set1_epi8(-1);
        for near in near {
            let at = usize::from(near.row) * before.len() + first;
            let mut sums = [_mm512_setzero_si512(); 2];
            for i in 0..PAIRS {
                let x = _mm512_set1_epi32(pair(near, i));
                for (half, sum) in sums.iter_mut().enumerate() {
                    let from = 2 * (at * PAIRS + (2 * i + half) * (WIDTH / 2));
                    // SAFETY: a row has `2 PAIRS` bytes for every overlap, of which there are whole
                    // vectors.
                    let v = unsafe { _mm512_loadu_si512(offsets.add(from).cast()) };
                    let d = _mm512_abs_epi8(_mm512_subs_epi8(x, v));
                    let square = _mm512_maddubs_epi16(d, d);
                    *sum = if i == 0 { square } else { _mm512_adds_epu16(*sum, square) };
                }
            }
            let shift = _mm_cvtsi32_si128(near.shift.cast_signed());
            let cost =
                _mm512_packus_epi16(_mm512_srl_epi16(sums[0], shift), _mm512_srl_epi16(sums[1], shift));
            // SAFETY: a row has a byte for every overlap.
            let pick = unsafe { _mm512_loadu_si512(picks.add(at).cast()) };
            let next = match TABLES {
                1 => _mm512_permutexvar_epi8(pick, table[0]),
                2 => _mm512_permutex2var_epi8(table[0], pick, table[1]),
                _ => {
                    let low = _mm512_permutex2var_epi8(table[0], pick, table[1]);
                    let high = _mm512_permutex2var_epi8(table[2], pick, table[3]);
                    _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(pick), high)
                }
            };
            best = _mm512_min_epu8(best, _mm512_adds_epu8(next, cost));
        }
        least = _mm512_min_epu8(least, best);
        // SAFETY: `before` is whole vectors.
        unsafe { _mm512_storeu_si512(before.as_mut_ptr().add(first).cast(), best) };
    }
    let mut out = [0u8; WIDTH];
    // SAFETY: `out` is 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), least) };
    out.into_iter().min().unwrap_or(u8::MAX)
}

/// # Safety
/// The lengths are those that `rows::step_on` checks; steps have `2 PAIRS` weights and tables of
/// `16 TABLES` entries, with one table a table for each half of a vector.
#[target_feature(enable = "avx2")]
unsafe fn avx2<const PAIRS: usize, const TABLES: usize>(
    step: &RowStep<'_>,
    after: &[u8],
    before: &mut [u8],
) -> u8 {
    const WIDTH: usize = 32;
    let RowStep { tables, near, base } = *step;
    let base = _mm256_set1_epi8(base.cast_signed());
    let (picks, offsets) = (tables.picks.all().as_ptr(), tables.offsets.all().as_ptr());
    let mut least = _mm256_set1_epi8(-1);
    for first in (0..before.len()).step_by(WIDTH) {
        let mut table = [base; TABLES];
        if TABLES == 1 {
            // SAFETY: `first + 32 <= after.len()`.
            table[0] = unsafe { _mm256_loadu_si256(after.as_ptr().add(first).cast()) };
        } else {
            // Tables of 32 entries begin at each vector, longer ones at each multiple of their
            // length.
            let start = rows::table_of(tables.new_bits, first) | (first & !(16 * TABLES - 1) & 63);
            let entries = &after[start..][..TABLES * 16];
            for (table, entries) in table.iter_mut().zip(entries.as_chunks::<16>().0) {
                // SAFETY: `entries` is 16 bytes.
                let entries = unsafe { _mm_loadu_si128(entries.as_ptr().cast()) };
                *table = _mm256_broadcastsi128_si256(entries);
            }
        }
        for table in &mut table {
            *table = _mm256_subs_epu8(*table, base);
        }
        let mut best = _mm256_set1_epi8(-1);
        for near in near {
            let at = usize::from(near.row) * before.len() + first;
            let mut sums = [_mm256_setzero_si256(); 2];
            for i in 0..PAIRS {
                let x = _mm256_set1_epi32(pair(near, i));
                for (half, sum) in sums.iter_mut().enumerate() {
                    let from = 2 * (at * PAIRS + (2 * i + half) * (WIDTH / 2));
                    // SAFETY: a row has `2 PAIRS` bytes for every overlap, of which there are whole
                    // vectors.
                    let v = unsafe { _mm256_loadu_si256(offsets.add(from).cast()) };
                    let d = _mm256_abs_epi8(_mm256_subs_epi8(x, v));
                    let square = _mm256_maddubs_epi16(d, d);
                    *sum = if i == 0 { square } else { _mm256_adds_epu16(*sum, square) };
                }
            }
            let shift = _mm_cvtsi32_si128(near.shift.cast_signed());
            let cost =
                _mm256_packus_epi16(_mm256_srl_epi16(sums[0], shift), _mm256_srl_epi16(sums[1], shift));
            // SAFETY: a row has a byte for every overlap.
            let pick = unsafe { _mm256_loadu_si256(picks.add(at).cast()) };
            let next = lookup(&table, pick);
            best = _mm256_min_epu8(best, _mm256_adds_epu8(next, cost));
        }
        least = _mm256_min_epu8(least, best);
        // SAFETY: `before` is whole vectors.
        unsafe { _mm256_storeu_si256(before.as_mut_ptr().add(first).cast(), best) };
    }
    let mut out = [0u8; WIDTH];
    // SAFETY: `out` is 32 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), least) };
    out.into_iter().min().unwrap_or(u8::MAX)
}

/// Entries of `TABLES` tables of 16.
#[target_feature(enable = "avx2")]
#[inline]
fn lookup<const TABLES: usize>(tables: &[__m256i; TABLES], pick: __m256i) -> __m256i {
    let low = _mm256_and_si256(pick, _mm256_set1_epi8(0x0F));
    let mut found = *tables;
    for table in &mut found {
        *table = _mm256_shuffle_epi8(*table, low);
    }
    // Each bit above the low four halves the choice; a blend looks at bit 7.
    if TABLES >= 2 {
        let which = _mm256_slli_epi16::<3>(pick);
        for i in 0..TABLES / 2 {
            found[i] = _mm256_blendv_epi8(found[2 * i], found[2 * i + 1], which);
        }
    }
    if TABLES >= 4 {
        let which = _mm256_slli_epi16::<2>(pick);
        for i in 0..TABLES / 4 {
            found[i] = _mm256_blendv_epi8(found[2 * i], found[2 * i + 1], which);
        }
    }
    if TABLES >= 8 {
        let which = _mm256_slli_epi16::<1>(pick);
        for i in 0..TABLES / 8 {
            found[i] = _mm256_blendv_epi8(found[2 * i], found[2 * i + 1], which);
        }
    }
    if TABLES >= 16 {
        found[0] = _mm256_blendv_epi8(found[0], found[1], pick);
    }
    found[0]
}
