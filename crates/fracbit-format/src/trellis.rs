//! Trellis states and how they become weights.
//!
//! # The tape
//! A tile of 256 weights at `R` bits per weight is a circular tape of `256 R` bits. A step yields
//! `V` weights (neighbouring columns of one tile row); step `t` starts at tape bit `p(t) = floor(t
//! V R)` and its state is the 16-bit window `[p(t), p(t) + 16)`, read least significant bit first
//! and wrapping at the end (tail-biting: no bits are spent on a start state). Where `V R` is no
//! whole number the window moves by `floor(V R)` or `ceil(V R)` bits, spread evenly: 2, 2, 2, 3 at
//! 2.25 bits with `V = 1`.
//!
//! From one step to the next the window moves up by `k = p(t+1) - p(t)` bits: `s' = s >> k | new <<
//! (16 - k)`. This is the time reversal of the papers' trellis (QTIP, section 3; Q-Palette's `s' =
//! (s << k | new) mod 2^16`), which for independent weights has the same distortion; little-endian
//! windows make a state one unaligned load.
//!
//! # The hashes
//! A hash spreads the state `x` over 16 or 32 bits. Arithmetic is modulo 2^16 but for the hash of
//! `fast`.
//!
//! | code | V | hash | weights of a state |
//! | --- | --- | --- | --- |
//! | `fine` | 1 | [`hash_fine`]: `h = x (x + c)` | entry `h >> (15 - q) mod 2^q` of `2^q`, negated when bit 15 of `h` is set |
//! | `fast`, up to 2 bits | 4 | [`hash_quad`]: bits 8 to 39 of `(x + 2^16 x) c` | each byte `b`, lowest first: entry `b mod 2^q` of `2^q`, negated by bit 7 |
//! | `fast`, above 2 bits | 2 | [`hash_pair`]: bits 8 to 23 of `x c`, `x` signed | as above with two bytes |
//! | `hyb` | 2 | [`hash16`]: `h = x (x + 1)` | pair `h >> (15 - q) mod 2^q`, the first negated when bit 15 of `h` is set (QTIP's hybrid code, Q-Palette's `quantlut_sym`) |
//!
//! The window takes its new bits at the top, and the `2^k` successors of a state differ only there.
//! In `x (x + c)` with odd `c` they run once through all values of the top `k` bits of `h`: the
//! sign and the leading index bits, so that a sorted table offers every successor set one value
//! from each of `2^k` cells. The hashes of `fast` are linear up to carries, and their bytes of
//! successive successors form a rank-1 lattice over the tables: the same evenness in 2 or 4
//! dimensions.

use fracbit_base::{Code, Scheme};

/// Bits of a trellis state (the papers' L).
pub const STATE_BITS: u32 = 16;
/// Number of states.
pub const STATES: usize = 1 << STATE_BITS;

/// Step structure of a trellis scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Weights per step (the papers' V): 1, 2 or 4.
    pub weights: usize,
    /// Rate in quarter bits per weight.
    quarters: usize,
}

impl Steps {
    /// The steps of a `tcq` scheme; `None` for every other family.
    #[must_use]
    pub fn of(scheme: Scheme) -> Option<Self> {
        if !matches!(scheme.family(), fracbit_base::Family::Tcq(_)) {
            return None;
        }
        let weights = match scheme.code()? {
            Code::Fine => 1,
            Code::Fast if scheme.quarters() <= 8 => 4,
            Code::Fast | Code::Hyb => 2,
        };
        Some(Self { weights, quarters: usize::from(scheme.quarters()) })
    }

    /// Steps in a tile.
    #[must_use]
    pub const fn count(self) -> usize {
        crate::TILE / self.weights
    }

    /// Bits of a tile's tape.
    #[must_use]
    pub const fn tape_bits(self) -> usize {
        crate::TILE * self.quarters / 4
    }

    /// Tape position of step `t` in bits (`t` may be `count()`: the end of the tape).
    #[must_use]
    pub const fn position(self, t: usize) -> usize {
        t * self.weights * self.quarters / 4
    }

    /// Bits by which the window moves from step `t` to `t + 1`.
    #[must_use]
    pub const fn shift(self, t: usize) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 10 bits a step")]
        {
            (self.position(t + 1) - self.position(t)) as u32
        }
    }
}

/// `x (x + 1) mod 2^16`: the hash of the papers' code.
#[inline]
#[must_use]
pub const fn hash16(x: u16) -> u16 {
    x.wrapping_mul(x.wrapping_add(1))
}

/// The addend of [`hash_fine`].
pub const FINE_ADD: u16 = 0x79B5;

/// `x (x + 0x79B5) mod 2^16`: the hash of the `fine` code.
#[inline]
#[must_use]
pub const fn hash_fine(x: u16) -> u16 {
    x.wrapping_mul(x.wrapping_add(FINE_ADD))
}

/// Rates of the `fast` code in quarters of a bit and their factors, found by search
/// (`docs/lab/2026-11-codes.md`).
///
/// Their lowest byte is one: the bits of a product from bit 8 on are then `x (c >> 8) + (x >> 8)`,
/// which lanes as wide as the hash can hold. The lowest byte of the product is no part of the hash
/// because it knows only the lowest byte of `x`: a code that uses it errs 8 % more at 2 bits.
const FAST_FACTORS: [(u8, u32); 11] = [
    (4, 0xE84B_7101),
    (5, 0x89A3_E601),
    (6, 0x62F0_8201),
    (7, 0x5D61_3201),
    (8, 0x28B8_6601),
    (10, 0x57_CE01),
    (12, 0x17_6601),
    (14, 0xB6_8F01),
    (16, 0xD6_C401),
    (18, 0xE9_9401),
    (20, 0xB0_5201),
];

