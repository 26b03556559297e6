#![no_main]

use fracbit_fuzz::GGUF;

libfuzzer_sys::fuzz_target!(init: GGUF.begin(), |bytes: &[u8]| (GGUF.body)(bytes));
