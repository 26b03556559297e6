//! Expanders: one repacked tile to vectors of integers.
//!
//! # From codes to products
//! 1. `words::window` cuts the same window out of all eight lanes: indices, or trellis states.
//! 2. A state is hashed in two or three instructions (`mul`, `sqrdmulh`, `mla`).
//! 3. `tbl` looks bytes up in tables of 16 to 128 bytes that stay in registers; `tbx` adds the next
//!    64 entries, and with a table of both signs spares the negation.
//! 4. Neighbouring columns are zipped to quads: lane `i` of a vector is a row, its bytes are four
//!    neighbouring columns, so that `sdot` sums sixteen rows side by side in four accumulators and
//!    no horizontal sum is ever needed.

use crate::neon::*;
use crate::shims::Blocks;
use crate::words::{self, Words, unroll, window};
use fracbit_format::trellis::{FINE_ADD, fast_factor};
use fracbit_kernels::Line;

/// Takes the vectors of a tile.
pub(crate) trait Sink {
    /// False where weights may come as multiples of `2^SHIFT` (see [`Expand::SHIFT`]).
    const EXACT: bool;

    /// Columns `4 Q..4 Q + 4` of the rows in lanes `4 G..4 G + 4` of [`LANES`](crate::pack::LANES).
    /// `Q` ascends for each `G`.
    fn put<const Q: i32, const G: usize>(&mut self, w: int8x16_t);

    /// The first `count` words are used again after all vectors so far.
    #[inline(always)]
    fn fence<const ODD: usize>(&mut self, _words: &mut Words, _count: usize) {}

    /// Nothing behind `code` is loaded before vectors `G` so far.
    #[inline(always)]
    fn fence_loads<const G: usize>(&mut self, _code: &mut *const u8) {}

    /// Column `C` of the even (`ODD` = 0) or odd rows; only expanders on the int16 grid call it.
    fn wide<const C: usize, const ODD: usize>(&mut self, w: int16x8_t);
}

/// Numbers of codebooks, placed as an expander wants them.
pub(crate) type Books = [uint8x16_t; 4];

/// One coded tile to vectors.
pub(crate) trait Expand {
    /// True for the int16 grid.
    const WIDE: bool = false;

    /// A sink that is not [`EXACT`](Sink::EXACT) gets weights times two to this power.
    const SHIFT: i32 = 0;
    /// True for schemes with a scale for every 32 columns, which get a loop of their own.
    const GROUPED: bool = false;
    /// True when weights depend on the scale of their group.
    const BOOKS: bool = false;

    /// Loads the constants that `tables` laid out.
    fn new(table: &[Line]) -> Self;

    /// What [`tile`](Self::tile) wants to know of the sixteen scales (as bits, in the order of
    /// lanes) of the groups at hand.
    #[inline(always)]
    fn books(&self, _low: uint16x8_t, _high: uint16x8_t) -> Books {
        [vdupq_n_u8(0); 4]
    }

    /// Adds one token's blocks of two tiles each, with a scale of their own, to the totals; false
    /// when there is no such loop.
    ///
    /// # Safety
    /// The processor has `dotprod`; the blocks are readable.
    #[inline(always)]
    unsafe fn twos(&self, _totals: &mut [float32x4_t; 4], _blocks: Blocks) -> bool {
        false
    }

    /// Expands the tile at `code`.
    ///
    /// # Safety
    /// A tile of the expander's size is readable at `code`, and the table was laid out for it.
    unsafe fn tile(&self, code: *const u8, books: &Books, sink: &mut impl Sink);
}

