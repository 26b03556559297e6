//! Names of quantization schemes.
//!
//! A scheme is a family, a rate and, for trellis families, a code. The palette follows Q-Palette
//! (Table 1): scalar `nuq`, 2-D vector `vq`, trellis `tcq` and half-trellis `half-tcq`. Names are
//! part of the file format and of the command line: `nuq-4`, `vq-2.5`, `tcq-3`, `tcq-2.25`,
//! `tcq-hyb-3`, `half-tcq-3.25`. A trellis has every quarter of a bit with the default code (with
//! `fast` up to 2 bits); half-trellis is the papers' way to such rates. Two families want a scale
//! for every small group of columns: plain integers, `int-4`, and group-wise codebooks, `gnuq-2`.
//! Nested schemes are one copy that is read at several rates: `nest-tcq-2+1+1` a base and
//! refinements of it, `nest-nuq-2..4` scalar codes whose lower bits are codes of fewer. Progressive
//! ones, `qoq-g128` and `qoq-channel`, have two levels: int8 weights with a scale for each row, and
//! 4-bit codes of these. Additive codebooks, `aq-m2v8`, are named by how many are added and by how
//! many weights their centroids have, which make the rate.

use crate::Rate;
use std::{fmt, str::FromStr};

/// How a trellis state becomes weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// One weight per step from an int8 table indexed by a 16-bit hash of the state: least error;
    /// the default.
    Fine,
    /// The widest step the rate bears (2 or 4 weights): less work per weight, a little more error.
    Fast,
    /// The papers' hash and 2-D half-precision tables, kept as the parity reference.
    Hyb,
}

impl Code {
    /// All codes, the default first.
    pub const ALL: [Self; 3] = [Self::Fine, Self::Fast, Self::Hyb];

    /// The name used in scheme names and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Fast => "fast",
            Self::Hyb => "hyb",
        }
    }
}

/// The quantizer families of the palette, each with what it takes beside a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Non-uniform scalar quantizer.
    Nuq,
    /// Two-dimensional vector quantizer.
    Vq,
    /// Trellis-coded quantizer.
    Tcq(Code),
    /// Two trellis quantizers half a bit apart, one for each half of the input dimension.
    HalfTcq(Code),
    /// Integers times the scale of their group: `Q4_0` and `Q8_0` of llama.cpp in bytes per block.
    Int,
    /// Group-wise non-uniform quantizer: each group takes the best of a few small codebooks.
    Gnuq,
    /// Nested trellis quantizers: a base, and planes that each code what the planes before leave.
    NestTcq(Code, Nest),
    /// Nested scalar quantizer: codes whose lower bits are codes of coarser codebooks.
    NestNuq(Ladder),
    /// QoQ's progressive quantizer: unsigned 4-bit codes with an integer scale and zero make int8
    /// weights, which have a scale for each row.
    Qoq(Granularity),
    /// Additive codebooks: vectors of neighbouring weights that are sums of centroids.
    Additive(Books),
}

/// Which weights of a row share integer scale and zero in a progressive scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Granularity {
    /// 128 neighbouring columns.
    Group128,
    /// The whole row; its integer scale is 1.
    Channel,
}

impl Granularity {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Group128, Self::Channel];
    const NAMES: &'static str = "g128, channel";

    /// What stands behind the family's name in a scheme's.
    const fn name(self) -> &'static str {
        match self {
            Self::Group128 => "g128",
            Self::Channel => "channel",
        }
    }
}

/// The codebooks of an additive scheme: `m` of `2^b` centroids each, of `v` weights (CodeGEMM,
/// section 2.2).
///
/// With b = 8 a code is a byte. With b = 4 the partial sums of a codebook are as many as the bytes
/// of a vector register, where one instruction reads those of sixteen rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Books {
    count: u8,
    weights: u8,
    bits: u8,
}

