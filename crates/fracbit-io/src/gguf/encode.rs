//! Numbers to blocks.
//!
//! A block is rounded for the least weighted squared error `sum w (x - x')^2`. Where the second
//! moments of a layer's inputs are known, `w = m sqrt(s^2 + x^2)`, m the moment of the number's
//! column and s^2 the mean square of its row (llama.cpp's importance matrix); otherwise `w` grows
//! with the number itself: `x^2` where levels lie on both sides of 0, `s + |x|` where a block has a
//! minimum.
//!
//! The search: some scales around the one that just holds the largest number, each rounded with and
//! then fitted by least squares; the best wins, is stored, and the numbers are rounded once more
//! for what was stored. `Q8_0` has so many levels that the scale of the largest number will do: its
//! bytes are those of the Python package.

use half::f16;

use super::blocks::BlockType;

/// Types that [`encode`] can write.
pub const ENCODED: [BlockType; 5] =
    [BlockType::Q4_0, BlockType::Q5_0, BlockType::Q8_0, BlockType::Q4_K, BlockType::Q6_K];

/// Steps of the scales that are tried, in tenths of a level.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

/// Rounds a row to blocks and appends them. `importance` has the moment of each column, or nothing.
///
/// # Panics
/// For a type that is none of [`ENCODED`], a row that is not whole blocks, or other lengths.
pub fn encode(block: BlockType, row: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    assert!(row.len().is_multiple_of(block.block_len()), "encode: whole blocks");
    assert!(importance.is_none_or(|m| m.len() == row.len()), "encode: a moment for each number");
    let square = row.iter().map(|x| x * x).sum::<f32>() / row.len().max(1) as f32;
    let len = block.block_len();
    for (i, x) in row.chunks_exact(len).enumerate() {
        let moments = importance.map(|m| &m[i * len..][..len]);
        match block {
            BlockType::Q4_0 => levels(x, &weights(x, moments, square, true), 8, out),
            BlockType::Q5_0 => levels(x, &weights(x, moments, square, true), 16, out),
            BlockType::Q8_0 => q8_0(x, out),
            BlockType::Q4_K => q4_k(x, &weights(x, moments, square, false), out),
            BlockType::Q6_K => q6_k(x, &weights(x, moments, square, true), out),
            other => panic!("encode: a type that is written, got {}", other.name()),
        }
    }
}

/// The weight of each number's error.
fn weights(x: &[f32], moments: Option<&[f32]>, square: f32, both_sides: bool) -> Vec<f32> {
    match moments {
        Some(m) => x.iter().zip(m).map(|(x, m)| m * (square + x * x).sqrt()).collect(),
        None if both_sides => x.iter().map(|x| x * x).collect(),
        None => x.iter().map(|x| square.sqrt() + x.abs()).collect(),
    }
}

/// A number in half precision that is not beyond its range.
fn halved(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65504.0, 65504.0))
}

fn inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The nearest of the levels from `-half` to `half - 1`.
fn level(x: f32, half: i8) -> i8 {
    x.round_ties_even().clamp(-f32::from(half), f32::from(half) - 1.0) as i8
}

/// The scale of the least weighted error with levels from `-half` to `half - 1`; 0 where all
/// numbers are.
fn scale(x: &[f32], w: &[f32], half: i8) -> f32 {
    let largest = x.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
    if inverse(largest) == 0.0 {
        return 0.0;
    }
    let top = f32::from(half);
    // The largest at the end of the longer side, a little before it or beyond, or at the shorter
    // one's.
    let tries = STEPS.map(|step| -(top + 0.1 * f32::from(step)) / largest).chain([(top - 1.0) / largest]);
    let fit = |inverse: f32| {
        let (mut xl, mut ll) = (0.0f32, 0.0f32);
        for (x, w) in x.iter().zip(w) {
            let l = f32::from(level(x * inverse, half));
            xl += w * x * l;
            ll += w * l * l;
        }
        // What the error falls by from that of nothing at all, and the scale.
        (xl * xl / ll, xl / ll)
    };
    let best = tries
        .map(fit)
        .filter(|(gain, _)| gain.is_finite())
        .fold((0.0, 0.0), |best: (f32, f32), new| if new.0 > best.0 { new } else { best });
    // Without any weight there is nothing to choose by.
    if best.0 > 0.0 { best.1 } else { -largest / top }
}

/// `Q4_0` (8 levels on each side) and `Q5_0` (16).
fn levels(x: &[f32], w: &[f32], half: i8, out: &mut Vec<u8>) {
    let d = halved(scale(x, w, half));
    out.extend(d.to_le_bytes());
    let inverse = inverse(d.to_f32());
    let q: Vec<u8> = x.iter().map(|x| (level(x * inverse, half) + half) as u8).collect();
    if half == 16 {
        let fifths = q.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
        out.extend(fifths.to_le_bytes());
    }
    out.extend((0..16).map(|i| q[i] & 15 | q[16 + i] << 4));
}

