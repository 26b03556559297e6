//! Attention of a few tokens on any device against sums in f64: what `tests/step.rs` runs on the
//! shim and `examples/cuda_check` on a GPU.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{
        self, AttentionShape, AttentionWork, Cache, CacheType, HeadOptions, HeadTurn, KeyAngles,
        KeyConstants, KeyPlane, PAGE, PageTables, Step, StepRows,
    },
};
use rows::Row;

pub(crate) mod rows;

/// What attention is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) d: usize,
    pub(crate) capacity: usize,
    /// That the pages are for.
    pub(crate) sequences: usize,
    pub(crate) norms: bool,
    pub(crate) rotation: bool,
    pub(crate) window: usize,
    /// Of scores; 0: none.
    pub(crate) cap: f32,
    /// Factors of queries by position.
    pub(crate) growth: bool,
    pub(crate) kind: CacheType,
    /// Queries and keys are rotated; of caches of codes.
    pub(crate) turned: bool,
    /// The position from which on keys are stored without constants; of caches of codes.
    pub(crate) constants: Option<usize>,
}

/// An [`Attention`] on a device.
#[derive(Debug)]
pub(crate) struct Bench<'d, D: Device> {
    of: Attention,
    shape: AttentionShape,
    norms: [Vec<f32>; 2],
    turns: Vec<f32>,
    qkv: Vec<f32>,
    stored: Stored,
    growth: Vec<f32>,
    on: [Buffer<'d, D>; 7],
    cache: Cache<'d, D>,
    head_turn: Option<(HeadTurn<'d, D>, Vec<f64>)>, // and its matrix, (d, d)
    constants: Option<Constants<'d, D>>,
    tables: PageTables<'d, D>,
    /// Pages of each sequence.
    places: Vec<Vec<u32>>,
    work: AttentionWork<'d, D>,
}

/// What keys are stored without.
#[derive(Debug)]
struct Constants<'d, D: Device> {
    on: KeyConstants<'d, D>,
    angles: KeyAngles<'d, D>,
    first: usize,
    shift: Vec<f32>, // (kv_heads, d)
    heads: Vec<Vec<KeyPlane>>,
    turns: Vec<f32>, // (capacity, d)
}

/// Keys and values of a sequence, (kv_heads, capacity).
type Stored = [Vec<Option<Row>>; 2];

/// The bytes of pages that nobody has: halves and scales that are no numbers.
const NOTHING: u8 = 0xFF;

const EPS: f32 = 1e-5;

impl Attention {
    pub(crate) fn on<D: Device>(self, device: &D, seed: u64) -> Result<Bench<'_, D>, DeviceError> {
        let Self { heads, kv_heads, d, capacity, sequences, kind, .. } = self;
        let shape = AttentionShape { heads, kv_heads, d, capacity };
        let norms = [1, 2].map(|i| cases::activations(d, seed + i));
        let half = d / 2;
        let angle = |i: usize| (i / d) as f32 * 0.7 / (1.0 + (i % half) as f32);
        let turn = |i: usize| if i % d < half { angle(i).cos() } else { angle(i).sin() };
        let turns: Vec<f32> = (0..capacity * d).map(turn).collect();
        let qkv = cases::activations(8 * shape.row(), seed + 3);
        let stored = [0, 1].map(|which| {
            let values = cases::activations(kv_heads * capacity * d, seed + 4 + which as u64);
            values.chunks_exact(d).map(|row| Some(Row::of(kind, which, row))).collect()
        });
        let head_turn = self.turned.then(|| head_turn(device, d, seed)).transpose()?;
        let still = |i: usize| if i % d < half { 1.0 } else { 0.0 };
        let angles = if self.rotation { turns.clone() } else { (0..capacity * d).map(still).collect() };
        let constants =
            self.constants.map(|first| Constants::new(device, [kv_heads, d], angles, first, seed));
        let growth: Vec<f32> = (0..capacity).map(|p| 1.0 + 0.003 * p as f32).collect();
        let on = [
            Buffer::of(device, &[Step::new(&[0], &[])], "step")?,
            Buffer::of(device, &norms[0], "norm")?,
            Buffer::of(device, &norms[1], "norm")?,
            Buffer::of(device, &turns, "turns")?,
            Buffer::of(device, &growth, "growth")?,
            Buffer::of(device, &qkv, "qkv")?,
            Buffer::zeroed(device, 4 * 8 * heads * d, "out")?,
        ];
        // Pages lie anywhere in the pool, which has some more.
        let each = capacity.div_ceil(PAGE);
        let pool = (sequences * each + 2).next_multiple_of(2) + 1;
        let step = (pool / 3 + 2..).find(|&n| gcd(n, pool) == 1).expect("a number");
        let place = |i: usize| ((i * step + 1) % pool) as u32;
        let places: Vec<Vec<u32>> =
            (0..sequences).map(|s| (0..each).map(|i| place(s * each + i)).collect()).collect();
        let tables = PageTables::new(device, sequences, capacity)?;
        tables.write(&places.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let (cache, work) = (Cache::new(device, &shape, kind, pool)?, AttentionWork::new(device, &shape)?);
        Ok(Bench {
            of: self,
            shape,
            norms,
            turns,
            qkv,
            stored,
            growth,
            on,
            cache,
            head_turn,
            constants: constants.transpose()?,
            tables,
            places,
            work,
        })
    }
}

