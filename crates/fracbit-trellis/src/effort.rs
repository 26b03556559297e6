//! How thoroughly to search.

use crate::{cells::Pruning, classes::Classes};
use fracbit_base::Scheme;
use std::{fmt, str::FromStr};

/// How thoroughly codes are searched for. Every effort gives the same bytes on every machine and thread count.
///
/// The pruned searches are for the `fine` code; `fast` and `hyb` codes are searched exactly at every effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effort {
    /// One survivor per class up to 2 bits, the pruned search with two cells of branches above: 4 to 7 % more error.
    Fast,
    /// The pruned search with two or three cells: up to 2.5 % more error.
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

    /// The classes of the search by class where it is the better one, up to 2 bits; `None` elsewhere.
    pub(crate) fn classes(self, scheme: Scheme) -> Option<Classes> {
        // At 1 bit a step takes half the work and the seam loses more.
        let window = if scheme.quarters() <= 4 { 64 } else { 24 };
        let classes = Classes { bits: 11, wide: 13, window, reach: 20 };
        (self == Self::Fast && scheme.quarters() <= 8).then_some(classes)
    }

    /// What the pruned search leaves out; `None` for the exact one.
    pub(crate) fn pruning(self) -> Option<Pruning> {
        match self {
            Self::Fast => Some(Pruning { falls: 2, thirds: 8, always: u32::MAX, reach: 32 }),
            Self::Balanced => Some(Pruning { falls: 1, thirds: 2, always: 3, reach: 64 }),
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
