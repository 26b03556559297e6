//! Attention of any number of rows over a cache in pages.

use super::{
    Cache, CacheType, Halved, KeyAngles, KeyConstants, PAGE, SEQUENCES, at, cache::HeadTurnArgs, holds,
    key_constants::KeyConstantsArgs, u32_of,
};
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

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct HeadsCodesArgs {
    heads: HeadsArgs,
    turn: HeadTurnArgs,
    constants: KeyConstantsArgs,
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

/// The orthogonal matrix that queries and keys of caches of codes are multiplied by, which changes
/// no inner product: signs, then the Kronecker product of a dense factor and a Walsh matrix.
#[derive(Debug)]
pub struct HeadTurn<'d, D: Device> {
    pub(super) signs: Buffer<'d, D>,
    pub(super) dense: Buffer<'d, D>,
    pub(super) order: usize,
    pub(super) walsh: usize,
}

impl<'d, D: Device> HeadTurn<'d, D> {
    /// Of heads of as many dimensions as there are `signs` (scaled by the root of their number),
    /// with dense `factors` (order, entries by rows), slowest first, and a Walsh matrix behind.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When the orders do not leave a power of two.
    pub fn new(device: &'d D, signs: &[f32], factors: &[(usize, Vec<f32>)]) -> Result<Self, DeviceError> {
        let (mut order, mut dense) = (1, vec![1.0]);
        for (n, entries) in factors {
            let all = order * n;
            let entry = |at: usize| {
                let (i, j) = (at / all, at % all);
                dense[i / n * order + j / n] * entries[i % n * n + j % n]
            };
            (dense, order) = ((0..all * all).map(entry).collect(), all);
        }
        let walsh = signs.len() / order;
        assert!(walsh.is_power_of_two() && order * walsh == signs.len(), "a Walsh matrix of order {walsh}");
        let [signs, dense] = [signs, &dense].map(|of| Buffer::of(device, of, "rotation of heads"));
        Ok(Self { signs: signs?, dense: dense?, order, walsh })
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
    /// Rotation of queries and keys, of caches of codes only; none: they stay.
    pub head_turn: Option<&'a HeadTurn<'d, D>>,
    /// What keys are stored without, of caches of codes only, and the angles of its planes, which
    /// may be missing where no head has any.
    pub constants: Option<(&'a KeyConstants<'d, D>, Option<&'a KeyAngles<'d, D>>)>,
    /// Where prompts find a cache of codes in half precision.
    pub halved: Option<&'a Halved<'d, D>>,
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

    /// Caches of halves take no options of codes.
    pub(super) fn check_kind(&self, kind: CacheType) {
        let codes = self.head_turn.is_some() || self.constants.is_some();
        assert!(
            kind.codes() || !codes,
            "heads are rotated, and go without constants, for caches of codes only"
        );
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
/// prompts leave to others; with a cache of codes, where no prompt of one sequence is given, or no
/// room to halve.
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
    let prompt = rows.sequences == 1 && prompt::takes(rows.each, d);
    let of = (options.window, options.cap);
    if cache.kind.codes() {
        const HEADS: usize = 4; // of a block
        let halved =
            options.halved.filter(|_| prompt).expect("a prompt over a cache of codes has room to halve");
        let args = HeadsCodesArgs {
            heads: args,
            turn: HeadTurnArgs::of(options.head_turn, d),
            constants: KeyConstantsArgs::of(options.constants, shape),
        };
        let grid = Grid {
            blocks: (u32_of((heads + 2 * kv_heads).div_ceil(HEADS)), u32_of(rows.all())),
            threads: 32 * HEADS as u32,
            shared: 1024 * HEADS as u32,
        };
        device.launch(&cache.kind.kernel("fb_heads"), grid, bytemuck::bytes_of(&args))?;
        halved.fill(step, (cache, tables), shape, (rows.each, options.window), Some(options))?;
        return prompt::attend(step, qkv, (&halved.cache, &halved.tables), out, rows.each, shape, of);
    }
    options.check_kind(cache.kind);
    let grid = Grid {
        blocks: (u32_of(heads + 2 * kv_heads), u32_of(rows.all())),
        threads: 128,
        shared: u32_of(256 + 4 * d),
    };
    device.launch("fb_heads", grid, bytemuck::bytes_of(&args))?;
    if prompt {
        return prompt::attend(step, qkv, (cache, tables), out, rows.each, shape, of);
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
const _: () = assert!(size_of::<HeadsCodesArgs>() == 176, "as kv_prompt.cuh asserts");
