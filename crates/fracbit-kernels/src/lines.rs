//! Bytes at 64-byte alignment.

/// One cache line.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

impl Line {
    /// All zero.
    pub const ZERO: Self = Self([0; 64]);
}

/// `len` bytes, zeroed and rounded up to whole lines.
pub(crate) fn zeroed(len: usize) -> Vec<Line> {
    vec![Line::ZERO; len.div_ceil(64)]
}

/// The lines as bytes.
pub(crate) fn bytes(lines: &[Line]) -> &[u8] {
    bytemuck::cast_slice(lines)
}

/// The lines as bytes, to be written.
pub(crate) fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    bytemuck::cast_slice_mut(lines)
}
