//! Keys and values of the tokens seen so far.
//!
//! Each layer keeps two buffers: values as (kv head, pair of positions, head_dim, 2), keys as (kv head, block, pair of dimensions, 16 positions, 2),
//! so that attention reads the positions of one head as one stream and multiplies sixteen keys, or neighbouring dimensions of values,
//! side by side. Every key and value of a head is integers and a scale (see [`fracbit_kernels::vectors::attend`]).
//! They grow by doubling, up to the state's limit, so a model that may see 10^5 tokens
//! costs what it has seen; [`crate::State::reserve`] makes room ahead, and then decoding does not allocate. A
//! layer with a sliding window keeps all positions too: simpler to truncate, and the window bounds what
//! attention reads; a ring buffer would save memory only beyond the window.

use std::collections::TryReserveError;
use std::ops::Range;

use bytemuck::Pod;
use fracbit_kernels::vectors::{KEY_BLOCK, VALUE_MOST, Vectors, key_most};
use fracbit_kernels::{Crew, Numbers};
use serde::{Deserialize, Serialize};

use crate::attention::MAX_HEAD_DIM;

/// Element type of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// 16-bit integers and a scale for every key and value of a head: 11.5 to 13 bits beside the sign, relative to the largest number of the row. Half the
    /// memory and bandwidth, and more speed: attention multiplies integers.
    #[default]
    I16,
    /// Single precision, for comparisons with other implementations.
    F32,
}

impl KvType {
    /// Bytes of a key or value of a head.
    #[must_use]
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::I16 => 2 * head_dim + 4,
            Self::F32 => 4 * head_dim,
        }
    }
}

/// One buffer of a layer: keys or values.
#[derive(Clone, Debug)]
pub(crate) enum Store {
    I16 { ints: Numbers<i16>, scales: Numbers<f32> },
    F32(Numbers<f32>),
}

/// Keys or values of neighbouring positions of a head, in the order of their buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows<'a> {
    I16 { ints: &'a [i16], scales: &'a [f32] },
    F32(&'a [f32]),
}

impl Store {
    fn new(kind: KvType) -> Self {
        match kind {
            KvType::I16 => Self::I16 { ints: Numbers::default(), scales: Numbers::default() },
            KvType::F32 => Self::F32(Numbers::default()),
        }
    }

    /// Makes each of `heads` runs `to` positions of `d` numbers long, keeping what is there. Failure may leave one of two buffers longer:
    /// [`Store::shrink`] undoes it.
    fn grow(&mut self, heads: usize, to: usize, d: usize) -> Result<(), TryReserveError> {
        let numbers = to.saturating_mul(d);
        match self {
            Self::I16 { ints, scales } => {
                grow(ints, heads, numbers)?;
                grow(scales, heads, to)
            }
            Self::F32(floats) => grow(floats, heads, numbers),
        }
    }

    /// Undoes [`Store::grow`]: runs of `to` positions again.
    fn shrink(&mut self, heads: usize, to: usize, d: usize) {
        match self {
            Self::I16 { ints, scales } => {
                shrink(ints, heads, to * d);
                shrink(scales, heads, to);
            }
            Self::F32(floats) => shrink(floats, heads, to * d),
        }
    }

