//! One step of the search, from the costs after it to the costs before it.

use crate::{
    isa::Isa,
    metric::Metric,
    search::{LANES, PAD},
};
use fracbit_format::trellis::{STATE_BITS, STATES};

/// What a step needs beside its costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step<'a> {
    /// Values of all states, arranged for `new_bits`.
    pub(crate) table: &'a [i16], // (2^(16 - new_bits) / 32, 2^new_bits, weights, 32)
    /// The weights of this step on the grid.
    pub(crate) x: &'a [i16],
    /// Shift to the following step.
    pub(crate) shift: u32,
    /// New bits in the state of this step.
    pub(crate) new_bits: u32,
    /// Smallest cost of `after`, subtracted from all results.
    pub(crate) base: u16,
}

#[cfg(target_arch = "x86_64")]
impl Step<'_> {
    /// Rows of the table, one behind the other, whose states all go on to the same overlap.
    pub(crate) fn run(&self) -> usize {
        1 << (self.shift + self.new_bits).saturating_sub(STATE_BITS)
    }
}

/// `before[u] = min over n of (cost of state s = n << (16 - new_bits) | u, plus after[s >>
/// shift]) - base`; returns the least of them.
pub(crate) fn step(isa: Isa, doublings: u32, step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    assert_eq!(step.table.len(), STATES * step.x.len(), "values of every state");
    assert!(after.len() >= (STATES >> step.shift) + PAD, "costs after the step, padded");
    assert!(before.len() >= STATES >> step.new_bits, "costs before the step");
    assert!((1..=10).contains(&step.new_bits) && (1..=10).contains(&step.shift), "shifts of 1 to 10 bits");
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vbmi => crate::simd::step_avx512(doublings, step, after, before),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => crate::simd::step_avx2(doublings, step, after, before),
        _ => match doublings {
            0 => step_scalar::<0>(step, after, before),
            _ => step_scalar::<1>(step, after, before),
        },
    }
}

/// The reference, with `D` doublings; written so that compilers vectorize the lanes.
fn step_scalar<const D: u32>(step: &Step<'_>, after: &[u16], before: &mut [u16]) -> u16 {
    let Step { table, x, shift, new_bits, base } = *step;
    let (rows, _) = table.as_chunks::<LANES>();
    let mut rows = rows.iter();
    let mut least = u16::MAX;
    let (blocks, _) = before[..STATES >> new_bits].as_chunks_mut::<LANES>();
    for (block, out) in blocks.iter_mut().enumerate() {
        let mut best = [u16::MAX; LANES];
        for new in 0..1usize << new_bits {
            let first = (new << (STATE_BITS - new_bits)) | (block * LANES);
            let mut cost = [0; LANES];
            for (same, &n) in cost.chunks_mut(1 << shift).zip(&after[first >> shift..]) {
                same.fill(n);
            }
            for (&x, row) in x.iter().zip(rows.by_ref()) {
                for (cost, &v) in cost.iter_mut().zip(row) {
                    #[expect(clippy::cast_possible_truncation, reason = "at most 32768")]
                    let d = Metric::cost(D, v, x) as u16;
                    *cost = cost.saturating_add(d);
                }
            }
            best.iter_mut().zip(cost).for_each(|(best, cost)| *best = cost.min(*best));
        }
        for (out, best) in out.iter_mut().zip(best) {
            *out = best.saturating_sub(base);
            least = least.min(*out);
        }
    }
    least
}

/// All continuations of one overlap by one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fan<'a> {
    /// Their values.
    pub(crate) values: &'a [i16], // (weights, 2^new_bits)
    /// The weights of the step on the grid.
    pub(crate) x: &'a [i16],
    /// Shift to the following step.
    pub(crate) shift: u32,
    /// New bits in the state of this step, at least 4.
    pub(crate) new_bits: u32,
    /// The overlap they continue.
    pub(crate) overlap: usize,
}

/// The first new bits of least cost, `after` included.
pub(crate) fn best_of_fan(isa: Isa, doublings: u32, fan: &Fan<'_>, after: &[u16]) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vbmi => crate::simd::best_of_fan_avx2(doublings, fan, after),
        _ => best_of_fan_scalar(doublings, fan, after),
    }
}

/// The reference; compiled once more with wider vectors.
#[inline(always)]
pub(crate) fn best_of_fan_scalar(doublings: u32, fan: &Fan<'_>, after: &[u16]) -> usize {
    match doublings {
        0 => fan_body::<0>(fan, after),
        _ => fan_body::<1>(fan, after),
    }
}

#[inline(always)]
fn fan_body<const D: u32>(fan: &Fan<'_>, after: &[u16]) -> usize {
    const WIDE: usize = 16;
    let Fan { values, x, shift, new_bits, overlap } = *fan;
    let low = STATE_BITS - new_bits;
    let mut best = (u32::MAX, 0);
    for first in (0..1usize << new_bits).step_by(WIDE) {
        let mut totals = [0u32; WIDE];
        if low <= shift {
            // The overlap is shifted out; runs of neighbours share their next overlap.
            for (run, &n) in totals.chunks_mut(1 << (shift - low)).zip(&after[first >> (shift - low)..]) {
                run.fill(u32::from(n));
            }
        } else {
            for (i, total) in totals.iter_mut().enumerate() {
                *total = u32::from(after[((first + i) << low | overlap) >> shift]);
            }
        }
        for (values, &x) in values.chunks_exact(1 << new_bits).zip(x) {
            let values: &[i16; WIDE] = values[first..].first_chunk().expect("whole vectors of candidates");
            for (total, &v) in totals.iter_mut().zip(values) {
                *total += Metric::cost(D, v, x);
            }
        }
        let least = totals.iter().fold(u32::MAX, |a, &b| a.min(b));
        if least < best.0 {
            best = (least, first);
        }
    }
    // Only the vector of the first least candidate is known so far.
    let (least, first) = best;
    let cost = |new: usize| {
        let n = u32::from(after[(new << low | overlap) >> shift]);
        let values = values[new..].iter().step_by(1 << new_bits);
        n + values.zip(x).map(|(&v, &x)| Metric::cost(D, v, x)).sum::<u32>()
    };
    (first..first + WIDE).find(|&new| cost(new) == least).expect("one of them has the least cost")
}
