//! Which expander runs a codebook, and the constants it reads.

use super::{
    expand::{Bytes, Loads, Wide},
    lookup::{Banks, Integers, Layered, Low, Ramped},
    narrow::{Fast, Fine, Scalar},
    paired::Paired,
    pairs::{FourRows, Pairs, Pairs16, Pairs256, Turned},
    products::strips,
    scalar::{FewBooks, InBytes, Odd},
    strips::strips as expanded,
    sums::{Eight, Four, Sums},
    *,
};
use fracbit_base::Books;
use fracbit_format::{PiecewiseLinear, TILE_COLS, TwoLevel};

/// A function without the instructions of [`AvxVnni`], and with them; of two microkernels where
/// these differ.
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
        (Family::Vq, _) => Some(loads(codebook)),
        (Family::Tcq(Code::Fine), _) if narrow => Some(fine(codebook)),
        (Family::Tcq(Code::Fast), _) if narrow => Some(fast(codebook)),
        (Family::Tcq(Code::Hyb), _) => Some(loads(codebook)),
        (Family::Additive(books), _) => additive(codebook, books),
        _ => None,
    }
}

/// The microkernels of a type, or of two (see [`both`]), for each rate `R` in quarters of a bit.
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
        8 => both!(strips, InBytes<8, 4>),
        12 => both!(strips, Odd<12, Banks<1, false>>),
        16 => both!(strips, InBytes<16, 2>),
        32 if codebook.scheme().family() == Family::Int => both!(strips, Scalar<32, Integers>),
        20 => both!(strips, Odd<20, Banks<2, false>>),
        24 => both!(strips, Scalar<24, Banks<4, false>>),
        28 => both!(strips, Scalar<28, Banks<8, false>>),
        // Fewer values, repeated: what is read of nested codes.
        _ => match repeated(codebook.entries()) {
            ..=32 => both!(strips, Scalar<32, Low<Banks<2, false>>>),
            64 => both!(strips, Scalar<32, Low<Banks<4, false>>>),
            128 => both!(strips, Scalar<32, Low<Banks<8, false>>>),
            _ => both!(strips, Scalar<32, Banks<16, false>>),
        },
    };
    (byte_table(codebook, 1, 0, 0), run)
}

/// After how many of its entries, a power of two from 32 on, a table repeats.
fn repeated(entries: &[i16]) -> usize {
    let mut len = entries.len();
    while len > 32 && entries[..len / 2] == entries[len / 2..len] {
        len /= 2;
    }
    len
}

fn group_wise(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    // A codebook alone has no number.
    if codebook.books() == 1 && [8, 16].contains(&codebook.scheme().quarters()) {
        return scalar(codebook);
    }
    let run = match (codebook.scheme().quarters(), codebook.entries().len()) {
        (8, ..=16) => both!(strips, FewBooks<InBytes<8, 4>, 8, 1>),
        (8, 32) => both!(strips, FewBooks<InBytes<8, 4>, 8, 2>),
        (8, _) => both!(strips, FewBooks<InBytes<8, 4>, 8, 4>),
        (12, ..=16) => both!(strips, FewBooks<Odd<12, Banks<1, false>>, 12, 1>),
        (12, 32) => both!(strips, FewBooks<Odd<12, Banks<1, false>>, 12, 2>),
        (12, _) => both!(strips, FewBooks<Odd<12, Banks<1, false>>, 12, 4>),
        (_, 32) => both!(strips, FewBooks<InBytes<16, 2>, 16, 2>),
        (..) => both!(strips, FewBooks<InBytes<16, 2>, 16, 4>),
    };
    let mut table = byte_table(codebook, 1, 0, 0);
    table.push(Line([u8::try_from(codebook.books() - 1).expect("at most 16 codebooks"); 64]));
    (table, run)
}

/// For codebooks on the int8 grid, which all of them are.
fn additive(codebook: &Codebook, books: Books) -> Option<(Vec<Line>, [StripFn; 2])> {
    let bytes = books.of_bytes();
    let run = match (bytes.count(), bytes.weights()) {
        (1, 4) => both!(strips, Sums<Four, 1>),
        (1, 8) => both!(strips, Sums<Eight, 1>),
        (2, 8) => both!(strips, Sums<Eight, 2>),
        (3, 8) => both!(strips, Sums<Eight, 3>),
        _ => return None,
    };
    let centroids = codebook.byte_centroids()?;
    let line = |bytes: &[i16; 64]| Line(bytes.map(|entry| entry.to_le_bytes()[0]));
    Some((centroids.as_chunks().0.iter().map(line).collect(), run))
}

