//! Parity and speed of the packed products on the GPU of this machine: what `cargo xtask gpu` runs.
//!
//! `cuda_check parity [SCHEME]...` runs every instance (or some schemes on small shapes) against
//! the scalar reference. `cuda_check encode` compares the searched codes of every trellis scheme
//! with the processor's and times the search at 2 bits. `cuda_check parts` checks and times what a
//! decoding step takes beside its products, `cuda_check prefill` products with many tokens,
//! expansion and attention of prompts. `cuda_check speed DENSE.json [SCHEMES [SHAPES [BATCHES]]]`
//! times the layer shapes of Llama-3.1 8B and 70B with cold caches: launches are recorded as one
//! graph that walks over enough copies of the matrix to fill 2 GB. `DENSE.json` holds the times of
//! dense half-precision products of the same shapes, one `"ROWSxCOLS bBATCH": microseconds` a line,
//! measured on the same machine.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod encode;
#[path = "../../tests/common/mod.rs"]
mod parity;
mod parts;
mod prefill;
#[path = "../../tests/common/sample.rs"]
mod sample;
#[path = "../../tests/common/step.rs"]
mod step;
#[path = "../../tests/common/turn.rs"]
mod turn;

use fracbit_base::{Family, Scheme, Shape};
use fracbit_kernels::cases::{self, Packed};
use fracbit_kernels_cuda::{Buffer, Device as _, DeviceError, DeviceMatrix, Gpu, Product, Workspace};
use std::{collections::BTreeMap, error::Error, fs, process::ExitCode, time::Instant};

/// Outputs by inputs: down of 8B, the target; then q and o, k and v, fused qkv, gate and up, fused;
/// the same of 70B.
const SHAPES: [(usize, usize); 11] = [
    (4096, 14336),
    (4096, 4096),
    (1024, 4096),
    (6144, 4096),
    (14336, 4096),
    (28672, 4096),
    (8192, 8192),
    (10240, 8192),
    (28672, 8192),
    (57344, 8192),
    (8192, 28672),
];
/// Nested schemes timed at the target shape, at every precision.
const NESTED: [&str; 4] = ["nest-nuq-2..4", "nest-nuq-4..8", "nest-tcq-2+2", "nest-tcq-fast-2+2"];
/// Schemes timed at every shape; at the target shape all are.
const SCHEMES: [&str; 10] = [
    "nuq-4",
    "vq-2",
    "vq-4",
    "tcq-fast-2",
    "tcq-2",
    "tcq-3",
    "tcq-4",
    "tcq-hyb-2",
    "half-tcq-2.25",
    "aq-m2v8",
];
const TARGET: (usize, usize) = (4096, 14336);
/// Bytes of weights that a timed graph walks over.
const COLD: usize = 2 << 30;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("cuda_check: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let start = Instant::now();
    let gpu = Gpu::open()?;
    println!("{}: {:?}, kernels loaded in {:.1} s", gpu.name(), gpu.limits(), start.elapsed().as_secs_f64());
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["parity", schemes @ ..] => check(&gpu, schemes),
        ["encode"] => encode::run(&gpu)?,
        ["parts"] => parts::run(&gpu)?,
        ["prefill"] => prefill::run(&gpu)?,
        ["speed", dense, rest @ ..] => speed(&gpu, &dense_times(dense)?, rest)?,
        _ => {
            let rest = "speed DENSE.json [SCHEMES [SHAPES [BATCHES]]]";
            return Err(
                format!("usage: cuda_check parity [SCHEME]... | encode | parts | prefill | {rest}").into()
            );
        }
    }
    println!("{:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn check(gpu: &Gpu, schemes: &[&str]) {
    let mut found = parity::Found::default();
    // Some: the small shapes alone, for tools that slow every access.
    let some = |scheme: Scheme| schemes.contains(&scheme.to_string().as_str());
    let chosen =
        |scheme, case: &parity::Case| schemes.is_empty() || (some(scheme) && case.multiprocessors > 1);
    parity::check_all(gpu, chosen, &mut found);
    parity::check_nested(gpu, chosen, &mut found);
    parity::check_integers(gpu, chosen, &mut found);
    parity::check_psums(gpu, chosen, &mut found);
    if schemes.is_empty() {
        parity::check_deals(gpu, |_| true, &mut found);
    }
    println!(
        "parity: {} instances, {} cases, worst error {:.3} of its bound",
        found.names.len(),
        found.cases,
        found.worst
    );
}

/// Microseconds by "ROWSxCOLS bBATCH".
fn dense_times(path: &str) -> Result<BTreeMap<String, f64>, Box<dyn Error>> {
    let mut times = BTreeMap::new();
    for line in fs::read_to_string(path)?.lines().filter(|l| l.contains(':')) {
        let (name, time) = line.rsplit_once(':').ok_or("a name and a time")?;
        times.insert(name.trim().trim_matches('"').to_owned(), time.trim().trim_end_matches(',').parse()?);
    }
    Ok(times)
}

