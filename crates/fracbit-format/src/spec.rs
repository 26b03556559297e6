//! What there is to know of a scheme: the one description that files, quantizers, loaders and
//! kernels ask.
//!
//! A scheme's name says which one it is ([`Scheme`]); its [`SchemeSpec`] says what it consists of.
//! Whoever needs a number of bytes, the columns of a scale or the lengths of a table asks here, not
//! the family.

use crate::{Grid, Layout, MOST_GROUP_ENTRIES, TILE_COLS};
use fracbit_base::{Bytes, Code, Family, Granularity, Rate, Scheme, Shape};

/// Which weights of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Grouping {
    /// One scale per row.
    Row,
    /// One scale per this many columns of a row, a positive multiple of 16.
    Columns(usize),
}

impl Grouping {
    /// The grouping that a file means by a number of columns; 0 is the whole row.
    #[must_use]
    pub const fn from_number(columns: usize) -> Self {
        if columns == 0 { Self::Row } else { Self::Columns(columns) }
    }

    /// The number that stands for it in files; 0 is the whole row.
    #[must_use]
    pub const fn number(self) -> usize {
        match self {
            Self::Row => 0,
            Self::Columns(group) => group,
        }
    }

    /// Columns that share a scale in a matrix of `cols` columns: a multiple of 16.
    #[must_use]
    pub const fn columns(self, cols: usize) -> usize {
        match self {
            Self::Row => cols.next_multiple_of(TILE_COLS),
            Self::Columns(group) => group,
        }
    }

    /// Scales of a row of `cols` columns.
    #[must_use]
    pub const fn groups(self, cols: usize) -> usize {
        match self {
            Self::Row => (cols > 0) as usize,
            Self::Columns(group) => cols.div_ceil(group),
        }
    }
}

/// One array of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlaneName {
    /// Codes of the weights.
    Codes,
    /// Integer scales and zeros of a progressive scheme's groups, see [`SecondLevel`].
    SecondLevel,
    /// Scales of the groups.
    Scales,
    /// The factor common to all scales.
    Gain,
}

impl PlaneName {
    /// The end of the tensor's name in a file.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Codes => "codes",
            Self::SecondLevel => "level2",
            Self::Scales => "scales",
            Self::Gain => "gain",
        }
    }
}

/// Type of a plane's elements, little-endian in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Bytes.
    U8,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

impl Element {
    /// Bytes of one.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// What a plane has its elements for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Coded tiles, as [`Layout`] places them.
    Tiles,
    /// One for each group of columns of each row, row-major; those of a nested scheme's planes one
    /// behind the other.
    Groups,
    /// One for each group of columns of the second level of each row, row-major.
    SecondLevelGroups,
    /// One for each plane of the scheme.
    Matrix,
}

/// A plane of every matrix of a scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneSpec {
    /// Its name.
    pub name: PlaneName,
    /// Type of its elements.
    pub element: Element,
    /// What it has an element for.
    pub extent: Extent,
}

impl PlaneSpec {
    /// Its dimensions in a matrix of this shape.
    #[must_use]
    pub fn dims(self, scheme: Scheme, shape: Shape, grouping: Grouping) -> Vec<usize> {
        match self.extent {
            Extent::Tiles => vec![Layout::new(scheme, shape).len()],
            Extent::Groups => vec![scheme.planes() * shape.rows, grouping.groups(shape.cols)],
            Extent::SecondLevelGroups => {
                vec![shape.rows, second_level(scheme).map_or(0, |groups| groups.groups(shape.cols))]
            }
            Extent::Matrix => vec![scheme.planes()],
        }
    }

    /// Its bytes in a matrix of this shape.
    #[must_use]
    pub fn bytes(self, scheme: Scheme, shape: Shape, grouping: Grouping) -> usize {
        self.element.bytes() * self.dims(scheme, shape, grouping).iter().product::<usize>()
    }
}

