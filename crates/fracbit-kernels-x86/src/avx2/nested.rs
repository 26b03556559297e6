//! Bits of nested scalar codes joined to tiles of whole codes: a vector is a quarter of a tile of
//! 4 bits.

use super::*;
use fracbit_kernels::{BitPlanes, NestedBody};

const TILE: usize = 256;
/// Bytes of one bit of a tile.
const BIT: usize = TILE / 8;

/// What joins bits.
pub(crate) fn body(_proof: Avx2) -> NestedBody {
    // SAFETY: the proof; `run` is safe to call with AVX2.
    unsafe { NestedBody::new(run) }
}

#[target_feature(enable = "avx2")]
pub(crate) fn run(planes: &BitPlanes<'_>, out: &mut [u8]) {
    match planes.count() {
        2 => tiles::<2>(planes, out),
        3 => tiles::<3>(planes, out),
        4 => tiles::<4>(planes, out),
        5 => tiles::<5>(planes, out),
        6 => tiles::<6>(planes, out),
        7 => tiles::<7>(planes, out),
        _ => tiles::<8>(planes, out),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn tiles<const COUNT: usize>(planes: &BitPlanes<'_>, out: &mut [u8]) {
    let pieces = if COUNT > 4 { 8 } else { 4 };
    let count = out.len() / (pieces * BIT);
    let pairs = &planes.pairs().as_chunks::<{ 2 * BIT }>().0[..count];
    let more: [&[[u8; BIT]]; 6] = std::array::from_fn(|k| {
        let bits = planes.bit(k + 2).as_chunks::<BIT>().0;
        if k + 2 < COUNT { &bits[..count] } else { bits }
    });
    let out = out.as_chunks_mut::<BIT>().0;
    for (tile, (pairs, out)) in pairs.iter().zip(out.chunks_exact_mut(pieces)).enumerate() {
        let of = |k: usize| if k < COUNT { load(&more[k - 2][tile]) } else { _mm256_setzero_si256() };
        let pairs = pairs.as_chunks::<BIT>().0;
        let lower = [load(&pairs[0]), load(&pairs[1])];
        let low = match COUNT {
            2 => quarters::<false>(lower, [_mm256_setzero_si256(); 2]),
            3 => quarters::<true>(lower, alone(of(2))),
            _ => quarters::<true>(lower, both(of(2), of(3))),
        };
        if COUNT <= 4 {
            low.into_iter().zip(out).for_each(|(low, out)| store(low, out));
            continue;
        }
        let lower = if COUNT == 5 { alone(of(4)) } else { both(of(4), of(5)) };
        // Their first two are where those of `quarters` are not.
        let high = match COUNT {
            5 | 6 => halves(lower),
            7 => joined(halves(lower), alone(of(6))),
            _ => joined(halves(lower), both(of(6), of(7))),
        };
        let fifteen = _mm256_set1_epi8(15);
        for (j, (low, high)) in low.into_iter().zip(high).enumerate() {
            let first = _mm256_or_si256(
                _mm256_and_si256(low, fifteen),
                _mm256_slli_epi16::<4>(_mm256_and_si256(high, fifteen)),
            );
            let second = _mm256_or_si256(
                _mm256_and_si256(_mm256_srli_epi16::<4>(low), fifteen),
                _mm256_andnot_si256(fifteen, high),
            );
            let (a, b) = (_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
            store(_mm256_permute2x128_si256::<0x20>(a, b), &mut out[2 * j]);
            store(_mm256_permute2x128_si256::<0x31>(a, b), &mut out[2 * j + 1]);
        }
    }
}

/// Two bits of all codes as pairs: of even places in the first vector, of odd ones in the second.
#[inline]
#[target_feature(enable = "avx2")]
fn both(first: __m256i, second: __m256i) -> [__m256i; 2] {
    let even = _mm256_set1_epi8(0x55);
    let [a, b] = alone(first);
    let moved = _mm256_slli_epi16::<1>(_mm256_and_si256(second, even));
    [_mm256_or_si256(a, moved), _mm256_or_si256(b, _mm256_andnot_si256(even, second))]
}

/// The first bit of such pairs alone.
#[inline]
#[target_feature(enable = "avx2")]
fn alone(first: __m256i) -> [__m256i; 2] {
    let even = _mm256_set1_epi8(0x55);
    [_mm256_and_si256(first, even), _mm256_and_si256(_mm256_srli_epi16::<1>(first), even)]
}

/// The quarters of a tile of 4 bits: lower pairs in the order of the pairs of two lowest bits, and,
/// if `MORE`, upper ones in that of [`both`].
#[inline]
#[target_feature(enable = "avx2")]
fn quarters<const MORE: bool>(lower: [__m256i; 2], upper: [__m256i; 2]) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(0x33);
    let shifted = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), mask);
    let low = [
        _mm256_and_si256(lower[0], mask),
        shifted(lower[0]),
        _mm256_and_si256(lower[1], mask),
        shifted(lower[1]),
    ];
    if MORE { joined(low, upper) } else { low }
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

/// The quarters of a tile with lower pairs in the order of [`both`].
#[inline]
#[target_feature(enable = "avx2")]
fn halves(lower: [__m256i; 2]) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(0x33);
    let [a, b] = lower.map(|v| _mm256_and_si256(v, mask));
    let [c, d] = lower.map(|v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), mask));
    [a, b, c, d]
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
