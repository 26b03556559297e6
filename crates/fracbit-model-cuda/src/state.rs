//! One sequence with everything that running it takes, for evaluation and measurements.

use crate::{
    Error,
    cache::{DeviceMemory, DeviceSequence, cache_type},
    graph::{DeviceWork, MAX_ROWS, Products},
    key_bias::KeyBiases,
    model::DeviceModel,
};
use fracbit_kernels_cuda::{
    Device, DeviceError,
    ops::{AttentionShape, CacheType, KeyAngles, KeyConstants, Step, StepRows},
};
use fracbit_model::{KeyBias, KvType, PagePool, Precision, pages::POSITIONS};
use fracbit_schedule::Features;

/// Takes logits (tokens, vocabulary).
pub type Each<'a, E> = dyn FnMut(&[f32]) -> Result<(), E> + 'a;

/// One sequence with a cache and work space of its own.
#[derive(Debug)]
pub struct DeviceState<'d, D: Device> {
    pub(crate) work: DeviceWork<'d, D>,
    pub(crate) sequence: DeviceSequence<'d, D>,
}

impl<D: Device> DeviceState<'_, D> {
    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sequence.list.len()
    }

    /// Whether nothing was run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequence.list.is_empty()
    }

    /// Most tokens.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.sequence.list.capacity()
    }

    /// Waits for everything launched for it.
    ///
    /// # Errors
    /// When a launch failed.
    pub fn wait(&self) -> Result<(), Error> {
        self.work.step.read::<u32>(1)?;
        Ok(())
    }

    /// From now on reads as much of nested weights as `precision` says; what was run stays.
    pub fn set_precision(&mut self, precision: Precision) {
        self.sequence.precision = precision;
    }

    /// Forgets all tokens but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.sequence.list.truncate(len);
    }
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// An empty sequence of at most `capacity` tokens with a cache of 16 bits, all memory taken.
    ///
    /// # Errors
    /// [`fracbit_kernels_cuda::DeviceError::Memory`].
    pub fn state(&self, capacity: usize) -> Result<DeviceState<'d, D>, Error> {
        self.state_of(capacity, KvType::I16)
    }

    /// The same with a cache of another kind.
    ///
    /// # Errors
    /// [`fracbit_kernels_cuda::DeviceError::Memory`], [`Error::Kind`] or [`Error::Heads`].
    pub fn state_of(&self, capacity: usize, kind: KvType) -> Result<DeviceState<'d, D>, Error> {
        let kind = cache_type(kind, &self.config)?;
        let work = self.work_for(capacity)?;
        let pool = self.pool_of(self.attention_shape(capacity), kind, capacity.div_ceil(POSITIONS))?;
        let mut sequence = DeviceSequence::new(pool, capacity, work.rows);
        sequence.list.reserve(capacity).map_err(|error| Error::Model(Box::new(error)))?;
        work.tables.write(&[&sequence.table()])?;
        Ok(DeviceState { work, sequence })
    }

    pub(crate) fn pool_of(
        &self,
        shape: AttentionShape,
        kind: CacheType,
        pages: usize,
    ) -> Result<PagePool<DeviceMemory<'d, D>>, Error> {
        self.find_means(kind)?;
        let layers = self.config.num_hidden_layers();
        Ok(PagePool::of(DeviceMemory::new(self.device, shape, kind, layers, pages)?, pages))
    }

    /// Checks that `tokens` may follow `len` others.
    pub(crate) fn check(&self, len: usize, capacity: usize, tokens: &[u32]) -> Result<(), Error> {
        let vocabulary = self.config.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        let got = tokens.len();
        if len + got > capacity {
            return Err(Error::ContextFull { capacity, len, got });
        }
        Ok(())
    }

    /// Runs `tokens` after those in `state`; `each` gets the logits (tokens, vocabulary) of some of
    /// them at a time, in order.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`], or what `each` returns.
    pub fn run<E: From<Error>>(
        &self,
        state: &mut DeviceState<'d, D>,
        tokens: &[u32],
        mut each: Option<&mut Each<'_, E>>,
    ) -> Result<(), E> {
        self.check(state.len(), state.capacity(), tokens)?;
        let DeviceState { work, sequence } = state;
        let mut rest = tokens;
        while !rest.is_empty() {
            let (chunk, behind) = rest.split_at(work.pass(rest.len()));
            rest = behind;
            self.pass(work, sequence, chunk)?;
            let Some(each) = each.as_mut() else { continue };
            for first in (0..chunk.len()).step_by(MAX_ROWS) {
                let rows = MAX_ROWS.min(chunk.len() - first);
                self.head(work, &work.x, (first, rows), sequence.precision).map_err(Error::Device)?;
                each(&work.logits.read(rows * self.config.vocab_size).map_err(Error::Device)?)?;
            }
        }
        Ok(())
    }

    /// Runs as many tokens of one sequence as go together, whose pages stand in the first table.
    pub(crate) fn pass(
        &self,
        work: &DeviceWork<'d, D>,
        sequence: &mut DeviceSequence<'d, D>,
        tokens: &[u32],
    ) -> Result<(), Error> {
        work.step.write(&[Step::new(&[sequence.list.len()], tokens)])?;
        let many = work.dense.as_ref().filter(|_| tokens.len() >= work.from);
        let products = Products { many, bits: sequence.precision.rate() };
        let memory = sequence.list.pool().memory();
        self.find_angles(work, memory.kind())?;
        self.blocks(work, memory, StepRows::of_one(tokens.len()), &products)?;
        sequence.list.advance(tokens.len());
        Ok(())
    }
}

