//! Expanders: one coded tile to vectors of integers.

use super::{spread::*, *};
use crate::reads::Reads;
use fracbit_kernels::Args;

/// One coded tile to vectors of integers.
///
/// # Safety
/// Implementors read codes only as [`Spread::spread`] does. All functions need the features of
/// [`Avx512`].
pub(super) trait Expand: Copy {
    /// False: `w + 128` as bytes. True: 16-bit `w`.
    const WIDE: bool;
    /// Pieces of 8 bytes that the columns of a tile make: two of eight columns or four of four
    /// (`WIDE`).
    const PIECES: usize = if Self::WIDE { 4 } else { 2 };

    /// Loads the constants that `tables` laid out in [`Args::table`].
    unsafe fn new(args: &Args<'_>) -> Self;

    /// The same, but narrow weights are bytes `w` instead of `w + 128`.
    #[must_use]
    unsafe fn signed(self) -> Self;

    /// So fast for one token that memory binds: it may meet several strips at once.
    const BOUND: bool = false;

    /// Most tokens that meet tiles which are not regrouped: 6, or 8 where expanding leaves
    /// registers for the sums of as many.
    const IN_EIGHTS: usize = 6;

    /// The two pieces of a narrow tile are its even and its odd columns, not its first and its last
    /// eight.
    const SPLIT: bool = false;

    /// What the first half of the work leaves.
    type Mid: Copy;

    /// The vectors of `mid`.
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i];

    /// Asks for what comes behind the tile of `bytes` bytes at `code`; `tile` counts the tiles of
    /// the strip at hand.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn ask(&self, reads: Reads, code: *const u8, _tile: usize, bytes: usize) {
        reads.ask(code, bytes);
    }

    /// First half of the work on the tile at `code`: what loads and multiplies. A microkernel
    /// starts it for the next tile before it ends the tile at hand: the chain of dependent
    /// instructions is longer than the processor looks ahead.
    ///
    /// # Safety
    /// As [`Spread::spread`].
    unsafe fn begin(&self, code: *const u8) -> Self::Mid;

    /// The weights: `[half][piece]`, where 64-bit lane `i` is row `i` of that half.
    /// The last two pieces are meaningless for a narrow expander.
    unsafe fn end(&self, mid: Self::Mid) -> [[__m512i; 4]; 2];

    /// What [`end_by`](Self::end_by) wants to know of the scales of the groups at hand, for the two
    /// halves.
    ///
    /// # Safety
    /// `scales` points to sixteen.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn books(&self, _scales: *const half::f16) -> [__m512i; 2] {
        [_mm512_setzero_si512(); 2]
    }

    /// As [`end`](Self::end), where weights depend on the scale of their group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end_by(&self, mid: Self::Mid, _books: [__m512i; 2]) -> [[__m512i; 4]; 2] {
        // SAFETY: the features are here.
        unsafe { self.end(mid) }
    }

    /// As [`regroup`](Self::regroup), where weights depend on the scale of their group.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn regroup_by(&self, mid: Self::Mid, _books: [__m512i; 2]) -> [__m512i; 8] {
        // SAFETY: the features are here.
        unsafe { self.regroup(mid) }
    }

    /// The weights as `[half][piece]`, where 64-bit lane `i` is row `i` of that half and a piece
    /// eight neighbouring bytes of columns. The last two pieces are meaningless for a narrow
    /// expander.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn eights(&self, mid: Self::Mid, books: [__m512i; 2]) -> [[__m512i; 4]; 2] {
        // SAFETY: the features are here.
        let weights = unsafe { self.end_by(mid, books) };
        if !Self::SPLIT {
            return weights;
        }
        weights.map(|[even, odd, third, fourth]| {
            // 128-bit lanes of all columns of even and of odd rows.
            let (a, b) = (_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd));
            [_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), third, fourth]
        })
    }

    /// The weights, regrouped: a vector for each 4 bytes of columns, all rows in the order
    /// [`LANES`]. The last four vectors are meaningless for a narrow expander.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn regroup(&self, mid: Self::Mid) -> [__m512i; 8] {
        // SAFETY: the features are here.
        regrouped(unsafe { self.end(mid) }, Self::PIECES)
    }
}

