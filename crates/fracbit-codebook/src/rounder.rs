//! The seam between quantization drivers and codes.

use fracbit_format::{Codebook, TILE};

/// Finds codes for tiles of regularized weights (unit variance, row-major 16 x 16).
///
/// A rounder knows one codebook and nothing about scales, rotations or error feedback: those belong
/// to the driver. Implementations are deterministic: the same tiles give the same bytes on every
/// machine and at every thread count.
pub trait Rounder: Send + Sync {
    /// The table that decodes what [`encode`](Self::encode) writes.
    fn codebook(&self) -> &Codebook;

    /// Writes the code of each tile. `codes` holds [`Codebook::tile_bytes`] bytes per tile, in
    /// order.
    ///
    /// Tiles are independent of each other; implementations may reuse working memory between the
    /// tiles of one call, so that many tiles per call are cheaper than many calls.
    ///
    /// # Panics
    /// When `codes` has the wrong length.
    fn encode(&self, tiles: &[[f32; TILE]], codes: &mut [u8]);

    /// Tiles that a call should have to keep the hardware busy. Drivers give no fewer where the
    /// matrix has them; one, where any number will do.
    fn batch(&self) -> usize {
        1
    }
}
