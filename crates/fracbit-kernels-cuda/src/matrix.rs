//! A packed matrix on a device.

use crate::gemm::{Gemm, GemmArgs};
use crate::{
    Address, Buffer, Device, DeviceError, Grid, Launch, MatrixPlan, Product, PsumPlan, Unsupported,
    args::{BookArgs, DequantArgs, GemvArgs, MatrixArgs, PsumArgs, RepackArgs, SegmentArgs},
};
use fracbit_base::{Family, Shape};
use fracbit_format::{PackedView, Planes};
use half::f16;

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
    plan: MatrixPlan,
    /// For 1 to 8 tokens.
    launches: Vec<Launch>,
    products: Vec<Product>,
    args: MatrixArgs,
    /// Of additive codebooks.
    centroids: Address,
    /// Codes and tables of the segments, scales, bias: owned by `args`' addresses.
    held: Vec<Buffer<'d, D>>,
}

/// Workspace of split sums, shared by all products of one stream.
#[derive(Debug)]
pub struct Workspace<'d, D: Device> {
    partial: Buffer<'d, D>,
    counters: Buffer<'d, D>,
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
            partial = (1..=8).map(|batch| matrix.workspace(batch)).fold(partial, usize::max);
            pairs = pairs.max(matrix.plan.pairs);
        }
        Ok(Self {
            partial: Buffer::zeroed(device, 4 * partial, "sums of products")?,
            counters: Buffer::zeroed(device, 4 * pairs, "counters of products")?,
        })
    }
}

fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of matrices fit 32 bits")
}

