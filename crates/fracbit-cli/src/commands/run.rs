//! `fracbit run`.

use crate::{
    args::{self, CacheArgs, NestedArgs},
    context::Context,
    failure::Failure,
    files,
    generate::{Nested, Prompt, Run, Start, WithModel, Words, Writer, Written, encode, finish_name},
    gpu::DeviceName,
    sampling::{self, SamplingArgs},
    structure::{RuleArgs, follow},
};
use clap::Args;
use fracbit::Progress;
use fracbit_io::Message;
use fracbit_model::{Runtime, Sampler};
use serde_json::json;
use std::{path::PathBuf, sync::Arc};

const AFTER: &str = "\
With --json the text is not streamed; one object is printed: text, tokens, prompt_tokens, stop (end, complete: by its structure, \
max_tokens or context_full), prefill_tokens_per_second, decode_tokens_per_second, guessed_tokens and, with --precision, mean_bits (of a weight, read \
by decode steps).

Where the text repeats itself or the prompt, several tokens are guessed and run in one step: the text is the same, sooner.

Examples:
  fracbit run small -p 'Once upon a time' -n 200
  fracbit run small --chat -p 'Why is the sky blue?' --greedy
  fracbit run small --chat -p 'Name a colour.' --regex 'red|green|blue'
  fracbit run small -f prompt.txt --temp 0.7 --top-k 40 --seed 1";

/// Continue a text.
///
/// Streams the continuation to standard output, in whole characters, and the speed to standard
/// error. The same prompt, options and seed give the same text. With `--chat` the prompt is put
/// into the model's chat template first.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct RunArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// The prompt.
    #[arg(
        short,
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        required_unless_present = "file",
        conflicts_with = "file"
    )]
    prompt: Option<String>,
    /// File that holds the prompt; `-` reads standard input.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Most tokens to write.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = args::count)]
    max_tokens: usize,
    /// Ask as a user of the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Let what the prompt spells become control tokens of the chat, as without `--chat`.
    #[arg(long, requires = "chat")]
    allow_special: bool,
    /// Where the model runs. On a GPU numbers are rounded in other places, so the same seed may
    /// give another text there than on the processor.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Print one JSON object at the end instead of the text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    nested: NestedArgs,
    #[command(flatten)]
    structure: RuleArgs,
    // Last, since the heading of a group stays for what follows it.
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(crate) fn run(args: &RunArgs, context: &mut Context) -> Result<(), Failure> {
    let rule = args.structure.rule()?;
    let nested = Nested::read(&args.nested)?;
    let opened = Arc::new(files::open(&args.model, context)?);
    let sampling = args.sampling.config(&opened)?;
    // A wrong number should say so at once.
    Sampler::new(sampling)?;
    let prompt = match (&args.prompt, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => files::read_text(path)?,
        (None, None) => String::new(),
    };
    let start = Start::begin(&opened, args.device, &args.nested)?;
    let tokenizer = files::tokenizer(&opened, context)?;
    let message = [Message::new("user", prompt)];
    let prompt = match args.chat {
        true => Prompt::Chat { messages: &message, allow_special: args.allow_special },
        false => Prompt::Text(&message[0].content),
    };
    let tokens = encode(&tokenizer, prompt, opened.config.max_position_embeddings)?;
    let sampler = sampling::sampler(sampling, &tokenizer)?;
    let words = Words::new(&opened, tokenizer);
    let sampler = follow(sampler, rule, &words)?;
    // A cache for the whole context of a long-context model would take gigabytes that this text
    // never needs.
    let most = opened.config.max_position_embeddings;
    let room = tokens.len().saturating_add(args.max_tokens).min(most);
    let run = Run { context: room, kv: args.cache.kv(), nested };
    let text = Text { args, words: &words, run, sampler, tokens, context };
    start.with(text)
}

/// A text to be written.
struct Text<'a> {
    args: &'a RunArgs,
    words: &'a Words,
    run: Run,
    sampler: Sampler,
    tokens: Vec<u32>,
    context: &'a mut Context,
}

impl WithModel for Text<'_> {
    fn call<R: Runtime>(self, model: &R) -> Result<(), Failure> {
        let Self { args, words, run, sampler, tokens, context } = self;
        let (out, prompt) = (&mut context.out, tokens.len());
        let mut writer = Writer::new(model, words, run)?;
        let written = writer.write(sampler, tokens, args.max_tokens, &mut |piece| {
            if args.json { Ok(()) } else { out.stream(piece) }
        })?;
        finish(args, &written, prompt, context)
    }
}

/// Prints what remains to be said after the text.
fn finish(args: &RunArgs, written: &Written, prompt: usize, context: &mut Context) -> Result<(), Failure> {
    if args.json {
        let mut document = json!({
            "text": written.text,
            "tokens": written.tokens,
            "prompt_tokens": prompt,
            "stop": finish_name(written.finish),
            "prefill_tokens_per_second": written.speed.prefill_rate(),
            "decode_tokens_per_second": written.speed.decode_rate(),
            "guessed_tokens": written.speed.guessed,
        });
        if let Some(bits) = written.speed.bits {
            document["mean_bits"] = bits.into();
        }
        return context.out.json(&document);
    }
    if !written.text.ends_with('\n') {
        context.out.stream("\n")?;
    }
    context.progress.note(&written.speed.to_string());
    Ok(())
}
