//! Checkpoints as GGUF files: what is written is what was there, and what the Python package reads.

use std::path::{Path, PathBuf};
use std::process::Command;

use fracbit::{ExportOptions, ExportType, Opened, Quiet, export};
use fracbit_io::Dtype;

fn reference(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(path)
}

fn write(model: &Path, out: &Path, kind: ExportType) -> Result<fracbit::ExportReport, fracbit::Error> {
    export(&Opened::new(model)?, out, &ExportOptions { kind, force: false, calibration: None }, &Quiet)
}

/// Power of the difference, as a share of that of the first.
fn lost(a: &[f32], b: &[f32]) -> f32 {
    let power = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>();
    power(&mut a.iter().zip(b).map(|(a, b)| a - b)) / power(&mut a.iter().copied()).max(f32::MIN_POSITIVE)
}

#[test]
fn a_model_is_exported_and_read_again() {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["llama3", "smollm2", "qwen3-moe", "granite-moe", "phi3", "glm4", "olmo3"] {
        let model = reference(&format!("models/{name}"));
        let original = Opened::new(&model).expect("a good model");
        for kind in ExportType::ALL {
            let out = dir.path().join(format!("{name}-{kind}.gguf"));
            let report = write(&model, &out, kind).unwrap_or_else(|e| panic!("{name}, {kind}: {e}"));
            let read = Opened::new(&out).unwrap_or_else(|e| panic!("{name}, {kind}: {e}"));
            assert_eq!(read.params(), original.params(), "{name}");
            let factors: u64 =
                std::fs::metadata(&out).expect("it was written").len().saturating_sub(read.bytes().0);
            assert!(factors > 0 && report.bytes.0 >= read.bytes().0, "{name}: all tensors are counted");
            for tensor in read.checkpoint.names() {
                let stored = if original.checkpoint.contains(tensor) { tensor } else { "lm_head.weight" };
                let got = read.checkpoint.to_f32(tensor).expect("finite weights");
                let want = original.checkpoint.to_f32(stored).expect("finite weights");
                let limit = match read.checkpoint.info(tensor).expect("it is there").dtype {
                    Dtype::F32 => 1e-13,
                    Dtype::F16 => 1e-6,
                    Dtype::Blocks(b) => match b.name() {
                        "Q8_0" => 1e-4,
                        "Q5_0" => 0.003,
                        _ => 0.012,
                    },
                    other => panic!("{tensor} of {other}"),
                };
                let lost = lost(&want, &got);
                assert!(lost <= limit, "{name}, {kind}: {tensor} lost {lost}");
            }
            // Of the same type already: nothing is rounded again, not a byte differs.
            let again = dir.path().join("again.gguf");
            write(&out, &again, kind).expect("a GGUF file is a source");
            let second = Opened::new(&again).expect("a GGUF file is a model");
            for tensor in read.checkpoint.names() {
                let [a, b] = [&read, &second].map(|o| o.checkpoint.tensor(tensor).expect("it is there"));
                assert!(a.dtype == b.dtype && a.bytes == b.bytes, "{name}, {kind}: {tensor}");
            }
            std::fs::remove_file(again).expect("it is there");
            let e = write(&model, &out, kind).expect_err("the name is taken").to_string();
            assert!(e.contains("exists already"), "{e}");
        }
    }
}

/// `FRACBIT_GGUF_PYTHON`: a Python 3 that has the package `gguf` (0.19) and numpy.
#[test]
fn the_python_package_reads_what_is_exported() {
    #[expect(clippy::disallowed_methods, reason = "names a program of a check that most machines cannot do")]
    let Ok(python) = std::env::var("FRACBIT_GGUF_PYTHON") else {
        say("SKIPPED: FRACBIT_GGUF_PYTHON names no Python with the package gguf");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["llama3", "smollm2", "llama2"] {
        let model = reference(&format!("models/{name}"));
        for kind in ExportType::ALL {
            let out = dir.path().join(format!("{name}-{kind}.gguf"));
            write(&model, &out, kind).unwrap_or_else(|e| panic!("{name}, {kind}: {e}"));
            let checked = Command::new(&python)
                .arg(reference("gguf_check.py"))
                .args([&out, &model])
                .output()
                .expect("FRACBIT_GGUF_PYTHON runs");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));
            say(text(&checked.stdout).trim());
        }
    }
}

#[expect(clippy::print_stderr, reason = "what was skipped or compared must be visible")]
fn say(line: &str) {
    eprintln!("{line}");
}

#[test]
fn what_cannot_be_exported_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let kind = ExportType::ALL[0];
    let e =
        write(&reference("models/mistral"), &dir.path().join("m.gguf"), kind).expect_err("it has windows");
    assert!(e.to_string().contains("`sliding_window`"), "{e}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("it is there").count(), 0, "nothing is left behind");
}
