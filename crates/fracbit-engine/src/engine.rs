//! Which sequences run, step by step (iteration-level scheduling; Yu et al. 2022, "Orca").
//!
//! Nothing here changes what is written: with packed weights a row's arithmetic depends neither on
//! its neighbours nor on how a prompt is cut, so a request and its seed give one text. A sequence
//! that had to give up its pages is computed again, every token at the precision that it had.

use std::collections::VecDeque;
use std::time::Instant;

use fracbit_model::{
    Cached, Error, KvType, PageList, PagePool, Precision, Runtime, StateOptions, pages::POSITIONS,
};
use fracbit_schedule::{Phase, Scheduler};

use crate::guesses::{Draft, Guesses};
use crate::prefixes::{Prefixes, common};
use crate::sequence::{Finish, Output, Request, Sequence};

/// Tokens of a prompt in a step while others wait for theirs: some tenths of a second on a laptop.
const BESIDE: usize = 128;
/// Tokens of a prompt whose logits are held at a time.
const SCORED: usize = 16;

/// How an engine runs.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most sequences at a time, at least 1; others wait.
    pub sequences: usize,
    /// Most tokens of a sequence with its prompt.
    pub context: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Most pages of the cache; `None`: as many as all sequences take at their full length.
    pub pages: Option<usize>,
    /// What decides what steps read of a nested model; `None`: all.
    pub scheduler: Option<Scheduler>,
    /// How a nested model drafts for a sequence that is alone.
    pub draft: Option<Draft>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { sequences: 4, context: 4096, kv: KvType::I16, pages: None, scheduler: None, draft: None }
    }
}

/// Options that make no engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A sequence of the full context would never fit.
    #[error(
        "the cache should have at least {want} pages of {positions} tokens, for one sequence of {context} tokens; it has {pages}"
    )]
    Pages {
        /// Pages that it takes.
        want: usize,
        /// Tokens of a page.
        positions: usize,
        /// The context.
        context: usize,
        /// Pages that were asked for.
        pages: usize,
    },
    /// The scheduler is for another model, or the device has no room.
    #[error(transparent)]
    Model(#[from] Error),
}

/// Runs the sequences of a model; see the crate.
#[derive(Debug)]
pub struct Engine<'a, R: Runtime, O> {
    model: &'a R,
    options: EngineOptions,
    pool: PagePool<R::Memory>,
    prefixes: Prefixes<R::Memory>,
    /// Without a state.
    waiting: VecDeque<Sequence<O>>,
    /// Not yet run to their last token.
    reading: Vec<(Sequence<O>, R::State)>,
    /// Tokens of prompts that have been run.
    read: u64,
    /// Their states are `states`, in the same order.
    writing: Vec<Sequence<O>>,
    states: Vec<R::State>,
    work: Work<R>,
    serial: u64,
    preempted: usize,
}

/// What steps work in.
#[derive(Debug)]
struct Work<R: Runtime> {
    /// The tokens of a step, and how many each sequence has of them.
    run: Vec<u32>,
    counts: Vec<usize>,
    rows: R::Work,
    logits: Vec<f32>,
}

/// Pages that some sequences of a full context take at most: one more than their tokens, since a
/// page that is shared is copied before it is written.
#[must_use]
pub fn full_pages(context: usize, sequences: usize) -> usize {
    context.div_ceil(POSITIONS).saturating_mul(sequences).saturating_add(1)
}

impl<'a, R: Runtime, O: Output> Engine<'a, R, O> {
    /// An engine without sequences.
    ///
    /// # Errors
    /// [`EngineError::Pages`], [`EngineError::Model`].
    pub fn new(model: &'a R, options: EngineOptions) -> Result<Self, EngineError> {
        let (context, want) = (options.context, full_pages(options.context, 1));
        let pages = options.pages.unwrap_or_else(|| full_pages(context, options.sequences.max(1)));
        if pages < want {
            return Err(EngineError::Pages { want, positions: POSITIONS, context, pages });
        }
        if let Some(scheduler) = &options.scheduler {
            model.check_scheduler(scheduler)?;
        }
        Ok(Self {
            model,
            pool: model.pool(options.kv, pages)?,
            options,
            prefixes: Prefixes::default(),
            waiting: VecDeque::new(),
            reading: Vec::new(),
            read: 0,
            writing: Vec::new(),
            states: Vec::new(),
            work: Work {
                run: Vec::new(),
                counts: Vec::new(),
                rows: model.work(context)?,
                logits: Vec::new(),
            },
            serial: 0,
            preempted: 0,
        })
    }

