//! Several tokens: a stretch of columns is expanded once and multiplied by all of them.
//!
//! Without the matrix product, a vector of weights (four rows, four columns) meets a lane of a
//! token, as for one token. With it (`i8mm`), `smmla` multiplies two rows of eight columns by two
//! tokens: weights are zipped to row pairs as they are expanded, activations come rounded in pairs
//! of tokens, and sums stay in 2 x 2 blocks until the last column.

use crate::{
    expand::{Expand, Sink},
    microkernel::{Dot, bytes_of},
    neon::*,
    one::{load_lanes, load_scales, store_lanes},
    shims,
};
use fracbit_format::{TILE, TILE_ROWS};
use fracbit_kernels::{Args, BLOCK_TILES, Block, Ints, MAX_STRIPS, MAX_TOKENS};
use half::f16;
use std::mem::MaybeUninit;

/// Tiles of a stretch: one strip of it, 16 KiB, and the activations of six tokens stay in the first
/// cache.
const STRETCH: usize = 64;
const _: () = assert!(STRETCH >= BLOCK_TILES, "a block fits a stretch");
/// Vectors of an expanded stretch of two strips, of 16-bit weights.
const VECTORS: usize = MAX_STRIPS * STRETCH * TILE / 8;
/// Pairs of tokens.
const MAX_PAIRS: usize = MAX_TOKENS / 2;

type Quad = MaybeUninit<float32x4_t>;

/// Writes the vectors of a tile.
struct Store<const PAIRS: bool> {
    to: *mut i8,
    /// Vectors of an even quad of columns, which wait for the odd one.
    held: [int8x16_t; 4],
}

impl<const PAIRS: bool> Sink for Store<PAIRS> {
    const EXACT: bool = true;

    #[inline(always)]
    fn put<const Q: i32, const G: usize>(&mut self, w: int8x16_t) {
        let q = Q.unsigned_abs() as usize;
        if !PAIRS {
            // SAFETY: a tile has 16 vectors.
            return unsafe { vst1q_s8(self.to.add(16 * (4 * q + G)), w) };
        }
        if q.is_multiple_of(2) {
            self.held[G] = w;
            return;
        }
        let (even, odd) = (vreinterpretq_s32_s8(self.held[G]), vreinterpretq_s32_s8(w));
        let (low, high) = (vzip1q_s32(even, odd), vzip2q_s32(even, odd));
        // SAFETY: eight pairs of rows of two octets of columns.
        unsafe {
            let to = self.to.add(16 * (4 * G + q / 2));
            vst1q_s8(to, vreinterpretq_s8_s32(low));
            vst1q_s8(to.add(32), vreinterpretq_s8_s32(high));
        }
    }

    #[inline(always)]
    fn wide<const C: usize, const ODD: usize>(&mut self, w: int16x8_t) {
        // SAFETY: sixteen columns of two vectors.
        unsafe { vst1q_s16(self.to.cast::<i16>().add(16 * C + 8 * ODD), w) }
    }
}

/// Neighbouring blocks of at most [`STRETCH`] tiles, all strips expanded.
struct Stretch<'a> {
    args: &'a Args<'a>,
    /// Index of the first block.
    first: usize,
    blocks: &'a [Block],
    /// First tile.
    start: usize,
    tiles: usize,
    /// Expanded weights, `(strip, tile, ...)`.
    weights: *const i8,
    /// True when the first block opens a weight scale.
    fresh: bool,
}

impl Stretch<'_> {
    /// Scale of the activations of `token` in block `i` of the stretch.
    #[inline(always)]
    fn block_scale(&self, token: usize, i: usize) -> f32 {
        self.args.block_scales[token * self.args.blocks.len() + self.first + i]
    }

    /// First activation of `token`.
    #[inline(always)]
    fn x(&self, token: usize, size: usize) -> *const i8 {
        bytes_of(self.args).wrapping_add((token * self.args.x_stride + 16 * self.start) * size)
    }

    /// Scales of a strip in a block, in the order of lanes.
    #[inline(always)]
    fn scales(&self, strip: usize, block: &Block) -> [float32x4_t; 4] {
        let at = (strip * self.args.groups + block.group) * TILE_ROWS;
        // SAFETY: `Args` has sixteen scales for every group.
        unsafe { load_scales(self.args.scales[at..at + TILE_ROWS].as_ptr()) }
    }
}

