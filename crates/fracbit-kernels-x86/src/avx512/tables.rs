//! Which expander runs a codebook, and the constants it loads.

use super::{
    bits::Bits,
    expand::{Fine, Gather, Lookup, Pairs256, Wide, Wide256, kind},
    spread::{fetch, nibble, spread_lines, spread_table, start},
    strips::strips,
    *,
};
use fracbit_format::trellis::Steps;

/// The constants and the function for `codebook`, if there are.
pub(super) fn choose(codebook: &Codebook, _proof: Avx512) -> Option<(Vec<Line>, StripFn)> {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    match (scheme.family(), scheme.code()) {
        (Family::Nuq | Family::Int, _) if narrow => Some(scalar(codebook)),
        (Family::Gnuq, _) => Some(group_wise(codebook)),
        (Family::Nuq, _) if scheme.quarters() >= 20 => Some(wide(codebook)),
        (Family::Vq, _) if narrow && scheme.quarters() <= 16 => Some(pairs(codebook)),
        (Family::Vq, _) => Some(gather(codebook)),
        (Family::Tcq(Code::Fine), _) if narrow => Some(fine(codebook)),
        (Family::Tcq(Code::Fast), _) if narrow => Some(fast(codebook)),
        (Family::Tcq(Code::Hyb), _) => Some(gather(codebook)),
        _ => None,
    }
}

/// The constants and the function that read `codebook`, a scalar one, by its bits.
pub(super) fn by_bits(codebook: &Codebook, _proof: Avx512) -> Option<(Vec<Line>, StripFn)> {
    let len = codebook.entries().len();
    let run = match len.ilog2() {
        2 => strips::<Bits<2, 2>> as StripFn,
        3 => strips::<Bits<3, 2>>,
        4 => strips::<Bits<4, 2>>,
        5 => strips::<Bits<5, 4>>,
        6 => strips::<Bits<6, 4>>,
        7 => strips::<Bits<7, 4>>,
        8 => strips::<Bits<8, 4>>,
        _ => return None,
    };
    Some((byte_table(256, |i| i32::from(codebook.entries()[i % len])), run))
}

fn fine(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{DIRECT, HALVES, ONE, TWO};
    let steps = Steps::of(codebook.scheme()).expect("a trellis scheme");
    let bytes = codebook.tile_bytes();
    let n = stretches(bytes, steps.position(15) + 16);
    let mut table = spread_table(bytes, n);
    for g in 0..4 {
        let (k, odd) = (g / 2, g % 2);
        let origin = 8 * start(bytes, if n == 1 { 0 } else { k }, n);
        table.push(cuts(bytes, |b| steps.position(8 * k + b / 2 * 2 + odd) - origin + 8 * (b % 2)));
    }
    let len = codebook.entries().len();
    let q = len.trailing_zeros() as usize;
    let entry = |i: usize| i32::from(codebook.entries()[i]);
    match q {
        6 => table.extend(byte_table(128, |i| if i < 64 { entry(i) } else { -entry(i - 64) })),
        7 => table.extend(byte_table(128, entry)),
        _ => table.extend(byte_table(256, |i| entry(2 * (i % 128) + i / 128))),
    }
    table.resize(spread_lines(n) + 8, Line::ZERO);
    let run = match (fetch::of(bytes), n, q) {
        (ONE, _, 6) => strips::<Fine<ONE, 1, 6>> as StripFn,
        (ONE, _, 7) => strips::<Fine<ONE, 1, 7>>,
        (ONE, _, _) => strips::<Fine<ONE, 1, 8>>,
        (TWO, 1, 6) => strips::<Fine<TWO, 1, 6>>,
        (TWO, 1, 7) => strips::<Fine<TWO, 1, 7>>,
        (TWO, 1, _) => strips::<Fine<TWO, 1, 8>>,
        (TWO, _, 6) => strips::<Fine<TWO, 2, 6>>,
        (TWO, _, 7) => strips::<Fine<TWO, 2, 7>>,
        (TWO, _, _) => strips::<Fine<TWO, 2, 8>>,
        (DIRECT, _, 6) => strips::<Fine<DIRECT, 2, 6>>,
        (DIRECT, _, 7) => strips::<Fine<DIRECT, 2, 7>>,
        (DIRECT, _, _) => strips::<Fine<DIRECT, 2, 8>>,
        (_, _, 6) => strips::<Fine<HALVES, 2, 6>>,
        (_, _, 7) => strips::<Fine<HALVES, 2, 7>>,
        _ => strips::<Fine<HALVES, 2, 8>>,
    };
    (table, run)
}