#[inline(always)]
pub(crate) fn vector(table: &[Line], at: usize) -> uint8x16_t {
    let bytes = &table[at / 64].0[at % 64..][..16];
    // SAFETY: the slice is 16 bytes.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

#[inline(always)]
pub(crate) fn four(table: &[Line], at: usize) -> uint8x16x4_t {
    uint8x16x4_t(vector(table, at), vector(table, at + 16), vector(table, at + 32), vector(table, at + 48))
}

/// `tbl` among 128 bytes: what is not in the first half is in the second, at the index with its bit
/// 6 turned.
#[inline(always)]
fn look_128(low: uint8x16x4_t, high: uint8x16x4_t, index: uint8x16_t, turn: u8) -> uint8x16_t {
    vqtbx4q_u8(vqtbl4q_u8(low, index), high, veorq_u8(index, vdupq_n_u8(turn)))
}

/// Negates the bytes whose `sign` byte has its top bit set.
#[inline(always)]
fn negate(value: uint8x16_t, sign: uint8x16_t) -> uint8x16_t {
    let mask = vreinterpretq_u8_s8(vshrq_n_s8::<7>(vreinterpretq_s8_u8(sign)));
    vsubq_u8(veorq_u8(value, mask), mask)
}

/// Expanders that make the eight lanes' pairs of neighbouring columns from words.
trait Pairs {
    /// Weights `2 t` and `2 t + 1` of every lane, pair by pair.
    fn pair(&self, words: &Words, t: usize) -> uint8x16_t;
}

/// Zips pairs to quads and hands them over.
#[inline(always)]
fn quads<const Q: usize>(e: &impl Pairs, mut words: Words, sink: &mut impl Sink) {
    unroll!([0 1 2 3] QUAD => { unroll!([0 1] ODD => {
        let a = vreinterpretq_u16_u8(e.pair(&words, 8 * ODD + 2 * QUAD));
        let b = vreinterpretq_u16_u8(e.pair(&words, 8 * ODD + 2 * QUAD + 1));
        put::<{ QUAD as i32 }, { 2 * ODD }>(sink, a, b);
        sink.fence::<ODD>(&mut words, Q.div_ceil(2) + 1);
    }); });
}

/// Pairs of columns `4 Q`, `4 Q + 1` and of the next two, as quads.
#[inline(always)]
pub(crate) fn put<const Q: i32, const G: usize>(sink: &mut impl Sink, a: uint16x8_t, b: uint16x8_t) {
    put_quads::<Q, G>(sink, vzip1q_u16(a, b), vzip2q_u16(a, b));
}

/// Quads of the first and of the last four lanes.
#[inline(always)]
fn put_quads<const Q: i32, const G: usize>(sink: &mut impl Sink, low: uint16x8_t, high: uint16x8_t) {
    let (low, high) = (vreinterpretq_s8_u16(low), vreinterpretq_s8_u16(high));
    if G == 0 {
        sink.put::<Q, 0>(low);
        sink.put::<Q, 1>(high);
    } else {
        sink.put::<Q, 2>(low);
        sink.put::<Q, 3>(high);
    }
}

/// Trellis, one weight a step, `2^B` magnitudes (6 to 8), at `Q` quarters of a bit a weight.
pub(crate) struct Fine<const Q: usize, const B: usize> {
    table: [uint8x16x4_t; 4],
}

impl<const Q: usize, const B: usize> Pairs for Fine<Q, B> {
    #[inline(always)]
    fn pair(&self, words: &Words, t: usize) -> uint8x16_t {
        let add = vdupq_n_u16(FINE_ADD);
        let hash = |step: usize| {
            let state = window(words, step * Q / 4);
            vmulq_u16(state, vaddq_u16(state, add))
        };
        let (a, b) = (hash(2 * t), hash(2 * t + 1));
        // The high bytes of both hashes.
        let top = vtrn2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
        let [t0, t1, t2, t3] = self.table;
        match B {
            // Seven bits, of which the sign is the highest: a table of both signs.
            6 => look_128(t0, t1, vshrq_n_u8::<1>(top), 64),
            7 => negate(look_128(t0, t1, vandq_u8(top, vdupq_n_u8(127)), 64), top),
            _ => {
                let cut = |h| vreinterpretq_u8_u16(vshrq_n_u16::<7>(h));
                let index = vtrn1q_u8(cut(a), cut(b));
                let at = |turn| veorq_u8(index, vdupq_n_u8(turn));
                let value = look_128(t0, t1, index, 64);
                negate(vqtbx4q_u8(vqtbx4q_u8(value, t2, at(128)), t3, at(192)), top)
            }
        }
    }
}

impl<const Q: usize, const B: usize> Expand for Fine<Q, B> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        let some = if B == 8 { 4 } else { 2 };
        Self { table: std::array::from_fn(|i| four(table, 64 * (i % some))) }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        // SAFETY: a tile of `Q` quarters of a bit is `8 Q` bytes.
        quads::<Q>(self, unsafe { words::load::<Q>(code) }, sink);
    }
}

