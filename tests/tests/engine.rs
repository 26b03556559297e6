//! Many sequences on one model: each gets the tokens that it would get alone, whatever else runs,
//! however few pages there are.

use fracbit_base::Rate;
use fracbit_engine::{
    Done, Draft, Engine, EngineError, EngineOptions, Finish, Output, Prefixes, Request, Tokens, full_pages,
};
use fracbit_grammar::{Rule, Vocabulary};
use fracbit_io::{EncodeOptions, ModelConfig, Tokenizer};
use fracbit_model::{
    Error, GenerateOptions, Generation, HostMemory, KvPool, KvType, Model, Precision, RotationMode,
    SampleConfig, Sampler, State, StateOptions, pages::POSITIONS,
};
use fracbit_schedule::{Learned, Network, Schedule, Scheduler, Shape};
use fracbit_tests::{demo_model, stories, uniform_demo};
use std::{cell::RefCell, collections::BTreeMap, ops::ControlFlow, path::Path, rc::Rc, sync::OnceLock};

const CONTEXT: usize = 256;
const PAGE: usize = POSITIONS;

fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        uniform_demo(
            &Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine-nuq-4"),
            "nuq-4",
            RotationMode::Fold,
        )
    })
}

/// The demo model at 4 bits, of which 2 can be read alone.
fn nested() -> &'static Model {
    static NESTED: OnceLock<Model> = OnceLock::new();
    NESTED.get_or_init(|| {
        uniform_demo(
            &Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine-nest"),
            "nest-tcq-fast-2+2",
            RotationMode::Online,
        )
    })
}

/// Beginnings of the held-out stories, the first two of which begin alike.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let config = ModelConfig::from_dir(demo_model()).expect("the embedded model");
    let tokenizer = Tokenizer::from_dir(demo_model(), Some(&config)).expect("the embedded model");
    let (text, _) = stories();
    let words: Vec<&str> = text.split_whitespace().collect();
    let make = |i: usize| {
        let (from, len) = if i < 2 { (0, 90 + 20 * i) } else { (i * 70, 5 + 37 * (i % 4)) };
        words[from..from + len].join(" ")
    };
    let encode = |text: String| tokenizer.encode(&text, EncodeOptions::default()).expect("a text");
    (0..count).map(|i| encode(make(i))).collect()
}

fn sampler(i: usize) -> Sampler {
    // Every other one is greedy.
    let temperature = [0.0, 0.8][i % 2];
    Sampler::new(SampleConfig { temperature, top_p: 0.95, seed: i as u64, ..SampleConfig::default() })
        .expect("good settings")
}

/// What a sequence gets alone, by the library.
fn alone(model: &Model, options: &EngineOptions, prompt: &[u32], i: usize, most: usize) -> Vec<u32> {
    let context = Some(options.context);
    let mut state = model.state(&StateOptions { context, kv: options.kv, ..StateOptions::default() });
    let scheduler = options.scheduler.clone();
    let made = GenerateOptions { max_tokens: Some(most), scheduler, ..GenerateOptions::default() };
    let mut sampler = sampler(i);
    Generation::new(model, &mut state, &mut sampler, prompt, made)
        .expect("a prompt")
        .map(|token| token.expect("a good model"))
        .collect()
}

type Said = Rc<RefCell<BTreeMap<usize, (Vec<u32>, Option<Done>)>>>;

/// Remembers what it is given.
#[derive(Debug)]
struct Listener {
    id: usize,
    said: Said,
    /// After so many tokens nobody is interested.
    patience: usize,
}

impl Output for Listener {
    fn token(&mut self, token: u32) -> Result<ControlFlow<()>, Error> {
        self.said.borrow_mut().entry(self.id).or_default().0.push(token);
        Ok(ControlFlow::Continue(()))
    }

    fn wanted(&self) -> bool {
        self.said.borrow().get(&self.id).is_none_or(|(tokens, _)| tokens.len() < self.patience)
    }

    fn done(self, done: Done) {
        self.said.borrow_mut().entry(self.id).or_default().1 = Some(done);
    }

    fn failed(self, error: Error) {
        panic!("sequence {}: {error}", self.id);
    }
}

fn request(said: &Said, id: usize, prompt: &[u32], max_tokens: usize) -> Request<Listener> {
    let output = Listener { id, said: Rc::clone(said), patience: usize::MAX };
    Request {
        prompt: prompt.to_vec(),
        score_prompt: false,
        hidden: false,
        max_tokens,
        end_tokens: Vec::new(),
        sampler: sampler(id),
        output,
    }
}

