//! The Viterbi search.

use crate::{isa::Isa, metric::Metric, step};
use fracbit_format::trellis::{STATE_BITS, STATES};

/// States of one vector row of the value table.
pub(crate) const LANES: usize = 32;
/// Entries past the end of a cost array that vector loads may touch.
pub(crate) const PAD: usize = LANES;
/// New bits that the trace decides at once: it enumerates `2^6` continuations between two stored
/// cost arrays.
const GROUP_BITS: u32 = 6;
/// From this number of new bits on, a single step is decided a vector of 16 candidates at a time.
const FAN_BITS: u32 = 4;

/// A circular trellis and the values of its states.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    isa: Isa,
    weights: usize,
    doublings: u32,
    /// `shifts[t]`: bits by which the window moves from step `t` to `t + 1`.
    shifts: Vec<u32>,
    /// One for each number of new bits per step that occurs.
    tables: Vec<Table>,
    /// Steps on either side of the seam that the free pass looks at.
    reach: usize,
}

/// The values of all states in two orders.
#[derive(Clone, Debug)]
struct Table {
    new_bits: u32,
    /// As a step reads them: (block of 32 overlaps, new bits, weight, overlap in the block).
    rows: Vec<i16>,
    /// As the trace reads them: (overlap, weight, new bits).
    fans: Vec<i16>,
}

/// Working memory of one search.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    costs: Vec<Vec<u16>>,
    paths: Vec<(u32, u16)>,
    next: Vec<(u32, u16)>,
    pub(crate) states: Vec<u16>,
}

impl Search {
    /// `values` holds the `weights` grid values of every state in order.
    pub(crate) fn new(
        isa: Isa,
        metric: Metric,
        weights: usize,
        shifts: Vec<u32>,
        values: &[i16],
        reach: usize,
    ) -> Self {
        assert_eq!(values.len(), STATES * weights, "values of every state");
        assert!(isa.is_supported(), "{} is not available here", isa.name());
        let mut kinds = shifts.clone();
        kinds.sort_unstable();
        kinds.dedup();
        let tables = kinds.into_iter().map(|k| Table::new(values, weights, k)).collect();
        let reach = reach.min(shifts.len());
        Self { isa, weights, doublings: metric.doublings, shifts, tables, reach }
    }

    /// Steps of the circle.
    pub(crate) fn steps(&self) -> usize {
        self.shifts.len()
    }

    /// Shift from step `t - 1` to `t`, which is the number of new bits in the state of step `t`.
    fn new_bits(&self, t: usize) -> u32 {
        self.shifts[(t + self.steps() - 1) % self.steps()]
    }

    fn table(&self, new_bits: u32) -> &Table {
        let found = self.tables.iter().find(|table| table.new_bits == new_bits);
        found.expect("a table for every shift of the circle")
    }

    /// Finds the states of a closed path near `x` (grid values, step after step) and leaves them in
    /// `scratch.states`, one per step.
    pub(crate) fn run(&self, x: &[i16], scratch: &mut Scratch) {
        let steps = self.steps();
        assert_eq!(x.len(), steps * self.weights, "one tile");
        // Free pass around the seam at step 0: positions `steps - reach .. steps + reach` of the
        // unrolled circle.
        let (from, seam, to) = (steps - self.reach, steps, steps + self.reach);
        let groups = self.groups(from, seam);
        let overlap = 1usize << (STATE_BITS - self.new_bits(to));
        self.backward(x, scratch, from, to, &groups, |n| n[..overlap].fill(0));
        let start = first_min(&scratch.costs[0][..1 << (STATE_BITS - self.new_bits(from))]);
        scratch.states.clear();
        let seam_overlap = self.trace(x, scratch, start, &groups);
        // Closed pass: both ends share that overlap.
        let groups = self.groups(0, steps);
        let overlap = 1usize << (STATE_BITS - self.new_bits(0));
        self.backward(x, scratch, 0, steps, &groups, |n| {
            n[..overlap].fill(u16::MAX);
            n[usize::from(seam_overlap)] = 0;
        });
        scratch.states.clear();
        self.trace(x, scratch, seam_overlap, &groups);
    }

