//! The pruned search for codes of two or four weights a step.
//!
//! Every overlap has `2^k` continuations, and their values are points spread evenly over the plane
//! (or over four dimensions). Repeated halving of them at the median, in turn by each weight, puts
//! one continuation of every overlap into each of `2^k` *rows*, and the points of a row lie close
//! together. For given weights only the near rows are looked at: 3 to 10 with two weights a step, 7
//! to 24 with four, by rate and effort. They are chosen by a Gaussian model of each row's points.
//!
//! Costs are 8-bit with saturation. A point is stored as 8-bit offsets from the centre of its row,
//! in steps of an eighth of the square root of a unit of cost (two or four times that in wide
//! rows), so that subtraction, `maddubs` and a shift make the cost.
//!
//! Layout: a row holds its continuations by overlap. The cost-to-go of overlap `u` and new bits `n`
//! is `after[(n << (16 - k) | u) >> k]`; costs are turned before a step so that the `2^k` entries
//! for one overlap are neighbours, and a shuffle of 16 to 256 bytes finds them.
//!
//! The tail-biting seam is closed as in [`crate::cells`].

use crate::{
    cells::{Aligned, byte},
    isa::Isa,
    metric::Metric,
};
use fracbit_format::trellis::{STATE_BITS, STATES};

/// Units of cost in the rate-distortion bound of a weight. With 3 the saturation shows for `hyb` at
/// 5 bits (4 %).
const UNITS: f64 = 2.0;
/// Most rows of a step that are looked at.
pub(crate) const MOST: usize = 32;
/// Most weights of a step.
const WEIGHTS: usize = 4;
/// Squared steps of the finest offsets in a unit of cost, as a power of two.
const FINE: u32 = 6;
/// Units of cost that weights outside all rows may have at least, and how much more before their
/// tile is left to the exact search.
const FAR: f64 = 100.0;
const FARTHER: f32 = 16.0;
/// Least cost above which a tile is left to the exact search: a single step may take most of the
/// range.
const HIGH: u8 = 245;
/// Paths from the seam that may end elsewhere before a pass is constrained.
const TRACES: usize = 4;

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowPruning {
    /// Rows of a step.
    pub(crate) count: usize,
    /// Bits of tape beyond the seam.
    pub(crate) reach: usize,
    /// Part of the circle, its last one, that alone is searched again where the path does not
    /// close.
    pub(crate) part: usize,
}

/// A circular trellis of a code with two or four weights a step and the same shift after each.
#[derive(Debug)]
pub(crate) struct RowSearch {
    isa: Isa,
    rows: RowPruning,
    steps: usize,
    pub(crate) tables: Tables,
    /// `score = c + sum over weights of (a x + b) x`, the less the nearer.
    scores: Vec<[f32; SCORES]>, // (block of rows, coefficient)
    places: Vec<Place>, // (row)
    /// Squared distance from the nearest row above which weights are drawn nearer, so that their
    /// cost leaves some range to others.
    far: f32,
}

/// Rows whose scores are computed at once.
pub(crate) const SCORES: usize = 16;
/// Most rows.
pub(crate) const ROWS: usize = 1 << 10;
/// Blocks of scores that are told apart.
pub(crate) const CLASSES: usize = 4;

/// Where a row is.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Grid values.
    centre: [f32; WEIGHTS],
    /// `1 / step` of its offsets.
    per_step: f32,
    /// Half of its extent, in grid values.
    extent: [f32; WEIGHTS],
    /// Steps are `2^wide` times the finest.
    wide: u32,
}

/// What steps read.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) new_bits: u32,
    pub(crate) weights: usize,
    /// Index into the table of costs-to-go.
    pub(crate) picks: Aligned, // (row, overlap)
    /// Offsets of the values. Of a block of overlaps as wide as a vector: the first 8 of every 16,
    /// then the others, in pairs of weights.
    pub(crate) offsets: Aligned, // (row, block, pair, half, 16 overlaps, overlap, weight of the pair)
    states: Vec<u16>, // (row, overlap)
    /// Overlaps of a block, as a power of two.
    width_log: u32,
}

