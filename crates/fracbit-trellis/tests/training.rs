//! Codebooks: their error, and that training them again gives them again.

use fracbit_base::{Code, Family, Scheme};
use fracbit_format::{PiecewiseLinear, TwoLevel};
use fracbit_trellis::{
    builtin,
    train::{self, Training},
};

#[test]
fn error_is_what_the_table_says() {
    // 2^20 weights gave these values (examples/table.rs); 2^15 other weights stay within 2.5 % of
    // them.
    let tiles = train::gaussian_tiles(30_000, 128);
    for (scheme, want) in [
        ("tcq-1", 0.26496),
        ("tcq-2", 0.06771),
        ("tcq-3", 0.017263),
        ("tcq-4", 0.004445),
        ("tcq-5", 0.0011527),
        ("tcq-fast-1.5", 0.13668),
        ("tcq-fast-2", 0.07085),
        ("tcq-fast-3", 0.017894),
        ("tcq-fast-4", 0.004628),
        ("tcq-hyb-2", 0.07044),
        ("tcq-hyb-4", 0.005446),
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        let got = train::relative_error(builtin(scheme).unwrap(), &tiles);
        assert!((got / want - 1.0).abs() < 0.025, "{scheme}: {got} against {want}");
        assert!(got > scheme.rate().gaussian_bound(), "{scheme}: {got} beats the rate-distortion bound");
    }
}

#[test]
fn tables_have_ramps_up_to_two_and_a_half_bits_and_layers_above() {
    // Otherwise processors that look up in sixteen entries at a time run them at half the speed, or
    // four fifths.
    for scheme in
        Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_)) && s.code() != Some(Code::Hyb))
    {
        let book = builtin(scheme).unwrap();
        let ramp = book.entries().len() == PiecewiseLinear::LEN && scheme.quarters() <= 10;
        assert_eq!(book.piecewise_linear().is_some(), ramp, "{scheme}");
        assert_eq!(book.two_level().is_some(), !ramp && TwoLevel::fit(book.entries().len()), "{scheme}");
    }
}

#[test]
fn training_is_reproducible() {
    // `cargo run --release -p fracbit-trellis --example train_trellis -- --small` writes this file.
    let golden = include_str!("golden/small.txt");
    let training = Training { seed: 3, tiles: 8, rounds: 2 };
    let book = train::train("tcq-fast-1".parse().unwrap(), 64, &training);
    assert_eq!(book.to_string(), golden.trim_end());
}
