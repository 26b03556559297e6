//! Nested scalar codes, read by their bits: no tile is joined in memory.
//!
//! A tile is a piece of 32 bytes for each bit of its codes, and a precision reads the first pieces.
//! Those of one bit lie together for all tiles of a matrix.
//! Bytes of the four vectors of weights share their bits: nibbles of two vectors hold the lower
//! four bits of all codes, those of two others the upper four. The first two pieces are the pairs
//! of lowest bits, four to a byte. Each further piece is 256 bits, in four 64-bit lanes that are
//! broadcast to both halves of a vector; a rotation brings those of a nibble's place there, and one
//! operation picks them and joins them to the others.

use super::{
    expand::{Expand, flip, full},
    *,
};
use crate::reads::Reads;
use fracbit_format::{BitWriter, TILE, TILE_COLS, read_bits};
use fracbit_kernels::{Args, Packing};

/// Bytes of a piece.
const PIECE: usize = TILE / 8;
/// Bytes of all planes that are read between asking for codes and their turn.
const AHEAD: usize = 16_384;
/// The order of the microkernels here.
pub(super) const PACKING: Packing = Packing { pack, unpack };

/// Codes of `BITS` bits in `N` vectors of nibbles: two up to four bits, else four.
#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize, const N: usize> {
    table: [__m512i; 4],
    plane: usize,
}

