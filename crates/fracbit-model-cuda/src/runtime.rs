//! A model on a device as an engine sees it.

use crate::{
    Error,
    cache::{DeviceMemory, DeviceSequence, cache_type},
    graph::{DeviceWork, MAX_ROWS, Products},
    model::DeviceModel,
};
use fracbit_base::{Rate, Scheme};
use fracbit_io::ModelConfig;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceMatrix,
    ops::{Cache, Step, StepRows},
};
use fracbit_model::{
    Error as ModelError, KvType, PagePool, Precision, Runtime, StateOptions, tokens_of_each,
};
use fracbit_schedule::{Features, Scheduler};
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    ops::Range,
};

/// What steps work in, and steps of one token a sequence as they were recorded.
#[derive(Debug)]
pub struct EngineWork<'d, D: Device> {
    work: DeviceWork<'d, D>,
    /// By bits of nested weights and number of sequences, over pages of one pool.
    recorded: BTreeMap<(Option<Rate>, usize), D::Graph>,
    pool: Option<PagePool<DeviceMemory<'d, D>>>,
    /// Rows of steps that take several passes, (rows, hidden), and how many it has room for.
    kept: Option<(Buffer<'d, D>, usize)>,
    last: Last,
    /// Logits of a step of one token a sequence.
    logits: Vec<f32>,
}

