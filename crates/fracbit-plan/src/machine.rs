//! What a machine can do, measured: the document `machine.json` that plans to a speed are made
//! from.
//!
//! Time of a decode step is predicted as Q-Palette does (appendix E.2): the times of its products
//! with packed matrices, each measured on its own with the weights coming from memory, plus an
//! overhead of everything else, learnt from whole models at random configurations. Where the paper
//! subtracts and averages, we fit
//!
//! ```text
//! T = factor * sum of kernels + layers * (layer + context * attention) + fixed
//! ```
//!
//! so that one profile serves any context, and models that were measured with fewer layers than
//! they have. The factor is near 1; it holds what a product in a row of products costs other than
//! one measured alone.
//!
//! `fracbit_bench::profile` makes the document. It holds for one processor, instruction set,
//! number of threads, version and build of this program (kernels change within a version) and shape
//! of model, and is refused elsewhere.

use crate::{Error, inventory::Matrix, storage::Storage};
use fracbit_io::ModelConfig;
use fracbit_kernels::Kernels;
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

/// Version of the document.
pub const PROFILE_VERSION: u32 = 3;
/// Hash of the sources that a decode step runs through and of how they were compiled, as 16
/// hexadecimal digits (`build.rs`).
pub const BUILD: &str = env!("FRACBIT_BUILD");

/// Processors that the program may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine that this runs on, as far as the system tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Model name of the processor.
    pub cpu: String,
    /// Processors that the program may use.
    pub threads: usize,
    /// Processes running or waiting, average of the last minute.
    pub load: Option<f64>,
}

impl Machine {
    /// This one, now.
    #[must_use]
    pub fn now() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
        let load = fs::read_to_string("/proc/loadavg").ok();
        Self {
            cpu: name.map_or(std::env::consts::ARCH, |(_, name)| name).to_owned(),
            threads: cores(),
            load: load.and_then(|l| l.split(' ').next()?.parse().ok()),
        }
    }
}

/// The dimensions of a model that its speed depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are the configuration's own")]
pub struct ModelShape {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub tied: bool,
    /// 0 where there are none.
    pub num_experts: usize,
    /// Those that a token gets.
    pub num_experts_per_tok: usize,
}

impl ModelShape {
    /// Of a configuration.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        Self {
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers(),
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocab_size: config.vocab_size,
            tied: config.tie_word_embeddings,
            num_experts: config.experts.map_or(0, |e| e.count),
            num_experts_per_tok: config.experts.map_or(0, |e| e.active),
        }
    }
}

impl std::fmt::Display for ModelShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hidden_size, intermediate_size, num_hidden_layers, vocab_size, .. } = self;
        let [heads, kv, width] = [self.num_attention_heads, self.num_key_value_heads, self.head_dim];
        write!(
            f,
            "{num_hidden_layers} layers of {hidden_size} x {intermediate_size}, {heads} and {kv} heads of {width}, \
             vocabulary {vocab_size}{}",
            if self.tied { ", tied" } else { "" }
        )?;
        match self.num_experts {
            0 => Ok(()),
            all => write!(f, ", {} of {all} experts", self.num_experts_per_tok),
        }
    }
}

/// What a step multiplies with: a matrix, or several that are fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Product {
    /// Inputs.
    pub cols: usize,
    /// Outputs, of all members and all pieces.
    pub rows: usize,
    /// How many matrices lie one above the other, of which a token meets some: experts. Otherwise
    /// 1.
    pub pieces: usize,
}

impl Product {
    /// With these matrices as one. `None` without any.
    pub fn of<'a>(members: impl IntoIterator<Item = &'a Matrix>) -> Option<Self> {
        members.into_iter().fold(None, |product: Option<Self>, m| {
            let rows = m.shape.rows + product.map_or(0, |p| p.rows);
            Some(Self { cols: m.shape.cols, rows, pieces: m.pieces })
        })
    }
}

/// Time of one product.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelTime {
    /// The scheme, or half precision.
    pub scheme: Storage,
    /// With what.
    #[serde(flatten)]
    pub product: Product,
    /// Tokens.
    pub batch: usize,
    /// Median, microseconds.
    pub us: f64,
    /// Lower and upper quartile, microseconds.
    pub spread: [f64; 2],
}

