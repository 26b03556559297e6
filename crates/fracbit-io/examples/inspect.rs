//! Prints what a model directory holds: `cargo run -p fracbit-io --example inspect -- DIR`.
#![expect(clippy::print_stdout, reason = "printing is the purpose of the program")]

use fracbit_io::{Checkpoint, Error, ModelConfig, Tokenizer, verify};

fn main() -> Result<(), Error> {
    let Some(dir) = std::env::args().nth(1) else {
        println!("usage: inspect DIR");
        return Ok(());
    };
    let config = ModelConfig::from_dir(&dir)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let tokenizer = Tokenizer::from_dir(&dir, Some(&config))?;
    println!(
        "{}: {} layers of width {}",
        config.arch.class_name(),
        config.num_hidden_layers(),
        config.hidden_size
    );
    println!("{} tokens, text ends with {:?}", tokenizer.vocab_size(), tokenizer.eos_ids());
    for (name, info) in checkpoint.iter() {
        println!("{name:60} {} {:?}", info.dtype, info.shape);
    }
    println!("{}", verify(&dir)?);
    Ok(())
}
