//! Bits of nested scalar codes joined to tiles of whole codes: a vector is a quarter of a tile of
//! 4 bits.

use super::*;
use fracbit_kernels::{BitPlanes, NestedMicrokernel};

/// Bytes of one bit of a tile.
const BIT: usize = 32;

/// What joins bits.
pub(crate) fn microkernel(_proof: Avx2) -> NestedMicrokernel {
    // SAFETY: the proof; `run` is safe to call with AVX2.
    unsafe { NestedMicrokernel::new(run) }
}

#[target_feature(enable = "avx2")]
fn run(planes: &BitPlanes<'_>, out: &mut [u8]) {
    let (pieces, _) = out.as_chunks_mut::<BIT>();
    let each = if planes.wide() { 8 } else { 4 };
    for (tile, out) in planes.tiles().zip(pieces.chunks_exact_mut(each)) {
        let (pairs, _) = tile.pairs.as_chunks::<BIT>();
        let of = |bit: usize| load(tile.more[bit - 2]);
        let mut low = lowest(load(&pairs[0]), load(&pairs[1]));
        if planes.count() > 2 {
            low = joined(low, both(of(2), of(3)));
        }
        if !planes.wide() {
            low.into_iter().zip(out).for_each(|(low, out)| store(low, out));
            continue;
        }
        let [even, odd] = both(of(4), of(5));
        let [even, odd] = [lower_and_upper(even), lower_and_upper(odd)];
        let mut high = [even[0], odd[0], even[1], odd[1]];
        if planes.count() > 6 {
            high = joined(high, both(of(6), of(7)));
        }
        let fifteen = _mm256_set1_epi8(15);
        for ((low, high), out) in low.into_iter().zip(high).zip(out.as_chunks_mut::<2>().0) {
            let first = _mm256_or_si256(
                _mm256_and_si256(low, fifteen),
                _mm256_slli_epi16::<4>(_mm256_and_si256(high, fifteen)),
            );
            let second = _mm256_or_si256(
                _mm256_and_si256(_mm256_srli_epi16::<4>(low), fifteen),
                _mm256_andnot_si256(fifteen, high),
            );
            let (a, b) = (_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
            store(_mm256_permute2x128_si256::<0x20>(a, b), &mut out[0]);
            store(_mm256_permute2x128_si256::<0x31>(a, b), &mut out[1]);
        }
    }
}

/// Two bits of all codes as pairs: of even places in the first vector, of odd ones in the second.
#[inline]
#[target_feature(enable = "avx2")]
fn both(first: __m256i, second: __m256i) -> [__m256i; 2] {
    let even = _mm256_set1_epi8(0x55);
    let moved = _mm256_slli_epi16::<1>(_mm256_and_si256(second, even));
    [
        _mm256_or_si256(_mm256_and_si256(first, even), moved),
        _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi16::<1>(first), even),
            _mm256_andnot_si256(even, second),
        ),
    ]
}

/// The lower pairs of the halves of bytes, and the upper ones in their places.
#[inline]
#[target_feature(enable = "avx2")]
fn lower_and_upper(pairs: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(0x33);
    [_mm256_and_si256(pairs, mask), _mm256_and_si256(_mm256_srli_epi16::<2>(pairs), mask)]
}

/// The quarters of a tile with the two lowest bits.
#[inline]
#[target_feature(enable = "avx2")]
fn lowest(first: __m256i, second: __m256i) -> [__m256i; 4] {
    let ([a, b], [c, d]) = (lower_and_upper(first), lower_and_upper(second));
    [a, b, c, d]
}

/// The quarters with upper pairs in the order of [`both`].
#[inline]
#[target_feature(enable = "avx2")]
fn joined(low: [__m256i; 4], upper: [__m256i; 2]) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(0x33);
    let up = |v| _mm256_slli_epi16::<2>(_mm256_and_si256(v, mask));
    [
        _mm256_or_si256(low[0], up(upper[0])),
        _mm256_or_si256(low[1], up(upper[1])),
        _mm256_or_si256(low[2], _mm256_andnot_si256(mask, upper[0])),
        _mm256_or_si256(low[3], _mm256_andnot_si256(mask, upper[1])),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; BIT]) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(v: __m256i, bytes: &mut [u8; BIT]) {
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), v) }
}
