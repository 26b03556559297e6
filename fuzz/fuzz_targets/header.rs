#![no_main]

use fracbit_fuzz::HEADER;

libfuzzer_sys::fuzz_target!(init: HEADER.begin(), |bytes: &[u8]| (HEADER.body)(bytes));
