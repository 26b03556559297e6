//! The factor that goes across: y_j = Σ_k M_jk x_k for an order-K matrix M that is not a power of
//! two.
//!
//! The data is a (chunks, K, s) array; every (chunk, column) pair holds one vector of K entries at
//! stride s, and eight such columns are transformed together, one per lane. Columns are numbered
//! through all chunks, so that with a short s the lanes fill up from several chunks.
//!
//! **Signed (±1) factor.** Four Russians' method: of each four inputs all sixteen signed sums are
//! tabulated (16 additions), then each output adds one table entry per four inputs: K/4 + 4
//! additions per entry and none of the K multiplications. Row signs are stored as one nibble per
//! four entries; four outputs are summed together to keep the adders busy.
//!
//! **Hartley factor.** With x_k ± x_{o−k} formed first, outputs j and o−j share a sum of cosines
//! and a sum of sines: o/2 multiplications and additions per entry. O(o²) per vector, which loses
//! badly to a Fourier algorithm for large o; 13696 = 107·128 is a model width that comes here, and
//! 107 is small.
//!
//! The order of all additions is fixed by K alone, so lanes, strides and batches do not change a
//! bit.

use std::sync::Arc;

use crate::{HadamardMatrix, trig};

/// Columns transformed together.
const LANES: usize = 8;
type Lane = [f32; LANES];

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Inverse,
}

/// One factor, unnormalised; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) enum Across {
    Signed {
        order: usize,
        /// Nibbles of H, then of Hᵀ, each (K/4 row quads, K/4 column quads, 4 rows): bit r is set
        /// if column r of the quad is −1.
        forward: Arc<[u8]>,
        inverse: Arc<[u8]>,
    },
    Hartley {
        order: usize,
        /// (o): cosine and sine of 2πi/o.
        circle: Arc<[[f32; 2]]>,
    },
}

impl Across {
    pub(crate) fn hadamard(order: usize) -> Self {
        let h = HadamardMatrix::new(order).expect("the rule picks orders that have a matrix");
        let nibbles = |entry: &dyn Fn(usize, usize) -> i8| -> Arc<[u8]> {
            let quads = order / 4;
            let mut out = Vec::with_capacity(4 * quads * quads);
            for j in (0..order).step_by(4) {
                for k in (0..order).step_by(4) {
                    for row in j..j + 4 {
                        out.push((0..4).fold(0, |bits, r| bits | u8::from(entry(row, k + r) < 0) << r));
                    }
                }
            }
            out.into()
        };
        Self::Signed {
            order,
            forward: nibbles(&|i, j| h.entry(i, j)),
            inverse: nibbles(&|i, j| h.entry(j, i)),
        }
    }

    pub(crate) fn hartley(order: usize) -> Self {
        let circle = (0..order)
            .map(|i| {
                let (cos, sin) = trig::cos_sin(i, order);
                [cos as f32, sin as f32]
            })
            .collect();
        Self::Hartley { order, circle }
    }

    pub(crate) fn order(&self) -> usize {
        match self {
            Self::Signed { order, .. } | Self::Hartley { order, .. } => *order,
        }
    }

    pub(crate) fn scratch_len(&self) -> usize {
        match self {
            Self::Signed { order, .. } => 4 * order * LANES,
            Self::Hartley { order, .. } => order * LANES,
        }
    }

    /// Transforms `x`, a (chunks, K, s) array, in place.
    pub(crate) fn pass(&self, x: &mut [f32], s: usize, scratch: &mut [f32], direction: Direction) {
        let order = self.order();
        debug_assert!(x.len().is_multiple_of(order * s), "whole chunks");
        let lanes = scratch.as_chunks_mut().0;
        let columns = x.len() / order;
        for first in (0..columns).step_by(LANES) {
            let block = Block::new(first, columns, order, s);
            match self {
                Self::Signed { forward, inverse, .. } => {
                    let nibbles = if direction == Direction::Forward { forward } else { inverse };
                    signed(x, &block, order, nibbles, lanes);
                }
                // Symmetric, so its own inverse.
                Self::Hartley { circle, .. } => hartley(x, &block, circle, lanes),
            }
        }
    }
}

