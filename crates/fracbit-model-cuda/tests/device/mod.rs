//! A device for tests, and dense models on it.

#![allow(dead_code, reason = "each test binary uses some of these")]

use fracbit_base::{Scheme, Shape};
use fracbit_format::Codebook;
use fracbit_kernels::cases::{self, Packed};
use fracbit_kernels_cuda::{Limits, shim::Shim};
use fracbit_model::{FloatId, LinearId, WeightSource};
use fracbit_model_cuda::{Builder, DeviceModel};
use std::path::Path;

pub(crate) fn device() -> Shim {
    let limits = Limits { multiprocessors: 2, shared: 99 << 10 };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

pub(crate) fn dense<'d>(device: &'d Shim, source: &WeightSource) -> DeviceModel<'d, Shim> {
    let config = source.config();
    let mut builder = Builder::new(device, config.clone(), source.rotations().clone());
    for id in LinearId::all(config) {
        let matrix = source.linear(id).expect("a matrix of the checkpoint");
        builder.dense(id, &matrix.data, source.bias(id).expect("its bias"));
    }
    for id in FloatId::all(config) {
        builder.norm(id, source.floats(id).expect("a norm of the checkpoint"));
    }
    builder.build().expect("a whole model")
}

/// A model whose matrices are random ones of a scheme, beside the norms of a checkpoint.
pub(crate) fn packed<'d>(device: &'d Shim, source: &WeightSource, scheme: &str) -> DeviceModel<'d, Shim> {
    let (config, scheme): (_, Scheme) = (source.config(), scheme.parse().expect("a scheme"));
    let mut builder = Builder::new(device, config.clone(), source.rotations().clone());
    for id in LinearId::all(config) {
        let matrix = random(scheme, id.shape(config));
        builder.packed(id, &matrix.view().expect("parts that fit"), source.bias(id).expect("its bias"));
    }
    for id in FloatId::all(config) {
        builder.norm(id, source.floats(id).expect("a norm of the checkpoint"));
    }
    builder.build().expect("a whole model")
}

/// A random matrix whose weights are of the size of a small checkpoint's.
pub(crate) fn random(scheme: Scheme, shape: Shape) -> Packed {
    let small = |book: Codebook| Codebook::new(book.scheme(), book.entries().to_vec(), 0.002);
    let books = cases::codebooks(scheme, 0, 100).into_iter();
    let books = books.map(|book| small(book).expect("a step")).collect();
    Packed::random(scheme, shape, books, scheme.group().unwrap_or(shape.cols.next_multiple_of(16)), 3)
}
