//! Few tokens of a trellis between 2 and 4 bits: four rows a vector, two quads of columns of each.
//!
//! At these rates two rows are at most 16 bytes, a 128-bit lane. One `vpshufb` takes the stretches
//! of two quads of both from it, a stretch to a 32-bit lane, where eight rows a vector would take
//! two, a blend and twice the loads. Sums of the two quads of a row stay apart until the end of a
//! block.

use super::{
    narrow::{Ahead, Narrow},
    orders::Eights,
    *,
};

/// A trellis code whose windows [`Paired`] cuts.
pub(super) trait Cut: Narrow {
    /// Quarters of a bit a weight.
    const R4: usize;
    /// Weights of a step.
    const STEP: usize;

    /// The second half of [`Narrow::index`]: windows from columns 0 and 2 (a quad's two states,
    /// where a step has two weights), then those from columns 1 and 3, in the words of 32-bit
    /// lanes.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn of_windows(&self, windows: [__m256i; 2]) -> [__m256i; 2];
}

/// `E`, for few tokens.
#[derive(Clone, Copy)]
pub(super) struct Paired<E>(E);

/// Where quad `q` of the first or second row of a pair starts: byte from the start of the pair, bit
/// in it.
const fn start(r4: usize, row: usize, q: usize) -> (usize, usize) {
    let bit = row * 4 * r4 + q * r4;
    (bit / 8, bit % 8)
}

/// Whether a 32-bit lane that begins with the byte of a quad's first bit holds all its windows, at
/// every quad.
pub(super) const fn fits(r4: usize, step: usize) -> bool {
    let mut i = 0;
    while i < 8 {
        if start(r4, i / 4, i % 4).1 + (4 - step) * r4 / 4 > 16 {
            return false;
        }
        i += 1;
    }
    r4 > 8 && r4 <= 16
}

impl<E: Cut> Paired<E> {
    /// Bytes of two rows.
    const PAIR: usize = E::R4;
    /// From which byte of a pair of rows 16 hold quads `2 p` and `2 p + 1` of both: from the first
    /// one for all, where those hold all.
    const BASE: [usize; 2] = [0, if start(E::R4, 1, 3).0 + 4 <= 16 { 0 } else { start(E::R4, 0, 2).0 }];
    /// Bytes of those 16 that a lane gets: stretches of four bytes, or (where the second of two
    /// windows is a byte behind the first) both windows.
    const CONTROLS: &'static [[[u8; 32]; 2]; 2] = &{
        let mut all = [[[0; 32]; 2]; 2];
        let mut i = 0;
        while i < 2 * 2 * 32 {
            let (kind, p, b) = (i / 64, i / 32 % 2, i % 32);
            let lane = b % 16 / 4;
            let from = start(E::R4, lane / 2, 2 * p + lane % 2).0 - Self::BASE[p];
            let byte = if kind == 0 { b % 4 } else { b % 4 / 2 + b % 2 };
            all[kind][p][b] = (from + byte) as u8;
            i += 1;
        }
        all
    };
    /// Of the last 16 bytes of a tile, and of its first 16, those that follow one another from byte
    /// `BASE[p]` of the last two rows on.
    const SEAM: &'static [[[u8; 16]; 2]; 2] = &{
        let mut all = [[[0x80; 16]; 2]; 2];
        let mut i = 0;
        while i < 2 * 16 {
            let (p, k) = (i / 16, i % 16);
            let at = Self::BASE[p] + k;
            if at < Self::PAIR {
                all[p][0][k] = (at + 16 - Self::PAIR) as u8;
            } else {
                all[p][1][k] = (at - Self::PAIR) as u8;
            }
            i += 1;
        }
        all
    };

    /// Where the window of column `c` of a quad begins in the lanes of vectors of `p`.
    #[inline]
    const fn begin(p: usize, c: usize) -> [i32; 4] {
        let mut all = [0; 4];
        let mut lane = 0;
        while lane < 4 {
            let (row, q) = (lane / 2, 2 * p + lane % 2);
            let bit = (4 * q + c) * E::R4 / 4 + row * 4 * E::R4;
            all[lane] = (bit - 8 * start(E::R4, row, q).0) as i32;
            lane += 1;
        }
        all
    }

    /// Words of the windows of columns `low` and `high`, in low and high words of lanes.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn words(p: usize, s: __m256i, low: usize, high: usize) -> __m256i {
        let (low, high) = (Self::begin(p, low), Self::begin(p, high).map(|begin| 16 - begin));
        let eight = |[a, b, c, d]: [i32; 4]| _mm256_setr_epi32(a, b, c, d, a, b, c, d);
        let alike = |[a, b, c, d]: [i32; 4]| a == b && a == c && a == d;
        let count = |c: i32| _mm_cvtsi32_si128(c);
        let first =
            if alike(low) { _mm256_srl_epi32(s, count(low[0])) } else { _mm256_srlv_epi32(s, eight(low)) };
        let second =
            if alike(high) { _mm256_sll_epi32(s, count(high[0])) } else { _mm256_sllv_epi32(s, eight(high)) };
        _mm256_blend_epi16::<0b1010_1010>(first, second)
    }

    /// 16 bytes of the rows `4 g`, `4 g + 1` and of the next two, from `BASE[p]` on.
    ///
    /// # Safety
    /// As [`Narrow::index`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn rows(code: *const u8, p: usize, g: usize) -> __m256i {
        let at = 2 * g * Self::PAIR + Self::BASE[p];
        // SAFETY: all start inside the tile and end at most 16 bytes behind it; tiles of these
        // rates have 72 bytes or more.
        unsafe {
            let low = _mm_loadu_si128(code.add(at).cast());
            let high = if g == 3 {
                let [tail, head] = &Self::SEAM[p];
                let part = |from: *const u8, control: &[u8; 16]| {
                    _mm_shuffle_epi8(_mm_loadu_si128(from.cast()), _mm_loadu_si128(control.as_ptr().cast()))
                };
                _mm_or_si128(part(code.add(Self::TILE_BYTES - 16), tail), part(code, head))
            } else {
                _mm_loadu_si128(code.add(at + Self::PAIR).cast())
            };
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
        }
    }
}

