//! Packed matrices, streamed from memory.

use crate::{RandomPacked, Spread, limits, pools, positive, rate, rounds};
use fracbit_base::{Bytes, Scheme, Shape};
use fracbit_format::{Layout, TILE_ROWS};
use fracbit_kernels::{Activations, Kernels, PackedMatrix, cases, matmul, matmul_with, with_team};
use fracbit_load::{Error, Progress};
use serde::Serialize;
use std::hint::black_box;

/// What to measure.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// Schemes.
    pub schemes: Vec<Scheme>,
    /// Outputs by inputs of each matrix.
    pub shape: Shape,
    /// Tokens multiplied at once.
    pub batch: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Least bytes of distinct codes that are walked through; below 1 GiB caches may help.
    pub bytes: u64,
    /// Bytes of the array that the read bandwidth is measured with.
    pub limit_bytes: u64,
    /// Measurements of each.
    pub rounds: usize,
}

impl KernelOptions {
    /// These schemes at the sizes that a published number should have.
    #[must_use]
    pub fn new(schemes: Vec<Scheme>) -> Self {
        Self {
            schemes,
            shape: Shape::new(2048, 8192),
            batch: vec![1],
            threads: crate::default_threads(),
            bytes: 1 << 30,
            limit_bytes: 2 << 30,
            rounds: 7,
        }
    }
}

/// One scheme with some threads and tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelSpeed {
    /// Scheme family, such as `tcq`; the whole name of a nested or progressive scheme.
    pub scheme: String,
    /// Code of a trellis scheme.
    pub code: Option<String>,
    /// Bits of codes per weight.
    pub bits: f64,
    /// Threads.
    pub threads: usize,
    /// Tokens.
    pub batch: usize,
    /// 10^9 weights expanded per second; times `batch` the products.
    pub gweights_per_s: f64,
    /// 10^9 bytes of codes per second.
    pub gb_per_s: f64,
    /// `gb_per_s` over `read_gb_per_s`.
    pub read_share: f64,
    /// Products over `int8_gmac_per_s`.
    pub int8_share: f64,
    /// Least and most of `gweights_per_s`.
    pub spread: Spread,
    /// Read bandwidth of as many threads, measured in the same rounds.
    pub read_gb_per_s: f64,
    /// Rate of int8 products of as many threads, measured in the same rounds.
    pub int8_gmac_per_s: f64,
    /// The instruction set that ran.
    pub isa: &'static str,
}

