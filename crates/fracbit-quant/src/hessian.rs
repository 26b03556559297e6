//! Second moments of a layer's inputs, and the feedback that follows from them.
//!
//! For inputs x and a weight error E = W - W', the mean squared error of the layer's output is `E|E
//! x|^2 = tr(E H E^T)` with `H = E[x x^T]`. Factor `H = L D L^T`, L unit lower triangular in blocks
//! of `b` columns, D block diagonal. Then the loss is `tr((E L) D (E L)^T)`, and block K of `E L`
//! is `E_K + sum_(J > K) E_J L_JK`: going from the last block to the first, the target `W_K +
//! sum_(J > K) E_J L_JK` leaves nothing of `(E L)_K` but the rounding error of block K itself. That
//! is block LDLQ (QuIP#, Tseng et al. 2024, arXiv 2402.04396, section 4; for b = 1 it is GPTQ,
//! Frantar et al. 2022, arXiv 2210.17323).
//!
//! H of few or correlated inputs is singular. A share of the mean of its diagonal is added to the
//! diagonal before factoring, and tenfold more as often as a pivot still fails. Channels that were
//! never active have no correlation with others: their columns are rounded as without feedback.

use crate::QuantError;
use fracbit_base::ShapeError;
use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul};
use rayon::prelude::*;
use std::{ops::Range, sync::OnceLock};

/// Share of the mean diagonal that is added to the diagonal (QuIP# and Q-Palette use 0.01).
pub const DAMPING: f64 = 0.01;
/// Damping for each channel that one input stands for: what few inputs say of the correlations of
/// many channels is noise, and feedback would move errors to where these few happened not to see
/// them. Chosen on calibration text (`docs/lab/2026-11-calibration.md`).
const SPARSE: f64 = 2.0;
/// Damping above which a matrix counts as broken rather than deficient.
const MAX_DAMPING: f64 = 1e4;
/// Columns of a panel of the factorization.
const PANEL: usize = 128;
/// Rows that go through a panel side by side, a sum each.
const LANES: usize = 16;

/// The second moments `E[x x^T]` of the inputs of a linear layer, (n, n), and its factors.
#[derive(Debug)]
pub struct Hessian {
    n: usize,
    data: Vec<f32>, // row-major, symmetric
    damping: f64,
    factors: [OnceLock<Result<Feedback, QuantError>>; 5], // by FACTORED
}

/// Block sizes that schemes round in: scalars, pairs, vectors of additive codebooks, trellis tiles.
const FACTORED: [usize; 5] = [1, 2, 4, 8, 16];

/// Unit lower block-triangular L of `H + damping = L D L^T`.
#[derive(Clone, Debug)]
pub(crate) struct Feedback {
    /// Row-major (n, n); entries on and above the block diagonal are not used.
    pub(crate) lower: Vec<f32>,
    /// What an error of each column costs beyond what the columns before it make up for: the
    /// diagonal of D in units of its mean.
    pub(crate) importance: Vec<f32>,
    damping: f64,
    left: f64,
}

impl Hessian {
    /// Takes a row-major, symmetric (n, n) matrix, with the usual damping.
    ///
    /// # Errors
    /// When the length is not n² or an entry is not finite, or a diagonal entry negative.
    pub fn new(n: usize, data: Vec<f32>) -> Result<Self, QuantError> {
        ShapeError::check_len("hessian", "entries", n * n, data.len())?;
        let bad = data.iter().enumerate().find(|&(i, &h)| !h.is_finite() || (i / n == i % n && h < 0.0));
        if let Some((at, &value)) = bad {
            return Err(QuantError::Hessian { row: at / n, col: at % n, value });
        }
        Ok(Self { n, data, damping: DAMPING, factors: Default::default() })
    }

    /// The same moments with another damping, a share of the mean of the diagonal.
    #[must_use]
    pub fn with_damping(self, damping: f64) -> Self {
        Self { damping, factors: Default::default(), ..self }
    }

