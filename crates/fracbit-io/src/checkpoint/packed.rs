//! Matrices that other tools quantized, presented as ordinary ones.
//!
//! What such a tool stores in place of `name.weight`, some tensors of codes, scales and tables,
//! becomes one tensor of that name, of the matrix's shape `(out, in)` and of a [`Packing`] as its
//! type, whose rows are decoded as they are read. Scales are read with them, from the map, and only
//! small tables before: a model takes no memory beside its map. Each tool has a module that checks
//! types, shapes and indices of its tensors against each other and against the block
//! `quantization_config`, after which reading a row cannot fail.

mod awq;
mod bitsandbytes;
mod compressed;
mod gptq;
mod grid;
mod mxfp4;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use serde_json::Value;

use super::{Checkpoint, Entry, Stored};
use crate::config::CONFIG;
use crate::dtype::{Dtype, Packing};
use crate::error::Error;
use crate::header::TensorInfo;
use bitsandbytes::Table;
use grid::Grid;

type Bytes<'a> = &'a [u8];

/// Tensors that a matrix is made of, at most.
const PIECES: usize = 4;

/// One of the tensors that a matrix is made of.
#[derive(Clone, Debug, PartialEq)]
struct Piece {
    shard: usize,
    info: TensorInfo,
}

/// How codes become numbers.
#[derive(Clone, Debug, PartialEq)]
enum Codec {
    Grid(Grid),
    Table(Table),
    Mxfp4,
}

/// A matrix of codes, or some rows of one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Packed {
    codec: Codec,
    /// Codes first, then what the codec says.
    pieces: Arc<[Option<Piece>; PIECES]>,
    /// The row of the matrix that is row 0 here.
    first: usize,
    /// Numbers of the whole matrix.
    all: usize,
}

/// Stored numbers that are read one by one: f16, bf16 or `f32`.
#[derive(Clone, Copy, Debug)]
struct Numbers<'a> {
    dtype: Dtype,
    bytes: Bytes<'a>,
}

impl Numbers<'_> {
    fn at(&self, at: usize) -> f32 {
        let half = |at| self.bytes.as_chunks().0[at];
        match self.dtype {
            Dtype::F16 => f16::from_le_bytes(half(at)).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes(half(at)).to_f32(),
            _ => f32::from_bits(word(self.bytes, at)),
        }
    }
}

fn word(bytes: Bytes<'_>, at: usize) -> u32 {
    u32::from_le_bytes(bytes.as_chunks().0[at])
}

/// A packed matrix with the bytes of its pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedView<'a> {
    packed: &'a Packed,
    pieces: [Numbers<'a>; PIECES],
}

impl PartialEq for PackedView<'_> {
    fn eq(&self, other: &Self) -> bool {
        let same = |(a, b): (&Numbers<'_>, &Numbers<'_>)| a.bytes == b.bytes;
        self.packed.codec == other.packed.codec
            && self.packed.first == other.packed.first
            && self.pieces.iter().zip(&other.pieces).all(same)
    }
}

impl PackedView<'_> {
    /// Neighbouring numbers of a row of `width`.
    pub(super) fn row_into(&self, row: usize, width: usize, cols: Range<usize>, out: &mut [f32]) {
        let row = self.packed.first + row;
        let at = row * width + cols.start..row * width + cols.end;
        match &self.packed.codec {
            Codec::Grid(grid) => grid.row_into(self.pieces, row, cols, out),
            Codec::Table(table) => table.numbers_into(self.pieces, at, out),
            Codec::Mxfp4 => mxfp4::numbers_into(self.pieces, at, out),
        }
    }

    /// All that the numbers depend on but names, shapes and types.
    pub(super) fn hash(&self, hasher: &mut blake3::Hasher) {
        hasher.update(format!("{:?}\0{}\0", self.packed.codec, self.packed.first).as_bytes());
        for piece in &self.pieces {
            hasher.update(format!("{}\0{}\0", piece.dtype, piece.bytes.len()).as_bytes());
            hasher.update_rayon(piece.bytes);
        }
    }
}

impl Packed {
    /// That of the rows from `row` on.
    pub(super) fn starting_at(&self, row: usize) -> Self {
        Self { first: self.first + row, ..self.clone() }
    }

    pub(super) fn view<'a>(&'a self, checkpoint: &'a Checkpoint) -> PackedView<'a> {
        let of = |piece: &'a Option<Piece>| match piece {
            Some(Piece { shard, info }) => {
                Numbers { dtype: info.dtype, bytes: &checkpoint.shards[*shard].bytes[info.range.clone()] }
            }
            None => Numbers { dtype: Dtype::U8, bytes: &[] },
        };
        PackedView { packed: self, pieces: self.pieces.each_ref().map(of) }
    }

    /// Bytes of so many numbers: their share of all pieces.
    pub(super) fn bytes(&self, numbers: usize) -> u64 {
        let all: usize = self.pieces.iter().flatten().map(|piece| piece.info.range.len()).sum();
        (all as u128 * numbers as u128 / self.all.max(1) as u128) as u64
    }
}

