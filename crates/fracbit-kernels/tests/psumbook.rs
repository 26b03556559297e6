//! Products by a Psumbook are those of expanded codes, bit for bit.

use fracbit_base::{Family, Scheme, Shape};
use fracbit_format::{Codebook, Layout, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix, PsumMicrokernel, PsumTile, RowsOf,
    cases::{self, CASES, Case, Packed, assert_same, product},
    matmul_with, psumbook, with_team,
};
use half::f16;

/// Names of the schemes of additive codebooks.
const SCHEMES: [&str; 7] =
    ["aq-m1v8", "aq-m2v8b4", "aq-m1v4", "aq-m2v8", "aq-m4v8b4", "aq-m3v8", "aq-m6v8b4"];

fn kernels() -> Kernels {
    let mut kernels = Kernels::scalar();
    kernels.install_linear(|kernels, view| psumbook(kernels, view, PsumMicrokernel::portable(8)));
    kernels.install_linear(|kernels, view| psumbook(kernels, view, PsumMicrokernel::portable(4)));
    kernels
}

fn packed(name: &str, shape: Shape, group: usize, seed: u64) -> Packed {
    let scheme: Scheme = name.parse().expect("a scheme");
    let additive = matches!(scheme.family(), Family::Additive(_));
    let books = if additive { vec![cases::centroids(scheme)] } else { cases::codebooks(scheme, 0, 127) };
    Packed::random(scheme, shape, books, group, seed)
}

#[test]
fn every_case_gives_the_bits_of_expanded_codes() {
    for name in SCHEMES {
        for (seed, &Case { rows, cols, batch, group, why }) in (1..).zip(CASES) {
            let packed = packed(name, Shape::new(rows, cols), group, seed);
            let mut x = Activations::new();
            x.set(&cases::activations(batch * cols, seed), cols).expect("whole tokens");
            let want = product(&Kernels::scalar(), &packed, &mut x);
            let got = product(&kernels(), &packed, &mut x);
            assert_same(&want, &got, &format!("{name} {rows}x{cols} batch {batch} ({why})"));
        }
    }
}

#[test]
fn what_is_read_at_once_changes_no_bit() {
    for name in ["aq-m1v4", "aq-m3v8", "aq-m4v8b4"] {
        for (rows, cols, batch) in [(100, 600, 1), (1100, 160, 3)] {
            let packed = packed(name, Shape::new(rows, cols), 96, 7);
            let mut x = Activations::new();
            x.set(&cases::activations(batch * cols, 2), cols).expect("whole tokens");
            let want = product(&Kernels::scalar(), &packed, &mut x);
            for sums in [0, 1000, 8192, usize::MAX] {
                for strips in [0, 1, 3, 4, 5, PsumTile::MOST_STRIPS, usize::MAX] {
                    let mut kernels = kernels();
                    kernels.set_psum_tile(PsumTile { sums, strips });
                    let got = product(&kernels, &packed, &mut x);
                    assert_same(&want, &got, &format!("{name} {rows}x{cols}, {sums} sums, {strips} strips"));
                }
            }
        }
    }
}

#[test]
fn gates_and_experts_have_the_psums_of_their_own_tokens() {
    let kernels = kernels();
    let new = |name: &str| {
        let packed = packed(name, Shape::new(96, 96), 32, 3);
        PackedMatrix::new(&kernels, &packed.view().expect("parts that fit"))
    };
    for (gate, up) in
        [("aq-m1v4", "aq-m2v8"), ("aq-m3v8", "aq-m3v8"), ("vq-2", "aq-m4v8b4"), ("aq-m1v8", "tcq-2")]
    {
        let (gates, ups) = (new(gate), new(up));
        let [all_gates, all_ups] = [&gates, &ups].map(RowsOf::all);
        for batch in [1, 2, 4, 7, 9] {
            cases::check_gated(&all_gates, &all_ups, batch, &format!("{gate} {up}"));
        }
        let [first, factor] = [&gates, &ups].map(|of| RowsOf::new(of, 0..32).expect("whole strips"));
        cases::check_groups(&first, &factor, 3, &format!("{gate} {up}"));
    }
}

#[test]
fn others_are_left_to_others() {
    for (name, taken) in [("aq-m2v8", true), ("aq-m6v8b4", true), ("vq-2", false), ("nest-tcq-2+1", false)] {
        let packed = packed(name, Shape::new(16, 32), 32, 1);
        assert_eq!(by_psumbook(&packed), taken, "{name}");
    }
    // One more than fits: 127 * 259 = 32 893.
    let scheme: Scheme = "aq-m1v4".parse().expect("a scheme");
    let mut entries = cases::centroids(scheme).entries().to_vec();
    for (last, taken) in [(4, true), (5, false)] {
        entries[..4].copy_from_slice(&[127, -127, last, 0]);
        let book = Codebook::new(scheme, entries.clone(), 0.01).expect("within the grid");
        let packed = Packed::random(scheme, Shape::new(16, 32), vec![book], 32, 1);
        assert_eq!(by_psumbook(&packed), taken, "{last}");
    }
}

