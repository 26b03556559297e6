//! GGUF files: every block type, what the converter changed, vocabularies, and files made to hurt.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

mod common;
mod gguf_file;

use std::fs;
use std::path::Path;

use fracbit_io::{
    BlockType, Checkpoint, Dtype, EncodeOptions, Gguf, ModelConfig, QkNorm, RopeScaling, Tokenizer,
};
use gguf_file::{Raw, bytes_of, llama, number, text, texts};
use half::bf16;

#[test]
fn every_block_type_is_what_the_python_package_makes_of_it() {
    let golden = include_bytes!("golden/blocks.bin");
    let mut rest = golden.as_slice();
    let mut seen = Vec::new();
    let u32_at = |b: &[u8]| u32::from_le_bytes(b[..4].try_into().unwrap());
    while !rest.is_empty() {
        let (id, n) = (u32_at(rest), u32_at(&rest[4..]) as usize);
        let block = BlockType::ALL.into_iter().find(|b| b.id() == id).unwrap();
        let (blocks, behind) = rest[8..].split_at(n * block.block_bytes());
        let (numbers, behind) = behind.split_at(4 * n * block.block_len());
        let want: Vec<f32> = numbers.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        let mut got = vec![f32::NAN; want.len()];
        block.dequantize(blocks, &mut got);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{} number {i}: {got} {want}", block.name());
        }
        rest = behind;
        seen.push(block);
    }
    seen.sort();
    let mut all = BlockType::ALL;
    all.sort();
    assert_eq!(seen, all, "every type has a golden vector");
}

/// `FRACBIT_GGUF_PAIRS=MODEL.gguf=DIR,...`: GGUF files and what the Python package makes of them,
/// in bf16.
#[test]
fn real_models_are_what_the_python_package_makes_of_them() {
    #[expect(clippy::disallowed_methods, reason = "names files of a check that most machines cannot do")]
    let Ok(pairs) = std::env::var("FRACBIT_GGUF_PAIRS") else {
        skipped();
        return;
    };
    for (file, dir) in pairs.split(',').filter_map(|pair| pair.split_once('=')) {
        let (file, dir) = (Path::new(file), Path::new(dir));
        let (a, b) = (ModelConfig::from_dir(file).unwrap(), ModelConfig::from_dir(dir).unwrap());
        let (ours, theirs) = (Checkpoint::open(file).unwrap(), Checkpoint::open(dir).unwrap());
        assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
        for name in theirs.names() {
            let (got, want) = (ours.to_f32(name).unwrap(), theirs.to_f32(name).unwrap());
            assert_eq!(got.len(), want.len(), "{name}");
            let differ = got.iter().zip(&want).position(|(g, w)| bf16::from_f32(*g).to_f32() != *w);
            assert_eq!(differ, None, "{name}: {:?} {:?}", differ.map(|i| got[i]), differ.map(|i| want[i]));
        }
        let (x, y) =
            (Tokenizer::from_dir(file, Some(&a)).unwrap(), Tokenizer::from_dir(dir, Some(&b)).unwrap());
        for text in TEXTS {
            let [got, want] = [&x, &y].map(|t| t.encode(text, EncodeOptions::default()).unwrap());
            assert_eq!(got, want, "{text:?}");
            assert_eq!(x.decode(&got, false).unwrap(), y.decode(&want, false).unwrap(), "{text:?}");
        }
        assert_eq!((x.bos_id(), x.vocab_size()), (y.bos_id(), y.vocab_size()));
        assert_eq!(
            ModelConfig {
                raw: b.raw.clone(),
                eos_token_ids: b.eos_token_ids.clone(),
                // Python has 1e-5 in single precision; the file has no more.
                rms_norm_eps: b.rms_norm_eps,
                inner_norm_eps: b.inner_norm_eps,
                ..a
            },
            b,
            "{}",
            file.display()
        );
    }
}

#[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
fn skipped() {
    eprintln!("SKIPPED: FRACBIT_GGUF_PAIRS names no models");
}

const TEXTS: [&str; 16] = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\n\n\nlines\r\n\ttabs",
    "3.14159 and 1234567890",
    "don't we'll I'M THEY'RE",
    "naïve café Übergröße",
    "日本語のテキスト、中文和한국어",
    "emoji 🙂👩‍👩‍👧 and \u{200b}zero width",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "fn main() { println!(\"{}\", x ^ y); }",
    "\u{0}\u{1}\u{7f}",
    "▁ a ▁▁b",
    "ﬁ ½ ² Ⅷ ٣ १",
    "a\u{301} e\u{308}",
];