/// Group-wise scales as the kernels take them: brought by a power of two to where a scale times the
/// largest integer of a code, 128, just stays a half, and the gain divided by it. The lowest bits,
/// which number codebooks, stay where they are.
fn scaled(halves: &[f16], gain: f32) -> (Vec<u16>, f32) {
    let most = halves.iter().fold(0f32, |most, h| most.max(h.to_f32().abs()));
    // 2^by * most lies in 256..512.
    let by = if most > 0.0 { 8 - most.log2().floor() as i32 } else { 0 };
    let factor = 2f32.powi(by);
    let moved = |h: &f16| {
        let to = f16::from_f32(h.to_f32() * factor);
        // Exact but for subnormals, a 2^-32 of the largest, which would lose the codebook.
        if h.is_normal() && to.is_normal() { to.to_bits() } else { to.to_bits() & !3 | h.to_bits() & 3 }
    };
    (halves.iter().map(moved).collect(), gain / factor)
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
        let (first, mut codes, mut rows) = (views[0], Vec::new(), 0);
        MatrixPlan::require_kernels(first)?;
        let (mut halves, mut scales) = (Vec::new(), Vec::new());
        for view in views {
            codes.extend_from_slice(view.codes());
            halves.extend_from_slice(view.scales());
            // The gain is a power of two: the product is exact.
            scales.extend(view.scales().iter().map(|s| view.gain() * s.to_f32()));
            rows += view.shape().rows;
        }
        let (scheme, shape) = (first.layout().scheme(), Shape::new(rows, first.shape().cols));
        let planes = Planes { codes: &codes, second_level: &[], scales: &halves, gains: &[1.0] };
        let whole = PackedView::new(scheme, shape, first.codebooks(), planes, first.group());
        let plan = MatrixPlan::new(&whole.expect("parts of views fit together"))?;
        let mut held = Vec::new();
        let canonical = Buffer::of(device, &codes, "codes")?;
        let mut args = MatrixArgs {
            rows: u32_of(plan.shape.rows),
            cols: u32_of(plan.shape.cols),
            group: u32_of(plan.group),
            // Group-wise scales are beside the codes.
            groups: if scheme.group().is_some() { 0 } else { u32_of(plan.groups) },
            pairs: u32_of(plan.pairs),
            ..MatrixArgs::default()
        };
        let mut canonical_scales = None;
        if scheme.group().is_some() {
            let (bits, gain) = scaled(&halves, first.gain());
            args.gain = gain;
            canonical_scales = Some(Buffer::of(device, &bits, "scales")?);
        }
        for (segment, slot) in plan.segments.iter().zip(&mut args.segments) {
            let codes = Buffer::zeroed(device, plan.code_bytes(segment), "codes")?;
            let rows = Buffer::of(device, &segment.book.rows, "table")?;
            let repack = RepackArgs {
                from: canonical.at(),
                to: codes.at(),
                quarters: u32_of(segment.quarters),
                row_bytes: u32_of(plan.row_bytes),
                offset: u32_of(segment.offset),
                strips: u32_of(plan.shape.rows.div_ceil(16)),
                tiles: u32_of(segment.tiles),
                pairs: args.pairs,
                octets: u32_of(segment.octets),
                // `INTEGERS` and `PLACES` of `repack.cuh`.
                kind: match scheme.family() {
                    Family::Int if segment.quarters == 32 => 1,
                    Family::Additive(_) => 2,
                    _ => 0,
                },
                scales_row: u32_of(segment.scales),
                rows: args.rows,
                group: args.group,
                groups: u32_of(plan.groups),
                scales: canonical_scales.as_ref().map_or(0, Buffer::at),
            };
            let blocks = u32_of(plan.code_bytes(segment).div_ceil(16 << 10).clamp(1, 4096));
            device.launch(
                "fb_repack",
                Grid { blocks: (blocks, 1), threads: 256, shared: 0 },
                bytemuck::bytes_of(&repack),
            )?;
            *slot = SegmentArgs {
                codes: codes.at(),
                book: BookArgs::new(&segment.book, rows.at()),
                octets: u32_of(segment.octets),
                first_col: u32_of(segment.first_col),
                end_col: u32_of(segment.end_col),
                scales: u32_of(segment.scales),
                factor: segment.factor,
                // The launch says how it is dealt.
                ..SegmentArgs::default()
            };
            held.extend([codes, rows]);
        }
        if scheme.group().is_none() {
            let scales = Buffer::of(device, &scales, "scales")?;
            args.scales = scales.at();
            held.push(scales);
        }
        if let Some(bias) = bias {
            assert_eq!(bias.len(), plan.shape.rows, "a bias for every row");
            let bias = Buffer::of(device, bias, "bias")?;
            args.bias = bias.at();
            held.push(bias);
        }
        let mut centroids = 0;
        if let Some(psums) = &plan.psums {
            let words = Buffer::of(device, &psums.centroids, "centroids")?;
            centroids = words.at();
            held.push(words);
        }
        let limits = device.limits();
        let launches = (1..=8).map(|batch| plan.launch(batch, &limits)).collect();
        let products = (1..=8).map(|batch| plan.product(batch, &limits)).collect();
        Ok(Self { device, plan, launches, products, args, centroids, held })
    }

    /// How a product of `batch` (1 to 8) tokens is made.
    ///
    /// # Panics
    /// When there is no such product.
    #[must_use]
    pub fn product(&self, batch: usize) -> Product {
        self.products[batch - 1]
    }

    /// Makes all products in one way, whatever is faster: for tests and measurements. Workspaces
    /// made before may be too small.
    ///
    /// # Panics
    /// When the matrix has no Psumbook and one is asked for.
    pub fn set_product(&mut self, product: Product) {
        let possible = product == Product::Expand || self.plan.psums.is_some();
        assert!(possible, "{} has no Psumbook", self.plan.gemv);
        self.products.fill(product);
    }

    /// Words of workspace of a product.
    fn workspace(&self, batch: usize) -> usize {
        match self.product(batch) {
            Product::Expand => self.launches[batch - 1].partial,
            Product::Psumbook => PsumPlan::workspace(&self.plan, batch),
        }
    }

    /// A second copy in memory of its own, for measurements that must not hit a cache.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn copy(&self) -> Result<Self, DeviceError> {
        let mut args = self.args;
        let held: Vec<_> = self.held.iter().map(Buffer::duplicate).collect::<Result<_, _>>()?;
        let moved = |at: &mut Address| {
            if let Some((_, copy)) = self.held.iter().zip(&held).find(|(old, _)| old.at() == *at) {
                *at = copy.at();
            }
        };
        for slot in &mut args.segments {
            moved(&mut slot.codes);
            moved(&mut slot.book.rows);
        }
        moved(&mut args.scales);
        moved(&mut args.bias);
        let mut centroids = self.centroids;
        moved(&mut centroids);
        let (plan, launches, products) = (self.plan.clone(), self.launches.clone(), self.products.clone());
        Ok(Self { device: self.device, plan, launches, products, args, centroids, held })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &MatrixPlan {
        &self.plan
    }

    /// Shape without padding.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.plan.shape
    }

    /// Bytes on the device.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.held.iter().map(Buffer::bytes).sum()
    }

    /// `y = W x + b` for `batch` (1 to 8) tokens, or `y += W x + b`: `x` is (batch, cols), `y`
    /// (batch, rows), f32.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short.
    pub fn apply(
        &self,
        x: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        batch: usize,
        accumulate: bool,
        work: &Workspace<'_, D>,
    ) -> Result<(), DeviceError> {
        self.apply_at(x, y, (0, self.plan.shape.rows), batch, accumulate, work)
    }

    /// As [`apply`](Self::apply), with row `n` of the result at float `offset + n stride` of `y`.
    ///
    /// # Errors
    /// When the launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short.
    pub fn apply_at(
        &self,
        x: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        batch: usize,
        accumulate: bool,
        work: &Workspace<'_, D>,
    ) -> Result<(), DeviceError> {
        let Shape { rows, cols } = self.plan.shape;
        let floats = (batch - 1) * stride + offset + rows;
        assert!(x.bytes() >= 4 * batch * cols, "x of {} bytes for ({batch}, {cols})", x.bytes());
        assert!(y.bytes() >= 4 * floats, "y of {} bytes for {floats} floats", y.bytes());
        assert!((1..=8).contains(&batch), "a launch takes 1 to 8 tokens, got {batch}");
        let (launch, y) = (&self.launches[batch - 1], y.at() + 4 * offset as u64);
        assert!(4 * self.workspace(batch) <= work.partial.bytes(), "workspace made for this matrix");
        if let (Product::Psumbook, Some(psums)) = (self.product(batch), &self.plan.psums) {
            let args = PsumArgs {
                w: self.args,
                centroids: self.centroids,
                x: x.at(),
                y,
                parts: work.partial.at(),
                batch: u32_of(batch),
                x_stride: self.args.cols,
                y_stride: u32_of(stride),
                accumulate: u32::from(accumulate),
                // The launch says where scales are and how it is dealt.
                ..PsumArgs::default()
            };
            return psums.launch(self.device, &self.plan, args);
        }
        let mut args = GemvArgs {
            w: self.args,
            x: x.at(),
            y,
            partial: work.partial.at(),
            counters: work.counters.at(),
            batch: u32_of(batch),
            x_stride: self.args.cols,
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
        };
        assert!(4 * self.plan.pairs <= work.counters.bytes(), "workspace made for this matrix");
        for (slot, deal) in args.w.segments.iter_mut().zip(&launch.deals) {
            (slot.panels, slot.width, slot.blocks) =
                (u32_of(deal.panels), u32_of(deal.width), u32_of(deal.blocks));
            (slot.whole, slot.slots) = (u32::from(deal.whole), u32_of(deal.slots));
        }
        let grid = Grid {
            blocks: (u32_of(launch.blocks), 1),
            threads: u32_of(32 * launch.warps),
            shared: u32_of(launch.shared),
        };
        self.device.launch(&self.plan.gemv, grid, bytemuck::bytes_of(&args))
    }

    /// As [`apply_at`](Self::apply_at), for any number of tokens whose inputs are f16 (tokens,
    /// cols): weights are expanded into `scratch` (f16, as many as the matrix has) and multiplied
    /// as a dense matrix.
    ///
    /// # Errors
    /// When a launch is refused.
    ///
    /// # Panics
    /// When a buffer is too short or the columns are no multiple of 8.
    pub fn apply_many(
        &self,
        halves: &Buffer<'_, D>,
        scratch: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        (offset, stride): (usize, usize),
        tokens: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let Shape { rows, cols } = self.plan.shape;
        let floats = (tokens - 1) * stride + offset + rows;
        assert!(halves.bytes() >= 2 * tokens * cols, "inputs of {tokens} tokens");
        assert!(y.bytes() >= 4 * floats, "y of {} bytes for {floats} floats", y.bytes());
        self.expand(scratch, false)?;
        let args = GemmArgs {
            w: scratch.at(),
            x: halves.at(),
            bias: self.args.bias,
            y: y.at() + 4 * offset as u64,
            rows: self.args.rows,
            cols: self.args.cols,
            tokens: u32_of(tokens),
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
            pad: 0,
        };
        Gemm::choose(self.device, rows, tokens).launch(self.device, &args)
    }

    /// Expands to f16 (rows, cols): weights, or with `raw` the integers of the codes.
    ///
    /// # Errors
    /// When a launch is refused.
    ///
    /// # Panics
    /// When `out` is too short.
    pub fn expand(&self, out: &Buffer<'_, D>, raw: bool) -> Result<(), DeviceError> {
        const MOST_WARPS: usize = 16;
        let limits = self.device.limits();
        assert!(out.bytes() >= 2 * self.plan.shape.len(), "{} bytes for {}", out.bytes(), self.plan.shape);
        for (i, segment) in self.plan.segments.iter().enumerate() {
            let args = DequantArgs { w: self.args, out: out.at(), segment: u32_of(i), raw: u32::from(raw) };
            let items = self.plan.pairs * segment.octets;
            let most = segment.dequant_warps(limits.shared).clamp(1, MOST_WARPS);
            let warps = most.min(items);
            let shared = segment.dequant_shared(warps);
            // As many blocks as run together: two where a multiprocessor's memory holds both.
            let together = limits.multiprocessors * if 2 * (shared + 1024) <= limits.shared { 2 } else { 1 };
            let grid = Grid {
                blocks: (u32_of(items.div_ceil(warps).min(together)), 1),
                threads: u32_of(32 * warps),
                shared: u32_of(shared),
            };
            self.device.launch(&segment.dequant, grid, bytemuck::bytes_of(&args))?;
        }
        Ok(())
    }
}
