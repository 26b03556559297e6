//! Rotary position embedding: `rope_theta`, `rope_scaling`, `rope_parameters`,
//! `partial_rotary_factor`.

use serde_json::Value;

use super::{Architecture, Fields, LocalRope, clip, short};
use crate::error::Error;

/// How rotary frequencies are stretched beyond the trained context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Divisor of the positions, at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths longer than `original / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original / high_freq_factor` are high.
        high_freq_factor: f64,
        /// Context length before stretching.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv 2309.00071): as `Llama3`, but straight in the number of the
    /// plane.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Planes that turn more often than this within the original context are kept.
        beta_fast: f64,
        /// Planes that turn less often than this are divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are whole planes.
        truncate: bool,
        /// Context length before stretching.
        original_max_position_embeddings: usize,
    },
    /// LongRoPE (Ding et al. 2024, arXiv 2402.13753), of Phi-3: every plane has a divisor of its
    /// own, for short texts and for long ones.
    LongRope {
        /// Divisors in a context of up to `original_max_position_embeddings` tokens, one for each
        /// plane.
        short: Vec<f64>,
        /// Divisors in a longer one.
        long: Vec<f64>,
        /// The longest context of the short divisors.
        original_max_position_embeddings: usize,
    },
}

/// Queries that grow with the length of the text: the turned query at position p is multiplied by
/// `1 + beta ln(1 + floor(p / every))`, lest the softmax over many positions become flat (of Llama
/// 4; Ministral 3 has it as `llama_4_scaling_beta`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// How much.
    pub beta: f64,
    /// Positions that share a factor: those of the context before stretching.
    pub every: usize,
}

/// Rotary position embedding of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
    /// Channels of a head that turn, its first ones: even, at most its width.
    pub dim: usize,
    /// Factor of the turned queries and of the turned keys: the length correction of YaRN and
    /// LongRoPE. Granite's `attention_multiplier` in place of `1 / sqrt(head_dim)` makes one too,
    /// its queries and keys getting the root each.
    pub gain: f64,
    /// What queries, not keys, are multiplied by as well.
    pub growth: Option<QueryGrowth>,
}

impl RopeConfig {
    /// What the turned query at a position is multiplied by, beside [`gain`](Self::gain).
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^53")]
    pub fn query_factor(&self, position: usize) -> f64 {
        self.growth.map_or(1.0, |growth| 1.0 + growth.beta * ((position / growth.every) as f64).ln_1p())
    }
}

/// Prefix of field names in messages.
const PARAMETERS: &str = "rope_parameters.";

/// What factors may be: far beyond any model's, and products of several are numbers still.
const MODERATE: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

impl Fields {
    /// A number of [`MODERATE`] size.
    pub(super) fn moderate(&self, field: &str, default: Option<f64>) -> Result<f64, Error> {
        let value = self.number(field, default)?;
        if MODERATE.contains(&value) {
            return Ok(value);
        }
        Err(self.bad(field, format!("should be from 1e-6 to 1e6, got {value:e}")))
    }

    /// Of heads of `head_dim` channels; the context of `max_positions` tokens grows where the
    /// frequencies are stretched by YaRN.
    pub(super) fn rope(
        &self,
        arch: Architecture,
        head_dim: usize,
        max_positions: &mut usize,
    ) -> Result<RopeConfig, Error> {
        let facts = arch.facts();
        // transformers 5 moved everything into `rope_parameters`; older files have `rope_theta` and
        // `rope_scaling`, some have both.
        let parameters = match self.object("rope_parameters", PARAMETERS)? {
            Some(p)
                if facts.local_rope.is_some_and(|kind| kind == LocalRope::OwnBase || p.per_layer_type()) =>
            {
                Some(p.of_layers("full_attention")?)
            }
            Some(p) if p.per_layer_type() => {
                return Err(
                    self.bad("rope_parameters", "should be one set for all layers, got one per layer type")
                );
            }
            other => other,
        };
        let scaling = match (parameters, self.object("rope_scaling", "rope_scaling.")?) {
            (Some(parameters), Some(scaling)) => Some(parameters.merged(scaling)?),
            (parameters, scaling) => parameters.or(scaling),
        };
        let inner = scaling.as_ref().filter(|s| s.get("rope_theta").is_some());
        let theta = match (inner, self.get("rope_theta")) {
            (None, _) => self.number("rope_theta", Some(facts.theta))?,
            (Some(inner), None) => inner.number("rope_theta", None)?,
            (Some(inner), Some(_)) => {
                let (inside, outside) = (inner.number("rope_theta", None)?, self.number("rope_theta", None)?);
                #[expect(clippy::float_cmp, reason = "the same number, written twice")]
                if inside != outside {
                    let rule = format!("should agree with `rope_theta`, got {inside} and {outside}");
                    return Err(inner.bad("rope_theta", rule));
                }
                inside
            }
        };
        let mut dim = match facts.turning {
            Some(part) => self.turning(arch, head_dim, part)?,
            None => head_dim,
        };
        for f in std::iter::once(self).chain(&scaling) {
            if f.get("partial_rotary_factor").is_some() {
                let part = f.number("partial_rotary_factor", None)?;
                dim = if part == 1.0 { head_dim } else { f.turning(arch, head_dim, part)? };
            }
        }
        let mut rope = RopeConfig { theta, scaling: RopeScaling::None, dim, gain: 1.0, growth: None };
        if facts.growing && scaling.is_none() {
            return Err(self.bad("rope_parameters", "should be an object, is missing"));
        }
        if let Some(s) = scaling {
            self.stretch(&s, arch, max_positions, &mut rope)?;
        }
        Ok(rope)
    }

