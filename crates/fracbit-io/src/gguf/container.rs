//! The container: one GGUF file, read strictly.
//!
//! Format (`docs/gguf.md` of <https://github.com/ggml-org/ggml>), little-endian throughout: the
//! magic `GGUF`, a version (2 and 3 are laid out alike), the number of tensors and of metadata
//! entries, the entries (key, type, value), the tensors (name, dimensions from the innermost on,
//! type, offset), and from the next multiple of `general.alignment` on the data, each tensor at the
//! first such multiple behind the one before.
//!
//! Every number is checked against what is left of the file before it sizes or indexes anything, so
//! reading costs one pass and memory in proportion to the entries and tensors; strings and arrays
//! stay where they are and are looked at when asked for. As in llama.cpp, a tensor at another
//! offset than the next free one is refused; beyond it, keys and names should be unique, and
//! nothing may follow the last tensor but padding.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::blocks::BlockType;
use crate::config::clip;
use crate::dtype::Dtype;
use crate::header::TensorInfo;

/// The first bytes of a file.
pub(super) const MAGIC: &[u8] = b"GGUF";
/// The version that is written.
pub(super) const VERSION: u32 = 3;
/// Alignment where a file names none.
pub(super) const ALIGNMENT: usize = 32;
/// Metadata key of the alignment.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Most dimensions of a tensor, `ggml`'s limit.
const MAX_DIMS: u32 = 4;
/// Arrays of arrays may be this deep.
const MAX_DEPTH: usize = 4;
/// Longest key or tensor name.
const MAX_NAME: usize = 65_535;

/// A rule of the format that a file breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of each variant is its documentation")]
pub enum GgufError {
    #[error("should begin with `GGUF`")]
    NoMagic,
    #[error("GGUF version should be 2 or 3, got {0}{1}")]
    Version(u32, &'static str),
    #[error("should go on: {what} needs {needed} bytes at {at}, the file has {len}")]
    Truncated { what: &'static str, at: usize, needed: u64, len: usize },
    #[error("number of {what} should be at most {most}, what the rest of the file can hold, got {got}")]
    Count { what: &'static str, most: usize, got: u64 },
    #[error("{what} at {at} should be 1 to 65535 bytes of UTF-8")]
    Name { what: &'static str, at: usize },
    #[error("metadata keys should be unique, `{0}` occurs twice")]
    DuplicateKey(String),
    #[error("metadata `{key}`: {rule}")]
    Value { key: String, rule: String },
    #[error("tensor names should be unique, `{0}` occurs twice")]
    DuplicateTensor(String),
    #[error("tensor `{tensor}`: {rule}")]
    Tensor { tensor: String, rule: String },
    #[error("data should end with the last tensor and its padding at {end}, {extra} bytes follow")]
    Trailing { end: usize, extra: usize },
}

/// A metadata value; text and lists are ranges of the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Single(f32),
    Double(f64),
    Bool(bool),
    Text(Range<usize>),
    List(List),
}

/// A metadata entry: its value, and type and value as they are written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) value: Value,
    pub(super) raw: Range<usize>,
}

/// An array: what it holds, how many, and where the first begins.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct List {
    pub(super) kind: Kind,
    pub(super) len: usize,
    pub(super) at: Range<usize>,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::List,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn of(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// The number that stands for it in a file.
    pub(super) fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a value; `None` where they vary.
    fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::List => None,
        }
    }
}

/// One file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Container {
    pub(super) metadata: BTreeMap<String, Entry>,
    /// Tensors in the order of their data, shapes outermost first.
    pub(super) tensors: Vec<(String, TensorInfo)>,
    pub(super) data_start: usize,
}

/// The type of a tensor by its number.
pub(super) fn dtype(id: u32) -> Result<Dtype, String> {
    let plain = match id {
        0 => Dtype::F32,
        1 => Dtype::F16,
        24 => Dtype::I8,
        25 => Dtype::I16,
        26 => Dtype::I32,
        27 => Dtype::I64,
        28 => Dtype::F64,
        30 => Dtype::Bf16,
        _ => {
            let known = BlockType::ALL.into_iter().find(|b| b.id() == id);
            return known.map(Dtype::Blocks).ok_or_else(|| {
                let gone = match id {
                    4 | 5 | 31..=33 | 36..=38 => ", which llama.cpp has removed",
                    9 | 15 => ", which is of activations",
                    41 => " (Q1_0)",
                    _ => "",
                };
                let list: Vec<_> = BlockType::ALL.iter().map(|b| b.name()).collect();
                format!("type should be F32, F16, BF16 or one of {}, got number {id}{gone}", list.join(", "))
            });
        }
    };
    Ok(plain)
}

