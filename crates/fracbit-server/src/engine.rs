//! The one thread that runs the model, for several texts at a time.
//!
//! A turn of its loop takes new texts in while places are free, runs some tokens of one prompt, and
//! then one token of every text that is being written, all of them together: a matrix is read once
//! for all (continuous batching; Yu et al. 2022, "Orca"). Neither changes what is written: with
//! packed weights a row's arithmetic depends neither on its neighbours nor on how a prompt is cut,
//! so a request and its seed give one text, whatever else the server does at the time.
//!
//! A text that is alone has more than one token run at a time where it repeats itself
//! ([`fracbit_model::draft`]), or where a nested model drafts for it.
//!
//! When a text is done its keys and values stay until the place is wanted: a conversation that goes
//! on finds its past there.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use fracbit_io::{TokenStream, Tokenizer};
use fracbit_model::{
    Draft, Drafter, Error, KvType, Model, Precision, Sampler, SelfDrafter, State, StateOptions,
};
use fracbit_schedule::{Phase, Schedule};
use tokio::sync::mpsc::UnboundedSender;

use crate::stops::Stops;

/// Tokens of a prompt that are run between two steps of texts that wait for theirs: some tenths of
/// a second on a laptop.
const BETWEEN: usize = 128;

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
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Text(String),
    Done(Done),
    Failed(String),
}

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) finish: Finish,
    pub(crate) prompt_tokens: usize,
    /// Of those, tokens that were still held from another request.
    pub(crate) cached_tokens: usize,
    /// With the token that ended it.
    pub(crate) completion_tokens: usize,
    /// Of those, tokens that were guessed and so took no step of their own.
    pub(crate) guessed_tokens: usize,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it, or a stop text was met.
    Stop,
    /// As many tokens as asked for, or as the context holds.
    Length,
}

/// The model and what it is run with.
#[derive(Debug)]
pub(crate) struct Engine<'a> {
    pub(crate) model: &'a Model,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) end_tokens: &'a [u32],
    /// Texts at a time.
    pub(crate) slots: usize,
    /// Most tokens of a text with its prompt.
    pub(crate) context: usize,
    pub(crate) kv: KvType,
    /// What steps read of a nested model; `None`: all.
    pub(crate) schedule: Option<Schedule>,
    /// How a nested model drafts for a text that is alone.
    pub(crate) draft: Option<Draft>,
}

/// A text on its way.
struct Writing<'a> {
    job: Job,
    stream: Option<TokenStream<'a>>,
    stops: Stops,
    /// Prompt and text; the state holds the beginning.
    tokens: Vec<u32>,
    cached: usize,
    drafter: Drafter,
    own: Option<SelfDrafter>,
    guessed: usize,
    start: Instant,
}

/// The past of a text that is done.
struct Past {
    tokens: Vec<u32>,
    state: State,
}

/// What stands where.
#[derive(Default)]
struct Places<'a> {
    /// Their states are `states`, in the same order.
    writing: Vec<Writing<'a>>,
    states: Vec<State>,
    /// Prompts not yet run to their end.
    reading: VecDeque<(Writing<'a>, State)>,
    /// The last one used last.
    past: Vec<Past>,
}

/// What steps work in.
#[derive(Default)]
struct Room {
    /// The tokens of a step.
    run: Vec<u32>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl Places<'_> {
    fn taken(&self) -> usize {
        self.writing.len() + self.reading.len()
    }
}

impl<'a> Engine<'a> {
    /// Serves until all senders of jobs are gone and their texts are done.
    pub(crate) fn run(&self, jobs: &Receiver<Job>) {
        let mut places = Places::default();
        let mut room = Room::default();
        loop {
            while places.taken() < self.slots {
                let job = if places.taken() == 0 {
                    let Ok(job) = jobs.recv() else { return };
                    job
                } else {
                    match jobs.try_recv() {
                        Ok(job) => job,
                        Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                    }
                };
                self.admit(job, &mut places);
            }
            self.read(&mut places, &mut room);
            if places.taken() == 1 && places.reading.is_empty() {
                self.write_alone(&mut places, &mut room);
            } else {
                self.write(&mut places, &mut room);
            }
        }
    }

