//! Measures the tables of `docs/lab/tables.md` and the plots of `docs/quality.md` anew:
//! `cargo xtask quality` (from the workspace root).
//!
//! Needs the evaluation text `../shared/text/tinystories-eval.txt` beside the workspace; takes some
//! ten minutes on two cores.
#![expect(clippy::print_stdout, reason = "an example")]

mod page;

use fracbit::{
    EvalOptions, Evaluation, Inventory, Opened, Plan, PlanOptions, Protocol, QuantizeOptions, Quiet,
    Sensitivities, Target,
    distortion::{self, Distortion},
    evaluate, plan, quantize, sensitivity,
};
use fracbit_base::{Code, Palette, Scheme};
use fracbit_chart::{Axis, Chart, Point, Scale, Series};
use fracbit_model::RotationMode;
use page::replace_section;
use std::{fmt::Write as _, fs, path::Path};

type Any<T> = Result<T, Box<dyn std::error::Error>>;

const MODEL: &str = "crates/fracbit-cli/demo-model";
const TEXT: &str = "../shared/text/tinystories-eval.txt";
const ERRORS: &str = "crates/fracbit-codebook/data/nmse.txt";
const BITS: [f64; 7] = [5.0, 4.0, 3.25, 3.0, 2.5, 2.0, 1.75];

fn main() -> Any<()> {
    let only = std::env::args().nth(1).unwrap_or_default();
    if only != "model" {
        let weights = if only == "draft" { 1 << 16 } else { 1 << 20 };
        // Those with a scale for every few weights have a table of their own, which counts the
        // scales. Nested ones have one, too: several rates in one row.
        let plain = |scheme: &Scheme| scheme.group().is_none() && !scheme.to_string().starts_with("nest-");
        let schemes: Vec<_> = Scheme::all().filter(plain).collect();
        let rows = distortion::measure(&schemes, weights, 1, &Quiet)?;
        write_errors(&rows)?;
        replace_section("distortion", &distortion_table(&rows))?;
        distortion_plot(&rows)?;
    }
    if only != "distortion" && only != "draft" {
        model()?;
    }
    Ok(())
}

/// Renews the trellis lines of the error table that allocations use; the other lines are the
/// training example's.
fn write_errors(rows: &[Distortion]) -> Any<()> {
    let kept = fs::read_to_string(ERRORS)?;
    let mut out: String =
        kept.lines().filter(|l| !l.starts_with("tcq")).fold(String::new(), |s, l| s + l + "\n");
    for r in rows.iter().filter(|r| r.scheme == "tcq") {
        let code = r.code.as_deref().filter(|c| *c != "fine").map_or(String::new(), |c| format!("-{c}"));
        let _ = writeln!(out, "tcq{code}-{} {:.6e}", r.bits, r.nmse);
    }
    fs::write(ERRORS, out)?;
    Ok(())
}

fn distortion_table(rows: &[Distortion]) -> String {
    let mut out = String::from(
        "| scheme | code | bits | error | published | ratio | bound | excess bits |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for r in rows {
        let published = r.published.map_or("-".to_owned(), |p| format!("{p:.5}"));
        let ratio = r.published.map_or("-".to_owned(), |p| format!("{:.3}", r.nmse / p));
        let excess = 0.5 * (r.nmse / r.bound).log2();
        let code = r.code.as_deref().unwrap_or("-");
        let _ = writeln!(
            out,
            "| {} | {code} | {} | {:.6} | {published} | {ratio} | {:.6} | {excess:.4} |",
            r.scheme, r.bits, r.nmse, r.bound
        );
    }
    out
}

/// Excess rate over the rate-distortion bound, in bits, for every family.
fn distortion_plot(rows: &[Distortion]) -> Any<()> {
    let mut series: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for r in rows {
        let name = r.code.as_ref().map_or(r.scheme.clone(), |c| format!("{} {c}", r.scheme));
        let point = (r.bits, 0.5 * (r.nmse / r.bound).log2());
        match series.iter_mut().find(|(n, _)| *n == name) {
            Some((_, points)) => points.push(point),
            None => series.push((name, vec![point])),
        }
    }
    let (single, lines): (Vec<_>, _) = series.into_iter().partition(|(_, points)| points.len() == 1);
    let single = single.into_iter().flat_map(|(name, points)| {
        points.into_iter().map(move |at| Point { labelled: true, ..Point::from(at).titled(name.clone()) })
    });
    chart(
        "docs/distortion.svg",
        "Bits above the rate-distortion bound",
        ("bits per weight", "excess bits"),
        &lines,
        Some(Series::dots("of one rate", single.collect())),
        Scale::Linear,
    )
}