impl Container {
    /// Reads and checks a file without its data.
    pub(super) fn parse(file: &[u8]) -> Result<Self, GgufError> {
        let mut r = Reader { file, at: 0 };
        if !file.starts_with(MAGIC) {
            return Err(GgufError::NoMagic);
        }
        r.at = MAGIC.len();
        match r.u32("the version")? {
            2 | VERSION => {}
            1 => return Err(GgufError::Version(1, ", of 2023: convert the model again")),
            v if v & 0xffff == 0 => return Err(GgufError::Version(v.swap_bytes(), " in big-endian order")),
            v => return Err(GgufError::Version(v, "")),
        }
        let (tensors, entries) = (r.u64("the number of tensors")?, r.u64("the number of metadata")?);
        // A key of one byte, a type and a byte; a name of one byte, a dimension, a type and an
        // offset.
        let entries = r.count("metadata entries", entries, 8 + 1 + 4 + 1)?;
        let tensors = r.count("tensors", tensors, 8 + 1 + 4 + 8 + 4 + 8)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = r.name("a metadata key")?;
            let start = r.at;
            let value = r.value(&key)?;
            if metadata.insert(key.clone(), Entry { value, raw: start..r.at }).is_some() {
                return Err(GgufError::DuplicateKey(key));
            }
        }
        let alignment = alignment(&metadata)?;
        let mut listed = Vec::with_capacity(tensors);
        let mut seen = HashSet::with_capacity(tensors);
        for _ in 0..tensors {
            let name = r.name("a tensor name")?;
            if !seen.insert(name.clone()) {
                return Err(GgufError::DuplicateTensor(name));
            }
            let (dtype, shape, bytes, offset) = r.tensor(&name)?;
            listed.push((name, dtype, shape, bytes, offset));
        }
        // Neither sum overflows: `at` is at most the length of the file, and alignments are
        // checked.
        let data_start = r.at.next_multiple_of(alignment);
        let mut placed = Vec::with_capacity(tensors);
        let mut next = 0usize;
        for (name, dtype, shape, bytes, offset) in listed {
            let bad = |rule| GgufError::Tensor { tensor: name.clone(), rule };
            if offset != next as u64 {
                return Err(bad(format!(
                    "offset should be {next}, the first multiple of {alignment} behind the tensor before, got {offset}"
                )));
            }
            let end = data_start.checked_add(next).and_then(|at| at.checked_add(bytes));
            let Some(end) = end.filter(|&end| end <= file.len()) else {
                return Err(bad(format!(
                    "its {bytes} bytes should lie in the file, which has {}",
                    file.len()
                )));
            };
            placed.push((name, TensorInfo { dtype, shape, range: data_start + next..end }));
            next = (next + bytes).next_multiple_of(alignment);
        }
        if let Some(extra) = file.len().checked_sub(data_start + next).filter(|&extra| extra > 0) {
            return Err(GgufError::Trailing { end: data_start + next, extra });
        }
        Ok(Self { metadata, tensors: placed, data_start })
    }
}

fn alignment(metadata: &BTreeMap<String, Entry>) -> Result<usize, GgufError> {
    match metadata.get(ALIGNMENT_KEY).map(|entry| &entry.value) {
        None => Ok(ALIGNMENT),
        Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => Ok(*n as usize),
        Some(_) => Err(GgufError::Value {
            key: ALIGNMENT_KEY.to_owned(),
            rule: "should be a power of two up to 2^20".to_owned(),
        }),
    }
}

