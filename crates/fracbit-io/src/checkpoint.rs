//! A model directory's weights: one safetensors file or many with an index, as one set of named
//! tensors.

mod gguf;
mod packed;
mod parts;
mod scale;
mod stored;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::config::ModelConfig;
use crate::convert::{first_non_finite, to_f32_into};
use crate::dtype::Dtype;
use crate::error::{Error, IoContext, read_limited, refuse_pointer};
use crate::gguf::{Gguf, is_gguf};
use crate::header::{Header, TensorInfo, UniqueMap, rows_cols};
use crate::manifest::{MANIFEST, Manifest};
use crate::mmap::FileBytes;
use packed::{Packed, PackedView};
use scale::Scale;
pub(crate) use stored::Stored;

/// Name of the single-file checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// Name of the shard index.
pub const INDEX: &str = "model.safetensors.index.json";
/// Name of the token embedding.
pub const EMBED: &str = "model.embed_tokens.weight";
/// Name of the output head.
pub const HEAD: &str = "lm_head.weight";
const MAX_INDEX: u64 = 256 << 20;

/// How to open a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Map the files (default) instead of reading them into memory. See [`crate::mmap`] for what
    /// that asks of you.
    pub mmap: bool,
    /// When there is a manifest, check every header and every small file against it (default).
    /// Tensor data are checked later, by [`Checkpoint::verify_tensor`].
    pub check_manifest: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { mmap: true, check_manifest: true }
    }
}

/// One safetensors file.
#[derive(Debug)]
pub struct Shard {
    /// File name within the directory.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
    /// The `__metadata__` strings of its header.
    pub metadata: BTreeMap<String, String>,
    pub(crate) bytes: FileBytes,
    pub(crate) data_start: usize,
}

/// A tensor as stored.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Little-endian elements, row-major. Not necessarily aligned. Of a packed matrix the codes, as
    /// they lie.
    pub bytes: &'a [u8],
    scale: Option<&'a Scale>,
    stored: Stored,
    packed: Option<PackedView<'a>>,
}

impl<'a> TensorView<'a> {
    /// Neighbouring numbers of a row of the matrix view ([`TensorInfo::rows_cols`]) in `f32`, times
    /// their scales. Not checked to be finite.
    ///
    /// # Panics
    /// When the tensor holds no floats or they lie outside it.
    pub fn row_into(&self, row: usize, cols: Range<usize>, out: &mut [f32]) {
        if let Some(packed) = &self.packed {
            return packed.row_into(row, rows_cols(self.shape).1, cols, out);
        }
        if let [len] = *self.shape
            && self.stored.paired_head > 0
        {
            let mut all = vec![0.0; len];
            stored_into(self.dtype, self.bytes, 0..len, &mut all);
            cols.zip(out).for_each(|(col, out)| *out = all[self.stored.row(col)]);
            return;
        }
        stored_into(self.dtype, self.stored_row(row), cols.clone(), out);
        if let Some(scale) = self.scale {
            scale.apply(row, cols.start, out);
        }
        if self.stored.shift != 0.0 {
            out.iter_mut().for_each(|w| *w -= self.stored.shift);
        }
    }

    /// The stored bytes of a row of the matrix view, where their numbers are those of
    /// [`TensorView::row_into`].
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row_bytes(&self, row: usize) -> Option<&'a [u8]> {
        let plain =
            self.scale.is_none() && self.packed.is_none() && self.stored.shift == 0.0 && self.shape.len() > 1;
        plain.then(|| self.stored_row(row))
    }

    fn stored_row(&self, row: usize) -> &'a [u8] {
        let size = self.dtype.bytes(rows_cols(self.shape).1);
        &self.bytes[self.stored.row(row) * size..][..size]
    }
}

/// Some numbers of a row, which may begin and end within a block.
fn stored_into(dtype: Dtype, row: &[u8], cols: Range<usize>, out: &mut [f32]) {
    let len = dtype.block_len();
    let blocks = cols.start / len..cols.end.div_ceil(len);
    let bytes = &row[blocks.start * dtype.block_bytes()..blocks.end * dtype.block_bytes()];
    if cols.start.is_multiple_of(len) && cols.end.is_multiple_of(len) {
        return to_f32_into(dtype, bytes, out);
    }
    let mut whole = vec![0.0; blocks.len() * len];
    to_f32_into(dtype, bytes, &mut whole);
    out.copy_from_slice(&whole[cols.start - blocks.start * len..][..cols.len()]);
}

