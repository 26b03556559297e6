//! Integers and MXFP4 of compressed-tensors, which LLM Compressor writes.
//!
//! * `pack-quantized`: `name.weight_packed`, I32 `(out, in * bits / 32)`, a stream of codes along
//!   each row; `name.weight_scale` `(out, groups)`, `(out, 1)` or `(1)`; `name.weight_shape`, the
//!   two numbers `out` and `in`; `name.weight_zero_point`, I32 `(out * bits / 32, groups)`, a
//!   stream down each column, where the grid is asymmetric; `name.weight_g_idx` where groups are of
//!   inputs that were rounded one after another. Codes and zeros are `2 ^ (bits - 1)` more than the
//!   numbers.
//! * `int-quantized`: `name.weight`, I8 `(out, in)`, with scales as above and zeros as bytes.
//! * `mxfp4-pack-quantized`: `name.weight_packed`, U8 `(out, in / 2)`, see [`super::mxfp4`];
//!   `name.weight_scale`, U8 `(out, in / 32)`.
//!
//! Releases differ in how they pack codes of other bits than 2, 4 and 8, which are refused. Where
//! activations were to be rounded as well, they are not here.
//!
//! The block has groups of modules, each with a grid, and names or patterns that say which has
//! which. Whatever they say, a matrix should fit one of the grids.
//!
//! Source: `compressors/pack_quantized`, `naive_quantized` and `mxfp4` of compressed-tensors
//! 0.20.1.

use serde_json::Value;

use super::grid::{Codes, Grid, Groups, Order, Words, Zeros, words};
use super::{Codec, Found, SCALES, Source, mxfp4};
use crate::dtype::{Dtype, Packing};
use crate::error::Error;

const FORMATS: [&str; 6] = [
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
];

/// The grid of a group of modules.
#[derive(Clone, Debug)]
struct Said {
    bits: u64,
    float: bool,
    /// Columns that share a scale; `None`: a row's or all.
    group: Option<u64>,
    symmetric: bool,
}

/// The grids of the block.
fn said(source: &Source<'_>) -> Result<Vec<Said>, Error> {
    if source.block.is_none() {
        let rule = "should say `quant_method`: \"compressed-tensors\" and what the codes are; there is no such block";
        return Err(source.refused_block("quant_method", rule.to_owned()));
    }
    if let Some(format) = source.text("format")?.filter(|format| !FORMATS.contains(format)) {
        let rule = format!("should be one of {}, got \"{format}\"", FORMATS.join(", "));
        return Err(source.refused_block("format", rule));
    }
    let within = |field: &str, key: &str| source.field(field).and_then(|value| value.get(key));
    if let Some(format) = within("sparsity_config", "format").filter(|&format| format != "dense") {
        let rule = format!("should be \"dense\", got {format}");
        return Err(source.refused_block("sparsity_config.format", rule));
    }
    let turned = within("transform_config", "config_groups").and_then(Value::as_object);
    if turned.is_some_and(|groups| !groups.is_empty()) {
        let rule = "should be empty: matrices that want their input transformed are not read".to_owned();
        return Err(source.refused_block("transform_config.config_groups", rule));
    }
    let groups = source.field("config_groups").and_then(Value::as_object);
    let weights =
        groups.into_iter().flat_map(|groups| groups.values()).filter_map(|group| group.get("weights"));
    let one = |weights: &Value| {
        Some(Said {
            bits: weights.get("num_bits")?.as_u64()?,
            float: weights.get("type").and_then(Value::as_str) == Some("float"),
            group: weights.get("group_size").and_then(Value::as_u64),
            symmetric: weights.get("symmetric").and_then(Value::as_bool) != Some(false),
        })
    };
    Ok(weights.filter_map(one).collect())
}