/// Tables of the sizes that built-in ones have at their rates run the best microkernels, all others
/// those for any entries.
fn fine(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let quarters = codebook.scheme().quarters();
    macro_rules! all {
        ($($body:ty),+) => {
            rates!(quarters, [4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20], $($body),+)
        };
    }
    if let (..=10, Some(ramp)) = (quarters, codebook.piecewise_linear()) {
        let run = match quarters {
            ..=8 => rates!(quarters, [4 5 6 7 8], Fine<R, Ramped<false>>, Fine<R, Ramped<true>>),
            _ => rates!(quarters, [9 10], Paired<Fine<R, Ramped<false>>>, Paired<Fine<R, Ramped<true>>>),
        };
        return (piecewise_linear_table(codebook, ramp), run);
    }
    // Of 256 entries, the byte of a sign tells the first two from the others, but not from one
    // another.
    let zero = codebook.entries().iter().take(codebook.entries().len().div_ceil(128)).all(|&e| e == 0);
    match (codebook.entries().len(), quarters, codebook.two_level()) {
        (128, 12 | 13 | 17, Some(layers)) if zero => {
            let run = match quarters {
                17 => rates!(quarters, [17], Fine<R, Layered<2, true>>, Fine<R, Layered<2, false>>),
                _ => {
                    rates!(quarters, [12 13], Paired<Fine<R, Layered<2, true>>>, Paired<Fine<R, Layered<2, false>>>)
                }
            };
            (two_level_table(codebook, &layers), run)
        }
        (128, 14..=16, Some(layers)) => {
            let run = match quarters {
                15 => rates!(quarters, [15], Fine<R, Layered<2, false>>),
                _ => rates!(quarters, [14 16], Paired<Fine<R, Layered<2, false>>>),
            };
            (two_level_table(codebook, &layers), run)
        }
        (256, 18.., Some(layers)) if zero => (
            two_level_table(codebook, &layers),
            rates!(quarters, [18 19 20], Fine<R, Layered<4, true>>, Fine<R, Layered<4, false>>),
        ),
        (64, 11, Some(layers)) if zero => {
            type Plain = Paired<Fine<11, Layered<1, true>>>;
            (two_level_table(codebook, &layers), both!(strips, Plain, Paired<Fine<11, Layered<1, false>>>))
        }
        (len, ..) => {
            let run = match len {
                64 if magnitudes(codebook) => all!(Fine<R, Banks<4, true>>, Fine<R, Banks<4, false>>),
                64 => all!(Fine<R, Banks<4, false>>),
                128 => all!(Fine<R, Banks<8, false>>),
                _ => all!(Fine<R, Banks<16, false>>),
            };
            (byte_table(codebook, 1, 0, 0), run)
        }
    }
}

/// Whether no entry is negative. A file may have others; some that are built in do.
fn magnitudes(codebook: &Codebook) -> bool {
    codebook.entries().iter().all(|&entry| entry >= 0)
}

fn pairs(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    if let Some(quarter) = codebook.quarter() {
        let run = match codebook.scheme().quarters() {
            14 => both!(strips, FourRows<Turned<14, 2>>),
            _ => both!(strips, Turned<16, 4>),
        };
        let line =
            |k: usize| Line(std::array::from_fn(|i| quarter[(2 * i + k) % quarter.len()].to_le_bytes()[0]));
        return (vec![line(0), line(1)], run);
    }
    let run = match codebook.scheme().quarters() {
        6 => both!(strips, Pairs<6, 1>),
        8 => both!(strips, Pairs16),
        10 => both!(strips, FourRows<Pairs<10, 2>>),
        12 => both!(strips, FourRows<Pairs<12, 4>>),
        14 => both!(strips, FourRows<Pairs<14, 8>>),
        _ => both!(strips, Pairs256),
    };
    let mut table = byte_table(codebook, 2, 0, 0);
    table.extend(byte_table(codebook, 2, 1, 0));
    (table, run)
}

