//! Quantizes a checkpoint and compares it with the original: `small MODEL TEXT BITS`.
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit::{
    EvalOptions, Inventory, Opened, PlanOptions, Protocol, QuantizeOptions, Quiet, Target, evaluate, plan,
    quantize, sensitivity,
};
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, model, text, bits] = args.as_slice() else { return Err("usage: small MODEL TEXT BITS".into()) };
    let opened = Opened::new(Path::new(model))?;
    let choice = fracbit::smoothing::choose_for(&opened, None, true, 0, None, &Quiet)?;
    let rotation = choice.rotation;
    let source = opened.source(rotation, 0)?.smoothed(choice.smoothing);
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, rotation);
    let hash = opened.checkpoint.content_hash();
    let measured = sensitivity::measure(&source, &hash, Protocol::QUICK, None, &Quiet, &mut |_| Ok(()))?;
    let planned = PlanOptions { rotation, smoothing: true, ..PlanOptions::new(Target::Bits(bits.parse()?)) };
    let plan = plan(&inventory, &measured, &planned)?;
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("small");
    let options = QuantizeOptions {
        force: false,
        command: "example".into(),
        source: model.clone(),
        source_hash: hash,
        ..QuantizeOptions::default()
    };
    let report = quantize(&source, &inventory, &plan, &out, &options, &Quiet)?;
    println!("{:.3} bits per weight, {} bytes", report.bits_per_weight, report.bytes);
    println!(
        "predicted {:.4} nats per token, from measured errors {:.4}",
        plan.predicted_loss, report.predicted_loss
    );
    let words = std::fs::read_to_string(text)?;
    let eval = EvalOptions { ctx: Some(256), windows: Some(24), ..EvalOptions::default() };
    println!("{:?}", evaluate(&Opened::new(&out)?, Some(&opened), &words, Path::new(text), &eval, &Quiet)?);
    Ok(())
}
