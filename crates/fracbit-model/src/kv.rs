//! Keys and values of the tokens seen so far.
//!
//! Each layer keeps two buffers ordered (kv head, position, head_dim): attention reads the positions of one
//! head as one stream. They grow by doubling, up to the state's limit, so a model that may see 10^5 tokens
//! costs what it has seen; [`crate::State::reserve`] makes room ahead, and then decoding does not allocate. A
//! layer with a sliding window keeps all positions too: simpler to truncate, and the window bounds what
//! attention reads; a ring buffer would save memory only beyond the window.

use std::collections::TryReserveError;

use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};

/// Element type of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// Half precision: 11 significant bits, half the memory and bandwidth. Values beyond ±65504 become
    /// infinite.
    #[default]
    F16,
    /// Single precision, for comparisons with other implementations.
    F32,
}

impl KvType {
    /// Bytes of an element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// One buffer of a layer: keys or values.
#[derive(Clone, Debug)]
pub(crate) enum Store {
    F16(Vec<f16>), // (kv head, position, head_dim)
    F32(Vec<f32>), // (kv head, position, head_dim)
}

impl Store {
    fn new(kind: KvType) -> Self {
        match kind {
            KvType::F16 => Self::F16(Vec::new()),
            KvType::F32 => Self::F32(Vec::new()),
        }
    }

    /// Makes each of `heads` runs `to` elements long, keeping what is there.
    fn grow(&mut self, heads: usize, to: usize) -> Result<(), TryReserveError> {
        match self {
            Self::F16(old) => grow(old, heads, to, f16::ZERO),
            Self::F32(old) => grow(old, heads, to, 0.0),
        }
    }

    /// Undoes [`Store::grow`]: runs of `to` elements again.
    fn shrink(&mut self, heads: usize, to: usize) {
        match self {
            Self::F16(old) => shrink(old, heads, to),
            Self::F32(old) => shrink(old, heads, to),
        }
    }

    /// Writes `values` from element `at` on.
    pub(crate) fn write(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F16(halves) => {
                halves[at..at + values.len()].convert_from_f32_slice(values);
            }
            Self::F32(out) => out[at..at + values.len()].copy_from_slice(values),
        }
    }

    /// `len` elements from `at` on, through `buffer` where they need conversion.
    pub(crate) fn read<'a>(&'a self, at: usize, len: usize, buffer: &'a mut [f32]) -> &'a [f32] {
        match self {
            Self::F16(halves) => {
                halves[at..at + len].convert_to_f32_slice(&mut buffer[..len]);
                &buffer[..len]
            }
            Self::F32(values) => &values[at..at + len],
        }
    }
}

fn grow<T: Copy>(old: &mut Vec<T>, heads: usize, to: usize, zero: T) -> Result<(), TryReserveError> {
    let from = old.len() / heads;
    let mut new = Vec::new();
    // Saturation turns an overflow into a refusal: no allocation of that size succeeds.
    new.try_reserve_exact(heads.saturating_mul(to))?;
    for head in 0..heads {
        new.extend_from_slice(&old[head * from..(head + 1) * from]);
        new.resize((head + 1) * to, zero);
    }
    *old = new;
    Ok(())
}

fn shrink<T: Copy>(old: &mut Vec<T>, heads: usize, to: usize) {
    let from = old.len() / heads;
    for head in 0..heads {
        old.copy_within(head * from..head * from + to, head * to);
    }
    old.truncate(heads * to);
}

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub(crate) struct KvLayer {
    pub(crate) keys: Store,
    pub(crate) values: Store,
    /// Positions there is room for.
    pub(crate) capacity: usize,
    pub(crate) head_dim: usize,
    kv_heads: usize,
}

impl KvLayer {
    pub(crate) fn new(kind: KvType, kv_heads: usize, head_dim: usize) -> Self {
        Self { keys: Store::new(kind), values: Store::new(kind), capacity: 0, head_dim, kv_heads }
    }

    /// Makes room for `capacity` positions, keeping those held.
    pub(crate) fn grow(&mut self, capacity: usize) -> Result<(), TryReserveError> {
        if capacity > self.capacity {
            let to = capacity.saturating_mul(self.head_dim);
            self.keys.grow(self.kv_heads, to)?;
            // Should this one fail, the keys are merely longer; `capacity` must not say so yet, and a retry
            // would find runs of another length: so put them back.
            if let Err(e) = self.values.grow(self.kv_heads, to) {
                self.keys.shrink(self.kv_heads, self.capacity * self.head_dim);
                return Err(e);
            }
            self.capacity = capacity;
        }
        Ok(())
    }

    /// Element at which a position of a head begins.
    pub(crate) fn at(&self, kv_head: usize, position: usize) -> usize {
        debug_assert!(position < self.capacity, "position inside the cache");
        (kv_head * self.capacity + position) * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_to_nearest_and_f32_is_exact() {
        let values = [1.0, -0.333_333_34, 70_000.0, 1e-9];
        for kind in [KvType::F16, KvType::F32] {
            let mut layer = KvLayer::new(kind, 2, 4);
            layer.grow(3).unwrap();
            let at = layer.at(1, 2);
            assert_eq!(at, 20);
            layer.keys.write(at, &values);
            let mut buffer = [9.0; 4];
            let got = layer.keys.read(at, 4, &mut buffer);
            let want = match kind {
                KvType::F16 => values.map(|v| f16::from_f32(v).to_f32()),
                KvType::F32 => values,
            };
            assert_eq!(got, want);
        }
    }

    #[test]
    fn growing_keeps_what_is_held() {
        for kind in [KvType::F16, KvType::F32] {
            let mut layer = KvLayer::new(kind, 3, 2);
            layer.grow(2).unwrap();
            let value = |head: usize, position: usize| [head as f32, position as f32];
            for (head, position) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                layer.keys.write(layer.at(head, position), &value(head, position));
                layer.values.write(layer.at(head, position), &value(position, head));
            }
            layer.grow(1).unwrap();
            assert_eq!(layer.capacity, 2);
            layer.grow(5).unwrap();
            // What a failure half-way would do, and then success.
            layer.keys.grow(3, 7 * 2).unwrap();
            layer.keys.shrink(3, 5 * 2);
            for (head, position) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
                let (at, mut buffer) = (layer.at(head, position), [0.0; 2]);
                assert_eq!(layer.keys.read(at, 2, &mut buffer), value(head, position));
                assert_eq!(layer.values.read(at, 2, &mut buffer), value(position, head));
            }
            assert!(layer.grow(usize::MAX / 8).is_err());
            assert_eq!(layer.capacity, 5);
        }
    }
}
