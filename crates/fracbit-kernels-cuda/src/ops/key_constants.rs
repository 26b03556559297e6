//! Constants that keys in caches of codes are stored without.

use super::{AttentionShape, at, holds, u32_of};
use crate::{Address, Buffer, Device, DeviceError};
use bytemuck::{Pod, Zeroable};

/// Positions that attention reads together: it may read angles of so many behind the last one.
const TOGETHER: usize = 16;

/// A plane of a head whose constant scores get apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable, PartialEq)]
pub struct KeyPlane {
    /// Which: dimensions `plane` and `plane + d / 2`.
    pub plane: u32,
    /// Row of [`KeyAngles`] that has its angles.
    pub row: u32,
    /// The constant, before RoPE.
    pub constant: [f32; 2],
}

/// What the keys of a layer are stored without, and scores get back.
#[derive(Debug)]
pub struct KeyConstants<'d, D: Device> {
    shift: Buffer<'d, D>,          // (kv_heads, d)
    planes: Option<Buffer<'d, D>>, // (kv_heads, most)
    counts: Buffer<'d, D>,         // (kv_heads)
    heads: usize,
    most: usize,
    first: usize,
    /// Rows of the angles.
    rows: usize,
}

impl<'d, D: Device> KeyConstants<'d, D> {
    /// Keys from position `first` on get `shift`, (kv_heads, d), before RoPE; scores get the
    /// constants of the planes of each key-value head. What `shift` takes beside them is lost to
    /// scores.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When heads have not as many numbers, or one has a plane twice or that it does not have.
    pub fn new(
        device: &'d D,
        shift: &[f32],
        heads: &[Vec<KeyPlane>],
        first: usize,
    ) -> Result<Self, DeviceError> {
        let d = shift.len() / heads.len().max(1);
        assert_eq!(shift.len(), d * heads.len(), "a shift of {} heads", heads.len());
        for head in heads {
            let mut seen = vec![false; d / 2];
            head.iter().for_each(|of| {
                assert!(!std::mem::replace(&mut seen[of.plane as usize], true), "plane {} twice", of.plane);
            });
        }
        let most = heads.iter().map(Vec::len).max().unwrap_or(0);
        let mut planes = vec![KeyPlane::default(); heads.len() * most];
        for (to, head) in planes.chunks_exact_mut(most.max(1)).zip(heads) {
            to[..head.len()].copy_from_slice(head);
        }
        let counts: Vec<u32> = heads.iter().map(|head| u32_of(head.len())).collect();
        const WHAT: &str = "constants of keys";
        Ok(Self {
            shift: Buffer::of(device, shift, WHAT)?,
            planes: (most > 0).then(|| Buffer::of(device, &planes, WHAT)).transpose()?,
            counts: Buffer::of(device, &counts, WHAT)?,
            heads: heads.len(),
            most,
            first,
            rows: planes.iter().map(|of| of.row as usize + 1).max().unwrap_or(0),
        })
    }
}

/// Cosines and sines of some planes by position: what [`KeyConstants`] are turned by in scores.
#[derive(Debug)]
pub struct KeyAngles<'d, D: Device> {
    table: Buffer<'d, D>, // (planes, positions, 2)
    planes: usize,
    positions: usize,
}

impl<'d, D: Device> KeyAngles<'d, D> {
    /// Of `planes`, from cosines and sines `turns`, (positions, d), as
    /// [`HeadOptions`](super::HeadOptions) takes them; those before position `first` are 0: keys
    /// there have no constants.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    ///
    /// # Panics
    /// When heads have no such planes.
    pub fn new(
        device: &'d D,
        turns: &[f32],
        d: usize,
        planes: &[usize],
        first: usize,
    ) -> Result<Self, DeviceError> {
        let positions = (turns.len() / d).next_multiple_of(TOGETHER) + TOGETHER;
        let mut table = vec![0.0; planes.len() * positions * 2];
        for (row, &plane) in table.chunks_exact_mut(2 * positions).zip(planes) {
            let angles = turns.chunks_exact(d).map(|turns| [turns[plane], turns[d / 2 + plane]]);
            let both = row.as_chunks_mut::<2>().0.iter_mut().zip(angles);
            both.skip(first).for_each(|(to, of)| *to = of);
        }
        let table = Buffer::of(device, &table, "angles of constants of keys")?;
        Ok(Self { table, planes: planes.len(), positions })
    }
}

/// `KeyConstants` of `kv_codes.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(super) struct KeyConstantsArgs {
    shift: Address,
    planes: Address,
    counts: Address,
    angles: Address,
    most: u32,
    first: u32,
    positions: u32,
    pad: u32,
}

const _: () = assert!(size_of::<KeyPlane>() == 16 && size_of::<KeyConstantsArgs>() == 48, "as kv_codes.cuh");

impl KeyConstantsArgs {
    /// For heads of a shape; `angles` may only be missing where no plane has any.
    pub(super) fn of<D: Device>(
        constants: Option<(&KeyConstants<'_, D>, Option<&KeyAngles<'_, D>>)>,
        shape: &AttentionShape,
    ) -> Self {
        let Some((of, angles)) = constants else { return Self::default() };
        assert_eq!(of.heads, shape.kv_heads, "heads of constants of keys");
        holds(&of.shift, shape.kv_heads * shape.d, "constants of keys");
        let [rows, positions] = angles.map_or([0; 2], |angles| [angles.planes, angles.positions]);
        assert!(of.rows <= rows, "angles of {} planes, got {rows}", of.rows);
        assert!(of.most == 0 || positions >= shape.capacity + TOGETHER, "angles of {positions} positions");
        Self {
            shift: of.shift.at(),
            planes: at(of.planes.as_ref()),
            counts: of.counts.at(),
            angles: at(angles.map(|angles| &angles.table)),
            most: u32_of(of.most),
            first: u32_of(of.first),
            positions: u32_of(positions),
            pad: 0,
        }
    }
}