/// Requests that come one after the other, a step or more apart.
fn run(
    model: &Model,
    options: EngineOptions,
    prompts: &[Vec<u32>],
    most: usize,
    apart: usize,
) -> (Said, usize) {
    let said = Said::default();
    let mut engine = Engine::new(model, options).expect("good options");
    for (i, prompt) in prompts.iter().enumerate() {
        engine.add(request(&said, i, prompt, most + i % 3)).expect("a good prompt");
        for _ in 0..apart * (i % 4) {
            engine.step();
        }
        assert!(engine.pool().free() <= engine.pool().pages());
    }
    while engine.step() {}
    (said, engine.preempted())
}

#[test]
fn every_sequence_gets_the_tokens_it_gets_alone() {
    let prompts = prompts(10);
    let most = 50;
    for kv in [KvType::I16, KvType::I4] {
        let base = EngineOptions { context: CONTEXT, kv, ..EngineOptions::default() };
        let want: Vec<_> =
            prompts.iter().enumerate().map(|(i, p)| alone(model(), &base, p, i, most + i % 3)).collect();
        let mut scarce = 0;
        // From one at a time to all, with pages for one sequence alone and for all.
        for (sequences, pages, apart) in [
            (1, None, 0),
            (3, None, 5),
            (10, None, 1),
            (10, Some(full_pages(CONTEXT, 1)), 0),
            (10, Some(full_pages(CONTEXT, 1) + 3), 3),
        ] {
            let (said, preempted) =
                run(model(), EngineOptions { sequences, pages, ..base.clone() }, &prompts, most, apart);
            for (i, want) in want.iter().enumerate() {
                let (tokens, done) = &said.borrow()[&i];
                assert_eq!(tokens, want, "{kv:?}, {sequences} at a time, {pages:?} pages: sequence {i}");
                let done = done.expect("it ended");
                let counts = (done.finish, done.prompt, done.tokens);
                assert_eq!(counts, (Finish::MaxTokens, prompts[i].len(), want.len()));
            }
            assert!(pages.is_some() || preempted == 0, "{sequences} at a time: {preempted}");
            scarce += preempted;
        }
        assert!(scarce > 0, "some wait where pages are scarce");
    }
}

/// A scheduler whose network was never trained, but has several answers to the prompts.
fn learned(prompts: &[Vec<u32>]) -> Scheduler {
    let config = nested().config();
    let shape = Shape { heads: config.num_key_value_heads, head_dim: config.head_dim, hidden: 5, classes: 3 };
    let bits = [16, 8].map(Rate::quarter_bits);
    let made = |seed: u32| {
        // Of both signs, without a pattern.
        let mut x = seed;
        let network = Network::random(shape, || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(x.cast_signed()) / f64::from(1 << 30)
        });
        let falls = vec![Some(0), Some(17), None];
        Learned::new(bits[0], bits, falls, 1, network.expect("sizes")).expect("falling").into()
    };
    let answers = |scheduler: &Scheduler| {
        let of = prompts.iter().map(|prompt| {
            let mut state = nested().state(&StateOptions::default());
            nested().forward(&mut state, prompt, &mut Vec::new()).expect("a prompt");
            scheduler
                .schedule(|layer| nested().cached(&state, layer, prompt.len()).expect("a layer"))
                .to_string()
        });
        of.collect::<std::collections::BTreeSet<_>>().len()
    };
    (0..50).map(made).find(|s| answers(s) > 1).expect("one that tells prompts apart")
}

#[test]
fn precision_is_that_of_every_step_also_where_pages_were_given_up() {
    let prompts = prompts(6);
    let two = Precision::at_most(Rate::quarter_bits(8));
    let fixed = ["prefill=4,decode=4..2@13", "prefill=2,decode=4..2@20", "2"];
    let fixed = fixed.map(|text| text.parse::<Schedule>().expect("a schedule").into());
    for scheduler in fixed.into_iter().chain([learned(&prompts)]) {
        let base = EngineOptions {
            context: CONTEXT,
            scheduler: Some(scheduler),
            draft: Some(Draft { precision: Some(two), length: Some(3) }),
            sequences: 6,
            ..EngineOptions::default()
        };
        let want: Vec<_> =
            prompts.iter().enumerate().map(|(i, p)| alone(nested(), &base, p, i, 60 + i % 3)).collect();
        for pages in [None, Some(full_pages(CONTEXT, 1))] {
            let (said, preempted) = run(nested(), EngineOptions { pages, ..base.clone() }, &prompts, 60, 2);
            for (i, want) in want.iter().enumerate() {
                assert_eq!(said.borrow()[&i].0, *want, "{:?}, {pages:?} pages: sequence {i}", base.scheduler);
            }
            assert_eq!(preempted > 0, pages.is_some(), "{:?}, {pages:?} pages", base.scheduler);
        }
    }
}

