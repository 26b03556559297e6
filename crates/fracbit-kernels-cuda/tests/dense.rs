//! Dense products on the host shim, of few and of many tokens, against sums in f64.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Limits,
    ops::{self, DenseMatrix},
    shim::Shim,
};
use half::f16;
use std::path::Path;

#[test]
fn products_of_any_number_of_tokens() {
    let limits = Limits { multiprocessors: 2, shared: 99 << 10 };
    let device =
        Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts");
    // One tile and parts of tiles of outputs, tokens and columns; several of each.
    for (rows, cols, tokens) in [(16, 8, 1), (128, 32, 64), (130, 40, 9), (37, 200, 130), (300, 136, 70)] {
        let halves = |seed: u64, n: usize| -> Vec<u16> {
            cases::activations(n, seed).into_iter().map(|v| f16::from_f32(v).to_bits()).collect()
        };
        let value = |bits: u16| f64::from(f16::from_bits(bits).to_f32());
        let (w, bias) = (halves(1, rows * cols), cases::activations(rows, 2));
        let x = cases::activations(tokens * cols, 3);
        // An output with other columns on both sides, added to what is there.
        let (offset, stride) = (5, rows + 9);
        let start = cases::activations(tokens * stride, 4);
        let matrix = DenseMatrix::new(&device, (rows, cols), &w, Some(&bias)).expect("memory");
        let input = Buffer::of(&device, &x, "x").expect("memory");
        let half_input = Buffer::room(&device, 2 * x.len(), "halves").expect("memory");
        let y = Buffer::of(&device, &start, "y").expect("memory");
        ops::halve(&device, &input, &half_input, x.len()).expect("a launch");
        let halved: Vec<u16> = half_input.read(x.len()).expect("a copy");
        for (x, h) in x.iter().zip(&halved) {
            assert_eq!(f16::from_f32(*x).to_bits(), *h, "the nearest half of {x}");
        }
        matrix.apply_many(&device, &half_input, &y, (offset, stride), tokens, true).expect("a launch");
        let many: Vec<f32> = y.read(start.len()).expect("a copy");
        y.write(&start).expect("a copy");
        let few = tokens.min(8);
        matrix.apply_at(&device, &input, &y, (offset, stride), few, true).expect("a launch");
        let eight: Vec<f32> = y.read(start.len()).expect("a copy");
        for n in 0..tokens {
            for c in 0..stride {
                let at = n * stride + c;
                if c < offset || c >= offset + rows {
                    assert_eq!(many[at], start[at], "beside the outputs of token {n}");
                    continue;
                }
                let r = c - offset;
                let mut want = [f64::from(start[at]) + f64::from(bias[r]); 2];
                let mut bound = 1e-6;
                for i in 0..cols {
                    let (w, exact) = (value(w[r * cols + i]), f64::from(x[n * cols + i]));
                    want[0] += w * value(halved[n * cols + i]);
                    want[1] += w * exact;
                    // Sums in f32, in any order.
                    bound += (w * exact).abs() * (cols + 2) as f64 * 2f64.powi(-24);
                }
                let what = format!("{rows}x{cols}, output {r} of token {n} of {tokens}");
                assert!((f64::from(many[at]) - want[0]).abs() <= bound, "{what}: {} for {want:?}", many[at]);
                if n < few {
                    assert!((f64::from(eight[at]) - want[1]).abs() <= bound, "{what}: {} alone", eight[at]);
                }
            }
        }
    }
}
