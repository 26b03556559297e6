#![no_main]

use fracbit_fuzz::REQUEST;

libfuzzer_sys::fuzz_target!(init: REQUEST.begin(), |bytes: &[u8]| (REQUEST.body)(bytes));
