//! Expanders of the schemes whose groups of columns have a scale each: plain integers, and
//! group-wise codebooks.
//!
//! A group's codebook is numbered by the lowest bits of its scale. Those of sixteen rows become
//! four vectors of numbers, one for each vector of four rows, once per group; joining them with the
//! codes costs one or two instructions for two (at 2 bits: four) vectors of weights:
//!
//! * low nibbles: `sli` shifts the numbers in above four bits of the codes,
//! * high nibbles: one shift more.
//!
//! At 2 bits an index is a number and a nibble, that is, two codes: of two tables of 64 entries one
//! reads the lower code, the other the higher.

use crate::{
    expand::{Books, Expand, Sink, four, put, vector},
    neon::*,
    shims::{self, Blocks},
    words::{self, unroll, window},
};
use fracbit_kernels::Line;

/// Integers of 4 bits: no table. Signs are stored in the codes (two's complement), so that a shift
/// or a mask puts a weight, times 16, into its byte; the conversion of a sum to a floating-point
/// number takes the 16 back at no cost.
pub(crate) struct Int4;

impl Expand for Int4 {
    const SHIFT: i32 = 4;
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(_: &[Line]) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        unroll!([0 1] HALF => { unroll!([0 1 2 3] G => {
            // SAFETY: a tile has eight vectors.
            let codes = vreinterpretq_s8_u8(unsafe { vld1q_u8(code.add(16 * (4 * HALF + G))) });
            sink_nibbles::<{ 2 * HALF as i32 }, { 2 * HALF as i32 + 1 }, G, _>(codes, sink);
        }); });
    }
}

#[inline(always)]
fn sink_nibbles<const LOW: i32, const HIGH: i32, const G: usize, S: Sink>(codes: int8x16_t, sink: &mut S) {
    let low = vshlq_n_s8::<4>(codes);
    if S::EXACT {
        sink.put::<LOW, G>(vshrq_n_s8::<4>(low));
        sink.put::<HIGH, G>(vshrq_n_s8::<4>(codes));
    } else {
        sink.put::<LOW, G>(low);
        sink.put::<HIGH, G>(vreinterpretq_s8_u8(vandq_u8(vreinterpretq_u8_s8(codes), vdupq_n_u8(0xF0))));
    }
}

/// Integers of 8 bits: the codes are the weights.
pub(crate) struct Int8;

impl Expand for Int8 {
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(_: &[Line]) -> Self {
        Self
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        unroll!([0 1 2 3] Q => { unroll!([0 1 2 3] G => {
            // SAFETY: a tile has sixteen vectors.
            sink.put::<{ Q as i32 }, G>(unsafe { vld1q_s8(code.cast::<i8>().add(16 * (4 * Q + G))) });
        }); });
    }
}

/// Numbers of the codebooks of sixteen rows, in every byte of a row's lane.
#[inline(always)]
fn lanes(low: uint16x8_t, high: uint16x8_t, count: u8) -> Books {
    let numbers = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    let numbers = vandq_u8(numbers, vdupq_n_u8(count - 1));
    let low = vreinterpretq_u16_u8(vzip1q_u8(numbers, numbers));
    let high = vreinterpretq_u16_u8(vzip2q_u8(numbers, numbers));
    [vzip1q_u16(low, low), vzip2q_u16(low, low), vzip1q_u16(high, high), vzip2q_u16(high, high)]
        .map(vreinterpretq_u8_u16)
}

/// Group-wise codebooks of 4 bits, up to four of them (`C`).
pub(crate) struct Books4<const C: usize> {
    table: uint8x16x4_t,
}

impl<const C: usize> Expand for Books4<C> {
    const BOOKS: bool = C > 1;
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { table: four(table, 0) }
    }

    #[inline(always)]
    fn books(&self, low: uint16x8_t, high: uint16x8_t) -> Books {
        #[expect(clippy::cast_possible_truncation, reason = "at most 4")]
        lanes(low, high, C as u8)
    }

    #[inline(always)]
    unsafe fn tile(&self, mut code: *const u8, books: &Books, sink: &mut impl Sink) {
        let look = |index| {
            vreinterpretq_s8_u8(match C {
                2 => vqtbl2q_u8(uint8x16x2_t(self.table.0, self.table.1), index),
                _ => vqtbl4q_u8(self.table, index),
            })
        };
        unroll!([0 1] HALF => { unroll!([0 1 2 3] G => {
            // SAFETY: a tile has eight vectors.
            let codes = unsafe { vld1q_u8(code.add(16 * (4 * HALF + G))) };
            let (low, high) = nibbles(codes, books[G]);
            sink.put::<{ 2 * HALF as i32 }, G>(look(low));
            sink.put::<{ 2 * HALF as i32 + 1 }, G>(look(high));
            sink.fence_loads::<G>(&mut code);
        }); });
    }
}