    /// The same moments as the means of so many inputs: the fewer these are for a channel, the more
    /// damping.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn of_rows(self, rows: u64) -> Self {
        let sparse = SPARSE * self.n as f64 / rows.max(1) as f64;
        self.with_damping(DAMPING + sparse)
    }

    /// Inputs of the layer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.n
    }

    /// True for a layer without inputs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The entries, row-major (n, n).
    #[must_use]
    pub fn entries(&self) -> &[f32] {
        &self.data
    }

    /// Channels that were never active.
    #[must_use]
    pub fn dead(&self) -> usize {
        (0..self.n).filter(|&i| self.data[i * self.n + i] == 0.0).count()
    }

    /// The damping that the factorization in blocks of `block` (1, 2 or 16) needed.
    ///
    /// # Errors
    /// As for [`quantize_with`](crate::quantize_with).
    pub fn damping(&self, block: usize) -> Result<f64, QuantError> {
        Ok(self.feedback(block)?.damping)
    }

    /// What feedback in blocks of `block` leaves of the loss of white rounding errors, `tr D / tr
    /// H` (with the damping in both): 1 where inputs are uncorrelated.
    ///
    /// # Errors
    /// As for [`quantize_with`](crate::quantize_with).
    pub fn left(&self, block: usize) -> Result<f64, QuantError> {
        Ok(self.feedback(block)?.left)
    }

    /// `tr(E H E^T)` of a row-major (rows, n) error.
    ///
    /// # Panics
    /// When the length is not whole rows.
    #[must_use]
    pub fn loss(&self, error: &[f32]) -> f64 {
        assert!(error.len().is_multiple_of(self.n.max(1)), "rows of {}", self.n);
        let strips: Vec<f64> = error
            .par_chunks(STRIP * self.n.max(1))
            .map(|rows| {
                let image = self.apply(rows);
                rows.iter().zip(&image).map(|(&e, &y)| f64::from(e) * f64::from(y)).sum()
            })
            .collect();
        strips.iter().sum()
    }

    /// `X H` of a row-major (rows, n) matrix.
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        let rows = x.len() / self.n;
        multiply(1.0, x, self.n, &self.data, self.n, (rows, self.n, self.n), 0.0, &mut out, self.n);
        out
    }

    pub(crate) fn feedback(&self, block: usize) -> Result<&Feedback, QuantError> {
        let at =
            FACTORED.iter().position(|&b| b == block).expect("schemes round in blocks of 1, 2, 4, 8 or 16");
        self.factors[at].get_or_init(|| self.factor(block)).as_ref().map_err(Clone::clone)
    }

    fn factor(&self, block: usize) -> Result<Feedback, QuantError> {
        let n = self.n;
        let Factored { factor: a, damping, trace } = self.cholesky()?;
        // D_KK = C_KK C_KK^T.
        let own = |i: usize| a[i * n + i / block * block..=i * n + i].iter().map(|c| c * c).sum::<f64>();
        let own: Vec<f64> = (0..n).map(own).collect();
        let sum = own.iter().sum::<f64>();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            reason = "a share of the mean"
        )]
        let importance = own.iter().map(|d| (d * n as f64 / sum) as f32).collect();
        Ok(Feedback { lower: unit_blocks(&a, n, block), importance, damping, left: sum / trace })
    }

    /// The Cholesky factor of the damped moments in units of their mean diagonal.
    fn cholesky(&self) -> Result<Factored, QuantError> {
        let n = self.n;
        let mean = self.mean();
        let mut damping = self.damping;
        loop {
            let mut factor: Vec<f64> = self.data.par_iter().map(|&h| f64::from(h) / mean).collect();
            (0..n).for_each(|i| factor[i * n + i] += damping);
            let trace: f64 = (0..n).map(|i| factor[i * n + i]).sum();
            if cholesky(&mut factor, n) {
                return Ok(Factored { factor, damping, trace });
            }
            damping = (10.0 * damping).max(1e-6);
            if damping > MAX_DAMPING {
                return Err(QuantError::Indefinite { n, damping });
            }
        }
    }

    /// Mean of the diagonal; 1 for an input that is always zero, where any positive diagonal gives
    /// L = 1.
    fn mean(&self) -> f64 {
        let n = self.n;
        #[expect(clippy::cast_precision_loss, reason = "widths are far below 2^53")]
        let mean = (0..n).map(|i| f64::from(self.data[i * n + i])).sum::<f64>() / n.max(1) as f64;
        if mean > 0.0 { mean } else { 1.0 }
    }

    /// `B (H + damping)^-1` of a row-major (rows, n) matrix: for B = `E[e x^T]` the weights that
    /// predict e from inputs x with least squared error, shrunk by the damping.
    ///
    /// # Errors
    /// When the length is not whole rows or the moments cannot be factored.
    pub fn solve(&self, b: &[f32]) -> Result<Vec<f32>, QuantError> {
        let n = self.n;
        ShapeError::check_len("solve", "b", b.len() / n.max(1) * n, b.len())?;
        let factor = self.cholesky()?.factor;
        let mean = self.mean();
        let mut out = b.to_vec();
        // Rows go together, so that the factor is read once for all of them.
        out.par_chunks_mut(SOLVED * n.max(1)).for_each(|strip| {
            let mut x: Vec<f64> = strip.iter().map(|&b| f64::from(b) / mean).collect();
            substitute(&factor, n, &mut x);
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            strip.iter_mut().zip(x).for_each(|(out, x)| *out = x as f32);
        });
        Ok(out)
    }
}

