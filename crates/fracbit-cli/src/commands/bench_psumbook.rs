//! `fracbit bench psumbook`.

use super::bench::{Common, schemes, shape};
use crate::{args, context::Context, failure::Failure, memory, table::Table};
use clap::Args;
use fracbit_base::{Bytes, Scheme, Shape};
use fracbit_bench::{self as bench, PsumbookOptions, PsumbookSpeed};

const AFTER: &str = "\
JSON fields: scheme, bits, threads, batch, tile ([partial sums, strips] with --tiles), build_us, psumbook_us, psumbook_spread, \
expanded_us, expanded_spread, ratio (expanded over psumbook), default (whether the scheme goes through a Psumbook here), gb_per_s \
(of codes, the faster way). Where a scheme has no Psumbook, its fields are null.

Examples:
  fracbit bench psumbook --threads 1 --batch 1,4
  fracbit bench psumbook --scheme aq-m1v4 --scheme aq-m4v8b4 --tiles --threads 1";

/// Schemes without flags: additive codebooks of 2 bits, and what has as many.
const CHOICE: [&str; 6] = ["aq-m1v4", "aq-m2v8", "aq-m2v8b4", "aq-m4v8b4", "vq-2", "tcq-fast-2"];

/// Measure additive codebooks through a Psumbook.
///
/// A Psumbook holds the products of all centroids with the activations: it is built once for all
/// rows, and then codes read it. Beside it stand the same matrices with expanded codes, and other
/// codes of as many bits. Times are of one product; building is measured with 16 rows, which hardly
/// count.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct PsumbookArgs {
    /// A scheme to measure; may be repeated [default: aq-m1v4, aq-m2v8, aq-m2v8b4, aq-m4v8b4, vq-2,
    /// tcq-fast-2].
    #[arg(long, value_name = "SCHEME")]
    scheme: Vec<Scheme>,
    /// Outputs by inputs of a matrix.
    #[arg(long, value_name = "RxC", default_value = "4096x4096", value_parser = shape)]
    shape: Shape,
    /// Tokens multiplied at once; from 9 on codes are expanded anyway.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1", value_parser = args::count)]
    batch: Vec<usize>,
    /// Distinct codes to walk through: more than the caches hold.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    bytes: Bytes,
    /// Measure several numbers of partial sums and of strips of rows that are read at once.
    #[arg(long)]
    tiles: bool,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &PsumbookArgs, context: &mut Context) -> Result<(), Failure> {
    memory::walked(args.bytes)?;
    let options = PsumbookOptions {
        schemes: schemes(&args.scheme, &CHOICE)?,
        shape: args.shape,
        batch: args.batch.clone(),
        threads: args.common.threads(),
        bytes: args.bytes.0,
        rounds: args.common.rounds.unwrap_or(7),
        tiles: if args.tiles { bench::psum_tiles() } else { vec![] },
    };
    let kernels = fracbit::kernels()?;
    let rows = bench::psumbook(&options, &kernels, &bench::with_psumbooks(&kernels), &context.progress)?;
    args.common.print(&rows, table, context)
}

fn table(rows: &[PsumbookSpeed]) -> Table {
    let head = [
        "scheme",
        "threads",
        "tokens",
        "sums x strips",
        "build us",
        "psumbook us",
        "least-most",
        "expanded us",
        "least-most",
        "ratio",
        "runs here",
        "GB/s",
    ];
    let mut table = Table::new(head, &[0, 3, 10]);
    let us = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.0}"));
    let spread = |of: Option<bench::Spread>| {
        of.map_or_else(|| "-".to_owned(), |of| format!("{:.0}-{:.0}", of.min, of.max))
    };
    for row in rows {
        table.row([
            row.scheme.to_string(),
            row.threads.to_string(),
            row.batch.to_string(),
            row.tile.map_or_else(|| "usual".to_owned(), |[sums, strips]| format!("{sums} x {strips}")),
            us(row.build_us),
            us(row.psumbook_us),
            spread(row.psumbook_spread),
            us(Some(row.expanded_us)),
            spread(Some(row.expanded_spread)),
            row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            if row.default { "psumbook" } else { "expanded" }.to_owned(),
            format!("{:.2}", row.gb_per_s),
        ]);
    }
    table
}
