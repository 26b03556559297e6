//! Microkernels of codebooks on the int8 grid.
//!
//! A 256-bit vector has 8 rows in its 32-bit lanes (or 4 rows in its 64-bit lanes, where that
//! spares shuffles). There is no byte shuffle across lanes and no unaligned cut, so everything that
//! depends on the rate is a constant of the type: where stretches of rows start and how far they
//! are shifted. Tables of more than 16 entries take a `pshufb` for each 16 (see [`lookup`]). One
//! token meets the weights in registers, several through a buffer of expanded tiles.
//!
//! `vpmaddubsw` saturates at 16 bits and wants one operand unsigned. It gets the magnitude of one
//! factor, 0 to 127, and the other one, -127 to 127, with the sign of the first: two products are
//! at most 2 * 127 * 127 = 32258 in magnitude, below 32767, so it never saturates. `vpmaddwd` by
//! ones widens their sum to 32 bits, where a block's sum fits by the ranges at `BLOCK_TILES`.
//!
//! With AVX-VNNI one `vpdpbusd` takes the place of these three. It wants one operand unsigned, too,
//! and widens by itself: it gets weights with 128 added, which is taken back by the sums of
//! activations (as in the AVX-512 microkernels).

use super::{
    lookup::{Integers, Table},
    orders::{Fours, Order},
    paired::Cut,
    *,
};

/// First bytes of stretches, counted from the byte in which their rows start: (quad of columns,
/// stretch, even or odd rows). At an odd number of quarter bits a weight odd rows start in the
/// middle of that byte.
pub(super) type Starts = [[[usize; 2]; 2]; 4];

/// How far ahead of its weights an index is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// Not at all, where it is as good as there, or where weights share the work on it.
    None,
    /// By a tile, in registers: two short chains of dependent instructions side by side fill the
    /// units of the processor better than a long one.
    Tile,
    /// By [`CHUNK`](super::products::CHUNK) tiles, in memory: where either half has constants
    /// enough to fill the registers.
    Chunk,
}

/// One coded tile to eight vectors.
pub(super) trait Narrow: Copy {
    /// What expands the same codes, from the same constants, faster where many tokens meet them
    /// (see [`many::from`]).
    type Many: Narrow;
    /// How weights lie in the vectors.
    type Order: Order;
    /// Bytes behind the tile are those at its start.
    const TAPE: bool = false;
    /// The second index is another than the first.
    const SECOND: bool = false;
    /// How far ahead one token's indices are made.
    const AHEAD: Ahead = Ahead::Tile;
    /// Bytes of a tile.
    const TILE_BYTES: usize;
    /// The stretches of a row that its vectors want, two for each quad of columns.
    const STARTS: Starts = [[[0; 2]; 2]; 4];
    /// Controls of byte shuffles that fetch them.
    const CONTROLS: &'static [[[[u8; 32]; 2]; 2]; 4] = &controls(Self::PAIR, Self::STARTS);
    /// Bytes of two rows.
    const PAIR: usize = Self::TILE_BYTES * 2 / TILE_ROWS;

    /// The top bits of the bytes of the first index negate weights.
    const SIGNED: bool = false;
    /// Those bytes are zero only where the entry is, too: `vpsignb` gives zero for a zero.
    const SIGNS_SUFFICE: bool = false;
    /// What [`weights`](Self::weights) gives are magnitudes, never negative.
    const MAGNITUDES: bool = false;

    /// Loads the constants that `tables` laid out; entries will come with `bias` (0, or 128 as
    /// their sign bit) added.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn new(table: &[Line], bias: u8) -> Self;

