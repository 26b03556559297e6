//! Tables that turn codes into integers.

use crate::{
    Index, SchemeSpec, SecondLevel, TILE, TILE_COLS, TILE_ROWS, TableSpec, bits::read_bits, trellis,
};
use fracbit_base::{Code, Family, Scheme};
use std::{borrow::Cow, fmt, str::FromStr};

/// Integer width that a codebook's entries need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Every entry lies in -127..=127: kernels take the int8 dot products.
    I8,
    /// Some entry needs 16 bits: kernels take the int16 dot products.
    I16,
}

/// Most entries of all codebooks of a group-wise scheme together: four registers of sixteen bytes.
pub const MOST_GROUP_ENTRIES: usize = 64;

/// The table of one scalar, vector or trellis scheme: integers and the step that makes them
/// unit-variance weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Codebook {
    scheme: Scheme,
    entries: Vec<i16>,
    step: f32,
    grid: Grid,
}

/// A table that does not fit its scheme.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CodebookError {
    /// Half-trellis schemes use the codebooks of their two halves.
    #[error("codebook: {0} has no table of its own, use those of its two halves")]
    Composite(Scheme),
    /// The number of entries does not match the scheme.
    #[error("codebook of {scheme}: expected {want} entries, got {got}")]
    Length {
        /// The scheme.
        scheme: Scheme,
        /// Allowed lengths.
        want: String,
        /// Given length.
        got: usize,
    },
    /// The step is not a positive finite number.
    #[error("codebook of {scheme}: the step should be positive and finite, got {step}")]
    Step {
        /// The scheme.
        scheme: Scheme,
        /// Given step.
        step: f32,
    },
    /// -32768 has no negative and is not allowed.
    #[error("codebook of {0}: entries should lie in -32767..=32767")]
    Range(Scheme),
    /// Codes that are integers are their own table.
    #[error(
        "codebook of {0}: entries should be the integers of the code: two's complement, the least replaced by its successor at 8 bits (int), or 0 to 15 (qoq)"
    )]
    Integers(Scheme),
    /// Group-wise and nested codebooks are made for int8 products.
    #[error("codebook of {0}: entries should lie in -127..=127")]
    Narrow(Scheme),
    /// Centroids of additive codebooks whose sums leave the int8 grid.
    #[error("codebook of {0}: sums of one entry of each codebook should lie in -127..=127")]
    Sums(Scheme),
    /// A line of text that is no codebook.
    #[error("codebook: expected `scheme step entry ...`, found no {0}")]
    Text(String),
}

/// A table of 64, 128 or 256 entries whose first three quarters are sums: with `n` entries, entry
/// `x < 3 n / 4` is `coarse[16 x / n] + fine[x mod 16]`. The last quarter, where magnitudes grow
/// fast, is free.
///
/// Processors that look up in 16 entries at a time then need three, four or six lookups instead of
/// four, eight or sixteen. Trained tables lose nothing to speak of by it
/// (`docs/lab/2026-11-codes.md`): how magnitudes are spread matters to a trellis, not where each of
/// them lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoLevel {
    /// One for each sixteenth of the table; those of the last quarter are zero.
    pub coarse: [i16; 16],
    /// One for each place in sixteen.
    pub fine: [i16; 16],
}

impl TwoLevel {
    /// Whether a table of `len` entries may be one.
    #[must_use]
    pub const fn fit(len: usize) -> bool {
        matches!(len, 64 | 128 | 256)
    }

    /// First entry of the free quarter of a table of `len` entries.
    #[must_use]
    pub const fn free(len: usize) -> usize {
        len / 4 * 3
    }

    /// The two levels of `entries`, if they are such sums.
    fn of(entries: &[i16]) -> Option<Self> {
        if !Self::fit(entries.len()) {
            return None;
        }
        let (each, free) = (entries.len() / 16, Self::free(entries.len()));
        let layers = Self {
            coarse: std::array::from_fn(|i| if i * each < free { entries[i * each] } else { 0 }),
            fine: std::array::from_fn(|i| entries[i].saturating_sub(entries[i / each * each])),
        };
        let sum = |x: usize| i32::from(layers.coarse[x / each]) + i32::from(layers.fine[x % 16]);
        (0..free).all(|x| sum(x) == i32::from(entries[x])).then_some(layers)
    }
}

