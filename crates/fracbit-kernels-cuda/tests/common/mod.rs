//! Parity of packed products on any device: what `tests/host.rs` runs on the shim and
//! `examples/cuda_check.rs` on a GPU.

use fracbit_base::{Code, Family, Scheme, Shape};
use fracbit_format::{Grid, PackedView};
use fracbit_kernels::cases::{self, Packed};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError, DeviceMatrix, Engine, Limits, LoadError, MatrixPlan, Workspace,
};
use half::f16;
use std::collections::BTreeSet;

/// One shape.
#[derive(Debug)]
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

struct Answer {
    raw: Vec<f32>,
    weights: Vec<f32>,
    /// Of every engine.
    products: Vec<(Engine, Vec<f32>)>,
}

struct Prepared {
    packed: Packed,
    x: Vec<f32>,
    bias: Option<Vec<f32>>,
    start: Vec<f32>,
}

fn prepare(scheme: Scheme, number: usize, case: &Case) -> Prepared {
    let shape = Shape::new(case.rows, case.cols);
    let row = scheme.group().unwrap_or(case.cols.next_multiple_of(16));
    let group = if case.group == 0 { row } else { case.group };
    // Full range of the table words on the grid of the built-in tables, and every allowed length in
    // turn.
    let wide = fracbit_codebook::builtin(scheme).is_some_and(|b| b.grid() == Grid::I16);
    let most = if wide || scheme.code() == Some(Code::Hyb) { 32_000 } else { 127 };
    let packed =
        Packed::random(scheme, shape, cases::codebooks(scheme, number, most), group, number as u64 + 9);
    let x = cases::activations(case.batch * case.cols, 31 + number as u64);
    let bias = case.bias.then(|| cases::activations(case.rows, 5));
    Prepared { packed, x, bias, start: cases::activations(case.batch * case.rows, 6) }
}

