//! What can go wrong when a rounder is made.

use fracbit_base::{Family, Scheme};
use fracbit_format::Codebook;

/// A codebook that a rounder cannot use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RounderError {
    /// The codebook belongs to another family.
    #[error("rounder: `book` should be of family {want}, got {got}")]
    Family {
        /// Name of the family that the rounder is for.
        want: &'static str,
        /// Scheme of the given codebook.
        got: Scheme,
    },
    /// A nested codebook in which a further bit of 1 stands for a smaller value than one of 0.
    #[error("rounder: further bits of the codes of {scheme} should stand for ascending values")]
    Order {
        /// Scheme of the given codebook.
        scheme: Scheme,
    },
}

impl RounderError {
    pub(crate) fn check(want: Family, book: &Codebook) -> Result<(), Self> {
        if book.scheme().family() == want {
            Ok(())
        } else {
            Err(Self::Family { want: want.name(), got: book.scheme() })
        }
    }
}
