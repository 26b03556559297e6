//! Everything but packed products: the kernels of the unit `model` with checked buffers.
//!
//! Rows are tokens, at most [`PROMPT`]; widths are in floats. Every function launches one kernel on
//! the device of its buffers.

pub use crate::gemm::{Gemm, halve};
use crate::{Address, Buffer, Device, DeviceError, Grid, Rows, gemm::GemmArgs};
use bytemuck::{Pod, Zeroable};

mod attend_few;
mod attention;
mod cache;
mod experts;
mod key_constants;
mod rotate_few;
mod sample;
pub use attend_few::{AttentionWork, FEW, attend_few};
pub use attention::{AttentionShape, HeadOptions, HeadTurn, PageTables, StepRows, attention};
pub use cache::{Cache, CacheType, Halved};
pub use experts::{combine, gather, route};
pub use key_constants::{KeyAngles, KeyConstants, KeyPlane};
pub use rotate_few::Before;
pub use sample::{Draw, SampleWork, sample};

/// Most tokens that run together.
pub const PROMPT: usize = 1024;

/// Most sequences of a step.
pub const SEQUENCES: usize = 8;
/// Positions of a page of the cache.
pub const PAGE: usize = 64;

/// `Step` of `model.cuh`: what changes from token to token.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable, PartialEq, Eq)]
pub struct Step {
    /// Tokens drawn.
    pub drawn: u32,
    /// Tokens in the cache, of each sequence.
    pub positions: [u32; SEQUENCES],
    /// Tokens to be run: as many of each sequence, one sequence behind the other.
    pub tokens: [u32; PROMPT],
}

