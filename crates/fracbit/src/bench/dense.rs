//! Products with matrices that a plan leaves at 16 bits, as a quantized directory holds them: in a memory map.

use super::{limits, random::Arena};
use crate::Error;
use fracbit_base::Shape;
use fracbit_io::Checkpoint;
use fracbit_kernels::{Kernels, cases};
use fracbit_model::{Linear, LinearScratch};
use serde_json::{Map, json};
use std::{
    io::{self, Write},
    sync::Arc,
    time::Instant,
};
use tempfile::NamedTempFile;

/// Weights that are measured of a larger matrix; the time of a row does not depend on how many there are.
const MOST_WEIGHTS: usize = 1 << 23;
/// Exponent bits that stay of a random half: magnitudes from 2^-7 to 1, so that sums are finite.
const FINITE: u16 = 0b1011_1111_1111_1111;
const SMALLEST: u16 = 0b0010_0000_0000_0000;

/// Rows that are measured of a matrix.
pub(super) fn measured_rows(shape: Shape) -> usize {
    shape.rows.min((MOST_WEIGHTS / shape.cols).max(1))
}

/// A matrix of every shape.
pub(super) struct Dense {
    layers: Vec<Linear>,
    /// Kept while it is mapped.
    _file: NamedTempFile,
}

impl Dense {
    /// Writes the matrices to a temporary file, which is deleted with them.
    pub(super) fn new(shapes: &[Shape], arena: &Arena) -> Result<Self, Error> {
        let mut header = Map::new();
        let (mut data, mut at) = (Vec::new(), 0);
        for (i, shape) in shapes.iter().enumerate() {
            let rows = measured_rows(*shape);
            let mut halves = arena.codes(2 * rows * shape.cols, i);
            for half in halves.as_chunks_mut::<2>().0 {
                *half = ((u16::from_le_bytes(*half) & FINITE) | SMALLEST).to_le_bytes();
            }
            let end = at + halves.len();
            header.insert(
                i.to_string(),
                json!({ "dtype": "F16", "shape": [rows, shape.cols], "data_offsets": [at, end] }),
            );
            (data, at) = ([data, halves].concat(), end);
        }
        let mut header = serde_json::Value::Object(header).to_string();
        header += &" ".repeat(header.len().next_multiple_of(64) - header.len() + 56);
        let mut file = NamedTempFile::with_suffix(".safetensors").map_err(not_written)?;
        let parts = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data];
        parts.into_iter().try_for_each(|part| file.write_all(part)).map_err(not_written)?;
        let checkpoint = Arc::new(Checkpoint::open(file.path())?);
        let layer = |i: usize| Linear::stored(Arc::clone(&checkpoint), &i.to_string(), None);
        let layers = (0..shapes.len()).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { layers, _file: file })
    }

    /// Microseconds of each product, `rounds` times, after the caches were filled with something else.
    pub(super) fn measure(
        &self,
        kernels: &Kernels,
        batch: usize,
        rounds: usize,
        flush: &mut limits::Memory,
        times: &mut [Vec<f64>],
    ) {
        let (mut scratch, mut y) = (LinearScratch::new().with_vectors(kernels.vectors()), Vec::new());
        for round in 0..=rounds {
            flush.sweep();
            for (layer, times) in self.layers.iter().zip(times.iter_mut()) {
                let Shape { rows, cols } = layer.shape();
                let x = cases::activations(batch * cols, 1);
                y.clear();
                y.resize(batch * rows, f32::NAN);
                let start = Instant::now();
                layer.apply(&x, &mut scratch, &mut y).expect("shapes that fit");
                let us = start.elapsed().as_secs_f64() * 1e6;
                assert!(y.iter().all(|y| y.is_finite()), "half precision: finite results");
                if round > 0 {
                    times.push(us);
                }
            }
        }
    }
}

fn not_written(source: io::Error) -> Error {
    Error::Io(fracbit_io::Error::Io { op: "writing a temporary file in", path: std::env::temp_dir(), source })
}
