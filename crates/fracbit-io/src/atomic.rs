//! Replacing one small file, and what a run keeps in one for the run that continues it.

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

/// Keeps what a continued run goes on with: as [`write_atomic`], behind its digest. What it holds
/// decides bytes of the result, so a changed bit would be in them.
///
/// # Errors
/// As for [`write_atomic`].
pub fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomic(path, &[blake3::hash(bytes).as_bytes(), bytes].concat())
}

/// What [`keep`] wrote; `None` where there is no such file, or another byte in it.
#[must_use]
pub fn kept(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (digest, bytes) = bytes.split_first_chunk::<{ blake3::OUT_LEN }>()?;
    (blake3::hash(bytes).as_bytes() == digest).then(|| bytes.to_vec())
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

    #[test]
    fn what_is_kept_comes_back_as_it_was_or_not_at_all() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("a.json");
        assert_eq!(kept(&path), None);
        keep(&path, b"{\"tokens\":512}")?;
        assert_eq!(kept(&path).as_deref(), Some(&b"{\"tokens\":512}"[..]));
        let whole = fs::read(&path)?;
        for bit in 0..8 * whole.len() {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, damaged)?;
            assert_eq!(kept(&path), None, "bit {bit}");
        }
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len])?;
            assert_eq!(kept(&path), None, "{len} bytes");
        }
        Ok(())
    }
}
