//! Rounding to nested scalar codebooks: bit by bit, from the coarsest code on.
//!
//! The coarsest code is that of the nearest value of its table; every further bit takes the nearer
//! of the two values that the code so far may become. So a code of few bits is the same whatever
//! follows it.

use crate::{Rounder, RounderError, ScalarRounder, scalar::above};
use fracbit_base::{Family, Rate, Scheme};
use fracbit_format::{BitWriter, Codebook, TILE, read_bits};

/// Rounds weights to a nested scalar codebook.
#[derive(Clone, Debug)]
pub struct NestedRounder {
    book: Codebook,
    base: ScalarRounder,
    /// For every precision but the last, for every code: the least weight that takes bit 1 next.
    cuts: Vec<Vec<f32>>,
    low: u32,
    /// Bits of every code that are there already; 0 for none.
    known: u32,
}

impl NestedRounder {
    /// A rounder for `book`.
    ///
    /// # Errors
    /// When `book` is not nested, or bit 1 does not stand for the larger value.
    pub fn new(book: Codebook) -> Result<Self, RounderError> {
        let Family::NestNuq(ladder) = book.scheme().family() else {
            return Err(RounderError::Family { want: "nest-nuq", got: book.scheme() });
        };
        let table = |bits| book.at(bits).expect("a table for each precision");
        let weight = |entry: i16| f64::from(f32::from(entry) * book.step());
        let mut cuts = Vec::new();
        for bits in ladder.low()..ladder.high() {
            let (halves, count) = (table(bits + 1), 1usize << bits);
            let ascend = halves[..count].iter().zip(&halves[count..]).all(|(a, b)| a <= b);
            if !ascend {
                return Err(RounderError::Order { scheme: book.scheme() });
            }
            let cut = |code: usize| above(f64::midpoint(weight(halves[code]), weight(halves[code + count])));
            cuts.push((0..count).map(cut).collect());
        }
        let scheme = Scheme::new(Family::Nuq, Rate::quarter_bits(4 * ladder.low()));
        let base = Codebook::new(scheme.expect("2 to 4 bits"), table(ladder.low()).to_vec(), book.step());
        let base = ScalarRounder::new(base.expect("a table of that scheme"))?;
        Ok(Self { book, base, cuts, low: ladder.low(), known: 0 })
    }

    /// The same, which keeps the lowest `bits` bits of the codes that it finds where it is to
    /// write: further bits of codes that were found before.
    ///
    /// # Panics
    /// When `bits` are no precision of the codebook.
    #[must_use]
    pub fn refining(mut self, bits: u32) -> Self {
        assert!(self.book.at(bits).is_some(), "{bits} bits of {}", self.book.scheme());
        self.known = bits;
        self
    }

    /// The code of `weight` whose lowest bits are `known`.
    fn code(&self, weight: f32, known: u16) -> u16 {
        let (mut code, first) = match self.known {
            0 => (self.base.nearest(weight), self.low),
            bits => (known & ((1 << bits) - 1), bits),
        };
        for (cuts, bits) in self.cuts[(first - self.low) as usize..].iter().zip(first..) {
            code |= u16::from(cuts[usize::from(code)] <= weight) << bits;
        }
        code
    }
}

impl Rounder for NestedRounder {
    fn codebook(&self) -> &Codebook {
        &self.book
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let bytes = self.book.tile_bytes();
        assert_eq!(codes.len(), tiles.len() * bytes, "bytes of {} tiles", tiles.len());
        let bits = u32::from(self.book.scheme().quarters() / 4);
        let mut known = [0; TILE];
        for (tile, code) in tiles.iter().zip(codes.chunks_exact_mut(bytes)) {
            if self.known > 0 {
                known = std::array::from_fn(|i| read_bits(code, i * bits as usize, bits));
            }
            let mut writer = BitWriter::new(code);
            tile.iter().zip(known).for_each(|(&weight, known)| writer.push(self.code(weight, known), bits));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{builtin, laws};

    #[test]
    fn codes_of_few_bits_are_the_beginnings_of_longer_ones() {
        let tiles = laws::tiles(3, 5);
        let codes = |name: &str, bits: usize| -> Vec<u16> {
            let book = builtin(name.parse().unwrap()).unwrap().clone();
            let codes = laws::encode(&NestedRounder::new(book).unwrap(), &tiles);
            (0..tiles.len() * TILE).map(|i| read_bits(&codes, i * bits, bits as u32)).collect()
        };
        let all = codes("nest-nuq-2..8", 8);
        for bits in 2..8 {
            let few = codes(&format!("nest-nuq-2..{bits}"), bits);
            assert!(few.iter().zip(&all).all(|(few, all)| *few == all & ((1 << bits) - 1)), "{bits} bits");
        }
        // Bit by bit it is the same.
        let book = |name: &str| builtin(name.parse().unwrap()).unwrap().clone();
        let mut step = codes("nest-nuq-2..2", 2);
        for bits in 3..=8usize {
            let rounder = NestedRounder::new(book(&format!("nest-nuq-2..{bits}"))).unwrap();
            let mut packed = vec![0; tiles.len() * rounder.codebook().tile_bytes()];
            {
                let mut writer = BitWriter::new(&mut packed);
                step.iter().for_each(|&code| writer.push(code, bits as u32));
            }
            rounder.refining(bits as u32 - 1).encode(&tiles, &mut packed);
            step = (0..step.len()).map(|i| read_bits(&packed, i * bits, bits as u32)).collect();
        }
        assert_eq!(step, all);
    }

    #[test]
    fn other_tables_are_refused() {
        let nuq = builtin("nuq-4".parse().unwrap()).unwrap().clone();
        assert!(NestedRounder::new(nuq).is_err());
        let falling = Codebook::new("nest-nuq-2..3".parse().unwrap(), (0..12).rev().collect(), 0.1).unwrap();
        assert!(NestedRounder::new(falling).is_err());
    }
}
