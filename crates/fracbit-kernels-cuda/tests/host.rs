//! Every instance of the CUDA kernels, compiled for the host, against the scalar reference.
//!
//! The C++ compiler builds `kernels/cuda` with the shim of `kernels/cuda/host` (fibres for threads, checked memory). Expansion must be
//! exact; products must lie within the bound derived below.
#![expect(clippy::print_stderr, reason = "what ran is the point")]

use fracbit_base::{Scheme, Shape};
use fracbit_format::PackedView;
use fracbit_kernels::cases::{self, Packed};
use fracbit_kernels_cuda::{Limits, MatrixPlan};
use half::f16;
use std::{
    collections::BTreeSet,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
};

struct Case {
    rows: usize,
    cols: usize,
    group: usize, // 0: the row
    batch: usize,
    multiprocessors: usize,
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

fn cuda() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/cuda")
}

/// Compiles one file, unless an object of the same sources is there.
fn compile(source: &str, unit: Option<&str>, stamp: u64) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let stem = source.replace(['/', '.'], "_");
    let object = folder.join(format!("{stem}-{}-{stamp:016x}.o", unit.unwrap_or("main")));
    if object.exists() {
        return object;
    }
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-c"]);
    if let Some(unit) = unit {
        command.arg(format!("-DFB_UNIT=\"../gen/{unit}.inc\""));
    }
    let partial = object.with_extension("partial");
    let status = command.arg(cuda().join(source)).arg("-o").arg(&partial).status().expect("a C++ compiler");
    assert!(status.success(), "compiling {source} {unit:?} for the host");
    fs::rename(partial, &object).expect("the object keeps its name");
    object
}

/// The program that runs cases, built from the units in `kernels/cuda/gen`, two at a time.
fn program() -> PathBuf {
    let mut files: Vec<PathBuf> = ["", "host", "gen"]
        .iter()
        .flat_map(|f| fs::read_dir(cuda().join(f)).expect("kernels/cuda").flatten().map(|e| e.path()))
        .filter(|p| p.is_file())
        .collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    files.iter().for_each(|f| fs::read(f).expect("a source").hash(&mut hasher));
    let stamp = hasher.finish();
    let mut jobs: Vec<(&str, Option<String>)> = files
        .iter()
        .filter(|f| f.extension().is_some_and(|e| e == "inc"))
        .map(|f| ("host/instances.cpp", Some(f.file_stem().expect("a name").to_string_lossy().into_owned())))
        .collect();
    jobs.push(("host/parity.cpp", None));
    let (jobs, objects) = (Mutex::new(jobs), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((source, unit)) = { jobs.lock().expect("no panic").pop() } {
                    let object = compile(source, unit.as_deref(), stamp);
                    objects.lock().expect("no panic").push(object);
                }
            });
        }
    });
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("parity-{stamp:016x}"));
    let status =
        Command::new("c++").args(objects.into_inner().expect("no panic")).arg("-o").arg(&program).status();
    assert!(status.expect("a linker").success(), "linking the host program");
    program
}

#[derive(Default)]
struct Record(Vec<u8>);

impl Record {
    fn word(&mut self, v: usize) -> &mut Self {
        self.0.extend(u32::try_from(v).expect("32 bits").to_le_bytes());
        self
    }
    fn floats(&mut self, v: &[f32]) -> &mut Self {
        v.iter().for_each(|f| self.0.extend(f.to_le_bytes()));
        self
    }
    fn name(&mut self, name: &str) -> &mut Self {
        self.word(name.len()).0.extend(name.bytes());
        self
    }
}

struct Prepared {
    packed: Packed,
    plan: MatrixPlan,
    x: Vec<f32>,
    bias: Option<Vec<f32>>,
    start: Vec<f32>,
    splits: usize,
}

fn prepare(scheme: Scheme, number: usize, case: &Case, record: &mut Record) -> Prepared {
    let shape = Shape::new(case.rows, case.cols);
    let group = if case.group == 0 { case.cols.next_multiple_of(16) } else { case.group };
    // Full range of the table words, and every allowed length in turn.
    let most = if scheme.to_string().contains("hyb") { 32_000 } else { 127 };
    let packed =
        Packed::random(scheme, shape, cases::codebooks(scheme, number, most), group, number as u64 + 9);
    let view = packed.view().expect("parts that fit");
    let plan = MatrixPlan::new(&view).expect("a group that runs");
    let launch = plan.launch(case.batch, &Limits { multiprocessors: case.multiprocessors, shared: 99 << 10 });
    let x = cases::activations(case.batch * case.cols, 31 + number as u64);
    let bias = case.bias.then(|| cases::activations(case.rows, 5));
    let start = cases::activations(case.batch * case.rows, 6);
    record.name(&plan.gemv);
    for v in [case.rows, case.cols, group, plan.groups, plan.pairs, case.batch, usize::from(case.bias)] {
        record.word(v);
    }
    for v in [launch.warps, launch.shared, plan.segments.len(), plan.row_bytes, usize::from(case.bias)] {
        record.word(v);
    }
    for (s, (per_split, splits)) in plan.segments.iter().zip(&launch.ranges) {
        record.name(&s.dequant);
        for v in [s.half_bits, s.offset, s.tiles, s.octets, s.first_col, s.end_col, *splits, *per_split] {
            record.word(v);
        }
        record.floats(&[s.factor]);
        for v in [s.book.log_rows(), s.book.log_stride, s.book.log_copies] {
            record.word(v as usize);
        }
        s.book.rows.iter().for_each(|&row| record.0.extend(row.to_le_bytes()));
    }
    record.0.extend(view.codes());
    view.scales().iter().for_each(|s| record.0.extend(s.to_le_bytes()));
    record.floats(&x).floats(bias.as_deref().unwrap_or_default()).floats(&start);
    let splits = launch.splits();
    Prepared { packed, plan, x, bias, start, splits }
}