/// A table of 64 magnitudes whose first three quarters are a formula: entry `x < 48` is `x +
/// max(x - 42, 0)`, with `x` cut to its even neighbour where neighbours are equal. The last
/// quarter, where magnitudes grow fast, is free.
///
/// Processors that look up in 16 entries at a time then need one lookup instead of four. In grid
/// units a trained table has the same course but for noise (`docs/lab/2026-11-codes.md` has what it
/// costs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PiecewiseLinear {
    /// The bits of an index that count: 63, or 62 where neighbours are equal.
    pub mask: u8,
}

impl PiecewiseLinear {
    /// Entries of a table that may be one.
    pub const LEN: usize = 64;
    /// First entry of the free quarter.
    pub const FREE: usize = 48;
    /// From here on it rises by two.
    pub const BEND: usize = 42;

    /// The formula at `x`.
    #[must_use]
    pub const fn at(x: usize) -> i16 {
        #[expect(clippy::cast_possible_truncation, reason = "a table has 64 entries")]
        {
            (x + x.saturating_sub(Self::BEND)) as i16
        }
    }

    /// The formula of `entries`, if they follow one.
    fn of(entries: &[i16]) -> Option<Self> {
        let same = |mask: u8| {
            let at = |x: usize| x & usize::from(mask);
            entries.len() == Self::LEN
                && entries
                    .iter()
                    .enumerate()
                    .all(|(x, &e)| e == if x < Self::FREE { Self::at(at(x)) } else { entries[at(x)] })
        };
        [63, 62].into_iter().find(|&mask| same(mask)).map(|mask| Self { mask })
    }
}

impl Codebook {
    /// A codebook for `scheme` (not half-TCQ): `entries` on the integer grid, `step` the weight of
    /// one grid unit for a source of unit variance.
    ///
    /// # Errors
    /// When the number of entries, their range or the step does not fit the scheme.
    pub fn new(scheme: Scheme, entries: Vec<i16>, step: f32) -> Result<Self, CodebookError> {
        let Some(TableSpec { lengths: allowed, .. }) = SchemeSpec::of(scheme).table else {
            return Err(CodebookError::Composite(scheme));
        };
        if !allowed.contains(&entries.len()) {
            let want = allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(CodebookError::Length { scheme, want, got: entries.len() });
        }
        if !(step.is_finite() && step > 0.0) {
            return Err(CodebookError::Step { scheme, step });
        }
        if entries.contains(&i16::MIN) {
            return Err(CodebookError::Range(scheme));
        }
        let narrow = entries.iter().all(|e| (-127..=127).contains(e));
        let integers = |code: usize| Self::integer(scheme, code).is_none_or(|value| entries[code] == value);
        if !(0..entries.len()).all(integers) {
            return Err(CodebookError::Integers(scheme));
        }
        if matches!(scheme.family(), Family::Gnuq | Family::NestNuq(_)) && !narrow {
            return Err(CodebookError::Narrow(scheme));
        }
        if let Family::Additive(books) = scheme.family() {
            // Any codes may meet: the largest entries of each codebook, and the least.
            let (weights, each) = (books.weights(), entries.len() / books.count());
            let of = |book: &[i16], k: usize| {
                let column = || book[k..].iter().step_by(weights).copied().map(i32::from);
                [column().min().unwrap_or(0), column().max().unwrap_or(0)]
            };
            let ends = |k: usize| {
                let all = entries.chunks_exact(each).map(|book| of(book, k));
                all.fold([0; 2], |[low, high], [least, most]| [low + least, high + most])
            };
            if !(0..weights).map(ends).all(|[low, high]| low >= -127 && high <= 127) {
                return Err(CodebookError::Sums(scheme));
            }
        }
        Ok(Self { scheme, entries, step, grid: if narrow { Grid::I8 } else { Grid::I16 } })
    }

