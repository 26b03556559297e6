//! Which expander runs a codebook, and the constants it loads.

use super::{
    expand::{Fine, Gather, Lookup, Pairs256, Wide, kind},
    spread::{sources, spread_table},
    strips::strips,
    *,
};
use fracbit_base::Scheme;
use fracbit_format::{TILE_COLS, trellis::Steps};

/// Bits of a tile row.
const fn row_bits(scheme: Scheme) -> usize {
    scheme.quarters() as usize * TILE_COLS / 4
}

/// First byte of stretch `s` of the `n` that a row is cut into.
const fn start(scheme: Scheme, s: usize, n: usize) -> usize {
    s * row_bits(scheme) / n / 8
}

/// The constants and the function for `codebook`, if there are.
pub(super) fn choose(codebook: &Codebook, _proof: Avx512) -> Option<(Vec<Line>, StripFn)> {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    match (scheme.family(), scheme.code()) {
        (Family::Nuq, _) if narrow => Some(scalar(codebook)),
        (Family::Nuq, _) if scheme.quarters() >= 20 => Some(wide(codebook)),
        (Family::Vq, _) if narrow && scheme.quarters() <= 16 => Some(pairs(codebook)),
        (Family::Vq, _) => Some(gather(codebook)),
        (Family::Tcq, Some(Code::Fine)) if narrow => Some(fine(codebook)),
        (Family::Tcq, Some(Code::Fast)) if narrow => Some(fast(codebook)),
        (Family::Tcq, Some(Code::Hyb)) => Some(gather(codebook)),
        _ => None,
    }
}

fn fine(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let scheme = codebook.scheme();
    let steps = Steps::of(scheme).expect("a trellis scheme");
    // 15 R + 16 bits of a row fit 64 up to 3 bits a weight.
    let halves = if scheme.quarters() <= 12 { 1 } else { 2 };
    let bytes = codebook.tile_bytes();
    let mut table =
        spread_table(bytes, 2 * halves, |s, b| (b / 8 + 8 * (s % 2), start(scheme, s / 2, halves) + b % 8));
    for g in 0..4 {
        let origin = 8 * start(scheme, g * halves / 4, halves);
        table.push(qwords(|b| steps.position(4 * g + b / 2) - origin + 8 * (b % 2)));
    }
    let q = codebook.entries().len().trailing_zeros() as usize;
    table.push(qwords(|b| 16 * (b % 4) + 15 - q.max(6)));
    table.push(qwords(|b| 16 * (b % 4) + 8));
    let entry = |i: usize| i32::from(codebook.entries()[i]);
    if q == 6 {
        // Seven bits: the sign is the highest.
        table.extend(byte_table(128, |i| if i < 64 { entry(i) } else { -entry(i - 64) }));
        table.extend([Line::ZERO; 2]);
    } else {
        table.extend(byte_table(256, |i| entry(i % codebook.entries().len())));
    }
    let run = match (sources(bytes), halves, q) {
        (1, 1, 6) => strips::<Fine<1, 2, 6>> as StripFn,
        (1, 1, 7) => strips::<Fine<1, 2, 7>>,
        (1, 1, _) => strips::<Fine<1, 2, 8>>,
        (2, 1, 6) => strips::<Fine<2, 2, 6>>,
        (2, 1, 7) => strips::<Fine<2, 2, 7>>,
        (2, 1, _) => strips::<Fine<2, 2, 8>>,
        (2, _, 6) => strips::<Fine<2, 4, 6>>,
        (2, _, 7) => strips::<Fine<2, 4, 7>>,
        (2, _, _) => strips::<Fine<2, 4, 8>>,
        (_, _, 6) => strips::<Fine<4, 4, 6>>,
        (_, _, 7) => strips::<Fine<4, 4, 7>>,
        _ => strips::<Fine<4, 4, 8>>,
    };
    (table, run)
}

fn scalar(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = row_pairs(codebook, if bits <= 4 { 2 } else { 4 }, |c| c * bits);
    let len = codebook.entries().len();
    table.extend(byte_table(256, |i| i32::from(codebook.entries()[i % len])));
    let run = match bits {
        2 => strips::<Lookup<1, 2, { kind::ONE_64 }>> as StripFn,
        3 | 4 => strips::<Lookup<2, 2, { kind::ONE_64 }>>,
        5 | 6 => strips::<Lookup<4, 4, { kind::ONE_64 }>>,
        7 => strips::<Lookup<4, 4, { kind::ONE_128 }>>,
        _ => strips::<Lookup<4, 4, { kind::ONE_256 }>>,
    };
    (table, run)
}