/// Quantizes the demo model at every budget and compares with the original.
fn model() -> Any<()> {
    let opened = Opened::new(Path::new(MODEL))?;
    let text = fs::read_to_string(TEXT).map_err(|e| format!("{TEXT}: {e}"))?;
    let source = opened.source(RotationMode::Fold, 0)?;
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Fold);
    let hash = opened.checkpoint.content_hash();
    let measured = sensitivity::measure(
        &source,
        &hash,
        Protocol { tokens: 1024, ..Protocol::FULL },
        None,
        &Quiet,
        &mut |_| Ok(()),
    )?;
    let options = EvalOptions { ctx: Some(256), windows: Some(24), ..EvalOptions::default() };
    let score = |dir: &Opened, base| evaluate(dir, base, &text, Path::new(TEXT), &options, &Quiet);
    let scratch = tempfile::tempdir()?;
    let build = |plan: &Plan, name: &str| -> Any<Evaluation> {
        let out = scratch.path().join(name);
        let command = "cargo xtask quality".to_owned();
        let provenance = QuantizeOptions {
            force: true,
            command,
            source: MODEL.to_owned(),
            source_hash: hash.clone(),
            ..QuantizeOptions::default()
        };
        quantize(&source, &inventory, plan, &out, &provenance, &Quiet)?;
        Ok(score(&Opened::new(&out)?, Some(&opened))?)
    };

    let mut table = String::from(
        "| bits per weight | bytes of tensors | perplexity | nats per token | KL divergence | top-1 agreement | predicted rise |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let dense = score(&opened, None)?;
    let _ = writeln!(
        table,
        "| 16 (bf16) | {} | {:.3} | {:.4} | 0 | 100 % | - |",
        opened.bytes(),
        dense.perplexity,
        dense.nats_per_token
    );
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let palettes: [(&str, Palette, &Sensitivities); 3] =
        [("tcq", Palette::Tcq, &measured), ("vq", Palette::Vq, &measured), ("nuq", Palette::Nuq, &measured)];
    for (name, palette, sensitivities) in palettes {
        let mut points = Vec::new();
        for bits in BITS {
            let options = PlanOptions { palette, code: Code::Fine, ..PlanOptions::new(Target::Bits(bits)) };
            let Ok(plan) = plan(&inventory, sensitivities, &options) else { continue };
            let e = build(&plan, &format!("{name}-{bits}"))?;
            let kl = e.kl.unwrap_or_default();
            points.push((e.bits_per_weight, kl));
            if palette == Palette::Tcq {
                let _ = writeln!(
                    table,
                    "| {:.3} | {} | {:.3} | {:.4} | {kl:.5} | {:.1} % | {:.4} |",
                    e.bits_per_weight,
                    fracbit_base::Bytes(plan.bytes),
                    e.perplexity,
                    e.nats_per_token,
                    100.0 * e.top1_agreement.unwrap_or_default(),
                    plan.predicted_loss
                );
            }
            println!("{name} {bits}: {e:?}");
        }
        curves.push((format!("{name}, mixed"), points));
    }
    replace_section("model", &table)?;

    let mut uniform = Vec::new();
    for name in ["tcq-4", "tcq-3", "tcq-2.5", "tcq-2", "tcq-1.5"] {
        let plan = plan(&inventory, &measured, &PlanOptions::new(Target::Uniform(name.parse()?)))?;
        let e = build(&plan, name)?;
        println!("{name}: {e:?}");
        uniform.push((e.bits_per_weight, e.kl.unwrap_or_default()));
    }
    let mut rows =
        String::from("| scheme everywhere | bits per weight | KL divergence |\n| --- | --- | --- |\n");
    for ((bits, kl), name) in uniform.iter().zip(["tcq-4", "tcq-3", "tcq-2.5", "tcq-2", "tcq-1.5"]) {
        let _ = writeln!(rows, "| {name} | {bits:.3} | {kl:.5} |");
    }
    replace_section("uniform", &rows)?;
    curves.push(("tcq, uniform".to_owned(), uniform));

    let mut rows =
        String::from("| rotation | plan | bits per weight | KL divergence |\n| --- | --- | --- | --- |\n");
    for (mode, label) in
        [(RotationMode::Fold, "fold"), (RotationMode::Online, "online"), (RotationMode::None, "none")]
    {
        let source = opened.source(mode, 0)?;
        let inventory = Inventory::of(&opened.checkpoint, &opened.config, mode);
        let options = PlanOptions { rotation: mode, ..PlanOptions::new(Target::Bits(3.0)) };
        let plan = plan(&inventory, &measured, &options)?;
        let out = scratch.path().join(format!("rotation-{label}"));
        let command = "cargo xtask quality".to_owned();
        let provenance = QuantizeOptions {
            force: true,
            command,
            source: MODEL.to_owned(),
            source_hash: hash.clone(),
            ..QuantizeOptions::default()
        };
        quantize(&source, &inventory, &plan, &out, &provenance, &Quiet)?;
        let e = score(&Opened::new(&out)?, Some(&opened))?;
        let _ = writeln!(
            rows,
            "| {label} | 3 bits, mixed | {:.3} | {:.5} |",
            e.bits_per_weight,
            e.kl.unwrap_or_default()
        );
    }
    replace_section("rotation", &rows)?;
    chart(
        "docs/quality.svg",
        "Demo model: divergence from the original",
        ("bits per weight", "KL, nats per token"),
        &curves,
        None,
        Scale::Logarithmic,
    )
}

/// One line with points per series, and points alone.
fn chart(
    path: &str,
    title: &str,
    axes: (&str, &str),
    series: &[(String, Vec<(f64, f64)>)],
    dots: Option<Series<'_>>,
    scale: Scale,
) -> Any<()> {
    let lines = series
        .iter()
        .map(|(name, points)| Series::line(name, points.iter().copied().map(Point::from).collect()));
    let chart = Chart {
        title,
        x: Axis { label: axes.0, scale: Scale::Linear },
        y: Axis { label: axes.1, scale },
        series: lines.chain(dots).collect(),
        limit: None,
    };
    fs::write(path, chart.file())?;
    println!("{path} written");
    Ok(())
}
