//! The orthonormal transform of any width.

use crate::across::{Across, Direction};
use crate::walsh::butterflies;
use crate::{Factor, RotationError, factorize};

/// Columns of a matrix transformed together when the transform runs down the columns: one cache
/// line.
const TILE: usize = 16;

/// The orthonormal n×n matrix H = M₁ ⊗ … ⊗ W, with the factors of [`factorize`]`(n)`.
///
/// `apply` computes H·x for a vector x; H is orthogonal, so `apply_inverse` computes Hᵀ·x = H⁻¹·x.
/// Memory: a byte per four entries of each small factor and its transpose; nothing of size n.
#[derive(Clone, Debug)]
pub struct Hadamard {
    n: usize,
    factors: Vec<Factor>,
    across: Vec<Across>,
    walsh: usize,
    scale: f32,
}

impl Hadamard {
    /// The transform of width `n`.
    ///
    /// # Errors
    /// [`RotationError::Width`] if `n` is zero or above [`MAX_WIDTH`](crate::MAX_WIDTH).
    pub fn new(n: usize) -> Result<Self, RotationError> {
        let factors = factorize(n)?;
        let mut walsh = 1;
        let mut across = Vec::new();
        for factor in &factors {
            match *factor {
                Factor::Walsh(order) => walsh = order,
                Factor::Hadamard(order) => across.push(Across::hadamard(order)),
                Factor::Hartley(order) => across.push(Across::hartley(order)),
            }
        }
        let scale = (1.0 / (n as f64).sqrt()) as f32;
        Ok(Self { n, factors, across, walsh, scale })
    }

    /// n.
    pub fn width(&self) -> usize {
        self.n
    }

    /// The factors of the Kronecker product, slowest index first.
    pub fn factors(&self) -> &[Factor] {
        &self.factors
    }

    /// The floats of scratch that `apply_with` and its kin need; 0 for a power of two.
    pub fn scratch_len(&self) -> usize {
        self.across.iter().map(Across::scratch_len).max().unwrap_or(0)
    }

    /// 1/√n as used, the magnitude of every entry if no factor is a Hartley matrix.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }

    /// x ← H·x for one vector of n floats. Allocates the scratch if the width needs any.
    ///
    /// # Panics
    /// If `x` does not have n entries.
    pub fn apply(&self, x: &mut [f32]) {
        self.apply_with(x, &mut vec![0.0; self.scratch_len()]);
    }

    /// x ← Hᵀ·x, otherwise as [`apply`](Self::apply).
    ///
    /// # Panics
    /// If `x` does not have n entries.
    pub fn apply_inverse(&self, x: &mut [f32]) {
        self.apply_inverse_with(x, &mut vec![0.0; self.scratch_len()]);
    }

    /// [`apply`](Self::apply) without allocation; what `scratch` holds before and after does not
    /// matter.
    ///
    /// # Panics
    /// If `x` does not have n entries or `scratch` fewer than [`scratch_len`](Self::scratch_len).
    pub fn apply_with(&self, x: &mut [f32], scratch: &mut [f32]) {
        self.check_vector("Hadamard::apply", x);
        x.iter_mut().for_each(|x| *x *= self.scale);
        self.transform(x, 1, scratch, Direction::Forward);
    }

    /// [`apply_inverse`](Self::apply_inverse) without allocation.
    ///
    /// # Panics
    /// As [`apply_with`](Self::apply_with).
    pub fn apply_inverse_with(&self, x: &mut [f32], scratch: &mut [f32]) {
        self.check_vector("Hadamard::apply_inverse", x);
        self.transform(x, 1, scratch, Direction::Inverse);
        x.iter_mut().for_each(|x| *x *= self.scale);
    }

    /// r ← H·r for every row r of a row-major (rows, n) matrix, with the same bits as one at a
    /// time.
    ///
    /// # Panics
    /// If the length is not a multiple of n.
    pub fn apply_rows(&self, rows: &mut [f32]) {
        let mut scratch = vec![0.0; self.scratch_len()];
        self.each_group("Hadamard::apply_rows", rows, |group| {
            group.iter_mut().for_each(|x| *x *= self.scale);
            self.transform(group, 1, &mut scratch, Direction::Forward);
        });
    }

