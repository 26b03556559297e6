//! A Psumbook of codebooks of 16 centroids: a register holds the partial sums of two places in a
//! strip's columns, and shuffles read them.
//!
//! Bytes of codes lie sixteen rows side by side, so that 32 of them are two places, each with its
//! own table in its half of the register. One `vpshufb` by the low halves of the bytes, one by the
//! high ones, for low and high bytes of the partial sums. Bytes are summed in 16 bits without being
//! spread, as `avx512::psumbook` says: one sum takes words as they are, another their high halves,
//! and what the first has too much of is subtracted at the end. High bytes are stored with 128
//! added, so that all are unsigned.
//!
//! Two strips share the loads of tables; with more, sums would leave the registers.

use super::*;
use fracbit_format::{PackedView, TILE_COLS};
use fracbit_kernels::{
    BLOCK_TILES, Centroids, Kernels, LinearKernel, PsumCodes, PsumMicrokernel, PsumRows, psumbook,
};
use std::{array::from_fn, sync::Arc};

/// Centroids of a codebook.
const CENTROIDS: usize = 16;
/// Strips that share the loads of tables.
const STRIPS: usize = 2;
/// Most places of a half of a register whose bytes are summed in 16 bits: the sum of their high
/// bytes is then an `i16`.
pub(crate) const MOST: usize = 128;
/// Partial sums of the four tables of 32 bytes of codes.
pub(crate) const OF_CODES: usize = 4 * CENTROIDS;

// 8 weights of 16 are a vector, of at most 6 codes.
const _: () = assert!(BLOCK_TILES * TILE_COLS / 8 * 6 / 2 <= MOST, "sums of a block");

/// The kernel of matrices of additive codebooks of 16 centroids.
pub(crate) fn linear(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    Avx2::detect()?;
    // SAFETY: the line above; both functions check the lengths that they are given.
    let microkernel = unsafe { PsumMicrokernel::new(Isa::Avx2, 4, 1, build, read) };
    psumbook(kernels, view, microkernel)
}

/// See [`BuildFn`](fracbit_kernels::BuildFn); for each 32 bytes of codes the tables of their low
/// halves, then those of their high ones: 32 low bytes of partial sums, then 32 high ones with 128
/// added.
///
/// # Safety
/// The features of [`Avx2`].
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    let [x] = x else { panic!("one token, got {}", x.len()) };
    assert_eq!(out.len(), centroids.psums(), "sums of a tile");
    assert_eq!(centroids.pairs(), 4, "pairs of a vector");
    let x: [_; TILE_COLS / 2] = from_fn(|p| {
        let [low, high] = [x[2 * p], x[2 * p + 1]].map(i32::from);
        _mm256_set1_epi32(high << 16 | low & 0xFFFF)
    });
    let bytes = centroids.count() / 2;
    for (t, tables) in out.as_chunks_mut::<OF_CODES>().0.iter_mut().enumerate() {
        for (lane, code) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (vector, byte) = ((2 * t + lane) / bytes, (2 * t + lane) % bytes);
            let mut sums = [_mm256_setzero_si256(); 2];
            for (p, x) in x[4 * vector..][..4].iter().enumerate() {
                let pairs = centroids.of_pair::<CENTROIDS>(2 * byte + code, p);
                for (sum, pairs) in sums.iter_mut().zip(pairs.as_chunks::<8>().0) {
                    // SAFETY: 8 pairs of 4 bytes.
                    let pairs = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) };
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, *x));
                }
            }
            // All fit 16 bits; packing takes quarters by turns.
            let sums = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(sums[0], sums[1]));
            let low = _mm256_and_si256(sums, _mm256_set1_epi16(0xFF));
            let high = _mm256_srli_epi16::<8>(_mm256_xor_si256(sums, _mm256_set1_epi16(i16::MIN)));
            let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
            // SAFETY: 16 of the 128 bytes of the tables, twice.
            unsafe {
                let first = tables.as_mut_ptr().cast::<__m128i>().add(4 * code + lane);
                _mm_storeu_si128(first, _mm256_castsi256_si128(both));
                _mm_storeu_si128(first.add(2), _mm256_extracti128_si256::<1>(both));
            }
        }
    }
}

