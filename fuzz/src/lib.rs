//! Targets for a fuzzer, each with a function that reads bytes and input to begin with.

mod bodies;

pub use bodies::{CONFIG, GGUF, HEADER, MODEL, PLAN, PROFILE, REQUEST, TEMPLATE, TOKENIZER, Target};

impl Target {
    /// With `FRACBIT_SEEDS=FOLDER`, writes what a search begins with there and ends the program.
    pub fn begin(&self) {
        let Some(folder) = std::env::var_os("FRACBIT_SEEDS").map(std::path::PathBuf::from) else { return };
        std::fs::create_dir_all(&folder).expect("a writable folder");
        for (i, seed) in (self.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{i}")), seed).expect("a writable folder");
        }
        std::process::exit(0);
    }
}