    /// r ← Hᵀ·r for every row r of a row-major (rows, n) matrix.
    ///
    /// # Panics
    /// If the length is not a multiple of n.
    pub fn apply_rows_inverse(&self, rows: &mut [f32]) {
        let mut scratch = vec![0.0; self.scratch_len()];
        self.each_group("Hadamard::apply_rows_inverse", rows, |group| {
            self.transform(group, 1, &mut scratch, Direction::Inverse);
            group.iter_mut().for_each(|x| *x *= self.scale);
        });
    }

    fn check_vector(&self, op: &str, x: &[f32]) {
        assert!(x.len() == self.n, "{op}: `x` should have {} entries, got {}", self.n, x.len());
    }

    /// Calls `f` with a few rows at a time: one, or eight where one row cannot fill the lanes of a
    /// factor.
    pub(crate) fn each_group(&self, op: &str, rows: &mut [f32], mut f: impl FnMut(&mut [f32])) {
        assert!(
            rows.len().is_multiple_of(self.n),
            "{op}: the length should be a multiple of {}, got {}",
            self.n,
            rows.len()
        );
        let group = if self.across.is_empty() || self.walsh.is_multiple_of(8) { 1 } else { 8 };
        rows.chunks_mut(group * self.n).for_each(&mut f);
    }

    /// √n·H (or its transpose) on a (batch, n, inner) array along the middle axis, in place.
    fn transform(&self, x: &mut [f32], inner: usize, scratch: &mut [f32], direction: Direction) {
        if direction == Direction::Forward {
            x.chunks_exact_mut(self.walsh * inner).for_each(|chunk| butterflies(chunk, inner));
            self.factors_across(x, inner, scratch);
        } else {
            self.check_scratch(scratch);
            let mut stride = self.n * inner;
            for factor in &self.across {
                stride /= factor.order();
                factor.pass(x, stride, scratch, direction);
            }
            x.chunks_exact_mut(stride).for_each(|chunk| butterflies(chunk, inner));
        }
    }

    /// All factors but W of [`transform`](Self::transform) forward.
    pub(crate) fn factors_across(&self, x: &mut [f32], inner: usize, scratch: &mut [f32]) {
        self.check_scratch(scratch);
        let mut stride = self.walsh * inner;
        for factor in self.across.iter().rev() {
            factor.pass(x, stride, scratch, Direction::Forward);
            stride *= factor.order();
        }
    }

    fn check_scratch(&self, scratch: &[f32]) {
        let need = self.scratch_len();
        assert!(scratch.len() >= need, "`scratch` should have {need} entries, got {}", scratch.len());
    }

    /// The order of W.
    pub(crate) fn walsh(&self) -> usize {
        self.walsh
    }

    /// √n·Hᵀ on one vector or several rows, in place, for callers that fold in their own scale.
    pub(crate) fn transform_rows_inverse(&self, x: &mut [f32], scratch: &mut [f32]) {
        self.transform(x, 1, scratch, Direction::Inverse);
    }

    /// diag(after)·√n·H·diag(before) on the columns of a row-major (n, cols) matrix, H transposed
    /// if `inverse`.
    ///
    /// Sixteen columns at a time are copied out, one cache line of each row, so that memory is read
    /// and written once.
    pub(crate) fn transform_columns(
        &self,
        w: &mut [f32],
        cols: usize,
        inverse: bool,
        before: impl Fn(usize) -> f32,
        after: impl Fn(usize) -> f32,
    ) {
        let direction = if inverse { Direction::Inverse } else { Direction::Forward };
        let mut scratch = vec![0.0; self.scratch_len()];
        let mut tile = vec![0.0; self.n * TILE]; // (n, TILE)
        for first in (0..cols).step_by(TILE) {
            let used = TILE.min(cols - first);
            for (i, (to, from)) in tile.chunks_exact_mut(TILE).zip(w.chunks_exact(cols)).enumerate() {
                let sign = before(i);
                to[..used].iter_mut().zip(&from[first..]).for_each(|(to, from)| *to = from * sign);
            }
            self.transform(&mut tile, TILE, &mut scratch, direction);
            for (i, (from, to)) in tile.chunks_exact(TILE).zip(w.chunks_exact_mut(cols)).enumerate() {
                let sign = after(i);
                to[first..first + used].iter_mut().zip(from).for_each(|(to, from)| *to = from * sign);
            }
        }
    }
}
