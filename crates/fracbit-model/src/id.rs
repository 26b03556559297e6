//! Names of a model's parts.

use std::fmt;
use std::str::FromStr;

use fracbit_base::Shape;
use fracbit_io::{EmbeddingNames, ModelConfig, QkNorm};

use crate::{Error, RotationMode};

/// The seven linear layers of a decoder block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the models' own")]
pub enum LayerLinear {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl LayerLinear {
    /// All seven, in the order of the data's way through the block.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Place in [`LayerLinear::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The layers of a block that read the same input as this one, itself included: they may be
    /// fused.
    #[must_use]
    pub const fn with_same_input(self) -> &'static [Self] {
        match self {
            Self::Q | Self::K | Self::V => &[Self::Q, Self::K, Self::V],
            Self::O => &[Self::O],
            Self::Gate | Self::Up => &[Self::Gate, Self::Up],
            Self::Down => &[Self::Down],
        }
    }

    /// Hugging Face name within the block.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }
}

/// One weight matrix of a model. Prints and parses as the Hugging Face module name, without
/// `.weight`.
///
/// Where there are experts, gate, up and down are those of all of them, one above the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinearId {
    /// The token embedding; the head too where the two are tied.
    Embed,
    /// A linear layer of a block.
    Layer(usize, LayerLinear),
    /// The output head of a model whose embeddings are not tied.
    Head,
}

impl LinearId {
    /// Every matrix of a model: embedding, blocks in order, and the head unless it is the
    /// embedding.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> + use<> {
        let layers = 0..config.num_hidden_layers();
        std::iter::once(Self::Embed)
            .chain(layers.flat_map(|i| LayerLinear::ALL.into_iter().map(move |l| Self::Layer(i, l))))
            .chain((!config.tie_word_embeddings).then_some(Self::Head))
    }

    /// Outputs by inputs; for the embedding, vocabulary by width.
    #[must_use]
    pub fn shape(self, config: &ModelConfig) -> Shape {
        let one = self.piece_shape(config);
        Shape::new(self.pieces(config) * one.rows, one.cols)
    }

    /// How many matrices lie one above the other in this one: those of the experts, or 1.
    #[must_use]
    pub fn pieces(self, config: &ModelConfig) -> usize {
        match (self, config.experts) {
            (Self::Layer(_, LayerLinear::Gate | LayerLinear::Up | LayerLinear::Down), Some(experts)) => {
                experts.count
            }
            _ => 1,
        }
    }

    /// Pieces that one token is multiplied with, as a share of all: 1, or what a router leaves of
    /// the experts.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn active_share(self, config: &ModelConfig) -> f64 {
        match config.experts {
            Some(experts) if self.pieces(config) > 1 => experts.active as f64 / experts.count as f64,
            _ => 1.0,
        }
    }

    /// The shape of one of [`LinearId::pieces`].
    #[must_use]
    pub fn piece_shape(self, config: &ModelConfig) -> Shape {
        let (h, f) = (config.hidden_size, config.intermediate_size);
        match self {
            Self::Embed | Self::Head => Shape::new(config.vocab_size, h),
            Self::Layer(_, LayerLinear::Q) => Shape::new(config.q_dim(), h),
            Self::Layer(_, LayerLinear::K | LayerLinear::V) => Shape::new(config.kv_dim(), h),
            Self::Layer(_, LayerLinear::O) => Shape::new(h, config.q_dim()),
            Self::Layer(_, LayerLinear::Gate | LayerLinear::Up) => Shape::new(f, h),
            Self::Layer(_, LayerLinear::Down) => Shape::new(h, f),
        }
    }

    /// Whether the model has a bias here.
    #[must_use]
    pub fn has_bias(self, config: &ModelConfig) -> bool {
        match self {
            Self::Embed | Self::Head => false,
            Self::Layer(_, LayerLinear::Q | LayerLinear::K | LayerLinear::V) => config.qkv_bias,
            Self::Layer(_, LayerLinear::O) => config.o_bias,
            Self::Layer(_, LayerLinear::Gate | LayerLinear::Up | LayerLinear::Down) => config.mlp_bias,
        }
    }

    /// Whether the model has this matrix.
    #[must_use]
    pub fn exists(self, config: &ModelConfig) -> bool {
        match self {
            Self::Embed => true,
            Self::Head => !config.tie_word_embeddings,
            Self::Layer(i, _) => i < config.num_hidden_layers(),
        }
    }

    /// Whether this is a linear layer of a block, not the embedding or the head.
    #[must_use]
    pub const fn is_layer(self) -> bool {
        matches!(self, Self::Layer(..))
    }

    /// Name of the weight tensor. A tied embedding may be stored under the head's name instead: see
    /// [`LinearId::stored_names`].
    #[must_use]
    pub fn weight_name(self) -> String {
        format!("{self}.weight")
    }

    /// Names of the weight tensors of a checkpoint that stores embedding and head under `names`:
    /// one for each of [`LinearId::pieces`].
    #[must_use]
    pub fn stored_names(self, config: &ModelConfig, names: EmbeddingNames) -> Vec<String> {
        match self {
            Self::Embed => vec![names.embed.to_owned()],
            Self::Head => vec![names.head.to_owned()],
            Self::Layer(i, which) if config.experts.is_some() => match which.name().strip_prefix("mlp.") {
                Some(own) => {
                    let name = |e| format!("model.layers.{i}.mlp.experts.{e}.{own}.weight");
                    (0..self.pieces(config)).map(name).collect()
                }
                None => vec![self.weight_name()],
            },
            Self::Layer(..) => vec![self.weight_name()],
        }
    }

    /// Name of the bias tensor.
    #[must_use]
    pub fn bias_name(self) -> String {
        format!("{self}.bias")
    }
}