/// A vector for each 4 bytes of columns, all rows in the order [`LANES`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn regrouped([low, high]: [[__m512i; 4]; 2], pieces: usize) -> [__m512i; 8] {
    let mut out = [_mm512_setzero_si512(); 8];
    for p in 0..pieces {
        let (a, b) = (_mm512_castsi512_ps(low[p]), _mm512_castsi512_ps(high[p]));
        out[2 * p] = _mm512_castps_si512(_mm512_shuffle_ps::<0b1000_1000>(a, b));
        out[2 * p + 1] = _mm512_castps_si512(_mm512_shuffle_ps::<0b1101_1101>(a, b));
    }
    out
}

/// Every second byte.
const ODD_BYTES: __mmask64 = 0xAAAA_AAAA_AAAA_AAAA;
/// The low 16 bits of every 32-bit lane, as bytes.
const LOW_WORDS: __mmask64 = 0x3333_3333_3333_3333;

/// What joins bytes of 16-bit lanes: one instruction, where a shift and a blend are two.
#[derive(Clone, Copy)]
struct Join {
    swap: __m512i,
    odd: __mmask64,
    even: __mmask64,
}

impl Join {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn new() -> Self {
        let mut masks = [ODD_BYTES, !ODD_BYTES];
        for mask in &mut masks {
            // The compiler shall not know the masks: it would make them anew every time.
            // SAFETY: an empty statement.
            unsafe {
                std::arch::asm!(
                    "/* {} */",
                    inout(kreg) * mask,
                    options(pure, nomem, nostack, preserves_flags)
                )
            };
        }
        Self {
            swap: _mm512_broadcast_i32x4(_mm_set_epi64x(0x0E0F_0C0D_0A0B_0809, 0x0607_0405_0203_0001)),
            odd: masks[0],
            even: masks[1],
        }
    }

    /// The upper bytes of the lanes of `even` and `odd`, side by side.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn uppers(self, even: __m512i, odd: __m512i) -> __m512i {
        self.bytes(odd, self.even, even)
    }

    /// The lower bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn lowers(self, even: __m512i, odd: __m512i) -> __m512i {
        self.bytes(even, self.odd, odd)
    }

    /// `to`, with the neighbouring bytes of `from` at `places`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn bytes(self, mut to: __m512i, places: __mmask64, from: __m512i) -> __m512i {
        // SAFETY: reads and writes registers only.
        unsafe {
            std::arch::asm!("vpshufb {}{{{}}}, {}, {}", inout(zmm_reg) to, in(kreg) places, in(zmm_reg) from, in(zmm_reg) self.swap,
                options(pure, nomem, nostack, preserves_flags));
        }
        to
    }
}

/// Bytes `w + 128` as `w`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn flip(bytes: __m512i) -> __m512i {
    _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN))
}

/// `256 - w` where `negative`: the negative of a weight that carries 128.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn negate(value: __m512i, negative: __mmask64) -> __m512i {
    _mm512_mask_sub_epi8(value, negative, _mm512_setzero_si512(), value)
}

/// Trellis, one weight a step, `2^Q` magnitudes (6 to 8).
///
/// States of even and of odd columns are hashed apart, as 16-bit lanes; then the upper bytes of
/// both make one vector.
#[derive(Clone, Copy)]
pub(super) struct Fine<const F: usize, const N: usize, const Q: usize> {
    spread: Spread<F, N>,
    /// Cuts of even columns and of odd columns, of columns 0..8 and of columns 8..16.
    cuts: [__m512i; 4],
    table: [__m512i; 4],
    join: Join,
}