/// Both nibbles of the codes, below the numbers of their codebooks.
#[inline(always)]
fn nibbles(codes: uint8x16_t, books: uint8x16_t) -> (uint8x16_t, uint8x16_t) {
    (vsliq_n_u8::<4>(codes, books), vsliq_n_u8::<4>(vshrq_n_u8::<4>(codes), books))
}

/// Group-wise codebooks of 2 bits, up to four of them.
pub(crate) struct Books2<const C: usize> {
    low: uint8x16x4_t,
    high: uint8x16x4_t,
}

impl<const C: usize> Expand for Books2<C> {
    const BOOKS: bool = true;
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        Self { low: four(table, 0), high: four(table, 64) }
    }

    #[inline(always)]
    fn books(&self, low: uint16x8_t, high: uint16x8_t) -> Books {
        #[expect(clippy::cast_possible_truncation, reason = "at most 4")]
        lanes(low, high, C as u8)
    }

    #[inline(always)]
    unsafe fn twos(&self, totals: &mut [float32x4_t; 4], blocks: Blocks) -> bool {
        #[expect(clippy::cast_possible_truncation, reason = "at most 4")]
        // SAFETY: promised by the caller.
        unsafe {
            shims::books_of_two_bits(self.low, self.high, C as u8 - 1, totals, blocks);
        }
        true
    }

    #[inline(always)]
    unsafe fn tile(&self, mut code: *const u8, books: &Books, sink: &mut impl Sink) {
        unroll!([0 1 2 3] G => {
            // SAFETY: a tile has four vectors.
            let codes = unsafe { vld1q_u8(code.add(16 * G)) };
            let (low, high) = nibbles(codes, books[G]);
            sink.put::<0, G>(vreinterpretq_s8_u8(vqtbl4q_u8(self.low, low)));
            sink.put::<1, G>(vreinterpretq_s8_u8(vqtbl4q_u8(self.high, low)));
            sink.put::<2, G>(vreinterpretq_s8_u8(vqtbl4q_u8(self.low, high)));
            sink.put::<3, G>(vreinterpretq_s8_u8(vqtbl4q_u8(self.high, high)));
            // Two vectors by one load.
            if G % 2 == 1 {
                sink.fence_loads::<G>(&mut code);
            }
        });
    }
}

/// Group-wise codebooks of `B` bits in words, up to 64 entries in all: 3 bits, and 2 bits with more
/// than four codebooks.
pub(crate) struct BooksAny<const B: usize> {
    table: uint8x16x4_t,
    mask: uint8x16_t,
}

impl<const B: usize> Expand for BooksAny<B> {
    const BOOKS: bool = true;
    const GROUPED: bool = true;

    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        // Behind the table: the number of codebooks less one.
        Self { table: four(table, 0), mask: vector(table, 64) }
    }

    /// The numbers of the even rows' codebooks, twice each, then those of the odd rows.
    #[inline(always)]
    fn books(&self, low: uint16x8_t, high: uint16x8_t) -> Books {
        let numbers = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
        let numbers = vandq_u8(numbers, self.mask);
        let numbers = if B == 2 { vshlq_n_u8::<2>(numbers) } else { vshlq_n_u8::<3>(numbers) };
        let (even, odd) = (vzip1q_u8(numbers, numbers), vzip2q_u8(numbers, numbers));
        [even, odd, even, odd]
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, books: &Books, sink: &mut impl Sink) {
        // SAFETY: a tile of `B` bits is `32 B` bytes.
        let mut words = unsafe { if B == 2 { words::load::<8>(code) } else { words::load::<12>(code) } };
        unroll!([0 1 2 3] Q => { unroll!([0 1] ODD => {
            let pair = |t: usize| {
                let (a, b) = (window(&words, 2 * t * B), window(&words, (2 * t + 1) * B));
                let codes = vreinterpretq_u8_u16(vsliq_n_u16::<8>(a, b));
                let index = vbslq_u8(vdupq_n_u8((1 << B) - 1), codes, books[ODD]);
                vreinterpretq_u16_u8(vqtbl4q_u8(self.table, index))
            };
            put::<{ Q as i32 }, { 2 * ODD }>(sink, pair(8 * ODD + 2 * Q), pair(8 * ODD + 2 * Q + 1));
            sink.fence::<ODD>(&mut words, 2 * B + 1);
        }); });
    }
}