impl Tables {
    /// Overlaps of a step.
    pub(crate) fn overlaps(&self) -> usize {
        STATES >> self.new_bits
    }

    /// Where the offset of a weight is.
    #[inline]
    fn offset(&self, row: usize, overlap: usize, weight: usize) -> usize {
        let width = 1 << self.width_log;
        let (block, within) = (overlap & !(width - 1), overlap & (width - 1));
        let (lane, half) = (within & !15, within / 8 % 2);
        let first = (row * self.overlaps() + block) * self.weights;
        first + ((weight / 2 * 2 + half) << self.width_log) + lane + within % 8 * 2 + weight % 2
    }

    /// Cost of a continuation.
    #[inline]
    fn cost(&self, near: &Near, overlap: usize) -> u8 {
        let mut all = 0;
        for pair in 0..self.weights / 2 {
            let at = self.offset(usize::from(near.row), overlap, 2 * pair);
            let v = [self.offsets.all()[at], self.offsets.all()[at + 1]];
            all = square([near.x[2 * pair], near.x[2 * pair + 1]], v).saturating_add(all);
        }
        u8::try_from(all >> near.shift).unwrap_or(u8::MAX)
    }
}

/// A row of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Near {
    pub(crate) row: u16,
    /// The weights in offsets of the row.
    pub(crate) x: [i8; WEIGHTS],
    /// Squared steps of the row in a unit of cost, as a power of two.
    pub(crate) shift: u32,
}

/// Working memory of one search.
#[derive(Debug, Default)]
pub(crate) struct RowScratch {
    near: Vec<Near>, // (step, row)
    /// Costs-to-go at every step of the circle, and two beyond.
    costs: Vec<Aligned>,
    turned: [Aligned; 2],
}

/// What a step needs beside its costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStep<'a> {
    pub(crate) tables: &'a Tables,
    pub(crate) near: &'a [Near],
    /// Smallest cost of `after`, subtracted from it.
    pub(crate) base: u8,
}

impl RowSearch {
    /// `values` holds the grid values of every state in order, `bound` the rate-distortion bound of
    /// its rate.
    pub(crate) fn new(
        isa: Isa,
        metric: Metric,
        weights: usize,
        shifts: &[u32],
        values: &[i16],
        bound: f64,
        rows: RowPruning,
    ) -> Self {
        assert_eq!(values.len(), STATES * weights, "values of every state");
        assert!(isa.is_supported(), "{} is not available here", isa.name());
        assert!(shifts.iter().all(|&k| k == shifts[0] && (2..=10).contains(&k)), "one shift of 2 to 10 bits");
        assert!(weights == 2 || weights == 4, "two or four weights a step");
        let (new_bits, error) = (shifts[0], bound * metric.area());
        let count = 1usize << new_bits;
        let rows = RowPruning { count: rows.count.min(count).min(MOST), ..rows };
        let overlaps = STATES >> new_bits;
        let states = halve(values, weights, new_bits);
        let mut tables = Tables {
            new_bits,
            weights,
            picks: Aligned::default(),
            offsets: Aligned::default(),
            states,
            width_log: width(isa).ilog2(),
        };
        let fine = (error / UNITS).sqrt() / f64::from(1u32 << FINE).sqrt();
        let mut scores = vec![[0f32; SCORES]; count.div_ceil(SCORES) * (2 * weights + 1)];
        // Entries that no row has score worst.
        scores
            .iter_mut()
            .skip(2 * weights)
            .step_by(2 * weights + 1)
            .for_each(|c| *c = [f32::INFINITY; SCORES]);
        let mut offsets = vec![0; STATES * weights];
        let mut places = Vec::with_capacity(count);
        for row in 0..count {
            let states = &tables.states[row * overlaps..][..overlaps];
            let mut place = Place::default();
            let mut widest = 0f64;
            let (block, lane) = (row / SCORES * (2 * weights + 1), row % SCORES);
            let mut constant = 0.0;
            for i in 0..weights {
                let values = states.iter().map(|&s| f64::from(values[usize::from(s) * weights + i]));
                #[expect(clippy::cast_precision_loss, reason = "at most 2^14")]
                let mean = values.clone().sum::<f64>() / overlaps as f64;
                #[expect(clippy::cast_precision_loss, reason = "at most 2^14")]
                let variance =
                    values.clone().map(|v| (v - mean).powi(2)).sum::<f64>() / overlaps as f64 + 1.5 * error;
                let (least, most) =
                    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
                constant += variance.ln() + mean * mean / variance;
                #[expect(clippy::cast_possible_truncation, reason = "scores are rough")]
                {
                    scores[block + 2 * i][lane] = (1.0 / variance) as f32;
                    scores[block + 2 * i + 1][lane] = (-2.0 * mean / variance) as f32;
                    place.centre[i] = f64::midpoint(least, most) as f32;
                    place.extent[i] = ((most - least) / 2.0) as f32;
                }
                widest = widest.max((most - least) / 2.0);
            }
            #[expect(clippy::cast_possible_truncation, reason = "scores are rough")]
            {
                scores[block + 2 * weights][lane] = constant as f32;
            }
            place.wide = (0..2).find(|&e| widest <= 64.0 * fine * f64::from(1u32 << e)).unwrap_or(2);
            #[expect(clippy::cast_possible_truncation, reason = "a factor")]
            {
                place.per_step = (1.0 / (fine * f64::from(1u32 << place.wide))) as f32;
            }
            for (overlap, &state) in states.iter().enumerate() {
                for i in 0..weights {
                    let value = values[usize::from(state) * weights + i];
                    offsets[tables.offset(row, overlap, i)] =
                        offset(f32::from(value), place.centre[i], place.per_step).cast_unsigned();
                }
            }
            places.push(place);
        }
        let picks: Vec<u8> = tables.states.iter().map(|&s| byte(pick(new_bits, usize::from(s)))).collect();
        tables.picks = Aligned::from(&picks);
        tables.offsets = Aligned::from(&offsets);
        #[expect(clippy::cast_possible_truncation, reason = "a distance")]
        let far = (FAR * error / UNITS) as f32;
        Self { isa, rows, steps: shifts.len(), tables, scores, places, far }
    }

