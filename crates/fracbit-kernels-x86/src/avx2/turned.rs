//! Many tokens without AVX-VNNI: signs of weights go to the activations by an exclusive or.
//!
//! `vpmaddubsw` wants magnitudes of weights and activations with their signs. `vpsignb` makes these, but runs in the units that multiply. With `n` -1 where a
//! weight `w` is negative and else 0, it is `|w| (x ^ n)` that is summed here. As `x ^ -1 = -x - 1`, that is less than the sum of `w x` by the magnitudes of
//! all negative weights, whatever `x` is: sums start at these, once for all tokens. `x ^ n` is at most 128 in magnitude and two products are at most
//! 2 * 127 * 128 = 32512, so that nothing saturates; the sum of a block fits 32 bits by the ranges at `BLOCK_TILES`.

use super::{
    narrow::{Narrow, last_row},
    products::{activations, books_of, dot, finish_all, vectors, with_signs},
    *,
};
use fracbit_kernels::{Args, BLOCK_TILES, MAX_TOKENS};

/// Tokens from which on this is faster than `vpsignb`.
pub(super) const FROM: usize = 16;

/// Whether tokens of expander `E` come here.
pub(super) const fn takes<E: Narrow>(tokens: usize) -> bool {
    E::GROUPS == 2 && tokens >= FROM
}

/// Magnitudes of weights, and -1 where they are negative.
type Expanded = [__m256i; 2];

/// # Safety
/// The processor has the features of [`Avx2`]; lengths as in `Args`; `strip` exists; [`takes`].
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn tokens<E: Narrow>(e: &E, args: &Args<'_>, strip: usize, out: &mut [f32]) {
    const { assert!(E::SIGNED || !E::MAGNITUDES, "magnitudes have signs in their index") };
    let codes = args.codes[strip * args.stride..].as_ptr();
    let reads = crate::reads::Reads::of_machine();
    let zero = _mm256_setzero_si256();
    let mut buffer = [[[zero; 2]; 8]; BLOCK_TILES];
    let mut inner = [[_mm256_setzero_ps(); 2]; MAX_TOKENS];
    for (index, block) in args.blocks.iter().enumerate() {
        // SAFETY: the features are here.
        let books = unsafe { books_of(e, args, strip, block) };
        let mut start = [zero; 4];
        for (i, to) in buffer[..block.tiles].iter_mut().enumerate() {
            // SAFETY: tiles of the block are inside `codes`.
            unsafe {
                let code = codes.add((block.start + i) * E::TILE_BYTES);
                reads.ask(code, E::TILE_BYTES);
                let last = last_row::<E>(code);
                vectors!(I => {
                    let index = e.index::<I>(code, last);
                    let entries = e.weights_by::<I>(index, &books);
                    to[I] = if E::MAGNITUDES {
                        // Their signs are the top bits of the index.
                        [entries, _mm256_cmpgt_epi8(zero, index[0])]
                    } else {
                        let w = with_signs::<E>(entries, index);
                        [_mm256_abs_epi8(w), _mm256_cmpgt_epi8(zero, w)]
                    };
                    let less = dot::<false>(zero, to[I][0], to[I][1]);
                    start[I % 2] = _mm256_sub_epi32(start[I % 2], less);
                });
            }
        }
        let tiles = &buffer[..block.tiles];
        let mut token = 0;
        while token < args.tokens {
            let mut sums = [start; 4];
            // SAFETY: `token` and the next ones are tokens.
            let count = unsafe {
                match args.tokens - token {
                    4.. => products::<E, 4>(args, index, token, tiles, &mut sums),
                    2 | 3 => products::<E, 2>(args, index, token, tiles, &mut sums),
                    _ => products::<E, 1>(args, index, token, tiles, &mut sums),
                }
            };
            // SAFETY: these are tokens.
            unsafe { finish_all::<E, false>(args, (strip, index, token), &sums[..count], &mut inner, out) };
            token += count;
        }
    }
}

/// Adds the products of a block's expanded tiles and `T` tokens to `sums`; returns `T`.
///
/// # Safety
/// As [`tokens`]; tokens `token..token + T` exist.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn products<E: Narrow, const T: usize>(
    args: &Args<'_>,
    index: usize,
    token: usize,
    tiles: &[[Expanded; 8]],
    sums: &mut [[__m256i; 4]; 4],
) -> usize {
    let x = activations(args)[token * args.x_stride + 16 * args.blocks[index].start..].as_ptr();
    // Of a token, the sums of two groups.
    let mut local: [[__m256i; 2]; T] = std::array::from_fn(|t| [sums[t][0], sums[t][1]]);
    for (i, tile) in tiles.iter().enumerate() {
        for (piece, pair) in tile.as_chunks::<2>().0.iter().enumerate() {
            for (t, sums) in local.iter_mut().enumerate() {
                // SAFETY: the block's activations of a token.
                unsafe { meet(E::piece(x.add(t * args.x_stride + 16 * i), piece), *pair, sums) };
            }
        }
    }
    sums.iter_mut().zip(local).for_each(|(sums, local)| sums[..2].copy_from_slice(&local));
    T
}

/// Activations of a token meet two vectors of weights: one statement, since the compiler would mix the sums of tokens until sixteen registers do
/// not hold them.
///
/// # Safety
/// The processor has AVX2.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn meet(x: __m256i, [[u0, n0], [u1, n1]]: [Expanded; 2], [first, second]: &mut [__m256i; 2]) {
    // SAFETY: reads and writes registers.
    unsafe {
        std::arch::asm!(
            "vpxor {a}, {b}, {n0}",
            "vpxor {b}, {b}, {n1}",
            "vpmaddubsw {a}, {u0}, {a}",
            "vpmaddubsw {b}, {u1}, {b}",
            "vpmaddwd {a}, {a}, {ones}",
            "vpmaddwd {b}, {b}, {ones}",
            "vpaddd {first}, {first}, {a}",
            "vpaddd {second}, {second}, {b}",
            a = out(ymm_reg) _,
            b = inout(ymm_reg) x => _,
            n0 = in(ymm_reg) n0,
            n1 = in(ymm_reg) n1,
            u0 = in(ymm_reg) u0,
            u1 = in(ymm_reg) u1,
            ones = in(ymm_reg) _mm256_set1_epi16(1),
            first = inout(ymm_reg) *first,
            second = inout(ymm_reg) *second,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
}
