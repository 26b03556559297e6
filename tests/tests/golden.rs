//! What the bits of a file mean, frozen: `golden/tiles.txt`.
//!
//! Every scheme with every table length decodes a fixed tile with a fixed table, every half-trellis
//! scheme a fixed matrix, and the signs and rotations of some widths are there, because they are
//! part of the format too. A line that differs means that old files decode to other weights.
//! `golden/decode.py` derives the tile lines again from `docs/formats.md` alone. After a change of
//! the format that is meant (with a new format version), write the file anew: `cargo test -p
//! fracbit-tests --test golden -- --ignored bless`.

use fracbit_base::{Code, Family, Scheme, Shape};
use fracbit_format::{Codebook, Layout, PackedView, Planes, SchemeSpec, TILE};
use fracbit_rotation::{Rotation, signs};
use fracbit_tests::{root, skip};
use half::f16;
use std::{fmt::Write as _, fs, path::PathBuf, process::Command};

/// Numbers for tables, codes and scales: Knuth's 64-bit generator, of which the upper half is
/// taken.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 24) as u8).collect()
    }
}

/// FNV-1a, 64 bits.
fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Schemes that came after the first version of the format, at the end of the file: group-wise
/// ones, quarter bits of a trellis, nested ones, progressive ones, additive ones, nested scalar
/// ones.
fn later() -> [Vec<Scheme>; 6] {
    let odd = |s: &Scheme| matches!(s.family(), Family::Tcq(_)) && !s.quarters().is_multiple_of(2);
    let additive = |s: &Scheme| matches!(s.family(), Family::Additive(_));
    let by_bits = |s: &Scheme| matches!(s.family(), Family::NestNuq(_));
    let kinds: [&dyn Fn(&Scheme) -> bool; 6] =
        [&|s| s.group().is_some(), &odd, &|s| s.planes() > 1, &progressive, &additive, &by_bits];
    kinds.map(|kind| Scheme::all().filter(|s| kind(s)).collect())
}

fn progressive(scheme: &Scheme) -> bool {
    SchemeSpec::of(*scheme).second_level.is_some()
}

/// The table lengths that the format allows for a scheme, as `docs/formats.md` lists them.
fn lengths(scheme: Scheme) -> Vec<usize> {
    let quarters = usize::from(scheme.quarters());
    match (scheme.family(), scheme.code()) {
        (Family::HalfTcq(_) | Family::NestTcq(..), _) => Vec::new(),
        (Family::Nuq | Family::Int | Family::Qoq(_), _) => vec![1 << (quarters / 4)],
        (Family::Gnuq, _) => (0..=6 - quarters / 4).map(|c| 1 << (quarters / 4 + c)).collect(),
        (Family::Vq, _) => vec![2 << (quarters / 2)],
        (Family::NestNuq(ladder), _) => vec![(2 << ladder.high()) - (1 << ladder.low())],
        (Family::Additive(books), _) => vec![(books.count() * books.weights()) << books.bits()],
        (Family::Tcq(Code::Hyb), _) => vec![1024, 2048, 4096],
        (Family::Tcq(Code::Fast), _) => vec![64, 128],
        (Family::Tcq(_), _) => vec![64, 128, 256],
    }
}

/// A table of pseudo-random 16-bit entries (-32767..=32767; group-wise and nested scalar
/// ones -127..=127, and so are sums of additive ones), step 1/1024. Plain integers have no choice.
fn table(scheme: Scheme, length: usize) -> Codebook {
    let mut numbers = Numbers(u64::from(scheme.quarters()) << 32 | length as u64);
    let most: i16 = match scheme.family() {
        Family::Gnuq | Family::NestNuq(_) => 127,
        Family::Additive(books) => 127 / i16::try_from(books.count()).expect("a few"),
        _ => 32_767,
    };
    let range = 2 * u32::from(most.unsigned_abs()) + 1;
    let mut entry = |code: usize| {
        let number = i16::try_from(i64::from(numbers.next() % range) - i64::from(most)).expect("in range");
        Codebook::integer(scheme, code).unwrap_or(number)
    };
    Codebook::new(scheme, (0..length).map(&mut entry).collect(), 1.0 / 1024.0)
        .expect("a table that the format allows")
}

fn tile_line(out: &mut String, scheme: Scheme, length: usize) {
    let book = table(scheme, length);
    let code = Numbers(1).bytes(book.tile_bytes());
    let mut tile = [0i16; TILE];
    // Row `i` has codebook `i`, as far as there are so many, or scale 16 - i and zero i.
    for (i, row) in tile.as_chunks_mut().0.iter_mut().enumerate() {
        let number = if progressive(&scheme) { 0xf0 - 15 * i } else { i % book.books() };
        let number = u8::try_from(number).expect("at most 16 codebooks");
        book.expand_tile_row(&code, i, number, row);
    }
    let hash = fnv(tile.iter().flat_map(|v| v.to_le_bytes()));
    let _ = write!(out, "tile {scheme} {length} {hash:016x}");
    tile[..16].iter().for_each(|v| {
        let _ = write!(out, " {v}");
    });
    out.push('\n');
}

