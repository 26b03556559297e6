//! Bits of a canonical tile in the order that the microkernels load.
//!
//! Two orders, both permutations of the tile's bits, so that repacking costs no memory and can be
//! undone.
//!
//! *Words*: the tile as eight lanes of two rows each, `4 R` bytes; word `j` (16 bits) of all lanes
//! side by side makes vector `j`, and the last bytes of lanes of an odd number of bytes half a
//! vector. A window of a lane's tape is then one shift and one shift-and-insert of neighbouring
//! vectors, at the same place in all eight lanes, whatever the rate; the window past the last word
//! wraps to the next lane's first word.
//!
//! *Fields*: for codes of 2, 4 and 8 bits. Vector `m` holds in byte `k` the codes of `8 / bits`
//! products at once: field `f` belongs to the quad of columns that `field` says. One mask and one
//! shift give whole index vectors.

use fracbit_format::{BitWriter, Codebook, TILE_COLS, TILE_ROWS, read_bits};

/// The order of rows among lanes: even rows, then odd ones. Lane `i` of a *words* vector holds the
/// rows `2 i` and `2 i + 1`.
pub(crate) const LANES: [u8; TILE_ROWS] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];

/// Where byte `at` of a canonical tile of `len` bytes lies in the *words* order.
fn word_place(len: usize, at: usize) -> usize {
    let (lane, byte) = (at / (len / 8), at % (len / 8));
    if byte == len / 16 * 2 { 8 * byte + lane } else { byte / 2 * 16 + 2 * lane + byte % 2 }
}

/// Canonical to *words*.
pub(crate) fn to_words(_: &Codebook, tile: &[u8], out: &mut [u8]) {
    tile.iter().enumerate().for_each(|(at, &byte)| out[word_place(tile.len(), at)] = byte);
}

/// *Words* to canonical.
pub(crate) fn from_words(_: &Codebook, words: &[u8], out: &mut [u8]) {
    out.iter_mut().enumerate().for_each(|(at, byte)| *byte = words[word_place(words.len(), at)]);
}

/// Number of the weight (row-major in the canonical tile) whose code is at place `at` of the
/// *fields* order, of `bits` each.
fn field(bits: usize, at: usize) -> usize {
    let per = 8 / bits;
    let (byte, f) = (at / per, at % per);
    let (vector, k) = (byte / 16, byte % 16);
    // Four vectors (rows of four lanes each) hold `per` quads of columns.
    let (quad, lane) = (vector / 4 * per + f, vector % 4 * 4 + k / 4);
    usize::from(LANES[lane]) * TILE_COLS + 4 * quad + k % 4
}

fn bits_of(codebook: &Codebook) -> usize {
    usize::from(codebook.scheme().quarters()) / 4
}

/// Canonical to *fields*.
pub(crate) fn to_fields(codebook: &Codebook, tile: &[u8], out: &mut [u8]) {
    let bits = bits_of(codebook);
    let width = u32::try_from(bits).expect("at most 8 bits");
    let mut writer = BitWriter::new(out);
    (0..256).for_each(|at| writer.push(read_bits(tile, bits * field(bits, at), width), width));
}

/// *Fields* to canonical.
pub(crate) fn from_fields(codebook: &Codebook, fields: &[u8], out: &mut [u8]) {
    let bits = bits_of(codebook);
    let width = u32::try_from(bits).expect("at most 8 bits");
    let mut codes = [0u16; 256];
    (0..256).for_each(|at| codes[field(bits, at)] = read_bits(fields, bits * at, width));
    let mut writer = BitWriter::new(out);
    codes.iter().for_each(|&code| writer.push(code, width));
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_base::{Code, Family, Rate, Scheme};
    use fracbit_kernels::cases;

    #[test]
    fn both_orders_are_undone() {
        for name in [
            "tcq-1", "tcq-1.25", "tcq-1.5", "tcq-2", "tcq-4.75", "tcq-5", "vq-3.5", "nuq-2", "nuq-4", "nuq-8",
        ] {
            let book = cases::codebooks(name.parse().unwrap(), 0, 127).remove(0);
            let tile: Vec<u8> = (0..book.tile_bytes()).map(|i| (i * 89 + 7) as u8).collect();
            let (mut there, mut back) = (vec![0; tile.len()], vec![0; tile.len()]);
            to_words(&book, &tile, &mut there);
            from_words(&book, &there, &mut back);
            assert_eq!(back, tile, "{name}");
            if name.starts_with("nuq") {
                to_fields(&book, &tile, &mut there);
                from_fields(&book, &there, &mut back);
                assert_eq!(back, tile, "{name}");
            }
        }
    }

    #[test]
    fn words_hold_the_tape_of_two_rows_a_lane() {
        for quarters in [10u8, 11] {
            let scheme = Scheme::new(Family::Tcq(Code::Fine), Rate::quarter_bits(quarters.into())).unwrap();
            let book = cases::codebooks(scheme, 0, 127).remove(0);
            let tile: Vec<u8> = (0..book.tile_bytes()).map(|i| (i * 89 + 7) as u8).collect();
            let mut words = vec![0; tile.len()];
            to_words(&book, &tile, &mut words);
            for lane in 0..8 {
                let first = lane * 8 * usize::from(quarters);
                for j in 0..5 {
                    let want = read_bits(&tile, first + 16 * j, 16);
                    assert_eq!(read_bits(&words, 8 * (16 * j + 2 * lane), 16), want, "lane {lane} word {j}");
                }
                if quarters == 11 {
                    assert_eq!(read_bits(&words, 8 * (80 + lane), 8), read_bits(&tile, first + 80, 8));
                }
            }
        }
    }
}
