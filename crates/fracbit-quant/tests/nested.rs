//! Nested schemes: one copy that is read at several rates.
#![expect(clippy::print_stderr, reason = "measured numbers beside their bounds")]

use fracbit_base::{Scheme, Shape};
use fracbit_format::read_bits;
use fracbit_quant::{Grouping, Hessian, Quantized, Rounders, Rounding, quantize_with};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::sync::atomic::{AtomicUsize, Ordering};

const SHAPE: Shape = Shape { rows: 90, cols: 200 };

fn gaussian(seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..SHAPE.len()).map(|_| rng.sample::<f32, _>(StandardNormal)).collect()
}

fn moments() -> Hessian {
    let n = SHAPE.cols;
    let entries = (0..n * n).map(|at| 0.9f32.powi((at / n).abs_diff(at % n) as i32)).collect();
    Hessian::new(n, entries).expect("positive definite")
}

fn made(name: &str, weights: &[f32], moments: &[Hessian]) -> Quantized {
    let scheme: Scheme = name.parse().expect("a scheme");
    let told = AtomicUsize::new(0);
    let rounders = Rounders::default();
    let rounding = Rounding { moments, ..Rounding::new(&rounders) };
    let made = quantize_with(weights, SHAPE, scheme, Grouping::Row, rounding, &|n| {
        told.fetch_add(n, Ordering::Relaxed);
    });
    assert_eq!(told.into_inner(), SHAPE.len(), "{name}: every weight is told of once");
    made.expect("a matrix")
}

/// `tr(E H E^T)` of the error, or its energy.
fn loss(weights: &[f32], values: &[f32], moments: &[Hessian]) -> f64 {
    let n = SHAPE.cols;
    let error: Vec<f64> = weights.iter().zip(values).map(|(&w, &v)| f64::from(w) - f64::from(v)).collect();
    let Some(h) = moments.first() else { return error.iter().map(|e| e * e).sum() };
    let row = |e: &[f64]| -> f64 {
        (0..n).map(|i| e[i] * (0..n).map(|j| f64::from(h.entries()[i * n + j]) * e[j]).sum::<f64>()).sum()
    };
    error.chunks(n).map(row).sum()
}

#[test]
fn the_base_is_the_matrix_of_its_own_scheme() {
    let weights = gaussian(1);
    for (nested, base) in [("nest-tcq-2+1+1", "tcq-2"), ("nest-tcq-fast-3+1", "tcq-fast-3")] {
        let (nested, base) = (made(nested, &weights, &[]), made(base, &weights, &[]));
        let strips = SHAPE.rows.div_ceil(16);
        let (stride, own) = (nested.data.codes().len() / strips, base.data.codes().len() / strips);
        for strip in 0..strips {
            let first = &nested.data.codes()[strip * stride..][..own];
            assert_eq!(first, &base.data.codes()[strip * own..][..own], "strip {strip}");
        }
        assert_eq!(nested.data.scales()[..SHAPE.rows], *base.data.scales());
        assert_eq!(nested.data.gains()[0], base.data.gain());
        assert_eq!(nested.data.codebooks()[0], base.data.codebooks()[0]);
    }
}

/// The first plane of a nested matrix as a matrix.
fn base(nested: &Quantized) -> Vec<f32> {
    let (view, segment) = (nested.view(), nested.view().layout().segments()[0]);
    let mut out = Vec::new();
    let mut integers = [0; 16];
    for r in 0..SHAPE.rows {
        for across in 0..SHAPE.cols.div_ceil(16) {
            let code = &view.codes()[view.layout().tile(0, r / 16, across)];
            assert_eq!(code.len(), segment.tile_bytes);
            view.codebooks()[0].expand_tile_row(code, r % 16, 0, &mut integers);
            let factor = view.factor(0, r, across * 16);
            let width = 16.min(SHAPE.cols - across * 16);
            out.extend(integers[..width].iter().map(|&i| f32::from(i) * factor));
        }
    }
    out
}

