//! Codebooks as the kernels' tables.

use fracbit_base::{Code, Family};
use fracbit_format::{Codebook, Grid};
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

/// A form of the products without tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    /// Four 8-bit weights a word, 8-bit activations.
    Quads,
    /// Two 16-bit weights a word, 8-bit activations.
    Pairs,
    /// Two 16-bit weights a word, 11-bit activations.
    Wide,
    /// One weight a word, 11-bit activations.
    Ones,
    /// Two 16-bit weights a word, 8-bit activations, a codebook for each scale.
    Books,
    /// Integers of 8 bits without a table, 8-bit activations.
    Bytes,
}

impl Core {
    /// The form for a codebook; `xtask codegen` lists the same instances.
    fn of(family: Family, quarters: u32, grid: Grid) -> Option<Self> {
        match (family, grid, quarters) {
            (Family::Nuq | Family::Vq, Grid::I8, 6..=10) => Some(Self::Quads),
            (Family::Nuq | Family::Vq, Grid::I8, 12..=16 | 20) => Some(Self::Pairs),
            (Family::Nuq | Family::Vq, _, 18..=24) => Some(Self::Wide),
            (Family::Nuq, _, 28 | 32) => Some(Self::Ones),
            (Family::Int, _, 32) => Some(Self::Bytes),
            (Family::Int | Family::Gnuq, _, _) => Some(Self::Books),
            _ => None,
        }
    }

    /// Bits of the merged index, without the number of a codebook.
    fn index_bits(self, quarters: u32) -> u32 {
        match self {
            Self::Quads => quarters,
            Self::Pairs | Self::Wide | Self::Books => quarters / 2,
            Self::Ones => quarters / 4,
            Self::Bytes => 0,
        }
    }

    /// Whether scales stand beside the sums of a few columns, not of a row.
    #[must_use]
    pub fn grouped(self) -> bool {
        matches!(self, Self::Books | Self::Bytes)
    }

    /// Name in kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Quads => "quads",
            Self::Pairs => "pairs",
            Self::Wide => "wide",
            Self::Ones => "ones",
            Self::Books => "books",
            Self::Bytes => "bytes",
        }
    }

    /// Bytes of a staged activation.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Quads | Self::Pairs | Self::Books | Self::Bytes => 1,
            Self::Wide => 2,
            Self::Ones => 4,
        }
    }

    /// Largest magnitude of a rounded activation.
    #[must_use]
    pub fn most(self) -> u16 {
        if matches!(self, Self::Wide | Self::Ones) { 1023 } else { 127 }
    }
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

    /// The table of a product without tensor cores (`kernels/cuda/core.cuh`): the form and its
    /// words, or `None` where no form takes the codebook.
    #[must_use]
    pub fn core(codebook: &Codebook) -> Option<(Core, Self)> {
        let (entries, scheme) = (codebook.entries(), codebook.scheme());
        let quarters = u32::from(scheme.quarters());
        let core = Core::of(scheme.family(), quarters, codebook.grid())?;
        // The weights that merged indices stand for, the first in the low bits; above them the
        // number of the codebook, if there are several.
        let bits = core.index_bits(quarters);
        let weight = |row: usize, i: usize| match scheme.family() {
            Family::Vq => {
                entries[2 * (row >> (i as u32 / 2 * (quarters / 2)) & (entries.len() / 2 - 1)) + i % 2]
            }
            _ => {
                let size = entries.len() / codebook.books();
                entries[size * (row >> bits) + (row >> (i as u32 * quarters / 4) & (size - 1))]
            }
        };
        let word = |row: usize| match core {
            Core::Quads => (0..4).map(|i| (weight(row, i) as u32 & 0xFF) << (8 * i)).sum(),
            Core::Pairs | Core::Wide | Core::Books => {
                weight(row, 0) as u32 & 0xFFFF | (weight(row, 1) as u32) << 16
            }
            Core::Ones => i32::from(weight(row, 0)).cast_unsigned(),
            Core::Bytes => 0,
        };
        let rows: Vec<u32> = (0..codebook.books() << bits).map(word).collect();
        let book = match core {
            Core::Ones if quarters == 32 => Self { rows, log_stride: 8, log_copies: 5 },
            // At most four codebooks of 4 bits.
            Core::Books if quarters == 16 => Self { rows, log_stride: 6, log_copies: 4 },
            Core::Bytes => Self { rows, log_stride: 4, log_copies: 2 },
            _ => Self::widest(rows),
        };
        Some((core, book))
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
