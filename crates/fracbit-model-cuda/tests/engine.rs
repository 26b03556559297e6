//! Many sequences on a device (the host shim): each gets the tokens that it gets alone.
#![expect(clippy::print_stderr, reason = "skips are said aloud")]

#[path = "../../fracbit-model/tests/common/mod.rs"]
#[allow(clippy::unwrap_used, reason = "shared with the tests of fracbit-model")]
mod common;
mod device;

use common::{Reference, references};
use device::{dense, device, packed};
use fracbit_base::Rate;
use fracbit_engine::{Done, Engine, EngineOptions, Output, Request, full_pages};
use fracbit_kernels_cuda::shim::Shim;
use fracbit_model::{
    Error, KvType, Model, Precision, RotationMode, Runtime, SampleConfig, Sampler, StateOptions, WeightSource,
};
use fracbit_model_cuda::Decoder;
use std::{cell::RefCell, collections::BTreeMap, ops::ControlFlow, rc::Rc};

const CONTEXT: usize = 128;

type Said = Rc<RefCell<BTreeMap<usize, (Vec<u32>, Option<Done>)>>>;

#[derive(Debug)]
struct Listener(usize, Said);

impl Output for Listener {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        self.1.borrow_mut().entry(self.0).or_default().0.push(token);
        Ok(ControlFlow::Continue(()))
    }

    fn done(self, done: Done) {
        self.1.borrow_mut().entry(self.0).or_default().1 = Some(done);
    }

    fn failed(self, error: Error) {
        panic!("sequence {}: {error}", self.0);
    }
}

fn sampler(i: usize) -> Sampler {
    // Every other one is greedy.
    let temperature = [0.0, 0.8][i % 2];
    Sampler::new(SampleConfig { temperature, top_p: 0.9, seed: i as u64, ..SampleConfig::default() })
        .expect("good settings")
}

/// Tokens, and how many of the prompt were in the cache, of every sequence; and how often one gave
/// up its pages.
fn run<R: Runtime>(
    model: &R,
    prompts: &[Vec<u32>],
    sequences: usize,
    (kv, pages): (KvType, Option<usize>),
) -> (Vec<(Vec<u32>, usize)>, usize) {
    let options = EngineOptions { sequences, context: CONTEXT, kv, pages, ..EngineOptions::default() };
    let (done, preempted) = run_with(model, prompts, options);
    (done.into_iter().map(|(tokens, done)| (tokens, done.cached)).collect(), preempted)
}

fn run_with<R: Runtime>(
    model: &R,
    prompts: &[Vec<u32>],
    options: EngineOptions,
) -> (Vec<(Vec<u32>, Done)>, usize) {
    let (said, mut engine) = (Said::default(), Engine::new(model, options).expect("good options"));
    for (i, prompt) in prompts.iter().enumerate() {
        let request = Request {
            prompt: prompt.clone(),
            score_prompt: false,
            hidden: false,
            max_tokens: 12 + i,
            end_tokens: Vec::new(),
            sampler: sampler(i),
            output: Listener(i, Rc::clone(&said)),
        };
        engine.add(request).expect("a good prompt");
        for _ in 0..i % 3 {
            engine.step();
        }
    }
    while engine.step() {}
    let done = |(tokens, done): &(Vec<u32>, Option<Done>)| (tokens.clone(), done.expect("it ended"));
    (said.borrow().values().map(done).collect(), engine.preempted())
}

/// Grouped heads.
#[test]
fn sequences_together_get_the_tokens_they_get_alone() {
    together_as_alone(&[("llama3", 10, KvType::I16)]);
}

/// Norms of heads, biases, a sliding window, experts: beside the one above, where there are two
/// processors.
#[test]
fn a_few_sequences_of_other_models_get_the_tokens_they_get_alone() {
    let models = ["qwen3", "qwen2", "mistral", "granite-moe"];
    together_as_alone(&models.map(|name| (name, 4, KvType::I16)));
}

/// Caches of codes: pages that sequences share, give up and copy, and recorded steps of each kind.
#[test]
fn sequences_with_caches_of_few_bits_get_the_tokens_they_get_alone() {
    together_as_alone(&[("llama3", 10, KvType::I8), ("mistral", 4, KvType::I6), ("qwen3", 4, KvType::I4)]);
}

