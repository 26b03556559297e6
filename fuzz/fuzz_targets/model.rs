#![no_main]

use fracbit_fuzz::MODEL;

libfuzzer_sys::fuzz_target!(init: MODEL.begin(), |bytes: &[u8]| (MODEL.body)(bytes));
