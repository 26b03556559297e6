//! How a packed matrix is laid out on a device and how its kernels are launched.

use crate::{Book, Core};
use fracbit_base::{Code, Family, Scheme, Shape};
use fracbit_format::{Layout, PackedView, SchemeSpec, TILE_COLS, TILE_ROWS};

/// Tile columns that a warp takes at a time.
pub const OCTET: usize = 8;
/// Columns of an octet.
const OCTET_COLS: usize = OCTET * TILE_COLS;
/// Columns that share a staged scale (`SCALE_COLS` of `grouped.cuh`).
const SCALE_COLS: usize = 32;
/// Octets of a turn (`TURN` of `gemv.cuh`): ranges are multiples of it.
const TURN: usize = 2;
/// Most warps of a block (`FB_KERNEL` of `instances.cu`).
const MAX_WARPS: usize = 8;
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
    /// A scheme of several planes, levels or codebooks.
    #[error("cuda: {scheme} has no kernels here yet; run it on the CPU")]
    Scheme {
        /// The scheme.
        scheme: Scheme,
    },
}

/// A run of tile columns in one scheme.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentPlan {
    /// The kernel that expands it.
    pub dequant: String,
    /// Rate in quarters of a bit per weight: a lane's bytes of a tile.
    pub quarters: usize,
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

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Tensor cores: every scheme, 1 to 8 tokens by one kernel.
    Tensor,
    /// Integer dot products: scalar and vector codes, activations rounded as on the processor.
    Core,
}

/// The product without tensor cores.
#[derive(Clone, Debug, PartialEq)]
pub struct CorePlan {
    /// The form.
    pub form: Core,
    /// Its table.
    pub book: Book,
}

/// What the device needs to know of a packed matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixPlan {
    /// The kernel that multiplies by it on the tensor cores; group-wise schemes have none.
    pub gemv: Option<String>,
    /// The product without tensor cores, where there is one.
    pub core: Option<CorePlan>,
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
}

/// What a device offers to a block.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that one block may have.
    pub shared: usize,
}

/// The shape of one launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Warps of a block; each takes a pair of strips.
    pub warps: usize,
    /// Blocks along the rows.
    pub blocks: usize,
    /// Octets of a range, and ranges, of each segment.
    pub ranges: Vec<(usize, usize)>,
    /// Bytes of shared memory.
    pub shared: usize,
    /// Floats of workspace.
    pub partial: usize,
}

impl Launch {
    /// Ranges of octets over all segments: blocks along the columns.
    #[must_use]
    pub fn splits(&self) -> usize {
        self.ranges.iter().map(|(_, splits)| splits).sum()
    }
}

/// The expander of a scheme without halves, and its rate in quarters of a bit per weight.
fn expander(scheme: Scheme) -> (&'static str, usize) {
    let quarters = usize::from(scheme.quarters());
    let name = match (scheme.family(), scheme.code()) {
        (Family::Nuq, _) if quarters > 28 => "single",
        (Family::Nuq | Family::Vq, _) => "pair",
        (Family::Int, _) if quarters == 32 => "bytes",
        (Family::Int | Family::Gnuq, _) => "books",
        (_, code) => code.unwrap_or(Code::Fine).name(),
    };
    (name, quarters)
}

impl MatrixPlan {
    /// Whether there are kernels for a scheme: not for nested, progressive and additive ones.
    #[must_use]
    pub fn supports(scheme: Scheme) -> bool {
        let additive = matches!(scheme.family(), Family::Additive(_));
        scheme.planes() == 1 && SchemeSpec::of(scheme).second_level.is_none() && !additive
    }

    /// Refuses what there are no kernels for.
    pub(crate) fn require_kernels(view: &PackedView<'_>) -> Result<(), Unsupported> {
        let scheme = view.layout().scheme();
        if Self::supports(scheme) { Ok(()) } else { Err(Unsupported::Scheme { scheme }) }
    }