    /// Some positions, counted from the first of the first head.
    fn rows(&self, range: Range<usize>, d: usize) -> Rows<'_> {
        let numbers = range.start * d..range.end * d;
        match self {
            Self::I16 { ints, scales } => Rows::I16 { ints: &ints[numbers], scales: &scales[range] },
            Self::F32(floats) => Rows::F32(&floats[numbers]),
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
    if from <= to {
        return; // it had not grown
    }
    for head in 0..heads {
        old.copy_within(head * from..head * from + to, head * to);
    }
    old.truncate(heads * to);
}

/// Keys and values of one layer.
#[derive(Clone, Debug)]
pub(crate) struct KvLayer {
    keys: Store, // (kv head, block, head_dim / 2, KEY_BLOCK, 2); in single precision (kv head, block, head_dim, KEY_BLOCK)
    values: Store, // (kv head, position / 2, head_dim, 2); in single precision (kv head, position, head_dim)
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
            let (heads, d) = (self.kv_heads, self.head_dim);
            let grown =
                self.keys.grow(heads, capacity, d).and_then(|()| self.values.grow(heads, capacity, d));
            if let Err(e) = grown {
                // What has grown is merely longer; `capacity` must not say so yet, and a retry would find runs of another
                // length: so put it back.
                self.keys.shrink(heads, self.capacity, d);
                self.values.shrink(heads, self.capacity, d);
                return Err(e);
            }
            self.capacity = capacity;
        }
        Ok(())
    }

    /// The blocks of keys that hold the positions from `from`, the first of a block, to `to`.
    pub(crate) fn keys(&self, kv_head: usize, from: usize, to: usize) -> Rows<'_> {
        debug_assert!(from.is_multiple_of(KEY_BLOCK) && to <= self.capacity, "positions inside the cache");
        let head = kv_head * self.capacity;
        self.keys.rows(head + from..head + to.next_multiple_of(KEY_BLOCK), self.head_dim)
    }

    /// The values of the positions from `from`, an even number, to `to`, and of one more where that is odd.
    pub(crate) fn values(&self, kv_head: usize, from: usize, to: usize) -> Rows<'_> {
        debug_assert!(from.is_multiple_of(2) && to <= self.capacity, "positions inside the cache");
        let head = kv_head * self.capacity;
        self.values.rows(head + from..head + to.next_multiple_of(2), self.head_dim)
    }

    /// Writes keys and values, (rows, kv head, head_dim), of the positions from `first` on.
    pub(crate) fn write(
        &mut self,
        vectors: &Vectors,
        crew: &Crew<'_>,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        let (heads, d) = (self.kv_heads, self.head_dim);
        let new = New { vectors, crew, first, heads, d, capacity: self.capacity };
        let block = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK;
        // In pairs every place is two apart from the next.
        let pair = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK * 2;
        new.write(
            &mut self.keys,
            keys,
            key_most(d),
            |position, i| pair(position) + i / 2 * (2 * KEY_BLOCK) + i % 2,
            |position, i| block(position) + i * KEY_BLOCK,
        );
        new.write(
            &mut self.values,
            values,
            VALUE_MOST,
            |position, i| position / 2 * (2 * d) + 2 * i + position % 2,
            |position, i| position * d + i,
        );
    }
}

/// Positions to be written.
struct New<'a, 'c> {
    vectors: &'a Vectors,
    crew: &'a Crew<'c>,
    first: usize,
    heads: usize,
    d: usize,
    capacity: usize,
}

impl New<'_, '_> {
    /// Writes keys or values; number `i` of a position goes to the place that `int_place` and `float_place` say.
    fn write(
        &self,
        to: &mut Store,
        all: &[f32],
        most: i32,
        int_place: impl Fn(usize, usize) -> usize + Sync,
        float_place: impl Fn(usize, usize) -> usize + Sync,
    ) {
        let Self { vectors, crew, first, heads, d, capacity } = *self;
        // The positions and numbers of a head.
        let rows = |head: usize| {
            (first..).zip(all.chunks_exact(heads * d)).map(move |(at, x)| (at, &x[head * d..][..d]))
        };
        match to {
            Store::I16 { ints, scales } => {
                // Rounded twice, for a task writes to one buffer.
                let round =
                    |x: &[f32], ints: &mut [i16; MAX_HEAD_DIM]| vectors.round(x, most, &mut ints[..d]);
                crew.chunks(scales, capacity, |head, scales| {
                    rows(head).for_each(|(at, x)| scales[at] = round(x, &mut [0; MAX_HEAD_DIM]));
                });
                crew.chunks(ints, capacity * d, |head, to| {
                    let mut ints = [0; MAX_HEAD_DIM];
                    for (at, x) in rows(head) {
                        let _scale = round(x, &mut ints);
                        ints[..d].iter().enumerate().for_each(|(i, int)| to[int_place(at, i)] = *int);
                    }
                });
            }
            Store::F32(to) => crew.chunks(to, capacity * d, |head, to| {
                for (at, x) in rows(head) {
                    x.iter().enumerate().for_each(|(i, v)| to[float_place(at, i)] = *v);
                }
            }),
        }
    }
}

