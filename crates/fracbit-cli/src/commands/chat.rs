//! `fracbit chat`.

mod command;
mod conversation;
mod lines;

use crate::{
    args::{self, CacheArgs, NestedArgs},
    context::Context,
    failure::Failure,
    files,
    generate::{Nested, Run, Start, WithModel, Words, Writer, context_of, conversation, finish_name},
    gpu::DeviceName,
    interrupt::Interrupt,
    sampling::{self, SamplingArgs},
};
use clap::Args;
use command::Line;
use conversation::Conversation;
use fracbit::Progress;
use fracbit_engine::Finish;
use fracbit_io::Message;
use fracbit_model::{Runtime, SampleConfig, Sampler};
use lines::Lines;
use std::{io, path::PathBuf, sync::Arc};

const AFTER: &str = "\
At a terminal arrows move within a line and through earlier ones, Tab completes commands, and a line that ends with a backslash \
goes on in the next. Ctrl-C stops an answer, not the program; pressed twice it ends that, too. When the context is full, the oldest \
turns are left out of what the model sees.

Commands: /retry answers anew, /system TEXT sets the instruction, /save FILE and /load FILE keep a conversation (JSON, messages as \
of `fracbit serve`), /reset forgets, /help tells, /exit or the end of the input leaves.

Examples:
  fracbit chat small
  printf 'Hello!\\nAnd in French?\\n' | fracbit chat small --greedy";

/// Talk with a model.
///
/// Reads messages from a terminal, or from a pipe one per line, and answers with the model's own
/// chat template, keeping the whole conversation in mind. Needs a model that was trained for
/// conversations.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ChatArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// Instruction that comes before the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens to remember, no more than the model's context. A `longrope` model (Phi) that gets
    /// more than its original context reads every text as a long one [default: 4096, or the model's
    /// context when that is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    /// Most tokens of an answer.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024, value_parser = args::count)]
    max_tokens: usize,
    /// Let what messages spell become control tokens.
    #[arg(long)]
    allow_special: bool,
    /// Where the model runs.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    nested: NestedArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(crate) fn run(args: &ChatArgs, context: &mut Context) -> Result<(), Failure> {
    let nested = Nested::read(&args.nested)?;
    let opened = Arc::new(files::open(&args.model, context)?);
    let sampling = args.sampling.config(&opened)?;
    Sampler::new(sampling)?;
    let start = Start::begin(&opened, args.device, &args.nested)?;
    // Before the model is there: one without template should say so at once.
    let tokenizer = files::tokenizer(&opened, context)?;
    conversation(&tokenizer, &[Message::new("user", "hello")], false)?;
    let words = Words::new(&opened, tokenizer);
    let capacity = context_of(args.ctx, opened.config.max_position_embeddings)?;
    let run = Run { context: capacity, kv: args.cache.kv(), nested };
    let talks = Talks { args, words: &words, run, sampling, context };
    start.with(talks)
}

/// A conversation to be had.
struct Talks<'a> {
    args: &'a ChatArgs,
    words: &'a Words,
    run: Run,
    sampling: SampleConfig,
    context: &'a mut Context,
}

impl WithModel for Talks<'_> {
    fn call<R: Runtime>(self, model: &R) -> Result<(), Failure> {
        let Self { args, words, run, sampling, context } = self;
        let capacity = run.context;
        let mut chat = Chat {
            writer: Writer::new(model, words, run)?,
            words,
            sampling,
            answers: 0,
            capacity,
            talk: Conversation::new(args.system.clone()),
            most: args.max_tokens,
            allow_special: args.allow_special,
        };
        let mut lines = Lines::open()?;
        if matches!(lines, Lines::Terminal(_)) {
            // In a pipe Ctrl-C ends the program, as it does others.
            chat.writer.interrupt = Interrupt::watch()?;
            let named = args.model.display();
            let note = format!("{named}: {capacity} tokens of context; /help shows commands");
            context.progress.note(&note);
        }
        while let Some(line) = lines.next(context)? {
            let line = Line::read(&line);
            if line == Line::Exit {
                break;
            }
            match chat.follow(line, context) {
                Err(Failure::Because(reason)) if matches!(lines, Lines::Terminal(_)) => {
                    reason.print(&mut io::stderr().lock())?;
                }
                other => other?,
            }
        }
        Ok(())
    }
}