/// What a text is by a rule does not depend on guesses, on neighbours or on pages: drafts are cut
/// where the rule bars them.
#[test]
fn rules_hold_alike_alone_together_and_with_drafts() {
    let config = ModelConfig::from_dir(demo_model()).expect("the embedded model");
    let tokenizer = Tokenizer::from_dir(demo_model(), Some(&config)).expect("the embedded model");
    let ends = tokenizer.eos_ids().to_vec();
    let vocabulary = Vocabulary::new(&tokenizer, config.vocab_size, &ends).expect("an end token");
    let schema = serde_json::json!({ "type": "array", "minItems": 2, "maxItems": 2, "items": {
        "type": "object", "required": ["name", "tall"], "additionalProperties": false,
        "properties": { "name": { "type": "string", "maxLength": 6 }, "tall": { "type": "boolean" } } } });
    let rules = [
        Rule::Json(schema),
        Rule::Regex("( the dog and the cat){3,9}[.]".to_owned()),
        Rule::Lark("start: (\"a\" | \"b\") start | \".\"".to_owned()),
        Rule::Choice(vec!["Once upon a time".to_owned(), "The end".to_owned()]),
    ];
    let grammars: Vec<_> = rules.iter().map(|rule| vocabulary.grammar(rule).expect("a rule")).collect();
    let most = 64;
    // Each begins in one page and soon wants a second one: of pages for four some are given up.
    let mut prompts = prompts(10).split_off(2);
    prompts.iter_mut().for_each(|prompt| prompt.truncate(PAGE - 4));
    let sampler = |i: usize| sampler(i).constrained(Box::new(grammars[i % grammars.len()].clone()));
    let two = Precision::at_most(Rate::quarter_bits(8));
    for (model, draft) in [(model(), None), (nested(), Some(Draft { precision: Some(two), length: Some(3) }))]
    {
        let want: Vec<Vec<u32>> = (0..prompts.len())
            .map(|i| {
                let context = Some(CONTEXT);
                let mut state = model.state(&StateOptions { context, ..StateOptions::default() });
                let plain = GenerateOptions {
                    max_tokens: Some(most),
                    end_tokens: ends.clone(),
                    ..GenerateOptions::default()
                };
                let mut sampler = sampler(i);
                let written = Generation::new(model, &mut state, &mut sampler, &prompts[i], plain);
                written.expect("a prompt").map(|token| token.expect("a good model")).collect()
            })
            .collect();
        assert!(want.iter().all(|tokens| !tokens.is_empty()));
        // Only one that is alone is guessed for.
        let ways = [(1, None), (8, None), (8, Some(full_pages(CONTEXT, 1)))];
        for (sequences, pages) in ways.into_iter().take(if draft.is_some() { 1 } else { 3 }) {
            let said = Said::default();
            let options =
                EngineOptions { context: CONTEXT, sequences, pages, draft, ..EngineOptions::default() };
            let mut engine = Engine::new(model, options).expect("good options");
            for (i, prompt) in prompts.iter().enumerate() {
                let asked = Request {
                    end_tokens: ends.clone(),
                    sampler: sampler(i),
                    ..request(&said, i, prompt, most)
                };
                engine.add(asked).expect("a good prompt");
                // One that nobody waits behind is guessed for.
                while sequences == 1 && engine.step() {}
            }
            while engine.step() {}
            assert_eq!(engine.preempted() > 0, pages.is_some());
            let mut guessed = 0;
            for (i, want) in want.iter().enumerate() {
                let (tokens, done) = &said.borrow()[&i];
                assert_eq!(tokens, want, "{sequences} at a time, {pages:?} pages: sequence {i}");
                let text = tokenizer.decode(tokens, true).expect("tokens");
                let done = done.expect("it ended");
                guessed += done.guessed;
                if done.finish.is_cut() {
                    continue;
                }
                match i % grammars.len() {
                    0 => {
                        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
                        assert_eq!(value.as_array().map(Vec::len), Some(2), "{text}");
                    }
                    1 => assert_eq!(text.replace(" the dog and the cat", ""), ".", "{text}"),
                    2 => assert!(text.ends_with('.') && text.trim_matches(['a', 'b']) == ".", "{text}"),
                    _ => assert!(["Once upon a time", "The end"].contains(&&text[..]), "{text}"),
                }
            }
            assert!(sequences > 1 || guessed > 5, "{guessed} guesses were right");
        }
    }
}

