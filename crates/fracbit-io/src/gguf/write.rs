//! A GGUF file, written in one pass.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::container::{ALIGNMENT, Kind, MAGIC, VERSION};
use super::describe::Description;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::output::{free_bytes, write_error};

/// Writes a file tensor by tensor; it gets its name when everything in it is on disk.
#[derive(Debug)]
pub struct GgufWriter {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    overwrite: bool,
    /// Names and bytes of the tensors, in order.
    tensors: Vec<(String, u64)>,
    /// The tensor that is being written, and how much of it there is.
    at: (usize, u64),
}

/// The number that stands for a type.
fn id(dtype: Dtype) -> Option<u32> {
    Some(match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 30,
        Dtype::Blocks(block) => block.id(),
        _ => return None,
    })
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl GgufWriter {
    /// Starts a file with this metadata and these tensors: names, types, and shapes outermost
    /// first.
    ///
    /// # Errors
    /// [`Error::Output`] for a name that is taken, [`Error::Tensor`] for a type that is not
    /// written, [`Error::NoSpace`], [`Error::Io`].
    pub fn create(
        path: &Path,
        overwrite: bool,
        description: &Description,
        tensors: &[(String, Dtype, Vec<usize>)],
    ) -> Result<Self, Error> {
        if path.is_dir() || path.exists() && !overwrite {
            let rule = if path.is_dir() { "is a directory" } else { "exists already" };
            return Err(Error::Output { path: path.to_owned(), rule: rule.to_owned() });
        }
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((description.entries.len() as u64).to_le_bytes());
        for (key, value) in &description.entries {
            put_text(&mut header, key);
            header.extend(value);
        }
        let (mut listed, mut offset) = (Vec::new(), 0u64);
        for (name, dtype, shape) in tensors {
            let bad = |rule: &str| Error::Tensor {
                path: path.to_owned(),
                tensor: name.clone(),
                rule: rule.to_owned(),
            };
            let id = id(*dtype).ok_or_else(|| bad("type should be one that is written"))?;
            let inner = shape.last().copied().unwrap_or(1);
            if shape.is_empty() || !inner.is_multiple_of(dtype.block_len()) {
                return Err(bad("rows should be whole blocks"));
            }
            let bytes = dtype.bytes(shape.iter().product()) as u64;
            put_text(&mut header, name);
            header.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&d| header.extend((d as u64).to_le_bytes()));
            header.extend(id.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += bytes.next_multiple_of(ALIGNMENT as u64);
            listed.push((name.clone(), bytes));
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let needed = header.len() as u64 + offset;
        let free = free_bytes(parent)?;
        if free < needed {
            let source = io::Error::from(io::ErrorKind::StorageFull);
            return Err(Error::NoSpace { path: path.to_owned(), needed, free, source });
        }
        let file = tempfile::Builder::new().prefix(".gguf.partial-").tempfile_in(parent);
        let file =
            file.map_err(|source| Error::Io { op: "creating a file in", path: parent.to_owned(), source })?;
        let mut writer = Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            overwrite,
            tensors: listed,
            at: (0, 0),
        };
        writer.put(&header)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let left: u64 = self.tensors[self.at.0.min(self.tensors.len())..].iter().map(|t| t.1).sum();
        self.file.write_all(bytes).map_err(|e| write_error(e, "writing", &self.path, left))
    }

    /// Appends to the data of a tensor, which should be the next one that is not complete.
    ///
    /// # Errors
    /// [`Error::Tensor`] when it is another one or gets more bytes than it has, [`Error::NoSpace`],
    /// [`Error::Io`].
    pub fn write(&mut self, tensor: &str, bytes: &[u8]) -> Result<(), Error> {
        let (i, written) = self.at;
        let want =
            self.tensors.get(i).filter(|(name, len)| name == tensor && written + bytes.len() as u64 <= *len);
        let Some(&(_, len)) = want else {
            let rule = match self.tensors.get(i) {
                Some((next, len)) => {
                    format!("should follow `{next}`, of which {written} of {len} bytes are there")
                }
                None => "should be one of those that were announced".to_owned(),
            };
            return Err(Error::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), rule });
        };
        self.put(bytes)?;
        let written = written + bytes.len() as u64;
        self.at = (i, written);
        if written == len {
            let padding = len.next_multiple_of(ALIGNMENT as u64) - len;
            self.put(&[0; ALIGNMENT][..padding as usize])?;
            self.at = (i + 1, 0);
        }
        Ok(())
    }

    /// Syncs the file and gives it its name.
    ///
    /// # Errors
    /// [`Error::Tensor`] when a tensor is missing, [`Error::Output`] when the name was taken
    /// meanwhile, [`Error::NoSpace`], [`Error::Io`].
    pub fn finish(self) -> Result<PathBuf, Error> {
        let path = self.path;
        if let Some((name, _)) = self.tensors.get(self.at.0) {
            let rule = "should be written before the file is finished".to_owned();
            return Err(Error::Tensor { path, tensor: name.clone(), rule });
        }
        let io = |source| write_error(source, "writing", &path, 0);
        let file = self.file.into_inner().map_err(|e| io(e.into_error()))?;
        file.as_file().sync_all().map_err(io)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // Temporary files are private to their owner; this one is a result.
            let permissions = std::fs::Permissions::from_mode(0o644);
            file.as_file().set_permissions(permissions).map_err(io)?;
        }
        let named = if self.overwrite { file.persist(&path) } else { file.persist_noclobber(&path) };
        match named {
            Ok(_) => Ok(path),
            Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Output { path, rule: "exists already".to_owned() })
            }
            Err(e) => Err(Error::Io { op: "renaming to", path, source: e.error }),
        }
    }
}

