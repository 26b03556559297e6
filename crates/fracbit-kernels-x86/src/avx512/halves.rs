//! The Psumbook of [`crate::avx2::halves`], read by registers of 64 bytes: four places of a strip's
//! columns at a time, whose tables are those of two parts.
//!
//! A half of 64 bytes of codes takes two shuffles, four additions and two shifts; what is left of
//! the registers lets four strips share the loads of tables.

use super::Avx512;
use crate::avx2::halves::{MOST, OF_CODES, add_rows, build};
use fracbit_format::PackedView;
use fracbit_kernels::{Isa, Kernels, LinearKernel, PsumCodes, PsumMicrokernel, PsumRows, psumbook};
use std::{arch::x86_64::*, array::from_fn, sync::Arc};

/// Strips that share the loads of tables.
const STRIPS: usize = 4;

/// The kernel of matrices of additive codebooks of 16 centroids.
pub(crate) fn linear(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    Avx512::detect()?;
    // SAFETY: the line above, and AVX2 comes with it; both functions check the lengths that they
    // are given.
    let microkernel = unsafe { PsumMicrokernel::new(Isa::Avx512, 4, 1, build, read) };
    psumbook(kernels, view, microkernel)
}

/// See [`ReadFn`](fracbit_kernels::ReadFn).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn read(codes: PsumCodes<'_>, (psums, tokens): (&[i16], usize), sums: &mut [PsumRows]) {
    assert_eq!(tokens, 1, "tokens side by side");
    let tables = psums.as_chunks::<OF_CODES>().0;
    assert!(2 * tables.len() <= MOST, "codes whose sums fit 16 bits");
    let strip = |s: usize| codes.strip(s).as_flattened();
    let (fours, others) = sums.as_chunks_mut::<STRIPS>();
    let first = STRIPS * fours.len();
    for (i, out) in fours.iter_mut().enumerate() {
        rows(from_fn(|s| strip(STRIPS * i + s)), tables, out);
    }
    for (i, out) in others.iter_mut().enumerate() {
        rows([strip(first + i)], tables, std::array::from_mut(out));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn rows<const S: usize>(codes: [&[u8]; S], tables: &[[i16; OF_CODES]], out: &mut [PsumRows; S]) {
    assert!(codes.iter().all(|codes| codes.len() == 32 * tables.len()), "a table for all codes");
    // Of low and high bytes: words, and their high halves.
    let mut sums = [[[_mm512_setzero_si512(); 2]; 2]; S];
    let (pairs, last) = tables.as_chunks::<2>();
    for (at, [left, right]) in pairs.iter().enumerate() {
        let codes = codes.map(|codes| {
            // The strips' next columns come when all strips of the call had these.
            _mm_prefetch::<_MM_HINT_T0>(codes.as_ptr().wrapping_add(codes.len() + 64 * at).cast());
            // SAFETY: 64 bytes.
            unsafe { _mm512_loadu_si512(codes[64 * at..][..64].as_ptr().cast()) }
        });
        let table = |k: usize| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(part(left, k)), part(right, k));
        add(codes, from_fn(table), &mut sums);
    }
    if let [only] = last {
        let codes = codes.map(|codes| {
            // SAFETY: 32 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes[64 * pairs.len()..][..32].as_ptr().cast()) };
            _mm512_zextsi256_si512(codes)
        });
        // Sums of zero for the codes that are not there.
        add(codes, from_fn(|k| _mm512_zextsi256_si512(part(only, k))), &mut sums);
    }
    // 128 of 256 for every code, of which a part has two in each of its halves.
    let offset = i32::try_from(4 * 128 * 256 * tables.len()).expect("codes whose sums fit 16 bits");
    for (sums, out) in sums.into_iter().zip(out) {
        // Sums of the bytes of even and of odd rows.
        let [lows, highs] =
            sums.map(|[words, highs]| [_mm512_sub_epi16(words, _mm512_slli_epi16::<8>(highs)), highs]);
        // All fit 15 bits, see `MOST`.
        let weighted = _mm512_set1_epi32(256 << 16 | 1);
        let [even, odd] = [0, 1].map(|i| {
            let first = _mm512_madd_epi16(_mm512_unpacklo_epi16(lows[i], highs[i]), weighted);
            let last = _mm512_madd_epi16(_mm512_unpackhi_epi16(lows[i], highs[i]), weighted);
            [first, last].map(|all| {
                let two = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
                let one = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256::<1>(two));
                _mm_sub_epi32(one, _mm_set1_epi32(offset))
            })
        });
        add_rows(even, odd, out);
    }
}

/// One of the four tables of a part: of low or high halves of codes, low or high bytes of sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn part(tables: &[i16; OF_CODES], k: usize) -> __m256i {
    let table = &tables[16 * k..][..16];
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(table.as_ptr().cast()) }
}

/// Adds what 64 bytes of codes read, of the tables of their low halves, then of their high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn add<const S: usize>(codes: [__m512i; S], tables: [__m512i; 4], sums: &mut [[[__m512i; 2]; 2]; S]) {
    let low = _mm512_set1_epi8(15);
    for (codes, sums) in codes.into_iter().zip(sums) {
        let index = [_mm512_and_si512(codes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low)];
        for (half, index) in index.into_iter().enumerate() {
            for ([words, highs], table) in sums.iter_mut().zip(&tables[2 * half..]) {
                let psums = _mm512_shuffle_epi8(*table, index);
                *words = _mm512_add_epi16(*words, psums);
                *highs = _mm512_add_epi16(*highs, _mm512_srli_epi16::<8>(psums));
            }
        }
    }
}
