//! Psumbooks of additive codebooks: products of centroids with activations, looked up by codes
//! (`kernels/cuda/psumbook.cuh`), and when they take the place of expanded codes.

use crate::{Device, DeviceError, Grid, Limits, MatrixPlan, args::PsumArgs};
use fracbit_base::{Books, Family};
use fracbit_format::Codebook;

/// How a product of up to 8 tokens is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// Codes are expanded and multiplied on the tensor cores.
    Expand,
    /// Products of centroids with activations are looked up; of additive codebooks only.
    Psumbook,
}

/// Centroids of a codebook.
const CENTROIDS: usize = 256;
/// Columns of an octet.
const OCTET_COLS: usize = 128;
/// Threads of a block (`PSUM_THREADS` of `psumbook.cuh`), and of one that adds.
const THREADS: [u32; 2] = [512, 256];
/// Largest magnitude of an activation.
const MOST: i32 = 127;

/// What the kernels of a Psumbook need to know of a codebook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PsumPlan {
    /// The kernel, without what depends on the number of tokens.
    kernel: String,
    books: Books,
    /// Whether all partial sums fit 16 bits.
    narrow: bool,
    /// Four int8 of a centroid a word, (codebook, code, word).
    pub(crate) centroids: Vec<u32>,
}

impl PsumPlan {
    /// Of an additive codebook; `None` for every other.
    pub(crate) fn new(codebook: &Codebook) -> Option<Self> {
        let Family::Additive(books) = codebook.scheme().family() else { return None };
        // Codes that share a byte are one here.
        let (books, entries) = (books.of_bytes(), codebook.byte_centroids()?);
        // No product of a centroid with activations is farther from 0 than the sum of its
        // magnitudes times the largest activation.
        let reach = |centroid: &[i16]| MOST * centroid.iter().map(|c| i32::from(c.abs())).sum::<i32>();
        let most = entries.chunks_exact(books.weights()).map(reach).max().unwrap_or(0);
        let narrow = most <= i32::from(i16::MAX);
        let byte = |entry: i16| i8::try_from(entry).expect("entries of additive codebooks are int8");
        let centroids = entries.as_chunks::<4>().0.iter();
        let centroids = centroids.map(|c| u32::from_le_bytes(c.map(|c| byte(c).cast_unsigned()))).collect();
        let kernel = format!("psums_aq_{books}_{}", if narrow { 16 } else { 32 });
        Some(Self { kernel, books, narrow, centroids })
    }

    /// Tokens whose partial sums lie side by side, one lookup for all, in a product of `batch`.
    fn together(&self, batch: usize) -> usize {
        match (batch, self.narrow) {
            (1, _) => 1,
            (_, true) => 4,
            (_, false) => 2,
        }
    }

    /// The kernel that makes the sums of a product with `batch` tokens.
    #[must_use]
    pub fn kernel(&self, batch: usize) -> String {
        format!("{}_{}", self.kernel, self.together(batch))
    }

    /// Bytes of the partial sums of a centroid.
    fn sum_bytes(&self, batch: usize) -> usize {
        self.together(batch) * if self.narrow { 2 } else { 4 }
    }

    /// Places of centroids in an octet.
    fn places(&self) -> usize {
        OCTET_COLS / self.books.weights() * self.books.count()
    }

    /// Strips of a block, and ranges of them: as many blocks as multiprocessors.
    fn deal(plan: &MatrixPlan, limits: &Limits) -> (usize, usize) {
        let (strips, octets) = (2 * plan.pairs, plan.segments[0].octets);
        let ranges = (limits.multiprocessors / octets).clamp(1, strips);
        let each = strips.div_ceil(ranges);
        (each, strips.div_ceil(each))
    }

    /// Words of workspace: sums of octets, then scales of activations.
    pub(crate) fn workspace(plan: &MatrixPlan, batch: usize) -> usize {
        let octets = plan.segments[0].octets;
        batch * (octets * plan.pairs * 32 + octets.div_ceil(2))
    }