#[test]
fn beginnings_are_shared_and_kept_until_their_pages_are_wanted() {
    let said = Said::default();
    let pages = full_pages(CONTEXT, 1);
    let options =
        EngineOptions { context: CONTEXT, pages: Some(pages), sequences: 2, ..EngineOptions::default() };
    let mut engine = Engine::new(model(), options).expect("good options");
    let prompt = &prompts(2)[1];
    let long = prompt.len();
    assert!((PAGE + 9..2 * PAGE + 40).contains(&long), "{long} tokens");
    let mut ask = |id: usize, prompt: &[u32]| {
        engine.add(request(&said, id, prompt, 3)).expect("a good prompt");
        while engine.step() {}
        let done = said.borrow()[&id].1.expect("it ended");
        (done.cached, engine.pool().pages() - engine.pool().free())
    };
    let of = |tokens: usize| tokens.div_ceil(PAGE);
    // The last token that was picked has not been run.
    assert_eq!(ask(0, prompt), (0, of(long + 2)));
    assert_eq!(ask(2, prompt), (long - 1, of(long + 2)), "all but the last token, and the same again");
    // In the middle of a page: it is copied, and both remain.
    let mut other = prompt[..PAGE + 9].to_vec();
    other.extend([7; 20]);
    let held = of(long + 2) + of(other.len() + 2) - 1;
    assert_eq!(ask(4, &other), (PAGE + 9, held));
    assert_eq!(ask(6, &prompt[..long - 1]).0, long - 2, "the first one is there still");
    // What was used longest ago goes when pages are wanted: a full context takes all but one.
    let full: Vec<u32> = (0..CONTEXT as u32 - 4).map(|i| 20 + i % 50).collect();
    let (cached, held) = ask(8, &full);
    assert_eq!((cached, held <= pages), (0, true));
    assert_eq!(ask(10, &full).0, full.len() - 1);
    assert_eq!(ask(12, &other).0, 0, "gone");
    // And they say the same with and without.
    let said = said.borrow();
    assert_eq!((&said[&0].0, &said[&4].0), (&said[&2].0, &said[&12].0));
}

#[test]
fn a_beginning_that_another_is_running_is_waited_for_and_run_once() {
    let options = EngineOptions { context: CONTEXT, sequences: 8, ..EngineOptions::default() };
    let prompt: Vec<u32> = (0..3 * PAGE as u32 + 20).map(|i| 20 + i * i % 50).collect();
    // The same four times, one that goes on in another way, and a short one of its own in between.
    let mut all: Vec<Vec<u32>> = vec![prompt.clone(); 4];
    all.push([&prompt[..2 * PAGE], &[7; PAGE + 30]].concat());
    all.insert(2, vec![9; 12]);
    let said = Said::default();
    let mut engine = Engine::new(model(), options.clone()).expect("good options");
    for (id, prompt) in all.iter().enumerate() {
        engine.add(request(&said, id, prompt, 6)).expect("a good prompt");
    }
    while engine.step() {}
    let said = said.borrow();
    let cached: Vec<usize> = said.values().map(|(_, done)| done.expect("it ended").cached).collect();
    assert_eq!(cached, [0, 3 * PAGE, 0, 3 * PAGE, 3 * PAGE, 2 * PAGE]);
    for (id, prompt) in all.iter().enumerate() {
        assert_eq!(said[&id].0, alone(model(), &options, prompt, id, 6), "sequence {id}");
    }
}

