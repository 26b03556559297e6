//! The machine's own limits, and what it costs to start and end a parallel loop on it.

use crate::{Spread, pools, positive, rate, rounds};
use fracbit_kernels::{Buffer, with_team};
use fracbit_load::{Error, Progress};
use rayon::prelude::*;
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers that one thread reads at once: 4 MiB.
const CHUNK: usize = 1 << 19;
/// Rounds of products of one call: some 10 microseconds.
const PRODUCTS: u32 = 1 << 12;
/// Parallel loops of one call.
const LOOPS: u32 = 64;
/// Quantities that are measured for a number of threads.
const KINDS: usize = 5;

/// What to measure.
#[derive(Clone, Debug)]
pub struct LimitOptions {
    /// Size of the array to read; below 2 GiB caches may help.
    pub bytes: u64,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Measurements of each.
    pub rounds: usize,
}

impl Default for LimitOptions {
    fn default() -> Self {
        Self { bytes: 2 << 30, threads: crate::default_threads(), rounds: 9 }
    }
}

/// What some threads can do at best.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineLimits {
    /// Threads.
    pub threads: usize,
    /// Bytes of the array.
    pub bytes: u64,
    /// Reads from memory, 10^9 bytes per second.
    pub read_gb_per_s: f64,
    /// Its least and most.
    pub read_spread: Spread,
    /// int8 products added to 32-bit sums, 10^9 per second.
    pub int8_gmac_per_s: f64,
    /// Its least and most.
    pub int8_spread: Spread,
    /// The same in tile registers (AMX), where there are some. Shares of int8 products are of those
    /// of vectors.
    pub tile_gmac_per_s: Option<f64>,
    /// Start and end of a parallel loop in which every thread has one task, on the threads that
    /// stand by for a forward pass ([`Team`](fracbit_kernels::Team)), microseconds.
    pub loop_us: f64,
    /// Its least and most.
    pub loop_spread: Spread,
    /// The same by rayon's fork and join, microseconds.
    pub rayon_us: f64,
    /// Its least and most.
    pub rayon_spread: Spread,
}

/// Measures reads and products.
///
/// # Errors
/// [`Error::Option`] for an empty list, zeros, or more bytes or threads than the system gives.
pub fn limits(options: &LimitOptions, progress: &dyn Progress) -> Result<Vec<MachineLimits>, Error> {
    positive("--threads", &options.threads)?;
    positive("--rounds", &[options.rounds])?;
    let pools = pools(&options.threads)?;
    progress.stage("filling memory", options.bytes);
    let mut memory = Memory::new(options.bytes)?;
    progress.advance(options.bytes);
    let cases = KINDS * pools.len();
    progress.stage("measuring limits", ((options.rounds + 1) * cases) as u64);
    let spreads = rounds(options.rounds, cases, |case| {
        let value = pools[case / KINDS].install(|| match case % KINDS {
            0 => memory.read(),
            1 => int8_products(),
            2 => team_loop(),
            3 => products(|| tile_peak(PRODUCTS)),
            _ => rayon_loop(),
        });
        progress.advance(1);
        value
    });
    let all = options.threads.iter().zip(spreads.chunks_exact(KINDS));
    Ok(all.map(|(&threads, of)| MachineLimits::new(threads, memory.bytes(), of)).collect())
}

impl MachineLimits {
    fn new(threads: usize, bytes: u64, of: &[Spread]) -> Self {
        let (read, int8, team, tiles, rayon) = (of[0], of[1], of[2], of[3], of[4]);
        Self {
            threads,
            bytes,
            read_gb_per_s: read.median,
            read_spread: read,
            int8_gmac_per_s: int8.median,
            int8_spread: int8,
            tile_gmac_per_s: (tiles.median > 0.0).then_some(tiles.median),
            loop_us: team.median,
            loop_spread: team,
            rayon_us: rayon.median,
            rayon_spread: rayon,
        }
    }
}

/// An array of ones larger than all caches, in the same kind of memory as codes, and where to read
/// on.
pub(super) struct Memory {
    data: Buffer,
    at: usize,
}

impl Memory {
    pub(super) fn new(bytes: u64) -> Result<Self, Error> {
        let rule = || format!("should be at least 4 KiB and fit in memory, got {bytes} B");
        let bad = || Error::Option { option: "--bytes", rule: rule() };
        let len = usize::try_from(bytes).map_err(|_| bad())?;
        if len < 4096 || Vec::<u8>::new().try_reserve_exact(len).is_err() {
            return Err(bad());
        }
        let mut data = Buffer::zeroed(len);
        data.numbers_mut().fill(1);
        Ok(Self { data, at: 0 })
    }

    fn bytes(&self) -> u64 {
        64 * self.data.len() as u64
    }

    /// Reads everything once, so that caches hold nothing else.
    pub(super) fn sweep(&self) {
        let data = self.data.numbers();
        let sum = data.par_chunks(CHUNK).map(sum).reduce(|| 0, u64::wrapping_add);
        assert_eq!(sum, data.len() as u64, "ones add up to their number");
    }

