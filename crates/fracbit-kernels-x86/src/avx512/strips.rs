//! From tiles to outputs: up to eight tokens through registers; more go through [`super::panel`]
//! or, where there is AMX, [`super::tiles`], five to eight then through [`super::even_odd`].

#![expect(clippy::needless_range_loop, reason = "strips and tokens index several arrays at once")]

use super::{
    even_odd::even_odd,
    expand::{Expand, regrouped},
    panel::panels,
    tiles::tiles,
    *,
};
use crate::reads::Reads;
use fracbit_kernels::{Args, Ints, PANEL_FROM};

/// The microkernel of every scheme: expander `E` and the shared dot products.
///
/// # Safety
/// The processor has the features of [`Avx512`]; `args.table` was built for `E` and
/// `args.codebook`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn strips<E: Expand>(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    assert_eq!(out.len(), args.out_len(), "one vector per strip and token");
    // SAFETY: the table fits by the caller's promise.
    let expander = unsafe { E::new(args) };
    // SAFETY: lengths are those that `Args` states.
    unsafe {
        match (args.panel, args.tokens) {
            (Some(panel), _) if !E::WIDE && args.interleave == Some(Interleave::EvenOdd) => {
                even_odd(&expander.signed(), args, panel, out)
            }
            (Some(panel), _) => panels(&expander, args, panel, out),
            (None, _) if !E::WIDE && args.interleave == Some(Interleave::Rows) => {
                tiles(&expander.signed(), args, out)
            }
            (None, 1) if E::BOUND && args.strips.is_multiple_of(2) && Reads::of_machine().strips == 2 => {
                one_token::<E, 2>(&expander, args, out)
            }
            (None, 1) => one_token::<E, 1>(&expander, args, out),
            (None, 2) => in_eights::<E, 2>(&expander, args, out),
            (None, 3 | 4) => in_eights::<E, 4>(&expander, args, out),
            (None, 5 | 6) => in_eights::<E, 6>(&expander, args, out),
            (None, _) => {
                assert!(args.tokens < PANEL_FROM, "more tokens come as panels");
                if E::IN_EIGHTS < 8 {
                    few_tokens(&expander, args, out);
                } else {
                    in_eights::<E, 8>(&expander, args, out);
                }
            }
        }
    }
}

/// Start of the activations and bytes from a token to the next.
fn bytes_of(x: Ints<'_>, stride: usize) -> (*const u8, usize) {
    match x {
        Ints::I8(x) => (x.as_ptr().cast(), stride),
        Ints::I16(x) => (x.as_ptr().cast(), 2 * stride),
    }
}

/// Vectors of an expanded tile, which is also the number of 4-byte pieces of its activations.
pub(super) const fn vectors<E: Expand>() -> usize {
    2 * E::PIECES
}

/// Four (two) products per lane added to `sum`: exact, by the ranges at `BLOCK_TILES` and
/// `WIDE_BLOCK_TILES`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn dot<const WIDE: bool>(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
    if WIDE { _mm512_dpwssd_epi32(sum, w, x) } else { _mm512_dpbusd_epi32(sum, w, x) }
}

/// `inner + sum * scale`, rounded twice as `Args` prescribes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn finish(inner: __m512, sum: __m512i, scale: f32) -> __m512 {
    _mm512_add_ps(inner, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale)))
}

/// `out + inner * scales`, lanes put in the order of rows.
///
/// # Safety
/// `scales` and `out` point to 16 values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn close(inner: __m512, scales: *const half::f16, out: *mut f32) {
    // SAFETY: promised by the caller.
    unsafe {
        let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
        let order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        let scaled = _mm512_permutexvar_ps(order, _mm512_mul_ps(inner, scales));
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), scaled));
    }
}

/// Keeps the compiler from using `later` before `first` is there. No instruction: the order in
/// which independent work of tiles is mixed decides how much of it the processor does at once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn then(first: __m512i, later: &mut __m512i) {
    // SAFETY: an empty statement.
    unsafe {
        std::arch::asm!("/* {} {} */", in(zmm_reg) first, inout(zmm_reg) *later, options(pure, nomem, nostack, preserves_flags));
    }
}

/// Asks for the codes of the block behind `args.blocks[index]`, or of the first one of the strips
/// behind these: while all tokens meet this block, the processor forgets their stream.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) fn ask_next(args: &Args<'_>, index: usize) {
    let (codes, bytes) = behind(args, index);
    for at in (0..args.strips).flat_map(|strip| planes(args).map(move |plane| strip * args.stride + plane)) {
        for line in (0..bytes).step_by(64) {
            _mm_prefetch::<_MM_HINT_T1>(codes.wrapping_add(at + line).cast());
        }
    }
}

