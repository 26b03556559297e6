//! The pruned search: 8-bit costs and few branches.
//!
//! Every overlap has `2^k` continuations, and `x (x + c)` sends their values to `2^k` different
//! *cells*: ranges of the sorted, signed table. Only cells near the weight matter: three of them
//! lose nothing that can be measured, two lose 4 to 5 %. Which of the continuations lie in those
//! cells depends on the overlap; a byte shuffle fetches their costs-to-go, and another one the cost
//! of the branch from the 32 levels of a cell. Costs are 8-bit with saturation. A vector of 64
//! overlaps so takes 5 (with VBMI) or 7 instructions for each of the 2 or 3 cells, whatever the
//! rate; the exact search with its 16-bit costs takes 10 for each of the `2^k` branches.
//!
//! Layout: lanes of 16 bytes. The cost-to-go of overlap `u` and new bits `n` is `after[n << (16 -
//! k - k') | u >> k']`. Rows of equal `n` are loaded and transposed, so that 16 bytes hold all
//! rows of `16 >> r` columns, `r = min(k, k', 4)`. Where `k > r` a second table holds the other
//! half of the rows; where `k' > r` two vectors of overlaps share a table. The new bits that lead
//! to a cell are `n = (cell - a) b` with `b` the same for all overlaps with the same low bits, so
//! that going from one cell to another adds a constant to the indices of a lane. With VBMI a
//! shuffle reaches 64 bytes: there is one lane of them, tables are transposed once, and results
//! not at all. Up to `k = 2` the row of a table and the level of an overlap then fit one byte, and
//! a step reads half as much.
//!
//! The tail-biting seam costs a tenth of a pass instead of a whole one: the pass goes around the
//! circle and `reach` weights further. The best path from step 0 arrives there again with some
//! overlap, and the best path that starts with that overlap ends with it too when the two have
//! merged (nine tiles in ten). Otherwise the end of the circle (`fast`) or a second pass is
//! constrained to it. Costs out of range stay so when the least one is subtracted: nothing is known
//! of them but a bound. A tile whose costs do not fit 8 bits, because its weights lie far outside
//! the table, is left to the exact search.

use crate::{isa::Isa, metric::Metric};
use fracbit_format::trellis::{self, FINE_ADD, STATE_BITS, STATES};

/// Levels of a cell: all its entries (at 1 to 1.75 bits neighbouring ones are equal).
pub(crate) const LEVELS: usize = 32;
/// Bytes of a lane: a table of costs-to-go, and as many overlaps.
pub(crate) const LANE: usize = 16;
/// Bytes of the one lane that vectors are where a shuffle reaches all of it (VBMI).
pub(crate) const WIDE_LANE: usize = 64;
/// Most cells of a step that are looked at.
pub(crate) const MOST: usize = 3;
/// Grid values of one place, as a power of two: the nearest cells are tabulated by place.
const PLACE: u32 = 4;
/// Units of cost in the rate-distortion bound. With 2 the rounding shows, with 5 the saturation
/// does (4 % at 4 bits).
const UNITS: f64 = 3.0;
/// Steps from one subtraction of the least cost to the next: in between it grows by a few units.
pub(crate) const SETTLE: usize = 4;
/// Paths from the seam that may end elsewhere before a pass is constrained.
const TRACES: usize = 4;
/// Steps that the trace decides at once.
const GROUP: usize = 3;
/// Most paths of as many steps, and some more.
const PATHS: usize = MOST.pow(GROUP as u32).next_power_of_two();
/// Least cost above which a tile is left to the exact search: too little of the range is left.
pub(crate) const HIGH: u8 = 200;

/// How much is pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pruning {
    /// A third cell is looked at in every how many steps that take in more bits than the next one
    /// (in none: 2.5 bits lose 9 %), ...
    pub(crate) falls: usize,
    /// ... in every how many of all ...
    pub(crate) thirds: usize,
    /// ... and in all with at least this many new bits.
    pub(crate) always: u32,
    /// Bits of tape beyond the seam.
    pub(crate) reach: usize,
    /// Where a path from the seam ends elsewhere, bits of tape before the seam that are searched
    /// once more, before the whole circle is.
    pub(crate) part: u32,
}

