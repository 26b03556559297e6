//! Additive codebooks of 16 centroids: tables of 16 bytes read by the halves of bytes of codes.
//!
//! For few tokens the tables are partial sums (a Psumbook): one `tbl` reads those of the sixteen
//! rows of a strip. Low and high bytes of partial sums are summed in 16 bits without being spread:
//! one sum takes words as they are, another their high halves (`usra`), and what the first has too
//! much of is subtracted at the end. High bytes are stored with 128 added, so that all are
//! unsigned.
//!
//! For more tokens the tables are the weights of centroids, a column at a time, and sums of them
//! are zipped to quads as everywhere ([`expand`](crate::expand)).

use crate::{
    expand::{Books, Expand, Sink, put, vector},
    neon::*,
    pack::LANES,
    words::unroll,
};
use fracbit_format::{PackedView, TILE_COLS, TILE_ROWS};
use fracbit_kernels::{
    BLOCK_TILES, Centroids, Isa, Kernels, Line, LinearKernel, PsumCodes, PsumMicrokernel, PsumRows, psumbook,
};
use std::{array::from_fn, sync::Arc};

/// Centroids of a codebook.
const CENTROIDS: usize = 16;
/// Weights of a centroid.
const WEIGHTS: usize = 8;
/// Most codebooks, two to a byte.
const MOST_BOOKS: usize = 6;

/// Sums of centroids by `M` bytes of two codes.
pub(crate) struct Halves<const M: usize> {
    /// (codebook, weight).
    table: [[uint8x16_t; WEIGHTS]; MOST_BOOKS],
}

impl<const M: usize> Expand for Halves<M> {
    #[inline(always)]
    fn new(table: &[Line]) -> Self {
        let at = |book: usize, k: usize| vector(table, CENTROIDS * (book % (2 * M) * WEIGHTS + k));
        Self { table: from_fn(|book| from_fn(|k| at(book, k))) }
    }

    #[inline(always)]
    unsafe fn tile(&self, code: *const u8, _: &Books, sink: &mut impl Sink) {
        // SAFETY: sixteen bytes.
        let lanes = unsafe { vld1q_u8(LANES.as_ptr()) };
        unroll!([0 1] VECTOR => {
            let codes: [[uint8x16_t; 2]; M] = from_fn(|byte| {
                // SAFETY: a tile has two vectors of columns of `M` times 16 bytes.
                let rows = unsafe { vld1q_u8(code.add((VECTOR * M + byte) * TILE_ROWS)) };
                let codes = vqtbl1q_u8(rows, lanes);
                [vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes)]
            });
            unroll!([0 1] HALF => {
                let column = |k: usize| {
                    let of = |book: usize| vqtbl1q_u8(self.table[book][4 * HALF + k], codes[book / 2][book % 2]);
                    (1..2 * M).fold(of(0), |sum, book| vaddq_u8(sum, of(book)))
                };
                let [a, b, c, d] = from_fn(column);
                let pair = |a, b| [vzip1q_u8(a, b), vzip2q_u8(a, b)].map(|v| vreinterpretq_u16_u8(v));
                let ([ab, ab_last], [cd, cd_last]) = (pair(a, b), pair(c, d));
                put::<{ (2 * VECTOR + HALF) as i32 }, 0>(sink, ab, cd);
                put::<{ (2 * VECTOR + HALF) as i32 }, 2>(sink, ab_last, cd_last);
            });
        });
    }
}

/// Bytes of the tables of 16 bytes of codes: low and high bytes of the partial sums of their low
/// halves, then of their high ones.
const OF_CODES: usize = 4 * CENTROIDS;
/// Strips that share the loads of tables.
const STRIPS: usize = 4;
/// Most codes of a row whose bytes are summed in 16 bits.
const MOST: usize = 257;

// A byte is 255 at most, and so are 257 of them in 16 bits.
const _: () = assert!(BLOCK_TILES * (TILE_COLS / WEIGHTS) * MOST_BOOKS <= MOST, "codes of a block");

/// The kernel of matrices of additive codebooks of 16 centroids.
pub(crate) fn linear(kernels: &Kernels, view: &PackedView<'_>) -> Option<Arc<dyn LinearKernel>> {
    // SAFETY: NEON is part of the architecture; both functions check the lengths that they are
    // given.
    let microkernel = unsafe { PsumMicrokernel::new(Isa::Neon, 4, 1, build, read) };
    psumbook(kernels, view, microkernel)
}

