//! Writing a model directory and reading it back.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{f32_bytes, file, shared_model, skipped, spec, tensors, write_model};
use fracbit_io::{
    Checkpoint, Dtype, Error, ModelConfig, OpenOptions, OutputDir, Overwrite, Resumable, ShardWriter,
    Verified, leftovers, verify,
};
use serde_json::json;

#[test]
fn what_is_written_is_read() {
    for (max_shard, shards) in [(u64::MAX, 1), (150, 2), (1, 5)] {
        let tmp = tempfile::tempdir().unwrap();
        let dir = write_model(&tmp.path().join("m"), max_shard, Overwrite::No);
        for mmap in [true, false] {
            let c = Checkpoint::open_with(&dir, OpenOptions { mmap, ..OpenOptions::default() }).unwrap();
            assert_eq!(c.shards().len(), shards);
            assert_eq!(c.names().len(), tensors().len());
            for (s, data) in tensors() {
                let t = c.tensor(&s.name).unwrap();
                assert_eq!((t.dtype, t.shape, t.bytes), (s.dtype, s.shape.as_slice(), data.as_slice()));
                assert_eq!(c.verify_tensor(&s.name).unwrap(), Verified::Yes);
            }
            // Data begin at multiples of 64 bytes in every shard.
            for s in c.shards() {
                let n = u64::from_le_bytes(fs::read(&s.path).unwrap()[..8].try_into().unwrap());
                assert_eq!((n + 8) % 64, 0);
                assert_eq!(s.metadata["format"], "pt");
            }
            assert_eq!(c.manifest().unwrap().provenance["seed"], 7);
        }
        let report = verify(&dir).unwrap();
        assert!(report.is_ok() && report.checksums, "{report}");
        // The reference implementation reads our files.
        for s in Checkpoint::open(&dir).unwrap().shards() {
            let bytes = fs::read(&s.path).unwrap();
            let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, t) in theirs.tensors() {
                let want = tensors().into_iter().find(|(s, _)| s.name == name).unwrap();
                assert_eq!(t.data(), want.1);
            }
        }
    }
}

#[test]
fn same_input_same_bytes() {
    let tmp = tempfile::tempdir().unwrap();
    let (a, b) = (tmp.path().join("a"), tmp.path().join("b"));
    for d in [&a, &b] {
        write_model(d, 150, Overwrite::No);
    }
    for e in fs::read_dir(&a).unwrap() {
        let e = e.unwrap();
        assert_eq!(
            fs::read(e.path()).unwrap(),
            fs::read(b.join(e.file_name())).unwrap(),
            "{:?}",
            e.file_name()
        );
    }
    let c = |d| Checkpoint::open(d).unwrap().content_hash();
    let one = tmp.path().join("one");
    write_model(&one, u64::MAX, Overwrite::No);
    assert_eq!((c(&a), c(&a)), (c(&b), c(&one)), "the content hash does not depend on sharding");
}

fn names(dir: &std::path::Path) -> Vec<String> {
    let mut v: Vec<_> = fs::read_dir(dir)
        .expect("exists")
        .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    v.sort();
    v
}

