//! Integer products of progressive codes with int8 activations (`kernels/cuda/w4a8.cuh`).

use crate::{
    Address, Device, DeviceError, Grid, Limits, MatrixPlan,
    args::{MatrixArgs, Round8Args, W4a8Args},
    part::u32_of,
};

/// Tokens up to which these products take the place of expanded weights, by counts: no measurement
/// stands behind this.
///
/// A block's 64 tokens, 128 rows and 128 columns are 64 tensor-core products and 300 other
/// instructions for each of four schedulers, 370 clocks, where 8 KiB from memory take 470; each 64
/// tokens read the codes again, from the second-level cache. Expanding writes 16 bits a weight.
pub(crate) const MOST_TOKENS: usize = 256;

/// Strips of a block (`W4A8_WARPS` of `w4a8.cuh`), and octets that are on their way.
const STRIPS: usize = 8;
const STAGES: usize = 4;
/// Bytes of an octet of a pair (`W4A8_PAIR`), and of an octet of a token's activations.
const PAIR: usize = 2112;
const TOKEN: usize = 136;
/// Threads of a block, in all kernels of the unit.
const THREADS: u32 = 256;
/// Octets of a range at least: fewer would wait for memory more than they work.
const FEWEST: usize = 8;

/// How a product is dealt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct W4a8Launch {
    /// Tokens of a block: 16, 32 or 64.
    pub tile: usize,
    /// Tiles of tokens.
    pub tiles: usize,
    /// Ranges of columns, whose sums are added in their order.
    pub ranges: usize,
    octets: usize,
    pairs: usize,
    tokens: usize,
}

impl W4a8Launch {
    /// The launch with so many tokens, within `room` bytes of scratch; `None` for matrices of other
    /// schemes, and where the room is too small.
    #[must_use]
    pub fn new(plan: &MatrixPlan, tokens: usize, limits: &Limits, room: usize) -> Option<Self> {
        if plan.gemv != "gemv_levels_16" || tokens == 0 {
            return None;
        }
        let tile = [16, 32].into_iter().find(|&tile| tokens <= tile).unwrap_or(64);
        let (tiles, octets) = (tokens.div_ceil(tile), plan.segments[0].octets);
        let blocks = plan.pairs.div_ceil(STRIPS / 2) * tiles;
        // Two blocks of 16 tokens fit on a multiprocessor.
        let resident = limits.multiprocessors * if tile == 16 { 2 } else { 1 };
        let ranges = (resident / blocks).clamp(1, (octets / FEWEST).max(1));
        let launch = |ranges| Self { tile, tiles, ranges, octets, pairs: plan.pairs, tokens };
        [ranges, 1].map(launch).into_iter().find(|launch| launch.scratch() <= room)
    }

    /// Bytes of the activations.
    fn rounded(&self) -> usize {
        self.tiles * self.tile * self.octets * TOKEN
    }

    /// Bytes of scratch: activations, then sums of ranges.
    fn scratch(&self) -> usize {
        let sums = if self.ranges > 1 { 4 * self.ranges * self.tokens * self.pairs * 32 } else { 0 };
        self.rounded() + sums
    }

    /// Launches the product: `x` is (tokens, cols), f32.
    pub(crate) fn run<D: Device>(
        &self,
        device: &D,
        w: MatrixArgs,
        (x, scratch, y): (Address, Address, Address),
        stride: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let round = Round8Args {
            x,
            to: scratch,
            tokens: u32_of(self.tokens),
            cols: w.cols,
            octets: u32_of(self.octets),
            tile: u32_of(self.tile),
        };
        let warps = THREADS as usize / 32;
        let blocks = (u32_of(self.octets.div_ceil(2)), u32_of((self.tiles * self.tile).div_ceil(warps)));
        device.launch(
            "fb_round8",
            Grid { blocks, threads: THREADS, shared: 0 },
            bytemuck::bytes_of(&round),
        )?;
        let args = W4a8Args {
            w,
            x: scratch,
            y,
            parts: scratch + self.rounded() as u64,
            tokens: u32_of(self.tokens),
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
            ranges: u32_of(self.ranges),
        };
        let grid = Grid {
            blocks: (u32_of(self.pairs.div_ceil(STRIPS / 2)), u32_of(self.tiles * self.ranges)),
            threads: THREADS,
            shared: u32_of(STAGES * (self.tile * TOKEN + STRIPS / 2 * PAIR)),
        };
        device.launch(&format!("fb_w4a8_{}", self.tile), grid, bytemuck::bytes_of(&args))?;
        if self.ranges == 1 {
            return Ok(());
        }
        let blocks = (w.rows.div_ceil(THREADS), u32_of(self.tokens));
        device.launch(
            "fb_w4a8_finish",
            Grid { blocks, threads: THREADS, shared: 0 },
            bytemuck::bytes_of(&args),
        )
    }
}
