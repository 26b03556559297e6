//! Every instance of the CUDA kernels, compiled for the host, against the scalar reference.
//!
//! The C++ compiler builds `kernels/cuda` with the shim of `kernels/cuda/host` (fibres for threads,
//! checked memory). Expansion must be exact; products must lie within the bound derived below.
#![expect(clippy::print_stderr, reason = "what ran is the point")]

#[path = "common/mod.rs"]
mod parity;

use fracbit_base::{Scheme, Shape};
use fracbit_kernels::cases::{self, Packed};
use fracbit_kernels_cuda::{
    Limits, MatrixPlan, Product,
    shim::{self, Shim},
};
use std::{fs, path::Path};

#[test]
fn every_instance_matches_the_reference() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut found = parity::Found::default();
    for multiprocessors in [1, 2, 3, 5] {
        let limits = Limits { multiprocessors, shared: 99 << 10 };
        let device = Shim::start(folder, limits).expect("the shim builds and starts");
        parity::check_all(&device, |_, case| case.multiprocessors == multiprocessors, &mut found);
        parity::check_deals(&device, |case| case.multiprocessors == multiprocessors, &mut found);
        parity::check_nested(&device, |_, case| case.multiprocessors == multiprocessors, &mut found);
        parity::check_integers(&device, |_, case| case.multiprocessors == multiprocessors, &mut found);
        parity::check_psums(&device, |_, case| case.multiprocessors == multiprocessors, &mut found);
    }
    for name in ["fb_w4a8_16", "fb_w4a8_32", "fb_w4a8_64", "fb_w4a8_finish"] {
        assert!(found.names.contains(name), "{name} did not run");
    }
    // All generated instances ran.
    for unit in fs::read_dir(shim::sources().join("gen")).expect("kernels/cuda/gen").flatten() {
        for line in fs::read_to_string(unit.path()).expect("a unit").lines().filter(|l| l.starts_with("FB_"))
        {
            let name = line.split(['(', ',']).nth(1).expect("a name");
            assert!(found.names.contains(name), "{name} did not run");
        }
    }
    eprintln!(
        "{} instances, {} cases, worst error {:.3} of its bound",
        found.names.len(),
        found.cases,
        found.worst
    );
}

/// Blocks of layers of Llama-3.1-8B on an H200.
#[test]
fn launches_fill_the_device() {
    let limits = Limits { multiprocessors: 132, shared: 227 << 10 };
    for (rows, cols) in [(4096, 14336), (1024, 4096), (6144, 4096)] {
        let scheme: Scheme = "tcq-fast-2".parse().expect("a scheme");
        let packed =
            Packed::random(scheme, Shape::new(rows, cols), cases::codebooks(scheme, 0, 100), cols, 1);
        let plan = MatrixPlan::new(&packed.view().expect("parts that fit")).expect("a plan");
        for batch in 1..=8 {
            let launch = plan.launch(batch, &limits);
            assert!((32..=132).contains(&launch.blocks), "{rows}x{cols}, {batch} tokens: {launch:?}");
            assert!(launch.warps >= 12, "{rows}x{cols}, {batch} tokens: {launch:?}");
            assert!(2 * launch.shared > limits.shared, "one block a multiprocessor: {launch:?}");
        }
        // No sums over blocks where whole pairs of strips come out even.
        let split = plan.launch(1, &limits).partial > 0;
        assert_eq!(split, rows == 1024, "{rows}x{cols}");
    }
}

/// Of the shapes of Llama-3.1-8B on an H200: a Psumbook where tables of expanded codes have few
/// copies, tokens are few and rows many.
#[test]
fn a_psumbook_is_taken_where_counts_favour_it() {
    let limits = Limits { multiprocessors: 132, shared: 227 << 10 };
    let product = |scheme: &str, (rows, cols), batch| {
        let scheme: Scheme = scheme.parse().expect("a scheme");
        let packed =
            Packed::random(scheme, Shape::new(rows, cols), cases::codebooks(scheme, 0, 100), cols, 1);
        MatrixPlan::new(&packed.view().expect("parts that fit")).expect("a plan").product(batch, &limits)
    };
    let (down, small, tall) = ((4096, 14336), (1024, 4096), (28672, 4096));
    assert_eq!(product("aq-m3v8", tall, 1), Product::Psumbook);
    let expanded = [
        ("aq-m1v4", tall, 1),
        ("aq-m1v8", tall, 1),
        ("aq-m2v8", tall, 1),
        ("aq-m3v8", down, 1),
        ("aq-m3v8", small, 1),
        ("aq-m3v8", tall, 2),
        ("aq-m3v8", tall, 8),
    ];
    for (scheme, shape, batch) in expanded {
        assert_eq!(product(scheme, shape, batch), Product::Expand, "{scheme} {shape:?} {batch}");
    }
    assert_eq!(product("nuq-4", down, 1), Product::Expand);
}

#[test]
fn scales_that_no_kernel_takes_are_refused() {
    for (scheme, group, unit) in
        [("nuq-4", 64, "128"), ("tcq-3", 192, "128"), ("gnuq-3", 16, "32"), ("aq-m2v8", 32, "128")]
    {
        let scheme: Scheme = scheme.parse().expect("a scheme");
        let packed = Packed::random(scheme, Shape::new(16, 384), cases::codebooks(scheme, 0, 100), group, 1);
        let refused =
            MatrixPlan::new(&packed.view().expect("parts that fit")).expect_err("a group").to_string();
        let want = [unit, &group.to_string(), &scheme.to_string(), "16x384"];
        assert!(want.iter().all(|w| refused.contains(w)), "{refused}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_machine_without_a_driver_says_so() {
    use fracbit_kernels_cuda::{DeviceError, Gpu};
    match Gpu::open() {
        Err(DeviceError::Missing(why)) => eprintln!("no driver here, as expected in CI: {why}"),
        Err(e @ (DeviceError::NoKernels(_) | DeviceError::OldDriver { .. })) => eprintln!("{e}"),
        Err(e) => panic!("{e}"),
        Ok(gpu) => eprintln!("found {}", gpu.name()),
    }
}