impl<const F: usize, const N: usize, const Q: usize> Expand for Fine<F, N, Q> {
    const WIDE: bool = false;
    /// Hashes, `[half][cut]`.
    type Mid = [[__m512i; 4]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, tile_bytes, .. }: &Args<'_>) -> Self {
        let rest = &table[spread_lines(N)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|g| line(&rest[g])),
            table: std::array::from_fn(|i| line(&rest[4 + i])),
            join: Join::new(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { table: self.table.map(|bytes| flip(bytes)), ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread::<true>(code) };
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                let stretch = spread[if N == 1 { 0 } else { i / 2 }][half];
                *out = hash_fine(_mm512_multishift_epi64_epi8(self.cuts[i], stretch));
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, [low, high]: Self::Mid) -> [[__m512i; 4]; 2] {
        let zero = _mm512_setzero_si512();
        [
            [self.weights(low[0], low[1]), self.weights(low[2], low[3]), zero, zero],
            [self.weights(high[0], high[1]), self.weights(high[2], high[3]), zero, zero],
        ]
    }
}

impl<const F: usize, const N: usize, const Q: usize> Fine<F, N, Q> {
    /// The weights of hashes of even and of odd columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    fn weights(&self, even: __m512i, odd: __m512i) -> __m512i {
        let [t0, t1, t2, t3] = self.table;
        let index = self.join.uppers(even, odd);
        if Q == 6 {
            // Seven bits from bit 1 on: the sign is the highest. `vpermi2b` does not look at bit 7,
            // a bit of the neighbour.
            return _mm512_permutex2var_epi8(t0, _mm512_srli_epi16::<1>(index), t1);
        }
        // Bit 7 of a byte is the sign; `vpermi2b` looks at the others.
        let mut value = _mm512_permutex2var_epi8(t0, index, t1);
        if Q == 8 {
            // The last bit of the index chooses between a table of even and one of odd entries.
            let last = self.join.lowers(even, odd);
            let other = _mm512_permutex2var_epi8(t2, index, t3);
            value = _mm512_mask_blend_epi8(_mm512_movepi8_mask(last), value, other);
        }
        negate(value, _mm512_movepi8_mask(index))
    }
}

/// `trellis::hash_fine` in every 16-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn hash_fine(x: __m512i) -> __m512i {
    _mm512_mullo_epi16(x, _mm512_add_epi16(x, _mm512_set1_epi16(trellis::FINE_ADD.cast_signed())))
}

/// How [`Lookup`] turns index bytes into weights.
pub(super) mod kind {
    /// Scalar, up to 64 entries.
    pub(crate) const ONE_64: usize = 0;
    /// Scalar, 128 entries.
    pub(crate) const ONE_128: usize = 1;
    /// Scalar, 256 entries.
    pub(crate) const ONE_256: usize = 2;
    /// Up to 32 pairs: a word is a pair.
    pub(crate) const TWO_32: usize = 3;
    /// 64 pairs.
    pub(crate) const TWO_64: usize = 4;
    /// 128 pairs.
    pub(crate) const TWO_128: usize = 5;
    /// `fast` trellis of two weights a state, 64 magnitudes.
    pub(crate) const PAIR_64: usize = 6;
    /// `fast` trellis of two weights a state, 128 magnitudes.
    pub(crate) const PAIR_128: usize = 7;
    /// `fast` trellis of four weights a state, 64 magnitudes: 32-bit lanes hold a state twice.
    pub(crate) const QUAD_64: usize = 8;
    /// `fast` trellis of four weights a state, 128 magnitudes.
    pub(crate) const QUAD_128: usize = 9;
    /// As `QUAD_64`, states that begin with a byte: the two stretches are the states of the two
    /// pieces.
    pub(crate) const QUAD_64_BYTES: usize = 10;

    /// Whether an index is a hash of two weights to be made.
    pub(crate) const fn is_pair(kind: usize) -> bool {
        matches!(kind, PAIR_64 | PAIR_128)
    }

    /// Whether an index is a hash of four weights to be made.
    pub(crate) const fn is_quad(kind: usize) -> bool {
        matches!(kind, QUAD_64 | QUAD_128 | QUAD_64_BYTES)
    }

    /// Whether a byte of an index is a hash to be made.
    pub(crate) const fn is_fast(kind: usize) -> bool {
        is_pair(kind) || is_quad(kind)
    }
}

