//! Attention of prompts on the host shim against sums in f64.

#[path = "common/rows.rs"]
mod rows;

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Limits,
    ops::{
        self, AttentionShape, Cache, CacheType, Halved, HeadOptions, HeadTurn, KeyConstants, PAGE,
        PageTables, Step, StepRows,
    },
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
    /// The position from which on keys are stored without constants: then heads turn as well.
    constants: Option<usize>,
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
        constants: None,
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
        for first in (0..2).take(if kind.codes() { 2 } else { 0 }) {
            check(&device, &Case { constants: Some(first), ..case });
        }
    }
}

/// Constants that keys are stored without, and how heads turn.
struct Taken {
    d: usize,
    shift: Vec<f32>, // (kv_heads, d)
    turns: Vec<f32>, // (held, d)
    signs: Vec<f32>,
    walsh: usize,
}

impl Taken {
    fn new([kv_heads, d]: [usize; 2], held: usize) -> Self {
        let (half, walsh) = (d / 2, 1 << d.trailing_zeros());
        let angle = |i: usize| (i / d) as f32 * 0.7 / (1.0 + (i % half) as f32);
        let turn = |i: usize| if i % d < half { angle(i).cos() } else { angle(i).sin() };
        let size = 1.0 / (walsh as f32).sqrt();
        Self {
            d,
            shift: cases::activations(kv_heads * d, 7).into_iter().map(|v| 2.0 * v).collect(),
            turns: (0..held * d).map(turn).collect(),
            signs: (0..d).map(|i| if i * 7919 % 13 < 6 { size } else { -size }).collect(),
            walsh,
        }
    }

    /// Tables of turns, rotation of heads (a Walsh matrix for each part of them) and constants.
    fn on<'d>(&self, device: &'d Shim, first: usize) -> On<'d> {
        let order = self.d / self.walsh;
        let same = (0..order * order).map(|i| if i / order == i % order { 1.0 } else { 0.0 }).collect();
        let heads = vec![Vec::new(); self.shift.len() / self.d];
        (
            Buffer::of(device, &self.turns, "turns").expect("memory"),
            HeadTurn::new(device, &self.signs, &[(order, same)]).expect("memory"),
            KeyConstants::new(device, &self.shift, &heads, first).expect("memory"),
        )
    }

    fn turned(&self, x: &[f64], position: usize) -> Vec<f64> {
        let half = self.d / 2;
        let at = |i: usize| f64::from(self.turns[position * self.d + i]);
        let of = |i: usize| {
            let (cos, sin) = (at(i % half), at(half + i % half));
            if i < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
        };
        (0..self.d).map(of).collect()
    }

    fn mixed(&self, x: &[f64]) -> Vec<f64> {
        let of = |i: usize| {
            let part = i / self.walsh * self.walsh;
            let entry = |j: usize| {
                let sign = if ((i % self.walsh) & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                sign * f64::from(self.signs[part + j]) * x[part + j]
            };
            (0..self.walsh).map(entry).sum()
        };
        (0..self.d).map(of).collect()
    }

    /// A key as it is stored, before it is rounded.
    fn stored(&self, kv: usize, x: &[f32], position: usize, without: bool) -> Vec<f32> {
        let shift = &self.shift[kv * self.d..(kv + 1) * self.d];
        let by = |shift: f32| if without { f64::from(shift) } else { 0.0 };
        let x: Vec<f64> = x.iter().zip(shift).map(|(&x, &shift)| f64::from(x) + by(shift)).collect();
        self.mixed(&self.turned(&x, position)).into_iter().map(|x| x as f32).collect()
    }

    /// What it was stored without.
    fn back(&self, kv: usize, position: usize) -> Vec<f64> {
        let shift = self.shift[kv * self.d..(kv + 1) * self.d].iter().map(|&v| -f64::from(v));
        self.mixed(&self.turned(&shift.collect::<Vec<_>>(), position))
    }
}

type On<'d> = (Buffer<'d, Shim>, HeadTurn<'d, Shim>, KeyConstants<'d, Shim>);

fn check(device: &Shim, case: &Case) {
    let &Case { heads, kv_heads, d, position, rows, window, cap, kind, constants } = case;
    let what = format!(
        "{kind:?}, {heads}/{kv_heads} heads of {d}, {rows} rows after {position}, window {window}, cap {cap}, \
         constants from {constants:?} on"
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
    let taken = Taken::new([kv_heads, d], held);
    let on = taken.on(device, constants.unwrap_or(0));
    let with = constants.is_some();
    let options = HeadOptions {
        query_norm: None,
        key_norm: None,
        turns: with.then_some(&on.0),
        growth: None,
        cap,
        eps: 0.0,
        window,
        head_turn: with.then_some(&on.1),
        constants: with.then_some((&on.2, None)),
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
            let x = &qkv[(p - position) * shape.row() + head * d..][..d];
            match constants.filter(|_| which == 0) {
                Some(first) => Row::of(kind, which, &taken.stored(kv, x, p, p >= first)),
                None => Row::of(kind, which, x),
            }
        };
        let bytes = kind.blocks(d)[which];
        let row = rows::get(&want, which, &written[which][block(kv, p) * bytes..][..bytes], p % PAGE);
        let mut numbers = row.numbers();
        if with && which == 0 && p >= position {
            // Arithmetic before it may move a code to the next one.
            let step = if matches!(row, Row::Levels(..)) { 31.0 } else { 1.01 };
            let want = want.numbers();
            let most = want.iter().fold(0f64, |most, x| most.max(x.abs())) * step / 127.0;
            let near = numbers.iter().zip(&want).all(|(a, b)| (a - b).abs() <= most);
            assert!(near, "{what}: head {kv}, position {p}");
        } else {
            assert_eq!(row, want, "{what}: {which}, head {kv}, position {p}");
        }
        if constants.is_some_and(|first| which == 0 && p >= first) {
            let back = taken.back(kv, p);
            numbers.iter_mut().zip(back).for_each(|(x, back)| *x += back);
        }
        cached[which][kv * held + p] = numbers;
    }
    let cached = |part: usize, kv: usize, p: usize, i: usize| cached[part][kv * held + p][i];
    for row in 0..rows {
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let last = position + row;
            let first = if window > 0 { (last + 1).saturating_sub(window) } else { 0 };
            let q: Vec<f64> =
                qkv[row * shape.row() + head * d..][..d].iter().map(|&q| f64::from(q)).collect();
            let q = if with { taken.mixed(&taken.turned(&q, last)) } else { q };
            let scores: Vec<f64> = (first..=last)
                .map(|p| {
                    let score = (0..d).map(|i| q[i] * cached(0, kv, p, i)).sum::<f64>() / (d as f64).sqrt();
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
                // Queries and weights are rounded to halves, and whole keys.
                let most = if with { 8e-3 } else { 4e-3 };
                assert!(error <= most, "{what}: row {row}, head {head}, column {i}: {error} beside {want}");
            }
        }
    }
}