/// A circular trellis of a code with one weight per step.
#[derive(Debug)]
pub(crate) struct CellSearch {
    isa: Isa,
    pruning: Pruning,
    /// `shifts[t]`: bits by which the window moves from step `t` to `t + 1`.
    shifts: Vec<u32>,
    /// See [`factor`].
    factor: i16,
    /// One for each pair of shifts that occurs.
    kinds: Vec<Kind>,
    /// Index of its kind and number of cells that are looked at, for every step.
    plan: Vec<(usize, usize)>,
}

/// Tables of a step by the new bits before it and the shift after it.
#[derive(Debug)]
pub(crate) struct Kind {
    /// New bits in the state of this step.
    pub(crate) new_bits: u32,
    /// Shift to the following step.
    pub(crate) shift: u32,
    /// Index into the table of costs-to-go for cell 0; if `packed`, its row in the upper three bits
    /// and the level below.
    pub(crate) picks: Aligned, // (vector, lane, overlap in the lane)
    /// Columns of overlaps, to be added to rows if `packed`.
    pub(crate) columns: Aligned, // (overlap of two vectors)
    /// What to add to that index for each cell, modulo the size of the table.
    pub(crate) turns: Vec<[u8; LANE]>, // (cell, overlap in the lane)
    /// Level in the cell, unless `packed`.
    pub(crate) levels: Aligned, // (vector, lane, overlap in the lane)
    /// Value of a level on the metric's grid.
    values: Vec<i16>, // (cell, level)
    /// The nearest cells, the nearest first.
    nearest: Vec<[u8; MOST]>, // (place of the weight)
}

/// What the continuations of an overlap have in common.
#[derive(Clone, Copy, Debug)]
struct Spread {
    overlap: u16,
    /// Cell of the continuation by zeros.
    cell: u16,
    /// Turns a difference of cells into new bits.
    inverse: u16,
    /// Level in the cell, the same for all.
    level: usize,
}

impl Kind {
    /// Rows that are transposed together, as a power of two.
    pub(crate) fn rows_log(&self) -> u32 {
        self.new_bits.min(self.shift).min(4)
    }

    /// Whether row and level of an overlap are one byte in lanes of `bytes`: half of what a step
    /// reads.
    pub(crate) fn packed(&self, bytes: usize) -> bool {
        bytes == WIDE_LANE && self.new_bits <= 2
    }

    /// How the continuations of `overlap` lie: `h(n << (16 - k) | u) = h(u) + n (2 u + c) 2^(16 -
    /// k)`, with `h(u) = u (u + c)`.
    #[inline]
    fn spread(&self, overlap: u16) -> Spread {
        let (hash, factor) = (trellis::hash_fine(overlap), overlap.wrapping_mul(2).wrapping_add(FINE_ADD));
        let (cell, below) =
            (hash >> (STATE_BITS - self.new_bits), STATE_BITS - self.new_bits - LEVELS.ilog2());
        // An odd number is its own inverse modulo 8; a round of Newton's doubles the bits.
        let inverse = factor.wrapping_mul(2u16.wrapping_sub(factor.wrapping_mul(factor)));
        Spread { overlap, cell, inverse, level: usize::from(hash >> below) % LEVELS }
    }

    /// The state that continues an overlap in `cell`.
    #[inline]
    fn lead(&self, spread: Spread, cell: u8) -> u16 {
        let new = u16::from(cell).wrapping_sub(spread.cell).wrapping_mul(spread.inverse);
        new << (STATE_BITS - self.new_bits) | spread.overlap
    }

