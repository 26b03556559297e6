//! Checkpoints to GGUF files and back, and rounding to blocks.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

use std::path::{Path, PathBuf};

use fracbit_io::gguf::{ENCODED, GgufWriter, describe, encode, tensors};
use fracbit_io::{
    Architecture, BlockType, Checkpoint, Dtype, EncodeOptions, ModelConfig, RopeScaling, Tokenizer,
};

/// The reference models of the repository.
fn models() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    let mut list: Vec<_> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    list.sort();
    assert!(list.len() > 20);
    list
}

/// Writes a model with all tensors in single precision.
fn write(dir: &Path, out: &Path) -> Result<(ModelConfig, Checkpoint, Tokenizer), String> {
    let text = |e: fracbit_io::Error| e.to_string();
    let config = ModelConfig::from_dir(dir).map_err(text)?;
    let checkpoint = Checkpoint::open(dir).and_then(|c| c.parted(&config)).map_err(text)?;
    let tokenizer = Tokenizer::from_dir(dir, Some(&config)).map_err(text)?;
    let mut description = describe(&config, Some(&tokenizer), dir, "test").map_err(text)?;
    description.set_file_type(0);
    let list = tensors(&config);
    let small = description.factors.iter().map(|(name, f)| (name.clone(), Dtype::F32, vec![f.len()]));
    let listed: Vec<_> =
        small.chain(list.iter().map(|t| (t.name.clone(), Dtype::F32, t.shape.clone()))).collect();
    let mut writer = GgufWriter::create(out, false, &description, &listed).map_err(text)?;
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    for (name, factors) in &description.factors {
        writer.write(name, &bytes(factors)).map_err(text)?;
    }
    let names = checkpoint.embedding_names(&config).map_err(text)?;
    for t in &list {
        let mut numbers = Vec::new();
        for source in &t.sources {
            let tied = source == "model.embed_tokens.weight";
            numbers.extend(checkpoint.to_f32(if tied { names.embed } else { source }).map_err(text)?);
        }
        let cols = if t.shape.len() == 1 { 1 } else { t.shape[t.shape.len() - 1] };
        for row in 0..numbers.len() / cols {
            let row = &numbers[t.source_row(row) * cols..][..cols];
            let shifted: Vec<f32> = row.iter().map(|n| n + t.shift).collect();
            writer.write(&t.name, &bytes(&shifted)).map_err(text)?;
        }
    }
    writer.finish().map_err(text)?;
    Ok((config, checkpoint, tokenizer))
}

/// The parts of a text between its numbers, and the numbers.
fn taken_apart(text: &str) -> (Vec<&str>, Vec<f64>) {
    let pieces = text.split(|c: char| !(c.is_ascii_alphanumeric() || "._-+".contains(c)));
    let (numbers, words) = pieces.partition::<Vec<_>, _>(|p| p.parse::<f64>().is_ok());
    (words, numbers.iter().map(|n| n.parse().unwrap()).collect())
}

/// A copy of a Gemma whose scores are scaled as those of the published ones.
fn usual_scores(dir: &Path, copy: &Path) -> PathBuf {
    std::fs::create_dir(copy).unwrap();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let path = copy.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["query_pre_attn_scalar"] = config["head_dim"].clone();
    std::fs::write(path, config.to_string()).unwrap();
    copy.to_owned()
}

/// The stretching of `config` where the divisors that a file has in its place are its own: the
/// parameters of these models are those of no model that is known.
fn recognized(config: &ModelConfig, read: RopeScaling) -> RopeScaling {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
        config.rope.scaling
    else {
        return read;
    };
    let RopeScaling::LongRope { short, long, .. } = read else { return read };
    assert_eq!(short, long);
    for (plane, got) in long.iter().enumerate() {
        let turns = config.rope.theta.powf(plane as f64 / long.len() as f64) * 2.0 * std::f64::consts::PI;
        let smooth = (original_max_position_embeddings as f64 / turns - low_freq_factor)
            / (high_freq_factor - low_freq_factor);
        let smooth = smooth.clamp(0.0, 1.0);
        let want = 1.0 / ((1.0 - smooth) / factor + smooth);
        assert!((got / want - 1.0).abs() < 1e-6, "plane {plane}: {got} {want}");
    }
    config.rope.scaling.clone()
}

/// Equal but for the last digits of single precision.
fn same(what: &str, a: &impl std::fmt::Debug, b: &impl std::fmt::Debug) {
    let (a, b) = (format!("{a:?}"), format!("{b:?}"));
    let ((words, numbers), (other_words, others)) = (taken_apart(&a), taken_apart(&b));
    assert_eq!(words, other_words, "{what}");
    assert_eq!(numbers.len(), others.len(), "{what}");
    for (x, y) in numbers.iter().zip(&others) {
        assert!((x - y).abs() <= 1e-6 * x.abs().max(1e-12), "{what}: {x} {y} in {a} and {b}");
    }
}

