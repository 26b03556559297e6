//! Draws on any device against their rules in f64.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{self, Draw, SampleWork, Step},
};

/// Logits that are multiples of `steps`, so that many are equal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Logits {
    pub(crate) vocabulary: usize,
    pub(crate) steps: f32,
}

impl Logits {
    fn make(self) -> Vec<f32> {
        let random = cases::activations(self.vocabulary, 17);
        random.into_iter().map(|v| (v * 12.0).round() * self.steps).collect()
    }
}

/// Draws `count` tokens one behind the other, as a decoder does.
///
/// # Panics
/// When one of them, or what is left in the state, is not what the rules say.
pub(crate) fn check<D: Device>(device: &D, of: Logits, draw: Draw, count: usize) -> Result<(), DeviceError> {
    let n = of.vocabulary;
    let mut logits = of.make();
    let uniforms: Vec<f32> = (0..count).map(|i| (i as f32 * 0.618_034 + 0.013).fract()).collect();
    let mut seen: Vec<u8> = (0..n).map(|i| u8::from(i % 5 == 2)).collect();
    let step = Buffer::of(device, &[Step::new(&[9], &[1])], "step")?;
    let on = Buffer::of(device, &logits, "logits")?;
    let out = Buffer::zeroed(device, 4 * count, "tokens")?;
    let numbers = Buffer::of(device, &uniforms, "random numbers")?;
    let held = Buffer::of(device, &seen, "seen")?;
    let work = SampleWork::new(device, n)?;
    for (i, &uniform) in uniforms.iter().enumerate() {
        ops::sample(&step, &on, &out, &numbers, &held, &work, &draw)?;
        let what = format!("{of:?}, {draw:?}, draw {i}");
        if draw.penalty != 1.0 {
            let penalize = |l: f32| if l > 0.0 { l / draw.penalty } else { l * draw.penalty };
            logits.iter_mut().zip(&seen).filter(|(_, seen)| **seen > 0).for_each(|(l, _)| *l = penalize(*l));
        }
        let token = out.read::<u32>(i + 1)?[i];
        let after = step.read::<Step>(1)?[0];
        assert_eq!(
            (after.positions[0], after.drawn, after.tokens[0]),
            (10 + i as u32, 1 + i as u32, token),
            "{what}"
        );
        seen[token as usize] |= u8::from(draw.penalty != 1.0);
        assert_eq!(held.read::<u8>(n)?, seen, "{what}");
        let top = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        if draw.temperature == 0.0 {
            let want = logits.iter().position(|&l| l == top);
            assert_eq!(Some(token as usize), want, "{what}");
            continue;
        }
        let weight = |l: f32| f64::from((l - top) / draw.temperature).exp();
        let weights: Vec<f64> = logits.iter().map(|&l| weight(l)).collect();
        let mut sorted = weights.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let mut least = f64::from(draw.min_p);
        if draw.top_k > 0 && draw.top_k < n {
            least = least.max(sorted[draw.top_k - 1]);
        }
        if draw.top_p < 1.0 {
            let total: f64 = sorted.iter().filter(|&&w| w >= least).sum();
            let mut sum = 0.0;
            let reached = sorted.iter().find(|&&w| {
                sum += w;
                sum >= f64::from(draw.top_p) * total
            });
            least = least.max(*reached.expect("all of them reach it"));
        }
        // Equal weights stay together.
        let weight = |i: usize| if weights[i] >= least * (1.0 - 1e-6) { weights[i] } else { 0.0 };
        let total: f64 = (0..n).map(weight).sum();
        let before: f64 = (0..token as usize).map(weight).sum();
        let (low, high) = (before / total, (before + weight(token as usize)) / total);
        let near = low - 1e-4 <= f64::from(uniform) && f64::from(uniform) <= high + 1e-4;
        assert!(near && weight(token as usize) > 0.0, "{what}: token {token}, {low}..{high} for {uniform}");
    }
    Ok(())
}
