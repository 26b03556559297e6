//! The safetensors header, read strictly.
//!
//! Format (<https://github.com/huggingface/safetensors>): 8 bytes little-endian header length *n*,
//! *n* bytes of JSON mapping each tensor name to `{dtype, shape, data_offsets: [begin, end]}` plus
//! an optional `__metadata__` map of strings, then the data. Offsets count from the end of the
//! header; the tensors, sorted by offset, cover the data exactly.
//!
//! Every rule is checked before any number from the file sizes an allocation or indexes a byte, and
//! each has its own [`HeaderError`] variant. We deviate from the `safetensors` crate (0.8) in four
//! places, all towards strictness: a **duplicate key** is an error (the crate silently keeps the
//! last, so two readers can see two models in one file), `__metadata__` keys must be unique too, a
//! shape may have at most [`MAX_RANK`] dimensions, and an unknown dtype is an error of its own.
//! Tensors of the types that nothing here reads ([`UNREAD`]) are checked as others are and kept
//! apart. The property test `differential` holds the two readers together.
//!
//! Cost: one pass over the header; memory proportional to it (at most [`MAX_HEADER`] bytes).

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use crate::dtype::Dtype;

/// Largest accepted header, the limit of the reference implementation.
pub const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 16;

/// Type, shape and place of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Byte range within the file (header included), checked to lie inside it.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        // Others than 0 may have a product beyond what a number holds.
        if self.range.is_empty() { 0 } else { self.shape.iter().product() }
    }

    /// `(rows, cols)` of the matrix view: the first dimension by the product of the others; a
    /// vector is one row.
    #[must_use]
    pub fn rows_cols(&self) -> (usize, usize) {
        rows_cols(&self.shape)
    }
}

/// See [`TensorInfo::rows_cols`].
pub(crate) fn rows_cols(shape: &[usize]) -> (usize, usize) {
    match shape {
        [] => (1, 1),
        [n] => (1, *n),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
    }
}

/// Types of the format that nothing here reads, and the bits of an element.
pub const UNREAD: [(&str, usize); 8] = [
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F8_E5M2", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("C64", 64),
];

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// Tensors in the order of their data.
    pub tensors: Vec<(String, TensorInfo)>,
    /// Names and types of those whose type is one of [`UNREAD`].
    pub unread: Vec<(String, &'static str)>,
    /// Where the data begin: 8 + header length.
    pub data_start: usize,
}

/// A rule of the format that a file breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of each variant is its documentation")]
pub enum HeaderError {
    #[error("file should have at least 8 bytes (the header length), got {got}")]
    TooShort { got: usize },
    #[error("header length should be at most {MAX_HEADER}, got {got}")]
    HeaderTooLarge { got: u64 },
    #[error("header of {header} bytes should fit in the file, which has {file} bytes")]
    HeaderBeyondFile { header: u64, file: usize },
    #[error("header should be UTF-8, byte {at} of it is not")]
    NotUtf8 { at: usize },
    #[error("header should be a JSON object: {detail}")]
    NotJson { detail: String },
    #[error("header keys should be unique, `{key}` occurs twice")]
    DuplicateKey { key: String },
    #[error("tensor `{tensor}`: entry should be {{dtype, shape, data_offsets}}: {detail}")]
    BadEntry { tensor: String, detail: String },
    #[error("`__metadata__` should map strings to strings: {detail}")]
    BadMetadata { detail: String },
    #[error(
        "tensor `{tensor}`: dtype should be one of BOOL, U8..U64, I8..I64, F8_*, F16, BF16, F32, F64 (F4, F6_*, C64), got `{dtype}`"
    )]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor `{tensor}`: shape {detail}")]
    BadShape { tensor: String, detail: &'static str },
    #[error("tensor `{tensor}`: data_offsets {detail}")]
    BadOffsets { tensor: String, detail: &'static str },
    #[error("tensor `{tensor}`: data should end within the {data} data bytes of the file, ends at {end}")]
    BeyondFile { tensor: String, end: u64, data: usize },
    #[error(
        "tensor `{tensor}`: data should begin at {want}, where the previous tensor ends, overlap it from {got}"
    )]
    Overlap { tensor: String, want: usize, got: usize },
    #[error(
        "tensor `{tensor}`: data should begin at {want}, where the previous tensor ends, leave a gap up to {got}"
    )]
    Gap { tensor: String, want: usize, got: usize },
    #[error(
        "tensor `{tensor}`: {dtype} of shape {shape:?} should take {want} bytes, data_offsets give {got}"
    )]
    SizeMismatch { tensor: String, dtype: String, shape: Vec<usize>, want: usize, got: usize },
    #[error("file should end with the last tensor, {extra} bytes follow it")]
    TrailingBytes { extra: usize },
}