impl Books {
    /// All there are, by rate.
    pub const ALL: [Self; 7] = [
        Self::of(1, 8, 8),
        Self::of(2, 8, 4),
        Self::of(1, 4, 8),
        Self::of(2, 8, 8),
        Self::of(4, 8, 4),
        Self::of(3, 8, 8),
        Self::of(6, 8, 4),
    ];
    const NAMES: &'static str = "m1v8, m2v8b4, m1v4, m2v8, m4v8b4, m3v8, m6v8b4";

    const fn of(count: u8, weights: u8, bits: u8) -> Self {
        Self { count, weights, bits }
    }

    /// Codebooks whose centroids are added.
    #[must_use]
    pub const fn count(self) -> usize {
        self.count as usize
    }

    /// Weights of a centroid: 4 or 8.
    #[must_use]
    pub const fn weights(self) -> usize {
        self.weights as usize
    }

    /// Bits of a code: 8 or 4.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.bits as u32
    }

    /// The codebooks of 256 centroids whose codes are the bytes of these: themselves, or as many as
    /// pairs, each centroid the sum of one of each of two.
    #[must_use]
    pub const fn of_bytes(self) -> Self {
        Self::of(self.count * self.bits / 8, self.weights, 8)
    }

    /// Quarters of a bit per weight.
    const fn quarters(self) -> u32 {
        4 * self.bits() * self.count as u32 / self.weights as u32
    }
}

/// As in a scheme's name: `m2v8`, `m4v8b4`.
impl fmt::Display for Books {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}v{}", self.count, self.weights)?;
        if self.bits == 8 { Ok(()) } else { write!(f, "b{}", self.bits) }
    }
}

/// The planes of a nested scheme: the rate of the base, and what each refinement adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nest([u8; 3]); // bits, 0 behind the last

impl Nest {
    /// All there are.
    pub const ALL: [Self; 5] =
        [Self([2, 1, 0]), Self([2, 2, 0]), Self([2, 1, 1]), Self([3, 1, 0]), Self([4, 4, 0])];
    const NAMES: &'static str = "2+1, 2+2, 2+1+1, 3+1, 4+4";

    /// The rate of every plane, the base first.
    pub fn planes(self) -> impl Iterator<Item = Rate> {
        self.0.into_iter().filter(|&bits| bits > 0).map(|bits| Rate::quarter_bits(4 * u32::from(bits)))
    }

    /// Bits of all planes.
    const fn bits(self) -> u32 {
        let [a, b, c] = self.0;
        a as u32 + b as u32 + c as u32
    }
}

/// As in a scheme's name: `2+1+1`.
impl fmt::Display for Nest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rate) in self.planes().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { "+" }, rate.bits())?;
        }
        Ok(())
    }
}

/// The bits at which a nested scalar scheme can be read: from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ladder {
    low: u8,
    high: u8,
}

impl Ladder {
    const NAMES: &'static str = "A..B with A of 2, 3 or 4 and B from A to 8";

    /// All there are, also such as have one rate only: what is left of others.
    pub fn all() -> impl Iterator<Item = Self> {
        (2..=4).flat_map(|low| (low..=8).map(move |high| Self { low, high }))
    }

    /// Bits of the coarsest codes.
    #[must_use]
    pub const fn low(self) -> u32 {
        self.low as u32
    }

    /// Bits of whole codes.
    #[must_use]
    pub const fn high(self) -> u32 {
        self.high as u32
    }
}

/// As in a scheme's name: `2..4`.
impl fmt::Display for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.low, self.high)
    }
}

impl Family {
    /// All but the nested and the additive, those of a trellis with each code.
    const FLAT: [Self; 12] = [
        Self::Nuq,
        Self::Vq,
        Self::Tcq(Code::Fine),
        Self::Tcq(Code::Fast),
        Self::Tcq(Code::Hyb),
        Self::HalfTcq(Code::Fine),
        Self::HalfTcq(Code::Fast),
        Self::HalfTcq(Code::Hyb),
        Self::Int,
        Self::Gnuq,
        Self::Qoq(Granularity::Group128),
        Self::Qoq(Granularity::Channel),
    ];

