//! Unsafe code under Miri, which interprets programs by the rules of the language for memory. It
//! knows no kernels of instruction sets (those run beside the scalar reference instead), and no
//! files in memory maps.

use crate::{Outcome, run, setup};
use std::process::{Command, Stdio};

/// Packages, and what of their unit tests is left out: what tries orders itself (loom), what asks
/// the system for pages, and what compares a NaN bit by bit, of which the language promises none.
const TESTS: [(&str, &[&str]); 1] = [("fracbit-kernels", &["team::model", "lines::tests", "panels_hold"])];

/// Rayon's queues keep numbers in pointers and their threads for ever.
const FLAGS: &str =
    "-Zmiri-disable-isolation -Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-permissive-provenance";

pub(crate) fn run_tests() -> Outcome {
    let there = Command::new("cargo")
        .args(["+nightly", "miri", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !there {
        let install =
            ["toolchain", "install", "nightly", "--profile", "minimal", "--component", "miri,rust-src"];
        if !setup::may_install() {
            return Err(format!("install Miri with:\n  rustup {}", install.join(" ")));
        }
        run("rustup", &install, &[])?;
    }
    for (package, left_out) in TESTS {
        let test =
            ["+nightly", "miri", "test", "--package", package, "--lib", "--target-dir", "target/miri", "--"];
        let skip = left_out.iter().flat_map(|name| ["--skip", name]);
        run("cargo", &test.into_iter().chain(skip).collect::<Vec<_>>(), &[("MIRIFLAGS", FLAGS)])?;
    }
    Ok(())
}
