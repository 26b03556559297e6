//! Microkernels of scalar codes for few tokens, and of group-wise codebooks. See [`narrow`].

use super::{
    cuts::Doubles,
    lookup::{Banks, Table, banks, lookup, low_bits, right},
    narrow::{Ahead, Narrow, Scalar, Starts, starts},
    orders::{Eights, Every, Fours, Order},
    *,
};

/// Group-wise codebooks at `R4` quarter bits a weight, `16 N` entries in all (or fewer, repeated):
/// an index is the number of the group's codebook, from the lowest bits of its scale, above the
/// code.
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
        // SAFETY: promised by the caller.
        Self { scalar: unsafe { Scalar::new(table, bias) }, numbers: numbers(table) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn books(&self, scales: *const half::f16) -> [__m256i; 4] {
        // SAFETY: promised by the caller.
        let [first, second] = unsafe { books_of_rows::<R4>(self.numbers, scales) };
        [first, second, first, second]
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

/// The bits that number codebooks, in 32-bit lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn numbers(table: &[Line]) -> __m256i {
    let last = table.last().expect("the line with the number of codebooks").0[0];
    _mm256_set1_epi32(last.into())
}

/// Numbers of the codebooks of eight rows each, above the bits of a code in every byte of 32-bit
/// lanes.
///
/// # Safety
/// The features of [`Avx2`]; sixteen scales at `scales`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn books_of_rows<const R4: usize>(numbers: __m256i, scales: *const half::f16) -> [__m256i; 2] {
    [0, 8].map(|row| {
        // SAFETY: promised by the caller.
        let scales = unsafe { _mm_loadu_si128(scales.add(row).cast()) };
        let number = _mm256_and_si256(_mm256_cvtepu16_epi32(scales), numbers);
        _mm256_mullo_epi32(number, _mm256_set1_epi32(0x0101_0101 << (R4 / 4)))
    })
}

/// `nuq-2` and `nuq-4`: a byte holds a row's columns `STEP k` to `STEP k + STEP - 1`, of `R4 / 4`
/// bits each.
#[derive(Clone, Copy)]
pub(super) struct InBytes<const R4: usize, const STEP: usize>(__m256i);

impl<const R4: usize, const STEP: usize> Narrow for InBytes<R4, STEP> {
    type Many = Scalar<R4, Banks<1, false>>;
    type Order = Every<STEP>;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 8 * R4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        const { assert!(R4 * STEP == 32, "whole bytes") };
        let [table] = banks(table, bias);
        Self(table)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        let bits = R4 / 4;
        // SAFETY: a tile has as many vectors of 32 bytes as a code has bits.
        let rows = unsafe { _mm256_loadu_si256(code.add(I % bits * 32).cast()) };
        // A table of four is repeated: the upper two bits do not matter.
        let index = low_bits(right(rows, I / bits * bits), 4);
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
        // SAFETY: columns `8 p` to `8 p + 7` of rows from `4 g` on, of `R4 / 2` bytes each, are in
        // the tile.
        let codes = unsafe {
            let first = code.add((8 * g + p) * R4 / 4);
            if R4 == 12 { Doubles::<3, 6>::codes(first) } else { Doubles::<5, 10>::codes(first) }
        };
        // A table of 8 is repeated; a shuffle sees the lowest four bits and the highest, which
        // three more do not reach.
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
        Self { codes: unsafe { E::new(table, bias) }, table: banks(table, bias), numbers: numbers(table) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn books(&self, scales: *const half::f16) -> [__m256i; 4] {
        // SAFETY: promised by the caller.
        let [first, second] = unsafe { books_of_rows::<R4>(self.numbers, scales) };
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