fn scalar(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{DIRECT, HALVES, ONE, TWO};
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = bytes_of_columns(codebook, bits, |c| c * bits);
    let len = codebook.entries().len();
    table.extend(byte_table(256, |i| i32::from(codebook.entries()[i % len])));
    let run = match bits {
        2 => strips::<Lookup<ONE, 1, { kind::ONE_64 }>> as StripFn,
        3 => strips::<Lookup<TWO, 1, { kind::ONE_64 }>>,
        4 => strips::<Lookup<DIRECT, 1, { kind::ONE_64 }>>,
        5 | 6 => strips::<Lookup<HALVES, 2, { kind::ONE_64 }>>,
        7 => strips::<Lookup<HALVES, 2, { kind::ONE_128 }>>,
        _ => strips::<Lookup<HALVES, 2, { kind::ONE_256 }>>,
    };
    (table, run)
}

fn group_wise(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{DIRECT, ONE, TWO};
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = bytes_of_columns(codebook, bits, |c| c * bits);
    table.extend(groups::lines(codebook, bits));
    let run = match bits {
        2 => strips::<groups::Books<ONE, 2>> as StripFn,
        3 => strips::<groups::Books<TWO, 3>>,
        _ => strips::<groups::Books<DIRECT, 4>>,
    };
    (table, run)
}

fn pairs(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{ONE, TWO};
    let bits = usize::from(codebook.scheme().quarters() / 2);
    let count = codebook.entries().len() / 2;
    let entry = |i: usize, k: usize| i32::from(codebook.entries()[2 * (i % count) + k]);
    let both = |table: &mut Vec<Line>, len: usize| {
        (0..2).for_each(|k| table.extend(byte_table(len, |i| entry(i, k))));
    };
    if bits == 8 {
        let mut table = Vec::new();
        both(&mut table, 256);
        return (table, strips::<Pairs256>);
    }
    let mut table = bytes_of_columns(codebook, bits, |c| c / 2 * bits);
    if bits == 7 {
        both(&mut table, 128);
    } else {
        table.extend(byte_table(128, |i| entry(i / 2, i % 2)));
        table.extend([Line::ZERO; 2]);
    }
    let run = match bits {
        3 | 4 => strips::<Lookup<ONE, 1, { kind::TWO_32 }>> as StripFn,
        5 => strips::<Lookup<TWO, 1, { kind::TWO_32 }>>,
        6 => strips::<Lookup<TWO, 1, { kind::TWO_64 }>>,
        _ => strips::<Lookup<TWO, 1, { kind::TWO_128 }>>,
    };
    (table, run)
}

fn fast(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{DIRECT, HALVES, ONE, TWO};
    let steps = Steps::of(codebook.scheme()).expect("a trellis scheme");
    let (weights, bytes) = (steps.weights, codebook.tile_bytes());
    let len = codebook.entries().len();
    // Words of a state: the two words of four columns hold the same state, or each its own of two
    // columns.
    let position = |c: usize| steps.position(c / weights);
    let whole = fetch::of(bytes) == ONE && len == 64 && (0..16).all(|c| position(c) % 8 == 0);
    let mut table =
        if whole { bytes_of_states(bytes, position) } else { bytes_of_columns(codebook, 16, position) };
    let n = stretches(bytes, position(15) + 16);
    table.extend(byte_table(128, |i| i32::from(codebook.entries()[i % len])));
    let factor = (trellis::fast_factor(usize::from(codebook.scheme().quarters())) >> 8).to_le_bytes();
    let halves = [0, 2].map(|i| u16::from_le_bytes([factor[i], factor[i + 1]]));
    table.push(words(|i| halves[if weights == 4 { i % 2 } else { 0 }]));
    table.push(Line::ZERO);
    let run = match (fetch::of(bytes), n, len) {
        _ if whole => strips::<Lookup<ONE, 2, { kind::QUAD_64_BYTES }>> as StripFn,
        (ONE, _, 64) => strips::<Lookup<ONE, 1, { kind::QUAD_64 }>>,
        (ONE, _, _) => strips::<Lookup<ONE, 1, { kind::QUAD_128 }>>,
        (TWO, 1, 64) => strips::<Lookup<TWO, 1, { kind::PAIR_64 }>>,
        (TWO, 1, _) => strips::<Lookup<TWO, 1, { kind::PAIR_128 }>>,
        (TWO, _, 64) => strips::<Lookup<TWO, 2, { kind::PAIR_64 }>>,
        (TWO, _, _) => strips::<Lookup<TWO, 2, { kind::PAIR_128 }>>,
        (DIRECT, _, 64) => strips::<Lookup<DIRECT, 2, { kind::PAIR_64 }>>,
        (DIRECT, _, _) => strips::<Lookup<DIRECT, 2, { kind::PAIR_128 }>>,
        (_, _, 64) => strips::<Lookup<HALVES, 2, { kind::PAIR_64 }>>,
        _ => strips::<Lookup<HALVES, 2, { kind::PAIR_128 }>>,
    };
    (table, run)
}

