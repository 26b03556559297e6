//! Bodies of scalar codes for few tokens, and of group-wise codebooks. See [`narrow`].

use super::{
    lookup::{Banks, Table, banks, lookup, low_bits, right},
    narrow::{Ahead, Narrow, Scalar, Starts, starts},
    orders::{Eights, EveryFourth, EverySecond, Fours, Order},
    *,
};

/// Group-wise codebooks at `R4` quarter bits a weight, `16 N` entries in all (or fewer, repeated): an index is the number of the
/// group's codebook, from the lowest bits of its scale, above the code.
#[derive(Clone, Copy)]
pub(super) struct Books<const R4: usize, const N: usize> {
    scalar: Scalar<R4, Banks<N, false>>,
    /// Bits of a codebook's number.
    numbers: __m256i,
}

impl<const R4: usize, const N: usize> Narrow for Books<R4, N> {
    type Many = Self;
    type Order = Fours;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 3);
    const BOOKS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        let last = table.last().expect("the line with the number of codebooks").0[0];
        // SAFETY: promised by the caller.
        Self { scalar: unsafe { Scalar::new(table, bias) }, numbers: _mm256_set1_epi32(last.into()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn books(&self, scales: *const half::f16) -> [__m256i; 4] {
        // SAFETY: promised by the caller.
        unsafe { books_of_rows::<R4>(self.numbers, scales) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        unsafe { self.scalar.index::<I>(code, last) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.scalar.weights::<I>(index) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights_by<const I: usize>(&self, [index, _]: [__m256i; 2], books: &[__m256i; 4]) -> __m256i {
        let index = _mm256_or_si256(index, books[I % 2]);
        // SAFETY: promised by the caller.
        unsafe { self.scalar.weights::<I>([index; 2]) }
    }
}

/// Numbers of the codebooks of eight rows each, above the bits of a code in every byte of 32-bit lanes; twice.
///
/// # Safety
/// The features of [`Avx2`]; sixteen scales at `scales`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn books_of_rows<const R4: usize>(numbers: __m256i, scales: *const half::f16) -> [__m256i; 4] {
    let [first, second] = [0, 8].map(|row| {
        // SAFETY: promised by the caller.
        let scales = unsafe { _mm_loadu_si128(scales.add(row).cast()) };
        let number = _mm256_and_si256(_mm256_cvtepu16_epi32(scales), numbers);
        _mm256_mullo_epi32(number, _mm256_set1_epi32(0x0101_0101 << (R4 / 4)))
    });
    [first, second, first, second]
}

/// `nuq-2`: a byte holds a row's columns `4 k` to `4 k + 3`.
#[derive(Clone, Copy)]
pub(super) struct Scalar4(__m256i);

impl Narrow for Scalar4 {
    type Many = Self;
    type Order = EveryFourth;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 64;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        let [table] = banks(table, bias);
        Self(table)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        // SAFETY: a tile has 64 bytes.
        let rows = unsafe { _mm256_loadu_si256(code.add(I % 2 * 32).cast()) };
        // The table is repeated: the upper two bits do not matter.
        let index = low_bits(right(rows, I / 2 * 2), 4);
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        _mm256_shuffle_epi8(self.0, index)
    }
}

/// `nuq-4`: a byte holds a row's columns `2 k` and `2 k + 1`.
#[derive(Clone, Copy)]
pub(super) struct Scalar16(__m256i);

impl Narrow for Scalar16 {
    type Many = Scalar<16, Banks<1, false>>;
    type Order = EverySecond;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 128;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        let [table] = banks(table, bias);
        Self(table)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        // SAFETY: a tile has 128 bytes.
        let rows = unsafe { _mm256_loadu_si256(code.add(I % 4 * 32).cast()) };
        let index = low_bits(right(rows, I / 4 * 4), 4);
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        _mm256_shuffle_epi8(self.0, index)
    }
}

/// Scalar codes of 3 and 5 bits: see [`Doubles`].
#[derive(Clone, Copy)]
pub(super) struct Odd<const R4: usize, T>(T);

impl<const R4: usize, T: Table> Narrow for Odd<R4, T> {
    type Many = Scalar<R4, T>;
    type Order = Eights;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 8 * R4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        const { assert!(R4 == 12 || R4 == 20, "an odd number of bits") };
        // SAFETY: promised by the caller.
        Self(unsafe { T::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        let (p, g) = (I / 4, I % 4);
        // SAFETY: columns `8 p` to `8 p + 7` of rows from `4 g` on, of `R4 / 2` bytes each, are in the tile.
        let codes = unsafe {
            let first = code.add((8 * g + p) * R4 / 4);
            if R4 == 12 { Doubles::<3, 6>::codes(first) } else { Doubles::<5, 10>::codes(first) }
        };
        // A table of 8 is repeated; a shuffle sees the lowest four bits and the highest, which three more do not reach.
        let index = if R4 == 12 { codes } else { low_bits(codes, 5) };
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.look(index) }
    }
}

/// [`Books`] for few tokens: codes as `E` cuts them.
#[derive(Clone, Copy)]
pub(super) struct FewBooks<E, const R4: usize, const N: usize> {
    codes: E,
    table: [__m256i; N],
    numbers: __m256i,
}

impl<E: Narrow, const R4: usize, const N: usize> Narrow for FewBooks<E, R4, N> {
    type Many = Books<R4, N>;
    type Order = E::Order;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = E::TILE_BYTES;
    const BOOKS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        const { assert!(E::TILE_BYTES == 8 * R4, "codes of this rate") };
        // SAFETY: promised by the caller.
        let (codes, books) = unsafe { (E::new(table, bias), Books::<R4, N>::new(table, bias)) };
        Self { codes, table: banks(table, bias), numbers: books.numbers }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn books(&self, scales: *const half::f16) -> [__m256i; 4] {
        // SAFETY: promised by the caller.
        let [first, second, ..] = unsafe { books_of_rows::<R4>(self.numbers, scales) };
        if E::Order::GROUPS == 2 {
            return [first, second, first, second];
        }
        let twice = |v, at: i32| {
            let lanes = _mm256_setr_epi32(at, at, at + 1, at + 1, at + 2, at + 2, at + 3, at + 3);
            _mm256_permutevar8x32_epi32(v, lanes)
        };
        [twice(first, 0), twice(first, 4), twice(second, 0), twice(second, 4)]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        let [index, _] = unsafe { self.codes.index::<I>(code, last) };
        let index = low_bits(index, R4 as u32 / 4);
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        lookup(&self.table, index)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights_by<const I: usize>(&self, [index, _]: [__m256i; 2], books: &[__m256i; 4]) -> __m256i {
        lookup(&self.table, _mm256_or_si256(index, books[E::Order::PLACES[I].1]))
    }
}

/// Codes of `BITS` bits in rows of `ROW` bytes: two neighbours lie in 16 bits that begin with a byte.
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

    /// Eight codes of four rows in a 64-bit lane each, the first ones at `first`: a code to the low bits of a byte, which in even
    /// ones has bits of the next code above.
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
            let both = |from: *const u8| _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
            let low = _mm256_castsi128_si256(_mm_loadu_si128(first.cast()));
            let rows = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(first.add(2 * ROW).cast()));
            let words = _mm256_shuffle_epi8(rows, both(Self::CONTROLS.as_ptr()));
            let top = _mm256_mullo_epi16(words, both(Self::FACTORS.as_ptr().cast()));
            let right = |count: usize| _mm256_srl_epi16(top, _mm_cvtsi32_si128(count as i32));
            _mm256_blendv_epi8(right(16 - 2 * BITS), right(8 - BITS), _mm256_set1_epi16(-256))
        }
    }
}
