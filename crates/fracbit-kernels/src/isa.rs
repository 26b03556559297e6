//! Instruction sets and the one environment variable that lowers them.

use std::{fmt, str::FromStr};

/// An instruction set for which microkernels exist, from the least to the most capable of each
/// architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust: the reference.
    Scalar,
    /// AVX2.
    Avx2,
    /// That and AVX-VNNI (Alder Lake and later processors of desktops and laptops, which have no
    /// AVX-512).
    AvxVnni,
    /// AVX-512 F, BW, VL, VNNI, VBMI and VBMI2 together (Ice Lake, Zen 4 and later).
    Avx512,
    /// That and AMX for bytes (Sapphire Rapids and later), on Linux.
    Amx,
    /// NEON, which every aarch64 processor has.
    Neon,
    /// NEON with the dot product of bytes, `sdot` (Armv8.2 and later: Cortex-A55, A75, Neoverse
    /// N1).
    Dotprod,
    /// That and the matrix product of bytes, `smmla` (Armv8.6 and later: Cortex-A510, A710,
    /// Neoverse V1, N2).
    I8mm,
}

impl Isa {
    /// All of them, the reference first.
    pub const ALL: [Self; 8] = [
        Self::Scalar,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Amx,
        Self::Neon,
        Self::Dotprod,
        Self::I8mm,
    ];

    /// The name used in `FRACBIT_ISA` and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Neon => "neon",
            Self::Dotprod => "dotprod",
            Self::I8mm => "i8mm",
        }
    }

    /// The most that the user allows: the value of `FRACBIT_ISA`, or `None` when it is unset or
    /// empty. It can lower what the machine offers and never raise it, because a backend installs
    /// only what it has detected.
    ///
    /// # Errors
    /// When the variable is set to anything but the name of an instruction set.
    pub fn cap() -> Result<Option<Self>, IsaError> {
        #[expect(clippy::disallowed_methods, reason = "the one reader of FRACBIT_ISA")]
        match std::env::var("FRACBIT_ISA") {
            // As in a shell script that sets it to nothing.
            Ok(text) if text.is_empty() => Ok(None),
            Ok(text) => text.parse().map(Some),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(text)) => Err(IsaError(text.to_string_lossy().into_owned())),
        }
    }
}

/// A name that is no instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "FRACBIT_ISA: instruction set should be scalar, avx2, avxvnni, avx512, amx, neon, dotprod or i8mm, got `{0}`"
)]
pub struct IsaError(pub String);

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(text: &str) -> Result<Self, IsaError> {
        Self::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| IsaError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_order_is_capability() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("AVX512".parse::<Isa>().is_err(), "names are lower case");
        assert!(
            Isa::Scalar < Isa::Avx2
                && Isa::Avx2 < Isa::AvxVnni
                && Isa::AvxVnni < Isa::Avx512
                && Isa::Avx512 < Isa::Amx
        );
        assert!(Isa::Neon < Isa::Dotprod && Isa::Dotprod < Isa::I8mm);
    }
}