/// The `fast` trellis of `V` weights a step and `2^B` magnitudes (6 or 7), at `R4` quarters of a
/// bit a weight.
pub(crate) struct Fast<const R4: usize, const V: usize, const B: usize> {
    table: [uint8x16x4_t; 2],
}

impl<const R4: usize, const V: usize, const B: usize> Fast<R4, V, B> {
    const FACTOR: u32 = fast_factor(R4) >> 8;

    /// The hash of two weights.
    #[inline(always)]
    fn pair(state: uint16x8_t) -> uint16x8_t {
        let x = vreinterpretq_s16_u16(state);
        let low = vmulq_u16(state, vdupq_n_u16(Self::FACTOR as u16));
        vreinterpretq_u16_s16(vsraq_n_s16::<8>(vreinterpretq_s16_u16(low), x))
    }

    /// The hash of four weights, of states that stand in both halves of a word.
    #[inline(always)]
    fn quad(twice: uint16x8_t) -> uint16x8_t {
        let x = vreinterpretq_u32_u16(twice);
        vreinterpretq_u16_u32(vsraq_n_u32::<8>(vmulq_u32(x, vdupq_n_u32(Self::FACTOR)), x))
    }

    /// Each byte of a hash is a weight: low bits the magnitude, bit 7 the sign.
    #[inline(always)]
    fn look(&self, hash: uint16x8_t) -> uint16x8_t {
        let (hash, [t0, t1]) = (vreinterpretq_u8_u16(hash), self.table);
        vreinterpretq_u16_u8(if B == 6 {
            // Bit 6 means nothing; without it, only indices of positive weights reach the first
            // table.
            look_128(t0, t1, vandq_u8(hash, vdupq_n_u8(0xBF)), 128)
        } else {
            negate(look_128(t0, t1, vandq_u8(hash, vdupq_n_u8(127)), 64), hash)
        })
    }
}

impl<const R4: usize, const V: usize, const B: usize> Expand for Fast<R4, V, B> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { table: [four(table, 0), four(table, 64)] }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        // SAFETY: a tile of `R4` quarters of a bit is `8 R4` bytes.
        let mut words = unsafe { words::load::<R4>(code) };
        unroll!([0 1 2 3] Q => { unroll!([0 1] ODD => {
            let first = 16 * ODD + 4 * Q;
            let state = window(&words, first * R4 / 4);
            if V == 4 {
                let (low, high) = (vzip1q_u16(state, state), vzip2q_u16(state, state));
                put_quads::<{ Q as i32 }, { 2 * ODD }>(sink, self.look(Self::quad(low)), self.look(Self::quad(high)));
            } else {
                let next = window(&words, (first + 2) * R4 / 4);
                put::<{ Q as i32 }, { 2 * ODD }>(sink, self.look(Self::pair(state)), self.look(Self::pair(next)));
            }
            sink.fence::<ODD>(&mut words, R4.div_ceil(2) + 1);
        }); });
    }
}

/// Scalar tables of `2^B` bytes whose codes lie in words (3, 5, 6 and 7 bits).
pub(crate) struct Scalar<const B: usize> {
    table: [uint8x16x4_t; 2],
}