    /// All, those of a trellis with each code; nested ones have those that are not for reference
    /// only.
    pub fn all() -> impl Iterator<Item = Self> {
        let codes = [Code::Fine, Code::Fast].into_iter();
        let nested = codes.flat_map(|code| Nest::ALL.map(|nest| Self::NestTcq(code, nest)));
        let flat = Self::FLAT.into_iter().chain(nested);
        flat.chain(Ladder::all().map(Self::NestNuq)).chain(Books::ALL.map(Self::Additive))
    }

    /// The name used in scheme names and files, without the code of a trellis.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nuq => "nuq",
            Self::Vq => "vq",
            Self::Tcq(_) => "tcq",
            Self::HalfTcq(_) => "half-tcq",
            Self::Int => "int",
            Self::Gnuq => "gnuq",
            Self::NestTcq(..) => "nest-tcq",
            Self::NestNuq(_) => "nest-nuq",
            Self::Qoq(_) => "qoq",
            Self::Additive(_) => "aq",
        }
    }

    /// Whether it comes at `quarters / 4` bits, and the rates it comes at, in words.
    const fn comes_at(self, quarters: u32) -> (bool, &'static str) {
        let (half, whole) = (quarters.is_multiple_of(2), quarters.is_multiple_of(4));
        let trellis = quarters >= 4 && quarters <= 20;
        match self {
            Self::Nuq => (quarters >= 8 && quarters <= 32 && whole, "2, 3, ... 8"),
            Self::Vq => (quarters >= 6 && quarters <= 24 && half, "1.5, 2, ... 6"),
            Self::Tcq(Code::Fine) => (trellis, "1, 1.25, ... 5"),
            Self::Tcq(Code::Fast) => (trellis && (half || quarters <= 8), "1, 1.25, ... 2, 2.5, ... 5"),
            Self::Tcq(Code::Hyb) => (trellis && half, "1, 1.5, ... 5"),
            Self::HalfTcq(_) => (quarters >= 5 && quarters <= 19 && !half, "1.25, 1.75, ... 4.75"),
            Self::Int => (matches!(quarters, 16 | 32), "4, 8"),
            Self::Gnuq => (matches!(quarters, 8 | 12 | 16), "2, 3, 4"),
            Self::NestTcq(Code::Hyb, _) => (false, "no"),
            Self::NestTcq(_, nest) => (quarters == 4 * nest.bits(), Nest::NAMES),
            Self::NestNuq(ladder) => (quarters == 4 * ladder.high(), Ladder::NAMES),
            Self::Qoq(_) => (quarters == 16, "4"),
            Self::Additive(books) => (quarters == books.quarters(), Books::NAMES),
        }
    }
}

/// The name with the code, where it is not the default: what stands before the rate in a scheme's
/// name.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Tcq(code) | Self::HalfTcq(code) | Self::NestTcq(code, _) if *code != Code::Fine => {
                write!(f, "-{}", code.name())
            }
            _ => Ok(()),
        }
    }
}

/// One entry of the palette: a family at a rate. Only valid combinations can be built.
///
/// What else there is to know of it (planes, scales, tables, bytes) says
/// `fracbit_format::SchemeSpec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scheme {
    rate: Rate,
    family: Family,
}

/// A scheme name or rate that the palette does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// The text is no scheme name.
    #[error(
        "scheme: expected a name such as nuq-4, vq-2.5, tcq-2.25, tcq-fast-2 or half-tcq-3.25, got `{0}`"
    )]
    Name(String),
    /// The family does not come at this rate.
    #[error("scheme: {family} comes at {range} bits, got {bits}")]
    Rate {
        /// Family name, and the trellis code where rates depend on it.
        family: String,
        /// The rates that exist.
        range: &'static str,
        /// The rate asked for.
        bits: String,
    },
    /// The family does not come in this kind.
    #[error("scheme: {family} should be followed by one of {kinds}, got {got}")]
    Kind {
        /// Family name.
        family: String,
        /// The kinds that exist.
        kinds: &'static str,
        /// The one asked for.
        got: String,
    },
}

