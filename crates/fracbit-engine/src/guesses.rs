//! Drafts that a nested model makes itself, with fewer planes than the step that checks them
//! (self-speculative decoding; Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168, there by
//! leaving out layers).

use std::time::Instant;

use fracbit_base::Rate;
use fracbit_model::{Cached, Error, Precision, Runtime, Sampler};

use crate::draft::{Drafter, MOST, Pace};

/// What runs drafts: a model, what steps work in, and one sequence.
pub(crate) type Draws<'a, R> = (&'a R, &'a mut <R as Runtime>::Work, &'a mut <R as Runtime>::State);

/// How a nested model drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft {
    /// What drafts read; a step that reads no more is not drafted for. `None`: at most half the
    /// bits of the step that checks them, and always the base.
    pub precision: Option<Precision>,
    /// Tokens of a draft, up to 7; `None`: as many as pay, by measured times and by how many were
    /// right.
    pub length: Option<usize>,
}

/// Guesses of what follows a text: from what it repeats, or else from the model itself, where it
/// may draft. A step runs the last token and the guesses behind it; whether a guess is right shows
/// when the token of its place is picked.
#[derive(Debug)]
pub(crate) struct Guesses {
    repeated: Drafter,
    own: Option<SelfDrafter>,
    /// The last token and the guesses behind it.
    run: Vec<u32>,
    /// Whether the guesses are the model's own.
    drafted: bool,
}

impl Guesses {
    /// Guesses for `text`, whose next tokens `sampler` picks.
    #[must_use]
    pub(crate) fn new(text: Vec<u32>, draft: Option<Draft>, sampler: &Sampler) -> Self {
        Self {
            repeated: Drafter::new(text),
            own: draft.map(|draft| SelfDrafter::new(draft, sampler)),
            run: Vec::with_capacity(1 + MOST),
            drafted: false,
        }
    }

    /// Room for so many tokens more.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.repeated.reserve(tokens);
    }

    /// The text goes on with `token`.
    pub(crate) fn push(&mut self, token: u32) {
        self.repeated.push(token);
    }

    /// Steps read something else from now on.
    pub(crate) fn forget_times(&mut self) {
        if let Some(own) = &mut self.own {
            own.forget_times();
        }
    }

    /// The last token of `tokens`, which `state` does not hold yet, and at most `most` guesses of
    /// what follows it, none of which the sampler's constraint bars.
    ///
    /// # Errors
    /// As for [`Runtime::step`] and [`Sampler::sample`].
    pub(crate) fn make<R: Runtime>(
        &mut self,
        runs: Draws<'_, R>,
        sampler: &mut Sampler,
        tokens: &mut Vec<u32>,
        most: usize,
    ) -> Result<&[u32], Error> {
        let vocab = runs.0.config().vocab_size;
        self.run.clear();
        self.run.extend(tokens.last());
        self.run.extend(self.repeated.draft(most).take_while(|&token| (token as usize) < vocab));
        self.run.truncate(1 + sampler.valid(&self.run[1..]));
        self.drafted = self.run.len() == 1;
        if let Some(own) = self.own.as_mut().filter(|_| self.drafted) {
            own.draft(runs, sampler, tokens, most, &mut self.run)?;
        }
        Ok(&self.run)
    }

    /// The step that runs them is done.
    pub(crate) fn ran(&mut self) {
        if let Some(own) = &mut self.own {
            own.ran();
        }
    }

    /// `token` was picked for the place `row` behind the last token, from 1 on: whether it was
    /// guessed.
    pub(crate) fn judge(&mut self, row: usize, token: u32) -> bool {
        let Some(&guess) = self.run.get(row) else { return false };
        if let Some(own) = self.own.as_mut().filter(|_| self.drafted) {
            own.judge(guess == token);
        }
        guess == token
    }
}

/// Drafts of one text. Which tokens come depends on nothing here: a draft is only a guess of what
/// the step that checks it will say.
#[derive(Debug)]
struct SelfDrafter {
    draft: Draft,
    /// Bits of all planes, once they were asked for.
    whole: Option<Rate>,
    /// Picks the tokens of a draft, with the random numbers that come next.
    sampler: Sampler,
    pace: Pace,
    /// When the step that checks a draft began, and how many tokens it checks.
    running: Option<(Instant, usize)>,
    logits: Vec<f32>,
}

impl SelfDrafter {
    fn new(draft: Draft, sampler: &Sampler) -> Self {
        let (sampler, pace) = (sampler.clone(), Pace::default());
        Self { draft, whole: None, sampler, pace, running: None, logits: Vec::new() }
    }

    fn forget_times(&mut self) {
        self.pace.forget_times();
    }

    /// At most half the bits of steps that read `full`.
    fn half<R: Runtime>(&mut self, model: &R, full: Precision) -> Precision {
        let most = || model.precisions().last().copied().unwrap_or(Rate::quarter_bits(0));
        let whole = *self.whole.get_or_insert_with(most);
        let read = full.rate().map_or(whole, |most| most.min(whole));
        Precision::at_most(Rate::from_bits(read.bits() / 2.0).expect("less than a rate"))
    }

    /// Appends to `run`, which holds the last token of `text`, what the draft's planes would say
    /// next: at most `most` tokens. `state` holds the text but its last token, and does so
    /// afterwards; the step that checks the draft writes these places of the cache anew.
    fn draft<R: Runtime>(
        &mut self,
        (model, work, state): Draws<'_, R>,
        sampler: &Sampler,
        text: &mut Vec<u32>,
        most: usize,
        run: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let full = state.precision();
        let precision = self.draft.precision.unwrap_or_else(|| self.half(model, full));
        if model.weight_bytes_at(precision) >= model.weight_bytes_at(full) {
            return Ok(());
        }
        let length = self.draft.length.unwrap_or_else(|| self.pace.length()).min(most).min(MOST);
        let (held, known) = (state.cache().len(), text.len());
        self.sampler.follow(sampler);
        state.set_precision(precision);
        let mut step = || {
            if self.sampler.complete() {
                return Ok(());
            }
            let start = Instant::now();
            let states = std::slice::from_mut(&mut *state);
            model.step(work, states, &text[text.len() - 1..], &[1])?;
            model.logits(work, states, 0..1, &mut self.logits)?;
            let token = self.sampler.sample(&self.logits, text)?;
            self.pace.drafted(start.elapsed());
            run.push(token);
            text.push(token);
            Ok(())
        };
        let drafted = (0..length).try_for_each(|_| step());
        text.truncate(known);
        state.cache_mut().truncate(held);
        state.set_precision(full);
        self.running = Some((Instant::now(), run.len() - 1));
        drafted
    }

    /// The step that checks the draft is done.
    fn ran(&mut self) {
        if let Some((start, guesses)) = self.running.take() {
            self.pace.ran(guesses, start.elapsed());
        }
    }

    /// The next token of the draft was right or not.
    fn judge(&mut self, right: bool) {
        self.pace.judge(right);
    }
}
