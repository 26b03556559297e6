//! Drafts that a nested model makes itself, with fewer planes than the step that checks them
//! (self-speculative decoding; Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168, there by
//! leaving out layers).

use std::time::Instant;

use fracbit_kernels::Precision;

use crate::draft::{MOST, Pace};
use crate::sample::Sampler;
use crate::state::State;
use crate::{Error, Model};

/// How a nested model drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft {
    /// What drafts read; a step that reads no more is not drafted for.
    pub precision: Precision,
    /// Tokens of a draft, up to 7; `None`: as many as pay, by measured times and by how many were
    /// right.
    pub length: Option<usize>,
}

/// Drafts of one text. Which tokens come depends on nothing here: a draft is only a guess of what
/// the step that checks it will say.
#[derive(Debug)]
pub struct SelfDrafter {
    draft: Draft,
    /// Picks the tokens of a draft, with the random numbers that come next.
    sampler: Sampler,
    pace: Pace,
    /// When the step that checks a draft began, and how many tokens it checks.
    running: Option<(Instant, usize)>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

impl SelfDrafter {
    /// Drafts for a text that `sampler` picks the tokens of.
    #[must_use]
    pub fn new(draft: Draft, sampler: &Sampler) -> Self {
        let (hidden, logits) = (Vec::new(), Vec::new());
        Self { draft, sampler: sampler.clone(), pace: Pace::default(), running: None, hidden, logits }
    }

    /// Steps read something else from now on.
    pub fn forget_times(&mut self) {
        self.pace.forget_times();
    }

    /// Appends to `run`, which holds the last token of `text`, what the draft's planes would say
    /// next: at most `most` tokens. `state` holds the text but its last token, and does so
    /// afterwards; the step that checks the draft writes these places of the cache anew.
    ///
    /// # Errors
    /// As for [`Model::forward`] and [`Sampler::sample`].
    pub fn draft(
        &mut self,
        (model, state, sampler): (&Model, &mut State, &Sampler),
        text: &mut Vec<u32>,
        most: usize,
        run: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let full = state.precision();
        if model.weight_bytes_at(self.draft.precision) >= model.weight_bytes_at(full) {
            return Ok(());
        }
        let length = self.draft.length.unwrap_or_else(|| self.pace.length()).min(most).min(MOST);
        let (held, known) = (state.len(), text.len());
        self.sampler.follow(sampler);
        state.set_precision(self.draft.precision);
        let mut step = || {
            let start = Instant::now();
            model.forward(state, &text[text.len() - 1..], &mut self.hidden)?;
            model.logits(state, &self.hidden, &mut self.logits)?;
            let token = self.sampler.sample(&self.logits, text)?;
            self.pace.drafted(start.elapsed());
            run.push(token);
            text.push(token);
            Ok(())
        };
        let drafted = (0..length).try_for_each(|_| step());
        text.truncate(known);
        state.truncate(held);
        state.set_precision(full);
        self.running = Some((Instant::now(), run.len() - 1));
        drafted
    }

    /// The step that checks the draft is done.
    pub fn ran(&mut self) {
        if let Some((start, guesses)) = self.running.take() {
            self.pace.ran(guesses, start.elapsed());
        }
    }

    /// The next token of the draft was right or not.
    pub fn judge(&mut self, right: bool) {
        self.pace.judge(right);
    }
}
