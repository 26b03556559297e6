//! The search with one survivor per class: the fastest one below 3 bits, for codes of one weight a
//! step and 64 magnitudes.
//!
//! Forward in time, states are put into classes by their newest `B` bits, and of each class one
//! path survives, whose older bits are its own (reduced-state sequence estimation: Eyuboglu and
//! Qureshi, IEEE Trans. Comm. 36(1), 1988). `2^10` classes instead of the `2^14` overlaps of 2
//! bits, with all branches, lose 3.5 % without the seam, and a vector instruction does as much.
//!
//! A survivor is 16 bits: cost above, the low byte of its state below, so that a minimum of
//! words is a choice of paths, and equal costs have one winner everywhere. Costs saturate at
//! 255, which then stays: a bound from which the least cost was subtracted would be a wrong
//! cost. With `u = s >> k` and `h(u) = u (u + c)` the `2^k` successors of a state have the
//! hashes `h(u) + n (2 u + c) 2^(16 - k)`: one product for all. A hash finds its cost in a table
//! of 128 bytes.
//!
//! Layout: the lane of a class is its high bits, the vector its low bits. The `2^k` rivals for a
//! successor then lie in the same lane of neighbouring vectors, and successors come into their
//! places by taking even and odd words of pairs, `k` times.
//!
//! The seam: a pass begins before step 0, and its best path tells the overlap there. Few survivors
//! can meet a given overlap at the end, so the last steps are searched back from it by the pruned
//! search ([`crate::cells`]), whose costs of all overlaps are those that the survivors have to go:
//! the least sum is the circle. Since all survivors descend from one path near step 0, it closes;
//! where it does not, a second pass begins in that overlap. How far to search back is a choice
//! between time and error.

use crate::{
    cells::{self, Aligned, CellScratch, CellSearch, HIGH, Pruning, SETTLE},
    isa::Isa,
    metric::Metric,
};
use fracbit_format::trellis::{self, STATE_BITS};

/// Signed magnitudes that the leading bits of a hash pick from.
pub(crate) const VALUES: usize = 128;
/// Seams that are tried.
const TRIES: usize = 3;
/// Costs of which a part is out of range.
const FAR: u16 = 1 << 10;
/// Most new bits of a step.
const MOST_BITS: u32 = 3;

/// How many paths survive, and how the circle is closed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Classes {
    /// Bits of a class.
    pub(crate) bits: u32,
    /// Bits of tape before the seam that are searched back from it.
    pub(crate) back: u32,
    /// What that search leaves out.
    pub(crate) pruning: Pruning,
    /// Bits of tape before the seam at which a pass begins.
    pub(crate) reach: u32,
    /// Units of cost in the rate-distortion bound: more of them round less and saturate earlier.
    pub(crate) units: f64,
}

/// A circular trellis of a `fine` code.
#[derive(Debug)]
pub(crate) struct ClassSearch {
    isa: Isa,
    classes: Classes,
    /// `shifts[t]`: bits by which the window moves from step `t` to `t + 1`.
    shifts: Vec<u32>,
    /// See [`cells::factor`].
    factor: i16,
    /// Grid values by the leading bits of the hash.
    values: [i16; VALUES],
    /// By shift, the bits that the class gives of a state after the shift.
    known: [Aligned<u16>; 1 + MOST_BITS as usize], // (shift, place of the class)
    /// The step that both searches reach.
    meet: usize,
    /// Whether the trace needs the survivors of a step: a state tells the class of one up to `16 -
    /// B` bits before it.
    kept: Vec<bool>,
    /// The search back from the seam.
    cells: CellSearch,
}

/// Working memory of one search.
#[derive(Debug, Default)]
pub(crate) struct ClassScratch {
    survivors: [Aligned<u16>; 2],
    tables: Vec<[u8; VALUES]>,
    /// Low bytes of the survivors' states, at the steps where they are kept.
    lows: Vec<Vec<u8>>, // (step, place of the class)
    /// Costs of whole circles through the survivors.
    totals: Vec<u16>,
    cells: CellScratch,
}