impl<E: Cut> Narrow for Paired<E> {
    type Many = E;
    const AHEAD: Ahead = Ahead::Chunk;
    type Order = Eights;
    const TILE_BYTES: usize = E::TILE_BYTES;
    const SIGNED: bool = E::SIGNED;
    const SIGNS_SUFFICE: bool = E::SIGNS_SUFFICE;
    const SECOND: bool = E::SECOND;
    const MAGNITUDES: bool = E::MAGNITUDES;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        const { assert!(fits(E::R4, E::STEP), "a rate of two rows in a lane") };
        // SAFETY: promised by the caller.
        Self(unsafe { E::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn index<const I: usize>(&self, code: *const u8, _last: u128) -> [__m256i; 2] {
        let (p, g) = (I / 4, I % 4);
        // SAFETY: promised by the caller.
        let rows = unsafe { Self::rows(code, p, g) };
        let pick = |v: __m256i, control: &[u8; 32]| {
            // SAFETY: 32 bytes.
            _mm256_shuffle_epi8(v, unsafe { _mm256_loadu_si256(control.as_ptr().cast()) })
        };
        let [stretches, windows] = Self::CONTROLS;
        let windows = if E::R4 == 16 {
            // Whole bytes: shuffles cut the windows of even columns, and those of odd ones from
            // stretches shifted by half a byte.
            let even = pick(rows, &windows[p]);
            let odd = || {
                let shifted = _mm256_srli_epi32::<4>(pick(rows, &stretches[p]));
                let bytes = _mm_setr_epi8(0, 1, 1, 2, 4, 5, 5, 6, 8, 9, 9, 10, 12, 13, 13, 14);
                _mm256_shuffle_epi8(shifted, _mm256_broadcastsi128_si256(bytes))
            };
            [even, if E::STEP == 1 { odd() } else { even }]
        } else {
            let s = pick(rows, &stretches[p]);
            let even = Self::words(p, s, 0, 2);
            [even, if E::STEP == 1 { Self::words(p, s, 1, 3) } else { even }]
        };
        // SAFETY: promised by the caller.
        unsafe { self.0.of_windows(windows) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn weights<const I: usize>(&self, index: [__m256i; 2]) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.weights::<I>(index) }
    }
}
