//! A quantized directory with something wrong in it.

use crate::{copy, good, refused, refused_with};
use fracbit_io::{Header, verify};
use fracbit_kernels::cases::Random;
use fracbit_tests::{Parts, Stored, files, load};
use half::f16;
use serde_json::{Value, json};
use std::fs;

const SHARD: &str = "model.safetensors";

#[test]
fn the_good_directory_is_good() {
    // Everything below starts from it, with its manifest or without.
    load(good()).expect("it runs");
    assert!(verify(good()).expect("readable").is_ok());
    let place = tempfile::tempdir().expect("a temporary directory");
    Parts::read(good()).write(place.path());
    load(place.path()).expect("it runs without a manifest");
    let report = verify(place.path()).expect("readable");
    assert!(report.is_ok() && !report.checksums, "{report}");
}

/// What a message about `name` may call it.
fn names_file(text: &str, name: &str) -> bool {
    // The configuration's block is called by its own name.
    text.contains(name) || (name == "config.json" && text.contains("quantization_config"))
}

#[test]
fn a_flipped_bit_in_any_tensor_is_found_and_named() {
    let place = copy(good());
    let path = place.path().join(SHARD);
    let bytes = fs::read(&path).expect("the shard");
    let header = Header::parse(&bytes).expect("a good shard");
    assert!(header.tensors.len() > 50, "codes, scales, gains, codebooks, norms, biases");
    for (tensor, info) in &header.tensors {
        for (at, bit) in
            [(info.range.start, 0), (info.range.start + info.range.len() / 2, 3), (info.range.end - 1, 7)]
        {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            fs::write(&path, &damaged).expect("a writable place");
            refused_with(&format!("bit {bit} of byte {at}"), load(place.path()), &[SHARD, tensor, "blake3"]);
            let report = verify(place.path()).expect("readable");
            let found =
                report.problems.iter().any(|p| p.file == SHARD && p.tensor.as_deref() == Some(tensor));
            assert!(found, "{tensor}, bit {bit} of byte {at}: {report}");
        }
    }
}

#[test]
fn a_flipped_bit_in_any_header_or_document_is_found_and_named() {
    for (name, bytes) in files(good()) {
        let place = copy(good());
        let path = place.path().join(&name);
        let end =
            if name == SHARD { Header::parse(&bytes).expect("a good shard").data_start } else { bytes.len() };
        // A step coprime to 8 reaches every place within a byte.
        let step = (end * 8 / 150) | 1;
        for bit in (0..end * 8).step_by(step) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).expect("a writable place");
            let report = verify(place.path()).expect("readable");
            assert!(
                report.problems.iter().any(|p| p.file == name),
                "bit {bit} of {name} went unseen: {report}"
            );
            // A model card may be edited.
            if name != "README.md" {
                let text = refused(&format!("bit {bit} of {name}"), load(place.path()));
                assert!(names_file(&text, &name), "bit {bit}: `{name}` should be in: {text}");
            }
        }
    }
}

#[test]
fn truncated_and_extended_files_are_found_and_named() {
    for (name, bytes) in files(good()) {
        let place = copy(good());
        let path = place.path().join(&name);
        let n = bytes.len();
        let mut lengths = vec![0, 1, 7, 8, 9, n / 4, n / 2, n - 9, n - 1];
        if name == SHARD {
            let header = Header::parse(&bytes).expect("a good shard");
            lengths.extend([header.data_start - 1, header.data_start, header.data_start + 1]);
            lengths.extend(header.tensors.iter().step_by(7).map(|(_, info)| info.range.start));
        }
        let longer = [&bytes[..], b"\n"].concat();
        for damaged in lengths.iter().map(|&length| &bytes[..length.min(n - 1)]).chain([&longer[..]]) {
            fs::write(&path, damaged).expect("a writable place");
            let what = format!("{name} of {} bytes instead of {n}", damaged.len());
            let report = verify(place.path()).expect("readable");
            assert!(report.problems.iter().any(|p| p.file == name), "{what} went unseen: {report}");
            if name != "README.md" {
                let text = refused(&what, load(place.path()));
                assert!(names_file(&text, &name), "{what}: `{name}` should be in: {text}");
            }
        }
    }
}

