//! Random rotations: signs, then a Hadamard transform.

use crate::{Hadamard, RotationError, signs, walsh};

/// The orthogonal matrix R = H·S: random signs S = diag(s) first, then H.
///
/// Conventions, with x a column vector of n entries:
///
/// * [`apply`](Self::apply): x ← R·x = H·(s ⊙ x). [`apply_inverse`](Self::apply_inverse): x ←
///   Rᵀ·x = s ⊙ (Hᵀ·x).
/// * [`apply_rows`](Self::apply_rows): every row r of a row-major (rows, n) matrix M becomes R·r,
///   that is M ← M·Rᵀ. On activations, one token per row, this rotates each token; on a weight W of
///   y = W·x it rotates the *input* side: (W·Rᵀ)·(R·x) = W·x.
/// * [`rotate_output`](Self::rotate_output): M ← R·M for an (n, cols) matrix; on a weight, y
///   becomes R·y.
///
/// Why: after R with random signs, weights look Gaussian and no entry stands out (incoherence;
/// Tseng et al. 2024, QuIP#, arXiv 2402.04396, section 3), which is the input that Gaussian
/// codebooks are built for.
///
/// Every operation on the same vector gives the same bits, whichever method, matrix shape or
/// machine.
#[derive(Clone, Debug)]
pub struct Rotation {
    hadamard: Hadamard,
    scaled_signs: Vec<f32>, // (n): ±1/√n
}

impl Rotation {
    /// The rotation of width `n` with the [`signs`] of `seed` and `stream`.
    ///
    /// # Errors
    /// [`RotationError::Width`] if `n` is zero or above [`MAX_WIDTH`](crate::MAX_WIDTH).
    pub fn new(n: usize, seed: u64, stream: u64) -> Result<Self, RotationError> {
        Ok(Self::with_hadamard(Hadamard::new(n)?, seed, stream))
    }

    /// As [`new`](Self::new), sharing the tables of a transform already built.
    pub fn with_hadamard(hadamard: Hadamard, seed: u64, stream: u64) -> Self {
        let scaled_signs = signs(seed, stream).take(hadamard.width()).map(|s| s * hadamard.scale()).collect();
        Self { hadamard, scaled_signs }
    }

    /// n.
    pub fn width(&self) -> usize {
        self.hadamard.width()
    }

    /// H.
    pub fn hadamard(&self) -> &Hadamard {
        &self.hadamard
    }

    /// The n signs s, 1 or −1.
    pub fn signs(&self) -> impl Iterator<Item = f32> {
        self.scaled_signs.iter().map(|s| s.signum())
    }

    /// The floats of scratch that `apply_with` needs; 0 for a power of two.
    pub fn scratch_len(&self) -> usize {
        self.hadamard.scratch_len()
    }

    /// x ← R·x for one vector of n floats. Allocates the scratch if the width needs any.
    ///
    /// # Panics
    /// If `x` does not have n entries.
    pub fn apply(&self, x: &mut [f32]) {
        self.apply_with(x, &mut vec![0.0; self.scratch_len()]);
    }