#[test]
fn short_prompts_do_not_wait_for_long_ones_and_equal_ones_keep_their_order() {
    let options = EngineOptions { context: 700, sequences: 9, ..EngineOptions::default() };
    // The order in which requests get their first tokens; a step comes behind the first, or behind
    // each.
    let order = |lengths: &[usize], apart: bool| {
        let said = Said::default();
        let mut engine = Engine::new(model(), options.clone()).expect("good options");
        let mut order = Vec::new();
        let mut note = || {
            let seen: Vec<usize> = said.borrow().keys().copied().collect();
            order.extend(seen.into_iter().filter(|id| !order.contains(id)).collect::<Vec<_>>());
        };
        for (id, &len) in lengths.iter().enumerate() {
            // None begins as another.
            let prompt: Vec<u32> = (0..len as u32).map(|i| 30 + 7 * id as u32 + i % 50).collect();
            engine.add(request(&said, id, &prompt, 4)).expect("a good prompt");
            if apart || id == 0 {
                engine.step();
                note();
            }
        }
        while engine.step() {
            note();
        }
        note();
        order
    };
    assert_eq!(order(&[600, 20, 20], false), [1, 2, 0], "two short ones behind a long one");
    assert_eq!(order(&[300, 300, 300, 300], false), [0, 1, 2, 3]);
    // Many short ones that come later do not keep a long one out for ever.
    let many = order(&[400, 100, 100, 100, 100, 100, 100], true);
    assert!(many.iter().position(|&id| id == 0) < Some(3), "{many:?}");
}

#[test]
fn texts_go_on_in_every_step_while_a_prompt_is_run() {
    let options = EngineOptions { context: 700, sequences: 3, ..EngineOptions::default() };
    let mut engine = Engine::new(model(), options.clone()).expect("good options");
    let (said, written) =
        (Said::default(), |said: &Said, id| said.borrow().get(&id).map_or(0, |s| s.0.len()));
    let short = [vec![31; 9], vec![47; 14]];
    for (id, prompt) in short.iter().enumerate() {
        engine.add(request(&said, id, prompt, 60)).expect("a good prompt");
    }
    while written(&said, 1) == 0 {
        engine.step();
    }
    let long: Vec<u32> = (0..600).map(|i| 30 + i * i % 80).collect();
    engine.add(request(&said, 2, &long, 3)).expect("a good prompt");
    let before = [0, 1].map(|id| written(&said, id));
    let mut steps = 0;
    while written(&said, 2) == 0 {
        engine.step();
        steps += 1;
        assert_eq!([0, 1].map(|id| written(&said, id)), before.map(|n| n + steps), "step {steps}");
    }
    // A step has 128 tokens of it.
    assert_eq!(steps, 600usize.div_ceil(128));
    while engine.step() {}
    for (id, prompt) in short.iter().chain([&long]).enumerate() {
        let want = alone(model(), &options, prompt, id, if id == 2 { 3 } else { 60 });
        assert_eq!(said.borrow()[&id].0, want, "sequence {id}");
    }
}