#[test]
fn every_precision_is_near_a_code_of_its_own() {
    // Without moments the bounds that were asked for: +.30 dB for 2+2 beside 4 bits, +.35 dB for
    // 2+1 beside 3. With moments (of a strong correlation) feedback is shared between the base and
    // all planes: see `SHARE`.
    let weights = gaussian(2);
    for moments in [vec![], vec![moments()]] {
        let with = !moments.is_empty();
        for (nested, native, own, most) in [
            ("nest-tcq-2+2", "tcq-4", "tcq-2", if with { 1.1 } else { 0.30 }),
            ("nest-tcq-2+1", "tcq-3", "tcq-2", if with { 1.1 } else { 0.35 }),
            ("nest-tcq-2+1+1", "tcq-4", "tcq-2", if with { 1.5 } else { 0.60 }),
            ("nest-tcq-3+1", "tcq-4", "tcq-3", if with { 1.1 } else { 0.35 }),
            ("nest-tcq-fast-2+2", "tcq-fast-4", "tcq-fast-2", if with { 1.2 } else { 0.40 }),
        ] {
            let made = |name: &str| made(name, &weights, &moments);
            let of = |values: &[f32]| loss(&weights, values, &moments);
            let nested_one = made(nested);
            let decibels = |a: f64, b: f64| 10.0 * (a / b).log10();
            let full = decibels(of(&nested_one.view().dequantize()), of(&made(native).view().dequantize()));
            let first = decibels(of(&base(&nested_one)), of(&made(own).view().dequantize()));
            eprintln!("{nested}, moments: {with}: all {full:+.3} dB, the base {first:+.3} dB");
            assert!((-0.2..=most).contains(&full), "{nested} beside {native}: {full:+.3} dB");
            assert!(first <= if with { 0.5 } else { 0.0 }, "the base of {nested}: {first:+.3} dB");
        }
    }
}

/// Weights of a nested scalar matrix at `bits` bits, and the codes of tiles.
fn at(made: &Quantized, bits: u32) -> (Vec<f32>, Vec<u16>) {
    let (view, book) = (made.view(), &made.data.codebooks()[0]);
    let whole = u32::from(made.data.scheme().quarters() / 4);
    let values = book.at(bits).expect("a precision");
    let low = |code: u16| code & ((1 << bits) - 1);
    let mut out = Vec::new();
    for r in 0..SHAPE.rows {
        for c in 0..SHAPE.cols {
            let code = &view.codes()[view.layout().tile(0, r / 16, c / 16)];
            let place = (r % 16 * 16 + c % 16) * whole as usize;
            let value = values[usize::from(low(read_bits(code, place, whole)))];
            out.push(f32::from(value) * view.factor(0, r, c));
        }
    }
    let count = made.data.codes().len() * 8 / whole as usize;
    let codes = (0..count).map(|i| low(read_bits(made.data.codes(), i * whole as usize, whole)));
    (out, codes.collect())
}

#[test]
fn a_nested_scalar_code_is_one_for_each_precision() {
    let weights = gaussian(3);
    for moments in [vec![], vec![moments()]] {
        let with = !moments.is_empty();
        for (name, low) in [("nest-nuq-2..4", 2), ("nest-nuq-2..6", 2), ("nest-nuq-3..8", 3)] {
            let made_one = made(name, &weights, &moments);
            let high = u32::from(made_one.data.scheme().quarters() / 4);
            for bits in low..=high {
                let (values, codes) = at(&made_one, bits);
                if !with {
                    // Without moments what is read is what would be there alone.
                    let alone = made(&format!("nest-nuq-{low}..{bits}"), &weights, &moments);
                    assert_eq!(at(&alone, bits), (values.clone(), codes), "{name} at {bits} bits");
                    assert_eq!(alone.data.scales(), made_one.data.scales(), "{name} at {bits} bits");
                }
                let own = made(&format!("nuq-{bits}"), &weights, &moments).view().dequantize();
                let of = |values: &[f32]| loss(&weights, values, &moments);
                let more = 10.0 * (of(&values) / of(&own)).log10();
                eprintln!("{name}, moments: {with}: {bits} bits {more:+.3} dB");
                // From 7 bits on the grid of 8 bits is what is coarse; feedback is for whole codes.
                let most = match bits {
                    _ if with && bits < high => 12.0,
                    7 => 3.0,
                    8 => 7.0,
                    _ => 1.0,
                };
                assert!((-0.2..=most).contains(&more), "{name} at {bits} bits: {more:+.3} dB");
            }
        }
    }
}