/// # Safety
/// As [`strips`](crate::microkernel::strips).
pub(crate) unsafe fn many_tokens<E: Expand, D: Dot, const PAIRS: bool>(
    e: &E,
    args: &Args<'_>,
    out: &mut [f32],
) {
    let expand = |code: *const u8, tiles: usize, scales: &[f16], to: *mut i8| {
        let scales = scales[..TILE_ROWS].as_ptr().cast::<u16>();
        let each = if E::WIDE { 2 * TILE } else { TILE };
        // SAFETY: sixteen scales; the rest is promised by the caller.
        unsafe {
            let books = if E::BOOKS {
                e.books(vld1q_u16(scales), vld1q_u16(scales.add(8)))
            } else {
                [vdupq_n_u8(0); 4]
            };
            for tile in 0..tiles {
                let mut store = Store::<PAIRS> { to: to.add(tile * each), held: [vdupq_n_s8(0); 4] };
                e.tile(code.add(tile * args.tile_bytes), &books, &mut store);
            }
        }
    };
    let kind = match (E::WIDE, PAIRS) {
        (true, _) => Kind::Wide,
        (_, true) => Kind::Paired,
        _ => Kind::Single,
    };
    // SAFETY: promised by the caller.
    unsafe { multiply::<D>(kind, args, &expand, out) }
}

/// What multiplies expanded weights.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Tokens one by one, bytes.
    Single,
    /// Tokens in pairs, bytes.
    Paired,
    /// Tokens one by one, 16-bit integers.
    Wide,
}

/// # Safety
/// As [`strips`](crate::microkernel::strips).
unsafe fn multiply<D: Dot>(
    kind: Kind,
    args: &Args<'_>,
    expand: &dyn Fn(*const u8, usize, &[f16], *mut i8),
    out: &mut [f32],
) {
    let size = if kind == Kind::Wide { 2 } else { 1 };
    let mut inner = [Quad::uninit(); MAX_STRIPS * MAX_TOKENS * 4];
    let mut total = [Quad::uninit(); MAX_STRIPS * MAX_TOKENS * 4];
    if kind == Kind::Paired {
        load_pairs(args, out, &mut total);
    }
    each_stretch(args, size, expand, &mut |stretch| {
        // SAFETY: promised by the caller.
        unsafe {
            match kind {
                Kind::Paired => paired(stretch, &mut inner, &mut total),
                Kind::Wide => wide(stretch, &mut inner, out),
                Kind::Single => single::<D>(stretch, &mut inner, out),
            }
        }
    });
    if kind == Kind::Paired {
        store_pairs(args, &total, out);
    }
}

