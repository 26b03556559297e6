//! Drawing a token: `sample.cuh`.

use super::{holds, u32_of};
use crate::{Address, Buffer, Device, DeviceError, Grid};
use bytemuck::{Pod, Zeroable};

/// Logits of a block.
const TILE: usize = 1024;
/// Bytes of shared memory: sums, 512 groups and their places, a list of 4096 weights and tokens.
const SHARED: u32 = 1024 + 2 * 4 * 512 + 2 * 4 * 4096;

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct SampleArgs {
    step: Address,
    logits: Address,
    out: Address,
    uniforms: Address,
    seen: Address,
    groups: Address,
    tiles: Address,
    counter: Address,
    vocabulary: u32,
    top_k: u32,
    temperature: f32,
    top_p: f32,
    min_p: f32,
    penalty: f32,
}

/// How a token is drawn; see `sample.cuh`.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// 0: the largest logit.
    pub temperature: f32,
    /// 0: all.
    pub top_k: usize,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
    /// 1: none.
    pub penalty: f32,
}

/// Workspace of [`sample`].
#[derive(Debug)]
pub struct SampleWork<'d, D: Device> {
    groups: Buffer<'d, D>,
    tiles: Buffer<'d, D>,
    counter: Buffer<'d, D>,
    vocabulary: usize,
}

impl<'d, D: Device> SampleWork<'d, D> {
    /// Room for draws from `vocabulary` logits.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn new(device: &'d D, vocabulary: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            groups: Buffer::zeroed(device, 4 * vocabulary.div_ceil(32), "maxima of logits")?,
            tiles: Buffer::zeroed(device, 12 * vocabulary.div_ceil(TILE), "sums of logits")?,
            counter: Buffer::zeroed(device, 4, "counter of draws")?,
            vocabulary,
        })
    }
}

/// Draws a token from `logits` (vocabulary) into `out`, and advances `step`. `uniforms` holds a
/// number in 0..1 for every draw, `seen` a byte for every token.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn sample<D: Device>(
    step: &Buffer<'_, D>,
    logits: &Buffer<'_, D>,
    out: &Buffer<'_, D>,
    uniforms: &Buffer<'_, D>,
    seen: &Buffer<'_, D>,
    work: &SampleWork<'_, D>,
    draw: &Draw,
) -> Result<(), DeviceError> {
    let (device, vocabulary) = (step.device(), work.vocabulary);
    holds(logits, vocabulary, "sample");
    assert!(
        seen.bytes() >= vocabulary && uniforms.bytes() >= out.bytes(),
        "sample: a byte a token, a number a draw"
    );
    let args = SampleArgs {
        step: step.at(),
        logits: logits.at(),
        out: out.at(),
        uniforms: uniforms.at(),
        seen: if draw.penalty == 1.0 { 0 } else { seen.at() },
        groups: work.groups.at(),
        tiles: work.tiles.at(),
        counter: work.counter.at(),
        vocabulary: u32_of(vocabulary),
        top_k: u32_of(draw.top_k.min(vocabulary)),
        temperature: draw.temperature,
        top_p: draw.top_p,
        min_p: draw.min_p,
        penalty: draw.penalty,
    };
    let grid = Grid { blocks: (u32_of(vocabulary.div_ceil(TILE)), 1), threads: 1024, shared: SHARED };
    device.launch("fb_sample", grid, bytemuck::bytes_of(&args))
}

const _: () = assert!(size_of::<SampleArgs>() == 88, "as sample.cuh asserts");
