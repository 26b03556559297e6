//! Several tokens: a block of a strip is expanded to a buffer, then met by all of them.
//!
//! `vpmaddubsw` wants magnitudes of weights and activations with their signs. `vpsignb` makes
//! these, but runs in the units that multiply. Many tokens have `n`, which is -1 where a weight `w`
//! is negative and else 0, and sum `|w| (x ^ n)`. As `x ^ -1 = -x - 1`, that is less than the sum
//! of `w x` by the magnitudes of all negative weights, whatever `x` is: sums start at these, once
//! for all tokens. `x ^ n` is at most 128 in magnitude and two products are at most 2 * 127 * 128 =
//! 32512, so that nothing saturates; the sum of a block fits 32 bits by the ranges at
//! `BLOCK_TILES`.

use super::{
    narrow::{Ahead, Narrow, last_row},
    orders::Order,
    products::{activations, books_of, by_rows, dot, finish, signs_of, vectors, with_signs},
    *,
};
use fracbit_kernels::{Args, BLOCK_TILES, MAX_TOKENS};
use std::mem::MaybeUninit;

/// Tokens from which on an exclusive or turns activations.
const TURNED: usize = 6;

/// Tokens from which on [`Narrow::Many`] expands: products gain more there than expanding loses.
pub(super) const fn from<O: Order, const VNNI: bool>() -> usize {
    if O::SHUFFLED {
        8
    } else if VNNI {
        64
    } else {
        16
    }
}

/// What each way of [`all_tokens`] wants of weights.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn factors<E: Narrow, const VNNI: bool>(entries: __m256i, index: [__m256i; 2], turn: bool) -> [__m256i; 2] {
    let negative = |v| _mm256_cmpgt_epi8(_mm256_setzero_si256(), v);
    if !VNNI && E::MAGNITUDES {
        return [entries, if turn { negative(index[0]) } else { signs_of::<E>(index) }];
    }
    let w = with_signs::<E>(entries, index);
    if !VNNI && turn { [_mm256_abs_epi8(w), negative(w)] } else { [w, w] }
}

/// From [`TURNED`] tokens on, the exclusive or of the module turns activations, except with `VNNI`:
/// no constant, since every expander would be compiled for both.
///
/// # Safety
/// The processor has the features of [`Avx2`], with `VNNI` of [`AvxVnni`]; lengths as in `Args`;
/// `strip` exists.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn tokens<E: Narrow, const VNNI: bool>(
    e: &E,
    args: &Args<'_>,
    strip: usize,
    out: &mut [f32],
) {
    const { assert!(E::SIGNED || !E::MAGNITUDES, "magnitudes have signs in their index") };
    let turn = !VNNI && args.tokens >= TURNED;
    let codes = args.codes[strip * args.stride..].as_ptr();
    let reads = crate::reads::Reads::of_machine();
    // What `factors` gives, in two arrays; before that both indices, where those come first for one
    // token, too.
    let unset = [[MaybeUninit::<__m256i>::uninit(); 8]; BLOCK_TILES];
    let (mut sizes, mut signs) = (unset, unset);
    let mut inner = [MaybeUninit::uninit(); MAX_TOKENS];
    let inner = zeros(&mut inner[..args.tokens]);
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
                    if E::AHEAD != Ahead::Chunk {
                        let of = factors::<E, VNNI>(e.weights_by::<I>(index, &books), index, turn);
                        sizes[i][I].write(of[0]);
                        signs[i][I].write(of[1]);
                    } else {
                        // Two equal ones are written once.
                        sizes[i][I].write(index[0]);
                        if E::SECOND {
                            signs[i][I].write(index[1]);
                        }
                    }
                });
            }
        }
        if E::AHEAD == Ahead::Chunk {
            for (sizes, signs) in sizes.iter_mut().zip(&mut signs).take(block.tiles) {
                // SAFETY: the features are here; the indices of the block's tiles were written, the
                // second where there is one.
                unsafe {
                    vectors!(I => {
                        let index = [sizes[I], if E::SECOND { signs[I] } else { sizes[I] }];
                        let index = [index[0].assume_init(), index[1].assume_init()];
                        let of = factors::<E, VNNI>(e.weights_by::<I>(index, &books), index, turn);
                        sizes[I].write(of[0]);
                        signs[I].write(of[1]);
                    });
                }
            }
        }
        // SAFETY: both factors of every tile of the block were written.
        let [sizes, signs] =
            [&sizes, &signs].map(|of| unsafe { &*(&raw const of[..block.tiles] as *const [[__m256i; 8]]) });
        let place = (strip, index);
        // SAFETY: promised by the caller; the factors are those of the way.
        unsafe {
            // A second array is not even written where weights are one factor.
            if turn {
                all_tokens::<E::Order, false, true, false>(args, place, [sizes, signs], inner, out);
            } else if !VNNI && E::MAGNITUDES {
                all_tokens::<E::Order, false, false, false>(args, place, [sizes, signs], inner, out);
            } else {
                all_tokens::<E::Order, VNNI, false, true>(args, place, [sizes, sizes], inner, out);
            }
        }
    }
}