/// Rows that are solved for together: fixed, so that results do not depend on the number of
/// threads.
const SOLVED: usize = 128;

/// `X <- X (C C^T)^-1` for rows X of n and a lower triangular C, (n, n): Y C^T = X panel by panel
/// of columns, then X C = Y from the last panel to the first. All but the diagonal blocks are
/// products.
fn substitute(c: &[f64], n: usize, x: &mut [f64]) {
    let rows = x.len() / n;
    let mut panel = vec![0.0; rows * PANEL];
    let copy = |x: &[f64], columns: Range<usize>, panel: &mut [f64]| {
        for (panel, x) in panel.chunks_exact_mut(columns.len()).zip(x.chunks_exact(n)) {
            panel.copy_from_slice(&x[columns.clone()]);
        }
    };
    let back = |panel: &[f64], columns: Range<usize>, x: &mut [f64]| {
        for (panel, x) in panel.chunks_exact(columns.len()).zip(x.chunks_exact_mut(n)) {
            x[columns.clone()].copy_from_slice(panel);
        }
    };
    let mut across = vec![0.0; PANEL * PANEL];
    for first in (0..n).step_by(PANEL) {
        let columns = first..n.min(first + PANEL);
        let width = columns.len();
        let panel = &mut panel[..rows * width];
        copy(x, columns.clone(), panel);
        multiply_transposed(-1.0, x, n, &c[first * n..], n, (rows, first, width), panel);
        // The diagonal block turned over: its columns are read in a row.
        for (i, c) in c[first * n..].chunks_exact(n).take(width).enumerate() {
            (0..=i).for_each(|j| across[j * width + i] = c[first + j]);
        }
        for x in panel.chunks_exact_mut(width) {
            for j in 0..width {
                let c = &across[j * width..(j + 1) * width];
                x[j] /= c[j];
                let known = x[j];
                x[j + 1..].iter_mut().zip(&c[j + 1..]).for_each(|(x, c)| *x -= known * c);
            }
        }
        back(panel, columns, x);
    }
    for first in (0..n).step_by(PANEL).rev() {
        let columns = first..n.min(first + PANEL);
        let (last, width) = (columns.end, columns.len());
        let panel = &mut panel[..rows * width];
        copy(x, columns.clone(), panel);
        if last < n {
            let size = (rows, n - last, width);
            multiply(-1.0, &x[last..], n, &c[last * n + first..], n, size, 1.0, panel, width);
        }
        for x in panel.chunks_exact_mut(width) {
            for j in (0..width).rev() {
                let c = &c[(first + j) * n + first..][..=j];
                x[j] /= c[j];
                let known = x[j];
                x[..j].iter_mut().zip(c).for_each(|(x, c)| *x -= known * c);
            }
        }
        back(panel, columns, x);
    }
}