    /// First half of the work on vector `I`: indices (and, for the largest trellis tables, signs).
    ///
    /// # Safety
    /// The features of [`Avx2`]; `code` starts a tile with [`OVERREAD`](fracbit_kernels::OVERREAD)
    /// readable bytes behind it; `last` is [`last_row`] of it.
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2];

    /// Second half: entries of the codebook.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i;

    /// Weights depend on the scale of their group.
    const BOOKS: bool = false;

    /// What [`weights_by`](Self::weights_by) wants to know of the scales of sixteen rows: for each
    /// group of sums, in the lanes of its rows.
    ///
    /// # Safety
    /// The features of [`Avx2`]; sixteen scales at `scales`.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn books(&self, _scales: *const half::f16) -> [__m256i; 4] {
        [_mm256_setzero_si256(); 4]
    }

    /// [`weights`](Self::weights) of a group whose scales said `books`.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights_by<const I: usize>(&self, index: [__m256i; 2], _books: &[__m256i; 4]) -> __m256i {
        // SAFETY: the same.
        unsafe { self.weights::<I>(index) }
    }
}

/// Row 15 and what follows it on the circular tape.
///
/// # Safety
/// As [`Narrow::index`].
#[inline]
pub(super) unsafe fn last_row<E: Narrow>(code: *const u8) -> u128 {
    if !E::TAPE {
        return 0;
    }
    let bytes = E::PAIR.div_ceil(2);
    // SAFETY: a tile of a trellis has at most 160 bytes; the loads end at most 16 behind it.
    let (row, first) = unsafe {
        (code.add(E::TILE_BYTES - bytes).cast::<u128>().read_unaligned(), code.cast::<u64>().read_unaligned())
    };
    row & ((1 << (8 * bytes)) - 1) | u128::from(first) << (8 * bytes)
}

/// Where loads for a stretch start: up to 8 bytes a row, neighbouring stretches share them.
const fn base(row: usize, [even, odd]: [usize; 2]) -> usize {
    let base = even / 4 * 4;
    if row <= 8 && row + odd - base + 4 <= 16 { base } else { even }
}

/// For each stretch: bytes of the rows 0, 1 or 0 to 3 to the first 32-bit lanes of each 128-bit
/// lane, and of the rows 0, 1 to the last two. For rows of more than 12 bytes, which no odd number
/// of quarter bits has: bytes of the stretches of all quads.
const fn controls(pair: usize, starts: Starts) -> [[[[u8; 32]; 2]; 2]; 4] {
    let row = pair / 2;
    let mut all = [[[[0x80; 32]; 2]; 2]; 4];
    let mut i = 0;
    while i < 4 * 2 * 2 * 32 {
        let (q, k, second, b) = (i / 128, i / 64 % 2, i / 32 % 2, i % 32);
        let (lane, start) = (b % 16 / 4, starts[q][k]);
        let r = if second == 1 { lane.wrapping_sub(2) } else { lane };
        let at = start[r % 2] - if row < 4 { start[0] } else { base(row, start) } + b % 4;
        if row > 12 && second == 0 {
            // The stretches of all quads, of one row to a lane.
            all[q][k][second][b] = (starts[lane][k][0] + b % 4) as u8;
        }
        let wanted = if row < 4 { second == 0 } else { row <= 12 && r < 2 };
        if wanted {
            all[q][k][second][b] = (r * pair / 2 + at) as u8;
        }
        i += 1;
    }
    all
}

