//! The scalar reference against a plain product in `f64`, and the refusal of arguments that do not
//! fit.

use fracbit_base::{Family, Rate, Scheme, Shape};
use fracbit_format::{PackedView, Planes};
use fracbit_kernels::{
    Activations, Gate, Group, Isa, Kernels, Operand, PackedMatrix, Precision, RowsOf,
    cases::{self, CASES, Packed},
    matmul, matmul_gated_with, matmul_groups_with, matmul_refined_with, matmul_rows_with,
    matmul_together_with, matmul_with, with_team,
};

/// `y = x W^T` from dequantized weights, with the sum of the magnitudes of its terms and the
/// largest error that rounding activations to `levels` can cause.
fn product(view: &PackedView<'_>, x: &[f32], levels: f64) -> Vec<(f64, f64)> {
    let Shape { rows, cols } = view.shape();
    let w = view.dequantize();
    let mut out = Vec::new();
    for x in x.chunks_exact(cols) {
        for w in w.chunks_exact(cols).take(rows) {
            let (mut y, mut bound) = (0.0, 0.0);
            for (w, x) in w.chunks(256).zip(x.chunks(256)) {
                let top = x.iter().fold(0.0, |m: f64, v| m.max(f64::from(v.abs())));
                for (&w, &x) in w.iter().zip(x) {
                    y += f64::from(w) * f64::from(x);
                    // Half a step, and a few roundings of f32 at every level of the sum.
                    bound += f64::from(w.abs()) * (0.5 * top / levels + 1e-5 * f64::from(x.abs()));
                }
            }
            out.push((y, bound));
        }
    }
    out
}

#[test]
fn reference_is_the_product_up_to_the_rounding_of_activations() {
    let mut seed = 0;
    for scheme in Scheme::all() {
        for most in [127, 32_767] {
            if most > 127 && !matches!(scheme.family(), Family::Nuq | Family::Vq) {
                continue;
            }
            for case in CASES.iter().filter(|c| c.batch < 6) {
                seed += 1;
                let shape = Shape::new(case.rows, case.cols);
                let packed =
                    Packed::random(scheme, shape, cases::codebooks(scheme, 0, most), case.group, seed);
                let view = packed.view().unwrap();
                let w = PackedMatrix::new(&Kernels::scalar(), &view);
                assert_eq!(w.isa(), Isa::Scalar);
                let input = cases::activations(case.batch * case.cols, seed);
                let mut x = Activations::new();
                x.set(&input, case.cols).unwrap();
                let mut y = vec![f32::NAN; case.batch * case.rows];
                matmul(&w, &mut x, &mut y).unwrap();
                let levels = if most > 127 { 1023.0 } else { 127.0 };
                for (i, (&got, (want, bound))) in y.iter().zip(product(&view, &input, levels)).enumerate() {
                    let error = (f64::from(got) - want).abs();
                    assert!(
                        error <= bound + 1e-30,
                        "{scheme} {}: output {i}: {got}, want {want} +- {bound}",
                        case.why
                    );
                }
                let mut announced = Activations::new();
                announced.announce(&input, case.cols).unwrap();
                let mut again = vec![f32::NAN; y.len()];
                with_team(|team| matmul_with(team, &w, &input, &mut announced, &mut again)).unwrap();
                assert_eq!(y, again, "{scheme} {}: values that come with the product", case.why);
                assert!(matmul(&w, &mut announced, &mut again).is_err(), "it has no copy of them");
                // What rounding loses is below half a step, and is rounded to 127 steps again.
                let levels = if most > 127 { 1023.0 } else { 127.0 * 254.0 };
                y.fill(f32::NAN);
                with_team(|team| matmul_refined_with(team, RowsOf::all(&w).into(), &input, &mut x, &mut y))
                    .unwrap();
                for (i, (&got, (want, bound))) in y.iter().zip(product(&view, &input, levels)).enumerate() {
                    let error = (f64::from(got) - want).abs();
                    assert!(
                        error <= bound + 1e-30,
                        "{scheme} {}, refined: output {i}: {got}, want {want}",
                        case.why
                    );
                }
                assert_eq!(x.batch(), case.batch, "the batch is as it was");
            }
        }
    }
}

