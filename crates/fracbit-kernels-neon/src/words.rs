//! The tape of a tile, eight lanes at a time.

use crate::neon::*;

/// Most words of a lane (8 bits a weight), and the one behind.
pub(crate) const MOST: usize = 17;

/// A tile in the *words* order (see `pack`), and behind it the first words of the next lanes.
pub(crate) type Words = [uint16x8_t; MOST];

/// Runs `$body` with the constant `$i` set to each of the numbers: loops whose body wants
/// immediates.
macro_rules! unroll {
    ([$($n:literal)*] $i:ident => $body:block) => {{ $( { const $i: usize = $n; $body } )* }};
}
pub(crate) use unroll;

/// Loads a tile of `8 Q` bytes.
///
/// # Safety
/// `8 Q` bytes are readable at `code`.
#[inline(always)]
pub(crate) unsafe fn load<const Q: usize>(code: *const u8) -> Words {
    // SAFETY: promised by the caller.
    let word = |j: usize| unsafe { vreinterpretq_u16_u8(vld1q_u8(code.add(16 * j))) };
    let first = word(0);
    let wrapped = vextq_u16::<1>(first, first);
    let mut words = [wrapped; MOST];
    words[0] = first;
    unroll!([1 2 3 4 5 6 7 8 9 10 11 12 13 14 15] J => { if J < Q / 2 { words[J] = word(J) } });
    if Q % 2 == 1 {
        // The last byte of each lane, behind it the next lane's words.
        // SAFETY: promised by the caller.
        let last = vmovl_u8(unsafe { vld1_u8(code.add(16 * (Q / 2))) });
        words[Q / 2] = vsliq_n_u16::<8>(last, wrapped);
        words[Q / 2 + 1] = vsliq_n_u16::<8>(vshrq_n_u16::<8>(wrapped), vextq_u16::<1>(words[1], words[1]));
    }
    words
}

/// The 16 bits from bit `at` of every lane. `at` is a constant after inlining.
#[inline(always)]
pub(crate) fn window(words: &Words, at: usize) -> uint16x8_t {
    let low = words[at / 16];
    macro_rules! cut {
        ($($s:literal $left:literal)*) => {
            match at % 16 {
                $($s => vsliq_n_u16::<$left>(vshrq_n_u16::<$s>(low), words[at / 16 + 1]),)*
                _ => low,
            }
        };
    }
    cut!(1 15 2 14 3 13 4 12 5 11 6 10 7 9 8 8 9 7 10 6 11 5 12 4 13 3 14 2 15 1)
}
