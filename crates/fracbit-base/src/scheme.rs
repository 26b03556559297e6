//! Names of quantization schemes.
//!
//! A scheme is a family, a rate and, for trellis families, a code. The palette follows Q-Palette
//! (Table 1): scalar `nuq`, 2-D vector `vq`, trellis `tcq` and half-trellis `half-tcq`. Names are part of
//! the file format and of the command line: `nuq-4`, `vq-2.5`, `tcq-3`, `tcq-2.25`, `tcq-hyb-3`, `half-tcq-3.25`. A trellis
//! has every quarter of a bit with the default code (with `fast` up to 2 bits); half-trellis is the papers' way to such rates. Two families
//! want a scale for every small group of columns: plain integers, `int-4`, and group-wise codebooks, `gnuq-2`.

use crate::Rate;
use std::{fmt, str::FromStr};

/// How a trellis state becomes weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// One weight per step from an int8 table indexed by a 16-bit hash of the state: least error; the default.
    Fine,
    /// The widest step the rate bears (2 or 4 weights): less work per weight, a little more error.
    Fast,
    /// The papers' hash and 2-D half-precision tables, kept as the parity reference.
    Hyb,
}

impl Code {
    /// All codes, the default first.
    pub const ALL: [Self; 3] = [Self::Fine, Self::Fast, Self::Hyb];

    /// The name used in scheme names and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Fast => "fast",
            Self::Hyb => "hyb",
        }
    }
}

/// The quantizer families of the palette.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Non-uniform scalar quantizer.
    Nuq,
    /// Two-dimensional vector quantizer.
    Vq,
    /// Trellis-coded quantizer.
    Tcq,
    /// Two trellis quantizers half a bit apart, one for each half of the input dimension.
    HalfTcq,
    /// Integers times the scale of their group: `Q4_0` and `Q8_0` of llama.cpp in bytes per block.
    Int,
    /// Group-wise non-uniform quantizer: each group takes the best of a few small codebooks.
    Gnuq,
}

impl Family {
    /// The name used in scheme names and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nuq => "nuq",
            Self::Vq => "vq",
            Self::Tcq => "tcq",
            Self::HalfTcq => "half-tcq",
            Self::Int => "int",
            Self::Gnuq => "gnuq",
        }
    }
}

/// One entry of the palette: family, code and rate. Only valid combinations can be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scheme {
    quarters: u8,
    family: Family,
    code: Option<Code>,
}

/// A scheme name or rate that the palette does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// The text is no scheme name.
    #[error(
        "scheme: expected a name such as nuq-4, vq-2.5, tcq-2.25, tcq-fast-2 or half-tcq-3.25, got `{0}`"
    )]
    Name(String),
    /// The family does not come at this rate.
    #[error("scheme: {family} comes at {range} bits, got {bits}")]
    Rate {
        /// Family name, and the trellis code where rates depend on it.
        family: &'static str,
        /// The rates that exist.
        range: &'static str,
        /// The rate asked for.
        bits: String,
    },
}

impl Scheme {
    /// A scheme of the given family and rate in quarter bits; `code` is ignored by all but the trellis families.
    ///
    /// # Errors
    /// When the family has no such rate.
    pub fn new(family: Family, code: Code, quarters: u8) -> Result<Self, SchemeError> {
        let (ok, range) = match family {
            Family::Nuq => ((8..=32).contains(&quarters) && quarters.is_multiple_of(4), "2, 3, ... 8"),
            Family::Vq => ((6..=24).contains(&quarters) && quarters.is_multiple_of(2), "1.5, 2, ... 6"),
            Family::Tcq => {
                let some = (4..=20).contains(&quarters);
                let half = quarters.is_multiple_of(2);
                match code {
                    Code::Fine => (some, "1, 1.25, ... 5"),
                    Code::Fast => (some && (half || quarters <= 8), "1, 1.25, ... 2, 2.5, ... 5"),
                    Code::Hyb => (some && half, "1, 1.5, ... 5"),
                }
            }
            Family::HalfTcq => {
                ((5..=19).contains(&quarters) && !quarters.is_multiple_of(2), "1.25, 1.75, ... 4.75")
            }
            Family::Int => (matches!(quarters, 16 | 32), "4, 8"),
            Family::Gnuq => (matches!(quarters, 8 | 12 | 16), "2, 3, 4"),
        };
        if !ok {
            let bits = (f64::from(quarters) / 4.0).to_string();
            let family = match (family, code) {
                (Family::Tcq, Code::Fast) => "tcq-fast",
                (Family::Tcq, Code::Hyb) => "tcq-hyb",
                _ => family.name(),
            };
            return Err(SchemeError::Rate { family, range, bits });
        }
        let code = matches!(family, Family::Tcq | Family::HalfTcq).then_some(code);
        Ok(Self { quarters, family, code })
    }

    /// The family.
    #[must_use]
    pub const fn family(self) -> Family {
        self.family
    }

    /// Columns that share a scale unless the plan says otherwise; `None` for a family made for one scale a row.
    #[must_use]
    pub const fn group(self) -> Option<usize> {
        match self.family {
            Family::Int | Family::Gnuq => Some(32),
            _ => None,
        }
    }

    /// The trellis code; `None` for scalar and vector schemes.
    #[must_use]
    pub const fn code(self) -> Option<Code> {
        self.code
    }

    /// Payload bits per weight, without scales.
    #[must_use]
    pub const fn rate(self) -> Rate {
        Rate::quarter_bits(self.quarters as u32)
    }