/// What a decode step takes beside its kernels: the fit of the module's equation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// Tokens of a step.
    pub batch: usize,
    /// Time in a model over time alone.
    pub factor: f64,
    /// Microseconds of a layer without context.
    pub layer_us: f64,
    /// Microseconds of a layer for each token of context.
    pub context_us: f64,
    /// Microseconds of a step that do not depend on the layers.
    pub fixed_us: f64,
    /// Root mean square of the relative error, each model predicted by a fit to the others.
    pub residual: f64,
    /// What was fitted.
    pub samples: Vec<Sample>,
}

/// A whole model, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Sum of its kernels, microseconds.
    pub kernels_us: f64,
    /// Its layers.
    pub layers: usize,
    /// Tokens in the cache, on average over the steps.
    pub context: f64,
    /// Median time of a decode step, microseconds.
    pub us: f64,
}

/// The document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// See [`PROFILE_VERSION`].
    pub profile_version: u32,
    /// Version of the program.
    pub fracbit: String,
    /// Its build: see [`BUILD`].
    pub build: String,
    /// Model name of the processor.
    pub cpu: String,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Threads.
    pub threads: usize,
    /// What was measured: a directory or a shape's name.
    pub subject: String,
    /// Its dimensions.
    pub shape: ModelShape,
    /// Reads from memory, 10^9 bytes per second.
    pub read_gb_per_s: f64,
    /// int8 products, 10^9 per second.
    pub int8_gmac_per_s: f64,
    /// Seconds that the measurement took.
    pub seconds: f64,
    /// Every product.
    pub kernels: Vec<KernelTime>,
    /// One fit per batch.
    pub overheads: Vec<Overhead>,
}

#[derive(Deserialize)]
struct Version {
    profile_version: u32,
}

/// The instruction set that a profile is keyed by: that of the default trellis code at 2 bits.
pub fn isa(kernels: &Kernels) -> String {
    let scheme = "tcq-2".parse().ok().and_then(fracbit_quant::codebook);
    scheme.map_or_else(|| "unknown".to_owned(), |book| kernels.isa(book).name().to_owned())
}

