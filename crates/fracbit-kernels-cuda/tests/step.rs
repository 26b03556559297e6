//! Attention, norms, rotations and draws of a decoding step on the host shim against sums in f64.

#[path = "common/sample.rs"]
mod sample;
#[path = "common/step.rs"]
mod step;
#[path = "common/turn.rs"]
mod turn;

use fracbit_kernels::cases;
use fracbit_kernels_cuda::ops::{self, AttentionShape, Cache, CacheType, Draw, Gate};
use fracbit_kernels_cuda::{Buffer, Limits, shim::Shim};
use sample::{Logits, check};
use std::path::Path;
use step::Attention;
use turn::{Turn, gated};

fn device(multiprocessors: usize) -> Shim {
    let limits = Limits { multiprocessors, shared: 99 << 10 };
    Shim::start(Path::new(env!("CARGO_TARGET_TMPDIR")), limits).expect("the shim builds and starts")
}

/// (heads, key-value heads, d), multiprocessors, norms, rotation, window, tokens before and now.
type Case = ((usize, usize, usize), usize, bool, bool, usize, &'static [(usize, usize)]);

const LENGTHS: &[(usize, usize)] = &[
    (0, 1),
    (1, 1),
    (15, 1),
    (16, 1),
    (17, 1),
    (31, 1),
    (127, 1),
    (128, 1),
    (129, 1),
    (200, 1),
    (383, 1),
    (384, 1),
    (520, 1),
];

const CASES: [Case; 12] = [
    ((4, 1, 128), 3, false, true, 0, LENGTHS),
    ((1, 1, 64), 1, true, true, 0, &[(0, 1), (31, 1), (127, 2), (300, 8)]),
    ((8, 2, 64), 4, false, true, 0, &[(0, 8), (33, 3), (140, 5), (392, 8)]),
    ((4, 2, 80), 2, true, true, 0, &[(0, 1), (32, 1), (77, 8)]),
    ((3, 3, 96), 3, false, false, 0, &[(5, 1), (290, 2)]),
    ((16, 1, 128), 2, false, true, 0, &[(0, 1), (130, 1), (150, 8)]),
    ((12, 2, 128), 5, true, true, 0, &[(130, 1), (260, 2)]),
    ((2, 1, 256), 2, true, true, 0, &[(0, 1), (40, 1), (140, 8)]),
    ((6, 2, 128), 6, false, true, 20, &[(0, 1), (3, 8), (19, 1), (20, 8), (21, 1), (300, 1), (301, 8)]),
    ((2, 1, 64), 4, false, true, 150, &[(148, 8), (400, 1), (500, 8)]),
    ((4, 2, 8), 2, false, true, 0, &[(0, 1), (140, 3)]),
    ((4, 4, 200), 2, false, true, 3, &[(0, 4), (1, 1), (30, 8)]),
];

#[test]
fn attention_of_few_tokens() {
    every_case(CacheType::Half);
}

#[test]
fn attention_of_few_tokens_over_8_bits() {
    every_case(CacheType::Eight);
}

#[test]
fn attention_of_few_tokens_over_6_bits() {
    every_case(CacheType::Six);
}

#[test]
fn attention_of_few_tokens_over_4_bits() {
    every_case(CacheType::Four);
}

fn every_case(kind: CacheType) {
    for (number, &((heads, kv_heads, d), multiprocessors, norms, rotation, window, lengths)) in
        CASES.iter().enumerate()
    {
        let device = device(multiprocessors);
        // A cap that matters.
        let (cap, growth) = (if number % 3 == 1 { 2.0 } else { 0.0 }, number % 2 == 1);
        // Rows that are only rounded, and heads that are rotated as well.
        let turned = kind != CacheType::Half && number % 4 != 0;
        let attention = Attention {
            heads,
            kv_heads,
            d,
            capacity: 530,
            sequences: 8,
            norms,
            rotation: rotation && (number != 0 || kind == CacheType::Half),
            window,
            cap,
            growth,
            kind,
            turned,
            constants: None,
        };
        // Whole keys, keys without biases, and but for the first one without means.
        let all = if kind == CacheType::Half { &[None][..] } else { &[None, Some(0), Some(1)] };
        for &constants in all {
            let attention = Attention { constants, ..attention };
            let mut bench = attention.on(&device, number as u64).expect("memory");
            for &(before, rows) in lengths {
                let worst = bench.check(before, rows).expect("a launch");
                assert!(worst < 1.0, "{attention:?}, {rows} tokens after {before}: {worst} of the bound");
            }
            bench.check_together(&[300, 0, 64, 17, 128, 63, 1, 511]).expect("a launch");
            bench.check_together(&[5, 480, 65]).expect("a launch");
        }
    }
}

#[test]
fn pages_are_copied_with_their_scales() {
    let device = device(1);
    let shape = AttentionShape { heads: 4, kv_heads: 2, d: 40, capacity: 200 };
    for kind in [CacheType::Half, CacheType::Eight, CacheType::Six, CacheType::Four] {
        let cache = Cache::new(&device, &shape, kind, 3).expect("memory");
        let both = [&cache.keys, &cache.values];
        let bytes = both.map(|of| (0..of.bytes()).map(|i| (i * 89 % 251) as u8).collect::<Vec<u8>>());
        both.iter().zip(&bytes).for_each(|(of, bytes)| of.write(bytes).expect("a copy"));
        cache.copy_page(&shape, 2, 0).expect("a copy");
        for (of, mut want) in both.into_iter().zip(bytes) {
            let page = want.len() / 3;
            want.copy_within(2 * page.., 0);
            assert_eq!(of.read::<u8>(want.len()).expect("a copy"), want, "{kind:?}");
        }
        let all = both.iter().map(|of| of.bytes()).sum::<usize>();
        assert_eq!(all, 3 * kind.page_bytes(shape.kv_heads, shape.d), "{kind:?}");
    }
}

/// Rows that are not of numbers, and rows of nothing, as the processor rounds them.
#[test]
fn strange_rows_are_rounded_as_on_the_processor() {
    let device = device(1);
    for kind in [CacheType::Eight, CacheType::Six, CacheType::Four] {
        step::check_rows(&device, kind).expect("a launch");
    }
}

/// Walsh matrices, one and two dense factors, and widths that many blocks a row do not take.
const TURNS: [Turn; 19] = [
    Turn(&[], 16),
    Turn(&[], 64),
    Turn(&[], 128),
    Turn(&[], 2048),
    Turn(&[], 4096),
    Turn(&[], 8192),
    Turn(&[], 16384),
    Turn(&[3], 4),
    Turn(&[7], 8),
    Turn(&[12], 8),
    Turn(&[20], 4),
    Turn(&[28], 512),
    Turn(&[172], 64),
    Turn(&[44], 128),
    Turn(&[4, 12], 32),
    Turn(&[12, 20], 2),
    Turn(&[5], 1),
    Turn(&[7], 2),
    Turn(&[3], 2048),
];

#[test]
fn norms_and_rotations_of_few_rows() {
    for (number, turn) in TURNS.into_iter().enumerate() {
        // One, two and four rows of the first factor a block.
        let device = device([1, 20, 200][number % 3]);
        let rows = if turn.width() > 4096 { 1 } else { [1, 8, 3, 9][number % 4] };
        for inverse in [false, true] {
            let worst = turn.check(&device, rows, inverse).expect("a launch");
            assert!(worst < 1.0, "{turn:?}, {rows} rows, inverse {inverse}: {worst} of the bound");
        }
    }
}

#[test]
fn draws_follow_the_rules() {
    let device = device(2);
    let draw = |temperature, top_k, top_p, min_p, penalty| Draw { temperature, top_k, top_p, min_p, penalty };
    // Peaked and flat, with many equal logits; one tile and several; lists that are ranked,
    // bisected or too long.
    for (vocabulary, steps, all) in [
        (7, 1.0, true),
        (1024, 0.5, true),
        (3300, 1.5, true),
        (20_001, 0.25, false),
        (20_001, 0.001, false),
        (20_001, 4.0, false),
    ] {
        let logits = Logits { vocabulary, steps };
        let mut draws = vec![
            draw(0.0, 0, 1.0, 0.0, 1.0),
            draw(0.0, 3, 0.5, 0.0, 1.6),
            draw(1.0, 0, 1.0, 0.0, 1.0),
            draw(0.7, 40, 0.95, 0.0, 1.2),
            draw(1.0, 0, 0.9, 0.0, 1.0),
            draw(0.9, 0, 1.0, 0.06, 1.0),
            draw(0.9, 200, 1.0, 0.3, 1.0),
        ];
        if all {
            draws.extend([
                draw(0.8, 1, 1.0, 0.0, 1.0),
                draw(3.0, 0, 0.5, 0.01, 1.3),
                draw(1.5, 5, 1.0, 0.9, 1.0),
                draw(1.1, 600, 0.97, 0.0, 1.0),
            ]);
        }
        for draw in draws {
            check(&device, logits, draw, if all { 8 } else { 3 }).expect("a launch");
        }
    }
}

#[test]
fn small_operations() {
    let device = device(2);
    let (rows, width, stride) = (3, 37, 100);
    let x = cases::activations(2 * rows * stride, 5);
    let input = || Buffer::of(&device, &x, "x").expect("memory");
    let near = |got: f32, want: f64| (f64::from(got) - want).abs() <= 2e-6 * want.abs() + 1e-6;
    for kind in [Gate::Silu, Gate::GeluTanh] {
        let out = Buffer::zeroed(&device, 4 * rows * stride, "out").expect("memory");
        ops::gate(&device, kind, &input(), &out, (rows, stride)).expect("a launch");
        for (i, got) in out.read::<f32>(rows * stride).expect("a copy").into_iter().enumerate() {
            let (row, at) = (i / stride, i % stride);
            let [g, up] = [0, stride].map(|by| f64::from(x[2 * row * stride + by + at]));
            assert!(near(got, gated(kind, g) * up), "{kind:?} of {g}: {got}");
        }
    }
    let (to, other) = (input(), Buffer::of(&device, &x[7..], "y").expect("memory"));
    ops::add(&device, &to, &other, 500).expect("a launch");
    let sums: Vec<f32> = to.read(600).expect("a copy");
    assert!((0..500).all(|i| sums[i] == x[i] + x[i + 7]) && sums[500..] == x[500..600]);
    let order: Vec<u32> = (0..stride as u32).map(|i| i * 7 % stride as u32).collect();
    for accumulate in [false, true] {
        let (from, to) = (Buffer::of(&device, &x[11..], "from").expect("memory"), input());
        let places = Buffer::of(&device, &order, "places").expect("memory");
        ops::place(&device, &from, &places, &to, (rows, stride), accumulate).expect("a launch");
        let got: Vec<f32> = to.read(rows * stride + 50).expect("a copy");
        for i in 0..rows * stride {
            let at = i / stride * stride + order[i % stride] as usize;
            assert_eq!(got[at], x[11 + i] + if accumulate { x[at] } else { 0.0 }, "{i}");
        }
        assert_eq!(got[rows * stride..], x[rows * stride..rows * stride + 50]);
    }
    let to = input();
    ops::cap(&device, &to, 400, 1.5).expect("a launch");
    for (got, &x) in to.read::<f32>(400).expect("a copy").into_iter().zip(&x) {
        assert!(near(got, 1.5 * (f64::from(x) / 1.5).tanh()), "{x}: {got}");
    }
    // In place, a part of each row; of whole fours and not.
    for (offset, width) in [(5, width), (6, 64), (8, 64)] {
        let (to, gain) = (input(), Buffer::of(&device, &x[3..], "gain").expect("memory"));
        ops::norm_part(&device, &to, &gain, rows, (offset, width, stride), 1e-5).expect("a launch");
        for (i, got) in to.read::<f32>(rows * stride).expect("a copy").into_iter().enumerate() {
            let (row, at) = (i / stride, (i % stride).wrapping_sub(offset));
            if at >= width {
                assert_eq!(got, x[i], "beside the part");
                continue;
            }
            let part = &x[row * stride + offset..][..width];
            let square: f64 = part.iter().map(|&v| f64::from(v).powi(2)).sum();
            let by = 1.0 / (square / width as f64 + 1e-5).sqrt();
            assert!(near(got, f64::from(x[i]) * by * f64::from(x[3 + at])), "{i}: {got}");
        }
    }
}