impl<const B: usize> Pairs for Scalar<B> {
    #[inline(always)]
    fn pair(&self, words: &Words, t: usize) -> uint8x16_t {
        let (a, b) = (window(words, 2 * t * B), window(words, (2 * t + 1) * B));
        let index = vandq_u8(vreinterpretq_u8_u16(vsliq_n_u16::<8>(a, b)), vdupq_n_u8((1 << B) - 1));
        let [t0, t1] = self.table;
        match B {
            3 => vqtbl1q_u8(t0.0, index),
            5 => vqtbl2q_u8(uint8x16x2_t(t0.0, t0.1), index),
            6 => vqtbl4q_u8(t0, index),
            _ => look_128(t0, t1, index, 64),
        }
    }
}

impl<const B: usize> Expand for Scalar<B> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { table: [four(table, 0), four(table, 64)] }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        macro_rules! words {
            ($($bits:literal $quarters:literal)*) => { match B {
                // SAFETY: a tile of `B` bits is `32 B` bytes.
                $($bits => quads::<$quarters>(self, unsafe { words::load::<$quarters>(code) }, sink),)*
                _ => unreachable!("bits of a scalar scheme that go by words"),
            } };
        }
        words!(3 12 5 20 6 24 7 28);
    }
}

/// Scalar tables of `2^B` bytes whose codes lie in fields (2, 4 and 8 bits).
pub(crate) struct Fields<const B: usize> {
    table: [uint8x16x4_t; 4],
}

impl<const B: usize> Expand for Fields<B> {
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        let some = if B == 8 { 4 } else { 1 };
        Self { table: std::array::from_fn(|i| four(table, 64 * (i % some))) }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        // SAFETY: `m` is below `2 B`, the vectors of a tile.
        let load = |m: usize| unsafe { vld1q_u8(code.add(16 * m)) };
        let [t0, t1, t2, t3] = self.table;
        let nibble = vdupq_n_u8(15);
        match B {
            2 => unroll!([0 1 2 3] G => {
                // A nibble holds two codes: one table reads the lower, the other the higher.
                let codes = load(G);
                let (low, high) = (vandq_u8(codes, nibble), vshrq_n_u8::<4>(codes));
                sink.put::<0, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.0, low)));
                sink.put::<1, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.1, low)));
                sink.put::<2, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.0, high)));
                sink.put::<3, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.1, high)));
            }),
            4 => unroll!([0 1] HALF => { unroll!([0 1 2 3] G => {
                let codes = load(4 * HALF + G);
                sink.put::<{ 2 * HALF as i32 }, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.0, vandq_u8(codes, nibble))));
                sink.put::<{ 2 * HALF as i32 + 1 }, G>(vreinterpretq_s8_u8(vqtbl1q_u8(t0.0, vshrq_n_u8::<4>(codes))));
            }); }),
            _ => unroll!([0 1 2 3] Q => { unroll!([0 1 2 3] G => {
                let index = load(4 * Q + G);
                let at = |turn| veorq_u8(index, vdupq_n_u8(turn));
                let value = look_128(t0, t1, index, 64);
                let value = vqtbx4q_u8(vqtbx4q_u8(value, t2, at(128)), t3, at(192));
                sink.put::<{ Q as i32 }, G>(vreinterpretq_s8_u8(value));
            }); }),
        }
    }
}

/// Vector tables of `2^H` pairs of bytes (`H` from 3 to 6): both bytes of a pair by one lookup.
pub(crate) struct Vector<const H: usize> {
    table: [uint8x16x4_t; 2],
}

impl<const H: usize> Pairs for Vector<H> {
    #[inline(always)]
    fn pair(&self, words: &Words, t: usize) -> uint8x16_t {
        let index = vandq_u16(window(words, t * H), vdupq_n_u16((1 << H) - 1));
        // Bytes 2 i and 2 i + 1 of the table.
        let both = vreinterpretq_u8_u16(vmlaq_u16(vdupq_n_u16(0x0100), index, vdupq_n_u16(0x0202)));
        let [t0, t1] = self.table;
        match H {
            3 => vqtbl1q_u8(t0.0, both),
            4 => vqtbl2q_u8(uint8x16x2_t(t0.0, t0.1), both),
            5 => vqtbl4q_u8(t0, both),
            _ => look_128(t0, t1, both, 64),
        }
    }
}