/// Where the pieces of a tile are, from the first on.
pub(super) fn planes(args: &Args<'_>) -> impl Iterator<Item = usize> {
    let plane = args.plane;
    (0..args.pieces()).map(move |nth| nth * plane)
}

/// Where the first strip has the codes that [`ask_next`] asks for, and how many bytes of them every
/// strip has, in each of its [`planes`].
pub(super) fn behind(args: &Args<'_>, index: usize) -> (*const u8, usize) {
    let (at, tiles) = match args.blocks.get(index + 1) {
        Some(next) => (next.start * args.tile_bytes, next.tiles),
        None => (args.strips * args.stride, args.blocks[0].tiles),
    };
    (args.codes.as_ptr().wrapping_add(at), tiles * args.tile_bytes)
}

/// Eight bytes in every lane, straight from memory: the compiler would load them and broadcast them
/// apart, which on Intel's processors takes the one unit for shuffles across lanes.
///
/// # Safety
/// Eight bytes are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn broadcast(at: *const i64) -> __m512i {
    let out;
    // SAFETY: promised by the caller.
    unsafe {
        std::arch::asm!("vpbroadcastq {}, [{}]", out(zmm_reg) out, in(reg) at, options(pure, readonly, nostack, preserves_flags));
    }
    out
}

/// A token's eight bytes at `x + at` meet the weights of both halves of the rows: one statement,
/// since the compiler would load what all tokens have before the first product, and put sums aside
/// for it.
///
/// # Safety
/// Eight bytes are readable at `x + at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn meet<E: Expand>(x: *const u8, at: usize, [low, high]: [__m512i; 2], sums: &mut [__m512i; 2]) {
    let [first, second] = sums;
    let _eight: __m512i;
    macro_rules! products {
        ($dot:literal) => {
            std::arch::asm!(
                "vpbroadcastq {eight}, [{x} + {at}]",
                concat!($dot, " {first}, {low}, {eight}"),
                concat!($dot, " {second}, {high}, {eight}"),
                x = in(reg) x,
                at = in(reg) at,
                eight = out(zmm_reg) _eight,
                low = in(zmm_reg) low,
                high = in(zmm_reg) high,
                first = inout(zmm_reg) *first,
                second = inout(zmm_reg) *second,
                options(pure, readonly, nostack, preserves_flags)
            )
        };
    }
    // SAFETY: promised by the caller.
    unsafe {
        if E::WIDE {
            products!("vpdpwssd");
        } else {
            products!("vpdpbusd");
        }
    }
}

/// `S` strips side by side: they share the activations, and their codes are separate streams for
/// the prefetcher of the processor.
///
/// # Safety
/// As [`strips`]; lengths as in `Args`; the number of strips is a multiple of `S`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn one_token<E: Expand, const S: usize>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    // SAFETY: there is a first tile, and room for one behind the last.
    let mut mid: [E::Mid; S] =
        std::array::from_fn(|s| unsafe { e.begin(args.codes[s * args.stride..].as_ptr()) });
    for first in (0..args.strips).step_by(S) {
        // SAFETY: promised by the caller.
        unsafe { side_by_side::<E, S>(e, args, first, &mut mid, out) };
    }
}

