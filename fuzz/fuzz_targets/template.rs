#![no_main]

use fracbit_fuzz::TEMPLATE;

libfuzzer_sys::fuzz_target!(init: TEMPLATE.begin(), |bytes: &[u8]| (TEMPLATE.body)(bytes));