impl MachineProfile {
    /// Reads a document.
    ///
    /// # Errors
    /// When the file cannot be read or is no such document of this version.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let origin = path.display().to_string();
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &origin),
            Err(e) => Err(Error::Profile { origin, rule: e.to_string() }),
        }
    }

    /// Reads the text of a document; `origin` is for messages.
    ///
    /// # Errors
    /// When it is no such document of this version.
    pub fn parse(text: &str, origin: &str) -> Result<Self, Error> {
        let bad = |rule: String| Error::Profile { origin: origin.to_owned(), rule };
        // The version first: fields come and go with it.
        let Version { profile_version: got } = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        if got != PROFILE_VERSION {
            return Err(bad(format!(
                "profile_version should be {PROFILE_VERSION}, got {got}: measure again"
            )));
        }
        let profile: Self = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let finite = profile.kernels.iter().all(|k| k.us.is_finite() && k.us > 0.0);
        let terms = |o: &Overhead| [o.factor, o.layer_us, o.context_us, o.fixed_us];
        let fits = profile.overheads.iter().flat_map(terms).all(|v| v.is_finite() && v >= 0.0)
            && profile.overheads.iter().all(|o| o.factor > 0.0);
        if !finite || !fits {
            return Err(bad("times should be positive and finite".to_owned()));
        }
        Ok(profile)
    }

    /// Refuses a profile of another machine or of another version of the program; `origin` names
    /// it.
    ///
    /// # Errors
    /// With the first thing that differs.
    pub fn require_current(&self, origin: &str, kernels: &Kernels, threads: usize) -> Result<(), Error> {
        let here = Machine::now().cpu;
        let (now, version) = (isa(kernels), env!("CARGO_PKG_VERSION"));
        for (what, got, want) in [
            ("processor", &self.cpu, &here),
            ("instruction set", &self.isa, &now),
            ("number of threads", &self.threads.to_string(), &threads.to_string()),
            ("version of fracbit", &self.fracbit, &version.to_owned()),
            ("build of fracbit, whose kernels or compilation differ", &self.build, &BUILD.to_owned()),
        ] {
            if got != want {
                return Err(Error::Profile {
                    origin: origin.to_owned(),
                    rule: format!(
                        "it was measured with another {what} ({got}) than this one ({want}): measure again"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Refuses a profile of a model with other dimensions.
    ///
    /// # Errors
    /// With both shapes.
    pub fn require_shape(&self, origin: &str, config: &ModelConfig) -> Result<(), Error> {
        let want = ModelShape::of(config);
        if self.shape == want {
            return Ok(());
        }
        let rule =
            format!("it was measured for a model of {}, this one has {want}: measure this one", self.shape);
        Err(Error::Profile { origin: origin.to_owned(), rule })
    }

    /// The overhead of steps of `batch` tokens.
    ///
    /// # Errors
    /// When that batch was not measured.
    pub fn overhead(&self, batch: usize) -> Result<&Overhead, Error> {
        self.overheads.iter().find(|o| o.batch == batch).ok_or_else(|| {
            let have: Vec<String> = self.overheads.iter().map(|o| o.batch.to_string()).collect();
            let rule = format!("holds batches of {}, not {batch}: measure it with --batch", have.join(", "));
            Error::Profile { origin: "profile".to_owned(), rule }
        })
    }

    /// Microseconds of one product; `None` when it was not measured.
    #[must_use]
    pub fn kernel_us(&self, scheme: Storage, product: Product, batch: usize) -> Option<f64> {
        let same = |k: &&KernelTime| k.scheme == scheme && k.product == product && k.batch == batch;
        self.kernels.iter().find(same).map(|k| k.us)
    }
}

impl Overhead {
    /// Microseconds of a step beside its kernels.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts")]
    pub fn rest_us(&self, layers: usize, context: usize) -> f64 {
        layers as f64 * (self.layer_us + self.context_us * context as f64) + self.fixed_us
    }

    /// Fits the overhead to measured models.
    ///
    /// # Errors
    /// With fewer than four models.
    pub fn fit(batch: usize, samples: Vec<Sample>) -> Result<Self, Error> {
        if samples.len() < 4 {
            let rule = format!("needs four models or more to fit an overhead, got {}", samples.len());
            return Err(Error::Profile { origin: "profile".to_owned(), rule });
        }
        let all = solve(&samples);
        let mut sum = 0.0;
        for left_out in 0..samples.len() {
            let mut others = samples.clone();
            let sample = others.remove(left_out);
            let got: f64 = solve(&others).iter().zip(terms(&sample)).map(|(a, b)| a * b).sum();
            sum += (got / sample.us - 1.0).powi(2);
        }
        let [factor, layer_us, context_us, fixed_us] = all;
        #[expect(clippy::cast_precision_loss, reason = "a mean over a few models")]
        let residual = (sum / samples.len() as f64).sqrt();
        Ok(Self { batch, factor, layer_us, context_us, fixed_us, residual, samples })
    }
}

/// What the four unknowns are multiplied with.
#[expect(clippy::cast_precision_loss, reason = "counts")]
fn terms(sample: &Sample) -> [f64; 4] {
    let layers = sample.layers as f64;
    [sample.kernels_us, layers, layers * sample.context, 1.0]
}

/// Rounds of re-weighting.
const ROUNDS: usize = 20;
/// Relative errors below this count the same.
const FLOOR: f64 = 0.005;

/// Least absolute relative errors (by re-weighted least squares: a model that was measured while
/// something else ran should not pull the fit) with non-negative unknowns: every set of the others
/// that are held at zero is tried. The factor never is: kernels take time, however little a busy
/// machine lets one see of it, and at zero any plan would keep to any limit.
fn solve(samples: &[Sample]) -> [f64; 4] {
    let mut best = ([1.0, 0.0, 0.0, 0.0], f64::INFINITY);
    for free in (1..16u32).step_by(2) {
        let open: Vec<usize> = (0..4).filter(|i| free >> i & 1 == 1).collect();
        let mut full = [0.0; 4];
        let mut weights = vec![1.0; samples.len()];
        let misses = |full: &[f64; 4]| -> Vec<f64> {
            let miss = |s: &Sample| full.iter().zip(terms(s)).map(|(a, b)| a * b).sum::<f64>() / s.us - 1.0;
            samples.iter().map(miss).collect()
        };
        let mut solvable = true;
        for _ in 0..ROUNDS {
            let Some(found) = least_squares(samples, &weights, &open) else {
                solvable = false;
                break;
            };
            open.iter().zip(found).for_each(|(&i, v)| full[i] = v);
            weights = misses(&full).iter().map(|miss| 1.0 / miss.abs().max(FLOOR)).collect();
        }
        if !solvable || full.iter().any(|v| !(0.0..f64::INFINITY).contains(v)) {
            continue;
        }
        let error: f64 = misses(&full).iter().map(|miss| miss.abs().max(FLOOR)).sum();
        if error < best.1 {
            best = (full, error);
        }
    }
    best.0
}

/// Weighted normal equations of the unknowns `open`, by elimination; `None` when they are
/// dependent.
fn least_squares(samples: &[Sample], weights: &[f64], open: &[usize]) -> Option<Vec<f64>> {
    let n = open.len();
    let mut rows = vec![vec![0.0; n + 1]; n];
    for (s, weight) in samples.iter().zip(weights) {
        let all = terms(s);
        let x: Vec<f64> = open.iter().map(|&i| all[i] / s.us).collect();
        for i in 0..n {
            for j in 0..n {
                rows[i][j] += weight * x[i] * x[j];
            }
            rows[i][n] += weight * x[i];
        }
    }
    // Unknowns differ by many orders of magnitude: scale the diagonal to ones.
    let scale: Vec<f64> = (0..n).map(|i| rows[i][i].sqrt()).collect();
    if scale.iter().any(|&s| s <= 0.0) {
        return None;
    }
    for i in 0..n {
        for j in 0..n {
            rows[i][j] /= scale[i] * scale[j];
        }
        rows[i][n] /= scale[i];
    }
    for i in 0..n {
        let pivot = (i..n).max_by(|&a, &b| rows[a][i].abs().total_cmp(&rows[b][i].abs()))?;
        rows.swap(i, pivot);
        if rows[i][i].abs() < 1e-9 {
            return None;
        }
        for r in 0..n {
            if r != i {
                let factor = rows[r][i] / rows[i][i];
                let (from, to) = if r < i {
                    let (low, high) = rows.split_at_mut(i);
                    (&high[0], &mut low[r])
                } else {
                    let (low, high) = rows.split_at_mut(r);
                    (&low[i], &mut high[0])
                };
                to.iter_mut().zip(from).for_each(|(t, f)| *t -= factor * f);
            }
        }
    }
    Some((0..n).map(|i| rows[i][n] / rows[i][i] / scale[i]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(truth: [f64; 4], wobble: f64) -> Vec<Sample> {
        (0..12u32)
            .map(|i| {
                let layers = [16, 8, 2][i as usize % 3];
                let s = Sample {
                    kernels_us: f64::from(500 + i * i * 97 % 2000) * layers as f64,
                    layers,
                    context: f64::from([16u32, 1024, 100, 16][i as usize % 4]),
                    us: 0.0,
                };
                let us: f64 = truth.iter().zip(terms(&s)).map(|(a, b)| a * b).sum();
                Sample { us: us * (1.0 + wobble * f64::from(i % 3) - wobble), ..s }
            })
            .collect()
    }

    #[test]
    fn the_fit_finds_what_made_the_times() {
        let truth = [1.05, 40.0, 0.02, 300.0];
        let fit = Overhead::fit(1, samples(truth, 0.0)).unwrap();
        for (got, want) in [fit.factor, fit.layer_us, fit.context_us, fit.fixed_us].iter().zip(truth) {
            assert!((got / want - 1.0).abs() < 1e-4, "{fit:?}");
        }
        assert!(fit.residual < 1e-4);
        let noisy = Overhead::fit(1, samples(truth, 0.01)).unwrap();
        assert!(noisy.residual > 0.001 && noisy.residual < 0.05, "{}", noisy.residual);
        assert!((noisy.rest_us(16, 128) - (16.0 * (40.0 + 0.02 * 128.0) + 300.0)).abs() < 300.0);
    }

    #[test]
    fn unknowns_stay_positive_and_few_models_are_refused() {
        let fit = Overhead::fit(1, samples([1.0, 0.0, 0.0, 0.0], 0.01)).unwrap();
        assert!(fit.layer_us >= 0.0 && fit.context_us >= 0.0 && fit.fixed_us >= 0.0, "{fit:?}");
        // A machine so busy that slow kernels seem to help, and one where they seem not to matter.
        for truth in [[-0.01, 400.0, 0.0, 900.0], [0.0, 40.0, 0.02, 300.0]] {
            let fit = Overhead::fit(1, samples(truth, 0.01)).unwrap();
            assert!(fit.factor > 0.0 && fit.layer_us >= 0.0 && fit.fixed_us >= 0.0, "{fit:?}");
        }
        let few = samples([1.0; 4], 0.0)[..3].to_vec();
        assert!(matches!(Overhead::fit(1, few), Err(Error::Profile { .. })));
    }
}