/// Strips `first..first + S`, whose first tiles are begun in `mid`; leaves those of the next strips
/// there, if there are any.
///
/// # Safety
/// As [`one_token`]; strips `first..first + S` exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn side_by_side<E: Expand, const S: usize>(
    e: &E,
    args: &Args<'_>,
    first: usize,
    mid: &mut [E::Mid; S],
    out: &mut [f32],
) {
    let (x, _) = bytes_of(args.x, args.x_stride);
    let zero = _mm512_setzero_si512();
    // Even and odd bytes of 16.
    let even = _mm512_set1_epi64(0x0E0C_0A08_0604_0200);
    let odd = _mm512_set1_epi64(0x0F0D_0B09_0705_0301);
    // The two halves of 64-bit lanes, rows in the order `LANES`.
    let left = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
    let right = _mm512_add_epi32(left, _mm512_set1_epi32(1));
    let codes: [*const u8; S] = std::array::from_fn(|s| args.codes[(first + s) * args.stride..].as_ptr());
    // What follows a strip's last tile: the next strip's first, or the room behind the last.
    let after: [*const u8; S] = std::array::from_fn(|s| {
        let next = first + S + s;
        if next < args.strips {
            args.codes[next * args.stride..].as_ptr()
        } else {
            args.codes[(first + s) * args.stride + args.tiles * args.tile_bytes..].as_ptr()
        }
    });
    let reads = Reads::of_machine();
    let mut inner = [_mm512_setzero_ps(); S];
    // A copy, which stays in registers.
    let mut current = *mid;
    for (i, block) in args.blocks.iter().enumerate() {
        // Two chains for each half, so that the latency of the dot product does not bind.
        let mut sums = [[[zero; 2]; 2]; S];
        let scales: [_; S] = std::array::from_fn(|s| {
            args.scales[((first + s) * args.groups + block.group) * TILE_ROWS..][..TILE_ROWS].as_ptr()
        });
        // SAFETY: `Args` has 16 scales for every group.
        let books: [_; S] = std::array::from_fn(|s| unsafe { e.books(scales[s]) });
        for tile in block.start..block.start + block.tiles {
            // SAFETY: tiles of the block are inside `codes` and `x`.
            unsafe {
                let x = x.add(tile * 8 * E::PIECES).cast::<i64>();
                let mut pieces = [zero; 4];
                for p in 0..E::PIECES {
                    pieces[p] = if E::SPLIT {
                        let both = _mm512_broadcast_i32x4(_mm_loadu_si128(x.cast()));
                        _mm512_shuffle_epi8(both, if p == 0 { even } else { odd })
                    } else {
                        broadcast(x.add(p))
                    };
                }
                for s in 0..S {
                    let last = tile + 1 == args.tiles;
                    let code = if last { after[s] } else { codes[s].add((tile + 1) * args.tile_bytes) };
                    e.ask(reads, code, tile, args.tile_bytes);
                    let next = e.begin(code);
                    let weights = e.end_by(current[s], books[s]);
                    current[s] = next;
                    for p in 0..E::PIECES {
                        for half in 0..2 {
                            let sum = &mut sums[s][half][p % 2];
                            *sum = if E::WIDE {
                                dot::<true>(*sum, weights[half][p], pieces[p])
                            } else {
                                dot::<false>(*sum, weights[half][p], pieces[p])
                            };
                        }
                    }
                }
            }
        }
        let start = _mm512_set1_epi32(args.block_starts[i]);
        for s in 0..S {
            let low = _mm512_add_epi32(sums[s][0][0], sums[s][0][1]);
            let high = _mm512_add_epi32(sums[s][1][0], sums[s][1][1]);
            let left = _mm512_permutex2var_epi32(low, left, high);
            let right = _mm512_permutex2var_epi32(low, right, high);
            let sum = _mm512_add_epi32(_mm512_add_epi32(left, right), start);
            inner[s] = finish(inner[s], sum, args.block_scales[i]);
            if block.closes {
                let out = out[(first + s) * TILE_ROWS..].as_mut_ptr();
                // SAFETY: 16 scales, see above, and `out` has 16 values for every strip.
                unsafe { close(inner[s], scales[s], out) };
                inner[s] = _mm512_setzero_ps();
            }
        }
    }
    *mid = current;
}

/// Up to eight tokens: each tile is expanded once and meets all of them in registers. Surplus
/// tokens repeat the last one and are dropped.
///
/// # Safety
/// As [`strips`]; lengths as in `Args`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn few_tokens<E: Expand>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    const T: usize = 8;
    let (x, stride) = bytes_of(args.x, args.x_stride);
    let reads = Reads::of_machine();
    let token = |t: usize| t.min(args.tokens - 1);
    // SAFETY: every token's activations are inside `x`.
    let rows: [*const u8; T] = std::array::from_fn(|t| unsafe { x.add(token(t) * stride) });
    for strip in 0..args.strips {
        let codes = args.codes[strip * args.stride..].as_ptr();
        let scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
        let mut inner = [_mm512_setzero_ps(); T];
        // SAFETY: `Args` has 16 scales for every group.
        let books = |i: usize| unsafe { e.books(scales.add(args.blocks[i].group * TILE_ROWS)) };
        // Three tiles are at work at once: the codes of one are fetched, those of the one before it
        // become weights, and those of the one before that meet the tokens. SAFETY: there is a
        // first tile, and room for one behind the last.
        let (mut weights, mut mid) =
            unsafe { (e.regroup_by(e.begin(codes), books(0)), e.begin(codes.add(args.tile_bytes))) };
        for (i, block) in args.blocks.iter().enumerate() {
            let place = |t: usize| token(t) * args.blocks.len() + i;
            let mut sums = [_mm512_setzero_si512(); T];
            let mut scaled = books(i);
            let end = block.start + block.tiles;
            for tile in block.start..end {
                if tile + 1 == end && i + 1 < args.blocks.len() {
                    scaled = books(i + 1);
                }
                // SAFETY: tiles of the block are inside `codes` and `x`, and there is room for a
                // tile behind the last.
                unsafe {
                    let code = codes.add(args.tiles.min(tile + 2) * args.tile_bytes);
                    e.ask(reads, code, tile, args.tile_bytes);
                    let meet = |v: usize, weights: &[__m512i; 8], sums: &mut [__m512i; T]| {
                        for t in 0..T {
                            let x = rows[t].add(4 * (tile * vectors::<E>() + v)).cast::<i32>();
                            let x = _mm512_set1_epi32(x.read_unaligned());
                            sums[t] = if E::WIDE {
                                dot::<true>(sums[t], weights[v], x)
                            } else {
                                dot::<false>(sums[t], weights[v], x)
                            };
                        }
                    };
                    let (half, parts) = (vectors::<E>() / 2, E::parts(&mut mid));
                    let each = parts.len() / half;
                    for v in 0..half {
                        meet(v, &weights, &mut sums);
                        parts[v * each..][..each].iter_mut().for_each(|part| then(sums[0], part));
                    }
                    let next = e.regroup_by(mid, scaled);
                    then(next[0], &mut weights[half]);
                    for v in half..vectors::<E>() - 1 {
                        meet(v, &weights, &mut sums);
                    }
                    mid = e.begin(code);
                    let last = vectors::<E>() - 1;
                    then(E::parts(&mut mid)[0], &mut weights[last]);
                    meet(last, &weights, &mut sums);
                    weights = next;
                }
            }
            for t in 0..T {
                let start = _mm512_set1_epi32(args.block_starts[place(t)]);
                let sum = if E::WIDE { sums[t] } else { _mm512_add_epi32(sums[t], start) };
                inner[t] = finish(inner[t], sum, args.block_scales[place(t)]);
            }
            if block.closes {
                for t in 0..args.tokens {
                    let out = out[args.out_at(strip, t)..].as_mut_ptr();
                    // SAFETY: `Args` has 16 scales for every group and `out` 16 values for every
                    // strip and token.
                    unsafe { close(inner[t], scales.add(block.group * TILE_ROWS), out) };
                }
                inner = [_mm512_setzero_ps(); T];
            }
        }
    }
}

