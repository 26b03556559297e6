//! Shared helpers of the workspace-level tests: where the models are, the verbs in one line each,
//! and model directories taken apart and put together again with whatever is to be wrong in them.
#![expect(clippy::print_stderr, reason = "a test that does not run has to say so")]

pub mod parts;

pub use parts::{Parts, Stored};

use fracbit::{
    Effort, Error, Inventory, Opened, Plan, PlanOptions, QuantizeOptions, QuantizeReport, Quiet, Rounders,
    Sensitivities, Target,
    bands::{self, Bands},
};
use fracbit_base::Scheme;
use fracbit_engine::{Draft, Engine, EngineOptions, Tokens};
use fracbit_kernels::{Isa, Kernels};
use fracbit_model::{
    KvType, LayerLinear, LinearId, Model, RotationMode, SampleConfig, Sampler, StateOptions, WeightSource,
};
use fracbit_quant::sensitivity::Fit;
use fracbit_schedule::Scheduler;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("tests/ lies in the workspace").to_path_buf()
}

/// The embedded demo model, 2.8 million parameters.
#[must_use]
pub fn demo_model() -> PathBuf {
    root().join("crates/fracbit-cli/demo-model")
}

/// The tokens that an engine of one sequence writes, and how many of them it guessed.
///
/// # Panics
/// When it cannot.
#[must_use]
pub fn drafted(
    model: &Model,
    sampling: SampleConfig,
    prompt: &[u32],
    most: usize,
    scheduler: Option<Scheduler>,
    draft: Option<Draft>,
) -> (Vec<u32>, usize) {
    let context = model.config().max_position_embeddings;
    let options = EngineOptions { sequences: 1, context, scheduler, draft, ..EngineOptions::default() };
    let engine = Engine::new(model, options).expect("good options");
    let sampler = Sampler::new(sampling).expect("a good configuration");
    let mut written =
        Tokens::begin(engine, prompt.to_vec(), most, Vec::new(), sampler).expect("a prompt that fits");
    let tokens = written.by_ref().map(|token| token.expect("a step")).collect();
    (tokens, written.done().expect("it ended").guessed)
}

/// The demo model in one scheme everywhere, searched quickly, made in `dir`.
///
/// # Panics
/// When it cannot be made.
#[must_use]
pub fn uniform_demo(dir: &Path, scheme: &str, mode: RotationMode) -> Model {
    let source = Source::open(&demo_model(), mode, 0).expect("the embedded model");
    let plan = source.uniform(scheme).expect("a scheme of every width");
    source.quantize_at(Effort::Fast, &plan, dir, true).expect("a good checkpoint and plan");
    load(dir).expect("just written")
}

/// Text that the demo model was not trained on, and its path.
#[must_use]
pub fn stories() -> (String, PathBuf) {
    let path = demo_model().join("stories.txt");
    (fs::read_to_string(&path).expect("the committed text is readable"), path)
}

/// A file or directory beside the repository, in `../shared`; `None`, said aloud, where it is
/// absent.
#[must_use]
pub fn shared(path: &str) -> Option<PathBuf> {
    let full = root().join("../shared").join(path);
    if full.exists() {
        return Some(full);
    }
    skip(&full.display().to_string(), "absent");
    None
}

/// Says aloud that something did not run.
pub fn skip(what: &str, why: &str) {
    eprintln!("SKIPPED {what}: {why}");
}

/// A checkpoint of `tests/reference` with its float64 logits.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Its directory's name.
    pub name: String,
    /// The directory.
    pub dir: PathBuf,
    /// The input.
    pub tokens: Vec<u32>,
    /// The output, (token, vocabulary).
    pub logits: Vec<f32>,
}

/// All reference checkpoints, by name.
///
/// # Panics
/// When the committed files are damaged.
#[must_use]
pub fn references() -> Vec<Reference> {
    let models = root().join("tests/reference/models");
    let mut dirs: Vec<PathBuf> = fs::read_dir(&models)
        .expect("the reference checkpoints are committed")
        .map(|entry| entry.expect("a readable directory").path())
        .collect();
    dirs.sort();
    dirs.into_iter().map(read_reference).collect()
}

