//! Several tokens: a block of a strip is expanded to a buffer, then met by all of them.
//!
//! `vpmaddubsw` wants magnitudes of weights and activations with their signs. `vpsignb` makes these, but runs in the units that multiply. Many tokens have
//! `n`, which is -1 where a weight `w` is negative and else 0, and sum `|w| (x ^ n)`. As `x ^ -1 = -x - 1`, that is less than the sum of `w x` by the
//! magnitudes of all negative weights, whatever `x` is: sums start at these, once for all tokens. `x ^ n` is at most 128 in magnitude and two products are
//! at most 2 * 127 * 128 = 32512, so that nothing saturates; the sum of a block fits 32 bits by the ranges at `BLOCK_TILES`.

use super::{
    narrow::{Ahead, Narrow, last_row},
    products::{activations, books_of, dot, finish_all, signs_of, vectors, with_signs},
    *,
};
use fracbit_kernels::{Args, BLOCK_TILES, MAX_TOKENS};

/// Tokens from which on an exclusive or turns activations.
pub(super) const TURNED: usize = 6;

/// What [`groups`] multiplies by: magnitudes of weights and -1 where they are negative (`TURN`) or bytes of their signs, or weights and nothing.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn factors<E: Narrow, const VNNI: bool, const TURN: bool>(
    entries: __m256i,
    index: [__m256i; 2],
) -> [__m256i; 2] {
    let zero = _mm256_setzero_si256();
    if !VNNI && E::MAGNITUDES {
        return [entries, if TURN { _mm256_cmpgt_epi8(zero, index[0]) } else { signs_of::<E>(index) }];
    }
    let w = with_signs::<E>(entries, index);
    if TURN { [_mm256_abs_epi8(w), _mm256_cmpgt_epi8(zero, w)] } else { [w, zero] }
}