/// What a step needs beside its survivors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassStep<'a> {
    /// New bits of the step.
    pub(crate) new_bits: u32,
    /// What the classes give of the states.
    pub(crate) known: &'a [u16],
    /// Bits that are a survivor's own after the shift.
    pub(crate) own: u16,
    /// Subtracted from all costs: the least, or zero.
    pub(crate) base: u8,
    /// Whether the least of the successors' costs is wanted.
    pub(crate) settles: bool,
    pub(crate) table: &'a [u8; VALUES],
}

impl ClassSearch {
    /// `values` holds the grid value of every state in order, `bound` the rate-distortion bound of
    /// its rate.
    pub(crate) fn new(
        isa: Isa,
        metric: Metric,
        shifts: Vec<u32>,
        values: &[i16],
        bound: f64,
        classes: Classes,
    ) -> Self {
        // Of a larger table the means of neighbours.
        let mut sums = [0i32; VALUES];
        for (x, &value) in (0..=u16::MAX).zip(values) {
            sums[usize::from(trellis::hash_fine(x) >> (STATE_BITS - VALUES.ilog2()))] += i32::from(value);
        }
        let mean = |sum: i32| sum / (1 << (STATE_BITS - VALUES.ilog2()));
        let by_hash = sums.map(|sum| i16::try_from(mean(sum)).expect("a mean of 16-bit integers"));
        let unit = bound * metric.area() / classes.units;
        let cells = CellSearch::new(isa, shifts.clone(), values, unit, classes.pruning);
        let meet = cells.bound_before(classes.back);
        let mut kept = vec![false; meet];
        let (mut at, mut back) = (meet - 1, 0);
        kept[at] = true;
        for t in (0..at).rev() {
            back += shifts[t];
            if classes.bits + back + if t > 0 { shifts[t - 1] } else { 0 } > STATE_BITS {
                (at, back) = (t, 0);
                kept[at] = true;
            }
        }
        kept[0] = true;
        let known = Default::default();
        let mut new = Self {
            isa,
            classes,
            shifts,
            factor: cells::factor(unit),
            values: by_hash,
            known,
            meet,
            kept,
            cells,
        };
        for shift in 0..=MOST_BITS {
            let mut known = vec![0; 1 << classes.bits];
            for class in 0..1usize << classes.bits {
                known[new.place(class)] = new.newest(class) >> shift;
            }
            new.known[shift as usize] = Aligned::from(&known);
        }
        new
    }

    /// The state whose newest bits are those of a class, the others zero.
    fn newest(&self, class: usize) -> u16 {
        u16::try_from(class << (STATE_BITS - self.classes.bits)).expect("a state")
    }

    fn known(&self, shift: u32) -> &[u16] {
        &self.known[shift as usize].all()[..1 << self.classes.bits]
    }

    /// Bits that are a survivor's own after a shift.
    fn own(&self, shift: u32) -> u16 {
        u16::MAX.checked_shr(self.classes.bits + shift).unwrap_or(0)
    }

    /// Where a class is.
    fn place(&self, class: usize) -> usize {
        let lanes = lanes(self.isa);
        let low = self.classes.bits - lanes.ilog2();
        (class & ((1 << low) - 1)) * lanes + (class >> low)
    }

    /// Which class is there.
    fn class(&self, place: usize) -> usize {
        let lanes = lanes(self.isa);
        ((place % lanes) << (self.classes.bits - lanes.ilog2())) | (place / lanes)
    }

    fn new_bits(&self, t: usize) -> u32 {
        self.shifts[(t + self.shifts.len() - 1) % self.shifts.len()]
    }

