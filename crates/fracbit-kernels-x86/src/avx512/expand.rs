//! Expanders: one coded tile to vectors of integers.

use super::{spread::*, *};

/// One coded tile to vectors in the layout of the module essay.
///
/// # Safety
/// Implementors read codes only as [`Spread::spread`] does. All functions need the features of [`Avx512`].
pub(super) trait Expand: Copy {
    /// False: four vectors of `w + 128` as bytes. True: eight vectors of 16-bit `w`.
    const WIDE: bool;

    /// Loads the constants that `tables` laid out.
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self;

    /// Expands the tile at `code`; the last four vectors are meaningless for a narrow expander.
    ///
    /// # Safety
    /// As [`Spread::spread`].
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8];
}

/// Bytes 4..8 of every 64-bit lane.
const HIGH_DWORDS: __mmask64 = 0xF0F0_F0F0_F0F0_F0F0;
/// Every second byte.
const ODD_BYTES: __mmask64 = 0xAAAA_AAAA_AAAA_AAAA;
/// The low 16 bits of every 32-bit lane, as bytes.
const LOW_WORDS: __mmask64 = 0x3333_3333_3333_3333;

/// `hash16` in every 16-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn hash(x: __m512i) -> __m512i {
    _mm512_mullo_epi16(x, _mm512_sub_epi16(x, _mm512_set1_epi8(-1)))
}

/// Trellis, one weight a step, `2^Q` magnitudes (6 to 8).
///
/// Spreads hold 64-bit stretches: of a whole row (`N` = 2: rows 0..8, rows 8..16) or of half a row (`N` = 4: left
/// halves of the two groups of rows, then right halves).
#[derive(Clone, Copy)]
pub(super) struct Fine<const C: usize, const N: usize, const Q: usize> {
    spread: Spread<C, N>,
    windows: [__m512i; 4],
    pack: __m512i,
    signs: __m512i,
    table: [__m512i; 4],
    /// Bytes 4..8 of every 64-bit lane. Not a constant: the compiler would turn a merging cut by a constant mask into
    /// a cut and a blend.
    high: __mmask64,
}

impl<const C: usize, const N: usize, const Q: usize> Expand for Fine<C, N, Q> {
    const WIDE: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        let rest = &table[spread_lines(N)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            windows: std::array::from_fn(|g| line(&rest[g])),
            pack: line(&rest[4]),
            signs: line(&rest[5]),
            table: std::array::from_fn(|i| line(&rest[6 + i])),
            high: std::hint::black_box(HIGH_DWORDS),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread(code) };
        let [t0, t1, t2, t3] = self.table;
        // Stage by stage rather than group by group: the four groups hide each other's latencies.
        let states = |s: usize| {
            let cut = |g: usize| {
                _mm512_multishift_epi64_epi8(self.windows[g], spread[if N == 2 { 0 } else { g / 2 * 2 } + s])
            };
            hash4([cut(0), cut(1), cut(2), cut(3)])
        };
        let (low, high) = (states(0), states(1));
        // The index is cut so that its bits 0..7 are what `vpermi2b` looks at.
        let merge = |control, g: usize| {
            let bytes = _mm512_multishift_epi64_epi8(control, low[g]);
            _mm512_mask_multishift_epi64_epi8(bytes, self.high, control, high[g])
        };
        let mut out = [_mm512_setzero_si512(); 8];
        for (g, out) in out[..4].iter_mut().enumerate() {
            *out = merge(self.pack, g);
        }
        for (g, out) in out[..4].iter_mut().enumerate() {
            let index = *out;
            *out = match Q {
                6 => _mm512_permutex2var_epi8(t0, index, t1),
                7 => {
                    let value = _mm512_permutex2var_epi8(t0, index, t1);
                    let negative = _mm512_movepi8_mask(index);
                    _mm512_mask_sub_epi8(value, negative, _mm512_setzero_si512(), value)
                }
                _ => {
                    let (a, b) =
                        (_mm512_permutex2var_epi8(t0, index, t1), _mm512_permutex2var_epi8(t2, index, t3));
                    let value = _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), a, b);
                    let negative = _mm512_movepi8_mask(merge(self.signs, g));
                    _mm512_mask_sub_epi8(value, negative, _mm512_setzero_si512(), value)
                }
            };
        }
        out
    }
}

