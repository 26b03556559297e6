//! From tiles to outputs.

use super::{expand::Expand, products::dot, *};
use fracbit_kernels::{Args, BLOCK_TILES, Ints, MAX_TOKENS};
use std::mem::MaybeUninit;

/// The microkernel of every scheme: a block of a strip is expanded to a buffer, then met by all
/// tokens.
///
/// # Safety
/// The processor has the features of [`Avx2`], with `VNNI` of [`AvxVnni`]; `args.table` was built
/// for `E` and `args.codebook`.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn strips<E: Expand, const VNNI: bool>(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    assert_eq!(out.len(), args.out_len(), "one vector per strip and token");
    // SAFETY: promised by the caller.
    let e = unsafe { E::new(args.table, args.tile_bytes) };
    let zero = _mm256_setzero_si256();
    let vectors = if E::WIDE { 16 } else { 8 };
    let mut buffer = [zero; BLOCK_TILES * 8];
    let mut inner = [MaybeUninit::uninit(); MAX_TOKENS];
    let inner = zeros(&mut inner[..args.tokens]);
    for strip in 0..args.strips {
        inner.fill([_mm256_setzero_ps(); 2]);
        for (index, block) in args.blocks.iter().enumerate() {
            let codes = &args.codes[strip * args.stride + block.start * args.tile_bytes..];
            for (i, to) in buffer.chunks_exact_mut(vectors).take(block.tiles).enumerate() {
                // SAFETY: tiles of the block are inside `codes`, with `OVERREAD` bytes behind.
                unsafe { e.tile(args.table, codes[i * args.tile_bytes..].as_ptr(), to) };
            }
            let weights = &buffer[..block.tiles * vectors];
            let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..].as_ptr();
            let mut token = 0;
            while token < args.tokens {
                let pieces = Pieces { args, index, token };
                let count = if token + 4 <= args.tokens { 4 } else { 1 };
                let mut sums = [[zero; 2]; 4];
                // SAFETY: promised by the caller.
                unsafe {
                    match (E::WIDE, count) {
                        (false, 4) => pieces.narrow::<VNNI, 4>(weights, &mut sums),
                        (false, _) => pieces.narrow::<VNNI, 1>(weights, &mut sums),
                        (true, 4) => pieces.wide::<VNNI, 4>(weights, &mut sums),
                        (true, _) => pieces.wide::<VNNI, 1>(weights, &mut sums),
                    }
                }
                for t in 0..count {
                    let scale = _mm256_set1_ps(args.block_scales[(token + t) * args.blocks.len() + index]);
                    let out = &mut out[args.out_at(strip, token + t)..][..TILE_ROWS];
                    for half in 0..2 {
                        let part = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[t][half]), scale);
                        let sum = _mm256_add_ps(inner[token + t][half], part);
                        inner[token + t][half] = sum;
                        if block.closes {
                            // SAFETY: 16 scales for every group, 16 outputs for every strip and
                            // token.
                            unsafe {
                                let scales = _mm_loadu_si128(scales.add(8 * half).cast());
                                let scaled = _mm256_mul_ps(sum, _mm256_cvtph_ps(scales));
                                let out = out.as_mut_ptr().add(8 * half);
                                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), scaled));
                            }
                            inner[token + t][half] = _mm256_setzero_ps();
                        }
                    }
                }
                token += count;
            }
        }
    }
}

/// The activations of some tokens for one block.
struct Pieces<'a> {
    args: &'a Args<'a>,
    index: usize,
    token: usize,
}

/// Adds the products of words.
///
/// # Safety
/// As [`dot`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn dot_words<const VNNI: bool>(mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    if VNNI {
        // SAFETY: reads and writes registers; the processor has it, as promised by the caller.
        unsafe {
            std::arch::asm!("{{vex}} vpdpwssd {}, {}, {}", inout(ymm_reg) sum, in(ymm_reg) w, in(ymm_reg) x,
                options(pure, nomem, nostack, preserves_flags));
        }
        return sum;
    }
    _mm256_add_epi32(sum, _mm256_madd_epi16(w, x))
}

impl Pieces<'_> {
    /// First element of a token's activations for the block.
    #[inline]
    fn start(&self, t: usize) -> usize {
        (self.token + t) * self.args.x_stride + self.args.blocks[self.index].start * 16
    }

    /// Adds the products of bytes.
    ///
    /// # Safety
    /// As [`dot`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn narrow<const VNNI: bool, const T: usize>(
        &self,
        weights: &[__m256i],
        sums: &mut [[__m256i; 2]; 4],
    ) {
        let Ints::I8(x) = self.args.x else { unreachable!("a narrow microkernel has narrow activations") };
        let mut local = [[_mm256_setzero_si256(); 2]; T];
        let x: [&[[i8; 4]]; T] =
            std::array::from_fn(|t| &x[self.start(t)..].as_chunks::<4>().0[..weights.len() / 2]);
        for (q, w) in weights.as_chunks::<2>().0.iter().enumerate() {
            for t in 0..T {
                let x = _mm256_set1_epi32(i32::from_le_bytes(x[t][q].map(i8::cast_unsigned)));
                let size = _mm256_abs_epi8(x);
                for half in 0..2 {
                    // Two products are at most 2 * 127 * 127 in magnitude.
                    // SAFETY: promised by the caller.
                    local[t][half] =
                        unsafe { dot::<VNNI>(local[t][half], size, _mm256_sign_epi8(w[half], x)) };
                }
            }
        }
        sums[..T].copy_from_slice(&local);
    }

    /// Adds the products of words.
    ///
    /// # Safety
    /// As [`dot`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn wide<const VNNI: bool, const T: usize>(
        &self,
        weights: &[__m256i],
        sums: &mut [[__m256i; 2]; 4],
    ) {
        let Ints::I16(x) = self.args.x else { unreachable!("a wide microkernel has wide activations") };
        let mut local = [[_mm256_setzero_si256(); 2]; T];
        let x: [&[[i16; 2]]; T] =
            std::array::from_fn(|t| &x[self.start(t)..].as_chunks::<2>().0[..weights.len() / 2]);
        for (p, w) in weights.as_chunks::<2>().0.iter().enumerate() {
            for t in 0..T {
                let [a, b] = x[t][p].map(i16::cast_unsigned);
                let x = _mm256_set1_epi32((u32::from(a) | u32::from(b) << 16).cast_signed());
                for half in 0..2 {
                    // SAFETY: promised by the caller.
                    local[t][half] = unsafe { dot_words::<VNNI>(local[t][half], w[half], x) };
                }
            }
        }
        sums[..T].copy_from_slice(&local);
    }
}
