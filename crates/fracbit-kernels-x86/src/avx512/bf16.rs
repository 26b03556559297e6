//! Products of bf16 pairs, for processors that have AVX-512 BF16 or AMX-BF16 beside the rest.

use super::tiles::{Amx, Config};
use fracbit_kernels::vectors::bf16::{COLS, Pair, ROWS, Tile, TileFn};
use std::arch::{asm, x86_64::*};

/// Vectors of a row of a tile.
const WIDE: usize = COLS / 16;
/// Rows whose sums stay in registers.
const HALF: usize = ROWS / 2;

/// The microkernel, if this processor has one.
pub(super) fn tile() -> Option<TileFn> {
    let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    found.then_some(product as TileFn)
}

/// The microkernel of tile registers, if this processor has one.
pub(super) fn amx_tile(_proof: Amx) -> Option<TileFn> {
    const BF16: u32 = 1 << 22;
    // Processors with tile registers have this leaf.
    (__cpuid_count(7, 0).edx & BF16 != 0).then_some(in_tiles as TileFn)
}

/// The 24 sums of vectors of eight rows stay in registers; every vector of the panel serves eight
/// rows, every pair of a row three vectors.
///
/// # Safety
/// The features, and lengths as `Vectors::bf16_tile` checks them.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn product(args: &Tile<'_>, out: &mut [[f32; COLS]; ROWS]) {
    let (panel, stride) = (args.panel.as_ptr(), args.stride);
    for (half, out) in out.chunks_exact_mut(HALF).enumerate() {
        let rows = args.rows.as_ptr().wrapping_add(half * HALF * stride);
        let mut sums = [[_mm512_setzero_ps(); WIDE]; HALF];
        for pair in 0..args.panel.len() / COLS {
            // SAFETY: whole lines of the panel.
            let w: [__m512bh; WIDE] = std::array::from_fn(|v| unsafe {
                panel.add(pair * COLS + v * 16).cast::<__m512bh>().read_unaligned()
            });
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as many pairs in each of the rows.
                let x = unsafe { rows.add(row * stride + pair).read() };
                let x = _mm512_set1_epi32(x.cast_signed());
                // SAFETY: 64 bytes, of which any are numbers.
                let x: __m512bh = unsafe { (&raw const x).cast::<__m512bh>().read() };
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = _mm512_dpbf16_ps(*sum, x, w);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out.chunks_exact_mut(16).zip(sums) {
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
            }
        }
    }
}

/// Pairs of a row of a tile register.
const STEP: usize = 16;

static CONFIG: Config = Config::new([ROWS as u8; 8]);

/// Sixteen pairs at a time of sixteen rows and three times sixteen columns: 24576 products by three
/// instructions of 16 cycles.
///
/// # Safety
/// There is AMX for bf16, and lengths are as `Vectors::bf16_tile` checks them.
unsafe fn in_tiles(args: &Tile<'_>, out: &mut [[f32; COLS]; ROWS]) {
    out.as_flattened_mut().fill(0.0);
    let pairs = args.panel.len() / COLS;
    let whole = pairs / STEP * STEP;
    // SAFETY: promised; so many pairs are in each row, and in the panel.
    unsafe { steps(args.rows, args.stride, &args.panel[..whole * COLS], out) };
    let rest = pairs - whole;
    if rest > 0 {
        // Zeros behind them.
        let (mut rows, mut panel) = ([0; ROWS * STEP], [0; STEP * COLS]);
        for (row, to) in rows.chunks_exact_mut(STEP).enumerate() {
            to[..rest].copy_from_slice(&args.rows[row * args.stride + whole..][..rest]);
        }
        panel[..rest * COLS].copy_from_slice(&args.panel[whole * COLS..]);
        // SAFETY: promised, and there is one step.
        unsafe { steps(&rows, STEP, &panel, out) };
    }
}

/// Adds whole steps to `out`.
///
/// # Safety
/// There is AMX for bf16; the panel is of whole steps, and each row has as many pairs.
unsafe fn steps(rows: &[Pair], stride: usize, panel: &[Pair], out: &mut [[f32; COLS]; ROWS]) {
    // SAFETY: the three registers of sums are all of `out`; each step reads 64 bytes of every row,
    // and sixteen lines of the panel.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{out} + {line}]",
            "tileloadd tmm1, [{out} + {line} + 64]",
            "tileloadd tmm2, [{out} + {line} + 128]",
            "jmp 3f",
            "2:",
            "tileloadd tmm3, [{rows} + {stride}]",
            "tileloadd tmm4, [{panel} + {line}]",
            "tileloadd tmm5, [{panel} + {line} + 64]",
            "tileloadd tmm6, [{panel} + {line} + 128]",
            "tdpbf16ps tmm0, tmm3, tmm4",
            "tdpbf16ps tmm1, tmm3, tmm5",
            "tdpbf16ps tmm2, tmm3, tmm6",
            "add {rows}, 64",
            "add {panel}, 3072",
            "3:",
            "sub {n}, 1",
            "jnc 2b",
            "tilestored [{out} + {line}], tmm0",
            "tilestored [{out} + {line} + 64], tmm1",
            "tilestored [{out} + {line} + 128], tmm2",
            "tilerelease",
            config = in(reg) &raw const CONFIG,
            out = in(reg) out.as_mut_ptr(),
            line = in(reg) size_of::<[Pair; COLS]>(),
            rows = inout(reg) rows.as_ptr() => _,
            stride = in(reg) 4 * stride,
            panel = inout(reg) panel.as_ptr() => _,
            n = inout(reg) panel.len() / (STEP * COLS) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _,
            options(nostack),
        );
    }
}

const _: () =
    assert!(STEP * COLS * size_of::<Pair>() == 3072 && ROWS == 16 && COLS == 48, "as `steps` has it");
