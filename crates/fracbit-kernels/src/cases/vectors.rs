//! The cases that microkernels of the operations beside the matrices are checked on.

use super::{activations, assert_same};
use crate::{
    Gate, Vectors,
    vectors::{
        FloatScores, FloatWeigh, Ints, KEY_BLOCK, LOGITS, Next, Products, Rounded, Scores, Unrounded,
        VALUE_MOST, WEIGHT_BLOCK, WEIGHT_MOST, Weigh,
        attend::nibble_row,
        bf16::{COLS, ROWS, Tile},
        key_most,
        plain::{GROUP, LANES, PIECE},
    },
};
use fracbit_format::TILE_COLS;
use half::bf16;

/// Compares all operations with the scalar reference on all cases.
///
/// # Panics
/// When a bit differs, or a sum of bf16 products by more than its bound.
pub fn check(vectors: &Vectors) {
    attention(vectors);
    float_attention(vectors);
    attention_rounding(vectors);
    dense(vectors);
    elementwise(vectors);
    walsh(vectors);
    rounding(vectors);
    bf16_tiles(vectors);
}

/// Numbers with a few that are special.
fn special(len: usize, seed: u64) -> Vec<f32> {
    let mut x = activations(len, seed);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -0.0, 88.8, -87.35, 1e30];
    for (i, v) in odd.into_iter().enumerate() {
        if len > 0 && seed % 3 == 1 {
            x[(i * 7919 + 5) % len] = v;
        }
    }
    x
}

/// Checks that `f` makes of `start` what it makes with the scalar reference.
fn same(vectors: &Vectors, start: &[f32], what: &str, f: impl Fn(&Vectors, &mut [f32])) {
    let (mut want, mut got) = (start.to_vec(), start.to_vec());
    f(&Vectors::scalar(), &mut want);
    f(vectors, &mut got);
    assert_same(&want, &got, &format!("{} {what}", vectors.isa()));
}

/// Integers from `-most` to `most`.
fn integers(len: usize, most: i32, seed: u64) -> Vec<i16> {
    let of = |v: f32| ((v.rem_euclid(2.0) - 1.0) * most as f32) as i16;
    activations(len, seed).into_iter().map(of).collect()
}

/// Rows of pairs of every width that a cache may have.
struct Stored {
    words: Vec<i16>,
    bytes: Vec<i8>,
    nibbles: Vec<u8>,
}

impl Stored {
    fn new(rows: usize, pairs: usize, most: i32, seed: u64) -> Self {
        let bytes = |len, seed| integers(len, 128, seed).into_iter().map(|i| i.clamp(-128, 127) as i8);
        let nibbles = rows * nibble_row(pairs).expect("a short row");
        Self {
            words: integers(rows * 2 * pairs, most, seed),
            bytes: bytes(rows * 2 * pairs, seed + 1).collect(),
            nibbles: bytes(nibbles, seed + 2).map(i8::cast_unsigned).collect(),
        }
    }

    fn each(&self) -> [(&'static str, Ints<'_>); 3] {
        [("16", Ints::I16(&self.words)), ("8", Ints::I8(&self.bytes)), ("4", Ints::I4(&self.nibbles))]
    }
}