/// One reference checkpoint.
///
/// # Panics
/// As [`references`].
#[must_use]
pub fn reference(name: &str) -> Reference {
    read_reference(root().join("tests/reference/models").join(name))
}

fn read_reference(dir: PathBuf) -> Reference {
    let text = fs::read(dir.join("reference.json")).expect("reference.json is committed");
    let json: serde_json::Value = serde_json::from_slice(&text).expect("reference.json is JSON");
    let tokens = json["tokens"].as_array().expect("a list of tokens");
    let tokens =
        tokens.iter().map(|t| u32::try_from(t.as_u64().expect("a token")).expect("a token")).collect();
    let raw = fs::read(dir.join("logits.f32")).expect("logits.f32 is committed");
    let logits = raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let name = dir.file_name().expect("a directory has a name").to_string_lossy().into_owned();
    Reference { name, dir, tokens, logits }
}

/// `|a - b| / |b|`, Euclidean norms.
///
/// # Panics
/// When the lengths differ.
#[must_use]
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "two vectors of one length");
    let error: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    (error / b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()).sqrt()
}

/// Logits of every token in one forward call, with an f32 cache.
///
/// # Panics
/// When the model refuses the tokens.
#[must_use]
pub fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    logits_with(model, &StateOptions { kv: KvType::F32, chunk: 128, ..StateOptions::default() }, tokens)
}

/// As [`logits`], in a state of these options.
///
/// # Panics
/// When the model refuses the tokens.
#[must_use]
pub fn logits_with(model: &Model, options: &StateOptions, tokens: &[u32]) -> Vec<f32> {
    let options = StateOptions { context: Some(tokens.len()), ..*options };
    let mut state = model.state(&options);
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    model.forward(&mut state, tokens, &mut hidden).expect("tokens of the model");
    model.logits(&mut state, &hidden, &mut logits).expect("rows of hidden states");
    logits
}

/// Every instruction set with the kernels that use it, or `None` where this machine lacks it.
#[must_use]
pub fn backends() -> Vec<(Isa, Option<Kernels>)> {
    let with = |isa| match isa {
        Isa::Scalar => Some(Kernels::scalar()),
        isa => install_up_to(isa),
    };
    Isa::ALL.into_iter().map(|isa| (isa, with(isa))).collect()
}

fn install_up_to(isa: Isa) -> Option<Kernels> {
    [fracbit_kernels_x86::install_up_to, fracbit_kernels_neon::install_up_to].into_iter().find_map(
        |install| {
            let mut kernels = Kernels::scalar();
            (install(&mut kernels, isa) == isa).then_some(kernels)
        },
    )
}

/// A scheme by name.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn scheme(name: &str) -> Scheme {
    name.parse().expect("the name of a scheme")
}

/// A checkpoint ready to be quantized.
#[derive(Debug)]
pub struct Source {
    /// The directory.
    pub opened: Opened,
    /// Its weights, rotated.
    pub weights: WeightSource,
    /// What there is to quantize.
    pub inventory: Inventory,
    /// Seed of the rotation.
    pub seed: u64,
}

impl Source {
    /// Opens a directory.
    ///
    /// # Errors
    /// As [`Opened::new`] and [`Opened::source`].
    pub fn open(dir: &Path, rotation: RotationMode, seed: u64) -> Result<Self, Error> {
        let opened = Opened::new(dir)?;
        let weights = opened.source(rotation, seed)?;
        let inventory = Inventory::of(&opened.checkpoint, &opened.config, rotation);
        Ok(Self { opened, weights, inventory, seed })
    }

    /// The rotation.
    #[must_use]
    pub fn rotation(&self) -> RotationMode {
        self.weights.rotations().mode()
    }

    /// Options of a plan for this rotation and seed.
    #[must_use]
    pub fn options(&self, target: Target) -> PlanOptions {
        PlanOptions { rotation: self.rotation(), seed: self.seed, ..PlanOptions::new(target) }
    }

    /// The best plan under prior sensitivities.
    ///
    /// # Errors
    /// As [`fracbit::plan()`].
    pub fn plan(&self, options: &PlanOptions) -> Result<Plan, Error> {
        let prior = Sensitivities::prior(&self.inventory, self.rotation());
        Ok(fracbit::plan(&self.inventory, &prior, options)?)
    }