/// Where the rows of the last step are.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// One token of each sequence: their logits are on the host.
    Logits,
    /// One pass: where passes work.
    Pass,
    /// Kept.
    Kept,
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// One token of each of at most [`MAX_ROWS`] sequences of one precision; logits are then on the
    /// device.
    fn decode(
        &self,
        work: &mut EngineWork<'d, D>,
        states: &mut [DeviceSequence<'d, D>],
        tokens: &[u32],
    ) -> Result<(), Error> {
        let Some(first) = states.first() else { return Ok(()) };
        let (pool, precision) = (first.list.pool().clone(), first.precision);
        if work.pool.as_ref().is_none_or(|other| !other.is_same(&pool)) {
            work.recorded.clear();
            work.pool = Some(pool.clone());
        }
        let positions: Vec<usize> = states.iter().map(|state| state.list.len()).collect();
        let tables: Vec<Vec<u32>> = states.iter().map(DeviceSequence::table).collect();
        work.work.step.write(&[Step::new(&positions, tokens)])?;
        work.work.tables.write(&tables.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let count = states.len();
        let (s, memory) = (&work.work, pool.memory());
        self.find_angles(s, memory.kind())?;
        let mut launch = || {
            self.blocks(s, memory, StepRows::one_of(count), &Products::few(precision))?;
            self.head(s, &s.x, (0, count), precision)
        };
        if self.recordable() {
            let graph = match work.recorded.entry((precision.rate(), count)) {
                Entry::Occupied(graph) => graph.into_mut(),
                Entry::Vacant(slot) => slot.insert(self.device.record(&mut launch)?),
            };
            self.device.replay(graph)?;
        } else {
            launch()?;
        }
        states.iter_mut().for_each(|state| state.list.advance(1));
        Ok(())
    }

    /// Keeps the first `count` rows of the last pass as rows `first..` of the step.
    fn keep(&self, work: &EngineWork<'d, D>, first: usize, count: usize) -> Result<(), Error> {
        let Some((kept, _)) = &work.kept else { return Ok(()) };
        let width = 4 * self.config.hidden_size;
        Ok(self.device.copy(work.work.x.at(), kept.at() + (first * width) as u64, count * width)?)
    }
}

impl<'d, D: Device> Runtime for DeviceModel<'d, D> {
    type Memory = DeviceMemory<'d, D>;
    type State = DeviceSequence<'d, D>;
    type Work = EngineWork<'d, D>;

    fn config(&self) -> &ModelConfig {
        DeviceModel::config(self)
    }

    fn exact(&self) -> bool {
        false
    }

    fn pool(&self, kind: KvType, pages: usize) -> Result<PagePool<DeviceMemory<'d, D>>, ModelError> {
        let kind = cache_type(kind, &self.config)?;
        let shape = self.attention_shape(0);
        let most = Cache::<D>::most_pages(&shape);
        if pages > most {
            return Err(Error::Pages { pages, most }.into());
        }
        Ok(self.pool_of(shape, kind, pages)?)
    }

    fn work(&self, context: usize) -> Result<EngineWork<'d, D>, ModelError> {
        let work = self.work_for(context).map_err(Error::from)?;
        let logits = Vec::new();
        Ok(EngineWork { work, recorded: BTreeMap::new(), pool: None, kept: None, last: Last::Logits, logits })
    }

    fn sequence(
        &self,
        pool: &PagePool<DeviceMemory<'d, D>>,
        options: &StateOptions,
    ) -> DeviceSequence<'d, D> {
        let capacity = options.context.unwrap_or(self.config.max_position_embeddings);
        DeviceSequence::new(pool.clone(), capacity, Self::together(capacity))
    }

    /// Sequences with one token, neighbours of one another and of one precision, go together; those
    /// with several go one by one.
    fn step(
        &self,
        work: &mut EngineWork<'d, D>,
        states: &mut [DeviceSequence<'d, D>],
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<(), ModelError> {
        let each = tokens_of_each("a step on a device", states.len(), tokens, counts)?;
        for (state, tokens) in states.iter_mut().zip(each) {
            self.check(state.list.len(), state.list.capacity(), tokens)?;
            state.list.reserve(tokens.len())?;
            state.rows = tokens.len();
        }
        work.logits.clear();
        if counts.iter().all(|&count| count == 1) {
            work.last = Last::Logits;
            let mut tokens = tokens;
            for states in states.chunk_by_mut(alike).flat_map(|states| states.chunks_mut(MAX_ROWS)) {
                let (these, others) = tokens.split_at(states.len());
                self.decode(work, states, these)?;
                let count = states.len() * self.config.vocab_size;
                work.logits.extend(work.work.logits.read::<f32>(count).map_err(Error::from)?);
                tokens = others;
            }
            return Ok(());
        }
        work.last = Last::Pass;
        if states.len() > 1 || work.work.pass(tokens.len()) < tokens.len() {
            work.last = Last::Kept;
            if work.kept.as_ref().is_none_or(|&(_, room)| room < tokens.len()) {
                let bytes = 4 * tokens.len() * self.config.hidden_size;
                work.kept = None;
                let room = Buffer::room(self.device, bytes, "rows of a step").map_err(Error::from)?;
                work.kept = Some((room, tokens.len()));
            }
        }
        let (mut at, mut first) = (0, 0);
        while at < states.len() {
            let one = |state: &DeviceSequence<'d, D>| state.rows == 1 && alike(state, &states[at]);
            let ones = states[at..].iter().take_while(|state| one(state)).count().min(MAX_ROWS);
            if ones > 0 {
                self.decode(work, &mut states[at..at + ones], &tokens[first..first + ones])?;
                self.keep(work, first, ones)?;
                (at, first) = (at + ones, first + ones);
                continue;
            }
            let (state, end) = (&mut states[at], first + counts[at]);
            work.work.tables.write(&[&state.table()]).map_err(Error::from)?;
            while first < end {
                let next = &tokens[first..end][..work.work.pass(end - first)];
                self.pass(&work.work, state, next)?;
                if matches!(work.last, Last::Kept) {
                    self.keep(work, first, next.len())?;
                }
                first += next.len();
            }
            at += 1;
        }
        Ok(())
    }

    fn logits(
        &self,
        work: &mut EngineWork<'d, D>,
        states: &mut [DeviceSequence<'d, D>],
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let vocab = self.config.vocab_size;
        out.clear();
        let x = match (work.last, &work.kept) {
            (Last::Logits, _) => {
                out.extend_from_slice(&work.logits[rows.start * vocab..rows.end * vocab]);
                return Ok(());
            }
            (Last::Kept, Some((kept, _))) => kept,
            _ => &work.work.x,
        };
        let (s, mut before) = (&work.work, 0);
        for states in states.chunk_by(alike) {
            let end = before + states.iter().map(|state| state.rows).sum::<usize>();
            let these = rows.start.max(before)..rows.end.min(end);
            before = end;
            for first in these.clone().step_by(MAX_ROWS) {
                let count = MAX_ROWS.min(these.end - first);
                self.head(s, x, (first, count), states[0].precision).map_err(Error::from)?;
                out.extend(s.logits.read::<f32>(count * vocab).map_err(Error::from)?);
            }
        }
        Ok(())
    }

    fn weight_bytes_at(&self, precision: Precision) -> usize {
        self.step_bytes(precision)
    }

    fn precisions(&self) -> BTreeSet<Rate> {
        let schemes = self.packed().map(DeviceMatrix::scheme);
        schemes.filter(|scheme| scheme.nested()).flat_map(Scheme::precisions).collect()
    }

    fn bits_at(&self, precision: Precision) -> f64 {
        self.step_bits(precision)
    }

    fn check_scheduler(&self, scheduler: &Scheduler) -> Result<(), ModelError> {
        let ModelConfig { num_key_value_heads: heads, head_dim, .. } = self.config;
        match scheduler {
            Scheduler::Static(_) => Ok(()),
            Scheduler::Learned(of) => Ok(of.check(self.config.num_hidden_layers(), heads, head_dim)?),
        }
    }

    fn features(&self, state: &DeviceSequence<'d, D>, layer: usize, tokens: usize) -> Option<Features> {
        // A cache that cannot be read is as good as none.
        self.cached(state, layer, tokens).ok()?
    }
}

/// Whether the next token of two sequences may go together.
fn alike<D: Device>(a: &DeviceSequence<'_, D>, b: &DeviceSequence<'_, D>) -> bool {
    a.precision == b.precision
}