#[test]
fn missing_files_are_named() {
    for (name, _) in files(good()) {
        let place = copy(good());
        fs::remove_file(place.path().join(&name)).expect("it was there");
        match name.as_str() {
            // Edited at will, or gone; the checksums still say so.
            "README.md" => {
                load(place.path()).expect("nothing depends on the model card");
            }
            // Without it there are no checksums, and `verify` says that.
            "manifest.json" => {
                load(place.path()).expect("a directory without checksums");
                assert!(!verify(place.path()).expect("readable").checksums);
                continue;
            }
            name => refused_with(&format!("without {name}"), load(place.path()), &[name]),
        }
        let report = verify(place.path()).expect("readable").to_string();
        assert!(report.contains(&name) && report.contains("missing"), "{report}");
    }
}

/// Changes to make, and words that the error must contain.
type Case = (&'static str, fn(&mut Parts), &'static [&'static str]);

const Q: &str = "model.layers.0.self_attn.q_proj.weight"; // tcq-2
const O: &str = "model.layers.0.self_attn.o_proj.weight"; // f16
const BOOK: &str = "fracbit.codebook.nuq-4";

fn set_f32(t: &mut Stored, at: usize, value: f32) {
    t.bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
}

fn set_f16(t: &mut Stored, at: usize, value: f32) {
    t.bytes[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

fn codes(parts: &mut Parts) -> &mut Stored {
    parts.tensor(&format!("{Q}.codes"))
}

fn scales(parts: &mut Parts) -> &mut Stored {
    parts.tensor(&format!("{Q}.scales"))
}

fn gain(parts: &mut Parts) -> &mut Stored {
    parts.tensor(&format!("{Q}.gain"))
}

fn entries(parts: &mut Parts) -> &mut Stored {
    parts.tensor(&format!("{BOOK}.entries"))
}

fn block(parts: &mut Parts) -> &mut Value {
    &mut parts.config["quantization_config"]
}

fn q(parts: &mut Parts) -> &mut Value {
    &mut block(parts)["modules"][Q.trim_end_matches(".weight")]
}

/// Directories that agree with themselves (no checksum can find them) and are wrong.
const LIES: &[Case] = &[
    // Tensors.
    ("codes missing", |p| drop(p.remove(&format!("{Q}.codes"))), &["q_proj.weight.codes", "should exist"]),
    ("scales missing", |p| drop(p.remove(&format!("{Q}.scales"))), &["q_proj.weight.scales", "should exist"]),
    ("gain missing", |p| drop(p.remove(&format!("{Q}.gain"))), &["q_proj.weight.gain", "should exist"]),
    (
        "bias missing",
        |p| drop(p.remove("model.layers.1.mlp.down_proj.bias")),
        &["1.mlp.down_proj.bias", "should exist"],
    ),
    ("last norm missing", |p| drop(p.remove("model.norm.weight")), &["model.norm.weight"]),
    ("half-precision matrix missing", |p| drop(p.remove(O)), &[O, "should exist"]),
    ("head missing", |p| drop(p.remove("lm_head.weight.codes")), &["lm_head.weight.codes", "should exist"]),
    (
        "codes one byte short",
        |p| {
            let t = codes(p);
            t.bytes.pop();
            t.shape[0] -= 1;
        },
        &["q_proj.weight.codes", "`codes` should be"],
    ),
    (
        "codes one byte long",
        |p| {
            let t = codes(p);
            t.bytes.push(0);
            t.shape[0] += 1;
        },
        &["q_proj.weight.codes", "`codes` should be"],
    ),
    (
        "no codes",
        |p| {
            let t = codes(p);
            t.bytes.clear();
            t.shape[0] = 0;
        },
        &["q_proj.weight.codes", "got 0"],
    ),
    (
        "codes of another type",
        |p| "I8".clone_into(&mut codes(p).dtype),
        &["q_proj.weight.codes", "dtype should be U8, got I8"],
    ),
    ("a type nobody knows", |p| "Q2".clone_into(&mut codes(p).dtype), &[SHARD, "q_proj.weight.codes", "Q2"]),
    ("a shape that the bytes do not fill", |p| codes(p).shape[0] += 1, &[SHARD, "q_proj.weight.codes"]),
    ("scales of another type", |p| "BF16".clone_into(&mut scales(p).dtype), &["q_proj.weight.scales", "F16"]),
    (
        "scales of another matrix",
        |p| {
            let other = p.tensor("model.layers.0.self_attn.k_proj.weight.scales").clone();
            let t = scales(p);
            (t.shape, t.bytes) = (other.shape, other.bytes);
        },
        &["q_proj.weight", "`scales` should be"],
    ),
    ("a scale that is NaN", |p| set_f16(scales(p), 5, f32::NAN), &["q_proj.weight", "scale", "finite"]),
    (
        "a scale that is infinite",
        |p| set_f16(scales(p), 0, f32::INFINITY),
        &["q_proj.weight", "scale", "finite"],
    ),
    ("a gain that is NaN", |p| set_f32(gain(p), 0, f32::NAN), &["q_proj.weight.gain", "finite"]),
    (
        "a gain that is infinite",
        |p| set_f32(gain(p), 0, f32::NEG_INFINITY),
        &["q_proj.weight.gain", "finite"],
    ),
    (
        "two gains",
        |p| {
            let t = gain(p);
            t.bytes.extend([0; 4]);
            t.shape[0] = 2;
        },
        &["q_proj.weight.gain", "should hold 1", "got 2"],
    ),
    (
        "a bias that is NaN",
        |p| set_f32(p.tensor("model.layers.0.mlp.up_proj.bias"), 7, f32::NAN),
        &["0.mlp.up_proj.bias", "number 7", "finite"],
    ),
    (
        "a norm that is infinite",
        |p| set_f32(p.tensor("model.norm.weight"), 3, f32::INFINITY),
        &["model.norm.weight", "number 3", "finite"],
    ),
    (
        "a bias of another length",
        |p| {
            let t = p.tensor("model.layers.0.mlp.up_proj.bias");
            t.bytes.truncate(40);
            t.shape[0] = 10;
        },
        &["0.mlp.up_proj.bias", "should hold 120", "got 10"],
    ),
    (
        "a half-precision weight that is NaN",
        |p| set_f16(p.tensor(O), 56 + 2, f32::NAN),
        &[O, "row 1, column 2", "finite"],
    ),
    (
        "a half-precision matrix on its side",
        |p| p.tensor(O).shape = vec![28, 112],
        &[O, "[56, 56]", "[28, 112]"],
    ),
    // Codebooks.
    (
        "codebook missing",
        |p| drop(p.remove(&format!("{BOOK}.entries"))),
        &["fracbit.codebook.nuq-4.entries", "should exist"],
    ),
    (
        "step missing",
        |p| drop(p.remove(&format!("{BOOK}.step"))),
        &["fracbit.codebook.nuq-4.step", "should exist"],
    ),
    (
        "codebook of a half-rate's half missing",
        |p| drop(p.remove("fracbit.codebook.tcq-2.5.entries")),
        &["fracbit.codebook.tcq-2.5.entries", "should exist"],
    ),
    (
        "codebook one entry short",
        |p| {
            let t = entries(p);
            t.bytes.truncate(30);
            t.shape[0] = 15;
        },
        &["fracbit.codebook.nuq-4.entries", "16", "15"],
    ),
    (
        "an entry without a negative",
        |p| entries(p).bytes[0..2].copy_from_slice(&i16::MIN.to_le_bytes()),
        &["nuq-4", "-32767..=32767"],
    ),
    (
        "entries of another type",
        |p| "U16".clone_into(&mut entries(p).dtype),
        &["fracbit.codebook.nuq-4.entries", "I16"],
    ),
    ("step zero", |p| set_f32(p.tensor(&format!("{BOOK}.step")), 0, 0.0), &["nuq-4", "step", "positive"]),
    (
        "step negative",
        |p| set_f32(p.tensor(&format!("{BOOK}.step")), 0, -0.5),
        &["nuq-4", "step", "positive"],
    ),
    ("step NaN", |p| set_f32(p.tensor(&format!("{BOOK}.step")), 0, f32::NAN), &["nuq-4.step", "finite"]),
    // The configuration's block.
    (
        "format of the future",
        |p| block(p)["format_version"] = json!(5),
        &["quantization_config", "format_version should be 1 to 4, got 5"],
    ),
    (
        "one group for all, as before version 3",
        |p| block(p)["group"] = json!(0),
        &["quantization_config", "group should stand at each of `modules`, got 0"],
    ),
    (
        "version 2 without the group of all matrices",
        |p| block(p)["format_version"] = json!(2),
        &["quantization_config", "group"],
    ),
    (
        "version 2 with the group of one matrix",
        |p| {
            (block(p)["format_version"], block(p)["group"]) = (json!(2), json!(0));
            block(p)["modules"]["lm_head"]["group"] = json!(64);
        },
        &["quantization_config", "group should stand once in this version"],
    ),
    (
        "a group of a half-precision matrix",
        |p| block(p)["modules"][O.trim_end_matches(".weight")]["group"] = json!(32),
        &["quantization_config", "o_proj", "f16 has no scales", "32"],
    ),
    (
        "a code that meant something else in version 1",
        |p| {
            (block(p)["format_version"], block(p)["group"]) = (json!(1), json!(0));
            block(p)["modules"]["model.layers.0.self_attn.q_proj"]["scheme"] = json!("half-tcq-fast-4.25");
        },
        &["quantization_config", "model.layers.0.self_attn.q_proj", "half-tcq-fast-4.25", "again"],
    ),
    (
        "no format version",
        |p| drop(block(p).as_object_mut().and_then(|o| o.remove("format_version"))),
        &["quantization_config", "format_version"],
    ),
    (
        "another tool's model",
        |p| p.config["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4 }),
        &["quantized already", "by gptq, as config.json says", ".codes"],
    ),
    (
        "no method",
        |p| drop(block(p).as_object_mut().and_then(|o| o.remove("quant_method"))),
        &["quantized already", "fracbit", ".codes"],
    ),
    (
        "a block that is no block",
        |p| p.config["quantization_config"] = json!("4bit"),
        &["quantized already", "fracbit", ".codes"],
    ),
    (
        "a rotation nobody knows",
        |p| block(p)["rotation"] = json!("sideways"),
        &["quantization_config", "sideways"],
    ),
    (
        "no rotation",
        |p| drop(block(p).as_object_mut().and_then(|o| o.remove("rotation"))),
        &["quantization_config", "rotation"],
    ),
    (
        "no seed",
        |p| drop(block(p).as_object_mut().and_then(|o| o.remove("seed"))),
        &["quantization_config", "seed"],
    ),
    ("a negative seed", |p| block(p)["seed"] = json!(-1), &["quantization_config", "-1"]),
    ("a group of 24", |p| q(p)["group"] = json!(24), &["quantization_config", "q_proj", "group", "24"]),
    ("a group that is no number", |p| q(p)["group"] = json!("row"), &["quantization_config", "row"]),
    (
        "a group that the scales do not have",
        |p| q(p)["group"] = json!(16),
        &["q_proj.weight", "`scales` should be"],
    ),
    (
        "a scheme nobody knows",
        |p| block(p)["modules"]["lm_head"]["scheme"] = json!("tcq-9"),
        &["quantization_config", "tcq", "9"],
    ),
    (
        "a scheme that is no scheme",
        |p| block(p)["modules"]["lm_head"]["scheme"] = json!(5),
        &["quantization_config"],
    ),
    (
        "another scheme than stored",
        |p| block(p)["modules"]["lm_head"]["scheme"] = json!("tcq-2"),
        &["lm_head.weight.codes", "`codes` should be"],
    ),
    (
        "half precision that is packed",
        |p| block(p)["modules"]["lm_head"]["scheme"] = json!("f16"),
        &["lm_head.weight", "should exist"],
    ),
    (
        "packed that is half precision",
        |p| block(p)["modules"]["model.layers.0.self_attn.o_proj"]["scheme"] = json!("nuq-4"),
        &["o_proj.weight.codes", "should exist"],
    ),
    (
        "a module missing",
        |p| drop(block(p)["modules"].as_object_mut().and_then(|o| o.remove("model.layers.1.mlp.gate_proj"))),
        &["quantization_config", "model.layers.1.mlp.gate_proj"],
    ),
    (
        "fused layers of two schemes",
        |p| {
            block(p)["fused"] =
                json!([["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]])
        },
        &["quantization_config", "one scheme", "vq-3"],
    ),
    (
        "fused layers of two inputs",
        |p| block(p)["fused"] = json!([["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]]),
        &["quantization_config", "same input"],
    ),
    (
        "a fused layer that is not there",
        |p| {
            block(p)["fused"] =
                json!([["model.layers.9.self_attn.q_proj", "model.layers.9.self_attn.k_proj"]])
        },
        &["quantization_config", "model.layers.9.self_attn.q_proj", "not in the model"],
    ),
    ("fused groups that are no lists", |p| block(p)["fused"] = json!([3]), &["quantization_config"]),
    (
        "fused layers whose tiles do not meet",
        |p| block(p)["fused"] = json!([["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]]),
        &["quantization_config", "multiple of 16 rows, got 120"],
    ),
    // The model's own configuration.
    ("another width", |p| p.config["intermediate_size"] = json!(128), &["gate_proj", "128"]),
    (
        "another vocabulary",
        |p| p.config["vocab_size"] = json!(96),
        &["embed_tokens.weight", "`codes` should be"],
    ),
    ("one block more", |p| p.config["num_hidden_layers"] = json!(3), &["model.layers.2"]),
    (
        "another architecture",
        |p| p.config["architectures"] = json!(["GPT2LMHeadModel"]),
        &["config.json", "GPT2LMHeadModel"],
    ),
];

#[test]
fn directories_that_lie_consistently_are_refused() {
    for (what, change, words) in LIES {
        let mut parts = Parts::read(good());
        change(&mut parts);
        let place = tempfile::tempdir().expect("a temporary directory");
        parts.write(place.path());
        refused_with(what, load(place.path()), words);
        // Looking and checking must survive as well, whatever they find.
        let _ = fracbit::inspect(place.path());
        let _ = verify(place.path());
    }
}

#[test]
fn leftovers_that_nothing_reads_are_not_silent_for_verify() {
    let place = copy(good());
    fs::write(place.path().join("stray.safetensors"), b"x").expect("a writable place");
    let report = verify(place.path()).expect("readable").to_string();
    assert!(report.contains("stray.safetensors"), "{report}");
}

#[test]
fn zero_scales_and_extreme_codes_are_no_error() {
    let mut parts = Parts::read(good());
    scales(&mut parts).bytes.fill(0);
    for t in &mut parts.tensors {
        if t.name.ends_with(".codes") && t.name.contains("layers.1") {
            t.bytes.fill(0xff);
        }
    }
    let place = tempfile::tempdir().expect("a temporary directory");
    parts.write(place.path());
    let model = load(place.path()).expect("every code is a code");
    let logits = fracbit_tests::logits(&model, &[0, 5, 9]);
    assert!(logits.iter().all(|l| l.is_finite()), "finite weights give finite logits");
}

#[test]
fn random_damage_never_panics() {
    // Without a manifest every byte reaches the parsers and the decoders.
    let place = tempfile::tempdir().expect("a temporary directory");
    Parts::read(good()).write(place.path());
    let originals = files(place.path());
    let mut random = Random::new(20_261_120);
    let mut pick = |n: usize| random.next() as usize % n.max(1);
    let (mut accepted, rounds) = (0, 600);
    for _ in 0..rounds {
        let (name, bytes) = &originals[pick(originals.len())];
        let mut damaged = bytes.clone();
        // Headers and documents are short and full of rules: aim there half of the time.
        let aim = if pick(2) == 0 { damaged.len().min(4096) } else { damaged.len() };
        for _ in 0..=pick(3) {
            let at = pick(aim.min(damaged.len()));
            match pick(5) {
                0 => damaged.truncate(at),
                1 => damaged.insert(at, b"0\"{[,-9"[pick(7)]),
                2 if !damaged.is_empty() => drop(damaged.remove(at)),
                3 if !damaged.is_empty() => damaged[at] = pick(256) as u8,
                _ if !damaged.is_empty() => damaged[at] ^= 1 << pick(8),
                _ => {}
            }
        }
        fs::write(place.path().join(name), &damaged).expect("a writable place");
        if let Ok(model) = load(place.path()) {
            accepted += 1;
            let vocab = model.config().vocab_size;
            let tokens = [0, 5, 9].map(|t: usize| u32::try_from(t.min(vocab - 1)).expect("small"));
            // Whatever was accepted runs.
            let _ = fracbit_tests::logits(&model, &tokens);
        }
        let _ = fracbit::inspect(place.path());
        let _ = verify(place.path());
        fs::write(place.path().join(name), bytes).expect("a writable place");
    }
    assert!(accepted > 0 && accepted < rounds, "damage of every kind: {accepted} of {rounds} were accepted");
}
