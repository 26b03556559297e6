//! Keys and values of the tokens seen so far.
//!
//! Each layer keeps two buffers: values as (kv head, pair of positions, head_dim, 2), keys as (kv
//! head, block, pair of dimensions, 16 positions, 2), so that attention reads the positions of one
//! head as one stream and multiplies sixteen keys, or neighbouring dimensions of values, side by
//! side. Every key and value of a head is integers and a scale (see
//! [`fracbit_kernels::vectors::attend`]).
//!
//! Of 8 and 4 bits, queries and keys are rotated before, by one rotation for all heads, which
//! changes no inner product: some channels of keys are many times as large as the others in every
//! token, and few levels would be left for these (Ashkboos et al. 2024, QuaRot, arXiv 2404.00456,
//! section 4). Values of folded models are rotated by their weights.
//!
//! Large biases of keys are not in such caches at all: see [`crate::key_bias`].
//!
//! They grow by doubling, up to the state's limit, so a model that may see 10^5 tokens costs what
//! it has seen; [`crate::State::reserve`] makes room ahead, and then decoding does not allocate. A
//! layer with a sliding window keeps all positions too: simpler to truncate, and the window bounds
//! what attention reads; a ring buffer would save memory only beyond the window.

use std::collections::TryReserveError;
use std::ops::Range;

use bytemuck::Pod;
use fracbit_kernels::vectors::{Ints, KEY_BLOCK, UNIT, VALUE_MOST, Vectors, attend::nibble, key_most};
use fracbit_kernels::{Crew, Numbers};
use serde::{Deserialize, Serialize};

use crate::attention::MAX_HEAD_DIM;

/// Element type of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// 16-bit integers and a scale for every key and value of a head: 11.5 to 13 bits beside the
    /// sign, relative to the largest number of the row. Half the memory and bandwidth, and more
    /// speed: attention multiplies integers.
    #[default]
    I16,
    /// 8-bit integers and a scale for every key and value of a head.
    I8,
    /// Keys as in [`KvType::I8`] and values as in [`KvType::I4`]: errors of keys do more harm, by
    /// an order of magnitude (`docs/quality.md`).
    I6,
    /// 4 bits, places in a table of sixteen integers, and a scale for every key and value of a
    /// head.
    I4,
    /// Single precision, for comparisons with other implementations.
    F32,
}

impl KvType {
    /// Bytes of a key and a value of a head.
    #[must_use]
    pub const fn pair_bytes(self, head_dim: usize) -> usize {
        let [key, value] = self.elements(head_dim);
        match self {
            Self::I16 => 2 * (key + value) + 8,
            Self::I8 | Self::I6 | Self::I4 => key + value + 8,
            Self::F32 => 4 * (key + value),
        }
    }

    /// Elements of a position in the buffers of keys and values: numbers, or bytes of two numbers.
    const fn elements(self, head_dim: usize) -> [usize; 2] {
        let halves = head_dim.div_ceil(UNIT / 2) * (UNIT / 4);
        match self {
            Self::I16 | Self::I8 | Self::F32 => [head_dim; 2],
            Self::I6 => [head_dim, halves],
            Self::I4 => [head_dim / 2, halves],
        }
    }

    /// Whether queries and keys are rotated.
    pub(crate) const fn turns(self) -> bool {
        matches!(self, Self::I8 | Self::I6 | Self::I4)
    }
}

/// One buffer of a layer: keys or values. Elements are numbers, or bytes of 4-bit ones.
#[derive(Clone, Debug)]
pub(crate) enum Store {
    I16 { ints: Numbers<i16>, scales: Numbers<f32> },
    I8 { ints: Numbers<i8>, scales: Numbers<f32> },
    I4 { bytes: Numbers<u8>, scales: Numbers<f32> },
    F32(Numbers<f32>),
}

/// Keys or values of neighbouring positions of a head, in the order of their buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows<'a> {
    Ints { ints: Ints<'a>, scales: &'a [f32] },
    F32(&'a [f32]),
}

