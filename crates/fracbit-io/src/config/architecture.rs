//! Architectures: each has a module that says what it is called, where its fields differ from those
//! of Llama and what its graph has. All else asks for these facts, not for names.

mod ernie4_5;
mod exaone4;
mod gemma2;
mod gemma3;
mod glm;
mod glm4;
mod granite;
mod granitemoe;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod seed_oss;
mod smollm3;

use super::{Activation, QkNorm};

/// What an architecture is: names, fields of its configuration with their defaults, tensors and
/// options of the graph.
#[derive(Debug)]
pub(crate) struct Facts {
    /// The name in `architectures`.
    pub(crate) class_name: &'static str,
    /// The name in `model_type`.
    pub(crate) model_type: &'static str,
    /// The models that have it, for pages.
    pub(crate) models: &'static str,
    /// `model_type` of the `text_config` of a model of text and images.
    pub(crate) inside: &'static [&'static str],
    /// `model_type` of a model of text and images whose `text_config` names none.
    pub(crate) unnamed_inside: Option<&'static str>,
    /// Names and order in GGUF files.
    pub(crate) gguf: GgufNames,
    /// How the tensors of a checkpoint are named and fused.
    pub(crate) layout: Layout,

    pub(crate) activation: Activation,
    /// Query and key heads where the file does not say.
    pub(crate) heads: Option<[usize; 2]>,
    /// Width of a head where the file does not say; `None`: that of all by their number.
    pub(crate) head_dim: Option<usize>,
    /// Rows of the embedding where the file does not say.
    pub(crate) vocab_size: Option<usize>,
    /// `max_position_embeddings` where the file does not say.
    pub(crate) context: usize,
    /// `rms_norm_eps` where the file does not say.
    pub(crate) eps: f64,
    /// `tie_word_embeddings` where the file does not say.
    pub(crate) tied: bool,
    pub(crate) biases: Biases,
    /// `mlp_bias` is read.
    pub(crate) mlp_bias: bool,
    /// Flags that are known and have to be false.
    pub(crate) without: &'static [&'static str],
    pub(crate) experts: Option<ExpertFields>,

    /// `rope_theta` where the file does not say.
    pub(crate) theta: f64,
    /// The part of a head that turns where the file does not say; `None`: always all of it.
    pub(crate) turning: Option<f64>,
    /// Neighbouring channels turn, as they are stored.
    pub(crate) interleaved_rope: bool,
    /// What layers with a window turn by, where that differs.
    pub(crate) local_rope: Option<LocalRope>,
    /// Frequencies have factors of their own, of a context of so many tokens.
    pub(crate) longrope: Option<usize>,
    /// Queries grow with their position; `rope_parameters` have to be there.
    pub(crate) growing: bool,
    pub(crate) window: Window,
    pub(crate) pattern: Pattern,
    /// `no_rope_layers` says which layers turn.
    pub(crate) some_turn: bool,
    /// Where some layers have a window, the others do not turn.
    pub(crate) only_local_turn: bool,

    pub(crate) qk_norm: QkNorm,
    /// What attention and MLP read is normalized before.
    pub(crate) pre_norms: bool,
    /// What attention and MLP write is normalized before.
    pub(crate) post_norms: bool,
    /// What stored gains lack.
    pub(crate) gain_offset: f64,
    /// The embedding is multiplied by the root of its width.
    pub(crate) scaled_embedding: bool,
    /// `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`
    /// are read.
    pub(crate) multipliers: bool,
    /// Scores are divided by the root of `query_pre_attn_scalar`, this where the file does not say.
    pub(crate) score_scalar: Option<f64>,
    pub(crate) caps: Caps,
}

/// Names of an architecture in GGUF files, and what llama.cpp's converter does to the weights.
#[derive(Debug)]
pub(crate) struct GgufNames {
    /// `general.architecture`, the one that is written first. Where several architectures share
    /// one, the first of them has it and metadata decide.
    pub(crate) names: &'static [&'static str],
    /// Rows of queries and keys are in the order of neighbouring channels, which the checkpoint's
    /// are not.
    pub(crate) paired: bool,
    /// Gate and up are one tensor, under the name of up.
    pub(crate) fused: bool,
    /// What `ffn_norm`, `post_attention_norm` and `post_ffw_norm` are called in the checkpoint.
    pub(crate) norms: [&'static str; 3],
    /// llama.cpp knows windows of it.
    pub(crate) windows: bool,
    /// llama.cpp divides the shares of experts by their sum.
    pub(crate) renormalized: bool,
    /// Models of so many layers have scores by the width for each head, others by that of a head.
    pub(crate) large: usize,
}

/// How the tensors of a checkpoint are named and fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Each for itself, under the names of Llama.
    Plain,
    /// Queries, keys and values are one tensor, gate and up another.
    FusedInputs,
    /// Gate and up are one tensor.
    FusedGate,
    /// The MLP is called a shared one, its gate and up are one tensor.
    SharedMlp,
    /// Experts each for itself, as `block_sparse_moe` with `w1`, `w3` and `w2`.
    SparseMoe,
    /// All experts of a block in two tensors.
    FusedExperts,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Biases {
    None,
    /// Queries, keys and values, always.
    Inputs,
    /// Queries, keys, values and outputs, by `attention_bias`.
    Flag,
    /// Queries, keys and values, by `attention_bias`, true where the file does not say.
    InputsFlag,
    /// Those, and the output by `attention_out_bias`.
    TwoFlags,
    /// All, by `use_bias`.
    Every,
}

