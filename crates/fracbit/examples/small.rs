//! Quantizes a checkpoint and compares it with the original: `small MODEL TEXT BITS`.
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit::{CompressOptions, EvalOptions, Opened, Quiet, Target, compress, evaluate};
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, model, text, bits] = args.as_slice() else { return Err("usage: small MODEL TEXT BITS".into()) };
    let folder = tempfile::tempdir()?;
    let (model, out) = (Path::new(model), folder.path().join("small"));
    let report = compress(model, &out, &CompressOptions::new(Target::Bits(bits.parse()?)), &Quiet)?;
    println!("{:.3} bits per weight, {} bytes", report.bits_per_weight, report.bytes);
    let words = std::fs::read_to_string(text)?;
    let eval = EvalOptions { ctx: Some(256), windows: Some(24), ..EvalOptions::default() };
    let (small, original) = (Opened::new(&out)?, Opened::new(model)?);
    println!("{:?}", evaluate(&small, Some(&original), &words, Path::new(text), &eval, &Quiet)?);
    Ok(())
}
