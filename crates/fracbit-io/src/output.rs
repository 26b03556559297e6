//! A model directory that appears whole or not at all.
//!
//! Files are written to a temporary sibling `NAME.partial-xxxxxx`, each is synced as it is finished, then the directory is synced,
//! renamed to its final name, and the parent synced. A crash at any point leaves the final name as it was, with at most
//! a `.partial-` directory beside it; an error or an early return removes that too. Every byte is hashed on its way to the disk, so
//! the manifest costs no second pass.
//!
//! Replacing an existing directory ([`Overwrite::Yes`]) exchanges the two names in one step where the system can (Linux), so that
//! a reader sees the old model or the new one; elsewhere there is a moment with neither. It is refused for a directory that
//! does not look like a model, because a mistyped `-o ~` should not cost a home directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::checkpoint::is_plain_file_name;
use crate::config::CONFIG;
use crate::error::{Error, IoContext};
use crate::manifest::{FileRecord, MANIFEST, Manifest, TensorRecord};

/// What to do with a directory that is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overwrite {
    /// Refuse, unless it is empty.
    #[default]
    No,
    /// Replace it when it looks like a model directory (has `config.json` or `manifest.json`).
    Yes,
}

/// A directory being written.
#[derive(Debug)]
pub struct OutputDir {
    final_path: PathBuf,
    parent: PathBuf,
    temp: tempfile::TempDir,
    files: BTreeMap<String, FileRecord>,
    pub(crate) tensors: BTreeMap<String, TensorRecord>,
}

