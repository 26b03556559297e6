//! Which expander runs a codebook, and the constants it reads.

use super::{
    expand::{Gather, kind},
    lookup::{Banks, Layered},
    narrow::{Books, Fast, Fine, Pairs, Pairs16, Pairs256, Scalar, Scalar4, Scalar16},
    products::strips,
    strips::strips as gathers,
    *,
};
use fracbit_format::{Layers, TILE_COLS};

/// A function without the instructions of [`AvxVnni`], and with them; of two bodies where these differ.
macro_rules! both {
    ($strips:ident, $body:ty) => {
        both!($strips, $body, $body)
    };
    ($strips:ident, $plain:ty, $vnni:ty) => {
        [$strips::<$plain, false> as StripFn, $strips::<$vnni, true>]
    };
}

/// The constants and the functions for `codebook`, if there are: for AVX2, and for AVX-VNNI.
pub(super) fn choose(codebook: &Codebook) -> Option<(Vec<Line>, [StripFn; 2])> {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    match (scheme.family(), scheme.code()) {
        (Family::Nuq | Family::Int, _) => Some(if narrow { scalar(codebook) } else { wide(codebook) }),
        (Family::Gnuq, _) => Some(group_wise(codebook)),
        (Family::Vq, _) if narrow && scheme.quarters() <= 16 => Some(pairs(codebook)),
        (Family::Vq, _) => Some(gather(codebook)),
        (Family::Tcq, Some(Code::Fine)) if narrow => Some(fine(codebook)),
        (Family::Tcq, Some(Code::Fast)) if narrow => Some(fast(codebook)),
        (Family::Tcq, Some(Code::Hyb)) => Some(gather(codebook)),
        _ => None,
    }
}

/// The bodies of a type, or of two (see [`both`]), for each rate `R` in quarters of a bit.
macro_rules! rates {
    ($quarters:expr, $rates:tt, $body:ty) => {
        rates!($quarters, $rates, $body, $body)
    };
    ($quarters:expr, [$($rate:literal)*], $plain:ty, $vnni:ty) => {
        match $quarters {
            $($rate => {
                const R: usize = $rate;
                both!(strips, $plain, $vnni)
            })*
            other => unreachable!("{other} quarters of a bit"),
        }
    };
}

fn scalar(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let run = match codebook.scheme().quarters() {
        8 => both!(strips, Scalar4),
        12 => both!(strips, Scalar<12, 1>),
        16 => both!(strips, Scalar16),
        20 => both!(strips, Scalar<20, 2>),
        24 => both!(strips, Scalar<24, 4>),
        28 => both!(strips, Scalar<28, 8>),
        _ => both!(strips, Scalar<32, 16>),
    };
    (byte_table(codebook, 1, 0), run)
}

fn group_wise(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    // A codebook alone has no number.
    if codebook.books() == 1 && [8, 16].contains(&codebook.scheme().quarters()) {
        return scalar(codebook);
    }
    let run = match (codebook.scheme().quarters(), codebook.entries().len()) {
        (8, ..=16) => both!(strips, Books<8, 1>),
        (8, 32) => both!(strips, Books<8, 2>),
        (8, _) => both!(strips, Books<8, 4>),
        (12, ..=16) => both!(strips, Books<12, 1>),
        (12, 32) => both!(strips, Books<12, 2>),
        (12, _) => both!(strips, Books<12, 4>),
        (_, 32) => both!(strips, Books<16, 2>),
        (..) => both!(strips, Books<16, 4>),
    };
    let mut table = byte_table(codebook, 1, 0);
    table.push(Line([u8::try_from(codebook.books() - 1).expect("at most 16 codebooks"); 64]));
    (table, run)
}

/// Tables of the sizes that built-in ones have at their rates run the best bodies, all others those for any entries.
fn fine(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let quarters = codebook.scheme().quarters();
    macro_rules! all {
        ($($body:ty),+) => {
            rates!(quarters, [4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20], $($body),+)
        };
    }
    match (codebook.entries().len(), quarters, codebook.layers()) {
        (128, 12..=17, Some(layers)) => {
            (layer_table(codebook, &layers), rates!(quarters, [12 13 14 15 16 17], Fine<R, Layered<2>>))
        }
        (256, 18.., Some(layers)) => {
            (layer_table(codebook, &layers), rates!(quarters, [18 19 20], Fine<R, Layered<4>>))
        }
        (len, ..) => {
            let run = match len {
                64 if magnitudes(codebook) => all!(Fine<R, Banks<4, true>>, Fine<R, Banks<4, false>>),
                64 => all!(Fine<R, Banks<4, false>>),
                128 => all!(Fine<R, Banks<8, false>>),
                _ => all!(Fine<R, Banks<16, false>>),
            };
            (byte_table(codebook, 1, 0), run)
        }
    }
}

