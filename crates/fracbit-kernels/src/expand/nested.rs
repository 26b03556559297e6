//! Nested scalar codes in memory: by bits, so that few of them are one run of bytes.
//!
//! In every strip the two lowest bits of all tiles come first, then the third bits, and so on. What
//! a precision reads is joined, some tiles at a time, to the tiles that the microkernels of plain
//! scalar codes of 4 or 8 bits take, whose tables are those of the precision, repeated. Bits lie
//! where a shift, a mask and an OR bring them to their places.
//!
//! Source of the layout by bits: Any-Precision LLM (arXiv 2402.10517), section 5.

use crate::Packing;
use fracbit_format::{BitWriter, Codebook, TILE, read_bits};

/// Bytes of a tile's two lowest bits.
const PAIRS: usize = TILE / 4;
/// Bytes of any further bit of a tile.
pub(super) const BIT: usize = TILE / 8;
/// Bytes of a tile of 4 bits.
const NIBBLES: usize = TILE / 2;
/// Bits beyond the lowest two.
const MORE: usize = 6;
/// Neighbouring tiles that are joined and then multiplied: joined tiles stay in the first-level
/// cache. A multiple of the tiles that share an activation scale.
pub(super) const CHUNK: usize = 32;

/// The bits of some neighbouring tiles of a strip.
#[derive(Clone, Copy, Debug)]
pub struct BitPlanes<'a> {
    count: u32,
    pairs: &'a [u8],
    more: [&'a [u8]; MORE],
}

/// Writes tiles, as [`NestedMicrokernel::new`] says.
pub type JoinFn = unsafe fn(&BitPlanes<'_>, &mut [u8]);

/// What joins bits for the microkernels of a backend.
#[derive(Clone, Copy, Debug)]
pub struct NestedMicrokernel(JoinFn);

impl NestedMicrokernel {
    /// A function that writes tiles of 4 bits a code, or of 8 where more than 4 are read, in the
    /// order of the microkernels for scalar codes that are installed with it. Bits that are not
    /// read are 0.
    ///
    /// # Safety
    /// `run` is sound on this processor for every [`BitPlanes`].
    #[must_use]
    #[expect(unsafe_code, reason = "the contract that lets safe code call microkernels with target features")]
    pub const unsafe fn new(run: JoinFn) -> Self {
        Self(run)
    }

    /// The meaning of all others.
    pub(crate) const fn scalar() -> Self {
        #[expect(unsafe_code, reason = "the contract of `new`, trivially kept")]
        // SAFETY: `join` needs no instruction set and is safe code.
        unsafe {
            Self::new(join)
        }
    }

    /// Joins; `out` is as long as the tiles.
    #[expect(unsafe_code, reason = "the one call of a microkernel")]
    fn join(&self, planes: &BitPlanes<'_>, out: &mut [u8]) {
        // SAFETY: `new` was promised the instruction set and soundness.
        unsafe { (self.0)(planes, out) }
    }
}

impl<'a> BitPlanes<'a> {
    /// How many bits of every code are read: 2 to 8.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Whether more than 4 bits of every code are read, so that tiles of 8 bits are joined.
    #[must_use]
    pub const fn wide(&self) -> bool {
        self.count > 4
    }

    /// The bits of each tile.
    pub fn tiles(&self) -> impl Iterator<Item = TileBits<'a>> {
        let more = self.more.map(|bits| bits.as_chunks().0);
        let pairs = self.pairs.as_chunks().0.iter().enumerate();
        pairs.map(move |(tile, pairs)| TileBits {
            pairs,
            more: more.map(|bits| bits.get(tile).unwrap_or(&[0; BIT])),
        })
    }
}

/// The bits of a tile.
#[derive(Clone, Copy, Debug)]
pub struct TileBits<'a> {
    /// The two lowest. Byte `32 v + i` (`v` below 2, `i` below 32) has those of bytes `64 v + i`
    /// and `64 v + 32 + i` of a tile of 4 bits: of their lower codes in bits 0 and 1, and 2 and 3,
    /// of their upper ones four places above.
    pub pairs: &'a [u8; PAIRS],
    /// The others, zeros where they are not read. Bit `j` below 4 of byte `i` is that of the lower
    /// code of byte `32 j + i` of a tile of 4 bits, bit `j + 4` that of the upper one.
    pub more: [&'a [u8; BIT]; MORE],
}

impl TileBits<'_> {
    /// The lower four bits of all codes, or the upper ones.
    fn nibbles(&self, upper: bool) -> [u8; NIBBLES] {
        std::array::from_fn(|at| {
            let (j, i) = (at / BIT, at % BIT);
            let of = |bits: &[u8; BIT], place: usize| (bits[i] >> j & 0x11) << place;
            let [third, fourth, rest @ ..] = &self.more;
            if upper {
                return rest.iter().zip(0..).fold(0, |byte, (bits, place)| byte | of(bits, place));
            }
            self.pairs[j / 2 * BIT + i] >> (j % 2 * 2) & 0x33 | of(third, 2) | of(fourth, 3)
        })
    }
}