fn wide(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let entry = |i: usize| codebook.entries()[i % codebook.entries().len()];
    if bits == 8 {
        // Low bytes, then high bytes; not biased.
        let bytes =
            |k: usize| (0..4).map(move |l| Line(std::array::from_fn(|i| entry(64 * l + i).to_le_bytes()[k])));
        return (bytes(0).chain(bytes(1)).collect(), strips::<Wide256>);
    }
    let mut table = words_of_columns(codebook, bits, |p, i| (4 * p + i) * bits);
    table.extend((0..4).map(|l| words(|i| entry(32 * l + i).cast_unsigned())));
    let run = match bits {
        5 => strips::<Wide<5>> as StripFn,
        6 => strips::<Wide<6>>,
        _ => strips::<Wide<7>>,
    };
    (table, run)
}

fn gather(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    use fetch::{DIRECT, HALVES, ONE, TWO};
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    let entries = codebook.entries();
    let hash = matches!(scheme.family(), Family::Tcq(_));
    let bits = if hash {
        entries.len().trailing_zeros() as usize // pairs, and the sign of the first
    } else {
        usize::from(scheme.quarters() / 2)
    };
    let count = if hash { 16 - bits } else { bits };
    let step = usize::from(scheme.quarters() / 2);
    // Words 0 and 2 of a 64-bit lane count: two pairs, neighbours on the int16 grid.
    let pair = |p: usize, i: usize| step * if narrow { p / 2 * 4 + p % 2 + i / 2 * 2 } else { 2 * p + i / 2 };
    let n = stretches(codebook.tile_bytes(), 7 * step + if hash { 16 } else { step });
    let mut table = words_of_columns(codebook, if hash { 16 } else { step }, pair);
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
    let run = match (fetch::of(codebook.tile_bytes()), n, hash, narrow) {
        (ONE, _, true, true) => strips::<Gather<ONE, 1, true, false>> as StripFn,
        (TWO, 1, true, true) => strips::<Gather<TWO, 1, true, false>>,
        (TWO, _, true, true) => strips::<Gather<TWO, 2, true, false>>,
        (DIRECT, _, true, true) => strips::<Gather<DIRECT, 2, true, false>>,
        (_, _, true, true) => strips::<Gather<HALVES, 2, true, false>>,
        (ONE, _, true, false) => strips::<Gather<ONE, 1, true, true>>,
        (TWO, 1, true, false) => strips::<Gather<TWO, 1, true, true>>,
        (TWO, _, true, false) => strips::<Gather<TWO, 2, true, true>>,
        (DIRECT, _, true, false) => strips::<Gather<DIRECT, 2, true, true>>,
        (_, _, true, false) => strips::<Gather<HALVES, 2, true, true>>,
        (_, _, false, true) => strips::<Gather<HALVES, 2, false, false>>,
        (ONE, _, false, false) => strips::<Gather<ONE, 1, false, true>>,
        (TWO, _, false, false) => strips::<Gather<TWO, 1, false, true>>,
        (DIRECT, _, false, false) => strips::<Gather<DIRECT, 1, false, true>>,
        (_, _, false, false) => strips::<Gather<HALVES, 2, false, true>>,
    };
    (table, run)
}

