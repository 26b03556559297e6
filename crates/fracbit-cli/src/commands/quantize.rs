//! `fracbit quantize`.

use crate::{
    args::{SensitivitySource, ShapeArgs, TargetArgs, rotation_name},
    context::Context,
    failure::{Exit, Failure},
    files,
    planning::{self, Shown, Source},
};
use clap::Args;
use fracbit::{MemoryEstimate, Plan, PlanOptions, Progress, QuantizeOptions, Target, plan::Inventory};
use fracbit_base::Bytes;
use fracbit_io::{OutputDir, Overwrite};
use serde_json::json;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

const AFTER: &str = "\
Without --sensitivity, a quick measurement comes first: one noise level per matrix on 512 tokens that the model \
writes. It holds the whole model in memory; `--sensitivity prior` measures nothing and holds one matrix at a time.

OUT gets its name when everything in it is on disk. A run that is killed leaves OUT.partial-XXXXXX beside it, which \
may be deleted.

Examples:
  fracbit quantize Llama-3.2-1B -o Llama-3.2-1B-3.25bit --bits 3.25
  fracbit quantize Llama-3.2-1B -o small --size 600MB --sensitivity a.json
  fracbit quantize Llama-3.2-1B --bits 2.5 --dry-run";

/// Make a smaller model of a checkpoint, within a budget of bits or bytes.
///
/// Every weight matrix gets the scheme that costs the model least within the budget, is rotated so that its weights look
/// Gaussian, and is rounded by that scheme. The result is a model directory with checksums, its plan and a
/// model card. The same checkpoint, options and seed give the same bytes, whatever the number of threads.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct QuantizeArgs {
    /// The original checkpoint.
    model: PathBuf,
    /// Directory to write.
    #[arg(short, long, required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    #[command(flatten)]
    target: TargetArgs,
    /// Apply a plan of `fracbit plan --save`, edited or not.
    #[arg(long, value_name = "FILE", group = "target", help_heading = "Budget (exactly one)",
        conflicts_with_all = ["palette", "code", "rotation", "seed", "keep_head", "sensitivity"])]
    plan: Option<PathBuf>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// How much each matrix matters: a FILE of `fracbit sensitivity`, `quick` or `prior` [default: quick].
    #[arg(long, value_name = "FILE|quick|prior")]
    sensitivity: Option<SensitivitySource>,
    /// Print the plan and the memory it takes, write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace OUT when it is a model directory.
    #[arg(long)]
    force: bool,
    /// Print one JSON document: the report, or with --dry-run the plan.
    #[arg(long)]
    json: bool,
}

/// Where the plan comes from.
enum Recipe<'a> {
    /// It is made.
    Make(PlanOptions, SensitivitySource),
    /// It is read.
    Read(&'a Path),
}

impl QuantizeArgs {
    fn recipe(&self) -> Result<Recipe<'_>, Failure> {
        match (self.target.target(), &self.plan) {
            (None, Some(path)) => Ok(Recipe::Read(path)),
            (Some(target), _) => {
                // One scheme everywhere leaves nothing to decide, so nothing is worth measuring.
                let uniform = matches!(target, Target::Uniform(_));
                let default = if uniform { SensitivitySource::Prior } else { SensitivitySource::Quick };
                Ok(Recipe::Make(self.shape.options(target), self.sensitivity.clone().unwrap_or(default)))
            }
            (None, None) => Err(Failure::new(
                Exit::Usage,
                anyhow::Error::msg("one of --bits, --size, --scheme and --plan is needed"),
            )),
        }
    }
}

/// The command for the record. It names what decides the result and nothing else: no output path, no threads.
fn recorded(model: &Path, recipe: &Recipe<'_>) -> String {
    let model = model.display();
    match recipe {
        Recipe::Read(path) => format!("fracbit quantize {model} --plan {}", path.display()),
        Recipe::Make(options, sensitivity) => {
            let target = match options.target {
                Target::Bits(bits) => format!("--bits {bits}"),
                Target::Size(bytes) => format!("--size {}", bytes.0),
                Target::Uniform(scheme) => format!("--scheme {scheme}"),
            };
            let choice = match options.target {
                Target::Uniform(_) => String::new(),
                _ => format!(" --palette {} --code {}", options.palette.name(), options.code.name()),
            };
            let head = if options.keep_head { " --keep-head" } else { "" };
            let rotation = rotation_name(options.rotation);
            let seed = options.seed;
            format!(
                "fracbit quantize {model} {target}{choice} --rotation {rotation} --sensitivity {sensitivity} --seed {seed}{head}"
            )
        }
    }
}

/// Peak memory of the two phases, which do not overlap.
struct Memory {
    estimate: MemoryEstimate,
    measuring: Option<Bytes>,
}

impl Memory {
    fn quantizing(&self) -> String {
        let MemoryEstimate { matrix, packed, search } = self.estimate;
        let total = self.estimate.total();
        format!(
            "memory: quantizing takes about {total} beside the mapped file: largest matrix {matrix}, its codes {packed}, searches {search}"
        )
    }

