//! The error type of the crate: each message names the file, then the tensor or field, then the
//! rule.

use std::io;
use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::gguf::GgufError;
use crate::header::HeaderError;

/// Everything that can go wrong between a directory of files and the numbers in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{op} `{path}`: {source}")]
    Io {
        /// What was attempted, as in `opening`.
        op: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The disk is full, the quota is used up or the file system takes no file of this size.
    #[error("writing `{path}`: needed {needed} more bytes, {free} are free ({source})")]
    NoSpace {
        /// The file that was being written, or the directory that was checked.
        path: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes an unprivileged user may still write there.
        free: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The output location is not acceptable.
    #[error("output `{path}`: {rule}")]
    Output {
        /// The final path.
        path: PathBuf,
        /// The broken rule.
        rule: String,
    },
    /// The path should be a regular file.
    #[error("`{path}`: should be a regular file")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A clone without Git LFS holds a few lines of text in place of the file.
    #[error("`{path}`: should be the file itself, is a Git LFS pointer to it")]
    LfsPointer {
        /// The path.
        path: PathBuf,
    },
    /// A file exceeds the limit for its kind.
    #[error("`{path}`: should have at most {max} bytes, has {bytes}")]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// A safetensors file breaks a rule of its format.
    #[error("`{path}`: {source}")]
    Header {
        /// The file.
        path: PathBuf,
        /// The broken rule.
        source: HeaderError,
    },
    /// A GGUF file breaks a rule of its format.
    #[error("`{path}`: {source}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The broken rule.
        source: GgufError,
    },
    /// The directory holds no weights this crate can read.
    #[error("`{dir}`: {rule}")]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What was looked for and what was found.
        rule: String,
    },
    /// The shard index and the shards disagree, or the index is malformed.
    #[error("`{path}`: {rule}")]
    Index {
        /// The index file.
        path: PathBuf,
        /// The broken rule.
        rule: String,
    },
    /// A tensor was asked for that the checkpoint does not have.
    #[error("`{path}`: tensor `{tensor}` should exist{hint}")]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why it is needed, or empty.
        hint: String,
    },
    /// A tensor is there but is not usable as asked.
    #[error("`{path}`, tensor `{tensor}`: {rule}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The broken rule.
        rule: String,
    },
    /// A weight is NaN or infinite.
    #[error(
        "`{path}`, tensor `{tensor}` ({dtype}): weights should be finite, got {value} at row {row}, column {col}"
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its stored type.
        dtype: Dtype,
        /// Row of the first bad value.
        row: usize,
        /// Column of the first bad value.
        col: usize,
        /// The value after conversion to f32.
        value: f32,
    },
    /// A JSON document is malformed.
    #[error("`{path}`: should be {what}: {detail}")]
    Json {
        /// The file.
        path: PathBuf,
        /// What the document should be.
        what: &'static str,
        /// Where and why not.
        detail: String,
    },
    /// A field of a configuration file is missing, of the wrong type or outside its range.
    #[error("`{path}`: `{field}` {rule}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The broken rule.
        rule: String,
    },
    /// The tokenizer file is not acceptable, or tokenizing failed.
    #[error("`{path}`: {rule}")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The broken rule.
        rule: String,
    },
    /// The chat template does not compile, refuses the messages or exceeds a limit.
    #[error("chat template: {0}")]
    Template(
        /// The reason.
        String,
    ),
    /// A stored byte differs from what the manifest promises.
    #[error("`{path}`{}: blake3 should be {want}, got {got}", tensor.as_ref().map(|t| format!(", tensor `{t}`")).unwrap_or_default())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor, unless a whole file or header is meant.
        tensor: Option<String>,
        /// The promised digest.
        want: String,
        /// The digest of what is there.
        got: String,
    },
    /// The manifest is malformed or does not fit the files.
    #[error("`{path}`: {rule}")]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The broken rule.
        rule: String,
    },
}

/// Attaches the operation and the path to a system error.
pub(crate) trait IoContext<T> {
    fn io(self, op: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn io(self, op: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { op, path: path.to_owned(), source })
    }
}

/// Opens a regular file. What it is gets looked at first: opening a named pipe would wait for a
/// writer for ever.
pub(crate) fn open_file(path: &Path) -> Result<(std::fs::File, std::fs::Metadata), Error> {
    let irregular = |meta: &std::fs::Metadata| match meta.is_file() {
        true => Ok(()),
        false => Err(Error::NotAFile { path: path.to_owned() }),
    };
    irregular(&std::fs::metadata(path).io("opening", path)?)?;
    let file = std::fs::File::open(path).io("opening", path)?;
    // Again, of the very file that was opened.
    let meta = file.metadata().io("reading the length of", path)?;
    irregular(&meta)?;
    Ok((file, meta))
}

/// How a Git LFS pointer begins (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Refuses what a clone without Git LFS holds in place of a large file.
pub(crate) fn refuse_pointer(bytes: &[u8], path: &Path) -> Result<(), Error> {
    if bytes.starts_with(LFS) { Err(Error::LfsPointer { path: path.to_owned() }) } else { Ok(()) }
}

/// Reads a small text-like file after looking at its size, so that a wrong path cannot exhaust
/// memory.
pub(crate) fn read_limited(path: &Path, max: u64) -> Result<Vec<u8>, Error> {
    use io::Read;
    let (file, meta) = open_file(path)?;
    let too_large = |bytes| Error::FileTooLarge { path: path.to_owned(), bytes, max };
    if meta.len() > max {
        return Err(too_large(meta.len()));
    }
    let mut out = Vec::new();
    file.take(max + 1).read_to_end(&mut out).io("reading", path)?;
    // The file may have grown since `fstat`.
    if out.len() as u64 > max {
        return Err(too_large(out.len() as u64));
    }
    refuse_pointer(&out, path)?;
    Ok(out)
}

/// Like [`read_limited`], `None` when there is no such file.
pub(crate) fn read_optional(path: &Path, max: u64) -> Result<Option<Vec<u8>>, Error> {
    match read_limited(path, max) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
