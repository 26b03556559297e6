//! The trellis encoder on a device: the bytes of [`Effort::Exact`](fracbit_trellis::Effort::Exact)
//! on the processor.

use crate::{Address, Buffer, Device, DeviceError, Grid};
use bytemuck::{Pod, Zeroable};
use fracbit_base::Code;
use fracbit_codebook::Rounder;
use fracbit_format::{
    Codebook, TILE,
    trellis::{STATE_BITS, STATES, Steps, hash_fast, hash_fine, hash16},
};
use fracbit_trellis::{SearchParts, TrellisRounder};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// New bits that the trace decides at once (`search.rs` of fracbit-trellis).
const GROUP_BITS: u32 = 6;
/// Threads of a block.
const THREADS: u32 = 1024;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct EncodeArgs {
    tiles: Address,
    entries: Address,
    costs: Address,
    codes: Address,
    tile_count: u32,
    doublings: u32,
    bounds: u32,
    least: i32,
    most: i32,
    pad: u32,
}

/// Codes tiles on a device, [`batch`](Rounder::batch) at a time: two in every block.
///
/// As a [`Rounder`] it never fails: tiles that the device refuses are coded on the processor, with
/// the same bytes, and [`failure`](Self::failure) says why.
#[derive(Debug)]
pub struct TrellisEncoder<'d, D: Device> {
    device: &'d D,
    rounder: TrellisRounder,
    args: EncodeArgs,
    kernel: String,
    blocks: usize,
    shared: usize,
    _held: [Buffer<'d, D>; 2],
    /// One launch at a time: blocks share the workspace.
    turn: Mutex<Turn<'d, D>>,
}

/// What a launch needs alone.
#[derive(Debug)]
struct Turn<'d, D: Device> {
    /// Tiles and codes of the last launch, room for the next: allocating waits for the device.
    room: Option<[Buffer<'d, D>; 2]>,
    /// The first failure.
    failure: Option<DeviceError>,
}

/// Tiles that a block codes together, in the halves of its words.
const PAIR: usize = 2;

fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of tiles fit 32 bits")
}

impl<'d, D: Device> TrellisEncoder<'d, D> {
    /// The encoder that gives the bytes of `rounder`, which should be an exact one.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], also when a block's shared memory does not hold the costs of a step
    /// (rates below 2 bits on small GPUs); [`DeviceError::Call`] for tables of a size that no
    /// kernel is made for.
    ///
    /// # Panics
    /// When the rounder is not of a trellis scheme.
    pub fn new(device: &'d D, rounder: TrellisRounder) -> Result<Self, DeviceError> {
        let scheme = rounder.codebook().scheme();
        let steps = Steps::of(scheme).expect("a trellis scheme");
        let code = scheme.code().expect("a trellis scheme");
        let kernel = format!("fb_encode_{}_{}", code.name(), scheme.quarters());
        let parts = rounder.parts();
        let shifts: Vec<u32> = (0..steps.count()).map(|t| steps.shift(t)).collect();
        let overlaps = 65536usize >> shifts.iter().min().expect("a trellis has steps");
        let bounds = bounds(&shifts, 0).max(bounds(&shifts, shifts.len() - parts.reach));
        let lookup = Lookup::of(code, usize::from(scheme.quarters()), parts.weights);
        let Some(entries) = lookup.entries(&parts) else {
            let message = format!("no kernel for the table of this codebook of {scheme}");
            return Err(DeviceError::Call { call: kernel, message });
        };
        let shared = shared(overlaps, lookup.words());
        if shared > device.limits().shared {
            let what = format!("encoding {scheme} in shared memory");
            let total = device.limits().shared;
            return Err(DeviceError::Memory { what, bytes: shared, free: total, total });
        }
        let blocks = device.limits().multiprocessors;
        let entries = Buffer::of(device, &entries, "values of a code")?;
        let costs = Buffer::room(device, 4 * blocks * bounds * overlaps, "costs of the trellis search")?;
        let args = EncodeArgs {
            entries: entries.at(),
            costs: costs.at(),
            doublings: parts.doublings,
            bounds: u32_of(bounds),
            least: i32::from(parts.values.iter().copied().min().expect("values")),
            most: i32::from(parts.values.iter().copied().max().expect("values")),
            ..EncodeArgs::default()
        };
        let _held = [entries, costs];
        let turn = Mutex::new(Turn { room: None, failure: None });
        Ok(Self { device, rounder, args, kernel, blocks, shared, _held, turn })
    }

    /// Codes of `tiles`, one after the other.
    ///
    /// # Errors
    /// When the device fails.
    pub fn encode_tiles(&self, tiles: &[[f32; TILE]]) -> Result<Vec<u8>, DeviceError> {
        let grid = self.grid(tiles);
        self.launch(&grid, &mut self.turn().room)
    }

