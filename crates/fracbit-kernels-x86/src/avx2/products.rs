//! From expanded int8 tiles to outputs: one token in registers, several through a buffer.

use super::{
    narrow::{Narrow, apart, last_row},
    *,
};
use fracbit_kernels::{Args, BLOCK_TILES, Block, Ints};

/// The body of every expander.
///
/// # Safety
/// The processor has the features of [`Avx2`]; `args.table` was built for `E` and `args.codebook`.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn strips<E: Narrow>(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    assert_eq!(out.len(), args.strips * args.tokens * TILE_ROWS, "one vector per strip and token");
    assert_eq!(args.tile_bytes, E::TILE_BYTES, "the body of this tile size");
    // SAFETY: the table fits by the caller's promise.
    let e = unsafe { E::new(args.table) };
    for strip in 0..args.strips {
        let out = &mut out[strip * args.tokens * TILE_ROWS..][..args.tokens * TILE_ROWS];
        // SAFETY: promised by the caller; `strip` exists.
        unsafe {
            if args.tokens == 1 {
                one_token(&e, args, strip, out);
            } else {
                many_tokens(&e, args, strip, out);
            }
        }
    }
}

/// Adds the products of magnitudes and signed activations.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn dot(sum: __m256i, magnitudes: __m256i, x: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(magnitudes, x);
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Accumulators to the sums of rows 0..8 and 8..16.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn by_rows<E: Narrow>(sums: &[__m256i; 4]) -> [__m256i; 2] {
    if E::GROUPS == 2 {
        return [sums[0], sums[1]];
    }
    // The two halves of 64-bit lanes; `vphaddd` leaves rows 0, 1, 4, 5 and 2, 3, 6, 7.
    let both = |a, b| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(a, b));
    [both(sums[0], sums[1]), both(sums[2], sums[3])]
}

/// The activations of the call.
#[inline]
fn activations<'a>(args: &Args<'a>) -> &'a [i8] {
    let Ints::I8(x) = args.x else { unreachable!("a narrow body has narrow activations") };
    x
}

/// Runs `$body` with the constant `$i` for each of eight vectors: a loop might stay one.
macro_rules! vectors {
    ($i:ident => $body:block) => {
        vectors!(@ $i $body 0 1 2 3 4 5 6 7);
    };
    (@ $i:ident $body:block $($n:literal)*) => {
        $({
            const $i: usize = $n;
            $body
        })*
    };
}

/// Codebooks of a block's groups, where the expander wants them.
///
/// # Safety
/// The processor has the features of [`Avx2`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn books_of<E: Narrow>(e: &E, args: &Args<'_>, strip: usize, block: &Block) -> [__m256i; 2] {
    if !E::BOOKS {
        return [_mm256_setzero_si256(); 2];
    }
    let scales = &args.scales[(strip * args.groups + block.group) * TILE_ROWS..][..TILE_ROWS];
    // SAFETY: sixteen scales.
    unsafe { e.books(scales.as_ptr()) }
}

/// # Safety
/// As [`strips`]; lengths as in `Args`; `strip` exists.
#[target_feature(enable = "avx2,f16c")]
unsafe fn one_token<E: Narrow>(e: &E, args: &Args<'_>, strip: usize, out: &mut [f32]) {
    let x = activations(args).as_ptr();
    let codes = args.codes[strip * args.stride..].as_ptr();
    let mut inner = [_mm256_setzero_ps(); 2];
    let mut ahead = [[_mm256_setzero_si256(); 2]; 8];
    if E::AHEAD {
        // SAFETY: there is a first tile.
        unsafe {
            let last = last_row::<E>(codes);
            vectors!(I => { ahead[I] = e.index::<I>(codes, last); });
        }
    }
    for (index, block) in args.blocks.iter().enumerate() {
        let mut sums = [_mm256_setzero_si256(); 4];
        // SAFETY: the features are here.
        let books = unsafe { books_of(e, args, strip, block) };
        for tile in block.start..block.start + block.tiles {
            // SAFETY: tiles of the block are inside `codes` and `x`, and there is room for a tile behind the last.
            unsafe {
                let code = codes.add((tile + usize::from(E::AHEAD)) * E::TILE_BYTES);
                crate::stream(code, E::TILE_BYTES);
                let (last, x) = (last_row::<E>(code), x.add(16 * tile));
                vectors!(I => {
                    let next = e.index::<I>(code, last);
                    let (magnitudes, signs) = e.weights_by::<I>(if E::AHEAD { ahead[I] } else { next }, &books);
                    if E::AHEAD {
                        ahead[I] = next;
                    }
                    let x = _mm256_sign_epi8(E::piece(x, I / E::GROUPS), signs);
                    sums[I % E::GROUPS] = dot(sums[I % E::GROUPS], magnitudes, x);
                });
            }
        }
        let sums = by_rows::<E>(&sums);
        // SAFETY: 16 scales for every group, 16 outputs.
        unsafe { finish(args, (strip, index, 0), &sums, &mut inner, out) };
    }
}