impl Store {
    /// Of keys and values.
    fn both(kind: KvType) -> [Self; 2] {
        let words = || Self::I16 { ints: Numbers::default(), scales: Numbers::default() };
        let bytes = || Self::I8 { ints: Numbers::default(), scales: Numbers::default() };
        let halves = || Self::I4 { bytes: Numbers::default(), scales: Numbers::default() };
        let floats = || Self::F32(Numbers::default());
        match kind {
            KvType::I16 => [words(), words()],
            KvType::I8 => [bytes(), bytes()],
            KvType::I6 => [bytes(), halves()],
            KvType::I4 => [halves(), halves()],
            KvType::F32 => [floats(), floats()],
        }
    }

    /// Makes each of `heads` runs `to` positions of `d` elements long, keeping what is there.
    /// Failure may leave one of two buffers longer: [`Store::shrink`] undoes it.
    fn grow(&mut self, heads: usize, to: usize, d: usize) -> Result<(), TryReserveError> {
        let numbers = to.saturating_mul(d);
        let scales = match self {
            Self::I16 { ints, scales } => grow(ints, heads, numbers).map(|()| scales)?,
            Self::I8 { ints, scales } => grow(ints, heads, numbers).map(|()| scales)?,
            Self::I4 { bytes, scales } => grow(bytes, heads, numbers).map(|()| scales)?,
            Self::F32(floats) => return grow(floats, heads, numbers),
        };
        grow(scales, heads, to)
    }

    /// Undoes [`Store::grow`]: runs of `to` positions again.
    fn shrink(&mut self, heads: usize, to: usize, d: usize) {
        let scales = match self {
            Self::I16 { ints, scales } => {
                shrink(ints, heads, to * d);
                scales
            }
            Self::I8 { ints, scales } => {
                shrink(ints, heads, to * d);
                scales
            }
            Self::I4 { bytes, scales } => {
                shrink(bytes, heads, to * d);
                scales
            }
            Self::F32(floats) => return shrink(floats, heads, to * d),
        };
        shrink(scales, heads, to);
    }

    /// Some positions, counted from the first of the first head.
    fn rows(&self, range: Range<usize>, d: usize) -> Rows<'_> {
        let all = range.start * d..range.end * d;
        let (ints, scales) = match self {
            Self::I16 { ints, scales } => (Ints::I16(&ints[all]), scales),
            Self::I8 { ints, scales } => (Ints::I8(&ints[all]), scales),
            Self::I4 { bytes, scales } => (Ints::I4(&bytes[all]), scales),
            Self::F32(floats) => return Rows::F32(&floats[all]),
        };
        Rows::Ints { ints, scales: &scales[range] }
    }
}

/// Makes each of `heads` runs `to` elements long, keeping what is there.
pub(crate) fn grow<T: Pod>(old: &mut Numbers<T>, heads: usize, to: usize) -> Result<(), TryReserveError> {
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
    values: Store, // (kv head, position / 2, head_dim, 2), of 4 bits in whole units; in single precision (kv head, position, head_dim)
    /// Elements of a position in both.
    elements: [usize; 2],
    /// Positions there is room for, whole blocks.
    pub(crate) capacity: usize,
    pub(crate) head_dim: usize,
    kv_heads: usize,
}

impl KvLayer {
    pub(crate) fn new(kind: KvType, kv_heads: usize, head_dim: usize) -> Self {
        let ([keys, values], elements) = (Store::both(kind), kind.elements(head_dim));
        Self { keys, values, elements, capacity: 0, head_dim, kv_heads }
    }

