//! One sequence: what was asked, and how far it is.

use std::ops::ControlFlow;
use std::time::Instant;

use fracbit_base::Rate;
use fracbit_model::{Error, Sampler};
use fracbit_schedule::{Phase, Schedule};

use crate::guesses::Guesses;

/// Where the tokens of a sequence go.
pub trait Output {
    /// The next token, which is none of the sequence's end tokens. `Break`: the text ends with it.
    ///
    /// # Errors
    /// Whatever makes it useless to go on; [`failed`](Self::failed) is called with it.
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error>;

    /// The logits that `token` is picked from, before that, end tokens too; where the request says
    /// so, also those that each token of its prompt but the first stands behind, in their order.
    fn scored(&mut self, token: u32, logits: &[f32]) {
        let _ = (token, logits);
    }

    /// Final hidden states of the next tokens of the prompt, (tokens, hidden), where the request
    /// wants them; see [`fracbit_model::Runtime::hidden`].
    fn hidden(&mut self, rows: &[f32]) {
        let _ = rows;
    }

    /// Whether anybody still wants the text; asked between steps.
    fn wanted(&self) -> bool {
        true
    }

    /// The text is done. Not called when nobody wanted it.
    fn done(self, done: Done);

    /// The text has begun, but nobody wants it any more: what was done of it, with
    /// [`Finish::Output`].
    fn dropped(self, done: Done)
    where
        Self: Sized,
    {
        let _ = done;
    }

    /// The text cannot go on.
    fn failed(self, error: Error);
}

/// A text to be continued.
#[derive(Clone, Debug)]
pub struct Request<O> {
    /// At least one token, and fewer than the context holds, or as many where no token should come.
    pub prompt: Vec<u32>,
    /// Whether the output wants to know the logits of the prompt's tokens. All of it is then run,
    /// whatever others left of its beginning.
    pub score_prompt: bool,
    /// Whether the output wants to know the final hidden states of the prompt's tokens. All of it
    /// is then run, too.
    pub hidden: bool,
    /// Most tokens to come, with the one that ends the text; 0 only runs the prompt.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub end_tokens: Vec<u32>,
    /// Picks the tokens.
    pub sampler: Sampler,
    /// Where they go.
    pub output: O,
}

/// How a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// Why.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of those, tokens whose keys and values were still there from another sequence.
    pub cached: usize,
    /// Tokens that came, with the one that ended it.
    pub tokens: usize,
    /// Of those, tokens that were guessed and so took no step of their own.
    pub guessed: usize,
    /// All tokens that were guessed and run, whether they came or not.
    pub tried: usize,
    /// Mean bits of a weight that the steps behind its first token read; `None` without a
    /// scheduler.
    pub bits: Option<f64>,
    /// Seconds from [`Engine::add`](crate::Engine::add) to the end.
    pub seconds: f64,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By this end token.
    End(u32),
    /// Its output said so.
    Output,
    /// Its sampler's constraint lets nothing follow.
    Complete,
    /// As many tokens as asked for.
    MaxTokens,
    /// As many tokens as the context holds.
    ContextFull,
}

impl Finish {
    /// Whether it could have gone on.
    #[must_use]
    pub fn is_cut(self) -> bool {
        matches!(self, Self::MaxTokens | Self::ContextFull)
    }
}

/// A sequence on its way.
#[derive(Debug)]
pub(crate) struct Sequence<O> {
    /// Prompt and text. While it is decoded, its state holds all but the last token.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Tokens of the prompt, but the first, whose logits the output does not want or knows.
    pub(crate) scored: usize,
    /// Tokens of the prompt whose hidden states the output does not want or knows.
    pub(crate) shown: usize,
    pub(crate) max_tokens: usize,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) sampler: Sampler,
    pub(crate) output: O,
    /// `None` until it first gets a place.
    pub(crate) cached: Option<usize>,
    pub(crate) guesses: Guesses,
    pub(crate) guessed: usize,
    pub(crate) tried: usize,
    /// Of its text, once its prompt has been run.
    pub(crate) schedule: Option<Schedule>,
    /// Those that came later have larger ones.
    pub(crate) serial: u64,
    /// When its prompt should have been run: see `Engine::read`.
    pub(crate) due: u64,
    pub(crate) start: Instant,
}

impl<O> Sequence<O> {
    /// Tokens of the text so far.
    pub(crate) fn written(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// How many tokens from the beginning need not be run where others left them: the last one must
    /// be for its logits.
    pub(crate) fn skippable(&self) -> usize {
        let unscored = (self.scored + 1 < self.prompt).then_some(self.scored);
        let unshown = (self.shown < self.prompt).then_some(self.shown);
        let wanted = unscored.into_iter().chain(unshown).min();
        wanted.unwrap_or(usize::MAX).min(self.tokens.len() - 1)
    }

    /// Most tokens still to come.
    pub(crate) fn left(&self, context: usize) -> usize {
        (self.max_tokens - self.written()).min(context - self.tokens.len())
    }

    /// Why none is to come.
    pub(crate) fn cut(&self) -> Finish {
        if self.written() == self.max_tokens { Finish::MaxTokens } else { Finish::ContextFull }
    }

    /// What step runs the token at this place, and how many tokens from there on are run alike.
    pub(crate) fn phase(&self, at: usize) -> (Phase, usize) {
        let Some(step) = at.checked_sub(self.prompt) else { return (Phase::Prefill, self.prompt - at) };
        let alike = self.schedule.as_ref().and_then(|schedule| schedule.steps_alike(step));
        (Phase::Decode(step), alike.unwrap_or(usize::MAX))
    }

    /// `bits` are those of a weight that a step of a rate reads.
    pub(crate) fn done(&self, finish: Finish, bits: impl Fn(Rate) -> f64) -> Done {
        let steps = self.written().saturating_sub(1).max(1);
        Done {
            finish,
            prompt: self.prompt,
            cached: self.cached.unwrap_or(0),
            tokens: self.written(),
            guessed: self.guessed,
            tried: self.tried,
            bits: self.schedule.as_ref().map(|schedule| schedule.mean(steps, bits)),
            seconds: self.start.elapsed().as_secs_f64(),
        }
    }
}
