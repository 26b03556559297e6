//! AWQ in the layout of its GEMM kernel, as AutoAWQ writes it.
//!
//! Beside `name.qweight`, I32 `(in, out / 8)`, eight outputs of four bits in a word, lie
//! `name.qzeros`, I32 `(groups, out / 8)`, the same way, and `name.scales` `(groups, out)`. From
//! the lowest bits up a word has outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
//!
//! Source: `modules/linear/gemm.py` and `utils/packing_utils.py` of AutoAWQ 0.2.9.

use super::grid::{Codes, Grid, Groups, Order, Words, Zeros};
use super::{Codec, Found, SCALES, Source};
use crate::dtype::{Dtype, Packing};
use crate::error::Error;

const BITS: usize = 4;
/// Codes in a word.
const EACH: usize = 8;

/// Whether codes, zeros and scales have the shapes of this layout, which those of GPTQ never have.
pub(super) fn fits(source: &Source<'_>, stem: &str) -> bool {
    let cols = |end: &str| match source.checkpoint.info(&format!("{stem}.{end}")) {
        Ok(info) if info.shape.len() == 2 => info.shape[1],
        _ => 0,
    };
    let wide = cols("qweight");
    wide == cols("qzeros") && wide.checked_mul(EACH) == Some(cols("scales"))
}

/// The matrix whose codes are `stem.qweight`.
///
/// # Errors
/// For a block that says another version or number of bits, and for shapes that contradict it or
/// each other.
pub(super) fn find(source: &Source<'_>, stem: &str) -> Result<Found, Error> {
    for field in ["version", "checkpoint_format", "format"] {
        if let Some(version) = source.text(field)?.filter(|text| !text.eq_ignore_ascii_case("gemm")) {
            let rule = format!("should be \"gemm\", the one layout of AWQ that is read, got \"{version}\"");
            return Err(source.refused_block(field, rule));
        }
    }
    for field in ["bits", "w_bit"] {
        if let Some(bits) = source.integer(field)?.filter(|&bits| bits != BITS as i64) {
            return Err(source.refused_block(field, format!("should be {BITS}, got {bits}")));
        }
    }
    let [codes, zeros, scales] = ["qweight", "qzeros", "scales"].map(|end| format!("{stem}.{end}"));
    let [cols, wide] = source.matrix(&codes, &[Dtype::I32])?;
    let [count, zeros_wide] = source.matrix(&zeros, &[Dtype::I32])?;
    source.matrix(&scales, &SCALES)?;
    let Some(rows) = wide.checked_mul(EACH).filter(|_| zeros_wide == wide) else {
        let rule = format!("should have {wide} columns, as `{codes}`, got {zeros_wide}");
        return Err(source.refused(&zeros, rule));
    };
    source.shaped(&scales, &[count, rows], "rows of `qzeros`, eight columns for each of `qweight`")?;
    let said = match source.integer("group_size")? {
        None => source.integer("q_group_size")?,
        said => said,
    };
    let group = super::group(source, said, &scales, cols, count)?;
    let words = Words { order: Order::Interleaved, bits: BITS, step: 1, other: wide, less_one: false };
    let grid = Grid {
        codes: Codes::AlongRows(words),
        zeros: Zeros::Packed(words),
        groups: Groups::Of(group),
        scales: [1, rows],
        factor: 1.0,
    };
    Ok(Found {
        name: format!("{stem}.weight"),
        packing: Packing::Awq,
        shape: vec![rows, cols],
        codec: Codec::Grid(grid),
        pieces: [Some(codes), Some(scales), Some(zeros), None],
        spent: Vec::new(),
    })
}
