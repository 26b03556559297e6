//! A decoder from its parts.

use std::sync::{Arc, OnceLock};

use fracbit_base::{Shape, ShapeError};
use fracbit_io::{Activation, ModelConfig, QkNorm};
use fracbit_kernels::{Gate, Vectors};

use crate::Error;
use crate::attention::MAX_HEAD_DIM;
use crate::id::{FloatId, LayerLinear, LinearId};
use crate::linear::Linear;
use crate::model::{Layer, Model};
use crate::rope::Rope;
use crate::rotations::OnlineRotations;

/// Collects the parts of a [`Model`].
#[derive(Debug)]
pub struct ModelBuilder {
    config: ModelConfig,
    rotations: OnlineRotations,
    embed: Option<Arc<Linear>>,
    head: Option<Arc<Linear>>,
    layers: Vec<[Option<Arc<Linear>>; 7]>,
    norms: Vec<(FloatId, Vec<f32>)>,
}

impl ModelBuilder {
    /// An empty model whose weights are rotated as `rotations` says.
    ///
    /// # Errors
    /// [`Error::HeadDim`], or [`Error::Shape`] for rotations of another number of layers.
    pub fn new(config: ModelConfig, rotations: OnlineRotations) -> Result<Self, Error> {
        if config.head_dim > MAX_HEAD_DIM {
            return Err(Error::HeadDim { max: MAX_HEAD_DIM, got: config.head_dim });
        }
        let layers = config.num_hidden_layers();
        ShapeError::check_len("model", "rotations", layers, rotations.layers.len())?;
        let layers = (0..layers).map(|_| Default::default()).collect();
        Ok(Self { config, rotations, embed: None, head: None, layers, norms: Vec::new() })
    }

    /// Sets one matrix; a second call for the same one replaces it.
    ///
    /// # Errors
    /// [`Error::UnknownLinear`], or [`Error::Linear`] for a wrong shape or a bias too many or too
    /// few.
    pub fn set(&mut self, id: LinearId, linear: impl Into<Arc<Linear>>) -> Result<&mut Self, Error> {
        let linear = linear.into();
        check_linear(&self.config, id, &linear)?;
        let slot = match id {
            LinearId::Embed => &mut self.embed,
            LinearId::Head => &mut self.head,
            LinearId::Layer(i, which) => &mut self.layers[i][which.index()],
        };
        *slot = Some(linear);
        Ok(self)
    }

    /// Sets one norm's gain or router: for folded weights what
    /// [`WeightSource::floats`](crate::WeightSource::floats) yields.
    ///
    /// # Errors
    /// [`Error::Floats`] for what the model does not have or another number of values.
    pub fn set_floats(&mut self, id: FloatId, gain: Vec<f32>) -> Result<&mut Self, Error> {
        let want = if id.exists(&self.config) { id.width(&self.config) } else { 0 };
        ShapeError::check_len("norm", "gain", want, gain.len())
            .map_err(|source| Error::Floats { id, source })?;
        self.norms.retain(|(other, _)| *other != id);
        self.norms.push((id, gain));
        Ok(self)
    }

    /// The model.
    ///
    /// # Errors
    /// [`Error::MissingLinear`] or [`Error::MissingFloats`] naming the first part that was not set.
    pub fn build(self) -> Result<Model, Error> {
        let Self { config, rotations, embed, head, layers, mut norms } = self;
        let mut norm = |id| {
            let at = norms.iter().position(|(other, _)| *other == id).ok_or(Error::MissingFloats(id))?;
            Ok::<_, Error>(norms.swap_remove(at).1)
        };
        let embed = embed.ok_or(Error::MissingLinear(LinearId::Embed))?;
        if head.is_none() && !config.tie_word_embeddings {
            return Err(Error::MissingLinear(LinearId::Head));
        }
        let qk_norm = config.qk_norm != QkNorm::Absent;
        let mut out = Vec::with_capacity(layers.len());
        for (i, linears) in layers.into_iter().enumerate() {
            let missing = LayerLinear::ALL.into_iter().find(|l| linears[l.index()].is_none());
            if let Some(which) = missing {
                return Err(Error::MissingLinear(LinearId::Layer(i, which)));
            }
            out.push(Layer {
                linears: linears.map(|l| l.expect("checked above")),
                attention_norm: FloatId::before(&config, i, LayerLinear::Q).map(&mut norm).transpose()?,
                mlp_norm: FloatId::before(&config, i, LayerLinear::Gate).map(&mut norm).transpose()?,
                query_norm: if qk_norm { Some(norm(FloatId::Query(i))?) } else { None },
                key_norm: if qk_norm { Some(norm(FloatId::Key(i))?) } else { None },
                out_norms: if config.post_norms {
                    Some([norm(FloatId::AttentionOut(i))?, norm(FloatId::MlpOut(i))?])
                } else {
                    None
                },
                router: match config.experts {
                    Some(experts) => {
                        let shape = Shape::new(experts.count, config.hidden_size);
                        Some(Arc::new(Linear::dense(shape, norm(FloatId::Router(i))?, None)?))
                    }
                    None => None,
                },
            });
        }
        let final_norm = norm(FloatId::Final)?;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let round = |x: f64| x as f32;
        let rotation_scratch = rotations.scratch_len();
        Ok(Model {
            rotation_scratch,
            rope: Rope::new(&config.rope),
            local_rope: config.local_rope.as_ref().map(Rope::new),
            eps: round(config.rms_norm_eps),
            inner_eps: round(config.inner_norm_eps),
            score_cap: config.score_cap.map(round),
            logit_cap: config.logit_cap.map(round),
            gate: match config.activation {
                Activation::Silu => Gate::Silu,
                Activation::GeluTanh => Gate::GeluTanh,
            },
            vectors: Vectors::scalar(),
            config,
            rotations,
            embed,
            head,
            final_norm,
            layers: out,
            key_biases: OnceLock::new(),
            key_means: OnceLock::new(),
        })
    }
}

pub(crate) fn check_linear(config: &ModelConfig, id: LinearId, linear: &Linear) -> Result<(), Error> {
    if !id.exists(config) {
        return Err(Error::UnknownLinear(id.to_string()));
    }
    let bad = |source| Error::Linear { id, source };
    let (want, got) = (id.shape(config), linear.shape());
    if want != got {
        return Err(bad(ShapeError::new("linear layer", "shape", want, got)));
    }
    let word = |has: bool| if has { "present" } else { "absent" };
    let (want, got) = (id.has_bias(config), linear.bias().is_some());
    if want != got {
        return Err(bad(ShapeError::new("linear layer", "bias", word(want), word(got))));
    }
    Ok(())
}
