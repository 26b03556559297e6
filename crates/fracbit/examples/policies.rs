//! What answers lose when steps read fewer planes of a nested model, by different policies:
//! `policies MODEL PROMPTS [STEPS]`, a line of PROMPTS is what a user asks (PMPD, arXiv 2410.13461,
//! section 4.2: high precision belongs to the beginning of an answer).
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit::{Opened, Quiet, kernels, schedule::compare};
use fracbit_base::Rate;
use fracbit_io::Message;
use fracbit_schedule::Phase;
use std::{collections::BTreeMap, path::Path};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, prompts, rest @ ..] = &args[..] else {
        return Err("usage: policies MODEL PROMPTS [STEPS]".into());
    };
    let steps: usize = rest.first().map_or(Ok(64), |steps| steps.parse())?;
    let opened = Opened::new(Path::new(dir))?;
    let (model, tokenizer) = (opened.model(&kernels()?, true)?, opened.tokenizer()?);
    let rates: Vec<Rate> = model.precisions().into_iter().collect();
    let (Some(&low), Some(&high)) = (rates.first(), rates.last()) else {
        return Err("a nested model is wanted".into());
    };
    let text = std::fs::read_to_string(prompts)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let prompts = lines.map(|line| {
        let tokens = tokenizer.conversation(&[Message::new("user", line)], &BTreeMap::new(), false)?;
        tokens.ok_or_else(|| "a model with a chat template is wanted".into())
    });
    let prompts: Vec<Vec<u32>> = prompts.collect::<Result<_, Box<dyn std::error::Error>>>()?;

    // Decode steps of an answer whose prompt is read in full.
    let decode = |choose: &'static dyn Fn(usize, usize) -> bool| {
        move |phase| match phase {
            Phase::Decode(step) if !choose(step, steps) => low,
            _ => high,
        }
    };
    let (all, none) = (decode(&|_, _| true), decode(&|_, _| false));
    let (alternating, rising) = (decode(&|step, _| step % 2 == 0), decode(&|step, steps| 2 * step >= steps));
    let (falling, early) = (decode(&|step, steps| 2 * step < steps), decode(&|step, steps| 4 * step < steps));
    let names = [
        "high everywhere",
        "low everywhere, the prompt too",
        "low in the answer",
        "alternating",
        "low, then high from the middle on",
        "high, then low from the middle on",
        "high, then low from a quarter on",
    ];
    let uniform = |_| low;
    let reads: [&dyn Fn(Phase) -> Rate; 7] = [&all, &uniform, &none, &alternating, &rising, &falling, &early];
    let policies: Vec<(&str, &dyn Fn(Phase) -> Rate)> = names.into_iter().zip(reads).collect();
    println!("{} prompts, answers of {steps} tokens, {low} and {high}\n", prompts.len());
    println!("| policy | bits | KL | same tokens | ROUGE-L | tok/s |\n| --- | --- | --- | --- | --- | --- |");
    for one in compare(&model, &prompts, steps, &policies, &Quiet)? {
        println!(
            "| {} | {:.2} | {:.4} | {:.1} % | {:.3} | {:.1} |",
            one.name,
            one.mean_bits,
            one.kl,
            100.0 * one.alike,
            one.rouge_l,
            one.tokens_per_second
        );
    }
    Ok(())
}
