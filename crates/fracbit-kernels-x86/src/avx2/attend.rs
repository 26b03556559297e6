//! Attention and the other operations beside the matrices. A block of keys takes two vectors.

use super::{Avx2, dense::products};
use crate::vectors::{attend, table};
use std::arch::x86_64::*;

table!(Isa::Avx2, "avx2,f16c,fma", Avx2, None);

attend!(
    "avx2,f16c,fma", __m256i, 8 lanes, 2 vectors, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_set1_epi32, dot_words, _mm256_cvtepi32_ps,
    _mm256_mul_ps, _mm256_fmadd_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps
);

/// Adds the products of pairs.
#[inline]
#[target_feature(enable = "avx2,f16c,fma")]
fn dot_words(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
}
