//! A Psumbook built by products of 16-bit pairs and read by scalar loads (one token) or loads of
//! four partial sums (several).
//!
//! A gather of eight sums is as many loads and more work around them, so codes are cut out of a
//! 64-bit register and their sums added from memory.

use super::*;
use fracbit_format::{PackedView, TILE_COLS};
use fracbit_kernels::{
    Centroids, Kernels, LinearKernel, PSUM_TOKENS, PsumCodes, PsumMicrokernel, PsumRows, psumbook,
};
use std::sync::Arc;

/// Bytes ahead of its use that a code is asked for.
const AHEAD: usize = 1024;
/// Centroids of a codebook.
const CENTROIDS: usize = 256;

/// The kernel of matrices of additive codebooks.
pub(crate) fn linear(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    Avx2::detect()?;
    // SAFETY: the line above; both functions check the lengths that they are given.
    let microkernel = unsafe { PsumMicrokernel::new(Isa::Avx2, 8, PSUM_TOKENS, build, read) };
    psumbook(kernels, view, microkernel)
}

/// See [`BuildFn`](fracbit_kernels::BuildFn).
///
/// # Safety
/// The features of [`Avx2`].
#[target_feature(enable = "avx2")]
unsafe fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    assert_eq!(out.len(), centroids.psums() * x.len(), "sums of a tile");
    assert!([1, PSUM_TOKENS].contains(&x.len()), "tokens side by side");
    let each = centroids.count() * CENTROIDS * x.len();
    for (vector, out) in out.chunks_exact_mut(each).enumerate() {
        let first = 2 * centroids.pairs() * vector;
        for (book, out) in out.chunks_exact_mut(CENTROIDS * x.len()).enumerate() {
            // SAFETY: the features are here, and `out` has as many sums as a codebook has for these
            // tokens; a vector of columns lies within the tile.
            unsafe {
                match (centroids.pairs(), x) {
                    (2, [x]) => one::<2>(centroids, book, &x[first..], out),
                    (_, [x]) => one::<4>(centroids, book, &x[first..], out),
                    (2, _) => several::<2>(centroids, book, (x, first), out),
                    _ => several::<4>(centroids, book, (x, first), out),
                }
            }
        }
    }
}

/// Two activations as 16-bit integers in a 32-bit one.
fn pair(x: &[i8], at: usize) -> i32 {
    i32::from(x[at + 1]) << 16 | i32::from(x[at]) & 0xFFFF
}

/// Products of a codebook with `2 P` activations.
///
/// # Safety
/// The features of [`Avx2`]; `out` has 256 numbers.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn one<const P: usize>(centroids: &Centroids, book: usize, x: &[i8], out: &mut [i16]) {
    let x: [__m256i; P] = std::array::from_fn(|p| _mm256_set1_epi32(pair(x, 2 * p)));
    let pairs: [_; P] = std::array::from_fn(|p| centroids.of_pair::<CENTROIDS>(book, p).as_ptr());
    let out = out[..CENTROIDS].as_mut_ptr();
    for c in (0..CENTROIDS).step_by(16) {
        let mut sums = [_mm256_setzero_si256(); 2];
        for p in 0..P {
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 8 of 256 pairs of 4 bytes.
                let pairs = unsafe { _mm256_loadu_si256(pairs[p].add(c + 8 * half).cast()) };
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, x[p]));
            }
        }
        // Both fit 16 bits; packing takes quarters by turns.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(sums[0], sums[1]));
        // SAFETY: 16 of 256 numbers.
        unsafe { _mm256_storeu_si256(out.add(c).cast(), packed) };
    }
}

