//! Caches of keys and values in pages, of 16 bits or fewer.

use super::{
    AttentionShape, HeadOptions, HeadTurn, PAGE, PageTables, at, key_constants::KeyConstantsArgs, u32_of,
};
use crate::{Address, Buffer, Device, DeviceError, Grid};
use bytemuck::{Pod, Zeroable};

/// What the numbers of a cache are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheType {
    /// Half precision: for keys f16 (pages, kv_heads, [`PAGE`], d), and the same for values.
    #[default]
    Half,
    /// 8-bit integers and a scale for every key and value of a head.
    ///
    /// Keys, and values, are (pages, kv_heads) blocks of the codes of [`PAGE`] positions, then
    /// their f32 scales. Keys lie position by position, signed bytes in rows padded to 16
    /// dimensions. Values are bytes that are 128 more; those of two neighbouring positions
    /// alternate.
    Eight,
    /// Keys as in [`Self::Eight`] and values as in [`Self::Four`].
    Six,
    /// Places in a table of sixteen levels and a scale: as in [`Self::Eight`], but a byte is two
    /// dimensions, the first in its lower half.
    Four,
}

impl CacheType {
    /// Bits of a key's number and of a value's.
    const fn bits(self) -> [usize; 2] {
        match self {
            Self::Half => [16, 16],
            Self::Eight => [8, 8],
            Self::Six => [8, 4],
            Self::Four => [4, 4],
        }
    }

    /// Whether it is codes with scales.
    #[must_use]
    pub const fn codes(self) -> bool {
        !matches!(self, Self::Half)
    }

    /// Bytes that the keys of a head on a page take, and its values.
    #[must_use]
    pub const fn blocks(self, d: usize) -> [usize; 2] {
        let [key, value] = self.bits();
        match self {
            Self::Half => [PAGE * 2 * d; 2],
            _ => [PAGE * (d.next_multiple_of(16) * key / 8 + 4), PAGE * (d * value / 8 + 4)],
        }
    }

    /// Bytes of keys and values of a page of a layer.
    #[must_use]
    pub const fn page_bytes(self, kv_heads: usize, d: usize) -> usize {
        let [key, value] = self.blocks(d);
        kv_heads * (key + value)
    }

    /// Whether kernels take heads of `d` dimensions: of codes, multiples of 8.
    #[must_use]
    pub const fn takes(self, d: usize) -> bool {
        !self.codes() || d.is_multiple_of(8)
    }

    /// A kernel's name for this type.
    pub(crate) fn kernel(self, name: &str) -> String {
        match self {
            Self::Half => name.to_owned(),
            Self::Eight => format!("{name}_kv8"),
            Self::Six => format!("{name}_kv6"),
            Self::Four => format!("{name}_kv4"),
        }
    }

    /// Bytes of a block of keys, and of values, of `positions` as a kernel lays them out in shared
    /// memory for heads of up to `dims` dimensions; of codes.
    pub(super) const fn near(self, dims: usize, positions: usize) -> usize {
        let [key, value] = self.bits();
        positions * (dims * key / 8 + 4 + dims * value / 8 + 4)
    }
}

/// Keys and values of one layer.
#[derive(Debug)]
pub struct Cache<'d, D: Device> {
    /// Keys.
    pub keys: Buffer<'d, D>,
    /// Values.
    pub values: Buffer<'d, D>,
    /// What they are.
    pub kind: CacheType,
}

impl<'d, D: Device> Cache<'d, D> {
    /// An empty cache of so many pages.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When it would have 2^32 values or more, or heads are not such that kernels take.
    pub fn new(
        device: &'d D,
        shape: &AttentionShape,
        kind: CacheType,
        pages: usize,
    ) -> Result<Self, DeviceError> {
        assert!(pages <= Self::most_pages(shape), "a cache of less than 2^32 values, got {pages} pages");
        assert!(kind.takes(shape.d), "a cache of {kind:?} of heads of {} dimensions", shape.d);
        let [keys, values] = kind.blocks(shape.d).map(|block| pages * shape.kv_heads * block);
        Ok(Self {
            keys: Buffer::zeroed(device, keys, "KV cache")?,
            values: Buffer::zeroed(device, values, "KV cache")?,
            kind,
        })
    }

    /// Most pages that a cache of this shape may have.
    #[must_use]
    pub fn most_pages(shape: &AttentionShape) -> usize {
        u32::MAX as usize / (shape.kv_heads * PAGE * shape.d).max(1)
    }

