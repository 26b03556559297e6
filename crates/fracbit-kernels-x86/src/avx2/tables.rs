//! Which expander runs a codebook, and the constants it reads.

use super::{
    expand::{Fast, Gather, One, Two, kind},
    strips::strips,
    *,
};
use fracbit_format::{TILE_COLS, trellis::Steps};

/// The constants and the function for `codebook`, if there are.
pub(super) fn choose(codebook: &Codebook, _proof: Avx2) -> Option<(Vec<Line>, StripFn)> {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    match (scheme.family(), scheme.code()) {
        (Family::Nuq, _) => Some(if narrow { scalar(codebook) } else { wide(codebook) }),
        (Family::Vq, _) if narrow && scheme.quarters() <= 16 => Some(pairs(codebook)),
        (Family::Vq, _) => Some(gather(codebook)),
        (Family::Tcq, Some(Code::Fine)) if narrow => Some(fine(codebook)),
        (Family::Tcq, Some(Code::Fast)) if narrow => Some(fast(codebook)),
        (Family::Tcq, Some(Code::Hyb)) => Some(gather(codebook)),
        _ => None,
    }
}

fn scalar(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = windows(1, |c| c * bits, bits, 0);
    table.extend(byte_table(codebook, 1, 0));
    let run = match bits {
        2..=4 => strips::<One<1, false>> as StripFn,
        5 => strips::<One<2, false>>,
        6 => strips::<One<4, false>>,
        7 => strips::<One<8, false>>,
        _ => strips::<One<16, false>>,
    };
    (table, run)
}

fn fine(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let steps = Steps::of(codebook.scheme()).expect("a trellis scheme");
    let q = codebook.entries().len().trailing_zeros() as usize;
    let mut table = windows(1, |c| steps.position(c), q, 15 - q);
    table.extend(byte_table(codebook, 1, 0));
    let run = match q {
        6 => strips::<One<4, true>> as StripFn,
        7 => strips::<One<8, true>>,
        _ => strips::<One<16, true>>,
    };
    (table, run)
}

fn pairs(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 2);
    let mut table = windows(2, |p| p * bits, bits, 0);
    (0..2).for_each(|k| table.extend(byte_table(codebook, 2, k)));
    let run = match bits {
        3 | 4 => strips::<Two<1>> as StripFn,
        5 => strips::<Two<2>>,
        6 => strips::<Two<4>>,
        7 => strips::<Two<8>>,
        _ => strips::<Two<16>>,
    };
    (table, run)
}

fn fast(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let steps = Steps::of(codebook.scheme()).expect("a trellis scheme");
    let bits = codebook.entries().len().trailing_zeros() as usize;
    // Of four weights a step there is one window to a quad; it counts as the first of two pairs.
    let position = |p: usize| steps.position(if steps.weights == 4 { p / 2 } else { p });
    let mut table = windows(2, position, bits, 0);
    table.extend(byte_table(codebook, 1, 0));
    let run = match (steps.weights, bits) {
        (4, 6) => strips::<Fast<4, 4>> as StripFn,
        (4, _) => strips::<Fast<8, 4>>,
        (_, 6) => strips::<Fast<4, 2>>,
        _ => strips::<Fast<8, 2>>,
    };
    (table, run)
}

fn wide(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = windows(1, |c| c * bits, bits, 0);
    table.extend(dword_table(1 << bits, |i| codebook.entries()[i].cast_unsigned().into()));
    (table, strips::<Gather<{ kind::WIDE_ONE }, false>>)
}

fn gather(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    let entries = codebook.entries();
    let hash = scheme.family() == Family::Tcq;
    let step = usize::from(scheme.quarters() / 2);
    // A hash index has the sign of the first weight on top of the pair's index.
    let bits = if hash { entries.len().trailing_zeros() as usize } else { step };
    let mut table = windows(2, |p| p * step, bits, 16 - bits);
    let pairs = entries.len() / 2;
    table.extend(dword_table(1 << bits, |i| {
        let (a, b) = (entries[2 * (i % pairs)], entries[2 * (i % pairs) + 1]);
        let a = if i >= pairs { -a } else { a };
        if narrow {
            u32::from(a.to_le_bytes()[0]) | u32::from(b.to_le_bytes()[0]) << 8
        } else {
            u32::from(a.cast_unsigned()) | u32::from(b.cast_unsigned()) << 16
        }
    }));
    let run = match (narrow, hash) {
        (true, true) => strips::<Gather<{ kind::PAIRS }, true>> as StripFn,
        (true, false) => strips::<Gather<{ kind::PAIRS }, false>>,
        (false, true) => strips::<Gather<{ kind::WIDE_PAIRS }, true>>,
        (false, false) => strips::<Gather<{ kind::WIDE_PAIRS }, false>>,
    };
    (table, run)
}

/// The lines that `Windows` describes: window `i` of a row, for `weights` columns, starts at bit `position(i)`.
fn windows(weights: usize, position: impl Fn(usize) -> usize, bits: usize, shift: usize) -> Vec<Line> {
    let per_quad = 4 / weights;
    // Offsets of windows in a stretch that starts with the byte of its first window's first bit.
    let offset = |i: usize, each: usize| position(i) - position(i / each * each) / 8 * 8;
    let count = TILE_COLS / weights;
    let quads = (0..count).all(|i| offset(i, per_quad) <= 16);
    let each = if quads { per_quad } else { per_quad / 2 };
    let mut lines = vec![dwords(|pair| {
        let first = pair % 8 * 2 / weights / each * each;
        u32::try_from(position(first) / 8).expect("inside a row")
    })];
    lines.push(dwords(|i| {
        let i = i % count;
        let right = offset(i, each);
        assert!(right <= 16, "a 16-bit window fits its stretch");
        let low = i % per_quad < per_quad / 2;
        u32::try_from(if low { right } else { 16 - right }).expect("at most 16")
    }));
    lines.push(dwords(|i| u32::try_from([bits, shift][i % 2]).expect("at most 16")));
    lines
}

/// Entries `k`, `k + every`, ... as bytes, repeated to at least 64.
fn byte_table(codebook: &Codebook, every: usize, k: usize) -> Vec<Line> {
    let count = codebook.entries().len() / every;
    let byte = |i: usize| codebook.entries()[i % count * every + k].to_le_bytes()[0];
    (0..count.div_ceil(64)).map(|l| Line(std::array::from_fn(|i| byte(64 * l + i)))).collect()
}

fn dword_table(len: usize, entry: impl Fn(usize) -> u32) -> Vec<Line> {
    (0..len.div_ceil(16)).map(|l| dwords(|i| entry((16 * l + i) % len))).collect()
}

fn dwords(value: impl Fn(usize) -> u32) -> Line {
    let mut line = Line::ZERO;
    for (i, bytes) in line.0.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *bytes = value(i).to_le_bytes();
    }
    line
}
