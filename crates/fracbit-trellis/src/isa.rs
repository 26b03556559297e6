//! Which vector instructions the search uses.

/// An instruction set for the search. All give identical bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust, the reference.
    Scalar,
    /// x86-64 with AVX2.
    Avx2,
    /// x86-64 with AVX-512 F and BW.
    Avx512,
    /// As `Avx512`, with VBMI and GFNI.
    Avx512Vbmi,
}

impl Isa {
    /// All instruction sets, the widest last.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Vbmi];

    /// The widest instruction set of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_supported()).unwrap_or(Self::Scalar)
    }

    /// Whether this machine can run it.
    #[must_use]
    pub fn is_supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vbmi => {
                Self::Avx512.is_supported()
                    && std::arch::is_x86_feature_detected!("avx512vbmi")
                    && std::arch::is_x86_feature_detected!("gfni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Vbmi => false,
        }
    }

    /// The name used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vbmi => "avx512-vbmi",
        }
    }
}
