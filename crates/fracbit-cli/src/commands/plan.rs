//! `fracbit plan`.

use crate::{
    args::{SensitivitySource, ShapeArgs, TargetArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    planning::{self, Shown, Source},
};
use clap::Args;
use fracbit::Progress;
use std::{io::Write, path::PathBuf};

const AFTER: &str = "\
With --json the document that --save writes is printed: bits_per_weight, bytes, predicted_loss, and for each of \
layers name, scheme, bits, rows, cols, bytes, sensitivity and predicted_loss.

Examples:
  fracbit plan Llama-3.2-1B --bits 3.25
  fracbit plan Llama-3.2-1B --size 600MB --sensitivity a.json --save plan.json";

/// Show what each matrix would get within a budget.
///
/// Looks at shapes and sensitivities only, touches no weights and takes a moment. The table gives scheme, bits, size and
/// predicted loss of every matrix, then the totals and how far from the best possible plan this one can be at
/// most. A saved plan is plain JSON: edit it, then apply it with `quantize --plan`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct PlanArgs {
    /// The original checkpoint.
    model: PathBuf,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    shape: ShapeArgs,
    /// How much each matrix matters: a FILE of `fracbit sensitivity`, `quick` or `prior`.
    #[arg(long, value_name = "FILE|quick|prior", default_value = "prior")]
    sensitivity: SensitivitySource,
    /// Write the plan to this file.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Print the plan as JSON instead of the table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanArgs, context: &mut Context) -> Result<(), Failure> {
    let target = args.target.target();
    let target = target.ok_or_else(|| Failure::new(Exit::Usage, anyhow::Error::msg("a budget is needed")))?;
    let source = Source::open(&args.model)?;
    let (_, plan) = planning::make(&source, &args.sensitivity, &args.shape.options(target), context)?;
    context.progress.finish();
    if args.json {
        context.out.json(&plan)?;
    } else {
        writeln!(context.out, "{}", Shown(&plan))?;
    }
    if let Some(path) = &args.save {
        let text = serde_json::to_string_pretty(&plan).map_err(|e| Failure::writing(path, e.into()))?;
        files::write_atomic(path, format!("{text}\n").as_bytes()).map_err(|e| Failure::writing(path, e))?;
        let (model, path) = (args.model.display(), path.display());
        context
            .progress
            .note(&format!("wrote {path}; apply it: fracbit quantize {model} -o OUT --plan {path}"));
    }
    Ok(())
}