    fn new(new_bits: u32, shift: u32, lanes: (usize, usize), values: &[i16]) -> Self {
        let cells = 1usize << new_bits;
        let cell_of = |x: usize| {
            let hash = usize::from(trellis::hash_fine(u16::try_from(x).expect("a state")));
            (hash >> (STATE_BITS - new_bits), hash >> (STATE_BITS - new_bits - LEVELS.ilog2()) & (LEVELS - 1))
        };
        let mut sums = vec![(0f64, 0f64); cells * LEVELS];
        for (x, &value) in values.iter().enumerate() {
            let (cell, level) = cell_of(x);
            let sum = &mut sums[cell * LEVELS + level];
            *sum = (sum.0 + f64::from(value), sum.1 + 1.0);
        }
        #[expect(clippy::cast_possible_truncation, reason = "means of 16-bit integers")]
        let values: Vec<f32> = sums.into_iter().map(|(sum, count)| (sum / count) as f32).collect();
        let range = |cell: &[f32]| {
            cell.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), &v| (a.min(v), b.max(v)))
        };
        let ranges: Vec<(f32, f32)> = values.chunks(LEVELS).map(range).collect();
        let nearest = |x: f32| {
            let outside = |&(low, high): &(f32, f32)| (low - x).max(x - high).max(0.0);
            let mut order: Vec<(f32, u8)> = ranges.iter().map(outside).zip(0..).collect();
            order.sort_by(|a, b| a.partial_cmp(b).expect("distances are numbers"));
            std::array::from_fn(|i| order.get(i).map_or(0, |&(_, cell)| cell))
        };
        // From the middle of each place.
        let middles =
            (i16::MIN..=i16::MAX).step_by(1 << PLACE).map(|x| f32::from(x) + f32::from(1u8 << (PLACE - 1)));
        let nearest = middles.map(nearest).collect();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "`as` saturates; means of 16-bit integers do not"
        )]
        let values = values.into_iter().map(|v| v.round() as i16).collect();
        let mut new = Self {
            new_bits,
            shift,
            picks: Aligned::default(),
            columns: Aligned::default(),
            turns: Vec::new(),
            levels: Aligned::default(),
            values,
            nearest,
        };
        new.arrange(lanes);
        new
    }

    /// Fills the tables that depend on the lanes of vectors: how many, and of how many bytes.
    fn arrange(&mut self, (lanes, bytes): (usize, usize)) {
        let rows_log = self.rows_log();
        let columns = bytes >> rows_log;
        let width = lanes * bytes;
        let mut blocks = Vec::new();
        let all = STATES >> (self.new_bits + self.shift);
        for first in (0..all).step_by(width) {
            for part in 0..1 << rows_log {
                for share in 0..1usize << (self.shift - rows_log) {
                    for lane in 0..lanes {
                        let column = first + lane * bytes + part * columns;
                        let block = (column << self.shift) + share * bytes;
                        blocks.push(block);
                    }
                }
            }
        }
        // With two tables of 16 bytes the index has 5 bits, which stand at the top of the byte:
        // sums wrap around either way.
        let size = if self.new_bits > rows_log { 2 * bytes } else { bytes };
        let up = if size == 2 * LANE { 3 } else { 0 };
        let row = |overlap: usize, cell: usize| {
            let state = self.lead(self.spread(word(overlap)), byte(cell));
            usize::from(state) >> (STATE_BITS - self.new_bits)
        };
        let column = |overlap: usize| (overlap >> self.shift) % columns;
        let index = |overlap: usize, cell: usize| row(overlap, cell) * columns + column(overlap);
        let packed = self.packed(bytes);
        let (mut picks, mut levels) = (Vec::new(), Vec::new());
        for &block in &blocks {
            for overlap in block..block + bytes {
                let level = self.spread(word(overlap)).level;
                if packed {
                    picks.push(byte(row(overlap, 0) * LEVELS + level));
                    continue;
                }
                picks.push(byte(index(overlap, 0) << up));
                // The second half of the levels has bits 4 and 7 set.
                levels.push(byte(level | ((level / LANE) << 7)));
            }
        }
        // `x (x + c)` turns the cells of all overlaps with the same low bits by the same step for
        // each new bit.
        let turn =
            |cell: usize, lane: usize| byte(((index(lane, cell) + size - index(lane, 0)) % size) << up);
        let turns = (0..1usize << self.new_bits).map(|cell| std::array::from_fn(|lane| turn(cell, lane)));
        let turns: Vec<[u8; LANE]> = turns.collect();
        for (cell, turns) in turns.iter().enumerate() {
            for overlap in 0..STATES >> self.new_bits {
                let turned = (index(overlap, 0) << up) + usize::from(turns[overlap % LANE]);
                assert_eq!(turned % (size << up), index(overlap, cell) << up, "one turn for all");
            }
        }
        self.turns = turns;
        self.picks = Aligned::from(&picks);
        self.columns = Aligned::from(&std::array::from_fn::<_, { 2 * WIDE_LANE }, _>(|i| byte(column(i))));
        self.levels = Aligned::from(&levels);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the callers' values are overlaps")]
fn word(value: usize) -> u16 {
    value as u16
}

#[expect(clippy::cast_possible_truncation, reason = "the callers' values are below 256")]
pub(crate) fn byte(value: usize) -> u8 {
    value as u8
}

/// Numbers of which the first is at the start of a cache line.
#[derive(Debug, Default)]
pub(crate) struct Aligned<T = u8> {
    all: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    const LINE: usize = 64;

    /// Makes room for `len` numbers; those that were there may be lost.
    pub(crate) fn reserve(&mut self, len: usize) {
        let more = Self::LINE / size_of::<T>();
        if self.all.len() < len + more {
            self.all = vec![T::default(); len + more];
            self.start = self.all.as_ptr().align_offset(Self::LINE).min(more);
        }
    }

    pub(crate) fn from(numbers: &[T]) -> Self {
        let mut new = Self::default();
        new.reserve(numbers.len());
        new.all_mut()[..numbers.len()].copy_from_slice(numbers);
        new
    }

    /// As many as there was room made for, and perhaps more.
    pub(crate) fn all(&self) -> &[T] {
        &self.all[self.start..]
    }

    pub(crate) fn all_mut(&mut self) -> &mut [T] {
        &mut self.all[self.start..]
    }
}

/// What a step needs beside its costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CellStep<'a> {
    pub(crate) kind: &'a Kind,
    /// Subtracted from `after`: its smallest cost, or zero.
    pub(crate) base: u8,
    /// Whether the least of `before` is wanted.
    pub(crate) settles: bool,
    /// Columns of overlaps that are looked at, from a multiple of [`WIDE_LANE`] to another: `1 <<
    /// shift` overlaps each.
    pub(crate) columns: (usize, usize),
    /// The cells that are looked at and the costs of their levels.
    pub(crate) cells: &'a [(u8, [u8; LEVELS])],
}

