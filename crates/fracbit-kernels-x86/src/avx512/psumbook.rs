//! A Psumbook whose partial sums stay in registers while 256 rows read them.
//!
//! The 256 partial sums of a codebook and a vector of columns are eight registers: four of low
//! bytes, four of high ones. `vpermi2b` looks 64 codes up in 128 bytes at a time, so 64 rows cost
//! four of them and two blends. Bytes are summed in 16 bits without being spread: one sum takes
//! words as they are, another their high halves, and what the first has too much of is subtracted
//! at the end. High bytes are stored with 128 added, so that all are unsigned; a block has at most
//! 96 codes of a row, and 96 x 255 fits 16 bits.

use super::Avx512;
use fracbit_format::{PackedView, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{
    Centroids, Isa, Kernels, LinearKernel, PsumCodes, PsumMicrokernel, PsumRows, psumbook,
};
use std::{arch::x86_64::*, array::from_fn, sync::Arc};

/// Centroids of a codebook.
const CENTROIDS: usize = 256;
/// Strips whose rows fill a vector of codes.
const STRIPS: usize = 4;
/// Vectors of rows that read partial sums while these are in registers.
const GROUPS: usize = 4;
/// Bytes ahead of its use that a code is asked for.
const AHEAD: usize = 1024;
/// Codes of a row whose bytes' sums would not be sure to fit 15 bits.
const MOST: usize = 129;

/// Rows of a matrix for which building a Psumbook pays (`docs/lab/2026-11-speed.md`).
const LEAST_ROWS: usize = 2048;

/// The kernel of matrices of additive codebooks where it is faster than expanding codes.
pub(crate) fn linear(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    let [codebook] = view.codebooks() else { return None };
    // Measured: two tokens where a vector of weights is one code.
    let tokens = if codebook.additive()?.count == 1 { 2 } else { 1 };
    psumbook(kernels, view, microkernel()?.within(tokens, LEAST_ROWS))
}

/// The same, for all matrices and few tokens.
pub(crate) fn everywhere(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    psumbook(kernels, view, microkernel()?)
}

fn microkernel() -> Option<PsumMicrokernel> {
    Avx512::detect()?;
    // SAFETY: the line above; both functions check the lengths that they are given.
    Some(unsafe { PsumMicrokernel::new(Isa::Avx512, 8, 1, build, read) })
}

/// See [`BuildFn`](fracbit_kernels::BuildFn); of each codebook and vector of columns first all low
/// bytes, then all high ones, with 128 added.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    let [x] = x else { panic!("one token, got {}", x.len()) };
    assert_eq!(out.len(), centroids.psums(), "sums of a tile");
    let weights = 2 * centroids.pairs();
    let tables = out.as_chunks_mut::<CENTROIDS>().0;
    for (i, table) in tables.iter_mut().enumerate() {
        let (vector, book) = (i / centroids.count(), i % centroids.count());
        let x = &x[vector * weights..][..weights];
        match weights {
            4 => one::<2>(centroids, book, x, table),
            _ => one::<4>(centroids, book, x, table),
        }
    }
}

/// Partial sums of a codebook with `2 P` activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn one<const P: usize>(centroids: &Centroids, book: usize, x: &[i8], table: &mut [i16; CENTROIDS]) {
    let x: [__m512i; P] = from_fn(|p| {
        let [low, high] = [x[2 * p], x[2 * p + 1]].map(i32::from);
        _mm512_set1_epi32(high << 16 | low & 0xFFFF)
    });
    let pairs: [&[[i16; 2]; CENTROIDS]; P] = from_fn(|p| centroids.of_pair(book, p));
    // Packing takes quarters of registers by turns.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let (low, high) = table.split_at_mut(CENTROIDS / 2);
    let bytes = low.as_chunks_mut::<32>().0.iter_mut().zip(high.as_chunks_mut::<32>().0);
    for (c, (low, high)) in bytes.enumerate() {
        let mut sums = [_mm512_setzero_si512(); 4];
        for (j, sum) in sums.iter_mut().enumerate() {
            for p in 0..P {
                let pairs = &pairs[p][64 * c + 16 * j..][..16];
                // SAFETY: 16 pairs of 4 bytes.
                let pairs = unsafe { _mm512_loadu_si512(pairs.as_ptr().cast()) };
                *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(pairs, x[p]));
            }
        }
        // All fit 16 bits.
        let words = [_mm512_packs_epi32(sums[0], sums[1]), _mm512_packs_epi32(sums[2], sums[3])];
        let lows = words.map(|words| _mm512_and_si512(words, _mm512_set1_epi16(0xFF)));
        let highs = words.map(|words| _mm512_srli_epi16::<8>(words));
        let lows = _mm512_packus_epi16(lows[0], lows[1]);
        let highs = _mm512_packus_epi16(highs[0], highs[1]);
        let highs = _mm512_xor_si512(highs, _mm512_set1_epi8(i8::MIN));
        // SAFETY: 64 bytes each.
        unsafe {
            _mm512_storeu_si512(low.as_mut_ptr().cast(), _mm512_permutexvar_epi32(order, lows));
            _mm512_storeu_si512(high.as_mut_ptr().cast(), _mm512_permutexvar_epi32(order, highs));
        }
    }
}