/// Bytes `STARTS[q][k]` and the next three of the eight rows of a half, a row to a 32-bit lane.
///
/// # Safety
/// As [`Narrow::index`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn stretch<E: Narrow>(
    code: *const u8,
    last: u128,
    q: usize,
    k: usize,
    half: usize,
) -> __m256i {
    let (pair, row, [start, odd]) = (E::PAIR, E::PAIR / 2, E::STARTS[q][k]);
    let two = |low: *const u8, high: *const u8| {
        // SAFETY: the farthest row starts inside the tile, and 32 bytes behind it are readable.
        let (low, high) = unsafe { (_mm_loadu_si128(low.cast()), _mm_loadu_si128(high.cast())) };
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
    };
    let pick = |v: __m256i, second: usize| {
        // SAFETY: 32 bytes.
        let control = unsafe { _mm256_loadu_si256(E::CONTROLS[q][k][second].as_ptr().cast()) };
        _mm256_shuffle_epi8(v, control)
    };
    // SAFETY: rows of this half; loads as said above.
    let rows = unsafe {
        let first = code.add(4 * half * pair);
        if pair == 8 {
            _mm256_loadu_si256(first.add(start).cast())
        } else if row < 4 {
            pick(two(first.add(start), first.add(start + 2 * pair)), 0)
        } else if row <= 12 {
            let first = first.add(base(row, E::STARTS[q][k]));
            let (a, b) = (two(first, first.add(2 * pair)), two(first.add(pair), first.add(3 * pair)));
            _mm256_or_si256(pick(a, 0), pick(b, 1))
        } else {
            // Rows meet the fourth ones behind them. What the quads of a half share is made once,
            // as all of them are in one function.
            let rows = |r: usize| {
                let both = two(first.add(r * row), first.add((r + 4) * row));
                if row == 16 { both } else { pick(both, 0) }
            };
            let (ab, cd) = if q < 2 {
                (_mm256_unpacklo_epi32(rows(0), rows(1)), _mm256_unpacklo_epi32(rows(2), rows(3)))
            } else {
                (_mm256_unpackhi_epi32(rows(0), rows(1)), _mm256_unpackhi_epi32(rows(2), rows(3)))
            };
            if q.is_multiple_of(2) { _mm256_unpacklo_epi64(ab, cd) } else { _mm256_unpackhi_epi64(ab, cd) }
        }
    };
    if E::TAPE && half == 1 && odd + 4 > row {
        let last = _mm256_set1_epi32((last >> (8 * odd)) as u32 as i32);
        return _mm256_blend_epi32::<0x80>(rows, last);
    }
    rows
}

/// Words of the windows from bits `low` and `high` of the rows, in the low and high words of 32-bit
/// lanes; `a` and `b` are the stretches of quad `q` that they lie in, and their numbers.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn words<E: Narrow>(
    q: usize,
    a: (__m256i, usize),
    low: usize,
    b: (__m256i, usize),
    high: usize,
) -> __m256i {
    // Where a window begins in its stretch, in even and in odd rows.
    let begin = |k: usize, bit: usize| {
        let [even, odd] = E::STARTS[q][k];
        [(bit - 8 * even) as i32, (bit + E::PAIR % 2 * 4 - 8 * odd) as i32]
    };
    let (low, high) = (begin(a.1, low), begin(b.1, high).map(|high| 16 - high));
    let (a, b) = if E::PAIR % 2 == 0 {
        (_mm256_srl_epi32(a.0, _mm_cvtsi32_si128(low[0])), _mm256_sll_epi32(b.0, _mm_cvtsi32_si128(high[0])))
    } else {
        let counts = |[e, o]: [i32; 2]| _mm256_setr_epi32(e, o, e, o, e, o, e, o);
        (_mm256_srlv_epi32(a.0, counts(low)), _mm256_sllv_epi32(b.0, counts(high)))
    };
    _mm256_blend_epi16::<0b1010_1010>(a, b)
}

/// Where the stretches of quads start, of windows of 16 bits or less that start at bit `c *
/// quarters / 4` of their rows: one for a quad where all of them fit it. The last window of the
/// quad is that of column `last`, the first one of the second stretch that of column 2.
pub(super) const fn starts(quarters: usize, last: usize) -> Starts {
    let nibble = quarters % 2 * 4;
    let mut all = [[[0; 2]; 2]; 4];
    let mut q = 0;
    while q < 4 {
        let (p0, p2, end) = (q * quarters, (4 * q + 2) * quarters / 4, (4 * q + last) * quarters / 4);
        let first = [p0 / 8, (p0 + nibble) / 8];
        let fits = end - 8 * first[0] <= 16 && end + nibble - 8 * first[1] <= 16;
        all[q] = [first, if fits { first } else { [p2 / 8, (p2 + nibble) / 8] }];
        q += 1;
    }
    all
}