/// Keys without their biases, in pages that sequences share at positions of their own.
#[test]
fn sequences_with_biases_of_keys_apart_get_the_tokens_they_get_alone() {
    together_as_alone(&[("seed-oss", 10, KvType::I8), ("seed-oss", 4, KvType::I4)]);
}

/// Runs so many sequences of reference checkpoints at once and one after the other.
fn together_as_alone(models: &[(&str, usize, KvType)]) {
    let Some(references) = references() else { return };
    let device = device();
    for &(name, count, kv) in models {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        let source = r.source(RotationMode::Online, 7);
        let model = dense(&device, &source);
        let vocab = source.config().vocab_size as u32;
        let token = |i: u32| (i * i * 31 + i * 17 + 5) % vocab;
        // From one token to a whole prompt of dense products; two that begin with the same page.
        let lengths = [1, 5, 17, 63, 80, 80, 64, 30, 9, 2];
        let prompts: Vec<Vec<u32>> = (0..)
            .zip(lengths)
            .take(count)
            .map(|(i, len)| {
                let seed = if len == 80 { 4 } else { i };
                let mut prompt: Vec<u32> = (0..len).map(|at| token(at + 100 * seed)).collect();
                *prompt.last_mut().expect("one at least") = token(7 * i);
                prompt
            })
            .collect();
        let (alone, _) = run(&model, &prompts, 1, (kv, None));
        assert!(alone.iter().zip(12..).all(|((tokens, _), most)| tokens.len() == most));
        let check = |pages: Option<usize>| {
            let (together, preempted) = run(&model, &prompts, count, (kv, pages));
            let mut others = 0;
            for (i, ((got, _), (want, _))) in together.iter().zip(&alone).enumerate() {
                // Products of other numbers of rows add in another order, and that may move a code
                // of 4 bits, by far more than it moved the number.
                others += usize::from(got != want);
                assert!(got == want || kv == KvType::I4, "{name}, {kv:?}: sequence {i}, pages {pages:?}");
            }
            assert!(2 * others < count, "{name}, {kv:?}: {others} texts differ");
            preempted
        };
        check(None);
        if count == 10 {
            assert_eq!(alone[5].1, 79, "what another left of a beginning is found");
            assert!(check(Some(full_pages(CONTEXT, 1))) > 0, "pages for one are too few for ten");
        }
        // A greedy one is what the decoder draws on the device.
        let mut state = model.state_of(CONTEXT, kv).expect("memory");
        let greedy = SampleConfig::default();
        let mut decoder = Decoder::new(&model, &mut state, &prompts[2], &greedy, 14).expect("a decoder");
        while decoder.next_token().expect("a token").is_some() {}
        assert_eq!(decoder.tokens().expect("tokens"), alone[2].0, "{name}");
        // And, in other numbers, what the processor writes; of few bits, other ones are likely.
        if kv != KvType::I16 {
            continue;
        }
        let plain = Model::from_source(&source).expect("a model");
        let (processor, _) = run(&plain, &prompts, count, (kv, None));
        let same = alone.iter().zip(&processor).filter(|(a, b)| a.0 == b.0).count();
        eprintln!("{name}: {same} of {} texts are those of the processor", alone.len());
        assert!(2 * same > alone.len(), "{name}: {same} texts are those of the processor");
    }
}