    /// The plan of `view`.
    ///
    /// # Errors
    /// When the scales are laid out in a way the kernels do not run, and for a scheme without
    /// kernels.
    pub fn new(view: &PackedView<'_>) -> Result<Self, Unsupported> {
        Self::require_kernels(view)?;
        let layout: &Layout = view.layout();
        let (shape, groups) = (view.shape(), view.groups());
        let grouped = layout.scheme().group().is_some();
        let unit = if grouped { SCALE_COLS } else { OCTET_COLS };
        let unsupported = Unsupported::Group { group: view.group(), unit, scheme: layout.scheme(), shape };
        if groups > 1 && !view.group().is_multiple_of(unit) {
            return Err(unsupported);
        }
        let mut segments = Vec::with_capacity(2);
        for (segment, codebook) in layout.segments().iter().zip(view.codebooks()) {
            let first_col = segment.start * TILE_COLS;
            if groups > 1 && !first_col.is_multiple_of(OCTET_COLS) {
                return Err(unsupported);
            }
            let (name, quarters) = expander(segment.scheme);
            segments.push(SegmentPlan {
                dequant: format!("dequant_{name}_{quarters}"),
                quarters,
                offset: segment.offset,
                tiles: segment.end - segment.start,
                octets: (segment.end - segment.start).div_ceil(OCTET),
                first_col,
                end_col: shape.cols.min(segment.end * TILE_COLS),
                factor: codebook.step(),
                book: if grouped { Book::core(codebook).map(|c| c.1) } else { None }
                    .unwrap_or_else(|| Book::new(codebook)),
            });
        }
        let (name, quarters) = layout.segments().first().map_or(("pair", 6), |s| expander(s.scheme));
        let half = if segments.len() == 2 { "half_" } else { "" };
        let core = if segments.len() == 1 { Book::core(view.codebooks()[0]) } else { None };
        Ok(Self {
            gemv: (!grouped).then(|| format!("gemv_{half}{name}_{quarters}")),
            core: core.map(|(form, book)| CorePlan { form, book }),
            shape,
            group: view.group(),
            groups,
            pairs: layout.tiles_down().div_ceil(2),
            row_bytes: layout.row_bytes(),
            segments,
        })
    }

    /// Bytes of one segment's codes on the device; products also read an octet of padding behind
    /// them.
    #[must_use]
    pub fn code_bytes(&self, segment: &SegmentPlan) -> usize {
        self.pairs * segment.octets * segment.octet_bytes()
    }

    /// What multiplies by `batch` tokens unless told otherwise: the fewer instructions per weight
    /// (docs/cuda-kernels.md). Four weights a lookup beat the tensor cores' two up to two tokens;
    /// everything else is theirs.
    #[must_use]
    pub fn engine(&self, batch: usize) -> Engine {
        match &self.core {
            Some(CorePlan { form: Core::Quads, .. }) if batch <= 2 => Engine::Core,
            _ if self.gemv.is_none() => Engine::Core,
            _ => Engine::Tensor,
        }
    }

    /// The kernel of a product with `batch` tokens.
    ///
    /// # Panics
    /// When there is none for the engine.
    #[must_use]
    pub fn kernel(&self, engine: Engine, batch: usize) -> String {
        match engine {
            Engine::Tensor => self.gemv.clone().expect("a product on the tensor cores"),
            Engine::Core => {
                let core = self.core.as_ref().expect("a form without tensor cores");
                // The instances that `xtask codegen` lists.
                let tokens = match core.form {
                    Core::Quads => batch.next_power_of_two(),
                    _ if batch == 1 => 1,
                    _ => MAX_BATCH,
                };
                format!("core_{}_{}_{tokens}", core.form.name(), self.segments[0].quarters)
            }
        }
    }

