//! Five to eight tokens on processors with AMX: tiles are expanded in vectors while tile registers
//! meet those expanded before.
//!
//! An expanded vector has eight rows of eight columns, a row in 64 bits. Taken as a row of the
//! second operand of `tdpbssd`, which wants four columns of a weight row in 32 bits, its even lanes
//! are the first four columns of eight rows and its odd lanes the last four. A row of the first
//! operand can meet only one or the other: the even pieces of four columns of a token, or the odd
//! ones ([`Interleave::EvenOdd`]). So each product makes twice the sums and half of them are
//! dropped. Tile registers have the time; to regroup every tile would cost the vectors more, which
//! have none left.
//!
//! Even and odd pieces of up to eight tokens are the rows of one tile register. Weights are signed.
//! A block that ends inside eight tiles is filled up with zeros, which meet whatever activations
//! stand behind it.

use super::{
    expand::Expand,
    strips::{close, finish},
    tiles::Config,
    *,
};
use fracbit_kernels::{Args, Panel, ROWS};
use std::{arch::asm, mem::MaybeUninit};

/// Tiles whose vectors of eight rows fill a tile register.
const CHUNK: usize = 8;
/// Most tokens: two rows of a tile register each.
const TOKENS: usize = ROWS / 2;

/// The vectors of a chunk, `(half of the rows, tile, piece)`.
type Weights = [[[__m512i; 2]; CHUNK]; 2];

/// Sums of a block, `(half of the rows, token, even or odd)`: what a tile register is stored to.
type Sums = [[[MaybeUninit<__m512i>; 2]; TOKENS]; 2];

/// # Safety
/// As `strips`, AMX is there, the expander is narrow and [signed](Expand::signed), and `panel` is
/// the one of `args`, of [`Interleave::EvenOdd`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
pub(super) unsafe fn even_odd<E: Expand>(e: &E, args: &Args<'_>, panel: Panel<'_>, out: &mut [f32]) {
    assert!((1..=TOKENS).contains(&args.tokens), "tokens of a call");
    // Registers 0 and 1 are sums, 2 activations, 3 and 4 weights.
    let rows = u8::try_from(2 * args.tokens).expect("at most 16");
    let config = Config::new([rows, rows, rows, 16, 16, 0, 0, 0]);
    let mut weights = [[[[_mm512_setzero_si512(); 2]; CHUNK]; 2]; 2];
    let mut products = Products {
        args,
        half: 2 * panel.stride,
        sums: [[[[MaybeUninit::uninit(); 2]; TOKENS]; 2]; 2],
        turn: 0,
        waiting: None,
        inner: [_mm512_setzero_ps(); TOKENS],
        out: out.as_mut_ptr(),
    };
    // SAFETY: the configuration is one of palette 1. Between this statement and the release below
    // only statements of this file name tile registers: the compiler knows of none, and what one of
    // them leaves is there for the next.
    unsafe {
        asm!(
            "ldtilecfg [{}]",
            "tilezero tmm0",
            "tilezero tmm1",
            in(reg) &raw const config,
            out("tmm0") _, out("tmm1") _,
            options(nostack, preserves_flags, readonly),
        );
    }
    // The chunk that was expanded last: its activations, and the strip and the block that end with
    // it.
    let mut before: Option<(*const i32, Option<(usize, usize)>)> = None;
    let mut turn = 0;
    let reads = crate::reads::Reads::of_machine();
    for strip in 0..args.strips {
        let codes = args.codes[strip * args.stride..].as_ptr();
        let scales = args.scales[strip * args.groups * TILE_ROWS..].as_ptr();
        // SAFETY: there is a first tile.
        let mut mid = unsafe { e.begin(codes) };
        for (index, block) in args.blocks.iter().enumerate() {
            // SAFETY: `Args` has 16 scales for every group.
            let books = unsafe { e.books(scales.add(block.group * TILE_ROWS)) };
            for first in (0..block.tiles).step_by(CHUNK) {
                let tiles = CHUNK.min(block.tiles - first);
                let to: &mut Weights = &mut weights[turn];
                let [low, high] = &mut *to;
                for (tile, (low, high)) in low.iter_mut().zip(high).enumerate().take(tiles) {
                    // SAFETY: there is room for a tile behind the last.
                    unsafe {
                        let tile = block.start + first + tile;
                        let code = codes.add((tile + 1) * args.tile_bytes);
                        e.ask(reads, code, tile, args.tile_bytes);
                        let next = e.begin(code);
                        [*low, *high] = e.eights(mid, books).map(|[first, last, ..]| [first, last]);
                        mid = next;
                    }
                }
                for half in to {
                    half[tiles..].fill([_mm512_setzero_si512(); 2]);
                }
                turn = 1 - turn;
                if let Some((x, ends)) = before {
                    // SAFETY: the chunk before this one.
                    unsafe { products.meet(x, &weights[turn], ends) };
                }
                // SAFETY: inside the panel.
                let x = unsafe { panel.pieces.as_ptr().add(panel.first + 2 * (block.start + first)) };
                before = Some((x, (first + tiles == block.tiles).then_some((strip, index))));
            }
        }
    }
    // SAFETY: the last chunk; then the sums of the last block, and no tile register holds anything
    // that is wanted.
    unsafe {
        if let Some((x, ends)) = before {
            products.meet(x, &weights[1 - turn], ends);
        }
        products.scale();
        asm!("tilerelease", options(nostack, preserves_flags, nomem));
    }
}

