//! Branch costs in 16-bit integers.
//!
//! A weight and the values of all states live on one int16 grid. The cost of a branch is the
//! squared difference, doubled in amplitude `doublings` times (0 or 1) with saturation so that high
//! rates keep their resolution: `mulhrs(d, d) = (d^2 + 2^14) >> 15` of the doubled difference `d`.
//! Sums saturate at 65535, which only paths far from the best reach. Everything is defined on
//! integers, hence equal on every machine.

use fracbit_base::Scheme;

/// Up to 3 bits weights are clipped at this many standard deviations, or at the largest entry if
/// that is more; above 3 bits at the largest entry.
const REACH: f32 = 5.0;

/// The integer grid of one code book.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metric {
    /// Grid units per unit of weight.
    scale: f32,
    /// Doublings of the difference before it is squared.
    pub(crate) doublings: u32,
}

impl Metric {
    /// The grid for a table whose largest weight is `reach`.
    pub(crate) fn new(scheme: Scheme, reach: f32) -> Self {
        // With reach 5 one unit of cost is 1/1310 of a squared standard deviation, with reach 3.6
        // 1/2525, and 1/10100 with one doubling. Rounding is then below a tenth of the mean cost of
        // a branch at every rate (see the f64 test of `search`).
        let (doublings, reach) = match scheme.quarters() {
            ..=12 => (0, reach.max(REACH)),
            13..=16 => (0, reach),
            // A doubled difference saturates early: a weight clipped beyond the table would find
            // all states equally far.
            _ => (1, reach),
        };
        Self { scale: 32_767.0 / reach.max(f32::MIN_POSITIVE), doublings }
    }

    /// Squared grid units per squared unit of weight.
    pub(crate) fn area(self) -> f64 {
        f64::from(self.scale).powi(2)
    }

    /// `weight` on the grid, clipped to its range; NaN becomes 0.
    #[expect(clippy::cast_possible_truncation, reason = "`as` saturates, which is the clipping wanted here")]
    pub(crate) fn grid(self, weight: f32) -> i16 {
        // Beyond 2^23 a float has no fraction: this rounds as `round_ties_even`, which is a call of
        // the C library before SSE4.1.
        const WHOLE: f32 = 1.5 * (1u32 << 23) as f32;
        let clipped = (weight * self.scale).clamp(-f32::from(i16::MAX), f32::from(i16::MAX));
        (clipped + WHOLE - WHOLE) as i16
    }

    /// Cost of coding grid value `x` as grid value `v`.
    #[inline(always)]
    #[expect(clippy::cast_sign_loss, reason = "a square")]
    pub(crate) fn cost(doublings: u32, v: i16, x: i16) -> u32 {
        let mut d = v.saturating_sub(x);
        for _ in 0..doublings {
            d = d.saturating_add(d);
        }
        ((i32::from(d) * i32::from(d) + (1 << 14)) >> 15) as u32
    }
}
