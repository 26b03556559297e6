//! `fracbit plan`.

use crate::{
    args::{BUDGET, LossArgs, ShapeArgs, SpeedArgs, TargetArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    planning::{self, Aids, Losses, Shown, Source},
    report::Report,
};
use clap::{ArgGroup, Args};
use fracbit::{Explanation, Plan, Prices, Progress};
use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
};

const AFTER: &str = "\
Budgets combine: --latency 20ms --size 900MB keeps both. A time needs a profile of the machine, which `fracbit profile` \
measures; with a profile and without a time, the speed is predicted. --memory is for weights and cache together: caches of 16, 8, 6 and 4 bits are \
tried, what each loses is measured on the unquantized model, and what it leaves for the weights is planned. With --json the document that --save writes \
is printed: bits_per_weight, bytes, predicted_loss, speed, fused, and for each of layers name, scheme, bits, rows, \
cols, bytes, sensitivity and predicted_loss.

Examples:
  fracbit plan Llama-3.2-1B --bits 3.25
  fracbit plan Llama-3.2-1B --size 600MB --sensitivity a.json --save plan.json
  fracbit plan Llama-3.2-1B --latency 20ms --profile machine.json --pin 'layers.0.*=tcq-4'
  fracbit plan Llama-3.2-1B --memory 2GB --context 8192 --sequences 4
  fracbit plan Llama-3.2-1B --plan edited.json --profile machine.json";

/// Show what each matrix would get within a budget of bits, bytes or time.
///
/// The table gives scheme, bits, size and predicted loss of every matrix, then the totals and how
/// far from the best possible plan this one can be at most. A saved plan is plain JSON: edit it,
/// check it with --plan, apply it with `quantize --plan`. How much each matrix matters is measured
/// first, by a quick protocol; `--sensitivity prior` measures nothing.
#[derive(Debug, Args)]
#[command(after_help = AFTER, group = ArgGroup::new("written").args(["save", "html"]).multiple(true))]
pub(crate) struct PlanArgs {
    /// The original checkpoint.
    model: PathBuf,
    /// Check a plan that was edited by hand and show its totals.
    #[arg(long, value_name = "FILE", group = "target", help_heading = BUDGET,
        conflicts_with_all = ["bits", "size", "memory", "latency", "tokens_per_second", "scheme", "palette", "also", "code", "rotation",
            "seed", "keep_head", "pin", "exclude", "sensitivity", "objective"])]
    plan: Option<PathBuf>,
    /// Write the plan to this file.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Replace the files of --save and --html.
    #[arg(long, requires = "written")]
    force: bool,
    /// Show where the loss comes from, what a byte and a microsecond are worth, and what would
    /// help.
    #[arg(long, conflicts_with = "plan")]
    explain: bool,
    /// Write a report to this file: one HTML page that needs nothing else.
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    html: Option<PathBuf>,
    /// Print the plan as JSON instead of the table; with --explain or --html all that the report
    /// holds.
    #[arg(long)]
    json: bool,
    // Last, since the heading of a group stays for what follows it.
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    speed: SpeedArgs,
    #[command(flatten)]
    shape: ShapeArgs,
    #[command(flatten)]
    losses: LossArgs,
}