/// Windows from bits `c * quarters / 4` of columns 0, 2 and of columns 1, 3 of quad `q`.
///
/// # Safety
/// As [`Narrow::index`]; `E::STARTS` is `starts(quarters, 3)`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn windows<E: Narrow>(
    code: *const u8,
    last: u128,
    q: usize,
    half: usize,
    quarters: usize,
) -> [__m256i; 2] {
    let p = |i: usize| (4 * q + i) * quarters / 4;
    // SAFETY: promised by the caller.
    let [a, b] = unsafe { stretches::<E>(code, last, q, half) };
    [words::<E>(q, (a, 0), p(0), (b, 1), p(2)), words::<E>(q, (a, 0), p(1), (b, 1), p(3))]
}

/// Both stretches of quad `q`.
///
/// # Safety
/// As [`Narrow::index`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn stretches<E: Narrow>(code: *const u8, last: u128, q: usize, half: usize) -> [__m256i; 2] {
    // SAFETY: promised by the caller.
    let a = unsafe { stretch::<E>(code, last, q, 0, half) };
    let shared = E::STARTS[q][0] == E::STARTS[q][1];
    // SAFETY: the same.
    [a, if shared { a } else { unsafe { stretch::<E>(code, last, q, 1, half) } }]
}

/// Codes of `quarters / 4` bits, each in the low bits of a word: those of `a` in low, those of `b`
/// in high bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn codes([a, b]: [__m256i; 2], quarters: usize) -> __m256i {
    let mask = _mm256_set1_epi16((1 << (quarters / 4)) - 1);
    _mm256_or_si256(_mm256_and_si256(a, mask), _mm256_slli_epi16::<8>(_mm256_and_si256(b, mask)))
}

/// Codes of `quarters / 4` bits of quad `q`, a byte to a column.
///
/// # Safety
/// As [`windows`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn columns<E: Narrow>(code: *const u8, last: u128, q: usize, half: usize, quarters: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe {
        if quarters == 32 {
            stretch::<E>(code, last, q, 0, half)
        } else {
            codes(windows::<E>(code, last, q, half, quarters), quarters)
        }
    }
}

/// As [`columns`], with the second column of a quad behind the third; below eight bits.
///
/// # Safety
/// As [`windows`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn swapped<const R4: usize>(code: *const u8, q: usize, half: usize) -> __m256i {
    type Rows<const R4: usize> = Scalar<R4, Integers>;
    let p = |i: usize| (4 * q + i) * R4 / 4;
    // SAFETY: promised by the caller.
    let [a, b] = unsafe { stretches::<Rows<R4>>(code, 0, q, half) };
    let pair = |s: (__m256i, usize), i: usize| words::<Rows<R4>>(q, s, p(i), s, p(i + 1));
    codes([pair((a, 0), 0), pair((b, 1), 2)], R4)
}

/// High bytes of words: those of `a` in low, those of `b` in high bytes. The blend is one operation
/// on AMD's processors; on Intel's it is two or three, where a mask and an or are two.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn join(a: __m256i, b: __m256i) -> __m256i {
    _mm256_blendv_epi8(_mm256_srli_epi16::<8>(a), b, _mm256_set1_epi16(-256))
}

/// Trellis, one weight a step, at `R4` quarter bits a weight.
#[derive(Clone, Copy)]
pub(super) struct Fine<const R4: usize, T>(T);

