//! Every microkernel of this backend against the scalar reference: scheme x table length x
//! instruction set x case.
//!
//! The family is exact: whole results agree bit for bit. What this machine cannot run is listed as
//! skipped.
#![expect(clippy::print_stderr, reason = "the matrix of what ran and what was skipped is the point")]

use fracbit_base::{Family, Scheme, Shape};
use fracbit_format::{Grid, SchemeSpec};
use fracbit_kernels::{
    Activations, Isa, Kernels, PackedMatrix, RowsOf,
    cases::{self, CASES, Case, Packed, assert_same, product, tables},
};
use std::fmt::Write as _;

/// The instruction sets beyond scalar that this machine has, and the rest.
fn backends() -> (Vec<(Isa, Kernels)>, Vec<Isa>) {
    let (mut have, mut skip) = (Vec::new(), Vec::new());
    for isa in [Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx] {
        let mut kernels = Kernels::scalar();
        if fracbit_kernels_x86::install_up_to(&mut kernels, isa) == isa {
            have.push((isa, kernels));
        } else {
            skip.push(isa);
        }
    }
    (have, skip)
}

/// All but the nested schemes: planes of trellises are matrices of others, which the parity of the
/// workspace has, and scalar ones have a test of their own.
fn flat() -> impl Iterator<Item = Scheme> {
    Scheme::all().filter(|scheme| !scheme.nested() && SchemeSpec::of(*scheme).coarsest().is_none())
}

#[test]
fn every_microkernel_gives_the_bits_of_the_reference() {
    let (have, skip) = backends();
    let mut matrix = String::new();
    let mut seed = 0;
    for scheme in flat() {
        for books in tables(scheme) {
            let lengths: Vec<_> = books.iter().map(|b| b.entries().len()).collect();
            let _ = write!(matrix, "{:14} {lengths:?} {:?}:", scheme.to_string(), books[0].grid());
            for &Case { rows, cols, batch, group, why } in CASES {
                seed += 1;
                let packed = Packed::random(scheme, Shape::new(rows, cols), books.clone(), group, seed);
                let mut x = Activations::new();
                x.set(&cases::activations(batch * cols, seed), cols).unwrap();
                let want = product(&Kernels::scalar(), &packed, &mut x);
                for (isa, kernels) in &have {
                    let got = product(kernels, &packed, &mut x);
                    let what = format!("{scheme} {lengths:?} {isa} {rows}x{cols} batch {batch} ({why})");
                    assert_same(&want, &got, &what);
                    if let Some(index) = books[0].additive() {
                        // What is not installed, or not for such matrices: Psumbooks of 256
                        // centroids, and expanding the codes of 16.
                        let mut kernels = kernels.clone();
                        if index.bits == 4 {
                            let got = product(&kernels.clone().expanding(), &packed, &mut x);
                            assert_same(&want, &got, &format!("{what}, expanded"));
                        }
                        assert!(fracbit_kernels_x86::install_psumbook(&mut kernels, *isa), "{isa}");
                        let got = product(&kernels, &packed, &mut x);
                        assert_same(&want, &got, &format!("{what}, by a Psumbook"));
                    }
                }
            }
            for (isa, kernels) in &have {
                // Every scheme has a microkernel of its own on every instruction set of this
                // backend, but where AMX has nothing to win.
                for book in &books {
                    let group_wise = matches!(book.scheme().family(), Family::Gnuq | Family::Int);
                    let plain = *isa == Isa::Amx && (group_wise || book.grid() == Grid::I16);
                    let want = match *isa {
                        Isa::Amx if plain => Isa::Avx512,
                        isa => isa,
                    };
                    if matches!(book.scheme().family(), Family::Additive(_)) {
                        let microkernels = [Isa::Avx2, Isa::AvxVnni];
                        assert!(
                            microkernels.contains(&kernels.isa(book)),
                            "{scheme}: for registers of 256 bits"
                        );
                        continue;
                    }
                    assert_eq!(kernels.isa(book), want, "{scheme} {lengths:?}");
                }
                let _ = write!(matrix, " {isa} ok");
            }
            skip.iter().for_each(|isa| matrix.push_str(&format!(" {isa} skip(processor lacks it)")));
            matrix.push('\n');
        }
    }
    eprintln!("{matrix}");
}