impl fmt::Display for LinearId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embed => f.write_str("model.embed_tokens"),
            Self::Head => f.write_str("lm_head"),
            Self::Layer(i, l) => write!(f, "model.layers.{i}.{}", l.name()),
        }
    }
}

impl FromStr for LinearId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::UnknownLinear(text.to_owned());
        match text {
            "model.embed_tokens" => return Ok(Self::Embed),
            "lm_head" => return Ok(Self::Head),
            _ => {}
        }
        let rest = text.strip_prefix("model.layers.").ok_or_else(bad)?;
        let (index, name) = rest.split_once('.').ok_or_else(bad)?;
        let layer: usize = index.parse().map_err(|_| bad())?;
        let linear = LayerLinear::ALL.into_iter().find(|l| l.name() == name).ok_or_else(bad)?;
        let id = Self::Layer(layer, linear);
        // Refuses `+1`, `01` and the like: one name per layer.
        if id.to_string() == text { Ok(id) } else { Err(bad()) }
    }
}

/// What is not quantized: the gains of norms, and the routers of experts. Prints as the Hugging
/// Face module name, without `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FloatId {
    /// Before the attention of a block.
    Attention(usize),
    /// Before the MLP of a block, where none follows its attention.
    Mlp(usize),
    /// Behind the attention of a block (Gemma 3, OLMo 2 and 3).
    AttentionOut(usize),
    /// Before the MLP of a block in which one follows the attention (Gemma 3).
    MlpIn(usize),
    /// Behind the MLP of a block (Gemma 3, OLMo 2 and 3).
    MlpOut(usize),
    /// Of the queries, per head (Qwen3, Gemma 3) or of all together (OLMo 2 and 3, OLMoE).
    Query(usize),
    /// Of the keys, likewise.
    Key(usize),
    /// Before the head.
    Final,
    /// No norm: what says which experts a token gets, (experts, hidden).
    Router(usize),
}

