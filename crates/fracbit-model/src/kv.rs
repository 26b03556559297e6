//! Keys and values of the tokens seen so far.
//!
//! They lie in pages of [`PAGE`] positions ([`crate::pages`]; PagedAttention, Kwon et al. 2023,
//! arXiv 2309.06180). A page has all layers one behind the other, each as the integers of its keys,
//! their scales, the integers of its values and their scales: values as (kv head, pair of
//! positions, head_dim, 2), keys as (kv head, block, pair of dimensions, 16 positions, 2), so that
//! attention multiplies sixteen keys, or neighbouring dimensions of values, side by side. Every key
//! and value of a head is integers and a scale (see [`fracbit_kernels::vectors::attend`]).
//!
//! Of 8 and 4 bits, queries and keys are rotated before, by one rotation for all heads, which
//! changes no inner product: some channels of keys are many times as large as the others in every
//! token, and few levels would be left for these (Ashkboos et al. 2024, QuaRot, arXiv 2404.00456,
//! section 4). Values of folded models are rotated by their weights.
//!
//! What that leaves to be won by factors between queries and keys is won when a model is quantized:
//! see [`crate::smoothing`]. Large biases of keys are not in such caches at all: see
//! [`crate::key_bias`].
//!
//! A model that may see 10^5 tokens costs what it has seen, to the page; [`crate::State::reserve`]
//! makes room ahead, and then decoding does not allocate. A layer with a sliding window keeps all
//! positions too: simpler to truncate, and the window bounds what attention reads.

use bytemuck::Pod;
use fracbit_io::ModelConfig;
use fracbit_kernels::vectors::{
    Ints, KEY_BLOCK, Next, UNIT, VALUE_MOST, Vectors, WEIGHT_BLOCK, attend::nibble, key_most,
};
use fracbit_kernels::{Line, Team};
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
    /// an order of magnitude (`docs/lab/2026-11-quality.md`).
    I6,
    /// 4 bits, places in a table of sixteen integers, and a scale for every key and value of a
    /// head.
    I4,
    /// Single precision, for comparisons with other implementations.
    F32,
}

impl KvType {
    /// Its name in options: bits of a number, in the mean of keys and values.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::I16 => 16,
            Self::I8 => 8,
            Self::I6 => 6,
            Self::I4 => 4,
        }
    }

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
    pub(crate) const fn rotates_heads(self) -> bool {
        matches!(self, Self::I8 | Self::I6 | Self::I4)
    }
}

/// Positions of a page: a block of weights of attention, so that sums are the same wherever a page
/// ends.
pub(crate) const PAGE: usize = WEIGHT_BLOCK;

/// Where keys and values lie in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvLayout {
    pub(crate) kind: KvType,
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// How the numbers of keys or of values are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    I16,
    I8,
    I4,
    F32,
}

impl Form {
    /// Bytes of an element of [`KvType::elements`].
    const fn bytes(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::I8 | Self::I4 => 1,
            Self::F32 => 4,
        }
    }

    /// Bytes of the scale of a row.
    const fn scale(self) -> usize {
        if matches!(self, Self::F32) { 0 } else { 4 }
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Keys,
    Values,
}

/// Keys or values of neighbouring positions of a head, in the order of their buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CachedRows<'a> {
    Ints { ints: Ints<'a>, scales: &'a [f32] },
    F32(&'a [f32]),
}

impl<'a> CachedRows<'a> {
    /// What is asked for while others are read.
    pub(crate) fn next(self) -> Option<Next<'a>> {
        match self {
            Self::Ints { ints, scales } => Some(Next { ints, scales }),
            Self::F32(_) => None,
        }
    }
}

impl KvLayout {
    /// That of a model.
    pub(crate) fn of(config: &ModelConfig, kind: KvType) -> Self {
        let layers = config.num_hidden_layers();
        Self { kind, layers, kv_heads: config.num_key_value_heads, head_dim: config.head_dim }
    }

