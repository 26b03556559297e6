//! What decides what steps read.

use crate::{Features, Learned, Schedule, learned};
use fracbit_base::Rate;
use serde::{Deserialize, Serialize};

/// One schedule for all prompts, or one for each.
#[derive(Clone, Debug, PartialEq)]
pub enum Scheduler {
    /// The same for all.
    Static(Schedule),
    /// What a network makes of a prompt.
    Learned(Box<Learned>),
}

impl From<Schedule> for Scheduler {
    fn from(schedule: Schedule) -> Self {
        Self::Static(schedule)
    }
}

impl From<Learned> for Scheduler {
    fn from(learned: Learned) -> Self {
        Self::Learned(Box::new(learned))
    }
}

impl Scheduler {
    /// The precision of a prompt.
    #[must_use]
    pub fn prefill(&self) -> Rate {
        match self {
            Self::Static(schedule) => schedule.prefill(),
            Self::Learned(learned) => learned.prefill(),
        }
    }

    /// The schedule of an answer; `read` gives what the cache of a block holds of its prompt.
    pub fn schedule(&self, read: impl FnOnce(usize) -> Features) -> Schedule {
        match self {
            Self::Static(schedule) => schedule.clone(),
            Self::Learned(learned) => learned.schedule(&read(learned.block())),
        }
    }

    /// Whether a token may get another precision in an answer than in a prompt.
    #[must_use]
    pub fn changes(&self) -> bool {
        let falls = |s: &Schedule| s.switches().iter().any(|switch| switch.precision != s.prefill());
        match self {
            Self::Static(schedule) => falls(schedule),
            Self::Learned(learned) => learned.schedules().any(|s| falls(&s)),
        }
    }
}

/// `{"prefill": 4, "decode": [[0, 4], [64, 2]]}`, or with `learned` in place of `decode`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    prefill: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode: Option<Vec<(usize, f64)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    learned: Option<learned::Document>,
}

impl Serialize for Scheduler {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Static(schedule) => schedule.serialize(to),
            Self::Learned(l) => {
                let (prefill, learned) = (l.prefill().bits(), Some(l.document()));
                Document { prefill, decode: None, learned }.serialize(to)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Scheduler {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let Document { prefill, decode, learned } = Document::deserialize(from)?;
        match (decode, learned) {
            (Some(decode), None) => Ok(Schedule::of_bits(prefill, decode).map_err(D::Error::custom)?.into()),
            (None, Some(learned)) => {
                let prefill = Rate::from_bits(prefill).map_err(D::Error::custom)?;
                Ok(Learned::of_document(prefill, learned).map_err(D::Error::custom)?.into())
            }
            _ => Err(D::Error::custom("schedule: should have one of `decode` and `learned`")),
        }
    }
}
