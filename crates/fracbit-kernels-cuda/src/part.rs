//! A matrix in one scheme of one precision, or one precision of a nested one: what a product reads.

use crate::gemm::{Gemm, GemmArgs};
use crate::matrix::{LoadError, Workspace};
use crate::{
    Address, Buffer, Device, DeviceError, Grid, Launch, MatrixPlan, Product, PsumPlan,
    args::{BookArgs, DequantArgs, GemvArgs, MatrixArgs, PsumArgs, RepackArgs, SegmentArgs},
};
use fracbit_base::{Family, Ladder, Rate, Scheme, Shape};
use fracbit_format::{Codebook, Layout, PackedView, SchemeSpec, SecondLevel, TILE, TILE_COLS, TILE_ROWS};
use half::f16;

/// What products of one precision need.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Of one piece, where there are several one above the other.
    pub(crate) plan: MatrixPlan,
    /// For 1 to 8 tokens.
    launches: Vec<Launch>,
    products: Vec<Product>,
    /// Of the first piece.
    args: MatrixArgs,
    /// Of additive codebooks.
    pub(crate) centroids: Address,
    /// Bytes that a product with a piece reads, without tables: codes, scales, bias.
    pub(crate) bytes: usize,
}

/// Matrices of one scheme, one above the other.
pub(crate) struct Stack<'a> {
    pub(crate) scheme: Scheme,
    /// Of a piece: of all rows, unless the rows are those of several matrices that are multiplied
    /// one at a time.
    pub(crate) shape: Shape,
    pieces: usize,
    group: usize,
    books: Vec<&'a Codebook>,
    codes: Vec<u8>,
    /// Scales as they are, and what multiplies all of them where they stay so.
    halves: Vec<f16>,
    gain: f32,
    /// Scales with the gain in them.
    scales: Vec<f32>,
    /// Of progressive schemes: scale and zero of a group of so many columns.
    second_level: (Vec<u8>, usize),
}

