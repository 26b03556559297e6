//! The search with one survivor per class: the fastest one, for codes of one weight a step and 64 magnitudes.
//!
//! Forward in time, states are put into classes by their newest `B` bits, and of each class one path survives, whose older bits
//! are its own (reduced-state sequence estimation: Eyuboglu and Qureshi, IEEE Trans. Comm. 36(1), 1988). `2^11` classes instead of
//! the `2^14` overlaps of 2 bits, with all branches, lose 3 % without the seam, and a vector instruction does as much.
//!
//! A survivor is 16 bits: cost above, the low byte of its state below, so that a minimum of words is a choice of paths, and equal
//! costs have one winner everywhere. Costs count from the least of the step before and saturate at 255. With `u = s >> k` and `h(u) = u (u + c)` the `2^k` successors of a state have the hashes
//! `h(u) + n (2 u + c) 2^(16 - k)`: one product for all. A hash finds its cost in a table of 128 bytes.
//!
//! Layout: the lane of a class is its high bits, the vector its low bits. The `2^k` rivals for a successor then lie in the same lane of
//! neighbouring vectors, and successors come into their places by taking even and odd words of pairs, `k` times.
//!
//! The seam: a pass begins `reach` weights before step 0 and stops where the bits of the first overlap begin to come round again. Its
//! best path tells that overlap; every survivor is then led through the bits that are known, and the least wins. Since they all
//! descend from one path near step 0, it closes; where it does not, a second pass begins in that overlap. To leave some choice, more
//! classes survive in the last steps.

use crate::{
    cells::{HIGH, UNITS},
    isa::Isa,
    metric::Metric,
};
use fracbit_format::trellis::{self, STATE_BITS};

/// Signed magnitudes that the leading bits of a hash pick from.
pub(crate) const VALUES: usize = 128;
/// Seams that are tried.
const TRIES: usize = 3;

/// How many paths survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Classes {
    /// Bits of a class.
    pub(crate) bits: u32,
    /// The same near the end.
    pub(crate) wide: u32,
    /// Steps that count as such.
    pub(crate) window: usize,
    /// Steps before the seam.
    pub(crate) reach: usize,
}

/// A circular trellis of a `fine` code with 64 magnitudes.
#[derive(Debug)]
pub(crate) struct ClassSearch {
    isa: Isa,
    classes: Classes,
    /// `shifts[t]`: bits by which the window moves from step `t` to `t + 1`.
    shifts: Vec<u32>,
    /// `1 / unit` of cost on the squared grid.
    per_unit: f32,
    /// Grid values by the leading bits of the hash.
    values: [f32; VALUES],
    /// By bits of a class and shift, the bits that the class gives of a state after the shift.
    known: Vec<((u32, u32), Vec<u16>)>, // (place of the class)
    /// Bits of a class after every step.
    bits: Vec<u32>,
    /// Whether the trace needs the survivors of a step: a state tells the class of one up to `16 - B` bits before it.
    kept: Vec<bool>,
    /// Steps at the end in which all new bits are those of the first overlap.
    tail: usize,
}

/// Working memory of one search.
#[derive(Debug, Default)]
pub(crate) struct ClassScratch {
    survivors: [Vec<u16>; 2],
    tables: Vec<[u8; VALUES]>,
    /// Low bytes of the survivors' states, at the steps where they are kept.
    lows: Vec<Vec<u8>>, // (step, place of the class)
    totals: Vec<u16>,
}

/// What a step needs beside its survivors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassStep<'a> {
    /// New bits of the step.
    pub(crate) new_bits: u32,
    /// Whether the successors of `2^new_bits` survivors compete for each class; otherwise all survive.
    pub(crate) merge: bool,
    /// What the classes give of the states.
    pub(crate) known: &'a [u16],
    /// Bits that are a survivor's own after the shift.
    pub(crate) own: u16,
    /// Least cost, subtracted from all.
    pub(crate) base: u8,
    pub(crate) table: &'a [u8; VALUES],
}