#[test]
fn who_is_not_wanted_leaves_and_what_cannot_be_is_said() {
    let options = EngineOptions { context: CONTEXT, sequences: 2, ..EngineOptions::default() };
    let few = Engine::<Model, Listener>::new(model(), EngineOptions { pages: Some(4), ..options.clone() });
    let want = EngineError::Pages { want: 5, positions: PAGE, context: CONTEXT, pages: 4 };
    assert_eq!(few.expect_err("too few").to_string(), want.to_string());
    let bits = Rate::quarter_bits(8);
    let shape = Shape { heads: 1, head_dim: 2, hidden: 1, classes: 1 };
    let network = Network::random(shape, || 1.0).expect("sizes");
    let learned = Learned::new(bits, [bits; 2], vec![None], 0, network).expect("one class");
    let scheduler = Some(learned.into());
    let other = Engine::<Model, Listener>::new(model(), EngineOptions { scheduler, ..options.clone() });
    let error = other.expect_err("another model").to_string();
    assert!(error.contains("1 heads of keys of 2 numbers"), "{error}");
    let said = Said::default();
    let mut engine = Engine::new(model(), options).expect("good options");
    for (prompt, word) in [
        (&[][..], "at least 1 token"),
        (&[1; CONTEXT][..], "context of 256"),
        (&[1, u32::MAX][..], "vocabulary size"),
    ] {
        let error = engine.add(request(&said, 99, prompt, 1)).expect_err("refused").to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(!engine.step());
    for id in 0..3 {
        let mut impatient = request(&said, id, &[5, 6, 7], 100);
        impatient.output.patience = 4;
        engine.add(impatient).expect("a good prompt");
    }
    assert!(!engine.has_place());
    while engine.step() {}
    for id in 0..3 {
        let (tokens, done) = &said.borrow()[&id];
        assert!((4..12).contains(&tokens.len()) && done.is_none(), "{tokens:?}");
    }
}

#[test]
fn who_stops_a_text_is_told_what_was_run_of_it() {
    let prompt = &prompts(1)[0];
    let options = EngineOptions { context: CONTEXT, ..EngineOptions::default() };
    let mut engine = Engine::new(model(), options).expect("good options");
    for (cached, most) in [(0, 9), (prompt.len() - 1, 9), (prompt.len() - 1, 3)] {
        let mut text =
            Tokens::begin(&mut engine, prompt.clone(), most, Vec::new(), sampler(0)).expect("a prompt");
        let tokens = text.by_ref().take(3).count();
        assert_eq!((tokens, text.done()), (3, None));
        text.stop();
        let done = *text.done().expect("it has begun");
        assert_eq!((done.prompt, done.cached), (prompt.len(), cached));
        // It may have guessed on, or just have ended.
        assert!((3..=most).contains(&done.tokens) && done.guessed < done.tokens, "{done:?}");
        let finish = if done.tokens == most { Finish::MaxTokens } else { Finish::Output };
        assert_eq!(done.finish, finish);
        assert!(text.is_over() && text.next().is_none());
        drop(text);
        assert_eq!(engine.sequences(), 0);
    }
}

#[test]
fn the_longest_common_beginning_is_found() {
    let context = 5 * PAGE;
    let mut state = model().state(&StateOptions { context: Some(context), ..StateOptions::default() });
    model().forward(&mut state, &vec![5; context], &mut Vec::new()).expect("memory");
    let (mut kept, mut prefixes) = (Vec::<Vec<u32>>::new(), Prefixes::<HostMemory>::default());
    let mut seed = 7u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    for round in 0..400 {
        // Often what was there, up to somewhere; places around the ends of pages more often.
        let mut tokens = match kept.len() {
            0 => Vec::new(),
            n => kept[random(n)].clone(),
        };
        let cut = (random(5) * PAGE + [0, 1, PAGE - 1, random(PAGE)][random(4)]).min(tokens.len());
        tokens.truncate(cut);
        let len = (cut + [0, 1, PAGE, random(2 * PAGE)][random(4)]).min(context);
        tokens.resize_with(len, || random(3) as u32);
        let common = |a: &[u32]| a.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let want = kept.iter().map(|kept| common(kept)).max().unwrap_or(0);
        let (pages, found) = prefixes.find(&tokens);
        assert_eq!((found, pages.len()), (want, want.div_ceil(PAGE)), "round {round}");
        if random(2) == 0 {
            prefixes.insert(&tokens, &state.pages()[..len.div_ceil(PAGE)]);
            kept.push(tokens);
        }
    }
    // They are held by the state too.
    assert!(prefixes.evictable() == 0 && !prefixes.evict());
    drop(state);
    assert!(prefixes.evict(), "some page is held once");
}

#[test]
fn states_share_pages_until_one_writes() {
    let pool = KvPool::new(model().config(), KvType::I16, 6);
    let options = StateOptions { context: Some(CONTEXT), ..StateOptions::default() };
    let state = || model().state_in(&pool, &options);
    let forward = |state: &mut State, tokens: &[u32]| {
        let mut hidden = Vec::new();
        model().forward(state, tokens, &mut hidden).map(|()| hidden)
    };
    let tokens: Vec<u32> = (0..150).map(|i| 30 + i % 41).collect();
    let mut first = state();
    forward(&mut first, &tokens).expect("three pages");
    let mut second = state();
    second.share(first.pages(), 150).expect("pages of the pool");
    assert_eq!((pool.free(), second.pages_wanted(1)), (3, 1));
    let mut third = state();
    third.share(&first.pages()[..2], 100).expect("pages of the pool");
    // Both go on differently from the same page, and as if they were alone.
    let mut fresh = model().state(&options);
    forward(&mut fresh, &tokens).expect("memory");
    let want = forward(&mut fresh, &[9, 8, 7]).expect("memory");
    assert_eq!(forward(&mut second, &[9, 8, 7]).expect("a page"), want);
    assert_eq!(forward(&mut first, &[9, 8, 7]).expect("its own"), want);
    let same = forward(&mut third, &tokens[100..]).expect("a page and another");
    fresh.truncate(100);
    assert_eq!(forward(&mut fresh, &tokens[100..]).expect("its own"), same);
    assert_eq!(pool.free(), 0);
    // A full pool refuses and leaves all as it was.
    let full = forward(&mut second, &[5; 60]).expect_err("no page").to_string();
    assert!(full.contains("all 6 pages"), "{full}");
    assert_eq!(second.len(), 153);
    drop(third);
    assert_eq!(forward(&mut second, &[5; 60]).expect("a page").len(), 60 * model().config().hidden_size);
    // Pages of another pool, and as many as do not fit the tokens.
    let mut other = model().state(&options);
    assert!(other.share(first.pages(), first.len()).is_err());
    let mut other = state();
    assert!(other.share(first.pages(), 1).is_err() && other.share(first.pages(), 1000).is_err());
    assert!(other.is_empty());
}

/// Remembers the logit of each token that is scored.
struct Scorer(usize, Rc<RefCell<BTreeMap<usize, Scored>>>);

type Scored = (Vec<(u32, f32)>, Option<Done>);

impl Output for Scorer {
    fn token(&mut self, _: u32) -> Result<ControlFlow<()>, Error> {
        Ok(ControlFlow::Continue(()))
    }

    fn scored(&mut self, token: u32, logits: &[f32]) {
        self.1.borrow_mut().entry(self.0).or_default().0.push((token, logits[token as usize]));
    }

    fn done(self, done: Done) {
        self.1.borrow_mut().entry(self.0).or_default().1 = Some(done);
    }

    fn failed(self, error: Error) {
        panic!("sequence {}: {error}", self.0);
    }
}

#[test]
fn every_token_is_scored_once_whatever_else_runs() {
    let prompts = prompts(6);
    let one = full_pages(CONTEXT, 1);
    for (pages, preempts) in [(None, false), (Some(one), true)] {
        let options = EngineOptions { context: CONTEXT, pages, sequences: 6, ..EngineOptions::default() };
        let mut engine = Engine::new(model(), options).expect("good options");
        let all = Rc::new(RefCell::new(BTreeMap::new()));
        // The first one's pages are there for the others, which still are run from the beginning.
        for (id, prompt) in prompts.iter().chain(&prompts[..2]).enumerate() {
            let request = Request {
                prompt: prompt.clone(),
                score_prompt: id % 3 < 2,
                hidden: false,
                max_tokens: if id == 1 { 0 } else { 40 },
                end_tokens: Vec::new(),
                sampler: sampler(id),
                output: Scorer(id, Rc::clone(&all)),
            };
            engine.add(request).expect("a good prompt");
            if id == 0 {
                while engine.step() {}
            }
        }
        while engine.step() {}
        assert_eq!(engine.preempted() > 0, preempts);
        for (id, prompt) in prompts.iter().chain(&prompts[..2]).enumerate() {
            let (scored, done) = &all.borrow()[&id];
            let first = if id % 3 < 2 { 1 } else { prompt.len() };
            let done = done.expect("it ended");
            assert_eq!(
                (scored.len(), done.tokens),
                (prompt.len() - first + done.tokens, [40, 0][usize::from(id == 1)])
            );
            // Again, all at once.
            let mut tokens = prompt[..first].to_vec();
            tokens.extend(scored.iter().map(|(token, _)| token));
            assert!(tokens.starts_with(prompt));
            let mut state =
                model().state(&StateOptions { context: Some(CONTEXT), ..StateOptions::default() });
            let (mut hidden, mut logits) = (Vec::new(), Vec::new());
            model().forward(&mut state, &tokens, &mut hidden).expect("a good model");
            model().logits(&mut state, &hidden, &mut logits).expect("a good model");
            let rows = logits.chunks(model().config().vocab_size).skip(first - 1);
            for (at, ((token, logit), row)) in scored.iter().zip(rows).enumerate() {
                assert_eq!(*logit, row[*token as usize], "sequence {id}, token {at}");
            }
        }
    }
    // A prompt that fills the context leaves no room for a token, and none was asked for.
    let options = EngineOptions { context: CONTEXT, ..EngineOptions::default() };
    let mut engine = Engine::new(model(), options).expect("good options");
    let said = Said::default();
    engine.add(request(&said, 0, &[5; CONTEXT], 0)).expect("a good prompt");
    while engine.step() {}
    let done = said.borrow()[&0].1.expect("it ended");
    assert_eq!((done.prompt, done.tokens, done.finish), (CONTEXT, 0, Finish::MaxTokens));
}
