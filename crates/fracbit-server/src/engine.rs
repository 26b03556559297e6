//! The one thread that runs the model: requests come in and texts go out, a
//! [`fracbit_engine::Engine`] does the rest.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use fracbit_engine::{Done, Engine, Finish, Output, Request};
use fracbit_io::{TokenStream, Tokenizer};
use fracbit_model::{Error, Runtime, Sampler};
use tokio::sync::mpsc::UnboundedSender;

use crate::app::Ticket;
use crate::embeddings::Embedding;
use crate::metrics::{Measured, Metrics, Outcome};
use crate::scores::{Score, Scores};
use crate::stops::Stops;

/// What the thread is told.
#[derive(Debug)]
pub(crate) enum Order {
    /// Continue a text.
    Write(Box<Job>),
    /// Nothing comes any more: end when all texts are done.
    Retire,
    /// Give up what still waits, and whatever comes; what runs may end.
    Drain,
    /// Give up all.
    Stop,
}

/// A text to be continued.
#[derive(Debug)]
pub(crate) struct Job {
    /// At least one token, within the context.
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) max_tokens: usize,
    pub(crate) sampler: Sampler,
    /// Tokens that end the text.
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) stops: Vec<String>,
    /// Tokens before stop texts count.
    pub(crate) min_tokens: usize,
    /// Special tokens are left out of the text; stop texts are looked for with them.
    pub(crate) skip_special: bool,
    /// Special tokens that are left in nevertheless.
    pub(crate) kept: Vec<u32>,
    /// The text begins with its prompt.
    pub(crate) echo: bool,
    /// The text is the prompt's vector, and nothing is written.
    pub(crate) embedding: Option<Embedding>,
    /// Scores of its tokens, and of so many likeliest ones beside each.
    pub(crate) logprobs: Option<usize>,
    pub(crate) line: Line,
}

/// What becomes of a [`Job`]: pieces, then one of the others.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    Piece(String, Vec<Score>),
    /// With the stop text that ended it, if one did.
    Done(Done, Option<String>),
    Failed(String),
    /// The server ends, or somebody else could not be served.
    GivenUp,
}

/// One text's way to its client. Dropped at the other end: nobody wants the text any more. Dropped
/// here before the end: it is given up, which the client is told.
#[derive(Debug)]
pub(crate) struct Line {
    /// Which of the request's texts it is.
    pub(crate) choice: usize,
    pub(crate) events: UnboundedSender<(usize, Event)>,
    pub(crate) metrics: Arc<Metrics>,
    /// The request's, until all of its texts are there.
    pub(crate) _ticket: Arc<Ticket>,
    pub(crate) arrived: Instant,
    pub(crate) over: bool,
}

impl Line {
    fn wanted(&self) -> bool {
        !self.events.is_closed()
    }

    fn say(&self, event: Event) {
        // Nobody there: nothing to tell, and `wanted` says so.
        let _ = self.events.send((self.choice, event));
    }

    fn end(mut self, outcome: Outcome, event: Event) {
        self.over = true;
        self.metrics.ended(outcome);
        self.say(event);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.over {
            self.metrics.ended(if self.wanted() { Outcome::GivenUp } else { Outcome::Unwanted });
            self.say(Event::GivenUp);
        }
    }
}

/// Makes text of the tokens of a job.
#[derive(Debug)]
pub(crate) struct Text<'a> {
    tokenizer: &'a Tokenizer,
    stream: TokenStream<'a>,
    stops: Stops,
    /// A stop text was met.
    stopped: bool,
    min_tokens: usize,
    skip_special: bool,
    kept: Vec<u32>,
    scores: Option<Scores>,
    embedding: Option<Embedding>,
    /// Characters of the text so far, and how many of them were said.
    chars: usize,
    said: usize,
    /// Tokens so far, and when the last one came.
    written: usize,
    last: Instant,
    line: Line,
}

/// Serves until it is told to stop, or nothing comes any more and all texts are done.
pub(crate) fn run<'a, R: Runtime>(
    mut engine: Engine<'_, R, Text<'a>>,
    tokenizer: &'a Tokenizer,
    orders: &Receiver<Order>,
    metrics: &Measured,
) {
    let (mut waiting, mut open, mut last) = (VecDeque::<Box<Job>>::new(), true, false);
    loop {
        metrics.engine(&engine, waiting.len());
        let idle = engine.sequences() == 0 && waiting.is_empty();
        if idle && last {
            return;
        }
        let first = if idle {
            let Ok(order) = orders.recv() else { return };
            Some(order)
        } else {
            None
        };
        for order in first.into_iter().chain(orders.try_iter()) {
            match order {
                Order::Write(job) if open => waiting.push_back(job),
                Order::Write(_) => {}
                Order::Retire => last = true,
                Order::Drain => {
                    open = false;
                    waiting.clear();
                }
                Order::Stop => return,
            }
        }
        waiting.retain(|job| job.line.wanted());
        while engine.has_place()
            && let Some(job) = waiting.pop_front()
        {
            start(*job, &mut engine, tokenizer);
        }
        engine.step();
    }
}

