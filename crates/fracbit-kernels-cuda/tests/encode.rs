//! The encoder kernels on the host shim: the bytes of the processor's exact search.

use fracbit_base::{Family, Scheme};
use fracbit_codebook::Rounder as _;
use fracbit_kernels_cuda::{DeviceError, Limits, TrellisEncoder, shim::Shim};
use fracbit_trellis::{Effort, rounder, train::gaussian_tiles};
use std::path::Path;

type Tile = [f32; 256];

fn start(shared: usize) -> Shim {
    let limits = Limits { multiprocessors: 1, shared };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

fn check(device: &Shim, scheme: Scheme, tiles: &[Tile]) {
    let make = || rounder(scheme, Effort::Exact).expect("a trellis scheme");
    let bytes = make().codebook().tile_bytes();
    let mut want = vec![0; tiles.len() * bytes];
    make().encode(tiles, &mut want);
    let encoder = TrellisEncoder::new(device, make()).expect("memory");
    let mut got = vec![0; want.len()];
    if tiles.len() > 3 {
        // The next launch has more tiles than this one leaves room for.
        encoder.encode(&tiles[..1], &mut got[..bytes]);
    }
    encoder.encode(tiles, &mut got);
    assert_eq!(encoder.failure(), None, "{scheme}");
    for (i, (got, want)) in got.chunks(bytes).zip(want.chunks(bytes)).enumerate() {
        assert_eq!(got, want, "{scheme}, tile {i}");
    }
}

/// Tiles on which costs saturate or paths tie.
fn hard_tiles() -> [Tile; 6] {
    let [wide, mixed] = *gaussian_tiles(9, 2) else { unreachable!("two tiles") };
    [
        [0.0; 256],
        [1e9; 256],
        [-1e9; 256],
        std::array::from_fn(|i| if i % 2 == 0 { 1e9 } else { -1e9 }),
        wide.map(|w| 4.0 * w),
        std::array::from_fn(|i| if i / 8 % 2 == 0 { mixed[i] } else { mixed[i] * 100.0 }),
    ]
}

#[test]
fn bytes_are_those_of_the_processor() {
    let device = start(227 << 10);
    let hard = hard_tiles();
    let [first, last] = *gaussian_tiles(7, 2) else { unreachable!("two tiles") };
    for (i, scheme) in Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_))).enumerate() {
        // Some have two pairs for one block, the second one half empty.
        let tiles = [first, hard[i % hard.len()], last];
        check(&device, scheme, if i % 8 == 0 { &tiles } else { &tiles[..2] });
    }
}

#[test]
fn bytes_are_those_of_the_processor_where_costs_saturate_or_tie() {
    let device = start(227 << 10);
    for name in ["tcq-2", "tcq-4", "tcq-fast-2", "tcq-hyb-3"] {
        check(&device, name.parse().expect("a scheme"), &hard_tiles());
    }
}

#[test]
fn small_devices_refuse_what_does_not_fit_and_the_processor_steps_in() {
    let device = start(99 << 10);
    let make =
        |name: &str| rounder(name.parse().expect("a scheme"), Effort::Exact).expect("a trellis scheme");
    let refused = TrellisEncoder::new(&device, make("tcq-1"));
    assert!(matches!(refused, Err(DeviceError::Memory { .. })), "costs of 1-bit steps take 128 KiB");
    assert!(TrellisEncoder::new(&device, make("tcq-2")).is_ok(), "costs of 2-bit steps take 64 KiB");
}

/// An outlier where a pass begins, at whose step all costs are still 0: one tile that was found,
/// and one that is made so.
#[test]
fn bytes_are_those_of_the_processor_where_the_first_step_alone_exceeds_16_bits() {
    let device = start(227 << 10);
    let found = gaussian_tiles(7, 3)[2];
    let mut made = found;
    let most = made.iter().fold(0f32, |most, x| most.max(x.abs()));
    made[120..136].iter_mut().step_by(3).for_each(|x| *x = 8.0 * most);
    for name in ["tcq-fast-2.5", "tcq-fast-3.5", "tcq-fast-4.5", "tcq-fast-5", "tcq-hyb-3"] {
        check(&device, name.parse().expect("a scheme"), &[found, made, found]);
    }
}
