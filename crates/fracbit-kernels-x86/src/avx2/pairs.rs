//! Microkernels of vector codebooks on the int8 grid, up to 4 bits. See [`narrow`].

use super::{
    cuts::{Doubles, Singles},
    lookup::{banks, lookup, lookups, low_bits, right},
    narrow::{Ahead, Narrow, Starts, starts, stretch, words},
    orders::{Every, QuadPairs, SideBySide},
    *,
};

/// `vq-2`: a byte holds a row's pairs of columns `4 k` and `4 k + 2`.
#[derive(Clone, Copy)]
pub(super) struct Pairs16([__m256i; 2]);

impl Narrow for Pairs16 {
    type Many = Self;
    type Order = Every<4>;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 64;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        let ([first], [second]) = (banks(table, bias), banks(&table[1..], bias));
        Self([first, second])
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        // SAFETY: a tile has 64 bytes.
        let rows = unsafe { _mm256_loadu_si256(code.add(I % 2 * 32).cast()) };
        let index = low_bits(right(rows, I / 4 * 4), 4);
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        _mm256_shuffle_epi8(self.0[I / 2 % 2], index)
    }
}

/// `vq-4`: the codes are bytes.
#[derive(Clone, Copy)]
pub(super) struct Pairs256([[__m256i; 16]; 2]);

impl Narrow for Pairs256 {
    type Many = Self;
    type Order = Every<2>;
    const AHEAD: Ahead = Ahead::None;
    const TILE_BYTES: usize = 128;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        Self([banks(table, bias), banks(&table[4..], bias)])
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        // SAFETY: a tile has 128 bytes.
        let index = unsafe { _mm256_loadu_si256(code.add(I % 4 * 32).cast()) };
        // For `I` and `I + 4` the same, and so made once.
        lookups(self.0.each_ref(), index)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, both: [__m256i; 2]) -> __m256i {
        both[I / 4]
    }
}

/// Tables of `16 N` pairs at `R4` quarter bits a weight. Indices of two quads share a vector: a
/// lookup makes the first (second) weights of four pairs of eight columns.
#[derive(Clone, Copy)]
pub(super) struct Pairs<const R4: usize, const N: usize>([[__m256i; N]; 2]);

impl<const R4: usize, const N: usize> Narrow for Pairs<R4, N> {
    type Many = Self;
    type Order = QuadPairs;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 2);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        Self([banks(table, bias), banks(&table[N.div_ceil(4)..], bias)])
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        let (piece, half) = (I / 2, I % 2);
        let mask = _mm256_set1_epi16((1 << (R4 / 2)) - 1);
        let quad = |q: usize| {
            let (p0, p1) = (q * R4, (2 * q + 1) * R4 / 2);
            // SAFETY: promised by the caller.
            let row = unsafe { stretch::<Self>(code, last, q, 0, half) };
            _mm256_and_si256(words::<Self>(q, (row, 0), p0, (row, 0), p1), mask)
        };
        let (even, odd) = (quad(piece / 2 * 2), quad(piece / 2 * 2 + 1));
        let index = _mm256_or_si256(even, _mm256_slli_epi16::<8>(odd));
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.entries(index, I / 2 % 2 == 1) }
    }
}

/// Tables of `64 N` pairs (`N` is 2 or 4) that are a [quarter](fracbit_format::Codebook::quarter)
/// and its turns, at `R4` quarter bits a weight: only the quarter is looked up. Bytes of 8-bit
/// codes are indices as they are; those of 7 bits are cut by [`Rows`].
#[derive(Clone, Copy)]
pub(super) struct Turned<const R4: usize, const N: usize>([[__m256i; N]; 2]);

impl<const R4: usize, const N: usize> Turned<R4, N> {
    /// The two bits that turn, on top: that of the first number's sign, and whether the two numbers
    /// have changed places. The lowest bit keeps this, and what is made of it, from being zero.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn first(codes: __m256i) -> __m256i {
        let on_top = if R4 == 16 { codes } else { _mm256_add_epi8(codes, codes) };
        _mm256_or_si256(on_top, _mm256_set1_epi8(1))
    }
}