fn by_psumbook(packed: &Packed) -> bool {
    PackedMatrix::new(&kernels(), &packed.view().expect("parts that fit")).reads_psumbook(1)
}

#[test]
fn limits_say_where_codes_are_expanded_and_change_no_bit() {
    let mut kernels = Kernels::scalar();
    kernels
        .install_linear(|kernels, view| psumbook(kernels, view, PsumMicrokernel::portable(8).within(2, 48)));
    let scheme: Scheme = "aq-m2v8".parse().expect("a scheme");
    let packed = [80, 40].map(|rows| {
        Packed::random(scheme, Shape::new(rows, 96), vec![cases::centroids(scheme)], 96, rows as u64)
    });
    let [many, few] =
        packed.each_ref().map(|packed| PackedMatrix::new(&kernels, &packed.view().expect("parts that fit")));
    let reads = [1, 2, 3].map(|tokens| (many.reads_psumbook(tokens), few.reads_psumbook(tokens)));
    assert_eq!(reads, [(true, false), (true, false), (false, false)]);
    for batch in [1, 2, 3] {
        // With the Psumbook of the other matrix, and before there is one.
        for (seed, order) in [(3, [0, 1]), (4, [1, 0])] {
            let input = cases::activations(batch * 96, seed);
            let (mut shared, mut x) = (Activations::new(), Activations::new());
            shared.announce(&input, 96).expect("whole rows");
            x.set(&input, 96).expect("whole rows");
            for at in order {
                let matrix = [&many, &few][at];
                let mut got = vec![0.0; batch * matrix.shape().rows];
                with_team(|team| matmul_with(team, matrix, &input, &mut shared, &mut got))
                    .expect("shapes that fit");
                let want = product(&Kernels::scalar(), &packed[at], &mut x);
                assert_same(&want, &got, &format!("{batch} tokens, matrix {at}"));
            }
        }
    }
}

/// CodeGEMM (section 5): with centroids {0, 1}^v times powers of two a Psumbook multiplies uniform
/// weights, with {-1, 1}^v times any factors binary-coded ones.
#[test]
fn uniform_and_binary_weights_are_additive_codebooks() {
    const WEIGHTS: usize = 8;
    let shape = Shape::new(37, 560);
    let bit = |code: usize, k: usize| i16::try_from(code >> k & 1).expect("a bit");
    for (name, factors, values) in [
        ("aq-m1v8", &[1i16][..], [0i16, 1]),
        ("aq-m2v8", &[1, 2], [0, 1]),
        ("aq-m3v8", &[1, 2, 4], [0, 1]),
        ("aq-m2v8", &[19, 7], [-1, 1]),
        ("aq-m3v8", &[17, 9, 5], [-1, 1]),
    ] {
        let scheme: Scheme = name.parse().expect("a scheme");
        let entries = factors.iter().flat_map(|factor| {
            let entry = move |i: usize| factor * values[usize::from(bit(i / WEIGHTS, i % WEIGHTS) > 0)];
            (0..256 * WEIGHTS).map(entry)
        });
        // The gain of such matrices is .7; the factor of all products is 1.
        let step = 1.0 / 0.7f32;
        assert_eq!(step * 0.7, 1.0);
        let book = Codebook::new(scheme, entries.collect(), step).expect("within the grid");
        let mut packed = Packed::random(scheme, shape, vec![book], shape.cols, 5);
        packed.scales.fill(f16::ONE);
        // Each weight by itself: its bits, plane by plane.
        let planes = factors.len();
        let layout = Layout::new(scheme, shape);
        let weight = |r: usize, c: usize| -> i32 {
            let tile = &packed.codes[layout.tile(0, r / TILE_ROWS, c / TILE_COLS)];
            let vector = c % TILE_COLS / WEIGHTS;
            let plane = |p: usize| {
                let code = tile[(vector * planes + p) * TILE_ROWS + r % TILE_ROWS];
                i32::from(factors[p] * values[usize::from(bit(code.into(), c % WEIGHTS) > 0)])
            };
            (0..planes).map(plane).sum()
        };
        for batch in [1, 3, 8] {
            // Integers whose largest is 127 in every group are rounded to themselves.
            let int = |i: usize| i32::try_from(i * 31 % 255).expect("small") - 127;
            let input =
                |t: usize, c: usize| if c.is_multiple_of(256) { 127 } else { int(t * shape.cols + c) };
            let values = (0..batch * shape.cols).map(|i| input(i / shape.cols, i % shape.cols) as f32);
            let mut x = Activations::new();
            x.set(&values.collect::<Vec<f32>>(), shape.cols).expect("whole tokens");
            let got = product(&kernels(), &packed, &mut x);
            for (t, got) in got.chunks_exact(shape.rows).enumerate() {
                for (r, got) in got.iter().enumerate() {
                    let want: i32 = (0..shape.cols).map(|c| weight(r, c) * input(t, c)).sum();
                    assert_eq!(*got, want as f32, "{name}, factors {factors:?}, row {r} of token {t}");
                }
            }
        }
        assert!(by_psumbook(&packed), "{name}");
    }
}
