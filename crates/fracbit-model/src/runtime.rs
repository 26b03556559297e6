//! What sequences run on: a model and its cache, on whatever device.
//!
//! Whoever schedules sequences ([`crate::generate`], `fracbit-engine`) knows a [`Runtime`] and no
//! device. A step runs some tokens of each of several sequences: the next of a prompt beside one of
//! every text that is being written. Its rows, one sequence's behind those of the other, wait in
//! [`Runtime::Work`] until logits of some of them are asked for.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::Range;

use fracbit_base::{Rate, ShapeError};
use fracbit_io::ModelConfig;
use fracbit_kernels::Precision;
use fracbit_schedule::{Features, Scheduler};

use crate::pages::{HostMemory, PageList, PageMemory, PagePool};
use crate::sample::Sampler;
use crate::state::{State, StateOptions};
use crate::{Error, KvPool, KvType, Model};

/// One sequence in a cache.
pub trait Cached: Debug + Send {
    /// Where its pages are.
    type Memory: PageMemory;

    /// Its pages.
    fn cache(&self) -> &PageList<Self::Memory>;

    /// Its pages, to be shared or cut.
    fn cache_mut(&mut self) -> &mut PageList<Self::Memory>;

    /// Takes pages for `tokens` more, and whatever else running them needs; as
    /// [`PageList::reserve`].
    ///
    /// # Errors
    /// [`Error::CacheFull`], [`Error::Memory`], [`Error::Device`].
    fn reserve(&mut self, tokens: usize) -> Result<(), Error>;

    /// Most tokens of a step.
    fn chunk(&self) -> usize;

    /// What tokens read of nested weights.
    fn precision(&self) -> Precision;

    /// What the next tokens read of nested weights; the cache stays as it is.
    fn set_precision(&mut self, precision: Precision);
}

/// A model with a cache on some device.
pub trait Runtime: Debug + Sync {
    /// Where pages are.
    type Memory: PageMemory;
    /// One sequence.
    type State: Cached<Memory = Self::Memory>;
    /// What steps work in, and the rows of the last one.
    type Work: Debug + Send;

    /// What the model is.
    fn config(&self) -> &ModelConfig;

    /// Whether a row's numbers depend neither on its neighbours nor on how a prompt is cut, to the
    /// last bit; otherwise they do so in their rounding, and nothing is guessed ahead, since
    /// guesses should change no text.
    fn exact(&self) -> bool {
        true
    }

    /// A cache of `pages` pages.
    ///
    /// # Errors
    /// [`Error::Device`] where the device has no room or no such element type.
    fn pool(&self, kind: KvType, pages: usize) -> Result<PagePool<Self::Memory>, Error>;

    /// Work space of steps of sequences of up to `context` tokens.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn work(&self, context: usize) -> Result<Self::Work, Error>;

    /// An empty sequence.
    fn sequence(&self, pool: &PagePool<Self::Memory>, options: &StateOptions) -> Self::State;

    /// Runs tokens behind those of some sequences, of each as many as `counts` says, at least one:
    /// of one alone at most [`Cached::chunk`], of several as many together. `tokens` has those of
    /// one sequence after those of the other.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], [`Error::CacheFull`], [`Error::Memory`],
    /// [`Error::Shape`], [`Error::Device`].
    fn step(
        &self,
        work: &mut Self::Work,
        states: &mut [Self::State],
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), Error>;

    /// Fills `out` with logits of rows of the last [`step`](Self::step), (rows, vocabulary).
    /// `states` are those of that step, in its order.
    ///
    /// # Errors
    /// [`Error::Shape`] for rows that it did not have, [`Error::Device`].
    fn logits(
        &self,
        work: &mut Self::Work,
        states: &mut [Self::State],
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), Error>;

    /// Whether [`hidden`](Self::hidden) can be asked for.
    ///
    /// # Errors
    /// [`Error::Hidden`] why not.
    fn check_hidden(&self) -> Result<(), Error> {
        Err(Error::Hidden("models on this device do not give them; they do on the processor"))
    }

    /// Fills `out` with the final hidden states of rows of the last [`step`](Self::step), behind
    /// the final norm and in the basis of the model's checkpoint: (rows, hidden).
    ///
    /// # Errors
    /// As for [`check_hidden`](Self::check_hidden).
    fn hidden(&self, work: &mut Self::Work, rows: Range<usize>, out: &mut Vec<f32>) -> Result<(), Error> {
        let _ = (work, rows, out);
        self.check_hidden()
    }

    /// Bytes of weights that a step reads at a precision.
    fn weight_bytes_at(&self, precision: Precision) -> usize;