/// Cuts the blocks into stretches and expands each.
fn each_stretch(
    args: &Args<'_>,
    size: usize,
    expand: &dyn Fn(*const u8, usize, &[f16], *mut i8),
    run: &mut dyn FnMut(&Stretch<'_>),
) {
    let mut buffer = [MaybeUninit::<int16x8_t>::uninit(); VECTORS];
    let weights = buffer.as_mut_ptr().cast::<i8>();
    let (mut first, mut fresh) = (0, true);
    while first < args.blocks.len() {
        let start = args.blocks[first].start;
        let count = args.blocks[first..].iter().take_while(|b| b.start + b.tiles - start <= STRETCH).count();
        let blocks = &args.blocks[first..first + count];
        let tiles: usize = blocks.iter().map(|b| b.tiles).sum();
        for strip in 0..args.strips {
            for block in blocks {
                let scales = &args.scales[(strip * args.groups + block.group) * TILE_ROWS..];
                let code = &args.codes[strip * args.stride + block.start * args.tile_bytes..];
                let to = (strip * tiles + block.start - start) * TILE * size;
                expand(code.as_ptr(), block.tiles, scales, weights.wrapping_add(to));
            }
        }
        run(&Stretch { args, first, blocks, start, tiles, weights, fresh });
        fresh = blocks[count - 1].closes;
        first += count;
    }
}

/// # Safety
/// The processor has the instruction set of `D`; `inner` holds the strips' and tokens' values
/// unless the stretch is fresh.
unsafe fn single<D: Dot>(s: &Stretch<'_>, inner: &mut [Quad], out: &mut [f32]) {
    for strip in 0..s.args.strips {
        let mut token = 0;
        // SAFETY: `token..token + T` are tokens; the rest is promised by the caller.
        unsafe {
            while token + 4 <= s.args.tokens {
                single_group::<D, 4>(s, strip, token, inner, out);
                token += 4;
            }
            if token + 2 <= s.args.tokens {
                single_group::<D, 2>(s, strip, token, inner, out);
                token += 2;
            }
            if token < s.args.tokens {
                single_group::<D, 1>(s, strip, token, inner, out);
            }
        }
    }
}

/// # Safety
/// As [`single`]; `token + T` is at most the number of tokens.
unsafe fn single_group<D: Dot, const T: usize>(
    s: &Stretch<'_>,
    strip: usize,
    token: usize,
    inner: &mut [Quad],
    out: &mut [f32],
) {
    let at = strip * s.args.tokens + token;
    let stride = s.args.out_stride;
    let out = out[s.args.out_at(strip, token)..][..(T - 1) * stride + TILE_ROWS].as_mut_ptr();
    let kept = inner[4 * at..][..4 * T].as_mut_ptr().cast::<[float32x4_t; 4]>();
    // SAFETY: sixteen outputs of each token.
    let mut total: [_; T] = std::array::from_fn(|t| unsafe { load_lanes(out.add(t * stride)) });
    let zero = [vdupq_n_f32(0.0); 4];
    // SAFETY: written by the stretch before, promised by the caller.
    let mut open: [_; T] = std::array::from_fn(|t| if s.fresh { zero } else { unsafe { *kept.add(t) } });
    for (i, block) in s.blocks.iter().enumerate() {
        let mut sums = [[vdupq_n_s32(0); 4]; T];
        let first = block.start - s.start;
        for tile in first..first + block.tiles {
            let w = s.weights.wrapping_add((strip * s.tiles + tile) * TILE);
            // SAFETY: the tile's columns of each token are inside `x`; a tile has 16 vectors; `D`
            // is there.
            unsafe {
                let x: [_; T] = std::array::from_fn(|t| vld1q_s8(s.x(token + t, 1).add(16 * tile)));
                macro_rules! quad {
                    ($($q:literal)*) => { $(
                        for g in 0..4 {
                            let w = vld1q_s8(w.add(16 * (4 * $q + g)));
                            for t in 0..T {
                                sums[t][g] = D::dot::<$q>(sums[t][g], w, x[t]);
                            }
                        }
                    )* };
                }
                quad!(0 1 2 3);
            }
        }
        let scales = s.scales(strip, block);
        for t in 0..T {
            let scale = s.block_scale(token + t, i);
            for g in 0..4 {
                open[t][g] = vaddq_f32(open[t][g], vmulq_n_f32(vcvtq_f32_s32(sums[t][g]), scale));
                if block.closes {
                    total[t][g] = vaddq_f32(total[t][g], vmulq_f32(open[t][g], scales[g]));
                    open[t][g] = vdupq_n_f32(0.0);
                }
            }
        }
    }
    for t in 0..T {
        // SAFETY: as for the loads.
        unsafe {
            store_lanes(out.add(t * stride), total[t]);
            kept.add(t).write(open[t]);
        }
    }
}

/// The int16 grid.
///
/// # Safety
/// `inner` holds the strips' and tokens' values unless the stretch is fresh.
unsafe fn wide(s: &Stretch<'_>, inner: &mut [Quad], out: &mut [f32]) {
    debug_assert!(matches!(s.args.x, Ints::I16(_)), "activations of the grid");
    for strip in 0..s.args.strips {
        for token in 0..s.args.tokens {
            let at = strip * s.args.tokens + token;
            let out = out[s.args.out_at(strip, token)..][..TILE_ROWS].as_mut_ptr();
            let kept = inner[4 * at..][..4].as_mut_ptr().cast::<[float32x4_t; 4]>();
            // SAFETY: sixteen outputs; `kept` was written by the stretch before unless this one is
            // fresh.
            let (mut total, mut open) =
                unsafe { (load_lanes(out), if s.fresh { [vdupq_n_f32(0.0); 4] } else { *kept }) };
            for (i, block) in s.blocks.iter().enumerate() {
                let mut sums = [vdupq_n_s32(0); 4];
                let first = 16 * (block.start - s.start);
                for col in first..first + 16 * block.tiles {
                    // SAFETY: columns of the block, of two vectors each, and their activations.
                    unsafe {
                        let w = s.weights.cast::<i16>().add(strip * s.tiles * TILE + 16 * col);
                        let (even, odd) = (vld1q_s16(w), vld1q_s16(w.add(8)));
                        let x = *s.x(token, 2).cast::<i16>().add(col);
                        sums[0] = vmlal_n_s16(sums[0], vget_low_s16(even), x);
                        sums[1] = vmlal_high_n_s16(sums[1], even, x);
                        sums[2] = vmlal_n_s16(sums[2], vget_low_s16(odd), x);
                        sums[3] = vmlal_high_n_s16(sums[3], odd, x);
                    }
                }
                let scales = s.scales(strip, block);
                let scale = s.block_scale(token, i);
                for g in 0..4 {
                    open[g] = vaddq_f32(open[g], vmulq_n_f32(vcvtq_f32_s32(sums[g]), scale));
                    if block.closes {
                        total[g] = vaddq_f32(total[g], vmulq_f32(open[g], scales[g]));
                        open[g] = vdupq_n_f32(0.0);
                    }
                }
            }
            // SAFETY: as for the loads.
            unsafe {
                store_lanes(out, total);
                kept.write(open);
            }
        }
    }
}

/// Where the four blocks of 2 x 2 of a pair of tokens in half a strip start.
const fn place(strip: usize, half: usize, pair: usize) -> usize {
    ((strip * 2 + half) * MAX_PAIRS + pair) * 4
}

/// Outputs to 2 x 2 blocks: `(strip, half, pair, pair of rows)` of rows `a`, `b` and tokens `t`,
/// `t + 1` as `[a t, a t+1, b t, b t+1]`.
fn load_pairs(args: &Args<'_>, out: &[f32], total: &mut [Quad]) {
    let row = |strip: usize, token: usize| {
        // The partner of the last of an odd number of tokens is itself.
        let at = args.out_at(strip, token.min(args.tokens - 1));
        // SAFETY: sixteen outputs of a strip and token.
        unsafe { load_lanes(out[at..at + TILE_ROWS].as_ptr()) }
    };
    for strip in 0..args.strips {
        for pair in 0..args.tokens.div_ceil(2) {
            let (a, b) = (row(strip, 2 * pair), row(strip, 2 * pair + 1));
            for g in 0..4 {
                let at = place(strip, g / 2, pair) + g % 2 * 2;
                total[at].write(vzip1q_f32(a[g], b[g]));
                total[at + 1].write(vzip2q_f32(a[g], b[g]));
            }
        }
    }
}

/// The reverse of [`load_pairs`].
fn store_pairs(args: &Args<'_>, total: &[Quad], out: &mut [f32]) {
    for strip in 0..args.strips {
        for pair in 0..args.tokens.div_ceil(2) {
            let (mut a, mut b) = ([vdupq_n_f32(0.0); 4], [vdupq_n_f32(0.0); 4]);
            for g in 0..4 {
                let at = place(strip, g / 2, pair) + g % 2 * 2;
                // SAFETY: `load_pairs` wrote them.
                let (low, high) = unsafe { (total[at].assume_init(), total[at + 1].assume_init()) };
                (a[g], b[g]) = (vuzp1q_f32(low, high), vuzp2q_f32(low, high));
            }
            for (token, values) in [(2 * pair, a), (2 * pair + 1, b)] {
                if token < args.tokens {
                    let at = args.out_at(strip, token);
                    // SAFETY: sixteen outputs of a strip and token.
                    unsafe { store_lanes(out[at..at + TILE_ROWS].as_mut_ptr(), values) };
                }
            }
        }
    }
}

/// What the groups of tokens of a strip's stretch share.
struct Shared<'a> {
    stretch: &'a Stretch<'a>,
    /// Every block is two tiles with a scale of their own.
    twos: bool,
    /// Weight scales, `(block, pair of rows)`: `[a, a, b, b]`.
    scales: *const float32x4_t,
}