/// Bytes per second of a device-to-device copy as PyTorch measured it, both directions counted.
fn copy_rate(dense: &BTreeMap<String, f64>) -> f64 {
    dense.get("copy GB/s").copied().unwrap_or(f64::NAN) * 1e9
}

/// A list of the command line, split at commas.
fn words<T: std::str::FromStr>(list: &str) -> Result<Vec<T>, Box<dyn Error>>
where
    T::Err: Error + 'static,
{
    Ok(list.split(',').map(str::parse).collect::<Result<_, _>>()?)
}

/// Times the shapes and schemes above, or those of `rest`: schemes, then shapes, then batches, each
/// a list with commas.
fn speed(gpu: &Gpu, dense: &BTreeMap<String, f64>, rest: &[&str]) -> Result<(), Box<dyn Error>> {
    let schemes: Option<Vec<Scheme>> = rest.first().map(|list| words(list)).transpose()?;
    let shapes: Option<Vec<String>> = rest.get(1).map(|list| words(list)).transpose()?;
    let batches: Vec<usize> = rest.get(2).map_or(Ok(vec![1, 8]), |list| words(list))?;
    println!("| scheme | shape | batch | µs | TB/s packed | share of copy | dense µs | speed-up |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (rows, cols) in SHAPES {
        if shapes.as_ref().is_some_and(|shapes| !shapes.contains(&format!("{rows}x{cols}"))) {
            continue;
        }
        for scheme in Scheme::all() {
            let name = scheme.to_string();
            let wanted = match &schemes {
                Some(schemes) => schemes.contains(&scheme),
                None if scheme.nested() => (rows, cols) == TARGET && NESTED.contains(&name.as_str()),
                None => SCHEMES.contains(&name.as_str()) || (rows, cols) == TARGET,
            };
            if wanted {
                time_products(gpu, dense, scheme, (rows, cols), &batches)?;
            }
        }
    }
    Ok(())
}

/// Microseconds of each of `n` launches, recorded as one graph: the median of five replays.
/// `launch` gets their numbers.
fn time(gpu: &Gpu, n: usize, launch: impl Fn(usize) -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let graph = gpu.record(&mut || (0..n).try_for_each(&launch))?;
    gpu.replay(&graph)?;
    gpu.wait()?;
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(gpu.time(|| gpu.replay(&graph))?);
    }
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[2]) * 1e3 / n as f64)
}

/// Times products of one shape, each a recorded run over copies that no cache holds.
fn time_products(
    gpu: &Gpu,
    dense: &BTreeMap<String, f64>,
    scheme: Scheme,
    (rows, cols): (usize, usize),
    batches: &[usize],
) -> Result<(), Box<dyn Error>> {
    let most = match scheme.family() {
        Family::Nuq => 100,
        // Partial sums fit 16 bits, as those of built-in codebooks.
        Family::Additive(books) => i16::try_from(books.count() * (258 / books.weights()))?,
        _ => 90,
    };
    let group = scheme.group().unwrap_or(cols);
    let packed = Packed::random(scheme, Shape::new(rows, cols), cases::codebooks(scheme, 0, most), group, 1);
    let view = packed.view()?;
    let bytes = view.codes().len() + 2 * view.scales().len();
    let mut matrices = vec![DeviceMatrix::new(gpu, &view, None)?];
    while matrices.len() < COLD.div_ceil(bytes).max(2) {
        matrices.push(matrices[0].copy()?);
    }
    // Additive codebooks both ways, whichever is taken.
    let psums = matrices[0].plans().any(|plan| plan.psums.is_some());
    let products = [Product::Expand, Product::Psumbook];
    for product in products.into_iter().filter(|&p| psums || p == Product::Expand) {
        matrices.iter_mut().for_each(|matrix| matrix.set_product(product));
        let name = if product == Product::Psumbook { " (Psumbook)" } else { "" };
        let work = Workspace::new(gpu, [&matrices[0]])?;
        for &batch in batches {
            let x = Buffer::of(gpu, &cases::activations(batch * cols, 3), "x")?;
            let y = Buffer::zeroed(gpu, 4 * batch * rows, "y")?;
            for rate in scheme.precisions() {
                let at = |i: usize| matrices[i].at(Some(rate));
                let us = time(gpu, matrices.len(), |i| at(i).apply(&x, &y, batch, false, &work))?;
                let of = if scheme.nested() { format!(" at {rate} bits") } else { String::new() };
                report(dense, &format!("{scheme}{of}{name}"), (rows, cols), batch, us, at(0).bytes());
            }
        }
    }
    Ok(())
}

fn report(
    dense: &BTreeMap<String, f64>,
    name: &str,
    shape: (usize, usize),
    batch: usize,
    us: f64,
    bytes: usize,
) {
    let rate = bytes as f64 / us * 1e6;
    let other = dense.get(&format!("{}x{} b{batch}", shape.0, shape.1)).copied().unwrap_or(f64::NAN);
    println!(
        "| {name} | {}x{} | {batch} | {us:.2} | {:.2} | {:.0} % | {other:.2} | {:.2} |",
        shape.0,
        shape.1,
        rate / 1e12,
        100.0 * rate / copy_rate(dense),
        other / us
    );
}
