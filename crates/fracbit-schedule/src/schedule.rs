//! What a step reads.

use fracbit_base::{Rate, RateError};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// What a step of a generation is, as far as a schedule may know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It runs the prompt.
    Prefill,
    /// It runs a token that was generated: the first is 0.
    Decode(usize),
}

/// From some token of an answer on, another precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// The first decode step that has it.
    pub from: usize,
    /// Most bits per weight.
    pub precision: Rate,
}

/// How many bits per weight each step of a generation reads at most: one precision for the prompt,
/// and precisions that never rise for the tokens of the answer (PMPD, arXiv 2410.13461, sections
/// 4.1 and 4.2).
///
/// As text `prefill=4,decode=4..3@16..2@64`: four bits, from the 16th decode step on three, from
/// the 64th on two; one number alone holds for all steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    prefill: Rate,
    decode: Vec<Switch>, // the first from step 0
}

/// A schedule that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// The text is no schedule.
    #[error("schedule: expected bits such as 3, or a text such as prefill=4,decode=4..2@64, got `{0}`")]
    Text(String),
    /// Bits are no precision.
    #[error(transparent)]
    Rate(#[from] RateError),
    /// The first precision of an answer has to hold from its first step on.
    #[error("schedule: the first precision of `decode` should hold from step 0 on, got {0}")]
    Start(usize),
    /// Switches should be in order.
    #[error("schedule: a switch at step {next} should come after the one at step {before}")]
    Order {
        /// The earlier one.
        before: usize,
        /// The later one.
        next: usize,
    },
    /// Precision should fall.
    #[error("schedule: precision should not rise while decoding, got {next} bits behind {before}")]
    Rises {
        /// Bits before.
        before: String,
        /// Bits behind.
        next: String,
    },
    /// The network of a learned schedule is none.
    #[error(
        "schedule: the network should have sizes above 0, as many finite parameters as these take, and one class for each of `falls`"
    )]
    Network,
    /// The network is for another model.
    #[error("schedule: it was learned for {want}, this model has {got}")]
    Model {
        /// What the network reads.
        want: String,
        /// What there is.
        got: String,
    },
}

impl Schedule {
    /// A schedule of these switches.
    ///
    /// # Errors
    /// When the first switch is not at step 0, they are not in order, or precision rises.
    pub fn new(prefill: Rate, decode: Vec<Switch>) -> Result<Self, ScheduleError> {
        match decode.first() {
            Some(Switch { from: 0, .. }) => {}
            first => return Err(ScheduleError::Start(first.map_or(usize::MAX, |s| s.from))),
        }
        for pair in decode.windows(2) {
            let [before, next] = [pair[0], pair[1]];
            if next.from <= before.from {
                return Err(ScheduleError::Order { before: before.from, next: next.from });
            }
            if next.precision > before.precision {
                let [before, next] = [before, next].map(|s| s.precision.bits().to_string());
                return Err(ScheduleError::Rises { before, next });
            }
        }
        Ok(Self { prefill, decode })
    }

    /// `high` bits in an answer until step `from`, then `low`, which should not be more; `None`:
    /// never.
    #[must_use]
    pub fn falling(prefill: Rate, [high, low]: [Rate; 2], from: Option<usize>) -> Self {
        let at = |from, precision| Switch { from, precision };
        let decode = match from {
            Some(0) => vec![at(0, low)],
            Some(from) if low < high => vec![at(0, high), at(from, low)],
            _ => vec![at(0, high)],
        };
        Self { prefill, decode }
    }

    /// The same precision everywhere.
    #[must_use]
    pub fn uniform(precision: Rate) -> Self {
        Self { prefill: precision, decode: vec![Switch { from: 0, precision }] }
    }

    /// The precision of a prompt.
    #[must_use]
    pub const fn prefill(&self) -> Rate {
        self.prefill
    }

    /// The precisions of an answer.
    #[must_use]
    pub fn switches(&self) -> &[Switch] {
        &self.decode
    }

    /// Most bits per weight that a step reads.
    #[must_use]
    pub fn precision(&self, phase: Phase) -> Rate {
        match phase {
            Phase::Prefill => self.prefill,
            Phase::Decode(step) => {
                let after = self.decode.partition_point(|s| s.from <= step);
                self.decode[after.max(1) - 1].precision
            }
        }
    }

    /// How many decode steps from `step` on have its precision; `None`: all.
    #[must_use]
    pub fn steps_alike(&self, step: usize) -> Option<usize> {
        self.decode.iter().find(|s| s.from > step).map(|s| s.from - step)
    }

    /// Mean of the bits that the first `steps` decode steps read at most; 0 of none.
    #[must_use]
    pub fn mean_bits(&self, steps: usize) -> f64 {
        self.mean(steps, Rate::bits)
    }

    /// Mean of what a precision is worth, over the first `steps` decode steps; 0 of none.
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    pub fn mean(&self, steps: usize, worth: impl Fn(Rate) -> f64) -> f64 {
        let ends = self.decode.iter().skip(1).map(|s| s.from).chain([steps]);
        let runs = self.decode.iter().zip(ends).map(|(s, end)| {
            let len = end.min(steps).saturating_sub(s.from);
            len as f64 * worth(s.precision)
        });
        runs.sum::<f64>() / (steps as f64).max(1.0)
    }
}

