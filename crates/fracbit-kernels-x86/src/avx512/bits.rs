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

/// Codes of up to `BITS` bits (2 to 4).
#[derive(Clone, Copy)]
pub(super) struct Nibbles<const BITS: usize> {
    table: __m512i,
    plane: usize,
}

/// Codes of `BITS` bits (5 to 8).
#[derive(Clone, Copy)]
pub(super) struct Bytes<const BITS: usize> {
    table: [__m512i; 4],
    plane: usize,
}

impl<const BITS: usize> Expand for Nibbles<BITS> {
    const WIDE: bool = false;
    const BOUND: bool = true;
    const IN_EIGHTS: usize = 8;
    /// Two vectors of nibbles; two bits leave those of their neighbours in them.
    type Mid = [__m512i; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(args: &Args<'_>) -> Self {
        Self { table: line(&args.table[0]), plane: args.plane }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { table: flip(self.table), ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn ask(&self, _reads: Reads, code: *const u8, tile: usize, _bytes: usize) {
        ask(code, self.plane, tile, BITS);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: promised by the caller.
        unsafe { lower::<BITS>(code, self.plane) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, [even, odd]: Self::Mid) -> [[__m512i; 4]; 2] {
        let zero = _mm512_setzero_si512();
        // What stands above an index does not matter: the table repeats.
        let weights = |index| _mm512_permutexvar_epi8(index, self.table);
        let upper = |nibbles| _mm512_srli_epi16::<4>(nibbles);
        [[weights(even), weights(odd), zero, zero], [weights(upper(even)), weights(upper(odd)), zero, zero]]
    }
}

impl<const BITS: usize> Expand for Bytes<BITS> {
    const WIDE: bool = false;
    const BOUND: bool = true;
    /// Lower nibbles, and upper ones.
    type Mid = [[__m512i; 2]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(args: &Args<'_>) -> Self {
        let table = std::array::from_fn(|i| line(&args.table[i]));
        Self { table, plane: args.plane }
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
        // SAFETY: promised by the caller.
        unsafe {
            let mut upper = [_mm512_setzero_si512(); 2];
            for bit in 4..BITS {
                join(&mut upper, code.add(bit * self.plane), bit);
            }
            [lower::<4>(code, self.plane), upper]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, [lower, upper]: Self::Mid) -> [[__m512i; 4]; 2] {
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        let fifteen = _mm512_set1_epi8(15);
        let t = &self.table;
        for (piece, (low, high)) in lower.into_iter().zip(upper).enumerate() {
            let halves = [(low, _mm512_slli_epi16::<4>(high)), (_mm512_srli_epi16::<4>(low), high)];
            for (out, (low, high)) in out.iter_mut().zip(halves) {
                let index = _mm512_ternarylogic_epi64::<0xCA>(fifteen, low, high);
                // What stands above an index of up to six bits is not looked at.
                out[piece] = match BITS {
                    8 => full(index, t),
                    7 => _mm512_permutex2var_epi8(t[0], index, t[1]),
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

/// The lowest `BITS` bits of all codes, up to four.
///
/// # Safety
/// `code` starts a tile whose pieces are `plane` bytes apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn lower<const BITS: usize>(code: *const u8, plane: usize) -> [__m512i; 2] {
    // SAFETY: promised by the caller.
    unsafe {
        let first = _mm512_castsi256_si512(piece(code));
        let pairs = _mm512_inserti64x4::<1>(first, piece(code.add(plane)));
        let odd = _mm512_srli_epi16::<2>(pairs);
        if BITS == 2 {
            return [pairs, odd];
        }
        let mask = _mm512_set1_epi8(0x33);
        let mut out = [_mm512_and_si512(pairs, mask), _mm512_and_si512(odd, mask)];
        for bit in 2..BITS {
            join(&mut out, code.add(bit * plane), bit);
        }
        out
    }
}

/// Joins a bit of all codes, whose piece is at `at`, to the others of their nibbles.
///
/// # Safety
/// A piece is readable at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
unsafe fn join(nibbles: &mut [__m512i; 2], at: *const u8, bit: usize) {
    // SAFETY: promised by the caller.
    let both = _mm512_broadcast_i64x4(unsafe { piece(at) });
    let place = _mm512_set1_epi8([0x11, 0x22, 0x44, 0x88u8.cast_signed()][bit % 4]);
    for (odd, nibbles) in (0..).zip(nibbles) {
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
