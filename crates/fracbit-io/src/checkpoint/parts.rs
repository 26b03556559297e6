//! One naming for all architectures: fused tensors in parts, experts under one set of names.

use super::{Checkpoint, Entry, Stored};
use crate::config::{Layout, ModelConfig};
use crate::error::Error;
use crate::header::TensorInfo;

/// The name of a tensor without the prefix of a language model beside others:
/// `language_model.model.*` in published files, `model.language_model.*` in what transformers has
/// written since 4.52, `model.text_model.*` in `idefics3` and `smolvlm`. `None` where it has none.
fn language_model(name: &str) -> Option<String> {
    let own = |prefix| Some(format!("model.{}", name.strip_prefix(prefix)?));
    let alone = name.strip_prefix("language_model.").map(str::to_owned);
    alone.or_else(|| own("model.language_model.")).or_else(|| own("model.text_model."))
}

impl Checkpoint {
    /// The same checkpoint with the parts of fused tensors under their own names: Phi-3 stores
    /// `q_proj`, `k_proj` and `v_proj` one above the other as `qkv_proj`, `gate_proj` and `up_proj`
    /// as `gate_up_proj` (as GLM does; Granite 4: `shared_mlp.input_linear`). The norms of `glm4`
    /// get the names that they have in Gemma. And those of a language model beside encoders of
    /// images without the prefix that they have there. A router becomes `mlp.gate`, the matrices of
    /// expert e `mlp.experts.e.gate_proj`, `up_proj` and `down_proj`, as they are called in
    /// `qwen3_moe` and `olmoe`: Mixtral calls them w1, w3 and w2, and Granite stores those of all
    /// experts together. Tensors of other models stay as they are, and so do those that are not
    /// there.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a fused tensor that has not all rows or has a bias; [`Error::Index`]
    /// for one stored beside its parts, or under two names.
    pub fn parted(mut self, config: &ModelConfig) -> Result<Self, Error> {
        let renamed = |stored: &String| Some((stored.clone(), language_model(stored)?));
        for (stored, name) in self.tensors.keys().filter_map(renamed).collect::<Vec<_>>() {
            self.rename(&stored, name)?;
        }
        self.adopt_prefix()?;
        match config.arch.facts().layout {
            Layout::Plain => {}
            Layout::FusedInputs => self.part_inputs(config)?,
            Layout::FusedGate => self.part_gates(config)?,
            Layout::SharedMlp => self.part_shared_mlp(config)?,
            Layout::SparseMoe => self.rename_experts(config)?,
            Layout::FusedExperts => self.part_experts(config)?,
        }
        Ok(self)
    }

    /// Gives a model that was stored alone (`layers.0...`, as embedding models are) or inside
    /// another (`base_model.model.model.layers.0...`) the usual names, by the one embedding that
    /// there is.
    fn adopt_prefix(&mut self) -> Result<(), Error> {
        const USUAL: &str = "model.";
        let embeddings = self.tensors.keys().filter_map(|name| name.strip_suffix("embed_tokens.weight"));
        let embeddings: Vec<String> = embeddings.map(str::to_owned).collect();
        let [prefix] = &embeddings[..] else { return Ok(()) };
        if prefix == USUAL {
            return Ok(());
        }
        let head = prefix.strip_suffix(USUAL).map(|outer| format!("{outer}lm_head."));
        let renamed = |stored: &String| {
            let of_head = head.as_ref().and_then(|head| stored.strip_prefix(head.as_str()));
            if let Some(rest) = of_head {
                return Some((stored.clone(), format!("lm_head.{rest}")));
            }
            let rest = stored.strip_prefix(prefix.as_str())?;
            let known = ["layers.", "embed_tokens.", "norm."].iter().any(|part| rest.starts_with(part));
            known.then(|| (stored.clone(), format!("{USUAL}{rest}")))
        };
        for (stored, name) in self.tensors.keys().filter_map(renamed).collect::<Vec<_>>() {
            self.rename(&stored, name)?;
        }
        Ok(())
    }

