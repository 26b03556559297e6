//! One module per command: its arguments, and what it does with them.

pub(crate) mod bench;
mod bench_psumbook;
mod bench_serve;
pub(crate) mod calibrate;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod distortion;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod explore;
pub(crate) mod export;
pub(crate) mod inspect;
pub(crate) mod man;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod schedule;
pub(crate) mod sensitivity;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod synth;
pub(crate) mod tune;
pub(crate) mod verify;

use crate::{
    cli::Command,
    context::Context,
    failure::{Exit, Failure},
};

/// Runs a command.
pub(crate) fn run(command: &Command, context: &mut Context) -> Result<Exit, Failure> {
    match command {
        Command::Quantize(args) => quantize::run(args, context)?,
        Command::Plan(args) => plan::run(args, context)?,
        Command::Profile(args) => profile::run(args, context)?,
        Command::Sensitivity(args) => sensitivity::run(args, context)?,
        Command::Calibrate(args) => calibrate::run(args, context)?,
        Command::Tune(args) => tune::run(args, context)?,
        Command::Eval(args) => eval::run(args, context)?,
        Command::Run(args) => run::run(args, context)?,
        Command::Chat(args) => chat::run(args, context)?,
        Command::Serve(args) => serve::run(args, context)?,
        Command::Schedule(args) => schedule::run(args, context)?,
        Command::Export(args) => export::run(args, context)?,
        Command::Inspect(args) => inspect::run(args, context)?,
        Command::Verify(args) => return verify::run(args, context),
        Command::Distortion(args) => distortion::run(args, context)?,
        Command::Explore(args) => explore::run(args, context)?,
        Command::Simulate(args) => simulate::run(args, context)?,
        Command::Synth(args) => synth::run(args, context)?,
        Command::Bench(args) => bench::run(args, context)?,
        Command::Demo(args) => demo::run(args, context)?,
        Command::Completions(args) => completions::run(args, context)?,
        Command::Doctor(args) => doctor::run(args, context)?,
        Command::Man(args) => man::run(args, context)?,
    }
    Ok(Exit::Done)
}
