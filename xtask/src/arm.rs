//! aarch64 without an Arm machine: the kernels and their tests, compiled across and run under qemu.

use crate::{Outcome, root, setup};
use std::{path::Path, process::Command};

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Debian's packages. The first two are a compiler with the standard library for aarch64, where rustup has none.
const COMPILER: [&str; 2] = ["rustc-web", "libstd-rust-web-dev:arm64"];
const TOOLS: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];
/// Where `rustc-web` puts its compiler.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Processors that qemu plays, and the instruction sets whose bodies must run there.
const PROCESSORS: [(&str, &[&str]); 3] =
    [("cortex-a53", &["neon"]), ("neoverse-n1", &["neon", "dotprod"]), ("max", &["neon", "dotprod", "i8mm"])];

/// A compiler for aarch64.
pub(crate) struct Toolchain {
    /// `None`: the toolchain that runs this program, which has the target.
    rustc: Option<&'static str>,
}

impl Toolchain {
    /// What is needed, installed where that is allowed.
    pub(crate) fn prepare(more: &[&'static str]) -> Result<Self, String> {
        let own = has_target("rustc");
        let mut missing: Vec<&str> = Vec::new();
        if !own && !has_target(DEBIAN_RUSTC) {
            missing.extend(COMPILER);
        }
        if !(setup::starts("aarch64-linux-gnu-gcc") && setup::starts("qemu-aarch64")) {
            missing.extend(TOOLS);
        }
        missing.extend(more.iter().filter(|package| !setup::installed(package)));
        if !missing.is_empty() {
            let foreign = missing.iter().any(|package| package.ends_with(":arm64"));
            setup::install(&missing, foreign.then_some("arm64"))?;
        }
        if !own && !has_target(DEBIAN_RUSTC) {
            return Err(format!("{DEBIAN_RUSTC} has no standard library for {TARGET}"));
        }
        Ok(Self { rustc: (!own).then_some(DEBIAN_RUSTC) })
    }

    /// A cargo command for aarch64 whose tests run under `runner`. It has a target folder of its own, because its compiler
    /// may be another one.
    pub(crate) fn cargo(&self, runner: &str) -> Command {
        let mut command = Command::new("cargo");
        command.current_dir(root()).env("CARGO_TARGET_DIR", root().join("target/aarch64"));
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        for profile in ["DEV", "TEST", "RELEASE"] {
            command.env(format!("CARGO_PROFILE_{profile}_DEBUG"), "false");
        }
        if let Some(rustc) = self.rustc {
            command.env("RUSTC", rustc).env("RUSTDOC", "/usr/bin/rustdoc");
        }
        command
    }
}

fn has_target(rustc: &str) -> bool {
    let Ok(out) = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output() else {
        return false;
    };
    let folder = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    out.status.success()
        && std::fs::read_dir(Path::new(&folder)).is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libstd-"))
        })
}

/// Builds the kernels for aarch64 and compares every body with the scalar reference on three processors.
///
/// What cannot run is said aloud; with `require` it is a failure.
pub(crate) fn parity(require: bool) -> Outcome {
    let toolchain = match Toolchain::prepare(&[]) {
        Ok(toolchain) => toolchain,
        Err(message) if require => return Err(message),
        Err(message) => {
            println!("skipped: parity on aarch64: {message}");
            return Ok(());
        }
    };
    for (processor, expected) in PROCESSORS {
        let report = tests(&toolchain, processor)?;
        println!("{processor}:");
        report.lines().filter(|line| line.starts_with("parity: ")).for_each(|line| println!("  {line}"));
        for isa in expected {
            if report.lines().any(|line| line == format!("parity: {isa} ok")) {
                continue;
            }
            let message = format!("{isa} did not run on qemu's {processor}");
            if require {
                return Err(message);
            }
            println!("skipped: {message}");
        }
    }
    Ok(())
}

/// Runs the tests on `processor` and returns what they printed.
fn tests(toolchain: &Toolchain, processor: &str) -> Result<String, String> {
    let start = std::time::Instant::now();
    let mut command = toolchain.cargo(&format!("qemu-aarch64 -cpu {processor}"));
    command.args(["test", "--target", TARGET, "--package", "fracbit-kernels-neon", "--test", "parity"]);
    command.args(["--", "--nocapture"]);
    println!("$ cargo test --target {TARGET} ... # qemu-aarch64 -cpu {processor}");
    let out = command.output().map_err(|error| format!("could not start cargo: {error}"))?;
    println!("  ({:.1} s)", start.elapsed().as_secs_f64());
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
    if out.status.success() { Ok(text) } else { Err(format!("{text}\naarch64 tests failed on {processor}")) }
}

