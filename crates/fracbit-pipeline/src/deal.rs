//! Work of one command done by many processes, with the bytes of one.
//!
//! A matrix that is rounded for itself, without a calibration or for the moments of one, depends on
//! nothing but the checkpoint, the plan and the calibration. So it can be made anywhere; and the
//! moments of a calibration are sums over shards of its text, each of which can be collected
//! anywhere. A [`Job`] says all that decides the bytes, a [`crate::Worker`] makes the part of an
//! index from it, a [`Part`] carries it back as bytes with a checksum. [`crate::quantize_in`] and
//! [`crate::calibrate()`] ask [`Dealt`] for the parts in the order of the directory and write them
//! as they write their own, so that directory, journal and `resume` are the same whoever made them.
//!
//! Sequential quantization is not dealt: each block is rounded for what the blocks before it give.
//!
//! Files are not carried: workers see checkpoint and calibration under the same paths. They refuse
//! another calibration by its digest, another checkpoint by its names and shapes, and a matrix says
//! what numbers it was made of, which should be those that are here; moments are collected of a
//! checkpoint with the same hash alone.

use fracbit_load::Error;
use fracbit_model::{LinearId, WeightSource};
use fracbit_plan::Plan;
use fracbit_quant::Effort;
use serde::{Deserialize, Serialize};
use std::{
    fmt::Debug,
    path::{Path, PathBuf},
};

/// What workers have to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Version of this program: others may work otherwise.
    pub(crate) version: String,
    /// The checkpoint.
    pub(crate) model: PathBuf,
    pub(crate) work: Work,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// A part is a matrix of a plan.
    Round(Box<RoundJob>),
    /// A part is a shard of the text at a block.
    Collect(CollectJob),
}

/// What decides the bytes of every matrix.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RoundJob {
    /// The plan.
    pub(crate) plan: Plan,
    /// Directory of the input moments, and their digest.
    pub(crate) calibration: Option<(PathBuf, String)>,
    /// How thoroughly codes are searched.
    pub(crate) effort: String,
    /// Bytes of trained codebooks.
    pub(crate) codebook_bytes: usize,
}

/// What decides the bytes of every shard's moments.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CollectJob {
    /// Content hash of the checkpoint.
    pub(crate) source_hash: String,
    /// The text: tokens of all sequences, one behind the other.
    pub(crate) tokens: Vec<u32>,
    /// Tokens of each.
    pub(crate) lengths: Vec<u32>,
    /// What moments are summed with.
    pub(crate) instructions: String,
    /// How many shards there are.
    pub(crate) shards: usize,
}

/// Makes the parts of a job elsewhere.
pub trait Dealt: Debug + Send + Sync {
    /// Begins with part `first` of `count`.
    ///
    /// # Errors
    /// When nobody can make them.
    fn begin(&self, job: &Job, first: usize, count: usize) -> Result<(), Error>;

    /// The bytes of a [`Part`]; asked for in order.
    ///
    /// # Errors
    /// When it could not be made.
    fn take(&self, index: usize) -> Result<Vec<u8>, Error>;
}

/// A refusal of the dealing itself.
pub(crate) fn bad(rule: impl Into<String>) -> Error {
    Error::Dealt { rule: rule.into() }
}

impl Job {
    /// As text, for another process.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data serializes")
    }

    /// From the text of [`Job::to_json`].
    ///
    /// # Errors
    /// When it is none.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The rounding of a plan's matrices, with the moments of a directory, which has this digest.
    pub(crate) fn rounding(
        source: &WeightSource,
        plan: &Plan,
        calibration: Option<(&Path, &str)>,
        effort: Effort,
        codebook_bytes: usize,
    ) -> Result<Self, Error> {
        let calibration = calibration.map(|(dir, digest)| Ok::<_, Error>((whole(dir)?, digest.to_owned())));
        let job = RoundJob {
            plan: plan.clone(),
            calibration: calibration.transpose()?,
            effort: effort.name().to_owned(),
            codebook_bytes,
        };
        Self::new(source, Work::Round(Box::new(job)))
    }

    /// The collection of moments.
    pub(crate) fn collecting(source: &WeightSource, job: CollectJob) -> Result<Self, Error> {
        Self::new(source, Work::Collect(job))
    }

    fn new(source: &WeightSource, work: Work) -> Result<Self, Error> {
        let model = whole(source.checkpoint().path())?;
        Ok(Self { version: env!("CARGO_PKG_VERSION").to_owned(), model, work })
    }

    /// How many parts stand between one and the part that goes on where it ended, if any does: a
    /// shard at the next block.
    #[must_use]
    pub fn stride(&self) -> Option<usize> {
        match &self.work {
            Work::Round(_) => None,
            Work::Collect(job) => Some(job.shards),
        }
    }
}

/// A path that does not depend on where a process stands.
fn whole(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|e| bad(format!("`{}`: {e}", path.display())))
}