/// The shortest table, but for group-wise schemes the longest: several codebooks.
fn length_of(scheme: Scheme) -> usize {
    let lengths = lengths(scheme);
    if scheme.family() == Family::Gnuq { lengths[lengths.len() - 1] } else { lengths[0] }
}

/// A matrix of 20 x 50 with a scale per 32 columns, or per row (progressive): edges, segments and
/// the order of scales.
fn matrix_line(out: &mut String, scheme: Scheme) {
    let shape = Shape::new(20, 50);
    let layout = Layout::new(scheme, shape);
    let books: Vec<Codebook> =
        layout.segments().iter().map(|s| table(s.scheme, length_of(s.scheme))).collect();
    let books: Vec<&Codebook> = books.iter().collect();
    let mut numbers = Numbers(2);
    let codes = numbers.bytes(layout.len());
    let planes = scheme.planes();
    let (group, groups) = if progressive(&scheme) { (64, 1) } else { (32, 2) };
    let scales: Vec<f16> =
        (0..planes * 20 * groups).map(|_| f16::from_bits(0x3800 + (numbers.next() >> 22) as u16)).collect();
    let gains = &[0.25, 0.125, 0.0625][..planes];
    let second_level = if progressive(&scheme) { numbers.bytes(20) } else { Vec::new() };
    let planes = Planes { codes: &codes, second_level: &second_level, scales: &scales, gains };
    let view = PackedView::new(scheme, shape, &books, planes, group).expect("parts that fit");
    let weights = view.dequantize();
    let hash = fnv(weights.iter().flat_map(|v| v.to_le_bytes()));
    let _ = writeln!(out, "matrix {scheme} {} {hash:016x} {:?} {:?}", codes.len(), weights[0], weights[999]);
}

fn rotation_line(out: &mut String, width: usize) {
    let rotation = Rotation::new(width, 7, 33).expect("a width that can be rotated");
    let mut x: Vec<f32> = (0..width).map(|i| (i % 13) as f32 - 6.0).collect();
    rotation.apply(&mut x);
    let hash = fnv(x.iter().flat_map(|v| v.to_le_bytes()));
    let _ = writeln!(out, "rotation {width} {hash:016x} {:?} {:?}", x[0], x[width - 1]);
}

fn render() -> String {
    let mut out =
        String::from("# Written by `cargo test -p fracbit-tests --test golden -- --ignored bless`.\n");
    let new = later().concat();
    let first = || Scheme::all().filter(|s| !new.contains(s));
    for scheme in first() {
        lengths(scheme).into_iter().for_each(|length| tile_line(&mut out, scheme, length));
    }
    first().for_each(|scheme| matrix_line(&mut out, scheme));
    for (seed, stream) in [(0, 0), (0, 16), (1, 0), (u64::MAX, 0x1234_5678_9abc_def0)] {
        let word =
            signs(seed, stream).take(64).enumerate().fold(0u64, |w, (i, s)| w | u64::from(s < 0.0) << i);
        let _ = writeln!(out, "signs {seed} {stream} {word:016x}");
    }
    // Widths whose transforms add and subtract only; a factor with cosines may differ in the last
    // bit between machines.
    for width in [2, 4, 12, 16, 20, 28, 32, 64, 96, 128, 192, 512, 896, 1536] {
        rotation_line(&mut out, width);
    }
    for schemes in later() {
        for &scheme in &schemes {
            lengths(scheme).into_iter().for_each(|length| tile_line(&mut out, scheme, length));
        }
        schemes.into_iter().for_each(|scheme| matrix_line(&mut out, scheme));
    }
    out
}

fn path() -> PathBuf {
    root().join("tests/golden/tiles.txt")
}

#[test]
fn bits_mean_what_they_meant() {
    let want = fs::read_to_string(path()).expect("tests/golden/tiles.txt is committed");
    let got = render();
    for (number, (want, got)) in want.lines().zip(got.lines()).enumerate() {
        assert_eq!(
            want,
            got,
            "line {} of tests/golden/tiles.txt: files written before decode to other weights",
            number + 1
        );
    }
    assert_eq!(want.lines().count(), got.lines().count(), "schemes were added or removed: bless the file");
}

#[test]
fn every_scheme_has_its_lines() {
    let text = fs::read_to_string(path()).expect("tests/golden/tiles.txt is committed");
    for scheme in Scheme::all() {
        let name = scheme.to_string();
        let lines =
            |kind: &str| text.lines().filter(|l| l.split(' ').take(2).eq([kind, name.as_str()])).count();
        assert_eq!(lines("tile"), lengths(scheme).len(), "{scheme}");
        assert_eq!(lines("matrix"), 1, "{scheme}");
    }
}

#[test]
fn a_second_reader_derives_the_same_tiles() {
    let script = root().join("tests/golden/decode.py");
    match Command::new("python3").arg(&script).output() {
        Err(e) => skip(&script.display().to_string(), &format!("python3 does not start: {e}")),
        Ok(ran) => assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr)),
    }
}

#[test]
#[ignore = "writes tests/golden/tiles.txt anew"]
fn bless() {
    fs::write(path(), render()).expect("tests/golden is writable");
}