/// Runs the demo here and on qemu's most capable processor, and compares: perplexities to a thousandth, and the greedy
/// continuation of a prompt by the model that was quantized here.
pub(crate) fn demo() -> Outcome {
    let toolchain = Toolchain::prepare(&[])?;
    // Without the C++ solver on both: it would want a C++ compiler for aarch64.
    let package = ["--profile", "test", "--package", "fracbit-cli", "--no-default-features"];
    crate::run("cargo", &[&["build"], &package[..]].concat(), &[])?;
    let mut build = toolchain.cargo("qemu-aarch64");
    println!("$ cargo build --target {TARGET} {}", package.join(" "));
    let built = build.args(["build", "--target", TARGET]).args(package).status();
    if !built.map_err(|error| format!("could not start cargo: {error}"))?.success() {
        return Err(format!("the command line does not build for {TARGET}"));
    }
    let target = |folder: &str| root().join(folder).display().to_string();
    #[expect(clippy::disallowed_methods, reason = "cargo's own variable says where it built")]
    let here = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| target("target"));
    let host = vec![format!("{here}/debug/fracbit")];
    let program = target(&format!("target/aarch64/{TARGET}/debug/fracbit"));
    let arm: Vec<String> = ["qemu-aarch64", "-cpu", "max", &program].map(str::to_owned).into();
    let models = [target("target/aarch64/demo-here"), target("target/aarch64/demo-qemu")];
    let mut tables = Vec::new();
    for (command, home) in [&host, &arm].into_iter().zip(&models) {
        // Left by an earlier run.
        std::fs::remove_dir_all(home).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(format!("{home}: {error}")),
        })?;
        let text = said(command, &["demo", "--keep", home])?;
        println!("{text}");
        tables.push(perplexities(&text));
    }
    let [wanted, got] = [&tables[0], &tables[1]];
    if wanted.len() != 4 || wanted.len() != got.len() {
        return Err(format!("the demo prints four perplexities, not {} and {}", wanted.len(), got.len()));
    }
    for ((name, here), (_, there)) in wanted.iter().zip(got) {
        if (here - there).abs() > 1e-3 * here {
            return Err(format!("perplexity of `{name}`: {here} here, {there} under qemu"));
        }
    }
    let model = format!("{}/3bit", models[0]);
    let greedy = ["run", &model, "--prompt", "Once upon a time", "--greedy", "--max-tokens", "64"];
    let (here, there) = (said(&host, &greedy)?, said(&arm, &greedy)?);
    if here != there || here.trim().is_empty() {
        return Err(format!("greedy continuation here:\n{here}\nunder qemu:\n{there}"));
    }
    println!("the same perplexities and the same greedy tokens:\n{here}");
    Ok(())
}

/// What a program printed.
fn said(command: &[String], args: &[&str]) -> Result<String, String> {
    let start = std::time::Instant::now();
    println!("$ {} {}", command.join(" "), args.join(" "));
    let out = Command::new(&command[0])
        .args(&command[1..])
        .args(args)
        .output()
        .map_err(|error| format!("could not start `{}`: {error}", command[0]))?;
    println!("  ({:.1} s)", start.elapsed().as_secs_f64());
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&out.stderr).into_owned())
    }
}

/// Names and perplexities of the demo's table, whose fifth column they are.
fn perplexities(text: &str) -> Vec<(String, f64)> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        Some(((*cells.first()?).to_owned(), cells.get(4)?.parse().ok()?))
    };
    text.lines().filter_map(row).collect()
}

/// A product to be counted.
struct Counted {
    scheme: &'static str,
    /// Place of the codebook's length among the allowed ones.
    table: &'static str,
    /// Columns of a scale; 0: a row.
    group: &'static str,
    /// The most instructions per 1000 products of one token and of 128 on the most capable processor.
    budget: Option<[f64; 2]>,
}

const fn counted(
    scheme: &'static str,
    table: &'static str,
    group: &'static str,
    budget: Option<[f64; 2]>,
) -> Counted {
    Counted { scheme, table, group, budget }
}