fn fast(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let quarters = codebook.scheme().quarters();
    match (quarters, codebook.two_level(), codebook.entries()[0] == 0) {
        (12, Some(layers), true) if codebook.entries().len() == 64 => {
            type Plain = Paired<Fast<12, 2, Layered<1, true>>>;
            let run = both!(strips, Plain, Paired<Fast<12, 2, Layered<1, false>>>);
            return (two_level_table(codebook, &layers), run);
        }
        (14, Some(layers), _) if codebook.entries().len() == 128 => {
            let run = rates!(quarters, [14], Paired<Fast<R, 2, Layered<2, false>>>);
            return (two_level_table(codebook, &layers), run);
        }
        (16.., Some(layers), true) if codebook.entries().len() == 128 => {
            type Plain = Layered<2, true>;
            type Vnni = Layered<2, false>;
            let run = match quarters {
                16 => rates!(quarters, [16], Paired<Fast<R, 2, Plain>>, Paired<Fast<R, 2, Vnni>>),
                _ => rates!(quarters, [18 20], Fast<R, 2, Plain>, Fast<R, 2, Vnni>),
            };
            return (two_level_table(codebook, &layers), run);
        }
        _ => {}
    }
    if let (..=10, Some(ramp)) = (quarters, codebook.piecewise_linear()) {
        let run = if quarters <= 8 {
            rates!(quarters, [4 5 6 7 8], Fast<R, 4, Ramped<false>>, Fast<R, 4, Ramped<true>>)
        } else {
            rates!(quarters, [10], Paired<Fast<R, 2, Ramped<false>>>, Paired<Fast<R, 2, Ramped<true>>>)
        };
        return (piecewise_linear_table(codebook, ramp), run);
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
    (byte_table(codebook, 1, 0, 0), run)
}

fn wide(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let run = match codebook.scheme().quarters() {
        8 => both!(expanded, Wide<8, 1>),
        12 => both!(expanded, Wide<12, 1>),
        16 => both!(expanded, Wide<16, 1>),
        20 => both!(expanded, Wide<20, 2>),
        24 => both!(expanded, Wide<24, 4>),
        28 => both!(expanded, Wide<28, 8>),
        _ => {
            let entry = |i: usize| u32::from(codebook.entries()[i % 256].cast_unsigned());
            return (dword_table(512, |i| entry(i) << (i / 256 * 16)), both!(expanded, Bytes));
        }
    };
    let mut table = byte_table(codebook, 1, 0, 0);
    table.extend(byte_table(codebook, 1, 0, 1));
    (table, run)
}

fn loads(codebook: &Codebook) -> (Vec<Line>, [StripFn; 2]) {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    let entries = codebook.entries();
    let hash = matches!(scheme.family(), Family::Tcq(_));
    let step = usize::from(scheme.quarters() / 2);
    // A hash index has the sign of the first weight on top of the pair's index.
    let bits = if hash { entries.len().trailing_zeros() as usize } else { step };
    let mut table = windows(|p| p * step, bits, 16 - bits);
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
        (true, true) => both!(expanded, Loads<false, true>),
        (true, false) => both!(expanded, Loads<false, false>),
        (false, true) => both!(expanded, Loads<true, true>),
        (false, false) => both!(expanded, Loads<true, false>),
    };
    (table, run)
}

/// The lines that `Windows` describes: the window of pair `p` of a row starts at bit `position(p)`.
fn windows(position: impl Fn(usize) -> usize, bits: usize, shift: usize) -> Vec<Line> {
    const PAIRS: usize = TILE_COLS / 2;
    // Offsets of windows in a stretch that starts with the byte of its first window's first bit.
    let offset = |p: usize, each: usize| position(p) - position(p / each * each) / 8 * 8;
    let each = if (0..PAIRS).all(|p| offset(p, 2) <= 16) { 2 } else { 1 };
    let line =
        |value: &dyn Fn(usize) -> usize| dwords(|i| u32::try_from(value(i % PAIRS)).expect("inside a row"));
    vec![
        line(&|p| position(p / each * each) / 8),
        line(&|p| {
            let right = offset(p, each);
            assert!(right <= 16, "a 16-bit window fits its stretch");
            if p % 2 == 0 { right } else { 16 - right }
        }),
        line(&|i| [bits, shift][i % 2]),
    ]
}

/// Bytes `byte` (0 is the low one) of entries `k`, `k + every`, ..., repeated to at least 64.
fn byte_table(codebook: &Codebook, every: usize, k: usize, byte: usize) -> Vec<Line> {
    let count = codebook.entries().len() / every;
    let byte = |i: usize| codebook.entries()[i % count * every + k].to_le_bytes()[byte];
    (0..count.div_ceil(64)).map(|l| Line(std::array::from_fn(|i| byte(64 * l + i)))).collect()
}

/// What [`Ramped`] reads: what the last quarter has above the ramp, and the mask of an index.
pub(super) fn piecewise_linear_table(codebook: &Codebook, ramp: PiecewiseLinear) -> Vec<Line> {
    let mut line = Line::ZERO;
    for ((x, &entry), byte) in
        codebook.entries().iter().enumerate().skip(PiecewiseLinear::FREE).zip(&mut line.0)
    {
        // Ends of an index whose lowest bit does not count are never read.
        *byte = (entry - PiecewiseLinear::at(x)).to_le_bytes()[0];
    }
    line.0[PiecewiseLinear::LEN - PiecewiseLinear::FREE] = ramp.mask;
    vec![line]
}

/// What [`Layered`] reads: coarse and fine entries, then for every sixteen of the last quarter what
/// they have above the sum, or above the sixteen before.
pub(super) fn two_level_table(codebook: &Codebook, layers: &TwoLevel) -> Vec<Line> {
    let entries = codebook.entries();
    let free = TwoLevel::free(entries.len());
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
