//! Set-up, code generation, tests and docs of the fracbit workspace.
//!
//! `cargo xtask demo` and `cargo xtask test` do everything on a fresh Debian machine that has Rust,
//! a C/C++ compiler and Python. This program depends on nothing, so that it builds in seconds
//! before anything is installed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod arm;
mod circles;
mod codegen;
mod fuzz;
mod gpu;
mod json;
mod kernels;
mod miri;
mod packages;
mod release;
mod setup;
mod tidy;
mod wheel;

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

/// Why a task failed, in words for a person.
type Failure = String;
type Outcome = Result<(), Failure>;

const HELP: &str = "\
Usage: cargo xtask COMMAND

  demo               build, and run the whole story on the embedded model
  test               set up, then everything that CI checks
  setup              install what the tests need (as root or with CI=true), or print the command
  codegen [--check]  write the generated files from kernels/families.toml, or check that they are current
  parity --target aarch64 [--require]
                     compile the kernels for aarch64 and compare every microkernel with the scalar reference under qemu,
                     in all cases (`test`: in every second)
  parity --target aarch64 --demo
                     run the demo here and under qemu, and compare perplexities and greedy tokens (takes a while)
  count --target aarch64
                     count the instructions of the aarch64 kernels under qemu and compare them with their budgets
  kernels            compile the CUDA kernels (no GPU needed), check registers and instructions, pack them
  gpu [--pack]       pack parity and speed of the CUDA kernels into target/gpu and run them, if a GPU is here
  miri               run the unit tests of what is unsafe outside kernels under Miri (nightly Rust; some 20 minutes)
  fuzz [--seconds N] [TARGET]...
                     have what reads files and requests of others read what a fuzzer makes up, each for a minute or N seconds
  wheel              build the wheel of the Python package into target/wheel, and test it
  published          fetch published chat templates and tokenizers (300 MB) and compare with their own programs
  zoo DIR [TEXT]     run every command on every checkpoint of a folder and print a table in Markdown
  release [DIR] [--arch NAME | --binary FILE...]
                     what people download, in target/release-files or DIR: archives, Debian packages, licences,
                     bill of materials, sums; of programs that were built before, or built here (of one architecture)
  man DIR            write a manual page of each command into a new directory
  tidy               house rules: crate layering, file sizes, whole packages, stray mentions
  quality            measure docs/lab/tables.md anew (needs ../shared; takes a while)
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["demo", rest @ ..] => demo(rest),
        ["test"] => test(),
        ["setup"] => setup::run(),
        ["codegen"] => codegen::run(false),
        ["codegen", "--check"] => codegen::run(true),
        ["parity", "--target", "aarch64"] => arm::parity(1, false),
        ["parity", "--target", "aarch64", "--require"] => arm::parity(1, true),
        ["parity", "--target", "aarch64", "--demo"] => arm::demo(),
        ["count", "--target", "aarch64"] => arm::count(),
        ["gpu"] => gpu::run(false),
        ["gpu", "--pack"] => gpu::run(true),
        ["kernels"] => kernels::run(),
        ["miri"] => miri::run_tests(),
        ["fuzz", rest @ ..] => fuzz::run_targets(rest),
        ["man", dir] => man(dir),
        ["release", rest @ ..] => release(rest),
        ["wheel"] => wheel::run_release(),
        ["published"] => published(),
        ["zoo", dir] => zoo(&[dir]),
        ["zoo", dir, text] => zoo(&[dir, text]),
        ["tidy"] => tidy::run(),
        ["quality"] => quality(),
        ["help" | "--help" | "-h"] | [] => {
            print!("{HELP}");
            Ok(())
        }
        _ => Err(format!("unknown command `{}`\n\n{HELP}", words.join(" "))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace root.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lives one level below the root").to_path_buf()
}

/// Runs a program in the workspace root, showing the command and its time.
fn run(program: &str, args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let start = Instant::now();
    println!("$ {program} {}", args.join(" "));
    let status = Command::new(program)
        .args(args)
        .envs(env.iter().copied())
        .current_dir(root())
        .status()
        .map_err(|error| format!("could not start `{program}`: {error}"))?;
    println!("  ({:.1} s)", start.elapsed().as_secs_f64());
    if status.success() { Ok(()) } else { Err(format!("`{program} {}` failed ({status})", args.join(" "))) }
}

/// What a build of the demo's program from nothing takes, in minutes of a processor (Zen 4), and
/// what its last crates take one after the other on any number of them.
const BUILDING: [usize; 2] = [11, 3];

/// The demo, by the released program where there is one, else by one that is built in half the
/// time.
fn demo(extra: &[&str]) -> Outcome {
    setup::compiler()?;
    let built = |profile: &str| root().join("target").join(profile).join("fracbit").exists();
    let profile = if built("release") { "release" } else { "demo" };
    if !built(profile) {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let minutes = BUILDING[0].div_ceil(processors).max(BUILDING[1]);
        println!("building the program: the first time some {minutes} minutes with {processors} processors");
    }
    let program = ["--profile", profile, "--package", "fracbit-cli"];
    run("cargo", &[&["build"], &program[..]].concat(), &[])?;
    run("cargo", &[&["run", "--quiet"], &program[..], &["--", "demo"], extra].concat(), &[])
}