    /// Copies a page, scales and all.
    ///
    /// # Errors
    /// When the copy fails.
    ///
    /// # Panics
    /// When there are no such pages.
    pub fn copy_page(&self, shape: &AttentionShape, from: usize, to: usize) -> Result<(), DeviceError> {
        for (all, block) in [&self.keys, &self.values].into_iter().zip(self.kind.blocks(shape.d)) {
            let bytes = shape.kv_heads * block;
            assert!((from.max(to) + 1) * bytes <= all.bytes(), "pages {from} and {to} of the cache");
            let at = |page: usize| all.at() + (page * bytes) as u64;
            all.device().copy(at(from), at(to), bytes)?;
        }
        Ok(())
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct HalveCodesArgs {
    step: Address,
    keys: Address,
    values: Address,
    table: Address,
    to_keys: Address,
    to_values: Address,
    turns: Address,
    turn: HeadTurnArgs,
    constants: KeyConstantsArgs,
    kv_heads: u32,
    d: u32,
    window: u32,
    rows: u32,
}

const _: () = assert!(size_of::<HalveCodesArgs>() == 144, "as kv_prompt.cuh asserts");

/// Room for one layer's cache of a sequence in half precision: what prompts read of a cache of
/// codes.
#[derive(Debug)]
pub struct Halved<'d, D: Device> {
    pub(crate) cache: Cache<'d, D>,
    /// Pages lie in the order of the sequence.
    pub(crate) tables: PageTables<'d, D>,
    pages: usize,
}

impl<'d, D: Device> Halved<'d, D> {
    /// For sequences of at most so many pages.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn new(device: &'d D, shape: &AttentionShape, pages: usize) -> Result<Self, DeviceError> {
        let cache = Cache::new(device, shape, CacheType::Half, pages)?;
        Ok(Self { cache, tables: PageTables::new(device, 1, pages * PAGE)?, pages })
    }

    /// Turns what the `rows` rows behind the position of `step` see into halves, through the first
    /// table of pages: as they are stored, or with the constants of `whole`, turned as it says.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When the cache is none of codes, or sequences have more pages than there is room for.
    pub fn fill(
        &self,
        step: &Buffer<'_, D>,
        (cache, tables): (&Cache<'_, D>, &PageTables<'_, D>),
        shape: &AttentionShape,
        (rows, window): (usize, usize),
        whole: Option<&HeadOptions<'_, '_, D>>,
    ) -> Result<(), DeviceError> {
        const WARPS: usize = 8;
        assert!(cache.kind.codes(), "a cache of codes");
        let whole = whole.filter(|options| options.constants.is_some());
        // Tables may be of longer sequences than there are pages for.
        let pages = tables.pages.min(self.pages);
        let args = HalveCodesArgs {
            step: step.at(),
            keys: cache.keys.at(),
            values: cache.values.at(),
            table: tables.at(),
            to_keys: self.cache.keys.at(),
            to_values: self.cache.values.at(),
            turns: at(whole.and_then(|options| options.turns)),
            turn: HeadTurnArgs::of(whole.and_then(|options| options.head_turn), shape.d),
            constants: KeyConstantsArgs::of(whole.and_then(|options| options.constants), shape),
            kv_heads: u32_of(shape.kv_heads),
            d: u32_of(shape.d),
            window: u32_of(window),
            rows: u32_of(rows),
        };
        let blocks = (u32_of(pages * shape.kv_heads), 2);
        let (name, shared) =
            if whole.is_some() { ("fb_halve_whole", 1024 * WARPS as u32) } else { ("fb_halve", 0) };
        let grid = Grid { blocks, threads: 32 * WARPS as u32, shared };
        step.device().launch(&cache.kind.kernel(name), grid, bytemuck::bytes_of(&args))
    }

    /// Keys and values, f16 (pages, kv_heads, [`PAGE`], d).
    #[must_use]
    pub fn buffers(&self) -> [&Buffer<'d, D>; 2] {
        [&self.cache.keys, &self.cache.values]
    }
}

/// `HeadTurn` of `kv_codes.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct HeadTurnArgs {
    signs: Address,
    dense: Address,
    order: u32,
    walsh: u32,
}

impl HeadTurnArgs {
    pub(super) fn of<D: Device>(turn: Option<&HeadTurn<'_, D>>, d: usize) -> Self {
        let Some(turn) = turn else { return Self::default() };
        assert_eq!(turn.order * turn.walsh, d, "a rotation of heads of {d}");
        Self {
            signs: turn.signs.at(),
            dense: turn.dense.at(),
            order: u32_of(turn.order),
            walsh: u32_of(turn.walsh),
        }
    }
}