    fn form(self, which: Which) -> Form {
        match (self.kind, which) {
            (KvType::I16, _) => Form::I16,
            (KvType::I8, _) | (KvType::I6, Which::Keys) => Form::I8,
            (KvType::I4, _) | (KvType::I6, Which::Values) => Form::I4,
            (KvType::F32, _) => Form::F32,
        }
    }

    /// Bytes of the numbers of a head, and of their scales; both whole cache lines, since a page
    /// has as many positions as a line has bytes.
    fn of_head(self, which: Which) -> [usize; 2] {
        let [key, value] = self.kind.elements(self.head_dim);
        let elements = if which == Which::Keys { key } else { value };
        let form = self.form(which);
        [PAGE * elements * form.bytes(), PAGE * form.scale()]
    }

    /// Bytes of a layer.
    fn layer_bytes(self) -> usize {
        let both = [Which::Keys, Which::Values].map(|which| self.of_head(which).iter().sum::<usize>());
        self.kv_heads * (both[0] + both[1])
    }

    /// Bytes of a page.
    pub(crate) fn bytes(self) -> usize {
        self.layers * self.layer_bytes()
    }

    /// Where the numbers of all heads of a layer begin, and their scales.
    fn starts(self, layer: usize, which: Which) -> [usize; 2] {
        let [key, key_scale] = self.of_head(Which::Keys);
        let before = if which == Which::Keys { 0 } else { self.kv_heads * (key + key_scale) };
        let numbers = layer * self.layer_bytes() + before;
        [numbers, numbers + self.kv_heads * self.of_head(which)[0]]
    }

    /// The first `count` positions of a page, whole blocks or pairs of them.
    fn rows(self, page: &[Line], layer: usize, which: Which, head: usize, count: usize) -> CachedRows<'_> {
        let page = bytemuck::cast_slice::<Line, u8>(page);
        let [numbers, scales] = self.starts(layer, which);
        let [each, each_scale] = self.of_head(which);
        let numbers = &page[numbers + head * each..][..count * (each / PAGE)];
        let scales = bytemuck::cast_slice(&page[scales + head * each_scale..][..count * (each_scale / PAGE)]);
        let ints = match self.form(which) {
            Form::I16 => Ints::I16(bytemuck::cast_slice(numbers)),
            Form::I8 => Ints::I8(bytemuck::cast_slice(numbers)),
            Form::I4 => Ints::I4(numbers),
            Form::F32 => return CachedRows::F32(bytemuck::cast_slice(numbers)),
        };
        CachedRows::Ints { ints, scales }
    }

    /// The blocks of keys that hold the first `count` positions of a page.
    pub(crate) fn keys(self, page: &[Line], layer: usize, head: usize, count: usize) -> CachedRows<'_> {
        self.rows(page, layer, Which::Keys, head, count.next_multiple_of(KEY_BLOCK))
    }

    /// The values of the first `count` positions of a page, and of one more where that is odd.
    pub(crate) fn values(self, page: &[Line], layer: usize, head: usize, count: usize) -> CachedRows<'_> {
        self.rows(page, layer, Which::Values, head, count.next_multiple_of(2))
    }

    /// Writes keys and values, (rows, kv head, head_dim), of the positions from `first` on, all of
    /// one page.
    pub(crate) fn write(
        self,
        page: &mut [Line],
        layer: usize,
        (vectors, team): (&Vectors, &Team<'_>),
        first: usize,
        [keys, values]: [&[f32]; 2],
    ) {
        let (heads, d) = (self.kv_heads, self.head_dim);
        let page = bytemuck::cast_slice_mut::<Line, u8>(page);
        let new = |which, all| New {
            vectors,
            team,
            rows: NewRows { first, all, heads, d },
            form: self.form(which),
            numbers: self.starts(layer, which)[0],
            sizes: self.of_head(which),
        };
        let block = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK;
        // In pairs every place is two apart from the next.
        let pair = |position: usize| position / KEY_BLOCK * d * KEY_BLOCK + position % KEY_BLOCK * 2;
        new(Which::Keys, keys).write(
            page,
            key_most(d),
            |position, i| pair(position) + i / 2 * (2 * KEY_BLOCK) + i % 2,
            |position, i| block(position) + i * KEY_BLOCK,
        );
        // Numbers of a row of pairs.
        let four = self.form(Which::Values) == Form::I4;
        let row = if four { (2 * d).next_multiple_of(UNIT) } else { 2 * d };
        new(Which::Values, values).write(
            page,
            VALUE_MOST,
            |position, i| position / 2 * row + 2 * i + position % 2,
            |position, i| position * d + i,
        );
    }
}