/// See [`ReadFn`](fracbit_kernels::ReadFn).
///
/// # Safety
/// The features of [`Avx2`].
#[target_feature(enable = "avx2")]
unsafe fn read(codes: PsumCodes<'_>, (psums, tokens): (&[i16], usize), sums: &mut [PsumRows]) {
    assert_eq!(tokens, 1, "tokens side by side");
    let tables = psums.as_chunks::<OF_CODES>().0;
    assert!(2 * tables.len() <= MOST, "codes whose sums fit 16 bits");
    for (i, sums) in sums.chunks_mut(STRIPS).enumerate() {
        let strip = |s: usize| codes.strip(STRIPS * i + s).as_flattened().as_chunks::<32>().0;
        // SAFETY: the features are here.
        unsafe {
            match sums {
                [first, second] => rows([strip(0), strip(1)], tables, [first, second]),
                [only] => rows([strip(0)], tables, [only]),
                _ => unreachable!("one strip or two"),
            }
        }
    }
}

/// # Safety
/// The features of [`Avx2`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn rows<const S: usize>(codes: [&[[u8; 32]]; S], tables: &[[i16; OF_CODES]], out: [&mut PsumRows; S]) {
    assert!(codes.iter().all(|codes| codes.len() == tables.len()), "a table for all codes");
    let low = _mm256_set1_epi8(15);
    // Of low and high bytes: words, and their high halves.
    let mut sums = [[[_mm256_setzero_si256(); 2]; 2]; S];
    for (at, of_codes) in tables.iter().enumerate() {
        let index: [[__m256i; 2]; S] = from_fn(|s| {
            // The strips' next columns come when all strips of the call had these.
            _mm_prefetch::<_MM_HINT_T0>(codes[s].as_ptr().wrapping_add(tables.len() + at).cast());
            // SAFETY: 32 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes[s][at].as_ptr().cast()) };
            [_mm256_and_si256(codes, low), _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low)]
        });
        for half in 0..2 {
            for byte in 0..2 {
                // SAFETY: 32 of 128 bytes.
                let table =
                    unsafe { _mm256_loadu_si256(of_codes.as_ptr().cast::<__m256i>().add(2 * half + byte)) };
                for (sums, index) in sums.iter_mut().zip(&index) {
                    let psums = _mm256_shuffle_epi8(table, index[half]);
                    let [words, highs] = &mut sums[byte];
                    *words = _mm256_add_epi16(*words, psums);
                    *highs = _mm256_add_epi16(*highs, _mm256_srli_epi16::<8>(psums));
                }
            }
        }
    }
    // 128 of 256 for every code, of which a table has two in each half of the register.
    let offset = i32::try_from(4 * 128 * 256 * tables.len()).expect("codes whose sums fit 16 bits");
    for (sums, out) in sums.into_iter().zip(out) {
        // Sums of the bytes of even and of odd rows.
        let [lows, highs] =
            sums.map(|[words, highs]| [_mm256_sub_epi16(words, _mm256_slli_epi16::<8>(highs)), highs]);
        // All fit 15 bits, see `MOST`.
        let weighted = _mm256_set1_epi32(256 << 16 | 1);
        let [even, odd] = [0, 1].map(|i| {
            let first = _mm256_madd_epi16(_mm256_unpacklo_epi16(lows[i], highs[i]), weighted);
            let last = _mm256_madd_epi16(_mm256_unpackhi_epi16(lows[i], highs[i]), weighted);
            [first, last].map(|both| {
                let other = _mm256_extracti128_si256::<1>(both);
                _mm_sub_epi32(_mm_add_epi32(_mm256_castsi256_si128(both), other), _mm_set1_epi32(offset))
            })
        });
        add_rows(even, odd, out);
    }
}

/// Adds the sums of even and of odd rows, those of the first eight rows and of the last, to a
/// strip's.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn add_rows(even: [__m128i; 2], odd: [__m128i; 2], out: &mut PsumRows) {
    for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
        let rows = [_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd)];
        for (rows, out) in rows.into_iter().zip(out[8 * i..].as_chunks_mut::<4>().0) {
            // SAFETY: four numbers.
            unsafe {
                let at = out.as_mut_ptr().cast::<__m128i>();
                _mm_storeu_si128(at, _mm_add_epi32(_mm_loadu_si128(at), rows));
            }
        }
    }
}
