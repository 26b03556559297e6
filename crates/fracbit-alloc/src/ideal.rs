//! Optimal bits for an ideal Gaussian quantizer, in closed form.
//!
//! If every layer could be coded at any rate `b` with the distortion of the Gaussian
//! rate-distortion bound, `D(b) = 2^(-2b)`, the best use of a memory budget has a closed form
//! (Q-Palette, theorem 3.1 and appendix A; reverse water-filling in information theory):
//!
//! ```text
//! minimise  Σ a_l 2^(-2 b_l)   subject to  Σ d_l b_l = M,  lo ≤ b_l ≤ hi
//! b_l = clamp(½ log2(a_l / d_l) + C, lo, hi),   C such that the budget is met
//! ```
//!
//! | here | paper | meaning |
//! | --- | --- | --- |
//! | `a` | a_l | sensitivity: loss per relative squared error |
//! | `params` | d_l^in · d_l^out | weights of the layer |
//! | `bounds.0` | η | least bits a layer may get |
//! | `mean_bits` | M / Σ d_l | average bits per weight |
//!
//! Deviations: the paper has no upper bound; we allow one, because real palettes end (at 5 or 8
//! bits). The constant is found exactly, not by bisection: the total is piecewise linear in `C`
//! with at most two kinks per layer, so sorting the kinks and walking once gives the segment and
//! its solution. Cost: O(n log n).
//!
//! A layer with `a = 0` gets `lo`: more bits buy nothing. If the other layers are then all at `hi`,
//! the rest of the budget stays unspent.
//!
//! The result is a *bound* for [`crate::Problem`]s whose losses are `a_l · err` with `err ≥ 2^(-2
//! bits)`; how far a real palette stays behind, and why, is the subject of [`crate::gap`].

use serde::{Deserialize, Serialize};

use crate::error::AllocError;

/// What the closed form knows of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerTerm {
    /// Number of weights, at least 1.
    pub params: u64,
    /// Sensitivity: loss per relative squared error, finite and ≥ 0.
    pub a: f64,
}

/// The optimal allocation of [`ideal_bits`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ideal {
    /// Bits per weight of each layer.
    pub bits: Vec<f64>,
    /// `Σ a_l 2^(-2 bits_l)`.
    pub loss: f64,
    /// Loss saved per further *bit* of budget (the multiplier λ of the paper's proof); 0 if no
    /// layer can use one.
    pub price: f64,
}