/// Positions to be written.
struct New<'a, 'c> {
    vectors: &'a Vectors,
    team: &'a Team<'c>,
    rows: NewRows<'a>,
    form: Form,
    /// Where the numbers of all heads begin.
    numbers: usize,
    /// Bytes of those of a head, and of their scales, which lie behind those of all heads.
    sizes: [usize; 2],
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
        page: &mut [u8],
        most: i32,
        int_place: impl Fn(usize, usize) -> usize + Sync,
        float_place: impl Fn(usize, usize) -> usize + Sync,
    ) {
        let Self { vectors, team, rows, form, numbers, sizes: [each, scale] } = *self;
        let (to, scales) = page[numbers..].split_at_mut(rows.heads * each);
        let scales = bytemuck::cast_slice_mut(&mut scales[..rows.heads * scale]);
        match form {
            Form::I16 => {
                let round = |x: &[f32], ints: &mut [i16]| vectors.round(x, most, ints);
                let to = bytemuck::cast_slice_mut::<u8, i16>(to);
                self.write_ints(to, scales, round, |to, at, i, int| to[int_place(at, i)] = int);
            }
            Form::I8 => {
                let round = |x: &[f32], ints: &mut [i16]| vectors.round(x, 127, ints);
                let to = bytemuck::cast_slice_mut::<u8, i8>(to);
                self.write_ints(to, scales, round, |to, at, i, int| {
                    to[int_place(at, i)] = i8::try_from(int).expect("at most 127");
                });
            }
            Form::I4 => {
                let round = |x: &[f32], places: &mut [i16]| vectors.round_to_levels(x, places);
                self.write_ints(to, scales, round, |to, at, i, place| {
                    let (byte, high) = nibble(int_place(at, i));
                    let place = u8::try_from(place).expect("below 16");
                    to[byte] = if high { to[byte] & 0x0F | place << 4 } else { to[byte] & 0xF0 | place };
                });
            }
            Form::F32 => {
                let to = bytemuck::cast_slice_mut::<u8, f32>(to);
                team.chunks(to, each / size_of::<f32>(), |head, to| {
                    for (at, x) in rows.of(head) {
                        x.iter().enumerate().for_each(|(i, v)| to[float_place(at, i)] = *v);
                    }
                });
            }
        }
    }

    /// Writes what `round` makes of numbers: their scales, and by `put` its integers, of a position
    /// and their order there.
    fn write_ints<T: Pod + Send>(
        &self,
        to: &mut [T],
        scales: &mut [f32],
        round: impl Fn(&[f32], &mut [i16]) -> f32 + Sync,
        put: impl Fn(&mut [T], usize, usize, i16) + Sync,
    ) {
        let Self { team, rows, .. } = *self;
        let d = rows.d;
        // Rounded twice, for a task writes to one buffer.
        team.chunks(scales, PAGE, |head, scales| {
            let mut ints = [0; MAX_HEAD_DIM];
            rows.of(head).for_each(|(at, x)| scales[at] = round(x, &mut ints[..d]));
        });
        let each = to.len() / rows.heads;
        team.chunks(to, each, |head, to| {
            let mut ints = [0; MAX_HEAD_DIM];
            for (at, x) in rows.of(head) {
                let _scale = round(x, &mut ints[..d]);
                ints[..d].iter().enumerate().for_each(|(i, int)| put(to, at, i, *int));
            }
        });
    }
}

