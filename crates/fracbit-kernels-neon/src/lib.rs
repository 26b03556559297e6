#![doc = include_str!("../README.md")]
#![cfg_attr(
    target_arch = "aarch64",
    expect(
        unsafe_code,
        reason = "vector loads, and dot products written in assembly behind a proof that they exist"
    )
)]

use fracbit_kernels::{Isa, IsaError, Kernels};

#[cfg(target_arch = "aarch64")]
mod attend;
#[cfg(target_arch = "aarch64")]
mod dense;
#[cfg(target_arch = "aarch64")]
mod expand;
#[cfg(target_arch = "aarch64")]
mod groups;
#[cfg(target_arch = "aarch64")]
mod halves;
#[cfg(target_arch = "aarch64")]
mod many;
#[cfg(target_arch = "aarch64")]
mod microkernel;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod nested;
#[cfg(target_arch = "aarch64")]
mod one;
#[cfg(any(target_arch = "aarch64", test))]
mod pack;
#[cfg(target_arch = "aarch64")]
mod progressive;
#[cfg(target_arch = "aarch64")]
mod shims;
#[cfg(target_arch = "aarch64")]
mod tables;
#[cfg(target_arch = "aarch64")]
mod words;

/// Adds the microkernels that this processor can run and `FRACBIT_ISA` allows. Returns the best
/// instruction set added.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn install(kernels: &mut Kernels) -> Result<Isa, IsaError> {
    let most = Isa::cap()?.unwrap_or(Isa::I8mm);
    Ok(install_up_to(kernels, most))
}

/// Adds the microkernels that this processor can run, up to `most`. Returns the best instruction
/// set added.
pub fn install_up_to(kernels: &mut Kernels, most: Isa) -> Isa {
    #[cfg(target_arch = "aarch64")]
    let offered = microkernel::providers();
    #[cfg(not(target_arch = "aarch64"))]
    let offered = std::iter::empty::<(Isa, fracbit_kernels::Provider)>();
    #[cfg(target_arch = "aarch64")]
    if most >= Isa::Neon {
        kernels.install_vectors(attend::vectors());
        kernels.install_nested(nested::microkernel());
        kernels.install_linear(halves::linear);
    }
    #[cfg(target_arch = "aarch64")]
    if most >= Isa::Dotprod
        && let Some(microkernel) = progressive::microkernel()
    {
        kernels.install_progressive(microkernel);
    }
    let mut best = Isa::Scalar;
    for (isa, provider) in offered.filter(|&(isa, _)| isa <= most) {
        kernels.install(provider);
        best = isa;
    }
    best
}

/// Features of this processor that matter to kernels, by the names of the Arm architecture; with
/// SVE also the length of its vectors, which no microkernel uses so far. Empty on other
/// architectures.
#[must_use]
pub fn features() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! detect {
            ($($name:tt)*) => { $(
                if std::arch::is_aarch64_feature_detected!($name) {
                    found.push($name.to_owned());
                }
            )* };
        }
        detect!("neon" "fp16" "dotprod" "i8mm" "bf16" "sve" "sve2");
        if std::arch::is_aarch64_feature_detected!("sve") {
            // SAFETY: SVE was detected.
            found.push(format!("sve vectors of {} bits", 8 * unsafe { shims::sve_bytes() }));
        }
    }
    #[cfg(not(target_arch = "aarch64"))]
    found.clear();
    found
}