/// Measures products with packed matrices: all numbers of threads and tokens of a scheme, and the
/// machine's limits, in the same rounds.
///
/// Each product quantizes its activations anew, as a model's does.
///
/// # Errors
/// [`Error::Option`] for empty lists, zeros, or more bytes or threads than the system gives.
///
/// # Panics
/// When a kernel's result differs from the scalar reference.
pub fn kernels(
    options: &KernelOptions,
    kernels: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<KernelSpeed>, Error> {
    positive("--threads", &options.threads)?;
    positive("--batch", &options.batch)?;
    positive("--shape", &[options.shape.rows, options.shape.cols])?;
    positive("--rounds", &[options.rounds])?;
    let pools = pools(&options.threads)?;
    let mut memory = limits::Memory::new(options.limit_bytes)?;
    let per_pool = 2 + options.batch.len();
    let cases = pools.len() * per_pool;
    let total = options.schemes.len() * (options.rounds + 1) * cases;
    progress.stage("measuring kernels", total as u64);
    let mut all = Vec::new();
    for &scheme in &options.schemes {
        let matrices = matrices(scheme, options.shape, options.bytes, kernels)?;
        let mut next = 0;
        let mut x = Activations::new();
        let spreads = rounds(options.rounds, cases, |case| {
            let value = pools[case / per_pool].install(|| match case % per_pool {
                0 => memory.read(),
                1 => limits::int8_products(),
                i => stream(&matrices, &mut next, options.batch[i - 2], &mut x),
            });
            progress.advance(1);
            value
        });
        for (&threads, spreads) in options.threads.iter().zip(spreads.chunks_exact(per_pool)) {
            for (&batch, &spread) in options.batch.iter().zip(&spreads[2..]) {
                let limits = [spreads[0].median, spreads[1].median];
                all.push(KernelSpeed::new(&matrices[0], threads, batch, spread, limits));
            }
        }
    }
    Ok(all)
}

impl KernelSpeed {
    fn new(matrix: &PackedMatrix, threads: usize, batch: usize, spread: Spread, limits: [f64; 2]) -> Self {
        let (scheme, [read, int8]) = (matrix.scheme(), limits);
        #[expect(clippy::cast_precision_loss, reason = "ratios")]
        let (bytes, batch_f) = {
            let codes = Layout::new(scheme, matrix.shape()).len();
            (codes as f64 / matrix.shape().len() as f64, batch as f64)
        };
        let gb_per_s = spread.median * bytes;
        Self {
            scheme: scheme.label(),
            code: scheme.code().map(|c| c.name().to_owned()),
            bits: scheme.rate().bits(),
            threads,
            batch,
            gweights_per_s: spread.median,
            gb_per_s,
            read_share: gb_per_s / read,
            int8_share: spread.median * batch_f / int8,
            spread,
            read_gb_per_s: read,
            int8_gmac_per_s: int8,
            isa: matrix.isa().name(),
        }
    }
}

/// Enough matrices for so many bytes of codes; the first one is checked.
pub(crate) fn matrices(
    scheme: Scheme,
    shape: Shape,
    bytes: u64,
    kernels: &Kernels,
) -> Result<Vec<PackedMatrix>, Error> {
    let each = Layout::new(scheme, shape).len() as u64;
    let count = usize::try_from(bytes.div_ceil(each)).unwrap_or(usize::MAX).max(1);
    let too_large = |_| {
        let rule = format!("should fit in memory, got {}", Bytes(bytes));
        Error::Option { option: "--bytes", rule }
    };
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(too_large)?;
    let mut packed = RandomPacked::new(scheme, shape, false, 0);
    all.push(PackedMatrix::new(kernels, &packed.view(shape.rows)?));
    check(&packed, &all[0])?;
    for stream in 1..count {
        packed.fill(stream as u64);
        all.push(PackedMatrix::new(kernels, &packed.view(shape.rows)?));
    }
    Ok(all)
}

/// The first rows of a product with one and with several tokens against the scalar reference, bit
/// for bit.
fn check(packed: &RandomPacked, matrix: &PackedMatrix) -> Result<(), Error> {
    let Shape { rows: all, cols } = matrix.shape();
    let rows = all.min(2 * TILE_ROWS);
    let reference = PackedMatrix::new(&Kernels::scalar(), &packed.view(rows)?);
    for batch in [1, 3] {
        let mut x = Activations::new();
        let mut got = vec![f32::NAN; batch * all];
        let mut want = vec![f32::NAN; batch * rows];
        x.set(&cases::activations(batch * cols, 1), cols).expect("whole rows");
        matmul(matrix, &mut x, &mut got).expect("shapes that fit");
        matmul(&reference, &mut x, &mut want).expect("shapes that fit");
        assert!(got.iter().all(|y| y.is_finite()), "{}: finite results", matrix.scheme());
        for (got, want) in got.chunks_exact(all).zip(want.chunks_exact(rows)) {
            assert_eq!(
                &got[..rows],
                want,
                "{} on {} beside the scalar reference",
                matrix.scheme(),
                matrix.isa()
            );
        }
    }
    Ok(())
}

/// Gweights/s of walking on through the matrices from `next`.
fn stream(matrices: &[PackedMatrix], next: &mut usize, batch: usize, x: &mut Activations) -> f64 {
    let shape = matrices[0].shape();
    let input = cases::activations(batch * shape.cols, 1);
    let mut y = vec![0.0; batch * shape.rows];
    let weights = rate(|| {
        // Without a copy of the activations, as in a model.
        x.announce(&input, shape.cols).expect("whole rows");
        with_team(|team| matmul_with(team, &matrices[*next], &input, x, &mut y)).expect("shapes that fit");
        *next = (*next + 1) % matrices.len();
        black_box(&y);
        #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
        let weights = shape.len() as f64;
        weights
    });
    weights / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;

    fn small(schemes: &[&str]) -> KernelOptions {
        KernelOptions {
            shape: Shape::new(40, 100),
            batch: vec![1, 3],
            threads: vec![1],
            bytes: 10_000,
            limit_bytes: 4096,
            rounds: 1,
            ..KernelOptions::new(schemes.iter().map(|s| s.parse().unwrap()).collect())
        }
    }

    #[test]
    fn a_small_run_and_its_fields() {
        let options = small(&["tcq-fast-2", "half-tcq-3.25"]);
        let got = kernels(&options, &fracbit_load::kernels().unwrap(), &Quiet).unwrap();
        let order: Vec<_> = got.iter().map(|k| (k.bits, k.threads, k.batch)).collect();
        assert_eq!(order, [(2.0, 1, 1), (2.0, 1, 3), (3.25, 1, 1), (3.25, 1, 3)]);
        assert!(got.iter().all(|k| k.gweights_per_s > 0.0 && k.read_share.is_finite()), "{got:?}");
        let value = serde_json::to_value(&got[0]).unwrap();
        let fields: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let want = ["scheme", "code", "bits", "threads", "batch", "gweights_per_s", "gb_per_s", "read_share"];
        assert_eq!(fields[..8], want);
        assert_eq!((&value["scheme"], &value["code"]), (&"tcq".into(), &"fast".into()));
    }

    #[test]
    fn distinct_codes_fill_the_bytes_asked_for() {
        let options = small(&[]);
        let scheme = "nuq-4".parse().unwrap();
        let made = matrices(scheme, options.shape, options.bytes, &Kernels::scalar()).unwrap();
        let each = Layout::new(made[0].scheme(), options.shape).len();
        assert!(made.len() * each >= 10_000 && (made.len() - 1) * each < 10_000);
        let (mut a, mut b) = (vec![0.0; 100], vec![0.0; 100]);
        made[0].row(0, &mut a);
        made[1].row(0, &mut b);
        assert_ne!(a, b);
    }

    #[test]
    fn refuses_nonsense() {
        let kernels_ = Kernels::scalar();
        for bad in [
            KernelOptions { batch: vec![], ..small(&["nuq-2"]) },
            KernelOptions { threads: vec![0], ..small(&["nuq-2"]) },
            KernelOptions { shape: Shape::new(0, 4), ..small(&["nuq-2"]) },
            KernelOptions { rounds: 0, ..small(&["nuq-2"]) },
        ] {
            assert!(matches!(kernels(&bad, &kernels_, &Quiet), Err(Error::Option { .. })));
        }
    }
}
