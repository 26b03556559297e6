//! Every microkernel of this backend against the scalar reference: scheme x table length x
//! instruction set x case.
//!
//! The family is exact: whole results agree bit for bit. What this machine cannot run is listed as
//! skipped, on a line that `cargo xtask parity` looks for.
#![expect(clippy::print_stderr, reason = "what ran and what was skipped is the point")]

use fracbit_base::{Scheme, Shape};
use fracbit_format::SchemeSpec;
use fracbit_kernels::{
    Activations, Isa, Kernels, PackedMatrix,
    cases::{self, CASES, Case, Packed, assert_same, product, tables},
};

/// The instruction sets beyond scalar that this machine has.
fn backends() -> Vec<(Isa, Kernels)> {
    let mut have = Vec::new();
    for isa in [Isa::Neon, Isa::Dotprod, Isa::I8mm] {
        let mut kernels = Kernels::scalar();
        if fracbit_kernels_neon::install_up_to(&mut kernels, isa) == isa {
            have.push((isa, kernels));
        }
    }
    have
}

/// All but the nested schemes: planes of trellises are matrices of others, which the parity of the
/// workspace has, and scalar ones have a test of their own.
fn flat() -> impl Iterator<Item = Scheme> {
    Scheme::all().filter(|scheme| !scheme.nested() && SchemeSpec::of(*scheme).coarsest().is_none())
}

#[test]
fn every_microkernel_gives_the_bits_of_the_reference() {
    let have = backends();
    let (mut seed, mut ran) = (0, 0);
    // On emulated processors a part of the cases may have to do: every second or fifth, and each
    // scheme has others.
    let said = std::env::var_os("FRACBIT_PARITY").and_then(|word| word.to_str()?.parse::<usize>().ok());
    let step = said.unwrap_or(1).max(1);
    let mut first = 0;
    for scheme in flat() {
        for books in tables(scheme) {
            let lengths: Vec<_> = books.iter().map(|b| b.entries().len()).collect();
            first += 1;
            for &Case { rows, cols, batch, group, why } in CASES.iter().skip(first % step).step_by(step) {
                seed += 1;
                let packed = Packed::random(scheme, Shape::new(rows, cols), books.clone(), group, seed);
                let mut x = Activations::new();
                x.set(&cases::activations(batch * cols, seed), cols).unwrap();
                let want = product(&Kernels::scalar(), &packed, &mut x);
                for (isa, kernels) in &have {
                    let got = product(kernels, &packed, &mut x);
                    let what = format!("{scheme} {lengths:?} {isa} {rows}x{cols} batch {batch} ({why})");
                    assert_same(&want, &got, &what);
                    ran += 1;
                    if books[0].additive().is_some() {
                        // Products of few tokens are read from a Psumbook.
                        let got = product(&kernels.clone().expanding(), &packed, &mut x);
                        assert_same(&want, &got, &format!("{what}, expanded"));
                    }
                }
            }
            // Every palette scheme has a microkernel of its own on every instruction set of this
            // backend, but for additive codebooks of 256 centroids, and progressive ones have one
            // for dot products.
            for (isa, kernels) in &have {
                let progressive = SchemeSpec::of(scheme).second_level.is_some();
                let want = match isa {
                    _ if books[0].additive().is_some_and(|index| index.bits == 8) => Isa::Scalar,
                    Isa::Neon if progressive => Isa::Scalar,
                    Isa::I8mm if progressive => Isa::Dotprod,
                    isa => *isa,
                };
                books.iter().for_each(|b| assert_eq!(kernels.isa(b), want, "{scheme} {lengths:?}"));
            }
        }
    }
    for isa in [Isa::Neon, Isa::Dotprod, Isa::I8mm] {
        let word = if have.iter().any(|h| h.0 == isa) { "ok" } else { "skip(processor lacks it)" };
        eprintln!("parity: {isa} {word}");
    }
    eprintln!("parity: {ran} products equal the reference bit for bit");
}

#[test]
fn nested_scalar_codes_give_the_bits_of_the_reference_at_every_precision() {
    // Few and small: the processor is an emulated one.
    let cases = [(20, 50, 1), (35, 272, 3), (16, 560, 10)];
    let cases = cases.map(|(rows, cols, batch)| Case { rows, cols, batch, group: 576, why: "few" });
    for (isa, kernels) in backends() {
        cases::check_nested(&kernels, &cases, &isa.to_string());
    }
}

#[test]
fn operations_beside_the_matrices_give_the_bits_of_the_reference() {
    for (isa, kernels) in backends() {
        assert_eq!(kernels.vectors().isa(), Isa::Neon, "{isa}: attention has one microkernel");
        cases::vectors::check(&kernels.vectors());
    }
}

#[test]
fn extremes_stay_exact() {
    // All codes 0x00 or 0xFF, all activations at an end of the range: the largest sums there are.
    let have = backends();
    for scheme in flat() {
        for books in tables(scheme) {
            for code in [0x00, 0xFF] {
                let mut packed = Packed::random(scheme, Shape::new(20, 272), books.clone(), 272, 1);
                packed.codes.fill(code);
                for sign in [1.0f32, -1.0] {
                    for tokens in [1, 3] {
                        let mut x = Activations::new();
                        x.set(&vec![3.7 * sign; tokens * 272], 272).unwrap();
                        let want = product(&Kernels::scalar(), &packed, &mut x);
                        for (isa, kernels) in &have {
                            let got = product(kernels, &packed, &mut x);
                            assert_same(&want, &got, &format!("{scheme} {isa} codes {code:#x} sign {sign}"));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_exact_and_tokens_do_not_see_each_other() {
    let have = backends();
    for scheme in flat() {
        let packed = Packed::random(scheme, Shape::new(37, 400), cases::codebooks(scheme, 0, 127), 64, 5);
        let view = packed.view().unwrap();
        let (mut want, mut row) = (vec![0.0; 400], vec![0.0; 400]);
        for (isa, kernels) in &have {
            let input = cases::activations(7 * 400, 8);
            let mut x = Activations::new();
            x.set(&input, 400).unwrap();
            let all = product(kernels, &packed, &mut x);
            for (t, token) in input.chunks(400).enumerate() {
                x.set(token, 400).unwrap();
                let one = product(kernels, &packed, &mut x);
                assert_same(&all[t * 37..][..37], &one, &format!("{scheme} {isa} token {t}"));
            }
            let w = PackedMatrix::new(kernels, &view);
            for r in 0..37 {
                view.dequantize_row(r, &mut want);
                w.row(r, &mut row);
                assert_same(&want, &row, &format!("{scheme} {isa} row {r}"));
            }
        }
    }
}

#[test]
fn non_finite_activations_reach_the_result_of_their_token_only() {
    let scheme: Scheme = "tcq-3".parse().unwrap();
    let packed = Packed::random(scheme, Shape::new(32, 512), cases::codebooks(scheme, 0, 127), 512, 5);
    for (isa, kernels) in backends() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut input = cases::activations(3 * 512, 8);
            input[512 + 300] = bad;
            let mut x = Activations::new();
            x.set(&input, 512).unwrap();
            let y = product(&kernels, &packed, &mut x);
            for (i, v) in y.iter().enumerate() {
                assert_eq!(v.is_finite(), i / 32 != 1, "{isa} {bad} output {i}");
            }
        }
    }
}
