//! Token by token: a model, a state and a sampler as an iterator.
//!
//! A [`Generation`] owns nothing: the state keeps the conversation, so a chat goes on by making the
//! next generation with the new tokens only. The prompt is run when the first token is asked for.
//! It knows tokens, not text (see [`fracbit_io`]'s token stream), and measures nothing.
//!
//! When a generation ends, every token of the prompt and every yielded token but the last has been
//! run; the last one yielded, and an end token, which is not yielded, have not: a chat must pass
//! them again, before the next turn's tokens. [`Generation::pending`] says which.
//!
//! Where a text repeats itself, several tokens are run in one step, a guess of what comes next with
//! the token before it: the same tokens are yielded, sooner. Where it does not, a nested model can
//! guess with its first planes ([`GenerateOptions::draft`]), and a [`Scheduler`] says what its
//! steps read.

use fracbit_kernels::Precision;
use fracbit_schedule::{Phase, Schedule, Scheduler};

use crate::draft::MOST;
use crate::sample::Sampler;
use crate::selfdraft::{Draft, Guesses};
use crate::state::State;
use crate::{Error, Model};

/// When to stop, and how far to guess ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to yield; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Tokens that end the text; they are not yielded. Usually
    /// [`fracbit_io::ModelConfig::eos_token_ids`].
    pub end_tokens: Vec<u32>,
    /// What the state held before the prompt, as far as known: guesses repeat that text too. The
    /// repetition penalty does not look at it.
    pub before: Vec<u32>,
    /// Most tokens to guess in a step, up to 7; 0: none. The tokens that are yielded do not depend
    /// on it.
    pub guesses: usize,
    /// Whether a nested model guesses too, where the text does not repeat itself; part of
    /// `guesses`.
    pub draft: Option<Draft>,
    /// What decides what steps read of a nested model; `None`: what the state says.
    pub scheduler: Option<Scheduler>,
}

impl Default for GenerateOptions {
    /// No end but that of the context, and as many guesses as pay.
    fn default() -> Self {
        Self {
            max_tokens: None,
            end_tokens: Vec::new(),
            before: Vec::new(),
            guesses: MOST,
            draft: None,
            scheduler: None,
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// This end token was picked.
    End(u32),
    /// As many tokens as asked for.
    MaxTokens,
    /// The state holds no more.
    ContextFull,
    /// The sampler's constraint lets nothing come behind the last token.
    Complete,
    /// An error was returned.
    Failed,
}

/// Yields tokens; see the module.
#[derive(Debug)]
pub struct Generation<'a> {
    model: &'a Model,
    state: &'a mut State,
    sampler: &'a mut Sampler,
    options: GenerateOptions,
    schedule: Option<Schedule>, // once the prompt has been run
    history: Vec<u32>,
    next: usize, // history from here on has not been run
    yielded: usize,
    stop: Option<Stop>,
    hidden: Vec<f32>,
    logits: Vec<f32>, // of the rows run last whose next token is not known
    row: usize,       // of `logits`, that the last token was picked from
    /// The state has forgotten those that were run, but holds their keys and values still.
    guesses: Guesses,
    guessed: usize,
}

impl<'a> Generation<'a> {
    /// Prepares to continue `prompt`, which comes after what `state` holds.
    ///
    /// The repetition penalty looks at `prompt` and at what is generated, not at what the state
    /// held before.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`]: there would be nothing to continue; [`Error::Schedule`]: the
    /// scheduler was learned for another model; [`Error::Memory`]. What the model refuses shows at
    /// the first token.
    pub fn new(
        model: &'a Model,
        state: &'a mut State,
        sampler: &'a mut Sampler,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Self, Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(scheduler) = &options.scheduler {
            model.check_scheduler(scheduler)?;
        }
        sampler.use_kernels_of(model);
        let text = [&options.before[..], prompt].concat();
        let (mut history, mut guesses) = (Vec::new(), Guesses::new(text, options.draft, sampler));
        // With a bound on the tokens, all memory that the loop needs but for what its first pass
        // and its first guesses grow.
        if let Some(max) = options.max_tokens {
            let room = max.min(state.capacity() - state.len());
            history.reserve(prompt.len() + room);
            guesses.reserve(room);
            state.reserve(prompt.len() + room)?;
        }
        history.extend_from_slice(prompt);
        Ok(Self {
            model,
            state,
            sampler,
            options,
            schedule: None,
            history,
            next: 0,
            yielded: 0,
            stop: None,
            hidden: Vec::new(),
            logits: Vec::new(),
            row: 0,
            guesses,
            guessed: 0,
        })
    }

