//! Parity of packed products on any device: what `tests/host.rs` runs on the shim and
//! `examples/cuda_check.rs` on a GPU.

use fracbit_base::{Code, Family, Rate, Scheme, Shape};
use fracbit_format::{Codebook, Grid, PackedView, Planes};
use fracbit_kernels::{
    Activations, Kernels, PackedMatrix,
    cases::{self, Packed},
    matmul,
};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError, DeviceMatrix, Limits, LoadError, MatrixPlan, Product, Workspace,
};
use half::f16;
use std::collections::BTreeSet;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    rows: usize,
    cols: usize,
    group: usize, // 0: the row
    batch: usize,
    /// Multiprocessors that the shim pretends to have.
    pub(crate) multiprocessors: usize,
    bias: bool,
    why: &'static str,
}

const CASES: [Case; 4] = [
    Case { rows: 16, cols: 16, group: 0, batch: 1, multiprocessors: 1, bias: false, why: "one tile" },
    Case {
        rows: 41,
        cols: 400,
        group: 0,
        batch: 3,
        multiprocessors: 2,
        bias: true,
        why: "padded edges, split sums",
    },
    Case {
        rows: 70,
        cols: 1280,
        group: 128,
        batch: 8,
        multiprocessors: 2,
        bias: false,
        why: "grouped scales",
    },
    Case {
        rows: 300,
        cols: 256,
        group: 0,
        batch: 2,
        multiprocessors: 1,
        bias: false,
        why: "several blocks of rows",
    },
];

/// How work is dealt to warps and blocks, for some schemes: shapes for the shim's few
/// multiprocessors, then for a GPU's.
#[rustfmt::skip]
const DEALS: [Case; 8] = [
    Case { rows: 200, cols: 2000, group: 0, batch: 8, multiprocessors: 3, bias: true, why: "panels, several pairs a block" },
    Case { rows: 33, cols: 4096, group: 0, batch: 1, multiprocessors: 5, bias: false, why: "pairs that blocks share" },
    Case { rows: 700, cols: 130, group: 0, batch: 5, multiprocessors: 3, bias: true, why: "many pairs a warp" },
    Case { rows: 97, cols: 1100, group: 256, batch: 2, multiprocessors: 3, bias: false, why: "warps that end inside a group" },
    Case { rows: 1000, cols: 4096, group: 0, batch: 1, multiprocessors: 132, bias: false, why: "pairs that blocks share" },
    Case { rows: 4100, cols: 4096, group: 0, batch: 8, multiprocessors: 132, bias: true, why: "panels" },
    Case { rows: 9000, cols: 1024, group: 0, batch: 3, multiprocessors: 132, bias: true, why: "several pairs a block" },
    Case { rows: 500, cols: 14336, group: 512, batch: 4, multiprocessors: 132, bias: false, why: "panels and groups" },
];

/// Products by a Psumbook, which every scheme of additive codebooks runs with partial sums of 16
/// and of 32 bits.
#[rustfmt::skip]
const PSUMS: [Case; 8] = [
    Case { rows: 16, cols: 16, group: 0, batch: 1, multiprocessors: 1, bias: false, why: "one tile" },
    Case { rows: 41, cols: 400, group: 0, batch: 3, multiprocessors: 2, bias: true, why: "padded edges" },
    Case { rows: 70, cols: 1280, group: 128, batch: 8, multiprocessors: 2, bias: false, why: "two scales an activation scale" },
    Case { rows: 33, cols: 1000, group: 384, batch: 4, multiprocessors: 3, bias: true, why: "scales that cross activation scales" },
    Case { rows: 1200, cols: 130, group: 0, batch: 1, multiprocessors: 1, bias: true, why: "more strips than a block has in flight" },
    Case { rows: 90, cols: 300, group: 256, batch: 5, multiprocessors: 5, bias: false, why: "few strips a block" },
    Case { rows: 300, cols: 4096, group: 0, batch: 2, multiprocessors: 132, bias: true, why: "ranges of strips" },
    Case { rows: 4100, cols: 4096, group: 0, batch: 8, multiprocessors: 132, bias: true, why: "all multiprocessors" },
];

