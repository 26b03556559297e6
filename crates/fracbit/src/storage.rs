//! How one matrix is stored.

use crate::Error;
use fracbit_base::{Bytes, Scheme, Shape};
use fracbit_format::{Grouping, SchemeSpec};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Storage {
    /// Packed codes of a scheme.
    Packed(Scheme),
    /// Half precision, 16 bits per weight.
    F16,
}

impl Storage {
    /// Payload bits per weight.
    #[must_use]
    pub fn bits(self) -> f64 {
        match self {
            Self::Packed(scheme) => scheme.rate().bits(),
            Self::F16 => 16.0,
        }
    }

    /// Bytes of a matrix of `shape`, scales included.
    #[must_use]
    pub fn bytes(self, shape: Shape, grouping: Grouping) -> Bytes {
        match self {
            Self::Packed(scheme) => SchemeSpec::of(scheme).bytes(shape, grouping),
            Self::F16 => Bytes(2 * shape.len() as u64),
        }
    }

    /// Relative squared error on Gaussian weights: the palette's measured table, 0 for half
    /// precision.
    ///
    /// # Errors
    /// When the palette has no measured error for the scheme.
    pub fn error(self) -> Result<f64, Error> {
        match self {
            Self::Packed(scheme) => fracbit_codebook::nmse(scheme).ok_or(Error::NoErrorEntry { scheme }),
            Self::F16 => Ok(0.0),
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed(scheme) => scheme.fmt(f),
            Self::F16 => f.pad("f16"),
        }
    }
}

impl FromStr for Storage {
    type Err = fracbit_base::SchemeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "f16" { Ok(Self::F16) } else { text.parse().map(Self::Packed) }
    }
}

impl Serialize for Storage {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Storage {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}