#[test]
fn nothing_half_written_remains() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("m");
    {
        let mut out = OutputDir::create(&path, Overwrite::No).unwrap();
        out.write_file("config.json", b"{}").unwrap();
        assert!(names(tmp.path())[0].starts_with("m.partial-"));
        let specs = vec![spec("a", Dtype::F32, &[2]), spec("b", Dtype::F32, &[2])];
        let mut w = ShardWriter::new(&mut out, specs, 8, &BTreeMap::new()).unwrap();
        assert!(w.write("b", &[0; 8]).unwrap_err().to_string().contains("`a` is next"));
        assert!(w.write("a", &[0; 9]).unwrap_err().to_string().contains("8 bytes, got at least 9"));
    }
    assert_eq!(names(tmp.path()), Vec::<String>::new());
    let mut out = OutputDir::create(&path, Overwrite::No).unwrap();
    let specs = vec![spec("a", Dtype::F32, &[2]), spec("b", Dtype::F32, &[2])];
    let mut w = ShardWriter::new(&mut out, specs, 8, &BTreeMap::new()).unwrap();
    w.start("a").unwrap();
    w.push(&[0; 4]).unwrap();
    assert!(w.end().unwrap_err().to_string().contains("8 bytes, got 4"));
    drop(out);
    let mut out = OutputDir::create(&path, Overwrite::No).unwrap();
    let w = ShardWriter::new(&mut out, vec![spec("a", Dtype::F32, &[2])], 8, &BTreeMap::new()).unwrap();
    assert!(w.finish().unwrap_err().to_string().contains("`a`"));
    for twice in [
        vec![spec("a", Dtype::U8, &[1]), spec("a", Dtype::U8, &[1])],
        vec![spec("a", Dtype::F64, &[usize::MAX, 2])],
    ] {
        assert!(ShardWriter::new(&mut out, twice, 8, &BTreeMap::new()).is_err());
    }
    assert!(out.write_file("../x", b"").is_err() && out.write_file("a/b", b"").is_err());
    out.write_file("x", b"").unwrap();
    assert!(out.write_file("x", b"").is_err());
    let e = out.check_space(u64::MAX).unwrap_err();
    assert!(matches!(e, Error::NoSpace { needed: u64::MAX, free: 1.., .. }), "{e}");
    out.check_space(1).unwrap();
}

#[test]
fn existing_directories() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("m");
    fs::create_dir(&path).unwrap();
    write_model(&path, 150, Overwrite::No);
    fs::write(path.join("extra.txt"), "x").unwrap();
    let e = OutputDir::create(&path, Overwrite::No).unwrap_err().to_string();
    assert!(e.contains("should not exist yet"), "{e}");
    write_model(&path, u64::MAX, Overwrite::Yes);
    assert_eq!(names(&path), ["config.json", "manifest.json", "model.safetensors"]);
    assert_eq!(names(tmp.path()), ["m"], "the old directory is gone");
    let home = tmp.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("letter.txt"), "dear").unwrap();
    assert!(
        OutputDir::create(&home, Overwrite::Yes)
            .unwrap_err()
            .to_string()
            .contains("does not look like a model")
    );
    assert!(OutputDir::create(home.join("letter.txt"), Overwrite::Yes).is_err());
    // Each kind of directory is replaced by its own kind only.
    let e = OutputDir::create(&path, Overwrite::Holding("calibration.json")).unwrap_err().to_string();
    assert!(e.contains("calibration.json"), "{e}");
    fs::write(home.join("calibration.json"), "{}").unwrap();
    fs::write(home.join("manifest.json"), "{}").unwrap();
    assert!(OutputDir::create(&home, Overwrite::Holding("calibration.json")).is_ok());
    assert!(OutputDir::create(&home, Overwrite::Yes).is_err());
    assert!(
        OutputDir::create(tmp.path().join("no/such/parent"), Overwrite::No)
            .unwrap_err()
            .to_string()
            .contains("no/such")
    );
    assert!(OutputDir::create("/", Overwrite::Yes).is_err());
    // Someone else takes the name while we write.
    let late = tmp.path().join("late");
    let mut out = OutputDir::create(&late, Overwrite::No).unwrap();
    out.write_file("a", b"a").unwrap();
    fs::create_dir(&late).unwrap();
    fs::write(late.join("theirs"), "x").unwrap();
    assert!(out.commit().is_err());
    assert_eq!(names(&late), ["theirs"]);
    // Even if it is a model: nobody allowed it to be replaced.
    fs::remove_file(late.join("theirs")).unwrap();
    let mut out = OutputDir::create(&late, Overwrite::No).unwrap();
    out.write_file("a", b"a").unwrap();
    fs::write(late.join("config.json"), "{}").unwrap();
    assert!(out.commit().unwrap_err().to_string().contains("should not exist yet"));
    assert_eq!(names(&late), ["config.json"]);
}

