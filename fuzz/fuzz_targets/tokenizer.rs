#![no_main]

libfuzzer_sys::fuzz_target!(
    init: {
        let stop = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // Those of this crate are caught where it is called.
            if !panic.location().is_some_and(|at| at.file().contains("/tokenizers-")) {
                stop(panic);
            }
        }));
    },
    |bytes: &[u8]| fracbit_fuzz::run("tokenizer", bytes)
);
