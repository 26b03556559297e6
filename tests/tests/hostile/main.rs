//! Bad input, table by table: each case builds it, and says which file, tensor and rule the error
//! must name.
//!
//! Three things hold in every case: an error and no panic; the words that lead to the fault; and
//! nothing under the final name of a directory that could not be finished. Headers, indices and
//! configurations are attacked one by one in `fracbit-io`'s own tests; here it is whole directories
//! and the verbs on them.

mod checkpoint;
mod documents;
mod mutated;
mod output;
mod quantized;

use fracbit_tests::{Source, reference};
use std::{
    fmt::Display,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The error of a verb on bad input.
fn refused<T, E: Display>(what: &str, outcome: Result<T, E>) -> String {
    match outcome {
        Ok(_) => panic!("{what}: it was accepted"),
        Err(error) => error.to_string(),
    }
}

/// The error, which must contain every word.
fn refused_with<T, E: Display>(what: &str, outcome: Result<T, E>, words: &[&str]) {
    let text = refused(what, outcome);
    for word in words {
        assert!(text.contains(word), "{what}: `{word}` should be in: {text}");
    }
}

/// Names in a directory, sorted.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a readable directory");
    let name = |e: std::io::Result<fs::DirEntry>| e.expect("a readable directory").file_name();
    let mut all: Vec<String> = entries.map(|e| name(e).to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

/// A good quantized directory with biases, norms (folding would take them away), odd widths, four
/// families and a half-precision matrix. Made once.
fn good() -> &'static Path {
    static GOOD: OnceLock<PathBuf> = OnceLock::new();
    GOOD.get_or_init(|| {
        let source = Source::open(&reference("llama-bias").dir, fracbit_model::RotationMode::Online, 3)
            .expect("a good checkpoint");
        let mut plan = source.uniform("nuq-4").expect("no budget to miss");
        for (module, storage) in [
            ("model.layers.0.self_attn.q_proj", "tcq-2"),
            ("model.layers.0.self_attn.k_proj", "vq-3"),
            ("model.layers.0.self_attn.v_proj", "half-tcq-2.25"),
            ("model.layers.0.self_attn.o_proj", "f16"),
        ] {
            let layer = plan.layers.iter_mut().find(|l| l.name == module).expect("a module of the model");
            layer.scheme = storage.parse().expect("a storage name");
        }
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile");
        fs::create_dir_all(&place).expect("cargo's temporary directory");
        let out = place.join("good");
        source.quantize(&plan, &out, true).expect("a good plan");
        out
    })
}

/// A copy of a directory that may be damaged.
fn copy(of: &Path) -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in fracbit_tests::files(of) {
        fs::write(place.path().join(name), bytes).expect("a writable place");
    }
    place
}