impl Step {
    /// `tokens` (at most [`PROMPT`]) to be run after those that each of at most [`SEQUENCES`] has.
    ///
    /// # Panics
    /// When there are more.
    #[must_use]
    pub fn new(positions: &[usize], tokens: &[u32]) -> Self {
        let mut step = Self::zeroed();
        for (to, &position) in step.positions[..positions.len()].iter_mut().zip(positions) {
            *to = u32_of(position);
        }
        step.tokens[..tokens.len()].copy_from_slice(tokens);
        step
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct EmbedArgs {
    step: Address,
    table: Address,
    x: Address,
    width: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct NormArgs {
    x: Address,
    gain: Address,
    out: Address,
    width: u32,
    eps: f32,
    stride: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct GainArgs {
    x: Address,
    gain: Address,
    width: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct AddArgs {
    to: Address,
    x: Address,
    count: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct PlaceArgs {
    from: Address,
    places: Address,
    to: Address,
    width: u32,
    accumulate: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct CapArgs {
    x: Address,
    count: u32,
    cap: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct GateArgs {
    gate_up: Address,
    out: Address,
    width: u32,
    kind: u32,
}

/// What stands between gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x sigmoid(x)`.
    Silu = 1,
    /// GELU by a hyperbolic tangent.
    GeluTanh = 2,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct RotateArgs {
    x: Address,
    out: Address,
    signs: Address,
    factors: [Address; 2],
    orders: [u32; 2],
    n: u32,
    walsh: u32,
    inverse: u32,
    gated: u32,
    room: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct DenseArgs {
    w: Address,
    bias: Address,
    x: Address,
    y: Address,
    rows: u32,
    cols: u32,
    batch: u32,
    y_stride: u32,
    accumulate: u32,
    width: u32,
}

fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of models fit 32 bits")
}

fn holds<D: Device>(buffer: &Buffer<'_, D>, floats: usize, what: &str) {
    assert!(buffer.bytes() >= 4 * floats, "{what}: {floats} floats in a buffer of {} bytes", buffer.bytes());
}

/// Columns that the warps of a dense product take together (`dense.cuh`).
const DENSE_GROUP: usize = 512;

/// A block no larger than its work: whole warps.
fn threads_for(work: usize, most: u32) -> u32 {
    u32_of(work).next_multiple_of(32).clamp(32, most)
}

fn at<D: Device>(buffer: Option<&Buffer<'_, D>>) -> Address {
    buffer.map_or(0, Buffer::at)
}

/// `x[row] = table[token of row]`: `table` is f16 (vocabulary, width).
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When `x` is too short.
pub fn embed<D: Device>(
    device: &D,
    step: &Buffer<'_, D>,
    table: &Buffer<'_, D>,
    x: &Buffer<'_, D>,
    rows: usize,
    width: usize,
) -> Result<(), DeviceError> {
    holds(x, rows * width, "embed");
    let args = EmbedArgs { step: step.at(), table: table.at(), x: x.at(), width: u32_of(width), pad: 0 };
    let grid = Grid { blocks: (u32_of(rows), 1), threads: threads_for(width, 256), shared: 0 };
    device.launch("fb_embed", grid, bytemuck::bytes_of(&args))
}

/// `out = x / rms(x) gain` for `rows` rows of `x` from row `first` on; they become the first of
/// `out`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn norm<D: Device>(
    device: &D,
    x: &Buffer<'_, D>,
    gain: Option<&Buffer<'_, D>>,
    out: &Buffer<'_, D>,
    (first, rows, width): (usize, usize, usize),
    eps: f32,
) -> Result<(), DeviceError> {
    holds(x, (first + rows) * width, "norm");
    holds(out, rows * width, "norm");
    let args = NormArgs {
        x: x.at() + 4 * (first * width) as u64,
        gain: at(gain),
        out: out.at(),
        width: u32_of(width),
        eps,
        stride: u32_of(width),
        pad: 0,
    };
    launch_norm(device, rows, &args)
}

/// A part of each row in its place: `width` floats from `offset` on, of rows of `stride`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn norm_part<D: Device>(
    device: &D,
    x: &Buffer<'_, D>,
    gain: &Buffer<'_, D>,
    rows: usize,
    (offset, width, stride): (usize, usize, usize),
    eps: f32,
) -> Result<(), DeviceError> {
    assert!(offset + width <= stride, "a part of a row");
    holds(x, rows * stride, "norm");
    holds(gain, width, "norm");
    let at = x.at() + 4 * offset as u64;
    let (width, stride) = (u32_of(width), u32_of(stride));
    launch_norm(device, rows, &NormArgs { x: at, gain: gain.at(), out: at, width, eps, stride, pad: 0 })
}

fn launch_norm<D: Device>(device: &D, rows: usize, args: &NormArgs) -> Result<(), DeviceError> {
    let threads = threads_for(args.width as usize / 4, 1024);
    let grid = Grid { blocks: (u32_of(rows), 1), threads, shared: 132 };
    device.launch("fb_norm", grid, bytemuck::bytes_of(args))
}

/// Blocks of 256 threads for `count` values.
fn each(count: usize) -> Grid {
    Grid { blocks: (u32_of(count.div_ceil(256).clamp(1, 512)), 1), threads: 256, shared: 0 }
}

/// `to += x`, of `count` values.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn add<D: Device>(
    device: &D,
    to: &Buffer<'_, D>,
    x: &Buffer<'_, D>,
    count: usize,
) -> Result<(), DeviceError> {
    holds(to, count, "add");
    holds(x, count, "add");
    let args = AddArgs { to: to.at(), x: x.at(), count: u32_of(count), pad: 0 };
    device.launch("fb_add", each(count), bytemuck::bytes_of(&args))
}

/// `to[places[i]] = from[i]`, or `+=`, for every row: columns that several matrices made, one
/// behind the other, go where they belong. `places` are 32-bit and each comes once.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn place<D: Device>(
    device: &D,
    from: &Buffer<'_, D>,
    places: &Buffer<'_, D>,
    to: &Buffer<'_, D>,
    (rows, width): (usize, usize),
    accumulate: bool,
) -> Result<(), DeviceError> {
    holds(from, rows * width, "place");
    holds(places, width, "place");
    holds(to, rows * width, "place");
    let (from, places, to) = (from.at(), places.at(), to.at());
    let args = PlaceArgs { from, places, to, width: u32_of(width), accumulate: accumulate.into() };
    let grid = Grid { blocks: (u32_of(rows), u32_of(width.div_ceil(256).min(64))), threads: 256, shared: 0 };
    device.launch("fb_place", grid, bytemuck::bytes_of(&args))
}

/// `x = cap tanh(x / cap)`, of `count` values.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When the buffer is too short.
pub fn cap<D: Device>(device: &D, x: &Buffer<'_, D>, count: usize, cap: f32) -> Result<(), DeviceError> {
    holds(x, count, "cap");
    let args = CapArgs { x: x.at(), count: u32_of(count), cap };
    device.launch("fb_cap", each(count), bytemuck::bytes_of(&args))
}

/// `x *= gain` for every row.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn gain<D: Device>(
    device: &D,
    x: &Buffer<'_, D>,
    gain: &Buffer<'_, D>,
    (rows, width): (usize, usize),
) -> Result<(), DeviceError> {
    holds(x, rows * width, "gain");
    holds(gain, width, "gain");
    let args = GainArgs { x: x.at(), gain: gain.at(), width: u32_of(width), pad: 0 };
    let grid = Grid { blocks: (u32_of(rows), 1), threads: threads_for(width, 256), shared: 0 };
    device.launch("fb_gain", grid, bytemuck::bytes_of(&args))
}

/// `out = f(gate) up` for rows (gate, up) of twice `width`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn gate<D: Device>(
    device: &D,
    kind: Gate,
    gate_up: &Buffer<'_, D>,
    out: &Buffer<'_, D>,
    (rows, width): (usize, usize),
) -> Result<(), DeviceError> {
    holds(gate_up, 2 * rows * width, "gate");
    holds(out, rows * width, "gate");
    let args = GateArgs { gate_up: gate_up.at(), out: out.at(), width: u32_of(width), kind: kind as u32 };
    let grid = Grid { blocks: (u32_of(rows), u32_of(width.div_ceil(256).min(64))), threads: 256, shared: 0 };
    device.launch("fb_gate", grid, bytemuck::bytes_of(&args))
}

/// A rotation's parts on the device: what `rotate` takes.
#[derive(Debug)]
pub struct RotationTables<'d, D: Device> {
    n: usize,
    walsh: usize,
    orders: [usize; 2],
    /// Without a dense factor: order of the part of the Walsh matrix that stands in its place.
    split: usize,
    signs: Buffer<'d, D>,
    forward: Vec<Buffer<'d, D>>,
    backward: Vec<Buffer<'d, D>>,
}

impl<'d, D: Device> RotationTables<'d, D> {
    /// `signs` are (n), scaled; `factors` at most two dense matrices (order, order), slowest first;
    /// the rest of `n` is a Walsh matrix.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When the sizes do not make a rotation.
    pub fn new(device: &'d D, signs: &[f32], factors: &[(usize, Vec<f32>)]) -> Result<Self, DeviceError> {
        assert!(factors.len() <= 2, "at most two factors beside the Walsh matrix");
        let (mut orders, mut forward, mut backward) = ([0; 2], Vec::new(), Vec::new());
        for ((order, matrix), slot) in factors.iter().zip(&mut orders) {
            assert_eq!(matrix.len(), order * order, "a square factor");
            *slot = *order;
            forward.push(Buffer::of(device, matrix, "rotation")?);
            let transposed: Vec<f32> =
                (0..matrix.len()).map(|i| matrix[i % order * order + i / order]).collect();
            backward.push(Buffer::of(device, &transposed, "rotation")?);
        }
        let mut split = 0;
        if factors.is_empty() {
            let (order, matrix) = rotate_few::walsh_factor(signs.len());
            split = order;
            forward.push(Buffer::of(device, &matrix, "rotation")?);
            backward.push(Buffer::of(device, &matrix, "rotation")?);
        }
        let walsh = signs.len() / orders.iter().map(|&o| o.max(1)).product::<usize>();
        assert!(walsh.is_power_of_two(), "a Walsh matrix of order {walsh}");
        Ok(Self {
            n: signs.len(),
            walsh,
            orders,
            split,
            signs: Buffer::of(device, signs, "signs")?,
            forward,
            backward,
        })
    }

