//! The cases that bodies of the operations beside the matrices are checked on.

use super::{activations, assert_same};
use crate::{
    Vectors,
    vectors::{
        Floats, KEY_BLOCK, Products, Rounded, Scores, Weigh,
        bf16::{COLS, ROWS, Tile},
        plain::{GROUP, LANES, PIECE},
    },
};
use fracbit_format::TILE_COLS;
use half::{bf16, f16};

/// Compares all operations with the scalar reference on all cases.
///
/// # Panics
/// When a bit differs, or a sum of bf16 products by more than its bound.
pub fn check(vectors: &Vectors) {
    attention(vectors);
    dense(vectors);
    elementwise(vectors);
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

fn halves(x: &[f32]) -> Vec<f16> {
    x.iter().map(|&v| f16::from_f32(v)).collect()
}

fn attention(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    let mut seed = 0;
    for dim in [1, 2, 6, 7, 16, 24, 64, 80, 96, 100, 128, 256] {
        for count in [1, 2, 3, 4, 5, 7, 8, 11, 16] {
            for positions in [0, 1, 15, 16, 17, 40] {
                seed += 1;
                let blocks = positions / KEY_BLOCK;
                let (queries, keys) =
                    (special(count * dim, seed), special(blocks * KEY_BLOCK * dim, seed + 1));
                let (weights, values) = (special(count * 50, seed + 2), special(positions * dim, seed + 1));
                let (key_halves, value_halves) = (halves(&keys), halves(&values));
                let mut widened = vec![9.0; value_halves.len()];
                vectors.widen(&value_halves, &mut widened);
                let exact: Vec<f32> = value_halves.iter().map(|v| v.to_f32()).collect();
                assert_same(&exact, &widened, &format!("widen {} {}", vectors.isa(), widened.len()));
                let start = activations(count * dim, seed);
                for (keys, values) in [
                    (Floats::F32(&keys), Floats::F32(&values)),
                    (Floats::F16(&key_halves), Floats::F16(&value_halves)),
                ] {
                    let what = format!("{} {dim} {count} {positions}", vectors.isa());
                    let args = Scores { queries: &queries, dim, keys, stride: 50 };
                    let (mut want, mut got) = (vec![9.0; count * 50], vec![9.0; count * 50]);
                    scalar.scores(&args, &mut want);
                    vectors.scores(&args, &mut got);
                    assert_same(&want, &got, &format!("scores {what}"));
                    let args = Weigh { weights: &weights, stride: 50, values, dim };
                    let (mut want, mut got) = (start.clone(), start.clone());
                    scalar.weigh(&args, &mut want);
                    vectors.weigh(&args, &mut got);
                    assert_same(&want, &got, &format!("weigh {what}"));
                }
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

/// Sums in the order of a body's instructions: within the bound of [`crate::vectors::bf16`], and special where the reference is.
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
                // Both sums are off by up to the bound; bodies may take denormal numbers for zero.
                let bound = (4 * pairs + 2) as f32 * (size * 2f32.powi(-23) + f32::MIN_POSITIVE);
                let same =
                    if want.is_finite() { (want - got).abs() <= bound } else { want.total_cmp(got).is_eq() };
                assert!(same || want.is_nan() && got.is_nan(), "{what}: {want} {got}");
            }
        }
    }
}

fn elementwise(vectors: &Vectors) {
    let scalar = Vectors::scalar();
    for len in (0..70).chain([100, 128, 576, 2048, 2051]) {
        let what = format!("{} {len}", vectors.isa());
        let (x, y) = (special(len, len as u64), special(len, len as u64 + 1));
        let both = |f: &dyn Fn(&Vectors, &mut [f32])| {
            let (mut want, mut got) = (x.clone(), x.clone());
            f(&scalar, &mut want);
            f(vectors, &mut got);
            assert_same(&want, &got, &what);
        };
        both(&|v, x| v.add(&y, x));
        both(&|v, x| v.silu_mul(x, &y));
        both(&|v, out| v.rms_norm(&y, Some(&x), 1e-5, out));
        both(&|v, out| v.rms_norm(&y, None, 1e-5, out));
        both(&|v, x| {
            let (top, sum) = v.softmax(x);
            if let [a, b, ..] = x {
                (*a, *b) = (top, sum);
            }
        });
        if len > 0 {
            let (cos, sin) = (special(len, 7), special(len, 8));
            let (mut want, mut got) = ([&*x, &*y].concat(), [&*x, &*y].concat());
            scalar.rotate(&mut want, &cos, &sin);
            vectors.rotate(&mut got, &cos, &sin);
            assert_same(&want, &got, &format!("rotate {what}"));
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
