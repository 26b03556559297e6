//! The operations beside the matrices give the bits of the scalar reference.

#![expect(clippy::print_stderr, reason = "tests report what was checked and what was skipped")]

use fracbit_kernels::vectors::{Floats, KEY_BLOCK, Scores, Weigh};
use fracbit_kernels::{Activations, Isa, Kernels, PackedMatrix, Vectors, cases, cases::assert_same, matmul};
use half::f16;

/// The instruction sets that this processor has.
fn backends() -> Vec<Vectors> {
    let mut have = Vec::new();
    for isa in [Isa::Avx2, Isa::Avx512] {
        let mut kernels = Kernels::scalar();
        if fracbit_kernels_x86::install_up_to(&mut kernels, isa) == isa {
            assert_eq!(kernels.vectors().isa(), isa);
            have.push(kernels.vectors());
        } else {
            eprintln!("SKIPPED: the processor lacks {isa}");
        }
    }
    have
}

/// Numbers with a few that are special.
fn special(len: usize, seed: u64) -> Vec<f32> {
    let mut x = cases::activations(len, seed);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -0.0, 88.8, -87.35, 1e30];
    for (i, v) in odd.into_iter().enumerate() {
        if len > 0 && seed % 3 == 1 {
            x[(i * 7919 + 5) % len] = v;
        }
    }
    x
}

fn halves(x: &[f32]) -> Vec<f16> {
    x.iter().map(|&v| f16::from_f32(v)).collect()
}

#[test]
fn attention() {
    let scalar = Vectors::scalar();
    for vectors in backends() {
        let mut seed = 0;
        for dim in [1, 2, 6, 7, 16, 24, 64, 80, 96, 100, 128, 256] {
            for count in [1, 2, 3, 4, 5, 7, 8, 11, 16] {
                for positions in [0, 1, 15, 16, 17, 40] {
                    seed += 1;
                    let blocks = positions / KEY_BLOCK;
                    let (queries, keys) =
                        (special(count * dim, seed), special(blocks * KEY_BLOCK * dim, seed + 1));
                    let (weights, values) =
                        (special(count * 50, seed + 2), special(positions * dim, seed + 1));
                    let (key_halves, value_halves) = (halves(&keys), halves(&values));
                    let start = cases::activations(count * dim, seed);
                    for (keys, values) in [
                        (Floats::F32(&keys), Floats::F32(&values)),
                        (Floats::F16(&key_halves), Floats::F16(&value_halves)),
                    ] {
                        let what = format!("{} {dim} {count} {positions}", vectors.isa());
                        let args = Scores { queries: &queries, dim, keys, stride: 50 };
                        let (mut want, mut got) = (vec![9.0; count * 50], vec![9.0; count * 50]);
                        scalar.scores(&args, &mut want);
                        vectors.scores(&args, &mut got);
                        assert_same(&want, &got, &format!("scores {what}"));
                        let args = Weigh { weights: &weights, stride: 50, values, dim };
                        let (mut want, mut got) = (start.clone(), start.clone());
                        scalar.weigh(&args, &mut want);
                        vectors.weigh(&args, &mut got);
                        assert_same(&want, &got, &format!("weigh {what}"));
                    }
                }
            }
        }
    }
}

#[test]
fn elementwise() {
    let scalar = Vectors::scalar();
    for vectors in backends() {
        for len in (0..70).chain([100, 128, 576, 2048, 2051]) {
            let what = format!("{} {len}", vectors.isa());
            let (x, y) = (special(len, len as u64), special(len, len as u64 + 1));
            let both = |f: &dyn Fn(&Vectors, &mut [f32])| {
                let (mut want, mut got) = (x.clone(), x.clone());
                f(&scalar, &mut want);
                f(&vectors, &mut got);
                assert_same(&want, &got, &what);
            };
            both(&|v, x| v.add(&y, x));
            both(&|v, x| v.silu_mul(x, &y));
            both(&|v, out| v.rms_norm(&y, Some(&x), 1e-5, out));
            both(&|v, out| v.rms_norm(&y, None, 1e-5, out));
            both(&|v, x| {
                let (top, sum) = v.softmax(x);
                if let [a, b, ..] = x {
                    (*a, *b) = (top, sum);
                }
            });
            if len > 0 {
                let (cos, sin) = (special(len, 7), special(len, 8));
                let (mut want, mut got) = ([&*x, &*y].concat(), [&*x, &*y].concat());
                scalar.rotate(&mut want, &cos, &sin);
                vectors.rotate(&mut got, &cos, &sin);
                assert_same(&want, &got, &format!("rotate {what}"));
            }
        }
    }
}

#[test]
fn rounded_activations() {
    // The integers are seen through products: the scalar bodies of matrices, with the rounding of each instruction set.
    for isa in backends().iter().map(Vectors::isa) {
        let mut kernels = Kernels::scalar();
        fracbit_kernels_x86::install_up_to(&mut kernels, isa);
        let mut rounding = Kernels::scalar();
        rounding.install_vectors(kernels.vectors());
        for (scheme, most) in [("nuq-4", 127), ("nuq-8", 30000)] {
            for cols in [1, 16, 100, 256, 300, 1000] {
                let scheme = scheme.parse().expect("a scheme");
                let shape = fracbit_base::Shape::new(16, cols);
                let group = cols.next_multiple_of(16);
                let packed =
                    cases::Packed::random(scheme, shape, cases::codebooks(scheme, 0, most), group, 1);
                for seed in 0..6 {
                    let product = |kernels: &Kernels| {
                        let w = PackedMatrix::new(kernels, &packed.view().expect("parts that fit"));
                        let (mut x, mut y) = (Activations::new(), vec![0.0; 3 * 16]);
                        x.set(&special(3 * cols, seed), cols).expect("three tokens");
                        matmul(&w, &mut x, &mut y).expect("shapes that fit");
                        y
                    };
                    let what = format!("{isa} {scheme} {cols} {seed}");
                    assert_same(&product(&Kernels::scalar()), &product(&rounding), &what);
                }
            }
        }
    }
}
