//! Every checksum of a model directory, recomputed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use crate::checkpoint::{Checkpoint, OpenOptions};
use crate::error::{Error, IoContext};
use crate::header::{Header, TensorInfo};
use crate::manifest::{FileRecord, MANIFEST, Manifest, hash, hash_file};
use crate::mmap::FileBytes;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// The tensor, when the damage could be pinned to one.
    pub tensor: Option<String>,
    /// What is wrong.
    pub rule: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(t) => write!(f, "{}, tensor `{t}`: {}", self.file, self.rule),
            None => write!(f, "{}: {}", self.file, self.rule),
        }
    }
}

/// What [`verify`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The directory.
    pub dir: PathBuf,
    /// False: there is no manifest, so only the structure of the files was checked and changed data
    /// would go unseen.
    pub checksums: bool,
    /// Files looked at.
    pub files: usize,
    /// Tensors looked at.
    pub tensors: usize,
    /// Bytes hashed.
    pub bytes: u64,
    /// What is wrong, file by file.
    pub problems: Vec<Problem>,
}

impl Report {
    /// True when nothing is wrong.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    fn add(&mut self, file: &str, tensor: Option<&str>, rule: impl fmt::Display) {
        self.problems.push(Problem {
            file: file.to_owned(),
            tensor: tensor.map(str::to_owned),
            rule: rule.to_string(),
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for p in &self.problems {
            writeln!(f, "{p}")?;
        }
        let (n, what) =
            (self.problems.len(), if self.checksums { "checksums" } else { "structure only (no manifest)" });
        write!(f, "{}: {} files, {} tensors, {what}: ", self.dir.display(), self.files, self.tensors)?;
        if n == 0 { f.write_str("ok") } else { write!(f, "{n} problems") }
    }
}

/// Recomputes every checksum of a model directory and names every file and tensor that is missing,
/// changed or not listed. A directory without manifest gets a structural check: headers, index and
/// shards fit together.
///
/// # Errors
/// Only when the directory itself cannot be listed; everything else is in the report.
pub fn verify(dir: impl AsRef<Path>) -> Result<Report, Error> {
    let dir = dir.as_ref();
    let mut present = BTreeSet::new();
    for entry in std::fs::read_dir(dir).io("listing", dir)? {
        let entry = entry.io("listing", dir)?;
        // Links count as what they point to: the Hugging Face cache is made of them.
        if std::fs::metadata(entry.path()).is_ok_and(|m| m.is_file()) {
            present.insert(entry.file_name().to_string_lossy().into_owned());
        }
    }
    let mut report = Report {
        dir: dir.to_owned(),
        checksums: present.contains(MANIFEST),
        files: 0,
        tensors: 0,
        bytes: 0,
        problems: Vec::new(),
    };
    if report.checksums {
        match Manifest::read(dir) {
            Ok(m) => check_all(&m, &present, &mut report),
            Err(e) => report.add(MANIFEST, None, e),
        }
    }
    let options = OpenOptions { check_manifest: false, ..OpenOptions::default() };
    match Checkpoint::open_with(dir, options) {
        Ok(c) if !report.checksums => {
            report.files = c.shards().len();
            report.tensors = c.names().len();
        }
        Ok(_) => {}
        // With a manifest the damaged file is already named; without one this is the finding.
        Err(e) if report.problems.is_empty() => report.add(".", None, e),
        Err(_) => {}
    }
    Ok(report)
}

fn check_all(m: &Manifest, present: &BTreeSet<String>, report: &mut Report) {
    for (name, want) in &m.files {
        if !present.contains(name) {
            report.add(name, None, "should exist, is missing");
            continue;
        }
        report.files += 1;
        if let Err(e) = check_file(m, name, want, report) {
            report.add(name, None, e);
        }
    }
    for name in present {
        if name != MANIFEST && !m.files.contains_key(name) {
            report.add(name, None, "should not exist, is not listed in the manifest");
        }
    }
    report.tensors = m.tensors.len();
}

fn check_file(m: &Manifest, name: &str, want: &FileRecord, report: &mut Report) -> Result<(), Error> {
    let path = report.dir.join(name);
    let (bytes, got) = hash_file(&path)?;
    report.bytes += bytes;
    let damaged = (bytes, &got) != (want.bytes, &want.blake3);
    if bytes != want.bytes {
        report.add(name, None, format_args!("should have {} bytes, has {bytes}", want.bytes));
    } else if damaged {
        report.add(name, None, format_args!("blake3 should be {}, got {got}", want.blake3));
    }
    let tensors = m.tensors.iter().filter(|(_, t)| t.file == name);
    // The digest of the file covers its tensors. Their own digests are needed to say which is
    // damaged, and once to prove that the manifest agrees with itself, which costs a second pass
    // over the (cached) pages.
    if want.header_blake3.is_none() {
        for (t, _) in tensors {
            report.add(name, Some(t), "should be in a file with a header digest");
        }
        return Ok(());
    }
    let file = FileBytes::map(&path)?;
    let header = match Header::parse(&file) {
        Ok(h) => h,
        Err(e) => {
            report.add(name, None, e);
            return Ok(());
        }
    };
    if Some(hash(&file[..header.data_start])) != want.header_blake3 {
        report.add(name, None, "header differs from its digest");
    }
    let stored: BTreeMap<&str, &TensorInfo> = header.tensors.iter().map(|(n, i)| (n.as_str(), i)).collect();
    let mut listed = 0;
    for (t, want) in tensors {
        let Some(info) = stored.get(t.as_str()) else {
            report.add(name, Some(t), "should be in the file, is missing");
            continue;
        };
        listed += 1;
        if (info.dtype, &info.shape) != (want.dtype, &want.shape) {
            let rule =
                format!("should be {} {:?}, is {} {:?}", want.dtype, want.shape, info.dtype, info.shape);
            report.add(name, Some(t), rule);
        }
        let got = hash(&file[info.range.clone()]);
        if got != want.blake3 {
            report.add(name, Some(t), format_args!("blake3 should be {}, got {got}", want.blake3));
        }
    }
    if listed != header.tensors.len() {
        for (t, _) in header.tensors.iter().filter(|(t, _)| m.tensors.get(t).is_none_or(|r| r.file != name)) {
            report.add(name, Some(t), "should be listed in the manifest");
        }
    }
    Ok(())
}
