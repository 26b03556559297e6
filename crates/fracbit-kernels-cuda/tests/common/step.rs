//! Attention of a few tokens on any device against sums in f64: what `tests/step.rs` runs on the
//! shim and `examples/cuda_check` on a GPU.

use fracbit_kernels::cases;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{self, AttentionShape, AttentionWork, Cache, HeadOptions, PAGE, PageTables, Step, StepRows},
};
use half::f16;

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
}

/// An [`Attention`] on a device.
#[derive(Debug)]
pub(crate) struct Bench<'d, D: Device> {
    of: Attention,
    pub(crate) shape: AttentionShape,
    norms: [Vec<f32>; 2],
    turns: Vec<f32>,
    qkv: Vec<f32>,
    stored: [Vec<u16>; 2], // keys and values, (kv_heads, capacity, d)
    growth: Vec<f32>,
    on: [Buffer<'d, D>; 7],
    cache: Cache<'d, D>,
    tables: PageTables<'d, D>,
    /// Pages of each sequence.
    places: Vec<Vec<u32>>,
    work: AttentionWork<'d, D>,
}

/// Values of pages that nobody has.
const NOTHING: u16 = 0x7E00;

const EPS: f32 = 1e-5;

impl Attention {
    pub(crate) fn on<D: Device>(self, device: &D, seed: u64) -> Result<Bench<'_, D>, DeviceError> {
        let Self { heads, kv_heads, d, capacity, sequences, .. } = self;
        let shape = AttentionShape { heads, kv_heads, d, capacity };
        let norms = [1, 2].map(|i| cases::activations(d, seed + i));
        let half = d / 2;
        let angle = |i: usize| (i / d) as f32 * 0.7 / (1.0 + (i % half) as f32);
        let turn = |i: usize| if i % d < half { angle(i).cos() } else { angle(i).sin() };
        let turns: Vec<f32> = (0..capacity * d).map(turn).collect();
        let qkv = cases::activations(8 * shape.row(), seed + 3);
        let stored = [4, 5].map(|i| -> Vec<u16> {
            let values = cases::activations(kv_heads * capacity * d, seed + i);
            values.into_iter().map(|v| f16::from_f32(v).to_bits()).collect()
        });
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
        let (cache, work) = (Cache::new(device, &shape, pool)?, AttentionWork::new(device, &shape)?);
        Ok(Bench { of: self, shape, norms, turns, qkv, stored, growth, on, cache, tables, places, work })
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl<D: Device> Bench<'_, D> {
    /// Bytes of all keys.
    #[allow(dead_code, reason = "for timings on a GPU")]
    pub(crate) fn bytes(&self) -> usize {
        self.cache.keys.bytes()
    }

    /// Where a value of a (kv_heads, capacity, d) cache of a sequence lies in the pages.
    fn at_page(&self, sequence: usize, i: usize) -> usize {
        let AttentionShape { kv_heads, d, capacity, .. } = self.shape;
        let (kv, position) = (i / d / capacity, i / d % capacity);
        let page = self.places[sequence][position / PAGE] as usize;
        ((page * kv_heads + kv) * PAGE + position % PAGE) * d + i % d
    }

    /// Writes keys and values of some sequences to their pages; all others hold no numbers.
    fn store(&self, sequences: &[&[Vec<u16>; 2]]) -> Result<(), DeviceError> {
        for (which, to) in [&self.cache.keys, &self.cache.values].into_iter().enumerate() {
            let mut all = vec![NOTHING; to.bytes() / 2];
            for (sequence, stored) in sequences.iter().enumerate() {
                for (i, &value) in stored[which].iter().enumerate() {
                    all[self.at_page(sequence, i)] = value;
                }
            }
            to.write(&all)?;
        }
        Ok(())
    }