    /// Cuts steps `from..to` into runs that the trace decides at once; returns their bounds.
    fn groups(&self, from: usize, to: usize) -> Vec<usize> {
        let mut bounds = vec![from];
        let mut bits = 0;
        for t in from..to {
            let more = self.new_bits(t);
            if bits > 0 && bits + more > GROUP_BITS {
                bounds.push(t);
                bits = 0;
            }
            bits += more;
        }
        bounds.push(to);
        bounds
    }

    /// Costs-to-go from `to` down to `from` (unrolled positions): `costs[i]` becomes that of
    /// `bounds[i]`, up to a constant.
    fn backward(
        &self,
        x: &[i16],
        scratch: &mut Scratch,
        from: usize,
        to: usize,
        bounds: &[usize],
        init: impl FnOnce(&mut [u16]),
    ) {
        let most = (1 << (STATE_BITS - self.shifts.iter().min().expect("a trellis has steps"))) + PAD;
        let slots = bounds.len() + 2;
        if scratch.costs.len() < slots {
            scratch.costs.resize_with(slots, Vec::new);
        }
        for slot in &mut scratch.costs[..slots] {
            slot.resize(most, 0);
        }
        let slot_of = |position: usize, other: usize| match bounds.binary_search(&position) {
            Ok(i) => i,
            Err(_) if other == slots - 1 => slots - 2,
            Err(_) => slots - 1,
        };
        let mut current = slot_of(to, usize::MAX);
        init(&mut scratch.costs[current]);
        let mut base = 0;
        for t in (from..to).rev() {
            let target = slot_of(t, current);
            let [input, output] =
                scratch.costs.get_disjoint_mut([current, target]).expect("two different cost arrays");
            let at = t % self.steps();
            let new_bits = self.new_bits(at);
            base = step::step(
                self.isa,
                self.doublings,
                &step::Step {
                    table: &self.table(new_bits).rows,
                    x: &x[at * self.weights..][..self.weights],
                    shift: self.shifts[at],
                    new_bits,
                    base,
                },
                input,
                output,
            );
            current = target;
        }
    }

    /// Follows the best path from `bounds[0]` with overlap `start`; appends its states and returns
    /// the overlap at the end.
    fn trace(&self, x: &[i16], scratch: &mut Scratch, start: u16, bounds: &[usize]) -> u16 {
        let Scratch { costs, paths, next, states } = scratch;
        let mut overlap = start;
        for (i, range) in bounds.windows(2).enumerate() {
            let end = &costs[i + 1];
            let at = range[0] % self.steps();
            let mut path = if range[1] - range[0] == 1 && self.new_bits(at) >= FAN_BITS {
                self.best_of_fan(at, overlap, &x[at * self.weights..][..self.weights], end)
            } else {
                paths.clear();
                paths.push((0, overlap));
                for t in range[0]..range[1] {
                    self.extend(t % self.steps(), x, paths, next);
                    std::mem::swap(paths, next);
                }
                let totals = paths.iter().map(|&(cost, u)| cost + u32::from(end[usize::from(u)]));
                let best = totals.enumerate().min_by_key(|&(path, total)| (total, path));
                best.expect("a step has at least one continuation").0
            };
            let first = states.len();
            let steps = range[1] - range[0];
            // The new bits of the steps are the digits of the path's index, the last step lowest.
            let mut digits = [0u16; GROUP_BITS as usize];
            for (t, digit) in (range[0]..range[1]).zip(&mut digits[..steps]).rev() {
                let new_bits = self.new_bits(t);
                #[expect(clippy::cast_possible_truncation, reason = "masked to at most 10 bits")]
                {
                    *digit = (path & ((1 << new_bits) - 1)) as u16;
                }
                path >>= new_bits;
            }
            for (t, digit) in (range[0]..range[1]).zip(&digits[..steps]) {
                let state = digit << (STATE_BITS - self.new_bits(t)) | overlap;
                overlap = state >> self.shifts[t % self.steps()];
                states.push(state);
            }
            debug_assert_eq!(states.len(), first + steps, "one state per step");
        }
        overlap
    }