impl SchemeError {
    fn kind(family: Family, kinds: &'static str, got: &str) -> Self {
        Self::Kind { family: family.to_string(), kinds, got: got.to_owned() }
    }
}

impl Scheme {
    /// A scheme of the given family and rate.
    ///
    /// # Errors
    /// When the family has no such rate.
    pub fn new(family: Family, rate: Rate) -> Result<Self, SchemeError> {
        let quarters = rate.quarters();
        let (ok, range) = family.comes_at(quarters.unwrap_or(0));
        if quarters.is_none() || !ok {
            let bits = rate.bits().to_string();
            return Err(SchemeError::Rate { family: family.to_string(), range, bits });
        }
        Ok(Self { rate, family })
    }

    /// The family.
    #[must_use]
    pub const fn family(self) -> Family {
        self.family
    }

    /// The family's name, without the code of a trellis.
    #[must_use]
    pub const fn family_name(self) -> &'static str {
        self.family.name()
    }

    /// What reports list beside code and rate: the family's name, or the scheme's where these do
    /// not say which it is.
    #[must_use]
    pub fn label(self) -> String {
        match self.family {
            Family::NestTcq(..) | Family::NestNuq(_) | Family::Qoq(_) | Family::Additive(_) => {
                self.to_string()
            }
            _ => self.family_name().to_owned(),
        }
    }

    /// Columns that share a scale unless the plan says otherwise; `None` for a family made for one
    /// scale a row.
    #[must_use]
    pub const fn group(self) -> Option<usize> {
        match self.family {
            Family::Int | Family::Gnuq => Some(32),
            _ => None,
        }
    }

    /// The trellis code; `None` for every scheme without a trellis.
    #[must_use]
    pub const fn code(self) -> Option<Code> {
        match self.family {
            Family::Tcq(code) | Family::HalfTcq(code) | Family::NestTcq(code, _) => Some(code),
            _ => None,
        }
    }

    /// Payload bits per weight, without scales.
    #[must_use]
    pub const fn rate(self) -> Rate {
        self.rate
    }

    /// Payload rate in quarters of a bit: the number of a kernel's instance.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "at most 8 bits per weight, by `new`")]
    pub const fn quarters(self) -> u8 {
        match self.rate.quarters() {
            Some(quarters) => quarters as u8,
            None => panic!("a rate that `new` refuses"),
        }
    }

    /// What a matrix consists of, plane by plane, each from left to right. Half-trellis has two
    /// components, the lower rate for the first half of the input dimension, as in the papers; a
    /// nested trellis scheme one for each plane; every other is its own.
    pub fn components(self) -> impl Iterator<Item = Component> + Clone {
        let whole = |scheme, plane| Component { scheme, columns: Columns::All, plane };
        let mut found = [None; 3];
        match self.family {
            Family::HalfTcq(code) => {
                let quarters = self.quarters() as u32;
                let at = |quarters| Self { rate: Rate::quarter_bits(quarters), family: Family::Tcq(code) };
                let half = |scheme, columns| Component { scheme, columns, plane: 0 };
                found[0] = Some(half(at(quarters - 1), Columns::FirstHalf));
                found[1] = Some(half(at(quarters + 1), Columns::SecondHalf));
            }
            Family::NestTcq(code, nest) => {
                for (plane, (found, rate)) in found.iter_mut().zip(nest.planes()).enumerate() {
                    *found = Some(whole(Self { rate, family: Family::Tcq(code) }, plane));
                }
            }
            _ => found[0] = Some(whole(self, 0)),
        }
        found.into_iter().flatten()
    }

    /// The schemes whose tables it uses, each once.
    pub fn tables(self) -> impl Iterator<Item = Self> + Clone {
        let earlier = move |i: usize, scheme| self.components().take(i).any(|other| other.scheme == scheme);
        let all = self.components().map(|component| component.scheme).enumerate();
        all.filter(move |&(i, scheme)| !earlier(i, scheme)).map(|(_, scheme)| scheme)
    }

    /// Planes with scales of their own, whose sum the weights are: 1, and with a nested trellis
    /// scheme one more for each refinement.
    #[must_use]
    pub fn planes(self) -> usize {
        match self.family {
            Family::NestTcq(_, nest) => nest.planes().count(),
            _ => 1,
        }
    }

    /// The rates at which a matrix can be read, ascending; the last is its own.
    pub fn precisions(self) -> impl Iterator<Item = Rate> {
        let last = self.planes() - 1;
        let upto = move |plane| self.components().filter(move |c| c.plane <= plane);
        let sum = move |plane| upto(plane).map(|c| u32::from(c.scheme.quarters())).sum();
        let bits = match self.family {
            Family::NestNuq(ladder) => ladder.low()..ladder.high(),
            _ => 0..0,
        };
        let planes = (0..last).map(move |plane| Rate::quarter_bits(sum(plane)));
        bits.map(|bits| Rate::quarter_bits(4 * bits)).chain(planes).chain([self.rate])
    }

    /// Whether a matrix can be read at several rates.
    #[must_use]
    pub fn nested(self) -> bool {
        self.precisions().nth(1).is_some()
    }

    /// How many of the [precisions](Self::precisions), counted from the first, are within `most`
    /// bits: the last of them is what is read, and the first always is. With a nested trellis
    /// scheme these are planes.
    #[must_use]
    pub fn planes_within(self, most: Rate) -> usize {
        1 + self.precisions().skip(1).take_while(|&rate| rate <= most).count()
    }

    /// The scheme of the matrix that is left where no more than `most` bits are read, as
    /// [`planes_within`](Self::planes_within) says.
    #[must_use]
    pub fn at(self, most: Rate) -> Self {
        let planes = self.planes_within(most);
        let (code, nest) = match self.family {
            Family::NestTcq(code, nest) => (code, nest),
            Family::NestNuq(ladder) => {
                let rate = self.precisions().nth(planes - 1).unwrap_or(self.rate);
                #[expect(clippy::cast_possible_truncation, reason = "at most six more than `low`")]
                let high = ladder.low + (planes - 1) as u8;
                return Self { rate, family: Family::NestNuq(Ladder { high, ..ladder }) };
            }
            _ => return self,
        };
        let mut kept = nest;
        kept.0[planes..].fill(0);
        let family = if planes == 1 { Family::Tcq(code) } else { Family::NestTcq(code, kept) };
        Self { rate: Rate::quarter_bits(4 * kept.bits()), family }
    }

    /// Every scheme there is, by family and rate, with all trellis codes.
    pub fn all() -> impl Iterator<Item = Self> {
        let at = |family: Family| (4..=32).filter_map(move |q| Self::new(family, Rate::quarter_bits(q)).ok());
        Family::all().flat_map(at)
    }
}