impl<'a> Stack<'a> {
    /// One plane of matrices that fit together, cut into so many pieces of whole tiles.
    pub(crate) fn of(views: &[&PackedView<'a>], plane: usize, pieces: usize) -> Self {
        let first = views[0];
        let layout = first.layout();
        let nested = layout.scheme().planes() > 1;
        let segment = layout.segments().get(plane).filter(|_| nested);
        let all = views.iter().map(|view| view.shape().rows).sum::<usize>();
        let rows = all / pieces;
        assert!(
            pieces == 1 || rows.is_multiple_of(TILE_ROWS) && rows * pieces == all,
            "pieces of whole tiles"
        );
        let mut stack = Self {
            scheme: segment.map_or(layout.scheme(), |segment| segment.scheme),
            shape: Shape::new(rows, first.shape().cols),
            pieces,
            group: first.group(),
            books: if nested { vec![first.codebooks()[plane]] } else { first.codebooks().to_vec() },
            codes: Vec::new(),
            halves: Vec::new(),
            gain: first.gain(),
            scales: Vec::new(),
            second_level: (Vec::new(), first.second_group()),
        };
        for view in views {
            match segment {
                // Planes follow each other within a row of tiles.
                Some(s) => view.codes().chunks_exact(layout.row_bytes()).for_each(|row| {
                    stack.codes.extend_from_slice(&row[s.offset..][..(s.end - s.start) * s.tile_bytes]);
                }),
                None => stack.codes.extend_from_slice(view.codes()),
            }
            let count = view.shape().rows * view.groups();
            let scales = &view.scales()[plane * count..][..count];
            stack.halves.extend_from_slice(scales);
            // The gain is a power of two: the product is exact.
            stack.scales.extend(scales.iter().map(|s| view.gains()[plane] * s.to_f32()));
            stack.second_level.0.extend_from_slice(view.second_level());
        }
        stack
    }
}

pub(crate) fn u32_of(n: usize) -> u32 {
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

/// Scale and zero of progressive groups as `Levels` of `codes.cuh` takes them: the scale, and in
/// the upper byte its product with the zero, at most 240.
fn levels(bytes: &[u8]) -> Vec<u16> {
    let levels = bytes.iter().map(|&byte| SecondLevel::from_byte(byte));
    levels.map(|of| u16::from(of.scale) | (u16::from(of.scale) * u16::from(of.zero)) << 8).collect()
}

/// Nested scalar codes as separate arrays: those of `low` bits, then one bit of each plane, each as
/// a canonical matrix of its own.
fn split(codes: &[u8], ladder: Ladder) -> Vec<Vec<u8>> {
    let (low, high) = (ladder.low(), ladder.high());
    let row_bytes = |bits: u32| TILE_COLS * bits as usize / 8;
    let widths = || std::iter::once(low).chain((low..high).map(|_| 1));
    let mut out: Vec<Vec<u8>> =
        widths().map(|bits| Vec::with_capacity(codes.len() * bits as usize / high as usize)).collect();
    for row in codes.chunks_exact(row_bytes(high)) {
        let mut bytes = [0; 16];
        bytes[..row.len()].copy_from_slice(row);
        let all = u128::from_le_bytes(bytes);
        let mut from = 0;
        for (bits, out) in widths().zip(&mut out) {
            let of = |i: u32| (all >> (high * i + from)) as u64 & ((1 << bits) - 1);
            let packed = (0..16).fold(0u64, |packed, i| packed | of(i) << (bits * i));
            out.extend_from_slice(&packed.to_le_bytes()[..row_bytes(bits)]);
            from += bits;
        }
    }
    out
}

/// What of a matrix is the same for all its precisions.
struct Common {
    args: MatrixArgs,
    bytes: usize,
}

impl Common {
    /// Scales and bias on the device; `groups` of scales a row, 0 where they lie with the codes.
    fn new<'d, D: Device>(
        device: &'d D,
        stack: &Stack<'_>,
        bias: Option<&[f32]>,
        held: &mut Vec<Buffer<'d, D>>,
    ) -> Result<Self, DeviceError> {
        let (shape, grouped) = (stack.shape, stack.scheme.group().is_some());
        let mut args = MatrixArgs {
            rows: u32_of(shape.rows),
            cols: u32_of(shape.cols),
            group: u32_of(stack.group),
            groups: if grouped { 0 } else { u32_of(shape.cols.div_ceil(stack.group)) },
            pairs: u32_of(shape.rows.div_ceil(2 * TILE_ROWS)),
            // Progressive groups have integers alone.
            gain: 1.0,
            ..MatrixArgs::default()
        };
        let mut bytes = 0;
        let mut put = |values: &[f32], what| {
            let buffer = Buffer::of(device, values, what)?;
            bytes += buffer.bytes();
            let at = buffer.at();
            held.push(buffer);
            Ok::<_, DeviceError>(at)
        };
        if !grouped {
            args.scales = put(&stack.scales, "scales")?;
        }
        if let Some(bias) = bias {
            assert_eq!(stack.pieces, 1, "pieces have no biases");
            assert_eq!(bias.len(), shape.rows, "a bias for every row");
            args.bias = put(bias, "bias")?;
        }
        Ok(Self { args, bytes: bytes / stack.pieces })
    }
}

impl Part {
    /// A plan whose codes are on the device, those of each segment at an address; tables go there.
    fn planned<'d, D: Device>(
        device: &'d D,
        plan: MatrixPlan,
        common: &Common,
        codes: &[Address],
        held: &mut Vec<Buffer<'d, D>>,
    ) -> Result<Self, DeviceError> {
        let (mut args, mut bytes) = (common.args, common.bytes);
        for ((segment, slot), &at) in plan.segments.iter().zip(&mut args.segments).zip(codes) {
            let rows = Buffer::of(device, &segment.book.rows, "table")?;
            bytes += plan.pairs * segment.octets * segment.octet_bytes();
            *slot = SegmentArgs {
                codes: at,
                book: BookArgs::new(&segment.book, rows.at()),
                octets: u32_of(segment.octets),
                first_col: u32_of(segment.first_col),
                end_col: u32_of(segment.end_col),
                scales: u32_of(segment.scales),
                factor: segment.factor,
                stride: u32_of(segment.stride),
                // The launch says how it is dealt.
                ..SegmentArgs::default()
            };
            held.push(rows);
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
        Ok(Self { plan, launches, products, args, centroids, bytes })
    }

    /// Copies matrices to the device and brings them into the kernels' order there.
    pub(crate) fn new<'d, D: Device>(
        device: &'d D,
        stack: &Stack<'_>,
        bias: Option<&[f32]>,
        held: &mut Vec<Buffer<'d, D>>,
    ) -> Result<Self, LoadError> {
        let scheme = stack.scheme;
        let plan = MatrixPlan::of(&Layout::new(scheme, stack.shape), stack.group, &stack.books)?;
        let mut common = Common::new(device, stack, bias, held)?;
        let canonical = Buffer::of(device, &stack.codes, "codes")?;
        // Scales that lie with the codes, and the columns of one.
        let beside = if SchemeSpec::of(scheme).second_level.is_some() {
            let (bytes, columns) = &stack.second_level;
            Some((levels(bytes), *columns))
        } else if scheme.group().is_some() {
            let (bits, gain) = scaled(&stack.halves, stack.gain);
            common.args.gain = gain;
            Some((bits, plan.group))
        } else {
            None
        };
        let scales = beside.as_ref().map(|(bits, _)| Buffer::of(device, bits, "scales")).transpose()?;
        let group = beside.as_ref().map_or(plan.group, |&(_, columns)| columns);
        let mut at = Vec::new();
        for segment in &plan.segments {
            let codes = Buffer::zeroed(device, stack.pieces * plan.code_bytes(segment), "codes")?;
            let mut repack = RepackArgs {
                from: canonical.at(),
                to: codes.at(),
                quarters: u32_of(segment.quarters),
                row_bytes: u32_of(plan.row_bytes),
                offset: u32_of(segment.offset),
                tiles: u32_of(segment.tiles),
                octets: u32_of(segment.octets),
                // `INTEGERS` and `PLACES` of `repack.cuh`.
                kind: match scheme.family() {
                    Family::Int if segment.quarters == 32 => 1,
                    Family::Additive(_) => 2,
                    _ => 0,
                },
                scales_row: u32_of(segment.scales),
                group: u32_of(group),
                groups: u32_of(stack.shape.cols.div_ceil(group)),
                scales: scales.as_ref().map_or(0, Buffer::at),
                stride: u32_of(segment.stride),
                ..repack_of(&plan)
            };
            for _ in 0..stack.pieces {
                launch_repack(device, &repack)?;
                repack.from += u64::from(repack.strips) * plan.row_bytes as u64;
                repack.to += plan.code_bytes(segment) as u64;
                repack.scales += u64::from(repack.rows * repack.groups) * size_of::<u16>() as u64;
            }
            at.push(codes.at());
            held.push(codes);
        }
        Ok(Self::planned(device, plan, &common, &at, held)?)
    }