impl KvLayout {
    /// One number of a key.
    pub(crate) fn key(self, page: &[Line], layer: usize, head: usize, at: usize, i: usize) -> f32 {
        match self.keys(page, layer, head, PAGE) {
            CachedRows::Ints { ints, scales } => {
                let row = at / KEY_BLOCK * (self.head_dim / 2) + i / 2;
                f32::from(ints.get(KEY_BLOCK, row, 2 * (at % KEY_BLOCK) + i % 2)) * scales[at]
            }
            CachedRows::F32(floats) => {
                floats[at / KEY_BLOCK * self.head_dim * KEY_BLOCK + i * KEY_BLOCK + at % KEY_BLOCK]
            }
        }
    }

    /// One number of a value.
    pub(crate) fn value(self, page: &[Line], layer: usize, head: usize, at: usize, i: usize) -> f32 {
        match self.values(page, layer, head, PAGE) {
            CachedRows::Ints { ints, scales } => {
                f32::from(ints.get(self.head_dim, at / 2, 2 * i + at % 2)) * scales[at]
            }
            CachedRows::F32(floats) => floats[at * self.head_dim + i],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [KvType; 5] = [KvType::I16, KvType::I8, KvType::I6, KvType::I4, KvType::F32];

    #[test]
    fn rows_are_integers_and_a_scale_or_exact() {
        let values = [1.0, -0.333_333_34, 70_000.0, 1e-9];
        for kind in KINDS {
            let layout = KvLayout { kind, layers: 1, kv_heads: 1, head_dim: 4 };
            let mut page = vec![Line::ZERO; layout.bytes() / 64];
            let with = (&Vectors::scalar(), &Team::alone());
            layout.write(&mut page, 0, with, 2, [&values, &values.map(|v| -v)]);
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
                let got = (layout.key(&page, 0, 0, 2, i), layout.value(&page, 0, 0, 2, i));
                assert_eq!(got, (key[i], -value[i]));
            }
        }
    }

    #[test]
    fn every_number_of_a_page_has_its_own_place() {
        for (kind, head_dim) in KINDS.into_iter().flat_map(|kind| [2, 6, 16, 40].map(|d| (kind, d))) {
            let layout = KvLayout { kind, layers: 2, kv_heads: 3, head_dim };
            // Nothing is written beyond the page, and what the kinds say of bytes is its size.
            assert_eq!(layout.bytes().div_ceil(PAGE), 2 * 3 * kind.pair_bytes(head_dim));
            let mut page = vec![Line::ZERO; layout.bytes() / 64];
            let each = 3 * head_dim;
            // Every row has a number of its own, of both signs.
            let rows = |salt: usize| -> Vec<f32> {
                let number = |n: usize| (1 + (n / head_dim * 7 + salt) % 61) as f32 * [1.0, -1.0][n % 2];
                (0..PAGE * each).map(number).collect()
            };
            let with = (&Vectors::scalar(), &Team::alone());
            let of = [[rows(0), rows(5)], [rows(11), rows(17)]];
            // Layer by layer, some positions before others.
            for (layer, [k, v]) in of.iter().enumerate() {
                for part in [40..PAGE, 0..1, 1..40] {
                    let numbers = part.start * each..part.end * each;
                    let both = [&k[numbers.clone()], &v[numbers]];
                    layout.write(&mut page, layer, with, part.start, both);
                }
            }
            for (layer, [k, v]) in of.iter().enumerate() {
                for n in 0..PAGE * each {
                    let (at, head, i) = (n / each, n % each / head_dim, n % head_dim);
                    // The second number of a row has the level -108 beside 127.
                    let near = |got: f32, want: f32, levels: bool| {
                        (got - want).abs() < if levels { 0.16 * want.abs() } else { 1e-2 * want.abs() }
                    };
                    let key = layout.key(&page, layer, head, at, i);
                    let value = layout.value(&page, layer, head, at, i);
                    assert!(near(key, k[n], kind == KvType::I4), "{kind:?} {head_dim}: {key} {}", k[n]);
                    let levels = matches!(kind, KvType::I6 | KvType::I4);
                    assert!(near(value, v[n], levels), "{kind:?} {head_dim}: {value} {}", v[n]);
                }
            }
        }
    }
}
