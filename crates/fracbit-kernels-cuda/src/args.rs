//! Arguments of the kernels, as `kernels/cuda` declares them.

use bytemuck::{Pod, Zeroable};

/// A device address.
pub type Address = u64;

/// `Book` of `codes.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct BookArgs {
    pub(crate) rows: Address,
    pub(crate) log_rows: u32,
    pub(crate) log_stride: u32,
    pub(crate) log_copies: u32,
    pub(crate) pad: u32,
}

impl BookArgs {
    /// A table whose words lie at `rows`.
    pub(crate) fn new(book: &crate::Book, rows: Address) -> Self {
        let (log_rows, log_stride, log_copies) = (book.log_rows(), book.log_stride, book.log_copies);
        Self { rows, log_rows, log_stride, log_copies, pad: 0 }
    }
}

/// `Segment` of `gemv.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct SegmentArgs {
    pub(crate) codes: Address,
    pub(crate) book: BookArgs,
    pub(crate) octets: u32,
    pub(crate) first_col: u32,
    pub(crate) end_col: u32,
    pub(crate) panels: u32,
    pub(crate) width: u32,
    pub(crate) blocks: u32,
    pub(crate) whole: u32,
    pub(crate) slots: u32,
    pub(crate) scales: u32,
    pub(crate) factor: f32,
    pub(crate) stride: u32,
    pub(crate) pad: u32,
}

/// `Matrix` of `gemv.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct MatrixArgs {
    pub(crate) segments: [SegmentArgs; 2],
    pub(crate) scales: Address,
    pub(crate) bias: Address,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) group: u32,
    pub(crate) groups: u32,
    pub(crate) pairs: u32,
    /// Of group-wise scales.
    pub(crate) gain: f32,
}

/// `GemvArgs` of `gemv.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct GemvArgs {
    pub(crate) w: MatrixArgs,
    pub(crate) x: Address,
    pub(crate) y: Address,
    pub(crate) partial: Address,
    pub(crate) counters: Address,
    pub(crate) batch: u32,
    pub(crate) x_stride: u32,
    pub(crate) y_stride: u32,
    pub(crate) accumulate: u32,
}

/// `PsumArgs` of `psumbook.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct PsumArgs {
    pub(crate) w: MatrixArgs,
    pub(crate) centroids: Address,
    pub(crate) x: Address,
    pub(crate) y: Address,
    pub(crate) parts: Address,
    pub(crate) scales: Address,
    pub(crate) batch: u32,
    pub(crate) x_stride: u32,
    pub(crate) y_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) strips: u32,
    pub(crate) ranges: u32,
}

/// `Round8Args` of `w4a8.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct Round8Args {
    pub(crate) x: Address,
    pub(crate) to: Address,
    pub(crate) tokens: u32,
    pub(crate) cols: u32,
    pub(crate) octets: u32,
    pub(crate) tile: u32,
}

/// `W4a8Args` of `w4a8.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct W4a8Args {
    pub(crate) w: MatrixArgs,
    pub(crate) x: Address,
    pub(crate) y: Address,
    pub(crate) parts: Address,
    pub(crate) tokens: u32,
    pub(crate) y_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) ranges: u32,
}

/// `DequantArgs` of `expand.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct DequantArgs {
    pub(crate) w: MatrixArgs,
    pub(crate) out: Address,
    pub(crate) segment: u32,
    pub(crate) raw: u32,
    pub(crate) add: u32,
    pub(crate) pad: u32,
}

/// `RepackArgs` of `repack.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct RepackArgs {
    pub(crate) from: Address,
    pub(crate) to: Address,
    pub(crate) quarters: u32,
    pub(crate) row_bytes: u32,
    pub(crate) offset: u32,
    pub(crate) strips: u32,
    pub(crate) tiles: u32,
    pub(crate) pairs: u32,
    pub(crate) octets: u32,
    pub(crate) kind: u32,
    pub(crate) scales_row: u32,
    pub(crate) rows: u32,
    pub(crate) group: u32,
    pub(crate) groups: u32,
    pub(crate) scales: Address,
    pub(crate) stride: u32,
    pub(crate) pad: u32,
}

const _: () = assert!(
    size_of::<GemvArgs>() == 248
        && size_of::<MatrixArgs>() == 200
        && size_of::<RepackArgs>() == 80
        && size_of::<PsumArgs>() == 264
        && size_of::<Round8Args>() == 32
        && size_of::<W4a8Args>() == 240,
    "as gemv.cuh, repack.cuh, psumbook.cuh and w4a8.cuh assert"
);
