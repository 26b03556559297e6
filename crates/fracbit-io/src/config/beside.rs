//! Language models beside encoders of images or sounds.

use super::{Architecture, Error, Facts, Fields, clip};

impl Fields {
    /// The language model beside encoders of images or sounds as one of its own: that of
    /// `text_config`, or (Qwen2-VL and 2.5-VL as published) what stands beside `vision_config`.
    pub(super) fn text_alone(self) -> Result<Self, Error> {
        let Some(kind) = self.text("model_type")?.filter(|kind| Architecture::of(kind).is_none()) else {
            return Ok(self);
        };
        let (mut text, arch) = match self.object("text_config", "")? {
            Some(text) => {
                let inner = text.text("model_type")?;
                let here = |facts: &Facts| match inner {
                    Some(inner) => facts.model_type == inner || facts.inside.contains(&inner),
                    None => facts.unnamed_inside == Some(kind),
                };
                let arch = Architecture::ALL.into_iter().find(|arch| here(arch.facts()));
                let Some(arch) = arch else {
                    let got = text.text("model_type")?.map_or("none".to_owned(), clip);
                    let rule = format!("should be one of {}, got `{got}`", Architecture::known());
                    return Err(self.bad("text_config.model_type", rule));
                };
                (text, arch)
            }
            None if matches!(kind, "qwen2_vl" | "qwen2_5_vl") => {
                let mut map = self.map.clone();
                map.remove("vision_config");
                (Self { path: self.path.clone(), prefix: "", map }, Architecture::Qwen2)
            }
            None => return Ok(self),
        };
        for field in [
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "tie_word_embeddings",
            "torch_dtype",
            "dtype",
            "quantization_config",
            "quantization",
        ] {
            if let (Some(outer), None) = (self.get(field), text.get(field)) {
                text.map.insert(field.to_owned(), outer.clone());
            }
        }
        text.map.insert("architectures".to_owned(), vec![arch.class_name()].into());
        text.map.insert("model_type".to_owned(), arch.model_type().into());
        Ok(text)
    }
}