    /// What code `code` means in a scheme whose codes are integers: two's complement, with -127 for
    /// the unused -128, or, in a progressive scheme with scale 1 and zero 0, the code itself.
    /// `None` for other families and codes.
    #[must_use]
    pub fn integer(scheme: Scheme, code: usize) -> Option<i16> {
        let bits = scheme.quarters() / 4;
        if !matches!(scheme.family(), Family::Int | Family::Qoq(_)) || code >> bits != 0 {
            return None;
        }
        let code = i16::try_from(code).ok()?;
        if scheme.family() != Family::Int {
            return Some(code);
        }
        let value = if code >> (bits - 1) == 0 { code } else { code - (1 << bits) };
        Some(value.max(-127))
    }

    /// Codebooks in the table of a group-wise scheme, a power of two; 1 for every other.
    #[must_use]
    pub fn books(&self) -> usize {
        match self.scheme.family() {
            Family::Gnuq => self.entries.len() >> (self.scheme.quarters() / 4),
            _ => 1,
        }
    }

    /// How codes find their centroids in additive codebooks: entries are `(book, centroid,
    /// weight)`, and codes of a tile `(columns of a centroid, book, row)`, a byte each, or the low
    /// and high halves of one for an even book and the next. `None` for every other scheme.
    #[must_use]
    pub fn additive(&self) -> Option<Index> {
        let Family::Additive(books) = self.scheme.family() else { return None };
        Some(Index { bits: books.bits(), weights: books.weights(), count: books.count() })
    }