/// `TURN`: see the module.
///
/// # Safety
/// The processor has the features of [`Avx2`], with `VNNI` of [`AvxVnni`]; lengths as in `Args`; `strip` exists.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn tokens<E: Narrow, const VNNI: bool, const TURN: bool>(
    e: &E,
    args: &Args<'_>,
    strip: usize,
    out: &mut [f32],
) {
    const { assert!(E::SIGNED || !E::MAGNITUDES, "magnitudes have signs in their index") };
    let codes = args.codes[strip * args.stride..].as_ptr();
    let reads = crate::reads::Reads::of_machine();
    let zero = _mm256_setzero_si256();
    // What `factors` gives, in two arrays; before that both indices, where those come first for one token, too.
    let (mut sizes, mut signs) = ([[zero; 8]; BLOCK_TILES], [[zero; 8]; BLOCK_TILES]);
    let mut inner = [[_mm256_setzero_ps(); 2]; MAX_TOKENS];
    for (index, block) in args.blocks.iter().enumerate() {
        // SAFETY: the features are here.
        let books = unsafe { books_of(e, args, strip, block) };
        for i in 0..block.tiles {
            // SAFETY: tiles of the block are inside `codes`.
            unsafe {
                let code = codes.add((block.start + i) * E::TILE_BYTES);
                reads.ask(code, E::TILE_BYTES);
                let last = last_row::<E>(code);
                vectors!(I => {
                    let index = e.index::<I>(code, last);
                    [sizes[i][I], signs[i][I]] = if E::AHEAD == Ahead::Chunk {
                        index
                    } else {
                        factors::<E, VNNI, TURN>(e.weights_by::<I>(index, &books), index)
                    };
                });
            }
        }
        if E::AHEAD == Ahead::Chunk {
            for (sizes, signs) in sizes.iter_mut().zip(&mut signs).take(block.tiles) {
                // SAFETY: the features are here.
                unsafe {
                    vectors!(I => {
                        let index = [sizes[I], signs[I]];
                        [sizes[I], signs[I]] = factors::<E, VNNI, TURN>(e.weights_by::<I>(index, &books), index);
                    });
                }
            }
        }
        let tiles = [&sizes[..block.tiles], &signs[..block.tiles]];
        let mut start = [zero; 4];
        if TURN {
            for (sizes, signs) in tiles[0].iter().zip(tiles[1]) {
                vectors!(I => {
                    let sum = &mut start[E::PLACES[I].1];
                    // SAFETY: the features are here.
                    *sum = _mm256_sub_epi32(*sum, unsafe { dot::<false>(zero, sizes[I], signs[I]) });
                });
            }
        }
        let mut token = 0;
        while token < args.tokens {
            let mut sums = [start; 4];
            // SAFETY: `token` and the next ones are tokens.
            let count = unsafe {
                match args.tokens - token {
                    4.. => products::<E, VNNI, TURN, 4>(args, index, token, tiles, &mut sums),
                    2 | 3 => products::<E, VNNI, TURN, 2>(args, index, token, tiles, &mut sums),
                    _ => products::<E, VNNI, TURN, 1>(args, index, token, tiles, &mut sums),
                }
            };
            // SAFETY: these are tokens.
            unsafe { finish_all::<E, VNNI>(args, (strip, index, token), &sums[..count], &mut inner, out) };
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
unsafe fn products<E: Narrow, const VNNI: bool, const TURN: bool, const T: usize>(
    args: &Args<'_>,
    index: usize,
    token: usize,
    tiles: [&[[__m256i; 8]]; 2],
    sums: &mut [[__m256i; 4]; 4],
) -> usize {
    // SAFETY: promised by the caller.
    unsafe {
        if E::GROUPS == 2 || T < 4 {
            groups::<E, VNNI, TURN, T, 0, 4>(args, index, token, tiles, sums);
        } else {
            // Sixteen registers hold two sums of four tokens.
            groups::<E, VNNI, TURN, T, 0, 2>(args, index, token, tiles, sums);
            groups::<E, VNNI, TURN, T, 2, 4>(args, index, token, tiles, sums);
        }
    }
    T
}

/// [`products`] of the vectors that go to the groups from `FIRST` to below `END`.
///
/// # Safety
/// As [`products`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn groups<
    E: Narrow,
    const VNNI: bool,
    const TURN: bool,
    const T: usize,
    const FIRST: usize,
    const END: usize,
>(
    args: &Args<'_>,
    index: usize,
    token: usize,
    [sizes, signs]: [&[[__m256i; 8]]; 2],
    sums: &mut [[__m256i; 4]; 4],
) {
    let x = activations(args)[token * args.x_stride + 16 * args.blocks[index].start..].as_ptr();
    let mut local: [[__m256i; 4]; T] = std::array::from_fn(|t| sums[t]);
    for (i, (sizes, signs)) in sizes.iter().zip(signs).enumerate() {
        vectors!(I => {
            let (piece, group) = E::PLACES[I];
            if FIRST <= group && group < END && group % 2 == 0 {
                let other = const { partner(&E::PLACES, I) };
                let factors = [I, other].map(|i| {
                    let w = sizes[i];
                    if VNNI || TURN || E::MAGNITUDES { [w, signs[i]] } else { [_mm256_abs_epi8(w), w] }
                });
                for (t, local) in local.iter_mut().enumerate() {
                    // SAFETY: the block's activations of a token; the features are here.
                    unsafe {
                        let x = E::piece(x.add(t * args.x_stride + 16 * i), piece);
                        if TURN {
                            meet(x, factors, local, group);
                        } else {
                            for (sum, [w, signs]) in local[group..].iter_mut().zip(factors) {
                                *sum = dot::<VNNI>(*sum, w, if VNNI { x } else { _mm256_sign_epi8(x, signs) });
                            }
                        }
                    }
                }
            }
        });
    }
    for (sums, local) in sums.iter_mut().zip(local) {
        sums[FIRST..END].copy_from_slice(&local[FIRST..END]);
    }
}

/// The vector of the same piece of activations as vector `i` in the group behind its own; `i` itself without one.
const fn partner(places: &[(usize, usize); 8], i: usize) -> usize {
    let mut k = 0;
    while k < 8 {
        if places[k].0 == places[i].0 && places[k].1 == places[i].1 + 1 {
            return k;
        }
        k += 1;
    }
    i
}

/// Activations of a token meet two vectors of weights: one statement, since the compiler would mix the sums of tokens until sixteen registers do
/// not hold them.
///
/// # Safety
/// The processor has AVX2.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn meet(x: __m256i, [[u0, n0], [u1, n1]]: [[__m256i; 2]; 2], sums: &mut [__m256i; 4], group: usize) {
    let [first, second] = [sums[group], sums[group + 1]];
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
            first = inout(ymm_reg) first => sums[group],
            second = inout(ymm_reg) second => sums[group + 1],
            options(pure, nomem, nostack, preserves_flags)
        );
    }
}