    /// Why the device was given up, if it was.
    #[must_use]
    pub fn failure(&self) -> Option<DeviceError> {
        self.turn().failure.clone()
    }

    fn turn(&self) -> MutexGuard<'_, Turn<'d, D>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grid(&self, tiles: &[[f32; TILE]]) -> Vec<[i16; TILE]> {
        tiles.iter().map(|tile| self.rounder.grid(tile)).collect()
    }

    fn launch(
        &self,
        tiles: &[[i16; TILE]],
        room: &mut Option<[Buffer<'d, D>; 2]>,
    ) -> Result<Vec<u8>, DeviceError> {
        let bytes = tiles.len() * self.rounder.codebook().tile_bytes();
        if room
            .as_ref()
            .is_none_or(|[input, codes]| input.bytes() < size_of_val(tiles) || codes.bytes() < bytes)
        {
            *room = None; // before there are others
            let input = Buffer::room(self.device, size_of_val(tiles), "tiles")?;
            *room = Some([input, Buffer::room(self.device, bytes, "codes")?]);
        }
        let [input, codes] = room.as_ref().expect("made above");
        input.write(tiles)?;
        let args =
            EncodeArgs { tiles: input.at(), codes: codes.at(), tile_count: u32_of(tiles.len()), ..self.args };
        let grid = Grid {
            blocks: (u32_of(self.blocks.min(tiles.len().div_ceil(PAIR)).max(1)), 1),
            threads: THREADS,
            shared: u32_of(self.shared),
        };
        self.device.launch(&self.kernel, grid, bytemuck::bytes_of(&args))?;
        codes.read(bytes)
    }
}

impl<D: Device + Sync> Rounder for TrellisEncoder<'_, D> {
    fn codebook(&self) -> &Codebook {
        self.rounder.codebook()
    }

    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]) {
        let grid = self.grid(tiles);
        let mut turn = self.turn();
        let Turn { room, failure } = &mut *turn;
        if failure.is_none() {
            match self.launch(&grid, room) {
                Ok(found) => return codes.copy_from_slice(&found),
                Err(e) => *failure = Some(e),
            }
        }
        drop(turn);
        self.rounder.encode(tiles, codes);
    }

    fn batch(&self) -> usize {
        PAIR * self.blocks
    }
}

/// Shared memory of a block (`Viterbi` of `encode.cuh`): costs, a table of `words`, weights, parts,
/// bounds, states and limits.
fn shared(overlaps: usize, words: usize) -> usize {
    4 * overlaps + 4 * words + 1024 + 4096 + 2 * 264 + 1024 + 32 + 1024
}

/// What the kernel of a code looks up for a state.
#[derive(Clone, Copy, Debug)]
enum Lookup {
    /// The upper bits of a hash.
    Hash { hash: fn(u16) -> u16, bits: u32 },
    /// A byte for every weight.
    Bytes { weights: usize, quarters: usize },
}

impl Lookup {
    fn of(code: Code, quarters: usize, weights: usize) -> Self {
        let pairs = match quarters {
            ..=16 => 10,
            17..=18 => 11,
            _ => 12,
        };
        match code {
            Code::Fine => Self::Hash { hash: hash_fine, bits: 9 },
            Code::Hyb => Self::Hash { hash: hash16, bits: pairs },
            Code::Fast => Self::Bytes { weights, quarters },
        }
    }

    /// Words of a step's table of costs.
    fn words(self) -> usize {
        match self {
            Self::Hash { bits, .. } => 2 << bits,
            Self::Bytes { weights, .. } => 256 * weights,
        }
    }

    /// The values by what is looked up: (index, weight), or (weight, byte). `None` when states that
    /// look up the same differ in their values.
    fn entries(self, parts: &SearchParts) -> Option<Vec<i16>> {
        let count = match self {
            Self::Hash { bits, .. } => parts.weights << bits,
            Self::Bytes { weights, .. } => 256 * weights,
        };
        let mut entries = vec![None; count];
        for state in 0..=u16::MAX {
            for weight in 0..parts.weights {
                let at = match self {
                    Self::Hash { hash, bits } => {
                        usize::from(hash(state) >> (STATE_BITS - bits)) * parts.weights + weight
                    }
                    Self::Bytes { weights, quarters } => {
                        256 * weight + usize::from(hash_fast(state, weights, quarters)[weight])
                    }
                };
                let value = parts.values[weight * STATES + usize::from(state)];
                if *entries[at].get_or_insert(value) != value {
                    return None;
                }
            }
        }
        // What no state looks up is never read.
        Some(entries.into_iter().map(Option::unwrap_or_default).collect())
    }
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
