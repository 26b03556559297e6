//! A model directory that appears whole or not at all.
//!
//! Files are written to a temporary sibling `NAME.partial-xxxxxx`, each is synced as it is
//! finished, then the directory is synced, renamed to its final name, and the parent synced. A
//! crash at any point leaves the final name as it was, with at most a `.partial-` directory beside
//! it; an error or an early return removes that too. Every byte is hashed on its way to the disk,
//! so the manifest costs no second pass.
//!
//! A *resumable* directory is for runs of hours. It is written within a work directory
//! `NAME.partial-xxxxxx` (as `data`, beside a journal and scratch files) that stays when the run is
//! killed or fails after its first finished step, and that a later run of the same description
//! continues.
//!
//! Replacing an existing directory ([`Overwrite::Yes`]) exchanges the two names in one step where
//! the system can (Linux), so that a reader sees the old model or the new one; elsewhere there is a
//! moment with neither. It is refused for a directory that does not look like a model, because a
//! mistyped `-o ~` should not cost a home directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::checkpoint::is_plain_file_name;
use crate::claim::{lock, parent_of, partial_prefix};
use crate::config::CONFIG;
use crate::error::{Error, IoContext};
use crate::journal::{Found, JOURNAL, Journal};
use crate::manifest::{FileRecord, MANIFEST, Manifest, TensorRecord};
use crate::writer::Mark;

/// What to do with a directory that is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overwrite {
    /// Refuse, unless it is empty.
    #[default]
    No,
    /// Replace it when it looks like a model directory: has `config.json`.
    Yes,
    /// Replace it when it has this file, the mark of its kind.
    Holding(&'static str),
}

/// A directory being written.
#[derive(Debug)]
pub struct OutputDir {
    final_path: PathBuf,
    parent: PathBuf,
    overwrite: Overwrite,
    temp: Temp,
    files: BTreeMap<String, FileRecord>,
    pub(crate) tensors: BTreeMap<String, TensorRecord>,
    journal: Option<Journal>,
}

/// The temporary directory, removed when dropped unless it is to be kept.
#[derive(Debug)]
struct Temp {
    root: PathBuf,
    data: PathBuf, // within it: the directory that gets the final name
    keep: bool,
    _lock: Option<File>, // tells other runs that this one writes
}

impl Temp {
    /// An empty one for a directory that may get this name.
    fn new(final_path: &Path, overwrite: Overwrite) -> Result<Self, Error> {
        check_name(final_path, overwrite)?;
        let root = temporary(final_path)?;
        let mut temp = Self { data: root.join(DATA), root, keep: false, _lock: None };
        temp._lock = lock(final_path, &temp.root)?;
        std::fs::create_dir(&temp.data).io("creating", &temp.data)?;
        Ok(temp)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.keep {
            // Best effort: there is nobody left to tell.
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }
}

/// How a resumable directory begins.
#[derive(Debug)]
pub enum Resumable {
    /// Without anything.
    New(OutputDir),
    /// With the steps that an interrupted run of the same description recorded.
    Continued(OutputDir),
    /// That run had given the directory its final name; nothing is left to do.
    Finished(PathBuf),
}

/// A temporary directory that an earlier run left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Where it lies.
    pub path: PathBuf,
    /// Whether it holds a journal, so that a run of the same description can continue it.
    pub resumable: bool,
}

/// Temporary directories of earlier runs beside `final_path`, sorted. One in use by a running
/// process is among them.
#[must_use]
pub fn leftovers(final_path: &Path) -> Vec<Leftover> {
    let (Some(name), parent) = (final_path.file_name(), parent_of(final_path)) else { return Vec::new() };
    let prefix = partial_prefix(name);
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let ours = entries.filter(|e| {
        e.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes())
            && e.file_type().is_ok_and(|t| t.is_dir())
    });
    let mut found: Vec<Leftover> =
        ours.map(|e| Leftover { resumable: e.path().join(JOURNAL).is_file(), path: e.path() }).collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Whether the directory `out` is there and is or holds `read`, which would be gone if `out` were
/// replaced.
#[must_use]
pub fn holds(out: &Path, read: &Path) -> bool {
    let Ok(place) = out.canonicalize() else { return false };
    read.canonicalize().is_ok_and(|read| read.starts_with(place))
}

/// Name of the final directory while it is within a work directory.
const DATA: &str = "data";

impl OutputDir {
    /// Starts a directory that will be called `final_path`, whose parent must exist.
    ///
    /// # Errors
    /// [`Error::Output`] when the name is taken or unusable, [`Error::Io`] when the parent is
    /// missing or not writable.
    pub fn create(final_path: impl AsRef<Path>, overwrite: Overwrite) -> Result<Self, Error> {
        let final_path = final_path.as_ref();
        Ok(Self::of(final_path, overwrite, Temp::new(final_path, overwrite)?, None))
    }

