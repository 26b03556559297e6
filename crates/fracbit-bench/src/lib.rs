#![doc = include_str!("../README.md")]
//!
//! Speed: of the machine ([`limits`]), of the kernels ([`kernels`]), of Psumbooks
//! ([`psumbook()`]), of whole models ([`model`]), of many sequences at once ([`serve()`]), and of
//! the search for codes ([`encode()`]).
//!
//! A number of tokens per second says as much about the machine as about the program, so every
//! bench measures the machine's limits in the same run: the bandwidth of reads from memory and the
//! rate of int8 products, with one thread and with as many as the bench uses. Kernels and models
//! are reported beside them.
//!
//! On a shared machine neighbours come and go. Therefore everything that is compared is measured in
//! turns: a *round* measures each thing once for a few hundredths of a second, and what is reported
//! is the median over rounds with the least and the most ([`Spread`]). A first round warms up and
//! does not count. A wide spread says that the median measured the neighbours; the most is then
//! closer to what the code can do.
//!
//! Weights are pseudo-random codes, made at once and not by encoding: every bit pattern is a valid
//! code, and no kernel branches on one. Scales keep activations at their size from layer to layer.
//! Every bench checks its result.

mod device;
mod encode;
mod explore;
mod kernels;
mod limits;
mod model;
mod profile;
mod psumbook;
mod random;
mod serve;
mod targets;

pub use device::{DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, device_kernels, device_model};
pub use encode::{EncodeOptions, EncodeSpeed, encode};
pub use explore::{ExploreOptions, Explored, explore};
pub use kernels::{KernelOptions, KernelSpeed, kernels};
pub use limits::{LimitOptions, MachineLimits, limits};
pub use model::{ModelOptions, ModelSpeed, Subject, model};
pub use profile::{ProfileOptions, profile};
pub use psumbook::{PsumbookOptions, PsumbookSpeed, psum_tiles, psumbook, with_psumbooks};
pub use serve::{ServeOptions, ServeSpeed, serve};
pub use targets::{TargetOptions, TargetSpeed, targets};

use fracbit_base::{Scheme, Shape};
use fracbit_format::{Codebook, Layout, PackedView, Planes, SchemeSpec, SecondLevel};
use fracbit_load::Error;
use fracbit_plan::{Error as PlanError, machine};
use half::f16;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use serde::Serialize;
use std::time::Instant;

/// Least seconds of one measurement.
const SLICE: f64 = 0.04;

/// A rate measured several times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

/// As a list of least and most; the median has a field of its own beside it.
impl Serialize for Spread {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        [self.min, self.max].serialize(to)
    }
}

impl Spread {
    /// Of at least one value.
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (half, last) = (values.len() / 2, values.len() - 1);
        let median =
            if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 };
        Self { median, min: values[0], max: values[last] }
    }
}

/// One thread, and all of them where there are several.
#[must_use]
pub fn default_threads() -> Vec<usize> {
    let all = machine::cores();
    if all == 1 { vec![1] } else { vec![1, all] }
}

/// Rounds of measurements of `cases` things in turn, each by `measure(case)`; the first round does
/// not count.
fn rounds(rounds: usize, cases: usize, mut measure: impl FnMut(usize) -> f64) -> Vec<Spread> {
    let mut values = vec![Vec::with_capacity(rounds); cases];
    for round in 0..=rounds {
        for (case, values) in values.iter_mut().enumerate() {
            let value = measure(case);
            if round > 0 {
                values.push(value);
            }
        }
    }
    values.into_iter().map(Spread::of).collect()
}

/// Repeats `work`, which returns how much it did, for at least [`SLICE`], and returns the work of a
/// second.
fn rate(mut work: impl FnMut() -> f64) -> f64 {
    let (start, mut done) = (Instant::now(), 0.0);
    loop {
        done += work();
        let seconds = start.elapsed().as_secs_f64();
        if seconds >= SLICE {
            return done / seconds;
        }
    }
}

fn pools(threads: &[usize]) -> Result<Vec<ThreadPool>, Error> {
    threads.iter().map(|&n| pool(n)).collect()
}

fn pool(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| Error::Option { option: "--threads", rule: format!("{threads} cannot be started: {e}") })
}

/// Refuses an empty list and zeros.
fn positive(option: &'static str, values: &[usize]) -> Result<(), Error> {
    if values.is_empty() || values.contains(&0) {
        let rule = format!("should be one or more numbers of at least 1, got {values:?}");
        return Err(Error::Option { option, rule });
    }
    Ok(())
}