    /// Takes a request; it begins when there is a place for it, in the order of requests.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::Token`], [`Error::ContextFull`] when the prompt leaves no
    /// room for a token, [`Error::Hidden`].
    pub fn add(&mut self, request: Request<O>) -> Result<(), Error> {
        let Request { mut prompt, score_prompt, hidden, max_tokens, end_tokens, mut sampler, output } =
            request;
        let (vocab, capacity) = (self.model.config().vocab_size, self.options.context);
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(Error::Token { token, vocab });
        }
        let got = prompt.len() + max_tokens.min(1);
        if got > capacity {
            return Err(Error::ContextFull { capacity, len: 0, got });
        }
        if hidden {
            self.model.check_hidden()?;
        }
        self.model.prepare_sampler(&mut sampler);
        // All memory that tokens take, so that no step does.
        let room = max_tokens.min(capacity - prompt.len());
        let mut guesses = Guesses::new(prompt.clone(), self.options.draft, &sampler);
        guesses.reserve(room);
        prompt.reserve(room);
        self.serial += 1;
        self.waiting.push_back(Sequence {
            prompt: prompt.len(),
            scored: if score_prompt { 0 } else { prompt.len() - 1 },
            shown: if hidden { 0 } else { prompt.len() },
            max_tokens,
            end_tokens,
            cached: None,
            guesses,
            guessed: 0,
            tried: 0,
            schedule: None,
            serial: self.serial,
            due: self.read + prompt.len() as u64,
            start: Instant::now(),
            tokens: prompt,
            sampler,
            output,
        });
        Ok(())
    }

    /// Sequences that are there, waiting ones too.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.waiting.len() + self.taken()
    }

    /// Whether one more sequence would not have to wait for the end of another.
    #[must_use]
    pub fn has_place(&self) -> bool {
        self.sequences() < self.options.sequences.max(1)
    }

    /// Times that a sequence had to give up its pages.
    #[must_use]
    pub fn preempted(&self) -> usize {
        self.preempted
    }

    /// Where pages come from.
    #[must_use]
    pub fn pool(&self) -> &PagePool<R::Memory> {
        &self.pool
    }

    fn taken(&self) -> usize {
        self.writing.len() + self.reading.len()
    }

    /// Runs some tokens of a prompt together with one token of every sequence that is being
    /// decoded. `false`: there is no sequence.
    pub fn step(&mut self) -> bool {
        self.sweep();
        self.admit();
        if self.writing.len() == 1 && self.reading.is_empty() && self.waiting.is_empty() {
            self.write_alone();
        } else {
            self.run_together();
        }
        self.sequences() > 0
    }

    /// Ends the sequences that nobody wants any more.
    pub fn sweep(&mut self) {
        for i in (0..self.writing.len()).rev() {
            if !self.writing[i].output.wanted() {
                let (sequence, state) = (self.writing.swap_remove(i), self.states.swap_remove(i));
                self.end(sequence, &state, None);
            }
        }
        for i in (0..self.reading.len()).rev() {
            if !self.reading[i].0.output.wanted() {
                let (sequence, state) = self.reading.swap_remove(i);
                self.end(sequence, &state, None);
            }
        }
        self.waiting.retain(|sequence| sequence.output.wanted());
    }

    /// Gives places to sequences that wait, with the pages that others left of their beginnings.
    fn admit(&mut self) {
        let mut at = 0;
        while self.taken() < self.options.sequences.max(1) {
            let Some(next) = self.waiting.get(at) else { return };
            let options = StateOptions {
                context: Some(self.options.context),
                kv: self.options.kv,
                ..StateOptions::default()
            };
            let mut state = self.model.sequence(&self.pool, &options);
            let known = self.shareable(next).min(next.skippable());
            let (pages, len) = self.prefixes.find(&next.tokens[..known]);
            if self.is_being_read(next, known, len) {
                at += 1;
                continue;
            }
            state.cache_mut().share(&pages, len).expect("pages of this pool that hold so many tokens");
            drop(pages);
            let rest = next.tokens.len() - len;
            // A page for each of those that are decoded: what comes should not push them out.
            if !self.make_room(state.cache().wanted(rest) + self.writing.len()) {
                return;
            }
            let mut sequence = self.waiting.remove(at).expect("the one looked at");
            sequence.cached.get_or_insert(len);
            match state.reserve(rest) {
                Ok(()) => self.reading.push((sequence, state)),
                Err(error) => sequence.output.failed(error),
            }
        }
    }

    /// Whether another prompt that is due before this one is just running more whole pages of the
    /// `known` beginning of `next` than the `held` tokens that were kept: they are worth waiting
    /// for, as where one prompt is asked for several answers.
    fn is_being_read(&self, next: &Sequence<O>, known: usize, held: usize) -> bool {
        self.reading.iter().any(|(other, state)| {
            let shared = common(&other.tokens[..self.shareable(other)], &next.tokens[..known]);
            let shared = shared - shared % POSITIONS;
            other.due <= next.due && state.cache().len() < shared && held < shared
        })
    }

    /// The tokens of a sequence whose keys and values do not depend on its prompt's length: all, or
    /// where precision changes behind the prompt, those of the prompt.
    fn shareable(&self, sequence: &Sequence<O>) -> usize {
        let prompt_only = self.options.scheduler.as_ref().is_some_and(Scheduler::changes);
        if prompt_only { sequence.prompt } else { sequence.tokens.len() }
    }

    /// Gives up kept pages until so many are free; `false`: there are not as many.
    fn make_room(&mut self, pages: usize) -> bool {
        if self.pool.free() >= pages {
            return true;
        }
        if self.pool.free() + self.prefixes.evictable() < pages {
            return false;
        }
        while self.pool.free() < pages {
            if !self.prefixes.evict() {
                return false;
            }
        }
        true
    }

    /// The prompt to run next: the one that is due first. A prompt is due when as many tokens of
    /// prompts have been run since it came as it has itself: a short one need not wait for a long
    /// one, nobody waits for all that come later, and of equal ones the first comes first.
    fn take_prompt(&mut self) -> Option<(Sequence<O>, R::State)> {
        let due = self.reading.iter().map(|(s, _)| (s.due, s.serial)).enumerate();
        let (at, _) = due.min_by_key(|&(_, due)| due)?;
        Some(self.reading.swap_remove(at))
    }

    /// One step: tokens of the prompt that is due first, and one of every sequence that is being
    /// decoded. When the prompt is through, its last row gives the first token of its text.
    fn run_together(&mut self) {
        loop {
            let wanted: usize = self.states.iter().map(|state| state.cache().wanted(1)).sum();
            if self.make_room(wanted) || !self.preempt() {
                break;
            }
        }
        let others = !self.reading.is_empty();
        let mut prompt = self.take_prompt();
        if prompt.is_none() && self.writing.is_empty() {
            return;
        }
        let Work { run, counts, .. } = &mut self.work;
        run.clear();
        counts.clear();
        let scheduler = self.options.scheduler.as_ref();
        if let Some((sequence, state)) = &mut prompt {
            let alone = self.writing.is_empty() && !others;
            let most = if alone { state.chunk() } else { BESIDE.min(state.chunk()) };
            let alike = set_precision(self.model, scheduler, sequence, state).1;
            let next = &sequence.tokens[state.cache().len()..];
            let next = &next[..most.min(alike).min(next.len())];
            run.extend(next);
            counts.push(next.len());
        }
        let prompt_rows = run.len();
        for (sequence, state) in self.writing.iter_mut().zip(&mut self.states) {
            set_precision(self.model, scheduler, sequence, state);
            run.extend(sequence.tokens.last());
            counts.push(1);
        }
        self.read += prompt_rows as u64;
        // The prompt comes first, so that the rows whose logits are wanted are neighbours.
        let mut prompt = prompt.map(|(sequence, state)| {
            self.states.insert(0, state);
            sequence
        });
        let done = self.rows_of_step(prompt.as_mut(), prompt_rows);
        let reader = prompt.map(|sequence| (sequence, self.states.remove(0)));
        let picks = match done {
            Ok(picks) => picks,
            Err(error) => return self.fail_all(reader, error),
        };
        let vocab = self.model.config().vocab_size;
        let first = usize::from(picks);
        // From the end, since the last one takes the place of one that leaves.
        for i in (0..self.writing.len()).rev() {
            let logits = &self.work.logits[(first + i) * vocab..][..vocab];
            let next = next_token(&mut self.writing[i], logits, self.options.context);
            if matches!(next, Ok(Next::Goes)) {
                continue;
            }
            let (sequence, state) = (self.writing.swap_remove(i), self.states.swap_remove(i));
            self.leave(sequence, &state, next);
        }
        let Some((mut sequence, state)) = reader else { return };
        if picks {
            match next_token(&mut sequence, &self.work.logits[..vocab], self.options.context) {
                Ok(Next::Goes) => {
                    self.keep(&sequence, &state, POSITIONS);
                    self.writing.push(sequence);
                    self.states.push(state);
                }
                next => self.leave(sequence, &state, next),
            }
        } else if state.cache().len() < sequence.tokens.len() {
            self.keep(&sequence, &state, POSITIONS);
            self.reading.push((sequence, state));
        } else {
            let finish = Some(sequence.cut());
            self.end(sequence, &state, finish);
        }
    }

    /// Runs the tokens of a step, and has the logits that tokens are picked from: of the last row
    /// of the `prompt`, whose state is then the first, where it is through and its text has room
    /// (`true`), and of all rows behind it. What the output wants of the prompt it gets.
    fn rows_of_step(&mut self, prompt: Option<&mut Sequence<O>>, rows: usize) -> Result<bool, Error> {
        let Work { run, counts, rows: work, logits } = &mut self.work;
        let (model, states) = (self.model, &mut self.states[..]);
        model.step(work, states, run, counts)?;
        let mut picks = false;
        if let Some(sequence) = prompt {
            score(model, work, states, sequence, rows, logits)?;
            show(model, work, &states[0], sequence, rows)?;
            let through = states[0].cache().len() == sequence.tokens.len();
            picks = through && sequence.left(self.options.context) > 0;
        }
        let wanted = rows - usize::from(picks)..run.len();
        if !wanted.is_empty() {
            model.logits(work, states, wanted, logits)?;
        }
        Ok(picks)
    }

    /// A sequence that runs leaves, for what came of its token.
    fn leave(&mut self, sequence: Sequence<O>, state: &R::State, next: Result<Next, Error>) {
        match next {
            Err(error) => sequence.output.failed(error),
            Ok(Next::Ends(finish)) => self.end(sequence, state, finish),
            Ok(Next::Goes) => {}
        }
    }

    /// A step went wrong for all that were in it: memory for a cache, for all one knows. Who asks
    /// again may find some.
    fn fail_all(&mut self, reader: Option<(Sequence<O>, R::State)>, error: Error) {
        let said = error.to_string();
        self.states.clear();
        let last = reader.map(|(sequence, _)| sequence).or_else(|| self.writing.pop());
        self.writing.drain(..).for_each(|sequence| sequence.output.failed(Error::Sequence(said.clone())));
        if let Some(sequence) = last {
            sequence.output.failed(error);
        }
    }

    /// Takes the pages of the newest sequence, which waits again; `false`: there is no other.
    fn preempt(&mut self) -> bool {
        if self.taken() < 2 {
            return false;
        }
        let newest = |all: &mut dyn Iterator<Item = u64>| all.enumerate().max_by_key(|&(_, serial)| serial);
        let writing = newest(&mut self.writing.iter().map(|s| s.serial));
        let reading = newest(&mut self.reading.iter().map(|(s, _)| s.serial));
        let (sequence, state) = match (writing, reading) {
            (Some((at, serial)), other) if other.is_none_or(|(_, other)| other < serial) => {
                (self.writing.swap_remove(at), self.states.swap_remove(at))
            }
            (_, Some((at, _))) => self.reading.swap_remove(at),
            (_, None) => return false,
        };
        self.preempted += 1;
        tracing::debug!(serial = sequence.serial, tokens = sequence.tokens.len(), "waits for pages");
        self.keep(&sequence, &state, 1);
        drop(state);
        self.waiting.push_front(sequence);
        true
    }

    /// A token of the only sequence, and those behind it that are guessed right.
    fn write_alone(&mut self) {
        let (Some(mut sequence), Some(mut state)) = (self.writing.pop(), self.states.pop()) else { return };
        let (held, vocab) = (state.cache().len(), self.model.config().vocab_size);
        // A step has one precision.
        let (other, alike) =
            set_precision(self.model, self.options.scheduler.as_ref(), &mut sequence, &mut state);
        if other {
            sequence.guesses.forget_times();
        }
        let more = if self.model.exact() { sequence.left(self.options.context) } else { 1 };
        let mut most = more.saturating_sub(1).min(alike - 1);
        if !self.make_room(state.cache().wanted(1 + most)) {
            // What is on the page of the token itself is there.
            self.make_room(state.cache().wanted(1));
            most = most.min(POSITIONS - held % POSITIONS - 1);
        }
        let Work { rows: work, logits, .. } = &mut self.work;
        let Sequence { guesses, tokens, sampler, .. } = &mut sequence;
        let run = guesses.make((self.model, &mut *work, &mut state), sampler, tokens, most);
        let states = std::slice::from_mut(&mut state);
        let ran = run.and_then(|run| self.model.step(work, states, run, &[run.len()]).map(|()| run.len()));
        let done = ran.and_then(|ran| {
            self.model.logits(work, std::slice::from_mut(&mut state), 0..ran, logits)?;
            sequence.guesses.ran();
            sequence.tried += ran - 1;
            let mut rows = 0;
            loop {
                let logits = &logits[rows * vocab..][..vocab];
                let next = next_token(&mut sequence, logits, self.options.context)?;
                rows += 1;
                let token = sequence.tokens[sequence.tokens.len() - 1];
                let right = sequence.guesses.judge(rows, token);
                if !matches!(next, Next::Goes) || !right {
                    state.cache_mut().truncate(held + rows);
                    return Ok(next);
                }
                sequence.guessed += 1;
            }
        });
        match done {
            Err(error) => sequence.output.failed(error),
            Ok(Next::Ends(finish)) => self.end(sequence, &state, finish),
            Ok(Next::Goes) => {
                self.writing.push(sequence);
                self.states.push(state);
            }
        }
    }

    /// A sequence has ended; `None`: nobody wants it any more.
    fn end(&mut self, sequence: Sequence<O>, state: &R::State, finish: Option<Finish>) {
        self.keep(&sequence, state, 1);
        let read = |rate| self.model.bits_at(Precision::at_most(rate));
        let done = sequence.done(finish.unwrap_or(Finish::Output), read);
        match finish {
            Some(_) => sequence.output.done(done),
            None => sequence.output.dropped(done),
        }
    }

    /// Keeps the pages of a sequence for others with its beginning: those of a multiple of `whole`
    /// tokens, since a sequence that goes on writes to the last page.
    fn keep(&mut self, sequence: &Sequence<O>, state: &R::State, whole: usize) {
        let cache: &PageList<_> = state.cache();
        let len = self.shareable(sequence).min(cache.len());
        let len = len - len % whole;
        self.prefixes.insert(&sequence.tokens[..len], &cache.pages()[..len.div_ceil(POSITIONS)]);
    }
}

