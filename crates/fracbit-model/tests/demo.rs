//! The trained models beside the repository, where they are: numbers that a correct decoder gives
//! on real text.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fracbit_io::{Bos, Checkpoint, EncodeOptions, ModelConfig, PrefixSpace, RopeScaling, Tokenizer};
use fracbit_model::{
    EvalOptions, FloatId, KvType, LayerLinear, Linear, LinearId, Model, ModelBuilder, RotationMode,
    StateOptions, WeightSource, eval,
};

/// A model's directory and a text; `None`, said aloud, where they are absent.
fn shared(model: &str, text: &str) -> Option<(PathBuf, String)> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared"));
    let (dir, text) = (root.join("models").join(model), root.join("text").join(text));
    if !dir.is_dir() || !text.is_file() {
        eprintln!("SKIPPED: {} or {} is absent", dir.display(), text.display());
        return None;
    }
    Some((dir, std::fs::read_to_string(text).unwrap()))
}

fn load(dir: &Path, mode: RotationMode) -> (Model, Tokenizer) {
    let config = ModelConfig::from_dir(dir).unwrap();
    let tokenizer = Tokenizer::from_dir(dir, Some(&config)).unwrap();
    let source = WeightSource::new(Arc::new(Checkpoint::open(dir).unwrap()), config, mode, 3).unwrap();
    (Model::from_source(&source).unwrap(), tokenizer)
}

#[test]
fn demo_model_reaches_its_published_likelihood() {
    let Some((dir, text)) = shared("demo", "tinystories-eval.txt") else { return };
    for (mode, kv) in [(RotationMode::None, KvType::F32), (RotationMode::Fold, KvType::I16)] {
        let (model, tokenizer) = load(&dir, mode);
        let options = EncodeOptions { bos: Bos::Never, ..EncodeOptions::default() };
        let tokens = tokenizer.encode(&text, options).unwrap();
        // 256 predictions each: the last target is the next window's first token.
        let windows: Vec<&[u32]> = (0..24).map(|i| &tokens[256 * i..=256 * (i + 1)]).collect();
        let state = StateOptions { kv, ..StateOptions::default() };
        let nll =
            eval::nll(&model, &windows, &EvalOptions { state, ..EvalOptions::default() }, |_| {}).unwrap();
        eprintln!("demo, {mode:?}, {kv:?}: {:.5} nats/token", nll.nats_per_token());
        assert_eq!(nll.tokens, 24 * 256);
        // Published as 2.888.
        assert!((nll.nats_per_token() - 2.8883).abs() < 0.001, "{mode:?}: {}", nll.nats_per_token());
    }
}

#[test]
fn four_bit_caches_bear_large_key_biases() {
    let Some((dir, text)) = shared("demo", "tinystories-eval.txt") else { return };
    let (_, tokenizer) = load(&dir, RotationMode::None);
    let mut config = ModelConfig::from_dir(&dir).unwrap();
    config.qkv_bias = true;
    // The slowest plane stands still, so that a constant in it changes no weight of attention.
    config.rope.scaling = RopeScaling::Llama3 {
        factor: 1e6,
        low_freq_factor: 1.0,
        high_freq_factor: 1.0001,
        original_max_position_embeddings: 512,
    };
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let mut plain = config.clone();
    plain.qkv_bias = false;
    let source = WeightSource::new(checkpoint, plain, RotationMode::None, 0).unwrap();
    let (d, layers) = (config.head_dim, config.num_hidden_layers());
    let build = |first: f32, last: f32| {
        let mut builder = ModelBuilder::new(config.clone(), source.rotations().clone()).unwrap();
        for id in LinearId::all(&config) {
            let bias = id.has_bias(&config).then(|| {
                let mut bias = vec![0.0; id.shape(&config).rows];
                let size = match id {
                    LinearId::Layer(0, LayerLinear::K) => first,
                    LinearId::Layer(i, LayerLinear::K) if i + 1 == layers => last,
                    _ => 0.0,
                };
                for head in bias.chunks_mut(d) {
                    (head[d / 2 - 1], head[d - 1]) = (size, -size);
                }
                bias
            });
            let matrix = source.linear(id).unwrap();
            builder.set(id, Linear::dense(matrix.shape, matrix.data, bias).unwrap()).unwrap();
        }
        for id in FloatId::all(&config) {
            builder.set_floats(id, source.floats(id).unwrap()).unwrap();
        }
        builder.build().unwrap()
    };
    let options = EncodeOptions { bos: Bos::Never, ..EncodeOptions::default() };
    let tokens = tokenizer.encode(&text, options).unwrap();
    let windows: Vec<&[u32]> = (0..8).map(|i| &tokens[256 * i..=256 * (i + 1)]).collect();
    let nats = |model: &Model, kv| {
        let state = StateOptions { kv, ..StateOptions::default() };
        let options = EvalOptions { state, ..EvalOptions::default() };
        eval::nll(model, &windows, &options, |_| {}).unwrap().nats_per_token()
    };
    let (without, with) = (build(0.0, 0.0), build(302.0, 460.0));
    let most = [(KvType::I8, 0.002), (KvType::I4, 0.02)];
    let [plain, whole] = [&without, &with].map(|model| nats(model, KvType::I16));
    assert!((plain - whole).abs() < 0.002, "attention is the same: {plain} {whole}");
    for (kv, most) in most {
        let (before, after) = (nats(&without, kv), nats(&with, kv));
        eprintln!("{kv:?}: {before:.5}, with biases {after:.5}, of {whole:.5}");
        assert!(after - whole < most, "{kv:?}: {after}");
        assert!((after - before).abs() < 0.004, "{kv:?}: {after} {before}");
    }
}

#[test]
fn tinystories_656k_agrees_with_float64() {
    let Some((dir, text)) = shared("TinyStories-656K", "tinystories-train.txt") else { return };
    let (model, tokenizer) = load(&dir, RotationMode::None);
    let stories: Vec<String> =
        text.split("<|endoftext|>").take(12).map(|s| s.trim().replace("\n\n", "\n")).collect();
    // Trained on BOS, then the story without the leading U+2581 that its tokenizer file asks for.
    // Both values by the plain float64 implementation in tests/reference, with a tokenizer written
    // for that comparison.
    for (prefix_space, want) in [(PrefixSpace::Drop, 2.722_79), (PrefixSpace::Keep, 2.845_50)] {
        let options = EncodeOptions { bos: Bos::Always, prefix_space };
        let windows: Vec<_> = stories.iter().map(|s| tokenizer.encode(s, options).unwrap()).collect();
        let nll = eval::nll(&model, &windows, &EvalOptions::default(), |_| {}).unwrap();
        eprintln!("TinyStories-656K, {prefix_space:?}: {:.5} nats/token", nll.nats_per_token());
        assert!((nll.nats_per_token() - want).abs() < 5e-4, "{prefix_space:?}: {}", nll.nats_per_token());
    }
}
