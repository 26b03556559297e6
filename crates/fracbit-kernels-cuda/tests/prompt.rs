//! Attention of prompts on the host shim against sums in f64.

#[path = "common/rows.rs"]
mod rows;

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Limits,
    ops::{self, AttentionShape, Cache, CacheType, Halved, HeadOptions, PAGE, PageTables, Step, StepRows},
    shim::Shim,
};
use rows::Row;
use std::path::Path;

struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    /// Positions before these rows.
    position: usize,
    rows: usize,
    window: usize,
    /// Of scores; 0: none.
    cap: f32,
    kind: CacheType,
}

#[test]
fn rows_of_a_prompt_see_their_positions() {
    every_case(CacheType::Half);
}

#[test]
fn rows_of_a_prompt_see_their_positions_of_8_bits() {
    every_case(CacheType::Eight);
}

#[test]
fn rows_of_a_prompt_see_their_positions_of_6_bits() {
    every_case(CacheType::Six);
}

#[test]
fn rows_of_a_prompt_see_their_positions_of_4_bits() {
    every_case(CacheType::Four);
}

fn every_case(kind: CacheType) {
    let limits = Limits { multiprocessors: 2, shared: 99 << 10 };
    let device =
        Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts");
    let case = |heads, kv_heads, d, position, rows, window| Case {
        heads,
        kv_heads,
        d,
        position,
        rows,
        window,
        cap: 0.0,
        kind,
    };
    // Widths with and without columns to spare; blocks of rows and tiles of positions that are
    // whole, begin or are just over; windows that end inside a tile, skip tiles, or hold one
    // position.
    for case in [
        case(2, 1, 64, 0, 9, 0),
        case(1, 1, 64, 63, 65, 0),
        case(2, 2, 40, 5, 64, 0),
        case(4, 2, 80, 0, 70, 20),
        case(1, 1, 96, 131, 33, 64),
        case(3, 1, 128, 1, 130, 0),
        case(1, 1, 128, 200, 66, 65),
        case(1, 1, 128, 64, 64, 1),
        case(2, 1, 256, 30, 67, 0),
        case(1, 1, 256, 100, 20, 33),
        case(1, 1, 200, 0, 12, 500),
    ] {
        check(&device, &case);
        check(&device, &Case { cap: 1.5, ..case });
    }
}

fn check(device: &Shim, case: &Case) {
    let &Case { heads, kv_heads, d, position, rows, window, cap, kind } = case;
    let what = format!(
        "{kind:?}, {heads}/{kv_heads} heads of {d}, {rows} rows after {position}, window {window}, cap {cap}"
    );
    let held = position + rows;
    // The pages of the sequence are the pool's, the last one first.
    let pages = held.div_ceil(PAGE);
    let page = |p: usize| pages - 1 - p / PAGE;
    let block = |kv: usize, p: usize| page(p) * kv_heads + kv;
    let shape = AttentionShape { heads, kv_heads, d, capacity: held };
    let cache = Cache::new(device, &shape, kind, pages).expect("memory");
    let halved = kind.codes().then(|| Halved::new(device, &shape, pages).expect("memory"));
    let tables = PageTables::new(device, 1, held).expect("memory");
    let table: Vec<u32> = (0..pages).map(|i| (pages - 1 - i) as u32).collect();
    tables.write(&[&table]).expect("a copy");
    // (kv_heads, position), of positions before these rows.
    let old = [0, 1].map(|which| -> Vec<Row> {
        let numbers = cases::activations(kv_heads * position * d, 1 + which as u64);
        numbers.chunks_exact(d).map(|row| Row::of(kind, which, row)).collect()
    });
    for (which, to) in [&cache.keys, &cache.values].into_iter().enumerate() {
        // What nobody wrote is no number.
        let (mut all, bytes) = (vec![0xFFu8; to.bytes()], kind.blocks(d)[which]);
        for (i, row) in old[which].iter().enumerate() {
            let (kv, p) = (i / position, i % position);
            rows::put(row, which, &mut all[block(kv, p) * bytes..][..bytes], p % PAGE);
        }
        to.write(&all).expect("a copy");
    }
    let qkv = cases::activations(rows * shape.row(), 3);
    let step = Buffer::of(device, &[Step::new(&[position], &[])], "step").expect("memory");
    let input = Buffer::of(device, &qkv, "qkv").expect("memory");
    let out = Buffer::zeroed(device, 4 * rows * heads * d, "out").expect("memory");
    let options = HeadOptions {
        query_norm: None,
        key_norm: None,
        turns: None,
        growth: None,
        cap,
        eps: 0.0,
        window,
        head_turn: None,
        halved: halved.as_ref(),
    };
    ops::attention(&step, &input, (&cache, &tables), &out, StepRows::of_one(rows), &shape, &options)
        .expect("a launch");
    let got: Vec<f32> = out.read(rows * heads * d).expect("a copy");
    let written = [&cache.keys, &cache.values].map(|b| b.read::<u8>(b.bytes()).expect("a copy"));
    // Keys (part 0) and values (part 1) as the cache holds them: what was there, and the new ones.
    let mut cached = [0, 1].map(|_| vec![Vec::new(); kv_heads * held]);
    for (which, (kv, p)) in
        [0, 1].into_iter().flat_map(|w| (0..kv_heads * held).map(move |i| (w, (i / held, i % held))))
    {
        let want = if p < position {
            old[which][kv * position + p].clone()
        } else {
            let head = heads + which * kv_heads + kv;
            Row::of(kind, which, &qkv[(p - position) * shape.row() + head * d..][..d])
        };
        let bytes = kind.blocks(d)[which];
        let row = rows::get(&want, which, &written[which][block(kv, p) * bytes..][..bytes], p % PAGE);
        assert_eq!(row, want, "{what}: {which}, head {kv}, position {p}");
        cached[which][kv * held + p] = row.numbers();
    }
    let cached = |part: usize, kv: usize, p: usize, i: usize| cached[part][kv * held + p][i];
    for row in 0..rows {
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let last = position + row;
            let first = if window > 0 { (last + 1).saturating_sub(window) } else { 0 };
            let q = &qkv[row * shape.row() + head * d..][..d];
            let scores: Vec<f64> = (first..=last)
                .map(|p| {
                    let score = (0..d).map(|i| f64::from(q[i]) * cached(0, kv, p, i)).sum::<f64>()
                        / (d as f64).sqrt();
                    let cap = f64::from(cap);
                    if cap > 0.0 { cap * (score / cap).tanh() } else { score }
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..d {
                let each = weights.iter().zip(first..).map(|(w, p)| w * cached(1, kv, p, i));
                let want = each.sum::<f64>() / total;
                let error = (f64::from(got[(row * heads + head) * d + i]) - want).abs();
                // Queries and weights are rounded to halves.
                assert!(error <= 4e-3, "{what}: row {row}, head {head}, column {i}: {error} beside {want}");
            }
        }
    }
}
