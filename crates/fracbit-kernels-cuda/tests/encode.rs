//! The encoder kernel on the host shim: the bytes of the processor's exact search.

use fracbit_base::{Family, Scheme};
use fracbit_codebook::Rounder as _;
use fracbit_kernels_cuda::{DeviceError, Limits, TrellisEncoder, shim::Shim};
use fracbit_trellis::{Effort, rounder, train::gaussian_tiles};
use std::path::Path;

#[test]
fn bytes_are_those_of_the_processor() {
    let limits = Limits { multiprocessors: 1, shared: 227 << 10 };
    let device =
        Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts");
    for scheme in Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_))) {
        let name = scheme.to_string();
        let make = || rounder(scheme, Effort::Exact).expect("a trellis scheme");
        let tiles = gaussian_tiles(7, 1);
        let mut want = vec![0; tiles.len() * make().codebook().tile_bytes()];
        make().encode(&tiles, &mut want);
        let encoder = TrellisEncoder::new(&device, make()).expect("memory");
        let mut got = vec![0; want.len()];
        encoder.encode(&tiles, &mut got);
        assert_eq!(encoder.failure(), None, "{name}");
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn small_devices_refuse_what_does_not_fit_and_the_processor_steps_in() {
    let limits = Limits { multiprocessors: 1, shared: 99 << 10 };
    let device =
        Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts");
    let make =
        |name: &str| rounder(name.parse().expect("a scheme"), Effort::Exact).expect("a trellis scheme");
    let refused = TrellisEncoder::new(&device, make("tcq-1"));
    assert!(matches!(refused, Err(DeviceError::Memory { .. })), "costs of 1-bit steps take 128 KiB");
}