    /// `out = R x` or, with `inverse`, `R^T x`, for every row; with `gate` rows of `x` are (gate,
    /// up) and `f(gate) up` is rotated. A row of more than `4 n` bytes of shared memory goes
    /// through it in parts.
    ///
    /// # Errors
    /// When the launch is refused, or a dense factor's order exceeds the floats of shared memory.
    ///
    /// # Panics
    /// When a buffer is too short, or both are the same.
    pub fn rotate(
        &self,
        device: &D,
        x: &Buffer<'_, D>,
        out: &Buffer<'_, D>,
        rows: usize,
        inverse: bool,
        gate: Option<Gate>,
    ) -> Result<(), DeviceError> {
        if self.takes_few(device, rows) {
            return self.rotate_few(
                device,
                x,
                out,
                (0, rows),
                inverse,
                &Before { gate, ..Before::default() },
            );
        }
        holds(x, rows * self.n * (1 + usize::from(gate.is_some())), "rotate");
        holds(out, rows * self.n, "rotate");
        assert_ne!(x.at(), out.at(), "a rotation does not run in place");
        let matrices = if inverse { &self.backward } else { &self.forward };
        let room = self.n.min(device.limits().shared / 4);
        if let Some(&order) = self.orders.iter().find(|&&order| order > room) {
            let (bytes, total) = (4 * order, device.limits().shared);
            let what = format!("a rotation by a factor of order {order} in shared memory");
            return Err(DeviceError::Memory { what, bytes, free: total, total });
        }
        let mut args = RotateArgs {
            x: x.at(),
            out: out.at(),
            signs: self.signs.at(),
            orders: self.orders.map(u32_of),
            n: u32_of(self.n),
            walsh: u32_of(self.walsh),
            inverse: u32::from(inverse),
            gated: gate.map_or(0, |gate| gate as u32),
            room: u32_of(room),
            ..RotateArgs::default()
        };
        let given = self.orders.iter().filter(|&&order| order > 0).count();
        args.factors.iter_mut().zip(&matrices[..given]).for_each(|(slot, m)| *slot = m.at());
        let grid = Grid {
            blocks: (u32_of(rows), 1),
            threads: threads_for(self.n / 2, 1024),
            shared: u32_of(4 * room),
        };
        device.launch("fb_rotate", grid, bytemuck::bytes_of(&args))
    }
}

/// A dense half-precision matrix on the device.
#[derive(Debug)]
pub struct DenseMatrix<'d, D: Device> {
    w: Buffer<'d, D>,
    bias: Option<Buffer<'d, D>>,
    rows: usize,
    cols: usize,
}

