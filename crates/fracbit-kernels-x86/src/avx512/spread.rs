//! Bits of tile rows to vector lanes: the first step of every expander.
//!
//! A tile is one to four vectors of codes. A *spread* is a vector of bytes picked from them such that each lane of
//! 32 or 64 bits holds a stretch of one tile row; `vpmultishiftqb` then cuts indices or states out of the lanes. The
//! circular tape costs nothing: positions are taken modulo the tile.

use super::*;

/// How many 64-byte loads cover a tile, and so how its bytes are picked.
pub(super) const fn sources(tile_bytes: usize) -> usize {
    match tile_bytes {
        0..=64 => 1,
        65..=128 => 2,
        _ => 4,
    }
}

/// `N` spreads of a tile that spans `C` sources.
#[derive(Clone, Copy)]
pub(super) struct Spread<const C: usize, const N: usize> {
    index: [__m512i; N],
    /// Bytes that come from rows 8..16 (four sources only).
    upper: [__mmask64; N],
    /// Bytes past the end of the tape (four sources only).
    wrapped: [__mmask64; N],
    half: usize,
}

/// Lines that [`Spread::load`] reads.
pub(super) const fn spread_lines(n: usize) -> usize {
    n + 1
}

/// The constants of `n` spreads: byte `b` of spread `s` is byte `k` of the tape counted from the start of row `r`,
/// where `(r, k) = pick(s, b)`.
pub(super) fn spread_table(
    tile_bytes: usize,
    n: usize,
    pick: impl Fn(usize, usize) -> (usize, usize),
) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut masks = [0u64; 8];
    for s in 0..n {
        let mut index = [0; 64];
        for (b, index) in index.iter_mut().enumerate() {
            let (row, k) = pick(s, b);
            let position = row * tile_bytes / TILE_ROWS + k;
            let wrapped = position >= tile_bytes;
            let mut place = position % tile_bytes;
            if sources(tile_bytes) == 4 && row >= TILE_ROWS / 2 {
                masks[s] |= 1 << b;
                masks[4 + s] |= u64::from(wrapped) << b;
                if !wrapped {
                    place -= tile_bytes / 2;
                }
            }
            *index = u8::try_from(place).expect("inside two vectors");
        }
        lines.push(Line(index));
    }
    let mut line = Line::ZERO;
    masks.iter().zip(line.0.chunks_exact_mut(8)).for_each(|(m, b)| b.copy_from_slice(&m.to_le_bytes()));
    lines.push(line);
    lines
}

impl<const C: usize, const N: usize> Spread<C, N> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    pub(super) fn load(table: &[Line], tile_bytes: usize) -> Self {
        debug_assert!(C == sources(tile_bytes) && N <= 4, "the body of this tile size");
        let masks = table[N].0.as_chunks::<8>().0;
        Self {
            index: std::array::from_fn(|s| line(&table[s])),
            upper: std::array::from_fn(|s| u64::from_le_bytes(masks[s])),
            wrapped: std::array::from_fn(|s| u64::from_le_bytes(masks[4 + s])),
            half: tile_bytes / 2,
        }
    }

    /// # Safety
    /// `code` starts a tile with [`OVERREAD`](fracbit_kernels::OVERREAD) readable bytes behind it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    pub(super) unsafe fn spread(&self, code: *const u8) -> [__m512i; N] {
        // SAFETY: the farthest read ends 128 + 64 bytes behind the middle of a tile of at most 256 bytes.
        let (z0, z1, y0, y1) = unsafe {
            match C {
                1 => {
                    let z = load(code);
                    (z, z, z, z)
                }
                2 => {
                    let z = load(code);
                    (z, load(code.add(64)), z, z)
                }
                _ => {
                    let middle = code.add(self.half);
                    (load(code), load(code.add(64)), load(middle), load(middle.add(64)))
                }
            }
        };
        std::array::from_fn(|s| {
            let index = self.index[s];
            match C {
                1 => _mm512_permutexvar_epi8(index, z0),
                2 => _mm512_permutex2var_epi8(z0, index, z1),
                _ => {
                    let low = _mm512_permutex2var_epi8(z0, index, z1);
                    let high = _mm512_permutex2var_epi8(y0, index, y1);
                    let both = _mm512_mask_blend_epi8(self.upper[s], low, high);
                    _mm512_mask_permutexvar_epi8(both, self.wrapped[s], index, z0)
                }
            }
        })
    }
}