/// A place in a file.
pub(super) struct Reader<'a> {
    pub(super) file: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, what: &'static str, needed: u64) -> Result<&'a [u8], GgufError> {
        let rest = &self.file[self.at..];
        let bytes = usize::try_from(needed).ok().and_then(|n| rest.get(..n));
        let Some(bytes) = bytes else {
            return Err(GgufError::Truncated { what, at: self.at, needed, len: self.file.len() });
        };
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(what, N as u64)?);
        Ok(array)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A number of things that take at least `each` bytes.
    fn count(&self, what: &'static str, got: u64, each: usize) -> Result<usize, GgufError> {
        let most = (self.file.len() - self.at) / each;
        usize::try_from(got).ok().filter(|&n| n <= most).ok_or(GgufError::Count { what, most, got })
    }

    fn name(&mut self, what: &'static str) -> Result<String, GgufError> {
        let at = self.at;
        let len = self.u64(what)?;
        let bytes = self.take(what, len)?;
        let text = std::str::from_utf8(bytes).ok().filter(|t| (1..=MAX_NAME).contains(&t.len()));
        text.map(str::to_owned).ok_or(GgufError::Name { what, at })
    }

    fn kind(&mut self, key: &str) -> Result<Kind, GgufError> {
        let id = self.u32("the type of a value")?;
        Kind::of(id).ok_or_else(|| GgufError::Value {
            key: key.to_owned(),
            rule: format!("type should be a number up to 12, got {id}"),
        })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        const WHAT: &str = "a metadata value";
        Ok(match self.kind(key)? {
            Kind::U8 => Value::Unsigned(u64::from(u8::from_le_bytes(self.array(WHAT)?))),
            Kind::U16 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(WHAT)?))),
            Kind::U32 => Value::Unsigned(u64::from(u32::from_le_bytes(self.array(WHAT)?))),
            Kind::U64 => Value::Unsigned(u64::from_le_bytes(self.array(WHAT)?)),
            Kind::I8 => Value::Signed(i64::from(i8::from_le_bytes(self.array(WHAT)?))),
            Kind::I16 => Value::Signed(i64::from(i16::from_le_bytes(self.array(WHAT)?))),
            Kind::I32 => Value::Signed(i64::from(i32::from_le_bytes(self.array(WHAT)?))),
            Kind::I64 => Value::Signed(i64::from_le_bytes(self.array(WHAT)?)),
            Kind::F32 => Value::Single(f32::from_le_bytes(self.array(WHAT)?)),
            Kind::F64 => Value::Double(f64::from_le_bytes(self.array(WHAT)?)),
            Kind::Bool => match self.array::<1>(WHAT)? {
                [byte @ 0..=1] => Value::Bool(byte == 1),
                [byte] => {
                    let rule = format!("should be 0 or 1 (a bool), got {byte}");
                    return Err(GgufError::Value { key: key.to_owned(), rule });
                }
            },
            Kind::Text => Value::Text(self.text()?),
            Kind::List => Value::List(self.list(key, 1)?),
        })
    }

    /// The bytes of a string.
    pub(super) fn text(&mut self) -> Result<Range<usize>, GgufError> {
        let len = self.u64("the length of a string")?;
        let start = self.at;
        self.take("a string", len)?;
        Ok(start..self.at)
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<List, GgufError> {
        let kind = self.kind(key)?;
        let len = self.u64("the length of an array")?;
        let len = match kind {
            Kind::Text => self.count("strings of an array", len, 8)?,
            Kind::List => self.count("arrays of an array", len, 12)?,
            _ => self.count("elements of an array", len, kind.size().unwrap_or(1))?,
        };
        let start = self.at;
        match kind {
            Kind::Text => (0..len).try_for_each(|_| self.text().map(drop))?,
            Kind::List if depth == MAX_DEPTH => {
                let rule = format!("arrays should be at most {MAX_DEPTH} deep");
                return Err(GgufError::Value { key: key.to_owned(), rule });
            }
            Kind::List => (0..len).try_for_each(|_| self.list(key, depth + 1).map(drop))?,
            _ => self.at += len * kind.size().unwrap_or(1),
        }
        Ok(List { kind, len, at: start..self.at })
    }

    /// Type, shape, bytes and offset of a tensor.
    fn tensor(&mut self, name: &str) -> Result<(Dtype, Vec<usize>, usize, u64), GgufError> {
        let bad = |rule| GgufError::Tensor { tensor: clip(name), rule };
        let dims = self.u32("the dimensions of a tensor")?;
        if !(1..=MAX_DIMS).contains(&dims) {
            return Err(bad(format!("should have 1 to {MAX_DIMS} dimensions, got {dims}")));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            let d = self.u64("a dimension")?;
            let d = usize::try_from(d).ok().filter(|&d| d > 0);
            shape.push(
                d.ok_or_else(|| bad("dimensions should be at least 1 and fit this machine".to_owned()))?,
            );
        }
        let dtype = dtype(self.u32("the type of a tensor")?).map_err(bad)?;
        let offset = self.u64("the offset of a tensor")?;
        let inner = shape[0];
        if !inner.is_multiple_of(dtype.block_len()) {
            let rule =
                format!("rows of {dtype} should be whole blocks of {}, got {inner}", dtype.block_len());
            return Err(bad(rule));
        }
        let blocks = shape[1..].iter().try_fold(inner / dtype.block_len(), |n, &d| n.checked_mul(d));
        let bytes = blocks.and_then(|n| n.checked_mul(dtype.block_bytes())).filter(|&n| n < 1 << 60);
        let bytes = bytes.ok_or_else(|| bad("should have fewer than 2^60 bytes".to_owned()))?;
        shape.reverse();
        Ok((dtype, shape, bytes, offset))
    }
}
