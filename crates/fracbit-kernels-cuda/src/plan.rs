//! How a packed matrix is laid out on a device and how its kernels are launched.

use crate::{Book, Product, PsumPlan};
use fracbit_base::{Code, Family, Ladder, Scheme, Shape};
use fracbit_format::{Codebook, Layout, PackedView, SchemeSpec, TILE_COLS, TILE_ROWS};

/// Tile columns that a warp takes at a time.
pub const OCTET: usize = 8;
/// Columns of an octet.
const OCTET_COLS: usize = OCTET * TILE_COLS;
/// Columns that share a staged scale (group-wise schemes).
const SCALE_COLS: usize = 32;
/// Warps of a block, the most first (`GEMV_WARPS` of `gemv.cuh`); fewer where tables and
/// activations leave no room.
const WARPS: [usize; 6] = [16, 12, 8, 4, 2, 1];
/// Most panels that are tried.
const MAX_PANELS: usize = 128;
/// Most tokens of a launch.
const MAX_BATCH: usize = 8;

/// A matrix that the kernels do not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// Scales that do not go with the kernels' loop.
    #[error(
        "cuda: `group` should be 0 (one scale per row) or a multiple of {unit} that starts with each half, got {group} ({scheme}, {shape})"
    )]
    Group {
        /// Columns of a scale.
        group: usize,
        /// What the kernels take: 32 for group-wise schemes, else an octet.
        unit: usize,
        /// The scheme.
        scheme: Scheme,
        /// The shape.
        shape: Shape,
    },
}

/// A run of tile columns in one scheme.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentPlan {
    /// The kernel that expands it.
    pub dequant: String,
    /// Rate in quarters of a bit per weight: a lane's bytes of a tile.
    pub quarters: usize,
    /// Scales of an octet's row, of group-wise and progressive schemes (1, 2 or 4); else 0.
    pub scales: usize,
    /// Bytes from octet to octet of a pair of strips.
    pub stride: usize,
    /// Byte offset of the segment in a canonical row of tiles.
    pub offset: usize,
    /// Tile columns.
    pub tiles: usize,
    /// Groups of eight tile columns, the last padded.
    pub octets: usize,
    /// First column.
    pub first_col: usize,
    /// One past the last column.
    pub end_col: usize,
    /// The step: what turns an integer times its row's scale and the gain into a weight.
    pub factor: f32,
    /// The table.
    pub book: Book,
}

/// What the device needs to know of a packed matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixPlan {
    /// The kernel that multiplies by it.
    pub gemv: String,
    /// Shape without padding.
    pub shape: Shape,
    /// Columns that share a scale.
    pub group: usize,
    /// Scales of a row.
    pub groups: usize,
    /// Pairs of strips of 16 rows, the last padded.
    pub pairs: usize,
    /// Bytes of a canonical row of tiles.
    pub row_bytes: usize,
    /// One, or two for half-trellis schemes.
    pub segments: Vec<SegmentPlan>,
    /// Of additive codebooks: products by a Psumbook.
    pub psums: Option<PsumPlan>,
}

/// What a device offers to a block.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that one block may have.
    pub shared: usize,
}

/// How the blocks of a launch share one segment (`Segment` of `gemv.cuh`). A unit of work is an
/// octet of a pair of strips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Ranges of columns whose activations fit into shared memory.
    pub panels: usize,
    /// Octets of a panel; the last may have fewer.
    pub width: usize,
    /// Blocks of a panel.
    pub blocks: usize,
    /// Whether blocks take whole pairs of a panel.
    pub whole: bool,
    /// Most blocks that share a pair of a panel.
    pub slots: usize,
}

/// The shape of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Warps of a block.
    pub warps: usize,
    /// Blocks.
    pub blocks: usize,
    /// How they share each segment.
    pub deals: Vec<Deal>,
    /// Bytes of shared memory.
    pub shared: usize,
    /// Floats of workspace.
    pub partial: usize,
}

impl Launch {
    /// Most sums of blocks that make an output.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.deals.iter().map(|d| d.panels * d.slots).sum()
    }
}