    /// Of layers with a window (Gemma 3, OLMo 3), beside `full`, that of all others: a base of
    /// their own or (OLMo 3) the same one, nothing stretched where there is one set of parameters.
    pub(super) fn local_rope(
        &self,
        arch: Architecture,
        kind: LocalRope,
        full: &RopeConfig,
        max_positions: &mut usize,
    ) -> Result<RopeConfig, Error> {
        let base = match kind {
            LocalRope::OwnBase => self.number("rope_local_base_freq", Some(1e4))?,
            LocalRope::SameBase => full.theta,
        };
        let mut rope = RopeConfig { theta: base, scaling: RopeScaling::None, gain: 1.0, ..full.clone() };
        let parameters = self.object("rope_parameters", PARAMETERS)?;
        if let Some(p) = parameters.filter(|p| kind == LocalRope::OwnBase || p.per_layer_type()) {
            let p = p.of_layers("sliding_attention")?;
            rope.theta = p.number("rope_theta", Some(base))?;
            self.stretch(&p, arch, max_positions, &mut rope)?;
        }
        Ok(rope)
    }

    /// These `rope_parameters` and `rope_scaling` in one: what one says goes, where both say
    /// something they must agree. Only the `default` type says nothing, being what transformers
    /// writes where nobody asked for another.
    fn merged(mut self, scaling: Self) -> Result<Self, Error> {
        let kind = |f: &Self| -> Result<Option<String>, Error> {
            let kind = f.text("rope_type")?.or(f.text("type")?);
            Ok(kind.filter(|&kind| kind != "default").map(str::to_owned))
        };
        let (ours, theirs) = (kind(&self)?, kind(&scaling)?);
        if let (Some(a), Some(b)) = (&ours, &theirs)
            && a != b
        {
            let rule = format!("should agree with rope_scaling, got `{}` beside its `{}`", clip(a), clip(b));
            return Err(self.bad("rope_type", rule));
        }
        for (field, value) in scaling.map {
            if value.is_null() || field == "rope_type" || field == "type" {
                continue;
            }
            let same = |v: &Value| *v == value || v.as_f64().is_some() && v.as_f64() == value.as_f64();
            match self.get(&field) {
                Some(v) if !same(v) => {
                    let rule =
                        format!("should agree with rope_scaling, got {} and {}", short(v), short(&value));
                    return Err(self.bad(&field, rule));
                }
                Some(_) => {}
                None => _ = self.map.insert(field, value),
            }
        }
        if let Some(kind) = ours.or(theirs) {
            self.map.insert("rope_type".to_owned(), kind.into());
        }
        Ok(self)
    }

    /// Whether these `rope_parameters` are a set for each type of layers.
    fn per_layer_type(&self) -> bool {
        self.map.values().any(Value::is_object)
    }

    /// The part of `rope_parameters` for layers of a type.
    fn of_layers(&self, kind: &'static str) -> Result<Self, Error> {
        let prefix = match kind {
            "full_attention" => "rope_parameters.full_attention.",
            _ => "rope_parameters.sliding_attention.",
        };
        self.object(kind, prefix)?.ok_or_else(|| self.bad(kind, "should be an object, is missing"))
    }