#[test]
fn a_matrix_of_both_grids_is_no_worse_refined() {
    // A directory may hold such codebooks: the first half of the columns on the int8 grid, the
    // second on the int16 grid.
    let scheme: Scheme = "half-tcq-hyb-2.25".parse().unwrap();
    let halves = scheme.tables().zip([127, 32_767]);
    let books = halves.map(|(half, most)| cases::codebook(half, 1024, most)).collect();
    let packed = Packed::random(scheme, Shape::new(64, 32), books, 32, 9);
    let view = packed.view().unwrap();
    let w = PackedMatrix::new(&Kernels::scalar(), &view);
    let mut input = cases::activations(32, 5);
    input[..16].fill(0.0);
    let mut x = Activations::new();
    x.set(&input, 32).unwrap();
    let mut y = vec![f32::NAN; 64];
    with_team(|team| matmul_refined_with(team, RowsOf::all(&w).into(), &input, &mut x, &mut y)).unwrap();
    for (&got, (want, bound)) in y.iter().zip(product(&view, &input, 1023.0)) {
        assert!((f64::from(got) - want).abs() <= bound, "{got}, want {want} +- {bound}");
    }
}

#[test]
fn a_precision_reads_the_first_planes_and_nothing_else() {
    let shape = Shape::new(40, 100);
    for scheme in Scheme::all().filter(|scheme| scheme.planes() > 1) {
        let packed = Packed::random(scheme, shape, cases::codebooks(scheme, 0, 127), 32, 3);
        let view = packed.view().unwrap();
        let w = PackedMatrix::new(&Kernels::scalar(), &view);
        // Every plane as a matrix of its own scheme.
        let (scales, strips) = (view.scales().len() / scheme.planes(), view.layout().tiles_down());
        let planes: Vec<PackedMatrix> = view
            .layout()
            .segments()
            .iter()
            .zip(view.codebooks())
            .map(|(segment, book)| {
                let bytes = (segment.end - segment.start) * segment.tile_bytes;
                let from = |strip: usize| strip * view.layout().row_bytes() + segment.offset;
                let codes: Vec<u8> =
                    (0..strips).flat_map(|s| view.codes()[from(s)..][..bytes].to_vec()).collect();
                let scales = &view.scales()[segment.plane * scales..][..scales];
                let gain = &view.gains()[segment.plane..=segment.plane];
                let planes = Planes { codes: &codes, second_level: &[], scales, gains: gain };
                let one = PackedView::new(segment.scheme, shape, &[book], planes, 32);
                PackedMatrix::new(&Kernels::scalar(), &one.unwrap())
            })
            .collect();
        for batch in [1, 3, 20] {
            let input = cases::activations(batch * shape.cols, 4);
            let product = |w: RowsOf<'_>| {
                let (mut x, mut y) = (Activations::new(), vec![f32::NAN; batch * shape.rows]);
                x.announce(&input, shape.cols).unwrap();
                with_team(|team| matmul_rows_with(team, w, &input, &mut x, &mut y)).unwrap();
                y
            };
            let parts: Vec<Vec<f32>> = planes.iter().map(|plane| product(RowsOf::all(plane))).collect();
            let rates = scheme.precisions().map(Precision::at_most);
            let below = Precision::at_most(Rate::quarter_bits(0));
            for (read, precision) in [(1, below)].into_iter().chain((1..).zip(rates)) {
                let got = product(RowsOf::all(&w).at(precision));
                // The base has the bits of its own matrix; planes are added to it, group by group.
                let sum = |i: usize| parts[..read].iter().map(|y| y[i]).sum::<f32>();
                let same = (0..got.len()).all(|i| got[i].to_bits() == parts[0][i].to_bits());
                assert_eq!(same, read == 1, "{scheme} {precision:?}");
                for (i, &got) in got.iter().enumerate() {
                    assert!(
                        (got - sum(i)).abs() <= 1e-4 * (1.0 + sum(i).abs()),
                        "{scheme} {precision:?} {i}"
                    );
                }
                let mut row = vec![0.0; shape.cols];
                let mut want = vec![0.0; shape.cols];
                w.row_at(33, precision, &mut row);
                for plane in &planes[..read] {
                    let mut own = vec![0.0; shape.cols];
                    plane.row(33, &mut own);
                    want.iter_mut().zip(own).for_each(|(w, own)| *w += own);
                }
                assert_eq!(row, want, "{scheme} {precision:?}");
            }
            assert_eq!(
                product(RowsOf::all(&w)),
                product(RowsOf::all(&w).at(Precision::at_most(scheme.rate())))
            );
        }
        let bytes: Vec<usize> = scheme.precisions().map(|p| w.bytes_at(Precision::at_most(p))).collect();
        assert!(bytes.windows(2).all(|pair| pair[0] < pair[1]), "{scheme}: {bytes:?}");
    }
}

