//! Replacing one small file.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The file that [`write_atomic`] writes before it has the final name.
fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Writes a file so that its name always holds either the old or the new content, whole.
///
/// # Errors
/// When the file beside it cannot be written or renamed; the old content then stays.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let partial = partial(path);
    let mut file = File::create(&partial)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // Best effort: the first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("a.json");
        write_atomic(&path, b"one")?;
        write_atomic(&path, b"two")?;
        assert_eq!(fs::read(&path)?, b"two");
        assert!(!partial(&path).exists(), "nothing is left beside it");
        let taken = dir.path().join("dir");
        fs::create_dir(&taken)?;
        assert!(write_atomic(&taken, b"x").is_err(), "a directory is not replaced");
        assert!(taken.is_dir() && !partial(&taken).exists(), "nothing is left beside it");
        Ok(())
    }
}
