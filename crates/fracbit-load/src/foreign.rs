//! Weights that other programs quantized, told by how they store them.
//!
//! What `config.json` says of quantization is often not so: training in 4 bits leaves its block
//! beside weights that were merged again, and converters drop it. So the tensors decide, and the
//! block lends its name. What `fracbit_io` decodes ([`Checkpoint::unpacked`]) is a source like
//! others, with a note; the rest is refused by name.

use crate::{Error, directory::QUANT_METHOD};
use fracbit_io::{Checkpoint, Dtype, ModelConfig};
use serde_json::Value;

/// Ends of names of tensors of a quantized matrix, and who calls them so.
const MARKS: [(&str, &str); 18] = [
    (".weight.codes", "fracbit, whose block is missing in config.json"),
    (".qweight", "GPTQ or AWQ"),
    (".q_weight", "EXL2"),
    (".trellis", "EXL3"),
    (".weight._data", "quanto"),
    (".weight._packed", "quanto"),
    (".W_q", "HQQ"),
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    (".codebooks", "AQLM"),
    (".centroids.weight", "VPTQ"),
    (".qzeros", "GPTQ or AWQ"),
    ("_proj_blocks", "MXFP4"),
    (".dense_weights", "SpQR"),
    (".weight_packed_scale", "compressed-tensors"),
    (".oweight", "EETQ"),
    (".weight_scale_2", "ModelOpt"),
];

/// Whether `config.json` has another program's block of quantization, and what that calls the
/// program.
fn named(config: &ModelConfig) -> Option<Option<String>> {
    let says = |block: &Value, field: &str| block.get(field).and_then(Value::as_str).map(str::to_owned);
    if let Some(block) = &config.quantization_config {
        let bits = |field: &str| block.get(field).and_then(Value::as_bool) == Some(true);
        let loaded = || (bits("load_in_4bit") || bits("load_in_8bit")).then(|| "bitsandbytes".to_owned());
        return Some(says(block, "quant_method").or_else(loaded).or_else(|| says(block, "quant_algo")));
    }
    let block = config.raw.get("quantization").filter(|block| !block.is_null())?;
    Some(Some(says(block, "quant_method").unwrap_or_else(|| "MLX".to_owned())))
}

/// Whether another tool's block says that weights are 8-bit floats with scales: `fp8` of
/// transformers (DeepSeek-V3, Qwen3, Ministral 3), or those of `compressed-tensors`.
fn of_8_bit_floats(block: &Value) -> bool {
    let says = |field: &str, text: &str| block.get(field).and_then(Value::as_str) == Some(text);
    says("quant_method", "fp8")
        || says("quant_method", "compressed-tensors") && says("format", "float-quantized")
}

/// The first tensor that is another program's form of a matrix of the language model, and whose.
fn mark(checkpoint: &Checkpoint) -> Option<(String, &'static str)> {
    let of_text = |name: &&str| {
        !["vision", "visual", "audio"].iter().any(|part| name.contains(part))
            && ["layers.", "embed_tokens.", "lm_head."].iter().any(|part| name.contains(part))
    };
    let by_name = checkpoint.names().filter(of_text).find_map(|name| {
        let &(_, whose) = MARKS.iter().find(|(end, _)| name.ends_with(end))?;
        let whose = match name.strip_suffix(".qweight") {
            Some(stem) if checkpoint.contains(&format!("{stem}.g_idx")) => "GPTQ",
            _ => whose,
        };
        Some((name.to_owned(), whose))
    });
    let integers = |dtype| matches!(dtype, Dtype::U32 | Dtype::I32 | Dtype::U8 | Dtype::I8);
    by_name.or_else(|| {
        checkpoint.iter().find_map(|(name, info)| {
            let stem = name.strip_suffix(".weight").filter(|_| of_text(&name) && integers(info.dtype))?;
            let scaled = |end: &str| checkpoint.contains(&format!("{stem}{end}"));
            let whose = match info.dtype {
                Dtype::U32 if scaled(".scales") => "MLX",
                _ if scaled(".weight_scale") => "compressed-tensors, ModelOpt or BitNet",
                Dtype::U8 if info.shape.len() == 2 && info.shape[1] == 1 => "bitsandbytes",
                _ => return None,
            };
            Some((name.to_owned(), whose))
        })
    })
}

/// Decodes what can be decoded of another program's weights. A directory of ours is left alone.
///
/// # Errors
/// What is wrong with the tensors of such a program.
pub(crate) fn decoded(config: &ModelConfig, checkpoint: Checkpoint) -> Result<Checkpoint, Error> {
    if named(config).flatten().as_deref() == Some(QUANT_METHOD) {
        return Ok(checkpoint);
    }
    Ok(checkpoint.unpacked(config.quantization_config.as_ref())?)
}

/// That the weights were rounded before, and by what; `None` where they were not.
fn rounded(checkpoint: &Checkpoint) -> Option<String> {
    let mut counts: Vec<_> =
        checkpoint.packings().into_iter().map(|(packing, count)| (packing.name(), count)).collect();
    let floats = checkpoint.iter().filter(|(_, info)| info.dtype == Dtype::F8E4M3).count();
    counts.extend((floats > 0).then_some(("8-bit floats", floats)));
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name}, {count} tensors")).collect();
    (!counts.is_empty()).then(|| {
        format!(
            "`{}`: the weights were quantized before ({}); quantizing them again adds to what they lost",
            checkpoint.path().display(),
            counts.join("; ")
        )
    })
}

/// Looks whether another program quantized these weights. `Ok` with a note where they were and are
/// decoded, and where `config.json` says so and they are whole.
///
/// # Errors
/// [`Error::Quantized`] naming the tensor, and the program by its block or by how it stores
/// weights.
pub(crate) fn check(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<Option<String>, Error> {
    let named = named(config);
    if named.as_ref().is_some_and(|name| name.as_deref() == Some(QUANT_METHOD)) {
        return Ok(None);
    }
    let named = named.filter(|_| !config.quantization_config.as_ref().is_some_and(of_8_bit_floats));
    let path = checkpoint.dir().to_path_buf();
    match (mark(checkpoint), named) {
        (Some((tensor, whose)), named) => {
            let whose = match named.flatten() {
                Some(named) => format!("{named}, as config.json says"),
                None => format!("{whose}, by the names of its tensors"),
            };
            let rule = format!("the weights are quantized already (by {whose}; it has `{tensor}`)");
            Err(Error::Quantized { path, rule })
        }
        (None, _) if rounded(checkpoint).is_some() => Ok(rounded(checkpoint)),
        (None, Some(named)) => Ok(Some(format!(
            "`{}` says that the weights are quantized{}, they are whole: read as they are",
            path.join(fracbit_io::config::CONFIG).display(),
            named.map(|named| format!(" ({named})")).unwrap_or_default()
        ))),
        (None, None) => Ok(None),
    }
}