    /// The stored keys and values without those from position `before` on.
    fn stored_before(&self, before: usize) -> [Vec<u16>; 2] {
        let AttentionShape { kv_heads, d, capacity, .. } = self.shape;
        let mut caches = self.stored.clone();
        for cache in &mut caches {
            for kv in 0..kv_heads {
                cache[(kv * capacity + before) * d..(kv + 1) * capacity * d].fill(NOTHING);
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
        };
        ops::attend_few(step, qkv, (cache, &self.tables), out, rows, &options, &self.work)
    }

    /// One head in f64: norm and rotation.
    fn head(&self, row: usize, head: usize, norm: Option<&[f32]>, position: Option<usize>) -> Vec<f64> {
        let d = self.of.d;
        let at = (row * (self.of.heads + 2 * self.of.kv_heads) + head) * d;
        let mut x: Vec<f64> = self.qkv[at..at + d].iter().map(|&v| f64::from(v)).collect();
        if let Some(gain) = norm.filter(|_| self.of.norms) {
            let square: f64 = x.iter().map(|v| v * v).sum();
            let by = 1.0 / (square / d as f64 + f64::from(EPS)).sqrt();
            x.iter_mut().zip(gain).for_each(|(v, &g)| *v *= by * f64::from(g));
        }
        let Some(position) = position.filter(|_| self.of.rotation) else { return x };
        let turns = &self.turns[position * d..(position + 1) * d];
        (0..d)
            .map(|i| {
                let (c, s) = (f64::from(turns[i % (d / 2)]), f64::from(turns[d / 2 + i % (d / 2)]));
                if i < d / 2 { x[i] * c - x[i + d / 2] * s } else { x[i] * c + x[i - d / 2] * s }
            })
            .collect()
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
        self.store(&[&caches])?;
        let launch = || self.launch(&self.cache, StepRows::of_one(rows));
        launch()?;
        let got: Vec<f32> = out.read(rows * heads * d)?;
        launch()?;
        assert_eq!(got, out.read::<f32>(rows * heads * d)?, "a launch repeats itself");
        let all = [&self.cache.keys, &self.cache.values].map(|b| b.read::<u16>(b.bytes() / 2));
        let [keys, values] = all;
        let all = [keys?, values?];
        let numbers = all[0].iter().filter(|&&v| v != NOTHING).count();
        assert_eq!(numbers, kv_heads * (before + rows) * d, "other pages are left alone");
        let gather = |from: &Vec<u16>| (0..caches[0].len()).map(|i| from[self.at_page(0, i)]).collect();
        let written: [Vec<u16>; 2] = all.each_ref().map(gather);
        for (which, cache) in caches.iter_mut().enumerate() {
            for (row, kv) in (0..rows).flat_map(|row| (0..kv_heads).map(move |kv| (row, kv))) {
                let norm = (which == 0).then_some(self.norms[1].as_slice());
                let position = (which == 0).then_some(before + row);
                let want = self.head(row, heads + which * kv_heads + kv, norm, position);
                let at = (kv * capacity + before + row) * d;
                for (slot, v) in cache[at..at + d].iter_mut().zip(want) {
                    *slot = f16::from_f32(v as f32).to_bits();
                }
            }
            for (i, (&want, &got)) in cache.iter().zip(&written[which]).enumerate() {
                let value = |bits| f16::from_bits(bits).to_f64();
                let near = (value(want) - value(got)).abs() <= 2e-3 * value(want).abs() + 1e-5;
                assert!(want == got || near, "value {i} of cache {which}: {want:#x}, got {got:#x}");
            }
        }
        let stored =
            caches.map(|c| -> Vec<f64> { c.into_iter().map(|h| f16::from_bits(h).to_f64()).collect() });
        let mut worst = 0f64;
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let query = self.head(row, head, Some(&self.norms[0]), Some(before + row));
            let end = before + row + 1;
            let first = if window > 0 { end.saturating_sub(window) } else { 0 };
            let place = |p: usize| (head / (heads / kv_heads) * capacity + p) * d;
            let score = |p: usize| -> f64 {
                let key = &stored[0][place(p)..place(p) + d];
                let by = if self.of.growth { f64::from(self.growth[before + row]) } else { 1.0 };
                let score = by * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                let cap = f64::from(self.of.cap);
                if cap > 0.0 { cap * (score / cap).tanh() } else { score }
            };
            let scores: Vec<f64> = (first..end).map(score).collect();
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
                // Weights and the new keys and values are rounded to halves.
                let error = (f64::from(got[(row * heads + head) * d + i]) - want[i]).abs();
                let share = error / (2e-3 * size[i] + 1e-5);
                worst = if share.is_nan() { f64::INFINITY } else { worst.max(share) };
            }
        }
        Ok(worst)
    }
}
