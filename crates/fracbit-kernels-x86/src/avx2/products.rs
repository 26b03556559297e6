//! From expanded int8 tiles to outputs: one token in registers, several through a buffer (see
//! [`many`]).

use super::{
    many,
    narrow::{Ahead, Narrow, last_row},
    orders::Order,
    *,
};
use fracbit_kernels::{Args, Block, Ints};

/// What is added to weights for `vpdpbusd`: their sign bit, turned.
const BIAS: u8 = 128;

/// The microkernel of every expander, with the instructions of [`AvxVnni`] or without them.
///
/// # Safety
/// The processor has the features of [`Avx2`], with `VNNI` of [`AvxVnni`]; `args.table` was built
/// for `E` and `args.codebook`.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn strips<E: Narrow, const VNNI: bool>(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    assert_eq!(out.len(), args.out_len(), "one vector per strip and token");
    const { assert!(E::TILE_BYTES == E::Many::TILE_BYTES, "expanders of the same codes") };
    assert_eq!(args.tile_bytes, E::TILE_BYTES, "the microkernel of this tile size");
    // SAFETY: promised by the caller.
    unsafe {
        if args.tokens == 1 {
            for_each_strip::<E, VNNI>(args, out, one_token::<E, VNNI>);
        } else if args.tokens < many::from::<E::Order, VNNI>() {
            for_each_strip::<E, VNNI>(args, out, many::tokens::<E, VNNI>);
        } else {
            for_each_strip::<E::Many, VNNI>(args, out, many::tokens::<E::Many, VNNI>);
        }
    }
}

/// Runs `microkernel` on every strip.
///
/// # Safety
/// As [`strips`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn for_each_strip<E: Narrow, const VNNI: bool>(
    args: &Args<'_>,
    out: &mut [f32],
    microkernel: unsafe fn(&E, &Args<'_>, usize, &mut [f32]),
) {
    // SAFETY: the table fits by the caller's promise.
    let e = unsafe { E::new(args.table, if VNNI { BIAS } else { 0 }) };
    for strip in 0..args.strips {
        // SAFETY: promised by the caller; the strip exists.
        unsafe { microkernel(&e, args, strip, &mut out[strip * TILE_ROWS..]) };
    }
}

/// Adds the products of bytes, the first ones unsigned. `VNNI`: exact for all; without it the sum
/// of two products must fit 16 bits.
///
/// # Safety
/// `VNNI`: the processor has the features of [`AvxVnni`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn dot<const VNNI: bool>(mut sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    if VNNI {
        // Not by its intrinsic: that would want a function of its own features around it, and so a
        // second copy of all these. SAFETY: reads and writes registers; the processor has it, as
        // promised by the caller.
        unsafe {
            std::arch::asm!("{{vex}} vpdpbusd {}, {}, {}", inout(ymm_reg) sum, in(ymm_reg) unsigned, in(ymm_reg) signed,
                options(pure, nomem, nostack, preserves_flags));
        }
        return sum;
    }
    let pairs = _mm256_maddubs_epi16(unsigned, signed);
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Entries of a codebook, or what meets them, with the signs of entries: `index` is that of the
/// expander. A bias of 128 stays one: bytes are negated modulo 256.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn with_signs<E: Narrow>(entries: __m256i, index: [__m256i; 2]) -> __m256i {
    if E::SIGNED { _mm256_sign_epi8(entries, signs_of::<E>(index)) } else { entries }
}

/// Bytes with the signs of entries, zero at most where these are.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn signs_of<E: Narrow>(index: [__m256i; 2]) -> __m256i {
    if E::SIGNS_SUFFICE { index[0] } else { _mm256_or_si256(index[0], _mm256_set1_epi8(1)) }
}

/// Accumulators to the sums of rows 0..8 and 8..16.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn by_rows<O: Order>(sums: &[__m256i; 4]) -> [__m256i; 2] {
    if O::GROUPS == 2 {
        return [sums[0], sums[1]];
    }
    // The two halves of 64-bit lanes; `vphaddd` leaves rows 0, 1, 4, 5 and 2, 3, 6, 7.
    let both = |a, b| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(a, b));
    [both(sums[0], sums[1]), both(sums[2], sums[3])]
}

/// The activations of the call.
#[inline]
pub(super) fn activations<'a>(args: &Args<'a>) -> &'a [i8] {
    let Ints::I8(x) = args.x else { unreachable!("a narrow microkernel has narrow activations") };
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

pub(super) use vectors;

/// Codebooks of a block's groups, where the expander wants them.
///
/// # Safety
/// The processor has the features of [`Avx2`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn books_of<E: Narrow>(
    e: &E,
    args: &Args<'_>,
    strip: usize,
    block: &Block,
) -> [__m256i; 4] {
    if !E::BOOKS {
        return [_mm256_setzero_si256(); 4];
    }
    let scales = &args.scales[(strip * args.groups + block.group) * TILE_ROWS..][..TILE_ROWS];
    // SAFETY: sixteen scales.
    unsafe { e.books(scales.as_ptr()) }
}

