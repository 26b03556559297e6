//! Expanders: one coded tile to vectors of integers.

use super::{
    lookup::{banks, lookups},
    narrow::swapped,
    products::vectors,
    *,
};
use std::mem::MaybeUninit;

/// One coded tile to vectors: `[2 q + half]` holds columns `4 q..4 q + 4` (bytes) or `[2 p + half]`
/// columns `2 p` and `2 p + 1` (words) of rows `8 half..8 half + 8`, a row to a 32-bit lane.
pub(super) trait Expand {
    /// False: eight vectors of bytes. True: sixteen vectors of 16-bit integers.
    const WIDE: bool;

    /// Loads the constants that `tables` laid out.
    ///
    /// # Safety
    /// The features of [`Avx2`]; `table` was made for this expander.
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self;

    /// Expands the tile at `code`.
    ///
    /// # Safety
    /// The features of [`Avx2`]; `code` starts a tile with [`OVERREAD`](fracbit_kernels::OVERREAD)
    /// readable bytes behind it; `table` is that of [`new`](Self::new).
    unsafe fn tile(&self, table: &[Line], code: *const u8, out: &mut [__m256i]);
}

/// Scalar tables of `16 N` 16-bit integers at `R4` quarter bits a weight, low and high bytes looked
/// up apart.
pub(super) struct Wide<const R4: usize, const N: usize>([[__m256i; N]; 2]);

impl<const R4: usize, const N: usize> Expand for Wide<R4, N> {
    const WIDE: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], _tile_bytes: usize) -> Self {
        Self([banks(table, 0), banks(&table[N.div_ceil(4)..], 0)])
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn tile(&self, _table: &[Line], code: *const u8, out: &mut [__m256i]) {
        let high = _mm256_set1_epi16(-256);
        vectors!(I => {
            let (q, half) = (I / 2, I % 2);
            // SAFETY: promised by the caller.
            let index = unsafe { swapped::<R4>(code, q, half) };
            let [l, h] = lookups(self.0.each_ref(), index);
            // Bytes 0, 2 are those of the first two columns, bytes 1, 3 of the other two.
            out[4 * q + half] = _mm256_or_si256(_mm256_andnot_si256(high, l), _mm256_slli_epi16::<8>(h));
            out[4 * q + 2 + half] = _mm256_or_si256(_mm256_srli_epi16::<8>(l), _mm256_and_si256(h, high));
        });
    }
}

/// Stretches of rows and the windows in them.
///
/// Line 0 of the table, as 32-bit numbers: where in a row the stretch of each pair of columns
/// starts, in bytes (both pairs of a quad have the same when a quad fits a stretch). Line 1: how
/// far the window of each pair is shifted, right for even pairs, whose windows go to the low word
/// of a lane, left for odd ones. Line 2: bits of an index, bits to shift a hash.
pub(super) struct Windows {
    starts: [usize; 8],
    quads: bool,
    tile_bytes: usize,
    /// Picks the stretches of rows 0 and 1 (4 and 5) for the low (high) half of a vector, and of
    /// rows 2 and 3.
    pick: [__m256i; 2],
    counts: [__m256i; 8],
    bits: u8,
    shift: u8,
}

/// Lines that [`Windows`] reads.
pub(super) const WINDOW_LINES: usize = 3;

impl Windows {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn new(lines: &[Line], tile_bytes: usize) -> Self {
        debug_assert!(tile_bytes <= 256 && lines.len() >= WINDOW_LINES, "the table of this microkernel");
        let row_bytes = tile_bytes / TILE_ROWS;
        let control = |second: usize| {
            let mut bytes = [0x80u8; 32];
            for lane in [0, 16] {
                for b in 0..8 {
                    let from = b / 4 * row_bytes + b % 4;
                    // Rows of more than 12 bytes do not come this way.
                    bytes[lane + 8 * second + b] = u8::try_from(from).unwrap_or(0x80);
                }
            }
            // SAFETY: 32 bytes.
            unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
        };
        Self {
            starts: std::array::from_fn(|pair| lines[0].0[4 * pair].into()),
            quads: lines[0].0[..4] == lines[0].0[4..8],
            tile_bytes,
            pick: [control(0), control(1)],
            counts: std::array::from_fn(|i| _mm256_set1_epi32(i32::from(lines[1].0[4 * i]))),
            bits: lines[2].0[0],
            shift: lines[2].0[4],
        }
    }

