//! Sums of `x x^T` over many rows.

use crate::hessian::multiply;
use fracbit_base::ShapeError;
use fracbit_kernels::{
    Team, Vectors,
    vectors::bf16::{Panels, Rows, WIDTH},
    with_team,
};
use rayon::prelude::*;
use std::ops::Range;

/// Rows that one single-precision product sums up; products are added in double precision.
const ROWS: usize = 256;
/// Columns of a panel of the lower triangle.
const PANEL: usize = 128;

/// Second moments being collected: the lower triangle of `sum x x^T`.
///
/// Rows are summed 256 at a time in f32 and these sums in f64, so that the relative error stays
/// near 256 units of f32's last place whatever the number of rows. The result depends on the order
/// of rows and on how calls cut them, not on threads.
#[derive(Clone, Debug)]
pub struct Moments {
    n: usize,
    rows: u64,
    sums: Vec<f64>, // (n, n); only the lower triangle is meaningful
}

impl Moments {
    /// Nothing yet, of `n` channels.
    #[must_use]
    pub fn new(n: usize) -> Self {
        Self { n, rows: 0, sums: vec![0.0; n * n] }
    }

    /// Bytes that moments of `n` channels take while they are collected.
    #[must_use]
    pub fn memory(n: usize) -> u64 {
        8 * (n as u64).pow(2)
    }

    /// Rows added so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds rows, (rows, n), in f32.
    ///
    /// # Errors
    /// When the length is not whole rows.
    pub fn add(&mut self, x: &[f32]) -> Result<(), ShapeError> {
        with_team(|team| self.add_on(team, &Vectors::scalar(), x))
    }

    /// [`Moments::add`] on the threads of a team; numbers are rounded to bf16 where `vectors` has
    /// such products.
    ///
    /// # Errors
    /// As for [`Moments::add`].
    pub fn add_on(&mut self, team: &Team<'_>, vectors: &Vectors, x: &[f32]) -> Result<(), ShapeError> {
        let n = self.n;
        let rows = x.len() / n.max(1);
        ShapeError::check_len("moments", "rows", rows * n, x.len())?;
        for x in x.chunks(ROWS * n.max(1)) {
            let columns = |rows: &Range<usize>| rows.end;
            add_products(team, vectors, (x, n), (x, n), columns, &mut self.sums);
        }
        self.rows += rows as u64;
        Ok(())
    }

    /// Channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.n
    }

    /// The sums, as the lower triangle row by row: n (n + 1) / 2 entries.
    #[must_use]
    pub fn sums(&self) -> Vec<f64> {
        let rows = self.sums.chunks(self.n.max(1)).enumerate();
        rows.flat_map(|(i, row)| &row[..=i]).copied().collect()
    }

    /// Those of `n` channels whose [`sums`](Self::sums) over so many rows these are.
    ///
    /// # Errors
    /// When there are not n (n + 1) / 2 of them.
    pub fn of_sums(
        n: usize,
        rows: u64,
        mut triangle: impl ExactSizeIterator<Item = f64>,
    ) -> Result<Self, ShapeError> {
        ShapeError::check_len("moments", "triangle", n * (n + 1) / 2, triangle.len())?;
        let mut sums = vec![0.0; n * n];
        for (i, row) in sums.chunks_mut(n.max(1)).enumerate() {
            row[..=i].iter_mut().zip(&mut triangle).for_each(|(sum, v)| *sum = v);
        }
        Ok(Self { n, rows, sums })
    }

    /// Adds the sums and rows of others.
    ///
    /// # Errors
    /// When they have other channels.
    pub fn merge(&mut self, other: &Self) -> Result<(), ShapeError> {
        ShapeError::check_len("moments", "channels", self.n, other.n)?;
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, other)| *sum += other);
        self.rows += other.rows;
        Ok(())
    }

    /// The means, as the lower triangle row by row: n (n + 1) / 2 entries; zeros when there were no
    /// rows.
    #[must_use]
    pub fn triangle(&self) -> Vec<f32> {
        #[expect(clippy::cast_precision_loss, reason = "row counts are far below 2^53")]
        let count = self.rows.max(1) as f64;
        let mut out = Vec::with_capacity(self.n * (self.n + 1) / 2);
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        for (i, row) in self.sums.chunks(self.n.max(1)).enumerate() {
            out.extend(row[..=i].iter().map(|s| (s / count) as f32));
        }
        out
    }
}