impl<'d, D: Device> DenseMatrix<'d, D> {
    /// Copies f16 bits (rows, cols).
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn new(
        device: &'d D,
        (rows, cols): (usize, usize),
        weights: &[u16],
        bias: Option<&[f32]>,
    ) -> Result<Self, DeviceError> {
        assert_eq!(weights.len(), rows * cols, "weights of {rows} x {cols}");
        let bias = bias.map(|b| Buffer::of(device, b, "bias")).transpose()?;
        Ok(Self { w: Buffer::of(device, weights, "dense weights")?, bias, rows, cols })
    }

    /// Takes over f16 weights (rows, cols) that are on the device.
    ///
    /// # Panics
    /// When the buffer is too short.
    pub fn of_buffer(w: Buffer<'d, D>, rows: usize, cols: usize) -> Self {
        assert!(w.bytes() >= 2 * rows * cols, "weights of {rows} x {cols}");
        Self { w, bias: None, rows, cols }
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights.
    #[must_use]
    pub fn weights(&self) -> &Buffer<'d, D> {
        &self.w
    }

    /// As [`Reading::apply_at`](crate::Reading::apply_at).
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short.
    pub fn apply_at<'x>(
        &self,
        device: &D,
        x: impl Into<Rows<'x>>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        batch: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        holds(y, (batch - 1) * stride + offset + self.rows, "dense");
        let args = DenseArgs {
            w: self.w.at(),
            bias: at(self.bias.as_ref()),
            x: x.into().floats(batch, self.cols),
            y: y.at() + 4 * offset as u64,
            rows: u32_of(self.rows),
            cols: u32_of(self.cols),
            batch: u32_of(batch),
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
            width: 0,
        };
        let multiprocessors = device.limits().multiprocessors;
        if !self.cols.is_multiple_of(8) {
            let blocks = self.rows.div_ceil(8).min(32 * multiprocessors);
            let grid = Grid { blocks: (u32_of(blocks), 1), threads: 256, shared: 0 };
            return device.launch("fb_dense_any", grid, bytemuck::bytes_of(&args));
        }
        // Two blocks a multiprocessor share its memory; all columns together where they fit.
        let sums = 8 * 16 * 8 * size_of::<f32>();
        let room = (device.limits().shared / 2).saturating_sub(1024 + sums) / batch;
        let most = room.saturating_sub(128) / 4 / DENSE_GROUP * DENSE_GROUP;
        let width = self.cols.next_multiple_of(DENSE_GROUP).min(most.max(DENSE_GROUP));
        let args = DenseArgs { width: u32_of(width), ..args };
        let grid = Grid {
            blocks: (u32_of(self.rows.div_ceil(16).min(2 * multiprocessors)), 1),
            threads: 256,
            shared: u32_of(batch * (4 * width + 128) + sums),
        };
        device.launch("fb_dense", grid, bytemuck::bytes_of(&args))
    }
}