/// The cells of one step, nearest first.
pub(crate) type Near = [(u8, [u8; LEVELS]); MOST];

/// Working memory of one search.
#[derive(Debug, Default)]
pub(crate) struct CellScratch {
    near: Vec<Near>,
    /// Costs-to-go at every bound.
    costs: Vec<Aligned>,
    /// Costs-to-go between bounds.
    between: [Aligned; 2],
}

/// A unit of cost: the squared difference on the grid of a code whose rate-distortion bound is
/// `bound`.
pub(crate) fn unit(metric: Metric, bound: f64) -> f64 {
    bound * metric.area() / UNITS
}

impl CellSearch {
    /// `values` holds the grid value of every state of a `fine` code in order, `unit` the squared
    /// difference that costs one.
    pub(crate) fn new(isa: Isa, shifts: Vec<u32>, values: &[i16], unit: f64, pruning: Pruning) -> Self {
        assert_eq!(values.len(), STATES, "values of every state");
        assert!(isa.is_supported(), "{} is not available here", isa.name());
        let steps = shifts.len();
        let mut pairs: Vec<_> = (0..steps).map(|t| (shifts[(t + steps - 1) % steps], shifts[t])).collect();
        pairs.sort_unstable();
        pairs.dedup();
        let lanes = match isa {
            Isa::Scalar => (1, LANE),
            Isa::Avx2 => (2, LANE),
            Isa::Avx512 => (4, LANE),
            Isa::Avx512Vbmi => (1, WIDE_LANE),
        };
        let kinds = pairs.into_iter().map(|(k, shift)| Kind::new(k, shift, lanes, values)).collect();
        let mut new = Self { isa, pruning, shifts, factor: factor(unit), kinds, plan: Vec::new() };
        new.plan = (0..steps).map(|t| new.planned(t)).collect();
        new
    }

    fn steps(&self) -> usize {
        self.shifts.len()
    }

    /// Steps beyond the seam.
    fn reach(&self) -> usize {
        let bits: u32 = self.shifts.iter().sum();
        (self.pruning.reach * self.steps()).div_ceil(bits as usize)
    }