    /// Additive codebooks as a reader of bytes wants them, `(byte of a vector's codes, its 256
    /// values, weight)`: the entries, or the sums of two centroids whose codes are halves of a
    /// byte. `None` for every other scheme.
    #[must_use]
    pub fn byte_centroids(&self) -> Option<Cow<'_, [i16]>> {
        let Index { bits, weights, .. } = self.additive()?;
        if bits == 8 {
            return Some(Cow::Borrowed(&self.entries));
        }
        let mut sums = Vec::with_capacity(self.entries.len() * 8);
        for books in self.entries.chunks_exact(32 * weights) {
            let (low, high) = books.split_at(16 * weights);
            for high in high.chunks_exact(weights) {
                for low in low.chunks_exact(weights) {
                    sums.extend(low.iter().zip(high).map(|(low, high)| low + high));
                }
            }
        }
        Some(Cow::Owned(sums))
    }

    /// The codebook of the group that has this scale: group-wise schemes keep its number in the
    /// lowest bits of the scale, where it costs nothing and moves the scale by at most `books /
    /// 2^11` of itself. 0 for every other scheme.
    #[must_use]
    pub fn book_of(&self, scale: half::f16) -> u8 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 16 codebooks")]
        {
            (usize::from(scale.to_bits()) & (self.books() - 1)) as u8
        }
    }

    /// The scale nearest to `scale` (finite) that says codebook `book`. A negative scale mirrors
    /// the codebook.
    ///
    /// # Panics
    /// When there is no such codebook.
    #[must_use]
    pub fn scale_of(&self, scale: half::f16, book: u8) -> half::f16 {
        let count = u16::try_from(self.books()).expect("at most 16 codebooks");
        assert!(u16::from(book) < count, "codebook {book} of {count}");
        let sign = scale.to_bits() & 0x8000;
        let bits = scale.to_bits() & 0x7fff;
        let here = bits & !(count - 1) | u16::from(book);
        let near = [here.wrapping_sub(count), here, here + count]
            .into_iter()
            .filter(|&bits| half::f16::from_bits(bits).is_finite() && bits >> 15 == 0)
            .map(|bits| half::f16::from_bits(bits | sign));
        let off = |s: &half::f16| (s.to_f32() - scale.to_f32()).abs();
        near.min_by(|a, b| off(a).total_cmp(&off(b))).expect("the middle one is finite")
    }

    /// The table as [`TwoLevel`], if it is one of magnitudes that can be written so.
    #[must_use]
    pub fn two_level(&self) -> Option<TwoLevel> {
        TwoLevel::of(&self.entries).filter(|_| self.magnitudes())
    }

    /// The table as a [`PiecewiseLinear`], if it is one.
    #[must_use]
    pub fn piecewise_linear(&self) -> Option<PiecewiseLinear> {
        PiecewiseLinear::of(&self.entries).filter(|_| self.magnitudes())
    }

    /// Whether entries are magnitudes of a trellis code, none of them negative, on the int8 grid.
    fn magnitudes(&self) -> bool {
        let signed_apart = matches!(self.scheme.family(), Family::Tcq(Code::Fine | Code::Fast));
        signed_apart && self.grid == Grid::I8 && self.entries.iter().all(|&e| e >= 0)
    }

    /// The first quarter of a table of 128 or 256 pairs whose other quarters are the same pairs,
    /// turned: entry `q n / 4 + i` is entry `i` after `q` quarter turns clockwise, (x, y), (y, -x),
    /// (-x, -y) or (-y, x), and no number of the first quarter is negative.
    ///
    /// So the top bit of a code is the sign of the first number, and the next one says whether the
    /// two numbers have changed places; their exclusive or is the sign of the second. Processors
    /// that look up in few entries at a time then need a quarter of the lookups, and a codebook for
    /// a circular source loses nothing by it (`docs/lab/2026-11-codes.md`).
    #[must_use]
    pub fn quarter(&self) -> Option<&[i16]> {
        if !Self::may_be_turned(self.scheme) {
            return None;
        }
        let (pairs, _) = self.entries.as_chunks::<2>();
        let (first, each) = (&self.entries[..self.entries.len() / 4], pairs.len() / 4);
        let same = |(i, &pair): (usize, &[i16; 2])| pair == quarter_turns(pairs[i % each], i / each);
        (first.iter().all(|&v| v >= 0) && pairs.iter().enumerate().all(same)).then_some(first)
    }

    /// Whether a scheme has tables of 128 or 256 pairs, which may be a [quarter](Self::quarter) of
    /// themselves.
    #[must_use]
    pub fn may_be_turned(scheme: Scheme) -> bool {
        scheme.family() == Family::Vq && matches!(scheme.quarters(), 14 | 16)
    }

    /// The scheme this table belongs to.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The values that the lower `bits` bits of a nested scheme's codes stand for; `None` where
    /// these are no codes, and for every other scheme.
    #[must_use]
    pub fn at(&self, bits: u32) -> Option<&[i16]> {
        let Family::NestNuq(ladder) = self.scheme.family() else { return None };
        let first = (1usize << bits).checked_sub(1 << ladder.low())?;
        self.entries.get(first..first + (1 << bits))
    }

    /// The table: `2^b` values (scalar), those of every precision (nested, see
    /// [`at`](Self::at)), `2^b` pairs (vector), centroids (see
    /// [`additive`](Self::additive)), or magnitudes as [`trellis`] describes.
    #[must_use]
    pub fn entries(&self) -> &[i16] {
        &self.entries
    }

    /// Weight of one grid unit for a source of unit variance.
    #[must_use]
    pub const fn step(&self) -> f32 {
        self.step
    }

    /// The integer width the entries need.
    #[must_use]
    pub const fn grid(&self) -> Grid {
        self.grid
    }

    /// Bytes of one coded tile.
    #[must_use]
    pub const fn tile_bytes(&self) -> usize {
        self.scheme.quarters() as usize * TILE / 32
    }

    /// Expands one coded tile to integers, row-major: the scalar reference of every kernel. A
    /// group-wise scheme takes its first codebook, a progressive one scale 1 and zero 0.
    ///
    /// # Panics
    /// When `code` is not [`tile_bytes`](Self::tile_bytes) long.
    pub fn expand_tile(&self, code: &[u8], out: &mut [i16; TILE]) {
        self.expand(code, 0, 0, out);
    }

    /// As [`expand_tile`](Self::expand_tile), with the codebook of every row (see
    /// [`book_of`](Self::book_of)); numbers that are too large wrap. A progressive scheme takes the
    /// bytes of its [`SecondLevel`] instead.
    ///
    /// # Panics
    /// When `code` is not [`tile_bytes`](Self::tile_bytes) long.
    pub fn expand_tile_by(&self, code: &[u8], books: &[u8; TILE_ROWS], out: &mut [i16; TILE]) {
        let progressive = matches!(self.scheme.family(), Family::Qoq(_));
        if self.books() == 1 && !progressive {
            return self.expand(code, 0, 0, out);
        }
        for (r, (row, &book)) in out.as_chunks_mut::<TILE_COLS>().0.iter_mut().zip(books).enumerate() {
            self.expand(code, r * TILE_COLS, book, row);
        }
    }

    /// Expands one row of a coded tile, with codebook `book`.
    ///
    /// # Panics
    /// When `code` is not [`tile_bytes`](Self::tile_bytes) long or `row` is not a row of a tile.
    pub fn expand_tile_row(&self, code: &[u8], row: usize, book: u8, out: &mut [i16; TILE_COLS]) {
        assert!(row < TILE_ROWS, "row {row} of a tile");
        self.expand(code, row * TILE_COLS, book, out);
    }

    /// Weights `first..first + out.len()` of a tile; both multiples of 8, so that no step, pair or
    /// centroid is cut.
    fn expand(&self, code: &[u8], first: usize, book: u8, out: &mut [i16]) {
        assert_eq!(code.len(), self.tile_bytes(), "one tile of {}", self.scheme);
        match self.scheme.family() {
            Family::Nuq | Family::Int | Family::Gnuq => {
                let bits = u32::from(self.scheme.quarters() / 4);
                let first_entry = (usize::from(book) & (self.books() - 1)) << bits;
                for (i, value) in (first..).zip(out) {
                    *value =
                        self.entries[first_entry + usize::from(read_bits(code, i * bits as usize, bits))];
                }
            }
            Family::NestNuq(ladder) => {
                let bits = ladder.high();
                let values = self.at(bits).expect("a table for whole codes");
                for (i, value) in (first..).zip(out) {
                    *value = values[usize::from(read_bits(code, i * bits as usize, bits))];
                }
            }
            Family::Qoq(_) => {
                let second = SecondLevel::from_byte(book);
                for (i, value) in (first..).zip(out) {
                    let code = code[i / 2] >> (4 * (i % 2)) & 15;
                    *value = second.value(code);
                }
            }
            Family::Vq => {
                let bits = u32::from(self.scheme.quarters() / 2);
                for (i, pair) in (first / 2..).zip(out.as_chunks_mut::<2>().0) {
                    let index = 2 * usize::from(read_bits(code, i * bits as usize, bits));
                    pair.copy_from_slice(&self.entries[index..index + 2]);
                }
            }
            Family::Additive(books) => {
                let (count, weights, bits) = (books.count(), books.weights(), books.bits() as usize);
                let (across, bytes) = (TILE_COLS / weights, count * bits / 8);
                for (i, values) in (first / weights..).zip(out.chunks_exact_mut(weights)) {
                    let place = i % across * bytes * TILE_ROWS + i / across;
                    values.fill(0);
                    for book in 0..count {
                        let byte = usize::from(code[place + book * bits / 8 * TILE_ROWS]);
                        let code = byte >> (book * bits % 8) & ((1 << bits) - 1);
                        let centroid = &self.entries[((book << bits) + code) * weights..];
                        values.iter_mut().zip(centroid).for_each(|(value, entry)| *value += entry);
                    }
                }
            }
            Family::Tcq(_) | Family::HalfTcq(_) | Family::NestTcq(..) => {
                let steps =
                    trellis::Steps::of(self.scheme).expect("schemes without a table are refused by `new`");
                for (t, values) in (first / steps.weights..).zip(out.chunks_exact_mut(steps.weights)) {
                    let state = read_bits(code, steps.position(t), trellis::STATE_BITS);
                    let all = trellis::state_values(self.scheme, &self.entries, state);
                    values.copy_from_slice(&all[..steps.weights]);
                }
            }
        }
    }
}

