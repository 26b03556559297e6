//! Small files and directories for the tests.
#![allow(dead_code, reason = "each test crate uses its own part of the helpers")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fracbit_io::{Dtype, OutputDir, Overwrite, ShardWriter, TensorSpec};

/// A safetensors file of this header and these data.
pub(crate) fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out
}

/// Little-endian bytes of floats.
pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// The tensors of the tiny model, with data that differ from byte to byte.
pub(crate) fn tensors() -> Vec<(TensorSpec, Vec<u8>)> {
    let list = [
        spec("model.embed_tokens.weight", Dtype::F32, &[8, 4]),
        spec("model.norm.weight", Dtype::Bf16, &[4]),
        spec("model.layers.0.mlp.up_proj.weight", Dtype::F16, &[6, 4]),
        spec("codes", Dtype::U8, &[3, 5]),
        spec("empty", Dtype::F32, &[0, 4]),
    ];
    let fill = |t: &TensorSpec| {
        let n = usize::try_from(t.bytes().expect("tiny")).expect("tiny");
        // The high byte of every float stays small, so that all are finite.
        (0..n).map(|i| if (i + 1) % t.dtype.block_bytes() == 0 { 60 } else { (i * 37 % 251) as u8 }).collect()
    };
    list.into_iter()
        .map(|t| {
            let data = fill(&t);
            (t, data)
        })
        .collect()
}

pub(crate) const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":4,
 "intermediate_size":6,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":8,"tie_word_embeddings":true}"#;

/// Writes the tiny model through the crate's own writer.
pub(crate) fn write_model(path: &Path, max_shard: u64, overwrite: Overwrite) -> PathBuf {
    let mut out = OutputDir::create(path, overwrite).expect("the parent is a fresh temporary directory");
    out.write_file("config.json", CONFIG.as_bytes()).expect("config");
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let list = tensors();
    let specs = list.iter().map(|(s, _)| s.clone()).collect();
    let mut w = ShardWriter::new(&mut out, specs, max_shard, &metadata).expect("a sane list");
    w.check_space(0).expect("a kilobyte is free");
    for (s, data) in &list {
        w.write(&s.name, data).expect("in order");
    }
    w.finish().expect("all written");
    out.write_manifest(serde_json::json!({"seed": 7, "rate": 3.25, "source": "tests"})).expect("manifest");
    out.commit().expect("commit")
}

/// A directory of `../shared/models`, which is not part of the repository.
pub(crate) fn shared_model(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    path.join("config.json").exists().then_some(path)
}

/// Says that a test did nothing.
#[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
pub(crate) fn skipped(name: &str) {
    eprintln!("SKIPPED: ../shared/models/{name} is not there");
}