#[test]
fn tied_embeddings_under_either_name() {
    let tmp = tempfile::tempdir().unwrap();
    let config = |tied: bool| {
        let text = common::CONFIG
            .replace("\"tie_word_embeddings\":true", &format!("\"tie_word_embeddings\":{tied}"));
        ModelConfig::parse(text.as_bytes(), "config.json".as_ref()).unwrap()
    };
    let open = |list: &[(&str, f32)]| {
        let mut h = Vec::new();
        for (i, (n, _)) in list.iter().enumerate() {
            h.push(format!(
                "\"{n}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{},{}]}}",
                4 * i,
                4 * i + 4
            ));
        }
        let data = f32_bytes(&list.iter().map(|(_, v)| *v).collect::<Vec<_>>());
        let path = tmp.path().join("model.safetensors");
        fs::write(&path, file(&format!("{{{}}}", h.join(",")), &data)).unwrap();
        Checkpoint::open(tmp.path()).unwrap()
    };
    let (e, h) = ("model.embed_tokens.weight", "lm_head.weight");
    for (stored, name) in [(vec![(e, 1.0)], e), (vec![(h, 1.0)], h), (vec![(e, 1.0), (h, 1.0)], e)] {
        let c = open(&stored);
        let n = c.embedding_names(&config(true)).unwrap();
        assert!(n.embed == name && n.head == name && n.tied());
        if stored.len() == 1 {
            assert!(c.embedding_names(&config(false)).unwrap_err().to_string().contains("should exist"));
        }
    }
    let c = open(&[(e, 1.0), (h, 2.0)]);
    assert!(c.embedding_names(&config(true)).unwrap_err().to_string().contains("should equal"));
    let n = c.embedding_names(&config(false)).unwrap();
    assert!(n.embed == e && n.head == h && !n.tied());
    assert!(open(&[("x", 0.0)]).embedding_names(&config(true)).is_err());
}

/// A checkpoint of tensors of the first layer, the numbers of each counting from 0; a name is a
/// module's, or ends with `bias`.
fn numbered(dir: &Path, shapes: &[(&str, &[usize])]) -> Checkpoint {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in shapes {
        let (start, n) = (data.len(), shape.iter().product::<usize>());
        data.extend(f32_bytes(&(0..n).map(|i| i as f32).collect::<Vec<_>>()));
        let offsets = [start, data.len()];
        let kind = if name.ends_with("bias") { "" } else { ".weight" };
        header.insert(
            format!("model.layers.0.{name}{kind}"),
            serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets }),
        );
    }
    let bytes = file(&serde_json::Value::from(header).to_string(), &data);
    fs::write(dir.join("model.safetensors"), bytes).expect("a writable place");
    Checkpoint::open(dir).expect("a good file")
}

#[test]
fn experts_have_one_naming() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path();
    let config = |arch: &str| {
        let text = format!(
            r#"{{"model_type":"{arch}","hidden_size":16,"intermediate_size":32,"num_hidden_layers":1,
            "num_attention_heads":2,"vocab_size":8,"num_local_experts":2,"num_experts_per_tok":1}}"#
        );
        ModelConfig::parse(text.as_bytes(), dir).unwrap()
    };
    let write = |shapes: &[(&str, &[usize])]| numbered(dir, shapes);
    let first = |checkpoint: &Checkpoint, name: &str| {
        let name = format!("model.layers.0.mlp.{name}.weight");
        (checkpoint.info(&name).unwrap().shape.clone(), checkpoint.to_f32(&name).unwrap()[0])
    };
    let moe = "block_sparse_moe";
    let granite: [(&str, &[usize]); 3] = [
        ("block_sparse_moe.router.layer", &[2, 16]),
        ("block_sparse_moe.input_linear", &[2, 64, 16]),
        ("block_sparse_moe.output_linear", &[2, 16, 32]),
    ];
    let parted = write(&granite).parted(&config("granitemoe")).unwrap();
    assert_eq!(parted.names().len(), 7);
    for (name, shape, value) in [
        ("gate", [2, 16], 0.0),
        ("experts.0.gate_proj", [32, 16], 0.0),
        ("experts.0.up_proj", [32, 16], 512.0),
        ("experts.1.gate_proj", [32, 16], 1024.0),
        ("experts.1.up_proj", [32, 16], 1536.0),
        ("experts.0.down_proj", [16, 32], 0.0),
        ("experts.1.down_proj", [16, 32], 512.0),
    ] {
        assert_eq!(first(&parted, name), (shape.to_vec(), value), "{name}");
    }
    let short = [("block_sparse_moe.input_linear", &[2, 60, 16][..])];
    let said = write(&short).parted(&config("granitemoe")).unwrap_err().to_string();
    assert!(said.contains("should have 128 rows by config.json, got 120"), "{said}");

    let [gate, w1, w2, w3] =
        ["gate", "experts.1.w1", "experts.1.w2", "experts.1.w3"].map(|n| format!("{moe}.{n}"));
    let shapes: [(&str, &[usize]); 4] =
        [(&gate, &[2, 16]), (&w1, &[32, 16]), (&w2, &[16, 32]), (&w3, &[32, 8])];
    let renamed = write(&shapes).parted(&config("mixtral")).unwrap();
    for (name, shape) in [
        ("gate", [2, 16]),
        ("experts.1.gate_proj", [32, 16]),
        ("experts.1.up_proj", [32, 8]),
        ("experts.1.down_proj", [16, 32]),
    ] {
        assert_eq!(first(&renamed, name).0, shape, "{name}");
    }
    let twice = [shapes[0], ("mlp.gate", &[2, 16][..])];
    let said = write(&twice).parted(&config("mixtral")).unwrap_err().to_string();
    assert!(said.contains("`model.layers.0.mlp.gate.weight` should be stored once"), "{said}");
}