    /// The kind of step `t` and how many cells are looked at.
    fn planned(&self, t: usize) -> (usize, usize) {
        let steps = self.steps();
        let (new_bits, shift) = (self.shifts[(t + steps - 1) % steps], self.shifts[t]);
        let found = self.kinds.iter().position(|kind| (kind.new_bits, kind.shift) == (new_bits, shift));
        let Pruning { falls, thirds, always, .. } = self.pruning;
        let third = new_bits > shift && (t / 2).is_multiple_of(falls)
            || new_bits >= always
            || t.is_multiple_of(thirds);
        let count = (if third { MOST } else { 2 }).min(1 << new_bits);
        (found.expect("a kind for every step of the circle"), count)
    }

    /// The kind of a step of the unrolled circle, which goes around less than twice.
    #[inline]
    fn kind(&self, t: usize) -> &Kind {
        let t = if t < self.plan.len() { t } else { t - self.plan.len() };
        &self.kinds[self.plan[t].0]
    }

    /// Finds the states of a closed path near `x` (grid values) and leaves them in `states`;
    /// `false` when the range of costs did not suffice.
    pub(crate) fn run(&self, x: &[i16], scratch: &mut CellScratch, states: &mut Vec<u16>) -> bool {
        let steps = self.steps();
        assert_eq!(x.len(), steps, "one tile");
        self.near(x, 0, &mut scratch.near);
        let from = steps + self.reach();
        if !self.backward(scratch, from, 0, None) {
            return false;
        }
        let overlaps = STATES >> self.kind(0).new_bits;
        let first = &scratch.costs[0].all()[..overlaps];
        let least = first.iter().fold(u8::MAX, |a, &b| a.min(b));
        let best = first.iter().position(|&c| c == least).expect("the least is one of them");
        let mut seam = u16::try_from(best).expect("an overlap");
        // Whether a path in range begins there: the weights behind the seam may not suit the
        // overlap at all.
        let begins = |scratch: &CellScratch, seam: u16| scratch.costs[0].all()[usize::from(seam)] < u8::MAX;
        states.clear();
        let mut start = seam;
        for _ in 0..TRACES {
            let end = self.trace(scratch, 0, seam, states);
            if end == seam {
                return true;
            }
            (start, seam) = (seam, end);
            if !begins(scratch, seam) {
                return false;
            }
        }
        if self.pruning.part > 0 {
            let from = self.bound_before(self.pruning.part);
            states.truncate(from);
            let overlap = states[from - 1] >> self.shifts[from - 1];
            if self.backward(scratch, steps, from, Some(start))
                && scratch.costs[from / GROUP].all()[usize::from(overlap)] < u8::MAX
                && self.trace(scratch, from, overlap, states) == start
            {
                return true;
            }
        }
        states.clear();
        self.backward(scratch, steps, 0, Some(seam))
            && begins(scratch, seam)
            && self.trace(scratch, 0, seam, states) == seam
    }

    /// The last step from which at least `bits` of tape are left before the seam and that
    /// [`Self::trace`] can begin with.
    pub(crate) fn bound_before(&self, bits: u32) -> usize {
        let (mut t, mut left) = (self.steps(), 0);
        while left < bits {
            t -= 1;
            left += self.shifts[t];
        }
        t / GROUP * GROUP
    }