fn opened(raw: &Raw) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = raw.write(&dir.path().join("m.gguf"));
    // On Linux a mapping outlives its file's name.
    Checkpoint::open(&path).map_err(|e| e.to_string())
}

fn config(raw: &Raw) -> Result<ModelConfig, String> {
    let dir = tempfile::tempdir().unwrap();
    ModelConfig::from_dir(raw.write(&dir.path().join("m.gguf"))).map_err(|e| e.to_string())
}

fn tokenizer(raw: &Raw) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    Tokenizer::from_dir(raw.write(&dir.path().join("m.gguf")), None).map_err(|e| e.to_string())
}

#[test]
fn a_llama_becomes_the_checkpoint_it_was() {
    for version in [2, 3] {
        let mut raw = llama();
        raw.version = version;
        let c = config(&raw).unwrap();
        assert_eq!((c.hidden_size, c.intermediate_size, c.num_hidden_layers()), (8, 12, 2));
        assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size), (2, 1, 4, 10));
        assert_eq!((c.rms_norm_eps, c.rope.theta, c.max_position_embeddings), (1e-5, 1e4, 64));
        assert!(c.tie_word_embeddings && !c.qkv_bias && c.qk_norm == QkNorm::Absent);
        let checkpoint = opened(&raw).unwrap().parted(&c).unwrap();
        assert_eq!(checkpoint.names().len(), 2 + 2 * 9);
        let stored = |name: &str| {
            let t = raw.tensors.iter().find(|t| t.name == name).unwrap();
            t.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
        };
        assert_eq!(
            checkpoint.to_f32("model.layers.1.mlp.down_proj.weight").unwrap(),
            stored("blk.1.ffn_down.weight")
        );
        // The converter put rows k and 2 + k of each head side by side.
        for (name, own, rows) in [("q_proj", "attn_q", 8), ("k_proj", "attn_k", 4)] {
            let want = stored(&format!("blk.0.{own}.weight"));
            let name = format!("model.layers.0.self_attn.{name}.weight");
            let got = checkpoint.to_f32(&name).unwrap();
            for row in 0..rows {
                let at = row / 4 * 4 + [0, 2, 1, 3][row % 4];
                assert_eq!(got[row * 8..][..8], want[at * 8..][..8], "{name}, row {row}");
                let mut part = [0.0; 3];
                checkpoint.tensor(&name).unwrap().row_into(row, 2..5, &mut part);
                assert_eq!(part, want[at * 8 + 2..at * 8 + 5]);
            }
        }
    }
}

#[test]
fn parts_of_rows_may_cut_blocks() {
    for (block, cols) in [(BlockType::Q4_0, 96), (BlockType::Q6_K, 512)] {
        let numbers = gguf_file::counted(3 * cols, 5);
        let mut data = Vec::new();
        fracbit_io::gguf::encode(block, &numbers, None, &mut data);
        let mut raw = llama();
        raw.tensors[0].kind = block.id();
        raw.tensors[0].dims = vec![cols as u64, 3];
        raw.tensors[0].data = data;
        let checkpoint = opened(&raw).unwrap();
        let info = checkpoint.info("model.embed_tokens.weight").unwrap();
        assert_eq!((info.dtype, info.elements()), (Dtype::Blocks(block), 3 * cols));
        let all = checkpoint.to_f32("model.embed_tokens.weight").unwrap();
        let view = checkpoint.tensor("model.embed_tokens.weight").unwrap();
        for row in 0..3 {
            assert_eq!(view.row_bytes(row).unwrap().len(), cols / block.block_len() * block.block_bytes());
            for (start, end) in [(0, cols), (5, 40), (31, 33), (32, 64), (cols - 1, cols), (7, 7)] {
                let mut part = vec![0.0; end - start];
                view.row_into(row, start..end, &mut part);
                assert_eq!(part, all[row * cols + start..row * cols + end], "{start}..{end}");
            }
        }
    }
}

