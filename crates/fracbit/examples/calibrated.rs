//! Measures the tables of `docs/lab/tables.md` on calibration anew: `cargo xtask quality` runs it
//! last (from the workspace root).
//!
//! Needs the models and texts of `../shared` beside the workspace. Arguments, in any order: names
//! of models (default: all), an effort of the search (default: exact), rates (default: all; the
//! rows of others stay).
#![expect(clippy::print_stdout, reason = "an example")]

mod page;
mod stories;

use fracbit::{
    Effort, Evaluation, Inventory, Opened, Plan, PlanOptions, Protocol, QuantizeOptions, Quiet, Rounders,
    Sensitivities, Target, evaluate,
    losses::{self, LossOptions},
    plan, quantize,
    sensitivity::{self, Text},
};
use fracbit_base::{Bytes, Scheme};
use fracbit_model::RotationMode;
use page::{replace_section, section_text};
use std::{fmt::Write as _, fs, path::Path, sync::Arc};
use stories::{EVAL, TRAIN};

type Any<T> = Result<T, Box<dyn std::error::Error>>;

const MODELS: &str = "../shared/models";
const NAMES: [&str; 2] = ["demo", "TinyStories-656K"];
const RATES: [&str; 6] = ["tcq-1.75", "tcq-2", "tcq-2.5", "tcq-3", "tcq-3.5", "tcq-4"];
/// Tokens of the calibration's text to measure coefficients on.
const LOSS_TOKENS: usize = 4096;

fn main() -> Any<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let effort = args.iter().find_map(|a| a.parse().ok()).unwrap_or(Effort::Exact);
    let chosen = |all: &[&'static str]| -> Vec<&'static str> {
        let some: Vec<_> = all.iter().copied().filter(|n| args.iter().any(|a| a == n)).collect();
        if some.is_empty() { all.to_vec() } else { some }
    };
    for name in chosen(&NAMES) {
        let (head, measured) = model(name, effort, &chosen(&RATES))?;
        let section = format!("calibrated {name}");
        let kept = section_text(&section)?;
        let rows = RATES.map(|rate| {
            let new = measured.iter().find(|(r, _)| *r == rate).map(|(_, rows)| rows.clone());
            new.unwrap_or_else(|| rows_of(&kept, rate))
        });
        replace_section(&section, &(head + &rows.concat()))?;
    }
    Ok(())
}

/// The rows of a rate in a table: from the first, which names it, to the next rate's.
fn rows_of(table: &str, rate: &str) -> String {
    let first = |line: &str| line.contains(" everywhere | no | ");
    let mut rows = table.lines().skip_while(|l| !(first(l) && l.contains(&format!(" {rate} everywhere "))));
    let head = rows.next().into_iter();
    head.chain(rows.take_while(|l| l.starts_with('|') && !first(l))).map(|l| format!("{l}\n")).collect()
}

/// The head of a model's table, and the rows of the rates.
fn model(name: &str, effort: Effort, rates: &[&'static str]) -> Any<(String, Vec<(&'static str, String)>)> {
    let dir = Path::new(MODELS).join(name);
    let opened = Opened::new(&dir)?;
    let (train, text) = (fs::read_to_string(TRAIN)?, fs::read_to_string(EVAL)?);
    let (scratch, hash) = (tempfile::tempdir()?, opened.checkpoint.content_hash());
    let options = stories::evaluating(name);
    let calibration = Arc::new(stories::calibration(&opened, name, &scratch.path().join("stats"))?);

    let source = opened.source(RotationMode::Fold, 0)?;
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Fold);
    let free = sensitivity::measure(&source, &hash, Protocol::FULL, None, &Quiet, &mut |_| Ok(()))?;
    let read = Text::read(&opened, &train, Path::new(TRAIN), LOSS_TOKENS, &stories::reading(name))?;

    let score = |dir: &Opened, base| evaluate(dir, base, &text, Path::new(EVAL), &options, &Quiet);
    let rounders = Rounders::new(effort);
    let build = |plan: &Plan, calibrated: bool, sequential: bool| -> Any<Evaluation> {
        let out = scratch.path().join("out");
        let options = QuantizeOptions {
            force: true,
            command: "cargo xtask quality".to_owned(),
            source: name.to_owned(),
            source_hash: hash.clone(),
            calibration: calibrated.then(|| Arc::clone(&calibration)),
            sequential,
            rounders: rounders.clone(),
            ..QuantizeOptions::default()
        };
        quantize(&source, &inventory, plan, &out, &options, &Quiet)?;
        Ok(score(&Opened::new(&out)?, Some(&opened))?)
    };
    let mut table = String::from(
        "| bits per weight | plan | calibrated | perplexity | KL divergence | of the first | top-1 agreement |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let dense = score(&opened, None)?;
    let _ = writeln!(table, "| 16 or 32 | the original | - | {:.3} | 0 | - | 100 % |", dense.perplexity);
    let mut measured = Vec::new();
    for &rate in rates {
        let mut lines = String::new();
        let scheme: Scheme = rate.parse()?;
        let make = |sensitivities: &Sensitivities, target| {
            plan(&inventory, sensitivities, &PlanOptions::new(target))
        };
        let uniform = make(&free, Target::Uniform(scheme))?;
        let along = LossOptions {
            default: scheme,
            schemes: vec![],
            calibration: Some(calibration.clone()),
            rounders: rounders.clone(),
        };
        let aware = losses::measure_along(&source, &hash, &along, &read, None, &Quiet, &mut |_| Ok(()))?;
        // The same bytes for the others.
        let size = Target::Size(Bytes(uniform.bytes));
        let mut rows = vec![
            (uniform.clone(), format!("{rate} everywhere"), "no", false, false),
            (make(&free, size)?, "mixed".to_owned(), "no", false, false),
            (uniform.clone(), format!("{rate} everywhere"), "sequentially", true, true),
            (make(&aware, size)?, "mixed".to_owned(), "sequentially", true, true),
        ];
        if rate == "tcq-2" {
            rows.push((uniform, format!("{rate} everywhere"), "at once", true, false));
            rows.push((make(&aware, size)?, "mixed".to_owned(), "at once", true, false));
        }
        let mut first = None;
        for (plan, what, how, calibrated, sequential) in rows {
            let e = build(&plan, calibrated, sequential)?;
            let kl = e.kl.unwrap_or_default();
            let first = *first.get_or_insert(kl);
            let row = format!(
                "| {:.3} | {what} | {how} | {:.3} | {kl:.5} | {:.2} | {:.1} % |",
                e.bits_per_weight,
                e.perplexity,
                kl / first,
                100.0 * e.top1_agreement.unwrap_or_default()
            );
            println!("{name} {row}");
            let _ = writeln!(lines, "{row}");
        }
        measured.push((rate, lines));
    }
    Ok((table, measured))
}
