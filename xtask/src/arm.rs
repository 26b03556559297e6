//! aarch64 without an Arm machine: the kernels and their tests, compiled across and run under qemu.

use crate::{Outcome, root, setup};
use std::{path::Path, process::Command};

pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Debian's packages. The first two are a compiler with the standard library for aarch64, where
/// rustup has none.
const COMPILER: [&str; 2] = ["rustc-web", "libstd-rust-web-dev:arm64"];
const TOOLS: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];
/// Where `rustc-web` puts its compiler.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Processors that qemu plays, and the instruction sets whose microkernels must run there.
const PROCESSORS: [(&str, &[&str]); 3] =
    [("cortex-a53", &["neon"]), ("neoverse-n1", &["neon", "dotprod"]), ("max", &["neon", "dotprod", "i8mm"])];

/// Every fifth case shows that what is detected on a processor runs.
const FEW: usize = 5;

/// A compiler for aarch64.
pub(crate) struct Toolchain {
    /// `None`: the toolchain that runs this program, which has the target.
    rustc: Option<&'static str>,
}

impl Toolchain {
    /// What is there to build programs with; nothing is installed.
    pub(crate) fn found() -> Option<Self> {
        let own = has_target("rustc");
        let there = (own || has_target(DEBIAN_RUSTC)) && setup::starts("aarch64-linux-gnu-gcc");
        there.then(|| Self { rustc: (!own).then_some(DEBIAN_RUSTC) })
    }

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

    /// A cargo command for aarch64 whose tests run under `runner`, and which gives way to whatever
    /// else runs. It has a target folder of its own, because its compiler may be another one.
    pub(crate) fn cargo(&self, runner: &str) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "19", "cargo"]);
        command.current_dir(root()).env("CARGO_TARGET_DIR", root().join("target/aarch64"));
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        // Counting looks for loops by their addresses.
        command.env("CARGO_PROFILE_RELEASE_STRIP", "none");
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

/// Builds the kernels for aarch64 and compares every microkernel with the scalar reference on
/// three processors.
///
/// All microkernels run on the last, with one of `each` cases; that those of the others run there
/// takes fewer cases. What cannot run is said aloud; with `require` it is a failure.
pub(crate) fn parity(each: usize, require: bool) -> Outcome {
    let toolchain = match Toolchain::prepare(&[]) {
        Ok(toolchain) => toolchain,
        Err(message) if require => return Err(message),
        Err(message) => {
            println!("skipped: parity on aarch64: {message}");
            return Ok(());
        }
    };
    // The rotations are one source for all processors.
    tests(&toolchain, PROCESSORS[0].0, 1, &["--package", "fracbit-rotation", "--lib", "--test", "golden"])?;
    for (processor, expected) in PROCESSORS {
        let last = processor == PROCESSORS[PROCESSORS.len() - 1].0;
        let each = if last { each } else { FEW };
        let parity = ["--package", "fracbit-kernels-neon", "--test", "parity"];
        let report = tests(&toolchain, processor, each, &parity)?;
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

/// Runs the tests of `package` on `processor` with one of `each` cases, and returns what they
/// printed.
fn tests(toolchain: &Toolchain, processor: &str, each: usize, package: &[&str]) -> Result<String, String> {
    let start = std::time::Instant::now();
    let mut command = toolchain.cargo(&format!("qemu-aarch64 -cpu {processor}"));
    command.args(["test", "--target", TARGET]).args(package).args(["--", "--nocapture"]);
    println!("$ cargo test --target {TARGET} {} # qemu-aarch64 -cpu {processor}", package.join(" "));
    command.env("FRACBIT_PARITY", each.to_string());
    let out = command.output().map_err(|error| format!("could not start cargo: {error}"))?;
    println!("  ({:.1} s)", start.elapsed().as_secs_f64());
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
    if out.status.success() { Ok(text) } else { Err(format!("{text}\naarch64 tests failed on {processor}")) }
}

/// The prompt of the greedy continuations.
const GREEDY: [&str; 5] = ["--prompt", "Once upon a time", "--greedy", "--max-tokens", "64"];

/// Runs the program here and under qemu and compares: the quick demo from end to end, and the
/// models of the demo that were searched for here. Perplexities agree to a thousandth, greedy
/// tokens are the same.
pub(crate) fn demo() -> Outcome {
    let toolchain = Toolchain::prepare(&[])?;
    // Without the C++ solver on both: it would want a C++ compiler for aarch64.
    let package = ["--profile", "test", "--package", "fracbit-cli"];
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
    let arm = |processor: &str| -> Vec<String> {
        ["qemu-aarch64", "-cpu", processor, &program].map(str::to_owned).into()
    };
    let homes = ["demo", "quick-here", "quick-qemu"].map(|name| target(&format!("target/aarch64/{name}")));
    for home in &homes {
        // Left by an earlier run.
        std::fs::remove_dir_all(home).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(format!("{home}: {error}")),
        })?;
    }
    let [full, quick, emulated] = &homes;
    let wanted = perplexities(&said(&host, &["demo", "--quick", "--keep", quick])?, 4)?;
    let got = perplexities(&said(&arm("max"), &["demo", "--quick", "--keep", emulated])?, 4)?;
    for (w, g) in wanted.iter().zip(&got) {
        compare(&format!("quick demo, {}", w.0), w.1, g.1)?;
    }
    let wanted = perplexities(&said(&host, &["demo", "--keep", full])?, 5)?;
    let stories = format!("{full}/stories.txt");
    for (name, here) in &wanted {
        let model = format!("{full}/{}", directory(name));
        let text = said(&arm("max"), &["eval", &model, "--text", &stories, "--bos"])?;
        let line = text.lines().find_map(|line| line.strip_prefix("perplexity"));
        let there =
            line.and_then(|l| l.trim().parse().ok()).ok_or_else(|| format!("no perplexity in\n{text}"))?;
        compare(name, *here, there)?;
    }
    let runs = [("max", "original"), ("max", "4bit"), ("max", "3bit"), ("max", "2bit")];
    for (processor, name) in runs.into_iter().chain([("neoverse-n1", "3bit"), ("cortex-a53", "3bit")]) {
        let model = format!("{full}/{name}");
        let greedy = [&["run", &model], &GREEDY[..]].concat();
        let (here, there) = (said(&host, &greedy)?, said(&arm(processor), &greedy)?);
        if here != there || here.trim().is_empty() {
            return Err(format!("{name}, greedy, here:\n{here}\nunder qemu ({processor}):\n{there}"));
        }
        println!("{name} on {processor}: the same greedy tokens");
    }
    Ok(())
}

