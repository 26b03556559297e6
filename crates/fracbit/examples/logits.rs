//! Logits of some tokens, for comparisons with other programs: `logits MODEL OUT TOKEN...` writes
//! (token, vocabulary) as little-endian f32.
//!
//! The cache is in single precision, so that whatever differs is the weights or the arithmetic.

use std::{io::Write, path::Path};

use fracbit::{Opened, kernels};
use fracbit_model::{KvType, StateOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, out, tokens @ ..] = &args[..] else { return Err("usage: logits MODEL OUT TOKEN...".into()) };
    let tokens: Vec<u32> = tokens.iter().map(|token| token.parse()).collect::<Result<_, _>>()?;
    let model = Opened::new(Path::new(model))?.model(&kernels()?, false)?;
    let mut state = model.state(&StateOptions { kv: KvType::F32, ..StateOptions::default() });
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    model.forward(&mut state, &tokens, &mut hidden)?;
    model.logits(&mut state, &hidden, &mut logits)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    std::fs::File::create(out)?.write_all(&bytes)?;
    Ok(())
}