impl<const H: usize> Expand for Vector<H> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { table: [four(table, 0), four(table, 64)] }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        match H {
            // SAFETY: a tile of `H` half bits is `16 H` bytes.
            3 => quads::<6>(self, unsafe { words::load::<6>(code) }, sink),
            // SAFETY: the same.
            4 => quads::<8>(self, unsafe { words::load::<8>(code) }, sink),
            // SAFETY: the same.
            5 => quads::<10>(self, unsafe { words::load::<10>(code) }, sink),
            // SAFETY: the same.
            _ => quads::<12>(self, unsafe { words::load::<12>(code) }, sink),
        }
    }
}

/// Vector tables of `2^H` pairs (`H` is 7 or 8) that are a
/// [quarter](fracbit_format::Codebook::quarter) and its turns: first numbers of the quarter in one
/// table, second ones in the other, and both bytes of a pair by one lookup in both.
pub(crate) struct Turned<const H: usize> {
    table: [uint8x16x4_t; 2],
}

impl<const H: usize> Pairs for Turned<H> {
    #[inline(always)]
    fn pair(&self, words: &Words, t: usize) -> uint8x16_t {
        // The code in the upper bits of both bytes; of seven bits a table has every number twice.
        let twice = if H == 7 {
            let code = vshlq_n_u16::<1>(window(words, t * H));
            vreinterpretq_u8_u16(vsliq_n_u16::<8>(code, code))
        } else {
            let two = vreinterpretq_u8_u16(words[t / 2]);
            if t.is_multiple_of(2) { vtrn1q_u8(two, two) } else { vtrn2q_u8(two, two) }
        };
        // The next to highest bit: the two numbers have changed places. Elsewhere the second byte
        // looks in the second table.
        let second = vreinterpretq_u8_u16(vdupq_n_u16(0x4000));
        let index = veorq_u8(vandq_u8(twice, vdupq_n_u8(127)), second);
        let [first, second] = self.table;
        // The sign of the second number is the exclusive or of the two bits.
        let moved = vreinterpretq_u8_u16(vshlq_n_u16::<9>(vreinterpretq_u16_u8(twice)));
        let sign = veorq_u8(twice, moved);
        negate(look_128(first, second, index, 64), sign)
    }
}

impl<const H: usize> Expand for Turned<H> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { table: [four(table, 0), four(table, 64)] }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        match H {
            // SAFETY: a tile of `H` half bits is `16 H` bytes.
            7 => quads::<14>(self, unsafe { words::load::<14>(code) }, sink),
            // SAFETY: the same.
            _ => quads::<16>(self, unsafe { words::load::<16>(code) }, sink),
        }
    }
}

/// What [`Gather`] looks up, and how it finds the index.
pub(crate) mod kind {
    /// Pairs of bytes.
    pub(crate) const PAIRS: usize = 0;
    /// Pairs of bytes, indexed by the papers' hash of a state.
    pub(crate) const HASHED: usize = 1;
    /// Pairs of 16-bit integers.
    pub(crate) const WIDE_PAIRS: usize = 2;
    /// Pairs of 16-bit integers, indexed by the papers' hash of a state.
    pub(crate) const WIDE_HASHED: usize = 3;
    /// Single 16-bit integers, two indices to a pair.
    pub(crate) const WIDE_ONE: usize = 4;
}

/// Tables in memory: large vector tables, the papers' trellis code, scalar tables of 16-bit
/// integers.
///
/// Nothing here is fast, so that the rate is no constant of the code but a number of the table.
/// Line 0: the bits of an index, and the half bits of a weight. Behind it, 32-bit entries.
pub(crate) struct Gather<const K: usize> {
    entries: *const u32,
    half_bits: usize,
    mask: uint16x8_t,
    shift: int16x8_t,
}

