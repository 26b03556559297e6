//! `fracbit demo`.

use crate::{
    args::SensitivitySource,
    context::Context,
    failure::Failure,
    files,
    generate::{Loading, Nested, Run, Words, Writer},
    planning::{Aids, Losses, Source},
    table::Table,
};
use clap::Args;
use fracbit::{
    Effort, EvalOptions, Evaluation, LearnOptions, Opened, PlanOptions, Progress, QuantizeOptions, Rounders,
    Target, tune,
};
use fracbit_base::{Bytes, Palette};
use fracbit_io::{EncodeOptions, OutputDir, Overwrite};
use fracbit_model::{KvType, SampleConfig, Sampler};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The embedded model, file by file.
const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../demo-model/config.json")),
    ("generation_config.json", include_bytes!("../../demo-model/generation_config.json")),
    ("model.safetensors", include_bytes!("../../demo-model/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../demo-model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo-model/tokenizer_config.json")),
];
/// Text that the model was not trained on.
const STORIES: &str = include_str!("../../demo-model/stories.txt");
const STORIES_FILE: &str = "stories.txt";
const ORIGINAL: &str = "original";
/// Budgets, in bits per weight with everything counted.
const BUDGETS: [f64; 3] = [4.0, 3.0, 2.0];
/// The budget whose model writes a story.
const TELLER: f64 = 3.0;
const PROMPT: &str = "Once upon a time, there was a little";
const STORY_TOKENS: usize = 90;
/// The budget that is tried once more after learning, and the tokens to learn from.
const LEARNED: f64 = 2.0;
const LEARNED_TOKENS: usize = 8192;
const LEARNED_NAME: &str = "2bit-learned";
const SEED: u64 = 0;

const AFTER: &str = "\
Examples:
  fracbit demo
  fracbit demo --keep demo
  fracbit demo --quick";

/// Show the whole story on a small embedded model, in a minute or two.
///
/// Quantizes a model of 2.8 million parameters, compiled into this program, at 4, 3 and 2 bits per
/// weight, measures each against the original on text it has not seen, the smallest once more after
/// learning from text that the model wrote, and lets the original and the 3-bit model tell a story
/// with the same seed. Needs no download. Such a small model has no room to spare; larger ones lose
/// less at the same bits.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct DemoArgs {
    /// Keep the models and the text in this new directory.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Measure nothing and search no trellis: vector codebooks by prior sensitivities, for slow
    /// machines. Loses more.
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &DemoArgs, context: &mut Context) -> Result<(), Failure> {
    // Removed when it goes out of scope.
    let temporary;
    let home = if let Some(path) = &args.keep {
        fs::create_dir(path).map_err(|e| Failure::writing(path, e))?;
        path.as_path()
    } else {
        temporary = tempfile::Builder::new()
            .prefix("fracbit-demo-")
            .tempdir()
            .map_err(|e| Failure::writing(&std::env::temp_dir(), e))?;
        temporary.path()
    };
    let original = home.join(ORIGINAL);
    unpack(home, &original)?;
    let source = Source::open(&original, context)?;
    let base = &source.opened;
    writeln!(
        context.out,
        "A Llama model of {} parameters, {} in bf16, trained on short stories, is embedded in this program.\n",
        base.params(),
        base.bytes()
    )?;
    context.out.flush()?;

    let mut table = Table::new(["model", "bits", "size", "ratio", "perplexity", "KL", "same top token"], &[]);
    let reference = evaluate(base, None, context)?;
    table.row(row("original", base, base, &reference));
    for (bits, dir) in quantize_all(&source, home, args.quick, context)? {
        let small = files::open(&dir, context)?;
        let result = evaluate(&small, Some(base), context)?;
        table.row(row(&format!("{bits} bits"), &small, base, &result));
    }
    if !args.quick {
        let dir = learn(&source, home, context)?;
        let small = files::open(&dir, context)?;
        let result = evaluate(&small, Some(base), context)?;
        table.row(row(&format!("{LEARNED} bits, learned"), &small, base, &result));
    }
    context.progress.finish();
    writeln!(
        context.out,
        "{table}\nBits per weight count everything stored: codes, scales, codebooks, norms, embedding. KL is the divergence from\n\
         the original in nats per token; perplexity is of a held-out text."
    )?;
    if !args.quick {
        writeln!(
            context.out,
            "The last one was learned (`quantize --learn`) from {LEARNED_TOKENS} tokens that the original wrote."
        )?;
    }
    writeln!(context.out)?;
    let teller = format!("The {TELLER}-bit model");
    for (name, dir) in [("The original", original), (teller.as_str(), home.join(name_of(TELLER)))] {
        writeln!(context.out, "{name}, same prompt and seed:\n")?;
        tell(&Arc::new(files::open(&dir, context)?), context)?;
    }
    if args.keep.is_some() {
        let [small, original, stories] =
            [name_of(TELLER).as_str(), ORIGINAL, STORIES_FILE].map(|name| files::typed(&home.join(name)));
        let home = home.display();
        writeln!(
            context.out,
            "Kept in {home}. Try next:\n  fracbit inspect {small}\n  fracbit run {small} -p \"One day, a bird\"\n  \
             fracbit eval {small} --text {stories} --bos --baseline {original}"
        )?;
    } else {
        writeln!(
            context.out,
            "`fracbit demo --keep DIR` keeps the models; `fracbit quantize --help` takes yours."
        )?;
    }
    Ok(())
}

