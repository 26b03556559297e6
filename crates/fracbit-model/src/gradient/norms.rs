//! RMS norms of many rows, and the way back through them.

use fracbit_kernels::vectors::plain::rms_norm;
use rayon::prelude::*;

/// RMS norms of rows.
pub(super) fn norm(x: &[f32], width: usize, gain: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    out.par_chunks_exact_mut(width)
        .zip(x.par_chunks_exact(width))
        .for_each(|(out, x)| rms_norm(x, gain, eps, out));
    out
}

/// Derivatives of what went into [`norm`]: with r = 1/rms(x), `dx = r (g dn) - r^3 x mean(x g dn)`.
pub(super) fn norm_back(x: &[f32], width: usize, gain: Option<&[f32]>, eps: f32, dn: &[f32]) -> Vec<f32> {
    #[expect(clippy::cast_precision_loss, reason = "a width")]
    let count = width as f32;
    let mut out = dn.to_vec();
    out.par_chunks_exact_mut(width).zip(x.par_chunks_exact(width)).for_each(|(d, x)| {
        if let Some(gain) = gain {
            d.iter_mut().zip(gain).for_each(|(d, g)| *d *= g);
        }
        let inverse = 1.0 / (x.iter().map(|x| x * x).sum::<f32>() / count + eps).sqrt();
        let mean = x.iter().zip(&*d).map(|(x, d)| x * d).sum::<f32>() / count;
        let by = inverse * inverse * inverse * mean;
        d.iter_mut().zip(x).for_each(|(d, x)| *d = inverse * *d - by * x);
    });
    out
}

/// What a block reads of the residual stream: its norm, where there is one.
pub(super) fn read(x: &[f32], width: usize, gain: Option<&[f32]>, eps: f32) -> Vec<f32> {
    if gain.is_some() { norm(x, width, gain, eps) } else { x.to_vec() }
}

/// Derivatives of what went into [`read`].
pub(super) fn read_back(x: &[f32], width: usize, gain: Option<&[f32]>, eps: f32, dn: Vec<f32>) -> Vec<f32> {
    if gain.is_some() { norm_back(x, width, gain, eps, &dn) } else { dn }
}
