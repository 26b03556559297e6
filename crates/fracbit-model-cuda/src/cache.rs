//! Keys and values on a device, in pages.

use crate::Error;
use crate::model::head_rotation;
use fracbit_io::ModelConfig;
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{AttentionShape, Cache, CacheType, Halved, PageTables, Step},
};
use fracbit_model::{Cached, KvType, PageList, PageMemory, PagePool, Precision, pages::POSITIONS};
use fracbit_schedule::Features;
use half::f16;
use std::sync::atomic::{AtomicU32, Ordering};

const _: () = assert!(POSITIONS == fracbit_kernels_cuda::ops::PAGE, "pages are the same everywhere");

/// How a device holds a cache of a kind, of a model of this configuration.
pub(crate) fn cache_type(kind: KvType, config: &ModelConfig) -> Result<CacheType, Error> {
    let head_dim = config.head_dim;
    let of = match kind {
        KvType::I16 => CacheType::Half,
        KvType::I8 => CacheType::Eight,
        KvType::I6 => CacheType::Six,
        KvType::I4 => CacheType::Four,
        KvType::F32 => return Err(Error::Kind(kind)),
    };
    if of.takes(head_dim) { Ok(of) } else { Err(Error::Heads { kind, head_dim }) }
}

/// Pages on a device; a page has a number, the same in all layers.
#[derive(Debug)]
pub struct DeviceMemory<'d, D: Device> {
    caches: Vec<Cache<'d, D>>,
    /// What prompts read of caches of codes, a layer at a time.
    halved: Option<Halved<'d, D>>,
    kind: CacheType,
    shape: AttentionShape,
    /// Numbers that were given out.
    taken: AtomicU32,
}

impl<'d, D: Device> DeviceMemory<'d, D> {
    pub(crate) fn new(
        device: &'d D,
        shape: AttentionShape,
        kind: CacheType,
        layers: usize,
        pages: usize,
    ) -> Result<Self, DeviceError> {
        let caches =
            (0..layers).map(|_| Cache::new(device, &shape, kind, pages)).collect::<Result<_, _>>()?;
        let halved = kind.codes().then(|| Halved::new(device, &shape, pages)).transpose()?;
        Ok(Self { caches, halved, kind, shape, taken: AtomicU32::new(0) })
    }

    /// What they are.
    pub(crate) fn kind(&self) -> CacheType {
        self.kind
    }

    /// Room for a layer of a sequence in half precision, where caches are of codes.
    pub(crate) fn halved(&self) -> Option<&Halved<'d, D>> {
        self.halved.as_ref()
    }

    /// Those of each layer.
    pub(crate) fn caches(&self) -> &[Cache<'d, D>] {
        &self.caches
    }
}

impl<D: Device> PageMemory for DeviceMemory<'_, D> {
    type Room = u32;

    fn room(&self, _: usize) -> Result<u32, fracbit_model::Error> {
        // The pool asks no more often than it has pages, and all of these are there.
        Ok(self.taken.fetch_add(1, Ordering::Relaxed))
    }

    fn copy(&self, from: &u32, to: &mut u32) -> Result<(), fracbit_model::Error> {
        let (from, to) = (*from as usize, *to as usize);
        let copied = self.caches.iter().try_for_each(|cache| cache.copy_page(&self.shape, from, to));
        copied.map_err(|error| Error::from(error).into())
    }
}

/// One sequence.
#[derive(Debug)]
pub struct DeviceSequence<'d, D: Device> {
    pub(crate) list: PageList<DeviceMemory<'d, D>>,
    pub(crate) chunk: usize,
    pub(crate) precision: Precision,
    /// Rows that the last step gave it.
    pub(crate) rows: usize,
}

impl<'d, D: Device> DeviceSequence<'d, D> {
    pub(crate) fn new(pool: PagePool<DeviceMemory<'d, D>>, capacity: usize, chunk: usize) -> Self {
        Self { list: PageList::new(pool, capacity), chunk, precision: Precision::FULL, rows: 0 }
    }

    /// Numbers of the pages that are there.
    pub(crate) fn table(&self) -> Vec<u32> {
        self.list.reserved().iter().map(|page| *page.room()).collect()
    }
}

