#![no_main]

use fracbit_fuzz::CONFIG;

libfuzzer_sys::fuzz_target!(init: CONFIG.begin(), |bytes: &[u8]| (CONFIG.body)(bytes));
