//! Device code: compiled without a GPU, inspected, gated, packed.
//!
//! The compiler and the disassembler come from the Python registry into two virtual environments
//! under `.venv-cuda` (pinned: PTX 9.0 is the newest that a driver of CUDA 13.0 loads; the
//! disassembler's packages clash with the compiler's). Every unit is compiled to a cubin for each
//! architecture and to PTX for those to come, and packed into one fat binary that
//! `fracbit-kernels-cuda` embeds; a hash of the sources travels with them.

use crate::{Failure, Outcome, root};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

#[path = "../../crates/fracbit-kernels-cuda/src/sources.rs"]
mod sources;
use sources::{UNITS, unit_hash};

const COMPILER: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];
const DISASSEMBLER: [&str; 2] = ["nvidia-cuda-cuobjdump==13.2.78", "nvidia-cuda-nvdisasm==13.2.78"];
const ARCHITECTURES: [u32; 4] = [80, 86, 89, 90];

/// Most instructions per weight of an inner loop, by kernel; the first match counts. The tensor
/// cores take eight tokens for the price of one. Trellis codes are bound by their lookups, not by
/// this (docs/cuda.md).
const GATES: [(&str, f64); 17] = [
    ("gemv_fast_8", 3.3),
    ("gemv_fast_", 4.6),
    ("gemv_hyb_", 3.3),
    ("gemv_pair_", 2.25),
    ("gemv_single_", 2.9),
    ("gemv_ints_", 2.95),
    ("gemv_books_", 3.1),
    ("gemv_levels_", 3.1),
    ("gemv_nest_", 7.0),
    ("gemv_bytes_", 2.8),
    ("gemv_half_fast_", 4.6),
    ("gemv_half_hyb_", 3.3),
    ("gemv_half_fine_", 6.5),
    ("gemv_fine_", 6.5),
    ("gemv_aq_m1", 2.3),
    ("gemv_aq_m2", 3.6),
    ("gemv_aq_m3", 4.4),
];

/// The gate of a kernel, if it has one.
fn gate(name: &str) -> Option<f64> {
    GATES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|&(_, most)| most)
}

/// What is known of one kernel on one architecture.
#[derive(Clone, Default)]
struct Facts {
    registers: u32,
    spills: u32,
    shared: u32,
    instructions: usize,
    local: bool,
    per_weight: Option<f64>,
}

/// Compiles, checks and packs everything.
pub(crate) fn run() -> Outcome {
    let (compiler, disassembler) = (tools("nvcc", &COMPILER)?, tools("dis", &DISASSEMBLER)?);
    let source = root().join("kernels/cuda");
    let out = source.join("out");
    fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let mut jobs = Vec::new();
    for (unit, instances) in UNITS {
        jobs.push((unit, instances, None));
        ARCHITECTURES.iter().for_each(|&arch| jobs.push((unit, instances, Some(arch))));
    }
    let facts = Mutex::new(BTreeMap::new());
    parallel(jobs, |(unit, instances, arch)| {
        let target = match arch {
            Some(arch) => out.join(format!("{unit}.sm_{arch}.cubin")),
            None => out.join(format!("{unit}.ptx")),
        };
        // The log keeps what the compiler said, under the hash of what it read.
        let hash = format!("{:016x}\n", hash_of(&source, unit, instances)?);
        let log = target.with_extension(arch.map_or("log".to_owned(), |a| format!("{a}.log")));
        let known = fs::read_to_string(&log).ok().filter(|text| text.starts_with(&hash) && target.exists());
        let text = match known {
            Some(text) => text,
            None => {
                let text = hash + &compile(&compiler, &source, (unit, instances), arch, &target)?;
                fs::write(&log, &text).map_err(|e| format!("{}: {e}", log.display()))?;
                text
            }
        };
        if let Some(arch) = arch {
            let mut found = resources(&text);
            inspect(&disassembler, &target, &mut found)?;
            let mut facts = facts.lock().expect("no panic");
            found.into_iter().for_each(|(name, fact)| {
                facts.insert((name, arch), fact);
            });
        }
        Ok(())
    })?;
    let facts = facts.into_inner().expect("no panic");
    let page = root().join("docs/cuda-kernels.md");
    let table = report(&facts, hash_of_all(&source)?);
    fs::write(&page, &table).map_err(|e| format!("{}: {e}", page.display()))?;
    table.lines().filter(|line| line.starts_with('|')).for_each(|line| println!("{line}"));
    println!(
        "kernels: {} on {} architectures, docs/cuda-kernels.md",
        names(&facts).len(),
        ARCHITECTURES.len()
    );
    gates(&facts)?;
    let mut total = 0;
    for (unit, instances) in UNITS {
        total += pack(&compiler, &out, unit)?;
        let hash = out.join(format!("{unit}.hash"));
        fs::write(&hash, format!("{:016x}\n", hash_of(&source, unit, instances)?))
            .map_err(|e| format!("{}: {e}", hash.display()))?;
    }
    println!("kernels: {} KiB of fat binaries in kernels/cuda/out", total >> 10);
    Ok(())
}

