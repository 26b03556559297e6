//! Models of random codes: any scheme for every matrix, fused as wanted, made at the speed of a
//! copy.

use crate::RandomPacked;
use fracbit_base::{Scheme, Shape};
use fracbit_format::Layout;
use fracbit_io::ModelConfig;
use fracbit_kernels::{Kernels, PackedMatrix, cases};
use fracbit_load::Error;
use fracbit_model::{FloatId, Linear, LinearId, Model, ModelBuilder, OnlineRotations, RotationMode};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Random bytes that matrices take their codes from. What is measured does not depend on the values
/// of codes, only on their being in memory of their own, so matrices may hold the same bytes.
pub(super) struct Arena(Vec<u8>);

impl Arena {
    const BYTES: usize = 64 << 20;

    pub(super) fn new() -> Self {
        let mut bytes = vec![0; Self::BYTES];
        bytes.par_chunks_mut(1 << 20).enumerate().for_each(|(chunk, bytes)| {
            let mut rng = ChaCha8Rng::seed_from_u64(chunk as u64);
            rng.fill_bytes(bytes);
        });
        Self(bytes)
    }

    /// `len` bytes; `salt` says from where.
    pub(super) fn codes(&self, len: usize, salt: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        let mut at = salt.wrapping_mul(0x9e37_79b9) % (Self::BYTES / 2);
        while out.len() < len {
            let part = (len - out.len()).min(Self::BYTES - at);
            out.extend_from_slice(&self.0[at..at + part]);
            at = (at + part + 97) % (Self::BYTES / 2);
        }
        out
    }

    /// A packed matrix; weights have variance `1 / cols`, or 1 with `wide`.
    pub(super) fn matrix(
        &self,
        scheme: Scheme,
        shape: Shape,
        wide: bool,
        salt: usize,
        kernels: &Kernels,
    ) -> Result<PackedMatrix, Error> {
        let codes = self.codes(Layout::new(scheme, shape).len(), salt);
        let packed = RandomPacked::of(scheme, shape, wide, codes);
        Ok(PackedMatrix::new(kernels, &packed.view(shape.rows)?))
    }

    /// A model of `config` whose matrices have the schemes of `scheme` and are fused as `fused`
    /// says (groups that were checked to be allowed).
    pub(super) fn model(
        &self,
        config: &ModelConfig,
        scheme: impl Fn(LinearId) -> Scheme,
        fused: &[Vec<LinearId>],
        kernels: &Kernels,
    ) -> Result<Model, Error> {
        let mut builder =
            ModelBuilder::new(config.clone(), OnlineRotations::new(config, RotationMode::Fold, 0)?)?;
        let bias = |id: LinearId| id.has_bias(config).then(|| vec![0.0; id.shape(config).rows]);
        for (salt, id) in LinearId::all(config).enumerate() {
            let alone = [id];
            let group = fused.iter().find(|g| g.contains(&id)).map_or(&alone[..], Vec::as_slice);
            if group[0] != id {
                continue;
            }
            let rows = group.iter().map(|id| id.shape(config).rows).sum();
            let shape = Shape::new(rows, id.shape(config).cols);
            let matrix = self.matrix(scheme(id), shape, id == LinearId::Embed, salt, kernels)?;
            if group.len() == 1 {
                let linear = Linear::packed(matrix, bias(id)).map_err(fracbit_model::Error::from)?;
                builder.set(id, linear)?;
                continue;
            }
            let members = group.iter().map(|&id| (id.shape(config).rows, bias(id))).collect();
            let linears = Linear::fused(matrix, members).map_err(fracbit_model::Error::from)?;
            for (&id, linear) in group.iter().zip(linears) {
                builder.set(id, linear)?;
            }
        }
        for id in FloatId::all(config) {
            builder.set_floats(id, floats(id, config))?;
        }
        Ok(builder.build()?.with_kernels(kernels))
    }
}

/// Gains of 1, and routers that give different tokens different experts.
#[expect(clippy::cast_precision_loss, reason = "a width")]
pub(super) fn floats(id: FloatId, config: &ModelConfig) -> Vec<f32> {
    let width = id.width(config);
    match id {
        FloatId::Router(layer) => {
            let scale = 6.0 / (config.hidden_size as f32).sqrt();
            cases::activations(width, layer as u64 + 1).iter().map(|v| scale * v).collect()
        }
        _ => vec![1.0; width],
    }
}
