//! Bits of tile rows to vector lanes: the first step of every expander.
//!
//! A *stretch* is a vector whose 64-bit lane `i` holds 64 bits of row `i` (lower half of the tile)
//! or `i + 8` (upper half), from the byte in which the columns of interest start. `vpmultishiftqb`
//! then cuts indices or states out of the lanes. A row has one stretch where the bits of all its
//! columns fit 64, or else one for each eight columns. At an odd number of quarter bits a weight
//! odd rows start in the middle of a byte, which cuts allow for ([`nibble`]).

#![expect(clippy::needless_range_loop, reason = "stretches and halves index several arrays at once")]

use super::*;

/// How stretches are fetched.
pub(super) mod fetch {
    /// Tiles of up to 64 bytes: one load, bytes picked by `vpermb`. The circular tape costs
    /// nothing: positions are taken modulo the tile.
    pub(crate) const ONE: usize = 1;
    /// Tiles of up to 120 bytes: a load and `vpermb` for each half. The end of the tape is patched.
    pub(crate) const TWO: usize = 2;
    /// Rows of 8 bytes: a load is a stretch. The end of the tape is patched.
    pub(crate) const DIRECT: usize = 3;
    /// Larger tiles: each half spans two loads, with a `vpermb` for each (`vpermi2b` would take
    /// longer than both). The end of the tape is patched.
    pub(crate) const HALVES: usize = 4;

    /// The way for a tile size.
    pub(crate) const fn of(tile_bytes: usize) -> usize {
        match tile_bytes {
            0..=64 => ONE,
            128 => DIRECT,
            65..=120 => TWO,
            _ => HALVES,
        }
    }
}

/// The byte in which row `r` starts.
const fn row_start(tile_bytes: usize, r: usize) -> usize {
    r * tile_bytes / TILE_ROWS
}

/// Bits of that byte that belong to the row before: the same in rows 8 apart.
pub(super) const fn nibble(tile_bytes: usize, r: usize) -> usize {
    r * tile_bytes * 8 / TILE_ROWS % 8
}

/// First byte of stretch `k` of a row, of `n`.
pub(super) const fn start(tile_bytes: usize, k: usize, n: usize) -> usize {
    k * tile_bytes / TILE_ROWS / n
}

/// `N` stretches of each half of a tile, fetched the way `F`.
#[derive(Clone, Copy)]
pub(super) struct Spread<const F: usize, const N: usize> {
    /// Bytes to pick, `[stretch][half]`; `TWO` and `HALVES` pick the same ones for both halves and
    /// have in `[0][1]` what the last stretch of the last row takes from the start of the tape.
    index: [[__m512i; 2]; N],
    /// Bytes of `HALVES` that come from the second load.
    beyond: [__mmask64; N],
    wrapped: __mmask64,
    half: usize,
    second: usize,
}

/// Lines that [`Spread::load`] reads.
pub(super) const fn spread_lines(n: usize) -> usize {
    2 * n + 1
}

/// The constants of `n` stretches a row.
pub(super) fn spread_table(tile_bytes: usize, n: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut wrapped = 0u64;
    for k in 0..n {
        for half in 0..2 {
            lines.push(Line(std::array::from_fn(|b| {
                let across = start(tile_bytes, k, n) + b % 8;
                let place = match fetch::of(tile_bytes) {
                    fetch::TWO | fetch::HALVES if (k, half) == (0, 1) => {
                        let at = row_start(tile_bytes, 15) + start(tile_bytes, n - 1, n) + b % 8;
                        let past = b / 8 == 7 && at >= tile_bytes;
                        wrapped |= u64::from(past) << b;
                        if past { at - tile_bytes } else { 0 }
                    }
                    fetch::TWO | fetch::HALVES => row_start(tile_bytes, b / 8) + across,
                    _ => (row_start(tile_bytes, 8 * half + b / 8) + across) % tile_bytes,
                };
                u8::try_from(place).expect("inside two vectors")
            })));
        }
    }
    let mut line = Line::ZERO;
    line.0[..8].copy_from_slice(&wrapped.to_le_bytes());
    lines.push(line);
    lines
}

impl<const F: usize, const N: usize> Spread<F, N> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    pub(super) fn load(table: &[Line], tile_bytes: usize) -> Self {
        debug_assert!(F == fetch::of(tile_bytes) && N <= 2, "the microkernel of this tile size");
        Self {
            index: std::array::from_fn(|k| [line(&table[2 * k]), line(&table[2 * k + 1])]),
            beyond: std::array::from_fn(|k| _mm512_test_epi8_mask(line(&table[2 * k]), _mm512_set1_epi8(64))),
            wrapped: u64::from_le_bytes(table[2 * N].0.as_chunks::<8>().0[0]),
            half: tile_bytes / 2,
            second: start(tile_bytes, 1, 2),
        }
    }

    /// `[stretch][half]`. `TAPE`: bytes behind the tile are those at its start; otherwise they do
    /// not matter.
    ///
    /// # Safety
    /// `code` starts a tile with [`OVERREAD`](fracbit_kernels::OVERREAD) readable bytes behind it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    pub(super) unsafe fn spread<const TAPE: bool>(&self, code: *const u8) -> [[__m512i; 2]; N] {
        let mut out = [[_mm512_setzero_si512(); 2]; N];
        // SAFETY: the farthest read ends 128 bytes behind the middle of a tile of at most 256
        // bytes, or 64 + 8 bytes behind the middle of one of 128. Loops, for the closure of an
        // array's `map` would not be inlined.
        unsafe {
            match F {
                fetch::ONE => {
                    let z = load(code);
                    for k in 0..N {
                        for half in 0..2 {
                            out[k][half] = _mm512_permutexvar_epi8(self.index[k][half], z);
                        }
                    }
                }
                fetch::DIRECT => {
                    out[0] = [load(code), load(code.add(64))];
                    if N > 1 {
                        // Bytes 4..12 of the rows: the last four of the tile are the first four of
                        // the tape.
                        let high = load(code.add(64 + self.second));
                        let first = code.cast::<i32>().read_unaligned();
                        let high = if TAPE { _mm512_mask_set1_epi32(high, 0x8000, first) } else { high };
                        out[1] = [load(code.add(self.second)), high];
                    }
                }
                _ => {
                    let middle = code.add(self.half);
                    let (a, c) = (load(code), load(middle));
                    for k in 0..N {
                        let index = self.index[k][0];
                        out[k] = [_mm512_permutexvar_epi8(index, a), _mm512_permutexvar_epi8(index, c)];
                        if F == fetch::HALVES {
                            let (b, d) = (load(code.add(64)), load(middle.add(64)));
                            out[k][0] = _mm512_mask_permutexvar_epi8(out[k][0], self.beyond[k], index, b);
                            out[k][1] = _mm512_mask_permutexvar_epi8(out[k][1], self.beyond[k], index, d);
                        }
                        if TAPE && k + 1 == N {
                            let (wrapped, from) = (self.wrapped, self.index[0][1]);
                            out[k][1] = _mm512_mask_permutexvar_epi8(out[k][1], wrapped, from, a);
                        }
                    }
                }
            }
        }
        out
    }
}
