//! What an instruction set contributes, and the microkernel that every scheme runs.

use crate::{expand::Expand, many::many_tokens, neon::*, one::one_token, pack::LANES, shims, tables};
use fracbit_format::{Codebook, Grid};
use fracbit_kernels::{Args, Interleave, Ints, Isa, Microkernel, Provider};
use std::arch::is_aarch64_feature_detected;

/// The dot product of an instruction set.
pub(crate) trait Dot {
    /// True when the instruction set includes `dotprod`.
    const SDOT: bool;

    /// Lane `i` of `sum` plus bytes `4 i..4 i + 4` of `w` times bytes `4 LANE..4 LANE + 4` of `x`:
    /// exact, by the range at [`BLOCK_TILES`](fracbit_kernels::BLOCK_TILES).
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn dot<const LANE: i32>(sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t;
}

/// Every aarch64 processor.
pub(crate) struct Base;

impl Dot for Base {
    const SDOT: bool = false;

    #[inline(always)]
    unsafe fn dot<const LANE: i32>(sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        let x = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(x)));
        // Two products of at most 128 x 127 fit 16 bits.
        let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
        vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)))
    }
}

/// `dotprod` (Armv8.2 and later).
pub(crate) struct Dotprod;

impl Dot for Dotprod {
    const SDOT: bool = true;

    #[inline(always)]
    unsafe fn dot<const LANE: i32>(sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: promised by the caller.
        unsafe { shims::sdot::<LANE>(sum, w, x) }
    }
}

/// What this processor can run, from the least to the most capable.
pub(crate) fn providers() -> impl Iterator<Item = (Isa, Provider)> {
    let dotprod = is_aarch64_feature_detected!("dotprod");
    let i8mm = dotprod && is_aarch64_feature_detected!("i8mm");
    let all = [
        (true, Isa::Neon, base as Provider),
        (dotprod, Isa::Dotprod, dotted as Provider),
        (i8mm, Isa::I8mm, paired as Provider),
    ];
    all.into_iter().filter(|a| a.0).map(|(_, isa, provider)| (isa, provider))
}

fn base(codebook: &Codebook) -> Option<Microkernel> {
    provide::<Base, false>(Isa::Neon, codebook)
}

fn dotted(codebook: &Codebook) -> Option<Microkernel> {
    provide::<Dotprod, false>(Isa::Dotprod, codebook)
}

fn paired(codebook: &Codebook) -> Option<Microkernel> {
    provide::<Dotprod, true>(Isa::I8mm, codebook)
}

/// Single tokens by `D`; several by `D`, or in pairs by the int8 matrix product.
fn provide<D: Dot, const PAIRS: bool>(isa: Isa, codebook: &Codebook) -> Option<Microkernel> {
    let choice = tables::choose::<D, PAIRS>(codebook)?;
    // SAFETY: `providers` hands out the provider of an instruction set only where it was detected;
    // `choose` built the table for the function and this codebook, and expanders read whole tiles
    // only.
    let microkernel = unsafe { Microkernel::new(isa, choice.table, LANES, choice.run) };
    let microkernel =
        if let Some(packing) = choice.packing { microkernel.with_packing(packing) } else { microkernel };
    Some(if PAIRS && codebook.grid() == Grid::I8 {
        microkernel.with_panels(&[Interleave::Pairs])
    } else {
        microkernel
    })
}

/// The activations of the first token as bytes.
pub(crate) fn bytes_of(args: &Args<'_>) -> *const i8 {
    match (args.x, args.panel) {
        // A token alone is not interleaved.
        (Ints::I8(_), Some(panel)) => panel.pieces[panel.first..].as_ptr().cast(),
        (Ints::I8(x), None) => x.as_ptr(),
        (Ints::I16(x), _) => x.as_ptr().cast(),
    }
}

/// The microkernel of every scheme: expander `E`, products `D`, with `PAIRS` of tokens through
/// `smmla`.
///
/// # Safety
/// The processor has the instruction set of `D` and, with `PAIRS`, `i8mm`; `args.table` was built
/// for `E` and `args.codebook`, whose packing the codes are in.
pub(crate) unsafe fn strips<E: Expand, D: Dot, const PAIRS: bool>(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    assert_eq!(out.len(), args.out_len(), "one vector per strip and token");
    let expander = E::new(args.table);
    // SAFETY: lengths are those that `Args` states; the rest is promised by the caller.
    unsafe {
        if args.tokens == 1 {
            one_token::<E, D>(&expander, args, out);
        } else {
            many_tokens::<E, D, PAIRS>(&expander, args, out);
        }
    }
}
