#![no_main]

use fracbit_fuzz::PLAN;

libfuzzer_sys::fuzz_target!(init: PLAN.begin(), |bytes: &[u8]| (PLAN.body)(bytes));
