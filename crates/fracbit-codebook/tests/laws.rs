//! Exactness against brute force, the laws of every rounder, and quality gates.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "tests; a skipped one must say so")]

use fracbit_base::{Code, Family, Palette, Scheme};
use fracbit_codebook::{
    Rounder, RounderError, ScalarRounder, VectorRounder, builtin, distortion, laws, nmse, published, rounder,
    train::gaussian_pairs,
};
use fracbit_format::{Codebook, TILE};

fn schemes() -> impl Iterator<Item = Scheme> {
    Scheme::all().filter(|s| matches!(s.family(), Family::Nuq | Family::Vq))
}

fn scheme(name: &str) -> Scheme {
    name.parse().unwrap()
}

fn pairs_of(book: &Codebook) -> Vec<[f64; 2]> {
    let weight = |e: i16| f64::from(f32::from(e) * book.step());
    book.entries().as_chunks::<2>().0.iter().map(|p| p.map(weight)).collect()
}

/// What every rounder must do, and where it is exact.
fn keeps_the_laws(rounder: &dyn Rounder, exact: bool) {
    laws::deterministic(rounder, 5);
    laws::error_is_what_decoding_shows(rounder);
    laws::survives_extremes(rounder);
    if exact {
        laws::lossless_on_own_output(rounder, 40);
    }
}

#[test]
fn every_rounder_keeps_the_laws() {
    for scheme in schemes() {
        let rounder = rounder(scheme).unwrap();
        keeps_the_laws(rounder.as_ref(), true);
    }
}

#[test]
fn additive_rounders_keep_the_laws_and_their_error() {
    for scheme in Scheme::all().filter(|s| matches!(s.family(), Family::Additive(_))) {
        let rounder = rounder(scheme).unwrap();
        keeps_the_laws(rounder.as_ref(), rounder.codebook().additive().unwrap().count == 1);
        let error = distortion(rounder.as_ref(), 1 << 18, 1);
        let ratio = error / nmse(scheme).unwrap();
        assert!((0.99..=1.01).contains(&ratio), "{scheme}: {ratio} of the committed error");
    }
    // Longer vectors than pairs, at the same rate.
    assert!(nmse(scheme("aq-m2v8")).unwrap() < nmse(scheme("vq-2")).unwrap());
    assert!(nmse(scheme("aq-m1v4")).unwrap() < nmse(scheme("vq-2")).unwrap());
}

#[test]
fn nested_rounders_keep_the_laws_and_their_error() {
    for scheme in Scheme::all().filter(|s| matches!(s.family(), Family::NestNuq(_))) {
        let rounder = rounder(scheme).unwrap();
        // Cells of more than 6 bits are as narrow as the grid: values may lie beyond their ends.
        keeps_the_laws(rounder.as_ref(), scheme.quarters() <= 24);
        let error = distortion(rounder.as_ref(), 1 << 18, 1);
        let ratio = error / nmse(scheme).unwrap();
        assert!((0.98..=1.02).contains(&ratio), "{scheme}: {ratio} of the committed error");
    }
    // Beside a codebook of that rate alone.
    for (nested, alone, most) in [
        ("nest-nuq-2..2", "nuq-2", 1.01),
        ("nest-nuq-2..4", "nuq-4", 1.2),
        ("nest-nuq-3..4", "nuq-4", 1.1),
        ("nest-nuq-4..6", "nuq-6", 1.3),
    ] {
        let ratio = nmse(scheme(nested)).unwrap() / nmse(scheme(alone)).unwrap();
        assert!((0.999..most).contains(&ratio), "{nested} beside {alone}: {ratio}");
    }
}

#[test]
fn trellis_schemes_have_no_book_here() {
    for scheme in Scheme::all().filter(|s| s.code().is_some()) {
        assert!(builtin(scheme).is_none() && rounder(scheme).is_none(), "{scheme}");
    }
    let scalar = builtin(scheme("nuq-2")).unwrap().clone();
    let refused = VectorRounder::new(scalar.clone()).unwrap_err();
    assert_eq!(refused, RounderError::Family { want: "vq", got: scheme("nuq-2") });
    assert_eq!(refused.to_string(), "rounder: `book` should be of family vq, got nuq-2");
    assert!(ScalarRounder::new(scalar).is_ok());
    assert!(ScalarRounder::new(builtin(scheme("vq-2")).unwrap().clone()).is_err());
}

#[test]
fn books_are_in_their_documented_order_and_on_their_grid() {
    for scheme in schemes() {
        let book = builtin(scheme).unwrap();
        assert_eq!(book.scheme(), scheme);
        let width = if scheme.family() == Family::Nuq { 1 } else { 2 };
        let entries: Vec<&[i16]> = book.entries().chunks(width).collect();
        let turned = ["vq-3.5", "vq-4"].contains(&scheme.to_string().as_str());
        assert_eq!(book.quarter().is_some(), turned, "{scheme}");
        let ascending = if turned { entries.len() / 4 } else { entries.len() };
        assert!(
            entries[..ascending].windows(2).all(|w| w[0] < w[1]),
            "{scheme}: entries ascend and are distinct"
        );
        assert!(book.entries().iter().all(|e| (-8191..=8191).contains(e)), "{scheme}: at most 14 bits");
    }
}

