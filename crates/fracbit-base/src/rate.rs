//! Bits per weight as an exact fraction.

use crate::Bytes;
use std::fmt;

/// Bits per weight in units of 1/4096 bit, so that budgets add up without rounding.
///
/// Every rate of the palette (quarters of a bit) and every usual scale overhead (16 bits per 64 or
/// 128 weights) is exact in this unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u32);

/// A number that is not a usable rate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("rate: bits per weight should be between 0 and 64, got {0}")]
pub struct RateError(pub f64);

impl Rate {
    /// Units per bit.
    pub const UNIT: u32 = 4096;

    /// `quarters / 4` bits per weight.
    #[must_use]
    pub const fn quarter_bits(quarters: u32) -> Self {
        Self(quarters * (Self::UNIT / 4))
    }

    /// The rate in quarters of a bit, where it is a whole number of them.
    #[must_use]
    pub const fn quarters(self) -> Option<u32> {
        if self.0.is_multiple_of(Self::UNIT / 4) { Some(self.0 / (Self::UNIT / 4)) } else { None }
    }

    /// `bits` stored for every `weights` weights, rounded up to the next unit.
    ///
    /// # Panics
    /// When `weights` is zero (at compile time in a `const`).
    #[must_use]
    pub const fn per_group(bits: u32, weights: u32) -> Self {
        assert!(weights > 0, "a group has at least one weight");
        let units = (bits as u64 * Self::UNIT as u64).div_ceil(weights as u64);
        assert!(units <= u32::MAX as u64, "rate overflows");
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the assertion above")]
        Self(units as u32)
    }

    /// The nearest rate to a decimal number of bits per weight, as typed by a user.
    ///
    /// # Errors
    /// When `bits` is not finite or outside 0..=64.
    pub fn from_bits(bits: f64) -> Result<Self, RateError> {
        if !(0.0..=64.0).contains(&bits) {
            return Err(RateError(bits));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=64*4096 fits u32")]
        Ok(Self((bits * f64::from(Self::UNIT)).round() as u32))
    }

    /// Bits per weight.
    #[must_use]
    pub fn bits(self) -> f64 {
        f64::from(self.0) / f64::from(Self::UNIT)
    }

    /// Bytes for `weights` weights, rounded up to a whole byte.
    #[must_use]
    pub fn bytes(self, weights: u64) -> Bytes {
        let bits = u128::from(weights) * u128::from(self.0);
        let bytes = bits.div_ceil(u128::from(Self::UNIT) * 8);
        Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// The Gaussian rate-distortion bound `2^(-2R)`: the least relative squared error at this rate.
    #[must_use]
    pub fn gaussian_bound(self) -> f64 {
        (-2.0 * self.bits()).exp2()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bpw", self.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_for_the_palette_and_for_scales() {
        const Q4_G128: Rate = Rate::per_group(4 * 128 + 16, 128);
        assert_eq!(Q4_G128.bits(), 4.125);
        assert_eq!(Q4_G128.quarters(), None);
        for quarters in 0..=32 {
            assert_eq!(Rate::quarter_bits(quarters).bits(), f64::from(quarters) / 4.0);
            assert_eq!(Rate::quarter_bits(quarters).quarters(), Some(quarters));
            assert_eq!(Rate::quarter_bits(quarters).bytes(256), Bytes(u64::from(quarters) * 8));
        }
        assert_eq!(Rate::quarter_bits(1).bytes(1), Bytes(1), "rounds up to a byte");
    }

    #[test]
    fn refuses_nonsense() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, 65.0] {
            assert!(Rate::from_bits(bad).is_err(), "{bad} was accepted");
        }
        assert_eq!(Rate::from_bits(3.25), Ok(Rate::quarter_bits(13)));
    }

    #[test]
    fn bound_is_two_to_minus_two_r() {
        assert_eq!(Rate::quarter_bits(8).gaussian_bound(), 0.0625);
    }
}