/// `hash_fine` of four vectors, stage by stage.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn hash4(x: [__m512i; 4]) -> [__m512i; 4] {
    let c = _mm512_set1_epi16(trellis::FINE_ADD.cast_signed());
    let y = [
        _mm512_add_epi16(x[0], c),
        _mm512_add_epi16(x[1], c),
        _mm512_add_epi16(x[2], c),
        _mm512_add_epi16(x[3], c),
    ];
    [
        _mm512_mullo_epi16(x[0], y[0]),
        _mm512_mullo_epi16(x[1], y[1]),
        _mm512_mullo_epi16(x[2], y[2]),
        _mm512_mullo_epi16(x[3], y[3]),
    ]
}

/// How [`Lookup`] turns index bytes into weights.
pub(super) mod kind {
    /// Scalar, up to 64 entries.
    pub(crate) const ONE_64: usize = 0;
    /// Scalar, 128 entries.
    pub(crate) const ONE_128: usize = 1;
    /// Scalar, 256 entries.
    pub(crate) const ONE_256: usize = 2;
    /// Pairs, up to 64.
    pub(crate) const TWO_64: usize = 3;
    /// 128 pairs.
    pub(crate) const TWO_128: usize = 4;
    /// `fast` trellis, 64 magnitudes.
    pub(crate) const FAST_64: usize = 5;
    /// `fast` trellis, 128 magnitudes.
    pub(crate) const FAST_128: usize = 6;
}

/// Scalar and vector tables of bytes, and the `fast` trellis codes.
///
/// Spreads hold 32-bit stretches of the rows `i` and `i + 8` side by side: half a row (`N` = 2) or four columns
/// (`N` = 4).
#[derive(Clone, Copy)]
pub(super) struct Lookup<const C: usize, const N: usize, const K: usize> {
    spread: Spread<C, N>,
    cuts: [__m512i; 4],
    table: [__m512i; 4],
}

impl<const C: usize, const N: usize, const K: usize> Expand for Lookup<C, N, K> {
    const WIDE: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        let rest = &table[spread_lines(N)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|g| line(&rest[g])),
            table: std::array::from_fn(|i| line(&rest[4 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread(code) };
        let t = &self.table;
        let mut out = [_mm512_setzero_si512(); 8];
        for (g, out) in out[..4].iter_mut().enumerate() {
            let i = _mm512_multishift_epi64_epi8(self.cuts[g], spread[if N == 2 { g / 2 } else { g }]);
            *out = match K {
                kind::ONE_64 => _mm512_permutexvar_epi8(i, t[0]),
                kind::ONE_128 => _mm512_permutex2var_epi8(t[0], i, t[1]),
                kind::ONE_256 => full(i, t[0], t[1], t[2], t[3]),
                kind::TWO_64 => {
                    let first = _mm512_permutexvar_epi8(i, t[0]);
                    _mm512_mask_permutexvar_epi8(first, ODD_BYTES, i, t[1])
                }
                kind::TWO_128 => two(i, t[0], t[1], t[2], t[3]),
                // Each byte of the hash is a weight: low bits the magnitude, bit 7 the sign.
                _ => {
                    let hash = _mm512_add_epi16(_mm512_mullo_epi16(i, t[2]), _mm512_mulhrs_epi16(i, t[3]));
                    let value = if K == kind::FAST_64 {
                        _mm512_permutexvar_epi8(hash, t[0])
                    } else {
                        _mm512_permutex2var_epi8(t[0], hash, t[1])
                    };
                    _mm512_mask_sub_epi8(value, _mm512_movepi8_mask(hash), _mm512_setzero_si512(), value)
                }
            };
        }
        out
    }
}

/// 256 pairs of bytes: the codes are the indices.
///
/// A spread holds the indices of two quads: the low (high) half of each 128-bit lane has the two indices of its four rows
/// for the first (second). One lookup then serves 64 pairs, where [`Lookup`] would look each index up twice, and
/// interleaving first and second weights restores the lanes.
#[derive(Clone, Copy)]
pub(super) struct Pairs256 {
    spread: Spread<2, 2>,
    table: [__m512i; 8],
}

impl Expand for Pairs256 {
    const WIDE: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        let rest = &table[spread_lines(2)..];
        Self { spread: Spread::load(table, tile_bytes), table: std::array::from_fn(|i| line(&rest[i])) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        let [i, j] = unsafe { self.spread.spread(code) };
        let t = &self.table;
        let (a, b) = (full(i, t[0], t[1], t[2], t[3]), full(i, t[4], t[5], t[6], t[7]));
        let (c, d) = (full(j, t[0], t[1], t[2], t[3]), full(j, t[4], t[5], t[6], t[7]));
        let mut out = [_mm512_setzero_si512(); 8];
        out[0] = _mm512_unpacklo_epi8(a, b);
        out[1] = _mm512_unpackhi_epi8(a, b);
        out[2] = _mm512_unpacklo_epi8(c, d);
        out[3] = _mm512_unpackhi_epi8(c, d);
        out
    }
}

/// 256 entries in four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn full(i: __m512i, a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> __m512i {
    let (low, high) = (_mm512_permutex2var_epi8(a, i, b), _mm512_permutex2var_epi8(c, i, d));
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(i), low, high)
}