    /// Starts a resumable directory for the run that `key` describes: everything that decides its
    /// bytes. With `resume`, continues what an interrupted run with this key left beside
    /// `final_path`, if there is such.
    ///
    /// # Errors
    /// As for [`OutputDir::create`].
    pub fn resumable(
        final_path: impl AsRef<Path>,
        overwrite: Overwrite,
        key: &str,
        resume: bool,
    ) -> Result<Resumable, Error> {
        let final_path = final_path.as_ref();
        let earlier = if resume { leftovers(final_path) } else { Vec::new() };
        for Leftover { path: root, .. } in earlier {
            let Found::Ours(journal) = Journal::open(&root, key)? else { continue };
            let data = root.join(DATA);
            if !data.is_dir() {
                // Killed between the last two steps of `commit`.
                std::fs::remove_dir_all(&root).io("removing", &root)?;
                return Ok(Resumable::Finished(final_path.to_owned()));
            }
            check_name(final_path, overwrite)?;
            let lock = lock(final_path, &root)?;
            let temp = Temp { root, data, keep: true, _lock: lock };
            return Ok(Resumable::Continued(Self::of(final_path, overwrite, temp, Some(journal))));
        }
        let temp = Temp::new(final_path, overwrite)?;
        let journal = Journal::create(&temp.root, key)?;
        Ok(Resumable::New(Self::of(final_path, overwrite, temp, Some(journal))))
    }

    fn of(final_path: &Path, overwrite: Overwrite, temp: Temp, journal: Option<Journal>) -> Self {
        Self {
            final_path: final_path.to_owned(),
            parent: parent_of(final_path),
            overwrite,
            temp,
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
            journal,
        }
    }

    pub(crate) fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Steps that were recorded, by this run or the one it continues, and how far the writer had
    /// got at the last.
    pub(crate) fn steps(&self) -> (Vec<Value>, Mark) {
        let entries = self.journal.as_ref().map_or(&[][..], |j| &j.entries);
        let entries: Vec<(Value, Mark)> =
            entries.iter().filter_map(|e| serde_json::from_value(e.clone()).ok()).collect();
        let mark = entries.last().map(|(_, mark)| mark.clone()).unwrap_or_default();
        (entries.into_iter().map(|(step, _)| step).collect(), mark)
    }

    /// Records a finished step: it survives a crash from here on.
    pub(crate) fn record(&mut self, step: Value, mark: Mark) -> Result<(), Error> {
        if let Some(journal) = &mut self.journal {
            journal.record(json!([step, mark]))?;
            self.temp.keep = true;
        }
        Ok(())
    }

    /// Keeps what is there even if this run fails before its first step: its scratch files are
    /// worth something.
    pub fn keep(&mut self) {
        self.temp.keep = self.journal.is_some();
    }

    /// Place of a scratch file that does not become part of the directory.
    #[must_use]
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.temp.root.join(name)
    }

    /// Where the files are until [`OutputDir::commit`].
    #[must_use]
    pub fn temp_path(&self) -> &Path {
        &self.temp.data
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
        let free = free_bytes(&self.temp.data)?;
        if bytes <= free {
            return Ok(());
        }
        let source = io::Error::from(io::ErrorKind::StorageFull);
        Err(Error::NoSpace { path: self.parent.clone(), needed: bytes, free, source })
    }

    /// Writes one file, synced and hashed.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`], or [`Error::Output`] for a name that is taken or not
    /// plain.
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
        let path = self.temp.data.join(name);
        // A run that is continued may have left the file half written.
        let mut options = File::options();
        options.write(true);
        let options = match self.journal {
            Some(_) if !self.files.contains_key(name) => options.create(true).truncate(true),
            _ => options.create_new(true),
        };
        let file = options.open(&path).map_err(|e| write_error(e, "creating", &path, expected))?;
        Ok(HashingFile::new(file, path, expected))
    }

    pub(crate) fn record_file(&mut self, name: String, record: FileRecord) {
        self.files.insert(name, record);
    }

    pub(crate) fn file_digest(&self, name: &str) -> String {
        self.files.get(name).map_or_else(String::new, |f| f.blake3.clone())
    }

    /// Opens a file of an interrupted run to continue it, and returns its first `header` bytes.
    pub(crate) fn reopen_file(
        &self,
        name: &str,
        expected: u64,
        header: usize,
    ) -> Result<(HashingFile, Vec<u8>), Error> {
        let path = self.temp.data.join(name);
        let file = File::options().read(true).write(true).open(&path).io("opening", &path)?;
        let mut file = HashingFile::new(file, path, expected);
        let mut text = Vec::with_capacity(header);
        file.reread(header as u64, |part| text.extend_from_slice(part))?;
        file.end_of_header();
        Ok((file, text))
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
    /// [`Error::Io`], or [`Error::Output`] when the final name was taken meanwhile. The temporary
    /// directory is then removed.
    pub fn commit(mut self) -> Result<PathBuf, Error> {
        sync_dir(&self.temp.data)?;
        let (from, to) = (self.temp.data.as_path(), self.final_path.as_path());
        let occupied = std::fs::read_dir(to).is_ok_and(|mut d| d.next().is_some());
        if occupied {
            // `create` allowed it, or something put it there since; look again either way.
            check_replaceable(to, self.overwrite)?;
            exchange(from, to)?;
            // What the temporary name now refers to is the old directory.
            std::fs::remove_dir_all(from).io("removing the old directory", from)?;
        } else {
            // Replaces an empty directory, fails on any other.
            std::fs::rename(from, to).io("renaming to", to)?;
        }
        sync_dir(&self.parent)?;
        // Dropping it removes what is left.
        self.temp.keep = false;
        Ok(self.final_path.clone())
    }
}