    /// Makes room for at least `capacity` positions, keeping those held.
    pub(crate) fn grow(&mut self, capacity: usize) -> Result<(), TryReserveError> {
        let capacity = capacity.div_ceil(KEY_BLOCK).saturating_mul(KEY_BLOCK);
        if capacity > self.capacity {
            let (heads, [key, value]) = (self.kv_heads, self.elements);
            let grown =
                self.keys.grow(heads, capacity, key).and_then(|()| self.values.grow(heads, capacity, value));
            if let Err(e) = grown {
                // What has grown is merely longer; `capacity` must not say so yet, and a retry
                // would find runs of another length: so put it back.
                self.keys.shrink(heads, self.capacity, key);
                self.values.shrink(heads, self.capacity, value);
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
        self.keys.rows(head + from..head + to.next_multiple_of(KEY_BLOCK), self.elements[0])
    }

    /// The values of the positions from `from`, an even number, to `to`, and of one more where that
    /// is odd.
    pub(crate) fn values(&self, kv_head: usize, from: usize, to: usize) -> Rows<'_> {
        debug_assert!(from.is_multiple_of(2) && to <= self.capacity, "positions inside the cache");
        let head = kv_head * self.capacity;
        self.values.rows(head + from..head + to.next_multiple_of(2), self.elements[1])
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
        let new =
            |all| New { vectors, crew, capacity: self.capacity, rows: NewRows { first, all, heads, d } };
        let block = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK;
        // In pairs every place is two apart from the next.
        let pair = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK * 2;
        new(keys).write(
            &mut self.keys,
            key_most(d),
            |position, i| pair(position) + i / 2 * (2 * KEY_BLOCK) + i % 2,
            |position, i| block(position) + i * KEY_BLOCK,
        );
        // Numbers of a row of pairs.
        let row = if let Store::I4 { .. } = self.values { (2 * d).next_multiple_of(UNIT) } else { 2 * d };
        new(values).write(
            &mut self.values,
            VALUE_MOST,
            |position, i| position / 2 * row + 2 * i + position % 2,
            |position, i| position * d + i,
        );
    }
}

/// Positions to be written.
struct New<'a, 'c> {
    vectors: &'a Vectors,
    crew: &'a Crew<'c>,
    capacity: usize,
    rows: NewRows<'a>,
}

/// Numbers of neighbouring positions.
#[derive(Clone, Copy)]
struct NewRows<'a> {
    first: usize,
    all: &'a [f32], // (position, head, d)
    heads: usize,
    d: usize,
}

impl<'a> NewRows<'a> {
    /// The positions and numbers of a head.
    fn of(self, head: usize) -> impl Iterator<Item = (usize, &'a [f32])> {
        let Self { first, all, heads, d } = self;
        (first..).zip(all.chunks_exact(heads * d)).map(move |(at, x)| (at, &x[head * d..][..d]))
    }
}

impl New<'_, '_> {
    /// Writes keys or values; number `i` of a position goes to the place that `int_place` and
    /// `float_place` say.
    fn write(
        &self,
        to: &mut Store,
        most: i32,
        int_place: impl Fn(usize, usize) -> usize + Sync,
        float_place: impl Fn(usize, usize) -> usize + Sync,
    ) {
        let Self { vectors, crew, capacity, rows } = *self;
        match to {
            Store::I16 { ints, scales } => {
                let round = |x: &[f32], ints: &mut [i16]| vectors.round(x, most, ints);
                self.write_ints(ints, scales, round, |to, at, i, int| to[int_place(at, i)] = int);
            }
            Store::I8 { ints, scales } => {
                let round = |x: &[f32], ints: &mut [i16]| vectors.round(x, 127, ints);
                self.write_ints(ints, scales, round, |to, at, i, int| {
                    to[int_place(at, i)] = i8::try_from(int).expect("at most 127");
                });
            }
            Store::I4 { bytes, scales } => {
                let round = |x: &[f32], places: &mut [i16]| vectors.round_to_levels(x, places);
                self.write_ints(bytes, scales, round, |to, at, i, place| {
                    let (byte, high) = nibble(int_place(at, i));
                    let place = u8::try_from(place).expect("below 16");
                    to[byte] = if high { to[byte] & 0x0F | place << 4 } else { to[byte] & 0xF0 | place };
                });
            }
            Store::F32(to) => crew.chunks(to, capacity * rows.d, |head, to| {
                for (at, x) in rows.of(head) {
                    x.iter().enumerate().for_each(|(i, v)| to[float_place(at, i)] = *v);
                }
            }),
        }
    }

