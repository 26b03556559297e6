//! A packed matrix in memory.

use crate::{Isa, Kernels, LinearKernel, Precision, Vectors};
use fracbit_base::{Scheme, Shape};
use fracbit_format::PackedView;
use std::sync::Arc;

/// A packed matrix with the kernel that was chosen for it.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    scheme: Scheme,
    shape: Shape,
    vectors: Vectors,
    kernel: Arc<dyn LinearKernel>,
}

impl PackedMatrix {
    /// Chooses a kernel for `view`, which keeps what it wants of it.
    ///
    /// # Panics
    /// When a backend gives a kernel of another shape.
    #[must_use]
    pub fn new(kernels: &Kernels, view: &PackedView<'_>) -> Self {
        let kernel = kernels.linear(view);
        let (scheme, shape) = (view.layout().scheme(), view.shape());
        assert_eq!(kernel.shape(), shape, "the kernel of {scheme} is of its matrix");
        Self { scheme, shape, vectors: kernels.vectors(), kernel }
    }

    /// The shape without padding.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The scheme.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Whether products of so many tokens read partial sums of a Psumbook in place of weights.
    #[must_use]
    pub fn reads_psumbook(&self, tokens: usize) -> bool {
        self.kernel.reads_psumbook(tokens)
    }

    /// Bytes of memory that its kernel holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.kernel.bytes()
    }

    /// Bytes that a product of this precision reads.
    #[must_use]
    pub fn bytes_at(&self, precision: Precision) -> usize {
        self.kernel.bytes_at(precision)
    }

    /// The least capable instruction set that its kernel uses.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.kernel.isa()
    }

    /// Weights of row `r`, exactly as [`PackedView::dequantize_row`] gives them.
    ///
    /// # Panics
    /// When `r` is outside the matrix or `out` is not one row long.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        self.row_at(r, Precision::FULL, out);
    }

    /// Weights of row `r` as the planes of a precision have them.
    ///
    /// # Panics
    /// As for [`row`](Self::row).
    pub fn row_at(&self, r: usize, precision: Precision, out: &mut [f32]) {
        self.kernel.row(r, precision, out);
    }

    /// What multiplies it. Not for others: microkernels trust what only the dispatcher makes.
    pub(crate) fn kernel(&self) -> &dyn LinearKernel {
        &*self.kernel
    }

    pub(crate) const fn vectors(&self) -> &Vectors {
        &self.vectors
    }
}
