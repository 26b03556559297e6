//! The server in front of a model on a device (the host shim).

use crate::client::{COMPLETIONS, ask, complete, loaded, model, options, serve, serve_loaded, tokenizer};
use fracbit::Opened;
use fracbit_kernels_cuda::{Limits, shim::Shim};
use fracbit_server::Loaded;
use serde_json::json;
use std::{path::Path, thread};

#[test]
fn a_model_on_a_device_is_served() {
    // Written beside the one of the other tests.
    let _ = model();
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let limits = Limits { multiprocessors: 4, shared: 99 << 10 };
    let device: &Shim = Box::leak(Box::new(Shim::start(place, limits).expect("the shim builds and starts")));
    let opened = Opened::new(&place.join("server-nuq-4")).expect("a directory we wrote");
    let on_device = opened.on_device(device, true).expect("a model for a device");
    let serving = serve_loaded(Loaded { context: 64, ..loaded(on_device, tokenizer(None)) }, options());
    let address = serving.address;
    let body = |prompt: &str| json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 });
    let prompts = ["Once upon a time", "The little dog", "Tom saw a big red ball and"];
    let together: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(move || complete(address, &body(prompt)))).collect();
        threads.into_iter().map(|t| t.join().expect("an answer")).collect()
    });
    for (prompt, text) in prompts.iter().zip(&together) {
        assert_eq!(complete(address, &body(prompt)), *text, "alone: {prompt}");
    }
    // What the processor writes, here without near ties.
    let processor = serve(options(), tokenizer(None));
    let first = complete(processor.address, &body(prompts[0]));
    assert_eq!(first, together[0]);
    // Hidden states stay there, which is said.
    let refused = ask(address, "POST /v1/embeddings", "", &json!({ "input": "a" }));
    assert!(refused.status == 501 && refused.body.contains("device"), "{refused:?}");
    // A beginning that was run before is kept on the device.
    let again = ask(address, COMPLETIONS, "", &body(prompts[0])).json();
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.is_some_and(|n| n > 0), "{again}");
}