/// A part of a matrix that is coded with one scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Component {
    /// The scheme, one with a table of its own.
    pub scheme: Scheme,
    /// Which columns it has.
    pub columns: Columns,
    /// Its plane: 0 for the weights, from 1 on for what the planes before leave of them.
    pub plane: usize,
}

/// Columns of a matrix, by tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Columns {
    /// All.
    All,
    /// The first half, and the middle tile of an odd number.
    FirstHalf,
    /// What is behind the first half.
    SecondHalf,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.family {
            Family::NestTcq(_, nest) => write!(f, "{}-{nest}", self.family),
            Family::NestNuq(ladder) => write!(f, "{}-{ladder}", self.family),
            Family::Qoq(granularity) => write!(f, "{}-{}", self.family, granularity.name()),
            Family::Additive(books) => write!(f, "{}-{books}", self.family),
            _ => write!(f, "{}-{}", self.family, self.rate.bits()),
        }
    }
}

impl FromStr for Scheme {
    type Err = SchemeError;

    fn from_str(text: &str) -> Result<Self, SchemeError> {
        let bad = || SchemeError::Name(text.to_owned());
        let (head, rate) = text.rsplit_once('-').ok_or_else(bad)?;
        // The default code may be spelled out.
        let short = head.strip_suffix("-fine").filter(|short| short.ends_with("tcq")).unwrap_or(head);
        let nested = |f: &Family| matches!(f, Family::NestTcq(..));
        let family = Family::all().find(|f| f.to_string() == short).ok_or_else(bad)?;
        if let Family::Additive(_) = family {
            let Some(books) = Books::ALL.into_iter().find(|books| books.to_string() == rate) else {
                return Err(SchemeError::kind(family, Books::NAMES, rate));
            };
            return Self::new(Family::Additive(books), Rate::quarter_bits(books.quarters()));
        }
        if nested(&family) {
            let named = |f: &Family| matches!(f, Family::NestTcq(_, nest) if nest.to_string() == rate);
            let found = Family::all().filter(|f| f.to_string() == short).find(named);
            let Some(Family::NestTcq(code, nest)) = found else {
                return Err(SchemeError::kind(family, Nest::NAMES, rate));
            };
            return Self::new(Family::NestTcq(code, nest), Rate::quarter_bits(4 * nest.bits()));
        }
        if let Family::NestNuq(_) = family {
            let Some(found) = Ladder::all().find(|ladder| ladder.to_string() == rate) else {
                return Err(SchemeError::kind(family, Ladder::NAMES, rate));
            };
            return Self::new(Family::NestNuq(found), Rate::quarter_bits(4 * found.high()));
        }
        if matches!(family, Family::Qoq(_)) {
            let Some(found) = Granularity::ALL.into_iter().find(|g| g.name() == rate) else {
                return Err(SchemeError::kind(family, Granularity::NAMES, rate));
            };
            return Self::new(Family::Qoq(found), Rate::quarter_bits(16));
        }
        let quarters = rate.parse::<f64>().map_err(|_| bad())? * 4.0;
        if quarters.fract() != 0.0 || !(0.0..=255.0).contains(&quarters) {
            return Err(bad());
        }
        Self::new(family, Rate::from_bits(quarters / 4.0).map_err(|_| bad())?)
    }
}