/// A matrix, or the moments of a shard, that was made elsewhere.
#[derive(Debug, PartialEq)]
pub struct Part {
    /// Its place in the job.
    pub index: usize,
    /// Measured `|W - W'|^2 / |W|^2`; of moments 0.
    pub relative_error: f64,
    /// Hash of the numbers that a matrix was made of.
    pub source: String,
    /// Its tensors in the order of the file.
    pub tensors: Vec<(String, Vec<u8>)>,
}

/// What stands before the tensors' bytes.
#[derive(Serialize, Deserialize)]
struct Head {
    index: usize,
    relative_error: u64, // the bits: decimals may lose the last one
    source: String,
    tensors: Vec<(String, usize)>,
}

/// A hash of the numbers that a matrix is made of: its tensors, its bias, and the gain or factors
/// in its columns.
pub(crate) fn digest(source: &WeightSource, id: LinearId) -> Result<String, Error> {
    let mut hasher = blake3::Hasher::new();
    for name in source.weight_names(id) {
        hasher.update_rayon(source.checkpoint().tensor(&name)?.bytes);
    }
    for floats in [source.bias(id)?, source.columns(id)?].into_iter().flatten() {
        floats.iter().for_each(|v| _ = hasher.update(&v.to_le_bytes()));
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Bytes of a checksum.
const SUM: usize = blake3::OUT_LEN;
/// Bytes of the length of the head.
const LEN: usize = size_of::<u64>();

impl Part {
    /// Checksum of the rest, length of the head, head as JSON, tensors one behind the other.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let tensors = self.tensors.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect();
        let Self { index, relative_error, ref source, .. } = *self;
        let (relative_error, source) = (relative_error.to_bits(), source.clone());
        let head = Head { index, relative_error, source, tensors };
        let head = serde_json::to_vec(&head).expect("plain data serializes");
        let all: usize = self.tensors.iter().map(|(_, bytes)| bytes.len()).sum();
        let mut out = Vec::with_capacity(SUM + LEN + head.len() + all);
        out.resize(SUM, 0);
        out.extend((head.len() as u64).to_le_bytes());
        out.extend(head);
        self.tensors.iter().for_each(|(_, bytes)| out.extend(bytes));
        let sum = blake3::hash(&out[SUM..]);
        out[..SUM].copy_from_slice(sum.as_bytes());
        out
    }

    /// Takes a part from `dealt` and checks that it was made of the numbers that are here.
    pub(crate) fn take(
        dealt: &dyn Dealt,
        (source, id): (&WeightSource, LinearId),
        index: usize,
    ) -> Result<Self, Error> {
        let part = Self::from_bytes(&dealt.take(index)?, index)?;
        if part.source != digest(source, id)? {
            let path = source.checkpoint().path().display();
            return Err(bad(format!("`{path}` on the worker that rounded `{id}` has other weights")));
        }
        Ok(part)
    }

    /// Reads what [`Part::to_bytes`] wrote.
    ///
    /// # Errors
    /// When a byte is another than was written, or some are missing.
    pub fn from_bytes(bytes: &[u8], index: usize) -> Result<Self, Error> {
        let damaged = || bad(format!("part {index} came back damaged from its worker"));
        let (sum, rest) = bytes.split_at_checked(SUM).ok_or_else(damaged)?;
        if blake3::hash(rest).as_bytes() != sum {
            return Err(damaged());
        }
        let (len, rest) = rest.split_first_chunk::<LEN>().ok_or_else(damaged)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| damaged())?;
        let (head, mut rest) = rest.split_at_checked(len).ok_or_else(damaged)?;
        let head: Head = serde_json::from_slice(head).map_err(|_| damaged())?;
        if head.index != index {
            return Err(bad(format!("asked for part {index}, got {}", head.index)));
        }
        let mut tensors = Vec::with_capacity(head.tensors.len());
        for (name, len) in head.tensors {
            let (own, behind) = rest.split_at_checked(len).ok_or_else(damaged)?;
            tensors.push((name, own.to_vec()));
            rest = behind;
        }
        let relative_error = f64::from_bits(head.relative_error);
        let part = Self { index, relative_error, source: head.source, tensors };
        if rest.is_empty() { Ok(part) } else { Err(damaged()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_whole_or_not_at_all() {
        let tensors = vec![("a".to_owned(), vec![1, 2, 3]), ("b".to_owned(), Vec::new())];
        let part = Part { index: 3, relative_error: 0.1 + 0.2, source: "hash".to_owned(), tensors };
        let bytes = part.to_bytes();
        assert_eq!(Part::from_bytes(&bytes, 3).ok(), Some(part));
        assert!(Part::from_bytes(&bytes, 4).is_err(), "another matrix");
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Part::from_bytes(&damaged, 3).is_err(), "bit of byte {at}");
            assert!(Part::from_bytes(&bytes[..at], 3).is_err(), "{at} bytes");
        }
    }
}