/// Metadata, value by value.
impl Description {
    pub(super) fn raw(&mut self, key: &str, kind: Kind, bytes: &[u8]) {
        self.entries.retain(|(k, _)| k != key);
        self.entries.push((key.to_owned(), [&kind.id().to_le_bytes(), bytes].concat()));
    }

    pub(super) fn u32(&mut self, key: &str, n: usize) {
        self.raw(key, Kind::U32, &(n as u32).to_le_bytes());
    }

    pub(super) fn f32(&mut self, key: &str, n: f64) {
        self.raw(key, Kind::F32, &(n as f32).to_le_bytes());
    }

    pub(super) fn bool(&mut self, key: &str, b: bool) {
        self.raw(key, Kind::Bool, &[u8::from(b)]);
    }

    pub(super) fn text(&mut self, key: &str, text: &str) {
        let mut bytes = Vec::new();
        put_text(&mut bytes, text);
        self.raw(key, Kind::Text, &bytes);
    }

    fn list(&mut self, key: &str, kind: Kind, len: usize, elements: &[u8]) {
        let bytes = [&kind.id().to_le_bytes()[..], &(len as u64).to_le_bytes(), elements].concat();
        self.raw(key, Kind::List, &bytes);
    }

    pub(super) fn bools(&mut self, key: &str, list: &[bool]) {
        let elements: Vec<u8> = list.iter().map(|&b| u8::from(b)).collect();
        self.list(key, Kind::Bool, list.len(), &elements);
    }

    pub(super) fn i32s(&mut self, key: &str, list: &[i32]) {
        let elements: Vec<u8> = list.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.list(key, Kind::I32, list.len(), &elements);
    }

    pub(super) fn f32s(&mut self, key: &str, list: &[f32]) {
        let elements: Vec<u8> = list.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.list(key, Kind::F32, list.len(), &elements);
    }

    pub(super) fn texts(&mut self, key: &str, list: &[String]) {
        let mut elements = Vec::new();
        list.iter().for_each(|text| put_text(&mut elements, text));
        self.list(key, Kind::Text, list.len(), &elements);
    }
}