    /// Steps beyond the seam.
    fn reach(&self) -> usize {
        self.rows.reach.div_ceil(self.tables.new_bits as usize).min(self.steps)
    }

    /// Finds the states of a closed path near `x` (grid values) and leaves them in `states`;
    /// `false` when the range of costs did not suffice.
    pub(crate) fn run(&self, x: &[i16], scratch: &mut RowScratch, states: &mut Vec<u16>) -> bool {
        assert_eq!(x.len(), self.steps * self.tables.weights, "one tile");
        if !self.near(x, &mut scratch.near) {
            return false;
        }
        let mut start = vec![0; self.tables.overlaps()];
        if !self.backward(scratch, self.steps + self.reach(), 0, &start) {
            return false;
        }
        let first = &scratch.costs[0].all()[..start.len()];
        let least = first.iter().fold(u8::MAX, |a, &b| a.min(b));
        let best = first.iter().position(|&c| c == least).expect("the least is one of them");
        let mut seam = u16::try_from(best).expect("an overlap");
        states.clear();
        let (mut before, mut end) = (seam, self.trace(scratch, 0, seam, states));
        for _ in 1..TRACES {
            // The `hyb` code gives a state and its complement the same weights: half of all paths
            // end in the complement.
            if end == seam || end == before {
                break;
            }
            (before, seam) = (seam, end);
            end = self.trace(scratch, 0, seam, states);
        }
        if end == seam {
            return true;
        }
        start.fill(u8::MAX);
        start[usize::from(seam)] = 0;
        // From a path that begins at the seam, first only its end is changed, so that it arrives
        // there.
        [self.steps - self.steps / self.rows.part, 0].into_iter().any(|to| {
            let overlap = if to == 0 { seam } else { states[to - 1] >> self.tables.new_bits };
            states.truncate(to);
            self.backward(scratch, self.steps, to, &start) && self.trace(scratch, to, overlap, states) == seam
        })
    }

    /// The nearest rows of every step; `false` if some weights are too far from all.
    fn near(&self, x: &[i16], near: &mut Vec<Near>) -> bool {
        near.clear();
        match self.tables.weights {
            2 => self.near_of::<2>(x, near),
            _ => self.near_of::<4>(x, near),
        }
    }

