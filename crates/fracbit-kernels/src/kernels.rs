//! The dispatch table: which microkernel runs a codebook.

use crate::{
    Args, Interleave, Isa, Line, LinearKernel, Vectors,
    expand::{self, ExpandThenDot, nested::NestedMicrokernel, psumbook::PsumTile},
    progressive::{Progressive, ProgressiveMicrokernel},
    reference,
};
use fracbit_format::{Codebook, PackedView, SchemeSpec, TILE_ROWS};
use std::sync::Arc;

/// Multiplies strips by activations; see [`Args`] for what it reads and writes.
pub type StripFn = unsafe fn(&Args<'_>, &mut [f32]);

/// Makes the kernel of a matrix, or `None` where the backend leaves it to others; is told all that
/// is installed.
pub type LinearProvider = fn(&Kernels, &PackedView<'_>) -> Option<Arc<dyn LinearKernel>>;

/// Finds the microkernel of a codebook, or `None` when the backend has none for it.
pub type Provider = fn(&Codebook) -> Option<Microkernel>;

/// How a microkernel wants the bytes of a tile: a permutation of the canonical ones, made when a
/// matrix is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// Canonical tile to the microkernel's.
    pub pack: fn(&Codebook, &[u8], &mut [u8]),
    /// The microkernel's tile to the canonical one.
    pub unpack: fn(&Codebook, &[u8], &mut [u8]),
}

/// One microkernel made ready for one codebook.
#[derive(Clone, Debug)]
pub struct Microkernel {
    isa: Isa,
    table: Vec<Line>,
    lanes: [u8; TILE_ROWS],
    run: StripFn,
    packing: Option<Packing>,
    panels: &'static [Interleave],
}

impl Microkernel {
    /// A microkernel for `isa`. `table` holds whatever constants the microkernel wants to find in
    /// [`Args::table`]; `lanes[i]` is the tile row whose scale the microkernel expects at place `i`
    /// of a strip's scales.
    ///
    /// # Panics
    /// When `lanes` is no permutation of the rows of a tile.
    ///
    /// # Safety
    /// The processor has `isa`, and `run` is sound for every [`Args`] that this crate builds with
    /// this `table` and a codebook equal to the one the provider was asked about, for all values of
    /// codes and activations.
    #[must_use]
    #[expect(unsafe_code, reason = "the contract that lets safe code call microkernels with target features")]
    pub unsafe fn new(isa: Isa, table: Vec<Line>, lanes: [u8; TILE_ROWS], run: StripFn) -> Self {
        let mut seen = [false; TILE_ROWS];
        lanes.iter().for_each(|&row| seen[usize::from(row)] = true);
        assert_eq!(seen, [true; TILE_ROWS], "lanes of a microkernel are a permutation");
        Self { isa, table, lanes, run, packing: None, panels: &[] }
    }

    /// The microkernel reads tiles packed by `packing` instead of canonical ones.
    #[must_use]
    pub const fn with_packing(mut self, packing: Packing) -> Self {
        self.packing = Some(packing);
        self
    }

    /// The same microkernel, which takes activations of several tokens in these ways, each from
    /// more tokens on than the one before it.
    #[must_use]
    pub const fn with_panels(mut self, interleaves: &'static [Interleave]) -> Self {
        self.panels = interleaves;
        self
    }

    /// How activations of `batch` tokens come.
    pub(crate) fn interleave(&self, batch: usize) -> Option<Interleave> {
        self.panels.iter().rfind(|interleave| batch >= interleave.from()).copied()
    }

    /// The instruction set.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) const fn packing(&self) -> Option<Packing> {
        self.packing
    }

    pub(crate) const fn lanes(&self) -> &[u8; TILE_ROWS] {
        &self.lanes
    }

    pub(crate) fn table(&self) -> &[Line] {
        &self.table
    }

    #[expect(unsafe_code, reason = "the one call of a microkernel")]
    pub(crate) fn run(&self, args: &Args<'_>, out: &mut [f32]) {
        debug_assert_eq!(out.len(), args.out_len(), "one vector per strip and token");
        // SAFETY: `Microkernel::new` was promised the instruction set and soundness for arguments
        // built by `matmul`.
        unsafe { (self.run)(args, out) }
    }
}

/// Providers of kernels and of microkernels. A plain value: tests build as many as they like.
///
/// A codebook is offered to the providers from the last installed to the first, so that the order
/// of installation is the policy; the scalar reference takes what nobody else does.
#[derive(Clone, Debug, Default)]
pub struct Kernels {
    linear: Vec<LinearProvider>,
    providers: Vec<Provider>,
    progressive: Option<ProgressiveMicrokernel>,
    nested: Option<NestedMicrokernel>,
    bit_planes: Option<Provider>,
    psum_tile: Option<PsumTile>,
    vectors: Vectors,
}