#[test]
fn rows_of_a_matrix_and_gates_are_products_too() {
    let matrix = |scheme: &str, rows: usize, seed: u64| {
        let scheme: Scheme = scheme.parse().unwrap();
        let books = cases::codebooks(scheme, 1, 127);
        let packed = Packed::random(scheme, Shape::new(rows, 96), books, 32, seed);
        PackedMatrix::new(&Kernels::scalar(), &packed.view().unwrap())
    };
    // A gate and its factor that share a matrix, and two of their own.
    let (shared, other) = (matrix("tcq-2", 200, 1), matrix("half-tcq-2.25", 70, 2));
    for (gate, up) in [
        (RowsOf::new(&shared, 16..86), RowsOf::new(&shared, 96..166)),
        (RowsOf::new(&shared, 0..70), RowsOf::new(&other, 0..70)),
    ] {
        let (gate, up) = (gate.unwrap(), up.unwrap());
        for batch in [1, 3, 8, 9, 40, 515] {
            cases::check_gated(&gate, &up, batch, "scalar");
        }
    }
    let banded = cases::banded(vec![shared.clone(), other.clone()]);
    for batch in [1, 5, 40] {
        cases::check_together(&RowsOf::new(&shared, 16..54).unwrap(), &banded, batch, "scalar");
    }
    // The rows are those of the whole product.
    let input = cases::activations(11 * 96, 3);
    let mut x = Activations::new();
    x.set(&input, 96).unwrap();
    let (mut all, mut some) = (vec![0.0; 11 * 200], vec![0.0; 11 * 50]);
    matmul(&shared, &mut x, &mut all).unwrap();
    let rows = RowsOf::new(&shared, 32..82).unwrap();
    with_team(|team| matmul_rows_with(team, rows, &input, &mut x, &mut some)).unwrap();
    for (all, some) in all.chunks(200).zip(some.chunks(50)) {
        assert_eq!(&all[32..82], some);
    }
    for rows in [8..24, 0..201, 208..208] {
        assert!(RowsOf::new(&shared, rows.clone()).is_none(), "{rows:?} of 200 rows");
    }
    let mut outs = vec![vec![0.0; 11 * 200]; 4];
    let four = outs.iter_mut().map(|y| (Operand::from(RowsOf::all(&shared)), &mut y[..]));
    let refused = with_team(|team| matmul_together_with(team, four, &input, &mut x));
    assert!(refused.unwrap_err().to_string().contains("products"));
    let short = [(Operand::Banded(&banded, Precision::FULL), &mut outs[0][1..])];
    let refused = with_team(|team| matmul_together_with(team, short, &input, &mut x));
    assert!(refused.unwrap_err().to_string().contains("2970"));
    let both = [RowsOf::new(&shared, 0..64).unwrap(), RowsOf::new(&shared, 64..80).unwrap()];
    let refused = with_team(|team| matmul_gated_with(team, Gate::Silu, both, &input, &mut x, &mut []));
    assert!(refused.unwrap_err().to_string().contains("rows of up"));
}