/// Products of a codebook with `2 P` activations of four tokens from column `first` on.
///
/// # Safety
/// The features of [`Avx2`]; `out` has 256 numbers for each token.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn several<const P: usize>(
    centroids: &Centroids,
    book: usize,
    (x, first): (&[[i8; TILE_COLS]], usize),
    out: &mut [i16],
) {
    // Each token's pairs meet eight centroids at a time; the sums of four tokens are then laid side
    // by side.
    let x: [[__m256i; PSUM_TOKENS]; P] =
        std::array::from_fn(|p| std::array::from_fn(|t| _mm256_set1_epi32(pair(&x[t], first + 2 * p))));
    let pairs: [_; P] = std::array::from_fn(|p| centroids.of_pair::<CENTROIDS>(book, p).as_ptr());
    let out = out[..CENTROIDS * PSUM_TOKENS].as_mut_ptr();
    for c in (0..CENTROIDS).step_by(8) {
        let mut sums = [_mm256_setzero_si256(); PSUM_TOKENS];
        for p in 0..P {
            // SAFETY: 8 of 256 pairs of 4 bytes.
            let pairs = unsafe { _mm256_loadu_si256(pairs[p].add(c).cast()) };
            for (sum, x) in sums.iter_mut().zip(&x[p]) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, *x));
            }
        }
        // In each half: four centroids of tokens 0 and 2, and of 1 and 3, then tokens 0 and 1
        // beside 2 and 3 of each centroid.
        let even = _mm256_packs_epi32(sums[0], sums[2]);
        let odd = _mm256_packs_epi32(sums[1], sums[3]);
        let (first, last) = (_mm256_unpacklo_epi16(even, odd), _mm256_unpackhi_epi16(even, odd));
        let (low, high) = (_mm256_unpacklo_epi32(first, last), _mm256_unpackhi_epi32(first, last));
        let out = out.wrapping_add(c * PSUM_TOKENS).cast::<__m256i>();
        // SAFETY: 32 of 1024 numbers: four tokens' of eight centroids.
        unsafe {
            _mm256_storeu_si256(out, _mm256_permute2x128_si256::<0x20>(low, high));
            _mm256_storeu_si256(out.add(1), _mm256_permute2x128_si256::<0x31>(low, high));
        }
    }
}

/// See [`ReadFn`](fracbit_kernels::ReadFn).
///
/// # Safety
/// The features of [`Avx2`].
#[target_feature(enable = "avx2")]
unsafe fn read(codes: PsumCodes<'_>, (psums, tokens): (&[i16], usize), sums: &mut [PsumRows]) {
    assert!([1, PSUM_TOKENS].contains(&tokens), "tokens side by side");
    for (strip, sums) in sums.iter_mut().enumerate() {
        let codes = codes.strip(strip);
        assert_eq!(psums.len(), codes.len() * CENTROIDS * tokens, "sums of the codes");
        // The next strip comes next, and this one goes on some strips later: streams that no
        // processor follows by itself.
        for line in codes.chunks(4) {
            _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast::<i8>().wrapping_add(AHEAD));
        }
        let halves = sums[..TILE_ROWS * tokens].chunks_exact_mut(TILE_ROWS / 2 * tokens);
        for (half, sums) in halves.enumerate() {
            // SAFETY: the features are here; 256 sums for each 16 codes and token, as just checked.
            unsafe {
                if tokens == 1 {
                    rows_of_one(codes, half, psums.as_ptr(), sums);
                } else {
                    rows_of_several(codes, half, psums.as_ptr(), sums);
                }
            }
        }
    }
}

/// Codes of eight rows, the first in the lowest byte.
#[inline]
fn eight(codes: &[u8; TILE_ROWS], half: usize) -> u64 {
    u64::from_le_bytes(codes.as_chunks().0[half])
}

/// # Safety
/// `psums` points to 256 numbers for each of `codes`.
#[inline]
unsafe fn rows_of_one(codes: &[[u8; TILE_ROWS]], half: usize, mut psums: *const i16, sums: &mut [i32]) {
    let sums: &mut [i32; 8] = sums.first_chunk_mut().expect("eight rows");
    let mut total = *sums;
    for codes in codes {
        let mut codes = eight(codes, half);
        for total in &mut total {
            // SAFETY: a byte is below 256.
            *total += i32::from(unsafe { *psums.add(usize::from(codes as u8)) });
            codes >>= 8;
        }
        psums = psums.wrapping_add(CENTROIDS);
    }
    *sums = total;
}

/// # Safety
/// The features of [`Avx2`]; `psums` points to 256 times four numbers for each of `codes`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn rows_of_several(codes: &[[u8; TILE_ROWS]], half: usize, mut psums: *const i16, sums: &mut [i32]) {
    let sums = sums[..8 * PSUM_TOKENS].as_mut_ptr().cast::<__m128i>();
    // SAFETY: four of the sums of eight rows.
    let mut total: [__m128i; 8] = std::array::from_fn(|r| unsafe { _mm_loadu_si128(sums.add(r)) });
    for codes in codes {
        let mut codes = eight(codes, half);
        for total in &mut total {
            // SAFETY: a byte is below 256, and every centroid has four sums.
            let four = unsafe { _mm_loadl_epi64(psums.add(usize::from(codes as u8) * PSUM_TOKENS).cast()) };
            *total = _mm_add_epi32(*total, _mm_cvtepi16_epi32(four));
            codes >>= 8;
        }
        psums = psums.wrapping_add(CENTROIDS * PSUM_TOKENS);
    }
    for (r, total) in total.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm_storeu_si128(sums.add(r), total) };
    }
}
