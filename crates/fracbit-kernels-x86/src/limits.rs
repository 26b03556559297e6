//! What the machine can do at best: reads of memory and int8 products, for kernels to be compared
//! with.
//!
//! Both are loops over the widest instructions that this processor has, whatever `FRACBIT_ISA`
//! says: a limit is one of the machine, not of the microkernels in use. Both return a number that
//! is known beforehand, so that a loop that the compiler shortened shows.
//!
//! - Reads: four streams a quarter of the slice apart, one accumulator each, so that several pages
//!   are under way at once: a hardware prefetcher stops at the end of a 4 KiB page. Loads are
//!   plain, without software prefetch.
//! - Products: twelve accumulators of `vpdpbusd` (AVX-512 VNNI, 64 products an instruction, or
//!   AVX-VNNI, 32) or of `vpmaddubsw`, `vpmaddwd` and `vpaddd` (AVX2, 32 products), more than
//!   latency times throughput asks for. Operands stay in registers: this is the bound that no
//!   kernel reaches, because it has to load and to expand.

/// Accumulators of the product loops.
const ACCUMULATORS: usize = 12;

/// The sum of `data`, modulo 2^64, at the speed at which memory can be read.
#[must_use]
pub fn read_sum(data: &[u64]) -> u64 {
    let streams = data.len() / 4 / READ * READ;
    let (bulk, tail) = data.split_at(4 * streams);
    let tail = portable::sum(tail);
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the features were detected; `bulk` is four streams of whole groups of
            // `READ`.
            return tail.wrapping_add(unsafe { x86::sum_avx512(bulk) });
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return tail.wrapping_add(unsafe { x86::sum_avx2(bulk) });
        }
    }
    tail.wrapping_add(portable::sum(bulk))
}

/// Numbers that each stream reads at once: a cache line.
const READ: usize = 8;

/// Multiplies and adds ones for `rounds` rounds and returns the sum, which is the number of
/// products made.
///
/// # Panics
/// When `rounds` is not below 2^26: a 32-bit sum would overflow.
#[must_use]
pub fn int8_peak(rounds: u32) -> u64 {
    assert!(rounds < 1 << 26, "rounds should be below 2^26, got {rounds}");
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the features were detected.
            return unsafe { x86::products_avx512(rounds) };
        }
        if crate::avx2::Avx2::detect().is_some() {
            // SAFETY: as above.
            return unsafe {
                if crate::avx2::AvxVnni::detect().is_some() {
                    x86::products_avx2::<true>(rounds)
                } else {
                    x86::products_avx2::<false>(rounds)
                }
            };
        }
    }
    portable::products(rounds)
}

/// The same in tile registers (AMX), which a processor with them has beside its vectors.
///
/// # Panics
/// When `rounds` is not below 2^25: a 32-bit sum would overflow.
#[must_use]
pub fn tile_peak(rounds: u32) -> Option<u64> {
    assert!(rounds < 1 << 25, "rounds should be below 2^25, got {rounds}");
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = crate::avx512::Amx::detect() {
        return Some(crate::avx512::tile_peak(proof, rounds));
    }
    None
}

/// For machines without a microkernel of their own; the compiler makes of it what it can.
mod portable {
    use std::hint::black_box;

    pub(super) fn sum(data: &[u64]) -> u64 {
        let (groups, rest) = data.as_chunks::<32>();
        let mut lanes = [0u64; 32];
        for group in groups {
            lanes.iter_mut().zip(group).for_each(|(l, v)| *l = l.wrapping_add(*v));
        }
        lanes.iter().chain(rest).fold(0, |sum, v| sum.wrapping_add(*v))
    }