/// Perplexities agree to a thousandth.
fn compare(what: &str, here: f64, there: f64) -> Outcome {
    println!("{what}: perplexity {here} here, {there} under qemu");
    let close = (here - there).abs() <= 1e-3 * here;
    if close { Ok(()) } else { Err(format!("{what}: perplexities differ by more than a thousandth")) }
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

/// Where the demo keeps a model of its table.
fn directory(name: &str) -> String {
    name.replace(" bits", "bit").replace(", ", "-")
}

/// Names and perplexities of the demo's table of so many models, whose fifth column they are.
fn perplexities(text: &str, models: usize) -> Result<Vec<(String, f64)>, String> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        Some(((*cells.first()?).to_owned(), cells.get(4)?.parse().ok()?))
    };
    let rows: Vec<_> = text.lines().filter_map(row).collect();
    if rows.len() == models {
        Ok(rows)
    } else {
        Err(format!("the demo prints {models} perplexities, not\n{text}"))
    }
}

/// A product to be counted.
struct Counted {
    scheme: &'static str,
    /// Place of the codebooks among those that are tried (`fracbit_kernels::cases::tables`).
    table: &'static str,
    /// Columns of a scale; 0: a row.
    group: &'static str,
    /// The most instructions per 1000 products of one token and of 128 on the most capable
    /// processor.
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

const COUNTED: [Counted; 20] = [
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
    counted("vq-4", "2", "0", Some([1000.0, 105.0])),
    counted("tcq-fast-3", "0", "0", None),
    counted("tcq-3", "1", "0", None),
    counted("tcq-4", "1", "0", None),
    counted("tcq-5", "2", "0", None),
    counted("tcq-hyb-2", "0", "0", None),
    counted("tcq-2.75", "0", "0", None),
    counted("half-tcq-2.75", "0", "0", None),
    counted("aq-m4v8b4", "1", "0", Some([330.0, 95.0])),
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
    let inner = |body: &Vec<String>| products(body) > 0.0 && body.len() < 2000;
    let hottest = |hot: &[u64]| hot.iter().map(|&at| listing.around(at)).find(inner);
    println!("instructions per 1000 products (a count, not a time); group 0: one scale a row\n");
    let tokens =
        ["1 token, `sdot`", "budget", "base NEON", "128 tokens, `smmla`", "budget", "`sdot`", "base NEON"];
    println!("| scheme | table | group | {} |\n{}", tokens.join(" | "), "| --- ".repeat(10) + "|");
    let mut loops: Vec<(Vec<&str>, &str, Vec<String>)> = Vec::new();
    let mut over = Vec::new();
    for Counted { scheme, table, group, budget } in COUNTED {
        let mut cells = Vec::new();
        let mut length = String::new();
        for (batch, processor, name) in RUNS {
            let run = per_thousand(&plugin, &program, processor, [scheme, table, group, batch])?;
            let body = hottest(&run.hot).ok_or_else(|| format!("no hot code of {scheme} makes products"))?;
            match loops.iter_mut().find(|other| other.1 == name && other.2 == body) {
                Some(same) => same.0.push(scheme),
                None => loops.push((vec![scheme], name, body)),
            }
            cells.push(format!("{:.*}", usize::from(run.count < 100.0), run.count));
            if processor == "max" {
                let limit = budget.map(|b| b[usize::from(batch != "1")]);
                cells.push(limit.map_or(String::new(), |l| l.to_string()));
                if limit.is_some_and(|limit| run.count > limit) {
                    over.push(format!("{scheme}, {name}: {:.1}", run.count));
                }
            }
            length = run.table;
        }
        println!("| `{scheme}` | {length} | {group} | {} |", cells.join(" | "));
    }
    println!(
        "\ncycles per 1000 products of the innermost loop, as llvm-mca estimates them with all data in the first cache\n"
    );
    println!(
        "| schemes | loop | instructions | {} |\n{}",
        MODELS.map(|m| m.0).join(" | "),
        "| --- ".repeat(6) + "|"
    );
    for (schemes, name, body) in loops {
        let products = products(&body);
        let paired = body.iter().any(|code| code.starts_with("smmla"));
        let cell = |(model, i8mm): (&str, bool)| match (paired, i8mm) {
            (true, false) => Ok("-".to_owned()), // it would run another loop
            _ => estimate(&folder, model, &body).map(|cycles| format!("{:.1}", cycles / products * 1000.0)),
        };
        let cells: Vec<String> = MODELS.into_iter().map(cell).collect::<Result<_, _>>()?;
        println!("| `{}` | {name} | {} | {} |", schemes.join("`, `"), body.len(), cells.join(" | "));
    }
    if over.is_empty() { Ok(()) } else { Err(format!("over the budget: {}", over.join("; "))) }
}

/// What is counted of every scheme: tokens, qemu's processor, and what multiplies there.
const RUNS: [(&str, &str, &str); 5] = [
    ("1", "max", "1 token, `sdot`"),
    ("1", "cortex-a53", "1 token, `smull`"),
    ("128", "max", "several, `smmla`"),
    ("128", "neoverse-n1", "several, `sdot`"),
    ("128", "cortex-a53", "several, `smull`"),
];

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

