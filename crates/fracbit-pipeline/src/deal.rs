//! Matrices of one plan rounded by many processes, with the bytes of one.
//!
//! A matrix that is rounded for itself, without a calibration or for the moments of one, depends on
//! nothing but the checkpoint, the plan and the calibration. So it can be made anywhere: a [`Job`]
//! says all that decides its bytes, a [`Worker`] makes the matrix of an index from it, a [`Part`]
//! carries it back as bytes with a checksum. [`crate::quantize_in`] asks [`Dealt`] for the parts in
//! the order of the directory and writes them as it writes its own, so that directory, journal and
//! `resume` are the same whoever rounded.
//!
//! Sequential quantization is not dealt: each block is rounded for what the blocks before it give.
//!
//! Files are not carried: workers see checkpoint and calibration under the same paths. They refuse
//! another calibration by its digest, another checkpoint by its names and shapes, and a part says
//! what numbers it was made of, which should be those that are here.

use crate::{
    Calibration, groups,
    matrices::{Rounds, f32_bytes},
    smoothing,
};
use fracbit_base::Scheme;
use fracbit_format::Codebook;
use fracbit_load::{Error, Opened, Quiet};
use fracbit_model::{LinearId, WeightSource};
use fracbit_plan::{Plan, plan::Inventory};
use fracbit_quant::{Effort, Rounders};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What decides the bytes of every matrix.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Version of this program: others may round otherwise.
    pub version: String,
    /// The checkpoint.
    pub model: PathBuf,
    /// The plan.
    pub plan: Plan,
    /// Directory of the input moments.
    pub calibration: Option<PathBuf>,
    /// Their digest.
    pub calibration_digest: Option<String>,
    /// How thoroughly codes are searched.
    pub effort: String,
    /// Bytes of trained codebooks.
    pub codebook_bytes: usize,
}

/// Makes the matrices of a job elsewhere.
pub trait Dealt: Debug + Send + Sync {
    /// Begins with the matrix `first` of `count`.
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
fn bad(rule: impl Into<String>) -> Error {
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

    /// The job of a run.
    pub(crate) fn new(
        source: &WeightSource,
        plan: &Plan,
        calibration: Option<&Calibration>,
        effort: Effort,
        codebook_bytes: usize,
    ) -> Result<Self, Error> {
        let whole =
            |path: &Path| std::path::absolute(path).map_err(|e| bad(format!("`{}`: {e}", path.display())));
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: whole(source.checkpoint().path())?,
            plan: plan.clone(),
            calibration: calibration.map(|c| whole(c.path())).transpose()?,
            calibration_digest: calibration.map(|c| c.digest().to_owned()),
            effort: effort.name().to_owned(),
            codebook_bytes,
        })
    }
}

/// A process that makes matrices of a job.
#[derive(Debug)]
pub struct Worker {
    source: WeightSource,
    plan: Plan,
    inventory: Inventory,
    rounders: Rounders,
    codebooks: BTreeMap<Scheme, Codebook>,
    calibration: Option<Arc<Calibration>>,
}

impl Worker {
    /// Opens what the job names.
    ///
    /// # Errors
    /// When it is of another version, or the files here are others than those that it was made
    /// for; and when they cannot be read.
    pub fn new(job: &Job) -> Result<Self, Error> {
        let version = env!("CARGO_PKG_VERSION");
        if job.version != version {
            return Err(bad(format!("the job is of fracbit {}, this worker of {version}", job.version)));
        }
        let effort: Effort = job.effort.parse().map_err(|e| bad(format!("effort: {e}")))?;
        let opened = Opened::new(&job.model)?;
        let calibration = job.calibration.as_ref().map(|dir| Calibration::open(dir)).transpose()?;
        let digest = calibration.as_ref().map(|c| c.digest().to_owned());
        if digest != job.calibration_digest {
            let path = job.calibration.as_deref().unwrap_or(&job.model).display();
            return Err(bad(format!("`{path}` is another calibration on this machine")));
        }
        let (mut plan, calibration) = (job.plan.clone(), calibration.map(Arc::new));
        let inventory = Inventory::of(&opened.checkpoint, &opened.config, plan.rotation);
        plan.fit_to(&inventory)?;
        let inventory = inventory.with_bands(&plan.bands)?.into_owned();
        let known = calibration.as_deref();
        let source =
            smoothing::planned_source(&opened, plan.rotation, plan.seed, plan.smoothing, known, &Quiet)?;
        let given = BTreeMap::new();
        let codebooks = groups::train(&source, &plan, &given, known, job.codebook_bytes, &Quiet)?;
        let rounders = Rounders::new(effort);
        Ok(Self { source, plan, inventory, rounders, codebooks, calibration })
    }

    /// Makes the matrix of an index of the plan: the bytes of a [`Part`].
    ///
    /// # Errors
    /// When there is no such matrix, or it cannot be read or rounded; the message names it.
    pub fn make(&self, index: usize) -> Result<Vec<u8>, Error> {
        let (Some(matrix), Some(layer)) = (self.inventory.matrices.get(index), self.plan.layers.get(index))
        else {
            return Err(bad(format!("the plan has {} matrices, got {index}", self.plan.layers.len())));
        };
        let mut rounds = Rounds {
            source: &self.source,
            plan: &self.plan,
            progress: &Quiet,
            rounders: &self.rounders,
            codebooks: &self.codebooks,
            moments: None,
        };
        if let Some(calibration) = &self.calibration {
            rounds.calibrated(calibration, matrix.id)?;
        }
        let made = rounds.make(matrix.id, layer, None)?;
        let mut tensors = Vec::new();
        made.tensors(matrix.id, layer, |name, bytes| {
            tensors.push((name, bytes.to_vec()));
            Ok(())
        })?;
        let source = digest(&self.source, matrix.id)?;
        Ok(Part { index, relative_error: made.report.relative_error, source, tensors }.to_bytes())
    }
}

/// A matrix that was made elsewhere.
#[derive(Debug, PartialEq)]
pub struct Part {
    /// Its place in the plan.
    pub index: usize,
    /// Measured `|W - W'|^2 / |W|^2`.
    pub relative_error: f64,
    /// Hash of the numbers that it was made of.
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
    hasher.update(&f32_bytes(&source.bias(id)?.unwrap_or_default()));
    hasher.update(&f32_bytes(&source.columns(id)?.unwrap_or_default()));
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
        let damaged = || bad(format!("matrix {index} came back damaged from its worker"));
        let (sum, rest) = bytes.split_at_checked(SUM).ok_or_else(damaged)?;
        if blake3::hash(rest).as_bytes() != sum {
            return Err(damaged());
        }
        let (len, rest) = rest.split_first_chunk::<LEN>().ok_or_else(damaged)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| damaged())?;
        let (head, mut rest) = rest.split_at_checked(len).ok_or_else(damaged)?;
        let head: Head = serde_json::from_slice(head).map_err(|_| damaged())?;
        if head.index != index {
            return Err(bad(format!("asked for matrix {index}, got {}", head.index)));
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
