//! A packed matrix on a device.

use crate::part::{Part, Stack};
use crate::w4a8::{MOST_TOKENS, W4a8Launch};
use crate::{Buffer, Device, DeviceError, MatrixPlan, Product, Rows, Unsupported};
use fracbit_base::{Family, Rate, Scheme, Shape};
use fracbit_format::PackedView;

/// A matrix that cannot be brought to the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The kernels do not run it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A packed matrix in device layout, with what its products need.
#[derive(Debug)]
pub struct DeviceMatrix<'d, D: Device> {
    device: &'d D,
    scheme: Scheme,
    shape: Shape,
    /// One; of a nested trellis the planes, whose products add up; of nested scalar codes one for
    /// each precision.
    parts: Vec<Part>,
    /// Codes and tables of the segments, scales, bias: owned by the parts' addresses.
    held: Vec<Buffer<'d, D>>,
}

/// A matrix as a precision has it ([`DeviceMatrix::at`]).
#[derive(Debug)]
pub struct Reading<'m, 'd, D: Device> {
    device: &'d D,
    shape: Shape,
    /// Their sum is the matrix.
    parts: &'m [Part],
    /// Which of the matrices that lie one above the other.
    piece: usize,
}

/// Workspace of split sums, shared by all products of one stream.
#[derive(Debug)]
pub struct Workspace<'d, D: Device> {
    pub(crate) partial: Buffer<'d, D>,
    pub(crate) counters: Buffer<'d, D>,
}

impl<'d, D: Device> Workspace<'d, D> {
    /// Room for products with any of `matrices`.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn new<'m>(
        device: &'d D,
        matrices: impl IntoIterator<Item = &'m DeviceMatrix<'d, D>>,
    ) -> Result<Self, DeviceError>
    where
        D: 'm,
        'd: 'm,
    {
        let (mut partial, mut pairs) = (0, 1);
        for matrix in matrices {
            for part in &matrix.parts {
                partial = (1..=8).map(|batch| part.workspace(batch)).fold(partial, usize::max);
                pairs = pairs.max(part.plan.pairs);
            }
        }
        Ok(Self {
            partial: Buffer::zeroed(device, 4 * partial, "sums of products")?,
            counters: Buffer::zeroed(device, 4 * pairs, "counters of products")?,
        })
    }
}

impl<'d, D: Device> DeviceMatrix<'d, D> {
    /// Copies a matrix to the device and brings it into the kernels' order there.
    ///
    /// # Errors
    /// When its scales are grouped in a way the kernels do not run, or memory is short.
    ///
    /// # Panics
    /// When `bias` has another length than the rows.
    pub fn new(device: &'d D, view: &PackedView<'_>, bias: Option<&[f32]>) -> Result<Self, LoadError> {
        Self::stacked(device, &[view], bias)
    }

    /// Whether [`stacked`](Self::stacked) takes these matrices: one scheme, width, grouping and set
    /// of tables; whole tiles but for the last.
    #[must_use]
    pub fn stackable(views: &[&PackedView<'_>]) -> bool {
        views.windows(2).all(|pair| {
            let [a, b] = [pair[0], pair[1]];
            a.layout().scheme() == b.layout().scheme()
                && a.shape().cols == b.shape().cols
                && a.group() == b.group()
                && a.codebooks() == b.codebooks()
                // Scales of group-wise schemes stay as they are.
                && (a.layout().scheme().group().is_none() || a.gain().to_bits() == b.gain().to_bits())
                && a.shape().rows.is_multiple_of(16)
        })
    }

    /// One matrix of several with the same input, the first on top: one launch instead of several.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Panics
    /// When they are not [`stackable`](Self::stackable), or `bias` has another length than the
    /// rows.
    pub fn stacked(
        device: &'d D,
        views: &[&PackedView<'_>],
        bias: Option<&[f32]>,
    ) -> Result<Self, LoadError> {
        assert!(!views.is_empty() && Self::stackable(views), "matrices of one kind");
        Self::cut(device, views, 1, bias)
    }

    /// Matrices of one shape, one above the other as the rows of `view`, each of which is
    /// multiplied by itself ([`Reading::piece`]): the experts of a mixture.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Panics
    /// When their rows are no multiple of 16.
    pub fn pieces(device: &'d D, view: &PackedView<'_>, count: usize) -> Result<Self, LoadError> {
        Self::cut(device, &[view], count, None)
    }

    fn cut(
        device: &'d D,
        views: &[&PackedView<'_>],
        pieces: usize,
        bias: Option<&[f32]>,
    ) -> Result<Self, LoadError> {
        let scheme = views[0].layout().scheme();
        let (mut held, mut parts) = (Vec::new(), Vec::new());
        if let Family::NestNuq(ladder) = scheme.family() {
            parts = Part::readings(device, &Stack::of(views, 0, pieces), ladder, bias, &mut held)?;
        } else {
            for plane in 0..scheme.planes() {
                let bias = bias.filter(|_| plane == 0);
                parts.push(Part::new(device, &Stack::of(views, plane, pieces), bias, &mut held)?);
            }
        }
        let shape = parts[0].plan.shape;
        Ok(Self { device, scheme, shape, parts, held })
    }

    /// The matrix as it is read with at most so many bits: always the coarsest codes, all there are
    /// without a bound.
    #[must_use]
    pub fn at(&self, most: Option<Rate>) -> Reading<'_, 'd, D> {
        let count = most.map_or(self.parts.len(), |most| self.scheme.planes_within(most));
        let first = if self.scheme.planes() > 1 { 0 } else { count - 1 };
        Reading { device: self.device, shape: self.shape, parts: &self.parts[first..count], piece: 0 }
    }

    /// How a product of `batch` (1 to 8) tokens is made.
    ///
    /// # Panics
    /// When there is no such product.
    #[must_use]
    pub fn product(&self, batch: usize) -> Product {
        self.parts[0].product(batch)
    }

    /// Makes all products in one way, whatever is faster: for tests and measurements. Workspaces
    /// made before may be too small.
    ///
    /// # Panics
    /// When the matrix has no Psumbook and one is asked for.
    pub fn set_product(&mut self, product: Product) {
        self.parts.iter_mut().for_each(|part| part.set_product(product));
    }

    /// A second copy in memory of its own, for measurements that must not hit a cache.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn copy(&self) -> Result<Self, DeviceError> {
        let held: Vec<_> = self.held.iter().map(Buffer::duplicate).collect::<Result<_, _>>()?;
        let moved = |at: &mut crate::Address| {
            if let Some((_, copy)) = self.held.iter().zip(&held).find(|(old, _)| old.at() == *at) {
                *at = copy.at();
            }
        };
        let parts = self.parts.iter().map(|part| part.moved(moved)).collect();
        Ok(Self { device: self.device, scheme: self.scheme, shape: self.shape, parts, held })
    }

    /// The plans of its planes or precisions, the coarsest first; of most schemes there is one.
    pub fn plans(&self) -> impl Iterator<Item = &MatrixPlan> {
        self.parts.iter().map(|part| &part.plan)
    }

    /// The scheme.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Shape without padding, of a piece where there are several.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.held.iter().map(Buffer::bytes).sum()
    }
}

impl<D: Device> Reading<'_, '_, D> {
    /// The same of another piece; as it comes, it is of the first.
    #[must_use]
    pub fn piece(self, piece: usize) -> Self {
        Self { piece, ..self }
    }

