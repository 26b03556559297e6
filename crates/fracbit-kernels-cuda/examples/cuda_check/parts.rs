//! What a decoding step takes beside its products: checked, then timed.

use crate::{
    sample::{Logits, check},
    step::{Attention, Bench},
    time,
    turn::Turn,
};
use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, DeviceError, Gpu,
    ops::{self, Before, Cache, CacheType, Draw, Gate, PAGE, SampleWork, Step, StepRows},
};
use std::error::Error;

/// Launches of a timed graph.
const LAUNCHES: usize = 200;
/// Bytes of distinct caches that it walks over, more than any L2 holds.
const COLD: usize = 512 << 20;
/// Bytes a second that an H200 copies.
const COPY: f64 = 4.1e12;

/// Checks and times everything, and prints a line for each.
pub(crate) fn run(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    attention(gpu)?;
    turns(gpu)?;
    sampling(gpu)?;
    Ok(())
}

fn attention(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    for kind in [CacheType::Half, CacheType::Eight, CacheType::Six, CacheType::Four] {
        for (heads, kv_heads, d) in [(32, 8, 128), (32, 8, 64), (8, 4, 256)] {
            attention_of(gpu, kind, (heads, kv_heads, d))?;
        }
    }
    Ok(())
}

fn attention_of(
    gpu: &Gpu,
    kind: CacheType,
    (heads, kv_heads, d): (usize, usize, usize),
) -> Result<(), Box<dyn Error>> {
    let sized = |capacity, sequences| {
        let (norms, rotation, window) = (false, true, 0);
        Attention {
            heads,
            kv_heads,
            d,
            capacity,
            sequences,
            norms,
            rotation,
            window,
            cap: 0.0,
            growth: false,
            kind,
            turned: kind.codes(),
            constants: None,
        }
    };
    let of = |capacity| sized(capacity, 1);
    sized(600, 8).on(gpu, 2)?.check_together(&[300, 0, 64, 17, 128, 63, 1, 511])?;
    let mut worst = 0f64;
    for constants in [None, Some(0)].into_iter().take(if kind.codes() { 2 } else { 1 }) {
        let mut bench = Attention { constants, ..of(4100) }.on(gpu, 1)?;
        for (before, rows) in [(0, 1), (127, 1), (2047, 1), (2000, 8), (4095, 1)] {
            worst = worst.max(bench.check(before, rows)?);
        }
    }
    let what = format!("attention, {kind:?}, {heads} heads, {kv_heads} of keys, {d} wide");
    println!("{what}: worst error {worst:.3} of its bound");
    if worst >= 1.0 {
        return Err("attention is wrong".into());
    }
    let bench = of(16_384).on(gpu, 1)?;
    for context in [128, 2048, 4096, 16_384] {
        for rows in [1, 8] {
            let us = timed_attention(gpu, &bench, context, rows)?;
            let bytes = (kind.page_bytes(kv_heads, d) * context / PAGE) as f64;
            let share = 100.0 * bytes / (us * 1e-6) / COPY;
            println!(
                "attention, {kind:?}, context {context}, {rows} tokens: {us:.2} us, {share:.0} % of a copy"
            );
        }
    }
    Ok(())
}

/// Over as many caches as fill `COLD` bytes with what is read of them.
fn timed_attention(
    gpu: &Gpu,
    bench: &Bench<'_, Gpu>,
    context: usize,
    rows: usize,
) -> Result<f64, DeviceError> {
    let read = bench.page_bytes() * context.div_ceil(PAGE);
    let count = COLD.div_ceil(read).clamp(4, LAUNCHES);
    // With room for the longest context, as in a model; their content does not matter.
    let caches: Vec<Cache<'_, Gpu>> = (0..count).map(|_| bench.room()).collect::<Result<_, _>>()?;
    bench.at(context - rows, rows)?;
    time(gpu, LAUNCHES, |i| bench.launch(&caches[i % count], StepRows::of_one(rows)))
}

fn turns(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    for turn in [
        Turn(&[], 2048),
        Turn(&[], 4096),
        Turn(&[], 8192),
        Turn(&[172], 64),
        Turn(&[28], 512),
        Turn(&[28], 1024),
    ] {
        let n = turn.width();
        let worst = turn.check(gpu, 1, false)?.max(turn.check(gpu, 8, true)?);
        if worst >= 1.0 {
            return Err(format!("{turn:?}: {worst} of the bound").into());
        }
        let tables = turn.on(gpu)?;
        let x = Buffer::of(gpu, &cases::activations(16 * n, 1), "x")?;
        let gain = Buffer::of(gpu, &cases::activations(n, 2), "gain")?;
        let out = Buffer::zeroed(gpu, 4 * 8 * n, "out")?;
        let mut line = format!("rotation of {n}: error {worst:.3} of its bound; us");
        for rows in [1, 8] {
            let one = |before: &Before<'_, '_, Gpu>| {
                time(gpu, LAUNCHES, |_| tables.rotate_few(gpu, &x, &out, (0, rows), false, before))
            };
            let plain = one(&Before::default())?;
            let gated = one(&Before { gate: Some(Gate::Silu), ..Before::default() })?;
            let normed = one(&Before { norm: Some(1e-5), gain: Some(&gain), gate: None })?;
            line += &format!(" {rows} rows: {plain:.2}, gated {gated:.2}, normed {normed:.2};");
        }
        println!("{line}");
    }
    let width = 4096;
    let x = Buffer::of(gpu, &cases::activations(8 * width, 1), "x")?;
    let out = Buffer::zeroed(gpu, 4 * 8 * width, "out")?;
    for rows in [1, 8] {
        let us = time(gpu, LAUNCHES, |_| ops::norm(gpu, &x, Some(&x), &out, (0, rows, width), 1e-5))?;
        println!("norm of {width}, {rows} rows: {us:.2} us");
    }
    Ok(())
}

fn sampling(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    let vocabulary = 128_256;
    let greedy = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, penalty: 1.0 };
    let logits: Vec<f32> = cases::activations(vocabulary, 5).into_iter().map(|v| 6.0 * v).collect();
    let step = Buffer::of(gpu, &[Step::new(&[0], &[0])], "step")?;
    let on = Buffer::of(gpu, &logits, "logits")?;
    let out = Buffer::zeroed(gpu, 4 * 2000, "tokens")?;
    let numbers: Vec<f32> = cases::activations(2000, 3).iter().map(|v| v.abs() / 4.1).collect();
    let uniforms = Buffer::of(gpu, &numbers, "random numbers")?;
    let seen = Buffer::zeroed(gpu, vocabulary, "seen")?;
    let work = SampleWork::new(gpu, vocabulary)?;
    for (name, draw) in [
        ("greedy", greedy),
        ("temperature 1", Draw { temperature: 1.0, ..greedy }),
        ("temperature .8, top-k 40, top-p .95", Draw { temperature: 0.8, top_k: 40, top_p: 0.95, ..greedy }),
        ("temperature .8, min-p .05", Draw { temperature: 0.8, min_p: 0.05, ..greedy }),
        ("temperature .8, top-p .95", Draw { temperature: 0.8, top_p: 0.95, ..greedy }),
    ] {
        step.write(&[Step::new(&[0], &[0])])?;
        let us = time(gpu, LAUNCHES, |_| ops::sample(&step, &on, &out, &uniforms, &seen, &work, &draw))?;
        check(gpu, Logits { vocabulary, steps: 0.5 }, draw, 8)?;
        println!("sample of {vocabulary}, {name}: {us:.2} us");
    }
    Ok(())
}