    /// Costs of all overlaps at step `from`, a bound, to end the circle with overlap `seam`; `None`
    /// where their range did not suffice.
    pub(crate) fn to_seam<'a>(
        &self,
        x: &[i16],
        from: usize,
        seam: u16,
        scratch: &'a mut CellScratch,
    ) -> Option<&'a [u8]> {
        self.near(x, from, &mut scratch.near);
        let done = self.backward(scratch, self.steps(), from, Some(seam));
        done.then(|| &scratch.costs[from / GROUP].all()[..STATES >> self.kind(from).new_bits])
    }

    /// The nearest cells of every weight from step `from` on, with the costs of their levels above
    /// the least.
    fn near(&self, x: &[i16], from: usize, near: &mut Vec<Near>) {
        near.resize(x.len(), [(0, [0; LEVELS]); MOST]);
        for ((&x, &(kind, count)), one) in x.iter().zip(&self.plan).zip(near).skip(from) {
            let kind = &self.kinds[kind];
            one.iter_mut().zip(kind.nearest[place(x)]).for_each(|(one, cell)| one.0 = cell);
            levels(self.isa, kind.values.as_chunks().0, x, self.factor, &mut one[..count]);
        }
    }

    /// The cells of a step that are looked at.
    #[inline]
    fn cells<'a>(&self, t: usize, near: &'a Near) -> &'a [(u8, [u8; LEVELS])] {
        &near[..self.plan[t].1]
    }

    /// Bound `i` of the trace is step `i * GROUP`, the last one the end of the circle.
    fn bounds(&self) -> usize {
        self.steps().div_ceil(GROUP) + 1
    }

    /// Costs-to-go from step `from` of the unrolled circle, where all paths end or only those with
    /// overlap `end`, down to step `until`; those at bounds stay.
    fn backward(&self, scratch: &mut CellScratch, from: usize, until: usize, end: Option<u16>) -> bool {
        let steps = self.steps();
        let most = STATES >> self.shifts.iter().min().expect("a trellis has steps");
        let bounds = self.bounds();
        let CellScratch { near, costs, between, .. } = scratch;
        costs.resize_with(bounds, Aligned::default);
        costs.iter_mut().chain(between.iter_mut()).for_each(|c| c.reserve(most));
        // The bound at a position within the circle.
        let bound = |t: usize| {
            let exact = t.is_multiple_of(GROUP) && t < steps || t == steps;
            exact.then(|| t.div_ceil(GROUP))
        };
        let mut current = bound(from);
        let overlaps = STATES >> self.kind(from).new_bits;
        let start = current.map_or(&mut between[0], |i| &mut costs[i]).all_mut();
        start[..overlaps].fill(if end.is_some() { u8::MAX } else { 0 });
        if let Some(end) = end {
            start[usize::from(end)] = 0;
        }
        let mut base = 0;
        // While few overlaps lead to the end, those are neighbours, and only they are looked at, in
        // whole vectors of any width.
        let mut alive = end.map_or((0, overlaps), |end| (usize::from(end), usize::from(end) + 1));
        for t in (until..from).rev() {
            let target = bound(t);
            let kind = self.kind(t);
            let all = STATES >> (kind.new_bits + kind.shift);
            let columns = if alive.1 - alive.0 < all {
                let (low, high) = (alive.0 % all, (alive.1 - 1) % all);
                (low / WIDE_LANE * WIDE_LANE, (high / WIDE_LANE + 1) * WIDE_LANE)
            } else {
                (0, all)
            };
            alive = (columns.0 << kind.shift, columns.1 << kind.shift);
            if columns.1 - columns.0 < all {
                let before = match target {
                    Some(i) => &mut costs[i],
                    None if current.is_none() => &mut between[1],
                    None => &mut between[0],
                };
                before.all_mut()[..STATES >> kind.new_bits].fill(u8::MAX);
            }
            let cells = self.cells(t % steps, &near[t % steps]);
            let step = CellStep { kind, base, settles: t.is_multiple_of(SETTLE), columns, cells };
            let [first, second] = &mut *between;
            base = match (current, target) {
                (Some(a), Some(b)) => {
                    let [after, before] = costs.get_disjoint_mut([a, b]).expect("two bounds");
                    step_on(self.isa, &step, after.all(), before.all_mut())
                }
                (Some(a), None) => step_on(self.isa, &step, costs[a].all(), first.all_mut()),
                (None, Some(b)) => step_on(self.isa, &step, first.all(), costs[b].all_mut()),
                (None, None) => {
                    let least = step_on(self.isa, &step, first.all(), second.all_mut());
                    std::mem::swap(first, second);
                    least
                }
            };
            if base > HIGH {
                return false;
            }
            current = target;
        }
        true
    }

    /// Follows the best path with overlap `start` at step `from`, a bound, to the end of the
    /// circle; returns the overlap there. `states` may hold another such path: where the two meet
    /// they go on together.
    pub(crate) fn trace(
        &self,
        scratch: &mut CellScratch,
        from: usize,
        start: u16,
        states: &mut Vec<u16>,
    ) -> u16 {
        let CellScratch { near, costs: kept, .. } = scratch;
        let mut overlap = start;
        let other = states.len() > from;
        states.resize(self.steps(), 0);
        for (i, kept) in kept.iter().enumerate().take(self.bounds()).skip(from / GROUP + 1) {
            let (from, to) = ((i - 1) * GROUP, (i * GROUP).min(self.steps()));
            // Cost and overlap of every path between two bounds, and the states that it leads
            // through.
            let (mut paths, mut leads, mut len) = ([(0u32, overlap); PATHS], [[0u16; PATHS]; GROUP], 1);
            for ((t, near), leads) in near.iter().enumerate().take(to).skip(from).zip(&mut leads) {
                let kind = self.kind(t);
                if self.plan[t].1 == 2 {
                    branch::<2>(kind, near, &mut paths, len, leads);
                    len *= 2;
                } else {
                    branch::<MOST>(kind, near, &mut paths, len, leads);
                    len *= MOST;
                }
            }
            let mut best = (u32::MAX, 0);
            for (index, &(cost, u)) in paths.iter().enumerate().take(len) {
                let total = cost + summand(kept.all()[usize::from(u)]);
                best = if total < best.0 { (total, index) } else { best };
            }
            let (mut index, mut step) = (best.1, [0; GROUP]);
            overlap = paths[index].1;
            for (t, (step, leads)) in (from..to).zip(step.iter_mut().zip(&leads)).rev() {
                *step = leads[index % PATHS];
                index = if self.plan[t].1 == 2 { index / 2 } else { index / MOST };
            }
            let met = other && states[to - 1] >> self.shifts[to - 1] == overlap;
            states[from..to].copy_from_slice(&step[..to - from]);
            if met {
                return states[self.steps() - 1] >> self.shifts[self.steps() - 1];
            }
        }
        overlap
    }
}

