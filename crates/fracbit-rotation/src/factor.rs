//! The rule that splits a width into factors; specified at [`factorize`], because it is part of the
//! file format.

use std::fmt;

use crate::matrix::MAX_ORDER;
use crate::{HadamardMatrix, RotationError};

/// The largest width; a bound on the memory and time that a number read from a file can ask for.
pub const MAX_WIDTH: usize = 1 << 20;

const SINGLE_MAX: usize = 256;

/// One factor of the Kronecker product that makes up a transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    /// The [`HadamardMatrix`] of this order, divided by the root of the order.
    Hadamard(usize),
    /// The orthonormal Hartley matrix of this odd order: (cos + sin)(2πjk/o)/√o.
    Hartley(usize),
    /// The Walsh matrix of this power of two in natural (Sylvester) order: (−1)^popcount(j & k)/√m.
    Walsh(usize),
}

impl Factor {
    /// The number of rows and columns.
    pub fn order(self) -> usize {
        match self {
            Self::Hadamard(order) | Self::Hartley(order) | Self::Walsh(order) => order,
        }
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hadamard(k) => write!(f, "hadamard {k}"),
            Self::Hartley(k) => write!(f, "hartley {k}"),
            Self::Walsh(k) => write!(f, "walsh {k}"),
        }
    }
}

/// The factors of the transform of width `n`, first factor slowest; orders multiply to `n`, none is
/// 1.
///
/// **Part of the file format**: rotated weights are stored, so the same width must mean the same
/// matrix for ever. A change here needs a new format version.
///
/// Let n = o·2^e with o odd. The transform is a Kronecker product of orthogonal factors, the last
/// of them a Walsh matrix of the remaining power of two:
///
/// 1. o = 1: the Walsh matrix alone.
/// 2. The smallest K = o·2^a ≤ 256, a ≤ e, for which [`HadamardMatrix::construction_of`] knows a
///    construction.
/// 3. Two of them: K₁ = o₁·2^a ≤ K₂ = o₂·2^b ≤ 256 with o₁o₂ = o, o₁, o₂ > 1, K₁K₂ | n; the pair
///    with the smallest K₁ + K₂, then the smallest K₁. K₁ comes first in the product.
/// 4. The smallest K as in 2, but ≤ 1024.
/// 5. The Hartley matrix of order o.
///
/// Why this order: the time per entry of a factor K is K/4 additions, of two factors (K₁ + K₂)/4,
/// so a pair beats one big matrix, and small single factors beat pairs by having one pass less. A
/// true Hadamard factor has all entries equal in size, the least coherence possible; the Hartley
/// factor's largest entry is √2 larger. For every width with an entry in the table of the QuIP#
/// line of papers (K of 12, 20, 28, 36, 52, 60, 108, 116, 124, 140, 156, 172 times a power of two)
/// the K is the same; the signs inside the matrix need not be.
///
/// # Errors
/// [`RotationError::Width`] if `n` is zero or above [`MAX_WIDTH`].
pub fn factorize(n: usize) -> Result<Vec<Factor>, RotationError> {
    if n == 0 || n > MAX_WIDTH {
        return Err(RotationError::Width { op: "factorize", got: n });
    }
    let odd = n >> n.trailing_zeros();
    let mut factors = if odd == 1 {
        Vec::new()
    } else if let Some(k) = smallest_order(odd, n, SINGLE_MAX) {
        vec![Factor::Hadamard(k)]
    } else if let Some((a, b)) = smallest_pair(odd, n) {
        vec![Factor::Hadamard(a), Factor::Hadamard(b)]
    } else if let Some(k) = smallest_order(odd, n, MAX_ORDER) {
        vec![Factor::Hadamard(k)]
    } else {
        vec![Factor::Hartley(odd)]
    };
    let rest = n / factors.iter().map(|f| f.order()).product::<usize>();
    if rest > 1 {
        factors.push(Factor::Walsh(rest));
    }
    Ok(factors)
}

/// The smallest K = odd·2^a that divides `n`, is at most `max` and has a matrix.
fn smallest_order(odd: usize, n: usize, max: usize) -> Option<usize> {
    std::iter::successors(Some(odd), |k| Some(2 * k))
        .take_while(|&k| k <= max && n.is_multiple_of(k))
        .find(|&k| HadamardMatrix::construction_of(k).is_some())
}

fn smallest_pair(odd: usize, n: usize) -> Option<(usize, usize)> {
    (3..odd)
        .step_by(2)
        .filter(|&o| odd.is_multiple_of(o))
        .filter_map(|o| Some((smallest_order(o, n, SINGLE_MAX)?, smallest_order(odd / o, n, SINGLE_MAX)?)))
        .filter(|&(a, b)| a <= b && n.is_multiple_of(a * b))
        .min_by_key(|&(a, b)| (a + b, a))
}
