//! GGUF, the file format of llama.cpp: in and out.
//!
//! A GGUF file is a whole model: tensors, most of them in blocks of few bits ([`BlockType`]), and
//! metadata that say what else there is to know. [`Gguf`] reads one, or the parts that one was
//! split into, and gives it the form of a Hugging Face checkpoint: tensors under the names, in the
//! order of rows and with the numbers that the checkpoint had before llama.cpp's converter changed
//! them, and the documents that lie in the directory of one, `config.json` and `tokenizer.json`
//! among them. So [`crate::Checkpoint::open`], [`crate::ModelConfig::from_dir`] and
//! [`crate::Tokenizer::from_dir`] take the path of a GGUF file as they take a directory, and
//! nothing behind them knows the difference.
//!
//! What the converter changed, and is changed back: rows of queries and keys, of the architectures
//! that llama.cpp turns by neighbouring channels (`names`); 1 that was added to the gains of
//! Gemma's norms; experts stacked in one tensor; stretched rotary frequencies that became a tensor
//! (`config`); pieces of vocabularies (`vocab`).
//!
//! The other way: [`describe`] and [`tensors`] say what a checkpoint's file holds, [`encode`]
//! rounds to blocks, [`GgufWriter`] writes.

mod blocks;
mod config;
mod container;
mod describe;
mod encode;
mod grids;
mod metadata;
mod names;
mod pretokenizer;
mod tokens;
mod vocab;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use blocks::BlockType;
pub use container::GgufError;
use container::{Container, Entry, MAGIC};
pub use describe::{Description, TensorOut, describe, tensors};
pub use encode::{ENCODED, encode};
use metadata::Metadata;
pub(crate) use names::{Place, place};
pub use write::GgufWriter;

use crate::error::{Error, refuse_pointer};
use crate::header::TensorInfo;
use crate::mmap::FileBytes;

/// Most files that a model may be split into.
const MAX_PARTS: u64 = 999;

/// One file of a model.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: FileBytes,
    pub(crate) data_start: usize,
    pub(crate) tensors: Vec<(String, TensorInfo)>,
    metadata: BTreeMap<String, Entry>,
}

impl Part {
    fn read(path: &Path, mmap: bool) -> Result<Self, Error> {
        let bytes = if mmap { FileBytes::map(path)? } else { FileBytes::read(path)? };
        refuse_pointer(&bytes, path)?;
        let Container { metadata, tensors, data_start } =
            Container::parse(&bytes).map_err(|source| Error::Gguf { path: path.to_owned(), source })?;
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Ok(Self { name, path: path.to_owned(), bytes, data_start, tensors, metadata })
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata { path: &self.path, entries: &self.metadata, bytes: &self.bytes }
    }
}

/// A GGUF model, opened: metadata and lists of tensors checked, data untouched.
#[derive(Debug)]
pub struct Gguf {
    /// The files; the first has the metadata.
    parts: Vec<Part>,
}

/// Whether a path is that of a GGUF file, by its name or its first bytes.
#[must_use]
pub fn is_gguf(path: &Path) -> bool {
    use std::io::Read;
    let named = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let mut start = [0; MAGIC.len()];
    path.is_file()
        && (named
            || std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
                && start == MAGIC)
}

impl Gguf {
    /// Opens a model: a file, or any of the parts of a split one, which lie beside it under the
    /// names that llama.cpp gives them (`NAME-00001-of-00003.gguf`).
    ///
    /// # Errors
    /// [`Error::Gguf`] naming the file and the rule that it breaks, [`Error::Config`] for parts
    /// that do not fit together, [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_with(path, true)
    }

    /// Opens a model; without `mmap` the files are read into memory.
    ///
    /// # Errors
    /// As for [`Gguf::open`].
    pub fn open_with(path: &Path, mmap: bool) -> Result<Self, Error> {
        let part = Part::read(path, mmap)?;
        let split = |part: &Part, key: &str| part.metadata().unsigned(&format!("split.{key}"));
        let count = split(&part, "count")?.unwrap_or(1);
        if count <= 1 {
            return Ok(Self { parts: vec![part] });
        }
        let bad = |part: &Part, key: &str, rule| part.metadata().bad(&format!("split.{key}"), rule);
        if count > MAX_PARTS {
            return Err(bad(&part, "count", format!("should be at most {MAX_PARTS}, got {count}")));
        }
        let own = split(&part, "no")?.unwrap_or(0);
        let ending = |no: u64| format!("-{:05}-of-{count:05}.gguf", no.saturating_add(1));
        let Some(prefix) = part.name.strip_suffix(&ending(own)) else {
            let rule = format!("is {own} of {count}: the file's name should end in `{}`", ending(own));
            return Err(bad(&part, "no", rule));
        };
        let mut parts = Vec::new();
        for no in 0..count {
            let part = Part::read(&path.with_file_name(format!("{prefix}{}", ending(no))), mmap)?;
            for (key, want) in [("no", no), ("count", count)] {
                let got = split(&part, key)?;
                if got != Some(want) {
                    let got = got.map_or("nothing".to_owned(), |got| got.to_string());
                    return Err(bad(&part, key, format!("should be {want}, got {got}")));
                }
            }
            parts.push(part);
        }
        let tensors: usize = parts.iter().map(|part| part.tensors.len()).sum();
        match split(&parts[0], "tensors.count")? {
            Some(want) if want != tensors as u64 => {
                let rule = format!("should be what the parts hold, {tensors}, got {want}");
                Err(bad(&parts[0], "tensors.count", rule))
            }
            _ => Ok(Self { parts }),
        }
    }

    fn metadata(&self) -> Metadata<'_> {
        self.parts[0].metadata()
    }

    pub(crate) fn into_parts(self) -> Vec<Part> {
        self.parts
    }

    /// A tensor under the name that it has in the file.
    fn tensor(&self, name: &str) -> Option<(&Part, &TensorInfo)> {
        let found = |part: &Part| part.tensors.iter().position(|(n, _)| n == name);
        self.parts.iter().find_map(|part| found(part).map(|at| (part, &part.tensors[at].1)))
    }

    /// The documents that a directory of the same model holds: name and text.
    ///
    /// # Errors
    /// [`Error::Config`] naming the metadata key that is missing or not as it should be.
    pub fn documents(&self) -> Result<Vec<(&'static str, String)>, Error> {
        let pretty = |v: &serde_json::Value| serde_json::to_string_pretty(v).unwrap_or_default();
        let mut documents = vec![
            (crate::config::CONFIG, pretty(&self.config()?)),
            (crate::config::GENERATION_CONFIG, pretty(&self.generation_config()?)),
        ];
        if self.has_tokenizer() {
            documents.push((crate::tokenizer::TOKENIZER, self.tokenizer()?.to_string()));
            documents.push((crate::tokenizer::TOKENIZER_CONFIG, pretty(&self.tokenizer_config()?)));
        }
        if let Some(pooling) = self.pooling()? {
            let text = serde_json::to_string_pretty(&pooling).unwrap_or_default();
            documents.push((crate::pooling::POOLING, text));
        }
        Ok(documents)
    }
}