/// Whether no entry is negative. A file may have others; some that are built in do.
fn magnitudes(codebook: &Codebook) -> bool {
    codebook.entries().iter().all(|&entry| entry >= 0)
}

fn pairs(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let run = match codebook.scheme().quarters() {
        6 => both!(strips, Pairs<6, 1>),
        8 => both!(strips, Pairs16),
        10 => both!(strips, Pairs<10, 2>),
        12 => both!(strips, Pairs<12, 4>),
        14 => both!(strips, Pairs<14, 8>),
        _ => both!(strips, Pairs256),
    };
    let mut table = byte_table(codebook, 2, 0);
    table.extend(byte_table(codebook, 2, 1));
    (table, run)
}

fn fast(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let quarters = codebook.scheme().quarters();
    if let (14.., Some(layers)) = (quarters, codebook.layers()) {
        return (layer_table(codebook, &layers), rates!(quarters, [14 16 18 20], Fast<R, 2, Layered<2>>));
    }
    let run = match (quarters, codebook.entries().len()) {
        (..=8, 64) if magnitudes(codebook) => {
            rates!(quarters, [4 5 6 7 8], Fast<R, 4, Banks<4, true>>, Fast<R, 4, Banks<4, false>>)
        }
        (..=8, 64) => rates!(quarters, [4 5 6 7 8], Fast<R, 4, Banks<4, false>>),
        (..=8, _) => rates!(quarters, [4 5 6 7 8], Fast<R, 4, Banks<8, false>>),
        (_, 64) if magnitudes(codebook) => {
            rates!(quarters, [10 12 14 16 18 20], Fast<R, 2, Banks<4, true>>, Fast<R, 2, Banks<4, false>>)
        }
        (_, 64) => rates!(quarters, [10 12 14 16 18 20], Fast<R, 2, Banks<4, false>>),
        _ => rates!(quarters, [10 12 14 16 18 20], Fast<R, 2, Banks<8, false>>),
    };
    (byte_table(codebook, 1, 0), run)
}

fn wide(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let bits = usize::from(codebook.scheme().quarters() / 4);
    let mut table = windows(1, |c| c * bits, bits, 0);
    table.extend(dword_table(1 << bits, |i| codebook.entries()[i].cast_unsigned().into()));
    (table, both!(gathers, Gather<{ kind::WIDE_ONE }, false>))
}

fn gather(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
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
        (true, true) => both!(gathers, Gather<{ kind::PAIRS }, true>),
        (true, false) => both!(gathers, Gather<{ kind::PAIRS }, false>),
        (false, true) => both!(gathers, Gather<{ kind::WIDE_PAIRS }, true>),
        (false, false) => both!(gathers, Gather<{ kind::WIDE_PAIRS }, false>),
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

/// What [`Layered`] reads: coarse and fine entries, then for every sixteen of the last quarter what they have above the sum, or above the
/// sixteen before.
fn layer_table(codebook: &Codebook, layers: &Layers) -> Vec<Line> {
    let entries = codebook.entries();
    let free = Layers::free(entries.len());
    let before = [&layers.fine, &entries[free..]].concat();
    let ends = entries[free..].iter().zip(before).map(|(entry, before)| entry - before);
    let all: Vec<u8> = layers
        .coarse
        .into_iter()
        .chain(layers.fine)
        .map(|e| e.to_le_bytes()[0])
        .chain(ends.map(|e| e.to_le_bytes()[0]))
        .collect();
    let line = |bytes: &[u8]| {
        let mut line = Line::ZERO;
        line.0[..bytes.len()].copy_from_slice(bytes);
        line
    };
    // Ends begin with a line of their own.
    [line(&all[..32])].into_iter().chain(all[32..].chunks(64).map(line)).collect()
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