/// Cross moments being collected: `sum e x^T` of m channels with n others, summed up as [`Moments`]
/// are.
#[derive(Clone, Debug)]
pub struct CrossMoments {
    m: usize,
    n: usize,
    rows: u64,
    sums: Vec<f64>, // (m, n)
}

impl CrossMoments {
    /// Nothing yet, of `m` channels with `n` others.
    #[must_use]
    pub fn new(m: usize, n: usize) -> Self {
        Self { m, n, rows: 0, sums: vec![0.0; m * n] }
    }

    /// How many channels those are whose moments with the others are collected: m.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.m
    }

    /// Adds rows: `e`, (rows, m), beside `x`, (rows, n), in f32.
    ///
    /// # Errors
    /// When a length is not whole rows, or they are not as many.
    pub fn add(&mut self, e: &[f32], x: &[f32]) -> Result<(), ShapeError> {
        with_team(|team| self.add_on(team, &Vectors::scalar(), e, x))
    }

    /// [`CrossMoments::add`] on the threads of a team; numbers are rounded to bf16 where `vectors`
    /// has such products.
    ///
    /// # Errors
    /// As for [`CrossMoments::add`].
    pub fn add_on(
        &mut self,
        team: &Team<'_>,
        vectors: &Vectors,
        e: &[f32],
        x: &[f32],
    ) -> Result<(), ShapeError> {
        let (m, n) = (self.m, self.n);
        let rows = x.len() / n.max(1);
        ShapeError::check_len("cross moments", "x", rows * n, x.len())?;
        ShapeError::check_len("cross moments", "e", rows * m, e.len())?;
        for (e, x) in e.chunks(ROWS * m.max(1)).zip(x.chunks(ROWS * n.max(1))) {
            add_products(team, vectors, (e, m), (x, n), |_| n, &mut self.sums);
        }
        self.rows += rows as u64;
        Ok(())
    }

    /// The means, row-major (m, n); zeros when there were no rows.
    #[must_use]
    pub fn means(&self) -> Vec<f32> {
        #[expect(clippy::cast_precision_loss, reason = "row counts are far below 2^53")]
        let count = self.rows.max(1) as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        self.sums.iter().map(|s| (s / count) as f32).collect()
    }
}

/// `sums += e^T x` for `e`, (rows, m), and `x`, (rows, n); of some rows of the sums only the first
/// columns, as many as `columns` says.
fn add_products(
    team: &Team<'_>,
    vectors: &Vectors,
    (e, m): (&[f32], usize),
    (x, n): (&[f32], usize),
    columns: impl Fn(&Range<usize>) -> usize + Sync,
    sums: &mut [f64],
) {
    let bf16 = vectors.has_bf16().then(|| {
        let mut panels = vec![Panels::default(); n.div_ceil(WIDTH)];
        team.chunks(&mut panels, 1, |at, panel| {
            panel.iter_mut().for_each(|panel| panel.set(x, n, at * WIDTH..n.min((at + 1) * WIDTH)));
        });
        (Rows::of_transposed(team, e, m), panels)
    });
    team.chunks(sums, PANEL * n, |at, sums| {
        let rows = at * PANEL..at * PANEL + sums.len() / n;
        let columns = columns(&rows);
        if let Some((e, panels)) = &bf16 {
            for (at, panel) in panels[..columns.div_ceil(WIDTH)].iter().enumerate() {
                panel.product(vectors, e, rows.clone(), |row, col, product| {
                    let first = at * WIDTH + col;
                    let sums = &mut sums[(row - rows.start) * n..][..n][first..];
                    sums.iter_mut().zip(product).for_each(|(s, &p)| *s += f64::from(p));
                });
            }
            return;
        }
        let (count, width) = (x.len() / n, rows.len());
        let mut transposed = vec![0.0; width * count];
        for (r, row) in e.chunks(m).enumerate() {
            row[rows.clone()].iter().enumerate().for_each(|(c, &v)| transposed[c * count + r] = v);
        }
        let mut product = vec![0.0; width * columns];
        multiply(1.0, &transposed, count, x, n, (width, count, columns), 0.0, &mut product, columns);
        for (sums, product) in sums.chunks_mut(n).zip(product.chunks(columns)) {
            sums.iter_mut().zip(product).for_each(|(s, &p)| *s += f64::from(p));
        }
    });
}