/// Writes the embedded files.
fn unpack(home: &Path, original: &Path) -> Result<(), Failure> {
    let write = |path: PathBuf, bytes: &[u8]| fs::write(&path, bytes).map_err(|e| Failure::writing(&path, e));
    fs::create_dir(original).map_err(|e| Failure::writing(original, e))?;
    FILES.iter().try_for_each(|(name, bytes)| write(original.join(name), bytes))?;
    write(home.join(STORIES_FILE), STORIES.as_bytes())
}

/// Name of a quantized model's directory.
fn name_of(bits: f64) -> String {
    format!("{bits}bit")
}

/// Where a model came from.
fn record(source: &Source, command: String, rounders: &Rounders) -> QuantizeOptions {
    QuantizeOptions {
        command,
        source: "the embedded demo model".to_owned(),
        source_hash: source.hash().to_owned(),
        rounders: rounders.clone(),
        ..QuantizeOptions::default()
    }
}

/// One measurement, then one model per budget.
fn quantize_all(
    source: &Source,
    home: &Path,
    quick: bool,
    context: &Context,
) -> Result<Vec<(f64, PathBuf)>, Failure> {
    let (measured, palette, flag) = if quick {
        (SensitivitySource::Prior, Palette::Vq, " --quick")
    } else {
        (SensitivitySource::Quick, Palette::Tcq, "")
    };
    let mut options =
        PlanOptions { seed: SEED, palette, smoothing: true, ..PlanOptions::new(Target::Bits(TELLER)) };
    let weights = source.weights(None, &mut options, None, context)?;
    let inventory = source.inventory(options.rotation);
    let losses = Losses { source: measured, objective: None };
    let sensitivities = source.sensitivities(&inventory, &losses, &weights, &Aids::default(), context)?;
    let rounders = Rounders::default();
    let mut made = Vec::new();
    for bits in BUDGETS {
        let plan = fracbit::plan(
            &inventory,
            &sensitivities,
            &PlanOptions { target: Target::Bits(bits), ..options.clone() },
        )?;
        context.progress.note(&format!(
            "{bits} bits per weight: {}, predicted loss {:.4}",
            Bytes(plan.bytes),
            plan.predicted_loss
        ));
        let out = home.join(name_of(bits));
        let record = record(source, format!("fracbit demo{flag} ({bits} bits)"), &rounders);
        fracbit::quantize(&weights, &inventory, &plan, &out, &record, &context.progress)?;
        made.push((bits, out));
    }
    Ok(made)
}

