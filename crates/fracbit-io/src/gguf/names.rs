//! Tensors: llama.cpp's names and the Hugging Face names of the same, and what its converter
//! changed.
//!
//! Names: `gguf.constants.TENSOR_NAMES` and `gguf.tensor_mapping` of the Python package. Changes:
//! `convert_hf_to_gguf.py` of llama.cpp, by architecture.

use std::path::Path;

use crate::checkpoint::{EMBED, HEAD, Stored};
use crate::config::{Architecture, GgufNames, ModelConfig};
use crate::error::Error;
use crate::header::TensorInfo;

/// How llama.cpp calls an architecture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// `general.architecture`.
    pub(super) name: &'static str,
    /// What it is here, as far as the name says.
    pub(super) arch: Architecture,
}

/// All names that are known. Where several architectures share one (`llama` is Mixtral's, too), the
/// first of them has it and metadata decide.
pub(super) fn families() -> Vec<Family> {
    let mut all: Vec<Family> = Vec::new();
    for arch in Architecture::ALL {
        for name in arch.facts().gguf.names {
            if all.iter().all(|family| family.name != *name) {
                all.push(Family { name, arch });
            }
        }
    }
    all
}

/// The names of an architecture's models.
pub(super) fn names_of(arch: Architecture) -> &'static GgufNames {
    &arch.facts().gguf
}

/// The name that is written.
pub(super) fn written(arch: Architecture) -> &'static str {
    names_of(arch).names[0]
}

/// Names within a block, but for the feed-forward part.
const BLOCK: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate_inp", "mlp.gate"),
];

const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")];

/// Where a tensor of the file goes.
#[derive(Debug, PartialEq)]
pub(crate) enum Place {
    /// Under one name.
    One(String),
    /// The matrices of all experts, one above the other, under these names.
    Experts(Vec<String>),
    /// Nowhere: it is part of the configuration.
    Config,
}

/// The place of a tensor of a model, and what its numbers are beside its name's.
///
/// # Errors
/// [`Error::Tensor`] for a name that models of this architecture do not have.
pub(crate) fn place(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    config: &ModelConfig,
) -> Result<(Place, Stored), Error> {
    let bad = |rule: String| Error::Tensor { path: path.to_owned(), tensor: name.to_owned(), rule };
    let unknown =
        || bad(format!("should be one that models of architecture `{}` have", written(config.arch)));
    let one = |name: &str, stored| Ok((Place::One(name.to_owned()), stored));
    let shift = if config.gain_offset == 0.0 || !name.ends_with("norm.weight") { 0.0 } else { 1.0 };
    let norm = Stored { shift, ..Stored::AS_NAMED };
    match name {
        "token_embd.weight" => return one(EMBED, Stored::AS_NAMED),
        "output.weight" => return one(HEAD, Stored::AS_NAMED),
        "output_norm.weight" => return one("model.norm.weight", norm),
        "rope_freqs.weight" | "rope_factors_long.weight" | "rope_factors_short.weight" => {
            return Ok((Place::Config, Stored::AS_NAMED));
        }
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.").and_then(|n| n.split_once('.')).ok_or_else(unknown)?;
    let layer: usize = layer.parse().ok().filter(|l: &usize| l.to_string() == layer).ok_or_else(unknown)?;
    let (part, kind) = rest.rsplit_once('.').ok_or_else(unknown)?;
    if !matches!(kind, "weight" | "bias") {
        return Err(unknown());
    }
    let hf = |own: &str| format!("model.layers.{layer}.{own}.{kind}");
    let names = names_of(config.arch);
    if let Some((_, own)) = BLOCK.iter().find(|(p, _)| *p == part) {
        let heads = match part {
            "attn_q" if names.paired => Some(config.num_attention_heads),
            "attn_k" if names.paired => Some(config.num_key_value_heads),
            _ => None,
        };
        let stored = match heads {
            None => norm,
            Some(heads) => {
                let rows = info.shape[0];
                if !rows.is_multiple_of(2 * heads) {
                    let rule =
                        format!("should have heads of an even size for {heads} heads, has {rows} rows");
                    return Err(bad(rule));
                }
                Stored { paired_head: rows / heads, ..Stored::AS_NAMED }
            }
        };
        return one(&hf(own), stored);
    }
    let at = ["ffn_norm", "post_attention_norm", "post_ffw_norm"].iter().position(|n| *n == part);
    if let Some(own) = at.map(|at| names.norms[at]) {
        return if own.is_empty() { Err(unknown()) } else { one(&hf(own), norm) };
    }
    if part == "ffn_up" && names.fused {
        return one(&hf("mlp.gate_up_proj"), Stored::AS_NAMED);
    }
    let count = config.experts.map_or(0, |experts| experts.count);
    for (ours, own) in EXPERTS {
        if part == ours {
            return one(&hf(&format!("mlp.{own}")), Stored::AS_NAMED);
        }
        let expert = |e: usize| hf(&format!("mlp.experts.{e}.{own}"));
        let Some(rest) = part.strip_prefix(ours) else { continue };
        if rest == "_exps" && kind == "weight" && count > 0 {
            return Ok((Place::Experts((0..count).map(expert).collect()), Stored::AS_NAMED));
        }
        // As files of the first half of 2024 have them, each for itself.
        if let Some(e) = rest.strip_prefix('.').and_then(|e| e.parse().ok()).filter(|e| *e < count) {
            return one(&expert(e), Stored::AS_NAMED);
        }
    }
    Err(unknown())
}