/// All tokens meet a block's expanded tiles: magnitudes of weights and bytes of their signs (-1
/// where they are negative, if `TURN`), or (`WHOLE`) weights twice. A function for each order of
/// weights, not for each code.
///
/// # Safety
/// As [`tokens`].
#[inline(never)]
#[target_feature(enable = "avx2,f16c")]
unsafe fn all_tokens<O: Order, const VNNI: bool, const TURN: bool, const WHOLE: bool>(
    args: &Args<'_>,
    (strip, index): (usize, usize),
    tiles: [&[[__m256i; 8]]; 2],
    inner: &mut [[__m256; 2]],
    out: &mut [f32],
) {
    let zero = _mm256_setzero_si256();
    let mut start = [zero; 4];
    if TURN {
        for (sizes, signs) in tiles[0].iter().zip(tiles[1]) {
            vectors!(I => {
                let sum = &mut start[O::PLACES[I].1];
                // SAFETY: the features are here.
                *sum = _mm256_sub_epi32(*sum, unsafe { dot::<false>(zero, sizes[I], signs[I]) });
            });
        }
    }
    let (mut token, mut sums) = (0, [[zero; 4]; 4]);
    while token < args.tokens {
        // SAFETY: `token` and the next ones are tokens.
        unsafe {
            let place = (index, token);
            let count = match (args.tokens - token, O::GROUPS) {
                (4.., 2) => groups::<O, VNNI, TURN, WHOLE, 4, 0, 2>(args, place, tiles, &start, &mut sums),
                (4.., _) => {
                    // Sixteen registers hold two sums of four tokens.
                    groups::<O, VNNI, TURN, WHOLE, 4, 0, 2>(args, place, tiles, &start, &mut sums);
                    groups::<O, VNNI, TURN, WHOLE, 4, 2, 4>(args, place, tiles, &start, &mut sums)
                }
                (2 | 3, 2) => groups::<O, VNNI, TURN, WHOLE, 2, 0, 2>(args, place, tiles, &start, &mut sums),
                (2 | 3, _) => groups::<O, VNNI, TURN, WHOLE, 2, 0, 4>(args, place, tiles, &start, &mut sums),
                (_, 2) => groups::<O, VNNI, TURN, WHOLE, 1, 0, 2>(args, place, tiles, &start, &mut sums),
                _ => groups::<O, VNNI, TURN, WHOLE, 1, 0, 4>(args, place, tiles, &start, &mut sums),
            };
            for sums in &sums[..count] {
                let out = &mut out[token * args.out_stride..][..TILE_ROWS];
                finish::<VNNI>(args, (strip, index, token), &by_rows::<O>(sums), &mut inner[token], out);
                token += 1;
            }
        }
    }
}

/// Adds the products of a block's expanded tiles and the `T` tokens from `(block, token)` on to
/// `start`, for `sums` of the groups from `FIRST` to below `END`; returns `T`.
///
/// # Safety
/// As [`all_tokens`]; the tokens exist.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn groups<
    O: Order,
    const VNNI: bool,
    const TURN: bool,
    const WHOLE: bool,
    const T: usize,
    const FIRST: usize,
    const END: usize,
>(
    args: &Args<'_>,
    (index, token): (usize, usize),
    [sizes, signs]: [&[[__m256i; 8]]; 2],
    start: &[__m256i; 4],
    sums: &mut [[__m256i; 4]; 4],
) -> usize {
    let x = activations(args)[token * args.x_stride + 16 * args.blocks[index].start..].as_ptr();
    let mut local = [*start; T];
    for (i, (sizes, signs)) in sizes.iter().zip(signs).enumerate() {
        vectors!(I => {
            let (piece, group) = O::PLACES[I];
            if FIRST <= group && group < END && group % 2 == 0 {
                let other = const { partner(&O::PLACES, I) };
                // SAFETY: the block's activations of a token; the features are here.
                unsafe {
                    let size = |w| if WHOLE && !VNNI { _mm256_abs_epi8(w) } else { w };
                    let factors = [I, other].map(|i| [size(sizes[i]), signs[i]]);
                    for (t, local) in local.iter_mut().enumerate() {
                        let x = O::piece(x.add(t * args.x_stride + 16 * i), piece);
                        [local[group], local[group + 1]] =
                            meet::<VNNI, TURN>(x, factors, [local[group], local[group + 1]]);
                    }
                }
            }
        });
    }
    for (sums, local) in sums.iter_mut().zip(local) {
        sums[FIRST..END].copy_from_slice(&local[FIRST..END]);
    }
    T
}

/// The vector of the same piece of activations as vector `i` in the other one of its two groups.
const fn partner(places: &[(usize, usize); 8], i: usize) -> usize {
    let mut k = 0;
    while k < 8 {
        if places[k].0 == places[i].0 && places[k].1 == places[i].1 ^ 1 {
            return k;
        }
        k += 1;
    }
    panic!("the groups of an order are couples")
}

/// Adds the products of a token's activations and two vectors of weights.
///
/// # Safety
/// As [`tokens`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn meet<const VNNI: bool, const TURN: bool>(
    x: __m256i,
    [[u0, n0], [u1, n1]]: [[__m256i; 2]; 2],
    [mut first, mut second]: [__m256i; 2],
) -> [__m256i; 2] {
    let signed = |signs: __m256i| if VNNI { x } else { _mm256_sign_epi8(x, signs) };
    // SAFETY: reads and writes registers; the instructions as promised by the caller.
    unsafe {
        if !TURN {
            return [dot::<VNNI>(first, u0, signed(n0)), dot::<VNNI>(second, u1, signed(n1))];
        }
        // One statement, since the compiler would mix the sums of tokens until sixteen registers do
        // not hold them.
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
            first = inout(ymm_reg) first,
            second = inout(ymm_reg) second,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [first, second]
}
