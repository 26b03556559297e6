//! The block types of GGUF: how many numbers a block holds, in how many bytes, and what the numbers
//! are.
//!
//! The layouts are those of `ggml`; the Python package `gguf` 0.19 is the reference, which
//! `tests/gguf.rs` compares every type with, bit for bit. All arithmetic is in single precision and
//! in the order written there. A type that the package cannot dequantize (`Q8_1`, `Q8_K`, which
//! only hold activations, and `Q1_0`) is none of these.

use half::f16;

use super::grids;

/// Numbers in the larger blocks.
const SUPER: usize = 256;

/// The sixteen levels of `IQ4_NL` and `IQ4_XS`.
const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the numbers of E2M1 (two bits of exponent, one of mantissa).
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A block type: the encoding of a tensor of a GGUF file that is not one number after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are the format's own")]
#[expect(non_camel_case_types, reason = "the names are the format's own")]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq1S,
    Iq1M,
    Iq4Nl,
    Iq4Xs,
    Tq1_0,
    Tq2_0,
    Mxfp4,
    Nvfp4,
}

impl BlockType {
    /// All of them.
    pub const ALL: [Self; 23] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq2S,
        Self::Iq3Xxs,
        Self::Iq3S,
        Self::Iq1S,
        Self::Iq1M,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    /// Name, number in a file, numbers in a block, bytes of a block.
    const fn facts(self) -> (&'static str, u32, usize, usize) {
        match self {
            Self::Q4_0 => ("Q4_0", 2, 32, 18),
            Self::Q4_1 => ("Q4_1", 3, 32, 20),
            Self::Q5_0 => ("Q5_0", 6, 32, 22),
            Self::Q5_1 => ("Q5_1", 7, 32, 24),
            Self::Q8_0 => ("Q8_0", 8, 32, 34),
            Self::Q2_K => ("Q2_K", 10, SUPER, 84),
            Self::Q3_K => ("Q3_K", 11, SUPER, 110),
            Self::Q4_K => ("Q4_K", 12, SUPER, 144),
            Self::Q5_K => ("Q5_K", 13, SUPER, 176),
            Self::Q6_K => ("Q6_K", 14, SUPER, 210),
            Self::Iq2Xxs => ("IQ2_XXS", 16, SUPER, 66),
            Self::Iq2Xs => ("IQ2_XS", 17, SUPER, 74),
            Self::Iq3Xxs => ("IQ3_XXS", 18, SUPER, 98),
            Self::Iq1S => ("IQ1_S", 19, SUPER, 50),
            Self::Iq4Nl => ("IQ4_NL", 20, 32, 18),
            Self::Iq3S => ("IQ3_S", 21, SUPER, 110),
            Self::Iq2S => ("IQ2_S", 22, SUPER, 82),
            Self::Iq4Xs => ("IQ4_XS", 23, SUPER, 136),
            Self::Iq1M => ("IQ1_M", 29, SUPER, 56),
            Self::Tq1_0 => ("TQ1_0", 34, SUPER, 54),
            Self::Tq2_0 => ("TQ2_0", 35, SUPER, 66),
            Self::Mxfp4 => ("MXFP4", 39, 32, 17),
            Self::Nvfp4 => ("NVFP4", 40, 64, 36),
        }
    }

    /// The name that `ggml` gives it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// The number that stands for it in a file.
    #[must_use]
    pub const fn id(self) -> u32 {
        self.facts().1
    }