impl<D: Device> DenseMatrix<'_, D> {
    /// As [`apply_at`](Self::apply_at), for any number of tokens whose inputs are f16 (tokens,
    /// cols), by [`halve`].
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short or the columns are no multiple of 8.
    pub fn apply_many(
        &self,
        device: &D,
        halves: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        place: (usize, usize),
        tokens: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let gemm = Gemm::choose(device, self.rows, tokens);
        self.apply_many_by(gemm, device, halves, y, place, tokens, accumulate)
    }

    /// As [`apply_many`](Self::apply_many), by a kernel that the device must have.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short or the columns are no multiple of 8.
    #[expect(clippy::too_many_arguments, reason = "as `apply_many`, and the kernel")]
    pub fn apply_many_by(
        &self,
        gemm: Gemm,
        device: &D,
        halves: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        tokens: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        assert!(halves.bytes() >= 2 * tokens * self.cols, "inputs of {tokens} tokens");
        holds(y, (tokens - 1) * stride + offset + self.rows, "dense");
        let args = GemmArgs {
            w: self.w.at(),
            x: halves.at(),
            bias: at(self.bias.as_ref()),
            y: y.at() + 4 * offset as u64,
            rows: u32_of(self.rows),
            cols: u32_of(self.cols),
            tokens: u32_of(tokens),
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
            pad: 0,
        };
        gemm.launch(device, &args)
    }
}

const _: () = assert!(
    size_of::<Step>() == 4132
        && size_of::<RotateArgs>() == 72
        && size_of::<NormArgs>() == 40
        && size_of::<DenseArgs>() == 56,
    "as model.cuh and dense.cuh assert"
);
