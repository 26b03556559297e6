//! Keys in caches of few bits without the constants that they share: what
//! [`fracbit_model::KeyBias`] chooses, on a device.

use crate::{Error, cache::DeviceSequence, graph::DeviceWork, model::DeviceModel};
use fracbit_io::ModelConfig;
use fracbit_kernels_cuda::{
    Device, DeviceError,
    ops::{CacheType, KeyAngles, KeyConstants, KeyPlane},
};
use fracbit_model::{KeyBias, KvType};
use fracbit_schedule::Features;

/// The choices for a model.
#[derive(Debug)]
pub(crate) struct KeyBiases<'d, D: Device> {
    /// Of every layer that wants it.
    layers: Vec<Option<(KeyBias, KeyConstants<'d, D>)>>,
    /// Planes whose angles layers read: of those that all layers share, and of those of layers with
    /// a window.
    planes: [Vec<usize>; 2],
    first: usize,
}

/// Angles of the planes of [`KeyBiases`], of both kinds.
pub(crate) type Angles<'d, D> = [Option<KeyAngles<'d, D>>; 2];

impl<'d, D: Device> KeyBiases<'d, D> {
    pub(crate) fn new(
        device: &'d D,
        config: &ModelConfig,
        layers: Vec<Option<KeyBias>>,
    ) -> Result<Self, DeviceError> {
        let mut planes = [const { Vec::new() }; 2];
        for (i, bias) in layers.iter().enumerate() {
            let all: &mut Vec<usize> = &mut planes[usize::from(config.has_local_rope(i))];
            all.extend(bias.iter().flat_map(|bias| &bias.heads).flat_map(|head| &head.planes));
        }
        for all in &mut planes {
            all.sort_unstable();
            all.dedup();
        }
        let first = layers.iter().flatten().map(KeyBias::first).max().unwrap_or(0);
        let number = |n: usize| u32::try_from(n).expect("planes of a head");
        let on = |(i, bias): (usize, Option<KeyBias>)| {
            let Some(bias) = bias else { return Ok(None) };
            let rows = &planes[usize::from(config.has_local_rope(i))];
            let plane = |(&plane, &constant): (&usize, &[f32; 2])| KeyPlane {
                plane: number(plane),
                row: number(rows.partition_point(|&other| other < plane)),
                constant,
            };
            let heads = bias.heads.iter().map(|head| head.planes.iter().zip(&head.bias).map(plane).collect());
            let constants = KeyConstants::new(device, &bias.shift, &heads.collect::<Vec<_>>(), bias.first())?;
            Ok(Some((bias, constants)))
        };
        let layers = layers.into_iter().enumerate().map(on).collect::<Result<_, DeviceError>>()?;
        Ok(Self { layers, planes, first })
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