impl serde::Serialize for Scheme {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Scheme {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The set of schemes that an allocation may choose from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Palette {
    /// Trellis, half-trellis where the code has no trellis of the rate, then scalar 6 to 8 bits for
    /// layers that deserve more than 5.
    #[default]
    Tcq,
    /// Vector quantizers only.
    Vq,
    /// Scalar quantizers only.
    Nuq,
    /// Nested schemes only: one copy that is read at several rates.
    Nest,
    /// Everything made for one scale a row and one rate, with the default trellis code; progressive
    /// schemes and additive codebooks are asked for by name.
    All,
}

impl Palette {
    /// The schemes of this palette with trellis code `code`.
    pub fn schemes(self, code: Code) -> Vec<Scheme> {
        Scheme::all()
            .filter(|s| s.code().is_none_or(|c| c == code))
            .filter(|s| match self {
                Self::Tcq => match s.family() {
                    Family::Tcq(_) => true,
                    Family::HalfTcq(code) => Scheme::new(Family::Tcq(code), s.rate()).is_err(),
                    Family::Nuq => s.rate() >= Rate::quarter_bits(24),
                    _ => false,
                },
                Self::Vq => s.family() == Family::Vq,
                Self::Nuq => s.family() == Family::Nuq,
                Self::Nest => s.nested(),
                Self::All => {
                    let by_name =
                        matches!(s.family(), Family::Qoq(_) | Family::Additive(_) | Family::NestNuq(_));
                    s.group().is_none() && !s.nested() && !by_name
                }
            })
            .collect()
    }

    /// The name used on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcq => "tcq",
            Self::Vq => "vq",
            Self::Nuq => "nuq",
            Self::Nest => "nest",
            Self::All => "all",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_round_trips() {
        let all: Vec<_> = Scheme::all().collect();
        assert_eq!(all.len(), 7 + 10 + 17 + 11 + 9 + 3 * 8 + 2 + 3 + 2 * 5 + 18 + 2 + 7);
        for scheme in all {
            assert_eq!(scheme.to_string().parse(), Ok(scheme), "{scheme}");
        }
        assert_eq!("tcq-fine-3".parse::<Scheme>(), "tcq-3".parse());
    }

