//! Text from a model, piece by piece, with the time it took. Shared by `run`, `chat` and `demo`.

use crate::{
    args::{NestedArgs, Steps},
    failure::{Exit, Failure},
    files,
    gpu::{self, DeviceName},
    interrupt::Interrupt,
    memory,
};
use fracbit::Opened;
use fracbit_engine::{Draft, Engine, EngineOptions, Finish, Listener, Tokens};
use fracbit_io::{EncodeOptions, Message, Tokenizer};
use fracbit_model::{KvType, Model, Runtime, Sampler};
use fracbit_schedule::Scheduler;
use std::{
    collections::BTreeMap,
    fmt,
    panic::resume_unwind,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A model on its way into memory, while its tokenizer is read and the prompt encoded: both take
/// half a second where the vocabulary is large. What is wrong with those is said at once, since
/// nobody waits for the model then.
pub(crate) struct Loading(JoinHandle<Result<Model, Failure>>);

impl Loading {
    /// Begins to load the model; with a quantized directory every checksum on the way.
    pub(crate) fn begin(opened: &Arc<Opened>) -> Self {
        let opened = Arc::clone(opened);
        Self(thread::spawn(move || model(&opened)))
    }

    /// The model.
    pub(crate) fn finish(self) -> Result<Model, Failure> {
        self.0.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// A model on the processor, if its weights find room: packed ones are copied, others stay in the
/// mapped file.
fn model(opened: &Opened) -> Result<Model, Failure> {
    if opened.quantization.is_some() {
        let smaller = "a model of fewer bits takes less: `fracbit quantize --size`";
        memory::enough(opened.bytes(), "the model").map_err(|e| e.hint(smaller))?;
    }
    Ok(opened.model(&fracbit::kernels()?, true)?)
}

/// A model where it should run, or on its way there.
pub(crate) enum Start {
    Processor(Loading),
    Device(Arc<Opened>),
}

impl Start {
    /// Begins to load a model that runs on the processor, or refuses what a device does not do.
    pub(crate) fn begin(
        opened: &Arc<Opened>,
        device: DeviceName,
        nested: &NestedArgs,
    ) -> Result<Self, Failure> {
        if device == DeviceName::Cpu {
            return Ok(Self::Processor(Loading::begin(opened)));
        }
        nested.on_device()?;
        Ok(Self::Device(Arc::clone(opened)))
    }

    /// Does something with the model.
    pub(crate) fn with(self, with: impl WithModel) -> Result<(), Failure> {
        match self {
            Self::Processor(loading) => with.call(&loading.finish()?),
            Self::Device(opened) => gpu::with_model(&opened, with),
        }
    }
}

/// What a nested model is asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nested {
    /// What decides what steps read.
    pub(crate) scheduler: Option<Scheduler>,
    /// How it drafts.
    pub(crate) draft: Option<Draft>,
}

impl Nested {
    /// What the command line says, with the schedule's file read.
    pub(crate) fn read(args: &NestedArgs) -> Result<Self, Failure> {
        let scheduler = match &args.precision {
            None => None,
            Some(Steps::Schedule(schedule)) => Some(schedule.clone().into()),
            Some(Steps::File(path)) => {
                let bad = |e| Failure::input(format!("`{}`: {e}", path.display()));
                Some(serde_json::from_str(&files::read_text(path)?).map_err(bad)?)
            }
        };
        Ok(Self { scheduler, draft: args.draft })
    }
}

/// A tokenizer, and what ends texts of its model beside their length.
pub(crate) struct Words {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) end_tokens: Vec<u32>,
    /// Rows of the embedding.
    pub(crate) vocabulary: usize,
}

impl Words {
    /// Those of an opened model.
    pub(crate) fn new(opened: &Opened, tokenizer: Tokenizer) -> Self {
        let mut end_tokens = opened.config.eos_token_ids.clone();
        end_tokens.extend(tokenizer.eos_ids());
        Self { tokenizer, end_tokens, vocabulary: opened.config.vocab_size }
    }
}

/// What is done with models that are loaded again and again, on whatever device.
pub(crate) trait WithLoader {
    /// `load` makes the model of a directory, every checksum checked.
    fn call<R: Runtime + Send>(
        self,
        load: impl Fn(&Opened) -> Result<R, Failure> + Sync,
    ) -> Result<(), Failure>;
}

/// Does something with what loads models for a device, or refuses what that does not do.
pub(crate) fn with_loader(
    device: DeviceName,
    nested: &NestedArgs,
    with: impl WithLoader,
) -> Result<(), Failure> {
    if device == DeviceName::Cpu {
        return with.call(model);
    }
    nested.on_device()?;
    gpu::with_loader(with)
}

/// What is done with a model, on whatever device.
pub(crate) trait WithModel {
    fn call<R: Runtime>(self, model: &R) -> Result<(), Failure>;
}

/// How the texts of a [`Writer`] are run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Tokens of a text with its prompt.
    pub(crate) context: usize,
    pub(crate) kv: KvType,
    pub(crate) nested: Nested,
}