/// One budget, as `fracbit quantize --learn` does it.
fn learn(source: &Source, home: &Path, context: &Context) -> Result<PathBuf, Failure> {
    let mut options = PlanOptions { seed: SEED, smoothing: true, ..PlanOptions::new(Target::Bits(LEARNED)) };
    let learning = LearnOptions {
        tokens: LEARNED_TOKENS,
        text: EvalOptions::default(),
        seed: SEED,
        rounders: Rounders::new(Effort::Balanced),
        max_memory: None,
    };
    let (scratch, progress) = (home.join("learning"), &context.progress);
    fs::create_dir(&scratch).map_err(|e| Failure::writing(&scratch, e))?;
    let calibration = fracbit::learn::calibrated(&source.opened, None, &scratch, &learning, progress)?;
    let weights = source.weights(None, &mut options, Some(&calibration), context)?;
    let inventory = source.inventory(options.rotation);
    let rounders = &learning.rounders;
    let measured =
        fracbit::learn::losses(&weights, &inventory, &options, &calibration, &scratch, rounders, progress)?;
    let sensitivities = measured.expect("a budget leaves a choice");
    let plan = fracbit::plan(&inventory, &sensitivities, &options)?;
    let out = home.join(LEARNED_NAME);
    let record = QuantizeOptions {
        calibration: Some(calibration),
        sequential: true,
        ..record(source, format!("fracbit demo ({LEARNED} bits, learned)"), rounders)
    };
    let dir = OutputDir::create(&out, Overwrite::No)?;
    tune::quantize_and_tune(dir, &source.opened, &inventory, &plan, &record, progress)?;
    fs::remove_dir_all(&scratch).map_err(|e| Failure::writing(&scratch, e))?;
    Ok(out)
}

fn evaluate(model: &Opened, baseline: Option<&Opened>, context: &Context) -> Result<Evaluation, Failure> {
    let options = EvalOptions { bos: Some(true), ..EvalOptions::default() };
    Ok(fracbit::evaluate(model, baseline, STORIES, Path::new(STORIES_FILE), &options, &context.progress)?)
}

#[expect(clippy::cast_precision_loss, reason = "a ratio to show")]
fn row(name: &str, model: &Opened, base: &Opened, result: &Evaluation) -> [String; 7] {
    let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    [
        name.to_owned(),
        format!("{:.3}", result.bits_per_weight),
        model.bytes().to_string(),
        format!("{:.1} x", base.bytes().0 as f64 / model.bytes().0.max(1) as f64),
        format!("{:.3}", result.perplexity),
        shown(result.kl.map(|kl| format!("{kl:.4}"))),
        shown(result.top1_agreement.map(|share| format!("{:.1} %", 100.0 * share))),
    ]
}

/// Streams a short story.
fn tell(opened: &Arc<Opened>, context: &mut Context) -> Result<(), Failure> {
    let loading = Loading::begin(opened);
    let words = Words::new(opened, opened.tokenizer()?);
    let tokens = words.tokenizer.encode(PROMPT, EncodeOptions::default())?;
    let config = SampleConfig { temperature: 0.6, top_p: 0.95, seed: SEED, ..SampleConfig::default() };
    let model = loading.finish()?;
    let context_tokens = opened.config.max_position_embeddings;
    let run = Run { context: context_tokens, kv: KvType::default(), nested: Nested::default() };
    let mut writer = Writer::new(&model, &words, run)?;
    let out = &mut context.out;
    out.stream(PROMPT)?;
    let written =
        writer.write(Sampler::new(config)?, tokens, STORY_TOKENS, &mut |piece| out.stream(piece))?;
    out.stream(" ...\n\n")?;
    context.progress.note(&written.speed.to_string());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_model_unpacks_and_opens() -> std::io::Result<()> {
        let home = tempfile::tempdir()?;
        let original = home.path().join(ORIGINAL);
        let opened =
            unpack(home.path(), &original).and_then(|()| files::open(&original, &Context::new(true)));
        let opened = opened.unwrap_or_else(|e| panic!("{e:?}"));
        assert_eq!(opened.params(), 2_755_008);
        let options = EvalOptions { bos: Some(true), ..EvalOptions::default() };
        let windows = fracbit::evaluate::windows(&opened, STORIES, Path::new(STORIES_FILE), &options);
        let tokens: usize = windows.unwrap_or_else(|e| panic!("{e}")).iter().map(|w| w.len() - 1).sum();
        assert!(tokens > 500, "a perplexity of {tokens} tokens says little");
        assert!(BUDGETS.contains(&TELLER));
        Ok(())
    }
}
