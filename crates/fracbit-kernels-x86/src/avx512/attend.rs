//! Attention and the other operations beside the matrices. A block of keys is a vector.

use super::{Avx512, dense::products, nibbles};
use crate::{
    vectors::{attend, table},
    walsh::walsh,
};
use fracbit_kernels::vectors::LEVELS;
use std::arch::x86_64::*;

table!(
    Isa::Avx512,
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2",
    Avx512,
    super::bf16::tile()
);

attend!(
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2", __m512i, 16 lanes, 4 vectors, _mm512_setzero_si512, load,
    _mm512_set1_epi32, _mm512_dpwssd_epi32, _mm512_cvtepi32_ps, _mm512_mul_ps, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps,
    4 bits: scores_of_four, weigh_of_four
);

/// # Safety
/// As [`scores`]; the keys, at `keys`, are of 4 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn scores_of_four(args: &Scores<'_>, keys: *const u8, out: *mut f32) {
    // SAFETY: promised by the caller.
    unsafe {
        if args.dim.is_multiple_of(8) && args.dim <= nibbles::MOST {
            nibbles::scores(args, keys, out);
        } else {
            scores_of::<4>(args, keys, out);
        }
    }
}

/// # Safety
/// As [`weigh`]; the values, at `values`, are of 4 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn weigh_of_four(args: &Weigh<'_>, values: *const u8, out: &mut [f32]) {
    // SAFETY: promised by the caller.
    unsafe {
        if args.dim.is_multiple_of(16) {
            nibbles::weigh(args, values, out);
        } else {
            weigh_of::<4>(args, values, out);
        }
    }
}

walsh!(
    "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2", __m512, 16 lanes, 16 vectors, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_mul_ps,
    _mm512_add_ps, _mm512_sub_ps
);

/// Strides 1, 2, 4 and 8. A product by -1 is exact, so fusing it with an addition rounds as a
/// subtraction does.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn within(v: __m512) -> __m512 {
    // The numbers whose place has a bit are subtracted from their partner.
    let signs = |bit: u16| _mm512_mask_blend_ps(bit, _mm512_set1_ps(1.0), _mm512_set1_ps(-1.0));
    let v = _mm512_fmadd_ps(v, signs(0xAAAA), _mm512_permute_ps::<0b10_11_00_01>(v));
    let v = _mm512_fmadd_ps(v, signs(0xCCCC), _mm512_permute_ps::<0b01_00_11_10>(v));
    let v = _mm512_fmadd_ps(v, signs(0xF0F0), _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
    _mm512_fmadd_ps(v, signs(0xFF00), _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v))
}

/// The `v`th vector of numbers of `BITS` bits, `gap` bytes from one to the next.
///
/// # Safety
/// It is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn load<const BITS: usize>(at: *const u8, gap: usize, v: usize) -> __m512i {
    let at = at.wrapping_add(v * gap);
    // SAFETY: promised by the caller; `LEVELS` has sixteen bytes.
    unsafe {
        match BITS {
            16 => _mm512_loadu_si512(at.cast()),
            8 => _mm512_cvtepi8_epi16(_mm256_loadu_si256(at.cast())),
            _ => {
                let low = _mm_loadu_si128(at.cast());
                let both =
                    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
                let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(LEVELS.as_ptr().cast()));
                let places = _mm256_and_si256(both, _mm256_set1_epi8(15));
                _mm512_cvtepi8_epi16(_mm256_shuffle_epi8(levels, places))
            }
        }
    }
}
