//! Keys in caches of few bits without the constants that they share: what
//! [`fracbit_model::KeyBias`] chooses, on a device.

use fracbit_io::ModelConfig;
use fracbit_kernels_cuda::{
    Device, DeviceError,
    ops::{KeyAngles, KeyConstants, KeyPlane},
};
use fracbit_model::KeyBias;

/// The choices for a model.
#[derive(Debug)]
pub(crate) struct KeyBiases<'d, D: Device> {
    /// Of every layer that wants it.
    pub(crate) layers: Vec<Option<(KeyBias, KeyConstants<'d, D>)>>,
    /// Planes whose angles layers read: of those that all layers share, and of those of layers with
    /// a window.
    pub(crate) planes: [Vec<usize>; 2],
    /// The first position whose key is stored without.
    pub(crate) first: usize,
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