/// See [`ReadFn`](fracbit_kernels::ReadFn).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn read(codes: PsumCodes<'_>, (psums, tokens): (&[i16], usize), sums: &mut [PsumRows]) {
    assert_eq!(tokens, 1, "tokens side by side");
    let tables = psums.as_chunks().0;
    for (i, sums) in sums.chunks_mut(GROUPS * STRIPS).enumerate() {
        let first = i * GROUPS * STRIPS;
        if sums.len() == GROUPS * STRIPS {
            groups::<GROUPS>(codes, first, tables, sums);
        } else {
            for (g, sums) in sums.chunks_mut(STRIPS).enumerate() {
                groups::<1>(codes, first + g * STRIPS, tables, sums);
            }
        }
    }
}

/// `G` vectors of rows from strip `first` on; of the last one strips may be missing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn groups<const G: usize>(
    codes: PsumCodes<'_>,
    first: usize,
    tables: &[[i16; CENTROIDS]],
    sums: &mut [PsumRows],
) {
    // A strip that is missing is the last again, and its sums go nowhere.
    let last = sums.len() - 1;
    let strips: [[&[[u8; TILE_ROWS]]; STRIPS]; G] =
        from_fn(|g| from_fn(|k| codes.strip(first + last.min(g * STRIPS + k))));
    let rows = strips.map(|strips| strips.map(|strip| strip[..tables.len()].as_ptr()));
    assert!(tables.len() < MOST, "sums of bytes fit 15 bits");
    let zero = _mm512_setzero_si512();
    let mut whole = [[zero; 2]; G]; // words: two bytes of low, or high, bytes' sums
    let mut odd = [[zero; 2]; G]; // their high bytes
    for (l, table) in tables.iter().enumerate() {
        let table = table.as_ptr().cast::<__m512i>();
        // SAFETY: a table has 512 bytes.
        let table: [__m512i; 8] = from_fn(|i| unsafe { _mm512_loadu_si512(table.add(i)) });
        for g in 0..G {
            let quarter = |k: usize| {
                let row = rows[g][k].wrapping_add(l);
                if l % 4 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(row.cast::<i8>().wrapping_add(AHEAD));
                }
                // SAFETY: every strip has as many codes as there are tables, 16 rows each.
                unsafe { _mm_loadu_si128(row.cast()) }
            };
            let codes = _mm512_castsi128_si512(quarter(0));
            let codes = _mm512_inserti32x4::<1>(codes, quarter(1));
            let codes = _mm512_inserti32x4::<2>(codes, quarter(2));
            let codes = _mm512_inserti32x4::<3>(codes, quarter(3));
            let upper = _mm512_movepi8_mask(codes);
            for half in 0..2 {
                let table = &table[4 * half..];
                let bytes = _mm512_mask_blend_epi8(
                    upper,
                    _mm512_permutex2var_epi8(table[0], codes, table[1]),
                    _mm512_permutex2var_epi8(table[2], codes, table[3]),
                );
                whole[g][half] = _mm512_add_epi16(whole[g][half], bytes);
                odd[g][half] = _mm512_add_epi16(odd[g][half], _mm512_srli_epi16::<8>(bytes));
            }
        }
    }
    let codes = i32::try_from(tables.len()).expect("below `MOST`");
    let offset = _mm512_set1_epi32(codes * 128 * 256);
    // Sums of bytes are below 2^15: see `MOST`.
    let weighted = _mm512_set1_epi32(256 << 16 | 1);
    for (g, sums) in sums.chunks_mut(STRIPS).enumerate() {
        let even: [__m512i; 2] =
            from_fn(|half| _mm512_sub_epi16(whole[g][half], _mm512_slli_epi16::<8>(odd[g][half])));
        // Of every other row of a strip in each quarter: of the first eight, then of the last.
        let [evens, odds] = [even, odd[g]].map(|[low, high]| {
            [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)]
                .map(|bytes| _mm512_madd_epi16(bytes, weighted))
        });
        // Four rows of a strip in each quarter, then all rows of one.
        let fours: [__m512i; 4] = from_fn(|i| match i % 2 {
            0 => _mm512_unpacklo_epi32(evens[i / 2], odds[i / 2]),
            _ => _mm512_unpackhi_epi32(evens[i / 2], odds[i / 2]),
        });
        let pairs = [[0, 1], [2, 3]].map(|[a, b]| {
            let (a, b) = (fours[a], fours[b]);
            [_mm512_shuffle_i32x4::<0b0100_0100>(a, b), _mm512_shuffle_i32x4::<0b1110_1110>(a, b)]
        });
        let strips: [__m512i; STRIPS] = from_fn(|k| {
            let (a, b) = (pairs[0][k / 2], pairs[1][k / 2]);
            match k % 2 {
                0 => _mm512_shuffle_i32x4::<0b1000_1000>(a, b),
                _ => _mm512_shuffle_i32x4::<0b1101_1101>(a, b),
            }
        });
        for (sums, strip) in sums.iter_mut().zip(strips) {
            let sums = sums[..TILE_ROWS].as_mut_ptr().cast::<__m512i>();
            // SAFETY: 16 numbers of 4 bytes.
            unsafe {
                let sum = _mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_sub_epi32(strip, offset));
                _mm512_storeu_si512(sums, sum);
            }
        }
    }
}