#[cfg(test)]
impl KvLayer {
    /// One number of a key.
    pub(crate) fn key(&self, head: usize, position: usize, i: usize) -> f32 {
        let (block, at) = (position / KEY_BLOCK * KEY_BLOCK, position % KEY_BLOCK);
        match self.keys(head, block, position + 1) {
            Rows::I16 { ints, scales } => {
                f32::from(ints[i / 2 * 2 * KEY_BLOCK + 2 * at + i % 2]) * scales[at]
            }
            Rows::F32(floats) => floats[i * KEY_BLOCK + at],
        }
    }

    /// One number of a value.
    pub(crate) fn value(&self, head: usize, position: usize, i: usize) -> f32 {
        let (pair, at) = (position / 2 * 2, position % 2);
        match self.values(head, pair, position + 1) {
            Rows::I16 { ints, scales } => f32::from(ints[2 * i + at]) * scales[at],
            Rows::F32(floats) => floats[at * self.head_dim + i],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_integers_and_a_scale_or_exact() {
        let values = [1.0, -0.333_333_34, 70_000.0, 1e-9];
        for kind in [KvType::I16, KvType::F32] {
            let mut layer = KvLayer::new(kind, 1, 4);
            layer.grow(3).unwrap();
            assert_eq!(layer.capacity, 16);
            layer.write(&Vectors::scalar(), &Crew::alone(), 2, &values, &values.map(|v| -v));
            let rounded = |most: f32| values.map(|v| (v * (most / 70_000.0)).round() * (70_000.0 / most));
            let (key, value) = match kind {
                KvType::I16 => (rounded(8191.0), rounded(4096.0)),
                KvType::F32 => (values, values),
            };
            for i in 0..4 {
                assert_eq!((layer.key(0, 2, i), layer.value(0, 2, i)), (key[i], -value[i]));
            }
        }
    }

    #[test]
    fn growing_keeps_what_is_held() {
        let (heads, d, count) = (3, 2, 37);
        // Both numbers of a row are rounded exactly.
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let all: Vec<f32> = (0..count * heads * d).map(|i| (1 + i / 2) as f32 * [1.0, -1.0][i % 2]).collect();
        let negative: Vec<f32> = all.iter().map(|v| -v).collect();
        for kind in [KvType::I16, KvType::F32] {
            let mut layer = KvLayer::new(kind, heads, d);
            layer.grow(count).unwrap();
            layer.write(&Vectors::scalar(), &Crew::alone(), 0, &all, &negative);
            layer.grow(1).unwrap();
            assert_eq!(layer.capacity, 48);
            layer.grow(100).unwrap();
            // What a failure half-way would do, and then success.
            layer.keys.grow(heads, 200, d).unwrap();
            if let Store::I16 { ints, .. } = &mut layer.values {
                grow(ints, heads, 200 * d).unwrap();
            }
            layer.keys.shrink(heads, layer.capacity, d);
            layer.values.shrink(heads, layer.capacity, d);
            for (n, want) in all.iter().enumerate() {
                let (position, head, i) = (n / (heads * d), n / d % heads, n % d);
                let got = (layer.key(head, position, i), layer.value(head, position, i));
                assert!((got.0 - want).abs() < 1e-4 && (got.1 + want).abs() < 1e-4, "{n}: {got:?} {want}");
            }
            assert!(layer.grow(usize::MAX / 8).is_err());
            assert_eq!(layer.capacity, 112);
        }
    }
}
