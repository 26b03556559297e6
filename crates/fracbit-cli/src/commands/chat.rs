//! `fracbit chat`.

use crate::{
    args::{self, CacheArgs, NestedArgs, SamplingArgs},
    context::Context,
    failure::Failure,
    files,
    generate::{Loading, Nested, Writer, context_of, conversation, stop_name},
};
use clap::Args;
use fracbit::Progress;
use fracbit_io::Message;
use fracbit_model::{Sampler, State, StateOptions, Stop};
use std::{
    io::{self, BufRead, IsTerminal, Write},
    path::PathBuf,
    sync::Arc,
};

const AFTER: &str = "\
Lines of their own: /reset forgets the conversation, /exit (or the end of the input) leaves.

Examples:
  fracbit chat small
  printf 'Hello!\\nAnd in French?\\n' | fracbit chat small --greedy";

/// Talk with a model.
///
/// Reads one message per line, from the terminal or a pipe, and answers with the model's own chat
/// template, keeping the whole conversation in mind. Needs a model that was trained for
/// conversations.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ChatArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// Instruction that comes before the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens to remember, no more than the model's context; beyond the original one of a
    /// `longrope` model (Phi) positions are those of long texts [default: 4096, or that context
    /// when it is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    /// Most tokens of an answer.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024, value_parser = args::count)]
    max_tokens: usize,
    /// Let what messages spell become control tokens.
    #[arg(long)]
    allow_special: bool,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    nested: NestedArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(crate) fn run(args: &ChatArgs, context: &mut Context) -> Result<(), Failure> {
    let sampler = Sampler::new(args.sampling.config())?;
    let nested = Nested::read(&args.nested)?;
    let opened = Arc::new(files::open(&args.model, context)?);
    let loading = Loading::begin(&opened);
    // Before the model is there: one without template should say so at once.
    let tokenizer = files::tokenizer(&opened, context)?;
    conversation(&tokenizer, &[Message::new("user", "hello")], false)?;
    let writer = loading.finish(tokenizer)?.asked(nested)?;
    let ctx = context_of(args.ctx, writer.context())?;
    let options = StateOptions { context: Some(ctx), kv: args.cache.kv(), ..StateOptions::default() };
    let state = writer.model.state(&options);
    let system: Vec<_> = args.system.iter().map(|text| Message::new("system", text)).collect();
    let mut chat = Chat {
        writer,
        state,
        sampler,
        held: Vec::new(),
        messages: system.clone(),
        most: args.max_tokens,
        allow_special: args.allow_special,
    };

    let prompt = io::stdin().is_terminal();
    if prompt {
        context.progress.note(&format!(
            "{}: {ctx} tokens of context; /reset forgets, /exit leaves",
            args.model.display()
        ));
    }
    loop {
        if prompt {
            // The prompt is for a person; without a terminal on the other side there is none.
            let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
        }
        let mut line = String::new();
        let read = io::stdin().lock().read_line(&mut line);
        if read.map_err(|e| Failure::reading("standard input".as_ref(), e))? == 0 {
            return Ok(());
        }
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/reset" => {
                chat.messages.clone_from(&system);
                context.progress.note("forgotten");
            }
            command if command.starts_with('/') && !command.contains(' ') => {
                context.progress.note("commands are /reset and /exit");
            }
            text => chat.answer(text, context)?,
        }
    }
}

/// A conversation and what the model's state holds of it.
struct Chat {
    writer: Writer,
    state: State,
    sampler: Sampler,
    /// Tokens that the state holds.
    held: Vec<u32>,
    messages: Vec<Message>,
    most: usize,
    allow_special: bool,
}

impl Chat {
    fn answer(&mut self, text: &str, context: &mut Context) -> Result<(), Failure> {
        self.messages.push(Message::new("user", text));
        let tokens = conversation(&self.writer.tokenizer, &self.messages, self.allow_special)?;
        if tokens.len() >= self.state.capacity() {
            self.messages.pop();
            context.progress.note(&format!(
                "the conversation would have {} tokens, the context has {}: shorten the message or /reset",
                tokens.len(),
                self.state.capacity()
            ));
            return Ok(());
        }
        // Templates may rewrite earlier turns (most drop a model's reasoning), so only the common
        // beginning is kept.
        let keep = common(&self.held, &tokens).min(tokens.len() - 1);
        self.state.truncate(keep);
        self.held.truncate(keep);
        let out = &mut context.out;
        let (rest, most) = (&tokens[keep..], Some(self.most));
        let written =
            self.writer.write(&mut self.state, &mut self.sampler, &self.held, rest, most, &mut |piece| {
                out.stream(piece)
            })?;
        context.out.stream("\n")?;
        self.held.extend(&written.held);
        self.messages.push(Message::new("assistant", written.text));
        let stop = match written.stop {
            Some(Stop::MaxTokens | Stop::ContextFull) => format!(" ({})", stop_name(written.stop)),
            _ => String::new(),
        };
        context.progress.note(&format!("{}{stop}", written.speed));
        Ok(())
    }
}

/// Length of the common beginning.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn common_beginnings() {
        assert_eq!(common(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(common(&[1, 2], &[1, 2, 4]), 2);
        assert_eq!(common(&[], &[1]), 0);
        assert_eq!(common(&[2], &[1]), 0);
    }
}
