//! What long prompts run on: products with many tokens, expansion and attention, timed and compared
//! with sums on the processor.

use crate::step::rows::{self, Row};
use crate::time;
use fracbit_base::{Scheme, Shape};
use fracbit_kernels::cases::{self, Packed, Random};
use fracbit_kernels_cuda::{
    Buffer, Device as _, DeviceMatrix, Gpu,
    ops::{
        self, AttentionShape, Cache, CacheType, DenseMatrix, Gemm, Halved, HeadOptions, PAGE, PageTables,
        Step, StepRows,
    },
};
use half::f16;
use std::error::Error;

/// Prints a table of rates; a sample of the results that is wrong fails all at the end.
pub(crate) fn run(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    let mut wrong = Vec::new();
    println!("| product | tokens | kernel | µs | TFLOP/s |\n| --- | --- | --- | --- | --- |");
    for (rows, cols, counts) in [
        (4096, 4096, &[4096, 1024, 512, 64][..]),
        (6144, 4096, &[1024]),
        (14336, 4096, &[1024, 512]),
        (4096, 14336, &[1024, 512, 64]),
    ] {
        let weights = DenseMatrix::new(gpu, (rows, cols), &halves(rows * cols, 1), None)?;
        for &tokens in counts {
            wrong.extend(product(gpu, &weights, tokens)?);
        }
    }
    println!("\n| expansion of 4096x14336 | µs | TB/s written |\n| --- | --- | --- |");
    for name in ["tcq-fast-2", "tcq-4", "nuq-4", "int-4"] {
        wrong.extend(expansion(gpu, name)?);
    }
    println!(
        "\n| 4096x14336, tokens | `qoq-g128` in integers, µs | expanded, then dense, µs |\n| --- | --- | --- |"
    );
    integers(gpu)?;
    println!(
        "\n| attention of 1024 rows, 32 heads, 8 kv, d 128 | µs, `heads` included | TFLOP/s |\n| --- | --- | --- |"
    );
    for kind in [CacheType::Half, CacheType::Eight, CacheType::Six, CacheType::Four] {
        for position in [0, 4096] {
            wrong.extend(attention(gpu, kind, position)?);
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Halves in -1..1: a long run of numbers again and again, of a length that divides no row.
fn halves(n: usize, seed: u64) -> Vec<u16> {
    let mut random = Random::new(seed);
    let run: Vec<u16> = (0..1_000_003).map(|_| f16::from_f32(2.0 * random.unit() - 1.0).to_bits()).collect();
    (0..n).map(|i| run[i % run.len()]).collect()
}

fn value(bits: u16) -> f64 {
    f64::from(f16::from_bits(bits))
}

/// Launches of a timed graph.
const LAUNCHES: usize = 8;

/// What is wrong, if anything.
type Wrong = Result<Option<String>, Box<dyn Error>>;

fn product(gpu: &Gpu, weights: &DenseMatrix<'_, Gpu>, tokens: usize) -> Wrong {
    let mut wrong = None;
    let (rows, cols) = (weights.rows(), weights.cols());
    let x = halves(tokens * cols, 2);
    let input = Buffer::of(gpu, &x, "inputs")?;
    let mut kernels = vec![Gemm::MMA];
    if gpu.warpgroups() {
        kernels.extend(Gemm::WARPGROUP);
    }
    let chosen = Gemm::choose(gpu, rows, tokens);
    let w: Vec<u16> = weights.weights().read(rows * cols)?;
    for gemm in kernels {
        let y = Buffer::zeroed(gpu, 4 * tokens * rows, "outputs")?;
        let run = || weights.apply_many_by(gemm, gpu, &input, &y, (0, rows), tokens, false);
        run()?;
        let got: Vec<f32> = y.read(tokens * rows)?;
        for i in 0..500 {
            // Steps that meet every row and token of a tile.
            let (n, r) = (i * 37 % tokens, i * 1009 % rows);
            let pairs = w[r * cols..][..cols].iter().zip(&x[n * cols..][..cols]);
            let (want, size) = pairs.fold((0.0, 0.0), |(sum, size), (&w, &x)| {
                let product = value(w) * value(x);
                (sum + product, size + product.abs())
            });
            let error = (f64::from(got[n * rows + r]) - want).abs();
            if error.is_nan() || error > size * 1e-5 {
                let what = format!("{rows}x{cols}, {tokens} tokens, {gemm:?}, output {r} of token {n}");
                wrong.get_or_insert(format!("{what}: {error} beside {want}"));
            }
        }
        let us = time(gpu, LAUNCHES, |_| run())?;
        let mark = if gemm == chosen { " (chosen)" } else { "" };
        let rate = 2e-6 * (rows * cols * tokens) as f64 / us;
        println!("| {rows}x{cols} | {tokens} | {}{mark} | {us:.1} | {rate:.0} |", gemm.kernel());
    }
    Ok(wrong)
}

fn expansion(gpu: &Gpu, name: &str) -> Wrong {
    let mut wrong = None;
    let (scheme, shape): (Scheme, _) = (name.parse()?, Shape::new(4096, 14336));
    let group = scheme.group().unwrap_or(shape.cols);
    let packed = Packed::random(scheme, shape, cases::codebooks(scheme, 0, 90), group, 1);
    let matrix = DeviceMatrix::new(gpu, &packed.view()?, None)?;
    let out = Buffer::room(gpu, 2 * shape.len(), "weights")?;
    matrix.at(None).expand(&out, false)?;
    let got: Vec<u16> = out.read(shape.len())?;
    for (i, (&h, want)) in got.iter().zip(packed.view()?.dequantize()).enumerate() {
        // Entries of tables and their products with scales are rounded to halves.
        if (value(h) - f64::from(want)).abs() > 2f64.powi(-9) * f64::from(want).abs() + 1e-6 {
            wrong.get_or_insert_with(|| format!("{name}, weight {i}: {} for {want}", value(h)));
        }
    }
    let us = time(gpu, LAUNCHES, |_| matrix.at(None).expand(&out, false))?;
    println!("| {name} | {us:.1} | {:.2} |", 2e-6 * shape.len() as f64 / us);
    Ok(wrong)
}

/// Progressive codes that meet int8 activations, beside their expansion and a dense product. Parity
/// has been checked.
fn integers(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    let (scheme, shape): (Scheme, _) = ("qoq-g128".parse()?, Shape::new(4096, 14336));
    let Shape { rows, cols } = shape;
    let packed = Packed::random(scheme, shape, cases::codebooks(scheme, 0, 90), cols, 1);
    let matrix = DeviceMatrix::new(gpu, &packed.view()?, None)?;
    let scratch = Buffer::room(gpu, 2 * shape.len(), "scratch")?;
    let weights = DenseMatrix::of_buffer(Buffer::room(gpu, 2 * shape.len(), "weights")?, rows, cols);
    for tokens in [16, 32, 64, 128, 256] {
        let x = Buffer::of(gpu, &cases::activations(tokens * cols, 3), "x")?;
        let half_inputs = Buffer::of(gpu, &halves(tokens * cols, 2), "inputs")?;
        let y = Buffer::zeroed(gpu, 4 * tokens * rows, "y")?;
        let exact =
            |_| matrix.at(None).apply_many((&x, &half_inputs), &scratch, &y, (0, rows), tokens, false);
        let expanded = |_| {
            matrix.at(None).expand(weights.weights(), false)?;
            weights.apply_many(gpu, &half_inputs, &y, (0, rows), tokens, false)
        };
        let [exact, expanded] = [time(gpu, LAUNCHES, exact)?, time(gpu, LAUNCHES, expanded)?];
        println!("| {tokens} | {exact:.1} | {expanded:.1} |");
    }
    Ok(())
}

/// Attention of Llama-3-8B for 1024 rows after `position` others.
fn attention(gpu: &Gpu, kind: CacheType, position: usize) -> Wrong {
    const ROWS: usize = 1024;
    let mut wrong = None;
    let held = position + ROWS;
    let shape = AttentionShape { heads: 32, kv_heads: 8, d: 128, capacity: held };
    let (d, width) = (shape.d, shape.row());
    let pages = held.div_ceil(PAGE);
    let (cache, tables) = (Cache::new(gpu, &shape, kind, pages)?, PageTables::new(gpu, 1, held)?);
    let halved = kind.codes().then(|| Halved::new(gpu, &shape, pages)).transpose()?;
    // (kv_heads, position), of positions before these rows.
    let old = [0, 1].map(|which| -> Vec<Row> {
        let numbers = cases::activations(8 * position * d, 3 + which as u64);
        numbers.chunks_exact(d).map(|row| Row::of(kind, which, row)).collect()
    });
    for (which, to) in [&cache.keys, &cache.values].into_iter().enumerate() {
        let (mut all, bytes) = (vec![0u8; to.bytes()], kind.blocks(d)[which]);
        for (i, row) in old[which].iter().enumerate() {
            let (kv, p) = (i / position, i % position);
            rows::put(row, which, &mut all[(p / PAGE * 8 + kv) * bytes..][..bytes], p % PAGE);
        }
        to.write(&all)?;
    }
    let qkv = cases::activations(ROWS * width, 5);
    let step = Buffer::of(gpu, &[Step::new(&[position], &[])], "step")?;
    let input = Buffer::of(gpu, &qkv, "qkv")?;
    let out = Buffer::zeroed(gpu, 4 * ROWS * shape.heads * d, "out")?;
    let options = HeadOptions {
        query_norm: None,
        key_norm: None,
        turns: None,
        growth: None,
        cap: 0.0,
        eps: 0.0,
        window: 0,
        head_turn: None,
        constants: None,
        halved: halved.as_ref(),
    };
    let run =
        || ops::attention(&step, &input, (&cache, &tables), &out, StepRows::of_one(ROWS), &shape, &options);
    run()?;
    let got: Vec<f32> = out.read(ROWS * shape.heads * d)?;
    let of_row = |p: usize, head: usize| &qkv[(p - position) * width + head * d..][..d];
    for (row, head) in [(0, 0), (1, 31), (63, 8), (64, 9), (500, 17), (1000, 30), (1023, 3)] {
        let (q, kv) = (of_row(position + row, head), head / 4);
        let cached = |part: usize, p: usize| -> Vec<f64> {
            if p < position {
                return old[part][kv * position + p].numbers();
            }
            Row::of(kind, part, of_row(p, 32 + 8 * part + kv)).numbers()
        };
        let (mut total, mut sums) = (0.0, vec![0.0; d]);
        for p in 0..=position + row {
            let score: f64 = q.iter().zip(cached(0, p)).map(|(&q, k)| f64::from(q) * k).sum();
            let weight = (score / (d as f64).sqrt()).exp();
            total += weight;
            sums.iter_mut().zip(cached(1, p)).for_each(|(sum, v)| *sum += weight * v);
        }
        for (i, (sum, &got)) in sums.iter().zip(&got[(row * 32 + head) * d..][..d]).enumerate() {
            let error = (f64::from(got) - sum / total).abs();
            if error.is_nan() || error > 4e-3 {
                wrong.get_or_insert_with(|| {
                    format!(
                        "{kind:?}, attention after {position}, row {row}, head {head}, column {i}: {error}"
                    )
                });
            }
        }
    }
    // Queries were scaled in place: what follows is the same work on other numbers.
    let us = time(gpu, LAUNCHES, |_| run())?;
    let seen = ROWS * position + ROWS * (ROWS + 1) / 2;
    println!("| {kind:?}, after {position} | {us:.1} | {:.0} |", 4e-6 * (seen * d * shape.heads) as f64 / us);
    Ok(wrong)
}
