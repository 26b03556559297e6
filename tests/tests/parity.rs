//! The parity matrix: family x scheme x instruction set x case, with the codebooks that are
//! shipped.
//!
//! The class of the family is exact: every microkernel gives the bits of the scalar reference. (The
//! backend's own tests do the same with made-up tables of every allowed length.) The table at the
//! end says what ran; a processor's missing instruction sets are skips, said aloud.
#![expect(clippy::print_stderr, reason = "the matrix of what ran and what was skipped is the point")]

use fracbit_base::{Scheme, Shape};
use fracbit_format::Codebook;
use fracbit_kernels::{
    Activations, Isa, Kernels,
    cases::{self, CASES, Packed, assert_same, product},
};
use fracbit_tests::{backends, relative, skip};
use std::fmt::Write as _;

fn shipped(scheme: Scheme) -> Vec<Codebook> {
    let book =
        |s| fracbit_quant::codebook(s).unwrap_or_else(|| panic!("{s} has a built-in codebook")).clone();
    scheme.tables().map(book).collect()
}

#[test]
fn every_microkernel_gives_the_bits_of_the_reference() {
    let backends = backends();
    for (isa, kernels) in &backends {
        if kernels.is_none() {
            skip(&format!("parity of {isa}"), "this processor lacks it");
        }
    }
    let mut table = format!("{:18}", "scheme");
    backends.iter().for_each(|(isa, _)| {
        let _ = write!(table, "{:>10}", isa.name());
    });
    table.push('\n');
    for scheme in Scheme::all() {
        let books = shipped(scheme);
        let mut cells = vec![String::new(); backends.len()];
        for (number, case) in CASES.iter().enumerate() {
            let shape = Shape::new(case.rows, case.cols);
            let packed = Packed::random(scheme, shape, books.clone(), case.group, number as u64 + 1);
            let mut x = Activations::new();
            x.set(&cases::activations(case.batch * case.cols, 77), case.cols).expect("whole rows");
            let want = product(&Kernels::scalar(), &packed, &mut x);
            for ((isa, kernels), cell) in backends.iter().zip(&mut cells) {
                let Some(kernels) = kernels else {
                    "skip".clone_into(cell);
                    continue;
                };
                let got = product(kernels, &packed, &mut x);
                let what =
                    format!("{scheme} {isa} {}x{} batch {} ({})", case.rows, case.cols, case.batch, case.why);
                assert_same(&want, &got, &what);
                let microkernel = books.iter().map(|b| kernels.isa(b)).min().unwrap_or(Isa::Scalar);
                // A scheme without a microkernel of its own runs a lesser one, and says which.
                (if microkernel == *isa { "ok" } else { microkernel.name() }).clone_into(cell);
            }
        }
        let _ = write!(table, "{:18}", scheme.to_string());
        cells.iter().for_each(|cell| {
            let _ = write!(table, "{cell:>10}");
        });
        table.push('\n');
    }
    eprintln!("{table}{} cases each", CASES.len());
}

#[test]
fn products_are_products_of_the_decoded_weights() {
    // The reference's meaning, from the format alone: y = W x with W decoded to f32 and x exact.
    // What differs is the rounding of activations to integers (127 or 1023 steps of the largest of
    // 256).
    for scheme in Scheme::all() {
        let packed = Packed::random(scheme, Shape::new(40, 512), shipped(scheme), 512, 3);
        let view = packed.view().expect("parts that fit");
        let input = cases::activations(3 * 512, 5);
        let weights = view.dequantize();
        let want: Vec<f32> = input
            .chunks(512)
            .flat_map(|x| {
                weights.chunks(512).map(move |w| {
                    w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32
                })
            })
            .collect();
        let mut x = Activations::new();
        x.set(&input, 512).expect("whole rows");
        let kernels = fracbit::kernels().expect("FRACBIT_ISA is good");
        let error = relative(&product(&kernels, &packed, &mut x), &want);
        // Uniform rounding: step / sqrt(12) with step = 4 / 127, against activations of rms 0.6.
        assert!(error < 0.025, "{scheme}: {error}");
    }
}