fn attention(vectors: &Vectors) {
    let mut seed = 0;
    for dim in [1, 2, 6, 7, 16, 17, 24, 64, 72, 80, 96, 100, 128, 256] {
        for count in [1, 2, 3, 4, 5, 7, 8, 11] {
            for positions in [0usize, 2, 16, 18, 62, 64, 66, 192] {
                seed += 1;
                let what = format!("{dim} {count} {positions}");
                if dim % 2 == 0 {
                    let positions = positions.next_multiple_of(KEY_BLOCK);
                    let stored =
                        Stored::new(positions / KEY_BLOCK * (dim / 2), KEY_BLOCK, key_most(dim), seed + 1);
                    for (bits, keys) in stored.each() {
                        let next = (count % 2 == 0).then_some(Next { ints: keys, scales: &[1.0; 3] });
                        let args = Scores {
                            queries: &integers(count * dim, key_most(dim), seed),
                            query_scales: &special(count, seed),
                            dim,
                            keys,
                            key_scales: &special(positions, seed + 2),
                            stride: 200,
                            next,
                        };
                        let start = vec![9.0; count * 200];
                        let what = format!("scores {what}, {bits} bits");
                        same(vectors, &start, &what, |v, out| v.scores(&args, out));
                    }
                }
                let stored = Stored::new(positions / 2, dim, VALUE_MOST, seed + 1);
                for (bits, values) in stored.each() {
                    let next = (count % 2 == 0).then_some(Next { ints: values, scales: &[] });
                    let args = Weigh {
                        weights: &integers(count * 256, WEIGHT_MOST, seed),
                        scales: &special(count * (256 / WEIGHT_BLOCK), seed),
                        stride: 256,
                        values,
                        dim,
                        next,
                    };
                    let start = activations(count * dim, seed);
                    let what = format!("weigh {what}, {bits} bits");
                    same(vectors, &start, &what, |v, out| v.weigh(&args, out));
                }
            }
        }
    }
    // The largest sums, of all signs.
    let dim = 256;
    let (most, value) = (key_most(dim) as i16, VALUE_MOST as i16);
    for (a, b) in [(1, 1), (1, -1), (-1, 1), (-1, -1)] {
        let args = Scores {
            queries: &vec![a * most; 4 * dim],
            query_scales: &[1.0; 4],
            dim,
            keys: Ints::I16(&vec![b * most; KEY_BLOCK * dim]),
            key_scales: &[1.0; KEY_BLOCK],
            stride: KEY_BLOCK,
            next: None,
        };
        let mut out = [9.0; 4 * KEY_BLOCK];
        vectors.scores(&args, &mut out);
        let sum = i32::from(a * b) * i32::from(most).pow(2) * 256;
        assert!(out.iter().all(|&score| score == sum as f32), "{}: {sum}", vectors.isa());
        let args = Weigh {
            weights: &[WEIGHT_MOST as i16; 4 * WEIGHT_BLOCK],
            scales: &[1.0; 4],
            stride: WEIGHT_BLOCK,
            values: Ints::I16(&vec![b * value; WEIGHT_BLOCK * dim]),
            dim,
            next: None,
        };
        let mut out = vec![0.0; 4 * dim];
        vectors.weigh(&args, &mut out);
        let sum = WEIGHT_MOST * i32::from(b * value) * 64;
        assert!(out.iter().all(|&o| o == sum as f32), "{}: {sum}", vectors.isa());
    }
}

fn float_attention(vectors: &Vectors) {
    let mut seed = 0;
    for dim in [1, 2, 7, 16, 24, 64, 100, 256] {
        for count in [1, 2, 7, 8, 11] {
            for positions in [0, 1, 15, 16, 40] {
                seed += 1;
                let what = format!("in single precision {dim} {count} {positions}");
                let keys = special(positions / KEY_BLOCK * KEY_BLOCK * dim, seed + 1);
                let args = FloatScores { queries: &special(count * dim, seed), dim, keys: &keys, stride: 50 };
                let start = vec![9.0; count * 50];
                same(vectors, &start, &format!("scores {what}"), |v, out| v.float_scores(&args, out));
                let args = FloatWeigh {
                    weights: &special(count * 50, seed + 2),
                    stride: 50,
                    values: &special(positions * dim, seed + 1),
                    dim,
                };
                let start = activations(count * dim, seed);
                same(vectors, &start, &format!("weigh {what}"), |v, out| v.float_weigh(&args, out));
            }
        }
    }
}