struct Answer {
    raw: Vec<f32>,
    weights: Vec<f32>,
    product: Vec<f32>,
}

struct Prepared {
    packed: Packed,
    x: Vec<f32>,
    bias: Option<Vec<f32>>,
    start: Vec<f32>,
}

fn prepare(scheme: Scheme, number: usize, case: &Case) -> Prepared {
    // Full range of the table words on the grid of the built-in tables, and every allowed length in
    // turn.
    let wide = fracbit_codebook::builtin(scheme).is_some_and(|b| b.grid() == Grid::I16);
    let most = if wide || scheme.code() == Some(Code::Hyb) { 32_000 } else { 127 };
    prepare_with(scheme, number, case, cases::codebooks(scheme, number, most))
}

fn prepare_with(scheme: Scheme, number: usize, case: &Case, tables: Vec<Codebook>) -> Prepared {
    let shape = Shape::new(case.rows, case.cols);
    let row = scheme.group().unwrap_or(case.cols.next_multiple_of(16));
    let group = if case.group == 0 { row } else { case.group };
    let packed = Packed::random(scheme, shape, tables, group, number as u64 + 9);
    let x = cases::activations(case.batch * case.cols, 31 + number as u64);
    let bias = case.bias.then(|| cases::activations(case.rows, 5));
    Prepared { packed, x, bias, start: cases::activations(case.batch * case.rows, 6) }
}

fn run<D: Device>(device: &D, case: &Case, p: &Prepared) -> Result<(Answer, MatrixPlan), LoadError> {
    let matrix = DeviceMatrix::new(device, &p.packed.view().expect("parts that fit"), p.bias.as_deref())?;
    let (x, y) = (Buffer::of(device, &p.x, "x")?, Buffer::of(device, &p.start, "y")?);
    let expanded = Buffer::zeroed(device, 2 * case.rows * case.cols, "weights")?;
    let read = || -> Result<Vec<f32>, DeviceError> {
        let halves: Vec<u16> = expanded.read(case.rows * case.cols)?;
        Ok(halves.into_iter().map(|h| f16::from_bits(h).to_f32()).collect())
    };
    let whole = matrix.at(None);
    whole.expand(&expanded, true)?;
    let raw = read()?;
    whole.expand(&expanded, false)?;
    let weights = read()?;
    let work = Workspace::new(device, [&matrix])?;
    // Twice, since the first run must leave the counters as it found them.
    let product = || -> Result<Vec<f32>, DeviceError> {
        y.write(&p.start)?;
        whole.apply(&x, &y, case.batch, case.bias, &work)?;
        y.read(case.batch * case.rows)
    };
    let once = product()?;
    assert_eq!(once, product()?, "a launch repeats itself");
    let plan = matrix.plans().next().expect("a plan").clone();
    Ok((Answer { raw, weights, product: once }, plan))
}

/// The integers of the codes.
fn device_integers(view: &PackedView<'_>) -> Vec<f32> {
    let Shape { rows, cols } = view.shape();
    let mut out = vec![0.0; rows * cols];
    let mut tile = [0; 256];
    for down in 0..view.layout().tiles_down() {
        for across in 0..view.layout().tiles_across() {
            view.expand_tile(0, down, across, &mut tile);
            for (i, &v) in tile.iter().enumerate() {
                let (r, c) = (down * 16 + i / 16, across * 16 + i % 16);
                if r < rows && c < cols {
                    out[r * cols + c] = f32::from(v);
                }
            }
        }
    }
    out
}

/// The relative error of rounding activations, and weights where their scale multiplies them first.
fn rounding(scheme: Scheme, plan: &MatrixPlan) -> f64 {
    // One half (2^-11), or two (2^-21), where a table word holds one weight.
    let input = if plan.segments[0].single() { 2f64.powi(-21) } else { 2f64.powi(-11) };
    input + if scheme.group().is_some() { 2f64.powi(-11) } else { 0.0 }
}