fn pairs(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 2);
    let count = codebook.entries().len() / 2;
    let entry = |i: usize, k: usize| i32::from(codebook.entries()[2 * (i % count) + k]);
    let length = count.max(64);
    let mut table = if bits == 8 {
        let pick = |s: usize, b: usize| {
            let (lane, quad) = (b / 16 * 4 + b % 8 / 2, 2 * s + b % 16 / 8);
            (usize::from(LANES[lane]), 2 * quad + b % 2)
        };
        spread_table(codebook.tile_bytes(), 2, pick)
    } else {
        row_pairs(codebook, 2, |c| c / 2 * bits)
    };
    (0..2).for_each(|k| table.extend(byte_table(length, |i| entry(i, k))));
    if length == 64 {
        table.extend([Line::ZERO; 2]);
    }
    let run = match bits {
        3 | 4 => strips::<Lookup<1, 2, { kind::TWO_64 }>> as StripFn,
        5 | 6 => strips::<Lookup<2, 2, { kind::TWO_64 }>>,
        7 => strips::<Lookup<2, 2, { kind::TWO_128 }>>,
        _ => strips::<Pairs256>,
    };
    (table, run)
}

fn fast(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let steps = Steps::of(codebook.scheme()).expect("a trellis scheme");
    let weights = steps.weights;
    // Words of a state: both words of a lane hold the one state of four columns, or each its own of two.
    let n = if weights == 4 { 2 } else { 4 };
    let mut table = row_pairs(codebook, n, |c| steps.position(c / weights) + 8 * (c % 2));
    let len = codebook.entries().len();
    table.extend(byte_table(128, |i| i32::from(codebook.entries()[i % len])));
    let factors = trellis::FAST_MUL;
    let word = |i: usize| factors[if weights == 4 { i % 2 } else { 0 }];
    table.push(words(|i| word(i).0));
    table.push(words(|i| word(i).1));
    let run = match (sources(codebook.tile_bytes()), weights, len) {
        (1, 4, 64) => strips::<Lookup<1, 2, { kind::FAST_64 }>> as StripFn,
        (1, 4, _) => strips::<Lookup<1, 2, { kind::FAST_128 }>>,
        (2, _, 64) => strips::<Lookup<2, 4, { kind::FAST_64 }>>,
        (2, _, _) => strips::<Lookup<2, 4, { kind::FAST_128 }>>,
        (_, _, 64) => strips::<Lookup<4, 4, { kind::FAST_64 }>>,
        _ => strips::<Lookup<4, 4, { kind::FAST_128 }>>,
    };
    (table, run)
}

fn wide(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = word_pairs(codebook, |c| c * bits);
    let len = codebook.entries().len();
    table.extend((0..8).map(|l| words(|i| codebook.entries()[(32 * l + i) % len].cast_unsigned())));
    let run = match bits {
        5 => strips::<Wide<4, 5>> as StripFn,
        6 => strips::<Wide<4, 6>>,
        7 => strips::<Wide<4, 7>>,
        _ => strips::<Wide<4, 8>>,
    };
    (table, run)
}

fn gather(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    let entries = codebook.entries();
    let hash = scheme.family() == Family::Tcq;
    let bits = if hash {
        entries.len().trailing_zeros() as usize // pairs, and the sign of the first
    } else {
        usize::from(scheme.quarters() / 2)
    };
    let count = if hash { 16 - bits } else { bits };
    let mut table = word_pairs(codebook, |c| c / 2 * usize::from(scheme.quarters() / 2));
    let mut first = Line::ZERO;
    first.0[0] = u8::try_from(count).expect("at most 16 bits");
    table.push(first);
    let pairs = entries.len() / 2;
    let mut line = Line::ZERO;
    for i in 0..1usize << bits {
        let (a, b) = (entries[2 * (i % pairs)], entries[2 * (i % pairs) + 1]);
        let a = if i >= pairs { -a } else { a };
        let at = i % 16 * 4;
        if narrow {
            line.0[at] = biased(a.into());
            line.0[at + 1] = biased(b.into());
        } else {
            line.0[at..at + 2].copy_from_slice(&a.to_le_bytes());
            line.0[at + 2..at + 4].copy_from_slice(&b.to_le_bytes());
        }
        if i % 16 == 15 || i + 1 == 1 << bits {
            table.push(line);
        }
    }
    let run = match (sources(codebook.tile_bytes()), hash, narrow) {
        (1, true, true) => strips::<Gather<1, true, false>> as StripFn,
        (2, true, true) => strips::<Gather<2, true, false>>,
        (_, true, true) => strips::<Gather<4, true, false>>,
        (1, true, false) => strips::<Gather<1, true, true>>,
        (2, true, false) => strips::<Gather<2, true, true>>,
        (_, true, false) => strips::<Gather<4, true, true>>,
        (1, false, true) => strips::<Gather<1, false, false>>,
        (2, false, true) => strips::<Gather<2, false, false>>,
        (_, false, true) => strips::<Gather<4, false, false>>,
        (1, false, false) => strips::<Gather<1, false, true>>,
        (2, false, false) => strips::<Gather<2, false, true>>,
        (_, false, false) => strips::<Gather<4, false, true>>,
    };
    (table, run)
}

