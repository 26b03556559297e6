//! `fracbit explore`.

use crate::{
    args,
    context::Context,
    failure::{Exit, Failure},
    files, memory,
    table::Table,
};
use clap::Args;
use fracbit::{Progress as _, overrides::Pattern, storage::Storage};
use fracbit_base::{Bytes, Scheme, Shape};
use fracbit_bench::{ExploreOptions, Explored, explore};
use fracbit_chart::{Axis, Chart, Point, Scale, Series};
use std::{collections::BTreeMap, io::Write, ops::RangeInclusive, path::PathBuf};

const AFTER: &str = "\
Bits are those of codes, scales and a codebook of the matrix's own. Schemes on the frontier are marked: no other one \
here is at least as good in bits, error and time, and better in one. Plans take additive codebooks and progressive \
schemes when they are named: `fracbit plan MODEL --also aq-m2v8`; `fracbit profile` times them with all others.

With --json a list is printed, each entry with scheme, bits, error, us, table_bytes and frontier.

Examples:
  fracbit explore --budget 2.0..2.5
  fracbit explore --scheme 'aq-*' --scheme 'tcq-*' --budget 2..3 --shape 4096x4096 --batch 4
  fracbit explore --budget 2..4 --svg schemes.svg";

/// Compare schemes for matrices of one shape: bits, error and time.
///
/// Measures the product of every scheme within a budget on this machine, beside its error on
/// Gaussian weights and its stored bits, and marks those that are worth choosing from.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ExploreArgs {
    /// Schemes to look at, by names in which * stands for any text; may be repeated [default: all].
    #[arg(long, value_name = "SCHEMES")]
    scheme: Vec<String>,
    /// Stored bits per weight to look at, such as 2.0..2.5.
    #[arg(long, value_name = "LOW..HIGH", default_value = "1..8", value_parser = budget)]
    budget: RangeInclusive<f64>,
    /// Outputs by inputs of a matrix.
    #[arg(long, value_name = "RxC", default_value = "4096x14336", value_parser = super::bench::shape)]
    shape: Shape,
    /// Tokens multiplied at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = args::count)]
    batch: usize,
    /// Distinct codes to walk through; below 1GiB caches may help.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    bytes: Bytes,
    /// Measurements of each scheme.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = args::count)]
    rounds: usize,
    /// Draw errors over times to an SVG file, with the frontier marked.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Replace the file of --svg.
    #[arg(long, requires = "svg")]
    force: bool,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

/// Bits from and to.
fn budget(text: &str) -> Result<RangeInclusive<f64>, String> {
    let bad = || {
        format!("should be LOW..HIGH bits per weight with LOW not above HIGH, such as 2.0..2.5, got `{text}`")
    };
    let (low, high) = text.split_once("..").ok_or_else(bad)?;
    let [low, high] =
        [low, high].map(|part| part.parse::<f64>().ok().filter(|bits| bits.is_finite() && *bits >= 0.0));
    match (low, high) {
        (Some(low), Some(high)) if low <= high => Ok(low..=high),
        _ => Err(bad()),
    }
}

/// All schemes with a measured error that a pattern names; without patterns all of them.
fn schemes(patterns: &[String]) -> Result<Vec<Scheme>, Failure> {
    let all = || Scheme::all().filter(|&scheme| Storage::Packed(scheme).error().is_ok());
    let patterns: Vec<Pattern> = patterns.iter().map(|text| Pattern::new(text)).collect();
    for pattern in &patterns {
        if !all().any(|scheme| pattern.matches(&scheme.to_string())) {
            let message =
                format!("--scheme: `{pattern}` should name a scheme with a known error, it names none");
            return Err(Failure::new(Exit::Usage, anyhow::Error::msg(message)));
        }
    }
    let named =
        |scheme: &Scheme| patterns.is_empty() || patterns.iter().any(|p| p.matches(&scheme.to_string()));
    Ok(all().filter(named).collect())
}

