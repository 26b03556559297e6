//! Codebooks as the kernels' tables.

use fracbit_base::{Code, Family};
use fracbit_format::Codebook;
use half::f16;

/// The words of a table, one per row, and how a block spreads them over shared memory: row `r` starts at byte
/// `r << log_stride` and is repeated `1 << log_copies` times, for as many banks.
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
            (Family::Nuq, _) if scheme.quarters() <= 24 => {
                // Two neighbouring indices, the first in the low bits, are one index.
                let (rows, log) = (entries.len() * entries.len(), entries.len().trailing_zeros());
                let row = |r: usize| pair(entries[r % entries.len()], entries[r >> log]);
                Self::widest((0..rows).map(row).collect())
            }
            (Family::Nuq, _) => {
                let log_stride = if entries.len() == 256 { 8 } else { 7 };
                Self { rows: entries.iter().map(|&e| twice(e)).collect(), log_stride, log_copies: 5 }
            }
            (Family::Vq, _) => {
                Self::widest(entries.as_chunks::<2>().0.iter().map(|&[a, b]| pair(a, b)).collect())
            }
            (_, Some(Code::Fast)) => {
                let row = |byte: usize| twice(signed(entries[byte % entries.len()], byte >= 128));
                Self { rows: (0..256).map(row).collect(), log_stride: 8, log_copies: 5 }
            }
            (_, Some(Code::Hyb)) => {
                let rows: Vec<u32> = entries.as_chunks::<2>().0.iter().map(|&[a, b]| pair(a, b)).collect();
                // The index is the bits of the hash below its sign, so that the masked hash is the address.
                let log_stride = 15 - rows.len().trailing_zeros();
                Self { rows, log_stride, log_copies: log_stride - 2 }
            }
            (_, _) => {
                // Nine upper bits of the hash: the sign and the index of the largest table; smaller ones repeat.
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