fn attention_rounding(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    for len in (0..70).chain([100, 128, 256, 511]) {
        for seed in 0..6 {
            let what = format!("{} {len} {seed}", vectors.isa());
            let x = special(len, seed);
            let of = |v: &Vectors| {
                let mut ints = vec![9; len];
                (vec![v.round(&x, key_most(len), &mut ints)], ints)
            };
            let (want, got) = (of(&scalar), of(vectors));
            assert_same(&want.0, &got.0, &format!("round {what}"));
            assert!(want.1 == got.1, "round {what}");
            let of = |v: &Vectors| {
                let mut places = vec![99; len];
                (vec![v.round_to_levels(&x, &mut places)], places)
            };
            let (want, got) = (of(&scalar), of(vectors));
            assert_same(&want.0, &got.0, &format!("round_to_levels {what}"));
            assert!(want.1 == got.1 && got.1.iter().all(|p| (0..16).contains(p)), "round_to_levels {what}");
            let value_scales = special(len, seed + 1);
            for skip in [0, 1, 63, 64, 150] {
                let blocks = (skip + len).div_ceil(WEIGHT_BLOCK) + 1;
                let of = |v: &Vectors| {
                    let (mut ints, mut scales) = (vec![9; blocks * WEIGHT_BLOCK], vec![9.0; blocks]);
                    let args = Unrounded { weights: &x, value_scales: &value_scales, skip };
                    v.round_weights(&args, &mut ints, &mut scales);
                    (scales, ints)
                };
                let (want, got) = (of(&scalar), of(vectors));
                assert_same(&want.0, &got.0, &format!("round_weights {what} {skip}"));
                assert!(want.1 == got.1, "round_weights {what} {skip}");
            }
        }
    }
}

fn dense(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    let mut seed = 0;
    for rows in [0, 1, 2, 3, 4, 5, 9] {
        for tokens in [0, 1, 2, 3, 4, 5, 7, 8, 11] {
            for (width, weight_stride, input_stride) in
                [(0, 3, 5), (16, 16, 17), (32, 33, 32), (112, 120, 113)]
            {
                seed += 1;
                let weights = special(rows * weight_stride, seed);
                let inputs = special(tokens * input_stride, seed + 1);
                let args = Products {
                    weights: &weights,
                    weight_stride,
                    inputs: &inputs,
                    input_stride,
                    rows,
                    tokens,
                    width,
                };
                let start: Vec<[f32; LANES]> =
                    activations(rows * tokens * LANES, seed).as_chunks().0.to_vec();
                let (mut want, mut got) = (start.clone(), start);
                scalar.products(&args, &mut want);
                vectors.products(&args, &mut got);
                let what = format!("products {} {rows} {tokens} {width}", vectors.isa());
                assert_same(want.as_flattened(), got.as_flattened(), &what);
            }
        }
    }
}

/// Sums in the order of a microkernel's instructions: within the bound of [`crate::vectors::bf16`],
/// and special where the reference is.
fn bf16_tiles(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    for (seed, (pairs, stride)) in
        [(0, 0), (0, 3), (1, 1), (2, 5), (7, 7), (64, 65), (512, 600)].into_iter().enumerate()
    {
        for seed in [3 * seed as u64, 3 * seed as u64 + 1] {
            let pack = |x: &[f32]| -> Vec<u32> {
                let bits = |x: f32| u32::from(bf16::from_f32(x).to_bits());
                x.as_chunks::<2>().0.iter().map(|&[a, b]| bits(a) | bits(b) << 16).collect()
            };
            let magnitudes =
                |x: &[u32]| -> Vec<u32> { x.iter().map(|x| x & 0x7fff_7fff).collect::<Vec<_>>() };
            let rows = pack(&special(2 * ROWS * stride, seed));
            let panel = pack(&activations(2 * pairs * COLS, seed + 1));
            let of = |vectors: &Vectors, rows: &[u32], panel: &[u32]| {
                let mut out = [[9.0; COLS]; ROWS];
                vectors.bf16_tile(&Tile { rows, stride, panel }, &mut out);
                out
            };
            let (want, got) = (of(&scalar, &rows, &panel), of(vectors, &rows, &panel));
            let size = of(&scalar, &magnitudes(&rows), &magnitudes(&panel));
            let what = format!("bf16 tile {} {pairs} {seed}", vectors.isa());
            let each = want.as_flattened().iter().zip(got.as_flattened()).zip(size.as_flattened());
            for ((want, got), size) in each {
                // Both sums are off by up to the bound; microkernels may take denormal numbers for
                // zero.
                let bound = (4 * pairs + 2) as f32 * (size * 2f32.powi(-23) + f32::MIN_POSITIVE);
                let same =
                    if want.is_finite() { (want - got).abs() <= bound } else { want.total_cmp(got).is_eq() };
                assert!(same || want.is_nan() && got.is_nan(), "{what}: {want} {got}");
            }
        }
    }
}