fn hash_of(source: &Path, unit: &str, instances: &str) -> Result<u64, Failure> {
    unit_hash(source, unit, instances).map_err(|e| format!("sources of {unit}: {e}"))
}

/// Compiles unless all artefacts are those of today's sources.
pub(crate) fn ensure() -> Outcome {
    let source = root().join("kernels/cuda");
    for (unit, instances) in UNITS {
        let made = fs::read_to_string(source.join(format!("out/{unit}.hash"))).unwrap_or_default();
        if made.trim() != format!("{:016x}", hash_of(&source, unit, instances)?) {
            return run();
        }
    }
    Ok(())
}

/// Runs jobs on as many threads as there are processors.
fn parallel<T: Send>(jobs: Vec<T>, run: impl Fn(T) -> Outcome + Sync) -> Outcome {
    let (jobs, failure) = (Mutex::new(jobs), Mutex::new(Ok(())));
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = { jobs.lock().expect("no panic").pop() } {
                    if let Err(message) = run(job) {
                        *failure.lock().expect("no panic") = Err(message);
                        jobs.lock().expect("no panic").clear();
                    }
                }
            });
        }
    });
    failure.into_inner().expect("no panic")
}

/// A virtual environment with pinned packages; returns the folder of its programs.
fn tools(name: &str, packages: &[&str]) -> Result<PathBuf, Failure> {
    let venv = root().join(".venv-cuda").join(name);
    let stamp = venv.join("packages.txt");
    let want = packages.join("\n");
    if fs::read_to_string(&stamp).unwrap_or_default() != want {
        let path = venv.display().to_string();
        crate::run("python3", &["-m", "venv", &path], &[])?;
        let pip = venv.join("bin/pip").display().to_string();
        crate::run(&pip, &[&["install", "-q"], packages].concat(), &[])?;
        fs::write(&stamp, want).map_err(|e| format!("{}: {e}", stamp.display()))?;
    }
    let lib = venv.join("lib");
    let python = fs::read_dir(&lib).map_err(|e| format!("{}: {e}", lib.display()))?.flatten().next();
    let python = python.ok_or_else(|| format!("{}: no Python folder", lib.display()))?;
    Ok(python.path().join("site-packages/nvidia/cu13/bin"))
}

/// Runs a program quietly; its output, or a failure that shows it.
fn output(command: &mut Command) -> Result<String, Failure> {
    let out = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    if out.status.success() { Ok(text) } else { Err(format!("{command:?}:\n{text}")) }
}

/// The name of an architecture as a unit is compiled for it: `gemm` uses what sm_90 alone has.
fn arch_name(unit: &str, arch: u32) -> String {
    format!("{arch}{}", if unit == "gemm" && arch == 90 { "a" } else { "" })
}

