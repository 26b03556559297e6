//! Where the width of forecast bars comes from: the constant `fracbit::forecast::TEXT`.
//!
//! Quantizes a published model in every family and compares the KL divergence on texts of four
//! kinds, known and foreign to it, with the forecast from noise on text that the model wrote. The
//! root mean square of `ln(measured / forecast)` is the constant. Another model, plan and text
//! check it: `tests/tests/end_to_end/forecast.rs`. Run from the workspace root, with the models and
//! texts of `../shared` beside it: `cargo run --release -p fracbit --example forecast_bar`.
#![expect(clippy::print_stdout, reason = "an example")]

mod page;

use fracbit::{
    EvalOptions, Inventory, Opened, PlanOptions, Protocol, QuantizeOptions, Quiet, Target, evaluate, plan,
    quantize, sensitivity,
};
use fracbit_base::Palette;
use fracbit_model::RotationMode;
use std::{fmt::Write as _, fs, path::Path};

const MODEL: &str = "../shared/models/TinyStories-656K";
const TEXTS: &str = "../shared/text";
/// Stories as the model was trained on, fairy tales, encyclopedia, web pages.
const FILES: [&str; 4] = ["tinystories-eval.txt", "grimm.txt", "wikitext2-test.txt", "calibration-c4.txt"];
const PLANS: [(Palette, &[f64]); 3] = [
    (Palette::Nuq, &[2.4, 3.3, 5.0]),
    (Palette::Vq, &[1.9, 2.8, 4.0]),
    (Palette::Tcq, &[1.5, 2.3, 3.3, 5.0]),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let opened = Opened::new(Path::new(MODEL))?;
    let hash = opened.checkpoint.content_hash();
    let paths = FILES.map(|file| Path::new(TEXTS).join(file));
    let texts = paths.iter().map(fs::read_to_string).collect::<Result<Vec<_>, _>>()?;
    let source = opened.source(RotationMode::Fold, 0)?;
    let inventory = Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Fold);
    let measured = sensitivity::measure(&source, &hash, Protocol::QUICK, None, &Quiet, &mut |_| Ok(()))?;
    let scratch = tempfile::tempdir()?;
    let reading = EvalOptions {
        ctx: Some(256),
        windows: Some(12),
        bos: Some(true),
        drop_prefix_space: true,
        separator: Some("<|endoftext|>".to_owned()),
        ..EvalOptions::default()
    };
    let mut table = String::from("| palette | bits per weight | sum of losses | forecast |");
    FILES.iter().for_each(|file| table += &format!(" `{file}` |"));
    table += &format!("\n|{}\n", " --- |".repeat(4 + FILES.len()));
    let (mut squares, mut count) = (0.0, 0.0);
    for (palette, rates) in PLANS {
        for &bits in rates {
            let options = PlanOptions { palette, ..PlanOptions::new(Target::Bits(bits)) };
            let made = plan(&inventory, &measured, &options)?;
            let forecast = made.forecast.ok_or("the model was measured as a whole")?;
            let out = scratch.path().join("out");
            let options =
                QuantizeOptions { force: true, source_hash: hash.clone(), ..QuantizeOptions::default() };
            quantize(&source, &inventory, &made, &out, &options, &Quiet)?;
            let small = Opened::new(&out)?;
            let mut row = format!(
                "| {} | {:.3} | {:.4} | {:.4} |",
                palette.name(),
                made.bits_per_weight,
                made.predicted_loss,
                forecast.kl
            );
            for (text, path) in texts.iter().zip(&paths) {
                let found = evaluate(&small, Some(&opened), text, path, &reading, &Quiet)?;
                let kl = found.kl.ok_or("there is a baseline")?;
                let miss = (kl / forecast.kl).ln();
                squares += miss * miss;
                count += 1.0;
                let _ = write!(row, " {kl:.4} ({miss:+.2}) |");
            }
            println!("{row}");
            let _ = writeln!(table, "{row}");
        }
    }
    let _ = writeln!(
        table,
        "\nRoot mean square of the numbers in brackets, `ln(measured / forecast)`: {:.3}.",
        f64::sqrt(squares / count)
    );
    page::replace_section("forecast bar", &table)
}