fn check(what: &str, case: &Case, p: &Prepared, got: &Answer, plan: &MatrixPlan, limits: &Limits) -> f64 {
    let view = p.packed.view().expect("parts that fit");
    let integers = device_integers(&view);
    let factor = |r: usize, c: usize| {
        let scale = view.gain() * view.scales()[r * view.groups() + c / view.group()].to_f32();
        let segment = plan.segments.iter().find(|s| c < s.end_col).expect("a column of the matrix");
        scale * segment.factor
    };
    let Answer { raw, weights, product } = got;
    for r in 0..case.rows {
        for c in 0..case.cols {
            let i = r * case.cols + c;
            let half = f16::from_f32(integers[i]).to_f32();
            assert_eq!(raw[i], half, "{what}: integer ({r}, {c})");
            let want = f16::from_f32(half * factor(r, c)).to_f32();
            assert_eq!(weights[i], want, "{what}: weight ({r}, {c})");
        }
    }
    let weight = |r: usize, c: usize| {
        f64::from(f16::from_f32(integers[r * case.cols + c]).to_f32()) * f64::from(factor(r, c))
    };
    let input = rounding(view.layout().scheme(), plan);
    check_product(what, case, p, (&weight, product), input, &[(plan, limits)])
}

/// Checks a product with weights that have been rounded as `input` says, by launches of some plans;
/// returns the largest error as a share of its bound.
fn check_product(
    what: &str,
    case: &Case,
    p: &Prepared,
    (weight, product): (&dyn Fn(usize, usize) -> f64, &[f32]),
    input: f64,
    launches: &[(&MatrixPlan, &Limits)],
) -> f64 {
    let mut worst = 0f64;
    // f32 sums: 2^-24 of the sum of magnitudes for each addition, two terms a column, then scale
    // and the sums of warps and blocks.
    let parts: usize = launches.iter().map(|(plan, limits)| plan.launch(case.batch, limits).parts()).sum();
    let additions = (2 * case.cols * launches.len() + 4 * parts + 32) as f64;
    for n in 0..case.batch {
        for r in 0..case.rows {
            let (mut want, mut bound) = (f64::from(p.start[n * case.rows + r]), 1e-6);
            if case.bias {
                want += f64::from(p.bias.as_ref().expect("a bias")[r]);
            } else {
                want = 0.0;
            }
            for c in 0..case.cols {
                let w = weight(r, c);
                let x = f64::from(p.x[n * case.cols + c]);
                want += w * x;
                // Halves of small activations are subnormal: 2^-25.
                bound += (w * x).abs() * (input + additions * 2f64.powi(-24)) + w.abs() * 2f64.powi(-25);
            }
            let got = f64::from(product[n * case.rows + r]);
            assert!(
                (got - want).abs() <= bound,
                "{what}: output {r} of token {n}: {got}, want {want} within {bound:e}"
            );
            worst = worst.max((got - want).abs() / bound);
        }
    }
    worst
}

/// What a run of the whole matrix found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Kernels that ran.
    pub(crate) names: BTreeSet<String>,
    /// Cases that held.
    pub(crate) cases: usize,
    /// Largest error of a product as a share of its bound.
    pub(crate) worst: f64,
}

/// Runs every scheme on every case that `chosen` takes.
///
/// # Panics
/// When one does not hold.
pub(crate) fn check_all<D: Device>(device: &D, chosen: impl Fn(Scheme, &Case) -> bool, found: &mut Found) {
    for (at, scheme) in Scheme::all().filter(|&s| !several(s)).enumerate() {
        for (number, case) in CASES.iter().enumerate().filter(|(_, case)| chosen(scheme, case)) {
            check_one(device, scheme, at + number, case, found);
        }
    }
}

