//! What a long run has finished, so that the next one need not do it again.
//!
//! A journal is a file of lines, each the first 16 digits of a blake3 digest, a space, and a JSON
//! document. The first document says what run it belongs to. A line is synced before the next step
//! begins; one that a crash tore fails its digest and is cut off with all that follows. The file is
//! locked while a run uses it, so that two runs never continue one directory.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Error, IoContext};
use crate::output::write_error;

/// File name within a work directory.
pub(crate) const JOURNAL: &str = "journal";
const VERSION: u32 = 1;

/// An open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    pub(crate) entries: Vec<Value>,
}

/// What a journal turned out to be.
#[derive(Debug)]
pub(crate) enum Found {
    /// Of the run that was asked for, and now ours.
    Ours(Journal),
    /// Of another run.
    Other,
    /// In use by another process.
    InUse,
}

impl Journal {
    /// Starts the journal of a run.
    pub(crate) fn create(dir: &Path, key: &str) -> Result<Self, Error> {
        let path = dir.join(JOURNAL);
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|e| write_error(e, "creating", &path, 1))?;
        // Nobody else can have it yet; a file system without locks is no reason to stop.
        let _ = file.try_lock();
        let mut journal = Self { file, path, entries: Vec::new() };
        journal.append(&json!({ "journal": VERSION, "run": key }))?;
        Ok(journal)
    }

    /// Opens the journal of a work directory, if it is that of the run `key`.
    pub(crate) fn open(dir: &Path, key: &str) -> Result<Found, Error> {
        let path = dir.join(JOURNAL);
        let mut file = match File::options().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found::Other),
            Err(source) => return Err(Error::Io { op: "opening", path, source }),
        };
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Ok(Found::InUse);
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).io("reading", &path)?;
        let (mut entries, mut good) = (Vec::new(), 0);
        for line in text.split_inclusive(|&b| b == b'\n') {
            let Some(entry) = parse(line) else { break };
            entries.push(entry);
            good += line.len();
        }
        if entries.first() != Some(&json!({ "journal": VERSION, "run": key })) {
            return Ok(Found::Other);
        }
        entries.remove(0);
        file.set_len(good as u64).io("cutting a torn line from", &path)?;
        file.seek(SeekFrom::Start(good as u64)).io("reading", &path)?;
        Ok(Found::Ours(Self { file, path, entries }))
    }

    /// Adds an entry; it is on the disk when this returns.
    pub(crate) fn record(&mut self, entry: Value) -> Result<(), Error> {
        self.append(&entry)?;
        self.entries.push(entry);
        Ok(())
    }

    fn append(&mut self, entry: &Value) -> Result<(), Error> {
        let text = entry.to_string();
        let line = format!("{} {text}\n", digest(text.as_bytes()));
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| write_error(e, "writing", &self.path, line.len() as u64))
    }
}

fn digest(text: &[u8]) -> String {
    blake3::hash(text).to_hex()[..16].to_owned()
}

fn parse(line: &[u8]) -> Option<Value> {
    let line = line.strip_suffix(b"\n")?;
    let (sum, text) = (line.get(..16)?, line.get(17..)?);
    if digest(text).as_bytes() != sum { None } else { serde_json::from_slice(text).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_lines_are_cut_off_wherever_they_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path(), "run").unwrap();
        (0..3).for_each(|i| journal.record(json!({ "step": i })).unwrap());
        assert!(matches!(Journal::open(dir.path(), "run").unwrap(), Found::InUse));
        drop(journal);
        assert!(matches!(Journal::open(dir.path(), "else").unwrap(), Found::Other));
        let path = dir.path().join(JOURNAL);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').map(|i| i + 1).collect();
        for len in ends[0]..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let Found::Ours(mut journal) = Journal::open(dir.path(), "run").unwrap() else { panic!("ours") };
            let kept = ends.iter().filter(|&&e| e <= len).count() - 1;
            assert_eq!(journal.entries.len(), kept);
            journal.record(json!("next")).unwrap();
            drop(journal);
            let Found::Ours(journal) = Journal::open(dir.path(), "run").unwrap() else { panic!("ours") };
            assert_eq!(journal.entries.len(), kept + 1);
        }
        // A damaged line hides itself and what follows.
        let mut bad = whole.clone();
        bad[ends[1] + 20] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let Found::Ours(journal) = Journal::open(dir.path(), "run").unwrap() else { panic!("ours") };
        assert_eq!(journal.entries.len(), 1);
    }
}