fn q8_0(x: &[f32], out: &mut Vec<u8>) {
    let d = x.iter().fold(0.0f32, |a, b| a.max(b.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(halved(d).to_le_bytes());
    out.extend(x.iter().map(|x| (x * inverse).round() as i8 as u8));
}

fn q6_k(x: &[f32], w: &[f32], out: &mut Vec<u8>) {
    let scales: Vec<f32> = x.chunks_exact(16).zip(w.chunks_exact(16)).map(|(x, w)| scale(x, w, 32)).collect();
    let largest = scales.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
    let d = halved(largest / -128.0);
    let factors: Vec<i8> =
        scales.iter().map(|s| (s * inverse(d.to_f32())).round().clamp(-128.0, 127.0) as i8).collect();
    let mut q = Vec::with_capacity(256);
    for (x, &factor) in x.chunks_exact(16).zip(&factors) {
        let inverse = inverse(d.to_f32() * f32::from(factor));
        q.extend(x.iter().map(|x| (level(x * inverse, 32) + 32) as u8));
    }
    for q in q.chunks_exact(128) {
        out.extend((0..64).map(|i| q[i] & 15 | (q[64 + i] & 15) << 4));
    }
    for q in q.chunks_exact(128) {
        out.extend(
            (0..32).map(|i| (0..4).fold(0, |byte, part| byte | (q[32 * part + i] >> 4) << (2 * part))),
        );
    }
    out.extend(factors.iter().map(|&f| f as u8));
    out.extend(d.to_le_bytes());
}

/// Scale and minimum (taken away) of the least weighted error with levels from 0 to 15.
fn scale_and_minimum(x: &[f32], w: &[f32]) -> (f32, f32) {
    let low = x.iter().copied().fold(0.0f32, f32::min);
    let high = x.iter().copied().fold(low, f32::max);
    if inverse(high - low) == 0.0 {
        return (0.0, -low);
    }
    let (mut sw, mut sx) = (0.0f32, 0.0f32);
    x.iter().zip(w).for_each(|(x, w)| (sw, sx) = (sw + w, sx + w * x));
    let error = |d: f32, m: f32| {
        let inverse = inverse(d);
        let one =
            |(x, w): (&f32, &f32)| w * (d * ((x + m) * inverse).round().clamp(0.0, 15.0) - m - x).powi(2);
        x.iter().zip(w).map(one).sum::<f32>()
    };
    let plain = ((high - low) / 15.0, -low);
    let mut best = (error(plain.0, plain.1), plain);
    for step in STEPS {
        let inverse = (15.0 + 0.1 * f32::from(step)) / (high - low);
        let (mut sl, mut sll, mut sxl) = (0.0f32, 0.0f32, 0.0f32);
        for (x, w) in x.iter().zip(w) {
            let l = ((x - low) * inverse).round().clamp(0.0, 15.0);
            sl += w * l;
            sll += w * l * l;
            sxl += w * x * l;
        }
        // The straight line through the points (l, x), which may not cross 0 above it.
        let det = sw * sll - sl * sl;
        let (mut d, mut m) = ((sw * sxl - sx * sl) / det, (sl * sxl - sll * sx) / det);
        if m < 0.0 {
            (d, m) = (sxl / sll, 0.0);
        }
        if !(d.is_finite() && m.is_finite() && d > 0.0) {
            continue;
        }
        let error = error(d, m);
        if error < best.0 {
            best = (error, (d, m));
        }
    }
    best.1
}

fn q4_k(x: &[f32], w: &[f32], out: &mut Vec<u8>) {
    let pairs: Vec<(f32, f32)> =
        x.chunks_exact(32).zip(w.chunks_exact(32)).map(|(x, w)| scale_and_minimum(x, w)).collect();
    let most = |of: fn(&(f32, f32)) -> f32| halved(pairs.iter().map(of).fold(0.0, f32::max) / 63.0);
    let (d, dmin) = (most(|p| p.0), most(|p| p.1));
    let six = |value: f32, of: f16| (value * inverse(of.to_f32())).round().clamp(0.0, 63.0) as u8;
    let stored: Vec<(u8, u8)> = pairs.iter().map(|&(s, m)| (six(s, d), six(m, dmin))).collect();
    out.extend(d.to_le_bytes());
    out.extend(dmin.to_le_bytes());
    out.extend((0..4).map(|i| stored[i].0 | stored[4 + i].0 >> 4 << 6));
    out.extend((0..4).map(|i| stored[i].1 | stored[4 + i].1 >> 4 << 6));
    out.extend((0..4).map(|i| stored[4 + i].0 & 15 | stored[4 + i].1 << 4));
    let mut q = Vec::with_capacity(256);
    for (x, &(s, m)) in x.chunks_exact(32).zip(&stored) {
        let (d, m) = (d.to_f32() * f32::from(s), dmin.to_f32() * f32::from(m));
        let inverse = inverse(d);
        q.extend(x.iter().map(|x| ((x + m) * inverse).round().clamp(0.0, 15.0) as u8));
    }
    for q in q.chunks_exact(64) {
        out.extend((0..32).map(|i| q[i] | q[32 + i] << 4));
    }
}
