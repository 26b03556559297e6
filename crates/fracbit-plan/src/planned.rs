//! What a plan says of one matrix and of the cache.

use crate::{
    Error,
    bands::parse_name,
    inventory::Matrix,
    storage::{Module, Storage, is_zero},
};
use fracbit_base::Shape;
use fracbit_format::Grouping;
use fracbit_model::{KvType, LinearId};
use serde::{Deserialize, Serialize};

/// One matrix of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedLayer {
    /// Tensor name.
    pub name: String,
    /// Scheme name or `f16`.
    pub scheme: Storage,
    /// Payload bits per weight.
    pub bits: f64,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Input columns per scale; 0, or absent: one scale per row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: usize,
    /// Stored bytes, scales included.
    pub bytes: u64,
    /// Sensitivity: loss per unit of relative squared error.
    pub sensitivity: f64,
    /// Share of the predicted loss.
    pub predicted_loss: f64,
}

impl PlannedLayer {
    /// Which weights share a scale.
    #[must_use]
    pub const fn grouping(&self) -> Grouping {
        Grouping::from_number(self.group)
    }

    /// How it is stored.
    #[must_use]
    pub const fn module(&self) -> Module {
        Module { scheme: self.scheme, group: self.group }
    }

    /// The matrix that this is, or is a band of.
    #[must_use]
    pub fn id(&self) -> Option<LinearId> {
        parse_name(&self.name).map(|(id, _)| id)
    }

    /// Which band of rows of its matrix this is, if not the whole.
    #[must_use]
    pub fn band(&self) -> Option<usize> {
        parse_name(&self.name)?.1
    }
}

/// A matrix of a plan, whether it is one layer of it or one for each band of its rows.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedMatrix {
    /// Tensor name.
    pub name: String,
    /// Scheme, or those of the first and the last band.
    pub schemes: String,
    /// Mean payload bits per weight.
    pub bits: f64,
    /// Of all rows.
    pub shape: Shape,
    /// Stored bytes, scales included.
    pub bytes: u64,
    /// Share of the predicted loss.
    pub predicted_loss: f64,
}

impl PlannedMatrix {
    /// The layers of one matrix as one; `None` for none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    pub fn of(parts: &[PlannedLayer]) -> Option<Self> {
        let (first, last) = (parts.first()?, parts.last()?);
        let rows = parts.iter().map(|l| l.rows).sum();
        let schemes = match parts {
            [one] => one.scheme.to_string(),
            _ => format!("{} to {}", first.scheme, last.scheme),
        };
        Some(Self {
            name: first.id().map_or_else(|| first.name.clone(), |id| id.to_string()),
            schemes,
            bits: parts.iter().map(|l| l.bits * l.rows as f64).sum::<f64>() / rows as f64,
            shape: Shape::new(rows, first.cols),
            bytes: parts.iter().map(|l| l.bytes).sum(),
            predicted_loss: parts.iter().map(|l| l.predicted_loss).sum(),
        })
    }
}

pub(crate) fn planned(
    matrix: &Matrix,
    storage: Storage,
    grouping: Grouping,
    a: f64,
) -> Result<PlannedLayer, Error> {
    Ok(PlannedLayer {
        name: matrix.name.clone(),
        scheme: storage,
        bits: storage.bits(),
        rows: matrix.shape.rows,
        cols: matrix.shape.cols,
        group: grouping.number(),
        bytes: storage.bytes(matrix.shape, grouping).0,
        sensitivity: a,
        predicted_loss: a * storage.error()?,
    })
}

/// What a cache costs and loses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedCache {
    /// Its element type.
    pub kv: KvType,
    /// Tokens of a sequence.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Its bytes when it is full.
    pub bytes: u64,
    /// What it loses beside a cache of 16 bits, measured on the unquantized model, nats per token.
    pub loss: f64,
}