/// A conversation. What the model's cache holds of it is not run again.
struct Chat<'a, R: Runtime> {
    writer: Writer<'a, R>,
    words: &'a Words,
    sampling: SampleConfig,
    /// Answers so far: each is drawn with other random numbers.
    answers: u64,
    capacity: usize,
    talk: Conversation,
    most: usize,
    allow_special: bool,
}

impl<R: Runtime> Chat<'_, R> {
    /// Does what a line says.
    fn follow(&mut self, line: Line, context: &mut Context) -> Result<(), Failure> {
        let note = |text: &str| context.progress.note(text);
        match line {
            Line::Empty | Line::Exit => {}
            Line::Message(text) => {
                self.talk.ask(text);
                self.answer(context)?;
            }
            Line::Retry if self.talk.retry() => self.answer(context)?,
            Line::Retry => note("there is nothing to answer yet"),
            Line::System(None) => note(self.talk.system.as_deref().unwrap_or("no instruction")),
            Line::System(Some(text)) if text == "-" => {
                self.talk.system = None;
                note("no instruction any more");
            }
            Line::System(Some(text)) => {
                // Some templates take none: that should be said now and not of every message.
                let trial = [Message::new("system", text.as_str()), Message::new("user", "hello")];
                conversation(&self.words.tokenizer, &trial, self.allow_special)?;
                self.talk.system = Some(text);
                note("the instruction holds from now on");
            }
            Line::Save(path) => {
                self.talk.save(path.clone())?;
                note(&format!("{}: {} messages", path.display(), self.talk.len()));
            }
            Line::Load(path) => {
                self.talk = Conversation::load(path.clone())?;
                note(&format!(
                    "{}: {} messages; /retry answers the last anew",
                    path.display(),
                    self.talk.len()
                ));
            }
            Line::Reset => {
                self.talk.reset();
                note("forgotten");
            }
            Line::Help => note(&Line::help()),
            Line::Unknown => note("no such command, or its FILE is missing; /help shows all"),
        }
        Ok(())
    }

    /// The tokens of what the model sees, without its oldest turns where they leave no room for an
    /// answer; `None` where the last message alone has too many.
    fn prompt(&mut self, context: &Context) -> Result<Option<Vec<u32>>, Failure> {
        let capacity = self.capacity;
        let room = |tokens: &[u32]| capacity.saturating_sub(tokens.len());
        let tokens =
            |talk: &Conversation| conversation(&self.words.tokenizer, &talk.seen(), self.allow_special);
        let mut prompt = tokens(&self.talk)?;
        // What is left out makes the model read all of the rest again, so when it has to be, it is
        // enough for some turns to come.
        let (least, enough) = (self.most.min(capacity / 8), self.most.min(capacity / 2));
        let mut dropped = 0;
        if room(&prompt) < least.max(1) {
            while room(&prompt) < enough.max(1) && self.talk.drop_oldest() {
                dropped += 1;
                prompt = tokens(&self.talk)?;
            }
        }
        if dropped > 0 {
            let turns = if dropped == 1 { "the oldest turn is" } else { "the oldest turns are" };
            context.progress.note(&format!(
                "the context of {capacity} tokens is full: {turns} left out from now on ({dropped})"
            ));
        }
        if room(&prompt) > 0 {
            return Ok(Some(prompt));
        }
        context.progress.note(&format!(
            "the message would have {} tokens, the context has {capacity}: shorten it",
            prompt.len()
        ));
        Ok(None)
    }

    /// Answers the user's last message.
    fn answer(&mut self, context: &mut Context) -> Result<(), Failure> {
        let Some(tokens) = self.prompt(context)? else {
            self.talk.unask();
            return Ok(());
        };
        // Pressed before the answer began, it was not meant for it.
        self.writer.interrupt.take();
        let out = &mut context.out;
        let seed = self.sampling.seed.wrapping_add(self.answers);
        self.answers += 1;
        let sampler = sampling::sampler(SampleConfig { seed, ..self.sampling }, &self.words.tokenizer)?;
        let written = self.writer.write(sampler, tokens, self.most, &mut |piece| out.stream(piece))?;
        context.out.stream("\n")?;
        self.talk.answer(written.text);
        let stop = match written.finish {
            Some(Finish::MaxTokens | Finish::ContextFull) => format!(" ({})", finish_name(written.finish)),
            None => " (stopped)".to_owned(),
            _ => String::new(),
        };
        context.progress.note(&format!("{}{stop}", written.speed));
        Ok(())
    }
}