/// The built-in codebooks of the segments of `layout`.
fn codebooks(layout: &Layout) -> Result<Vec<&'static Codebook>, Error> {
    let books = layout.segments().iter().map(|s| {
        fracbit_quant::codebook(s.scheme).ok_or_else(|| PlanError::NoErrorEntry { scheme: s.scheme }.into())
    });
    books.collect()
}

/// The parts of a packed matrix with random codes.
struct RandomPacked {
    scheme: Scheme,
    shape: Shape,
    codes: Vec<u8>,
    second_level: Vec<u8>,
    scales: Vec<f16>,
}

impl RandomPacked {
    /// Weights of variance `1 / cols`, or `1` with `wide`; `stream` picks the random numbers.
    fn new(scheme: Scheme, shape: Shape, wide: bool, stream: u64) -> Self {
        let codes = vec![0; Layout::new(scheme, shape).len()];
        let mut new = Self::of(scheme, shape, wide, codes);
        new.fill(stream);
        new
    }

    /// As [`new`](Self::new), with these codes.
    fn of(scheme: Scheme, shape: Shape, wide: bool, codes: Vec<u8>) -> Self {
        /// What groups of a progressive scheme have where weights are normal.
        const USUAL: SecondLevel = SecondLevel { scale: 10, zero: 7 };
        #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^24")]
        let scale = if wide { 1.0 } else { 1.0 / (shape.cols as f32).sqrt() };
        let groups = SchemeSpec::of(scheme).second_level.map_or(0, |groups| groups.groups(shape.cols));
        // Four standard deviations are int8's 119.
        let scale = if groups > 0 { 4.0 * scale / f32::from(SecondLevel::PROTECTED) } else { scale };
        let scales = vec![f16::from_f32(scale); scheme.planes() * shape.rows];
        Self { scheme, shape, codes, second_level: vec![USUAL.byte(); shape.rows * groups], scales }
    }

    /// Other codes in the same memory.
    fn fill(&mut self, stream: u64) {
        const CHUNK: usize = 1 << 20;
        self.codes.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, codes)| {
            let mut rng = ChaCha8Rng::seed_from_u64(chunk as u64);
            rng.set_stream(stream);
            rng.fill_bytes(codes);
        });
    }

    /// The first `rows` rows (a multiple of 16, or all).
    fn view(&self, rows: usize) -> Result<PackedView<'_>, Error> {
        let shape = Shape::new(rows, self.shape.cols);
        let layout = Layout::new(self.scheme, shape);
        let group = layout.tiles_across() * fracbit_format::TILE_COLS;
        // Scales are equal, so that the first are those of fewer rows, too.
        let planes = self.scheme.planes();
        let seconds = self.second_level.len() / self.shape.rows;
        let planes = Planes {
            codes: &self.codes[..layout.len()],
            second_level: &self.second_level[..seconds * rows],
            scales: &self.scales[..planes * rows],
            gains: &[1.0; 3][..planes],
        };
        let view = PackedView::new(self.scheme, shape, &codebooks(&layout)?, planes, group);
        Ok(view.expect("parts made for this layout"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        let shown = serde_json::to_value(Spread { median: 2.0, min: 1.0, max: 3.0 }).unwrap();
        assert_eq!(shown, serde_json::json!([1.0, 3.0]));
    }

    #[test]
    fn rounds_take_turns_and_forget_the_first() {
        let mut order = Vec::new();
        let got = rounds(3, 2, |case| {
            order.push(case);
            if order.len() <= 2 { 1e9 } else { case as f64 }
        });
        let same = |v| Spread { median: v, min: v, max: v };
        assert_eq!(got, [same(0.0), same(1.0)]);
        assert_eq!(order, [0, 1, 0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn random_weights_have_the_variance_asked_for() {
        for scheme in ["tcq-2", "half-tcq-3.25", "nuq-4", "vq-2", "tcq-hyb-2"] {
            let packed = RandomPacked::new(scheme.parse().unwrap(), Shape::new(64, 256), true, 3);
            let weights = packed.view(64).unwrap().dequantize();
            let variance = weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / weights.len() as f64;
            // Codes of a trained scalar codebook are not equally likely; random ones take the outer
            // entries too often.
            assert!((0.8..3.0).contains(&variance), "{scheme}: {variance}");
        }
    }
}
