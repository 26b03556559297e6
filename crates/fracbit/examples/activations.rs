//! What rounding activations to 8 bits costs by itself: `activations MODEL TEXT [CTX] [WINDOWS]`, a
//! model quantized by `quantize` in schemes that multiply in 8 bits (such as `--scheme nuq-5`).
//!
//! The baseline has the same quantized weights, decoded to f32 and multiplied with exact
//! activations; so the divergence is that of rounding alone. Each row runs one place's layers as
//! they are, all others decoded. Then, for every place, how much of its inputs' energy rounding
//! loses, and how many rows lose far more than the mean.
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(clippy::cast_precision_loss, reason = "counts of tokens")]

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
};

use fracbit::{EvalOptions, Opened, Quiet, evaluate, kernels};
use fracbit_kernels::Team;
use fracbit_model::{BlockInput, LayerLinear, Linear, LinearId, Model, Read, StateOptions};

type Any<T> = Result<T, Box<dyn std::error::Error>>;

/// Columns that share a scale of 8-bit activations.
const GROUP: usize = 256;
/// A row is counted when it loses more than so many times the mean.
const TIMES: [f64; 3] = [3.0, 10.0, 30.0];

fn main() -> Any<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, text, rest @ ..] = &args[..] else {
        return Err("usage: activations MODEL TEXT [CTX] [WINDOWS]".into());
    };
    let number = |i: usize, default: usize| rest.get(i).map_or(Ok(default), |n| n.parse::<usize>());
    let options =
        EvalOptions { ctx: Some(number(0, 512)?), windows: Some(number(1, 8)?), ..EvalOptions::default() };
    let opened = Opened::new(Path::new(dir))?;
    let windows = evaluate::windows(&opened, &std::fs::read_to_string(text)?, Path::new(text), &options)?;
    let packed = opened.model(&kernels()?, true)?;
    let mut decoded = HashMap::new();
    for id in LinearId::all(packed.config()) {
        let linear = packed.linear(id)?;
        let bias = linear.bias().map(<[f32]>::to_vec);
        decoded.insert(id, Arc::new(Linear::dense(linear.shape(), linear.to_dense()?, bias)?));
    }
    // Layers that are not `kept` packed become decoded ones.
    let with = |kept: &dyn Fn(LinearId) -> bool| -> Any<Model> {
        let mut model = packed.clone();
        for (&id, linear) in decoded.iter().filter(|(id, _)| !kept(**id)) {
            model.replace(id, Arc::clone(linear))?;
        }
        Ok(model)
    };
    let exact = with(&|_| false)?;
    println!("| layers with rounded inputs | KL divergence | same top token |\n| --- | --- | --- |");
    let row = |name: &str, model: &Model| -> Any<()> {
        let found = evaluate::score(model, Some(&exact), &windows, StateOptions::default(), 0.0, &Quiet)?;
        let (kl, same) = (found.kl.unwrap_or_default(), found.top1_agreement.unwrap_or_default());
        println!("| {name} | {kl:.6} | {:.2} % |", 100.0 * same);
        Ok(())
    };
    let place = |id: LinearId| match id {
        LinearId::Layer(_, linear) => Some(BlockInput::of(linear)),
        LinearId::Embed | LinearId::Head => None,
    };
    row("all", &with(&|_| true)?)?;
    row("all but the head", &with(&|id| place(id).is_some())?)?;
    for input in BlockInput::ALL {
        row(&format!("{input:?}"), &with(&|id| place(id) == Some(input))?)?;
    }
    println!(
        "\n| input | rows | energy lost | worst row | rows that lose 3, 10, 30 times the mean | first tokens | others |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for input in BlockInput::ALL {
        let lost = losses(exact.clone(), &decoded, input, &windows)?;
        let mean = |rows: &[f64]| rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        let all: Vec<f64> = lost.iter().map(|(_, e)| *e).collect();
        let of = |first: bool| mean(&lost.iter().filter(|l| l.0 == first).map(|l| l.1).collect::<Vec<_>>());
        let above = TIMES.map(|times| all.iter().filter(|e| **e > times * mean(&all)).count());
        let worst = all.iter().copied().fold(0.0, f64::max);
        println!(
            "| {input:?} | {} | {:.2e} | {worst:.2e} | {above:?} | {:.2e} | {:.2e} |",
            all.len(),
            mean(&all),
            of(true),
            of(false)
        );
    }
    Ok(())
}

/// Whether each row of an input of all blocks is a first token, and the share of its energy that
/// rounding loses.
fn losses(
    mut model: Model,
    decoded: &HashMap<LinearId, Arc<Linear>>,
    input: BlockInput,
    windows: &[Vec<u32>],
) -> Any<Vec<(bool, f64)>> {
    let found = Arc::new(Mutex::new(Vec::new()));
    for layer in 0..model.config().num_hidden_layers() {
        let id = LinearId::Layer(
            layer,
            LayerLinear::ALL.into_iter().find(|l| BlockInput::of(*l) == input).expect("a reader"),
        );
        let (linear, found) = (&decoded[&id], Arc::clone(&found));
        let cols = linear.shape().cols;
        let watched = Linear::dense(linear.shape(), linear.to_dense()?, linear.bias().map(<[f32]>::to_vec))?
            .observed(Arc::new(move |_: &Team<'_>, read: Read<'_>| {
                let rows = read.x.chunks_exact(cols).enumerate().map(|(i, x)| (i == 0, lost(x)));
                found.lock().expect("no panic holds it").extend(rows);
            }));
        model.replace(id, watched)?;
    }
    let mut hidden = Vec::new();
    for window in windows {
        // One chunk, so that its first row is the first token.
        let options = StateOptions { chunk: window.len(), ..Default::default() };
        let mut state = model.state(&options);
        model.forward(&mut state, window, &mut hidden)?;
    }
    let found = found.lock().map_err(|_| "a panic held the losses")?;
    Ok(found.clone())
}

/// The share of a row's energy that rounding loses.
fn lost(x: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let error: f64 = x
        .chunks(GROUP)
        .map(|group| {
            let scale = group.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
            let of = |v: f32| if scale > 0.0 { v - (v / scale).round_ties_even() * scale } else { 0.0 };
            group.iter().map(|v| square(of(*v))).sum::<f64>()
        })
        .sum();
    let energy: f64 = x.iter().map(|v| square(*v)).sum();
    if energy > 0.0 { error / energy } else { 0.0 }
}