/// Replaces each of `len` paths by the `CELLS` that go on in the nearest cells, and tells the
/// states that they lead through.
#[inline]
fn branch<const CELLS: usize>(
    kind: &Kind,
    near: &Near,
    paths: &mut [(u32, u16); PATHS],
    len: usize,
    leads: &mut [u16; PATHS],
) {
    // From the last one on, so that none is overwritten before its turn.
    for path in (0..len).rev() {
        let (cost, u) = paths[path % PATHS];
        let spread = kind.spread(u);
        let next: [(u32, u16); CELLS] = std::array::from_fn(|i| {
            let (cell, costs) = &near[i];
            (cost + summand(costs[spread.level]), kind.lead(spread, *cell))
        });
        for (i, (cost, state)) in next.into_iter().enumerate() {
            let at = (path * CELLS + i) % PATHS;
            leads[at] = state;
            paths[at] = (cost, state >> kind.shift);
        }
    }
}

/// A cost in a sum of wider numbers, where none in range may exceed one out of range.
#[inline]
fn summand(cost: u8) -> u32 {
    u32::from(cost) | u32::from(cost == u8::MAX) << 16
}

/// Index of a weight's place in [`Kind::nearest`].
#[inline]
fn place(x: i16) -> usize {
    usize::from(x.cast_unsigned() ^ 1 << 15) >> PLACE
}

/// Half of what a difference of grid values is multiplied with, in 2^-15, for a square in units of
/// cost: see [`cost`].
pub(crate) fn factor(unit: f64) -> i16 {
    let factor = f64::from(1 << 14) * (f64::from(1 << 15) / unit).sqrt();
    assert!(factor < f64::from(i16::MAX), "a unit of cost is large on the grid");
    #[expect(clippy::cast_possible_truncation, reason = "below 2^15 as was just asserted")]
    return factor.round() as i16;
}

/// `(x - v)^2` in units of cost.
#[inline(always)]
pub(crate) fn cost(factor: i16, v: i16, x: i16) -> i16 {
    let mulhrs = |a: i16, b: i16| ((i32::from(a) * i32::from(b) + (1 << 14)) >> 15) as i16;
    let d = mulhrs(v.saturating_sub(x), factor);
    let d = d.saturating_add(d).max(-i16::MAX);
    mulhrs(d, d)
}

/// Costs of the levels of some cells for a weight, above the least of them.
fn levels(isa: Isa, values: &[[i16; LEVELS]], x: i16, factor: i16, cells: &mut [(u8, [u8; LEVELS])]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vbmi => crate::cells_simd::near_avx512(values, x, factor, cells),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => crate::cells_simd::near_avx2(values, x, factor, cells),
        _ => {
            let all = cells.iter().flat_map(|(cell, _)| &values[usize::from(*cell)]);
            let least = all.fold(i16::MAX, |least, &v| least.min(cost(factor, v, x)));
            for (cell, costs) in cells {
                for (to, &v) in costs.iter_mut().zip(&values[usize::from(*cell)]) {
                    *to = (cost(factor, v, x) - least).min(255) as u8;
                }
            }
        }
    }
}

