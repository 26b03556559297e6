//! Rotations of few rows, by many blocks a row: `rotate_few.cuh`.

use super::{FEW, Gate, RotationTables, at, holds, threads_for, u32_of};
use crate::{Address, Buffer, Device, DeviceError, Grid};
use bytemuck::{Pod, Zeroable};

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct RotateFewArgs {
    x: Address,
    out: Address,
    signs: Address,
    gain: Address,
    first: Address,
    second: Address,
    n: u32,
    order: u32,
    second_order: u32,
    walsh: u32,
    inverse: u32,
    gated: u32,
    norm: u32,
    eps: f32,
}

/// What is done to rows before they are rotated.
#[derive(Debug)]
pub struct Before<'a, 'd, D: Device> {
    /// Rows are (gate, up) and become `f(gate) up`.
    pub gate: Option<Gate>,
    /// Division by the root of the mean square, to which this is added.
    pub norm: Option<f32>,
    /// Multiplication by these, one for each value of a row.
    pub gain: Option<&'a Buffer<'d, D>>,
}

impl<D: Device> Default for Before<'_, '_, D> {
    fn default() -> Self {
        Self { gate: None, norm: None, gain: None }
    }
}

/// Signs of the Walsh matrix (order, order) that a rotation without other factors is divided by:
/// none where rows are short.
pub(super) fn walsh_factor(n: usize) -> (usize, Vec<f32>) {
    let order = if n >= 1 << 14 { 32 } else { 16.min(n / 4) };
    let sign = |i: usize| if ((i / order) & (i % order)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    (order, (0..order * order).map(sign).collect())
}

impl<D: Device> RotationTables<'_, D> {
    /// Order of the factor whose rows are dealt to blocks, second dense factor, Walsh matrix.
    fn parts(&self) -> (usize, usize, usize) {
        match self.orders[0] {
            0 => (self.split, 0, self.walsh / self.split.max(1)),
            order => (order, self.orders[1], self.walsh),
        }
    }

    /// Rows of the result of a block, and bytes of its shared memory.
    fn few_plan(&self, device: &D, rows: usize) -> (usize, usize) {
        let (order, second, _) = self.parts();
        let blocks = rows * order;
        let each = match device.limits().multiprocessors {
            many if blocks <= many => 1,
            many if blocks <= 2 * many => 2,
            _ => 4,
        };
        let length = self.n / order;
        let parts = (self.few_threads() as usize / (length / 4)).max(1);
        let rooms = parts + usize::from(second > 0);
        (each, 144 + 4 * each * (rooms * length + order))
    }

    fn few_threads(&self) -> u32 {
        threads_for(self.n / 4, 1024)
    }

    /// Whether [`rotate_few`](Self::rotate_few) takes `rows` rows of this width.
    #[must_use]
    pub fn takes_few(&self, device: &D, rows: usize) -> bool {
        let (order, ..) = self.parts();
        let whole = order > 0 && (self.n / order).is_multiple_of(4);
        rows <= FEW && whole && self.few_plan(device, rows).1 <= device.limits().shared
    }

    /// As [`rotate`](Self::rotate), for `rows` rows of `x` from row `first` on, which become the
    /// first of `out`, after what `before` asks for.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short, both are the same, or [`takes_few`](Self::takes_few) says no.
    pub fn rotate_few(
        &self,
        device: &D,
        x: &Buffer<'_, D>,
        out: &Buffer<'_, D>,
        (first, rows): (usize, usize),
        inverse: bool,
        before: &Before<'_, '_, D>,
    ) -> Result<(), DeviceError> {
        assert!(self.takes_few(device, rows), "a rotation of {rows} rows of {}", self.n);
        let width = self.n * (1 + usize::from(before.gate.is_some()));
        holds(x, (first + rows) * width, "rotate");
        holds(out, rows * self.n, "rotate");
        assert_ne!(x.at(), out.at(), "a rotation does not run in place");
        if let Some(gain) = before.gain {
            holds(gain, self.n, "rotate");
        }
        let matrices = if inverse { &self.backward } else { &self.forward };
        let ((order, second_order, walsh), (each, shared)) = (self.parts(), self.few_plan(device, rows));
        let args = RotateFewArgs {
            x: x.at() + 4 * (first * width) as u64,
            out: out.at(),
            signs: self.signs.at(),
            gain: at(before.gain),
            first: matrices[0].at(),
            second: at(matrices.get(1)),
            n: u32_of(self.n),
            order: u32_of(order),
            second_order: u32_of(second_order),
            walsh: u32_of(walsh),
            inverse: u32::from(inverse),
            gated: before.gate.map_or(0, |gate| gate as u32),
            norm: u32::from(before.norm.is_some()),
            eps: before.norm.unwrap_or_default(),
        };
        let grid = Grid {
            blocks: (u32_of(order.div_ceil(each)), u32_of(rows)),
            threads: self.few_threads(),
            shared: u32_of(shared),
        };
        device.launch(&format!("fb_rotate_few_{each}"), grid, bytemuck::bytes_of(&args))
    }
}

const _: () = assert!(size_of::<RotateFewArgs>() == 80, "as rotate_few.cuh asserts");
