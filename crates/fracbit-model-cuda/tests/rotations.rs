//! Rotations on the host shim beside those of the processor: every width of the models at hand,
//! whole rows and rows that go through shared memory in parts.

use fracbit_kernels_cuda::{Buffer, Limits, shim::Shim};
use fracbit_model_cuda::tables;
use fracbit_rotation::Rotation;
use std::path::Path;

/// Widths of residual streams, heads and feed-forward layers of Llama, Mistral, Qwen, SmolLM, Phi
/// and Gemma models.
const WIDTHS: [usize; 27] = [
    16, 64, 80, 96, 128, 256, 576, 896, 960, 1536, 2048, 2560, 3072, 3584, 4096, 4864, 5120, 5632, 8192,
    8960, 9728, 11008, 13824, 14336, 18944, 28672, 29568,
];

fn device(shared: usize) -> Shim {
    let limits = Limits { multiprocessors: 2, shared };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

fn check(device: &Shim, n: usize) {
    let rotation = Rotation::new(n, 3, 1).expect("a width");
    let turned = tables(device, &rotation).expect("memory");
    let x: Vec<f32> = (0..2 * n).map(|i| ((i * 7919 % 2003) as f32 - 1000.0) / 700.0).collect();
    let input = Buffer::of(device, &x, "x").expect("memory");
    let (out, back) = (Buffer::zeroed(device, 8 * n, "y"), Buffer::zeroed(device, 8 * n, "z"));
    let (out, back) = (out.expect("memory"), back.expect("memory"));
    turned.rotate(device, &input, &out, 2, false, None).expect("a launch");
    turned.rotate(device, &out, &back, 2, true, None).expect("a launch");
    let (got, again): (Vec<f32>, Vec<f32>) = (out.read(2 * n).expect("y"), back.read(2 * n).expect("z"));
    let mut want = x.clone();
    want.chunks_exact_mut(n).for_each(|row| rotation.apply(row));
    // Entries are at most 1.5; sums of up to 29568 terms in f32, in another order.
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far(&got, &want) < 2e-4, "{n}: {} off", far(&got, &want));
    assert!(far(&again, &x) < 2e-4, "{n} and back: {} off", far(&again, &x));
}

#[test]
fn every_width_of_the_models() {
    let device = device(99 << 10);
    WIDTHS.iter().for_each(|&n| check(&device, n));
}

#[test]
fn rows_in_parts() {
    // 512 floats: parts of dense factors, and Walsh matrices that are themselves larger.
    let device = device(2 << 10);
    for n in [896, 1024, 1536, 2560, 4096, 4864] {
        check(&device, n);
    }
}