    /// Continues every path (cost, overlap) by every choice of new bits.
    fn extend(&self, at: usize, x: &[i16], paths: &[(u32, u16)], next: &mut Vec<(u32, u16)>) {
        let (new_bits, shift) = (self.new_bits(at), self.shifts[at]);
        let fans = &self.table(new_bits).fans;
        let x = &x[at * self.weights..][..self.weights];
        next.clear();
        for &(cost, u) in paths {
            let fan = &fans[(usize::from(u) * self.weights) << new_bits..][..self.weights << new_bits];
            for new in 0..1u16 << new_bits {
                let values = fan[usize::from(new)..].iter().step_by(1 << new_bits);
                let d: u32 = values.zip(x).map(|(&v, &x)| Metric::cost(self.doublings, v, x)).sum();
                next.push((cost + d, (new << (STATE_BITS - new_bits) | u) >> shift));
            }
        }
    }

    /// The new bits that continue `overlap` best by one step, when they are many.
    fn best_of_fan(&self, at: usize, overlap: u16, x: &[i16], end: &[u16]) -> usize {
        let (new_bits, shift) = (self.new_bits(at), self.shifts[at]);
        let fan = (usize::from(overlap) * self.weights) << new_bits;
        let fan = step::Fan {
            values: &self.table(new_bits).fans[fan..][..self.weights << new_bits],
            x,
            shift,
            new_bits,
            overlap: usize::from(overlap),
        };
        step::best_of_fan(self.isa, self.doublings, &fan, end)
    }
}

impl Table {
    fn new(values: &[i16], weights: usize, new_bits: u32) -> Self {
        let mut rows = Vec::with_capacity(values.len());
        for block in 0..(STATES >> new_bits) / LANES {
            for new in 0..1usize << new_bits {
                let first = (new << (STATE_BITS - new_bits)) | (block * LANES);
                for i in 0..weights {
                    rows.extend((first..first + LANES).map(|state| values[state * weights + i]));
                }
            }
        }
        let mut fans = Vec::with_capacity(values.len());
        for overlap in 0..STATES >> new_bits {
            for i in 0..weights {
                let states = (0..1usize << new_bits).map(|new| new << (STATE_BITS - new_bits) | overlap);
                fans.extend(states.map(|state| values[state * weights + i]));
            }
        }
        Self { new_bits, rows, fans }
    }
}

