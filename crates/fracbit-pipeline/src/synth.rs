//! Checkpoints with seeded random weights of real shapes, for measurements of speed and memory.
//!
//! The weights are Gaussian with standard deviation 0.02, norms are ones: activations stay finite,
//! the text is noise. The tokenizer maps every byte to a token, which is enough to feed and read
//! such a model.

use fracbit_io::checkpoint::{EMBED, HEAD};
use fracbit_io::{
    Dtype, EmbeddingNames, MAX_SHARD, ModelConfig, OutputDir, Overwrite, ShardWriter, TensorSpec,
};
use fracbit_load::{Error, Progress};
use fracbit_model::{FloatId, LinearId};
use fracbit_plan::Preset;
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Weights drawn from one stream of random numbers; each chunk has its own, so that chunks can be
/// made in parallel.
const CHUNK: usize = 1 << 16;

/// What to make.
#[derive(Clone, Copy, Debug)]
pub struct SynthOptions {
    /// The shape.
    pub preset: Preset,
    /// Vocabulary instead of the preset's, at least 258.
    pub vocab: Option<usize>,
    /// Layers instead of the preset's.
    pub layers: Option<usize>,
    /// Seed of the weights.
    pub seed: u64,
    /// Replace an existing directory.
    pub force: bool,
}

/// Writes a checkpoint and returns its path.
///
/// # Errors
/// When an option is out of range or the directory cannot be written.
pub fn synthesize(out: &Path, options: SynthOptions, progress: &dyn Progress) -> Result<PathBuf, Error> {
    let text = options.preset.resized(options.vocab, options.layers)?.config_text();
    let config = ModelConfig::parse(text.as_bytes(), Path::new("config.json"))?;

    let mut dir = OutputDir::create(out, if options.force { Overwrite::Yes } else { Overwrite::No })?;
    let spec = |name: String, shape: Vec<usize>| TensorSpec { name, dtype: Dtype::Bf16, shape };
    let stored = |id: LinearId| id.stored_names(&config, EmbeddingNames { embed: EMBED, head: HEAD });
    let mut specs = Vec::new();
    for id in LinearId::all(&config) {
        let shape = id.shape(&config);
        let one = id.piece_shape(&config);
        specs.extend(stored(id).into_iter().map(|name| spec(name, vec![one.rows, one.cols])));
        if id.has_bias(&config) {
            specs.push(spec(id.bias_name(), vec![shape.rows]));
        }
    }
    specs.extend(FloatId::all(&config).map(|id| spec(id.weight_name(), id.dimensions(&config))));
    let mut writer =
        ShardWriter::new(&mut dir, specs, MAX_SHARD, &[("format".to_owned(), "pt".to_owned())].into())?;
    writer.check_space(0)?;
    let weights: usize = LinearId::all(&config).map(|id| id.shape(&config).len()).sum();
    progress.stage("writing random weights", 2 * weights as u64);
    for (index, id) in LinearId::all(&config).enumerate() {
        let (shape, one) = (id.shape(&config), id.piece_shape(&config));
        for (piece, name) in stored(id).iter().enumerate() {
            writer.start(name)?;
            // A slab at a time: a whole head of a large model would be a gigabyte.
            for slab in (0..one.len()).step_by(64 * CHUNK) {
                let bytes = gaussian(
                    one.len().min(slab + 64 * CHUNK) - slab,
                    options.seed,
                    (piece as u64) << 52 | (index as u64) << 32 | (slab / CHUNK) as u64,
                );
                writer.push(&bytes)?;
                progress.advance(bytes.len() as u64);
            }
            writer.end()?;
        }
        if id.has_bias(&config) {
            writer.write(
                &id.bias_name(),
                &gaussian(shape.rows, options.seed, (index as u64) << 32 | 1 << 31),
            )?;
        }
    }
    let one = bf16::ONE.to_le_bytes();
    for id in FloatId::all(&config) {
        let values = match id {
            FloatId::Router(i) => gaussian(id.width(&config), options.seed, (i as u64) << 32 | 1 << 30),
            _ => one.repeat(id.width(&config)),
        };
        writer.write(&id.weight_name(), &values)?;
    }
    writer.finish()?;
    dir.write_file("config.json", text.as_bytes())?;
    dir.write_file("tokenizer.json", format!("{:#}\n", byte_tokenizer()).as_bytes())?;
    dir.write_file("tokenizer_config.json", b"{\n  \"bos_token\": \"<s>\",\n  \"eos_token\": \"</s>\"\n}\n")?;
    dir.write_manifest(
        json!({ "tool": format!("fracbit {} synth", env!("CARGO_PKG_VERSION")), "seed": options.seed }),
    )?;
    Ok(dir.commit()?)
}

/// `count` bf16 Gaussian weights; `first` numbers the first chunk.
fn gaussian(count: usize, seed: u64, first: u64) -> Vec<u8> {
    let chunks = count.div_ceil(CHUNK);
    (0..chunks)
        .into_par_iter()
        .flat_map_iter(|chunk| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(first + chunk as u64);
            let len = CHUNK.min(count - chunk * CHUNK);
            (0..len)
                .flat_map(move |_| bf16::from_f32(0.02 * rng.sample::<f32, _>(StandardNormal)).to_le_bytes())
        })
        .collect()
}

/// One token per byte, then `<s>` and `</s>`.
fn byte_tokenizer() -> Value {
    let mut vocab = Map::new();
    for (id, c) in byte_alphabet().into_iter().enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    let special = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    };
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(256, "<s>"), special(257, "</s>")],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                   "vocab": vocab, "merges": [] }
    })
}

/// The printable character that stands for each byte in byte-level tokenizers (GPT-2's table):
/// printable Latin-1 bytes stand for themselves, the others for the code points from 256 on.
fn byte_alphabet() -> Vec<char> {
    let mut next = 256;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        })
        .collect()
}
