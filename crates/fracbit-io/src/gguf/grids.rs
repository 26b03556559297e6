//! Block types whose numbers come in groups of four or eight, each an entry of a table.
//!
//! The tables are part of the format. `tests/reference/gguf_golden.py` wrote them from the Python
//! package `gguf`, as indices into a few levels, packed least significant bits first.

use std::sync::LazyLock;

use super::blocks::half;

/// A table of groups of `N` levels.
type Grid<const N: usize> = LazyLock<Vec<[f32; N]>>;

const LEVELS_2: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
const LEVELS_3: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
const LEVELS_3S: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];
const LEVELS_1: [f32; 4] = [-1.0, 0.0, 1.0, 0.0];

static IQ2_XXS: Grid<8> = LazyLock::new(|| unpack(include_bytes!("grids/iq2_xxs.bin"), &LEVELS_2));
static IQ2_XS: Grid<8> = LazyLock::new(|| unpack(include_bytes!("grids/iq2_xs.bin"), &LEVELS_2));
static IQ2_S: Grid<8> = LazyLock::new(|| unpack(include_bytes!("grids/iq2_s.bin"), &LEVELS_2));
static IQ3_XXS: Grid<4> = LazyLock::new(|| unpack(include_bytes!("grids/iq3_xxs.bin"), &LEVELS_3));
static IQ3_S: Grid<4> = LazyLock::new(|| unpack(include_bytes!("grids/iq3_s.bin"), &LEVELS_3S));
static IQ1: Grid<8> = LazyLock::new(|| unpack(include_bytes!("grids/iq1.bin"), &LEVELS_1));

/// Indices of two bits for four levels, of four for eight.
fn unpack<const N: usize>(packed: &[u8], levels: &[f32]) -> Vec<[f32; N]> {
    let bits = if levels.len() == 4 { 2 } else { 4 };
    let each = 8 / bits;
    let level = |i: usize| levels[usize::from(packed[i / each] >> (i % each * bits)) % levels.len()];
    (0..packed.len() * each / N).map(|entry| std::array::from_fn(|i| level(entry * N + i))).collect()
}

fn u16_at(bytes: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])
}

fn u32_at(bytes: &[u8], i: usize) -> u32 {
    u32::from(u16_at(bytes, 2 * i)) | u32::from(u16_at(bytes, 2 * i + 1)) << 16
}

/// Eight signs from seven bits: the last makes their number even.
fn even(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// Scaled entries of a table with signs, one after the other.
fn signed(out: &mut [f32], scale: f32, levels: impl Iterator<Item = f32>, signs: u8) {
    for (i, (o, level)) in out.iter_mut().zip(levels).enumerate() {
        let magnitude = scale * level;
        *o = if signs >> i & 1 == 0 { magnitude } else { -magnitude };
    }
}

/// `d (1/2 + s) f` for four-bit scales, low bits first.
fn four_bit(d: f32, scales: &[u8], i: usize, factor: f32) -> f32 {
    let scale = scales[i / 2] >> (4 * (i % 2)) & 15;
    d * (0.5 + f32::from(scale)) * factor
}

pub(super) fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let (d, words) = (half(block), &block[2..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (entries, rest) = (u32_at(words, 2 * group), u32_at(words, 2 * group + 1));
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        for (i, (out, entry)) in out.chunks_exact_mut(8).zip(entries.to_le_bytes()).enumerate() {
            let levels = IQ2_XXS[usize::from(entry)].into_iter();
            signed(out, scale, levels, even(rest >> (7 * i)));
        }
    }
}

pub(super) fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (codes, scales) = block[2..].split_at(64);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let code = u16_at(codes, i);
        let levels = IQ2_XS[usize::from(code & 511)].into_iter();
        signed(out, four_bit(d, scales, i / 2, 0.25), levels, even(u32::from(code >> 9)));
    }
}

pub(super) fn iq2_s(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (low, rest) = block[2..].split_at(32);
    let (signs, rest) = rest.split_at(32);
    let (high, scales) = rest.split_at(8);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let entry = usize::from(low[i]) | usize::from(high[i / 4] >> (2 * (i % 4)) & 3) << 8;
        signed(out, four_bit(d, scales, i / 2, 0.25), IQ2_S[entry].into_iter(), signs[i]);
    }
}

pub(super) fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (entries, words) = block[2..].split_at(64);
    for (i, (out, entries)) in out.chunks_exact_mut(8).zip(entries.chunks_exact(2)).enumerate() {
        let word = u32_at(words, i / 4);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        let levels = entries.iter().flat_map(|&entry| IQ3_XXS[usize::from(entry)]);
        signed(out, scale, levels, even(word >> (7 * (i % 4))));
    }
}

pub(super) fn iq3_s(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (low, rest) = block[2..].split_at(64);
    let (high, rest) = rest.split_at(8);
    let (signs, scales) = rest.split_at(32);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = scales[i / 8] >> (4 * (i / 4 % 2)) & 15;
        let entry = |j: usize| usize::from(low[j]) | usize::from(high[j / 8] >> (j % 8) & 1) << 8;
        let levels = [2 * i, 2 * i + 1].into_iter().flat_map(|j| IQ3_S[entry(j)]);
        signed(out, d * f32::from(1 + 2 * scale), levels, signs[i]);
    }
}

/// Scaled entries of the table of three levels, moved by an eighth.
fn ternary(out: &mut [f32], scale: f32, entry: usize, up: bool) {
    let delta = if up { 0.125 } else { -0.125 };
    out.iter_mut().zip(IQ1[entry]).for_each(|(o, level)| *o = scale * (level + delta));
}

pub(super) fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let (low, high) = block[2..].split_at(32);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(high, i / 4);
        let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
        let entry = usize::from(low[i]) | usize::from(word >> (3 * (i % 4)) & 7) << 8;
        ternary(out, scale, entry, word & 0x8000 == 0);
    }
}

pub(super) fn iq1_m(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(32);
    let (high, scales) = rest.split_at(16);
    // The scale of the block is in the highest four bits of the words with the others.
    let d = (0..4).fold(0, |d, i| d | (u16_at(scales, i) >> 12) << (4 * i));
    let d = half(&d.to_le_bytes());
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = u16_at(scales, i / 8) >> (3 * (i / 2 % 4)) & 7;
        let bits = high[i / 2] >> (4 * (i % 2)) & 15;
        let entry = usize::from(low[i]) | usize::from(bits & 7) << 8;
        ternary(out, d * f32::from(2 * scale + 1), entry, bits & 8 == 0);
    }
}