    /// The stretches of columns `4 q..4 q + 2` and `4 q + 2..4 q + 4`.
    ///
    /// # Safety
    /// `tape` is of this tile size.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn stretches(&self, tape: &Tape, q: usize, half: usize) -> [__m256i; 2] {
        // SAFETY: promised by the caller.
        let first = unsafe { self.stretch(tape, 2 * q, half) };
        // SAFETY: the same.
        [first, if self.quads { first } else { unsafe { self.stretch(tape, 2 * q + 1, half) } }]
    }

    /// # Safety
    /// As [`stretches`](Self::stretches).
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn stretch(&self, tape: &Tape, pair: usize, half: usize) -> __m256i {
        let row_bytes = self.tile_bytes / TILE_ROWS;
        let start = self.starts[pair];
        // SAFETY: stretches start inside their rows; behind the start of a row 32 bytes are
        // readable in the codes, and in the tail as well; two stretches of rows of 12 bytes or less
        // lie within 16 bytes.
        unsafe {
            let code = tape.code.add(8 * half * row_bytes + start);
            if row_bytes > 12 {
                let one = |row: usize| code.add(row * row_bytes).cast::<i32>().read_unaligned();
                return _mm256_setr_epi32(one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7));
            }
            let last = if half == 0 { code.add(6 * row_bytes) } else { tape.tail().add(start) };
            let two = |low: *const u8, high: *const u8| {
                let low = _mm256_castsi128_si256(_mm_loadu_si128(low.cast()));
                _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(high.cast()))
            };
            _mm256_or_si256(
                _mm256_shuffle_epi8(two(code, code.add(4 * row_bytes)), self.pick[0]),
                _mm256_shuffle_epi8(two(code.add(2 * row_bytes), last), self.pick[1]),
            )
        }
    }

    /// The windows of both pairs of a quad, 16 bits each, in the low and high words of lanes.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn words(&self, [a, b]: [__m256i; 2], q: usize) -> __m256i {
        let a = _mm256_srlv_epi32(a, self.counts[2 * q]);
        let b = _mm256_sllv_epi32(b, self.counts[2 * q + 1]);
        _mm256_blend_epi16::<0b1010_1010>(a, b)
    }
}

/// A tile, and its last two rows with the start of the tape behind them.
///
/// Only these rows are copied: loads that span two recent stores wait for both, and most rows need
/// no copy.
struct Tape {
    code: *const u8,
    rows: MaybeUninit<[u8; 64]>,
    wrap: bool,
    tail: usize,
}

impl Tape {
    /// # Safety
    /// As [`Expand::tile`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(windows: &Windows, code: *const u8, wrap: bool) -> Self {
        let row_bytes = windows.tile_bytes / TILE_ROWS;
        let mut tape = Self { code, rows: MaybeUninit::uninit(), wrap, tail: 14 * row_bytes };
        if wrap {
            let to = tape.rows.as_mut_ptr().cast::<u8>();
            // SAFETY: two rows of a trellis tile are 4 to 20 bytes, so that both stores lie in the
            // 64 and leave no gap; a tile has at least 32 bytes, and more are readable behind it.
            unsafe {
                _mm256_storeu_si256(to.cast(), _mm256_loadu_si256(code.add(tape.tail).cast()));
                _mm256_storeu_si256(to.add(2 * row_bytes).cast(), _mm256_loadu_si256(code.cast()));
            }
        }
        tape
    }

    /// Where row 14 starts.
    #[inline]
    fn tail(&self) -> *const u8 {
        if self.wrap { self.rows.as_ptr().cast() } else { self.code.wrapping_add(self.tail) }
    }
}

/// `x (x + c)` in every 16-bit lane.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn hash(x: __m256i, c: u16) -> __m256i {
    _mm256_mullo_epi16(x, _mm256_add_epi16(x, _mm256_set1_epi16(c.cast_signed())))
}

/// Shifts every 16-bit lane right.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn right(x: __m256i, count: u8) -> __m256i {
    _mm256_srl_epi16(x, _mm_cvtsi32_si128(count.into()))
}