    /// Rates at which the model can be read beside all of it: none but of a nested one.
    fn precisions(&self) -> BTreeSet<Rate>;

    /// Mean bits of a weight that a step reads at a precision.
    fn bits_at(&self, precision: Precision) -> f64;

    /// Whether a scheduler is for this model.
    ///
    /// # Errors
    /// [`Error::Schedule`] when it was learned for another.
    fn check_scheduler(&self, scheduler: &Scheduler) -> Result<(), Error>;

    /// Keys and values of the first `tokens` of a sequence in a layer, for a learned scheduler;
    /// `None` where there is none.
    fn features(&self, state: &Self::State, layer: usize, tokens: usize) -> Option<Features>;

    /// Makes a sampler use what the device has for it.
    fn prepare_sampler(&self, sampler: &mut Sampler) {
        let _ = sampler;
    }
}

/// The tokens of each sequence of a step, for whoever implements [`Runtime::step`].
///
/// # Errors
/// When there is no sequence, one has no token, or `counts` are not those of so many sequences and
/// these tokens.
pub fn tokens_of_each<'a>(
    op: &'static str,
    sequences: usize,
    tokens: &'a [u32],
    counts: &'a [usize],
) -> Result<impl Iterator<Item = &'a [u32]>, ShapeError> {
    if sequences == 0 {
        return Err(ShapeError::new(op, "states", "at least one", 0));
    }
    ShapeError::check_len(op, "counts", sequences, counts.len())?;
    if counts.contains(&0) {
        return Err(ShapeError::new(op, "count", "at least one", 0));
    }
    ShapeError::check_len(op, "tokens", counts.iter().sum(), tokens.len())?;
    let mut rest = tokens;
    Ok(counts.iter().map(move |&count| {
        let (these, others) = rest.split_at(count);
        rest = others;
        these
    }))
}

impl Cached for State {
    type Memory = HostMemory;

    fn cache(&self) -> &PageList<HostMemory> {
        self.list()
    }

    fn cache_mut(&mut self) -> &mut PageList<HostMemory> {
        self.list_mut()
    }

    fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        State::reserve(self, tokens)
    }

    fn chunk(&self) -> usize {
        State::chunk(self)
    }

    fn precision(&self) -> Precision {
        State::precision(self)
    }

    fn set_precision(&mut self, precision: Precision) {
        State::set_precision(self, precision);
    }
}

impl Runtime for Model {
    type Memory = HostMemory;
    type State = State;
    /// Normalized final hidden states, (rows, hidden).
    type Work = Vec<f32>;

    fn config(&self) -> &ModelConfig {
        Model::config(self)
    }

    fn pool(&self, kind: KvType, pages: usize) -> Result<KvPool, Error> {
        Ok(KvPool::new(Model::config(self), kind, pages))
    }

    fn work(&self, _: usize) -> Result<Vec<f32>, Error> {
        Ok(Vec::new())
    }

    fn sequence(&self, pool: &KvPool, options: &StateOptions) -> State {
        self.state_in(pool, options)
    }

    fn step(
        &self,
        work: &mut Vec<f32>,
        states: &mut [State],
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), Error> {
        self.forward_batch(states, tokens, counts, work)
    }

    fn logits(
        &self,
        work: &mut Vec<f32>,
        states: &mut [State],
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let width = Model::config(self).hidden_size;
        let hidden = work.get(rows.start * width..rows.end * width).unwrap_or_default();
        self.logits_batch(states, rows, hidden, out)
    }

    fn check_hidden(&self) -> Result<(), Error> {
        self.check_leave()
    }

    fn hidden(&self, work: &mut Vec<f32>, rows: Range<usize>, out: &mut Vec<f32>) -> Result<(), Error> {
        let width = Model::config(self).hidden_size;
        out.clear();
        out.extend_from_slice(&work[rows.start * width..rows.end * width]);
        self.leave(out)
    }

    fn weight_bytes_at(&self, precision: Precision) -> usize {
        Model::weight_bytes_at(self, precision)
    }

    fn precisions(&self) -> BTreeSet<Rate> {
        Model::precisions(self)
    }

    fn bits_at(&self, precision: Precision) -> f64 {
        Model::bits_at(self, precision)
    }

    fn check_scheduler(&self, scheduler: &Scheduler) -> Result<(), Error> {
        Model::check_scheduler(self, scheduler)
    }

    fn features(&self, state: &State, layer: usize, tokens: usize) -> Option<Features> {
        self.cached(state, layer, tokens)
    }

    fn prepare_sampler(&self, sampler: &mut Sampler) {
        sampler.use_kernels_of(self);
    }
}