/// A matrix as a tool's module found it.
struct Found {
    /// The matrix's name.
    name: String,
    packing: Packing,
    shape: Vec<usize>,
    codec: Codec,
    /// Names, codes first; as many as the codec reads.
    pieces: [Option<String>; PIECES],
    /// Further tensors that say nothing more.
    spent: Vec<String>,
}

/// What a tool's module is told: the checkpoint and its block of `config.json`.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    block: Option<&'a Value>,
}

impl Source<'_> {
    /// The matrix that this tensor shows, if it is the one that shows one.
    fn find(&self, name: &str) -> Result<Option<Found>, Error> {
        let there = |name: String| self.checkpoint.contains(&name);
        let of = |dtype| self.checkpoint.info(name).is_ok_and(|info| info.dtype == dtype);
        if let Some(stem) = name.strip_suffix(".qweight").filter(|_| of(Dtype::I32)) {
            let awq = awq::fits(self, stem);
            self.made_by(name, if awq { "awq" } else { "gptq" })?;
            return (if awq { awq::find(self, stem) } else { gptq::find(self, stem) }).map(Some);
        }
        if let Some(stem) = name.strip_suffix(".weight_packed") {
            self.made_by(name, "compressed-tensors")?;
            return compressed::packed(self, stem).map(Some);
        }
        if let Some((stem, kind)) = bitsandbytes::state(name) {
            self.made_by(name, "bitsandbytes")?;
            return bitsandbytes::find(self, stem, kind).map(Some);
        }
        if let Some(stem) = name.strip_suffix("_blocks").filter(|stem| there(format!("{stem}_scales"))) {
            self.made_by(name, "mxfp4")?;
            return mxfp4::find(self, stem).map(Some);
        }
        let Some(stem) = name.strip_suffix(".weight").filter(|_| of(Dtype::I8)) else { return Ok(None) };
        if there(format!("{stem}.SCB")) {
            self.made_by(name, "bitsandbytes")?;
            return bitsandbytes::int8(self, stem).map(Some);
        }
        if there(format!("{stem}.weight_scale")) && self.method()? == Some("compressed-tensors") {
            return compressed::bytes(self, stem).map(Some);
        }
        Ok(None)
    }

    fn method(&self) -> Result<Option<&str>, Error> {
        self.text("quant_method")
    }

    /// Refuses a tensor of one method where the block says another.
    fn made_by(&self, tensor: &str, method: &str) -> Result<(), Error> {
        let Some(said) = self.method()?.filter(|&said| said != method) else { return Ok(()) };
        let rule = format!("should be \"{method}\", by what `{tensor}` is, got \"{said}\"");
        Err(self.refused_block("quant_method", rule))
    }

    fn refused(&self, tensor: &str, rule: String) -> Error {
        let path = self.checkpoint.shard_of(tensor).map_or(self.checkpoint.path(), |shard| &shard.path);
        Error::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), rule }
    }

    fn refused_block(&self, field: &str, rule: String) -> Error {
        let path = self.checkpoint.dir().join(CONFIG);
        Error::Config { path, field: format!("quantization_config.{field}"), rule }
    }

    /// A field of the block; `null` is none.
    fn field(&self, name: &str) -> Option<&Value> {
        self.block?.get(name).filter(|value| !value.is_null())
    }

    /// A field that should be text.
    fn text(&self, name: &str) -> Result<Option<&str>, Error> {
        let Some(value) = self.field(name) else { return Ok(None) };
        let text = value.as_str().map(Some);
        text.ok_or_else(|| self.refused_block(name, format!("should be text, got {value}")))
    }

    /// A field that should be a whole number.
    fn integer(&self, name: &str) -> Result<Option<i64>, Error> {
        let Some(value) = self.field(name) else { return Ok(None) };
        let number = value.as_i64().map(Some);
        number.ok_or_else(|| self.refused_block(name, format!("should be a whole number, got {value}")))
    }

    /// The tensor `name`, which should have one of these types.
    fn typed(&self, name: &str, dtypes: &[Dtype]) -> Result<&TensorInfo, Error> {
        let info = self.checkpoint.info(name)?;
        if dtypes.contains(&info.dtype) {
            return Ok(info);
        }
        let names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
        Err(self.refused(name, format!("dtype should be {}, got {}", names.join(" or "), info.dtype)))
    }

    /// The two dimensions of a matrix of one of these types, neither of them 0.
    fn matrix(&self, name: &str, dtypes: &[Dtype]) -> Result<[usize; 2], Error> {
        match self.typed(name, dtypes)?.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
            ref shape => Err(self.refused(name, format!("should be a matrix, got shape {shape:?}"))),
        }
    }

    /// Refuses a tensor of another shape, with the reason for the right one.
    fn shaped(&self, name: &str, shape: &[usize], why: &str) -> Result<(), Error> {
        let got = &self.checkpoint.info(name)?.shape;
        if got == shape {
            return Ok(());
        }
        Err(self.refused(name, format!("shape should be {shape:?} ({why}), got {got:?}")))
    }

    /// So many numbers of a small table, checked to be finite.
    fn numbers(&self, name: &str, count: usize, why: &str) -> Result<Vec<f32>, Error> {
        self.typed(name, &[Dtype::F32])?;
        self.shaped(name, &[count], why)?;
        self.checkpoint.to_f32(name)
    }

    /// Refuses a list of groups that has one which is not there.
    fn listed(&self, name: &str, cols: usize, groups: usize) -> Result<(), Error> {
        self.typed(name, &[Dtype::I32])?;
        self.shaped(name, &[cols], "a group for each input")?;
        let view = self.checkpoint.tensor(name)?;
        let beyond = (0..cols).find(|&col| word(view.bytes, col) as usize >= groups);
        let Some(col) = beyond else { return Ok(()) };
        let got = word(view.bytes, col).cast_signed();
        Err(self.refused(name, format!("number {col} should be a group, 0 to {}, got {got}", groups - 1)))
    }
}

