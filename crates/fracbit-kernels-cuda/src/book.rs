//! Codebooks as the kernels' tables.

use fracbit_base::{Books, Code, Family};
use fracbit_format::Codebook;
use half::f16;

/// The words of a table, one per row, and how a block spreads them over shared memory: row `r`
/// starts at byte `r << log_stride` and is repeated `1 << log_copies` times, for as many banks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Book {
    /// One word per row: two halves, low half first.
    pub rows: Vec<u32>,
    /// Bytes between rows.
    pub log_stride: u32,
    /// Copies of a row.
    pub log_copies: u32,
}

/// Shared memory that tables of the widest codes may take.
const LOG_WIDEST: u32 = 16;

impl Book {
    /// The table of a codebook, laid out as its expander (`kernels/cuda/codes.cuh`) indexes it.
    #[must_use]
    pub fn new(codebook: &Codebook) -> Self {
        let entries = codebook.entries();
        let scheme = codebook.scheme();
        let half = |entry: i16| u32::from(f16::from_f32(f32::from(entry)).to_bits());
        let pair = |low: i16, high: i16| half(low) | half(high) << 16;
        let twice = |entry: i16| pair(entry, entry);
        let signed = |entry: i16, negative: bool| if negative { -entry } else { entry };
        match (scheme.family(), scheme.code()) {
            (Family::Additive(books), _) => {
                let entries = codebook.byte_centroids().expect("additive codebooks");
                Self::widest(centroid_words(&entries, books.of_bytes()))
            }
            (Family::Nuq, _) if scheme.quarters() <= 28 => {
                // Two neighbouring indices, the first in the low bits, are one index.
                let (rows, log) = (entries.len() * entries.len(), entries.len().trailing_zeros());
                let row = |r: usize| pair(entries[r % entries.len()], entries[r >> log]);
                Self::widest((0..rows).map(row).collect())
            }
            (Family::Nuq, _) => {
                Self { rows: entries.iter().map(|&e| twice(e)).collect(), log_stride: 8, log_copies: 5 }
            }
            (Family::Vq, _) => {
                Self::widest(entries.as_chunks::<2>().0.iter().map(|&[a, b]| pair(a, b)).collect())
            }
            // Integers of 8 bits are their own table.
            (Family::Int | Family::Gnuq, _) if scheme.quarters() == 32 => {
                Self { rows: vec![0], log_stride: 4, log_copies: 2 }
            }
            (Family::Qoq(_), _) => {
                // Codes are integers whatever the table; scale and zero come with the group.
                let code = |row: usize, i: usize| (row >> (4 * i) & 15) as i16;
                let rows = (0..256).map(|row| pair(code(row, 0), code(row, 1))).collect();
                Self { rows, log_stride: 7, log_copies: 5 }
            }
            (Family::Int | Family::Gnuq, _) => {
                // Two neighbouring indices, the first in the low bits, and above them the number of
                // the codebook.
                let (books, size) = (codebook.books(), entries.len() / codebook.books());
                let bits = size.trailing_zeros();
                let one = |row: usize, i: u32| {
                    entries[size * (row >> (2 * bits)) + (row >> (i * bits) & (size - 1))]
                };
                let rows: Vec<u32> = (0..books << (2 * bits)).map(|r| pair(one(r, 0), one(r, 1))).collect();
                // `LOG_STRIDE` of `Ints` and `Books`.
                let log_stride = if scheme.family() == Family::Gnuq && bits > 3 { 6 } else { 7 };
                Self { rows, log_stride, log_copies: log_stride - 2 }
            }
            (_, Some(Code::Fast)) => {
                let row = |byte: usize| twice(signed(entries[byte % entries.len()], byte >= 128));
                Self { rows: (0..256).map(row).collect(), log_stride: 8, log_copies: 5 }
            }
            (_, Some(Code::Hyb)) => {
                let rows: Vec<u32> = entries.as_chunks::<2>().0.iter().map(|&[a, b]| pair(a, b)).collect();
                // The index is the bits of the hash below its sign, so that the masked hash is the
                // address.
                let log_stride = 15 - rows.len().trailing_zeros();
                Self { rows, log_stride, log_copies: log_stride - 2 }
            }
            (_, _) => {
                // Nine upper bits of the hash: the sign and the index of the largest table; smaller
                // ones repeat.
                let shift = 8 - entries.len().trailing_zeros();
                let row = |top: usize| twice(signed(entries[(top & 255) >> shift], top >= 256));
                Self { rows: (0..512).map(row).collect(), log_stride: 7, log_copies: 5 }
            }
        }
    }

    /// Rows of pairs, copied over as many banks as a bounded table allows.
    fn widest(rows: Vec<u32>) -> Self {
        let log_stride = (LOG_WIDEST - rows.len().trailing_zeros()).min(7);
        Self { rows, log_stride, log_copies: log_stride - 2 }
    }