/// The expander of a scheme without halves, with its rate in quarters of a bit per weight, or its
/// codebooks.
fn expander(scheme: Scheme) -> String {
    let quarters = usize::from(scheme.quarters());
    let name = match (scheme.family(), scheme.code()) {
        (Family::Additive(books), _) => return format!("aq_{}", books.of_bytes()),
        (Family::Nuq, _) if quarters > 28 => "single",
        (Family::Nuq | Family::Vq, _) => "pair",
        (Family::Int, _) if quarters == 32 => "bytes",
        (Family::Int, _) => "ints",
        (Family::Gnuq, _) => "books",
        (Family::Qoq(_), _) => "levels",
        (_, code) => code.unwrap_or(Code::Fine).name(),
    };
    format!("{name}_{quarters}")
}

impl MatrixPlan {
    /// The plan of `view`, in a scheme of one precision.
    ///
    /// # Errors
    /// When the scales are laid out in a way the kernels do not run.
    ///
    /// # Panics
    /// For a nested scheme.
    pub fn new(view: &PackedView<'_>) -> Result<Self, Unsupported> {
        Self::of(view.layout(), view.group(), view.codebooks())
    }

    /// The plan of a matrix laid out so, whose scales are of `group` columns.
    pub(crate) fn of(layout: &Layout, group: usize, codebooks: &[&Codebook]) -> Result<Self, Unsupported> {
        let (shape, scheme) = (layout.shape(), layout.scheme());
        assert!(!scheme.nested(), "{scheme} is planned precision by precision");
        let (groups, grouped) = (shape.cols.div_ceil(group), scheme.group().is_some());
        let progressive = SchemeSpec::of(scheme).second_level.is_some();
        let unit = if grouped { SCALE_COLS } else { OCTET_COLS };
        let unsupported = Unsupported::Group { group, unit, scheme, shape };
        if groups > 1 && !group.is_multiple_of(unit) {
            return Err(unsupported);
        }
        let mut segments = Vec::with_capacity(2);
        for (segment, codebook) in layout.segments().iter().zip(codebooks) {
            let first_col = segment.start * TILE_COLS;
            if groups > 1 && !first_col.is_multiple_of(OCTET_COLS) {
                return Err(unsupported);
            }
            let mut plan = SegmentPlan {
                dequant: format!("dequant_{}", expander(segment.scheme)),
                quarters: usize::from(segment.scheme.quarters()),
                scales: match group {
                    // Integer scales of 128 columns or of rows.
                    _ if progressive => 1,
                    _ if !grouped => 0,
                    _ if groups == 1 => 1,
                    group if group.is_multiple_of(OCTET_COLS) => 1,
                    group if group.is_multiple_of(OCTET_COLS / 2) => 2,
                    _ => OCTET_COLS / SCALE_COLS,
                },
                stride: 0,
                offset: segment.offset,
                tiles: segment.end - segment.start,
                octets: (segment.end - segment.start).div_ceil(OCTET),
                first_col,
                end_col: shape.cols.min(segment.end * TILE_COLS),
                factor: codebook.step(),
                book: Book::new(codebook),
            };
            plan.stride = plan.octet_bytes();
            segments.push(plan);
        }
        let name = layout.segments().first().map_or_else(String::new, |s| expander(s.scheme));
        let half = if segments.len() == 2 { "half_" } else { "" };
        Ok(Self {
            gemv: format!("gemv_{half}{name}"),
            shape,
            group,
            groups,
            pairs: layout.tiles_down().div_ceil(2),
            row_bytes: layout.row_bytes(),
            segments,
            psums: codebooks.first().and_then(|book| PsumPlan::new(book)),
        })
    }