    /// Why no more tokens come; `None` while some may.
    #[must_use]
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    /// The prompt and the tokens yielded.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.history
    }

    /// Tokens at the end of [`Generation::tokens`] that the state does not hold yet.
    #[must_use]
    pub fn pending(&self) -> &[u32] {
        &self.history[self.next..]
    }

    /// Logits that the last token was picked from; empty before the first.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        let vocab = self.model.config().vocab_size;
        self.logits.get(self.row * vocab..(self.row + 1) * vocab).unwrap_or(&[])
    }

    /// The schedule of the answer; `None` before its second token, or without a scheduler.
    #[must_use]
    pub fn schedule(&self) -> Option<&Schedule> {
        self.schedule.as_ref()
    }

    /// Tokens yielded that were guessed and so took no step of their own.
    #[must_use]
    pub fn guessed(&self) -> usize {
        self.guessed
    }

    fn step(&mut self) -> Result<u32, Error> {
        let pending = self.history.len() - self.next;
        let next = self.history.last().filter(|_| pending == 1 && self.yielded > 0);
        if next.is_some_and(|&token| self.guesses.judge(self.row + 1, token)) {
            // It was run as a guess.
            self.state.advance(1);
            self.row += 1;
            self.guessed += 1;
        } else {
            self.forward(pending)?;
        }
        self.next = self.history.len();
        let vocab = self.model.config().vocab_size;
        self.sampler.sample(&self.logits[self.row * vocab..][..vocab], &self.history)
    }

    /// Runs what is pending, and with a single token guesses of what follows it.
    fn forward(&mut self, pending: usize) -> Result<(), Error> {
        if let Some(scheduler) = &self.options.scheduler {
            let read = match self.yielded.checked_sub(1) {
                None => scheduler.prefill(),
                Some(step) => {
                    let prompt = self.state.len() - step;
                    let cached = |layer| self.model.cached(self.state, layer, prompt).unwrap_or_default();
                    let choose = || scheduler.schedule(cached);
                    self.schedule.get_or_insert_with(choose).precision(Phase::Decode(step))
                }
            };
            let precision = Precision::at_most(read);
            if precision != self.state.precision() {
                self.guesses.forget_times();
            }
            self.state.set_precision(precision);
        }
        let most = if self.yielded > 0 { self.most_guesses() } else { 0 };
        let with = (self.model, &mut *self.state, &mut *self.sampler);
        let run = self.guesses.make(with, &mut self.history, most)?;
        let guesses = run.len() - 1;
        let tokens = if pending == 1 { run } else { &self.history[self.next..] };
        self.model.forward(self.state, tokens, &mut self.hidden)?;
        self.state.truncate(self.state.len() - guesses);
        let wanted = self.hidden.len() - (1 + guesses) * self.model.config().hidden_size;
        self.model.logits(self.state, &self.hidden[wanted..], &mut self.logits)?;
        self.guesses.ran();
        self.row = 0;
        Ok(())
    }

    /// Guesses that could still be yielded and that the cache has room for: it does not grow for
    /// them.
    fn most_guesses(&self) -> usize {
        let room = self.state.room().saturating_sub(self.state.len() + 1);
        let wanted = self.options.max_tokens.map_or(usize::MAX, |max| max - self.yielded - 1);
        // A step has one precision.
        let alike = match (&self.schedule, self.yielded.checked_sub(1)) {
            (Some(schedule), Some(step)) => schedule.steps_alike(step).map_or(usize::MAX, |n| n - 1),
            _ => usize::MAX,
        };
        self.options.guesses.min(room).min(wanted).min(alike)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stop.is_some() {
            return None;
        }
        if self.yielded > 0 && self.sampler.complete() {
            self.stop = Some(Stop::Complete);
            return None;
        }
        if self.options.max_tokens.is_some_and(|max| self.yielded >= max) {
            self.stop = Some(Stop::MaxTokens);
            return None;
        }
        // A prompt that does not fit is an error; running out later is an end.
        if self.yielded > 0 && self.state.len() == self.state.capacity() {
            self.stop = Some(Stop::ContextFull);
            return None;
        }
        match self.step() {
            Ok(token) if self.options.end_tokens.contains(&token) => {
                self.stop = Some(Stop::End(token));
                None
            }
            Ok(token) => {
                self.history.push(token);
                self.guesses.push(token);
                self.yielded += 1;
                Some(Ok(token))
            }
            Err(e) => {
                self.stop = Some(Stop::Failed);
                Some(Err(e))
            }
        }
    }
}