    /// Channels that turn where it is a part of a head.
    fn turning(&self, arch: Architecture, head_dim: usize, part: f64) -> Result<usize, Error> {
        if arch.facts().turning.is_none() {
            let known = Architecture::those(|facts| facts.turning.is_some());
            let rule = format!("should be 1 (partial rotary is known of {known} only), got {part}");
            return Err(self.bad("partial_rotary_factor", rule));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            clippy::cast_sign_loss,
            reason = "a part of a head, cut to whole channels as transformers does"
        )]
        let dim = (head_dim as f64 * part.min(2.0)) as usize;
        if dim > head_dim || dim == 0 || !dim.is_multiple_of(2) {
            let rule =
                format!("should leave an even number of the {head_dim} channels of a head, got {part}");
            return Err(self.bad("partial_rotary_factor", rule));
        }
        Ok(dim)
    }

    fn stretch(
        &self,
        s: &Self,
        arch: Architecture,
        max_positions: &mut usize,
        rope: &mut RopeConfig,
    ) -> Result<(), Error> {
        let kind = match s.text("rope_type")? {
            Some(kind) => kind,
            None => match s.text("type")? {
                Some(kind) => kind,
                // Something else was meant than the embedding as it is.
                None if s.get("factor").is_some() => {
                    return Err(s.bad("rope_type", "should say what the factor is for, is missing"));
                }
                None => "default",
            },
        };
        // Where both have one, that of the whole configuration counts.
        let original = |default| {
            let inner = s.size("original_max_position_embeddings", 1 << 32, Some(default))?;
            self.size("original_max_position_embeddings", 1 << 32, Some(inner))
        };
        const GROWTH: &str = "llama_4_scaling_beta";
        if s.get(GROWTH).is_some() {
            if !arch.facts().growing {
                let known = Architecture::those(|facts| facts.growing);
                return Err(s.bad(GROWTH, format!("should be absent: known of {known} only")));
            }
            let growth = QueryGrowth { beta: s.moderate(GROWTH, None)?, every: original(*max_positions)? };
            rope.growth = Some(growth);
        }
        let longrope = arch.facts().longrope;
        let attention_factor =
            || s.get("attention_factor").map(|_| s.moderate("attention_factor", None)).transpose();
        rope.scaling = match kind {
            "default" => RopeScaling::None,
            // Of models of text and images: where all is text, a token has three equal positions.
            "mrope" if s.get("mrope_section").is_some() => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: s.number("factor", None)? },
            "llama3" => {
                let low_freq_factor = s.number("low_freq_factor", None)?;
                let high_freq_factor = s.number("high_freq_factor", None)?;
                if low_freq_factor >= high_freq_factor {
                    return Err(s.bad("high_freq_factor", "should be greater than low_freq_factor"));
                }
                RopeScaling::Llama3 {
                    factor: s.number("factor", None)?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings: original(*max_positions)?,
                }
            }
            // Phi-3's own names for it, before transformers had one.
            "longrope" | "su" | "yarn" if kind == "longrope" || longrope.is_some() => {
                let planes = rope.dim / 2;
                let original = original(longrope.unwrap_or(*max_positions))?;
                rope.gain = match attention_factor()? {
                    Some(factor) => factor,
                    #[expect(clippy::cast_precision_loss, reason = "contexts are far below 2^53")]
                    None => {
                        let original = original as f64;
                        longrope_gain(s.moderate("factor", Some(*max_positions as f64 / original))?, original)
                    }
                };
                RopeScaling::LongRope {
                    short: s.divisors("short_factor", planes)?,
                    long: s.divisors("long_factor", planes)?,
                    original_max_position_embeddings: original,
                }
            }
            "yarn" => {
                let factor = s.moderate("factor", None)?;
                let (beta_fast, beta_slow) =
                    (s.moderate("beta_fast", Some(32.0))?, s.moderate("beta_slow", Some(1.0))?);
                if beta_fast <= beta_slow {
                    return Err(s.bad("beta_fast", "should be greater than beta_slow"));
                }
                if rope.theta <= 1.0 {
                    return Err(self.bad("rope_theta", format!("should be above 1, got {}", rope.theta)));
                }
                let gain = |times: f64| 1.0 + 0.1 * times * factor.max(1.0).ln();
                rope.gain = match (attention_factor()?, s.get("mscale"), s.get("mscale_all_dim")) {
                    (Some(factor), ..) => factor,
                    // Both, or none counts, as in transformers.
                    (None, Some(_), Some(_)) => {
                        gain(s.moderate("mscale", None)?) / gain(s.moderate("mscale_all_dim", None)?)
                    }
                    _ => gain(1.0),
                };
                let original = original(*max_positions)?;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_precision_loss,
                    clippy::cast_sign_loss,
                    reason = "a number of tokens; what is beyond 2^32 is cut to it"
                )]
                let stretched = (original as f64 * factor).min(2f64.powi(32)) as usize;
                *max_positions = stretched.max(*max_positions);
                RopeScaling::Yarn {
                    factor,
                    beta_fast,
                    beta_slow,
                    truncate: s.flag("truncate", true)?,
                    original_max_position_embeddings: original,
                }
            }
            other => {
                let rule = format!(
                    "should be `default`, `linear`, `llama3`, `yarn` or `longrope`, got `{}`, which is not supported",
                    clip(other)
                );
                return Err(s.bad("rope_type", rule));
            }
        };
        Ok(())
    }

    /// A divisor for each plane.
    fn divisors(&self, field: &str, planes: usize) -> Result<Vec<f64>, Error> {
        let rule = |got: &str| {
            self.bad(
                field,
                format!(
                    "should be {planes} numbers from 1e-6 to 1e6, one for each pair of channels that turns, {got}"
                ),
            )
        };
        let Some(v) = self.get(field) else { return Err(rule("is missing")) };
        let list = v.as_array().ok_or_else(|| rule(&format!("got {}", short(v))))?;
        if list.len() != planes {
            return Err(rule(&format!("got {} of them", list.len())));
        }
        let one = |v: &Value| {
            let moderate = v.as_f64().filter(|n| MODERATE.contains(n));
            moderate.ok_or_else(|| rule(&format!("got {}", short(v))))
        };
        list.iter().map(one).collect()
    }
}

/// `sqrt(1 + ln(factor) / ln(original))`, 1 where nothing is stretched (LongRoPE, section 3).
fn longrope_gain(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 || original <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}
