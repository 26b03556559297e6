//! Codebooks as the kernels' tables.

use fracbit_base::{Code, Family};
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

#[cfg(test)]
mod tests {
    use fracbit_base::{Code, Family, Scheme};
    use fracbit_format::trellis::{FINE_ADD, fast_factor};

    /// A hexadecimal constant of `codes.cuh` behind `before`.
    fn constant(source: &str, before: &str) -> Option<u32> {
        let (_, rest) = source.split_once(&format!("{before}0x"))?;
        u32::from_str_radix(rest.split(';').next()?, 16).ok()
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
