//! How the eight vectors of a tile lie in it: which activations each meets, and which sums its
//! products go to.

use super::*;

/// An order of the weights of a tile.
pub(super) trait Order {
    /// Accumulators of a token: 2 of 8 rows in 32-bit lanes, or 4 of 4 rows in 64-bit lanes.
    const GROUPS: usize;
    /// Pieces of activations that vectors meet, and the accumulators that the products go to.
    const PLACES: [(usize, usize); 8] = by_pieces(Self::GROUPS);
    /// Pieces of activations are not neighbours.
    const SHUFFLED: bool = true;

    /// The activations that meet piece `p`, of the 16 at `x`.
    ///
    /// # Safety
    /// The features of [`Avx2`]; 16 bytes at `x`.
    unsafe fn piece(x: *const i8, p: usize) -> __m256i;
}

/// All vectors of a piece, then those of the next.
const fn by_pieces(groups: usize) -> [(usize, usize); 8] {
    let mut all = [(0, 0); 8];
    let mut i = 0;
    while i < 8 {
        all[i] = (i / groups, i % groups);
        i += 1;
    }
    all
}

/// 16 activations, twice, in the order of `order`.
///
/// # Safety
/// The features of [`Avx2`]; 16 bytes at `x`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn reordered(x: *const i8, order: [i8; 8]) -> __m256i {
    // SAFETY: promised by the caller.
    let both = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(x.cast()) });
    _mm256_shuffle_epi8(both, _mm256_set1_epi64x(i64::from_le_bytes(order.map(i8::cast_unsigned))))
}

/// Four neighbouring columns of eight rows.
pub(super) struct Fours;

impl Order for Fours {
    const GROUPS: usize = 2;
    const SHUFFLED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn piece(x: *const i8, p: usize) -> __m256i {
        // SAFETY: promised by the caller.
        _mm256_set1_epi32(unsafe { x.add(4 * p).cast::<i32>().read_unaligned() })
    }
}

/// Eight neighbouring columns of four rows.
pub(super) struct Eights;

impl Order for Eights {
    const GROUPS: usize = 4;
    const SHUFFLED: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn piece(x: *const i8, p: usize) -> __m256i {
        // SAFETY: promised by the caller.
        _mm256_set1_epi64x(unsafe { x.add(8 * p).cast::<i64>().read_unaligned() })
    }
}

/// Every `STEP`th column (second or fourth) from column `p` on: of four or eight rows.
pub(super) struct Every<const STEP: usize>;

impl<const STEP: usize> Order for Every<STEP> {
    const GROUPS: usize = 8 / STEP;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn piece(x: *const i8, p: usize) -> __m256i {
        const { assert!(STEP == 2 || STEP == 4, "lanes of 64 or 32 bits") };
        let each = 16 / STEP;
        // SAFETY: promised by the caller.
        unsafe { reordered(x, std::array::from_fn(|i| (p % STEP + i % each * STEP) as i8)) }
    }
}

/// As [`Every`] second, with the two weights of pairs in vectors next to each other: they share
/// their lookups.
pub(super) struct SideBySide;

impl Order for SideBySide {
    const GROUPS: usize = 4;
    const PLACES: [(usize, usize); 8] = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)];

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn piece(x: *const i8, p: usize) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { Every::<2>::piece(x, p) }
    }
}

/// First or second weights of the four pairs of eight columns, those of the two quads by turns; of
/// eight rows.
pub(super) struct QuadPairs;

impl Order for QuadPairs {
    const GROUPS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn piece(x: *const i8, p: usize) -> __m256i {
        const ORDER: [[i8; 4]; 4] = [[0, 4, 2, 6], [1, 5, 3, 7], [8, 12, 10, 14], [9, 13, 11, 15]];
        let [a, b, c, d] = ORDER[p % 4];
        // SAFETY: promised by the caller.
        unsafe { reordered(x, [a, b, c, d, a, b, c, d]) }
    }
}