/// Precision falls while a sequence is written, and sequences begin at different steps: steps of
/// several precisions, and none takes another's.
#[test]
fn sequences_of_falling_precision_get_the_tokens_they_get_alone() {
    let Some(references) = references() else { return };
    let device = device();
    let r: &Reference = references.iter().find(|r| r.name == "llama3").expect("a reference");
    let model = packed(&device, &r.source(RotationMode::None, 0), "nest-tcq-2+2");
    let prompts: Vec<Vec<u32>> =
        [3, 70, 1, 12].map(|len| (0..len).map(|i| (i * 31 + len * 7) % 97).collect()).to_vec();
    let of = |schedule: Option<&str>, sequences| {
        let schedule = schedule.map(|s| s.parse::<fracbit_schedule::Schedule>().expect("a schedule"));
        let scheduler = schedule.map(Into::into);
        let options = EngineOptions { sequences, context: CONTEXT, scheduler, ..EngineOptions::default() };
        run_with(&model, &prompts, options).0
    };
    let falling = Some("prefill=4,decode=4..2@5");
    let (alone, together) = (of(falling, 1), of(falling, 4));
    let (fine, coarse) = (of(None, 1), of(Some("prefill=4,decode=2"), 1));
    for (i, (tokens, done)) in alone.iter().enumerate() {
        assert_eq!(*tokens, together[i].0, "sequence {i}");
        // As far as the precision is that of another schedule, so are the tokens.
        assert_eq!(tokens[..4], fine[i].0[..4], "sequence {i}");
        assert_eq!(tokens[0], coarse[i].0[0], "sequence {i}: the prompt decides its first token");
        let bits = done.bits.expect("a schedule");
        let all = coarse[i].1.bits.expect("a schedule")..model.bits_at(Precision::FULL);
        assert!(all.start < bits && bits < all.end, "sequence {i}: {bits} bits of {all:?}");
    }
    assert!(alone.iter().zip(&fine).any(|(a, b)| a.0 != b.0), "two bits are not four");
    assert_eq!(model.precisions().len(), 2);
    assert!(model.weight_bytes_at(Precision::FULL) > model.weight_bytes_at(two_bits()));
}

fn two_bits() -> Precision {
    Precision::at_most(Rate::quarter_bits(8))
}

/// A learned scheduler reads of a device what it reads of the processor.
#[test]
fn caches_are_read_as_those_of_the_processor() {
    let Some(references) = references() else { return };
    let device = device();
    for name in ["qwen3", "seed-oss"] {
        let r: &Reference = references.iter().find(|r| r.name == name).expect("a reference");
        cache_is_read(&device, &r.source(RotationMode::None, 0));
    }
}

fn cache_is_read(device: &Shim, source: &WeightSource) {
    let (model, plain) = (dense(device, source), Model::from_source(source).expect("a model"));
    let tokens: Vec<u32> = (0..70).map(|i| (i * 31 + 7) % 97).collect();
    fn of<R: Runtime>(
        model: &R,
        kv: KvType,
        tokens: &[u32],
        layer: usize,
    ) -> Option<fracbit_schedule::Features> {
        let pool = model.pool(kv, 4).expect("room");
        let options = StateOptions { context: Some(CONTEXT), kv, ..StateOptions::default() };
        let (mut work, mut states) = (model.work(CONTEXT).expect("room"), [model.sequence(&pool, &options)]);
        model.step(&mut work, &mut states, tokens, &[tokens.len()]).expect("a step");
        model.features(&states[0], layer, tokens.len() - 1)
    }
    // Halves and integers; steps of 8 bits, and those of 4 where both may round away.
    for (kv, share) in [(KvType::I16, 0.02), (KvType::I8, 0.04), (KvType::I4, 0.4)] {
        let [got, want] =
            [of(&model, kv, &tokens, 1), of(&plain, kv, &tokens, 1)].map(|of| of.expect("a layer"));
        for (got, want) in [(&got.keys, &want.keys), (&got.values, &want.values)] {
            assert_eq!(got.len(), 69 * source.config().num_key_value_heads * source.config().head_dim);
            let most = want.iter().fold(0f32, |most, v| most.max(v.abs()));
            let off = got.iter().zip(want).fold(0f32, |off, (a, b)| off.max((a - b).abs()));
            assert!(off < share * most, "{kv:?}: {off} beside {most}");
        }
        assert!(of(&model, kv, &tokens, 99).is_none(), "no such layer");
    }
}

#[test]
fn what_a_device_does_not_hold_is_refused() {
    let Some(references) = references() else { return };
    let device = device();
    let model = dense(&device, &references[0].source(RotationMode::None, 0));
    let refused = |options| Engine::<_, Listener>::new(&model, options).expect_err("refused").to_string();
    let base = EngineOptions { context: CONTEXT, ..EngineOptions::default() };
    let kind = refused(EngineOptions { kv: KvType::F32, ..base.clone() });
    assert_eq!(kind, "the cache on a GPU should be of 16, 8, 6 or 4 bits, got 32");
    let pages = refused(EngineOptions { pages: Some(1 << 40), ..base.clone() });
    assert!(pages.contains("at most"), "{pages}");
}
