//! Matrices that other tools quantized: small files that those tools' own packages wrote
//! (`golden/packed.py` says which and how), with what the packages make of them; and files that are
//! wrong in one place.

mod common;

use std::path::{Path, PathBuf};

use common::file;
use fracbit_io::{Checkpoint, Dtype, Error, ModelConfig, Packing};
use half::{bf16, f16};
use serde_json::{Map, Value, json};

const MATRIX: &str = "m.weight";

/// A file in parts: tensors by name with type, shape and bytes, and the block of `config.json`.
#[derive(Clone)]
struct Parts {
    tensors: Vec<(String, String, Vec<usize>, Vec<u8>)>,
    block: Option<Value>,
}

impl Parts {
    fn golden(name: &str) -> Self {
        let bytes = std::fs::read(golden(name)).expect("a golden file");
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
        let (header, data) =
            rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("a small header"));
        let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
        let number = |v: &Value| v.as_u64().expect("a number") as usize;
        let mut tensors = Vec::new();
        for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let shape = entry["shape"].as_array().expect("dimensions").iter().map(number).collect();
            let range = number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1]);
            let dtype = entry["dtype"].as_str().expect("a type").to_owned();
            tensors.push((name.clone(), dtype, shape, data[range].to_vec()));
        }
        let block = header["__metadata__"]["quantization_config"].as_str().expect("a block");
        Self { tensors, block: Some(serde_json::from_str(block).expect("JSON")) }
    }

    fn tensor(&mut self, name: &str) -> &mut (String, String, Vec<usize>, Vec<u8>) {
        self.tensors.iter_mut().find(|t| t.0 == name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn without(&mut self, name: &str) {
        self.tensors.retain(|t| t.0 != name);
    }

    fn say(&mut self, field: &str, value: Value) {
        self.block.as_mut().expect("a block")[field] = value;
    }

    fn write(&self, path: &Path) {
        let mut header = Map::new();
        let mut data = Vec::new();
        for (name, dtype, shape, bytes) in &self.tensors {
            let range = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": range }));
            data.extend_from_slice(bytes);
        }
        std::fs::write(path, file(&Value::Object(header).to_string(), &data)).expect("a writable place");
    }

    fn open(&self, place: &Path) -> Result<Checkpoint, Error> {
        let path = place.join("case.safetensors");
        self.write(&path);
        Checkpoint::open(&path)?.unpacked(self.block.as_ref())
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/packed").join(format!("{name}.safetensors"))
}

fn place() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// The numbers of a tensor as its type holds them, of single precision rounded to that type.
fn rounded(dtype: Dtype, numbers: &[f32]) -> Vec<f32> {
    let round = |&x: &f32| match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    numbers.iter().map(round).collect()
}

const CASES: [(&str, Packing); 22] = [
    ("gptq-2", Packing::Gptq(2)),
    ("gptq-3", Packing::Gptq(3)),
    ("gptq-3-act", Packing::Gptq(3)),
    ("gptq-4", Packing::Gptq(4)),
    ("gptq-4-act", Packing::Gptq(4)),
    ("gptq-4-v2", Packing::Gptq(4)),
    ("gptq-8", Packing::Gptq(8)),
    ("awq-4", Packing::Awq),
    ("ct-w4-group", Packing::PackQuantized(4)),
    ("ct-w4-asym", Packing::PackQuantized(4)),
    ("ct-w4-channel", Packing::PackQuantized(4)),
    ("ct-w8-channel", Packing::PackQuantized(8)),
    ("ct-w8-group-asym", Packing::PackQuantized(8)),
    ("ct-w8a8", Packing::IntQuantized),
    ("ct-w8a8-asym", Packing::IntQuantized),
    ("ct-w8a8-tensor", Packing::IntQuantized),
    ("ct-mxfp4", Packing::Mxfp4),
    ("bnb-nf4", Packing::Nf4),
    ("bnb-nf4-nested", Packing::Nf4),
    ("bnb-nf4-bf16", Packing::Nf4),
    ("bnb-fp4", Packing::Fp4),
    ("bnb-int8", Packing::LlmInt8),
];

/// The packages round what they make to the type that the model runs in; every bit is the same
/// then.
#[test]
fn numbers_are_those_of_the_packages() {
    for (name, packing) in CASES {
        let place = place();
        let parts = Parts::golden(name);
        let ckpt = parts.open(place.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(ckpt.names().collect::<Vec<_>>(), ["expected", MATRIX], "{name}");
        assert_eq!(ckpt.packings().into_iter().collect::<Vec<_>>(), [(packing, 1)]);
        let (info, want) = (ckpt.info(MATRIX).expect("there"), ckpt.info("expected").expect("there"));
        assert_eq!((info.dtype, &info.shape), (Dtype::Packed(packing), &want.shape), "{name}");
        let got = ckpt.to_f32(MATRIX).unwrap_or_else(|e| panic!("{name}: {e}"));
        let expected = ckpt.to_f32("expected").expect("finite");
        assert_eq!(rounded(want.dtype, &got), expected, "{name}");
        // All stored tensors but the expected one are counted, less tables and shapes.
        let stored: usize = parts.tensors.iter().filter(|t| t.0 != "expected").map(|t| t.3.len()).sum();
        let counted = ckpt.data_bytes() as usize - want.range.len();
        assert!(counted <= stored && stored <= counted + 1400, "{name}: {counted} of {stored}");
        // Any part of a row is the same as that part of it.
        let (view, cols) = (ckpt.tensor(MATRIX).expect("there"), info.rows_cols().1);
        assert!(view.row_bytes(0).is_none());
        for (row, from, len) in [(0, 1, 7), (5, cols - 3, 3), (9, 17, cols - 17)] {
            let mut part = vec![0.0; len];
            view.row_into(row, from..from + len, &mut part);
            assert_eq!(part, got[row * cols + from..][..len], "{name}, row {row} from {from}");
        }
    }
}

/// GPTQModel subtracts ones from whole words: what a zero of 0 borrows from the next comes back.
#[test]
fn zeros_of_0_borrow_from_their_neighbours() {
    let place = place();
    let mut second = Parts::golden("gptq-4-v2");
    for (at, byte) in second.tensor("m.qzeros").3.iter_mut().enumerate() {
        *byte = [0x00, 0x10, 0x0f, 0xf0, 0x01][at % 5];
    }
    let numbers =
        |parts: &Parts| parts.open(place.path()).expect("a good file").to_f32(MATRIX).expect("finite");
    let want = numbers(&second);
    let mut first = second.clone();
    for word in first.tensor("m.qzeros").3.as_chunks_mut::<4>().0 {
        *word = u32::from_le_bytes(*word).wrapping_sub(0x1111_1111).to_le_bytes();
    }
    assert_ne!(numbers(&first), want);
    first.say("checkpoint_format", json!("gptq"));
    assert_eq!(numbers(&first), want);
}

/// Tensors of one matrix may be in two shards, and modules may have grids of their own.
#[test]
fn tensors_are_found_in_other_shards_and_grids_among_others() {
    let place = place();
    let (other, mut parts) = (Parts::golden("ct-w8-channel"), Parts::golden("ct-w4-asym"));
    let want = parts.open(place.path()).expect("a good file").to_f32(MATRIX).expect("finite");
    let eight = other.block.as_ref().expect("a block")["config_groups"]["group_0"].clone();
    parts.block.as_mut().expect("a block")["config_groups"]["group_1"] = eight;
    let mut shards = [parts.clone(), parts.clone(), other];
    shards[0].tensors.retain(|t| t.0.contains("_s"));
    shards[1].tensors.retain(|t| !t.0.contains("_s") && t.0 != "expected");
    shards[2].tensors.iter_mut().for_each(|t| t.0 = t.0.replacen("m.", "n.", 1));
    let mut map = Map::new();
    for (at, shard) in shards.iter().enumerate() {
        let file = format!("model-{at}.safetensors");
        shard.write(&place.path().join(&file));
        map.extend(shard.tensors.iter().map(|t| (t.0.clone(), json!(file))));
    }
    let index = json!({ "weight_map": map }).to_string();
    std::fs::write(place.path().join("model.safetensors.index.json"), index).expect("a writable place");
    let ckpt = Checkpoint::open(place.path()).expect("a good index").unpacked(parts.block.as_ref());
    let ckpt = ckpt.expect("two good matrices");
    assert_eq!(ckpt.to_f32(MATRIX).expect("finite"), want);
    let kinds: Vec<_> = ckpt.packings().into_iter().collect();
    assert_eq!(kinds, [(Packing::PackQuantized(4), 1), (Packing::PackQuantized(8), 1)]);
}

/// Phi-3 has three matrices in one.
#[test]
fn fused_matrices_are_parted() {
    let place = place();
    for name in ["gptq-4-act", "awq-4", "ct-w4-asym", "ct-w8a8", "ct-mxfp4", "bnb-nf4", "bnb-int8"] {
        let whole =
            Parts::golden(name).open(place.path()).expect("a good file").to_f32(MATRIX).expect("finite");
        let rows = whole.len() / 64;
        let config = json!({ "model_type": "phi3", "hidden_size": 64, "intermediate_size": 4, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": rows / 3, "num_hidden_layers": 1, "vocab_size": 8 });
        // Rows of 24 are three heads; of 32, as many as that allows.
        let config = if rows == 24 {
            config
        } else {
            let mut config = config;
            config["num_attention_heads"] = json!(2);
            config["head_dim"] = json!(rows / 4);
            config
        };
        let config =
            ModelConfig::parse(config.to_string().as_bytes(), Path::new("config.json")).expect("a config");
        let mut parts = Parts::golden(name);
        parts.without("expected");
        let fused = "model.layers.0.self_attn.qkv_proj.";
        parts.tensors.iter_mut().for_each(|t| t.0 = t.0.replacen("m.", fused, 1));
        // What AutoGPTQ adds to every matrix is no bias.
        parts.tensors.push((format!("{fused}bias"), "F16".into(), vec![rows], vec![0; 2 * rows]));
        let bytes = parts.open(place.path()).expect("a good file").data_bytes();
        let ckpt = parts.open(place.path()).expect("a good file").parted(&config).expect("parts");
        let part = |part: &str| {
            ckpt.to_f32(&format!("model.layers.0.self_attn.{part}_proj.weight")).expect("finite")
        };
        assert_eq!([part("q"), part("k"), part("v")].concat(), whole, "{name}");
        assert!(bytes - ckpt.data_bytes() <= 2, "{name}: each part has its share");
        parts.tensor(&format!("{fused}bias")).3[1] = 0x3c;
        let error = parts.open(place.path()).expect("a good file").parted(&config).expect_err("a bias");
        assert!(error.to_string().contains("no biases"), "{error}");
    }
}

/// Floats of 8 bits are adopted when a file is opened, without a block.
#[test]
fn float_quantized_is_as_the_package_says() {
    let ckpt = Checkpoint::open(golden("ct-fp8")).expect("a good file");
    let got = ckpt.to_f32(MATRIX).expect("finite");
    assert_eq!(rounded(Dtype::Bf16, &got), ckpt.to_f32("expected").expect("finite"));
}

/// Experts of GPT-OSS, whose architecture is not known: a tensor of three dimensions.
#[test]
fn experts_in_mxfp4_are_a_tensor() {
    let place = place();
    let parts = Parts::golden("mxfp4-experts");
    let ckpt = parts.open(place.path()).expect("a good file");
    let name = "m.mlp.experts.gate_up_proj";
    assert_eq!(ckpt.info(name).expect("there").shape, [2, 12, 96]);
    let got = ckpt.to_f32(name).expect("finite");
    assert_eq!(rounded(Dtype::Bf16, &got), ckpt.to_f32("expected").expect("finite"));

    // The same codes as one matrix.
    let mut parts = parts;
    for (stored, one) in [("_blocks", vec![24, 3, 16]), ("_scales", vec![24, 3])] {
        let tensor = parts.tensor(&format!("{name}{stored}"));
        tensor.0 = format!("{MATRIX}{stored}");
        tensor.2 = one;
    }
    let ckpt = parts.open(place.path()).expect("a good file");
    assert_eq!(ckpt.info(MATRIX).expect("there").shape, [24, 96]);
    assert_eq!(ckpt.to_f32(MATRIX).expect("finite"), got);
}

/// Tables and codes say the whole of some formats; the rest of others is in the block alone.
#[test]
fn a_block_is_missed_where_it_is_needed() {
    let place = place();
    for (name, packing) in CASES {
        let mut parts = Parts::golden(name);
        parts.block = None;
        let got = parts.open(place.path());
        match packing {
            Packing::Gptq(_) | Packing::PackQuantized(_) => {
                let error = got.expect_err(name).to_string();
                assert!(error.contains("there is no such block"), "{name}: {error}");
            }
            Packing::Mxfp4 => drop(got.expect_err(name)),
            Packing::IntQuantized => assert!(!got.expect(name).names().any(|n| n == "nothing")),
            _ => assert_eq!(got.expect(name).packings().len(), 1, "{name}"),
        }
    }
}

#[test]
fn a_digest_depends_on_every_tensor() {
    let place = place();
    for (name, _) in CASES {
        let mut parts = Parts::golden(name);
        parts.without("expected");
        let hash = |parts: &Parts| parts.open(place.path()).expect("a good file").content_hash();
        let first = hash(&parts);
        assert_eq!(hash(&parts), first);
        let told = |name: &str| {
            !["weight_shape", "quant_state", "g_idx", "weight_format"].iter().any(|end| name.contains(end))
        };
        for at in (0..parts.tensors.len()).filter(|&at| told(&parts.tensors[at].0)) {
            let mut other = parts.clone();
            other.tensors[at].3[0] ^= 1;
            assert_ne!(hash(&other), first, "{name}: {}", parts.tensors[at].0);
        }
    }
}

/// A file that is wrong in one place: golden file, what is changed, words of the refusal.
type Wrong = (&'static str, fn(&mut Parts), &'static [&'static str]);

fn set(parts: &mut Parts, name: &str, at: usize, value: i32) {
    parts.tensor(name).3[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
}

fn text(parts: &mut Parts, name: &str, change: impl Fn(&str) -> String) {
    let tensor = parts.tensor(name);
    let changed = change(std::str::from_utf8(&tensor.3).expect("UTF-8"));
    tensor.2 = vec![changed.len()];
    tensor.3 = changed.into_bytes();
}

const STATE: &str = "m.weight.quant_state.bitsandbytes__nf4";

#[test]
fn what_is_wrong_is_refused_by_name() {
    let cases: Vec<Wrong> = vec![
        ("gptq-4", |p| p.without("m.qzeros"), &["m.qzeros", "should exist"]),
        ("gptq-4", |p| p.without("m.scales"), &["m.scales", "should exist"]),
        ("gptq-4", |p| p.tensor("m.scales").1 = "I16".into(), &["m.scales", "F16", "got I16"]),
        ("gptq-4", |p| p.tensor("m.qzeros").1 = "U32".into(), &["m.qzeros", "should be I32, got U32"]),
        ("gptq-4", |p| p.tensor("m.qweight").2 = vec![256], &["m.qweight", "should be a matrix", "[256]"]),
        ("gptq-4", |p| p.tensor("m.qweight").2 = vec![32, 8], &["m.qzeros", "2, 3, 4 or 8 bits"]),
        ("gptq-4", |p| p.tensor("m.scales").2 = vec![32, 2], &["m.scales", "[2, 32]", "[32, 2]"]),
        ("gptq-4", |p| p.tensor("m.scales").2 = vec![64], &["m.scales", "should be a matrix"]),
        ("gptq-4", |p| p.say("group_size", json!(16)), &["m.scales", "group_size 16", "got 2"]),
        ("gptq-4", |p| p.say("group_size", json!(0)), &["m.scales", "group_size 0"]),
        ("gptq-4", |p| p.say("group_size", json!(-7)), &["m.scales", "group_size -7"]),
        ("gptq-4", |p| p.say("group_size", json!("all")), &["group_size", "whole number", "\"all\""]),
        ("gptq-4", |p| p.say("bits", json!(8)), &["config.json", "bits", "should be 4", "got 8"]),
        ("gptq-4", |p| p.say("quant_method", json!("awq")), &["quant_method", "\"gptq\"", "\"awq\""]),
        ("gptq-4", |p| p.say("quant_method", json!(7)), &["quant_method", "should be text"]),
        ("gptq-4", |p| p.say("checkpoint_format", json!("marlin")), &["checkpoint_format", "\"marlin\""]),
        ("gptq-4", |p| p.say("is_marlin_format", json!(true)), &["is_marlin_format", "Marlin"]),
        ("gptq-4-act", |p| set(p, "m.g_idx", 3, 4), &["m.g_idx", "number 3", "0 to 3, got 4"]),
        ("gptq-4-act", |p| set(p, "m.g_idx", 63, -1), &["m.g_idx", "number 63", "got -1"]),
        ("gptq-4-act", |p| p.tensor("m.g_idx").1 = "F32".into(), &["m.g_idx", "should be I32"]),
        ("gptq-4-act", |p| p.tensor("m.g_idx").2 = vec![2, 32], &["m.g_idx", "[64]", "[2, 32]"]),
        (
            "gptq-4",
            |p| p.tensors.push((MATRIX.into(), "F16".into(), vec![1], vec![0; 2])),
            &[MATRIX, "m.qweight", "same matrix"],
        ),
        ("awq-4", |p| p.say("version", json!("gemv")), &["version", "\"gemm\"", "\"gemv\""]),
        ("awq-4", |p| p.say("bits", json!(3)), &["bits", "should be 4, got 3"]),
        ("awq-4", |p| p.say("quant_method", json!("gptq")), &["quant_method", "\"awq\"", "\"gptq\""]),
        ("awq-4", |p| p.say("group_size", json!(64)), &["m.scales", "group_size 64"]),
        ("awq-4", |p| p.tensor("m.qzeros").2 = vec![1, 8], &["quant_method", "\"gptq\"", "m.qweight"]),
        ("ct-w4-group", |p| p.without("m.weight_shape"), &["m.weight_shape", "should exist"]),
        ("ct-w4-group", |p| p.tensor("m.weight_shape").3.fill(0xff), &["m.weight_shape", "24 rows"]),
        ("ct-w4-group", |p| p.tensor("m.weight_shape").3[8] = 99, &["m.weight_packed", "99 codes"]),
        ("ct-w4-group", |p| p.tensor("m.weight_shape").3[8..].fill(0x7f), &["m.weight_packed", "codes"]),
        ("ct-w4-group", |p| p.tensor("m.weight_scale").2 = vec![48], &["m.weight_scale", "[48]"]),
        ("ct-w4-group", |p| p.say("format", json!("marlin-24")), &["format", "marlin-24", "pack-quantized"]),
        (
            "ct-w4-group",
            |p| p.say("sparsity_config", json!({ "format": "sparse-24-bitmask" })),
            &["sparsity_config.format", "sparse-24-bitmask"],
        ),
        (
            "ct-w4-group",
            |p| p.say("transform_config", json!({ "config_groups": { "u": {} } })),
            &["transform_config", "input transformed"],
        ),
        ("ct-w4-group", |p| p.say("config_groups", json!({})), &["config_groups", "4 bits, 2 scales"]),
        ("ct-w4-group", |p| p.say("config_groups", json!(4)), &["config_groups", "m.weight_packed"]),
        ("ct-w4-asym", |p| p.without("m.weight_zero_point"), &["m.weight_packed", "asymmetric"]),
        ("ct-w4-asym", |p| p.tensor("m.weight_zero_point").2 = vec![4, 3], &["weight_zero_point", "[3, 4]"]),
        (
            "ct-w4-asym",
            |p| p.tensor("m.weight_zero_point").1 = "F32".into(),
            &["weight_zero_point", "I32 or I8"],
        ),
        ("ct-w8a8", |p| p.tensor("m.weight_scale").1 = "I16".into(), &["m.weight_scale", "got I16"]),
        ("ct-w8a8-asym", |p| p.tensor("m.weight_zero_point").2 = vec![24], &["weight_zero_point", "[24, 1]"]),
        ("ct-mxfp4", |p| p.tensor("m.weight_scale").2 = vec![2, 24], &["m.weight_scale", "16 bytes"]),
        ("ct-mxfp4", |p| p.tensor("m.weight_scale").1 = "I8".into(), &["m.weight_scale", "should be U8"]),
        (
            "ct-mxfp4",
            |p| p.tensors.push(("m.weight_global_scale".into(), "F32".into(), vec![1], vec![0; 4])),
            &["m.weight_packed", "NVFP4"],
        ),
        ("bnb-nf4", |p| p.without("m.weight.absmax"), &["m.weight.absmax", "should exist"]),
        ("bnb-nf4", |p| p.without("m.weight.quant_map"), &["m.weight.quant_map", "should exist"]),
        ("bnb-nf4", |p| p.without(MATRIX), &[MATRIX, "should exist"]),
        ("bnb-nf4", |p| p.tensor("m.weight.absmax").2 = vec![12, 2], &["m.weight.absmax", "[24]"]),
        (
            "bnb-nf4",
            |p| {
                let t = p.tensor("m.weight.absmax");
                t.2 = vec![23];
                t.3.truncate(92);
            },
            &["m.weight.absmax", "[24] (one for each block of 64 of 1536)", "[23]"],
        ),
        ("bnb-nf4", |p| p.tensor("m.weight.quant_map").3[3] = 0xff, &["m.weight.quant_map", "finite"]),
        ("bnb-nf4", |p| p.tensor(STATE).3[0] = b'[', &[STATE, "JSON object"]),
        ("bnb-nf4", |p| text(p, STATE, |s| s.replace("\"nf4\"", "\"fp4\"")), &[STATE, "`quant_type`"]),
        ("bnb-nf4", |p| text(p, STATE, |s| s.replace("64,", "0,")), &[STATE, "`blocksize`"]),
        ("bnb-nf4", |p| text(p, STATE, |s| s.replace("[24, 64]", "[24, -64]")), &[STATE, "`shape`"]),
        ("bnb-nf4", |p| text(p, STATE, |s| s.replace("[24, 64]", "[1536]")), &[STATE, "`shape`"]),
        (
            "bnb-nf4",
            |p| text(p, STATE, |s| s.replace("[24, 64]", "[9223372036854775807, 64]")),
            &[MATRIX, "codes by its state"],
        ),
        (
            "bnb-nf4",
            |p| text(p, STATE, |s| s.replace("[24, 64]", "[24, 65]")),
            &[MATRIX, "24 x 65", "768 bytes"],
        ),
        (
            "bnb-nf4-nested",
            |p| text(p, STATE, |s| s.replace("nested_offset", "x")),
            &[STATE, "`nested_offset`"],
        ),
        (
            "bnb-nf4-nested",
            |p| text(p, STATE, |s| s.replace("nested_blocksize\": 256", "nested_blocksize\": 1")),
            &["m.weight.nested_absmax", "[296]"],
        ),
        (
            "bnb-nf4-nested",
            |p| p.tensor("m.weight.absmax").1 = "I8".into(),
            &["m.weight.absmax", "should be U8"],
        ),
        ("bnb-nf4", |p| p.say("bnb_4bit_quant_type", json!("fp4")), &["bnb_4bit_quant_type", "\"nf4\""]),
        ("bnb-nf4", |p| p.say("quant_method", json!("gptq")), &["quant_method", "\"bitsandbytes\""]),
        (
            "bnb-int8",
            |p| {
                let more = Parts::golden("bnb-nf4").tensors;
                p.tensors.extend(more.into_iter().filter(|t| t.0.starts_with("m.weight.")));
                p.tensor(STATE).3[..].copy_from_slice(
                    br#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [48, 64]}"#,
                );
                p.tensor("m.weight.absmax").2 = vec![48];
                p.tensor("m.weight.absmax").3.extend([0; 96]);
            },
            &[MATRIX, "beside the tensors of two"],
        ),
        ("bnb-int8", |p| p.tensor("m.weight_format").3[0] = 2, &["m.weight_format", "row by row, got [2]"]),
        ("bnb-int8", |p| p.tensor("m.SCB").2 = vec![1, 24], &["m.SCB", "[24]", "[1, 24]"]),
        ("bnb-int8", |p| p.tensor("m.SCB").1 = "I32".into(), &["m.SCB", "should be F32"]),
        (
            "mxfp4-experts",
            |p| p.tensor("m.mlp.experts.gate_up_proj_scales").2 = vec![2, 36],
            &["gate_up_proj_scales", "[2, 12, 3]"],
        ),
        (
            "mxfp4-experts",
            |p| p.tensor("m.mlp.experts.gate_up_proj_blocks").2 = vec![2, 12, 6, 8],
            &["gate_up_proj_blocks", "blocks of 16 bytes"],
        ),
    ];
    let place = place();
    for (at, (name, change, words)) in cases.iter().enumerate() {
        let mut parts = Parts::golden(name);
        change(&mut parts);
        let Err(error) = parts.open(place.path()) else { panic!("case {at}, {name}: should be refused") };
        let error = error.to_string();
        for word in *words {
            assert!(error.contains(word), "case {at}, {name}: `{word}` should be in: {error}");
        }
        assert!(error.contains(if error.contains("config.json") { "config.json" } else { "safetensors" }));
    }
}

/// Whatever the bytes, the types and the shapes are, a file is read or refused.
#[test]
fn any_bytes_are_read_or_refused() {
    let place = place();
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let (mut read, mut refused) = (0, 0);
    for (name, _) in CASES.into_iter().chain([("mxfp4-experts", Packing::Mxfp4)]) {
        for round in 0..60 {
            let mut parts = Parts::golden(name);
            parts.without("expected");
            let at = next() % parts.tensors.len();
            let tensor = &mut parts.tensors[at];
            match round % 4 {
                0 => tensor.3.iter_mut().for_each(|byte| *byte = next() as u8),
                1 => {
                    let at = next() % tensor.3.len();
                    tensor.3[at] = next() as u8;
                }
                2 => {
                    // The same bytes in another shape.
                    let all: usize = tensor.2.iter().product();
                    let rows = (1..=all).filter(|rows| all.is_multiple_of(*rows)).nth(next() % 4);
                    let rows = rows.unwrap_or(all);
                    tensor.2 = [vec![all], vec![rows, all / rows], vec![all / rows, rows], vec![1, all]]
                        [next() % 4]
                        .clone();
                }
                _ => {
                    let size = tensor.3.len() / tensor.2.iter().product::<usize>().max(1);
                    let types = match size {
                        1 => &["U8", "I8", "BOOL"][..],
                        2 => &["F16", "BF16", "I16", "U16"],
                        4 => &["F32", "I32", "U32"],
                        _ => &["F64", "I64", "U64"],
                    };
                    tensor.1 = types[next() % types.len()].to_owned();
                }
            }
            match parts.open(place.path()) {
                Err(_) => refused += 1,
                Ok(ckpt) => {
                    read += 1;
                    for name in ckpt.names().map(str::to_owned).collect::<Vec<_>>() {
                        // Numbers that are not finite are refused here.
                        drop(ckpt.to_f32(&name));
                    }
                }
            }
        }
    }
    assert!(read > 300 && refused > 300, "{read} read, {refused} refused");
}
