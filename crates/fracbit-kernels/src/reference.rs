//! The scalar microkernel: the meaning of the family, and the microkernel of codebooks that a
//! backend lacks.

use crate::{
    Args, Ints, Isa,
    args::{BLOCK_TILES, MAX_TOKENS},
    kernels::Microkernel,
};
use fracbit_format::{TILE, TILE_COLS, TILE_ROWS};

pub(crate) fn microkernel() -> Microkernel {
    let natural = std::array::from_fn(|i| u8::try_from(i).expect("16 rows"));
    #[expect(unsafe_code, reason = "the contract of `Microkernel::new`, trivially kept")]
    // SAFETY: `strips` needs no instruction set and is safe code.
    unsafe {
        Microkernel::new(Isa::Scalar, Vec::new(), natural, strips)
    }
}

fn strips(args: &Args<'_>, out: &mut [f32]) {
    args.debug_check();
    let mut inner = vec![[0f32; TILE_ROWS]; args.tokens.min(MAX_TOKENS)];
    let mut tiles = vec![[0i16; TILE]; BLOCK_TILES];
    for strip in 0..args.strips {
        inner.fill([0.0; TILE_ROWS]);
        let codes = &args.codes[strip * args.stride..][..args.tiles * args.tile_bytes];
        let scales = &args.scales[strip * args.groups * TILE_ROWS..];
        for (index, block) in args.blocks.iter().enumerate() {
            let codes = codes.chunks_exact(args.tile_bytes).skip(block.start).take(block.tiles);
            let scales = &scales[block.group * TILE_ROWS..][..TILE_ROWS];
            let books = std::array::from_fn(|row| args.codebook.book_of(scales[row]));
            tiles
                .iter_mut()
                .zip(codes)
                .for_each(|(tile, code)| args.codebook.expand_tile_by(code, &books, tile));
            let tiles = &tiles[..block.tiles];
            for token in 0..args.tokens {
                let out = &mut out[args.out_at(strip, token)..][..TILE_ROWS];
                let at = token * args.blocks.len() + index;
                let first = token * args.x_stride + block.start * TILE_COLS;
                for (row, out) in out.iter_mut().enumerate() {
                    let sum = match args.x {
                        Ints::I8(x) => dot(tiles, row, &x[first..]),
                        Ints::I16(x) => dot(tiles, row, &x[first..]),
                    };
                    let inner = &mut inner[token][row];
                    #[expect(
                        clippy::cast_precision_loss,
                        reason = "rounded to nearest, as the vector conversions do"
                    )]
                    let part = sum as f32 * args.block_scales[at];
                    *inner += part;
                    if block.closes {
                        let scaled = *inner * scales[row].to_f32();
                        *out += scaled;
                        *inner = 0.0;
                    }
                }
            }
        }
    }
}

/// Exact: see the ranges at `BLOCK_TILES` and `WIDE_BLOCK_TILES`.
fn dot<T: Copy + Into<i32>>(tiles: &[[i16; TILE]], row: usize, x: &[T]) -> i32 {
    let one = |(tile, x): (&[i16; TILE], &[T; TILE_COLS])| -> i32 {
        tile[row * TILE_COLS..][..TILE_COLS].iter().zip(x).map(|(&w, &x)| i32::from(w) * x.into()).sum()
    };
    tiles.iter().zip(x.as_chunks::<TILE_COLS>().0).map(one).sum()
}