impl<const K: usize> Gather<K> {
    /// Entries of the codes from bit `at` of every lane.
    #[inline(always)]
    fn look(&self, words: &Words, at: usize) -> [u32; 8] {
        let left = i16::try_from(at % 16).expect("below 16");
        let low = vshlq_u16(words[at / 16], vdupq_n_s16(-left));
        let code = vorrq_u16(low, vshlq_u16(words[at / 16 + 1], vdupq_n_s16(16 - left)));
        let index = if K == kind::HASHED || K == kind::WIDE_HASHED {
            vshlq_u16(vmulq_u16(code, vaddq_u16(code, vdupq_n_u16(1))), self.shift)
        } else {
            code
        };
        let mut index_of = [0u16; 8];
        // SAFETY: eight places.
        unsafe { vst1q_u16(index_of.as_mut_ptr(), vandq_u16(index, self.mask)) };
        // SAFETY: `new` checked that the table has an entry for every index that the mask leaves.
        index_of.map(|i| unsafe { *self.entries.add(usize::from(i)) })
    }
}

impl<const K: usize> Expand for Gather<K> {
    const WIDE: bool = K >= kind::WIDE_PAIRS;

    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        let bits = table[0].0[0];
        assert!(bits <= 16 && (table.len() - 1) * 16 >= 1 << bits, "an entry for every index of {bits} bits");
        let mask = u16::MAX >> (16 - u16::from(bits));
        let half_bits = usize::from(table[0].0[1]);
        assert!(half_bits < words::MOST, "words of a lane");
        Self {
            entries: table[1..].as_ptr().cast(),
            half_bits,
            mask: vdupq_n_u16(mask),
            shift: vdupq_n_s16(i16::from(bits) - 16),
        }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        let mut pairs = [[0u32; 8]; 16];
        // SAFETY: a tile of `H` half bits is `16 H` bytes.
        unsafe { self.pairs(code, &mut pairs) };
        unroll!([0 1 2 3] Q => { unroll!([0 1] ODD => {
            let [a, b] = [pairs[8 * ODD + 2 * Q], pairs[8 * ODD + 2 * Q + 1]];
            if K >= kind::WIDE_PAIRS {
                // SAFETY: eight pairs of 16-bit integers each.
                let (a, b) = unsafe { (vld2q_s16(a.as_ptr().cast()), vld2q_s16(b.as_ptr().cast())) };
                sink.wide::<{ 4 * Q }, ODD>(a.0);
                sink.wide::<{ 4 * Q + 1 }, ODD>(a.1);
                sink.wide::<{ 4 * Q + 2 }, ODD>(b.0);
                sink.wide::<{ 4 * Q + 3 }, ODD>(b.1);
            } else {
                // SAFETY: eight entries each, pairs of bytes in the low halves.
                let (a, b) = unsafe { (vld2q_s16(a.as_ptr().cast()), vld2q_s16(b.as_ptr().cast())) };
                put::<{ Q as i32 }, { 2 * ODD }>(sink, vreinterpretq_u16_s16(a.0), vreinterpretq_u16_s16(b.0));
            }
        }); });
    }
}

impl<const K: usize> Gather<K> {
    /// Pair `t` of every lane (even rows, then odd ones) to `out[t]`.
    ///
    /// # Safety
    /// As [`Expand::tile`].
    #[inline(never)]
    unsafe fn pairs(&self, code: *const u8, out: &mut [[u32; 8]; 16]) {
        // SAFETY: baseline; a tile of `H` half bits is `16 H` bytes.
        let word = |j: usize| unsafe { vld1q_u16(code.add(16 * j).cast()) };
        let mut words = [vextq_u16::<1>(word(0), word(0)); words::MOST];
        (0..self.half_bits).for_each(|j| words[j] = word(j));
        for (t, out) in out.iter_mut().enumerate() {
            let at = t * self.half_bits;
            *out = self.look(&words, at);
            if K == kind::WIDE_ONE {
                let second = self.look(&words, at + self.half_bits / 2);
                out.iter_mut().zip(second).for_each(|(a, b)| *a |= b << 16);
            }
        }
    }
}