impl<const R4: usize, T: Table> Narrow for Fine<R4, T> {
    type Many = Self;
    const AHEAD: Ahead = Ahead::Chunk;
    type Order = Fours;
    const TAPE: bool = true;
    const SIGNED: bool = true;
    const SIGNS_SUFFICE: bool = T::FIRST_IS_ZERO;
    const SECOND: bool = T::BITS == 8;
    const MAGNITUDES: bool = T::MAGNITUDES;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 3);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        // SAFETY: promised by the caller.
        Self(unsafe { T::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        unsafe { self.of_windows(windows::<Self>(code, last, I / 2, I % 2, R4)) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [top, all]: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe {
            match T::BITS {
                6 => self.0.look_low(_mm256_srli_epi16::<1>(top)),
                7 => self.0.look_low(top),
                _ => self.0.look(all),
            }
        }
    }
}

impl<const R4: usize, T: Table> Cut for Fine<R4, T> {
    const R4: usize = R4;
    const STEP: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn of_windows(&self, windows: [__m256i; 2]) -> [__m256i; 2] {
        let [a, b] = windows.map(|x| {
            let c = _mm256_set1_epi16(trellis::FINE_ADD.cast_signed());
            _mm256_mullo_epi16(x, _mm256_add_epi16(x, c))
        });
        let top = join(a, b);
        let all = if T::BITS == 8 { join(_mm256_slli_epi16::<1>(a), _mm256_slli_epi16::<1>(b)) } else { top };
        [top, all]
    }
}

/// The `fast` trellis codes of `V` weights a step: every byte of the hash is a weight.
#[derive(Clone, Copy)]
pub(super) struct Fast<const R4: usize, const V: usize, T>(T);

impl<const R4: usize, const V: usize, T: Table> Narrow for Fast<R4, V, T> {
    type Many = Self;
    const AHEAD: Ahead = if V == 4 { Ahead::Tile } else { Ahead::Chunk };
    type Order = Fours;
    const TAPE: bool = true;
    const SIGNED: bool = true;
    const SIGNS_SUFFICE: bool = T::FIRST_IS_ZERO;
    const MAGNITUDES: bool = T::MAGNITUDES;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 4 - V);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        // SAFETY: promised by the caller.
        Self(unsafe { T::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        let (q, half) = (I / 2, I % 2);
        // The two words of a quad: one state for both, or one each.
        let (p0, p1) = (4 * q * R4 / 4, (4 * q + 4 - V) * R4 / 4);
        // SAFETY: promised by the caller.
        let row = unsafe { stretch::<Self>(code, last, q, 0, half) };
        let state = words::<Self>(q, (row, 0), p0, (row, 0), p1);
        // SAFETY: promised by the caller.
        unsafe { self.of_windows([state; 2]) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [hash, _]: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.look_low(hash) }
    }
}

impl<const R4: usize, const V: usize, T: Table> Cut for Fast<R4, V, T> {
    const R4: usize = R4;
    const STEP: usize = V;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn of_windows(&self, [state, _]: [__m256i; 2]) -> [__m256i; 2] {
        let factor = const { (trellis::fast_factor(R4) >> 8).cast_signed() };
        let hash = if V == 4 {
            let low = _mm256_mullo_epi32(state, _mm256_set1_epi32(factor));
            _mm256_add_epi32(low, _mm256_srli_epi32::<8>(state))
        } else {
            let low = _mm256_mullo_epi16(state, _mm256_set1_epi16(factor as i16));
            _mm256_add_epi16(low, _mm256_srai_epi16::<8>(state))
        };
        [hash, hash]
    }
}

/// Scalar tables at `R4` quarter bits a weight.
#[derive(Clone, Copy)]
pub(super) struct Scalar<const R4: usize, T>(T);

impl<const R4: usize, T: Table> Narrow for Scalar<R4, T> {
    type Many = Self;
    type Order = Fours;
    const TILE_BYTES: usize = 8 * R4;
    const STARTS: Starts = starts(R4, 3);

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        // SAFETY: promised by the caller.
        Self(unsafe { T::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, last: u128) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        let index = unsafe { columns::<Self>(code, last, I / 2, I % 2, R4) };
        [index, index]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, [index, _]: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.look(index) }
    }
}