impl<const BITS: usize, const N: usize> Expand for Bits<BITS, N> {
    const WIDE: bool = false;
    const BOUND: bool = true;
    const IN_EIGHTS: usize = if N == 2 { 8 } else { 6 };
    /// Lower nibbles, and upper ones; two bits leave those of their neighbours in them.
    type Mid = [__m512i; N];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(args: &Args<'_>) -> Self {
        const { assert!(N == if BITS > 4 { 4 } else { 2 }, "room for all bits") };
        Self { table: std::array::from_fn(|i| line(&args.table[i])), plane: args.plane }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { table: self.table.map(|bytes| flip(bytes)), ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn ask(&self, _reads: Reads, code: *const u8, tile: usize, _bytes: usize) {
        ask(code, self.plane, tile, BITS);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        let mut out = [_mm512_setzero_si512(); N];
        // SAFETY: promised by the caller.
        unsafe {
            let first = _mm512_castsi256_si512(piece(code));
            let pairs = _mm512_inserti64x4::<1>(first, piece(code.add(self.plane)));
            (out[0], out[1]) = (pairs, _mm512_srli_epi16::<2>(pairs));
            if BITS > 2 {
                let mask = _mm512_set1_epi8(0x33);
                (out[0], out[1]) = (_mm512_and_si512(out[0], mask), _mm512_and_si512(out[1], mask));
            }
            for bit in 2..BITS {
                join(&mut out[bit / 4 * 2..], code.add(bit * self.plane), bit);
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, nibbles: Self::Mid) -> [[__m512i; 4]; 2] {
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        let fifteen = _mm512_set1_epi8(15);
        let t = &self.table;
        for piece in 0..2 {
            let low = nibbles[piece];
            for (half, mut index) in [low, _mm512_srli_epi16::<4>(low)].into_iter().enumerate() {
                if N > 2 {
                    let high = nibbles[2 + piece];
                    let high = if half == 0 { _mm512_slli_epi16::<4>(high) } else { high };
                    index = _mm512_ternarylogic_epi64::<0xCA>(fifteen, index, high);
                }
                out[half][piece] = match BITS {
                    8 => full(index, t),
                    7 => _mm512_permutex2var_epi8(t[0], index, t[1]),
                    // What stands above an index of up to four bits does not matter, for the table
                    // repeats, and above six bits nothing is looked at.
                    _ => _mm512_permutexvar_epi8(index, t[0]),
                };
            }
        }
        out
    }
}

/// Asks for what comes behind in each of `bits` planes, from the tile at `code` on: a line has the
/// pieces of two tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
fn ask(code: *const u8, plane: usize, tile: usize, bits: usize) {
    if tile.is_multiple_of(2) {
        for bit in 0..bits {
            _mm_prefetch::<_MM_HINT_T1>(code.wrapping_add(bit * plane + AHEAD / bits).cast());
        }
    }
}

/// Joins a bit of all codes, whose piece is at `at`, to the others of the first two `nibbles`.
///
/// # Safety
/// A piece is readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn join(nibbles: &mut [__m512i], at: *const u8, bit: usize) {
    // SAFETY: promised by the caller.
    let both = _mm512_broadcast_i64x4(unsafe { piece(at) });
    let place = _mm512_set1_epi8([0x11, 0x22, 0x44, 0x88u8.cast_signed()][bit % 4]);
    for (odd, nibbles) in (0..2).zip(nibbles) {
        let turns = _mm512_setr_epi64(odd, odd, odd, odd, 2 + odd, 2 + odd, 2 + odd, 2 + odd);
        *nibbles = _mm512_ternarylogic_epi64::<0xF8>(*nibbles, _mm512_rorv_epi64(both, turns), place);
    }
}

/// # Safety
/// 32 bytes are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn piece(at: *const u8) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Codes of a tile by the places of their bits: `[4 h + 2 b + p][i]` is byte `32 b + i` of half `h`
/// and piece `p` of the weights ([`Expand::end`]).
type Places = [[u8; PIECE]; 8];

/// The code at each place, by row and column.
fn place(at: usize) -> (usize, usize) {
    let (row, col) = (at / TILE_COLS, at % TILE_COLS);
    let (half, lane, piece, byte) = (row / 8, row % 8, col / 8, col % 8);
    (4 * half + 2 * (lane / 4) + piece, lane % 4 * 8 + byte)
}

#[expect(clippy::cast_possible_truncation, reason = "at most eight bits")]
fn pack(_: &Codebook, canonical: &[u8], out: &mut [u8]) {
    let bits = out.len() / PIECE;
    let mut codes: Places = [[0; PIECE]; 8];
    for at in 0..TILE {
        let (j, i) = place(at);
        codes[j][i] = read_bits(canonical, at * bits, bits as u32) as u8;
    }
    let (pairs, more) = out.split_at_mut(2 * PIECE);
    for (b, pairs) in pairs.chunks_exact_mut(PIECE).enumerate() {
        // Halves and pieces, in the order of bits.
        for (i, pair) in pairs.iter_mut().enumerate() {
            *pair = (0..4).fold(0, |byte, w| byte | (codes[w / 2 * 4 + 2 * b + w % 2][i] & 3) << (2 * w));
        }
    }
    for (bit, piece) in (2..bits).zip(more.chunks_exact_mut(PIECE)) {
        let mut bytes = [0; PIECE];
        for (j, codes) in codes.iter().enumerate() {
            bytes.iter_mut().zip(codes).for_each(|(byte, code)| *byte |= (code >> bit & 1) << j);
        }
        for (lane, word) in piece.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
            *lane = u64::from_le_bytes(*word).rotate_left(bit as u32 % 4).to_le_bytes();
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most eight bits")]
fn unpack(_: &Codebook, pieces: &[u8], out: &mut [u8]) {
    let bits = out.len() / PIECE;
    out.fill(0);
    let mut codes: Places = [[0; PIECE]; 8];
    let (pairs, more) = pieces.split_at(2 * PIECE);
    for (b, pairs) in pairs.chunks_exact(PIECE).enumerate() {
        for (i, pair) in pairs.iter().enumerate() {
            (0..4).for_each(|w| codes[w / 2 * 4 + 2 * b + w % 2][i] = pair >> (2 * w) & 3);
        }
    }
    for (bit, piece) in (2..bits).zip(more.chunks_exact(PIECE)) {
        for (lane, word) in piece.as_chunks().0.iter().enumerate() {
            let bytes = u64::from_le_bytes(*word).rotate_right(bit as u32 % 4).to_le_bytes();
            for (j, codes) in codes.iter_mut().enumerate() {
                let codes = &mut codes[8 * lane..][..8];
                codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code |= (byte >> j & 1) << bit);
            }
        }
    }
    let mut writer = BitWriter::new(out);
    for at in 0..TILE {
        let (j, i) = place(at);
        writer.push(codes[j][i].into(), bits as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_kernels::cases::{Random, codebook};

    #[test]
    fn pieces_are_the_bits_of_the_codes_and_few_bits_have_the_first() {
        let mut random = Random::new(5);
        let mut tile =
            |bits: usize| -> Vec<u8> { (0..bits * PIECE).map(|_| random.next().to_le_bytes()[3]).collect() };
        let book = |bits: usize| codebook(format!("nuq-{bits}").parse().unwrap(), 1 << bits, 127);
        for bits in 2..=8 {
            let whole = tile(bits);
            let mut pieces = tile(bits);
            pack(&book(bits), &whole, &mut pieces);
            for few in 2..=bits {
                let mut codes = tile(few);
                unpack(&book(few), &pieces[..few * PIECE], &mut codes);
                for at in 0..TILE {
                    let code = read_bits(&whole, at * bits, bits as u32) & ((1 << few) - 1);
                    assert_eq!(read_bits(&codes, at * few, few as u32), code, "{few} of {bits} bits, {at}");
                }
            }
        }
    }
}
