//! Prefill: a block of two strips is expanded once and met by all tokens.
//!
//! Of a block, 2 x 16 tiles in 8 KiB, 16 sums of two strips and eight tokens stay in registers: a
//! step of four columns loads two vectors of weights, broadcasts eight pieces of activations and
//! makes sixteen dot products. Activations come as [panels](Panel), one stream of 2 KiB for each
//! group of tokens: read row by row they would come from eight pages at a time, and the prefetcher
//! of the processor would not follow.

#![expect(clippy::needless_range_loop, reason = "strips and tokens index several arrays at once")]

use super::{
    expand::Expand,
    strips::{behind, close, dot, finish, planes, vectors},
    *,
};
use fracbit_kernels::{Args, BLOCK_TILES, MAX_STRIPS, MAX_TOKENS, PANEL_TOKENS, Panel};
use std::mem::MaybeUninit;

/// Vectors that hold the largest block of two strips.
const BUFFER: usize = MAX_STRIPS * BLOCK_TILES * 4;

/// # Safety
/// As `strips`, and `panel` is the one of `args`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn panels<E: Expand>(e: &E, args: &Args<'_>, panel: Panel<'_>, out: &mut [f32]) {
    let mut buffer = [MaybeUninit::<__m512i>::uninit(); BUFFER];
    let weights = buffer.as_mut_ptr().cast::<__m512i>();
    let mut inner = [MaybeUninit::<__m512>::uninit(); MAX_STRIPS * MAX_TOKENS];
    let mut step = Step {
        args,
        panel,
        index: 0,
        fresh: true,
        weights,
        inner: inner.as_mut_ptr().cast(),
        out: out.as_mut_ptr(),
    };
    for (index, block) in args.blocks.iter().enumerate() {
        for strip in 0..args.strips {
            let codes = args.codes[strip * args.stride + block.start * args.tile_bytes..].as_ptr();
            let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..].as_ptr();
            // SAFETY: `Args` has 16 scales for every group.
            let books = unsafe { e.books(scales) };
            for tile in 0..block.tiles {
                // SAFETY: the tile is inside `codes`; at most 16 tiles of 4 vectors or 4 tiles of 8
                // for each strip.
                unsafe {
                    let code = codes.add(tile * args.tile_bytes);
                    let expanded = e.regroup_by(e.begin(code), books);
                    let to = weights.add(tile * vectors::<E>() * args.strips + strip);
                    for (v, w) in expanded[..vectors::<E>()].iter().enumerate() {
                        to.add(v * args.strips).write(*w);
                    }
                }
            }
        }
        step.index = index;
        // SAFETY: `weights` was filled above; `inner` is written before it is read (`fresh`).
        unsafe {
            match (E::WIDE, args.strips) {
                (false, 1) => step.tokens::<false, 1>(),
                (false, _) => step.tokens::<false, 2>(),
                (true, 1) => step.tokens::<true, 1>(),
                (true, _) => step.tokens::<true, 2>(),
            }
        }
        step.fresh = block.closes;
    }
}

/// One expanded block against all tokens.
struct Step<'a> {
    args: &'a Args<'a>,
    panel: Panel<'a>,
    index: usize,
    /// Nothing is in `inner` yet.
    fresh: bool,
    weights: *const __m512i, // (piece, strip)
    inner: *mut __m512,      // (token, strip)
    out: *mut f32,           // (token, strip, row)
}

impl Step<'_> {
    /// # Safety
    /// `weights` holds `S` strips of the block; `inner` holds `S` vectors per token unless `fresh`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn tokens<const WIDE: bool, const S: usize>(&self) {
        let (count, mut token) = (self.args.tokens, 0);
        // SAFETY: groups as the panel has them.
        unsafe {
            if count >= PANEL_TOKENS {
                self.group::<WIDE, S, PANEL_TOKENS, true>(0);
                token = PANEL_TOKENS;
            }
            while token + PANEL_TOKENS <= count {
                self.group::<WIDE, S, PANEL_TOKENS, false>(token);
                token += PANEL_TOKENS;
            }
            if token + 4 <= count {
                self.group::<WIDE, S, 4, false>(token);
                token += 4;
            }
            if token + 2 <= count {
                self.group::<WIDE, S, 2, false>(token);
                token += 2;
            }
            if token < count {
                self.group::<WIDE, S, 1, false>(token);
            }
        }
    }

    /// # Safety
    /// As [`tokens`](Self::tokens), and the panel has a group of `T` tokens at `token`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn group<const WIDE: bool, const S: usize, const T: usize, const FIRST: bool>(
        &self,
        token: usize,
    ) {
        let args = self.args;
        let block = &args.blocks[self.index];
        let per_tile = if WIDE { 8 } else { 4 };
        let place = self.index * args.tokens + token;
        let pieces = self.panel.first + block.start * per_tile;
        // Plain loops over constant bounds: they unroll, and the sums stay in registers.
        let mut sums = [[_mm512_setzero_si512(); T]; S];
        let firsts: &[i32; T] = args.block_starts[place..].first_chunk().expect("starts of the group");
        for t in 0..T {
            let first = _mm512_set1_epi32(firsts[t]);
            for sums in &mut sums {
                sums[t] = first;
            }
        }
        // SAFETY: the block's pieces of the group are inside the panel, its weights in the buffer;
        // a prefetch may point anywhere.
        unsafe {
            let x = self.panel.pieces.as_ptr().add(token * self.panel.stride + T * pieces);
            let next = x.wrapping_add(T * self.panel.stride);
            // The first tokens ask for a line of the codes behind this block at each step: while
            // all meet it, the processor forgets the stream of codes, and of many lines that are
            // asked for at once it seems to drop most (Zen 5).
            let (codes, bytes) = behind(args, self.index);
            for v in 0..block.tiles * per_tile {
                if FIRST && 64 * v < bytes {
                    for at in (0..S).flat_map(|s| planes(args).map(move |plane| s * args.stride + plane)) {
                        _mm_prefetch::<_MM_HINT_T1>(codes.wrapping_add(at + 64 * v).cast());
                    }
                }
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(v * T).cast());
                let weights: [__m512i; S] = std::array::from_fn(|s| self.weights.add(v * S + s).read());
                for t in 0..T {
                    let x = _mm512_set1_epi32(x.add(v * T + t).read());
                    for s in 0..S {
                        sums[s][t] = dot::<WIDE>(sums[s][t], weights[s], x);
                    }
                }
            }
        }
        // What was never written is never read: masked out, it counts as zero.
        let known: __mmask16 = if self.fresh { 0 } else { !0 };
        // SAFETY: places of tokens and strips of this call in `inner`, `scales` and `out`.
        unsafe {
            let inner = self.inner.add(token * S);
            let factors: &[f32; T] = args.block_scales[place..].first_chunk().expect("scales of the group");
            let mut after = [[_mm512_setzero_ps(); S]; T];
            for t in 0..T {
                for s in 0..S {
                    let before = _mm512_maskz_loadu_ps(known, inner.add(t * S + s).cast());
                    after[t][s] = finish(before, sums[s][t], factors[t]);
                }
            }
            if !block.closes {
                for t in 0..T {
                    for s in 0..S {
                        inner.add(t * S + s).write(after[t][s]);
                    }
                }
                return;
            }
            for s in 0..S {
                let scales = args.scales.as_ptr().add((s * args.groups + block.group) * TILE_ROWS);
                for t in 0..T {
                    close(after[t][s], scales, self.out.add(args.out_at(s, token + t)));
                }
            }
        }
    }
}
