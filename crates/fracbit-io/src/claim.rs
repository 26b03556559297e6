//! One run at a time for one output.
//!
//! What is being written lies beside its final name as `NAME.partial-xxxxxx` and is locked by the
//! process that writes it. So a second run sees at once that there is a first, and a lock never
//! outlives its run, whatever ended that.

use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext};

/// The directory that a path is in.
pub(crate) fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// What names of unfinished outputs begin with.
pub(crate) fn partial_prefix(name: &OsStr) -> OsString {
    let mut prefix = name.to_os_string();
    prefix.push(".partial-");
    prefix
}

/// Locks `own`, the unfinished output of this run. Without locks, as on some file systems, there is
/// `None`, and other runs are not noticed.
///
/// # Errors
/// [`Error::Output`] when another process writes an output of this name.
pub(crate) fn lock(final_path: &Path, own: &Path) -> Result<Option<File>, Error> {
    // Directories can be opened and locked, too, but for Windows.
    let Some(lock) = File::open(own).ok().filter(|file| file.try_lock().is_ok()) else { return Ok(None) };
    let prefix = partial_prefix(final_path.file_name().unwrap_or_default());
    let entries = std::fs::read_dir(parent_of(final_path)).into_iter().flatten().flatten();
    for entry in entries {
        let named = entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        if !named || Some(entry.file_name().as_os_str()) == own.file_name() {
            continue;
        }
        // One that is gone meanwhile is nobody's.
        let other =
            File::open(entry.path()).is_ok_and(|f| matches!(f.try_lock(), Err(TryLockError::WouldBlock)));
        if other {
            let rule = format!("another run writes it now, in {}", entry.path().display());
            return Err(Error::Output { path: final_path.to_owned(), rule });
        }
    }
    Ok(Some(lock))
}

/// The name of a file that will be written later. Held from the beginning, so that what is wrong
/// with it is said before the work and not after: its directory is missing or cannot be written,
/// or another run writes the same file.
#[derive(Debug)]
pub struct Claim {
    _lock: Option<File>,
    _file: tempfile::NamedTempFile, // removed when dropped
}

impl Claim {
    /// Claims a name for as long as the value lives.
    ///
    /// # Errors
    /// [`Error::Output`] when it is no name of a file, or another run has claimed it;
    /// [`Error::Io`] when its directory cannot be written.
    pub fn new(path: &Path) -> Result<Self, Error> {
        let bad = |rule: &str| Error::Output { path: path.to_owned(), rule: rule.to_owned() };
        let name = path.file_name().ok_or_else(|| bad("should end in the name of a file"))?;
        if path.is_dir() {
            return Err(bad("should be a file, is a directory"));
        }
        let parent = parent_of(path);
        let file = tempfile::Builder::new().prefix(&partial_prefix(name)).tempfile_in(&parent);
        let file = file.io("creating a file in", &parent)?;
        Ok(Self { _lock: lock(path, file.path())?, _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        // What a killed run left behind is nobody's.
        std::fs::write(dir.path().join("a.json.partial-old"), "").unwrap();
        let claim = Claim::new(&path).unwrap();
        let refused = Claim::new(&path).unwrap_err().to_string();
        assert!(refused.contains("a.json") && refused.contains("another run"), "{refused}");
        Claim::new(&dir.path().join("b.json")).unwrap();
        drop(claim);
        Claim::new(&path).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left but what was there");
    }

    #[test]
    fn what_is_no_place_for_a_file_is_said_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for (path, word) in [
            (dir.path().to_path_buf(), "is a directory"),
            (dir.path().join("absent/a.json"), "creating a file in"),
            (dir.path().join(".."), "name of a file"),
        ] {
            let refused = Claim::new(&path).unwrap_err().to_string();
            assert!(refused.contains(word), "{refused}");
        }
    }
}