    /// Copies matrices of nested scalar codes to the device: a part for each precision, over one
    /// array of codes, whose octets have the coarsest codes first and then the planes.
    pub(crate) fn readings<'d, D: Device>(
        device: &'d D,
        stack: &Stack<'_>,
        ladder: Ladder,
        bias: Option<&[f32]>,
        held: &mut Vec<Buffer<'d, D>>,
    ) -> Result<Vec<Self>, LoadError> {
        let table = stack.books[0];
        let plans = (ladder.low()..=ladder.high()).map(|bits| {
            let scheme = Scheme::new(Family::Nuq, Rate::quarter_bits(4 * bits)).expect("2 to 8 bits");
            let entries = table.at(bits).expect("a table for every precision").to_vec();
            let table = Codebook::new(scheme, entries, table.step()).expect("a scalar code of its own");
            MatrixPlan::reading(&Layout::new(scheme, stack.shape), stack.group, &table, ladder)
        });
        let plans = plans.collect::<Result<Vec<_>, _>>()?;
        let common = Common::new(device, stack, bias, held)?;
        let whole = plans.last().expect("a precision");
        let segment = &whole.segments[0];
        let codes = Buffer::zeroed(device, stack.pieces * whole.code_bytes(segment), "codes")?;
        let mut to = codes.at();
        for (i, array) in split(&stack.codes, ladder).iter().enumerate() {
            let bits = if i == 0 { ladder.low() as usize } else { 1 };
            let canonical = Buffer::of(device, array, "codes")?;
            let mut repack = RepackArgs {
                from: canonical.at(),
                to,
                quarters: u32_of(4 * bits),
                row_bytes: u32_of(segment.tiles * TILE * bits / 8),
                tiles: u32_of(segment.tiles),
                octets: u32_of(segment.octets),
                stride: u32_of(segment.stride),
                ..repack_of(whole)
            };
            for _ in 0..stack.pieces {
                launch_repack(device, &repack)?;
                repack.from += u64::from(repack.strips * repack.row_bytes);
                repack.to += whole.code_bytes(segment) as u64;
            }
            // An octet of a pair has 32 rows of 128 columns.
            to += (2 * TILE_ROWS * 128 * bits / 8) as u64;
        }
        let parts = plans.into_iter().map(|plan| Self::planned(device, plan, &common, &[codes.at()], held));
        let parts = parts.collect::<Result<_, _>>()?;
        held.push(codes);
        Ok(parts)
    }

    /// What kernels are told of a piece.
    pub(crate) fn args(&self, piece: usize) -> MatrixArgs {
        let mut args = self.args;
        for (segment, slot) in self.plan.segments.iter().zip(&mut args.segments) {
            slot.codes += (piece * self.plan.code_bytes(segment)) as u64;
        }
        // Where scales lie with the codes there are none.
        args.scales += (piece * self.plan.shape.rows * args.groups as usize * size_of::<f32>()) as u64;
        args
    }

    pub(crate) fn product(&self, batch: usize) -> Product {
        self.products[batch - 1]
    }

    pub(crate) fn set_product(&mut self, product: Product) {
        let possible = product == Product::Expand || self.plan.psums.is_some();
        assert!(possible, "{} has no Psumbook", self.plan.gemv);
        self.products.fill(product);
    }

    /// The same over other buffers.
    pub(crate) fn moved(&self, moved: impl Fn(&mut Address)) -> Self {
        let mut part = self.clone();
        for slot in &mut part.args.segments {
            moved(&mut slot.codes);
            moved(&mut slot.book.rows);
        }
        moved(&mut part.args.scales);
        moved(&mut part.args.bias);
        moved(&mut part.centroids);
        part
    }

    /// Words of workspace of a product.
    pub(crate) fn workspace(&self, batch: usize) -> usize {
        match self.product(batch) {
            Product::Expand => self.launches[batch - 1].partial,
            Product::Psumbook => PsumPlan::workspace(&self.plan, batch),
        }
    }

    /// `y = W x` for `batch` (1 to 8) tokens, row `n` of the result at float `offset + n stride`.
    pub(crate) fn apply<D: Device>(
        &self,
        (device, w): (&D, MatrixArgs),
        (x, y): (Address, Address),
        stride: usize,
        batch: usize,
        accumulate: bool,
        work: &Workspace<'_, D>,
    ) -> Result<(), DeviceError> {
        let launch = &self.launches[batch - 1];
        assert!(4 * self.workspace(batch) <= work.partial.bytes(), "workspace made for this matrix");
        if let (Product::Psumbook, Some(psums)) = (self.product(batch), &self.plan.psums) {
            let args = PsumArgs {
                w,
                centroids: self.centroids,
                x,
                y,
                parts: work.partial.at(),
                batch: u32_of(batch),
                x_stride: self.args.cols,
                y_stride: u32_of(stride),
                accumulate: u32::from(accumulate),
                // The launch says where scales are and how it is dealt.
                ..PsumArgs::default()
            };
            return psums.launch(device, &self.plan, args);
        }
        let mut args = GemvArgs {
            w,
            x,
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
        device.launch(&self.plan.gemv, grid, bytemuck::bytes_of(&args))
    }

    /// Expands to f16 (rows, cols) at `out`: weights, or with `raw` the integers of the codes; with
    /// `add` to what is there.
    pub(crate) fn expand<D: Device>(
        &self,
        (device, w): (&D, MatrixArgs),
        out: Address,
        raw: bool,
        add: bool,
    ) -> Result<(), DeviceError> {
        const MOST_WARPS: usize = 16;
        let limits = device.limits();
        for (i, segment) in self.plan.segments.iter().enumerate() {
            let args =
                DequantArgs { w, out, segment: u32_of(i), raw: u32::from(raw), add: u32::from(add), pad: 0 };
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
            device.launch(&segment.dequant, grid, bytemuck::bytes_of(&args))?;
        }
        Ok(())
    }

    /// A product with weights that were expanded to `weights`, for any number of tokens.
    pub(crate) fn dense<D: Device>(
        &self,
        device: &D,
        (weights, halves, y): (Address, Address, Address),
        stride: usize,
        tokens: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let args = GemmArgs {
            w: weights,
            x: halves,
            bias: self.args.bias,
            y,
            rows: self.args.rows,
            cols: self.args.cols,
            tokens: u32_of(tokens),
            y_stride: u32_of(stride),
            accumulate: u32::from(accumulate),
            pad: 0,
        };
        Gemm::choose(device, self.plan.shape.rows, tokens).launch(device, &args)
    }
}