impl ClassSearch {
    /// `values` holds the grid value of every state in order, `bound` the rate-distortion bound of its rate.
    pub(crate) fn new(
        isa: Isa,
        metric: Metric,
        shifts: Vec<u32>,
        values: &[i16],
        bound: f64,
        classes: Classes,
    ) -> Self {
        let steps = shifts.len();
        // Of a larger table the means of neighbours.
        let mut by_hash = [0f32; VALUES];
        for (x, &value) in (0..=u16::MAX).zip(values) {
            by_hash[usize::from(trellis::hash_fine(x) >> (STATE_BITS - VALUES.ilog2()))] += f32::from(value);
        }
        by_hash.iter_mut().for_each(|sum| *sum *= 1.0 / (1u32 << (STATE_BITS - VALUES.ilog2())) as f32);
        let all = shifts.clone();
        let new_bits = |t: usize| all[(t + steps - 1) % steps];
        let (mut tail, mut bits) = (0, STATE_BITS - new_bits(0));
        while bits >= new_bits(steps - 1 - tail) {
            bits -= new_bits(steps - 1 - tail);
            tail += 1;
        }
        let mut of_class = classes.bits;
        let bits: Vec<u32> = (0..steps - tail)
            .map(|t| {
                let wide = t + tail + classes.window >= steps && of_class + new_bits(t) <= classes.wide;
                of_class += if wide { new_bits(t) } else { 0 };
                of_class
            })
            .collect();
        let mut kept = vec![false; bits.len()];
        let mut next = bits.len() - 1;
        kept[next] = true;
        while next > 0 {
            let room = |t: usize| bits[t] + (t + 1..=next).map(new_bits).sum::<u32>() <= STATE_BITS;
            next = (0..next).find(|&t| (t..next).all(room)).expect("the step before is in reach");
            kept[next] = true;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a factor")]
        let per_unit = (UNITS / (bound * metric.area())) as f32;
        let mut new =
            Self { isa, classes, shifts, per_unit, values: by_hash, known: Vec::new(), bits, kept, tail };
        let mut last = classes.bits;
        new.know(last, 0);
        for t in 0..new.bits.len() {
            new.know(last, new_bits(t));
            last = new.bits[t];
        }
        for &k in &all {
            new.know(classes.bits, k);
        }
        new.know(last, 0);
        new
    }

    /// Tabulates what classes of `bits` bits give of states after a shift.
    fn know(&mut self, bits: u32, shift: u32) {
        if self.known.iter().all(|(key, _)| *key != (bits, shift)) {
            assert!(bits + shift <= STATE_BITS, "a class knows nothing of the bits that leave");
            let mut known = vec![0; 1 << bits];
            for class in 0..1usize << bits {
                let state = u16::try_from(class << (STATE_BITS - bits)).expect("a state");
                known[self.place(class, bits)] = state >> shift;
            }
            self.known.push(((bits, shift), known));
        }
    }

    fn known(&self, bits: u32, shift: u32) -> &[u16] {
        let found = self.known.iter().find(|(key, _)| *key == (bits, shift));
        &found.expect("tabulated when the search was made").1
    }

    /// Where a class is.
    fn place(&self, class: usize, bits: u32) -> usize {
        let lanes = lanes(self.isa);
        let low = bits - lanes.ilog2();
        (class & ((1 << low) - 1)) * lanes + (class >> low)
    }

    /// Which class is there.
    fn class(&self, place: usize, bits: u32) -> usize {
        let lanes = lanes(self.isa);
        ((place % lanes) << (bits - lanes.ilog2())) | (place / lanes)
    }

    /// The lowest class that has `word`: their places differ between instruction sets, the winner must not.
    fn first(&self, words: &[u16], word: u16, bits: u32) -> usize {
        let (chunks, _) = words.as_chunks::<16>();
        let have = chunks
            .iter()
            .enumerate()
            .filter(|(_, chunk)| chunk.iter().fold(false, |any, &w| any | (w == word)));
        let places =
            have.flat_map(|(i, chunk)| (0..16).filter(move |&j| chunk[j] == word).map(move |j| 16 * i + j));
        places.map(|place| self.class(place, bits)).min().expect("the word is one of them")
    }

    fn new_bits(&self, t: usize) -> u32 {
        self.shifts[(t + self.shifts.len() - 1) % self.shifts.len()]
    }

    /// Finds the states of a closed path near `x` (grid values) and leaves them in `states`; `false` when there was none or the range
    /// of costs did not suffice.
    pub(crate) fn run(&self, x: &[i16], scratch: &mut ClassScratch, states: &mut Vec<u16>) -> bool {
        assert_eq!(x.len(), self.shifts.len(), "one tile");
        scratch.tables.resize(x.len(), [0; VALUES]);
        tables(self.isa, &self.values, self.per_unit, x, &mut scratch.tables);
        if !self.pass(scratch, None) {
            return false;
        }
        let last = self.bits[self.bits.len() - 1];
        let survivors = &scratch.survivors[0][..1 << last];
        let best = self.first(survivors, survivors.iter().fold(u16::MAX, |a, &b| a.min(b)), last);
        self.trace(scratch, best, states);
        let mask = u16::MAX >> self.new_bits(0);
        let mut seam = states[0] & mask;
        for _ in 0..TRIES {
            if !self.close(scratch, seam, states) {
                return false;
            }
            let got = states[0] & mask;
            if got == seam {
                return true;
            }
            seam = got;
        }
        self.pass(scratch, Some(seam)) && self.close(scratch, seam, states) && states[0] & mask == seam
    }

    /// Survivors up to the tail, from `reach` steps before step 0 or from an overlap there.
    fn pass(&self, scratch: &mut ClassScratch, start: Option<u16>) -> bool {
        let steps = self.shifts.len();
        let ClassScratch { survivors: [from, to], tables, lows, .. } = scratch;
        let most = 1 << self.bits[self.bits.len() - 1];
        from.resize(most, 0);
        to.resize(most, 0);
        lows.resize_with(self.bits.len(), Vec::new);
        let mut bits = self.classes.bits;
        let low = |state: u16| state & 0xFF;
        let cost = if start.is_some() { 0xFF00 } else { 0 };
        for (w, &state) in from.iter_mut().zip(self.known(bits, 0)) {
            *w = low(state) | cost;
        }
        if let Some(overlap) = start {
            let state = overlap << self.new_bits(0);
            from[self.place(usize::from(state >> (STATE_BITS - bits)), bits)] = low(state);
        }
        let before = if start.is_some() { 0 } else { self.classes.reach };
        let mut base = 0;
        for at in steps - before..steps + self.bits.len() {
            let t = at % steps;
            let new_bits = self.new_bits(t);
            let next = if at < steps { bits } else { self.bits[t] };
            let step = ClassStep {
                new_bits,
                merge: next == bits,
                known: self.known(bits, new_bits),
                own: u16::MAX.checked_shr(bits + new_bits).unwrap_or(0),
                base,
                table: &tables[t],
            };
            let lows: &mut [u8] = if at >= steps && self.kept[t] {
                lows[t].resize(1 << next, 0);
                &mut lows[t]
            } else {
                &mut []
            };
            base = step_on(self.isa, &step, &from[..1 << bits], &mut to[..1 << next], lows);
            if base > HIGH {
                return false;
            }
            std::mem::swap(from, to);
            bits = next;
        }
        true
    }

    /// The states up to the tail of the path that ends in `class`.
    fn trace(&self, scratch: &ClassScratch, class: usize, states: &mut Vec<u16>) {
        states.clear();
        states.resize(self.shifts.len(), 0);
        // The state of the last step that was looked up, and how far it has been shifted back since.
        let (mut state, mut back, mut next) = (0, 0, self.bits.len());
        for t in (0..self.bits.len()).rev() {
            if !self.kept[t] {
                back += self.new_bits(t);
                continue;
            }
            let bits = self.bits[t];
            let class = if next == self.bits.len() {
                class
            } else {
                usize::from((state << back) >> (STATE_BITS - bits))
            };
            let low = u16::from(scratch.lows[t][self.place(class, bits)]);
            let own = u16::MAX.checked_shr(bits).unwrap_or(0);
            states[t] = u16::try_from(class << (STATE_BITS - bits)).expect("a state") | low & own;
            // Between two of them a state has its new bits from the later and the others from the earlier one.
            let mut left = back;
            for at in t + 1..next.min(self.bits.len()) {
                left -= self.new_bits(at);
                states[at] = state << left | states[at - 1] >> self.new_bits(at);
            }
            (state, back, next) = (states[t], self.new_bits(t), t);
        }
    }

    /// The best path that ends with overlap `seam`; `false` if none has a cost in range.
    fn close(&self, scratch: &mut ClassScratch, seam: u16, states: &mut Vec<u16>) -> bool {
        let steps = self.shifts.len();
        // The states of the tail as far as the seam tells them, the last one first.
        let mut top = seam << self.new_bits(0);
        let mut forced = Vec::with_capacity(self.tail);
        for t in (steps - self.tail..steps).rev() {
            let k = self.new_bits(t);
            forced.push((k, top & !(u16::MAX >> k)));
            top <<= k;
        }
        forced.reverse();
        let first = steps - self.tail;
        let bits = self.bits[first - 1];
        // The step before the tail may know some of its bits too.
        let rest = STATE_BITS - self.new_bits(0) - forced.iter().map(|f| f.0).sum::<u32>();
        let ClassScratch { survivors, tables, totals, .. } = &mut *scratch;
        totals.resize(1 << bits, 0);
        let tail = Tail {
            forced: &forced,
            tables: &tables[first..],
            known: self.known(bits, 0),
            own: u16::MAX.checked_shr(bits).unwrap_or(0),
            top,
            told: !u16::MAX.checked_shr(rest).unwrap_or(0),
        };
        let least = tail_on(self.isa, &tail, &survivors[0][..1 << bits], totals);
        if least >= 0xFF00 {
            return false;
        }
        let best = self.first(totals, least, bits);
        self.trace(scratch, best, states);
        for (t, (k, new)) in (first..).zip(forced) {
            states[t] = new | states[t - 1] >> k;
        }
        true
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
fn tables(isa: Isa, values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
    match lanes(isa) {
        #[cfg(target_arch = "x86_64")]
        32 => crate::classes_simd::tables_avx512(values, per_unit, x, out),
        #[cfg(target_arch = "x86_64")]
        16 => crate::classes_simd::tables_avx2(values, per_unit, x, out),
        _ => tables_scalar(values, per_unit, x, out),
    }
}

/// The reference; compiled again with wider vectors.
#[inline(always)]
pub(crate) fn tables_scalar(values: &[f32; VALUES], per_unit: f32, x: &[i16], out: &mut [[u8; VALUES]]) {
    for (out, &x) in out.iter_mut().zip(x) {
        let x = f32::from(x);
        let costs = values.map(|v| (v - x) * (v - x) * per_unit);
        let least = costs.iter().fold(f32::INFINITY, |a, &b| if b < a { b } else { a });
        for (out, cost) in out.iter_mut().zip(costs) {
            let above = cost - least;
            // Above 2^23 the last bit of an f32 is 1: this rounds.
            *out = ((if above < 255.0 { above } else { 255.0 }) + 8_388_608.0).to_bits() as u8;
        }
    }
}

/// Extends survivors by a step; returns the least cost.
fn step_on(isa: Isa, step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    assert!(matches!(step.new_bits, 1 | 2), "one or two new bits");
    assert_eq!(step.known.len(), from.len(), "a class for every survivor");
    let next = if step.merge { from.len() } else { from.len() << step.new_bits };
    assert!(to.len() == next && (lows.is_empty() || lows.len() == next), "as many successors as classes");
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
fn step_scalar(step: &ClassStep<'_>, from: &[u16], to: &mut [u16], lows: &mut [u8]) -> u8 {
    let ClassStep { new_bits, merge, known, own, base, table } = *step;
    let rivals = if merge { 1 << new_bits } else { 1 };
    let groups = from.len() / rivals;
    to.fill(u16::MAX);
    for (class, (&w, &known)) in from.iter().zip(known).enumerate() {
        let u = known | w >> new_bits & own;
        let cost = (w >> 8) - u16::from(base);
        for new in 0..1u16 << new_bits {
            let hash = trellis::hash_fine(new << (STATE_BITS - new_bits) | u);
            let cost = (cost + u16::from(table[usize::from(hash >> 9)])).min(255);
            let to = &mut to[usize::from(new) * groups + class / rivals];
            *to = (*to).min(cost << 8 | u & 0xFF);
        }
    }
    for (low, &w) in lows.iter_mut().zip(&*to) {
        *low = (w & 0xFF) as u8;
    }
    (to.iter().min().expect("classes") >> 8) as u8
}

/// New bits that are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail<'a> {
    /// How many there are in each step, and where they stand in the state.
    pub(crate) forced: &'a [(u32, u16)],
    pub(crate) tables: &'a [[u8; VALUES]],
    /// What the classes give of the states before these steps, and what bits are a survivor's own.
    pub(crate) known: &'a [u16],
    pub(crate) own: u16,
    /// Bits of those states that are known too, and which they are.
    pub(crate) top: u16,
    pub(crate) told: u16,
}

/// Leads all survivors through known new bits; `totals` are their costs, in the high byte. Returns the least.
fn tail_on(isa: Isa, tail: &Tail<'_>, from: &[u16], totals: &mut [u16]) -> u16 {
    assert!(tail.known.len() == from.len() && totals.len() == from.len(), "a class for every survivor");
    match lanes(isa) {
        #[cfg(target_arch = "x86_64")]
        32 => crate::classes_simd::tail_avx512(tail, from, totals),
        _ => tail_scalar(tail, from, totals),
    }
}

/// The reference.
fn tail_scalar(tail: &Tail<'_>, from: &[u16], totals: &mut [u16]) -> u16 {
    let mut least = u16::MAX;
    for ((&w, &known), total) in from.iter().zip(tail.known).zip(totals) {
        let mut state = known | w & tail.own;
        let mut cost = if (state ^ tail.top) & tail.told == 0 { w >> 8 } else { 255 };
        for (&(k, new), table) in tail.forced.iter().zip(tail.tables) {
            state = new | state >> k;
            cost = (cost + u16::from(table[usize::from(trellis::hash_fine(state) >> 9)])).min(255);
        }
        *total = cost << 8;
        least = least.min(*total);
    }
    least
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

    const FEW: Classes = Classes { bits: 11, wide: 13, window: 24, reach: 20 };

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
        for scheme in ["tcq-1", "tcq-1.5", "tcq-2"] {
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
        let all = Classes { bits: 14, wide: 14, window: 0, reach: 128 };
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
