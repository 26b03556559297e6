//! The processes that make parts of a [`Job`].

use crate::{
    Calibration,
    calibrate::collect::Collecting,
    deal::{Job, Part, RoundJob, Work, bad, digest},
    groups,
    matrices::Rounds,
    smoothing,
};
use fracbit_base::Scheme;
use fracbit_format::Codebook;
use fracbit_load::{Error, Opened, Quiet};
use fracbit_model::WeightSource;
use fracbit_plan::{Plan, plan::Inventory};
use fracbit_quant::{Effort, Rounders};
use std::{collections::BTreeMap, path::Path, sync::Arc};

/// A process that makes parts of a job.
#[derive(Debug)]
pub struct Worker(Does);

#[derive(Debug)]
enum Does {
    Round(Box<Rounding>),
    Collect(Box<Collecting>),
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
        Ok(Self(match &job.work {
            Work::Round(work) => Does::Round(Box::new(Rounding::new(&job.model, work)?)),
            Work::Collect(work) => Does::Collect(Box::new(Collecting::new(&job.model, work)?)),
        }))
    }

    /// Makes the part of an index: the bytes of a [`Part`], and what the part one
    /// [`stride`](Job::stride) behind it needs to be given as `before`, to go on from there; empty
    /// where there is none, and where it was lost.
    ///
    /// # Errors
    /// When there is no such part, or it cannot be made; the message says which.
    pub fn make(&self, index: usize, before: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Error> {
        match &self.0 {
            Does::Round(rounding) => Ok((rounding.make(index)?, Vec::new())),
            Does::Collect(collecting) => collecting.make(index, before),
        }
    }
}

/// A process that rounds matrices of a plan.
#[derive(Debug)]
struct Rounding {
    source: WeightSource,
    plan: Plan,
    inventory: Inventory,
    rounders: Rounders,
    codebooks: BTreeMap<Scheme, Codebook>,
    calibration: Option<Arc<Calibration>>,
}

impl Rounding {
    /// Opens what the job names.
    fn new(model: &Path, job: &RoundJob) -> Result<Self, Error> {
        let effort: Effort = job.effort.parse().map_err(|e| bad(format!("effort: {e}")))?;
        let opened = Opened::new(model)?;
        let calibration = job.calibration.as_ref().map(|(dir, digest)| {
            let calibration = Calibration::open(dir)?;
            if calibration.digest() == digest {
                return Ok(calibration);
            }
            Err(bad(format!("`{}` is another calibration on this machine", dir.display())))
        });
        let calibration = calibration.transpose()?;
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
    fn make(&self, index: usize) -> Result<Vec<u8>, Error> {
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