    /// x ← Rᵀ·x, otherwise as [`apply`](Self::apply).
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
        self.check_vector("Rotation::apply", x);
        self.apply_rows_with(x, scratch);
    }

    /// [`apply_inverse`](Self::apply_inverse) without allocation.
    ///
    /// # Panics
    /// As [`apply_with`](Self::apply_with).
    pub fn apply_inverse_with(&self, x: &mut [f32], scratch: &mut [f32]) {
        self.check_vector("Rotation::apply_inverse", x);
        self.backward(x, scratch);
    }

    /// r ← R·r for every row r of a row-major (rows, n) matrix: tokens, or the input side of a
    /// weight.
    ///
    /// Rows are independent: threads may each take some.
    ///
    /// # Panics
    /// If the length is not a multiple of n.
    pub fn apply_rows(&self, rows: &mut [f32]) {
        self.apply_rows_with(rows, &mut vec![0.0; self.scratch_len()]);
    }

    /// r ← Rᵀ·r for every row r of a row-major (rows, n) matrix.
    ///
    /// # Panics
    /// If the length is not a multiple of n.
    pub fn apply_rows_inverse(&self, rows: &mut [f32]) {
        let mut scratch = vec![0.0; self.scratch_len()];
        let op = "Rotation::apply_rows_inverse";
        self.hadamard.each_group(op, rows, |group| self.backward(group, &mut scratch));
    }

    /// [`apply_rows`](Self::apply_rows) without allocation, for the decode loop.
    ///
    /// # Panics
    /// If the length is not a multiple of n or `scratch` has fewer than
    /// [`scratch_len`](Self::scratch_len) entries.
    pub fn apply_rows_with(&self, rows: &mut [f32], scratch: &mut [f32]) {
        self.apply_rows_by(rows, scratch, walsh);
    }

    /// [`apply_rows_with`](Self::apply_rows_with), where `transform` does what [`walsh`] does.
    ///
    /// # Panics
    /// As there.
    pub fn apply_rows_by(
        &self,
        rows: &mut [f32],
        scratch: &mut [f32],
        transform: impl Fn(usize, &mut [f32], &[f32]),
    ) {
        self.hadamard.each_group("Rotation::apply_rows", rows, |group| {
            for row in group.chunks_exact_mut(self.width()) {
                transform(self.hadamard.walsh(), row, &self.scaled_signs);
            }
            self.hadamard.factors_across(group, 1, scratch);
        });
    }

    /// W ← R·W for a row-major (n, cols) matrix: the output side of a weight, so that y = W·x
    /// becomes R·y.
    ///
    /// Allocates 16·n floats. The linear's bias, if any, becomes R·b by [`apply`](Self::apply).
    ///
    /// # Panics
    /// If the length is not n·cols.
    pub fn rotate_output(&self, w: &mut [f32], cols: usize) {
        self.check_matrix("Rotation::rotate_output", w, cols);
        self.hadamard.transform_columns(w, cols, false, |i| self.scaled_signs[i], |_| 1.0);
    }

    /// W ← Rᵀ·W for a row-major (n, cols) matrix.
    ///
    /// # Panics
    /// If the length is not n·cols.
    pub fn rotate_output_inverse(&self, w: &mut [f32], cols: usize) {
        self.check_matrix("Rotation::rotate_output_inverse", w, cols);
        self.hadamard.transform_columns(w, cols, true, |_| 1.0, |i| self.scaled_signs[i]);
    }

    fn backward(&self, rows: &mut [f32], scratch: &mut [f32]) {
        self.hadamard.transform_rows_inverse(rows, scratch);
        for row in rows.chunks_exact_mut(self.width()) {
            row.iter_mut().zip(&self.scaled_signs).for_each(|(x, s)| *x *= s);
        }
    }

    fn check_vector(&self, op: &str, x: &[f32]) {
        assert!(x.len() == self.width(), "{op}: `x` should have {} entries, got {}", self.width(), x.len());
    }

    fn check_matrix(&self, op: &str, w: &[f32], cols: usize) {
        let want = self.width().checked_mul(cols);
        assert!(
            Some(w.len()) == want,
            "{op}: `w` should be ({}, {cols}), got {} entries",
            self.width(),
            w.len()
        );
    }
}

/// The block-diagonal matrix I ⊗ R: one rotation of width head_dim applied to each head's slice of
/// a vector.
///
/// Heads stay apart, so this commutes with the attention weights: rotating the output of V and the
/// input of O head by head folds away, grouped-query attention included, where V has fewer blocks
/// than O but the same R.
#[derive(Clone, Debug)]
pub struct BlockRotation {
    rotation: Rotation,
    blocks: usize,
}

impl BlockRotation {
    /// `blocks` copies of `rotation` on the diagonal.
    ///
    /// # Errors
    /// [`RotationError::Blocks`] if `blocks` is zero or the width would overflow.
    pub fn new(rotation: Rotation, blocks: usize) -> Result<Self, RotationError> {
        match rotation.width().checked_mul(blocks) {
            None | Some(0) => Err(RotationError::Blocks { op: "BlockRotation::new", got: blocks }),
            Some(_) => Ok(Self { rotation, blocks }),
        }
    }

