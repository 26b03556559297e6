//! Additive codebooks through a Psumbook and by expanding codes, beside other codes.

use crate::{RandomPacked, Spread, kernels::matrices, pools, positive, rounds};
use fracbit_base::{Scheme, Shape};
use fracbit_format::TILE_ROWS;
use fracbit_kernels::{Activations, Kernels, PackedMatrix, PsumTile, cases, matmul_with, with_team};
use fracbit_load::{Error, Progress};
use serde::Serialize;
use std::{hint::black_box, time::Instant};

/// What to measure.
#[derive(Clone, Debug)]
pub struct PsumbookOptions {
    /// Schemes; those without additive codebooks stand beside the others.
    pub schemes: Vec<Scheme>,
    /// Outputs by inputs of each matrix.
    pub shape: Shape,
    /// Tokens multiplied at once.
    pub batch: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Least bytes of distinct codes that are walked through: more than the caches hold.
    pub bytes: u64,
    /// Measurements of each.
    pub rounds: usize,
    /// What is read of a Psumbook at once, each measured; empty: the usual one.
    pub tiles: Vec<PsumTile>,
}

/// A scheme with some threads and tokens; times are of one product.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PsumbookSpeed {
    /// The scheme.
    pub scheme: Scheme,
    /// Bits of codes per weight.
    pub bits: f64,
    /// Threads.
    pub threads: usize,
    /// Tokens.
    pub batch: usize,
    /// Partial sums read at once, and strips of 16 rows that read them, where they are not the
    /// usual ones.
    pub tile: Option<[usize; 2]>,
    /// Microseconds through a Psumbook for 16 rows alone: activations are rounded, the Psumbook is
    /// built, and one strip reads it. `None` where the scheme has none, or the processor no kernel.
    pub build_us: Option<f64>,
    /// All of the product through a Psumbook.
    pub psumbook_us: Option<f64>,
    /// Least and most of it.
    pub psumbook_spread: Option<Spread>,
    /// All of the product with expanded codes.
    pub expanded_us: f64,
    /// Least and most of it.
    pub expanded_spread: Spread,
    /// `expanded_us` over `psumbook_us`.
    pub ratio: Option<f64>,
    /// Whether such a product goes through a Psumbook here unless told otherwise.
    pub default: bool,
    /// 10^9 bytes of codes per second of the faster one.
    pub gb_per_s: f64,
}

/// `kernels`, with a Psumbook wherever this processor can read one: `install` leaves it out where
/// expanding codes is faster.
#[must_use]
pub fn with_psumbooks(kernels: &Kernels) -> Kernels {
    let all = kernels.clone();
    #[cfg(target_arch = "x86_64")]
    let all = {
        let mut all = all;
        // A cap that is no name was refused when `kernels` were made.
        let most = fracbit_kernels::Isa::cap().ok().flatten().unwrap_or(fracbit_kernels::Isa::Amx);
        fracbit_kernels_x86::install_psumbook(&mut all, most);
        all
    };
    all
}

/// What may be read of a Psumbook at once: from an eighth of a first-level cache to a second-level
/// one, by few and by many strips.
#[must_use]
pub fn psum_tiles() -> Vec<PsumTile> {
    let strips = [4, 16, PsumTile::MOST_STRIPS];
    let tiles = |sums| strips.map(|strips| PsumTile { sums, strips });
    [2048, 8192, 32_768, 131_072].into_iter().flat_map(tiles).collect()
}

/// Ways to multiply with one scheme.
struct Case {
    scheme: Scheme,
    /// By tokens.
    default: Vec<bool>,
    /// One strip of rows with each tile, and matrices.
    psumbook: Vec<(Option<PsumTile>, PackedMatrix, Vec<PackedMatrix>)>,
    expanded: Vec<PackedMatrix>,
}