/// The square matrix of a lower triangle of n (n + 1) / 2 entries.
///
/// # Errors
/// When the length is another.
pub fn square(n: usize, triangle: &[f32]) -> Result<Vec<f32>, ShapeError> {
    ShapeError::check_len("moments", "triangle", n * (n + 1) / 2, triangle.len())?;
    let at = |i: usize, j: usize| triangle[i * (i + 1) / 2 + j];
    let mut out = vec![0.0; n * n];
    out.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| {
        row.iter_mut().enumerate().for_each(|(j, v)| *v = at(i.max(j), i.min(j)));
    });
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn sums_are_those_of_the_definition() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for (n, rows) in [(1, 3), (7, 1000), (200, 300)] {
            let x: Vec<f32> = (0..n * rows).map(|_| rng.random_range(-1.0..2.0)).collect();
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let mut moments = Moments::new(n);
                    moments.add(&x[..n * (rows / 3)]).unwrap();
                    moments.add(&x[n * (rows / 3)..]).unwrap();
                    assert_eq!(moments.rows(), rows as u64);
                    moments.triangle()
                })
            };
            let triangle = run(1);
            assert_eq!(triangle, run(3));
            let sums = |x: &[f32]| {
                let mut moments = Moments::new(n);
                moments.add(x).unwrap();
                Moments::of_sums(n, moments.rows(), moments.sums().into_iter()).unwrap()
            };
            let mut merged = sums(&x[..n * (rows / 3)]);
            merged.merge(&sums(&x[n * (rows / 3)..])).unwrap();
            assert_eq!(merged.rows(), rows as u64);
            assert_eq!(triangle.len(), merged.triangle().len());
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
            assert!(triangle.iter().zip(&merged.triangle()).all(close), "sums of two parts");
            let full = square(n, &triangle).unwrap();
            for i in 0..n {
                for j in 0..n {
                    let want: f64 =
                        x.chunks(n).map(|r| f64::from(r[i]) * f64::from(r[j])).sum::<f64>() / rows as f64;
                    assert!((f64::from(full[i * n + j]) - want).abs() < 1e-5, "({i}, {j})");
                }
            }
        }
        assert_eq!(Moments::new(2).triangle(), [0.0; 3]);
        let (e, x) = (&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 0.5, -1.0, 2.0]);
        let mut cross = CrossMoments::new(3, 2);
        cross.add(&e[..3], &x[..2]).unwrap();
        cross.add(&e[3..], &x[2..]).unwrap();
        assert_eq!(cross.means(), [-1.5, 4.25, -1.5, 5.5, -1.5, 6.75]);
        assert!(cross.add(&e[..3], x).is_err());
        assert!(Moments::new(2).add(&[1.0; 3]).is_err());
        assert!(Moments::new(2).merge(&Moments::new(3)).is_err());
        assert!(Moments::of_sums(2, 1, [1.0; 4].into_iter()).is_err());
        assert!(square(2, &[1.0; 4]).is_err());
    }
}
