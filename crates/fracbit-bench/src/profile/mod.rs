//! The machine profile: every product that a model of some shape may consist of, and what a decode
//! step takes beside them.

mod dense;
mod products;

use crate::{Spread, limits, pool, positive, random::Arena};
use dense::Dense;
use fracbit_base::Scheme;
use fracbit_io::ModelConfig;
use fracbit_kernels::Kernels;
use fracbit_load::{Error, Progress};
use fracbit_model::{LinearId, Model, SampleConfig, Sampler, State, StateOptions};
use fracbit_plan::{
    fusion,
    machine::{
        self, BUILD, Machine, MachineProfile, ModelShape, Overhead, PROFILE_VERSION, Product, Sample, isa,
    },
    plan::{Matrix, Storage},
};
use products::{Products, Times, multiplies};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::ThreadPool;
use std::{collections::BTreeMap, fs, time::Instant};

/// Weights in the layers of a random model; a larger model is measured with fewer layers.
const MODEL_WEIGHTS: usize = 1 << 30;
/// Layers that it has at least where there are experts: those are many weights for little time, and
/// what a layer takes is told from what a step takes by different numbers of layers.
const MIXED_LAYERS: usize = 4;
/// Tokens in the cache when the decoding of most random models begins.
const SHORT: usize = 16;
/// Contexts of the random models that show what attention takes; several sequences share them.
const LONG: [usize; 4] = [512, 1024, 512, 1024];
/// Tokens generated in one measurement.
const STEPS: usize = 8;
/// Times that all schemes are gone through, every other time backwards, with random models in
/// between: a machine that changes its speed meanwhile changes that of products and models alike.
const SWEEPS: usize = 4;

/// What to measure.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Schemes.
    pub schemes: Vec<Scheme>,
    /// Tokens of a step.
    pub batch: Vec<usize>,
    /// Threads.
    pub threads: usize,
    /// Measurements of each product in each of four sweeps, and twice as many of each step of a
    /// model.
    pub rounds: usize,
    /// Random models beside those with long contexts.
    pub models: usize,
    /// Bytes to read between measurements, so that weights come from memory; eight times the
    /// last-level cache if absent.
    pub flush: Option<u64>,
    /// Seed of the random configurations.
    pub seed: u64,
}

impl Default for ProfileOptions {
    /// Every scheme, single tokens, all cores.
    fn default() -> Self {
        Self {
            schemes: Scheme::all().filter(|scheme| !scheme.nested()).collect(),
            batch: vec![1],
            threads: machine::cores(),
            rounds: 5,
            models: 16,
            flush: None,
            seed: 0,
        }
    }
}

