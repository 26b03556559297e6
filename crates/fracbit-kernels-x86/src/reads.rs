//! How memory is read ahead of the products, by the kind of processor: what one gains by, another
//! loses by (`docs/lab/2026-11-speed-zen5.md`).

use std::{
    arch::x86_64::{__cpuid, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch},
    sync::LazyLock,
};

/// How codes and cached vectors should be asked for.
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
        static READS: LazyLock<Reads> = LazyLock::new(|| Reads::of(from_zen5()));
        *READS
    }

    fn of(from_zen5: bool) -> Self {
        if from_zen5 {
            Self { far: 8192, near: 0, strips: 1 }
        } else {
            Self { far: 4096, near: 512, strips: 2 }
        }
    }

    /// Asks for what comes behind the `bytes` at `at` (a tile of codes, cached keys or values),
    /// which are at hand.
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

/// Whether this is an AMD processor of family 1Ah (Zen 5) or later.
fn from_zen5() -> bool {
    let vendor = __cpuid(0);
    let amd = [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes);
    amd && vendor.eax >= 1 && family(__cpuid(1).eax) >= 0x1A
}

/// The family in a processor's signature (leaf 1, `eax`): base and, when that is full, the
/// extension.
fn family(signature: u32) -> u32 {
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
        for reads in [Reads::of(false), Reads::of(true), Reads::of_machine()] {
            for bytes in [32, 64, 65, 128, 256] {
                reads.ask(std::ptr::null(), bytes);
                reads.ask(std::ptr::without_provenance(usize::MAX), bytes);
            }
        }
    }
}