    /// The plan of nested scalar codes read at `bits` bits: `layout` and `table` are those of the
    /// scalar code of so many bits, `ladder` says which there are.
    pub(crate) fn reading(
        layout: &Layout,
        group: usize,
        table: &Codebook,
        ladder: Ladder,
    ) -> Result<Self, Unsupported> {
        let mut plan = Self::of(layout, group, &[table])?;
        let (low, bits) = (ladder.low(), u32::from(layout.scheme().quarters()) / 4);
        for segment in &mut plan.segments {
            segment.stride = segment.stride / bits as usize * ladder.high() as usize;
            if bits > low {
                segment.dequant = format!("dequant_nest_{low}_{bits}");
                segment.book = segment.book.nested(low, bits);
                plan.gemv = format!("gemv_nest_{low}_{bits}");
            }
        }
        Ok(plan)
    }

    /// How a product of `batch` (1 to 8) tokens is made: what is faster, by counts.
    #[must_use]
    pub fn product(&self, batch: usize, limits: &Limits) -> Product {
        self.psums.as_ref().map_or(Product::Expand, |psums| psums.choose(self, batch, limits))
    }

    /// Bytes of one segment's codes on the device.
    #[must_use]
    pub fn code_bytes(&self, segment: &SegmentPlan) -> usize {
        self.pairs * segment.octets * segment.stride
    }

    /// The launch of a product with `batch` (1 to 8) tokens.
    ///
    /// One block falls on each multiprocessor, and every block gets the same number of octets. Of
    /// the ways to cut the columns into panels and to share the pairs, the one with the least
    /// predicted time is taken: fewer columns a block are fewer activations to load, sums over
    /// blocks cost time at the end, and whole pairs of strips may come out uneven.
    ///
    /// # Panics
    /// When `batch` is 0 or above 8, or when not even one warp with one octet fits (below 99 KiB).
    #[must_use]
    pub fn launch(&self, batch: usize, limits: &Limits) -> Launch {
        assert!((1..=MAX_BATCH).contains(&batch), "a launch takes 1 to 8 tokens, got {batch}");
        let all = WARPS.iter().flat_map(|&warps| (1..=MAX_PANELS).map(move |panels| (warps, panels)));
        let found = all.filter_map(|(warps, panels)| self.deal((warps, panels), batch, limits));
        let best = found.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, launch)| launch);
        best.unwrap_or_else(|| {
            panic!("{} does not fit into {} bytes of shared memory", self.gemv, limits.shared)
        })
    }

    /// The launch with `warps` warps a block and at least `panels` panels of each segment, with its
    /// predicted microseconds, where it fits.
    fn deal(&self, (warps, panels): (usize, usize), batch: usize, limits: &Limits) -> Option<(f64, Launch)> {
        // Microseconds, of an H200. Sums over blocks, once, and for every part of an output.
        const JOIN: f64 = 2.0;
        const PART: f64 = 0.1;
        // Loading an octet of one token's activations.
        const LOAD: f64 = 0.009;
        // Sums of a pair over the warps of a block.
        const SUM: f64 = 0.4;
        // A warp's trip to memory.
        const LATENCY: f64 = 0.85;
        let costs: Vec<f64> = self.segments.iter().map(|s| s.octets as f64 * s.microseconds()).collect();
        let all: f64 = costs.iter().sum();
        let (mut deals, mut shared, mut time) = (Vec::new(), 0, 0f64);
        for (segment, cost) in self.segments.iter().zip(&costs) {
            let share = (limits.multiprocessors as f64 * cost / all).round() as usize;
            let sums = warps * size_of::<f32>() * 2 * TILE_ROWS * batch;
            let fixed = segment.book.bytes() + warps * segment.ring() + sums;
            let room = limits.shared.checked_sub(fixed)?;
            if panels > segment.octets || room < sums {
                return None;
            }
            let width = segment.octets.div_ceil(panels);
            let panels = segment.octets.div_ceil(width);
            let staged = batch * (width * segment.staged_octet() + 64);
            if staged > room {
                return None;
            }
            let most = (share.max(1) / panels).max(1);
            // Blocks of equal work: as few as do it in the time of the most.
            let (units, pairs) = (self.pairs * width, self.pairs);
            let even = units.div_ceil(most.min(units));
            let row = pairs.div_ceil(most.min(pairs));
            let alone = self.segments.len() * panels == 1;
            let gain = if alone { JOIN / segment.microseconds() } else { 0.03 * even as f64 };
            let whole = (row * width) as f64 <= even as f64 + gain;
            // The last panel has the fewest units, and each of them a block.
            let last = segment.octets - (panels - 1) * width;
            let blocks = if whole { pairs.div_ceil(row) } else { units.div_ceil(even).min(pairs * last) };
            let slots = |octets: usize| ((octets - 1) / (pairs * octets / blocks) + 2).min(blocks);
            let slots = if whole { 1 } else { slots(width).max(slots(last)) };
            // More blocks than multiprocessors run one after the other.
            let turns = panels.div_ceil(share.max(1).min(panels)) as f64;
            let busy = if whole { row * width } else { even } as f64 * segment.microseconds();
            // Few warps wait for memory and for their own results.
            let ahead = (segment.stages() - 1) as f64;
            let slow =
                f64::max(1.0 + 1.0 / warps as f64, LATENCY / (segment.microseconds() * warps as f64 * ahead));
            // Pairs that a warp sums one after the other.
            let rounds = pairs.div_ceil(blocks).div_ceil(warps) as f64;
            let parts = (panels * slots) as f64;
            let join = if alone && whole { 0.0 } else { JOIN + rounds * (1.0 + parts * PART) };
            let load = (width * batch) as f64 * LOAD;
            time = time.max(turns * (busy * slow + load + rounds * SUM) + join);
            shared = shared.max(fixed + staged.max(sums));
            deals.push(Deal { panels, width, blocks, whole, slots });
        }
        // Two blocks on one multiprocessor would leave another idle.
        let shared = shared.max(limits.shared / 2 + 1);
        let mut launch = Launch {
            warps,
            blocks: deals.iter().map(|d| d.panels * d.blocks).sum(),
            deals,
            shared,
            partial: 0,
        };
        if launch.parts() > 1 {
            launch.partial = launch.parts() * self.pairs * 2 * TILE_ROWS * MAX_BATCH;
        }
        Some((time, launch))
    }
}

