//! More than eight tokens on processors with AMX: an expanded block is met by sixteen of them at a
//! time in tile registers.
//!
//! `tdpbssd` multiplies 16 tokens by 64 columns of a strip, 16384 products in 16 cycles, eight
//! times what `vpdpbusd` does. Its second operand wants four neighbouring columns of a row in 32
//! bits, rows side by side: what [`Expand::regroup_by`] makes, sixteen vectors to a tile register.
//! The first takes the rows of the activations as they are. Two strips meet 32 tokens in four sums,
//! so that each tile that is loaded serves two products.
//!
//! Both operands are signed, and no sums of activations are needed. A block that ends inside 64
//! columns is filled up with zero weights; what activations stand behind it, and in rows behind the
//! last token, does not count.

#![expect(clippy::needless_range_loop, reason = "strips and tokens index several arrays at once")]

use super::{
    expand::Expand,
    strips::{ask_next, close, finish, vectors},
    *,
};
use fracbit_format::TILE_COLS;
use fracbit_kernels::{Args, BLOCK_TILES, Ints, MAX_STRIPS, MAX_TOKENS, ROWS};
use std::{arch::asm, mem::MaybeUninit, sync::OnceLock};

/// Proof that the processor has AVX-512 as [`Avx512`] says and AMX for bytes, and that the system
/// lets this process use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl Amx {
    /// The proof, if there is one. On Linux a process must ask for the tile registers before it
    /// uses them, once for all its threads.
    #[must_use]
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| Avx512::detect().is_some() && has_tiles() && may_use_tiles()).then_some(Self(()))
    }
}

/// AMX-TILE and AMX-INT8.
fn has_tiles() -> bool {
    const TILE_AND_INT8: u32 = 0b11 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

/// Asks Linux for the tile registers.
fn may_use_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const XFEATURE_XTILEDATA: i64 = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: the call reads two numbers and touches no memory of this process; a system call
        // changes rcx and r11 besides.
        unsafe {
            asm!(
                "syscall",
                inout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Multiplies and adds ones for `rounds` rounds in four tile registers and returns the sum, which
/// is the number of products made; below 2^25 rounds no sum overflows.
pub(crate) fn peak(_proof: Amx, rounds: u32) -> u64 {
    #[repr(C, align(64))]
    struct Sums([[i32; 256]; 4]);
    let ones = Config([1; 64]);
    let mut sums = Sums([[0; 256]; 4]);
    // SAFETY: the proof; all rows of the operands are the one line, and each sum fills its 1024
    // bytes.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{ones} + {zero}]",
            "tileloadd tmm5, [{ones} + {zero}]",
            "jmp 3f",
            "2:",
            "tdpbssd tmm0, tmm4, tmm5",
            "tdpbssd tmm1, tmm4, tmm5",
            "tdpbssd tmm2, tmm4, tmm5",
            "tdpbssd tmm3, tmm4, tmm5",
            "3:",
            "sub {n:e}, 1",
            "jnc 2b",
            "tilestored [{to} + {line}], tmm0",
            "tilestored [{to} + {line} + 1024], tmm1",
            "tilestored [{to} + {line} + 2048], tmm2",
            "tilestored [{to} + {line} + 3072], tmm3",
            "tilerelease",
            config = in(reg) &raw const CONFIG,
            ones = in(reg) &raw const ones,
            zero = in(reg) 0usize,
            line = in(reg) 64usize,
            to = in(reg) &raw mut sums,
            n = inout(reg) rounds => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            options(nostack),
        );
    }
    sums.0.as_flattened().iter().map(|&sum| u64::from(sum.unsigned_abs())).sum()
}

/// Columns of a tile register.
const COLS: usize = 64;
/// Vectors of weights that fill one.
pub(super) const VECTORS: usize = COLS / 4;
/// Vectors that hold a block of one strip.
pub(super) const STRIP: usize = BLOCK_TILES * 4;
/// Groups of sixteen tokens that meet two strips at once.
pub(super) const GROUPS: usize = 2;

/// Shapes of tile registers, as `ldtilecfg` wants them.
#[repr(C, align(64))]
pub(super) struct Config([u8; 64]);

impl Config {
    /// Rows of 64 bytes of each register; none where it is not used.
    pub(super) const fn new(rows: [u8; 8]) -> Self {
        let mut bytes = [0; 64];
        bytes[0] = 1; // the palette
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = if rows[tile] > 0 { 64 } else { 0 };
            bytes[48 + tile] = rows[tile];
            tile += 1;
        }
        Self(bytes)
    }
}

