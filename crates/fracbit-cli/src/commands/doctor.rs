//! `fracbit doctor`.

use crate::{
    context::Context,
    failure::Failure,
    gpu,
    memory::{Memory, soft_limit},
};
use clap::Args;
use fracbit::{Progress, machine::Machine};
use fracbit_base::Bytes;
use fracbit_bench::{LimitOptions, limits};
use serde::Serialize;
use std::{collections::BTreeMap, fmt, fs, io::Write, path::Path};

/// Bytes that the speed of memory is measured with: more than caches hold, and nowhere too much.
const READ: u64 = 512 << 20;
/// Files that `serve` has open at its most: connections, and some of its own.
const FILES: u64 = 600;

const AFTER: &str = "\
Measures for a second or two. `fracbit bench limits` measures thoroughly, `fracbit inspect --machine` lists the kernel of every scheme.

Examples:
  fracbit doctor
  fracbit doctor --json | jq .notes";

/// Show what this machine offers and what will run how.
///
/// Looks at processor, instruction sets, memory, disk, GPU and the limits that the system or a
/// container sets, says which kernels models get here and how fast they can be at best, and notes
/// what stands in the way.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Serialize)]
struct Findings {
    version: &'static str,
    /// Not built for tests.
    release: bool,
    system: &'static str,
    processor: Machine,
    /// Threads that commands use, `--threads` applied.
    threads: usize,
    architecture: String,
    features: Vec<String>,
    /// Schemes for each instruction set that they run with.
    kernels: BTreeMap<String, Vec<String>>,
    memory: Option<Memory>,
    read_gb_per_s: f64,
    gpu: Option<gpu::Facts>,
    /// Why there is none.
    without_gpu: Option<String>,
    /// Free space where the command runs.
    free_here: Option<Bytes>,
    /// Files that a process may have open.
    open_files: Option<u64>,
    /// What stands in the way of speed or size.
    notes: Vec<String>,
}

pub(crate) fn run(args: &DoctorArgs, context: &mut Context) -> Result<(), Failure> {
    let findings = Findings::find(&context.progress)?;
    context.progress.finish();
    if args.json {
        return context.out.json(&findings);
    }
    Ok(write!(context.out, "{findings}")?)
}

impl Findings {
    fn find(progress: &dyn Progress) -> Result<Self, Failure> {
        let microkernels = fracbit::microkernels()?;
        let threads = rayon::current_num_threads();
        let mut kernels: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (scheme, isa) in &microkernels.microkernels {
            kernels.entry(isa.clone()).or_default().push(scheme.to_string());
        }
        let processor = Machine::now();
        let memory = Memory::now();
        let bytes = memory.map_or(READ, |memory| READ.min(memory.available.0 / 4));
        let measured = limits(&LimitOptions { bytes, threads: vec![threads], rounds: 1 }, progress)?;
        let gpu = gpu::describe();
        let mut findings = Self {
            version: env!("CARGO_PKG_VERSION"),
            release: !cfg!(debug_assertions),
            system: std::env::consts::OS,
            processor,
            threads,
            architecture: microkernels.architecture,
            features: microkernels.features,
            kernels,
            memory,
            read_gb_per_s: measured[0].read_gb_per_s,
            without_gpu: gpu.as_ref().err().cloned(),
            gpu: gpu.ok(),
            free_here: fracbit_io::output::free_bytes(Path::new(".")).ok().map(Bytes),
            open_files: fs::read_to_string("/proc/self/limits")
                .ok()
                .as_deref()
                .and_then(|limits| soft_limit(limits, "Max open files")),
            notes: Vec::new(),
        };
        findings.notes = findings.judged();
        Ok(findings)
    }

    /// What stands in the way.
    fn judged(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |stands: bool, text: String| {
            if stands {
                notes.push(text);
            }
        };
        note(!self.release, "the program was built for tests and is slow: `cargo build --release`".into());
        #[expect(clippy::cast_precision_loss, reason = "a number of threads")]
        let busy = self.processor.load.filter(|load| *load > 0.5 * self.processor.threads as f64);
        if let Some(load) = busy {
            note(true, format!("other programs run (load {load:.1}): measured speeds are too low now"));
        }
        let slow = self.kernels.get("scalar").map_or(0, Vec::len);
        let all: usize = self.kernels.values().map(Vec::len).sum();
        note(
            slow > 0,
            format!("{slow} of {all} schemes have the slow reference alone (`inspect --machine` lists them)"),
        );
        let few = self.open_files.filter(|&files| files < FILES);
        if let Some(files) = few {
            note(
                true,
                format!("`serve` may want {FILES} open files, {files} are allowed: `ulimit -n {FILES}`"),
            );
        }
        let small = self.memory.filter(|memory| memory.usable().0 < 2 << 30);
        if let Some(memory) = small {
            note(true, format!("{} of memory are available: small models only", memory.usable()));
        }
        notes
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, system, architecture, threads, read_gb_per_s: rate, .. } = self;
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16} {value}");
        line("fracbit", format!("{version} on {system}, {architecture}"))?;
        let Machine { cpu, threads: all, .. } = &self.processor;
        line("processor", format!("{cpu}, {threads} of {all} threads"))?;
        line("instructions", self.features.join(", "))?;
        for (isa, schemes) in self.kernels.iter().rev() {
            line("kernels", format!("{isa} for {} schemes", schemes.len()))?;
        }
        if let Some(Memory { all, available, limit, .. }) = self.memory {
            let limit = limit.map_or_else(String::new, |limit| format!(", {limit} allowed here"));
            line("memory", format!("{all}, {available} available{limit}"))?;
        }
        line("", format!("{rate:.1} GB/s read by {threads} threads"))?;
        if let Some(free) = self.free_here {
            line("disk", format!("{free} free here"))?;
        }
        if let Some(files) = self.open_files {
            line("open files", format!("{files} at a time"))?;
        }
        match (&self.gpu, &self.without_gpu) {
            (Some(facts), _) => write!(f, "{facts}")?,
            (None, why) => writeln!(f, "{:<16} none: {}", "gpu", why.as_deref().unwrap_or_default())?,
        }
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16} {value}");
        let device = if self.gpu.is_some() { "; with `--device cuda` on the GPU" } else { "" };
        line("\nrun, chat, serve", format!("on the processor, {threads} threads{device}"))?;
        line("eval, bench", format!("on the processor, {threads} threads{device}"))?;
        // A token reads every weight once.
        line("", format!("at most {rate:.1} tokens/s of a model of 1 GB, {:.1} of one of 4 GB", rate / 4.0))?;
        if let Some(memory) = self.memory {
            let fits = Bytes(memory.usable().0 / 10 * 8);
            line("", format!("models of up to about {fits} fit, with room for a cache"))?;
        }
        let codes = if self.gpu.is_some() { "; with `--device cuda` codes on the GPU" } else { "" };
        line("quantize", format!("on the processor, layer by layer{codes}"))?;
        self.notes.iter().try_for_each(|note| line("note", note.clone()))
    }
}