/// What repacking has to know of a matrix as a whole.
fn repack_of(plan: &MatrixPlan) -> RepackArgs {
    RepackArgs {
        strips: u32_of(plan.shape.rows.div_ceil(TILE_ROWS)),
        pairs: u32_of(plan.pairs),
        rows: u32_of(plan.shape.rows),
        ..RepackArgs::default()
    }
}

fn launch_repack<D: Device>(device: &D, args: &RepackArgs) -> Result<(), DeviceError> {
    let bytes = args.pairs as usize * args.octets as usize * args.stride as usize;
    let blocks = u32_of(bytes.div_ceil(16 << 10).clamp(1, 4096));
    device.launch(
        "fb_repack",
        Grid { blocks: (blocks, 1), threads: 256, shared: 0 },
        bytemuck::bytes_of(args),
    )
}

#[cfg(test)]
mod tests {
    use super::split;
    use fracbit_base::{Family, Scheme};

    #[test]
    fn codes_of_a_ladder_are_split_into_the_coarsest_and_planes() {
        let scheme: Scheme = "nest-nuq-3..6".parse().expect("a scheme");
        let Family::NestNuq(ladder) = scheme.family() else { panic!("nested scalar codes") };
        // Two rows of a tile: indices i * 7 % 64, six bits each.
        let index = |i: usize| i * 7 % 64;
        let bit = |i: usize, at: usize| index(i) >> at & 1;
        let pack = |bits: usize, value: &dyn Fn(usize) -> usize| {
            let mut bytes = vec![0u8; 32 * bits / 8];
            for at in 0..32 * bits {
                bytes[at / 8] |= ((value(at / bits) >> (at % bits) & 1) as u8) << (at % 8);
            }
            bytes
        };
        let got = split(&pack(6, &index), ladder);
        let want = [
            pack(3, &|i| index(i) & 7),
            pack(1, &|i| bit(i, 3)),
            pack(1, &|i| bit(i, 4)),
            pack(1, &|i| bit(i, 5)),
        ];
        assert_eq!(got, want);
    }
}