    /// Some matrices that may be cut: embedding, head, and queries, up and down of the first block.
    #[must_use]
    pub fn cut(&self) -> Vec<LinearId> {
        let ids =
            self.inventory.matrices.iter().filter(|m| m.pieces == 1 && m.shape.rows >= 64).map(|m| m.id);
        let some =
            [LayerLinear::Q, LayerLinear::Up, LayerLinear::Down].map(|which| LinearId::Layer(0, which));
        ids.filter(|id| !id.is_layer() || some.contains(id)).collect()
    }

    /// Prior sensitivities with [`Source::cut`] in bands of rows, the first of which have most of
    /// their losses.
    ///
    /// # Panics
    /// When the vocabulary is too small for bands.
    #[must_use]
    pub fn banded(&self) -> Sensitivities {
        let mut guess = Sensitivities::prior(&self.inventory, self.rotation());
        for id in self.cut() {
            let rows = id.shape(&self.opened.config).rows;
            let counts: Vec<u32> = (0..rows).map(|row| (40 * rows / (1 + row * 77 % rows)) as u32).collect();
            // One has fewer bands than most.
            let bands = match id {
                LinearId::Layer(_, LayerLinear::Up) => {
                    (0..rows).map(|row| ["0", "1", "1"][row % 3]).collect::<String>().try_into().ok()
                }
                _ => Bands::of(&counts),
            };
            let bands = bands.expect("rows that are uneven enough");
            let whole = guess.of(&id.to_string()).expect("it has all");
            for (band, share) in [0.5, 0.3, 0.15, 0.05].into_iter().enumerate().take(bands.count()) {
                guess.layers.insert(bands::band_name(id, band), Fit { a: whole * share, residual: 0.0 });
            }
            guess.bands.insert(id.to_string(), bands);
        }
        guess
    }

    /// One scheme for every matrix.
    ///
    /// # Errors
    /// As [`fracbit::plan()`].
    pub fn uniform(&self, name: &str) -> Result<Plan, Error> {
        self.plan(&self.options(Target::Uniform(scheme(name))))
    }

    /// Writes the quantized model, with the search that the command takes by default.
    ///
    /// # Errors
    /// As [`fracbit::quantize()`].
    pub fn quantize(&self, plan: &Plan, out: &Path, force: bool) -> Result<QuantizeReport, Error> {
        self.quantize_at(Effort::Balanced, plan, out, force)
    }

    /// As [`Source::quantize`], with another effort.
    ///
    /// # Errors
    /// As there.
    pub fn quantize_at(
        &self,
        effort: Effort,
        plan: &Plan,
        out: &Path,
        force: bool,
    ) -> Result<QuantizeReport, Error> {
        let options = QuantizeOptions {
            force,
            rounders: Rounders::new(effort),
            command: "a test".to_owned(),
            source: "a test's model".to_owned(),
            source_hash: self.opened.checkpoint.content_hash(),
            ..QuantizeOptions::default()
        };
        fracbit::quantize(&self.weights, &self.inventory, plan, out, &options, &Quiet)
    }
}

/// Opens a directory, builds its model with every checksum checked, and reads its tokenizer: what
/// `run` and `eval` do.
///
/// # Errors
/// As [`Opened::new`], [`Opened::model`] and [`Opened::tokenizer`].
pub fn load(dir: &Path) -> Result<Model, Error> {
    let opened = Opened::new(dir)?;
    opened.tokenizer()?;
    opened.model(&fracbit::kernels()?, true)
}

/// Names and contents of the files of a directory.
///
/// # Panics
/// When the directory cannot be read.
#[must_use]
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).expect("a readable directory").map(|e| e.expect("a readable directory"));
    let mut all: Vec<(String, Vec<u8>)> = entries
        .map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).expect("a readable file")))
        .collect();
    all.sort();
    all
}

/// Writes files into a directory, which is made if need be.
///
/// # Panics
/// When one cannot be written.
pub fn write_files<'a>(dir: &Path, files: impl IntoIterator<Item = (&'a str, &'a [u8])>) {
    fs::create_dir_all(dir).expect("a writable place");
    for (name, bytes) in files {
        fs::write(dir.join(name), bytes).expect("a writable place");
    }
}
