//! Norms and rotations on any device against sums in f64.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{self, Before, FEW, Gate, RotationTables},
};

/// A rotation: orders of the dense factors, order of the Walsh matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn(pub(crate) &'static [usize], pub(crate) usize);

/// Multiplies an axis of `x`, of `order` values that are `stride` apart, by the matrix `m`.
fn along(x: &mut [f64], m: &dyn Fn(usize, usize) -> f64, order: usize, stride: usize) {
    let old = x.to_vec();
    for (i, v) in x.iter_mut().enumerate() {
        let j = i / stride % order;
        let base = i - j * stride;
        *v = (0..order).map(|k| m(j, k) * old[base + k * stride]).sum();
    }
}

/// What stands between gate and up, in f64.
pub(crate) fn gated(gate: Gate, g: f64) -> f64 {
    match gate {
        Gate::Silu => g / (1.0 + (-g).exp()),
        Gate::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            g * (1.0 + u.tanh()) / 2.0
        }
    }
}

impl Turn {
    pub(crate) fn width(self) -> usize {
        self.0.iter().product::<usize>() * self.1
    }

    fn factors(self) -> Vec<(usize, Vec<f32>)> {
        self.0.iter().map(|&order| (order, cases::activations(order * order, order as u64))).collect()
    }

    fn signs(self) -> Vec<f32> {
        let n = self.width();
        let size = 1.0 / (n as f32).sqrt();
        (0..n).map(|i| if i * 7919 % 13 < 6 { size } else { -size }).collect()
    }

    pub(crate) fn on<D: Device>(self, device: &D) -> Result<RotationTables<'_, D>, DeviceError> {
        RotationTables::new(device, &self.signs(), &self.factors())
    }

    fn apply(self, x: &mut [f64], inverse: bool) {
        let (n, factors, signs) = (self.width(), self.factors(), self.signs());
        if !inverse {
            x.iter_mut().zip(&signs).for_each(|(x, &s)| *x *= f64::from(s));
        }
        let mut stride = n;
        for (order, m) in &factors {
            stride /= order;
            let entry =
                |j: usize, k: usize| f64::from(if inverse { m[k * order + j] } else { m[j * order + k] });
            along(x, &entry, *order, stride);
        }
        let sign = |j: usize, k: usize| if j == 1 && k == 1 { -1.0 } else { 1.0 };
        let mut h = 1;
        while h < self.1 {
            along(x, &sign, 2, h);
            h *= 2;
        }
        if inverse {
            x.iter_mut().zip(&signs).for_each(|(x, &s)| *x *= f64::from(s));
        }
    }

    /// Largest error of `rows` rows, as a share of its bound: plain, gated, and behind a norm.
    pub(crate) fn check<D: Device>(self, device: &D, rows: usize, inverse: bool) -> Result<f64, DeviceError> {
        let (n, tables) = (self.width(), self.on(device)?);
        let (x, gain) = (cases::activations(2 * (rows + 1) * n, 11), cases::activations(n, 12));
        let input = Buffer::of(device, &x, "x")?;
        let gains = Buffer::of(device, &gain, "gain")?;
        let out = Buffer::zeroed(device, 4 * rows * n, "out")?;
        let (mut worst, mut worst_norm) = (0f64, 0f64);
        let mut compare = |row: usize, mut want: Vec<f64>, got: &[f32]| {
            self.apply(&mut want, inverse);
            let size = (want.iter().map(|v| v * v).sum::<f64>() / n as f64).sqrt();
            for (i, &want) in want.iter().enumerate() {
                let share = (f64::from(got[row * n + i]) - want).abs() / (3e-6 * size + 1e-30);
                worst = if share.is_nan() { f64::INFINITY } else { worst.max(share) };
            }
        };
        for gate in [None, Some(Gate::Silu), Some(Gate::GeluTanh)] {
            tables.rotate(device, &input, &out, rows, inverse, gate)?;
            let got: Vec<f32> = out.read(rows * n)?;
            for row in 0..rows {
                let value = |i: usize| {
                    let Some(gate) = gate else { return f64::from(x[row * n + i]) };
                    let (g, up) = (f64::from(x[2 * row * n + i]), f64::from(x[(2 * row + 1) * n + i]));
                    gated(gate, g) * up
                };
                compare(row, (0..n).map(value).collect(), &got);
            }
        }
        let (eps, first) = (1e-5, 1);
        let normed = |row: usize, gain: Option<&[f32]>| -> Vec<f64> {
            let x = &x[(first + row) * n..(first + row + 1) * n];
            let square: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let by = 1.0 / (square / n as f64 + f64::from(eps)).sqrt();
            let gain = |i: usize| gain.map_or(1.0, |g| f64::from(g[i]));
            x.iter().enumerate().map(|(i, &v)| f64::from(v) * by * gain(i)).collect()
        };
        for gain in [None, Some((&gain, &gains))] {
            if rows <= FEW && tables.takes_few(device, rows) {
                let before = Before { norm: Some(eps), gain: gain.map(|g| g.1), gate: None };
                tables.rotate_few(device, &input, &out, (first, rows), inverse, &before)?;
                let got: Vec<f32> = out.read(rows * n)?;
                (0..rows).for_each(|row| compare(row, normed(row, gain.map(|g| g.0.as_slice())), &got));
            }
            ops::norm(device, &input, gain.map(|g| g.1), &out, (first, rows, n), eps)?;
            let got: Vec<f32> = out.read(rows * n)?;
            for row in 0..rows {
                for (want, &got) in normed(row, gain.map(|g| g.0.as_slice())).iter().zip(&got[row * n..]) {
                    worst_norm = worst_norm.max((f64::from(got) - want).abs() / (1e-6 * want.abs() + 1e-30));
                }
            }
        }
        Ok(worst.max(worst_norm))
    }
}