impl OutputDir {
    /// Starts a directory that will be called `final_path`, whose parent must exist.
    ///
    /// # Errors
    /// [`Error::Output`] when the name is taken or unusable, [`Error::Io`] when the parent is missing or not writable.
    pub fn create(final_path: impl AsRef<Path>, overwrite: Overwrite) -> Result<Self, Error> {
        let final_path = final_path.as_ref();
        let bad = |rule: &str| Error::Output { path: final_path.to_owned(), rule: rule.to_owned() };
        let Some(name) = final_path.file_name() else {
            return Err(bad("should end in the name of a directory"));
        };
        let parent = match final_path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
            _ => PathBuf::from("."),
        };
        match std::fs::symlink_metadata(final_path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::Io { op: "looking at", path: final_path.to_owned(), source: e }),
            Ok(m) if !m.is_dir() => return Err(bad("should not exist yet, is a file or a link")),
            Ok(_) => check_replaceable(final_path, overwrite)?,
        }
        let mut prefix = name.to_os_string();
        prefix.push(".partial-");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        #[cfg(unix)]
        {
            // The default of a temporary directory (0700) would stick to the finished model; take what the umask allows.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(std::fs::Permissions::from_mode(0o777));
        }
        let temp = builder.tempdir_in(&parent).io("creating a directory in", &parent)?;
        Ok(Self {
            final_path: final_path.to_owned(),
            parent,
            temp,
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
        })
    }

    /// Where the files are until [`OutputDir::commit`].
    #[must_use]
    pub fn temp_path(&self) -> &Path {
        self.temp.path()
    }

    /// The name the directory will have.
    #[must_use]
    pub fn final_path(&self) -> &Path {
        &self.final_path
    }

    /// Checks up front that `bytes` more fit on the file system.
    ///
    /// # Errors
    /// [`Error::NoSpace`] with both numbers.
    pub fn check_space(&self, bytes: u64) -> Result<(), Error> {
        let free = free_bytes(self.temp.path())?;
        if bytes <= free {
            return Ok(());
        }
        let source = io::Error::from(io::ErrorKind::StorageFull);
        Err(Error::NoSpace { path: self.parent.clone(), needed: bytes, free, source })
    }

    /// Writes one file, synced and hashed.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`], or [`Error::Output`] for a name that is taken or not plain.
    pub fn write_file(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let mut file = self.create_file(name, bytes.len() as u64)?;
        file.write(bytes)?;
        let record = file.finish()?;
        self.files.insert(name.to_owned(), record);
        Ok(())
    }

    /// Copies a file into the directory under its own name.
    ///
    /// # Errors
    /// As for [`OutputDir::write_file`].
    pub fn copy_file(&mut self, source: &Path) -> Result<(), Error> {
        let name = source.file_name().and_then(|n| n.to_str()).ok_or_else(|| Error::Output {
            path: source.to_owned(),
            rule: "should have a name in UTF-8 to be copied".to_owned(),
        })?;
        let bytes = std::fs::read(source).io("reading", source)?;
        self.write_file(name, &bytes)
    }

    /// True when a file of this name was written.
    #[must_use]
    pub fn has_file(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    pub(crate) fn create_file(&self, name: &str, expected: u64) -> Result<HashingFile, Error> {
        let bad = |rule: String| Error::Output { path: self.final_path.join(name), rule };
        if !is_plain_file_name(name) {
            return Err(bad("should be a plain file name".to_owned()));
        }
        let path = self.temp.path().join(name);
        let file = File::create_new(&path).io("creating", &path)?;
        Ok(HashingFile::new(file, path, expected))
    }

    pub(crate) fn record(&mut self, name: String, record: FileRecord) {
        self.files.insert(name, record);
    }

    /// Writes `manifest.json` over everything written so far; call it last.
    ///
    /// # Errors
    /// As for [`OutputDir::write_file`].
    pub fn write_manifest(&mut self, provenance: serde_json::Value) -> Result<Manifest, Error> {
        let manifest = Manifest::new(self.files.clone(), self.tensors.clone(), provenance);
        let text = manifest.to_json();
        let mut file = self.create_file(MANIFEST, text.len() as u64)?;
        file.write(text.as_bytes())?;
        file.finish()?;
        Ok(manifest)
    }

    /// Syncs the directory and gives it its final name.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Output`] when the final name was taken meanwhile. The temporary directory is then removed.
    pub fn commit(self) -> Result<PathBuf, Error> {
        sync_dir(self.temp.path())?;
        let (from, to) = (self.temp.path(), self.final_path.as_path());
        let occupied = std::fs::read_dir(to).is_ok_and(|mut d| d.next().is_some());
        if occupied {
            // `create` allowed it, or something put it there since; look again either way.
            check_replaceable(to, Overwrite::Yes)?;
            exchange(from, to)?;
            // What the temporary name now refers to is the old directory; dropping `temp` removes it.
            sync_dir(&self.parent)?;
            return Ok(self.final_path);
        }
        // Replaces an empty directory, fails on any other.
        std::fs::rename(from, to).io("renaming to", to)?;
        let _moved = self.temp.keep();
        sync_dir(&self.parent)?;
        Ok(self.final_path)
    }
}

/// Refuses a non-empty directory that may not or should not be replaced.
fn check_replaceable(path: &Path, overwrite: Overwrite) -> Result<(), Error> {
    let bad = |rule: &str| Error::Output { path: path.to_owned(), rule: rule.to_owned() };
    let mut entries = std::fs::read_dir(path).io("listing", path)?;
    if entries.next().is_none() {
        return Ok(());
    }
    match overwrite {
        Overwrite::No => {
            Err(bad("should not exist yet or be empty; ask for it to be replaced, or choose another name"))
        }
        Overwrite::Yes if path.join(CONFIG).exists() || path.join(MANIFEST).exists() => Ok(()),
        Overwrite::Yes => Err(bad(
            "should hold config.json or manifest.json to be replaced; it does not look like a model directory",
        )),
    }
}