/// A model ready to write, one text after the other; what a text shares with those before it is
/// not run again.
pub(crate) struct Writer<'a, R: Runtime> {
    engine: Engine<'a, R, Listener>,
    words: &'a Words,
    /// What ends a text early.
    pub(crate) interrupt: Interrupt,
}

/// What was written.
pub(crate) struct Written {
    /// All pieces together.
    pub(crate) text: String,
    /// Tokens written.
    pub(crate) tokens: usize,
    /// Why it ended; `None` when it was interrupted.
    pub(crate) finish: Option<Finish>,
    /// How long it took.
    pub(crate) speed: Speed,
}

/// Time per phase.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Speed {
    /// Tokens of the prompt that were run.
    pub(crate) prompt: usize,
    pub(crate) prefill: Duration,
    pub(crate) steps: usize,
    pub(crate) decode: Duration,
    /// Of the steps, those whose token came from a guess.
    pub(crate) guessed: usize,
    /// Mean bits of a weight that decode steps read by a schedule.
    pub(crate) bits: Option<f64>,
}

impl Nested {
    /// Asked for what only a nested model has; another one is refused.
    pub(crate) fn check<R: Runtime>(&self, model: &R) -> Result<(), Failure> {
        let option = match self {
            Self { draft: Some(_), .. } => "--draft",
            Self { scheduler: Some(_), .. } => "--precision",
            _ => return Ok(()),
        };
        if model.precisions().is_empty() {
            let rule = "should be left out: this model has one precision; quantize it with a nested scheme such as nest-tcq-2+2";
            return Err(fracbit::Error::Option { option, rule: rule.to_owned() }.into());
        }
        Ok(())
    }
}

impl<'a, R: Runtime> Writer<'a, R> {
    pub(crate) fn new(model: &'a R, words: &'a Words, run: Run) -> Result<Self, Failure> {
        let Run { context, kv, nested } = run;
        nested.check(model)?;
        let Nested { scheduler, draft } = nested;
        let options = EngineOptions { sequences: 1, context, kv, pages: None, scheduler, draft };
        let engine = Engine::new(model, options)?;
        Ok(Self { engine, words, interrupt: Interrupt::default() })
    }

    /// Continues `prompt` and gives every piece of text to `sink` as soon as it is whole
    /// characters.
    pub(crate) fn write(
        &mut self,
        sampler: Sampler,
        prompt: Vec<u32>,
        most: usize,
        sink: &mut dyn FnMut(&str) -> Result<(), Failure>,
    ) -> Result<Written, Failure> {
        let start = Instant::now();
        let length = prompt.len();
        let mut stream = self.words.tokenizer.stream(true);
        let (mut text, mut tokens, mut first, mut stopped) = (String::new(), 0, None, false);
        let mut emit = |piece: String, text: &mut String| {
            text.push_str(&piece);
            if piece.is_empty() { Ok(()) } else { sink(&piece) }
        };
        let mut written =
            Tokens::begin(&mut self.engine, prompt, most, self.words.end_tokens.clone(), sampler)?;
        for token in written.by_ref() {
            first.get_or_insert_with(|| start.elapsed());
            tokens += 1;
            emit(stream.push(token?)?, &mut text)?;
            if self.interrupt.take() {
                stopped = true;
                break;
            }
        }
        let total = start.elapsed();
        if stopped {
            written.stop();
        }
        emit(stream.finish()?, &mut text)?;
        let prefill = first.unwrap_or(total);
        let done = written.done();
        let finish = done.map(|done| done.finish).filter(|_| !stopped);
        // The first token comes out of the prefill; an end token costs a step without showing.
        let steps = (tokens + usize::from(matches!(finish, Some(Finish::End(_))))).saturating_sub(1);
        let speed = Speed {
            prompt: length - done.map_or(0, |done| done.cached),
            prefill,
            steps,
            decode: total.saturating_sub(prefill),
            // A text that was stopped may have guesses that nobody has seen.
            guessed: done.map_or(0, |done| done.guessed.min(steps)),
            bits: done.and_then(|done| done.bits),
        };
        Ok(Written { text, tokens, finish, speed })
    }
}