impl<D: Device> DeviceWork<'_, D> {
    /// How many of `left` tokens run together.
    pub(crate) fn pass(&self, left: usize) -> usize {
        let many = self.dense.is_some() && left >= self.from;
        left.min(if many { self.rows } else { MAX_ROWS })
    }
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// What caches of a kind do about large constants of keys; means are there once
    /// [`DeviceModel::find_means`] was called.
    fn key_biases(&self, kind: CacheType) -> Option<&KeyBiases<'d, D>> {
        if !kind.codes() {
            return None;
        }
        if self.config.qkv_bias {
            return Some(&self.key_biases);
        }
        if kind == CacheType::Four { self.key_means.get() } else { None }
    }

    /// Runs the model for the means of its keys, where caches of a kind go without these; the first
    /// time only.
    pub(crate) fn find_means(&self, kind: CacheType) -> Result<(), Error> {
        if kind != CacheType::Four || self.config.qkv_bias || self.key_means.get().is_some() {
            return Ok(());
        }
        let tokens = KeyBias::mean_tokens(&self.config);
        let mut state = self.state_of(tokens.len(), KvType::I16)?;
        self.run::<Error>(&mut state, &tokens, None)?;
        let of = |layer: usize| {
            let features = state.sequence.features(self.device, layer, tokens.len())?;
            Ok(features.and_then(|of| KeyBias::of_mean(&self.config, layer, state.capacity(), &of.keys)))
        };
        let layers = (0..self.layers.len()).map(of).collect::<Result<_, DeviceError>>()?;
        // Another thread may have found the same.
        drop(self.key_means.set(KeyBiases::new(self.device, &self.config, layers)?));
        Ok(())
    }

    /// Sees to it that the angles are there that steps over caches of a kind read.
    pub(crate) fn find_angles(&self, s: &DeviceWork<'d, D>, kind: CacheType) -> Result<(), DeviceError> {
        let Some(biases) = self.key_biases(kind).filter(|_| s.angles.get().is_none()) else { return Ok(()) };
        let (d, capacity) = (self.config.head_dim, s.shape.capacity);
        let mut angles = [const { None }; 2];
        let tables = [Some(&s.rope_table), s.local_rope_table.as_ref()];
        for ((to, table), planes) in angles.iter_mut().zip(tables).zip(&biases.planes) {
            let Some(table) = table.filter(|_| !planes.is_empty()) else { continue };
            let turns = table.read::<f32>(capacity * d)?;
            *to = Some(KeyAngles::new(self.device, &turns, d, planes, biases.first)?);
        }
        drop(s.angles.set(angles));
        Ok(())
    }

    /// What keys of a layer are stored without, for a launch.
    pub(crate) fn constants<'s>(
        &'s self,
        s: &'s DeviceWork<'d, D>,
        kind: CacheType,
        layer: usize,
    ) -> Option<(&'s KeyConstants<'d, D>, Option<&'s KeyAngles<'d, D>>)> {
        let (_, constants) = self.key_biases(kind)?.layers[layer].as_ref()?;
        let local = usize::from(self.config.has_local_rope(layer));
        Some((constants, s.angles.get().and_then(|angles| angles[local].as_ref())))
    }

    /// Keys and values of the first `tokens` of a sequence in a layer.
    pub(crate) fn cached(
        &self,
        state: &DeviceSequence<'d, D>,
        layer: usize,
        tokens: usize,
    ) -> Result<Option<Features>, DeviceError> {
        let Some(mut features) = state.features(self.device, layer, tokens)? else { return Ok(None) };
        let biases = self.key_biases(state.list.pool().memory().kind());
        if let Some((bias, _)) = biases.and_then(|biases| biases.layers[layer].as_ref()) {
            bias.give_back(&self.config, layer, state.list.capacity(), &mut features.keys);
        }
        Ok(Some(features))
    }
}
