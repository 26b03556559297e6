//! Parity and speed on a GPU, by one command.
//!
//! Everything is made here and packed into `target/gpu`: the programs with their kernels, the
//! PyTorch script, the script that runs all. The folder can travel to a machine with a driver and
//! no compiler.

use crate::{Outcome, root};
use std::{fs, process::Command};

/// Packs `target/gpu`, and runs it when this machine has a GPU and `pack_only` is not set.
pub(crate) fn run(pack_only: bool) -> Outcome {
    crate::kernels::ensure()?;
    let example = ["--package", "fracbit-kernels-cuda", "--features", "cuda", "--example", "cuda_check"];
    crate::run("cargo", &[&["build", "--release"], example.as_slice()].concat(), &[])?;
    crate::run("cargo", &["build", "--release", "--package", "fracbit-cli", "--features", "cuda"], &[])?;
    let built = target()?.join("release");
    let pack = root().join("target/gpu");
    fs::create_dir_all(&pack).map_err(|e| format!("{}: {e}", pack.display()))?;
    let scripts = root().join("kernels/cuda/run");
    for (from, name) in [
        (built.join("examples/cuda_check"), "cuda_check"),
        (built.join("fracbit"), "fracbit"),
        (scripts.join("dense.py"), "dense.py"),
        (scripts.join("run.sh"), "run.sh"),
    ] {
        fs::copy(&from, pack.join(name)).map_err(|e| format!("{}: {e}", from.display()))?;
    }
    println!("gpu: packed {}", pack.display());
    let here = Command::new("nvidia-smi").output().is_ok_and(|out| out.status.success());
    if pack_only || !here {
        println!(
            "gpu: copy that folder to a machine with an NVIDIA driver (580 or later) and run `sh run.sh` in it"
        );
        return Ok(());
    }
    crate::run("sh", &[&pack.join("run.sh").display().to_string()], &[])
}

/// Where cargo puts what it builds.
pub(crate) fn target() -> Result<std::path::PathBuf, String> {
    let out = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root())
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let folder = text.split("\"target_directory\":\"").nth(1).and_then(|rest| rest.split('"').next());
    Ok(folder.ok_or("cargo metadata names no target directory")?.into())
}
