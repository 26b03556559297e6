#![doc = include_str!("../README.md")]

mod activations;
mod args;
mod banded;
pub mod cases;
mod expand;
mod isa;
mod kernels;
mod linear;
mod lines;
mod matmul;
mod matrix;
mod progressive;
mod reference;
mod team;
pub mod vectors;

pub use activations::Activations;
pub use args::{
    Args, BLOCK_TILES, Block, Interleave, Ints, MAX_INT8, MAX_INT16, MAX_STRIPS, MAX_TOKENS,
    ONE_TOKEN_STRIPS, OVERREAD, PANEL_FROM, PANEL_TOKENS, Panel, ROWS, WIDE_BLOCK_TILES,
};
pub use banded::{BANDS, BandedMatrix};
pub use expand::nested::{BitPlanes, JoinFn, NestedMicrokernel, TileBits};
pub use expand::psumbook::{
    BuildFn, Centroids, PSUM_TOKENS, PsumCodes, PsumMicrokernel, PsumRows, PsumTile, ReadFn, psumbook,
};
pub use isa::{Isa, IsaError};
pub use kernels::{Kernels, LinearProvider, Microkernel, Packing, Provider, StripFn};
pub use linear::{Call, Input, LinearKernel, Precision, Prepared};
pub use lines::{Buffer, Line, Numbers};
pub use matmul::{
    Group, Operand, RowsOf, TOGETHER, matmul, matmul_gated_with, matmul_groups_with, matmul_refined_with,
    matmul_rows_with, matmul_together_with, matmul_with,
};
pub use matrix::PackedMatrix;
pub use progressive::{
    PROGRESSIVE_BYTES, PROGRESSIVE_COLUMNS, PROGRESSIVE_GROUP, ProgressiveArgs, ProgressiveFactors,
    ProgressiveFn, ProgressiveMicrokernel,
};
pub use team::{Team, with_team};
pub use vectors::{Gate, Vectors};
