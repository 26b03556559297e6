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
        generate::{Speed, Written},
    };
    use fracbit::{
        EvalOptions, Evaluation, Opened, Progress as _, Rounders,
        cuda::{self, Decoder, Gpu},
    };
    use fracbit_bench::{
        self as bench, DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, KernelOptions, ModelOptions,
    };
    use fracbit_io::Tokenizer;
    use fracbit_model::{SampleConfig, Stop};
    use std::{path::Path, time::Instant};

    /// Continues `prompt`, as `generate::Writer::write` does on the processor.
    pub(crate) fn write(
        opened: &Opened,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        sampling: &SampleConfig,
        most: usize,
        context: &mut Context,
        sink: &mut dyn FnMut(&mut Context, &str) -> Result<(), Failure>,
    ) -> Result<Written, Failure> {
        let mut end_tokens = opened.config.eos_token_ids.clone();
        end_tokens.extend(tokenizer.eos_ids());
        let gpu = Gpu::open().map_err(fracbit::Error::from)?;
        let model = opened.on_device(&gpu, true)?;
        let limit = model.config().max_position_embeddings;
        let room = prompt.len().saturating_add(most).min(limit);
        let mut state = model.state(room).map_err(fracbit::Error::from)?;
        let start = Instant::now();
        let mut decoder =
            Decoder::new(&model, &mut state, prompt, sampling, most).map_err(fracbit::Error::from)?;
        let mut stream = tokenizer.stream(true);
        let (mut text, mut tokens, mut first) = (String::new(), 0, None);
        let mut stop = Stop::ContextFull;
        let mut emit = |piece: String, text: &mut String, context: &mut Context| {
            text.push_str(&piece);
            if piece.is_empty() { Ok(()) } else { sink(context, &piece) }
        };
        while let Some(token) = decoder.next_token().map_err(fracbit::Error::from)? {
            first.get_or_insert_with(|| start.elapsed());
            if end_tokens.contains(&token) {
                stop = Stop::End(token);
                break;
            }
            tokens += 1;
            emit(stream.push(token)?, &mut text, context)?;
        }
        let total = start.elapsed();
        emit(stream.finish()?, &mut text, context)?;
        if tokens == most {
            stop = Stop::MaxTokens;
        }
        let steps = tokens + usize::from(matches!(stop, Stop::End(_)));
        let prefill = first.unwrap_or(total);
        let speed = Speed {
            bits: None,
            prompt: prompt.len(),
            prefill,
            steps: steps.saturating_sub(1),
            decode: total.saturating_sub(prefill),
            guessed: 0,
        };
        Ok(Written { text, tokens, held: Vec::new(), stop: Some(stop), speed })
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
        Ok(cuda::rounders_on(Box::leak(Box::new(gpu))))
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
        cuda::score(&model, base.as_ref(), &windows, opened.bits_per_weight(), &context.progress)
            .map_err(|e| Failure::new(Exit::Failed, anyhow::Error::new(e)))
    }
}

#[cfg(not(feature = "cuda"))]
mod built {
    use crate::{
        context::Context,
        failure::{Exit, Failure},
        generate::Written,
    };
    use fracbit::{EvalOptions, Evaluation, Opened, Rounders};
    use fracbit_bench::{DeviceKernelSpeed, DeviceModelSpeed, DeviceSubject, KernelOptions, ModelOptions};
    use fracbit_io::Tokenizer;
    use fracbit_model::SampleConfig;
    use std::path::Path;

    fn absent() -> Failure {
        let rule = "this program was built without GPU support";
        Failure::new(Exit::Usage, anyhow::Error::msg(rule))
            .hint("`cargo xtask kernels`, then `cargo build --release -p fracbit-cli --features cuda`")
    }

    pub(crate) fn write(
        _: &Opened,
        _: &Tokenizer,
        _: &[u32],
        _: &SampleConfig,
        _: usize,
        _: &mut Context,
        _: &mut dyn FnMut(&mut Context, &str) -> Result<(), Failure>,
    ) -> Result<Written, Failure> {
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

pub(crate) use built::{Facts, bench_kernels, bench_model, describe, evaluate, rounders, write};