/// See [`BuildFn`](fracbit_kernels::BuildFn); tables as [`OF_CODES`] says.
fn build(centroids: &Centroids, x: &[[i8; TILE_COLS]], out: &mut [i16]) {
    let [x] = x else { panic!("one token, got {}", x.len()) };
    assert_eq!(out.len(), centroids.psums(), "sums of a tile");
    assert_eq!(2 * centroids.pairs(), WEIGHTS, "weights of a vector");
    let count = centroids.count();
    for (i, table) in out.as_chunks_mut::<CENTROIDS>().0.iter_mut().enumerate() {
        let x = &x[i / count * WEIGHTS..][..WEIGHTS];
        let mut sums = [vdupq_n_s16(0); 2];
        for (p, x) in x.as_chunks::<2>().0.iter().enumerate() {
            let pairs = centroids.of_pair::<CENTROIDS>(i % count, p).as_flattened();
            for (sum, pairs) in sums.iter_mut().zip(pairs.as_chunks::<16>().0) {
                // SAFETY: eight pairs. All sums fit 16 bits.
                let pairs = unsafe { vld2q_s16(pairs.as_ptr()) };
                *sum = vmlaq_n_s16(*sum, pairs.0, x[0].into());
                *sum = vmlaq_n_s16(*sum, pairs.1, x[1].into());
            }
        }
        let [first, last] = sums.map(|sum| vreinterpretq_u8_s16(sum));
        let high = veorq_u8(vuzp2q_u8(first, last), vdupq_n_u8(128));
        // SAFETY: sixteen numbers are 32 bytes.
        unsafe {
            vst1q_u8(table.as_mut_ptr().cast(), vuzp1q_u8(first, last));
            vst1q_u8(table.as_mut_ptr().cast::<u8>().add(16), high);
        }
    }
}

/// See [`ReadFn`](fracbit_kernels::ReadFn).
fn read(codes: PsumCodes<'_>, (psums, tokens): (&[i16], usize), sums: &mut [PsumRows]) {
    assert_eq!(tokens, 1, "tokens side by side");
    let tables = psums.as_chunks::<{ OF_CODES / 2 }>().0;
    assert!(2 * tables.len() <= MOST, "codes whose sums fit 16 bits");
    for (i, sums) in sums.chunks_mut(STRIPS).enumerate() {
        let strip = |s: usize| codes.strip(STRIPS * i + s);
        if let [a, b, c, d] = sums {
            rows([strip(0), strip(1), strip(2), strip(3)], tables, [a, b, c, d]);
        } else {
            sums.iter_mut().enumerate().for_each(|(s, sums)| rows([strip(s)], tables, [sums]));
        }
    }
}

#[inline(always)]
fn rows<const S: usize>(
    codes: [&[[u8; TILE_ROWS]]; S],
    tables: &[[i16; OF_CODES / 2]],
    out: [&mut PsumRows; S],
) {
    assert!(codes.iter().all(|codes| codes.len() == tables.len()), "a table for all codes");
    // Of low and high bytes: words, and their high halves.
    let mut sums = [[[vdupq_n_u16(0); 2]; 2]; S];
    for (at, table) in tables.iter().enumerate() {
        // SAFETY: 16 of 64 bytes.
        let table: [_; 4] = from_fn(|i| unsafe { vld1q_u8(table.as_ptr().cast::<u8>().add(16 * i)) });
        for (codes, sums) in codes.iter().zip(&mut sums) {
            // SAFETY: sixteen bytes.
            let codes = unsafe { vld1q_u8(codes[at].as_ptr()) };
            let index = [vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes)];
            for (i, &table) in table.iter().enumerate() {
                let psums = vreinterpretq_u16_u8(vqtbl1q_u8(table, index[i / 2]));
                let [words, highs] = &mut sums[i % 2];
                *words = vaddq_u16(*words, psums);
                *highs = vsraq_n_u16::<8>(*highs, psums);
            }
        }
    }
    // 128 of 256 for each of the two codes of a byte.
    let offset = vdupq_n_s32(i32::try_from(2 * 128 * 256 * tables.len()).expect("a few codes"));
    for (sums, out) in sums.into_iter().zip(out) {
        // Sums of the bytes of even and of odd rows.
        let [lows, highs] = sums.map(|[words, highs]| [vsubq_u16(words, vshlq_n_u16::<8>(highs)), highs]);
        let [even, odd] = [0, 1].map(|i| {
            let first = vmlal_n_u16(vmovl_u16(vget_low_u16(lows[i])), vget_low_u16(highs[i]), 256);
            let last = vmlal_high_n_u16(vmovl_high_u16(lows[i]), highs[i], 256);
            [first, last].map(|sums| vsubq_s32(vreinterpretq_s32_u32(sums), offset))
        });
        for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
            let rows = [vzip1q_s32(even, odd), vzip2q_s32(even, odd)];
            for (rows, out) in rows.into_iter().zip(out[8 * i..].as_chunks_mut::<4>().0) {
                // SAFETY: four numbers.
                unsafe { vst1q_s32(out.as_mut_ptr(), vaddq_s32(vld1q_s32(out.as_ptr()), rows)) };
            }
        }
    }
}
