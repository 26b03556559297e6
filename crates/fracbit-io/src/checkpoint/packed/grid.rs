//! Integers of a few bits with a scale and a zero for each group of columns: the grid that GPTQ,
//! AWQ, compressed-tensors and LLM.int8 share. They differ in where a code lies.
//!
//! A weight is `(code - zero) * scale`. The tools round this product to half precision or bf16 as
//! it is made; here it stays an `f32`, which holds it exactly for scales of 16 bits.

use std::ops::Range;

use super::{Bytes, Numbers, word};

/// How codes share 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// One behind the other, the first in the lowest bits; where 32 is no multiple of the bits, a
    /// code may lie in two words.
    Stream,
    /// Eight of four bits: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up (AWQ).
    Interleaved,
}

/// Places of codes in words. Codes along one axis are packed, the other axis steps over words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Words {
    pub(super) order: Order,
    /// Bits of a code, 1 to 8.
    pub(super) bits: usize,
    /// Words from one to the next along the packed axis.
    pub(super) step: usize,
    /// Words from one place of the other axis to the next.
    pub(super) other: usize,
    /// Codes are stored less one ([`super::gptq`]).
    pub(super) less_one: bool,
}

impl Words {
    /// The code at `at` of the packed axis and `other` of the other.
    fn code(&self, bytes: Bytes<'_>, at: usize, other: usize) -> i32 {
        let (bits, base) = (self.bits, other * self.other);
        let mask = (1u32 << bits) - 1;
        // Whether words hold whole codes; a remainder of 32 would be a division for each weight.
        let whole = bits.is_power_of_two();
        let ones = if self.less_one && whole { u32::MAX / mask } else { 0 };
        let found = |at: usize| word(bytes, base + at * self.step).wrapping_add(ones);
        let code = match self.order {
            Order::Stream => {
                let (first, shift) = (at * bits / 32, at * bits % 32);
                let low = found(first) >> shift;
                if shift + bits > 32 { low | found(first + 1) << (32 - shift) } else { low }
            }
            Order::Interleaved => found(at / 8) >> (4 * (at % 8 / 2 + at % 2 * 4)),
        };
        (code.wrapping_add(u32::from(self.less_one && !whole)) & mask).cast_signed()
    }
}

/// Words for so many codes one behind the other.
pub(super) fn words(bits: usize, codes: usize) -> Option<usize> {
    Some(codes.checked_mul(bits)?.div_ceil(32))
}

/// Where codes lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Codes {
    /// In words, packed along the columns of the matrix.
    AlongColumns(Words),
    /// In words, packed along its rows.
    AlongRows(Words),
    /// A signed byte each, row by row of so many.
    Signed(usize),
}

/// What is subtracted from codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Zeros {
    /// The same everywhere.
    All(i32),
    /// In words, packed along the rows of the matrix.
    Packed(Words),
    /// A signed byte for each scale, to which so much is added.
    Signed(i32),
}

/// The group of a column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Groups {
    /// So many neighbours share one.
    Of(usize),
    /// A 32-bit number for each column says which.
    Listed,
}

/// A matrix on the grid. Its pieces: codes, scales, zeros, groups of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) codes: Codes,
    pub(super) zeros: Zeros,
    pub(super) groups: Groups,
    /// From one row's scale to the next one's, and from one group's to the next one's.
    pub(super) scales: [usize; 2],
    /// Of every weight, behind its scale.
    pub(super) factor: f32,
}

impl Grid {
    /// Some neighbours of a row.
    pub(super) fn row_into(
        &self,
        [codes, scales, zeros, listed]: [Numbers<'_>; 4],
        row: usize,
        cols: Range<usize>,
        out: &mut [f32],
    ) {
        let (mut col, mut out) = (cols.start, out);
        while col < cols.end {
            // Columns up to the next group.
            let (group, end) = match self.groups {
                Groups::Of(each) => (col / each, (col / each + 1) * each),
                Groups::Listed => (word(listed.bytes, col) as usize, col + 1),
            };
            let at = row * self.scales[0] + group * self.scales[1];
            let (scale, factor) = (scales.at(at), self.factor);
            let zero = match self.zeros {
                Zeros::All(zero) => zero,
                Zeros::Packed(words) => words.code(zeros.bytes, row, group),
                Zeros::Signed(added) => signed(zeros.bytes, at) + added,
            };
            let (some, rest) = out.split_at_mut(end.min(cols.end) - col);
            let numbers = some.iter_mut().zip(col..);
            let number = |code: i32| (code - zero) as f32 * scale * factor;
            match self.codes {
                Codes::AlongColumns(words) => {
                    numbers.for_each(|(out, col)| *out = number(words.code(codes.bytes, col, row)));
                }
                Codes::AlongRows(words) => {
                    numbers.for_each(|(out, col)| *out = number(words.code(codes.bytes, row, col)));
                }
                Codes::Signed(width) => {
                    numbers.for_each(|(out, col)| *out = number(signed(codes.bytes, row * width + col)));
                }
            }
            (col, out) = (end, rest);
        }
    }
}

fn signed(bytes: Bytes<'_>, at: usize) -> i32 {
    i32::from(bytes[at].cast_signed())
}