/// Takes the next `n` values of `N` bytes.
fn take<const N: usize, T>(bytes: &mut &[u8], n: usize, from: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (head, rest) = bytes.split_at(n * N);
    *bytes = rest;
    head.as_chunks::<N>().0.iter().map(|b| from(*b)).collect()
}

/// The integer grid as the device holds it.
fn device_integers(view: &PackedView<'_>) -> Vec<f32> {
    let Shape { rows, cols } = view.shape();
    let mut out = vec![0.0; rows * cols];
    let mut tile = [0; 256];
    for down in 0..view.layout().tiles_down() {
        for across in 0..view.layout().tiles_across() {
            view.expand_tile(down, across, &mut tile);
            for (i, &v) in tile.iter().enumerate() {
                let (r, c) = (down * 16 + i / 16, across * 16 + i % 16);
                if r < rows && c < cols {
                    out[r * cols + c] = f16::from_f32(f32::from(v)).to_f32();
                }
            }
        }
    }
    out
}

fn check(scheme: Scheme, case: &Case, p: &Prepared, answer: &mut &[u8]) -> f64 {
    let what =
        format!("{scheme} ({}) {}x{} batch {}: {}", p.plan.gemv, case.rows, case.cols, case.batch, case.why);
    let view = p.packed.view().expect("parts that fit");
    let integers = device_integers(&view);
    let weight = |r: usize, c: usize| {
        let scale = view.scales()[r * view.groups() + c / view.group()].to_f32();
        let segment = p.plan.segments.iter().find(|s| c < s.end_col).expect("a column of the matrix");
        (integers[r * case.cols + c], scale * segment.factor)
    };
    let half = |b| f16::from_le_bytes(b).to_f32();
    let (raw, weights) =
        (take(answer, case.rows * case.cols, half), take(answer, case.rows * case.cols, half));
    let y = take(answer, case.batch * case.rows, f32::from_le_bytes);
    for r in 0..case.rows {
        for c in 0..case.cols {
            let (integer, factor) = weight(r, c);
            assert_eq!(raw[r * case.cols + c], integer, "{what}: integer ({r}, {c})");
            let want = f16::from_f32(integer * factor).to_f32();
            assert_eq!(weights[r * case.cols + c], want, "{what}: weight ({r}, {c})");
        }
    }
    // Error of a product: of the activation's halves (relative 2^-11 for one, 2^-21 for two, 2^-25 where they are subnormal),
    // of f32 sums (2^-24 of the sum of magnitudes for each addition, two terms a column, then scale and ranges).
    let single = !p.plan.segments[0].dequant.contains("pair") && !p.plan.segments[0].dequant.contains("hyb");
    let input = if single { 2f64.powi(-21) } else { 2f64.powi(-11) };
    let additions = (2 * case.cols + 4 * p.splits + 8) as f64;
    let mut worst = 0f64;
    for n in 0..case.batch {
        for r in 0..case.rows {
            let (mut want, mut bound) = (f64::from(p.start[n * case.rows + r]), 1e-6);
            if case.bias {
                want += f64::from(p.bias.as_ref().expect("a bias")[r]);
            } else {
                want = 0.0;
            }
            for c in 0..case.cols {
                let (integer, factor) = weight(r, c);
                let w = f64::from(integer) * f64::from(factor);
                let x = f64::from(p.x[n * case.cols + c]);
                want += w * x;
                bound += (w * x).abs() * (input + additions * 2f64.powi(-24)) + w.abs() * 2f64.powi(-25);
            }
            let got = f64::from(y[n * case.rows + r]);
            assert!(
                (got - want).abs() <= bound,
                "{what}: output {r} of token {n}: {got}, want {want} within {bound:e}"
            );
            worst = worst.max((got - want).abs() / bound);
        }
    }
    worst
}

#[test]
fn every_instance_matches_the_reference() {
    let program = program();
    let mut record = Record::default();
    let mut prepared = Vec::new();
    for (at, scheme) in Scheme::all().enumerate() {
        for (number, case) in CASES.iter().enumerate() {
            // Half-trellis groups must start with each half.
            prepared.push((scheme, case, prepare(scheme, at + number, case, &mut record)));
        }
    }
    let mut input = u32::try_from(prepared.len()).expect("few cases").to_le_bytes().to_vec();
    input.append(&mut record.0);
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the host program starts");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("the host program ends");
    assert!(output.status.success(), "the host program failed: see its message above");
    writer.join().expect("no panic").expect("all input taken");
    let mut answer = output.stdout.as_slice();
    let (mut names, mut worst) = (BTreeSet::new(), 0f64);
    for (scheme, case, p) in &prepared {
        worst = worst.max(check(*scheme, case, p, &mut answer));
        names.insert(p.plan.gemv.clone());
        names.extend(p.plan.segments.iter().map(|s| s.dequant.clone()));
    }
    assert!(answer.is_empty(), "{} bytes of answer left over", answer.len());
    // All generated instances ran.
    for unit in fs::read_dir(cuda().join("gen")).expect("kernels/cuda/gen").flatten() {
        for line in fs::read_to_string(unit.path()).expect("a unit").lines().filter(|l| l.starts_with("FB_"))
        {
            let name = line.split(['(', ',']).nth(1).expect("a name");
            assert!(names.contains(name), "{name} did not run");
        }
    }
    eprintln!("{} instances, {} cases, worst error {worst:.3} of its bound", names.len(), prepared.len());
}