/// # Safety
/// As [`strips`]; lengths as in `Args`; `strip` exists.
#[target_feature(enable = "avx2,f16c")]
unsafe fn many_tokens<E: Narrow>(e: &E, args: &Args<'_>, strip: usize, out: &mut [f32]) {
    let codes = args.codes[strip * args.stride..].as_ptr();
    let mut buffer = [[_mm256_setzero_si256(); 8]; BLOCK_TILES];
    let mut inner = [[_mm256_setzero_ps(); 2]; fracbit_kernels::MAX_TOKENS];
    for (index, block) in args.blocks.iter().enumerate() {
        // SAFETY: the features are here.
        let books = unsafe { books_of(e, args, strip, block) };
        for (i, to) in buffer[..block.tiles].iter_mut().enumerate() {
            // SAFETY: tiles of the block are inside `codes`.
            unsafe {
                let code = codes.add((block.start + i) * E::TILE_BYTES);
                crate::stream(code, E::TILE_BYTES);
                let last = last_row::<E>(code);
                vectors!(I => {
                    let (magnitudes, signs) = e.weights_by::<I>(e.index::<I>(code, last), &books);
                    to[I] = _mm256_sign_epi8(magnitudes, signs);
                });
            }
        }
        let tiles = &buffer[..block.tiles];
        let mut token = 0;
        while token < args.tokens {
            let left = args.tokens - token;
            let mut sums = [[_mm256_setzero_si256(); 4]; 4];
            // SAFETY: `token` and the next ones are tokens.
            let count = unsafe {
                if E::GROUPS == 2 && left >= 4 {
                    products::<E, 4>(args, index, token, tiles, &mut sums)
                } else if left >= 2 {
                    products::<E, 2>(args, index, token, tiles, &mut sums)
                } else {
                    products::<E, 1>(args, index, token, tiles, &mut sums)
                }
            };
            for t in token..token + count {
                let out = &mut out[t * TILE_ROWS..][..TILE_ROWS];
                let sums = by_rows::<E>(&sums[t - token]);
                // SAFETY: 16 scales for every group, 16 outputs.
                unsafe { finish(args, (strip, index, t), &sums, &mut inner[t], out) };
            }
            token += count;
        }
    }
}

/// The products of a block's expanded tiles and `T` tokens; returns `T`.
///
/// # Safety
/// As [`strips`]; tokens `token..token + T` exist.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn products<E: Narrow, const T: usize>(
    args: &Args<'_>,
    index: usize,
    token: usize,
    tiles: &[[__m256i; 8]],
    sums: &mut [[__m256i; 4]; 4],
) -> usize {
    let x = activations(args)[token * args.x_stride + 16 * args.blocks[index].start..].as_ptr();
    let mut local = [[_mm256_setzero_si256(); 4]; T];
    for (i, tile) in tiles.iter().enumerate() {
        vectors!(I => {
            let (magnitudes, signs) = apart(tile[I]);
            for (t, local) in local.iter_mut().enumerate() {
                // SAFETY: the block's activations of a token.
                let x = unsafe { E::piece(x.add(t * args.x_stride + 16 * i), I / E::GROUPS) };
                local[I % E::GROUPS] = dot(local[I % E::GROUPS], magnitudes, _mm256_sign_epi8(x, signs));
            }
        });
    }
    sums[..T].copy_from_slice(&local);
    T
}

/// Takes a block's sums of `(strip, block, token)` to `inner`, and that to `out` where the block closes its weight scale.
///
/// # Safety
/// As [`strips`]; lengths as in `Args`; `out` has 16 values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn finish(
    args: &Args<'_>,
    (strip, index, token): (usize, usize, usize),
    sums: &[__m256i; 2],
    inner: &mut [__m256; 2],
    out: &mut [f32],
) {
    let block = &args.blocks[index];
    let scale = _mm256_set1_ps(args.block_scales[token * args.blocks.len() + index]);
    let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..][..TILE_ROWS].as_ptr();
    let out = out[..TILE_ROWS].as_mut_ptr();
    for half in 0..2 {
        let sum = _mm256_add_ps(inner[half], _mm256_mul_ps(_mm256_cvtepi32_ps(sums[half]), scale));
        inner[half] = sum;
        if block.closes {
            // SAFETY: 16 scales and 16 outputs.
            unsafe {
                let scales = _mm256_cvtph_ps(_mm_loadu_si128(scales.add(8 * half).cast()));
                let out = out.add(8 * half);
                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(sum, scales)));
            }
            inner[half] = _mm256_setzero_ps();
        }
    }
}
