//! Attention of prompts: the kernels of `kernels/cuda/prompt.cuh`.

use crate::{
    Address, Buffer, Device, DeviceError, Grid,
    ops::{AttentionShape, Cache, PageTables},
};
use bytemuck::{Pod, Zeroable};

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct PromptArgs {
    step: Address,
    qkv: Address,
    keys: Address,
    values: Address,
    table: Address,
    out: Address,
    heads: u32,
    kv_heads: u32,
    d: u32,
    window: u32,
    rows: u32,
    cap: f32,
}

const _: () = assert!(size_of::<PromptArgs>() == 72, "as prompt.cuh asserts");

/// Most rows that are left to the kernel that decodes.
const FEW: usize = 8;

/// Whether `rows` rows are run here: many, of heads that make whole 16-byte pieces.
pub(crate) fn takes(rows: usize, d: usize) -> bool {
    rows > FEW && d.is_multiple_of(8)
}

/// Attention of `rows` rows whose queries are ready in `qkv` and whose keys and values are in the
/// cache.
pub(crate) fn attend<D: Device>(
    step: &Buffer<'_, D>,
    qkv: &Buffer<'_, D>,
    (cache, tables): (&Cache<'_, D>, &PageTables<'_, D>),
    out: &Buffer<'_, D>,
    rows: usize,
    shape: &AttentionShape,
    (window, cap): (usize, f32),
) -> Result<(), DeviceError> {
    const ROWS: usize = 64; // of a block
    let u32_of = |n: usize| u32::try_from(n).expect("sizes of models fit 32 bits");
    let (kernel, columns, positions) = match shape.d {
        ..=64 => ("fb_prompt_64", 64, 64),
        65..=96 => ("fb_prompt_96", 96, 64),
        97..=128 => ("fb_prompt_128", 128, 64),
        _ => ("fb_prompt_256", 256, 32),
    };
    let args = PromptArgs {
        step: step.at(),
        qkv: qkv.at(),
        keys: cache.keys.at(),
        values: cache.values.at(),
        table: tables.at(),
        out: out.at(),
        heads: u32_of(shape.heads),
        kv_heads: u32_of(shape.kv_heads),
        d: u32_of(shape.d),
        window: if window < shape.capacity { u32_of(window) } else { 0 },
        rows: u32_of(rows),
        cap,
    };
    // Two places of keys and values, rows of an odd number of 16-byte pieces.
    let shared = u32_of(2 * 2 * positions * (2 * columns + 16));
    let blocks = (u32_of(shape.heads), u32_of(rows.div_ceil(ROWS)));
    step.device().launch(kernel, Grid { blocks, threads: 128, shared }, bytemuck::bytes_of(&args))
}
