#![doc = include_str!("../README.md")]

mod bits;
mod codebook;
mod data;
mod layout;
mod packed;
mod spec;
pub mod trellis;

pub use bits::{BitWriter, read_bits};
pub use codebook::{
    Codebook, CodebookError, Grid, MOST_GROUP_ENTRIES, PiecewiseLinear, TwoLevel, quarter_turns,
};
pub use data::{PackedMatrixData, Plane};
pub use layout::{Layout, Segment, TILE, TILE_COLS, TILE_ROWS};
pub use packed::{PackedError, PackedView, Planes};
pub use spec::{Element, Extent, Grouping, Index, PlaneName, PlaneSpec, SchemeSpec, SecondLevel, TableSpec};
