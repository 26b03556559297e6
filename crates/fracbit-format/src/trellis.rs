//! Trellis states and how they become weights.
//!
//! # The tape
//! A tile of 256 weights at `R` bits per weight is a circular tape of `256 R` bits. A step yields `V` weights
//! (neighbouring columns of one tile row); step `t` starts at tape bit `p(t) = floor(t V R)` and its state is
//! the 16-bit window `[p(t), p(t) + 16)`, read least significant bit first and wrapping at the end
//! (tail-biting: no bits are spent on a start state). Half-integer `R` with `V = 1` thus shifts by `floor(R)`
//! and `ceil(R)` bits in turn.
//!
//! From one step to the next the window moves up by `k = p(t+1) - p(t)` bits: `s' = s >> k | new << (16 - k)`.
//! This is the time reversal of the papers' trellis (QTIP, section 3; Q-Palette's `s' = (s << k | new) mod 2^16`), which
//! for independent weights has the same distortion; little-endian windows make a state one unaligned load.
//!
//! # The hashes
//! `h = x (x + 1) mod 2^16` spreads the state `x`; its high bits depend on all lower bits of `x`.
//! | code | V | weights of a state |
//! | --- | --- | --- |
//! | `fine` | 1 | entry `h >> (15 - q) mod 2^q` of `2^q` magnitudes, negated when bit 15 of `h` is set |
//! | `fast`, above 2 bits | 2 | pair `h >> 9 mod 64`, first negated by bit 15, second by bit 8 |
//! | `fast`, up to 2 bits | 4 | each byte `b` of [`mix32`]: entry `b mod 64`, negated by bit 7 |
//! | `hyb` | 2 | pair `h >> (15 - q) mod 2^q`, first negated by bit 15 (QTIP's hybrid code; Q-Palette `quantlut_sym`) |

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
    /// Rate in half bits per weight.
    half_bits: usize,
}

impl Steps {
    /// The steps of a `tcq` scheme; `None` for every other family.
    #[must_use]
    pub fn of(scheme: Scheme) -> Option<Self> {
        if scheme.family() != fracbit_base::Family::Tcq {
            return None;
        }
        let weights = match scheme.code()? {
            Code::Fine => 1,
            Code::Fast if scheme.quarters() <= 8 => 4,
            Code::Fast | Code::Hyb => 2,
        };
        Some(Self { weights, half_bits: usize::from(scheme.quarters()) / 2 })
    }

    /// Steps in a tile.
    #[must_use]
    pub const fn count(self) -> usize {
        crate::TILE / self.weights
    }

    /// Bits of a tile's tape.
    #[must_use]
    pub const fn tape_bits(self) -> usize {
        crate::TILE * self.half_bits / 2
    }

    /// Tape position of step `t` in bits (`t` may be `count()`: the end of the tape).
    #[must_use]
    pub const fn position(self, t: usize) -> usize {
        t * self.weights * self.half_bits / 2
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

/// `x (x + 1) mod 2^16`.
#[inline]
#[must_use]
pub const fn hash16(x: u16) -> u16 {
    x.wrapping_mul(x.wrapping_add(1))
}

/// The 32-bit mix of the four-weight `fast` code: each byte is one weight.
#[inline]
#[must_use]
pub const fn mix32(x: u16) -> u32 {
    let h = (x as u32).wrapping_mul(0x9E37_79B1);
    (h ^ (h >> 15)).wrapping_mul(0x85EB_CA6B)
}

/// The weights of state `x` on the codebook's integer grid; the first `V` elements of the result count.
///
/// `entries` is the codebook's table (`2^q` magnitudes for `fine` and the four-weight `fast` code, `2^q` pairs for the others).
#[must_use]
pub fn state_values(code: Code, weights: usize, entries: &[i16], x: u16) -> [i16; 4] {
    let negate = |value: i16, sign: bool| if sign { -value } else { value };
    let mut out = [0; 4];
    match (code, weights) {
        (Code::Fine, _) => {
            let h = usize::from(hash16(x));
            let index = (h & 0x7fff) >> (15 - entries.len().trailing_zeros());
            out[0] = negate(entries[index], h >> 15 != 0);
        }
        (Code::Fast, 4) => {
            for (value, byte) in out.iter_mut().zip(mix32(x).to_le_bytes()) {
                *value = negate(entries[usize::from(byte & 63)], byte >> 7 != 0);
            }
        }
        (Code::Fast, _) => {
            let h = usize::from(hash16(x));
            let pair = 2 * ((h >> 9) & 63);
            out[0] = negate(entries[pair], h >> 15 != 0);
            out[1] = negate(entries[pair + 1], (h >> 8) & 1 != 0);
        }
        (Code::Hyb, _) => {
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
        for scheme in Scheme::all().filter(|s| s.family() == fracbit_base::Family::Tcq) {
            let steps = Steps::of(scheme).unwrap();
            assert_eq!(steps.position(steps.count()), steps.tape_bits(), "{scheme}");
            let total: u32 = (0..steps.count()).map(|t| steps.shift(t)).sum();
            assert_eq!(total as usize, steps.tape_bits(), "{scheme}");
            assert!((0..steps.count()).all(|t| (1..=10).contains(&steps.shift(t))), "{scheme}");
        }
    }
}
