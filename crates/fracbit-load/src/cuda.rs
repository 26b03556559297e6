//! Models on a GPU: the same directories, another runtime.
//!
//! Everything here is generic over the device, so that it is tested without one; feature `cuda`
//! adds `Gpu`.

use crate::{
    Error, Evaluation, Opened, Progress,
    reader::{Books, Reader},
};
use fracbit_format::PackedMatrixData;
use fracbit_io::Dtype;
#[cfg(feature = "cuda")]
pub use fracbit_kernels_cuda::Gpu;
use fracbit_kernels_cuda::{Device, DeviceError};
use fracbit_model::{Comparison, FloatId, KvType, LinearId, Precision, RotationMode, eval};
use fracbit_model_cuda::Builder;
pub use fracbit_model_cuda::{Decoder, DeviceModel, DeviceState};
use fracbit_plan::plan::Storage;
use half::f16;

/// What a GPU is and how fast its memory.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, serde::Serialize)]
pub struct GpuFacts {
    /// Its name.
    pub name: String,
    /// Compute capability, such as `9.0`.
    pub capability: String,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have.
    pub shared_memory: usize,
    /// Free and all bytes of memory: what is not free, other programs hold.
    pub memory: (usize, usize),
    /// 10^9 bytes a second of a copy, read and written ones counted.
    pub copy_gb_per_s: f64,
    /// Whether products of many tokens run on warpgroups and launches overlap (9.0 alone).
    pub warpgroups: bool,
}

#[cfg(feature = "cuda")]
impl GpuFacts {
    /// Asks and measures the first GPU.
    ///
    /// # Errors
    /// [`Error::Device`] where there is none that the kernels run on.
    pub fn measure() -> Result<Self, Error> {
        let gpu = Gpu::open()?;
        let ((major, minor), memory) = (gpu.capability(), gpu.memory());
        let limits = gpu.limits();
        Ok(Self {
            name: gpu.name().to_owned(),
            capability: format!("{major}.{minor}"),
            multiprocessors: limits.multiprocessors,
            shared_memory: limits.shared,
            memory,
            copy_gb_per_s: gpu.copy_rate()? / 1e9,
            warpgroups: gpu.warpgroups(),
        })
    }
}

#[cfg(feature = "cuda")]
impl std::fmt::Display for GpuFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gib = |bytes: usize| bytes as f64 / f64::from(1u32 << 30);
        let (free, total) = self.memory;
        writeln!(f, "gpu              {} ({})", self.name, self.capability)?;
        writeln!(
            f,
            "  multiprocessors  {}, {} KiB of shared memory",
            self.multiprocessors,
            self.shared_memory >> 10
        )?;
        writeln!(f, "  memory           {:.1} of {:.1} GiB free", gib(free), gib(total))?;
        writeln!(f, "  copies           {:.0} GB/s, read and written", self.copy_gb_per_s)?;
        let many = if self.warpgroups { "warpgroups, launches overlap" } else { "warps" };
        writeln!(f, "  products         tensor cores; of many tokens by {many}")
    }
}

impl Opened {
    /// Builds the model on a device. With `verify`, the checksum of every tensor of a quantized
    /// directory is checked first.
    ///
    /// # Errors
    /// When a tensor is missing or damaged, or the device lacks memory.
    pub fn on_device<'d, D: Device>(&self, device: &'d D, verify: bool) -> Result<DeviceModel<'d, D>, Error> {
        match &self.quantization {
            None => self.plain_on_device(device),
            Some(_) => self.quantized_on_device(device, verify),
        }
    }

    fn plain_on_device<'d, D: Device>(&self, device: &'d D) -> Result<DeviceModel<'d, D>, Error> {
        let source = self.source(RotationMode::None, 0)?;
        let mut builder = Builder::new(device, self.config.clone(), source.rotations().clone());
        for id in LinearId::all(&self.config) {
            builder.dense(id, &source.linear(id)?.data, source.bias(id)?);
        }
        for id in FloatId::all(&self.config) {
            builder.norm(id, source.floats(id)?);
        }
        Ok(builder.build()?)
    }

    fn quantized_on_device<'d, D: Device>(
        &self,
        device: &'d D,
        verify: bool,
    ) -> Result<DeviceModel<'d, D>, Error> {
        let Some(block) = &self.quantization else { return self.plain_on_device(device) };
        let reader = Reader { checkpoint: &self.checkpoint, verify };
        let rotations = block.rotations(&self.config, &reader)?;
        let mut builder = Builder::new(device, self.config.clone(), rotations);
        let mut books = Books::new();
        for id in LinearId::all(&self.config) {
            let shape = id.shape(&self.config);
            let bias =
                id.has_bias(&self.config).then(|| reader.f32s(&id.bias_name(), shape.rows)).transpose()?;
            let whole = |data: &PackedMatrixData<'_>| data.view().to_data();
            if let Some((bands, parts)) = reader.banded(block, id, shape, &mut books, whole)? {
                let rows = (0..parts.len()).flat_map(|band| bands.rows(band));
                let rows = rows.map(|row| u32::try_from(row).expect("rows of a model")).collect();
                builder.banded(id, parts, rows, bias);
                continue;
            }
            let module = block.storage(id, self.checkpoint.dir())?;
            match module.scheme {
                Storage::F16 => {
                    self.checkpoint.expect_shape(&id.weight_name(), &[shape.rows, shape.cols])?;
                    let bytes = reader.tensor(&id.weight_name(), Dtype::F16)?.bytes;
                    let halves = bytes.as_chunks::<2>().0.iter();
                    let weights: Vec<f32> = halves.map(|&b| f16::from_le_bytes(b).to_f32()).collect();
                    builder.dense(id, &weights, bias);
                }
                Storage::Packed(_) => {
                    let data = reader.matrix((id, None), shape, module, &mut books)?;
                    builder.packed(id, &data.view(), bias);
                }
            }
        }
        for id in FloatId::all(&self.config) {
            let width = id.width(&self.config);
            let folded = id.folded(&self.config, block.rotation);
            builder.norm(id, if folded { vec![1.0; width] } else { reader.f32s(&id.weight_name(), width)? });
        }
        Ok(builder.build()?)
    }
}

