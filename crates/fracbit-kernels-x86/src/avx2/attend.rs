//! Attention and the other operations beside the matrices. A block of keys takes two vectors.

use super::{Avx2, dense::products};
use crate::{
    vectors::{attend, table},
    walsh::walsh,
};
use fracbit_kernels::vectors::LEVELS;
use std::arch::x86_64::*;

table!(Isa::Avx2, "avx2,f16c,fma", Avx2, None);

attend!(
    "avx2,f16c,fma", __m256i, 8 lanes, 2 vectors, _mm256_setzero_si256, load, _mm256_set1_epi32, dot_words, _mm256_cvtepi32_ps,
    _mm256_mul_ps, _mm256_fmadd_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps,
    4 bits: scores_of::<4>, weigh_of::<4>
);

walsh!(
    "avx2,f16c,fma", __m256, 8 lanes, 8 vectors, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_mul_ps, _mm256_add_ps, _mm256_sub_ps
);

/// Strides 1, 2 and 4. A product by -1 is exact, so fusing it with an addition rounds as a
/// subtraction does.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
fn within(v: __m256) -> __m256 {
    let ones = _mm256_setr_ps(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0);
    let twos = _mm256_setr_ps(1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0);
    let fours = _mm256_setr_ps(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0);
    let v = _mm256_fmadd_ps(v, ones, _mm256_permute_ps::<0b10_11_00_01>(v));
    let v = _mm256_fmadd_ps(v, twos, _mm256_permute_ps::<0b01_00_11_10>(v));
    _mm256_fmadd_ps(v, fours, _mm256_permute2f128_ps::<1>(v, v))
}

/// Adds the products of pairs.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
fn dot_words(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
}

/// The `v`th vector of numbers of `BITS` bits, `gap` bytes from one to the next; two of 4 bits
/// share sixteen bytes.
///
/// # Safety
/// It is there; of 4 bits there are at most two.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
unsafe fn load<const BITS: usize>(at: *const u8, gap: usize, v: usize) -> __m256i {
    // SAFETY: promised by the caller; `LEVELS` has sixteen bytes.
    unsafe {
        match BITS {
            16 => _mm256_loadu_si256(at.add(v * gap).cast()),
            8 => _mm256_cvtepi8_epi16(_mm_loadu_si128(at.add(v * gap).cast())),
            _ => {
                let both = _mm_loadu_si128(at.cast());
                let places = if v == 0 { both } else { _mm_srli_epi16::<4>(both) };
                let levels = _mm_loadu_si128(LEVELS.as_ptr().cast());
                _mm256_cvtepi8_epi16(_mm_shuffle_epi8(levels, _mm_and_si128(places, _mm_set1_epi8(15))))
            }
        }
    }
}