    /// Numbers in a block.
    #[must_use]
    pub const fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Writes the numbers of whole blocks.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn dequantize(self, blocks: &[u8], out: &mut [f32]) {
        let (len, bytes) = (self.block_len(), self.block_bytes());
        assert!(
            blocks.len().is_multiple_of(bytes) && blocks.len() / bytes * len == out.len(),
            "dequantize: as many places as the blocks of {} have numbers",
            self.name()
        );
        let one = match self {
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q2_K => q2_k,
            Self::Q3_K => q3_k,
            Self::Q4_K => q4_k,
            Self::Q5_K => q5_k,
            Self::Q6_K => q6_k,
            Self::Iq2Xxs => grids::iq2_xxs,
            Self::Iq2Xs => grids::iq2_xs,
            Self::Iq2S => grids::iq2_s,
            Self::Iq3Xxs => grids::iq3_xxs,
            Self::Iq3S => grids::iq3_s,
            Self::Iq1S => grids::iq1_s,
            Self::Iq1M => grids::iq1_m,
            Self::Iq4Nl => iq4_nl,
            Self::Iq4Xs => iq4_xs,
            Self::Tq1_0 => tq1_0,
            Self::Tq2_0 => tq2_0,
            Self::Mxfp4 => mxfp4,
            Self::Nvfp4 => nvfp4,
        };
        blocks.chunks_exact(bytes).zip(out.chunks_exact_mut(len)).for_each(|(block, out)| one(block, out));
    }
}

/// A number in half precision.
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The low four bits of all bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4))
}

/// The fields of `bits` bits of all bytes, the lowest of each byte first.
fn fields(bytes: &[u8], bits: u32) -> impl Iterator<Item = u8> + '_ {
    let mask = ((1u16 << bits) - 1) as u8;
    (0..8).step_by(bits as usize).flat_map(move |shift| bytes.iter().map(move |b| b >> shift & mask))
}

fn fill(out: &mut [f32], numbers: impl Iterator<Item = f32>) {
    out.iter_mut().zip(numbers).for_each(|(o, n)| *o = n);
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    fill(out, nibbles(&block[2..]).map(|q| d * f32::from(q as i8 - 8)));
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block), half(&block[2..]));
    fill(out, nibbles(&block[4..]).map(|q| d * f32::from(q) + m));
}

/// The fifth bits of 32 numbers, as 16.
fn fifths(bytes: &[u8]) -> impl Iterator<Item = u8> + use<> {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    (0..32).map(move |i| ((bits >> i & 1) << 4) as u8)
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let numbers = nibbles(&block[6..]).zip(fifths(&block[2..]));
    fill(out, numbers.map(|(low, high)| d * f32::from((low | high) as i8 - 16)));
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block), half(&block[2..]));
    let numbers = nibbles(&block[8..]).zip(fifths(&block[4..]));
    fill(out, numbers.map(|(low, high)| d * f32::from(low | high) + m));
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    fill(out, block[2..].iter().map(|&q| f32::from(q as i8) * d));
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, rest) = block.split_at(16);
    let (qs, ends) = rest.split_at(64);
    let (d, dmin) = (half(ends), half(&ends[2..]));
    let mut numbers = qs.chunks_exact(32).flat_map(|qs| fields(qs, 2));
    for (out, &scale) in out.chunks_exact_mut(16).zip(scales) {
        let (dl, ml) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        fill(out, numbers.by_ref().take(16).map(|q| dl * f32::from(q) - ml));
    }
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, rest) = block.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (packed, d) = rest.split_at(12);
    let d = half(d);
    let scale_lows = nibbles(&packed[..8]);
    let scale_highs = fields(&packed[8..], 2);
    let scales = scale_lows.zip(scale_highs).map(|(l, h)| d * f32::from((l | h << 4) as i8 - 32));
    // A bit that is not set takes 4 away.
    let signs = fields(high, 1).map(|bit| 4 - 4 * bit as i8);
    let mut numbers = low.chunks_exact(32).flat_map(|qs| fields(qs, 2)).zip(signs);
    for (out, dl) in out.chunks_exact_mut(16).zip(scales) {
        fill(out, numbers.by_ref().take(16).map(|(q, less)| dl * f32::from(q as i8 - less)));
    }
}