/// A pair of tokens, and those behind it.
#[derive(Clone, Copy)]
struct Tokens {
    /// Number of the pair.
    pair: usize,
    /// Activations, `(octet of columns, 16)`.
    x: *const i8,
    /// Bytes to the activations of the next pair.
    each: usize,
    /// Activation scales, `[t, t + 1]`; those of the next pair follow.
    block_scales: *const f32,
    /// Scales from a block to the next.
    step: usize,
}

/// # Safety
/// The processor has `i8mm`; the activations are a panel of pairs; `total` was filled by
/// [`load_pairs`] and `inner` by the stretch before unless this one is fresh.
unsafe fn paired(s: &Stretch<'_>, inner: &mut [Quad], total: &mut [Quad]) {
    let (args, panel) = (s.args, s.args.panel.expect("activations in pairs"));
    let pairs = args.tokens / 2;
    let (mut last_x, mut last_scales) = ([vdupq_n_s8(0); 2 * STRETCH], [[0.0; 2]; STRETCH]);
    if args.tokens % 2 == 1 {
        // A token alone is a pair with itself.
        let token = args.tokens - 1;
        let x = &panel.pieces[token * panel.stride + panel.first + 4 * s.start..][..4 * s.tiles];
        for (i, to) in last_x[..2 * s.tiles].as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // SAFETY: a tile is sixteen bytes, or four pieces.
            let x = vreinterpretq_s64_s8(unsafe { vld1q_s8(x.as_ptr().add(4 * i).cast()) });
            *to = [vzip1q_s64(x, x), vzip2q_s64(x, x)].map(vreinterpretq_s8_s64);
        }
        let scales = args.block_scales[s.first * args.tokens + token..].iter().step_by(args.tokens);
        last_scales.iter_mut().zip(scales).take(s.blocks.len()).for_each(|(to, &scale)| *to = [scale; 2]);
    }
    let pieces = panel.pieces.as_ptr().wrapping_add(2 * (panel.first + 4 * s.start));
    let tokens_at = |pair: usize| {
        if pair == pairs {
            let x = last_x.as_ptr().cast();
            return Tokens { pair, x, each: 0, block_scales: last_scales.as_ptr().cast(), step: 2 };
        }
        let x = pieces.wrapping_add(2 * pair * panel.stride).cast();
        let block_scales = args.block_scales[s.first * args.tokens + 2 * pair..].as_ptr();
        Tokens { pair, x, each: 8 * panel.stride, block_scales, step: args.tokens }
    };
    let mut scales = [Quad::uninit(); STRETCH * 8];
    for strip in 0..args.strips {
        for (i, block) in s.blocks.iter().enumerate() {
            for (g, scale) in s.scales(strip, block).into_iter().enumerate() {
                scales[8 * i + 2 * g].write(vzip1q_f32(scale, scale));
                scales[8 * i + 2 * g + 1].write(vzip2q_f32(scale, scale));
            }
        }
        let shared = Shared {
            stretch: s,
            twos: s.fresh && s.blocks.iter().all(|b| b.tiles == 2 && b.closes),
            scales: scales.as_ptr().cast(),
        };
        for half in 0..2 {
            let mut pair = 0;
            // SAFETY: pairs of the panel and, last, the pair made above; the scales of all blocks
            // and rows were written.
            unsafe {
                while pair + 3 <= pairs {
                    shared.group::<3>(strip, half, tokens_at(pair), inner, total);
                    pair += 3;
                }
                if pair + 2 <= pairs {
                    shared.group::<2>(strip, half, tokens_at(pair), inner, total);
                    pair += 2;
                }
                while 2 * pair < args.tokens {
                    shared.group::<1>(strip, half, tokens_at(pair), inner, total);
                    pair += 1;
                }
            }
        }
    }
}

