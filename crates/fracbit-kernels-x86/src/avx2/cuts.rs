//! Codes of less than a byte out of the rows they lie in, by multiplications, which shift every 16
//! bits by another count.

use super::*;

/// 16 bytes from the first and the second, and from the third and the fourth of four rows of `row`
/// bytes.
///
/// # Safety
/// The features of [`Avx2`]; 16 bytes at the first and at the third row.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn four_rows(first: *const u8, row: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(first.cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(first.add(2 * row).cast()))
    }
}

/// The same 16 bytes in both lanes.
///
/// # Safety
/// The features of [`Avx2`]; 16 bytes at `from`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn both(from: *const u8) -> __m256i {
    // SAFETY: promised by the caller.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(from.cast()) })
}

/// Codes of `BITS` bits in rows of `ROW` bytes: two neighbours lie in 16 bits that begin with a
/// byte.
pub(super) struct Doubles<const BITS: usize, const ROW: usize>;

impl<const BITS: usize, const ROW: usize> Doubles<BITS, ROW> {
    /// From 16 bytes of two rows: the two that hold each two of eight codes.
    const CONTROLS: &'static [u8; 16] = &{
        let mut all = [0; 16];
        let mut i = 0;
        while i < 16 {
            let (row, k) = (i / 8, i % 8 / 2);
            all[i] = (row * ROW + 2 * k * BITS / 8 + i % 2) as u8;
            i += 1;
        }
        all
    };
    /// What brings each two to the top of their word.
    const FACTORS: &'static [u16; 8] = &{
        let mut all = [0; 8];
        let mut i = 0;
        while i < 8 {
            all[i] = 1 << (16 - 2 * BITS - i % 4 * 2 * BITS % 8);
            i += 1;
        }
        all
    };

    /// Eight codes of four rows in a 64-bit lane each, the first ones at `first`: a code to the low
    /// bits of a byte, which in even ones has bits of the next code above.
    ///
    /// # Safety
    /// The features of [`Avx2`]; the farthest row starts inside a tile.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn codes(first: *const u8) -> __m256i {
        const {
            assert!(
                BITS < 8
                    && 2 * BITS + 6 * BITS % 8 <= 16
                    && 4 * BITS % 8 + 2 * BITS <= 16
                    && ROW + BITS <= 16
            )
        };
        // SAFETY: 32 bytes behind a tile are readable; 16 bytes of the constants.
        unsafe {
            let words = _mm256_shuffle_epi8(four_rows(first, ROW), both(Self::CONTROLS.as_ptr()));
            let top = _mm256_mullo_epi16(words, both(Self::FACTORS.as_ptr().cast()));
            let right = |count: usize| _mm256_srl_epi16(top, _mm_cvtsi32_si128(count as i32));
            _mm256_blendv_epi8(right(16 - 2 * BITS), right(8 - BITS), _mm256_set1_epi16(-256))
        }
    }
}

/// Eight codes of `BITS` bits a row, each by itself in 16 bits that begin with a byte.
pub(super) struct Singles<const BITS: usize>;

impl<const BITS: usize> Singles<BITS> {
    /// From 16 bytes: the two that hold each code of the first row, and of the second.
    const CONTROLS: &'static [[u8; 16]; 2] = &{
        let mut all = [[0; 16]; 2];
        let mut i = 0;
        while i < 32 {
            let (row, k) = (i / 16, i % 16);
            all[row][k] = (row * BITS + k / 2 * BITS / 8 + k % 2) as u8;
            i += 1;
        }
        all
    };
    /// What brings each code to the top of its word.
    const FACTORS: &'static [u16; 8] = &{
        let mut all = [0; 8];
        let mut k = 0;
        while k < 8 {
            all[k] = 1 << (16 - BITS - k * BITS % 8);
            k += 1;
        }
        all
    };

    /// Codes of four rows, a row to a 64-bit lane, the first ones at `first`.
    ///
    /// # Safety
    /// The features of [`Avx2`]; the farthest row starts inside a tile.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn codes(first: *const u8) -> __m256i {
        const { assert!(BITS < 8, "two rows in 16 bytes, a code in two") };
        // SAFETY: 32 bytes behind a tile are readable; 16 bytes of the constants.
        unsafe {
            let (rows, factors) = (four_rows(first, BITS), both(Self::FACTORS.as_ptr().cast()));
            let [first, second] = Self::CONTROLS.each_ref().map(|control| {
                let words = _mm256_shuffle_epi8(rows, both(control.as_ptr()));
                let count = _mm_cvtsi32_si128(16 - BITS as i32);
                _mm256_srl_epi16(_mm256_mullo_epi16(words, factors), count)
            });
            _mm256_packus_epi16(first, second)
        }
    }
}