    fn near_of<const V: usize>(&self, x: &[i16], near: &mut Vec<Near>) -> bool {
        let count = self.rows.count;
        let mut found = [(f32::INFINITY, 0u16); MOST];
        (0..).zip(&mut found[..count]).for_each(|(row, found)| found.1 = row);
        let mut scores = Scores { sums: [[0.0; SCORES]; ROWS / SCORES], close: [0; ROWS] };
        for x in x.as_chunks::<V>().0 {
            let mut x = x.map(f32::from);
            if count < self.places.len() {
                scores.least(self.isa, &self.scores, &x, &mut found[..count]);
            }
            // Without scores the rows are few, and large.
            let place = &self.places[usize::from(found[0].1)];
            let beyond: [f32; V] = std::array::from_fn(|i| {
                let d = x[i] - place.centre[i];
                let far = d.abs() - place.extent[i];
                if far > 0.0 { far.copysign(d) } else { 0.0 }
            });
            let distance = beyond.iter().map(|d| d * d).sum::<f32>();
            if count < self.places.len() && distance > self.far {
                if distance > FARTHER * self.far {
                    return false;
                }
                let less = 1.0 - (self.far / distance).sqrt();
                x.iter_mut().zip(beyond).for_each(|(x, beyond)| *x -= less * beyond);
            }
            let first = near.len();
            for &(_, row) in &found[..count] {
                let place = &self.places[usize::from(row)];
                let (mut offsets, mut out) = ([0; WEIGHTS], false);
                for i in 0..V {
                    offsets[i] = offset(x[i], place.centre[i], place.per_step);
                    out |= offsets[i].unsigned_abs() == 127;
                }
                // Costs would be too small where the weights are out of range: the nearest row
                // takes the place of such a row.
                let new = Near { row, x: offsets, shift: FINE - 2 * place.wide };
                near.push(if out && near.len() > first { near[first] } else { new });
            }
        }
        true
    }

    /// Costs-to-go from step `from` of the unrolled circle, where they are `start`, down to step
    /// `to`; those of the circle stay.
    fn backward(&self, scratch: &mut RowScratch, from: usize, to: usize, start: &[u8]) -> bool {
        let (steps, overlaps) = (self.steps, self.tables.overlaps());
        let RowScratch { near, costs, turned } = scratch;
        costs.resize_with(steps + 3, Aligned::default);
        costs.iter_mut().chain(turned.iter_mut()).for_each(|c| c.reserve(overlaps));
        let slot = |t: usize| if t <= steps { t } else { steps + 1 + t % 2 };
        costs[slot(from)].all_mut()[..overlaps].copy_from_slice(start);
        let mut base = 0;
        for t in (to..from).rev() {
            let [after, before] = costs.get_disjoint_mut([slot(t + 1), slot(t)]).expect("two arrays");
            let near = &near[t % steps * self.rows.count..][..self.rows.count];
            let step = RowStep { tables: &self.tables, near, base };
            let after = turn(self.isa, self.tables.new_bits, &after.all()[..overlaps], turned);
            base = step_on(self.isa, &step, after, &mut before.all_mut()[..overlaps]);
            if base > HIGH {
                return false;
            }
        }
        true
    }

    /// Follows the best path from step `from` with overlap `start` around the circle; returns the
    /// overlap at the end. `states` may hold another such path: where the two meet they go on
    /// together.
    fn trace(&self, scratch: &RowScratch, from: usize, start: u16, states: &mut Vec<u16>) -> u16 {
        let RowScratch { near, costs, .. } = scratch;
        let new_bits = self.tables.new_bits;
        let mut overlap = usize::from(start);
        let known = states.len();
        states.resize(self.steps, 0);
        for (t, near) in near.chunks(self.rows.count).enumerate().skip(from) {
            let after = costs[t + 1].all();
            let mut best = (u32::MAX, 0);
            for near in near {
                let state = self.tables.states[usize::from(near.row) * self.tables.overlaps() + overlap];
                let total = u32::from(after[usize::from(state) >> new_bits])
                    + u32::from(self.tables.cost(near, overlap));
                if total < best.0 {
                    best = (total, state);
                }
            }
            let old = std::mem::replace(&mut states[t], best.1);
            overlap = usize::from(best.1) >> new_bits;
            if t < known && usize::from(old) >> new_bits == overlap {
                return states[self.steps - 1] >> new_bits;
            }
        }
        u16::try_from(overlap).expect("an overlap")
    }
}