/// `out += alpha x b^T` for row-major x, (m, k), and b, (n, k), each with its row length, and a
/// dense out, (m, n).
fn multiply_transposed(
    alpha: f64,
    x: &[f64],
    x_stride: usize,
    b: &[f64],
    b_stride: usize,
    (m, k, n): (usize, usize, usize),
    out: &mut [f64],
) {
    use ndarray::ShapeBuilder as _;
    let view = |data, rows: usize, stride: usize| {
        ArrayView2::from_shape((rows, k).strides((stride, 1)), data).expect("the block lies within the data")
    };
    let mut out = ArrayViewMut2::from_shape((m, n), out).expect("the block lies within");
    general_mat_mul(alpha, &view(x, m, x_stride), &view(b, n, b_stride).t(), 1.0, &mut out);
}

/// A Cholesky factor, and what went into it.
struct Factored {
    factor: Vec<f64>, // row-major (n, n), lower triangle
    damping: f64,
    trace: f64, // of the damped moments
}

/// Rows that one product takes at least.
pub(crate) const STRIP: usize = 64;
/// Rows that one product takes at most: of 256 it makes 127 GFLOP/s where it makes 76 of 64.
const LARGE_STRIP: usize = 256;

/// Rows of `rows` that one product takes on so many threads. Each product orders the other operand
/// anew for itself: many rows share that, but every thread should have some. Sums do not depend on
/// it.
pub(crate) fn strip(rows: usize, threads: usize) -> usize {
    (rows / (3 * threads.max(1))).clamp(STRIP, LARGE_STRIP) / STRIP * STRIP
}

/// `out += a b` for row-major a, (m, n), and b, (n, n).
///
/// # Panics
/// When a length does not fit.
pub fn add_product(a: &[f32], b: &[f32], n: usize, out: &mut [f32]) {
    assert!(a.len() == out.len() && b.len() == n * n && a.len().is_multiple_of(n.max(1)), "shapes");
    let size = n.max(1) * strip(a.len() / n.max(1), rayon::current_num_threads());
    let strips = a.par_chunks(size).zip(out.par_chunks_mut(size));
    strips.for_each(|(a, out)| multiply(1.0, a, n, b, n, (a.len() / n, n, n), 1.0, out, n));
}

/// `out = alpha x b + beta out` for row-major blocks of sizes (m, k) x (k, n), each with its row
/// length.
#[expect(clippy::too_many_arguments, reason = "the operands of one product, named at every call")]
pub(crate) fn multiply<T: ndarray::LinalgScalar>(
    alpha: T,
    x: &[T],
    x_stride: usize,
    b: &[T],
    b_stride: usize,
    (m, k, n): (usize, usize, usize),
    beta: T,
    out: &mut [T],
    out_stride: usize,
) {
    use ndarray::ShapeBuilder as _;
    let view = |data, rows: usize, cols: usize, stride: usize| {
        ArrayView2::from_shape((rows, cols).strides((stride, 1)), data)
            .expect("the block lies within the data")
    };
    let mut out =
        ArrayViewMut2::from_shape((m, n).strides((out_stride, 1)), out).expect("the block lies within");
    general_mat_mul(alpha, &view(x, m, k, x_stride), &view(b, k, n, b_stride), beta, &mut out);
}