#[test]
fn error_is_near_the_published_one_and_falls_with_the_rate() {
    for family in [Family::Nuq, Family::Vq] {
        let mut before = f64::INFINITY;
        for scheme in schemes().filter(|s| s.family() == family) {
            let error = distortion(rounder(scheme).unwrap().as_ref(), 1 << 21, 1);
            let ratio = error / published(scheme).unwrap();
            assert!((0.985..=1.005).contains(&ratio), "{scheme}: {ratio} of the published error");
            let ratio = error / nmse(scheme).unwrap();
            assert!((0.995..=1.005).contains(&ratio), "{scheme}: {ratio} of the committed error");
            assert!(error > scheme.rate().gaussian_bound(), "{scheme}: below the rate-distortion bound");
            assert!(error < before, "{scheme}: {error} is not below {before}");
            before = error;
        }
    }
}

#[test]
fn published_table_covers_the_papers_palette() {
    let known = Palette::All.schemes(Code::Fine);
    assert_eq!(known.iter().filter(|&&s| published(s).is_some()).count(), 34);
    for (name, value) in [
        ("nuq-8", 4.1475908e-05),
        ("vq-1.5", 0.20123697),
        ("tcq-hyb-5", 0.0016159878),
        ("half-tcq-3.25", 0.014546534),
    ] {
        assert_eq!(published(scheme(name)), Some(value), "{name}");
    }
    for scheme in Scheme::all() {
        assert!(published(scheme).is_none_or(|e| e > scheme.rate().gaussian_bound()), "{scheme}");
        assert!(nmse(scheme).is_none_or(|e| e > scheme.rate().gaussian_bound()), "{scheme}");
    }
}

/// The published table against the file it was taken from, where that file is at hand.
#[test]
fn published_table_equals_its_source() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/facts/qpalette_quant_err.csv");
    let Ok(text) = std::fs::read_to_string(path) else {
        eprintln!("SKIPPED published_table_equals_its_source: no {path}");
        return;
    };
    let mut lines: std::collections::BTreeMap<&str, f64> = text
        .lines()
        .skip(1)
        .map(|l| l.split_once(',').unwrap())
        .map(|(k, v)| (k, v.parse().unwrap()))
        .collect();
    for scheme in Palette::All.schemes(Code::Fine) {
        let q = scheme.quarters();
        let key = match scheme.family() {
            Family::Nuq => format!("ldlq_1_{}_none_1.0", q / 4),
            Family::Vq => format!("ldlq_2_{}_none_1.0", q / 2),
            Family::Tcq(_) if q.is_multiple_of(2) => format!("tcq_{}_none_0.9", q / 2),
            // Made for scales of groups, nested, or with more bits in one step of four: Q-Palette
            // has none.
            Family::Tcq(_)
            | Family::Int
            | Family::Gnuq
            | Family::NestTcq(..)
            | Family::NestNuq(_)
            | Family::Qoq(_)
            | Family::Additive(_) => {
                assert_eq!(published(scheme), None, "{scheme}");
                continue;
            }
            Family::HalfTcq(_) => format!("tcomb_{}_{}_0.5_none_0.9", q / 2, q / 2 + 1),
        };
        assert_eq!(published(scheme), lines.remove(key.as_str()), "{scheme}");
    }
    assert!(lines.is_empty(), "not in our table: {lines:?}");
}

/// Nearest by trying every entry; the least value wins a tie. Whether `b > a` is nearer than `a` is
/// decided by their midpoint, which is exact in f64 (differences of floats of unlike size are not).
fn nearest_value(book: &Codebook, weight: f32) -> f64 {
    let values = book.entries().iter().map(|&e| f64::from(f32::from(e) * book.step()));
    let nearer = |b: f64, a: f64| f64::from(weight) > f64::midpoint(a, b);
    values.reduce(|a, b| if (b > a && nearer(b, a)) || (b < a && !nearer(a, b)) { b } else { a }).unwrap()
}

#[test]
fn scalar_rounding_equals_brute_force() {
    let odd = Codebook::new(scheme("nuq-3"), vec![5, -3, 5, 100, -3, 0, 7, -128], 0.3).unwrap();
    let books = schemes().filter(|s| s.family() == Family::Nuq).map(|s| builtin(s).unwrap().clone());
    for book in books.chain([odd]) {
        let rounder = ScalarRounder::new(book.clone()).unwrap();
        let value = |code: u16| f32::from(book.entries()[usize::from(code)]) * book.step();
        let check = |w: f32| {
            let (got, want) = (f64::from(value(rounder.nearest(w))), nearest_value(&book, w));
            assert_eq!(got, want, "{}: {w:e}", book.scheme());
        };
        // Every 2^13-th float of either sign, infinities aside.
        (0..0x7f80_0000)
            .step_by(1 << 13)
            .map(f32::from_bits)
            .for_each(|w| [w, -w].into_iter().for_each(check));
        // Every float near every midpoint.
        let mut sorted: Vec<f32> = book.entries().iter().map(|&e| f32::from(e) * book.step()).collect();
        sorted.sort_by(f32::total_cmp);
        for pair in sorted.windows(2) {
            let mut w = f64::midpoint(pair[0].into(), pair[1].into()) as f32;
            (0..4).for_each(|_| w = w.next_down());
            for _ in 0..8 {
                check(w);
                w = w.next_up();
            }
        }
        let ends = [f32::NEG_INFINITY, f32::INFINITY].map(|w| value(rounder.nearest(w)));
        assert_eq!(ends, [sorted[0], sorted[sorted.len() - 1]], "{}: infinities", book.scheme());
    }
}