const COUNTED: [Counted; 14] = [
    counted("int-4", "0", "32", Some([250.0, 95.0])),
    counted("nuq-4", "0", "0", Some([270.0, 100.0])),
    counted("gnuq-2", "0", "32", Some([260.0, 95.0])),
    counted("tcq-fast-2", "0", "0", Some([760.0, 112.0])),
    counted("tcq-2", "0", "0", Some([1000.0, 120.0])),
    counted("gnuq-3", "0", "32", None),
    counted("gnuq-4", "0", "32", None),
    counted("int-8", "0", "32", None),
    counted("nuq-2", "0", "0", None),
    counted("nuq-8", "0", "0", None),
    counted("vq-2", "0", "0", None),
    counted("tcq-fast-3", "0", "0", None),
    counted("tcq-3", "1", "0", None),
    counted("tcq-4", "1", "0", None),
];

/// Counts the instructions that kernels execute under qemu, and fails when a budget is passed.
pub(crate) fn count() -> Outcome {
    let toolchain = Toolchain::prepare(&["llvm-19"])?;
    let folder = root().join("target/aarch64");
    let plugin = folder.join("libcount.so").display().to_string();
    let built = toolchain
        .cargo("qemu-aarch64")
        .args([
            "build",
            "--release",
            "--target",
            TARGET,
            "--package",
            "fracbit-kernels-neon",
            "--example",
            "products",
        ])
        .status()
        .map_err(|error| format!("could not start cargo: {error}"))?;
    if !built.success() {
        return Err("the program to be counted does not build".to_owned());
    }
    crate::run("cc", &["-shared", "-fPIC", "-O2", "-o", &plugin, "kernels/count_instructions.c"], &[])?;
    let program = folder.join(TARGET).join("release/examples/products").display().to_string();
    let listing = Listing::new(&program)?;
    // The hottest code that multiplies: a program this short may spend more on making its weights.
    let hottest = |hot: &[u64]| hot.iter().map(|&at| listing.around(at)).find(|body| products(body) > 0.0);
    println!("instructions per 1000 products (a count, not a time); group 0: one scale a row\n");
    println!("| scheme | table | group | processor | 1 token | budget | 128 tokens | budget |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut loops = Vec::new();
    let mut over = Vec::new();
    for Counted { scheme, table, group, budget } in COUNTED {
        for processor in ["max", "neoverse-n1", "cortex-a53"] {
            let measure = |batch| per_thousand(&plugin, &program, processor, [scheme, table, group, batch]);
            let ((one, first), (many, second)) = (measure("1")?, measure("128")?);
            match processor {
                "max" => {
                    loops.push((scheme, "1, `sdot`", hottest(&first)));
                    loops.push((scheme, "128, `smmla`", hottest(&second)));
                }
                "neoverse-n1" => loops.push((scheme, "128, `sdot`", hottest(&second))),
                _ => {}
            }
            let budget = budget.filter(|_| processor == "max");
            let show = |limit: Option<f64>| limit.map_or("-".to_owned(), |l| l.to_string());
            println!(
                "| `{scheme}` | {table} | {group} | {processor} | {one:.1} | {} | {many:.1} | {} |",
                show(budget.map(|b| b[0])),
                show(budget.map(|b| b[1]))
            );
            if budget.is_some_and(|b| one > b[0] || many > b[1]) {
                over.push(format!("{scheme} takes {one:.1} and {many:.1} instructions"));
            }
        }
    }
    println!(
        "\ncycles per 1000 products of the innermost loop, as llvm-mca estimates them with all data in the first cache\n"
    );
    println!(
        "| scheme | tokens | instructions | {} |\n| --- | --- | --- | --- | --- | --- |",
        MODELS.map(|model| model.0).join(" | ")
    );
    for (scheme, tokens, body) in loops {
        let body = body.ok_or_else(|| format!("no hot code of {scheme} makes products"))?;
        let products = products(&body);
        let paired = body.iter().any(|code| code.starts_with("smmla"));
        let cell = |(model, i8mm): (&str, bool)| match (paired, i8mm) {
            (true, false) => Ok("-".to_owned()), // it would run the loop above or below
            _ => estimate(&folder, model, &body).map(|cycles| format!("{:.1}", cycles / products * 1000.0)),
        };
        let cells: Vec<String> = MODELS.into_iter().map(cell).collect::<Result<_, _>>()?;
        println!("| `{scheme}` | {tokens} | {} | {} |", body.len(), cells.join(" | "));
    }
    if over.is_empty() { Ok(()) } else { Err(format!("over the budget: {}", over.join("; "))) }
}

/// Processors whose cycles llvm-mca estimates, and whether they have `i8mm`.
const MODELS: [(&str, bool); 3] = [("neoverse-n1", false), ("neoverse-v2", true), ("cortex-a76", false)];

/// The instructions of a program by address, with the targets of branches.
struct Listing(std::collections::BTreeMap<u64, (String, Option<u64>)>);

impl Listing {
    fn new(program: &str) -> Result<Self, String> {
        let out = Command::new("aarch64-linux-gnu-objdump")
            .args(["--disassemble", "--no-show-raw-insn", program])
            .output()
            .map_err(|error| format!("could not start aarch64-linux-gnu-objdump: {error}"))?;
        let text = String::from_utf8_lossy(&out.stdout);
        let line = |line: &str| {
            let (address, rest) = line.trim_start().split_once(":\t")?;
            let code = rest.split("//").next()?.split(" <").next()?.trim();
            let (head, last) = code.rsplit_once([' ', '\t']).unwrap_or((code, ""));
            let target = rest.contains(" <").then(|| u64::from_str_radix(last, 16).ok()).flatten();
            // Where a branch goes is of no interest to an estimate.
            let code = if target.is_some() { format!("{head} .") } else { code.to_owned() };
            Some((u64::from_str_radix(address, 16).ok()?, (code, target)))
        };
        Ok(Self(text.lines().filter_map(line).collect()))
    }

    /// The innermost loop around an address of the running program, which is loaded at a multiple of 2^32; empty when there is
    /// none near.
    fn around(&self, at: u64) -> Vec<String> {
        let at = at & 0xffff_ffff;
        let back = |(&from, (_, target)): (&u64, &(String, Option<u64>))| {
            target.filter(|&t| t <= at).map(|t| (t, from))
        };
        let Some((first, last)) = self.0.range(at..).take(2000).find_map(back) else { return Vec::new() };
        self.0.range(first..=last).map(|(_, (code, _))| code.clone()).collect()
    }
}

/// Products that a piece of code makes.
fn products(body: &[String]) -> f64 {
    let of = |name: &str| body.iter().filter(|code| code.starts_with(name)).count();
    #[expect(clippy::cast_precision_loss, reason = "some hundred instructions")]
    {
        (16 * of("sdot") + 32 * of("smmla")) as f64
    }
}

/// Cycles of one pass through `body`.
fn estimate(folder: &Path, model: &str, body: &[String]) -> Result<f64, String> {
    let path = folder.join("loop.s");
    let text = format!(".arch_extension dotprod\n.arch_extension i8mm\n{}\n", body.join("\n"));
    std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    let out = Command::new("llvm-mca-19")
        .args(["-mtriple=aarch64", &format!("-mcpu={model}"), "-mattr=+dotprod,+i8mm", "-iterations=100"])
        .arg(&path)
        .output()
        .map_err(|error| format!("could not start llvm-mca-19: {error}"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let cycles = text.lines().find_map(|line| line.strip_prefix("Total Cycles:")?.trim().parse::<f64>().ok());
    cycles.map(|c| c / 100.0).ok_or_else(|| format!("llvm-mca-19: {}", String::from_utf8_lossy(&out.stderr)))
}

/// Instructions per 1000 products in the steady state, what one more repetition adds, and the hottest blocks.
fn per_thousand(
    plugin: &str,
    program: &str,
    processor: &str,
    arguments: [&str; 4],
) -> Result<(f64, Vec<u64>), String> {
    let run = |times: &str| -> Result<(f64, f64, Vec<u64>), String> {
        let out = Command::new("qemu-aarch64")
            .args(["-cpu", processor, "-plugin", plugin, "-d", "plugin", program])
            .args(arguments)
            .arg(times)
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .map_err(|error| format!("could not start qemu-aarch64: {error}"))?;
        let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let find = || {
            let all = || text.iter().flat_map(|t| t.lines());
            let products = text[0].split(' ').nth(1)?.parse().ok()?;
            let count = all().find_map(|line| line.strip_prefix("instructions: ")?.trim().parse().ok())?;
            let hot =
                all().filter_map(|line| u64::from_str_radix(line.strip_prefix("hot: ")?.trim(), 16).ok());
            Some((products, count, hot.collect()))
        };
        find().ok_or_else(|| format!("qemu-aarch64 {program}: {}", text.join("\n")))
    };
    let (one, two) = (run("1")?, run("2")?);
    Ok(((two.1 - one.1) / one.0 * 1000.0, two.2))
}