    #[test]
    fn refuses_what_the_palette_lacks() {
        for bad in [
            "",
            "tcq",
            "tcq-",
            "tcq-x",
            "nuq-4.5",
            "vq-1",
            "tcq-5.5",
            "half-tcq-3",
            "tcq-hyb-3.25",
            "tcq-3.125",
            "tcq-nope-3",
            "nuq--4",
            "int-3",
            "gnuq-5",
            "nuq-fine-4",
            "-fine-3",
            "tcq-fine-fine-3",
            "nuq-1e9",
            "nest-tcq-4",
            "nest-tcq-1+1",
            "nest-tcq-hyb-2+2",
            "tcq-2+2",
            "nest-nuq-4",
            "nest-nuq-4..3",
            "nest-nuq-2..9",
            "nest-nuq-5..8",
            "nuq-2..4",
            "qoq-4",
            "qoq-g64",
            "nuq-g128",
            "aq-2",
            "aq-m2v4",
            "aq-m01v8",
            "vq-m1v4",
        ] {
            assert!(bad.parse::<Scheme>().is_err(), "{bad} was accepted");
        }
        let text = "tcq-5.5".parse::<Scheme>().unwrap_err().to_string();
        assert!(text.contains("1, 1.25, ... 5"), "{text}");
        let text = "tcq-hyb-2.25".parse::<Scheme>().unwrap_err().to_string();
        assert!(text.contains("tcq-hyb comes at 1, 1.5, ... 5"), "{text}");
        let text = "qoq-g64".parse::<Scheme>().unwrap_err().to_string();
        assert_eq!(text, "scheme: qoq should be followed by one of g128, channel, got g64");
    }

    #[test]
    fn components_make_up_the_rate() {
        for scheme in Scheme::all() {
            let quarters = |c: Component| u32::from(c.scheme.quarters());
            let all: Vec<_> = scheme.components().collect();
            let sum: u32 = all.iter().map(|&c| quarters(c)).sum();
            let halves = all.iter().filter(|c| c.columns != Columns::All).count();
            assert!(halves == 0 || (halves, all.len()) == (2, 2), "{scheme}");
            let parts = if halves == 2 { 2 } else { 1 };
            assert_eq!(sum, parts * u32::from(scheme.quarters()), "{scheme}");
            assert_eq!(all.last().map(|c| c.plane + 1), Some(scheme.planes()), "{scheme}");
            assert!(all.iter().all(|c| c.scheme.components().count() == 1), "{scheme}");
            let precisions: Vec<_> = scheme.precisions().collect();
            let one_each = scheme.planes() == 1 || precisions.len() == scheme.planes();
            assert!(precisions.is_sorted() && one_each, "{scheme}");
            assert_eq!(scheme.nested(), precisions.len() > 1, "{scheme}");
            assert_eq!(precisions.last(), Some(&scheme.rate()), "{scheme}");
            // What is left at every precision is a scheme of its own.
            for &rate in &precisions {
                let left = scheme.at(rate);
                assert_eq!((left.rate(), left.to_string().parse()), (rate, Ok(left)), "{scheme}");
            }
            assert_eq!(scheme.at(Rate::quarter_bits(0)), scheme.at(precisions[0]), "{scheme}");
        }
        let names: Vec<String> = Nest::ALL.iter().map(Nest::to_string).collect();
        assert_eq!(names.join(", "), Nest::NAMES);
        let names: Vec<String> = Books::ALL.iter().map(Books::to_string).collect();
        assert_eq!(names.join(", "), Books::NAMES);
        let additive = |s: &Scheme| matches!(s.family(), Family::Additive(_));
        assert!(Scheme::all().filter(additive).all(|s| s.label() == s.to_string()));
        let tables: Vec<_> = "nest-tcq-2+1+1".parse::<Scheme>().unwrap().tables().collect();
        assert_eq!(tables, ["tcq-2".parse().unwrap(), "tcq-1".parse().unwrap()]);
    }
}