/// Measures a profile for models of `config`, which `subject` names.
///
/// # Errors
/// [`Error::Option`] for empty lists and zeros; what building and running models refuse.
///
/// # Panics
/// When a product or a model gives no finite numbers.
pub fn profile(
    subject: &str,
    config: &ModelConfig,
    options: &ProfileOptions,
    kernels: &Kernels,
    progress: &dyn Progress,
) -> Result<MachineProfile, Error> {
    positive("--batch", &options.batch)?;
    positive("--threads", &[options.threads])?;
    positive("--rounds", &[options.rounds])?;
    if options.schemes.is_empty() {
        return Err(Error::Option { option: "--scheme", rule: "should name a scheme".to_owned() });
    }
    let start = Instant::now();
    let pool = pool(options.threads)?;
    let arena = Arena::new();
    let mut flush = limits::Memory::new(options.flush.unwrap_or_else(|| 8 * last_cache()).max(4096))?;
    let limits = pool.install(|| {
        let mut read: Vec<f64> = (0..3).map(|_| flush.read()).collect();
        let mut products: Vec<f64> = (0..3).map(|_| limits::int8_products()).collect();
        read.sort_by(f64::total_cmp);
        products.sort_by(f64::total_cmp);
        [read[1], products[1]]
    });
    let products = Products::of(config, options.batch.iter().copied().max().unwrap_or(1));
    let dense = Dense::new(&products, &arena)?;
    let mut times = Times::new(options, &products);
    let mut profile = MachineProfile {
        profile_version: PROFILE_VERSION,
        fracbit: env!("CARGO_PKG_VERSION").to_owned(),
        build: BUILD.to_owned(),
        cpu: Machine::now().cpu,
        isa: isa(kernels),
        threads: options.threads,
        subject: subject.to_owned(),
        shape: ModelShape::of(config),
        read_gb_per_s: limits[0],
        int8_gmac_per_s: limits[1],
        seconds: 0.0,
        kernels: Vec::new(),
        overheads: Vec::new(),
    };
    let stages = SWEEPS * options.schemes.len() + options.models + LONG.len();
    progress.stage("measuring products and models", stages as u64);
    let bench = Bench { options, kernels, arena: &arena, pool: &pool, progress };
    let mut draws = Vec::new();
    let mut steps: Vec<Vec<f64>> = Vec::new();
    for sweep in 0..SWEEPS {
        times.sweep(&products, &dense, sweep % 2 == 1, &bench, &mut flush)?;
        if sweep == 0 {
            profile.kernels = times.medians(options, &products, &dense);
            draws = draw(config, options, &profile);
        }
        let done = steps.len();
        for draw in &draws[done..draws.len() * (sweep + 1) / SWEEPS] {
            steps.push(draw.measure(&bench)?);
        }
    }
    profile.kernels = times.medians(options, &products, &dense);
    for (at, &batch) in options.batch.iter().enumerate() {
        let samples = draws.iter().zip(&steps).map(|(draw, us)| draw.sample(&profile, batch, us[at]));
        profile.overheads.push(Overhead::fit(batch, samples.collect())?);
    }
    profile.seconds = start.elapsed().as_secs_f64();
    Ok(profile)
}

/// Bytes of the last-level cache as the system tells, else 64 MiB.
fn last_cache() -> u64 {
    let size = |index: u32| -> Option<u64> {
        let text =
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        text.trim().strip_suffix('K')?.parse::<u64>().ok()
    };
    (0..8).filter_map(size).max().map_or(64 << 20, |kib| kib << 10)
}

/// What measuring needs.
pub(super) struct Bench<'a> {
    pub(super) options: &'a ProfileOptions,
    pub(super) kernels: &'a Kernels,
    pub(super) arena: &'a Arena,
    pub(super) pool: &'a ThreadPool,
    pub(super) progress: &'a dyn Progress,
}

/// A model at random: its layers, the scheme of every matrix, what is fused, and the context it
/// runs at.
struct Draw {
    config: ModelConfig,
    schemes: BTreeMap<LinearId, Scheme>,
    fused: Vec<Vec<LinearId>>,
    context: usize,
}

impl Draw {
    fn new(
        config: &ModelConfig,
        layers: usize,
        context: usize,
        schemes: &[Scheme],
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let mut config = config.clone();
        config.layers.truncate(layers);
        // Around a rate of its own, so that models differ in speed and not only in what they are
        // made of.
        let rates: Vec<f64> = schemes.iter().map(|s| s.rate().bits()).collect();
        let rate = rates[rng.random_range(0..rates.len())];
        let near: Vec<Scheme> =
            schemes.iter().copied().filter(|s| (s.rate().bits() - rate).abs() <= 0.75).collect();
        let matrices = Matrix::all(&config);
        let mut groups = fusion::candidates(&matrices);
        let mut fused = Vec::new();
        let mut taken = vec![false; matrices.len()];
        while !groups.is_empty() {
            let group = groups.swap_remove(rng.random_range(0..groups.len()));
            if rng.random_bool(0.5) && group.iter().all(|&m| !taken[m]) {
                group.iter().for_each(|&m| taken[m] = true);
                fused.push(group.iter().map(|&m| matrices[m].id).collect::<Vec<_>>());
            }
        }
        let mut chosen: BTreeMap<LinearId, Scheme> =
            matrices.iter().map(|m| (m.id, near[rng.random_range(0..near.len())])).collect();
        for group in &fused {
            let scheme = chosen[&group[0]];
            chosen.extend(group.iter().map(|id| (*id, scheme)));
        }
        Self { config, schemes: chosen, fused, context }
    }