    /// blocks·head_dim.
    pub fn width(&self) -> usize {
        self.blocks * self.rotation.width()
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The rotation of one block.
    pub fn rotation(&self) -> &Rotation {
        &self.rotation
    }

    /// Rotates every block of one vector of [`width`](Self::width) floats.
    ///
    /// # Panics
    /// If `x` does not have that many entries.
    pub fn apply(&self, x: &mut [f32]) {
        self.check("BlockRotation::apply", x.len() == self.width(), x.len());
        self.rotation.apply_rows(x);
    }

    /// The floats of scratch that `apply_with` needs; 0 for a power of two.
    pub fn scratch_len(&self) -> usize {
        self.rotation.scratch_len()
    }

    /// [`apply`](Self::apply) without allocation.
    ///
    /// # Panics
    /// As [`apply`](Self::apply), or if `scratch` has fewer than [`scratch_len`](Self::scratch_len)
    /// entries.
    pub fn apply_with(&self, x: &mut [f32], scratch: &mut [f32]) {
        self.check("BlockRotation::apply_with", x.len() == self.width(), x.len());
        self.rotation.apply_rows_with(x, scratch);
    }

    /// Undoes [`apply`](Self::apply).
    ///
    /// # Panics
    /// As [`apply`](Self::apply).
    pub fn apply_inverse(&self, x: &mut [f32]) {
        self.check("BlockRotation::apply_inverse", x.len() == self.width(), x.len());
        self.rotation.apply_rows_inverse(x);
    }

    /// Rotates every block of every row of a row-major (rows, width) matrix: tokens, or the input
    /// side of a weight.
    ///
    /// # Panics
    /// If the length is not a multiple of the width.
    pub fn apply_rows(&self, rows: &mut [f32]) {
        self.check("BlockRotation::apply_rows", rows.len().is_multiple_of(self.width()), rows.len());
        self.rotation.apply_rows(rows);
    }

    /// Undoes [`apply_rows`](Self::apply_rows).
    ///
    /// # Panics
    /// As [`apply_rows`](Self::apply_rows).
    pub fn apply_rows_inverse(&self, rows: &mut [f32]) {
        self.check("BlockRotation::apply_rows_inverse", rows.len().is_multiple_of(self.width()), rows.len());
        self.rotation.apply_rows_inverse(rows);
    }

    /// W ← (I ⊗ R)·W for a row-major (width, cols) matrix: the output side of a weight, head by
    /// head.
    ///
    /// # Panics
    /// If the length is not width·cols.
    pub fn rotate_output(&self, w: &mut [f32], cols: usize) {
        self.check_output("BlockRotation::rotate_output", w, cols);
        self.heads(w, cols).for_each(|head| self.rotation.rotate_output(head, cols));
    }

    /// Undoes [`rotate_output`](Self::rotate_output).
    ///
    /// # Panics
    /// As [`rotate_output`](Self::rotate_output).
    pub fn rotate_output_inverse(&self, w: &mut [f32], cols: usize) {
        self.check_output("BlockRotation::rotate_output_inverse", w, cols);
        self.heads(w, cols).for_each(|head| self.rotation.rotate_output_inverse(head, cols));
    }

    fn heads<'w>(&self, w: &'w mut [f32], cols: usize) -> impl Iterator<Item = &'w mut [f32]> {
        // A matrix of no columns is empty: any chunk size yields no chunks, but zero would panic.
        w.chunks_exact_mut((self.rotation.width() * cols).max(1))
    }

    fn check(&self, op: &str, holds: bool, got: usize) {
        assert!(holds, "{op}: entries should be {} or, for rows, a multiple, got {got}", self.width());
    }

    fn check_output(&self, op: &str, w: &[f32], cols: usize) {
        let want = self.width().checked_mul(cols);
        assert!(
            Some(w.len()) == want,
            "{op}: `w` should be ({}, {cols}), got {} entries",
            self.width(),
            w.len()
        );
    }
}
