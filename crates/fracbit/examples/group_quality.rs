//! Whole models in group-wise codebooks beside plain groups, scalar and vector codebooks at the
//! same bits per weight: `group_quality MODEL TEXT [WINDOWS]`. Errors are means over all weights;
//! every stored bit counts.
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit::{
    EvalOptions, Inventory, Opened, PlanOptions, QuantizeOptions, Quiet, Sensitivities, Target, evaluate,
    plan, quantize,
};
use fracbit_base::Scheme;
use fracbit_format::Codebook;
use fracbit_model::RotationMode;
use std::path::Path;

/// What to compare: a name, a scheme, columns of a scale (0: a row), and the codebooks if not those
/// that `quantize` makes.
struct Kind {
    name: String,
    scheme: Scheme,
    group: usize,
    bytes: usize,
    codebooks: Vec<Codebook>,
}

/// One codebook of equally spaced entries, with zero among them or not: plain groups.
fn plain(scheme: Scheme, zero: bool) -> Codebook {
    let count = 1i16 << (scheme.quarters() / 4);
    let (step, first) =
        if zero { (252 / count, -(252 / count) * (count / 2)) } else { (254 / (count - 1) / 2 * 2, 0) };
    let entries = (0..count).map(|i| if zero { first + step * i } else { step * i - step / 2 * (count - 1) });
    Codebook::new(scheme, entries.collect(), 1.0 / 127.0).expect("a small table")
}

fn kinds(bits: u16) -> Vec<Kind> {
    let gnuq: Scheme = format!("gnuq-{bits}").parse().expect("a scheme");
    let scheme = |name: String| name.parse().expect("a scheme");
    let kind = |name: &str, scheme, group| Kind {
        name: name.to_owned(),
        scheme,
        group,
        bytes: 16,
        codebooks: Vec::new(),
    };
    let mut all = Vec::new();
    for (zero, name) in [(false, "plain groups"), (true, "plain groups with a zero")] {
        all.push(Kind { codebooks: vec![plain(gnuq, zero)], ..kind(name, gnuq, 32) });
    }
    all.push(kind("NUQ, groups of 32", scheme(format!("nuq-{bits}")), 32));
    all.push(kind("VQ, a scale per row", scheme(format!("vq-{bits}.5")), 0));
    let built_in = fracbit_quant::codebook(gnuq).expect("built in").clone();
    all.push(Kind { codebooks: vec![built_in], ..kind("group codebooks, built in", gnuq, 32) });
    for bytes in [16, 32, 64] {
        all.push(Kind { bytes, ..kind(&format!("group codebooks, {bytes} bytes, of this model"), gnuq, 32) });
    }
    all
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let (model, text) = match args.as_slice() {
        [_, model, text, ..] => (model, text),
        _ => return Err("usage: group_quality MODEL TEXT [WINDOWS]".into()),
    };
    let windows = Some(args.get(3).map_or(Ok(12), |n| n.parse())?);
    let opened = Opened::new(Path::new(model))?;
    let words = std::fs::read_to_string(text)?;
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("small");
    println!(
        "| rotation | scheme | quantizer | bits per weight | error | KL |\n| --- | --- | --- | --- | --- | --- |"
    );
    for rotation in [RotationMode::None, RotationMode::Fold] {
        let source = opened.source(rotation, 0)?;
        let inventory = Inventory::of(&opened.checkpoint, &opened.config, rotation);
        let prior = Sensitivities::prior(&inventory, rotation);
        for kind in [2, 3, 4].into_iter().flat_map(kinds) {
            let options = PlanOptions { rotation, ..PlanOptions::new(Target::Uniform(kind.scheme)) };
            let mut plan = plan(&inventory, &prior, &options)?;
            plan.layers.iter_mut().for_each(|l| l.group = kind.group);
            plan.fit_to(&inventory)?;
            let options = QuantizeOptions {
                force: true,
                command: "example".into(),
                source: model.clone(),
                source_hash: opened.checkpoint.content_hash(),
                codebook_bytes: Some(kind.bytes),
                codebooks: kind.codebooks,
                ..QuantizeOptions::default()
            };
            let report = quantize(&source, &inventory, &plan, &out, &options, &Quiet)?;
            let weight = |i: usize| plan.layers[i].rows as f64 * plan.layers[i].cols as f64;
            let sum = |f: &dyn Fn(usize) -> f64| (0..report.layers.len()).map(f).sum::<f64>();
            let error = sum(&|i| weight(i) * report.layers[i].relative_error) / sum(&weight);
            let eval = EvalOptions { ctx: Some(256), windows, bos: Some(true), ..EvalOptions::default() };
            let result =
                evaluate(&Opened::new(&out)?, Some(&opened), &words, Path::new(text), &eval, &Quiet)?;
            println!(
                "| {} | `{}` | {} | {:.3} | {error:.5} | {:.5} |",
                if rotation == RotationMode::None { "none" } else { "fold" },
                kind.scheme,
                kind.name,
                report.bits_per_weight,
                result.kl.unwrap_or_default()
            );
        }
    }
    Ok(())
}