/// Scores of all rows for the weights of one step.
struct Scores {
    sums: [[f32; SCORES]; ROWS / SCORES],
    /// Rows up to a limit.
    close: [u16; ROWS],
}

impl Scores {
    /// The rows of least score, the least one first; where scores are equal those of the lower
    /// numbers.
    fn least(&mut self, isa: Isa, factors: &[[f32; SCORES]], x: &[f32], found: &mut [(f32, u16)]) {
        let sums = &mut self.sums[..factors.len() / (2 * x.len() + 1)];
        // As many scores as rows that are wanted are not above as many least ones of classes: a
        // limit that few rows are below.
        let mut classes = [[f32::INFINITY; SCORES]; CLASSES];
        score(isa, factors, x, sums, &mut classes);
        // As integers of the same order, which are quicker to select from.
        let order = |bits: i32| bits ^ ((bits >> 31) & i32::MAX);
        let mut keys = [0; SCORES * CLASSES];
        let mut len = SCORES * CLASSES.min(sums.len());
        if found.len() <= SCORES / 2 {
            // Fewer to select from, for a few more rows below the limit.
            let [first, others @ ..] = &mut classes;
            for class in others {
                first.iter_mut().zip(class).for_each(|(a, b)| *a = if *b < *a { *b } else { *a });
            }
            len = SCORES;
        }
        let scores = classes.as_flattened();
        keys.iter_mut()
            .zip(&scores[..len])
            .for_each(|(key, score)| *key = order(score.to_bits().cast_signed()));
        let keys = &mut keys[..len];
        let limit = *keys.select_nth_unstable(found.len() - 1).1;
        let limit = f32::from_bits(order(limit).cast_unsigned());
        let close = collect(isa, sums, limit, &mut self.close);
        for (len, &row) in self.close[..close].iter().enumerate() {
            let sum = sums.as_flattened()[usize::from(row)];
            let mut at = len.min(found.len());
            while at > 0 && sum < found[at - 1].0 {
                if at < found.len() {
                    found[at] = found[at - 1];
                }
                at -= 1;
            }
            if at < found.len() {
                found[at] = (sum, row);
            }
        }
    }
}

/// Scores of all rows, and the least of each class: lane and block modulo [`CLASSES`].
fn score(
    isa: Isa,
    factors: &[[f32; SCORES]],
    x: &[f32],
    sums: &mut [[f32; SCORES]],
    classes: &mut [[f32; SCORES]; CLASSES],
) {
    match width(isa) {
        #[cfg(target_arch = "x86_64")]
        64 => crate::rows_simd::score_avx512(factors, x, sums, classes),
        #[cfg(target_arch = "x86_64")]
        32 => crate::rows_simd::score_avx2(factors, x, sums, classes),
        _ => {
            for (block, (sums, factors)) in sums.iter_mut().zip(factors.chunks(2 * x.len() + 1)).enumerate() {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum = factors[2 * x.len()][lane];
                    for (i, &x) in x.iter().enumerate() {
                        *sum += (factors[2 * i][lane] * x + factors[2 * i + 1][lane]) * x;
                    }
                    let least = &mut classes[block % CLASSES][lane];
                    *least = if *sum < *least { *sum } else { *least };
                }
            }
        }
    }
}

/// Writes the rows up to a limit to `close`; returns how many there are.
fn collect(isa: Isa, sums: &[[f32; SCORES]], limit: f32, close: &mut [u16; ROWS]) -> usize {
    match width(isa) {
        #[cfg(target_arch = "x86_64")]
        64 => crate::rows_simd::collect_avx512(sums, limit, close),
        #[cfg(target_arch = "x86_64")]
        32 => crate::rows_simd::collect_avx2(sums, limit, close),
        _ => {
            let rows = (0..).zip(sums.as_flattened()).filter(|(_, sum)| **sum <= limit);
            rows.zip(close).map(|((row, _), close)| *close = row).count()
        }
    }
}

