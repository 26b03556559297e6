//! The trellis encoder on a device: the bytes of [`Effort::Exact`](fracbit_trellis::Effort::Exact)
//! on the processor.

use crate::{Address, Buffer, Device, DeviceError, Grid};
use bytemuck::{Pod, Zeroable};
use fracbit_codebook::Rounder;
use fracbit_format::{Codebook, TILE, trellis::Steps};
use fracbit_trellis::TrellisRounder;
use std::sync::{Mutex, PoisonError};

/// New bits that the trace decides at once (`search.rs` of fracbit-trellis).
const GROUP_BITS: u32 = 6;
/// Threads of a block.
const THREADS: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct EncodeArgs {
    tiles: Address,
    values: Address,
    costs: Address,
    codes: Address,
    tile_count: u32,
    weights: u32,
    quarters: u32,
    doublings: u32,
    reach: u32,
    overlaps: u32,
    bounds: u32,
    pad: u32,
}

/// Codes tiles on a device, one block per tile.
///
/// As a [`Rounder`] it never fails: tiles that the device refuses are coded on the processor, with
/// the same bytes, and [`failure`](Self::failure) says why.
#[derive(Debug)]
pub struct TrellisEncoder<'d, D: Device> {
    device: &'d D,
    rounder: TrellisRounder,
    args: EncodeArgs,
    blocks: usize,
    threads: usize,
    _held: [Buffer<'d, D>; 2],
    /// One launch at a time: blocks share the workspace. Holds the first failure.
    failure: Mutex<Option<DeviceError>>,
}

fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of tiles fit 32 bits")
}

impl<'d, D: Device> TrellisEncoder<'d, D> {
    /// The encoder that gives the bytes of `rounder`, which should be an exact one. `threads` of a
    /// block is a choice of speed; 0: the most.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], also when a block's shared memory does not hold the costs of a step
    /// (rates below 2 bits on small GPUs).
    ///
    /// # Panics
    /// When the rounder is not of a trellis scheme.
    pub fn new(device: &'d D, rounder: TrellisRounder, threads: usize) -> Result<Self, DeviceError> {
        let scheme = rounder.codebook().scheme();
        let steps = Steps::of(scheme).expect("a trellis scheme");
        let parts = rounder.parts();
        let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
        let overlaps = 65536usize >> shifts.iter().min().expect("a trellis has steps");
        let bounds = bounds(&shifts, 0).max(bounds(&shifts, shifts.len() - parts.reach));
        let blocks = 2 * device.limits().multiprocessors;
        let args = EncodeArgs {
            weights: u32_of(parts.weights),
            quarters: u32::from(scheme.quarters()),
            doublings: parts.doublings,
            reach: u32_of(parts.reach),
            overlaps: u32_of(overlaps),
            bounds: u32_of(bounds),
            ..EncodeArgs::default()
        };
        let shared = shared(overlaps);
        if shared > device.limits().shared {
            let what = format!("encoding {scheme} in shared memory");
            let total = device.limits().shared;
            return Err(DeviceError::Memory { what, bytes: shared, free: total, total });
        }
        let values = Buffer::of(device, &parts.values, "values of states")?;
        let costs = Buffer::zeroed(device, 2 * blocks * bounds * overlaps, "costs of the trellis search")?;
        let args = EncodeArgs { values: values.at(), costs: costs.at(), ..args };
        let threads = if threads == 0 { THREADS } else { threads };
        Ok(Self { device, rounder, args, blocks, threads, _held: [values, costs], failure: Mutex::default() })
    }

    /// Codes of `tiles`, one after the other.
    ///
    /// # Errors
    /// When the device fails.
    pub fn encode_tiles(&self, tiles: &[[f32; TILE]]) -> Result<Vec<u8>, DeviceError> {
        let grid: Vec<i16> = tiles.iter().flat_map(|tile| self.rounder.grid(tile)).collect();
        let input = Buffer::of(self.device, &grid, "tiles")?;
        let bytes = tiles.len() * self.rounder.codebook().tile_bytes();
        let codes = Buffer::zeroed(self.device, bytes, "codes")?;
        let args =
            EncodeArgs { tiles: input.at(), codes: codes.at(), tile_count: u32_of(tiles.len()), ..self.args };
        let grid = Grid {
            blocks: (u32_of(self.blocks.min(tiles.len()).max(1)), 1),
            threads: u32_of(self.threads),
            shared: u32_of(shared(self.args.overlaps as usize)),
        };
        self.device.launch("fb_encode", grid, bytemuck::bytes_of(&args))?;
        codes.read(bytes)
    }

    /// Why the device was given up, if it was.
    #[must_use]
    pub fn failure(&self) -> Option<DeviceError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<D: Device + Sync> Rounder for TrellisEncoder<'_, D> {
    fn codebook(&self) -> &Codebook {
        self.rounder.codebook()
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            match self.encode_tiles(tiles) {
                Ok(found) => return codes.copy_from_slice(&found),
                Err(e) => *failure = Some(e),
            }
        }
        drop(failure);
        self.rounder.encode(tiles, codes);
    }
}

/// Shared memory of a block (`Viterbi` of `encode.cuh`): two cost arrays, bounds, states, sums.
fn shared(overlaps: usize) -> usize {
    4 * overlaps + 4 * 264 + 192
}

/// Bounds of the groups of steps `from..`: the same cut as in `search.rs`.
fn bounds(shifts: &[u32], from: usize) -> usize {
    let (mut count, mut bits) = (1, 0);
    for t in from..shifts.len() {
        let more = shifts[(t + shifts.len() - 1) % shifts.len()];
        if bits > 0 && bits + more > GROUP_BITS {
            count += 1;
            bits = 0;
        }
        bits += more;
    }
    count + 1
}
