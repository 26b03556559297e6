#![no_main]

use fracbit_fuzz::PROFILE;

libfuzzer_sys::fuzz_target!(init: PROFILE.begin(), |bytes: &[u8]| (PROFILE.body)(bytes));
