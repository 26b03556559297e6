//! Granite 4 without state-space layers and experts.

use serde_json::Value;

use super::{Architecture, Error, Fields, MAX_SIZE, clip};

/// Its own names in `architectures` and `model_type`.
const HYBRID: (&str, &str) = ("GraniteMoeHybridForCausalLM", "granitemoehybrid");

impl Fields {
    /// The dense Granite 4 models (350M, 1B, Micro) are of the class of the hybrid ones, and
    /// compute what Granite 3 does: this writes them so. Only the MLP is the *shared* one there, by
    /// its name and its width.
    pub(super) fn dense_granite(mut self) -> Result<Self, Error> {
        let (class, model_type) = HYBRID;
        let by_class = || self.get("architectures") == Some(&Value::from(vec![class]));
        match self.text("model_type")? {
            Some(t) if t == model_type => {}
            None if by_class() => {}
            _ => return Ok(self),
        }
        if self.get("architectures").is_some() && !by_class() {
            return Err(self.bad("architectures", format!("should be `{class}`, as model_type says")));
        }
        // The defaults of transformers are hybrids with experts.
        if self.get("num_local_experts").and_then(Value::as_u64) != Some(0) {
            return Err(self.bad(
                "num_local_experts",
                format!("should be 0: experts beside a shared MLP (`{model_type}`) are not supported"),
            ));
        }
        let layers = match self.get("layer_types") {
            Some(Value::Array(list)) if list.iter().all(|v| v == "attention") => list.len(),
            _ => {
                return Err(self.bad(
                    "layer_types",
                    "should be `attention` for every layer: state-space layers (Mamba) are not supported",
                ));
            }
        };
        match self.text("position_embedding_type")? {
            Some("rope") => {}
            got => {
                let got = got.map_or("nothing".to_owned(), |got| format!("`{}`", clip(got)));
                return Err(self.bad("position_embedding_type", format!("should be `rope`, got {got}")));
            }
        }
        let width = self.size("shared_intermediate_size", MAX_SIZE, Some(1024))?;
        for (field, value) in [
            ("architectures", vec![Architecture::Granite.class_name()].into()),
            ("model_type", Architecture::Granite.model_type().into()),
            ("intermediate_size", width.into()),
            ("layer_types", vec!["full_attention"; layers].into()),
            // The shared MLP has none, whatever is said.
            ("mlp_bias", false.into()),
        ] {
            self.map.insert(field.to_owned(), value);
        }
        Ok(self)
    }
}
