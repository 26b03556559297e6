#![no_main]

use fracbit_fuzz::TOKENIZER;

libfuzzer_sys::fuzz_target!(
    init: {
        TOKENIZER.begin();
        let stop = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // Those of this crate are caught where it is called.
            if !panic.location().is_some_and(|at| at.file().contains("/tokenizers-")) {
                stop(panic);
            }
        }));
    },
    |bytes: &[u8]| (TOKENIZER.body)(bytes)
);