/// Runs a scheme of every kind of kernel on shapes that warps and blocks share in every way.
///
/// # Panics
/// When one does not hold.
pub(crate) fn check_deals<D: Device>(device: &D, chosen: impl Fn(&Case) -> bool, found: &mut Found) {
    for name in ["tcq-fast-2", "tcq-2.25", "vq-4", "int-4", "gnuq-3", "half-tcq-2.25", "aq-m2v8", "qoq-g128"]
    {
        let scheme: Scheme = name.parse().expect("a scheme");
        for (number, case) in DEALS.iter().enumerate().filter(|(_, case)| chosen(case)) {
            check_one(device, scheme, number, case, found);
        }
    }
}

/// Runs every additive scheme by a Psumbook: the bits are those of the scalar reference.
///
/// # Panics
/// When they are not.
pub(crate) fn check_psums<D: Device>(device: &D, chosen: impl Fn(Scheme, &Case) -> bool, found: &mut Found) {
    for scheme in Scheme::all() {
        let Family::Additive(books) = scheme.family() else { continue };
        // Sums of magnitudes of 258 and less fit 16 bits, of all codes of a byte together.
        let count = i16::try_from(books.of_bytes().count()).expect("a few");
        let narrow = count * i16::try_from(258 / books.weights()).expect("small");
        for (number, case) in PSUMS.iter().enumerate().filter(|(_, case)| chosen(scheme, case)) {
            // Codes that share a byte have the kernels of bytes, and small entries.
            let wide = (books.bits() == 8).then_some((32, 127));
            for (bits, most) in [(16, narrow)].into_iter().chain(wide) {
                let tables = cases::codebooks(scheme, 0, most);
                let mut p = prepare_with(scheme, number, case, tables);
                // Columns of no magnitude, and of none that counts.
                let zeros = case.cols.min(256);
                if number == 1 {
                    p.x[..zeros].fill(0.0);
                    p.x[case.cols..][..zeros].fill(-1e-35);
                }
                check_psum(device, case, &p, bits, found);
            }
            // The largest partial sums of 16 bits.
            let mut p = prepare_with(scheme, number, case, vec![largest(scheme)]);
            for row in p.x.chunks_mut(case.cols) {
                row.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 2 == 0 { 1.0 } else { -1.0 });
            }
            check_psum(device, case, &p, 16, found);
        }
    }
}

/// Centroids whose products with activations of 127 and alternating signs are 127 * 258.
fn largest(scheme: Scheme) -> Codebook {
    let index = cases::codebooks(scheme, 0, 127)[0].additive().expect("additive codebooks");
    // Of all codes of a byte together.
    let room = 258 * index.bits as usize / 8;
    let entry = |i: usize| {
        let (code, k) = (i / index.weights, i % index.weights);
        let magnitude = room / index.weights + usize::from(k < room % index.weights);
        let magnitude = i16::try_from(magnitude).expect("small");
        if (code + k).is_multiple_of(2) { magnitude } else { -magnitude }
    };
    let entries = (0..(index.count * index.weights) << index.bits).map(entry).collect();
    Codebook::new(scheme, entries, 0.25).expect("sums within -127..=127")
}

/// Whether a matrix of the scheme is on a device in several parts.
fn several(scheme: Scheme) -> bool {
    matches!(scheme.family(), Family::NestTcq(..) | Family::NestNuq(_))
}

/// Runs every nested scheme at all its precisions.
///
/// # Panics
/// When one does not hold.
pub(crate) fn check_nested<D: Device>(device: &D, chosen: impl Fn(Scheme, &Case) -> bool, found: &mut Found) {
    for (at, scheme) in Scheme::all().filter(|&s| several(s)).enumerate() {
        for (number, case) in CASES.iter().enumerate().filter(|(_, case)| chosen(scheme, case)) {
            let p = prepare(scheme, at + number, case);
            check_precisions(device, case, &p, found)
                .unwrap_or_else(|e| panic!("{scheme}, {}: {e}", case.why));
        }
    }
}