/// Tiles whose indices are made before their weights, with [`Ahead::Chunk`].
pub(super) const CHUNK: usize = 4;

/// # Safety
/// As [`strips`]; lengths as in `Args`; `strip` exists.
#[target_feature(enable = "avx2,f16c")]
unsafe fn one_token<E: Narrow, const VNNI: bool>(e: &E, args: &Args<'_>, strip: usize, out: &mut [f32]) {
    let x = activations(args).as_ptr();
    let codes = args.codes[strip * args.stride..].as_ptr();
    let reads = crate::reads::Reads::of_machine();
    let mut inner = [_mm256_setzero_ps(); 2];
    let mut tile_ahead = [[_mm256_setzero_si256(); 2]; 8];
    let mut chunk = [[[_mm256_setzero_si256(); 8]; CHUNK]; 2];
    if E::AHEAD == Ahead::Tile {
        // SAFETY: there is a first tile.
        unsafe {
            let last = last_row::<E>(codes);
            vectors!(I => { tile_ahead[I] = e.index::<I>(codes, last); });
        }
    }
    for (index, block) in args.blocks.iter().enumerate() {
        let mut sums = [_mm256_setzero_si256(); 4];
        // SAFETY: the features are here.
        let books = unsafe { books_of(e, args, strip, block) };
        let end = block.start + block.tiles;
        let at_once = if E::AHEAD == Ahead::Chunk { CHUNK } else { block.tiles };
        for start in (block.start..end).step_by(at_once) {
            let tiles = start..end.min(start + at_once);
            if E::AHEAD == Ahead::Chunk {
                for (i, tile) in tiles.clone().enumerate() {
                    // SAFETY: tiles of the block are inside `codes`.
                    unsafe {
                        let code = codes.add(tile * E::TILE_BYTES);
                        reads.ask(code, E::TILE_BYTES);
                        let last = last_row::<E>(code);
                        vectors!(I => {
                            let [first, second] = e.index::<I>(code, last);
                            chunk[0][i][I] = first;
                            if E::SECOND {
                                chunk[1][i][I] = second;
                            }
                        });
                    }
                }
            }
            for (i, tile) in tiles.enumerate() {
                // SAFETY: tiles of the block are inside `codes` and `x`, and there is room for a
                // tile behind the last.
                unsafe {
                    let code = codes.add((tile + usize::from(E::AHEAD == Ahead::Tile)) * E::TILE_BYTES);
                    let mut last = 0;
                    if E::AHEAD != Ahead::Chunk {
                        reads.ask(code, E::TILE_BYTES);
                        last = last_row::<E>(code);
                    }
                    let x = x.add(16 * tile);
                    vectors!(I => {
                        let index = match E::AHEAD {
                            Ahead::None => e.index::<I>(code, last),
                            Ahead::Tile => std::mem::replace(&mut tile_ahead[I], e.index::<I>(code, last)),
                            Ahead::Chunk => [chunk[0][i][I], chunk[usize::from(E::SECOND)][i][I]],
                        };
                        let entries = e.weights_by::<I>(index, &books);
                        let (piece, group) = E::Order::PLACES[I];
                        let x = E::Order::piece(x, piece);
                        let sum = &mut sums[group];
                        *sum = if VNNI {
                            dot::<true>(*sum, with_signs::<E>(entries, index), x)
                        } else if E::MAGNITUDES {
                            // Their signs go to the activations, which spares making magnitudes of
                            // those.
                            dot::<false>(*sum, entries, with_signs::<E>(x, index))
                        } else {
                            let w = with_signs::<E>(entries, index);
                            // Several vectors share the magnitudes of activations.
                            dot::<false>(*sum, _mm256_abs_epi8(x), _mm256_sign_epi8(w, x))
                        };
                    });
                }
            }
        }
        let sums = by_rows::<E::Order>(&sums);
        // SAFETY: 16 scales for every group, 16 outputs.
        unsafe { finish::<VNNI>(args, (strip, index, 0), &sums, &mut inner, out) };
    }
}

/// Takes a block's sums of `(strip, block, token)` to `inner`, and that to `out` where the block
/// closes its weight scale.
///
/// # Safety
/// As [`strips`]; lengths as in `Args`; `out` has 16 values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn finish<const VNNI: bool>(
    args: &Args<'_>,
    (strip, index, token): (usize, usize, usize),
    sums: &[__m256i; 2],
    inner: &mut [__m256; 2],
    out: &mut [f32],
) {
    let block = &args.blocks[index];
    let place = token * args.blocks.len() + index;
    let scale = _mm256_set1_ps(args.block_scales[place]);
    let start = _mm256_set1_epi32(if VNNI { args.block_starts[place] } else { 0 });
    let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..][..TILE_ROWS].as_ptr();
    let out = out[..TILE_ROWS].as_mut_ptr();
    for half in 0..2 {
        let sum = _mm256_add_ps(
            inner[half],
            _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sums[half], start)), scale),
        );
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
