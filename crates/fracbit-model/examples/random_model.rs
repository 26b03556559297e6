//! Builds a Llama with random weights and times a prompt and some tokens: `random_model [HIDDEN]
//! [LAYERS]`.

#![expect(clippy::print_stdout, reason = "an example's output")]

use std::time::Instant;

use fracbit_io::ModelConfig;
use fracbit_model::{
    FloatId, GenerateOptions, Generation, Linear, LinearId, ModelBuilder, OnlineRotations, RotationMode,
    SampleConfig, Sampler, StateOptions,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |a| a.parse());
    let (hidden, layers) = (number(256)?, number(4)?);
    let (inner, heads) = (hidden * 4, hidden / 32);
    let json = format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "intermediate_size": {inner}, "num_hidden_layers": {layers},
        "num_attention_heads": {heads}, "num_key_value_heads": {heads}, "vocab_size": 4096, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true}}"#
    );
    let config = ModelConfig::parse(json.as_bytes(), "config.json".as_ref())?;

    let mut builder =
        ModelBuilder::new(config.clone(), OnlineRotations::new(&config, RotationMode::None, 0)?)?;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for id in LinearId::all(&config) {
        let shape = id.shape(&config);
        // Uniform numbers of variance 1 / inputs: every layer keeps the size of its input.
        let width = (12.0 / shape.cols as f32).sqrt();
        let uniform = |bits: u32| bits as f32 / u32::MAX as f32 - 0.5;
        let weights = (0..shape.len()).map(|_| uniform(rng.next_u32()) * width).collect();
        builder.set(id, Linear::dense(shape, weights, None)?)?;
    }
    for id in FloatId::all(&config) {
        builder.set_floats(id, vec![1.0; id.width(&config)])?;
    }
    let model = builder.build()?;
    println!("{:.1} MB of weights", model.weight_bytes() as f64 / 1e6);

    let prompt: Vec<u32> = (0..128).collect();
    let mut state = model.state(&StateOptions::default());
    let mut sampler = Sampler::new(SampleConfig { temperature: 1.0, top_k: 50, ..SampleConfig::default() })?;
    let options = GenerateOptions { max_tokens: Some(33), ..GenerateOptions::default() };
    let mut generation = Generation::new(&model, &mut state, &mut sampler, &prompt, options)?;
    let start = Instant::now();
    generation.next().transpose()?;
    println!("prompt: {:.0} tokens/s", prompt.len() as f64 / start.elapsed().as_secs_f64());
    let start = Instant::now();
    let tokens = generation.collect::<Result<Vec<u32>, _>>()?;
    println!(
        "decode: {:.0} tokens/s: {:?}",
        tokens.len() as f64 / start.elapsed().as_secs_f64(),
        &tokens[..8]
    );
    Ok(())
}