#[test]
fn groups_of_tokens_meet_their_own_rows() {
    let matrix = |scheme: &str, rows: usize, seed: u64| {
        let scheme: Scheme = scheme.parse().unwrap();
        let packed = Packed::random(scheme, Shape::new(rows, 96), cases::codebooks(scheme, 1, 127), 32, seed);
        PackedMatrix::new(&Kernels::scalar(), &packed.view().unwrap())
    };
    let (gates, ups) = (matrix("tcq-2", 16 + 6 * 48, 1), matrix("half-tcq-2.25", 6 * 48, 2));
    let [gate, up] = [(&gates, 16..64), (&ups, 0..48)].map(|(of, rows)| RowsOf::new(of, rows).unwrap());
    cases::check_groups(&gate, &up, 6, "scalar");

    let input = cases::activations(3 * 96, 3);
    let refused = |of: &[RowsOf<'_>], groups: &[(usize, std::ops::Range<usize>)]| {
        let groups: Vec<Group> =
            groups.iter().map(|(piece, tokens)| Group { piece: *piece, tokens: tokens.clone() }).collect();
        let mut x = Activations::new();
        x.announce(&input, 96).unwrap();
        let mut y = vec![0.0; 3 * 48];
        with_team(|team| matmul_groups_with(team, (of, Gate::Silu), &groups, &input, &mut x, &mut y))
            .unwrap_err()
            .to_string()
    };
    let both = [gate.clone(), up.clone()];
    for (groups, rule) in [
        (&[(0, 0..2)][..], "`tokens` should be 3 long, got 2"),
        (&[(0, 0..2), (1, 1..3)], "behind 2, got 1..3"),
        (&[(0, 1..3), (1, 0..1)], "behind 0, got 1..3"),
        (&[(0, 0..3), (1, 3..3)], "behind 3, got 3..3"),
        (&[(6, 0..3)], "whole strips within 304 rows, got 6 of 48 rows"),
        (&[(usize::MAX, 0..3)], "whole strips within 304 rows"),
    ] {
        let said = refused(&both, groups);
        assert!(said.contains(rule), "{groups:?}: {said}");
    }
    assert!(refused(&[], &[(0, 0..3)]).contains("one, or a gate and its factor"));
    let short = RowsOf::new(&ups, 0..40).unwrap();
    assert!(refused(std::slice::from_ref(&short), &[(0, 0..3)]).contains("whole strips"));
    assert!(refused(&[gate, short], &[(0, 0..3)]).contains("rows of up"));
}

#[test]
fn a_matrix_without_rows_has_an_empty_product() {
    let scheme: Scheme = "tcq-2".parse().unwrap();
    let packed = Packed::random(scheme, Shape::new(0, 64), cases::codebooks(scheme, 0, 127), 64, 4);
    let w = PackedMatrix::new(&Kernels::scalar(), &packed.view().unwrap());
    let mut x = Activations::new();
    x.set(&[1.0; 128], 64).unwrap();
    assert_eq!(matmul(&w, &mut x, &mut []), Ok(()));
    with_team(|team| matmul_refined_with(team, RowsOf::all(&w).into(), &[1.0; 128], &mut x, &mut []))
        .unwrap();
}

#[test]
fn int8_activations_cost_what_the_readme_says() {
    // Relative squared error of a product with normal activations (here: sums of 12 uniforms),
    // 4-bit trellis weights.
    let scheme: Scheme = "tcq-4".parse().unwrap();
    let packed = Packed::random(scheme, Shape::new(64, 4096), cases::codebooks(scheme, 1, 127), 4096, 4);
    let view = packed.view().unwrap();
    let mut random = cases::Random::new(77);
    let input: Vec<f32> = (0..4096).map(|_| (0..12).map(|_| random.unit() - 0.5).sum()).collect();
    let mut x = Activations::new();
    x.set(&input, 4096).unwrap();
    let mut y = vec![0.0; 64];
    matmul(&PackedMatrix::new(&Kernels::scalar(), &view), &mut x, &mut y).unwrap();
    let (mut error, mut power) = (0.0, 0.0);
    for (&got, (want, _)) in y.iter().zip(product(&view, &input, 127.0)) {
        error += (f64::from(got) - want).powi(2);
        power += want * want;
    }
    let relative = error / power;
    assert!((1e-5..2e-4).contains(&relative), "relative squared error {relative:e}");
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let scheme: Scheme = "nuq-4".parse().unwrap();
    let packed = Packed::random(scheme, Shape::new(20, 64), cases::codebooks(scheme, 0, 127), 64, 4);
    let w = PackedMatrix::new(&Kernels::scalar(), &packed.view().unwrap());
    let mut x = Activations::new();
    assert!(matmul(&w, &mut x, &mut []).is_err(), "no activations");
    x.set(&[1.0; 48], 48).unwrap();
    let error = matmul(&w, &mut x, &mut [0.0; 20]).unwrap_err().to_string();
    assert_eq!(error, "matmul: `x` should be (batch, 64), got (batch, 48)");
    x.set(&[1.0; 128], 64).unwrap();
    let error = matmul(&w, &mut x, &mut [0.0; 39]).unwrap_err().to_string();
    assert_eq!(error, "matmul: `y` should be 40 long, got 39");
    assert!(matmul(&w, &mut x, &mut [0.0; 40]).is_ok());
}