/// How far from `x` a number of a row may be, the largest of which is `largest`: half a step of its
/// representation.
fn off_by(row: &Row, x: f64, largest: f64) -> f64 {
    match row {
        Row::Halves(_) => 2e-3 * x.abs() + 1e-5,
        Row::Bytes(..) => largest * (0.501 / 127.0),
        // Of -108 beside 127: what lies beyond the least level.
        Row::Levels(..) => largest * (19.01 / 127.0),
    }
}

impl<'d, D: Device> Constants<'d, D> {
    /// Of heads with different planes, the last one with all or, where there are several, none.
    fn new(
        device: &'d D,
        [kv_heads, d]: [usize; 2],
        turns: Vec<f32>,
        first: usize,
        seed: u64,
    ) -> Result<Self, DeviceError> {
        let half = d / 2;
        let constant: Vec<f32> =
            cases::activations(kv_heads * d, seed + 8).into_iter().map(|v| 20.0 * v).collect();
        // Rows of angles in another order than planes.
        let all: Vec<usize> = (0..half).rev().collect();
        let plane = |head: usize, plane: usize| {
            let at = |i: usize| constant[head * d + i];
            let row = (half - 1 - plane) as u32;
            KeyPlane { plane: plane as u32, row, constant: [at(plane), at(plane + half)] }
        };
        let heads: Vec<Vec<KeyPlane>> = (0..kv_heads)
            .map(|head| match (head + 1 == kv_heads, head) {
                (true, 0) => (0..half).map(|p| plane(head, p)).collect(),
                (true, _) => Vec::new(),
                (false, _) => (0..half).step_by(2 + head).map(|p| plane(head, p)).collect(),
            })
            .collect();
        // Beside the planes only one number is taken, and lost.
        let mut shift = vec![0.0; kv_heads * d];
        for (shift, planes) in shift.chunks_exact_mut(d).zip(&heads) {
            shift[d - 1] = -0.25;
            for of in planes {
                [shift[of.plane as usize], shift[of.plane as usize + half]] = of.constant.map(|v| -v);
            }
        }
        let on = KeyConstants::new(device, &shift, &heads, first)?;
        let angles = KeyAngles::new(device, &turns, d, &all, first)?;
        Ok(Self { on, angles, first, shift, heads, turns })
    }

    /// What the key of a position gets before it turns.
    fn shift(&self, kv: usize, position: usize) -> Option<&[f32]> {
        let d = self.shift.len() / self.heads.len();
        (position >= self.first).then(|| &self.shift[kv * d..(kv + 1) * d])
    }