    /// Payload rate in quarters of a bit.
    #[must_use]
    pub const fn quarters(self) -> u8 {
        self.quarters
    }

    /// The two trellis schemes of a half-TCQ scheme, the lower rate first (it codes the first half of the
    /// input dimension, as in the papers); the scheme itself twice for every other family.
    #[must_use]
    pub const fn halves(self) -> [Self; 2] {
        match self.family {
            Family::HalfTcq => [
                Self { quarters: self.quarters - 1, family: Family::Tcq, code: self.code },
                Self { quarters: self.quarters + 1, family: Family::Tcq, code: self.code },
            ],
            _ => [self, self],
        }
    }

    /// Every scheme there is, by family and rate, with all trellis codes.
    pub fn all() -> impl Iterator<Item = Self> {
        let families = [Family::Nuq, Family::Vq, Family::Tcq, Family::HalfTcq, Family::Int, Family::Gnuq];
        families.into_iter().flat_map(|family| {
            let codes: &[Code] = match family {
                Family::Tcq | Family::HalfTcq => &Code::ALL,
                _ => &Code::ALL[..1],
            };
            codes.iter().flat_map(move |&code| (4..=32).filter_map(move |q| Self::new(family, code, q).ok()))
        })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.family.name())?;
        match self.code {
            None | Some(Code::Fine) => {}
            Some(code) => write!(f, "-{}", code.name())?,
        }
        write!(f, "-{}", f64::from(self.quarters) / 4.0)
    }
}

impl FromStr for Scheme {
    type Err = SchemeError;

    fn from_str(text: &str) -> Result<Self, SchemeError> {
        let bad = || SchemeError::Name(text.to_owned());
        let (head, rate) = text.rsplit_once('-').ok_or_else(bad)?;
        let (family, code) = match head {
            "nuq" => (Family::Nuq, Code::Fine),
            "vq" => (Family::Vq, Code::Fine),
            "int" => (Family::Int, Code::Fine),
            "gnuq" => (Family::Gnuq, Code::Fine),
            _ => {
                let (family, rest) = if let Some(rest) = head.strip_prefix("half-tcq") {
                    (Family::HalfTcq, rest)
                } else {
                    (Family::Tcq, head.strip_prefix("tcq").ok_or_else(bad)?)
                };
                let code = match rest {
                    "" | "-fine" => Code::Fine,
                    "-fast" => Code::Fast,
                    "-hyb" => Code::Hyb,
                    _ => return Err(bad()),
                };
                (family, code)
            }
        };
        let quarters = rate.parse::<f64>().map_err(|_| bad())? * 4.0;
        if quarters.fract() != 0.0 || !(0.0..=255.0).contains(&quarters) {
            return Err(bad());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number in 0..=255"
        )]
        Self::new(family, code, quarters as u8)
    }
}

impl serde::Serialize for Scheme {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Scheme {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The set of schemes that an allocation may choose from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Palette {
    /// Trellis, half-trellis where the code has no trellis of the rate, then scalar 6 to 8 bits for layers that deserve more than 5.
    #[default]
    Tcq,
    /// Vector quantizers only.
    Vq,
    /// Scalar quantizers only.
    Nuq,
    /// Everything made for one scale a row, with the default trellis code.
    All,
}

impl Palette {
    /// The schemes of this palette with trellis code `code`.
    pub fn schemes(self, code: Code) -> Vec<Scheme> {
        Scheme::all()
            .filter(|s| s.code().is_none_or(|c| c == code))
            .filter(|s| match self {
                Self::Tcq => match s.family() {
                    Family::Tcq => true,
                    Family::HalfTcq => Scheme::new(Family::Tcq, code, s.quarters()).is_err(),
                    Family::Nuq => s.quarters() >= 24,
                    _ => false,
                },
                Self::Vq => s.family() == Family::Vq,
                Self::Nuq => s.family() == Family::Nuq,
                Self::All => s.group().is_none(),
            })
            .collect()
    }

    /// The name used on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcq => "tcq",
            Self::Vq => "vq",
            Self::Nuq => "nuq",
            Self::All => "all",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_round_trips() {
        let all: Vec<_> = Scheme::all().collect();
        assert_eq!(all.len(), 7 + 10 + 17 + 11 + 9 + 3 * 8 + 2 + 3);
        for scheme in all {
            assert_eq!(scheme.to_string().parse(), Ok(scheme), "{scheme}");
        }
    }

    #[test]
    fn refuses_what_the_palette_lacks() {
        for bad in [
            "",
            "tcq",
            "tcq-",
            "tcq-x",
            "nuq-4.5",
            "vq-1",
            "tcq-5.5",
            "half-tcq-3",
            "tcq-hyb-3.25",
            "tcq-3.125",
            "tcq-nope-3",
            "nuq--4",
            "int-3",
            "gnuq-5",
            "nuq-1e9",
        ] {
            assert!(bad.parse::<Scheme>().is_err(), "{bad} was accepted");
        }
        let text = "tcq-5.5".parse::<Scheme>().unwrap_err().to_string();
        assert!(text.contains("1, 1.25, ... 5"), "{text}");
        let text = "tcq-hyb-2.25".parse::<Scheme>().unwrap_err().to_string();
        assert!(text.contains("tcq-hyb comes at 1, 1.5, ... 5"), "{text}");
    }

    #[test]
    fn halves_average_to_the_rate() {
        for scheme in Scheme::all() {
            let [lo, hi] = scheme.halves();
            assert_eq!(u32::from(lo.quarters()) + u32::from(hi.quarters()), 2 * u32::from(scheme.quarters()));
        }
    }
}