/// Types of scales.
const SCALES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];
/// Ends of names of tensors that are about activations.
const OF_ACTIVATIONS: [&str; 4] =
    [".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"];

impl Checkpoint {
    /// The same checkpoint with the matrices that other tools quantized under the names that they
    /// had before, decoded as they are read. `block` is `quantization_config` of `config.json`.
    ///
    /// Read are GPTQ (2, 3, 4, 8 bits), AWQ (4 bits, GEMM), compressed-tensors (`pack-quantized`
    /// of 2, 4 or 8 bits, `int-quantized`, `mxfp4-pack-quantized`), bitsandbytes (NF4, FP4,
    /// LLM.int8) and MXFP4 as GPT-OSS has it. Tensors of other tools stay as they are.
    ///
    /// # Errors
    /// [`Error::Tensor`] and [`Error::Config`] for a tensor of one of these tools whose type, shape
    /// or content contradicts another or the block, and for a variant that is not read;
    /// [`Error::Index`] for a matrix that is also stored whole; [`Error::MissingTensor`].
    pub fn unpacked(mut self, block: Option<&Value>) -> Result<Self, Error> {
        let source = Source { checkpoint: &self, block };
        let mut all = Vec::new();
        for name in self.tensors.keys() {
            all.extend(source.find(name)?);
        }
        if all.is_empty() {
            return Ok(self);
        }
        for found in all {
            self.adopt_packed(found)?;
        }
        self.tensors.retain(|name, _| !OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)));
        Ok(self)
    }

    fn adopt_packed(&mut self, found: Found) -> Result<(), Error> {
        let Found { name, packing, shape, codec, pieces, spent } = found;
        let names = pieces;
        let codes = names[0].clone().unwrap_or_default();
        let piece = |name: &Option<String>| {
            let entry = self.tensors.get(name.as_ref()?).filter(|entry| entry.packed.is_none())?;
            Some(Piece { shard: entry.shard, info: entry.info.clone() })
        };
        let pieces = Arc::new(names.each_ref().map(piece));
        let taken = names.iter().zip(&*pieces).find(|(name, piece)| name.is_some() && piece.is_none());
        let Some(Piece { shard, info }) = pieces[0].clone().filter(|_| taken.is_none()) else {
            let tensor = taken.and_then(|(name, _)| name.clone()).unwrap_or(codes);
            let rule = "should be of one tool, is beside the tensors of two".to_owned();
            return Err(Error::Tensor { path: self.path.clone(), tensor, rule });
        };
        for name in names.iter().flatten().chain(&spent) {
            self.tensors.remove(name);
        }
        let packed = Packed { codec, pieces, first: 0, all: shape.iter().product() };
        let info = TensorInfo { dtype: Dtype::Packed(packing), shape, range: info.range };
        let entry = Entry { shard, info, scale: None, stored: Stored::AS_NAMED, packed: Some(packed) };
        if self.tensors.insert(name.clone(), entry).is_some() {
            let rule =
                format!("tensor `{name}` should not be stored beside `{codes}`, which is the same matrix");
            return Err(Error::Index { path: self.shards[shard].path.clone(), rule });
        }
        Ok(())
    }

    /// How many tensors each form of packing has, sorted by form.
    #[must_use]
    pub fn packings(&self) -> BTreeMap<Packing, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.tensors.values() {
            if let Dtype::Packed(packing) = entry.info.dtype {
                *counts.entry(packing).or_default() += 1;
            }
        }
        counts
    }
}

/// Columns of a group where no list says which has which: `said`, -1 for a whole row, or as many as
/// share `scales` evenly.
fn group(
    source: &Source<'_>,
    said: Option<i64>,
    scales: &str,
    cols: usize,
    count: usize,
) -> Result<usize, Error> {
    let size = match said {
        Some(-1) => Some(cols),
        Some(size) => usize::try_from(size).ok().filter(|&size| size > 0),
        None => Some(cols / count).filter(|_| cols.is_multiple_of(count)),
    };
    match size {
        Some(size) if cols.div_ceil(size) == count => Ok(size),
        _ => {
            let said = said.map_or("no group_size".to_owned(), |size| format!("group_size {size}"));
            let rule = format!("should have a row for each group of the {cols} inputs ({said}), got {count}");
            Err(source.refused(scales, rule))
        }
    }
}
