//! Packed layers in a whole model.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

mod common;

use common::{F32, logits, references, relative};
use fracbit_base::{Code, Family, Scheme};
use fracbit_format::{Codebook, Grid, Layout, PackedView, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_model::{Linear, LinearId, Matrix, Model, RotationMode, StateOptions};
use half::f16;

/// Eight-bit rounding, one scale per row: the simplest packed matrix with real weights in it.
fn pack(matrix: &Matrix) -> PackedMatrix {
    let scheme = Scheme::new(Family::Nuq, Code::Fine, 32).unwrap();
    // -127 twice: within the int8 grid.
    let entries = (-128i16..128).map(|e| e.max(-127)).collect();
    let codebook = Codebook::new(scheme, entries, 1.0 / 127.0).unwrap();
    assert_eq!(codebook.grid(), Grid::I8);
    let layout = Layout::new(scheme, matrix.shape);
    let cols = matrix.shape.cols;
    let top = |row: &[f32]| row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let scales: Vec<f16> = matrix.data.chunks(cols).map(|row| f16::from_f32(top(row))).collect();
    let mut codes = vec![128u8; layout.len()];
    for (r, row) in matrix.data.chunks(cols).enumerate() {
        for (c, w) in row.iter().enumerate() {
            let tile = layout.tile(r / TILE_ROWS, c / TILE_COLS);
            let integer = (w / scales[r].to_f32() * 127.0).round().clamp(-127.0, 127.0);
            codes[tile][r % TILE_ROWS * TILE_COLS + c % TILE_COLS] = (integer + 128.0) as u8;
        }
    }
    let group = cols.next_multiple_of(TILE_COLS);
    let view = PackedView::new(scheme, matrix.shape, &[&codebook], &codes, &scales, group, 1.0).unwrap();
    assert!(relative(&view.dequantize(), &matrix.data) < 0.01, "the test's own packing");
    PackedMatrix::new(&Kernels::scalar(), &view)
}

#[test]
fn an_eight_bit_model_stays_close_to_the_original() {
    for r in references().unwrap_or_default() {
        for mode in [RotationMode::None, RotationMode::Fold, RotationMode::Online] {
            let source = r.source(mode, 7);
            let (mut packed, mut rounded) =
                (Model::from_source(&source).unwrap(), Model::from_source(&source).unwrap());
            for id in LinearId::all(source.config()) {
                let matrix = pack(&source.linear(id).unwrap());
                let layer = Linear::packed(matrix, source.bias(id).unwrap()).unwrap();
                let dense = Linear::dense(layer.shape(), layer.to_dense().unwrap(), source.bias(id).unwrap());
                rounded.replace(id, dense.unwrap()).unwrap();
                packed.replace(id, layer).unwrap();
            }
            assert!(packed.weight_bytes() < rounded.weight_bytes());
            for chunk in [1, 64] {
                let options = StateOptions { chunk, ..F32 };
                let want = logits(&rounded, &mut rounded.state(&options), &r.tokens);
                let got = logits(&packed, &mut packed.state(&options), &r.tokens);
                let (activations, all) = (relative(&got, &want), relative(&got, &r.logits));
                eprintln!("{:12} {mode:?} chunk {chunk}: activations {activations:.4}, all {all:.4}", r.name);
                // Integer activations alone, then with the weights' rounding: both near 1 % in these tiny
                // models.
                assert!(activations < 0.05, "{} {mode:?}: {activations}", r.name);
                assert!(all < 0.1, "{} {mode:?}: {all}", r.name);
            }
        }
    }
}