    /// Finds the states of a closed path near `x` (grid values) and leaves them in `states`;
    /// `false` when there was none or the range of costs did not suffice.
    pub(crate) fn run(&self, x: &[i16], scratch: &mut ClassScratch, states: &mut Vec<u16>) -> bool {
        assert_eq!(x.len(), self.shifts.len(), "one tile");
        scratch.tables.resize(x.len(), [0; VALUES]);
        tables(self.isa, &self.values, self.factor, x, &mut scratch.tables);
        if !self.pass(scratch, None) {
            return false;
        }
        let best = self.best(&scratch.survivors[0].all()[..1 << self.classes.bits]);
        self.trace(scratch, best, states);
        let mask = u16::MAX >> self.new_bits(0);
        let mut seam = states[0] & mask;
        for _ in 0..TRIES {
            if !self.close(x, scratch, seam, states) {
                return false;
            }
            let got = states[0] & mask;
            if got == seam {
                return true;
            }
            seam = got;
        }
        self.pass(scratch, Some(seam)) && self.close(x, scratch, seam, states) && states[0] & mask == seam
    }

    /// Survivors up to the step where both searches meet, from `reach` bits before step 0 or from
    /// an overlap there.
    fn pass(&self, scratch: &mut ClassScratch, start: Option<u16>) -> bool {
        let steps = self.shifts.len();
        let ClassScratch { survivors: [from, to], tables, lows, .. } = scratch;
        let len = 1 << self.classes.bits;
        from.reserve(len);
        to.reserve(len);
        lows.resize_with(self.meet, Vec::new);
        let low = |state: u16| state & 0xFF;
        let cost = if start.is_some() { 0xFF00 } else { 0 };
        for (w, &state) in from.all_mut().iter_mut().zip(self.known(0)) {
            *w = low(state) | cost;
        }
        if let Some(overlap) = start {
            let state = overlap << self.new_bits(0);
            from.all_mut()[self.place(usize::from(state >> (STATE_BITS - self.classes.bits)))] = low(state);
        }
        let mut first = steps;
        let mut before = if start.is_some() { self.classes.reach } else { 0 };
        while before < self.classes.reach {
            first -= 1;
            before += self.shifts[first];
        }
        let mut base = 0;
        for at in first..steps + self.meet {
            let t = at % steps;
            let new_bits = self.new_bits(t);
            let step = ClassStep {
                new_bits,
                known: self.known(new_bits),
                own: self.own(new_bits),
                base,
                settles: at.is_multiple_of(SETTLE),
                table: &tables[t],
            };
            let lows: &mut [u8] = if at >= steps && self.kept[t] {
                lows[t].resize(1 << self.classes.bits, 0);
                &mut lows[t]
            } else {
                &mut []
            };
            base = step_on(self.isa, &step, &from.all()[..len], &mut to.all_mut()[..len], lows);
            if base > HIGH {
                return false;
            }
            std::mem::swap(from, to);
        }
        true
    }

    /// The lowest class that has the least of `words`: their places differ between instruction
    /// sets, the winner must not.
    fn best(&self, words: &[u16]) -> usize {
        let least = words.iter().fold(u16::MAX, |a, &b| a.min(b));
        let places = words.iter().enumerate().filter(|&(_, &w)| w == least).map(|(place, _)| place);
        places.map(|place| self.class(place)).min().expect("the least is one of them")
    }

    /// The states up to where both searches meet of the path that ends in `class`.
    fn trace(&self, scratch: &ClassScratch, class: usize, states: &mut Vec<u16>) {
        states.clear();
        states.resize(self.meet, 0);
        // The state of the last step that was looked up, and how far it has been shifted back
        // since.
        let (mut state, mut back, mut next) = (0, 0, self.meet);
        for t in (0..self.meet).rev() {
            if !self.kept[t] {
                back += self.new_bits(t);
                continue;
            }
            let class = if next == self.meet {
                class
            } else {
                usize::from((state << back) >> (STATE_BITS - self.classes.bits))
            };
            let low = u16::from(scratch.lows[t][self.place(class)]);
            states[t] = self.newest(class) | low & self.own(0);
            // Between two of them a state has its new bits from the later and the others from the
            // earlier one.
            let mut left = back;
            for at in t + 1..next.min(self.meet) {
                left -= self.new_bits(at);
                states[at] = state << left | states[at - 1] >> self.new_bits(at);
            }
            (state, back, next) = (states[t], self.new_bits(t), t);
        }
    }

