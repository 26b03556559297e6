//! Keys and values as caches of every type hold them, by the processor's rounding.

use fracbit_kernels::{Vectors, vectors::LEVELS};
use fracbit_kernels_cuda::ops::{CacheType, PAGE};
use half::f16;

/// A key or a value of a head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Row {
    Halves(Vec<u16>),
    Bytes(Vec<i16>, f32),
    Levels(Vec<i16>, f32),
}

impl Row {
    /// `x` as the processor rounds it for keys (`which` 0) or values (1).
    pub(crate) fn of(kind: CacheType, which: usize, x: &[f32]) -> Self {
        let mut codes = vec![0; x.len()];
        match (kind, which) {
            (CacheType::Half, _) => Self::Halves(x.iter().map(|&v| f16::from_f32(v).to_bits()).collect()),
            (CacheType::Eight, _) | (CacheType::Six, 0) => {
                let scale = Vectors::scalar().round(x, 127, &mut codes);
                Self::Bytes(codes, scale)
            }
            (CacheType::Six | CacheType::Four, _) => {
                let scale = Vectors::scalar().round_to_levels(x, &mut codes);
                Self::Levels(codes, scale)
            }
        }
    }

    /// What it stands for.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        let level = |&place: &i16| f64::from(LEVELS[place as usize]);
        match self {
            Self::Halves(halves) => halves.iter().map(|&h| f16::from_bits(h).to_f64()).collect(),
            Self::Bytes(codes, scale) => {
                codes.iter().map(|&code| f64::from(code) * f64::from(*scale)).collect()
            }
            Self::Levels(places, scale) => places.iter().map(|at| level(at) * f64::from(*scale)).collect(),
        }
    }
}

/// The byte of a block that holds dimension `i` of a row, and which of its halves.
fn place(of: &Row, which: usize, d: usize, slot: usize, i: usize) -> (usize, usize) {
    let (bits, part) = match of {
        Row::Levels(..) => (4, i % 2),
        _ => (8, 0),
    };
    let row = if which == 0 { d.next_multiple_of(16) } else { d } * bits / 8;
    let at = i * bits / 8;
    let at = if which == 0 { slot * row + at } else { slot / 2 * 2 * row + 2 * at + slot % 2 };
    (at, part)
}

/// Where the scale of a row lies in a block.
fn scale(block: &[u8], slot: usize) -> usize {
    block.len() - 4 * (PAGE - slot)
}

/// Writes a row to its slot of a block of keys or values of a head on a page.
pub(crate) fn put(row: &Row, which: usize, block: &mut [u8], slot: usize) {
    match row {
        Row::Halves(halves) => {
            let to = &mut block[2 * slot * halves.len()..];
            for (to, half) in to.chunks_exact_mut(2).zip(halves) {
                to.copy_from_slice(&half.to_le_bytes());
            }
        }
        Row::Bytes(codes, scale_of) | Row::Levels(codes, scale_of) => {
            for (i, &code) in codes.iter().enumerate() {
                let (at, part) = place(row, which, codes.len(), slot, i);
                block[at] = match row {
                    Row::Levels(..) => block[at] & (0xF0 >> (4 * part)) | (code as u8) << (4 * part),
                    _ if which == 0 => code as u8,
                    _ => (code + 128) as u8,
                };
            }
            let at = scale(block, slot);
            block[at..at + 4].copy_from_slice(&scale_of.to_le_bytes());
        }
    }
}

/// The row in a slot; `like` says of which representation and width.
pub(crate) fn get(like: &Row, which: usize, block: &[u8], slot: usize) -> Row {
    let code = |i: usize, d: usize| -> i16 {
        let (at, part) = place(like, which, d, slot, i);
        match like {
            Row::Levels(..) => i16::from(block[at] >> (4 * part) & 15),
            _ if which == 0 => i16::from(block[at].cast_signed()),
            _ => i16::from(block[at]) - 128,
        }
    };
    let at = |of: usize| f32::from_le_bytes(block[of..of + 4].try_into().expect("four bytes"));
    match like {
        Row::Halves(halves) => {
            let from = &block[2 * slot * halves.len()..][..2 * halves.len()];
            Row::Halves(from.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
        }
        Row::Bytes(codes, _) => {
            Row::Bytes((0..codes.len()).map(|i| code(i, codes.len())).collect(), at(scale(block, slot)))
        }
        Row::Levels(codes, _) => {
            Row::Levels((0..codes.len()).map(|i| code(i, codes.len())).collect(), at(scale(block, slot)))
        }
    }
}