/// Where up to eight neighbouring columns live.
struct Block {
    /// Index of entry 0 of each lane's column.
    start: [usize; LANES],
    /// Lanes in use; the others read zeros.
    used: usize,
    stride: usize,
    contiguous: bool,
}

impl Block {
    fn new(first: usize, columns: usize, order: usize, s: usize) -> Self {
        let start = std::array::from_fn(|lane| {
            let column = first + lane;
            column / s * order * s + column % s
        });
        Self { start, used: LANES.min(columns - first), stride: s, contiguous: s.is_multiple_of(LANES) }
    }

    #[inline(always)]
    fn load(&self, x: &[f32], k: usize) -> Lane {
        if self.contiguous {
            let at = self.start[0] + k * self.stride;
            return *x[at..].first_chunk().expect("eight columns of one chunk");
        }
        let mut lane = [0.0; LANES];
        for (value, start) in lane.iter_mut().zip(&self.start[..self.used]) {
            *value = x[start + k * self.stride];
        }
        lane
    }

    #[inline(always)]
    fn store(&self, x: &mut [f32], k: usize, lane: Lane) {
        if self.contiguous {
            let at = self.start[0] + k * self.stride;
            *x[at..].first_chunk_mut().expect("eight columns of one chunk") = lane;
            return;
        }
        for (value, start) in lane.iter().zip(&self.start[..self.used]) {
            x[start + k * self.stride] = *value;
        }
    }
}

#[inline(always)]
fn add(a: Lane, b: Lane) -> Lane {
    std::array::from_fn(|i| a[i] + b[i])
}

#[inline(always)]
fn sub(a: Lane, b: Lane) -> Lane {
    std::array::from_fn(|i| a[i] - b[i])
}

fn signed(x: &mut [f32], block: &Block, order: usize, nibbles: &[u8], lanes: &mut [Lane]) {
    let tables = &mut lanes.as_chunks_mut::<16>().0[..order / 4];
    for (quad, table) in tables.iter_mut().enumerate() {
        let [a, b, c, d] = std::array::from_fn(|r| block.load(x, 4 * quad + r));
        // Entry `bits`: input r is subtracted where bit r is set.
        let low = [add(a, b), sub(b, a), sub(a, b), sub(sub([0.0; LANES], a), b)];
        let high = [add(c, d), sub(d, c), sub(c, d), sub(sub([0.0; LANES], c), d)];
        for (bits, entry) in table.iter_mut().enumerate() {
            *entry = add(low[bits & 3], high[bits >> 2]);
        }
    }
    for (quad, rows) in nibbles.chunks_exact(order).enumerate() {
        let mut sums = [[0.0; LANES]; 4];
        for (table, picks) in tables.iter().zip(rows.as_chunks::<4>().0) {
            for (sum, pick) in sums.iter_mut().zip(picks) {
                *sum = add(*sum, table[usize::from(pick & 15)]);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            block.store(x, 4 * quad + r, sum);
        }
    }
}

fn hartley(x: &mut [f32], block: &Block, circle: &[[f32; 2]], lanes: &mut [Lane]) {
    let order = circle.len();
    let half = order / 2; // order is odd
    let (even, odd) = lanes[..2 * half].split_at_mut(half);
    let zeroth = block.load(x, 0);
    let mut total = zeroth;
    for (k, (even, odd)) in even.iter_mut().zip(odd.iter_mut()).enumerate() {
        let (near, far) = (block.load(x, k + 1), block.load(x, order - 1 - k));
        (*even, *odd) = (add(near, far), sub(near, far));
        total = add(total, *even);
    }
    block.store(x, 0, total);
    for j in 1..=half {
        let (mut cosines, mut sines, mut at) = (zeroth, [0.0; LANES], 0);
        for (even, odd) in even.iter().zip(&*odd) {
            at += j;
            at -= if at >= order { order } else { 0 };
            let [cos, sin] = circle[at];
            cosines = std::array::from_fn(|i| cosines[i] + cos * even[i]);
            sines = std::array::from_fn(|i| sines[i] + sin * odd[i]);
        }
        block.store(x, j, add(cosines, sines));
        block.store(x, order - j, sub(cosines, sines));
    }
}