#[test]
fn nested_scalar_codes_give_the_bits_of_the_reference_at_every_precision() {
    cases::check_nested(&Kernels::scalar(), CASES, "scalar");
    let nested = tables("nest-nuq-2..8".parse().unwrap()).pop().expect("a table");
    for (isa, kernels) in backends().0 {
        cases::check_nested(&kernels, CASES, &isa.to_string());
        assert_eq!(kernels.isa(&nested[0]), isa);
    }
}

#[test]
fn extremes_stay_exact() {
    // All codes 0x00 or 0xFF, all activations at an end of the range: the largest sums there are.
    let (have, _) = backends();
    for scheme in flat() {
        for books in tables(scheme) {
            for code in [0x00, 0xFF] {
                let mut packed = Packed::random(scheme, Shape::new(20, 528), books.clone(), 528, 1);
                packed.codes.fill(code);
                for (sign, tokens) in [(1.0f32, 3), (-1.0, 3), (1.0, 6), (-1.0, 6), (1.0, 20), (-1.0, 20)] {
                    let mut x = Activations::new();
                    x.set(&vec![3.7 * sign; tokens * 528], 528).unwrap();
                    let want = product(&Kernels::scalar(), &packed, &mut x);
                    for (isa, kernels) in &have {
                        let got = product(kernels, &packed, &mut x);
                        assert_same(&want, &got, &format!("{scheme} {isa} codes {code:#x} sign {sign}"));
                    }
                    x.set(&vec![3.7 * sign; 528], 528).unwrap();
                    let one =
                        product(&have.last().map_or(Kernels::scalar(), |h| h.1.clone()), &packed, &mut x);
                    assert_same(&want[..20], &one, &format!("{scheme} one token"));
                }
            }
        }
    }
}

#[test]
fn products_in_one_loop_have_the_bits_of_their_own() {
    let schemes = ["tcq-4", "nuq-3", "tcq-fast-2", "int-8", "qoq-g128", "aq-m2v8", "nest-nuq-2..4"];
    let schemes = schemes.map(|s| s.parse::<Scheme>().unwrap());
    for (isa, kernels) in [(Isa::Scalar, Kernels::scalar())].into_iter().chain(backends().0) {
        let matrix = |scheme: Scheme, rows: usize| {
            let books = tables(scheme).pop().expect("a table");
            let packed = Packed::random(scheme, Shape::new(rows, 256), books, 128, rows as u64);
            PackedMatrix::new(&kernels, &packed.view().unwrap())
        };
        // The last alone may end within a strip, and none need be large.
        let rows = [[16, 96, 208, 70], [160, 16, 16, 16], [16, 16, 16, 3]];
        for (i, rows) in rows.iter().cycle().take(schemes.len()).enumerate() {
            let of = |part: usize| matrix(schemes[(i + part) % schemes.len()], rows[part]);
            let matrices: Vec<PackedMatrix> = (0..4).map(of).collect();
            let whole = matrix(schemes[(i + 4) % schemes.len()], 38);
            for count in 1..=4 {
                let banded = cases::banded(matrices[4 - count..].to_vec());
                for batch in [1, 4, 9, 40] {
                    cases::check_together(&RowsOf::all(&whole), &banded, batch, &isa.to_string());
                }
            }
        }
    }
}