impl SegmentPlan {
    /// Bytes that are read of an octet of a pair of strips: codes, and the scales of group-wise
    /// schemes.
    #[must_use]
    pub fn octet_bytes(&self) -> usize {
        2 * TILE_ROWS * (OCTET_COLS * self.quarters / 32 + size_of::<u16>() * self.scales)
    }

    /// Bytes of an octet of one token's staged activations (`X_OCTET` of `gemv.cuh`): one word per
    /// column where a table word holds one weight, half a word where it holds two.
    fn staged_octet(&self) -> usize {
        OCTET_COLS * if self.single() { 4 } else { 2 }
    }

    /// Octets of a warp's ring (`STAGES` of `gemv.cuh`).
    fn stages(&self) -> usize {
        match self.quarters {
            ..=5 => 4,
            6..=8 => 3,
            _ => 2,
        }
    }

    /// Bytes of a warp's ring.
    fn ring(&self) -> usize {
        self.stages() * self.octet_bytes()
    }

    /// What a multiprocessor takes for an octet of a pair, in microseconds (an H200): lookups, one
    /// for each word of 32 lanes, or the bytes.
    fn microseconds(&self) -> f64 {
        let lookups = if self.single() { 0.095 } else { 0.06 };
        f64::max(lookups, self.octet_bytes() as f64 / 31_000.0)
    }

    /// Whether a word of the table holds one weight.
    #[must_use]
    pub fn single(&self) -> bool {
        let nested = self.dequant.contains("nest") && self.quarters == 32;
        nested || ["fine", "fast", "single"].iter().any(|name| self.dequant.contains(name))
    }

    /// Bytes of shared memory of an expansion with `warps` warps.
    #[must_use]
    pub fn dequant_shared(&self, warps: usize) -> usize {
        self.book.bytes() + warps * 2 * self.octet_bytes()
    }

    /// Warps of an expansion that `shared` bytes have room for.
    #[must_use]
    pub fn dequant_warps(&self, shared: usize) -> usize {
        shared.saturating_sub(self.book.bytes()) / (2 * self.octet_bytes())
    }
}
