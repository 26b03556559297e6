//! What mixtures of experts do beside products: `experts.cuh`.

use super::{at, holds, u32_of};
use crate::{Address, Buffer, Device, DeviceError, Grid, Rows};
use bytemuck::{Pod, Zeroable};

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct RouteArgs {
    x: Address,
    router: Address,
    logits: Address,
    cols: u32,
    experts: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct GatherArgs {
    x: Address,
    rows: Address,
    out: Address,
    cols: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct CombineArgs {
    x: Address,
    places: Address,
    weights: Address,
    out: Address,
    cols: u32,
    active: u32,
    accumulate: u32,
    pad: u32,
}

const _: () = assert!(size_of::<RouteArgs>() == 32 && size_of::<GatherArgs>() == 32);
const _: () = assert!(size_of::<CombineArgs>() == 48, "as experts.cuh asserts");

fn wide(rows: usize, cols: usize) -> Grid {
    Grid { blocks: (u32_of(rows), u32_of(cols.div_ceil(256).min(64))), threads: 256, shared: 0 }
}

/// Logits (rows, experts) of a router (experts, cols), f32, for `rows` rows of `x`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short.
pub fn route<'x, D: Device>(
    device: &D,
    x: impl Into<Rows<'x>>,
    router: &Buffer<'_, D>,
    logits: &Buffer<'_, D>,
    (rows, experts, cols): (usize, usize, usize),
) -> Result<(), DeviceError> {
    holds(router, experts * cols, "route");
    holds(logits, rows * experts, "route");
    let args = RouteArgs {
        x: x.into().floats(rows, cols),
        router: router.at(),
        logits: logits.at(),
        cols: u32_of(cols),
        experts: u32_of(experts),
    };
    let grid = Grid { blocks: (u32_of(experts.div_ceil(8)), u32_of(rows)), threads: 256, shared: 0 };
    device.launch("fb_route", grid, bytemuck::bytes_of(&args))
}

/// `out[p] = x[rows[p]]` for `pairs` rows of `cols` floats; `rows` are 32-bit and count from the
/// first of `x`.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short, but for rows that are not there.
pub fn gather<'x, D: Device>(
    device: &D,
    x: impl Into<Rows<'x>>,
    rows: &Buffer<'_, D>,
    out: &Buffer<'_, D>,
    (pairs, cols): (usize, usize),
) -> Result<(), DeviceError> {
    holds(rows, pairs, "gather");
    holds(out, pairs * cols, "gather");
    let args = GatherArgs {
        x: x.into().floats(1, cols),
        rows: rows.at(),
        out: out.at(),
        cols: u32_of(cols),
        pad: 0,
    };
    device.launch("fb_gather", wide(pairs, cols), bytemuck::bytes_of(&args))
}

/// `out[r] = Σ weights[r, k] x[places[r, k]]`, or `+=`, over the `active` experts of each of `rows`
/// rows of `cols` floats.
///
/// # Errors
/// When the launch is refused.
///
/// # Panics
/// When a buffer is too short, but for places that are not there.
pub fn combine<'x, D: Device>(
    device: &D,
    x: &Buffer<'_, D>,
    (places, weights): (&Buffer<'_, D>, &Buffer<'_, D>),
    out: impl Into<Rows<'x>>,
    (rows, active, cols): (usize, usize, usize),
    accumulate: bool,
) -> Result<(), DeviceError> {
    holds(places, rows * active, "combine");
    holds(weights, rows * active, "combine");
    let args = CombineArgs {
        x: at(Some(x)),
        places: places.at(),
        weights: weights.at(),
        out: out.into().floats(rows, cols),
        cols: u32_of(cols),
        active: u32_of(active),
        accumulate: u32::from(accumulate),
        pad: 0,
    };
    device.launch("fb_combine", wide(rows, cols), bytemuck::bytes_of(&args))
}
