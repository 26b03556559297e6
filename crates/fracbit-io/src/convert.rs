//! Stored floats to `f32`, exact for F8, F16, BF16 and F32; F64 is rounded to nearest, and blocks
//! of a GGUF file are as its format says.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::Dtype;

/// Converts `src` (little-endian elements of `dtype`) into `out`, without any scales.
///
/// # Panics
/// When `dtype` is no float type, the lengths differ or a block is not whole.
pub fn to_f32_into(dtype: Dtype, src: &[u8], out: &mut [f32]) {
    assert_eq!(src.len(), dtype.bytes(out.len()), "to_f32_into: as many elements as places");
    match dtype {
        Dtype::F32 => {
            for (o, s) in out.iter_mut().zip(src.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*s);
            }
        }
        Dtype::Bf16 => {
            for (o, s) in out.iter_mut().zip(src.as_chunks::<2>().0) {
                // The upper half of an f32.
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*s)) << 16);
            }
        }
        Dtype::F16 => {
            // The slice conversion uses F16C where the machine has it, but wants aligned elements;
            // a file promises none.
            let mut block = [f16::ZERO; 512];
            for (o, s) in out.chunks_mut(block.len()).zip(src.chunks(2 * block.len())) {
                let block = &mut block[..o.len()];
                for (b, s) in block.iter_mut().zip(s.as_chunks::<2>().0) {
                    *b = f16::from_le_bytes(*s);
                }
                block.convert_to_f32_slice(o);
            }
        }
        Dtype::F8E4M3 => out.iter_mut().zip(src).for_each(|(o, s)| *o = E4M3[usize::from(*s)]),
        Dtype::F64 => {
            for (o, s) in out.iter_mut().zip(src.as_chunks::<8>().0) {
                *o = f64::from_le_bytes(*s) as f32;
            }
        }
        Dtype::Blocks(block) => block.dequantize(src, out),
        _ => panic!("to_f32_into: a float type, got {dtype}"),
    }
}

/// Every number of four bits of exponent (bias 7) and three of mantissa, as machine learning has
/// them: the largest exponent is one like others, only all bits set are no number (Micikevicius et
/// al. 2022, arXiv 2209.05433, table 1).
const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = if byte & 127 == 127 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        table[byte] = if byte < 128 { magnitude } else { -magnitude };
        byte += 1;
    }
    table
};

/// Index of the first value that is NaN or infinite.
pub(crate) fn first_non_finite(values: &[f32]) -> Option<usize> {
    const EXP: u32 = 0x7f80_0000;
    // Blockwise without branches, so that the common case (all finite) runs at memory speed.
    for (b, block) in values.chunks(1024).enumerate() {
        if block.iter().fold(false, |bad, v| bad | (v.to_bits() & EXP == EXP)) {
            return block.iter().position(|v| !v.is_finite()).map(|i| b * 1024 + i);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_half_patterns() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut out = vec![0.0; 1 << 16];
        to_f32_into(Dtype::F16, &bytes, &mut out);
        for (i, &got) in (0..=u16::MAX).zip(&out) {
            // Independent oracle from the definition of binary16.
            let (e, m) = (i32::from(i >> 10 & 31), f64::from(i & 1023));
            let sign = if i >> 15 == 1 { -1.0 } else { 1.0 };
            let want = match e {
                31 if m == 0.0 => sign * f64::INFINITY,
                31 => f64::NAN,
                0 => sign * m * 2f64.powi(-24),
                _ => sign * (1.0 + m / 1024.0) * 2f64.powi(e - 15),
            };
            assert!(f64::from(got) == want || got.is_nan() && want.is_nan(), "{i:#06x}: {got} {want}");
        }
        to_f32_into(Dtype::Bf16, &bytes, &mut out);
        for (i, &got) in (0..=u16::MAX).zip(&out) {
            let want = f32::from_bits(u32::from(i) << 16);
            assert!(got == want || got.is_nan() && want.is_nan(), "{i:#06x}");
        }
    }

    #[test]
    fn all_numbers_of_8_bits() {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut out = vec![0.0; 256];
        to_f32_into(Dtype::F8E4M3, &bytes, &mut out);
        for (&byte, &got) in bytes.iter().zip(&out) {
            let (e, m) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let sign = if byte >> 7 == 1 { -1.0 } else { 1.0 };
            let want = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
            assert!(f64::from(got) == sign * want || byte & 127 == 127 && got.is_nan(), "{byte:#04x}: {got}");
        }
        assert_eq!((out[0x7e], out[0xfe], out[0x38]), (448.0, -448.0, 1.0));
    }

    #[test]
    fn finds_the_first() {
        for n in [1, 2, 1023, 1024, 1025, 3000] {
            for at in [0, n / 2, n - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut v = vec![f32::MAX; n];
                    assert_eq!(first_non_finite(&v), None);
                    v[at] = bad;
                    v[n - 1] = bad;
                    assert_eq!(first_non_finite(&v), Some(at));
                }
            }
        }
    }
}