#[test]
fn vector_rounding_equals_brute_force() {
    for scheme in schemes().filter(|s| s.family() == Family::Vq) {
        let book = builtin(scheme).unwrap();
        let rounder = VectorRounder::new(book.clone()).unwrap();
        let points = pairs_of(book);
        let reach = points.iter().flatten().fold(0.0, |m: f64, v| m.max(v.abs())) as f32;
        let sample = gaussian_pairs(60, 3);
        let scaled = |k: f32| sample.iter().map(move |p| p.map(|v| v * k));
        // Edges and corners of the search square and its cells, and one float beyond.
        let lines = (0..=64).map(|i| reach * (i as f32 / 32.0 - 1.0));
        let edges = lines.flat_map(|v| [v.next_down(), v, v.next_up()]);
        let edges = edges.clone().flat_map(|x| edges.clone().step_by(7).map(move |y| [x, y]));
        for pair in scaled(1.0).chain(scaled(3.0)).chain(scaled(50.0)).chain(edges) {
            let [x, y] = pair.map(f64::from);
            let far = |p: &[f64; 2]| (p[0] - x).powi(2) + (p[1] - y).powi(2);
            let least = points.iter().map(far).fold(f64::INFINITY, f64::min);
            let got = far(&points[usize::from(rounder.nearest(pair))]);
            assert!(got <= least * (1.0 + 1e-13), "{scheme}: {pair:?} at {got}, not {least}");
        }
        // So far out that only the direction counts.
        for pair in scaled(1e30) {
            let [x, y] = pair.map(f64::from);
            let along = |p: &[f64; 2]| (p[0] * x + p[1] * y) / x.hypot(y);
            let most = points.iter().map(along).fold(f64::NEG_INFINITY, f64::max);
            let got = along(&points[usize::from(rounder.nearest(pair))]);
            assert!(got >= most - 1e-12, "{scheme}: {pair:?} at {got}, not {most}");
        }
    }
}

#[test]
fn a_tie_takes_the_lowest_code() {
    // An 8 x 8 lattice with step 1/4: distances of lattice midpoints are exact, and ties abound.
    let entries: Vec<i16> = (0..64).flat_map(|i| [i % 8 * 2 - 7, i / 8 * 2 - 7]).collect();
    let book = Codebook::new(scheme("vq-3"), entries, 0.25).unwrap();
    let rounder = VectorRounder::new(book.clone()).unwrap();
    let points = pairs_of(&book);
    for (i, j) in (-20..=20).flat_map(|i| (-20..=20).map(move |j| (i, j))) {
        let pair = [i as f32 * 0.125, j as f32 * 0.125];
        let far = |p: &[f64; 2]| (p[0] - f64::from(pair[0])).powi(2) + (p[1] - f64::from(pair[1])).powi(2);
        let least = points.iter().map(far).fold(f64::INFINITY, f64::min);
        let want = points.iter().position(|p| far(p) == least).unwrap();
        assert_eq!(usize::from(rounder.nearest(pair)), want, "{pair:?}");
    }
    let same = VectorRounder::new(Codebook::new(scheme("vq-2"), vec![0; 32], 1.0).unwrap()).unwrap();
    for pair in [[0.0, 0.0], [1.0, -2.0], [f32::MAX, f32::MAX], [f32::NAN, 0.0]] {
        assert_eq!(same.nearest(pair), 0, "{pair:?} among equal entries");
    }
}

#[test]
fn every_code_round_trips() {
    for scheme in schemes() {
        let rounder = rounder(scheme).unwrap();
        let book = rounder.codebook();
        let width = if scheme.family() == Family::Nuq { 1 } else { 2 };
        let mut weights: Vec<f32> = book.entries().iter().map(|&e| f32::from(e) * book.step()).collect();
        weights.resize(weights.len().next_multiple_of(TILE), 0.0);
        let tiles = weights.as_chunks::<TILE>().0;
        let codes = laws::encode(rounder.as_ref(), tiles);
        let bits = u32::from(scheme.quarters()) * width / 4;
        for code in 0..book.entries().len() / width as usize {
            let got = fracbit_format::read_bits(
                &codes[code * width as usize / TILE * book.tile_bytes()..],
                code * width as usize % TILE / width as usize * bits as usize,
                bits,
            );
            assert_eq!(usize::from(got), code, "{scheme}");
        }
    }
}