    pub(super) fn products(rounds: u32) -> u64 {
        let mut sums = [0i32; 64];
        for _ in 0..rounds {
            let (a, b) = black_box(([1i8; 64], [1i8; 64]));
            for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(&b)) {
                *sum += i32::from(*a) * i32::from(*b);
            }
        }
        sums.iter().map(|&s| u64::from(s.unsigned_abs())).sum()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ACCUMULATORS, READ};
    use std::{arch::asm, arch::x86_64::*, hint::black_box};

    pub(super) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
    }

    /// # Safety
    /// AVX-512 F; `data` is four streams of whole groups of [`READ`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn sum_avx512(data: &[u64]) -> u64 {
        let stream = data.len() / 4;
        let mut sums = [_mm512_setzero_si512(); 4];
        for at in (0..stream).step_by(READ) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `i * stream + at + 8 <= data.len()`, for `at` is a multiple of 8 below
                // `stream`, which is one.
                let line = unsafe { _mm512_loadu_si512(data.as_ptr().add(i * stream + at).cast()) };
                *sum = _mm512_add_epi64(*sum, line);
            }
        }
        let [a, b, c, d] = sums;
        let sum = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
        _mm512_reduce_add_epi64(sum).cast_unsigned()
    }

    /// # Safety
    /// AVX2; `data` is four streams of whole groups of [`READ`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sum_avx2(data: &[u64]) -> u64 {
        let stream = data.len() / 4;
        let mut sums = [_mm256_setzero_si256(); 8];
        for at in (0..stream).step_by(READ) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `at + 8 <= stream`, and the odd halves start 4 behind the even ones.
                let half =
                    unsafe { _mm256_loadu_si256(data.as_ptr().add(i / 2 * stream + at + i % 2 * 4).cast()) };
                *sum = _mm256_add_epi64(*sum, half);
            }
        }
        let mut lanes = [0u64; 4];
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi64(a, b));
        // SAFETY: four lanes of 8 bytes.
        unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
        lanes.iter().fold(0, |sum, v| sum.wrapping_add(*v))
    }

    /// # Safety
    /// AVX-512 F and VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn products_avx512(rounds: u32) -> u64 {
        let ones = black_box(_mm512_set1_epi8(1));
        let mut sums = [_mm512_setzero_si512(); ACCUMULATORS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, ones, ones);
            }
        }
        sums.into_iter().map(|s| u64::from(_mm512_reduce_add_epi32(s).cast_unsigned())).sum()
    }

    /// # Safety
    /// AVX2 and F16C, with `VNNI` AVX-VNNI.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn products_avx2<const VNNI: bool>(rounds: u32) -> u64 {
        let mut ones = _mm256_set1_epi8(1);
        let mut sums = [_mm256_setzero_si256(); ACCUMULATORS];
        for _ in 0..rounds {
            for sum in &mut sums {
                // SAFETY: an empty instruction; it only hides from the compiler that all products
                // are one and the same. The features of the product are the caller's promise.
                unsafe {
                    asm!("/* {0} */", inout(ymm_reg) ones, options(nomem, nostack, preserves_flags));
                    *sum = crate::avx2::dot::<VNNI>(*sum, ones, ones);
                }
            }
        }
        let mut total = 0;
        for sum in sums {
            let mut lanes = [0i32; 8];
            // SAFETY: eight lanes of 4 bytes.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
            total += lanes.iter().map(|&l| u64::from(l.unsigned_abs())).sum::<u64>();
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_microkernel_sums_every_length() {
        let data: Vec<u64> = (0..300u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        for len in 0..data.len() {
            let want = data[..len].iter().fold(0u64, |s, v| s.wrapping_add(*v));
            assert_eq!(read_sum(&data[..len]), want, "length {len}");
            assert_eq!(portable::sum(&data[..len]), want, "length {len}");
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && len.is_multiple_of(4 * READ) {
                // SAFETY: detected; four streams of whole groups.
                assert_eq!(unsafe { x86::sum_avx2(&data[..len]) }, want, "length {len}");
            }
        }
    }

    #[test]
    fn products_are_counted() {
        for rounds in [0, 1, 1000] {
            assert!(tile_peak(rounds).is_none_or(|sum| sum == 4 * 16 * 16 * 64 * u64::from(rounds)));
            assert_eq!(portable::products(rounds), 64 * u64::from(rounds));
            #[cfg(target_arch = "x86_64")]
            {
                if crate::avx2::Avx2::detect().is_some() {
                    // SAFETY: detected.
                    assert_eq!(unsafe { x86::products_avx2::<false>(rounds) }, 12 * 32 * u64::from(rounds));
                }
                if crate::avx2::AvxVnni::detect().is_some() {
                    // SAFETY: detected.
                    assert_eq!(unsafe { x86::products_avx2::<true>(rounds) }, 12 * 32 * u64::from(rounds));
                }
                if x86::has_avx512() {
                    assert_eq!(int8_peak(rounds), 12 * 64 * u64::from(rounds));
                }
            }
        }
    }
}