    /// The best path that ends with overlap `seam`; `false` if none has a cost in range.
    fn close(&self, x: &[i16], scratch: &mut ClassScratch, seam: u16, states: &mut Vec<u16>) -> bool {
        let shift = self.new_bits(self.meet);
        let Some(to_go) = self.cells.to_seam(x, self.meet, seam, &mut scratch.cells) else {
            return false;
        };
        let own = self.own(0);
        let survivors = scratch.survivors[0].all();
        scratch.totals.clear();
        scratch.totals.extend(survivors.iter().zip(self.known(0)).map(|(&w, &known)| {
            let (cost, to_go) = (w >> 8, u16::from(to_go[usize::from((known | w & own) >> shift)]));
            cost + to_go + (u16::from(cost == 255) | u16::from(to_go == 255)) * FAR
        }));
        let best = self.best(&scratch.totals);
        if scratch.totals[self.place(best)] >= FAR {
            return false;
        }
        self.trace(scratch, best, states);
        let overlap = states[self.meet - 1] >> shift;
        self.cells.trace(&mut scratch.cells, self.meet, overlap, states) == seam
    }
}

/// Lanes of 16 bits that `isa` has for this search.
fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Avx512Vbmi => 32,
        Isa::Avx512 | Isa::Avx2 => 16,
        Isa::Scalar => 1,
    }
}

/// Costs of all values for every weight, above the least.
fn tables(isa: Isa, values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
    match lanes(isa) {
        #[cfg(target_arch = "x86_64")]
        32 => crate::classes_simd::tables_avx512(values, factor, x, out),
        #[cfg(target_arch = "x86_64")]
        16 => crate::classes_simd::tables_avx2(values, factor, x, out),
        _ => tables_scalar(values, factor, x, out),
    }
}

/// The reference; compiled again with wider vectors.
#[inline(always)]
pub(crate) fn tables_scalar(values: &[i16; VALUES], factor: i16, x: &[i16], out: &mut [[u8; VALUES]]) {
    for (out, &x) in out.iter_mut().zip(x) {
        let costs = values.map(|v| cells::cost(factor, v, x));
        let least = costs.iter().fold(i16::MAX, |a, &b| a.min(b));
        for (out, cost) in out.iter_mut().zip(costs) {
            *out = (cost - least).min(255) as u8;
        }
    }
}

/// Extends survivors by a step; returns the least cost where the step settles, else 0.
fn step_on(isa: Isa, step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    assert!(matches!(step.new_bits, 1..=MOST_BITS), "few new bits");
    assert_eq!(step.known.len(), from.len(), "a class for every survivor");
    assert!(
        to.len() == from.len() && (lows.is_empty() || lows.len() == from.len()),
        "as many successors as classes"
    );
    let lanes = lanes(isa);
    assert!(from.len() >= lanes << step.new_bits, "as many vectors as rivals");
    match lanes {
        #[cfg(target_arch = "x86_64")]
        32 => crate::classes_simd::step_avx512(step, from, to, lows),
        #[cfg(target_arch = "x86_64")]
        16 => crate::classes_simd::step_avx2(step, from, to, lows),
        _ => step_scalar(step, from, to, lows),
    }
}

