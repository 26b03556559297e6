//! Safetensors shards, written in one pass.
//!
//! The list of tensors is known before the first byte (a plan says what each layer becomes), so
//! headers, file names and the number of shards are fixed up front, nothing is buffered beyond one
//! write, and the bytes depend on the list and the data alone. Tensors keep the order of the list;
//! a shard is closed when the next tensor would carry it beyond the limit. Headers are padded with
//! spaces so that the data begin at a multiple of 64 bytes: with tensor sizes that are such
//! multiples, a mapped tensor can be read by aligned vector loads.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::checkpoint::{INDEX, SINGLE};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::header::{MAX_HEADER, MAX_RANK};
use crate::manifest::TensorRecord;
use crate::output::{HashingFile, OutputDir};

/// Default limit of the data bytes of one shard.
pub const MAX_SHARD: u64 = 4 << 30;
const ALIGN: usize = 64;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of the data; `None` when they overflow.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.block_bytes() as u64, |n, &d| n.checked_mul(d as u64))
    }
}

#[derive(Debug)]
struct PlannedShard {
    file: String,
    header: Vec<u8>,
    tensors: Vec<TensorSpec>,
    data_bytes: u64,
}

/// How far a writer had got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Tensors of the list that are complete.
    pub(crate) tensors: usize,
    /// Digest of the file up to there; of several that of all their digests, one behind the other;
    /// empty before the first.
    pub(crate) blake3: String,
}

/// Writes the listed tensors in order.
#[derive(Debug)]
pub struct ShardWriter<'a> {
    out: &'a mut OutputDir,
    shards: Vec<PlannedShard>,
    /// Next shard and next tensor in it.
    at: (usize, usize),
    file: Option<HashingFile>,
    tensor: Option<(blake3::Hasher, u64)>,
}

impl<'a> ShardWriter<'a> {
    /// Plans the shards; `metadata` goes into every header.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a name that occurs twice or is reserved and for sizes that overflow.
    pub fn new(
        out: &'a mut OutputDir,
        tensors: Vec<TensorSpec>,
        max_shard: u64,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let path = out.final_path().to_owned();
        let bad = |t: &TensorSpec, rule: &str| Error::Tensor {
            path: path.clone(),
            tensor: t.name.clone(),
            rule: rule.to_owned(),
        };
        let mut seen = BTreeSet::new();
        let mut groups: Vec<(Vec<TensorSpec>, u64)> = vec![(Vec::new(), 0)];
        for t in tensors {
            if t.name == "__metadata__" || t.shape.len() > MAX_RANK {
                return Err(bad(
                    &t,
                    "should have another name than `__metadata__` and at most 16 dimensions",
                ));
            }
            if matches!(t.dtype, Dtype::Blocks(_)) {
                return Err(bad(&t, "should be of a type that safetensors files have"));
            }
            if !seen.insert(t.name.clone()) || out.tensors.contains_key(&t.name) {
                return Err(bad(&t, "should be listed once"));
            }
            let bytes = t.bytes().ok_or_else(|| bad(&t, "should have fewer than 2^64 bytes"))?;
            let last = groups.last().map_or(0, |g| g.1);
            let total =
                last.checked_add(bytes).ok_or_else(|| bad(&t, "should leave the total below 2^64 bytes"))?;
            if total > max_shard && groups.last().is_some_and(|g| !g.0.is_empty()) {
                groups.push((vec![t], bytes));
            } else if let Some(g) = groups.last_mut() {
                g.0.push(t);
                g.1 = total;
            }
        }
        let n = groups.len();
        let mut shards = Vec::with_capacity(n);
        for (i, (tensors, data_bytes)) in groups.into_iter().enumerate() {
            let file =
                if n == 1 { SINGLE.to_owned() } else { format!("model-{:05}-of-{n:05}.safetensors", i + 1) };
            let header = header(&tensors, metadata);
            if header.len() as u64 > MAX_HEADER {
                let rule =
                    format!("header of {file} should be at most {MAX_HEADER} bytes, has {}", header.len());
                return Err(Error::Output { path: path.clone(), rule });
            }
            shards.push(PlannedShard { file, header, tensors, data_bytes });
        }
        Ok(Self { out, shards, at: (0, 0), file: None, tensor: None })
    }