/// Even bytes from the 128 entries of `a`, `b`, odd ones from `c`, `d`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn two(i: __m512i, a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> __m512i {
    let (even, odd) = (_mm512_permutex2var_epi8(a, i, b), _mm512_permutex2var_epi8(c, i, d));
    _mm512_mask_blend_epi8(ODD_BYTES, even, odd)
}

/// Scalar tables of `2^B` 16-bit entries (up to 256).
#[derive(Clone, Copy)]
pub(super) struct Wide<const C: usize, const B: usize> {
    spread: Spread<C, 4>,
    cuts: [__m512i; 8],
    table: [__m512i; 8],
}

impl<const C: usize, const B: usize> Expand for Wide<C, B> {
    const WIDE: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        let rest = &table[spread_lines(4)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|i| line(&rest[i])),
            table: std::array::from_fn(|i| line(&rest[8 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread(code) };
        let t = &self.table;
        std::array::from_fn(|p| {
            let i = _mm512_multishift_epi64_epi8(self.cuts[p], spread[p / 2]);
            let pick = |a, b| _mm512_permutex2var_epi16(a, i, b);
            let bit = |n: i16| _mm512_test_epi16_mask(i, _mm512_set1_epi16(1 << n));
            match B {
                5 => _mm512_permutexvar_epi16(i, t[0]),
                6 => pick(t[0], t[1]),
                7 => _mm512_mask_blend_epi16(bit(6), pick(t[0], t[1]), pick(t[2], t[3])),
                _ => {
                    let low = _mm512_mask_blend_epi16(bit(6), pick(t[0], t[1]), pick(t[2], t[3]));
                    let high = _mm512_mask_blend_epi16(bit(6), pick(t[4], t[5]), pick(t[6], t[7]));
                    _mm512_mask_blend_epi16(bit(7), low, high)
                }
            }
        })
    }
}

/// Pairs from a table in memory: vector tables too large for registers, and the papers' trellis code (`HASH`).
#[derive(Clone, Copy)]
pub(super) struct Gather<const C: usize, const HASH: bool, const WIDE: bool> {
    spread: Spread<C, 4>,
    cuts: [__m512i; 8],
    mask: __m512i,
    shift: __m128i,
    table: *const i32,
}

impl<const C: usize, const HASH: bool, const WIDE: bool> Expand for Gather<C, HASH, WIDE> {
    const WIDE: bool = WIDE;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(table: &[Line], tile_bytes: usize) -> Self {
        let rest = &table[spread_lines(4)..];
        let entries = rest.len().saturating_sub(9) * 16;
        let count = line(&rest[8]);
        // The gather's bound: every index is below the power of two that the mask or the shift leaves.
        let bits = if HASH { 16 - rest[8].0[0] } else { rest[8].0[0] };
        assert!(bits <= 16 && entries >= 1 << bits, "{entries} pairs for indices of {bits} bits");
        let ones = _mm512_set1_epi32((1 << bits) - 1);
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|i| line(&rest[i])),
            mask: ones,
            shift: _mm512_castsi512_si128(count),
            table: rest[9..].as_ptr().cast(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tile(&self, code: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread(code) };
        let pair = |p: usize| {
            let i = _mm512_maskz_multishift_epi64_epi8(LOW_WORDS, self.cuts[p], spread[p / 2]);
            let i = if HASH { _mm512_srl_epi32(hash(i), self.shift) } else { i };
            let i = _mm512_and_si512(i, self.mask);
            // SAFETY: `mask` keeps the index below the number of entries, checked by `new`; the table outlives `self`.
            unsafe { _mm512_i32gather_epi32::<4>(i, self.table) }
        };
        if WIDE {
            std::array::from_fn(pair)
        } else {
            let mut out = [_mm512_setzero_si512(); 8];
            for (g, out) in out[..4].iter_mut().enumerate() {
                *out = _mm512_or_si512(pair(2 * g), _mm512_slli_epi32::<16>(pair(2 * g + 1)));
            }
            out
        }
    }
}
