//! Products by a Psumbook are those of expanded codes, bit for bit.

use fracbit_base::{Scheme, Shape};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix, PsumBody, RowsOf,
    cases::{self, CASES, Case, Packed, assert_same, product},
    psumbook,
};

/// Names of the schemes of additive codebooks.
const SCHEMES: [&str; 4] = ["aq-m1v8", "aq-m1v4", "aq-m2v8", "aq-m3v8"];

fn kernels() -> Kernels {
    let mut kernels = Kernels::scalar();
    kernels.install_linear(|kernels, view| psumbook(kernels, view, PsumBody::portable()));
    kernels
}

fn packed(name: &str, shape: Shape, group: usize, seed: u64) -> Packed {
    let scheme: Scheme = name.parse().expect("a scheme");
    Packed::random(scheme, shape, cases::codebooks(scheme, 0, 127), group, seed)
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
fn gates_and_experts_have_the_psums_of_their_own_tokens() {
    let kernels = kernels();
    let new = |name: &str| {
        let packed = packed(name, Shape::new(96, 96), 32, 3);
        PackedMatrix::new(&kernels, &packed.view().expect("parts that fit"))
    };
    for (gate, up) in
        [("aq-m1v4", "aq-m2v8"), ("aq-m3v8", "aq-m3v8"), ("vq-2", "aq-m1v8"), ("aq-m1v8", "tcq-2")]
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
    for (name, taken) in [("aq-m2v8", true), ("vq-2", false), ("nest-tcq-2+1", false)] {
        let packed = packed(name, Shape::new(16, 32), 32, 1);
        let matrix = PackedMatrix::new(&kernels(), &packed.view().expect("parts that fit"));
        assert_eq!(format!("{matrix:?}").contains("Psumbook"), taken, "{name}");
    }
}