impl Kernels {
    /// Only the scalar reference.
    #[must_use]
    pub fn scalar() -> Self {
        Self::default()
    }

    /// Adds a backend's microkernels; they win over all installed before.
    pub fn install(&mut self, provider: Provider) {
        self.providers.push(provider);
    }

    /// Adds kernels of whole matrices; they win over microkernels, and over all kernels installed
    /// before.
    pub fn install_linear(&mut self, provider: LinearProvider) {
        self.linear.push(provider);
    }

    /// The same without kernels of whole matrices: codes are expanded, to compare with or to
    /// measure.
    #[must_use]
    pub fn expanding(mut self) -> Self {
        self.linear.clear();
        self
    }

    /// Sets what is read of a Psumbook at once, where it should not be [`PsumTile::usual`]; numbers
    /// beyond what there is are those nearest to it.
    pub fn set_psum_tile(&mut self, tile: PsumTile) {
        self.psum_tile = Some(tile);
    }

    /// What [`Kernels::set_psum_tile`] was told.
    pub(crate) const fn psum_tile(&self) -> Option<PsumTile> {
        self.psum_tile
    }

    /// Sets the microkernel of progressive schemes; it replaces the one installed before.
    pub fn install_progressive(&mut self, microkernel: ProgressiveMicrokernel) {
        self.progressive = Some(microkernel);
    }

    /// Sets what joins the bits of nested scalar codes; it replaces the one installed before.
    pub fn install_nested(&mut self, microkernel: NestedMicrokernel) {
        self.nested = Some(microkernel);
    }

    /// Sets the microkernels that read nested scalar codes by their bits ([`Args::plane`]), so that
    /// none are joined; they replace those installed before. The provider is asked for the scalar
    /// codebook of each precision, of 2 to 8 bits, and answers for all of them or for none; the
    /// [`Packing`] of what it gives lays piece after piece of 32 bytes: those of few bits are the
    /// first of those of many, whatever their codes.
    pub fn install_bit_planes(&mut self, provider: Provider) {
        self.bit_planes = Some(provider);
    }

    /// The microkernel that reads nested codes by their bits, for the codebook of a precision.
    pub(crate) fn bit_planes(&self, codebook: &Codebook) -> Option<Microkernel> {
        self.bit_planes.and_then(|find| find(codebook))
    }

    /// What joins the bits of nested scalar codes.
    pub(crate) fn nested(&self) -> NestedMicrokernel {
        self.nested.unwrap_or(NestedMicrokernel::scalar())
    }

    /// The microkernel of progressive schemes.
    pub(crate) fn progressive(&self) -> ProgressiveMicrokernel {
        self.progressive.unwrap_or(ProgressiveMicrokernel::scalar())
    }

    /// The kernel of a matrix: that of the last provider that has one, else that of progressive
    /// schemes, else its codes are expanded by the microkernels of its codebooks.
    pub(crate) fn linear(&self, view: &PackedView<'_>) -> Arc<dyn LinearKernel> {
        let made = self.linear.iter().rev().find_map(|make| make(self, view));
        made.unwrap_or_else(|| match view.second_group() {
            0 => Arc::new(ExpandThenDot::new(self, view)),
            _ => Arc::new(Progressive::new(self, view)),
        })
    }

    /// Sets the operations beside the matrices; they replace those installed before.
    pub fn install_vectors(&mut self, vectors: Vectors) {
        self.vectors = vectors;
    }

    /// The operations beside the matrices.
    #[must_use]
    pub const fn vectors(&self) -> Vectors {
        self.vectors
    }

    /// The microkernel that runs `codebook`.
    #[must_use]
    pub fn microkernel(&self, codebook: &Codebook) -> Microkernel {
        self.providers.iter().rev().find_map(|find| find(codebook)).unwrap_or_else(reference::microkernel)
    }

    /// The instruction set of the microkernel that runs `codebook`.
    #[must_use]
    pub fn isa(&self, codebook: &Codebook) -> Isa {
        let spec = SchemeSpec::of(codebook.scheme());
        if spec.second_level.is_some() {
            return self.progressive().isa();
        }
        match spec.coarsest() {
            Some(bits) => match self.bit_planes(&expand::at(codebook, bits)) {
                Some(microkernel) => microkernel.isa(),
                None => self.microkernel(&expand::plain(codebook, bits)).isa(),
            },
            None => self.microkernel(codebook).isa(),
        }
    }
}