/// Steps from the centre of a row, rounded.
#[inline(always)]
fn offset(value: f32, centre: f32, per_step: f32) -> i8 {
    let steps = (value - centre) * per_step;
    let steps = if steps > 127.0 { 127.0 } else { steps };
    let steps = if steps < -127.0 { -127.0 } else { steps };
    // Above 2^23 the last bit of an f32 is 1: this rounds.
    ((steps + 12_582_912.0).to_bits() as u8).cast_signed()
}

/// Index of a continuation into the costs-to-go that one block of overlaps reads, after they were
/// turned.
fn pick(new_bits: u32, state: usize) -> usize {
    let (new, overlap) = (state >> (STATE_BITS - new_bits), state & ((STATES >> new_bits) - 1));
    match new_bits {
        // Entries of several overlaps.
        ..=6 => (overlap & 63 & !((1 << new_bits) - 1)) | new,
        7 | 8 => new,
        _ => state >> new_bits,
    }
}

/// States by row and overlap: the continuations of every overlap halved at the median by each
/// weight in turn.
fn halve(values: &[i16], weights: usize, new_bits: u32) -> Vec<u16> {
    fn part(states: &mut [u16], weight: usize, weights: usize, values: &[i16]) {
        let half = states.len() / 2;
        if half > 0 {
            states.select_nth_unstable_by_key(half, |&s| (values[usize::from(s) * weights + weight], s));
            let (low, high) = states.split_at_mut(half);
            let next = (weight + 1) % weights;
            part(low, next, weights, values);
            part(high, next, weights, values);
        }
    }
    let overlaps = STATES >> new_bits;
    let mut rows = vec![0; STATES];
    for overlap in 0..overlaps {
        let mut states: Vec<u16> = (0..=u16::MAX).skip(overlap).step_by(overlaps).collect();
        part(&mut states, 0, weights, values);
        for (row, state) in states.into_iter().enumerate() {
            rows[row * overlaps + overlap] = state;
        }
    }
    rows
}

/// Bytes of a vector.
fn width(isa: Isa) -> usize {
    match isa {
        Isa::Avx512Vbmi => 64,
        Isa::Avx512 | Isa::Avx2 => 32,
        Isa::Scalar => 16,
    }
}

/// Costs `(new, rest)` of a step as `(rest, new)`, which its tables index. From 8 bits on there is
/// nothing to turn.
fn turn<'a>(isa: Isa, new_bits: u32, after: &'a [u8], spare: &'a mut [Aligned; 2]) -> &'a [u8] {
    if new_bits >= 8 {
        return after;
    }
    let [to, other] = spare;
    let (to, other) = (&mut to.all_mut()[..after.len()], &mut other.all_mut()[..after.len()]);
    match width(isa) {
        #[cfg(target_arch = "x86_64")]
        64 => crate::rows_simd::turn_avx512(new_bits, after, to, other),
        #[cfg(target_arch = "x86_64")]
        32 => crate::rows_simd::turn_avx2(new_bits, after, to, other),
        _ => turn_scalar(new_bits, after, to, other),
    }
    to
}

/// The reference; compiled again with wider vectors.
#[inline(always)]
pub(crate) fn turn_scalar(new_bits: u32, after: &[u8], to: &mut [u8], other: &mut [u8]) {
    // Halves that interleave move the first bit of the index to the end.
    fn interleave(from: &[u8], to: &mut [u8]) {
        let (low, high) = from.split_at(from.len() / 2);
        let (pairs, _) = to.as_chunks_mut::<2>();
        for ((pair, &low), &high) in pairs.iter_mut().zip(low).zip(high) {
            *pair = [low, high];
        }
    }
    let (mut a, mut b) = if new_bits.is_multiple_of(2) { (other, to) } else { (to, other) };
    interleave(after, a);
    for _ in 1..new_bits {
        interleave(a, b);
        std::mem::swap(&mut a, &mut b);
    }
}

