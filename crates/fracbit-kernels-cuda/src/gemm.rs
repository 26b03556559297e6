//! Dense products with many tokens: the kernels of `kernels/cuda/gemm.cuh`.

use crate::{Address, Buffer, Device, DeviceError, Grid, Rows};
use bytemuck::{Pod, Zeroable};

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(crate) struct GemmArgs {
    pub(crate) w: Address,
    pub(crate) x: Address,
    pub(crate) bias: Address,
    pub(crate) y: Address,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) tokens: u32,
    pub(crate) y_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct HalveArgs {
    x: Address,
    out: Address,
    count: u64,
}

const _: () = assert!(size_of::<GemmArgs>() == 56 && size_of::<HalveArgs>() == 24, "as gemm.cuh asserts");

/// A kernel of the product: what a block makes, and where it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    kernel: &'static str,
    /// Outputs that a block makes of 128 tokens.
    outputs: usize,
    shared: u32,
}

/// Tokens of a block.
const TOKENS: usize = 128;

impl Gemm {
    /// Runs everywhere.
    pub const MMA: Self = Self { kernel: "fb_gemm", outputs: 128, shared: 3 * 2 * 128 * 64 };
    /// Run where products of warpgroups do ([`Device::warpgroups`]).
    pub const WARPGROUP: [Self; 3] = [
        Self { kernel: "fb_gemm_256", outputs: 256, shared: 192 << 10 },
        Self { kernel: "fb_gemm_128", outputs: 128, shared: 192 << 10 },
        Self { kernel: "fb_gemm_64", outputs: 64, shared: 192 << 10 },
    ];

    /// The name of the kernel.
    #[must_use]
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// The fastest for this many outputs and tokens: large blocks read less, small ones leave no
    /// multiprocessor idle.
    #[must_use]
    pub fn choose<D: Device>(device: &D, rows: usize, tokens: usize) -> Self {
        if !device.warpgroups() {
            return Self::MMA;
        }
        let cost = |gemm: &Self| {
            let blocks = rows.div_ceil(gemm.outputs) * tokens.div_ceil(TOKENS);
            // What a block takes beside its products, in outputs.
            blocks.div_ceil(device.limits().multiprocessors) * (gemm.outputs + 32)
        };
        Self::WARPGROUP.into_iter().min_by_key(cost).expect("there are three")
    }

    pub(crate) fn launch<D: Device>(self, device: &D, args: &GemmArgs) -> Result<(), DeviceError> {
        assert!(args.cols.is_multiple_of(8), "dense products of many tokens take multiples of 8 columns");
        let blocks = (args.tokens.div_ceil(TOKENS as u32), args.rows.div_ceil(self.outputs as u32));
        let grid = Grid { blocks, threads: 256, shared: self.shared };
        device.launch(self.kernel, grid, bytemuck::bytes_of(args))
    }
}

/// Rounds `count` floats to half precision, saturated.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn halve<'x, D: Device>(
    device: &D,
    x: impl Into<Rows<'x>>,
    out: &Buffer<'_, D>,
    (rows, cols): (usize, usize),
) -> Result<(), DeviceError> {
    let count = rows * cols;
    assert!(out.bytes() >= 2 * count, "halve: {count} halves in a buffer of {} bytes", out.bytes());
    let args = HalveArgs { x: x.into().floats(rows, cols), out: out.at(), count: count as u64 };
    let blocks = u32::try_from(count.div_ceil(8 * 256).clamp(1, 4096)).expect("clamped");
    let grid = Grid { blocks: (blocks, 1), threads: 256, shared: 0 };
    device.launch("fb_halve", grid, bytemuck::bytes_of(&args))
}