    /// Launches a product; `args` lack only how it is dealt.
    pub(crate) fn launch<D: Device>(
        &self,
        device: &D,
        plan: &MatrixPlan,
        mut args: PsumArgs,
    ) -> Result<(), DeviceError> {
        let u32_of = |n: usize| u32::try_from(n).expect("sizes of matrices fit 32 bits");
        let (octets, batch) = (plan.segments[0].octets, args.batch as usize);
        let (strips, ranges) = Self::deal(plan, &device.limits());
        (args.strips, args.ranges) = (u32_of(strips), u32_of(ranges));
        args.scales = args.parts + 4 * (octets * batch * plan.pairs * 32) as u64;
        let together = self.together(batch);
        let shared = self.places() * CENTROIDS * self.sum_bytes(batch) + together * OCTET_COLS;
        let sums = Grid {
            blocks: (u32_of(octets), u32_of(ranges * batch.div_ceil(together))),
            threads: THREADS[0],
            shared: u32_of(shared),
        };
        device.launch(&self.kernel(batch), sums, bytemuck::bytes_of(&args))?;
        let blocks = (args.w.rows.div_ceil(THREADS[1]), args.batch);
        let finish = Grid { blocks, threads: THREADS[1], shared: 0 };
        device.launch("fb_psum_finish", finish, bytemuck::bytes_of(&args))
    }

    /// What is faster, by counts: no measurement stands behind this.
    ///
    /// In a clock a multiprocessor answers one lookup of 32 lanes whose words lie in 32 banks, and
    /// issues four instructions. A lane has 64 weights of a strip's octet. Expanding looks up a
    /// word for four weights and codebook; where tables have fewer copies than fill the banks,
    /// lanes wait for each other. A Psumbook looks up a word or two for each code, anywhere, again
    /// for each group of tokens; building it is shared by the strips of a block, and its second
    /// kernel takes two microseconds. As it rounds activations to 8 bits, and expanding to 11, it
    /// is taken where counts promise a tenth.
    pub(crate) fn choose(&self, plan: &MatrixPlan, batch: usize, limits: &Limits) -> Product {
        const BANKS: f64 = 32.0;
        const FINISH: f64 = 3500.0;
        const PROMISE: f64 = 1.1;
        // Clocks of a lookup of 32 lanes at random: what the fullest bank has, on average.
        let random = if self.sum_bytes(batch) == 8 { 6.1 } else { 3.4 };
        let segment = &plan.segments[0];
        let (count, codes) = (self.books.count() as f64, (self.places() / 2) as f64);
        let parts = (self.books.weights() / 4) as f64;
        let waits = f64::max(BANKS / (parts * f64::from(1u32 << segment.book.log_copies)), 1.0);
        // Beside centroids: codes, and the activations of a pair of strips.
        let words = segment.quarters as f64 / 2.0 + 8.0;
        // Instructions of a weight, as compiled: 2 to 4 (docs/cuda-kernels.md).
        let issue = 64.0 * (1.2 + 1.05 * count) / 4.0;
        let expand = f64::max(16.0 * count * waits + words, issue);
        let (strips, _) = Self::deal(plan, limits);
        let together = self.together(batch);
        let build = (self.places() * CENTROIDS * self.sum_bytes(batch).max(4)) as f64 / (4.0 * BANKS);
        let psums = codes * random + 4.0 * together as f64 + build / strips as f64;
        let psums = batch.div_ceil(together) as f64 * psums;
        let work = (2 * plan.pairs * segment.octets) as f64 / limits.multiprocessors as f64;
        if PROMISE * (work * psums + FINISH) < work * expand { Product::Psumbook } else { Product::Expand }
    }
}

#[cfg(test)]
mod tests {
    use super::PsumPlan;
    use fracbit_base::Scheme;
    use fracbit_format::Codebook;

    #[test]
    fn sums_are_narrow_while_the_largest_fits_16_bits() {
        for (name, weights, count) in [("aq-m1v4", 4, 1), ("aq-m1v8", 8, 1), ("aq-m3v8", 8, 3)] {
            let scheme: Scheme = name.parse().expect("a scheme");
            // One centroid whose magnitudes sum up to `sum`, with either sign; 127 * 258 = 32766.
            for (sum, narrow) in [(258, true), (259, false)] {
                let each = sum / weights as i16;
                let mut entries = vec![1; 256 * count * weights];
                let last = entries.len() - weights;
                entries[last..].fill(each);
                entries[last] = -(sum - each * (weights as i16 - 1));
                let book = Codebook::new(scheme, entries, 0.1).expect("sums within -127..=127");
                let plan = PsumPlan::new(&book).expect("additive codebooks");
                assert_eq!(plan.narrow, narrow, "{name}, magnitudes of {sum}");
                let kernel = if narrow { "16_4" } else { "32_2" };
                assert_eq!(plan.kernel(3), format!("psums_{}_{kernel}", name.replace('-', "_")));
            }
        }
    }
}
