//! How far an allocation is from the ideal Gaussian quantizer, and whose fault it is.
//!
//! Source: Q-Palette, appendix B. With `b*` the bits of [`crate::ideal::ideal_bits`] at the same
//! average, and layer `l` stored with `bit_l` bits per weight at relative error `err_l`, the total
//! gap splits into two parts:
//!
//! ```text
//! Σ a (err - 2^(-2b*))  =  Σ a (err - 2^(-2 bit))  +  Σ a (2^(-2 bit) - 2^(-2b*))
//!      total gap              distortion gap               allocation gap
//! ```
//!
//! The **distortion** gap is the price of codes that miss the rate-distortion bound; a better code
//! lowers it. The **allocation** gap is the price of having few bit-widths; more widths lower it.
//! Both are non-negative: the first by the rate-distortion theorem, the second because `b*` is
//! optimal, provided that `bit` uses no more than the budget of `b*`. An allocation that spends its
//! budget on something else (tables, signs) shows that as allocation gap.

use serde::{Deserialize, Serialize};

use crate::error::AllocError;
use crate::ideal::{Ideal, LayerTerm};

/// What a layer was given.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// Bits per weight of the code.
    pub bits: f64,
    /// Relative squared error.
    pub err: f64,
}

/// The decomposition, in units of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Loss of the ideal quantizer at the optimal bits.
    pub ideal: f64,
    /// Loss of the allocation minus `ideal`; the sum of the other two.
    pub total: f64,
    /// Part due to codes above the rate-distortion bound.
    pub distortion: f64,
    /// Part due to bits that differ from the optimal ones.
    pub allocation: f64,
}

/// Splits the gap of `stored` to `ideal`.
///
/// # Errors
/// [`AllocError::Length`] when the three lists differ in length.
pub fn split(layers: &[LayerTerm], stored: &[Stored], ideal: &Ideal) -> Result<Gap, AllocError> {
    for (arg, got) in [("stored", stored.len()), ("ideal.bits", ideal.bits.len())] {
        if got != layers.len() {
            return Err(AllocError::Length { op: "gap::split", arg, want: layers.len(), got });
        }
    }
    let (mut distortion, mut allocation) = (0.0, 0.0);
    for ((layer, s), b) in layers.iter().zip(stored).zip(&ideal.bits) {
        let reached = (-2.0 * s.bits).exp2();
        distortion += layer.a * (s.err - reached);
        allocation += layer.a * (reached - (-2.0 * b).exp2());
    }
    Ok(Gap { ideal: ideal.loss, total: distortion + allocation, distortion, allocation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ideal::ideal_bits;

    #[test]
    fn by_hand() {
        let layers = [LayerTerm { params: 8, a: 4.0 }, LayerTerm { params: 8, a: 1.0 }];
        let ideal = ideal_bits(&layers, 3.0, (0.0, f64::INFINITY)).unwrap();
        let stored = [Stored { bits: 4.0, err: 0.005 }, Stored { bits: 2.0, err: 0.08 }];
        let g = split(&layers, &stored, &ideal).unwrap();
        assert!((g.distortion - (4.0 * (0.005 - 1.0 / 256.0) + (0.08 - 0.0625))).abs() < 1e-15);
        assert!((g.total - (4.0 * 0.005 + 0.08 - ideal.loss)).abs() < 1e-15);
        assert!(g.allocation > 0.0);
    }

    #[test]
    fn lengths() {
        let ideal = ideal_bits(&[LayerTerm { params: 1, a: 1.0 }], 2.0, (0.0, 8.0)).unwrap();
        let e = split(&[LayerTerm { params: 1, a: 1.0 }], &[], &ideal).unwrap_err();
        assert_eq!(e.to_string(), "gap::split: `stored` should have 1 entries, got 0");
    }
}