/// A pair after `count` quarter turns clockwise.
#[must_use]
pub fn quarter_turns<T: std::ops::Neg<Output = T> + Copy>([x, y]: [T; 2], count: usize) -> [T; 2] {
    match count % 4 {
        0 => [x, y],
        1 => [y, -x],
        2 => [-x, -y],
        _ => [-y, x],
    }
}

/// One line of text, `scheme step entry entry ...`: the form in which codebooks are committed and
/// stored.
impl fmt::Display for Codebook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.scheme, self.step)?;
        self.entries.iter().try_for_each(|e| write!(f, " {e}"))
    }
}

impl FromStr for Codebook {
    type Err = CodebookError;

    fn from_str(line: &str) -> Result<Self, CodebookError> {
        let text = |what: &str| CodebookError::Text(what.to_owned());
        let mut words = line.split_ascii_whitespace();
        let mut next = |what: &str| words.next().ok_or_else(|| text(what));
        let scheme = next("a scheme name")?.parse().map_err(|_| text("a scheme name"))?;
        let step = next("a step")?.parse().map_err(|_| text("a step"))?;
        let entries = words.map(str::parse).collect::<Result<_, _>>().map_err(|_| text("16-bit integers"))?;
        Self::new(scheme, entries, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_found_where_they_are() {
        let fine: [i16; 16] = [0, 1, 1, 2, 3, 3, 4, 5, 0, 0, 1, 1, 2, 2, 3, 9];
        for (scheme, len) in [("tcq-2.75", 64), ("tcq-3", 128), ("tcq-5", 256), ("tcq-fast-4", 128)] {
            let sum = |x: usize| i16::try_from(16 * x / len * 4).unwrap() + fine[x % 16];
            let free = TwoLevel::free(len);
            let entries: Vec<i16> = (0..len).map(|x| if x < free { sum(x) } else { 127 }).collect();
            let book =
                |entries: &[i16]| Codebook::new(scheme.parse().unwrap(), entries.to_vec(), 0.1).unwrap();
            let layers = book(&entries).two_level().unwrap();
            let again = |x: usize| layers.coarse[16 * x / len] + layers.fine[x % 16];
            assert!((0..free).all(|x| again(x) == entries[x]), "{scheme}");
            // One entry off, at either end of the sums; a negative one in the free quarter.
            for (x, value) in [(0, 1), (free - 1, 126), (free - 17, 126), (len - 1, -1)] {
                let mut other = entries.clone();
                other[x] = value;
                assert_eq!(book(&other).two_level(), None, "{scheme}, entry {x}");
            }
            assert!(book(&[&entries[..free], &vec![0; len - free][..]].concat()).two_level().is_some());
        }
        let scalars = Codebook::new("nuq-7".parse().unwrap(), vec![0; 128], 0.1).unwrap();
        assert_eq!(scalars.two_level(), None);
    }

    #[test]
    fn a_ramp_is_found_where_it_is() {
        let book = |scheme: &str, entries: &[i16]| {
            Codebook::new(scheme.parse().unwrap(), entries.to_vec(), 0.1).unwrap().piecewise_linear()
        };
        for mask in [63, 62] {
            let at = |x: usize| x & usize::from(mask);
            let end = |x: usize| i16::try_from(at(x) * at(x) % 127).unwrap();
            let entries: Vec<i16> = (0..PiecewiseLinear::LEN)
                .map(|x| if x < PiecewiseLinear::FREE { PiecewiseLinear::at(at(x)) } else { end(x) })
                .collect();
            for scheme in ["tcq-2", "tcq-fast-2.5"] {
                assert_eq!(book(scheme, &entries), Some(PiecewiseLinear { mask }), "{scheme}");
            }
            // One entry off; a neighbour in the free quarter that is not equal; a negative one; one
            // that needs 16 bits.
            for (x, value, found) in
                [(0, 1, false), (47, 48, false), (55, 9, mask == 63), (60, -1, false), (60, 128, false)]
            {
                let mut other = entries.clone();
                other[x] = value;
                assert_eq!(book("tcq-2", &other).is_some(), found, "mask {mask}, entry {x}");
            }
            assert_eq!(book("nuq-6", &entries), None);
        }
        assert_eq!(book("tcq-3", &[0; 128]), None);
    }

    #[test]
    fn a_turned_quarter_is_found_where_it_is() {
        for (scheme, pairs) in [("vq-3.5", 128), ("vq-4", 256)] {
            let first = |i: usize| [i16::try_from(i % 7).unwrap(), i16::try_from(i * 5 % 61).unwrap()];
            let turned = |i: usize| quarter_turns(first(i % (pairs / 4)), i / (pairs / 4));
            let entries: Vec<i16> = (0..pairs).flat_map(turned).collect();
            let book =
                |entries: &[i16]| Codebook::new(scheme.parse().unwrap(), entries.to_vec(), 0.1).unwrap();
            assert_eq!(book(&entries).quarter(), Some(&entries[..pairs / 2]), "{scheme}");
            for at in [0, pairs / 2 - 1, pairs / 2, pairs, 2 * pairs - 1] {
                let mut other = entries.clone();
                other[at] = 100;
                assert_eq!(book(&other).quarter(), None, "{scheme}, number {at}");
            }
            let negative: Vec<i16> = entries.iter().map(|e| -e).collect();
            assert_eq!(book(&negative).quarter(), None, "{scheme}");
        }
        let few = Codebook::new("vq-3".parse().unwrap(), vec![0; 128], 0.1).unwrap();
        assert_eq!(few.quarter(), None);
    }

    #[test]
    fn text_round_trips_and_bad_text_is_refused() {
        let book = Codebook::new("vq-1.5".parse().unwrap(), (-8..8).collect(), 0.1).unwrap();
        assert_eq!(book.to_string().parse(), Ok(book.clone()));
        for bad in [
            "",
            "nuq-2",
            "nuq-2 0.1 1 2 3",
            "nuq-2 0 1 2 3 4",
            "nuq-2 nan 1 2 3 4",
            "nuq-2 0.1 1 2 3 x",
            "half-tcq-3.25 1 1",
            "nuq-2 0.1 1 2 3 -32768",
        ] {
            assert!(bad.parse::<Codebook>().is_err(), "`{bad}` was accepted");
        }
    }

    #[test]
    fn a_scale_carries_the_number_of_its_codebook() {
        let book =
            Codebook::new("gnuq-2".parse().unwrap(), (0..32).map(|i| i * 3 - 40).collect(), 0.1).unwrap();
        assert_eq!(book.books(), 8);
        for bits in (0..0x7c00u16).step_by(7) {
            let scale = half::f16::from_bits(bits);
            for number in 0..8 {
                let marked = book.scale_of(scale, number);
                assert_eq!(book.book_of(marked), number, "{scale}");
                let ulp = scale.to_f32().abs() / 1024.0 + 6e-8;
                assert!(
                    (marked.to_f32() - scale.to_f32()).abs() <= 4.01 * ulp || bits < 8,
                    "{scale} {marked}"
                );
            }
        }
        let (mut tile, mut row) = ([0; TILE], [0; TILE_COLS]);
        let code: Vec<u8> = (0..64).map(|i| (i * 89 + 7) as u8).collect();
        let books = std::array::from_fn(|r| (r * 3 % 8) as u8);
        book.expand_tile_by(&code, &books, &mut tile);
        for (r, &number) in books.iter().enumerate() {
            book.expand_tile_row(&code, r, number, &mut row);
            assert_eq!(row, tile[r * TILE_COLS..][..TILE_COLS], "row {r}");
            for (c, &value) in row.iter().enumerate() {
                let index = usize::from(read_bits(&code, 2 * (r * TILE_COLS + c), 2));
                assert_eq!(value, book.entries()[4 * usize::from(number) + index], "row {r} column {c}");
            }
        }
    }

    #[test]
    fn plain_integers_are_their_own_table() {
        let table = |name: &str, n: usize| {
            let scheme = name.parse().unwrap();
            (0..n).map(|code| Codebook::integer(scheme, code).unwrap()).collect::<Vec<i16>>()
        };
        let four = table("int-4", 16);
        assert_eq!(four, [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]);
        let eight = table("int-8", 256);
        assert_eq!(eight[127..130], [127, -127, -127]);
        let scheme: Scheme = "int-4".parse().unwrap();
        assert!(Codebook::new(scheme, four.clone(), 0.3).is_ok());
        assert!(Codebook::new(scheme, four.into_iter().rev().collect(), 0.3).is_err());
    }

    /// A book of entries of at most `most` in magnitude, and a tile, whose weights are the sums
    /// that the documented order says.
    fn additive(name: &str, most: i16) -> (Codebook, Vec<u8>, [i16; TILE]) {
        let scheme: Scheme = name.parse().unwrap();
        let length = SchemeSpec::of(scheme).table.unwrap().lengths[0];
        let entry = |i: usize| (i as i32 * 37 % (2 * i32::from(most) + 1)) as i16 - most;
        let book = Codebook::new(scheme, (0..length).map(entry).collect(), 0.1).unwrap();
        let Index { bits, weights, count } = book.additive().unwrap();
        let code: Vec<u8> = (0..book.tile_bytes()).map(|i| (i * 89 + 7) as u8).collect();
        let mut tile = [0; TILE];
        book.expand_tile(&code, &mut tile);
        let each = 8 / bits as usize;
        for (at, &weight) in tile.iter().enumerate() {
            let (r, c) = (at / TILE_COLS, at % TILE_COLS);
            let of = |b: usize| {
                let byte = code[(c / weights * (count / each) + b / each) * TILE_ROWS + r];
                let centroid = usize::from(byte) >> (b % each * bits as usize) & ((1 << bits) - 1);
                book.entries()[((b << bits) + centroid) * weights + c % weights]
            };
            assert_eq!(weight, (0..count).map(of).sum::<i16>(), "{name}, row {r} column {c}");
        }
        (book, code, tile)
    }

    #[test]
    fn additive_codes_lie_by_columns_codebook_and_row() {
        let (book, ..) = additive("aq-m2v8", 63);
        assert_eq!(book.additive(), Some(Index { bits: 8, weights: 8, count: 2 }));
        // One sum of two entries of a column out of range.
        let (scheme, mut far) = (book.scheme(), book.entries().to_vec());
        far[8] = 127 - far.iter().skip(2048).step_by(8).max().unwrap();
        assert!(Codebook::new(scheme, far.clone(), 0.1).is_ok());
        far[8] += 1;
        assert_eq!(Codebook::new(scheme, far, 0.1), Err(CodebookError::Sums(scheme)));
    }

    #[test]
    fn halves_of_a_byte_are_codes_of_two_books() {
        let (book, code, tile) = additive("aq-m4v8b4", 31);
        assert_eq!(book.additive(), Some(Index { bits: 4, weights: 8, count: 4 }));
        // The same codes are bytes of two books of sums.
        let sums = book.byte_centroids().unwrap().into_owned();
        let bytes = Codebook::new("aq-m2v8".parse().unwrap(), sums, 0.1).unwrap();
        assert!(matches!(bytes.byte_centroids(), Some(Cow::Borrowed(same)) if same == bytes.entries()));
        let mut same = [0; TILE];
        bytes.expand_tile(&code, &mut same);
        assert_eq!(tile, same);
    }

    #[test]
    fn lower_bits_of_a_nested_code_are_codes() {
        let book = Codebook::new("nest-nuq-3..5".parse().unwrap(), (0..56).collect(), 0.1).unwrap();
        assert_eq!(book.at(3), Some(&[0, 1, 2, 3, 4, 5, 6, 7][..]));
        assert_eq!(book.at(4).map(|values| (values.len(), values[0])), Some((16, 8)));
        assert_eq!(book.at(5).map(|values| (values.len(), values[31])), Some((32, 55)));
        assert!([0, 2, 6, 30].iter().all(|&bits| book.at(bits).is_none()));
        let wide = (0..56).map(|i| i * 3).collect();
        assert!(Codebook::new("nest-nuq-3..5".parse().unwrap(), wide, 0.1).is_err(), "beyond int8");
    }

    #[test]
    fn a_row_equals_that_row_of_the_tile() {
        for scheme in Scheme::all().filter(|&s| s.tables().eq([s])) {
            let lengths = SchemeSpec::of(scheme).table.map(|table| table.lengths);
            let book = lengths.unwrap().into_iter().find_map(|n| {
                let entry =
                    |i: usize| Codebook::integer(scheme, i).unwrap_or((i as i32 * 37 % 41 - 20) as i16);
                Codebook::new(scheme, (0..n).map(entry).collect(), 0.1).ok()
            });
            let book = book.expect("one of the lengths fits");
            let code: Vec<u8> = (0..book.tile_bytes()).map(|i| (i * 89 + 7) as u8).collect();
            let (mut tile, mut row) = ([0; TILE], [0; TILE_COLS]);
            book.expand_tile(&code, &mut tile);
            for r in 0..TILE_ROWS {
                book.expand_tile_row(&code, r, 0, &mut row);
                assert_eq!(row, tile[r * TILE_COLS..][..TILE_COLS], "{scheme} row {r}");
            }
        }
    }
}