/// `before[u] = min over the rows of (after of its continuation - base) + its cost`, saturating;
/// returns the least of them.
fn step_on(isa: Isa, step: &RowStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    let overlaps = step.tables.overlaps();
    assert!(after.len() == overlaps && before.len() == overlaps, "a cost for every overlap");
    assert_eq!(1 << step.tables.width_log, width(isa), "tables for these vectors");
    match width(isa) {
        #[cfg(target_arch = "x86_64")]
        64 => crate::rows_simd::step_avx512(step, after, before),
        #[cfg(target_arch = "x86_64")]
        32 => crate::rows_simd::step_avx2(step, after, before),
        _ => step_scalar(step, after, before),
    }
}

/// First entry of the turned costs that the picks of `overlap` count from.
#[inline]
pub(crate) fn table_of(new_bits: u32, overlap: usize) -> usize {
    match new_bits {
        ..=6 => overlap & !63,
        7 => overlap & !127,
        _ => 0,
    }
}

/// The reference.
fn step_scalar(step: &RowStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    const BLOCK: usize = 16;
    let RowStep { tables, near, base } = *step;
    let (weights, overlaps) = (tables.weights, before.len());
    let mut least = u8::MAX;
    for (block, out) in before.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let first = block * BLOCK;
        let table = &after[table_of(tables.new_bits, first)..];
        *out = [u8::MAX; BLOCK];
        for near in near {
            let at = usize::from(near.row) * overlaps + first;
            let mut sums = [0u16; BLOCK];
            let pairs =
                tables.offsets.all()[at * weights..][..BLOCK * weights].as_chunks::<{ 2 * BLOCK }>().0;
            for (v, x) in pairs.iter().zip(near.x.as_chunks::<2>().0) {
                let square = |overlap: usize| square(*x, [v[2 * overlap], v[2 * overlap + 1]]);
                sums = std::array::from_fn(|overlap| sums[overlap].saturating_add(square(overlap)));
            }
            let costs = sums.map(|sum| byte(usize::from((sum >> near.shift).min(255))));
            let picks = &tables.picks.all()[at..][..BLOCK];
            for ((out, cost), &pick) in out.iter_mut().zip(costs).zip(picks) {
                *out = table[usize::from(pick)].saturating_sub(base).saturating_add(cost).min(*out);
            }
        }
        least = out.iter().fold(least, |a, &b| a.min(b));
    }
    least
}

