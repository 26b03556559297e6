//! Expanders: one coded tile to vectors of integers.

use super::*;
use std::mem::MaybeUninit;

/// One coded tile to vectors: `[2 q + half]` holds columns `4 q..4 q + 4` (bytes) or `[2 p + half]` columns `2 p` and
/// `2 p + 1` (words) of rows `8 half..8 half + 8`, a row to a 32-bit lane.
pub(super) trait Expand {
    /// False: eight vectors of bytes. True: sixteen vectors of 16-bit integers.
    const WIDE: bool;

    /// Expands the tile at `code`.
    ///
    /// # Safety
    /// The processor has the features of [`Avx2`]; `code` starts a tile with
    /// [`OVERREAD`](fracbit_kernels::OVERREAD) readable bytes behind it; `windows` was made for this expander.
    unsafe fn tile(windows: &Windows<'_>, code: *const u8, out: &mut [__m256i]);
}

/// Stretches of rows and the windows in them.
///
/// Line 0 of the table, as 32-bit numbers: where in a row the stretch of each pair of columns starts, in bytes (both
/// pairs of a quad have the same when a quad fits a stretch). Line 1: how far window `i` is shifted, right when it goes
/// to the low word of its lane, left when it goes to the high word. Line 2: bits of an index, bits to shift a hash.
pub(super) struct Windows<'a> {
    lines: &'a [Line],
    quads: bool,
    tile_bytes: usize,
    /// Picks the stretches of rows 0 and 1 (4 and 5) for the low (high) half of a vector, and of rows 2 and 3.
    pick: [__m256i; 2],
    counts: [__m256i; 16],
}

/// Lines that [`Windows`] reads.
pub(super) const WINDOW_LINES: usize = 3;

impl<'a> Windows<'a> {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn new(lines: &'a [Line], tile_bytes: usize) -> Self {
        debug_assert!(tile_bytes <= 256 && lines.len() >= WINDOW_LINES, "the table of this body");
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
            lines,
            quads: lines[0].0[..4] == lines[0].0[4..8],
            tile_bytes,
            pick: [control(0), control(1)],
            counts: std::array::from_fn(|i| _mm256_set1_epi32(i32::from(lines[1].0[4 * i]))),
        }
    }

    /// Constants of the expander.
    fn table(&self) -> &'a [Line] {
        &self.lines[WINDOW_LINES..]
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
        let start = usize::from(self.lines[0].0[4 * pair]);
        // SAFETY: stretches start inside their rows; behind the start of a row 32 bytes are readable in the codes, and in
        // the tail as well; two stretches of rows of 12 bytes or less lie within 16 bytes.
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

    /// A window of 16 bits in each word: window `low` in the low words, window `high` in the high words.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn words(&self, [a, b]: [__m256i; 2], low: usize, high: usize) -> __m256i {
        let (a, b) = (_mm256_srlv_epi32(a, self.counts[low]), _mm256_sllv_epi32(b, self.counts[high]));
        _mm256_blend_epi16::<0b1010_1010>(a, b)
    }

    /// Window `pair` of pairs in the low bits of each lane.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn dwords(&self, stretch: __m256i, pair: usize) -> __m256i {
        // Odd pairs are stored as left shifts to the high word.
        let left = _mm256_sub_epi32(_mm256_set1_epi32(16), self.counts[pair]);
        _mm256_srlv_epi32(stretch, if pair.is_multiple_of(2) { self.counts[pair] } else { left })
    }

    fn bits(&self) -> u8 {
        self.lines[2].0[0]
    }

    fn shift(&self) -> u8 {
        self.lines[2].0[4]
    }
}

/// A tile, and its last two rows with the start of the tape behind them.
///
/// Only these rows are copied: loads that span two recent stores wait for both, and most rows need no copy.
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
    unsafe fn new(windows: &Windows<'_>, code: *const u8, wrap: bool) -> Self {
        let row_bytes = windows.tile_bytes / TILE_ROWS;
        let mut tape = Self { code, rows: MaybeUninit::uninit(), wrap, tail: 14 * row_bytes };
        if wrap {
            let to = tape.rows.as_mut_ptr().cast::<u8>();
            // SAFETY: two rows of a trellis tile are 4 to 20 bytes, so that both stores lie in the 64 and leave no gap;
            // a tile has at least 32 bytes, and more are readable behind it.
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

/// What [`Gather`] looks up.
pub(super) mod kind {
    /// Pairs of 16-bit integers.
    pub(crate) const WIDE_PAIRS: usize = 0;
    /// Pairs of bytes.
    pub(crate) const PAIRS: usize = 1;
    /// Single 16-bit integers.
    pub(crate) const WIDE_ONE: usize = 2;
}

/// Tables in memory: large vector tables, the papers' trellis code (`HASH`), scalar tables of 16-bit integers.
pub(super) struct Gather<const K: usize, const HASH: bool>;

impl<const K: usize, const HASH: bool> Expand for Gather<K, HASH> {
    const WIDE: bool = K != kind::PAIRS;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn tile(windows: &Windows<'_>, code: *const u8, out: &mut [__m256i]) {
        let entries = windows.table().as_ptr().cast::<i32>();
        // The gather's bound: every index is below `2^bits`.
        let bits = windows.bits();
        assert!(bits <= 16 && windows.table().len() * 16 >= 1 << bits, "entries for {bits} bits");
        let mask = _mm256_set1_epi32((1 << windows.bits()) - 1);
        // SAFETY: promised by the caller.
        let tape = unsafe { Tape::new(windows, code, HASH) };
        // SAFETY: `mask` keeps the index below the number of entries, checked above.
        let look = |i: __m256i| unsafe { _mm256_i32gather_epi32::<4>(entries, _mm256_and_si256(i, mask)) };
        for q in 0..4 {
            for half in 0..2 {
                // SAFETY: the tape is of this tile.
                let stretches = unsafe { windows.stretches(&tape, q, half) };
                if K == kind::WIDE_ONE {
                    // Words hold columns 0, 2 (a) and 1, 3 (b); lanes want 0, 1 and 2, 3.
                    let a = windows.words(stretches, 4 * q, 4 * q + 2);
                    let b = windows.words(stretches, 4 * q + 1, 4 * q + 3);
                    let join = |x, y| _mm256_or_si256(look(x), _mm256_slli_epi32::<16>(look(y)));
                    out[4 * q + half] = join(a, b);
                    out[4 * q + 2 + half] = join(_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b));
                } else {
                    let pair = |k: usize| {
                        let window = windows.dwords(stretches[k], 2 * q + k);
                        if HASH {
                            let low = _mm256_and_si256(window, _mm256_set1_epi32(0xffff));
                            look(right(hash(low, 1), windows.shift()))
                        } else {
                            look(window)
                        }
                    };
                    let (a, b) = (pair(0), pair(1));
                    if K == kind::WIDE_PAIRS {
                        out[4 * q + half] = a;
                        out[4 * q + 2 + half] = b;
                    } else {
                        out[2 * q + half] = _mm256_or_si256(a, _mm256_slli_epi32::<16>(b));
                    }
                }
            }
        }
    }
}
