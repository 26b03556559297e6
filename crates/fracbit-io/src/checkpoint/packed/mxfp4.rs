//! MXFP4: 32 floats of four bits (a sign, two bits of exponent, one of mantissa) and their common
//! power of two.
//!
//! GPT-OSS stores the matrices of all experts of a layer, `name` of shape `(experts, out, in)`, as
//! `name_blocks`, U8 `(experts, out, in / 32, 16)`, the first of two numbers in the lower bits of a
//! byte, and `name_scales`, U8 `(experts, out, in / 32)`, exponents plus 127. In transformers such
//! a tensor is `(experts, in, out)`; here it stays as it is stored.
//!
//! Source: OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3;
//! `integrations/mxfp4.py` of transformers 5.24.

use std::ops::Range;

use super::{Codec, Found, Numbers, Source};
use crate::dtype::{Dtype, Packing};
use crate::error::Error;

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// Every number of four bits.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Numbers by their places in the whole tensor. Pieces: codes, scales.
pub(super) fn numbers_into([codes, scales, ..]: [Numbers<'_>; 4], at: Range<usize>, out: &mut [f32]) {
    for (at, out) in at.zip(out) {
        let code = codes.bytes[at / 2] >> (at % 2 * 4) & 15;
        *out = E2M1[usize::from(code)] * power(scales.bytes[at / BLOCK]);
    }
}

/// `2 ^ (byte - 127)`; all bits set are no number.
fn power(byte: u8) -> f32 {
    match byte {
        0 => f32::MIN_POSITIVE / 2.0,
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// The tensor that is stored as `name_blocks` and `name_scales`.
///
/// # Errors
/// For types or shapes that do not belong together.
pub(super) fn find(source: &Source<'_>, name: &str) -> Result<Found, Error> {
    let [codes, scales] = ["_blocks", "_scales"].map(|end| format!("{name}{end}"));
    let blocks = &source.typed(&codes, &[Dtype::U8])?.shape;
    source.typed(&scales, &[Dtype::U8])?;
    let (Some((&half, outer)), true) = (blocks.split_last(), blocks.len() >= 3) else {
        let rule = format!("should have three dimensions or more, got shape {blocks:?}");
        return Err(source.refused(&codes, rule));
    };
    if half != BLOCK / 2 || outer.contains(&0) {
        let rule = format!("should be blocks of {} bytes, got shape {blocks:?}", BLOCK / 2);
        return Err(source.refused(&codes, rule));
    }
    source.shaped(&scales, outer, "a scale for each block")?;
    let mut shape = outer.to_vec();
    // Half as many bytes are there.
    shape.last_mut().into_iter().for_each(|blocks| *blocks *= BLOCK);
    Ok(Found {
        name: name.to_owned(),
        packing: Packing::Mxfp4,
        shape,
        codec: Codec::Mxfp4,
        pieces: [Some(codes), Some(scales), None, None],
        spent: Vec::new(),
    })
}