static CONFIG: Config = Config::new([16; 8]);

/// Weights of a block of two strips, `(strip, four columns, row, column)`.
pub(super) type Weights = [__m512i; MAX_STRIPS * STRIP];

/// Sums of a block, `(token / 16, strip, token % 16, row)`.
pub(super) type Sums = [[[__m512i; ROWS]; MAX_STRIPS]; GROUPS];

/// Scaled sums of sixteen tokens, `(strip, token, row)`.
pub(super) type Inner = [[__m512; ROWS]; MAX_STRIPS];

/// Blocks of up to two strips, expanded once and met by all tokens.
///
/// # Safety
/// As `strips`, [`Amx`] is there, the expander is narrow and [signed](Expand::signed) and the
/// activations come as [`fracbit_kernels::Interleave::Rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn tiles<E: Expand>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    let Ints::I8(x) = args.x else { unreachable!("tiles are for the int8 grid") };
    let mut weights = [_mm512_setzero_si512(); MAX_STRIPS * STRIP];
    let mut inner = [MaybeUninit::<Inner>::uninit(); MAX_TOKENS.div_ceil(ROWS)];
    let mut fresh = true;
    // SAFETY: there is AMX, as the caller promises.
    unsafe { configure() };
    for (index, block) in args.blocks.iter().enumerate() {
        for strip in 0..args.strips {
            let codes = args.codes[strip * args.stride + block.start * args.tile_bytes..].as_ptr();
            let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..].as_ptr();
            // SAFETY: `Args` has 16 scales for every group.
            let books = unsafe { e.books(scales) };
            let to = &mut weights[strip * STRIP..][..STRIP];
            // SAFETY: the first tile of the block.
            let mut mid = unsafe { e.begin(codes) };
            for (tile, to) in to.chunks_exact_mut(4).enumerate().take(block.tiles) {
                // SAFETY: there is room for a tile behind the last.
                let next = unsafe { e.begin(codes.add((tile + 1) * args.tile_bytes)) };
                // SAFETY: the features are here.
                let expanded = unsafe { e.regroup_by(mid, books) };
                mid = next;
                to.copy_from_slice(&expanded[..vectors::<E>()]);
            }
            let end = 4 * block.tiles;
            to[end..end.next_multiple_of(VECTORS)].fill(_mm512_setzero_si512());
        }
        ask_next(args, index);
        if fresh {
            inner[..args.tokens.div_ceil(ROWS)]
                .fill(MaybeUninit::new([[_mm512_setzero_ps(); ROWS]; MAX_STRIPS]));
        }
        let step = Step {
            args,
            index,
            weights: &weights,
            // SAFETY: a block inside the activations.
            x: unsafe { x.as_ptr().add(block.start * TILE_COLS) },
            inner: inner.as_mut_ptr().cast(),
            out: out.as_mut_ptr(),
        };
        // While the sums of some tokens meet their scales the tile registers are at the next ones.
        let mut sums = [MaybeUninit::<Sums>::uninit(); 2];
        for (nth, token) in (0..args.tokens).step_by(GROUPS * ROWS).enumerate() {
            let now = &mut sums[nth % 2];
            // SAFETY: rows up to a multiple of sixteen are readable; the sums of the tokens before
            // were written.
            unsafe {
                step.multiply(token, now);
                if nth > 0 {
                    step.scale(token - GROUPS * ROWS, &sums[(nth - 1) % 2]);
                }
            }
        }
        let last = (args.tokens - 1) / (GROUPS * ROWS);
        // SAFETY: the sums of the last tokens were written.
        unsafe { step.scale(last * GROUPS * ROWS, &sums[last % 2]) };
        fresh = block.closes;
    }
    // SAFETY: no tile register holds anything that is wanted.
    unsafe { release() };
}

/// One expanded block against all tokens.
struct Step<'a> {
    args: &'a Args<'a>,
    index: usize,
    weights: &'a Weights,
    x: *const i8,
    inner: *mut Inner,
    out: *mut f32, // (token, strip, row)
}