    /// Microseconds of a step with each batch.
    fn measure(&self, bench: &Bench<'_>) -> Result<Vec<f64>, Error> {
        let model = bench.arena.model(&self.config, |id| self.schemes[&id], &self.fused, bench.kernels)?;
        let step = |&batch: &usize| {
            let rounds = 2 * bench.options.rounds;
            let spread =
                bench.pool.install(|| Decoder::new(&model, self.context(batch), batch)?.measure(rounds))?;
            Ok(spread.median)
        };
        let steps = bench.options.batch.iter().map(step).collect();
        bench.progress.advance(1);
        steps
    }

    /// Tokens in the cache of each of `batch` sequences: about as many in all as one would have, so
    /// that filling takes no longer.
    fn context(&self, batch: usize) -> usize {
        (self.context / batch).max(SHORT.min(self.context))
    }

    fn sample(&self, profile: &MachineProfile, batch: usize, us: f64) -> Sample {
        #[expect(clippy::cast_precision_loss, reason = "tokens")]
        let context = self.context(batch) as f64 + (STEPS - 1) as f64 / 2.0;
        let layers = self.config.num_hidden_layers();
        Sample { kernels_us: self.kernels_us(profile, batch), layers, context, us }
    }

    /// Microseconds of its products, by the profile.
    fn kernels_us(&self, profile: &MachineProfile, batch: usize) -> f64 {
        kernels_us(&self.config, |id| self.schemes[&id], &self.fused, profile, batch)
            .expect("every shape of the model was measured")
    }
}

/// Microseconds of the products of a model; `None` when one was not measured.
fn kernels_us(
    config: &ModelConfig,
    scheme: impl Fn(LinearId) -> Scheme,
    fused: &[Vec<LinearId>],
    profile: &MachineProfile,
    batch: usize,
) -> Option<f64> {
    let mut sum = 0.0;
    for id in LinearId::all(config).filter(|&id| multiplies(config, id)) {
        let alone = [id];
        let group = fused.iter().find(|g| g.contains(&id)).map_or(&alone[..], Vec::as_slice);
        if group[0] == id {
            let members: Vec<Matrix> = group.iter().map(|&id| Matrix::new(id, config)).collect();
            sum += profile.kernel_us(Storage::Packed(scheme(id)), Product::of(&members)?, batch)?;
        }
    }
    Some(sum)
}

/// Schemes that a plan to a speed may well take: no other one is both much faster and no worse.
/// Random models are made of these, lest they be dominated by kernels that no plan wants.
fn useful(schemes: &[Scheme], profile: &MachineProfile, batch: usize) -> Vec<Scheme> {
    let time = |s: Scheme| -> f64 {
        profile
            .kernels
            .iter()
            .filter(|k| k.scheme == Storage::Packed(s) && k.batch == batch)
            .map(|k| k.us)
            .sum()
    };
    let facts: Vec<(Scheme, f64, f64)> =
        schemes.iter().map(|&s| (s, time(s), fracbit_codebook::nmse(s).unwrap_or(1.0))).collect();
    let beaten = |(_, time, error): &(Scheme, f64, f64)| {
        facts.iter().any(|other| other.1 < 0.7 * time && other.2 <= *error)
    };
    facts.iter().filter(|s| !beaten(s)).map(|s| s.0).collect()
}

/// Random models: most with a short context and many layers, some with a long one and few layers.
fn draw(config: &ModelConfig, options: &ProfileOptions, profile: &MachineProfile) -> Vec<Draw> {
    let per_layer: usize = LinearId::all(config)
        .filter(|id| matches!(id, LinearId::Layer(0, _)))
        .map(|id| id.shape(config).len())
        .sum();
    let all = config.num_hidden_layers();
    let least = if config.experts.is_some() { MIXED_LAYERS } else { 1 };
    let most = (MODEL_WEIGHTS / per_layer.max(1)).max(least).min(all);
    let few = most.div_ceil(4);
    let room = config.max_position_embeddings.saturating_sub(STEPS * 8).max(1);
    let schemes = useful(&options.schemes, profile, options.batch[0]);
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let mut draws = Vec::new();
    for i in 0..options.models.max(LONG.len()) {
        if i < options.models {
            let layers = [most, most.div_ceil(2), most, few][i % 4];
            draws.push(Draw::new(config, layers, SHORT.min(room), &schemes, &mut rng));
        }
        if let Some(&context) = LONG.get(i) {
            draws.push(Draw::new(config, few, context.min(room), &schemes, &mut rng));
        }
    }
    draws
}