/// As [`few_tokens`], but rows keep 64-bit lanes to themselves: tiles are not regrouped, and every
/// token has two vectors of sums, which also hide the latency of products better. The faster way
/// while registers hold these: up to [`Expand::IN_EIGHTS`] tokens.
///
/// # Safety
/// As [`strips`]; lengths as in `Args`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn in_eights<E: Expand, const T: usize>(e: &E, args: &Args<'_>, out: &mut [f32]) {
    let (x, stride) = bytes_of(args.x, args.x_stride);
    let reads = Reads::of_machine();
    let token = |t: usize| t.min(args.tokens - 1);
    // SAFETY: every token's activations are inside `x`.
    let rows: [*const u8; T] = std::array::from_fn(|t| unsafe { x.add(token(t) * stride) });
    let zero = _mm512_setzero_si512();
    for strip in 0..args.strips {
        let codes = args.codes[strip * args.stride..].as_ptr();
        let scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
        let mut inner = [_mm512_setzero_ps(); T];
        // SAFETY: there is a first tile.
        let mut mid = unsafe { e.begin(codes) };
        for (i, block) in args.blocks.iter().enumerate() {
            // SAFETY: `Args` has 16 scales for every group.
            let books = unsafe { e.books(scales.add(block.group * TILE_ROWS)) };
            let mut sums = [[zero; 2]; T];
            for tile in block.start..block.start + block.tiles {
                // SAFETY: tiles of the block are inside `codes` and `x`, and there is room for a
                // tile behind the last.
                unsafe {
                    let code = codes.add((tile + 1) * args.tile_bytes);
                    e.ask(reads, code, tile, args.tile_bytes);
                    let [mut low, high] = e.eights(mid, books);
                    // Units that multiply take the oldest instructions first, and products of all
                    // tokens are many: left behind them, the hashes of the next tile would wait,
                    // and then everything for these. Two products and no hash keep nothing waiting.
                    mid = e.begin(code);
                    if T > 2 || !E::BOUND {
                        E::parts(&mut mid).iter().for_each(|part| then(*part, &mut low[0]));
                    }
                    for p in 0..E::PIECES {
                        for t in 0..T {
                            meet::<E>(rows[t], 8 * (tile * E::PIECES + p), [low[p], high[p]], &mut sums[t]);
                        }
                    }
                }
            }
            for t in 0..T {
                let place = token(t) * args.blocks.len() + i;
                let start = _mm512_set1_epi32(args.block_starts[place]);
                let [left, right, ..] = regrouped(sums[t].map(|half| [half; 4]), 1);
                let sum = _mm512_add_epi32(_mm512_add_epi32(left, right), start);
                inner[t] = finish(inner[t], sum, args.block_scales[place]);
            }
            if block.closes {
                for t in 0..args.tokens {
                    let out = out[args.out_at(strip, t)..].as_mut_ptr();
                    // SAFETY: `Args` has 16 scales for every group and `out` 16 values for every
                    // strip and token.
                    unsafe { close(inner[t], scales.add(block.group * TILE_ROWS), out) };
                }
                inner = [_mm512_setzero_ps(); T];
            }
        }
    }
}