/// Index of the first smallest cost.
fn first_min(costs: &[u16]) -> u16 {
    let (index, _) = costs.iter().enumerate().min_by_key(|&(i, &c)| (c, i)).expect("costs are not empty");
    u16::try_from(index).expect("an overlap has at most 15 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::gaussian_tiles;
    use fracbit_base::Scheme;
    use fracbit_format::trellis::{Steps, state_values};

    /// A search over `scheme`'s built-in code with the given shifts, and the weight of every state.
    fn search(scheme: &str, shifts: Vec<u32>) -> (Search, Metric, Vec<f32>) {
        let scheme: Scheme = scheme.parse().unwrap();
        let book = crate::builtin(scheme).unwrap();
        let weights = Steps::of(scheme).unwrap().weights;
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|x| {
                let all = state_values(scheme, book.entries(), x);
                all.into_iter().take(weights).map(|v| f32::from(v) * book.step())
            })
            .collect();
        let reach = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let metric = Metric::new(scheme, reach);
        let grid: Vec<i16> = values.iter().map(|&v| metric.grid(v)).collect();
        (Search::new(Isa::detect(), metric, weights, shifts, &grid, 128), metric, values)
    }

    /// States along a circular tape of at most 32 bits.
    fn states(tape: u32, shifts: &[u32]) -> impl Iterator<Item = u16> {
        let bits: u32 = shifts.iter().sum();
        let twice = u64::from(tape) | u64::from(tape) << bits;
        shifts.iter().scan(0, move |at, shift| {
            let state = (twice >> *at) as u16;
            *at += shift;
            Some(state)
        })
    }

    #[test]
    fn equals_enumeration_of_all_tapes_with_its_seam() {
        for (scheme, shifts) in [
            ("tcq-2", vec![2; 10]),
            ("tcq-2.5", vec![2, 3, 2, 3, 2, 3, 2, 3]),
            ("tcq-hyb-2.5", vec![5; 4]),
            ("tcq-fast-1", vec![4; 5]),
        ] {
            let (search, metric, values) = search(scheme, shifts.clone());
            let v = search.weights;
            for tile in gaussian_tiles(5, 3) {
                let weights = &tile[..shifts.len() * v];
                let x: Vec<i16> = weights.iter().map(|&w| metric.grid(w)).collect();
                let mut scratch = Scratch::default();
                search.run(&x, &mut scratch);
                let cost = |path: &mut dyn Iterator<Item = u16>| -> u32 {
                    path.zip(x.chunks_exact(v))
                        .flat_map(|(s, x)| x.iter().enumerate().map(move |(i, &x)| (s, i, x)))
                        .map(|(s, i, x)| {
                            Metric::cost(metric.doublings, metric.grid(values[usize::from(s) * v + i]), x)
                        })
                        .sum()
                };
                let found = cost(&mut scratch.states.iter().copied());
                let bits: u32 = shifts.iter().sum();
                let seam = (1u32 << (STATE_BITS - shifts.last().unwrap())) - 1;
                let overlap = u32::from(scratch.states[0]) & seam;
                let best = (0..1u32 << (bits - seam.count_ones()))
                    .map(|free| cost(&mut states(free << seam.count_ones() | overlap, &shifts)))
                    .min();
                assert_eq!(Some(found), best, "{scheme}");
                // The path closes: the tape of its low bits gives the same states.
                let tape = scratch
                    .states
                    .iter()
                    .zip(&shifts)
                    .rev()
                    .fold(0u32, |tape, (s, shift)| tape << shift | u32::from(*s) & ((1 << shift) - 1));
                assert!(
                    states(tape, &shifts).eq(scratch.states.iter().copied()),
                    "{scheme}: the path does not close"
                );
            }
        }
    }

    /// Least squared error, in f64, of a closed path whose seam overlap is `seam`: forward in time,
    /// one step after the other.
    fn least_error(shifts: &[u32], weights: usize, values: &[f32], tile: &[f32], seam: u16) -> f64 {
        let last = *shifts.last().unwrap();
        let mut entry = vec![f64::INFINITY; STATES >> last];
        entry[usize::from(seam)] = 0.0;
        let mut previous = last;
        for (x, &shift) in tile.chunks_exact(weights).zip(shifts) {
            let mask = (STATES >> previous) - 1;
            let mut next = vec![f64::INFINITY; STATES >> shift];
            for s in 0..STATES {
                if entry[s & mask] < f64::INFINITY {
                    let values = &values[s * weights..][..weights];
                    let d: f64 = values.iter().zip(x).map(|(v, x)| f64::from(v - x).powi(2)).sum();
                    let total = entry[s & mask] + d;
                    next[s >> shift] = next[s >> shift].min(total);
                }
            }
            (entry, previous) = (next, shift);
        }
        entry[usize::from(seam)]
    }

    #[test]
    fn loses_less_than_a_thousandth_to_f64() {
        for scheme in ["tcq-1", "tcq-2.5", "tcq-3.5", "tcq-5", "tcq-fast-2", "tcq-fast-5", "tcq-hyb-3"] {
            let steps = Steps::of(scheme.parse().unwrap()).unwrap();
            let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
            let (search, metric, values) = search(scheme, shifts.clone());
            let v = search.weights;
            let mut scratch = Scratch::default();
            let (mut found, mut least) = (0.0, 0.0);
            for tile in gaussian_tiles(6, 3) {
                search.run(&tile.map(|w| metric.grid(w)), &mut scratch);
                let path = scratch.states.iter().flat_map(|&s| &values[usize::from(s) * v..][..v]);
                found += path.zip(&tile).map(|(v, w)| f64::from(v - w).powi(2)).sum::<f64>();
                let seam = scratch.states[0] & ((1 << (STATE_BITS - shifts.last().unwrap())) - 1);
                least += least_error(&shifts, v, &values, &tile, seam);
            }
            assert!(found >= least * (1.0 - 1e-6), "{scheme}: {found} is below the optimum {least}");
            assert!(found <= least * 1.001, "{scheme}: {found} against {least} in f64");
        }
    }
}