impl Step<'_> {
    /// Sums of 32 tokens, or of 16 where no more are left, and both strips.
    ///
    /// # Safety
    /// Rows of activations are readable up to a multiple of sixteen.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn multiply(&self, token: usize, sums: &mut MaybeUninit<Sums>) {
        let args = self.args;
        let steps = args.blocks[self.index].tiles.div_ceil(COLS / TILE_COLS);
        // SAFETY: `steps` times 64 columns of sixteen rows for each group, and as many tiles of
        // weights of both strips (where there is one strip, the second one's are zeros).
        unsafe {
            let x = self.x.add(token * args.x_stride);
            multiply(x, args.x_stride, args.tokens - token > ROWS, self.weights, steps, sums);
        }
    }

    /// Takes the sums of up to 32 tokens to `inner`, and that to `out` where the block closes its
    /// weight scale.
    ///
    /// # Safety
    /// [`multiply`](Self::multiply) wrote `sums` for `token`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn scale(&self, token: usize, sums: &MaybeUninit<Sums>) {
        let args = self.args;
        let block = &args.blocks[self.index];
        let all = &args.block_scales[self.index * args.tokens..][..args.tokens];
        for (g, first) in (token..args.tokens).step_by(ROWS).enumerate().take(GROUPS) {
            // SAFETY: written by `multiply`; a group of `inner`.
            let (sums, inner) = unsafe { (&(*sums.as_ptr())[g], &mut *self.inner.add(first / ROWS)) };
            // Rows behind the last token become zeros.
            let mut rest = [0f32; ROWS];
            let factors = all[first..].first_chunk().unwrap_or_else(|| {
                rest[..args.tokens - first].copy_from_slice(&all[first..]);
                &rest
            });
            scale(sums, factors, inner);
            if !block.closes {
                continue;
            }
            for s in 0..args.strips {
                let scales = args.scales[(s * args.groups + block.group) * TILE_ROWS..].as_ptr();
                let out = self.out.wrapping_add(args.out_at(s, first));
                for t in 0..ROWS.min(args.tokens - first) {
                    // SAFETY: sixteen scales, and sixteen values of `out` for every strip and
                    // token.
                    unsafe { close(inner[s][t], scales, out.add(t * args.out_stride)) };
                }
            }
        }
    }
}

/// Sums of sixteen tokens, or of `more`, and both strips over `steps` times 64 columns, in the tile
/// registers that [`configure`] shapes.
///
/// # Safety
/// There is [`Amx`], configured; there are rows of activations, `stride` from one to the next, of
/// sixteen tokens, or 32 where there are more.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn multiply(
    x: *const i8,
    stride: usize,
    more: bool,
    weights: &Weights,
    steps: usize,
    sums: &mut MaybeUninit<Sums>,
) {
    debug_assert!(steps * VECTORS <= STRIP, "a block of each strip");
    // SAFETY: the activations are promised by the caller; `weights` holds `steps` tiles of both
    // strips; each sum fills 16 vectors.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm6, [{w} + {line}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {line} + {strip}]",
            "tdpbssd tmm1, tmm4, tmm7",
            "test {more:e}, {more:e}",
            "jz 3f",
            "tileloadd tmm5, [{y} + {stride}]",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            "3:",
            "add {x}, 64",
            "add {y}, 64",
            "add {w}, 1024",
            "dec {n}",
            "jnz 2b",
            "tilestored [{to} + {line}], tmm0",
            "tilestored [{to} + {line} + 1024], tmm1",
            "tilestored [{to} + {line} + 2048], tmm2",
            "tilestored [{to} + {line} + 3072], tmm3",
            x = inout(reg) x => _,
            y = inout(reg) x.wrapping_add(ROWS * stride) => _,
            w = inout(reg) weights.as_ptr() => _,
            n = inout(reg) steps => _,
            more = in(reg) u32::from(more),
            stride = in(reg) stride,
            line = in(reg) 64usize,
            strip = const 64 * STRIP,
            to = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Adds sums of sixteen tokens times the factor of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn scale(sums: &[[__m512i; ROWS]; MAX_STRIPS], factors: &[f32; ROWS], inner: &mut Inner) {
    for s in 0..MAX_STRIPS {
        for t in 0..ROWS {
            inner[s][t] = finish(inner[s][t], sums[s][t], factors[t]);
        }
    }
}

/// Shapes the tile registers for [`multiply`].
///
/// # Safety
/// There is [`Amx`].
#[inline]
pub(super) unsafe fn configure() {
    // SAFETY: the configuration is one of palette 1; `multiply` names the registers that it
    // changes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags, readonly)) };
}

/// Ends the use of tile registers.
///
/// # Safety
/// There is [`Amx`], and no tile register holds anything that is wanted.
#[inline]
pub(super) unsafe fn release() {
    // SAFETY: promised by the caller.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}
