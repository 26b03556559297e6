//! Many sequences at once: the throughput of [`fracbit_engine`].

use crate::{Subject, pools, positive};
use fracbit_base::Bytes;
use fracbit_engine::{Done, Engine, EngineOptions, Output, Request, full_pages};
use fracbit_kernels::Kernels;
use fracbit_load::{Error, Progress};
use fracbit_model::{KvPool, KvType, Model, SampleConfig, Sampler};
use serde::Serialize;
use std::{cell::RefCell, ops::ControlFlow, rc::Rc, time::Instant};

/// What to run.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Requests, all there from the start.
    pub requests: usize,
    /// Tokens of each prompt; no two begin alike.
    pub prompt: usize,
    /// Tokens that each gets.
    pub generate: usize,
    /// Most sequences at a time; one after the other with 1.
    pub sequences: Vec<usize>,
    /// Element types of the cache.
    pub kv: Vec<KvType>,
    /// Most bytes of the cache; `None`: all that so many sequences take.
    pub cache: Option<Bytes>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            threads: crate::default_threads(),
            requests: 16,
            prompt: 128,
            generate: 64,
            sequences: vec![1, 4, 16],
            kv: vec![KvType::default()],
            cache: None,
        }
    }
}

/// All requests with some threads, at most so many at a time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServeSpeed {
    /// Directory or shape.
    pub model: String,
    /// Bits per weight, as in [`ModelSpeed`](crate::ModelSpeed).
    pub bits: f64,
    /// Threads.
    pub threads: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Most sequences at a time.
    pub sequences: usize,
    /// Requests.
    pub requests: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens that each got.
    pub generate: usize,
    /// Seconds until all were done.
    pub seconds: f64,
    /// Tokens generated per second, in all sequences together.
    pub tok_s: f64,
    /// Seconds until a request got its first token: the median, and the last of all.
    pub first_token_s: [f64; 2],
    /// Most bytes of the cache that were held.
    pub cache_bytes: u64,
    /// Times that a sequence gave up its pages.
    pub preempted: usize,
}

/// When a request got its first token.
struct Clock {
    start: Instant,
    first: Option<f64>,
    all: Rc<RefCell<Vec<f64>>>,
    failed: Rc<RefCell<Option<String>>>,
}

impl Output for Clock {
    fn token(&mut self, _: u32) -> Result<ControlFlow<()>, fracbit_model::Error> {
        self.first.get_or_insert_with(|| self.start.elapsed().as_secs_f64());
        Ok(ControlFlow::Continue(()))
    }

    fn done(self, _: Done) {
        self.all.borrow_mut().extend(self.first);
    }

    fn failed(self, error: fracbit_model::Error) {
        self.failed.borrow_mut().get_or_insert_with(|| error.to_string());
    }
}

/// Runs the requests with every number of threads, cache and number of sequences at a time, once
/// each: what is compared should be measured on a quiet machine.
///
/// # Errors
/// [`Error::Option`] for empty lists and zeros, and for a cache that is too small; what loading and
/// running the model refuse.
pub fn serve(
    subject: Subject<'_>,
    options: &ServeOptions,
    kernels: &Kernels,
    progress: &dyn Progress,
) -> Result<Vec<ServeSpeed>, Error> {
    positive("--threads", &options.threads)?;
    positive("--requests", &[options.requests])?;
    positive("--prompt", &[options.prompt])?;
    positive("--generate", &[options.generate])?;
    positive("--sequences", &options.sequences)?;
    let pools = pools(&options.threads)?;
    progress.stage("loading", 1);
    let (model, name, bits) = subject.load(kernels)?;
    progress.advance(1);
    let cases = pools.len() * options.kv.len() * options.sequences.len();
    progress.stage("serving", (cases * options.requests) as u64);
    let mut rows = Vec::with_capacity(cases);
    for (&threads, pool) in options.threads.iter().zip(&pools) {
        for &kv in &options.kv {
            for &sequences in &options.sequences {
                let row = pool.install(|| run(&model, options, (kv, sequences), progress))?;
                rows.push(ServeSpeed { model: name.clone(), bits, threads, ..row });
            }
        }
    }
    Ok(rows)
}

fn run(
    model: &Model,
    options: &ServeOptions,
    (kv, sequences): (KvType, usize),
    progress: &dyn Progress,
) -> Result<ServeSpeed, Error> {
    let ServeOptions { requests, prompt, generate, .. } = *options;
    let context = prompt.saturating_add(generate);
    let page = KvPool::page_bytes(model.config(), kv);
    let pages = match options.cache {
        None => None,
        Some(Bytes(most)) => {
            let pages = KvPool::pages_within(model.config(), kv, most);
            let least = full_pages(context, 1);
            if pages < least {
                let one = Bytes(least as u64 * page as u64);
                let rule = format!("should be at least {one}, for one sequence, got {}", Bytes(most));
                return Err(Error::Option { option: "--cache-memory", rule });
            }
            Some(pages)
        }
    };
    let made = EngineOptions { sequences, context, kv, pages, ..EngineOptions::default() };
    let mut engine = Engine::new(model, made)
        .map_err(|e| Error::Option { option: "--cache-memory", rule: e.to_string() })?;
    let (all, failed) = (Rc::new(RefCell::new(Vec::new())), Rc::new(RefCell::new(None)));
    let vocab = model.config().vocab_size;
    let start = Instant::now();
    for request in 0..requests {
        // No two begin alike, and none repeats itself: nothing is found kept, and little is
        // guessed.
        let token = |i: usize| (1 + (request * 7919 + i * i * 31 + i * 17) % (vocab - 1)) as u32;
        let sampler =
            Sampler::new(SampleConfig { temperature: 1.0, seed: request as u64, ..SampleConfig::default() })?;
        let output = Clock { start, first: None, all: Rc::clone(&all), failed: Rc::clone(&failed) };
        engine.add(Request {
            prompt: (0..prompt).map(token).collect(),
            score_prompt: false,
            hidden: false,
            max_tokens: generate,
            end_tokens: Vec::new(),
            sampler,
            output,
        })?;
    }
    let (mut held, mut done) = (0, 0);
    while engine.step() {
        held = held.max(engine.pool().pages() - engine.pool().free());
        let now = all.borrow().len();
        progress.advance((now - done) as u64);
        done = now;
    }
    let seconds = start.elapsed().as_secs_f64();
    progress.advance((all.borrow().len() - done) as u64);
    if let Some(failed) = failed.borrow_mut().take() {
        return Err(Error::Option { option: "MODEL", rule: failed });
    }
    let mut first = all.take();
    first.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "a count to divide")]
    let tokens = (requests * generate) as f64;
    Ok(ServeSpeed {
        model: String::new(),
        bits: 0.0,
        threads: 0,
        kv,
        sequences,
        requests,
        prompt,
        generate,
        seconds,
        tok_s: tokens / seconds,
        first_token_s: [first[first.len() / 2], first[first.len() - 1]],
        cache_bytes: held as u64 * page as u64,
        preempted: engine.preempted(),
    })
}
