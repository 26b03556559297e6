//! Several tokens run in one step on a guess: the tokens, and the logits behind them, of one by
//! one.

#![expect(clippy::print_stderr, reason = "skips are said aloud")]

#[path = "../../fracbit-model/tests/common/mod.rs"]
#[allow(clippy::unwrap_used, reason = "shared with the tests of fracbit-model")]
mod common;
#[path = "../../fracbit-model/tests/pack/mod.rs"]
#[allow(clippy::unwrap_used, reason = "shared with the tests of fracbit-model")]
mod pack;

use common::{F32, references};
use fracbit_engine::{Done, Engine, EngineOptions, Finish, Output, Request};
use fracbit_model::{
    Error, GenerateOptions, Generation, KvType, Linear, LinearId, Model, RotationMode, SampleConfig, Sampler,
    StateOptions, Stop,
};
use pack::pack;
use std::{cell::RefCell, ops::ControlFlow, rc::Rc};

/// All tokens, the logits of each, and how it ended.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    logits: Vec<u32>,
    finish: Option<Finish>,
}

struct Listener(Rc<RefCell<(Told, usize)>>);

impl Output for Listener {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        self.0.borrow_mut().0.tokens.push(token);
        Ok(ControlFlow::Continue(()))
    }

    fn scored(&mut self, _: u32, logits: &[f32]) {
        self.0.borrow_mut().0.logits.extend(logits.iter().map(|l| l.to_bits()));
    }

    fn done(self, done: Done) {
        let mut told = self.0.borrow_mut();
        (told.0.finish, told.1) = (Some(done.finish), done.guessed);
    }

    fn failed(self, error: Error) {
        panic!("{error}");
    }
}

/// Tokens that end texts which may become as long as the context.
const ENDS: [u32; 4] = [0, 1, 2, 3];

/// One by one, by the model alone.
fn one_by_one(
    model: &Model,
    kv: KvType,
    sampling: SampleConfig,
    prompt: &[u32],
    most: Option<usize>,
) -> Told {
    let mut state = model.state(&StateOptions { context: Some(64), kv, ..F32 });
    let mut sampler = Sampler::new(sampling).expect("good settings");
    let end_tokens = if most.is_none() { ENDS.to_vec() } else { Vec::new() };
    let options = GenerateOptions { max_tokens: most, end_tokens, ..GenerateOptions::default() };
    let mut written =
        Generation::new(model, &mut state, &mut sampler, prompt, options).expect("a prompt that fits");
    let mut told = Told::default();
    while let Some(token) = written.next() {
        told.tokens.push(token.expect("a step"));
        told.logits.extend(written.logits().iter().map(|l| l.to_bits()));
    }
    told.finish = match written.stop() {
        Some(Stop::End(token)) => {
            // An end token is picked from logits as well.
            told.logits.extend(written.logits().iter().map(|l| l.to_bits()));
            Some(Finish::End(token))
        }
        Some(Stop::MaxTokens) => Some(Finish::MaxTokens),
        Some(Stop::ContextFull) => Some(Finish::ContextFull),
        other => panic!("{other:?}"),
    };
    told
}

/// By an engine, and how many tokens it guessed.
fn guessed(
    model: &Model,
    kv: KvType,
    sampling: SampleConfig,
    prompt: &[u32],
    most: Option<usize>,
) -> (Told, usize) {
    // The last token of a text needs no place in a cache, but counts here.
    let options = EngineOptions { sequences: 1, context: 65, kv, ..EngineOptions::default() };
    let mut engine = Engine::new(model, options).expect("good options");
    let told = Rc::default();
    let request = Request {
        prompt: prompt.to_vec(),
        score_prompt: false,
        hidden: false,
        max_tokens: most.unwrap_or(usize::MAX),
        end_tokens: if most.is_none() { ENDS.to_vec() } else { Vec::new() },
        sampler: Sampler::new(sampling).expect("good settings"),
        output: Listener(Rc::clone(&told)),
    };
    engine.add(request).expect("a prompt that fits");
    while engine.step() {}
    drop(engine);
    Rc::into_inner(told).expect("the engine is gone").into_inner()
}

#[test]
fn guesses_change_no_bit() {
    let mut all = 0;
    for r in references().unwrap_or_default() {
        let source = r.source(RotationMode::Fold, 7);
        let dense = Model::from_source(&source).expect("a checkpoint");
        let mut packed = Model::from_source(&source).expect("a checkpoint");
        for id in LinearId::all(source.config()) {
            let matrix = pack(&source.linear(id).expect("a matrix"));
            let linear = Linear::packed(matrix, source.bias(id).expect("a bias")).expect("of one shape");
            packed.replace(id, linear).expect("of one shape");
        }
        let greedy = SampleConfig::default();
        let drawn =
            SampleConfig { temperature: 0.3, top_p: 0.9, repetition_penalty: 1.05, seed: 3, ..greedy };
        let prompt = [&r.tokens[..9], &r.tokens[..9]].concat();
        for (model, kv) in [
            (&dense, KvType::F32),
            (&packed, KvType::F32),
            (&packed, KvType::I16),
            (&packed, KvType::I8),
            (&packed, KvType::I6),
            (&packed, KvType::I4),
        ] {
            for (sampling, most) in [(greedy, Some(14)), (greedy, None), (drawn, Some(14)), (drawn, None)] {
                let want = one_by_one(model, kv, sampling, &prompt, most);
                let (got, count) = guessed(model, kv, sampling, &prompt, most);
                assert!(got == want, "{} {kv:?}: {:?} {:?}", r.name, got.tokens, want.tokens);
                all += count;
            }
        }
    }
    eprintln!("{all} tokens guessed");
    assert!(all > 100 || references().is_none(), "{all}");
}
