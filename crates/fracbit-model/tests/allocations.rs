//! A step of decoding takes no memory once one of its kind has run.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test's helpers fail by panicking and report on stderr"
)]
#![expect(unsafe_code, reason = "an allocator that counts")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{F32, references};
use fracbit_model::{GenerateOptions, Generation, KvType, RotationMode, SampleConfig, Sampler, StateOptions};

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

struct Counting;

// SAFETY: every call goes to the system's allocator as it is.
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
static COUNTING: Counting = Counting;

#[test]
fn decoding_allocates_nothing() {
    const TOKENS: usize = 24;
    let off = SampleConfig { temperature: 1.5, seed: 5, ..SampleConfig::default() };
    let samplings = [
        SampleConfig::default(),
        off,
        SampleConfig { top_k: 5, ..off },
        SampleConfig { top_p: 0.9, ..off },
        SampleConfig { min_p: 0.05, repetition_penalty: 1.1, ..off },
    ];
    let pool = pool(2);
    for r in references().unwrap_or_default() {
        let model = r.model(RotationMode::Fold);
        for (sampling, kv) in samplings.into_iter().zip([KvType::I16, KvType::F32].into_iter().cycle()) {
            let counts = pool.install(|| {
                let mut state = model.state(&StateOptions { kv, ..F32 });
                let mut sampler = Sampler::new(sampling).unwrap();
                let options = GenerateOptions { max_tokens: Some(TOKENS), ..GenerateOptions::default() };
                let mut generation =
                    Generation::new(&model, &mut state, &mut sampler, &r.tokens[..9], options).unwrap();
                let mut counts = [0; TOKENS];
                for count in &mut counts {
                    let before = COUNT.load(Ordering::Relaxed);
                    generation.next().unwrap().unwrap();
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