    /// Gives a job a place, and the past that helps it most.
    fn admit(&self, mut job: Job, places: &mut Places<'a>) {
        if job.events.is_closed() {
            return;
        }
        job.sampler.use_kernels_of(self.model);
        let common = |past: &Past| {
            let same = past.tokens.iter().zip(&job.prompt).take_while(|(a, b)| a == b).count();
            // The last token must be run for its logits.
            same.min(job.prompt.len() - 1)
        };
        let best = places.past.iter().map(common).enumerate().max_by_key(|&(_, same)| same);
        let room = places.taken() + places.past.len() < self.slots;
        let mut state = match best {
            // As long as there is room a past is not thrown away for a few tokens, such as those
            // that all conversations begin with.
            Some((at, same)) if !room || 2 * same > places.past[at].tokens.len() => {
                let at = if same == 0 { 0 } else { at };
                let Past { mut state, .. } = places.past.remove(at);
                state.truncate(same);
                state
            }
            _ => {
                let context = Some(self.context);
                self.model.state(&StateOptions { context, kv: self.kv, ..StateOptions::default() })
            }
        };
        if let Err(error) = state.reserve(job.prompt.len() + 1 - state.len()) {
            return fail(&job, &error);
        }
        let writing = Writing {
            stream: Some(self.tokenizer.stream(job.skip_special)),
            stops: Stops::new(job.stops.clone()),
            tokens: job.prompt.clone(),
            cached: state.len(),
            drafter: Drafter::new(job.prompt.clone()),
            own: self.draft.map(|draft| SelfDrafter::new(draft, &job.sampler)),
            guessed: 0,
            start: Instant::now(),
            job,
        };
        places.reading.push_back((writing, state));
    }

    /// Runs some tokens of the first prompt; when it is through, picks the first token of the text.
    fn read(&self, places: &mut Places<'a>, Room { hidden, logits, .. }: &mut Room) {
        let Some((mut writing, mut state)) = places.reading.pop_front() else { return };
        if writing.job.events.is_closed() {
            return self.keep(places, writing, state);
        }
        let most = if places.writing.is_empty() { state.chunk() } else { BETWEEN.min(state.chunk()) };
        let prompt = &writing.job.prompt;
        let next = &prompt[state.len()..prompt.len().min(state.len() + most)];
        self.set_precision(&mut state, Phase::Prefill);
        let width = self.model.config().hidden_size;
        let done = self.model.forward(&mut state, next, hidden).and_then(|()| {
            if state.len() < prompt.len() {
                return Ok(false);
            }
            self.model.logits(&mut state, &hidden[hidden.len() - width..], logits)?;
            Ok(true)
        });
        match done {
            Err(error) => fail(&writing.job, &error),
            Ok(false) => places.reading.push_front((writing, state)),
            Ok(true) => match self.next(&mut writing, logits) {
                Err(error) => fail(&writing.job, &error),
                Ok(true) => self.keep(places, writing, state),
                Ok(false) => {
                    places.writing.push(writing);
                    places.states.push(state);
                }
            },
        }
    }

    /// One token of every text that is being written.
    fn write(&self, places: &mut Places<'a>, Room { run, hidden, logits }: &mut Room) {
        let Places { writing, states, .. } = places;
        let Some(first) = states.first() else { return };
        debug_assert!(first.len() < self.context, "a full text is done");
        run.clear();
        run.extend(writing.iter().map(|w| w.tokens[w.tokens.len() - 1]));
        for (writing, state) in writing.iter().zip(states.iter_mut()) {
            self.set_precision(state, Phase::Decode(writing.written() - 1));
        }
        let done = self
            .model
            .forward_batch(states, run, hidden)
            .and_then(|()| self.model.logits_batch(states, hidden, logits));
        if let Err(error) = done {
            // Memory for a cache, for all one knows: who asks again may find some.
            writing.drain(..).for_each(|w| fail(&w.job, &error));
            states.clear();
            return;
        }
        let vocab = self.model.config().vocab_size;
        // From the end, since the last one takes the place of one that leaves.
        for i in (0..writing.len()).rev() {
            let outcome = self.next(&mut places.writing[i], &logits[i * vocab..(i + 1) * vocab]);
            if !matches!(outcome, Ok(false)) {
                let (writing, state) = (places.writing.swap_remove(i), places.states.swap_remove(i));
                match outcome {
                    Err(error) => fail(&writing.job, &error),
                    Ok(_) => self.keep(places, writing, state),
                }
            }
        }
    }