#[test]
fn gates_and_factors_may_want_their_activations_in_different_orders() {
    let (have, _) = backends();
    let schemes =
        ["tcq-2", "gnuq-4", "nuq-8", "half-tcq-2.25", "qoq-g128"].map(|s| s.parse::<Scheme>().unwrap());
    for (isa, kernels) in &have {
        let matrix = |scheme: Scheme| {
            let books = tables(scheme).pop().expect("a table");
            let packed = Packed::random(scheme, Shape::new(70, 96), books, 32, 1);
            PackedMatrix::new(kernels, &packed.view().unwrap())
        };
        for (gate, up) in schemes.iter().flat_map(|&gate| schemes.map(|up| (gate, up))) {
            let what = format!("{isa} {gate} {up}");
            let (gates, ups) = (matrix(gate), matrix(up));
            let [gate, up] = [&gates, &ups].map(|of| RowsOf::new(of, 0..70).unwrap());
            for batch in [1, 4, 6, 12, 20] {
                cases::check_gated(&gate, &up, batch, &what);
            }
            let [gate, up] = [&gates, &ups].map(|of| RowsOf::new(of, 0..16).unwrap());
            cases::check_groups(&gate, &up, 4, &what);
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let (have, _) = backends();
    let scalar = [(Isa::Scalar, Kernels::scalar())];
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
    let (one, two) = (pool(1), pool(2));
    for scheme in ["tcq-2", "half-tcq-2.75", "nuq-8", "tcq-hyb-3", "qoq-channel", "aq-m4v8b4"]
        .map(|s| s.parse::<Scheme>().unwrap())
    {
        for most in cases::grids(scheme) {
            let books = cases::codebooks(scheme, 0, *most);
            let packed = Packed::random(scheme, Shape::new(1000, 512), books, 512, 9);
            for (isa, kernels) in have.iter().chain(&scalar) {
                for batch in [1, 5] {
                    let mut x = Activations::new();
                    x.set(&cases::activations(batch * 512, 3), 512).unwrap();
                    let a = one.install(|| product(kernels, &packed, &mut x.clone()));
                    let b = two.install(|| product(kernels, &packed, &mut x.clone()));
                    assert_same(&a, &b, &format!("{scheme} {isa} batch {batch}: one thread and two"));
                }
            }
        }
    }
}

#[test]
fn tokens_do_not_see_each_other_and_rows_are_exact() {
    // A batch equals its tokens one by one (the decode and prefill paths agree), and `row` equals
    // the format's own.
    let (have, _) = backends();
    for scheme in flat() {
        let packed = Packed::random(scheme, Shape::new(37, 400), cases::codebooks(scheme, 0, 127), 64, 5);
        let view = packed.view().unwrap();
        for (isa, kernels) in &have {
            let input = cases::activations(11 * 400, 8);
            let mut x = Activations::new();
            x.set(&input, 400).unwrap();
            let all = product(kernels, &packed, &mut x);
            for (t, token) in input.chunks(400).enumerate() {
                x.set(token, 400).unwrap();
                let one = product(kernels, &packed, &mut x);
                assert_same(&all[t * 37..][..37], &one, &format!("{scheme} {isa} token {t}"));
            }
            let w = PackedMatrix::new(kernels, &view);
            let (mut want, mut got) = (vec![0.0; 400], vec![0.0; 400]);
            for r in 0..37 {
                view.dequantize_row(r, &mut want);
                w.row(r, &mut got);
                assert_same(&want, &got, &format!("{scheme} {isa} row {r}"));
            }
        }
    }
}

#[test]
fn non_finite_activations_reach_the_result_of_their_token_only() {
    let (have, _) = backends();
    let scheme: Scheme = "tcq-3".parse().unwrap();
    let packed = Packed::random(scheme, Shape::new(32, 512), cases::codebooks(scheme, 0, 127), 512, 5);
    for (isa, kernels) in &have {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut input = cases::activations(3 * 512, 8);
            input[512 + 300] = bad;
            let mut x = Activations::new();
            x.set(&input, 512).unwrap();
            let y = product(kernels, &packed, &mut x);
            for (i, v) in y.iter().enumerate() {
                assert_eq!(v.is_finite(), i / 32 != 1, "{isa} {bad} output {i}");
            }
        }
    }
}
