//! Dense products on the host shim, of few and of many tokens, against sums in f64.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Limits,
    ops::{self, DenseMatrix, Gemm},
    shim::Shim,
};
use half::f16;
use std::path::Path;

fn start(multiprocessors: usize) -> Shim {
    let limits = Limits { multiprocessors, shared: 99 << 10 };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

#[test]
fn products_of_any_number_of_tokens() {
    let device = start(2);
    // One tile and parts of tiles of outputs, tokens and columns; several of each, and more tiles
    // of columns than a ring has places; outputs whose pairs are and are not aligned.
    let cases = [
        (16, 8, 1, 5),
        (128, 64, 64, 4),
        (130, 40, 9, 0),
        (37, 200, 130, 5),
        (300, 136, 70, 2),
        (256, 712, 3, 0),
        (35, 3000, 8, 1),
    ];
    for (rows, cols, tokens, offset) in cases {
        let halves = |seed: u64, n: usize| -> Vec<u16> {
            cases::activations(n, seed).into_iter().map(|v| f16::from_f32(v).to_bits()).collect()
        };
        let value = |bits: u16| f64::from(f16::from_bits(bits).to_f32());
        let (w, bias) = (halves(1, rows * cols), cases::activations(rows, 2));
        let x = cases::activations(tokens * cols, 3);
        // An output with other columns on both sides, added to what is there.
        let stride = rows + offset + 4;
        let start = cases::activations(tokens * stride, 4);
        let matrix = DenseMatrix::new(&device, (rows, cols), &w, Some(&bias)).expect("memory");
        let input = Buffer::of(&device, &x, "x").expect("memory");
        let half_input = Buffer::room(&device, 2 * x.len(), "halves").expect("memory");
        let y = Buffer::of(&device, &start, "y").expect("memory");
        ops::halve(&device, &input, &half_input, (1, x.len())).expect("a launch");
        let halved: Vec<u16> = half_input.read(x.len()).expect("a copy");
        for (x, h) in x.iter().zip(&halved) {
            assert_eq!(f16::from_f32(*x).to_bits(), *h, "the nearest half of {x}");
        }
        let few = tokens.min(8);
        matrix.apply_at(&device, &input, &y, (offset, stride), few, true).expect("a launch");
        let eight: Vec<f32> = y.read(start.len()).expect("a copy");
        let many: Vec<(Gemm, Vec<f32>)> = [Gemm::MMA]
            .into_iter()
            .chain(Gemm::WARPGROUP)
            .map(|gemm| {
                y.write(&start).expect("a copy");
                let place = (offset, stride);
                matrix.apply_many_by(gemm, &device, &half_input, &y, place, tokens, true).expect("a launch");
                (gemm, y.read(start.len()).expect("a copy"))
            })
            .collect();
        for n in 0..tokens {
            for c in 0..stride {
                let at = n * stride + c;
                if c < offset || c >= offset + rows {
                    for (gemm, many) in &many {
                        assert_eq!(many[at], start[at], "{gemm:?}: beside the outputs of token {n}");
                    }
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
                for (gemm, many) in &many {
                    let got = many[at];
                    assert!(
                        (f64::from(got) - want[0]).abs() <= bound,
                        "{what}, {gemm:?}: {got} for {want:?}"
                    );
                }
                if n < few {
                    assert!((f64::from(eight[at]) - want[1]).abs() <= bound, "{what}: {} alone", eight[at]);
                }
            }
        }
    }
}

/// A width that is no multiple of 8, which products of many tokens refuse.
#[test]
fn products_of_any_width() {
    let device = start(1);
    let (rows, cols, tokens) = (19, 45, 3);
    let w: Vec<u16> =
        cases::activations(rows * cols, 1).iter().map(|&v| f16::from_f32(v).to_bits()).collect();
    let x = cases::activations(tokens * cols, 2);
    let matrix = DenseMatrix::new(&device, (rows, cols), &w, None).expect("memory");
    let input = Buffer::of(&device, &x, "x").expect("memory");
    let y = Buffer::of(&device, &vec![7f32; tokens * rows], "y").expect("memory");
    matrix.apply_at(&device, &input, &y, (0, rows), tokens, false).expect("a launch");
    let got: Vec<f32> = y.read(tokens * rows).expect("a copy");
    for (n, r) in (0..tokens).flat_map(|n| (0..rows).map(move |r| (n, r))) {
        let pairs = w[r * cols..][..cols].iter().zip(&x[n * cols..]);
        let want: f64 = pairs.map(|(&w, &x)| f64::from(f16::from_bits(w).to_f32()) * f64::from(x)).sum();
        assert!(
            (f64::from(got[n * rows + r]) - want).abs() < 1e-4 * (1.0 + want.abs()),
            "row {r}, token {n}"
        );
    }
}

/// Without a bias, over what was there.
#[test]
fn products_replace_outputs() {
    let device = start(2);
    let (rows, cols, tokens) = (66, 8, 2);
    let one = f16::from_f32(1.0).to_bits();
    let matrix = DenseMatrix::new(&device, (rows, cols), &vec![one; rows * cols], None).expect("memory");
    let x = Buffer::of(&device, &vec![one; tokens * cols], "x").expect("memory");
    for gemm in [Gemm::MMA].into_iter().chain(Gemm::WARPGROUP) {
        let y = Buffer::of(&device, &vec![7f32; tokens * rows], "y").expect("memory");
        matrix.apply_many_by(gemm, &device, &x, &y, (0, rows), tokens, false).expect("a launch");
        let got: Vec<f32> = y.read(tokens * rows).expect("a copy");
        assert!(got.iter().all(|&v| v == 8.0), "{gemm:?}: {got:?}");
    }
}

#[test]
fn blocks_fit_the_device() {
    // Of Llama-3.1-8B on an H200: no multiprocessor idle at 512 tokens, large blocks where all are
    // busy.
    let device = start(132);
    let choice = |rows, tokens| Gemm::choose(&device, rows, tokens).kernel();
    assert_eq!(choice(4096, 1024), "fb_gemm_256");
    assert_eq!(choice(4096, 512), "fb_gemm_128");
    assert_eq!(choice(28672, 1024), "fb_gemm_256");
    assert_eq!(choice(4096, 64), "fb_gemm_64");
}

/// Numbers of any count, those too large for halves among them.
#[test]
fn inputs_are_rounded_to_halves() {
    let device = start(2);
    for count in [1, 8, 13, 5000] {
        let x: Vec<f32> =
            (0..count).map(|i| (i as f32 - 3.3) * if i % 7 == 0 { 1e5 } else { 1e-3 }).collect();
        let (input, out) = (Buffer::of(&device, &x, "x"), Buffer::room(&device, 2 * count, "halves"));
        let (input, out) = (input.expect("memory"), out.expect("memory"));
        ops::halve(&device, &input, &out, (1, count)).expect("a launch");
        for (x, got) in x.iter().zip(out.read::<u16>(count).expect("a copy")) {
            assert_eq!(f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits(), got, "the nearest half of {x}");
        }
    }
}
