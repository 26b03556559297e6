//! How thoroughly to search.

use crate::cells::Pruning;
use std::{fmt, str::FromStr};

/// How thoroughly codes are searched for. Every effort gives the same bytes on every machine and thread count.
///
/// The pruned searches are for the `fine` code; `fast` and `hyb` codes are searched exactly at every effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effort {
    /// The pruned search with two cells of branches: 2 to 6 % more error.
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

    /// What the pruned search leaves out; `None` for the exact one.
    pub(crate) fn pruning(self) -> Option<Pruning> {
        match self {
            Self::Fast => Some(Pruning { thirds: 8, always: u32::MAX, reach: 64 }),
            Self::Balanced => Some(Pruning { thirds: 2, always: 3, reach: 64 }),
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