#[test]
fn every_architecture_comes_back_as_it_went() {
    let tmp = tempfile::tempdir().unwrap();
    let mut refused = Vec::new();
    for dir in models() {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let out = tmp.path().join(format!("{name}.gguf"));
        let dir = if name.starts_with("gemma") { usual_scores(&dir, &tmp.path().join(&name)) } else { dir };
        let (config, checkpoint, tokenizer) = match write(&dir, &out) {
            Ok(written) => written,
            Err(e) => {
                assert!(!out.exists(), "{name}: nothing half-written");
                refused.push((name, e));
                continue;
            }
        };
        let back = ModelConfig::from_dir(&out).unwrap_or_else(|e| panic!("{name}: {e}"));
        let plain = |c: &ModelConfig| ModelConfig {
            raw: serde_json::Map::new(),
            quantization_config: None,
            // One of several that share a name there.
            arch: if c.arch == Architecture::Mistral { Architecture::Llama } else { c.arch },
            eos_token_ids: Vec::new(),
            ..c.clone()
        };
        let mut read_config = plain(&back);
        read_config.rope.scaling = recognized(&config, back.rope.scaling.clone());
        same(&name, &read_config, &plain(&config));
        assert_eq!(back.eos_token_ids.is_empty(), config.eos_token_ids.is_empty(), "{name}");
        let read =
            Checkpoint::open(&out).and_then(|c| c.parted(&back)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let names = checkpoint.embedding_names(&config).unwrap();
        for tensor in read.names() {
            let source = if tensor == "model.embed_tokens.weight" { names.embed } else { tensor };
            let (got, want) = (read.to_f32(tensor).unwrap(), checkpoint.to_f32(source).unwrap());
            let near =
                |(g, w): (&f32, &f32)| (g - w).abs() <= if config.gain_offset == 0.0 { 0.0 } else { 1e-6 };
            assert!(got.len() == want.len() && got.iter().zip(&want).all(near), "{name}: {tensor}");
        }
        let again = Tokenizer::from_dir(&out, Some(&back)).unwrap_or_else(|e| panic!("{name}: {e}"));
        for text in ["Once upon a time", " the  cat\n\nsat", "a", "12 ab3", "<s>x</s>"] {
            let [x, y] = [&tokenizer, &again].map(|t| t.encode(text, EncodeOptions::default()).unwrap());
            assert_eq!(x, y, "{name}: {text:?}");
        }
        assert_eq!(tokenizer.chat_template_source(), again.chat_template_source(), "{name}");
    }
    // What llama.cpp's architecture of the name has no place for.
    let expected =
        |(name, e): &&(String, String)| REFUSED.iter().any(|(n, word)| n == name && e.contains(word));
    let other: Vec<_> = refused.iter().filter(|r| !expected(r)).collect();
    assert!(other.is_empty() && refused.len() == REFUSED.len(), "{refused:#?}");
}

const REFUSED: &[(&str, &str)] = &[("mistral", "`sliding_window`")];

#[test]
fn tokens_beyond_the_embedding_are_left_out_and_said() {
    let dir = models().into_iter().find(|dir| dir.ends_with("llama3")).expect("a reference");
    let config = ModelConfig::from_dir(&dir).unwrap();
    let rows = config.vocab_size;
    let path = dir.join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let token = serde_json::json!({
        "id": rows, "content": "<image>", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
    });
    json["added_tokens"].as_array_mut().unwrap().push(token);
    let parse = |json: &serde_json::Value| Tokenizer::parse(json.to_string().as_bytes(), &path);
    let tokenizer = parse(&json).unwrap();
    assert_eq!(tokenizer.token_id("<image>").map(|id| id as usize), Some(rows));
    let described = describe(&config, Some(&tokenizer), &dir, "test").unwrap();
    assert_eq!(described.left_out, ["<image>"]);
    // Of the vocabulary itself none may be: merges could make it.
    json["model"]["vocab"]["beyond"] = serde_json::json!(rows);
    let error = parse(&json).and_then(|t| describe(&config, Some(&t), &dir, "test"));
    assert!(error.unwrap_err().to_string().contains("`beyond`"));
}

fn gaussian(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / 16_777_216.0
    };
    (0..n).map(|_| (-2.0 * uniform().ln()).sqrt() * (2.0 * std::f32::consts::PI * uniform()).cos()).collect()
}

fn decoded(block: BlockType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / block.block_bytes() * block.block_len()];
    block.dequantize(bytes, &mut out);
    out
}

fn error(x: &[f32], y: &[f32], weight: impl Fn(usize) -> f32) -> f32 {
    x.iter().zip(y).enumerate().map(|(i, (x, y))| weight(i) * (x - y).powi(2)).sum()
}