/// Replaces the lower triangle of a row-major (n, n) matrix by its Cholesky factor; false when a
/// pivot is not positive. Right-looking, in panels; only the lower triangle is read.
fn cholesky(a: &mut [f64], n: usize) -> bool {
    for first in (0..n).step_by(PANEL) {
        let width = PANEL.min(n - first);
        let last = first + width;
        // The diagonal block.
        for j in first..last {
            for i in j..last {
                let dot: f64 = (first..j).map(|k| a[i * n + k] * a[j * n + k]).sum();
                let rest = a[i * n + j] - dot;
                if i > j {
                    a[i * n + j] = rest / a[j * n + j];
                } else if rest > 0.0 && rest.is_finite() {
                    a[j * n + j] = rest.sqrt();
                } else {
                    return false;
                }
            }
        }
        let (top, below) = a.split_at_mut(last * n);
        // The panel below it: X C^T = A, some rows at a time.
        below.par_chunks_mut(LANES * n).for_each(|rows| {
            let mut x = [[0.0; LANES]; PANEL];
            for (lane, row) in rows.chunks(n).enumerate() {
                x.iter_mut().zip(&row[first..last]).for_each(|(x, &a)| x[lane] = a);
            }
            for j in 0..width {
                let c = &top[(first + j) * n + first..][..=j];
                let mut dots = [0.0; LANES];
                for (x, &c) in x.iter().zip(&c[..j]) {
                    dots.iter_mut().zip(x).for_each(|(dot, x)| *dot += x * c);
                }
                x[j].iter_mut().zip(dots).for_each(|(x, dot)| *x = (*x - dot) / c[j]);
            }
            for (lane, row) in rows.chunks_mut(n).enumerate() {
                row[first..last].iter_mut().zip(&x).for_each(|(a, x)| *a = x[lane]);
            }
        });
        // The trailing matrix loses X X^T.
        let rest = n - last;
        let mut transposed = vec![0.0; width * rest];
        for (i, row) in below.chunks(n).enumerate() {
            row[first..last].iter().enumerate().for_each(|(k, &v)| transposed[k * rest + i] = v);
        }
        below.par_chunks_mut(PANEL * n).enumerate().for_each(|(chunk, rows)| {
            let height = rows.len() / n;
            let columns = chunk * PANEL + height;
            let x: Vec<f64> = rows.chunks(n).flat_map(|row| row[first..last].iter().copied()).collect();
            let out = &mut rows[last..];
            multiply(-1.0, &x, width, &transposed, rest, (height, width, columns), 1.0, out, n);
        });
    }
    true
}