    /// The inner product of a turned query and the constants of a position, turned.
    fn score(&self, kv: usize, query: &[f64], position: usize) -> f64 {
        if position < self.first {
            return 0.0;
        }
        let (d, half) = (query.len(), query.len() / 2);
        let of = |plane: &KeyPlane| {
            let at = plane.plane as usize;
            let [x, y] = plane.constant.map(f64::from);
            let [cos, sin] = [at, half + at].map(|i| f64::from(self.turns[position * d + i]));
            query[at] * (x * cos - y * sin) + query[at + half] * (y * cos + x * sin)
        };
        self.heads[kv].iter().map(of).sum()
    }
}

/// Some linear map of heads, and its matrix.
fn head_turn<D: Device>(device: &D, d: usize, seed: u64) -> Result<(HeadTurn<'_, D>, Vec<f64>), DeviceError> {
    let walsh = 1 << d.trailing_zeros();
    let order = d / walsh;
    let scale = (1.0 / d as f64).sqrt() as f32;
    let signs: Vec<f32> = cases::activations(d, seed + 6).into_iter().map(|v| scale.copysign(v)).collect();
    let dense = cases::activations(order * order, seed + 7);
    let factors = [(order, dense.clone())];
    let turn = HeadTurn::new(device, &signs, if order > 1 { &factors } else { &[] })?;
    let entry = |at: usize| {
        let (i, j) = (at / d, at % d);
        let sign = if ((i % walsh) & (j % walsh)).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
        let dense = if order > 1 { f64::from(dense[i / walsh * order + j / walsh]) } else { 1.0 };
        sign * dense * f64::from(signs[j])
    };
    Ok((turn, (0..d * d).map(entry).collect()))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl<D: Device> Bench<'_, D> {
    /// Room for another cache as large, whatever it holds.
    #[allow(dead_code, reason = "for timings on a GPU")]
    pub(crate) fn room(&self) -> Result<Cache<'_, D>, DeviceError> {
        let [keys, values] = [&self.cache.keys, &self.cache.values];
        let [keys, values] = [keys, values].map(|of| Buffer::room(of.device(), of.bytes(), "KV cache"));
        Ok(Cache { keys: keys?, values: values?, kind: self.of.kind })
    }

    /// Bytes of a page, keys and values.
    #[allow(dead_code, reason = "for timings on a GPU")]
    pub(crate) fn page_bytes(&self) -> usize {
        self.of.kind.page_bytes(self.shape.kv_heads, self.shape.d)
    }

    /// Bytes of the block of keys or values that holds a row of a (kv_heads, capacity) cache of a
    /// sequence, and the row's slot.
    fn at_page(&self, which: usize, sequence: usize, row: usize) -> (std::ops::Range<usize>, usize) {
        let AttentionShape { kv_heads, d, capacity, .. } = self.shape;
        let (kv, position) = (row / capacity, row % capacity);
        let block = self.places[sequence][position / PAGE] as usize * kv_heads + kv;
        let bytes = self.of.kind.blocks(d)[which];
        (block * bytes..(block + 1) * bytes, position % PAGE)
    }

    /// Writes keys and values of some sequences to their pages; all others hold no numbers. Returns
    /// the bytes.
    fn store(&self, sequences: &[&Stored]) -> Result<[Vec<u8>; 2], DeviceError> {
        let mut both = [&self.cache.keys, &self.cache.values].map(|to| vec![NOTHING; to.bytes()]);
        for (which, to) in [&self.cache.keys, &self.cache.values].into_iter().enumerate() {
            let all = &mut both[which];
            for (sequence, stored) in sequences.iter().enumerate() {
                for (i, row) in stored[which].iter().enumerate() {
                    let (block, slot) = self.at_page(which, sequence, i);
                    row.iter().for_each(|row| rows::put(row, which, &mut all[block.clone()], slot));
                }
            }
            to.write(all)?;
        }
        Ok(both)
    }

    /// The stored keys and values without those from position `before` on.
    fn stored_before(&self, before: usize) -> Stored {
        let AttentionShape { kv_heads, capacity, .. } = self.shape;
        let mut caches = self.stored.clone();
        for cache in &mut caches {
            for kv in 0..kv_heads {
                cache[kv * capacity + before..(kv + 1) * capacity].fill(None);
            }
        }
        caches
    }

    /// One token of each of several sequences in one launch.
    ///
    /// # Panics
    /// When one gets anything else than it gets alone.
    pub(crate) fn check_together(&self, befores: &[usize]) -> Result<(), DeviceError> {
        let (row, width) = (self.shape.row(), self.shape.heads * self.shape.d);
        let [step, .., qkv, out] = &self.on;
        let caches: Vec<_> = befores.iter().map(|&before| self.stored_before(before)).collect();
        let mut alone = Vec::new();
        for (s, &before) in befores.iter().enumerate() {
            self.store(&[&caches[s]])?;
            step.write(&[Step::new(&[before], &[0])])?;
            qkv.write(&self.qkv[s * row..(s + 1) * row])?;
            self.launch(&self.cache, StepRows::of_one(1))?;
            alone.extend(out.read::<f32>(width)?);
        }
        qkv.write(&self.qkv)?;
        self.store(&caches.iter().collect::<Vec<_>>())?;
        step.write(&[Step::new(befores, &vec![0; befores.len()])])?;
        self.launch(&self.cache, StepRows::one_of(befores.len()))?;
        assert!(alone.iter().all(|v| v.is_finite()));
        assert_eq!(alone, out.read::<f32>(befores.len() * width)?, "{:?} {befores:?}", self.of);
        Ok(())
    }

    /// Lets `rows` tokens be run after `before` others.
    pub(crate) fn at(&self, before: usize, rows: usize) -> Result<(), DeviceError> {
        self.on[0].write(&[Step::new(&[before], &vec![0; rows])])
    }

    /// Launches attention of `rows` tokens at the position of `step`.
    pub(crate) fn launch(&self, cache: &Cache<'_, D>, rows: StepRows) -> Result<(), DeviceError> {
        let [step, query_norm, key_norm, turns, growth, qkv, out] = &self.on;
        let options = HeadOptions {
            query_norm: self.of.norms.then_some(query_norm),
            key_norm: self.of.norms.then_some(key_norm),
            turns: self.of.rotation.then_some(turns),
            growth: self.of.growth.then_some(growth),
            cap: self.of.cap,
            eps: EPS,
            window: self.of.window,
            head_turn: self.head_turn.as_ref().map(|(turn, _)| turn),
            constants: self.constants.as_ref().map(|of| (&of.on, Some(&of.angles))),
            halved: None,
        };
        ops::attend_few(step, qkv, (cache, &self.tables), out, rows, &options, &self.work)
    }

    /// One head in f64: norm, what is added, and rotary embedding.
    fn head(
        &self,
        (row, head): (usize, usize),
        norm: Option<&[f32]>,
        shift: Option<&[f32]>,
        position: Option<usize>,
    ) -> Vec<f64> {
        let d = self.of.d;
        let at = (row * (self.of.heads + 2 * self.of.kv_heads) + head) * d;
        let mut x: Vec<f64> = self.qkv[at..at + d].iter().map(|&v| f64::from(v)).collect();
        if let Some(gain) = norm.filter(|_| self.of.norms) {
            let square: f64 = x.iter().map(|v| v * v).sum();
            let by = 1.0 / (square / d as f64 + f64::from(EPS)).sqrt();
            x.iter_mut().zip(gain).for_each(|(v, &g)| *v *= by * f64::from(g));
        }
        shift.into_iter().for_each(|by| x.iter_mut().zip(by).for_each(|(v, &by)| *v += f64::from(by)));
        // Values have no position.
        let Some(position) = position else { return x };
        if self.of.rotation {
            let turns = &self.turns[position * d..(position + 1) * d];
            x = (0..d)
                .map(|i| {
                    let (c, s) = (f64::from(turns[i % (d / 2)]), f64::from(turns[d / 2 + i % (d / 2)]));
                    if i < d / 2 { x[i] * c - x[i + d / 2] * s } else { x[i] * c + x[i - d / 2] * s }
                })
                .collect();
        }
        x
    }

    /// A query or a key as it meets the other.
    fn mixed(&self, x: Vec<f64>) -> Vec<f64> {
        let Some((_, matrix)) = &self.head_turn else { return x };
        matrix.chunks_exact(self.of.d).map(|row| row.iter().zip(&x).map(|(m, x)| m * x).sum()).collect()
    }

    /// Runs `rows` tokens after `before` others, twice; returns the largest error as a share of its
    /// bound.
    ///
    /// # Panics
    /// When two runs differ, or the cache does not hold the new tokens.
    pub(crate) fn check(&mut self, before: usize, rows: usize) -> Result<f64, DeviceError> {
        let (AttentionShape { heads, kv_heads, d, capacity }, window) = (self.shape, self.of.window);
        self.at(before, rows)?;
        let [.., out] = &self.on;
        // No position that is not there may count: not even a value that is no number.
        let mut caches = self.stored_before(before);
        let mut expected = self.store(&[&caches])?;
        let launch = || self.launch(&self.cache, StepRows::of_one(rows));
        launch()?;
        let got: Vec<f32> = out.read(rows * heads * d)?;
        launch()?;
        assert_eq!(got, out.read::<f32>(rows * heads * d)?, "a launch repeats itself");
        let [keys, values] = [&self.cache.keys, &self.cache.values].map(|b| b.read::<u8>(b.bytes()));
        let written = [keys?, values?];
        for which in [0, 1] {
            for (row, kv) in (0..rows).flat_map(|row| (0..kv_heads).map(move |kv| (row, kv))) {
                let norm = (which == 0).then_some(self.norms[1].as_slice());
                let position = (which == 0).then_some(before + row);
                let constants = self.constants.as_ref().filter(|_| which == 0);
                let shift = constants.and_then(|of| of.shift(kv, before + row));
                let want = self.head((row, heads + which * kv_heads + kv), norm, shift, position);
                let want = if which == 0 { self.mixed(want) } else { want };
                let single: Vec<f32> = want.iter().map(|&v| v as f32).collect();
                let rounded = Row::of(self.of.kind, which, &single);
                let at = kv * capacity + before + row;
                let (block, slot) = self.at_page(which, 0, at);
                let row = rows::get(&rounded, which, &written[which][block.clone()], slot);
                // Without arithmetic before it, rounding is the processor's to the bit.
                let plain = which == 1 || !(self.of.norms || self.of.rotation || self.of.turned);
                assert!(!plain || row == rounded, "row {at} of cache {which}: {row:?}, expected {rounded:?}");
                let largest = want.iter().fold(0f64, |most, v| most.max(v.abs()));
                for (want, got) in want.iter().zip(row.numbers()) {
                    let near = (want - got).abs() <= off_by(&row, *want, largest);
                    assert!(near, "row {at} of cache {which}: {want}, got {got} beside {largest}");
                }
                rows::put(&row, which, &mut expected[which][block], slot);
                caches[which][at] = Some(row);
            }
            assert!(expected[which] == written[which], "other rows of cache {which} are left alone");
        }
        let numbers = |row: Option<Row>| row.map_or_else(|| vec![f64::NAN; d], |row| row.numbers());
        let stored = caches.map(|c| c.into_iter().flat_map(numbers).collect::<Vec<f64>>());
        let mut worst = 0f64;
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let turned = self.head((row, head), Some(&self.norms[0]), None, Some(before + row));
            let query = self.mixed(turned.clone());
            let kv = head / (heads / kv_heads);
            let end = before + row + 1;
            let first = if window > 0 { end.saturating_sub(window) } else { 0 };
            let place = |p: usize| (kv * capacity + p) * d;
            let constant = |p| self.constants.as_ref().map_or(0.0, |of| of.score(kv, &turned, p));
            let score = |p: usize| -> f64 {
                let key = &stored[0][place(p)..place(p) + d];
                let by = if self.of.growth { f64::from(self.growth[before + row]) } else { 1.0 };
                let sum = query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() + constant(p);
                let score = by * sum / (d as f64).sqrt();
                let cap = f64::from(self.of.cap);
                if cap > 0.0 { cap * (score / cap).tanh() } else { score }
            };
            let scores: Vec<f64> = (first..end).map(score).collect();
            // Queries of caches of codes are rounded to 15 bits beside their largest number.
            let largest = query.iter().fold(0f64, |most, q| most.max(q.abs()));
            let sum = |p: usize| stored[0][place(p)..place(p) + d].iter().map(|k| k.abs()).sum::<f64>();
            let growth = if self.of.growth { f64::from(self.growth[before + row]) } else { 1.0 };
            let rounded = match self.of.kind {
                CacheType::Half => 0.0,
                _ => {
                    growth * largest / (d as f64).sqrt() / 32512.0 * (first..end).map(sum).fold(0.0, f64::max)
                }
            };
            let top = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            let (mut want, mut size) = (vec![0.0; d], vec![0.0; d]);
            for (p, w) in (first..end).zip(&weights) {
                for i in 0..d {
                    let v = stored[1][place(p) + i] * w / total;
                    want[i] += v;
                    size[i] += v.abs();
                }
            }
            for i in 0..d {
                // Weights and the new keys and values are rounded to halves; a weight is off by
                // twice what its score is.
                let error = (f64::from(got[(row * heads + head) * d + i]) - want[i]).abs();
                let share = error / ((2e-3 + 2.0 * rounded) * size[i] + 1e-5);
                worst = if share.is_nan() { f64::INFINITY } else { worst.max(share) };
            }
        }
        Ok(worst)
    }
}

