//! EXAONE 4: norms as those of OLMo 2, but for each head; where some layers have a window, the
//! others do not turn. Files that say the pattern by letters ("LLLG") list the layers, too.

use super::{Facts, GgufNames, Pattern, Window};
use crate::config::QkNorm;

pub(super) const FACTS: Facts = Facts {
    class_name: "Exaone4ForCausalLM",
    model_type: "exaone4",
    models: "EXAONE 4",
    gguf: GgufNames {
        names: &["exaone4"],
        norms: ["", "post_attention_layernorm", "post_feedforward_layernorm"],
        windows: true,
        ..GgufNames::USUAL
    },
    eps: 1e-5,
    window: Window::Field(Some(4096)),
    pattern: Pattern::AllBut(&["sliding_window_pattern"], 4),
    only_local_turn: true,
    qk_norm: QkNorm::Heads,
    pre_norms: false,
    post_norms: true,
    ..Facts::USUAL
};