/// From expanded chunks to outputs.
struct Products<'a> {
    args: &'a Args<'a>,
    /// Bytes from the even to the odd pieces of a token, half of those to the next token.
    half: usize,
    /// Sums of the block that ended last, at `1 - turn`, and room for those of the next.
    sums: [Sums; 2],
    turn: usize,
    /// Strip and block that ended last: their sums meet their scales when the next ones are stored,
    /// since it takes a while until they are in memory.
    waiting: Option<(usize, usize)>,
    inner: [__m512; TOKENS],
    out: *mut f32,
}

impl Products<'_> {
    /// Adds the products of a chunk to the sums in tile registers; takes these to memory where it
    /// ends a block of a strip.
    ///
    /// # Safety
    /// `x` points to the chunk's first even piece in the panel; the tile registers are those of
    /// [`even_odd`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn meet(&mut self, x: *const i32, weights: &Weights, ends: Option<(usize, usize)>) {
        // SAFETY: from every piece of a panel 64 bytes are readable; there are two times sixteen
        // vectors of weights.
        unsafe {
            asm!(
                "tileloadd tmm2, [{x} + {half}]",
                "tileloadd tmm3, [{w} + {line}]",
                "tdpbssd tmm0, tmm2, tmm3",
                "tileloadd tmm4, [{w} + {line} + 1024]",
                "tdpbssd tmm1, tmm2, tmm4",
                x = in(reg) x,
                w = in(reg) weights,
                half = in(reg) self.half,
                line = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        if ends.is_none() {
            return;
        }
        let to = &raw mut self.sums[self.turn];
        // SAFETY: even and odd sums of up to eight tokens for two halves.
        unsafe {
            asm!(
                "tilestored [{to} + {line}], tmm0",
                "tilestored [{to} + {line} + {half}], tmm1",
                "tilezero tmm0",
                "tilezero tmm1",
                to = in(reg) to,
                line = in(reg) 64usize,
                half = const 64 * 2 * TOKENS,
                out("tmm0") _, out("tmm1") _,
                options(nostack, preserves_flags),
            );
            self.scale();
        }
        self.turn = 1 - self.turn;
        self.waiting = ends;
    }

    /// Takes the sums that wait to `inner`, and that to `out` where their block closes its weight
    /// scale.
    ///
    /// # Safety
    /// As [`even_odd`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn scale(&mut self) {
        let Some((strip, index)) = self.waiting else { return };
        let args = self.args;
        let block = &args.blocks[index];
        let factors = &args.block_scales[index * args.tokens..][..args.tokens];
        let [low, high] = &self.sums[1 - self.turn];
        let halves = low.iter().zip(high);
        for ((inner, &factor), (low, high)) in self.inner.iter_mut().zip(factors).zip(halves) {
            let lane = |sums: [MaybeUninit<__m512i>; 2], i: usize| {
                // SAFETY: those of all tokens were stored.
                _mm512_castsi512_ps(unsafe { sums[i].assume_init() })
            };
            let even = _mm512_shuffle_ps::<0b1000_1000>(lane(*low, 0), lane(*high, 0));
            let odd = _mm512_shuffle_ps::<0b1101_1101>(lane(*low, 1), lane(*high, 1));
            let sum = _mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd));
            *inner = finish(*inner, sum, factor);
        }
        if !block.closes {
            return;
        }
        let scales = args.scales[(strip * args.groups + block.group) * TILE_ROWS..].as_ptr();
        for (token, inner) in self.inner[..args.tokens].iter_mut().enumerate() {
            // SAFETY: sixteen scales, and sixteen values of `out` for every strip and token.
            unsafe { close(*inner, scales, self.out.add(args.out_at(strip, token))) };
            *inner = _mm512_setzero_ps();
        }
    }
}