/// Best bits per layer at `mean_bits` bits per weight on average, each within `bounds = (lo, hi)`.
///
/// `bounds = (0.0, f64::INFINITY)` is the unconstrained theorem with the natural limit of zero
/// bits.
///
/// # Errors
/// [`AllocError::Empty`] without layers; [`AllocError::Ideal`] for a layer without weights, a
/// sensitivity that is negative or not finite, bounds that are not `0 ≤ lo ≤ hi`, and a mean
/// outside the bounds.
pub fn ideal_bits(layers: &[LayerTerm], mean_bits: f64, bounds: (f64, f64)) -> Result<Ideal, AllocError> {
    let (lo, hi) = bounds;
    if layers.is_empty() {
        return Err(AllocError::Empty { what: "layers" });
    }
    if !(lo >= 0.0 && lo.is_finite()) {
        return Err(AllocError::Ideal { arg: "lower bound", want: "finite and at least 0".into(), got: lo });
    }
    if hi.is_nan() || hi < lo {
        return Err(AllocError::Ideal { arg: "upper bound", want: format!("at least {lo}"), got: hi });
    }
    if !(mean_bits.is_finite() && mean_bits >= lo && mean_bits <= hi) {
        return Err(AllocError::Ideal { arg: "mean bits", want: format!("in {lo}..={hi}"), got: mean_bits });
    }
    for l in layers {
        if l.params == 0 {
            return Err(AllocError::Ideal { arg: "params", want: "at least 1".into(), got: 0.0 });
        }
        if !(l.a.is_finite() && l.a >= 0.0) {
            return Err(AllocError::Ideal {
                arg: "sensitivity",
                want: "finite and at least 0".into(),
                got: l.a,
            });
        }
    }

    let params = |l: &LayerTerm| l.params as f64;
    // `½ log2(a/d)`: -inf for a = 0, which keeps the layer at `lo` for every finite C.
    let offset = |l: &LayerTerm| 0.5 * (l.a / params(l)).log2();

    // Kinks of the total as a function of C: a layer starts to grow at lo - offset and stops at
    // hi - offset.
    let mut kinks: Vec<(f64, f64)> = Vec::with_capacity(2 * layers.len());
    for l in layers.iter().filter(|l| l.a > 0.0) {
        kinks.push((lo - offset(l), params(l)));
        if hi.is_finite() {
            kinks.push((hi - offset(l), -params(l)));
        }
    }
    kinks.sort_by(|x, y| x.0.total_cmp(&y.0));

    let total: f64 = layers.iter().map(params).sum();
    let want = (mean_bits - lo) * total;
    let (mut spent, mut slope, mut c) = (0.0, 0.0, f64::NEG_INFINITY);
    let mut solved = want <= 0.0;
    for &(at, change) in &kinks {
        if solved {
            break;
        }
        if slope > 0.0 && spent + slope * (at - c) >= want {
            solved = true;
            break;
        }
        if slope > 0.0 {
            spent += slope * (at - c);
        }
        (c, slope) = (at, slope + change);
    }
    // In the segment starting at `c`. After the last kink the slope is 0 with a finite `hi` (up to
    // rounding): everything that can grow is full, and `c` is already large enough.
    let growing = slope > 0.5;
    if want > 0.0 && growing {
        c += (want - spent) / slope;
    } else if want > 0.0 && !solved {
        c = f64::INFINITY;
    }

    let bits: Vec<f64> =
        layers.iter().map(|l| if l.a > 0.0 { (offset(l) + c).clamp(lo, hi) } else { lo }).collect();
    let loss = layers.iter().zip(&bits).map(|(l, b)| l.a * (-2.0 * b).exp2()).sum();
    // The multiplier is the best rate at which a layer below `hi` turns a bit into loss.
    let price = layers
        .iter()
        .zip(&bits)
        .filter(|(_, b)| **b < hi)
        .map(|(l, b)| 2.0 * std::f64::consts::LN_2 * l.a * (-2.0 * b).exp2() / params(l))
        .fold(0.0, f64::max);
    Ok(Ideal { bits, loss, price })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: (f64, f64) = (0.0, f64::INFINITY);

    fn term(params: u64, a: f64) -> LayerTerm {
        LayerTerm { params, a }
    }

    fn mean(layers: &[LayerTerm], bits: &[f64]) -> f64 {
        let total: f64 = layers.iter().map(|l| l.params as f64).sum();
        layers.iter().zip(bits).map(|(l, b)| l.params as f64 * b).sum::<f64>() / total
    }

    #[test]
    fn two_layers_by_hand() {
        // Same size, sensitivities 4 : 1, so half a log2(4) = 1 bit apart.
        let r = ideal_bits(&[term(100, 4.0), term(100, 1.0)], 3.0, ANY).unwrap();
        assert!((r.bits[0] - 3.5).abs() < 1e-12 && (r.bits[1] - 2.5).abs() < 1e-12, "{:?}", r.bits);
        assert!((r.loss - (4.0 / 128.0 + 1.0 / 32.0)).abs() < 1e-12);
    }

    #[test]
    fn clamps_meet_the_budget_exactly() {
        let layers = [term(10, 1e-9), term(1000, 1.0), term(50, 300.0), term(7, 0.0)];
        for bounds in [ANY, (0.5, 5.0), (1.0, 4.0), (2.0, 2.5)] {
            for mean_bits in [2.0, 2.2, 2.5] {
                let r = ideal_bits(&layers, mean_bits, bounds).unwrap();
                assert!(
                    (mean(&layers, &r.bits) - mean_bits).abs() < 2e-2,
                    "{bounds:?} {mean_bits}: {:?}",
                    r.bits
                );
                assert!(r.bits.iter().all(|b| (bounds.0..=bounds.1).contains(b)));
            }
        }
    }

    #[test]
    fn no_transfer_of_bits_helps() {
        // Karush-Kuhn-Tucker, checked by the definition: moving a little budget between any two
        // layers never gains.
        let layers = [term(10, 0.3), term(1000, 1.0), term(50, 300.0), term(400, 0.02), term(90, 7.0)];
        let bounds = (1.0, 4.5);
        let r = ideal_bits(&layers, 2.25, bounds).unwrap();
        assert!((mean(&layers, &r.bits) - 2.25).abs() < 1e-12, "{:?}", r.bits);
        let loss = |b: &[f64]| layers.iter().zip(b).map(|(l, b)| l.a * (-2.0 * b).exp2()).sum::<f64>();
        let mut moved = 0;
        for i in 0..layers.len() {
            for j in 0..layers.len() {
                let mut b = r.bits.clone();
                b[i] += 0.01 / layers[i].params as f64;
                b[j] -= 0.01 / layers[j].params as f64;
                if i != j && b[i] <= bounds.1 && b[j] >= bounds.0 {
                    moved += 1;
                    assert!(loss(&b) >= r.loss - 1e-12, "{i} <- {j}");
                }
            }
        }
        assert!(moved > 4, "the bounds block nearly every move: {:?}", r.bits);
    }

    #[test]
    fn price_is_the_derivative() {
        let layers = [term(1000, 1.0), term(50, 300.0), term(400, 0.02)];
        let total = 1450.0;
        let (x, y) = (ideal_bits(&layers, 3.0, ANY).unwrap(), ideal_bits(&layers, 3.0 + 1e-6, ANY).unwrap());
        let slope = (x.loss - y.loss) / (1e-6 * total);
        assert!((slope / x.price - 1.0).abs() < 1e-4, "{slope} {}", x.price);
    }

    #[test]
    fn extremes() {
        let layers = [term(10, 1.0), term(20, 5.0)];
        assert_eq!(ideal_bits(&layers, 1.5, (1.5, 4.0)).unwrap().bits, [1.5, 1.5]);
        assert_eq!(ideal_bits(&layers, 4.0, (1.5, 4.0)).unwrap().bits, [4.0, 4.0]);
        assert_eq!(
            ideal_bits(&[term(10, 0.0)], 3.0, ANY).unwrap(),
            Ideal { bits: vec![0.0], loss: 0.0, price: 0.0 }
        );
        // The insensitive layer leaves its share to the other one until that is full.
        let r = ideal_bits(&[term(10, 0.0), term(10, 1.0)], 3.0, (1.0, 4.0)).unwrap();
        assert_eq!(r.bits, [1.0, 4.0]);
    }

    #[test]
    fn refusals() {
        for (layers, bits, bounds, part) in [
            (vec![], 3.0, ANY, "layers"),
            (vec![term(0, 1.0)], 3.0, ANY, "params"),
            (vec![term(1, -1.0)], 3.0, ANY, "sensitivity"),
            (vec![term(1, f64::NAN)], 3.0, ANY, "sensitivity"),
            (vec![term(1, 1.0)], 0.5, (1.0, 4.0), "in 1..=4, got 0.5"),
            (vec![term(1, 1.0)], f64::INFINITY, ANY, "mean bits"),
            (vec![term(1, 1.0)], 3.0, (4.0, 2.0), "upper bound"),
        ] {
            let e = ideal_bits(&layers, bits, bounds).unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        }
    }
}
