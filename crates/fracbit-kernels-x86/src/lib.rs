#![doc = include_str!("../README.md")]
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector loads, and functions with target features behind a proof of them")
)]

use fracbit_kernels::{Isa, IsaError, Kernels};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod limits;
#[cfg(target_arch = "x86_64")]
mod reads;
#[cfg(target_arch = "x86_64")]
mod vectors;
#[cfg(target_arch = "x86_64")]
mod walsh;

/// Adds the microkernels that this processor can run and `FRACBIT_ISA` allows. Returns the best
/// instruction set added.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn install(kernels: &mut Kernels) -> Result<Isa, IsaError> {
    let most = Isa::cap()?.unwrap_or(Isa::Amx);
    Ok(install_up_to(kernels, most))
}

/// Adds the microkernels that this processor can run, up to `most`. Returns the best instruction
/// set added.
pub fn install_up_to(kernels: &mut Kernels, most: Isa) -> Isa {
    let mut best = Isa::Scalar;
    #[cfg(target_arch = "x86_64")]
    {
        if most >= Isa::Avx2
            && let Some(proof) = avx2::Avx2::detect()
        {
            kernels.install(avx2::microkernel);
            kernels.install_vectors(avx2::vectors(proof));
            kernels.install_progressive(avx2::progressive::microkernel(proof));
            kernels.install_nested(avx2::nested::microkernel(proof));
            kernels.install_linear(avx2::halves::linear);
            best = Isa::Avx2;
        }
        if most >= Isa::AvxVnni
            && let Some(proof) = avx2::AvxVnni::detect()
        {
            kernels.install(avx2::vnni_microkernel);
            kernels.install_progressive(avx2::progressive::vnni_microkernel(proof));
            best = Isa::AvxVnni;
        }
        if most >= Isa::Avx512
            && let Some(proof) = avx512::Avx512::detect()
        {
            kernels.install(avx512::microkernel);
            kernels.install_vectors(avx512::vectors(proof));
            kernels.install_progressive(avx512::progressive::microkernel(proof));
            kernels.install_bit_planes(avx512::by_bits);
            kernels.install_linear(avx512::psumbook::linear);
            kernels.install_linear(avx512::halves::linear);
            best = Isa::Avx512;
        }
        if most >= Isa::Amx
            && let (Some(plain), Some(proof)) = (avx512::Avx512::detect(), avx512::Amx::detect())
        {
            kernels.install(avx512::amx_microkernel);
            kernels.install_progressive(avx512::progressive_tiles::microkernel(plain, proof));
            kernels.install_bit_planes(avx512::amx_by_bits);
            best = Isa::Amx;
        }
    }
    let _ = (kernels, most);
    best
}

/// Makes all matrices of additive codebooks of 256 centroids build and read Psumbooks for few
/// tokens, in place of expanding codes, up to `most`; false where the processor lacks AVX2.
/// [`install`] does so where that is faster: with AVX-512, one token and many rows
/// (`docs/lab/2026-11-speed.md`), and for codebooks of 16; results have the same bits.
pub fn install_psumbook(kernels: &mut Kernels, most: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    if most >= Isa::Avx512 && avx512::Avx512::detect().is_some() {
        kernels.install_linear(avx512::psumbook::everywhere);
        return true;
    } else if most >= Isa::Avx2 && avx2::Avx2::detect().is_some() {
        kernels.install_linear(avx2::linear);
        return true;
    }
    let _ = (kernels, most);
    false
}

/// Features of this processor that matter to kernels, by the names of the Rust standard library.
/// Empty on other architectures.
#[must_use]
pub fn features() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detect {
            ($($name:tt)*) => { $(
                if is_x86_feature_detected!($name) {
                    found.push($name.to_owned());
                }
            )* };
        }
        detect!("avx2" "f16c" "fma" "avxvnni" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512vbmi" "avx512vbmi2" "avx512bf16");
        // The standard library does not ask whether a process may use the registers.
        if avx512::Amx::detect().is_some() {
            found.push("amx-int8".to_owned());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    found.clear();
    found
}