/// Stretches of a row whose last bit of interest is before bit `end`.
const fn stretches(tile_bytes: usize, end: usize) -> usize {
    if end + nibble(tile_bytes, 1) <= 64 && tile_bytes <= 128 { 1 } else { 2 }
}

/// Stretches, and the cuts of one byte per column: byte `c` is the 8 bits from bit `position(c)` of
/// its row, the high byte of a word for odd columns of 16-bit windows. `width` bits of a window
/// count.
fn bytes_of_columns(codebook: &Codebook, width: usize, position: impl Fn(usize) -> usize) -> Vec<Line> {
    let bytes = codebook.tile_bytes();
    let n = stretches(bytes, position(15) + width);
    let mut table = spread_table(bytes, n);
    for k in 0..2 {
        let origin = 8 * start(bytes, if n == 1 { 0 } else { k }, n);
        let high = |c: usize| if width == 16 { 8 * (c % 2) } else { 0 };
        table.push(cuts(bytes, |c| position(8 * k + c) - origin + high(c)));
    }
    table
}

/// As [`bytes_of_columns`] of 16-bit windows that begin with a byte, in tiles of one load: the
/// stretches are what would be cut from them, and the lines of cuts are empty.
fn bytes_of_states(tile_bytes: usize, position: impl Fn(usize) -> usize) -> Vec<Line> {
    let index = |k: usize, half: usize, b: usize| {
        let row = (8 * half + b / 8) * tile_bytes / TILE_ROWS;
        u8::try_from((row + position(8 * k + b % 8) / 8 + b % 2) % tile_bytes).expect("inside a vector")
    };
    let line = |i: usize| Line(std::array::from_fn(|b| index(i / 2, i % 2, b)));
    let mut table: Vec<Line> = (0..4).map(line).collect();
    table.resize(spread_lines(2) + 2, Line::ZERO);
    table
}

/// Stretches, and the cuts of four words per 64-bit lane: word `i` of cut `p` is the 16 bits from
/// bit `position(p, i)`. `width` bits of a window count.
fn words_of_columns(
    codebook: &Codebook,
    width: usize,
    position: impl Fn(usize, usize) -> usize,
) -> Vec<Line> {
    let bytes = codebook.tile_bytes();
    let n = stretches(bytes, position(3, 3) + width);
    let mut table = spread_table(bytes, n);
    for p in 0..4 {
        let origin = 8 * start(bytes, if n == 1 { 0 } else { p / 2 }, n);
        table.push(cuts(bytes, |b| position(p, b / 2) - origin + 8 * (b % 2)));
    }
    table
}

/// The control byte `bit(b)` (a bit position of the row in the 64-bit lane, taken modulo 64) in
/// every lane.
fn cuts(tile_bytes: usize, bit: impl Fn(usize) -> usize) -> Line {
    Line(std::array::from_fn(|b| {
        u8::try_from((bit(b % 8) + nibble(tile_bytes, b / 8)) % 64).expect("below 64")
    }))
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
    use fracbit_base::Scheme;

    #[test]
    fn stretches_hold_all_bits_that_are_cut_from_them() {
        for scheme in Scheme::all().filter(|&s| s.tables().eq([s])) {
            let (rate, bytes) = (usize::from(scheme.quarters()), usize::from(scheme.quarters()) * 8);
            let check = |position: &dyn Fn(usize) -> usize, width: usize| {
                let n = stretches(bytes, position(15) + width);
                let nibble = nibble(bytes, 1);
                for k in 0..n {
                    let last = position(16 / n * (k + 1) - 1) + width + nibble;
                    assert!(last <= 8 * start(bytes, k, n) + 64, "{scheme}: stretch {k} of {n}");
                    assert!(start(bytes, k, n) * 8 <= position(16 / n * k), "{scheme}: stretch {k} of {n}");
                }
            };
            match scheme.family() {
                Family::Tcq(_) => {
                    let steps = Steps::of(scheme).unwrap();
                    check(&|c| steps.position(c / steps.weights), 16);
                }
                Family::Nuq | Family::Int | Family::Gnuq => check(&|c| c * rate / 4, rate / 4),
                _ => check(&|c| c / 2 * (rate / 2), rate / 2),
            }
        }
    }
}