/// Scalar and vector tables of bytes, and the `fast` trellis codes: one cut makes the indices of 64
/// weights.
#[derive(Clone, Copy)]
pub(super) struct Lookup<const F: usize, const N: usize, const K: usize> {
    spread: Spread<F, N>,
    cuts: [__m512i; 2],
    table: [__m512i; 4],
}

impl<const F: usize, const N: usize, const K: usize> Expand for Lookup<F, N, K> {
    const WIDE: bool = false;
    const BOUND: bool = !kind::is_fast(K);
    const IN_EIGHTS: usize = if F == fetch::HALVES { 6 } else { 8 };
    /// Indices, `[half][piece]`.
    type Mid = [[__m512i; 2]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, tile_bytes, .. }: &Args<'_>) -> Self {
        let rest = &table[spread_lines(N)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|g| line(&rest[g])),
            table: std::array::from_fn(|i| line(&rest[2 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        let [a, b, c, d] = self.table;
        // Codes that hash have up to 128 entries, and behind them what the hash multiplies by.
        let table =
            if kind::is_fast(K) { [flip(a), flip(b), c, d] } else { self.table.map(|bytes| flip(bytes)) };
        Self { table, ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        let fast = kind::is_fast(K);
        // SAFETY: promised by the caller.
        let spread = unsafe {
            if fast { self.spread.spread::<true>(code) } else { self.spread.spread::<false>(code) }
        };
        let mut out = [[_mm512_setzero_si512(); 2]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for (g, out) in out.iter_mut().enumerate() {
                let stretch = spread[if N == 1 { 0 } else { g }][half];
                let i = if K == kind::QUAD_64_BYTES {
                    stretch
                } else {
                    _mm512_multishift_epi64_epi8(self.cuts[g], stretch)
                };
                *out = if kind::is_quad(K) {
                    let low = _mm512_mullo_epi32(i, self.table[2]);
                    _mm512_add_epi32(low, _mm512_srli_epi32::<8>(i))
                } else if kind::is_pair(K) {
                    let low = _mm512_mullo_epi16(i, self.table[2]);
                    _mm512_add_epi16(low, _mm512_srai_epi16::<8>(i))
                } else {
                    i
                };
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, indices: Self::Mid) -> [[__m512i; 4]; 2] {
        let t = &self.table;
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for (g, out) in out[..2].iter_mut().enumerate() {
                let i = indices[half][g];
                *out = match K {
                    kind::ONE_64 => _mm512_permutexvar_epi8(i, t[0]),
                    kind::ONE_128 => _mm512_permutex2var_epi8(t[0], i, t[1]),
                    kind::ONE_256 => full(i, t),
                    kind::TWO_32 => _mm512_permutexvar_epi16(i, t[0]),
                    kind::TWO_64 => _mm512_permutex2var_epi16(t[0], i, t[1]),
                    kind::TWO_128 => {
                        let first = _mm512_permutex2var_epi8(t[0], i, t[1]);
                        _mm512_mask_blend_epi8(ODD_BYTES, first, _mm512_permutex2var_epi8(t[2], i, t[3]))
                    }
                    // Each byte of the hash is a weight: low bits the magnitude, bit 7 the sign.
                    _ => {
                        let value = if K == kind::PAIR_64 || K == kind::QUAD_64 || K == kind::QUAD_64_BYTES {
                            _mm512_permutexvar_epi8(i, t[0])
                        } else {
                            _mm512_permutex2var_epi8(t[0], i, t[1])
                        };
                        negate(value, _mm512_movepi8_mask(i))
                    }
                };
            }
        }
        out
    }
}

/// 256 entries in four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn full(i: __m512i, t: &[__m512i; 4]) -> __m512i {
    let (low, high) = (_mm512_permutex2var_epi8(t[0], i, t[1]), _mm512_permutex2var_epi8(t[2], i, t[3]));
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(i), low, high)
}

/// 256 pairs of bytes: the codes are the indices, and rows of 8 bytes lie in the lanes as they are.
#[derive(Clone, Copy)]
pub(super) struct Pairs256 {
    first: [__m512i; 4],
    second: [__m512i; 4],
}

impl Expand for Pairs256 {
    const WIDE: bool = false;
    const BOUND: bool = true;
    const IN_EIGHTS: usize = 8;
    const SPLIT: bool = true;
    /// Codes, `[half]`.
    type Mid = [__m512i; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, .. }: &Args<'_>) -> Self {
        Self {
            first: std::array::from_fn(|i| line(&table[i])),
            second: std::array::from_fn(|i| line(&table[4 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { first: self.first.map(|bytes| flip(bytes)), second: self.second.map(|bytes| flip(bytes)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: a tile has 128 bytes.
        unsafe { [load(code), load(code.add(64))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, codes: Self::Mid) -> [[__m512i; 4]; 2] {
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            out[0] = full(codes[half], &self.first);
            out[1] = full(codes[half], &self.second);
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn regroup(&self, codes: Self::Mid) -> [__m512i; 8] {
        // SAFETY: the features are here.
        let [low, high] = unsafe { self.end(codes) };
        // 128-bit lanes that are rows: 0, 2, 4, 6; 1, 3, 5, 7; and the same of the upper half. Then
        // a transposition of their 32-bit lanes.
        let (a, b) = (_mm512_unpacklo_epi8(low[0], low[1]), _mm512_unpackhi_epi8(low[0], low[1]));
        let (c, d) = (_mm512_unpacklo_epi8(high[0], high[1]), _mm512_unpackhi_epi8(high[0], high[1]));
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let mut out = [ab; 8];
        out[0] = _mm512_unpacklo_epi64(ab, cd);
        out[1] = _mm512_unpackhi_epi64(ab, cd);
        let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        out[2] = _mm512_unpacklo_epi64(ab, cd);
        out[3] = _mm512_unpackhi_epi64(ab, cd);
        out
    }
}

/// 256 scalars of int16: low and high bytes are looked up apart, and interleaved.
#[derive(Clone, Copy)]
pub(super) struct Wide256 {
    low: [__m512i; 4],
    high: [__m512i; 4],
}

impl Expand for Wide256 {
    const WIDE: bool = true;
    /// Codes, `[half][half of the pieces]`.
    type Mid = [[__m512i; 2]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, .. }: &Args<'_>) -> Self {
        Self {
            low: std::array::from_fn(|i| line(&table[i])),
            high: std::array::from_fn(|i| line(&table[4 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        self
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // A 128-bit lane of a load is a row, a 32-bit lane a piece. Pieces 0 and 1 (2 and 3) of two
        // rows go to the low and high halves of a 128-bit lane, which interleaving makes the two
        // pieces of both rows.
        let one = _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29);
        let two = _mm512_add_epi32(one, _mm512_set1_epi32(2));
        let mut out = [[one; 2]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            // SAFETY: a tile has 256 bytes.
            let (a, b) = unsafe { (load(code.add(128 * half)), load(code.add(128 * half + 64))) };
            *out = [_mm512_permutex2var_epi32(a, one, b), _mm512_permutex2var_epi32(a, two, b)];
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, codes: Self::Mid) -> [[__m512i; 4]; 2] {
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for i in 0..2 {
                let (a, b) = (full(codes[half][i], &self.low), full(codes[half][i], &self.high));
                out[2 * i] = _mm512_unpacklo_epi8(a, b);
                out[2 * i + 1] = _mm512_unpackhi_epi8(a, b);
            }
        }
        out
    }
}

/// Scalar tables of `2^B` 16-bit entries (5 to 7).
#[derive(Clone, Copy)]
pub(super) struct Wide<const B: usize> {
    spread: Spread<{ fetch::HALVES }, 2>,
    cuts: [__m512i; 4],
    table: [__m512i; 4],
}

impl<const B: usize> Expand for Wide<B> {
    const WIDE: bool = true;
    type Mid = [[__m512i; 2]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, tile_bytes, .. }: &Args<'_>) -> Self {
        let rest = &table[spread_lines(2)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|i| line(&rest[i])),
            table: std::array::from_fn(|i| line(&rest[4 + i])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        self
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: promised by the caller.
        unsafe { self.spread.spread::<false>(code) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, spread: Self::Mid) -> [[__m512i; 4]; 2] {
        let t = &self.table;
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for (p, out) in out.iter_mut().enumerate() {
                let i = _mm512_multishift_epi64_epi8(self.cuts[p], spread[p / 2][half]);
                *out = match B {
                    5 => _mm512_permutexvar_epi16(i, t[0]),
                    6 => _mm512_permutex2var_epi16(t[0], i, t[1]),
                    _ => {
                        let upper = _mm512_test_epi16_mask(i, _mm512_set1_epi16(1 << 6));
                        let low = _mm512_permutex2var_epi16(t[0], i, t[1]);
                        _mm512_mask_blend_epi16(upper, low, _mm512_permutex2var_epi16(t[2], i, t[3]))
                    }
                };
            }
        }
        out
    }
}

/// Pairs from a table in memory: vector tables too large for registers, and the papers' trellis
/// code (`HASH`).
#[derive(Clone, Copy)]
pub(super) struct Gather<const F: usize, const N: usize, const HASH: bool, const WIDE: bool> {
    spread: Spread<F, N>,
    cuts: [__m512i; 4],
    mask: __m512i,
    shift: __m128i,
    /// What makes bytes signed; else nothing.
    flip: __m512i,
    table: *const i32,
}

impl<const F: usize, const N: usize, const HASH: bool, const WIDE: bool> Expand for Gather<F, N, HASH, WIDE> {
    const WIDE: bool = WIDE;
    /// Indices.
    type Mid = [[__m512i; 4]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, tile_bytes, .. }: &Args<'_>) -> Self {
        let rest = &table[spread_lines(N)..];
        let entries = rest.len().saturating_sub(5) * 16;
        let count = line(&rest[4]);
        // The gather's bound: every index is below the power of two that the mask or the shift
        // leaves.
        let bits = if HASH { 16 - rest[4].0[0] } else { rest[4].0[0] };
        assert!(bits <= 16 && entries >= 1 << bits, "{entries} pairs for indices of {bits} bits");
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: std::array::from_fn(|i| line(&rest[i])),
            mask: _mm512_set1_epi32((1 << bits) - 1),
            shift: _mm512_castsi512_si128(count),
            flip: _mm512_setzero_si512(),
            table: rest[5..].as_ptr().cast(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { flip: flip(self.flip), ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: promised by the caller.
        let spread = unsafe { self.spread.spread::<HASH>(code) };
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for (half, out) in out.iter_mut().enumerate() {
            for (p, out) in out.iter_mut().enumerate() {
                let stretch = spread[if N == 1 { 0 } else { p / 2 }][half];
                let mut i = _mm512_maskz_multishift_epi64_epi8(LOW_WORDS, self.cuts[p], stretch);
                if HASH {
                    let hash = _mm512_mullo_epi16(i, _mm512_sub_epi16(i, _mm512_set1_epi8(-1)));
                    i = _mm512_srl_epi32(hash, self.shift);
                }
                *out = _mm512_and_si512(i, self.mask);
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, indices: Self::Mid) -> [[__m512i; 4]; 2] {
        let mut out = indices;
        for out in &mut out {
            for pair in &mut *out {
                // SAFETY: `mask` kept the index below the number of entries, checked by `new`; the
                // table outlives `self`.
                *pair = unsafe { _mm512_i32gather_epi32::<4>(*pair, self.table) };
            }
            if !WIDE {
                // Cuts 0 and 1 (2 and 3) made pairs 0, 2 and 1, 3 of eight columns.
                for i in 0..2 {
                    let (low, high) = (out[2 * i], _mm512_slli_epi32::<16>(out[2 * i + 1]));
                    out[i] = _mm512_xor_si512(_mm512_or_si512(low, high), self.flip);
                }
            }
        }
        out
    }
}