fn check_precisions<D: Device>(
    device: &D,
    case: &Case,
    p: &Prepared,
    found: &mut Found,
) -> Result<(), LoadError> {
    let (view, scheme) = (p.packed.view().expect("parts that fit"), p.packed.scheme);
    let Case { rows, cols, batch, why, .. } = *case;
    let matrix = DeviceMatrix::new(device, &view, p.bias.as_deref())?;
    let work = Workspace::new(device, [&matrix])?;
    let (x, y) = (Buffer::of(device, &p.x, "x")?, Buffer::of(device, &p.start, "y")?);
    let expanded = Buffer::zeroed(device, 2 * rows * cols, "weights")?;
    let plans: Vec<&MatrixPlan> = matrix.plans().collect();
    let mut bytes = 0;
    for (i, rate) in scheme.precisions().enumerate() {
        let what = format!("{scheme} at {rate} bits, {rows}x{cols} batch {batch}: {why}");
        // A bound between two precisions is that of the lower.
        let reading = matrix.at(Some(Rate::quarter_bits(rate.quarters().expect("quarters") + 1)));
        assert!(reading.bytes() > bytes, "{what}: a higher precision reads more");
        bytes = reading.bytes();
        let weights = at_precision(&view, rate);
        reading.expand(&expanded, false)?;
        let halves: Vec<u16> = expanded.read(rows * cols)?;
        for (at, (&got, &(want, size))) in halves.iter().zip(&weights).enumerate() {
            // Each plane and each sum is rounded to half.
            let got = f64::from(f16::from_bits(got).to_f32());
            let roundings = if scheme.planes() > 1 { i + 1 } else { 1 } as f64;
            let near = (got - want).abs() <= roundings * 2f64.powi(-11) * size + 2f64.powi(-24);
            assert!(near, "{what}: weight {at}: {got}, want {want}");
        }
        y.write(&p.start)?;
        reading.apply(&x, &y, batch, case.bias, &work)?;
        let product: Vec<f32> = y.read(batch * rows)?;
        // Of a trellis the planes, of scalar codes one part.
        let these = if scheme.planes() > 1 { &plans[..=i] } else { &plans[i..=i] };
        let limits = device.limits();
        let launches: Vec<_> = these.iter().map(|&plan| (plan, &limits)).collect();
        let weight = |r: usize, c: usize| weights[r * cols + c].0;
        // Where planes cancel, their errors do not.
        let most = weights.iter().map(|(w, size)| size / w.abs().max(1e-9)).fold(1.0, f64::max);
        let input = most * rounding(scheme, these[0]);
        found.worst = found.worst.max(check_product(&what, case, p, (&weight, &product), input, &launches));
        found.names.extend(these.iter().flat_map(|plan| &plan.segments).map(|s| s.dequant.clone()));
        found.names.extend(these.iter().map(|plan| plan.gemv.clone()));
        found.cases += 1;
    }
    Ok(())
}

/// Weights of a nested matrix at a precision, and the sum of the magnitudes that they are made of.
fn at_precision(view: &PackedView<'_>, rate: Rate) -> Vec<(f64, f64)> {
    let (Shape { rows, cols }, scheme) = (view.shape(), view.layout().scheme());
    let half = |integer: i16| f64::from(f16::from_f32(f32::from(integer)).to_f32());
    let mut out = vec![(0.0, 0.0); rows * cols];
    for plane in 0..scheme.planes_within(rate).min(scheme.planes()) {
        for (i, (sum, size)) in out.iter_mut().enumerate() {
            let (r, c) = (i / cols, i % cols);
            let integer = match scheme.family() {
                Family::NestNuq(ladder) => {
                    let tile = &view.codes()[view.layout().tile(0, r / 16, c / 16)];
                    let at = (r % 16 * 16 + c % 16) * ladder.high() as usize;
                    let bits = u32::from(rate.quarters().expect("whole bits") as u8 / 4);
                    let bit = |k: usize| usize::from(tile[(at + k) / 8] >> ((at + k) % 8) & 1) << k;
                    let code: usize = (0..bits as usize).map(bit).sum();
                    view.codebooks()[0].at(bits).expect("a table for the precision")[code]
                }
                _ => {
                    let mut tile = [0; 256];
                    view.expand_tile(plane, r / 16, c / 16, &mut tile);
                    tile[r % 16 * 16 + c % 16]
                }
            };
            let w = half(integer) * f64::from(view.factor(plane, r, c));
            (*sum, *size) = (*sum + w, *size + w.abs());
        }
    }
    out
}