/// The reference.
pub(crate) fn step_scalar(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    let ClassStep { new_bits, known, own, base, settles, table } = *step;
    let groups = from.len() >> new_bits;
    to.fill(u16::MAX);
    for (class, (&w, &known)) in from.iter().zip(known).enumerate() {
        let u = known | w >> new_bits & own;
        // 255 stays: of such a cost only a bound is known.
        let cost = if w >> 8 == 255 { 255 } else { (w >> 8) - u16::from(base) };
        for new in 0..1u16 << new_bits {
            let hash = trellis::hash_fine(new << (STATE_BITS - new_bits) | u);
            let cost = (cost + u16::from(table[usize::from(hash >> 9)])).min(255);
            let to = &mut to[usize::from(new) * groups + (class >> new_bits)];
            *to = (*to).min(cost << 8 | u & 0xFF);
        }
    }
    for (low, &w) in lows.iter_mut().zip(&*to) {
        *low = (w & 0xFF) as u8;
    }
    if settles { (to.iter().min().expect("classes") >> 8) as u8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        builtin,
        search::{Scratch, Search},
        train::gaussian_tiles,
    };
    use fracbit_base::Scheme;
    use fracbit_format::trellis::{Steps, state_values};

    const PRUNING: Pruning = Pruning { falls: 1, thirds: 1, always: 3, reach: 0, part: 0 };
    const FEW: Classes = Classes { bits: 11, back: 30, reach: 40, units: 4.0, pruning: PRUNING };

    /// The search of a scheme, the exact one, and grid values of all states.
    fn searches(scheme: &str, classes: Classes) -> (ClassSearch, Search, Metric, Vec<i16>) {
        let scheme: Scheme = scheme.parse().unwrap();
        let (book, steps) = (builtin(scheme).unwrap(), Steps::of(scheme).unwrap());
        let largest = book.entries().iter().map(|e| e.unsigned_abs()).max().unwrap();
        let metric = Metric::new(scheme, f32::from(largest) * book.step());
        let value = |x| state_values(scheme, book.entries(), x)[0];
        let values: Vec<i16> =
            (0..=u16::MAX).map(|x| metric.grid(f32::from(value(x)) * book.step())).collect();
        let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
        let bound = scheme.rate().gaussian_bound();
        let search = ClassSearch::new(Isa::detect(), metric, shifts.clone(), &values, bound, classes);
        (search, Search::new(Isa::detect(), metric, 1, shifts, &values, 128), metric, values)
    }

    #[test]
    fn paths_are_connected_and_closed() {
        for scheme in ["tcq-1", "tcq-1.5", "tcq-2", "tcq-2.75"] {
            let (search, _, metric, _) = searches(scheme, FEW);
            let (mut scratch, mut states) = (ClassScratch::default(), Vec::new());
            for tile in gaussian_tiles(3, 6) {
                let x = tile.map(|w| metric.grid(w));
                assert!(search.run(&x, &mut scratch, &mut states), "{scheme}: no path");
                for (t, &state) in states.iter().enumerate() {
                    let next = states[(t + 1) % states.len()];
                    let shift = search.shifts[t];
                    assert_eq!(
                        next & (u16::MAX >> shift),
                        state >> shift,
                        "{scheme}: steps {t} and the next"
                    );
                }
            }
        }
    }

    #[test]
    fn classes_of_all_bits_lose_what_the_seam_and_8_bit_costs_lose() {
        // With 14 bits at 2 new ones nothing is a survivor's own: this is Viterbi's search.
        let all = Classes { bits: 14, back: 80, reach: 128, units: 4.0, pruning: PRUNING };
        let (search, exact, metric, values) = searches("tcq-2", all);
        let (mut scratch, mut found, mut wanted) = (ClassScratch::default(), Vec::new(), Scratch::default());
        let mut errors = [0f64; 2];
        for tile in gaussian_tiles(4, 12) {
            let x = tile.map(|w| metric.grid(w));
            assert!(search.run(&x, &mut scratch, &mut found), "no path");
            exact.run(&x, &mut wanted);
            for (error, states) in errors.iter_mut().zip([&found, &wanted.states]) {
                let all = states.iter().zip(&x);
                *error += all.map(|(&s, &x)| f64::from(values[usize::from(s)] - x).powi(2)).sum::<f64>();
            }
        }
        let ratio = errors[0] / errors[1];
        assert!((0.98..1.04).contains(&ratio), "{ratio} times the exact error");
    }
}