impl<const R4: usize, const N: usize> Narrow for Turned<R4, N> {
    type Many = Self;
    type Order = SideBySide;
    const AHEAD: Ahead = Ahead::None;
    const SIGNED: bool = true;
    const SIGNS_SUFFICE: bool = true;
    const MAGNITUDES: bool = true;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 2);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        Self([banks(table, bias), banks(&table[1..], bias)])
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        const { assert!(R4 == 16, "codes of bytes, or cut by `Rows`") };
        // SAFETY: a tile has 128 bytes.
        unsafe { self.of_codes(_mm256_loadu_si256(code.add(I / 2 * 32).cast()), I % 2 == 1) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.entries(index, I % 2 == 1) }
    }
}

/// A microkernel of codes of pairs.
pub(super) trait Codes: Narrow {
    /// Quarters of a bit a weight.
    const R4: usize;

    /// The second half of [`Narrow::index`], of codes in bytes: for the first or second weights.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn of_codes(&self, codes: __m256i, second: bool) -> [__m256i; 2];

    /// First or second weights of pairs by what [`of_codes`](Self::of_codes) made of their codes.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn entries(&self, index: [__m256i; 2], second: bool) -> __m256i;
}

impl<const R4: usize, const N: usize> Codes for Pairs<R4, N> {
    const R4: usize = R4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn of_codes(&self, codes: __m256i, _second: bool) -> [__m256i; 2] {
        [codes, codes]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn entries(&self, [index, _]: [__m256i; 2], second: bool) -> __m256i {
        lookup(&self.0[usize::from(second)], index)
    }
}

impl<const R4: usize, const N: usize> Codes for Turned<R4, N> {
    const R4: usize = R4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn of_codes(&self, codes: __m256i, second: bool) -> [__m256i; 2] {
        let first = Self::first(codes);
        let signs = if second { _mm256_xor_si256(first, _mm256_add_epi8(first, first)) } else { first };
        [signs, codes]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn entries(&self, [_, codes]: [__m256i; 2], second: bool) -> __m256i {
        // The two numbers of a quarter, made once for both weights.
        let [x, y] = lookups(self.0.each_ref(), low_bits(codes, (16 * N).ilog2()));
        let first = Self::first(codes);
        let places = _mm256_add_epi8(first, first);
        if second { _mm256_blendv_epi8(y, x, places) } else { _mm256_blendv_epi8(x, y, places) }
    }
}

/// `E` by four rows a vector, a code of each of their eight pairs to a byte.
#[derive(Clone, Copy)]
pub(super) struct FourRows<E>(E);

impl<E: Codes> FourRows<E> {
    /// Codes of rows `4 g` to `4 g + 3`, a row to a 64-bit lane.
    ///
    /// # Safety
    /// As [`Narrow::index`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn codes(code: *const u8, g: usize) -> __m256i {
        const { assert!(matches!(E::R4, 10 | 12 | 14), "codes of 5, 6 and 7 bits") };
        // SAFETY: rows, of as many bytes as a code has bits, start inside the tile.
        unsafe {
            let first = code.add(2 * g * E::R4);
            match E::R4 {
                10 => low_bits(Doubles::<5, 5>::codes(first), 5),
                12 => low_bits(Doubles::<6, 6>::codes(first), 6),
                _ => Singles::<7>::codes(first),
            }
        }
    }
}

impl<E: Codes> Narrow for FourRows<E> {
    type Many = Self;
    type Order = SideBySide;
    const AHEAD: Ahead = if E::SIGNED { Ahead::None } else { Ahead::Tile };
    const TILE_BYTES: usize = E::TILE_BYTES;
    const SIGNED: bool = E::SIGNED;
    const SIGNS_SUFFICE: bool = E::SIGNS_SUFFICE;
    const MAGNITUDES: bool = E::MAGNITUDES;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        // SAFETY: promised by the caller.
        Self(unsafe { E::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        unsafe { self.0.of_codes(Self::codes(code, I / 2), I % 2 == 1) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.entries(index, I % 2 == 1) }
    }
}