    fn part_inputs(&mut self, config: &ModelConfig) -> Result<(), Error> {
        let (q, kv, wide) = (config.q_dim(), config.kv_dim(), config.intermediate_size);
        for layer in 0..config.num_hidden_layers() {
            let fused = [
                (
                    "self_attn.qkv_proj",
                    vec![("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
                ),
                ("mlp.gate_up_proj", vec![("mlp.gate_proj", wide), ("mlp.up_proj", wide)]),
            ];
            for (whole, parts) in fused {
                let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
                self.part(&name(whole), parts.into_iter().map(|(part, rows)| (name(part), rows)).collect())?;
            }
        }
        Ok(())
    }

    fn part_shared_mlp(&mut self, config: &ModelConfig) -> Result<(), Error> {
        for layer in 0..config.num_hidden_layers() {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            self.part_gate_and_up(config, layer, "shared_mlp.input_linear")?;
            self.rename(&name("shared_mlp.output_linear"), name("mlp.down_proj"))?;
        }
        Ok(())
    }

    fn part_gate_and_up(&mut self, config: &ModelConfig, layer: usize, whole: &str) -> Result<(), Error> {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let halves = ["mlp.gate_proj", "mlp.up_proj"].map(|part| (name(part), config.intermediate_size));
        self.part(&name(whole), halves.to_vec())
    }

    fn part_gates(&mut self, config: &ModelConfig) -> Result<(), Error> {
        for layer in 0..config.num_hidden_layers() {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            self.part_gate_and_up(config, layer, "mlp.gate_up_proj")?;
            // A model of ours has the names already, of which one is another norm's here.
            if self.tensors.contains_key(&name("post_self_attn_layernorm")) {
                for (stored, own) in [
                    ("post_attention_layernorm", "pre_feedforward_layernorm"),
                    ("post_self_attn_layernorm", "post_attention_layernorm"),
                    ("post_mlp_layernorm", "post_feedforward_layernorm"),
                ] {
                    self.rename(&name(stored), name(own))?;
                }
            }
        }
        Ok(())
    }

    fn rename_experts(&mut self, config: &ModelConfig) -> Result<(), Error> {
        for (block, moe) in blocks(config) {
            self.rename(&format!("{moe}.gate.weight"), router(&block))?;
            for e in experts(config) {
                for (stored, which) in [("w1", "gate"), ("w3", "up"), ("w2", "down")] {
                    self.rename(&format!("{moe}.experts.{e}.{stored}.weight"), expert(&block, e, which))?;
                }
            }
        }
        Ok(())
    }

    fn part_experts(&mut self, config: &ModelConfig) -> Result<(), Error> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        for (block, moe) in blocks(config) {
            self.rename(&format!("{moe}.router.layer.weight"), router(&block))?;
            let gates_and_ups =
                experts(config).flat_map(|e| ["gate", "up"].map(|which| (expert(&block, e, which), inner)));
            self.part(&format!("{moe}.input_linear.weight"), gates_and_ups.collect())?;
            let downs = experts(config).map(|e| (expert(&block, e, "down"), width));
            self.part(&format!("{moe}.output_linear.weight"), downs.collect())?;
        }
        Ok(())
    }

    /// Gives a tensor another name.
    fn rename(&mut self, stored: &str, name: String) -> Result<(), Error> {
        if stored == name {
            return Ok(());
        }
        let Some(tensor) = self.tensors.remove(stored) else { return Ok(()) };
        if let Some(Entry { shard, .. }) = self.tensors.insert(name.clone(), tensor) {
            let rule = format!("tensor `{name}` should be stored once, and is again as `{stored}`");
            return Err(Error::Index { path: self.shards[shard].path.clone(), rule });
        }
        Ok(())
    }

    /// Puts parts in the place of a tensor: names and rows. One of three dimensions is so many
    /// matrices, one above the other.
    pub(super) fn part(&mut self, whole: &str, parts: Vec<(String, usize)>) -> Result<(), Error> {
        let Some(Entry { shard, info, scale, packed, .. }) = self.tensors.remove(whole) else {
            return Ok(());
        };
        let path = self.shards[shard].path.clone();
        let bias = whole.replace(".weight", ".bias");
        if self.tensors.contains_key(&bias) && !self.is_zero(&bias)? {
            let rule = "should not be there: this architecture has no biases".to_owned();
            return Err(Error::Tensor { path, tensor: bias, rule });
        }
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let (all, cols) = match info.shape[..] {
            [all, cols] => (all, cols),
            // They lie in the file, but for matrices without columns.
            [matrices, each, cols] => (matrices.saturating_mul(each), cols),
            _ => {
                let rule = format!("should be a matrix of {rows} rows by config.json, got {:?}", info.shape);
                return Err(Error::Tensor { path, tensor: whole.to_owned(), rule });
            }
        };
        if all != rows {
            let rule = format!("should have {rows} rows by config.json, got {all}");
            return Err(Error::Tensor { path, tensor: whole.to_owned(), rule });
        }
        let (mut start, mut first) = (info.range.start, 0);
        for (name, rows) in parts {
            // Rows of packed matrices do not lie one behind the other.
            let range = match packed {
                Some(_) => info.range.clone(),
                None => start..start + info.dtype.bytes(rows * cols),
            };
            start = range.end;
            let part = Entry {
                shard,
                info: TensorInfo { dtype: info.dtype, shape: vec![rows, cols], range },
                scale: scale.as_ref().map(|scale| scale.starting_at(first)),
                stored: Stored::AS_NAMED,
                packed: packed.as_ref().map(|packed| packed.starting_at(first)),
            };
            first += rows;
            if self.tensors.insert(name.clone(), part).is_some() {
                let rule = format!("tensor `{name}` should not be stored beside `{whole}`, which holds it");
                return Err(Error::Index { path, rule });
            }
        }
        Ok(())
    }
}

/// Names of all blocks, and of the part of each that holds its experts.
fn blocks(config: &ModelConfig) -> impl Iterator<Item = (String, String)> + use<> {
    let name = |layer| format!("model.layers.{layer}");
    (0..config.num_hidden_layers())
        .map(name)
        .map(|block| (block.clone(), format!("{block}.block_sparse_moe")))
}

fn experts(config: &ModelConfig) -> std::ops::Range<usize> {
    0..config.experts.map_or(0, |experts| experts.count)
}

fn router(block: &str) -> String {
    format!("{block}.mlp.gate.weight")
}

fn expert(block: &str, index: usize, which: &str) -> String {
    format!("{block}.mlp.experts.{index}.{which}_proj.weight")
}