/// The matrix whose codes are `stem.weight_packed`.
///
/// # Errors
/// For a block with a format that is not read or no grid of these tensors, and for shapes that
/// contradict each other.
pub(super) fn packed(source: &Source<'_>, stem: &str) -> Result<Found, Error> {
    let said = said(source)?;
    let [codes, shape] = ["weight_packed", "weight_shape"].map(|end| format!("{stem}.{end}"));
    if source.checkpoint.info(&codes)?.dtype == Dtype::U8 {
        return float(source, stem, &said);
    }
    let [rows, wide] = source.matrix(&codes, &[Dtype::I32])?;
    let Some(cols) = numbers(source, &shape)?.filter(|dims| dims[0] == rows).map(|dims| dims[1]) else {
        return Err(source.refused(&shape, format!("should be the {rows} rows of `{codes}` and its columns")));
    };
    let fits = |bits: &usize| words(*bits, cols) == Some(wide) && cols > 0;
    let Some(bits) = [2, 4, 8].into_iter().find(fits) else {
        let rule = format!("should hold {cols} codes of 2, 4 or 8 bits in a row, got {wide} words");
        return Err(source.refused(&codes, rule));
    };
    let half = 1 << (bits - 1);
    let of = |step, other| Words { order: Order::Stream, bits, step, other, less_one: false };
    let parts = Parts { stem, codes, bits, rows, cols };
    let mut found = on_grid(source, &said, &parts, Codes::AlongColumns(of(1, wide)), half)?;
    found.spent.push(shape);
    found.packing = Packing::PackQuantized(bits as u8);
    Ok(found)
}

/// The matrix that is stored as `stem.weight` in bytes.
///
/// # Errors
/// As for [`packed`].
pub(super) fn bytes(source: &Source<'_>, stem: &str) -> Result<Found, Error> {
    let said = said(source)?;
    let codes = format!("{stem}.weight");
    let [rows, cols] = source.matrix(&codes, &[Dtype::I8])?;
    on_grid(source, &said, &Parts { stem, codes, bits: 8, rows, cols }, Codes::Signed(cols), 0)
}

/// What is known of a matrix on the grid.
struct Parts<'a> {
    stem: &'a str,
    codes: String,
    bits: usize,
    rows: usize,
    cols: usize,
}

/// A matrix whose codes are `half` more than the numbers, with the scales and zeros beside it.
fn on_grid(
    source: &Source<'_>,
    said: &[Said],
    parts: &Parts<'_>,
    codes: Codes,
    half: i32,
) -> Result<Found, Error> {
    let &Parts { stem, bits, rows, cols, .. } = parts;
    let [scale, zero, listed] =
        ["weight_scale", "weight_zero_point", "weight_g_idx"].map(|end| format!("{stem}.{end}"));
    let shape = &source.typed(&scale, &SCALES)?.shape;
    let (strides, count) = match shape[..] {
        [] | [1] | [1, 1] => ([0, 0], 1),
        [n] | [n, 1] if n == rows => ([1, 0], 1),
        [n, count] if n == rows && count > 0 => ([count, 1], count),
        _ => {
            let rule = format!("should be one number or have a row for each of {rows}, got shape {shape:?}");
            return Err(source.refused(&scale, rule));
        }
    };
    let each = |said: &Said| match said.group.filter(|&size| size > 0) {
        Some(size) => usize::try_from(size).unwrap_or(usize::MAX),
        None => cols,
    };
    let fits = |said: &&Said| !said.float && said.bits == bits as u64 && cols.div_ceil(each(said)) == count;
    let Some(grid) = said.iter().find(fits) else {
        let rule = format!(
            "should have a grid of `{}`: integers of {bits} bits, {count} scales for {cols} columns",
            parts.codes
        );
        return Err(source.refused_block("config_groups", rule));
    };
    let there = |name: String| Some(name).filter(|name| source.checkpoint.contains(name));
    let (zero, listed) = (there(zero), there(listed));
    let zeros = match &zero {
        None if grid.symmetric => Zeros::All(half),
        None => {
            let rule = format!("should have `{stem}.weight_zero_point` beside it, the grid being asymmetric");
            return Err(source.refused(&parts.codes, rule));
        }
        Some(name) => {
            let info = source.typed(name, &[Dtype::I32, Dtype::I8])?;
            if info.dtype == Dtype::I8 {
                source.shaped(name, shape, "that of the scales")?;
                Zeros::Signed(half)
            } else {
                let down = words(bits, rows).unwrap_or(0);
                source.shaped(name, &[down, count], "a zero for each scale, packed down the rows")?;
                let (order, less_one) = (Order::Stream, false);
                Zeros::Packed(Words { order, bits, step: count, other: 1, less_one })
            }
        }
    };
    if matches!(zeros, Zeros::Packed(_)) && (half == 0 || strides[0] == 0) {
        let rule = "should be bytes beside codes in bytes, and packed beside scales of rows".to_owned();
        return Err(source.refused(zero.as_deref().unwrap_or_default(), rule));
    }
    // A list of -1 was made and never filled.
    let unfilled = |name: &String| {
        let bytes = source.checkpoint.tensor(name).map_or(&[][..], |view| view.bytes);
        bytes.iter().all(|&byte| byte == 0xff)
    };
    let spent = listed.iter().filter(|name| unfilled(name)).cloned().collect();
    let listed = listed.filter(|name| !unfilled(name));
    let groups = match &listed {
        Some(name) => {
            source.listed(name, cols, count)?;
            Groups::Listed
        }
        None => Groups::Of(each(grid)),
    };
    Ok(Found {
        name: format!("{stem}.weight"),
        packing: Packing::IntQuantized,
        shape: vec![rows, cols],
        codec: Codec::Grid(Grid { codes, zeros, groups, scales: strides, factor: 1.0 }),
        pieces: [Some(parts.codes.clone()), Some(scale), zero, listed],
        spent,
    })
}

