//! How memory is read ahead of the products, by the kind of processor: what one gains by, another
//! loses by (`docs/lab/2026-11-speed-zen5.md`).

use fracbit_kernels::vectors::Next;
use std::{
    arch::x86_64::{__cpuid, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch},
    sync::LazyLock,
};

/// How codes should be asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reads {
    /// Bytes ahead to the second-level cache: as early as memory of a server takes to answer.
    far: usize,
    /// Bytes ahead to the first-level cache, which keeps only some ten requests under way; 0 where
    /// the processor's own prefetcher does that better.
    near: usize,
    /// Strips that one token should meet at once where memory binds: each is a stream of its own.
    pub(crate) strips: usize,
}

impl Reads {
    /// Those of this processor.
    pub(crate) fn of_machine() -> Self {
        static READS: LazyLock<Reads> =
            LazyLock::new(|| Reads::of(amd_family(), is_x86_feature_detected!("avx512f")));
        *READS
    }

    /// Those of a processor by AMD's family, of others by none, and by whether it has AVX-512.
    const fn of(amd_family: Option<u32>, avx512: bool) -> Self {
        match amd_family {
            // Zen 5.
            Some(0x1A..) => Self { far: 8192, near: 0, strips: 1 },
            // Zen 4.
            Some(0x19) if avx512 => Self { far: 8192, near: 512, strips: 1 },
            _ => Self { far: 4096, near: 512, strips: 2 },
        }
    }

    /// Asks for what comes behind the `bytes` at `at`, a tile of codes, which are at hand.
    #[inline(always)]
    pub(crate) fn ask(self, at: *const u8, bytes: usize) {
        let line = |i: usize| {
            // SAFETY: a prefetch may point anywhere.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(self.far + i).cast());
                if self.near > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(self.near + i).cast());
                }
            }
        };
        // The common ones without a loop.
        line(0);
        if bytes > 64 {
            line(64);
            (128..bytes).step_by(64).for_each(line);
        }
    }
}

/// What is read next while something else is: from a place of this to the same place of that, in
/// bytes; 0 where nothing is known.
#[derive(Clone, Copy)]
pub(crate) struct Ahead(isize);

impl Ahead {
    /// Nothing.
    pub(crate) const NONE: Self = Self(0);

    /// Begins to ask for what comes behind `now`: for its scales.
    #[inline]
    pub(crate) fn of(next: Option<Next<'_>>, now: *const u8) -> Self {
        let Some(Next { ints, scales }) = next else { return Self::NONE };
        let start: *const u8 = scales.as_ptr().cast();
        for at in (0..size_of_val(scales)).step_by(64) {
            // SAFETY: a prefetch may point anywhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at).cast()) };
        }
        Self(ints.start().addr().wrapping_sub(now.addr()).cast_signed())
    }

    /// Asks for what has the place of the line at `at`.
    #[inline(always)]
    pub(crate) fn ask(self, at: *const u8) {
        if self.0 != 0 {
            // SAFETY: a prefetch may point anywhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_offset(self.0).cast()) };
        }
    }
}

/// The family, if this is an AMD processor.
fn amd_family() -> Option<u32> {
    let vendor = __cpuid(0);
    let amd = [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes);
    (amd && vendor.eax >= 1).then(|| family(__cpuid(1).eax))
}

/// The family in a processor's signature (leaf 1, `eax`): base and, when that is full, the
/// extension.
const fn family(signature: u32) -> u32 {
    match signature >> 8 & 0xF {
        0xF => 0xF + (signature >> 20 & 0xFF),
        base => base,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_of_known_signatures() {
        // Zen 5 (Turin), Zen 4 (Genoa), Sapphire Rapids.
        for (signature, expected) in [(0x00B0_0F21, 0x1A), (0x00A1_0F11, 0x19), (0x0008_06F8, 6)] {
            assert_eq!(family(signature), expected, "{signature:#x}");
        }
    }

    #[test]
    fn a_line_may_be_asked_for_anywhere() {
        let known = [None, Some(0x19), Some(0x1A)].map(|family| Reads::of(family, true));
        for reads in known.into_iter().chain([Reads::of_machine()]) {
            for bytes in [32, 64, 65, 128, 256] {
                reads.ask(std::ptr::null(), bytes);
                reads.ask(std::ptr::without_provenance(usize::MAX), bytes);
            }
        }
    }
}