/// Tokens of a conversation in the model's chat template, up to where the model's answer begins.
pub(crate) fn conversation(
    tokenizer: &Tokenizer,
    messages: &[Message],
    allow_special: bool,
) -> Result<Vec<u32>, Failure> {
    let Some(tokens) = tokenizer.conversation(messages, &BTreeMap::new(), allow_special)? else {
        let failure = Failure::input("this model has no chat template: it was not trained for conversations");
        return Err(failure.hint("`fracbit run MODEL -p TEXT` continues a text"));
    };
    if tokens.is_empty() {
        return Err(Failure::input("the model's chat template should make at least one token of a message"));
    }
    Ok(tokens)
}

/// What a model is to go on from.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// A text.
    Text(&'a str),
    /// A conversation, up to where the model's answer begins.
    Chat {
        /// What was said.
        messages: &'a [Message],
        /// Whether what messages spell may become control tokens of the chat.
        allow_special: bool,
    },
}

/// Tokens of a prompt for a model that was trained for `most`.
pub(crate) fn encode(tokenizer: &Tokenizer, prompt: Prompt<'_>, most: usize) -> Result<Vec<u32>, Failure> {
    let tokens = match prompt {
        Prompt::Chat { messages, allow_special } => conversation(tokenizer, messages, allow_special)?,
        Prompt::Text(text) => tokenizer.encode(text, EncodeOptions::default())?,
    };
    if tokens.is_empty() {
        let rule = "the prompt should have at least one token, and this model needs no token to begin a text";
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
    }
    if tokens.len() > most {
        return Err(too_long(tokens.len(), most));
    }
    Ok(tokens)
}

/// Context unless asked for more; the cache of a whole long context takes gigabytes.
pub(crate) const CONTEXT: usize = 4096;

/// Tokens to keep of a conversation: those asked for with `--ctx`, or what is reasonable, of a
/// model that was trained for `most`.
pub(crate) fn context_of(asked: Option<usize>, most: usize) -> Result<usize, Failure> {
    match asked {
        Some(ctx) if ctx > most => {
            let rule = format!("should be 1 to {most}, the model's context, got {ctx}");
            Err(fracbit::Error::Option { option: "--ctx", rule }.into())
        }
        Some(ctx) => Ok(ctx),
        None => Ok(CONTEXT.min(most)),
    }
}

/// More tokens than the context has.
pub(crate) fn too_long(tokens: usize, context: usize) -> Failure {
    let rule = format!("the prompt should fit the context of {context} tokens, it has {tokens}");
    Failure::new(Exit::Usage, anyhow::Error::msg(rule))
}

/// The name of an end in JSON.
pub(crate) fn finish_name(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::End(_) | Finish::Output) => "end",
        Some(Finish::Complete) => "complete",
        Some(Finish::MaxTokens) => "max_tokens",
        Some(Finish::ContextFull) => "context_full",
        None => "failed",
    }
}

#[expect(clippy::cast_precision_loss, reason = "a speed to show")]
fn per_second(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-9)
}

impl Speed {
    /// Prompt tokens per second.
    pub(crate) fn prefill_rate(&self) -> f64 {
        per_second(self.prompt, self.prefill)
    }

    /// Tokens per second after the first; `None` when there was only one.
    pub(crate) fn decode_rate(&self) -> Option<f64> {
        (self.steps > 0).then(|| per_second(self.steps, self.decode))
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prefill {} tokens at {:.1} tok/s", self.prompt, self.prefill_rate())?;
        match self.decode_rate() {
            Some(rate) => write!(f, ", decode {} tokens at {rate:.1} tok/s", self.steps)?,
            None => return Ok(()),
        }
        if self.guessed > 0 {
            write!(f, " ({} of them guessed ahead)", self.guessed)?;
        }
        self.bits.map_or(Ok(()), |bits| write!(f, ", {bits:.3} bits a weight on average"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_count_what_was_computed() {
        let second = Duration::from_secs(1);
        let speed =
            Speed { prompt: 12, prefill: second / 2, steps: 30, decode: second, guessed: 0, bits: None };
        assert_eq!(speed.to_string(), "prefill 12 tokens at 24.0 tok/s, decode 30 tokens at 30.0 tok/s");
        let speed = Speed { guessed: 7, ..speed };
        assert!(speed.to_string().ends_with("decode 30 tokens at 30.0 tok/s (7 of them guessed ahead)"));
        let speed = Speed { guessed: 0, bits: Some(2.5), ..speed };
        assert!(speed.to_string().ends_with("at 30.0 tok/s, 2.500 bits a weight on average"));
        let one = Speed { prompt: 1, prefill: second, ..Speed::default() };
        assert_eq!(one.to_string(), "prefill 1 tokens at 1.0 tok/s");
    }
}