pub(crate) fn run(args: &ExploreArgs, context: &mut Context) -> Result<(), Failure> {
    memory::walked(args.bytes)?;
    let _claim = args.svg.as_ref().map(|path| files::claim(path, args.force, None)).transpose()?;
    let options = ExploreOptions {
        schemes: schemes(&args.scheme)?,
        budget: args.budget.clone(),
        shape: args.shape,
        batch: args.batch,
        threads: rayon::current_num_threads(),
        bytes: args.bytes.0,
        rounds: args.rounds,
    };
    let rows = explore(&options, &fracbit::kernels()?, &context.progress)?;
    context.progress.finish();
    if let Some(path) = &args.svg {
        fracbit_io::write_atomic(path, drawn(&rows, args).as_bytes())
            .map_err(|e| Failure::writing(path, e))?;
        context.progress.note(&format!("wrote {}", path.display()));
    }
    if args.json {
        return context.out.json(&rows);
    }
    write!(context.out, "{}", shown(&rows))?;
    Ok(())
}

/// Errors over times, a colour for each kind of scheme.
fn drawn(rows: &[Explored], args: &ExploreArgs) -> String {
    let point = |row: &Explored| Point {
        labelled: row.frontier,
        ..Point::from((row.us, row.error)).titled(format!(
            "{}, {:.3} bits, error {:.5}, {:.1} us, table of {}",
            row.scheme,
            row.bits,
            row.error,
            row.us,
            Bytes(row.table_bytes)
        ))
    };
    let mut kinds: BTreeMap<&str, Vec<Point>> = BTreeMap::new();
    for row in rows {
        let kind = row.scheme.rsplit_once('-').map_or(row.scheme.as_str(), |(kind, _)| kind);
        kinds.entry(kind).or_default().push(point(row));
    }
    // Below the others, which carry the labels.
    let frontier = rows.iter().filter(|row| row.frontier).map(|row| (row.us, row.error).into()).collect();
    let mut series =
        vec![Series { color: Some("var(--line)"), radius: 9.0, ..Series::dots("frontier", frontier) }];
    series.extend(kinds.into_iter().map(|(kind, points)| Series::dots(kind, points)));
    let tokens = if args.batch == 1 { "one token".to_owned() } else { format!("{} tokens", args.batch) };
    let title = format!(
        "{}, {tokens}, {} to {} bits, {} threads",
        args.shape,
        args.budget.start(),
        args.budget.end(),
        rayon::current_num_threads()
    );
    let chart = Chart {
        title: &title,
        x: Axis { label: "microseconds of a product", scale: Scale::Logarithmic },
        y: Axis { label: "error on Gaussian weights", scale: Scale::Logarithmic },
        series,
        limit: None,
    };
    chart.file()
}

fn shown(rows: &[Explored]) -> Table {
    let mut table = Table::new(["scheme", "bits", "error", "us", "table", "frontier"], &[5]);
    for row in rows {
        table.row([
            row.scheme.clone(),
            format!("{:.3}", row.bits),
            format!("{:.5}", row.error),
            format!("{:.1}", row.us),
            Bytes(row.table_bytes).to_string(),
            if row.frontier { "*".to_owned() } else { String::new() },
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_ranges() {
        assert_eq!(budget("2.0..2.5"), Ok(2.0..=2.5));
        assert_eq!(budget("2..2"), Ok(2.0..=2.0));
        for bad in ["2", "3..2", "..2", "a..b", "1..inf", "-1..2", "2..NaN"] {
            assert!(budget(bad).is_err_and(|e| e.contains(bad)), "{bad}");
        }
    }

    #[test]
    fn patterns_name_schemes() {
        let names = |patterns: &[&str]| -> Vec<String> {
            let patterns: Vec<String> = patterns.iter().map(|&p| p.to_owned()).collect();
            schemes(&patterns)
                .map_or_else(|_| Vec::new(), |all| all.iter().map(ToString::to_string).collect())
        };
        assert_eq!(names(&["aq-m2v8", "nuq-2"]).len(), 2);
        assert!(names(&["aq-*"]).iter().all(|name| name.starts_with("aq-")) && names(&["aq-*"]).len() > 1);
        assert!(names(&[]).len() > 40 && names(&["tqc-*"]).is_empty());
    }

    #[test]
    fn the_table_marks_the_frontier() {
        let row = Explored {
            scheme: "vq-2".to_owned(),
            bits: 2.008,
            error: 0.1076,
            us: 812.25,
            table_bytes: 2052,
            frontier: true,
        };
        let text = shown(&[row]).to_string();
        assert!(["vq-2", "2.008", "0.10760", "812.2", "*"].iter().all(|part| text.contains(part)), "{text}");
    }
}
