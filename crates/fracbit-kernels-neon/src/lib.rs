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
mod body;
#[cfg(target_arch = "aarch64")]
mod expand;
#[cfg(target_arch = "aarch64")]
mod many;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod one;
#[cfg_attr(not(target_arch = "aarch64"), expect(dead_code, reason = "tested everywhere, used on aarch64"))]
mod pack;
#[cfg(target_arch = "aarch64")]
mod shims;
#[cfg(target_arch = "aarch64")]
mod tables;
#[cfg(target_arch = "aarch64")]
mod words;

/// Adds the bodies that this processor can run and `FRACBIT_ISA` allows. Returns the best instruction set added.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn install(kernels: &mut Kernels) -> Result<Isa, IsaError> {
    let most = Isa::cap()?.unwrap_or(Isa::I8mm);
    Ok(install_up_to(kernels, most))
}

/// Adds the bodies that this processor can run, up to `most`. Returns the best instruction set added.
pub fn install_up_to(kernels: &mut Kernels, most: Isa) -> Isa {
    let mut best = Isa::Scalar;
    #[cfg(target_arch = "aarch64")]
    for (isa, provider) in body::providers() {
        if most >= isa {
            kernels.install(provider);
            best = isa;
        }
    }
    let _ = (kernels, most);
    best
}