/// A model that decodes several sequences together.
pub(super) struct Decoder<'a> {
    model: &'a Model,
    states: Vec<State>,
    sampler: Sampler,
    context: usize,
}

impl<'a> Decoder<'a> {
    /// With `context` tokens in the cache of each of `batch` sequences.
    pub(super) fn new(model: &'a Model, context: usize, batch: usize) -> Result<Self, Error> {
        let room = context + STEPS;
        let vocab = model.config().vocab_size;
        let token = |i: usize| u32::try_from(i * 7919 % vocab).expect("vocabularies are below 2^32");
        let prompt: Vec<u32> = (0..context).map(token).collect();
        let mut hidden = Vec::new();
        let mut states = Vec::with_capacity(batch);
        for _ in 0..batch {
            let mut state = model.state(&StateOptions { context: Some(room), ..StateOptions::default() });
            state.reserve(room)?;
            model.forward(&mut state, &prompt, &mut hidden)?;
            states.push(state);
        }
        let sampler = Sampler::new(SampleConfig { temperature: 0.0, ..SampleConfig::default() })?;
        Ok(Self { model, states, sampler, context })
    }

    /// Microseconds of steps.
    fn measure(&mut self, rounds: usize) -> Result<Spread, Error> {
        Ok(Spread::of(self.steps(rounds)?))
    }

