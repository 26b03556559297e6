//! `fracbit bench serve`.

use super::bench::show;
use crate::{
    args::{self, KvBits},
    context::Context,
    failure::Failure,
    files,
    table::Table,
};
use clap::{
    ArgGroup, Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use fracbit::{Preset, preset::PRESETS};
use fracbit_base::{Bytes, Scheme};
use fracbit_bench::{self as bench, ServeOptions, ServeSpeed, Subject};
use std::path::PathBuf;

const AFTER: &str = "\
JSON fields: model, bits, threads, kv, sequences, requests, prompt, generate, seconds, tok_s, first_token_s ([median, last]), \
cache_bytes (most that was held), preempted (times that a sequence gave up its pages for others, and was computed again).

Example:
  fracbit bench serve small --requests 64 --prompt 1024 --generate 512 --sequences 1,8 --kv 16,4";

/// Measure many sequences at once.
///
/// Requests with prompts of random tokens, all there from the start, through the engine that
/// `serve` runs on: one after the other, and with more at a time. Each is run once.
#[derive(Debug, Args)]
#[command(after_help = AFTER, group = ArgGroup::new("subject").required(true).args(["model", "shape"]))]
pub(super) struct ServeArgs {
    /// Model directory, quantized or not.
    model: Option<PathBuf>,
    /// Shape of the model instead of a directory.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PRESETS.map(|p| p.name)).try_map(|name| Preset::named(&name)))]
    shape: Option<Preset>,
    /// Scheme of the random codes.
    #[arg(long, value_name = "SCHEME", conflicts_with = "model", default_value = "tcq-2")]
    scheme: Scheme,
    /// Blocks instead of the shape's.
    #[arg(long, value_name = "N", conflicts_with = "model", value_parser = args::count)]
    layers: Option<usize>,
    /// Requests.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = args::count)]
    requests: usize,
    /// Tokens of each prompt.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count)]
    prompt: usize,
    /// Tokens that each gets.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = args::count)]
    generate: usize,
    /// Most sequences at a time.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,16", value_parser = args::count)]
    sequences: Vec<usize>,
    /// Bits of a number in the cache.
    #[arg(long, value_name = "BITS,..", value_enum, value_delimiter = ',', default_value = "16")]
    kv: Vec<KvBits>,
    /// Most memory of the cache [default: what so many sequences take].
    #[arg(long, value_name = "SIZE")]
    cache_memory: Option<Bytes>,
    /// Numbers of threads, such as 1,2 [default: 1 and all cores].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = args::threads)]
    threads: Vec<usize>,
    /// Print a JSON list.
    #[arg(long)]
    json: bool,
}

impl ServeArgs {
    pub(super) fn run(&self, context: &mut Context) -> Result<(), Failure> {
        let threads = if self.threads.is_empty() { bench::default_threads() } else { self.threads.clone() };
        let options = ServeOptions {
            threads,
            requests: self.requests,
            prompt: self.prompt,
            generate: self.generate,
            sequences: self.sequences.clone(),
            kv: self.kv.iter().map(|&kv| kv.into()).collect(),
            cache: self.cache_memory,
        };
        let (kernels, opened) = (fracbit::kernels()?, self.model.as_deref());
        let opened = opened.map(|dir| files::open(dir, context)).transpose()?;
        let subject = match (&opened, self.shape) {
            (Some(opened), _) => Subject::Opened(opened),
            (None, Some(preset)) => {
                Subject::Random { preset, vocab: None, layers: self.layers, scheme: self.scheme }
            }
            (None, None) => return Ok(()), // the group wants one
        };
        let rows = bench::serve(subject, &options, &kernels, &context.progress)?;
        context.progress.finish();
        if self.json { context.out.json(&rows) } else { show(&mut context.out, &table(&rows)) }
    }
}

fn table(rows: &[ServeSpeed]) -> Table {
    let head = [
        "model",
        "bits",
        "threads",
        "cache",
        "at a time",
        "requests",
        "prompt",
        "generated",
        "s",
        "tok/s",
        "first token s",
        "last one s",
        "cache held",
        "preempted",
    ];
    let mut table = Table::new(head, &[]);
    for row in rows {
        table.row([
            row.model.clone(),
            format!("{:.2}", row.bits),
            row.threads.to_string(),
            row.kv.bits().to_string(),
            row.sequences.to_string(),
            row.requests.to_string(),
            row.prompt.to_string(),
            row.generate.to_string(),
            format!("{:.1}", row.seconds),
            format!("{:.1}", row.tok_s),
            format!("{:.2}", row.first_token_s[0]),
            format!("{:.2}", row.first_token_s[1]),
            Bytes(row.cache_bytes).to_string(),
            row.preempted.to_string(),
        ]);
    }
    table
}
