//! The contract bears kernels that never expand a code: a table of partial sums, built once for an
//! input and read by codes, beside kernels that expand, in one product.

use fracbit_base::{Scheme, Shape};
use fracbit_format::PackedView;
use fracbit_kernels::{
    Activations, Call, Gate, Group, Input, Isa, Kernels, LinearKernel, PackedMatrix, Precision, Prepared,
    RowsOf, Team, Vectors,
    cases::{self, Packed},
    matmul_gated_with, matmul_groups_with, matmul_refined_with, matmul_rows_with, with_team,
};
use std::sync::Arc;

/// Sums that a table has: one for every byte of codes, four weights of two bits.
const SUMS: usize = 256;

/// `nuq-2` with one scale a row: `y[r] = scale[r] * sum over bytes of table[byte's place][byte]`.
#[derive(Debug)]
struct PartialSums {
    shape: Shape,
    entries: [f32; 4],
    codes: Vec<u8>, // (rows, bytes), padded to strips
    scales: Vec<f32>,
}

impl PartialSums {
    fn provide(_: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
        let (shape, layout) = (view.shape(), view.layout());
        if layout.scheme().to_string() != "nuq-2" || view.groups() != 1 || !shape.cols.is_multiple_of(16) {
            return None;
        }
        let book = view.codebooks()[0];
        let rows = layout.tiles_down() * 16;
        let mut codes = Vec::with_capacity(rows * shape.cols / 4);
        for r in 0..rows {
            for across in 0..layout.tiles_across() {
                let tile = &view.codes()[layout.tile(0, r / 16, across)];
                codes.extend_from_slice(&tile[r % 16 * 4..][..4]);
            }
        }
        let entries = std::array::from_fn(|i| f32::from(book.entries()[i]) * book.step());
        let scale = |r: usize| view.scales().get(r).map_or(0.0, |s| view.gain() * s.to_f32());
        Some(Arc::new(Self { shape, entries, codes, scales: (0..rows).map(scale).collect() }))
    }

    fn bytes_of_row(&self) -> usize {
        self.shape.cols / 4
    }
}

impl LinearKernel for PartialSums {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn isa(&self) -> Isa {
        Isa::Scalar
    }

    fn bytes(&self) -> usize {
        self.codes.len() + size_of_val(&*self.scales)
    }

    fn bytes_at(&self, _: Precision) -> usize {
        self.bytes()
    }

    fn row(&self, r: usize, _: Precision, out: &mut [f32]) {
        let codes = &self.codes[r * self.bytes_of_row()..][..self.bytes_of_row()];
        let entry = |byte: u8, j: usize| self.entries[usize::from(byte >> (2 * j) & 3)] * self.scales[r];
        for (out, &byte) in out.chunks_mut(4).zip(codes) {
            out.iter_mut().enumerate().for_each(|(j, out)| *out = entry(byte, j));
        }
    }

    fn rounds_to_int8(&self, _: Precision) -> bool {
        false
    }

    fn group_tokens(&self, _: Precision) -> usize {
        8
    }

    fn call_tokens(&self, _: Precision, _: usize) -> usize {
        64
    }

    fn prepare(&self, input: &Input<'_>, to: &mut Prepared<'_>, _: &Team<'_>) {
        let tables = to.numbers(input.values.len() / 4 * SUMS);
        for (table, x) in tables.chunks_exact_mut(SUMS).zip(input.values.chunks_exact(4)) {
            for (byte, sum) in table.iter_mut().enumerate() {
                *sum = (0..4).map(|j| self.entries[byte >> (2 * j) & 3] * x[j]).sum();
            }
        }
    }

    fn rows(&self, call: &Call<'_>, out: &mut [f32]) {
        let bytes = self.bytes_of_row();
        for (t, token) in call.tokens.clone().enumerate() {
            let tables = &call.prepared()[token * bytes * SUMS..][..bytes * SUMS];
            for (s, strip) in call.strips.clone().enumerate() {
                for i in 0..16 {
                    let r = 16 * strip + i;
                    let codes = &self.codes[r * bytes..][..bytes];
                    let read = |(table, &byte): (&[f32], &u8)| table[usize::from(byte)];
                    let sum: f32 = tables.chunks_exact(SUMS).zip(codes).map(read).sum();
                    out[t * call.stride + 16 * s + i] += sum * self.scales[r];
                }
            }
        }
    }
}