/// The names under which embedding and output head are stored; equal when they are one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingNames {
    /// Token embedding, `(vocab, hidden)`.
    pub embed: &'static str,
    /// Output head, `(vocab, hidden)`.
    pub head: &'static str,
}

impl EmbeddingNames {
    /// True when both are one stored tensor.
    #[must_use]
    pub fn tied(&self) -> bool {
        self.embed == self.head
    }
}

/// What [`Checkpoint::verify_tensor`] could do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verified {
    /// The checksum was recomputed and agrees.
    Yes,
    /// There is no manifest to check against.
    NoManifest,
}

/// A stored tensor.
#[derive(Clone, Debug)]
struct Entry {
    shard: usize,
    info: TensorInfo,
    scale: Option<Scale>,
    stored: Stored,
    packed: Option<Packed>,
}

impl Entry {
    /// One that is as its type, shape and name say.
    fn plain(shard: usize, info: TensorInfo) -> Self {
        Self { shard, info, scale: None, stored: Stored::AS_NAMED, packed: None }
    }
}

/// An opened checkpoint: headers checked, data untouched but for the scales of 8-bit floats.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    /// Tensors that cannot be read, and why: a matter of who asks for one.
    unread: BTreeMap<String, String>,
    notes: Vec<String>,
    manifest: Option<Manifest>,
    /// Set when whole files were compared with the manifest.
    verified: OnceLock<()>,
}

