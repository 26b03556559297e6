//! Attention of the few tokens of a decoding step: one launch of `attend_few.cuh`.

use super::{
    AttentionShape, Cache, CacheType, HeadOptions, PageTables, SEQUENCES, StepRows, at, cache::HeadTurnArgs,
    holds, key_constants::KeyConstantsArgs, u32_of,
};
use crate::{Address, Buffer, Device, DeviceError, Grid, Limits};
use bytemuck::{Pod, Zeroable};

/// Most tokens that [`attend_few`] takes.
pub const FEW: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct AttendFewArgs {
    step: Address,
    qkv: Address,
    query_norm: Address,
    key_norm: Address,
    turns: Address,
    growth: Address,
    keys: Address,
    values: Address,
    tables: Address,
    out: Address,
    partial: Address,
    counters: Address,
    heads: u32,
    kv_heads: u32,
    d: u32,
    pages: u32,
    window: u32,
    rows: u32,
    tiles: u32,
    eps: f32,
    scale: f32,
    cap: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct AttendCodesArgs {
    few: AttendFewArgs,
    turn: HeadTurnArgs,
    constants: KeyConstantsArgs,
}

/// How one launch is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Dimensions of the kernel, at least those of a head.
    dims: usize,
    /// Queries (tokens times query heads of a key-value head) of a block.
    queries: usize,
    /// Blocks that share a key-value head of a sequence.
    tiles: usize,
    /// Shares of the cache: blocks along y.
    shares: usize,
}

impl Plan {
    /// For `rows` tokens of each sequence. However many sequences there are, each is shared out as
    /// if it were alone, so that its sums are the same.
    fn new(shape: &AttentionShape, rows: usize, limits: &Limits) -> Self {
        let all = rows * shape.heads / shape.kv_heads;
        let dims = [64, 128, 256].into_iter().find(|&n| n >= shape.d).unwrap_or(256);
        let queries = if all > 8 && dims < 256 { 16 } else { 8 };
        let tiles = all.div_ceil(queries);
        // Two blocks a multiprocessor, or one where a block takes more than half its registers. A
        // block has eight warps of 16 positions; more blocks than the capacity needs have none.
        let together = if dims * queries > 1024 { 1 } else { 2 };
        let shares = (together * limits.multiprocessors) / (shape.kv_heads * tiles);
        Self { dims, queries, tiles, shares: shares.clamp(1, shape.capacity.div_ceil(128)) }
    }

    fn blocks(&self, shape: &AttentionShape, sequences: usize) -> usize {
        sequences * shape.kv_heads * self.tiles
    }

    /// Floats of the workspace: sums, most and weight of every query and share.
    fn partial(&self, shape: &AttentionShape, sequences: usize) -> usize {
        self.blocks(shape, sequences) * self.shares * self.queries * (self.dims + 2)
    }

    /// Bytes of a block, as `FewRoom` counts them.
    fn shared(&self, kind: CacheType) -> usize {
        const CHUNK: usize = 16; // positions that a warp takes together
        let (queries, dims) = (self.queries, self.dims);
        let (query, near) = match kind {
            CacheType::Half => (4 * dims + 16, 2 * CHUNK * (2 * dims + 64)),
            _ => (2 * dims + 16 + 4, kind.near(dims, CHUNK)),
        };
        queries * query + near + 8 * queries * (2 * 4 + 4 * dims)
    }
}

/// Workspace of [`attend_few`], for all layers.
#[derive(Debug)]
pub struct AttentionWork<'d, D: Device> {
    partial: Buffer<'d, D>,
    counters: Buffer<'d, D>,
    shape: AttentionShape,
}

