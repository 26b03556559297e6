//! Attention of prompts on the host shim against sums in f64.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Limits,
    ops::{self, AttentionShape, Cache, HeadOptions, PAGE, PageTables, Step, StepRows},
    shim::Shim,
};
use half::f16;
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
}

#[test]
fn rows_of_a_prompt_see_their_positions() {
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
    let &Case { heads, kv_heads, d, position, rows, window, cap } = case;
    let what =
        format!("{heads}/{kv_heads} heads of {d}, {rows} rows after {position}, window {window}, cap {cap}");
    let held = position + rows;
    // The pages of the sequence are the pool's, the last one first.
    let pages = held.div_ceil(PAGE);
    let page = |p: usize| pages - 1 - p / PAGE;
    let place = |kv: usize, p: usize| ((page(p) * kv_heads + kv) * PAGE + p % PAGE) * d;
    let shape = AttentionShape { heads, kv_heads, d, capacity: held };
    let cache = Cache::new(device, &shape, pages).expect("memory");
    let tables = PageTables::new(device, 1, held).expect("memory");
    let table: Vec<u32> = (0..pages).map(|i| (pages - 1 - i) as u32).collect();
    tables.write(&[&table]).expect("a copy");
    let old = |seed| -> Vec<u16> {
        let values = cases::activations(pages * kv_heads * PAGE * d, seed).into_iter();
        values.map(|v| f16::from_f32(v).to_bits()).collect()
    };
    let (keys, values) = (old(1), old(2));
    cache.keys.write(&keys).expect("a copy");
    cache.values.write(&values).expect("a copy");
    let qkv = cases::activations(rows * shape.row(), 3);
    let step = Buffer::of(device, &[Step::new(&[position], &[])], "step").expect("memory");
    let input = Buffer::of(device, &qkv, "qkv").expect("memory");
    let out = Buffer::zeroed(device, 4 * rows * heads * d, "out").expect("memory");
    let options =
        HeadOptions { query_norm: None, key_norm: None, turns: None, growth: None, cap, eps: 0.0, window };
    ops::attention(&step, &input, (&cache, &tables), &out, StepRows::of_one(rows), &shape, &options)
        .expect("a launch");
    let got: Vec<f32> = out.read(rows * heads * d).expect("a copy");
    let value = |bits: u16| f64::from(f16::from_bits(bits));
    // Keys (part 0) and values (part 1) as the cache holds them.
    let cached = |part: usize, kv: usize, p: usize, i: usize| {
        if p < position {
            return value([&keys, &values][part][place(kv, p) + i]);
        }
        let head = heads + part * kv_heads + kv;
        f64::from(f16::from_f32(qkv[(p - position) * shape.row() + head * d + i]))
    };
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
