//! How thoroughly to search.

use crate::{cells::Pruning, classes::Classes, rows::RowPruning};
use fracbit_base::{Code, Scheme};
use std::{fmt, str::FromStr};

/// How thoroughly codes are searched for. Every effort gives the same bytes on every machine and
/// thread count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effort {
    /// `fine`: one survivor per class below 3 bits, the pruned search with two cells of branches
    /// above; `fast` and `hyb`: few rows of branches. 3 to 7 % more error.
    Fast,
    /// The pruned searches with two or three cells, or more rows: up to 2.5 % more error.
    Balanced,
    /// Every branch, 16-bit costs, two passes.
    #[default]
    Exact,
}

impl Effort {
    /// All, the fastest first.
    pub const ALL: [Self; 3] = [Self::Fast, Self::Balanced, Self::Exact];

    /// The name in commands and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Balanced => "balanced",
            Self::Exact => "exact",
        }
    }

    /// The classes of the search by class where it is the better one, below 3 bits; `None`
    /// elsewhere.
    pub(crate) fn classes(self, scheme: Scheme) -> Option<Classes> {
        // With few new bits a step by class is cheap against one of the search back from the seam.
        let (bits, back, reach) = match scheme.quarters() {
            ..=7 => (11, 36, 40),
            8 => (10, 150, 48),
            9 => (10, 172, 48),
            10 => (10, 190, 48),
            11 => (10, 180, 48),
            _ => return None,
        };
        let pruning = Pruning { falls: 1, thirds: 1, always: 3, reach: 0, part: 0 };
        (self == Self::Fast).then_some(Classes { bits, back, reach, units: 4.0, pruning })
    }

    /// The rows of the search for codes of several weights a step; `None` for the exact one.
    pub(crate) fn rows(self, scheme: Scheme) -> Option<RowPruning> {
        let (fast, balanced) = match (scheme.code() == Some(Code::Hyb), scheme.quarters()) {
            (true, ..=4) => (3, 4),
            (true, 5..=8) => (4, 5),
            (true, 9..=12) => (4, 6),
            (true, 13..=16) => (5, 6),
            (true, _) => (5, 7),
            // Four weights a step.
            (false, ..=4) => (7, 10),
            (false, 5) => (8, 12),
            (false, 6) => (8, 14),
            (false, 7) => (10, 17),
            (false, 8) => (13, 20),
            // Two.
            (false, 10 | 18) => (5, 6),
            (false, 12 | 16) => (4, 6),
            (false, 14) => (5, 7),
            (false, _) => (6, 7),
        };
        match self {
            Self::Fast => {
                Some(RowPruning { count: fast, reach: 32, part: if scheme.quarters() <= 4 { 2 } else { 4 } })
            }
            Self::Balanced => Some(RowPruning {
                count: balanced,
                reach: 64,
                part: if scheme.quarters() <= 8 { 2 } else { 1 },
            }),
            Self::Exact => None,
        }
    }

    /// What the pruned search leaves out; `None` for the exact one.
    pub(crate) fn pruning(self, scheme: Scheme) -> Option<Pruning> {
        match self {
            Self::Fast => {
                // Up to 3.5 bits, where most overlaps are looked at, a third cell only where more
                // bits come in than leave.
                let (thirds, reach) = if scheme.quarters() <= 14 { (usize::MAX, 28) } else { (8, 32) };
                Some(Pruning { falls: 2, thirds, always: u32::MAX, reach, part: 150 })
            }
            Self::Balanced => {
                // At 1 bit a longer reach is a larger part of the circle.
                let reach = match scheme.quarters() {
                    ..=4 => 24,
                    5 => 36,
                    _ => 64,
                };
                let thirds = if scheme.quarters() == 7 { 1 } else { 2 };
                Some(Pruning { falls: 1, thirds, always: 3, reach, part: 0 })
            }
            Self::Exact => None,
        }
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Effort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|effort| effort.name() == text);
        found.ok_or_else(|| format!("should be fast, balanced or exact, got `{text}`"))
    }
}