/// What comes after a token.
enum Next {
    /// Another.
    Goes,
    /// Nothing; `None`: nobody wants more.
    Ends(Option<Finish>),
}

/// Picks a token from its logits and gives it to the output.
fn next_token<O: Output>(sequence: &mut Sequence<O>, logits: &[f32], context: usize) -> Result<Next, Error> {
    let token = sequence.sampler.sample(logits, &sequence.tokens)?;
    sequence.output.scored(token, logits);
    sequence.tokens.push(token);
    sequence.guesses.push(token);
    if sequence.end_tokens.contains(&token) {
        return Ok(Next::Ends(Some(Finish::End(token))));
    }
    let flow = sequence.output.token(token)?;
    Ok(if flow.is_break() {
        Next::Ends(Some(Finish::Output))
    } else if sequence.sampler.complete() {
        Next::Ends(Some(Finish::Complete))
    } else if sequence.left(context) == 0 {
        Next::Ends(Some(sequence.cut()))
    } else if !sequence.output.wanted() {
        Next::Ends(None)
    } else {
        Next::Goes
    })
}

/// Tells the output the logits of those tokens of the prompt that follow the first `run` rows of
/// the last step, those of the first state.
fn score<R: Runtime, O: Output>(
    model: &R,
    work: &mut R::Work,
    states: &mut [R::State],
    sequence: &mut Sequence<O>,
    run: usize,
    logits: &mut Vec<f32>,
) -> Result<(), Error> {
    let (vocab, first) = (model.config().vocab_size, states[0].cache().len() - run);
    for start in (0..run).step_by(SCORED) {
        let rows = start..run.min(start + SCORED);
        let (at, end) = (first + rows.start, first + rows.end);
        if at.max(sequence.scored) + 1 >= sequence.prompt || end <= sequence.scored {
            continue;
        }
        model.logits(work, states, rows, logits)?;
        for (row, logits) in (at..).zip(logits.chunks(vocab)) {
            if row == sequence.scored && row + 1 < sequence.prompt {
                sequence.output.scored(sequence.tokens[row + 1], logits);
                sequence.scored += 1;
            }
        }
    }
    Ok(())
}

