//! Attention and the other operations beside the matrices. A block of keys is a vector.

use super::{Avx512, dense::products};
use crate::vectors::{attend, table};
use std::arch::x86_64::*;

table!(
    Isa::Avx512,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2",
    Avx512,
    super::bf16::tile()
);

attend!(
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2", __m512i, 16 lanes, 4 vectors, _mm512_setzero_si512, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_dpwssd_epi32, _mm512_cvtepi32_ps, _mm512_mul_ps, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps
);