fn elementwise(vectors: &Vectors) {
    for len in (0..70).chain([100, 128, 576, 2048, 2051]) {
        let (x, y) = (special(len, len as u64), special(len, len as u64 + 1));
        let both = |name: &str, f: &dyn Fn(&Vectors, &mut [f32])| {
            same(vectors, &x, &format!("{name} {len}"), f);
        };
        both("add", &|v, x| v.add(&y, x));
        for gate in [Gate::Silu, Gate::GeluTanh] {
            both(&format!("gate_mul {gate:?}"), &|v, x| v.gate_mul(gate, x, &y));
        }
        for cap in [0.5, 30.0, 1e6] {
            both(&format!("cap {cap}"), &|v, x| v.cap(cap, x));
        }
        let logits: Vec<f32> = x.iter().map(|&x| if x > 88.8 { 88.8 } else { x }).collect();
        let sums = |vectors: &Vectors| {
            let mut sums = vec![9.0; len.div_ceil(LOGITS)];
            vectors.exp_sums(&logits, 88.8, 1.7, &mut sums);
            sums
        };
        assert_eq!(sums(vectors), sums(&Vectors::scalar()), "{} exp_sums {len}", vectors.isa());
        both("rms_norm", &|v, out| v.rms_norm(&y, Some(&x), 1e-5, out));
        both("rms_norm without gain", &|v, out| v.rms_norm(&y, None, 1e-5, out));
        both("softmax", &|v, x| {
            let (top, sum) = v.softmax(x);
            if let [a, b, ..] = x {
                (*a, *b) = (top, sum);
            }
        });
        if len > 0 {
            let (cos, sin) = (special(len, 7), special(len, 8));
            let pairs = [&*x, &*y].concat();
            same(vectors, &pairs, &format!("rotate {len}"), |v, x| v.rotate(x, &cos, &sin));
        }
    }
}

fn walsh(vectors: &Vectors) {
    for log in 0..15 {
        for pieces in [0, 1, 3] {
            let order = 1 << log;
            for seed in 0..2 {
                let (x, factors) =
                    (special(pieces * order, seed), special(pieces * order + log, seed + 2 * log as u64));
                same(vectors, &x, &format!("walsh {pieces} {order}"), |v, x| v.walsh(order, x, &factors));
            }
        }
    }
}

fn rounding(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    for cols in [1usize, 7, 8, 9, 16, 24, 100, 255, 256, 257, 264, 300, 512, 1000] {
        let (room, groups, tiles) =
            (cols.next_multiple_of(TILE_COLS), cols.div_ceil(GROUP), cols.div_ceil(TILE_COLS));
        for seed in 0..6 {
            let x = special(cols, seed);
            let of = |v: &Vectors| {
                let (mut ints, mut wide, mut pair) =
                    (vec![9; room], vec![9; room], vec![9; 2 * room - PIECE]);
                let (mut scales, mut sums) = (vec![9.0; 3 * groups], vec![9; 3 * tiles]);
                let mut parts = scales.chunks_mut(groups).zip(sums.chunks_mut(tiles));
                let mut next = || parts.next().expect("three parts");
                let (scales_of, sums_of) = next();
                v.narrow(&x, Rounded { ints: &mut ints, scales: scales_of, sums: sums_of });
                let (scales_of, sums_of) = next();
                v.wide(&x, Rounded { ints: &mut wide, scales: scales_of, sums: sums_of });
                let (scales_of, sums_of) = next();
                v.narrow_pair(&x, Rounded { ints: &mut pair, scales: scales_of, sums: sums_of });
                (ints, wide, pair, scales, sums)
            };
            let (want, got) = (of(&scalar), of(vectors));
            let what = format!("rounding {} {cols} {seed}", vectors.isa());
            assert_same(&want.3, &got.3, &what);
            assert!(want.0 == got.0 && want.1 == got.1 && want.2 == got.2 && want.4 == got.4, "{what}");
        }
    }
}