    /// The table of a scalar code of `bits` bits with rows in the order of nested codes whose
    /// coarsest have `low` (`Nest` of `codes.cuh`): of pairs the coarsest codes of both weights,
    /// then the bits of each plane.
    #[must_use]
    pub(crate) fn nested(&self, low: u32, bits: u32) -> Self {
        if self.log_rows() != 2 * bits {
            return self.clone(); // single weights
        }
        let index = |row: usize, which: u32| {
            let coarse = row >> (which * low) & ((1 << low) - 1);
            let plane = |k: u32| (row >> (2 * low + 2 * k + which) & 1) << (low + k);
            (0..bits - low).fold(coarse, |index, k| index | plane(k))
        };
        let row = |row: usize| self.rows[index(row, 0) | index(row, 1) << bits];
        Self { rows: (0..self.rows.len()).map(row).collect(), ..*self }
    }

    /// Logarithm of the number of rows.
    #[must_use]
    pub fn log_rows(&self) -> u32 {
        self.rows.len().trailing_zeros()
    }

    /// Bytes of shared memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rows.len() << self.log_stride
    }
}

/// Four bytes of a centroid a word, (codebook, code, word), up to a power of two: shifted so that
/// words of one centroid of each codebook add up without a carry, to bytes 128 above the weights.
fn centroid_words(entries: &[i16], books: Books) -> Vec<u32> {
    let (count, weights) = (books.count(), books.weights());
    let size = entries.len() / count;
    let least = |book: usize, k: usize| {
        entries[book * size..][..size].iter().skip(k).step_by(weights).copied().min().expect("centroids")
    };
    let shift = |book: usize, k: usize| match book {
        0 => 128 + (1..count).map(|other| least(other, k)).sum::<i16>(),
        _ => -least(book, k),
    };
    let byte = |i: usize| u8::try_from(entries[i] + shift(i / size, i % weights));
    let word = |first: usize| {
        let bytes = [0, 1, 2, 3].map(|j| byte(4 * first + j).expect("sums of entries stay within a byte"));
        u32::from_le_bytes(bytes)
    };
    let mut words: Vec<u32> = (0..entries.len() / 4).map(word).collect();
    words.resize(words.len().next_power_of_two(), 0);
    words
}

#[cfg(test)]
mod tests {
    use super::Book;
    use fracbit_base::{Code, Family, Scheme};
    use fracbit_format::{
        Codebook,
        trellis::{FINE_ADD, fast_factor},
    };

    /// A hexadecimal constant of `codes.cuh` behind `before`.
    fn constant(source: &str, before: &str) -> Option<u32> {
        let (_, rest) = source.split_once(&format!("{before}0x"))?;
        u32::from_str_radix(rest.split(';').next()?, 16).ok()
    }

    #[test]
    fn words_of_centroids_add_up_without_a_carry() {
        for (name, parts) in [("aq-m1v4", 1), ("aq-m1v8", 2), ("aq-m2v8", 2), ("aq-m3v8", 2)] {
            let scheme: Scheme = name.parse().expect("a scheme");
            let Family::Additive(books) = scheme.family() else { panic!("{name} is additive") };
            // Far from symmetric: sums reach both ends of what a table may have.
            let ranges = [[-127, 127], [-100, 60], [-90, 40]];
            let ranges: &[[i16; 2]] = match books.count() {
                1 => &ranges[..1],
                2 => &[[-27, 67], [-100, 60]],
                _ => &[[63, 73], [-100, 14], [-90, 40]],
            };
            let size = 256 * books.weights();
            let entry = |i: usize| {
                let [low, high] = ranges[i / size];
                low + (i * 7919 % (high - low + 1).unsigned_abs() as usize) as i16
            };
            let entries: Vec<i16> = (0..books.count() * size).map(entry).collect();
            let codebook = Codebook::new(scheme, entries.clone(), 0.1).expect("sums within -127..=127");
            let table = Book::new(&codebook);
            let words: usize = 256 * parts * [1, 2, 4][books.count() - 1];
            assert_eq!((table.rows.len(), table.log_stride), (words, 16 - words.trailing_zeros().max(9)));
            for first in 0..256 {
                let codes = [first, first * 37 % 256, first * 91 % 256];
                for part in 0..parts {
                    let rows = (0..books.count()).map(|b| table.rows[(b * 256 + codes[b]) * parts + part]);
                    let sum = rows.fold(0u32, |sum, row| sum.checked_add(row).expect("no carry"));
                    for (k, byte) in sum.to_le_bytes().into_iter().enumerate() {
                        let at = |b: usize| entries[b * size + codes[b] * books.weights() + 4 * part + k];
                        let want = (0..books.count()).map(at).sum::<i16>();
                        assert_eq!(i16::from(byte) - 128, want, "{name}, codes {codes:?}, part {part}, {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn hashes_are_those_of_the_format() {
        let path = crate::shim::sources().join("codes.cuh");
        let source = std::fs::read_to_string(path).expect("kernels/cuda/codes.cuh");
        assert_eq!(constant(&source, "FINE_ADD = "), Some(u32::from(FINE_ADD)));
        for scheme in Scheme::all() {
            if scheme.family() == Family::Tcq(Code::Fast) {
                let quarters = scheme.quarters();
                let found = constant(&source, &format!("case {quarters}: return "));
                assert_eq!(found, Some(fast_factor(usize::from(quarters))), "{scheme}");
            }
        }
    }
}