impl Checkpoint {
    /// Opens a model directory, one `.safetensors` file or a GGUF file, with the default options.
    ///
    /// A directory may hold `model.safetensors`, or `model.safetensors.index.json` and its shards;
    /// when it holds both, the single file is taken, as the Hugging Face loader does.
    ///
    /// # Errors
    /// Whatever is wrong with any header, with the index, or between them; tensor data are not
    /// looked at.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path, OpenOptions::default())
    }

    /// Opens a model directory or file.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`].
    pub fn open_with(path: impl AsRef<Path>, options: OpenOptions) -> Result<Self, Error> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).io("opening", path)?;
        let mut ckpt = Self {
            path: path.to_owned(),
            dir: path.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            unread: BTreeMap::new(),
            notes: Vec::new(),
            manifest: None,
            verified: OnceLock::new(),
        };
        if !meta.is_dir() {
            ckpt.dir = path.parent().map_or_else(PathBuf::new, Path::to_owned);
            if is_gguf(path) {
                ckpt.add_gguf(Gguf::open_with(path, options.mmap)?)?;
                return Ok(ckpt);
            }
            let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            if matches!(path.extension().and_then(|e| e.to_str()), Some("bin" | "pt" | "pth" | "ckpt")) {
                return Err(pickle(path));
            }
            ckpt.add_shard(path, name, options, None)?;
            ckpt.adopt_scales()?;
            return Ok(ckpt);
        }
        let index = path.join(INDEX);
        if path.join(SINGLE).exists() {
            ckpt.add_shard(&path.join(SINGLE), SINGLE.to_owned(), options, None)?;
        } else if index.exists() {
            ckpt.add_indexed(&index, options)?;
        } else {
            return Err(no_weights(path));
        }
        if options.check_manifest && path.join(MANIFEST).exists() {
            let manifest = Manifest::read(path)?;
            manifest.check_opened(&ckpt)?;
            ckpt.manifest = Some(manifest);
        }
        ckpt.adopt_scales()?;
        Ok(ckpt)
    }

    fn add_indexed(&mut self, index: &Path, options: OpenOptions) -> Result<(), Error> {
        let map = read_index(index)?;
        let bad = |rule: String| Error::Index { path: index.to_owned(), rule };
        let files: BTreeSet<&str> = map.values().map(String::as_str).collect();
        for file in &files {
            let path = self.dir.join(file);
            if !path.is_file() {
                let mut held = map.iter().filter(|(_, f)| f == file).map(|(t, _)| t.as_str());
                if let Some(wanted) = held.clone().find(|name| !is_beside_text(name)) {
                    return Err(bad(format!("shard `{file}` should exist (it should hold `{wanted}`)")));
                }
                let one = held.next().unwrap_or_default();
                self.notes.push(format!(
                    "`{}`: shard `{file}` is not there, and holds nothing of the language model (`{one}`)",
                    index.display()
                ));
                continue;
            }
            self.add_shard(&path, (*file).to_owned(), options, Some(index))?;
        }
        let mut absent = Vec::new();
        for (tensor, file) in &map {
            match self.tensors.get(tensor) {
                Some(entry) if self.shards[entry.shard].name == *file => {}
                Some(entry) => {
                    let real = &self.shards[entry.shard].name;
                    return Err(bad(format!("tensor `{tensor}` should be in `{file}`, is in `{real}`")));
                }
                None if self.unread.contains_key(tensor) => {}
                None => {
                    let why = format!(": the index says it is in `{file}`, which does not hold it");
                    self.unread.insert(tensor.clone(), why);
                    if self.shards.iter().any(|shard| shard.name == *file) {
                        absent.push(tensor.as_str());
                    }
                }
            }
        }
        let unlisted: Vec<&str> =
            self.tensors.keys().map(String::as_str).filter(|t| !map.contains_key(*t)).collect();
        for (tensors, what) in
            [(absent, "lists what no shard holds"), (unlisted, "does not list all that shards hold")]
        {
            if let Some(first) = tensors.first() {
                let more = if tensors.len() > 1 {
                    format!(" and {} more", tensors.len() - 1)
                } else {
                    String::new()
                };
                self.notes.push(format!("`{}` {what}: `{first}`{more}", index.display()));
            }
        }
        Ok(())
    }

    /// Gives the mapped pages back after the tensors have been copied; see [`FileBytes::release`].
    pub fn release(&self) {
        self.shards.iter().for_each(|shard| shard.bytes.release());
    }

    fn add_shard(
        &mut self,
        path: &Path,
        name: String,
        options: OpenOptions,
        index: Option<&Path>,
    ) -> Result<(), Error> {
        let bytes = if options.mmap { FileBytes::map(path)? } else { FileBytes::read(path)? };
        refuse_pointer(&bytes, path)?;
        let header =
            Header::parse(&bytes).map_err(|source| Error::Header { path: path.to_owned(), source })?;
        let at = self.shards.len();
        for (tensor, info) in header.tensors {
            if let Some(other) = self.tensors.get(&tensor) {
                let other = &self.shards[other.shard].name;
                let rule =
                    format!("tensor `{tensor}` should be in one shard, is in `{other}` and in `{name}`");
                return Err(Error::Index { path: index.unwrap_or(path).to_owned(), rule });
            }
            self.tensors.insert(tensor, Entry::plain(at, info));
        }
        for (tensor, dtype) in header.unread {
            let why = format!(" in a type that is read here, is {dtype} in `{}`", path.display());
            self.unread.insert(tensor, why);
        }
        let data_start = header.data_start;
        self.shards.push(Shard { name, path: path.to_owned(), metadata: header.metadata, bytes, data_start });
        Ok(())
    }

    /// What was opened: a directory or a file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that holds the files.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files, in the order of their names.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tensor names, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Names and descriptions, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(n, entry)| (n.as_str(), &entry.info))
    }

    /// What was found and is not followed, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// True when the tensor is stored.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes of all tensor data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        let bytes = |entry: &Entry| match &entry.packed {
            Some(packed) => packed.bytes(entry.info.elements()),
            None => entry.info.range.len() as u64,
        };
        self.tensors.values().map(bytes).sum()
    }

    /// The manifest, when the directory has one and [`OpenOptions::check_manifest`] was set.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// The stored form of a tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        let Entry { shard, info, scale, stored, packed } = self.entry(name)?;
        let bytes = &self.shards[*shard].bytes[info.range.clone()];
        Ok(TensorView {
            dtype: info.dtype,
            shape: &info.shape,
            bytes,
            scale: scale.as_ref(),
            stored: *stored,
            packed: packed.as_ref().map(|packed| packed.view(self)),
        })
    }

    /// Description of a tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn info(&self, name: &str) -> Result<&TensorInfo, Error> {
        Ok(self.find(name)?.1)
    }

    /// The file that holds a tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn shard_of(&self, name: &str) -> Result<&Shard, Error> {
        Ok(self.find(name)?.0)
    }

    fn find(&self, name: &str) -> Result<(&Shard, &TensorInfo), Error> {
        let Entry { shard, info, .. } = self.entry(name)?;
        Ok((&self.shards[*shard], info))
    }

    fn entry(&self, name: &str) -> Result<&Entry, Error> {
        let hint = || self.unread.get(name).map_or("", String::as_str);
        self.tensors.get(name).ok_or_else(|| self.missing(name, hint()))
    }

    fn missing(&self, name: &str, hint: &str) -> Error {
        Error::MissingTensor { path: self.path.clone(), tensor: name.to_owned(), hint: hint.to_owned() }
    }

    /// Checks that a tensor exists with exactly this shape.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] naming both shapes.
    pub fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, Error> {
        let (shard, info) = self.find(name)?;
        if info.shape == shape {
            return Ok(info);
        }
        Err(Error::Tensor {
            path: shard.path.clone(),
            tensor: name.to_owned(),
            rule: format!("shape should be {shape:?}, got {:?}", info.shape),
        })
    }

    /// Checks that a tensor of weights exists with the shape that the configuration gives it, and
    /// that it holds floats.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] naming both shapes or the type.
    pub fn expect_weights(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, Error> {
        let (shard, info) = self.find(name)?;
        let rule = if info.shape != shape {
            format!("shape should be {shape:?} by config.json, got {:?}", info.shape)
        } else if !info.dtype.is_float() {
            no_float(info.dtype)
        } else {
            return Ok(info);
        };
        Err(Error::Tensor { path: shard.path.clone(), tensor: name.to_owned(), rule })
    }

    /// The whole tensor as `f32`, row-major, checked to be finite.
    ///
    /// # Errors
    /// As for [`Checkpoint::rows_f32_into`].
    pub fn to_f32(&self, name: &str) -> Result<Vec<f32>, Error> {
        let info = self.info(name)?;
        let mut out = vec![0.0; if info.dtype.is_float() { info.elements() } else { 0 }];
        self.rows_f32_into(name, 0..info.rows_cols().0, &mut out)?;
        Ok(out)
    }

    /// Whether all numbers of a small tensor are 0: AutoGPTQ gives every matrix such a bias.
    ///
    /// # Errors
    /// As for [`Checkpoint::to_f32`].
    pub fn is_zero(&self, name: &str) -> Result<bool, Error> {
        Ok(self.to_f32(name)?.iter().all(|&number| number == 0.0))
    }

    /// Rows of the matrix view of a tensor ([`TensorInfo::rows_cols`]) as `f32` into `out`, which
    /// has `rows.len() * cols` places. Exact from F32, F16 and BF16; F64 is rounded, and so are
    /// products with scales where they have more digits than an `f32`.
    ///
    /// # Errors
    /// [`Error::NonFinite`] with the first bad row and column; [`Error::Tensor`] for an integer
    /// tensor, a row range outside the tensor or a buffer of the wrong length;
    /// [`Error::MissingTensor`].
    pub fn rows_f32_into(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        let (shard, info) = self.find(name)?;
        let bad = |rule| Error::Tensor { path: shard.path.clone(), tensor: name.to_owned(), rule };
        if !info.dtype.is_float() {
            return Err(bad(no_float(info.dtype)));
        }
        let (all, cols) = info.rows_cols();
        if rows.start > rows.end || rows.end > all {
            return Err(bad(format!("rows should lie in 0..{all}, got {rows:?}")));
        }
        if rows.len().checked_mul(cols) != Some(out.len()) {
            return Err(bad(format!("buffer should hold {} x {cols} values, got {}", rows.len(), out.len())));
        }
        let view = self.tensor(name)?;
        for (row, out) in rows.clone().zip(out.chunks_exact_mut(cols.max(1))) {
            view.row_into(row, 0..cols, out);
        }
        match first_non_finite(out) {
            None => Ok(()),
            Some(at) => Err(Error::NonFinite {
                path: shard.path.clone(),
                tensor: name.to_owned(),
                dtype: info.dtype,
                row: rows.start + at / cols,
                col: at % cols,
                value: out[at],
            }),
        }
    }

    /// Finds embedding and head, whichever name a tied pair is stored under.
    ///
    /// * tied by the config, one of the two stored: both resolve to it;
    /// * tied, both stored: they must agree byte for byte, else it is unclear which model is meant;
    /// * not tied: both must be stored. A missing `lm_head.weight` is an error and not quietly
    ///   tied: the Hugging Face loader would start the head from random numbers, and the message
    ///   says what to set if tying was meant.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] for two different tensors that should be one.
    pub fn embedding_names(&self, config: &ModelConfig) -> Result<EmbeddingNames, Error> {
        let (embed, head) = (self.contains(EMBED), self.contains(HEAD));
        if !config.tie_word_embeddings {
            if !embed {
                return Err(self.missing(EMBED, ""));
            }
            if !head {
                let hint = " because config.json says `tie_word_embeddings`: false (or leaves it out, which means the same for \
                    this architecture); set it to true if the head is the embedding";
                return Err(self.missing(HEAD, hint));
            }
            return Ok(EmbeddingNames { embed: EMBED, head: HEAD });
        }
        match (embed, head) {
            (true, true) => {
                let (e, h) = (self.tensor(EMBED)?, self.tensor(HEAD)?);
                if (e.dtype, e.shape, e.bytes, e.scale, e.packed)
                    != (h.dtype, h.shape, h.bytes, h.scale, h.packed)
                {
                    return Err(Error::Tensor {
                        path: self.shard_of(HEAD)?.path.clone(),
                        tensor: HEAD.to_owned(),
                        rule: format!(
                            "should equal `{EMBED}`, because config.json says `tie_word_embeddings`: true"
                        ),
                    });
                }
                Ok(EmbeddingNames { embed: EMBED, head: EMBED })
            }
            (true, false) => Ok(EmbeddingNames { embed: EMBED, head: EMBED }),
            (false, true) => Ok(EmbeddingNames { embed: HEAD, head: HEAD }),
            (false, false) => Err(self.missing(EMBED, " (or `lm_head.weight`, the embeddings being tied)")),
        }
    }

    /// Recomputes the checksum of one tensor and compares it with the manifest; for lazy
    /// verification before first use.
    ///
    /// # Errors
    /// [`Error::Checksum`] when a stored byte changed, [`Error::MissingTensor`].
    pub fn verify_tensor(&self, name: &str) -> Result<Verified, Error> {
        let (shard, info) = self.find(name)?;
        let Some(manifest) = &self.manifest else { return Ok(Verified::NoManifest) };
        // `check_opened` made sure that every stored tensor is listed.
        let Some(want) = manifest.tensors.get(name) else {
            return Err(self.missing(name, " in the manifest"));
        };
        let got = crate::manifest::hash(&shard.bytes[info.range.clone()]);
        if got == want.blake3 {
            return Ok(Verified::Yes);
        }
        Err(Error::Checksum {
            path: shard.path.clone(),
            tensor: Some(name.to_owned()),
            want: want.blake3.clone(),
            got,
        })
    }

    /// [`Checkpoint::verify_tensor`] of all that are stored.
    ///
    /// # Errors
    /// As there; of several the first by name.
    pub fn verify_tensors(&self) -> Result<Verified, Error> {
        let Some(manifest) = &self.manifest else { return Ok(Verified::NoManifest) };
        manifest.tensors.keys().try_for_each(|name| self.verify_tensor(name).map(drop))?;
        Ok(Verified::Yes)
    }

    /// Recomputes the checksums of all shards, the first time it is called; for models whose
    /// tensors are read where they lie, a row at a time.
    ///
    /// # Errors
    /// [`Error::Checksum`] when a stored byte changed.
    pub fn verify_shards(&self) -> Result<Verified, Error> {
        let Some(manifest) = &self.manifest else { return Ok(Verified::NoManifest) };
        if self.verified.get().is_none() {
            for Shard { name, path, bytes, .. } in &self.shards {
                // `check_opened` made sure that every shard is listed.
                let want = manifest.files.get(name).map_or("", |file| &file.blake3);
                let got = crate::manifest::hash(bytes);
                if got != want {
                    let (path, want) = (path.clone(), want.to_owned());
                    return Err(Error::Checksum { path, tensor: None, want, got });
                }
            }
            self.verified.get_or_init(|| ());
        }
        Ok(Verified::Yes)
    }

    /// A digest of the model's numbers: blake3 over every tensor's name, dtype, shape, bytes and
    /// scales, in the order of names. Independent of sharding and of file names; what a cache of
    /// measurements is keyed by.
    #[must_use]
    pub fn content_hash(&self) -> String {
        let mut h = blake3::Hasher::new();
        for (name, Entry { shard, info, scale, packed, .. }) in &self.tensors {
            let shape: Vec<String> = info.shape.iter().map(ToString::to_string).collect();
            // Lengths first, so that no two different lists of tensors feed the same bytes.
            h.update(&(name.len() as u64).to_le_bytes());
            h.update(name.as_bytes());
            h.update(format!("\0{}\0{}\0", info.dtype, shape.join(",")).as_bytes());
            h.update_rayon(&self.shards[*shard].bytes[info.range.clone()]);
            scale.iter().flat_map(Scale::values).for_each(|v| {
                h.update(&v.to_le_bytes());
            });
            packed.iter().for_each(|packed| packed.view(self).hash(&mut h));
        }
        h.finalize().to_hex().to_string()
    }
}