/// As it is parsed.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prefill={},decode={}", self.prefill.bits(), self.decode[0].precision.bits())?;
        self.decode[1..].iter().try_for_each(|s| write!(f, "..{}@{}", s.precision.bits(), s.from))
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let bad = || ScheduleError::Text(text.to_owned());
        let rate = |text: &str| {
            let bits = text.trim().parse().map_err(|_| bad())?;
            Rate::from_bits(bits).map_err(|_| bad())
        };
        if let Ok(rate) = rate(text) {
            return Ok(Self::uniform(rate));
        }
        let (prefill, decode) = text.trim().split_once(',').ok_or_else(bad)?;
        let prefill = rate(prefill.trim().strip_prefix("prefill=").ok_or_else(bad)?)?;
        let mut parts = decode.trim().strip_prefix("decode=").ok_or_else(bad)?.split("..");
        let first = Switch { from: 0, precision: rate(parts.next().unwrap_or_default())? };
        let rest = parts.map(|part| {
            let (bits, from) = part.split_once('@').ok_or_else(bad)?;
            let from = from.trim().parse().map_err(|_| bad())?;
            Ok::<_, ScheduleError>(Switch { from, precision: rate(bits)? })
        });
        Self::new(prefill, [Ok(first)].into_iter().chain(rest).collect::<Result<_, ScheduleError>>()?)
    }
}

/// `{"prefill": 4, "decode": [[0, 4], [64, 2]]}`: bits, and pairs of a step and the bits from there
/// on.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    prefill: f64,
    decode: Vec<(usize, f64)>,
}

impl Serialize for Schedule {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let decode = self.decode.iter().map(|s| (s.from, s.precision.bits())).collect();
        Document { prefill: self.prefill.bits(), decode }.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let Document { prefill, decode } = Document::deserialize(from)?;
        Self::of_bits(prefill, decode).map_err(D::Error::custom)
    }
}

impl Schedule {
    /// Of bits, and pairs of a step and the bits from there on.
    pub(crate) fn of_bits(prefill: f64, decode: Vec<(usize, f64)>) -> Result<Self, ScheduleError> {
        let switch = |(from, bits)| Ok(Switch { from, precision: Rate::from_bits(bits)? });
        Self::new(
            Rate::from_bits(prefill)?,
            decode.into_iter().map(switch).collect::<Result<_, ScheduleError>>()?,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts_and_documents_go_there_and_back() {
        for text in ["prefill=4,decode=4", "prefill=4,decode=4..2@64", "prefill=2.5,decode=4..3@1..2.25@1000"]
        {
            let schedule: Schedule = text.parse().unwrap();
            assert_eq!(schedule.to_string(), text);
            let json = serde_json::to_string(&schedule).unwrap();
            assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule, "{json}");
        }
        assert_eq!("3".parse::<Schedule>().unwrap().to_string(), "prefill=3,decode=3");
    }

    #[test]
    fn nonsense_is_refused_by_rule() {
        for (text, word) in [
            ("", "expected bits"),
            ("prefill=4", "expected bits"),
            ("decode=4,prefill=4", "expected bits"),
            ("prefill=4,decode=4..2", "expected bits"),
            ("prefill=4,decode=4..2@-1", "expected bits"),
            ("prefill=65,decode=4", "expected bits"),
            ("prefill=4,decode=4..2@0", "should come after"),
            ("prefill=4,decode=4..3@9..2@9", "should come after"),
            ("prefill=4,decode=2..3@9", "should not rise"),
        ] {
            let error = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        for json in [
            r#"{"prefill": 4, "decode": []}"#,
            r#"{"prefill": 4, "decode": [[1, 4]]}"#,
            r#"{"prefill": 4, "decode": [[0, 4]], "x": 1}"#,
            r#"{"prefill": -4, "decode": [[0, 4]]}"#,
        ] {
            assert!(serde_json::from_str::<Schedule>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn a_trace_has_the_precisions_of_its_phases() {
        let schedule: Schedule = "prefill=4,decode=3..2@2..1@5".parse().unwrap();
        let trace = [Phase::Prefill].into_iter().chain((0..7).map(Phase::Decode));
        let bits: Vec<f64> = trace.map(|phase| schedule.precision(phase).bits()).collect();
        assert_eq!(bits, [4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.0, 1.0]);
        let alike: Vec<_> = (0..6).map(|step| schedule.steps_alike(step)).collect();
        assert_eq!(alike, [Some(2), Some(1), Some(3), Some(2), Some(1), None]);
        assert!((schedule.mean_bits(7) - 14.0 / 7.0).abs() < 1e-12);
        assert!((schedule.mean_bits(1) - 3.0).abs() < 1e-12);
        assert_eq!(schedule.mean_bits(0), 0.0);
    }

    proptest! {
        #[test]
        fn lookup_is_the_last_switch_before(steps in prop::collection::btree_set(1usize..50, 0..6)) {
            let rate = |bits: usize| Rate::quarter_bits(u32::try_from(bits).unwrap());
            let mut switches = vec![Switch { from: 0, precision: rate(32) }];
            switches.extend(steps.iter().enumerate().map(|(i, &from)| Switch { from, precision: rate(31 - i) }));
            let schedule = Schedule::new(rate(32), switches.clone()).unwrap();
            let mut sum = 0.0;
            for step in 0..60 {
                let by_hand = switches.iter().rfind(|s| s.from <= step).unwrap().precision;
                prop_assert_eq!(schedule.precision(Phase::Decode(step)), by_hand);
                let run = (step..200).take_while(|&t| schedule.precision(Phase::Decode(t)) == by_hand).count();
                prop_assert_eq!(schedule.steps_alike(step).unwrap_or(200 - step), run);
                sum += by_hand.bits();
                prop_assert!((schedule.mean_bits(step + 1) * (step + 1) as f64 - sum).abs() < 1e-9);
            }
        }
    }
}