impl FloatId {
    /// All of a model.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> + use<> {
        let (qk, post) = (config.qk_norm != QkNorm::Absent, config.post_norms);
        let (pre, experts) = (config.pre_norms, config.experts.is_some());
        (0..config.num_hidden_layers())
            .flat_map(move |i| {
                let heads = [Self::Query(i), Self::Key(i)].into_iter().filter(move |_| qk);
                let outs = [Self::AttentionOut(i), Self::MlpOut(i)].into_iter().filter(move |_| post);
                let mlp = if post { Self::MlpIn(i) } else { Self::Mlp(i) };
                let ins = [Self::Attention(i), mlp].into_iter().filter(move |_| pre);
                let router = experts.then_some(Self::Router(i));
                ins.chain(heads).chain(outs).chain(router)
            })
            .chain(std::iter::once(Self::Final))
    }

    /// The norm of what a layer reads from the residual stream; `None` where there is none, or
    /// where it reads something else.
    #[must_use]
    pub const fn before(config: &ModelConfig, i: usize, linear: LayerLinear) -> Option<Self> {
        match linear {
            _ if !config.pre_norms => None,
            LayerLinear::Q | LayerLinear::K | LayerLinear::V => Some(Self::Attention(i)),
            LayerLinear::Gate | LayerLinear::Up if config.post_norms => Some(Self::MlpIn(i)),
            LayerLinear::Gate | LayerLinear::Up => Some(Self::Mlp(i)),
            LayerLinear::O | LayerLinear::Down => None,
        }
    }

    /// What the checkpoint's gains are multiplied by, since the graph has no such factor.
    pub(crate) const fn factor(self, config: &ModelConfig) -> f64 {
        match self {
            Self::Final => config.logit_factor,
            Self::AttentionOut(_) | Self::MlpOut(_) => config.residual_factor,
            _ => 1.0,
        }
    }

    /// The block that it belongs to.
    #[must_use]
    pub const fn layer(self) -> Option<usize> {
        match self {
            Self::Attention(i)
            | Self::Mlp(i)
            | Self::AttentionOut(i)
            | Self::MlpIn(i)
            | Self::MlpOut(i)
            | Self::Query(i)
            | Self::Key(i)
            | Self::Router(i) => Some(i),
            Self::Final => None,
        }
    }

    /// The same of another block.
    #[must_use]
    pub(crate) const fn of_layer(self, layer: usize) -> Self {
        match self {
            Self::Attention(_) => Self::Attention(layer),
            Self::Mlp(_) => Self::Mlp(layer),
            Self::AttentionOut(_) => Self::AttentionOut(layer),
            Self::MlpIn(_) => Self::MlpIn(layer),
            Self::MlpOut(_) => Self::MlpOut(layer),
            Self::Query(_) => Self::Query(layer),
            Self::Key(_) => Self::Key(layer),
            Self::Final => Self::Final,
            Self::Router(_) => Self::Router(layer),
        }
    }

    /// Number of weights.
    #[must_use]
    pub fn width(self, config: &ModelConfig) -> usize {
        self.dimensions(config).iter().product()
    }

    /// Dimensions of the weight tensor.
    #[must_use]
    pub fn dimensions(self, config: &ModelConfig) -> Vec<usize> {
        match (self, config.experts) {
            (Self::Query(_), _) if config.qk_norm == QkNorm::Whole => vec![config.q_dim()],
            (Self::Key(_), _) if config.qk_norm == QkNorm::Whole => vec![config.kv_dim()],
            (Self::Query(_) | Self::Key(_), _) => vec![config.head_dim],
            (Self::Router(_), Some(experts)) => vec![experts.count, config.hidden_size],
            _ => vec![config.hidden_size],
        }
    }

    /// Whether the model has this.
    #[must_use]
    pub fn exists(self, config: &ModelConfig) -> bool {
        let here = match self {
            Self::Final => true,
            Self::Attention(_) => config.pre_norms,
            Self::Mlp(_) => config.pre_norms && !config.post_norms,
            Self::MlpIn(_) => config.pre_norms && config.post_norms,
            Self::AttentionOut(_) | Self::MlpOut(_) => config.post_norms,
            Self::Query(_) | Self::Key(_) => config.qk_norm != QkNorm::Absent,
            Self::Router(_) => config.experts.is_some(),
        };
        here && self.layer().is_none_or(|i| i < config.num_hidden_layers())
    }

    /// Whether weights rotated by `mode` absorb this gain, which is then all ones: see
    /// [`crate::WeightSource`].
    #[must_use]
    pub fn folded(self, config: &ModelConfig, mode: RotationMode) -> bool {
        mode == RotationMode::Fold
            && match self {
                Self::Attention(_) | Self::Mlp(_) | Self::MlpIn(_) => true,
                Self::Final => !config.tie_word_embeddings,
                Self::AttentionOut(_) | Self::MlpOut(_) | Self::Query(_) | Self::Key(_) | Self::Router(_) => {
                    false
                }
            }
    }

    /// Name of the weight tensor.
    #[must_use]
    pub fn weight_name(self) -> String {
        format!("{self}.weight")
    }
}

impl fmt::Display for FloatId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attention(i) => write!(f, "model.layers.{i}.input_layernorm"),
            Self::Mlp(i) | Self::AttentionOut(i) => {
                write!(f, "model.layers.{i}.post_attention_layernorm")
            }
            Self::MlpIn(i) => write!(f, "model.layers.{i}.pre_feedforward_layernorm"),
            Self::MlpOut(i) => write!(f, "model.layers.{i}.post_feedforward_layernorm"),
            Self::Query(i) => write!(f, "model.layers.{i}.self_attn.q_norm"),
            Self::Key(i) => write!(f, "model.layers.{i}.self_attn.k_norm"),
            Self::Router(i) => write!(f, "model.layers.{i}.mlp.gate"),
            Self::Final => f.write_str("model.norm"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        let mut ids = vec![LinearId::Embed, LinearId::Head];
        ids.extend(LayerLinear::ALL.map(|l| LinearId::Layer(17, l)));
        for id in ids {
            assert_eq!(id.to_string().parse::<LinearId>().unwrap(), id);
        }
        for bad in [
            "",
            "lm_head.weight",
            "model.layers.1",
            "model.layers.x.mlp.up_proj",
            "model.layers.01.mlp.up_proj",
            "model.layers.1.mlp.side_proj",
        ] {
            assert!(bad.parse::<LinearId>().is_err(), "{bad}");
        }
    }
}