#[test]
fn biases_of_moved_rows_move_along() {
    let mut raw = llama();
    for i in 0..2 {
        for (name, rows) in [("attn_q", 8), ("attn_k", 4), ("attn_v", 4), ("attn_output", 8)] {
            let numbers: Vec<f32> = (0..rows).map(|n| n as f32).collect();
            raw.f32s(&format!("blk.{i}.{name}.bias"), &[rows], &numbers);
        }
    }
    let c = config(&raw).unwrap();
    assert!(c.qkv_bias && c.o_bias);
    let checkpoint = opened(&raw).unwrap();
    let bias = |name: &str| checkpoint.to_f32(&format!("model.layers.1.self_attn.{name}.bias")).unwrap();
    assert_eq!(bias("q_proj"), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    assert_eq!(bias("k_proj"), [0.0, 2.0, 1.0, 3.0]);
    assert_eq!(bias("v_proj"), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn experts_come_apart_and_gains_lose_their_one() {
    let mut raw = llama();
    raw.set("llama.expert_count", number(3)).set("llama.expert_used_count", number(2));
    raw.set("llama.embedding_length", number(16)).set("llama.feed_forward_length", number(16));
    raw.tensors.clear();
    raw.f32s("token_embd.weight", &[10, 16], &gguf_file::counted(160, 1));
    raw.f32s("output_norm.weight", &[16], &gguf_file::counted(16, 2));
    for i in 0..2 {
        for (name, shape) in [
            ("attn_norm", &[16][..]),
            ("ffn_norm", &[16]),
            ("attn_q", &[16, 16]),
            ("attn_k", &[8, 16]),
            ("attn_v", &[8, 16]),
            ("attn_output", &[16, 16]),
            ("ffn_gate_inp", &[3, 16]),
            ("ffn_gate_exps", &[3, 16, 16]),
            ("ffn_up_exps", &[3, 16, 16]),
            ("ffn_down_exps", &[3, 16, 16]),
        ] {
            let n = shape.iter().product();
            raw.f32s(&format!("blk.{i}.{name}.weight"), shape, &gguf_file::counted(n, i));
        }
    }
    let c = config(&raw).unwrap();
    assert_eq!(c.arch, fracbit_io::Architecture::Mixtral);
    let checkpoint = opened(&raw).unwrap().parted(&c).unwrap();
    let all = gguf_file::counted(768, 1);
    for e in 0..3 {
        let name = format!("model.layers.1.mlp.experts.{e}.up_proj.weight");
        assert_eq!(checkpoint.info(&name).unwrap().shape, [16, 16]);
        assert_eq!(checkpoint.to_f32(&name).unwrap(), all[e * 256..][..256]);
    }

    let mut raw = llama();
    for (key, kind, value) in raw.metadata.clone() {
        if let Some(own) = key.strip_prefix("llama.") {
            raw.remove(&key).set(&format!("gemma2.{own}"), (kind, value));
        }
    }
    raw.set("general.architecture", text("gemma2"));
    for i in 0..2 {
        for name in ["post_attention_norm", "post_ffw_norm"] {
            raw.f32s(&format!("blk.{i}.{name}.weight"), &[8], &[1.5; 8]);
        }
    }
    let checkpoint = opened(&raw).unwrap();
    let gain = checkpoint.to_f32("model.layers.0.post_feedforward_layernorm.weight").unwrap();
    assert_eq!(gain, [0.5; 8], "stored with 1 added");
    // The query rows of Gemma were not moved.
    let q = raw.tensors.iter().find(|t| t.name == "blk.0.attn_q.weight").unwrap();
    assert_eq!(
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").unwrap().row_bytes(1),
        Some(&q.data[32..64])
    );
}

#[test]
fn stretched_frequencies_are_recognized() {
    let mut raw = llama();
    raw.set("llama.rope.freq_base", gguf_file::float(500_000.0));
    raw.set("llama.attention.key_length", number(64)).set("llama.context_length", number(131_072));
    // Llama 3.1's: factor 8, 1 and 4, of 8192 positions.
    let divisor = |plane: i32| {
        let wavelength = 2.0 * std::f64::consts::PI * 500_000f64.powf(f64::from(plane) / 32.0);
        let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
    };
    let mut factors: Vec<f32> = (0..32).map(divisor).collect();
    raw.f32s("rope_freqs.weight", &[32], &factors);
    let scaling = config(&raw).unwrap().rope.scaling;
    let want = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(scaling, want);
    assert!(!opened(&raw).unwrap().names().any(|name| name.contains("rope")), "the tensor is no weight");
    // Of no model that is known.
    factors[3] = 1.5;
    raw.f32s("rope_freqs.weight", &[32], &factors);
    let RopeScaling::LongRope { short, long, .. } = config(&raw).unwrap().rope.scaling else { panic!() };
    let decimal = |f: &f32| f.to_string().parse::<f64>().unwrap();
    assert_eq!(short, long);
    assert_eq!(long, factors.iter().map(decimal).collect::<Vec<_>>());
    raw.f32s("rope_freqs.weight", &[3], &[1.0; 3]);
    assert!(config(&raw).unwrap_err().contains("`rope_freqs.weight`: should be 32 floats, got [3] of F32"));
}

#[test]
fn parts_of_a_split_model_are_one() {
    let whole = llama();
    let dir = tempfile::tempdir().unwrap();
    let name = |i: usize, of: usize| dir.path().join(format!("m-{:05}-of-{of:05}.gguf", i + 1));
    let short = |n: u16| (2, n.to_le_bytes().to_vec());
    let write = |change: &dyn Fn(usize, &mut Raw)| {
        for (i, range) in [0..5, 5..12, 12..whole.tensors.len()].into_iter().enumerate() {
            let mut part = Raw { tensors: whole.tensors[range].to_vec(), ..whole.clone() };
            if i > 0 {
                part.metadata.clear();
            }
            part.set("split.no", short(i as u16)).set("split.count", short(3));
            part.set("split.tensors.count", (5, (whole.tensors.len() as i32).to_le_bytes().to_vec()));
            change(i, &mut part);
            part.write(&name(i, 3));
        }
    };
    write(&|_, _| {});
    let want = opened(&whole).unwrap();
    for i in 0..3 {
        let got = Checkpoint::open(name(i, 3)).unwrap();
        assert_eq!(got.names().collect::<Vec<_>>(), want.names().collect::<Vec<_>>(), "any part opens all");
        for name in want.names() {
            assert_eq!(got.to_f32(name).unwrap(), want.to_f32(name).unwrap());
        }
        assert_eq!(got.shards().len(), 3);
    }
    type Change = fn(usize, &mut Raw);
    let bad: [(Change, &str, &str); 6] = [
        (
            |i, p| _ = p.set("split.no", (2, u16::to_le_bytes([0, 0, 2][i]).to_vec())),
            "m-00002-of-00003.gguf",
            "`split.no` should be 1, got 0",
        ),
        (
            |i, p| _ = (i == 1).then(|| p.set("split.count", (2, vec![4, 0])).version),
            "m-00002-of-00003.gguf",
            "`split.count` should be 3, got 4",
        ),
        (
            |i, p| _ = (i == 2).then(|| p.remove("split.no").version),
            "m-00003-of-00003.gguf",
            "`split.no` should be 2, got nothing",
        ),
        (
            |i, p| _ = (i == 0).then(|| p.set("split.count", (2, vec![255, 255])).version),
            "m-00001-of-00003.gguf",
            "at most 999",
        ),
        (
            |i, p| _ = (i == 0).then(|| p.set("split.tensors.count", (5, vec![9, 0, 0, 0])).version),
            "m-00001",
            "what the parts hold, 20, got 9",
        ),
        (
            |i, p| {
                if i == 2 {
                    p.tensors[0].name = "token_embd.weight".to_owned()
                }
            },
            "m-00003",
            "stored once",
        ),
    ];
    for (change, file, rule) in bad {
        write(&change);
        let e = Checkpoint::open(name(0, 3)).unwrap_err().to_string();
        assert!(e.contains(file) && e.contains(rule), "{e}");
    }
    write(&|_, _| {});
    fs::rename(name(0, 3), dir.path().join("other.gguf")).unwrap();
    let e = Checkpoint::open(dir.path().join("other.gguf")).unwrap_err().to_string();
    assert!(e.contains("should end in `-00001-of-00003.gguf`"), "{e}");
    let e = Checkpoint::open(name(1, 3)).unwrap_err().to_string();
    assert!(e.contains("m-00001-of-00003.gguf"), "the missing part is named: {e}");
}

/// A change to a good file, and words of the error.
type Hostile = (&'static str, fn(&mut Raw), &'static [&'static str]);

const HOSTILE: &[Hostile] = &[
    ("version 1", |r| r.version = 1, &["2 or 3, got 1", "convert"]),
    ("version 4", |r| r.version = 4, &["2 or 3, got 4"]),
    ("big-endian", |r| r.version = 3u32.swap_bytes(), &["big-endian"]),
    (
        "another architecture",
        |r| _ = r.set("general.architecture", text("mamba")),
        &["general.architecture", "llama, ", "glm4", "got `mamba`"],
    ),
    ("no architecture", |r| _ = r.remove("general.architecture"), &["general.architecture", "is missing"]),
    (
        "architecture as a number",
        |r| _ = r.set("general.architecture", number(1)),
        &["should be a string, got 1"],
    ),
    (
        "a key twice",
        |r| r.metadata.push(r.metadata[0].clone()),
        &["unique", "`general.architecture` occurs twice"],
    ),
    ("an empty key", |r| _ = r.set("", number(1)), &["1 to 65535 bytes of UTF-8"]),
    ("an unknown value type", |r| _ = r.set("x", (13, vec![0; 8])), &["`x`", "up to 12, got 13"]),
    ("a bool of 2", |r| _ = r.set("x", (7, vec![2])), &["`x`", "0 or 1 (a bool), got 2"]),
    (
        "a string beyond the file",
        |r| _ = r.set("x", (8, u64::MAX.to_le_bytes().to_vec())),
        &["a string needs 18446744073709551615 bytes"],
    ),
    (
        "an array beyond the file",
        |r| _ = r.set("x", (9, [&4u32.to_le_bytes()[..], &(1u64 << 60).to_le_bytes()].concat())),
        &["elements of an array", "got 1152921504606846976"],
    ),
    (
        "a long array of strings",
        |r| _ = r.set("x", (9, [&8u32.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat())),
        &["strings of an array", "got 1099511627776"],
    ),
    (
        "arrays in arrays without end",
        |r| {
            let level = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
            r.set("x", (9, level.repeat(1000)));
        },
        &["`x`", "at most 4 deep"],
    ),
    (
        "an alignment of 0",
        |r| _ = r.set("general.alignment", number(0)),
        &["general.alignment", "a power of two"],
    ),
    (
        "an alignment of 24",
        |r| _ = r.set("general.alignment", number(24)),
        &["general.alignment", "a power of two"],
    ),
    (
        "a huge alignment",
        |r| _ = r.set("general.alignment", number(1 << 31)),
        &["general.alignment", "up to 2^20"],
    ),
    (
        "another alignment than the data have",
        |r| _ = r.set("general.alignment", number(64)),
        &["offset should be"],
    ),
    (
        "a tensor twice",
        |r| r.tensors.push(r.tensors[0].clone()),
        &["unique", "`token_embd.weight` occurs twice"],
    ),
    ("no dimensions", |r| r.tensors[0].dims.clear(), &["`token_embd.weight`", "1 to 4 dimensions, got 0"]),
    ("five dimensions", |r| r.tensors[0].dims = vec![1; 5], &["1 to 4 dimensions, got 5"]),
    ("a dimension of 0", |r| r.tensors[0].dims[1] = 0, &["at least 1"]),
    ("dimensions that overflow", |r| r.tensors[0].dims = vec![1 << 40, 1 << 40], &["fewer than 2^60"]),
    (
        "a tensor beyond the file",
        |r| r.tensors.last_mut().unwrap().dims[1] = 1 << 30,
        &["should lie in the file"],
    ),
    ("an unknown type", |r| r.tensors[0].kind = 77, &["`token_embd.weight`", "Q4_K", "got number 77"]),
    ("a type of activations", |r| r.tensors[0].kind = 9, &["got number 9", "activations"]),
    ("a removed type", |r| r.tensors[0].kind = 31, &["got number 31", "removed"]),
    (
        "rows of part of a block",
        |r| r.tensors[0].kind = 2,
        &["rows of Q4_0 should be whole blocks of 32, got 8"],
    ),
    (
        "an offset between",
        |r| r.tensors[1].offset = Some(8),
        &["`output_norm.weight`", "offset should be 320", "got 8"],
    ),
    ("an offset beyond", |r| r.tensors[1].offset = Some(u64::MAX), &["offset should be 320"]),
    (
        "an unknown tensor",
        |r| _ = r.f32s("blk.0.attn_sinks.weight", &[2], &[0.0; 2]),
        &["`blk.0.attn_sinks.weight`", "architecture `llama`"],
    ),
    (
        "a layer by another spelling",
        |r| r.tensors[2].name = "blk.00.attn_norm.weight".to_owned(),
        &["`blk.00.attn_norm.weight`"],
    ),
    ("no embedding", |r| _ = r.tensors.remove(0), &["`token_embd.weight` should exist"]),
    ("no width", |r| _ = r.remove("llama.embedding_length"), &["`llama.embedding_length`", "is missing"]),
    (
        "heads that do not divide",
        |r| _ = r.set("llama.attention.head_count", number(3)),
        &["`llama.attention.head_count`", "divide"],
    ),
    ("no heads", |r| _ = r.set("llama.attention.head_count", number(0)), &["head_count"]),
    (
        "widths for each layer that differ",
        |r| _ = r.set("llama.feed_forward_length", gguf_file::numbers(&[12, 13])),
        &["`llama.feed_forward_length`", "same whole number"],
    ),
    (
        "values of another width",
        |r| _ = r.set("llama.attention.value_length", number(8)),
        &["value_length", "should be 4"],
    ),
    (
        "rotation of a part",
        |r| _ = r.set("llama.rope.dimension_count", number(2)),
        &["dimension_count", "should be 4"],
    ),
    (
        "an unknown stretching",
        |r| _ = r.set("llama.rope.scaling.type", text("dynamic")),
        &["rope.scaling.type", "got `dynamic`"],
    ),
    (
        "experts of dense models",
        |r| _ = r.set("general.architecture", text("qwen3")).set("qwen3.expert_count", number(4)),
        &["qwen3.expert_count", "without experts"],
    ),
];

#[test]
fn hostile_files_are_refused_by_the_rule() {
    for (what, change, words) in HOSTILE {
        let mut raw = llama();
        change(&mut raw);
        let e = opened(&raw).expect_err(what);
        assert!(e.contains("m.gguf"), "{what}: the file is named: {e}");
        words.iter().for_each(|word| assert!(e.contains(word), "{what}: `{word}` in {e}"));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for (bytes, word) in [
        (&b""[..], "should begin with `GGUF`"),
        (b"GGU", "should begin with `GGUF`"),
        (b"GGUF", "the version needs 4 bytes at 4, the file has 4"),
        (
            b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\0\0",
            "number of tensors should be at most 0",
        ),
        (
            b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
            "number of metadata entries should be at most 0",
        ),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ] {
        fs::write(&path, bytes).unwrap();
        let e = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(e.contains(word), "{e}");
    }
    let mut bytes = llama().bytes();
    bytes.resize(bytes.len().next_multiple_of(32) + 1, 0);
    fs::write(&path, &bytes).unwrap();
    let e = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(e.contains("should end with the last tensor"), "{e}");
}

/// The page of formats lists the architectures that are refused nowhere.
#[test]
fn the_page_of_formats_lists_all_architectures() {
    let mut raw = llama();
    raw.set("general.architecture", text("mamba"));
    let e = opened(&raw).unwrap_err();
    let (known, _) = e.split_once(", got").unwrap();
    let (_, known) = known.split_once("one of ").unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats.md");
    let page = fs::read_to_string(page).unwrap();
    let row = page.lines().find(|line| line.starts_with("| `general.architecture`")).unwrap();
    let listed: Vec<&str> = row.split('`').skip(3).step_by(2).collect();
    assert_eq!(listed, known.split(", ").collect::<Vec<_>>());
}

#[test]
fn no_cut_and_no_flipped_byte_hurts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut raw = with_pieces();
    raw.set("x", gguf_file::array(9, &[texts(&["a", ""]).1, gguf_file::numbers(&[1, 2]).1]));
    let good = raw.bytes();
    let header = good.len() - raw.tensors.iter().map(|t| t.data.len().next_multiple_of(32)).sum::<usize>();
    let touch = |path: &Path| {
        let config = ModelConfig::from_dir(path);
        drop(Tokenizer::from_dir(path, config.as_ref().ok()));
        Checkpoint::open(path).and_then(|c| {
            let names: Vec<String> = c.names().map(str::to_owned).collect();
            names.iter().try_for_each(|n| c.to_f32(n).map(drop))
        })
    };
    fs::write(&path, &good).unwrap();
    touch(&path).unwrap();
    for len in (0..header).step_by(7).chain([good.len() - 1, good.len() - 40]) {
        fs::write(&path, &good[..len]).unwrap();
        let read = touch(&path);
        // The last bytes are padding.
        assert!(read.is_err() || len + 32 > good.len(), "{len} of {} bytes", good.len());
    }
    // Every kind of byte: all of the list of tensors and of the first entries, a share of the
    // vocabulary.
    let places = (0..400).chain((400..header - 900).step_by(17)).chain(header - 900..header);
    for (i, at) in places.enumerate() {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (i % 8);
        fs::write(&path, &bytes).unwrap();
        drop(touch(&path));
    }
}

/// SentencePiece's way: `▁` begins words, bytes where there is no piece.
fn with_pieces() -> Raw {
    let mut raw = llama();
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut kinds = vec![2, 3, 3];
    tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([6; 256]);
    let words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁h", "lo", "<|user|>"];
    tokens.extend(words.map(str::to_owned));
    kinds.extend([1; 12]);
    kinds.push(4);
    let scores: Vec<f32> = (0..tokens.len()).map(|i| -(i as f32)).collect();
    raw.set("tokenizer.ggml.model", text("llama"));
    raw.set("tokenizer.ggml.tokens", texts(&tokens.iter().map(String::as_str).collect::<Vec<_>>()));
    raw.set("tokenizer.ggml.token_type", gguf_file::numbers(&kinds));
    raw.set("tokenizer.ggml.scores", gguf_file::floats(&scores));
    raw.set("tokenizer.ggml.unknown_token_id", number(0));
    raw.set("tokenizer.ggml.bos_token_id", number(1)).set("tokenizer.ggml.eos_token_id", number(2));
    let width = tokens.len();
    raw.f32s("token_embd.weight", &[width, 8], &gguf_file::counted(width * 8, 1));
    raw.set(
        "tokenizer.chat_template",
        text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
    );
    raw
}

fn tokens_of(t: &Tokenizer, text: &str) -> Vec<String> {
    let ids = t.encode(text, EncodeOptions::default()).unwrap();
    ids.iter().map(|&id| t.token(id).unwrap()).collect()
}

#[test]
fn vocabularies_of_pieces_cut_as_sentencepiece_does() {
    let mut raw = with_pieces();
    let t = tokenizer(&raw).unwrap();
    // By score: `he` before `ll`, `hell` before `lo`.
    assert_eq!(tokens_of(&t, "hello"), ["<s>", "▁hello"]);
    assert_eq!(tokens_of(&t, "hellhe lo"), ["<s>", "▁", "hell", "he", "▁", "lo"]);
    assert_eq!(tokens_of(&t, "é<|user|>h"), ["<s>", "▁", "<0xC3>", "<0xA9>", "<|user|>", "▁h"]);
    assert_eq!(t.decode(&t.encode("hello é", EncodeOptions::default()).unwrap(), true).unwrap(), "hello é");
    assert_eq!((t.bos_id(), t.eos_token(), t.vocab_size()), (Some(1), Some("</s>"), 272));
    assert!(t.chat_template().unwrap().is_some());
    raw.set("tokenizer.ggml.add_space_prefix", (7, vec![0]))
        .set("tokenizer.ggml.add_bos_token", (7, vec![0]));
    raw.set("tokenizer.ggml.add_eos_token", (7, vec![1]));
    assert_eq!(tokens_of(&tokenizer(&raw).unwrap(), "hello"), ["hello", "</s>"]);
}

#[test]
fn vocabularies_of_bytes_cut_as_the_models_do() {
    let mut raw = llama();
    let tokens = ["a", "b", "1", "2", "Ġ", "ab", "Ġab", "12", "<|im_end|>", "Ċ", "'", "S", "'S", "aĠ"];
    raw.set("tokenizer.ggml.model", text("gpt2")).set("tokenizer.ggml.tokens", texts(&tokens));
    raw.set("tokenizer.ggml.token_type", gguf_file::numbers(&[1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1]));
    raw.set("tokenizer.ggml.merges", texts(&["a b", "Ġ ab", "1 2", "' S"]));
    raw.set("tokenizer.ggml.eos_token_id", number(8));
    raw.f32s("token_embd.weight", &[14, 8], &gguf_file::counted(112, 1));
    let cut = |raw: &Raw, text: &str| tokens_of(&tokenizer(raw).unwrap(), text);
    // Digits one by one, up to three together, or as many as there are.
    for (pre, want) in [
        ("smollm", &["Ġab", "1", "2"][..]),
        ("qwen2", &["Ġab", "1", "2"]),
        ("llama-bpe", &["Ġab", "12"]),
        ("gpt-2", &["Ġab", "12"]),
        ("tekken", &["Ġab", "1", "2"]),
        ("gpt-4o", &["Ġab", "12"]),
        ("seed-coder", &["Ġab", "1", "2"]),
        ("deepseek-v3", &["Ġab", "12"]),
        ("default", &["Ġab", "12"]),
    ] {
        raw.set("tokenizer.ggml.pre", text(pre));
        assert_eq!(cut(&raw, " ab12"), want, "{pre}");
        assert_eq!(cut(&raw, "ab<|im_end|>\n"), ["ab", "<|im_end|>", "Ċ"], "{pre}");
    }
    // The case of contractions is told apart by GPT-2's expression alone.
    raw.set("tokenizer.ggml.pre", text("gpt-2"));
    assert_eq!(cut(&raw, "a'S"), ["a", "'", "S"]);
    raw.set("tokenizer.ggml.pre", text("qwen2"));
    assert_eq!(cut(&raw, "a'S"), ["a", "'S"]);
    let eos = config(&raw).unwrap().eos_token_ids;
    assert_eq!(eos, [8]);
    raw.remove("tokenizer.ggml.eos_token_id");
    assert_eq!(config(&raw).unwrap().eos_token_ids, [8], "by its text");
    raw.set("tokenizer.ggml.pre", text("poro-chat"));
    let e = tokenizer(&raw).unwrap_err();
    assert!(e.contains("tokenizer.ggml.pre") && e.contains("smollm") && e.contains("got `poro-chat`"), "{e}");
}

#[test]
fn vocabularies_of_words_cut_as_bert_does() {
    let mut raw = llama();
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁,", "s"];
    raw.set("tokenizer.ggml.model", text("bert")).set("tokenizer.ggml.tokens", texts(&tokens));
    raw.set("tokenizer.ggml.token_type", gguf_file::numbers(&[3, 3, 3, 3, 1, 1, 1, 1, 1]));
    for (key, id) in [("unknown", 1), ("bos", 2), ("seperator", 3), ("padding", 0)] {
        raw.set(&format!("tokenizer.ggml.{key}_token_id"), number(id));
    }
    let t = tokenizer(&raw).unwrap();
    assert_eq!(tokens_of(&t, "Hello, World"), ["[CLS]", "hello", ",", "wor", "##ld", "[SEP]"]);
    assert_eq!(tokens_of(&t, "zebra"), ["[CLS]", "[UNK]", "[SEP]"]);
}

#[test]
fn hostile_vocabularies_are_refused_by_the_rule() {
    type Case = (&'static str, fn(&mut Raw), &'static str);
    let cases: &[Case] = &[
        ("no model", |r| _ = r.remove("tokenizer.ggml.model"), "`gpt2`, `llama` or `bert`, got nothing"),
        ("another model", |r| _ = r.set("tokenizer.ggml.model", text("rwkv")), "got `rwkv`"),
        ("no tokens", |r| _ = r.remove("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (
            "tokens that are numbers",
            |r| _ = r.set("tokenizer.ggml.tokens", gguf_file::numbers(&[1])),
            "array of strings",
        ),
        (
            "tokens that are no text",
            |r| _ = r.set("tokenizer.ggml.tokens", gguf_file::array(8, &[bytes_of(b"\xff")])),
            "string 0 should be UTF-8",
        ),
        (
            "a token twice",
            |r| _ = r.set("tokenizer.ggml.tokens", texts(&["a", "a"])).remove("tokenizer.ggml.token_type"),
            "0 and 1 are `a`",
        ),
        (
            "fewer kinds",
            |r| _ = r.set("tokenizer.ggml.token_type", gguf_file::numbers(&[1])),
            "272 entries, has 1",
        ),
        ("no scores", |r| _ = r.remove("tokenizer.ggml.scores"), "tokenizer.ggml.scores"),
        ("fewer scores", |r| _ = r.set("tokenizer.ggml.scores", gguf_file::floats(&[0.0])), "272 numbers"),
        (
            "scores that are no numbers",
            |r| _ = r.set("tokenizer.ggml.scores", gguf_file::floats(&[f32::NAN; 272])),
            "272 numbers",
        ),
        ("an end beyond", |r| _ = r.set("tokenizer.ggml.eos_token_id", number(999)), "below 272, got 999"),
        (
            "no merges",
            |r| _ = r.set("tokenizer.ggml.model", text("gpt2")).set("tokenizer.ggml.pre", text("qwen2")),
            "tokenizer.ggml.merges",
        ),
        (
            "a merge of one",
            |r| {
                r.set("tokenizer.ggml.model", text("gpt2")).set("tokenizer.ggml.pre", text("qwen2"));
                r.set("tokenizer.ggml.merges", texts(&["h e", "hello"]));
            },
            "1 should be two tokens that make a third, got `hello`",
        ),
        (
            "a merge to nothing",
            |r| {
                r.set("tokenizer.ggml.model", text("gpt2")).set("tokenizer.ggml.pre", text("qwen2"));
                r.set("tokenizer.ggml.merges", texts(&["e h"]));
            },
            "got `e h`",
        ),
    ];
    for (what, change, word) in cases {
        let mut raw = with_pieces();
        change(&mut raw);
        let e = tokenizer(&raw).expect_err(what);
        assert!(e.contains("m.gguf") && e.contains(word), "{what}: {e}");
    }
}

#[test]
fn documents_are_those_of_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = with_pieces().write(&dir.path().join("m.gguf"));
    for (name, text) in Gguf::open(&path).unwrap().documents().unwrap() {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let (a, b) = (ModelConfig::from_dir(&path).unwrap(), ModelConfig::from_dir(dir.path()).unwrap());
    assert_eq!(a, b);
    let [x, y] = [&path, &dir.path().to_owned()].map(|p| Tokenizer::from_dir(p, Some(&a)).unwrap());
    assert_eq!(tokens_of(&x, "hello é"), tokens_of(&y, "hello é"));
}