fn run<D: Device>(device: &D, case: &Case, p: &Prepared) -> Result<(Answer, MatrixPlan), LoadError> {
    let mut matrix = DeviceMatrix::new(device, &p.packed.view().expect("parts that fit"), p.bias.as_deref())?;
    let (x, y) = (Buffer::of(device, &p.x, "x")?, Buffer::of(device, &p.start, "y")?);
    let expanded = Buffer::zeroed(device, 2 * case.rows * case.cols, "weights")?;
    let read = || -> Result<Vec<f32>, DeviceError> {
        let halves: Vec<u16> = expanded.read(case.rows * case.cols)?;
        Ok(halves.into_iter().map(|h| f16::from_bits(h).to_f32()).collect())
    };
    matrix.expand(&expanded, true)?;
    let raw = read()?;
    matrix.expand(&expanded, false)?;
    let weights = read()?;
    let work = Workspace::new(device, [&matrix])?;
    let mut products = Vec::new();
    for engine in matrix.engines() {
        matrix.prefer(Some(engine));
        // Twice, since the first run must leave the counters as it found them.
        let run = || -> Result<Vec<f32>, DeviceError> {
            y.write(&p.start)?;
            matrix.apply(&x, &y, case.batch, case.bias, &work)?;
            y.read(case.batch * case.rows)
        };
        let once = run()?;
        assert_eq!(once, run()?, "a launch repeats itself");
        products.push((engine, once));
    }
    Ok((Answer { raw, weights, products }, matrix.plan().clone()))
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

/// Activations as a product sees them, (batch, cols), and the relative error of those that are
/// merely rounded to halves.
fn seen(case: &Case, p: &Prepared, plan: &MatrixPlan, engine: Engine) -> (Vec<f64>, f64) {
    // One half (2^-11), or two (2^-21), where a table word holds one weight.
    let single = !plan.segments[0].dequant.contains("pair") && !plan.segments[0].dequant.contains("hyb");
    let relative = if single { 2f64.powi(-21) } else { 2f64.powi(-11) };
    match (engine, &plan.core) {
        (Engine::Core, Some(core)) => (rounded(&p.x, case.cols, f32::from(core.form.most())), 0.0),
        _ => (p.x.iter().map(|&x| f64::from(x)).collect(), relative),
    }
}

/// Integers times scales of 256 columns each, as on the processor.
fn rounded(x: &[f32], cols: usize, most: f32) -> Vec<f64> {
    let group = |x: &[f32]| -> Vec<f64> {
        let top = x.iter().fold(0f32, |top, x| top.max(x.abs()));
        let value = |x: &f32| f64::from((x * (most / top)).round_ties_even()) * f64::from(top / most);
        x.iter().map(value).collect()
    };
    x.chunks(cols).flat_map(|token| token.chunks(256).flat_map(group)).collect()
}

fn check(what: &str, case: &Case, p: &Prepared, got: &Answer, plan: &MatrixPlan, limits: &Limits) -> f64 {
    let view = p.packed.view().expect("parts that fit");
    let integers = device_integers(&view);
    let factor = |r: usize, c: usize| {
        let scale = view.gain() * view.scales()[r * view.groups() + c / view.group()].to_f32();
        let segment = plan.segments.iter().find(|s| c < s.end_col).expect("a column of the matrix");
        scale * segment.factor
    };
    let Answer { raw, weights, products } = got;
    for r in 0..case.rows {
        for c in 0..case.cols {
            let i = r * case.cols + c;
            let half = f16::from_f32(integers[i]).to_f32();
            assert_eq!(raw[i], half, "{what}: integer ({r}, {c})");
            let want = f16::from_f32(half * factor(r, c)).to_f32();
            assert_eq!(weights[i], want, "{what}: weight ({r}, {c})");
        }
    }
    let mut worst = 0f64;
    for (engine, y) in products {
        let (x, input) = seen(case, p, plan, *engine);
        let splits = plan.launch(*engine, case.batch, limits).splits();
        // f32 sums: 2^-24 of the sum of magnitudes for each addition, two terms a column, then
        // scale and ranges.
        let additions = (2 * case.cols + 4 * splits + 8) as f64;
        for n in 0..case.batch {
            for r in 0..case.rows {
                let (mut want, mut bound) = (f64::from(p.start[n * case.rows + r]), 1e-6);
                if case.bias {
                    want += f64::from(p.bias.as_ref().expect("a bias")[r]);
                } else {
                    want = 0.0;
                }
                for c in 0..case.cols {
                    // The tensor cores' tables hold halves, the others the integers.
                    let integer = integers[r * case.cols + c];
                    let integer =
                        if *engine == Engine::Core { integer } else { f16::from_f32(integer).to_f32() };
                    let w = f64::from(integer) * f64::from(factor(r, c));
                    let x = x[n * case.cols + c];
                    want += w * x;
                    // Halves of small activations are subnormal: 2^-25.
                    bound += (w * x).abs() * (input + additions * 2f64.powi(-24)) + w.abs() * 2f64.powi(-25);
                }
                let got = f64::from(y[n * case.rows + r]);
                assert!(
                    (got - want).abs() <= bound,
                    "{what}, {engine:?}: output {r} of token {n}: {got}, want {want} within {bound:e}"
                );
                worst = worst.max((got - want).abs() / bound);
            }
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

/// Whether the backend has kernels for a scheme.
fn has_kernels(scheme: &Scheme) -> bool {
    scheme.planes() == 1 && !matches!(scheme.family(), Family::Additive(_))
}

/// Runs every scheme on every case that `chosen` takes.
///
/// # Panics
/// When one does not hold.
pub(crate) fn check_all<D: Device>(device: &D, chosen: impl Fn(Scheme, &Case) -> bool, found: &mut Found) {
    let limits: Limits = device.limits();
    for (at, scheme) in Scheme::all().filter(has_kernels).enumerate() {
        for (number, case) in CASES.iter().enumerate().filter(|(_, case)| chosen(scheme, case)) {
            let p = prepare(scheme, at + number, case);
            let (got, plan) = run(device, case, &p).unwrap_or_else(|e| panic!("{scheme}, {}: {e}", case.why));
            let (rows, cols, batch, why) = (case.rows, case.cols, case.batch, case.why);
            let what = format!("{scheme} {rows}x{cols} batch {batch}: {why}");
            found.worst = found.worst.max(check(&what, case, &p, &got, &plan, &limits));
            found.names.extend(plan.segments.iter().map(|s| s.dequant.clone()));
            found.names.extend(got.products.iter().map(|&(engine, _)| plan.kernel(engine, batch)));
            found.cases += 1;
        }
    }
}