/// How so many neighbouring weights of a row find their entries in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Index {
    /// Bits of an index.
    pub bits: u32,
    /// Weights that it stands for.
    pub weights: usize,
    /// Indices, each into a part of the table of its own; their entries are added. 1 but for
    /// additive codebooks.
    pub count: usize,
}

/// The tables of a scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Numbers of entries that a table may have, ascending.
    pub lengths: Vec<usize>,
    /// Grids that tables of this scheme are made on, the narrow one first. The grid of a table
    /// decides the integers that activations are rounded to.
    pub grids: &'static [Grid],
    /// How a code finds its entry; `None` for a trellis, which hashes its state.
    pub index: Option<Index>,
    /// Whether a model brings tables of its own: `quantize` trains them.
    pub trained: bool,
    /// Bits of the coarsest code, where the lower bits of a code are codes of their own: a table of
    /// `2^p` entries for every number of bits from this on, one behind the other.
    pub coarsest: Option<u32>,
}

/// The description of a scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemeSpec {
    /// Which scheme.
    pub scheme: Scheme,
    /// The arrays of every matrix, in the order in which files have them.
    pub planes: Vec<PlaneSpec>,
    /// Which weights share a scale unless a plan says otherwise.
    pub grouping: Grouping,
    /// Which weights share the integer scale and zero of a progressive scheme.
    pub second_level: Option<Grouping>,
    /// Columns that are rounded together: the block of error feedback.
    pub block_columns: usize,
    /// The table; `None` for a scheme that uses those of its [components](Scheme::components).
    pub table: Option<TableSpec>,
    /// Rates at which a matrix can be read, ascending; the last is the scheme's own.
    pub precisions: Vec<Rate>,
}

const PLANES: [PlaneSpec; 4] = [
    PlaneSpec { name: PlaneName::Codes, element: Element::U8, extent: Extent::Tiles },
    PlaneSpec { name: PlaneName::SecondLevel, element: Element::U8, extent: Extent::SecondLevelGroups },
    PlaneSpec { name: PlaneName::Scales, element: Element::F16, extent: Extent::Groups },
    PlaneSpec { name: PlaneName::Gain, element: Element::F32, extent: Extent::Matrix },
];

const NARROW: &[Grid] = &[Grid::I8];
const BOTH: &[Grid] = &[Grid::I8, Grid::I16];

fn second_level(scheme: Scheme) -> Option<Grouping> {
    match scheme.family() {
        Family::Qoq(Granularity::Group128) => Some(Grouping::Columns(128)),
        Family::Qoq(Granularity::Channel) => Some(Grouping::Row),
        _ => None,
    }
}

/// Integer scale and zero of a group of a progressive scheme: a code `q` is the int8 weight `scale
/// (q - zero)`, which the scale of the row makes a weight.
///
/// Source: QServe (arXiv 2405.04532), section 4.1. One byte holds both, since weights within
/// +-[`PROTECTED`](Self::PROTECTED) want no scale above 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecondLevel {
    /// 1 to 16.
    pub scale: u8,
    /// 0 to 15.
    pub zero: u8,
}

impl SecondLevel {
    /// The largest magnitude of weights on the first level from which rounding on the second never
    /// leaves int8, whatever the extremes of a group.
    pub const PROTECTED: i16 = 119;
    /// The largest scale.
    pub const MOST: u8 = 16;

    /// Of a byte of the plane; every byte is one.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Self {
        Self { scale: (byte >> 4) + 1, zero: byte & 15 }
    }

    /// As the plane has it.
    ///
    /// # Panics
    /// When scale or zero are out of range.
    #[must_use]
    pub const fn byte(self) -> u8 {
        assert!(self.scale >= 1 && self.scale <= Self::MOST && self.zero < 16, "scale and zero in range");
        (self.scale - 1) << 4 | self.zero
    }

    /// The weight on the first level that a code (0 to 15) means.
    #[must_use]
    pub const fn value(self, code: u8) -> i16 {
        self.scale as i16 * (code as i16 - self.zero as i16)
    }

    /// The codes whose weights lie in -127..=127.
    #[must_use]
    pub const fn codes(self) -> (u8, u8) {
        let reach = 127 / self.scale;
        let last = if self.zero + reach < 15 { self.zero + reach } else { 15 };
        (self.zero.saturating_sub(reach), last)
    }
}