fn compile(
    tools: &Path,
    source: &Path,
    (unit, instances): (&str, &str),
    arch: Option<u32>,
    target: &Path,
) -> Result<String, Failure> {
    let mut command = Command::new(tools.join("nvcc"));
    command.args(["-std=c++17", "-O3", "-I."]).arg(format!("-DFB_UNIT=\"{instances}\"")).current_dir(source);
    match arch {
        Some(arch) => {
            let name = arch_name(unit, arch);
            command
                .args(["-cubin", "-Xptxas", "-v"])
                .arg(format!("-gencode=arch=compute_{name},code=sm_{name}"))
        }
        None => command.args(["-ptx", "-arch=compute_80"]),
    };
    output(command.arg("instances.cu").arg("-o").arg(target))
}

/// Registers, spills and static shared memory of each kernel, from what `ptxas -v` prints.
fn resources(text: &str) -> BTreeMap<String, Facts> {
    let number = |line: &str, before: &str| -> u32 {
        let Some(at) = line.find(before) else { return 0 };
        let digits = line[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        digits.parse().unwrap_or_default()
    };
    let (mut all, mut name) = (BTreeMap::<String, Facts>::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.split("entry function '").nth(1) {
            rest.split('\'').next().unwrap_or_default().clone_into(&mut name);
        }
        let fact = all.entry(name.clone()).or_default();
        if line.contains("spill stores") {
            fact.spills += number(line, " bytes stack frame")
                + number(line, " bytes spill stores")
                + number(line, " bytes spill loads");
        }
        if line.contains("Used ") {
            fact.registers = number(line, " registers");
            fact.shared = number(line, " bytes smem");
        }
    }
    all.remove("");
    all
}

/// Counts instructions in the disassembly of a cubin.
fn inspect(tools: &Path, cubin: &Path, facts: &mut BTreeMap<String, Facts>) -> Outcome {
    let path = std::env::join_paths([tools.to_path_buf(), "/usr/bin".into(), "/bin".into()])
        .map_err(|e| e.to_string())?;
    let text = output(Command::new(tools.join("cuobjdump")).arg("--dump-sass").arg(cubin).env("PATH", path))?;
    for part in text.split("Function : ").skip(1) {
        let name = part.lines().next().unwrap_or_default().trim();
        let code: Vec<(u64, &str)> = part.lines().filter_map(instruction).collect();
        let fact =
            facts.get_mut(name).ok_or_else(|| format!("{}: unexpected kernel {name}", cubin.display()))?;
        fact.instructions = code.len();
        fact.local = code.iter().any(|(_, i)| i.contains("LDL") || i.contains("STL"));
        if gate(name).is_some() {
            let (product, weights) = product(name);
            fact.per_weight = inner_loop(&code, product).map(|(n, products)| {
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                {
                    n as f64 / (products * weights) as f64
                }
            });
        }
    }
    Ok(())
}

/// Address and text of a line of disassembly such as `/*0470*/  IMAD R1, R2, R3, RZ ;  /* 0x...
/// */`.
fn instruction(line: &str) -> Option<(u64, &str)> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let text = rest.split_once(';')?.0.trim();
    (!text.is_empty()).then_some((u64::from_str_radix(address, 16).ok()?, text))
}

/// An instruction that counts a lane's weights in the loop of a product, and how many it stands
/// for: the tensor cores' takes four words of one or two weights.
fn product(name: &str) -> (&'static str, usize) {
    match name {
        _ if ["fine", "fast", "single"].iter().any(|code| name.contains(code)) => ("HMMA", 4),
        _ => ("HMMA", 8),
    }
}

