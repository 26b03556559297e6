//! A device for tests, and dense models on it.

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
    let mut builder =
        Builder::new(device, config.clone(), source.rotations().clone()).expect("it is built here");
    for id in LinearId::all(config) {
        let matrix = source.linear(id).expect("a matrix of the checkpoint");
        builder.dense(id, &matrix.data, source.bias(id).expect("its bias"));
    }
    for id in FloatId::all(config) {
        builder.norm(id, source.floats(id).expect("a norm of the checkpoint"));
    }
    builder.build().expect("a whole model")
}