/// Joins the bits of tiles in the canonical order: what every other [`JoinFn`] does in the order of
/// its microkernels.
fn join(planes: &BitPlanes<'_>, out: &mut [u8]) {
    let size = if planes.wide() { TILE } else { NIBBLES };
    for (tile, out) in planes.tiles().zip(out.chunks_exact_mut(size)) {
        let lower = tile.nibbles(false);
        if !planes.wide() {
            out.copy_from_slice(&lower);
            continue;
        }
        let both = lower.into_iter().zip(tile.nibbles(true));
        for (out, (l, h)) in out.as_chunks_mut::<2>().0.iter_mut().zip(both) {
            *out = [l & 15 | h << 4, l >> 4 | h & 0xf0];
        }
    }
}

/// Where the bits of a matrix are, and how they are joined.
#[derive(Clone, Debug)]
pub(super) struct Nested {
    microkernel: NestedMicrokernel,
    /// Tiles of a strip.
    across: usize,
    /// Bits of whole codes.
    bits: u32,
}

impl Nested {
    /// For matrices of `across` tiles a strip and codes of `bits` bits.
    pub(super) const fn new(microkernel: NestedMicrokernel, across: usize, bits: u32) -> Self {
        Self { microkernel, across, bits }
    }

    /// Puts a strip in order by bits: canonical tiles to `out`, of the same length. `packing` is
    /// that of the microkernel for 4 bits.
    pub(super) fn split(&self, nibbles: &Codebook, packing: Option<Packing>, strip: &[u8], out: &mut [u8]) {
        let bits = self.bits as usize;
        for (tile, code) in strip.chunks_exact(bits * BIT).enumerate() {
            let codes: [u16; TILE] = std::array::from_fn(|i| read_bits(code, i * bits, self.bits));
            // The lower and the upper four bits of all codes, in the order of the microkernel.
            let halves = [0, 4].map(|shift| {
                let mut canonical = [0; NIBBLES];
                let mut writer = BitWriter::new(&mut canonical);
                codes.iter().for_each(|code| writer.push(code >> shift & 15, 4));
                let mut packed = canonical;
                if let Some(packing) = packing {
                    (packing.pack)(nibbles, &canonical, &mut packed);
                }
                packed
            });
            let (pairs, more) = out.split_at_mut(self.across * PAIRS);
            for (i, pair) in pairs[tile * PAIRS..][..PAIRS].iter_mut().enumerate() {
                let first = &halves[0][i / BIT * 2 * BIT + i % BIT..];
                *pair = first[0] & 0x33 | (first[BIT] & 0x33) << 2;
            }
            for (bit, plane) in (2..bits).zip(more.chunks_exact_mut(self.across * BIT)) {
                let from = &halves[bit / 4];
                for (i, byte) in plane[tile * BIT..][..BIT].iter_mut().enumerate() {
                    let of = |j: usize| (from[BIT * j + i] >> (bit % 4) & 0x11) << j;
                    *byte = of(0) | of(1) | of(2) | of(3);
                }
            }
        }
    }

    /// Joins tiles `first..` of a strip, as many as `out` takes at `count` bits.
    pub(super) fn join(&self, strip: &[u8], first: usize, count: u32, out: &mut [u8]) {
        let tiles = out.len() / if count > 4 { TILE } else { NIBBLES };
        let plane = |k: usize| {
            let start = self.across * (PAIRS + k * BIT) + first * BIT;
            if k + 2 < count as usize { &strip[start..start + tiles * BIT] } else { &[] }
        };
        let pairs = &strip[first * PAIRS..][..tiles * PAIRS];
        self.microkernel.join(&BitPlanes { count, pairs, more: std::array::from_fn(plane) }, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Random;

    #[test]
    fn joined_codes_are_the_lower_bits_of_whole_ones() {
        let mut random = Random::new(3);
        let across = 3;
        for bits in 2..=8u32 {
            let nested = Nested::new(NestedMicrokernel::scalar(), across, bits);
            let strip: Vec<u8> =
                (0..across * BIT * bits as usize).map(|_| random.next().to_le_bytes()[0]).collect();
            let nibbles = Codebook::new("nuq-4".parse().unwrap(), (0..16).collect(), 0.1).unwrap();
            let mut split = vec![0; strip.len()];
            nested.split(&nibbles, None, &strip, &mut split);
            for (count, first) in (2..=bits).flat_map(|count| (0..across).map(move |first| (count, first))) {
                let tiles = across - first;
                let width = if count > 4 { 8 } else { 4 };
                let mut joined = vec![0xa5; tiles * width * BIT];
                nested.join(&split, first, count, &mut joined);
                for i in 0..tiles * TILE {
                    let whole = read_bits(&strip, (first * TILE + i) * bits as usize, bits);
                    let want = whole & ((1 << count) - 1);
                    assert_eq!(read_bits(&joined, i * width, width as u32), want, "{bits}, {count}: {i}");
                }
            }
        }
    }
}