impl Header {
    /// Reads and checks the header of a whole file.
    ///
    /// # Errors
    /// The first [`HeaderError`] found.
    pub fn parse(file: &[u8]) -> Result<Self, HeaderError> {
        let Some(prefix) = file.first_chunk::<8>() else {
            return Err(HeaderError::TooShort { got: file.len() });
        };
        let declared = u64::from_le_bytes(*prefix);
        if declared > MAX_HEADER {
            return Err(HeaderError::HeaderTooLarge { got: declared });
        }
        let beyond = HeaderError::HeaderBeyondFile { header: declared, file: file.len() };
        let Some(data_start) = usize::try_from(declared).ok().and_then(|n| n.checked_add(8)) else {
            return Err(beyond);
        };
        let Some(json) = file.get(8..data_start) else { return Err(beyond) };
        let json = std::str::from_utf8(json).map_err(|e| HeaderError::NotUtf8 { at: e.valid_up_to() })?;
        let raw = RawHeader::parse(json)?;
        layout(raw, data_start, file.len() - data_start)
    }
}

/// An entry checked alone.
struct Checked {
    /// Or the name of one of [`UNREAD`].
    dtype: Result<Dtype, &'static str>,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// Turns the raw entries into tensors that cover the data exactly.
fn layout(raw: RawHeader, data_start: usize, data_len: usize) -> Result<Header, HeaderError> {
    let mut entries = Vec::with_capacity(raw.entries.len());
    for (tensor, entry) in raw.entries {
        let checked = check_entry(&tensor, entry, data_len)?;
        entries.push((tensor, checked));
    }
    // Empty tensors share their offset with a neighbour; the name makes the order total, so it is
    // the same everywhere.
    entries.sort_by(|(na, a), (nb, b)| {
        (a.range.start, a.range.end, na.as_str()).cmp(&(b.range.start, b.range.end, nb.as_str()))
    });
    let (mut tensors, mut unread) = (Vec::with_capacity(entries.len()), Vec::new());
    let mut want = 0;
    for (tensor, Checked { dtype, shape, range }) in entries {
        let got = range.start;
        if got != want {
            return Err(if got < want {
                HeaderError::Overlap { tensor, want, got }
            } else {
                HeaderError::Gap { tensor, want, got }
            });
        }
        want = range.end;
        match dtype {
            Ok(dtype) => {
                // Both ends are at most `data_len`, and `data_start + data_len` is the length of
                // the file: no overflow.
                let range = data_start + range.start..data_start + range.end;
                tensors.push((tensor, TensorInfo { dtype, shape, range }));
            }
            Err(name) => unread.push((tensor, name)),
        }
    }
    if want != data_len {
        return Err(HeaderError::TrailingBytes { extra: data_len - want });
    }
    Ok(Header { metadata: raw.metadata, tensors, unread, data_start })
}

/// Checks one entry alone; the range it returns counts from the start of the data.
fn check_entry(tensor: &str, e: RawEntry, data_len: usize) -> Result<Checked, HeaderError> {
    let name = || tensor.to_owned();
    let (dtype, bits) = match e.dtype.parse::<Dtype>() {
        Ok(dtype) => (Ok(dtype), 8 * dtype.block_bytes()),
        Err(_) => match UNREAD.iter().find(|(name, _)| *name == e.dtype) {
            Some(&(name, bits)) => (Err(name), bits),
            None => return Err(HeaderError::UnknownDtype { tensor: name(), dtype: e.dtype }),
        },
    };
    let bad_shape = |detail| HeaderError::BadShape { tensor: name(), detail };
    if e.shape.too_long {
        return Err(bad_shape("should have at most 16 dimensions"));
    }
    let mut shape = Vec::with_capacity(e.shape.dims.len());
    for d in e.shape.dims {
        shape.push(match d {
            Int::Ok(v) => usize::try_from(v).map_err(|_| bad_shape("does not fit this machine"))?,
            Int::Negative => return Err(bad_shape("should not be negative")),
            Int::NotInteger => return Err(bad_shape("should be whole numbers below 2^64")),
        });
    }
    let offset = |v: Int| match v {
        Int::Ok(v) => Ok(v),
        Int::Negative => Err(HeaderError::BadOffsets { tensor: name(), detail: "should not be negative" }),
        Int::NotInteger => {
            Err(HeaderError::BadOffsets { tensor: name(), detail: "should be whole numbers below 2^64" })
        }
    };
    let (begin, end) = (offset(e.data_offsets.0)?, offset(e.data_offsets.1)?);
    if begin > end {
        return Err(HeaderError::BadOffsets {
            tensor: name(),
            detail: "should be [begin, end] with begin <= end",
        });
    }
    let beyond = || HeaderError::BeyondFile { tensor: name(), end, data: data_len };
    let end = usize::try_from(end).ok().filter(|&v| v <= data_len).ok_or_else(beyond)?;
    let begin = usize::try_from(begin).map_err(|_| beyond())?;
    let want = shape
        .iter()
        .try_fold(bits, |n, &d| n.checked_mul(d))
        // A zero hides an overflow behind it or trips over one before it, by its place; refuse both
        // alike.
        .filter(|_| shape.iter().filter(|&&d| d > 0).try_fold(bits, |n, &d| n.checked_mul(d)).is_some())
        .ok_or_else(|| bad_shape("overflows: its bit count should be below 2^64"))?;
    if !want.is_multiple_of(8) {
        return Err(bad_shape("should make whole bytes"));
    }
    let want = want / 8;
    if want != end - begin {
        let dtype = e.dtype;
        return Err(HeaderError::SizeMismatch { tensor: name(), dtype, shape, want, got: end - begin });
    }
    Ok(Checked { dtype, shape, range: begin..end })
}

#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    entries: Vec<(String, RawEntry)>,
}