    /// GB/s of the threads of the current pool.
    pub(super) fn read(&mut self) -> f64 {
        let threads = rayon::current_num_threads();
        let bytes = rate(|| {
            // Several chunks for each thread, so that a thread that was interrupted does not hold
            // up the others.
            let data = self.data.numbers();
            let end = data.len().min(self.at + 8 * threads * CHUNK);
            let part = &data[self.at..end];
            let sum = if threads == 1 {
                sum(part)
            } else {
                part.par_chunks(CHUNK).map(sum).reduce(|| 0, u64::wrapping_add)
            };
            assert_eq!(sum, part.len() as u64, "ones add up to their number");
            self.at = if end == data.len() { 0 } else { end };
            #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
            let bytes = 8.0 * part.len() as f64;
            bytes
        });
        bytes / 1e9
    }
}

/// Int8 products of the threads of the current pool by vectors, 10^9 per second.
pub(super) fn int8_products() -> f64 {
    products(|| Some(int8_peak(PRODUCTS)))
}

/// Products of the threads of the current pool, 10^9 per second, by a loop that counts them; 0
/// where there is none.
fn products(peak: impl Fn() -> Option<u64> + Sync) -> f64 {
    if peak().is_none() {
        return 0.0;
    }
    let each = rayon::broadcast(|_| {
        rate(|| {
            let sum = peak().unwrap_or(0);
            assert!(sum > 0 && sum.is_multiple_of(u64::from(PRODUCTS)), "products of ones, got {sum}");
            #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
            let products = sum as f64;
            products
        })
    });
    each.into_iter().sum::<f64>() / 1e9
}

/// Counts a thread in and waits for the others of its loop: no thread can take the tasks of two.
fn meet(arrived: &AtomicUsize, all: usize) {
    arrived.fetch_add(1, Ordering::AcqRel);
    while arrived.load(Ordering::Acquire) < all {
        std::hint::spin_loop();
    }
}

/// Microseconds of a loop on the threads of the current pool, standing by.
fn team_loop() -> f64 {
    let threads = rayon::current_num_threads();
    1e6 / with_team(|team| {
        rate(|| {
            for _ in 0..LOOPS {
                let arrived = AtomicUsize::new(0);
                team.for_each(threads, |_| meet(&arrived, threads));
            }
            f64::from(LOOPS)
        })
    })
}

/// Microseconds of a loop on the threads of the current pool, by fork and join.
fn rayon_loop() -> f64 {
    fn fork(threads: usize, task: &(impl Fn() + Sync)) {
        if threads == 1 {
            task();
        } else {
            rayon::join(|| fork(threads / 2, task), || fork(threads - threads / 2, task));
        }
    }
    let threads = rayon::current_num_threads();
    1e6 / rate(|| {
        for _ in 0..LOOPS {
            let arrived = AtomicUsize::new(0);
            fork(threads, &|| meet(&arrived, threads));
        }
        f64::from(LOOPS)
    })
}

#[cfg(target_arch = "x86_64")]
use fracbit_kernels_x86::limits::{int8_peak, read_sum as sum, tile_peak};

/// The loops are written for x86; elsewhere plain ones stand in, and say so by their numbers.
#[cfg(not(target_arch = "x86_64"))]
fn sum(data: &[u64]) -> u64 {
    data.iter().fold(0, |sum, v| sum.wrapping_add(*v))
}

#[cfg(not(target_arch = "x86_64"))]
fn int8_peak(rounds: u32) -> u64 {
    let mut sums = [0i32; 64];
    for _ in 0..rounds {
        let (a, b) = std::hint::black_box(([1i8; 64], [1i8; 64]));
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(&b)) {
            *sum += i32::from(*a) * i32::from(*b);
        }
    }
    sums.iter().map(|&s| u64::from(s.unsigned_abs())).sum()
}

#[cfg(not(target_arch = "x86_64"))]
fn tile_peak(_rounds: u32) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use fracbit_load::Quiet;

    #[test]
    fn a_small_run() {
        let options = LimitOptions { bytes: 1 << 20, threads: vec![1, 2], rounds: 1 };
        let got = limits(&options, &Quiet).unwrap();
        assert_eq!(got.iter().map(|l| l.threads).collect::<Vec<_>>(), [1, 2]);
        for l in got {
            assert_eq!(l.bytes, 1 << 20);
            assert!(l.read_gb_per_s.is_finite() && l.read_gb_per_s > 0.0, "{l:?}");
            assert!(l.int8_gmac_per_s.is_finite() && l.int8_gmac_per_s > 0.0, "{l:?}");
            assert!(l.loop_us.is_finite() && l.loop_us > 0.0 && l.rayon_us.is_finite(), "{l:?}");
        }
        for bytes in [0, 4095, u64::MAX] {
            let options = LimitOptions { bytes, ..LimitOptions::default() };
            assert!(matches!(limits(&options, &Quiet), Err(Error::Option { option: "--bytes", .. })));
        }
    }
}