/// The eight scales and minima of six bits of `Q4_K` and `Q5_K`, from twelve bytes.
fn scales_and_minima(packed: &[u8]) -> [(f32, f32); 8] {
    let mut pairs = [(0.0, 0.0); 8];
    for i in 0..4 {
        let (scale, min, both) = (packed[i], packed[4 + i], packed[8 + i]);
        pairs[i] = (f32::from(scale & 63), f32::from(min & 63));
        pairs[4 + i] = (f32::from(both & 15 | scale >> 2 & 48), f32::from(both >> 4 | min >> 2 & 48));
    }
    pairs
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block), half(&block[2..]));
    let pairs = scales_and_minima(&block[4..16]);
    let halves = block[16..].chunks_exact(32).flat_map(|qs| [(qs, 0), (qs, 4)]);
    for ((out, (scale, min)), (qs, shift)) in out.chunks_exact_mut(32).zip(pairs).zip(halves) {
        let (d, m) = (d * scale, dmin * min);
        fill(out, qs.iter().map(|q| d * f32::from(q >> shift & 15) - m));
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block), half(&block[2..]));
    let pairs = scales_and_minima(&block[4..16]);
    let high = &block[16..48];
    let halves = block[48..].chunks_exact(32).flat_map(|qs| [(qs, 0), (qs, 4)]);
    for (i, ((out, (scale, min)), (qs, shift))) in out.chunks_exact_mut(32).zip(pairs).zip(halves).enumerate()
    {
        let (d, m) = (d * scale, dmin * min);
        let numbers = qs.iter().zip(high).map(|(q, h)| q >> shift & 15 | (h >> i & 1) << 4);
        fill(out, numbers.map(|q| d * f32::from(q) - m));
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    let d = half(d);
    let lows = low.chunks_exact(64).flat_map(nibbles);
    let highs = high.chunks_exact(32).flat_map(|h| fields(h, 2));
    let mut numbers = lows.zip(highs);
    for (out, &scale) in out.chunks_exact_mut(16).zip(scales) {
        let d = d * f32::from(scale as i8);
        fill(out, numbers.by_ref().take(16).map(|(l, h)| d * f32::from((l | h << 4) as i8 - 32)));
    }
}

fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    fill(out, nibbles(&block[2..]).map(|q| d * f32::from(NONLINEAR[usize::from(q)])));
}

fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    let highs = u16::from_le_bytes([block[2], block[3]]);
    for (i, (out, qs)) in out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)).enumerate() {
        let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
        let high = (highs >> (2 * i) & 3) as u8;
        let d = d * f32::from((low | high << 4) as i8 - 32);
        fill(out, nibbles(qs).map(|q| d * f32::from(NONLINEAR[usize::from(q)])));
    }
}

fn tq1_0(block: &[u8], out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (qs, rest) = block.split_at(48);
    let (last, d) = rest.split_at(4);
    let d = half(d);
    // Each byte holds five digits of base 3 (of the last four, four), as a fraction of 256.
    let groups = [(&qs[..32], 5), (&qs[32..], 5), (last, 4)];
    let digits = groups.into_iter().flat_map(|(bytes, digits)| {
        POWERS[..digits].iter().flat_map(move |p| bytes.iter().map(|b| b.wrapping_mul(*p)))
    });
    fill(out, digits.map(|q| d * f32::from(((u16::from(q) * 3) >> 8) as i8 - 1)));
}

fn tq2_0(block: &[u8], out: &mut [f32]) {
    let (qs, d) = block.split_at(64);
    let d = half(d);
    fill(out, qs.chunks_exact(32).flat_map(|qs| fields(qs, 2)).map(|q| d * f32::from(q as i8 - 1)));
}

fn mxfp4(block: &[u8], out: &mut [f32]) {
    // Half of two to the power of the exponent, for levels that are doubled; the least are
    // subnormal.
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    fill(out, nibbles(&block[1..]).map(|q| d * f32::from(E2M1[usize::from(q)])));
}

fn nvfp4(block: &[u8], out: &mut [f32]) {
    let (scales, qs) = block.split_at(4);
    for ((out, &scale), qs) in out.chunks_exact_mut(16).zip(scales).zip(qs.chunks_exact(8)) {
        let d = half_of_ue4m3(scale);
        fill(out, nibbles(qs).map(|q| d * f32::from(E2M1[usize::from(q)])));
    }
}

/// Half of a number of four bits of exponent (bias 7) and three of mantissa; what is no number is
/// 0.
fn half_of_ue4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    match exponent {
        _ if byte == 0x7f => 0.0,
        0 => mantissa as f32 / 1024.0,
        _ => f32::from_bits((exponent + 119) << 23 | mantissa << 20),
    }
}
