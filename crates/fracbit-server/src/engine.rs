//! The one thread that runs the model: requests come in and texts go out, a
//! [`fracbit_engine::Engine`] does the rest.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, TryRecvError};

use fracbit_engine::{Done, Engine, Finish, Output, Request};
use fracbit_io::{TokenStream, Tokenizer};
use fracbit_model::{Error, Sampler};
use tokio::sync::mpsc::UnboundedSender;

use crate::stops::Stops;

/// A text to be continued.
#[derive(Debug)]
pub(crate) struct Job {
    /// At least one token and fewer than the context holds.
    pub(crate) prompt: Vec<u32>,
    /// At least 1.
    pub(crate) max_tokens: usize,
    pub(crate) sampler: Sampler,
    pub(crate) stops: Vec<String>,
    /// Tokens that end this text, beside those of all.
    pub(crate) stop_tokens: Vec<u32>,
    /// Special tokens are left out of the text; stop texts are looked for with them.
    pub(crate) skip_special: bool,
    /// Where the text goes; dropped at the other end: nobody wants it any more.
    pub(crate) events: UnboundedSender<Event>,
}

/// What becomes of a [`Job`]: texts, then one of the others.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    Text(String),
    Done(Done),
    Failed(String),
}

/// Makes text of the tokens of a job.
#[derive(Debug)]
pub(crate) struct Text<'a> {
    tokenizer: &'a Tokenizer,
    stream: TokenStream<'a>,
    stops: Stops,
    /// A stop text was met.
    stopped: bool,
    skip_special: bool,
    events: UnboundedSender<Event>,
}

/// Serves until all senders of jobs are gone and their texts are done.
pub(crate) fn run<'a>(
    mut engine: Engine<'_, Text<'a>>,
    tokenizer: &'a Tokenizer,
    end_tokens: &[u32],
    jobs: &Receiver<Job>,
) {
    loop {
        while engine.has_place() {
            let job = if engine.sequences() == 0 {
                let Ok(job) = jobs.recv() else { return };
                job
            } else {
                match jobs.try_recv() {
                    Ok(job) => job,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
            };
            let Job { prompt, max_tokens, sampler, stops, stop_tokens, skip_special, events } = job;
            let output = Text {
                tokenizer,
                stream: tokenizer.stream(skip_special),
                stops: Stops::new(stops),
                stopped: false,
                skip_special,
                events: events.clone(),
            };
            let end_tokens = [end_tokens, &stop_tokens].concat();
            if let Err(error) = engine.add(Request { prompt, max_tokens, end_tokens, sampler, output }) {
                // Nobody there: nothing to tell.
                let _ = events.send(Event::Failed(error.to_string()));
            }
        }
        engine.step();
    }
}

impl Text<'_> {
    /// Nobody there: nothing to tell, and [`Output::wanted`] says so.
    fn say(&self, text: String) {
        if !text.is_empty() {
            let _ = self.events.send(Event::Text(text));
        }
    }
}

impl Output for Text<'_> {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        let (mut text, mut stopped) = self.stops.push(&self.stream.push(token)?);
        let special = self.tokenizer.special_text(token).filter(|_| self.skip_special && !stopped);
        if let Some(special) = special {
            let (more, ended) = self.stops.push_hidden(&special);
            text += &more;
            stopped = ended;
        }
        self.say(text);
        self.stopped = stopped;
        Ok(if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn wanted(&self) -> bool {
        !self.events.is_closed()
    }

    fn done(mut self, mut done: Done) {
        if !self.stopped {
            let rest = match self.stream.finish() {
                Ok(rest) => rest,
                Err(error) => {
                    let _ = self.events.send(Event::Failed(error.to_string()));
                    return;
                }
            };
            let (mut text, stopped) = self.stops.push(&rest);
            if stopped {
                done.finish = Finish::Stop;
            } else {
                text += &self.stops.finish();
            }
            if !text.is_empty() {
                let _ = self.events.send(Event::Text(text));
            }
        }
        let Done { finish, prompt, cached, tokens, seconds, .. } = done;
        let _ = self.events.send(Event::Done(done));
        tracing::info!(?finish, prompt, cached, tokens, seconds, "text done");
    }

    fn failed(self, error: &Error) {
        let _ = self.events.send(Event::Failed(error.to_string()));
    }
}
