//! The decode loop allocates nothing once it has run a few tokens.
//!
//! A binary of its own, whose allocator counts on the threads of a pool: the harness allocates when
//! it reports that a test takes long.

#![expect(unsafe_code, reason = "a global allocator is unsafe by nature; this one counts and passes on")]

use fracbit::Opened;
use fracbit_base::Scheme;
use fracbit_io::ModelConfig;
use fracbit_kernels::{Isa, Kernels, PackedMatrix, cases};
use fracbit_model::{
    FloatId, GenerateOptions, Generation, KvType, Linear, LinearId, Model, ModelBuilder, OnlineRotations,
    RotationMode, SampleConfig, Sampler, StateOptions,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether allocations of this thread count.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

fn count_one() {
    // A thread that is ending has no flag any more.
    if COUNTED.try_with(Cell::get).unwrap_or(false) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

/// Threads whose allocations count.
fn pool(threads: usize) -> rayon::ThreadPool {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
    builder.start_handler(|_| COUNTED.set(true)).build().expect("threads to start")
}

// SAFETY: everything is the system allocator's; a counter changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the pools of others would count, too.
static TURN: Mutex<()> = Mutex::new(());

/// What a model has of its own, with an MLP and with experts.
const KINDS: [&str; 2] = [
    r#""model_type": "llama", "intermediate_size": 768"#,
    r#""model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 24, "num_experts_per_tok": 3"#,
];

/// Two blocks of random codes, with the rotation that folding leaves.
fn model(kind: &str, scheme: &str, kernels: &Kernels) -> Model {
    let json = r#""hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true"#;
    let json = format!("{{{kind}, {json}}}");
    let config = ModelConfig::parse(json.as_bytes(), "config.json".as_ref()).expect("a configuration");
    let rotations = OnlineRotations::new(&config, RotationMode::Fold, 0).expect("widths that can be rotated");
    let mut builder = ModelBuilder::new(config.clone(), rotations).expect("a head of 64");
    let scheme: Scheme = scheme.parse().expect("a scheme");
    for (seed, id) in (1..).zip(LinearId::all(&config)) {
        let shape = id.shape(&config);
        let books = cases::codebooks(scheme, 0, 127);
        let packed = cases::Packed::random(scheme, shape, books, shape.cols, seed);
        let matrix = PackedMatrix::new(kernels, &packed.view().expect("parts that fit"));
        builder.set(id, Linear::packed(matrix, None).expect("no bias")).expect("a matrix of the model");
    }
    for id in FloatId::all(&config) {
        // Routers that give different tokens different experts.
        let values = match id {
            FloatId::Router(i) => cases::activations(id.width(&config), i as u64),
            _ => vec![1.0; id.width(&config)],
        };
        builder.set_floats(id, values).expect("a norm or a router of the model");
    }
    builder.build().expect("all parts").with_kernels(kernels)
}

#[test]
fn decoding_allocates_nothing() {
    let kernels = fracbit::kernels().expect("FRACBIT_ISA unset or good");
    if kernels.vectors().isa() == Isa::Scalar {
        fracbit_tests::skip("allocations of decoding", "the scalar reference allocates by design");
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let pools = [1, 2, 3].map(pool);
    // A thread that starts late would count.
    pools.iter().for_each(|pool| drop(pool.broadcast(|_| ())));
    for (kind, scheme) in KINDS.into_iter().flat_map(|kind| [(kind, "tcq-fast-2"), (kind, "half-tcq-2.75")]) {
        let model = model(kind, scheme, &kernels);
        for pool in &pools {
            // Chunks of positions are tasks of their own from 512 on.
            for (context, batch, kv) in
                [(5, 1, KvType::I16), (600, 1, KvType::I16), (600, 3, KvType::I16), (600, 3, KvType::I6)]
            {
                let allocations = pool.install(|| count(&model, context, batch, kv));
                let threads = pool.current_num_threads();
                assert_eq!(
                    allocations, 0,
                    "{kind}, {scheme}, {threads} threads, context {context}, {batch} sequences, {kv:?}"
                );
            }
        }
    }
}

/// Allocations of 30 steps, after three that do not count.
fn count(model: &Model, context: usize, batch: usize, kv: KvType) -> usize {
    let options = StateOptions { context: Some(context + 40), kv, ..StateOptions::default() };
    let mut states: Vec<_> = (0..batch).map(|_| model.state(&options)).collect();
    let mut sampler = Sampler::new(SampleConfig { temperature: 0.0, ..SampleConfig::default() })
        .expect("a good configuration");
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    let prompt: Vec<u32> = (0..context as u32).map(|i| i * 7 % 400).collect();
    for state in &mut states {
        state.reserve(context + 40).expect("memory");
        model.forward(state, &prompt, &mut hidden).expect("a prompt that fits");
    }
    assert!(COUNT.load(Ordering::SeqCst) > 0, "allocations are counted");
    let (mut tokens, ones) = (vec![1; batch], vec![1; batch]);
    let mut before = 0;
    for step in 0..33 {
        if step == 3 {
            before = COUNT.load(Ordering::SeqCst);
        }
        model.forward_batch(&mut states, &tokens, &ones, &mut hidden).expect("room for all steps");
        model.logits(&mut states[0], &hidden, &mut logits).expect("hidden states of this model");
        for (token, logits) in tokens.iter_mut().zip(logits.chunks_exact(400)) {
            *token = sampler.sample(logits, &[]).expect("finite logits");
        }
    }
    COUNT.load(Ordering::SeqCst) - before
}

/// Dense reference checkpoints of every architecture, token by token with several samplers.
#[test]
fn generating_allocates_nothing() {
    const TOKENS: usize = 24;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let off = SampleConfig { temperature: 1.5, seed: 5, ..SampleConfig::default() };
    let samplings = [
        SampleConfig::default(),
        off,
        SampleConfig { top_k: 5, ..off },
        SampleConfig { top_p: 0.9, ..off },
        SampleConfig { min_p: 0.05, repetition_penalty: 1.1, ..off },
    ];
    let pool = pool(2);
    for r in fracbit_tests::references() {
        let source = Opened::new(&r.dir).and_then(|opened| opened.source(RotationMode::Fold, 42));
        let model = Model::from_source(&source.expect("a good checkpoint")).expect("a model");
        for (sampling, kv) in samplings.into_iter().zip([KvType::I16, KvType::F32].into_iter().cycle()) {
            let counts = pool.install(|| {
                let options = StateOptions { context: Some(64), chunk: 128, kv, ..StateOptions::default() };
                let mut state = model.state(&options);
                let mut sampler = Sampler::new(sampling).expect("a good configuration");
                let options = GenerateOptions { max_tokens: Some(TOKENS), ..GenerateOptions::default() };
                let mut generation =
                    Generation::new(&model, &mut state, &mut sampler, &r.tokens[..9], options)
                        .expect("a prompt that fits");
                let mut counts = [0; TOKENS];
                for count in &mut counts {
                    let before = COUNT.load(Ordering::Relaxed);
                    generation.next().expect("more to come").expect("a token");
                    *count = COUNT.load(Ordering::Relaxed) - before;
                }
                counts
            });
            // The prompt and the first step grow what they work in.
            assert!(counts[0] > 0, "allocations are counted");
            assert_eq!(counts[2..], [0; TOKENS - 2], "{} {sampling:?} {kv:?}", r.name);
        }
    }
}