/// Gives a job to the engine.
fn start<'a, R: Runtime>(job: Job, engine: &mut Engine<'_, R, Text<'a>>, tokenizer: &'a Tokenizer) {
    let Job { prompt, max_tokens, sampler, end_tokens, echo, logprobs, .. } = job;
    let mut output = Text {
        tokenizer,
        stream: tokenizer.stream(job.skip_special),
        stops: Stops::new(job.stops),
        stopped: false,
        min_tokens: job.min_tokens,
        skip_special: job.skip_special,
        kept: job.kept,
        scores: None,
        embedding: job.embedding,
        chars: 0,
        said: 0,
        written: 0,
        last: job.line.arrived,
        line: job.line,
    };
    let offsets = if echo { output.echo(&prompt) } else { Ok(VecDeque::new()) };
    let offsets = match offsets {
        Ok(offsets) => offsets,
        Err(error) => return output.failed(error.into()),
    };
    output.scores = logprobs.map(|top| Scores::new(top, &prompt, offsets));
    let score_prompt = echo && logprobs.is_some();
    let (prompt, hidden) = (prompt.to_vec(), output.embedding.is_some());
    // What can be wrong was looked at before; the client is told that it was given up.
    let asked = Request { prompt, score_prompt, hidden, max_tokens, end_tokens, sampler, output };
    if let Err(error) = engine.add(asked) {
        tracing::error!(%error, "a request that should be refused came through");
    }
}

impl Text<'_> {
    /// Says the prompt; where each of its tokens begins.
    fn echo(&mut self, prompt: &[u32]) -> Result<VecDeque<usize>, fracbit_io::Error> {
        let (mut text, mut offsets) = (String::new(), VecDeque::new());
        for &token in prompt {
            offsets.push_back(self.chars);
            let piece = self.stream.push(token)?;
            self.chars += piece.chars().count();
            text += &piece;
        }
        self.say(text);
        Ok(offsets)
    }

    /// Says a piece, and the scores of its tokens.
    fn say(&mut self, text: String) {
        self.said += text.chars().count();
        self.say_scored(text, self.said);
    }

    /// Says a piece, and the scores of tokens that begin within so many characters.
    fn say_scored(&mut self, text: String, known: usize) {
        let scores = self.scores.as_mut().map(|scores| scores.take(known)).unwrap_or_default();
        if !text.is_empty() || !scores.is_empty() {
            self.line.say(Event::Piece(text, scores));
        }
    }

    /// Looks for stop texts in a piece, unless the text may not end yet.
    fn pass(&mut self, piece: String, hidden: bool) -> (String, bool) {
        match (self.written < self.min_tokens, hidden) {
            (true, true) => (String::new(), false),
            (true, false) => (piece, false),
            (false, true) => self.stops.push_hidden(&piece),
            (false, false) => self.stops.push(&piece),
        }
    }
}

impl Output for Text<'_> {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        self.written += 1;
        let first = self.written == 1;
        self.line.metrics.token(std::mem::replace(&mut self.last, Instant::now()).elapsed(), first);
        let piece = self.stream.push(token)?;
        self.chars += piece.chars().count();
        let (mut text, mut stopped) = self.pass(piece, false);
        let special = self.tokenizer.special_text(token).filter(|_| self.skip_special && !stopped);
        if let Some(special) = special {
            let (more, ended) = self.pass(special, !self.kept.contains(&token));
            text += &more;
            stopped = ended;
        }
        self.say(text);
        self.stopped = stopped;
        Ok(if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn scored(&mut self, token: u32, logits: &[f32]) {
        if let Some(scores) = &mut self.scores {
            scores.push(token, logits, self.chars);
        }
    }

    fn hidden(&mut self, rows: &[f32]) {
        if let Some(embedding) = &mut self.embedding {
            embedding.push(rows);
        }
    }

    fn wanted(&self) -> bool {
        self.line.wanted()
    }

    fn done(mut self, mut done: Done) {
        if let Some(embedding) = self.embedding.take() {
            // All that was asked for.
            done.finish = Finish::Output;
            self.say(embedding.text());
        } else if !self.stopped {
            let rest = match std::mem::replace(&mut self.stream, self.tokenizer.stream(true)).finish() {
                Ok(rest) => rest,
                Err(error) => return self.failed(error.into()),
            };
            let (mut text, stopped) = self.stops.push(&rest);
            if stopped {
                done.finish = Finish::Output;
                self.say(text);
            } else {
                text += &self.stops.finish();
                // An end token has no text.
                self.say_scored(text, usize::MAX);
            }
        }
        let Done { finish, prompt, cached, tokens, seconds, .. } = done;
        tracing::info!(?finish, prompt, cached, tokens, seconds, "text done");
        self.line.metrics.counted(&done);
        let outcome = if finish.is_cut() { Outcome::Length } else { Outcome::Stop };
        let stop = self.stops.met();
        self.line.end(outcome, Event::Done(done, stop));
    }

    fn failed(self, error: Error) {
        tracing::warn!(%error, "a text failed");
        self.line.end(Outcome::Failed, Event::Failed(error.to_string()));
    }
}