    /// The innermost loop around an address of the running program, which is loaded at a multiple
    /// of 2^32; empty when there is none near.
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
    // `smlal` is of the bodies for weights of 16 bits, `smull` of those for bytes.
    let each = [("sdot", 16), ("smmla", 32), ("smull", 8), ("smlal", 4)];
    let of = |name: &str| body.iter().filter(|code| code.starts_with(name)).count();
    // A Psumbook adds high bytes of partial sums by it; half of those of sixteen rows' codes, each
    // of which stands for the two products of a weight vector of eight and four codebooks.
    let psums = body.iter().filter(|code| code.starts_with("usra") && code.contains(".8h")).count();
    #[expect(clippy::cast_precision_loss, reason = "some hundred instructions")]
    {
        (each.iter().map(|(name, count)| count * of(name)).sum::<usize>() + 16 * psums) as f64
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

/// A program that was counted.
struct Run {
    /// Instructions per 1000 products.
    count: f64,
    /// Where the blocks of code that execute most of them start.
    hot: Vec<u64>,
    /// Length of the codebook.
    table: String,
}

/// Counts in the steady state: what more repetitions add.
fn per_thousand(plugin: &str, program: &str, processor: &str, arguments: [&str; 4]) -> Result<Run, String> {
    let run = |times: u8| -> Result<(f64, f64, Run), String> {
        let out = Command::new("qemu-aarch64")
            .args(["-cpu", processor, "-plugin", plugin, "-d", "plugin", program])
            .args(arguments)
            .arg(times.to_string())
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .map_err(|error| format!("could not start qemu-aarch64: {error}"))?;
        let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let find = || {
            let all = || text.iter().flat_map(|t| t.lines());
            let mut words = text[0].split(' ').skip(1);
            let (products, table) = (words.next()?.parse().ok()?, words.next()?.to_owned());
            let executed = all().find_map(|line| line.strip_prefix("instructions: ")?.trim().parse().ok())?;
            let hot =
                all().filter_map(|line| u64::from_str_radix(line.strip_prefix("hot: ")?.trim(), 16).ok());
            Some((products, executed, Run { count: 0.0, hot: hot.collect(), table }))
        };
        find().ok_or_else(|| format!("qemu-aarch64 {program}: {}", text.join("\n")))
    };
    // One token is over so soon that what else the program does would show: more repetitions.
    let more = if arguments[3] == "1" { 8 } else { 1 };
    let ((products, once, _), (_, often, hot)) = (run(1)?, run(1 + more)?);
    Ok(Run { count: (often - once) / f64::from(more) / products * 1000.0, ..hot })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_demo_is_read() {
        let text = "\
model              bits      size  ratio  perplexity      KL  same top token
----------------------------------------------------------------------------
original         16.000   5.51 MB  1.0 x      24.802       -               -
2 bits            1.999  688.5 kB  8.0 x      32.156  0.3274          64.6 %
2 bits, learned   1.999  688.5 kB  8.0 x      25.555  0.1291          76.9 %

Bits per weight count everything stored";
        let rows = perplexities(text, 3).expect("three models");
        let rows: Vec<_> = rows.iter().map(|(name, value)| (directory(name), *value)).collect();
        let want = [("original", 24.802), ("2bit", 32.156), ("2bit-learned", 25.555)];
        assert_eq!(rows, want.map(|(name, value)| (name.to_owned(), value)));
        assert!(perplexities(text, 4).is_err(), "a row is missing");
    }
}
