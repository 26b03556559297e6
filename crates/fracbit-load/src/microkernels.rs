//! What this machine has for kernels, and which microkernel each scheme gets.

use crate::{Error, kernels};
use fracbit_base::Scheme;
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// The document of `fracbit inspect --machine --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Microkernels {
    /// Architecture, by Rust's name.
    pub architecture: String,
    /// Detected features that matter to kernels.
    pub features: Vec<String>,
    /// The instruction set of the microkernel of every scheme, `FRACBIT_ISA` applied; one of
    /// several components has the least of theirs.
    pub microkernels: BTreeMap<Scheme, String>,
}

/// Detects features and asks the dispatch table about every scheme's built-in codebook.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn microkernels() -> Result<Microkernels, Error> {
    let kernels = kernels()?;
    let of = |scheme: Scheme| {
        scheme.tables().filter_map(|table| fracbit_quant::codebook(table).map(|book| kernels.isa(book))).min()
    };
    #[cfg(target_arch = "x86_64")]
    let features = fracbit_kernels_x86::features();
    #[cfg(target_arch = "aarch64")]
    let features = fracbit_kernels_neon::features();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let features = Vec::new();
    Ok(Microkernels {
        architecture: std::env::consts::ARCH.to_owned(),
        features,
        microkernels: Scheme::all().filter_map(|s| Some((s, of(s)?.name().to_owned()))).collect(),
    })
}

impl fmt::Display for Microkernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.architecture, self.features.join(", "))?;
        let mut by_isa: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (scheme, isa) in &self.microkernels {
            by_isa.entry(isa).or_default().push(scheme.to_string());
        }
        by_isa.iter().try_for_each(|(isa, schemes)| writeln!(f, "  {isa:<10} {}", schemes.join(" ")))
    }
}
