//! How one matrix is stored.

use crate::Error;
use fracbit_base::{Bytes, Code, Rate, Scheme, Shape};
use fracbit_format::{Grouping, SchemeSpec, TILE_COLS};
use fracbit_model::RotationMode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
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

    /// What is read of it at `rate` bits per weight: planes of a nested scheme, all of any other.
    #[must_use]
    pub fn at(self, rate: Rate) -> Self {
        match self {
            Self::Packed(scheme) => Self::Packed(scheme.at(rate)),
            Self::F16 => Self::F16,
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

/// Bytes of stored codebooks: 16-bit entries and an f32 step each.
pub fn codebook_bytes(schemes: impl IntoIterator<Item = Scheme>) -> u64 {
    schemes
        .into_iter()
        .map(|scheme| fracbit_quant::codebook(scheme).map_or(0, |book| 2 * book.entries().len() as u64 + 4))
        .sum()
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

/// Columns that share a scale when nothing is rotated (Q-Palette, G.2.4).
pub const UNROTATED_GROUP: usize = 64;

/// How scales are grouped under a rotation, unless a plan says otherwise.
#[must_use]
pub fn grouping(rotation: RotationMode, scheme: Scheme) -> Grouping {
    let spec = SchemeSpec::of(scheme);
    match spec.grouping {
        Grouping::Row if rotation == RotationMode::None && spec.second_level.is_none() => {
            Grouping::Columns(UNROTATED_GROUP)
        }
        own => own,
    }
}

/// How one matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Module {
    /// A scheme name or `f16`.
    pub scheme: Storage,
    /// Input columns per scale; 0, or absent: one scale per row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(crate) fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Module {
    /// Which weights share a scale.
    #[must_use]
    pub const fn grouping(self) -> Grouping {
        Grouping::from_number(self.group)
    }

    /// The rule that the module breaks.
    pub fn broken(self) -> Option<String> {
        if !self.group.is_multiple_of(TILE_COLS) {
            return Some(format!("group should be 0 or a multiple of {TILE_COLS}, got {}", self.group));
        }
        let why = match self.scheme {
            Storage::F16 => "f16 has no scales".to_owned(),
            Storage::Packed(scheme) if SchemeSpec::of(scheme).second_level.is_some() => {
                format!("{scheme} has a scale for each row")
            }
            Storage::Packed(_) => return None,
        };
        (self.group > 0).then(|| format!("group should be absent, for {why}, got {}", self.group))
    }

    /// The scheme, where version 1 of the format meant other weights by it.
    pub fn rehashed(self) -> Option<Scheme> {
        let Storage::Packed(scheme) = self.scheme else { return None };
        (scheme.code() == Some(Code::Fast)).then_some(scheme)
    }
}

/// Before version 3 of a document one number said for all its matrices how columns are grouped:
/// moves it to each of `entries`, a map or a list, that has a scheme.
///
/// # Errors
/// The rule that is broken where the number is missing, or stands where the version has none.
pub fn spread_group(document: &mut Value, entries: &str, of_each: bool) -> Result<(), String> {
    let Some(fields) = document.as_object_mut() else { return Ok(()) }; // refused where it is parsed
    let group = fields.remove("group");
    if of_each {
        let rule = |group| format!("group should stand at each of `{entries}`, got {group} for all of them");
        return group.map_or(Ok(()), |group| Err(rule(group)));
    }
    let group = group.ok_or("missing field `group`")?;
    let spread = |entry: &mut Value| -> Result<(), String> {
        let Some(entry) = entry.as_object_mut() else { return Ok(()) };
        if entry.contains_key("group") {
            return Err(format!("group should stand once in this version, got one in `{entries}` as well"));
        }
        if entry.get("scheme").is_some_and(|scheme| scheme != "f16") {
            entry.insert("group".to_owned(), group.clone());
        }
        Ok(())
    };
    match fields.get_mut(entries) {
        Some(Value::Object(all)) => all.values_mut().try_for_each(spread),
        Some(Value::Array(all)) => all.iter_mut().try_for_each(spread),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_format::Index;

    /// Equation 1 of CodeGEMM: codebooks and scales in 16 bits beside the codes. Here a matrix also
    /// has its gain and the codebooks their step, 32 bits each.
    #[test]
    fn additive_codebooks_are_counted_as_in_the_paper() {
        for (rows, cols) in [(4096, 4096), (4096, 14336), (576, 1536)] {
            for scheme in Scheme::all() {
                let index = fracbit_quant::codebook(scheme).and_then(|book| book.additive());
                let Some(Index { count, weights, bits }) = index else { continue };
                let (m, v, b) = (count as u64, weights as u64, u64::from(bits));
                for (g, grouping) in [(cols, Grouping::Row), (128, Grouping::Columns(128))] {
                    if cols % g != 0 {
                        continue;
                    }
                    let bits = 16 * m * (1 << b) * v
                        + b * m * (rows * cols) as u64 / v
                        + 16 * (rows * (cols / g)) as u64;
                    let stored = Storage::Packed(scheme).bytes(Shape::new(rows, cols), grouping).0;
                    assert_eq!(
                        8 * (stored + codebook_bytes([scheme])),
                        bits + 64,
                        "{scheme} {rows}x{cols} {g}"
                    );
                }
            }
        }
        // The paper's example (v, m, b, g) = (4, 1, 8, row): 2 bits and a little.
        let m1v4: Scheme = "aq-m1v4".parse().expect("a scheme");
        let stored = Storage::Packed(m1v4).bytes(Shape::new(4096, 4096), Grouping::Row).0;
        let bits = 8.0 * (stored + codebook_bytes([m1v4])) as f64 / (4096.0 * 4096.0);
        assert!((2.0048..2.0050).contains(&bits), "{bits}");
    }
}
