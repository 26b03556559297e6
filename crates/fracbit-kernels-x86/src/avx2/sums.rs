//! Additive codebooks expanded: centroids of four or eight bytes are loaded and added.

use super::{
    narrow::{Ahead, Narrow},
    orders::{Eights, Fours, Order},
    *,
};
use std::marker::PhantomData;

/// Centroids of a codebook.
const CENTROIDS: usize = 256;

/// How rows of centroids fill a vector.
pub(super) trait Centroid: Copy {
    /// How weights lie in vectors.
    type Order: Order;
    /// Weights of a centroid.
    const WEIGHTS: usize;

    /// The centroids of the first codes at `code`, a lane to each.
    ///
    /// # Safety
    /// The features of [`Avx2`]; 8 bytes at `code`, and 256 centroids at `book`.
    unsafe fn lanes(book: *const u8, code: *const u8) -> __m256i;
}

/// Four weights.
#[derive(Clone, Copy)]
pub(super) struct Four;

impl Centroid for Four {
    type Order = Fours;
    const WEIGHTS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn lanes(book: *const u8, code: *const u8) -> __m256i {
        // SAFETY: promised by the caller.
        let codes = unsafe { code.cast::<[u8; 8]>().read() };
        // SAFETY: a byte is below 256.
        let [a, b, c, d, e, f, g, h] =
            codes.map(|code| unsafe { book.cast::<i32>().add(usize::from(code)).read() });
        _mm256_setr_epi32(a, b, c, d, e, f, g, h)
    }
}

/// Eight weights.
#[derive(Clone, Copy)]
pub(super) struct Eight;

impl Centroid for Eight {
    type Order = Eights;
    const WEIGHTS: usize = 8;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn lanes(book: *const u8, code: *const u8) -> __m256i {
        // SAFETY: promised by the caller.
        let codes = unsafe { code.cast::<[u8; 4]>().read() };
        // SAFETY: a byte is below 256.
        let [a, b, c, d] = codes.map(|code| unsafe { book.cast::<i64>().add(usize::from(code)).read() });
        _mm256_setr_epi64x(a, b, c, d)
    }
}

/// Sums of `M` centroids.
#[derive(Clone, Copy)]
pub(super) struct Sums<C, const M: usize> {
    /// Bytes of the centroids, `(book, centroid, weight)`, aligned to a line.
    centroids: *const u8,
    bias: u8,
    kind: PhantomData<C>,
}

impl<C: Centroid, const M: usize> Narrow for Sums<C, M> {
    type Many = Self;
    type Order = C::Order;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 256 / C::WEIGHTS * M;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        debug_assert_eq!(64 * table.len(), M * CENTROIDS * C::WEIGHTS, "the table of this microkernel");
        Self { centroids: table.as_ptr().cast(), bias, kind: PhantomData }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        let (piece, group) = C::Order::PLACES[I];
        let rows = TILE_ROWS / C::Order::GROUPS;
        let mut sum = _mm256_setzero_si256();
        for book in 0..M {
            // SAFETY: codes lie by columns, codebook and row, and room is behind the tile; the
            // table that `new` was given has `M` codebooks, and lives as long as the call of the
            // microkernel.
            let lanes = unsafe {
                let code = code.add((piece * M + book) * TILE_ROWS + group * rows);
                C::lanes(self.centroids.add(book * CENTROIDS * C::WEIGHTS), code)
            };
            sum = _mm256_add_epi8(sum, lanes);
        }
        [sum; 2]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [sum, _]: [__m256i; 2]) -> __m256i {
        _mm256_xor_si256(sum, _mm256_set1_epi8(self.bias.cast_signed()))
    }
}