pub(crate) fn run(args: &PlanArgs, context: &mut Context) -> Result<(), Failure> {
    // A plan may have been edited by hand.
    if args.save.is_some() && args.save == args.html {
        let rule = "--save, --html: should be two files";
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
    }
    let outputs = [args.save.as_ref(), args.html.as_ref()].into_iter().flatten();
    let claims = outputs.map(|path| files::claim(path, args.force, Some(&args.model)));
    let _claims = claims.collect::<Result<Vec<_>, _>>()?;
    let source = Source::open(&args.model, context)?;
    let (plan, report) = match &args.plan {
        Some(path) => (edited(path, &source, args)?, None),
        None => {
            let mut options = planning::options(&source, &args.target, &args.shape, &args.speed, context)?;
            let losses = Losses::new(&args.losses, &options)?;
            let memory = planning::memory(&source, &args.target, &args.speed);
            planning::reachable(&source, &options, &args.target, memory)?;
            let fixed = losses.rotation(args.shape.rotation, &mut options)?;
            let weights = source.weights(fixed, &mut options, None, context)?;
            let aids = Aids { memory, ..Aids::default() };
            let (inventory, sensitivities, plan) =
                planning::make(&source, &losses, &options, &weights, &aids, context)?;
            let report = (args.explain || args.html.is_some()).then(|| {
                let names = (args.model.display().to_string(), args.recorded());
                Report::new(names, &inventory, &sensitivities, &options, plan.clone())
            });
            (plan, report.transpose()?)
        }
    };
    context.progress.finish();
    match (&report, args.json) {
        (Some(report), true) => context.out.json(report)?,
        (None, true) => context.out.json(&plan)?,
        (_, false) => writeln!(context.out, "{}", Shown(&plan))?,
    }
    if let (Some(report), true) = (&report, args.explain && !args.json) {
        write!(context.out, "{}", Explained(&report.explanation, &plan))?;
    }
    if let (Some(report), Some(path)) = (&report, &args.html) {
        fracbit_io::write_atomic(path, report.html().as_bytes()).map_err(|e| Failure::writing(path, e))?;
        context.progress.note(&format!("wrote {}", path.display()));
    }
    if let Some(path) = &args.save {
        let text = serde_json::to_string_pretty(&plan).map_err(|e| Failure::writing(path, e.into()))?;
        fracbit_io::write_atomic(path, format!("{text}\n").as_bytes())
            .map_err(|e| Failure::writing(path, e))?;
        let (model, typed, path) = (files::typed(&args.model), files::typed(path), path.display());
        context
            .progress
            .note(&format!("wrote {path}; apply it: fracbit quantize {model} -o OUT --plan {typed}"));
    }
    Ok(())
}

impl PlanArgs {
    /// The command, for the report.
    fn recorded(&self) -> String {
        let Self { model, target, speed, shape, losses, .. } = self;
        let losses = losses.sensitivity.as_ref().map(|s| format!(" --sensitivity {s}")).unwrap_or_default();
        let (target, speed, shape) =
            (target.recorded(), speed.recorded(|path| path.display().to_string()), shape.recorded());
        format!("fracbit plan {} {target}{speed}{shape}{losses}", model.display())
    }
}

/// The analysis as text.
struct Explained<'a>(&'a Explanation, &'a Plan);

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explanation { code_bits, gap, prices, schemes, widths } = self.0;
        writeln!(f, "gap to the ideal Gaussian quantizer at {code_bits:.3} bits of codes per weight")?;
        writeln!(f, "  ideal          {:.6}", gap.ideal)?;
        writeln!(f, "  total gap      {:.6}", gap.total)?;
        writeln!(f, "  distortion     {:.6}, codes above the rate-distortion bound", gap.distortion)?;
        writeln!(f, "  allocation     {:.6}, bit-widths other than the ideal ones", gap.allocation)?;
        let Prices { byte, microsecond } = *prices;
        match byte > 0.0 {
            true => writeln!(f, "a byte more saves {byte:.3e}, a megabyte {:.6}", 1e6 * byte)?,
            false => writeln!(f, "a byte more saves nothing: size does not bind")?,
        }
        let limited = self.1.speed.as_ref().is_some_and(|s| s.limit_us.is_some());
        match microsecond > 0.0 {
            true => {
                let millisecond = 1e3 * microsecond;
                writeln!(f, "a microsecond more saves {microsecond:.3e}, a millisecond {millisecond:.6}")?;
            }
            false if limited => writeln!(f, "a microsecond more saves nothing: time does not bind")?,
            false => {}
        }
        for (what, list) in [("scheme", schemes), ("bit-width", widths)] {
            let best = list.iter().take(4);
            match best.len() {
                0 => writeln!(f, "one more {what} would save nothing")?,
                _ => writeln!(f, "one more {what} would save at most")?,
            }
            for gain in best {
                writeln!(f, "  {:.6} ({:.2} %)  {}", gain.saved, 100.0 * gain.share, gain.what)?;
            }
        }
        Ok(())
    }
}

/// A plan of a file, checked against the model and this machine.
fn edited(path: &Path, source: &Source, args: &PlanArgs) -> Result<Plan, Failure> {
    let (mut plan, inventory) = planning::read(path, source)?;
    plan.require_kernels(&fracbit::kernels()?).map_err(|e| planning::named(e, path))?;
    if let Some(speed) = planning::speed(source, &args.speed)? {
        plan.predict(&inventory, &speed)?;
    }
    Ok(plan)
}