/// Refuses a name that the directory cannot have.
fn check_name(final_path: &Path, overwrite: Overwrite) -> Result<(), Error> {
    let bad = |rule: &str| Error::Output { path: final_path.to_owned(), rule: rule.to_owned() };
    if final_path.file_name().is_none() {
        return Err(bad("should end in the name of a directory"));
    }
    match std::fs::symlink_metadata(final_path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::Io { op: "looking at", path: final_path.to_owned(), source: e }),
        Ok(m) if !m.is_dir() => Err(bad("should not exist yet, is a file or a link")),
        Ok(_) => check_replaceable(final_path, overwrite),
    }
}

/// A new directory beside `final_path`.
fn temporary(final_path: &Path) -> Result<PathBuf, Error> {
    let parent = parent_of(final_path);
    let prefix = partial_prefix(final_path.file_name().unwrap_or_default());
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    #[cfg(unix)]
    {
        // The default of a temporary directory (0700) would stick to the finished model; take what
        // the umask allows.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o777));
    }
    Ok(builder.tempdir_in(&parent).io("creating a directory in", &parent)?.keep())
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
        Overwrite::Yes if path.join(CONFIG).exists() => Ok(()),
        Overwrite::Yes => {
            Err(bad("should hold config.json to be replaced; it does not look like a model directory"))
        }
        Overwrite::Holding(mark) if path.join(mark).exists() => Ok(()),
        Overwrite::Holding(mark) => {
            Err(bad(&format!("should hold {mark} to be replaced; it is something else")))
        }
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
        // Put the old model back; if even that fails it is still complete under `aside`, which the
        // message names.
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

/// The error of a write to `path` that had `needed` bytes to go: "no space" comes with numbers,
/// anything else names operation and path.
#[must_use]
pub fn write_error(source: io::Error, op: &'static str, path: &Path, needed: u64) -> Error {
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

    /// Puts everything written so far on the disk and returns its digest.
    pub(crate) fn sync(&mut self) -> Result<String, Error> {
        let missing = self.expected.saturating_sub(self.written).max(self.file.buffer().len() as u64);
        self.file
            .flush()
            .and_then(|()| self.file.get_ref().sync_data())
            .map_err(|e| write_error(e, "syncing", &self.path, missing))?;
        Ok(self.hasher.finalize().to_hex().to_string())
    }

    /// Takes over the next `bytes` bytes of a file that an earlier run wrote.
    fn reread(&mut self, bytes: u64, mut also: impl FnMut(&[u8])) -> Result<(), Error> {
        let mut buffer = vec![0; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let part = usize::try_from(left).map_or(buffer.len(), |l| l.min(buffer.len()));
            let part = &mut buffer[..part];
            self.file.get_mut().read_exact(part).io("reading", &self.path)?;
            self.hasher.update(part);
            also(part);
            left -= part.len() as u64;
        }
        self.written += bytes;
        Ok(())
    }

    /// Takes over a tensor of `bytes` bytes and returns its digest.
    pub(crate) fn take_over(&mut self, bytes: u64) -> Result<String, Error> {
        let mut hasher = blake3::Hasher::new();
        self.reread(bytes, |part| {
            hasher.update(part);
        })?;
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// Cuts off what follows the bytes taken over so far.
    pub(crate) fn cut(&mut self) -> Result<(), Error> {
        self.file.get_ref().set_len(self.written).io("cutting", &self.path)
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
