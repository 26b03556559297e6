//! What a model is called.

/// A supported decoder architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    missing_docs,
    reason = "the names are the models' own; the table of `crate::config` says what they do"
)]
pub enum Architecture {
    Llama,
    Mistral,
    Ministral3,
    Qwen2,
    Qwen3,
    SmolLm3,
    Phi3,
    Granite,
    Gemma2,
    Gemma3,
    Qwen3Moe,
    Mixtral,
    GraniteMoe,
    Olmoe,
    Olmo2,
    Olmo3,
    Exaone4,
    SeedOss,
    Ernie45,
    Glm,
    Glm4,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::Llama,
        Self::Mistral,
        Self::Ministral3,
        Self::Qwen2,
        Self::Qwen3,
        Self::SmolLm3,
        Self::Phi3,
        Self::Granite,
        Self::Gemma2,
        Self::Gemma3,
        Self::Qwen3Moe,
        Self::Mixtral,
        Self::GraniteMoe,
        Self::Olmoe,
        Self::Olmo2,
        Self::Olmo3,
        Self::Exaone4,
        Self::SeedOss,
        Self::Ernie45,
        Self::Glm,
        Self::Glm4,
    ];

    /// The name in `architectures`.
    #[must_use]
    pub const fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Ministral3 => "Ministral3ForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::SmolLm3 => "SmolLM3ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
            Self::Granite => "GraniteForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::GraniteMoe => "GraniteMoeForCausalLM",
            Self::Olmoe => "OlmoeForCausalLM",
            Self::Olmo2 => "Olmo2ForCausalLM",
            Self::Olmo3 => "Olmo3ForCausalLM",
            Self::Exaone4 => "Exaone4ForCausalLM",
            Self::SeedOss => "SeedOssForCausalLM",
            Self::Ernie45 => "Ernie4_5ForCausalLM",
            Self::Glm => "GlmForCausalLM",
            Self::Glm4 => "Glm4ForCausalLM",
        }
    }

    /// The name in `model_type`.
    #[must_use]
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Ministral3 => "ministral3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::SmolLm3 => "smollm3",
            Self::Phi3 => "phi3",
            Self::Granite => "granite",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3_text",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
            Self::GraniteMoe => "granitemoe",
            Self::Olmoe => "olmoe",
            Self::Olmo2 => "olmo2",
            Self::Olmo3 => "olmo3",
            Self::Exaone4 => "exaone4",
            Self::SeedOss => "seed_oss",
            Self::Ernie45 => "ernie4_5",
            Self::Glm => "glm",
            Self::Glm4 => "glm4",
        }
    }

    /// The one with a `model_type`.
    #[must_use]
    pub fn of(model_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.model_type() == model_type)
    }

    /// All of them, for messages.
    pub(super) fn known() -> String {
        let list: Vec<String> =
            Self::ALL.iter().map(|a| format!("{} ({})", a.class_name(), a.model_type())).collect();
        list.join(", ")
    }

    /// Gemma 2 and 3: gains stored less 1, an embedding in units of its own, GELU, norms behind
    /// attention and MLP, too.
    pub(super) const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// GLM-4 before (`glm`) and since (`glm4`) April 2025: half of a head's channels turn.
    pub(super) const fn is_glm(self) -> bool {
        matches!(self, Self::Glm | Self::Glm4)
    }

    /// Whether there are experts in place of an MLP.
    #[must_use]
    pub const fn has_experts(self) -> bool {
        matches!(self, Self::Qwen3Moe | Self::Mixtral | Self::GraniteMoe | Self::Olmoe)
    }
}