impl SchemeSpec {
    /// The description of `scheme`.
    #[must_use]
    pub fn of(scheme: Scheme) -> Self {
        let quarters = u32::from(scheme.quarters());
        let indexed = |bits, weights, grids| TableSpec {
            lengths: vec![weights << bits],
            grids,
            index: Some(Index { bits, weights, count: 1 }),
            trained: false,
            coarsest: None,
        };
        let hashed = |lengths: &[usize], grids| {
            Some(TableSpec { lengths: lengths.to_vec(), grids, index: None, trained: false, coarsest: None })
        };
        let (block_columns, table) = match scheme.family() {
            Family::Nuq => (1, Some(indexed(quarters / 4, 1, if quarters >= 20 { BOTH } else { NARROW }))),
            Family::NestNuq(ladder) => {
                let (low, high) = (ladder.low(), ladder.high());
                let lengths = vec![(2 << high) - (1 << low)];
                (1, Some(TableSpec { lengths, coarsest: Some(low), ..indexed(high, 1, NARROW) }))
            }
            Family::Int => (1, Some(indexed(quarters / 4, 1, NARROW))),
            Family::Gnuq => {
                let one = indexed(quarters / 4, 1, NARROW);
                let lengths = (0..).map(|c| one.lengths[0] << c).take_while(|&n| n <= MOST_GROUP_ENTRIES);
                (1, Some(TableSpec { lengths: lengths.collect(), trained: true, ..one }))
            }
            Family::Vq => (2, Some(indexed(quarters / 2, 2, BOTH))),
            Family::Additive(books) => {
                let (count, weights) = (books.count(), books.weights());
                let one = indexed(books.bits(), weights, NARROW);
                let index = Some(Index { bits: books.bits(), weights, count });
                (weights, Some(TableSpec { lengths: vec![count * one.lengths[0]], index, ..one }))
            }
            Family::Tcq(Code::Fine) => (TILE_COLS, hashed(&[64, 128, 256], NARROW)),
            Family::Tcq(Code::Fast) => (TILE_COLS, hashed(&[64, 128], NARROW)),
            Family::Tcq(Code::Hyb) => (TILE_COLS, hashed(&[1024, 2048, 4096], BOTH)),
            Family::Qoq(_) => (1, Some(indexed(4, 1, NARROW))),
            Family::HalfTcq(_) | Family::NestTcq(..) => (TILE_COLS, None),
        };
        let grouping = scheme.group().map_or(Grouping::Row, Grouping::Columns);
        let second_level = second_level(scheme);
        let here = |plane: &PlaneSpec| plane.name != PlaneName::SecondLevel || second_level.is_some();
        Self {
            scheme,
            planes: PLANES.into_iter().filter(here).collect(),
            grouping,
            second_level,
            block_columns,
            table,
            precisions: scheme.precisions().collect(),
        }
    }

    /// Bits of the coarsest code of a nested scalar scheme (see [`TableSpec::coarsest`]); `None`
    /// for every other.
    #[must_use]
    pub fn coarsest(&self) -> Option<u32> {
        self.table.as_ref().and_then(|table| table.coarsest)
    }

    /// Whether scale and codes of a group are found together, not the scale first.
    #[must_use]
    pub fn grouped(&self) -> bool {
        self.grouping != Grouping::Row
    }

    /// Bytes of a matrix: the sum of its planes, without tables.
    #[must_use]
    pub fn bytes(&self, shape: Shape, grouping: Grouping) -> Bytes {
        Bytes(self.planes.iter().map(|p| p.bytes(self.scheme, shape, grouping) as u64).sum())
    }
}
