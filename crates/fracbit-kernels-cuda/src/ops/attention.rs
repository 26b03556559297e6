//! The cache in pages, and attention of any number of rows over it.

use super::{PAGE, SEQUENCES, at, holds, u32_of};
use crate::{Address, Buffer, Device, DeviceError, Grid, prompt};
use bytemuck::{Pod, Zeroable};

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct HeadsArgs {
    step: Address,
    qkv: Address,
    query_norm: Address,
    key_norm: Address,
    turns: Address,
    growth: Address,
    keys: Address,
    values: Address,
    tables: Address,
    heads: u32,
    kv_heads: u32,
    d: u32,
    pages: u32,
    each: u32,
    eps: f32,
    scale: f32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct AttendArgs {
    step: Address,
    qkv: Address,
    keys: Address,
    values: Address,
    tables: Address,
    out: Address,
    heads: u32,
    kv_heads: u32,
    d: u32,
    pages: u32,
    window: u32,
    each: u32,
    cap: f32,
    pad: u32,
}

/// Shape of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head, at most 256.
    pub d: usize,
    /// Most positions of a sequence.
    pub capacity: usize,
}

impl AttentionShape {
    /// Floats of a row of queries, keys and values.
    #[must_use]
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.d
    }
}

/// Keys and values of one layer, f16 (pages, kv_heads, [`PAGE`], d).
#[derive(Debug)]
pub struct Cache<'d, D: Device> {
    /// Keys.
    pub keys: Buffer<'d, D>,
    /// Values.
    pub values: Buffer<'d, D>,
}

impl<'d, D: Device> Cache<'d, D> {
    /// An empty cache of so many pages.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When it would have 2^32 values or more.
    pub fn new(device: &'d D, shape: &AttentionShape, pages: usize) -> Result<Self, DeviceError> {
        let values = pages * Self::page(shape);
        assert!(u32::try_from(values).is_ok(), "a cache of less than 2^32 values, got {values}");
        let bytes = 2 * values;
        Ok(Self {
            keys: Buffer::zeroed(device, bytes, "KV cache")?,
            values: Buffer::zeroed(device, bytes, "KV cache")?,
        })
    }

    /// Most pages that a cache of this shape may have.
    #[must_use]
    pub fn most_pages(shape: &AttentionShape) -> usize {
        u32::MAX as usize / Self::page(shape).max(1)
    }

    /// Keys, or values, of a page.
    fn page(shape: &AttentionShape) -> usize {
        shape.kv_heads * PAGE * shape.d
    }

    /// Copies a page.
    ///
    /// # Errors
    /// When the copy fails.
    ///
    /// # Panics
    /// When there are no such pages.
    pub fn copy_page(&self, shape: &AttentionShape, from: usize, to: usize) -> Result<(), DeviceError> {
        let bytes = 2 * Self::page(shape);
        for all in [&self.keys, &self.values] {
            assert!((from.max(to) + 1) * bytes <= all.bytes(), "pages {from} and {to} of the cache");
            let at = |page: usize| all.at() + (page * bytes) as u64;
            all.device().copy(at(from), at(to), bytes)?;
        }
        Ok(())
    }
}

/// Which pages sequences have: rows of a table, (sequences, pages).
#[derive(Debug)]
pub struct PageTables<'d, D: Device> {
    tables: Buffer<'d, D>,
    /// Of each.
    pub(super) pages: usize,
}

impl<'d, D: Device> PageTables<'d, D> {
    /// Tables of sequences of at most `capacity` positions: each has the pages 0, 1 and so on.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn new(device: &'d D, sequences: usize, capacity: usize) -> Result<Self, DeviceError> {
        let pages = capacity.div_ceil(PAGE).max(1);
        let tables: Vec<u32> = (0..sequences).flat_map(|_| 0..u32_of(pages)).collect();
        Ok(Self { tables: Buffer::of(device, &tables, "tables of pages")?, pages })
    }

    /// Writes those of the first sequences.
    ///
    /// # Errors
    /// When the copy fails.
    ///
    /// # Panics
    /// When one has more pages than fit.
    pub fn write(&self, sequences: &[&[u32]]) -> Result<(), DeviceError> {
        let mut all = vec![0; sequences.len() * self.pages];
        for (row, pages) in all.chunks_exact_mut(self.pages).zip(sequences) {
            row[..pages.len()].copy_from_slice(pages);
        }
        self.tables.write(&all)
    }

    pub(crate) fn at(&self) -> Address {
        self.tables.at()
    }

    pub(super) fn check(&self, rows: StepRows, shape: &AttentionShape) {
        assert!(self.pages * PAGE >= shape.capacity, "tables of sequences of {} positions", shape.capacity);
        let held = self.tables.bytes() / (4 * self.pages);
        assert!((1..=SEQUENCES.min(held)).contains(&rows.sequences), "{} sequences", rows.sequences);
    }
}

