//! bitsandbytes: NF4 and FP4, and the matrices of LLM.int8.
//!
//! * Of 4 bits: `name.weight`, mostly U8 `(out * in / 2, 1)` (another type holds the same bytes),
//!   the first of two numbers in the upper bits of a byte; `name.weight.quant_map`, F32 `(16)`,
//!   what a code stands for; `name.weight.absmax`, what each block of 64 or more of them is
//!   multiplied by; and `name.weight.quant_state.bitsandbytes__nf4` or `__fp4`, the text of a JSON
//!   object with shape and length of a block. With double quantization `absmax` is U8, places in
//!   `name.weight.nested_quant_map`, F32 `(256)`, and a factor is that entry times
//!   `name.weight.nested_absmax`, F32, one for each block of them, plus `nested_offset`.
//! * LLM.int8: `name.weight`, I8 `(out, in)`, and `name.SCB`, F32 `(out)`, the largest magnitude of
//!   each row, which 127 stands for; `name.weight_format`, where it is there, says 0: by rows.
//!
//! Source: `functional.py` of bitsandbytes 0.50.2.

use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use super::grid::{Codes, Grid, Groups, Zeros};
use super::{Codec, Found, Numbers, Source};
use crate::dtype::{Dtype, Packing};
use crate::error::Error;

/// Before `nf4` or `fp4` in the name of a tensor.
const STATE: &str = ".weight.quant_state.bitsandbytes__";
/// What the largest magnitude of a row is divided by, as a factor.
const PART: f32 = 1.0 / 127.0;

/// Codes of 4 bits in blocks. Pieces: codes, factors of blocks, factors of blocks of those.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Table {
    entries: [f32; 16],
    /// Codes of a block.
    block: usize,
    nested: Option<Nested>,
}

/// How factors of blocks are coded themselves.
#[derive(Clone, Debug, PartialEq)]
struct Nested {
    entries: Arc<[f32]>, // (256)
    /// Factors of a block.
    block: usize,
    offset: f32,
}