    /// Bytes of all shards, headers included; what to pass to [`OutputDir::check_space`].
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.header.len() as u64 + s.data_bytes).sum()
    }

    /// Checks that what is left to write, and `more` bytes beside it, fit on the disk.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub fn check_space(&self, more: u64) -> Result<(), Error> {
        let done: u64 = self.out.tensors.values().map(|t| t.bytes).sum();
        self.out.check_space(self.total_bytes().saturating_sub(done).saturating_add(more))
    }

    /// Writes one tensor; the next of the list.
    ///
    /// # Errors
    /// [`Error::Tensor`] when it is not the next one or has another length, [`Error::NoSpace`],
    /// [`Error::Io`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.start(name)?;
        self.push(bytes)?;
        self.end()
    }

    /// Begins the next tensor of the list, to be filled by [`ShardWriter::push`] and closed by
    /// [`ShardWriter::end`].
    ///
    /// # Errors
    /// As for [`ShardWriter::write`].
    pub fn start(&mut self, name: &str) -> Result<(), Error> {
        let want = self.shards.get(self.at.0).and_then(|s| s.tensors.get(self.at.1));
        match want {
            Some(t) if t.name == name && self.tensor.is_none() => {}
            want => {
                let want = want.map_or("the end", |t| t.name.as_str());
                let rule = format!("should be written in the order of the list, where `{want}` is next");
                return Err(self.error(name, rule));
            }
        }
        if self.file.is_none() {
            let s = &self.shards[self.at.0];
            let mut file = self.out.create_file(&s.file, s.header.len() as u64 + s.data_bytes)?;
            file.write(&s.header)?;
            file.end_of_header();
            self.file = Some(file);
        }
        self.tensor = Some((blake3::Hasher::new(), 0));
        Ok(())
    }

    /// Appends data to the tensor that was started.
    ///
    /// # Errors
    /// As for [`ShardWriter::write`].
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let spec = self.shards.get(self.at.0).and_then(|s| s.tensors.get(self.at.1));
        let (Some(file), Some((hasher, done)), Some(spec)) = (&mut self.file, &mut self.tensor, spec) else {
            return Err(self.error("", "should be started before data are pushed".to_owned()));
        };
        let want = spec.bytes().unwrap_or(0);
        if *done + bytes.len() as u64 > want {
            let (name, got) = (spec.name.clone(), *done + bytes.len() as u64);
            return Err(self.error(&name, format!("should have {want} bytes, got at least {got}")));
        }
        file.write(bytes)?;
        if bytes.len() < 1 << 17 {
            hasher.update(bytes);
        } else {
            hasher.update_rayon(bytes);
        }
        *done += bytes.len() as u64;
        Ok(())
    }

    /// Closes the tensor that was started.
    ///
    /// # Errors
    /// As for [`ShardWriter::write`].
    pub fn end(&mut self) -> Result<(), Error> {
        let spec = self.shards.get(self.at.0).and_then(|s| s.tensors.get(self.at.1)).cloned();
        let (Some((hasher, done)), Some(spec)) = (self.tensor.take(), spec) else {
            return Err(self.error("", "should be started before it is ended".to_owned()));
        };
        let want = spec.bytes().unwrap_or(0);
        if done != want {
            return Err(self.error(&spec.name, format!("should have {want} bytes, got {done}")));
        }
        let shard = &self.shards[self.at.0];
        let record = TensorRecord {
            file: shard.file.clone(),
            dtype: spec.dtype,
            shape: spec.shape,
            bytes: done,
            blake3: hasher.finalize().to_hex().to_string(),
        };
        self.out.tensors.insert(spec.name, record);
        self.at.1 += 1;
        if self.at.1 == shard.tensors.len() {
            if let Some(file) = self.file.take() {
                let record = file.finish()?;
                self.out.record_file(shard.file.clone(), record);
            }
            self.at = (self.at.0 + 1, 0);
        }
        Ok(())
    }

    /// Puts everything written so far on the disk and records `step` in the journal of a resumable
    /// directory, after which a later run need not write these tensors again. Between tensors only;
    /// without a journal, does nothing.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`].
    pub fn checkpoint(&mut self, step: Value) -> Result<(), Error> {
        if !self.out.has_journal() {
            return Ok(());
        }
        let tensors = self.shards[..self.at.0].iter().map(|s| s.tensors.len()).sum::<usize>() + self.at.1;
        let finished = self.shards[..self.at.0].iter().map(|shard| self.out.file_digest(&shard.file));
        let mut digests: Vec<String> = finished.collect();
        if let Some(file) = &mut self.file {
            digests.push(file.sync()?);
        }
        self.out.record(step, Mark { tensors, blake3: joined(&digests) })
    }

    /// Takes over the tensors up to the last checkpoint of the run that this one continues, whose
    /// list must have been the same. They are read once, for their checksums; what follows them is
    /// cut off. Returns the recorded steps.
    ///
    /// # Errors
    /// [`Error::Output`] when the files are not what they were; [`Error::Io`].
    pub fn resume(&mut self) -> Result<Vec<Value>, Error> {
        let (steps, mark) = self.out.steps();
        let mut left = mark.tensors;
        let mut digests = Vec::new();
        while left > 0 && self.at.0 < self.shards.len() {
            let shard = &self.shards[self.at.0];
            let count = left.min(shard.tensors.len());
            let all = count == shard.tensors.len();
            let expected = shard.header.len() as u64 + shard.data_bytes;
            let (mut file, header) = self.out.reopen_file(&shard.file, expected, shard.header.len())?;
            if header != shard.header {
                return Err(self.changed());
            }
            for spec in &shard.tensors[..count] {
                let bytes = spec.bytes().unwrap_or(0);
                let record = TensorRecord {
                    file: shard.file.clone(),
                    dtype: spec.dtype,
                    shape: spec.shape.clone(),
                    bytes,
                    blake3: file.take_over(bytes)?,
                };
                self.out.tensors.insert(spec.name.clone(), record);
            }
            file.cut()?;
            digests.push(file.sync()?);
            if all {
                let record = file.finish()?;
                self.out.record_file(shard.file.clone(), record);
                self.at = (self.at.0 + 1, 0);
            } else {
                self.file = Some(file);
                self.at.1 = count;
            }
            left -= count;
        }
        if left > 0 || joined(&digests) != mark.blake3 { Err(self.changed()) } else { Ok(steps) }
    }

    fn changed(&self) -> Error {
        let rule =
            "should hold what the interrupted run wrote, it was changed or damaged: delete it and start over";
        Error::Output { path: self.out.temp_path().to_owned(), rule: rule.to_owned() }
    }

    /// Checks that everything listed was written, and writes the index when there is more than one
    /// shard.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first tensor that is missing; [`Error::NoSpace`],
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<(), Error> {
        if let Some(t) = self.shards.get(self.at.0).and_then(|s| s.tensors.get(self.at.1)) {
            let name = t.name.clone();
            return Err(self.error(&name, "should be written before the writer is finished".to_owned()));
        }
        if let [only] = self.shards.as_slice()
            && only.tensors.is_empty()
        {
            // A list of nothing still makes a valid file.
            let mut file = self.out.create_file(&only.file, only.header.len() as u64)?;
            file.write(&only.header)?;
            file.end_of_header();
            let (name, record) = (only.file.clone(), file.finish()?);
            self.out.record_file(name, record);
        }
        if self.shards.len() < 2 {
            return Ok(());
        }
        let mut map = BTreeMap::new();
        for s in &self.shards {
            map.extend(s.tensors.iter().map(|t| (t.name.as_str(), s.file.as_str())));
        }
        let total: u64 = self.shards.iter().map(|s| s.data_bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let mut text = serde_json::to_string_pretty(&index).expect("maps with string keys always serialize");
        text.push('\n');
        self.out.write_file(INDEX, text.as_bytes())
    }

    fn error(&mut self, tensor: &str, rule: String) -> Error {
        Error::Tensor { path: self.out.final_path().to_owned(), tensor: tensor.to_owned(), rule }
    }
}

/// One digest of several files by theirs.
fn joined(digests: &[String]) -> String {
    match digests {
        [] => String::new(),
        [only] => only.clone(),
        several => blake3::hash(several.concat().as_bytes()).to_hex().to_string(),
    }
}

/// Length prefix and padded JSON.
fn header(tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut map = Map::new();
    if !metadata.is_empty() {
        map.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes().unwrap_or(0);
        map.insert(
            t.name.clone(),
            json!({ "dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [at, end] }),
        );
        at = end;
    }
    let mut json = Value::Object(map).to_string().into_bytes();
    json.resize((json.len() + 8).next_multiple_of(ALIGN) - 8, b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    out
}
