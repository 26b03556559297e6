//! Keys and values of the tokens seen so far.
//!
//! Each layer keeps two buffers: values as (kv head, position, head_dim), keys as (kv head, block, head_dim, 16 positions),
//! so that attention reads the positions of one head as one stream and multiplies sixteen keys side by side.
//! They grow by doubling, up to the state's limit, so a model that may see 10^5 tokens
//! costs what it has seen; [`crate::State::reserve`] makes room ahead, and then decoding does not allocate. A
//! layer with a sliding window keeps all positions too: simpler to truncate, and the window bounds what
//! attention reads; a ring buffer would save memory only beyond the window.

use std::collections::TryReserveError;
use std::ops::Range;

use bytemuck::Pod;
use fracbit_kernels::vectors::{Floats, KEY_BLOCK};
use fracbit_kernels::{Crew, Numbers};
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
    F16(Numbers<f16>),
    F32(Numbers<f32>),
}

impl Store {
    fn new(kind: KvType) -> Self {
        match kind {
            KvType::F16 => Self::F16(Numbers::default()),
            KvType::F32 => Self::F32(Numbers::default()),
        }
    }

    /// Makes each of `heads` runs `to` elements long, keeping what is there.
    fn grow(&mut self, heads: usize, to: usize) -> Result<(), TryReserveError> {
        match self {
            Self::F16(old) => grow(old, heads, to),
            Self::F32(old) => grow(old, heads, to),
        }
    }

    /// Undoes [`Store::grow`]: runs of `to` elements again.
    fn shrink(&mut self, heads: usize, to: usize) {
        match self {
            Self::F16(old) => shrink(old, heads, to),
            Self::F32(old) => shrink(old, heads, to),
        }
    }

    fn floats(&self, range: Range<usize>) -> Floats<'_> {
        match self {
            Self::F16(x) => Floats::F16(&x[range]),
            Self::F32(x) => Floats::F32(&x[range]),
        }
    }
}

fn grow<T: Pod>(old: &mut Numbers<T>, heads: usize, to: usize) -> Result<(), TryReserveError> {
    let from = old.len() / heads;
    let mut new = Numbers::try_zeroed(heads.saturating_mul(to))?;
    if from > 0 {
        let runs = new.chunks_exact_mut(to).zip(old.chunks_exact(from));
        runs.for_each(|(new, old)| new[..from].copy_from_slice(old));
    }
    *old = new;
    Ok(())
}

fn shrink<T: Pod>(old: &mut Numbers<T>, heads: usize, to: usize) {
    let from = old.len() / heads;
    for head in 0..heads {
        old.copy_within(head * from..head * from + to, head * to);
    }
    old.truncate(heads * to);
}

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub(crate) struct KvLayer {
    keys: Store,   // (kv head, block, head_dim, KEY_BLOCK)
    values: Store, // (kv head, position, head_dim)
    /// Positions there is room for, whole blocks.
    pub(crate) capacity: usize,
    pub(crate) head_dim: usize,
    kv_heads: usize,
}

impl KvLayer {
    pub(crate) fn new(kind: KvType, kv_heads: usize, head_dim: usize) -> Self {
        Self { keys: Store::new(kind), values: Store::new(kind), capacity: 0, head_dim, kv_heads }
    }

    /// Makes room for at least `capacity` positions, keeping those held.
    pub(crate) fn grow(&mut self, capacity: usize) -> Result<(), TryReserveError> {
        let capacity = capacity.div_ceil(KEY_BLOCK).saturating_mul(KEY_BLOCK);
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

    /// The blocks of keys that hold the positions from `from`, the first of a block, to `to`.
    pub(crate) fn keys(&self, kv_head: usize, from: usize, to: usize) -> Floats<'_> {
        debug_assert!(from.is_multiple_of(KEY_BLOCK) && to <= self.capacity, "positions inside the cache");
        self.keys.floats(self.span(kv_head, from, to.next_multiple_of(KEY_BLOCK)))
    }

