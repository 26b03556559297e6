//! The command tree. Every flag is declared once, here or in the module of its command.

use crate::{args, commands};
use clap::{Args, Parser, Subcommand};

const AFTER: &str = "\
MODEL is a directory, either as Hugging Face publishes it (config.json, tokenizer.json, one or many \
safetensors files) or as `fracbit quantize` writes it, or a GGUF file.

Exit codes:
  0  done
  1  failed at run time: disk full, output exists, `verify` found damage
  2  usage: a flag or a value is wrong
  3  bad input: a model or file is missing, damaged or does not fit
  4  the budget is out of reach

Environment:
  FRACBIT_LOG   log filter, such as `debug` (default: `warn`)
  FRACBIT_ISA   highest instruction set, such as `scalar` (default: the best)

Example:
  fracbit demo";

/// Make large language models small at any number of bits per weight, and run them on CPUs and
/// NVIDIA GPUs.
///
/// fracbit gives every weight matrix the precision that serves the model best within a budget of
/// bits, bytes or time per token on this machine, writes the result as a model directory, measures
/// what was lost, and generates text from it.
#[derive(Debug, Parser)]
#[command(name = "fracbit", version, after_help = AFTER, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Threads to compute with; results do not depend on it [default: all cores].
    #[arg(long, global = true, value_name = "N", value_parser = args::threads, help_heading = "Every command")]
    pub(crate) threads: Option<usize>,
    /// No progress and no notes; errors still show.
    #[arg(short, long, global = true, help_heading = "Every command")]
    pub(crate) quiet: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Quantize(commands::quantize::QuantizeArgs),
    Plan(commands::plan::PlanArgs),
    Profile(commands::profile::ProfileArgs),
    Sensitivity(commands::sensitivity::SensitivityArgs),
    Calibrate(commands::calibrate::CalibrateArgs),
    Tune(commands::tune::TuneArgs),
    Eval(commands::eval::EvalArgs),
    Run(commands::run::RunArgs),
    Chat(commands::chat::ChatArgs),
    Serve(commands::serve::ServeArgs),
    Schedule(commands::schedule::ScheduleArgs),
    Export(commands::export::ExportArgs),
    Inspect(commands::inspect::InspectArgs),
    Verify(commands::verify::VerifyArgs),
    Distortion(commands::distortion::DistortionArgs),
    Explore(commands::explore::ExploreArgs),
    Simulate(commands::simulate::SimulateArgs),
    Synth(commands::synth::SynthArgs),
    Bench(commands::bench::BenchArgs),
    Demo(commands::demo::DemoArgs),
    Completions(commands::completions::CompletionsArgs),
    Doctor(commands::doctor::DoctorArgs),
    #[command(hide = true)]
    Man(commands::man::ManArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_tree_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_explains_itself_with_an_example() {
        let mut root = Cli::command();
        root.build();
        assert!(root.render_help().to_string().contains("Exit codes:"));
        let mut commands = 0;
        for command in root.get_subcommands_mut().filter(|c| c.get_name() != "help" && !c.is_hide_set()) {
            commands += 1;
            let name = command.get_name().to_owned();
            for help in [command.render_help().to_string(), command.render_long_help().to_string()] {
                assert!(help.contains("\nExample"), "{name}: {help}");
                assert!(help.contains(&format!("  fracbit {name}")), "{name}: {help}");
            }
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            assert!(!about.is_empty(), "{name}");
            let long = command.get_long_about().map(ToString::to_string).unwrap_or_default();
            assert!(long.len() > about.len() + 40, "{name} should have a paragraph of purpose: {long}");
        }
        assert_eq!(commands, 22);
    }

    /// Help breaks longer lines, and a shell does not take the pieces.
    #[test]
    fn examples_are_lines_that_can_be_copied() {
        fn check(command: &clap::Command) -> usize {
            let after = command.get_after_long_help().or(command.get_after_help());
            let after = after.map(ToString::to_string).unwrap_or_default();
            let examples = after.lines().filter(|line| line.starts_with("  "));
            let count = examples.inspect(|line| assert!(line.len() <= 100, "{line}")).count();
            count + command.get_subcommands().map(check).sum::<usize>()
        }
        assert!(check(&Cli::command()) > 70);
    }

    /// Command lines that must parse.
    const GOOD: [&str; 73] = [
        "doctor --json --threads 1",
        "man -o D",
        "serve M --log-requests --allow-host host.docker.internal --allow-origin https://chat.example --allow-origin http://localhost:3000",
        "serve M --cache-memory 2GB --kv 4",
        "bench serve M --requests 8 --prompt 99 --generate 9 --sequences 1,8 --kv 16,4 --cache-memory 1GB --threads 1,2 --json",
        "run M -p x --precision 3 --draft nested:2,4",
        "chat M --precision s.json --draft nested",
        "serve M --precision prefill=4,decode=4..2@64 --draft nested:2",
        "schedule fit M --prompts p.txt --quality rouge-l --tolerance 0.1 --steps 9 --points 3 --chat -o s.json --force",
        "schedule train M --text t.txt --samples 9 --quality match --points 3 --bits 4,2 --block 0,1 -o s.json",
        "simulate npu --shape llama-3-8b --schedule 3 --schedule prefill=3,decode=3..2@40 --macs 4096 --json",
        "simulate npu --model M --schedule 4 --clock 500 --bandwidth 16GB --prompt 9 --generate 9",
        "sensitivity M -o a.json --text t.txt --separator <s> --no-prefix-space --bos",
        "sensitivity M -o a.json --text t.txt --actual tcq-3 --palette nuq --code fast --calibration C",
        "calibrate M --text t.txt -o C",
        "calibrate M -o C --tokens 4096 --ctx 256 --no-bos --separator <s> --max-memory 1GB --force --resume --json",
        "tune Q --baseline M --text t.txt -o O",
        "tune Q --baseline M --text - -o O --tokens 9 --passes 1 --bos --max-memory 1GB --resume --force --json",
        "quantize M -o O --bits 2 --calibration C --sequential --resume --max-memory 2GB",
        "quantize M -o O --bits 3.25",
        "quantize --learn M -o O --scheme tcq-2",
        "quantize M -o O --bits 2 --learn=t.txt --tokens 9 --separator <s> --no-bos --no-prefix-space --resume",
        "quantize M -o O --bits 3.25 --effort exact",
        "quantize M -o O --size 900MB --palette all --code fast --rotation online --seed 7 --keep-head --force",
        "quantize M -o O --scheme half-tcq-3.25 --effort fast --json",
        "quantize M -o O --plan plan.json",
        "quantize M --bits 3 --dry-run",
        "quantize M -o O --bits 3 --sensitivity prior -q --threads 2",
        "plan M --bits 3.25 --save plan.json --json",
        "plan M --scheme tcq-hyb-2 --sensitivity a.json",
        "plan M --plan p.json --profile m.json",
        "plan M --bits 3 --objective actual --sensitivity a.json",
        "quantize M -o O --latency 20ms --objective error",
        "bench targets --shape tiny --profile m --count 2 --context 64 --batch 4 --rounds 1 --json",
        "plan M --bits 3 --explain --html r.html --json",
        "plan M --latency 20ms --size 1GB --bits 3 --profile m.json --context 1024 --batch 4 --no-fusion",
        "quantize M -o O --tokens-per-second 50 --profile m --pin layers.0.*=tcq-4 --pin lm_head=f16 --exclude *=vq-*",
        "profile M -o machine.json",
        "profile --shape llama-3.2-1b -o m.json --threads 2 --batch 1,4 --scheme tcq-2 --rounds 3 --force --json",
        "sensitivity M -o a.json",
        "sensitivity M -o a.json --tokens 1024 --levels 4 --rotation none --seed 1 --force --json",
        "eval M --text t.txt",
        "eval M --text - --baseline B --ctx 512 --windows 4 --no-bos --separator <s> --no-prefix-space --json",
        "run M -p hello -n 3",
        "run M -f - --greedy --chat",
        "run M -p -1 --temp 0.5 --top-k 4 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.1 --seed 3 --json",
        "chat M",
        "chat M --system S --ctx 512 --temp 0",
        "serve M",
        "serve M --host ::1 --port 0 --api-keys k --name n --alias a --alias b --slots 8 --peer-connections 9 --ctx 512 --greedy",
        "export M -o m.gguf --type q4_K",
        "export m.gguf -o n.gguf --type Q4_0 --calibration C --force --json",
        "inspect M",
        "inspect M --json",
        "verify M",
        "verify M --json",
        "distortion",
        "distortion --all --json",
        "distortion --scheme tcq-3 --scheme nuq-4 --weights 65536 --seed 1",
        "synth --shape llama-3.2-1b -o D",
        "synth --shape tiny -o D --vocab 512 --layers 1 --seed 9 --force",
        "bench limits --bytes 64MiB --threads 1,2 --rounds 3 --json",
        "bench kernels --scheme tcq-2 --shape 512x512 --batch 1,2,4,8 --threads 1",
        "bench encode --scheme tcq-2 --effort fast,exact --weights 4096 --threads 1,2 --rounds 3 --json",
        "explore --scheme aq-* --scheme vq-* --budget 2..2.5 --shape 512x512 --batch 2 --svg s.svg --force --json",
        "bench psumbook --scheme aq-m4v8b4 --batch 1,4 --threads 1 --tiles --json",
        "bench model M --prompt 128,512 --generate 8 --context 64",
        "bench model --shape llama-3.2-1b --bits 2 --vocab 32000 --layers 2 --threads 1,2",
        "demo",
        "demo --keep D",
        "completions fish",
        "--threads 1 demo",
        "-q demo",
    ];

    /// Command lines that must be refused, with a word of the reason.
    const BAD: [(&str, &str); 58] = [
        ("serve M --allow-origin *", "https://chat.example"),
        ("", "Usage"),
        ("quantise M", "quantise"),
        ("quantize M -o O", "--bits"),
        ("quantize M --bits 3", "--out"),
        ("plan M --bits 3 --objective perplexity", "data-free"),
        ("plan M --plan p --objective linear", "cannot be used with"),
        ("quantize M -o O --latency 20 --profile m", "20ms"),
        ("plan M --latency 20ms --tokens-per-second 9 --profile m", "cannot be used with"),
        ("plan M --bits 3 --pin layers.0", "LAYERS=SCHEME"),
        ("plan M --bits 3 --batch 9 --profile m", "at most 8"),
        ("plan M --bits 3 --plan p", "cannot be used with"),
        ("explore --force", "--svg"),
        ("profile", "--shape"),
        ("profile M", "--out"),
        ("quantize M -o O --bits 3 --scheme tcq-3", "cannot be used with"),
        ("quantize M -o O --bits 3 --plan p.json", "cannot be used with"),
        ("quantize M -o O --plan p.json --palette vq", "cannot be used with"),
        ("quantize M -o O --plan p.json --rotation none", "cannot be used with"),
        ("quantize M -o O --plan p.json --sensitivity prior", "cannot be used with"),
        ("quantize M -o O --plan p.json --seed 1", "cannot be used with"),
        ("quantize M -o O --plan p.json --keep-head", "cannot be used with"),
        ("quantize M -o O --scheme tcq-3 --palette vq", "cannot be used with"),
        ("quantize M -o O --scheme tcq-3 --code fast", "cannot be used with"),
        ("quantize M -o O --bits nan", "bits per weight"),
        ("quantize M -o O --bits 0", "bits per weight"),
        ("quantize M -o O --size 4apples", "expected a number with a unit"),
        ("quantize M -o O --scheme tcq-5.5", "1, 1.25"),
        ("plan M --bits 3 --palette best", "tcq"),
        ("tune Q --text t -o O", "--baseline"),
        ("tune Q --baseline M --text t -o O --passes 0", "at least 1"),
        ("sensitivity M", "--out"),
        ("sensitivity M -o a --tokens 0", "at least 1"),
        ("eval M", "--text"),
        ("eval M --text t --bos --no-bos", "cannot be used with"),
        ("run M", "--prompt"),
        ("run M -p a -f b", "cannot be used with"),
        ("run M -p a --greedy --temp 1", "cannot be used with"),
        ("run M -p a --top-p 1.5", "0 to 1"),
        ("run M -p a --temp -1", "at least 0"),
        ("export M -o m.gguf", "--type"),
        ("export M -o m.gguf --type q4_1", "q4_0, q8_0, q4_K, q6_K, f16"),
        ("serve", "<MODEL>"),
        ("serve M --host localhost", "IP"),
        ("serve M --slots 0", "at least 1"),
        ("distortion --all --scheme tcq-3", "cannot be used with"),
        ("synth --shape gpt-5 -o D", "llama-3.2-1b"),
        ("bench kernels --shape 16", "2048x8192"),
        ("bench kernels --all --scheme tcq-2", "cannot be used with"),
        ("bench kernels --batch 1,0", "at least 1"),
        ("bench model", "--shape"),
        ("bench model M --shape tiny", "cannot be used with"),
        ("bench model M --bits 2", "cannot be used with"),
        ("bench model M --vocab 300", "cannot be used with"),
        ("bench model --shape tiny --bits 2 --scheme tcq-2", "cannot be used with"),
        ("demo --threads 0", "at least 1"),
        ("completions powershell", "bash, zsh, fish"),
        ("run M -p a -n 0", "at least 1"),
    ];

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("fracbit").chain(line.split_whitespace()))
    }

    #[test]
    fn good_lines_parse() {
        for line in GOOD {
            if let Err(e) = parse(line) {
                panic!("{line}: {e}");
            }
        }
    }

    #[test]
    fn bad_lines_are_refused_with_the_reason() {
        for (line, word) in BAD {
            let Err(e) = parse(line) else { panic!("`{line}` was accepted") };
            assert_eq!(e.exit_code(), 2, "{line}");
            assert!(e.to_string().contains(word), "{line}: {e}");
        }
    }
}