/// Everything that CI checks, cheapest first.
fn test() -> Outcome {
    setup::run()?;
    run("cargo", &["fmt", "--all", "--check"], &[])?;
    codegen::run(true)?;
    tidy::run()?;
    setup::dependencies()?;
    setup::versions()?;
    let highs = root().join("tests/highs.cmake").display().to_string();
    let highs = [("CMAKE_TOOLCHAIN_FILE", highs.as_str())];
    std::thread::scope(|scope| {
        // What comes from the network leaves the processors idle for minutes.
        scope.spawn(|| {
            setup::clients();
            if let Err(why) = setup::published(&["--quick"]) {
                println!("skipped: published chat templates and tokenizers: {why}");
            }
        });
        lints(&highs)
    })?;
    // Examples are checked above; linking them takes as long as the tests of a crate.
    let tests = ["test", "--workspace", "--lib", "--bins", "--tests"];
    run("cargo", &[&tests[..], &["--no-run"]].concat(), &highs)?;
    // Arm's tests give way to everything else: they take what tests that wait leave, and the
    // second processor behind them.
    std::thread::scope(|scope| {
        let arm = scope.spawn(|| arm::parity(2, false));
        run("cargo", &tests, &highs)?;
        run("cargo", &["test", "--workspace", "--doc"], &highs)?;
        wheel::run_tests(&highs)?;
        setup::python_checks()?;
        arm.join().map_err(|_| "the tests for Arm ended early".to_owned())?
    })?;
    // Tests that pass are silent, and so are those that found nothing to do.
    if !root().join("../shared/models").is_dir() {
        println!("skipped: tests of the models and texts in ../shared, which is not there");
    }
    Ok(())
}

/// What the compiler can say without running anything.
fn lints(highs: &[(&str, &str)]) -> Outcome {
    // The GPU's half needs neither its compiler nor a driver to be checked.
    let all =
        ["clippy", "--workspace", "--all-targets", "--features", "fracbit-cli/cuda", "--profile", "test"];
    run("cargo", &[&all[..], &["--", "--deny", "warnings"]].concat(), highs)?;
    let warnings = [highs, &[("RUSTDOCFLAGS", "--deny warnings")]].concat();
    run("cargo", &["doc", "--workspace", "--no-deps", "--profile", "test"], &warnings)
}

/// Published chat templates and tokenizers, beside the programs that they were made for.
fn published() -> Outcome {
    setup::published(&[])?;
    run("cargo", &["test", "--package", "fracbit-io", "--test", "published", "--", "--nocapture"], &[])
}

/// Builds the program and writes its manual pages.
fn man(dir: &str) -> Outcome {
    setup::compiler()?;
    let here = std::env::current_dir().map_err(|error| format!("the current directory: {error}"))?;
    let dir = here.join(dir).display().to_string();
    run("cargo", &["run", "--release", "--quiet", "--package", "fracbit-cli", "--", "man", "-o", &dir], &[])
}

/// Reads the arguments of `release`.
fn release(args: &[&str]) -> Outcome {
    let (mut dir, mut only, mut binaries) = (None, None, Vec::new());
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        match arg {
            "--arch" => only = Some(*args.next().ok_or("`--arch` wants x86_64 or aarch64")?),
            "--binary" => binaries.push(*args.next().ok_or("`--binary` wants a file")?),
            _ if arg.starts_with('-') || dir.is_some() => {
                return Err(format!("unknown argument `{arg}`\n\n{HELP}"));
            }
            _ => dir = Some(arg),
        }
    }
    let default = root().join("target/release-files").display().to_string();
    release::make(dir.unwrap_or(&default), &binaries, only)
}

/// Builds the program and has every checkpoint of a folder go through it.
fn zoo(args: &[&str]) -> Outcome {
    setup::compiler()?;
    let here = std::env::current_dir().map_err(|error| format!("the current directory: {error}"))?;
    run("cargo", &["build", "--release", "--package", "fracbit-cli"], &[])?;
    // The example runs in the root of the workspace, the paths are of where this was called.
    let paths: Vec<String> = args.iter().map(|path| here.join(path).display().to_string()).collect();
    let zoo = ["run", "--release", "--quiet", "--package", "fracbit-cli", "--example", "zoo", "--"];
    let all: Vec<&str> =
        zoo.into_iter().chain(["target/release/fracbit"]).chain(paths.iter().map(String::as_str)).collect();
    run("cargo", &all, &[])
}

fn quality() -> Outcome {
    setup::compiler()?;
    run("cargo", &["run", "--release", "--package", "fracbit", "--example", "quality"], &[])?;
    run("cargo", &["run", "--release", "--package", "fracbit", "--example", "calibrated"], &[])
}
