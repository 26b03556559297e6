#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fracbit_fuzz::run("config", bytes));
