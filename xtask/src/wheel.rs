//! The wheel of the Python package: made, and tested in a virtual environment of its own.

use crate::{Outcome, gpu, root, run, setup};
use std::{
    fs,
    path::{Path, PathBuf},
};

const MATURIN: &str = "maturin==1.16.0";
const WHEEL: &str = "wheel==0.48.0";
/// What the tests want beside the wheel: numpy, which it depends on, and bars of progress.
const TESTED_WITH: [&str; 2] = ["numpy==2.2.6", "tqdm==4.70.1"];
/// What runs the example and draws its plots.
const NOTEBOOK: [&str; 3] = ["matplotlib==3.11.2", "nbclient==0.11.0", "ipykernel==7.4.0"];
const CRATE: &str = "crates/fracbit-python";

/// Builds the wheel as it is given to others, by maturin, and tests it.
pub(crate) fn run_release() -> Outcome {
    setup::compiler()?;
    let Some(python) = setup::python_with("maturin", &[MATURIN])? else {
        return Err(format!("install maturin with:\n  {}", venv(MATURIN)));
    };
    let out = fresh("target/wheel")?;
    let manifest = format!("{CRATE}/Cargo.toml");
    let args =
        ["-m", "maturin", "build", "--release", "--strip", "--manifest-path", &manifest, "--out", &out];
    run(&python, &args, &[])?;
    test(&out)?;
    println!("wheel: pip install {}", wheel_in(&out)?.display());
    Ok(())
}

/// Packs the library that the tests of the workspace were built with, and tests that wheel. maturin
/// would build the package alone, whose dependencies have other features than those of the
/// workspace, and so half of the workspace once more; it only writes the metadata here. `env` is
/// that of the tests' build.
pub(crate) fn run_tests(env: &[(&str, &str)]) -> Outcome {
    // Without a network nothing is installed.
    let Ok(Some(python)) = setup::python_with("maturin, wheel", &[MATURIN, WHEEL]) else {
        println!("skipped: the Python package ({} {WHEEL})", venv(MATURIN));
        return Ok(());
    };
    // Both modes of the workspace's targets: features are then those of `cargo test --workspace`.
    run("cargo", &["build", "--workspace", "--lib", "--tests", "--profile", "test"], env)?;
    let out = fresh("target/wheel")?;
    let unpacked = Path::new(&out).join("unpacked");
    let package = unpacked.join("fracbit");
    copy(&root().join(CRATE).join("python/fracbit"), &package)?;
    let library = gpu::target()?.join("debug/libfracbit_python.so");
    copy_file(&library, &package.join("_fracbit.abi3.so"))?;
    let unpacked = unpacked.display().to_string();
    let manifest = format!("{CRATE}/Cargo.toml");
    let metadata = ["-m", "maturin", "pep517", "write-dist-info", "--manifest-path", &manifest];
    run(&python, &[&metadata[..], &["--metadata-directory", &unpacked]].concat(), &[])?;
    run(&python, &["-m", "wheel", "pack", &unpacked, "--dest-dir", &out], &[])?;
    test(&out)
}

/// Installs the wheel of a folder in a new virtual environment, runs its tests there, then the
/// example.
fn test(folder: &str) -> Outcome {
    let wheel = wheel_in(folder)?.display().to_string();
    let home = format!("{folder}/venv");
    if run("python3", &["-m", "venv", &home], &[]).is_err() {
        println!("skipped: python3 cannot make a virtual environment here (apt-get install python3-venv)");
        return Ok(());
    }
    let python = format!("{home}/bin/python");
    let pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"];
    run(&python, &[&pip[..], &["--no-index", "--no-deps", &wheel]].concat(), &[])?;
    if run(&python, &[&pip[..], &TESTED_WITH].concat(), &[]).is_err() {
        println!("skipped: tests of the wheel, which want {}", TESTED_WITH.join(" and "));
        return Ok(());
    }
    let tests = format!("{CRATE}/tests");
    run(&python, &["-m", "unittest", "discover", "--start-directory", &tests], &[])?;
    if run(&python, &[&pip[..], &NOTEBOOK].concat(), &[]).is_err() {
        println!("skipped: the example notebook, which wants {}", NOTEBOOK.join(", "));
        return Ok(());
    }
    let script = format!("{CRATE}/examples/run.py");
    run(&python, &[&script, &format!("{folder}/schemes.ipynb")], &[])
}

/// How to get a package for the project's own environment.
fn venv(package: &str) -> String {
    format!("python3 -m venv .venv && .venv/bin/pip install {package}")
}

/// An empty folder within the workspace.
fn fresh(name: &str) -> Result<String, String> {
    let path = root().join(name);
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if path.exists() {
        fs::remove_dir_all(&path).map_err(failed)?;
    }
    fs::create_dir_all(&path).map_err(failed)?;
    Ok(path.display().to_string())
}

/// The one wheel of a folder.
fn wheel_in(folder: &str) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.find(|path| path.extension().is_some_and(|end| end == "whl")).ok_or(format!("{folder}: no wheel"))
}

/// Copies the files of a folder, what Python has compiled aside.
fn copy(from: &Path, to: &Path) -> Outcome {
    let failed = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(failed)?;
    for entry in fs::read_dir(from).map_err(failed)?.flatten().filter(|entry| entry.path().is_file()) {
        copy_file(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> Outcome {
    fs::copy(from, to).map(drop).map_err(|error| format!("{}: {error}", from.display()))
}
