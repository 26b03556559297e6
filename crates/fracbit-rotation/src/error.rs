//! The crate's one error type.

/// Why a rotation could not be built. Buffers of a wrong length are the caller's bug and panic
/// instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RotationError {
    /// A width of zero, or one above [`MAX_WIDTH`](crate::MAX_WIDTH).
    #[error("{op}: width should be 1 to {}, got {got}", crate::MAX_WIDTH)]
    Width {
        /// The refusing constructor.
        op: &'static str,
        /// The width asked for.
        got: usize,
    },
    /// A block rotation of zero blocks, or of more entries in all than a vector can have.
    #[error("{op}: number of blocks should be 1 or more and fit the address space, got {got}")]
    Blocks {
        /// The refusing constructor.
        op: &'static str,
        /// The number of blocks asked for.
        got: usize,
    },
}