    fn json(&self) -> serde_json::Value {
        let MemoryEstimate { matrix, packed, search } = self.estimate;
        json!({
            "matrix": matrix, "packed": packed, "search": search, "total": self.estimate.total(), "measuring": self.measuring,
        })
    }
}

fn measuring_line(bytes: Bytes) -> String {
    format!("memory: measuring takes about {bytes} for one matrix and the logits, beside the mapped file")
}

pub(crate) fn run(args: &QuantizeArgs, context: &mut Context) -> Result<(), Failure> {
    let recipe = args.recipe()?;
    let source = Source::open(&args.model)?;
    if let (Some(out), false) = (&args.out, args.dry_run) {
        probe(out, args.force)?;
    }
    let measuring = match &recipe {
        Recipe::Make(options, SensitivitySource::Quick) => {
            Some(planning::quick(options.seed).memory(&source.inventory(options.rotation)))
        }
        _ => None,
    };
    if let Some(bytes) = measuring {
        context.progress.note(&measuring_line(bytes));
    }
    let (inventory, plan) = resolve(&recipe, &source, context)?;
    context.progress.finish();
    let memory = Memory { estimate: MemoryEstimate::new(&plan, rayon::current_num_threads()), measuring };
    if args.dry_run {
        return show(args, &plan, &memory, context);
    }
    context.progress.note(&memory.quantizing());

    let Some(out) = &args.out else { return Ok(()) };
    let options = QuantizeOptions {
        force: args.force,
        command: recorded(&args.model, &recipe),
        source: args.model.display().to_string(),
        source_hash: source.hash().to_owned(),
    };
    let weights = source.opened.source(plan.rotation, plan.seed)?;
    let report = fracbit::quantize(&weights, &inventory, &plan, out, &options, &context.progress)?;
    context.progress.finish();
    if args.json {
        return context.out.json(&report);
    }
    let (model, shown) = (args.model.display(), report.path.display());
    writeln!(
        context.out,
        "{shown}: {} of tensors, {:.4} bits per weight, everything counted; predicted loss {:.4} nats per token\n\n\
         Try next:\n  fracbit eval {shown} --text FILE --baseline {model}\n  fracbit run {shown} -p \"Once upon a time\"",
        Bytes(report.bytes),
        report.bits_per_weight,
        report.predicted_loss,
    )?;
    Ok(())
}

/// Fails now rather than after the work when OUT cannot be written.
fn probe(out: &Path, force: bool) -> Result<(), Failure> {
    let overwrite = if force { Overwrite::Yes } else { Overwrite::No };
    // Dropping it removes the temporary directory.
    OutputDir::create(out, overwrite).map(drop)?;
    Ok(())
}

fn resolve(recipe: &Recipe<'_>, source: &Source, context: &Context) -> Result<(Inventory, Plan), Failure> {
    match recipe {
        Recipe::Make(options, sensitivity) => planning::make(source, sensitivity, options, context),
        Recipe::Read(path) => {
            let mut plan = Plan::parse(&files::read_text(path)?, &path.display().to_string())?;
            let inventory = source.inventory(plan.rotation);
            plan.fit_to(&inventory)?;
            Ok((inventory, plan))
        }
    }
}

fn show(args: &QuantizeArgs, plan: &Plan, memory: &Memory, context: &mut Context) -> Result<(), Failure> {
    if args.json {
        return context.out.json(&json!({ "plan": plan, "memory": memory.json() }));
    }
    writeln!(context.out, "{}", Shown(plan))?;
    if let Some(bytes) = memory.measuring {
        writeln!(context.out, "{}", measuring_line(bytes))?;
    }
    Ok(writeln!(context.out, "{}", memory.quantizing())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Probe {
        #[command(flatten)]
        args: QuantizeArgs,
    }

    fn args(line: &str) -> QuantizeArgs {
        match Probe::try_parse_from(std::iter::once("quantize").chain(line.split(' '))) {
            Ok(probe) => probe.args,
            Err(e) => panic!("{line}: {e}"),
        }
    }

    #[test]
    fn the_record_holds_what_decides_the_bytes_and_no_more() {
        let table = [
            (
                "M -o A --bits 3.25 --force",
                "fracbit quantize M --bits 3.25 --palette tcq --code fine --rotation fold --sensitivity quick --seed 0",
            ),
            (
                "M -o B --scheme tcq-fast-2",
                "fracbit quantize M --scheme tcq-fast-2 --rotation fold --sensitivity prior --seed 0",
            ),
            ("M -o B --plan p.json", "fracbit quantize M --plan p.json"),
            (
                "M -o C --size 1MB --keep-head --seed 3 --palette all --rotation none --sensitivity a.json",
                "fracbit quantize M --size 1000000 --palette all --code fine --rotation none --sensitivity a.json --seed 3 --keep-head",
            ),
        ];
        for (line, want) in table {
            let args = args(line);
            let recipe = args.recipe().unwrap_or_else(|e| panic!("{line}: {e:?}"));
            assert_eq!(recorded(&args.model, &recipe), want);
        }
    }
}