/// Tokens that a model runs before its baseline takes its turn: their logits wait in main memory.
const TURN: usize = 256;

/// Scores windows of tokens on a device, beside a baseline there if one is given: every token but
/// the last of a window predicts the next. Nested weights are read as a precision says, whose bits
/// per weight are given with it and with what the model's cache is made of; that of the baseline
/// has 16 bits.
///
/// # Errors
/// When the device fails, a window does not fit a model, or the two have different vocabularies.
pub fn score<D: Device>(
    model: &DeviceModel<'_, D>,
    baseline: Option<&DeviceModel<'_, D>>,
    windows: &[Vec<u32>],
    (precision, bits_per_weight, kv): (Precision, f64, KvType),
    progress: &dyn Progress,
) -> Result<Evaluation, Error> {
    let vocabulary = model.config().vocab_size;
    if let Some(other) = baseline.map(|b| b.config().vocab_size).filter(|&other| other != vocabulary) {
        return Err(fracbit_model::Error::Vocabularies(other, vocabulary).into());
    }
    let predictions: usize = windows.iter().map(|w| w.len().saturating_sub(1)).sum();
    progress.stage("evaluating", predictions as u64);
    // The last token of a window is predicted and not run.
    let longest = windows.iter().map(|w| w.len().saturating_sub(1)).max().unwrap_or(0).max(1);
    let mut state: DeviceState<'_, D> = model.state_of(longest, kv)?;
    state.set_precision(precision);
    let mut beside = baseline.map(|b| b.state(longest).map(|state| (b, state))).transpose()?;
    let (mut found, mut wanted) = (Comparison::default(), Vec::new());
    for window in windows {
        state.truncate(0);
        if let Some((_, state)) = &mut beside {
            state.truncate(0);
        }
        let mut next = window.iter().skip(1);
        for tokens in window[..window.len().saturating_sub(1)].chunks(TURN) {
            wanted.clear();
            if let Some((baseline, state)) = &mut beside {
                let mut each = |logits: &[f32]| -> Result<(), Error> {
                    wanted.extend_from_slice(logits);
                    Ok(())
                };
                baseline.run(state, tokens, Some(&mut each))?;
            }
            let mut rows = wanted.chunks_exact(vocabulary);
            let mut each = |logits: &[f32]| -> Result<(), Error> {
                for (row, &target) in logits.chunks_exact(vocabulary).zip(next.by_ref()) {
                    found.model.nats += eval::row_nll(row, target);
                    found.model.tokens += 1;
                    if let Some(base) = rows.next() {
                        found.kl_sum += eval::row_kl(base, row);
                        found.top1_equal += u64::from(eval::same_top(base, row));
                    }
                    progress.advance(1);
                }
                Ok(())
            };
            model.run(&mut state, tokens, Some(&mut each))?;
        }
    }
    Ok(Evaluation {
        nats_per_token: found.model.nats_per_token(),
        perplexity: found.model.perplexity(),
        tokens: found.model.tokens,
        bits_per_weight,
        kl: baseline.map(|_| found.kl()),
        top1_agreement: baseline.map(|_| found.top1_agreement()),
    })
}

impl From<DeviceError> for Error {
    fn from(source: DeviceError) -> Self {
        Self::Device(source.into())
    }
}