    /// A token of the only text, and those behind it that are guessed right.
    fn write_alone(&self, places: &mut Places<'a>, Room { run, hidden, logits }: &mut Room) {
        let (Some(mut writing), Some(mut state)) = (places.writing.pop(), places.states.pop()) else {
            return;
        };
        let (held, vocab) = (state.len(), self.model.config().vocab_size);
        run.clear();
        run.push(writing.tokens[held]);
        let step = writing.written() - 1;
        if self.set_precision(&mut state, Phase::Decode(step))
            && let Some(own) = &mut writing.own
        {
            own.forget_times();
        }
        // A step has one precision.
        let alike = self.schedule.as_ref().and_then(|s| s.steps_alike(step)).map_or(usize::MAX, |n| n - 1);
        let most = writing.left(self.context).saturating_sub(1).min(alike);
        run.extend(writing.drafter.draft(most).take_while(|&token| (token as usize) < vocab));
        let Writing { own, tokens, job, .. } = &mut writing;
        let mut own = own.as_mut().filter(|_| run.len() == 1);
        let drafted = match &mut own {
            Some(own) => own.draft((self.model, &mut state, &job.sampler), tokens, most, run),
            None => Ok(()),
        };
        let own = own.is_some();
        let done = drafted.and_then(|()| self.model.forward(&mut state, run, hidden)).and_then(|()| {
            self.model.logits(&mut state, hidden, logits)?;
            if let Some(own) = &mut writing.own {
                own.ran();
            }
            let mut rows = 0;
            loop {
                let done = self.next(&mut writing, &logits[rows * vocab..][..vocab])?;
                rows += 1;
                let right = run.get(rows) == writing.tokens.last();
                if let Some(own) = writing.own.as_mut().filter(|_| own && rows < run.len()) {
                    own.judge(right);
                }
                if done || !right {
                    state.truncate(held + rows);
                    return Ok(done);
                }
                writing.guessed += 1;
            }
        });
        match done {
            Err(error) => fail(&writing.job, &error),
            Ok(true) => self.keep(places, writing, state),
            Ok(false) => {
                places.writing.push(writing);
                places.states.push(state);
            }
        }
    }

    /// Keeps what a text leaves behind: all that a prompt of the same tokens would leave. Where
    /// answers are written with other precisions than prompts are read, that is the prompt alone.
    fn keep(&self, places: &mut Places<'a>, writing: Writing<'a>, mut state: State) {
        let falls = |s: &Schedule| s.switches().iter().any(|switch| switch.precision != s.prefill());
        if self.schedule.as_ref().is_some_and(falls) {
            state.truncate(writing.job.prompt.len());
        }
        let mut tokens = writing.tokens;
        tokens.truncate(state.len());
        places.past.push(Past { tokens, state });
    }

    /// Sets what the next step of a text reads; whether that is something else than before.
    fn set_precision(&self, state: &mut State, phase: Phase) -> bool {
        let Some(schedule) = &self.schedule else { return false };
        let precision = Precision::at_most(schedule.precision(phase));
        let other = precision != state.precision();
        state.set_precision(precision);
        other
    }

    /// Picks a token and says what has become text; whether the text is done.
    fn next(&self, writing: &mut Writing<'a>, logits: &[f32]) -> Result<bool, Error> {
        let token = writing.job.sampler.sample(logits, &writing.tokens)?;
        let (mut finish, mut text, mut stopped) = (None, String::new(), false);
        writing.tokens.push(token);
        writing.drafter.push(token);
        let written = writing.written();
        if self.end_tokens.contains(&token) || writing.job.stop_tokens.contains(&token) {
            finish = Some(Finish::Stop);
        } else {
            if let Some(stream) = &mut writing.stream {
                (text, stopped) = writing.stops.push(&stream.push(token)?);
            }
            let special = self.tokenizer.special_text(token).filter(|_| writing.job.skip_special && !stopped);
            if let Some(special) = special {
                let (more, ended) = writing.stops.push_hidden(&special);
                text += &more;
                stopped = ended;
            }
            if stopped {
                finish = Some(Finish::Stop);
            } else if writing.left(self.context) == 0 {
                finish = Some(Finish::Length);
            }
        }
        if let Some(stream) = writing.stream.take_if(|_| finish.is_some() && !stopped) {
            let (rest, stopped) = writing.stops.push(&stream.finish()?);
            text += &rest;
            if stopped {
                finish = Some(Finish::Stop);
            } else {
                text += &writing.stops.finish();
            }
        }
        let events = &writing.job.events;
        let mut heard = true;
        if !text.is_empty() {
            heard &= events.send(Event::Text(text)).is_ok();
        }
        let Some(finish) = finish else {
            return Ok(!heard || events.is_closed());
        };
        let done = Done {
            finish,
            prompt_tokens: writing.job.prompt.len(),
            cached_tokens: writing.cached,
            completion_tokens: written,
            guessed_tokens: writing.guessed,
        };
        // Nobody there: nothing to tell.
        let _ = events.send(Event::Done(done));
        let seconds = writing.start.elapsed().as_secs_f64();
        tracing::info!(?finish, done.prompt_tokens, done.cached_tokens, written, seconds, "text done");
        Ok(true)
    }
}

impl Writing<'_> {
    /// Tokens of the text so far.
    fn written(&self) -> usize {
        self.tokens.len() - self.job.prompt.len()
    }

    /// Most tokens still to come.
    fn left(&self, context: usize) -> usize {
        (self.job.max_tokens - self.written()).min(context - self.tokens.len())
    }
}

fn fail(job: &Job, error: &Error) {
    tracing::warn!(%error, "a text failed");
    // Nobody there: nothing to tell.
    let _ = job.events.send(Event::Failed(error.to_string()));
}