/// Runs progressive schemes in integers, for any number of tokens: where one block has all columns
/// of a row, the bits are those of the scalar reference.
///
/// # Panics
/// When they are not.
pub(crate) fn check_integers<D: Device>(
    device: &D,
    chosen: impl Fn(Scheme, &Case) -> bool,
    found: &mut Found,
) {
    let schemes = Scheme::all().filter(|scheme| matches!(scheme.family(), Family::Qoq(_)));
    for scheme in schemes {
        let cases = PSUMS.iter().chain(&DEALS[1..2]).enumerate();
        for (number, case) in cases.filter(|(_, case)| chosen(scheme, case)) {
            // A part of a tile, and of the second.
            for tokens in [[9, 20], [33, 70]][number % 2] {
                let case = Case { batch: tokens, group: 0, ..*case };
                let mut p = prepare(scheme, number, &case);
                // Columns of no magnitude, and of none that counts.
                let zeros = case.cols.min(256);
                p.x[..zeros].fill(0.0);
                p.x[case.cols..][..zeros].fill(-1e-35);
                check_integer(device, &case, &p, found).unwrap_or_else(|e| panic!("{scheme}: {e}"));
            }
        }
    }
}

fn check_integer<D: Device>(
    device: &D,
    case: &Case,
    p: &Prepared,
    found: &mut Found,
) -> Result<(), LoadError> {
    let Case { rows, cols, batch, why, .. } = *case;
    let what = format!("{} {rows}x{cols} batch {batch}: {why}", p.packed.scheme);
    // As for Psumbooks: a gain that is a power of two.
    let Packed { scheme, shape, codebooks, codes, second_level, scales, group } = &p.packed;
    let planes = Planes { codes, second_level, scales, gains: &[0.5] };
    let books: Vec<&Codebook> = codebooks.iter().collect();
    let view = PackedView::new(*scheme, *shape, &books, planes, *group).expect("parts that fit");
    let matrix = DeviceMatrix::new(device, &view, p.bias.as_deref())?;
    let (x, y) = (Buffer::of(device, &p.x, "x")?, Buffer::of(device, &p.start, "y")?);
    let halves = Buffer::zeroed(device, 2 * batch * cols, "no inputs")?;
    let scratch = Buffer::zeroed(device, 1 << 26, "scratch")?;
    let launch = matrix.at(None).integers(batch, scratch.bytes()).expect("progressive codes");
    assert!(matrix.at(None).integers(batch, 100).is_none(), "{what}: no room");
    let product = || -> Result<Vec<f32>, DeviceError> {
        y.write(&p.start)?;
        matrix.at(None).apply_many((&x, &halves), &scratch, &y, (0, rows), batch, case.bias)?;
        y.read(batch * rows)
    };
    let got = product()?;
    assert_eq!(got, product()?, "{what}: a launch repeats itself");
    let mut activations = Activations::new();
    activations.set(&p.x, cols).expect("whole tokens");
    let mut want = vec![f32::NAN; batch * rows];
    matmul(&PackedMatrix::new(&Kernels::scalar(), &view), &mut activations, &mut want).expect("shapes");
    // Sums of 256 columns, which ranges add in another order.
    let most = want.iter().fold(0f32, |most, v| most.max(v.abs()));
    for (i, (&got, &product)) in got.iter().zip(&want).enumerate() {
        let added = |bias: &Vec<f32>| p.start[i] + (product + bias[i % rows]);
        let want = p.bias.as_ref().map_or(product, added);
        let same = match launch.ranges {
            1 => got.to_bits() == want.to_bits(),
            _ => (got - want).abs() <= 1e-5 * most,
        };
        assert!(same, "{what}: output {i}: {got}, want {want}, {launch:?}");
    }
    found.names.insert(format!("fb_w4a8_{}", launch.tile));
    if launch.ranges > 1 {
        found.names.insert("fb_w4a8_finish".to_owned());
    }
    found.cases += 1;
    Ok(())
}

