//! OLMo 3: OLMo 2 with windows. Where frequencies are stretched, those of layers without a window
//! are, as in training, transformers 4.57 and vLLM (transformers 5 stretched all of them by mistake
//! until 5.13, which writes a set of `rope_parameters` for each type of layers).

use super::{Biases, Facts, GgufNames, LocalRope, Pattern, Window};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "Olmo3ForCausalLM",
    model_type: "olmo3",
    models: "OLMo 3",
    gguf: GgufNames {
        names: &["olmo2"],
        norms: ["", "post_attention_layernorm", "post_feedforward_layernorm"],
        windows: true,
        ..GgufNames::USUAL
    },
    eps: 1e-5,
    biases: Biases::Flag,
    local_rope: Some(LocalRope::SameBase),
    window: Window::Always(4096),
    pattern: Pattern::AllBut(&[], 4),
    qk_norm: QkNorm::Whole,
    pre_norms: false,
    post_norms: true,
    ..Facts::USUAL
};