/// The factor of the `fast` code at `quarters / 4` bits.
///
/// # Panics
/// When there is no such rate.
#[must_use]
pub const fn fast_factor(quarters: usize) -> u32 {
    let mut i = 0;
    while FAST_FACTORS[i].0 as usize != quarters {
        i += 1;
    }
    FAST_FACTORS[i].1
}

/// The hash of four weights of the `fast` code: bits 8 to 39 of `(x + 2^16 x) factor`.
///
/// A GPU has them from one wide multiplication, 32-bit lanes from a multiplication, a shift and an
/// addition.
#[inline]
#[must_use]
pub const fn hash_quad(x: u16, factor: u32) -> u32 {
    let twice = x as u32 * 0x1_0001;
    twice.wrapping_mul(factor >> 8).wrapping_add(twice >> 8)
}

/// The hash of two weights of the `fast` code: bits 8 to 23 of `x factor`, `x` signed.
///
/// A GPU has them from one multiplication, 16-bit lanes from a multiplication, a shift and an
/// addition.
#[inline]
#[must_use]
pub const fn hash_pair(x: u16, factor: u32) -> u16 {
    x.wrapping_mul((factor >> 8) as u16).wrapping_add((x.cast_signed() >> 8).cast_unsigned())
}

/// The hash of the `fast` code at `quarters / 4` bits: the first `weights` bytes (two or four)
/// count.
#[inline]
#[must_use]
pub const fn hash_fast(x: u16, weights: usize, quarters: usize) -> [u8; 4] {
    let factor = fast_factor(quarters);
    if weights == 4 { hash_quad(x, factor) } else { hash_pair(x, factor) as u32 }.to_le_bytes()
}

/// The weights of state `x` on the codebook's integer grid; the first `V` elements of the result
/// count.
///
/// `entries` is the codebook's table: `2^q` magnitudes (`fine`, `fast`) or `2^q` pairs (`hyb`).
///
/// # Panics
/// When `scheme` is no `tcq` scheme.
#[must_use]
pub fn state_values(scheme: Scheme, entries: &[i16], x: u16) -> [i16; 4] {
    let (Some(steps), Some(code)) = (Steps::of(scheme), scheme.code()) else {
        panic!("{scheme} has no states")
    };
    let negate = |value: i16, sign: bool| if sign { -value } else { value };
    let mut out = [0; 4];
    match code {
        Code::Fine => {
            let h = usize::from(hash_fine(x));
            let index = (h & 0x7fff) >> (15 - entries.len().trailing_zeros());
            out[0] = negate(entries[index], h >> 15 != 0);
        }
        Code::Fast => {
            for (value, byte) in
                out.iter_mut().zip(hash_fast(x, steps.weights, steps.quarters)).take(steps.weights)
            {
                *value = negate(entries[usize::from(byte) & (entries.len() - 1)], byte >> 7 != 0);
            }
        }
        Code::Hyb => {
            let h = usize::from(hash16(x));
            let pair = 2 * ((h & 0x7fff) >> (15 - (entries.len() / 2).trailing_zeros()));
            out[0] = negate(entries[pair], h >> 15 != 0);
            out[1] = entries[pair + 1];
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_move_by_the_rate_and_end_with_the_tape() {
        for scheme in Scheme::all().filter(|s| matches!(s.family(), fracbit_base::Family::Tcq(_))) {
            let steps = Steps::of(scheme).unwrap();
            assert_eq!(steps.position(steps.count()), steps.tape_bits(), "{scheme}");
            let total: u32 = (0..steps.count()).map(|t| steps.shift(t)).sum();
            assert_eq!(total as usize, steps.tape_bits(), "{scheme}");
            assert!((0..steps.count()).all(|t| (1..=10).contains(&steps.shift(t))), "{scheme}");
        }
    }

    #[test]
    fn successors_of_a_state_meet_every_cell_of_a_fine_table_once() {
        // k new bits at the top of the state: sign and k - 1 leading index bits take all values.
        for k in 1..=5 {
            for low in 0..1u16 << (16 - k) {
                let cells = (0..1u16 << k)
                    .map(|new| 1u64 << (hash_fine(new << (16 - k) | low) >> (16 - k)))
                    .fold(0, |seen, cell| seen | cell);
                assert_eq!(cells, u64::MAX >> (64 - (1 << k)), "k {k}, state {low}");
            }
        }
    }

    #[test]
    fn bytes_of_the_fast_hashes_are_even() {
        // Over all states every byte value of every weight occurs 256 times, give or take what
        // carries move.
        for (quarters, _) in FAST_FACTORS {
            let quarters = usize::from(quarters);
            let weights = if quarters <= 8 { 4 } else { 2 };
            let mut counts = [[0u32; 256]; 4];
            for x in 0..=u16::MAX {
                for (count, byte) in counts.iter_mut().zip(hash_fast(x, weights, quarters)) {
                    count[usize::from(byte)] += 1;
                }
            }
            for count in counts[..weights].iter().flatten() {
                assert!((200..=312).contains(count), "{quarters} quarters: {count}");
            }
        }
    }

    #[test]
    fn the_fast_hashes_are_bits_of_one_product() {
        for (_, factor) in FAST_FACTORS {
            for x in 0..=u16::MAX {
                let product = u64::from(x) * 0x1_0001 * u64::from(factor);
                assert_eq!(u64::from(hash_quad(x, factor)), product >> 8 & 0xFFFF_FFFF, "{x} {factor:x}");
                let product = i64::from(x.cast_signed()) * i64::from(factor);
                assert_eq!(i64::from(hash_pair(x, factor)), product >> 8 & 0xFFFF, "{x} {factor:x}");
            }
        }
    }
}