/// Tells the output the hidden states of those tokens of the prompt that are among the first `run`
/// rows of the last step.
fn show<R: Runtime, O: Output>(
    model: &R,
    work: &mut R::Work,
    state: &R::State,
    sequence: &mut Sequence<O>,
    run: usize,
) -> Result<(), Error> {
    let end = state.cache().len();
    let (first, until) = (end - run, end.min(sequence.prompt));
    let from = sequence.shown.max(first);
    if from < until {
        let mut rows = Vec::new();
        model.hidden(work, from - first..until - first, &mut rows)?;
        sequence.output.hidden(&rows);
        sequence.shown = until;
    }
    Ok(())
}

/// Sets what the next step of a sequence reads. Returns whether that is something else than before,
/// and how many tokens from there on are run alike.
fn set_precision<R: Runtime, O>(
    model: &R,
    scheduler: Option<&Scheduler>,
    sequence: &mut Sequence<O>,
    state: &mut R::State,
) -> (bool, usize) {
    let (held, prompt) = (state.cache().len(), sequence.prompt);
    if let (Some(scheduler), None, true) = (scheduler, &sequence.schedule, held >= prompt) {
        let cached = |layer| model.features(state, layer, prompt).unwrap_or_default();
        sequence.schedule = Some(scheduler.schedule(cached));
    }
    let (phase, alike) = sequence.phase(held);
    let read = match (phase, &sequence.schedule) {
        (Phase::Prefill, _) => scheduler.map(Scheduler::prefill),
        (Phase::Decode(_), schedule) => schedule.as_ref().map(|s| s.precision(phase)),
    };
    let precision = read.map_or(state.precision(), Precision::at_most);
    let other = precision != state.precision();
    state.set_precision(precision);
    (other, alike)
}