impl<'d, D: Device> AttentionWork<'d, D> {
    /// Room for attention of up to [`FEW`] tokens.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn new(device: &'d D, shape: &AttentionShape) -> Result<Self, DeviceError> {
        // Rows of one sequence, or of several that together have no more.
        let plans = || (1..=FEW).map(|rows| (Plan::new(shape, rows, &device.limits()), most(rows)));
        let partial = plans().map(|(p, sequences)| p.partial(shape, sequences)).max().unwrap_or_default();
        let blocks = plans().map(|(p, sequences)| p.blocks(shape, sequences)).max().unwrap_or_default();
        Ok(Self {
            partial: Buffer::zeroed(device, 4 * partial, "sums of attention")?,
            counters: Buffer::zeroed(device, 4 * blocks, "counters of attention")?,
            shape: *shape,
        })
    }
}

/// Most sequences of `rows` rows each in a launch.
fn most(rows: usize) -> usize {
    (FEW / rows).min(SEQUENCES)
}

/// Norms, rotary embedding, cache and attention of up to [`FEW`] tokens: `qkv` is (rows, heads + 2
/// kv_heads, d), `out` (rows, heads, d); `qkv` stays as it is. Heads are of a multiple of 8
/// dimensions.
///
/// The launch reads the position while kernels launched before it may still run: none of them that
/// belongs to the same recording, or that the host did not wait for, may change `step`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short or the shape is not one that the kernel takes.
pub fn attend_few<D: Device>(
    step: &Buffer<'_, D>,
    qkv: &Buffer<'_, D>,
    (cache, tables): (&Cache<'_, D>, &PageTables<'_, D>),
    out: &Buffer<'_, D>,
    rows: StepRows,
    options: &HeadOptions<'_, '_, D>,
    work: &AttentionWork<'_, D>,
) -> Result<(), DeviceError> {
    let device = step.device();
    let shape = &work.shape;
    let AttentionShape { heads, kv_heads, d, .. } = *shape;
    let StepRows { sequences, each } = rows;
    assert!((1..=FEW).contains(&rows.all()), "attention of {} tokens in one step", rows.all());
    tables.check(rows, shape);
    assert!(d.is_multiple_of(8) && d <= 256, "heads of {d} dimensions");
    assert!(heads.is_multiple_of(kv_heads), "{heads} heads in {kv_heads} groups");
    holds(qkv, rows.all() * shape.row(), "attention");
    holds(out, rows.all() * heads * d, "attention");
    options.check(shape);
    let plan = Plan::new(shape, each, &device.limits());
    holds(&work.partial, plan.partial(shape, sequences), "attention");
    holds(&work.counters, plan.blocks(shape, sequences), "attention");
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    let args = AttendFewArgs {
        step: step.at(),
        qkv: qkv.at(),
        query_norm: at(options.query_norm),
        key_norm: at(options.key_norm),
        turns: at(options.turns),
        growth: at(options.growth),
        keys: cache.keys.at(),
        values: cache.values.at(),
        tables: tables.at(),
        out: out.at(),
        partial: work.partial.at(),
        counters: work.counters.at(),
        heads: u32_of(heads),
        kv_heads: u32_of(kv_heads),
        d: u32_of(d),
        pages: u32_of(tables.pages),
        window: u32_of(options.window),
        rows: u32_of(each),
        tiles: u32_of(plan.tiles),
        eps: options.eps,
        scale: 1.0 / (d as f32).sqrt(),
        cap: options.cap,
    };
    let args = AttendCodesArgs {
        few: args,
        turn: HeadTurnArgs::of(options.head_turn, d),
        constants: KeyConstantsArgs::of(options.constants, shape),
    };
    options.check_kind(cache.kind);
    let kernel = cache.kind.kernel(&format!("fb_attend_{}_{}", plan.dims, plan.queries));
    let grid = Grid {
        blocks: (u32_of(plan.blocks(shape, sequences)), u32_of(plan.shares)),
        threads: 256,
        shared: u32_of(plan.shared(cache.kind)),
    };
    match cache.kind {
        CacheType::Half => device.launch(&kernel, grid, bytemuck::bytes_of(&args.few)),
        _ => device.launch(&kernel, grid, bytemuck::bytes_of(&args)),
    }
}

const _: () = assert!(
    size_of::<AttendFewArgs>() == 136 && size_of::<AttendCodesArgs>() == 208,
    "as attend_few.cuh asserts"
);