    /// Microseconds of each step, picking the next tokens included; the first of the measurements
    /// warms up.
    pub(super) fn steps(&mut self, rounds: usize) -> Result<Vec<f64>, Error> {
        let (mut hidden, mut logits) = (Vec::new(), Vec::new());
        let vocab = self.model.config().vocab_size;
        let mut times = Vec::new();
        let ones = vec![1; self.states.len()];
        for round in 0..=rounds {
            self.states.iter_mut().for_each(|state| state.truncate(self.context));
            let mut tokens = vec![1; self.states.len()];
            for _ in 0..STEPS {
                let start = Instant::now();
                self.model.forward_batch(&mut self.states, &tokens, &ones, &mut hidden)?;
                self.model.logits(&mut self.states[0], &hidden, &mut logits)?;
                for (token, logits) in tokens.iter_mut().zip(logits.chunks_exact(vocab)) {
                    *token = self.sampler.sample(logits, &[])?;
                }
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_base::Palette;
    use fracbit_load::Quiet;
    use fracbit_model::RotationMode;
    use fracbit_plan::{Error as PlanError, PlanOptions, Preset, Sensitivities, Speed, Target, plan};
    use std::path::Path;

    fn tiny() -> ModelConfig {
        let text = Preset::named("tiny").unwrap().config_text();
        ModelConfig::parse(text.as_bytes(), Path::new("config.json")).unwrap()
    }

    fn options() -> ProfileOptions {
        ProfileOptions {
            schemes: ["tcq-fast-2", "nuq-4"].map(|s| s.parse().unwrap()).to_vec(),
            batch: vec![1, 2],
            threads: 1,
            rounds: 1,
            models: 3,
            flush: Some(4096),
            seed: 1,
        }
    }

    #[test]
    fn a_small_profile_and_its_reader() {
        let kernels = fracbit_load::kernels().unwrap();
        let got = profile("tiny", &tiny(), &options(), &kernels, &Quiet).unwrap();
        // q/o, k/v, qk, qkv, gate/up, gate + up, down, head; qk and qv are alike, kv has its own
        // rows.
        let products = Products::of(&tiny(), 2);
        assert_eq!(got.kernels.len(), 2 * 2 * products.all.len() + 2 * products.single.len());
        for &product in &products.single {
            assert!(got.kernel_us(Storage::F16, product, 2).is_some(), "{product:?}");
        }
        assert!(got.kernels.iter().all(|k| k.us > 0.0 && k.spread[0] <= k.us && k.us <= k.spread[1]));
        assert_eq!(
            got.overheads.iter().map(|o| (o.batch, o.samples.len())).collect::<Vec<_>>(),
            [(1, 7), (2, 7)]
        );

        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("machine.json");
        fs::write(&path, serde_json::to_string(&got).unwrap()).unwrap();
        let read = MachineProfile::read(&path).unwrap();
        assert_eq!(read.kernels.len(), got.kernels.len());
        read.require_current("machine.json", &kernels, 1).unwrap();
        read.require_shape("machine.json", &tiny()).unwrap();
        assert!(read.overhead(2).is_ok());
        let message = |e: PlanError| e.to_string();
        assert!(message(read.overhead(3).unwrap_err()).contains("--batch"));
        let stale = |change: fn(&mut MachineProfile)| {
            let mut profile = read.clone();
            change(&mut profile);
            message(profile.require_current("machine.json", &kernels, 1).unwrap_err())
        };
        assert!(stale(|p| p.cpu = "abacus".to_owned()).contains("abacus"));
        assert!(stale(|p| p.isa = "none".to_owned()).contains("instruction set"));
        assert!(stale(|p| p.threads = 9).contains("threads (9)"));
        assert!(stale(|p| p.fracbit = "0.0.0".to_owned()).contains("version"));
        let kernels_changed = stale(|p| p.build = "0123456789abcdef".to_owned());
        assert!(kernels_changed.contains("kernels") && kernels_changed.contains(BUILD), "{kernels_changed}");
        let other = Preset::named("tiny").unwrap().resized(Some(400), None).unwrap().config_text();
        let other = ModelConfig::parse(other.as_bytes(), Path::new("config.json")).unwrap();
        assert!(message(read.require_shape("m", &other).unwrap_err()).contains("vocabulary 400"));
        for bad in ["", "{}", "{\"profile_version\":1}", "{\"profile_version\":2}"] {
            fs::write(&path, bad).unwrap();
            assert!(matches!(MachineProfile::read(&path), Err(PlanError::Profile { .. })), "{bad}");
        }
    }

    #[test]
    fn experts_are_measured_by_what_a_token_meets() {
        let mixture = |count: usize| {
            let text = format!(
                r#"{{"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2, "head_dim": 32,
                "vocab_size": 100, "num_experts": {count}, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}"#
            );
            ModelConfig::parse(text.as_bytes(), Path::new("config.json")).unwrap()
        };
        let kernels = fracbit_load::kernels().unwrap();
        let got = profile("mixture", &mixture(7), &options(), &kernels, &Quiet).unwrap();
        let up = Product { cols: 64, rows: 7 * 32, pieces: 7 };
        for scheme in ["tcq-fast-2", "nuq-4", "f16"] {
            let us = got.kernel_us(scheme.parse().unwrap(), up, 2);
            assert!(us.is_some_and(|us| us > 0.0), "{scheme}");
            assert_eq!(got.kernel_us(scheme.parse().unwrap(), Product { pieces: 1, ..up }, 2), None);
        }
        assert!(got.overheads[0].samples.iter().any(|s| s.layers == 5));
        got.require_shape("m", &mixture(7)).unwrap();
        let other = got.require_shape("m", &mixture(8)).unwrap_err().to_string();
        assert!(other.contains("2 of 7 experts") && other.contains("2 of 8 experts"), "{other}");
        // A plan to a time that the slower of two has: both are so small that noise orders them.
        let inventory =
            fracbit_plan::inventory::Inventory::of_config(&mixture(7), RotationMode::Fold, String::new());
        let sensitivities = Sensitivities::prior(&inventory, RotationMode::Fold);
        let profile = std::sync::Arc::new(got);
        let step = |target, limit_us| {
            let speed = Speed { limit_us, ..Speed::new(profile.clone()) };
            let options =
                PlanOptions { speed: Some(speed), palette: Palette::All, ..PlanOptions::new(target) };
            plan(&inventory, &sensitivities, &options).unwrap().speed.unwrap().step_us
        };
        let [a, b] = ["tcq-fast-2", "nuq-4"].map(|s| step(Target::Uniform(s.parse().unwrap()), None));
        let limit = a.max(b);
        assert!(step(Target::Any, Some(limit)) <= limit + 0.1);
    }
}