/// Reads and checks the `weight_map` of an index: tensor name to plain file name.
pub(crate) fn read_index(path: &Path) -> Result<BTreeMap<String, String>, Error> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: UniqueMap,
    }
    let bytes = read_limited(path, MAX_INDEX)?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| Error::Json {
        path: path.to_owned(),
        what: "a JSON object with a `weight_map` of unique tensor names to file names",
        detail: e.to_string(),
    })?;
    let map = index.weight_map.0;
    let bad = |rule: String| Error::Index { path: path.to_owned(), rule };
    if map.is_empty() {
        return Err(bad("weight_map should list at least one tensor".to_owned()));
    }
    for (tensor, file) in &map {
        if !is_plain_file_name(file) {
            return Err(bad(format!(
                "weight_map of `{tensor}` should name a file in the same directory, got `{}`",
                file.escape_debug()
            )));
        }
        if !file.ends_with(".safetensors") {
            return Err(bad(format!(
                "weight_map of `{tensor}` should name a .safetensors file, got `{file}`"
            )));
        }
    }
    Ok(map)
}

/// True for a name that stays in its directory on every system: no separators, drives, streams,
/// dots alone or control characters.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty()
        && name != "."
        && name != ".."
        && name.len() <= 255
        && !name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control())
}

/// Whether a tensor of this name belongs to an encoder of images or sounds, or is a table that is
/// computed anew.
fn is_beside_text(name: &str) -> bool {
    const PARTS: [&str; 7] = ["vision", "visual", "audio", "image", "speech", "projector", "inv_freq"];
    PARTS.iter().any(|part| name.contains(part))
}