fn packed(scheme: &str, rows: usize, cols: usize) -> Packed {
    let scheme: Scheme = scheme.parse().expect("a scheme");
    Packed::random(scheme, Shape::new(rows, cols), cases::codebooks(scheme, 0, 127), cols, 5)
}

fn kernels() -> Kernels {
    let mut kernels = Kernels::scalar();
    kernels.install_linear(PartialSums::provide);
    kernels
}

/// From dequantized weights, in f64.
fn product(packed: &Packed, input: &[f32]) -> Vec<f64> {
    let weights = packed.view().expect("parts that fit").dequantize();
    let cols = packed.shape.cols;
    let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
    input.chunks(cols).flat_map(|x| weights.chunks(cols).map(move |w| dot(w, x))).collect()
}

fn assert_near(got: &[f32], want: &[f64], within: f64, what: &str) {
    let size = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() <= within * size, "{what}: {got}, want {want}");
    }
}

#[test]
fn sums_that_are_looked_up_need_no_word_of_the_dispatcher() {
    let (looked_up, expanded) = (packed("nuq-2", 72, 96), packed("vq-2", 72, 96));
    let new = |packed: &Packed| PackedMatrix::new(&kernels(), &packed.view().expect("parts that fit"));
    let (sums, other) = (new(&looked_up), new(&expanded));
    assert!(format!("{sums:?}").contains("PartialSums"));
    assert!(!format!("{other:?}").contains("PartialSums"));
    let mut row = vec![0.0; 96];
    sums.row(71, &mut row);
    assert_eq!(row, looked_up.view().expect("parts that fit").dequantize()[71 * 96..]);

    for batch in [1, 2, 7, 9, 130] {
        let input = cases::activations(batch * 96, 3);
        let mut x = Activations::new();
        x.announce(&input, 96).expect("whole tokens");
        let mut y = vec![f32::NAN; batch * 72];
        let all = RowsOf::all;
        with_team(|team| matmul_rows_with(team, all(&sums), &input, &mut x, &mut y))
            .expect("lengths that fit");
        // No activation is rounded.
        assert_near(&y, &product(&looked_up, &input), 1e-5, "looked up");
        let plain = y.clone();
        with_team(|team| matmul_refined_with(team, all(&sums).into(), &input, &mut x, &mut y))
            .expect("lengths");
        assert_eq!(y, plain, "there is nothing to refine");
        // A token does not see its neighbours.
        let mut one = vec![f32::NAN; 72];
        let mut alone = Activations::new();
        alone.announce(&input[(batch - 1) * 96..], 96).expect("a token");
        with_team(|team| {
            matmul_rows_with(team, all(&sums), &input[(batch - 1) * 96..], &mut alone, &mut one)
        })
        .expect("lengths");
        assert_eq!(one, plain[(batch - 1) * 72..]);
        // Both kinds in one product, in both orders, each with what it prepared.
        for both in [[&sums, &other], [&other, &sums]] {
            let [gate, up] = both.map(|matrix| {
                let mut y = vec![f32::NAN; batch * 72];
                with_team(|team| matmul_rows_with(team, all(matrix), &input, &mut x, &mut y))
                    .expect("lengths");
                y
            });
            let mut want = gate;
            Vectors::scalar().gate_mul(Gate::Silu, &mut want, &up);
            let rows = both.map(all);
            with_team(|team| matmul_gated_with(team, Gate::Silu, rows, &input, &mut x, &mut y))
                .expect("lengths");
            cases::assert_same(&want, &y, "gated");
        }
    }
}

#[test]
fn pieces_of_a_matrix_meet_their_own_tokens() {
    let whole = packed("nuq-2", 96, 64);
    let matrix = PackedMatrix::new(&kernels(), &whole.view().expect("parts that fit"));
    let first = RowsOf::new(&matrix, 0..32).expect("whole strips");
    let groups = [(2, 0..3), (0, 3..4), (1, 4..10)].map(|(piece, tokens)| Group { piece, tokens });
    let input = cases::activations(10 * 64, 8);
    let (mut x, mut y) = (Activations::new(), vec![f32::NAN; 10 * 32]);
    x.announce(&input, 64).expect("whole tokens");
    with_team(|team| matmul_groups_with(team, (&[first], Gate::Silu), &groups, &input, &mut x, &mut y))
        .expect("groups that fit");
    let all = product(&whole, &input);
    for Group { piece, tokens } in &groups {
        for token in tokens.clone() {
            let want = &all[token * 96 + piece * 32..][..32];
            assert_near(&y[token * 32..][..32], want, 1e-5, "a piece");
        }
    }
}
