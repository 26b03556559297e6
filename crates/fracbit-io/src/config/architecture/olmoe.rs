//! OLMoE: experts in every layer, norms over all heads together.

use super::{Biases, ExpertFields, Facts, GgufNames};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "OlmoeForCausalLM",
    model_type: "olmoe",
    models: "OLMoE",
    gguf: GgufNames { names: &["olmoe"], renormalized: false, ..GgufNames::USUAL },
    context: 4096,
    eps: 1e-5,
    biases: Biases::Flag,
    experts: Some(ExpertFields { width: "intermediate_size", count: "num_experts", renormalized: false }),
    qk_norm: QkNorm::Whole,
    ..Facts::USUAL
};
