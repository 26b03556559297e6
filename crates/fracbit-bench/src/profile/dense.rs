//! Products with matrices that a plan leaves at 16 bits, as a quantized directory holds them: in a
//! memory map.

use super::products::{Part, Products};
use crate::{limits, random::Arena};
use fracbit_io::Checkpoint;
use fracbit_kernels::{Group, Kernels, cases};
use fracbit_load::Error;
use fracbit_model::{Linear, LinearScratch};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, json};
use std::{
    io::{self, Write},
    sync::Arc,
    time::Instant,
};
use tempfile::NamedTempFile;

/// Weights that are measured of a larger matrix; the time of a row does not depend on how many
/// there are.
const MOST_WEIGHTS: usize = 1 << 23;
/// Exponent bits that stay of a random half: magnitudes from 2^-7 to 1, so that sums are finite.
const FINITE: u16 = 0b1011_1111_1111_1111;
const SMALLEST: u16 = 0b0010_0000_0000_0000;

/// A matrix of every product with a single one.
pub(super) struct Dense {
    parts: Vec<Part>,
    /// (product, piece).
    layers: Vec<Vec<Linear>>,
    /// Kept while it is mapped.
    _file: NamedTempFile,
}

impl Dense {
    /// Writes the matrices to a temporary file, which is deleted with them.
    pub(super) fn new(products: &Products, arena: &Arena) -> Result<Self, Error> {
        let part = |product| products.part(product, MOST_WEIGHTS, 1);
        let parts: Vec<Part> = products.single.iter().copied().map(part).collect();
        let mut header = Map::new();
        let mut data = Vec::new();
        for (i, Part { pieces, rows, cols }) in parts.iter().enumerate() {
            for piece in 0..*pieces {
                let mut halves = arena.codes(2 * rows * cols, header.len());
                for half in halves.as_chunks_mut::<2>().0 {
                    *half = ((u16::from_le_bytes(*half) & FINITE) | SMALLEST).to_le_bytes();
                }
                let (at, end) = (data.len(), data.len() + halves.len());
                header.insert(
                    name(i, piece),
                    json!({ "dtype": "F16", "shape": [rows, cols], "data_offsets": [at, end] }),
                );
                data.extend(halves);
            }
        }
        let mut header = serde_json::Value::Object(header).to_string();
        header += &" ".repeat(header.len().next_multiple_of(64) - header.len() + 56);
        let mut file = NamedTempFile::with_suffix(".safetensors").map_err(not_written)?;
        let written = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data];
        written.into_iter().try_for_each(|bytes| file.write_all(bytes)).map_err(not_written)?;
        let checkpoint = Arc::new(Checkpoint::open(file.path())?);
        let layer = |i, piece| Linear::stored(Arc::clone(&checkpoint), &name(i, piece), None);
        let of = |(i, part): (usize, &Part)| (0..part.pieces).map(|piece| layer(i, piece)).collect();
        let layers = parts.iter().enumerate().map(of).collect::<Result<_, _>>()?;
        Ok(Self { parts, layers, _file: file })
    }

    /// What is measured of each matrix.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        self.parts.iter().copied()
    }

    /// Microseconds of each product, `rounds` times, after the caches were filled with something
    /// else.
    pub(super) fn measure(
        &self,
        products: &Products,
        kernels: &Kernels,
        batch: usize,
        rounds: usize,
        flush: &mut limits::Memory,
        times: &mut [Vec<f64>],
    ) {
        let (mut scratch, mut y) = (LinearScratch::new().with_vectors(kernels.vectors()), Vec::new());
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        for round in 0..=rounds {
            flush.sweep();
            let all = self.parts().zip(&self.layers).zip(&products.single).zip(times.iter_mut());
            for (((part, layers), &product), times) in all {
                let routes = products.routes(product, part, batch, &mut rng);
                let tokens = routes.last().map_or(0, |group| group.tokens.end);
                let x = cases::activations(tokens * part.cols, 1);
                y.clear();
                y.resize(tokens * part.rows, f32::NAN);
                let start = Instant::now();
                for Group { piece, tokens } in &routes {
                    let x = &x[tokens.start * part.cols..tokens.end * part.cols];
                    let y = &mut y[tokens.start * part.rows..tokens.end * part.rows];
                    layers[*piece].apply(x, &mut scratch, y).expect("shapes that fit");
                }
                let us = start.elapsed().as_secs_f64() * 1e6;
                assert!(y.iter().all(|y| y.is_finite()), "half precision: finite results");
                if round > 0 {
                    times.push(us);
                }
            }
        }
    }
}

/// The name of a piece of a matrix in the file.
fn name(product: usize, piece: usize) -> String {
    format!("{product}.{piece}")
}

fn not_written(source: io::Error) -> Error {
    Error::Io(fracbit_io::Error::Io { op: "writing a temporary file in", path: std::env::temp_dir(), source })
}