/// Measures products with matrices of `kernels`, and of `forced`, which takes a Psumbook wherever
/// it has one; all of a scheme with some threads and tokens by turns.
///
/// Each product rounds its activations anew and builds its Psumbook, as a model's does.
///
/// # Errors
/// [`Error::Option`] for empty lists, zeros, or more bytes or threads than the system gives.
///
/// # Panics
/// When a kernel's result differs from the scalar reference.
pub fn psumbook(
    options: &PsumbookOptions,
    kernels: &Kernels,
    forced: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<PsumbookSpeed>, Error> {
    positive("--threads", &options.threads)?;
    positive("--batch", &options.batch)?;
    positive("--shape", &[options.shape.rows, options.shape.cols])?;
    positive("--rounds", &[options.rounds])?;
    let pools = pools(&options.threads)?;
    let runs = options.schemes.len() * pools.len() * options.batch.len();
    progress.stage("measuring products", (runs * (options.rounds + 1)) as u64);
    let mut all = Vec::new();
    for &scheme in &options.schemes {
        let case = Case::new(scheme, options, kernels, forced)?;
        for (pool, &threads) in pools.iter().zip(&options.threads) {
            for (&batch, &default) in options.batch.iter().zip(&case.default) {
                let found = pool.install(|| case.measure(options, threads, (batch, default), progress));
                all.extend(found);
            }
        }
    }
    Ok(all)
}

impl Case {
    fn new(
        scheme: Scheme,
        options: &PsumbookOptions,
        kernels: &Kernels,
        forced: &Kernels,
    ) -> Result<Self, Error> {
        let shape = options.shape;
        let packed = RandomPacked::new(scheme, shape, false, 0);
        let strip = packed.view(shape.rows.min(TILE_ROWS))?;
        let all = |kernels: &Kernels| matrices(scheme, shape, options.bytes, kernels);
        let tiles: Vec<Option<PsumTile>> = match &options.tiles[..] {
            [] => vec![None],
            tiles => tiles.iter().copied().map(Some).collect(),
        };
        let mut psumbook = Vec::new();
        for tile in tiles {
            let mut kernels = forced.clone();
            tile.into_iter().for_each(|tile| kernels.set_psum_tile(tile));
            let strip = PackedMatrix::new(&kernels, &strip);
            if strip.reads_psumbook(1) {
                psumbook.push((tile, strip, all(&kernels)?));
            }
        }
        let usual = PackedMatrix::new(kernels, &packed.view(shape.rows)?);
        let default = options.batch.iter().map(|&batch| usual.reads_psumbook(batch)).collect();
        let expanded = all(&kernels.clone().expanding())?;
        Ok(Self { scheme, default, psumbook, expanded })
    }

    fn measure(
        &self,
        options: &PsumbookOptions,
        threads: usize,
        (batch, default): (usize, bool),
        progress: &dyn Progress,
    ) -> Vec<PsumbookSpeed> {
        let shape = options.shape;
        let input = cases::activations(batch * shape.cols, 1);
        let (mut x, mut y) = (Activations::new(), vec![0.0; batch * shape.rows]);
        let mut one = |matrix: &PackedMatrix| {
            let y = &mut y[..batch * matrix.shape().rows];
            let start = Instant::now();
            x.announce(&input, shape.cols).expect("whole rows");
            with_team(|team| matmul_with(team, matrix, &input, &mut x, y)).expect("shapes that fit");
            black_box(&mut *y);
            start.elapsed().as_secs_f64() * 1e6
        };
        let cases = 1 + 2 * self.psumbook.len();
        let spreads = rounds(options.rounds, cases, |case| {
            if case == 0 {
                progress.advance(1);
            }
            let matrices = match case.checked_sub(1) {
                None => &self.expanded,
                Some(case) => &self.psumbook[case / 2].2,
            };
            // A strip is measured as often as there are matrices: caches are as they were.
            let times = matrices.iter().map(|matrix| match case.checked_sub(1) {
                Some(case) if case % 2 == 0 => {
                    one(matrix);
                    one(&self.psumbook[case / 2].1)
                }
                _ => one(matrix),
            });
            Spread::of(times.collect()).median
        });
        let bytes = self.scheme.rate().bits() * shape.len() as f64 / 8.0;
        let expanded = spreads[0];
        let new = |tile: Option<PsumTile>, own: Option<[Spread; 2]>| {
            let whole = own.map(|[_, whole]| whole);
            let fastest = whole.map_or(expanded.median, |whole| whole.median.min(expanded.median));
            PsumbookSpeed {
                scheme: self.scheme,
                bits: self.scheme.rate().bits(),
                threads,
                batch,
                tile: tile.map(|tile| [tile.sums, tile.strips]),
                build_us: own.map(|[build, _]| build.median),
                psumbook_us: whole.map(|whole| whole.median),
                psumbook_spread: whole,
                expanded_us: expanded.median,
                expanded_spread: expanded,
                ratio: whole.map(|whole| expanded.median / whole.median),
                default,
                gb_per_s: bytes / fastest / 1e3,
            }
        };
        if self.psumbook.is_empty() {
            return vec![new(None, None)];
        }
        let own = spreads[1..].chunks_exact(2).map(|own| [own[0], own[1]]);
        self.psumbook.iter().zip(own).map(|((tile, ..), own)| new(*tile, Some(own))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;

    fn small(schemes: &[&str]) -> PsumbookOptions {
        PsumbookOptions {
            schemes: schemes.iter().map(|s| s.parse().unwrap()).collect(),
            shape: Shape::new(40, 96),
            batch: vec![1, 3],
            threads: vec![1],
            bytes: 4000,
            rounds: 1,
            tiles: vec![],
        }
    }

    /// The portable microkernel wherever it can.
    fn forced() -> Kernels {
        use fracbit_kernels::{PsumMicrokernel, psumbook};
        let mut kernels = Kernels::scalar();
        kernels.install_linear(|kernels, view| psumbook(kernels, view, PsumMicrokernel::portable(8)));
        kernels.install_linear(|kernels, view| psumbook(kernels, view, PsumMicrokernel::portable(4)));
        kernels
    }

    #[test]
    fn a_small_run_and_its_fields() {
        let schemes = ["aq-m1v4", "vq-2"];
        let got = psumbook(&small(&schemes), &Kernels::scalar(), &forced(), &Quiet).unwrap();
        let order: Vec<_> = got.iter().map(|s| (s.scheme.to_string(), s.batch, s.ratio.is_some())).collect();
        let want = [("aq-m1v4", 1, true), ("aq-m1v4", 3, true), ("vq-2", 1, false), ("vq-2", 3, false)];
        assert_eq!(order, want.map(|(name, batch, has)| (name.to_owned(), batch, has)));
        assert!(got.iter().all(|s| s.expanded_us > 0.0 && s.gb_per_s > 0.0 && !s.default), "{got:?}");
        let tiles = [(1, 1), (8192, 4)].map(|(sums, strips)| PsumTile { sums, strips }).to_vec();
        let swept = PsumbookOptions { tiles, batch: vec![1], ..small(&schemes) };
        let got = psumbook(&swept, &forced(), &forced(), &Quiet).unwrap();
        let order: Vec<_> = got.iter().map(|s| (s.tile, s.default)).collect();
        assert_eq!(order, [(Some([1, 1]), true), (Some([8192, 4]), true), (None, false)]);
        let value = serde_json::to_value(&got[0]).unwrap();
        assert_eq!((&value["scheme"], &value["tile"]), (&"aq-m1v4".into(), &serde_json::json!([1, 1])));
    }

    #[test]
    fn refuses_nonsense() {
        for bad in [
            PsumbookOptions { batch: vec![0], ..small(&["aq-m1v4"]) },
            PsumbookOptions { threads: vec![], ..small(&["aq-m1v4"]) },
            PsumbookOptions { shape: Shape::new(0, 4), ..small(&["aq-m1v4"]) },
            PsumbookOptions { rounds: 0, ..small(&["aq-m1v4"]) },
        ] {
            let refused = psumbook(&bad, &Kernels::scalar(), &Kernels::scalar(), &Quiet);
            assert!(matches!(refused, Err(Error::Option { .. })));
        }
    }
}
