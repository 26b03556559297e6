//! Packed matrices for models of tests.

use fracbit_format::{Codebook, Grid, Layout, PackedView, Planes, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_model::Matrix;
use half::f16;

/// Eight-bit rounding, one scale per row: the simplest packed matrix with real weights in it.
pub(crate) fn pack(matrix: &Matrix) -> PackedMatrix {
    let scheme = "nuq-8".parse().unwrap();
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
            let tile = layout.tile(0, r / TILE_ROWS, c / TILE_COLS);
            let integer = (w / scales[r].to_f32() * 127.0).round().clamp(-127.0, 127.0);
            codes[tile][r % TILE_ROWS * TILE_COLS + c % TILE_COLS] = (integer + 128.0) as u8;
        }
    }
    let group = cols.next_multiple_of(TILE_COLS);
    let planes = Planes { codes: &codes, second_level: &[], scales: &scales, gains: &[1.0] };
    let view = PackedView::new(scheme, matrix.shape, &[&codebook], planes, group).unwrap();
    PackedMatrix::new(&Kernels::scalar(), &view)
}