#[test]
fn rounding_loses_no_more_than_it_should() {
    // The share of the power of Gaussian numbers that is lost, and a little.
    let limits = [0.0085, 0.0021, 0.00004, 0.0065, 0.0005];
    for (block, limit) in ENCODED.into_iter().zip(limits) {
        for scale in [1.0, 0.02] {
            let x: Vec<f32> = gaussian(4096, 7).iter().map(|x| x * scale).collect();
            let mut bytes = Vec::new();
            encode(block, &x, None, &mut bytes);
            let lost = error(&x, &decoded(block, &bytes), |_| 1.0) / error(&x, &[0.0; 4096], |_| 1.0);
            assert!(lost < limit && lost > 0.3 * limit, "{}, {scale}: {lost}", block.name());
        }
    }
}

#[test]
fn what_matters_is_rounded_better() {
    for block in ENCODED.into_iter().filter(|b| *b != BlockType::Q8_0) {
        let x = gaussian(4096, 11);
        let moments: Vec<f32> = (0..4096).map(|i| if i % 8 == 0 { 100.0 } else { 0.1 }).collect();
        let lost = |importance: Option<&[f32]>| {
            let mut bytes = Vec::new();
            encode(block, &x, importance, &mut bytes);
            error(&x, &decoded(block, &bytes), |i| moments[i])
        };
        let (with, without) = (lost(Some(&moments)), lost(None));
        assert!(with < 0.97 * without, "{}: {with} {without}", block.name());
        // Moments that are 0, of channels that are dead, are no reason to fail.
        let mut bytes = Vec::new();
        encode(block, &x, Some(&vec![0.0; 4096]), &mut bytes);
        assert!(error(&x, &decoded(block, &bytes), |_| 1.0) < 60.0, "{}", block.name());
    }
}

#[test]
fn eight_bits_are_those_of_the_python_package() {
    let golden = include_bytes!("golden/q8_0.bin");
    let (numbers, want) = golden.split_at(4 * 256);
    let x: Vec<f32> = numbers.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let mut got = Vec::new();
    encode(BlockType::Q8_0, &x, None, &mut got);
    assert_eq!(got, want);
}

#[test]
fn numbers_of_a_grid_stay_as_they_are() {
    for block in ENCODED {
        let x = gaussian(4096, 3);
        let mut bytes = Vec::new();
        encode(block, &x, None, &mut bytes);
        let once = decoded(block, &bytes);
        let mut again = Vec::new();
        encode(block, &once, None, &mut again);
        let lost = error(&once, &decoded(block, &again), |_| 1.0) / error(&once, &[0.0; 4096], |_| 1.0);
        assert!(lost < 1e-4, "{}: {lost}", block.name());
    }
}

#[test]
fn no_numbers_break_the_rounding() {
    let tiny = f32::from_bits(1);
    for block in ENCODED {
        for x in [
            vec![0.0; 256],
            vec![1.0; 256],
            vec![-1.0; 256],
            vec![tiny; 256],
            vec![1e-30; 256],
            vec![65504.0; 256],
            (0..256).map(|i| if i == 9 { -3.0 } else { 0.0 }).collect(),
            (0..256).map(|i| if i % 2 == 0 { tiny } else { 60000.0 }).collect(),
        ] {
            for moments in [None, Some(vec![0.0; 256]), Some(vec![f32::MAX; 256]), Some(vec![tiny; 256])] {
                let mut bytes = Vec::new();
                encode(block, &x, moments.as_deref(), &mut bytes);
                let y = decoded(block, &bytes);
                assert_eq!(bytes.len(), 256 / block.block_len() * block.block_bytes());
                let most = x.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                for (x, y) in x.iter().zip(&y) {
                    let near = (x - y).abs() <= 0.3 * most || most < 1e-6;
                    assert!(y.is_finite() && near, "{}: {x} became {y} ({moments:?})", block.name());
                }
            }
        }
    }
}

#[test]
fn a_file_is_written_whole_or_not_at_all() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("m.gguf");
    let description = Default::default();
    let listed = [("a".to_owned(), Dtype::F32, vec![2]), ("b".to_owned(), Dtype::F16, vec![1, 3])];
    let create = || GgufWriter::create(&out, false, &description, &listed);
    let mut writer = create().unwrap();
    assert!(writer.write("b", &[0; 6]).unwrap_err().to_string().contains("should follow `a`"));
    assert!(writer.write("a", &[0; 12]).unwrap_err().to_string().contains("0 of 8 bytes"));
    writer.write("a", &[0; 8]).unwrap();
    let e = writer.finish().unwrap_err().to_string();
    assert!(e.contains("`b`") && !out.exists(), "{e}");
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0, "nothing is left beside it");
    std::fs::write(&out, b"x").unwrap();
    assert!(create().unwrap_err().to_string().contains("exists already"));
    let refused = |dtype, shape| {
        GgufWriter::create(&tmp.path().join("n"), false, &description, &[("a".to_owned(), dtype, shape)])
    };
    assert!(
        refused(Dtype::U8, vec![1]).unwrap_err().to_string().contains("type should be one that is written")
    );
    let q4 = Dtype::Blocks(BlockType::Q4_0);
    assert!(refused(q4, vec![2, 33]).unwrap_err().to_string().contains("whole blocks"));
}