/// The rows of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRows {
    /// Sequences.
    pub sequences: usize,
    /// Rows of each.
    pub each: usize,
}

impl StepRows {
    /// Some rows of one sequence.
    #[must_use]
    pub fn of_one(each: usize) -> Self {
        Self { sequences: 1, each }
    }

    /// One row of each of some sequences.
    #[must_use]
    pub fn one_of(sequences: usize) -> Self {
        Self { sequences, each: 1 }
    }

    /// All of them.
    #[must_use]
    pub fn all(self) -> usize {
        self.sequences * self.each
    }
}

/// What is done to heads before attention.
#[derive(Debug)]
pub struct HeadOptions<'a, 'd, D: Device> {
    /// Gain of the queries' norm.
    pub query_norm: Option<&'a Buffer<'d, D>>,
    /// Gain of the keys' norm.
    pub key_norm: Option<&'a Buffer<'d, D>>,
    /// Cosines and sines (capacity, d); none: no rotation.
    pub turns: Option<&'a Buffer<'d, D>>,
    /// Of the norms.
    pub eps: f32,
    /// Factors of queries by position (capacity), beside the root of their width.
    pub growth: Option<&'a Buffer<'d, D>>,
    /// Scores become `cap tanh(score / cap)`; 0: they stay.
    pub cap: f32,
    /// Sliding window; 0: none.
    pub window: usize,
}

impl<D: Device> HeadOptions<'_, '_, D> {
    /// Tables reach as far as sequences.
    pub(super) fn check(&self, shape: &AttentionShape) {
        if let Some(turns) = self.turns {
            holds(turns, shape.capacity * shape.d, "attention");
        }
        if let Some(growth) = self.growth {
            holds(growth, shape.capacity, "attention");
        }
    }
}

/// Norms, rotary embedding and attention: `qkv` is (rows, heads + 2 kv_heads, d), `out` (rows,
/// heads, d).
///
/// # Errors
/// When a launch is refused.
///
/// # Panics
/// When a buffer is too short, a head too wide, or several sequences have more rows than kernels of
/// prompts leave to others.
pub fn attention<D: Device>(
    step: &Buffer<'_, D>,
    qkv: &Buffer<'_, D>,
    (cache, tables): (&Cache<'_, D>, &PageTables<'_, D>),
    out: &Buffer<'_, D>,
    rows: StepRows,
    shape: &AttentionShape,
    options: &HeadOptions<'_, '_, D>,
) -> Result<(), DeviceError> {
    const WARPS: usize = 8;
    let device = step.device();
    let &AttentionShape { heads, kv_heads, d, .. } = shape;
    assert!(d <= 256, "heads of at most 256, got {d}");
    holds(qkv, rows.all() * shape.row(), "attention");
    holds(out, rows.all() * heads * d, "attention");
    tables.check(rows, shape);
    options.check(shape);
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    let args = HeadsArgs {
        step: step.at(),
        qkv: qkv.at(),
        query_norm: at(options.query_norm),
        key_norm: at(options.key_norm),
        turns: at(options.turns),
        growth: at(options.growth),
        keys: cache.keys.at(),
        values: cache.values.at(),
        tables: tables.at(),
        heads: u32_of(heads),
        kv_heads: u32_of(kv_heads),
        d: u32_of(d),
        pages: u32_of(tables.pages),
        each: u32_of(rows.each),
        eps: options.eps,
        scale: 1.0 / (d as f32).sqrt(),
        pad: 0,
    };
    let grid = Grid {
        blocks: (u32_of(heads + 2 * kv_heads), u32_of(rows.all())),
        threads: 128,
        shared: u32_of(256 + 4 * d),
    };
    device.launch("fb_heads", grid, bytemuck::bytes_of(&args))?;
    if rows.sequences == 1 && prompt::takes(rows.each, d) {
        return prompt::attend(
            step,
            qkv,
            (cache, tables),
            out,
            rows.each,
            shape,
            (options.window, options.cap),
        );
    }
    let args = AttendArgs {
        step: step.at(),
        qkv: qkv.at(),
        keys: cache.keys.at(),
        values: cache.values.at(),
        tables: tables.at(),
        out: out.at(),
        heads: u32_of(heads),
        kv_heads: u32_of(kv_heads),
        d: u32_of(d),
        pages: u32_of(tables.pages),
        window: u32_of(options.window),
        each: u32_of(rows.each),
        cap: options.cap,
        pad: 0,
    };
    let grid = Grid {
        blocks: (u32_of(heads), u32_of(rows.all())),
        threads: 32 * WARPS as u32,
        shared: u32_of(WARPS * (d + 2) * 4),
    };
    device.launch("fb_attend", grid, bytemuck::bytes_of(&args))
}

const _: () = assert!(size_of::<HeadsArgs>() == 104 && size_of::<AttendArgs>() == 80, "as model.cuh asserts");