impl Shared<'_> {
    /// `P` pairs of tokens against eight rows.
    ///
    /// # Safety
    /// The processor has `i8mm`; there are `P` such pairs; `inner` and `total` hold the values of
    /// this place (`inner`: unless the stretch is fresh).
    unsafe fn group<const P: usize>(
        &self,
        strip: usize,
        half: usize,
        tokens: Tokens,
        inner: &mut [Quad],
        total: &mut [Quad],
    ) {
        let s = self.stretch;
        let Tokens { pair, mut x, each, mut block_scales, step } = tokens;
        let at = place(strip, half, pair);
        let kept = inner[at..at + 4 * P].as_mut_ptr().cast::<[float32x4_t; 4]>();
        let to = total[at..at + 4 * P].as_mut_ptr().cast::<[float32x4_t; 4]>();
        // SAFETY: places in the buffers that `paired` filled; promised by the caller for `kept` and
        // `to`.
        unsafe {
            let mut total: [_; P] = std::array::from_fn(|p| *to.add(p));
            let mut w = s.weights.add(strip * s.tiles * TILE + 128 * half);
            let mut scales = self.scales.add(4 * half);
            if self.twos && P == 3 {
                let total = (&raw mut total).cast::<[[float32x4_t; 4]; 3]>();
                shims::twos(
                    &mut *total,
                    shims::Twos { w, x, each, scales, block_scales, step, count: s.blocks.len() },
                );
                (0..P).for_each(|p| to.add(p).write((*total)[p]));
                return;
            }
            let zero = [vdupq_n_f32(0.0); 4];
            let mut open: [_; P] = std::array::from_fn(|p| if s.fresh { zero } else { *kept.add(p) });
            let mut fresh = s.fresh;
            for block in s.blocks {
                let mut sums = [[vdupq_n_s32(0); 4]; P];
                for _ in 0..block.tiles {
                    octets::<P>(&mut sums, w, x, each);
                    (w, x) = (w.add(TILE), x.add(32));
                }
                for p in 0..P {
                    let block_scale = both(block_scales.add(2 * p));
                    for r in 0..4 {
                        let part = vmulq_f32(vcvtq_f32_s32(sums[p][r]), block_scale);
                        // A sum that starts is not added to zero: that could only turn -0 into 0,
                        // which no total shows.
                        let value = if fresh { part } else { vaddq_f32(open[p][r], part) };
                        if block.closes {
                            total[p][r] = vaddq_f32(total[p][r], vmulq_f32(value, *scales.add(r)));
                        } else {
                            open[p][r] = value;
                        }
                    }
                }
                (scales, block_scales) = (scales.add(8), block_scales.add(step));
                fresh = block.closes;
            }
            for p in 0..P {
                to.add(p).write(total[p]);
                if !fresh {
                    kept.add(p).write(open[p]);
                }
            }
        }
    }
}

/// The two numbers at `at`, twice.
///
/// # Safety
/// `at` points to two single-precision numbers.
#[inline(always)]
unsafe fn both(at: *const f32) -> float32x4_t {
    // SAFETY: promised by the caller; the bits are not looked at.
    vreinterpretq_f32_f64(unsafe { vld1q_dup_f64(at.cast()) })
}

/// A tile against `P` pairs of tokens, `each` bytes from one pair's activations to the next.
///
/// # Safety
/// The processor has `i8mm`; `w` and `x` hold them.
#[inline(always)]
unsafe fn octets<const P: usize>(sums: &mut [[int32x4_t; 4]; P], w: *const i8, x: *const i8, each: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        let x: [_; P] = std::array::from_fn(|p| [0, 16].map(|octet| vld1q_s8(x.add(each * p + octet))));
        for r in 0..4 {
            let w = [0, 16].map(|octet| vld1q_s8(w.add(32 * r + octet)));
            for p in 0..P {
                sums[p][r] = shims::smmla(shims::smmla(sums[p][r], w[0], x[p][0]), w[1], x[p][1]);
            }
        }
    }
}
