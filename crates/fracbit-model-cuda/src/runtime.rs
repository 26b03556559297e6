//! A model on a device as an engine sees it.

use crate::{
    Error,
    cache::{DeviceMemory, DeviceSequence},
    graph::{DeviceWork, MAX_ROWS},
    model::DeviceModel,
};
use fracbit_base::Rate;
use fracbit_io::ModelConfig;
use fracbit_kernels_cuda::{
    Device,
    ops::{Cache, Rows, Step},
};
use fracbit_model::{Error as ModelError, KvType, PagePool, Precision, Runtime, StateOptions};
use fracbit_schedule::{Features, Scheduler};
use std::{collections::BTreeSet, ops::Range};

/// What steps work in, and steps of one token a sequence as they were recorded.
#[derive(Debug)]
pub struct EngineWork<'d, D: Device> {
    work: DeviceWork<'d, D>,
    /// For 1, 2 and so on sequences over pages of one pool.
    recorded: Vec<Option<D::Graph>>,
    pool: Option<PagePool<DeviceMemory<'d, D>>>,
    /// Whether the rows of the last step lie in `kept`.
    kept: bool,
    /// Logits of [`step_together`](Runtime::step_together).
    logits: Vec<f32>,
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// One token of each of at most [`MAX_ROWS`] sequences; logits are then on the device.
    fn decode(
        &self,
        work: &mut EngineWork<'d, D>,
        states: &mut [DeviceSequence<'d, D>],
        tokens: &[u32],
    ) -> Result<(), Error> {
        let Some(first) = states.first() else { return Ok(()) };
        let pool = first.list.pool().clone();
        if work.pool.as_ref().is_none_or(|other| !other.is_same(&pool)) {
            work.recorded.clear();
            work.pool = Some(pool.clone());
        }
        let positions: Vec<usize> = states.iter().map(|state| state.list.len()).collect();
        let tables: Vec<Vec<u32>> = states.iter().map(DeviceSequence::table).collect();
        work.work.step.write(&[Step::new(&positions, tokens)])?;
        work.work.tables.write(&tables.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let count = states.len();
        if work.recorded.len() < count {
            work.recorded.resize_with(count, || None);
        }
        let slot = &mut work.recorded[count - 1];
        let graph = match slot {
            Some(graph) => graph,
            None => {
                let (s, caches) = (&work.work, pool.memory().caches());
                slot.insert(self.device.record(&mut || {
                    self.blocks(s, caches, Rows::one_of(count), None)?;
                    self.head(s, &s.x, 0, count)
                })?)
            }
        };
        self.device.replay(graph)?;
        states.iter_mut().for_each(|state| state.list.advance(1));
        Ok(())
    }

    fn admit(&self, state: &mut DeviceSequence<'d, D>, tokens: &[u32]) -> Result<(), ModelError> {
        self.check(state.list.len(), state.list.capacity(), tokens)?;
        state.list.reserve(tokens.len())
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
        if kind != KvType::I16 {
            return Err(Error::Kind(kind).into());
        }
        let shape = self.attention_shape(0);
        let most = Cache::<D>::most_pages(&shape);
        if pages > most {
            return Err(Error::Pages { pages, most }.into());
        }
        Ok(self.pool_of(shape, pages)?)
    }

    fn work(&self, context: usize) -> Result<EngineWork<'d, D>, ModelError> {
        let work = self.work_for(context).map_err(Error::from)?;
        Ok(EngineWork { work, recorded: Vec::new(), pool: None, kept: false, logits: Vec::new() })
    }

    fn sequence(
        &self,
        pool: &PagePool<DeviceMemory<'d, D>>,
        options: &StateOptions,
    ) -> DeviceSequence<'d, D> {
        let capacity = options.context.unwrap_or(self.config.max_position_embeddings);
        DeviceSequence::new(pool.clone(), capacity, Self::together(capacity))
    }

    fn step(
        &self,
        work: &mut EngineWork<'d, D>,
        state: &mut DeviceSequence<'d, D>,
        tokens: &[u32],
    ) -> Result<(), ModelError> {
        self.admit(state, tokens)?;
        work.kept = false;
        if tokens.len() == 1 {
            return Ok(self.decode(work, std::slice::from_mut(state), tokens)?);
        }
        let s = &work.work;
        s.tables.write(&[&state.table()]).map_err(Error::from)?;
        let mut done = 0;
        while done < tokens.len() {
            let next = &tokens[done..][..s.pass(tokens.len() - done)];
            self.pass(s, state, next)?;
            // Passes write their rows over those of the pass before.
            work.kept = next.len() < tokens.len();
            if work.kept {
                let width = 4 * self.config.hidden_size;
                let to = s.kept.at() + (done * width) as u64;
                self.device.copy(s.x.at(), to, next.len() * width).map_err(Error::from)?;
            }
            done += next.len();
        }
        Ok(())
    }

    fn step_together(
        &self,
        work: &mut EngineWork<'d, D>,
        states: &mut [DeviceSequence<'d, D>],
        tokens: &[u32],
    ) -> Result<(), ModelError> {
        for (state, token) in states.iter_mut().zip(tokens) {
            self.admit(state, std::slice::from_ref(token))?;
        }
        work.kept = false;
        work.logits.clear();
        for (states, tokens) in states.chunks_mut(MAX_ROWS).zip(tokens.chunks(MAX_ROWS)) {
            self.decode(work, states, tokens)?;
            let count = states.len() * self.config.vocab_size;
            work.logits.extend(work.work.logits.read::<f32>(count).map_err(Error::from)?);
        }
        Ok(())
    }

    fn logits(
        &self,
        work: &mut EngineWork<'d, D>,
        _: &mut DeviceSequence<'d, D>,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let s = &work.work;
        let x = if work.kept { &s.kept } else { &s.x };
        out.clear();
        for first in rows.clone().step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(rows.end - first);
            self.head(s, x, first, count).map_err(Error::from)?;
            out.extend(s.logits.read::<f32>(count * self.config.vocab_size).map_err(Error::from)?);
        }
        Ok(())
    }

    fn logits_together(
        &self,
        work: &mut EngineWork<'d, D>,
        _: &mut [DeviceSequence<'d, D>],
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        std::mem::swap(out, &mut work.logits);
        Ok(())
    }

    fn weight_bytes_at(&self, _: Precision) -> usize {
        self.step_bytes()
    }

    fn precisions(&self) -> BTreeSet<Rate> {
        BTreeSet::new()
    }

    fn bits_at(&self, _: Precision) -> f64 {
        self.step_bits()
    }

    fn check_scheduler(&self, _: &Scheduler) -> Result<(), ModelError> {
        Err(Error::Nested.into())
    }

    fn features(&self, _: &DeviceSequence<'d, D>, _: usize, _: usize) -> Option<Features> {
        None
    }
}