fn check_psum<D: Device>(device: &D, case: &Case, p: &Prepared, bits: u32, found: &mut Found) {
    let (scheme, rows, cols, batch) = (p.packed.scheme, case.rows, case.cols, case.batch);
    let what = format!("{scheme} {rows}x{cols} batch {batch}, sums of {bits} bits: {}", case.why);
    // The device multiplies scales by the gain, the processor sums: the same where it is a power of
    // two, as in files that `quantize` writes.
    let Packed { shape, codebooks, codes, scales, group, .. } = &p.packed;
    let planes = Planes { codes, second_level: &[], scales, gains: &[0.5] };
    let books: Vec<&Codebook> = codebooks.iter().collect();
    let view = PackedView::new(scheme, *shape, &books, planes, *group).expect("parts that fit");
    let product = || -> Result<_, LoadError> {
        let mut matrix = DeviceMatrix::new(device, &view, p.bias.as_deref())?;
        matrix.set_product(Product::Psumbook);
        let whole = matrix.at(None);
        let (x, y) = (Buffer::of(device, &p.x, "x")?, Buffer::of(device, &p.start, "y")?);
        let work = Workspace::new(device, [&matrix])?;
        whole.apply(&x, &y, batch, case.bias, &work)?;
        let once: Vec<f32> = y.read(batch * rows)?;
        y.write(&p.start)?;
        whole.apply(&x, &y, batch, case.bias, &work)?;
        assert_eq!(once, y.read::<f32>(batch * rows)?, "{what}: a launch repeats itself");
        Ok((once, matrix.plans().next().expect("a plan").clone()))
    };
    let (got, plan) = product().unwrap_or_else(|e| panic!("{what}: {e}"));
    let kernel = plan.psums.as_ref().expect("a Psumbook").kernel(batch);
    assert!(kernel.contains(&format!("_{bits}_")), "{what}: {kernel}");
    let mut x = Activations::new();
    x.set(&p.x, cols).expect("whole tokens");
    let mut want = vec![f32::NAN; batch * rows];
    let reference = PackedMatrix::new(&Kernels::scalar(), &view);
    matmul(&reference, &mut x, &mut want).expect("shapes that fit");
    for (i, want) in want.iter_mut().enumerate() {
        if let Some(bias) = &p.bias {
            *want = p.start[i] + (*want + bias[i % rows]);
        }
    }
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: output {i}: {got}, want {want}");
    }
    found.names.insert(kernel);
    found.cases += 1;
}

fn check_one<D: Device>(device: &D, scheme: Scheme, number: usize, case: &Case, found: &mut Found) {
    // Halves of a half-trellis begin with a group.
    if case.group > 128 && scheme.to_string().starts_with("half") {
        return;
    }
    let p = prepare(scheme, number, case);
    let (got, plan) = run(device, case, &p).unwrap_or_else(|e| panic!("{scheme}, {}: {e}", case.why));
    let (rows, cols, batch, why) = (case.rows, case.cols, case.batch, case.why);
    let what = format!("{scheme} {rows}x{cols} batch {batch}: {why}");
    found.worst = found.worst.max(check(&what, case, &p, &got, &plan, &device.limits()));
    found.names.extend(plan.segments.iter().map(|s| s.dequant.clone()));
    found.names.insert(plan.gemv.clone());
    found.cases += 1;
}