impl<'d, D: Device> DeviceSequence<'d, D> {
    /// Keys, as they are stored, and values of the first `tokens` in a layer, (positions, heads,
    /// width); `None` where there is no such layer.
    pub(crate) fn features(
        &self,
        device: &'d D,
        layer: usize,
        tokens: usize,
    ) -> Result<Option<Features>, DeviceError> {
        let memory = self.list.pool().memory();
        let (Some(cache), shape) = (memory.caches.get(layer), &memory.shape) else { return Ok(None) };
        let (tokens, mut pages) = (tokens.min(self.list.len()), self.table());
        let mut from = [&cache.keys, &cache.values];
        if let Some(halved) = &memory.halved {
            let step = Buffer::of(device, &[Step::new(&[tokens], &[])], "step")?;
            let tables = PageTables::new(device, 1, pages.len() * POSITIONS)?;
            tables.write(&[&pages])?;
            halved.fill(&step, (cache, &tables), shape, (0, 0), None)?;
            pages = (0..).take(pages.len()).collect();
            from = halved.buffers();
        }
        let page = POSITIONS * shape.kv_heads * shape.d;
        let gather = |from: &Buffer<'d, D>| {
            let pages = &pages[..tokens.div_ceil(POSITIONS)];
            let all = Buffer::room(device, 2 * page * pages.len().max(1), "a sequence's cache")?;
            for (i, &number) in pages.iter().enumerate() {
                let at = |n: usize| (2 * page * n) as u64;
                device.copy(from.at() + at(number as usize), all.at() + at(i), 2 * page)?;
            }
            let halves: Vec<u16> = all.read(page * pages.len())?;
            let mut out = Vec::with_capacity(tokens * shape.kv_heads * shape.d);
            for (position, head) in (0..tokens).flat_map(|p| (0..shape.kv_heads).map(move |head| (p, head))) {
                let row = (position / POSITIONS * shape.kv_heads + head) * POSITIONS + position % POSITIONS;
                let values = &halves[row * shape.d..(row + 1) * shape.d];
                out.extend(values.iter().map(|&bits| f16::from_bits(bits).to_f32()));
            }
            Ok::<_, DeviceError>(out)
        };
        let [mut keys, values] = [gather(from[0])?, gather(from[1])?];
        if memory.kind.codes() {
            head_rotation(shape.d).apply_rows_inverse(&mut keys);
        }
        Ok(Some(Features { keys, values }))
    }
}

impl<'d, D: Device> Cached for DeviceSequence<'d, D> {
    type Memory = DeviceMemory<'d, D>;

    fn cache(&self) -> &PageList<DeviceMemory<'d, D>> {
        &self.list
    }

    fn cache_mut(&mut self) -> &mut PageList<DeviceMemory<'d, D>> {
        &mut self.list
    }

    fn reserve(&mut self, tokens: usize) -> Result<(), fracbit_model::Error> {
        self.list.reserve(tokens)
    }

    fn chunk(&self) -> usize {
        self.chunk
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn config(head_dim: usize) -> ModelConfig {
        let text = format!(
            r#"{{"model_type":"llama","hidden_size":64,"intermediate_size":64,"num_hidden_layers":1,
            "num_attention_heads":2,"num_key_value_heads":1,"head_dim":{head_dim},"vocab_size":16,
            "rms_norm_eps":1e-5,"max_position_embeddings":64,"hidden_act":"silu"}}"#
        );
        ModelConfig::parse(text.as_bytes(), Path::new("config.json")).expect("a configuration")
    }

    #[test]
    fn pages_take_what_the_kinds_say() {
        for kind in [KvType::I8, KvType::I6, KvType::I4] {
            for d in [64, 80, 96, 128, 256] {
                let of = cache_type(kind, &config(d)).expect("heads of whole pieces");
                assert_eq!(of.page_bytes(3, d), POSITIONS * 3 * kind.pair_bytes(d), "{kind:?}, {d}");
            }
            let odd = cache_type(kind, &config(20)).expect_err("refused").to_string();
            assert!(odd.contains("20 numbers") && odd.contains("multiple of 8"), "{odd}");
        }
        // Halves have no scales.
        let half = cache_type(KvType::I16, &config(20)).expect("any heads");
        assert_eq!(half.page_bytes(3, 20), POSITIONS * 3 * 4 * 20);
        assert!(matches!(cache_type(KvType::F32, &config(64)), Err(Error::Kind(KvType::F32))));
    }
}
