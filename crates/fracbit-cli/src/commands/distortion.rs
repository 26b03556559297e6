//! `fracbit distortion`.

use crate::{args, context::Context, failure::Failure, table::Table};
use clap::Args;
use fracbit::distortion::{Distortion, measure};
use fracbit_base::{Code, Palette, Scheme};
use std::io::Write;

const AFTER: &str = "\
With --json a list is printed, each entry with scheme, code, bits, nmse, bound and published (null where there is no \
such value).

Examples:
  fracbit distortion --scheme tcq-3 --scheme tcq-hyb-3
  fracbit distortion --all --json";

/// Measure the error of quantization schemes on Gaussian weights.
///
/// Rounds seeded N(0,1) weights and prints the mean squared error relative to their energy, beside
/// the least that any quantizer can reach at this rate (the rate-distortion bound) and the value
/// published with Q-Palette. Without flags: the default palette.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct DistortionArgs {
    /// A scheme to measure, such as tcq-3; may be repeated.
    #[arg(long, value_name = "SCHEME")]
    scheme: Vec<Scheme>,
    /// Every scheme with every trellis code.
    #[arg(long, conflicts_with = "scheme")]
    all: bool,
    /// Weights to round.
    #[arg(long, value_name = "N", default_value_t = 1 << 20, value_parser = args::count)]
    weights: usize,
    /// Seed of the weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

impl DistortionArgs {
    fn schemes(&self) -> Vec<Scheme> {
        match (self.all, self.scheme.as_slice()) {
            (true, _) => Scheme::all().collect(),
            (false, []) => Palette::default().schemes(Code::Fine),
            (false, some) => some.to_vec(),
        }
    }
}

pub(crate) fn run(args: &DistortionArgs, context: &mut Context) -> Result<(), Failure> {
    let schemes = args.schemes();
    let rows = measure(&schemes, args.weights, args.seed, &context.progress)?;
    context.progress.finish();
    if args.json {
        return context.out.json(&rows);
    }
    write!(context.out, "{}", shown(&schemes, &rows))?;
    Ok(())
}

/// A number that may be tiny, in four digits.
fn digits(value: f64) -> String {
    if value >= 1e-3 { format!("{value:.5}") } else { format!("{value:.3e}") }
}

fn shown(schemes: &[Scheme], rows: &[Distortion]) -> Table {
    let mut table =
        Table::new(["scheme", "bits", "error", "bound", "above bound", "published", "to published"], &[]);
    for (scheme, row) in schemes.iter().zip(rows) {
        table.row([
            scheme.to_string(),
            row.bits.to_string(),
            digits(row.nmse),
            digits(row.bound),
            format!("{:.2} dB", 10.0 * (row.nmse / row.bound).log10()),
            row.published.map_or_else(|| "-".to_owned(), digits),
            row.published.map_or_else(|| "-".to_owned(), |p| format!("{:.3} x", row.nmse / p)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_documented_fields() -> Result<(), serde_json::Error> {
        let row = Distortion {
            scheme: "nuq".to_owned(),
            code: None,
            bits: 2.0,
            nmse: 0.1,
            bound: 0.0625,
            published: None,
        };
        let value = serde_json::to_value(row)?;
        let fields: Vec<_> =
            value.as_object().into_iter().flat_map(|o| o.keys()).map(String::as_str).collect();
        assert_eq!(fields, ["scheme", "code", "bits", "nmse", "bound", "published"]);
        Ok(())
    }

    #[test]
    fn the_table_compares() -> Result<(), fracbit_base::SchemeError> {
        let schemes = ["nuq-2".parse()?];
        let row = Distortion {
            scheme: "nuq".into(),
            code: None,
            bits: 2.0,
            nmse: 0.125,
            bound: 0.0625,
            published: Some(0.25),
        };
        let text = shown(&schemes, &[row]).to_string();
        assert!(text.contains("3.01 dB") && text.contains("0.500 x") && text.contains("nuq-2"), "{text}");
        Ok(())
    }
}