fn no_float(dtype: Dtype) -> String {
    format!("dtype should be F32, F16, BF16, F64 or (with scales) F8_E4M3, got {dtype}")
}

fn pickle(path: &Path) -> Error {
    Error::NoWeights {
        dir: path.to_owned(),
        rule: "weights should be in safetensors files; PyTorch pickle files (.bin, .pt, .pth) can run code when loaded and \
            are not read. Most models offer safetensors too; or convert once with `save_pretrained(..., safe_serialization=True)`"
            .to_owned(),
    }
}

fn no_weights(dir: &Path) -> Error {
    let mut pickles = false;
    let mut tensors = Vec::new();
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(source) => return Error::Io { op: "listing", path: dir.to_owned(), source },
    };
    for e in entries.filter_map(io::Result::ok) {
        let name = e.file_name().to_string_lossy().into_owned();
        pickles |= name.starts_with("pytorch_model") || name.ends_with(".pth") || name.ends_with(".pt");
        if name.ends_with(".safetensors") {
            tensors.push(name);
        }
    }
    if pickles && tensors.is_empty() {
        return pickle(dir);
    }
    tensors.sort();
    tensors.truncate(4);
    let found = if tensors.is_empty() {
        String::new()
    } else {
        format!("; found {} but no index that names them", tensors.join(", "))
    };
    Error::NoWeights { dir: dir.to_owned(), rule: format!("should hold `{SINGLE}` or `{INDEX}`{found}") }
}