    /// The values of some positions.
    pub(crate) fn values(&self, kv_head: usize, from: usize, to: usize) -> Floats<'_> {
        debug_assert!(to <= self.capacity, "positions inside the cache");
        self.values.floats(self.span(kv_head, from, to))
    }

    fn span(&self, kv_head: usize, from: usize, to: usize) -> Range<usize> {
        let head = kv_head * self.capacity;
        (head + from) * self.head_dim..(head + to) * self.head_dim
    }

    /// Writes keys and values, (rows, kv head, head_dim), of the positions from `first` on.
    pub(crate) fn write(&mut self, crew: &Crew<'_>, first: usize, keys: &[f32], values: &[f32]) {
        let (d, heads) = (self.head_dim, self.kv_heads);
        let run = self.capacity * d;
        let rows = |all: &'_ [f32], head: usize, f: &mut dyn FnMut(usize, &[f32])| {
            all.chunks_exact(heads * d).enumerate().for_each(|(row, x)| f(first + row, &x[head * d..][..d]));
        };
        let place =
            |position: usize, i: usize| (position / KEY_BLOCK * d + i) * KEY_BLOCK + position % KEY_BLOCK;
        match &mut self.keys {
            Store::F16(to) => crew.chunks(to, run, |head, to| {
                let mut halves = [f16::ZERO; crate::attention::MAX_HEAD_DIM];
                rows(keys, head, &mut |position, x| {
                    halves[..d].convert_from_f32_slice(x);
                    halves[..d].iter().enumerate().for_each(|(i, &h)| to[place(position, i)] = h);
                });
            }),
            Store::F32(to) => crew.chunks(to, run, |head, to| {
                rows(keys, head, &mut |position, x| {
                    x.iter().enumerate().for_each(|(i, &v)| to[place(position, i)] = v);
                });
            }),
        }
        match &mut self.values {
            Store::F16(to) => crew.chunks(to, run, |head, to| {
                rows(values, head, &mut |position, x| to[position * d..][..d].convert_from_f32_slice(x));
            }),
            Store::F32(to) => crew.chunks(to, run, |head, to| {
                rows(values, head, &mut |position, x| to[position * d..][..d].copy_from_slice(x));
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One number of a key and of a value.
    fn at(layer: &KvLayer, head: usize, position: usize, i: usize) -> (f32, f32) {
        let block = position / KEY_BLOCK * KEY_BLOCK;
        let key = layer.keys(head, block, position + 1).get(i * KEY_BLOCK + position % KEY_BLOCK);
        (key, layer.values(head, position, position + 1).get(i))
    }

    #[test]
    fn halves_round_to_nearest_and_f32_is_exact() {
        let values = [1.0, -0.333_333_34, 70_000.0, 1e-9];
        for kind in [KvType::F16, KvType::F32] {
            let mut layer = KvLayer::new(kind, 1, 4);
            layer.grow(3).unwrap();
            assert_eq!(layer.capacity, 16);
            layer.write(&Crew::alone(), 2, &values, &values.map(|v| -v));
            let want = match kind {
                KvType::F16 => values.map(|v| f16::from_f32(v).to_f32()),
                KvType::F32 => values,
            };
            for (i, want) in want.into_iter().enumerate() {
                assert_eq!(at(&layer, 0, 2, i), (want, -want));
            }
        }
    }

    #[test]
    fn growing_keeps_what_is_held() {
        let (heads, d, count) = (3, 2, 37);
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let all: Vec<f32> = (0..count * heads * d).map(|i| i as f32).collect();
        let negative: Vec<f32> = all.iter().map(|v| -v).collect();
        for kind in [KvType::F16, KvType::F32] {
            let mut layer = KvLayer::new(kind, heads, d);
            layer.grow(count).unwrap();
            layer.write(&Crew::alone(), 0, &all, &negative);
            layer.grow(1).unwrap();
            assert_eq!(layer.capacity, 48);
            layer.grow(100).unwrap();
            // What a failure half-way would do, and then success.
            layer.keys.grow(heads, 200 * d).unwrap();
            layer.keys.shrink(heads, layer.capacity * d);
            for (n, want) in all.iter().enumerate() {
                let (position, head, i) = (n / (heads * d), n / d % heads, n % d);
                assert_eq!(at(&layer, head, position, i), (*want, -want), "{position} {head} {i}");
            }
            assert!(layer.grow(usize::MAX / 8).is_err());
            assert_eq!(layer.capacity, 112);
        }
    }
}