/// Instructions and products of an innermost loop that holds products: of those with the most
/// products (the loops of matrices with one scale a row; others take an octet at a time) the
/// longest. A kernel may have one for each segment.
fn inner_loop(code: &[(u64, &str)], product: &str) -> Option<(usize, usize)> {
    let loops: Vec<(u64, u64)> = code
        .iter()
        .filter(|(_, text)| text.contains("BRA"))
        .filter_map(|&(at, text)| {
            let target = text.rsplit("0x").next()?;
            let digits: String = target.chars().take_while(char::is_ascii_hexdigit).collect();
            let target = u64::from_str_radix(&digits, 16).ok()?;
            (target < at).then_some((target, at))
        })
        .collect();
    // Cold blocks behind a loop jump back into it: of all ranges that hold a product, the shortest
    // is the loop it belongs to. Copies also begin before the loop: those belong to none.
    let products = code.iter().filter(|(_, text)| text.contains(product));
    let own = products.filter_map(|(at, _)| {
        loops.iter().filter(|(from, to)| (from..=to).contains(&at)).min_by_key(|(from, to)| to - from)
    });
    let sizes = own.map(|(from, to)| {
        let inside = || code.iter().filter(|(at, text)| (from..=to).contains(&at) && *text != "NOP");
        (inside().filter(|(_, text)| text.contains(product)).count(), inside().count())
    });
    sizes.max().map(|(products, length)| (length, products))
}

/// Before the hash of the sources in the page.
const SOURCES: &str = "Compiled from sources with hash `";

/// A hash of everything that is compiled.
fn hash_of_all(source: &Path) -> Result<u64, Failure> {
    UNITS
        .iter()
        .try_fold(0u64, |all, (unit, instances)| Ok(all.rotate_left(7) ^ hash_of(source, unit, instances)?))
}

fn names(facts: &BTreeMap<(String, u32), Facts>) -> BTreeSet<&str> {
    facts.keys().map(|(name, _)| name.as_str()).collect()
}

/// The page docs/cuda-kernels.md.
fn report(facts: &BTreeMap<(String, u32), Facts>, hash: u64) -> String {
    let mut out = format!(
        "<!-- Written by `cargo xtask kernels`: do not edit. -->\n\n# CUDA kernels, as compiled\n\n{SOURCES}{hash:016x}`; a test holds this page to it and to the gates.\n\n\
         Registers of each architecture, bytes of spills and local memory (all together), static shared memory (tables, activations and\n\
         rings are dynamic: `MatrixPlan::launch`), and instructions per weight of the inner loop of products, the largest of all\n\
         architectures. The gates are in `xtask/src/kernels.rs`; a spill or any use of local memory fails.\n\n\
         | kernel | registers sm_80, 86, 89, 90 | spills | shared | instructions (sm_90) | per weight |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for name in names(facts) {
        let all: Vec<&Facts> =
            ARCHITECTURES.iter().filter_map(|&a| facts.get(&(name.to_owned(), a))).collect();
        let registers: Vec<String> = all.iter().map(|f| f.registers.to_string()).collect();
        let spills: u32 = all.iter().map(|f| f.spills).sum();
        let shared = all.iter().map(|f| f.shared).max().unwrap_or_default();
        let length = all.last().map_or(0, |f| f.instructions);
        let per_weight = all.iter().filter_map(|f| f.per_weight).fold(f64::NAN, f64::max);
        let per_weight = if per_weight.is_nan() { "-".to_owned() } else { format!("{per_weight:.2}") };
        let _ = writeln!(
            out,
            "| `{name}` | {} | {spills} | {shared} | {length} | {per_weight} |",
            registers.join(", ")
        );
    }
    out
}

fn gates(facts: &BTreeMap<(String, u32), Facts>) -> Outcome {
    let mut broken = Vec::new();
    for ((name, arch), fact) in facts {
        if fact.spills > 0 || fact.local {
            broken.push(format!("{name} sm_{arch}: {} bytes of spills or local memory", fact.spills));
        }
        if gate(name).is_some() && fact.per_weight.is_none() {
            broken.push(format!("{name} sm_{arch}: no inner loop found"));
        }
        if let (Some(most), Some(got)) = (gate(name), fact.per_weight)
            && got > most
        {
            broken
                .push(format!("{name} sm_{arch}: {got:.2} instructions per weight, at most {most} allowed"));
        }
    }
    if broken.is_empty() { Ok(()) } else { Err(format!("kernels:\n  {}", broken.join("\n  "))) }
}

