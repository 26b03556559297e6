//! How thoroughly to search.

use crate::cells::Pruning;
use std::{fmt, str::FromStr};

/// How thoroughly codes are searched for. Every effort gives the same bytes on every machine and thread count.
///
/// The pruned searches are for the `fine` code; `fast` and `hyb` codes are searched exactly at every effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effort {
    /// The pruned search with two cells of branches: up to 6 % more error.
    Fast,
    /// The pruned search with three cells: up to 1 % more error, 2.5 % at 1.5 bits.
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

    /// What the pruned search leaves out; `None` for the exact one.
    pub(crate) fn pruning(self) -> Option<Pruning> {
        match self {
            Self::Fast => Some(Pruning { cells: 2, reach: 16 }),
            Self::Balanced => Some(Pruning { cells: 3, reach: 32 }),
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