/// `L_JK = C_JK C_KK^-1` for every block K of columns and every row below it.
fn unit_blocks(c: &[f64], n: usize, block: usize) -> Vec<f32> {
    let mut lower = vec![0.0f32; n * n];
    lower.par_chunks_mut(n).enumerate().for_each(|(i, out)| {
        let mut row = c[i * n..][..n].to_vec();
        for first in (0..i / block * block).step_by(block) {
            let last = first + block;
            // X C_KK = row: backwards, as C_KK is lower triangular.
            for j in (first..last).rev() {
                let dot: f64 = (j + 1..last).map(|k| row[k] * c[k * n + j]).sum();
                row[j] = (row[j] - dot) / c[j * n + j];
            }
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            for j in first..last {
                out[j] = row[j] as f32;
            }
        }
    });
    lower
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// `X^T X` of a random (samples, n) matrix.
    fn moments(n: usize, samples: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let x: Vec<f32> = (0..samples * n).map(|_| rng.random_range(-1.0..1.0)).collect();
        let entry = |i, j| x.chunks(n).map(|row: &[f32]| row[i] * row[j]).sum();
        (0..n * n)
            .map(|at| if at / n >= at % n { entry(at / n, at % n) } else { entry(at % n, at / n) })
            .collect()
    }

    #[test]
    fn solutions_give_back_the_right_hand_side() {
        for (n, rows) in [(1, 2), (37, 3), (128, 1), (150, 70), (300, 129)] {
            let h = Hessian::new(n, moments(n, 2 * n, 5)).unwrap();
            let mut rng = ChaCha8Rng::seed_from_u64(9);
            let b: Vec<f32> = (0..rows * n).map(|_| rng.random_range(-1.0..1.0)).collect();
            let x = h.solve(&b).unwrap();
            let mean: f64 = (0..n).map(|i| f64::from(h.data[i * n + i])).sum::<f64>() / n as f64;
            for (row, want) in x.chunks(n).zip(b.chunks(n)) {
                for (j, want) in want.iter().enumerate() {
                    let image: f64 =
                        (0..n).map(|i| f64::from(row[i]) * f64::from(h.data[i * n + j])).sum::<f64>()
                            + DAMPING * mean * f64::from(row[j]);
                    assert!((image - f64::from(*want)).abs() < 1e-3, "{n} {j}: {image} {want}");
                }
            }
            assert!(n == 1 || h.solve(&b[1..]).is_err());
        }
    }

    #[test]
    fn the_factors_multiply_to_the_matrix() {
        for (n, block) in [(1, 1), (5, 2), (48, 16), (150, 16), (300, 1), (271, 2)] {
            let h = Hessian::new(n, moments(n, 2 * n, 3)).unwrap();
            let feedback = h.feedback(block).unwrap();
            let l = |i: usize, j: usize| match (i / block).cmp(&(j / block)) {
                std::cmp::Ordering::Greater => f64::from(feedback.lower[i * n + j]),
                _ => f64::from(u8::from(i == j)),
            };
            // D = L^-1 A L^-T should be block diagonal: solve L Y = A, then L Z = Y^T.
            let mean: f64 = (0..n).map(|i| f64::from(h.data[i * n + i])).sum::<f64>() / n as f64;
            let mut a: Vec<f64> = h.data.iter().map(|&v| f64::from(v) / mean).collect();
            (0..n).for_each(|i| a[i * n + i] += DAMPING);
            for _ in 0..2 {
                for i in 0..n {
                    for k in 0..i {
                        let f = l(i, k);
                        (0..n).for_each(|j| a[i * n + j] -= f * a[k * n + j]);
                    }
                }
                a = (0..n * n).map(|at| a[at % n * n + at / n]).collect();
            }
            for i in 0..n {
                for j in 0..n {
                    if i / block != j / block {
                        assert!(
                            a[i * n + j].abs() < 1e-4,
                            "n {n} block {block}: ({i}, {j}) is {}",
                            a[i * n + j]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn deficient_matrices_are_damped_until_they_factor() {
        // Three samples in forty dimensions, and a channel that is never active.
        let mut data = moments(40, 3, 1);
        (0..40).for_each(|i| {
            data[7 * 40 + i] = 0.0;
            data[i * 40 + 7] = 0.0;
        });
        let h = Hessian::new(40, data.clone()).unwrap();
        assert_eq!(h.dead(), 1);
        assert_eq!(h.damping(16).unwrap(), DAMPING);
        // Without damping the pivots vanish (or go below zero by rounding): it comes by itself.
        let bare = Hessian::new(40, data).unwrap().with_damping(0.0);
        assert!(bare.damping(1).unwrap() > 0.0);
        // An indefinite matrix is mended too, as long as that takes a sane amount.
        let bent = Hessian::new(2, vec![1.0, 5.0, 5.0, 1.0]).unwrap();
        assert!(bent.damping(1).unwrap() > 4.0);
        assert!(Hessian::new(2, vec![1.0, 3e5, 3e5, 1.0]).unwrap().damping(1).is_err());
        let zero = Hessian::new(3, vec![0.0; 9]).unwrap();
        assert!(zero.feedback(1).unwrap().lower.iter().all(|&l| l == 0.0));
    }

    #[test]
    fn bad_entries_are_named() {
        let error = Hessian::new(2, vec![1.0, 0.0, 0.0, f32::NAN]).unwrap_err().to_string();
        assert!(error.contains("row 1, column 1"), "{error}");
        assert!(Hessian::new(2, vec![-1.0, 0.0, 0.0, 1.0]).is_err());
        assert!(Hessian::new(2, vec![1.0; 3]).is_err());
    }

    #[test]
    fn loss_is_the_quadratic_form() {
        let h = Hessian::new(3, moments(3, 9, 5)).unwrap();
        let e = [1.0f32, -2.0, 0.5, 0.0, 1.0, 3.0];
        let want: f64 = e
            .chunks(3)
            .map(|e| (0..9).map(|at| f64::from(e[at / 3] * h.data[at] * e[at % 3])).sum::<f64>())
            .sum();
        assert!((h.loss(&e) - want).abs() < 1e-5 * want.abs(), "{} {want}", h.loss(&e));
    }
}
