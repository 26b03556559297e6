//! `--device cuda`: the same commands on a GPU.

use clap::ValueEnum;

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// This machine's processor.
    #[default]
    Cpu,
    /// The first NVIDIA GPU (compute capability 8.0 or later, driver 580 or later).
    Cuda,
}

#[cfg(feature = "cuda")]
mod built {
    use crate::{
        context::Context,
        failure::{Exit, Failure},
        generate::{WithLoader, WithModel},
    };
    use fracbit::{
        EvalOptions, Evaluation, Opened, Progress as _, Rounders,
        cuda::{self, Gpu},
    };
    use fracbit_bench::{
        self as bench, DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, KernelOptions, ModelOptions,
    };
    use fracbit_model::Precision;
    use std::path::Path;

    /// Does something with a model on the GPU; with a quantized directory every checksum is
    /// verified on the way.
    pub(crate) fn with_model(opened: &Opened, with: impl WithModel) -> Result<(), Failure> {
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        with.call(&opened.on_device(&gpu, true)?)
    }

    /// Does something with what loads models on the GPU.
    pub(crate) fn with_loader(with: impl WithLoader) -> Result<(), Failure> {
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        with.call(|opened| Ok(opened.on_device(&gpu, true)?))
    }

    /// What a GPU is.
    pub(crate) type Facts = cuda::GpuFacts;

    /// What the GPU of this machine is; or why none is used.
    pub(crate) fn describe() -> Result<Facts, String> {
        cuda::GpuFacts::measure().map_err(|e| e.to_string())
    }

    /// What searches codes of trellis schemes on the GPU.
    pub(crate) fn rounders() -> Result<Rounders, Failure> {
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        // It lives as long as the program, as the rounders that use it may.
        Ok(fracbit::rounders_on(Box::leak(Box::new(gpu))))
    }

    /// Speed of products.
    pub(crate) fn bench_kernels(
        options: &KernelOptions,
        context: &Context,
    ) -> Result<Vec<DeviceKernelSpeed>, Failure> {
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        context.progress.note(&format!("on {}", gpu.name()));
        Ok(bench::device_kernels(&gpu, options, &context.progress)?)
    }

    /// Speed of a model.
    pub(crate) fn bench_model(
        subject: DeviceSubject<'_>,
        options: &ModelOptions,
        context: &Context,
    ) -> Result<Vec<DeviceModelSpeed>, Failure> {
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        context.progress.note(&format!("on {}", gpu.name()));
        Ok(bench::device_model(&gpu, subject, options, &context.progress)?)
    }

    /// Perplexity of a text, beside a baseline if there is one.
    pub(crate) fn evaluate(
        opened: &Opened,
        baseline: Option<&Opened>,
        text: &str,
        origin: &Path,
        options: &EvalOptions,
        context: &Context,
    ) -> Result<Evaluation, Failure> {
        let windows = fracbit::evaluate::windows_of_both(opened, baseline, text, origin, options)?;
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        let model = opened.on_device(&gpu, true)?;
        let base = baseline.map(|b| b.on_device(&gpu, true)).transpose()?;
        context.progress.note(&format!("on {}", gpu.name()));
        let bits = match options.precision {
            Precision::FULL => opened.bits_per_weight(),
            some => model.step_bits(some),
        };
        let how = (options.precision, bits, options.kv);
        cuda::score(&model, base.as_ref(), &windows, how, &context.progress)
            .map_err(|e| Failure::new(Exit::Failed, anyhow::Error::new(e)))
    }
}

#[cfg(not(feature = "cuda"))]
mod built {
    use crate::{
        context::Context,
        failure::{Exit, Failure},
        generate::{WithLoader, WithModel},
    };
    use fracbit::{EvalOptions, Evaluation, Opened, Rounders};
    use fracbit_bench::{DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, KernelOptions, ModelOptions};
    use std::path::Path;

    fn absent() -> Failure {
        let rule = "this program was built without GPU support";
        Failure::new(Exit::Usage, anyhow::Error::msg(rule))
            .hint("`cargo xtask kernels`, then `cargo build --release -p fracbit-cli --features cuda`")
    }

    pub(crate) fn with_model(_: &Opened, _: impl WithModel) -> Result<(), Failure> {
        Err(absent())
    }

    pub(crate) fn with_loader(_: impl WithLoader) -> Result<(), Failure> {
        Err(absent())
    }

    /// Nothing is known of GPUs here.
    pub(crate) type Facts = String;

    pub(crate) fn describe() -> Result<Facts, String> {
        Err("this program was built without GPU support".to_owned())
    }

    pub(crate) fn rounders() -> Result<Rounders, Failure> {
        Err(absent())
    }

    pub(crate) fn bench_kernels(_: &KernelOptions, _: &Context) -> Result<Vec<DeviceKernelSpeed>, Failure> {
        Err(absent())
    }

    pub(crate) fn bench_model(
        _: DeviceSubject<'_>,
        _: &ModelOptions,
        _: &Context,
    ) -> Result<Vec<DeviceModelSpeed>, Failure> {
        Err(absent())
    }

    pub(crate) fn evaluate(
        _: &Opened,
        _: Option<&Opened>,
        _: &str,
        _: &Path,
        _: &EvalOptions,
        _: &Context,
    ) -> Result<Evaluation, Failure> {
        Err(absent())
    }
}

pub(crate) use built::{
    Facts, bench_kernels, bench_model, describe, evaluate, rounders, with_loader, with_model,
};