    /// The launch of a product with `batch` (1 to 8) tokens.
    ///
    /// Octets are dealt into ranges so that two blocks fall on each multiprocessor; then ranges and
    /// blocks shrink until tables, activations and rings fit into shared memory, and blocks until
    /// every multiprocessor has one.
    ///
    /// # Panics
    /// When `batch` is 0 or above 8, or when not even one warp with one octet fits (below 99 KiB);
    /// for an engine that the matrix lacks.
    #[must_use]
    pub fn launch(&self, engine: Engine, batch: usize, limits: &Limits) -> Launch {
        assert!((1..=MAX_BATCH).contains(&batch), "a launch takes 1 to 8 tokens, got {batch}");
        let octets: usize = self.segments.iter().map(|s| s.octets).sum();
        let mut warps = MAX_WARPS;
        loop {
            let blocks = self.pairs.div_ceil(warps);
            let splits = (2 * limits.multiprocessors).div_ceil(blocks.max(1)).max(1);
            let mut per_split = octets.div_ceil(splits).next_multiple_of(TURN).max(TURN);
            let shared = |per: usize| match engine {
                Engine::Tensor => {
                    self.segments.iter().map(|s| s.shared(batch, per, warps)).max().unwrap_or_default()
                }
                Engine::Core => {
                    let core = self.core.as_ref().expect("a form without tensor cores");
                    // Activations with 16 bytes of padding, a scale for each 256 columns.
                    let token = per * OCTET_COLS * core.form.bytes() + 16 + 4 * (per / TURN);
                    // A half for each 32 columns of every row of the block, and two of padding.
                    let scales = 32 * warps * 2 * (per * (OCTET_COLS / SCALE_COLS) + 2);
                    let scales = if core.form.grouped() { scales } else { 0 };
                    let fixed = core.book.bytes() + (batch * token).next_multiple_of(16);
                    fixed + scales + warps * self.segments[0].ring()
                }
            };
            while per_split > TURN && shared(per_split) > limits.shared {
                per_split = per_split.div_ceil(2).next_multiple_of(TURN);
            }
            let shared = shared(per_split);
            if shared > limits.shared {
                assert!(
                    warps > 1,
                    "{} needs {shared} bytes of shared memory, a block has {}",
                    self.kernel(engine, batch),
                    limits.shared
                );
                warps /= 2;
                continue;
            }
            let ranges: Vec<_> =
                self.segments.iter().map(|s| (per_split, s.octets.div_ceil(per_split))).collect();
            let mut launch = Launch { warps, blocks, ranges, shared, partial: 0 };
            // A small matrix keeps more multiprocessors busy in smaller blocks.
            if launch.blocks * launch.splits() < limits.multiprocessors && warps > 1 {
                warps /= 2;
                continue;
            }
            if launch.splits() > 1 {
                launch.partial = launch.splits() * self.pairs * 2 * TILE_ROWS * MAX_BATCH;
            }
            return launch;
        }
    }
}

impl SegmentPlan {
    /// Bytes of an octet of a pair of strips.
    #[must_use]
    pub fn octet_bytes(&self) -> usize {
        2 * TILE_ROWS * OCTET_COLS * self.quarters / 32
    }

    /// Bytes of shared memory of a product: table, staged activations, rings.
    fn shared(&self, batch: usize, per_split: usize, warps: usize) -> usize {
        // One word per column where a table word holds one weight, half a word where it holds two;
        // 16 words of padding.
        let words = if self.single() { OCTET_COLS } else { OCTET_COLS / 2 };
        let staged = (4 * batch * (per_split * words + 16)).next_multiple_of(16);
        self.book.bytes() + staged + warps * self.ring()
    }

    /// Bytes of a warp's ring (`Ring` of `gemv.cuh`).
    fn ring(&self) -> usize {
        let trellis = ["fine", "fast", "hyb"].iter().any(|code| self.dequant.contains(code));
        let stages = if !trellis && self.quarters <= 10 { 4 } else { 2 };
        stages * TURN * self.octet_bytes()
    }

    /// Whether a word of the table holds one weight.
    fn single(&self) -> bool {
        !self.dequant.contains("pair") && !self.dequant.contains("hyb")
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