/// Writes a row of each kind that rounding treats apart as a key and as a value.
///
/// # Panics
/// When the cache does not hold what the processor makes of it.
#[allow(dead_code, reason = "for the shim alone")]
pub(crate) fn check_rows<D: Device>(device: &D, kind: CacheType) -> Result<(), DeviceError> {
    const D: usize = 72;
    let shape = AttentionShape { heads: 1, kv_heads: 1, d: D, capacity: 64 };
    let plain = cases::activations(D, 9);
    let with = |at: usize, v: f32| {
        let mut row = plain.clone();
        row[at] = v;
        row
    };
    // Of equal magnitudes the first says the sign; halfway, tiny, and what is no number.
    let alternating = |i: usize| [-3.0, 3.0][i % 2];
    let cases = [
        plain.clone(),
        plain.iter().map(|v| -v).collect(),
        (0..D).map(alternating).collect(),
        (0..D).map(|i| alternating(i + 1)).collect(),
        (0..D).map(|i| i as f32 - 35.5).collect(),
        vec![0.0; D],
        vec![1e-31; D],
        plain.iter().map(|v| v * 1e-29).collect(),
        plain.iter().map(|v| v * 1e30).collect(),
        with(5, f32::INFINITY),
        with(71, f32::NEG_INFINITY),
        with(40, f32::NAN),
        with(33, -1e20),
    ];
    let (work, tables) = (AttentionWork::new(device, &shape)?, PageTables::new(device, 1, 64)?);
    let out = Buffer::zeroed(device, 4 * D, "out")?;
    for (position, row) in cases.iter().enumerate() {
        let cache = Cache::new(device, &shape, kind, 1)?;
        let step = Buffer::of(device, &[Step::new(&[position], &[0])], "step")?;
        let qkv = Buffer::of(device, &[&plain[..], row, row].concat(), "qkv")?;
        let options = HeadOptions {
            query_norm: None,
            key_norm: None,
            turns: None,
            growth: None,
            cap: 0.0,
            eps: EPS,
            window: 1,
            head_turn: None,
            constants: None,
            halved: None,
        };
        ops::attend_few(&step, &qkv, (&cache, &tables), &out, StepRows::of_one(1), &options, &work)?;
        for (which, of) in [&cache.keys, &cache.values].into_iter().enumerate() {
            let want = Row::of(kind, which, row);
            let got = rows::get(&want, which, &of.read::<u8>(of.bytes())?, position);
            // What is no number is not equal to itself: as text it is.
            assert_eq!(format!("{got:?}"), format!("{want:?}"), "{kind:?}, row {position} of cache {which}");
        }
        let out: Vec<f32> = out.read(D)?;
        // Sums are of halves.
        let (real, small) = (row.iter().all(|v| v.is_finite()), row.iter().all(|v| v.abs() < 6e4));
        let good = |v: &f32| v.is_finite() == real || (real && !small);
        assert!(out.iter().all(good), "{kind:?}, row {position}: {out:?}");
    }
    Ok(())
}