impl Table {
    /// Numbers by their places in the whole matrix.
    pub(super) fn numbers_into(
        &self,
        [codes, factors, outer, _]: [Numbers<'_>; 4],
        at: Range<usize>,
        out: &mut [f32],
    ) {
        let (mut known, mut factor) = (usize::MAX, 0.0);
        for (at, out) in at.zip(out) {
            let block = at / self.block;
            if block != known {
                known = block;
                factor = match &self.nested {
                    None => factors.at(block),
                    Some(nested) => {
                        let entry = nested.entries[usize::from(factors.bytes[block])];
                        entry * outer.at(block / nested.block) + nested.offset
                    }
                };
            }
            let code = codes.bytes[at / 2] >> (4 - at % 2 * 4) & 15;
            *out = self.entries[usize::from(code)] * factor;
        }
    }
}

/// What the JSON object says.
struct State {
    block: usize,
    shape: [usize; 2],
    nested: Option<(usize, f32)>,
}

/// The name of the matrix's state, its stem and its kind.
pub(super) fn state(name: &str) -> Option<(&str, &str)> {
    name.split_once(STATE)
}

/// The matrix with the state `stem.weight.quant_state.bitsandbytes__kind`.
///
/// # Errors
/// For a state that is no such object, for tensors whose lengths contradict it, and for a block of
/// `config.json` that says another kind.
pub(super) fn find(source: &Source<'_>, stem: &str, kind: &str) -> Result<Found, Error> {
    let name = format!("{stem}.weight");
    let of = |end: &str| format!("{name}.{end}");
    let (state_name, map, absmax) = (format!("{stem}{STATE}{kind}"), of("quant_map"), of("absmax"));
    let packing = match kind {
        "nf4" => Packing::Nf4,
        "fp4" => Packing::Fp4,
        _ => return Err(source.refused(&state_name, "should be of `nf4` or `fp4`".to_owned())),
    };
    if let Some(said) = source.text("bnb_4bit_quant_type")?.filter(|&said| said != kind) {
        let rule = format!("should be \"{kind}\", as `{state_name}` is called, got \"{said}\"");
        return Err(source.refused_block("bnb_4bit_quant_type", rule));
    }
    let State { block, shape, nested } = read(source, &state_name, kind)?;
    let [rows, cols] = shape;
    let codes = source.checkpoint.tensor(&name)?;
    let Some(all) = rows.checked_mul(cols).filter(|all| all.div_ceil(2) == codes.bytes.len() && *all > 0)
    else {
        let rule = format!("should hold {rows} x {cols} codes by its state, got {} bytes", codes.bytes.len());
        return Err(source.refused(&name, rule));
    };
    let entries = source.numbers(&map, 16, "an entry for each code")?;
    let blocks = all.div_ceil(block);
    let why = format!("one for each block of {block} of {all}");
    let (nested, outer) = match nested {
        None => {
            source.typed(&absmax, &[Dtype::F32])?;
            source.shaped(&absmax, &[blocks], &why)?;
            (None, None)
        }
        Some((each, offset)) => {
            source.typed(&absmax, &[Dtype::U8])?;
            source.shaped(&absmax, &[blocks], &why)?;
            let outer = of("nested_absmax");
            source.typed(&outer, &[Dtype::F32])?;
            source.shaped(&outer, &[blocks.div_ceil(each)], &format!("one for each {each} of {blocks}"))?;
            let entries = source.numbers(&of("nested_quant_map"), 256, "an entry for each byte")?.into();
            (Some(Nested { entries, block: each, offset }), Some(outer))
        }
    };
    let mut spent = vec![state_name, map];
    spent.extend(nested.is_some().then(|| of("nested_quant_map")));
    let entries = entries.try_into().unwrap_or([0.0; 16]);
    Ok(Found {
        name: name.clone(),
        packing,
        shape: shape.to_vec(),
        codec: Codec::Table(Table { entries, block, nested }),
        pieces: [Some(name), Some(absmax), outer, None],
        spent,
    })
}

fn read(source: &Source<'_>, name: &str, kind: &str) -> Result<State, Error> {
    source.typed(name, &[Dtype::U8])?;
    let bad = |what: &str| source.refused(name, format!("should be a JSON object with {what}"));
    let state: Value = serde_json::from_slice(source.checkpoint.tensor(name)?.bytes)
        .map_err(|e| source.refused(name, format!("should be the text of a JSON object: {e}")))?;
    if state.get("quant_type").and_then(Value::as_str) != Some(kind) {
        return Err(bad(&format!("`quant_type`: \"{kind}\"")));
    }
    let count = |value: Option<&Value>| Some(usize::try_from(value?.as_u64()?).ok()?).filter(|&n| n > 0);
    let block = count(state.get("blocksize")).ok_or_else(|| bad("`blocksize`, a number above 0"))?;
    let dims: Option<Vec<_>> = state
        .get("shape")
        .and_then(Value::as_array)
        .and_then(|dims| dims.iter().map(|dim| count(Some(dim))).collect());
    let shape = dims.and_then(|dims| dims.try_into().ok()).ok_or_else(|| bad("`shape`, rows and columns"))?;
    let nested = match state.get("nested_blocksize").filter(|value| !value.is_null()) {
        None => None,
        value => {
            let each = count(value).ok_or_else(|| bad("`nested_blocksize`, a number above 0"))?;
            let offset = state.get("nested_offset").and_then(Value::as_f64);
            Some((each, offset.ok_or_else(|| bad("`nested_offset`, a number"))? as f32))
        }
    };
    Ok(State { block, shape, nested })
}

/// The matrix of LLM.int8 whose rows' largest magnitudes are `stem.SCB`.
///
/// # Errors
/// For codes in another order than by rows, and for shapes that contradict each other.
pub(super) fn int8(source: &Source<'_>, stem: &str) -> Result<Found, Error> {
    let [name, scales, format] = ["weight", "SCB", "weight_format"].map(|end| format!("{stem}.{end}"));
    let [rows, cols] = source.matrix(&name, &[Dtype::I8])?;
    source.typed(&scales, &[Dtype::F32])?;
    source.shaped(&scales, &[rows], "one for each row")?;
    let mut spent = Vec::new();
    if source.checkpoint.contains(&format) {
        let got = source.checkpoint.tensor(&format)?.bytes;
        if got.iter().any(|&byte| byte != 0) {
            let rule = format!("should be 0, codes row by row, got {:?}", &got[..got.len().min(4)]);
            return Err(source.refused(&format, rule));
        }
        spent.push(format);
    }
    let grid = Grid {
        codes: Codes::Signed(cols),
        zeros: Zeros::All(0),
        groups: Groups::Of(cols),
        scales: [1, 0],
        factor: PART,
    };
    Ok(Found {
        name: name.clone(),
        packing: Packing::LlmInt8,
        shape: vec![rows, cols],
        codec: Codec::Grid(grid),
        pieces: [Some(name), Some(scales), None, None],
        spent,
    })
}
