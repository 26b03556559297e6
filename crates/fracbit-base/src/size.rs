//! Sizes in bytes as people write them.

use std::{fmt, iter::Sum, ops::Add, str::FromStr};

/// A size in bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("size: expected a number with a unit such as 900MB, 4GB or 1.5GiB, got `{0}`")]
pub struct SizeError(pub String);

const UNITS: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let lower = text.trim().to_ascii_lowercase();
        let bad = || SizeError(text.to_owned());
        let (number, factor) = UNITS
            .iter()
            .find_map(|&(unit, factor)| lower.strip_suffix(unit).map(|n| (n, factor)))
            .unwrap_or((lower.as_str(), 1.0));
        let value: f64 = number.trim().parse().map_err(|_| bad())?;
        let bytes = value * factor;
        if !(0.0..=9.0e18).contains(&bytes) {
            return Err(bad());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked above")]
        Ok(Self(bytes.round() as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "three digits are printed")]
        let value = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} B", self.0),
            1_000..1_000_000 => write!(f, "{:.1} kB", value / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.2} MB", value / 1e6),
            _ => write!(f, "{:.2} GB", value / 1e9),
        }
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("900MB", 900_000_000),
            ("4 gb", 4_000_000_000),
            ("1.5GiB", 1_610_612_736),
            ("12", 12),
            ("7b", 7),
        ] {
            assert_eq!(text.parse::<Bytes>(), Ok(Bytes(bytes)), "{text}");
        }
        for bad in ["", "MB", "-1MB", "1e40GB", "4 apples", "nan"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn prints_with_a_unit() {
        assert_eq!(Bytes(999).to_string(), "999 B");
        assert_eq!(Bytes(1_500).to_string(), "1.5 kB");
        assert_eq!(Bytes(2_345_678).to_string(), "2.35 MB");
        assert_eq!(Bytes(4_000_000_000).to_string(), "4.00 GB");
    }
}
