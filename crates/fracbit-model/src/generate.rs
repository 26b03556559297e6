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
//! A [`Scheduler`] says what steps read of a nested model. One token is a step here; drafts, and
//! many sequences on one cache, are `fracbit-engine`'s.

use fracbit_kernels::Precision;
use fracbit_schedule::{Phase, Schedule, Scheduler};

use crate::sample::Sampler;
use crate::state::State;
use crate::{Error, Model};

/// When to stop, and what to read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to yield; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Tokens that end the text; they are not yielded. Usually
    /// [`fracbit_io::ModelConfig::eos_token_ids`].
    pub end_tokens: Vec<u32>,
    /// What decides what steps read of a nested model; `None`: what the state says.
    pub scheduler: Option<Scheduler>,
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
    logits: Vec<f32>, // of the row run last
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
        let mut history = Vec::new();
        // With a bound on the tokens, all memory that the loop needs but for what its first pass
        // grows.
        if let Some(max) = options.max_tokens {
            let room = max.min(state.capacity() - state.len());
            history.reserve(prompt.len() + room);
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
        &self.logits
    }

    /// The schedule of the answer; `None` before its second token, or without a scheduler.
    #[must_use]
    pub fn schedule(&self) -> Option<&Schedule> {
        self.schedule.as_ref()
    }

    /// Runs what is pending and picks a token.
    fn step(&mut self) -> Result<u32, Error> {
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
            self.state.set_precision(Precision::at_most(read));
        }
        self.model.forward(self.state, &self.history[self.next..], &mut self.hidden)?;
        let last = self.hidden.len() - self.model.config().hidden_size;
        self.model.logits(self.state, &self.hidden[last..], &mut self.logits)?;
        self.next = self.history.len();
        self.sampler.sample(&self.logits, &self.history)
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