/// Spreads of 32-bit stretches, rows `i` and `i + 8` side by side, and the cuts of one byte per column: byte `c` is
/// the 8 bits from bit `position(c)` of its row.
fn row_pairs(codebook: &Codebook, n: usize, position: impl Fn(usize) -> usize) -> Vec<Line> {
    let scheme = codebook.scheme();
    let pick = |s: usize, b: usize| (b / 8 + b / 4 % 2 * 8, start(scheme, s, n) + b % 4);
    let mut table = spread_table(codebook.tile_bytes(), n, pick);
    for g in 0..4 {
        let origin = 8 * start(scheme, g * n / 4, n);
        table.push(qwords(|b| b / 4 * 32 + position(4 * g + b % 4) - origin));
    }
    table
}

/// As [`row_pairs`] with four columns a stretch, and cuts of 16 bits per column, two columns to a lane.
fn word_pairs(codebook: &Codebook, position: impl Fn(usize) -> usize) -> Vec<Line> {
    let scheme = codebook.scheme();
    let pick = |s: usize, b: usize| (b / 8 + b / 4 % 2 * 8, start(scheme, s, 4) + b % 4);
    let mut table = spread_table(codebook.tile_bytes(), 4, pick);
    for p in 0..8 {
        let origin = 8 * start(scheme, p / 2, 4);
        table.push(qwords(|b| b / 4 * 32 + position(2 * p + b % 4 / 2) - origin + 8 * (b % 2)));
    }
    table
}

/// The same control byte `bit(b)` (a bit position of the 64-bit lane, taken modulo 64) in every lane.
fn qwords(bit: impl Fn(usize) -> usize) -> Line {
    Line(std::array::from_fn(|b| u8::try_from(bit(b % 8) % 64).expect("below 64")))
}

/// 32 words.
fn words(value: impl Fn(usize) -> u16) -> Line {
    Line(std::array::from_fn(|b| value(b / 2).to_le_bytes()[b % 2]))
}

/// `len` biased bytes (a multiple of 64).
fn byte_table(len: usize, entry: impl Fn(usize) -> i32) -> Vec<Line> {
    (0..len / 64).map(|l| Line(std::array::from_fn(|i| biased(entry(64 * l + i))))).collect()
}

/// `w + 128`: 1 to 255 on the int8 grid.
fn biased(w: i32) -> u8 {
    u8::try_from(w + 128).expect("an entry on the int8 grid")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_hold_all_bits_that_are_cut_from_them() {
        // What the comments above claim of 32- and 64-bit stretches, for every scheme.
        for scheme in Scheme::all().filter(|s| s.family() != Family::HalfTcq) {
            let rate = usize::from(scheme.quarters());
            let end = |last: usize, width: usize, s: usize, n: usize| last + width - 8 * start(scheme, s, n);
            match scheme.family() {
                Family::Tcq => {
                    let steps = Steps::of(scheme).unwrap();
                    if scheme.code() == Some(Code::Fine) {
                        let n = if rate <= 12 { 1 } else { 2 };
                        (0..n).for_each(|s| {
                            let last = (s + 1) * 16 / n - 1;
                            assert!(end(steps.position(last), 16, s, n) <= 64, "{scheme} {s}");
                        });
                    } else {
                        let n = if steps.weights == 4 { 2 } else { 4 };
                        (0..n).for_each(|s| {
                            let last = (s + 1) * 16 / n / steps.weights - 1;
                            assert!(end(steps.position(last), 16, s, n) <= 32, "{scheme} {s}");
                        });
                    }
                }
                family => {
                    let (width, per) = if family == Family::Nuq { (rate / 4, 1) } else { (rate / 2, 2) };
                    let n = if rate <= 16 { 2 } else { 4 };
                    for s in 0..n {
                        let last = ((s + 1) * 16 / n / per - 1) * width;
                        assert!(end(last, width, s, n) <= 32, "{scheme} {s}");
                    }
                }
            }
        }
    }
}