#[test]
fn fused_tensors_are_parted() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path();
    let config = |arch: &str| {
        let text = format!(
            r#"{{"model_type":"{arch}","hidden_size":4,"intermediate_size":3,"num_hidden_layers":1,
            "num_attention_heads":2,"num_key_value_heads":1,"vocab_size":8}}"#
        );
        ModelConfig::parse(text.as_bytes(), dir).unwrap()
    };
    let write = |shapes: &[(&str, &[usize])]| numbered(dir, shapes);
    let (qkv, gate_up): (&[usize], &[usize]) = (&[8, 4], &[6, 4]);
    let whole = [("self_attn.qkv_proj", qkv), ("mlp.gate_up_proj", gate_up)];
    let parted = write(&whole).parted(&config("phi3")).unwrap();
    for (part, first, shape) in [
        ("self_attn.q_proj", 0.0, [4, 4]),
        ("self_attn.k_proj", 16.0, [2, 4]),
        ("self_attn.v_proj", 24.0, [2, 4]),
        ("mlp.gate_proj", 0.0, [3, 4]),
        ("mlp.up_proj", 12.0, [3, 4]),
    ] {
        let name = format!("model.layers.0.{part}.weight");
        assert_eq!(parted.info(&name).unwrap().shape, shape, "{part}");
        let values = parted.to_f32(&name).unwrap();
        assert_eq!(values[0], first, "{part}");
        assert!(values.is_sorted_by(|a, b| a + 1.0 == *b), "{part}");
    }
    assert_eq!(parted.names().len(), 5);
    // The language model beside an image encoder, by either name of it.
    let gemma = config("gemma3_text");
    for (prefix, config) in [
        ("language_model.model", &gemma),
        ("model.language_model", &gemma),
        ("language_model.model", &config("mistral")),
        ("model.text_model", &config("llama")),
    ] {
        let name = |rest: &str| format!("{prefix}.layers.0.{rest}");
        let header = serde_json::json!({ name("mlp.up_proj.weight"): { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] },
            "vision_tower.x": { "dtype": "F32", "shape": [1], "data_offsets": [4, 8] } });
        fs::write(dir.join("model.safetensors"), file(&header.to_string(), &f32_bytes(&[1.0, 2.0]))).unwrap();
        let names: Vec<String> =
            Checkpoint::open(dir).unwrap().parted(config).unwrap().names().map(str::to_owned).collect();
        assert_eq!(names, ["model.layers.0.mlp.up_proj.weight", "vision_tower.x"]);
    }
    let twice = serde_json::json!({ "language_model.x": { "dtype": "F32", "shape": [1], "data_offsets": [0, 4] },
        "x": { "dtype": "F32", "shape": [1], "data_offsets": [4, 8] } });
    fs::write(dir.join("model.safetensors"), file(&twice.to_string(), &f32_bytes(&[1.0, 2.0]))).unwrap();
    let e = Checkpoint::open(dir).unwrap().parted(&gemma).unwrap_err().to_string();
    assert!(e.contains("`x` should be stored once") && e.contains("model.safetensors"), "{e}");
    // Other models keep what they have, and what is parted already stays.
    assert!(
        write(&whole).parted(&config("llama")).unwrap().contains("model.layers.0.mlp.gate_up_proj.weight")
    );
    assert_eq!(write(&[("mlp.up_proj", &[3, 4])]).parted(&config("phi3")).unwrap().names().len(), 1);
    for (shapes, words) in [
        (&[("self_attn.qkv_proj", &[9usize, 4][..])][..], "should have 8 rows by config.json, got 9"),
        (&[("self_attn.qkv_proj", &[32])], "a matrix of 8 rows"),
        (&[("mlp.gate_up_proj", &[6, 4]), ("mlp.up_proj", &[3, 4])], "should not be stored beside"),
        (&[("mlp.gate_up_proj", &[6, 4]), ("mlp.gate_up_proj.bias", &[6])], "has no biases"),
    ] {
        let e = write(shapes).parted(&config("phi3")).unwrap_err().to_string();
        assert!(e.contains("model.safetensors") && e.contains(words), "{e}");
    }
}