impl RawHeader {
    fn parse(json: &str) -> Result<Self, HeaderError> {
        let mut failure = None;
        let mut de = serde_json::Deserializer::from_str(json);
        let parsed =
            TopLevel { failure: &mut failure }.deserialize(&mut de).and_then(|raw| de.end().map(|()| raw));
        // serde can only carry text: the typed reason, where there is one, was left aside.
        parsed.map_err(|e| failure.unwrap_or_else(|| HeaderError::NotJson { detail: e.to_string() }))
    }
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Dims,
    data_offsets: (Int, Int),
}

/// A JSON number, kept apart by what can be wrong with it.
enum Int {
    Ok(u64),
    Negative,
    NotInteger,
}

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Int;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a whole number")
            }
            fn visit_u64<E>(self, v: u64) -> Result<Int, E> {
                Ok(Int::Ok(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Int, E> {
                Ok(u64::try_from(v).map_or(Int::Negative, Int::Ok))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Int, E> {
                Ok(Int::NotInteger)
            }
        }
        d.deserialize_any(V)
    }
}

/// A shape; stops storing at [`MAX_RANK`], so that a hostile list costs no memory.
struct Dims {
    dims: Vec<Int>,
    too_long: bool,
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Dims;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while dims.len() < MAX_RANK {
                    match seq.next_element()? {
                        Some(d) => dims.push(d),
                        None => return Ok(Dims { dims, too_long: false }),
                    }
                }
                let mut too_long = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    too_long = true;
                }
                Ok(Dims { dims, too_long })
            }
        }
        d.deserialize_seq(V)
    }
}

struct TopLevel<'a> {
    failure: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for TopLevel<'_> {
    type Value = RawHeader;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<RawHeader, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TopLevel<'_> {
    type Value = RawHeader;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut raw = RawHeader::default();
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                return Err(fail(self.failure, HeaderError::DuplicateKey { key }));
            }
            if key == "__metadata__" {
                match map.next_value::<Option<UniqueMap>>() {
                    Ok(m) => raw.metadata = m.map(|m| m.0).unwrap_or_default(),
                    Err(e) => {
                        return Err(fail(self.failure, HeaderError::BadMetadata { detail: e.to_string() }));
                    }
                }
            } else {
                match map.next_value::<RawEntry>() {
                    Ok(entry) => raw.entries.push((key, entry)),
                    Err(e) => {
                        let detail = e.to_string();
                        return Err(fail(self.failure, HeaderError::BadEntry { tensor: key, detail }));
                    }
                }
            }
        }
        Ok(raw)
    }
}

fn fail<E: de::Error>(slot: &mut Option<HeaderError>, why: HeaderError) -> E {
    let text = why.to_string();
    *slot = Some(why);
    E::custom(text)
}

/// A JSON map of strings whose keys must be unique; also the reader of an index's `weight_map`.
pub(crate) struct UniqueMap(pub(crate) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = UniqueMap;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
                let mut out = BTreeMap::new();
                while let Some((k, v)) = map.next_entry::<String, String>()? {
                    if out.contains_key(&k) {
                        return Err(de::Error::custom(format_args!("key `{k}` occurs twice")));
                    }
                    out.insert(k, v);
                }
                Ok(UniqueMap(out))
            }
        }
        d.deserialize_map(V)
    }
}