/// Squared distance of a pair of weights as in `maddubs` of the magnitudes by themselves, where
/// that of -128 is negative once.
#[inline(always)]
fn square(x: [i8; 2], v: [u8; 2]) -> u16 {
    let square = |x: i8, v: u8| {
        let d = i16::from(x.saturating_sub(v.cast_signed()));
        if d == -128 { -(1 << 14) } else { d * d }
    };
    square(x[0], v[0]).saturating_add(square(x[1], v[1])).cast_unsigned()
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

    /// The search of a scheme, the exact one, and grid values of all states.
    fn searches(scheme: &str, isa: Isa, rows: RowPruning) -> (RowSearch, Search, Metric, Vec<i16>) {
        let scheme: Scheme = scheme.parse().unwrap();
        let (book, steps) = (builtin(scheme).unwrap(), Steps::of(scheme).unwrap());
        let largest = book.entries().iter().map(|e| e.unsigned_abs()).max().unwrap();
        let metric = Metric::new(scheme, f32::from(largest) * book.step());
        let weights = steps.weights;
        let state = |x| state_values(scheme, book.entries(), x);
        let values: Vec<i16> = (0..=u16::MAX)
            .flat_map(|x| state(x).into_iter().take(weights))
            .map(|v| metric.grid(f32::from(v) * book.step()))
            .collect();
        let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
        let bound = scheme.rate().gaussian_bound();
        let search = RowSearch::new(isa, metric, weights, &shifts, &values, bound, rows);
        (search, Search::new(Isa::detect(), metric, weights, shifts, &values, 128), metric, values)
    }

    const FEW: RowPruning = RowPruning { count: 6, reach: 32, part: 4 };

    #[test]
    fn a_row_has_one_continuation_of_every_overlap() {
        for scheme in ["tcq-hyb-1", "tcq-fast-2", "tcq-fast-5"] {
            let (search, _, _, _) = searches(scheme, Isa::Scalar, FEW);
            let mut seen = vec![false; STATES];
            for (i, &state) in search.tables.states.iter().enumerate() {
                let overlaps = search.tables.overlaps();
                assert_eq!(usize::from(state) % overlaps, i % overlaps, "{scheme}");
                assert!(
                    !std::mem::replace(&mut seen[usize::from(state)], true),
                    "{scheme}: state {state} twice"
                );
            }
        }
    }

    #[test]
    fn a_step_equals_its_definition_on_every_instruction_set() {
        // Every number of new bits, two and four weights.
        let schemes =
            ["hyb-1", "hyb-1.5", "hyb-2", "hyb-2.5", "hyb-3", "hyb-3.5", "hyb-4", "hyb-4.5", "hyb-5"];
        for scheme in schemes.into_iter().chain(["fast-1", "fast-1.5", "fast-2"]) {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let (search, _, metric, _) = searches(&format!("tcq-{scheme}"), isa, FEW);
                let (tables, mut scratch) = (&search.tables, RowScratch::default());
                let x = gaussian_tiles(5, 1)[0].map(|w| metric.grid(w));
                assert!(search.near(&x, &mut scratch.near), "{scheme}: near rows");
                let near = &scratch.near[..search.rows.count];
                let overlaps = tables.overlaps();
                let after: Vec<u8> = (0..overlaps).map(|i| byte(7 + i * i % 249)).collect();
                let cost = |overlap: usize, near: &Near| {
                    let state = tables.states[usize::from(near.row) * overlaps + overlap];
                    let next = usize::from(state) >> tables.new_bits;
                    (after[next] - 7).saturating_add(tables.cost(near, overlap))
                };
                let want: Vec<u8> =
                    (0..overlaps).map(|u| near.iter().map(|near| cost(u, near)).min().unwrap()).collect();
                let (mut spare, mut got) = <([Aligned; 2], _)>::default();
                spare.iter_mut().for_each(|spare: &mut Aligned| spare.reserve(overlaps));
                Vec::resize(&mut got, overlaps, 0);
                let turned = turn(isa, tables.new_bits, &after, &mut spare);
                let least = step_on(isa, &RowStep { tables, near, base: 7 }, turned, &mut got);
                assert!(got == want, "{scheme} on {}", isa.name());
                assert_eq!(Some(&least), want.iter().min(), "{scheme} on {}", isa.name());
            }
        }
    }

    #[test]
    fn all_rows_lose_what_8_bit_costs_lose_and_paths_close() {
        for (scheme, part) in [("tcq-fast-1", 4), ("tcq-fast-3", 1), ("tcq-hyb-2", 1)] {
            let all = RowPruning { count: MOST, reach: 256, part };
            let (search, exact, metric, values) = searches(scheme, Isa::detect(), all);
            let (mut scratch, mut found, mut wanted) =
                (RowScratch::default(), Vec::new(), Scratch::default());
            let (weights, mut errors) = (search.tables.weights, [0f64; 2]);
            for tile in gaussian_tiles(4, 12) {
                let x = tile.map(|w| metric.grid(w));
                assert!(search.run(&x, &mut scratch, &mut found), "{scheme}: no path");
                for (t, &state) in found.iter().enumerate() {
                    let next = usize::from(found[(t + 1) % found.len()]);
                    let shift = search.tables.new_bits;
                    assert_eq!(next % (STATES >> shift), usize::from(state) >> shift, "{scheme}: step {t}");
                }
                exact.run(&x, &mut wanted);
                for (error, states) in errors.iter_mut().zip([&found, &wanted.states]) {
                    let path = states.iter().flat_map(|&s| &values[usize::from(s) * weights..][..weights]);
                    *error += path.zip(&x).map(|(&v, &x)| (f64::from(v) - f64::from(x)).powi(2)).sum::<f64>();
                }
            }
            let ratio = errors[0] / errors[1];
            assert!((0.98..1.02).contains(&ratio), "{scheme}: {ratio} times the exact error");
        }
    }
}