/// The fields that say what the experts are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertFields {
    pub(crate) width: &'static str,
    pub(crate) count: &'static str,
    /// Always; otherwise by `norm_topk_prob`.
    pub(crate) renormalized: bool,
}

/// What layers with a window turn by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalRope {
    /// A base of their own, `rope_local_base_freq`.
    OwnBase,
    /// The same base, nothing stretched where there is one set of parameters.
    SameBase,
}

/// Which windows there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    None,
    /// `sliding_window`, null for none; this where it is left out.
    Field(Option<usize>),
    /// `sliding_window`, this where the file does not say.
    Always(usize),
    /// As `Field`, where `use_sliding_window` is true.
    Flag(Option<usize>),
}

/// Which layers have a window where `layer_types` does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// All of them, always.
    All,
    /// All but every so many, by the first of these fields that is there.
    AllBut(&'static [&'static str], usize),
    /// From `max_window_layers` on.
    From(u64),
    /// Those that do not turn.
    Unturned,
}

/// Whether scores and logits stay below a bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Caps {
    /// Not here, whatever a file says.
    Ignored,
    /// The fields have to be null.
    Refused,
    /// `attn_logit_softcapping` and `final_logit_softcapping`, these where the file does not say.
    Fields([f64; 2]),
}

impl Facts {
    /// Those of Llama, without its names and flags.
    const USUAL: Self = Self {
        class_name: "",
        model_type: "",
        models: "",
        inside: &[],
        unnamed_inside: None,
        gguf: GgufNames::USUAL,
        layout: Layout::Plain,
        activation: Activation::Silu,
        heads: None,
        head_dim: None,
        vocab_size: None,
        context: 2048,
        eps: 1e-6,
        tied: false,
        biases: Biases::None,
        mlp_bias: false,
        without: &[],
        experts: None,
        theta: 1e4,
        turning: None,
        interleaved_rope: false,
        local_rope: None,
        longrope: None,
        growing: false,
        window: Window::None,
        pattern: Pattern::All,
        some_turn: false,
        only_local_turn: false,
        qk_norm: QkNorm::Absent,
        pre_norms: true,
        post_norms: false,
        gain_offset: 0.0,
        scaled_embedding: false,
        multipliers: false,
        score_scalar: None,
        caps: Caps::Ignored,
    };
}

impl GgufNames {
    const USUAL: Self = Self {
        names: &[],
        paired: false,
        fused: false,
        norms: ["post_attention_layernorm", "", ""],
        windows: false,
        renormalized: true,
        large: 0,
    };
}

/// The list of architectures: what each is called here, and its module.
macro_rules! architectures {
    ($($name:ident => $module:ident),+ $(,)?) => {
        /// A supported decoder architecture.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "the names are the models' own")]
        pub enum Architecture {
            $($name),+
        }

        impl Architecture {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$name),+];

            /// What it is.
            pub(crate) const fn facts(self) -> &'static Facts {
                match self {
                    $(Self::$name => &$module::FACTS),+
                }
            }
        }
    };
}

architectures! {
    Llama => llama,
    Mistral => mistral,
    Ministral3 => ministral3,
    Qwen2 => qwen2,
    Qwen3 => qwen3,
    SmolLm3 => smollm3,
    Phi3 => phi3,
    Granite => granite,
    Gemma2 => gemma2,
    Gemma3 => gemma3,
    Qwen3Moe => qwen3_moe,
    Mixtral => mixtral,
    GraniteMoe => granitemoe,
    Olmoe => olmoe,
    Olmo2 => olmo2,
    Olmo3 => olmo3,
    Exaone4 => exaone4,
    SeedOss => seed_oss,
    Ernie45 => ernie4_5,
    Glm => glm,
    Glm4 => glm4,
}

impl Architecture {
    /// The name in `architectures`.
    #[must_use]
    pub const fn class_name(self) -> &'static str {
        self.facts().class_name
    }

    /// The name in `model_type`.
    #[must_use]
    pub const fn model_type(self) -> &'static str {
        self.facts().model_type
    }

    /// The models that have it, in words.
    #[must_use]
    pub const fn models(self) -> &'static str {
        self.facts().models
    }

    /// Whether there are experts in place of an MLP.
    #[must_use]
    pub const fn has_experts(self) -> bool {
        self.facts().experts.is_some()
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

    /// Those of which something holds, for messages.
    pub(super) fn those(holds: impl Fn(&Facts) -> bool) -> String {
        let all = Self::ALL.into_iter().filter(|arch| holds(arch.facts()));
        let all: Vec<String> = all.map(|arch| format!("`{}`", arch.model_type())).collect();
        all.join(", ")
    }
}
