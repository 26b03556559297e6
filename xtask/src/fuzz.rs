//! The targets of `fuzz/` under libFuzzer. The instrumentation is LLVM's, so the toolchain that is
//! here has it; `libfuzzer-sys` brings the rest.

use crate::{Outcome, gpu, root, run, setup};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

/// The targets and the longest input of each: what it takes to say everything once.
const TARGETS: [(&str, usize); 9] = [
    ("header", 4096),
    ("gguf", 32768),
    ("config", 4096),
    ("tokenizer", 8192),
    ("template", 1024),
    ("plan", 4096),
    ("profile", 4096),
    ("model", 65536),
    ("request", 4096),
];

/// What cargo-fuzz builds with, but for what it wants nightly Rust for.
const FLAGS: [&str; 9] = [
    "--cfg",
    "fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
    "-Coverflow-checks",
];

/// Longer than this is a hang, in seconds, and more memory than this is too much, in MB.
const HANG: usize = 10;
const MEMORY: usize = 3072;

/// What became of a target.
struct Report {
    name: &'static str,
    executions: String,
    rate: String,
    /// Edges that were reached.
    coverage: String,
    /// Why it ended early.
    fault: Option<String>,
}

/// Builds targets, all or those of these names, and runs each for some time.
pub(crate) fn run_targets(args: &[&str]) -> Outcome {
    let (mut seconds, mut wanted) = (60, Vec::new());
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        if arg == "--seconds" {
            let value = args.next().and_then(|value| value.parse::<usize>().ok()).filter(|&value| value > 0);
            seconds = value.ok_or("`--seconds` wants a whole number")?;
            continue;
        }
        let known = TARGETS.into_iter().find(|(name, _)| *name == arg);
        let names = TARGETS.map(|(name, _)| name).join(", ");
        wanted.push(known.ok_or_else(|| format!("no target `{arg}`: there are {names}"))?);
    }
    if wanted.is_empty() {
        wanted = TARGETS.to_vec();
    }
    setup::compiler()?;
    let folder = gpu::target()?.join("fuzz");
    let programs = build(&folder, &wanted)?;
    let scratch = Scratch::new(&folder)?;
    let (queue, reports) = (Mutex::new(wanted.into_iter()), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    println!("each for {seconds} s, {workers} at a time; what they say is in {}", folder.display());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some((name, longest)) = next() {
                    let report = search(&programs, &folder, &scratch.0, (name, longest), seconds);
                    reports.lock().unwrap_or_else(PoisonError::into_inner).push(report);
                }
            });
        }
    });
    let reports: Result<Vec<Report>, String> =
        reports.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().collect();
    let mut reports = reports?;
    reports.sort_by_key(|report| TARGETS.iter().position(|(name, _)| *name == report.name));
    println!("{:<10}{:>14}{:>12}{:>10}", "target", "executions", "a second", "coverage");
    for Report { name, executions, rate, coverage, .. } in &reports {
        println!("{name:<10}{executions:>14}{rate:>12}{coverage:>10}");
    }
    let faults: Vec<String> = reports.into_iter().filter_map(|report| report.fault).collect();
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Builds the programs and returns the folder that they are in.
fn build(folder: &Path, wanted: &[(&str, usize)]) -> Result<PathBuf, String> {
    // The same versions of dependencies.
    let lock = ["Cargo.lock", "fuzz/Cargo.lock"].map(|name| root().join(name));
    if !lock[1].exists() {
        fs::copy(&lock[0], &lock[1]).map_err(|error| format!("{}: {error}", lock[1].display()))?;
    }
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let folder_name = folder.display().to_string();
    let mut args = vec!["build", "--release", "--manifest-path", "fuzz/Cargo.toml"];
    args.extend(["--target", &target, "--target-dir", &folder_name]);
    args.extend(wanted.iter().flat_map(|(name, _)| ["--bin", name]));
    run("cargo", &args, &[("CARGO_ENCODED_RUSTFLAGS", &FLAGS.join("\u{1f}"))])?;
    Ok(folder.join(target).join("release"))
}

/// Runs one target from its seeds and what earlier runs found.
fn search(
    programs: &Path,
    folder: &Path,
    scratch: &Path,
    (name, longest): (&'static str, usize),
    seconds: usize,
) -> Result<Report, String> {
    let corpus = root().join("fuzz/corpus").join(name);
    let artifacts = root().join("fuzz/artifacts").join(name);
    fs::create_dir_all(&artifacts).map_err(|error| format!("{}: {error}", artifacts.display()))?;
    let start = |command: &mut Command| {
        command.env("TMPDIR", scratch).output().map_err(|error| format!("could not start `{name}`: {error}"))
    };
    let program = || Command::new(programs.join(name));
    let seeds = start(program().env("FRACBIT_SEEDS", &corpus))?;
    if !seeds.status.success() {
        return Err(format!("{name} writes no seeds: {}", String::from_utf8_lossy(&seeds.stderr).trim()));
    }
    let mut command = program();
    command.arg(&corpus).args([
        format!("-max_total_time={seconds}"),
        format!("-max_len={longest}"),
        format!("-timeout={HANG}"),
        format!("-rss_limit_mb={MEMORY}"),
        format!("-artifact_prefix={}/", artifacts.display()),
        "-print_final_stats=1".to_owned(),
    ]);
    let out = start(&mut command)?;
    let log = folder.join(format!("{name}.log"));
    fs::write(&log, &out.stderr).map_err(|error| format!("{}: {error}", log.display()))?;
    let text = String::from_utf8_lossy(&out.stderr);
    let last = |key: &str| text.rsplit_once(key).and_then(|(_, rest)| rest.split_whitespace().next());
    let told = |key: &str| last(key).unwrap_or("-").to_owned();
    let fault = (!out.status.success()).then(|| {
        let input =
            last("Test unit written to ").map_or_else(|| "no input was kept".to_owned(), str::to_owned);
        format!("{name} ({}): {input}; see {}", out.status, log.display())
    });
    Ok(Report {
        name,
        executions: told("stat::number_of_executed_units:"),
        rate: told("stat::average_exec_per_sec:"),
        coverage: told(" cov: "),
        fault,
    })
}

/// Where targets put the files that they read, in memory if there is such a place. The fuzzer ends
/// without taking them away.
struct Scratch(PathBuf);

impl Scratch {
    fn new(folder: &Path) -> Result<Self, String> {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory } else { folder };
        let place = place.join(format!("fracbit-fuzz-{}", std::process::id()));
        fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        Ok(Self(place))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays has a name that says whose it was.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_run() {
        let entries = fs::read_dir(root().join("fuzz/fuzz_targets")).expect("targets");
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        files.sort();
        let mut names = TARGETS.map(|(name, _)| std::ffi::OsString::from(format!("{name}.rs")));
        names.sort();
        assert_eq!(files, names);
    }
}