/// Tables of pairs in memory, of bytes or (`WIDE`) of words: large vector tables, the papers'
/// trellis code (`HASH`).
///
/// Indices are made in vectors, looked up one by one: `vpgatherdd` takes longer than loads do,
/// several times as long where a processor's microcode guards it.
pub(super) struct Loads<const WIDE: bool, const HASH: bool>(Windows);

impl<const WIDE: bool, const HASH: bool> Expand for Loads<WIDE, HASH> {
    const WIDE: bool = WIDE;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        Self(Windows::new(table, tile_bytes))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn tile(&self, table: &[Line], code: *const u8, out: &mut [__m256i]) {
        let windows = &self.0;
        let entries = &table[WINDOW_LINES..];
        // The bound of loads: every index is below `2^bits`.
        let bits = windows.bits;
        assert!(bits <= 16 && entries.len() * 16 >= 1 << bits, "entries for {bits} bits");
        assert_eq!(out.len(), if WIDE { 16 } else { 8 }, "vectors of a tile");
        let mask = _mm256_set1_epi16(((1u32 << bits) - 1) as i16);
        // SAFETY: promised by the caller.
        let tape = unsafe { Tape::new(windows, code, HASH) };
        let mut indices = [[0u16; 16]; 8];
        for q in 0..4 {
            for half in 0..2 {
                // SAFETY: the tape is of this tile.
                let stretches = unsafe { windows.stretches(&tape, q, half) };
                let window = windows.words(stretches, q);
                let index = if HASH { right(hash(window, 1), windows.shift) } else { window };
                let index = _mm256_and_si256(index, mask);
                // SAFETY: 32 bytes.
                unsafe { _mm256_storeu_si256(indices[2 * q + half].as_mut_ptr().cast(), index) };
            }
        }
        let entries = entries.as_ptr().cast::<u32>();
        // SAFETY: the mask keeps indices below the number of entries, checked above.
        let look = |index: u16| unsafe { entries.add(index.into()).read() };
        let out = out.as_mut_ptr().cast::<u32>();
        for (v, indices) in indices.iter().enumerate() {
            for (row, &[a, b]) in indices.as_chunks::<2>().0.iter().enumerate() {
                let (a, b) = (look(a), look(b));
                let (q, half) = (v / 2, v % 2);
                // SAFETY: 16 or 8 vectors of 8 lanes, checked above.
                unsafe {
                    if WIDE {
                        out.add(8 * (4 * q + half) + row).write(a);
                        out.add(8 * (4 * q + 2 + half) + row).write(b);
                    } else {
                        out.add(8 * v + row).write(a | b << 16);
                    }
                }
            }
        }
    }
}

/// Scalar tables of 256 16-bit integers in memory, looked up one by one: a shuffle for each 16
/// bytes of them takes longer.
///
/// A 32-bit lane is made of two codes. The table has for each byte what it gives as the first one,
/// then what it gives as the second.
pub(super) struct Bytes;

impl Expand for Bytes {
    const WIDE: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(_table: &[Line], _tile_bytes: usize) -> Self {
        Self
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn tile(&self, table: &[Line], code: *const u8, out: &mut [__m256i]) {
        assert_eq!(table.len(), 2 * 16, "256 first and 256 second entries");
        assert_eq!(out.len(), 16, "vectors of a tile");
        let entries = table.as_ptr().cast::<u32>();
        let out = out.as_mut_ptr().cast::<u32>();
        for row in 0..TILE_ROWS {
            for word in 0..2 {
                // SAFETY: a tile has 16 rows of 16 bytes; bytes are below 256; 16 vectors of 8
                // lanes, checked above.
                unsafe {
                    let codes = code.add(8 * (2 * row + word)).cast::<u64>().read_unaligned();
                    for p in 0..4 {
                        let [a, b] = [codes >> (16 * p) & 255, codes >> (16 * p + 8) & 255];
                        let lane = entries.add(a as usize).read() | entries.add(256 + b as usize).read();
                        out.add(8 * (2 * (4 * word + p) + row / 8) + row % 8).write(lane);
                    }
                }
            }
        }
    }
}
