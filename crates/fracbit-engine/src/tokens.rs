//! One text of an engine as an iterator.

use std::borrow::BorrowMut;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fracbit_model::{Error, Runtime, Sampler};

use crate::engine::Engine;
use crate::sequence::{Done, Output, Request};

/// What became of a text that an iterator yields.
#[derive(Debug, Default)]
struct Heard {
    tokens: VecDeque<u32>,
    end: Option<Result<Done, Error>>,
    unwanted: bool,
}

/// An [`Output`] that keeps what it hears for [`Tokens`].
#[derive(Debug)]
pub struct Listener(Arc<Mutex<Heard>>);

fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    // What it guards is whole after every statement.
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Output for Listener {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        lock(&self.0).tokens.push_back(token);
        Ok(ControlFlow::Continue(()))
    }

    fn wanted(&self) -> bool {
        !lock(&self.0).unwanted
    }

    fn done(self, done: Done) {
        lock(&self.0).end = Some(Ok(done));
    }

    fn dropped(self, done: Done) {
        lock(&self.0).end = Some(Ok(done));
    }

    fn failed(self, error: Error) {
        lock(&self.0).end = Some(Err(error));
    }
}

/// Yields the tokens of one text of an engine, which it borrows or owns.
///
/// An end token is not yielded. What was run stays in the engine's cache: a text that goes on from
/// this one, such as the next turn of a conversation, runs only what is new. A text that is dropped
/// before its end ends.
#[derive(Debug)]
pub struct Tokens<'a, R: Runtime, E: BorrowMut<Engine<'a, R, Listener>>> {
    engine: E,
    heard: Arc<Mutex<Heard>>,
    over: bool,
    done: Option<Done>,
    model: PhantomData<&'a R>,
}

impl<'a, R: Runtime, E: BorrowMut<Engine<'a, R, Listener>>> Tokens<'a, R, E> {
    /// Continues a prompt with at most `max_tokens` tokens, as they are asked for.
    ///
    /// # Errors
    /// As for [`Engine::add`].
    pub fn begin(
        mut engine: E,
        prompt: Vec<u32>,
        max_tokens: usize,
        end_tokens: Vec<u32>,
        sampler: Sampler,
    ) -> Result<Self, Error> {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let output = Listener(Arc::clone(&heard));
        let asked =
            Request { prompt, score_prompt: false, hidden: false, max_tokens, end_tokens, sampler, output };
        engine.borrow_mut().add(asked)?;
        Ok(Self { engine, heard, over: false, done: None, model: PhantomData })
    }

    /// How the text ended; `None` before, or when it failed.
    #[must_use]
    pub fn done(&self) -> Option<&Done> {
        self.done.as_ref()
    }

    /// Ends the text where it is; [`done`](Self::done) then tells what was run of it, with
    /// [`Finish::Output`](crate::Finish::Output) unless it had just ended.
    pub fn stop(&mut self) {
        if self.over {
            return;
        }
        self.over = true;
        lock(&self.heard).unwanted = true;
        self.engine.borrow_mut().sweep();
        if let Some(Ok(done)) = lock(&self.heard).end.take() {
            self.done = Some(done);
        }
    }

    /// Whether no more tokens come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over
    }
}

impl<'a, R: Runtime, E: BorrowMut<Engine<'a, R, Listener>>> Iterator for Tokens<'a, R, E> {
    type Item = Result<u32, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.over {
            let mut heard = lock(&self.heard);
            if let Some(token) = heard.tokens.pop_front() {
                return Some(Ok(token));
            }
            if let Some(end) = heard.end.take() {
                self.over = true;
                match end {
                    Ok(done) => self.done = Some(done),
                    Err(error) => return Some(Err(error)),
                }
                break;
            }
            drop(heard);
            self.engine.borrow_mut().step();
        }
        None
    }
}

impl<'a, R: Runtime, E: BorrowMut<Engine<'a, R, Listener>>> Drop for Tokens<'a, R, E> {
    fn drop(&mut self) {
        self.stop();
    }
}