    /// Bytes that a product reads, without tables.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// `y = W x + b` for `batch` (1 to 8) tokens, or `y += W x + b`: `x` is (batch, cols), `y`
    /// (batch, rows), f32.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short.
    pub fn apply<'x>(
        &self,
        x: impl Into<Rows<'x>>,
        y: &Buffer<'_, D>,
        batch: usize,
        accumulate: bool,
        work: &Workspace<'_, D>,
    ) -> Result<(), DeviceError> {
        self.apply_at(x, y, (0, self.shape.rows), batch, accumulate, work)
    }

    /// As [`apply`](Self::apply), with row `n` of the result at float `offset + n stride` of `y`.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short.
    pub fn apply_at<'x>(
        &self,
        x: impl Into<Rows<'x>>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        batch: usize,
        accumulate: bool,
        work: &Workspace<'_, D>,
    ) -> Result<(), DeviceError> {
        let Shape { rows, cols } = self.shape;
        let floats = (batch - 1) * stride + offset + rows;
        assert!(y.bytes() >= 4 * floats, "y of {} bytes for {floats} floats", y.bytes());
        assert!((1..=8).contains(&batch), "a launch takes 1 to 8 tokens, got {batch}");
        let at = (x.into().floats(batch, cols), y.at() + 4 * offset as u64);
        self.parts.iter().enumerate().try_for_each(|(plane, part)| {
            part.apply((self.device, part.args(self.piece)), at, stride, batch, accumulate || plane > 0, work)
        })
    }

    /// As [`apply_at`](Self::apply_at), for any number of tokens, whose inputs are also there as
    /// f16 (tokens, cols): weights are expanded into `scratch` (f16, as many as the matrix has) and
    /// multiplied as a dense matrix; progressive codes meet int8 activations where tokens are not
    /// many.
    ///
    /// # Errors
    /// When a launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short or the columns are no multiple of 8.
    pub fn apply_many<'x>(
        &self,
        (x, halves): (impl Into<Rows<'x>>, &Buffer<'_, D>),
        scratch: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        tokens: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let Shape { rows, cols } = self.shape;
        let floats = (tokens - 1) * stride + offset + rows;
        assert!(halves.bytes() >= 2 * tokens * cols, "inputs of {tokens} tokens");
        assert!(y.bytes() >= 4 * floats, "y of {} bytes for {floats} floats", y.bytes());
        let (y, most) = (y.at() + 4 * offset as u64, tokens <= MOST_TOKENS);
        if let Some(launch) = self.integers(tokens, scratch.bytes()).filter(|_| most) {
            let at = (x.into().floats(tokens, cols), scratch.at(), y);
            return launch.run(self.device, self.parts[0].args(self.piece), at, stride, accumulate);
        }
        self.expand(scratch, false)?;
        let at = (scratch.at(), halves.at(), y);
        self.parts[0].dense(self.device, at, stride, tokens, accumulate)
    }

    /// How a product of progressive codes with int8 activations is dealt, with `room` bytes of
    /// scratch; `None` for other schemes, and where the room is too small.
    #[must_use]
    pub fn integers(&self, tokens: usize, room: usize) -> Option<W4a8Launch> {
        W4a8Launch::new(&self.parts[0].plan, tokens, &self.device.limits(), room)
    }

    /// Expands to f16 (rows, cols): weights, or with `raw` the integers of the codes, of one plane.
    ///
    /// # Errors
    /// When a launch is refused.
    ///
    /// # Panics
    /// When `out` is too short, or integers of several planes are asked for.
    pub fn expand(&self, out: &Buffer<'_, D>, raw: bool) -> Result<(), DeviceError> {
        assert!(out.bytes() >= 2 * self.shape.len(), "{} bytes for {}", out.bytes(), self.shape);
        assert!(!raw || self.parts.len() == 1, "integers of planes do not add up");
        let mut planes = self.parts.iter().enumerate();
        planes.try_for_each(|(plane, part)| {
            part.expand((self.device, part.args(self.piece)), out.at(), raw, plane > 0)
        })
    }
}