/// A file of one matrix of 8-bit floats, all 1, with scales 2, 3, ...
fn coded(
    path: &Path,
    name: &str,
    shape: &[usize],
    scales: Option<(&str, &[usize])>,
) -> Result<Checkpoint, Error> {
    let count = shape.iter().product::<usize>();
    let mut data = vec![0x38; count];
    let mut header = json!({ name: { "dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, count] } });
    if let Some((end, shape)) = scales {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| 2.0 + i as f32).collect();
        data.extend(f32_bytes(&values));
        header[format!("{name}{end}")] =
            json!({ "dtype": "F32", "shape": shape, "data_offsets": [count, data.len()] });
    }
    fs::write(path, file(&header.to_string(), &data)).expect("a temporary directory");
    Checkpoint::open(path)
}

#[test]
fn numbers_of_8_bits_have_scales() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model.safetensors");
    let (name, fused) = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight");
    let (rows, cols) = (130, 257);
    type Which = fn(usize, usize) -> usize;
    let scale_of: [(&str, &[usize], Which); 6] = [
        ("_scale_inv", &[], |_, _| 0),
        ("_scale", &[1], |_, _| 0),
        ("_scale", &[1, 1], |_, _| 0),
        ("_scale", &[130], |r, _| r),
        ("_scale", &[130, 1], |r, _| r),
        ("_scale_inv", &[2, 3], |r, c| r / 128 * 3 + c / 128),
    ];
    for (end, shape, which) in scale_of {
        let opened = coded(&path, name, &[rows, cols], Some((end, shape))).unwrap();
        assert_eq!(opened.names().collect::<Vec<_>>(), [name], "scales are no tensors");
        let want = |r: usize, c: usize| 2.0 + which(r, c) as f32;
        let all = opened.to_f32(name).unwrap();
        assert!(all.iter().enumerate().all(|(i, &w)| w == want(i / cols, i % cols)), "{end} {shape:?}");
        let mut some = vec![0.0; 2 * cols];
        opened.rows_f32_into(name, 127..129, &mut some).unwrap();
        assert!(
            some.iter().enumerate().all(|(i, &w)| w == want(127 + i / cols, i % cols)),
            "{end} {shape:?}"
        );
        let mut part = [0.0; 9];
        opened.tensor(name).unwrap().row_into(128, 125..134, &mut part);
        assert!(part.iter().zip(125..).all(|(&w, c)| w == want(128, c)), "{end} {shape:?}");

        // Parts of a fused matrix keep theirs.
        let config = ModelConfig::parse(
            br#"{"model_type": "phi3", "hidden_size": 257, "intermediate_size": 65, "num_attention_heads": 1, "head_dim": 2,
                "num_hidden_layers": 1, "vocab_size": 8}"#,
            Path::new("config.json"),
        );
        let parted =
            coded(&path, fused, &[rows, cols], Some((end, shape))).unwrap().parted(&config.unwrap()).unwrap();
        let up = parted.to_f32(name).unwrap();
        assert!(up.iter().enumerate().all(|(i, &w)| w == want(65 + i / cols, i % cols)), "{end} {shape:?}");
    }
    let hash = |scale: &[usize]| coded(&path, name, &[1, 4], Some(("_scale", scale))).unwrap().content_hash();
    assert_eq!(hash(&[1]), hash(&[1, 1]), "the digest is of numbers");

    // One that is the scale of another has none itself, and what belongs to activations is no
    // weight.
    let all = ["a", "a_scale", "a_scale_scale", "b.input_scale"]
        .map(|name| (name.to_owned(), json!({ "dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1] })));
    for (i, mut all) in std::iter::repeat_n(serde_json::Map::from_iter(all), 4).enumerate() {
        let _ = all.remove(["", "a_scale_scale", "a_scale", "a"][i]);
        all.iter_mut().enumerate().for_each(|(at, (_, info))| info["data_offsets"] = json!([at, at + 1]));
        fs::write(&path, file(&json!(all).to_string(), &vec![0x38; all.len()])).unwrap();
        let opened = Checkpoint::open(&path).map(|c| c.names().map(str::to_owned).collect::<Vec<_>>());
        match i {
            0 => assert!(opened.unwrap_err().to_string().contains("a_scale_scale")),
            1 => assert_eq!(opened.unwrap(), ["a"]),
            3 => assert_eq!(opened.unwrap(), ["a_scale"]),
            _ => assert!(opened.unwrap_err().to_string().contains("_scale_inv`")),
        }
    }
    // Matrices in a pile may share one scale, no more.
    let pile = coded(&path, "x", &[2, 3, 4], Some(("_scale", &[]))).unwrap();
    assert_eq!(pile.to_f32("x").unwrap(), [2.0; 24]);

    let said = |shape: &[usize], scales| coded(&path, name, shape, scales).unwrap_err().to_string();
    let without = said(&[4, 4], None);
    assert!(without.contains(name) && without.contains("_scale_inv`"), "{without}");
    let message = said(&[2, 3, 4], Some(("_scale", &[2, 1])));
    assert!(message.contains("one number for") && message.contains("no matrix, got [2, 1]"), "{message}");
    for bad in [&[2usize, 2][..], &[3], &[4, 2], &[1, 4], &[0], &[2, 3, 1]] {
        let message = said(&[4, 300], Some(("_scale_inv", bad)));
        let named = message.contains("up_proj.weight_scale_inv") && message.contains(&format!("{bad:?}"));
        assert!(named && message.contains("[1, 3] (one for each 128 x 128"), "{message}");
    }
}

#[test]
fn real_models() {
    for (name, count, embed) in
        [("demo", 2_755_008, "model.embed_tokens.weight"), ("TinyStories-656K", 656_000, "lm_head.weight")]
    {
        let Some(dir) = shared_model(name) else {
            skipped(name);
            continue;
        };
        let c = Checkpoint::open(&dir).unwrap();
        let config = ModelConfig::from_dir(&dir).unwrap();
        let total: usize = c.iter().map(|(_, i)| i.elements()).sum();
        assert!(total.abs_diff(count) < 1000, "{name}: {total}");
        assert_eq!(c.embedding_names(&config).unwrap().embed, embed);
        c.expect_shape(embed, &[config.vocab_size, config.hidden_size]).unwrap();
        for i in 0..config.num_hidden_layers() {
            let k = format!("model.layers.{i}.self_attn.k_proj.weight");
            c.expect_shape(&k, &[config.kv_dim(), config.hidden_size]).unwrap();
        }
        for n in c.names() {
            assert!(c.to_f32(n).unwrap().iter().any(|&v| v != 0.0), "{n}");
            assert_eq!(c.verify_tensor(n).unwrap(), Verified::NoManifest);
        }
        let report = verify(&dir).unwrap();
        assert!(report.is_ok() && !report.checksums, "{report}");
    }
}

/// Writes the tensors of the common model into a resumable directory, giving up after `stop` of
/// them.
fn resumable_run(path: &std::path::Path, max_shard: u64, resume: bool, stop: usize) -> Option<usize> {
    let mut dir = match OutputDir::resumable(path, Overwrite::No, "key", resume).expect("a sound run") {
        Resumable::New(dir) | Resumable::Continued(dir) => dir,
        Resumable::Finished(_) => return None,
    };
    let specs = tensors().into_iter().map(|(s, _)| s).collect();
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let mut writer = ShardWriter::new(&mut dir, specs, max_shard, &metadata).expect("a sound run");
    let steps = writer.resume().expect("a sound run");
    let done = steps.len();
    assert!(steps.iter().enumerate().all(|(i, s)| s == &serde_json::json!({ "tensor": i })));
    for (i, (spec, data)) in tensors().into_iter().enumerate().skip(done) {
        if i == stop {
            // Half a tensor more than was recorded.
            writer.start(&spec.name).expect("a sound run");
            writer.push(&data[..data.len() / 2]).expect("a sound run");
            return Some(done);
        }
        writer.write(&spec.name, &data).expect("a sound run");
        writer.checkpoint(serde_json::json!({ "tensor": i })).expect("a sound run");
    }
    writer.finish().expect("a sound run");
    dir.write_file("config.json", b"{}").expect("a sound run");
    fs::write(dir.scratch("scratch"), b"gone in the end").expect("a sound run");
    dir.write_manifest(serde_json::json!({})).expect("a sound run");
    dir.commit().expect("a sound run");
    Some(done)
}

fn contents(dir: &std::path::Path) -> BTreeMap<String, Vec<u8>> {
    let read = |e: fs::DirEntry| {
        (e.file_name().into_string().expect("a sound run"), fs::read(e.path()).expect("a sound run"))
    };
    fs::read_dir(dir).expect("a sound run").map(|e| read(e.expect("a sound run"))).collect()
}

#[test]
fn an_interrupted_directory_is_continued_to_the_same_bytes() {
    for max_shard in [u64::MAX, 150, 1] {
        let tmp = tempfile::tempdir().unwrap();
        let whole = tmp.path().join("whole");
        resumable_run(&whole, max_shard, false, usize::MAX);
        assert_eq!(names(tmp.path()), ["whole"]);
        let want = contents(&whole);
        for stop in 1..tensors().len() {
            let path = tmp.path().join(format!("m{stop}"));
            assert_eq!(resumable_run(&path, max_shard, false, stop), Some(0));
            let left = leftovers(&path);
            assert!(left.len() == 1 && left[0].resumable && !path.exists(), "{left:?}");
            // Another run does not take it, and neither does one that does not ask.
            let Resumable::New(other) = OutputDir::resumable(&path, Overwrite::No, "other", true).unwrap()
            else {
                panic!("another key")
            };
            drop(other);
            assert_eq!(leftovers(&path), left);
            // Interrupted once more, then done.
            assert_eq!(resumable_run(&path, max_shard, true, stop + 1), Some(stop));
            if !path.exists() {
                assert_eq!(resumable_run(&path, max_shard, true, usize::MAX), Some(stop + 1));
            }
            assert!(contents(&path) == want, "stopped after {stop}");
            assert_eq!(leftovers(&path), []);
        }
    }
}

/// In the shard that is being written and in those that are finished.
#[test]
fn a_changed_leftover_is_refused() {
    let tmp = tempfile::tempdir().unwrap();
    for max_shard in [u64::MAX, 150, 1] {
        let path = tmp.path().join(format!("m{max_shard}"));
        let stop = tensors().len() - 1;
        resumable_run(&path, max_shard, false, stop);
        let left = leftovers(&path).remove(0).path;
        let data = left.join("data");
        let resume = || {
            let Resumable::Continued(mut dir) =
                OutputDir::resumable(&path, Overwrite::No, "key", true).unwrap()
            else {
                panic!("ours")
            };
            let specs = tensors().into_iter().map(|(s, _)| s).collect();
            let metadata = [("format".to_owned(), "pt".to_owned())].into();
            ShardWriter::new(&mut dir, specs, max_shard, &metadata).unwrap().resume()
        };
        assert_eq!(resume().unwrap().len(), stop);
        let all = contents(&data);
        let last = all.keys().next_back().cloned();
        for (name, bytes) in all {
            let mut refused = Vec::new();
            for bit in (0..8 * bytes.len()).step_by(13) {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                fs::write(data.join(&name), damaged).unwrap();
                refused.push(match resume() {
                    Ok(steps) => steps.len() != stop,
                    Err(e) => e.to_string().contains("changed or damaged"),
                });
            }
            // A shard that was begun behind the last step is written anew.
            let anew = Some(&name) == last.as_ref() && !refused.contains(&true);
            assert!(anew || !refused.contains(&false), "{name}, {max_shard}: {refused:?}");
            fs::write(data.join(&name), bytes).unwrap();
        }
        assert_eq!(resume().unwrap().len(), stop);
    }
}

/// What nothing needs is no reason to refuse what is there.
#[test]
fn tensors_that_nothing_needs_may_be_anything() {
    let entry = |dtype: &str, shape: &str, from: usize, to: usize| {
        format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{from},{to}]}}")
    };
    let place = tempfile::tempdir().unwrap();
    let header = format!("{{\"w\":{},\"odd\":{}}}", entry("F32", "[1]", 0, 4), entry("F8_E5M2", "[3]", 4, 7));
    std::fs::write(place.path().join("model-00001-of-00002.safetensors"), file(&header, &[0; 7])).unwrap();
    let map = |entries: &str| {
        let index = format!("{{\"weight_map\":{{{entries}}}}}");
        std::fs::write(place.path().join("model.safetensors.index.json"), index).unwrap();
        Checkpoint::open(place.path())
    };
    const ONE: &str = "model-00001-of-00002.safetensors";
    let c = map(&format!("\"w\":\"{ONE}\",\"odd\":\"{ONE}\"")).unwrap();
    assert!(c.to_f32("w").is_ok() && c.notes().is_empty(), "{:?}", c.notes());
    let e = c.to_f32("odd").unwrap_err().to_string();
    assert!(e.contains("`odd`") && e.contains("F8_E5M2"), "{e}");
    // The index lists more, or less.
    let c = map(&format!("\"w\":\"{ONE}\",\"x.inv_freq\":\"{ONE}\"")).unwrap();
    assert!(c.notes()[0].contains("x.inv_freq"), "{:?}", c.notes());
    let e = c.to_f32("x.inv_freq").unwrap_err().to_string();
    assert!(e.contains("does not hold it") && e.contains(ONE), "{e}");
    let c = map(&format!("\"odd\":\"{ONE}\"")).unwrap();
    assert!(c.to_f32("w").is_ok() && c.notes()[0].contains("`w`"), "{:?}", c.notes());
    // A shard of an encoder of images was not fetched; one of the language model should have been.
    const TWO: &str = "model-00002-of-00002.safetensors";
    let c = map(&format!("\"w\":\"{ONE}\",\"vision_tower.x\":\"{TWO}\"")).unwrap();
    assert!(c.notes()[0].contains(TWO), "{:?}", c.notes());
    let e = map(&format!("\"w\":\"{ONE}\",\"model.layers.0.x\":\"{TWO}\"")).unwrap_err().to_string();
    assert!(e.contains(TWO) && e.contains("should exist"), "{e}");
}

/// Embedding models and adapters store the same tensors under other names.
#[test]
fn names_with_and_without_prefixes() {
    let config = fracbit_io::ModelConfig::parse(common::CONFIG.as_bytes(), "config.json".as_ref()).unwrap();
    let names = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight"];
    for (prefix, head) in [
        ("", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("base_model.model.model.", "base_model.model.lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
    ] {
        let place = tempfile::tempdir().unwrap();
        let all = names
            .map(|name| format!("{prefix}{name}"))
            .into_iter()
            .chain([head.to_owned(), "other.layers.0.x".to_owned()]);
        let entries: Vec<String> = all
            .map(|name| format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
            .collect();
        std::fs::write(
            place.path().join("model.safetensors"),
            file(&format!("{{{}}}", entries.join(",")), b""),
        )
        .unwrap();
        let c = Checkpoint::open(place.path()).unwrap().parted(&config).unwrap();
        for name in names {
            assert!(c.contains(&format!("model.{name}")), "{prefix}: {:?}", c.names().collect::<Vec<_>>());
        }
        assert!(c.contains("lm_head.weight") && c.contains("other.layers.0.x"), "{prefix}");
    }
}
