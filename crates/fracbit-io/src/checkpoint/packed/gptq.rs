//! GPTQ, as AutoGPTQ and GPTQModel write it.
//!
//! Beside `name.qweight`, I32 `(in * bits / 32, out)`, a stream of codes down each column, lie
//! `name.qzeros`, I32 `(groups, out * bits / 32)`, a stream along each row, `name.scales`
//! `(groups, out)` and mostly `name.g_idx`, I32 `(in)`, the group of each input: with `desc_act`
//! groups are of inputs that were rounded one after another and need not be neighbours.
//!
//! `checkpoint_format` "gptq", which is meant where nothing is said, has zeros less one; "gptq_v2"
//! has them as they are. GPTQModel makes the one of the other by adding to whole words, so that a
//! zero of 0, stored as all ones, carries into the next, from which it was borrowed; in AutoGPTQ
//! there is no such zero. Of 3 bits, which words do not hold whole, each is kept within its bits.
//!
//! Sources: `nn_modules/qlinear/qlinear_cuda.py` of AutoGPTQ 0.7.1; `utils/model.py` of GPTQModel
//! 7.7.0.

use super::grid::{Codes, Grid, Groups, Order, Words, Zeros, words};
use super::{Codec, Found, SCALES, Source};
use crate::dtype::{Dtype, Packing};
use crate::error::Error;

/// Formats that differ from the two by what their kernels want.
const FORMATS: [&str; 2] = ["gptq", "gptq_v2"];

/// What the block says of all matrices.
struct Said {
    bits: Option<i64>,
    group: Option<i64>,
    /// Matrices may have others.
    dynamic: bool,
    second: bool,
}

impl Said {
    fn read(source: &Source<'_>) -> Result<Self, Error> {
        if source.block.is_none() {
            let rule = "should say `quant_method`: \"gptq\" and `checkpoint_format`, without which the zeros of GPTQ are \
                unknown; there is no such block";
            return Err(source.refused_block("quant_method", rule.to_owned()));
        }
        let mut format = None;
        for field in ["checkpoint_format", "format"] {
            format = format.or(source.text(field)?);
        }
        let format = format.unwrap_or(FORMATS[0]);
        if !FORMATS.contains(&format) {
            let rule = format!("should be \"{}\" or \"{}\", got \"{format}\"", FORMATS[0], FORMATS[1]);
            return Err(source.refused_block("checkpoint_format", rule));
        }
        if source.field("is_marlin_format").is_some_and(|value| value.as_bool() != Some(false)) {
            let rule = "should be false: tensors in Marlin's order are not read".to_owned();
            return Err(source.refused_block("is_marlin_format", rule));
        }
        Ok(Self {
            bits: source.integer("bits")?,
            group: source.integer("group_size")?,
            dynamic: source.field("dynamic").is_some(),
            second: format == FORMATS[1],
        })
    }
}

/// The matrix whose codes are `stem.qweight`.
pub(super) fn find(source: &Source<'_>, stem: &str) -> Result<Found, Error> {
    let said = Said::read(source)?;
    let [codes, zeros, scales, listed] =
        ["qweight", "qzeros", "scales", "g_idx"].map(|end| format!("{stem}.{end}"));
    let [down, rows] = source.matrix(&codes, &[Dtype::I32])?;
    let [count, zero_words] = source.matrix(&zeros, &[Dtype::I32])?;
    source.matrix(&scales, &SCALES)?;
    let fits = |bits: &usize| words(*bits, rows) == Some(zero_words);
    let whole = |bits: &usize| rows.checked_mul(*bits).is_some_and(|all| all.is_multiple_of(32));
    let Some(bits) = [2, 3, 4, 8].into_iter().find(|bits| fits(bits) && whole(bits)) else {
        let rule = format!(
            "should have a zero of 2, 3, 4 or 8 bits for each of the {rows} columns of `{codes}` in {count} rows of whole words, \
            got {zero_words} words"
        );
        return Err(source.refused(&zeros, rule));
    };
    if said.bits.is_some_and(|said| said != bits as i64) && !said.dynamic {
        let rule = format!("should be {bits}, the bits of `{zeros}`, got {}", said.bits.unwrap_or_default());
        return Err(source.refused_block("bits", rule));
    }
    let all = down.checked_mul(32).filter(|all| all.is_multiple_of(bits));
    let Some(cols) = all.map(|all| all / bits) else {
        let rule = format!("rows should be words of whole codes of {bits} bits, got {down}");
        return Err(source.refused(&codes, rule));
    };
    source.shaped(&scales, &[count, rows], "as `qzeros` has groups and `qweight` has columns")?;
    let listed = Some(listed).filter(|name| source.checkpoint.contains(name));
    let groups = match &listed {
        Some(name) => {
            source.listed(name, cols, count)?;
            Groups::Listed
        }
        None => Groups::Of(super::group(source, said.group, &scales, cols, count)?),
    };
    let stream = |step, other, less_one| Words { order: Order::Stream, bits, step, other, less_one };
    let grid = Grid {
        codes: Codes::AlongColumns(stream(rows, 1, false)),
        zeros: Zeros::Packed(stream(1, zero_words, !said.second)),
        groups,
        scales: [1, rows],
        factor: 1.0,
    };
    Ok(Found {
        name: format!("{stem}.weight"),
        packing: Packing::Gptq(bits as u8),
        shape: vec![rows, cols],
        codec: Codec::Grid(grid),
        pieces: [Some(codes), Some(scales), Some(zeros), listed],
        spent: Vec::new(),
    })
}