/// Four-bit floats.
fn float(source: &Source<'_>, stem: &str, said: &[Said]) -> Result<Found, Error> {
    let [codes, scale, global, zero] =
        ["weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point"]
            .map(|end| format!("{stem}.{end}"));
    if source.checkpoint.contains(&global) {
        let rule = format!("should be MXFP4, which has no `{global}`: NVFP4 is not read");
        return Err(source.refused(&codes, rule));
    }
    if source.checkpoint.contains(&zero) {
        return Err(source.refused(&zero, "should not be there: MXFP4 has no zeros".to_owned()));
    }
    let [rows, half] = source.matrix(&codes, &[Dtype::U8])?;
    let [_, count] = source.matrix(&scale, &[Dtype::U8])?;
    let group = said.iter().find(|said| said.float && said.bits == 4 && said.group == Some(32));
    if group.is_none() {
        let rule = format!("should have the grid of `{codes}`: floats of 4 bits in groups of 32");
        return Err(source.refused_block("config_groups", rule));
    }
    if count.checked_mul(mxfp4::BLOCK / 2) != Some(half) {
        let rule = format!("should have a scale for 16 bytes of `{codes}`, which has {half}, got {count}");
        return Err(source.refused(&scale, rule));
    }
    source.shaped(&scale, &[rows, count], "the rows of the codes")?;
    Ok(Found {
        name: format!("{stem}.weight"),
        packing: Packing::Mxfp4,
        shape: vec![rows, 2 * half],
        codec: Codec::Mxfp4,
        pieces: [Some(codes), Some(scale), None, None],
        spent: Vec::new(),
    })
}

/// The two whole numbers of a tensor.
fn numbers(source: &Source<'_>, name: &str) -> Result<Option<[usize; 2]>, Error> {
    let info = source.typed(name, &[Dtype::I64, Dtype::I32])?;
    source.shaped(name, &[2], "two numbers")?;
    let bytes = source.checkpoint.tensor(name)?.bytes;
    let all: Vec<_> = match info.dtype {
        Dtype::I64 => {
            bytes.as_chunks().0.iter().map(|&b| usize::try_from(i64::from_le_bytes(b)).ok()).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|&b| usize::try_from(i32::from_le_bytes(b)).ok()).collect(),
    };
    Ok(match all[..] {
        [Some(rows), Some(cols)] => Some([rows, cols]),
        _ => None,
    })
}
