//! The fast transforms against dense matrices built in f64 from the definition.

use fracbit_rotation::{
    BlockRotation, Factor, Hadamard, HadamardMatrix, Rotation, factorize, fold::fold_gain, signs,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The orthonormal factor as a dense (order, order) matrix.
fn dense_factor(factor: Factor) -> Vec<f64> {
    let order = factor.order();
    let hadamard = HadamardMatrix::new(order);
    let entry = |j: usize, k: usize| match factor {
        Factor::Hadamard(_) => {
            f64::from(hadamard.as_ref().expect("the rule names orders that exist").entry(j, k))
        }
        Factor::Walsh(_) => 1.0 - 2.0 * f64::from((j & k).count_ones() % 2),
        Factor::Hartley(_) => {
            let (sin, cos) = ((j * k % order) as f64 / order as f64 * std::f64::consts::TAU).sin_cos();
            sin + cos
        }
    };
    (0..order * order).map(|at| entry(at / order, at % order) / (order as f64).sqrt()).collect()
}

/// H as a dense (n, n) matrix.
fn dense(n: usize) -> Vec<f64> {
    factorize(n).expect("a width in range").into_iter().fold(vec![1.0], |left, factor| {
        let right = dense_factor(factor);
        let (a, b) = ((left.len() as f64).sqrt() as usize, factor.order());
        let m = a * b;
        (0..m * m)
            .map(|at| {
                let (i, j) = (at / m, at % m);
                left[i / b * a + j / b] * right[i % b * b + j % b]
            })
            .collect()
    })
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Every width to 600: the matrix that `apply` is, entry by entry; its orthogonality in f64; the
/// inverse its transpose.
fn is_the_dense_matrix(widths: impl Iterator<Item = usize>) {
    for n in widths {
        let h = Hadamard::new(n).expect("a width in range");
        let want = dense(n);
        let mut columns = vec![0.0f32; n * n]; // row i holds H·eᵢ
        (0..n).for_each(|i| columns[i * n + i] = 1.0);
        let mut rows = columns.clone(); // row i holds Hᵀ·eᵢ
        h.apply_rows(&mut columns);
        // Beyond, the round trip below is the test: n³ for a Hartley factor is most of this test's
        // time.
        let inverse_too = n <= 256;
        if inverse_too {
            h.apply_rows_inverse(&mut rows);
        }
        // 1/√n and a cosine are each rounded to f32 once, and multiplied once: 2 units in the last
        // place of 1/√n·√2.
        let bound = 2.0 * f64::from(f32::EPSILON) * (2.0 / n as f64).sqrt();
        for i in 0..n {
            for j in 0..n {
                let (w, forward, back) = (want[i * n + j], columns[j * n + i], rows[i * n + j]);
                assert!((f64::from(forward) - w).abs() <= bound, "n = {n}, ({i}, {j}): {forward} for {w}");
                assert!(
                    !inverse_too || (f64::from(back) - w).abs() <= bound,
                    "n = {n}, ({i}, {j}): {back} for {w}, inverse"
                );
            }
        }
        let dot = |a: usize, b: usize| -> f64 {
            let row = |i: usize| columns[i * n..][..n].iter().map(|&x| f64::from(x));
            row(a).zip(row(b)).map(|(a, b)| a * b).sum()
        };
        let some = [0, 1, n / 2, n - 1];
        for i in (0..n).filter(|i| n <= 128 || some.contains(i)) {
            for j in 0..n {
                let want = f64::from(u8::from(i == j));
                assert!((dot(i, j) - want).abs() < 5e-7, "n = {n}: columns {i} and {j} give {}", dot(i, j));
            }
        }
        let x = random(n, n as u64);
        let mut y = x.clone();
        h.apply(&mut y);
        for (i, &y) in y.iter().enumerate() {
            let w: f64 = want[i * n..][..n].iter().zip(&x).map(|(h, &x)| h * f64::from(x)).sum();
            assert!((f64::from(y) - w).abs() < 1e-6 * norm(&x), "n = {n}, output {i}: {y} for {w}");
        }
        assert!((norm(&y) / norm(&x) - 1.0).abs() < 1e-6, "n = {n}: the norm is kept");
        h.apply_inverse(&mut y);
        assert!(distance(&y, &x) < 1e-6 * norm(&x), "n = {n}: the inverse undoes");
    }
}

#[test]
fn every_even_width_is_the_dense_matrix() {
    is_the_dense_matrix((2..=600).step_by(2));
}

#[test]
fn every_odd_width_is_the_dense_matrix() {
    is_the_dense_matrix((1..=599).step_by(2));
}

/// Widths of every kind of factor and of strides above, at and below eight lanes.
const KINDS: [usize; 22] =
    [1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 36, 40, 90, 96, 188, 192, 752, 1155, 3696, 7392, 14336];

/// One vector, rows of a matrix and columns of a matrix go through different code and give the same
/// bits.
#[test]
fn rows_and_columns_agree_with_one_vector() {
    for n in KINDS {
        let rotation = Rotation::new(n, 5, n as u64).unwrap();
        for count in [1, 3, 16, 19] {
            let rows = random(count * n, 1);
            let mut one_by_one = rows.clone();
            one_by_one.chunks_exact_mut(n).for_each(|row| rotation.apply(row));
            let mut together = rows.clone();
            rotation.apply_rows(&mut together);
            assert_eq!(bits(&together), bits(&one_by_one), "n = {n}, {count} rows");
            let transposed =
                |m: &[f32]| -> Vec<f32> { (0..n * count).map(|at| m[at % count * n + at / count]).collect() };
            let mut columns = transposed(&rows);
            rotation.rotate_output(&mut columns, count);
            assert_eq!(bits(&columns), bits(&transposed(&one_by_one)), "n = {n}, {count} columns");

            one_by_one.chunks_exact_mut(n).for_each(|row| rotation.apply_inverse(row));
            rotation.apply_rows_inverse(&mut together);
            rotation.rotate_output_inverse(&mut columns, count);
            assert_eq!(bits(&together), bits(&one_by_one), "n = {n}, {count} rows back");
            assert_eq!(bits(&columns), bits(&transposed(&one_by_one)), "n = {n}, {count} columns back");
            assert!(distance(&together, &rows) < 1e-6 * norm(&rows), "n = {n}");
        }
    }
}

#[test]
fn rotation_is_signs_then_transform() {
    for n in KINDS {
        let rotation = Rotation::new(n, 9, 4).unwrap();
        let x = random(n, 2);
        let mut want: Vec<f32> = x.iter().zip(signs(9, 4)).map(|(x, s)| x * s).collect();
        rotation.hadamard().apply(&mut want);
        let mut got = x;
        // Dirty scratch must not matter.
        rotation.apply_with(&mut got, &mut vec![f32::NAN; rotation.scratch_len()]);
        assert_eq!(bits(&got), bits(&want), "n = {n}");
    }
}

/// The same function with both sides of a chain of two linears rotated, a norm's gain folded,
/// biases included.
#[test]
fn folding_keeps_the_function() {
    let (d, hidden, heads) = (48, 60, 5); // heads of width 12
    let (gain, a, b) = (random(d, 1), random(hidden * d, 2), random(d * hidden, 3));
    let (a_bias, b_bias, x) = (random(hidden, 4), random(d, 5), random(d, 6));
    let linear = |w: &[f32], bias: &[f32], x: &[f32]| -> Vec<f32> {
        w.chunks(x.len())
            .zip(bias)
            .map(|(r, b)| b + r.iter().zip(x).map(|(w, x)| w * x).sum::<f32>())
            .collect()
    };
    let scaled: Vec<f32> = x.iter().zip(&gain).map(|(x, g)| x * g).collect();
    let want = linear(&b, &b_bias, &linear(&a, &a_bias, &scaled));

    let r = Rotation::new(d, 1, 0).unwrap();
    let p = BlockRotation::new(Rotation::new(hidden / heads, 1, 1).unwrap(), heads).unwrap();
    assert_eq!((p.width(), p.blocks(), p.rotation().width()), (hidden, heads, 12));
    let (mut ra, mut rb, mut ra_bias, mut rb_bias, mut rx) = (a, b, a_bias, b_bias, x);
    fold_gain(&mut ra, &gain);
    r.apply_rows(&mut ra);
    p.rotate_output(&mut ra, d);
    p.apply(&mut ra_bias);
    p.apply_rows(&mut rb);
    r.rotate_output(&mut rb, hidden);
    r.apply(&mut rb_bias);
    r.apply(&mut rx);
    let mut got = linear(&rb, &rb_bias, &linear(&ra, &ra_bias, &rx));
    r.apply_inverse(&mut got);
    assert!(distance(&got, &want) < 1e-5 * norm(&want), "{got:?} for {want:?}");

    let before = ra.clone();
    p.rotate_output_inverse(&mut ra, d);
    p.rotate_output(&mut ra, d);
    assert!(distance(&ra, &before) < 1e-6 * norm(&before));
    let before = rb.clone();
    p.apply_rows_inverse(&mut rb);
    p.apply_rows(&mut rb);
    assert!(distance(&rb, &before) < 1e-6 * norm(&before));
    let before = ra_bias.clone();
    p.apply_inverse(&mut ra_bias);
    p.apply(&mut ra_bias);
    assert!(distance(&ra_bias, &before) < 1e-6 * norm(&before));
}

/// A block rotation does not mix blocks.
#[test]
fn blocks_stay_apart() {
    let p = BlockRotation::new(Rotation::new(20, 3, 3).unwrap(), 3).unwrap();
    let mut x = vec![0.0; 60];
    x[25] = 1.0;
    p.apply(&mut x);
    let mut again = vec![0.0; 60];
    again[25] = 1.0;
    p.apply_with(&mut again, &mut vec![f32::NAN; p.scratch_len()]);
    assert_eq!(bits(&again), bits(&x));
    assert!(x[..20].iter().chain(&x[40..]).all(|&x| x == 0.0));
    assert!(x[20..40].iter().all(|&x| (x.abs() - 20f32.sqrt().recip()).abs() < 1e-7));
    assert!(BlockRotation::new(Rotation::new(20, 3, 3).unwrap(), 0).is_err());
    assert!(BlockRotation::new(Rotation::new(20, 3, 3).unwrap(), usize::MAX).is_err());
}

/// A true Hadamard transform spreads a single outlier over all entries equally; that is what it is
/// for.
#[test]
fn an_outlier_is_spread_evenly() {
    for n in [576, 2048, 3696, 8960, 18944] {
        let rotation = Rotation::new(n, 11, 0).unwrap();
        let mut x = vec![0.0; n];
        x[n / 3] = 1000.0;
        rotation.apply(&mut x);
        let want = 1000.0 / (n as f32).sqrt();
        assert!(x.iter().all(|x| (x.abs() / want - 1.0).abs() < 1e-6), "n = {n}");
    }
}

#[test]
fn empty_matrices_are_fine() {
    let rotation = Rotation::new(24, 0, 0).unwrap();
    rotation.apply_rows(&mut []);
    rotation.rotate_output(&mut [], 0);
    BlockRotation::new(rotation, 2).unwrap().rotate_output(&mut [], 0);
}

#[test]
#[should_panic(expected = "Rotation::apply: `x` should have 24 entries, got 23")]
fn a_short_vector_panics() {
    Rotation::new(24, 0, 0).unwrap().apply(&mut [0.0; 23]);
}

#[test]
#[should_panic(expected = "`w` should be (24, 3), got 71 entries")]
fn a_short_matrix_panics() {
    Rotation::new(24, 0, 0).unwrap().rotate_output(&mut [0.0; 71], 3);
}
