//! Read-only file contents, mapped or read. The only module of this crate with `unsafe`.
//!
//! A mapping is undefined behaviour to read *as Rust memory* when another process truncates or
//! rewrites the file meanwhile; on Linux a truncation shows as `SIGBUS`. No check at open time can
//! rule that out, so the choice is the caller's: [`FileBytes::map`] for files that nobody writes
//! (the normal case: a checkpoint costs no memory until it is touched), [`FileBytes::read`] for
//! network mounts and files that may change. What *can* be checked is: the length is taken from
//! `fstat` of the very descriptor that is mapped, and every tensor offset is checked against that
//! length.
#![expect(unsafe_code, reason = "mapping a file is unsafe by nature; this module is the only door to it")]

use std::ops::Deref;
use std::path::Path;

use crate::error::{Error, IoContext, open_file};

/// The bytes of one file.
#[derive(Debug)]
pub struct FileBytes(Inner);

#[derive(Debug)]
enum Inner {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps `path` read-only. Costs address space, not memory; pages come in when touched.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path; [`Error::FileTooLarge`] when the length exceeds the address
    /// space.
    pub fn map(path: &Path) -> Result<Self, Error> {
        let (file, meta) = open_file(path)?;
        let len =
            usize::try_from(meta.len()).ok().filter(|&n| isize::try_from(n).is_ok()).ok_or_else(|| {
                Error::FileTooLarge { path: path.to_owned(), bytes: meta.len(), max: isize::MAX as u64 }
            })?;
        if len == 0 {
            return Ok(Self(Inner::Owned(Vec::new())));
        }
        // SAFETY: the mapping is private to this value, read-only, and as long as `fstat` of the
        // same descriptor says. That nobody shortens or rewrites the file while it is mapped is the
        // documented condition of this function.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(&file) }.io("mapping", path)?;
        Ok(Self(Inner::Mapped(map)))
    }

    /// Reads the whole of `path` into memory.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Ok(Self(Inner::Owned(std::fs::read(path).io("reading", path)?)))
    }

    /// Tells the system that nobody needs the mapped pages for now: they stop counting as memory of
    /// this process, and come in again when touched. Does nothing for bytes in memory or where the
    /// system has no such call.
    pub fn release(&self) {
        #[cfg(target_os = "linux")]
        if let Inner::Mapped(map) = &self.0 {
            // SAFETY: the mapping is of a file and read-only: a page that is dropped comes back
            // with the file's bytes, which do not change by the condition of `map`.
            let result = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
            // Advice: a system that refuses keeps the pages.
            drop(result);
        }
    }

    /// Wraps bytes that are already in memory.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self(Inner::Owned(bytes))
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Inner::Mapped(m) => m,
            Inner::Owned(v) => v,
        }
    }
}