/// `before[u] = min over the cells of (after of the lead - base) + cost of its level`, saturating;
/// what is out of range stays so. Returns the least of them where the step settles, else 0.
fn step_on(isa: Isa, step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    let kind = step.kind;
    assert!(after.len() >= STATES >> kind.shift, "costs after the step");
    assert!(before.len() >= STATES >> kind.new_bits, "costs before the step");
    let (first, last) = step.columns;
    assert!((first | last).is_multiple_of(WIDE_LANE), "whole vectors of columns");
    assert!(last <= STATES >> (kind.new_bits + kind.shift), "columns of overlaps");
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vbmi => crate::cells_simd::step_avx512_vbmi(step, after, before),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => crate::cells_simd::step_avx512(step, after, before),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => crate::cells_simd::step_avx2(step, after, before),
        _ => step_scalar(step, after, before),
    }
}

/// The reference.
fn step_scalar(step: &CellStep<'_>, after: &[u8], before: &mut [u8]) -> u8 {
    let CellStep { kind, base, settles, columns, cells } = *step;
    let mut least = u8::MAX;
    let (first, last) = (columns.0 << kind.shift, columns.1 << kind.shift);
    for (u, out) in before[..last].iter_mut().enumerate().skip(first) {
        let spread = kind.spread(word(u));
        *out = u8::MAX;
        for (cell, costs) in cells {
            let next = usize::from(kind.lead(spread, *cell) >> kind.shift);
            let after = if after[next] == u8::MAX { u8::MAX } else { after[next].saturating_sub(base) };
            let cost = after.saturating_add(costs[spread.level]);
            *out = cost.min(*out);
        }
        least = least.min(*out);
    }
    if settles { least } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{builtin, train::gaussian_tiles};
    use fracbit_base::Scheme;
    use fracbit_format::trellis::{Steps, state_values};

    const ALL: Pruning = Pruning { falls: 1, thirds: 1, always: 3, reach: 0, part: 0 };

    /// Near the end few columns are looked at; the costs are those of all overlaps at every step,
    /// on every instruction set.
    #[test]
    fn costs_to_a_seam_are_those_of_whole_steps() {
        for name in ["tcq-1", "tcq-1.75", "tcq-2.25", "tcq-3.5", "tcq-5"] {
            let scheme: Scheme = name.parse().unwrap();
            let (book, steps) = (builtin(scheme).unwrap(), Steps::of(scheme).unwrap());
            let largest = book.entries().iter().map(|e| e.unsigned_abs()).max().unwrap();
            let metric = Metric::new(scheme, f32::from(largest) * book.step());
            let value = |x| f32::from(state_values(scheme, book.entries(), x)[0]) * book.step();
            let values: Vec<i16> = (0..=u16::MAX).map(|x| metric.grid(value(x))).collect();
            let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
            let unit = unit(metric, scheme.rate().gaussian_bound());
            let x = gaussian_tiles(15, 1)[0].map(|w| metric.grid(w));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let search = CellSearch::new(isa, shifts.clone(), &values, unit, ALL);
                let (from, mut scratch) = (search.bound_before(40), CellScratch::default());
                let seam = 0x2D5;
                let got = search.to_seam(&x, from, seam, &mut scratch).expect("costs in range").to_vec();
                let mut after = vec![u8::MAX; STATES];
                after[usize::from(seam)] = 0;
                let mut base = 0;
                for t in (from..search.steps()).rev() {
                    let kind = search.kind(t);
                    let step = CellStep {
                        kind,
                        base,
                        settles: t.is_multiple_of(SETTLE),
                        columns: (0, STATES >> (kind.new_bits + kind.shift)),
                        cells: search.cells(t, &scratch.near[t]),
                    };
                    let mut before = vec![u8::MAX; STATES];
                    base = step_scalar(&step, &after, &mut before);
                    after = before;
                }
                assert!(got.iter().any(|&c| c < u8::MAX), "{name}: a path in range");
                assert_eq!(got, after[..got.len()], "{name} on {}", isa.name());
            }
        }
    }
}