/// Packs cubins and PTX of a unit into a compressed fat binary; returns its size.
fn pack(tools: &Path, out: &Path, unit: &str) -> Result<u64, Failure> {
    let target = out.join(format!("{unit}.fatbin"));
    let mut command = Command::new(tools.join("fatbinary"));
    command.args(["-64", "--compress-all"]).arg(format!("--create={}", target.display()));
    for arch in ARCHITECTURES {
        let cubin = out.join(format!("{unit}.sm_{arch}.cubin"));
        command.arg(format!("--image3=kind=elf,sm={},file={}", arch_name(unit, arch), cubin.display()));
    }
    command.arg(format!("--image3=kind=ptx,sm=80,file={}", out.join(format!("{unit}.ptx")).display()));
    output(&mut command)?;
    Ok(fs::metadata(&target).map_err(|e| format!("{}: {e}", target.display()))?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_output_is_understood() {
        let text = "ptxas info    : Compiling entry function 'gemv_x' for 'sm_90'\n\
                    ptxas info    : Function properties for gemv_x\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                    ptxas info    : Used 85 registers, used 1 barriers, 48 bytes smem\n";
        let facts = &resources(text)["gemv_x"];
        assert_eq!((facts.registers, facts.spills, facts.shared), (85, 24, 48));
    }

    #[test]
    fn the_inner_loop_is_found_and_gated() {
        let sass = "  /*0000*/ MOV R1, R2 ;\n  /*0010*/ IADD3 R1, R2, R3, RZ ;\n  /*0020*/ HMMA.16816.F32 R4, R8, R12, R4 ;\n\
                    /*0030*/ NOP ;\n  /*0040*/ @!P0 BRA 0x10 ;\n  /*0050*/ @P1 BRA 0x0 ;\n  /*0060*/ BRA 0x60 ;\n";
        let code: Vec<_> = sass.lines().filter_map(instruction).collect();
        assert_eq!(code.len(), 7);
        assert_eq!(inner_loop(&code, "HMMA"), Some((3, 1)));
        let fact = Facts { per_weight: Some(9.0), ..Facts::default() };
        let facts = BTreeMap::from([(("gemv_fast_8".to_owned(), 90), fact)]);
        assert!(gates(&facts).is_err_and(|e| e.contains("gemv_fast_8")));
    }

    /// Continuous integration has no compiler for device code: it holds the page to the sources,
    /// and its figures to the gates.
    #[test]
    fn the_page_is_that_of_todays_sources_and_within_the_gates() {
        let page = fs::read_to_string(root().join("docs/cuda-kernels.md")).unwrap();
        let hash = page.split_once(SOURCES).and_then(|(_, rest)| rest.get(..16)).unwrap_or_default();
        let want = format!("{:016x}", hash_of_all(&root().join("kernels/cuda")).unwrap());
        assert_eq!(hash, want, "docs/cuda-kernels.md is of other sources: run `cargo xtask kernels`");
        let mut facts = BTreeMap::new();
        for line in page.lines().filter(|l| l.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let fact = Facts {
                spills: cells[3].parse().unwrap(),
                per_weight: cells[6].parse().ok(),
                ..Facts::default()
            };
            facts.insert((cells[1].trim_matches('`').to_owned(), 0), fact);
        }
        assert!(facts.len() > 140, "{} kernels", facts.len());
        gates(&facts).unwrap();
    }

    #[test]
    fn units_are_those_that_codegen_writes() {
        let mut units: Vec<&str> = UNITS.iter().map(|(unit, _)| *unit).collect();
        units.retain(|u| crate::codegen::CUDA_UNITS.contains(u));
        assert_eq!(units, crate::codegen::CUDA_UNITS);
    }
}