/// Makes each of two directories bear the other's name.
fn exchange(a: &Path, b: &Path) -> Result<(), Error> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
        // Some file systems (and kernels before 3.15) cannot; take the long way.
    }
    let mut aside = a.as_os_str().to_owned();
    aside.push(".old");
    let aside = PathBuf::from(aside);
    std::fs::rename(b, &aside).io("moving aside", b)?;
    if let Err(source) = std::fs::rename(a, b) {
        // Put the old model back; if even that fails it is still complete under `aside`, which the message names.
        let path = if std::fs::rename(&aside, b).is_ok() { b.to_owned() } else { aside };
        return Err(Error::Io { op: "replacing (the old directory is kept at)", path, source });
    }
    std::fs::rename(&aside, a).io("moving the old directory", &aside)
}

/// Bytes an unprivileged user may still write on the file system of `path`.
///
/// # Errors
/// [`Error::Io`].
pub fn free_bytes(path: &Path) -> Result<u64, Error> {
    #[cfg(unix)]
    {
        let s =
            rustix::fs::statvfs(path).map_err(io::Error::from).io("asking for the free space of", path)?;
        Ok(s.f_bavail.saturating_mul(s.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        Ok(u64::MAX)
    }
}

fn sync_dir(path: &Path) -> Result<(), Error> {
    #[cfg(unix)]
    File::open(path).and_then(|d| d.sync_all()).io("syncing", path)?;
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

/// Turns "no space" into a message with numbers; anything else names operation and path.
fn write_error(source: io::Error, op: &'static str, path: &Path, needed: u64) -> Error {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    if matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge) {
        let free = free_bytes(path).unwrap_or(0);
        return Error::NoSpace { path: path.to_owned(), needed, free, source };
    }
    Error::Io { op, path: path.to_owned(), source }
}

/// A file that hashes what is written to it.
#[derive(Debug)]
pub(crate) struct HashingFile {
    file: io::BufWriter<File>,
    path: PathBuf,
    hasher: blake3::Hasher,
    written: u64,
    expected: u64,
    header_blake3: Option<String>,
}

impl HashingFile {
    pub(crate) fn new(file: File, path: PathBuf, expected: u64) -> Self {
        let file = io::BufWriter::with_capacity(1 << 20, file);
        Self { file, path, hasher: blake3::Hasher::new(), written: 0, expected, header_blake3: None }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let missing = self.expected.saturating_sub(self.written);
        self.file.write_all(bytes).map_err(|e| write_error(e, "writing", &self.path, missing))?;
        if bytes.len() < 1 << 17 {
            self.hasher.update(bytes);
        } else {
            self.hasher.update_rayon(bytes);
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Marks what was written so far as the header of a safetensors file.
    pub(crate) fn end_of_header(&mut self) {
        self.header_blake3 = Some(self.hasher.finalize().to_hex().to_string());
    }

    pub(crate) fn finish(mut self) -> Result<FileRecord, Error> {
        let missing = self.expected.saturating_sub(self.written).max(self.file.buffer().len() as u64);
        self.file
            .flush()
            .and_then(|()| self.file.get_ref().sync_all())
            .map_err(|e| write_error(e, "syncing", &self.path, missing))?;
        let blake3 = self.hasher.finalize().to_hex().to_string();
        Ok(FileRecord { bytes: self.written, blake3, header_blake3: self.header_blake3 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/dev/full` answers every write with ENOSPC: the message must carry path, need and room.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_explained() {
        let path = PathBuf::from("/dev/full");
        let file = File::options().write(true).open(&path).unwrap();
        let mut f = HashingFile::new(file, path.clone(), 5_000_000);
        let err = f.write(&vec![1; 3 << 20]).unwrap_err();
        assert!(matches!(err, Error::NoSpace { needed: 5_000_000, .. }), "{err}");
        let text = err.to_string();
        assert!(text.contains("/dev/full") && text.contains("5000000") && text.contains("free"), "{text}");

        let file = File::options().write(true).open(&path).unwrap();
        let mut f = HashingFile::new(file, path, 10);
        f.write(&[1; 10]).unwrap(); // Still in the buffer: the failure must not be lost at the end.
        assert!(matches!(f.finish().unwrap_err(), Error::NoSpace { needed: 10, .. }));
    }
}