    /// Writes what `round` makes of numbers: their scales, and by `put` its integers, of a position
    /// and their order there.
    fn write_ints<T: Pod + Send>(
        &self,
        to: &mut Numbers<T>,
        scales: &mut Numbers<f32>,
        round: impl Fn(&[f32], &mut [i16]) -> f32 + Sync,
        put: impl Fn(&mut [T], usize, usize, i16) + Sync,
    ) {
        let Self { crew, capacity, rows, .. } = *self;
        let d = rows.d;
        // Rounded twice, for a task writes to one buffer.
        crew.chunks(scales, capacity, |head, scales| {
            let mut ints = [0; MAX_HEAD_DIM];
            rows.of(head).for_each(|(at, x)| scales[at] = round(x, &mut ints[..d]));
        });
        let each = to.len() / rows.heads;
        crew.chunks(to, each, |head, to| {
            let mut ints = [0; MAX_HEAD_DIM];
            for (at, x) in rows.of(head) {
                let _scale = round(x, &mut ints[..d]);
                ints[..d].iter().enumerate().for_each(|(i, int)| put(to, at, i, *int));
            }
        });
    }
}

#[cfg(test)]
impl KvLayer {
    /// One number of a key.
    pub(crate) fn key(&self, head: usize, position: usize, i: usize) -> f32 {
        let (block, at) = (position / KEY_BLOCK * KEY_BLOCK, position % KEY_BLOCK);
        match self.keys(head, block, position + 1) {
            Rows::Ints { ints, scales } => f32::from(ints.get(KEY_BLOCK, i / 2, 2 * at + i % 2)) * scales[at],
            Rows::F32(floats) => floats[i * KEY_BLOCK + at],
        }
    }

    /// One number of a value.
    pub(crate) fn value(&self, head: usize, position: usize, i: usize) -> f32 {
        let (pair, at) = (position / 2 * 2, position % 2);
        match self.values(head, pair, position + 1) {
            Rows::Ints { ints, scales } => f32::from(ints.get(self.head_dim, 0, 2 * i + at)) * scales[at],
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
        for kind in [KvType::I16, KvType::I8, KvType::I6, KvType::I4, KvType::F32] {
            let mut layer = KvLayer::new(kind, 1, 4);
            layer.grow(3).unwrap();
            assert_eq!(layer.capacity, 16);
            layer.write(&Vectors::scalar(), &Crew::alone(), 2, &values, &values.map(|v| -v));
            let rounded = |most: f32| values.map(|v| (v * (most / 70_000.0)).round() * (70_000.0 / most));
            // Of small numbers the nearest level is -2.
            let levels = [-2.0, -2.0, 127.0, -2.0].map(|level| level * (70_000.0 / 8128.0 * 64.0));
            let (key, value) = match kind {
                KvType::I16 => (rounded(8191.0), rounded(4096.0)),
                KvType::I8 => (rounded(127.0), rounded(127.0)),
                KvType::I6 => (rounded(127.0), levels),
                KvType::I4 => (levels, levels),
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
        for kind in [KvType::I16, KvType::I8, KvType::I6, KvType::I4, KvType::F32] {
            let mut layer = KvLayer::new(kind, heads, d);
            layer.grow(count).unwrap();
            layer.write(&Vectors::scalar(), &Crew::alone(), 0, &all, &negative);
            layer.grow(1).unwrap();
            assert_eq!(layer.capacity, 48);
            layer.grow(100).unwrap();
            // What a failure half-way would do, and then success.
            let [key, value] = layer.elements;
            layer.keys.grow(heads, 200, key).unwrap();
            if let Store::I16 { ints, .. } = &mut layer.values {
                grow(ints, heads, 200 * value).unwrap();
            }
            layer.keys.shrink(heads, layer.capacity, key);
            layer.values.shrink(heads, layer.capacity, value);
            for (n, want) in all.iter().enumerate() {
                let (position, head, i) = (n / (heads * d), n / d % heads, n % d);
                let got = (layer.key(head, position, i), layer.value(head, position, i));
                // The second number of a row has the level -108 beside 127.
                let most = |levels: bool| if levels { 0.15 * want.abs() } else { 1e-4 };
                let key = (got.0 - want).abs() < most(kind == KvType::I4);
                let value = (got.1 + want).abs() < most(matches!(kind, KvType::I6 | KvType::I4));
                assert!(key && value, "{kind:?} {n}: {got:?} {want}");
            }
            assert!(layer.grow(usize::MAX / 8).is_err());
            assert_eq!(layer.capacity, 112);
        }
    }
}
